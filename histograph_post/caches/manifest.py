"""The manifest, which makes a folder of shards a cache, and opening a cache by it.

The format is specified in ``docs/cache-format.md``. Nothing in it depends on when, where or how
fast a cache was made, so that the same command writes the same bytes. Manifest and splits are read
without the activations and without torch. The files are not trusted: everything is checked.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any

from ..data.spec import DataSpec
from ..errors import CacheError, NotFoundError, SplitError
from ..models.spec import ModelSpec
from ..splits import Splits
from ..utils.decoding import Count, Form, Sha256, decode, json_sha256, parse_json
from ..utils.files import read_limited, to_json, write_text
from ..utils.text import plural
from . import CANARY_NAME as CANARY_NAME
from . import MANIFEST_NAME as MANIFEST_NAME
from .layout import Layout, ShardInfo, shard_name

#: Another major version cannot be read; a newer minor one may have fields that are ignored.
FORMAT_VERSION = "1.2"

SPLITS_NAME = "splits.json"
#: Of molecules only: a line per graph with its SMILES, a tab and its name.
MOLECULES_NAME = "molecules.smi"
#: The resolved configuration of the command.
CONFIG_NAME = "config.toml"

#: Enough for tens of thousands of shards; a longer file is not a manifest.
MANIFEST_LIMIT = 64 * 2**20

#: Enough for ten folds of ten million nodes.
SPLITS_LIMIT = 2**30


def is_of_a_cache(name: str) -> bool:
    """Whether a cache writes a file of that name into its folder."""
    fixed = (MANIFEST_NAME, SPLITS_NAME, CONFIG_NAME, CANARY_NAME, MOLECULES_NAME)
    # Earlier versions wrote the hash of a shard to .sha256.
    return name in fixed or re.fullmatch(r"shard-\d{5,}\.(h5|json|sha256)", name) is not None


def plan_hash(
    *,
    tool_version: str,
    weights_sha256: str,
    model: Mapping[str, Any],
    data: Mapping[str, Any],
    capture: Any,
    layout: Layout,
    shards: Sequence[tuple[int, int]],
    settings: Mapping[str, Any],
) -> str:
    """Return the SHA-256 of everything that determines the bytes of the shards.

    Args:
        capture: The capture plan as JSON values.
        shards: First and one-past-last graph of every shard.
        settings: Anything else the bytes depend on, such as the node budget of a batch.
    """
    plan = {
        "format_version": FORMAT_VERSION,
        "tool_version": tool_version,
        "weights_sha256": weights_sha256,
        "model": dict(model),
        "data": dict(data),
        "capture": capture,
        "layout": asdict(layout),
        "shards": [[int(start), int(stop)] for start, stop in shards],
        "settings": dict(settings),
    }
    return json_sha256(plan, "cache plan")


@dataclass(frozen=True)
class _ModelEntry:
    """The manifest's entry for the model."""

    spec: str
    args: Mapping[str, Any]
    filled: Mapping[str, Any]


@dataclass(frozen=True)
class _DataEntry:
    """The manifest's entry for the data: their name, fingerprint and size."""

    spec: str
    args: Mapping[str, Any]
    fingerprint: Sha256
    num_graphs: Count
    num_nodes: Count


@dataclass(frozen=True)
class Provenance:
    """What a cache, or a run, records about the code of its backbone."""

    #: Absolute path -> hash of the model's classes in that file; classes of libraries are left out.
    sources: Mapping[str, Sha256]
    #: Versions of the libraries that ran it.
    versions: Mapping[str, str]
    #: The working directory, which relative names on the command line start from.
    folder: str
    #: Hash of the canary's file; None for a model that does not run on a small graph.
    canary_sha256: Sha256 | None

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


# Manifest.from_json has built these two from their entries before the rest is decoded.
_Model = Annotated[ModelSpec, Form("a model", lambda value: isinstance(value, ModelSpec))]
_Data = Annotated[DataSpec, Form("data", lambda value: isinstance(value, DataSpec))]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What makes a folder of shards a cache. It is written last, with its fields in this order.

    Args:
        tool_version: Version of the package that wrote the cache.
        weights_sha256: Hash of the weights that ran; a head refuses any other backbone.
        checkpoint: File name of the checkpoint; None for a model that was passed in memory.
        capture: The capture plan as JSON values.
        plan_hash: Hash of everything that determines the bytes of the shards (:func:`plan_hash`).
        own_metrics: The score of the model's own outputs as JSON values; None where it has none.
        no_metrics_because: Why there is no such score; None where there is one.
        provenance: The code that ran; None in a cache of version 1.0.
    """

    format_version: str = FORMAT_VERSION
    tool_version: str
    weights_sha256: Sha256
    checkpoint: str | None
    model: _Model
    data: _Data
    capture: Any
    layout: Layout
    plan_hash: Sha256
    splits_sha256: Sha256
    own_metrics: Mapping[str, Any] | None
    no_metrics_because: str | None
    provenance: Provenance | None = None
    shards: tuple[ShardInfo, ...]

    @property
    def num_labels(self) -> int:
        """Label rows, which the splits count: graphs, nodes or links."""
        return sum(shard.num_labels for shard in self.shards)

    def validate(self, where: str) -> None:
        """Refuse a manifest whose parts contradict each other."""
        if self.checkpoint is not None and _is_path(self.checkpoint):
            raise CacheError(
                f"{where}: found checkpoint {self.checkpoint!r}, expected a file name without path"
            )
        if (self.own_metrics is None) == (self.no_metrics_because is None):
            raise CacheError(f"{where}: expected either own_metrics or no_metrics_because")
        stop = 0
        for index, shard in enumerate(self.shards):
            if shard.index != index or shard.start != stop or shard.stop < shard.start:
                raise CacheError(
                    f"{where}: found shard {shard.index} of graphs {shard.start} to {shard.stop}, "
                    f"expected shard {index} from graph {stop}"
                )
            shard.validate(self.layout, where)
            stop = shard.stop
        found = (stop, sum(shard.num_nodes for shard in self.shards))
        expected = (self.data.num_graphs, self.data.num_nodes)
        if found != expected or not self.shards:
            raise CacheError(
                f"{where}: found shards of {found[0]} graphs and {found[1]} nodes, "
                f"expected {expected[0]} and {expected[1]}, and at least one shard"
            )

    def to_json(self) -> dict[str, Any]:
        """Return the manifest as plain values, its own hash last."""
        value = {field.name: getattr(self, field.name) for field in fields(self)} | {
            "model": _entry(_ModelEntry, self.model),
            "data": _entry(_DataEntry, self.data),
            "layout": asdict(self.layout),
            "provenance": None if self.provenance is None else self.provenance.to_json(),
            "shards": [asdict(shard) for shard in self.shards],
        }
        return {**value, "manifest_sha256": json_sha256(value, MANIFEST_NAME)}

    def to_text(self) -> str:
        """Return the text of ``manifest.json``, after checking that it can be read back."""
        text = to_json(self.to_json())
        Manifest.from_text(text.encode(), MANIFEST_NAME)
        return text

    @classmethod
    def from_text(cls, text: bytes, where: str) -> Manifest:
        """Read the text of ``manifest.json``, checking everything."""
        return cls.from_json(parse_json(text, where), where)

    @classmethod
    def from_json(cls, value: Any, where: str) -> Manifest:
        """Read what :meth:`to_json` returned, checking its hash, every type and every range."""
        seal = decode(_Seal, value, where, unknown=True)
        major = FORMAT_VERSION.partition(".")[0]
        if seal.format_version.partition(".")[0] != major:
            raise CacheError(
                f"{where}: found format version {seal.format_version!r}, expected {major}.x; "
                "another version of histograph-post wrote this cache"
            )
        contents = {key: item for key, item in value.items() if key != "manifest_sha256"}
        expected = json_sha256(contents, where)
        if seal.manifest_sha256 != expected:
            raise CacheError(
                f"{where}: found manifest_sha256 {seal.manifest_sha256}, expected {expected}; "
                "the file was changed"
            )
        if seal.format_version == "1.0":
            contents = _upgraded(contents)
        specs: Any = {"model": (_ModelEntry, ModelSpec), "data": (_DataEntry, DataSpec)}
        for name, (entry, spec) in specs.items():
            if name in contents:
                read = decode(entry, contents[name], f"{where}: {name}")
                contents[name] = spec(**vars(read), recorded_in=where)
        manifest = decode(cls, contents, where, unknown=seal.format_version != FORMAT_VERSION)
        manifest.validate(where)
        return manifest


def _entry(kind: type[_ModelEntry | _DataEntry], spec: ModelSpec | DataSpec) -> dict[str, Any]:
    """Return what the manifest keeps of a specification."""
    return {field.name: getattr(spec, field.name) for field in fields(kind)}


def _upgraded(contents: Mapping[str, Any]) -> dict[str, Any]:
    """Return a manifest of version 1.0, which knew nothing about the code, as version 1.1."""
    model = contents.get("model")
    if isinstance(model, dict):
        model = {"filled": {}, **model}
    return {"provenance": None, **contents, **({} if model is None else {"model": model})}


@dataclass(frozen=True)
class _Seal:
    """The fields of a manifest that are checked before the rest."""

    format_version: str
    manifest_sha256: Sha256


def _is_path(name: str) -> bool:
    return name in ("", ".", "..") or any(mark in name for mark in "/\\\0")


# --- opening a cache


def read_manifest(path: str | Path) -> tuple[Path, Manifest]:
    """Return the folder of a cache and its manifest, read and checked."""
    folder = Path(path).absolute()
    if not folder.is_dir():
        raise NotFoundError(f"{path}: found no folder, expected a cache")
    manifest = folder / MANIFEST_NAME
    if not os.path.lexists(manifest):
        shards = len(list(folder.glob("shard-*.h5")))
        if not shards:
            raise CacheError(f"{path}: found {_describe(folder)}, expected a cache")
        raise CacheError(
            f"{path}: found {plural(shards, 'shard')} but no {MANIFEST_NAME}, expected a complete "
            "cache; run the same `histograph cache` command again to resume it"
        )
    text = read_limited(manifest, MANIFEST_LIMIT)
    return folder, Manifest.from_text(text, str(manifest))


def is_begun(folder: Path) -> bool:
    """Return whether a folder holds a cache, finished or not, damaged or not."""
    return os.path.lexists(folder / MANIFEST_NAME) or any(folder.glob("shard-*.h5"))


def _describe(folder: Path) -> str:
    """Describe a folder that has neither a manifest nor shards."""
    if (folder / "run.json").is_file():
        return "a run"
    if (folder / "head.json").is_file():
        return "an exported model"
    if any(folder.glob("*.cache")):
        return "a folder of caches"
    return f"no {MANIFEST_NAME}"


def read_splits(folder: Path, manifest: Manifest) -> Splits:
    """Read the splits of a cache, refusing any but those that the manifest names."""
    path = folder / SPLITS_NAME
    value = parse_json(read_hashed(path, SPLITS_LIMIT, manifest.splits_sha256), str(path))
    total = value.get("total") if isinstance(value, dict) else None
    # Before anything of that size is allocated.
    if total != manifest.num_labels:
        raise CacheError(f"{path}: found splits of {total}, expected {manifest.num_labels} rows")
    try:
        return Splits.from_json(value, where=str(path))
    except SplitError as error:
        raise CacheError(str(error)) from None


def read_hashed(path: Path, limit: int, sha256: str) -> bytes:
    """Read a file of at most ``limit`` bytes, refusing any but the one with this hash."""
    contents = read_limited(path, limit)
    found = hashlib.sha256(contents).hexdigest()
    if found != sha256:
        raise CacheError(f"{path}: found checksum {found}, expected {sha256}")
    return contents


# --- the records of finished shards, until there is a manifest


@dataclass(frozen=True)
class ShardRecord:
    """The file beside a finished shard: its entry in the manifest, and the plan it belongs to."""

    plan_hash: Sha256
    shard: ShardInfo


def record_path(shard: Path) -> Path:
    """Return the path of a shard's record."""
    return shard.with_suffix(".json")


def write_record(shard: Path, record: ShardRecord) -> None:
    """Write the record of a shard."""
    write_text(record_path(shard), to_json(asdict(record)))


def read_record(shard: Path) -> ShardRecord:
    """Read the record of a shard, checking every type."""
    path = record_path(shard)
    text = read_limited(path, MANIFEST_LIMIT)
    return decode(ShardRecord, parse_json(text, str(path)), str(path))


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest, which completes the cache and replaces the records of its shards."""
    write_text(folder / MANIFEST_NAME, manifest.to_text())
    remove_records(folder)


def remove_records(folder: Path) -> None:
    """Remove the records of all shards."""
    for path in folder.glob("shard-*.json"):
        path.unlink(missing_ok=True)


def withdraw_manifest(folder: Path, manifest: Manifest) -> None:
    """Make a cache incomplete again: write the records of its shards, remove the manifest."""
    for shard in manifest.shards:
        write_record(folder / shard_name(shard.index), ShardRecord(manifest.plan_hash, shard))
    (folder / MANIFEST_NAME).unlink(missing_ok=True)
