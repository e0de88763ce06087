"""`histograph bench`: what it compares is the same, and what it prints is complete."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from histograph_benchmarks.generated import GRAPH_SETS, generate
from histograph_benchmarks.head_steps import (
    FORMS,
    FORWARDS,
    HEAD,
    largest_difference,
    make_head,
    results,
    rounding_errors,
)
from histograph_benchmarks.measuring import Ratio, race
from histograph_benchmarks.resources import time_device
from histograph_benchmarks.suite import MEASUREMENTS, run_suite
from histograph_benchmarks.workloads import CHECKPOINT, GraphRows, Sizes, Workloads
from histograph_post.models.public_networks import MoleculeGNN

from ..helpers import histograph
from ..rehearsal import rehearse

TINY = Sizes(
    rounds=1,
    steps=1,
    batch_size=8,
    num_graphs=30,
    padded_batches=2,
    deep=3,
    shallow=2,
    width=8,
    molecule_width=12,
    epochs=1,
    compared_epochs=1,
)


def test_a_device_is_timed_against_the_cpu() -> None:
    with rehearse():
        found = time_device(torch.device("cuda", 0), TINY)
    assert [timing.what.split()[0] for timing in found] == ["cache", "an"]
    assert all(timing.cpu > 0 and timing.device > 0 for timing in found)


def test_a_device_that_is_not_there_is_not_timed() -> None:
    result = histograph("bench", "--device", "cuda", "--quick")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: device: cuda was asked for")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("other", [name for name in FORWARDS if name != HEAD])
@pytest.mark.parametrize("num_nodes", [[1, 5, 2], [9], [1, 1]])
def test_the_literal_algorithm_is_the_head(form: str, other: str, num_nodes: list[int]) -> None:
    drawn = GraphRows.random(np.array(num_nodes), layers=5, width=6)
    rows = replace(drawn, history=drawn.history.double())
    head = make_head(rows, 8, FORMS[form]).double()
    found, expected = (results(head, partial(FORWARDS[way], head, rows)) for way in (other, HEAD))
    assert found.keys() == expected.keys()
    assert len(found) > 10  # the outputs, and gradients of many weights
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-8, atol=1e-10, msg=name)


@pytest.mark.long
def test_every_measurement_gives_ratios_of_what_it_timed() -> None:
    started = []
    ratios = list(
        run_suite(
            list(MEASUREMENTS), sizes=TINY, on_start=lambda name, done: started.append((name, done))
        )
    )
    assert started == [(name, done) for done, name in enumerate(MEASUREMENTS)]
    for ratio in ratios:
        ours, other = ratio.medians.values()
        faster = ratio.bound_kind == "at least"
        assert ratio.ratio == pytest.approx(other / ours if faster else ours / other)
        assert ratio.same_results
        assert ratio.note
    (half,) = [ratio for ratio in ratios if ratio.name == "float16 cache, bytes"]
    assert 0.5 <= half.ratio < 0.9  # of tiny shards, much is not activations


def test_a_bound_is_a_floor_or_a_ceiling() -> None:
    def ratio(value: float, kind: str, **more: bool) -> Ratio:
        return Ratio("a", "b", value, 2.0, kind, {}, **more)  # type: ignore[arg-type]

    assert ratio(2.0, "at least").holds
    assert not ratio(1.9, "at least").holds
    assert ratio(2.0, "at most").holds
    assert not ratio(2.1, "at most").holds
    assert not ratio(3.0, "at least", same_results=False).holds


def test_a_head_that_computes_something_else_is_noticed() -> None:
    rows = GraphRows.random(np.array([4, 7]), layers=5, width=6)
    head = make_head(rows, 8, FORMS["default form"])
    assert max(rounding_errors(head, rows).values()) < 1e-5
    found = results(head, partial(FORWARDS[HEAD], head, rows))
    other = {**found, "outputs": found["outputs"] + 0.01}
    assert largest_difference(other, found) > 1e-3
    assert largest_difference({"outputs": found["outputs"]}, found) == float("inf")


def test_contenders_take_turns() -> None:
    ran = []
    medians = race(
        {name: partial(ran.append, name) for name in "ab"},
        rounds=2,
        steps=2,
        warm_up=1,
        after=partial(ran.append, "-"),
    )
    assert "".join(ran) == "a-b-" + 2 * "aaa-bbb-"  # the first of each turn does not count
    assert medians.keys() == {"a", "b"}


@pytest.mark.parametrize("name", GRAPH_SETS)
def test_generated_graphs_have_the_sizes_of_the_set(name: str) -> None:
    like, dataset = GRAPH_SETS[name], generate(name, 500)
    assert len(dataset) == 500
    assert dataset.num_nodes.max() == like.largest
    assert dataset.num_nodes.mean() == pytest.approx(like.mean_nodes, rel=0.15)
    assert set(dataset.labels().ravel()) == {0, 1}


def test_json_and_table() -> None:
    words = ["bench", "--quick", "--rounds", "1", "--only", "reading"]
    result = histograph(*words, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["machine"]["threads"] == torch.get_num_threads()
    assert [ratio["bound"] for ratio in found["ratios"]] == [0.8, 0.8]
    for ratio in found["ratios"]:
        assert ratio["holds"] == (ratio["ratio"] >= 0.8)
        assert "generated in the sizes of PROTEINS" in ratio["note"]
    assert "[1/1] reading" in result.stderr
    shown = histograph(*words).stdout
    assert len(re.findall(r"at least 0.8x │ (?:yes|no )", shown)) == 2
    assert "next: histograph " in shown


def test_an_unknown_measurement_is_refused() -> None:
    result = histograph("bench", "--only", "reading,speed")
    assert result.exit_code == 1
    assert "only: found 'speed', expected some of head-step, " in result.stderr


def test_real_data_and_weights_are_used_and_left_alone(shared_data: Path, tmp_path: Path) -> None:
    before = sorted(path for path in shared_data.rglob("*"))
    sizes = Sizes(num_graphs=20)
    work = Workloads(tmp_path, sizes, shared_data)
    assert work.proteins.graphs[0].num_node_features == 3
    assert work.shallow_gin.about.startswith("GIN-5 x 64, NCI1: 20 graphs of ")
    model = work.molecule_gcn.model
    assert isinstance(model, MoleculeGNN)
    stored = torch.load(shared_data / CHECKPOINT, weights_only=True, map_location="cpu")
    assert torch.equal(model.gnns[4].linear.weight, stored["gnns.4.linear.weight"])
    assert sorted(path for path in shared_data.rglob("*")) == before
