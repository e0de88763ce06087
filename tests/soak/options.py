"""Absurd values for every argument and option of every command, as the commands declare them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from histograph_cli.app import app

from .attacks import Outcome
from .commands import (
    COMPARE,
    DATA,
    EXPORT,
    FINETUNE,
    MODEL,
    PREDICT,
    PRETRAIN,
    TRAIN,
    TRAIN_HEAD,
    TUNE,
    clear,
)
from .operations import attempt

#: Options with which a command may rightly work for ever.
_ENDLESS = ("epochs", "patience", "trials", "warmup", "budget", "num_folds", "repeats", "folds")

#: What is right of each command; one option or argument is then given an absurd value.
GIVEN: dict[str, Sequence[object]] = {
    "pretrain": PRETRAIN,
    "cache": ("cache", *MODEL, *DATA, "--checkpoint", "{work}/backbones/fold-0", "-q"),
    "train-head": TRAIN_HEAD,
    "compare": (*COMPARE, *TRAIN),
    "tune": TUNE,
    "finetune": FINETUNE,
    "predict": PREDICT,
    "embed": ("embed", *PREDICT[1:]),
    "export": (*EXPORT, "--whole"),
    "report": ("report", "{work}/run", "-q"),
    "inspect": ("inspect", "{work}/run"),
    "verify": ("verify", "{work}/a.cache"),
    "trust": ("trust", "{work}/run", "--yes"),
    "recipes": ("recipes",),
    "bench": ("bench", "--only", "cache"),
    "demo": ("demo", "--num-graphs", "36"),
}
_NUMBERS = (
    *("nan", "inf", "-1", "0", "1e400", str(10**12), str(10**30), "9" * 5000),
    *("x", "", "\x1b[2J", "\udcff"),
)
_TEXTS = (
    *("nan", "-1", "0", "1e400", str(10**12), "x", "", "\x1b[2J", "\udcff", "a\nb\x9b2J"),
    *("x" * 5000, "..", "0-1000000000", "9" * 5000, "{work}/pipe", "{work}/folder", "/dev/zero"),
    *("https://[x", "os:system", "kfold:" + "9" * 5000, "0/" + "9" * 5000, "9" * 400 + "GB"),
)
_ARGUMENTS = (
    *("mlp_layers=100000", "dim=nan", "dim=1e9", "dim=[]", "dim=\x1b[2J", "dim=" + "9" * 10**4),
    *("heads=-1", "hidden=1e400", "num_graphs=-1", "a" * 10**5, "=", "x=\udcff"),
    "a=" + "[" * 10**4,
)
#: By what the help shows for it; anything else is a text.
_ABSURD = {
    "N": (*_NUMBERS, "1e3", "1000000000"),
    "X": (*_NUMBERS, "-inf", "1e308", "1e-320"),
    "K=V": (*_TEXTS, *_ARGUMENTS),
}


def absurd_options(work: Path, name: str) -> Outcome:
    """Give every argument and option of a command every absurd value."""
    outcome = Outcome("absurd options", name)
    command: Any = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
    clear(work / "folder")
    (work / "pipe").unlink(missing_ok=True)
    os.mkfifo(work / "pipe")
    given = [str(word).replace("{work}", str(work)) for word in GIVEN[name]]
    writes = any("-o" in option.opts for option in command.params)
    for option in command.params:
        if getattr(option, "is_flag", False):
            continue
        flag, out = option.opts[0], ["-o", "out"] if writes and option.name != "out" else []
        for value in _ABSURD.get(option.metavar, _TEXTS):
            value = value.replace("{work}", str(work))
            os.chdir(clear(work / "trial"))  # where an output without a folder goes
            if option.param_type_name == "argument":
                words = [name, value, *given[2:], *out]
            else:
                words = [*given, *out, f"{flag}={value}" if flag != "-o" else f"-o{value}"]
            endless = option.name in _ENDLESS or name in ("bench", "demo")
            problem = attempt(words, work, endless=endless)
            outcome.count(None if problem is None else f"{flag}={value[:40]!r}: {problem}")
    os.chdir(work)
    return outcome
