"""What is attacked: every command that writes, on a workspace of tiny data."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

import histograph_post as hg
from histograph_cli.app import app
from histograph_post.utils.files import sha256_file

DATA = ("--data", "demo:", "--data-args", "num_graphs=36")
MODEL = ("--model", "gin", "--model-args", "hidden=4", "--model-args", "num_layers=2")
TRAIN = ("--epochs", "2", "--jobs", "1", "-q")
SPLIT = ("--split", "random:0.5,0.25,0.25")


#: Made once: that takes as long as a short command.
_HISTOGRAPH = typer.main.get_command(app)


def give(*words: object) -> None:
    """Give a command in this process; raise its exit code if that is not 0."""
    code = _HISTOGRAPH.main([str(word) for word in words], "histograph", standalone_mode=False)
    if code:
        raise SystemExit(code)


def cache_by_shards(
    work: Path, out: Path, *, jobs: int = 1, overwrite: bool = False, seed: int = 0
) -> None:
    """Write a cache of several shards, of a model in memory, in one job or in several."""
    from ..helpers import make_model

    dataset = hg.load_data("demo:", args={"num_graphs": 36})
    model, sizes = make_model(seed=seed, hidden=4), {"shard_bytes": 12_000, "node_budget": 300}
    try:
        for job in range(jobs):
            hg.cache(model, dataset, out, part=(job, jobs), overwrite=overwrite, **sizes)
    except OSError as error:  # what a command would make of it
        print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
        raise SystemExit(1) from None


@dataclass(frozen=True)
class Command:
    """A command that is given, killed and given again.

    Args:
        name: What the table calls it.
        run: Does it, in the workspace, with this output.
        before: Puts there what it is to replace.
        suffix: Of the output, if it is a file that needs one.
        alone: Whether its own process does all the writing, where every operation can be seen.
    """

    name: str
    run: Callable[[Path, Path], None]
    before: Callable[[Path, Path], None] | None = None
    suffix: str = ""
    alone: bool = True


def typed(*words: object) -> Callable[[Path, Path], None]:
    """Return what gives a command; ``{work}`` stands for the workspace, the output is added."""

    def run(work: Path, out: Path) -> None:
        give(*(str(word).replace("{work}", str(work)) for word in words), "-o", out)

    return run


def one_after_the_other(*commands: Callable[[Path, Path], None]) -> Callable[[Path, Path], None]:
    """Return what gives several commands with the same output."""

    def run(work: Path, out: Path) -> None:
        for command in commands:
            command(work, out)

    return run


def trust(work: Path, out: Path) -> None:
    """Approve the code that a run names; the list of what is trusted is the output."""
    os.environ["XDG_STATE_HOME"] = str(out)
    give("trust", work / "own", "--yes", "-q")


PRETRAIN = ("pretrain", *MODEL, *DATA, "--folds", "3", *TRAIN)
READOUT = ("--head", "set2set", "--dim", "4")
TRAIN_HEAD = ("train-head", "{work}/a.cache", *READOUT, "--seeds", "0", *TRAIN)
COMPARE = ("compare", "{work}/a.cache", "--heads", "mean,probe", "--dim", "4", "--seeds", "0-1")
TUNE = ("tune", "{work}/a.cache", "--trials", "5", "--seeds", "0", *READOUT[:2], *TRAIN)
FINETUNE = ("finetune", "{work}/run", *TRAIN)
EXPORT = ("export", "{work}/run", "-q")
PREDICT = ("predict", "{work}/run", *DATA, "-q")
REPORT = ("report", "{work}/run", "-q")
CACHE = ("cache", "{work}/backbones/fold-0", "-q")


# A table whose graphs stay on disk, in blocks of a few rows.
TABLE = ("--data", "smiles:{work}/table.csv", "--data-args", "stream=true")
OF_TABLE = ("cache", "--checkpoint", "{work}/molecules/fold-0", *MODEL, *TABLE, *SPLIT, "-q")
PREDICT_TABLE = ("predict", "{work}/of-molecules", *TABLE, "-q")
OWN_HEAD = Path(__file__).parents[2] / "examples" / "my_head.py"


def prepare(work: Path) -> None:
    """Make what the commands read: backbones, caches, runs and a table of molecules."""
    rows = [f"{'C' * (1 + row % 7)}O,{row % 2}" for row in range(36)]
    (work / "table.csv").write_text("\n".join(["smiles,y", *rows]))

    def make(name: str, *words: object) -> None:
        typed(*words)(work, work / name)

    make("backbones", *PRETRAIN)
    make("a.cache", *CACHE)
    make("run", *TRAIN_HEAD)
    make("own", *TRAIN_HEAD, "--head", f"{OWN_HEAD}:MeanAndMax")
    make("molecules", "pretrain", *MODEL, *TABLE, *SPLIT, *TRAIN)
    make("molecules.cache", *OF_TABLE)
    make("of-molecules", "train-head", "{work}/molecules.cache", *READOUT, *TRAIN)


COMMANDS = (
    Command("cache", typed(*CACHE)),
    Command("cache, several shards", cache_by_shards),
    Command("cache --shard", lambda work, out: cache_by_shards(work, out, jobs=2)),
    Command("cache --compress", typed(*CACHE, "--compress")),
    Command("cache, all folds", typed("cache", "{work}/backbones", "-q")),
    Command("cache, a table on disk", typed(*OF_TABLE, "--workers", "0")),
    Command("cache --workers 2", typed(*OF_TABLE, "--workers", "2"), alone=False),
    Command("cache --jobs 2", typed(*CACHE, "--jobs", "2"), alone=False),
    Command("pretrain", typed(*PRETRAIN)),
    Command("pretrain --head", typed(*PRETRAIN, *READOUT)),
    Command("train-head", typed(*TRAIN_HEAD)),
    Command(
        "train-head --fits",
        one_after_the_other(*(typed(*TRAIN_HEAD, "--fits", f"{job}/2") for job in (0, 1))),
    ),
    Command("train-head --jobs 2", typed(*TRAIN_HEAD, "--jobs", "2"), alone=False),
    Command("compare", typed(*COMPARE, *TRAIN)),
    Command("tune", typed(*TUNE)),
    Command("finetune", typed(*FINETUNE)),
    Command("finetune, a cache", typed("finetune", "{work}/a.cache", *READOUT, *TRAIN)),
    Command("export --whole", typed(*EXPORT, "--whole")),
    Command("export", typed(*EXPORT), suffix=".pt2"),
    Command("predict", typed(*PREDICT)),
    Command("predict, a table on disk", typed(*PREDICT_TABLE, "--workers", "0")),
    Command("embed", typed("embed", *PREDICT[1:]), suffix=".npz"),
    Command("report", typed(*REPORT), suffix=".html"),
    Command(
        "report --figures",
        lambda work, out: typed(*REPORT, "--figures", out)(work, Path(f"{out}.html")),
    ),
    Command("demo", typed("demo", "--num-graphs", "30", "-q")),
    Command("trust", trust),
    Command(
        "cache --overwrite",
        lambda work, out: cache_by_shards(work, out, overwrite=True),
        before=lambda work, out: cache_by_shards(work, out, seed=1),
    ),
    Command(
        "train-head --overwrite",
        typed(*TRAIN_HEAD, "--overwrite"),
        before=typed(*TRAIN_HEAD, "--lr", "0.5"),
    ),
    Command(
        "tune --overwrite",
        typed(*TUNE, "--overwrite"),
        before=typed(*TUNE, "--search-seed", "5"),
    ),
    Command(
        "export --whole --overwrite",
        typed(*EXPORT, "--whole", "--overwrite"),
        before=typed(*EXPORT, "--whole"),
    ),
    Command(
        "predict --overwrite",
        typed(*PREDICT, "--overwrite"),
        before=typed("predict", "{work}/run", "--data", "demo:", "-q"),
    ),
)

#: Files whose bytes are other ones every time: a clock is in them.
_CLOCKED = re.compile(r"study\.log|.*\.pt2")


def contents(folder: Path) -> dict[str, Any]:
    """Return all there is below a folder, without what depends on a clock or on the folder."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_dir():
            found[name] = "a folder"
        elif _CLOCKED.fullmatch(path.name):
            found[name] = "a file"
        elif path.name == "fit.json":
            stored = json.loads(path.read_text())
            found[name] = {k: v for k, v in stored.items() if k != "seconds_per_epoch"}
        elif path.name == "SHA256SUMS":
            sums = dict(line.split("  ")[::-1] for line in path.read_text().splitlines())
            wrong = [own for own, value in sums.items() if _hash(path.parent / own) != value]
            found[name] = {"listed": sorted(sums), "wrong": wrong}
        else:
            text = path.read_bytes()
            found[name] = text.replace(str(folder).encode(), b"OUT")
    return found


def _hash(path: Path) -> str | None:
    """Return the hash of a file; None if it is not there yet."""
    return sha256_file(path) if path.is_file() else None


def difference(expected: Mapping[str, Any], found: Mapping[str, Any]) -> str | None:
    """Say in what two folders differ; None if in nothing."""
    names = sorted(expected.keys() ^ found.keys())
    if names:
        return f"{'no' if names[0] in expected else 'left behind:'} {names[0]}"
    for name, value in expected.items():
        if found[name] != value:
            return f"other contents of {name}"
    return None


def clear(folder: Path) -> Path:
    """Return an empty folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder
