"""The cache on disk: shards of activations, and the manifest that binds them.

format    what a manifest says (``docs/cache-format.md``)
opening   manifest and splits, read and checked
writer    plan_shards, ShardWriter, existing_shard, write_manifest
reader    Cache: zero-copy histories, batches, labels, outputs, splits
verify    every byte checked
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..utils.lazy import lazy_names

if TYPE_CHECKING:
    from ..utils.levels import Level as Level
    from .format import FORMAT_VERSION as FORMAT_VERSION
    from .format import Manifest as Manifest
    from .format import plan_hash as plan_hash
    from .layout import Layout as Layout
    from .reader import Cache as Cache
    from .row_writers import BlockMemory as BlockMemory
    from .row_writers import RowBlock as RowBlock
    from .shard import CachedBatch as CachedBatch
    from .shard import CachedGraph as CachedGraph
    from .shard import History as History
    from .shard import ShardGraphs as ShardGraphs
    from .shard_info import ShardInfo as ShardInfo
    from .shard_info import shard_name as shard_name
    from .verify import VerifyReport as VerifyReport
    from .verify import VerifyRow as VerifyRow
    from .verify import verify_cache as verify_cache
    from .writer import ShardWriter as ShardWriter
    from .writer import existing_shard as existing_shard
    from .writer import plan_shards as plan_shards
    from .writer import write_manifest as write_manifest

__all__ = [
    "FORMAT_VERSION",
    "BlockMemory",
    "Cache",
    "CachedBatch",
    "CachedGraph",
    "History",
    "Layout",
    "Level",
    "Manifest",
    "RowBlock",
    "ShardGraphs",
    "ShardInfo",
    "ShardWriter",
    "VerifyReport",
    "VerifyRow",
    "existing_shard",
    "plan_hash",
    "plan_shards",
    "shard_name",
    "verify_cache",
    "write_manifest",
]

__getattr__ = lazy_names(
    __name__,
    {
        "FORMAT_VERSION": ".format",
        "BlockMemory": ".row_writers",
        "Cache": ".reader",
        "CachedBatch": ".shard",
        "CachedGraph": ".shard",
        "History": ".shard",
        "Layout": ".layout",
        "Level": "..utils.levels",
        "Manifest": ".format",
        "RowBlock": ".row_writers",
        "ShardGraphs": ".shard",
        "ShardInfo": ".shard_info",
        "ShardWriter": ".writer",
        "VerifyReport": ".verify",
        "VerifyRow": ".verify",
        "existing_shard": ".writer",
        "plan_hash": ".format",
        "plan_shards": ".writer",
        "shard_name": ".shard_info",
        "verify_cache": ".verify",
        "write_manifest": ".writer",
    },
)
