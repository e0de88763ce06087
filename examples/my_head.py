"""histograph train-head mutag.cache --head my_head.py:MeanAndMax -o runs/mine

A readout of one's own is one class. `build` makes its modules; its arguments are the options of the
readout (`--head-args history_layers=2`). `pool_graphs` turns the nodes of each graph into one row.
Classifier, checks, saving, loading and tables come with the base class.
"""

import torch
from torch import Tensor

from histograph_post.heads import Graphs, History, Readout


class MeanAndMax(Readout):
    """Mean and maximum over the nodes, of every layer."""

    def build(self, *, history_layers: int | None = None) -> None:
        self.keep_layers(history_layers)  # the last so many; None keeps all
        self.finish(2 * sum(self.kept_dims))  # the width of a row of pool_graphs

    def pool_graphs(self, history: History, graphs: Graphs, edge_index: Tensor | None) -> Tensor:
        rows = torch.cat(self.layers(history), dim=1)  # [num_nodes, sum of the widths]
        return torch.cat([graphs.mean(rows), graphs.max(rows)], dim=1)  # [num_graphs, 2 * widths]
