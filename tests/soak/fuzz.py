"""Fuzzing the readers of files from anybody, guided by coverage: ``python -m tests.soak fuzz``.

atheris (libFuzzer; ``pip install atheris``) mutates checkpoints, manifests and shards towards lines
of the readers that no input has reached yet. What a reader may do with an input is accept it or
raise a :class:`HistographError` of one line; any other exception, a crash, an input that takes
longer than ten seconds or 2 GB is a finding. The hashes of manifests and shards are made right
after each mutation, as whoever forges a file would.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import re
import subprocess
import sys
import traceback
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

Reader = Callable[[bytes], None]

#: Modules whose coverage guides the mutations.
_GUIDING = [
    *(f"histograph_post.caches.{name}" for name in ("layout", "manifest", "reader", "shard")),
    *(f"histograph_post.models.{name}" for name in ("checkpoints", "state_dicts")),
    *(f"histograph_post.utils.{name}" for name in ("inert", "unpickling")),
    *("histograph_post.utils.decoding", "histograph_post.splits.files"),
]

_TOKENS = (
    *("null", "true", "-1", "1e400", "NaN", "9223372036854775807", "[]", "{}", '""', '"\\ud800"'),
    *("num_bytes", "extents", "num_nodes", "widths", "dtype", "head_sha256", "shards", "layout"),
)


def _checkpoint(work: Path) -> tuple[Reader, list[bytes]]:
    """The reader of checkpoints, and files of every kind that it knows."""
    import numpy as np
    import safetensors.torch
    import torch
    from torch import nn

    from histograph_post.models import read_checkpoint

    path = work / "model.pt"

    def read(data: bytes) -> None:
        path.write_bytes(data)
        for tensor in read_checkpoint(path).state_dict.values():
            if tensor.numel() < 10**6:
                tensor.float().sum()

    weights = {"a.weight": torch.arange(6.0).reshape(2, 3), "a.bias": torch.ones(2).half()}
    seeds = [safetensors.torch.save(weights), pickle.dumps({"a": np.ones((2, 3), np.float32)})]
    for content in (weights, {"state_dict": weights, "epoch": 3}, nn.Linear(2, 2)):
        for zipped in (True, False):
            buffer = io.BytesIO()
            torch.save(content, buffer, _use_new_zipfile_serialization=zipped)
            seeds.append(buffer.getvalue())
    return read, seeds


def _made_cache(work: Path, **options: Any) -> Path:
    import histograph_post as hg

    from ..helpers import make_model

    folder = work / f"{'-'.join(map(str, options.values())) or 'plain'}.cache"
    dataset = hg.load_data("demo:", args={"num_graphs": 4})
    hg.cache(make_model(hidden=2, num_layers=1), dataset, folder, **options)
    return folder


def _manifest(work: Path) -> tuple[Reader, list[bytes]]:
    """The reader of manifests, and of the shards that an accepted one describes."""
    from histograph_post.caches.manifest import Manifest
    from histograph_post.caches.reader import Cache
    from histograph_post.utils.decoding import json_sha256, parse_json

    folders = [_made_cache(work), _made_cache(work, compression="gzip")]

    def read(data: bytes) -> None:
        value = parse_json(data, "manifest.json")
        if isinstance(value, dict):
            value.pop("manifest_sha256", None)
            value["manifest_sha256"] = json_sha256(value, "manifest.json")
        manifest = Manifest.from_json(value, "manifest.json")
        for folder in folders:
            cache = Cache(folder, manifest)
            _read_all(cache)

    return read, [(folder / "manifest.json").read_bytes() for folder in folders]


def _shard(work: Path) -> tuple[Reader, list[bytes]]:
    """The reader of shards; the manifest is right but for the hash and the size."""
    import hashlib
    from dataclasses import replace

    from histograph_post.caches.manifest import read_manifest
    from histograph_post.caches.reader import Cache

    folders = [_made_cache(work), _made_cache(work, compression="gzip")]
    found = [read_manifest(folder)[1] for folder in folders]
    seeds = [(folder / "shard-00000.h5").read_bytes() for folder in folders]

    def read(data: bytes) -> None:
        for folder, manifest in zip(folders, found, strict=True):
            (folder / "shard-00000.h5").write_bytes(data)
            (info,) = manifest.shards
            head = hashlib.sha256(data[: info.head_bytes(manifest.layout)]).hexdigest()
            info = replace(info, num_bytes=len(data), head_sha256=head)
            changed = replace(manifest, shards=(info,))
            changed.validate("manifest.json")
            _read_all(Cache(folder, changed))

    return read, seeds


def _read_all(cache: Any) -> None:
    from histograph_post.errors import HistographError

    for use in (lambda: cache.gather(range(len(cache)), edges=True), lambda: cache.labels):
        try:
            use()
        except HistographError as error:
            _check_line(error)


# --- mutations that keep a file readable enough to get past its checksums

_VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 2**31, 2**33, 2**63 - 1, 2**63, 10**30, 0.5, -1e308, "", "\ud800"),
    *("\x1b[2J", "../x", "float16", "link", "node", "gzip", "1.0", "1.3", [], {}, [[]], [0] * 100),
)


def _mutate_json(data: bytes, draw: random.Random) -> bytes:
    """Replace, drop, double or exchange a value anywhere in a JSON text."""
    value = json.loads(data)
    places: list[tuple[Any, Any]] = []
    ahead = [value]
    while ahead:
        inner = ahead.pop()
        pairs = inner.items() if isinstance(inner, dict) else enumerate(inner)
        for key, item in pairs:
            places.append((inner, key))
            if isinstance(item, dict | list) and item:
                ahead.append(item)
    for _ in range(draw.randint(1, 3)):
        holder, key = draw.choice(places)
        other, name = draw.choice(places)
        with suppress(KeyError, IndexError):
            kind = draw.randrange(5)
            if kind == 0:
                del holder[key]
            elif kind == 1:
                holder[key] = other[name]
            elif kind == 2 and type(holder[key]) is int:
                holder[key] += draw.choice((-8, -1, 1, 8, 4096))
            elif kind == 3 and isinstance(holder[key], list):
                holder[key] = holder[key] * 2
            else:
                holder[key] = draw.choice(_VALUES)
    return json.dumps(value).encode()


def _mutate_zip(data: bytes, change: Callable[[bytes], bytes]) -> bytes:
    """Mutate the pickle in a file of ``torch.save``, with right checksums."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as read, zipfile.ZipFile(buffer, "w") as written:
        for member in read.infolist():
            content = read.read(member)
            is_pickle = member.filename.endswith("data.pkl")
            written.writestr(member.filename, change(content) if is_pickle else content)
    return buffer.getvalue()


def _mutate(data: bytes, most: int, seed: int) -> bytes:
    import atheris  # type: ignore[import-not-found,unused-ignore]

    draw = random.Random(seed)
    with suppress(Exception):  # then any mutation will do
        if draw.random() < 0.8:
            if data.startswith(b"{"):
                return _mutate_json(data, draw)[:most]
            if data.startswith(b"PK"):
                return _mutate_zip(data, lambda inner: atheris.Mutate(inner, len(inner) + 64))
    return bytes(atheris.Mutate(data, most))


READERS = {"checkpoint": _checkpoint, "manifest": _manifest, "shard": _shard}


def _check_line(error: Exception) -> None:
    if not str(error).replace("\n", "").isprintable():
        raise ValueError(f"a message that steers a terminal: {str(error)!r}") from error


def fuzz(reader: str, seconds: int, work: Path) -> tuple[int, list[str]]:
    """Fuzz a reader in a process of its own; return how many inputs it had, and the findings."""
    work.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-W", "ignore", "-m", "tests.soak.fuzz", reader, str(seconds), work]
    done = subprocess.run(
        [*map(str, command)], check=False, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    said = done.stderr.decode(errors="replace")
    inputs = [int(number) for number in re.findall(r"^(?:#|Done )(\d+)", said, re.M)]
    found = [path.read_text() for path in sorted(work.glob("finding-*.txt"))]
    if done.returncode:
        found.append(f"{reader}: ended with {done.returncode}: {said[-600:]}")
    return max(len(found), *inputs), found


def _main(name: str, seconds: str, folder: str) -> None:
    import atheris  # type: ignore[import-not-found,unused-ignore]

    work = Path(folder)
    with atheris.instrument_imports(include=_GUIDING):
        from histograph_post.errors import HistographError

        read, seeds = READERS[name](work)
    corpus = work / "corpus"
    corpus.mkdir(exist_ok=True)
    for number, seed in enumerate(seeds):
        (corpus / f"seed-{number}").write_bytes(seed)
    (work / "tokens").write_text("".join(f"{json.dumps(token)}\n" for token in _TOKENS[:9]))
    seen: set[str] = set()

    def one_input(data: bytes) -> None:
        try:
            try:
                read(data)
            except HistographError as error:
                _check_line(error)
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            label = f"{type(error).__name__} at {os.path.basename(place.filename)}:{place.lineno}"
            if label not in seen:
                seen.add(label)
                number = len(seen)
                (work / f"finding-{number}.bin").write_bytes(data)
                text = f"{name}: {label}: {error}\n{traceback.format_exc()}"
                (work / f"finding-{number}.txt").write_text(text, errors="backslashreplace")

    limits = ["-timeout=10", "-rss_limit_mb=2048", f"-max_total_time={seconds}", "-max_len=40000"]
    places = [f"-artifact_prefix={work}/crash-", f"-dict={work}/tokens", str(corpus)]
    words = [sys.argv[0], *limits, *places]
    atheris.Setup(words, one_input, custom_mutator=_mutate, enable_python_coverage=True)
    atheris.Fuzz()


if __name__ == "__main__":
    _main(*sys.argv[1:])
