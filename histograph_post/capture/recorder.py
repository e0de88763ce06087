"""Record a model's history while it runs."""

from __future__ import annotations

import copy
import difflib
import math
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode_stack,
    _pop_mode,
    _push_mode,
)
from torch_geometric.data import Batch

from ..errors import CaptureError
from ..models import call_model
from .passes import (
    Enter,
    Leave,
    eager_module,
    function_name,
    is_counted,
    tensors_in,
    watch_calls,
    without_advice,
)
from .points import CapturePlan, CapturePoint

#: Takes the number of a layer and its tensor, ``[num_nodes, width]``; returns a copy.
CopyLayer = Callable[[int, Tensor], Tensor]


@dataclass(frozen=True)
class Captured:
    """What one forward pass computed."""

    history: list[Tensor]  #: one ``[num_nodes, width]`` per layer
    output: Any  #: of the model, as it returned it


class Capture:
    """Runs a model and returns its history beside its output.

    The model is watched while the object is used as a context manager; a :meth:`run` outside of one
    brings its own. Tensors are copied where they are found, so later in-place operations do not
    reach them; gradients flow through the copies.
    """

    def __init__(self, model: nn.Module, plan: CapturePlan) -> None:
        self.plan = plan
        self._model = eager_module(model)
        self._watched: ExitStack | None = None  # while it is in use
        self._running = False
        self._calls: Counter[str] = Counter()
        self._found: dict[int, Tensor] = {}
        self._copy_layer: CopyLayer = _clone
        self._num_nodes = 0
        self._watches = {
            position: _FunctionWatch(point, partial(self._store, position))
            for position, point in enumerate(plan.points)
            if point.kind == "function"
        }
        modules = dict(self._model.named_modules())
        for point in plan.points:
            if point.module not in modules:
                near = difflib.get_close_matches(point.module, modules, n=3)
                hint = f"; near: {', '.join(near)}" if near else ""
                raise CaptureError(
                    f"layer {point.name!r}: the model has no module {point.module!r}{hint}"
                )

    def __enter__(self) -> Capture:
        if self._watched is not None:
            raise CaptureError("this capture is already in use")
        wanted = {*self.plan.runs, *(point.module for point in self.plan.points)}
        with ExitStack() as watched:
            watched.enter_context(without_advice())
            for name, module in self._model.named_modules():
                if self._watches or name in wanted:
                    watched.enter_context(watch_calls(module, *self._around(name)))
            self._watched = watched.pop_all()
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if self._watched is not None:
            self._watched.close()
            self._watched = None

    def run(self, batch: Batch, copy_layer: CopyLayer | None = None) -> Captured:
        """Call the model on a batch; return the activation of each layer, and its output.

        ``copy_layer`` is called with the number of a layer and its tensor, ``[num_nodes, width]``,
        as soon as that is found, and returns a copy of it; without it, tensors are cloned.

        Raises:
            CaptureError: if the forward pass is not the one the plan was made for.
        """
        if self._watched is None:
            with self:
                return self.run(batch, copy_layer)
        self._calls.clear()
        self._found.clear()
        self._copy_layer = copy_layer or _clone
        self._num_nodes = int(batch.num_nodes)
        self._running = True
        try:
            # A shallow copy, because models that take the whole batch assign to its attributes.
            output = call_model(self._model, copy.copy(batch), self.plan.call)
            for position, point in enumerate(self.plan.points):
                if position not in self._found:
                    raise CaptureError(
                        f"layer {point.name!r}: {point.place} did not come up in this pass: which "
                        "steps run depends on the graphs; name modules that always run with "
                        "--layers"
                    )
            history = [self._found[position] for position in range(len(self.plan.points))]
            for name, count in self.plan.runs.items():
                if self._calls[name] != count:  # the history would lack layers
                    raise CaptureError(
                        f"layer {name!r} ran {self._calls[name]} times in this pass and {count} "
                        "times in the probe: which layers run depends on the graphs; name the ones "
                        "that always run with --layers"
                    )
        finally:
            self._running = False
            self._found.clear()
            for watch in self._watches.values():
                watch.stop()
        return Captured(history, output)

    def _store(self, position: int, tensors: list[Tensor]) -> None:
        point = self.plan.points[position]
        if point.index >= len(tensors):
            raise CaptureError(
                f"layer {point.name!r}: {point.place} has {len(tensors)} tensors in this pass, "
                f"expected {point.index + 1} or more"
            )
        tensor = tensors[point.index]
        # What is done here is no step of the model's: function watches must not count it.
        with torch._C.DisableTorchFunction():
            if tensor.shape[:1] != (self._num_nodes,) or math.prod(tensor.shape[1:]) != point.width:
                other = "; are these the features that the layers were found with?"
                raise CaptureError(
                    f"layer {point.name!r}: {point.place} is {list(tensor.shape)}, expected "
                    f"{self._num_nodes} rows of {point.width}"
                    + (other if tensor.shape[:1] == (self._num_nodes,) else "")
                )
            rows = tensor.reshape(self._num_nodes, point.width)
            self._found[position] = self._copy_layer(position, rows)

    def _around(self, name: str) -> tuple[Enter, Leave]:
        """Return what is done before and after each call of the module called ``name``."""
        points = [each for each in enumerate(self.plan.points) if each[1].module == name]

        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            # While a function is watched, attention modules avoid their fused kernels, and round
            # differently: those that are done are let go.
            for watch in self._watches.values():
                if watch.done:
                    watch.stop()
            if not self._running:  # a pass that is repeated for gradients, say
                return
            self._calls[name] += 1
            for position, point in points:
                if point.kind == "input" and point.call == self._calls[name]:
                    self._store(position, tensors_in(args, kwargs))

        def leave(module: nn.Module, output: Any) -> None:
            for position, point in points if self._running else ():
                if point.call == self._calls[name]:
                    if point.kind == "output":
                        self._store(position, tensors_in(output))
                    elif point.kind == "function":
                        self._watches[position].start()

        return enter, leave


class _FunctionWatch(TorchFunctionMode):
    """Counts function calls from the end of a module to the tensor of a capture point."""

    def __init__(self, point: CapturePoint, store: Callable[[list[Tensor]], None]) -> None:
        super().__init__()
        self._point = point
        self._store = store
        self._seen = 0
        self._started = False

    @property
    def done(self) -> bool:
        """Whether the tensor was found."""
        return self._started and self._seen == len(self._point.calls)

    def start(self) -> None:
        """Watch from here on."""
        self.stop()
        self._seen = 0
        self._started = True
        # At the bottom: modes the model has entered are popped by the model, from the top.
        _set_modes([self, *_get_current_function_mode_stack()])

    def stop(self) -> None:
        """Stop watching."""
        if self._started:
            self._started = False
            _set_modes([mode for mode in _get_current_function_mode_stack() if mode is not self])

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the function; compare its name with the probe pass, and store the tensor."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        calls = self._point.calls
        if self._seen == len(calls):
            return result
        tensors = tensors_in(result)
        if not is_counted(func, tensors):
            return result
        expected, found = calls[self._seen], function_name(func)
        self._seen += 1
        if found != expected:
            raise CaptureError(
                f"layer {self._point.name!r}: the forward pass differs from the probe pass; step "
                f"{self._seen} after {self._point.module!r} is {found}(), expected {expected}()"
            )
        if self._seen == len(calls):
            self._store([*tensors, *tensors_in(args, kwargs)])
        return result


def _clone(position: int, tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def _set_modes(modes: list[TorchFunctionMode]) -> None:
    """Replace the stack of function modes."""
    for _ in _get_current_function_mode_stack():
        _pop_mode()
    for mode in modes:
        _push_mode(mode)
