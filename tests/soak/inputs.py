"""Hostile files and absurd options: every command answers in one line, soon, within its memory.

``options.py`` gives absurd values to every option of every command; here are checkpoints that claim
what they do not hold, and files of runs, caches and configurations with odd values. An attempt
holds if the command succeeds, or ends with 1 and one line or 2 and its usage.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import random
import resource
import shutil
import struct
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from histograph_post.utils.files import sha256_file

from .attacks import Outcome
from .commands import CACHE, DATA, MODEL, TRAIN_HEAD, clear
from .operations import attempt
from .options import GIVEN, absurd_options


def hostile_inputs(work: Path, only: Sequence[str] = (), tries: int = 3) -> Iterator[Outcome]:
    """Yield what came of every kind of input.

    Args:
        work: The workspace.
        only: ``checkpoints``, ``files``, ``records``, or commands whose options are tried; all by
            default.
        tries: Changes of each file of a run or a cache.
    """
    kinds: dict[str, Callable[[], Outcome]] = {
        "checkpoints": lambda: _checkpoints(work),
        "files": lambda: _odd_files(work),
        "records": lambda: _records(work, tries),
    }
    for name in GIVEN:
        kinds[name] = partial(absurd_options, work, name)
    for name, attack in kinds.items():
        if not only or name in only:
            yield attack()


# --- checkpoints


class _Call:
    """Calls a function when it is unpickled."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self._call = function, args

    def __reduce__(self) -> Any:
        return self._call


def _saved(content: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def _allocating() -> bytes:
    """A pickle of a few bytes that asks for 2 GB."""
    return b"\x80\x02" + b"c__builtin__\nbytearray\n(J\x00\x00\x00\x7ftR."


def _claiming(size: int) -> bytes:
    """A file whose tensor is larger than its storage, by its sizes and strides."""
    return _saved({"conv.weight": torch.ones(1).expand(size)})


def _safetensors(shape: list[int], end: int) -> bytes:
    header = json.dumps({"w": {"dtype": "F32", "shape": shape, "data_offsets": [0, end]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(64)


def _hostile_checkpoints() -> dict[str, Callable[[], bytes]]:
    square = torch.eye(3)
    deep: Any = {}
    for _ in range(400):
        deep = {"a": deep}
    return {
        "sparse": lambda: _saved({"w": square.to_sparse()}),
        "csr": lambda: _saved({"w": square.to_sparse_csr()}),
        "nested": lambda: _saved({"w": torch.nested.nested_tensor([square, square[:2]])}),
        "quantized": lambda: _saved({"w": torch.quantize_per_tensor(square, 0.1, 0, torch.qint8)}),
        "surrogates": lambda: pickle.dumps({"\udcff\ud800": np.ones(3)}, protocol=4),
        "escapes": lambda: _saved({"\x1b[2Jconv.weight": square}),
        "allocates": _allocating,
        "expanded": lambda: _claiming(2**40),
        "meta": lambda: _saved({"w": torch.empty(2**40, device="meta")}),
        "safetensors, large": lambda: _safetensors([2**40], 64),
        "safetensors, negative": lambda: _safetensors([-1], 64),
        "safetensors, header": lambda: struct.pack("<Q", 2**62) + b"{}",
        "deep": lambda: _saved(deep),
        "deep lists": lambda: b"\x80\x02" + b"]" * 10**6 + b"a" * (10**6 - 1) + b".",
        "many memos": lambda: b"\x80\x02" + b"(" * 10**6 + b"t.",
        "long integer": lambda: b"\x80\x02\x8b" + struct.pack("<i", 2**30) + b"x.",
        "code": lambda: pickle.dumps(_Call(os.system, "touch SENTINEL")),
        "exits": lambda: pickle.dumps(_Call(os._exit, 3)),
        "complex": lambda: _saved({"w": square.to(torch.complex64), "b": square.bool()}),
        "infinite": lambda: _saved({"w": square * float("inf")}),
        "gzip": lambda: gzip.compress(bytes(10**8)),
        "zeros": lambda: bytes(10**6),
        "empty": lambda: b"",
    }


def _checkpoints(work: Path) -> Outcome:
    outcome, file = Outcome("hostile checkpoints", "inspect, cache"), work / "hostile.pt"
    for name, make in _hostile_checkpoints().items():
        file.write_bytes(make())
        commands = (
            ("inspect", file),
            ("cache", *MODEL, *DATA, "--checkpoint", file, "-q", "-o", clear(work / "trial") / "o"),
        )
        for words in commands:
            problem = attempt(words, work)
            outcome.count(None if problem is None else f"{words[0]} of {name}: {problem}")
    file.unlink()
    return outcome


# --- files of runs and caches

_ODD: tuple[Any, ...] = (
    *(None, True, -1, 2**70, 0.5, 1e308, "", "\x1b[2J", "\ud800", "../..", [], {}, [[]], {"a": 1}),
    *([0] * 1000, "x" * 10**5, 2**33),
)


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    pairs = value.items() if isinstance(value, dict) else enumerate(value[:3] if _is(value) else ())
    for key, item in pairs:
        yield from _places(item, (*path, key))


def _is(value: Any) -> bool:
    return isinstance(value, list)


def _changed(text: bytes, draw: random.Random) -> bytes:
    """Change a value of a JSON file, or its bytes."""
    kind = draw.randrange(6)
    if kind == 0:
        return text[: draw.randrange(len(text) + 1)]
    if kind == 1:
        at = draw.randrange(len(text))
        return text[:at] + bytes([text[at] ^ (1 << draw.randrange(8))]) + text[at + 1 :]
    try:
        value = json.loads(text)
    except ValueError:
        return text[: len(text) // 2] + b"\n[[[\x00" + text[len(text) // 2 :]
    place = draw.choice(sorted(_places(value), key=str))
    inner = value
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = draw.choice(_ODD)
    return json.dumps(value).encode()


def _records(work: Path, tries: int) -> Outcome:
    """Change every file of a run and a cache, with right hashes, and use it."""
    outcome, draw = Outcome("odd records", "inspect, report, predict, ..."), random.Random(0)
    train = [str(word).replace("{work}", str(work)) for word in TRAIN_HEAD]
    for source in ("run", "a.cache", "backbones/fold-0"):
        files = [path for path in sorted((work / source).rglob("*")) if path.is_file()]
        for file in files:
            for number in range(tries):
                place = work / "changed"
                shutil.rmtree(place, ignore_errors=True)
                shutil.copytree(work / source, place)
                own = place / file.relative_to(work / source)
                if number == 0:  # opening it must not wait for somebody to write
                    own.unlink()
                    os.mkfifo(own)
                else:
                    own.write_bytes(_changed(file.read_bytes(), draw))
                sums = place / "SHA256SUMS"
                if number and sums.is_file() and own != sums:
                    sums.write_text(sums.read_text().replace(sha256_file(file), sha256_file(own)))
                out = clear(work / "trial") / "out"
                uses: list[Sequence[object]] = [("inspect", place)]
                if source == "run":
                    uses += [
                        ("report", place, "-q", "-o", f"{out}.html"),
                        ("predict", place, *DATA, "-q", "-o", out),
                        (*train, "-o", place),
                    ]
                elif source == "a.cache":
                    uses += [("verify", place), (*[place if "cache" in w else w for w in train],)]
                    uses[-1] = (*uses[-1], "-o", out)
                else:
                    uses += [("cache", place, "-q", "-o", out)]
                for words in uses:
                    problem = attempt(words, work)
                    if problem is not None:
                        shown = f"{words[0]} after a change of {own.name}"
                        keep = work.parent / f"broken-{outcome.attempts}"
                        if number:
                            shutil.copytree(place, keep, dirs_exist_ok=True)
                        problem = f"{shown} ({keep if number else 'a pipe'}): {problem}"
                    outcome.count(problem)
    return outcome


def _odd_files(work: Path) -> Outcome:
    """Pipes, devices, deep and huge files where a configuration, splits or graphs are expected."""
    outcome, folder = Outcome("odd files", "--config, --split, --data"), clear(work / "odd")
    os.mkfifo(folder / "pipe")
    (folder / "deep.toml").write_text("a = " + "[" * 10**5)
    (folder / "dotted.toml").write_text(".".join("a" * 10**5) + " = 1")
    (folder / "deep.json").write_text("[" * 10**6)
    (folder / "bomb.json.gz").write_bytes(gzip.compress(bytes(10**9 // 4)))
    (folder / "folder").mkdir()
    (folder / "text").write_text("hello")
    (folder / "invalid").write_bytes(b"\xff\xfe\x00" * 100)
    huge = {"total": 10**9, "folds": [{"train": [0], "valid": [1], "test": [10**12]}]}
    (folder / "huge.json").write_text(json.dumps(huge))
    torch.save(_graphs(num_nodes=2**33), folder / "nodes.pt")
    torch.save(_graphs(y=float("inf")), folder / "labels.pt")
    torch.save(_graphs(edges=torch.tensor([[0, 2**40], [1, -1]])), folder / "edges.pt")
    torch.save(_graphs(x=torch.full((3, 4), float("nan"))), folder / "features.pt")
    (folder / "leaves.py").write_text("import sys\nsys.exit(0)\n")
    (folder / "exits.py").write_text("import sys\ndef graphs():\n    sys.exit(3)\n")
    (folder / "base.py").write_text(
        "class Odd(BaseException): pass\ndef graphs():\n    raise Odd('\\x1b[2J')\n"
    )
    (folder / "prints.py").write_text(
        "print('\\x1b[2J')\ndef graphs():\n    print('\\x1b[2J')\n    return []\n"
    )
    smiles = folder / "many.csv"
    smiles.write_text("smiles,y\n" + "C" * 10**6 + ",1\n" + "\x1b[2J,inf\n" + "CC,nan\n")
    (folder / "cut.csv").write_text('smiles,y\n"CC,1\n')
    train = [str(word).replace("{work}", str(work)) for word in TRAIN_HEAD]
    files = [
        *sorted(folder.iterdir()),
        Path("/dev/zero"),
        Path("/dev/null"),
        Path("/proc/self/mem"),
    ]
    for file in files:
        out = clear(work / "trial") / "out"
        data = f"smiles:{file}" if file.suffix == ".csv" else str(file)
        if file.suffix == ".py":
            data += ":graphs"
        weights = work / "backbones/fold-0/model.safetensors"  # a folder brings data
        cache = ("cache", *MODEL, "--data", data, "-q", "--checkpoint", weights)
        for words in (
            (*train, "--config", file, "-o", out),
            (*CACHE, "--split", file, "-o", out),
            (*cache, "-o", out),
            ("predict", work / "run", "--data", data, "-q", "-o", out),
            ("inspect", file),
        ):
            given = [str(word).replace("{work}", str(work)) for word in words]
            problem = attempt(given, work)
            outcome.count(None if problem is None else f"{' '.join(given[:1])} {file}: {problem}")
    return outcome


def _graphs(**changed: Any) -> list[Any]:
    from torch_geometric.data import Data

    edges: Tensor = changed.pop("edges", torch.tensor([[0, 1], [1, 0]]))
    graphs = [
        Data(x=torch.ones(3, 4), edge_index=edges, y=torch.tensor([float(k % 2)]))
        for k in range(12)
    ]
    for name, value in changed.items():
        setattr(graphs[5], name, torch.tensor([value]) if name == "y" else value)
    return graphs


# A child must not take the machine with it.
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
