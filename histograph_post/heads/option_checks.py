"""Options of a readout, checked before it is built; errors of one's own readout, in one line."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, HistographError, raised_at
from ..utils.machine import machine_memory

if TYPE_CHECKING:
    from torch import nn

    from .base import Readout

#: A number from which on a head may be too large for the machine.
LARGE = 4096


def require_memory(name: str, build: Callable[[], nn.Module]) -> None:
    """Refuse a head that could not be trained on this machine, without allocating it."""
    import torch

    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in build().parameters())
    needed, there = 16 * count, machine_memory()  # weights, gradients, and two moments of Adam
    if needed > there:
        raise ConfigError(
            f"head {name!r}: found options that take {needed / 1e9:,.0f} GB to train, expected at "
            f"most the {there / 1e9:,.0f} GB of this machine; a smaller dim"
        )


#: What an annotation says, the values that fit it, and how an error calls them.
_KINDS: Mapping[str, tuple[tuple[type, ...], str]] = MappingProxyType(
    {
        "int": ((int,), "a whole number"),
        "float": ((int, float), "a number"),
        "bool": ((bool,), "true or false"),
        "str": ((str,), "a word"),
        "None": ((type(None),), "none"),
    }
)


def check_option(head: str, parameter: inspect.Parameter, value: Any) -> None:
    """Refuse a value that is not of the kind its option is annotated with, as far as that says."""
    annotation: Any = parameter.annotation
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
    kinds = [part.strip() for part in str(text).split("|")]
    if any(kind not in _KINDS for kind in kinds):
        return
    for kind in kinds:
        types, _ = _KINDS[kind]
        if isinstance(value, types) and (kind == "bool" or not isinstance(value, bool)):
            return
    several = ""
    if isinstance(value, str) and re.search(r",\s*\w+=", value):
        several = "; give --head-args once for each option"
    raise ConfigError(
        f"head {head!r}: found {parameter.name}={value!r}, expected "
        f"{' or '.join(_KINDS[kind][1] for kind in kinds)}{several}"
    )


@contextmanager
def own_code(head: type[Readout] | Readout) -> Iterator[None]:
    """Turn what goes wrong inside a readout of one's own into one line that says where.

    Errors of this package's readouts are ours, and stay as they are.
    """
    try:
        yield
    except HistographError:
        raise
    except Exception as error:
        readout = head if isinstance(head, type) else type(head)
        if (readout.__module__ or "").partition(".")[0] == __name__.partition(".")[0]:
            raise
        where = raised_at(error, inspect.getsourcefile(readout))
        if not where:
            raise
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"head {readout.__name__!r} failed at {where}: {type(error).__name__}: {reason}"
        ) from error
