"""The caches a run was trained on, if they can still be found."""

from __future__ import annotations

from pathlib import Path

from ..caches import Cache
from ..errors import CacheError, HistographError
from ..experiments.folds import open_caches
from .record import RunRecord


def find_caches(record: RunRecord, given: Path | None) -> tuple[list[Cache], str]:
    """Return the caches of a run, one or one per fold, or none and the reason.

    Args:
        record: The run.
        given: Where they are now; a cache of other weights or other data is refused.
    """
    if given is not None:
        caches = open_caches(given)
        if record.saved.backbone.in_run:
            # A run that trained its backbone makes a cache per fold; its head reads one of them.
            own = record.saved.backbone.weights_sha256
            caches = [cache for cache in caches if cache.weights_sha256 == own] or caches
        _check(record, caches)
        return caches, ""
    backbone = record.saved.backbone
    if backbone.in_run:
        return [], (
            f"{record.folder} trained its backbone, whose activations no cache holds yet; make one "
            f"with `histograph cache {record.folder} -o CACHES` and give --cache CACHES"
        )
    place = backbone.cache
    try:
        caches = open_caches(place.parent if len(_weights(record)) > 1 else place)
        _check(record, caches)
    except HistographError as error:
        return [], f"{error}; say where the cache is with --cache PATH"
    return caches, ""


def _weights(record: RunRecord) -> list[str]:
    backbone = record.saved.backbone
    if backbone.in_run:
        return [backbone.weights_sha256]
    return list(record.plan.get("weights", [backbone.weights_sha256]))


def _check(record: RunRecord, caches: list[Cache]) -> None:
    """Refuse caches of another backbone or of other data."""
    backbone = record.saved.backbone
    for what, found, expected in (
        ("weights", [cache.weights_sha256 for cache in caches], _weights(record)),
        ("data", [caches[0].manifest.data.fingerprint], [backbone.data_fingerprint]),
    ):
        if found != expected:
            raise CacheError(
                f"{caches[0].path}: found {what} {_short(found)}, expected {_short(expected)}, "
                f"on which {record.folder} was trained"
            )


def _short(hashes: list[str]) -> str:
    return ", ".join(value[:12] for value in hashes)
