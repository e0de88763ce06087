"""How to repeat a run: every command from the checkpoint on, as a user would type them."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import HistographError
from .run import CONFIG_NAME, Run

#: Arguments of a command that have no flag.
_POSITIONAL = ("cache", "source", "folder")

#: Options that are on unless they are turned off.
_SWITCHES = ("standardize", "normalize", "baseline", "calibrate")


#: Characters of a line that is folded.
_WIDTH = 88


def repeat_commands(run: Run) -> str:
    """Return the commands, or Python calls, that give a run again: ``cache`` first."""
    steps = [_folded(step) for step in (*_steps_before(run), run_command(run))]
    if run.config is not None:
        saved = shlex.quote(str(run.folder / CONFIG_NAME))
        steps.append(
            f"# the last one, from its saved options\nhistograph {run.kind} --config {saved}"
        )
    return "\n\n".join(steps)


def _folded(command: str) -> str:
    """Return a command in lines that a page can show, each option beside its value."""
    lines = [""]
    for part in re.split(r" (?=-)", command) if command.startswith("histograph") else [command]:
        if lines[-1] and len(lines[-1]) + len(part) > _WIDTH:
            lines.append(f"    {part}")
        else:
            lines[-1] += f" {part}" if lines[-1] else part
    return " \\\n".join(lines)


def _steps_before(run: Run) -> list[str]:
    """Return how to make what the run began with: a cache, or the run that it continues."""
    if run.kind == "pretrain":
        return []
    before = _run_before(run)
    if before is not None:
        return [*_steps_before(before), run_command(before)]
    folder = run.backbone.cache
    try:
        options = tomllib.loads((folder / CONFIG_NAME).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError):
        weights = run.backbone.model.weights_sha256[:12]
        if run.config is not None:
            return [f"# first, a cache of the weights {weights}... as {folder.name}"]
        data = run.backbone.data.spec
        call = f"hg.cache(model, hg.load_data({data!r}), {folder.name!r})"
        return [f"import histograph_post as hg\n\n{call}  # a model with weights {weights}..."]
    return [_typed("cache", options)]


def _run_before(run: Run) -> Run | None:
    """Return the run that this one continues, if it is still there."""
    source = (run.config or {}).get("source")
    try:
        return None if source is None else Run.open(Path(str(source))).require_readouts()
    except HistographError:
        return None


def run_command(run: Run) -> str:
    """Return the command that gives a run again, or the call, as a user would write it."""
    return _python_call(run) if run.config is None else _typed(run.kind, run.config)


def _typed(name: str, options: Mapping[str, Any]) -> str:
    """Return a command with its resolved options."""
    words = ["histograph", name, *(str(options[each]) for each in _POSITIONAL if each in options)]
    for option, value in options.items():
        if option not in _POSITIONAL:
            words += _flags(option, value)
    return shlex.join(words)


def _python_call(run: Run) -> str:
    head = next((h for h in run.plan.get("heads", []) if h.get("name") == run.head), None)
    options = {} if head is None else head.get("options", {})
    compared = [each.get("name", "") for each in run.plan.get("heads", [])]
    arguments = [
        repr(run.backbone.cache.name),
        repr(run.name),
        f"heads={compared!r}" if run.kind == "compare" else f"head={run.head!r}",
        f"seeds={tuple(run.plan.get('seeds', (0,)))!r}",
        f"training=hg.TrainingOptions(**{dict(run.plan.get('training', {}))!r})",
        *(f"{name}={value!r}" for name, value in options.items()),
    ]
    function = "compare" if run.kind == "compare" else "train_head"
    return f"hg.{function}({', '.join(arguments)})"


def _flags(name: str, value: Any) -> list[str]:
    flag = "-o" if name == "out" else f"--{name.replace('_', '-')}"
    if value is True:
        return [flag]
    if value is False:
        return [f"--no-{name}"] if name in _SWITCHES else []
    if isinstance(value, list):
        return [word for item in value for word in (flag, str(item))]
    return [flag, str(value)]
