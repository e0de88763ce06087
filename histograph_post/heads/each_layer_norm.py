"""Per-layer normalisation of a history whose network is still being trained from scratch.

Statistics of the training rows, as :class:`~.standardize.Standardizer` keeps them, describe a
network that stands still. One that starts from random weights leaves them behind within an epoch,
so every row is brought to one scale by itself, and a graph's output stays its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F


class EachLayerNorm(nn.Module):
    """Centre and scale the row of every node in every layer; nothing to learn, nothing to keep.

    Args:
        in_dims: Width of each layer.
    """

    def __init__(self, in_dims: Sequence[int]) -> None:
        super().__init__()
        self.in_dims = tuple(in_dims)

    def forward(self, layers: Sequence[Tensor]) -> list[Tensor]:
        """Return the layers, each ``[num_nodes, D_l]``, with mean 0 and deviation 1 per row."""
        return [
            F.layer_norm(layer, (width,)) for layer, width in zip(layers, self.in_dims, strict=True)
        ]

    def __repr__(self) -> str:
        return f"EachLayerNorm({len(self.in_dims)} layers)"
