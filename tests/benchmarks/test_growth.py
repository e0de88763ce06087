"""Growth of time and memory: what is measured is right, and memory grows as it should."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
import torch

from histograph_benchmarks.growth import (
    HEAD_SIZES,
    Curve,
    Point,
    attention_step,
    doubling_table,
    doublings,
    head_step,
    main,
    measure,
    peak_bytes,
    size_table,
)
from histograph_post.heads.histograph.node_attention import NodeAttention
from histograph_post.heads.ragged import Graphs

MEGABYTE = 1 << 20


def hold(*megabytes: int) -> list[torch.Tensor]:
    return [torch.empty(count * MEGABYTE, dtype=torch.uint8) for count in megabytes]


# --- what is measured -----------------------------------------------------------------------------


def test_peak_is_what_is_held_at_one_time() -> None:
    before = hold(7)

    def step() -> None:
        hold(3, 2)  # and let go of
        before[0] = hold(4)[0]  # while the old one is still there
        hold(1)

    assert peak_bytes(step) == 5 * MEGABYTE
    assert peak_bytes(lambda: None) == 0


def test_scratch_memory_inside_an_operation_counts() -> None:
    values = torch.randn(1024, 1024)
    # One number comes out of both; to find the median, a copy is sorted that nobody else sees.
    assert peak_bytes(values.mean) < MEGABYTE
    assert peak_bytes(values.median) >= 4 * MEGABYTE


@pytest.mark.long
def test_a_long_step_runs_once_and_a_short_one_often() -> None:
    runs = []
    assert measure(lambda: runs.append(1), 8, seconds=0.0).runs == len(runs) == 1
    point = measure(lambda: runs.append(1), 8, seconds=0.01)
    assert point.size == 8
    assert 1 < point.runs < len(runs)
    assert point.seconds > 0


def test_sizes_double_up_to_the_last() -> None:
    assert doublings(1000, 200_000)[-3:] == [64_000, 128_000, 200_000]
    assert doublings(8, 64) == [8, 16, 32, 64]


# --- memory grows as it should --------------------------------------------------------------------


def attention_with(num_nodes: int, **options: Any) -> Any:
    attention = NodeAttention(64, 4, **options)
    nodes = torch.randn(num_nodes, 64, requires_grad=True)
    graphs = Graphs.from_batch(None, num_nodes, None, nodes.device)
    return lambda: attention(nodes, graphs).sum().backward()


LARGE_GRAPHS = {
    "attention, forward": lambda nodes: attention_step(nodes, backward=False),
    "attention, backward": lambda nodes: attention_step(nodes, backward=True),
    "attention, zero token": lambda nodes: attention_with(nodes, zero_token=True),
    "attention, key dropout": lambda nodes: attention_with(nodes, key_dropout=0.2),
    "head": lambda nodes: head_step(nodes=nodes, layers=6, width=64, graphs=1),
}


@pytest.mark.parametrize("name", LARGE_GRAPHS)
def test_memory_of_exact_attention_is_linear_in_nodes(name: str) -> None:
    small, large = (peak_bytes(LARGE_GRAPHS[name](nodes)) for nodes in (1500, 6000))
    assert 0 < large < 5 * small  # there are 16 times as many pairs of nodes


def test_memory_of_a_head_step_hardly_grows_with_layers() -> None:
    shallow, deep = (
        peak_bytes(head_step(nodes=192, layers=layers, width=64, graphs=64)) for layers in (16, 128)
    )
    history = 192 * 64 * (128 - 16) * 64 * 4  # bytes that the history has grown by
    # What may grow is rows of statistics per graph and layer, and the gradient of their map.
    assert deep - shallow < history / 8


# --- what is written ------------------------------------------------------------------------------


def make_curve(name: str, sizes: list[int], power: float) -> Curve:
    return Curve(name, [Point(n, 1e-6 * n**power, 100 * n, runs=3) for n in sizes])


def test_exponents_are_those_of_the_large_end() -> None:
    curve = make_curve("N", [4, 8, 16, 32], 2.0)
    assert curve.exponent("seconds") == pytest.approx(2.0)
    assert curve.exponent("peak_bytes") == pytest.approx(1.0)
    flat_first = Curve("N", [Point(1, 1.0, 1, runs=1), Point(2, 1.0, 1, runs=1), *curve.points[1:]])
    assert flat_first.exponent("seconds") == pytest.approx(2.0)
    assert make_curve("N", [4], 2.0).exponent("seconds") is None


def test_tables() -> None:
    quadratic, short = make_curve("forward", [1000, 2000], 2), make_curve("both", [1000], 2)
    assert size_table([quadratic, short], "node").splitlines()[2:] == [
        "| 1,000 | 1 | 0.1 | 100 | 1 | 0.1 | 100 |",
        "| 2,000 | 4 | 0.2 | 100 | – | – | – |",  # noqa: RUF001
        "| grows as | size^2.00 | size^1.00 |  | – | – |  |",  # noqa: RUF001
    ]
    assert doubling_table([quadratic, short]).splitlines()[2:] == [
        "| forward: 1,000 to 2,000 | ms | 1,000 | 4,000 | size^2.00 |",
        "|  | MB | 0.1 | 0.2 | size^1.00 |",
        "| both: 1,000 to 1,000 | ms | 1,000 |  | – |",  # noqa: RUF001
        "|  | MB | 0.1 |  | – |",  # noqa: RUF001
    ]


def test_command_writes_numbers_tables_and_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "growth"
    main(["--out", str(out), "--seconds", "0", "--largest", "600", "--limit", "0"])
    found = json.loads((out / "growth.json").read_text())["curves"]
    sizes = [[point["size"] for point in curve["points"]] for curve in found["head step"]]
    assert sizes == list(HEAD_SIZES.values())
    forward, both = (
        [point["size"] for point in curve["points"]] for curve in found["node attention"]
    )
    assert (forward, both) == ([300, 600], [300])  # backward would pass the limit
    table = (out / "growth.md").read_text()
    assert all(curve["name"] in table for curves in found.values() for curve in curves)
    words = {text.text for text in ET.parse(out / "growth.svg").iter() if text.tag.endswith("text")}
    assert {"head step, seconds", "node attention, MB", "linear", "quadratic"} <= words
    assert "node attention, forward: 600, " in capsys.readouterr().err


def test_a_missing_library_is_told_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit, match="1"):
        main(["--out", str(tmp_path / "growth")])
    assert "histograph-post[report]" in capsys.readouterr().err
    assert not (tmp_path / "growth").exists()
