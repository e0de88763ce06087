"""Which model: by name, as a user or a file names it, with the file and the hash of its weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..data.spec import DataSpec
from ..errors import NotFoundError
from ..utils.specifications import Specification

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ..data import GraphDataset
    from .building import Built
    from .checkpoints import Checkpoint
    from .key_map import KeyMap
    from .loading import LoadReport

#: How the weights are called in a folder as HuggingFace writes it, alone or by an index of parts.
INDEX_SUFFIX = ".index.json"
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
#: What stands in folders of this tool that hold weights: those are more than a checkpoint.
_OURS = ("config.toml", "head.json", "run.json")


def weights_in(folder: Path) -> Path | None:
    """Return the file of the weights, or their index, in a folder as HuggingFace writes it."""
    if not folder.is_dir() or any((folder / name).exists() for name in _OURS):
        return None
    names = [*_WEIGHTS, *(name + INDEX_SUFFIX for name in _WEIGHTS)]
    return next((folder / name for name in names if (folder / name).is_file()), None)


@dataclass(frozen=True)
class ModelSpec(Specification):
    """A model by name and arguments, and where its weights are."""

    WHAT = "model"

    #: The weights, in a file only the name; None for a model that was handed over in memory.
    checkpoint: Path | None = None
    #: TOML or JSON: names of weights in the checkpoint to those of the model.
    key_map: Path | None = None
    #: Unpickle a checkpoint that can run code.
    trust: bool = False
    #: Outputs that the labels ask for, for constructors that insist on them; None for links.
    out_dim: int | None = None
    #: Of the weights in the model; empty where they are not known.
    weights_sha256: str = ""
    #: Which state dict of the checkpoint; None for the usual one.
    state: str | None = None

    def build(
        self,
        *,
        state_dict: Mapping[str, Tensor] | None = None,
        in_dim: int | Sequence[int] | None = None,
    ) -> nn.Module:
        """Build the model with initial weights of its own; code that only a file names is refused.

        Args:
            state_dict: The weights to be loaded later; sizes are taken from them.
            in_dim: Node features of the data, for constructors that insist on them.
        """
        return self._build(state_dict, in_dim).model

    def _build(
        self, state_dict: Mapping[str, Tensor] | None, in_dim: int | Sequence[int] | None
    ) -> Built:
        from .building import build

        followed = self.to_follow()
        return build(
            followed.spec, followed.args, state_dict=state_dict, in_dim=in_dim, out_dim=self.out_dim
        )

    def read_checkpoint(self) -> Checkpoint:
        """Read the file of the weights."""
        from .checkpoints import read_checkpoint

        if self.checkpoint is None:
            raise NotFoundError(f"{self.spec}: found no checkpoint, expected the weights in a file")
        return read_checkpoint(self.checkpoint, trust=self.trust, state=self.state)

    def load(
        self,
        *,
        checkpoint: Checkpoint | None = None,
        in_dim: int | None = None,
        allow_missing: bool = False,
    ) -> LoadedModel:
        """Build the model and load its weights: names and shapes agree, or it is refused.

        Args:
            checkpoint: The file of the weights, where it has been read before.
            in_dim: Node features of the data, for constructors that insist on them.
            allow_missing: Take a file that lacks some weights; the caller sees to it that they do
                not matter.
        """
        self.to_follow()  # before a file is read
        weights, key_map = checkpoint or self.read_checkpoint(), self._read_key_map()
        tensors = weights.state_dict if key_map is None else key_map.apply(weights.state_dict)
        built = self._build(tensors, in_dim)
        report = self.fill(built.model, checkpoint=weights, allow_missing=allow_missing)
        return LoadedModel(built.model.eval(), weights, report, built.filled)

    def fill(
        self,
        model: nn.Module,
        *,
        checkpoint: Checkpoint | None = None,
        allow_missing: bool = False,
    ) -> LoadReport:
        """Load the weights into a model that exists."""
        from .loading import load_into

        return load_into(
            model,
            checkpoint or self.read_checkpoint(),
            key_map=self._read_key_map(),
            allow_missing=allow_missing,
        )

    def _read_key_map(self) -> KeyMap | None:
        from .key_map import read_key_map

        return None if self.key_map is None else read_key_map(self.key_map)


@dataclass(frozen=True)
class LoadedModel:
    """A model with its checkpoint's weights in it, and how they got there."""

    model: nn.Module
    checkpoint: Checkpoint
    report: LoadReport
    #: Sizes that the constructor insisted on and that came from the weights or the data.
    filled: dict[str, int]

    @property
    def missing(self) -> tuple[str, ...]:
        """The weights that the file does not have; they are zero."""
        return tuple(row.name for row in self.report.missing)

    @property
    def notes(self) -> list[str]:
        """What a user should know of the weights."""
        sizes = ", ".join(f"{name}={size}" for name, size in self.filled.items())
        filled = [f"the model was built with {sizes}, as weights and data ask for"] if sizes else []
        return [*self.checkpoint.notes, *self.report.notes, *filled]


@dataclass(frozen=True)
class Pretrained(LoadedModel):
    """Such a model, and the graphs to run it on."""

    dataset: GraphDataset


def load_pretrained(
    model: ModelSpec,
    data: DataSpec,
    *,
    dataset: GraphDataset | None = None,
    allow_missing: bool = False,
) -> Pretrained:
    """Read the checkpoint and the data, build the model, and load the weights strictly.

    Args:
        model: The model and its checkpoint.
        data: The data.
        dataset: The data of that specification, where it has been loaded before.
        allow_missing: See :meth:`ModelSpec.load`.
    """
    checkpoint = model.read_checkpoint()
    if dataset is None:
        dataset = data.load()
    sized = replace(model, out_dim=_output_width(dataset))
    in_dim = int(dataset.graphs[0].num_node_features)
    loaded = sized.load(checkpoint=checkpoint, in_dim=in_dim, allow_missing=allow_missing)
    return Pretrained(**vars(loaded), dataset=dataset)


def _output_width(dataset: GraphDataset) -> int | None:
    """Return the output width the labels ask for; links and unlabelled data ask for none."""
    from ..tasks import has_labels, infer_task

    labels = dataset.labels()
    if dataset.level == "link" or not has_labels(labels):
        return None
    return infer_task(labels, dataset.level).out_dim
