"""Whether a model gives probabilities or logits: seen from how its output is made.

The numbers cannot tell: the logits of a collapsed network may well stay between 0 and 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

#: Functions whose result is a probability, by name. A log-softmax gives logits: they are what a
#: softmax turns into the same probabilities.
_SQUASHING = frozenset({"sigmoid", "sigmoid_", "softmax", "expit"})

#: Functions that give the same numbers in another shape or place.
_RESHAPING = frozenset(
    [
        "__getitem__",
        "clone",
        "contiguous",
        "detach",
        "flatten",
        "float",
        "reshape",
        "squeeze",
        "to",
        "unsqueeze",
        "view",
    ]
)


class OutputForm(TorchFunctionMode):
    """Watches a forward pass for tensors of probabilities::

    with OutputForm() as form:
        output = model(...)
    form.is_probability(output)
    """

    def __init__(self) -> None:
        super().__init__()
        # The tensors are kept, so that no other tensor can take over an id.
        self._probabilities: dict[int, Tensor] = {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        reshaped = name in _RESHAPING and args and id(args[0]) in self._probabilities
        if isinstance(result, Tensor) and (name in _SQUASHING or reshaped):
            self._probabilities[id(result)] = result
        return result

    def is_probability(self, tensor: Tensor) -> bool:
        """Whether this tensor was seen to come from a sigmoid or a softmax."""
        return id(tensor) in self._probabilities
