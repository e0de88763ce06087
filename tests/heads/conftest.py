"""The paper's algorithm, transcribed line by line, one graph at a time: the oracle of the head."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from histograph_post.heads.histograph import HistoGraphHead
from histograph_post.heads.ragged import Graphs

Oracle = Callable[..., Tensor]


def _positions(num_layers: int, dim: int) -> Tensor:
    """Sinusoidal encoding, entry by entry."""
    encoding = torch.zeros(num_layers, dim, dtype=torch.float64)
    for layer in range(num_layers):
        for channel in range(dim):
            angle = layer / 10000 ** ((channel - channel % 2) / dim)
            encoding[layer, channel] = math.sin(angle) if channel % 2 == 0 else math.cos(angle)
    return encoding


def _signed(scores: Tensor, options: Any) -> Tensor:
    total = scores.sum()
    if abs(total) < options.eps:
        total = scores.new_tensor(options.eps if total >= 0 else -options.eps)
    return scores / total


def _bounded(scores: Tensor, options: Any) -> Tensor:
    deviation = scores - scores.mean()
    return 1 / len(scores) + options.radius * deviation / torch.sqrt(1 + deviation.dot(deviation))


#: The literal form of every normalisation: layer weights from scores, both ``[L]``.
ORACLES: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "bounded": _bounded,
    "signed": _signed,
    "softmax": lambda scores, options: scores.exp() / scores.exp().sum(),
    "none": lambda scores, options: scores,
}


def _normalize(scores: Tensor, options: Any) -> Tensor:
    if options.normalization not in ORACLES:
        lacks = f"{__file__}: ORACLES has no literal form of {options.normalization!r}"
        pytest.fail(lacks, pytrace=False)
    return ORACLES[options.normalization](scores, options)


def _layer_weights(head: Any, embedded: Tensor) -> Tensor:
    """Layer weights ``[layer_heads, L]`` of one graph, ``embedded [num_nodes, L, dim]``."""
    options, module = head.options, head.layer_weights
    num_layers = embedded.size(1)
    size = options.dim // options.layer_heads
    weights = []
    for part in range(options.layer_heads):
        if options.layer_attention == "mean":
            weights.append(torch.full((num_layers,), 1 / num_layers, dtype=embedded.dtype))
        elif options.layer_attention == "last":
            weights.append(torch.eye(num_layers)[-1])
        elif options.layer_attention == "random":
            weights.append(_normalize(module.random_scores[part], options))
        else:
            channels = slice(part * size, (part + 1) * size)
            query = (embedded[:, -1] @ module.query)[:, channels]  # [num_nodes, size]
            key = (embedded @ module.key)[..., channels]  # [num_nodes, L, size]
            scores = torch.einsum("nd,nld->nl", query, key) / math.sqrt(size)
            weights.append(_normalize(scores.mean(0), options))
    return torch.stack(weights).to(embedded.dtype)


def _node_attention(head: Any, nodes: Tensor) -> Tensor:
    """PyTorch's own multi-head attention with the weights of the head, ``[num_nodes, dim]``."""
    module = head.node_attention
    attended, _ = functional.multi_head_attention_forward(
        *[nodes.unsqueeze(1)] * 3,
        embed_dim_to_check=head.options.dim,
        num_heads=head.options.heads,
        in_proj_weight=module.in_projection.weight,
        in_proj_bias=module.in_projection.bias,
        bias_k=None,
        bias_v=None,
        add_zero_attn=head.options.zero_token,
        dropout_p=0.0,
        out_proj_weight=module.out_projection.weight,
        out_proj_bias=module.out_projection.bias,
    )
    return attended.squeeze(1)


def _attend_to_keys(head: Any, nodes: Tensor, keys_of: Callable[[int], Any]) -> Tensor:
    """Attention of every node to keys of its own, given as rows ``[keys, dim]`` and counts."""
    module, options = head.node_attention, head.options
    weights, biases = module.in_projection.weight.chunk(3), module.in_projection.bias.chunk(3)
    found = []
    for node in range(len(nodes)):
        rows, counts = keys_of(node)
        query = nodes[node] @ weights[0].t() + biases[0]
        key, value = rows @ weights[1].t() + biases[1], rows @ weights[2].t() + biases[2]
        if options.zero_token:
            zero = torch.zeros_like(key[:1])
            key, value = torch.cat([key, zero]), torch.cat([value, zero])
            counts = [*counts, 1.0]
        size = options.dim // options.heads
        parts = []
        for part in range(options.heads):
            channels = slice(part * size, (part + 1) * size)
            scores = key[:, channels] @ query[channels] / math.sqrt(size)
            shares = scores.exp() * scores.new_tensor(counts)
            parts.append((shares / shares.sum()) @ value[:, channels])
        found.append(module.out_projection(torch.cat(parts)))
    return torch.stack(found)


def _neighbors(nodes: Tensor, edges: Tensor) -> Callable[[int], Any]:
    """A node attends to those with an edge to it, and to itself."""

    def keys_of(node: int) -> Any:
        sources = [int(u) for u, v in edges.t().tolist() if v == node and u != node]
        return nodes[[*sources, node]], [1.0] * (len(sources) + 1)

    return keys_of


def _landmarks(head: Any, nodes: Tensor, layers: Sequence[Tensor]) -> Callable[[int], Any]:
    """All nodes attend to the means of groups, which count as often as they have nodes."""
    rows = torch.cat([layer.detach().to(nodes.dtype) for layer in layers], dim=-1)
    above = (rows - rows.mean(0)) @ head.landmarks.directions > 0  # [num_nodes, planes]
    members: dict[tuple[bool, ...], list[int]] = {}
    for node, sides in enumerate(above.tolist()):
        members.setdefault(tuple(sides), []).append(node)
    means = torch.stack([nodes[group].mean(0) for group in members.values()])
    return lambda node: (means, [float(len(group)) for group in members.values()])


def _attended(head: Any, nodes: Tensor, layers: Sequence[Tensor], edges: Tensor) -> Tensor:
    kind = head.options.node_attention
    if kind == "neighbors":
        return _attend_to_keys(head, nodes, _neighbors(nodes, edges))
    if kind == "landmark" or (kind == "auto" and len(nodes) > head.landmarks.larger_than):
        return _attend_to_keys(head, nodes, _landmarks(head, nodes, layers))
    assert kind in ("auto", "exact"), f"no oracle for {kind}"
    return _node_attention(head, nodes)


def _one_graph(head: Any, layers: Sequence[Tensor], edges: Tensor) -> Tensor:
    """Output of one graph ``[out_dim]``, or of its nodes ``[num_nodes, ...]``."""
    options, module = head.options, head.layer_weights
    last = layers[-1]
    layers = layers[-len(options.kept_dims) :]
    widths = list(dict.fromkeys(options.kept_dims))
    projected = torch.stack(
        [module.embeddings[widths.index(layer.size(-1))](layer) for layer in layers], dim=1
    )  # [num_nodes, L, dim]
    embedded = projected + _positions(len(layers), options.dim).to(projected.dtype)
    weights = _layer_weights(head, embedded)  # [layer_heads, L]
    size = options.dim // options.layer_heads
    nodes = torch.cat(
        [
            sum(
                weights[part, layer] * embedded[:, layer, part * size : (part + 1) * size]
                for layer in range(len(layers))
            )
            for part in range(options.layer_heads)
        ],
        dim=-1,
    )  # [num_nodes, dim]
    attended = nodes
    if options.node_attention != "none":
        attended = _attended(head, nodes, layers, edges)
        if options.residual:
            attended = attended + nodes
    if options.layer_norm:
        attended = head.norm(attended)
    base = projected[:, -1]
    if head.statistics is not None:
        described = _statistics(head, torch.cat(list(layers), dim=-1))
        base = head.all_layers(described).expand(len(last), -1)
    elif options.mix != "last":
        order = [i for width in widths for i, own in enumerate(options.kept_dims) if own == width]
        base = head.all_layers(torch.cat([layers[i] for i in order], dim=-1))
    if options.level == "graph":
        attended, base, last = attended.mean(0), base.mean(0), last.mean(0)
    share = head.mixing.coefficient
    mixed = share * attended + (1 - share) * base
    if options.output_norm:
        centred = mixed - mixed.mean(-1, keepdim=True)
        deviation = torch.sqrt(centred.square().mean(-1, keepdim=True) + head.output_norm.eps)
        mixed = centred / deviation * head.output_norm.weight + head.output_norm.bias
    if options.level == "link":
        return mixed
    output = head.output(head.mlp(mixed))
    output = output + head.shortcut(last) if options.shortcut else output
    if not options.solved or head.training:
        return output
    return (1 - head.probe_share) * output + head.probe_share * head.probe(described)


def _statistics(head: Any, rows: Tensor) -> Tensor:
    """What describes a graph with all layers side by side, ``rows [num_nodes, sum(D_l)]``."""
    size = rows.new_tensor([float(len(rows))])
    values = {
        "mean": rows.mean(0),
        "max": rows.max(0).values,
        "deviation": rows.std(0, correction=0) if len(rows) > 1 else torch.zeros_like(rows[0]),
        "sum": rows.sum(0),
        "size": torch.cat([size, size.log()]),
    }
    described = torch.cat([values[name] for name in head.options.statistics.split("+")])
    return (described - head.statistics.scaling.mean) / head.statistics.scaling.scale


@pytest.fixture(scope="session")
def literal_histograph() -> Oracle:
    """``literal_histograph(head, layers, sizes)``: the head's output by the paper's algorithm.

    Edges ``[2, num_edges]`` of the batch may follow, for attention along them.
    """

    def run(
        head: Any, layers: Sequence[Tensor], sizes: Sequence[int], edges: Tensor | None = None
    ) -> Tensor:
        parts = [layer.split(list(sizes)) for layer in layers]
        edges = torch.empty(2, 0, dtype=torch.long) if edges is None else edges
        outputs, first = [], 0
        for size, graph in zip(sizes, zip(*parts, strict=True), strict=True):
            inside = (edges[0] >= first) & (edges[0] < first + size)
            outputs.append(_one_graph(head, graph, edges[:, inside] - first))
            first += size
        return torch.stack(outputs) if head.options.level == "graph" else torch.cat(outputs)

    return run


def graphs_of(sizes: Sequence[int]) -> Graphs:
    """Graphs of these sizes."""
    index = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes, dtype=torch.long))
    return Graphs.from_batch(index, len(index), len(sizes), index.device)


class Toy:
    """Small histories and heads, all in double precision."""

    @staticmethod
    def batch(sizes: Sequence[int]) -> Tensor:
        return torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))

    @staticmethod
    def edges(sizes: Sequence[int]) -> Tensor:
        """Edges of every graph, with one of a node to itself and one that is there twice."""
        random, found, first = torch.Generator().manual_seed(3), [], 0
        for size in sizes:
            pairs = torch.randint(size, (2, 3 * size), generator=random)
            loop = pairs[:, :1].clone().fill_(size - 1)
            found.append(torch.cat([pairs, pairs[:, :1], loop], dim=1) + first)
            first += size
        return torch.cat(found, dim=1)  # [2, num_edges]

    @staticmethod
    def history(widths: Sequence[int], sizes: Sequence[int], seed: int = 0) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return [
            torch.randn(sum(sizes), width, generator=generator, dtype=torch.float64) * (layer + 1)
            for layer, width in enumerate(widths)
        ]

    @staticmethod
    def head(
        widths: Sequence[int], out_dim: int = 3, *, seed: int = 0, **options: Any
    ) -> HistoGraphHead:
        torch.manual_seed(seed)
        module = HistoGraphHead(
            widths, out_dim, **{"dim": 8, "heads": 2, "layer_heads": 1, "mix": "last", **options}
        ).double()
        if module.options.layer_attention == "learned":
            torch.nn.init.normal_(module.layer_weights.query)  # some start from equal weights
        return module.eval()


@pytest.fixture(scope="session")
def toy() -> type[Toy]:
    """Makers of small histories and heads."""
    return Toy
