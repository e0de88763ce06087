"""Writing the folder of a run: opened or resumed, finished, and checked by hashes.

``run.json`` is written first and identifies the run; ``SHA256SUMS``, which ``sha256sum -c`` reads,
and ``results.json`` are written last. Readers compare the files of a finished run with that list,
so that no file of another run, or edited since, is used. A fit, which is done before the run is,
lists its own files.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from ..caches import CANARY_NAME
from ..caches.manifest import is_of_a_cache
from ..errors import CacheError, ConfigError, NotFoundError, OutputExistsError
from ..utils.decoding import parse_json
from ..utils.files import config_text, finished_name, read_regular, sha256_file, to_json, write_text
from ..utils.outputs import LOCK_SUFFIX, OutputFolder, OutputLock
from .run import (
    BEST_NAME,
    CONFIG_NAME,
    EVENTS_NAME,
    FITS_NAME,
    HEAD_CONFIG_NAME,
    HEAD_NAME,
    METRICS_NAME,
    MODEL_NAME,
    PREDICTIONS_NAME,
    REPORT_NAME,
    RESULTS_NAME,
    RUN_NAME,
    SPLITS_NAME,
    STUDY_NAME,
    SUMS_NAME,
    TRIAL_FITS_NAME,
    TRIALS_NAME,
)

#: Files at the top of a run.
_RUN_FILES = (
    *(CONFIG_NAME, RUN_NAME, SPLITS_NAME, METRICS_NAME, RESULTS_NAME, PREDICTIONS_NAME),
    *(HEAD_NAME, HEAD_CONFIG_NAME, MODEL_NAME, REPORT_NAME, CANARY_NAME),
    *(STUDY_NAME, f"{STUDY_NAME}.lock", TRIALS_NAME, BEST_NAME, SUMS_NAME),
)

#: Longest value that an error shows, in characters.
_SHORT = 40

#: Written after the run, or during a search: not listed.
_NOT_LISTED = (SUMS_NAME, REPORT_NAME, STUDY_NAME, f"{STUDY_NAME}.lock")


def is_of_a_run(name: str) -> bool:
    """Whether a run writes something of that name into its folder."""
    return (
        name in _RUN_FILES
        or name in (FITS_NAME, EVENTS_NAME, TRIAL_FITS_NAME)
        or re.fullmatch(r"fold-\d+", name) is not None
    )


def require_apart(
    out: str | Path, source: str | Path, *, is_folder: bool = False, within: bool = True
) -> None:
    """Refuse an output that would take the place of what it is made from, or of a part of that.

    Args:
        source: A path that a command reads, or a specification that begins or ends with one.
        is_folder: Whether the output is a run or a cache: these do not lie inside one another.
        within: Whether the source is a run or a cache, no file of which is replaced but a report.
    """
    target, text = Path(os.path.realpath(out)), str(source)
    for name in filter(os.path.lexists, (text, text.partition(":")[2], text.rpartition(":")[0])):
        place = Path(os.path.realpath(name))
        inside = target.relative_to(place).parts if target.is_relative_to(place) else ()
        own = is_folder or any(is_of_a_run(part) or is_of_a_cache(part) for part in inside)
        part = within and inside and own and inside[-1] != REPORT_NAME
        if target == place or part:
            raise OutputExistsError(
                f"{out}: found {'a part of ' if part else ''}what it would be made from, expected "
                "another place; choose another -o"
            )


@contextmanager
def open_run_folder(
    target: str | Path,
    plan: Mapping[str, Any],
    *,
    config: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    shared: bool = False,
) -> Iterator[OutputFolder]:
    """Open a folder for a run, or resume a run with the same plan.

    Args:
        target: The run folder.
        plan: All that the result depends on, as plain values.
        config: The options of the command, saved as ``config.toml``.
        overwrite: Replace an existing run, once this one is finished; a killed replacement is
            resumed.
        shared: Whether other jobs may do their part of the same plan at the same time.
    """
    text = to_json(dict(plan))
    shared = shared and not overwrite
    with ExitStack() as opening, OutputFolder(target, is_of_a_run, shared=shared) as output:
        if shared:  # of jobs that start at the same time, the first one writes run.json
            opening.enter_context(
                OutputLock(Path(f"{os.path.realpath(target)}.opening"), wait=True)
            )
        marked = _marker(output.folder)
        if overwrite and marked and (marked != text or (output.folder / RESULTS_NAME).is_file()):
            marked = _marker(output.replace())
            if marked is not None and marked != text:
                shutil.rmtree(output.folder)
                marked = None
        if marked is not None and marked != text:
            changed = _first_difference(_parsed(marked), _parsed(text))
            raise OutputExistsError(
                f"{output.folder}: found a run with {changed}; choose another -o, or --overwrite"
            )
        output.clean()
        output.folder.mkdir(exist_ok=True)
        if marked is None:
            write_text(output.folder / RUN_NAME, text)
        if config is not None:
            write_text(output.folder / CONFIG_NAME, config_text(config))
        opening.close()
        yield output


def _marker(folder: Path) -> str | None:
    """Return the text of ``run.json``; None for no folder or an empty one; others are refused."""
    try:
        return read_regular(folder / RUN_NAME).decode(errors="replace")
    except ConfigError:
        if os.path.lexists(folder / RUN_NAME):
            raise
        names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
        if any(finished_name(name) != RUN_NAME for name in names):
            raise OutputExistsError(
                f"{folder}: found files that are not a run's; choose another -o"
            ) from None
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise OutputExistsError(
            f"{folder / RUN_NAME}: cannot be read ({error}); choose another -o"
        ) from None


def _parsed(text: str) -> Any:
    try:
        return parse_json(text.encode(), RUN_NAME)
    except CacheError:
        return text


def _first_difference(found: Any, expected: Any, name: str = "") -> str:
    """Return where two plans differ first, and how."""
    if isinstance(found, dict) and isinstance(expected, dict):
        keys = [key for key in {**expected, **found} if found.get(key) != expected.get(key)]
        if not keys:
            return "another layout"
        key = "code" if keys[0] == "source" else keys[0]  # of a readout
        place = f"{name} {key}" if name else key
        return _first_difference(found.get(keys[0]), expected.get(keys[0]), place)
    if isinstance(found, list) and isinstance(expected, list) and len(found) == len(expected):
        pairs = zip(found, expected, strict=True)
        return next(_first_difference(*pair, name) for pair in pairs if pair[0] != pair[1])
    texts = [_plain(value) for value in (found, expected)]
    if not name or any(len(text) > _SHORT for text in texts):
        return f"another {name or 'plan'}"
    return f"{name} {texts[0]}, expected {texts[1]}"


def _plain(value: Any) -> str:
    """Return a value as JSON, and a hash by its first characters."""
    is_hash = isinstance(value, str) and re.fullmatch(r"[0-9a-f]{64}", value) is not None
    return value[:12] if is_hash else json.dumps(value)


# --- the list of files


def finish_run(folder: Path, results: Mapping[str, Any]) -> None:
    """Write the list of all files, and then ``results.json``, which marks a run as finished."""
    text = to_json(dict(results))
    write_checksums(folder, {RESULTS_NAME: hashlib.sha256(text.encode()).hexdigest()})
    write_text(folder / RESULTS_NAME, text)


def write_checksums(folder: Path, known: Mapping[str, str] | None = None) -> None:
    """List every file of a run, or an export, with its SHA-256.

    Args:
        known: Hashes of files that are written afterwards.
    """
    found = {
        path.relative_to(folder).as_posix(): path
        for path in folder.rglob("*")
        if path.is_file() and not path.is_symlink() and path.suffix != LOCK_SUFFIX
    }
    sums = {
        name: sha256_file(path)
        for name, path in found.items()
        if is_of_a_run(name.split("/")[0])
        and name.split("/")[0] not in (*_NOT_LISTED, EVENTS_NAME, TRIAL_FITS_NAME)
    }
    lines = [f"{value}  {name}\n" for name, value in sorted({**sums, **(known or {})}.items())]
    write_text(folder / SUMS_NAME, "".join(lines))


# --- fits, which are done before the run is


class BrokenFitError(Exception):
    """A fit has changed since it was saved, or is another run's: it has to be fitted again."""


#: The entries of a seal.
SEAL = ("plan", "files")


def seal(folder: Path, names: Sequence[str], plan: str) -> dict[str, Any]:
    """Return what identifies a fit: the plan of its run, and the hashes of its files."""
    files = {name: sha256_file(folder / name) for name in names if (folder / name).is_file()}
    return {"plan": plan, "files": files}


def check_seal(folder: Path, stored: Mapping[str, Any], plan: str | None = None) -> None:
    """Refuse a fit whose files have changed, or that is another run's.

    Args:
        stored: Its JSON file with the seal; earlier versions wrote none.
        plan: The plan of the run that it should belong to; any by default.

    Raises:
        BrokenFitError: with what is wrong.
    """
    if plan is not None and stored.get("plan") != plan:
        raise BrokenFitError(f"{folder}: found a fit of another run")
    files = stored.get("files", {})
    if not isinstance(files, Mapping):
        raise BrokenFitError(f"{folder}: found no list of files")
    for name, expected in files.items():
        try:
            found = sha256_file(folder / name)
        except NotFoundError:
            raise BrokenFitError(f"{folder / name}: found no file") from None
        if found != expected:
            raise BrokenFitError(
                f"{folder / name}: found other contents than it was saved with "
                f"(SHA-256 {found[:12]}, expected {str(expected)[:12]})"
            )


def require_sealed(folder: Path, stored: Mapping[str, Any]) -> None:
    """Refuse to use a fit, or the checkpoint of a fold, whose files have changed."""
    try:
        check_seal(folder, stored)
    except BrokenFitError as error:
        raise ConfigError(f"{error}; run the run's own command again to fit it anew") from None
