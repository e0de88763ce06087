"""Reading a pickle as data: no name in it is imported, nothing in it is called.

``pickletools`` decodes the instructions, and those that build values are followed here. A class or
function that the file names is a :class:`Global`, and the object it would have built a
:class:`StandIn` with its parts. Only tensors are rebuilt, from their bytes in the file. (The safe
reader of torch refuses a file for any class beside the weights, and a key of a million nested
tuples crashes its process.)
"""

from __future__ import annotations

import io
import mmap
import pickletools
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import Any

from ..errors import UnsafeCheckpointError
from .files import open_regular, real_path
from .unpickling import (
    Kind,
    Places,
    Storage,
    Storages,
    damaged,
    kind_of,
    meta_tensor,
    named_dtype,
    printable,
    storage_dtype,
    telling,
    zip_places,
)

#: Instructions of one file, at most; each builds at most one small object. The weights are not
#: among them, so no checkpoint needs more, and none needs more than two per byte. Only a list of
#: many graphs does, and each of its tensors takes hundreds of bytes.
_MAX_STEPS = 10_000_000
_MOST_STEPS_PER_BYTE = 1 / 4
#: How deep files may be nested in pickled storages: pickled tensors need one level.
_MAX_NESTED = 2
_MAX_NAME = 1000

_RENAMED = {"__builtin__": "builtins", "copy_reg": "copyreg", "__torch__": "torch"}

#: Names in ordinary files of weights, besides those that are rebuilt here.
_ORDINARY = {"torch.device", "torch.Size", "torch.nn.parameter.Parameter", "torch.Tensor"}


@dataclass(frozen=True, slots=True)
class Global:
    """A name that the pickle would import: a class, a function or a constant."""

    name: str


@dataclass(eq=False, slots=True)
class StandIn:
    """The parts of an object whose class is unknown and not run."""

    name: str
    args: tuple[Any, ...] = ()
    #: Its attributes, and its items if it is a kind of dict.
    parts: dict[Any, Any] = field(default_factory=dict)
    #: Its members if it is a kind of list or set.
    members: list[Any] = field(default_factory=list)


class _Mark:
    """Where the arguments of a later instruction begin."""


_MARK = _Mark()


def read_plain(path: Path, *, allowed: Collection[str] = ()) -> object:
    """Return what ``torch.save`` wrote, if that is tensors and plain values; nothing in it is run.

    Args:
        allowed: Classes that may be in it as well; their objects are stand-ins.

    Raises:
        UnsafeCheckpointError: for anything else.
        CheckpointError: for a damaged file.
    """
    with (
        open_regular(real_path(path)) as raw,
        open(raw.fileno(), "rb", closefd=False) as file,
    ):
        value, foreign = read_inert(file, path, kind_of(file, path))
    if foreign := tuple(name for name in foreign if name not in allowed):
        raise UnsafeCheckpointError(
            f"{path}: refused, it asks for {telling(foreign)}; nothing in it has been executed"
        )
    return value


def read_inert(file: BufferedReader, path: Path, kind: Kind) -> tuple[object, tuple[str, ...]]:
    """Return the value of a file with its tensors on the CPU, and the names it would import.

    Args:
        path: For messages.
        kind: A TorchScript archive and a tar file have no such value.
    """
    try:
        # Reading through a map never allocates more than the size of the file, whatever it claims.
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            if kind in ("zip", "torchscript"):
                pickled, places = zip_places(file, mapped)
                reader = InertReader(mapped, places)
                value = reader.read(io.BytesIO(pickled))
            else:
                reader = InertReader(mapped)
                value = reader.read_legacy(mapped) if kind == "legacy" else reader.read(mapped)
    except Exception as error:
        # A damaged pickle can make the reader fail in any way.
        raise damaged(path, error) from error
    return value, tuple(map(printable, reader.foreign_names()))


class InertReader:
    """Reads the pickles of one file.

    Args:
        buffer: The bytes of the file; tensors never take more memory than it.
        places: The storages of a zip archive; None where they follow the pickle.
    """

    def __init__(self, buffer: mmap.mmap | bytes, places: Places | None = None, *, nested: int = 0):
        self._storages, self._nested = Storages(buffer, places), nested
        size = len(buffer)
        self._steps = min(max(_MAX_STEPS, round(_MOST_STEPS_PER_BYTE * size)), 2 * size)
        #: Every name that the pickles would import, in order.
        self.names: dict[str, None] = {}

    def foreign_names(self) -> list[str]:
        """Return the names that are not those of tensors and plain containers."""
        known = {*_REBUILD, *_ORDINARY}
        return [
            name
            for name in self.names
            if name not in known and named_dtype(name) is None and storage_dtype(name) is None
        ]

    def read(self, stream: io.BytesIO | mmap.mmap) -> object:
        """Return the value of the pickle at the position of the stream."""
        stack: list[Any] = []
        memo: dict[int, Any] = {}
        for opcode, argument, _ in pickletools.genops(stream):  # type: ignore[arg-type]
            self._spend(1)
            name = opcode.name
            if name in _PUT:
                memo[int(argument or 0)] = stack[-1]
            elif name in _GET:
                stack.append(memo[int(argument or 0)])
            elif name == "MEMOIZE":
                memo[len(memo)] = stack[-1]
            elif name == "LONG4":  # of more than 255 bytes: Python writes no such number as text
                stack.append(StandIn("(number)"))
            elif name in _VALUES:
                stack.append(argument)
            elif name not in _IGNORED:
                self._step(name, argument, stack)
        (value,) = stack
        return value

    def read_legacy(self, stream: io.BytesIO | mmap.mmap) -> object:
        """Return the value of a file from before torch 1.6: pickles, then storages one by one."""
        for _ in range(2):  # the magic number and the version
            self.read(stream)
        system = self.read(stream)
        if isinstance(system, dict) and system.get("little_endian") is False:
            raise ValueError("written on a big-endian machine")
        value, keys = self.read(stream), self.read(stream)
        for key in keys if isinstance(keys, list) else ():
            self._storages.fill(str(key), stream)
        return value

    def _spend(self, steps: int) -> None:
        self._steps -= steps
        if self._steps < 0:
            raise ValueError("a pickle of more steps than a checkpoint has")

    def _step(self, name: str, argument: Any, stack: list[Any]) -> None:
        """Follow one instruction that does more than push a plain value."""
        match name:
            case "MARK":
                stack.append(_MARK)
            case "NONE" | "NEWTRUE" | "NEWFALSE":
                stack.append({"NONE": None, "NEWTRUE": True, "NEWFALSE": False}[name])
            case "EMPTY_DICT":
                stack.append({})
            case "EMPTY_LIST":
                stack.append([])
            case "EMPTY_TUPLE":
                stack.append(())
            case "EMPTY_SET":
                stack.append(StandIn("builtins.set"))
            case "TUPLE":
                stack.append(tuple(_to_mark(stack)))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                stack.append(tuple(_take(stack, int(name[-1]))))
            case "LIST":
                stack.append(_to_mark(stack))
            case "FROZENSET":
                stack.append(StandIn("builtins.frozenset", members=_to_mark(stack)))
            case "DICT":
                made: dict[Any, Any] = {}
                _set_items(made, _to_mark(stack))
                stack.append(made)
            case "SETITEM":
                pair = _take(stack, 2)
                _set_items(stack[-1], pair)
            case "SETITEMS":
                pairs = _to_mark(stack)
                _set_items(stack[-1], pairs)
            case "APPEND":
                one = _take(stack, 1)
                _extend(stack[-1], one)
            case "APPENDS" | "ADDITEMS":
                several = _to_mark(stack)
                _extend(stack[-1], several)
            case "GLOBAL":
                stack.append(self._global(*str(argument).split(" ", 1)))
            case "STACK_GLOBAL":
                stack.append(self._global(*_take(stack, 2)))
            case "INST":
                args = _to_mark(stack)
                stack.append(self._call(self._global(*str(argument).split(" ", 1)), tuple(args)))
            case "OBJ":
                kind, *args = _to_mark(stack)
                stack.append(self._call(kind, tuple(args)))
            case "REDUCE" | "NEWOBJ":
                function, args = _take(stack, 2)
                stack.append(self._call(function, args))
            case "NEWOBJ_EX":
                function, args, _ = _take(stack, 3)
                stack.append(self._call(function, args))
            case "BUILD":
                (state,) = _take(stack, 1)
                self._build(stack[-1], state)
            case "BINPERSID" | "PERSID":
                given = _take(stack, 1)[0] if name == "BINPERSID" else argument
                stack.append(self._persistent(given))
            case "POP":
                stack.pop()
            case "POP_MARK":
                _to_mark(stack)
            case "DUP":
                stack.append(stack[-1])
            case _:  # out-of-band buffers and registered extensions, which no file has
                raise ValueError(f"the instruction {name}")

    def _global(self, module: object, name: object) -> Global:
        if not isinstance(module, str) or not isinstance(name, str):
            raise ValueError("a name that is not text")
        if len(module) + len(name) > _MAX_NAME:
            raise ValueError("a name that is too long")
        module = _RENAMED.get(module, module)
        self.names[f"{module}.{name}"] = None
        return Global(f"{module}.{name}")

    def _call(self, function: object, args: object) -> object:
        """Return a tensor or a container for a call that would build one, else a stand-in."""
        if not isinstance(args, tuple):
            raise ValueError("arguments that are not a tuple")
        name = function.name if isinstance(function, Global) else "(computed)"
        rebuild = _REBUILD.get(name)
        if rebuild is not None:
            return rebuild(self, *args)
        if name == "copyreg._reconstructor" and args and isinstance(args[0], Global):
            return StandIn(args[0].name)
        return StandIn(name, args)

    def _persistent(self, given: object) -> object:
        """Return the target of a reference: a storage, or in old files a class."""
        match given:
            case ("storage", Global(name), str(key), _, int(count), *rest):
                return self._storages.get(name, key, count, rest[0] if rest else None)
            case ("module", kind, *_):
                return kind
        raise ValueError("a reference to something other than a storage")

    # --- rebuilding tensors and containers

    def _tensor(
        self, storage: object, offset: object, size: object, stride: object, *_: object
    ) -> object:
        if not isinstance(storage, Storage):
            return StandIn("torch.Tensor")
        return self._storages.tensor(storage, offset, size, stride)

    def _tensor_v3(self, *args: object) -> object:
        storage, offset, size, stride, _, _, dtype = args[:7]
        if not isinstance(storage, Storage) or not isinstance(dtype, Global):
            return StandIn("torch.Tensor")
        return self._storages.tensor(storage, offset, size, stride, dtype.name)

    def _meta_tensor(self, dtype: object, size: object, *_: object) -> object:
        return meta_tensor(dtype.name if isinstance(dtype, Global) else "", size)

    def _from_type(self, function: object, _kind: object, args: object, *_: object) -> object:
        return self._call(function, args)

    def _load_bytes(self, data: object) -> object:
        """Read the file inside a file, which is how a plain pickle stores a tensor."""
        if not isinstance(data, bytes) or self._nested >= _MAX_NESTED:
            raise ValueError("a nested file")
        self._storages.spend(len(data))  # the same bytes may be read any number of times
        inner = InertReader(data, nested=self._nested + 1)
        value = inner.read_legacy(io.BytesIO(data))
        self.names.update(inner.names)
        return value

    def _mapping(self, *args: object) -> object:
        pairs = args[-1] if args else ()
        if isinstance(pairs, dict):
            return pairs
        made: dict[Any, Any] = {}
        if isinstance(pairs, list | tuple):
            self._spend(len(pairs))
            for pair in pairs:
                if isinstance(pair, list | tuple) and len(pair) == 2:
                    _set_items(made, list(pair))
        return made

    def _build(self, target: object, state: object) -> None:
        """Set the attributes of a stand-in; those of a tensor or a dict are ignored."""
        if not isinstance(target, StandIn):
            return
        for part in state[:2] if isinstance(state, tuple) else (state,):
            if isinstance(part, dict):
                self._spend(len(part))
                target.parts.update(part)


_REBUILD: dict[str, Callable[..., object]] = {
    "torch._utils._rebuild_tensor": InertReader._tensor,
    "torch._utils._rebuild_tensor_v2": InertReader._tensor,
    "torch._utils._rebuild_tensor_v3": InertReader._tensor_v3,
    "torch._utils._rebuild_meta_tensor_no_storage": InertReader._meta_tensor,
    "torch._utils._rebuild_parameter": lambda _reader, data, *_: data,
    "torch._utils._rebuild_parameter_with_state": lambda _reader, data, *_: data,
    "torch._tensor._rebuild_from_type_v2": InertReader._from_type,
    "torch.storage._load_from_bytes": InertReader._load_bytes,
    "collections.OrderedDict": InertReader._mapping,
    "collections.defaultdict": InertReader._mapping,
    "collections.Counter": InertReader._mapping,
}

_PUT = frozenset({"PUT", "BINPUT", "LONG_BINPUT"})
_GET = frozenset({"GET", "BINGET", "LONG_BINGET"})
_IGNORED = frozenset({"PROTO", "FRAME", "STOP"})
#: Instructions whose argument is the value that they push.
_VALUES = frozenset(
    {
        *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "FLOAT", "BINFLOAT"),
        *("STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "BINUNICODE8"),
        *("SHORT_BINUNICODE", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"),
    }
)


def _take(stack: list[Any], count: int) -> list[Any]:
    taken = stack[len(stack) - count :]
    if len(taken) != count or any(value is _MARK for value in taken):
        raise ValueError("an instruction without its arguments")
    del stack[len(stack) - count :]
    return taken


def _to_mark(stack: list[Any]) -> list[Any]:
    taken: list[Any] = []
    while (value := stack.pop()) is not _MARK:
        taken.append(value)
    return taken[::-1]


def _set_items(target: object, pairs: list[Any]) -> None:
    if len(pairs) % 2 or not isinstance(target, dict | StandIn):
        raise ValueError("entries of something that is not a mapping")
    entries = target.parts if isinstance(target, StandIn) else target
    for key, value in zip(pairs[::2], pairs[1::2], strict=True):
        # Hashing deeply nested tuples would crash the process; no state dict has such keys.
        plain = key is None or isinstance(key, str | int | float | bytes)
        entries[key if plain else StandIn("(key)")] = value


def _extend(target: object, values: list[Any]) -> None:
    if not isinstance(target, list | StandIn):
        raise ValueError("members of something that is not a list")
    (target.members if isinstance(target, StandIn) else target).extend(values)
