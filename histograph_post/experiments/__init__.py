"""Experiments: a cache (or graphs) and options come in, a run folder goes out.

Read ``options.py`` first, what every experiment takes, then ``stage.py``: what every stage has in
common, and the function that runs it, its fits side by side (``parallel.py``, ``workers.py``). Then
a stage: ``head_training.py`` on a cache, ``search.py`` over its options, and those that train a
backbone (``backbones.py``): ``pretraining.py``, ``end_to_end.py`` and ``finetuning.py``.
"""
