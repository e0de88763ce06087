"""Models: a specification and a checkpoint come in, a module with its weights goes out.

Read ``building.py`` first (a specification becomes a module), then ``checkpoints.py`` (a file
becomes a state dict, without running anything in it) and ``loading.py`` (the two agree on every
tensor, or loading stops). ``spec.py`` names the model and its weights; ``model_call.py`` calls
any model by the names in its ``forward``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..utils import lazy_names

if TYPE_CHECKING:
    from .building import BUILT_IN as BUILT_IN
    from .building import build_model as build_model
    from .building import parse_args as parse_args
    from .checkpoints import Checkpoint as Checkpoint
    from .checkpoints import read_checkpoint as read_checkpoint
    from .key_map import KeyMap as KeyMap
    from .key_map import KeyRule as KeyRule
    from .key_map import read_key_map as read_key_map
    from .loading import KeyRow as KeyRow
    from .loading import LoadReport as LoadReport
    from .loading import load_into as load_into
    from .model_call import call_model as call_model
    from .model_call import prediction as prediction
    from .spec import ModelSpec as ModelSpec

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
        "BUILT_IN": ".building",
        "Checkpoint": ".checkpoints",
        "KeyMap": ".key_map",
        "KeyRow": ".loading",
        "KeyRule": ".key_map",
        "LoadReport": ".loading",
        "ModelSpec": ".spec",
        "build_model": ".building",
        "call_model": ".model_call",
        "load_into": ".loading",
        "parse_args": ".building",
        "prediction": ".model_call",
        "read_checkpoint": ".checkpoints",
        "read_key_map": ".key_map",
    },
)
