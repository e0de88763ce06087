"""A model by name, as a user or a file names it, with the file and the hash of its weights.

Public checkpoints have a recipe: what each is, where to get its files, and how to use it;
``public_models.py`` builds their networks and reads their files. Nothing here needs torch at first.
"""

from __future__ import annotations

import ast
import json
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..data.spec import MOLECULE_SOURCES, DataSpec
from ..errors import CheckpointError, ConfigError, HistographError, NotFoundError
from ..utils.specifications import PUBLIC_MODELS, Specification

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ..data import GraphDataset
    from .checkpoints import Checkpoint
    from .key_map import KeyMap
    from .loading import LoadReport

#: Names of the weights in a folder as HuggingFace writes it: a file, or the index of several.
INDEX_SUFFIX = ".index.json"
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
#: Files in folders that this tool wrote: those are more than a checkpoint.
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

    #: The file of the weights; None for a model that was passed in memory.
    checkpoint: Path | None = None
    #: TOML or JSON: from the names of weights in the checkpoint to those of the model.
    key_map: Path | None = None
    #: Unpickle a checkpoint that can run code.
    trust: bool = False
    #: Outputs for the labels, if a constructor requires their number; None for links.
    out_dim: int | None = None
    #: Of the weights in the model; empty if unknown.
    weights_sha256: str = ""
    #: Arguments of the constructor that were filled in from the data or the checkpoint.
    filled: Mapping[str, Any] = field(default_factory=dict)
    #: Which state dict of the checkpoint; None for the usual one.
    state: str | None = None

    def build(
        self,
        *,
        state_dict: Mapping[str, Tensor] | None = None,
        in_dim: int | Sequence[int] | None = None,
        filled: dict[str, Any] | None = None,
    ) -> nn.Module:
        """Build the model with its initial weights; code that only a file names is refused.

        Args:
            state_dict: The weights to be loaded later; sizes are taken from them.
            filled: Receives the arguments that were filled in.
        """
        from .building import build_model

        followed, known = self.to_follow(), dict(self.filled)
        built = build_model(
            followed.spec,
            followed.args,
            state_dict=state_dict,
            in_dim=in_dim,
            out_dim=self.out_dim,
            filled=known,
        )
        if filled is not None:
            filled |= known
        return built

    def read_checkpoint(self) -> Checkpoint:
        """Read the file of the weights."""
        from .checkpoints import read_checkpoint

        if self.checkpoint is None:
            raise NotFoundError(f"{self.spec}: found no checkpoint, expected the weights in a file")
        return read_checkpoint(self.checkpoint, trust=self.trust, state=self.state)

    def load(self, *, checkpoint: Checkpoint | None = None, in_dim: int | None = None) -> nn.Module:
        """Build the model and load its weights; names and shapes have to agree."""
        return self.load_reported(checkpoint=checkpoint, in_dim=in_dim).model

    def load_reported(
        self,
        *,
        checkpoint: Checkpoint | None = None,
        in_dim: int | None = None,
        allow_missing: bool = False,
    ) -> LoadedModel:
        """Build the model and load its weights, with a report.

        Args:
            checkpoint: The file of the weights, if it has been read before.
            allow_missing: Accept a file that lacks some weights; the caller has to make sure that
                they do not matter.
        """
        from .loading import PROPOSED

        self.to_follow()  # before a file is read
        checkpoint = checkpoint or self.read_checkpoint()
        weights, key_map, _ = self._weights(checkpoint)
        tensors = weights.state_dict if key_map is None else key_map.apply(weights.state_dict)
        filled: dict[str, Any] = {}
        model = self.build(state_dict=tensors, in_dim=in_dim, filled=filled)
        try:
            report = self.fill(model, checkpoint=checkpoint, allow_missing=allow_missing)
        except CheckpointError as refused:
            if self.out_dim != 1 or PROPOSED in refused.details:
                raise
            # Two classes are one output or two, and a key map is only found for the right number.
            try:
                return replace(self, out_dim=2).load_reported(
                    checkpoint=checkpoint, in_dim=in_dim, allow_missing=allow_missing
                )
            except HistographError as wider:
                raise (wider if PROPOSED in wider.details else refused) from None
        return LoadedModel(model.eval(), checkpoint, report, replace(self, filled=filled))

    def fill(
        self,
        model: nn.Module,
        *,
        checkpoint: Checkpoint | None = None,
        allow_missing: bool = False,
    ) -> LoadReport:
        """Load the weights into an existing model."""
        from .loading import load_into

        weights, key_map, left_out = self._weights(checkpoint or self.read_checkpoint())
        report = load_into(model, weights, key_map=key_map, allow_missing=allow_missing)
        return replace(report, left_out=(*report.left_out, *left_out))

    def _weights(self, checkpoint: Checkpoint) -> tuple[Checkpoint, KeyMap | None, tuple[str, ...]]:
        """Return the file, its key map, and the names of weights that are left out."""
        from .key_map import read_key_map

        key_map = None if self.key_map is None else read_key_map(self.key_map)
        if self.spec not in PUBLIC_MODELS:
            return checkpoint, key_map, ()
        from .public_models import adapted

        if key_map is not None:
            checkpoint = replace(checkpoint, state_dict=key_map.apply(checkpoint.state_dict))
        weights, left_out = adapted(self.spec, checkpoint)
        return weights, None, left_out


@dataclass(frozen=True)
class LoadedModel:
    """A model with the weights of its checkpoint, and how they were loaded."""

    model: nn.Module
    checkpoint: Checkpoint
    report: LoadReport
    #: The model's specification, with the arguments that were filled in.
    spec: ModelSpec

    @property
    def missing(self) -> tuple[str, ...]:
        """The weights that the file lacks; they are zero."""
        return tuple(row.name for row in self.report.missing)

    @property
    def notes(self) -> list[str]:
        """What a user should know about the weights."""
        known = {name: size for name, size in self.spec.filled.items() if size is not None}
        sizes = ", ".join(f"{name}={size}" for name, size in known.items())
        filled = [f"sizes from the weights and the data: {sizes}"] if sizes else []
        return [*self.checkpoint.notes, *self.report.notes, *filled]


@dataclass(frozen=True)
class Pretrained(LoadedModel):
    """A loaded model, and the graphs to run it on."""

    dataset: GraphDataset
    #: The data's specification, with the features that the model reads.
    data: DataSpec

    @property
    def notes(self) -> list[str]:
        """What a user should know about the weights, and the features chosen for them."""
        features = self.data.args.get("mol_features")
        if self.spec.spec not in PUBLIC_MODELS or features is None:
            return super().notes
        return [*super().notes, f"mol_features={features}, which {self.spec.spec} was trained on"]


def load_pretrained(
    model: ModelSpec,
    data: DataSpec,
    *,
    dataset: GraphDataset | None = None,
    allow_missing: bool = False,
) -> Pretrained:
    """Read the checkpoint and the data, build the model, and load the weights strictly.

    Args:
        dataset: The data, if it has been loaded before.
        allow_missing: See :meth:`ModelSpec.load`.
    """
    data = suited_data(model.spec, data)
    checkpoint = model.read_checkpoint()
    if dataset is None:
        dataset = data.load()
    sized = replace(model, out_dim=_output_width(dataset))
    in_dim = int(dataset.graphs[0].num_node_features)
    loaded = sized.load_reported(checkpoint=checkpoint, in_dim=in_dim, allow_missing=allow_missing)
    if model.spec in PUBLIC_MODELS:
        from .public_models import check_public

        check_public(model, loaded.model, dataset)
    spec = replace(loaded.spec, out_dim=None)
    return Pretrained(loaded.model, checkpoint, loaded.report, spec, dataset, data)


def _output_width(dataset: GraphDataset) -> int | None:
    """Return the number of outputs for the labels; None for links and unlabelled data."""
    from ..tasks import has_labels, infer_task

    labels = dataset.known_labels()
    if dataset.level == "link" or not has_labels(labels):
        return None
    return infer_task(labels, dataset.level).out_dim


@dataclass(frozen=True)
class CallForm:
    """Which arguments ``forward`` is given: other arguments would give another history."""

    #: Exactly these parameters of ``forward`` are filled; None for all that the data can fill.
    given: tuple[str, ...] | None = None
    #: Attributes of the data that the model does not see.
    no_pass: tuple[str, ...] = ()


#: All parameters that the data can fill.
ALL_OF_IT = CallForm()


# --- arguments


def parse_args(pairs: Iterable[str], *, dotted: bool = False) -> dict[str, Any]:
    """Parse ``name=value`` pairs: Python literals where they parse, else strings.

    ``true``, ``false`` and ``none`` are literals in any case.

    Args:
        dotted: Whether a name may have another before it, as in ``gmt.heads=2``.

    Raises:
        ConfigError: if a pair has no ``=``, its name is no identifier, or a name comes twice.
    """
    parsed: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = (part.strip() for part in pair.partition("="))
        own = name.rpartition(".")[2] if dotted else name
        if not equals or not own.isidentifier():
            raise ConfigError(f"argument {pair!r} is not of the form name=value")
        if name in parsed:
            raise ConfigError(f"argument {name!r} is given twice: {parsed[name]!r} and {value!r}")
        parsed[name] = _parse_value(value)
    return parsed


def _parse_value(text: str) -> Any:
    constants = {"true": True, "false": False, "none": None, "null": None}
    if text.lower() in constants:
        return constants[text.lower()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # '\d' is a plain string here, not an invalid escape
        try:
            return ast.literal_eval(text)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            pass
    if text.startswith(("[", "{")):
        try:
            return json.loads(text)  # [true, false]
        except (ValueError, RecursionError):
            pass
    return text


# --- public checkpoints

_HU = "Hu et al. 2020, Strategies for Pre-training Graph Neural Networks"
_WANG = "Wang et al. 2022, Molecular Contrastive Learning of Representations"
_OGB = "Hu et al. 2020, Open Graph Benchmark"

#: Other projects whose files hold the network of pretrain-gnns, under the same names.
SAME_NETWORK = (
    ("GraphCL", "github.com/Shen-Lab/GraphCL", "MIT"),
    ("GraphMVP", "github.com/chao1224/GraphMVP", "MIT"),
)


@dataclass(frozen=True)
class Recipe:
    """One kind of public checkpoint."""

    #: What ``--model`` takes.
    name: str
    #: The encoding of molecules that its weights were trained on, as ``mol_features`` takes it.
    features: str
    paper: str
    #: Where the files are, and their names there.
    source: str
    files: str
    licence: str = "MIT"


def one_command(recipe: Recipe | None = None) -> str:
    """Return the commands from a checkpoint and a csv of molecules to a report, in one line."""
    name, file = ("NAME", "FILE") if recipe is None else (recipe.name, recipe.files)
    return (
        f"histograph cache --model {name} --checkpoint {file} "
        "--data smiles:molecules.csv --split scaffold -o molecules.cache && "
        "histograph train-head molecules.cache -o run && histograph report run"
    )


def _pretrain(kind: str, file: str) -> Recipe:
    source = "github.com/snap-stanford/pretrain-gnns, chem/model_architecture"
    if kind == "gin":
        source = source.replace("architecture", "gin")
    return Recipe(f"pretrain-gnns:{kind}", "pretrain", _HU, source, file)


def _molclr(kind: str) -> Recipe:
    source = f"github.com/yuyangw/MolCLR, ckpt/pretrained_{kind}/checkpoints"
    return Recipe(f"molclr:{kind}", "pretrain", _WANG, source, "model.pth")


def _ogb(kind: str) -> Recipe:
    source = "trained by github.com/snap-stanford/ogb, examples/graphproppred/mol"
    return Recipe(f"ogb:{kind}", "ogb", _OGB, source, "model.pt")


RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        _pretrain("gcn", "gcn_contextpred.pth"),
        _pretrain("gin", "supervised_contextpred.pth"),
        _pretrain("gat", "gat_contextpred.pth"),
        _pretrain("sage", "graphsage_contextpred.pth"),
        *map(_molclr, ("gcn", "gin")),
        *map(_ogb, ("gcn", "gin", "gcn-virtual", "gin-virtual")),
    )
}

assert tuple(RECIPES) == PUBLIC_MODELS


def recipes_called(name: str | None) -> list[Recipe]:
    """Return the recipes whose names start with ``name``; all of them for None."""
    found = [recipe for recipe in RECIPES.values() if recipe.name.startswith(name or "")]
    if not found:
        raise ConfigError(f"{name}: no such recipe, expected one of {', '.join(RECIPES)}")
    return found


def suited_data(model: str, data: DataSpec) -> DataSpec:
    """Return the data with the features that a public model reads, refusing any others.

    For other models, the data is returned unchanged.
    """
    recipe = RECIPES.get(model)
    if recipe is None or data.spec.partition(":")[0] not in MOLECULE_SOURCES:
        return data
    found = data.args.get("mol_features", recipe.features)
    if found != recipe.features:
        raise ConfigError(
            f"{data.spec}: found mol_features={found}, expected mol_features={recipe.features}, "
            f"which {model} was trained on (it is chosen automatically)"
        )
    return replace(data, args={**data.args, "mol_features": recipe.features})
