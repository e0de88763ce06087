"""Checkpoints: from a file someone saved, safely, to a model with its weights in it.

reading      a file becomes a Checkpoint: the state dict, found wherever people put it
unpickling   the bytes torch.save wrote, read without running anything in them
key_map      what the file calls its tensors, what the model calls them
loading      the two agree on every tensor, or nothing goes on
report       what fits and what does not, with the nearest names
"""

from __future__ import annotations

from .key_map import KeyMap, KeyRule, read_key_map
from .loading import load_into
from .reading import Checkpoint, read_checkpoint
from .report import KeyRow, LoadReport

__all__ = [
    "Checkpoint",
    "KeyMap",
    "KeyRow",
    "KeyRule",
    "LoadReport",
    "load_into",
    "read_checkpoint",
    "read_key_map",
]
