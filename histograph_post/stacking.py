"""Networks that differ in their seed alone, trained as one.

Ten seeds of a head read the same batches, so their weights are stacked and every batch is fetched
and every kernel is called once for all of them: a product with ten weights is one batched product.
Each network gets the losses, the clipped gradients, the best epoch and the end that it would get
alone, up to rounding.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from .training import Trainer, make_optimizer, run_epoch
from .training_options import TrainingOptions

#: Networks that are stacked at most: more of them do not get any faster together.
MOST_NETWORKS = 16

#: Node embeddings, of all networks together, that a batch may make at a time.
MOST_ROWS = 1 << 18


def most_together(head: nn.Module, options: TrainingOptions, *, num_nodes: int) -> int:
    """Return how many heads like this one, which differ in their seed, can be trained as one.

    Args:
        head: One of them; its ``stackable`` says whether it can be at all.
        options: How they are trained.
        num_nodes: Nodes of a batch at most.
    """
    # With this schedule each network would have a learning rate of its own.
    if not getattr(head, "stackable", False) or options.schedule == "plateau":
        return 1
    return max(1, min(MOST_NETWORKS, MOST_ROWS // max(num_nodes, 1)))


def run_epoch_together(trainers: Sequence[Trainer]) -> None:
    """Train for an epoch and validate, all networks as one.

    Args:
        trainers: As many as :func:`most_together` allows, at the same epoch.
    """
    run_epoch(trainers, StackedNetworks(trainers))


class StackedNetworks:
    """The networks of some trainers, see :class:`~histograph_post.copies.Copies`.

    Args:
        trainers: All at the same epoch.
    """

    def __init__(self, trainers: Sequence[Trainer]) -> None:
        self._trainers = trainers
        self._network = trainers[0].network  # its weights are replaced when it is called
        self._own = [dict(trainer.network.named_parameters()) for trainer in trainers]
        self._parameters = {
            name: torch.stack([own[name].detach() for own in self._own]).requires_grad_()
            for name in self._own[0]
        }  # [copies, ...] each
        self.optimizer: torch.optim.Optimizer = make_optimizer(
            list(self._parameters.values()), trainers[0].options
        )
        for name, parameter in self._parameters.items():
            states = [trainer.optimizer.state[own[name]] for trainer, own in self._pairs()]
            if all(states):
                self.optimizer.state[parameter] = {
                    key: _stacked(key, [state[key] for state in states]) for key in states[0]
                }

    def train(self, mode: bool) -> None:
        """Prepare for training, or for anything else."""
        self._network.train(mode)

    def __call__(self, inputs: Any) -> Tensor:
        """Return the outputs of every network: ``[copies, rows, out_dim]``."""

        def run(parameters: dict[str, Tensor]) -> Tensor:
            outputs: Tensor = functional_call(self._network, parameters, (inputs,))
            return outputs  # [rows, out_dim]

        with warnings.catch_warnings():
            # The attention of a large graph is fused, and has to be run for one after the other.
            warnings.filterwarnings("ignore", "There is a performance drop", UserWarning)
            stacked: Tensor = vmap(run)(self._parameters)
        return stacked

    def aux_loss(self) -> None:
        """Return nothing: networks with such a loss are not stacked."""
        return None

    def clip(self, norm: float) -> None:
        """Scale the gradients of each network down to this norm."""
        gradients = [value.grad for value in self._parameters.values() if value.grad is not None]
        norms = torch.stack([_rows(grad).norm(dim=1) for grad in gradients])  # [parameters, copies]
        factors = (norm / (norms.norm(dim=0) + 1e-6)).clamp(max=1.0)  # [copies]
        for grad in gradients:
            grad.mul_(factors.view(-1, *(1,) * (grad.dim() - 1)))

    @torch.no_grad()
    def settle(self) -> None:
        """Give each network and its optimizer what is theirs."""
        for place, (trainer, own) in enumerate(self._pairs()):
            for name, stacked in self._parameters.items():
                own[name].copy_(stacked[place])
                trainer.optimizer.state[own[name]] = {
                    key: value.clone() if key == "step" else value[place].clone()
                    for key, value in self.optimizer.state[stacked].items()
                }

    def _pairs(self) -> list[tuple[Trainer, dict[str, nn.Parameter]]]:
        return list(zip(self._trainers, self._own, strict=True))


def _stacked(key: str, values: list[Tensor]) -> Tensor:
    """Stack one entry of the optimizers' states; the number of steps is the same in all."""
    return values[0].clone() if key == "step" else torch.stack(values)


def _rows(values: Tensor) -> Tensor:
    """View what each copy has as a row: ``[copies, numel]``."""
    return values.reshape(len(values), -1)
