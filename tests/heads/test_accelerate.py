"""The fast path is taken for heads it was written for, and for nothing else.

Every option and every normalisation is walked through both paths: outputs and gradients agree, or
the fast path is not taken. What is new (an option, a module, a subclass) takes the head's
own path until somebody has written the fast one.
"""

from __future__ import annotations

import copy
import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("numba")

from histograph_post.heads.histograph import HistoGraphHead, accelerate
from histograph_post.heads.histograph.config import HistoGraphConfig
from histograph_post.heads.histograph.layer_attention import NORMALIZATIONS
from histograph_post.heads.histograph.node_attention import EXACT_NODES
from histograph_post.heads.history import TableRows
from histograph_post.heads.registry import PAPER_FORM

SIZES = (5, 1, 17, 40, 3)
WIDTHS = (6, 6, 6, 6)

#: Values of every option other than the default, or that are not in the way of the fast path.
VALUES: dict[str, tuple[Any, ...]] = {
    "in_dims": ((6, 6, 5, 6), (20, 6, 6, 6)),
    "out_dim": (1, 5),
    "dim": (16, 512),
    "heads": (1, 8),
    "level": ("node", "link"),
    "standardize": (False,),
    "history_layers": (1, 2),
    "layer_attention": ("mean", "last", "random"),
    "normalization": tuple(NORMALIZATIONS),
    "eps": (0.5,),
    "radius": (0.1,),
    "layer_heads": (1, 8),
    "node_attention": ("exact", "landmark", "neighbors", "none"),
    "landmarks": (4,),
    "zero_token": (True,),
    "attention_dropout": (0.5,),
    "key_dropout": (0.5,),
    "residual": (False,),
    "layer_norm": (True,),
    "mix": ("last", "all"),
    "statistics": ("max", "size+mean"),
    "statistics_dropout": (0.5,),
    "probe": (0.0, 1.0),
    "solved": (True,),
    "mixing": ("fixed", "delayed"),
    "mixing_init": (0.1,),
    "mixing_delay": (0,),
    "output_norm": (False,),
    "mlp_layers": (0, 3),
    "dropout": (0.5,),
    "shortcut": (True,),
}


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def make_head(kind: type[HistoGraphHead] = HistoGraphHead, **options: Any) -> HistoGraphHead:
    """Make a head with every parameter drawn: a bias of zero would hide a missing one."""
    torch.manual_seed(0)
    sizes = {"in_dims": WIDTHS, "out_dim": 3, "dim": 8, "heads": 2}
    values: dict[str, Any] = {**sizes, "statistics_dropout": 0.0, **options}
    if values.get("level") == "link":
        values["out_dim"] = 1
    head = kind(**values)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    if head.statistics is not None:  # limits that some of the columns exceed
        width = head.statistics.width
        head.statistics.limits.bounds = torch.tensor([[-0.3], [0.3]]).repeat(1, width)
    return head


def inputs(head: HistoGraphHead) -> tuple[Any, Tensor]:
    """Return a history that fits, one tensor where it can be, and the graph of each node."""
    layers = [draw(sum(SIZES), width) for width in head.options.in_dims]
    uniform = len(set(head.options.in_dims)) == 1
    batch = torch.arange(len(SIZES)).repeat_interleave(torch.tensor(SIZES))
    return torch.stack(layers, 1) if uniform else layers, batch


def gradients(head: HistoGraphHead, output: Tensor) -> Tensor:
    """Return the gradients of a weighted sum of the outputs, one after the other: ``[numel]``."""
    leaves = [parameter for parameter in head.parameters() if parameter.requires_grad]
    found = torch.autograd.grad((output * draw(*output.shape)).sum(), leaves, allow_unused=True)
    zeros = [torch.zeros_like(leaf) for leaf in leaves]
    chosen = [zero if grad is None else grad for grad, zero in zip(found, zeros, strict=True)]
    return torch.cat([grad.flatten() for grad in chosen])


def by_the_head(head: HistoGraphHead) -> tuple[Tensor, Tensor]:
    """Return outputs and gradients of the head itself."""
    history, batch = inputs(head)
    torch.manual_seed(2)  # of what is dropped
    edges = torch.tensor([[0, 1, 7, 30], [1, 2, 8, 31]])
    output = head(history, batch, num_graphs=len(SIZES), edge_index=edges)
    return output, gradients(head, output)


def by_kernels(head: HistoGraphHead) -> tuple[Tensor, Tensor] | None:
    """Return the same by the fast path; None if it is not taken."""
    history, batch = inputs(head)
    torch.manual_seed(2)
    output = accelerate.fast_outputs(head, history, batch, len(SIZES))
    return None if output is None else (output, gradients(head, output))


def check_paths(head: HistoGraphHead) -> None:
    """Outputs and gradients of the fast path, where it is taken, are those of the head."""
    for training in (True, False):
        check_path(head.train(training))


def check_path(head: HistoGraphHead) -> None:
    output, grad = by_the_head(head)
    found = by_kernels(head)
    if found is not None:
        # In units of the largest: what cancels out is not as exact as what does not.
        close = {"rtol": 1e-4, "atol": 2e-4 * max(1.0, float(grad.abs().max()))}
        torch.testing.assert_close(found[0], output, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found[1], grad, **close)


def walked() -> Iterator[Any]:
    for name, values in VALUES.items():
        for value in values:
            yield pytest.param({name: value}, id=f"{name}={value}")


def test_every_option_is_walked() -> None:
    names = {field.name for field in fields(HistoGraphConfig)}
    lacking = "without it no head takes the fast path"
    assert names == set(accelerate.OPTIONS), f"accelerate.OPTIONS: {lacking}"
    assert names == set(VALUES)


@pytest.mark.parametrize("options", [{}, *walked()])
def test_outputs_and_gradients_are_the_same_on_both_paths(options: dict[str, Any]) -> None:
    check_paths(make_head(**options))


def test_the_default_head_and_the_papers_form_take_the_fast_path() -> None:
    assert by_kernels(make_head(**PAPER_FORM)) is not None
    for name in NORMALIZATIONS:
        assert by_kernels(make_head(normalization=name)) is not None


def test_a_new_normalisation_is_the_same_on_both_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(NORMALIZATIONS, "of-a-test", lambda scores, options: scores.tanh())
    head = make_head(normalization="of-a-test")
    check_paths(head)
    found, other = by_kernels(head), by_kernels(make_head(normalization="none"))
    assert found is not None
    assert other is not None
    assert not torch.equal(found[0], other[0])


def test_an_option_that_is_not_on_the_list_takes_the_heads_own_path(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = make_head().options
    for name in VALUES:
        monkeypatch.delitem(accelerate.OPTIONS, name)
        assert not accelerate._allows_options.__wrapped__(options)
        monkeypatch.undo()
    assert accelerate._allows_options(options)


class Doubled(HistoGraphHead):
    """A head of somebody else's."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return twice the output."""
        return 2 * super().forward(*args, **kwargs)


def test_a_subclass_takes_its_own_path() -> None:
    assert by_kernels(make_head(Doubled)) is None


@pytest.mark.parametrize("place", ["layer_weights", "node_attention", ""])
@pytest.mark.parametrize("module", [nn.Linear(8, 8), nn.Tanh()], ids=["weights", "no weights"])
def test_a_head_built_with_another_module_takes_its_own_path(
    place: str, module: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = HistoGraphHead.build

    def build_with_more(head: HistoGraphHead) -> None:
        build(head)
        head.get_submodule(place).add_module("more", module)

    monkeypatch.setattr(HistoGraphHead, "build", build_with_more)
    assert by_kernels(make_head()) is None


def test_a_replaced_module_counts_on_both_paths() -> None:
    head = make_head()
    head.mlp[1] = nn.Tanh()
    assert by_kernels(head) is not None
    check_paths(head)


@pytest.mark.parametrize("place", ["", "layer_weights", "node_attention.in_projection"])
def test_a_head_with_a_hook_takes_its_own_path(place: str) -> None:
    head = make_head()
    head.get_submodule(place).register_forward_hook(lambda module, args, output: None)
    assert by_kernels(head) is None


def test_other_inputs_take_the_heads_own_path() -> None:
    head = make_head()
    history, batch = inputs(head)
    assert accelerate.fast_outputs(head, history, batch, len(SIZES)) is not None
    assert accelerate.fast_outputs(head, history.half(), batch, len(SIZES)) is None
    assert (
        accelerate.fast_outputs(head, history.clone().requires_grad_(), batch, len(SIZES)) is None
    )
    assert accelerate.fast_outputs(head, list(history.unbind(1)), batch, len(SIZES)) is None
    assert accelerate.fast_outputs(head.double(), history, batch, len(SIZES)) is None
    many = torch.zeros(EXACT_NODES + 1, len(WIDTHS), WIDTHS[0])
    assert accelerate.fast_outputs(make_head(), many, None, None) is None


def test_empty_graphs_leave_the_others_on_the_fast_path() -> None:
    head = make_head()
    history, batch = inputs(head)
    batch = batch + (batch > 1).long()  # the third and the last have no nodes
    count = len(SIZES) + 2
    found = accelerate.fast_outputs(head, history, batch, count)
    expected = head(history, batch, num_graphs=count)
    assert found is not None
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    grad = gradients(head, expected)
    close = {"rtol": 1e-4, "atol": 2e-4 * max(1.0, float(grad.abs().max()))}
    torch.testing.assert_close(gradients(head, found), grad, **close)
    table = TableRows(torch.cat([history, history]), np.array([66, 23]), np.array([5, 40]))
    few = torch.tensor([0] * 5 + [1] * 40)
    taken = accelerate.fast_outputs(head, table, few, 2)
    assert taken is not None
    torch.testing.assert_close(taken, expected[[0, 4]], rtol=1e-4, atol=1e-4)


def test_rows_of_a_table_are_read_where_they_lie() -> None:
    head = make_head()
    history, batch = inputs(head)
    ends = np.cumsum(SIZES)
    chosen = np.array([3, 0])
    rows = TableRows(history, (ends - SIZES)[chosen], np.array(SIZES)[chosen])
    found = accelerate.fast_outputs(head, rows, torch.tensor([0] * SIZES[3] + [1] * SIZES[0]), 2)
    expected = head(history, batch, num_graphs=len(SIZES))[chosen]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_in_its_graph_and_is_not_hidden(value: float) -> None:
    head = make_head()
    history, batch = inputs(head)
    clean = accelerate.fast_outputs(head, history, batch, len(SIZES))
    history[SIZES[0] + SIZES[1] + 2, 1, 3] = value  # in the third graph
    found = accelerate.fast_outputs(head, history, batch, len(SIZES))
    assert clean is not None
    assert found is not None
    assert not found[2].isfinite().any()
    others = torch.tensor([0, 1, 3, 4])
    assert torch.equal(found[others], clean[others])


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_any_number_of_threads_gives_the_same_bits(
    num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accelerate, "PART_NODES", 8)
    head = make_head()
    expected = by_kernels(head)
    monkeypatch.setattr(accelerate, "_num_threads", num_threads)
    found = by_kernels(head)
    assert expected is not None
    assert found is not None
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


#: Graphs of one node, one that is cut into blocks of queries, one that is a part of its own.
MANY_SIZES = (1, 150, 2, 1, 64, 31, 7, 290, 12)


@pytest.mark.parametrize(
    "options",
    [
        {},
        PAPER_FORM,
        {"layer_heads": 1, "heads": 1, "mix": "last", "mlp_layers": 2, "out_dim": 1},
        {"layer_heads": 3, "heads": 6, "residual": False, "output_norm": False, "mlp_layers": 0},
        {"layer_heads": 6},
        {"history_layers": 1, "normalization": "none"},
        {"history_layers": 2, "normalization": "signed", "shortcut": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("layers", [1, 2, 9])
@pytest.mark.parametrize("width", [1, 5, 33])
def test_kernels_give_what_the_head_gives_in_double_precision(
    options: dict[str, Any], layers: int, width: int
) -> None:
    kept = options.get("history_layers")
    options = options if kept is None else {**options, "history_layers": min(kept, layers)}
    head = make_head(**{"in_dims": (width,) * layers, "dim": 12, "heads": 2, **options})
    exact = copy.deepcopy(head).double()
    history = draw(sum(MANY_SIZES), layers, width)
    batch = torch.arange(len(MANY_SIZES)).repeat_interleave(torch.tensor(MANY_SIZES))
    found = accelerate.fast_outputs(head, history, batch, None)
    expected = exact(history.double(), batch)
    assert found is not None
    close(found, expected, "outputs")
    probe = draw(*found.shape)
    (found * probe).sum().backward()
    (expected * probe.double()).sum().backward()
    for (name, value), other in zip(head.named_parameters(), exact.parameters(), strict=True):
        assert value.grad is not None
        assert other.grad is not None
        close(value.grad, other.grad, name)


def close(found: Tensor, expected: Tensor, name: str) -> None:
    """Compare with what is exact, in units of its largest value."""
    apart = (found.double() - expected).abs().max()
    assert apart <= 1e-4 * expected.abs().max().clamp(min=0.1), f"{name}: off by {apart}"


def outputs_of(head: HistoGraphHead, sizes: Sequence[int]) -> Tensor:
    """Return the outputs of graphs of these sizes, of which each has the same nodes anywhere."""
    history = torch.cat([draw(size, len(WIDTHS), WIDTHS[0]) for size in sizes])
    batch = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    found = accelerate.fast_outputs(head, history, batch, None)
    assert found is not None
    return found


def test_a_graph_has_the_same_output_in_any_batch() -> None:
    head = make_head()
    alone = torch.cat([outputs_of(head, [size]) for size in MANY_SIZES])
    torch.testing.assert_close(outputs_of(head, MANY_SIZES), alone, rtol=1e-4, atol=1e-5)
    backwards = outputs_of(head, MANY_SIZES[::-1]).flip(0)
    torch.testing.assert_close(backwards, alone, rtol=1e-4, atol=1e-5)


def test_heads_run_in_several_threads_at_once() -> None:
    head = make_head()
    expected = outputs_of(head, MANY_SIZES)
    with accelerate.threads(head), ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: outputs_of(head, MANY_SIZES), range(16)))
    assert all(torch.equal(output, expected) for output in found)


@pytest.mark.skipif(
    "fork" not in multiprocessing.get_all_start_methods(), reason="processes cannot be forked"
)
def test_a_head_runs_in_a_process_that_was_forked_from_one_with_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    head = make_head()
    monkeypatch.setattr(accelerate, "_num_threads", 2)
    with torch.no_grad():
        expected = outputs_of(head, MANY_SIZES)
        queue = multiprocessing.get_context("fork").SimpleQueue()
        process = multiprocessing.get_context("fork").Process(
            target=lambda: queue.put(outputs_of(head, MANY_SIZES).tolist())
        )
        process.start()
    assert queue.get() == expected.tolist()
    process.join()


def test_threads_are_given_back() -> None:
    head, before = make_head(), torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with accelerate.threads(head):
            assert torch.get_num_threads() == 1
            with accelerate.threads(head):
                assert torch.get_num_threads() == 1
                assert accelerate._num_threads == 3
            assert accelerate._num_threads == 3
        assert torch.get_num_threads() == 3
        assert accelerate._num_threads is None
        with accelerate.threads(make_head(Doubled)):
            assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
