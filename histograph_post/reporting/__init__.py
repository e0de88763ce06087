"""The report: a run and its caches become one HTML page, and figures as files.

Read ``building.py`` first: :func:`report`, what it reads, and the order of the page. ``scores``,
``outcomes``, ``prediction_charts``, ``layer_charts``, ``depth`` and ``drawings`` make the sections;
``layer_analysis`` measures the layers and the head on test graphs; ``figures`` and ``page`` set the
style of all of them.
"""

from __future__ import annotations

from .building import Report as Report
from .building import report as report

__all__ = ["Report", "report"]
