"""The training loop: it learns, keeps the best epoch, never sees the test part, and resumes."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from histograph_post.errors import ConfigError
from histograph_post.splits import Split
from histograph_post.tasks import infer_task
from histograph_post.training.loop import Progress, Step, Trainer, train_resumably
from histograph_post.training.options import TrainingOptions

SPLIT = Split(np.arange(40), np.arange(40, 60), np.arange(60, 80))


class Rows:
    """A source of plain feature rows."""

    def __init__(self, labels: np.ndarray, features: torch.Tensor) -> None:
        self.labels = labels
        self.features = features
        self.asked: set[int] = set()
        self.targets = infer_task(labels, "graph").targets(labels)

    def batches(self, rows: np.ndarray, *, batch_size: int, seed: int | None) -> Iterator[Step]:
        self.asked |= set(rows.tolist())
        order = rows if seed is None else np.random.default_rng(seed).permutation(rows)
        for start in range(0, len(order), batch_size):
            part = order[start : start + batch_size].copy()
            yield Step(self.features[part], self.targets[part], part)

    def num_batches(self, rows: np.ndarray, *, batch_size: int) -> int:
        return -(-len(rows) // batch_size)


@pytest.fixture
def source() -> Rows:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(80, 5, generator=generator)
    labels = (features[:, :1] + 0.1 * torch.randn(80, 1, generator=generator) > 0).double()
    return Rows(labels.numpy(), features)


def trainer(source: Rows, *, seed: int = 0, network: nn.Module | None = None, **options: object):
    torch.manual_seed(0)
    network = network or nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Dropout(), nn.Linear(16, 1))
    settings = {"epochs": 12, "batch_size": 16, "lr": 0.02, "patience": 0, **options}
    task = infer_task(source.labels, "graph")
    return Trainer(network, source, SPLIT, task, TrainingOptions(**settings), seed=seed)


def test_learns_and_never_asks_for_test_rows(source: Rows) -> None:
    progress = trainer(source, epochs=60).run()
    assert progress.best_valid["accuracy"] > 0.85
    assert source.asked == set(range(60))


def test_same_seed_same_weights_other_seed_others(source: Rows) -> None:
    def weights(seed: int) -> torch.Tensor:
        made = trainer(source, seed=seed)
        made.run()
        return torch.cat([value.flatten() for value in made.network.state_dict().values()])

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


@pytest.mark.parametrize("schedule", ["cosine", "plateau", "none"])
def test_resumed_run_equals_an_unbroken_one(source: Rows, schedule: str) -> None:
    states = []
    whole = trainer(source, schedule=schedule)
    whole.run(lambda _: states.append(copy.deepcopy(whole.state())))
    for epoch in (0, 4, 10):
        broken = trainer(source, schedule=schedule)
        broken.restore(states[epoch])
        broken.run()
        assert broken.progress.log == whole.progress.log
        assert broken.progress.best_epoch == whole.progress.best_epoch
        for name, value in whole.network.state_dict().items():
            assert torch.equal(broken.network.state_dict()[name], value)


def test_a_run_that_was_killed_goes_on_from_its_saved_state(source: Rows, tmp_path: Path) -> None:
    whole = trainer(source)
    whole.run()

    def stop(progress: Progress) -> None:
        if progress.epoch == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_resumably(trainer(source), tmp_path, on_epoch=stop, save_every=0.0)
    epochs: list[int] = []
    broken = trainer(source)
    train_resumably(broken, tmp_path, on_epoch=lambda progress: epochs.append(progress.epoch))
    assert epochs[0] == 6
    for name, value in whole.network.state_dict().items():
        assert torch.equal(broken.network.state_dict()[name], value)


def test_keeps_the_best_epoch_and_stops_when_nothing_gets_better(source: Rows) -> None:
    run = trainer(source, epochs=200, lr=0.05, patience=6)
    progress = run.run()
    assert progress.epoch == progress.best_epoch + 1 + 6
    scores = [(entry["valid_accuracy"], -entry["valid_loss"]) for entry in progress.log]
    assert max(scores) == scores[progress.best_epoch]
    outputs = run.predict(SPLIT.valid)
    assert run.task.score(outputs, source.labels[SPLIT.valid]) == progress.best_valid["accuracy"]


def test_predictions_are_in_the_order_asked_for(source: Rows) -> None:
    run = trainer(source, epochs=2)
    run.run()
    rows = np.array([65, 3, 40])
    expected = run.network.eval()(source.features[rows]).detach().numpy()
    np.testing.assert_allclose(run.predict(rows), expected, rtol=1e-6)


def test_regression_learns_at_unit_scale_and_predicts_in_units() -> None:
    features = torch.randn(80, 5, generator=torch.Generator().manual_seed(1))
    labels = (1000 + 50 * features[:, :1]).double().numpy()
    run = trainer(Rows(labels, features), network=nn.Linear(5, 1), epochs=80, lr=0.05)
    progress = run.run()
    assert progress.log[0]["loss"] < 10
    assert progress.best_valid["rmse"] < 5
    assert abs(run.predict(SPLIT.test).mean() - labels[SPLIT.test].mean()) < 5


def test_cosine_rises_then_falls_to_a_hundredth(source: Rows) -> None:
    rates = [entry["lr"] for entry in trainer(source, epochs=20, warmup=5).run().log]
    assert rates.index(max(rates)) == 4
    assert rates[0] == pytest.approx(0.02 / 5)
    assert rates[-1] == pytest.approx(0.0002)


def test_without_validation_the_last_epoch_is_kept(source: Rows) -> None:
    task = infer_task(source.labels, "graph")
    split = Split(np.arange(40), np.array([], dtype=np.int64), np.arange(60, 80))
    options = TrainingOptions(epochs=3, patience=1)
    progress = Trainer(nn.Linear(5, 1), source, split, task, options, seed=0).run()
    assert (progress.epoch, progress.best_epoch, progress.best_valid) == (3, 2, {})


@pytest.mark.parametrize("classes", [2, 3])
def test_balance_weighs_classes_by_how_rare_they_are(classes: int) -> None:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(80, 5, generator=generator).double()
    labels = np.arange(80) % 8 // (5 if classes == 2 else 3)  # 5 and 3 of 8; 3, 3 and 2 of 8
    torch.manual_seed(0)
    # In double precision: the weights have to follow the outputs.
    network = nn.Linear(5, 1 if classes == 2 else classes).double()
    made = Rows(labels[:, None].astype(float), features)
    options = TrainingOptions(epochs=1, batch_size=40, balance=True)
    task = infer_task(made.labels, "graph")
    run = Trainer(network, made, SPLIT, task, options, seed=0)
    logits = network(features[SPLIT.train.tolist()]).detach().numpy()  # [rows, out_dim]
    truth = labels[SPLIT.train]
    if classes == 2:
        log_probabilities = np.hstack([-np.logaddexp(0, logits), -np.logaddexp(0, -logits)])
        weights, divisor = np.array([1, 5 / 3]), len(truth)
    else:
        log_probabilities = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        weights = np.array([8 / 3, 8 / 3, 8 / 2]) / 3
        divisor = weights[truth].sum()
    losses = -weights[truth] * log_probabilities[np.arange(len(truth)), truth]  # [rows]
    assert run.run().log[0]["loss"] == pytest.approx(losses.sum() / divisor, rel=1e-6)


def test_options_and_frozen_networks_are_refused(source: Rows) -> None:
    for name, value in (("epochs", 0), ("lr", 0.0), ("schedule", "linear"), ("clip", -1.0)):
        with pytest.raises(ConfigError, match=name):
            TrainingOptions(**{name: value})
    with pytest.raises(ConfigError, match="no trainable"):
        trainer(source, network=nn.Linear(5, 1).requires_grad_(False))


class Exploding(nn.Module):
    """A linear map whose weights become infinite in the epoch that is named."""

    def __init__(self, epoch: int) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 1)
        self.passes, self.last = 0, epoch * 3

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.passes += self.training
        return self.linear(rows) * (float("inf") if self.passes > self.last else 1.0)


def test_a_fit_that_diverges_stops_and_keeps_its_best_epoch(source: Rows) -> None:
    made = trainer(source, network=Exploding(4))
    progress = made.run()
    assert progress.diverged
    assert progress.epoch == 5
    assert 0 <= progress.best_epoch < 4
    assert np.isfinite(list(progress.log[-1].values())).all()
    assert all(value.isfinite().all() for value in progress.best_state.values())


def test_a_fit_that_diverges_at_once_is_as_it_began(source: Rows) -> None:
    network = Exploding(0)
    before = copy.deepcopy(network.state_dict())
    progress = trainer(source, network=network).run()
    assert progress.diverged
    assert progress.best_epoch == -1
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())


@pytest.mark.parametrize("damage", ["cut", "other", "empty", "deep"])
def test_a_damaged_state_is_said_and_the_fit_begins_again(
    source: Rows, tmp_path: Path, damage: str
) -> None:
    expected = trainer(source, epochs=3)
    expected.run()
    deep = b"\x80\x02})" + b"\x85" * 3_000_000 + b"Ns."  # ends torch's own reader
    state = {"cut": b"PK\x03\x04 cut short", "empty": b"", "deep": deep}
    if damage == "other":
        torch.save({"network": {}, "optimizer": {}, "progress": {"epoch": 10**9}}, tmp_path / "x")
        state["other"] = (tmp_path / "x").read_bytes()
    (tmp_path / "state.pt").write_bytes(state[damage])
    made = trainer(source, epochs=3)
    with pytest.warns(UserWarning, match="the fit begins again"):
        train_resumably(made, tmp_path)
    for name, value in made.network.state_dict().items():
        assert torch.equal(value, expected.network.state_dict()[name])
