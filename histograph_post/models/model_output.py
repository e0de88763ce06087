"""What a model returns: its prediction among several outputs, and whether that is probabilities."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Final

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch_geometric.data import Data

from ..errors import ModelError

#: Keys that name the prediction in a dictionary of outputs, best first.
PREDICTION_KEYS: Final = (
    *("logits", "logit", "out", "output", "outputs", "pred", "preds", "prediction"),
    *("predictions", "y_hat", "y_pred", "scores"),
)


def prediction(
    output: Any, *, rows: int | Collection[int], key: str | int | None = None
) -> Tensor | None:
    """Return the prediction among a model's outputs as ``[rows, targets]``, or None.

    ``rows`` is the number of rows a prediction may have (of several, the first listed is tried
    first). Outputs may be nested tuples, dictionaries and dataclasses. Those called ``logits``,
    ``out``, ``pred``, ... come first, then the order of the outputs decides. ``key`` names the
    output to take instead.

    Raises:
        ModelError: if there is no output ``key``, or it is not a tensor with that many rows.
    """
    wanted = [rows] if isinstance(rows, int) else list(rows)
    tensors = dict(_tensors(output))
    if key is not None:
        return _named_prediction(tensors, wanted, str(key))
    preferred = sorted(tensors.items(), key=lambda item: _preference(item[0]))
    for count in wanted:
        fitting = [tensor for _, tensor in preferred if _fits(tensor, count)]
        if fitting:
            # A scalar fits a single row, but may as well be a loss: the last resort.
            best = max(fitting, key=lambda tensor: tensor.dim() > 0)
            return _as_rows(best)
    return None


def _named_prediction(tensors: Mapping[str, Tensor], wanted: list[int], key: str) -> Tensor:
    if key not in tensors:
        names = ", ".join(name or "a single tensor" for name in tensors) or "no tensors"
        raise ModelError(f"the model returns no output {key!r}; it returns {names}")
    for count in wanted:
        if _fits(tensors[key], count):
            return _as_rows(tensors[key])
    raise ModelError(
        f"output {key!r} of the model is {list(tensors[key].shape)} {tensors[key].dtype}; "
        f"expected floating point with {' or '.join(map(str, wanted))} rows"
    )


def _fits(tensor: Tensor, rows: int) -> bool:
    if not tensor.is_floating_point() or tensor.dim() > 2:
        return False
    return rows == 1 if tensor.dim() == 0 else tensor.shape[0] == rows


def _as_rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() == 2 else tensor.reshape(-1, 1)  # [rows, targets]


def _preference(path: str) -> int:
    name = path.rpartition(".")[2].lower()
    return PREDICTION_KEYS.index(name) if name in PREDICTION_KEYS else len(PREDICTION_KEYS)


def _tensors(output: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Walk through nested outputs; yield every tensor with its dotted path."""
    if isinstance(output, Tensor):
        yield path, output
        return
    if isinstance(output, Data):
        return  # A graph handed back holds its inputs and labels: none of them is a prediction.
    if isinstance(output, Mapping):
        items = [(str(name), value) for name, value in output.items()]
    elif isinstance(output, tuple) and hasattr(output, "_asdict"):
        items = list(output._asdict().items())
    elif isinstance(output, (tuple, list)):
        items = [(str(index), value) for index, value in enumerate(output)]
    elif is_dataclass(output) and not isinstance(output, type):
        items = [(field.name, getattr(output, field.name)) for field in fields(output)]
    else:
        return
    for name, value in items:
        yield from _tensors(value, f"{path}.{name}" if path else name)


# --- whether a model returns probabilities or logits: seen from how its output is made

#: Functions whose result is a probability, by name. A log-softmax returns logits: they are what a
#: softmax turns into the same probabilities.
_SQUASHING = frozenset({"sigmoid", "sigmoid_", "softmax", "expit"})

#: Functions that return the same numbers in another shape or place.
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
        # The tensors are held, so that no other tensor can take over an id.
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
