from __future__ import annotations

import inspect
import json
from typing import Any

import pytest
import torch

from histograph_post.errors import ConfigError, DataError
from histograph_post.heads.histograph import HistoGraphConfig, HistoGraphHead
from histograph_post.heads.histograph.layer_attention import NORMALIZATIONS
from histograph_post.heads.histograph.node_attention import (
    EXACT_NODES,
    NODE_ATTENTIONS,
    resolve_auto,
)

SIZES = (5, 1, 9, 3)


class TestOptions:
    @pytest.mark.parametrize(
        "change",
        [
            {"history_layers": 2},
            *({"layer_attention": value} for value in ("mean", "last", "random")),
            *({"normalization": value} for value in NORMALIZATIONS if value != "bounded"),
            {"radius": 1.0},
            {"layer_heads": 2},
            {"node_attention": "none"},
            {"node_attention": "landmark", "landmarks": 2},
            {"node_attention": "landmark", "key_dropout": 0.9},
            {"zero_token": True},
            {"attention_dropout": 0.5},
            {"key_dropout": 0.5},
            {"residual": False},
            {"output_norm": False},
            {"layer_norm": True},
            {"mix": "all"},
            {"mixing_init": 0.9},
            {"mixing": "fixed", "mixing_init": 0.0},
            {"mlp_layers": 2},
            {"dropout": 0.5},
            {"shortcut": True},
            {"heads": 4},
        ],
        ids=str,
    )
    @pytest.mark.parametrize("level", ["graph", "node"])
    def test_every_switch_changes_the_output(
        self, toy: Any, change: dict[str, Any], level: str
    ) -> None:
        history = toy.history([6] * 4, SIZES)
        plain = toy.head([6] * 4, level=level).train()
        other = toy.head([6] * 4, level=level, seed=1, **change).train()
        shared = {
            name: value
            for name, value in plain.state_dict().items()
            if other.state_dict().get(name, value.new_empty(0)).shape == value.shape
            and not name.startswith("mixing")
        }
        other.load_state_dict(shared, strict=False)
        difference = plain(history, toy.batch(SIZES)) - other(history, toy.batch(SIZES))
        assert difference.abs().max() > 1e-4

    def test_a_new_normalisation_is_one_function_and_one_entry(
        self, toy: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def squashed(scores: torch.Tensor, options: HistoGraphConfig) -> torch.Tensor:
            return (scores / options.radius).tanh()

        monkeypatch.setitem(NORMALIZATIONS, "squashed", squashed)
        head, history = toy.head([6] * 4, normalization="squashed"), toy.history([6] * 4, SIZES)
        scores = toy.head([6] * 4, normalization="none").explain(history, toy.batch(SIZES))
        found = head.explain(history, toy.batch(SIZES)).layer_weights
        torch.testing.assert_close(found, (scores.layer_weights / 2).tanh())
        with pytest.raises(ConfigError, match=r"one of bounded, .*, squashed"):
            HistoGraphHead([6] * 3, 2, normalization="max")

    def test_a_subclass_has_the_options_of_the_head(self) -> None:
        class Own(HistoGraphHead):
            pass

        assert inspect.signature(Own) == inspect.signature(HistoGraphHead)
        assert "normalization" in inspect.signature(Own).parameters

    def test_dropout_is_off_in_evaluation(self, toy: Any) -> None:
        options = {"attention_dropout": 0.5, "key_dropout": 0.5, "dropout": 0.5}
        head, history = toy.head([6] * 3, **options), toy.history([6] * 3, SIZES)
        assert torch.equal(head(history, toy.batch(SIZES)), head(history, toy.batch(SIZES)))

    def test_a_delayed_coefficient_waits(self, toy: Any) -> None:
        head = toy.head([6] * 3, mixing="delayed", mixing_delay=2).train()
        history = toy.history([6] * 3, SIZES)
        moved = []
        for _ in range(4):
            head.zero_grad()
            head(history, toy.batch(SIZES)).sum().backward()
            moved.append(head.mixing.logit.grad is not None)
        assert moved == [False, False, True, True]

    def test_configuration_survives_json(self, toy: Any) -> None:
        head = toy.head((3, 6, 6), 2, normalization="signed", history_layers=2, mixing="delayed")
        again = HistoGraphHead(**json.loads(json.dumps(head.config()))).double().eval()
        assert again.options == head.options
        again.load_state_dict(head.state_dict())
        history = toy.history((3, 6, 6), SIZES)
        assert torch.equal(again(history, toy.batch(SIZES)), head(history, toy.batch(SIZES)))

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"dim": 10, "heads": 4}, "heads: found 4, expected a divisor of dim=10"),
            ({"normalization": "max"}, "found 'max', expected one of bounded, signed"),
            ({"mixing_init": 1.0}, "mixing_init: found 1.0"),
            ({"history_layers": 4}, "history_layers: found 4"),
            ({"level": "link"}, "out_dim: found 2, expected 1"),
            ({"key_dropout": 1.0}, "expected a probability"),
            ({"eps": 0.0}, "expected a positive number"),
            ({"landmarks": 12}, "landmarks: found 12, expected a power of two"),
            ({"node_attention": "all"}, "found 'all', expected one of auto, exact, landmark"),
        ],
    )
    def test_impossible_options_are_refused(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            HistoGraphHead([6] * 3, 2, **options)

    @pytest.mark.parametrize(("before", "now"), [(True, "exact"), (False, "none")])
    def test_what_the_first_version_saved_is_read(self, before: bool, now: str) -> None:
        saved = {"in_dims": [3], "out_dim": 2, "node_attention": before}
        assert HistoGraphHead(**saved).config()["node_attention"] == now

    def test_auto_is_resolved_where_all_graphs_are_large(self) -> None:
        assert resolve_auto({"dim": 8}, EXACT_NODES) == {"dim": 8}
        large = resolve_auto({"dim": 8}, EXACT_NODES + 1)
        assert large == {"dim": 8, "node_attention": "landmark"}
        exact = {"node_attention": "exact"}
        assert resolve_auto(exact, EXACT_NODES + 1) == exact

    def test_repr(self) -> None:
        assert repr(HistoGraphHead([64] * 6, 2)) == "HistoGraphHead(6 x 64 -> 2)"
        head = HistoGraphHead([9, 16, 16], 1, dim=32, level="link")
        assert repr(head) == "HistoGraphHead(1 x 9 + 2 x 16 -> 1, dim=32, level='link')"


class TestExplanation:
    @pytest.mark.parametrize("kind", NODE_ATTENTIONS)
    def test_weights_and_attention_of_each_graph(self, toy: Any, kind: str) -> None:
        head = toy.head([6] * 4, layer_heads=2, node_attention=kind, landmarks=4)
        if kind == "auto":
            head.landmarks.larger_than = 4
        history, batch = toy.history([6] * 4, SIZES), toy.batch(SIZES)
        explanation = head.explain(history, batch, edge_index=toy.edges(SIZES))
        assert explanation.layer_weights.shape == (4, 2, 4)
        sums = explanation.layer_weights.sum(-1)
        torch.testing.assert_close(sums, torch.ones_like(sums))
        shares = torch.stack([part.sum() for part in explanation.node_attention.split(SIZES)])
        torch.testing.assert_close(shares, torch.ones_like(shares))

    def test_without_node_attention_every_node_counts_alike(self, toy: Any) -> None:
        head = toy.head([6] * 2, node_attention=False)
        attention = head.explain(toy.history([6] * 2, [4])).node_attention
        torch.testing.assert_close(attention, torch.full((4,), 0.25, dtype=torch.float64))


class TestWarmStart:
    @pytest.mark.parametrize("level", ["graph", "node"])
    @pytest.mark.parametrize("options", [{}, {"mix": "all", "layer_norm": True, "mlp_layers": 2}])
    def test_predicts_what_the_checkpoint_predicts(
        self, toy: Any, level: str, options: dict[str, Any]
    ) -> None:
        head = toy.head([6] * 4, level=level, **options)
        history = toy.history([6] * 4, SIZES)
        classifier = torch.nn.Linear(6, 3).double()
        head.warm_start(classifier.weight, classifier.bias)
        pooled = history[-1]
        if level == "graph":
            pooled = torch.stack([part.mean(0) for part in history[-1].split(SIZES)])
        torch.testing.assert_close(head(history, toy.batch(SIZES)), classifier(pooled))

        restored = HistoGraphHead(**head.config()).double().eval()
        restored.load_state_dict(head.state_dict())
        torch.testing.assert_close(restored(history, toy.batch(SIZES)), classifier(pooled))

    def test_everything_can_learn_from_there(self, toy: Any) -> None:
        head = toy.head([6] * 4).train()
        history, batch = toy.history([6] * 4, SIZES), toy.batch(SIZES)
        head.warm_start(torch.zeros(3, 6))
        optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            (head(history, batch) - 1).square().sum().backward()
            optimizer.step()
        silent = [name for name, value in head.named_parameters() if not value.grad.abs().any()]
        assert silent == []

    def test_another_shape_is_refused(self, toy: Any) -> None:
        with pytest.raises(DataError, match=r"found weight \[3, 5\], expected \[3, 6\]"):
            toy.head([6] * 4).warm_start(torch.zeros(3, 5))
