"""Every readout by name: what the registry promises, and what all readouts have in common."""

from __future__ import annotations

import copy
import json
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from histograph_post.errors import ConfigError, DataError
from histograph_post.heads import HEADS, build_head, head_config, head_info, head_names
from histograph_post.heads.histograph import PAPER_FORM, HistoGraphHead

#: A large graph, one-node graphs, a graph without edges, and small ones; (size, has edges).
GRAPHS = ((5, True), (1, False), (23, True), (4, False), (3, True), (1, False), (9, True))
IN_DIMS = [8, 8, 8]

GRAPH_HEADS = head_names("graph")
PAIRS = [(name, level) for name, info in HEADS.items() for level in info.levels]


def make_batch(graphs=GRAPHS, seed=0, in_dims=IN_DIMS):
    """History, batch vector and edges; every node that has an edge has at least two."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.tensor([size for size, _ in graphs])
    num_nodes = int(sizes.sum())
    layers = [torch.randn(num_nodes, dim, generator=generator) for dim in in_dims]
    history = torch.stack(layers, dim=1) if len(set(in_dims)) == 1 else layers
    batch = torch.repeat_interleave(torch.arange(len(graphs)), sizes)
    edges, offset = [torch.empty(2, 0, dtype=torch.long)], 0
    for size, has_edges in graphs:
        if has_edges:  # a ring with a chord, both directions
            ring = torch.stack([torch.arange(size), (torch.arange(size) + 1) % size])
            chord = torch.tensor([[0], [size // 2]])
            ring = torch.cat([ring, chord], dim=1) if size > 3 else ring
            edges.append(torch.cat([ring, ring.flip(0)], dim=1) + offset)
        offset += size
    return history, batch, torch.cat(edges, dim=1)


def make_head(name, level="graph", in_dims=IN_DIMS, out_dim=3, **options):
    torch.manual_seed(1)
    return build_head(name, in_dims, 1 if level == "link" else out_dim, level, dim=8, **options)


def select(nodes: Tensor, history, batch: Tensor, edge_index: Tensor):
    """The subgraph of these nodes in this order, with graphs numbered from 0 on."""
    position = torch.full((len(batch),), -1)
    position[nodes] = torch.arange(len(nodes))
    edges = position[edge_index]
    edges = edges[:, (edges >= 0).all(dim=0)]
    layers = history[nodes] if isinstance(history, Tensor) else [x[nodes] for x in history]
    return layers, batch[nodes].unique(return_inverse=True)[1], edges


# --- the registry ---------------------------------------------------------------------------


def test_names_are_known_without_torch():
    code = (
        "import sys; from histograph_post.heads import HEADS, head_names; "
        "assert 'gmt' in head_names('graph') and 'gmt' not in head_names('node'); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", GRAPH_HEADS)
def test_registry_agrees_with_the_class(name):
    info, head = head_info(name), make_head(name)
    assert set(info.levels) <= set(getattr(head, "levels", info.levels))
    assert getattr(head, "needs_edge_index", False) == info.needs_edge_index
    assert {"dim", "dropout"} <= set(info.options())
    assert not set(info.preset) & set(info.options())


def test_the_rivals_of_the_paper_are_all_there():
    assert set(HEADS) == {
        *("histograph", "histograph-paper"),
        *("mean", "sum", "max", "mlp", "linear", "layer-mean", "concat", "probe"),
        *("jk-cat", "jk-max", "jk-lstm", "attention", "set2set", "sortpool", "set-transformer"),
        *("gmt", "topkpool", "sagpool", "asap", "edgepool", "diffpool", "mincutpool"),
        *("sopool", "sopool-attention", "dkepool", "dkepool-robust"),
    }


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: build_head("set-transfomer", [8], 2), "'set-transfomer'.*set-transformer"),
        (lambda: build_head("gmt", [8], 2, "node"), "'gmt'.*'node', expected graph"),
        (lambda: build_head("mean", [8], 2, reduce="sum"), "'mean'.*'reduce', expected one of dim"),
        (lambda: build_head("set2set", [8], 2, width=3), "'set2set'.*'width', expected.*steps"),
        (lambda: build_head("mean", [], 2), "in_dims=\\(\\)"),
        (lambda: build_head("linear", [8], 2, "link"), "out_dim=2, expected 1 at link level"),
        (lambda: build_head("gmt", [8], 2, dim=6, heads=4), "heads=4, expected a divisor of dim=6"),
        (lambda: build_head("mean", [8], 2, dropout=1.5), "dropout=1.5"),
        (lambda: build_head("sortpool", [8], 2, k=4), "k=4, expected at least 5"),
        (lambda: build_head("topkpool", [8], 2, ratio=1.5), "ratio=1.5"),
        (lambda: build_head("edgepool", [8], 2, coarsenings=0), "coarsenings=0"),
        (lambda: build_head("diffpool", [8], 2, clusters=1), "clusters=1"),
    ],
)
def test_a_wrong_request_is_refused(call, message):
    with pytest.raises(ConfigError, match=message):
        call()


def test_the_papers_form_takes_what_the_paper_tunes_and_leaves_out():
    given = {"dim": 8, "normalization": "softmax", "residual": True}
    made = build_head("histograph-paper", [8, 8], 2, **given)
    assert made.options == HistoGraphHead([8, 8], 2, **{**PAPER_FORM, **given}).options
    stored = head_config("histograph-paper", made)
    assert build_head("histograph-paper", **stored).options == made.options
    # Runs of before have neither option.
    before = {name: stored[name] for name in stored.keys() - {"normalization", "residual"}}
    plain = HistoGraphHead([8, 8], 2, dim=8, **PAPER_FORM)
    assert build_head("histograph-paper", **before).options == plain.options


# --- what all readouts have in common -------------------------------------------------------


@pytest.mark.parametrize("in_dims", [IN_DIMS, [4, 8, 6]], ids=["one-width", "widths"])
@pytest.mark.parametrize(("name", "level"), PAIRS)
def test_output_and_gradients(name, level, in_dims):
    history, batch, edge_index = make_batch(in_dims=in_dims)
    head = make_head(name, level, in_dims)
    output = head(history, batch, edge_index=edge_index)
    expected = {"graph": (len(GRAPHS), 3), "node": (len(batch), 3), "link": (len(batch), 8)}
    assert output.shape == expected[level]
    if level == "link":
        pairs = torch.randint(len(batch), (2, 11))
        output = head.score(output, pairs)
        assert output.shape == (11,)
    loss = output.square().sum()
    aux_loss = getattr(head, "aux_loss", None)
    (loss if aux_loss is None else loss + aux_loss).backward()
    for parameter_name, parameter in head.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, parameter_name
            assert parameter.grad.isfinite().all(), parameter_name


@pytest.mark.parametrize("name", GRAPH_HEADS)
def test_a_graph_does_not_depend_on_its_batch_mates(name):
    history, batch, edge_index = make_batch()
    head = make_head(name).eval()
    with torch.no_grad():
        together = head(history, batch, edge_index=edge_index)
        for graph in range(len(GRAPHS)):
            nodes = (batch == graph).nonzero().view(-1)
            layers, own_batch, edges = select(nodes, history, batch, edge_index)
            alone = head(layers, own_batch, edge_index=edges)
            torch.testing.assert_close(alone[0], together[graph], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", GRAPH_HEADS)
def test_without_a_batch_vector_all_nodes_are_one_graph(name):
    history, batch, edge_index = make_batch(graphs=((7, True),))
    head = make_head(name).eval()
    torch.testing.assert_close(
        head(history, None, edge_index=edge_index), head(history, batch, edge_index=edge_index)
    )


@pytest.mark.parametrize("name", GRAPH_HEADS)
def test_the_order_of_the_nodes_does_not_matter(name):
    history, batch, edge_index = make_batch()
    head = make_head(name).eval()
    shuffled = torch.randperm(len(batch), generator=torch.Generator().manual_seed(2))
    nodes = shuffled[batch[shuffled].argsort(stable=True)]
    layers, own_batch, edges = select(nodes, history, batch, edge_index)
    assert not torch.equal(layers, history)
    torch.testing.assert_close(
        head(layers, own_batch, edge_index=edges),
        head(history, batch, edge_index=edge_index),
        rtol=1e-4,
        atol=1e-5,
    )


@pytest.mark.parametrize("name", GRAPH_HEADS)
def test_empty_graphs_get_an_output_and_disturb_nobody(name):
    history, batch, edge_index = make_batch()
    head = make_head(name)
    head.eval()
    expected = head(history, batch, edge_index=edge_index)
    # Graph i becomes 2 * i + 1, so that there are empty graphs before, between and after.
    spread = head(history, 2 * batch + 1, num_graphs=2 * len(GRAPHS) + 3, edge_index=edge_index)
    assert spread.shape == (2 * len(GRAPHS) + 3, 3)
    torch.testing.assert_close(spread[1 : 2 * len(GRAPHS) : 2], expected, rtol=1e-4, atol=1e-5)
    empty = spread[::2]
    assert empty.isfinite().all()
    torch.testing.assert_close(empty, empty[:1].expand_as(empty))
    spread.sum().backward()
    assert all(p.grad.isfinite().all() for p in head.parameters() if p.grad is not None)
    nothing = torch.empty(0, len(IN_DIMS), 8)
    none = head(nothing, batch[:0], num_graphs=2, edge_index=edge_index[:, :0])
    torch.testing.assert_close(none, empty[:2])


@pytest.mark.parametrize(("name", "level"), PAIRS)
def test_a_head_is_rebuilt_from_its_configuration(name, level):
    history, batch, edge_index = make_batch()
    head = make_head(name, level, dropout=0.25).eval()
    config = json.loads(json.dumps(head_config(name, head)))
    assert config["in_dims"] == IN_DIMS
    assert (config["dim"], config["level"], config["dropout"]) == (8, level, 0.25)
    again = build_head(name, **config)
    again.load_state_dict(head.state_dict())
    again.eval()
    assert torch.equal(
        again(history, batch, edge_index=edge_index), head(history, batch, edge_index=edge_index)
    )


@pytest.mark.parametrize("name", GRAPH_HEADS)
def test_a_half_precision_history_is_read_as_it_is(name):
    history, batch, edge_index = make_batch()
    head = make_head(name).eval()
    half = history.to(torch.float16)
    torch.testing.assert_close(
        head(half, batch, edge_index=edge_index), head(half.float(), batch, edge_index=edge_index)
    )


@pytest.mark.parametrize("name", GRAPH_HEADS)
def test_a_head_can_be_copied_after_a_training_step(name):
    history, batch, edge_index = make_batch()
    head = make_head(name)
    head(history, batch, edge_index=edge_index).sum().backward()
    copied = copy.deepcopy(head).eval()
    assert torch.equal(
        copied(history, batch, edge_index=edge_index),
        head.eval()(history, batch, edge_index=edge_index),
    )


@pytest.mark.parametrize("name", head_names("link"))
def test_link_scores_are_symmetric_and_local(name):
    history, batch, _ = make_batch()
    head = make_head(name, "link").eval()
    embeddings = head(history, batch)
    pairs = torch.tensor([[0, 3, 8], [4, 3, 20]])
    scores = head.score(embeddings, pairs)
    torch.testing.assert_close(scores, head.score(embeddings, pairs.flip(0)))
    torch.testing.assert_close(scores[1:2], head.score(embeddings, pairs[:, 1:2]))
    assert scores.unique().numel() == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.randn(4, 3, 7), torch.zeros(4, dtype=torch.long)), "width"),
        ((torch.randn(4, 2, 8), torch.zeros(4, dtype=torch.long)), "width"),
        ((torch.randn(4, 3, 8), torch.zeros(5, dtype=torch.long)), "batch"),
        ((torch.randn(4, 3, 8), torch.tensor([0, 1, 0, 1])), "sorted"),
    ],
)
@pytest.mark.parametrize("name", ["mean", "gmt"])
def test_inputs_that_do_not_fit_are_refused(name, arguments, message):
    with pytest.raises(DataError, match=message):
        make_head(name)(*arguments)


@pytest.mark.parametrize("name", [name for name, info in HEADS.items() if info.needs_edge_index])
def test_a_structural_readout_asks_for_edges(name):
    history, batch, _ = make_batch()
    with pytest.raises(DataError, match="found no edge_index"):
        make_head(name)(history, batch)
