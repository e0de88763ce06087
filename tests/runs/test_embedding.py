"""Vectors of graphs and nodes: what a head reads out before it classifies."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch_geometric.data import Batch

import histograph_post as hg
from histograph_post.errors import ConfigError, DataError, MissingExtraError

from ..helpers import NodeModel, demo_graphs, histograph, make_model, node_labelled


@pytest.fixture(scope="module")
def run(demo_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> hg.Run:
    """Two heads; their probe is left out, so that all they know goes through the vector."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    options = {"epochs": 2, "seeds": [0, 1], "dim": 16, "heads": 2}
    return hg.train_head(demo_cache, folder, probe=0, calibrate=False, **options)


def graphs_of(count: int = 20) -> hg.GraphDataset:
    return hg.load_data("demo:", args={"num_graphs": count, "seed": 5})


def test_a_vector_is_what_the_best_head_classifies(run: hg.Run) -> None:
    data = graphs_of()
    found = hg.embed(run, data, model=make_model())
    assert found.vectors.shape == (20, 16)
    assert found.vectors.dtype == np.float32
    assert list(found.ids) == data.ids
    assert np.array_equal(found.rows, np.arange(20))
    fold, seed = run.chosen
    predictor = hg.load(run, model=make_model())
    number = [(m.fold, m.seed) for m in run.saved_head.members].index((fold, seed))
    with torch.inference_mode():
        each = predictor.each(Batch.from_data_list(data.graphs))[number]  # [20, out_dim]
        head = predictor.heads.members[number].network.head
        again = head.classify(torch.from_numpy(found.vectors))
    torch.testing.assert_close(again, each, rtol=1e-4, atol=1e-5)


def test_batches_do_not_matter_and_a_run_embeds_by_itself(run: hg.Run) -> None:
    data = graphs_of()
    one = run.embed(data, model=make_model(), node_budget=1)
    np.testing.assert_allclose(
        one.vectors, hg.embed(run, data, model=make_model()).vectors, rtol=1e-4, atol=1e-5
    )
    assert repr(one) == "Embeddings(20 rows of width 16)"


def test_the_file_is_read_without_pickle(run: hg.Run, tmp_path: Path) -> None:
    out = tmp_path / "vectors.npz"
    found = hg.embed(run, graphs_of(4), out, model=make_model())
    with np.load(out, allow_pickle=False) as file:
        assert set(file.files) == {"ids", "vectors", "rows"}
        assert np.array_equal(file["vectors"], found.vectors)
        assert file["ids"].tolist() == list(found.ids)
    with pytest.raises(hg.HistographError, match=r"vectors\.npz"):
        hg.embed(run, graphs_of(4), out, model=make_model())


def test_other_files_and_features_are_refused(
    run: hg.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"expected a file that ends in .npz or .parquet"):
        hg.embed(run, "nothing", tmp_path / "vectors.csv")
    wider = graphs_of()
    for graph in wider.graphs:
        graph.x = torch.ones(graph.num_nodes, 9)
    with pytest.raises(DataError, match=r"found 9 node features, expected 4, which .*run reads"):
        hg.embed(run, wider, model=make_model())
    monkeypatch.setattr("histograph_post.runs.predicting.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"histograph-post\[arrow\]"):
        hg.embed(run, "nothing", tmp_path / "vectors.parquet")


def test_parquet_has_a_column_of_vectors(run: hg.Run, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    found = hg.embed(run, graphs_of(4), tmp_path / "vectors.parquet", model=make_model())
    table = parquet.read_table(tmp_path / "vectors.parquet")
    assert table.column_names == ["id", "row", "vector"]
    assert np.allclose(np.array(table["vector"].to_pylist()), found.vectors)


def test_nodes_have_a_vector_each(tmp_path: Path) -> None:
    graphs, model = node_labelled(12), NodeModel()
    hg.cache(model, graphs, tmp_path / "n.cache", split="random")
    run = hg.train_head(tmp_path / "n.cache", tmp_path / "run", head="mlp", epochs=1, seeds=[0])
    found = hg.embed(run, graphs, model=model)
    assert len(found) == sum(graph.num_nodes for graph in graphs)
    assert found.ids[:2] == ["0:0", "0:1"]


def test_links_have_a_vector_per_node(tmp_path: Path) -> None:
    data = hg.load_data("demo:", args={"num_graphs": 12, "level": "link"})
    hg.cache(make_model(), data, tmp_path / "l.cache")
    run = hg.train_head(tmp_path / "l.cache", tmp_path / "run", head="mlp", epochs=1, seeds=[0])
    plain = demo_graphs(12)  # no pair is asked for
    found = hg.embed(run, plain, model=make_model())
    assert len(found) == sum(graph.num_nodes for graph in plain)


def test_molecules_are_embedded_by_command(tmp_path: Path) -> None:
    pytest.importorskip("rdkit")
    from histograph_post.models import build_model

    torch.manual_seed(0)
    weights = build_model("pretrain-gnns:gat", {"emb_dim": 4, "num_layer": 2}).state_dict()
    torch.save(weights, tmp_path / "file.pth")
    lines = [f"{'C' * (1 + n // 2)}{'ON'[n % 2]},{n % 2}" for n in range(30)]
    (tmp_path / "a.csv").write_text("\n".join(["smiles,amine", *lines]))
    data = ("--data", f"smiles:{tmp_path / 'a.csv'}")

    def type_words(*words: object) -> None:
        result = histograph(*words)
        assert result.exit_code == 0, result.output

    model = ("--model", "pretrain-gnns:gat", "--checkpoint", tmp_path / "file.pth")
    type_words("cache", *model, *data, "-o", tmp_path / "a.cache")
    quickly = ("--head", "mean", "--epochs", 1, "--seeds", 0)
    type_words("train-head", tmp_path / "a.cache", *quickly, "-o", tmp_path / "run")
    (tmp_path / "new.csv").write_text("smiles\nCCO\nbad\nCCN\n")
    new = ("--data", f"smiles:{tmp_path / 'new.csv'}")
    type_words("embed", tmp_path / "run", *new, "-o", tmp_path / "vectors.npz")
    with np.load(tmp_path / "vectors.npz") as file:
        assert file["smiles"].tolist() == ["CCO", "CCN"]
        assert file["rows"].tolist() == [0, 2]
        assert file["vectors"].shape == (2, 4)
