"""The head of a finished run: read from its folder, built and filled with its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from ..errors import ConfigError
from ..heads.base import Readout
from ..heads.registry import HeadInfo, build_head, head_info
from ..heads.standardize import EachLayerNorm, Standardizer, head_behind
from ..tasks import TargetScale, Task
from .fits import FIT_NAME
from .run import HEAD_CONFIG_NAME, HEAD_NAME, Run, read_json
from .saved_backbone import SavedBackbone


@dataclass(frozen=True)
class SavedHead:
    """What a run says of its head: how to build it, what it predicts, what it was trained on."""

    folder: Path
    #: Name of the readout, and what it is built with.
    name: str
    config: Mapping[str, Any]
    standardize: bool
    scale: TargetScale
    task: Task
    target_names: tuple[str, ...]
    backbone: SavedBackbone
    #: Whether rows are normalised one by one instead.
    layer_norm: bool = False

    @classmethod
    def read(cls, run: Run) -> SavedHead:
        """Read ``head.json`` of a run."""
        stored = run.stored_head
        with run.reading_head():
            scale = stored["target_scale"]
            return cls(
                folder=run.folder,
                name=stored["head"],
                config=stored["config"],
                standardize=stored["standardize"],
                scale=TargetScale(tuple(scale["mean"]), tuple(scale["deviation"])),
                task=Task.from_json(stored["task"]),
                target_names=tuple(stored["target_names"]),
                backbone=run.backbone,
                layer_norm=stored.get("layer_norm", False),
            )

    def of_fit(self, folder: Path) -> SavedHead:
        """Return another fit of the same readout in the same run, from that fit's folder."""
        stored = read_json(folder, FIT_NAME)
        return replace(self, folder=folder, config=stored["config"])

    @property
    def info(self) -> HeadInfo:
        """What is known of the readout; one that is code has to be named by the user."""
        try:
            return head_info(self.name)
        except ConfigError:
            raise ConfigError(
                f"{self.folder}: found the head {self.name!r}, which is code that a file names, so "
                f"it was not run; expected you to name it, as in --head my_head.py:{self.name} "
                "(head= in Python)"
            ) from None

    def build(self) -> tuple[Readout, Standardizer | EachLayerNorm | None]:
        """Return the trained head, and what its rows go through before it."""
        head = build_head(self.info.name, **self.config)
        path = self.folder / HEAD_NAME
        try:
            tensors = load_file(path)
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{path}: not the weights of a head ({error})") from error
        widths = self.backbone.capture.widths
        standardizer = Standardizer(widths) if self.standardize else None
        try:
            if standardizer is not None:
                standardizer.load_state_dict(_under("standardizer.", tensors))
            head.load_state_dict(head_behind(standardizer, _under("head.", tensors)))
        except RuntimeError as error:
            reason = str(error).splitlines()[-1].strip()
            raise ConfigError(f"{path}: does not fit {HEAD_CONFIG_NAME}: {reason}") from error
        return head, EachLayerNorm(widths) if self.layer_norm else standardizer


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): value
        for name, value in tensors.items()
        if name.startswith(prefix)
    }
