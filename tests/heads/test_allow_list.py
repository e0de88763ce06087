"""The fast path is taken for heads it was written for, and for nothing else.

Every option and every normalisation is walked through both paths: outputs and gradients agree, or
the fast path is not taken. What is new (an option, a normalisation, a module, a subclass) takes the
head's own path until somebody has written the fast one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("numba")

from histograph_post.heads import compiled, fast_path
from histograph_post.heads.histograph import HistoGraphHead
from histograph_post.heads.histograph_config import HistoGraphConfig
from histograph_post.heads.layer_weights import NORMALIZATIONS
from histograph_post.heads.whole_head import WholeHead

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
    "node_attention": (False,),
    "zero_token": (True,),
    "attention_dropout": (0.5,),
    "key_dropout": (0.5,),
    "residual": (False,),
    "layer_norm": (True,),
    "mix": ("last",),
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
    values: dict[str, Any] = {"in_dims": WIDTHS, "out_dim": 3, "dim": 8, "heads": 2, **options}
    if values.get("level") == "link":
        values["out_dim"] = 1
    head = kind(**values)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    return head


def inputs(head: HistoGraphHead) -> tuple[Any, Tensor]:
    """Return a history that fits, one tensor where it can be, and the graph of each node."""
    layers = [draw(sum(SIZES), width) for width in head.options.in_dims]
    uniform = len(set(head.options.in_dims)) == 1
    batch = torch.arange(len(SIZES)).repeat_interleave(torch.tensor(SIZES))
    return torch.stack(layers, 1) if uniform else layers, batch


def gradients(head: HistoGraphHead, output: Tensor) -> Tensor:
    """Return the gradients of a weighted sum of the outputs, one after the other: ``[numel]``."""
    leaves = list(head.parameters())
    found = torch.autograd.grad((output * draw(*output.shape)).sum(), leaves, allow_unused=True)
    zeros = [torch.zeros_like(leaf) for leaf in leaves]
    chosen = [zero if grad is None else grad for grad, zero in zip(found, zeros, strict=True)]
    return torch.cat([grad.flatten() for grad in chosen])


def by_the_head(head: HistoGraphHead, *, fast: bool) -> tuple[Tensor, Tensor]:
    """Return outputs and gradients, with the fast path where it is taken, or without it."""
    history, batch = inputs(head)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "enabled", fast)
        torch.manual_seed(2)  # of what is dropped
        output = head(history, batch, num_graphs=len(SIZES))
        return output, gradients(head, output)


def by_whole_head(head: HistoGraphHead) -> tuple[Tensor, Tensor] | None:
    """Return the same as the head is trained; None if it is trained by the other path."""
    whole = WholeHead.of(head)
    if whole is None:
        return None
    vector = torch.cat([value.detach().flatten() for value in head.parameters()])
    weights = vector.unsqueeze(0).requires_grad_()
    history, batch = inputs(head)
    outputs = whole(weights, history, batch, num_graphs=len(SIZES))
    assert outputs is not None
    (grad,) = torch.autograd.grad((outputs[0] * draw(*outputs[0].shape)).sum(), weights)
    return outputs[0], grad[0]


def check_paths(head: HistoGraphHead) -> None:
    """Outputs and gradients are those of the head alone, however it is run."""
    output, grad = by_the_head(head, fast=False)
    # In units of the largest: what cancels out is not as exact as what does not.
    close = {"rtol": 1e-4, "atol": 2e-4 * max(1.0, float(grad.abs().max()))}
    for found in (by_the_head(head, fast=True), by_whole_head(head)):
        if found is not None:
            torch.testing.assert_close(found[0], output, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(found[1], grad, **close)


def walked() -> Iterator[Any]:
    for name, values in VALUES.items():
        for value in values:
            yield pytest.param({name: value}, id=f"{name}={value}")


def test_every_option_is_walked() -> None:
    assert list(VALUES) == [field.name for field in fields(HistoGraphConfig)]


@pytest.mark.parametrize("options", [{}, *walked()])
def test_outputs_and_gradients_are_the_same_on_both_paths(options: dict[str, Any]) -> None:
    check_paths(make_head(**options))


def test_the_default_head_takes_the_fast_path() -> None:
    head = make_head()
    assert head.trains_in_loops
    assert by_whole_head(head) is not None


def test_a_new_normalisation_takes_the_heads_own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(NORMALIZATIONS, "tanh", lambda scores, **_: scores.tanh())
    head = make_head(normalization="tanh")
    assert not head.trains_in_loops
    check_paths(head)
    assert not torch.equal(
        by_the_head(head, fast=True)[0], by_the_head(make_head(normalization="none"), fast=True)[0]
    )


@pytest.mark.parametrize("allowed", [fast_path.READ_IN_LOOPS, fast_path.RUN_IN_LOOPS])
def test_an_option_that_is_not_on_the_list_takes_the_heads_own_path(
    allowed: Mapping[str, Any],
) -> None:
    head = make_head()
    assert fast_path.in_loops(head, allowed)
    for name in VALUES:
        known = {option: values for option, values in allowed.items() if option != name}
        assert not fast_path.in_loops(head, known)


class Doubled(HistoGraphHead):
    """A head of somebody else's."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return twice the output."""
        return 2 * super().forward(*args, **kwargs)


def test_a_subclass_takes_its_own_path() -> None:
    head = make_head(Doubled)
    assert not head.trains_in_loops
    check_paths(head)


@pytest.mark.parametrize("place", ["mlp", "layer_weights", "node_attention", ""])
@pytest.mark.parametrize("module", [nn.Linear(8, 8), nn.Tanh()], ids=["weights", "no weights"])
def test_a_head_built_with_another_module_takes_its_own_path(
    place: str, module: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = HistoGraphHead.__init__

    def build_with_more(head: HistoGraphHead, *args: Any, **options: Any) -> None:
        build(head, *args, **options)
        head.get_submodule(place).add_module("more", module)

    monkeypatch.setattr(HistoGraphHead, "__init__", build_with_more)
    head = make_head()
    assert not head.trains_in_loops
    check_paths(head)


def test_a_head_with_a_replaced_module_or_a_hook_takes_its_own_path() -> None:
    head = make_head()
    head.mlp[1] = nn.Tanh()
    assert not head.trains_in_loops
    check_paths(head)
    head = make_head()
    head.layer_weights.register_forward_hook(lambda module, args, output: None)
    assert not head.trains_in_loops
