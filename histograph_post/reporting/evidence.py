"""What the activations say: everything in a report that needs the cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from ..caches import Cache
from ..errors import HistographError
from ..runs.run import PREDICTIONS_NAME, Run
from ..tasks import Task
from ..utils.text import number, plural
from .depth import depth_figure, score_depths
from .figures import Figure
from .graph_charts import example_figures
from .layer_analysis import (
    MAX_ATTENDED_NODES,
    MAX_PAIRED_NODES,
    Attention,
    LayerProfile,
    Sample,
    TrainedHead,
    load_fit_head,
    owners_of,
    profile_layers,
    read_sample,
    sample_test_graphs,
)
from .layer_charts import evolution_figures, smoothness_figures, weight_sets_figure, weights_figure
from .molecules import Molecule, find_molecules
from .outcomes import MAX_ROWS, Outcome, choose_examples, chosen_outcomes, combined, row_losses

# --- layer weights by class: which graphs to average over

#: Classes that are drawn, the most frequent first: more lines cannot be told apart.
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


#: Fits whose layer weights are looked at.
MAX_FITS = 12


@dataclass
class Evidence:
    """Figures and notes that come from the activations."""

    layer_figures: list[Figure] = field(default_factory=list)
    smoothing_figures: list[Figure] = field(default_factory=list)
    profile: LayerProfile | None = None
    example_figures: list[Figure] = field(default_factory=list)
    #: Whether the examples are coloured by attention.
    attended: bool = False
    #: Label row -> its molecule, of the rows that the table of predictions lists.
    molecules: Mapping[int, Molecule] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def gather_evidence(
    run: Run,
    caches: Sequence[Cache],
    *,
    on_progress: Callable[[int, int], None] | None = None,
) -> Evidence:
    """Look at the test graphs of a run through its head."""
    found = Evidence()
    outcomes = [outcome for outcome in chosen_outcomes(run) if len(outcome.rows)]
    fold, seed = run.chosen
    own = next((o for o in outcomes if o.fold == fold and seed in o.seeds), None)
    if not caches:
        return found
    if own is None:
        found.notes.append(
            "Layers, over-smoothing and examples are missing: the chosen fit has no test rows in "
            f"{PREDICTIONS_NAME}"
        )
        return found
    steps = 4

    def done(step: int) -> None:
        if on_progress is not None:
            on_progress(step, steps)

    done(0)
    cache = _cache_of(caches, own.fold)
    sample = sample_test_graphs(cache, own.rows)
    try:
        head = load_fit_head(run, fold, seed)
    except HistographError as error:  # what needs no head can still be shown
        head = None
        found.notes.append(f"Layer weights and attention are missing: {error}")
    _add_profile(found, run, cache, sample, head)
    done(1)
    if head is not None:
        _add_weights(found, run, caches, outcomes, own, sample, head)
    done(2)
    _add_examples(found, run, cache, own, head)
    found.molecules = _find_listed(run, cache, outcomes)
    done(3)
    depths = score_depths(run, caches)
    if depths is not None:
        found.layer_figures.append(depth_figure(run, depths))
    done(4)
    return found


def _find_listed(run: Run, cache: Cache, outcomes: Sequence[Outcome]) -> dict[int, Molecule]:
    """Return the molecules of the rows that were predicted worst."""
    if run.task.level != "graph":
        return {}
    every = combined(outcomes)
    worst = np.argsort(-np.nan_to_num(row_losses(every, run.task), nan=-1.0), kind="stable")
    rows = every.rows[worst[:MAX_ROWS]]
    graphs = owners_of(cache, rows).tolist()
    found = find_molecules(cache, graphs)
    pairs = zip(rows.tolist(), graphs, strict=True)
    return {row: found[graph] for row, graph in pairs if graph in found}


def _cache_of(caches: Sequence[Cache], fold: int) -> Cache:
    return caches[fold] if len(caches) > 1 else caches[0]


def _about(sample: Sample) -> str:
    """Return what was looked at, for captions."""
    if sample.total == 1:
        return ""
    graphs = f"{len(sample.graphs):,} test graphs"
    if not sample.is_whole:
        graphs = f"{len(sample.graphs):,} of {sample.total:,} test graphs"
    return f"; median and quartiles over {graphs}"


def _add_profile(
    found: Evidence, run: Run, cache: Cache, sample: Sample, head: TrainedHead | None
) -> None:
    largest = int(np.diff(sample.ptr).max())
    stages: dict[str, Tensor] = {}
    if head is not None and largest <= MAX_ATTENDED_NODES:
        stages = head.embeddings(sample)
    about = _about(sample)
    profile = profile_layers(sample, cache.layer_names, stages)
    found.profile = profile
    found.smoothing_figures = smoothness_figures(profile, about=about)
    found.layer_figures += evolution_figures(profile, about=about)
    if not sample.is_whole:
        found.notes.append(
            f"Layers and over-smoothing are measured on {len(sample.graphs):,} of "
            f"{sample.total:,} test graphs, drawn at random."
        )
    if largest > MAX_PAIRED_NODES:
        found.notes.append(
            f"Over-smoothing is measured on {MAX_PAIRED_NODES:,} nodes of each larger graph, drawn "
            "at random."
        )
    if not stages and head is not None:
        because = (
            f"a graph has {largest:,} nodes, more than {MAX_ATTENDED_NODES:,}"
            if largest > MAX_ATTENDED_NODES
            else f"{run.head} turns a graph into one row at once, without node embeddings"
        )
        found.notes.append(f"Over-smoothing is not shown for the head: {because}.")


def _add_weights(
    found: Evidence,
    run: Run,
    caches: Sequence[Cache],
    outcomes: Sequence[Outcome],
    own: Outcome,
    sample: Sample,
    head: TrainedHead,
) -> None:
    """Add the layer weights over the test graphs of every fit."""
    if int(np.diff(sample.ptr).max()) > MAX_ATTENDED_NODES:
        return
    parts: list[tuple[Attention, np.ndarray]] = []
    fits = [(outcome, seed) for outcome in outcomes for seed in outcome.seeds]
    # The best one first, which is loaded already.
    fits.sort(key=lambda fit: (fit[0].fold, fit[1]) != run.chosen)
    if run.backbone.in_run:  # every fit has a backbone of its own
        fits = fits[:1]
    looked_at, fold = sample, own.fold
    for outcome, seed in fits[:MAX_FITS]:
        cache, trained = _cache_of(caches, outcome.fold), head
        if (outcome.fold, seed) != run.chosen:
            try:
                trained = load_fit_head(run, outcome.fold, seed)
            except HistographError:  # a fit whose folder was cleared away
                continue
        if outcome.fold != fold:
            looked_at, fold = sample_test_graphs(cache, outcome.rows), outcome.fold
        attention = trained.attention(looked_at)
        if attention is None:
            return
        parts.append((attention, cache.labels()[cache.label_ptr[looked_at.graphs]]))
    untrained = sum(
        fit["head"] == run.head and fit["best_epoch"] < 0 for fit in run.results["fits"]
    )
    total = sum(len(outcome.seeds) for outcome in outcomes)
    if untrained:
        found.notes.append(
            f"In {untrained} of {plural(total, 'fit')} of {run.head}, the best epoch by validation "
            "is before training: there, layer weights and attention are those it starts with."
        )
    if total > len(parts):
        found.notes.append(f"Layer weights are those of {len(parts)} of {total} fits.")
    weights = np.concatenate([attention.layer_weights for attention, _ in parts])
    labels = np.concatenate([labels for _, labels in parts])
    first = len(sample.layers) - weights.shape[2]
    about = f"over the test graphs of {plural(len(parts), 'fit')}"
    if not sample.is_whole:
        about += f", at most {len(sample.graphs)} of each"
    groups = group_weights(weights.mean(axis=1), labels, run.task)
    figures = [weights_figure(groups, first, about=about)]
    if weights.shape[1] > 1:
        figures.append(weight_sets_figure(weights, first, about=about))
    found.layer_figures = [*figures, *found.layer_figures]


def _add_examples(
    found: Evidence, run: Run, cache: Cache, own: Outcome, head: TrainedHead | None
) -> None:
    examples = choose_examples(own, run.task, cache)
    graphs = np.unique([example.graph for example in examples]).astype(np.int64)
    if not len(graphs):
        return
    attention: dict[int, np.ndarray] = {}
    if head is not None and int(cache.num_nodes[graphs].max()) <= MAX_ATTENDED_NODES:
        sample = read_sample(cache, graphs, len(graphs))
        looked = head.attention(sample)
        if looked is not None:
            pieces = np.split(looked.node_attention, sample.ptr[1:-1])
            attention = dict(zip(graphs.tolist(), pieces, strict=True))
    molecules = find_molecules(cache, graphs.tolist()) if run.task.level == "graph" else {}
    found.attended = bool(attention)
    found.example_figures = example_figures(examples, cache, attention, molecules)
    missing = len(graphs) - len(molecules)
    if cache.molecules() is not None and run.task.level == "graph" and missing:
        found.notes.append(
            f"{plural(missing, 'molecule')} drawn as graphs: RDKit is not installed (extra chem), "
            "or the SMILES has other atoms or bonds than the graph."
        )
