"""The fast path of the HistoGraph head on a CPU, and the only file that knows of one.

The head asks :func:`read_graphs` before it reads graphs itself, and does that if it gets None. The
kernels run only what they are known to compute: options, modules and inputs stand on an *allow*
list, so that a head with a new option, a new module or a class of its own runs as it is written.
What is done per graph and not per node (normalising the scores of layers, mixing, the MLP) is left
to the head's own functions and modules, and may be anything.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import fields
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from . import layer_weights
from .history import History, TableRows
from .layer_weights import LayerWeights
from .node_attention import NodeAttention
from .ragged import Graphs

if TYPE_CHECKING:
    from .histograph import HistoGraphHead
    from .histograph_config import HistoGraphConfig
    from .kernels import Batch

#: The oldest numba that the extra takes.
OLDEST = (0, 62)

#: Set to False to do without the kernels.
enabled = True

#: Graphs with more nodes are left to PyTorch, which shares out the work on a single graph.
LARGEST_GRAPH = 1024

#: Nodes of a part of a batch, about: enough for fast products, few enough for a processor's cache.
PART_NODES = 128

# fmt: off
#: Options that may have any value: the kernels take it, or a module that they leave alone does.
ANY_VALUE = {
    "in_dims", "out_dim", "dim", "heads", "layer_heads", "standardize", "history_layers",
    "normalization", "eps", "radius", "residual", "mix", "mixing", "mixing_init", "mixing_delay",
    "output_norm", "mlp_layers", "dropout", "shortcut",
}
#: Options with one value that the kernels are made for.
ONE_VALUE = {
    "level": "graph", "layer_attention": "learned", "node_attention": True, "zero_token": False,
    "attention_dropout": 0.0, "key_dropout": 0.0, "layer_norm": False,
}
#: All that a head may consist of. The kernels stand for the two modules named first.
MODULES = {
    "layer_weights", "node_attention", "standardizer", "norm", "all_layers", "mixing",
    "output_norm", "mlp", "output", "shortcut",
}
# fmt: on


class GraphReadout(NamedTuple):
    """What is read of each graph."""

    #: What the attention gives, with its residual, averaged over nodes, ``[num_graphs, dim]``.
    attended: Tensor
    #: Every layer averaged over nodes, ``[num_graphs, L, D]``.
    layer_means: Tensor


# --- what the kernels are made for ---------------------------------------------------------------


@cache
def kernels() -> ModuleType | None:
    """Return the kernels; None without a numba that works with all else that is installed."""
    try:
        import numba

        if numba.version_info.short < OLDEST or numba.config.DISABLE_JIT:
            return None
        from . import kernels
    except (ImportError, RuntimeError):  # also if there is no folder to keep the code in
        return None
    return kernels


def note() -> str | None:
    """Say what a user may want to know before a head is trained on a CPU, if anything."""
    module = kernels()
    if module is None:
        return "pip install 'histograph-post[fast]' makes this head train about twice as fast"
    kept = Path(module.read_nodes_backward.stats.cache_path)
    if any(kept.glob("kernels.read_nodes_backward-*.nbi")):
        return None
    return "compiling the head's kernels, which takes about half a minute, once"


def fits(head: nn.Module) -> bool:
    """Say whether a head is one that the kernels are made for, whatever it reads."""
    from .histograph import HistoGraphHead

    if type(head) is not HistoGraphHead or not _allows(head.options):
        return False
    layers, attention = head.layer_weights, head.node_attention
    dim, kept = head.options.dim, head.options.kept_dims
    return (
        type(layers) is LayerWeights
        and type(attention) is NodeAttention
        and MODULES.issuperset(_members(head))
        and _members(layers) == ["query", "key", "encoding", "embeddings"]
        and _members(layers.embeddings) == ["0"]
        and _members(attention) == ["in_projection", "out_projection"]
        and type(layers.embeddings[0]) is type(attention.in_projection) is nn.Linear
        and layers.embeddings[0].weight.shape == (dim, kept[-1])
        and layers.encoding.shape == (len(kept), dim)
        and layers.query.shape == layers.key.shape == (dim, dim)
        and attention.in_projection.weight.shape == (3 * dim, dim)
        and {value.dtype for value in head.parameters()} == {torch.float32}
    )


@cache
def _allows(options: HistoGraphConfig) -> bool:
    """Whether every option has an allowed value."""
    values = {field.name: getattr(options, field.name) for field in fields(options)}
    return len(set(options.kept_dims)) == 1 and all(
        name in ANY_VALUE or (name in ONE_VALUE and value == ONE_VALUE[name])
        for name, value in values.items()
    )


def _members(module: nn.Module) -> list[str]:
    """Return the names of all that a module consists of."""
    return [*module._parameters, *module._buffers, *module._modules]


def _can_read(rows: TableRows) -> bool:
    """Whether a history is one that the kernels are made for."""
    table, sizes = rows.table, rows.sizes
    return (
        table.dtype == torch.float32
        and table.device.type == "cpu"
        and table.is_contiguous()
        and not table.requires_grad
        and len(sizes) > 0
        and 0 < sizes.min() <= sizes.max() <= LARGEST_GRAPH
    )


# --- reading graphs ------------------------------------------------------------------------------


def read_graphs(
    head: HistoGraphHead, history: History | TableRows, graphs: Graphs
) -> GraphReadout | None:
    """Read every graph of a batch; None if that is left to PyTorch.

    Args:
        head: Any head.
        history: Standardised: ``[num_nodes, L, D]``, one tensor per layer, or rows of a table.
        graphs: Which graph each node belongs to.
    """
    if isinstance(history, Tensor):
        history = TableRows(history, graphs.ptr[:-1], graphs.sizes)
    if not enabled or torch.compiler.is_compiling() or kernels() is None:
        return None
    if not isinstance(history, TableRows) or not _can_read(history) or not fits(head):
        return None
    return _read(head, history)


def _read(head: HistoGraphHead, rows: TableRows) -> GraphReadout:
    """Read graphs with the kernels: the one place that knows what a head computes with."""
    layers, attention = head.layer_weights, head.node_attention
    assert attention is not None  # it fits
    embedding, projection = layers.last_embedding, attention.in_projection
    heads, node_heads, dim = layers.heads, attention.heads, layers.dim
    graphs, nodes, channels = len(rows.sizes), int(rows.ptr[-1]), embedding.in_features
    batch, empty = _batch(rows), torch.empty
    offsets = embedding.bias + layers.encoding  # [L, dim]
    both = torch.cat([layers.query, layers.key], dim=1)  # [dim, 2 * dim]
    scores, layer_means = _Kernel.apply(
        "score_layers",
        batch,
        (empty(nodes, channels), empty(heads, nodes, dim // heads)),
        (empty(graphs, heads, len(offsets)), empty(graphs, len(offsets), channels)),
        *(both.t() @ embedding.weight, offsets @ both),  # [2 * dim, D] and [L, 2 * dim]
    )
    weights = layer_weights.normalize(
        scores, layers.normalization, eps=layers.eps, radius=layers.radius
    )  # [num_graphs, heads, L]
    query_key = empty(2 * node_heads, nodes, dim // node_heads)
    means, contexts = _Kernel.apply(
        "read_nodes",
        batch,
        (empty(nodes, dim), query_key, empty(node_heads, nodes), empty(graphs, node_heads, dim)),
        (empty(graphs, dim), empty(graphs, dim)),
        *(weights, embedding.weight, offsets, projection.weight, projection.bias),
    )
    attended = attention.out_projection(contexts)  # [num_graphs, dim]
    return GraphReadout(attended + means if head.options.residual else attended, layer_means)


def _batch(rows: TableRows) -> Batch:
    """Group the graphs of a batch into parts, by their sizes alone."""
    from .kernels import Batch

    number = rows.ptr[:-1] // PART_NODES  # [num_graphs]
    later = np.flatnonzero(number[1:] > number[:-1]) + 1
    parts = np.concatenate([[0], later, [len(number)]])
    most = int(np.diff(rows.ptr[parts]).max())
    return Batch(rows.table.numpy(), rows.starts, rows.ptr, parts, most, 0, len(parts) - 1)


class _Kernel(Function):
    """A kernel and its backward as an operation of PyTorch.

    Called with the kernel's name, the batch, and tensors as the kernel's docstring has them: those
    that it saves, those that it returns, and its inputs.
    """

    @staticmethod
    def forward(
        ctx: Any, name: str, batch: Batch, saved: Any, results: Any, *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        inputs = tuple(value.contiguous() for value in inputs)
        _run(name, batch, inputs, saved, results)
        ctx.name, ctx.batch, ctx.saved = name, batch, saved
        ctx.save_for_backward(*inputs)
        if name == "score_layers":
            ctx.mark_non_differentiable(results[1])  # the means of layers
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_results: Tensor) -> tuple[Tensor | None, ...]:
        inputs, parts = ctx.saved_tensors, len(ctx.batch.parts) - 1
        grads = [value.new_empty(parts, *value.shape) for value in inputs]
        whole = int(ctx.name == "read_nodes")  # its first input, the weights, is not of all parts
        grads[:whole] = [torch.empty_like(value) for value in inputs[:whole]]
        given = tuple(grad.contiguous() for grad in grad_results)
        _run(f"{ctx.name}_backward", ctx.batch, inputs, ctx.saved, given, tuple(grads))
        return None, None, None, None, *grads[:whole], *(grad.sum(0) for grad in grads[whole:])


# --- threads -------------------------------------------------------------------------------------

#: Threads of the kernels inside :func:`threads`; None for as many as PyTorch has.
_num_threads: int | None = None

#: Held while a kernel runs, because the BLAS has one number of threads for all of the process.
_lock = threading.Lock()


@contextmanager
def threads() -> Iterator[None]:
    """Give the cores to the kernels, and one thread to PyTorch, while a head is trained.

    PyTorch's threads keep their cores for milliseconds after an operation, waiting for the next
    one. What is left to it beside the kernels is too little for a second thread.
    """
    global _num_threads
    before, count = _num_threads, torch.get_num_threads()
    _num_threads = before or count
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(count)
        _num_threads = before


def _run(name: str, batch: Batch, *arguments: tuple[Tensor, ...]) -> None:
    """Run a kernel on all parts of a batch."""
    kernel = getattr(kernels(), name)
    arrays = [tuple(value.numpy() for value in values) for values in arguments]
    workers = min(batch.stop, _num_threads or torch.get_num_threads())
    with _lock, _blas().limit(limits=1):
        if workers == 1:
            kernel(batch, *arrays)
            return
        parts = iter(range(batch.stop))  # a thread that is free takes the next one

        def work() -> None:
            for part in parts:
                kernel(batch._replace(first=part, stop=part + 1), *arrays)

        others = [_pool().submit(work) for _ in range(workers - 1)]
        work()
        for other in others:
            other.result()


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="kernels")


@cache
def _blas() -> Any:
    """Return what sets the threads of the BLAS that numba calls, which is scipy's."""
    import scipy.linalg.cython_blas  # noqa: F401  # it has to be loaded to be found
    from threadpoolctl import ThreadpoolController  # type: ignore[import-untyped]

    return ThreadpoolController().select(user_api="blas")


def _forget_threads() -> None:
    """Start anew in a process that was forked: it has none of the threads."""
    global _lock
    _lock = threading.Lock()
    _pool.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads)
