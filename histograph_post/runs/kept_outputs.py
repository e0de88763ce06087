"""Outputs that are written as they are computed, so that a killed prediction goes on.

A file of float64 rows, in the order of the graphs, under the hash of what they are predicted with
and of; it is left out of the final output, and removed with the rows beside which it stands.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np


class KeptOutputs:
    """The rows that are predicted so far.

    Args:
        folder: Where the file is.
        about: All that decides the outputs.
        out_dim: Columns of the outputs.
        spread_dim: Columns of how much heads differ; 0 of a single head.
    """

    def __init__(self, folder: Path, about: str, out_dim: int, spread_dim: int) -> None:
        key = hashlib.sha256(f"{about} {out_dim} {spread_dim}".encode()).hexdigest()
        self.path = folder / f"rows-{key[:16]}.outputs"
        self._widths = (out_dim, spread_dim)
        self._row_bytes = 8 * (out_dim + spread_dim)
        folder.mkdir(parents=True, exist_ok=True)
        self.path.touch()

    def __len__(self) -> int:
        return self.path.stat().st_size // self._row_bytes

    def cut(self, rows: int) -> None:
        """Forget what comes after so many rows, such as part of a batch."""
        with self.path.open("r+b") as file:
            file.truncate(rows * self._row_bytes)

    def append(self, outputs: np.ndarray, spread: np.ndarray | None) -> None:
        """Add the rows of a batch: ``[rows, out_dim]`` and ``[rows, spread_dim]``."""
        parts = [outputs] if spread is None else [outputs, spread]
        with self.path.open("ab") as file:
            file.write(np.concatenate(parts, axis=1, dtype="<f8").tobytes())

    def read(self) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the outputs as float32, as they were computed, and how much heads differ."""
        found = np.fromfile(self.path, "<f8").reshape(-1, sum(self._widths))
        outputs, spread = np.split(found, [self._widths[0]], axis=1)
        return outputs.astype(np.float32), spread if self._widths[1] else None
