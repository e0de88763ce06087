"""`histograph bench`: what the cache and the head save on this machine."""

from __future__ import annotations

import os
import platform
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from histograph_post.errors import ConfigError
from histograph_post.utils.text import duration

from . import options as opt
from .terminal import Terminal

if TYPE_CHECKING:
    from pathlib import Path

    from histograph_benchmarks.measuring import Ratio
    from histograph_benchmarks.workloads import Sizes

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
    device: Annotated[
        str,
        typer.Option(
            "--device", help="Time a GPU (cuda, mps) against the CPU instead: cache and head."
        ),
    ] = "cpu",
) -> None:
    """Compare the speed of this tool with a literal implementation and others, on this machine.

    All take turns in one process; peak memory is measured in separate processes. Without
    --data-root, graphs of the same sizes as the named data sets are generated.
    """
    from histograph_benchmarks.suite import chosen_names, run_suite
    from histograph_benchmarks.workloads import QUICK, Sizes

    names = chosen_names(only)
    sizes = QUICK if quick else Sizes()
    machine = _machine()
    if device != "cpu":
        sizes = sizes if rounds is None else replace(sizes, rounds=rounds)
        _bench_device(terminal, device, sizes, data_root)
        return
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


def _bench_device(terminal: Terminal, name: str, sizes: Sizes, data_root: Path | None) -> None:
    """Print the seconds of a device beside those of the CPU."""
    from histograph_benchmarks.resources import time_device
    from histograph_post.utils.machine import resolve_device

    device = resolve_device(name)
    if device.type == "cpu":
        raise ConfigError(f"device: found {name}, which is the CPU here, expected cuda or mps")
    found = time_device(device, sizes, data_root)
    terminal.table(
        f"Seconds on {device} and on the CPU",
        ["what", "cpu", str(device), "ratio"],
        [
            [each.what, f"{each.cpu:.3f}", f"{each.device:.3f}", f"{each.cpu / each.device:.2f}x"]
            for each in found
        ],
    )
    terminal.result(
        {"machine": {**_machine(), "device": str(device)}, "timings": [vars(t) for t in found]},
        next_command="histograph bench",
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
