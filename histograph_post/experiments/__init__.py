"""Experiments: a cache (or graphs) and options come in, a run folder goes out.

Read ``options.py`` first, what every experiment takes, then ``stage.py``, what every stage has in
common, and ``running.py``, the one function that runs it: its fits side by side (``parallel.py``)
or on a cluster (``cluster.py``). Then a stage: ``head_training.py`` on a cache, ``pretraining.py``,
and with a head ``end_to_end.py`` and ``finetuning.py``, which share ``backbones.py``.
"""
