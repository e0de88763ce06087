"""Finding the state dict in the contents of a file, wherever it is.

A file may have the weights as trained and their moving average (EMA, SWA), or several networks:
the weights as trained are taken if they are in one of the usual places, any others by name
(``--state``). An object of an unknown class is searched like a dict, and of a whole pickled module
the parameters and buffers are taken, without its code.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..errors import CheckpointError
from ..utils.inert import StandIn
from ..utils.text import plural
from ..utils.unpickling import printable

#: Prefixes that wrappers (DataParallel, Lightning, torch.compile) add to every name.
WRAPPER_PREFIXES = ("module.", "model.", "_orig_mod.")

#: Usual keys of the state dict in a file with several; the first one found is taken, so the
#: weights as trained go before their moving average.
_USUAL_PLACES = (
    *("state_dict", "model_state_dict", "model_state", "model", "net_state_dict", "net"),
    *("network", "module", "weights", "params"),
    *("ema_state_dict", "state_dict_ema", "model_ema", "ema_model", "ema"),
    *("swa_state_dict", "swa_model", "swa"),
)
#: Names of weights that are an average over training, or follow those that are trained.
AVERAGED = re.compile(r"(^|[._])(ema|swa|avg|averaged?|shadow|teacher|target|momentum)([._]|$)")
#: Keys beside the weights that hold none.
NOT_WEIGHTS = re.compile(
    r"optim|(^|_)opt(_|$)|sched|scaler|callback|loops|best_k_models", re.IGNORECASE
)
#: Lightning keeps averaged weights there; they are taken only on request.
_ON_REQUEST = re.compile(r"callback", re.IGNORECASE)
_OPTIMIZER_STATE = frozenset({"param_groups", "exp_avg", "momentum_buffer", "square_avg"})
#: The counter beside the weights of torch's AveragedModel.
_AVERAGES_COUNTED = "n_averaged"
_MAX_DEPTH = 6
_MAX_MODULE_DEPTH = 50
#: Parts of a pickled module, at most: if they are shared, there can be any number of names.
_MAX_PARTS = 100_000

Place = tuple[str, ...]


@dataclass(frozen=True)
class StateDict:
    """The state dict that was chosen."""

    #: ``bare``, or the keys that lead to it, joined by dots.
    found_at: str
    #: Names without the prefixes in ``stripped``.
    state_dict: dict[str, Tensor]
    #: Prefixes that every name carried, outermost first.
    stripped: tuple[str, ...] = ()
    #: The other state dicts of the file, as ``--state`` takes them, and their number of tensors.
    others: dict[str, int] = field(default_factory=dict)


def choose_state_dict(content: object, path: Path, state: str | None = None) -> StateDict:
    """Return the state dict of a file; refuse a file without one, or without a single best one.

    Args:
        state: The place of the state dict, or the prefix of its names; None for the usual one.
    """
    try:
        nodes = dict(_mappings(content))
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from None
    found = {place: tensors for place, node in nodes.items() if (tensors := _tensors(node))}
    if state is None:
        place, tensors = _usual(found, nodes, content, path)
        chosen = _spell(place)
    else:
        chosen, tensors = _named(found, state, path)
    empty = next((name for name, tensor in tensors.items() if tensor.is_meta), None)
    if empty is not None:
        raise CheckpointError(f"{path}: {printable(empty)} was saved without values (meta tensor)")
    bare, stripped = _strip_prefixes({name: value.detach() for name, value in tensors.items()})
    others = {
        _spell(place): len(value)
        for place, value in found.items()
        if any("." in name for name in value) or AVERAGED.search(_spell(place))
    }
    others |= {name: count for name, count in _averaged_parts(tensors).items() if state is None}
    others.pop(chosen, None)
    return StateDict(chosen, bare, stripped, others)


def _usual(
    found: Mapping[Place, dict[str, Tensor]],
    nodes: Mapping[Place, Mapping[str, object]],
    content: object,
    path: Path,
) -> tuple[Place, dict[str, Tensor]]:
    """Return the state dict in the usual place, or the only one."""
    offered = {
        place: tensors
        for place, tensors in found.items()
        if not any(map(_ON_REQUEST.search, place))
    }
    usual = [place for place in offered if place and all(key in _USUAL_PLACES for key in place)]
    dotted = [place for place, tensors in offered.items() if any("." in key for key in tensors)]
    if usual:
        best = [min(usual, key=lambda place: [_USUAL_PLACES.index(key) for key in place])]
    elif dotted or any(map(_is_graph, nodes.values())):
        best = dotted
    else:
        best = list(offered)
    if len(best) > 1:
        best = [place for place in best if not AVERAGED.search(_spell(place))] or best
    if not best:
        raise CheckpointError(f"{path}: {_describe(content)}; expected the weights of a model")
    if len(best) > 1:
        raise CheckpointError(
            f"{path}: holds several state dicts: {_counts(found)}; "
            f"choose one, as in --state {_spell(best[0])}"
        )
    return best[0], found[best[0]]


def _named(
    found: Mapping[Place, dict[str, Tensor]], state: str, path: Path
) -> tuple[str, dict[str, Tensor]]:
    """Return the state dict that the user chose: by its place, or by the prefix of its names."""
    for place, tensors in found.items():
        if _spell(place) == state or (place and place[-1] == state):
            return _spell(place), tensors
    prefix = f"{state.removesuffix('.')}."
    for tensors in found.values():
        inner = {
            name.removeprefix(prefix): value
            for name, value in tensors.items()
            if name.startswith(prefix)
        }
        if inner:
            return state, inner
    raise CheckpointError(
        f"{path}: --state {printable(state)}: found no such state dict, expected one of "
        f"{_counts(found) or 'none'}, or what the names of its weights begin with"
    )


def _counts(found: Mapping[Place, dict[str, Tensor]]) -> str:
    several = [
        f"{_spell(place)} ({plural(len(tensors), 'tensor')})" for place, tensors in found.items()
    ]
    return ", ".join(several)


def _averaged_parts(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the parts of a state dict that are averages of others, by prefix."""
    parts: dict[str, int] = {}
    for name in tensors:
        first = name.partition(".")[0]
        if AVERAGED.search(first) and first != name:
            parts[first] = parts.get(first, 0) + 1
    return parts if any(not AVERAGED.search(name.partition(".")[0]) for name in tensors) else {}


def _mappings(
    node: object, place: Place = (), seen: set[int] | None = None
) -> Iterator[tuple[Place, Mapping[str, object]]]:
    """Walk the nested mappings of a file that have texts as keys, without optimizer states."""
    seen = set() if seen is None else seen
    if id(node) in seen or len(place) > _MAX_DEPTH:
        return
    seen.add(id(node))
    node = _opened(node)
    if isinstance(node, list | tuple):
        node = {str(position): value for position, value in enumerate(node)}
    elif isinstance(node, Mapping) and _OPTIMIZER_STATE.isdisjoint(node):
        if all(isinstance(key, str) for key in node):
            yield place, node
    else:
        return
    for key, value in node.items():
        if not NOT_WEIGHTS.search(str(key)) or _ON_REQUEST.search(str(key)):
            yield from _mappings(value, (*place, str(key)), seen)


def _opened(node: object) -> object:
    """Return the contents of an object: the weights of a module, else its attributes."""
    if isinstance(node, nn.Module):  # only in a file that was trusted
        return node.state_dict()
    if not isinstance(node, StandIn) or _is_graph(node):
        return node
    if {"_parameters", "_modules"} <= node.parts.keys():
        return dict(_module_tensors(node))
    return node.parts or node.members


def _module_tensors(module: StandIn) -> dict[str, Tensor]:
    """Return the parameters and buffers of a pickled module by name, as its class would."""
    tensors: dict[str, Tensor] = {}
    waiting: list[tuple[str, Any, int]] = [("", module, 0)]
    visited = 0
    while waiting:
        prefix, node, depth = waiting.pop()
        visited += 1
        parts = node.parts if isinstance(node, StandIn) else {}
        passing = parts.get("_non_persistent_buffers_set")
        members = list(passing.members) if isinstance(passing, StandIn) else []
        if isinstance(passing, StandIn) and passing.args:  # set([...]) in files of protocol 2
            members += passing.args[0] if isinstance(passing.args[0], list) else []
        skipped = {name for name in members if isinstance(name, str)}
        for kind in ("_parameters", "_buffers"):
            for name, value in _entries(parts.get(kind)):
                if isinstance(value, Tensor) and not (kind == "_buffers" and name in skipped):
                    tensors[prefix + name] = value
        inner = [
            (f"{prefix}{name}.", value, depth + 1)
            for name, value in _entries(parts.get("_modules"))
        ]
        waiting += reversed(inner)  # in the order of their definition
        if depth > _MAX_MODULE_DEPTH or len(tensors) + len(waiting) + visited > _MAX_PARTS:
            raise ValueError("found a pickled module with more parts than a model has")
    return tensors


def _entries(node: object) -> list[tuple[str, object]]:
    if isinstance(node, StandIn):
        node = node.parts
    if not isinstance(node, Mapping):
        return []
    return [(key, value) for key, value in node.items() if isinstance(key, str)]


def _tensors(node: Mapping[str, object]) -> dict[str, Tensor]:
    """Return the tensors of a mapping if it looks like a state dict, else nothing."""
    tensors = {name: value for name, value in node.items() if isinstance(value, Tensor)}
    if 2 * len(tensors) < len(node) or _is_graph(node):
        return {}
    return tensors


def _is_graph(node: object) -> bool:
    """Whether this is the content of a graph (a model may have a buffer of that name, too)."""
    if isinstance(node, Mapping):
        return "edge_index" in node and not any("." in str(key) for key in node)
    name = node.name if isinstance(node, StandIn) else type(node).__module__
    return name.startswith("torch_geometric.data")


def _describe(content: object) -> str:
    """Describe the content of a file without a state dict."""
    parts = [content, *(content if isinstance(content, list | tuple) else ())]
    if any(_is_graph(part) for part in parts):
        return "holds graphs, a data set"
    if isinstance(content, Mapping):
        if not _OPTIMIZER_STATE.isdisjoint(content):
            return "holds the state of an optimizer"
        keys = ", ".join(printable(str(key), 40) for key in list(content)[:5])
        return f"holds no state dict (a mapping with {keys or 'nothing in it'})"
    if isinstance(content, StandIn):
        return f"holds no state dict (an object of {printable(content.name)})"
    return f"holds no state dict (a {type(content).__name__})"


def _spell(place: Place) -> str:
    return ".".join(printable(key) for key in place) or "bare"


def _strip_prefixes(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    others = {name: value for name, value in tensors.items() if name != _AVERAGES_COUNTED}
    if len(others) < len(tensors) and all(name.startswith("module.") for name in others):
        tensors = others  # torch's AveragedModel: its counter is not a weight
    stripped: list[str] = []
    while prefix := _shared_prefix(tensors):
        tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
        stripped.append(prefix)
    return tensors, tuple(stripped)


def _shared_prefix(names: Mapping[str, object]) -> str | None:
    for prefix in WRAPPER_PREFIXES:
        if names and all(name.startswith(prefix) and name != prefix for name in names):
            return prefix
    return None
