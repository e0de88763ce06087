"""Graphs that stay on disk are those that would be in memory, however and by whom they are read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import Batch, Data, OnDiskDataset

from histograph_post.data import GraphDataset, from_graphs, load_data, streaming
from histograph_post.data.batching import batch_of
from histograph_post.data.spec import Reading
from histograph_post.errors import ConfigError, DataError

from ..helpers import demo_graphs, histograph

SMILES = ["CCO", "c1ccccc1O", "no molecule", "CC(=O)O", "", "C#N", "[Na+].[Cl-]", "CCN"]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "BLOCK_ROWS", 3)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "molecules.csv"
    rows = [f"{text},{number % 3}" for number, text in enumerate(SMILES)]
    path.write_text("\n".join(["smiles,target", *rows]) + "\n")
    return path


def read(path: Path, folder: Path | None = None, **reading: Any) -> GraphDataset:
    how = Reading(folder, **{"workers": 0, **reading})
    return load_data(f"smiles:{path}", args={"stream": "true"}, reading=how)


def alike(one: Data, other: Data) -> bool:
    return list(one.to_dict()) == list(other.to_dict()) and all(
        torch.equal(value, other[name]) and value.dtype == other[name].dtype
        for name, value in one.to_dict().items()
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_molecules_on_disk_are_those_in_memory(table: Path, workers: int) -> None:
    memory, disk = load_data(f"smiles:{table}"), read(table, workers=workers)
    assert isinstance(memory.graphs, list)
    assert not isinstance(disk.graphs, list)
    assert len(disk) == len(memory) == 6
    assert all(map(alike, disk.graphs, memory.graphs))
    assert all(alike(disk.graphs[at], memory.graphs[at]) for at in range(-6, 6))
    assert all(map(alike, disk.graphs[1:5], memory.graphs[1:5]))
    assert all(map(alike, disk.graphs[::-2], memory.graphs[::-2]))
    assert disk.labels().tolist() == memory.labels().tolist()
    assert disk.num_nodes.tolist() == memory.num_nodes.tolist()
    assert disk.num_edges.tolist() == memory.num_edges.tolist()
    assert disk.rows is not None
    assert memory.rows is not None
    assert disk.rows.tolist() == memory.rows.tolist()
    assert list(disk.ids) == list(memory.ids)
    assert list(disk.smiles or ()) == memory.smiles
    assert disk.notes == memory.notes
    assert disk.table == memory.table


@pytest.mark.parametrize("targets", [["target"], ["target", "other"]])
def test_batches_of_graphs_on_disk_are_those_in_memory(table: Path, targets: list[str]) -> None:
    lines = table.read_text().splitlines()
    table.write_text("\n".join(["smiles,target,other", *(f"{line},0.5" for line in lines[1:])]))
    given = {"targets": targets}
    memory = load_data(f"smiles:{table}", args=given)
    how = Reading(workers=0)
    disk = load_data(f"smiles:{table}", args={**given, "stream": True}, reading=how)
    for members in (range(6), range(1, 5), range(3, 4)):  # of blocks of three rows
        batch = batch_of(disk.graphs, members)
        expected = Batch.from_data_list(memory.graphs[members.start : members.stop])  # type: ignore[arg-type]
        assert alike(batch, expected)
        assert all(map(alike, batch.to_data_list(), expected.to_data_list()))


def test_many_rows_stay_on_disk_unasked(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("histograph_post.data.streaming.STREAM_ROWS", len(SMILES))
    assert not isinstance(load_data(f"smiles:{table}").graphs, list)
    assert isinstance(load_data(f"smiles:{table}", args={"stream": "no"}).graphs, list)
    with pytest.raises(DataError, match="stream=maybe, expected true or false"):
        load_data(f"smiles:{table}", args={"stream": "maybe"})


def test_blocks_that_are_there_are_kept_and_others_read_again(table: Path, tmp_path: Path) -> None:
    folder, seen = tmp_path / "rows", []
    first = read(table, folder, on_progress=lambda done, total: seen.append((done, total)))
    assert seen == [(0, 8), (3, 8), (6, 8), (8, 8)]
    before = {path.name: path.stat().st_ino for path in folder.iterdir()}
    assert read(table, folder).fingerprint() == first.fingerprint()
    assert {path.name: path.stat().st_ino for path in folder.iterdir()} == before
    (folder / min(before)).write_bytes(b"damaged")
    seen.clear()
    again = read(table, folder, on_progress=lambda done, total: seen.append((done, total)))
    assert again.fingerprint() == first.fingerprint()
    assert seen == [(5, 8), (8, 8)]  # what was there is no part of the rate
    table.write_text(table.read_text().replace("CCN", "CCCN"))
    changed = read(table, folder)
    after = {path.name: path.stat().st_ino for path in folder.iterdir()}
    assert [name for name in sorted(after) if after[name] != before[name]] == [
        min(before),
        max(before),
    ]
    assert changed.fingerprint() != first.fingerprint()


def test_the_fingerprint_sees_labels_and_features(table: Path) -> None:
    first = read(table).fingerprint()
    table.write_text(table.read_text().replace("CCO,0", "CCO,2"))
    assert read(table).fingerprint() != first


class Stored(OnDiskDataset):  # type: ignore[misc]
    """Graphs in a database."""


class Rows:
    """A data set that can be indexed, of rows as Hugging Face has them."""

    def __init__(self, count: int, wrong: int | None = None) -> None:
        self.count, self.wrong = count, wrong

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, row: int) -> dict[str, Any]:
        if row >= self.count:
            raise IndexError(row)
        width = 3 if row == self.wrong else 2
        return {
            "edge_index": [[0, 1], [1, 0]],
            "node_feat": [[float(row)] * width] * 2,
            "y": [float(row)],
            "name": f"graph {row}",
        }


@pytest.mark.parametrize("workers", [0, 2])
def test_a_database_of_graphs_is_streamed(tmp_path: Path, workers: int) -> None:
    graphs = demo_graphs(8)
    stored = Stored(str(tmp_path / "db"), log=False)
    stored.extend(graphs)
    found = from_graphs(stored, stream=True, reading=Reading(workers=workers))
    assert not isinstance(found.graphs, list)
    assert all(map(alike, found.graphs, from_graphs(graphs).graphs))
    stored.close()


def test_rows_that_are_read_later_may_import_what_is_beside_their_code(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("WIDTH = 5\n")
    (tmp_path / "mine.py").write_text(
        """
import torch
from torch_geometric.data import Data

class Graphs:
    def __len__(self):
        return 300

    def __getitem__(self, row):
        if row == 298:  # not of the sample
            from beside import WIDTH
        width = WIDTH if row == 298 else 5
        return Data(x=torch.ones(2, width), edge_index=torch.tensor([[0], [1]]), y=float(row))

def graphs():
    return Graphs()
"""
    )
    how = Reading(workers=0, sampled=True)
    spec = f"{tmp_path / 'mine.py'}:graphs"
    sample = load_data(spec, args={"stream": "true"}, reading=how)
    assert sample.source is not None
    assert sample.labels()[:2, 0].tolist() == [0, 1]
    assert len(sample) == 256
    read = sample.source.read([range(290, 300)])
    assert read.rows is not None
    assert read.rows.tolist() == list(range(288, 300))  # whole blocks
    assert read.labels()[:, 0].tolist() == list(range(288, 300))


def test_rows_that_are_dictionaries_are_graphs() -> None:
    found = from_graphs(Rows(8), stream=True, reading=Reading(workers=0))
    assert found.graphs[5].x.tolist() == [[5.0, 5.0]] * 2
    assert found.labels()[:, 0].tolist() == list(range(8))
    assert any("attribute name (str) left out" in note for note in found.notes)
    assert from_graphs(Rows(8), stream=False).labels().tolist() == found.labels().tolist()


@pytest.mark.parametrize("wrong", [4, 7])
def test_a_graph_of_another_form_is_named(wrong: int) -> None:
    with pytest.raises(DataError, match=rf"rows? {wrong if wrong == 4 else '[67]'}"):
        from_graphs(Rows(8, wrong), stream=True, reading=Reading(workers=0))


def test_an_iterator_is_streamed_in_its_order() -> None:
    def graphs() -> Iterator[Data]:
        yield from demo_graphs(10)

    found = from_graphs(graphs(), stream=True)
    assert all(map(alike, found.graphs, from_graphs(demo_graphs(10)).graphs))


def test_graphs_without_features_or_with_node_labels_are_read_into_memory() -> None:
    bare = [Data(edge_index=torch.tensor([[0, 1], [1, 0]]), num_nodes=2, y=1.0) for _ in range(4)]
    assert isinstance(from_graphs(iter(bare), stream=True).graphs, list)
    labelled = demo_graphs(4)
    for graph in labelled:
        graph.y = torch.zeros(graph.num_nodes)
    assert from_graphs(iter(labelled), stream=True).level == "node"


def test_workers_are_counted_from_zero() -> None:
    with pytest.raises(ConfigError, match="workers: found -1, expected 0 or more"):
        Reading(workers=-1)


def test_a_table_at_a_url_is_downloaded(table: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    with fsspec.open("memory://tables/molecules.csv", "wb") as file:
        file.write(table.read_bytes())
    found = load_data("smiles:memory://tables/molecules.csv")
    assert found.labels().tolist() == load_data(f"smiles:{table}").labels().tolist()
    with pytest.raises(DataError, match=r"memory://nowhere\.csv: not read"):
        load_data("smiles:memory://nowhere.csv")


def test_a_url_to_write_to_is_refused_in_one_line(table: Path, tmp_path: Path) -> None:
    result = histograph("verify", "s3://bucket/a.cache")
    assert result.exit_code == 1
    assert "s3://bucket/a.cache: found a URL, expected a local file or folder" in result.output
    assert not Path("s3:").exists()


def test_a_table_of_parquet_is_read(table: Path, tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    columns = {"smiles": SMILES, "target": [float(n % 3) for n in range(len(SMILES))]}
    path = tmp_path / "molecules.parquet"
    parquet.write_table(pyarrow.table(columns), path)
    found, expected = load_data(f"smiles:{path}"), load_data(f"smiles:{table}")
    assert np.array_equal(found.labels(), expected.labels())
    assert found.smiles == expected.smiles
