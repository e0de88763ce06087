"""Training: a source of batches and a network come in, the weights of the best epoch go out.

Read ``loop.py`` first: the one training loop. ``batches.py`` makes batches of cached activations
(of a ``loaded_cache.py``), ``networks.py`` batches of graphs for a backbone that is trained as
well; ``solving.py`` fits linear readouts without gradient steps.
"""
