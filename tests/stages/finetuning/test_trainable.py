"""Fine-tuning changes what it was asked to, bit for bit, and says how much that is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch_geometric.data import Batch
from torch_geometric.nn import GCNConv

import histograph_post as hg
from histograph_post.capture import plan_capture
from histograph_post.errors import ConfigError
from histograph_post.experiments.finetuning import plan_finetuning
from histograph_post.experiments.unfreezing import BackboneOptions, Unfreezing, layers_of_parameters
from histograph_post.runs.run import Run
from histograph_post.training.loop import Progress
from histograph_post.training.networks import set_training_modes
from histograph_post.training.options import TrainingOptions

QUICK = TrainingOptions(epochs=2, batch_size=16, lr=1e-2, warmup=0)


def tune(folder: Path, out: Path, **options: Any) -> tuple[Run, set[str]]:
    """Fine-tune from the run; return it and the names of the weights that changed."""
    settings = {"seeds": [0], "training": QUICK, "backbone_lr": 1e-2, **options}
    run = hg.finetune(folder / "run", out, **settings)
    before, after = (
        load_file(folder / "checkpoint.safetensors"),
        load_file(out / "model.safetensors"),
    )
    assert before.keys() == after.keys()
    return run, {name for name in before if not torch.equal(before[name], after[name])}


def is_statistic(name: str) -> bool:
    return name.endswith(("running_mean", "running_var", "num_batches_tracked"))


def test_everything_but_statistics_and_classifier_is_trained_by_default(
    folder: Path, tmp_path: Path, backbone: nn.Module
) -> None:
    run, changed = tune(folder, tmp_path / "ft")
    expected = {name for name, _ in backbone.named_parameters() if "classifier" not in name}
    assert changed == expected
    counts = run.results["fits"][-1]["backbone"]
    sizes = {name: parameter.numel() for name, parameter in backbone.named_parameters()}
    assert counts["asked"]["parameters"] == sum(sizes[name] for name in expected)
    assert counts["asked"]["all_parameters"] == sum(sizes.values())
    assert counts["asked"]["buffers"] == counts["moved"]["buffers"] == 0
    assert 0 < counts["moved"]["parameters"] <= counts["asked"]["parameters"]
    assert run.results["moves"] == counts["asked"]


def test_learning_rate_of_zero_leaves_the_backbone_as_it_was(folder: Path, tmp_path: Path) -> None:
    run, changed = tune(folder, tmp_path / "ft", backbone_lr=0)
    assert changed == set()
    assert run.results["fits"][-1]["backbone"]["moved"]["parameters"] == 0
    assert run.results["fits"][-1]["backbone"]["moved"]["head"] > 0


def test_statistics_are_updated_on_request(folder: Path, tmp_path: Path) -> None:
    run, changed = tune(folder, tmp_path / "ft", bn="train", unfreeze_last=2)
    layers = ("norms.1.", "norms.2.")
    assert {name for name in changed if is_statistic(name)} == {
        f"{layer}{name}"
        for layer in layers
        for name in ("running_mean", "running_var", "num_batches_tracked")
    }
    assert run.results["moves"]["buffers"] == 2 * (8 + 8 + 1)
    assert all(name.startswith((*layers, "convs.1.", "convs.2.")) for name in changed)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["norms.2"], {"norms.2.weight", "norms.2.bias"}),
        (["convs.*.eps"], {"convs.0.eps", "convs.1.eps", "convs.2.eps"}),
        (["embedding", "norms.0.bias"], {"embedding.linear.weight", "embedding.linear.bias",
                                         "norms.0.bias"}),
        ([], set()),
    ],
)  # fmt: skip
def test_names_and_globs_say_what_is_trained(
    folder: Path, tmp_path: Path, names: list[str], expected: set[str]
) -> None:
    assert tune(folder, tmp_path / "ft", unfreeze=names)[1] == expected


def test_layers_are_unfrozen_one_after_the_other(folder: Path, tmp_path: Path) -> None:
    before = load_file(folder / "checkpoint.safetensors")
    ran: list[nn.Module] = []
    seen: list[set[str]] = []

    def watch(module: nn.Module, inputs: Any) -> None:
        if module.state_dict().keys() == before.keys():
            ran.append(module)

    def epoch_done(progress: Progress) -> None:
        state = ran[-1].state_dict()
        seen.append(
            {name.split(".")[1] for name in before
             if name.startswith("convs.") and not torch.equal(state[name], before[name])}
        )  # fmt: skip

    training = TrainingOptions(epochs=7, batch_size=48, lr=1e-2, warmup=0, patience=0)
    stage = plan_finetuning(
        folder / "run",
        hg.ExperimentOptions(seeds=[0], training=training),
        backbone=BackboneOptions(lr=1e-2, unfreeze_every=2),
    )
    with register_module_forward_pre_hook(watch):
        for spec in stage.fits():
            stage.fit(spec, tmp_path / "ft", device=torch.device("cpu"), on_epoch=epoch_done)
    three = [set(), set(), {"2"}, {"2"}, {"1", "2"}, {"1", "2"}, {"0", "1", "2"}]
    assert seen[:7] == three


def test_first_loss_is_that_of_the_head_stage(folder: Path, tmp_path: Path) -> None:
    """With nothing unfrozen the two stages train the same thing, one from the cache."""
    training = TrainingOptions(epochs=3, batch_size=16, lr=1e-2)
    cache = folder / "demo.cache"
    options = {"dim": 8, "heads": 2, "dropout": 0.3}
    head = hg.train_head(cache, tmp_path / "head", training=training, seeds=[0], **options)
    tuned = hg.finetune(
        cache, tmp_path / "ft", unfreeze=[], training=training, head_options=options
    )
    logs = []
    for run, name in ((head, "histograph"), (tuned, "histograph-finetuned")):
        lines = (run.folder / "metrics.jsonl").read_text().splitlines()
        logs.append([entry for entry in map(json.loads, lines) if entry["head"] == name])
    assert len(logs[0]) == len(logs[1]) == 9
    for ours, theirs in zip(*logs, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
    mean = dict(head.results["readouts"]["mean"])
    mean.pop("temperature", None)  # of the readouts that a run keeps
    assert tuned.results["readouts"]["mean"] == mean
    assert tuned.results["readouts"]["own readout"] == head.results["readouts"]["own readout"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"unfreeze": ("convs.9",)}, "convs.9.*such as convs"),
        ({"unfreeze": ("classifier",)}, "no parameter in classifier"),
        ({"unfreeze_last": 9}, "expected at most the 4 layers"),
        ({"unfreeze_last": 0}, "unfreeze_last: found 0, expected a whole number from 1"),
        ({"unfreeze": (), "unfreeze_last": 1}, "expected one"),
        ({"unfreeze": (), "bn": "train"}, "no running statistics"),
        ({"bn": "moving"}, "'moving'"),
        ({"lr": -1.0}, "backbone_lr: found -1"),
        ({"lr": float("inf")}, "backbone_lr: found inf, expected a finite number from 0"),
    ],
)
def test_what_cannot_be_trained_is_refused(
    backbone: nn.Module, options: dict[str, Any], message: str
) -> None:
    batch = Batch.from_data_list(hg.load_data("demo:", args={"num_graphs": 4}).graphs)
    plan = plan_capture(backbone, batch)
    layers = layers_of_parameters(backbone, plan, batch)
    with pytest.raises(ConfigError, match=message):
        Unfreezing(backbone, layers, len(plan.points), BackboneOptions(**options))


class Gated(nn.Module):
    """Modules are registered in another order than they run in, and one layer runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.readout = nn.Linear(4, 1)
        self.late, self.early = GCNConv(4, 4), GCNConv(4, 4)
        self.gate = nn.Parameter(torch.ones(4))
        self.constant = nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = torch.relu(self.early(x, edge_index)) * self.constant
        x = torch.relu(self.early(x, edge_index))
        return self.readout(torch.relu(self.late(x, edge_index)) * self.gate)


def test_a_parameter_belongs_to_the_first_layer_that_depends_on_it() -> None:
    model = Gated()
    batch = Batch.from_data_list(hg.load_data("demo:", args={"num_graphs": 4}).graphs)
    plan = plan_capture(model, batch)
    assert plan.names == ("input", "early", "early#2", "late")
    assert layers_of_parameters(model, plan, batch) == {
        "early.lin.weight": 1, "early.bias": 1, "late.lin.weight": 3, "late.bias": 3, "gate": 3,
    }  # fmt: skip


class Stubborn(nn.Module):
    """A module that stays in eval() whatever it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def train(self, mode: bool = True) -> Stubborn:
        return super().train(False)


def test_frozen_parts_run_as_they_were_cached() -> None:
    model = nn.ModuleDict(
        {
            "frozen": nn.Sequential(nn.Linear(2, 2), nn.Dropout()),
            "moving": nn.Sequential(nn.Linear(2, 2), nn.Dropout(), nn.BatchNorm1d(2)),
            "stubborn": Stubborn(),
            "dropout": nn.Dropout(),
        }
    )
    model["frozen"].requires_grad_(False)
    for statistics, expected in (("frozen", False), ("train", True)):
        set_training_modes(model.train(), statistics)
        training = {name for name, module in model.named_modules() if module.training}
        norm = {"moving.2"} if expected else set()
        assert training == {"", "moving", "moving.0", "moving.1", "dropout"} | norm
