"""TensorBoard event files: what every epoch measured, a folder per fit, while it is trained."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from histograph_post.errors import MissingExtraError

#: Seconds until what was written can be looked at.
_FLUSH_EVERY = 10


class EventFiles:
    """Writes the measurements of fits for TensorBoard (extra ``tensorboard``).

    Args:
        folder: Where they go; made with the first measurement.
    """

    def __init__(self, folder: str | Path) -> None:
        if find_spec("tensorboard") is None:
            raise MissingExtraError("--tensorboard", extra="tensorboard")
        self._folder = Path(folder)
        self._writers: dict[str, Any] = {}

    def write(self, name: str, measured: Mapping[str, float]) -> None:
        """Write the measurements of one epoch of the fit ``name``, such as ``mean/fold-0``."""
        from torch.utils.tensorboard import SummaryWriter

        epoch = int(measured["epoch"])
        if name not in self._writers:
            # A fit that goes on may repeat its last epochs: what was written of them is void.
            self._writers[name] = SummaryWriter(
                str(self._folder / name), purge_step=epoch, flush_secs=_FLUSH_EVERY
            )
        for key, value in measured.items():
            if key != "epoch":
                self._writers[name].add_scalar(key, value, epoch)

    def close(self) -> None:
        """Write out what is left."""
        for writer in self._writers.values():
            writer.close()
