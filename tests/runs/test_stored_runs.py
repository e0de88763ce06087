"""Runs of earlier versions still open and predict the same (made by ``make_runs_v1.py``)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import histograph_post as hg
from histograph_post.data import load_data

FIXTURES = Path(__file__).parent / "fixtures" / "runs_v1"
EXPECTED = json.loads((FIXTURES / "expected.json").read_text())


@pytest.mark.parametrize("name", EXPECTED)
def test_a_run_of_version_1_predicts_what_it_did(name: str) -> None:
    predictor = hg.load(FIXTURES / name, checkpoint=FIXTURES / "model.safetensors", device="cpu")
    found = predictor.predict(load_data("demo:", args={"num_graphs": 12, "seed": 1}))
    np.testing.assert_allclose(found.outputs, EXPECTED[name], rtol=1e-5, atol=1e-6)
