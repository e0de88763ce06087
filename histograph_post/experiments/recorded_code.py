"""The code that a run, a cache or a pretraining names: what ``histograph trust`` approves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ..caches.manifest import MANIFEST_NAME, read_manifest
from ..caches.provenance import Provenance
from ..errors import ConfigError
from ..runs.run import HEAD_CONFIG_NAME, MODEL_NAME, Run
from ..utils.specifications import IN_MEMORY, Specification
from ..utils.trust import Trusted, code_to_trust
from .folds import cache_folders
from .trained_backbones import fold_folders, recorded_folds


def recorded_code(folder: Path) -> list[Trusted]:
    """Return the models, data and readouts of a folder that are code, each with its source now.

    Nothing is imported. A relative name starts at the current folder, or else where the command
    was given that made the folder.
    """
    found: list[Trusted] = []
    for named, recorded in _named(folder):
        places = [Path.cwd(), *([Path(recorded.folder)] if recorded is not None else [])]
        if isinstance(named, str):
            entry = code_to_trust("head", named, {}, places)
        elif named.is_built_in or named.spec == IN_MEMORY:
            continue
        else:
            entry = code_to_trust(named.WHAT, str(named.spec), named.args, places)
        if entry not in found:
            found.append(entry)
    return found


def _named(folder: Path) -> Iterator[tuple[Specification | str, Provenance | None]]:
    """Yield the specifications that a folder records, readouts as texts, and who made them."""
    if (folder / HEAD_CONFIG_NAME).is_file():
        run = Run.of(folder)
        recorded = run.backbone.provenance
        yield from ((spec, recorded) for spec in (run.backbone.model, run.backbone.data))
        yield from ((spec, recorded) for spec in run.own_heads.values())
    elif fold_folders(folder) or (folder / MODEL_NAME).is_file():
        for fold in recorded_folds(folder):
            yield from ((spec, None) for spec in (fold.model, fold.data))
    else:
        caches = cache_folders(folder)
        if not all((cache / MANIFEST_NAME).is_file() for cache in caches):
            raise ConfigError(f"{folder}: found no run and no cache, expected one")
        for cache in caches:
            _, manifest = read_manifest(cache)
            yield from ((spec, manifest.provenance) for spec in (manifest.model, manifest.data))
