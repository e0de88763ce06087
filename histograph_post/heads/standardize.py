"""Standardisation, always before a head and never inside it: every layer is brought to one scale.

A :class:`Standardizer` uses statistics of the training rows only; :class:`EachLayerNorm` is for a
network that is still being trained from scratch and has no such statistics.

Layers of one network differ in scale by orders of magnitude, and many channels of a pretrained
network hardly ever vary. Every channel is centred and divided by its standard deviation, but never
by less than a fraction of its layer's typical one: in a channel that is constant on the training
rows, a rounding error, or the first test graph in which it varies, must not become a huge value.

:class:`Limits` does the same for what is pooled: a graph unlike all training graphs must not
become a huge prediction.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..errors import DataError
from .history import History, check_layers

#: Rows are converted to float64 in pieces of about this many bytes.
PIECE_BYTES = 1 << 21

#: A smaller scale counts as zero: its inverse would leave the range of float32.
SMALLEST_SCALE = 1e-30


class Standardizer(nn.Module):
    """Centre and scale every channel of every layer: ``(x - mean) / scale``.

    ``scale`` is the largest of the channel's standard deviation, ``floor`` times the root mean
    square of its layer's standard deviations, and four rounding errors of its layer's typical
    value; 1 where all of these are zero. Before :meth:`fit` it changes nothing. The statistics are
    buffers, so they travel in the state dict.

    Args:
        in_dims: Width of each layer.
        floor: Smallest scale of a channel, as a fraction of its layer's typical one.
    """

    mean: Tensor
    scale: Tensor
    num_rows: Tensor

    def __init__(self, in_dims: Sequence[int], *, floor: float = 0.1) -> None:
        super().__init__()
        self.in_dims = tuple(in_dims)
        self.floor = floor
        self.register_buffer("mean", torch.zeros(sum(self.in_dims)))
        self.register_buffer("scale", torch.ones(sum(self.in_dims)))
        self.register_buffer("num_rows", torch.zeros((), dtype=torch.long))

    @property
    def is_fitted(self) -> bool:
        """Whether there are statistics to apply."""
        # A program that is exported cannot ask; without statistics they are 0 and 1 anyway.
        return torch.compiler.is_exporting() or bool(self.num_rows > 0)

    @torch.no_grad()
    def fit(self, batches: Iterable[History]) -> Standardizer:
        """Take the statistics of all rows of ``batches`` in one pass and return ``self``.

        Args:
            batches: Histories, each ``[num_nodes, L, D]`` or one ``[num_nodes, D_l]`` per layer.
        """
        count = 0
        mean = torch.zeros(sum(self.in_dims), dtype=torch.float64)  # [sum of widths]
        squares = torch.zeros_like(mean)  # sum of squared deviations from the mean
        precision = 0.0
        for history in batches:
            for rows in self._pieces(history):
                precision = max(precision, torch.finfo(rows.dtype).eps)
                piece = rows.cpu().to(torch.float64)  # [rows, sum of widths]
                piece_mean = piece.mean(0)
                total = count + len(piece)
                shift = piece_mean - mean
                # Chan et al.: merge two (count, mean, squares) without losing digits.
                squares += (piece - piece_mean).square_().sum(0)
                squares += shift.square() * (count * len(piece) / total)
                mean += shift * (len(piece) / total)
                count = total
        if count == 0:
            raise DataError("standardisation: found no training rows, expected at least one")
        if not bool(torch.isfinite(mean).all() and torch.isfinite(squares).all()):
            raise DataError(
                "standardisation: found NaN or infinity, expected finite activations; "
                "`histograph verify` checks a cache"
            )
        self.mean.copy_(mean)
        self.scale.copy_(self._floored(mean, squares / count, precision))
        self.num_rows.fill_(count)
        return self

    def _pieces(self, history: History) -> Iterable[Tensor]:
        """Yield the rows of a history, all layers side by side: ``[rows, sum of widths]``."""
        num_rows, _ = check_layers(history, self.in_dims)
        step = max(1, PIECE_BYTES // (8 * max(1, sum(self.in_dims))))
        for start in range(0, num_rows, step):
            if isinstance(history, Tensor):
                yield history[start : start + step].flatten(1)
            else:
                yield torch.cat([layer[start : start + step] for layer in history], dim=1)

    def _floored(self, mean: Tensor, variance: Tensor, precision: float) -> Tensor:
        scales = []
        for layer_mean, layer_variance in zip(
            mean.split(self.in_dims), variance.split(self.in_dims), strict=True
        ):
            typical = layer_variance.mean().sqrt()
            rounding = 4 * precision * (layer_variance + layer_mean.square()).mean().sqrt()
            smallest = torch.maximum(self.floor * typical, rounding)
            scale = torch.maximum(layer_variance.sqrt(), smallest)
            scales.append(torch.where(scale > SMALLEST_SCALE, scale, 1.0))
        return torch.cat(scales)  # [sum of widths]

    def statistics(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return mean and scale of one layer, each ``[D_l]``."""
        return self.mean.split(self.in_dims)[layer], self.scale.split(self.in_dims)[layer]

    @overload
    def forward(self, layers: Tensor) -> Tensor: ...

    @overload
    def forward(self, layers: Sequence[Tensor]) -> list[Tensor]: ...

    def forward(self, layers: History) -> Tensor | list[Tensor]:
        """Return a history, ``[num_nodes, L, D]`` or L of ``[num_nodes, D_l]``, standardised.

        Gradients flow through.
        """
        if isinstance(layers, Tensor):
            shape = layers.shape[1:]
            return (layers - self.mean.view(shape)) / self.scale.view(shape)  # [num_nodes, L, D]
        means, scales = self.mean.split(self.in_dims), self.scale.split(self.in_dims)
        return [
            (layer - mean) / scale  # [num_nodes, D_l]
            for layer, mean, scale in zip(layers, means, scales, strict=True)
        ]

    @torch.no_grad()
    def apply_(self, history: History) -> None:
        """Standardise freshly loaded rows in place, so that they are never held twice."""
        check_layers(history, self.in_dims)
        if isinstance(history, Tensor):
            shape = history.shape[1:]
            history.sub_(self.mean.view(shape)).div_(self.scale.view(shape))
            return
        for index, layer in enumerate(history):
            mean, scale = self.statistics(index)
            layer.sub_(mean).div_(scale)

    def fold_into(self, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """Return the linear map of a standardised last layer that equals one of the layer as it is.

        With ``x = scale * r + mean``, ``W x + b = (W * scale) r + (b + W mean)``.

        Args:
            weight: ``W``, ``[out_dim, D_last]``.
            bias: ``b``, ``[out_dim]``.
        """
        mean, scale = (values.double() for values in self.statistics(len(self.in_dims) - 1))
        exact = weight.double()  # [out_dim, D_last]
        return (exact * scale).to(weight.dtype), (bias.double() + exact @ mean).to(bias.dtype)

    def __repr__(self) -> str:
        state = f"fitted on {int(self.num_rows)} rows" if self.is_fitted else "not fitted"
        return f"Standardizer({len(self.in_dims)} layers, floor={self.floor}, {state})"


class Limits(nn.Module):
    """Keep every column of pooled rows in the range that it has among the training graphs.

    A graph of one atom has no deviation and no neighbours: thousands of its columns may be out of
    range, all on one side, and a linear map adds up whatever its weights are wrong by out there.
    The training rows themselves do not change. Nothing is limited before :meth:`include`, nor in
    runs of earlier versions, which have no limits among their weights.

    Args:
        width: Number of columns.
    """

    bounds: Tensor | None

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.register_buffer("bounds", None)  # [2, width]: lowest and highest value

    @torch.no_grad()
    def include(self, rows: Tensor) -> Tensor:
        """Widen the range to training rows ``[num_rows, width]``, at least one; return these."""
        low, high = torch.aminmax(rows, dim=0)  # [width] each
        if self.bounds is not None:
            low, high = low.minimum(self.bounds[0]), high.maximum(self.bounds[1])
        self.bounds = torch.stack([low, high])
        return rows

    def forward(self, rows: Tensor) -> Tensor:
        """Return rows ``[num_rows, width]`` within the limits."""
        return rows if self.bounds is None else rows.clamp(self.bounds[0], self.bounds[1])

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *args: Any) -> None:
        if f"{prefix}bounds" not in state:
            self.bounds = None
        elif self.bounds is None:
            self.bounds = torch.empty(2, self.width)
        super()._load_from_state_dict(state, prefix, *args)

    def extra_repr(self) -> str:
        """Describe the module in one line."""
        return f"{self.width} columns" + ("" if self.bounds is not None else ", not limited")


class LimitedLinear(nn.Linear):
    """A linear map of pooled rows within their limits."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features)
        self.limits = Limits(in_features)

    def forward(self, rows: Tensor) -> Tensor:
        """Return ``[num_rows, out_features]``."""
        return super().forward(self.limits(rows))


class EachLayerNorm(nn.Module):
    """Centre and scale the row of every node in every layer, without statistics or weights.

    Statistics of the training rows describe a frozen network. Those of one that is trained from
    random weights are out of date within an epoch, so every row is scaled by itself, and a graph's
    output does not depend on others.

    Args:
        in_dims: Width of each layer.
    """

    def __init__(self, in_dims: Sequence[int]) -> None:
        super().__init__()
        self.in_dims = tuple(in_dims)

    def forward(self, layers: Sequence[Tensor]) -> list[Tensor]:
        """Return the layers, each ``[num_nodes, D_l]``, with mean 0 and deviation 1 per row."""
        return [
            functional.layer_norm(layer, (width,))
            for layer, width in zip(layers, self.in_dims, strict=True)
        ]

    def __repr__(self) -> str:
        return f"EachLayerNorm({len(self.in_dims)} layers)"


def head_behind(
    standardizer: Standardizer | None, tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the weights of a head that reads standardised rows, whatever version saved them.

    The first version had the statistics inside the head, and its shortcut read rows as captured;
    since then the shortcut reads standardised rows like everything else.

    Args:
        standardizer: With its statistics, if the run standardised.
        tensors: The state of the head.
    """
    kept = {name: value for name, value in tensors.items() if not name.startswith("standardizer.")}
    if standardizer is not None and len(kept) < len(tensors) and "shortcut.weight" in kept:
        folded = standardizer.fold_into(kept["shortcut.weight"], kept["shortcut.bias"])
        kept["shortcut.weight"], kept["shortcut.bias"] = folded
    return kept
