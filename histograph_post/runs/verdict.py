"""The verdict on a run: one sentence that says what to do, from ``results.json`` alone.

:func:`verdict_of` alone decides, for the command line, the report, ``results.json`` and
``Run.verdict``. It compares the head that the run predicts with, its seeds averaged, with the
checkpoint's own readout and with the simple readout of the run that is best by validation. A
difference is decided if the 95 % interval of the paired difference on test rows excludes zero: over
folds if there are several, and then over test rows too, else over test rows. Otherwise the verdict
says what would decide it, if these data can; if they cannot, the two are level and the simpler one
is kept.

A head that was fine-tuned with its backbone also has to be better by validation than the frozen
head it started from, which is the simpler of the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from math import ceil, floor, inf, log10
from typing import Any, Literal, NamedTuple

from ..utils.text import difference, metric_name, number, plural
from .run import FINETUNED, split_name

#: The checkpoint's own readout, in tables and results.
OWN = "own readout"

#: What the 95 % interval of a difference is over.
_UNITS = {"folds": "fold", "seeds": "seed", "rows": "test row"}

#: How many times the rows an interval needs to exclude zero with a power of 80 %, not 50 %:
#: ((1.96 + 0.84) / 1.96) squared.
_POWER = 2.04

#: A difference that would need this many times the rows is too small to say how many.
_TOO_MANY = 100

#: Most folds of a cross-validation: more of them share ever more training data.
_MOST_FOLDS = 10
_MORE_FOLDS, _MORE_SEEDS = f"--folds {_MOST_FOLDS}", "--seeds 0-4"

#: New folds test rows that the checkpoint may have been trained on.
_UNSEEN = " (fair only if the checkpoint was not trained on them)"

#: If each fold has one seed, more seeds can replace up to this many times the folds.
_SEEDS_STAND_FOR = 4

#: All rows per test row, assumed for a run of an earlier version.
_ROWS_PER_TEST_ROW = 10

Decision = Literal["use", "keep", "undecided"]
Outcome = Literal["better", "worse", "undecided"]


@dataclass(frozen=True)
class Verdict:
    """What to do with a run.

    Attributes:
        decision: ``use`` a head of the run, ``keep`` your own readout, or ``undecided``.
        readout: What to use, or what is undecided.
        text: The sentence.
        versus_own: The difference between the head and the checkpoint's own readout, if it has one.
        rival: The best simple readout beside the head, by validation; None if there is none.
        versus_rival: The difference between the head and that.
        needs: What would decide it: about how many (``count``) of what (``over``); None where
            something is decided, or these data cannot decide it.
    """

    decision: Decision
    readout: str
    text: str
    versus_own: Mapping[str, Any] | None = None
    rival: str | None = None
    versus_rival: Mapping[str, Any] | None = None
    needs: Mapping[str, Any] | None = None

    def __str__(self) -> str:
        return self.text

    def to_json(self) -> dict[str, Any]:
        """Return plain values, the entry ``verdict`` of ``results.json``."""
        return asdict(self)


def reported(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the results of a readout that count: with seeds averaged, if there are several."""
    averaged: Mapping[str, Any] | None = row.get("averaged")
    return row if averaged is None else averaged


def verdict_of(results: Mapping[str, Any], head: str | None = None) -> Verdict:
    """Return the verdict on a run.

    Args:
        results: ``results.json`` of this version or an earlier one, whose only rival is the
            retrained last layer.
        head: Another readout of the run than the one it predicts with.
    """
    head = head or str(results["head"])
    row = results["readouts"][head]
    counts, higher = reported(row), bool(results["higher_is_better"])
    metric, lower = metric_name(results["metric"]), "" if higher else "; lower is better"
    if row["test"] is None:
        text = (
            f"Undecided: no test part has a {metric}; a `--split` with a test part would decide it"
        )
        return Verdict("undecided", head, f"{text}.")
    frozen, stage = split_name(head)
    if (
        stage == FINETUNED
        and frozen in results["readouts"]
        and _gains_nothing(results, head, frozen)
    ):
        found = verdict_of(results, frozen)
        before, after = (results["readouts"][name] for name in (frozen, head))
        text = f"{frozen} has a validation {metric} of {_mean(before)}, "
        text += f"{head} {_mean(after)} (test {_mean(before, 'test')} and {_mean(after, 'test')}"
        text += f"{lower})"
        if (found.decision, found.readout) != ("use", frozen):
            return replace(found, text=f"{found.text} Fine-tuning gained nothing: {text}.")
        text = f"Keep the frozen head: {text}; the run it was fine-tuned from predicts with it."
        return replace(found, text=text)
    own, other = counts.get("versus_own"), counts.get("versus_rival")
    if other is None:
        other = counts.get("versus_baseline")
    rival = None if other is None else str(other["baseline"])
    to_own, to_rival = _outcome(own, higher), _outcome(other, higher)
    known: dict[str, Any] = {"versus_own": own, "rival": rival, "versus_rival": other}
    simple = "" if rival is None else _named(results, rival)
    ending = f"({_interval(own or other)}{lower})"
    score = f"test {metric} {number(counts['test']['mean'], 5)}"
    over_own = "" if own is None else f", {difference(own)} against your own readout"
    over_rival = "" if other is None else f" and {difference(other)} against {simple}"

    if to_own == "worse" or (to_own == "undecided" and to_rival == "worse"):
        also = over_rival if to_own == "undecided" else ""
        text = f"Keep your own readout: {head} has {score}{over_own}{also} {ending}."
        return Verdict("keep", OWN, text, **known)
    if own is not None and to_own == "undecided":
        advice = _advice(own, results, row)
        if advice.needs is None:
            text = f"Keep your own readout: {head}, with {score}, is level with it,"
            text += f" {difference(own)}{over_rival} {ending}; {advice.text}."
            return Verdict("keep", OWN, text, **known)
        text = f"Undecided: {head} has {score}{over_own}{over_rival} {ending}; {advice.text}."
        return Verdict("undecided", head, text, **known, needs=advice.needs)
    usable = rival is not None and not results["readouts"][rival].get("compared_only")
    if to_rival == "worse" and usable:
        # It is better than the head, which is no worse than the checkpoint's own readout.
        text = f"Use {rival} rather than {head}, which has {score}{over_own}{over_rival} {ending}"
        return Verdict("use", str(rival), f"{text}{_by_name(results, rival)}.", **known)
    if to_own == "better" or to_rival in ("better", "worse"):  # worse: than one compared only
        if to_rival != "better" and other is not None:
            verb = "is better" if to_rival == "worse" else "may be as good"
            over_rival = f"; {simple}{',' * (',' in simple)} {verb}: {difference(other)} against it"
        elif own is None:
            over_rival = f",{over_rival.removeprefix(' and')}"
        text = f"Use {head}: {score}{over_own}{over_rival} {ending}."
        return Verdict("use", head, text, **known)
    if other is None:
        text = f"Undecided: {head} has {score}, and there is nothing to compare it with"
        return Verdict("undecided", head, f"{text}; `histograph compare` would decide it.")
    advice = _advice(other, results, row)
    outcome = f"{difference(other)} {ending}; {advice.text}"
    if advice.needs is not None:
        text = f"Undecided between {head}, with {score}, and {simple}: {outcome}."
        return Verdict("undecided", head, text, **known, needs=advice.needs)
    if not usable or _is_simpler(row, results["readouts"][rival]):
        text = f"Use {head}: with {score}, it is level with {simple}: {outcome}."
        return Verdict("use", head, text, **known)
    text = f"Use {rival}, which is simpler: {head}, with {score}, is level with it: {outcome}"
    return Verdict("use", str(rival), f"{text}{_by_name(results, rival)}.", **known)


# --- the scores of a readout


def gained(results: Mapping[str, Any]) -> str:
    """Return what fine-tuning or a search gained, as one sentence; of other runs, nothing."""
    found = results.get("versus_frozen") or results.get("versus_default")
    if found is None:
        return ""
    other = "on the frozen backbone" if "versus_frozen" in results else "with its defaults"
    return f"{results['head']} against {found['baseline']} {other}: {difference(found)}."


def validation_of(row: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the validation score of a readout: with seeds averaged, if there are several."""
    return reported(row).get("valid") or row.get("valid")


def by_validation(readouts: Mapping[str, tuple[float | None, int]], *, higher: bool) -> list[str]:
    """Return the names of readouts, the best by validation first: for tables and for choices.

    Ties go to fewer parameters, and then to the first in the alphabet. Readouts without a
    validation score come last, in their order.

    Args:
        readouts: The validation score and the number of parameters of each.
        higher: Whether a higher score is better.
    """

    def place(name: str) -> tuple[float, int, str]:
        score, parameters = readouts[name]
        return (inf, 0, "") if score is None else (-score if higher else score, parameters, name)

    return sorted(readouts, key=place)


def _gains_nothing(results: Mapping[str, Any], name: str, other: str) -> bool:
    """Whether a readout has no better validation score than another; False if either has none."""
    found, than = (validation_of(results["readouts"][each]) for each in (name, other))
    if found is None or than is None:
        return False
    sign = 1 if results["higher_is_better"] else -1
    return bool(sign * (found["mean"] - than["mean"]) <= 0)


def _mean(row: Mapping[str, Any], part: str = "valid") -> str:
    """Return the score of a readout as text."""
    found = validation_of(row) if part == "valid" else reported(row)[part]
    return "-" if found is None else number(found["mean"], 5)


# --- the parts of the sentence


def _named(results: Mapping[str, Any], rival: str) -> str:
    """Return the name of the rival in the sentence."""
    if results["readouts"][rival].get("compared_only"):
        return f"{rival} (compared only)"
    simple = sum(bool(row.get("simple")) for row in results["readouts"].values())
    return f"{rival}, the best simple readout" if simple > 1 else f"{rival}, retrained"


def _outcome(found: Mapping[str, Any] | None, higher: bool) -> Outcome | None:
    """Return whether a difference is decided, by every interval it has."""
    if found is None:
        return None
    intervals = [found, *([found["rows"]] if found.get("rows") else [])]
    if any(each["low"] is None for each in intervals):
        return "undecided"
    sign = 1 if higher else -1
    bounds = [sorted((sign * each["low"], sign * each["high"])) for each in intervals]
    if all(low > 0 for low, _ in bounds):
        return "better"
    return "worse" if all(high < 0 for _, high in bounds) else "undecided"


def _interval(found: Mapping[str, Any] | None) -> str:
    """Return what the interval of a difference is over, such as ``300 test rows``."""
    unit = None if found is None else _UNITS.get(found.get("over", ""))
    if found is None or found["low"] is None or unit is None:
        return "without an interval"
    over = plural(found["count"], unit)
    if not found.get("rows"):
        return f"95 % interval over {over}"
    rows = found["rows"]
    beside = difference({"mean": found["mean"], **rows}).partition(" ")[2]
    return f"95 % interval over {over}; over their {plural(rows['count'], 'test row')} {beside}"


def _is_simpler(row: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether a readout is simpler than another simple one: it has fewer parameters."""
    if not row.get("simple"):
        return False
    return int(row["num_parameters"] or 0) < int(other["num_parameters"] or 0)


def _by_name(results: Mapping[str, Any], readout: str | None) -> str:
    """Return how to use a readout that the run does not predict with."""
    chosen = str(results["head"])
    if split_name(chosen)[1] == FINETUNED or readout == chosen:  # keeps no other head
        return ""
    return f"; `--head {readout}` predicts with it"


# --- what a user can do about a difference that is not decided


class _Advice(NamedTuple):
    """What would decide a difference, None if nothing would, and the end of the sentence."""

    needs: dict[str, Any] | None
    text: str


def _advice(
    found: Mapping[str, Any], results: Mapping[str, Any], row: Mapping[str, Any]
) -> _Advice:
    """Return what would decide a difference: more test rows, folds or seeds, if there are more.

    Args:
        found: The difference.
        results: ``results.json``.
        row: Its entry for the head.
    """
    mean, over, count = found["mean"], found.get("over"), found["count"]
    by_rows = found if over == "rows" else found.get("rows")
    more_folds = _option(_MORE_FOLDS, results)
    # Earlier versions had intervals over seeds, which do not cover other rows.
    if over == "seeds" or found["low"] is None or (by_rows and by_rows["low"] is None):
        needs: dict[str, Any] = {"count": None, "over": "rows"}
        return _Advice(needs, f"more test rows would decide it, such as {more_folds} has{_UNSEEN}")
    if by_rows is not None and (over == "rows" or by_rows["low"] <= 0 <= by_rows["high"]):
        return _more_rows(mean, by_rows, results, tested_all=over == "folds")
    from ..metrics import student_quantile  # which loads scikit-learn: only where it is needed

    wanted = _needed(mean, found)
    reach = (found["high"] - found["low"]) / 2
    of_most = reach * student_quantile(_MOST_FOLDS) / student_quantile(count)
    of_most *= (count / _MOST_FOLDS) ** 0.5
    if count < _MOST_FOLDS and of_most * _POWER**0.5 <= abs(mean):
        needs = {"count": _MOST_FOLDS, "over": "folds"}
        return _Advice(needs, f"{more_folds} would decide it, if the difference stays{_UNSEEN}")
    # With a single seed, a fold is as uncertain as that seed; a solved readout has no seeds.
    if row.get("averaged") is None and not row.get("simple") and wanted <= _SEEDS_STAND_FOR * count:
        needs = {"count": 5, "over": "seeds"}
        more_seeds = _option(_MORE_SEEDS, results)
        return _Advice(needs, f"more seeds ({more_seeds}) would steady each fold and may decide it")
    # More folds of the same rows would not be enough: it takes more rows.
    times = wanted / count
    data = f"about {times:.2g} times the data" if times <= _TOO_MANY else "far more data"
    return _Advice(None, f"it takes {data} to tell them apart")


def _option(flag: str, results: Mapping[str, Any]) -> str:
    """Return where to give an option: folds and seeds of a fine-tuning are those of its heads."""
    frozen, stage = split_name(str(results["head"]))
    continued = stage == FINETUNED and frozen in results["readouts"]
    return f"`train-head {flag}`" if continued else f"`{flag}`"


def _more_rows(
    mean: float, by_rows: Mapping[str, Any], results: Mapping[str, Any], *, tested_all: bool
) -> _Advice:
    """Return whether the data have enough rows to decide a difference, and how to test them."""
    wanted, tested = _needed(mean, by_rows), by_rows["count"]
    there = results.get("labelled_rows")
    most = there or (tested if tested_all else _ROWS_PER_TEST_ROW * tested)
    if wanted > _TOO_MANY * tested:
        return _Advice(None, "no realistic number of test rows would tell them apart")
    rounded = _two_digits(wanted)
    if wanted > most:
        beside = f", and the data have {most:,}" if tested_all or there else ""
        return _Advice(None, f"it takes about {rounded:,} test rows to tell them apart{beside}")
    every = f"all {there:,} rows" if there else "every row"
    how = f"{_option(_MORE_FOLDS, results)} tests {every}{_UNSEEN}"
    if results.get("task", {}).get("level") == "link":
        how = "give the test part a larger share"
    return _Advice(
        {"count": rounded, "over": "rows"},
        f"about {rounded:,} test rows would decide it, if the difference stays: {how}",
    )


def _needed(mean: float, found: Mapping[str, Any]) -> float:
    """Return how many rows, folds or seeds would decide a difference, if its mean stays."""
    reach = (found["high"] - found["low"]) / 2  # shrinks with the square root of the count
    if not mean:
        return inf
    return float(max(found["count"] * _POWER * (reach / mean) ** 2, found["count"] + 1))


def _two_digits(value: float) -> int:
    """Return a number rounded up to two digits."""
    step = int(10 ** max(0, floor(log10(value)) - 1))
    return int(ceil(value / step) * step)
