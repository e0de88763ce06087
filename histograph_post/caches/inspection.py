"""What would be captured of a model, before anything is written: the tables that a user reads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch_geometric.data import Data

from ..data import GraphDataset, from_graphs
from ..models.model_call import RECEIVED_COLUMNS
from ..splits import resolve_splits
from ..utils.text import text_table
from .planning import CacheOptions, CachePlan, plan_cache


@dataclass(frozen=True, repr=False)
class Inspection:
    """What a cache of a model would hold; printed, it is a few tables and notes."""

    plan: CachePlan

    @property
    def notes(self) -> tuple[str, ...]:
        """What there is to know about the data and the layers."""
        return (*self.plan.dataset.notes, *self.plan.capture.notes, *self.plan.notes)

    @property
    def layers(self) -> tuple[str, ...]:
        """The names of the layers."""
        return self.plan.capture.names

    @property
    def widths(self) -> tuple[int, ...]:
        """Numbers per node of each layer."""
        return self.plan.capture.widths

    def tables(self) -> list[tuple[str, Sequence[str], Sequence[Sequence[str]]]]:
        """Return every table as its title, its columns and its rows."""
        capture = self.plan.capture
        return [
            ("What forward receives", RECEIVED_COLUMNS, self.plan.received),
            ("What is captured", capture.COLUMNS, capture.table()),
        ]

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return self.plan.to_json()

    def __repr__(self) -> str:
        shown = [f"{title}\n{text_table(columns, rows)}" for title, columns, rows in self.tables()]
        return "\n\n".join([*shown, *(f"note: {note}" for note in self.notes)])


def inspect(
    model: nn.Module,
    dataset: GraphDataset | Iterable[Data],
    *,
    missing: Sequence[str] = (),
    device: str = "cpu",
    **options: Any,
) -> Inspection:
    """Show what :func:`~histograph_post.cache` would capture of a model; nothing is written.

    The model runs on a few graphs. One that a cache would refuse is refused here, too.

    Args:
        model: Any trained module; it is put into ``eval()`` and not changed otherwise.
        dataset: A :class:`~histograph_post.data.GraphDataset`, a PyG data set or a list of graphs.
        missing: Weights that are not the model's own, because its checkpoint has none for them.
        device: ``auto``, ``cpu``, ``cuda`` or ``mps``.
        options: Fields of :class:`~histograph_post.caches.planning.CacheOptions`, such as
            ``layers`` and ``no_pass``.
    """
    if not isinstance(dataset, GraphDataset):
        dataset = from_graphs(dataset)
    splits = resolve_splits(dataset, None)
    asked = CacheOptions(**options)
    return Inspection(
        plan_cache(model, dataset, splits, options=asked, missing=missing, device=device)
    )
