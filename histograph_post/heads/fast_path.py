"""The one list of heads that the compiled loops are written for.

It names what the loops do, never what they cannot do: an option, a value, a normalisation, a module
or a subclass that is not named here takes the head's own path, which is always correct.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .histograph_config import HistoGraphConfig

if TYPE_CHECKING:
    from .histograph import HistoGraphHead

#: A map with more weights than this is left to a library of matrix products, which is made for it.
LARGEST_MAP = 3 << 16

#: The normalisations that the loops compute; the position of a name is its number in the loops.
LOOP_NORMALIZATIONS = ("bounded", "signed", "softmax", "none")

#: The loops read the value, or what reads it stands outside of them.
ANY = None

#: Every option of a head whose graphs are read in loops, with the values it may have.
READ_IN_LOOPS: Mapping[str, tuple[Any, ...] | None] = MappingProxyType(
    {
        "in_dims": ANY,  # if all are equal
        "out_dim": ANY,
        "dim": ANY,  # if it is not too large
        "heads": ANY,
        "level": ("graph",),
        "standardize": ANY,
        "history_layers": ANY,
        "layer_attention": ("learned",),
        "normalization": LOOP_NORMALIZATIONS,
        "eps": ANY,
        "radius": ANY,
        "layer_heads": ANY,
        "node_attention": (True,),
        "zero_token": (False,),
        "attention_dropout": (0,),
        "key_dropout": (0,),
        "residual": ANY,
        "layer_norm": (False,),
        "mix": ("last", "all"),
        "mixing": ANY,
        "mixing_init": ANY,
        "mixing_delay": ANY,
        "output_norm": ANY,
        "mlp_layers": ANY,
        "dropout": ANY,
        "shortcut": ANY,
    }
)

#: The same of a head that is run in loops from its weights to its outputs.
RUN_IN_LOOPS: Mapping[str, tuple[Any, ...] | None] = MappingProxyType(
    {**READ_IN_LOOPS, "mixing": ("learned", "fixed"), "dropout": (0,), "shortcut": (False,)}
)


def in_loops(head: nn.Module, allowed: Mapping[str, tuple[Any, ...] | None]) -> bool:
    """Say whether the loops are written for this head.

    Args:
        head: Any module.
        allowed: ``READ_IN_LOOPS`` or ``RUN_IN_LOOPS``.
    """
    from .histograph import HistoGraphHead

    if torch.compiler.is_compiling() or type(head) is not HistoGraphHead:
        return False
    options = head.options
    return (
        all(_allows(allowed, field.name, options) for field in fields(options))
        and len(set(options.in_dims)) == 1
        and options.dim * max(options.dim, options.in_dims[-1]) <= LARGEST_MAP
        and _parts(head) == _expected_parts(options)
    )


def _allows(
    allowed: Mapping[str, tuple[Any, ...] | None], name: str, options: HistoGraphConfig
) -> bool:
    if name not in allowed:
        return False
    values = allowed[name]
    return values is ANY or getattr(options, name) in values


def _parts(head: HistoGraphHead) -> tuple[Any, ...]:
    """Return names and types of all modules, hooks on them, names and shapes of all parameters."""
    modules = [
        (name, type(module), len(module._forward_hooks) + len(module._forward_pre_hooks))
        for name, module in head.named_modules()
        if name != "standardizer"  # rows have been through it before
    ]
    return tuple(modules), tuple((name, value.shape) for name, value in head.named_parameters())


@lru_cache(maxsize=64)
def _expected_parts(options: HistoGraphConfig) -> tuple[Any, ...]:
    from .histograph import HistoGraphHead

    with torch.device("meta"):
        return _parts(HistoGraphHead(**options.to_json()))
