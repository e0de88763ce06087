from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import enum
import io
import os
import pathlib
import pickle
import struct
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch_geometric.data import Data

from histograph_post.errors import CheckpointError, HistographError, UnsafeCheckpointError
from histograph_post.models import read_checkpoint
from histograph_post.utils.unpickling import printable

WEIGHTS = {"conv.weight": torch.arange(6.0).reshape(2, 3), "conv.bias": torch.ones(2)}


class Payload:
    """Creates a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder),)


def save(content: object, *, zipped: bool = True, protocol: int = 2) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer, pickle_protocol=protocol, _use_new_zipfile_serialization=zipped)
    return buffer.getvalue()


def refusal(path: Path, content: bytes, *, trust: bool = False) -> CheckpointError:
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(path, trust=trust)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    assert "\x1b" not in message
    return caught.value


def legacy_with_system_entry(entry: object) -> bytes:
    """A legacy file with something in the pickle that describes the machine it was written on."""
    stream = io.BytesIO(save(WEIGHTS, zipped=False))
    start = [pickle.load(stream) for _ in range(2)]
    pickle.load(stream)
    return b"".join(pickle.dumps(part, 2) for part in [*start, entry]) + stream.read()


@pytest.mark.parametrize("form", ["zip", "legacy", "legacy system", "protocol 4", "plain pickle"])
def test_code_in_a_file_is_named_and_does_not_run(tmp_path: Path, form: str) -> None:
    folder = tmp_path / "made-by-the-file"
    content = {**WEIGHTS, "extra": Payload(folder)}
    data = {
        "zip": lambda: save(content),
        "legacy": lambda: save(content, zipped=False),
        "legacy system": lambda: legacy_with_system_entry(Payload(folder)),
        "protocol 4": lambda: save(content, protocol=4),
        "plain pickle": lambda: pickle.dumps(content),
    }[form]()

    error = refusal(tmp_path / "model.pt", data)

    assert isinstance(error, UnsafeCheckpointError)
    assert f"{os.mkdir.__module__}.mkdir" in str(error)
    assert "--trust-checkpoint" in str(error)
    assert not folder.exists()
    # The payload is live: this is what the refusal prevented.
    checkpoint = read_checkpoint(tmp_path / "model.pt", trust=True)
    assert folder.is_dir()
    assert torch.equal(checkpoint.state_dict["conv.weight"], WEIGHTS["conv.weight"])


class Net(nn.Module):
    """A module of one's own, with what state dicts leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 2, bias=False), nn.BatchNorm1d(2)])
        self.scale = nn.Parameter(torch.ones(2))
        self.register_buffer("passing", torch.ones(1), persistent=False)
        self.tied = self.layers[0]


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_a_whole_module_gives_its_weights_without_its_code(
    tmp_path: Path, zipped: bool, protocol: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, path = Net(), tmp_path / "model.pt"
    path.write_bytes(save({"net": module, "epoch": 3}, zipped=zipped, protocol=protocol))
    monkeypatch.delattr(f"{__name__}.Net")  # it cannot be looked up any more

    checkpoint = read_checkpoint(path)

    assert checkpoint.found_at == "net"
    assert checkpoint.metadata["epoch"] == 3
    assert f"{__name__}.Net" in checkpoint.past
    assert list(checkpoint.state_dict) == list(module.state_dict())
    for name, tensor in module.state_dict().items():
        assert torch.equal(checkpoint.state_dict[name], tensor)


class Sealed(nn.Linear):
    """A module that only its own code can rebuild."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _unseal, (self.weight.tolist(),)


def _unseal(rows: list[list[float]]) -> nn.Linear:
    made = nn.Linear(len(rows[0]), len(rows))
    with torch.no_grad():
        made.weight.copy_(torch.tensor(rows))
    return made


def test_trust_is_remembered_by_the_bytes_of_the_file(tmp_path: Path, state_home: Path) -> None:
    module, path = Sealed(3, 2), tmp_path / "model.pt"
    error = refusal(path, save(module))
    assert isinstance(error, UnsafeCheckpointError)
    assert f"{__name__}._unseal" in str(error)
    assert not state_home.exists()

    first = read_checkpoint(path, trust=True)
    moved = path.rename(tmp_path / "moved.pt")
    again = read_checkpoint(moved)

    assert torch.equal(first.state_dict["weight"], module.weight)
    assert torch.equal(again.state_dict["weight"], module.weight)
    # Other bytes are another file, whatever its name.
    assert isinstance(refusal(moved, save(Sealed(3, 2))), UnsafeCheckpointError)


def test_a_home_that_cannot_be_written_to_only_forgets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_text("in the way")
    monkeypatch.setenv("XDG_STATE_HOME", str(path))
    data = save(Sealed(3, 2))
    (tmp_path / "model.pt").write_bytes(data)
    assert "weight" in read_checkpoint(tmp_path / "model.pt", trust=True).state_dict
    refusal(tmp_path / "model.pt", data)


def test_what_can_do_harm_is_named_before_the_rest(tmp_path: Path) -> None:
    plain = [argparse.Namespace(), nn.ReLU(), nn.Linear(1, 1), nn.Tanh(), nn.GELU()]
    error = refusal(tmp_path / "a.pt", save([*plain, Payload(tmp_path / "made"), WEIGHTS]))
    assert f"asks for {os.mkdir.__module__}.mkdir, argparse.Namespace, " in str(error)
    assert "more;" in str(error)


@dataclasses.dataclass
class Config:
    hidden: int = 64
    name: str = "gin"


class Color(enum.Enum):
    RED = 1


@pytest.mark.parametrize("form", ["zip", "legacy", "protocol 4", "plain pickle"])
def test_weights_are_read_past_what_stands_beside_them(tmp_path: Path, form: str) -> None:
    beside = {
        "args": argparse.Namespace(lr=0.1, hidden=32),
        "score": np.float64(0.93),
        "curve": np.arange(3.0),
        "folder": pathlib.PurePosixPath("runs/1"),
        "when": datetime.datetime(2024, 5, 1),
        "config": Config(),
        "color": Color.RED,
        "names": {"a", "b"},
        "device": torch.device("cpu"),
        "counts": collections.Counter("aab"),
        "function": os.path.join,
    }
    content = {"state_dict": collections.OrderedDict(WEIGHTS), **beside, "epoch": 3}
    path = tmp_path / "model.pt"
    path.write_bytes(
        {
            "zip": lambda: save(content),
            "legacy": lambda: save(content, zipped=False),
            "protocol 4": lambda: save(content, protocol=4),
            "plain pickle": lambda: pickle.dumps(content),
        }[form]()
    )
    checkpoint = read_checkpoint(path)
    assert checkpoint.found_at == "state_dict"
    for name, tensor in WEIGHTS.items():
        assert torch.equal(checkpoint.state_dict[name], tensor)
    assert checkpoint.metadata["epoch"] == 3
    assert checkpoint.metadata["args.hidden"] == 32
    assert "argparse.Namespace" in checkpoint.past
    assert any("skipped" in note for note in checkpoint.notes)


class Evaluated:
    """Runs an expression when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return eval, ("1 + 1",)


@pytest.mark.parametrize("protocol", [2, 4])
def test_names_are_those_of_today_and_complete(tmp_path: Path, protocol: int) -> None:
    content = [Evaluated(), argparse.Namespace, argparse.ArgumentParser, WEIGHTS]
    error = refusal(tmp_path / "model.pt", save(content, protocol=protocol))
    # Protocol 2 writes Python 2's __builtin__; protocol 4 writes a module's name only once.
    for name in ("builtins.eval", "argparse.Namespace", "argparse.ArgumentParser"):
        assert name in str(error)


def test_trust_does_not_unpickle_what_can_be_read_safely(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(save(WEIGHTS))
    # torch then refuses real unpickling, whoever asks for it.
    monkeypatch.setenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "1")
    assert read_checkpoint(path, trust=True).state_dict.keys() == WEIGHTS.keys()
    path.write_bytes(save({**WEIGHTS, "arguments": argparse.Namespace(lr=0.1)}))
    assert read_checkpoint(path, trust=True).state_dict.keys() == WEIGHTS.keys()
    path.write_bytes(save(Sealed(3, 2)))
    with pytest.raises(CheckpointError, match="cannot be unpickled"):
        read_checkpoint(path, trust=True)


def test_a_trusted_file_whose_classes_are_gone(tmp_path: Path) -> None:
    data = save(argparse.Namespace(), zipped=False).replace(b"cargparse\n", b"cabsent\n")
    error = refusal(tmp_path / "model.pt", data, trust=True)
    assert "No module named 'absent'" in str(error)


def test_names_from_the_file_cannot_steer_the_terminal(tmp_path: Path) -> None:
    module, name = "\x1b[31mred\nmodule", "Class"
    strings = b"".join(b"\x8c" + bytes([len(text)]) + text.encode() for text in (module, name))
    error = refusal(tmp_path / "model.pt", b"\x80\x04" + strings + b"\x93.")
    assert r"\x1b[31mred\nmodule.Class" in str(error)


def test_printable_leaves_ordinary_names_alone() -> None:
    assert printable("convs.0.lin.weight") == "convs.0.lin.weight"
    assert printable("größe") == "größe"
    assert len(printable("a" * 10_000)) == 200


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_protocol_is_read(tmp_path: Path, zipped: bool, protocol: int) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(save(WEIGHTS, zipped=zipped, protocol=protocol))
    assert torch.equal(read_checkpoint(path).state_dict["conv.bias"], WEIGHTS["conv.bias"])


def test_tensors_of_a_cuda_machine_land_on_the_cpu(tmp_path: Path) -> None:
    def text(value: str) -> bytes:
        return b"X" + struct.pack("<I", len(value)) + value.encode()

    data = save(WEIGHTS, zipped=False)
    assert text("cpu") in data
    path = tmp_path / "model.pth"
    path.write_bytes(data.replace(text("cpu"), text("cuda:3")))
    checkpoint = read_checkpoint(path)
    assert checkpoint.state_dict["conv.weight"].device.type == "cpu"
    assert torch.equal(checkpoint.state_dict["conv.weight"], WEIGHTS["conv.weight"])


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git-lfs pointer"),
        (b"<!DOCTYPE html><html>404</html>", "web page"),
        (b"\n<html><body>Sign in</body></html>", "web page"),
        (b"epoch,loss\n1,0.5\n", "text file (starts with 'epoch,loss"),
        (b"\x89HDF\r\n\x1a\n" + bytes(64), "HDF5"),
        (b"\x1f\x8b\x08" + bytes(64), "gzip"),
        (b"\xff\xfe\x00\x01" * 16, "unknown format"),
        (b"", "empty"),
        (b"\x80\x02", "damaged"),
        (b"PK\x03\x04", "damaged"),
        (pickle.dumps([1, 2, 3]), "holds no state dict (a list)"),
    ],
)
@pytest.mark.parametrize("name", ["model.pt", "model.safetensors"])
def test_other_files_are_told_apart(tmp_path: Path, name: str, data: bytes, found: str) -> None:
    assert found in str(refusal(tmp_path / name, data))


def test_archives_of_other_programs(tmp_path: Path) -> None:
    path = tmp_path / "model.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("folder/model.pt", save(WEIGHTS))
    assert "holds folder/model.pt" in str(refusal(path, path.read_bytes()))

    path = tmp_path / "model.tar"
    with tarfile.open(path, "w") as tar:
        tar.addfile(tarfile.TarInfo("model.pt"), io.BytesIO())
    assert "tar archive (holds model.pt)" in str(refusal(path, path.read_bytes()))

    path = tmp_path / "old.pth.tar"
    with tarfile.open(path, "w") as tar:
        for name in ("storages", "tensors", "pickle"):
            tar.addfile(tarfile.TarInfo(name), io.BytesIO())
    assert isinstance(refusal(path, path.read_bytes()), UnsafeCheckpointError)


def test_a_file_that_unpacks_to_more_than_it_holds(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("model/data.pkl", bytes(10_000_000))
    assert path.stat().st_size < 100_000
    assert "compressed" in str(refusal(path, path.read_bytes()))


# torch deprecates the format, users still have the files.
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_torchscript_is_refused_and_read_when_trusted(tmp_path: Path) -> None:
    module, path = nn.Linear(3, 2), tmp_path / "model.pt"
    torch.jit.save(torch.jit.script(module), path)
    error = refusal(path, path.read_bytes())
    assert isinstance(error, UnsafeCheckpointError)
    assert "TorchScript archive is a program" in str(error)
    assert "torch.jit.load(FILE).state_dict()" in str(error)
    assert torch.equal(read_checkpoint(path, trust=True).state_dict["weight"], module.weight)


@pytest.mark.parametrize("wrap", [lambda graph: graph, lambda graph: [graph, graph]])
def test_a_data_set_is_not_a_checkpoint(tmp_path: Path, wrap: Any) -> None:
    graph = Data(x=torch.ones(2, 3), edge_index=torch.zeros(2, 1, dtype=torch.long))
    path = tmp_path / "data.pt"
    assert "holds graphs" in str(refusal(path, save(wrap(graph))))
    assert "holds graphs" in str(refusal(path, save(wrap(graph.to_dict()))))
    assert "holds graphs" in str(refusal(path, save(wrap(graph)), trust=True))


@pytest.mark.parametrize("zipped", [True, False])
def test_every_truncation_is_noticed(tmp_path: Path, zipped: bool) -> None:
    data = save({"state_dict": WEIGHTS, "epoch": 7}, zipped=zipped)
    for length in range(1, len(data), 7):
        error = refusal(tmp_path / "model.pt", data[:length])
        assert not isinstance(error, UnsafeCheckpointError), length


def test_checksums_of_zero_mean_that_there_are_none(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(WEIGHTS, path)
    finally:
        torch.serialization.set_crc32_options(True)
    assert torch.equal(read_checkpoint(path).state_dict["conv.weight"], WEIGHTS["conv.weight"])


@pytest.mark.parametrize("zipped", [True, False])
@settings(max_examples=150, derandomize=True)
@given(position=st.integers(0, 10**6), value=st.integers(0, 255))
def test_a_damaged_byte_never_ends_in_a_foreign_error(
    tmp_path_factory: pytest.TempPathFactory, zipped: bool, position: int, value: int
) -> None:
    data = bytearray(save({"state_dict": WEIGHTS, "epoch": 7}, zipped=zipped))
    data[position % len(data)] = value
    path = tmp_path_factory.mktemp("damaged") / "model.pt"
    path.write_bytes(data)
    try:
        state_dict = read_checkpoint(path).state_dict
    except HistographError as known:
        messages = str(known).splitlines()
    else:
        # The zip format has checksums; in a legacy file another number or name cannot be seen.
        assert not zipped or all(torch.equal(state_dict[name], WEIGHTS[name]) for name in WEIGHTS)
        messages = ["read"]
    assert len(messages) == 1
