"""Set readouts against PyG's functions, applied to one graph at a time."""

from __future__ import annotations

import pytest
import torch
from torch_geometric.nn import global_add_pool, global_max_pool, global_mean_pool
from torch_geometric.nn.models import JumpingKnowledge as PyGJumpingKnowledge
from torch_geometric.utils import to_dense_adj

from histograph_post.heads import build_head
from histograph_post.heads.ragged import Graphs, dense_adjacency, pool_buckets

SIZES = torch.tensor([3, 1, 40, 7, 2, 18])
BATCH = torch.repeat_interleave(torch.arange(len(SIZES)), SIZES)


@pytest.fixture
def history():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(len(BATCH), 4, 8, generator=generator)


def make_head(name, in_dims=(8, 8, 8, 8), **options):
    torch.manual_seed(1)
    return build_head(name, in_dims, 2, dim=8, **options).eval()


@pytest.mark.parametrize(
    ("name", "pool"),
    [
        ("mean", global_mean_pool),
        ("sum", global_add_pool),
        ("max", global_max_pool),
        ("linear", global_mean_pool),
    ],
)
def test_last_layer_readouts(history, name, pool):
    head = make_head(name)
    torch.testing.assert_close(head(history, BATCH), head.classifier(pool(history[:, -1], BATCH)))


def test_linear_probe_by_hand():
    head = make_head("linear", in_dims=[2])
    with torch.no_grad():
        head.classifier.weight.copy_(torch.tensor([[1.0, 0.0], [2.0, -1.0]]))
        head.classifier.bias.copy_(torch.tensor([0.5, 0.0]))
    rows = torch.tensor([[1.0, 2.0], [3.0, 6.0], [5.0, 0.0]]).unsqueeze(1)
    output = head(rows, torch.tensor([0, 0, 1]))
    assert output.tolist() == [[2.5, 0.0], [5.5, 10.0]]


def test_layer_mean(history):
    head = make_head("layer-mean")
    expected = head.classifier(global_mean_pool(history.mean(dim=1), BATCH))
    torch.testing.assert_close(head(history, BATCH), expected)


def test_concat_is_a_linear_map_of_all_mean_pools(history):
    head = make_head("concat")
    pools = [global_mean_pool(layer, BATCH) for layer in history.unbind(1)]
    torch.testing.assert_close(head(history, BATCH), head.classifier(torch.cat(pools, dim=1)))
    assert head.num_parameters == 4 * 8 * 2 + 2


@pytest.mark.parametrize("in_dims", [(8, 8, 8, 8), (5, 8, 8, 3)], ids=["one width", "mixed"])
@pytest.mark.parametrize("name", ["mean", "sum", "max", "linear", "concat", "layer-mean", "jk-cat"])
def test_a_readout_of_means_needs_no_more_than_them(history, name, in_dims):
    head = make_head(name, in_dims)
    layers = [layer[:, :width] for layer, width in zip(history.unbind(1), in_dims, strict=True)]
    means = [global_mean_pool(layer, BATCH) for layer in layers]
    found, expected = head(means, torch.arange(len(SIZES))), head(layers, BATCH)
    assert head.reads_means == torch.allclose(found, expected, atol=1e-5)
    assert head.reads_means == (name not in ("sum", "max"))


@pytest.mark.parametrize("mode", ["cat", "max", "lstm"])
def test_jumping_knowledge(history, mode):
    head = make_head(f"jk-{mode}")
    layers = list(history.unbind(1))
    mixture = PyGJumpingKnowledge(mode, channels=8, num_layers=2)
    if mode == "lstm":
        mixture.load_state_dict(head.mixture.state_dict())
        layers = [linear(layer) for linear, layer in zip(head.align.maps, layers, strict=True)]
    nodes = mixture(layers)
    expected = head.classifier(global_mean_pool(nodes, BATCH))
    torch.testing.assert_close(head(history, BATCH), expected)
    node_head = make_head(f"jk-{mode}", level="node")
    node_head.load_state_dict(head.state_dict())
    torch.testing.assert_close(node_head(history), head.classifier(nodes))


@pytest.mark.parametrize("name", ["linear", "concat", "layer-mean", "jk-cat", "jk-max", "jk-lstm"])
@pytest.mark.parametrize("level", ["graph", "node"])
def test_a_stacked_history_is_the_list_of_its_layers(history, name, level):
    head = make_head(name, level=level)
    torch.testing.assert_close(head(list(history.unbind(1)), BATCH), head(history, BATCH))


def test_layers_of_different_width_are_mapped_to_dim(history):
    layers = [history[:, 0, :5], history[:, 1], history[:, 2, :3]]
    head = make_head("layer-mean", in_dims=[5, 8, 3])
    mapped = [linear(layer) for linear, layer in zip(head.align.maps, layers, strict=True)]
    expected = head.classifier(global_mean_pool(sum(mapped) / 3, BATCH))
    torch.testing.assert_close(head(layers, BATCH), expected)


@pytest.mark.parametrize("name", ["concat", "layer-mean", "jk-cat", "jk-max", "jk-lstm"])
def test_raw_input_wider_than_every_layer_is_left_out_unless_asked_for(history, name):
    layers = [history[:, :3].flatten(1), history[:, 1], history[:, 2]]
    head = make_head(name, in_dims=[24, 8, 8])
    other = [torch.randn_like(layers[0]), *layers[1:]]
    torch.testing.assert_close(head(layers, BATCH), head(other, BATCH))
    asked = make_head(name, in_dims=[24, 8, 8], history_layers=3)
    assert not torch.allclose(asked(layers, BATCH), asked(other, BATCH))


def test_lstm_does_not_grow_with_the_depth():
    shallow, deep = (make_head("jk-lstm", in_dims=[8] * depth) for depth in (2, 40))
    per_layer = 8 * 8 + 8  # the map to `dim`
    assert deep.num_parameters - shallow.num_parameters == 38 * per_layer


@pytest.mark.parametrize("name", ["attention", "set2set", "set-transformer", "gmt"])
def test_learned_set_readouts_loop_over_graphs(history, name):
    head = make_head(name)
    nodes = head.projection(history[:, -1])
    # One graph at a time needs no padding, hence no mask that could leak.
    pooled = [
        head.aggregation(own, torch.zeros(len(own), dtype=torch.long), dim_size=1)
        for own in nodes.split(SIZES.tolist())
    ]
    torch.testing.assert_close(
        head(history, BATCH), head.classifier(torch.cat(pooled)), rtol=1e-4, atol=1e-5
    )


def test_sortpool_convolves_the_first_nodes(history):
    head = make_head("sortpool", k=6)
    expected = []
    for own in head.projection(history[:, -1]).tanh().split(SIZES.tolist()):
        first = own[own[:, -1].argsort(descending=True)][:6]
        padded = torch.cat([first, torch.zeros(6 - len(first), 8)])
        expected.append(head.convolution(padded.t().unsqueeze(0)).relu().flatten(1))
    torch.testing.assert_close(head(history, BATCH), head.classifier(torch.cat(expected)))


@pytest.mark.parametrize("name", ["set-transformer", "gmt"])
def test_attention_is_the_same_with_and_without_gradients(history, name):
    # Without gradients torch takes another code path for masked attention.
    head = make_head(name)
    with torch.no_grad():
        fast = head(history, BATCH)
    torch.testing.assert_close(fast, head(history, BATCH), rtol=1e-4, atol=1e-5)


def test_parameters_of_the_probes():
    assert make_head("linear", in_dims=[5, 7]).num_parameters == 7 * 2 + 2
    assert make_head("mean", in_dims=[5, 7]).num_parameters == (7 * 8 + 8) + (8 * 2 + 2)
    assert make_head("jk-cat", in_dims=[5, 7]).num_parameters == (12 * 8 + 8) + (8 * 2 + 2)
    link = build_head("linear", [5, 7], 1, "link", dim=4)
    assert link.num_parameters == (7 * 4 + 4) + (4 + 1)


# --- buckets --------------------------------------------------------------------------------


def test_one_large_graph_does_not_pad_its_batch():
    sizes = torch.tensor([40] * 30 + [620] + [40] * 33)
    batch = torch.repeat_interleave(torch.arange(64), sizes)
    graphs = Graphs.from_batch(batch, len(batch), None, batch.device)
    areas, seen = [], []

    def pool(bucket):
        areas.append(len(bucket.graphs) * bucket.width**2)
        seen.append(bucket.nodes)
        return bucket.graphs.unsqueeze(1)

    assert pool_buckets(graphs, pool).view(-1).tolist() == list(range(64))
    assert torch.equal(torch.cat(seen).sort().values, torch.arange(len(batch)))
    assert sum(areas) == 620**2 + 63 * 40**2


def test_adjacency_of_a_bucket_is_that_of_pyg():
    sizes = torch.tensor([3, 5, 1, 4])
    batch = torch.repeat_interleave(torch.arange(4), sizes)
    edge_index = torch.tensor([[0, 1, 1, 3, 7, 9, 12, 9], [1, 0, 2, 7, 7, 10, 9, 10]])
    graphs = Graphs.from_batch(batch, len(batch), None, batch.device)
    expected = to_dense_adj(edge_index, batch)
    assert expected.max() == 2  # a repeated edge counts twice

    def pool(bucket):
        adjacency = dense_adjacency(bucket, edge_index, num_nodes=len(batch), dtype=torch.float32)
        padded = torch.zeros(len(bucket.graphs), 5, 5)
        padded[:, : bucket.width, : bucket.width] = adjacency
        return padded.flatten(1)

    assert torch.equal(pool_buckets(graphs, pool).view(4, 5, 5), expected)
