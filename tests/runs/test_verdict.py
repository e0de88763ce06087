"""The verdict: one sentence that says what to do, decided by intervals."""

from __future__ import annotations

from typing import Any

import pytest

from histograph_post.runs.summary import bold_row, ranked_names
from histograph_post.runs.verdict import verdict_of

BETTER, WORSE, UNCLEAR = (0.01, 0.03), (-0.03, -0.01), (-0.01, 0.03)
LEVEL = (-0.05, 0.0501)


def versus(interval: tuple[float, float] | None, **more: Any) -> dict[str, Any] | None:
    if interval is None:
        return None
    low, high = interval
    found = {"mean": (low + high) / 2, "low": low, "high": high, "count": 300, "over": "rows"}
    return {**found, **more}


def results_with(
    own: tuple[float, float] | None,
    rival: tuple[float, float] | None,
    *,
    higher: bool = True,
    **more: Any,
) -> dict[str, Any]:
    """Results of a run of ``histograph`` beside ``mean``, with these intervals against others."""
    score = {"mean": 0.8, "deviation": 0.01, "count": 3}
    versus_rival = versus(rival, baseline="mean", **more)
    row = {
        "test": score,
        "valid": score,
        "num_parameters": 9,
        "averaged": {
            "test": score,
            "valid": {**score, "mean": 0.7},
            "versus_own": versus(own, **more),
            "versus_rival": versus_rival,
        },
    }
    simple = {"test": score, "valid": score, "versus_own": None, "simple": True}
    readouts = {"mean": {**simple, "num_parameters": 3}, "histograph": row}
    if own is not None:
        readouts = {"own readout": {"test": score, "versus_own": None}, **readouts}
    return {
        "head": "histograph",
        "metric": "accuracy" if higher else "rmse",
        "higher_is_better": higher,
        "readouts": readouts,
    }


@pytest.mark.parametrize(
    ("own", "rival", "decision", "readout", "text"),
    [
        (BETTER, BETTER, "use", "histograph", "Use histograph: test accuracy 0.8000, +0.0200 ["),
        (BETTER, UNCLEAR, "use", "histograph", "mean, retrained, may be as good: +0.0100 ["),
        (BETTER, WORSE, "use", "mean", "Use mean rather than histograph, which has"),
        (WORSE, BETTER, "keep", "own readout", "Keep your own readout: histograph has test"),
        (UNCLEAR, WORSE, "keep", "own readout", "against your own readout and \N{MINUS SIGN}0.02"),
        (UNCLEAR, BETTER, "undecided", "histograph", "Undecided: histograph has test accuracy"),
        (LEVEL, None, "keep", "own readout", "Keep your own readout: histograph, with test"),
        (LEVEL, BETTER, "keep", "own readout", "is level with it, +0.0000 [\N{MINUS SIGN}0.0500,"),
        (None, LEVEL, "use", "mean", "Use mean, which is simpler: histograph, with test accuracy"),
        (None, BETTER, "use", "histograph", "Use histograph: test accuracy 0.8000, +0.0200 ["),
        (None, WORSE, "use", "mean", "Use mean rather than histograph"),
        (None, UNCLEAR, "undecided", "histograph", "Undecided between histograph, with"),
        (None, None, "undecided", "histograph", "nothing to compare it with"),
        (BETTER, None, "use", "histograph", "against your own readout (95 % interval over 300"),
    ],
)
def test_the_intervals_decide(own: Any, rival: Any, decision: str, readout: str, text: str) -> None:
    found = verdict_of(results_with(own, rival))
    assert (found.decision, found.readout) == (decision, readout)
    assert text in found.text
    assert str(found) == found.text
    assert found.text.endswith(".")


def test_less_may_be_better() -> None:
    assert verdict_of(results_with(WORSE, WORSE, higher=False)).decision == "use"
    kept = verdict_of(results_with(BETTER, None, higher=False))
    assert kept.decision == "keep"
    assert "lower is better" in kept.text


def test_what_would_decide_it_is_a_number_of_rows() -> None:
    # Half the interval is twice the difference: four times the rows would touch zero, and twice
    # that leaves it out four times in five.
    found = verdict_of(results_with(UNCLEAR, None))
    assert found.needs == {"count": 2500, "over": "rows"}
    assert "about 2,500 test rows would decide it" in found.text
    assert "`--folds 10` tests every row (fair only if the checkpoint" in found.text
    assert "no realistic number of test rows" in verdict_of(results_with(LEVEL, None)).text
    assert verdict_of(results_with(BETTER, None)).needs is None


def test_no_more_rows_are_asked_for_than_there_are() -> None:
    enough = verdict_of(results_with(UNCLEAR, None) | {"labelled_rows": 3000})
    assert "`--folds 10` tests all 3,000 rows (fair only if the checkpoint" in enough.text
    found = verdict_of(results_with(UNCLEAR, None) | {"labelled_rows": 2000})
    assert (found.decision, found.readout, found.needs) == ("keep", "own readout", None)
    assert found.text.endswith("about 2,500 test rows to tell them apart, and the data have 2,000.")


def test_no_more_folds_are_asked_for_than_a_cross_validation_has() -> None:
    rows = {"low": 0.001, "high": 0.04, "count": 900}
    few = verdict_of(results_with((-0.003, 0.043), None, over="folds", count=5, rows=rows))
    assert few.needs == {"count": 10, "over": "folds"}
    assert "; `--folds 10` would decide it" in few.text
    many = results_with((-0.005, 0.045), None, over="folds", count=10, rows=rows)
    found = verdict_of(many)  # 32 folds would
    assert found.decision == "keep"
    assert "it takes about 3.2 times the data to tell them apart" in found.text
    row = many["readouts"]["histograph"]
    row |= row.pop("averaged")  # of a single seed
    found = verdict_of(many)
    assert found.needs == {"count": 5, "over": "seeds"}
    assert "`--seeds 0-4`" in found.text


def test_folds_and_rows_have_to_agree() -> None:
    given = {"over": "folds", "count": 10}
    agree = results_with(BETTER, None, **given, rows={"low": 0.001, "high": 0.04, "count": 900})
    assert verdict_of(agree).decision == "use"
    assert "over 10 folds; over their 900 test rows [+0.0010, +0.0400]" in verdict_of(agree).text
    differ = results_with(BETTER, None, **given, rows={"low": -0.001, "high": 0.04, "count": 900})
    found = verdict_of(differ)
    assert found.decision == "keep"  # all rows have been tested
    assert "about 2,000 test rows to tell them apart, and the data have 900" in found.text


def test_of_two_simple_readouts_the_smaller_is_used() -> None:
    results = results_with(None, LEVEL)
    results["readouts"]["histograph"] |= {"simple": True, "num_parameters": 1}
    assert verdict_of(results).readout == "histograph"
    assert "it is level with mean, the best simple readout: +0.0000" in verdict_of(results).text


def test_a_rival_that_is_compared_only_is_not_to_be_used() -> None:
    results = results_with(BETTER, WORSE)
    results["readouts"]["mean"]["compared_only"] = True
    found = verdict_of(results)
    assert (found.decision, found.readout) == ("use", "histograph")
    assert "mean (compared only) is better" in found.text


@pytest.mark.parametrize(
    ("frozen", "higher", "readout"),
    [
        (0.71, True, "histograph"),
        (0.7, True, "histograph"),
        (0.69, True, "histograph-finetuned"),
        (0.69, False, "histograph"),
        (0.71, False, "histograph-finetuned"),
    ],
)
def test_a_fine_tuned_head_has_to_be_better_by_validation_than_the_frozen_one(
    frozen: float, higher: bool, readout: str
) -> None:
    gain = BETTER if higher else WORSE
    results = results_with(gain, gain, higher=higher)
    before = results["readouts"]["histograph"]
    tuned = {**before, "averaged": dict(before["averaged"])}
    before["averaged"]["valid"] = {**before["averaged"]["valid"], "mean": frozen}
    results["readouts"]["histograph-finetuned"] = tuned
    results["head"] = "histograph-finetuned"
    found = verdict_of(results)
    assert (found.decision, found.readout) == ("use", readout)
    text = f"Keep the frozen head: histograph has a validation {'accuracy' if higher else 'RMSE'}"
    assert found.text.startswith(text) == (readout == "histograph")
    # One that is worse than the checkpoint's own readout is not kept, either.
    loss = WORSE if higher else BETTER
    before["averaged"]["versus_own"] = versus(loss)
    if readout == "histograph":
        assert verdict_of(results).decision == "keep"
        assert "Fine-tuning gained nothing: histograph has a" in verdict_of(results).text
    # Nor is one that a simpler readout is better than, which this run keeps no head of.
    before["averaged"]["versus_own"] = versus(gain)
    before["averaged"]["versus_rival"] = {**before["averaged"]["versus_rival"], **versus(loss)}
    if readout == "histograph":
        assert verdict_of(results).readout not in ("histograph", "histograph-finetuned")
        assert "--head" not in verdict_of(results).text


@pytest.mark.parametrize(("frozen", "gained"), [(0.71, False), (0.69, True)])
def test_an_undecided_fine_tuned_run_stays_undecided_and_says_what_its_command_takes(
    frozen: float, gained: bool
) -> None:
    results = results_with(UNCLEAR, UNCLEAR)
    before = results["readouts"]["histograph"]
    results["readouts"]["histograph-finetuned"] = {**before, "averaged": dict(before["averaged"])}
    before["averaged"]["valid"] = {**before["averaged"]["valid"], "mean": frozen}
    results["head"] = "histograph-finetuned"
    found = verdict_of(results)
    assert found.decision == "undecided"
    assert found.readout == ("histograph-finetuned" if gained else "histograph")
    assert found.text.startswith(f"Undecided: {found.readout} has test accuracy 0.8000, ")
    assert ("Fine-tuning gained nothing: histograph has a" in found.text) == (not gained)
    # finetune takes the folds of the run that it continues.
    assert "`train-head --folds 10` tests every row" in found.text
    assert found.needs is not None


def test_without_a_test_part_nothing_is_decided() -> None:
    results = results_with(None, None)
    results["readouts"]["histograph"]["test"] = None
    found = verdict_of(results)
    assert found.decision == "undecided"
    assert "no test part" in found.text


def test_the_bold_row_is_the_best_by_validation_unless_the_verdict_names_another() -> None:
    results = results_with(UNCLEAR, UNCLEAR)
    # Validation of the seeds averaged counts: 0.8 of mean, 0.7 of histograph.
    assert ranked_names(results) == ["own readout", "mean", "histograph"]
    assert bold_row(results) == ("mean", "Bold: the best by validation.")
    results["readouts"]["histograph"]["averaged"]["valid"]["mean"] = 0.8
    equals = ", of equals the one with fewest parameters"
    assert bold_row(results) == ("mean", f"Bold: the best by validation{equals}.")
    assert bold_row(results_with(WORSE, WORSE))[0] == "own readout"
    named = bold_row(results_with(BETTER, BETTER))
    assert named == ("histograph", "Bold: the readout that the verdict names.")


def test_runs_of_earlier_versions_know_the_retrained_last_layer_alone() -> None:
    results = results_with(None, None)
    row = results["readouts"]["histograph"]
    del row["averaged"]
    row |= {"versus_own": None, "versus_baseline": versus(BETTER, baseline="mean")}
    del results["readouts"]["mean"]["simple"]
    found = verdict_of(results)
    assert (found.decision, found.rival) == ("use", "mean")
