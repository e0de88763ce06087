from .manifest import Manifest as Manifest
from .reader import Cache as Cache
from .shard import CachedBatch as CachedBatch
from .shard import CachedGraph as CachedGraph
from .shard import verify_cache as verify_cache

MANIFEST_NAME: str
CANARY_NAME: str
