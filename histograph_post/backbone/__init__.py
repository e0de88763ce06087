"""Backbones: from a specification to a module, and how to call any module with a batch.

building           file.py:Name, package.module:Name or a built-in name -> nn.Module
builtin_models     gcn, gin, gat, sage and gps, in one class
builtin_settings   what a built-in model is made of, and how a checkpoint tells
user_modules       importing a user's file without leaving traces
model_call         calling a model by its signature, finding its prediction
"""

from __future__ import annotations

from .building import BUILT_IN, build_model, parse_args
from .model_call import call_model, prediction

__all__ = ["BUILT_IN", "build_model", "call_model", "parse_args", "prediction"]
