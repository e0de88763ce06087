"""`histograph demo`: every step on generated data, as the commands a user would type."""

from __future__ import annotations

import io
import json
import shlex
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from histograph_post.utils.text import score

from . import options as opt
from .terminal import Terminal

#: How both backbones are trained: alike, so that depth is all that differs.
_PRETRAINING = ("--split", "stratified:0.6,0.1,0.3", "--epochs", "20")
#: How every readout is trained.
_HEAD = ("--dim", "32", "--epochs", "20", "--lr", "3e-3")
_READOUTS = {
    "mean": "mean of its last layer, retrained",
    "concat": "linear map of the means of all layers",
    "histograph": "HistoGraph",
}

_OWN_CHECKPOINT = """\
With a checkpoint of your own, look first, then take the same steps:

  histograph inspect model.ckpt --model my_model.py:Net --data tu:MUTAG \\
      --data-root DIR
  histograph cache --model my_model.py:Net --checkpoint model.ckpt \\
      --data tu:MUTAG --data-root DIR -o mutag.cache
  histograph train-head mutag.cache -o runs/mutag
"""


@dataclass(frozen=True)
class Step:
    """A command of the demo, and what it is for."""

    why: str
    arguments: tuple[str, ...]

    @property
    def command(self) -> str:
        """What the user would type."""
        return f"histograph {shlex.join(self.arguments)}"


def demo(
    terminal: Terminal,
    out: Annotated[
        Path, typer.Option("-o", "--out", metavar="DIR", help="Folder to write.")
    ] = Path("demo"),
    num_graphs: Annotated[
        int | None,
        typer.Option(min=30, help="Graphs to generate, 600 by default; fewer are quicker."),
    ] = None,
    overwrite: opt.OverwriteOption = False,
) -> None:
    """Run all steps on generated data, in about a minute; no downloads and no files are needed.

    A deep backbone has smoothed away what its early layers knew, and a readout over all layers
    recovers it. Every step is printed as the command to type for a checkpoint of your own.
    """
    from histograph_post.errors import OutputExistsError
    from histograph_post.experiments.workers import limited_threads
    from histograph_post.utils.outputs import OutputLock

    has_report = find_spec("matplotlib") is not None
    last = out / ("compare/report.html" if has_report else "finetuned/results.json")
    steps, results = demo_steps(out, num_graphs), []
    with OutputLock(out), limited_threads(1):
        if last.exists() and not overwrite:
            raise OutputExistsError(
                f"{out}: found an older demo; choose another -o, or --overwrite"
            )
        terminal.info(
            "Everything runs on one thread, as with OMP_NUM_THREADS=1, so that the scores do not "
            "depend on your number of cores: more threads round differently."
        )
        for number, step in enumerate(steps if has_report else steps[:-1], start=1):
            terminal.info(f"\n{number}. {step.why}")
            terminal.command(f"$ {step.command}")
            results.append(_type(terminal, step, overwrite=overwrite))
    _show(terminal, out)
    if not has_report:
        terminal.info(
            f"The report needs matplotlib: pip install 'histograph-post[report]', then "
            f"{steps[-1].command}"
        )
    terminal.info(_OWN_CHECKPOINT)
    terminal.result(
        {
            "demo": str(out),
            "steps": [
                {"command": step.command, "result": result}
                for step, result in zip(steps, results, strict=False)
            ],
        },
        next_command=f"open {out / 'compare' / 'report.html'} in a browser" if has_report else None,
    )


def demo_steps(out: Path, num_graphs: int | None = None) -> list[Step]:
    """Return the commands of the demo, in order; the last one writes the report."""
    data = ["--data", "demo:"]
    data += [] if num_graphs is None else ["--data-args", f"num_graphs={num_graphs}"]

    def pretrain(num_layers: int, folder: str) -> list[str]:
        sizes = [f"num_layers={num_layers}", "hidden=32", "residual=none"]
        model = ["--model", "gcn", *(word for size in sizes for word in ("--model-args", size))]
        return ["pretrain", *model, *data, *_PRETRAINING, "-o", str(out / folder)]

    fold, cache, head = out / "deep" / "fold-0", out / "deep.cache", out / "head"
    checkpoint = ["--checkpoint", str(fold / "model.safetensors")]
    split = ["--split", str(fold / "splits.json")]
    commands = {
        "A shallow network, to see how well one can do on this data": pretrain(2, "shallow"),
        "A deep one, standing for a checkpoint that averaged too often": pretrain(32, "deep"),
        "Run that checkpoint once and cache what every layer computed": [
            *("cache", "--model", "gcn", *checkpoint, *data, *split, "-o", str(cache))
        ],
        "Train a readout over all layers; the backbone does not change": [
            *("train-head", str(cache), *_HEAD, "-o", str(head))
        ],
        "Compare three readouts on the same cache": [
            *("compare", str(cache), "--heads", ",".join(_READOUTS), *_HEAD, "--seeds", "0-2"),
            *("-o", str(out / "compare")),
        ],
        "Train the backbone, too, for a few epochs": [
            *("finetune", str(head), "--epochs", "5", "-o", str(out / "finetuned"))
        ],
        "Write a report": ["report", str(out / "compare")],
    }
    return [Step(why, tuple(arguments)) for why, arguments in commands.items()]


def _type(terminal: Terminal, step: Step, *, overwrite: bool) -> Any:
    """Run a command as if it had been typed; return its JSON object if that was asked for."""
    from .app import app

    arguments = [*step.arguments, *(["--overwrite"] if overwrite else [])]
    arguments += ["--quiet"] if terminal.quiet else []
    arguments += ["--json"] if terminal.json else []
    collected = io.StringIO()
    with redirect_stdout(collected if terminal.json else terminal.stdout):
        code = typer.main.get_command(app).main(arguments, "histograph", standalone_mode=False)
    if code:
        raise typer.Exit(code)
    return json.loads(collected.getvalue()) if terminal.json else None


def _show(terminal: Terminal, out: Path) -> None:
    """Print what the demo found, in one table."""
    from histograph_post.runs.run import Run
    from histograph_post.runs.verdict import reported

    def found(folder: str, readout: str | None = None) -> str:
        results = Run.open(out / folder).results
        row = results if readout is None else reported(results["readouts"][readout])
        return score(row["test"]["mean"])

    tuned = Run.open(out / "finetuned").results["head"]
    terminal.table(
        "What the demo found: test accuracy",
        ["readout", "accuracy"],
        [
            ["a GCN of 2 layers, its own mean pool", found("shallow")],
            ["a GCN of 32 layers, its own mean pool", found("deep")],
            *([f"    {label}", found("compare", name)] for name, label in _READOUTS.items()),
            ["    HistoGraph, backbone trained too", found("finetuned", tuned)],
        ],
    )
