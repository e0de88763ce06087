"""Building a report: read the run, look at its caches, write the page and the figures."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from ..caches import Cache
from ..errors import CacheError, ConfigError, HistographError, OutputExistsError
from ..experiments.folds import open_caches
from ..heads.base import Readout
from ..runs.run import REPORT_NAME, Run
from ..tasks import Task
from ..utils.files import require_folder
from ..utils.outputs import OutputLock, output_file
from ..utils.specifications import is_built_in
from .evidence import gather_evidence
from .figures import Figure, Format, require_matplotlib
from .page import GENERATOR, Page, Section
from .score_charts import learning_figures
from .sections import (
    examples_section,
    facts_sections,
    headline,
    outcome_figures,
    rank_readouts,
    rows_section,
    scores_section,
    search_section,
    smoothing_section,
)

# --- the caches a run was trained on, if they can still be found


def find_caches(run: Run, given: Path | None) -> tuple[list[Cache], str]:
    """Return the caches of a run, one or one per fold, or none and the reason.

    Args:
        run: The run.
        given: Where they are now; a cache of other weights or other data is refused.
    """
    if given is not None:
        caches = open_caches(given)
        if run.backbone.in_run:
            # A run that trained its backbone makes a cache per fold; its head reads one of them.
            own = run.backbone.model.weights_sha256
            caches = [cache for cache in caches if cache.weights_sha256 == own] or caches
        _check(run, caches)
        return caches, ""
    backbone = run.backbone
    if backbone.in_run:
        named = "" if is_built_in("model", backbone.model.spec) else " --model SPEC"
        return [], (
            f"{run.folder} trained its backbone, whose activations no cache holds yet; make one "
            f"with `histograph cache {run.folder}{named} -o CACHES`, then add `--cache CACHES`"
        )
    place = backbone.cache
    try:
        caches = open_caches(place.parent if len(_weights(run)) > 1 else place)
        _check(run, caches)
    except HistographError as error:
        return [], f"{error}; say where the cache is with --cache PATH"
    return caches, ""


def _weights(run: Run) -> list[str]:
    backbone = run.backbone
    if backbone.in_run:
        return [backbone.model.weights_sha256]
    return list(run.plan.get("weights", [backbone.model.weights_sha256]))


def _check(run: Run, caches: list[Cache]) -> None:
    """Refuse caches of another backbone or of other data."""
    backbone = run.backbone
    for what, found, expected in (
        ("weights", [cache.weights_sha256 for cache in caches], _weights(run)),
        ("data", [caches[0].manifest.data.fingerprint], [backbone.data.fingerprint]),
    ):
        if found != expected:
            raise CacheError(
                f"{caches[0].path}: found {what} {_short(found)}, expected {_short(expected)}, "
                f"on which {run.folder} was trained"
            )


def _short(hashes: list[str]) -> str:
    return ", ".join(value[:12] for value in hashes)


#: A page of ours says so in its first lines.
_HEADER_BYTES = 1024


@dataclass(frozen=True)
class Report:
    """A report that was written."""

    path: Path
    #: Names of the figures in it, in order.
    figures: tuple[str, ...]
    #: The figures' own files, if they were asked for.
    files: tuple[Path, ...]
    #: What is missing, and what was sampled.
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
    on_progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Write what a run found as one HTML file that needs nothing else.

    What needs the activations is left out, and said to be, where the cache is gone.

    Args:
        run: A finished run, or its folder; a folder of compared readouts is one too.
        out: The file; ``report.html`` in the run's folder by default.
        cache: The cache, or folder of per-fold caches, if it was moved.
        head: Another readout of the run than the one it predicts with, by name; or your own, as
            ``my_head.py:MyHead`` or the class.
        figures: A folder that gets every figure as a file of its own.
        form: ``png``, ``svg`` or ``pdf``, for those files.
        overwrite: Replace a file that is not the run's own older report, and figures.
        on_progress: Called with the steps done and the steps in all.
    """
    require_matplotlib()
    given = run if isinstance(run, Run) else Run(Path(run))
    opened = Run.open(given.folder).require_readouts().with_head(head or given.readout)
    target = opened.folder / REPORT_NAME if out is None else Path(out)
    if figures is not None:
        require_folder(Path(figures))
    older = out is None and _is_report(target)
    with ExitStack() as stack:
        write = stack.enter_context(output_file(target, overwrite=overwrite or older))
        if figures is not None:
            stack.enter_context(OutputLock(Path(figures)))
        page = build_page(opened, None if cache is None else Path(cache), on_progress=on_progress)
        files: list[Path] = []
        if figures is not None:
            files = _write_figures(page.figures, Path(figures), form, overwrite=overwrite)
        write(page.to_html().encode())
    return Report(
        target, tuple(figure.name for figure in page.figures), tuple(files), tuple(page.notes)
    )


def build_page(
    run: Run,
    cache: Path | None = None,
    *,
    on_progress: Callable[[int, int], None] | None = None,
) -> Page:
    """Return the report of a run, not yet written."""
    caches, missing = find_caches(run, cache)
    try:
        _ = run.saved_head.info
    except ConfigError as error:
        caches, missing = [], str(error)
    notes = []
    if not caches:
        notes.append(f"Layers, over-smoothing and examples are missing: {missing}")
    evidence = gather_evidence(run, caches, on_progress=on_progress)
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
        *facts_sections(run),
    ]
    return Page(
        title=run.name,
        kicker=f"{run.kind} · {_data_name(run.backbone.data.spec)} · {_task_name(run.task)}",
        headline=headline(run),
        decision=run.verdict.decision,
        notes=[*notes, *evidence.notes],
        sections=[section for section in sections if not section.is_empty],
    )


_TASKS = {
    "binary": "two classes",
    "multiclass": "several classes",
    "multilabel": "several labels",
    "regression": "regression",
}


def _data_name(spec: str) -> str:
    """Return a data specification without the folders of its file."""
    scheme, colon, name = spec.partition(":")
    return f"{scheme}:{Path(name).name}" if colon and "/" not in scheme else Path(spec).name


def _task_name(task: Task) -> str:
    return f"{_TASKS[task.kind]}, {task.level} level"


def _is_report(path: Path) -> bool:
    """Whether a file is a page of ours."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return GENERATOR.encode() in file.read(_HEADER_BYTES)


def _write_figures(
    figures: list[Figure], folder: Path, form: Format, *, overwrite: bool
) -> list[Path]:
    taken = [
        f"{figure.name}.{form}" for figure in figures if (folder / f"{figure.name}.{form}").exists()
    ]
    if taken and not overwrite:
        raise OutputExistsError(
            f"{folder / taken[0]}: found a file; choose another --figures, or --overwrite"
        )
    folder.mkdir(parents=True, exist_ok=True)
    return [figure.write(folder, form) for figure in figures]
