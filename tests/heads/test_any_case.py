"""The head is the algorithm: for any shape, options, bucket layout and stored precision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from histograph_post.heads.histograph import HistoGraphHead
from histograph_post.heads.histograph.layer_attention import NORMALIZATIONS

HALVES = (torch.float16, torch.bfloat16)

#: What may be done with half precision besides views of it: copies, and turning it into another.
MOVES = {"_to_copy", "copy_", "stack", "cat", "index_select", "new_zeros", "new_empty"}


@dataclass(frozen=True)
class Case:
    """A head, a batch, and how the work is cut into pieces."""

    sizes: tuple[int, ...]
    widths: tuple[int, ...]
    options: dict[str, Any]
    stacked: bool
    dtype: torch.dtype
    padding_budget: int
    large_graph: int
    seed: int

    @property
    def present(self) -> list[int]:
        """The graphs that have nodes."""
        return [graph for graph, size in enumerate(self.sizes) if size]

    def head(self, toy: Any) -> HistoGraphHead:
        """Make the head, with every parameter drawn: a bias of zero would hide a missing one."""
        out_dim = 1 if self.options["level"] == "link" else 3
        head = toy.head(self.widths, out_dim, seed=self.seed, **self.options)
        with torch.no_grad():
            for parameter in head.parameters():
                parameter += 0.1 * torch.randn_like(parameter)
        head.node_attention.padding_budget = self.padding_budget
        head.node_attention.large_graph = self.large_graph
        return head

    def history(self, toy: Any) -> list[Tensor]:
        """Make the history: one tensor, or one per layer."""
        layers = toy.history(self.widths, self.sizes, seed=self.seed)
        layers = [(layer / len(layers)).to(self.dtype) for layer in layers]
        return [torch.stack(layers, 1)] if self.stacked else layers

    def run(self, head: HistoGraphHead, history: list[Tensor], toy: Any) -> Tensor:
        """Give the history to the head."""
        inputs = history[0] if self.stacked else history
        output: Tensor = head(inputs, toy.batch(self.sizes), num_graphs=len(self.sizes))
        return output

    def run_literally(self, head: Any, history: list[Tensor], oracle: Any) -> Tensor:
        """Give the history to the oracle, graph by graph; an empty graph has a readout of zeros."""
        layers = history[0].unbind(1) if self.stacked else history
        layers = [layer.to(head.output.weight.dtype) for layer in layers]
        output = oracle(head, layers, [self.sizes[graph] for graph in self.present])
        if self.options["level"] != "graph":
            return output
        nothing = output.new_zeros(head.options.dim)
        of_nothing = head.output(
            head.mlp(head.output_norm(nothing) if head.output_norm else nothing)
        )
        rows = iter(output)
        return torch.stack([next(rows) if size else of_nothing for size in self.sizes])


@st.composite
def cases(draw: st.DrawFn, dtypes: tuple[torch.dtype, ...], **fixed: Any) -> Case:
    sizes = draw(st.lists(st.sampled_from([0, 1, 1, 2, 3, 5, 8, 13, 30]), min_size=1, max_size=7))
    depth = draw(st.sampled_from([1, 2, 3, 4, 6, 18]))
    widths = draw(st.lists(st.integers(1, 7), min_size=depth, max_size=depth))
    equal = draw(st.booleans())
    choose = lambda *values: draw(st.sampled_from(values))
    options = {
        "dim": choose(4, 8, 16),
        "heads": choose(1, 2, 4),
        "layer_heads": choose(1, 2, 4),
        "level": choose("graph", "graph", "node", "link"),
        "mix": choose("last", "all", "statistics"),
        "statistics": choose("mean+max+deviation+sum+size", "max", "size+deviation"),
        "normalization": choose(*NORMALIZATIONS),
        "layer_attention": choose("learned", "learned", "learned", "mean", "last", "random"),
        "history_layers": draw(st.none() | st.integers(1, depth)),
        "residual": draw(st.booleans()),
        "layer_norm": draw(st.booleans()),
        "output_norm": draw(st.booleans()),
        "zero_token": draw(st.booleans()),
    }
    return Case(
        sizes=tuple(sizes) if any(sizes) else (*sizes, 1),
        widths=tuple(widths[:1] * depth if equal else widths),
        options=options | fixed,
        stacked=equal and draw(st.booleans()),
        dtype=draw(st.sampled_from(dtypes)),
        padding_budget=choose(0, 7, 40, 300, 10**6),
        large_graph=choose(0, 1, 4, 12, 10**6),
        seed=draw(st.integers(0, 99)),
    )


def backward(output: Tensor, head: HistoGraphHead, history: list[Tensor]) -> dict[str, Tensor]:
    """Return the gradients of a weighted sum of the outputs; zero where there is no way to them."""
    probe = torch.randn(output.shape, generator=torch.Generator().manual_seed(5))
    leaves = dict(head.named_parameters())
    leaves |= {f"history {at}": part for at, part in enumerate(history) if part.requires_grad}
    gradients = torch.autograd.grad(
        (output * probe.to(output.dtype)).sum(), list(leaves.values()), allow_unused=True
    )
    return {
        name: torch.zeros_like(leaf) if gradient is None else gradient
        for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True)
    }


def assert_close(found: Tensor, expected: Tensor, tolerance: float, name: str) -> None:
    """Compare two tensors, with the error measured against the largest expected entry."""
    largest = max(1.0, expected.detach().abs().max().item()) if expected.numel() else 1.0
    torch.testing.assert_close(
        found.to(expected.dtype),
        expected,
        rtol=tolerance,
        atol=tolerance * largest,
        msg=lambda message: f"{name}: {message}",
    )


def compare(case: Case, toy: Any, oracle: Any, *, single: bool = False, tolerance: float) -> None:
    """Outputs and gradients of the head are those of the oracle, which computes in double."""
    literal, head = case.head(toy), case.head(toy)
    if single:
        literal.float().double()  # the values that the head has
        head.float()
    history = case.history(toy)
    for part in history:
        part.requires_grad_(part.dtype == torch.float64)
    expected = case.run_literally(literal, history, oracle)
    wanted = backward(expected, literal, history)

    output = case.run(head, history, toy)
    gradients = backward(output, head, history)
    with torch.no_grad():
        inferred = case.run(head, history, toy)
    assert_close(output, expected, tolerance, "output")
    assert_close(inferred, expected, tolerance, "output without gradients")
    for name, gradient in gradients.items():
        assert_close(gradient, wanted[name], tolerance, name)


@settings(max_examples=150)
@given(case=cases((torch.float64, torch.float64, *HALVES)))
def test_values_and_gradients_are_the_algorithms(
    toy: Any, literal_histograph: Any, case: Case
) -> None:
    compare(case, toy, literal_histograph, tolerance=1e-8)


@settings(max_examples=50)
@given(case=cases((torch.float32, *HALVES), normalization="bounded"))
def test_single_precision_is_close_whatever_is_stored(
    toy: Any, literal_histograph: Any, case: Case
) -> None:
    compare(case, toy, literal_histograph, single=True, tolerance=1e-4)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("layer_heads", [1, 2])
@pytest.mark.parametrize("level", ["graph", "node"])
@pytest.mark.parametrize("stacked", [True, False])
def test_half_precision_is_never_computed_in(
    toy: Any, dtype: torch.dtype, layer_heads: int, level: str, stacked: bool
) -> None:
    head = toy.head([6] * 4, layer_heads=layer_heads, mix="all", level=level).float()
    layers = [layer.to(dtype) for layer in toy.history([6] * 4, (5, 1, 9))]

    names = set()

    class Computed(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
            if any(tensor.dtype == dtype for tensor in tensors) and not func.is_view:
                names.add(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    with Computed():
        output = head(torch.stack(layers, 1) if stacked else layers, toy.batch((5, 1, 9)))
        output.sum().backward()
    assert "_to_copy" in names
    assert names <= MOVES
