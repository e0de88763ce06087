"""The one list of heads that the compiled loops are written for.

It names what the loops do, never what they cannot do: an option, a value, a normalisation, a module
or a subclass that is not named here takes the head's own path, which is always correct.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .histograph_config import HistoGraphConfig
from .layer_weights import LayerWeights
from .mixing import Mixing
from .node_attention import NodeAttention

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


def _parts(head: HistoGraphHead) -> list[tuple[Any, ...]]:
    """Return name and type of every module, and names and shapes of its own parameters."""
    return [
        (
            name,
            type(module),
            _shapes(module),
            bool(module._forward_hooks or module._forward_pre_hooks),
        )
        for name, module in head.named_modules()
        if name != "standardizer"  # rows have been through it before
    ]


def _shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in module.named_parameters(recurse=False)}


def _is_hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _expected_parts(options: HistoGraphConfig) -> list[tuple[Any, ...]]:
    """Return what the loops take for granted of a head, written out: see :func:`_parts`."""
    from .histograph import HistoGraphHead

    dim, width, out_dim = options.dim, options.in_dims[-1], options.out_dim
    parts: list[tuple[Any, ...]] = []

    def add(name: str, kind: type[nn.Module], **shapes: tuple[int, ...]) -> None:
        parts.append((name, kind, shapes, False))

    def add_linear(name: str, rows: int, columns: int) -> None:
        add(name, nn.Linear, weight=(rows, columns), bias=(rows,))

    add("", HistoGraphHead)
    add("layer_weights", LayerWeights, query=(dim, dim), key=(dim, dim))
    add("layer_weights.embeddings", nn.ModuleList)
    add_linear("layer_weights.embeddings.0", dim, width)
    add("node_attention", NodeAttention)
    add_linear("node_attention.in_projection", 3 * dim, dim)
    add_linear("node_attention.out_projection", dim, dim)
    if options.mix == "all":
        add_linear("all_layers", dim, len(options.kept_dims) * width)
    add("mixing", Mixing, **({} if options.mixing == "fixed" else {"logit": ()}))
    if options.output_norm:
        add("output_norm", nn.LayerNorm, weight=(dim,), bias=(dim,))
    add("mlp", nn.Sequential)
    for layer in range(options.mlp_layers):
        add_linear(f"mlp.{3 * layer}", dim, dim)
        add(f"mlp.{3 * layer + 1}", nn.ReLU)
        add(f"mlp.{3 * layer + 2}", nn.Dropout)
    add_linear("output", out_dim, dim)
    if options.shortcut:
        add_linear("shortcut", out_dim, width)
    return parts
