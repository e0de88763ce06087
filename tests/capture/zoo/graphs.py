"""Small random graphs in the forms that public code expects them in, always in two batches.

The first batch is for the probe, the second, of other graphs, is the one that is captured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.transforms import ToSparseTensor

WIDTH = 8
FEATURES = 7
EDGE_FEATURES = 3
SIZES = ((9, 5, 12, 6), (7, 11, 5))


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def bonds(num_nodes: int, rings: int, generator: torch.Generator) -> torch.Tensor:
    """A random tree and some rings, each bond in both directions: ``[2, num_edges]``."""
    pairs = [(int(torch.randint(0, i, (), generator=generator)), i) for i in range(1, num_nodes)]
    while len(pairs) < num_nodes - 1 + rings:
        a, b = torch.randperm(num_nodes, generator=generator)[:2].tolist()
        if (a, b) not in pairs and (b, a) not in pairs:
            pairs.append((a, b))
    # Each bond is followed by its reverse, as RDKit loops make them.
    return torch.tensor([edge for a, b in pairs for edge in ((a, b), (b, a))]).T.contiguous()


def molecule(num_nodes: int, seed: int) -> Data:
    """Float and integer features, positions, edge features; no edge weights."""
    generator = _generator(seed)
    edge_index = bonds(num_nodes, 2, generator)
    num_edges = edge_index.shape[1]
    return Data(
        x=torch.randn(num_nodes, FEATURES, generator=generator),
        edge_index=edge_index,
        edge_attr=torch.randn(num_edges // 2, EDGE_FEATURES, generator=generator).repeat_interleave(
            2, dim=0
        ),
        pos=1.5 * torch.randn(num_nodes, 3, generator=generator),
        z=torch.randint(1, 9, (num_nodes,), generator=generator),
    )


def integers(num_nodes: int, seed: int) -> Data:
    """Atom and bond types as OGB stores them."""
    data = molecule(num_nodes, seed)
    generator = _generator(seed + 1000)
    x = torch.randint(0, 5, (num_nodes, 2), generator=generator)
    edge_attr = torch.randint(0, 3, (data.num_edges, 2), generator=generator)
    return Data(x=x, edge_index=data.edge_index, edge_attr=edge_attr)


def cycle(num_nodes: int, seed: int) -> Data:
    """A directed cycle: as many edges as nodes."""
    data = molecule(num_nodes, seed)
    order = torch.randperm(num_nodes, generator=_generator(seed))
    data.edge_index = torch.stack([order, order.roll(1)])
    data.edge_attr = torch.randn(num_nodes, EDGE_FEATURES, generator=_generator(seed))
    return data


class Pair(Data):
    """Two molecules in one object, counted apart."""

    def __inc__(self, key, value, *args, **kwargs):
        if key in ("edge_index_s", "edge_index_t"):
            return self.x_s.shape[0] if key == "edge_index_s" else self.x_t.shape[0]
        return super().__inc__(key, value, *args, **kwargs)


def pair(num_nodes: int, seed: int) -> Pair:
    first, second = molecule(num_nodes, seed), molecule(num_nodes // 2 + 3, seed + 500)
    return Pair(
        x_s=first.x,
        edge_index_s=first.edge_index,
        x_t=second.x,
        edge_index_t=second.edge_index,
        num_nodes=num_nodes,
    )


def bare_pair(num_nodes: int, seed: int) -> Pair:
    """A pair that does not say how many nodes it has."""
    data = pair(num_nodes, seed)
    del data.num_nodes
    return data


def views(num_nodes: int, seed: int) -> Data:
    """Two sets of edges and two sets of features on the same nodes."""
    data = molecule(num_nodes, seed)
    data.x2 = torch.randn(num_nodes, FEATURES, generator=_generator(seed + 2000))
    data.edge_index2 = bonds(num_nodes, 1, _generator(seed + 2000))
    return data


def with_target(num_nodes: int, seed: int) -> Data:
    """A protein's sequence beside the molecule."""
    data = molecule(num_nodes, seed)
    data.target = torch.randint(0, 26, (1, 20), generator=_generator(seed))
    return data


def with_neighbours(num_nodes: int, seed: int) -> Data:
    """Three neighbours of each node in a table, with features, and no edges."""
    generator = _generator(seed)
    return Table(
        x=torch.randn(num_nodes, FEATURES, generator=generator),
        nbr_fea_index=torch.randint(0, num_nodes, (num_nodes, 3), generator=generator),
        nbr_fea=torch.randn(num_nodes, 3, 2, generator=generator),
    )


class Table(Data):
    """Rows of the table of neighbours are those of the nodes."""

    def __cat_dim__(self, key, value, *args, **kwargs):
        return 0 if key.startswith("nbr_") else super().__cat_dim__(key, value, *args, **kwargs)


def hetero(num_nodes: int, seed: int) -> HeteroData:
    """Atoms and rings, and which atom is in which ring."""
    generator = _generator(seed)
    data = HeteroData()
    data["atom"].x = torch.randn(num_nodes, FEATURES, generator=generator)
    data["ring"].x = torch.randn(2, FEATURES, generator=generator)
    members = torch.stack([torch.arange(num_nodes), torch.arange(num_nodes) % 2])
    data["atom", "in", "ring"].edge_index = members
    data["ring", "of", "atom"].edge_index = members.flip(0)
    return data


def with_matrix(num_nodes: int, seed: int) -> Data:
    """The edges as a sparse matrix, as ``ToSparseTensor`` leaves them."""
    data = molecule(num_nodes, seed)
    return ToSparseTensor(layout=torch.sparse_csr)(Data(x=data.x, edge_index=data.edge_index))


def merged_pair(num_nodes: int, seed: int) -> Data:
    """Two molecules as the two parts of one graph; ``side`` says which atom is whose."""
    first, second = molecule(num_nodes, seed), molecule(num_nodes // 2 + 3, seed + 500)
    return Data(
        x=torch.cat([first.x, second.x]),
        edge_index=torch.cat([first.edge_index, second.edge_index + num_nodes], dim=1),
        side=torch.cat([torch.zeros(num_nodes), torch.ones(second.num_nodes)]).long(),
    )


def _batches(
    make: Callable[[int, int], Data | HeteroData],
    follow_batch: Sequence[str] = (),
    sizes: tuple[Sequence[int], Sequence[int]] = SIZES,
) -> Callable[[], tuple[Batch, Batch]]:
    def build() -> tuple[Batch, Batch]:
        probe, later = (
            Batch.from_data_list(
                [make(size, 10 * number + at) for at, size in enumerate(part)],
                follow_batch=list(follow_batch),
            )
            for number, part in enumerate(sizes)
        )
        return probe, later

    return build


#: Two batches by the name entries ask for them.
BATCHES: dict[str, Callable[[], tuple[Batch, Batch]]] = {
    "molecules": _batches(molecule),
    "integers": _batches(integers),
    "cycles": _batches(cycle),
    "pairs": _batches(pair, follow_batch=["x_s", "x_t"]),
    "bare pairs": _batches(bare_pair, follow_batch=["x_s", "x_t"]),
    "merged pairs": _batches(merged_pair),
    "views": _batches(views),
    "hetero": _batches(hetero),
    "targets": _batches(with_target),
    "neighbours": _batches(with_neighbours),
    "adj_t": _batches(with_matrix),
    "one graph": _batches(molecule, sizes=((12,), (11,))),
    "one size": _batches(molecule, sizes=((12,), (12,))),
}
