"""Public checkpoints by name: their networks are built to the sizes of a file, or it is refused.

A file must hold the family that was named: the names of its weights decide, their shapes, and,
where two families have both in common, a pass over a few molecules. What a batch norm is given must
have the mean and variance that it recorded in training.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch_geometric.data import Data

from ..data.batching import make_batch
from ..errors import CheckpointError, DataError, ModelError
from ..utils.specifications import PUBLIC_MODELS
from ..utils.text import listed
from .builtin_models import POOLS
from .checkpoints import Checkpoint
from .model_call import call_model
from .molecule_networks import (
    BondConv,
    MolclrGCN,
    MoleculeGNN,
    MoleculePrediction,
    PretrainGAT,
    PretrainGCN,
    PretrainGIN,
    PretrainSAGE,
)
from .ogb_networks import OgbGCN, OgbGIN, OgbNodes, OgbPrediction
from .recipes import RECIPES

_CONVS: Final[dict[str, type[BondConv]]] = {
    "pretrain-gnns:gcn": PretrainGCN,
    "pretrain-gnns:gin": PretrainGIN,
    "pretrain-gnns:gat": PretrainGAT,
    "pretrain-gnns:sage": PretrainSAGE,
    "molclr:gcn": MolclrGCN,
    "molclr:gin": PretrainGIN,
}

#: Two networks whose weights have the same names and shapes.
_TWINS: Final = {"pretrain-gnns:gcn": "pretrain-gnns:sage", "pretrain-gnns:sage": "pretrain-gnns:gcn"}

#: The first weight of an encoder, after which everything of it is found.
_FIRST: Final = ("x_embedding1.weight", "atom_encoder.atom_embedding_list.0.weight")

#: How names in an encoder begin.
_ENCODER: Final = re.compile(
    r"(x_embedding[12]|gnns|batch_norms|atom_encoder|convs|virtualnode_embedding"
    r"|mlp_virtualnode_list)\."
)

#: The layer that predicts, where there is one.
_READOUT: Final = "graph_pred_linear."


@dataclass(frozen=True)
class Sizes:
    """What the shapes of a file say about its network; by default the published sizes."""

    atoms: Sequence[int]
    bonds: Sequence[int]
    num_layer: int = 5
    emb_dim: int = 300
    #: Outputs of its own readout; None for an encoder, which has none.
    num_tasks: int | None = None


_DEFAULTS: Final = {
    "pretrain-gnns": Sizes((120, 3), (6, 3)),
    "molclr": Sizes((119, 3), (5, 3)),
    "ogb": Sizes((119, 5, 12, 12, 10, 6, 6, 2, 2), (5, 6, 2)),
}

#: Arguments that leave no trace in the weights, and what they may be.
_CHOICES: Final[dict[str, dict[str, Sequence[Any]]]] = {
    "pretrain-gnns": {"graph_pooling": tuple(POOLS)},
    "molclr": {"graph_pooling": tuple(POOLS)},
    "ogb": {"graph_pooling": tuple(POOLS), "residual": (False, True), "JK": ("last", "sum")},
}


def build_public(
    name: str,
    args: Mapping[str, Any],
    *,
    state_dict: Mapping[str, Tensor] | None = None,
    in_dim: int | Sequence[int] | None = None,
    out_dim: int | None = None,
    filled: dict[str, Any] | None = None,
) -> nn.Module:
    """Return the network of a public checkpoint with initial weights.

    Args:
        name: One of :data:`PUBLIC_MODELS`.
        args: ``graph_pooling`` and ``drop_ratio``, for OGB's also ``residual`` and ``JK``; where
            there are no weights to read sizes from, ``num_layer`` and ``emb_dim``.
        state_dict: The weights to be loaded later, as :func:`adapted` names them.
        in_dim: Node features of the data.
        out_dim: Outputs that the labels ask for, where there are no weights.
        filled: Sizes from when the model was built before; receives those of now.
    """
    family, kind = name.split(":")
    choices, options = _CHOICES[family], dict(args)
    known = {**({} if filled is None else filled), **options}
    if state_dict:
        sizes = _sizes_of(state_dict)
    else:
        given = {key: known[key] for key in ("num_layer", "emb_dim", "num_tasks") if key in known}
        tables = {key: tuple(known[key]) for key in ("atoms", "bonds") if key in known}
        sizes = replace(_DEFAULTS[family], **{"num_tasks": out_dim, **given, **tables})
    for key in ("num_layer", "emb_dim"):
        if options.pop(key, getattr(sizes, key)) != getattr(sizes, key):
            raise ModelError(f"{name}: found {key}={getattr(sizes, key)}, not {args[key]}")
    drop_ratio = float(options.pop("drop_ratio", 0.0))
    for key, value in options.items():
        if key not in choices:
            expected = ", ".join([*choices, "drop_ratio", "num_layer", "emb_dim"])
            raise ModelError(f"{name}: unknown argument {key!r}, expected one of {expected}")
        if value not in choices[key]:
            expected = ", ".join(map(str, choices[key]))
            raise ModelError(f"{name}: {key}={value}, expected one of {expected}")
    columns = in_dim if in_dim is None or isinstance(in_dim, int) else len(in_dim)
    if columns is not None and columns != len(sizes.atoms):
        raise ModelError(
            f"{name} reads {len(sizes.atoms)} node features, the data has {columns}; its molecules "
            f"are encoded with mol_features={RECIPES[name].features}"
        )
    if filled is not None:
        filled |= {key: value for key, value in vars(sizes).items() if value is not None}
    pooling = str(options.pop("graph_pooling", "mean"))
    shape = {"atoms": sizes.atoms, "bonds": sizes.bonds, "num_layer": sizes.num_layer}
    if family == "ogb":
        conv, _, virtual = kind.partition("-")
        nodes = OgbNodes(
            {"gcn": OgbGCN, "gin": OgbGIN}[conv],  # type: ignore[arg-type]  # one of the two
            **shape,
            emb_dim=sizes.emb_dim,
            virtual_node=bool(virtual),
            drop_ratio=drop_ratio,
            **options,
        )
        return nodes if sizes.num_tasks is None else OgbPrediction(nodes, sizes.num_tasks, pooling)
    gnn = MoleculeGNN(_CONVS[name], **shape, emb_dim=sizes.emb_dim, drop_ratio=drop_ratio)
    return gnn if sizes.num_tasks is None else MoleculePrediction(gnn, sizes.num_tasks, pooling)


def _sizes_of(weights: Mapping[str, Tensor]) -> Sizes:
    """Read the sizes off weights that :func:`adapted` has named."""
    atoms = [
        value
        for name, value in weights.items()
        if re.search(r"(^|\.)(x_embedding[12]|atom_embedding_list\.\d+)\.weight$", name)
    ]
    bonds = [
        value.shape[0]
        for name, value in weights.items()
        if re.search(r"\.0\.(edge_embedding[12]|bond_encoder\.bond_embedding_list\.\d+)\.w", name)
    ]
    layers = {m[1] for m in (re.search(r"(?:gnns|convs)\.(\d+)\.", name) for name in weights) if m}
    readout = weights.get(f"{_READOUT}weight")
    return Sizes(
        atoms=tuple(table.shape[0] for table in atoms),
        bonds=tuple(bonds),
        num_layer=len(layers),
        emb_dim=atoms[0].shape[1],
        num_tasks=None if readout is None else readout.shape[0],
    )


# --- the weights of a file


def family_of(weights: Mapping[str, Tensor]) -> str | None:
    """Return the public model whose weights these look like, by names and shapes; else None.

    GCN and GraphSAGE of pretrain-gnns look alike: it is the former that is returned, unless what
    the batch norms were given always had length one, as GraphSAGE makes it.
    """
    names = {name.rpartition("gnns.0.")[2] for name in weights if "gnns.0." in name}
    ogb = {name.rpartition("convs.0.")[2] for name in weights if "convs.0." in name}
    if "bond_encoder.bond_embedding_list.0.weight" in ogb:
        virtual = any("virtualnode_embedding." in name for name in weights)
        kind = "gcn" if "root_emb.weight" in ogb else "gin" if "eps" in ogb else None
        return None if kind is None else f"ogb:{kind}{'-virtual' if virtual else ''}"
    if "edge_embedding1.weight" not in names:
        return None
    bonds = next(v for k, v in weights.items() if k.endswith("gnns.0.edge_embedding1.weight"))
    if "mlp.0.weight" in names:
        molclr = bonds.shape[0] == _DEFAULTS["molclr"].bonds[0]
        return "molclr:gin" if molclr else "pretrain-gnns:gin"
    if "att" in names:
        return "pretrain-gnns:gat"
    if "weight" in names:
        return "molclr:gcn"
    if "linear.weight" not in names:
        return None
    return "pretrain-gnns:sage" if _unit_length(weights) else "pretrain-gnns:gcn"


def _unit_length(weights: Mapping[str, Tensor]) -> bool:
    """Whether the inputs of all batch norms had length one: their second moments add up to it."""
    lengths = [
        float((weights[name.replace("running_mean", "running_var")] + mean.square()).sum())
        for name, mean in weights.items()
        if re.search(r"(^|\.)batch_norms\.\d+\.running_mean$", name)
        and name.replace("running_mean", "running_var") in weights
    ]
    return bool(lengths) and all(abs(length - 1) < 0.05 for length in lengths)


def adapted(name: str, checkpoint: Checkpoint) -> tuple[Checkpoint, tuple[str, ...]]:
    """Return a file's weights by the names of this package's networks, and what is left out.

    An encoder may stand under any name (``gnn.``, ``molecule_model.``), with or without a readout.
    Projections, decoders and other parts that only served to train it are left out.

    Raises:
        CheckpointError: for the weights of another family, which is named.
    """
    weights = checkpoint.state_dict
    found = family_of(weights)
    if found != name and not (found is not None and _TWINS.get(found) == name):
        raise _other_family(name, found, checkpoint.path)
    prefixes = [key.removesuffix(first) for key in weights for first in _FIRST if _ends(key, first)]
    if len(prefixes) != 1:
        raise CheckpointError(
            f"{checkpoint.path}: found {len(prefixes)} tables of atoms, expected the weights of "
            f"one {name}: choose with --state NAME"
        )
    start = prefixes[0]
    encoder = {
        key.removeprefix(start): value
        for key, value in weights.items()
        if key.startswith(start) and _ENCODER.match(key.removeprefix(start))
    }
    outer = start[: start.rstrip(".").rfind(".") + 1]
    readout = {
        key.removeprefix(outer): value
        for key, value in weights.items()
        if key.startswith(outer + _READOUT) and not name.startswith("molclr")
    }
    if readout:
        within = "gnn_node." if name.startswith("ogb") else "gnn."
        encoder = {within + key: value for key, value in encoder.items()}
    taken = {**encoder, **readout}
    parts = dict.fromkeys(
        key.removeprefix(outer).partition(".")[0]
        for key in weights
        if not (key.startswith(start) and _ENCODER.match(key.removeprefix(start)))
        and key.removeprefix(outer) not in readout
    )
    return replace(checkpoint, state_dict=taken, stripped=()), tuple(parts)


def _ends(key: str, first: str) -> bool:
    return key == first or key.endswith(f".{first}")


def _other_family(name: str, found: str | None, path: Path) -> CheckpointError:
    if found is None:
        return CheckpointError(
            f"{path}: found none of the weights of {name}, expected such a file; histograph "
            "recipes lists where they are, and another model is named --model file.py:Name"
        )
    return CheckpointError(
        f"{path}: found the weights of {found}, expected those of {name}: type --model {found}"
    )


# --- the fingerprint of a forward pass

#: Batch norms that are looked at: the first ones have seen the least of what else may differ.
_NORMS: Final = 2
#: A family is refused if what its batch norms are given differs from what they recorded by more
#: than this (the logarithm of a ratio of variances), and another's by less than half of it. Of the
#: public files, wrong families differ by 2 and more, the right ones by 0.4 at most.
_DIFFERS: Final = 1.0
#: Molecules to look at, at most.
_MOLECULES: Final = 64


def check_family(
    name: str, args: Mapping[str, Any], model: nn.Module, graphs: Sequence[Data], path: Path
) -> None:
    """Refuse weights that fit a network by name and shape, and another one by what they do.

    Args:
        name: The public model that was named.
        args: Its arguments.
        model: The network with the weights in it.
        graphs: Some of the data.
        path: The file, for the error.
    """
    others: list[tuple[str, str, dict[str, Any]]] = []
    if name in _TWINS:
        others.append((_TWINS[name], f"--model {_TWINS[name]}", {}))
    if name.startswith("ogb:"):
        residual = not args.get("residual", False)
        others.append((name, f"--model-args residual={str(residual).lower()}", {"residual": residual}))
    step = max(len(graphs) // _MOLECULES, 1)
    sample = list(graphs[::step][:_MOLECULES])
    here = _misfit(model, sample)
    if not others or here is None or here < _DIFFERS:
        return
    weights = model.state_dict()
    for other, words, changed in others:
        twin = build_public(other, {**args, **changed}, state_dict=weights)
        twin.load_state_dict(weights)
        there = _misfit(twin.eval(), sample)
        if there is not None and there < here / 2:
            like = other if other != name else f"{name} with {words.rpartition(' ')[2]}"
            raise CheckpointError(
                f"{path}: found the weights of {like}, expected those of {name}: what its batch "
                f"norms recorded differs by a factor of {torch.tensor(here).exp():.0f} from what "
                f"they are given: type {words}"
            )


@torch.inference_mode()
def _misfit(model: nn.Module, graphs: Sequence[Data]) -> float | None:
    """Return by how much what the first batch norms are given differs from what they recorded.

    None of a network whose batch norms have recorded nothing.
    """
    norms = [
        module
        for name, module in model.named_modules()
        if re.search(r"(^|\.)batch_norms\.\d+$", name)
    ][:_NORMS]
    if any(norm.num_batches_tracked is not None and norm.num_batches_tracked == 0 for norm in norms):
        return None
    found: list[float] = []

    def look(norm: nn.BatchNorm1d, inputs: tuple[Tensor, ...]) -> None:
        (given,) = inputs  # [N, width]
        off = given.var(dim=0) + (given.mean(dim=0) - norm.running_mean).square()  # [width]
        found.append(abs(float((off / (norm.running_var + norm.eps)).log().median())))

    hooks = [norm.register_forward_pre_hook(look) for norm in norms]
    try:
        call_model(model, make_batch(graphs))
    finally:
        for hook in hooks:
            hook.remove()
    return sum(found) / len(found)


def check_features(name: str, model: nn.Module, graphs: Sequence[Data], ids: Sequence[str]) -> None:
    """Refuse data whose features are not rows of the tables of a public model."""
    sizes = _sizes_of(model.state_dict())
    for what, tables, rows in (
        ("node", sizes.atoms, [graph.x for graph in graphs]),
        ("edge", sizes.bonds, [graph.get("edge_attr") for graph in graphs]),
    ):
        for graph, features in zip(ids, rows, strict=True):
            problem = _feature_problem(features, tables)
            if problem is not None:
                raise DataError(
                    f"graph {graph!r}: found {what} features {problem}, expected "
                    f"mol_features={RECIPES[name].features}, which {name} was trained on"
                )


def _feature_problem(features: Tensor | None, tables: Sequence[int]) -> str | None:
    if features is None:
        return "of none at all"
    if features.is_floating_point() or features.dim() != 2 or features.shape[1] != len(tables):
        return f"{list(features.shape)} {str(features.dtype).removeprefix('torch.')}"
    if not len(features):
        return None
    highest, lowest = features.amax(dim=0), int(features.min())  # [columns]
    for column, (value, size) in enumerate(zip(highest.tolist(), tables, strict=True)):
        if value >= size or lowest < 0:
            return f"up to {value} in column {column}, whose table has {size} rows"
    return None


def left_out_notes(parts: Sequence[str]) -> list[str]:
    """Say what of a file is not used."""
    if not parts:
        return []
    return [f"left out, as it only served to train the encoder: {listed(parts)}"]


assert set(_CONVS) | {name for name in PUBLIC_MODELS if name.startswith("ogb")} == set(PUBLIC_MODELS)
