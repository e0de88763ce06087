"""Runs: a folder that training wrote comes in; predictions, exports and summaries go out.

Read ``run.py`` first: what a run folder holds, and ``Run``, which reads it. ``saved_head.py`` and
``saved_backbone.py`` build again what was trained; ``predictor.py`` makes one module of it, which
``predicting.py`` (predict, embed) and ``exporting.py`` use.
"""
