"""Every readout of a run can be used by its name."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import histograph_post as hg
from histograph_post.errors import ConfigError
from histograph_post.runs.saved_head import kept_readouts
from histograph_post.training.options import TrainingOptions

from ..helpers import histograph, make_model

SHORT = TrainingOptions(epochs=2, batch_size=16, lr=3e-2)
NAMES = ["mean", "concat", "svm", "histograph"]


@pytest.fixture(scope="module")
def compared(demo_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> hg.Run:
    out = tmp_path_factory.mktemp("compared") / "run"
    return hg.compare(demo_cache, out, heads=NAMES, dim=8, seeds=[0, 1], training=SHORT, jobs=1)


def test_a_comparison_predicts_with_the_best_by_validation(compared: hg.Run) -> None:
    readouts = compared.results["readouts"]
    valid = {name: readouts[name]["averaged"]["valid"]["mean"] for name in NAMES if name != "svm"}
    assert valid[compared.head] == max(valid.values())
    assert compared.stored_head["head"] == compared.head
    assert set(kept_readouts(compared)) == {"mean", "concat", "histograph"}


def test_every_readout_predicts_what_its_fits_say(compared: hg.Run) -> None:
    data, model = hg.load_data("demo:", args={"num_graphs": 60}), make_model()
    outputs = {}
    for name in ("mean", "concat", "histograph"):
        found = hg.predict(compared, data, model=model, head=name, device="cpu")
        run = compared.with_head(name)
        temperature = compared.results["readouts"][name]["temperature"]
        assert (run.head, run.saved_head.temperature) == (name, temperature)
        from safetensors.numpy import load_file

        files = [load_file(run.fit_folder(name, 0, seed) / "test.safetensors") for seed in (0, 1)]
        expected = np.mean([file["outputs"] for file in files], axis=0) / temperature
        rows = files[0]["rows"]
        np.testing.assert_allclose(found.outputs[rows], expected, rtol=1e-3, atol=1e-4)
        outputs[name] = found.outputs
    default = hg.predict(compared, data, model=model, device="cpu")
    np.testing.assert_array_equal(default.outputs, outputs[compared.head])
    # Both seeds of a readout that is solved have the same solution.
    assert len(compared.with_head("concat").saved_head.members) == 1


@pytest.mark.parametrize("name", ["mean", "concat"])
def test_another_readout_is_exported(compared: hg.Run, tmp_path: Path, name: str) -> None:
    hg.export(compared, tmp_path / "whole", whole=True, model=make_model(), head=name)
    stored = json.loads((tmp_path / "whole" / "head.json").read_text())
    assert stored["head"] == name
    graphs = hg.load_data("demo:", args={"num_graphs": 5})
    both = [
        hg.predict(place, graphs, model=make_model(), head=name, device="cpu").outputs
        for place in (compared, tmp_path / "whole")
    ]
    np.testing.assert_allclose(*both, rtol=1e-5, atol=1e-6)
    done = hg.export(compared, tmp_path / "head.pt2", head=name)
    assert done.difference is not None
    assert done.difference < 1e-3
    with pytest.raises(ConfigError, match="alone, expected 'histograph'"):
        hg.load(tmp_path / "whole", model=make_model(), head="histograph")


def test_what_a_run_has_not_kept_is_refused_in_a_line(compared: hg.Run, tmp_path: Path) -> None:
    for name, expected in (("svm", "compared only"), ("gmt", "found no readout 'gmt'")):
        words = ("--data", "demo:", "-o", tmp_path / "p.csv")
        done = histograph("predict", compared.folder, "--head", name, *words)
        assert done.exit_code == 1
        assert expected in done.stderr
        assert "mean" in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_a_run_of_an_earlier_version_has_no_temperatures(compared: hg.Run, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(compared.folder, tmp_path / "old")
    results = json.loads((tmp_path / "old" / "results.json").read_text())
    for row in results["readouts"].values():
        row.pop("temperature", None)
    del results["verdict"]
    (tmp_path / "old" / "results.json").write_text(json.dumps(results))
    (tmp_path / "old" / "SHA256SUMS").unlink()
    run = hg.Run.open(tmp_path / "old").with_head("mean")
    assert run.saved_head.temperature == 1.0
    assert run.verdict.text == compared.with_head("mean").verdict.text
    assert isinstance(run.load_ensemble(), torch.nn.Module)


def test_the_report_is_about_the_readout_that_is_asked_for(
    compared: hg.Run, tmp_path: Path
) -> None:
    hg.report(compared, tmp_path / "page.html", head="concat")
    page = (tmp_path / "page.html").read_text()
    assert "All metrics of concat: mean" in page
    assert re.search(r'<p class="headline[^.]*concat[^.]*test accuracy', page)


def test_the_verdict_is_the_same_everywhere(compared: hg.Run) -> None:
    text = compared.verdict.text
    assert compared.results["verdict"]["text"] == text
    shown = histograph("inspect", compared.folder, "-q")
    assert text in shown.stdout
