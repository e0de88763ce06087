"""What is mixed with attended rows, step 8 of the paper, and the linear starts of a head.

Statistics of all layers over the nodes of a graph become a row of columns at one scale
(:class:`GraphStatistics`), which goes through dropout and a projection and is mixed in
(:class:`Mixing`).

A head with random weights has yet to learn what a linear map of the same layers predicts. So it may
start there: at the classifier of the network it reads (:meth:`LinearStarts.warm_start`), or at a
linear probe that was solved on the training rows (:meth:`LinearStarts.start_at`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TypeAlias, cast

import torch
from torch import Tensor, nn

from ...errors import DataError
from ..base import Readout
from ..history import DERIVED, STATISTICS
from ..standardize import Limits, Standardizer
from .config import HistoGraphConfig

#: The size is two columns beside thousands, and the same penalty on all weights would all but
#: exclude it: it is scaled to this standard deviation.
SIZE_DEVIATION = 10.0


class GraphStatistics(nn.Module):
    """Statistics of a graph as one row, each column at one scale.

    A property that adds up over the nodes, such as the weight of a molecule, is in the sum of a
    channel and not in its mean; so sums and the size are among them.

    Args:
        in_dims: Width of each layer that is used.
        names: Some of :data:`STATISTICS` and :data:`DERIVED`.
    """

    def __init__(self, in_dims: Sequence[int], names: Sequence[str]) -> None:
        super().__init__()
        self.names = tuple(names)
        groups = [width for name in names for width in ((1, 1) if name == "size" else in_dims)]
        #: Centres and scales the columns, once it is fitted to the rows of training graphs.
        self.scaling = Standardizer(groups)
        self.width = sum(groups)
        self.limits = Limits(self.width)
        self._widths = [2 if name == "size" else sum(in_dims) for name in names]
        # Sums and sizes are as large as graphs are: they are zero until their scale is known.
        for columns in self._columns(*DERIVED):
            self.scaling.scale[columns] = torch.inf

    def forward(self, statistics: Tensor, counts: Tensor) -> Tensor:
        """Return the row of every graph: ``[num_graphs, width]``.

        Args:
            statistics: As :func:`layer_statistics` gives them, ``[num_graphs, 3, sum(D_l)]``.
            counts: Nodes of each graph, ``[num_graphs]``.
        """
        rows = self.limits(self.rows(statistics, counts))  # [num_graphs, width], of its own
        return rows.sub_(self.scaling.mean).div_(self.scaling.scale)

    def rows(self, statistics: Tensor, counts: Tensor) -> Tensor:
        """Return the row of every graph before scaling: ``[num_graphs, width]``."""
        sizes = counts.to(statistics.dtype).unsqueeze(-1)  # [num_graphs, 1]
        columns, names = [], self.names
        if names[: len(STATISTICS)] == STATISTICS:  # contiguous: copied at once
            columns, names = [statistics.flatten(1)], names[len(STATISTICS) :]
        for name in names:
            if name == "size":
                columns += [sizes, sizes.clamp(min=1).log()]  # [num_graphs, 1] each
            elif name == "sum":
                columns.append(statistics[:, 0] * sizes)  # [num_graphs, sum(D_l)]
            else:
                columns.append(statistics[:, STATISTICS.index(name)])  # [num_graphs, sum(D_l)]
        return torch.cat(columns, dim=1)

    def fit(self, batches: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Take the scale and the limits of every column from training graphs.

        Args:
            batches: Statistics and counts, as :meth:`forward` takes them.
        """
        rows = (self.limits.include(self.rows(*batch)) for batch in batches)  # [graphs, width]
        self.scaling.fit(list(batch.split(self.scaling.in_dims, dim=1)) for batch in rows)
        for columns in self._columns("size"):
            self.scaling.scale[columns] /= SIZE_DEVIATION

    def _columns(self, *names: str) -> Iterator[slice]:
        """Yield the columns of the statistics of these names."""
        start = 0
        for name, width in zip(self.names, self._widths, strict=True):
            if name in names:
                yield slice(start, start + width)
            start += width

    def extra_repr(self) -> str:
        """Describe the module in one line."""
        return "+".join(self.names)


class WideDropout(nn.Dropout):
    """Dropout of rows so wide that drawing the mask would cost more than using it.

    On a CPU, PyTorch draws 64 random bits for every value. Sixteen are enough: values are dropped
    with a probability that is at most 2^-17 off, and scaled by just that.
    """

    def forward(self, rows: Tensor) -> Tensor:
        """Return rows ``[num_rows, width]``, of which values are dropped while training."""
        if not self.training or not self.p or rows.device.type != "cpu":
            return super().forward(rows)
        words = torch.empty(rows.numel() // 4 + 1, dtype=torch.int64)
        bits = words.random_(-(1 << 63), None).view(torch.int16)[: rows.numel()]  # of each value
        dropped = min(round(self.p * (1 << 16)), (1 << 16) - 1)  # of the 2^16 possible values
        kept = bits.to(rows.dtype).ge_(dropped - (1 << 15)).view_as(rows)  # 1 or 0
        return rows * kept.mul_((1 << 16) / ((1 << 16) - dropped))  # [num_rows, width]


#: Rows in parts, side by side: ``[rows, width of the part]`` each.
Parts: TypeAlias = list[Tensor]

#: Applies a linear map to such rows: ``[rows, out]``.
ApplyParts: TypeAlias = Callable[[nn.Linear, Parts], Tensor]


def map_parts(linear: nn.Linear, parts: Parts) -> Tensor:
    """Apply a linear map to rows in parts, without joining them: ``[rows, out]``."""
    if len(parts) == 1:
        return cast(Tensor, linear(parts[0]))
    widths = [part.size(1) for part in parts]
    mapped: Tensor = linear.bias  # [out]
    for part, weight in zip(parts, linear.weight.split(widths, dim=1), strict=True):
        mapped = torch.addmm(mapped, part, weight.t())  # [rows, out]
    return mapped


class Mixing(nn.Module):
    """The stabiliser of step 8: ``a * readout + (1 - a) * base`` with ``a`` in [0, 1].

    Args:
        kind: ``fixed``; ``learned``; or ``delayed``: learned, but not before ``delay`` training
            steps have passed.
        initial: The coefficient to start from.
        delay: Training steps a ``delayed`` coefficient waits.
    """

    steps: Tensor

    def __init__(self, kind: str, initial: float, delay: int) -> None:
        super().__init__()
        self.kind, self.initial, self.delay = kind, initial, delay
        if kind != "fixed":
            self.logit = nn.Parameter(torch.tensor(math.log(initial / (1 - initial))))
        if kind == "delayed":
            self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    @property
    def coefficient(self) -> Tensor | float:
        """The share ``a`` of the readout."""
        return self.initial if self.kind == "fixed" else self.logit.sigmoid()

    def forward(self, readout: Tensor, base: Tensor) -> Tensor:
        """Mix two tensors of the same shape."""
        coefficient = self.coefficient
        if self.kind == "delayed" and self.training and isinstance(coefficient, Tensor):
            if bool(self.steps < self.delay):
                coefficient = coefficient.detach()
            self.steps += 1
        return torch.lerp(base, readout, coefficient)

    def extra_repr(self) -> str:
        """Describe the coefficient in one line."""
        return f"kind={self.kind!r}, coefficient={float(self.coefficient):.3f}"


class LinearStarts(Readout):
    """A readout that can start where a linear one stands; both starts add parameters."""

    options: HistoGraphConfig
    #: The last map, from what the MLP returns to the outputs.
    output: nn.Linear
    #: Width of the description of a graph or node, which needs no attention.
    described_dim: int
    #: From the (mean) last layer straight to the outputs.
    shortcut: nn.Linear | None
    #: From the description to the outputs; it is not trained.
    probe: nn.Linear | None
    #: Share of the probe in the predictions: 1 until training begins.
    probe_share: Tensor

    @torch.no_grad()
    def warm_start(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Start from the predictions of a mean-pool network: ``weight @ mean(last layer) + bias``.

        The network's classifier becomes a shortcut from the last layer, as the head is given it, to
        the outputs, and the head's own output map starts at zero: exact for every option, and
        all of it is trained. At node level there is no mean. Call it before making an optimizer.
        For rows that are standardised first, see
        :meth:`~histograph_post.heads.standardize.Standardizer.fold_into`.

        Args:
            weight: Of the network's own classifier, ``[out_dim, D_last]``.
            bias: Of the same, ``[out_dim]``; zero if it has none.
        """
        _require_shape("warm start", weight, [self.out_dim, self.in_dims[-1]])
        self.options = replace(self.options, shortcut=True)
        self.shortcut = nn.Linear(*weight.shape[::-1]).to(self.output.weight)
        self.shortcut.weight.copy_(weight)
        self.shortcut.bias.zero_() if bias is None else self.shortcut.bias.copy_(bias)
        self.output.weight.zero_()
        self.output.bias.zero_()

    @torch.no_grad()
    def start_at(self, weight: Tensor, bias: Tensor) -> None:
        """Start from the predictions of a solved linear probe of the description.

        Once training has begun, the probe has the share that ``options.probe`` gives it: the head
        learns without it, and predicts the weighted mean of both.

        Args:
            weight: Of the probe, ``[out_dim, described_dim]``.
            bias: Of the same, ``[out_dim]``.
        """
        _require_shape("probe", weight, [self.out_dim, self.described_dim])
        self.options = replace(self.options, solved=True)
        self._add_probe()
        assert self.probe is not None
        self.probe.weight.copy_(weight)
        self.probe.bias.copy_(bias)

    def _add_probe(self) -> None:
        self.probe = nn.Linear(self.described_dim, self.out_dim).to(self.output.weight)
        self.probe.requires_grad_(False)
        self.register_buffer("probe_share", torch.ones(()).to(self.output.weight))


def _require_shape(name: str, weight: Tensor, expected: list[int]) -> None:
    if list(weight.shape) != expected:
        raise DataError(f"{name}: found weight {list(weight.shape)}, expected {expected}")
