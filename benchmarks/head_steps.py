"""A step of the head, forward and backward, against the literal algorithm and another readout."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.nn.aggr import GraphMultisetTransformer
from torch_geometric.utils import scatter, to_dense_batch

from histograph_post.heads.histograph import PAPER_FORM, HistoGraphHead, accelerate
from histograph_post.training.batches import HeadInputs, HeadNetwork

from .measuring import Ratio, race, speedup
from .workloads import GraphRows, Workloads

#: The floor at each number of layers.
FLOORS: Mapping[int, float] = {33: 4.5, 65: 7.0, 6: 3.0}
TRANSFORMER_FLOOR = 5.0
#: The largest error of the head, relative to the largest value. Where the literal algorithm itself
#: is less exact (in the paper's form, a sum of scores near zero), a small multiple of its error.
TOLERANCE = 1e-5

#: The forms that are compared, without dropout, so that outputs can be compared as well.
FORMS: Mapping[str, Mapping[str, Any]] = {
    "default form": {"statistics_dropout": 0.0},
    "paper's form": PAPER_FORM,
}

HEAD, LITERAL, PADDED = "head", "literal algorithm", "literal algorithm, padded"


def head_steps(work: Workloads) -> list[Ratio]:
    """Compare a step on one batch of molecules with the literal algorithm, padded and not."""
    found = []
    nodes = work.molecules.num_nodes[: work.sizes.batch_size]
    for layers, floor in FLOORS.items():
        rows = GraphRows.random(nodes, layers, work.sizes.width)
        for form, options in FORMS.items():
            head = make_head(rows, work.sizes.width, options)
            forwards = {name: partial(run, head, rows) for name, run in FORWARDS.items()}
            medians = race(
                {name: partial(train_step, head, run) for name, run in forwards.items()},
                rounds=work.sizes.rounds,
                steps=work.sizes.steps,
            )
            errors = rounding_errors(head, rows)
            found += [
                speedup(
                    f"head step, L = {layers}, {form}",
                    medians,
                    HEAD,
                    other,
                    floor,
                    note=f"{rows}; off the exact values and gradients by {errors[HEAD]:.0e}, "
                    f"the literal algorithm by {errors[other]:.0e}",
                    same_results=errors[HEAD] <= max(TOLERANCE, 4 * errors[other]),
                )
                for other in (LITERAL, PADDED)
            ]
    return found


def transformer_steps(work: Workloads) -> list[Ratio]:
    """Compare a step on wide layers with GraphMultisetTransformer on the last one of them."""
    found = []
    nodes = work.molecules.num_nodes[: work.sizes.batch_size]
    layers, width = 6, work.sizes.molecule_width
    rows = GraphRows.random(nodes, layers, width)
    clusters = max(1, round(float(nodes.mean()) / 4))
    other = f"GraphMultisetTransformer, k = {clusters}"
    torch.manual_seed(0)
    network = nn.ModuleList(
        [GraphMultisetTransformer(width, k=clusters, heads=4), nn.Linear(width, 1)]
    )

    def pool() -> Tensor:
        last = rows.history[:, -1]  # [num_nodes, D]
        pooled = network[0](last, index=rows.batch, dim_size=rows.num_graphs)  # [num_graphs, D]
        outputs: Tensor = network[1](pooled)  # [num_graphs, 1]
        return outputs

    for form, options in FORMS.items():
        head = make_head(rows, work.sizes.width, options)
        medians = race(
            {
                HEAD: partial(train_step, head, partial(FORWARDS[HEAD], head, rows)),
                other: partial(train_step, network, pool),
            },
            rounds=work.sizes.rounds,
            steps=work.sizes.steps,
        )
        name = f"head step, D = {width}, L = {layers}, {form}"
        found.append(speedup(name, medians, HEAD, other, TRANSFORMER_FLOOR, note=str(rows)))
    return found


def _forward(head: HistoGraphHead, rows: GraphRows) -> Tensor:
    """Run the head as training does."""
    inputs = HeadInputs(rows.history, rows.batch, rows.num_graphs, statistics=rows.statistics)
    outputs: Tensor = HeadNetwork(head)(inputs)  # [num_graphs, out_dim]
    return outputs


def make_head(rows: GraphRows, dim: int, options: Mapping[str, Any]) -> HistoGraphHead:
    """Return an untrained head for such rows."""
    torch.manual_seed(0)
    _, layers, width = rows.history.shape
    return HistoGraphHead([width] * layers, 1, dim=dim, **options)


def train_step(network: nn.Module, forward: Callable[[], Tensor]) -> Tensor:
    """Run forward and backward; return the outputs."""
    network.zero_grad(set_to_none=True)
    in_kernels = getattr(forward, "func", None) is _forward
    with accelerate.threads(network) if in_kernels else nullcontext():
        outputs = forward()
        outputs.square().mean().backward()
    return outputs.detach()


def results(network: nn.Module, forward: Callable[[], Tensor]) -> dict[str, Tensor]:
    """Return the outputs of a step and the gradients of all parameters, by name."""
    outputs = train_step(network, forward)
    gradients = {
        name: parameter.grad.clone()
        for name, parameter in network.named_parameters()
        if parameter.grad is not None
    }
    return {"outputs": outputs, **gradients}


def rounding_errors(head: HistoGraphHead, rows: GraphRows) -> dict[str, float]:
    """Return the largest error of each forward pass against double precision."""
    exact_head = copy.deepcopy(head).double()
    exact_rows = replace(rows, history=rows.history.double())
    exact = results(exact_head, partial(FORWARDS[LITERAL], exact_head, exact_rows))
    return {
        name: largest_difference(results(head, partial(run, head, rows)), exact)
        for name, run in FORWARDS.items()
    }


def largest_difference(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Return the largest difference between results, relative to the largest value of each."""
    if found.keys() != expected.keys():
        return float("inf")
    apart = [
        float((found[name] - value).abs().max() / value.abs().max().clamp(min=1e-6))
        for name, value in expected.items()
    ]
    return max(apart)


def _literal(head: HistoGraphHead, rows: GraphRows, *, pad_history: bool) -> Tensor:
    """Run the algorithm as it is written, with the head's weights: ``[num_graphs, out_dim]``.

    Args:
        head: A graph-level head.
        pad_history: Pad the whole batch to its largest graph, not only for node attention.
    """
    history, batch, num_graphs = rows.history, rows.batch, rows.num_graphs
    options, stage = head.options, head.layer_weights
    parts, size = options.layer_heads, options.dim // options.layer_heads
    if pad_history:
        padded, mask = to_dense_batch(history.flatten(1), batch, batch_size=num_graphs)
        history = padded.unflatten(-1, history.shape[1:])  # [num_graphs, largest, L, D]
    embedded = stage.last_embedding(history) + stage.encoding  # [..., L, dim]
    query = (embedded[..., -1, :] @ stage.query).unflatten(-1, (parts, size))
    key = (embedded @ stage.key).unflatten(-1, (parts, size))  # [..., L, parts, size]
    scores = torch.einsum("...pe,...lpe->...pl", query, key) / math.sqrt(size)
    if pad_history:
        sizes = mask.sum(1).view(-1, 1, 1)  # [num_graphs, 1, 1]
        scores = (scores * mask[..., None, None]).sum(1) / sizes  # [num_graphs, parts, L]
    else:
        scores = scatter(scores, batch, dim=0, dim_size=num_graphs, reduce="mean")
    weights = stage.normalize(scores)
    value = embedded.unflatten(-1, (parts, size))  # [..., L, parts, size]
    if pad_history:
        nodes = torch.einsum("gpl,gnlpe->gnpe", weights, value).flatten(2)
    else:
        nodes = torch.einsum("npl,nlpe->npe", weights[batch], value).flatten(1)
        nodes, mask = to_dense_batch(nodes, batch, batch_size=num_graphs)
    attended = _attend(head, nodes, mask)  # [num_graphs, largest, dim]
    if options.residual:
        attended = attended + nodes
    counts = mask.sum(1, keepdim=True)  # [num_graphs, 1]
    readout = (attended * mask.unsqueeze(-1)).sum(1) / counts  # [num_graphs, dim]
    if head.statistics is not None and head.all_layers is not None:
        described = head.statistics(
            rows.statistics, counts.squeeze(1)
        )  # [num_graphs, described_dim]
        base = head.all_layers(described)  # [num_graphs, dim]
    elif pad_history:
        last = (history[..., -1, :] * mask.unsqueeze(-1)).sum(1) / counts  # [num_graphs, D]
        base = stage.last_embedding(last)  # [num_graphs, dim]
    else:
        last = scatter(history[:, -1], batch, dim=0, dim_size=num_graphs, reduce="mean")
        base = stage.last_embedding(last)  # [num_graphs, dim]
    mixed = head.mixing(readout, base)
    if head.output_norm is not None:
        mixed = head.output_norm(mixed)
    outputs: Tensor = head.output(head.mlp(mixed))
    return outputs


def _attend(head: HistoGraphHead, nodes: Tensor, mask: Tensor) -> Tensor:
    """Attend with PyTorch's own multi-head attention, padded: ``[num_graphs, largest, dim]``."""
    attention = head.node_attention
    assert attention is not None  # both forms have it
    rows = nodes.transpose(0, 1)  # [largest, num_graphs, dim]
    attended, _ = functional.multi_head_attention_forward(
        rows,
        rows,
        rows,
        head.options.dim,
        head.options.heads,
        attention.in_projection.weight,
        attention.in_projection.bias,
        None,
        None,
        False,
        0.0,
        attention.out_projection.weight,
        attention.out_projection.bias,
        key_padding_mask=~mask,
        need_weights=False,
    )
    return attended.transpose(0, 1)


#: The same outputs in several ways.
FORWARDS: Mapping[str, Callable[[HistoGraphHead, GraphRows], Tensor]] = {
    HEAD: _forward,
    LITERAL: partial(_literal, pad_history=False),
    PADDED: partial(_literal, pad_history=True),
}
