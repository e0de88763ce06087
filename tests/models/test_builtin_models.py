"""The built-in models against hand-written forwards, at any depth, and through checkpoints."""

from __future__ import annotations

import io

import pytest
import safetensors.torch
import torch
from torch import Tensor
from torch.nn import functional as F
from torch_geometric.data import Batch, Data
from torch_geometric.nn import global_max_pool, global_mean_pool
from torch_geometric.utils import erdos_renyi_graph, to_dense_adj

from histograph_post.errors import ModelError
from histograph_post.models import BUILT_IN, build_model, call_model
from histograph_post.models.builtin_models import GNN, GNNSettings

ATOM = [119, 5, 12]
BOND = [5, 6]


def make_batch(*, categories: bool = False, sizes: tuple[int, ...] = (6, 1, 9)) -> Batch:
    """Random undirected graphs, one of them a single node."""
    torch.manual_seed(0)
    graphs = []
    for nodes in sizes:
        edge_index = erdos_renyi_graph(nodes, 0.4)
        num_edges = edge_index.shape[1]
        if categories:
            x = torch.stack([torch.randint(size, (nodes,)) for size in ATOM], dim=1)
            edge_attr = torch.stack([torch.randint(size, (num_edges,)) for size in BOND], dim=1)
        else:
            x, edge_attr = torch.randn(nodes, 4), torch.randn(num_edges, 2)
        graphs.append(Data(x=x, edge_index=edge_index, edge_attr=edge_attr))
    return Batch.from_data_list(graphs)


def make_model(kind: str, **args) -> GNN:
    torch.manual_seed(1)
    sizes = {"in_dim": 4, "out_dim": 3, "hidden": 8, "num_layers": 2}
    return GNN(GNNSettings.from_args({**sizes, "kind": kind, **args})).eval()


def normalised_adjacency(batch: Batch) -> Tensor:
    adjacency = to_dense_adj(batch.edge_index, max_num_nodes=batch.num_nodes)[0]
    adjacency = adjacency + torch.eye(batch.num_nodes)  # [num_nodes, num_nodes]
    scale = adjacency.sum(dim=1).rsqrt()
    return scale[:, None] * adjacency * scale


def test_gcn_equals_the_formula():
    batch, model = make_batch(), make_model("gcn", norm="none", residual="none", pool="max")
    h = batch.x @ model.embedding.linear.weight.T + model.embedding.linear.bias
    for conv in model.convs:
        h = torch.relu(normalised_adjacency(batch) @ h @ conv.lin.weight.T + conv.bias)
    expected = model.classifier(global_max_pool(h, batch.batch))  # [num_graphs, out_dim]
    torch.testing.assert_close(call_model(model, batch), expected)


def test_gin_equals_the_formula():
    batch = make_batch()
    model = make_model("gin", norm="layer", residual="scaled", activation="elu", classifier="mlp")
    adjacency = to_dense_adj(batch.edge_index, max_num_nodes=batch.num_nodes)[0]
    h = model.embedding.linear(batch.x)
    for conv, norm in zip(model.convs, model.norms, strict=True):
        inner = (1 + conv.eps) * h + adjacency.T @ h
        inner = conv.nn[2](F.elu(conv.nn[0](inner)))
        h = h + F.elu(F.layer_norm(inner, (8,), norm.weight, norm.bias)) / 2**0.5
    pooled = global_mean_pool(h, batch.batch)  # [num_graphs, hidden]
    expected = model.classifier[3](F.elu(model.classifier[0](pooled)))
    torch.testing.assert_close(call_model(model, batch), expected)


def test_sage_equals_the_formula():
    batch, model = make_batch(), make_model("sage", norm="none", residual="add", pool="none")
    adjacency = to_dense_adj(batch.edge_index, max_num_nodes=batch.num_nodes)[0].T
    mean = adjacency / adjacency.sum(dim=1, keepdim=True).clamp(min=1)
    h = model.embedding.linear(batch.x)
    for conv in model.convs:
        h = h + torch.relu(conv.lin_l(mean @ h) + h @ conv.lin_r.weight.T)
    torch.testing.assert_close(call_model(model, batch), model.classifier(h))


def test_categories_are_embedded_and_summed():
    batch = make_batch(categories=True)
    model = make_model("gin", in_dim=ATOM, edge_dim=BOND, num_layers=1, norm="none", residual="add")
    h = sum(column.weight[batch.x[:, i]] for i, column in enumerate(model.embedding.columns))
    bonds = [column.weight for column in model.edge_embedding.columns]
    edges = sum(weight[batch.edge_attr[:, i]] for i, weight in enumerate(bonds))
    source, target = batch.edge_index
    messages = torch.relu(h[source] + edges)  # [num_edges, hidden]
    total = torch.zeros_like(h).index_add(0, target, messages)
    h = h + torch.relu(model.convs[0].nn(h + total))
    expected = model.classifier(global_mean_pool(h, batch.batch))
    torch.testing.assert_close(call_model(model, batch), expected)


@pytest.mark.parametrize("norm", ["none", "batch", "layer", "graph"])
@pytest.mark.parametrize("kind", BUILT_IN)
def test_a_graph_is_predicted_the_same_alone_and_in_a_batch(kind, norm):
    batch, model = make_batch(), make_model(kind, norm=norm)
    alone = [call_model(model, Batch.from_data_list([g])) for g in batch.to_data_list()]
    torch.testing.assert_close(call_model(model, batch), torch.cat(alone))


@pytest.mark.parametrize("kind", BUILT_IN)
def test_the_order_of_nodes_does_not_matter(kind):
    batch, model = make_batch(sizes=(9,)), make_model(kind)
    order = torch.randperm(9)
    renamed = Data(
        x=batch.x[order], edge_index=order.argsort()[batch.edge_index], edge_attr=batch.edge_attr
    )
    torch.testing.assert_close(
        call_model(model, Batch.from_data_list([renamed])), call_model(model, batch)
    )


@pytest.mark.parametrize("kind", ["gin", "gat", "gps"])
def test_edge_features_count_where_they_are_asked_for(kind):
    batch = make_batch()
    other = batch.clone()
    other.edge_attr = -batch.edge_attr
    reads, ignores = make_model(kind, edge_dim=2), make_model(kind)
    assert not torch.allclose(call_model(reads, batch), call_model(reads, other))
    assert torch.equal(call_model(ignores, batch), call_model(ignores, other))
    del other.edge_attr
    with pytest.raises(ModelError, match="the data has no edge_attr"):
        call_model(reads, other)


def test_gcn_reads_edge_weights():
    batch, model = make_batch(), make_model("gcn")
    plain = call_model(model, batch)
    batch.edge_weight = torch.ones(batch.num_edges)
    torch.testing.assert_close(call_model(model, batch), plain)
    batch.edge_weight = 3 * batch.edge_weight
    assert not torch.allclose(call_model(model, batch), plain)


def test_features_of_the_wrong_kind():
    with pytest.raises(ModelError, match=r"node features are \[16, 3\] int64.*in_dim=\[119,5,12\]"):
        call_model(make_model("gin", in_dim=3), make_batch(categories=True))
    with pytest.raises(ModelError, match=r"\[16, 4\] float32; .*3 columns of categories"):
        call_model(make_model("gin", in_dim=ATOM), make_batch())
    with pytest.raises(ModelError, match=r"edge features are .*built for 5 columns of numbers"):
        call_model(make_model("gin", edge_dim=5), make_batch())


@pytest.mark.parametrize(
    ("norm", "residual"), [("batch", "scaled"), ("layer", "scaled"), ("batch", "add")]
)
@pytest.mark.parametrize("kind", BUILT_IN)
def test_sixty_four_layers_start_finite(kind, norm, residual):
    batch = make_batch(sizes=(12, 1, 15))
    model = make_model(kind, num_layers=64, norm=norm, residual=residual)
    if residual == "scaled":  # even where batch norm has no statistics yet
        assert call_model(model, batch).isfinite().all()
    output = call_model(model.train(), batch)
    output.square().mean().backward()
    assert output.isfinite().all()
    assert all(weight.grad.isfinite().all() for weight in model.parameters())
    assert model.embedding.linear.weight.grad.abs().max() > 1e-6  # a signal comes all the way


@pytest.mark.parametrize("kind", ["gcn", "gin", "gat", "sage"])
def test_scaled_residuals_keep_the_scale_of_the_activations(kind):
    batch = make_batch(sizes=(20, 25, 30))
    spread = {
        depth: call_model(
            make_model(kind, num_layers=depth, norm="layer", pool="none"), batch
        ).std()
        for depth in (2, 64)
    }
    assert 0.2 < spread[64] / spread[2] < 5


@pytest.mark.parametrize("kind", BUILT_IN)
def test_sixty_four_layers_train(kind):
    batch = make_batch(sizes=(12,) * 8)
    target = torch.arange(8) % 2
    model = make_model(kind, num_layers=64, out_dim=2).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(8):
        loss = F.cross_entropy(call_model(model, batch), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("kind", BUILT_IN)
def test_a_checkpoint_alone_rebuilds_the_model(kind, tmp_path):
    settings = {"pool": "sum", "activation": "gelu", "dropout": 0.5, "heads": 2, "norm": "graph"}
    model, batch = make_model(kind, **settings, classifier="mlp"), make_batch()
    safetensors.torch.save_file(model.state_dict(), tmp_path / "model.safetensors")
    state_dict = safetensors.torch.load_file(tmp_path / "model.safetensors")
    rebuilt = build_model(kind, {}, state_dict=state_dict, in_dim=4, out_dim=17).eval()
    rebuilt.load_state_dict(state_dict)
    assert rebuilt.settings == model.settings
    assert torch.equal(call_model(rebuilt, batch), call_model(model, batch))


def test_a_pickled_checkpoint_is_safe_to_read():
    model, file = make_model("gin", in_dim=ATOM), io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    state_dict = torch.load(file, weights_only=True)
    assert build_model("gin", {}, state_dict=state_dict).settings.in_dim == ATOM


def test_arguments_win_over_the_checkpoint():
    state_dict = make_model("gin", pool="sum").state_dict()
    model = build_model("gin", {"pool": "max"}, state_dict=state_dict)
    model.load_state_dict(state_dict)
    assert model.settings.pool == "max"
    assert model.settings.hidden == 8


@pytest.mark.parametrize("norm", ["none", "batch", "layer", "graph"])
@pytest.mark.parametrize("kind", BUILT_IN)
def test_shapes_tell_the_sizes_when_the_settings_are_gone(kind, norm):
    edge_dim = BOND if kind in ("gin", "gat", "gps") else None
    heads = {"heads": 2} if kind == "gat" else {}  # those of gps leave no trace
    model = make_model(kind, in_dim=ATOM, norm=norm, edge_dim=edge_dim, num_layers=11, **heads)
    state_dict = model.state_dict()
    del state_dict["_extra_state"]
    rebuilt = build_model(kind, {}, state_dict=state_dict)
    rebuilt.load_state_dict(state_dict)
    assert rebuilt.settings == model.settings


def with_settings(text: bytes) -> dict[str, Tensor]:
    """The weights of a model, with other settings beside them."""
    state_dict = make_model("gin").state_dict()
    state_dict["_extra_state"] = torch.tensor(list(text), dtype=torch.uint8)
    return state_dict


@pytest.mark.parametrize("text", [b"", b'{"pool": "su', b"3", b"\xff\xfe", b"[" * 100_000])
def test_damaged_settings_are_named(text):
    with pytest.raises(ModelError, match="settings in the checkpoint are damaged"):
        build_model("gin", {}, state_dict=with_settings(text))


def test_settings_of_a_later_version_are_refused():
    with pytest.raises(ModelError, match="settings this version does not know: jumping"):
        build_model("gin", {}, state_dict=with_settings(b'{"jumping": "cat"}'))


def test_recorded_sizes_cannot_exceed_the_weights():
    state_dict = with_settings(b'{"hidden": 1000000000, "num_layers": 1000000, "pool": "sum"}')
    settings = build_model("gin", {}, state_dict=state_dict).settings
    assert (settings.hidden, settings.num_layers, settings.pool) == (8, 2, "sum")
