"""Networks that differ in their seed alone, trained as one.

Ten seeds of a head read the same batches, so their weights are stacked and every batch is fetched
and every kernel is called once for all of them: a product with ten weights is one batched product.
Each network gets the losses, the clipped gradients, the best epoch and the end that it would get
alone, up to rounding.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from .copies import make_optimizer
from .training_options import TrainingOptions

#: Networks that are stacked at most: more of them do not get any faster together.
MOST_NETWORKS = 16

#: Node embeddings, of all networks together, that a batch may make at a time.
MOST_ROWS = 1 << 18


#: What the optimizer keeps of every parameter besides the number of its steps.
MOMENTS = ("exp_avg", "exp_avg_sq")


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


class StackedNetworks:
    """Networks that are equal but for their weights, see :class:`~histograph_post.copies.Copies`.

    The weights of each are one vector while they are trained: gradients are clipped and an
    optimizer goes on in one operation.

    Args:
        networks: One or more. Where they have a ``run_copies``, it is given these vectors.
        optimizers: One of each, with one group of all parameters.
        options: How they are trained.
    """

    def __init__(
        self,
        networks: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        options: TrainingOptions,
    ) -> None:
        self._network = networks[0]  # its weights are replaced when it is called
        self._optimizers = optimizers
        self._own = [dict(network.named_parameters()) for network in networks]
        self._layout = _Layout(self._network)
        self._run_copies = getattr(self._network, "run_copies", lambda *_: None)
        #: ``[copies, numel]``.
        self._weights = torch.stack([self._layout.join(own) for own in self._own]).requires_grad_()
        self.optimizer: torch.optim.Optimizer = make_optimizer([self._weights], options)
        states = [
            {name: optimizer.state[value] for name, value in own.items()}
            for optimizer, own in zip(optimizers, self._own, strict=True)
        ]
        if all(state for own in states for state in own.values()):
            first = next(iter(states[0].values()))
            self.optimizer.state[self._weights] = {"step": first["step"].clone()}  # that of all
            for key in MOMENTS:
                moments = [{name: state[key] for name, state in own.items()} for own in states]
                stacked = torch.stack([self._layout.join(own) for own in moments])
                self.optimizer.state[self._weights][key] = stacked

    def train(self, mode: bool) -> None:
        """Prepare for training, or for anything else."""
        self._network.train(mode)

    def __call__(self, inputs: Any) -> Tensor:
        """Return the outputs of every network: ``[copies, rows, out_dim]``."""
        outputs: Tensor | None = self._run_copies(self._weights, inputs)
        if outputs is not None:
            return outputs

        def run(parameters: dict[str, Tensor]) -> Tensor:
            found: Tensor = functional_call(self._network, parameters, (inputs,))
            return found  # [rows, out_dim]

        parameters = self._layout.split(self._weights)
        if len(self._weights) == 1:
            return run({name: value[0] for name, value in parameters.items()}).unsqueeze(0)
        with warnings.catch_warnings():
            # The attention of a large graph is fused, and has to be run for one after the other.
            warnings.filterwarnings("ignore", "There is a performance drop", UserWarning)
            stacked: Tensor = vmap(run)(parameters)
        return stacked

    def aux_loss(self) -> None:
        """Return nothing: networks with such a loss are not stacked."""
        return None

    def clip(self, norm: float) -> None:
        """Scale the gradients of each network down to this norm."""
        gradient = self._weights.grad
        assert gradient is not None  # of the loss
        norms = torch.linalg.vector_norm(gradient, dim=1).tolist()  # [copies]
        for own, found in zip(gradient, norms, strict=True):
            if not found + 1e-6 <= norm:  # also if it is NaN, which is not to be hidden
                own.mul_(norm / (found + 1e-6))

    @torch.no_grad()
    def settle(self) -> None:
        """Give each network and its optimizer what is theirs."""
        state = self.optimizer.state[self._weights]
        weights = self._layout.split(self._weights)
        moments = {key: self._layout.split(state[key]) for key in MOMENTS}
        for place, (optimizer, own) in enumerate(zip(self._optimizers, self._own, strict=True)):
            for name, value in own.items():
                value.copy_(weights[name][place])
                optimizer.state[value] = {
                    "step": state["step"].clone(),
                    **{key: named[name][place].clone() for key, named in moments.items()},
                }


class _Layout:
    """Where each parameter of a network is in a vector of all of them.

    Args:
        network: Of its parameters only names and shapes count.
    """

    def __init__(self, network: nn.Module) -> None:
        self._shapes = {name: value.shape for name, value in network.named_parameters()}
        self._sizes = [shape.numel() for shape in self._shapes.values()]

    def join(self, named: Mapping[str, Tensor]) -> Tensor:
        """Return values by name as one vector."""
        return torch.cat([named[name].detach().flatten() for name in self._shapes])

    def split(self, values: Tensor) -> dict[str, Tensor]:
        """View vectors ``[copies, numel]`` as what they are: ``[copies, ...]`` by name."""
        pieces = values.split(self._sizes, dim=1)
        return {
            name: piece.view(len(values), *shape)
            for (name, shape), piece in zip(self._shapes.items(), pieces, strict=True)
        }
