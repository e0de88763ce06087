"""Fixtures shared by the whole suite."""

from __future__ import annotations

import contextlib
import functools
import io
import multiprocessing
import os
import runpy
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import typer.testing
from hypothesis import HealthCheck, settings
from typer.testing import CliRunner

# The suite runs in a process per core, and starts more: threads on top would only be in the way.
# And a process in which OpenMP has threads cannot be forked, so a variable that is set does not
# count.
os.environ["OMP_NUM_THREADS"] = "1"

# All commands are built once, and not again for every one that a test types; with the options
# of shells that a test names, whatever shell this is.
os.environ["_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION"] = "1"
typer.testing._get_command = functools.cache(typer.testing._get_command)

# How long an example takes says more of the machine than of the code.
settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


#: Where tests take longest, first.
_LONGEST = ("stages", "test_docs.py", "benchmarks", "runs", "test_examples.py", "cli", "reporting")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the files that take longest first, which keeps all processes busy to the end."""
    root = Path(__file__).parent

    def place(item: pytest.Item) -> int:
        first = item.path.relative_to(root).parts[0]
        return _LONGEST.index(first) if first in _LONGEST else len(_LONGEST)

    items.sort(key=place)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real data sets and checkpoints beside the project; the test skips where there are none."""
    if not SHARED_DATA.is_dir():
        pytest.skip("real data (../shared/data) is not on this machine")
    return SHARED_DATA


@pytest.fixture(scope="session", autouse=True)
def _no_memory_of_trust(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Which checkpoints are trusted is remembered in the user's home: not by the tests."""
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))


@pytest.fixture(scope="session")
def make_demo_cache(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Cache a small model on demo graphs: ``make_demo_cache(splits, num_graphs)``, each once."""
    import histograph_post as hg

    from .helpers import make_model

    @functools.cache
    def make(splits: str | None = None, num_graphs: int = 60) -> Path:
        folder = tmp_path_factory.mktemp("caches") / "demo.cache"
        dataset = hg.load_data("demo:", args={"num_graphs": num_graphs})
        assert hg.cache(make_model(), dataset, folder, splits=splits) is not None
        return folder

    return make


@pytest.fixture(scope="session")
def demo_cache(make_demo_cache: Callable[..., Path]) -> Path:
    """A cache that tests read and leave as it is."""
    return make_demo_cache()


#: Stands for a command in a script: hands its words to the test and waits for the exit code.
_STAND_IN = """#!/usr/bin/env bash
words=$(mktemp "$STAND_INS/words.XXXXXX")
printf '%s\\0' "${0##*/}" "$PWD" "$@" > "$words"
mkfifo "$words.reply"  # of its own: one that the last reply has not left yet would end at once
echo "$words" > "$STAND_INS/requests"
read -r code < "$words.reply"
cat "$words.out"
cat "$words.err" >&2
exit "$code"
"""

Bash = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def bash(tmp_path: Path) -> Bash:
    """Run a script in bash, with `histograph` and `python FILE` done by this very process.

    A process for each command would spend most of the time on loading torch. Called as
    ``bash(words, cwd=folder, **variables)``; returns what the script printed and its exit code.
    ``added`` has words to add to the commands of some names.
    """
    stand_ins = tmp_path / ".stand-ins"
    stand_ins.mkdir()
    for name in ("histograph", "python"):
        (stand_ins / name).write_text(_STAND_IN)
        (stand_ins / name).chmod(0o755)
    os.mkfifo(stand_ins / "requests")

    def run(
        *words: str | Path,
        cwd: Path,
        added: Mapping[str, Sequence[str]] | None = None,
        **variables: str,
    ) -> subprocess.CompletedProcess[str]:
        environment = {
            **os.environ,
            **variables,
            "STAND_INS": str(stand_ins),
            "PATH": f"{stand_ins}:{os.environ['PATH']}",
        }
        with (
            open(stand_ins / "out", "w+") as out,
            open(stand_ins / "err", "w+") as err,
            # Open for writing, too: the pipe stays open between two commands of the script.
            open(os.open(stand_ins / "requests", os.O_RDWR), buffering=1) as requests,
        ):
            script = subprocess.Popen(
                ["bash", "-c", '"$@"; echo "exit $?" > "$STAND_INS/requests"', "-", "bash", *words],
                cwd=cwd,
                env=environment,
                stdout=out,
                stderr=err,
            )
            while not (request := requests.readline().strip()).startswith("exit "):
                _answer(Path(request), added or {})
            script.wait()
            out.seek(0)
            err.seek(0)
            return subprocess.CompletedProcess(
                words, int(request.removeprefix("exit ")), out.read(), err.read()
            )

    return run


def _answer(request: Path, added: Mapping[str, Sequence[str]]) -> None:
    """Do what a stand-in was asked for."""
    name, folder, *words = request.read_text().split("\0")[:-1]
    words += added.get(words[0], ())
    with contextlib.chdir(folder):
        code, out, err = {"histograph": _histograph, "python": _python}[name](words)
    request.with_name(f"{request.name}.out").write_text(out)
    request.with_name(f"{request.name}.err").write_text(err)
    request.with_name(f"{request.name}.reply").write_text(f"{code}\n")


def _histograph(words: list[str]) -> tuple[int, str, str]:
    from histograph_cli.app import app

    result = CliRunner().invoke(app, words)
    unexpected = result.exception and not isinstance(result.exception, SystemExit)
    trace = "".join(traceback.format_exception(result.exception)) if unexpected else ""
    return result.exit_code, result.stdout, result.stderr + trace


def _python(words: list[str]) -> tuple[int, str, str]:
    out, before = io.StringIO(), sys.argv
    try:
        sys.argv = words
        with contextlib.redirect_stdout(out):
            runpy.run_path(words[0], run_name="__main__")
    except Exception:
        return 1, out.getvalue(), traceback.format_exc()
    finally:
        sys.argv = before
    return 0, out.getvalue(), ""


#: Loaded once, in the process that others are copied from.
_LOADED = (
    *("optuna", "torch_geometric.nn", "histograph_post.caches.caching"),
    *(f"histograph_post.experiments.{name}" for name in ("finetuning", "head_training", "trials")),
    *("histograph_post.data.synthetic", "histograph_post.heads.set_pooling"),
)

Forked = Callable[..., int]


@pytest.fixture(scope="session")
def forked() -> Forked:
    """Run code in a process of its own, a copy of one that has loaded torch and computed nothing.

    Called as ``forked(code, name=value, ...)``, with the names that the code uses; returns the exit
    code, or minus the number of the signal that ended it. Loading torch anew would take seconds.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_LOADED])

    def run(code: str, **names: object) -> int:
        process = context.Process(target=exec, args=(code, names))
        process.start()
        process.join()
        assert process.exitcode is not None
        return process.exitcode

    return run


_KILLED = """
import os, signal
from histograph_post.experiments.head_training import compare, train_head
from histograph_post.training.loop import train_resumably
from histograph_post.training.options import TrainingOptions
train_resumably.__kwdefaults__["save_every"] = 0.0  # these epochs take milliseconds
epochs = 0
def epoch_done(progress):
    global epochs
    epochs += 1
    if epochs == moment:
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def killed_training(forked: Forked) -> Callable[[str, Path, Path, int], int]:
    """Train in a process that is killed after an epoch; return its exit code.

    Called as ``killed_training(words, cache, out, moment)``: the words of Python train with
    ``cache``, ``out`` and ``on_epoch=epoch_done``; epochs are counted from 1, 0 is never. What is
    not to be killed needs no process of its own.
    """

    def run(words: str, cache: Path, out: Path, moment: int) -> int:
        if moment == 0:
            import histograph_post as hg

            names = ("compare", "train_head", "TrainingOptions")
            given = {"cache": cache, "out": out, "epoch_done": None}
            exec(words, {**{name: getattr(hg, name) for name in names}, **given})
            return 0
        return forked(_KILLED + words, cache=cache, out=out, moment=moment)

    return run
