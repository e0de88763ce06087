"""The report: what a run found, as one page and as figures.

outcomes        what the run predicted for its test rows, and which of them to show
layer_analysis  what layers and head do to the nodes
*_charts        figures
sections, page  the page
building        ``report``: all of it
"""

from __future__ import annotations

from .building import Report as Report
from .building import report as report

__all__ = ["Report", "report"]
