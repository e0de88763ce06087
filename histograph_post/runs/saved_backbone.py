"""The backbone a head was trained on: what a run notes of it, and how to get it back.

A run on a cache keeps no weights of the backbone and no path of this machine. It knows the cache,
whose resolved options name the checkpoint, and the hash of the weights: whatever file is found or
given, a backbone with other weights is refused. A run that trained the backbone keeps its weights.
A model or data that is code is not run because a file names it: the user has to.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from ..caches import Cache
from ..caches.folder import CONFIG_NAME
from ..caches.format import MANIFEST_NAME
from ..capture import CapturePlan
from ..errors import CacheError, CheckpointError, NotFoundError
from ..models import build_model, load_into, read_checkpoint, read_key_map
from ..models.loading import weights_sha256
from ..tasks import infer_task
from ..utils.specifications import specification_to_follow


@dataclass(frozen=True)
class SavedBackbone:
    """What a run knows of its backbone."""

    #: The run, for messages.
    run: Path
    #: The file that says all this.
    file: Path
    weights_sha256: str
    #: File name of the checkpoint; None for a model that was handed over in memory.
    checkpoint: str | None
    model: str
    model_args: Mapping[str, Any]
    #: Output width that the labels of the cached data ask for; None for links.
    out_dim: int | None
    #: The data it ran on: their specification, arguments and fingerprint.
    data: str
    data_args: Mapping[str, Any]
    data_fingerprint: str
    capture: CapturePlan
    #: Folder of the cache, where it was when the head was trained; the run's if there was none.
    cache: Path
    #: Whether the run trained the backbone, and keeps its weights.
    in_run: bool = False

    @classmethod
    def from_json(cls, value: Mapping[str, Any], file: Path) -> SavedBackbone:
        """Read the entry ``backbone`` of a run's ``head.json``, or the same of a manifest."""
        run = file.parent
        return cls(
            run=run,
            file=file,
            weights_sha256=value["weights_sha256"],
            checkpoint=value["checkpoint"],
            model=value["model"]["spec"],
            model_args=value["model"]["args"],
            out_dim=value["model"]["out_dim"],
            data=value["data"]["spec"],
            data_args=value["data"]["args"],
            data_fingerprint=value["data"]["fingerprint"],
            capture=CapturePlan.from_json(value["capture"]),
            cache=(run / value["cache"]).resolve(),
            in_run=value.get("in_run", False),
        )

    @classmethod
    def of_cache(cls, cache: Cache) -> SavedBackbone:
        """Return what a cache knows of the backbone it was made with."""
        return cls.from_json(describe_backbone(cache, cache.path), cache.path / MANIFEST_NAME)

    def model_spec(self, given: str | None) -> str:
        """Return the specification of the model: the user's, or the recorded one if built in."""
        return specification_to_follow("model", self.model, given, self.file)

    def data_spec(self, given: str | None) -> str:
        """Return the specification of the data: the user's, or the recorded one if built in."""
        return specification_to_follow("data", self.data, given, self.file)

    def build(
        self,
        *,
        model: str | None = None,
        checkpoint: Path | None = None,
        key_map: Path | None = None,
        trust: bool = False,
        in_dim: int | None = None,
    ) -> nn.Module:
        """Build the model anew and load the weights the head was trained on.

        Args:
            model: Specification of the model; needed unless the recorded one is built in.
            checkpoint: The weights; found through the cache if absent.
            key_map: Old weight names to new ones; found through the cache if absent.
            trust: Unpickle a checkpoint that can run code.
            in_dim: Node features of the data, for constructors that insist on them.
        """
        spec = self.model_spec(model)
        weights = read_checkpoint(checkpoint or self.find_checkpoint(), trust=trust)
        built = build_model(
            spec,
            self.model_args,
            state_dict=weights.state_dict,
            in_dim=in_dim,
            out_dim=self.out_dim,
        )
        renamed = key_map or (None if self.in_run else self.option_path("key_map"))
        load_into(built, weights, key_map=None if renamed is None else read_key_map(renamed))
        check_backbone(self, built, where=str(weights.path))
        return built

    def find_checkpoint(self) -> Path:
        """Return the checkpoint: the run's own, or the cache's if it is still where it was."""
        name = self.checkpoint or ""
        if self.in_run:
            return self.run / name
        found = self.option_path("checkpoint", "folder")
        place = None if found is None else self.checkpoint_in(found)
        if place is None:
            raise NotFoundError(
                f"{self.run}: found no trace of its backbone's checkpoint {name!r} through "
                f"{self.cache.name}; say where it is with --checkpoint FILE"
            )
        return place

    def checkpoint_in(self, place: Path) -> Path | None:
        """Return the checkpoint that a file, or the folder of a fold or of all folds, holds."""
        name = self.checkpoint or ""
        # The cache of a trained fold is called after the folder of that fold, beside which a run
        # has its best one.
        candidates = (place, place / self.cache.stem / name, place / name)
        return next((path for path in candidates if path.is_file()), None)

    def option_path(self, *names: str) -> Path | None:
        """Return what an option of the cache's own command names; None if it is gone."""
        try:
            options = tomllib.loads((self.cache / CONFIG_NAME).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError):
            return None
        given = next((options[name] for name in names if name in options), None)
        if not isinstance(given, str):
            return None
        # Relative to where the command was given: here, or a folder that the cache is in.
        places = (Path(given).expanduser(), *(folder / given for folder in self.cache.parents))
        return next((place for place in places if place.exists()), None)


def describe_backbone(cache: Cache, run: Path) -> dict[str, Any]:
    """Return the entry ``backbone`` of ``head.json`` for a run on this cache."""
    manifest = cache.manifest
    level = manifest.layout.level
    return {
        "weights_sha256": cache.weights_sha256,
        "checkpoint": manifest.checkpoint,
        "model": {
            "spec": manifest.model.spec,
            "args": dict(manifest.model.args),
            # For a model whose constructor insists on a number of outputs.
            "out_dim": None if level == "link" else infer_task(cache.labels(), level).out_dim,
        },
        "data": {
            "spec": manifest.data.spec,
            "args": dict(manifest.data.args),
            "fingerprint": manifest.data.fingerprint,
        },
        "capture": manifest.capture,
        "cache": _place(cache.path, run),
    }


def _place(path: Path, folder: Path) -> str:
    """Return where a path is as seen from a folder: they may move together."""
    try:
        return Path(os.path.relpath(path.resolve(), folder.resolve())).as_posix()
    except ValueError:  # on another drive
        return path.resolve().as_posix()


def check_backbone(saved: SavedBackbone, offered: nn.Module | Cache, *, where: str = "") -> None:
    """Refuse a model, or a cache of a model, that is not the one the head was trained on.

    Args:
        saved: The backbone of the head.
        offered: What the head would be used with.
        where: The file it came from, for the message.

    Raises:
        CheckpointError: for a model with other weights.
        CacheError: for a cache of another model.
    """
    kind: type[CacheError | CheckpointError]
    if isinstance(offered, Cache):
        found, kind, where = offered.weights_sha256, CacheError, where or str(offered.path)
    else:
        found, kind = weights_sha256(offered.state_dict()), CheckpointError
        where = where or type(offered).__name__
    if found != saved.weights_sha256:
        raise kind(
            f"{where}: found a backbone with weights {found}, expected {saved.weights_sha256}, "
            f"on which the head of {saved.run} was trained"
        )
