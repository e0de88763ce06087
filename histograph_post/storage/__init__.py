"""The cache on disk: shards of activations, and the manifest that binds them.

format    what a manifest says (``docs/cache-format.md``)
writer    plan_shards, ShardWriter, existing_shard, write_manifest
reader    Cache: zero-copy histories, batches, labels, outputs, splits
verify    every byte checked
"""

from __future__ import annotations

from .cached_graph import CachedBatch, CachedGraph, History
from .format import FORMAT_VERSION, DataSource, Manifest, ModelSource, plan_hash
from .layout import Layout, Level
from .reader import Cache
from .shard_graphs import ShardGraphs
from .shard_info import ShardInfo, shard_name
from .verify import VerifyReport, VerifyRow, verify_cache
from .writer import ShardWriter, existing_shard, plan_shards, write_manifest

__all__ = [
    "FORMAT_VERSION",
    "Cache",
    "CachedBatch",
    "CachedGraph",
    "DataSource",
    "History",
    "Layout",
    "Level",
    "Manifest",
    "ModelSource",
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
