"""The report: what a run found, as one page and as figures.

outcomes        what the run predicted for its test rows, and which of them to show
predicted_rows  each test row once, by name, as a table to sort
layer_analysis  what layers and head do to the nodes
depth           the score against the number of layers kept
*_charts        figures; attention_scale colours nodes, molecules and vector draw molecules
sections, page  the page
building        ``report``: all of it
"""

from __future__ import annotations

from .building import Report as Report
from .building import report as report

__all__ = ["Report", "report"]
