"""The cache stage as a whole: what is stored, what is refused, and what an error leaves."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch_geometric.data import Batch, Data
from torch_geometric.nn import GCNConv, global_mean_pool

from histograph_post.caches.caching import cache, write_cache
from histograph_post.caches.planning import plan_cache
from histograph_post.data import GraphDataset, from_graphs, load_data
from histograph_post.errors import (
    CacheError,
    CaptureError,
    ConfigError,
    ModelError,
    OutputExistsError,
)
from histograph_post.models.checkpoints import weights_sha256
from histograph_post.splits import resolve_splits

from ..helpers import contents, make_model
from ..soak.operations import Faults


@pytest.fixture(scope="module")
def dataset() -> GraphDataset:
    return load_data("demo:", args={"num_graphs": 60})


def without_records(found: dict[str, bytes]) -> dict[str, bytes]:
    """Leave out what stands beside a shard until the manifest is written."""
    return {name: data for name, data in found.items() if not re.match(r"shard-.*\.json", name)}


def test_values_labels_edges_and_outputs_are_the_models_own(
    dataset: GraphDataset, tmp_path: Path
) -> None:
    model = make_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    written = cache(model, dataset, tmp_path / "a.cache", node_budget=200)
    assert written is not None
    for index in (0, 17, 59):
        graph = dataset.graphs[index]
        batch = Batch.from_data_list([graph])
        with torch.inference_mode():
            embedded = model.embedding(graph.x)
            output = model(batch.x, batch.edge_index, batch=batch.batch)
        found = written[index]
        assert found.id == dataset.ids[index]
        assert isinstance(found.history, torch.Tensor)
        assert found.history.shape == (graph.num_nodes, 4, 8)
        torch.testing.assert_close(found.history[:, 0], embedded)
        torch.testing.assert_close(found.outputs, output)
        assert torch.equal(found.edge_index, graph.edge_index)
        assert found.labels.tolist() == [[float(graph.y)]]
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_own_score_is_that_of_the_outputs(dataset: GraphDataset, tmp_path: Path) -> None:
    written = cache(make_model(), dataset, tmp_path / "a.cache", splits="kfold:5")
    assert written is not None
    own = written.manifest.own_metrics
    assert own is not None
    right = (written.outputs()[:, 0] > 0) == (written.labels()[:, 0] == 1)
    assert own["all"]["accuracy"] == right.mean()
    for fold, scores in zip(written.splits.folds, own["folds"], strict=True):
        assert scores["test"]["accuracy"] == pytest.approx(right[fold.test].mean())


@pytest.mark.parametrize("budget", [1, 64, 10_000])
def test_values_do_not_depend_on_the_batches(
    dataset: GraphDataset, tmp_path: Path, budget: int
) -> None:
    one = cache(make_model("gcn"), dataset, tmp_path / "one.cache", node_budget=1)
    many = cache(make_model("gcn"), dataset, tmp_path / "many.cache", node_budget=budget)
    assert one is not None
    assert many is not None
    everything = np.arange(len(dataset))
    torch.testing.assert_close(one.gather(everything).history, many.gather(everything).history)


def test_half_precision_is_half_the_bytes_and_close(dataset: GraphDataset, tmp_path: Path) -> None:
    everything = np.arange(len(dataset))
    full = cache(make_model(), dataset, tmp_path / "full.cache")
    assert full is not None
    exact = full.gather(everything).history
    for dtype, tolerance in (("float16", 1e-3), ("bfloat16", 1e-2)):
        half = cache(make_model(), dataset, tmp_path / f"{dtype}.cache", dtype=dtype)
        assert half is not None
        found = half.gather(everything).history
        assert found.element_size() == 2
        torch.testing.assert_close(found.float(), exact, rtol=tolerance, atol=tolerance)


def test_compressed_cache_holds_the_same_values(dataset: GraphDataset, tmp_path: Path) -> None:
    plain = cache(make_model(), dataset, tmp_path / "plain.cache")
    small = cache(make_model(), dataset, tmp_path / "small.cache", compression="gzip")
    assert plain is not None
    assert small is not None
    everything = np.arange(len(dataset))
    assert torch.equal(plain.gather(everything).history, small.gather(everything).history)


@pytest.mark.parametrize("compression", [None, "gzip"])
def test_a_disk_that_fills_up_loses_nothing(
    dataset: GraphDataset,
    tmp_path: Path,
    compression: str | None,
) -> None:
    options = {"compression": compression, "node_budget": 100, "shard_bytes": 20_000}
    cache(make_model(), dataset, tmp_path / "whole.cache", **options)
    counter = Faults(tmp_path / "counted.cache")
    with counter.installed():
        cache(make_model(), dataset, tmp_path / "counted.cache", **options)
    full = Faults(tmp_path / "a.cache", at=len(counter.calls) // 2, error=errno.ENOSPC)
    with full.installed(), pytest.raises(OSError, match="No space left on device") as error:
        cache(make_model(), dataset, tmp_path / "a.cache", **options)
    assert "a.cache" in str(error.value.filename)
    kept = contents(tmp_path / "a.cache")
    assert "shard-00000.h5" in kept
    assert "manifest.json" not in kept
    cache(make_model(), dataset, tmp_path / "a.cache", **options)
    whole = contents(tmp_path / "whole.cache")
    assert contents(tmp_path / "a.cache") == whole
    assert without_records(kept).items() <= whole.items()


class Mixing(nn.Module):
    """Forgets `batch`: every graph sees the mean of all graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = GCNConv(4, 8)
        self.conv2 = GCNConv(8, 8)

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        x = self.conv(x, edge_index)
        return self.conv2(x - x.mean(dim=0), edge_index)


def test_model_that_mixes_graphs_is_refused_but_one_at_a_time(
    dataset: GraphDataset, tmp_path: Path
) -> None:
    with pytest.raises(CaptureError, match="mixes the graphs of a batch"):
        cache(Mixing(), dataset, tmp_path / "a.cache")
    assert cache(Mixing(), dataset, tmp_path / "b.cache", node_budget=1) is not None


def test_model_that_draws_random_numbers_is_refused(dataset: GraphDataset, tmp_path: Path) -> None:
    class Chance(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = GCNConv(4, 8), GCNConv(8, 8)

        def forward(self, x: torch.Tensor, edge_index: torch.Tensor, batch: torch.Tensor):
            x = nn.functional.dropout(self.first(x, edge_index))  # forgets training=self.training
            return global_mean_pool(self.second(x, edge_index), batch)

    with pytest.raises(CaptureError, match=r"layer 'first'.*second pass"):
        cache(Chance(), dataset, tmp_path / "a.cache", node_budget=1)


def test_non_finite_activations_name_graph_and_layer(tmp_path: Path) -> None:
    class Exploding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = GCNConv(4, 8)
            self.second = GCNConv(8, 8)

        def forward(self, x: torch.Tensor, edge_index: torch.Tensor, batch: torch.Tensor):
            x = self.first(x, edge_index)
            x = torch.where(x.abs() > 1e6, torch.full_like(x, torch.inf), x)
            return global_mean_pool(self.second(x, edge_index), batch)

    graphs = [
        Data(x=torch.ones(3, 4), edge_index=torch.tensor([[0, 1], [1, 2]]), y=torch.tensor([0]))
        for _ in range(9)
    ]
    graphs[5].x = graphs[5].x * 1e9
    with pytest.raises(CacheError, match=r"graph '?mol-5'?.*layer '?first'?|layer.*first.*mol-5"):
        cache(
            Exploding(),
            from_graphs(graphs, ids=[f"mol-{i}" for i in range(9)], level="graph"),
            tmp_path / "a.cache",
            splits="random",
        )
    assert not list((tmp_path / "a.cache").glob("shard*"))


def test_what_fails_or_is_interrupted_leaves_whole_shards_and_goes_on(
    dataset: GraphDataset, tmp_path: Path
) -> None:
    small = {"shard_bytes": 20_000, "node_budget": 300}
    cache(make_model(), dataset, tmp_path / "whole", **small)
    whole = contents(tmp_path / "whole")

    def interrupt(done: int, total: int) -> None:
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cache(make_model(), dataset, tmp_path / "a", on_progress=interrupt, **small)
    found = without_records(contents(tmp_path / "a"))
    assert 1 < len(found) < len(whole)
    assert found.items() <= whole.items()
    cache(make_model(), dataset, tmp_path / "a", **small)
    assert contents(tmp_path / "a") == whole


def test_shard_that_cannot_be_written_is_told_and_leaves_nothing(
    dataset: GraphDataset, tmp_path: Path
) -> None:
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
    try:
        with pytest.raises(OSError, match=r"File too large: .*shard-00000\.h5"):
            cache(make_model(hidden=64), dataset, tmp_path / "a")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(contents(tmp_path / "a")) == ["canary.safetensors", "splits.json"]


def test_same_command_twice_does_nothing_and_another_is_refused(
    dataset: GraphDataset, tmp_path: Path
) -> None:
    folder = tmp_path / "a.cache"
    cache(make_model(), dataset, folder)
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    cache(make_model(), dataset, folder)
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    with pytest.raises(OutputExistsError, match="--overwrite"):
        cache(make_model("gcn"), dataset, folder)
    with pytest.raises(OutputExistsError, match="--overwrite"):
        cache(make_model(), dataset, folder, splits="kfold:3")
    replaced = cache(make_model("gcn"), dataset, folder, overwrite=True)
    assert replaced is not None
    assert replaced.weights_sha256 == weights_sha256(make_model("gcn").state_dict())


def test_folder_with_foreign_files_is_left_alone(dataset: GraphDataset, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    for overwrite in (False, True):
        with pytest.raises(OutputExistsError, match="not a cache's"):
            cache(make_model(), dataset, tmp_path, overwrite=overwrite)
    assert contents(tmp_path) == {"thesis.tex": b"years of work"}


def test_jobs_in_any_order_join_to_the_bytes_of_one_job(
    dataset: GraphDataset, tmp_path: Path
) -> None:
    small = {"shard_bytes": 20_000, "node_budget": 300}
    cache(make_model(), dataset, tmp_path / "one.cache", **small)
    for job in (2, 0):
        assert cache(make_model(), dataset, tmp_path / "n.cache", part=(job, 3), **small) is None
    joined = cache(make_model(), dataset, tmp_path / "n.cache", part=(1, 3), **small)
    assert joined is not None
    assert len(joined.manifest.shards) > 3
    assert contents(tmp_path / "one.cache") == contents(tmp_path / "n.cache")
    with pytest.raises(ConfigError, match="expected i/n"):
        cache(make_model(), dataset, tmp_path / "n.cache", part=(3, 3), **small)


def test_a_strangers_files_are_not_overwritten(dataset: GraphDataset, tmp_path: Path) -> None:
    for name in ("config.toml", "splits.json", "download.zip.partial"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / name).write_text("mine")
        plan = plan_cache(make_model(), dataset, resolve_splits(dataset, None))
        with pytest.raises(OutputExistsError, match=r"choose another -o"):
            write_cache(plan, folder, config={"model": "gin"})
        assert contents(folder) == {name: b"mine"}


def test_refused_resume_changes_nothing(dataset: GraphDataset, tmp_path: Path) -> None:
    small = {"shard_bytes": 20_000}
    assert cache(make_model(), dataset, tmp_path / "a", part=(0, 2), **small) is None
    before = contents(tmp_path / "a")
    with pytest.raises(OutputExistsError, match="--overwrite"):
        cache(make_model(), dataset, tmp_path / "a", splits="kfold:3", dtype="float16", **small)
    assert contents(tmp_path / "a") == before


def test_jobs_that_overwrite_complete_the_cache(dataset: GraphDataset, tmp_path: Path) -> None:
    small = {"shard_bytes": 20_000}
    cache(make_model("gcn"), dataset, tmp_path / "a", **small)
    assert (
        cache(make_model(), dataset, tmp_path / "a", part=(0, 2), overwrite=True, **small) is None
    )
    last = cache(make_model(), dataset, tmp_path / "a", part=(1, 2), overwrite=True, **small)
    assert last is not None
    cache(make_model(), dataset, tmp_path / "b", **small)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: os.truncate(path, 100)])
def test_missing_or_cut_shard_of_a_complete_cache_is_written_again(
    dataset: GraphDataset, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    small = {"shard_bytes": 20_000}
    cache(make_model(), dataset, tmp_path / "a", **small)
    whole = contents(tmp_path / "a")
    damage(tmp_path / "a" / "shard-00001.h5")
    cache(make_model(), dataset, tmp_path / "a", **small)
    assert contents(tmp_path / "a") == whole


class Outputs(nn.Module):
    """Two outputs; counts its own calls in a buffer, or gives NaN, as asked."""

    def __init__(self, *, counts: bool = False, broken: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.lin = GCNConv(4, 8), nn.Linear(8, 1)
        self.counts, self.broken = counts, broken
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor, batch: torch.Tensor):
        if self.counts:
            self.calls += 1
        logits = self.lin(global_mean_pool(self.conv(x, edge_index), batch))
        return {"logits": logits * (torch.nan if self.broken else 1.0), "alt": -logits}


def test_another_output_is_another_cache(dataset: GraphDataset, tmp_path: Path) -> None:
    cache(Outputs(), dataset, tmp_path / "a")
    with pytest.raises(OutputExistsError, match="--overwrite"):
        cache(Outputs(), dataset, tmp_path / "a", output_key="alt")


def test_output_that_is_not_finite_names_the_graph(dataset: GraphDataset, tmp_path: Path) -> None:
    with pytest.raises(CacheError, match="graph '0': found an output of the model that is not"):
        cache(Outputs(broken=True), dataset, tmp_path / "a")


def test_what_is_no_model_is_refused(dataset: GraphDataset, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"model: found str, expected a torch\.nn\.Module"):
        cache("gin", dataset, tmp_path / "a")


def test_model_that_changes_its_buffers_is_refused(dataset: GraphDataset, tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="changed its own"):
        cache(Outputs(counts=True), dataset, tmp_path / "a")
    assert not (tmp_path / "a" / "manifest.json").exists()
