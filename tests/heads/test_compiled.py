"""Compiled loops: the algorithm for any shape, on any threads, wherever the rows lie."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.func import functional_call, vmap

pytest.importorskip("numba")

from histograph_post.errors import DataError
from histograph_post.heads import compiled, graph_stage
from histograph_post.heads.compiled import loops
from histograph_post.heads.compiled.exponential import exponential
from histograph_post.heads.folded_maps import as_maps
from histograph_post.heads.histograph import HistoGraphHead
from histograph_post.heads.history import TableRows
from histograph_post.heads.registry import PAPER_FORM

SIZES = (5, 1, 0, 17, 40, 3)


def uses_loops(output: Tensor) -> bool:
    """Say whether an output was made by the compiled loops."""
    waiting, seen = [output.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        if node.name() == "_ReadGraphsBackward":
            return True
        seen.add(node)
        waiting += [parent for parent, _ in node.next_functions]
    return False


def make_head(depth: int = 4, width: int = 6, **options: Any) -> HistoGraphHead:
    """Make a head with every parameter drawn: a bias of zero would hide a missing one."""
    torch.manual_seed(0)
    head = HistoGraphHead([width] * depth, 3, **{"dim": 8, "heads": 2, **options})
    with torch.no_grad():
        for parameter in head.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return head


def make_history(sizes: tuple[int, ...] = SIZES, depth: int = 4, width: int = 6) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(sum(sizes), depth, width, generator=generator)


def batch_of(sizes: tuple[int, ...]) -> Tensor:
    return torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))


def results(
    head: HistoGraphHead,
    history: Tensor | TableRows,
    sizes: tuple[int, ...] = SIZES,
    *,
    loops: bool = True,
) -> dict[str, Tensor]:
    """Return outputs and gradients."""
    output = head(history, batch_of(sizes), num_graphs=len(sizes))
    assert uses_loops(output) == loops
    probe = torch.randn(output.shape, generator=torch.Generator().manual_seed(5))
    names, leaves = zip(*head.named_parameters(), strict=True)
    gradients = torch.autograd.grad((output * probe).sum(), leaves, allow_unused=True)
    found = zip(names, leaves, gradients, strict=True)
    return {
        "output": output,
        **{name: leaf * 0 if grad is None else grad for name, leaf, grad in found},
    }


@st.composite
def shapes(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int, dict[str, Any]]:
    sizes = draw(st.lists(st.sampled_from([0, 1, 2, 3, 7, 16, 33, 70]), min_size=1, max_size=6))
    layer_heads, heads = draw(st.sampled_from([(1, 1), (1, 3), (2, 1), (3, 2), (4, 4), (6, 3)]))
    depth = draw(st.sampled_from([1, 2, 3, 5, 8, 17]))
    options = {
        "dim": 12,
        "layer_heads": layer_heads,
        "heads": heads,
        "normalization": draw(st.sampled_from(["bounded", "softmax", "none"])),
        "mix": draw(st.sampled_from(["last", "all"])),
        "residual": draw(st.booleans()),
        "output_norm": draw(st.booleans()),
        "history_layers": draw(st.none() | st.integers(1, depth)),
    }
    return tuple(sizes) if any(sizes) else (*sizes, 4), depth, draw(st.integers(1, 19)), options


@settings(max_examples=60, deadline=None)
@given(shape=shapes(), small_work=st.sampled_from([0, 2000, 10**7]))
def test_values_and_gradients_are_the_algorithms(
    literal_histograph: Any, shape: Any, small_work: int
) -> None:
    sizes, depth, width, options = shape
    head, exact = make_head(depth, width, **options), make_head(depth, width, **options).double()
    history = make_history(sizes, depth, width)
    present = [graph for graph, size in enumerate(sizes) if size]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loops, "SMALL_WORK", small_work)
        found = results(head, history, sizes)
    expected = literal_histograph(
        exact, history.double().unbind(1), [sizes[graph] for graph in present]
    )
    torch.testing.assert_close(found["output"][present].double(), expected, rtol=2e-4, atol=2e-4)
    # Empty graphs have a gradient of their own through the last maps, which is not the loops'.
    probe = torch.randn(found["output"].shape, generator=torch.Generator().manual_seed(5))
    inner = [name for name, _ in exact.named_parameters() if "layer_weights" in name]
    inner += [name for name, _ in exact.named_parameters() if "in_projection" in name]
    parameters = dict(exact.named_parameters())
    wanted = torch.autograd.grad(
        (expected * probe[present].double()).sum(),
        [parameters[name] for name in inner],
        allow_unused=True,
    )
    for name, gradient in zip(inner, wanted, strict=True):
        if gradient is not None:
            scale = max(1.0, float(gradient.abs().max()))
            torch.testing.assert_close(
                found[name].double(), gradient, rtol=2e-4, atol=2e-4 * scale, msg=name
            )


@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(PAPER_FORM),
        dict(PAPER_FORM) | {"eps": 50.0},
        {"normalization": "softmax"},
        {"normalization": "none", "mix": "last"},
    ],
)
def test_the_other_path_has_the_same_results(options: dict[str, Any]) -> None:
    head, history = make_head(**options), make_history()
    found = results(head, history)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "enabled", False)
        other = results(head, history, loops=False)
    for name, value in other.items():
        scale = max(1.0, float(value.detach().abs().max()))
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-4 * scale, msg=name)


@pytest.mark.parametrize("depth", [4, 3])
def test_rows_of_a_table_are_read_where_they_lie(depth: int) -> None:
    head = make_head(history_layers=depth)
    table = make_history((50, 60))
    starts = np.array([70, 3, 9, 50, 10, 0])
    rows = TableRows(table, starts, np.array(SIZES))
    places = [range(start, start + size) for start, size in zip(starts, SIZES, strict=True)]
    own = table[[place for places_of in places for place in places_of]]
    found, expected = results(head, rows), results(head, own)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "enabled", False)
        other = head(rows, batch_of(SIZES), num_graphs=len(SIZES))
    torch.testing.assert_close(other, expected["output"], rtol=1e-4, atol=1e-4)


def read(history: Tensor, starts: list[int], sizes: list[int]) -> tuple[list[Tensor], list[Tensor]]:
    """Return what the loops alone make of some graphs, and the gradients of their weights."""
    head = make_head()
    projection = head.node_attention.in_projection
    attention = (projection.weight, projection.bias)
    weights = [
        value.detach().requires_grad_() for value in (*head.layer_weights.folded(), *attention)
    ]
    found = graph_stage.read_graphs(
        TableRows(history, np.array(starts), np.array(sizes)),
        as_maps(weights),
        graph_stage.StageOptions("bounded", 2.0, node_heads=2, with_means=True),
    )
    total = found.contexts.sin().sum() + found.means.cos().sum()
    return list(found), list(torch.autograd.grad(total, weights))


def test_any_number_of_threads_gives_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops, "SMALL_WORK", 0)
    history, sizes = make_history((200,)), [7, 1, 30, 12, 4, 90, 2, 11]
    threads = torch.get_num_threads()
    try:
        found = []
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            values, gradients = read(history, [0, 50, 20, 9, 100, 110, 3, 60], sizes)
            found.append([*values, *gradients])
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        assert all(map(torch.equal, other, found[0]))


def test_a_graph_is_the_same_to_the_bit_with_any_batch_mates() -> None:
    history = make_history()
    together, _ = read(history, [0, 6, 23], [5, 17, 40])
    alone, _ = read(history, [6], [17])
    for all_of_them, one in zip(together, alone, strict=True):
        assert torch.equal(all_of_them[1], one[0])


def test_nothing_passes_from_a_broken_graph_to_another() -> None:
    history, head = make_history(), make_head()
    sound = results(head, history)["output"].detach()
    history[8, 1, 2] = math.nan  # of the graph of 17 nodes
    history[40, 0, 0] = math.inf  # of the graph of 40 nodes
    broken = results(head, history)["output"].detach()
    assert broken[3].isnan().all()
    assert broken[4].isnan().all()
    others = [0, 1, 2, 5]
    torch.testing.assert_close(broken[others], sound[others], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("normalization", ["bounded", "signed", "softmax"])
def test_huge_activations_have_finite_results(normalization: str) -> None:
    found = results(make_head(normalization=normalization), 1e12 * make_history())
    assert all(bool(value.isfinite().all()) for value in found.values())


@pytest.mark.parametrize("count", [3, loops.MANY_COPIES + 1])
def test_copies_run_as_one_are_what_they_are_alone(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loops, "SMALL_WORK", 0)  # several parts
    heads = [make_head() for _ in range(count)]
    with torch.no_grad():
        for seed, head in enumerate(heads):
            for parameter in head.parameters():
                parameter += 0.1 * torch.randn(
                    parameter.shape, generator=torch.Generator().manual_seed(seed)
                )
    history = make_history()
    alone = [results(head, history) for head in heads]
    own = [dict(head.named_parameters()) for head in heads]
    stacked = {key: torch.stack([p[key].detach() for p in own]).requires_grad_() for key in own[0]}
    arguments = (history, batch_of(SIZES))
    as_one = vmap(lambda p: functional_call(heads[0], p, arguments, {"num_graphs": len(SIZES)}))(
        stacked
    )
    assert uses_loops(as_one)
    probe = torch.randn(as_one.shape[1:], generator=torch.Generator().manual_seed(5))
    (as_one * probe).sum().backward()
    for copy, expected in enumerate(alone):
        torch.testing.assert_close(as_one[copy], expected["output"], rtol=1e-5, atol=1e-5)
        for name, parameter in stacked.items():
            assert parameter.grad is not None
            torch.testing.assert_close(
                parameter.grad[copy], expected[name], rtol=1e-4, atol=1e-4, msg=name
            )


@pytest.mark.parametrize(
    "options",
    [
        {"level": "node"},
        {"layer_norm": True},
        {"zero_token": True},
        {"key_dropout": 0.5},
        {"dim": 512},
    ],
)
def test_other_heads_take_the_other_path(options: dict[str, Any]) -> None:
    assert not uses_loops(make_head(**options)(make_history(), batch_of(SIZES), num_graphs=6))


def test_a_history_that_requires_a_gradient_gets_one() -> None:
    history = make_history().requires_grad_()
    output = make_head()(history, batch_of(SIZES), num_graphs=len(SIZES))
    assert not uses_loops(output)
    output.sum().backward()
    assert history.grad is not None


def test_exponential_is_exact_to_single_precision() -> None:
    values = np.linspace(-87, 0, 20_001).astype(np.float32)
    found = np.array([exponential(value) for value in values], dtype=np.float64)
    exact = np.exp(values.astype(np.float64))
    assert np.abs(found / exact - 1).max() < 1e-6
    assert exponential(np.float32(0)) == 1
    assert exponential(np.float32(-math.inf)) < 2e-38
    assert math.isnan(exponential(np.float32(math.nan)))


@pytest.mark.parametrize(
    ("starts", "sizes", "found"),
    [
        ([0], [4, 6], "1"),
        ([0, 5], [4, 6], "0 to 11"),
        ([-1, 4], [4, 6], "-1 to 10"),
        ([0, 4], [4, -2], "-2"),
    ],
)
def test_rows_that_are_not_in_the_table_are_refused(
    starts: list[int], sizes: list[int], found: str
) -> None:
    with pytest.raises(DataError, match=f"found.*{found}"):
        TableRows(make_history((10,)), np.array(starts), np.array(sizes))


def test_rows_of_other_graphs_than_those_of_the_batch_are_refused() -> None:
    rows = TableRows(make_history((10,)), np.array([0, 4]), np.array([4, 6]))
    with pytest.raises(DataError, match=r"found graphs of \[3, 7\] nodes"):
        make_head()(rows, batch_of((3, 7)))


def test_a_history_that_is_changed_before_its_gradient_is_taken_is_noticed() -> None:
    history = make_history()
    output = make_head()(history, batch_of(SIZES), num_graphs=len(SIZES))
    history += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_copies_of_copies() -> None:
    head, history = make_head(), make_history()
    own = {name: value.detach() for name, value in head.named_parameters()}
    factors = torch.tensor([[1.0, 0.5], [2.0, 1.5], [0.1, 1.1]])

    def run(factor: Tensor) -> Tensor:
        scaled = {name: factor * value for name, value in own.items()}
        return functional_call(head, scaled, (history, batch_of(SIZES)), {"num_graphs": 6})

    found = vmap(vmap(run))(factors)  # [3, 2, num_graphs, out_dim]
    torch.testing.assert_close(found[1, 0], run(factors[1, 0]), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found[2, 1], run(factors[2, 1]), rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore")  # torch warns of its own tracing
def test_a_compiled_module_takes_the_other_path() -> None:
    head, history = make_head(), make_history((5, 7))
    compiled_head = torch.compile(head, backend="eager")
    batch = batch_of((5, 7))
    torch.testing.assert_close(
        compiled_head(history, batch, num_graphs=2), head(history, batch, num_graphs=2)
    )


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, True),
        (dict(PAPER_FORM), True),
        ({"dropout": 0.5}, True),
        ({"history_layers": 2}, True),
        ({"attention_dropout": 0.1}, False),
        ({"key_dropout": 0.1}, False),
        ({"zero_token": True}, False),
        ({"layer_norm": True}, False),
        ({"node_attention": False}, False),
        ({"layer_attention": "mean"}, False),
        ({"level": "node"}, False),
        ({"dim": 512}, False),
    ],
    ids=str,
)
def test_a_head_tells_whether_it_trains_in_loops(options: dict[str, Any], expected: bool) -> None:
    head = make_head(**options).train()
    assert uses_loops(head(make_history((5, 7)), batch_of((5, 7)))) == expected
    assert head.trains_in_loops == expected
    assert head.eval().trains_in_loops == expected


def test_a_history_of_several_widths_is_not_read_in_loops() -> None:
    # The raw input is left out, but the layers come one by one.
    head, sizes = HistoGraphHead([60, 6, 6], 3, dim=8, heads=2), (5, 7)
    history = [torch.randn(sum(sizes), width) for width in (60, 6, 6)]
    assert not uses_loops(head(history, batch_of(sizes)))
    assert not head.trains_in_loops


def test_autocasting_stops_at_the_head() -> None:
    head, history, batch = make_head(), make_history(), batch_of(SIZES)
    with torch.autocast("cpu", torch.bfloat16):
        output = head(history, batch, num_graphs=len(SIZES))
    assert uses_loops(output)
    assert torch.equal(output, head(history, batch, num_graphs=len(SIZES)))


def test_gradients_have_memory_of_their_own() -> None:
    head = make_head()
    head(make_history(), batch_of(SIZES), num_graphs=len(SIZES)).sum().backward()
    for name, parameter in head.named_parameters():
        assert parameter.grad is not None, name
        size = parameter.grad.untyped_storage().nbytes()
        assert size == parameter.numel() * parameter.element_size(), name


def test_where_rows_lie_cannot_be_changed_from_outside() -> None:
    starts, sizes = np.array([0, 3]), np.array([3, 2])
    rows = TableRows(torch.randn(5, 4, 6), starts, sizes)
    starts[1], sizes[1] = 10**6, 10**6
    assert rows.starts.tolist() == [0, 3]
    assert rows.sizes.tolist() == [3, 2]
