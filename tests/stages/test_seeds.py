"""Several seeds of one readout: each gets what it gets alone, killed or not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import histograph_post as hg
from histograph_post.runs.run import Run
from histograph_post.training.options import TrainingOptions

QUICK = TrainingOptions(epochs=4, batch_size=16, patience=0)


def train(
    demo_cache: Path,
    out: Path,
    seeds: list[int],
    head: str = "histograph",
    training: TrainingOptions = QUICK,
    **options: Any,
) -> Run:
    """Train one readout with some seeds."""
    given = {"seeds": seeds, "training": training, **options}
    return hg.compare(demo_cache, out, heads=[head], dim=8, **given)


def weights(run: Path, head: str, seed: int) -> dict[str, Tensor]:
    return load_file(run / "fits" / head / f"fold-0-seed-{seed}" / "head.safetensors")


@pytest.mark.parametrize(
    ("head", "options"),
    [("histograph", {}), ("histograph", {"dropout": 0.5}), ("mean", {}), ("concat", {})],
)
def test_what_a_seed_gives_does_not_depend_on_the_other_seeds(
    demo_cache: Path, tmp_path: Path, head: str, options: dict[str, Any]
) -> None:
    train(demo_cache, tmp_path / "several", [0, 1], head, **options)
    train(demo_cache, tmp_path / "alone", [1], head, **options)
    found, expected = (weights(tmp_path / name, head, 1) for name in ("several", "alone"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


TRAIN = """
compare(cache, out, heads=["histograph"], dim=8, seeds=[0, 1, 2], on_epoch=epoch_done,
        training=TrainingOptions(epochs=6, batch_size=16, patience=2))
"""


@pytest.mark.long
def test_killed_and_resumed_gives_the_same_results(
    demo_cache: Path, tmp_path: Path, killed_training: Callable[[str, Path, Path, int], int]
) -> None:
    def run(folder: str, moment: int) -> int:
        return killed_training(TRAIN, demo_cache, tmp_path / folder, moment)

    assert run("whole", 0) == 0
    assert run("broken", 3) == -9  # while the second of three seeds is trained
    assert len(list((tmp_path / "broken").rglob("state.pt"))) == 1
    assert run("broken", 0) == 0
    for file in (
        *("results.json", "predictions.csv", "metrics.jsonl"),
        *("head.json", "head.safetensors"),
    ):
        assert (tmp_path / "whole" / file).read_bytes() == (tmp_path / "broken" / file).read_bytes()
    assert not list((tmp_path / "broken").rglob("state.pt"))


def test_a_fit_that_is_lost_is_made_again(demo_cache: Path, tmp_path: Path) -> None:
    train(demo_cache, tmp_path / "run", [0, 1, 2])
    before = weights(tmp_path / "run", "histograph", 1)
    for path in (tmp_path / "run" / "fits" / "histograph" / "fold-0-seed-1").iterdir():
        path.unlink()
    train(demo_cache, tmp_path / "run", [0, 1, 2])
    after = weights(tmp_path / "run", "histograph", 1)
    for name, value in before.items():
        assert torch.equal(after[name], value)
