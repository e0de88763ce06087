"""Figures of layers: their weights, their distance to the last, and over-smoothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..caches import Cache
from ..errors import HistographError
from ..runs.run import Run
from ..tasks import Task
from ..utils.text import MINUS, number, plural
from .figures import CHOSEN, DASHES, MARKERS, MUTED, RIVAL, Chart, Figure, draw_cells, series_colour
from .layer_analysis import (
    LayerProfile,
    Quartiles,
    Sample,
    Smoothness,
    TrainedHead,
    cache_of,
    load_fit_head,
    sample_test_graphs,
)
from .outcomes import Outcome
from .page import Section, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Layers that are labelled on the axis at most.
_MAX_TICKS = 12

#: Up to so many layers, each has a marker.
_MARKED_LAYERS = 24

#: Up to so many layers, each weight is written in its cell.
_WRITTEN_LAYERS = 10

#: A quantity that changes by more than this factor over the layers is drawn on a logarithmic axis.
_LOGARITHMIC = 50.0


def layer_axis(axes: Axes, num_layers: int, first: int = 0) -> None:
    """Number the layers; layer 0 is the embedded input."""
    step = -(-num_layers // _MAX_TICKS)
    places = np.arange(0, num_layers, step)
    axes.set_xticks(places, [str(first + place) for place in places])
    axes.set_xlabel("layer")


def weights_figure(weights: Mapping[str, np.ndarray], first: int, *, about: str) -> Figure:
    """Draw the signed weight of each layer per class.

    Args:
        weights: Class -> weights, averaged over the sets of weights, ``[graphs, layers]``.
        first: Number of the first layer that is kept.
        about: What the mean is over, for the caption.
    """
    means = {name: values.mean(axis=0) for name, values in weights.items()}
    num_layers = len(next(iter(means.values())))

    def draw(axes: Axes) -> None:
        places = np.arange(num_layers)
        axes.axhline(0, color=MUTED, linewidth=0.8)
        for at, (name, values) in enumerate(weights.items()):
            mean, deviation = values.mean(axis=0), values.std(axis=0)  # [layers]
            colour = series_colour(at)
            axes.fill_between(
                places, mean - deviation, mean + deviation, color=colour, alpha=0.14, linewidth=0
            )
            axes.plot(
                places,
                mean,
                color=colour,
                linestyle=DASHES[at % len(DASHES)],
                marker=MARKERS[at % len(MARKERS)] if num_layers <= _MARKED_LAYERS else None,
                label=name,
            )
        layer_axis(axes, num_layers, first)
        axes.set_ylabel("layer weight (signed)")
        if len(weights) > 1:
            axes.legend(loc="best", ncols=2 if len(weights) > 4 else 1)

    shown = "; ".join(
        f"{name}: "
        + ", ".join(f"layer {layer} {number(w, 3)}" for layer, w in enumerate(mean, first))
        for name, mean in means.items()
    )
    return Figure(
        name="layer-weights",
        title="Layer weights by label" if len(weights) > 1 else "Layer weights",
        caption=f"Mean weight of each layer and one standard deviation, {about}. Layer 0 is the "
        "embedded input; a negative weight subtracts a layer.",
        alternative=f"Mean signed layer weights. {shown}.",
        picture=Chart(draw),
    )


def weight_sets_figure(weights: np.ndarray, first: int, *, about: str) -> Figure:
    """Draw the weights of each set on its own: ``[graphs, layer_heads, layers]``."""
    means = weights.mean(axis=0)  # [layer_heads, layers]

    def draw(axes: Axes) -> None:
        reach = max(float(np.abs(means).max()), 1e-9)
        small = means.shape[1] <= _WRITTEN_LAYERS
        texts = [[f"{v:z.2f}".replace("-", MINUS) if small else "" for v in row] for row in means]
        draw_cells(axes, means / reach, texts, colour=CHOSEN, negative=RIVAL)
        axes.set_yticks(range(len(means)), [str(row + 1) for row in range(len(means))])
        axes.set_ylabel("set of channels")
        layer_axis(axes, means.shape[1], first)

    shown = "; ".join(
        f"set {row + 1}: " + ", ".join(number(float(v), 3) for v in values)
        for row, values in enumerate(means)
    )
    return Figure(
        name="layer-weight-sets",
        title="Layer weights by set of channels",
        caption="Each set of channels has layer weights of its own. Blue adds a layer, orange "
        f"subtracts it; means {about}.",
        alternative=f"Mean weight of layers {first} to {first + means.shape[1] - 1}. {shown}.",
        picture=Chart(draw, size=(4.2, max(1.8, 1.0 + 0.34 * len(means)))),
    )


def evolution_figures(profile: LayerProfile, *, about: str) -> list[Figure]:
    """Draw the distance of each layer to the last; no figure if no other layer is as wide."""
    skipped = sum(value is None for value in profile.distance)
    note = f" Left out: {plural(skipped, 'layer')} of another width." if skipped else ""
    if len(profile.distance) - skipped < 2:
        return []
    return [
        _line_figure(
            "evolution-distance",
            "Distance of each layer to the last",
            f"Mean of |x_l {MINUS} x_last| over the nodes of a graph{about}. A flat end means that "
            f"the last layers change little.{note}",
            "distance to the last layer",
            profile.distance,
        )
    ]


def smoothness_figures(profile: LayerProfile, *, about: str) -> list[Figure]:
    """Draw the measures of over-smoothing of every layer, and of the stages of the head."""
    measures: list[tuple[str, str, str, str, Callable[[Smoothness], Quartiles]]] = [
        (
            "smoothing-distance",
            "Mean pairwise distance",
            "Mean Euclidean distance between two nodes of a graph",
            "mean pairwise distance",
            lambda found: found.pairwise,
        ),
        (
            "smoothing-dirichlet",
            "Dirichlet energy",
            f"Sum of |x_u {MINUS} x_v|² over the edges of a graph, divided by its number of nodes",
            "Dirichlet energy",
            lambda found: found.dirichlet,
        ),
        (
            "smoothing-cosine",
            "Mean average distance (MAD)",
            f"Mean of 1 {MINUS} cos over all pairs of nodes of a graph, whatever their scale",
            "MAD",
            lambda found: found.cosine,
        ),
    ]
    figures = []
    for name, title, caption, label, measure in measures:
        values = [measure(layer) for layer in profile.smoothness]
        if any(value.median == value.median for value in values):
            stages = {stage: measure(found) for stage, found in profile.head.items()}
            figures.append(_line_figure(name, title, f"{caption}{about}.", label, values, stages))
    return figures


def _line_figure(
    name: str,
    title: str,
    caption: str,
    label: str,
    values: Sequence[Quartiles | None],
    stages: Mapping[str, Quartiles] | None = None,
) -> Figure:
    """Draw a quantity per layer, and its values at the stages of the head as horizontal lines.

    Without stages it is a distance to the last layer, which ends at zero: never logarithmic.
    """
    medians = [np.nan if value is None else value.median for value in values]
    levels = {
        stage: found.median
        for stage, found in (stages or {}).items()
        if found.median == found.median
    }
    positive = [value for value in (*medians, *levels.values()) if value > 0]
    logarithmic = stages is not None and max(positive, default=0.0) > _LOGARITHMIC * min(
        positive, default=0.0
    )

    def draw(axes: Axes) -> None:
        low, middle, high = (
            np.array([np.nan if value is None else getattr(value, part) for value in values])
            for part in ("low", "median", "high")
        )
        if logarithmic:
            from matplotlib.ticker import LogFormatter

            axes.set_yscale("log", nonpositive="mask")
            axes.yaxis.set_major_formatter(LogFormatter())
            axes.yaxis.set_minor_formatter(LogFormatter())
        places = np.arange(len(values))
        axes.fill_between(places, low, high, color=CHOSEN, alpha=0.14, linewidth=0)
        axes.plot(
            places,
            middle,
            color=CHOSEN,
            marker="o" if len(values) <= _MARKED_LAYERS else None,
            clip_on=False,
            label="layers of the backbone",
        )
        for at, (stage, level) in enumerate(levels.items(), start=1):
            axes.axhline(
                level, color=series_colour(at), linestyle=DASHES[at], label=f"head: {stage}"
            )
        if levels:
            axes.figure.legend(loc="outside lower left", ncols=2)
        if not logarithmic:
            axes.set_ylim(bottom=0.0)
        layer_axis(axes, len(values))
        axes.set_ylabel(label)

    shown = ", ".join(f"layer {at} {number(value)}" for at, value in enumerate(medians))
    head = "".join(f"; head, {stage}: {number(level)}" for stage, level in levels.items())
    return Figure(name, title, caption, f"{label}: {shown}{head}.", Chart(draw))


def smoothing_section(figures: Sequence[Figure], profile: LayerProfile | None) -> Section:
    """Return over-smoothing per layer as figures and as a table."""
    if profile is None:
        return Section("smoothing", "Over-smoothing")
    layers = zip(profile.names, profile.smoothness, strict=True)
    measured = [(str(at), name, found) for at, (name, found) in enumerate(layers)]
    measured += [("head", stage, found) for stage, found in profile.head.items()]
    rows = [
        [
            place,
            name,
            number(found.pairwise.median),
            number(found.dirichlet.median),
            number(found.cosine.median),
        ]
        for place, name, found in measured
    ]
    return Section(
        "smoothing",
        "Over-smoothing",
        text="How different the nodes of a graph still are after each layer, and at each stage of "
        "the head: near zero, all nodes are alike. Activations are measured as captured. Distance "
        "and energy depend on the scale of a layer, MAD does not.",
        tables=[
            Table(
                ["layer", "name", "mean pairwise distance", "Dirichlet energy", "MAD"],
                rows,
                caption="Medians over graphs.",
                summary="All layers in numbers",
            )
        ],
        figures=figures,
    )


# --- layer weights by class

#: Classes that are drawn, the most frequent ones: more lines cannot be told apart.
MAX_CLASSES = 6


def group_weights(weights: np.ndarray, labels: np.ndarray, task: Task) -> dict[str, np.ndarray]:
    """Return the weights of the graphs of each class, or of each third of the values.

    Rows of a graph share its weights, so at node and link level there is one group: all graphs.

    Args:
        weights: Weight of each layer, ``[num_graphs, layers]``.
        labels: One row per graph, NaN where missing, ``[num_graphs, targets]``.
        task: What the labels mean.
    """
    everything = {"all graphs": weights}
    if task.level != "graph" or task.kind == "multilabel" or task.num_targets > 1:
        return everything
    values = labels[:, 0]
    present = ~np.isnan(values)
    if task.kind == "regression":
        if present.sum() < 3:
            return everything
        low, high = np.quantile(values[present], [1 / 3, 2 / 3])
        groups = {
            f"below {number(low)}": values < low,
            f"{number(low)} to {number(high)}": (values >= low) & (values <= high),
            f"above {number(high)}": values > high,
        }
    else:
        counts = {value: int((values == value).sum()) for value in task.classes}
        frequent = sorted(counts, key=lambda value: -counts[value])[:MAX_CLASSES]
        groups = {f"class {value:g}": values == value for value in sorted(frequent)}
    found = {name: weights[members] for name, members in groups.items() if members.any()}
    return found or everything


#: Fits whose layer weights are averaged, at most.
_MAX_FITS = 12


def layer_weights(
    run: Run,
    caches: Sequence[Cache],
    outcomes: Sequence[Outcome],
    sample: Sample,
    head: TrainedHead,
) -> tuple[list[Figure], list[str]]:
    """Draw the layer weights over the test graphs of every fit; return the figures, and notes.

    Args:
        caches: One, or one per fold.
        outcomes: The test rows of every fold.
        sample: Test graphs of the best fit.
        head: Of the best fit.
    """
    fits = [(outcome, seed) for outcome in outcomes for seed in outcome.seeds]
    # The best fit first: it is loaded already.
    fits.sort(key=lambda fit: (fit[0].fold, fit[1]) != run.chosen)
    if run.backbone.in_run:  # every fit has a backbone of its own
        fits = fits[:1]
    parts: list[tuple[np.ndarray, np.ndarray]] = []  # layer weights and labels of graphs
    sampled, fold = sample, run.chosen[0]
    for outcome, seed in fits[:_MAX_FITS]:
        cache, trained = cache_of(caches, outcome.fold), head
        if (outcome.fold, seed) != run.chosen:
            try:
                trained = load_fit_head(run, outcome.fold, seed)
            except HistographError:  # a fit whose folder was deleted
                continue
        if outcome.fold != fold:
            sampled, fold = sample_test_graphs(cache, outcome.rows), outcome.fold
        explained = trained.explain(sampled)
        if explained is None:
            return [], []
        weights = explained.layer_weights.numpy()  # [graphs, (layer_heads,) layers]
        labels = cache.labels()[cache.label_ptr[sampled.graphs]]  # [graphs, targets]
        parts.append((weights.reshape(len(weights), -1, weights.shape[-1]), labels))
    own_fits = [fit for fit in run.results["fits"] if fit["head"] == run.head]
    untrained = sum(fit["best_epoch"] < 0 for fit in own_fits)
    total = sum(len(outcome.seeds) for outcome in outcomes)
    notes = []
    if untrained:
        notes.append(
            f"In {untrained} of {plural(total, 'fit')} of {run.head}, validation was best before "
            "the first epoch: their layer weights and attention are the initial ones."
        )
    if total > len(parts):
        notes.append(f"Layer weights are shown for {len(parts)} of {total} fits.")
    # [graphs, layer_heads, layers] and [graphs, targets]
    weights, labels = (np.concatenate(each) for each in zip(*parts, strict=True))
    first = len(sample.layers) - weights.shape[2]
    about = f"over the test graphs of {plural(len(parts), 'fit')}"
    if not sample.is_whole:
        about += f", at most {len(sample.graphs)} of each"
    groups = group_weights(weights.mean(axis=1), labels, run.task)
    figures = [weights_figure(groups, first, about=about)]
    if weights.shape[1] > 1:
        figures.append(weight_sets_figure(weights, first, about=about))
    return figures, notes
