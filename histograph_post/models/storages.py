"""The tensors of a pickle, rebuilt from their bytes in the file.

A pickle of torch names the storages that hold the numbers, and of each tensor its storage, offset,
shape and strides. Whatever they claim, no more is allocated than the file has bytes.
"""

from __future__ import annotations

import io
import math
import mmap
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

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

#: Where the bytes of the storages of a zip archive are: the storage's name to (start, length).
Places = Mapping[str, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Storage:
    """The numbers that tensors are views of, ``[num_elements]``."""

    values: Tensor


class Storages:
    """The storages of one file.

    Args:
        buffer: The bytes of the file.
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
        """Return a storage by its name, or the part of it that an old file calls a view."""
        dtype = storage_dtype(kind)
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
        """Return the numbers of a storage, or room for them if they come after the pickle."""
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
        """Read the numbers of a storage that come after the pickle: how many, then their bytes."""
        values = self._found[key].values  # [count]
        count, data = int.from_bytes(stream.read(8), "little"), stream.read(values.nbytes)
        if count != len(values) or len(data) != values.nbytes:
            raise ValueError(f"storage {key[:40]} is cut short")
        if data:
            values.view(torch.uint8).copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def tensor(
        self, storage: Storage, offset: object, size: object, stride: object, dtype: str = ""
    ) -> Tensor:
        """Return a tensor as a view of its storage; it cannot reach outside."""
        values = storage.values  # [num_elements]
        if (named := named_dtype(dtype)) is not None:
            values = values.view(named)
        sizes, strides = _numbers(size), _numbers(stride)
        # A stride of 0 repeats an element as often as a file likes.
        if math.prod(sizes) * values.itemsize > len(self._buffer):
            raise ValueError("a tensor that claims more than the file holds")
        return values.as_strided(sizes, strides, _numbers((offset,))[0])


def meta_tensor(dtype: str, size: object) -> Tensor:
    """Return a tensor that was saved without its numbers."""
    return torch.empty(_numbers(size), dtype=named_dtype(dtype), device="meta")


def named_dtype(name: str) -> torch.dtype | None:
    """Return the type that ``torch.float32``, ... stands for."""
    return _DTYPES.get(name.removeprefix("torch.")) if name.startswith("torch.") else None


def storage_dtype(name: str) -> torch.dtype | None:
    """Return what a storage of ``torch.FloatStorage``, ``torch.cuda.FloatStorage``, ... holds."""
    module, _, kind = name.rpartition(".")
    if module not in ("torch", "torch.cuda", "torch.storage") or not kind.endswith("Storage"):
        return None
    return _STORAGES.get(kind.removesuffix("Storage"))


def _numbers(values: object) -> list[int]:
    if not isinstance(values, list | tuple) or len(values) > _MAX_DIMENSIONS:
        raise ValueError("a shape that is no list of numbers")
    if any(not isinstance(value, int) or value < 0 for value in values):
        raise ValueError("a shape that is no list of numbers")
    return list(values)
