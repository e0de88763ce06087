from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from histograph_post.errors import DataError
from histograph_post.heads.histograph import PAPER_FORM, HistoGraphHead
from histograph_post.heads.histograph.large_graphs import WholeGraph
from histograph_post.heads.histograph.layer_attention import NORMALIZATIONS
from histograph_post.heads.histograph.node_attention import NODE_ATTENTIONS
from histograph_post.heads.history import layer_statistics
from histograph_post.heads.ragged import Graphs

SIZES = (5, 1, 9, 3)


def shares_memory(tensor: Tensor, other: Tensor) -> bool:
    return tensor.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def gradients(head: HistoGraphHead) -> dict[str, Tensor]:
    return {name: p.grad for name, p in head.named_parameters() if p.grad is not None}


OPTIONS = [
    {},
    dict(PAPER_FORM),
    *({"normalization": name} for name in NORMALIZATIONS),
    {"layer_attention": "mean"},
    {"layer_attention": "last"},
    {"layer_attention": "random", "layer_heads": 2},
    {"layer_heads": 4},
    {"node_attention": "none"},
    {"node_attention": "neighbors", "zero_token": True},
    {"node_attention": "landmark", "landmarks": 4, "zero_token": True, "history_layers": 3},
    {"node_attention": "neighbors", "level": "node"},
    {"node_attention": "landmark", "landmarks": 2, "level": "node"},
    {"zero_token": True},
    {"residual": False},
    {"output_norm": False},
    {"layer_norm": True, "residual": False},
    {"layer_norm": True, "output_norm": False, "zero_token": True},
    {"mix": "all", "layer_heads": 4},
    {"mix": "statistics"},
    {"mix": "statistics", "statistics": "size+max", "history_layers": 2},
    {"mixing": "fixed", "mixing_init": 1.0},
    {"history_layers": 2, "mix": "all"},
    {"mlp_layers": 0},
    {"mlp_layers": 2, "shortcut": True},
    {"level": "node"},
    {"level": "node", "mix": "last", "residual": False, "zero_token": True, "shortcut": True},
    {"level": "link", "layer_heads": 2},
]


def named(options: dict[str, Any]) -> str:
    return ",".join(f"{name}={value}" for name, value in options.items()) or "default"


class TestAgainstThePaper:
    @pytest.mark.parametrize("options", OPTIONS, ids=named)
    @pytest.mark.parametrize("widths", [(6, 6, 6, 6), (3, 6, 6, 5)], ids=["equal", "mixed"])
    def test_values_and_gradients(
        self, toy: Any, literal_histograph: Any, widths: tuple[int, ...], options: dict[str, Any]
    ) -> None:
        head = toy.head(widths, 1 if options.get("level") == "link" else 3, **options)
        oracle = copy.deepcopy(head)
        history = [layer.requires_grad_() for layer in toy.history(widths, SIZES)]
        expected = literal_histograph(oracle, history, SIZES, toy.edges(SIZES))
        probe = torch.randn(expected.shape, dtype=torch.float64)
        (expected * probe).sum().backward()
        expected_history = [layer.grad for layer in history]

        history = [layer.detach().requires_grad_() for layer in history]
        output = head(history, toy.batch(SIZES), edge_index=toy.edges(SIZES))
        (output * probe).sum().backward()

        torch.testing.assert_close(output, expected, rtol=1e-9, atol=1e-10)
        torch.testing.assert_close(gradients(head), gradients(oracle), rtol=1e-8, atol=1e-9)
        for layer, wanted in zip(history, expected_history, strict=True):
            if wanted is not None:
                torch.testing.assert_close(layer.grad, wanted, rtol=1e-8, atol=1e-9)

    @pytest.mark.parametrize("options", [{}, {"layer_heads": 2, "mix": "all", "history_layers": 3}])
    def test_gradient_of_a_stacked_history(
        self, literal_histograph: Any, toy: Any, options: dict[str, Any]
    ) -> None:
        head = toy.head([6] * 4, **options)
        history = torch.stack(toy.history([6] * 4, SIZES), 1).requires_grad_()
        wanted = literal_histograph(head, history.unbind(1), SIZES).square().sum()
        (expected,) = torch.autograd.grad(wanted, history)
        (gradient,) = torch.autograd.grad(head(history, toy.batch(SIZES)).square().sum(), history)
        torch.testing.assert_close(gradient, expected)

    @settings(max_examples=40)
    @given(data=st.data())
    def test_any_shape(self, toy: Any, literal_histograph: Any, data: st.DataObject) -> None:
        sizes = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=6))
        depth = data.draw(st.integers(1, 6))
        widths = data.draw(st.lists(st.integers(1, 5), min_size=depth, max_size=depth))
        if data.draw(st.booleans()):
            widths = widths[:1] * depth
        heads = data.draw(st.sampled_from([1, 2, 3]))
        head = toy.head(
            widths,
            1,
            dim=6 * data.draw(st.integers(1, 2)),
            heads=heads,
            layer_heads=data.draw(st.sampled_from([1, 2, 3])),
            level=data.draw(st.sampled_from(["graph", "node", "link"])),
            mix=data.draw(st.sampled_from(["last", "all"])),
            seed=data.draw(st.integers(0, 99)),
        )
        history = toy.history(widths, sizes, seed=data.draw(st.integers(0, 99)))
        stack = len(set(widths)) == 1 and data.draw(st.booleans())
        if head.node_attention is not None:
            head.node_attention.padding_budget = data.draw(st.sampled_from([0, 30, 10**6]))
            head.node_attention.large_graph = data.draw(st.sampled_from([0, 4, 10**6]))
        output = head(torch.stack(history, 1) if stack else history, toy.batch(sizes))
        torch.testing.assert_close(output, literal_histograph(head, history, sizes))

    def test_gradcheck(self, toy: Any) -> None:
        widths, sizes = (3, 2, 2), (2, 3)
        head = toy.head(widths, 2, dim=4, layer_heads=2, mix="all", zero_token=True)
        names, values = zip(*head.named_parameters(), strict=True)

        def run(*tensors: Tensor) -> Tensor:
            state = dict(zip(names, tensors[3:], strict=True))
            arguments = (list(tensors[:3]), toy.batch(sizes))
            return torch.func.functional_call(head, state, arguments)

        history = [layer.requires_grad_() for layer in toy.history(widths, sizes)]
        parameters = [value.detach().clone().requires_grad_() for value in values]
        assert torch.autograd.gradcheck(run, (*history, *parameters), fast_mode=True)


class TestSymmetries:
    @pytest.mark.parametrize("level", ["graph", "node"])
    @pytest.mark.parametrize("kind", NODE_ATTENTIONS)
    def test_order_of_nodes_does_not_matter(self, toy: Any, level: str, kind: str) -> None:
        head = toy.head([6] * 3, level=level, node_attention=kind)
        history, edges = torch.stack(toy.history([6] * 3, [9]), 1), toy.edges([9])
        order = torch.randperm(9, generator=torch.Generator().manual_seed(1))
        expected = head(history, edge_index=edges)
        expected = expected if level == "graph" else expected[order]
        found = head(history[order], edge_index=order.argsort()[edges])
        torch.testing.assert_close(found, expected)

    @pytest.mark.parametrize(
        "options",
        [
            {"layer_norm": True},
            {"mix": "all"},
            *({"node_attention": kind} for kind in NODE_ATTENTIONS),
        ],
    )
    def test_a_graph_never_sees_its_batch_mates(self, toy: Any, options: dict[str, Any]) -> None:
        head = toy.head([6] * 4, **options)
        history, edges = toy.history([6] * 4, SIZES), toy.edges(SIZES)
        together = head(history, toy.batch(SIZES), edge_index=edges)
        alone, first = [], 0
        for graph, size in enumerate(SIZES):
            own = edges[:, (edges[0] >= first) & (edges[0] < first + size)] - first
            layers = [layer.split(SIZES)[graph] for layer in history]
            alone.append(head(layers, edge_index=own))
            first += size
        torch.testing.assert_close(together, torch.cat(alone), rtol=1e-12, atol=1e-12)

    @pytest.mark.parametrize("level", ["graph", "node"])
    def test_large_graphs_have_landmarks_and_the_others_of_a_batch_do_not(
        self, toy: Any, literal_histograph: Any, level: str
    ) -> None:
        head = toy.head([6] * 4, level=level, landmarks=4)
        head.landmarks.larger_than = 4
        history = toy.history([6] * 4, SIZES)
        found = head(history, toy.batch(SIZES))
        torch.testing.assert_close(found, literal_histograph(head, history, SIZES))
        exact = toy.head([6] * 4, level=level)(history, toy.batch(SIZES))
        same = torch.tensor([size <= 4 for size in SIZES])
        same = same if level == "graph" else same[toy.batch(SIZES)]
        torch.testing.assert_close(found[same], exact[same])
        assert not torch.isclose(found[~same], exact[~same]).any()

    def test_a_broken_batch_mate_breaks_nobody_else(self, toy: Any) -> None:
        head = toy.head([6] * 4)
        history = torch.stack(toy.history([6] * 4, SIZES), 1)
        expected = head(history, toy.batch(SIZES))
        history[SIZES[0]] = float("nan")  # the graph of one node
        output = head(history, toy.batch(SIZES))
        assert output[1].isnan().all()
        kept = [0, 2, 3]
        torch.testing.assert_close(output[kept], expected[kept], rtol=1e-12, atol=1e-12)

    def test_link_scores_ignore_direction(self, toy: Any) -> None:
        head = toy.head([6] * 3, 1, level="link")
        embeddings = head(toy.history([6] * 3, [7]))
        pairs = torch.tensor([[0, 2, 3, 4], [1, 2, 6, 5]])
        scores = head.score(embeddings, pairs)
        assert scores.shape == (4,)
        torch.testing.assert_close(scores, head.score(embeddings, pairs.flip(0)))
        assert scores.unique().numel() == 4


class TestSomeNodes:
    """A head that is given some nodes of a graph, and what there is to know of all of them."""

    NODES = 40

    @pytest.mark.parametrize("kind", ["landmark", "auto", "neighbors", "none"])
    @pytest.mark.parametrize("layer_attention", ["learned", "mean"])
    @pytest.mark.parametrize("widths", [(6, 6, 6, 6), (3, 6, 6, 5)], ids=["equal", "mixed"])
    def test_outputs_and_gradients_are_those_of_the_whole_graph(
        self, toy: Any, widths: tuple[int, ...], layer_attention: str, kind: str
    ) -> None:
        options = {"level": "node", "mix": "all", "layer_heads": 2, "history_layers": 3}
        head = toy.head(
            widths,
            node_attention=kind,
            layer_attention=layer_attention,
            landmarks=8,
            **options,
        ).float()
        if kind == "auto":
            head.landmarks.larger_than = 30
        layers = [layer.float() for layer in toy.history(widths, [self.NODES])]
        edges, asked = toy.edges([self.NODES]), torch.tensor([3, 8, 31, 12])
        expected = head(layers, edge_index=edges)[asked]
        probe = torch.randn(expected.shape)
        (expected * probe).sum().backward()
        wanted = {name: grad.clone() for name, grad in gradients(head).items()}
        head.zero_grad()

        pieces = [[layer[:7] for layer in layers], [layer[7:] for layer in layers]]
        whole = WholeGraph.of(lambda: pieces, head.kept_dims, head.landmarks)
        given, own = asked, edges[:, :0]
        if kind == "neighbors":
            own = edges[:, torch.isin(edges[1], asked)]
            given = torch.cat([asked, own[0]]).unique()
            own = torch.searchsorted(given, own)
        rows = [layer[given] for layer in layers]
        found = head(rows, edge_index=own, whole=whole)[torch.isin(given, asked)]
        order = torch.arange(4) if kind != "neighbors" else asked.argsort().argsort()
        (found[order] * probe).sum().backward()
        torch.testing.assert_close(found[order], expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(gradients(head), wanted, rtol=1e-3, atol=1e-4)


class TestSmallCases:
    @pytest.mark.parametrize(
        "options", [{}, {"mix": "all"}, {"residual": True, "layer_norm": True}]
    )
    def test_empty_graphs_between_others(self, toy: Any, options: dict[str, Any]) -> None:
        head = toy.head([6] * 3, **options)
        history = toy.history([6] * 3, SIZES)
        sizes = (0, 5, 1, 0, 9, 3, 0)
        output = head(history, toy.batch(sizes), num_graphs=7)
        torch.testing.assert_close(output[[1, 2, 4, 5]], head(history, toy.batch(SIZES)))
        of_nothing = head.output(head.mlp(torch.zeros(8, dtype=torch.float64)))
        torch.testing.assert_close(output[[0, 3, 6]], of_nothing.expand(3, -1))

    @pytest.mark.parametrize("level", ["graph", "node", "link"])
    def test_no_nodes_at_all(self, toy: Any, level: str) -> None:
        head = toy.head([6] * 3, 1, level=level)
        output = head(torch.zeros(0, 3, 6), torch.zeros(0, dtype=torch.long), num_graphs=2)
        assert output.shape == {"graph": (2, 1), "node": (0, 1), "link": (0, 8)}[level]
        output.sum().backward()

    def test_one_layer_has_weight_one(self, toy: Any) -> None:
        head = toy.head([6])
        weights = head.explain(toy.history([6], SIZES), toy.batch(SIZES)).layer_weights
        torch.testing.assert_close(weights, torch.ones(4, 1, dtype=torch.float64))


class TestInputs:
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    @pytest.mark.parametrize("options", [{}, {"mix": "all"}, {"level": "node", "mix": "all"}])
    def test_half_precision_history_is_computed_in_single(
        self, toy: Any, dtype: torch.dtype, options: dict[str, Any]
    ) -> None:
        head = toy.head([6] * 4, **options).float()
        history = torch.stack(toy.history([6] * 4, SIZES), 1).to(dtype)
        output = head(history, toy.batch(SIZES))
        assert output.dtype == torch.float32
        torch.testing.assert_close(output, head(history.float(), toy.batch(SIZES)))

    @pytest.mark.parametrize("level", ["graph", "node", "link"])
    @pytest.mark.parametrize("widths", [[6] * 4, [6, 4, 6]])
    def test_autocasting_stops_at_the_head(self, toy: Any, level: str, widths: list[int]) -> None:
        head = toy.head(widths, 1, level=level, mix="all", layer_heads=2).float()
        history, batch = [layer.float() for layer in toy.history(widths, SIZES)], toy.batch(SIZES)
        pairs = torch.tensor([[0, 3], [2, 1]])
        expected = head(history, batch)
        expected.sum().backward()
        own = {name: grad.clone() for name, grad in gradients(head).items()}
        head.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            output = head(history, batch)
            rounded = head([layer.bfloat16() for layer in history], batch)
            explained = head.explain(history, batch)
            scores = head.score(output.bfloat16(), pairs) if level == "link" else None
            assert torch.is_autocast_enabled("cpu")
        output.sum().backward()
        assert torch.equal(output, expected)
        assert all(torch.equal(grad, own[name]) for name, grad in gradients(head).items())
        assert torch.equal(rounded, head([layer.bfloat16().float() for layer in history], batch))
        assert torch.equal(explained.layer_weights, head.explain(history, batch).layer_weights)
        if scores is not None:
            assert torch.equal(scores, head.score(expected.bfloat16().float(), pairs))

    @pytest.mark.parametrize("level", ["graph", "node"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
    def test_nothing_of_the_size_of_the_history_is_made(
        self, toy: Any, level: str, dtype: torch.dtype
    ) -> None:
        head = toy.head([16] * 64, dim=16, layer_heads=2, mix="all", level=level).float()
        history = torch.randn(8192, 64, 16).to(dtype)
        sizes = [16] * 512

        class Largest(TorchDispatchMode):
            numel = 0

            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
                result = func(*args, **(kwargs or {}))
                for tensor in tree_leaves(result):
                    if isinstance(tensor, Tensor) and not shares_memory(tensor, history):
                        self.numel = max(self.numel, tensor.numel())
                return result

        with Largest() as largest:
            head(history, toy.batch(sizes)).sum().backward()
        assert largest.numel < history.numel() / 4

    def test_a_history_that_is_changed_before_its_gradient_is_taken_is_noticed(
        self, toy: Any
    ) -> None:
        history = torch.stack(toy.history([6] * 4, SIZES), 1)
        output = toy.head([6] * 4)(history, toy.batch(SIZES))
        history += 1
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()

    @pytest.mark.long
    @pytest.mark.filterwarnings("ignore")  # torch warns of its own tracing
    def test_a_compiled_head_gives_the_same(self, toy: Any) -> None:
        head, history = toy.head([6] * 4, mix="all"), torch.stack(toy.history([6] * 4, SIZES), 1)
        compiled = torch.compile(head, backend="eager")
        expected = head(history, toy.batch(SIZES), num_graphs=len(SIZES))
        found = compiled(history, toy.batch(SIZES), num_graphs=len(SIZES))
        torch.testing.assert_close(found, expected)

    @pytest.mark.parametrize(
        ("history", "batch", "message"),
        [
            (torch.zeros(4, 2, 6), None, r"found layers of widths \[6, 6\]"),
            ([torch.zeros(4, 6)] * 2 + [torch.zeros(4, 5)], None, r"widths \[6, 6, 5\]"),
            ([torch.zeros(4, 6)] * 2 + [torch.zeros(3, 6)], None, r"\[3, 4\] rows"),
            (torch.zeros(4, 18), None, r"shape \[4, 18\]"),
            (torch.zeros(4, 3, 6), torch.tensor([0, 1, 0, 1]), "not sorted"),
            (torch.zeros(4, 3, 6), torch.tensor([0, 1]), r"expected \[4\]"),
            (torch.zeros(4, 3, 6), torch.tensor([0, 1, 2, 3]), "below 2"),
            (torch.zeros(4, 3, 6), torch.tensor([-1, 0, 0, 1]), "found graph -1"),
        ],
    )
    def test_what_does_not_fit_is_refused(
        self, toy: Any, history: Any, batch: Any, message: str
    ) -> None:
        with pytest.raises(DataError, match=message):
            toy.head([6] * 3)(history, batch, num_graphs=None if batch is None else 2)

    @settings(max_examples=40)
    @given(
        magnitude=st.floats(-40, 11),
        fresh=st.booleans(),
        normalization=st.sampled_from(sorted({*NORMALIZATIONS} - {"none"})),
        seed=st.integers(0, 99),
    )
    def test_finite_for_any_scale(
        self, toy: Any, magnitude: float, fresh: bool, normalization: str, seed: int
    ) -> None:
        head = toy.head([6] * 4, normalization=normalization).float()
        if fresh:
            head.layer_weights.reset_parameters()
        history = torch.stack(toy.history([6] * 4, SIZES, seed=seed), 1).float() * 10**magnitude
        history[:3] = 0.0
        history.requires_grad_()
        output = head(history, toy.batch(SIZES))
        output.sum().backward()
        assert output.isfinite().all()
        assert all(value.isfinite().all() for value in gradients(head).values())
        assert history.grad is not None
        assert history.grad.isfinite().all()


class TestTheProbe:
    """A head that starts where a solved probe of its statistics stands."""

    def started(self, toy: Any, **options: Any) -> Any:
        head = toy.head([6] * 3, mix="statistics", statistics_dropout=0.0, **options)
        generator = torch.Generator().manual_seed(1)
        shapes = (3, head.described_dim), (3,)
        head.start_at(*(torch.randn(*shape, generator=generator).double() for shape in shapes))
        return head

    def test_it_predicts_what_the_probe_predicts_until_it_is_trained(self, toy: Any) -> None:
        head, history = self.started(toy).eval(), toy.history([6] * 3, SIZES)
        statistics = layer_statistics(history, graphs_of(toy.batch(SIZES)))
        described = head.statistics(statistics, torch.tensor(SIZES))
        expected = described @ head.probe.weight.t() + head.probe.bias
        torch.testing.assert_close(head(history, toy.batch(SIZES)), expected)

    def test_once_trained_it_predicts_the_mean_of_both(
        self, toy: Any, literal_histograph: Any
    ) -> None:
        head, history = self.started(toy), toy.history([6] * 3, SIZES)
        probe = head.eval()(history, toy.batch(SIZES))
        alone = head.train()(history, toy.batch(SIZES))
        torch.testing.assert_close(alone, literal_histograph(head, history, SIZES))
        found = head.eval()(history, toy.batch(SIZES))
        torch.testing.assert_close(found, (probe + alone) / 2)
        torch.testing.assert_close(found, literal_histograph(head, history, SIZES))

    def test_training_does_not_change_the_probe(self, toy: Any) -> None:
        head, history = self.started(toy), toy.history([6] * 3, SIZES)
        head.train()(history, toy.batch(SIZES)).sum().backward()
        assert head.probe.weight.grad is None
        assert head.all_layers.weight.grad is not None

    def test_it_is_saved_and_built_again(self, toy: Any) -> None:
        head, history = self.started(toy, probe=0.25), toy.history([6] * 3, SIZES)
        head.train()(history, toy.batch(SIZES))
        again = HistoGraphHead(**head.config()).double()
        again.load_state_dict(head.state_dict())
        expected = head.eval()(history, toy.batch(SIZES))
        torch.testing.assert_close(again.eval()(history, toy.batch(SIZES)), expected)

    def test_statistics_that_are_known_are_not_taken_again(self, toy: Any) -> None:
        head, history = self.started(toy, history_layers=2).eval(), toy.history([6] * 3, SIZES)
        known = layer_statistics(history, graphs_of(toy.batch(SIZES)))
        expected = head(history, toy.batch(SIZES))
        found = head(history, toy.batch(SIZES), statistics=known)
        torch.testing.assert_close(found, expected)
        assert not torch.equal(head(history, toy.batch(SIZES), statistics=2 * known), expected)

    def test_a_probe_of_another_width_is_refused(self, toy: Any) -> None:
        head = toy.head([6] * 3, mix="statistics")
        with pytest.raises(DataError, match=r"probe: found weight \[3, 5\], expected \[3, 74\]"):
            head.start_at(torch.zeros(3, 5), torch.zeros(3))


def graphs_of(batch: Tensor) -> Graphs:
    return Graphs.from_batch(batch, len(batch), None, batch.device)
