"""Caches: a model and graphs come in; shards of activations and a manifest go out, and come back.

The format is specified in ``docs/cache-format.md``. To follow how a cache is made, read
``caching.py`` first (plan, write, join), then ``writer.py``; to follow how it is read,
``manifest.py`` (without torch), then ``reader.py`` (:class:`Cache`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..utils import lazy_names

if TYPE_CHECKING:
    from .manifest import Manifest
    from .reader import Cache
    from .shard import CachedBatch, CachedGraph, verify_cache

# Here, since runs need these names without numpy, which the manifest imports.
MANIFEST_NAME = "manifest.json"
#: One small graph and its activations (see :mod:`.provenance`), in a cache, a run and an export.
CANARY_NAME = "canary.safetensors"

__all__ = ["Cache", "CachedBatch", "CachedGraph", "Manifest", "verify_cache"]

__getattr__ = lazy_names(
    __name__,
    {
        ".manifest": ("Manifest",),
        ".reader": ("Cache",),
        ".shard": ("CachedBatch", "CachedGraph", "verify_cache"),
    },
)
