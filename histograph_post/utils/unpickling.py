"""Files that ``torch.save`` or ``pickle`` wrote: which kind each is, and the tensors in it.

The kind of a file is recognised by content, never by name. ``inert.py`` follows the pickle, which
names the storages, and the storage, offset, shape and strides of each tensor. Whatever it claims,
no more is allocated than the file has bytes. A file that can only be read by running it is refused;
a user may trust it, which is remembered by its hash (``trust.py``).
"""

from __future__ import annotations

import io
import math
import mmap
import pickle
import re
import struct
import tarfile
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Literal, NoReturn

import torch
from torch import Tensor

from ..errors import CheckpointError, UnsafeCheckpointError
from .text import first_line, listed

#: The number at the start of every file ``torch.save`` wrote before the zip format (torch 1.6).
_LEGACY_MAGIC = b"l\xfc\x9cF\xf9 j\xa8P\x19"
#: Names in many files, which tell little about where one comes from.
_COMMON = ("torch.", "numpy.", "builtins.", "_codecs.")
HARMFUL = re.compile(
    r"(os|posix|nt|sys|subprocess|shutil|socket|importlib|runpy|webbrowser)\."
    r"|builtins\.(eval|exec|compile|open|__import__)$"
)

#: Kinds of files.
Kind = Literal["zip", "torchscript", "legacy", "tar", "pickle"]


def unpickle(file: BufferedReader, path: Path) -> object:
    """Unpickle a file with Python, which runs any code that its author put there."""
    kind = kind_of(file, path)
    file.seek(0)
    try:
        if kind == "pickle":
            return pickle.load(file)
        with warnings.catch_warnings():
            # Notices of torch about formats that it then reads, or refuses, anyway.
            for notice in ("Detected pickle protocol", "'torch.load' received", "`torch.jit.load`"):
                warnings.filterwarnings("ignore", message=notice)
            return torch.load(file, map_location="cpu", weights_only=False)
    except Exception as error:
        # The file's own code runs here: it may raise anything.
        raise CheckpointError(
            f"{path}: trusted, but cannot be unpickled: {type(error).__name__}: {reason(error)}"
        ) from error


def refuse(path: Path, problem: str) -> NoReturn:
    """Raise the error for a file that is not read, with how to trust it."""
    raise UnsafeCheckpointError(
        f"{path}: refused, reading it would run code: {problem}; nothing in it was executed "
        "(if you trust its author: --trust-checkpoint, trust=True in Python)"
    )


def telling(names: Sequence[str]) -> str:
    """Return the names that tell most about a file, harmful ones first."""
    return listed(
        sorted(names, key=lambda name: (not HARMFUL.match(name), name.startswith(_COMMON)))
    )


# --- text out of a file


def printable(text: str, limit: int = 200) -> str:
    """Return a text from a file so that it fits one line and cannot control a terminal."""
    safe = text if text.isprintable() else text.encode("unicode_escape").decode("ascii")
    return safe if len(safe) <= limit else f"{safe[: limit - 3]}..."


def reason(error: BaseException) -> str:
    """Return the message of an exception as one printable line."""
    return printable(first_line(error))


# --- kinds of files


def kind_of(file: BufferedReader, path: Path) -> Kind:
    """Return the kind of a checkpoint by content; refuse any other file, saying what it is."""
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
    """Describe a file that is not a checkpoint by its first bytes."""
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


def _zip_kind(file: BufferedReader, path: Path) -> Kind:
    size = file.seek(0, io.SEEK_END)
    try:
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            # torch.save never compresses, and a compressed file may expand beyond all memory.
            inflated = sum(member.file_size for member in members) > size
            # torch does not check the checksums, and can be told to write zeros for them.
            checked = not inflated and any(member.CRC for member in members)
            broken = archive.testzip() if checked else None
    except Exception as error:
        # A damaged archive can fail in any way.
        raise damaged(path, error) from error
    if inflated:
        raise CheckpointError(f"{path}: compressed zip archive; expected one that torch.save wrote")
    if broken is not None:
        raise damaged(path, ValueError(f"wrong checksum of {broken}"))
    names = [member.filename.partition("/")[2] for member in members]
    if "data.pkl" not in names:
        inside = ", ".join(printable(member.filename, 40) for member in members[:3]) or "nothing"
        raise CheckpointError(
            f"{path}: a zip archive that torch.save did not write (holds {inside}); "
            "expected a checkpoint"
        )
    return "torchscript" if "constants.pkl" in names else "zip"


def _tar_kind(file: BufferedReader, path: Path) -> Kind:
    file.seek(0)
    try:
        with tarfile.open(fileobj=file, mode="r:") as archive:
            names = archive.getnames()
    except (tarfile.TarError, ValueError, OSError) as error:
        raise damaged(path, error) from error
    if {"pickle", "storages", "tensors"} <= set(names):
        return "tar"
    inside = ", ".join(printable(name, 40) for name in names[:3]) or "nothing"
    raise CheckpointError(f"{path}: a tar archive (holds {inside}); expected a file out of it")


def damaged(path: Path, error: BaseException) -> CheckpointError:
    """Return the error for a file that is damaged, or holds what cannot be read."""
    if isinstance(error, CheckpointError):
        return CheckpointError(f"{path}: {error}")
    return CheckpointError(
        f"{path}: damaged or cut short ({reason(error)}); expected a complete checkpoint"
    )


def zip_places(file: BufferedReader, mapped: mmap.mmap) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """Return the pickle of a zip archive, and where the bytes of each storage are."""
    pickled, places = b"", {}
    with zipfile.ZipFile(file) as archive:
        for member in archive.infolist():
            name, header = member.filename.partition("/")[2], member.header_offset
            # A member follows its header: 30 bytes, then its name and an extra field, whose
            # lengths are the last four of the 30.
            name_length, extra_length = struct.unpack("<HH", mapped[header + 26 : header + 30])
            start = header + 30 + name_length + extra_length
            if member.compress_type != zipfile.ZIP_STORED or start + member.file_size > len(mapped):
                raise ValueError("a member that torch.save did not write")
            if name == "data.pkl":
                pickled = mapped[start : start + member.file_size]
            elif name == "byteorder" and mapped[start : start + member.file_size] != b"little":
                raise ValueError("written on a big-endian machine")
            elif name.startswith("data/"):
                places[name.removeprefix("data/")] = (start, member.file_size)
    return pickled, places


# --- the tensors of a pickle, rebuilt from their bytes in the file

_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
_STORAGES = {
    **{"Double": torch.float64, "Float": torch.float32, "Half": torch.float16},
    **{"BFloat16": torch.bfloat16, "Long": torch.int64, "Int": torch.int32},
    **{"Short": torch.int16, "Char": torch.int8, "Byte": torch.uint8, "Bool": torch.bool},
    **{"ComplexDouble": torch.complex128, "ComplexFloat": torch.complex64},
    "Untyped": torch.uint8,  # its bytes; the tensor says what they are
}
#: More dimensions than any tensor has.
_MAX_DIMENSIONS = 64

#: The bytes of the storages of a zip archive: from the storage's name to (start, length).
Places = Mapping[str, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Storage:
    """The numbers that tensors are views of, ``[num_elements]``."""

    values: Tensor


class Storages:
    """The storages of one file.

    Args:
        places: The storages of a zip archive; None where they follow the pickle.
    """

    def __init__(self, buffer: mmap.mmap | bytes, places: Places | None = None) -> None:
        self._buffer, self._places = buffer, places
        self._budget = len(buffer)
        self._found: dict[str, Storage] = {}

    def spend(self, num_bytes: int) -> None:
        """Refuse a file whose storages, all together, claim more than it holds."""
        self._budget -= num_bytes
        if num_bytes < 0 or self._budget < 0:
            raise ValueError("storages that claim more than the file holds")

    def get(self, kind: str, key: str, count: int, view: object = None) -> Storage:
        """Return a storage by its name, or a view of it, as in old files."""
        dtype = storage_dtype(kind)
        if dtype is None and kind.startswith("torch.Q"):
            raise CheckpointError(
                "found quantized weights, expected those from before they were quantized"
            )
        if dtype is None:
            raise ValueError(f"a storage of the unknown kind {kind[:60]}")
        if key not in self._found:
            self._found[key] = Storage(self._values(key, dtype, count))
        found = self._found[key]
        if found.values.dtype != dtype:
            raise ValueError(f"storage {key[:40]} under two kinds")
        match view:
            case None:
                return found
            case (_, int(offset), int(size)) if 0 <= offset <= offset + size <= len(found.values):
                return Storage(found.values[offset : offset + size])
        raise ValueError(f"a view of storage {key[:40]} outside of it")

    def _values(self, key: str, dtype: torch.dtype, count: int) -> Tensor:
        """Return the values of a storage, or zeros if they follow after the pickle."""
        num_bytes = count * dtype.itemsize
        self.spend(num_bytes)
        if self._places is None or not count:
            return torch.zeros(count, dtype=dtype)  # [count]
        start, length = self._places[key]
        if length < num_bytes:
            raise ValueError(f"storage {key[:40]} is cut short")
        with memoryview(self._buffer) as view:
            data = bytearray(view[start : start + num_bytes])
        return torch.frombuffer(data, dtype=dtype)  # [count]

    def fill(self, key: str, stream: io.BytesIO | mmap.mmap) -> None:
        """Read the values of a storage that follow after the pickle: their number, then bytes."""
        values = self._found[key].values  # [count]
        count, data = int.from_bytes(stream.read(8), "little"), stream.read(values.nbytes)
        if count != len(values) or len(data) != values.nbytes:
            raise ValueError(f"storage {key[:40]} is cut short")
        if data:
            values.view(torch.uint8).copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def tensor(
        self, storage: Storage, offset: object, size: object, stride: object, dtype: str = ""
    ) -> Tensor:
        """Return a tensor as a view of its storage, within its bounds."""
        values = storage.values  # [num_elements]
        if (named := named_dtype(dtype)) is not None:
            values = values.view(named)
        sizes, strides = _numbers(size), _numbers(stride)
        # A stride of 0 repeats an element any number of times.
        if math.prod(sizes) * values.itemsize > len(self._buffer):
            raise ValueError("a tensor that claims more than the file holds")
        return values.as_strided(sizes, strides, _numbers((offset,))[0])


def meta_tensor(dtype: str, size: object) -> Tensor:
    """Return a tensor that was saved without values."""
    return torch.empty(_numbers(size), dtype=named_dtype(dtype), device="meta")


def named_dtype(name: str) -> torch.dtype | None:
    """Return the type called ``torch.float32``, ..."""
    return _DTYPES.get(name.removeprefix("torch.")) if name.startswith("torch.") else None


def storage_dtype(name: str) -> torch.dtype | None:
    """Return the element type of ``torch.FloatStorage``, ``torch.cuda.FloatStorage``, ..."""
    module, _, kind = name.rpartition(".")
    if module not in ("torch", "torch.cuda", "torch.storage") or not kind.endswith("Storage"):
        return None
    return _STORAGES.get(kind.removesuffix("Storage"))


def _numbers(values: object) -> list[int]:
    if (
        not isinstance(values, list | tuple)
        or len(values) > _MAX_DIMENSIONS
        or any(not isinstance(value, int) or value < 0 for value in values)
    ):
        raise ValueError("a shape that is not a list of numbers")
    return list(values)
