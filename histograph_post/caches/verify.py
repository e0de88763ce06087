"""Checking every byte of a cache, and listing what is wrong instead of stopping at it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..errors import CacheError
from ..utils.files import open_regular, sha256_prefix
from .layout import STORED_TYPES, Layout, ShardInfo, shard_name
from .manifest import CANARY_NAME, MANIFEST_NAME, SPLITS_NAME, Manifest, read_splits
from .provenance import read_canary
from .reader import Cache
from .shard import Shard

#: Bits that are all set in a value that is not finite, by storage type.
_EXPONENTS = {"float32": 0x7F800000, "float16": 0x7C00, "bfloat16": 0x7F80}

#: Values are scanned in blocks of about this many bytes.
_BLOCK_BYTES = 16 * 2**20


@dataclass(frozen=True)
class VerifyRow:
    """What came of checking one file; ``problem`` is None where nothing is wrong."""

    file: str
    checked: str
    problem: str | None


@dataclass(frozen=True)
class VerifyReport:
    """What came of checking every file of a cache."""

    path: Path
    rows: tuple[VerifyRow, ...]

    @property
    def problems(self) -> tuple[str, ...]:
        """What is wrong, a line each."""
        return tuple(row.problem for row in self.rows if row.problem is not None)

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems


def verify_cache(
    path: str | Path, progress: Callable[[int, int], None] | None = None
) -> VerifyReport:
    """Check every byte of a cache: checksums, offsets, node numbers, finite values, splits.

    Damage is listed, not raised. ``progress`` is called with the bytes done and their total.
    """
    folder = Path(path)
    try:
        manifest = Cache.open(folder).manifest
    except CacheError as error:
        return VerifyReport(folder, (VerifyRow(MANIFEST_NAME, "contents", str(error)),))
    rows = [
        VerifyRow(MANIFEST_NAME, "checksum, contents", None),
        VerifyRow(SPLITS_NAME, "checksum, contents", _problem(read_splits, folder, manifest)),
    ]
    recorded = manifest.provenance
    if recorded is not None and recorded.canary_sha256 is not None:
        problem = _problem(read_canary, folder, recorded.canary_sha256)
        rows.append(VerifyRow(CANARY_NAME, "checksum, contents", problem))
    total = sum(shard.num_bytes for shard in manifest.shards)
    done = 0
    for info in manifest.shards:
        problem = _problem(_verify_shard, folder / shard_name(info.index), info, manifest)
        rows.append(
            VerifyRow(
                shard_name(info.index), "checksum, offsets, node numbers, finite values", problem
            )
        )
        done += info.num_bytes
        if progress is not None:
            progress(done, total)
    return VerifyReport(folder, tuple(rows))


def _problem(check: Callable[..., object], *arguments: object) -> str | None:
    try:
        check(*arguments)
    except CacheError as error:
        return str(error)
    return None


def _verify_shard(path: Path, info: ShardInfo, manifest: Manifest) -> None:
    with open_regular(path) as file:
        # One byte more than expected, so that a file that has grown does not pass.
        found = sha256_prefix(file, info.num_bytes + 1)
    if found != info.sha256:
        raise CacheError(f"{path}: found checksum {found}, expected {info.sha256}")
    _check_finite(Shard.open(path, info, manifest.layout), manifest.layout, path)


def _check_finite(shard: Shard, layout: Layout, path: Path) -> None:
    exponent = _EXPONENTS[layout.dtype]
    bits = STORED_TYPES[layout.dtype].replace("f", "u")
    step = max(1, _BLOCK_BYTES // layout.row_bytes)
    for number, values in enumerate(shard.activations):
        for start in range(0, shard.info.num_nodes, step):
            block = values[start : min(start + step, shard.info.num_nodes)].view(bits)
            wrong = (block & exponent) == exponent  # [rows, num_layers, dim] or [rows, dim]
            if not wrong.any():
                continue
            row, layer = np.argwhere(wrong)[0, :2].tolist()
            graph = int(np.searchsorted(shard.arrays["ptr"], start + row, side="right")) - 1
            name = layout.layer_names[layer if layout.is_uniform else number]
            raise CacheError(
                f"{path}: graph {shard.ids[graph]!r}, layer {name!r}: "
                "found a value that is not finite, expected finite activations"
            )
