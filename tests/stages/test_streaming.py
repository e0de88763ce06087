"""Graphs that stay on disk go through every stage as those in memory do."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch_geometric.data import Batch

import histograph_post as hg
from histograph_post.caches import Cache, planning
from histograph_post.caches.caching import cache
from histograph_post.data import load_data, streaming
from histograph_post.data.indexed import IndexedRows
from histograph_post.data.spec import Reading
from histograph_post.data.streaming import read_rows
from histograph_post.errors import CacheError, ConfigError, OutputExistsError
from histograph_post.models import build_model
from histograph_post.utils.files import LINKS_VARIABLE

from ..helpers import contents, demo_graphs, histograph, make_model
from ..soak.operations import FAULTS, Faults


class Graphs:
    """A data set of one's own that can be indexed, and does not stay in memory."""

    def __init__(self, count: int = 24) -> None:
        self.all = demo_graphs(count)
        self.read: set[int] = set()

    def __len__(self) -> int:
        return len(self.all)

    def __getitem__(self, row: int) -> object:
        self.read.add(row)
        return self.all[row]


@pytest.fixture(autouse=True)
def on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "BLOCK_ROWS", 10)
    monkeypatch.setattr("histograph_post.data.streaming.STREAM_ROWS", 20)


def test_two_jobs_write_the_cache_of_one_and_leave_no_rows(tmp_path: Path) -> None:
    together = cache(make_model(), demo_graphs(24), tmp_path / "memory", node_budget=100)
    assert together is not None
    for number in (0, 1):
        assert not (tmp_path / "disk" / "manifest.json").exists()
        written = cache(
            make_model(),
            Graphs(),
            tmp_path / "disk",
            part=(number, 2),
            node_budget=100,
            shard_bytes=4000,
            workers=0,
        )
        assert (tmp_path / "disk.rows").exists() == (number == 0)
    assert written is not None
    assert len(written.manifest.shards) > 2
    assert written.splits == together.splits
    assert written.manifest.own_metrics == together.manifest.own_metrics
    assert np.array_equal(written.labels(), together.labels())
    for at in range(24):
        assert torch.equal(written[at].history, together[at].history)  # type: ignore[arg-type]


def test_a_job_reads_graphs_of_its_own_and_none_once_all_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "_SAMPLED", 4)
    graphs = demo_graphs(200)
    for number, graph in enumerate(graphs):
        graph.y = torch.tensor([number % 3 if number > 100 else 0])  # the sample has other classes

    def run(out: str, job: int = 0, jobs: int = 1, **options: object) -> tuple[Cache | None, int]:
        data = Graphs(200)
        data.all = graphs
        how = {"shard_bytes": 40_000, "workers": 0, **options}
        model = make_model(out_dim=3)
        made = cache(model, data, tmp_path / out, part=(job, jobs), **how)  # type: ignore[arg-type]
        return made, len({row for row in data.read if row > 63})  # the first 64 are looked at

    for job in (3, 2, 0):
        made, read = run("jobs", job, 4)
        assert made is None
        assert read < 70
    assert not (tmp_path / "jobs" / "manifest.json").exists()
    made, _ = run("jobs", 1, 4)
    assert made is not None
    run("one")
    assert contents(tmp_path / "jobs") == contents(tmp_path / "one")
    memory = cache(make_model(out_dim=3), graphs, tmp_path / "memory")
    assert memory is not None
    assert made.manifest.own_metrics == memory.manifest.own_metrics is not None
    assert made.splits == memory.splits
    assert torch.equal(made.gather(range(200)).history, memory.gather(range(200)).history)  # type: ignore[arg-type]

    for given in (None, memory.splits):
        again, read = run("jobs", 2, 4, split=given)
        assert again is not None
        assert read < 6
    with pytest.raises(OutputExistsError, match="that this command would not write"):
        run("jobs", 2, 4, split="kfold:3")
    graphs[100] = graphs[99]  # neither in the sample nor at the end of a block
    with pytest.raises(OutputExistsError, match="that this command would not write"):
        run("jobs")


SMILES = ["CCO", "c1ccccc1O", "CC(=O)O", "C#N", "[Na+].[Cl-]", "CCN", "CC(C)C", "C1CC1O"]


def molecules(folder: Path) -> tuple[object, ...]:
    """Write a table of 256 molecules, of which some cannot be read, and the words to cache it."""
    texts = [SMILES[number % 8] if number % 9 else "no molecule" for number in range(256)]
    texts[80:160] = ["no molecule"] * 80  # more than a shard of them
    rows = [f"molecule {number},{text},{number % 2}" for number, text in enumerate(texts)]
    (folder / "table.csv").write_text("\n".join(["name,smiles,target", *rows]))
    model = build_model("gin", {"hidden": 512, "num_layers": 2}, in_dim=[120] * 9, out_dim=1)
    save_file(model.state_dict(), folder / "gin.safetensors")
    sizes = ("--model-args", "hidden=512", "--model-args", "num_layers=2")
    named = ("--model", "gin", *sizes, "--checkpoint", folder / "gin.safetensors")
    return (
        "cache",
        *named,
        "--data",
        f"smiles:{folder / 'table.csv'}",
        "--workers",
        0,
        "--shard-mb",
        1,
    )


def test_a_job_reads_rows_of_its_own_and_the_jobs_make_the_cache_of_one(
    tmp_path: Path,
) -> None:
    words, out = molecules(tmp_path), tmp_path / "jobs"
    assert histograph(*words, "-o", tmp_path / "one").exit_code == 0
    shown = histograph("inspect", words[8], *words[1:7], *words[9:11], "--json")
    assert json.loads(shown.stdout)["num_graphs"] == 256  # rows: which have a graph is not known
    for wrong in ("scafold", "kfold:x", "random:0.5,0.6,0.1"):
        refused = histograph(*words, "--shard", "0/4", "--split", wrong, "-o", out)
        assert refused.exit_code == 1
        assert not out.exists()  # long before the rows are known that are split
    for job in (3, 0, 2):
        assert histograph(*words, "--shard", f"{job}/4", "-o", out).exit_code == 0
        if job == 3:  # of 26 blocks
            assert len(list((tmp_path / "jobs.rows").iterdir())) < 9
    assert not (out / "manifest.json").exists()
    result = histograph(*words, "--shard", "1/4", "-o", out)
    assert result.exit_code == 0, result.output
    assert "100 of 256 rows without a graph" in result.output
    assert not (tmp_path / "jobs.rows").exists()
    found, expected = contents(out), contents(tmp_path / "one")
    del found["config.toml"], expected["config.toml"]  # which has --shard
    assert found == expected
    assert histograph("verify", out).exit_code == 0

    made, memory = Cache.open(out), load_data(words[-5], args={"stream": False})  # type: ignore[arg-type]
    assert made.num_nodes.tolist() == memory.num_nodes.tolist()
    assert made.ids() == list(memory.ids)
    assert made.molecules() == list(zip(memory.smiles or (), memory.names or (), strict=True))
    assert np.array_equal(made.labels(), memory.labels())
    assert made.splits.total == len(memory) == 156
    assert [shard.stop - shard.start for shard in made.manifest.shards].count(0) > 0
    batch = Batch.from_data_list(list(memory.graphs))
    model = build_model("gin", {"hidden": 512, "num_layers": 2}, in_dim=[120] * 9, out_dim=1)
    model.load_state_dict(load_file(tmp_path / "gin.safetensors"))
    with torch.inference_mode():
        embedded = model.eval().embedding(batch.x)  # type: ignore[operator]
    history = made.gather(range(156)).history
    assert torch.equal(history[:, 0], embedded)  # type: ignore[call-overload]


def test_a_lost_shard_of_a_table_is_written_again(
    tmp_path: Path,
) -> None:
    words = (*molecules(tmp_path), "-o", tmp_path / "cache")
    assert histograph(*words).exit_code == 0
    before = contents(tmp_path / "cache")
    (tmp_path / "cache" / "shard-00004.h5").unlink()
    assert histograph(*words).exit_code == 0
    assert contents(tmp_path / "cache") == before
    result = histograph(*words, "--split", "kfold:3")
    assert result.exit_code == 1
    assert "that this command would not write" in result.output


def test_rows_for_which_there_is_no_room_name_their_file(tmp_path: Path) -> None:
    def read(folder: Path, at: int = 0) -> list[str]:
        faults = Faults(folder, at, FAULTS["ENOSPC"])
        with faults.installed():
            read_rows(IndexedRows(Graphs(), "mine"), Reading(folder, workers=0), spec="mine")
        return faults.calls

    calls = read(tmp_path / "whole")
    assert calls.count("write") == 3  # a block each
    for at in (number for number, call in enumerate(calls, 1) if call == "write"):
        with pytest.raises(OSError, match="No space left") as error:
            read(tmp_path / str(at), at)
        assert Path(error.value.filename).match(f"{at}/rows-*.safetensors")
        read(tmp_path / str(at))
        assert contents(tmp_path / str(at)) == contents(tmp_path / "whole")


def test_a_killed_prediction_goes_on_where_it_stopped(tmp_path: Path) -> None:
    made = cache(make_model(), demo_graphs(24), tmp_path / "cache")
    assert made is not None
    run = hg.train_head(made, tmp_path / "run", head="mean", epochs=1, seeds=[0, 1])
    expected = hg.predict(run, demo_graphs(24), model=make_model(), node_budget=60)
    seen: list[int] = []

    def stop(done: int, total: int) -> None:
        seen.append(done)
        if len(seen) == 3:
            raise KeyboardInterrupt

    out = tmp_path / "predictions.csv"
    with pytest.raises(KeyboardInterrupt):
        hg.predict(
            run, Graphs(), out, model=make_model(), node_budget=60, workers=0, on_progress=stop
        )
    again: list[int] = []
    found = hg.predict(
        run,
        Graphs(),
        out,
        model=make_model(),
        node_budget=60,
        workers=0,
        on_progress=lambda done, total: again.append(done),
    )
    assert again[0] > seen[-1]
    assert np.array_equal(found.outputs, expected.outputs)
    assert found.spread is not None
    assert np.array_equal(found.spread, expected.spread)  # type: ignore[arg-type]
    assert out.read_text() == found.to_csv()
    rows = Path(f"{out}.rows")
    assert not rows.exists()
    rows.mkdir()  # as after a kill just after the file is written
    (rows / "rows-0000000000.safetensors").touch()
    with pytest.raises(OutputExistsError):
        hg.predict(run, Graphs(), out, model=make_model(), workers=0)
    assert not rows.exists()


def test_shards_grow_where_there_would_be_too_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "SHARD_BYTES", 2**10)
    monkeypatch.setattr(planning, "MOST_SHARDS", 4)
    many = cache(make_model(), demo_graphs(24), tmp_path / "a", shard_bytes=2**10)
    few = cache(make_model(), demo_graphs(24), tmp_path / "b")
    assert many is not None
    assert few is not None
    assert len(many.manifest.shards) > 4 >= len(few.manifest.shards)


def test_an_output_may_be_a_link_to_scratch_and_no_url(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "scratch")
    cache(make_model(), demo_graphs(6), tmp_path / "link")
    assert len(Cache.open(tmp_path / "scratch")) == len(Cache.open(tmp_path / "link")) == 6
    graphs = iter(demo_graphs(6))
    with pytest.raises(ConfigError, match="found a URL, expected a local"):
        cache(make_model(), graphs, "s3://bucket/a.cache")
    assert len(list(graphs)) == 6  # refused before any is read
    result = histograph("train-head", tmp_path / "link", "-o", "gs://bucket/run")
    assert result.exit_code == 1
    assert "found a URL" in result.output


def test_links_to_files_are_followed_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache(make_model(), demo_graphs(6), tmp_path / "real")
    (tmp_path / "linked").mkdir()
    for path in (tmp_path / "real").iterdir():
        (tmp_path / "linked" / path.name).symlink_to(path)
    with pytest.raises(CacheError, match=f"found a symbolic link .{LINKS_VARIABLE}=1 follows"):
        Cache.open(tmp_path / "linked")
    monkeypatch.setenv(LINKS_VARIABLE, "1")
    assert Cache.open(tmp_path / "linked")[3].history is not None
    assert histograph("verify", tmp_path / "linked").exit_code == 0


def test_rows_know_the_row_that_fails() -> None:
    class Broken(Graphs):
        def __getitem__(self, row: int) -> object:
            raise RuntimeError("no such file")

    with pytest.raises(hg.errors.DataError, match="mine: row 7: failed with RuntimeError: no such"):
        IndexedRows(Broken(), "mine").given(7)
