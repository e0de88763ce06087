"""Models: a specification and a checkpoint come in, a module with its weights goes out.

Read ``building.py`` first (a specification becomes a module), then ``reading.py`` (a file becomes a
state dict, without running anything in it) and ``loading.py`` (the two agree on every tensor, or
nothing goes on). ``model_call.py`` calls any model by the names in its ``forward``.
"""

from __future__ import annotations

from .building import BUILT_IN, build_model, parse_args
from .key_map import KeyMap, KeyRule, read_key_map
from .loading import load_into
from .model_call import call_model, prediction
from .reading import Checkpoint, read_checkpoint
from .report import KeyRow, LoadReport

__all__ = [
    "BUILT_IN",
    "Checkpoint",
    "KeyMap",
    "KeyRow",
    "KeyRule",
    "LoadReport",
    "build_model",
    "call_model",
    "load_into",
    "parse_args",
    "prediction",
    "read_checkpoint",
    "read_key_map",
]
