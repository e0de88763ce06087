"""The report: what a run found, as one page and as figures.

Read ``building.py`` first: :func:`report`, what it reads of a run and its caches, and in which
order the page shows it. ``scores``, ``outcomes``, ``prediction_charts``, ``layer_charts``,
``depth`` and ``drawings`` make the parts; ``layer_analysis`` measures what layers and head do to
nodes; ``figures`` and ``page`` have the one look of all of them.
"""

from __future__ import annotations

from .building import Report as Report
from .building import report as report

__all__ = ["Report", "report"]
