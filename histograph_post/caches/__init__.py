"""Caches: a model and graphs come in; shards of activations and a manifest go out, and come back.

The format is specified in ``docs/cache-format.md``. To follow how a cache is made, read
``caching.py`` first (plan, write, join), then ``writer.py``; to follow how it is read,
``manifest.py`` (without torch), then ``reader.py`` (:class:`Cache`).
"""

import lazy_loader

# Here, since runs need these names without numpy, which the manifest imports.
MANIFEST_NAME = "manifest.json"
#: One small graph and its activations (see :mod:`.provenance`), in a cache, a run and an export.
CANARY_NAME = "canary.safetensors"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
