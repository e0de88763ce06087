"""Runs of earlier versions still open and predict the same (made by ``make_runs_v1.py``)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch_geometric.data import Batch

import histograph_post as hg
from histograph_post.caches import Cache, verify_cache
from histograph_post.data import load_data
from histograph_post.models import build_model

FIXTURES = Path(__file__).parent / "fixtures" / "runs_v1"
EXPECTED = json.loads((FIXTURES / "expected.json").read_text())


@pytest.mark.parametrize("name", EXPECTED)
def test_a_run_of_version_1_predicts_what_it_did(name: str) -> None:
    predictor = hg.load(FIXTURES / name, checkpoint=FIXTURES / "model.safetensors", device="cpu")
    found = predictor.predict(load_data("demo:", args={"num_graphs": 12, "seed": 1}))
    np.testing.assert_allclose(found.outputs, EXPECTED[name], rtol=1e-5, atol=1e-6)


def test_a_cache_a_run_and_an_export_of_version_2_are_what_they_were() -> None:
    """Made by ``make_runs_v2.py``: cache format 1.1, several heads, hashes of all files."""
    folder = FIXTURES.with_name("runs_v2")
    assert verify_cache(folder / "demo.cache").ok
    cache = Cache.open(folder / "demo.cache")
    graphs = load_data("demo:", args={"num_graphs": 24})
    model = build_model("gin", {"hidden": 4, "num_layers": 2}, in_dim=4, out_dim=1)
    model.load_state_dict(load_file(folder / "model.safetensors"))
    with torch.inference_mode():
        batch = Batch.from_data_list(list(graphs.graphs))
        outputs = model.eval()(batch.x, batch.edge_index, batch=batch.batch)
    np.testing.assert_allclose(cache.outputs(), outputs.numpy(), atol=1e-5)

    run = hg.Run.open(folder / "run")
    assert (run.kind, run.readouts) == ("train-head", ["histograph", "mean"])
    expected = json.loads((folder / "expected.json").read_text())
    new = load_data("demo:", args={"num_graphs": 12})
    for name, weights in (("run", folder / "model.safetensors"), ("exported", None)):
        found = hg.load(folder / name, checkpoint=weights, device="cpu").predict(new)
        np.testing.assert_allclose(found.outputs, expected, rtol=1e-5, atol=1e-6)
