"""What public weights do: a pass over a few molecules tells networks of the same weights apart.

GCN and GraphSAGE of pretrain-gnns have weights of the same names and shapes, and a residual
connection leaves no trace in them. But what a batch norm is given must have about the mean and
variance that it recorded in training: of the network that was trained it has.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch_geometric.data import Data

from ..data import GraphDataset
from ..data.batching import make_batch
from ..errors import CheckpointError, DataError
from .model_call import call_model
from .public_models import build_public, sizes_of
from .recipes import RECIPES
from .spec import ModelSpec

#: Two networks whose weights have the same names and shapes.
_TWINS: Final = {
    "pretrain-gnns:gcn": "pretrain-gnns:sage",
    "pretrain-gnns:sage": "pretrain-gnns:gcn",
}

#: Batch norms that are looked at: the first ones have seen the least of what else may differ.
_NORMS: Final = 2
#: A family is refused if what its batch norms are given differs from what they recorded by more
#: than this (the logarithm of a ratio of variances), and another's by less than half of it. Of the
#: public files, wrong families differ by 13 and more, the right ones by 0.6 at most.
_DIFFERS: Final = 1.0
#: Molecules to look at, at most.
_MOLECULES: Final = 64


def check_public(spec: ModelSpec, model: nn.Module, dataset: GraphDataset) -> None:
    """Refuse data of other features, and weights that by what they do are another network's.

    Args:
        spec: The public model as it was named.
        model: The network with the weights in it.
        dataset: The molecules.
    """
    name, args = spec.spec, spec.args
    _check_features(name, model, dataset)
    others: list[tuple[str, str, dict[str, Any]]] = []
    if name in _TWINS:
        others.append((_TWINS[name], f"--model {_TWINS[name]}", {}))
    if name.startswith("ogb:"):
        residual = not args.get("residual", False)
        others.append(
            (name, f"--model-args residual={str(residual).lower()}", {"residual": residual})
        )
    sample = dataset.graphs[:: max(len(dataset) // _MOLECULES, 1)][:_MOLECULES]
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
                f"{spec.checkpoint}: found the weights of {like}, expected those of {name}: its "
                f"batch norms recorded variances {math.exp(here):.1g} times off: type {words}"
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
    if any(
        norm.num_batches_tracked is not None and norm.num_batches_tracked == 0 for norm in norms
    ):
        return None
    found: list[float] = []

    def look(norm: nn.BatchNorm1d, inputs: tuple[Tensor, ...]) -> None:
        (given,) = inputs  # [N, width]
        assert norm.running_var is not None  # it was loaded
        ratio = (given.var(dim=0) + norm.eps) / (norm.running_var + norm.eps)  # [width]
        found.append(abs(float(ratio.log().median())))

    hooks = [norm.register_forward_pre_hook(look) for norm in norms]
    try:
        call_model(model, make_batch(graphs))
    finally:
        for hook in hooks:
            hook.remove()
    return max(found)


def _check_features(name: str, model: nn.Module, dataset: GraphDataset) -> None:
    """Refuse data whose features are not rows of the tables of a public model."""
    sizes = sizes_of(model.state_dict())
    for graph, label in zip(dataset.graphs, dataset.ids, strict=True):
        for what, tables, features in (
            ("node", sizes.atoms, graph.x),
            ("edge", sizes.bonds, graph.get("edge_attr")),
        ):
            problem = _feature_problem(features, tables)
            if problem is not None:
                raise DataError(
                    f"{dataset.spec}: {label}: found {what} features {problem}, expected "
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
