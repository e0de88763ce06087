"""Exported heads against the heads themselves, and whole models without run or cache."""

from __future__ import annotations

import json
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.data import Batch, Data
from torch_geometric.nn import GCNConv, global_mean_pool

import histograph_post as hg
from histograph_post.data import from_graphs
from histograph_post.errors import ModelError, OutputExistsError
from histograph_post.training.options import TrainingOptions

from ..helpers import demo_graphs, histograph, make_model

QUICK = TrainingOptions(epochs=2, batch_size=16, lr=1e-2)


class Narrowing(nn.Module):
    """A network whose layers have different widths."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = GCNConv(4, 9), GCNConv(9, 5), nn.Linear(5, 1)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        x = self.first(x, edge_index).relu()
        return self.out(global_mean_pool(self.second(x, edge_index), batch))


def quantities() -> list[Data]:
    graphs = [graph.clone() for graph in demo_graphs(24)]
    for graph in graphs:
        graph.y = torch.tensor([100.0 + graph.num_edges])
    return graphs


def coloured() -> list[Data]:
    graphs = [graph.clone() for graph in demo_graphs(24)]
    for graph in graphs:
        graph.y = graph.x.argmax(1)
    return graphs


@pytest.fixture(scope="module")
def make_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return the folder of a run: the kind of data, a head and its options."""
    folder = tmp_path_factory.mktemp("exported")

    def make(kind: str, head: str = "histograph", **options: object) -> Path:
        data = {
            "binary": lambda: from_graphs(demo_graphs(24)),
            "node": lambda: from_graphs(coloured()),
            "link": lambda: from_graphs(demo_graphs(4), level="link"),
            "narrowing": lambda: from_graphs(quantities()),
        }[kind]()
        if not (folder / f"{kind}.cache").exists():
            hg.cache(model_for(kind), data, folder / f"{kind}.cache", splits=None)
        out = folder / f"{kind}-{head}-{len(list(folder.iterdir()))}"
        if head == "histograph":
            options = {"heads": 2, **options}
        # One seed: tracing takes seconds a head, and test_ensemble.py exports several.
        given = {"training": QUICK, "dim": 8, "seeds": [0], **options}
        hg.train_head(folder / f"{kind}.cache", out, head=head, **given)
        return out

    return make


def model_for(kind: str) -> nn.Module:
    if kind != "narrowing":
        return make_model()
    torch.manual_seed(0)
    return Narrowing()


def inputs_of(predictor: nn.Module, batch: Batch) -> tuple[object, Tensor]:
    """Return what a program takes, captured from the backbone as a user would."""
    with predictor.capture, torch.no_grad():
        layers = predictor.capture.run(batch).history
    uniform = len({layer.size(1) for layer in layers}) == 1
    return torch.stack(list(layers), 1) if uniform else list(layers), batch.ptr.diff()


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        pytest.param("binary", {"warm_start": True}, marks=pytest.mark.long),
        ("node", {"zero_token": True, "layer_norm": True, "mixing": "delayed"}),
        ("link", {"normalization": "signed", "layer_heads": 1, "mix": "last"}),
        ("narrowing", {"history_layers": 2, "heads": 1, "node_attention": "landmark"}),
        ("narrowing", {"head": "sopool"}),
        ("binary", {"head": "dkepool-robust"}),
        ("binary", {"head": "sortpool"}),
        pytest.param("binary", {"head": "gmt"}, marks=pytest.mark.long),
        pytest.param("binary", {"head": "set-transformer"}, marks=pytest.mark.long),
    ],
    ids=lambda value: value if isinstance(value, str) else ",".join(value),
)
def test_program_gives_what_the_model_gives(
    kind: str, options: dict[str, object], make_run: Callable[..., Path], tmp_path: Path
) -> None:
    run = make_run(kind, **options)
    done = hg.export(run, tmp_path / "head.pt2")
    assert done.difference is not None
    assert done.difference < 1e-3
    program = torch.export.load(str(tmp_path / "head.pt2")).module()
    predictor = hg.load(run, model=model_for(kind), device="cpu")
    graphs = demo_graphs(9)
    graphs[3] = Data(x=torch.ones(1, 4), edge_index=torch.empty(2, 0, dtype=torch.long))
    for members in (graphs[:1], graphs[3:4], graphs[2:9]):
        batch = Batch.from_data_list([Data(x=g.x, edge_index=g.edge_index) for g in members])
        history, sizes = inputs_of(predictor, batch)
        if kind == "link":
            batch.edge_label_index = torch.randint(batch.num_nodes, (2, 11))
            found = program(history, sizes, batch.edge_label_index)
        else:
            found = program(history, sizes)
        with torch.no_grad():
            expected = predictor(batch)
        assert found.shape == expected.shape
        assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_other_readouts_say_what_they_take_and_keep_existing_files(
    make_run: Callable[..., Path], tmp_path: Path
) -> None:
    run = make_run("binary", "set2set")
    (tmp_path / "head.pt2").write_text("mine")
    with pytest.raises(OutputExistsError, match="--overwrite"):
        hg.export(run, tmp_path / "head.pt2")
    hg.export(run, tmp_path / "head.pt2", overwrite=True)
    extra = {"histograph.json": ""}
    torch.export.load(str(tmp_path / "head.pt2"), extra_files=extra)
    said = json.loads(extra["histograph.json"])
    assert [layer["width"] for layer in said["inputs"]["history"]] == [8] * 4
    assert (said["head"], said["output"]) == ("set2set", "logits")
    stored = json.loads((run / "head.json").read_text())
    assert said["backbone_weights_sha256"] == stored["backbone"]["weights_sha256"]


@pytest.mark.parametrize(
    ("head", "options"),
    [("topkpool", {}), ("histograph", {"node_attention": "neighbors"})],
)
def test_heads_that_cannot_be_traced_are_refused_and_nothing_is_written(
    head: str, options: dict[str, object], make_run: Callable[..., Path], tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match="--whole") as refused:
        hg.export(make_run("binary", head, **options), tmp_path / "head.pt2")
    assert len(str(refused.value).splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_whole_model_of_one_in_memory(make_run: Callable[..., Path], tmp_path: Path) -> None:
    run = make_run("binary", "mean")
    hg.export(run, tmp_path / "model", whole=True, model=make_model())
    other = make_model(seed=1)
    loaded = hg.load(tmp_path / "model", model=other, device="cpu")  # its weights are in the folder
    expected = hg.load(run, model=make_model(), device="cpu").predict(demo_graphs(5))
    assert (loaded.predict(demo_graphs(5)).outputs == expected.outputs).all()


def test_commands_need_neither_run_nor_cache_afterwards(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    work, data = tmp_path / "work", ("--data", "demo:", "--data-args", "num_graphs=24")
    work.mkdir()
    save_file(make_model().state_dict(), work / "gin.safetensors")
    model = ("--model", "gin", "--checkpoint", work / "gin.safetensors")
    for arguments in (
        ("cache", *model, *data, "-o", work / "a.cache"),
        (
            "train-head",
            work / "a.cache",
            "-o",
            work / "run",
            "--head",
            "mean",
            *("--epochs", 1, "--seeds", 0),
        ),
        ("predict", work / "run", *data, "-o", tmp_path / "before.csv"),
        ("export", work / "run", "-o", tmp_path / "model", "--whole"),
        ("export", work / "run", "-o", tmp_path / "head.pt2"),
    ):
        done = histograph(*arguments, "-q")
        assert done.exit_code == 0, done.output
    # What was asked for stands beside it, and gives the same again.
    options = tomllib.loads((tmp_path / "head.pt2.config.toml").read_text())
    assert options["out"] == str(tmp_path / "head.pt2")
    config = ("--config", tmp_path / "model" / "config.toml", "-o", tmp_path / "again")
    assert histograph("export", *config, "-q").exit_code == 0
    shutil.rmtree(work)
    done = histograph("predict", tmp_path / "model", *data, "-o", tmp_path / "after.csv")
    assert done.exit_code == 0, done.output
    assert "predicted with mean of fold 0, seed 0" in done.stderr
    assert (tmp_path / "after.csv").read_bytes() == (tmp_path / "before.csv").read_bytes()
    assert torch.export.load(str(tmp_path / "head.pt2"))
    done = histograph("export", tmp_path / "model", "-o", tmp_path / "again", "--whole")
    assert done.exit_code == 1
    assert "older export" in done.stderr
    (tmp_path / "again" / "notes.txt").write_text("mine")
    done = histograph(
        "export", tmp_path / "model", "-o", tmp_path / "again", "--whole", "--overwrite"
    )
    assert done.exit_code == 1
    assert "notes.txt" in done.stderr


def test_options_of_the_backbone_are_for_the_whole_model(tmp_path: Path) -> None:
    done = histograph("export", tmp_path, "-o", tmp_path / "head.pt2", "--model", "gin")
    assert done.exit_code == 2
