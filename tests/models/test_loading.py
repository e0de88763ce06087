from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn
from torch_geometric.nn import GATConv, GCNConv, GraphConv, SAGEConv

from histograph_post.errors import CheckpointError
from histograph_post.models import KeyMap, KeyRule, load_into, read_checkpoint

from .conftest import assert_holds, checkpoint_of, mismatch, randomized, small_model


def test_all_tensors_are_copied() -> None:
    model = small_model()
    state_dict = randomized(model)
    report = load_into(model, checkpoint_of(state_dict))
    assert_holds(model, state_dict)
    assert report.ok
    assert report.loaded == len(state_dict) == 9
    assert report.summary() == "9 tensors loaded"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_precisions_take_the_model_s(dtype: torch.dtype) -> None:
    model = small_model()
    state_dict = {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor
        for name, tensor in randomized(model).items()
    }
    report = load_into(model, checkpoint_of(state_dict))
    assert report.converted == 8
    assert model[0].weight.dtype == torch.float32
    assert torch.equal(model[0].weight, state_dict["0.weight"].to(torch.float32))
    assert model[1].num_batches_tracked == 5


class Wrapper(nn.Module):
    """A model with a ``model.`` of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.model = small_model()


def test_a_model_may_have_the_prefix_that_was_stripped() -> None:
    state_dict = randomized(small_model())
    for stripped in (("model.",), ("module.", "model.")):
        wrapper = Wrapper()
        load_into(wrapper, checkpoint_of(state_dict, *stripped))
        assert_holds(wrapper.model, state_dict)
    parallel = nn.DataParallel(Wrapper())
    load_into(parallel, checkpoint_of(state_dict, "module.", "model."))
    assert_holds(parallel.module.model, state_dict)
    twice = nn.ModuleDict({"model": Wrapper()})
    load_into(twice, checkpoint_of(state_dict, "model.", "model."))
    assert_holds(twice["model"].model, state_dict)


def test_a_key_map_may_leave_out_and_may_use_the_names_of_the_file() -> None:
    model = small_model()
    state_dict = randomized(model)
    key_map = KeyMap((KeyRule("loss.*", None), KeyRule("model.net.*", "*")))
    content = {f"net.{name}": value for name, value in state_dict.items()}
    checkpoint = checkpoint_of(content, "model.")
    load_into(model, checkpoint, key_map=key_map)
    assert_holds(model, state_dict)


def test_counters_that_old_torch_did_not_save() -> None:
    model = small_model()
    state_dict = randomized(model)
    del state_dict["1.num_batches_tracked"]
    report = load_into(model, checkpoint_of(state_dict))
    assert report.defaulted == ("1.num_batches_tracked",)
    assert model[1].num_batches_tracked == 0
    assert torch.equal(model[1].running_var, state_dict["1.running_var"])


def test_lazy_layers_take_the_shapes_of_the_file() -> None:
    built = nn.ModuleList([SAGEConv(7, 4), GATConv(4, 4), nn.Linear(4, 2)])
    state_dict = randomized(built)
    lazy = nn.ModuleList([SAGEConv(-1, 4), GATConv(-1, 4), nn.LazyLinear(2)])
    load_into(lazy, checkpoint_of(state_dict))
    assert_holds(lazy, state_dict)
    x, edge_index = torch.randn(3, 7), torch.tensor([[0, 1], [1, 2]])
    built.load_state_dict(state_dict)
    hidden = built[1](built[0](x, edge_index), edge_index)
    lazily = lazy[1](lazy[0](x, edge_index), edge_index)
    assert torch.equal(built[2](hidden), lazy[2](lazily))


def test_a_lazy_layer_still_has_an_opinion_of_its_width() -> None:
    state_dict = {"lin.weight": torch.zeros(5, 7), "bias": torch.zeros(4)}
    assert "lin.weight" in str(mismatch(GCNConv(-1, 4), state_dict))
    error = mismatch(GCNConv(-1, 4), {"lins.weight": torch.zeros(4, 7), "bias": torch.zeros(4)})
    assert "missing lin.weight lazy, nearest lins.weight" in str(error)


def test_shared_weights_are_saved_once_by_safetensors(tmp_path: Path) -> None:
    layer = nn.Linear(3, 3)
    safetensors.torch.save_model(nn.Sequential(layer, layer), tmp_path / "model.safetensors")
    checkpoint = read_checkpoint(tmp_path / "model.safetensors")
    assert len(checkpoint.state_dict) == 2
    shared = nn.Linear(3, 3)
    model = nn.Sequential(shared, shared)
    report = load_into(model, checkpoint)
    assert len(report.defaulted) == 2
    assert torch.equal(model[1].weight, layer.weight)
    separate = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    with pytest.raises(CheckpointError, match="2 missing"):
        load_into(separate, checkpoint)


@pytest.mark.parametrize(("in_file", "in_model"), [((1,), ()), ((), (1,))])
def test_one_number_fits_with_or_without_a_dimension(
    in_file: tuple[int, ...], in_model: tuple[int, ...]
) -> None:
    model = nn.ParameterDict({"eps": nn.Parameter(torch.zeros(in_model))})
    load_into(model, checkpoint_of({"eps": torch.full(in_file, 0.5)}))
    assert torch.equal(model["eps"], torch.full(in_model, 0.5))


def test_integers_are_not_weights() -> None:
    model = nn.Linear(3, 2)
    quantised = {name: value.to(torch.int8) for name, value in model.state_dict().items()}
    error = mismatch(model, quantised)
    assert "int8 in the file, float32 in the model" in str(error)


class GraphLevel(nn.Module):
    """The layout of the uvadlc tutorial's graph model."""

    def __init__(self) -> None:
        super().__init__()
        self.GNN = nn.Module()
        layers = [GraphConv(7, 256), nn.ReLU(), nn.Dropout(), GraphConv(256, 256), nn.ReLU()]
        self.GNN.layers = nn.ModuleList([*layers, nn.Dropout(), GraphConv(256, 256)])
        self.head = nn.Sequential(nn.Dropout(), nn.Linear(256, 1))


class HandWrittenGAT(nn.Module):
    """The parameters of pytorch-GAT's layer."""

    def __init__(self, in_dim: int, heads: int, dim: int) -> None:
        super().__init__()
        self.linear_proj = nn.Linear(in_dim, heads * dim, bias=False)
        self.scoring_fn_target = nn.Parameter(torch.empty(1, heads, dim))
        self.scoring_fn_source = nn.Parameter(torch.empty(1, heads, dim))
        self.bias = nn.Parameter(torch.empty(heads * dim))


def pretrained_layer() -> nn.Module:
    """The parameters of pretrain-gnns' GCN layer."""
    edges = {"edge_embedding1": nn.Embedding(6, 300), "edge_embedding2": nn.Embedding(3, 300)}
    return nn.ModuleDict({"linear": nn.Linear(300, 300), **edges})


def test_real_checkpoints_load(shared_data: Path) -> None:
    folder = shared_data / "checkpoints"
    checkpoint = read_checkpoint(folder / "uvadlc_tutorial7/GraphLevelGraphConv.ckpt")
    model = GraphLevel()
    assert load_into(model, checkpoint).loaded == 11
    assert_holds(model, {name: checkpoint.state_dict[name] for name in model.state_dict()})
    lightning = nn.ModuleDict({"model": GraphLevel()})
    assert load_into(lightning, checkpoint).loaded == 11

    checkpoint = read_checkpoint(folder / "uvadlc_tutorial7/NodeLevelGNN.ckpt")
    layers = [GCNConv(1433, 16), nn.ReLU(), nn.Dropout(), GCNConv(16, 7)]
    model = nn.ModuleDict({"layers": nn.ModuleList(layers)})
    assert load_into(model, checkpoint).loaded == 4

    checkpoint = read_checkpoint(folder / "pytorch-GAT/gat_cora_000000.pth")
    model = nn.ModuleDict(
        {"gat_net": nn.Sequential(HandWrittenGAT(1433, 8, 8), HandWrittenGAT(64, 1, 7))}
    )
    assert load_into(model, checkpoint).loaded == 8

    checkpoint = read_checkpoint(folder / "pretrain-gnns/chem_gcn_contextpred.pth")
    model = nn.ModuleDict(
        {
            "x_embedding1": nn.Embedding(120, 300),
            "x_embedding2": nn.Embedding(3, 300),
            "gnns": nn.ModuleList(pretrained_layer() for _ in range(5)),
            "batch_norms": nn.ModuleList(nn.BatchNorm1d(300) for _ in range(5)),
        }
    )
    assert load_into(model, checkpoint).loaded == 47
    assert torch.equal(model["x_embedding1"].weight, checkpoint.state_dict["x_embedding1.weight"])


def test_weights_under_one_name_are_taken_from_there(tmp_path: Path) -> None:
    """As Lightning saves them: beside a loss, a metric and a moving average."""
    state_dict = randomized(small_model())
    beside = {"loss.pos_weight": torch.ones(1), "metric.total": torch.tensor(3)}
    average = {f"ema.{name}": value + 1 for name, value in state_dict.items()}
    for prefix in ("model.", "net.gnn."):
        whole = {f"{prefix}{name}": value for name, value in state_dict.items()}
        model, path = small_model(), tmp_path / "model.ckpt"
        report = load_into(model, checkpoint_of({**whole, **beside, **average}))
        assert_holds(model, state_dict)
        assert set(report.left_out) == beside.keys() | average.keys()
        assert "loss.pos_weight" in report.notes[0]
        torch.save({"state_dict": {**whole, **beside, **average}}, path)
        checkpoint = read_checkpoint(path, state="ema")
        load_into(model, checkpoint)
        assert_holds(model, {name: value + 1 for name, value in state_dict.items()})
        assert "ema (9 tensors)" in read_checkpoint(path).notes[0]


def test_two_parts_that_fit_are_not_guessed_between() -> None:
    state_dict = randomized(small_model())
    both = {f"{part}.{name}": t for part in ("student", "other") for name, t in state_dict.items()}
    with pytest.raises(CheckpointError, match="student, other; choose one, as in --state student"):
        load_into(small_model(), checkpoint_of(both))


def test_what_may_be_missing_is_zero_and_named() -> None:
    encoder, head = small_model(), nn.Linear(2, 1)
    model = nn.ModuleDict({"encoder": encoder, "head": head})
    state_dict = {f"encoder.{name}": value for name, value in randomized(encoder).items()}
    with pytest.raises(CheckpointError, match="2 missing"):
        load_into(model, checkpoint_of(state_dict))
    report = load_into(model, checkpoint_of(state_dict), allow_missing=True)
    assert [row.name for row in report.missing] == ["head.weight", "head.bias"]
    assert not head.weight.any()
    assert torch.equal(encoder[0].weight, state_dict["encoder.0.weight"])
    # A file with anything else in it, or with nothing of the model, is another model's.
    for other in ({**state_dict, "more": torch.ones(1)}, {"encoder.9.weight": torch.ones(1)}):
        with pytest.raises(CheckpointError, match="does not fit"):
            load_into(model, checkpoint_of(other), allow_missing=True)
