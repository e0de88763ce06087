"""The machine: its devices, its memory, and memory that processes share.

torch is imported where it is used: the command line reads constants from here before it knows
whether it will need it.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch
    from torch import nn

#: Nodes of a batch at most, by default.
NODE_BUDGET = 8192

#: Options of glibc's ``mallopt``: how much may be free at the end of the heap, the size from which
#: blocks are mapped, and how many at most.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4

#: Networks whose sizes are all smaller fit any machine.
_LARGE = 4096

#: The control groups of this process, and the folder of their files (Linux).
GROUPS = Path("/proc/self/cgroup")
MOUNTS = Path("/sys/fs/cgroup")


def keep_memory() -> None:
    """Keep freed memory for later tensors instead of returning it to the system (glibc only).

    It affects the whole process: only the commands that run models call it.
    """
    _set_malloc_options({_TRIM_THRESHOLD: -1, _MMAP_MAX: 0})


def give_memory_back() -> None:
    """Undo :func:`keep_memory`: the settings that glibc reaches once large blocks were freed."""
    _set_malloc_options({_TRIM_THRESHOLD: 64 << 20, _MMAP_THRESHOLD: 32 << 20, _MMAP_MAX: 1 << 16})


def _set_malloc_options(options: dict[int, int]) -> None:
    if not sys.platform.startswith("linux"):
        return
    try:
        set_option = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return
    for option, value in options.items():
        set_option(option, value)


def machine_memory(groups: Path = GROUPS, mounts: Path = MOUNTS) -> int:
    """Return the bytes of memory that this process may use, in a container or job fewer.

    Args:
        groups: File that lists the control groups of the process; it may be missing.
        mounts: Folder of their limits.
    """
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *_limits(groups, mounts)])


def require_memory(
    what: str, sizes: Iterable[Any], build: Callable[[], nn.Module], *, bytes_per_weight: int
) -> None:
    """Refuse a network that does not fit in the memory of this machine, without allocating it.

    Args:
        sizes: Its options; a network of small numbers is not checked.
        bytes_per_weight: 16 with gradients and both moments of Adam, 4 without.
    """
    if not any(isinstance(value, int) and value > _LARGE for value in sizes):
        return
    import torch

    try:
        with torch.device("meta"):
            count: float = sum(parameter.numel() for parameter in build().parameters())
    except (RuntimeError, TypeError) as error:  # a TypeError for what 64 bits cannot hold
        if "overflow" not in str(error).lower():
            raise
        count = math.inf
    needed, there = bytes_per_weight * count, machine_memory()
    if needed > there:
        raise ConfigError(
            f"{what}: found sizes that take {needed / 1e9:,.0f} GB, expected at most the "
            f"{there / 1e9:,.0f} GB of this machine"
        )


def _limits(groups: Path, mounts: Path) -> Iterator[int]:
    """Yield the limits of the control groups of the process, and of their parents."""
    for path in _limit_files(groups, mounts):
        try:
            text = path.read_text(encoding="ascii").strip()
        except OSError:  # a container does not see the parents of its group
            continue
        if text.isdecimal():  # "max" is no limit
            yield int(text)


def _limit_files(groups: Path, mounts: Path) -> Iterator[Path]:
    try:
        lines = groups.read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, controllers, name = line.split(":", 2)
        group = PurePosixPath(name).relative_to("/")
        for place in (group, *group.parents):
            if not controllers:  # version 2, alone or beside version 1
                yield mounts / place / "memory.max"
                yield mounts / "unified" / place / "memory.max"
            elif "memory" in controllers.split(","):
                yield mounts / "memory" / place / "memory.limit_in_bytes"


# --- shared memory


class SharedTensor:
    """A tensor in shared memory, which is not copied when it is pickled for another process.

    The memory has no name in any file system. It is freed with the last process that uses it,
    however that process ends.

    Args:
        file: The descriptor of existing memory; new memory by default.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, file: int | None = None) -> None:
        import torch

        num_bytes = max(math.prod(shape) * dtype.itemsize, 1)
        self._shape, self._dtype = shape, dtype
        self._file = _nameless_file(num_bytes) if file is None else file
        pages = torch.frombuffer(mmap.mmap(self._file, num_bytes), dtype=torch.uint8)
        self.tensor = pages[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)

    def __del__(self) -> None:
        os.close(self._file)

    def __reduce__(self) -> tuple[Any, ...]:
        from multiprocessing.reduction import DupFd

        return _open_shared, (self._shape, self._dtype, DupFd(self._file))


def _open_shared(shape: tuple[int, ...], dtype: torch.dtype, file: Any) -> SharedTensor:
    return SharedTensor(shape, dtype, file.detach())


def _nameless_file(num_bytes: int) -> int:
    """Return the descriptor of a file in memory, or on disk if the system has none in memory."""
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("histograph")
    else:
        with tempfile.TemporaryFile() as temporary:
            file = os.dup(temporary.fileno())
    os.truncate(file, num_bytes)
    return file


# --- devices


def synchronize(device: torch.device) -> None:
    """Wait until a device has finished its work."""
    import torch

    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def send(arrays: Sequence[npt.NDArray[np.int64]], device: torch.device) -> list[torch.Tensor]:
    """Return integer arrays, ``[n]`` each, as tensors on a device, in one asynchronous copy."""
    import numpy as np
    import torch

    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    joined = torch.from_numpy(np.concatenate(arrays))  # [sum of n]
    moved = pinned(joined, device).to(device, non_blocking=True)
    return list(moved.split([len(array) for array in arrays]))


def pinned(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor of the host in pinned memory if the device is CUDA, else as it is."""
    return tensor.pin_memory() if device.type == "cuda" else tensor


def free_memory(device: torch.device) -> int:
    """Return the free bytes of a device other than the CPU."""
    import torch

    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()


def resolve_device(name: str = "auto") -> torch.device:
    """Turn ``auto``, ``cpu``, ``cuda``, ``cuda:1`` or ``mps`` into an available device.

    Each process that ``torchrun`` starts on a machine gets a GPU of its own.
    """
    import torch

    available = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    if name == "auto":
        name = next(kind for kind, is_there in available.items() if is_there)
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device: found {name!r}, expected auto, cpu, cuda or mps") from None
    count = {"cuda": torch.cuda.device_count(), "mps": 1}.get(device.type, 0)
    if not available.get(device.type, False) or (device.index or 0) >= max(count, 1):
        raise ConfigError(
            f"device: {name} was asked for, but this machine or build of torch has none"
        )
    if device.type == "cpu" or ":" in name:
        return device
    # A job may see only its own GPU, which is then the first.
    return torch.device(device.type, int(os.environ.get("LOCAL_RANK", "0")) % max(count, 1))
