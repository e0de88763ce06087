"""Checkpoint files: read safely, whatever format they are in.

The format is recognised by content. ``utils/inert.py`` reads the files of torch without running
anything in them, ``state_dicts.py`` finds the weights among their contents. The weights of a
network are identified by one hash.
"""

from __future__ import annotations

import hashlib
import math
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from io import BufferedReader
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from ..errors import CheckpointError, NotFoundError, UnsafeCheckpointError
from ..utils.decoding import parse_json, read_json_file
from ..utils.inert import StandIn, read_inert
from ..utils.text import plural
from ..utils.trust import Trusted, is_trusted_checkpoint
from ..utils.trust import trust as remember_trust
from ..utils.unpickling import HARMFUL, kind_of, printable, reason, refuse, telling, unpickle
from .spec import INDEX_SUFFIX, weights_in
from .state_dicts import NOT_WEIGHTS, StateDict, choose_state_dict

_MAX_SAFETENSORS_HEADER = 100_000_000  # the format's own limit
_MAX_METADATA_TEXT = 200

Plain = bool | int | float | str


@dataclass(frozen=True)
class Checkpoint:
    """The weights of one file, and how they were found."""

    path: Path
    #: Names without the wrapper prefixes in ``stripped``.
    state_dict: dict[str, Tensor]
    #: Of the file's bytes; for several files, of their hashes.
    sha256: str
    #: Where in the file the state dict was: ``bare``, or its keys joined by dots.
    found_at: str
    #: Prefixes that every name carried, outermost first.
    stripped: tuple[str, ...] = ()
    #: Plain values beside the weights: epoch, scores, hyper-parameters.
    metadata: dict[str, Plain] = field(default_factory=dict)
    #: The other state dicts of the file, as ``--state`` takes them, and their number of tensors.
    others: dict[str, int] = field(default_factory=dict)
    #: Classes and functions that the file names; they were skipped, not looked up.
    past: tuple[str, ...] = ()

    @property
    def notes(self) -> list[str]:
        """What a user should know about how the file was read."""
        notes = []
        if self.others:
            several = ", ".join(
                f"{name} ({plural(count, 'tensor')})" for name, count in self.others.items()
            )
            notes.append(
                f"{self.path.name}: took {self.found_at!r}; it also holds {several}: choose with "
                "--state NAME"
            )
        if self.past:
            notes.append(
                f"{self.path.name}: skipped {telling(self.past)}; only the tensors were read, "
                "and no code was run"
            )
        return notes


def read_checkpoint(
    path: Path | str, *, trust: bool = False, state: str | None = None
) -> Checkpoint:
    """Read a checkpoint onto the CPU: safetensors, ``torch.save`` of any age, or a plain pickle.

    A folder as HuggingFace writes it (``config.json`` and the weights, in one file or in several)
    is one checkpoint, and so is the index of several files. Nothing in a file is executed, unless
    it is trusted and cannot be read otherwise.

    Args:
        trust: Unpickle a file that can only be read by running it. The hash of the file is
            remembered: it is trusted from then on.
        state: Which state dict of the file, or the prefix of its weights; by default the weights
            as they were trained, if they are in one of the usual places.
    """
    path = Path(path)
    is_index = path.name.endswith(INDEX_SUFFIX)
    if not path.is_dir() and not (is_index and path.is_file()):
        return _read_file(path, path, trust=trust, state=state)
    weights = path if is_index else weights_in(path)
    if weights is None:
        raise CheckpointError(
            f"{path}: a folder without weights; expected a checkpoint file, or a folder with "
            "config.json and model.safetensors"
        )
    config = weights.with_name("config.json")
    beside = read_json_file(config, error=CheckpointError) if config.is_file() else {}
    metadata = dict(_metadata(beside))
    if not weights.name.endswith(INDEX_SUFFIX):
        read = _read_file(weights, path, trust=trust, state=state)
        return replace(read, metadata={**read.metadata, **metadata})
    parts = _parts(weights)
    tensors: dict[str, Tensor] = {}
    hashes: list[str] = []
    past: list[str] = []
    for name, expected in parts.items():
        file = weights.with_name(name)
        part = _read_file(file, file, trust=trust, state=None)
        prefix = "".join(part.stripped)
        found = {prefix + key: tensor for key, tensor in part.state_dict.items()}
        lacking = [key for key in expected if key not in found]
        if lacking:
            raise CheckpointError(
                f"{file}: found no {printable(lacking[0])}, expected it by {weights.name}"
            )
        tensors |= {key: found[key] for key in expected}
        hashes.append(part.sha256)
        past += part.past
    sha256 = hashlib.sha256("".join(hashes).encode()).hexdigest()
    chosen = choose_state_dict(tensors, path, state)
    return Checkpoint(path, sha256=sha256, metadata=metadata, past=tuple(past), **vars(chosen))


def _read_file(file: Path, path: Path, *, trust: bool, state: str | None) -> Checkpoint:
    """Read one file; ``path`` is what the user named."""
    with _open(file) as opened:
        # Hash and weights come from the same open file: a training job may be replacing it.
        sha256 = hashlib.file_digest(opened, "sha256").hexdigest()
        if _is_safetensors(opened):
            tensors, beside = _read_safetensors(opened, file)
            chosen = choose_state_dict(tensors, path, state)
            return Checkpoint(path, sha256=sha256, metadata=dict(_metadata(beside)), **vars(chosen))
        try:
            content, past = _load_pickled(opened, file)
            chosen = _chosen(content, past, file, state)
        except UnsafeCheckpointError:
            if not (trust or is_trusted_checkpoint(sha256)):
                raise
            content, past = unpickle(opened, file), ()
            if trust:
                with suppress(OSError):  # the home folder is read-only: ask again next time
                    remember_trust([Trusted("checkpoint", sha256, str(file.resolve()))])
            chosen = choose_state_dict(content, file, state)
    metadata = dict(_metadata(content))
    return Checkpoint(path, sha256=sha256, metadata=metadata, past=past, **vars(chosen))


def _load_pickled(file: BufferedReader, path: Path) -> tuple[object, tuple[str, ...]]:
    """Return the content of a file, with its tensors on the CPU; nothing in it is executed.

    Also returns the names of the classes and functions that were replaced by stand-ins. ``path`` is
    for messages only.

    Raises:
        UnsafeCheckpointError: for a program, and for a file that names what can do harm.
    """
    kind = kind_of(file, path)
    if kind == "torchscript":
        refuse(
            path,
            "a TorchScript archive is a program; save its weights by themselves: "
            "torch.save(torch.jit.load(FILE).state_dict(), NEW_FILE)",
        )
    if kind == "tar":
        refuse(path, "torch's tar format of 2016 cannot be read safely")
    value, foreign = read_inert(file, path, kind)
    if any(map(HARMFUL.match, foreign)):
        refuse(path, f"it asks for {telling(foreign)}")
    return value, foreign


def _chosen(content: object, past: Sequence[str], path: Path, state: str | None) -> StateDict:
    """Return the weights of a file whose classes were skipped, if it has any."""
    try:
        return choose_state_dict(content, path, state)
    except CheckpointError as error:
        if not past or "holds no state dict" not in str(error):
            raise
        refuse(path, f"its weights are only inside objects of its own classes: {telling(past)}")


def _open(path: Path) -> BufferedReader:
    try:
        status = path.stat()
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
    """Whether the file starts with the length of a JSON header, and the header."""
    file.seek(0)
    head = file.read(9)
    return head[8:] == b"{" and int.from_bytes(head[:8], "little") <= _MAX_SAFETENSORS_HEADER


def _read_safetensors(file: BufferedReader, path: Path) -> tuple[dict[str, Tensor], object]:
    """Return the tensors and the metadata of a safetensors file."""
    file.seek(0)
    data = file.read()
    try:
        tensors = safetensors.torch.load(data)
        header = parse_json(data[8 : 8 + int.from_bytes(data[:8], "little")], "its header")
    except (SafetensorError, KeyError, ValueError) as error:
        raise CheckpointError(
            f"{path}: damaged or cut short safetensors file ({reason(error)})"
        ) from error
    return tensors, header.get("__metadata__", {})


def _parts(index: Path) -> dict[str, list[str]]:
    """Return the files that an index names, and the tensors that each should have."""
    value = read_json_file(index, error=CheckpointError)
    names = value.get("weight_map") if isinstance(value, Mapping) else None
    if not isinstance(names, Mapping) or not names:
        raise CheckpointError(f"{index}: found no weight_map, expected which file has which tensor")
    parts: dict[str, list[str]] = {}
    for tensor, file in names.items():
        if not isinstance(file, str) or Path(file).name != file or file in (".", ".."):
            raise CheckpointError(
                f"{index}: found the file {printable(str(file))!r}, expected a name without path"
            )
        parts.setdefault(file, []).append(tensor)
    return parts


def _metadata(content: object, prefix: str = "") -> Iterator[tuple[str, Plain]]:
    """Yield the plain values of the outermost mapping, and of the mappings in it."""
    if isinstance(content, StandIn):
        # Mostly the arguments of a training script; a module has no plain values of interest.
        content = {} if "_parameters" in content.parts else content.parts
    if not isinstance(content, Mapping):
        return
    for key, value in content.items():
        name = prefix + printable(str(key))
        if isinstance(value, Mapping | StandIn) and not prefix and not NOT_WEIGHTS.search(name):
            yield from _metadata(value, prefix=f"{name}.")
        elif isinstance(value, float) and not math.isfinite(value):
            yield name, str(value)  # JSON has no word for it
        elif isinstance(value, Plain) and len(str(value)) <= _MAX_METADATA_TEXT:
            yield name, value


def weights_sha256(state_dict: Mapping[str, Any]) -> str:
    """Return a SHA-256 over names, dtypes, shapes and bytes, in the order of the names.

    The same weights have the same hash, whatever their file format, device or prefix was. Extra
    state that is not a tensor is left out; a built-in model's settings are included.
    """
    digest = hashlib.sha256()
    for name, value in sorted(state_dict.items()):
        if not isinstance(value, Tensor):
            continue
        tensor = value.detach().cpu().contiguous()
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
