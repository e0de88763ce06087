"""The output folder of a cache: whatever is in it already is completed, replaced or refused."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from ..errors import CacheError, HistographError, OutputExistsError
from ..splits import Splits
from ..utils.files import finished_name, open_regular, read_limited, sha256_prefix
from ..utils.outputs import OutputFolder
from .layout import ShardInfo, shard_name
from .manifest import (
    CANARY_NAME,
    MANIFEST_NAME,
    is_of_a_cache,
    read_record,
    remove_records,
    withdraw_manifest,
)
from .planning import CachePlan
from .provenance import CANARY_LIMIT, Canary
from .reader import Cache


def open_folder(
    plan: CachePlan,
    output: OutputFolder,
    written: Mapping[str, str | None],
    *,
    overwrite: bool,
    shared: bool,
    on_note: Callable[[str], None] | None = None,
) -> Cache | list[ShardInfo | None]:
    """Prepare a folder for writing; return the cache if it is complete, else its finished shards.

    A cache of another plan is replaced only if ``overwrite`` asks for it, and only once the new one
    is complete.

    Args:
        written: The small files of the cache, and their text; None where it is not known yet.
        overwrite: Replace the cache in the folder. One of this very plan is continued instead, if
            it is incomplete or written by several jobs.
        on_note: Called with a line about each shard that has changed since it was written.
    """
    _refuse_foreign_names(output.folder)
    start_over = overwrite and not shared and (output.folder / MANIFEST_NAME).exists()
    try:
        found = None if start_over else _found(plan, output.folder, written, on_note)
    except OutputExistsError:
        if not overwrite:
            raise
        found = None
    if found is None:
        _refuse_foreign_names(output.replace())
        try:
            found = _found(plan, output.folder, written, on_note)
        except OutputExistsError:
            shutil.rmtree(output.folder)
            found = [None] * len(plan.shards)
    output.clean()
    output.folder.mkdir(exist_ok=True)
    return found


def _refuse_foreign_names(folder: Path) -> None:
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    foreign = [name for name in names if not is_of_a_cache(finished_name(name))]
    if foreign:
        raise OutputExistsError(
            f"{folder}: found {foreign[0]!r}, which is not a cache's; choose another -o"
        )


def _found(
    plan: CachePlan,
    folder: Path,
    written: Mapping[str, str | None],
    on_note: Callable[[str], None] | None,
) -> Cache | list[ShardInfo | None]:
    """Return the cache, or its finished shards; refuse a folder that holds another cache."""
    if (folder / MANIFEST_NAME).exists():
        found = Cache.open(folder)
        if found.manifest.plan_hash != plan.hash or not _has_splits(plan, found):
            raise OutputExistsError(
                f"{folder}: found a cache of {found.manifest.data.spec} by weights "
                f"{found.manifest.weights_sha256[:12]} that this command would not write; "
                "choose another -o, or --overwrite"
            )
        refuse_other_code(plan, folder)
        if all(_is_whole(folder, shard) for shard in found.manifest.shards):
            remove_records(folder)  # left by a job that was killed at the very end
            return found
        withdraw_manifest(folder, found.manifest)  # no longer complete: write what is damaged
    refuse_other_code(plan, folder)
    shards = [find_shard(plan, folder, index, on_note) for index in range(len(plan.shards))]
    if not any(shards):
        refuse_foreign_files(folder, written)
    return shards


def _is_whole(folder: Path, shard: ShardInfo) -> bool:
    """Whether the file of a shard is there, with all of its bytes."""
    try:
        with open_regular(folder / shard_name(shard.index)) as file:
            return os.fstat(file.fileno()).st_size == shard.num_bytes
    except CacheError:
        return False


def _has_splits(plan: CachePlan, found: Cache) -> bool:
    """Whether a complete cache has the splits of a plan, and the graphs if all are known."""
    if isinstance(plan.splits, Splits):
        same_graphs = found.manifest.data.fingerprint == plan.dataset.fingerprint()
        return same_graphs and found.splits == plan.splits
    with suppress(HistographError):  # index files may count rows, which the cache does not know
        if plan.splits(found.to_split(official=None)) == found.splits:
            return True
    return plan.reading(None).splits == found.splits


def refuse_other_code(plan: CachePlan, folder: Path) -> None:
    """Refuse to resume a cache whose shards were made by code that computes other activations."""
    path = folder / CANARY_NAME
    if not path.exists():
        return
    try:
        canary = Canary.from_bytes(read_limited(path, CANARY_LIMIT), str(path))
        layer, difference = next(canary.differences(plan.model, plan.capture), ("", 0.0))
    except HistographError as error:
        raise OutputExistsError(f"{error}; choose another -o, or --overwrite") from None
    if layer:
        raise OutputExistsError(
            f"{folder}: found a cache by code with other activations (layer {layer!r} of its "
            f"canary graph differs by {difference:.1e}, relative); choose another -o, or "
            "--overwrite"
        )


def find_shard(
    plan: CachePlan, folder: Path, index: int, on_note: Callable[[str], None] | None = None
) -> ShardInfo | None:
    """Return a finished shard; None if it is missing or has changed and must be written again.

    A shard of another plan, or without a record, is refused.
    """
    path = folder / shard_name(index)
    if not os.path.lexists(path):
        return None
    if (folder / MANIFEST_NAME).exists():
        return None  # another job has just completed the cache; its manifest has the records
    try:
        record = read_record(path)
        with open_regular(path) as file:
            found = sha256_prefix(file, os.fstat(file.fileno()).st_size)
        if record.plan_hash != plan.hash:
            raise CacheError(
                f"{path}: found a shard of plan {record.plan_hash[:12]}, expected {plan.hash[:12]}"
            )
        shard = record.shard
        # Of a long table, a record has either rows or graphs, as there was a manifest or not.
        place = plan.shards[index] if plan.dataset.source is None else (shard.start, shard.stop)
        if (shard.index, shard.start, shard.stop) != (index, *place):
            raise CacheError(f"{path}: found the record of another shard, expected its own")
        shard.validate(plan.layout, str(path))
    except CacheError as error:
        if (folder / MANIFEST_NAME).exists():  # another job has completed the cache meanwhile
            return None
        raise OutputExistsError(f"{error}; choose another -o, or --overwrite") from None
    if found == shard.sha256:
        return shard
    if on_note is not None:
        on_note(f"{path}: found SHA-256 {found[:12]}, expected {shard.sha256[:12]}; written again")
    return None


def refuse_foreign_files(folder: Path, written: Mapping[str, str | None]) -> None:
    """Refuse to replace files that, without a shard beside them, may not be a cache's."""
    for name, text in written.items():
        path = folder / name
        same = text is not None and path.is_file() and path.read_bytes() == text.encode()
        if path.exists() and not same:
            raise OutputExistsError(
                f"{path}: found another file of that name; choose another -o, or --overwrite"
            )
