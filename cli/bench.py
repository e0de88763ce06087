"""`histograph bench`: what the cache and the head save on this machine."""

from __future__ import annotations

import os
import platform
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import options as opt
from .terminal import Terminal, duration

if TYPE_CHECKING:
    from histograph_benchmarks.measuring import Ratio

#: Cores that other programs may keep busy before it is worth a note.
BUSY = 0.5


def bench(
    terminal: Terminal,
    only: Annotated[
        str | None,
        typer.Option(metavar="NAMES", help="Only these measurements, separated by commas."),
    ] = None,
    data_root: opt.DataRootOption = None,
    rounds: Annotated[
        int | None,
        typer.Option(min=1, help="Repeat every measurement N times and take the median."),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Small data and few repetitions: rough numbers.")
    ] = False,
) -> None:
    """Compare the speed of this tool with a literal implementation and others, on this machine.

    They take turns in one process; peak memory is measured in separate processes. Without
    --data-root, graphs of the same sizes as the named data sets are generated.
    """
    from histograph_benchmarks.suite import chosen_names, run_suite
    from histograph_benchmarks.workloads import QUICK, Sizes

    names = chosen_names(only)
    sizes = QUICK if quick else Sizes()
    machine = _machine()
    if machine["load"] > BUSY:
        terminal.note(
            f"other programs keep {machine['load']:.1f} of {machine['cores']} cores busy; "
            "the ratios differ from those of a quiet machine"
        )
    started = time.monotonic()

    def started_one(name: str, done: int) -> None:
        left = (time.monotonic() - started) / done * (len(names) - done) if done else None
        more = "" if left is None else f", about {duration(left)} left"
        terminal.info(f"[{done + 1}/{len(names)}] {name}{more}")

    ratios = list(
        run_suite(
            names,
            sizes=sizes if rounds is None else replace(sizes, rounds=rounds),
            data_root=data_root,
            on_start=started_one,
        )
    )
    terminal.table(
        "The ratios of this machine",
        ["what", "against", "ratio", "bound", "ok"],
        [_row(ratio) for ratio in ratios],
    )
    for ratio in ratios:
        terminal.detail(f"{ratio.name}: {ratio.note}")
    terminal.result(
        {"machine": machine, "ratios": [ratio.to_json() for ratio in ratios]},
        next_command="histograph demo" if data_root else "histograph bench --data-root DIR",
    )


def _row(ratio: Ratio) -> list[object]:
    return [
        ratio.name,
        ratio.against,
        f"{ratio.ratio:.2f}x",
        f"{ratio.bound_kind} {ratio.bound:g}x",
        "yes" if ratio.holds else "no",
    ]


def _machine() -> dict[str, Any]:
    """Return what the numbers depend on besides the code."""
    import torch

    return {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0,
    }
