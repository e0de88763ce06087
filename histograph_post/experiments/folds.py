"""Folds: the cache and the rows of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..caches import Cache
from ..caches.manifest import MANIFEST_NAME
from ..errors import CacheError, NotFoundError
from ..splits import Split, Splits, resolve_splits
from ..training.loaded_cache import LoadedCache
from ..utils.specifications import BUILT_IN_MODELS


@dataclass(frozen=True)
class Fold:
    """One fold: a cache and a split of its label rows."""

    number: int
    loaded: LoadedCache
    split: Split


def open_caches(path: str | Path | Cache) -> list[Cache]:
    """Open a cache, or a folder of caches of one data set (``fold-0.cache``, ...), in order.

    Per-fold caches come from checkpoints trained on one fold each: they share the data, not the
    weights.
    """
    if isinstance(path, Cache):
        return [path]
    caches = [Cache.open(folder) for folder in cache_folders(path)]
    for cache in caches[1:]:
        for what, first, other in (
            ("data", caches[0].manifest.data.fingerprint, cache.manifest.data.fingerprint),
            ("widths", caches[0].widths, cache.widths),
        ):
            if first != other:
                raise CacheError(
                    f"{cache.path}: found {what} {other}, expected those of "
                    f"{caches[0].path.name}, {first}"
                )
    known: dict[tuple[str, str], Path] = {}
    for cache in caches:
        own = (cache.manifest.weights_sha256, cache.manifest.splits_sha256)
        if known.setdefault(own, cache.path) != cache.path:
            raise CacheError(
                f"{cache.path}: found the weights and the split of {known[own].name}, expected "
                "those of another fold"
            )
    return caches


def cache_folders(path: str | Path) -> list[Path]:
    """Return the folder of a cache, or those of a folder of caches, in order."""
    folder = Path(path)
    if not folder.is_dir():
        raise NotFoundError(f"{path}: found no folder, expected a cache or a folder of caches")
    members = sorted(folder.glob("*.cache"), key=lambda member: _natural(member.stem))
    return members if members and not (folder / MANIFEST_NAME).exists() else [folder]


def _natural(name: str) -> tuple[str, int]:
    """Sort ``fold-10`` after ``fold-9``."""
    return name.rstrip("0123456789"), int("0" + "".join(filter(str.isdecimal, name)))


def make_folds(
    caches: Sequence[Cache],
    *,
    split: str | None = None,
    split_seed: int = 0,
    memory_limit: int | None = None,
) -> tuple[list[Fold], Splits]:
    """Return the folds of an experiment, on one cache or one per fold, and their splits.

    Args:
        split: Another split than the cache's own: a file, ``kfold:10``, ... (one cache only).
    """
    first = caches[0]
    if len(caches) > 1:
        if split is not None:
            raise CacheError("found per-fold caches, which bring their own splits, and --split")
        owns = [cache.splits for cache in caches]
        # A cache of fold k either holds that fold alone, or all folds in order.
        chosen = tuple(
            own.folds[0] if len(own.folds) == 1 else own.folds[k] for k, own in enumerate(owns)
        )
        splits = Splits("per-fold caches", owns[0].unit, owns[0].total, None, chosen)
    elif split is not None:
        splits = resolve_splits(first.to_split(first.splits), split, seed=split_seed)
    else:
        splits = first.splits
    return load_folds(caches, splits, memory_limit=memory_limit), splits


def seen_note(caches: Sequence[Cache], splits: Splits) -> str | None:
    """Return a note on test rows that a cache's own split trains on; None if there are none."""
    own = caches[0].splits.folds
    if len(caches) > 1 or len(own) > 1:
        return None
    tested = np.unique(np.concatenate([fold.test for fold in splits.folds]))
    seen = np.intersect1d(tested, own[0].train).size
    if not seen:
        return None
    again = ""
    if caches[0].manifest.model.spec in BUILT_IN_MODELS:
        again = "; histograph pretrain --folds trains a backbone for each fold"
    return (
        f"{seen:,} of {len(tested):,} rows that are tested are training rows of the cache's own "
        f"split: fair only if the checkpoint was not trained on them{again}"
    )


def load_folds(
    caches: Sequence[Cache], splits: Splits, *, memory_limit: int | None = None
) -> list[Fold]:
    """Load one cache, or one per fold, for training on known splits."""
    splits.validate()
    loaded = [LoadedCache(cache, memory_limit=memory_limit) for cache in caches]
    if len(caches) == 1:
        loaded *= len(splits.folds)
    if len(loaded) != len(splits.folds):
        raise CacheError(
            f"found {len(caches)} caches, expected one for each of the folds of "
            f"the split, {len(splits.folds)}"
        )
    return [
        Fold(number, cache, fold)
        for number, (cache, fold) in enumerate(zip(loaded, splits.folds, strict=True))
    ]
