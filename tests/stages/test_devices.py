"""Every command on a device that is far away: nothing is mixed, and nothing is refused."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import histograph_post as hg
from histograph_post.caches.caching import cache, write_cache
from histograph_post.caches.manifest import CANARY_NAME
from histograph_post.caches.planning import plan_cache
from histograph_post.caches.probing import CacheOptions
from histograph_post.caches.provenance import Canary
from histograph_post.errors import CaptureError, ConfigError
from histograph_post.splits import resolve_splits
from histograph_post.utils.machine import resolve_device

from ..helpers import demo_graphs, histograph, make_model
from ..rehearsal import UnorderedStreams, rehearse

KINDS = pytest.mark.parametrize(
    ("kind", "sums"), [("cuda", "atomic"), ("cuda", "any"), ("mps", "any")]
)


class _Dropping(torch.nn.Module):
    """Draws random numbers in eval() mode, too."""

    def __init__(self) -> None:
        super().__init__()
        self.model = make_model("gcn")

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor, batch: torch.Tensor) -> object:
        return self.model(torch.nn.functional.dropout(x, 0.5), edge_index, batch)


@KINDS
def test_sums_in_another_order_are_no_reason_to_refuse_a_model(
    kind: str, sums: str, tmp_path: Path
) -> None:
    for model in ("gin", "gcn"):
        with rehearse(kind, sums=sums):
            made = cache(make_model(model), demo_graphs(12), tmp_path / model, device=kind)
            assert made is not None
        on_cpu = cache(make_model(model), demo_graphs(12), tmp_path / f"{model}-cpu", device="cpu")
        assert on_cpu is not None
        ours, theirs = (each.gather(range(12)).history for each in (made, on_cpu))
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
        notes = made.manifest.capture["notes"]
        assert any(f"computed on {kind}" in note for note in notes)
        assert not any("computed on" in note for note in on_cpu.manifest.capture["notes"])


def test_deterministic_algorithms_give_the_same_bytes_where_they_exist(tmp_path: Path) -> None:
    for name in ("a", "b"):
        with rehearse(sums="atomic"):
            cache(make_model(), demo_graphs(12), tmp_path / name, device="cuda")
            assert not torch.are_deterministic_algorithms_enabled()  # left as it was
    shards = [(tmp_path / name / "shard-00000.h5").read_bytes() for name in ("a", "b")]
    assert shards[0] == shards[1]


def test_the_host_never_waits_for_a_batch_that_is_cached(tmp_path: Path) -> None:
    dataset = hg.load_data("demo:", args={"num_graphs": 12})
    found = []
    for nodes in (10_000, 1):  # one batch, and one per graph
        with rehearse() as counts:
            options = CacheOptions(node_budget=nodes)
            splits = resolve_splits(dataset, None)
            plan = plan_cache(make_model(), dataset, splits, options=options, device="cuda")
            made = write_cache(plan, tmp_path / str(nodes))
        assert made is not None
        found.append(counts)
    rows, more = (each.reads for each in found)
    more.subtract(rows)
    batches = len(dataset) - 1
    # The minima and maxima of all layers, their rows, and the outputs: all in the thread that
    # writes.
    assert (+more).total() == 3 * batches
    assert all(line.split(": ")[1].split("/")[0] == "caches" for line in +more)


def test_a_stream_that_does_not_wait_for_another_is_refused() -> None:
    """Of the rehearsal: so the blocks of a cache, which leave on a stream of their own, wait."""
    with rehearse():
        rows = torch.ones(3, device="cuda")  # [3]
        filled = torch.cuda.current_stream().record_event()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            with pytest.raises(UnorderedStreams):
                rows.cpu()
            stream.wait_event(filled)
            assert rows.cpu().tolist() == [1.0, 1.0, 1.0]


def test_chance_is_still_refused_on_a_device() -> None:
    dataset = hg.load_data("demo:", args={"num_graphs": 12})
    with rehearse(sums="any"), pytest.raises(CaptureError, match="second pass in eval"):
        plan_cache(_Dropping(), dataset, resolve_splits(dataset, None), device="cuda")


def test_a_canary_of_one_device_is_the_same_on_another(tmp_path: Path) -> None:
    model = make_model()
    with rehearse(sums="any"):
        dataset = hg.load_data("demo:", args={"num_graphs": 12})
        plan = plan_cache(model, dataset, resolve_splits(dataset, None), device="cuda")
        cache(model, dataset, tmp_path / "c", device="cuda")
        canary = Canary.from_bytes((tmp_path / "c" / CANARY_NAME).read_bytes(), "here")
        assert not list(canary.differences(model, plan.capture))
    assert not list(canary.differences(make_model(), plan.capture))
    other = make_model(seed=1)
    assert list(canary.differences(other, plan.capture))


def test_every_process_of_torchrun_has_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    with rehearse(devices=2):
        assert resolve_device("cuda") == resolve_device("auto") == torch.device("cuda", 1)
        assert resolve_device("cuda:0") == torch.device("cuda", 0)
        with pytest.raises(ConfigError, match="cuda:2 was asked for"):
            resolve_device("cuda:2")
    with rehearse(devices=1):  # each process sees but the one that is meant for it
        assert resolve_device("cuda") == torch.device("cuda", 0)


def test_other_commands_are_not_shared_by_processes_of_torchrun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for command in ("train-head", "compare", "tune", "report"):
        result = histograph(command, tmp_path, "-o", tmp_path / "out")
        assert result.exit_code == 1
        assert result.stderr.startswith(f"error: {command}: found WORLD_SIZE=2, expected 1")
        assert len(result.stderr.splitlines()) == 1


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint") / "model.safetensors"
    save_file(make_model().state_dict(), path)
    return path


@pytest.mark.parametrize(("kind", "sums"), [("cuda", "any"), ("mps", "any")])
def test_every_command_runs_on_a_device(
    kind: str, sums: str, checkpoint: Path, tmp_path: Path
) -> None:
    gin = ("--model", "gin", "--model-args", "hidden=8", "--model-args", "num_layers=3")
    demo = ("--data", "demo:", "--data-args", "num_graphs=24")
    quick = ("--epochs", 1, "--batch-size", 24)
    small = ("--seeds", 0, "--dim", 8)
    made, run = tmp_path / "made.cache", tmp_path / "run"
    trials = ("--trials", 2, "--seeds", 0, "--trial-seeds", 0)
    steps: list[tuple[object, ...]] = [
        ("cache", *gin, "--checkpoint", checkpoint, *demo, "-o", made),
        ("train-head", made, *quick, *small, "-o", run),
        ("compare", made, "--heads", "mean,probe", *quick, *small, "-o", tmp_path / "both"),
        ("tune", made, *trials, *quick, "-o", tmp_path / "tuned"),
        ("finetune", run, *quick, "--seeds", 0, "-o", tmp_path / "finetuned"),
        ("predict", run, *demo, "-o", tmp_path / "predictions.csv"),
        ("embed", run, *demo, "-o", tmp_path / "vectors.npz"),
        ("pretrain", *gin, *demo, *quick, "-o", tmp_path / "pretrained"),
        ("export", run, "-o", tmp_path / "head.pt2"),
        ("report", run, "-o", tmp_path / "report.html"),
    ]
    only_on_cuda = () if kind == "cuda" else ("compare", "tune", "export", "report")
    for name, *words in steps:
        if name in only_on_cuda:
            continue
        # Programs are exported, and pages written, on the CPU, of what the device has made.
        on_device = name not in ("export", "report")
        with rehearse(kind, sums=sums) if on_device else nullcontext():
            result = histograph(name, *words, *(("--device", kind) if on_device else ()))
        assert result.exit_code == 0, (name, result.output, result.exception)
