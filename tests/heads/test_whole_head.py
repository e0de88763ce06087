"""Heads that are trained whole: what the modules give, for any form, any graphs and any threads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("numba")

from histograph_post.head_batches import HeadInputs
from histograph_post.head_fits import HeadNetwork
from histograph_post.heads import compiled, graph_stage
from histograph_post.heads.compiled import loops
from histograph_post.heads.histograph import HistoGraphHead
from histograph_post.heads.history import TableRows
from histograph_post.heads.registry import PAPER_FORM
from histograph_post.heads.whole_head import WholeHead

SIZES = (5, 1, 17, 40, 3)
FORMS: dict[str, dict[str, Any]] = {
    "default": {},
    "paper": dict(PAPER_FORM),
    "softmax": {"normalization": "softmax"},
    "linear": {"mlp_layers": 0, "mixing": "fixed", "mixing_init": 0.3},
    "deep": {"mlp_layers": 3, "layer_heads": 2},
    "last layers": {"history_layers": 2},
    "mixed with the last": {"mix": "last", "layer_heads": 8},
    "not normed": {"output_norm": False, "residual": False},
}


def make_heads(copies: int, depth: int = 4, width: int = 6, **options: Any) -> list[HistoGraphHead]:
    """Make heads with every parameter drawn: a bias of zero would hide a missing one."""
    torch.manual_seed(0)
    settings = {"dim": 16, "heads": 2, **options}
    heads = [HistoGraphHead([width] * depth, 3, **settings) for _ in range(copies)]
    with torch.no_grad():
        for head in heads:
            for parameter in head.parameters():
                parameter += 0.2 * torch.randn_like(parameter)
    return heads


def vectors(heads: list[HistoGraphHead]) -> Tensor:
    """Return all weights of each head: ``[copies, numel]``."""
    own = [torch.cat([value.detach().flatten() for value in head.parameters()]) for head in heads]
    return torch.stack(own).requires_grad_()


def batch_of(sizes: tuple[int, ...]) -> Tensor:
    return torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def check(heads: list[HistoGraphHead], history: Tensor, sizes: tuple[int, ...]) -> None:
    """Compare outputs and gradients with those of the modules, in PyTorch and double precision."""
    batch, weights = batch_of(sizes), vectors(heads)
    outputs = WholeHead(heads[0])(weights, history, batch, num_graphs=len(sizes))
    assert outputs is not None
    grad = draw(*outputs.shape)
    outputs.backward(grad)
    assert weights.grad is not None
    for copy, head in enumerate(heads):
        exact = head.double()
        expected = exact(history.double(), batch, num_graphs=len(sizes), standardized=True)
        torch.testing.assert_close(outputs[copy].double(), expected, rtol=1e-4, atol=1e-4)
        expected.backward(grad[copy].double())
        start = 0
        for name, value in exact.named_parameters():
            found = weights.grad[copy, start : start + value.numel()].view(value.shape)
            start += value.numel()
            assert value.grad is not None
            # In units of the largest: what cancels out is not as exact as what does not.
            scale = float(value.grad.abs().max().clamp(min=1e-3))
            error = float((found - value.grad).abs().max()) / scale
            assert error < 2e-3, f"{name} of copy {copy}: {error}"
        assert start == weights.size(1)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("copies", [1, 3])
def test_outputs_and_gradients_are_those_of_the_modules(form: str, copies: int) -> None:
    check(make_heads(copies, **FORMS[form]), draw(sum(SIZES), 4, 6), SIZES)


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=12).map(tuple),
    depth=st.integers(1, 9),
    width=st.integers(1, 40),
    heads=st.sampled_from([1, 2, 4]),
    layer_heads=st.sampled_from([1, 2, 4]),
    out_of=st.integers(1, 5),
)
def test_any_shape_gives_what_the_modules_give(
    sizes: tuple[int, ...], depth: int, width: int, heads: int, layer_heads: int, out_of: int
) -> None:
    made = make_heads(2, depth, width, dim=4 * out_of, heads=heads, layer_heads=layer_heads)
    check(made, draw(sum(sizes), depth, width), sizes)


def test_rows_of_a_table_are_read_where_they_lie() -> None:
    heads, table, batch = make_heads(2), draw(200, 4, 6), batch_of((5, 3))
    whole, weights = WholeHead(heads[0]), vectors(heads)
    rows = TableRows(table, [150, 20], [5, 3])
    found = whole(weights, rows, batch, num_graphs=2)
    expected = whole(weights, rows.copy(), batch, num_graphs=2)
    assert found is not None
    assert torch.equal(found, expected)


def test_threads_do_not_change_a_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops, "SMALL_WORK", 0)
    heads, history, batch = make_heads(3), draw(sum(SIZES), 4, 6), batch_of(SIZES)
    whole, threads, seen = WholeHead(heads[0]), torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            weights = vectors(heads)
            outputs = whole(weights, history, batch, num_graphs=len(SIZES))
            assert outputs is not None
            outputs.square().sum().backward()
            seen.append((outputs.detach(), weights.grad))
    finally:
        torch.set_num_threads(threads)
    for outputs, gradient in seen[1:]:
        assert torch.equal(outputs, seen[0][0])
        assert torch.equal(gradient, seen[0][1])


def test_a_copy_does_not_depend_on_the_others() -> None:
    heads, history, batch = make_heads(3), draw(sum(SIZES), 4, 6), batch_of(SIZES)
    whole, weights = WholeHead(heads[0]), vectors(heads)
    together = whole(weights, history, batch, num_graphs=len(SIZES))
    assert together is not None
    for copy in range(3):
        alone = whole(weights[copy : copy + 1], history, batch, num_graphs=len(SIZES))
        torch.testing.assert_close(alone, together[copy : copy + 1])


@pytest.mark.parametrize("why", ["an empty graph", "a large graph", "half precision", "disabled"])
def test_what_loops_are_not_made_for_is_left_to_the_modules(
    why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads, history, batch = make_heads(2), draw(sum(SIZES), 4, 6), batch_of(SIZES)
    count = len(SIZES)
    if why == "an empty graph":
        count += 1
    elif why == "a large graph":
        monkeypatch.setattr(graph_stage, "LARGEST_GRAPH", 39)
    elif why == "half precision":
        history = history.half()
    else:
        monkeypatch.setattr(compiled, "enabled", False)
    assert WholeHead(heads[0])(vectors(heads), history, batch, num_graphs=count) is None


def test_a_history_that_changes_before_the_backward_pass_is_noticed() -> None:
    heads, history = make_heads(1), draw(sum(SIZES), 4, 6)
    outputs = WholeHead(heads[0])(vectors(heads), history, batch_of(SIZES), num_graphs=len(SIZES))
    assert outputs is not None
    history += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        outputs.sum().backward()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, True),
        (dict(PAPER_FORM), True),
        ({"dropout": 0.1}, False),
        ({"mixing": "delayed"}, False),
        ({"shortcut": True}, False),
        ({"layer_norm": True}, False),
        ({"layer_attention": "mean"}, False),
        ({"zero_token": True}, False),
    ],
)
def test_forms_that_are_not_written_out_are_run_as_modules(
    options: dict[str, Any], expected: bool
) -> None:
    (head,) = make_heads(1, **options)
    network = HeadNetwork(head)
    inputs = HeadInputs(draw(sum(SIZES), 4, 6), batch_of(SIZES), len(SIZES))
    assert network.runs_whole == expected
    assert (network.run_copies(vectors([head]), inputs) is not None) == expected
    assert not HeadNetwork(head.double()).runs_whole
