"""Watching the calls of a module, however it is called."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch_geometric.nn import MessagePassing

#: Is given the module, its arguments and its keyword arguments.
Enter = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]
#: Is given the module and what it returned.
Leave = Callable[[nn.Module, Any], None]


@contextmanager
def watch_calls(module: nn.Module, enter: Enter, leave: Leave) -> Iterator[None]:
    """Call ``enter`` and ``leave`` around each call of a module, also of its bare ``forward``.

    Hooks do not see ``module.forward(...)``, which some models write. Whatever was assigned to
    ``forward`` before is there again afterwards.
    """
    announced = 0  # calls that the hooks see

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal announced
        announced += 1
        enter(module, args, kwargs)

    def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        leave(module, output)

    original = module.forward
    replaced = vars(module).get("forward")

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal announced
        if announced:
            announced -= 1
            return original(*args, **kwargs)
        enter(module, args, kwargs)
        output = original(*args, **kwargs)
        leave(module, output)
        return output

    handles = [
        module.register_forward_pre_hook(before, with_kwargs=True),
        module.register_forward_hook(after, with_kwargs=True),
    ]
    vars(module)["forward"] = forward
    try:
        yield
    finally:
        if replaced is None:
            vars(module).pop("forward", None)
        else:
            vars(module)["forward"] = replaced
        for handle in handles:
            handle.remove()


@contextmanager
def watch_propagation(module: MessagePassing, enter: Enter, leave: Leave) -> Iterator[None]:
    """Call ``enter`` and ``leave`` around each time a PyG layer passes messages."""

    def before(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        enter(module, inputs, {})

    def after(module: nn.Module, inputs: Any, output: Any) -> None:
        leave(module, output)

    handles = [
        module.register_propagate_forward_pre_hook(before),
        module.register_propagate_forward_hook(after),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
