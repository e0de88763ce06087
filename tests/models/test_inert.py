"""Hostile pickles: nothing in them runs or is imported, and none of them ends the process."""

from __future__ import annotations

import io
import pickle
import struct
import sys
import tracemalloc
import zipfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from histograph_post.errors import CheckpointError, HistographError
from histograph_post.models import read_checkpoint
from histograph_post.utils.inert import InertReader, StandIn


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def number(value: int) -> bytes:
    return b"\x8a\x08" + value.to_bytes(8, "little", signed=True)


def name(module: str, attribute: str) -> bytes:
    return f"c{module}\n{attribute}\n".encode()


def archive(pickled: bytes, **storages: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("model/data.pkl", b"\x80\x02" + pickled + b".")
        for key, data in storages.items():
            file.writestr(f"model/data/{key}", data)
    return buffer.getvalue()


def storage(count: int, key: str = "a", kind: str = "FloatStorage") -> bytes:
    parts = text("storage") + name("torch", kind) + text(key) + text("cpu") + number(count)
    return b"(" + parts + b"tQ"


def tensor(count: int, offset: int, size: int, stride: int) -> bytes:
    view = number(offset) + number(size) + b"\x85" + number(stride) + b"\x85\x89)"
    return name("torch._utils", "_rebuild_tensor_v2") + b"(" + storage(count) + view + b"tR"


WEIGHTS = b"}" + text("w.weight") + tensor(4, 0, 4, 1) + b"s"
DATA = torch.arange(4.0).numpy().tobytes()


def read(pickled: bytes, path: Path) -> dict[str, torch.Tensor]:
    path.write_bytes(archive(pickled, a=DATA))
    return read_checkpoint(path).state_dict


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The module ``trap`` makes a file when it is imported or called."""
    sprung = tmp_path / "sprung"
    (tmp_path / "trap.py").write_text(
        f"from pathlib import Path\nPath({str(sprung)!r}).touch()\ndef call(*args): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    return sprung


CALLS = {
    "a function": name("trap", "call") + b")R",
    "a class": name("trap", "call") + b")\x81",
    "an old instance": b"(itrap\ncall\n",
    "a built object": name("trap", "call") + b")\x81}" + text("__setstate__") + text("x") + b"sb",
    "getattr": name("builtins", "getattr") + b"(" + name("trap", "x") + text("call") + b"tR)R",
    "a call of what a call made": name("trap", "call") + b")R)R",
    "items of an object": name("trap", "call") + b")\x81(" + text("a") + b"K\x01u",
    "members of an object": name("trap", "call") + b")\x81(K\x01e",
    "a class with attributes": name("trap", "call") + b"}" + text("__call__") + b"Nsb",
    "a name put together": text("trap") + text("call") + b"\x93)R",
    "a nested name": text("trap") + text("call.__globals__") + b"\x93)R",
    "a tensor with attributes": tensor(4, 0, 4, 1) + b"}" + text("data") + b"Nsb",
    "a type of tensor": name("torch._tensor", "_rebuild_from_type_v2")
    + b"("
    + name("trap", "call")
    + name("trap", "Kind")
    + b")}tR",
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_nothing_is_called_or_imported(tmp_path: Path, trap: Path, call: bytes) -> None:
    content = b"}" + text("extra") + call + b"s" + text("state_dict") + WEIGHTS + b"s"
    found = read(content, tmp_path / "model.pt")
    assert found["w.weight"].tolist() == [0, 1, 2, 3]
    assert not trap.exists()
    assert "trap" not in sys.modules


@pytest.mark.parametrize(
    ("module", "attribute"),
    [("os", "system"), ("builtins", "eval"), ("__builtin__", "exec"), ("subprocess", "Popen")],
)
def test_what_can_do_harm_is_refused(tmp_path: Path, module: str, attribute: str) -> None:
    call = name(module, attribute) + text("touch sprung") + b"\x85R"
    with pytest.raises(CheckpointError, match=rf"asks for \w+\.{attribute}"):
        read(b"}" + text("a") + call + b"s" + text("state_dict") + WEIGHTS + b"s", tmp_path / "a")


LARGE = 10**9
CLAIMS = {
    "a storage": b"}" + text("w.a") + storage(LARGE) + b"s",
    "a tensor": b"}" + text("w.a") + tensor(4, 0, LARGE, 1) + b"s",
    "a repeated element": b"}" + text("w.a") + tensor(4, 0, LARGE, 0) + b"s",
    "an offset": b"}" + text("w.a") + tensor(4, 3, 4, 1) + b"s",
    "a negative stride": b"}" + text("w.a") + tensor(4, 3, 4, -1) + b"s",
    "a negative storage": b"}" + text("w.a") + storage(-LARGE) + b"s",
    "many dimensions": name("torch._utils", "_rebuild_tensor_v2")
    + b"("
    + storage(4)
    + number(0)
    + b"(" * 2
    + b"K\x01" * 500
    + b"t("
    + b"K\x01" * 500
    + b"tttR",
    "two kinds": b"}" + text("a") + storage(4) + b"s" + text("b") + storage(2, "a", "LongStorage"),
}


@pytest.mark.parametrize("content", CLAIMS.values(), ids=CLAIMS)
def test_what_a_file_claims_is_not_believed(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(CheckpointError, match="damaged"):
        read(content, tmp_path / "model.pt")


def test_a_number_of_thousands_of_digits_is_left_out(tmp_path: Path) -> None:
    weights = {"w.a": torch.ones(2)}
    torch.save({"epoch": 16**5000, 16**5000: 1, "state_dict": weights}, tmp_path / "model.pt")
    found = read_checkpoint(tmp_path / "model.pt")
    assert list(found.state_dict) == ["w.a"]
    assert "epoch" not in found.metadata


def test_many_storages_claim_no_more_than_the_file_holds(tmp_path: Path) -> None:
    legacy = pickle.dumps(0x1950A86A20F9469CFC6C, 2) + pickle.dumps(1001, 2) + pickle.dumps({}, 2)
    claims = b"".join(storage(400, f"s{index}") + b"0" for index in range(100))
    path = tmp_path / "model.pt"
    path.write_bytes(legacy + b"\x80\x02" + claims + b"N." + pickle.dumps([], 2))
    with pytest.raises(CheckpointError, match="claim more than the file holds"):
        read_checkpoint(path)


#: Each doubles, or repeats, something large with every few bytes.
BOMBS = {
    "attributes": b"}q\x00("
    + b"".join(number(index) + b"N" for index in range(2000))
    + b"u"
    + (name("a", "b") + b")\x81h\x00b0") * 20_000,
    "pairs": b"(" + b"K\x01K\x01\x86" * 2000 + b"lq\x00" + name("collections", "OrderedDict")
    + b"q\x010" + b"h\x01h\x00\x85R0" * 2000,
    "names": text("a" * 100_000) + b"q\x00" + b"h\x00h\x00\x930" * 20_000,
    "files": b"B" + struct.pack("<I", 10_000) + bytes(10_000) + b"q\x000"
    + name("torch.storage", "_load_from_bytes") + b"q\x010" + b"h\x01h\x00\x85R0" * 1000,
}  # fmt: skip


@pytest.mark.parametrize("content", BOMBS.values(), ids=BOMBS)
def test_a_small_file_does_not_fill_the_memory(tmp_path: Path, content: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError):
            read(content, tmp_path / "model.pt")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2**28


@pytest.mark.parametrize("opening", [b")" + b"\x85" * 200_000, b"]" * 100_000 + b"a" * 99_999])
@pytest.mark.parametrize("where", ["key", "value"])
def test_deep_nesting_does_not_end_the_process(tmp_path: Path, opening: bytes, where: str) -> None:
    deep = opening + b"K\x01" if where == "key" else text("deep") + opening
    content = b"}" + text("state_dict") + WEIGHTS + b"s" + deep + b"s"
    assert read(content, tmp_path / "model.pt").keys() == {"w.weight"}


def test_modules_that_share_their_parts_are_not_multiplied(tmp_path: Path) -> None:
    """Each level has the one below twice: two to the power of forty names."""
    level = b"}" + text("_parameters") + b"}s" + text("_modules") + b"}s"
    content = name("a", "Net") + b")\x81" + level + b"bq\x00"
    for _ in range(40):
        inner = b"}" + text("a") + b"h\x00s" + text("b") + b"h\x00s"
        parts = b"}" + text("_parameters") + b"}s" + text("_modules") + inner + b"s"
        content += b"0" + name("a", "Net") + b")\x81" + parts + b"bq\x00"
    with pytest.raises(CheckpointError, match="more parts than a model has"):
        read(content, tmp_path / "model.pt")


PIECES = [
    *(b"(", b")", b"]", b"}", b"N", b"0", b"1", b"2", b"t", b"l", b"d", b"s", b"u", b"a", b"e"),
    *(b"R", b"b", b"o", b"\x81", b"\x92", b"\x93", b"\x85", b"\x86", b"\x87", b"Q", b"\x8f"),
    *(b"\x90", b"\x91", b"\x94", b"q\x00", b"h\x00", b"\x88", b"K\x05", text("weight"), text("os")),
    *(b"\x97", b"\x98", b"\x82\x01", b"Pstorage\n", b"I5\n", b"L5L\n", b"F1.5\n", b"S'a'\n"),
    name("os", "system"),
    name("builtins", "eval"),
    name("builtins", "getattr"),
    name("collections", "OrderedDict"),
    name("torch._utils", "_rebuild_tensor_v2"),
    name("torch._utils", "_rebuild_parameter"),
    name("torch._tensor", "_rebuild_from_type_v2"),
    name("torch.storage", "_load_from_bytes"),
    name("trap", "call"),
    storage(4),
    tensor(4, 0, 4, 1),
    WEIGHTS,
]


@settings(max_examples=400, derandomize=True)
@given(pieces=st.lists(st.sampled_from(PIECES), max_size=40), zipped=st.booleans())
def test_any_instructions_end_in_weights_or_in_a_known_error(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[bytes], zipped: bool
) -> None:
    pickled = b"".join(pieces)
    path = tmp_path_factory.getbasetemp() / "fuzzed.pt"
    path.write_bytes(archive(pickled, a=DATA) if zipped else b"\x80\x02" + pickled + b".")
    before = set(sys.modules)
    try:
        read_checkpoint(path)
        messages = ["read"]
    except HistographError as known:
        messages = str(known).splitlines()
    assert len(messages) == 1
    assert "trap" not in set(sys.modules) - before


@settings(max_examples=100, derandomize=True)
@given(
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
        lambda inner: st.lists(inner)
        | st.dictionaries(st.text(), inner)
        | st.tuples(inner, inner),
        max_leaves=20,
    ),
    protocol=st.integers(0, 5),
)  # fmt: skip
def test_plain_values_are_read_as_pickle_reads_them(value: object, protocol: int) -> None:
    data = pickle.dumps(value, protocol)
    found = InertReader(data).read(io.BytesIO(data))
    assert found == value


def test_a_stand_in_holds_what_the_object_held() -> None:
    data = pickle.dumps(ValueError("cut", 3), 2)
    found = InertReader(data).read(io.BytesIO(data))
    assert isinstance(found, StandIn)
    assert found.name.endswith(".ValueError")  # under Python 2's name of the module
    assert found.args == ("cut", 3)
