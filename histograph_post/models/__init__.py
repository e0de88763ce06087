"""Models: a specification and a checkpoint come in, a module with its weights goes out.

Read ``building.py`` first (a specification becomes a module), then ``checkpoints.py`` (a file
becomes a state dict; ``inert.py`` reads it without running it) and ``loading.py`` (the two agree on
every tensor, or loading stops). ``spec.py`` names the model and its weights; ``model_call.py``
calls any model by the names in its ``forward`` and finds the prediction among its outputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..utils import lazy_names

if TYPE_CHECKING:
    from .building import BUILT_IN, build_model
    from .checkpoints import Checkpoint, read_checkpoint
    from .key_map import KeyMap, KeyRule, read_key_map
    from .loading import KeyRow, LoadReport, load_into
    from .model_call import call_model, prediction
    from .spec import ModelSpec, parse_args

__all__ = [
    "BUILT_IN",
    "Checkpoint",
    "KeyMap",
    "KeyRow",
    "KeyRule",
    "LoadReport",
    "ModelSpec",
    "build_model",
    "call_model",
    "load_into",
    "parse_args",
    "prediction",
    "read_checkpoint",
    "read_key_map",
]

__getattr__ = lazy_names(
    __name__,
    {
        ".building": ("BUILT_IN", "build_model"),
        ".checkpoints": ("Checkpoint", "read_checkpoint"),
        ".key_map": ("KeyMap", "KeyRule", "read_key_map"),
        ".loading": ("KeyRow", "LoadReport", "load_into"),
        ".model_call": ("call_model", "prediction"),
        ".spec": ("ModelSpec", "parse_args"),
    },
)
