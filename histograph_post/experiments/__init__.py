"""Experiments: a cache (or graphs) and options come in, a run folder goes out.

Read ``options.py`` first, what every experiment takes, and ``stage.py``, what every stage has in
common and the one function that runs it (its fits side by side, by ``parallel.py``). Then a stage:
``head_training.py``, ``finetuning.py``, ``pretraining.py``, ``end_to_end.py``.
"""
