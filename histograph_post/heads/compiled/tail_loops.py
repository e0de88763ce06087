"""What a head does with one row per graph: from what the loops over graphs found to its outputs."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .graph_records import Results
from .head_weights import Form, HeadWeights, view_weights
from .loops import ONE, ZERO, Floats, Parts, loop, take_number
from .products import add_dots_of_rows, add_product, dot, write_product
from .row_loops import add_rows, clear, repeat_row
from .teams import TeamLoop

#: What a LayerNorm adds to a variance.
NORM_EPS = np.float32(1e-5)


class KeptRows(NamedTuple):
    """What the forward pass finds on its way and the backward pass uses again."""

    #: How far a readout is from what it is mixed with, ``[copies, num_graphs, dim]``.
    differences: Floats
    #: What comes out of the mixing, normalised but not scaled, ``[copies, num_graphs, dim]``.
    mixed: Floats
    #: What that was divided by, ``[copies, num_graphs]``.
    deviations: Floats
    #: What goes into the linear maps of the MLP, ``[copies, hidden + 1, num_graphs, dim]``.
    inputs: Floats


@loop
def run_tails(
    parts: Parts,
    weights: Floats,
    form: Form,
    found: Results,
    layer_means: Floats,
    kept: KeptRows,
    outputs: Floats,
) -> None:
    """Run copies of a head from the rows of graphs on, as long as there are parts to be taken.

    Args:
        parts: Two of each copy: half of the graphs each.
        weights: All weights of each copy, ``[copies, numel]``.
        form: What the head is made of.
        found: What the loops have made of the graphs.
        layer_means: Means over the nodes of every layer, ``[num_graphs, L * D]``.
        kept: Filled in.
        outputs: Filled in, ``[copies, num_graphs, out_dim]``.
    """
    while True:
        copy, half = divmod(take_number(parts.next), 2)
        if copy >= len(weights):
            return
        own, middle = view_weights(weights[copy], form), (len(layer_means) + 3) // 8 * 4
        first, stop = (0, middle) if half == 0 else (middle, len(layer_means))
        difference = kept.differences[copy, first:stop]  # [graphs, dim]
        apply(own.projection, own.projection_bias, found.contexts[copy, first:stop], difference)
        if form.residual:
            add_to(found.means[copy, first:stop], ONE, difference)
        mixed = kept.mixed[copy, first:stop]  # [graphs, dim]
        apply(own.base, own.base_bias, base_rows(layer_means[first:stop], form), mixed)
        add_to(mixed, -ONE, difference)
        add_to(difference, share_of(own, form), mixed)
        rows = kept.inputs[copy, 0, first:stop]  # [graphs, dim]
        if form.normed:
            normalize_rows(mixed, kept.deviations[copy, first:stop], own.norm, rows)
        else:
            clear(rows)
            add_to(mixed, ONE, rows)
        for layer in range(form.hidden):
            weight, bias = hidden_map(own, layer, form)
            following = kept.inputs[copy, layer + 1, first:stop]
            apply(weight, bias, rows, following)
            rectify(following, following)
            rows = following
        apply(own.output, own.output_bias, rows, outputs[copy, first:stop])


RUN_TAILS = TeamLoop(run_tails)


@loop
def run_tails_back(
    parts: Parts,
    weights: Floats,
    form: Form,
    found: Results,
    kept: KeptRows,
    grad_outputs: Floats,
    grad_found: Results,
    grad_base: Floats,
    gradients: Floats,
) -> None:
    """Give the gradients of :func:`run_tails`, but for the map of the means of layers.

    Args:
        parts: A copy each.
        weights: All weights of each copy, ``[copies, numel]``.
        form: What the head is made of.
        found: What the loops have made of the graphs.
        kept: What :func:`run_tails` has left.
        grad_outputs: ``[copies, num_graphs, out_dim]``.
        grad_found: Of what the loops have made, filled in.
        grad_base: Of what a readout is mixed with, filled in, ``[copies, num_graphs, dim]``.
        gradients: Of the weights, added to, ``[copies, numel]``.
    """
    while True:
        copy = take_number(parts.next)
        if copy >= len(weights):
            return
        own, grad = view_weights(weights[copy], form), view_weights(gradients[copy], form)
        rows = kept.inputs[copy]  # [hidden + 1, num_graphs, dim]
        grad_rows, grad_next = np.empty_like(rows[0]), np.empty_like(rows[0])
        last = form.hidden
        apply_back(
            own.output, rows[last], grad_outputs[copy], grad.output, grad.output_bias, grad_rows
        )
        for layer in range(last - 1, -1, -1):
            rectify(rows[layer + 1], grad_rows)
            weight, _ = hidden_map(own, layer, form)
            grad_weight, grad_bias = hidden_map(grad, layer, form)
            apply_back(weight, rows[layer], grad_rows, grad_weight, grad_bias, grad_next)
            grad_rows, grad_next = grad_next, grad_rows
        if form.normed:
            mixed, deviations = kept.mixed[copy], kept.deviations[copy]
            normalize_rows_back(mixed, deviations, own.norm, grad_rows, grad.norm)
        share, along = share_of(own, form), ZERO
        grad_attended = grad_found.means[copy] if form.residual else grad_next  # [num_graphs, dim]
        for graph in range(len(grad_rows)):
            along += dot(grad_rows[graph], kept.differences[copy, graph])
            for place in range(form.dim):
                grad_attended[graph, place] = share * grad_rows[graph, place]
                grad_base[copy, graph, place] = (
                    grad_rows[graph, place] - grad_attended[graph, place]
                )
        if form.share < ZERO:
            grad.logit[0, 0] += along * share * (ONE - share)
        add_rows(grad_base[copy], grad.base_bias[0])
        apply_back(
            own.projection,
            found.contexts[copy],
            grad_attended,
            grad.projection,
            grad.projection_bias,
            grad_found.contexts[copy],
        )
        if not form.residual:
            clear(grad_found.means[copy])


RUN_TAILS_BACK = TeamLoop(run_tails_back)


@loop
def run_bases_back(
    parts: Parts, form: Form, layer_means: Floats, grad_base: Floats, gradients: Floats
) -> None:
    """Give the gradient of the map of the means of layers, which is the largest of all.

    Args:
        parts: Four of each copy: a quarter of the outputs of the map each.
        form: What the head is made of.
        layer_means: Means over the nodes of every layer, ``[num_graphs, L * D]``.
        grad_base: Of what came out, ``[copies, num_graphs, dim]``.
        gradients: Of the weights, added to, ``[copies, numel]``.
    """
    while True:
        copy, quarter = divmod(take_number(parts.next), 4)
        if copy >= len(gradients):
            return
        grad, rows = view_weights(gradients[copy], form), base_rows(layer_means, form)
        first, stop = form.dim * quarter // 4, form.dim * (quarter + 1) // 4
        outputs = grad_base[copy][:, first:stop]  # [num_graphs, dim / 4]
        add_product(outputs.T, rows, 0, grad.base[first:stop], 0, rows.shape[1])


RUN_BASES_BACK = TeamLoop(run_bases_back)


@loop
def base_rows(layer_means: Floats, form: Form) -> Floats:
    """Return the means that a readout is mixed with: of all layers, or a copy of the last."""
    if form.mixes_all:
        return layer_means
    return layer_means[:, -form.channels :].copy()


@loop
def share_of(weights: HeadWeights, form: Form) -> np.float32:
    """Return the share of the readout in what it is mixed with."""
    if form.share >= ZERO:
        return form.share
    return np.float32(1 / (1 + np.exp(-np.float64(weights.logit[0, 0]))))


@loop
def hidden_map(weights: HeadWeights, layer: int, form: Form) -> tuple[Floats, Floats]:
    """Return a map of the MLP, ``[dim, dim]`` and ``[1, dim]``."""
    dim, values = form.dim, weights.hidden[layer]
    return values[: dim * dim].reshape(dim, dim), values[dim * dim :].reshape(1, dim)


@loop
def apply(weight: Floats, bias: Floats, rows: Floats, result: Floats) -> None:
    """Write what a linear map makes of rows: ``[n, in]`` to ``[n, out]``."""
    repeat_row(bias[0], ONE, result)
    add_dots_of_rows(rows, weight, result)


@loop
def apply_back(
    weight: Floats,
    rows: Floats,
    grad: Floats,
    grad_weight: Floats,
    grad_bias: Floats,
    result: Floats,
) -> None:
    """Give the gradients of :func:`apply`.

    Args:
        weight: ``[out, in]``.
        rows: What it was applied to, ``[n, in]``.
        grad: Of what came out, ``[n, out]``.
        grad_weight: Added to, ``[out, in]``.
        grad_bias: Added to, ``[1, out]``.
        result: Of the rows, filled in, ``[n, in]``.
    """
    add_product(grad.T, rows, 0, grad_weight, 0, rows.shape[1])
    add_rows(grad, grad_bias[0])
    write_product(grad, weight, 0, result, 0, rows.shape[1])


@loop
def add_to(values: Floats, factor: np.float32, result: Floats) -> None:
    """Add a multiple of a matrix to another."""
    for row in range(len(result)):
        for place in range(result.shape[1]):
            result[row, place] += factor * values[row, place]


@loop
def rectify(values: Floats, result: Floats) -> None:
    """Clear the places of a matrix where another is not positive; NaN stays what it is."""
    for row in range(len(result)):
        for place in range(result.shape[1]):
            if values[row, place] <= ZERO:
                result[row, place] = ZERO


@loop
def normalize_rows(rows: Floats, deviations: Floats, norm: Floats, result: Floats) -> None:
    """Normalise rows, and write them scaled and shifted.

    Args:
        rows: ``[n, dim]``; normalised where they are.
        deviations: Filled in, ``[n]``.
        norm: Scale and shift, ``[2, dim]``.
        result: Filled in, ``[n, dim]``.
    """
    size = np.float32(rows.shape[1])
    for row in range(len(rows)):
        values, mean = rows[row], ZERO
        for place in range(len(values)):
            mean += values[place]
        mean /= size
        for place in range(len(values)):
            values[place] -= mean
        deviation = np.sqrt(dot(values, values) / size + NORM_EPS)
        deviations[row] = deviation
        for place in range(len(values)):
            values[place] /= deviation
            result[row, place] = values[place] * norm[0, place] + norm[1, place]


@loop
def normalize_rows_back(
    normed: Floats, deviations: Floats, norm: Floats, grad: Floats, grad_norm: Floats
) -> None:
    """Turn the gradient of what :func:`normalize_rows` wrote into that of its rows.

    Args:
        normed: The normalised rows, ``[n, dim]``.
        deviations: ``[n]``.
        norm: Scale and shift, ``[2, dim]``.
        grad: Changed where it is, ``[n, dim]``.
        grad_norm: Added to, ``[2, dim]``.
    """
    size = np.float32(normed.shape[1])
    for row in range(len(grad)):
        own, values, mean = grad[row], normed[row], ZERO
        for place in range(len(own)):
            grad_norm[0, place] += own[place] * values[place]
            grad_norm[1, place] += own[place]
            own[place] *= norm[0, place]
            mean += own[place]
        mean /= size
        along = dot(own, values) / size
        for place in range(len(own)):
            own[place] = (own[place] - mean - along * values[place]) / deviations[row]
