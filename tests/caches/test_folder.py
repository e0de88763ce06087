"""Resuming: shards that are there are kept only as they were written, by this very plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from histograph_post.caches import Cache, verify_cache
from histograph_post.caches.caching import write_cache
from histograph_post.caches.planning import CachePlan, plan_cache
from histograph_post.caches.probing import CacheOptions
from histograph_post.data import load_data
from histograph_post.errors import OutputExistsError
from histograph_post.splits import resolve_splits

from ..helpers import contents, make_model

SHARD = "shard-00001.h5"
RECORD = "shard-00001.json"


def planned(**options: object) -> CachePlan:
    dataset = load_data("demo:", args={"num_graphs": 60})
    asked = CacheOptions(shard_bytes=20_000, node_budget=300, **options)
    return plan_cache(make_model(), dataset, resolve_splits(dataset, None), options=asked)


@pytest.fixture(scope="module")
def plan() -> CachePlan:
    return planned()


@pytest.fixture(scope="module")
def whole(plan: CachePlan, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("whole") / "a.cache"
    write_cache(plan, folder)
    return contents(folder)


@pytest.fixture
def interrupted(plan: CachePlan, tmp_path: Path) -> Path:
    """A cache whose first shards are finished, and which has no manifest yet."""
    folder = tmp_path / "a.cache"

    def interrupt(done: int, total: int) -> None:
        if done > 0.7 * total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_cache(plan, folder, on_progress=interrupt)
    assert (folder / SHARD).exists()
    assert not (folder / "manifest.json").exists()
    return folder


def flipped(at: float):
    """Flip one bit, at that share of the file."""

    def damage(data: bytes) -> bytes:
        place = int(at * (len(data) - 1))
        return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]

    return damage


@pytest.mark.parametrize(
    "damage",
    [
        *map(flipped, (0, 0.02, 0.1, 0.5, 0.9, 1)),
        lambda data: data[:-1],
        lambda data: data + b"\0",
        lambda data: b"",
    ],
)
def test_a_shard_that_changed_before_the_manifest_is_written_again(
    plan: CachePlan, interrupted: Path, whole: dict[str, bytes], damage
) -> None:
    path = interrupted / SHARD
    path.write_bytes(damage(path.read_bytes()))
    notes: list[str] = []
    write_cache(plan, interrupted, on_note=notes.append)
    assert [SHARD in note and "written again" in note for note in notes] == [True]
    assert verify_cache(interrupted).ok
    assert contents(interrupted) == whole


def test_shards_as_they_were_written_are_kept(
    plan: CachePlan, interrupted: Path, whole: dict[str, bytes]
) -> None:
    before = (interrupted / SHARD).stat().st_mtime_ns
    write_cache(plan, interrupted, on_note=pytest.fail)
    assert (interrupted / SHARD).stat().st_mtime_ns == before
    assert contents(interrupted) == whole


def test_a_shard_of_another_plan_is_refused(interrupted: Path) -> None:
    before = contents(interrupted)
    with pytest.raises(OutputExistsError, match=r"found a shard of plan .*, or --overwrite"):
        write_cache(planned(dtype="float16"), interrupted)
    assert contents(interrupted) == before


def edited(name: str, change):
    """Change one value of a shard's record."""

    def damage(path: Path) -> None:
        record = json.loads(path.read_text())
        record["shard"][name] = change(record["shard"][name])
        path.write_text(json.dumps(record))

    return damage


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        (RECORD, lambda path: path.unlink(), "found nothing, expected a regular file"),
        (RECORD, lambda path: path.write_text("{}"), "found no 'plan_hash'"),
        (RECORD, lambda path: path.write_text("{"), "found broken JSON"),
        (RECORD, edited("start", lambda _: 10**6), "found the record of another shard"),
        (RECORD, edited("num_nodes", lambda _: 10**15), ""),
        (RECORD, edited("extents", lambda found: {**found, "labels": []}), ""),
        (SHARD, lambda path: path.symlink_to(path.rename(path.parents[1] / "x")), "symbolic link"),
        (SHARD, lambda path: (path.unlink(), path.symlink_to("/nowhere")), "symbolic link"),
    ],
)
def test_a_shard_that_nobody_vouches_for_is_refused(
    plan: CachePlan, interrupted: Path, name: str, damage, message: str
) -> None:
    damage(interrupted / name)
    before = sorted(path.name for path in interrupted.iterdir())
    with pytest.raises(
        OutputExistsError, match=rf"{Path(name).stem}.*{message}.*choose another -o"
    ):
        write_cache(plan, interrupted)
    assert sorted(path.name for path in interrupted.iterdir()) == before
    assert write_cache(plan, interrupted, overwrite=True) is not None
    assert isinstance(Cache.open(interrupted), Cache)
