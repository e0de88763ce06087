"""Checkpoint files: read safely, and the state dict found wherever people put it.

The weights of a network have one hash, their identity, and are written as safetensors.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from ..errors import CheckpointError, NotFoundError
from ..utils.files import atomic_path
from .unpickling import first_line, load_pickled, printable

#: What wrappers (DataParallel, Lightning, torch.compile) put in front of every name.
WRAPPER_PREFIXES = ("module.", "model.", "_orig_mod.")

#: Where a file with several state dicts has the one that is meant; the first found wins, so
#: the weights as trained go before their moving average.
_USUAL_PLACES = (
    "state_dict",
    "model_state_dict",
    "model_state",
    "model",
    "net_state_dict",
    "net",
    "network",
    "module",
    "weights",
    "params",
    "ema_state_dict",
    "model_ema",
    "ema_model",
    "ema",
)
_NOT_WEIGHTS = re.compile(r"optim|(^|_)opt(_|$)|sched|scaler|callback|loops", re.IGNORECASE)
_OPTIMIZER_STATE = frozenset({"param_groups", "exp_avg", "momentum_buffer", "square_avg"})
_MAX_DEPTH = 6
_MAX_SAFETENSORS_HEADER = 100_000_000  # the format's own limit
_MAX_METADATA_TEXT = 200

Place = tuple[str, ...]
Plain = bool | int | float | str


@dataclass(frozen=True)
class Checkpoint:
    """The weights of one file, with what was done to get at them."""

    path: Path
    #: Names without the wrapper prefixes in ``stripped``.
    state_dict: dict[str, Tensor]
    #: Of the file's bytes.
    sha256: str
    #: Where in the file the state dict was: ``bare``, or its keys joined by dots.
    found_at: str
    #: Prefixes that every name carried, outermost first.
    stripped: tuple[str, ...] = ()
    #: Plain values beside the weights: epoch, scores, hyper-parameters.
    metadata: dict[str, Plain] = field(default_factory=dict)


def read_checkpoint(path: Path | str, *, trust: bool = False) -> Checkpoint:
    """Read a checkpoint (safetensors, or ``torch.save`` in zip or legacy format) onto the CPU.

    Nothing in the file is executed, unless ``trust`` is set and the file cannot be read otherwise.
    """
    path = Path(path)
    with _open(path) as file:
        # The hash and the weights come from the same open file: a training job may be replacing it.
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        content: object
        if _is_safetensors(file):
            content, beside = _read_safetensors(file, path)
        else:
            content = beside = load_pickled(file, path, trust=trust)
    place, tensors = _find_state_dict(content, path)
    state_dict, stripped = _strip_prefixes(tensors)
    return Checkpoint(
        path=path,
        state_dict=state_dict,
        sha256=sha256,
        found_at=_spell(place),
        stripped=stripped,
        metadata=dict(_metadata(beside)),
    )


def _open(path: Path) -> BufferedReader:
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            raise CheckpointError(f"{path}: a folder; expected a checkpoint file")
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{path}: not a regular file; expected a checkpoint file")
        if status.st_size == 0:
            raise CheckpointError(f"{path}: empty; expected a checkpoint file")
        return path.open("rb")
    except FileNotFoundError:
        raise NotFoundError(f"{path}: no such file; expected a checkpoint") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error


def _is_safetensors(file: BufferedReader) -> bool:
    """Whether the file starts as the format does: the length of a JSON header, then the header."""
    file.seek(0)
    head = file.read(9)
    return head[8:] == b"{" and int.from_bytes(head[:8], "little") <= _MAX_SAFETENSORS_HEADER


def _read_safetensors(file: BufferedReader, path: Path) -> tuple[dict[str, Tensor], object]:
    """Return the tensors and the metadata of a safetensors file."""
    file.seek(0)
    data = file.read()
    try:
        tensors = safetensors.torch.load(data)
    except (SafetensorError, KeyError, ValueError) as error:
        raise CheckpointError(
            f"{path}: damaged or cut short safetensors file ({first_line(error)})"
        ) from error
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return tensors, header.get("__metadata__", {})


def _find_state_dict(content: object, path: Path) -> tuple[Place, dict[str, Tensor]]:
    """Return the state dict in a file and where it was; refuse when there is none, or no one."""
    nodes = dict(_mappings(content))
    found = {place: tensors for place, node in nodes.items() if (tensors := _tensors(node))}
    usual = [place for place in found if place and all(key in _USUAL_PLACES for key in place)]
    dotted = [place for place, tensors in found.items() if any("." in key for key in tensors)]
    if usual:
        best = [min(usual, key=lambda place: [_USUAL_PLACES.index(key) for key in place])]
    elif dotted or any(map(_is_graph, nodes.values())):
        best = dotted
    else:
        best = list(found)
    if not best:
        raise CheckpointError(f"{path}: {_describe(content)}; expected the weights of a model")
    if len(best) > 1:
        several = ", ".join(f"{_spell(place)} ({len(found[place])} tensors)" for place in best)
        raise CheckpointError(
            f"{path}: holds several state dicts: {several}; "
            "expected one, or one of them under the name state_dict"
        )
    place, tensors = best[0], found[best[0]]
    empty = next((name for name, tensor in tensors.items() if tensor.is_meta), None)
    if empty is not None:
        raise CheckpointError(f"{path}: {printable(empty)} was saved without values (meta tensor)")
    return place, {name: tensor.detach() for name, tensor in tensors.items()}


def _mappings(
    node: object, place: Place = (), seen: set[int] | None = None
) -> Iterator[tuple[Place, Mapping[str, object]]]:
    """Walk the nested mappings of a file that have names for keys, optimizer state left out."""
    seen = set() if seen is None else seen
    if id(node) in seen or len(place) > _MAX_DEPTH:
        return
    seen.add(id(node))
    if isinstance(node, nn.Module):  # only in a file that was trusted
        node = node.state_dict()
    if isinstance(node, list | tuple):
        node = {str(position): value for position, value in enumerate(node)}
    elif isinstance(node, Mapping) and _OPTIMIZER_STATE.isdisjoint(node):
        if all(isinstance(key, str) for key in node):
            yield place, node
    else:
        return
    for key, value in node.items():
        if not _NOT_WEIGHTS.search(str(key)):
            yield from _mappings(value, (*place, str(key)), seen)


def _tensors(node: Mapping[str, object]) -> dict[str, Tensor]:
    """Return the tensors of a mapping if it looks like a state dict, else nothing."""
    tensors = {name: value for name, value in node.items() if isinstance(value, Tensor)}
    if 2 * len(tensors) < len(node) or _is_graph(node):
        return {}
    return tensors


def _is_graph(node: object) -> bool:
    """Whether this is the content of a graph (a model may well own a buffer of that name)."""
    if isinstance(node, Mapping):
        return "edge_index" in node and not any("." in str(key) for key in node)
    return type(node).__module__.startswith("torch_geometric.data")


def _describe(content: object) -> str:
    """Return what a file without a state dict holds."""
    parts = [content, *(content if isinstance(content, list | tuple) else ())]
    if any(_is_graph(part) for part in parts):
        return "holds graphs, a data set"
    if isinstance(content, Mapping):
        if not _OPTIMIZER_STATE.isdisjoint(content):
            return "holds the state of an optimizer"
        keys = ", ".join(printable(str(key), 40) for key in list(content)[:5])
        return f"holds no state dict (a mapping with {keys or 'nothing in it'})"
    return f"holds no state dict (a {type(content).__name__})"


def _spell(place: Place) -> str:
    return ".".join(printable(key) for key in place) or "bare"


def _strip_prefixes(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    stripped: list[str] = []
    while prefix := _shared_prefix(tensors):
        tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
        stripped.append(prefix)
    return tensors, tuple(stripped)


def _shared_prefix(names: Mapping[str, object]) -> str | None:
    for prefix in WRAPPER_PREFIXES:
        if all(name.startswith(prefix) and name != prefix for name in names):
            return prefix
    return None


def _metadata(content: object, prefix: str = "") -> Iterator[tuple[str, Plain]]:
    """Yield the plain values of the outermost mapping, and of the mappings in it."""
    if not isinstance(content, Mapping):
        return
    for key, value in content.items():
        name = prefix + printable(str(key))
        if isinstance(value, Mapping) and not prefix and not _NOT_WEIGHTS.search(name):
            yield from _metadata(value, prefix=f"{name}.")
        elif isinstance(value, float) and not math.isfinite(value):
            yield name, str(value)  # JSON has no word for it
        elif isinstance(value, Plain) and len(str(value)) <= _MAX_METADATA_TEXT:
            yield name, value


# --- the weights of a network: their hash, and the file they are saved in


def weights_sha256(state_dict: Mapping[str, Any]) -> str:
    """Return a SHA-256 over names, dtypes, shapes and bytes, in the order of the names.

    The same weights give the same hash whatever file format, device or prefix they came with.
    Extra state that is no tensor does not count; a built-in model's settings do.
    """
    digest = hashlib.sha256()
    for name, value in sorted(state_dict.items()):
        if not isinstance(value, Tensor):
            continue
        tensor = value.detach().cpu().contiguous()
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def save_weights(state_dict: Mapping[str, Any], path: Path) -> None:
    """Write parameters and buffers as a safetensors file."""
    # Cloned, because weights that are tied share memory, which the format refuses.
    weights = {
        name: value.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, value in state_dict.items()
        if isinstance(value, Tensor)
    }
    with atomic_path(path) as partial:
        # Its own writer leaves files that others cannot read.
        partial.write_bytes(safetensors.torch.save(weights))
