"""What to type: an example of each command, where its output goes, and the command to run next."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from histograph_post.heads.registry import head_names, registered_heads
from histograph_post.runs.run import Run
from histograph_post.utils.specifications import IN_MEMORY, is_built_in

#: The headings of `histograph --help`.
_TRAIN, _USE, _LOOK = "Train", "Use", "Look"

#: Of each command: its heading, and an example of what to type after `histograph`.
COMMANDS = {
    "pretrain": (_TRAIN, "pretrain --model gin --data tu:MUTAG --folds 10"),
    "cache": (_TRAIN, "cache --model my_model.py:Net --checkpoint model.ckpt --data tu:MUTAG"),
    "train-head": (_TRAIN, "train-head mutag.cache --seeds 0-4"),
    "compare": (_TRAIN, "compare mutag.cache --heads mean,concat,histograph"),
    "tune": (_TRAIN, "tune mutag.cache --trials 30"),
    "finetune": (_TRAIN, "finetune runs/mutag-histograph --unfreeze-last 2"),
    "predict": (_USE, "predict runs/mutag-histograph --data new_graphs.pt"),
    "embed": (_USE, "embed runs/mutag-histograph --data new_graphs.pt"),
    "export": (_USE, "export runs/mutag-histograph -o head.pt2"),
    "report": (_LOOK, "report runs/mutag-histograph"),
    "inspect": (_LOOK, "inspect model.ckpt --model my_model.py:Net --data tu:MUTAG"),
    "verify": (_LOOK, "verify mutag.cache"),
    "trust": (_LOOK, "trust runs/mutag-histograph"),
    "recipes": (_LOOK, "recipes pretrain-gnns"),
    "bench": (_LOOK, "bench"),
    "demo": (_LOOK, "demo"),
}

#: Where the output of a command goes without -o, as its help says it: capitals are options.
DEFAULT_OUTPUTS = {
    "pretrain": "backbones/DATA-MODEL",
    "cache": "DATA-MODEL.cache, or FOLDER.caches for a folder",
    "train-head": "runs/CACHE-HEAD",
    "compare": "runs/CACHE-readouts",
    "tune": "runs/CACHE-HEAD-tuned",
    "finetune": "runs/SOURCE-finetuned",
    "predict": "RUN-predictions.csv",
    "embed": "RUN-vectors.npz",
    "export": "RUN.pt2, or RUN-whole with --whole",
}


def default_output(command: str, given: Mapping[str, Any]) -> Path:
    """Return where the output of a command with these options goes if the user does not say."""
    usual, _, other = DEFAULT_OUTPUTS[command].partition(", or ")
    place = other.split()[0] if given.get("folder") or given.get("whole") else usual
    return Path(re.sub("[A-Z]+", lambda found: _name(given[found[0].lower()] or found[0]), place))


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


# --- the command to run next, ready to be copied: with the flags it needs, quoted for the shell


def command(*words: object, **flags: Any) -> str:
    """Return a command as the shell takes it.

    Args:
        words: The command and its arguments; paths and globs are quoted.
        flags: Options by the names of their parameters: those that are on, given, and not "auto".
    """
    return " ".join(["histograph", *(shlex.quote(str(word)) for word in words), *_shown(flags)])


def _shown(flags: Mapping[str, Any]) -> list[str]:
    parts = []
    for name, value in flags.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            parts.append(flag)
        elif value not in (None, False, "auto"):
            values = value if isinstance(value, (list, tuple)) else [value]
            parts += [f"{flag} {shlex.quote(str(each))}" for each in values]
    return parts


def train_command(cache: Path) -> str:
    """Return how to train a head on a cache, or on the caches in a folder."""
    return command("train-head", cache) + " -o RUN"


def next_command(run: Run) -> str | None:
    """Return what to do with a run that has just ended: predict, unless its verdict is against it.

    That is, to keep the own readout, or to use another head. A run with fits that are left to other
    jobs has none.
    """
    if not run.is_finished:
        return None
    verdict = run.verdict
    against = verdict.decision == "keep" or verdict.readout != run.head
    return report_command(run) if against else predict_command(run.folder)


def predict_command(run: Path, *, named: bool = True) -> str:
    """Return how to predict with a run.

    Args:
        run: The run, or an export of it.
        named: Show the recorded specification of a model that is code, not ``SPEC``: for runs that
            were made just now, not for those that may come from anybody.
    """
    opened = Run.of(run)
    backbone = opened.backbone
    made_in = None if backbone.provenance is None else backbone.provenance.folder
    flags: dict[str, Any] = _code({"model": backbone.model.spec}, named=named, made_in=made_in)
    flags["head"] = _own_head(opened)
    if named and not backbone.in_run:
        # Not --trust-checkpoint: what the user trusts is remembered, and a cache may come from
        # anybody.
        flags["key_map"] = backbone.option_path("key_map")
    return command("predict", run, **flags, data="SPEC") + " -o predictions.csv"


def report_command(run: Run) -> str:
    """Return how to report on a run."""
    return command("report", run.folder, head=_own_head(run))


def _own_head(run: Run) -> str | None:
    """Return how the next command names the readout of a run, if that is code of the user's."""
    name, own = run.stored_head["head"], {info.name: info.code for info in registered_heads()}
    return own[name] if name in own else None if name in head_names() else "SPEC"


def cache_command(
    folder: Path, *, model: str | None = None, data: str | None = None, named: bool = True
) -> str:
    """Return how to cache the backbones that were trained in a folder.

    Args:
        folder: What ``pretrain`` or ``finetune`` wrote.
        model: How the model was named, if not as it is recorded.
        data: How the data were named, if not as they are recorded.
        named: Show recorded specifications that are code, not ``SPEC``.
    """
    made_in = None
    if model is None or data is None:
        recorded = Run.of(folder).backbone
        model, data = model or recorded.model.spec, data or recorded.data.spec
        made_in = None if recorded.provenance is None else recorded.provenance.folder
    flags = _code({"model": model, "data": data}, named=named, made_in=made_in)
    return f"{command('cache', folder, **flags)} -o CACHES"


def _code(specs: dict[str, str], *, named: bool, made_in: str | None) -> dict[str, str]:
    """Return the flags that name code, which the next command does not take from a file."""
    return {
        what: _from_here(spec, made_in) if named and spec != IN_MEMORY else "SPEC"
        for what, spec in specs.items()
        if not is_built_in(what, spec)  # type: ignore[arg-type]  # model and data
    }


def _from_here(spec: str, made_in: str | None) -> str:
    """Return ``file.py:Name`` with the folder that its name started from, if that is another."""
    if made_in is None or Path(spec.rpartition(":")[0]).is_file():
        return spec
    there = Path(made_in, spec)
    return str(there) if Path(str(there).rpartition(":")[0]).is_file() else spec
