"""Files that ``torch.save`` or ``pickle`` wrote, read without running anything that is in them.

The bytes decide what a file is, never its name. ``inert.py`` follows the pickle; a file that asks
for what can do harm is refused, and so is one that cannot be read but by running it. A user may
trust such a file, which is remembered by its hash (``utils/trust.py``).
"""

from __future__ import annotations

import io
import mmap
import pickle
import re
import tarfile
import warnings
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Literal, NoReturn

import torch

from ..errors import CheckpointError, UnsafeCheckpointError
from ..utils.text import listed
from .inert import InertReader

#: The number at the start of every file ``torch.save`` wrote before the zip format (torch 1.6).
_LEGACY_MAGIC = b"l\xfc\x9cF\xf9 j\xa8P\x19"
#: What stands in many files and says little of where one comes from.
_COMMON = ("torch.", "numpy.", "builtins.", "_codecs.")
_HARMFUL = re.compile(
    r"(os|posix|nt|sys|subprocess|shutil|socket|importlib|runpy|webbrowser)\."
    r"|builtins\.(eval|exec|compile|open|__import__)$"
)

_Kind = Literal["zip", "torchscript", "legacy", "tar", "pickle"]


@dataclass(frozen=True)
class Pickled:
    """The content of a file, classes of others replaced by stand-ins."""

    value: object
    #: The names of the classes and functions that were read past.
    past: tuple[str, ...] = ()


def load_pickled(file: BufferedReader, path: Path) -> Pickled:
    """Return the content of a file, with its tensors on the CPU; nothing in it is executed.

    ``path`` is for messages only.

    Raises:
        UnsafeCheckpointError: for a program, and for a file that asks for what can do harm.
    """
    kind = _kind_of(file, path)
    if kind == "torchscript":
        refuse(
            path,
            "a TorchScript archive is a program; save its weights by themselves: "
            "torch.save(torch.jit.load(FILE).state_dict(), NEW_FILE)",
        )
    if kind == "tar":
        refuse(path, "torch's tar format of 2016 cannot be read safely")
    try:
        # Reading through a map never allocates more than the file holds, whatever it claims.
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            if kind == "zip":
                pickled, places = _zip_places(file, mapped)
                reader = InertReader(mapped, places)
                value = reader.read(io.BytesIO(pickled))
            else:
                reader = InertReader(mapped)
                value = reader.read_legacy(mapped) if kind == "legacy" else reader.read(mapped)
    except Exception as error:
        # A damaged pickle can make the reader fail in any way at all.
        raise _damaged(path, error) from error
    foreign = tuple(map(printable, reader.foreign_names()))
    if any(map(_HARMFUL.match, foreign)):
        refuse(path, f"it asks for {telling(foreign)}")
    return Pickled(value, foreign)


def unpickle(file: BufferedReader, path: Path) -> object:
    """Unpickle a file for real, which runs whatever code its author put there."""
    kind = _kind_of(file, path)
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


def refuse(path: Path, reason: str) -> NoReturn:
    """Raise the error for a file that is not read, and say how to trust it."""
    raise UnsafeCheckpointError(
        f"{path}: refused, reading it would run code: {reason}; nothing in it was executed "
        "(if you trust its author: --trust-checkpoint, trust=True in Python)"
    )


def telling(names: Sequence[str]) -> str:
    """Return the names that say most of a file: what can do harm, then where it comes from."""
    ranked = sorted(
        names,
        key=lambda name: (not _HARMFUL.match(name), name.startswith(_COMMON)),
    )
    return listed(ranked)


# --- text out of a file


def printable(text: str, limit: int = 200) -> str:
    """Return a name found in a file so that it fits one line and cannot steer a terminal."""
    safe = text if text.isprintable() else text.encode("unicode_escape").decode("ascii")
    return safe if len(safe) <= limit else f"{safe[: limit - 3]}..."


def first_line(error: BaseException) -> str:
    """Return the message of an exception as one printable line."""
    lines = str(error).strip().splitlines()
    return printable(lines[0]) if lines else type(error).__name__


# --- what a file is


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


def _zip_places(
    file: BufferedReader, mapped: mmap.mmap
) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """Return the pickle of a zip archive, and where the bytes of each storage are."""
    pickled, places = b"", {}
    with zipfile.ZipFile(file) as archive:
        for member in archive.infolist():
            name, header = member.filename.partition("/")[2], member.header_offset
            # A member is behind its header: 30 bytes, its name, and more of a length given there.
            lengths = mapped[header + 26 : header + 30]
            start = (
                header + 30 + sum(int.from_bytes(lengths[at : at + 2], "little") for at in (0, 2))
            )
            if member.compress_type != zipfile.ZIP_STORED or start + member.file_size > len(mapped):
                raise ValueError("a member that torch.save did not write")
            if name == "data.pkl":
                pickled = mapped[start : start + member.file_size]
            elif name == "byteorder" and mapped[start : start + member.file_size] != b"little":
                raise ValueError("written on a big-endian machine")
            elif name.startswith("data/"):
                places[name.removeprefix("data/")] = (start, member.file_size)
    return pickled, places


@contextmanager
def _torch_notices_ignored() -> Iterator[None]:
    """Silence the warnings of torch about formats that it then reads, or refuses, anyway."""
    with warnings.catch_warnings():
        for message in ("Detected pickle protocol", "'torch.load' received", "`torch.jit.load`"):
            warnings.filterwarnings("ignore", message=message)
        yield
