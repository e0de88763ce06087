"""The examples: model files that carry real checkpoints to the scores their authors report, and
scripts that do what their first lines say."""

from __future__ import annotations

import json
import runpy
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch_geometric.data import Batch

import histograph_post as hg
from histograph_post.data import DataSpec
from histograph_post.models import ModelSpec, build_model, call_model, prediction
from histograph_post.models.spec import Pretrained, load_pretrained
from histograph_post.splits import resolve_splits

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def load(shared_data: Path, model: str, checkpoint: str, data: str, **data_args) -> Pretrained:
    return load_pretrained(
        ModelSpec(f"{EXAMPLES}/{model}", checkpoint=shared_data / "checkpoints" / checkpoint),
        DataSpec(data, data_args, shared_data),
    )


def run(pretrained: Pretrained, num_graphs: int | None = None) -> tuple[Batch, Tensor]:
    batch = Batch.from_data_list(pretrained.dataset.graphs[:num_graphs])
    with torch.inference_mode():
        return batch, call_model(pretrained.model, batch)


def test_graph_conv_on_mutag(shared_data):
    pretrained = load(
        shared_data,
        "uvadlc_graph_conv.py:GraphGNNModel",
        "uvadlc_tutorial7/GraphLevelGraphConv.ckpt",
        "tu:MUTAG",
    )
    batch, output = run(pretrained)
    logits = prediction(output, rows=188)  # [188, 1]
    accuracy = ((logits[:, 0] > 0) == batch.y).double().mean().item()
    assert accuracy == pytest.approx(0.9255, abs=5e-5)


@pytest.mark.parametrize(
    ("model", "checkpoint", "expected"),
    [
        ("uvadlc_node_gcn.py:GNNModel", "uvadlc_tutorial7/NodeLevelGNN.ckpt", 0.824),
        ("pytorch_gat.py:GAT", "pytorch-GAT/gat_cora_000000.pth", 0.822),
    ],
)
def test_node_classifiers_on_cora(shared_data, model, checkpoint, expected):
    pretrained = load(shared_data, model, checkpoint, "planetoid:Cora")
    batch, output = run(pretrained)
    test = resolve_splits(pretrained.dataset, "official").folds[0].test
    correct = prediction(output, rows=2708).argmax(dim=1) == batch.y  # [2708]
    assert correct[test.tolist()].double().mean().item() == pytest.approx(expected, abs=1e-6)


# --- the scripts, as their first lines say ----------------------------------------------------


def succeeded(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_notebook(tmp_path, monkeypatch, capsys):
    """Cell after cell, as a reader runs them; without a kernel, whose start would take longer."""
    notebook = json.loads((EXAMPLES / "quickstart.ipynb").read_text(encoding="utf-8"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    namespace: dict[str, object] = {}
    for number, cell in enumerate(cells):
        exec(compile(cell, f"cell {number}", "exec"), namespace)
    assert not any(cell.get("outputs") for cell in notebook["cells"])  # nothing stale is shown
    assert namespace["report"].path.is_file()
    assert set(namespace["run"].results["readouts"]) >= {"own readout", "mean", "histograph"}
    assert str(namespace["run"].verdict) in capsys.readouterr().out


def test_a_custom_model_file(bash, tmp_path):
    out = tmp_path / "out"
    succeeded(bash(EXAMPLES / "custom_model.sh", out, cwd=tmp_path, EPOCHS="2"))
    script = runpy.run_path(str(EXAMPLES / "custom_model.py"))
    model, graphs = script["Net"](), script["graphs"]()
    model.load_state_dict(torch.load(out / "model.pt", weights_only=True)["model_state_dict"])
    test = [int(line) for line in (out / "split" / "test.txt").read_text().split()]
    with torch.inference_mode():
        batch = Batch.from_data_list([graphs[row] for row in test])
        correct = model.eval()(batch).argmax(dim=1) == batch.y  # [num_graphs]
    cache = hg.Cache.open(out / "net.cache")
    assert cache.manifest.own_metrics["folds"][0]["test"]["accuracy"] == pytest.approx(
        correct.double().mean().item()
    )
    assert cache.layer_names == ("input", *(f"blocks.{i}.conv" for i in range(6)))
    assert len((out / "predictions.csv").read_text().splitlines()) == 51


def test_molecules_from_the_checkpoint_to_the_table(bash, shared_data, tmp_path):
    rows = (shared_data / "mol" / "BBBP.csv").read_text().splitlines()
    (tmp_path / "few.csv").write_text("\n".join([rows[0], *rows[1::30]]))
    checkpoint = shared_data / "checkpoints" / "pretrain-gnns" / "chem_gcn_contextpred.pth"
    out = succeeded(
        bash(
            *(EXAMPLES / "molecules.sh", checkpoint, tmp_path / "few.csv", tmp_path / "out"),
            cwd=tmp_path,
            EPOCHS="1",
        )
    )
    assert "roc_auc over 1 fold and 3 seeds" in out
    assert all(f" {head} " in out for head in ("mean", "concat", "histograph"))
    assert (tmp_path / "out" / "report.html").is_file()


def test_node_classification_on_cora(bash, shared_data, tmp_path):
    checkpoint = shared_data / "checkpoints" / "uvadlc_tutorial7" / "NodeLevelGNN.ckpt"
    data, out = shared_data / "planetoid", tmp_path / "out"
    succeeded(bash(EXAMPLES / "cora.sh", checkpoint, data, out, cwd=tmp_path, EPOCHS="1"))
    own = hg.Cache.open(out / "cora.cache").manifest.own_metrics
    assert own["folds"][0]["test"]["accuracy"] == pytest.approx(0.824)
    assert len((out / "predictions.csv").read_text().splitlines()) == 2709


def test_a_lightning_checkpoint(bash, shared_data, tmp_path):
    checkpoint = shared_data / "checkpoints" / "uvadlc_tutorial7" / "GraphLevelGraphConv.ckpt"
    data, out = shared_data / "tu", tmp_path / "out"
    script = EXAMPLES / "lightning_checkpoint.sh"
    printed = succeeded(bash(script, checkpoint, data, out, cwd=tmp_path, EPOCHS="1"))
    assert "found at 'state_dict'" in printed
    own = hg.Cache.open(out / "mutag.cache").manifest.own_metrics
    assert own["all"]["accuracy"] == pytest.approx(0.9255, abs=5e-5)


def test_jobs_of_a_slurm_array_write_the_cache_that_one_job_would(bash, tmp_path):
    torch.manual_seed(0)
    model = build_model("gin", {"hidden": 64, "num_layers": 2}, in_dim=4, out_dim=1)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    told = {"MODEL": "gin", "CHECKPOINT": "model.pt", "DATA": "demo:"}
    told["EXTRA"] = "--data-args num_graphs=150 --shard-mb 1"
    for number, count, out in ((2, 3, "array"), (0, 3, "array"), (1, 3, "array"), (0, 1, "one")):
        job = {"SLURM_ARRAY_TASK_ID": str(number), "SLURM_ARRAY_TASK_COUNT": str(count)}
        script = EXAMPLES / "slurm_array.sh"
        printed = succeeded(bash(script, cwd=tmp_path, OUT=out, **told, **job))
        assert ("train-head" in printed) == (number == 1 or out == "one")
    files = {path.name: path.read_bytes() for path in (tmp_path / "one").iterdir()}
    del files["config.toml"]
    assert files == {name: (tmp_path / "array" / name).read_bytes() for name in files}


def test_the_head_as_a_drop_in_readout(bash, tmp_path):
    words = ("-c", f"python {EXAMPLES / 'drop_in_readout.py'} --epochs 6")
    lines = succeeded(bash(*words, cwd=tmp_path)).splitlines()
    found = dict(line.split(": test accuracy ") for line in lines)
    assert set(found) == {"mean pool", "histograph"}
    assert float(found["histograph"]) > 0.7


def test_a_graph_gps_backbone_from_python_and_by_command(bash, tmp_path):
    script = EXAMPLES / "graph_gps.py"
    printed = succeeded(bash("-c", f"python {script} out 40 2", cwd=tmp_path))
    assert "captured: input, convs.0.conv, convs.1.conv, convs.2.conv, convs.3.conv" in printed
    command = (
        f"histograph cache --model {script}:GPS --checkpoint out/gps.pt "
        f"--data {script}:graphs --data-args num_graphs=40 -o gps.cache"
    )
    succeeded(bash("-c", command, cwd=tmp_path))
    one, other = (hg.Cache.open(tmp_path / name) for name in ("out/gps.cache", "gps.cache"))
    assert one.weights_sha256 == other.weights_sha256
    assert torch.equal(torch.as_tensor(one[7].history), torch.as_tensor(other[7].history))


SCRIPTS = sorted(path for path in EXAMPLES.iterdir() if path.suffix in (".py", ".sh"))


@pytest.mark.parametrize("example", SCRIPTS, ids=lambda path: path.name)
def test_examples_are_short_listed_and_start_with_their_command(example):
    lines = example.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 110
    start = " ".join(lines[:8])
    assert any(f"{command} " in start for command in ("histograph", "python", "bash", "sbatch"))
    assert f"[`{example.name}`]({example.name})" in (EXAMPLES / "README.md").read_text()
