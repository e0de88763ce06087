"""The report: what a run found, as one page and as figures.

outcomes        what the run predicted for its test rows: fold by fold, as a table, as examples
layer_analysis  what layers and head do to the nodes
depth           the score against the number of layers kept
*_charts        figures; molecules draws molecules, figures has the one look of all of them
sections, page  the page
building        ``report``: all of it
"""

from __future__ import annotations

from .building import Report as Report
from .building import report as report

__all__ = ["Report", "report"]
