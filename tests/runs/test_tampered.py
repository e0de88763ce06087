"""Files of a run that somebody has changed: whatever they hold, one known error comes of it."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import re
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from histograph_post.errors import HistographError
from histograph_post.experiments.finetuning import open_source
from histograph_post.runs.fits import FitSpec, find_fit
from histograph_post.runs.folder import BrokenFitError, check_seal
from histograph_post.runs.predicting import load
from histograph_post.runs.run import Run
from histograph_post.runs.summary import facts, fit_rows, readout_rows
from histograph_post.training.options import TrainingOptions

from ..helpers import histograph

ODD: list[Any] = [None, True, -1, 2**70, 0.5, 1e308, "", "\x1b[2J", "../..", [], {}, [[]], {"a": 1}]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield where every entry of a JSON value is; of a long list only the first ones."""
    if path:
        yield path
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value[:3])
    for key, item in items:
        yield from places(item, (*path, key))


def changed(value: Any, place: tuple[Any, ...], new: Any) -> Any:
    """Return a copy with another value at a place; without it, if that is the string DELETE."""
    value = copy.deepcopy(value)
    inside = value
    for key in place[:-1]:
        inside = inside[key]
    if new == "DELETE":
        del inside[place[-1]]
    else:
        inside[place[-1]] = new
    return value


def damaged(data: st.DataObject, contents: bytes) -> bytes:
    """Draw a damage: of what JSON says, or of the bytes."""
    kind = data.draw(st.sampled_from(["value", "value", "value", "cut", "flip", "deep", "big"]))
    if kind == "cut":
        return contents[: data.draw(st.integers(0, len(contents)))]
    if kind == "flip":
        at = data.draw(st.integers(0, len(contents) - 1))
        flipped = contents[at] ^ (1 << data.draw(st.integers(0, 7)))
        return contents[:at] + bytes([flipped]) + contents[at + 1 :]
    if kind == "deep":
        return b"[" * 100_000
    if kind == "big":
        return b'{"a": 1e999, "b": ' + b"9" * 10_000 + b"}"
    try:
        value = json.loads(contents)
    except ValueError:
        return contents[: len(contents) // 2]
    place = data.draw(st.sampled_from(sorted(places(value), key=str)))
    new = data.draw(st.sampled_from([*ODD, "DELETE"]))
    return json.dumps(changed(value, place, new)).encode()


def show(folder: Path) -> None:
    run = Run.open(folder)
    facts(run)
    readout_rows(run)
    fit_rows(run)
    _ = run.log, run.splits, run.config, run.verdict, repr(run)


def inspect(folder: Path) -> None:
    found = histograph("inspect", folder)
    if found.exception is not None and not isinstance(found.exception, SystemExit):
        raise found.exception


def build(folder: Path) -> None:
    load(folder)


def plan_finetuning(folder: Path) -> None:
    source = open_source(folder)
    assert source is not None
    source.load_head()


READERS: dict[str, Callable[[Path], None]] = {
    "show": show,
    "inspect": inspect,
    "build": build,
    "finetune": plan_finetuning,
}
FILES = ("results.json", "run.json", "head.json", "splits.json", "config.toml", "metrics.jsonl")


@pytest.mark.parametrize("name", FILES)
@given(st.data())
@settings(max_examples=8, derandomize=True, suppress_health_check=list(HealthCheck))
def test_a_changed_file_gives_a_known_error_or_is_read(folder, name, data) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary) / "run"
        shutil.copytree(folder / "run", place, ignore=shutil.ignore_patterns("fits"))
        shutil.copytree(folder / "demo.cache", Path(temporary) / "demo.cache")
        (place / "SHA256SUMS").unlink(missing_ok=True)  # else every change is found at once
        if not (place / name).exists():
            (place / name).write_text('seeds = "0-1"\n')
        (place / name).write_bytes(damaged(data, (place / name).read_bytes()))
        for read in READERS.values():
            with contextlib.suppress(HistographError):  # anything else fails the test
                read(place)


@pytest.mark.parametrize(
    ("entry", "value"),
    [
        *(("log", 3), ("scores", {"test": ["a"]}), ("best_epoch", "x"), ("target_scale", [])),
        *(("files", {"head.safetensors": 3}), ("num_parameters", -1), ("config", None)),
    ],
)
def test_an_odd_fit_is_fitted_again(folder: Path, tmp_path: Path, entry: str, value: Any) -> None:
    place = tmp_path / "fit"
    shutil.copytree(next((folder / "run" / "fits").glob("*/*")), place)
    stored = json.loads((place / "fit.json").read_text())
    names = {name: stored[name] for name in ("head", "fold", "seed", "plan")}
    spec = FitSpec(**names, options={}, training=TrainingOptions())
    assert find_fit(spec, place) is not None
    (place / "fit.json").write_text(json.dumps(stored | {entry: value}))
    with pytest.raises(BrokenFitError, match=r"fit\.json: .*found .*, expected"):
        find_fit(spec, place)


@pytest.fixture
def copied(folder: Path, tmp_path: Path) -> Path:
    """A run to change, without its list of hashes: whoever changes it mends that."""
    for name in ("run", "demo.cache"):
        shutil.copytree(folder / name, tmp_path / name)
    (tmp_path / "run" / "SHA256SUMS").unlink()
    return tmp_path / "run"


@pytest.mark.parametrize("name", ["predictions.csv", "results.json", "metrics.jsonl"])
def test_a_report_of_odd_files_is_refused_in_one_line(copied: Path, name: str) -> None:
    results = json.loads((copied / "results.json").read_text())
    results["task"]["classes"] = []
    odd = {"predictions.csv": "a,b\nc,d\n", "results.json": json.dumps(results)}
    odd["metrics.jsonl"] = '{"head": "mean", "fold": 0, "seed": 0, "loss": "x"}\n'
    (copied / name).write_text(odd[name])
    done = histograph("report", copied, "-o", copied.with_name("page.html"), "-q")
    assert done.exit_code == 1
    assert re.fullmatch(rf"error: .*{name}: .*found .*\n", done.stderr)


@pytest.mark.parametrize(
    ("name", "entry", "value"),
    [
        *(("head.json", "metric", "zzz"), ("head.json", "metric", "mae")),
        *(("head.json", "kind", "regression"), ("head.json", "kind", "multilabel")),
        *(("head.json", "classes", [1.0, 0.0]), ("head.json", "classes", [0.0, 1.0, 2.0])),
        *(("head.json", "num_targets", 10**9), ("head.json", "level", "node")),
        *(("head.json", "target_names", ["a", "b"]), ("results.json", "metric", "zzz")),
    ],
)
def test_a_task_that_does_not_fit_is_refused(
    copied: Path, name: str, entry: str, value: Any
) -> None:
    stored = json.loads((copied / name).read_text())
    (stored if entry in stored and entry != "metric" else stored["task"])[entry] = value
    (copied / name).write_text(json.dumps(stored))
    words = ["predict", copied, "--data", "demo:"] if name == "head.json" else ["report", copied]
    done = histograph(*words, "-o", copied.with_name("out.html"), "-q")
    assert done.exit_code == 1
    assert re.fullmatch(rf"error: .*{name}.*: found .*, expected .*\n", done.stderr)
    assert not copied.with_name("out.html").exists()


def test_a_report_leaves_out_a_fit_without_outputs(copied: Path) -> None:
    for file in copied.glob("fits/mean/*/test.safetensors"):
        file.write_bytes(save({}))
    done = histograph("report", copied, "-o", copied.with_name("page.html"), "-q")
    assert done.exit_code == 0, done.output


def test_a_hash_that_is_none_is_shown(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(BrokenFitError, match="found other contents than it was saved with"):
        check_seal(tmp_path, {"files": {"metrics.jsonl": {}}})


@pytest.mark.parametrize("name", ["SHA256SUMS", "config.toml", "predictions.csv", "run.json"])
def test_a_pipe_is_not_waited_for(copied: Path, name: str) -> None:
    (copied / name).unlink(missing_ok=True)
    os.mkfifo(copied / name)
    with waiting_at_most(60):
        done = histograph("report", copied, "-o", copied.with_name("page.html"))
    assert done.exit_code == 1
    assert f"{name}: found a folder, pipe or device" in done.stderr


@pytest.mark.parametrize("name", ["SHA256SUMS", "head.json", "config.toml", "splits.json"])
def test_a_link_to_itself_is_refused(copied: Path, name: str) -> None:
    (copied / name).unlink(missing_ok=True)
    (copied / name).symlink_to(copied / name)
    done = histograph("report", copied, "-o", copied.with_name("page.html"))
    assert done.exit_code == 1
    assert f"{name}: found a symbolic link" in done.stderr


@contextlib.contextmanager
def waiting_at_most(seconds: int) -> Iterator[None]:
    def give_up(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
