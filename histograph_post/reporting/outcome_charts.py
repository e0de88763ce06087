"""Predictions against the truth as figures, for every kind of task."""

from __future__ import annotations

from .calibration_charts import calibration_figure
from .class_charts import confusion_figure, targets_figure
from .curve_charts import precision_figure, roc_figure
from .figures import Figure
from .record import RunRecord
from .regression_charts import error_figure, scatter_figure

#: Targets of a regression that are drawn.
_MAX_REGRESSIONS = 4


def outcome_figures(record: RunRecord) -> list[Figure]:
    """Draw what the chosen readout predicted for the test rows."""
    outcomes, task = record.outcomes, record.task
    if not any(len(outcome.rows) for outcome in outcomes):
        return []
    found: list[Figure | None] = []
    if task.kind == "regression":
        for at, name in enumerate(record.saved.target_names[:_MAX_REGRESSIONS]):
            found += [scatter_figure(outcomes, at, name), error_figure(outcomes, at, name)]
    elif task.kind == "binary":
        found += [roc_figure(record), precision_figure(record), confusion_figure(record)]
    elif task.kind == "multiclass":
        found.append(confusion_figure(record))
    else:
        found.append(targets_figure(record))
    if task.kind != "regression":
        found.append(calibration_figure(outcomes, task))
    return [figure for figure in found if figure is not None]
