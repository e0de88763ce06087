"""The backbone that a head was trained on: what a run records of it, and how to rebuild it.

A run on a cache stores no weights of the backbone and no absolute path. It knows the cache, whose
options name the checkpoint, and the hash of the weights: whatever file is found or given, a
backbone with other weights is refused. A run that trained the backbone stores its weights. The
record can be read without torch; building the model needs it.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..caches.manifest import CANARY_NAME, MANIFEST_NAME, Provenance, read_hashed
from ..capture.points import CapturePlan
from ..data.spec import DataSpec
from ..errors import CacheError, CheckpointError, ConfigError, NotFoundError
from ..models.spec import ModelSpec, weights_in
from ..utils.decoding import decode, read_toml_file
from ..utils.files import write_bytes
from ..utils.specifications import GRAPH_FILES

if TYPE_CHECKING:
    from torch import nn

    from ..caches import Cache
    from ..data import GraphDataset

#: The options of the command that made a cache.
_OPTIONS_NAME = "config.toml"


@dataclass(frozen=True)
class SavedBackbone:
    """What a run, or a cache, records of its backbone."""

    #: The file of this record, in the folder of the run or the cache.
    file: Path
    #: The model, with the name of its checkpoint and the hash of its weights.
    model: ModelSpec
    #: The data it ran on.
    data: DataSpec
    #: The layers that are captured.
    capture: CapturePlan
    #: Folder of the cache when the head was trained; the run's if there was none.
    cache: Path
    #: Whether the run trained the backbone, and keeps its weights.
    in_run: bool = False
    #: Its code, and the canary graph; None if an earlier version recorded neither.
    provenance: Provenance | None = None

    @property
    def folder(self) -> Path:
        """The run, or the cache."""
        return self.file.parent

    @classmethod
    def from_json(cls, value: Mapping[str, Any], file: Path) -> SavedBackbone:
        """Read the entry ``backbone`` of a run's ``head.json``."""
        model, data, checkpoint = value["model"], value["data"], value["checkpoint"]
        code = value.get("provenance")
        return cls(
            file=file,
            model=ModelSpec(
                model["spec"],
                _arguments(model["args"]),
                None if checkpoint is None else Path(checkpoint),
                out_dim=model["out_dim"],
                weights_sha256=value["weights_sha256"],
                filled=model.get("filled", {}),
                recorded_in=str(file),
            ),
            data=DataSpec(
                data["spec"],
                _arguments(data["args"]),
                fingerprint=data["fingerprint"],
                recorded_in=str(file),
            ),
            capture=CapturePlan.from_json(value["capture"]),
            cache=(file.parent / value["cache"]).resolve(),
            in_run=value.get("in_run", False),
            provenance=None if code is None else decode(Provenance, code, str(file)),
        )

    @classmethod
    def of_cache(cls, cache: Cache) -> SavedBackbone:
        """Return what a cache records of the backbone it was made with."""
        from ..tasks import infer_task

        manifest = cache.manifest
        checkpoint, level = manifest.checkpoint, manifest.layout.level
        return cls(
            file=cache.path / MANIFEST_NAME,
            model=replace(
                manifest.model,
                checkpoint=None if checkpoint is None else Path(checkpoint),
                out_dim=None if level == "link" else infer_task(cache.labels(), level).out_dim,
                weights_sha256=cache.weights_sha256,
            ),
            data=manifest.data,
            capture=CapturePlan.from_json(manifest.capture),
            cache=cache.path,
            provenance=manifest.provenance,
        )

    def to_json(self, folder: Path | None = None) -> dict[str, Any]:
        """Return the entry ``backbone`` of ``head.json``, in that folder; here by default."""
        model, data = self.model, self.data
        return {
            "weights_sha256": model.weights_sha256,
            "checkpoint": None if model.checkpoint is None else model.checkpoint.name,
            "model": {
                "spec": model.spec,
                "args": dict(model.args),
                "filled": dict(model.filled),
                "out_dim": model.out_dim,
            },
            "data": {
                "spec": data.spec,
                "args": dict(data.args),
                "fingerprint": data.fingerprint,
            },
            "capture": self.capture.to_json(),
            "cache": _relative(self.cache, folder or self.folder),
            **({"in_run": True} if self.in_run else {}),
            "provenance": None if self.provenance is None else self.provenance.to_json(),
        }

    def build(
        self,
        *,
        model: nn.Module | str | None = None,
        checkpoint: Path | None = None,
        key_map: Path | None = None,
        trust: bool = False,
        in_dim: int | None = None,
    ) -> nn.Module:
        """Return the model that the head was trained on.

        Other weights are refused, and so is other code.

        Args:
            model: The model itself, into which weights from a file are loaded (into a copy, for a
                run that trained the backbone), or its specification, which is needed unless the
                recorded one is built in.
            checkpoint: The weights; by default the cache's.
            key_map: Old weight names to new ones; by default the cache's.
            trust: Unpickle a checkpoint that can run code.
            in_dim: Node features of the data, for constructors that insist on them.

        Raises:
            CheckpointError: for other weights.
            ModelError: for other code or activations.
        """
        from ..models.checkpoints import weights_sha256

        expected = self.model.weights_sha256
        if model is None or isinstance(model, str):
            spec = self.model.to_follow(model)  # refuses before a file is looked for
            file = checkpoint or self.find_checkpoint()
            renamed = key_map or (None if self.in_run else self.option_path("key_map"))
            state = None if self.in_run else self.options().get("state")
            spec = replace(spec, checkpoint=file, key_map=renamed, trust=trust, state=state)
            # The hash tells whether weights were missing when the cache was made, too.
            loaded = spec.load_reported(in_dim=in_dim, allow_missing=True)
            if loaded.missing and weights_sha256(loaded.model.state_dict()) != expected:
                spec.load(checkpoint=loaded.checkpoint, in_dim=in_dim)  # refused, with a table
            check_backbone(self, loaded.model, where=str(file))
            return loaded.model
        if checkpoint is None and self.in_run:
            model, checkpoint = copy.deepcopy(model), self.find_checkpoint()
        if checkpoint is not None:
            replace(self.model, checkpoint=checkpoint, key_map=key_map, trust=trust).fill(model)
        check_backbone(self, model, where=str(checkpoint or type(model).__name__))
        return model

    def find_checkpoint(self) -> Path:
        """Return the checkpoint: the run's own, or the cache's if it is still where it was."""
        name = self.model.checkpoint or Path()
        if self.in_run:
            return self.folder / name
        found = self.option_path("checkpoint", "folder")
        place = None if found is None else self.checkpoint_in(found)
        if place is None:
            tried = self.options().get("checkpoint")
            raise NotFoundError(
                f"{self.folder}: found no trace of its backbone's checkpoint {name.name!r} through "
                f"{self.cache.name}{f' (tried {tried})' if tried else ''}; say where it is with "
                "--checkpoint FILE"
            )
        return place

    def checkpoint_in(self, place: Path) -> Path | None:
        """Return the checkpoint that a file, or the folder of a fold or of all folds, holds."""
        name = self.model.checkpoint or Path()
        # The cache of a fold is named after the folder of that fold; the run's own folder holds
        # the best one.
        candidates = (place, place / self.cache.stem / name, place / name)
        there = (path for path in candidates if path.is_file() or weights_in(path) is not None)
        return next(there, None)

    def options(self) -> Mapping[str, Any]:
        """Return the options of the command that made the cache; empty if there was no command."""
        try:
            return read_toml_file(self.cache / _OPTIONS_NAME)
        except (ConfigError, OSError):
            return {}

    def option_path(self, *names: str) -> Path | None:
        """Return the path that an option of the cache's command names; None if it is gone."""
        options = self.options()
        given = next((options[name] for name in names if name in options), None)
        return self.find(given) if isinstance(given, str) else None

    def find(self, name: str) -> Path | None:
        """Return the file or folder that the cache's command named; None if it is gone.

        A relative path is tried from here, from the folder of that command, and from the parents of
        the cache: files may move together.
        """
        path = Path(name).expanduser()
        told = [] if self.provenance is None else [Path(self.provenance.folder)]
        places = (path, *(folder / path for folder in (*told, *self.cache.parents)))
        return next((place for place in places if place.exists()), None)

    def find_data(self) -> DataSpec:
        """Return the recorded data, with the path of its file from here."""
        kind, colon, name = self.data.spec.partition(":")
        if self.data.spec.endswith(GRAPH_FILES):
            kind, colon, name = "", "", self.data.spec
        elif kind != "smiles":
            return self.data
        found = self.find(name)
        if found is None or Path(name).exists():
            return self.data
        return replace(self.data, spec=f"{kind}{colon}{found}")

    def carry_canary(self, folder: Path) -> None:
        """Copy the canary into a run or an export, which then does not need the cache."""
        from ..caches.provenance import CANARY_LIMIT

        if self.provenance is not None and self.provenance.canary_sha256 is not None:
            path, sha256 = self.folder / CANARY_NAME, self.provenance.canary_sha256
            write_bytes(folder / CANARY_NAME, read_hashed(path, CANARY_LIMIT, sha256))


def write_provenance(
    folder: Path, model: nn.Module, weights: Path, plan: CapturePlan, dataset: GraphDataset
) -> Provenance:
    """Write the canary of a backbone that a run has trained; return its provenance.

    Args:
        model: The backbone, which is not changed.
        weights: The file of its trained weights.
        plan: The layers that are captured.
        dataset: Holds the canary graph.
    """
    from ..caches.provenance import take_provenance
    from ..utils.files import load_tensors

    trained = copy.deepcopy(model).eval()
    trained.load_state_dict(load_tensors(weights), strict=False)
    provenance, canary = take_provenance(trained, plan, dataset)
    if canary is not None:
        write_bytes(folder / CANARY_NAME, canary)
    return provenance


def _relative(path: Path, folder: Path) -> str:
    """Return a path relative to a folder: they may move together."""
    try:
        return Path(os.path.relpath(path.resolve(), folder.resolve())).as_posix()
    except ValueError:  # on another drive
        return path.resolve().as_posix()


def check_backbone(saved: SavedBackbone, offered: nn.Module | Cache, *, where: str = "") -> None:
    """Refuse a model, or a cache of a model, that is not the one the head was trained on.

    Weights and classes are compared by their hash, and by the activations on the canary.

    Args:
        saved: The backbone of the head.
        offered: What the head is to be used with.
        where: The file it came from, for the message.

    Raises:
        CheckpointError: for a model with other weights.
        ModelError: for a model with other code, or other activations.
        CacheError: for a cache of another model.
    """
    from ..caches import Cache
    from ..caches.provenance import check_provenance
    from ..models.checkpoints import weights_sha256

    kind: type[CacheError | CheckpointError]
    if isinstance(offered, Cache):
        found, kind, where = offered.weights_sha256, CacheError, where or str(offered.path)
    else:
        found, kind = weights_sha256(offered.state_dict()), CheckpointError
        where = where or type(offered).__name__
    expected = saved.model.weights_sha256
    if found != expected:
        raise kind(
            f"{where}: found a backbone with weights {found}, expected {expected}, "
            f"on which the head of {saved.folder} was trained"
        )
    if saved.provenance is not None and not isinstance(offered, Cache):
        check_provenance(saved.provenance, saved.folder, offered, saved.capture)


def _arguments(value: Any) -> dict[str, Any]:
    """Return arguments that a file records; anything but names and values is refused."""
    if not isinstance(value, Mapping):
        raise TypeError(f"found args {value!r}, expected names and values")
    return dict(value)
