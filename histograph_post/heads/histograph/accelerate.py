"""The fast path of the HistoGraph head on a CPU: the only file that knows of one.

:func:`read_out` gives what the head gives, or None, and then the head itself is to be called. It
goes by an *allow* list of options, modules and inputs: a head that gains an option, a module or a
subclass runs as it is written until somebody adds it here. The kernels do what is done for every
node; what is done for a graph (normalising the scores, mixing, the MLP) is left to the head's own
modules, so a new normalisation needs nothing here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ..history import History, TableRows
from ..ragged import Graphs
from .config import HistoGraphConfig
from .head import HistoGraphHead
from .layer_attention import LayerAttention
from .node_attention import NodeAttention

if TYPE_CHECKING:
    from .kernels import Batch

#: The oldest numba that the extra ``fast`` takes.
OLDEST_NUMBA = (0, 62)

#: Set to False to do without the kernels.
enabled = True

#: Graphs with more nodes are left to PyTorch, whose threads share out the work on one graph.
LARGEST_GRAPH = 1024

#: Nodes of a part of a batch: enough for matrix products to be fast.
PART_NODES = 128

#: Options that may have any value: sizes, and what the head's own modules and functions take.
ANY_VALUE = frozenset(
    (
        *("in_dims", "out_dim", "dim", "heads", "layer_heads", "history_layers", "standardize"),
        *("normalization", "eps", "radius", "residual", "mix", "mixing", "mixing_init"),
        *("mixing_delay", "output_norm", "mlp_layers", "dropout", "shortcut"),
    )
)

#: Options that the kernels are made for one value of.
ONE_VALUE = {
    "level": "graph",
    "layer_attention": "learned",
    "node_attention": True,
    "zero_token": False,
    "attention_dropout": 0.0,
    "key_dropout": 0.0,
    "layer_norm": False,
}

#: The modules of a head that the kernels stand for, and those that are called as they are.
REPLACED = ("layer_weights", "node_attention")
CALLED = ("all_layers", "mixing", "output_norm", "mlp", "output", "shortcut")


@cache
def kernels() -> ModuleType | None:
    """Return the kernels; None without a numba that can compile them."""
    try:
        import numba

        if numba.version_info.short < OLDEST_NUMBA or numba.config.DISABLE_JIT:
            return None
        from . import kernels
    except (ImportError, RuntimeError):  # RuntimeError: nowhere to keep the compiled code
        return None
    return kernels


def allows(head: nn.Module) -> bool:
    """Say whether the kernels are made for a head, as it is now, whatever it reads."""
    if type(head) is not HistoGraphHead or not _allows_options(head.options):
        return False
    if head._parameters or head._buffers or {*head._modules} - {*REPLACED, *CALLED, "norm"}:
        return False
    layers, attention, dim = head.layer_weights, head.node_attention, head.dim
    if type(layers) is not LayerAttention or type(attention) is not NodeAttention:
        return False
    expected = {
        "embeddings.0.weight": (dim, head.kept_dims[-1]),
        "embeddings.0.bias": (dim,),
        "encoding": (len(head.kept_dims), dim),
        "query": (dim, dim),
        "key": (dim, dim),
        "in_projection.weight": (3 * dim, dim),
        "in_projection.bias": (3 * dim,),
        "out_projection.weight": (dim, dim),
        "out_projection.bias": (dim,),
    }
    parts = ["", "embeddings", "embeddings.0", "", "in_projection", "out_projection"]
    replaced = [*layers.named_modules(), *attention.named_modules()]
    found = {
        name: tuple(value.shape)
        for module in (layers, attention)
        for values in (module.named_parameters(), module.named_buffers())
        for name, value in values
    }
    called = (head, *(module for _, module in replaced))
    hooked = any(module._forward_hooks or module._forward_pre_hooks for module in called)
    return found == expected and [name for name, _ in replaced] == parts and not hooked


@cache
def _allows_options(options: HistoGraphConfig) -> bool:
    values = asdict(options)
    others = {name: value for name, value in values.items() if name not in ANY_VALUE}
    return others == ONE_VALUE and len(set(options.kept_dims)) == 1


def read_out(
    head: nn.Module, history: History | TableRows, batch: Tensor | None, num_graphs: int | None
) -> Tensor | None:
    """Return the outputs of a batch, ``[num_graphs, out_dim]``; None if that is left to the head.

    Args:
        history: ``[num_nodes, L, D]``, one tensor per layer, or rows of a table.
        batch: Graph of each node, sorted, ``[num_nodes]``; None for a single graph.
        num_graphs: Graphs in the batch, if the last ones may be empty.
    """
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
    graphs = head.check(history, batch, num_graphs)
    if not 0 < graphs.sizes.min(initial=1) <= graphs.sizes.max(initial=0) <= LARGEST_GRAPH:
        return None
    starts = history.starts if isinstance(history, TableRows) else graphs.ptr[:-1]
    return _read(head, table, starts, graphs)


def _read(head: HistoGraphHead, table: Tensor, starts: np.ndarray, graphs: Graphs) -> Tensor:
    """Do what :meth:`HistoGraphHead.forward` does, its reading of nodes in kernels."""
    from .kernels import Batch

    layers, attention, dim = head.layer_weights, head.node_attention, head.dim
    assert attention is not None  # it is allowed
    part = graphs.ptr[:-1] // PART_NODES  # of each graph, by the sizes alone: [num_graphs]
    parts = np.append(np.flatnonzero(np.diff(part, prepend=-1)), len(part))
    batch = Batch(table.numpy(), starts, graphs.ptr, parts)
    embedding, by_head = layers.last_embedding, (layers.heads, dim // layers.heads)
    query = embedding.weight.t() @ layers.query  # [D, dim]
    query_bias = layers.offsets()[-1] @ layers.query  # [dim]
    scores, layer_means = _ScoreLayers.apply(
        batch,
        len(head.kept_dims),
        query.unflatten(1, by_head).transpose(0, 1),  # [heads, D, width]
        query_bias.unflatten(0, by_head),
        (layers.key.t() @ embedding.weight).unflatten(0, by_head),  # [heads, width, D]
    )  # [num_graphs, heads, L] and [num_graphs, L, D]
    last = layer_means[:, -1]  # [num_graphs, D]
    weights = layers.finish(scores, torch.addmm(query_bias, last, query))  # as scores
    by_head = (2 * attention.heads, dim // attention.heads)
    projection = attention.in_projection.weight.split([2 * dim, dim])  # queries and keys; values
    biases = attention.in_projection.bias.split([2 * dim, dim])
    means, summaries = _ReadNodes.apply(
        batch,
        weights,
        layers.constants(weights).flatten(1),  # [num_graphs, dim]
        embedding.weight.unflatten(0, (layers.heads, -1)).transpose(1, 2),  # [heads, D, width]
        projection[0].unflatten(0, by_head).transpose(1, 2),  # [2 * node_heads, dim, size]
        biases[0].unflatten(0, by_head),
    )  # [num_graphs, dim] and [num_graphs, node_heads, dim]
    values = projection[1].unflatten(0, (attention.heads, -1))  # [node_heads, size, dim]
    contexts = torch.einsum("ghd,hsd->ghs", summaries, values).flatten(1) + biases[1]
    attended = attention.out_projection(contexts)  # [num_graphs, dim]
    if head.options.residual:
        attended = attended + means
    base = embedding(last) if head.all_layers is None else head.all_layers(layer_means.flatten(1))
    return head.predict(attended, base, last)


class _ScoreLayers(Function):
    """See :func:`~.kernels.score_layers`."""

    @staticmethod
    def forward(ctx: Any, batch: Batch, layers: int, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        maps = [value.contiguous() for value in inputs]
        (heads, width, channels), nodes, graphs = (
            maps[2].shape,
            int(batch.ptr[-1]),
            len(batch.starts),
        )
        saved = torch.empty(nodes, channels), torch.empty(heads, nodes, width)
        scores, means = torch.empty(graphs, heads, layers), torch.empty(graphs, layers, channels)
        _run("score_layers", batch, ("ScoreMaps", maps), *saved, scores, means)
        ctx.batch = batch
        ctx.save_for_backward(*maps, *saved)
        ctx.mark_non_differentiable(means)
        return scores, means

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        *maps, last, queries = ctx.saved_tensors
        grads = _room_for_grads(ctx.batch, maps)
        arguments = ("ScoreMaps", maps), last, queries, grad.contiguous(), ("ScoreMaps", grads)
        _run("score_layers_backward", ctx.batch, *arguments)
        return None, None, *(grad.sum(0) for grad in grads)


class _ReadNodes(Function):
    """See :func:`~.kernels.read_nodes`."""

    @staticmethod
    def forward(ctx: Any, batch: Batch, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        weights, constant, *maps = (value.contiguous() for value in inputs)
        (heads, channels, _), (both, dim, size) = maps[0].shape, maps[1].shape
        nodes, graphs = int(batch.ptr[-1]), len(weights)
        saved = (
            torch.empty(heads, nodes, channels),
            torch.empty(nodes, dim),
            torch.empty(both, nodes, size),
            torch.empty(both // 2, nodes),
        )
        results = torch.empty(graphs, dim), torch.empty(graphs, both // 2, dim)
        given = weights, constant, ("NodeMaps", maps), ("SavedNodes", saved)
        _run("read_nodes", batch, *given, *results)
        ctx.batch = batch
        ctx.save_for_backward(weights, *maps, *saved)
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        weights, *others = ctx.saved_tensors
        maps, saved = others[:3], others[3:]
        found = torch.empty_like(weights), torch.empty_like(grads[0])  # of weights and constant
        of_maps = _room_for_grads(ctx.batch, maps)
        given = weights, ("NodeMaps", maps), ("SavedNodes", saved)
        contiguous = [grad.contiguous() for grad in grads]
        _run("read_nodes_backward", ctx.batch, *given, *contiguous, *found, ("NodeMaps", of_maps))
        return None, *found, *(grad.sum(0) for grad in of_maps)


def _room_for_grads(batch: Batch, values: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors for the gradients that each part has of its own, ``[parts, ...]``."""
    return [value.new_empty(len(batch.parts) - 1, *value.shape) for value in values]


# --- threads

#: Threads of the kernels inside :func:`threads`; None for as many as PyTorch has.
_num_threads: int | None = None

#: Held while kernels run: the BLAS has one number of threads for the whole process.
_lock = threading.Lock()


@contextmanager
def threads(head: nn.Module) -> Iterator[None]:
    """Give the cores to the kernels, and one thread to PyTorch, while such a head is trained.

    PyTorch's threads keep their cores for milliseconds after each operation, waiting for the next.
    Of a head that is read by the kernels, PyTorch's part is too small for a second thread.
    """
    global _num_threads
    if not (enabled and allows(head) and kernels() is not None):
        yield
        return
    before, _num_threads = _num_threads, torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(_num_threads)
        _num_threads = before


def _run(name: str, batch: Batch, *arguments: Tensor | tuple[str, Sequence[Tensor]]) -> None:
    """Run a kernel on all parts of a batch, in as many threads as there are."""
    module = kernels()
    kernel: Callable[..., None] = getattr(module, name)
    values = [
        value.numpy()
        if isinstance(value, Tensor)
        else getattr(module, value[0])(*(entry.numpy() for entry in value[1]))
        for value in arguments
    ]
    count = len(batch.parts) - 1
    workers = min(count, _num_threads or torch.get_num_threads())
    with _lock, _blas().limit(limits=1):
        if workers == 1:
            kernel(batch, 0, count, *values)
            return
        parts = iter(range(count))  # whoever is free takes the next one

        def work(_: int) -> None:
            for part in parts:
                kernel(batch, part, part + 1, *values)

        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(work, range(workers)))


@cache
def _blas() -> Any:
    """Return what sets the threads of the BLAS that numba calls, which is scipy's."""
    import scipy.linalg.cython_blas  # noqa: F401  # it is there to be found
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController().select(user_api="blas")
