"""Files that ``torch.save`` wrote, read without running anything that is in them.

The bytes decide what a file is, never its name. torch's ``weights_only`` reader is the guard; when
it refuses, the pickle is disassembled (not executed) to tell the user which classes it asks for.
"""

from __future__ import annotations

import io
import mmap
import pickle
import pickletools
import re
import tarfile
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Literal, NoReturn

import torch

from ..errors import CheckpointError, UnsafeCheckpointError

#: The number at the start of every file ``torch.save`` wrote before the zip format (torch 1.6).
_LEGACY_MAGIC = b"l\xfc\x9cF\xf9 j\xa8P\x19"
#: A legacy file begins with this many pickles: magic number, version, system, the object itself.
_LEGACY_PICKLES = 4
_NAMES_SHOWN = 4
_HARMFUL = re.compile(
    r"(os|posix|nt|sys|subprocess|shutil|socket|importlib|runpy|webbrowser)\."
    r"|builtins\.(eval|exec|compile|open|getattr|__import__)$"
)

_Kind = Literal["zip", "torchscript", "legacy", "tar", "pickle"]


def load_pickled(file: BufferedReader, path: Path, *, trust: bool = False) -> object:
    """Return the object in a ``torch.save`` file, zip or legacy, with its tensors on the CPU.

    ``path`` is for messages only. With ``trust``, a file that the safe reader refuses is
    unpickled for real, which runs whatever code its author put there.
    """
    kind = _kind_of(file, path)
    try:
        return _load_safely(file, path, kind)
    except UnsafeCheckpointError:
        if not trust:
            raise
    return _unpickle(file, path, kind)


def printable(text: str, limit: int = 200) -> str:
    """Return a name found in a file so that it fits one line and cannot steer a terminal."""
    safe = text if text.isprintable() else text.encode("unicode_escape").decode("ascii")
    return safe if len(safe) <= limit else f"{safe[: limit - 3]}..."


def first_line(error: BaseException) -> str:
    """Return the message of an exception as one printable line."""
    lines = str(error).strip().splitlines()
    return printable(lines[0]) if lines else type(error).__name__


def _load_safely(file: BufferedReader, path: Path, kind: _Kind) -> object:
    if kind == "torchscript":
        _refuse(path, "a TorchScript archive carries code")
    if kind == "tar":
        _refuse(path, "torch's tar format of 2016 cannot be read safely")
    if kind == "pickle":
        _refuse_pickle(file, path, kind, reason="a plain pickle, not written by torch.save")
    file.seek(0)
    try:
        with _torch_notices_ignored():
            return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        # torch's advice (call torch.load differently) is not for our user.
        reason = f"its pickle is beyond the safe reader ({_torch_reason(error)})"
        _refuse_pickle(file, path, kind, reason=reason)
    except Exception as error:
        # A damaged pickle can make the reader fail in any way at all.
        raise _damaged(path, error) from error


def _unpickle(file: BufferedReader, path: Path, kind: _Kind) -> object:
    file.seek(0)
    try:
        if kind == "pickle":
            return pickle.load(file)
        with _torch_notices_ignored():
            return torch.load(file, map_location="cpu", weights_only=False)
    except Exception as error:
        # The file's own code runs here: it may raise whatever it likes.
        raise CheckpointError(
            f"{path}: trusted, but cannot be unpickled: {type(error).__name__}: {first_line(error)}"
        ) from error


def _kind_of(file: BufferedReader, path: Path) -> _Kind:
    """Tell the kinds of checkpoint apart by content; anything else is named and refused."""
    file.seek(0)
    head = file.read(512)
    if head.startswith(b"PK"):
        return _zip_kind(file, path)
    if head.startswith(b"\x80"):
        return "legacy" if _LEGACY_MAGIC in head[:64] else "pickle"
    if head[257:262] == b"ustar":
        return _tar_kind(file, path)
    raise CheckpointError(f"{path}: {_describe(head)}; expected a checkpoint (.safetensors, .pt)")


def _describe(head: bytes) -> str:
    """Return what a file that is no checkpoint is, as far as its first bytes show."""
    start = head.lstrip().lower()
    if head.startswith(b"version https://git-lfs"):
        return "a git-lfs pointer, not the file itself (run `git lfs pull`)"
    if start.startswith((b"<!doctype", b"<html", b"<head", b"<?xml")):
        return "a web page, not a checkpoint (a download that went wrong?)"
    if head.startswith(b"\x89HDF"):
        return "an HDF5 file"
    if head.startswith(b"\x1f\x8b"):
        return "a gzip archive, to be unpacked first"
    try:
        text = head.decode("utf-8")
    except UnicodeDecodeError:
        return f"an unknown format (starts with {head[:8]!r})"
    return f"a text file (starts with {text[:20]!r})"


def _zip_kind(file: BufferedReader, path: Path) -> _Kind:
    size = file.seek(0, io.SEEK_END)
    try:
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            # torch.save never compresses; what does may unpack to more than the machine has.
            inflated = sum(member.file_size for member in members) > size
            # torch does not look at the checksums, and can be told to write zeros for them.
            checked = not inflated and any(member.CRC for member in members)
            damaged = archive.testzip() if checked else None
    except Exception as error:
        # There is no end to the ways in which an archive can be damaged.
        raise _damaged(path, error) from error
    if inflated:
        raise CheckpointError(f"{path}: compressed zip archive; expected one that torch.save wrote")
    if damaged is not None:
        raise _damaged(path, ValueError(f"wrong checksum of {damaged}"))
    names = [member.filename.partition("/")[2] for member in members]
    if "data.pkl" not in names:
        inside = ", ".join(printable(member.filename, 40) for member in members[:3]) or "nothing"
        raise CheckpointError(
            f"{path}: a zip archive that torch.save did not write (holds {inside}); "
            "expected a checkpoint"
        )
    return "torchscript" if "constants.pkl" in names else "zip"


def _tar_kind(file: BufferedReader, path: Path) -> _Kind:
    file.seek(0)
    try:
        with tarfile.open(fileobj=file, mode="r:") as archive:
            names = archive.getnames()
    except (tarfile.TarError, ValueError, OSError) as error:
        raise _damaged(path, error) from error
    if {"pickle", "storages", "tensors"} <= set(names):
        return "tar"
    inside = ", ".join(printable(name, 40) for name in names[:3]) or "nothing"
    raise CheckpointError(f"{path}: a tar archive (holds {inside}); expected a file out of it")


def _damaged(path: Path, error: BaseException) -> CheckpointError:
    return CheckpointError(
        f"{path}: damaged or cut short ({first_line(error)}); expected a complete checkpoint"
    )


def _refuse_pickle(file: BufferedReader, path: Path, kind: _Kind, *, reason: str) -> NoReturn:
    """Raise the error that names what the pickle would import."""
    try:
        names = _unsafe(dict.fromkeys(_globals(file, kind)))
    except Exception as error:
        # Not a pickle from end to end: whatever it is, nobody can read it.
        raise _damaged(path, error) from error
    if names and all(name.startswith("torch_geometric.data") for name in names):
        raise CheckpointError(
            f"{path}: holds graphs ({names[0]}), a data set; expected the weights of a model"
        )
    if not names:
        _refuse(path, reason)
    # Only the first few are shown: what can do harm, then what shows where the file comes from.
    names.sort(key=lambda name: (not _HARMFUL.match(name), name.startswith(("torch.", "numpy."))))
    shown = ", ".join(names[:_NAMES_SHOWN])
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    _refuse(path, f"it asks for {shown}{more}")


def _refuse(path: Path, reason: str) -> NoReturn:
    raise UnsafeCheckpointError(
        f"{path}: refused, reading it would run code: {reason}; nothing in it was executed "
        "(if you trust its author: --trust-checkpoint, trust=True in Python)"
    )


def _torch_reason(error: pickle.UnpicklingError) -> str:
    """Return the one line of torch's message that is about the file."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    about = [line for line in lines if not line.startswith(("Weights only", "Please", "Check"))]
    return printable(about[0]) if about else "refused by torch"


def _globals(file: BufferedReader, kind: _Kind) -> Iterator[str]:
    """Yield ``module.name`` of everything the pickles of a file would import, in order."""
    if kind == "zip":
        with zipfile.ZipFile(file) as archive:
            for name in archive.namelist():
                if name.partition("/")[2] == "data.pkl":
                    yield from _globals_of(io.BytesIO(archive.read(name)))
        return
    # Reading through a map never allocates more than the file holds, whatever its length fields.
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        for _ in range(_LEGACY_PICKLES if kind == "legacy" else 1):
            yield from _globals_of(mapped)


def _globals_of(stream: io.BytesIO | mmap.mmap) -> Iterator[str]:
    pushed: list[str | None] = []  # what the instructions put on the stack, None = no string
    memo: dict[int, str | None] = {}
    for opcode, argument, _ in pickletools.genops(stream):  # type: ignore[arg-type]
        if opcode.name in ("GLOBAL", "INST"):
            yield str(argument).replace(" ", ".", 1)
            pushed.append(None)
        elif opcode.name == "STACK_GLOBAL":
            # A name put together at run time cannot be known without running it.
            yield ".".join(part or "(computed)" for part in pushed[-2:])
            pushed.append(None)
        elif opcode.name == "MEMOIZE":
            memo[len(memo)] = pushed[-1] if pushed else None
        elif opcode.name in ("PUT", "BINPUT", "LONG_BINPUT"):
            memo[int(str(argument))] = pushed[-1] if pushed else None
        elif opcode.name in ("GET", "BINGET", "LONG_BINGET"):
            pushed.append(memo.get(int(str(argument))))
        else:
            pushed.append(argument if isinstance(argument, str) else None)


def _unsafe(names: dict[str, None]) -> list[str]:
    """Return those of the names that torch does not allow, made printable.

    torch's list of what it allows is not public, but it judges any zip checkpoint: hand it one
    that consists of the names alone.
    """
    askable = {name: name.rpartition(".") for name in names if name.isprintable() and "." in name}
    imports = "".join(f"c{module}\n{name}\n" for module, _, name in askable.values())
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("names/data.pkl", imports.encode() + pickle.STOP)
        archive.writestr("names/version", "3\n")
    buffer.seek(0)
    refused = set(torch.serialization.get_unsafe_globals_in_checkpoint(buffer))
    # torch converts names of Python 2 to their present form, which is then not among ours.
    found = [name for name in names if name not in askable or name in refused]
    return [printable(name) for name in [*found, *sorted(refused.difference(names))]]


@contextmanager
def _torch_notices_ignored() -> Iterator[None]:
    """Silence the warnings of torch about formats that it then reads, or refuses, anyway."""
    with warnings.catch_warnings():
        for message in ("Detected pickle protocol", "'torch.load' received", "`torch.jit.load`"):
            warnings.filterwarnings("ignore", message=message)
        yield
