"""File operations: atomic writes, stable JSON, checksums, and checks of where a command writes.

Files that may come from anybody are opened with care: no links, no pipes, and no more bytes than
such a file can have.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import platform
import re
import stat
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BufferedReader, FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w

from ..errors import CacheError, ConfigError, NotFoundError, OutputExistsError
from .text import first_line

if TYPE_CHECKING:
    import numpy as np
    import torch

#: The suffix of unfinished files; a file without it is complete.
PARTIAL_SUFFIX = ".partial"

#: The name of this machine in unfinished files and locks.
HOST = re.sub(r"[^A-Za-z0-9_]", "_", platform.node()) or "host"


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary sibling of ``path``; on success sync it and move it into place.

    The sibling ends in ``.partial`` and its name includes the host and the process, so that two
    writers of the same file never share one. If the body raises, the sibling is removed and
    ``path`` is untouched.
    """
    partial = path.with_name(f"{path.name}.{HOST}-{os.getpid()}{PARTIAL_SUFFIX}")
    try:
        with errors_naming(path):
            partial.unlink(missing_ok=True)  # of a killed process with the same number
            yield partial
            _sync(partial)
            os.replace(partial, path)
            _sync(path.parent)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


@contextmanager
def errors_naming(path: Path) -> Iterator[None]:
    """Add the file's name to the error of a write, which may lack it."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


#: The names of unfinished files: those of :func:`atomic_path`, and of a library's writer that
#: earlier versions used.
_UNFINISHED = re.compile(r"(.+)\.([A-Za-z0-9_]+)-(\d+)\.partial|\.tmp[A-Za-z0-9]{6}")


def finished_name(name: str) -> str:
    """Return the name of an unfinished file once it is complete; any other name as it is."""
    found = _UNFINISHED.fullmatch(name)
    return name if found is None or found[1] is None else found[1]


def remove_leftovers(folder: Path, *, alone: bool = False, of: Collection[str] = ()) -> None:
    """Remove the unfinished files that killed processes left in a folder.

    Args:
        folder: Where to look; also in its subfolders if ``alone``, unless ``of`` is given.
        alone: Whether no other process writes there; if not, only files of dead processes of this
            machine are removed.
        of: The names of the files that were being written; any by default.
    """
    found = folder.rglob("*") if alone and not of else folder.iterdir()
    for path in list(found):
        name = _UNFINISHED.fullmatch(path.name)
        if name is None or path.is_dir() or (of and name[1] not in of):
            continue
        if alone or (name[2] == HOST and not _is_running(int(name[3]))):
            path.unlink(missing_ok=True)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # another user's, but running
    return True


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_bytes(path: Path, data: bytes | Iterable[bytes]) -> None:
    """Write ``data``, or the concatenation of its parts, to ``path`` atomically."""
    with atomic_path(path) as partial, partial.open("wb") as file:
        file.writelines([data] if isinstance(data, bytes) else data)


def write_text(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` atomically, as UTF-8."""
    write_bytes(path, text.encode())


def to_json(value: Any) -> str:
    """Return ``value`` as JSON with a stable layout; NaN and infinity are refused."""
    return json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` to ``path`` atomically as JSON with a stable layout."""
    write_text(path, to_json(value))


def sha256_file(path: Path) -> str:
    """Return the hexadecimal SHA-256 of a file's bytes."""
    if not path.is_file():
        raise NotFoundError(f"{path}: no such file")
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# --- files that may come from anybody

# Not every system has these flags; where they are missing, the check below still refuses links.
_READING = (
    os.O_RDONLY
    | getattr(os, "O_NOFOLLOW", 0)
    | getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_BINARY", 0)
    # Opening a pipe must not wait for a writer.
    | getattr(os, "O_NONBLOCK", 0)
)


#: Set to follow links to files.
LINKS_VARIABLE = "HISTOGRAPH_FOLLOW_LINKS"


def follows_links() -> bool:
    """Whether the user wants to follow links, such as the Hugging Face hub and DVC make."""
    return os.environ.get(LINKS_VARIABLE, "") not in ("", "0")


def real_path(path: Path) -> Path:
    """Return what a link leads to; unlike ``resolve``, one of a loop of links as it is."""
    return Path(os.path.realpath(path))


def read_regular(path: Path, limit: int | None = None) -> bytes:
    """Return the bytes of a regular file, links followed: no pipe and no device."""
    try:
        return read_limited(real_path(path), limit)
    except CacheError as error:
        raise ConfigError(str(error)) from None


def copy_file(source: Path, target: Path) -> None:
    """Copy a file atomically; an error names the file that caused it."""
    write_bytes(target, read_regular(source))


@contextmanager
def open_regular(path: Path) -> Iterator[FileIO]:
    """Open ``path`` for reading, refusing links and anything but a regular file."""
    try:
        if path.is_symlink():
            if not follows_links():
                raise OSError(errno.ELOOP, "a symbolic link")
            path = real_path(path)
        descriptor = os.open(path, _READING)
    except OSError as error:
        found = {
            errno.ELOOP: f"a symbolic link ({LINKS_VARIABLE}=1 follows those that you trust)",
            errno.ENOENT: "nothing",
        }
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


def read_limited(path: Path, limit: int | None) -> bytes:
    """Return the bytes of a regular file of at most ``limit`` bytes."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if limit is not None and size > limit:
            raise CacheError(f"{path}: found {size} bytes, expected at most {limit}")
        with BufferedReader(file) as whole:  # a raw read returns 2 GB at most
            return whole.read(size)


def sha256_prefix(file: FileIO, num_bytes: int) -> str:
    """Return the SHA-256 of the first ``num_bytes`` of an open file."""
    return sha256_prefixes(file, (num_bytes,))[0]


def sha256_prefixes(file: FileIO, sizes: Sequence[int]) -> list[str]:
    """Return the SHA-256 of several prefixes of an open file, in one pass.

    Args:
        sizes: Bytes of each prefix, ascending.
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


# --- tensors in files
#
# The libraries' own writers report a full disk without the file's name, and their readers raise
# errors of almost any type for a damaged file.


def save_tensors(path: Path, tensors: Mapping[str, Any]) -> None:
    """Write tensors, such as those of a state dict, as a safetensors file."""
    import torch
    from safetensors.torch import save

    # Cloned, because tied weights share memory, which the format refuses.
    own = {
        name: value.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, value in tensors.items()
        if isinstance(value, torch.Tensor)
    }
    write_bytes(path, save(own))


def save_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays as a safetensors file."""
    from safetensors.numpy import save

    write_bytes(path, save({name: values.copy() for name, values in arrays.items()}))


def load_tensors(path: Path, what: str = "tensors") -> dict[str, torch.Tensor]:
    """Read a safetensors file; ``what`` it should hold is for the error."""
    from safetensors.torch import load

    return _load(path, load, what)


def load_arrays(path: Path, what: str = "arrays") -> dict[str, np.ndarray]:
    """Read a safetensors file as arrays."""
    from safetensors.numpy import load

    return _load(path, load, what)


def save_state(path: Path, state: Mapping[str, Any]) -> None:
    """Write plain values and tensors with ``torch.save``."""
    import torch

    buffer = io.BytesIO()
    torch.save(dict(state), buffer)
    write_bytes(path, buffer.getvalue())


def _load(path: Path, load: Callable[[bytes], Any], what: str) -> Any:
    data = read_regular(path)
    try:
        return load(data)
    except Exception as error:  # an unknown type is a KeyError, a bad header almost anything
        raise ConfigError(
            f"{path}: found a damaged file ({first_line(error)}), expected {what}"
        ) from error


# --- the outputs of a command


def require_free(path: Path, *, overwrite: bool) -> None:
    """Refuse an existing file, or a place that cannot be written, before anything is computed."""
    # Unlike the methods of a Path, these never raise.
    if os.path.lexists(path) and not os.path.isfile(path):
        what = "a folder" if os.path.isdir(path) else "a device, pipe or broken link"
        raise OutputExistsError(f"{path}: found {what}, expected a file or nothing")
    if os.path.exists(path) and not overwrite:
        raise OutputExistsError(f"{path}: found a file; choose another -o, or --overwrite")
    _require_place(path.parent)


def require_folder(folder: Path) -> None:
    """Refuse anything but a folder, or a place for one, before anything is computed."""
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise OutputExistsError(f"{folder}: found a file, expected a folder or nothing")
    _require_place(folder)


#: How a URL begins, also as a Path, which drops the second slash.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


def refuse_url(path: str | Path) -> None:
    """Refuse a URL, for which a local folder called ``s3:`` would be created."""
    if _URL.match(str(path)) and not os.path.exists(path):
        typed = re.sub(":/(?!/)", "://", str(path), count=1)
        raise ConfigError(
            f"{typed}: found a URL, expected a local file or folder; copy it (aws s3 cp, gcloud "
            "storage cp, hf download) or mount it (only data may be a URL: --data smiles:URL)"
        )


def _require_place(folder: Path) -> None:
    """Refuse a folder that cannot be written to; it need not exist yet."""
    refuse_url(folder)
    place = folder.absolute()
    there = next(parent for parent in (place, *place.parents) if os.path.exists(parent))
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise ConfigError(
            f"{folder}: found no place for files ({there}: {error.strerror}), "
            "expected a folder that can be written to"
        ) from None


def config_text(config: Mapping[str, Any]) -> str:
    """Return options as the text of a file that ``--config`` takes."""
    return tomli_w.dumps(dict(config))
