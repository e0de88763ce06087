"""Structural readouts against PyG's operators, applied to one graph at a time."""

from __future__ import annotations

import pytest
import torch
from torch_geometric.nn import (
    ASAPooling,
    EdgePooling,
    SAGPooling,
    TopKPooling,
    dense_diff_pool,
    dense_mincut_pool,
)
from torch_geometric.utils import to_dense_adj

from histograph_post.heads import build_head
from histograph_post.heads.structural import StableEdgePooling, StableTopK

# PyG's ASAPooling multiplies sparse CSR matrices; these are torch's remarks about those.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly:UserWarning"),
]

DIM = 8


def ring(size, offset=0):
    nodes = torch.arange(size)
    edges = torch.stack([nodes, (nodes + 1) % size])
    return torch.cat([edges, edges.flip(0)], dim=1) + offset


def star(size, offset=0):
    leaves = torch.arange(1, size)
    edges = torch.stack([torch.zeros_like(leaves), leaves])
    return torch.cat([edges, edges.flip(0)], dim=1) + offset


def path(size, offset=0):
    nodes = torch.arange(size - 1)
    edges = torch.stack([nodes, nodes + 1])
    return torch.cat([edges, edges.flip(0)], dim=1) + offset


@pytest.fixture
def graphs():
    """Rows and edges of single graphs, with random features: no two nodes look alike."""
    generator = torch.Generator().manual_seed(0)
    sizes = [5, 12, 3, 8]
    rows = [torch.randn(size, DIM, generator=generator) for size in sizes]
    return [(own, ring(len(own))) for own in rows]


def collate(graphs):
    sizes = torch.tensor([len(rows) for rows, _ in graphs])
    batch = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
    offsets = (sizes.cumsum(0) - sizes).tolist()
    edges = torch.cat([edges + at for (_, edges), at in zip(graphs, offsets, strict=True)], dim=1)
    return torch.cat([rows for rows, _ in graphs]).unsqueeze(1), batch, edges


def make_head(name, **options):
    torch.manual_seed(1)
    return build_head(name, [DIM], 2, dim=DIM, **options).eval()


@pytest.mark.parametrize(
    ("name", "operator"),
    [
        ("topkpool", TopKPooling(DIM, 0.5)),
        ("sagpool", SAGPooling(DIM, 0.5)),
        ("asap", ASAPooling(DIM, 0.5)),
        ("edgepool", EdgePooling(DIM)),
    ],
)
def test_sparse_pools_loop_over_graphs(graphs, name, operator):
    head = make_head(name)
    pooled = []
    for rows, edge_index in graphs:
        rows, batch = head.projection(rows).relu(), torch.zeros(len(rows), dtype=torch.long)
        total = torch.zeros(1, 2 * DIM)
        for convolution, own in zip(head.convolutions, head.operators, strict=True):
            rows = convolution(rows, edge_index).relu()
            operator.load_state_dict(own.state_dict())
            if name == "edgepool":
                rows, edge_index, batch, _ = operator(rows, edge_index, batch)
            else:
                rows, edge_index, _, batch, *_ = operator(rows, edge_index, batch=batch)
            total = total + torch.cat([rows.mean(dim=0), rows.amax(dim=0)])
        pooled.append(total)
    history, batch, edge_index = collate(graphs)
    torch.testing.assert_close(
        head(history, batch, edge_index=edge_index),
        head.classifier(torch.cat(pooled)),
        rtol=1e-4,
        atol=1e-5,
    )


@pytest.mark.parametrize("name", ["topkpool", "sagpool", "asap", "edgepool"])
@pytest.mark.parametrize("shape", [ring, star, path])
def test_nodes_that_look_alike_are_treated_alike_in_any_batch(graphs, name, shape):
    alike = (torch.ones(9, DIM), shape(9))
    head = make_head(name)
    with torch.no_grad():
        history, batch, edge_index = collate([alike])
        alone = head(history, batch, edge_index=edge_index)
        for copies in (1, 7, 40):
            history, batch, edge_index = collate([*graphs, *[alike] * copies, graphs[0]])
            together = head(history, batch, edge_index=edge_index)[len(graphs) : -1]
            torch.testing.assert_close(together, alone.expand_as(together), rtol=1e-4, atol=1e-5)


def test_top_k_breaks_ties_by_position_and_ignores_rounding():
    select = StableTopK(1, 0.5)
    torch.nn.init.ones_(select.weight)
    score = torch.tensor([0.1, 0.3 + 1e-7, 0.3, 0.3 + 2e-7, 0.2, 0.9, 0.301])
    kept = select(score, torch.tensor([0, 0, 0, 0, 1, 1, 1]))
    assert kept.node_index.tolist() == [1, 2, 5, 6]
    torch.testing.assert_close(kept.weight, score[[1, 2, 5, 6]].tanh())


def test_edge_contraction_by_hand():
    operator = StableEdgePooling(1)
    operator.load_state_dict({"lin.weight": torch.zeros(1, 2), "lin.bias": torch.zeros(1)})
    rows = torch.tensor([[1.0], [10.0], [100.0]])
    # 1 has two incoming edges, which score 1/2 each; 0 -> 2 is the only one into 2, it scores 1.
    edge_index = torch.tensor([[0, 2, 0], [1, 1, 2]])
    pooled, edges, batch = operator(rows, edge_index, torch.tensor([4, 4, 4]))
    assert pooled.tolist() == [[151.5], [10.0]]  # (1 + 100) * (1 + 0.5), and 1 left as it is
    assert edges.tolist() == [[0, 0], [0, 1]]
    assert batch.tolist() == [4, 4]


def test_asap_keeps_the_fittest_clusters():
    for seed in range(4):
        torch.manual_seed(seed)
        operator = build_head("asap", [DIM], 2, dim=DIM).operators[0]
        kept = operator.select(torch.tensor([0.2, 0.9, 0.4, 0.7]), torch.zeros(4).long())
        assert kept.node_index.tolist() == [1, 3]


@pytest.mark.parametrize(("name", "pool"), [("diffpool", dense_diff_pool), ("mincutpool", None)])
def test_dense_pools_and_their_losses_loop_over_graphs(graphs, name, pool):
    head = make_head(name, clusters=4)
    pooled, losses = [], []
    for rows, edge_index in graphs:
        rows = head.projection(rows).relu().unsqueeze(0)
        adjacency = to_dense_adj(edge_index)
        embedded = head.embed(rows, adjacency).relu()
        if pool is not None:
            logits = head.assignment(rows, adjacency)
            clusters, links, *terms = pool(embedded, adjacency, logits)
        else:
            logits = 10 * (head.assignment(embedded) / 10).tanh()
            clusters, links, *terms = dense_mincut_pool(embedded, adjacency, logits)
        pooled.append(head.embed_clusters(clusters, links).relu().mean(dim=1))
        losses.append(sum(terms))
    history, batch, edge_index = collate(graphs)
    output = head(history, batch, edge_index=edge_index)
    torch.testing.assert_close(output, head.classifier(torch.cat(pooled)), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(head.aux_loss, torch.stack(losses).mean(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["diffpool", "mincutpool"])
def test_auxiliary_losses_are_finite_where_their_formulas_are_not(name):
    # No edges: degrees of zero. Huge features: assignments that would round to one-hot.
    generator = torch.Generator().manual_seed(0)
    none = torch.empty(2, 0, dtype=torch.long)
    edgeless = [(1e4 * torch.randn(size, DIM, generator=generator), none) for size in (1, 4)]
    huge = (1e4 * torch.randn(6, DIM, generator=generator), ring(6))
    history, batch, edge_index = collate([*edgeless, huge])
    head = make_head(name, clusters=4).train()
    head(history, batch, edge_index=edge_index)
    assert head.aux_loss.isfinite()
    head.aux_loss.backward()
    gradients = {n: p.grad for n, p in head.named_parameters() if p.grad is not None}
    assert {"assignment.bias", "projection.weight"} <= {
        n.replace("lin_rel.", "") for n in gradients
    }
    assert all(gradient.isfinite().all() for gradient in gradients.values())


def test_training_the_auxiliary_loss_finds_the_two_halves_of_a_graph():
    # Two cliques joined by one edge: the minimum cut separates them.
    clique = torch.combinations(torch.arange(5)).t()
    edges = torch.cat([clique, clique + 5, torch.tensor([[0], [5]])], dim=1)
    edge_index = torch.cat([edges, edges.flip(0)], dim=1)
    history = torch.eye(10).unsqueeze(1)
    torch.manual_seed(0)
    head = build_head("mincutpool", [10], 2, dim=16, clusters=2)
    optimizer = torch.optim.Adam(head.parameters(), lr=0.02)
    for _ in range(100):
        optimizer.zero_grad()
        head(history, None, edge_index=edge_index)
        head.aux_loss.backward()
        optimizer.step()
    rows = head.projection(history[:, 0]).relu().unsqueeze(0)
    embedded = head.embed(rows, to_dense_adj(edge_index)).relu()
    halves = head.assignment(embedded)[0].argmax(dim=1)
    assert halves[:5].unique().numel() == halves[5:].unique().numel() == 1
    assert halves[0] != halves[5]


def test_readouts_without_such_a_term_have_no_auxiliary_loss(graphs):
    history, batch, edge_index = collate(graphs)
    head = make_head("topkpool")
    head(history, batch, edge_index=edge_index)
    assert head.aux_loss is None
