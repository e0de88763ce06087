"""What every room may use; none of it knows of graphs or models.

``files.py`` (atomic writes, hashes), ``decoding.py`` (strict JSON), ``specifications.py`` and
``user_modules.py`` (which code a name may lead to, and importing it), ``memory.py``,
``devices.py``, ``text.py`` (numbers for readers), ``levels.py``, ``lazy.py``.
"""
