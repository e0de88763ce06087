from __future__ import annotations

import hashlib
import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from histograph_post.errors import CheckpointError, NotFoundError
from histograph_post.models import Checkpoint, read_checkpoint

STATE = {"conv.weight": torch.arange(6.0).reshape(2, 3), "conv.bias": torch.ones(2)}
AVERAGED = {name: tensor + 1 for name, tensor in STATE.items()}
SINGLE_LAYER = {"weight": torch.ones(2, 3), "bias": torch.ones(2)}


def read(path: Path, content: object) -> Checkpoint:
    torch.save(content, path)
    return read_checkpoint(path)


def trained_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize(
    ("content", "found_at"),
    [
        (STATE, "bare"),
        (SINGLE_LAYER, "bare"),
        ({"state_dict": STATE, "epoch": 3}, "state_dict"),
        ({"model_state_dict": STATE, "loss": 0.1}, "model_state_dict"),
        ({"model": STATE}, "model"),
        ({"net": STATE, "acc": 90.0}, "net"),
        ({"network": STATE}, "network"),
        ({"model": {"state_dict": STATE, "name": "gin"}}, "model.state_dict"),
        ({"ema": STATE}, "ema"),
        ({"some_name": STATE, "epoch": 3}, "some_name"),
        ({"a": {"b": {"c": STATE}}}, "a.b.c"),
        ([STATE, {"epoch": 3}], "0"),
        ({"state_dict": STATE, "ema": AVERAGED, "teacher": AVERAGED}, "state_dict"),
        ({"ema": {"state_dict": AVERAGED}, "model": {"state_dict": STATE}}, "model.state_dict"),
        ({"state_dict": STATE, "mean": torch.ones(3), "std": torch.ones(3)}, "state_dict"),
        ({"gnn": STATE, "mean": torch.ones(3), "std": torch.ones(3)}, "gnn"),
        ({"state_dict": SINGLE_LAYER, "input.stats": {"a.mean": torch.ones(3)}}, "state_dict"),
        ({"gnn": STATE, "input.mean": torch.ones(3), "epoch": 3, "loss": 0.1}, "gnn"),
        ({"gnn": STATE, "opt": {"moments": AVERAGED}}, "gnn"),
        ({**STATE, "epoch": 3}, "bare"),
    ],
)
def test_the_state_dict_is_found(tmp_path: Path, content: Any, found_at: str) -> None:
    checkpoint = read(tmp_path / "model.pt", content)
    assert checkpoint.found_at == found_at
    expected = SINGLE_LAYER if "weight" in checkpoint.state_dict else STATE
    assert checkpoint.state_dict.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(checkpoint.state_dict[name], tensor)


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ({"encoder": STATE, "decoder": AVERAGED}, "encoder (2 tensors), decoder (2 tensors)"),
        ({"a": {"state_dict": STATE}, "b": {"state_dict": STATE | {}}}, "a.state_dict (2 tensors)"),
        ({}, "nothing in it"),
        ({"epoch": 3, "loss": 0.5}, "a mapping with epoch, loss"),
        (torch.ones(3), "a Tensor"),
        ([1, 2], "a list"),
        ({"x": torch.ones(2, 3), "edge_index": torch.ones(2, 1)}, "holds graphs"),
        (
            ({"x": torch.ones(2, 3), "edge_index": torch.ones(2, 1)}, {"x": torch.ones(2)}),
            "holds graphs",
        ),
        ({"conv.weight": torch.ones(2, device="meta")}, "conv.weight was saved without values"),
    ],
)
def test_no_one_state_dict_is_an_error(tmp_path: Path, content: Any, found: str) -> None:
    path = tmp_path / "model.pt"
    with pytest.raises(CheckpointError) as caught:
        read(path, content)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert found in message
    assert "\n" not in message


def test_the_same_state_dict_under_two_names_is_one(tmp_path: Path) -> None:
    assert read(tmp_path / "model.pt", {"first": STATE, "second": STATE}).found_at == "first"


@pytest.mark.parametrize("name", ["optimizer", "opt", "whatever"])
@pytest.mark.parametrize("place", ["state_dict", "gnn"])
def test_optimizer_state_is_not_mistaken_for_weights(tmp_path: Path, place: str, name: str) -> None:
    model, optimizer = trained_optimizer()
    content = {name: optimizer.state_dict(), place: model.state_dict()}
    checkpoint = read(tmp_path / "model.pt", content)
    assert checkpoint.found_at == place
    assert checkpoint.state_dict.keys() == model.state_dict().keys()


def test_a_file_with_nothing_but_optimizer_state(tmp_path: Path) -> None:
    model, optimizer = trained_optimizer()
    with pytest.raises(CheckpointError, match="state of an optimizer"):
        read(tmp_path / "model.pt", optimizer.state_dict())
    # Sharded training names the parameters; one alone looks most like a state dict.
    moments = {"exp_avg": torch.ones(2, 3), "exp_avg_sq": torch.ones(2, 3)}
    for content in (
        {"optimizer": {"moments": dict(model.state_dict())}},
        {"state": {"conv.weight": moments}},
    ):
        with pytest.raises(CheckpointError, match="no state dict"):
            read(tmp_path / "model.pt", content)


@pytest.mark.parametrize(
    "prefixes",
    [(), ("module.",), ("model.",), ("_orig_mod.",), ("module.", "model."), ("model.",) * 2],
)
def test_prefixes_of_wrappers_are_stripped(tmp_path: Path, prefixes: tuple[str, ...]) -> None:
    wrapped = {"".join(prefixes) + name: tensor for name, tensor in STATE.items()}
    checkpoint = read(tmp_path / "model.pt", wrapped)
    assert checkpoint.stripped == prefixes
    assert checkpoint.state_dict.keys() == STATE.keys()


def test_a_prefix_of_some_names_is_no_wrapper(tmp_path: Path) -> None:
    mixed = {"model.conv.weight": torch.ones(2), "loss.weight": torch.ones(3)}
    checkpoint = read(tmp_path / "model.pt", mixed)
    assert checkpoint.stripped == ()
    assert checkpoint.state_dict.keys() == mixed.keys()


def test_a_model_wrapped_by_torch_itself(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    wrapped = nn.DataParallel(torch.compile(model, backend="eager"))
    checkpoint = read(tmp_path / "model.pt", {"state_dict": wrapped.state_dict()})
    assert checkpoint.stripped == ("module.", "_orig_mod.")
    assert torch.equal(checkpoint.state_dict["0.weight"], model[0].weight)


def test_plain_values_beside_the_weights_are_kept(tmp_path: Path) -> None:
    content = {
        "epoch": 3,
        "best": float("nan"),
        "name": "gin",
        "log": "x" * 5000,
        "seeds": [1, 2],
        "hyper_parameters": {"dim": 64, "norm": True, "nested": {"too": "deep"}},
        "optimizer": {"lr": 0.1},
        "state_dict": STATE,
    }
    assert read(tmp_path / "model.pt", content).metadata == {
        "epoch": 3,
        "best": "nan",
        "name": "gin",
        "hyper_parameters.dim": 64,
        "hyper_parameters.norm": True,
    }


@pytest.mark.parametrize("name", ["model.pt", "model.pth.tar", "model.ckpt", "pytorch_model.bin"])
@pytest.mark.parametrize("zipped", [True, False])
def test_the_name_of_a_file_does_not_matter(tmp_path: Path, name: str, zipped: bool) -> None:
    path = tmp_path / name
    torch.save(STATE, path, _use_new_zipfile_serialization=zipped)
    checkpoint = read_checkpoint(str(path))
    assert checkpoint.path == path
    assert checkpoint.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert torch.equal(checkpoint.state_dict["conv.weight"], STATE["conv.weight"])


@pytest.mark.parametrize("name", ["model.safetensors", "model.bin"])
def test_safetensors(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    tensors = {f"module.{key}": tensor.half() for key, tensor in STATE.items()}
    safetensors.torch.save_file(tensors, path, metadata={"format": "pt", "epoch": "3"})
    checkpoint = read_checkpoint(path)
    assert checkpoint.found_at == "bare"
    assert checkpoint.stripped == ("module.",)
    assert checkpoint.metadata == {"format": "pt", "epoch": "3"}
    assert checkpoint.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert torch.equal(checkpoint.state_dict["conv.weight"], STATE["conv.weight"].half())


def test_every_truncation_of_safetensors_is_noticed(tmp_path: Path) -> None:
    data = safetensors.torch.save(STATE)
    path = tmp_path / "model.safetensors"
    for length in range(len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(CheckpointError, match=r"model\.safetensors: "):
            read_checkpoint(path)


def test_what_is_no_regular_file(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no such file"):
        read_checkpoint(tmp_path / "absent.pt")
    with pytest.raises(CheckpointError, match="a folder"):
        read_checkpoint(tmp_path)
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe.pt")
        with pytest.raises(CheckpointError, match="not a regular file"):
            read_checkpoint(tmp_path / "pipe.pt")


@pytest.mark.parametrize(
    ("file", "tensors", "found_at", "stripped", "sample"),
    [
        ("pretrain-gnns/chem_gcn_contextpred.pth", 47, "bare", (), "gnns.4.linear.weight"),
        ("pretrain-gnns/chem_gcn_supervised_contextpred.pth", 47, "bare", (), "gnns.0.linear.bias"),
        ("pretrain-gnns/chem_graphsage_contextpred.pth", 47, "bare", (), "x_embedding1.weight"),
        (
            "uvadlc_tutorial7/GraphLevelGraphConv.ckpt",
            11,
            "state_dict",
            ("model.",),
            "GNN.layers.6.lin_rel.weight",
        ),
        ("uvadlc_tutorial7/NodeLevelGNN.ckpt", 4, "state_dict", ("model.",), "layers.0.lin.weight"),
        ("uvadlc_tutorial7/NodeLevelMLP.ckpt", 4, "state_dict", ("model.",), "layers.0.weight"),
        ("pytorch-GAT/gat_cora_000000.pth", 8, "state_dict", (), "gat_net.0.scoring_fn_source"),
    ],
)
def test_real_checkpoints(
    shared_data: Path,
    file: str,
    tensors: int,
    found_at: str,
    stripped: tuple[str, ...],
    sample: str,
) -> None:
    path = shared_data / "checkpoints" / file
    checkpoint = read_checkpoint(path)
    assert len(checkpoint.state_dict) == tensors
    assert checkpoint.found_at == found_at
    assert checkpoint.stripped == stripped
    content = torch.load(path, map_location="cpu", weights_only=True)
    raw: dict[str, Tensor] = content if found_at == "bare" else content["state_dict"]
    assert torch.equal(checkpoint.state_dict[sample], raw["".join(stripped) + sample])
    assert all(tensor.device.type == "cpu" for tensor in checkpoint.state_dict.values())


def test_real_files_have_what_they_stand_for(shared_data: Path) -> None:
    folder = shared_data / "checkpoints"
    assert b"cuda:" in (folder / "pretrain-gnns/chem_gcn_contextpred.pth").read_bytes()
    assert read_checkpoint(folder / "pytorch-GAT/gat_cora_000000.pth").metadata["test_acc"] == 0.822
    lightning = read_checkpoint(folder / "uvadlc_tutorial7/GraphLevelGraphConv.ckpt")
    assert lightning.metadata["hyper_parameters.c_hidden"] == 256


def test_a_real_file_is_read_past_its_classes(shared_data: Path) -> None:
    folder = shared_data / "checkpoints"
    chemprop = read_checkpoint(folder / "chemprop/example_model_v2_regression_mol.ckpt")
    assert chemprop.found_at == "state_dict"
    assert chemprop.state_dict["message_passing.W_h.weight"].shape == (300, 300)
    assert "chemprop.nn.message_passing.base.BondMessagePassing" in chemprop.past


def test_a_real_module_is_read_without_its_class(shared_data: Path) -> None:
    refine = read_checkpoint(shared_data / "checkpoints/ReFine/mutag_net.pt")
    assert refine.past[0] == "__main__.MutagNet"
    assert {name.split(".")[0] for name in refine.state_dict} >= {"node_emb", "convs"}
    assert all(bool(torch.isfinite(value).all()) for value in refine.state_dict.values())


@pytest.mark.parametrize("state", ["ema", "ema.state_dict", "teacher.model", "callbacks.SWA.avg"])
def test_a_state_dict_is_chosen_by_its_name(tmp_path: Path, state: str) -> None:
    content: dict[str, Any] = {"state_dict": STATE, "epoch": 3}
    *places, last = state.split(".")
    node = content
    for place in places:
        node = node.setdefault(place, {})
    node[last] = AVERAGED
    torch.save(content, tmp_path / "model.pt")
    usual = read_checkpoint(tmp_path / "model.pt")
    assert torch.equal(usual.state_dict["conv.bias"], STATE["conv.bias"])
    assert usual.others == {state: 2}
    assert f"{state} (2 tensors)" in usual.notes[0]
    chosen = read_checkpoint(tmp_path / "model.pt", state=state)
    assert chosen.found_at == state
    assert torch.equal(chosen.state_dict["conv.bias"], AVERAGED["conv.bias"])


def test_a_name_that_is_not_there_is_answered_with_those_that_are(tmp_path: Path) -> None:
    torch.save({"state_dict": STATE, "ema": AVERAGED}, tmp_path / "model.pt")
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(tmp_path / "model.pt", state="swa")
    assert "--state swa" in str(caught.value)
    assert "state_dict (2 tensors), ema (2 tensors)" in str(caught.value)


def test_the_counter_of_averaged_weights_is_no_weight(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    averaged = torch.optim.swa_utils.AveragedModel(model)
    checkpoint = read(tmp_path / "model.pt", averaged.state_dict())
    assert checkpoint.state_dict.keys() == model.state_dict().keys()


def test_a_pickled_state_dict(tmp_path: Path) -> None:
    """As ``pickle.dump`` writes it, which holds a file of torch for every tensor."""
    path = tmp_path / "model.pkl"
    path.write_bytes(pickle.dumps(STATE))
    checkpoint = read_checkpoint(path)
    for name, tensor in STATE.items():
        assert torch.equal(checkpoint.state_dict[name], tensor)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.bool, torch.uint16]
)
@pytest.mark.parametrize("zipped", [True, False])
def test_views_of_any_type_are_as_torch_reads_them(
    tmp_path: Path, dtype: torch.dtype, zipped: bool
) -> None:
    base = torch.arange(12).reshape(3, 4).to(dtype)
    content = {"a.base": base, "a.turned": base.T, "a.part": base[1:, ::2], "a.none": base[:0]}
    torch.save(content, tmp_path / "model.pt", _use_new_zipfile_serialization=zipped)
    found = read_checkpoint(tmp_path / "model.pt").state_dict
    for name, tensor in content.items():
        assert found[name].dtype == dtype
        assert found[name].stride() == tensor.stride()
        assert found[name].tolist() == tensor.tolist()


def sharded(folder: Path, weight_map: dict[str, str]) -> Path:
    folder.mkdir()
    safetensors.torch.save_file(STATE, folder / "part.safetensors")
    (folder / "config.json").write_text('{"hidden": 64}')
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_a_folder_of_huggingface(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "whole", dict.fromkeys(STATE, "part.safetensors"))
    checkpoint = read_checkpoint(folder)
    assert checkpoint.path == folder
    assert checkpoint.state_dict.keys() == STATE.keys()
    assert checkpoint.metadata == {"hidden": 64}


@pytest.mark.parametrize(
    ("weight_map", "found"),
    [
        ({"conv.weight": "../part.safetensors"}, "expected a name without path"),
        ({"conv.weight": "/etc/passwd"}, "expected a name without path"),
        ({"conv.weight": "absent.safetensors"}, "no such file"),
        ({"conv.absent": "part.safetensors"}, "found no conv.absent"),
        ({}, "found no weight_map"),
        ([1], "found no weight_map"),
    ],
)
def test_an_index_is_not_believed(tmp_path: Path, weight_map: Any, found: str) -> None:
    with pytest.raises((CheckpointError, NotFoundError), match=found):
        read_checkpoint(sharded(tmp_path / "folder", weight_map))
