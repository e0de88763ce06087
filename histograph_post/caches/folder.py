"""The folder of a cache: made ready for writing, completed, or refused because it is another's."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..errors import CacheError, HistographError, OutputExistsError
from ..utils.files import PARTIAL_SUFFIX, remove_leftovers
from .canary import Canary
from .layout import ShardInfo, shard_name
from .manifest import MANIFEST_NAME
from .planning import CachePlan
from .provenance import CANARY_NAME
from .reader import Cache
from .writer import existing_shard

#: The resolved configuration of the command, beside the shards.
CONFIG_NAME = "config.toml"

#: The names of what a cache writes, finished or not.
_OURS = re.compile(
    r"(manifest\.json|splits\.json|config\.toml|canary\.safetensors|molecules\.smi|shard-\d{5,}\.h5)"
    r"(\.[^/]+-\d+\.partial)?"
)


def open_folder(plan: CachePlan, folder: Path, *, overwrite: bool, shared: bool) -> Cache | None:
    """Make the folder ready for writing; return the cache if it is complete already.

    Of an overwritten folder that several jobs share, shards of this very plan stay: another job
    may just have written them.
    """
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise OutputExistsError(f"{folder}: found a file or a link, expected a folder or nothing")
    folder.mkdir(parents=True, exist_ok=True)
    paths = list(folder.iterdir())
    foreign = [path.name for path in paths if not _OURS.fullmatch(path.name)]
    if foreign:
        raise OutputExistsError(
            f"{folder}: found {foreign[0]!r}, which is not a cache's; choose another -o"
        )
    if (folder / MANIFEST_NAME).exists() and not (overwrite and not shared):
        found = Cache.open(folder)
        if found.manifest.plan_hash == plan.hash and found.splits == plan.splits:
            names = [shard_name(shard.index) for shard in found.manifest.shards]
            if all((folder / name).exists() for name in names):
                return found
            (folder / MANIFEST_NAME).unlink(missing_ok=True)  # no longer complete: fill the gaps
        elif not overwrite:
            raise OutputExistsError(
                f"{folder}: found a cache of {found.manifest.data.spec} by weights "
                f"{found.manifest.weights_sha256[:12]} that this command would not write; "
                "choose another -o, or --overwrite"
            )
    if overwrite:
        _clear(plan, folder, paths, keep_own=shared)
    remove_leftovers(folder)
    return None


def _clear(plan: CachePlan, folder: Path, paths: Sequence[Path], *, keep_own: bool) -> None:
    """Remove a cache, the manifest first: without it the rest is none."""
    own = set()
    if keep_own:
        for index, (start, stop) in enumerate(plan.shards):
            with contextlib.suppress(CacheError):
                if existing_shard(folder, index, plan.layout, plan.hash, start, stop):
                    own.add(shard_name(index))
    for path in sorted(paths, key=lambda path: path.name != MANIFEST_NAME):
        if path.name not in own and not path.name.endswith(PARTIAL_SUFFIX):
            path.unlink(missing_ok=True)


def refuse_other_code(plan: CachePlan, folder: Path) -> None:
    """Refuse to go on with a cache whose shards were made by code that gives other activations."""
    path = folder / CANARY_NAME
    if not path.exists():
        return
    try:
        canary = Canary.from_bytes(path.read_bytes(), str(path))
        layer, difference = next(canary.differences(plan.model, plan.capture), ("", 0.0))
    except HistographError as error:
        raise OutputExistsError(f"{error}; choose another -o, or --overwrite") from None
    if layer:
        raise OutputExistsError(
            f"{folder}: found a cache by code with other activations (layer {layer!r} of its "
            f"canary graph differs by {difference:.1e}, relative); choose another -o, or "
            "--overwrite"
        )


def found_shards(plan: CachePlan, folder: Path) -> list[ShardInfo | None]:
    """Return the shards that are there already; shards of another plan are refused."""
    try:
        return [
            existing_shard(folder, index, plan.layout, plan.hash, start, stop)
            for index, (start, stop) in enumerate(plan.shards)
        ]
    except CacheError as error:
        raise OutputExistsError(f"{error}; choose another -o, or --overwrite") from None


def refuse_foreign_files(folder: Path, written: Mapping[str, str]) -> None:
    """Refuse to replace files that, without a shard beside them, may be anybody's."""
    for name, text in written.items():
        path = folder / name
        if path.exists() and path.read_bytes() != text.encode():
            raise OutputExistsError(
                f"{path}: found another file of that name; choose another -o, or --overwrite"
            )
