"""Caches: a model and graphs come in; shards of activations and a manifest go out, and come back.

The format is specified in ``docs/cache-format.md``. To follow how a cache is made, read
``caching.py`` first (plan, write, join), then ``writer.py``; to follow how it is read,
``manifest.py`` (without torch), then ``reader.py`` (:class:`Cache`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..utils import lazy_names

if TYPE_CHECKING:
    from .manifest import Manifest as Manifest
    from .reader import Cache as Cache
    from .shard import CachedBatch as CachedBatch
    from .shard import CachedGraph as CachedGraph
    from .verify import verify_cache as verify_cache

__all__ = ["Cache", "CachedBatch", "CachedGraph", "Manifest", "verify_cache"]

__getattr__ = lazy_names(
    __name__,
    {
        "Cache": ".reader",
        "CachedBatch": ".shard",
        "CachedGraph": ".shard",
        "Manifest": ".manifest",
        "verify_cache": ".verify",
    },
)
