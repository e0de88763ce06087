"""Public checkpoints by name: what each is, where to get its files, and how to use it.

``public_models.py`` builds the networks and reads their files. Nothing here needs torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..data.spec import MOLECULE_SOURCES, DataSpec
from ..errors import ConfigError
from ..utils.specifications import PUBLIC_MODELS

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
        _molclr("gcn"),
        _molclr("gin"),
        _ogb("gcn"),
        _ogb("gin"),
        _ogb("gcn-virtual"),
        _ogb("gin-virtual"),
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
