"""Seeds that are trained as one: what each gets is what it gets alone, killed or not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.func import functional_call, vmap

from histograph_post.backbone import build_model
from histograph_post.caching import cache
from histograph_post.copies import make_optimizer
from histograph_post.data import load_data
from histograph_post.experiments import FitProgress
from histograph_post.head_training import HeadSpec, plan_experiment, run_experiment
from histograph_post.heads import graph_stage
from histograph_post.heads.registry import build_head, head_names
from histograph_post.run import Run
from histograph_post.stacking import StackedNetworks
from histograph_post.training_options import TrainingOptions

QUICK = TrainingOptions(epochs=4, batch_size=16, patience=0)


@pytest.fixture(scope="module")
def demo_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    model = build_model("gin", {"hidden": 8, "num_layers": 3}, in_dim=4, out_dim=1)
    folder = tmp_path_factory.mktemp("caches") / "demo.cache"
    assert cache(model, load_data("demo:", args={"num_graphs": 60}), folder) is not None
    return folder


def train(
    demo_cache: Path,
    out: Path,
    seeds: list[int],
    head: str = "histograph",
    training: TrainingOptions = QUICK,
    **options: Any,
) -> Run:
    """Train one readout with some seeds."""
    spec = HeadSpec(head, {"dim": 8, **options})
    experiment = plan_experiment(demo_cache, [spec], seeds=seeds, training=training)
    return run_experiment(experiment, out, chosen=head)


def weights(run: Path, head: str, seed: int) -> dict[str, Tensor]:
    return load_file(run / "fits" / head / f"fold-0-seed-{seed}" / "head.safetensors")


def stackable(level: str) -> list[str]:
    heads = [(name, build_head(name, [8, 8], 1, level, dim=8)) for name in head_names(level)]
    return [name for name, head in heads if head.stackable]


def test_the_readouts_most_often_trained_can_be_stacked() -> None:
    assert {"histograph", "histograph-paper", "mean", "concat"} <= set(stackable("graph"))
    assert "mlp" in stackable("node")


@pytest.mark.parametrize(
    ("level", "name"),
    [(level, name) for level in ("graph", "node", "link") for name in stackable(level)],
)
def test_copies_run_as_one_have_the_outputs_and_gradients_of_each(level: str, name: str) -> None:
    heads = []
    for seed in range(3):
        torch.manual_seed(seed)
        heads.append(build_head(name, [6, 6, 6], 1, level, dim=8).double())
    sizes = [3, 5, 1, 7]
    batch = torch.repeat_interleave(torch.arange(4), torch.tensor(sizes))
    history = torch.randn(sum(sizes), 3, 6, dtype=torch.float64)
    own = [dict(head.named_parameters()) for head in heads]
    stacked = {key: torch.stack([p[key].detach() for p in own]).requires_grad_() for key in own[0]}
    alone = torch.stack([head(history, batch, num_graphs=4) for head in heads])
    as_one = vmap(lambda p: functional_call(heads[0], p, (history, batch), {"num_graphs": 4}))(
        stacked
    )
    torch.testing.assert_close(as_one, alone)
    weight = torch.randn_like(alone)
    (alone * weight).sum().backward()
    (as_one * weight).sum().backward()
    for place, parameters in enumerate(own):
        for key, parameter in parameters.items():
            if parameter.grad is not None:
                torch.testing.assert_close(stacked[key].grad[place], parameter.grad)


@pytest.mark.parametrize(
    ("head", "options"),
    [
        ("histograph", {}),
        ("histograph", {"layer_heads": 1, "mix": "last", "heads": 2}),
        ("mean", {}),
        ("concat", {}),
    ],
)
def test_seeds_together_give_what_each_gives_alone(
    demo_cache: Path, tmp_path: Path, head: str, options: dict[str, Any]
) -> None:
    together = train(demo_cache, tmp_path / "together", [0, 1, 2, 3], head, **options)
    alone = train(demo_cache, tmp_path / "alone", [2], head, **options)
    found = weights(tmp_path / "together", head, 2)
    expected = weights(tmp_path / "alone", head, 2)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-4)
    other = weights(tmp_path / "together", head, 1)
    assert any(not torch.equal(other[name], value) for name, value in found.items())
    fits = {fit["seed"]: fit for fit in together.results["fits"]}
    (one,) = alone.results["fits"]
    assert fits[2]["best_epoch"] == one["best_epoch"]
    assert fits[2]["scores"]["test"] == pytest.approx(one["scores"]["test"], abs=1e-3)


@pytest.mark.parametrize("seeds", [[1], [0, 1]])
@pytest.mark.parametrize("largest", [0, 37])
def test_batches_that_loops_are_not_made_for_change_nothing(
    demo_cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    seeds: list[int],
    largest: int,
) -> None:
    train(demo_cache, tmp_path / "loops", seeds)
    monkeypatch.setattr(graph_stage, "LARGEST_GRAPH", largest)  # of some batches, or of all
    train(demo_cache, tmp_path / "modules", seeds)
    found, expected = (weights(tmp_path / name, "histograph", 1) for name in ("loops", "modules"))
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-4)


def test_each_seed_stops_when_it_would_stop_alone(demo_cache: Path, tmp_path: Path) -> None:
    training = TrainingOptions(epochs=30, batch_size=16, patience=2, lr=1e-2)
    together = train(demo_cache, tmp_path / "together", [0, 1, 2, 3], training=training)
    epochs = {fit["seed"]: fit["epochs"] for fit in together.results["fits"]}
    assert len(set(epochs.values())) > 1  # or this shows nothing
    for seed in (0, 3):
        alone = train(demo_cache, tmp_path / f"alone-{seed}", [seed], training=training)
        assert alone.results["fits"][0]["epochs"] == epochs[seed]


def test_what_is_drawn_is_drawn_by_the_seed_alone(demo_cache: Path, tmp_path: Path) -> None:
    train(demo_cache, tmp_path / "together", [0, 1], dropout=0.5)
    train(demo_cache, tmp_path / "alone", [1], dropout=0.5)
    found, expected = (weights(tmp_path / name, "histograph", 1) for name in ("together", "alone"))
    assert all(torch.equal(found[name], value) for name, value in expected.items())


TRAIN = """
experiment = plan_experiment(
    cache, [HeadSpec("histograph", {"dim": 8})], seeds=[0, 1, 2], memory_limit=LIMIT,
    training=TrainingOptions(epochs=6, batch_size=16, patience=2))
run_experiment(experiment, out, chosen="histograph", on_epoch=epoch_done)
"""


def test_killed_and_resumed_together_gives_the_same_results(
    demo_cache: Path, tmp_path: Path, killed_training: Callable[[str, Path, Path, int], int]
) -> None:
    def run(folder: str, moment: int) -> int:
        return killed_training("LIMIT = None" + TRAIN, demo_cache, tmp_path / folder, moment)

    assert run("whole", 0) == 0
    assert run("broken", 8) == -9  # in the third epoch of three seeds
    assert len(list((tmp_path / "broken").rglob("state.pt"))) == 1
    assert run("broken", 0) == 0
    for file in ("results.json", "predictions.csv", "metrics.jsonl"):
        assert (tmp_path / "whole" / file).read_bytes() == (tmp_path / "broken" / file).read_bytes()
    assert not list((tmp_path / "broken").rglob("state.pt"))


@pytest.mark.parametrize(
    ("limits", "moment", "reached"),
    [
        # Together, in the third epoch of three seeds; then one after the other.
        ((None, 0), 8, {0: 3, 1: 3, 2: 3}),
        # One after the other, in the third epoch of the second seed; then those left together.
        ((0, None), 9, {1: 3, 2: 0}),
    ],
)
def test_killed_and_resumed_with_another_memory_limit(
    demo_cache: Path,
    tmp_path: Path,
    killed_training: Callable[[str, Path, Path, int], int],
    limits: tuple[int | None, int | None],
    moment: int,
    reached: dict[int, int],
) -> None:
    training = TrainingOptions(epochs=6, batch_size=16, patience=2)
    whole = train(demo_cache, tmp_path / "whole", [0, 1, 2], training=training)
    words = f"LIMIT = {limits[0]}" + TRAIN
    assert killed_training(words, demo_cache, tmp_path / "broken", moment) == -9
    first_epochs: dict[int, int] = {}

    def epoch_done(progress: FitProgress) -> None:
        first_epochs.setdefault(progress.seed, progress.trainer.progress.epoch)

    spec = HeadSpec("histograph", {"dim": 8})
    experiment = plan_experiment(
        demo_cache, [spec], seeds=[0, 1, 2], training=training, memory_limit=limits[1]
    )
    broken = run_experiment(
        experiment, tmp_path / "broken", chosen="histograph", on_epoch=epoch_done
    )
    assert first_epochs == {seed: epoch + 1 for seed, epoch in reached.items()}
    for fit, other in zip(broken.results["fits"], whole.results["fits"], strict=True):
        assert [fit[key] for key in ("seed", "epochs", "best_epoch")] == [
            other[key] for key in ("seed", "epochs", "best_epoch")
        ]
    lines = [
        (tmp_path / run / "metrics.jsonl").read_text().splitlines() for run in ("whole", "broken")
    ]
    for found, expected in zip(*lines, strict=True):
        for name in ("seed", "epoch", "loss", "valid_loss"):
            assert json.loads(found)[name] == pytest.approx(json.loads(expected)[name], rel=1e-4)
    assert not list((tmp_path / "broken").rglob("state.pt"))


def test_a_fit_that_is_lost_is_made_again(demo_cache: Path, tmp_path: Path) -> None:
    train(demo_cache, tmp_path / "run", [0, 1, 2])
    before = weights(tmp_path / "run", "histograph", 1)
    for path in (tmp_path / "run" / "fits" / "histograph" / "fold-0-seed-1").iterdir():
        path.unlink()
    train(demo_cache, tmp_path / "run", [0, 1, 2])
    after = weights(tmp_path / "run", "histograph", 1)
    for name, value in before.items():
        torch.testing.assert_close(after[name], value, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("factors", [[1e3, 1e-3, 1.0], [1e3, float("nan"), 1e-3]])
def test_gradients_are_clipped_as_those_of_each_network_alone(factors: list[float]) -> None:
    options, inputs = TrainingOptions(), torch.randn(5, 4)
    networks = [torch.nn.Linear(4, 3) for _ in factors]
    optimizers = [make_optimizer([*network.parameters()], options) for network in networks]
    copies = StackedNetworks(networks, optimizers, options)
    (copies(inputs).sum((1, 2)) * torch.tensor(factors)).sum().backward()
    copies.clip(1.0)
    (stacked,) = copies.optimizer.param_groups[0]["params"]  # [copies, numel]
    for network, factor, found in zip(networks, factors, stacked.grad, strict=True):
        (network(inputs).sum() * factor).backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        own = torch.cat([value.grad.flatten() for value in network.parameters()])
        torch.testing.assert_close(found, own, equal_nan=True)
    assert torch.linalg.vector_norm(stacked.grad[0]) == pytest.approx(1.0, rel=1e-4)
