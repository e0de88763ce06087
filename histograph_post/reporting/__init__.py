"""The report: what a run found, as one page and as figures.

record          the run folder, read (see :mod:`..run_summary`)
caches          the caches it was trained on, if they are still there
sampling        a bounded part of them
layer_analysis  what layers and head do to the nodes
*_charts        figures
sections, page  the page
building        ``report``: all of it
"""

from __future__ import annotations

from .building import Report as Report
from .building import report as report

__all__ = ["Report", "report"]
