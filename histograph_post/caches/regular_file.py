"""Opening a file that may be a trap: no links, no pipes, no more than a limit."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

from ..errors import CacheError

# Not every system has these flags; where they are missing, the check below still refuses links.
_FLAGS = (
    os.O_RDONLY
    | getattr(os, "O_NOFOLLOW", 0)
    | getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_BINARY", 0)
    # Opening a pipe must not wait for somebody to write into it.
    | getattr(os, "O_NONBLOCK", 0)
)


@contextmanager
def open_regular(path: Path) -> Iterator[FileIO]:
    """Open ``path`` for reading, refusing anything but a regular file that is no link."""
    try:
        if path.is_symlink():
            raise OSError(errno.ELOOP, "a symbolic link")
        descriptor = os.open(path, _FLAGS)
    except OSError as error:
        found = {errno.ELOOP: "a symbolic link", errno.ENOENT: "nothing"}
        raise CacheError(
            f"{path}: found {found.get(error.errno or 0, error.strerror)}, expected a regular file"
        ) from None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise CacheError(f"{path}: found a folder, pipe or device, expected a regular file")
        with open(descriptor, "rb", buffering=0, closefd=False) as file:
            yield file
    finally:
        os.close(descriptor)


def read_limited(path: Path, limit: int) -> bytes:
    """Return the bytes of a regular file of at most ``limit`` bytes."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise CacheError(f"{path}: found {size} bytes, expected at most {limit}")
        return file.read(size)


def sha256_prefix(file: FileIO, num_bytes: int) -> str:
    """Return the SHA-256 of the first ``num_bytes`` of an open file."""
    return sha256_prefixes(file, (num_bytes,))[0]


def sha256_prefixes(file: FileIO, sizes: Sequence[int]) -> list[str]:
    """Return the SHA-256 of each of these first bytes of an open file, which is read once.

    Args:
        file: A file that is open for reading.
        sizes: How many bytes, in rising order.
    """
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(min(max(sizes), 2**18)))
    file.seek(0)
    done, found = 0, []
    for size in sizes:
        while done < size and (count := file.readinto(buffer[: size - done])):
            digest.update(buffer[:count])
            done += count
        found.append(digest.hexdigest())
    return found
