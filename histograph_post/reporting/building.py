"""Building a report: read the run, look at its caches, write the page and the figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from torch import Tensor

from ..caches import Cache
from ..errors import CacheError, ConfigError, HistographError, OutputExistsError
from ..experiments.folds import open_caches
from ..heads.base import Readout
from ..runs.run import PREDICTIONS_NAME, REPORT_NAME, Run
from ..runs.summary import facts, repeat_commands
from ..utils.files import read_regular, remove_leftovers, require_folder, write_bytes
from ..utils.outputs import OutputLock, output_file
from ..utils.specifications import is_built_in
from ..utils.text import plural
from .depth import depth_figure, score_depths
from .drawings import example_figure, examples_section
from .figures import Figure, Format, require_matplotlib
from .layer_analysis import (
    MAX_ATTENDED_NODES,
    MAX_PAIRED_NODES,
    LayerProfile,
    Sample,
    TrainedHead,
    cache_of,
    load_fit_head,
    owners_of,
    profile_layers,
    read_sample,
    sample_test_graphs,
)
from .layer_charts import (
    evolution_figures,
    layer_weights,
    smoothing_section,
    smoothness_figures,
)
from .molecules import Molecule, find_molecules
from .outcomes import (
    MAX_ROWS,
    Outcome,
    choose_examples,
    chosen_outcomes,
    combined,
    row_losses,
    rows_section,
    worst_first,
)
from .page import GENERATOR, Page, Section, Table
from .prediction_charts import outcome_figures
from .scores import headline, learning_figures, rank_readouts, scores_section, search_section

OnProgress = Callable[[int, int], None]


@dataclass(frozen=True)
class Report:
    """A report that was written."""

    path: Path
    #: Names of the figures in it, in order.
    figures: tuple[str, ...]
    #: The figures' own files, if they were asked for.
    files: tuple[Path, ...]
    #: What is missing or sampled.
    notes: tuple[str, ...]


def report(
    run: str | Path | Run,
    out: str | Path | None = None,
    *,
    cache: str | Path | None = None,
    head: str | type[Readout] | None = None,
    figures: str | Path | None = None,
    form: Format = "png",
    overwrite: bool = False,
    on_progress: OnProgress | None = None,
) -> Report:
    """Write the results of a run as one self-contained HTML file.

    If the cache is gone, sections that need activations are left out, and a note says so.

    Args:
        run: A finished run, or its folder; a folder of compared readouts is one too.
        out: The file; ``report.html`` in the run's folder by default.
        cache: The cache, or folder of per-fold caches, if it was moved.
        head: A readout of the run by name, if not the one it predicts with; your own as
            ``my_head.py:MyHead`` or as the class.
        figures: A folder for the figures as files.
        form: Of those files: ``png``, ``svg`` or ``pdf``.
        overwrite: Replace a file that is not the run's own older report, and figures.
        on_progress: Called with the number of steps done and of all steps.
    """
    require_matplotlib()
    given = run if isinstance(run, Run) else Run(Path(run))
    opened = Run.open(given.folder).require_readouts().with_head(head or given.readout)
    target = opened.folder / REPORT_NAME if out is None else Path(out)
    folder = None if figures is None else Path(figures)
    if folder is not None:
        require_folder(folder)
    older = out is None and _is_report(target)
    with ExitStack() as stack:
        write = stack.enter_context(output_file(target, overwrite=overwrite or older))
        if folder is not None:
            stack.enter_context(OutputLock(folder))
        page = _build_page(opened, None if cache is None else Path(cache), on_progress)
        files: list[Path] = []
        if folder is not None:
            drawn = {
                folder / f"{figure.name}.{form}": figure.picture.render(form)
                for figure in page.figures
            }
            for path, picture in drawn.items():
                # What a report that was killed has drawn is the same.
                if path.exists() and not overwrite and read_regular(path) != picture:
                    raise OutputExistsError(
                        f"{path}: found a file; choose another --figures, or --overwrite"
                    )
            folder.mkdir(parents=True, exist_ok=True)
            remove_leftovers(folder, alone=True, of=[path.name for path in drawn])
            for path, picture in drawn.items():
                write_bytes(path, picture)
            files = [*drawn]
        write(page.to_html().encode())
    return Report(
        target, tuple(figure.name for figure in page.figures), tuple(files), tuple(page.notes)
    )


def _is_report(path: Path) -> bool:
    """Whether a file is a report, which says so in its first lines."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return GENERATOR.encode() in file.read(1024)


_TASKS = {
    "binary": "two classes",
    "multiclass": "several classes",
    "multilabel": "several labels",
    "regression": "regression",
}


def _build_page(run: Run, cache: Path | None, on_progress: OnProgress | None) -> Page:
    caches, missing = find_caches(run, cache)
    try:
        _ = run.saved_head.info
    except ConfigError as error:
        caches, missing = [], str(error)
    evidence = gather_evidence(run, caches, on_progress)
    if not caches:
        evidence.notes.append(f"Layers, over-smoothing and examples are missing: {missing}")
    ranked = rank_readouts(run)
    sections = [
        scores_section(run, ranked),
        search_section(run),
        Section("learning", "Learning", figures=learning_figures(run, list(ranked))),
        Section("layers", "Layers", figures=evidence.layer_figures),
        smoothing_section(evidence.smoothing_figures, evidence.profile),
        Section("predictions", "Predictions", figures=outcome_figures(run)),
        examples_section(evidence.example_figures, attended=evidence.attended),
        rows_section(run, evidence.molecules),
        Section("run", "What was trained", tables=[Table((), [list(f) for f in facts(run)])]),
        Section("repeat", "Repeat it", code=repeat_commands(run)),
    ]
    scheme, colon, name = run.backbone.data.spec.partition(":")
    if not colon or "/" in scheme:
        scheme, colon, name = "", "", run.backbone.data.spec
    data = f"{scheme}{colon}{Path(name).name}"  # without folders
    return Page(
        title=run.name,
        kicker=f"{run.kind} · {data} · {_TASKS[run.task.kind]}, {run.task.level} level",
        headline=headline(run),
        decision=run.verdict.decision,
        notes=evidence.notes,
        sections=[section for section in sections if not section.is_empty],
    )


# --- the caches a run was trained on, if they can still be found


def find_caches(run: Run, given: Path | None) -> tuple[list[Cache], str]:
    """Return the caches of a run, one or one per fold, or none and the reason.

    Args:
        given: Where they are now; a cache of other weights or other data is refused.
    """
    backbone = run.backbone
    own = backbone.model.weights_sha256
    weights = [own] if backbone.in_run else list(run.plan.get("weights", [own]))
    if given is not None:
        caches = open_caches(given)
        if backbone.in_run:
            # A run that trained its backbone makes a cache per fold; its head reads one of them.
            caches = [cache for cache in caches if cache.weights_sha256 == own] or caches
        _check(run, caches, weights)
        return caches, ""
    if backbone.in_run:
        named = "" if is_built_in("model", backbone.model.spec) else " --model SPEC"
        return [], (
            f"{run.folder} trained its backbone, whose activations no cache holds yet; make one "
            f"with `histograph cache {run.folder}{named} -o CACHES`, then add `--cache CACHES`"
        )
    try:
        caches = open_caches(backbone.cache.parent if len(weights) > 1 else backbone.cache)
        _check(run, caches, weights)
    except HistographError as error:
        return [], f"{error}; say where the cache is with --cache PATH"
    return caches, ""


def _check(run: Run, caches: list[Cache], weights: list[str]) -> None:
    """Refuse caches of another backbone or of other data."""
    for what, found, expected in (
        ("weights", [cache.weights_sha256 for cache in caches], weights),
        ("data", [caches[0].manifest.data.fingerprint], [run.backbone.data.fingerprint]),
    ):
        if found != expected:
            short = [", ".join(value[:12] for value in hashes) for hashes in (found, expected)]
            raise CacheError(
                f"{caches[0].path}: found {what} {short[0]}, expected {short[1]}, "
                f"on which {run.folder} was trained"
            )


# --- everything in a report that needs activations


@dataclass
class Evidence:
    """Figures, molecules and notes that need the activations."""

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
    run: Run, caches: Sequence[Cache], on_progress: OnProgress | None = None
) -> Evidence:
    """Analyse the layers, the head and the examples on the test graphs of a run."""
    found, outcomes = Evidence(), chosen_outcomes(run)
    if not caches:
        source = _source_cache(run)
        if source is not None and run.task.level == "graph" and outcomes:
            found.molecules = _listed_molecules(run, source, outcomes)
        return found
    fold, seed = run.chosen
    own = next((o for o in outcomes if o.fold == fold and seed in o.seeds), None)
    if own is None:
        found.notes.append(
            "Layers, over-smoothing and examples are missing: the chosen fit has no test rows in "
            f"{PREDICTIONS_NAME}"
        )
        return found
    done = on_progress or (lambda step, steps: None)
    done(0, 4)
    cache = cache_of(caches, own.fold)
    sample = sample_test_graphs(cache, own.rows)
    try:
        head = load_fit_head(run, fold, seed)
    except HistographError as error:  # the rest can still be shown
        head = None
        found.notes.append(f"Layer weights and attention are missing: {error}")
    _add_profile(found, run, cache, sample, head)
    done(1, 4)
    if head is not None and sample.largest <= MAX_ATTENDED_NODES:
        figures, notes = layer_weights(run, caches, outcomes, sample, head)
        found.layer_figures = [*figures, *found.layer_figures]
        found.notes += notes
    done(2, 4)
    _add_examples(found, run, cache, own, head)
    if run.task.level == "graph":
        found.molecules = _listed_molecules(run, cache, outcomes)
    done(3, 4)
    depths = score_depths(run, caches)
    if depths is not None:
        found.layer_figures.append(depth_figure(run, depths))
    done(4, 4)
    return found


def _add_profile(
    found: Evidence, run: Run, cache: Cache, sample: Sample, head: TrainedHead | None
) -> None:
    stages: dict[str, Tensor] = {}
    if head is not None and sample.largest <= MAX_ATTENDED_NODES:
        stages = head.embeddings(sample)
    measured = f"{len(sample.graphs):,}"
    if not sample.is_whole:
        measured += f" of {sample.total:,}"
        found.notes.append(
            f"Layers and over-smoothing are measured on {measured} test graphs, drawn at random."
        )
    about = f"; median and quartiles over {measured} test graphs" if sample.total > 1 else ""
    found.profile = profile_layers(sample, cache.layer_names, stages)
    found.smoothing_figures = smoothness_figures(found.profile, about=about)
    found.layer_figures += evolution_figures(found.profile, about=about)
    if sample.largest > MAX_PAIRED_NODES:
        found.notes.append(
            f"Over-smoothing is measured on {MAX_PAIRED_NODES:,} nodes of each larger graph, drawn "
            "at random."
        )
    if not stages and head is not None:
        because = (
            f"a graph has {sample.largest:,} nodes, more than {MAX_ATTENDED_NODES:,}"
            if sample.largest > MAX_ATTENDED_NODES
            else f"{run.head} turns a graph into one row at once, without node embeddings"
        )
        found.notes.append(f"Over-smoothing is not shown for the head: {because}.")


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
        explained = head.explain(sample)
        if explained is not None:
            pieces = np.split(explained.node_attention.numpy(), sample.ptr[1:-1])
            # A share of each node, whatever the scale that a readout of one's own gives it.
            shares = [piece / (piece.sum() or 1.0) for piece in pieces]  # [num_nodes] each
            attention = dict(zip(graphs.tolist(), shares, strict=True))
    molecules = find_molecules(cache, graphs.tolist()) if run.task.level == "graph" else {}
    found.attended = bool(attention)
    found.example_figures = [
        example_figure(example, cache, attention.get(example.graph), molecules.get(example.graph))
        for example in examples
    ]
    missing = len(graphs) - len(molecules)
    if cache.molecules() is not None and run.task.level == "graph" and missing:
        found.notes.append(
            f"{plural(missing, 'molecule')} drawn as graphs: RDKit is not installed (extra chem), "
            "or the SMILES has other atoms or bonds than the graph."
        )


def _source_cache(run: Run) -> Cache | None:
    """Return the cache that a fine-tuning started from: its molecules are still the run's."""
    if not run.backbone.in_run:
        return None
    try:
        cache = open_caches(run.backbone.cache)[0]
    except HistographError:
        return None
    same = cache.manifest.data.fingerprint == run.backbone.data.fingerprint
    return cache if same else None


def _listed_molecules(run: Run, cache: Cache, outcomes: Sequence[Outcome]) -> dict[int, Molecule]:
    """Return the molecules of the rows that the table of predictions lists."""
    every = combined(outcomes)
    rows = every.rows[worst_first(row_losses(every, run.task))[:MAX_ROWS]]
    graphs = owners_of(cache, rows).tolist()
    known = find_molecules(cache, graphs)
    pairs = zip(rows.tolist(), graphs, strict=True)
    return {row: known[graph] for row, graph in pairs if graph in known}
