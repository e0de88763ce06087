"""The manifest: what it is bound to, and that it survives being written and read."""

from __future__ import annotations

import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from histograph_post.caches import Manifest
from histograph_post.caches.manifest import plan_hash, write_manifest
from histograph_post.errors import CacheError

DOCUMENT = Path(__file__).parents[2] / "docs" / "cache-format.md"

PLAN = {
    "tool_version": "0.1.0",
    "weights_sha256": "a" * 64,
    "model": {"spec": "gin", "args": {"layers": 5, "norm": "batch"}},
    "data": {"spec": "tu:MUTAG", "args": {}, "fingerprint": "b" * 64},
    "capture": {"points": ["input", "convs.0"]},
    "shards": [(0, 3), (3, 5)],
    "settings": {"node_budget": 8192},
}


def test_the_same_plan_has_the_same_hash(example):
    layout = example().layout
    one = plan_hash(layout=layout, **PLAN)
    assert len(one) == 64
    other_order = {"norm": "batch", "layers": 5}
    same = {**PLAN, "model": {"args": other_order, "spec": "gin"}, "shards": [[0, 3], [3, 5]]}
    assert plan_hash(layout=layout, **same) == one


@pytest.mark.parametrize(
    "other",
    [
        {"tool_version": "0.2.0"},
        {"weights_sha256": "c" * 64},
        {"model": {"spec": "gin", "args": {"layers": 6, "norm": "batch"}}},
        {"data": {"spec": "tu:MUTAG", "args": {}, "fingerprint": "c" * 64}},
        {"capture": {"points": ["convs.0", "input"]}},
        {"shards": [(0, 2), (2, 5)]},
        {"settings": {"node_budget": 4096}},
    ],
)
def test_another_plan_has_another_hash(example, other):
    layout = example().layout
    assert plan_hash(layout=layout, **{**PLAN, **other}) != plan_hash(layout=layout, **PLAN)
    for change in ({"dtype": "float16"}, {"compression": "gzip"}, {"has_edges": False}):
        assert plan_hash(layout=replace(layout, **change), **PLAN) != plan_hash(
            layout=layout, **PLAN
        )


@pytest.mark.parametrize("args", [{"sizes": {1, 2}}, {"rate": float("nan")}, {"norm": object()}])
def test_arguments_that_are_no_json(example, args):
    with pytest.raises(CacheError, match="JSON cannot hold"):
        plan_hash(layout=example().layout, **{**PLAN, "model": {"spec": "gin", "args": args}})


@pytest.mark.parametrize("kind", [{}, {"widths": (4, 2)}, {"compression": "gzip", "level": "link"}])
def test_a_manifest_survives(example, tmp_path, kind):
    manifest = example(**kind).write(tmp_path, [(0, 2), (2, 5)])
    text = (tmp_path / "manifest.json").read_bytes()
    assert Manifest.from_text(text, "manifest.json") == manifest
    assert manifest.to_text().encode() == text


def test_no_own_metrics_but_a_reason(example, tmp_path):
    manifest = example(output_width=None).write(tmp_path)
    manifest = replace(manifest, own_metrics=None, no_metrics_because="the data has no labels")
    write_manifest(tmp_path, manifest)
    text = (tmp_path / "manifest.json").read_bytes()
    assert Manifest.from_text(text, "manifest.json").no_metrics_because == "the data has no labels"


def test_a_manifest_that_could_not_be_read_is_not_written(example, tmp_path):
    manifest = example().write(tmp_path)
    before = (tmp_path / "manifest.json").read_bytes()
    for wrong in (
        replace(manifest, shards=manifest.shards * 2),
        replace(manifest, plan_hash="not a hash"),
        replace(manifest, checkpoint="folder/model.pt"),
    ):
        with pytest.raises(CacheError):
            write_manifest(tmp_path, wrong)
    assert (tmp_path / "manifest.json").read_bytes() == before


def test_the_example_of_the_document(example, tmp_path, monkeypatch):
    made = example([2, 3, 1, 4, 2, 2, 5, 3, 1])
    made.write(tmp_path / "proteins.cache")
    monkeypatch.chdir(tmp_path)
    lines = DOCUMENT.read_text().splitlines()
    code = [line for line in lines if line.startswith("    ") or not line]
    names: dict[str, object] = {}
    exec(textwrap.dedent("\n".join(code)), names)
    assert torch.equal(torch.from_numpy(names["history"]), torch.stack(made.histories[7], dim=1))
