"""What is said of the time that is left."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

from histograph_cli.progress import ExperimentWatch


class Story:
    """Fits that are told of, on a clock of their own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **fits: int) -> None:
        self.now, self._total, self._done, self._lines = 0.0, sum(fits.values()), 0, list[str]()
        self._fits, self._shares = fits, dict[tuple[str, int], float]()
        monkeypatch.setattr("time.monotonic", lambda: self.now)
        terminal: Any = SimpleNamespace(info=self._lines.append, epoch_done=lambda *_: None)
        self._watch = ExperimentWatch(terminal, None)

    def train(self, seconds: float, *seeds: int, head: str = "mean") -> None:
        """Train seeds as one."""
        self.now += seconds
        for seed in seeds:
            self.epoch(head, seed, 1.0)

    def epoch(self, head: str, seed: int, share_done: float) -> None:
        """Train a seed for an epoch, up to this share of them."""
        self._shares[head, seed] = share_done
        left = {
            name: total - sum(share for (each, _), share in self._shares.items() if each == name)
            for name, total in self._fits.items()
        }
        fit = SimpleNamespace(head=head, fold=0, seed=seed, share_done=share_done, left=left)
        self._watch.epoch_done(SimpleNamespace(**vars(fit), measured={}))  # type: ignore[arg-type]

    def finish(self, seed: int, head: str = "mean") -> str | None:
        """Return what is said of the time that is left."""
        self._done += 1
        self._shares[head, seed] = 1.0
        spec = SimpleNamespace(name=head, fold=0, seed=seed, label=head)
        fit: Any = SimpleNamespace(spec=spec, scores={}, best_epoch=3, strength=None)
        fit.diverged, fit.seconds_per_epoch = False, 1.0
        self._watch.fit_done(fit, self._done, self._total)
        found = re.search(r", ([^,]*) left$", self._lines[-1])
        return None if found is None else found[1]


def test_one_fit_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    story = Story(monkeypatch, mean=4)
    for seed, expected in enumerate(["30.0 s", "20.0 s", "10.0 s", None]):
        story.train(10.0, seed)
        assert story.finish(seed) == expected


def test_seeds_that_are_trained_as_one_are_done_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    story = Story(monkeypatch, histograph=4, mean=2)
    story.train(40.0, 0, 1, head="histograph")
    assert story.finish(0, "histograph") == "at least 40.0 s"  # and what the mean takes
    assert story.finish(1, "histograph") == "at least 40.0 s"
    story.train(2.0, 0, 1)
    assert story.finish(0) == "40.0 s"
    assert story.finish(1) == "40.0 s"
    story.train(40.0, 2, 3, head="histograph")
    assert story.finish(2, "histograph") is None


def test_a_cheap_readout_does_not_count_as_a_dear_one(monkeypatch: pytest.MonkeyPatch) -> None:
    story = Story(monkeypatch, histograph=2, mean=2)
    story.now += 30.0  # to compile
    for share in (0.1, 0.2, 1.0):
        story.now += 10.0 * share
        story.epoch("histograph", 0, share)
    assert story.finish(0, "histograph") == "at least 13.3 s"
    story.train(1.0, 0)
    assert story.finish(0) == "14.3 s"


def test_fits_of_a_run_before_take_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    story = Story(monkeypatch, mean=4)
    assert story.finish(0) is None
    assert story.finish(1) is None
    story.train(30.0, 2)
    assert story.finish(2) == "30.0 s"
    story.train(10.0, 3)
    assert story.finish(3) is None


def test_some_seeds_are_from_a_run_before(monkeypatch: pytest.MonkeyPatch) -> None:
    story = Story(monkeypatch, mean=8)
    story.train(20.0, 2, 3)
    found = [story.finish(seed) for seed in range(4)]
    assert found == ["50.0 s", "40.0 s", "40.0 s", "40.0 s"]
