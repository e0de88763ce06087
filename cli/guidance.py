"""What a command's help shows besides its options: its place, an example, and where output goes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

#: The headings of `histograph --help`.
_TRAIN, _USE, _LOOK = "Train", "Use", "Look"

#: Of each command: its heading, and a call that can be copied.
_COMMANDS = {
    "pretrain": (_TRAIN, "histograph pretrain --model gin --data tu:MUTAG --folds 10"),
    "cache": (
        _TRAIN,
        "histograph cache --model my_model.py:Net --checkpoint model.ckpt --data tu:MUTAG",
    ),
    "train-head": (_TRAIN, "histograph train-head mutag.cache --seeds 0-4"),
    "compare": (_TRAIN, "histograph compare mutag.cache --heads mean,concat,histograph"),
    "tune": (_TRAIN, "histograph tune mutag.cache --trials 30"),
    "finetune": (_TRAIN, "histograph finetune runs/mutag-histograph --unfreeze-last 2"),
    "predict": (_USE, "histograph predict runs/mutag-histograph --data new_graphs.pt"),
    "embed": (_USE, "histograph embed runs/mutag-histograph --data new_graphs.pt -o vectors.npz"),
    "export": (_USE, "histograph export runs/mutag-histograph -o head.pt2"),
    "report": (_LOOK, "histograph report runs/mutag-histograph"),
    "inspect": (
        _LOOK,
        "histograph inspect model.ckpt --model my_model.py:Net --data tu:MUTAG",
    ),
    "verify": (_LOOK, "histograph verify mutag.cache"),
    "recipes": (_LOOK, "histograph recipes pretrain-gnns"),
    "bench": (_LOOK, "histograph bench"),
    "demo": (_LOOK, "histograph demo"),
}

#: Where the output of a command goes without -o, as its help says it.
DEFAULT_OUTPUTS = {
    "pretrain": "backbones/DATA-MODEL",
    "cache": "DATA-MODEL.cache, of a folder FOLDER.caches",
    "train-head": "runs/CACHE-HEAD",
    "compare": "runs/CACHE-readouts",
    "tune": "runs/CACHE-HEAD-tuned",
    "finetune": "runs/SOURCE-finetuned",
    "predict": "RUN-predictions.csv",
    "export": "RUN.pt2, with --whole RUN-whole",
}


def help_panel(command: str) -> str | None:
    """Return the heading that a command stands under."""
    found = _COMMANDS.get(command)
    return None if found is None else found[0]


def example(command: str) -> str | None:
    """Return a call of a command, for the end of its help."""
    found = _COMMANDS.get(command)
    return None if found is None else f"Example: {found[1]}"


def default_output(command: str, given: Mapping[str, Any]) -> Path:
    """Return where the output of a command goes if the user does not say.

    Args:
        command: One of :data:`DEFAULT_OUTPUTS`.
        given: Its options and arguments.
    """
    head = _name(given.get("head") or "")
    if command in ("pretrain", "cache"):
        if given.get("folder") is not None:
            return Path(f"{_name(given['folder'])}.caches")
        both = f"{_name(given['data'] or 'data')}-{_name(given['model'] or 'model')}"
        return Path("backbones") / both if command == "pretrain" else Path(f"{both}.cache")
    if command == "predict":
        return Path(f"{_name(given['run'])}-predictions.csv")
    if command == "export":
        return Path(f"{_name(given['run'])}{'-whole' if given['whole'] else '.pt2'}")
    if command == "finetune":
        return Path("runs") / f"{_name(given['source'])}-finetuned"
    cache = _name(given["cache"])
    ending = {"train-head": head, "compare": "readouts", "tune": f"{head}-tuned"}[command]
    return Path("runs") / f"{cache}-{ending}"


def _name(specification: object) -> str:
    """Return a specification or a path as part of a file's name: `tu:MUTAG` is `mutag`."""
    text = str(specification)
    kind, colon, name = text.rpartition(":")
    text = (name or kind) if colon else text
    path = Path(text)
    place = path.resolve() if path.exists() else path
    # fold-0.cache alone would be the name of many.
    parts = [place.parent.name, place.stem] if place.stem.startswith("fold-") else [place.stem]
    return re.sub(r"[^a-z0-9.+]+", "-", "-".join(parts).lower()).strip("-.") or "run"
