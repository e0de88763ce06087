"""Everything that is measured, by name."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from histograph_post.errors import ConfigError

from .caches import caching, half_precision, reading
from .epochs import deep_epochs, ladder, molecule_epochs, padded_epoch
from .head_steps import head_steps, transformer_steps
from .measuring import Ratio
from .resources import limited_epochs, side_by_side
from .workloads import Sizes, Workloads

#: Measures one thing, and returns a line of the table for each comparison.
Measurement = Callable[[Workloads], list[Ratio]]

MEASUREMENTS: Mapping[str, Measurement] = {
    "head-step": head_steps,
    "padded-epoch": padded_epoch,
    "transformer": transformer_steps,
    "deep-epoch": deep_epochs,
    "molecule-epoch": molecule_epochs,
    "ladder": ladder,
    "reading": reading,
    "caching": caching,
    "memory-limit": limited_epochs,
    "half-precision": half_precision,
    "jobs": side_by_side,
}


def chosen_names(only: str | None) -> list[str]:
    """Return the measurements that are asked for, all by default.

    Args:
        only: Names, separated by commas.
    """
    if only is None:
        return list(MEASUREMENTS)
    names = [name.strip() for name in only.split(",")]
    for name in names:
        if name not in MEASUREMENTS:
            raise ConfigError(f"only: found {name!r}, expected some of {', '.join(MEASUREMENTS)}")
    return names


def run_suite(
    names: Sequence[str],
    *,
    sizes: Sizes,
    data_root: Path | None = None,
    on_start: Callable[[str, int], None] | None = None,
) -> Iterator[Ratio]:
    """Measure one thing after the other.

    Args:
        names: Of :data:`MEASUREMENTS`.
        sizes: How much is run.
        data_root: Real data; generated graphs without it.
        on_start: Called with the name of every measurement before it starts, and how many are done.
    """
    with tempfile.TemporaryDirectory(prefix="histograph-bench-") as folder:
        work = Workloads(Path(folder), sizes, data_root)
        for done, name in enumerate(names):
            if on_start is not None:
                on_start(name, done)
            yield from MEASUREMENTS[name](work)
