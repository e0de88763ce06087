"""The verdict on a run: one sentence that says what to do, from ``results.json`` alone.

It is decided once, by :func:`verdict_of`, and every reader shows the same: the command line, the
report, ``results.json`` and ``Run.verdict``. What counts is the head that the run predicts with,
its seeds averaged, against the checkpoint's own readout and against the best simple readout that
was trained beside it (the best by validation). Something is decided where the 95 % interval of the
paired difference on test rows lies on one side of zero: over folds where there are several, and
then over test rows too, else over test rows. A head that was fine-tuned with its backbone has to be
better by validation than the frozen head it started from, too: of equal ones that is the simpler.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from math import ceil, floor, inf, log10
from typing import Any, Literal

from ..utils.text import difference, metric_name, number

#: The checkpoint's own readout, in tables and results.
OWN = "own readout"

#: How the name of a head that was fine-tuned with its backbone ends.
_FINETUNED = "-finetuned"

#: Of a difference: what its 95 % interval is over.
_UNITS = {"folds": "folds", "seeds": "seeds", "rows": "test rows"}

#: How many more rows an interval needs so that it leaves out zero four times in five, not every
#: second time: ((1.96 + 0.84) / 1.96) squared.
_POWER = 2.04

#: A difference that takes so many times the rows is too small to wait for.
_TOO_MANY = 100

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
        needs: What would decide it: about how many (``count``) of what (``over``).
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
    """Return what counts of a readout's results: the seeds averaged, where there are several."""
    averaged: Mapping[str, Any] | None = row.get("averaged")
    return row if averaged is None else averaged


def verdict_of(results: Mapping[str, Any], head: str | None = None) -> Verdict:
    """Return the verdict on a run.

    Args:
        results: ``results.json``, of this version or an earlier one, which knows of no other rival
            than the retrained last layer.
        head: Another readout of the run than the one it predicts with.
    """
    head = head or str(results["head"])
    row = results["readouts"][head]
    counts, higher = reported(row), bool(results["higher_is_better"])
    metric, lower = metric_name(results["metric"]), "" if higher else "; lower is better"
    if row["test"] is None:
        text = f"Undecided: no test part has a {metric}; a --split with a test part would decide it"
        return Verdict("undecided", head, f"{text}.")
    frozen = head.removesuffix(_FINETUNED)
    if frozen != head and frozen in results["readouts"] and _gains_nothing(results, head, frozen):
        found = verdict_of(results, frozen)
        if found.decision == "keep":
            return found
        before, after = (results["readouts"][name] for name in (frozen, head))
        text = f"Keep the frozen head: {frozen} has a validation {metric} of {_mean(before)}, "
        text += f"{head} {_mean(after)} (test {_mean(before, 'test')} and {_mean(after, 'test')}"
        return replace(found, decision="use", readout=frozen, text=f"{text}{lower}).", needs=None)
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
    if to_own == "undecided":
        needs = _needs(own)
        text = (
            f"Undecided: {head} has {score}{over_own}{over_rival} {ending}; {_wanted(needs, own)}."
        )
        return Verdict("undecided", head, text, **known, needs=needs)
    if to_rival == "worse" and not results["readouts"][rival].get("compared_only"):
        # It is better than the head, which is no worse than the checkpoint's own readout.
        text = f"Use {rival} rather than {head}, which has {score}{over_own}{over_rival} {ending}."
        return Verdict("use", str(rival), text, **known)
    if to_own == "better" or to_rival == "better":
        if to_rival != "better" and other is not None:
            verb = "is better" if to_rival == "worse" else "may be as good"
            over_rival = f"; {simple}, {verb}: {difference(other)} against it"
        elif own is None:
            over_rival = f",{over_rival.removeprefix(' and')}"
        text = f"Use {head}: {score}{over_own}{over_rival} {ending}."
        return Verdict("use", head, text, **known)
    if other is None:
        text = f"Undecided: {head} has {score}, and there is nothing to compare it with"
        return Verdict("undecided", head, f"{text}; `histograph compare` would decide it.")
    needs, text = _needs(other), f"Undecided between {head}, with {score}, and {simple}:"
    text += f" {difference(other)} {ending}; {_wanted(needs, other)}."
    return Verdict("undecided", head, text, **known, needs=needs)


# --- the table of readouts, in the terminal and in the report


def validation_of(row: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the validation score of a readout: of the seeds averaged, where there are several."""
    return reported(row).get("valid") or row.get("valid")


def _gains_nothing(results: Mapping[str, Any], name: str, other: str) -> bool:
    """Whether a readout has no better validation score than another; both must have one."""
    found, than = (validation_of(results["readouts"][each]) for each in (name, other))
    if found is None or than is None:
        return False
    sign = 1 if results["higher_is_better"] else -1
    return bool(sign * (found["mean"] - than["mean"]) <= 0)


def _mean(row: Mapping[str, Any], part: str = "valid") -> str:
    """Return the score of a readout as text."""
    found = validation_of(row) if part == "valid" else reported(row)[part]
    return "-" if found is None else number(found["mean"], 5)


def ranked_names(results: Mapping[str, Any]) -> list[str]:
    """Return the readouts of a run, the best by validation first, of equal ones the smaller.

    The checkpoint's own readout, which may have been trained on the validation part, stands above
    them; what has no validation score comes last.
    """
    sign = -1 if results["higher_is_better"] else 1
    readouts: Mapping[str, Any] = results["readouts"]

    def place(name: str) -> tuple[bool, float, int]:
        found = validation_of(readouts[name])
        if found is None:
            return name != OWN, inf, 0
        return True, sign * float(found["mean"]), int(readouts[name]["num_parameters"])

    return sorted(readouts, key=place)


def bold_row(results: Mapping[str, Any]) -> tuple[str, str]:
    """Return the best readout, and a sentence that says how it was chosen."""
    if verdict_of(results).decision == "keep":
        return OWN, "Bold: your own readout, which the verdict keeps."
    names = [name for name in ranked_names(results) if name != OWN]
    saved = [name for name in names if not results["readouts"][name].get("compared_only")]
    if validation_of(results["readouts"][saved[0]]) is None:
        return str(results["head"]), "Bold: the readout that the run predicts with."
    return saved[0], "Bold: the best by validation."


def about_intervals(results: Mapping[str, Any]) -> str:
    """Return what the intervals of the differences are, for the caption of a table."""
    rows = [reported(row) for row in results["readouts"].values()]
    found = [
        row[name]
        for row in rows
        for name in ("versus_own", "versus_baseline")
        if row.get(name) and row[name]["low"] is not None
    ]
    if not found:
        return "without intervals"
    over = found[0].get("over", "folds")
    said = {
        "rows": "95 % intervals are of a paired bootstrap of the test rows, which says nothing of "
        "other splits",
        "seeds": "95 % intervals are Student's, paired by seed",
        "folds": "95 % intervals are Student's, paired by fold; folds share training data, so they "
        "are somewhat too narrow",
    }[over]
    if found[0].get("rows"):
        said += "; a paired bootstrap of their test rows has to agree before anything is decided"
    return said


# --- the parts of the sentence


def _named(results: Mapping[str, Any], rival: str) -> str:
    """Return what the rival is called in the sentence."""
    if results["readouts"][rival].get("compared_only"):
        return f"{rival} (compared only)"
    simple = sum(bool(row.get("simple")) for row in results["readouts"].values())
    return f"{rival}, the best simple readout" if simple > 1 else f"{rival}, retrained"


def _outcome(found: Mapping[str, Any] | None, higher: bool) -> Outcome | None:
    """Return whether a difference is decided, over every unit there is an interval for."""
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


def interval_over(found: Mapping[str, Any]) -> str:
    """Return what the interval of a difference is over, such as ``300 test rows``."""
    unit = _UNITS.get(found.get("over", ""))
    if found["low"] is None or unit is None:
        return ""
    return f"{found['count']:,} {unit}"


def _interval(found: Mapping[str, Any] | None) -> str:
    over = "" if found is None else interval_over(found)
    if found is None or not over:
        return "without an interval"
    if not found.get("rows"):
        return f"95 % interval over {over}"
    rows = found["rows"]
    beside = difference({"mean": found["mean"], **rows}).partition(" ")[2]
    return f"95 % interval over {over}; over their {rows['count']:,} test rows {beside}"


def _needs(found: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return how many rows or folds would decide a difference that stays as it is."""
    assert found is not None
    mean, wanted = abs(found["mean"]), 0.0
    for each in (found, found.get("rows") or found):
        if each["low"] is None:
            return {"count": None, "over": "rows"}
        reach = (each["high"] - each["low"]) / 2  # half the interval, which shrinks with the root
        if not mean or reach / mean > _TOO_MANY**0.5:
            return None
        wanted = max(wanted, found["count"] * _POWER * (reach / mean) ** 2, found["count"] + 1)
    digits = max(0, floor(log10(wanted)) - 1)  # two digits are enough of an estimate
    return {"count": ceil(wanted / 10**digits) * 10**digits, "over": found["over"]}


def _wanted(needs: Mapping[str, Any] | None, found: Mapping[str, Any] | None) -> str:
    """Return what would decide it."""
    if needs is None:
        return "the difference is too small to be worth more test rows, take the simpler one"
    if needs["count"] is None:
        return "more test rows, or --folds, would decide it"
    wanted = f"about {needs['count']:,} {_UNITS[needs['over']]}"
    if (
        found is not None and needs["over"] == "folds"
    ):  # more folds of the same rows would not: they need more rows
        wanted = f"about {needs['count'] / found['count']:.2g} times the data"
    return f"{wanted} would decide it, if the difference stays"
