"""The fast path of the HistoGraph head on a CPU.

:func:`read_out` returns what a head does, on whichever path. The fast one has an *allow* list of
options, modules and inputs: a head with any other is computed as ``head.py`` reads. The kernels do
what is done for every node; what is done for a graph is left to the head's own modules, so that a
new normalisation needs nothing here.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ..history import History, TableRows, check_batch, layer_statistics
from ..ragged import Graphs
from .config import HistoGraphConfig
from .head import HistoGraphHead
from .layer_attention import LayerAttention
from .mixing import Parts, map_parts
from .node_attention import EXACT_NODES, NodeAttention

#: The oldest numba that the extra ``fast`` takes.
OLDEST_NUMBA = (0, 62)

#: Set to False to do without the kernels.
enabled = True

#: Nodes of a part of a batch: enough for matrix products to be fast.
PART_NODES = 128

#: Columns of wide rows that a thread maps at a time.
COLUMNS = 1024

#: Every option, with the values that the kernels are written for; None if they take any value:
#: sizes, and options of the head's own modules. Up to ``EXACT_NODES`` nodes, ``auto`` is exact.
OPTIONS: dict[str, Any] = {
    **dict.fromkeys(("in_dims", "out_dim", "dim", "heads", "layer_heads", "history_layers")),
    **dict.fromkeys(("normalization", "eps", "radius", "residual", "landmarks", "standardize")),
    **dict.fromkeys(("mix", "mixing", "mixing_init", "mixing_delay", "statistics", "probe")),
    **dict.fromkeys(("statistics_dropout", "output_norm", "mlp_layers", "dropout", "shortcut")),
    **{"solved": None, "level": ("graph",), "layer_attention": ("learned",)},
    **{"node_attention": ("auto", "exact"), "zero_token": (False,), "layer_norm": (False,)},
    **{"attention_dropout": (0.0,), "key_dropout": (0.0,)},
}

#: The modules that the kernels replace, the one that small graphs do not use, and those that are
#: called as they are.
MODULES = {
    *("layer_weights", "node_attention", "landmarks", "statistics", "statistics_dropout"),
    *("all_layers", "mixing", "output_norm", "mlp", "output", "shortcut", "probe", "probe_share"),
}


@cache
def kernels() -> Any:
    """Return the module of the kernels; None without a numba that can compile them."""
    try:
        import numba

        if numba.version_info.short < OLDEST_NUMBA or numba.config.DISABLE_JIT:
            return None
        from . import kernels
    except (ImportError, RuntimeError):  # RuntimeError: nowhere to keep the compiled code
        return None
    return kernels


def allows(head: nn.Module) -> bool:
    """Say whether the kernels are written for a head, as it is now, on any inputs."""
    if type(head) is not HistoGraphHead or not _allows_options(head.options):
        return False
    layers, attention, dim = head.layer_weights, head.node_attention, head.dim
    return (
        type(layers) is LayerAttention
        and type(attention) is NodeAttention
        and MODULES.issuperset(_members(head))
        and _members(layers) == ["query", "key", "encoding", "embeddings"]
        and _members(layers.embeddings) == ["0"]
        and _members(attention) == ["in_projection", "out_projection"]
        and type(layers.last_embedding) is type(attention.in_projection) is nn.Linear
        and layers.last_embedding.weight.shape == (dim, head.kept_dims[-1])
        and layers.encoding.shape == (len(head.kept_dims), dim)
        and layers.query.shape == layers.key.shape == (dim, dim)
        and attention.in_projection.weight.shape == (3 * dim, dim)
        and not any(
            module._forward_hooks or module._forward_pre_hooks
            for module in (head, *layers.modules(), *attention.modules())
        )
    )


def _members(module: nn.Module) -> list[str]:
    """Return the names of the parameters, buffers and modules of a module."""
    return [*module._parameters, *module._buffers, *module._modules]


@cache
def _allows_options(options: HistoGraphConfig) -> bool:
    values = asdict(options)
    return (
        values.keys() == OPTIONS.keys()
        and all(OPTIONS[name] is None or value in OPTIONS[name] for name, value in values.items())
        and len(set(options.kept_dims)) == 1
    )


def read_out(head: nn.Module, history: Any, batch: Any, **others: Any) -> Tensor:
    """Return the outputs of any readout; the arguments are those of its ``forward``."""
    known = others.get("num_graphs"), others.get("statistics")
    outputs = fast_outputs(head, history, batch, *known)
    return head(history, batch, **others) if outputs is None else outputs


def fast_outputs(
    head: nn.Module,
    history: History | TableRows,
    batch: Tensor | Graphs | None,
    num_graphs: int | None,
    statistics: Tensor | None = None,
) -> Tensor | None:
    """Return the outputs of graphs, ``[num_graphs, out_dim]``; None if that is left to the head."""
    table = history.table if isinstance(history, TableRows) else history
    if (
        not enabled
        or not isinstance(table, Tensor)
        or table.device.type != "cpu"
        or table.dtype != torch.float32
        or table.requires_grad
        or not table.is_contiguous()
        or torch.is_autocast_enabled("cpu")
        or torch.compiler.is_compiling()
        or not allows(head)
        or next(head.parameters()).dtype != torch.float32
        or kernels() is None
    ):
        return None
    assert isinstance(head, HistoGraphHead)  # it is allowed
    graphs = check_batch(history, batch, num_graphs, head.in_dims)
    if not 1 <= graphs.sizes.max(initial=0) <= EXACT_NODES:
        return None
    starts = history.starts if isinstance(history, TableRows) else graphs.ptr[:-1]
    attended = _attend(head, table, starts, graphs)  # [num_graphs, dim]
    if statistics is None:
        rows = history.copy() if isinstance(history, TableRows) else table  # [num_nodes, L, D]
        statistics = layer_statistics(rows, graphs)  # [num_graphs, 3, L * D]
    described, last = head.describe_by(statistics, graphs)
    apply = map_parts if _num_threads is None or statistics.requires_grad else _Map.of
    mixed = head.mix(attended, described, graphs, apply)  # [num_graphs, dim]
    return head.predict(mixed, described, last, apply)


def _attend(head: HistoGraphHead, table: Tensor, starts: np.ndarray, graphs: Graphs) -> Tensor:
    """Do steps 1 to 7 of the head in kernels: ``[num_graphs, dim]``."""
    layers, attention, dim = head.layer_weights, head.node_attention, head.dim
    assert attention is not None  # it is allowed
    part = graphs.ptr[:-1] // PART_NODES  # of each graph, by the sizes alone: [num_graphs]
    parts = np.concatenate([[0], np.flatnonzero(part[1:] > part[:-1]) + 1, [len(part)]])
    batch = kernels().Batch(table.numpy(), starts, graphs.ptr, parts, 0)
    embedding, count, nodes = layers.last_embedding.weight, graphs.num_graphs, int(graphs.ptr[-1])
    heads, node_heads, channels, empty = layers.heads, attention.heads, table.shape[2], torch.empty
    width, size, offsets = dim // heads, dim // node_heads, layers.offsets()  # [L, dim]
    both = torch.cat([layers.query, layers.key], dim=1)  # [dim, 2 * dim]
    products, queries = _Kernel.apply(
        "score_layers",
        batch,
        (empty(nodes, channels), empty(heads, nodes, width)),
        (empty(count, heads, len(offsets)), empty(count, heads, width)),
        *(both.t() @ embedding, offsets[-1] @ layers.query),  # [2 * dim, D] and [dim]
    )
    keys = (offsets @ layers.key).unflatten(1, (heads, width))  # what positions add to keys
    scores = products + torch.einsum("ghw,lhw->ghl", queries, keys)  # [num_graphs, heads, L]
    scale = graphs.divisor_as(scores.dtype) * math.sqrt(width)  # [num_graphs]
    weights = layers.normalize(scores / scale.view(-1, 1, 1))  # [num_graphs, heads, L]
    values = offsets.unflatten(1, (heads, width))  # [L, heads, width]
    constants = torch.einsum("ghl,lhw->ghw", weights, values).flatten(1)  # [num_graphs, dim]
    projection, bias = attention.in_projection.weight, attention.in_projection.bias
    means, summaries = _Kernel.apply(
        "read_nodes",
        batch,
        (
            *(empty(heads, nodes, channels), empty(nodes, dim)),
            *(empty(2 * node_heads, nodes, size), empty(node_heads, nodes)),
        ),
        (empty(count, dim), empty(count, node_heads, dim)),
        *(weights, constants, embedding, projection[: 2 * dim], bias[: 2 * dim]),
    )
    to_values = projection[2 * dim :].unflatten(0, (node_heads, size))  # [node_heads, size, dim]
    contexts = torch.einsum("ghd,hsd->ghs", summaries, to_values).flatten(1)  # [num_graphs, dim]
    contexts = contexts + bias[2 * dim :]
    attended = graphs.empty_to_zero(attention.out_projection(contexts))  # [num_graphs, dim]
    return attended + means if head.options.residual else attended


class _Kernel(Function):
    """A kernel and its backward as an operation of PyTorch, on tensors as the kernel takes them."""

    @staticmethod
    def forward(
        ctx: Any, name: str, batch: Any, saved: Any, results: Any, *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        inputs = tuple(value.contiguous() for value in inputs)
        _run(name, batch, inputs, saved, results)
        ctx.name, ctx.batch, ctx.saved = name, batch, saved
        ctx.save_for_backward(*inputs)
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_results: Tensor) -> tuple[Tensor | None, ...]:
        inputs, parts = ctx.saved_tensors, len(ctx.batch.parts) - 1
        grads = [value.new_empty(parts, *value.shape) for value in inputs]
        whole = 2 if ctx.name == "read_nodes" else 0  # inputs with a row for each graph
        grads[:whole] = [torch.empty_like(value) for value in inputs[:whole]]
        given = tuple(grad.contiguous() for grad in grad_results)
        _run(f"{ctx.name}_backward", ctx.batch, inputs, ctx.saved, given, tuple(grads))
        return None, None, None, None, *grads[:whole], *(grad.sum(0) for grad in grads[whole:])


class _Map(Function):
    """The head's ``map_parts`` for constant rows so wide that threads share the columns."""

    @classmethod
    def of(cls, linear: nn.Linear, parts: Parts) -> Tensor:
        return cls.apply(*parts, linear.weight, linear.bias)

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        blocks, fixed = rows.split(COLUMNS, dim=1), weight.detach().split(COLUMNS, dim=1)
        found = rows.new_empty(len(blocks), len(rows), len(weight))
        _share(lambda k: torch.mm(blocks[k], fixed[k].t(), out=found[k]), len(blocks))
        return found.sum(0) + bias  # [num_rows, dim]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, Tensor]:
        rows = ctx.saved_tensors[0]  # [num_rows, width]
        grad_weight = rows.new_empty(grad.size(1), rows.size(1))  # [dim, width]
        blocks, found = rows.split(COLUMNS, dim=1), grad_weight.split(COLUMNS, dim=1)
        _share(lambda k: torch.mm(grad.t(), blocks[k], out=found[k]), len(blocks))
        return None, grad_weight, grad.sum(0)


# --- threads

#: Threads of the kernels inside :func:`threads`; None for as many as PyTorch has.
_num_threads: int | None = None


@contextmanager
def threads(head: nn.Module) -> Iterator[None]:
    """Give the cores to the kernels, and one thread to PyTorch, while such a head is trained.

    PyTorch's own keep their cores for milliseconds after each operation, waiting for the next.
    """
    global _num_threads
    if not (enabled and allows(head) and kernels() is not None):
        yield
        return
    before, count = _num_threads, torch.get_num_threads()
    _num_threads = before or count
    torch.set_num_threads(1)
    try:
        with _blas().limit(limits=1):
            yield
    finally:
        torch.set_num_threads(count)
        _num_threads = before


def _run(name: str, batch: Any, *arguments: tuple[Tensor, ...]) -> None:
    """Run a kernel on all parts of a batch, in as many threads as there are."""
    kernel = getattr(kernels(), name)
    arrays = [tuple(value.numpy() for value in values) for values in arguments]
    with _shared()[0], nullcontext() if _num_threads else _blas().limit(limits=1):
        _share(lambda k: kernel(batch._replace(part=k), *arrays), len(batch.parts) - 1)


def _share(work: Callable[[int], object], count: int) -> None:
    """Call ``work`` with all numbers up to ``count``: whichever thread is free takes the next."""
    numbers = iter(range(count))

    def take() -> None:
        for number in numbers:
            work(number)

    workers = min(count, _num_threads or torch.get_num_threads())
    others = [_shared()[1].submit(take) for _ in range(workers - 1)]
    take()
    for other in others:
        other.result()


@cache
def _shared() -> tuple[threading.Lock, ThreadPoolExecutor]:
    """Return a lock, held while kernels run as the BLAS has one number of threads, and a pool."""
    return threading.Lock(), ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="kernels")


if hasattr(os, "register_at_fork"):  # a forked process has none of the threads
    os.register_at_fork(after_in_child=_shared.cache_clear)


@cache
def _blas() -> Any:
    """Return what sets the threads of the BLAS that numba calls, which is scipy's."""
    import scipy.linalg.cython_blas  # noqa: F401  # loads that BLAS
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController().select(user_api="blas")
