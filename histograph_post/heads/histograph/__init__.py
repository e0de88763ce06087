"""HistoGraph, the readout of the paper: a history of layers goes in, an output per graph comes out.

Read ``head.py`` first, beside the paper's algorithm: it has the numbered steps, and is complete and
correct alone. ``config.py`` lists the options, ``layer_attention.py`` holds steps 1 to 5 (and the
normalisations), ``node_attention.py`` step 6 (``large_graphs.py`` its forms for large graphs),
``mixing.py`` what is mixed in steps 8 and 9. ``accelerate.py`` and its ``kernels.py`` are the fast
path on a CPU: training calls the head through it, and nothing else knows what it computes.
"""

from ..base import Explanation
from ..registry import PAPER_FORM
from .config import HistoGraphConfig
from .head import HistoGraphHead

__all__ = ["PAPER_FORM", "Explanation", "HistoGraphConfig", "HistoGraphHead"]
