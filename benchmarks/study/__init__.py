"""The study of readouts: one file lists cells and readouts, one table has every result.

Read ``plan.py`` first (what ``study.toml`` says), then ``running.py`` (a cell becomes rows of the
table; ``materials.py`` makes its caches) and ``page.py`` (the table becomes a page).
"""
