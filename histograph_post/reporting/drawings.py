"""Drawings of graphs and molecules: nodes coloured by the attention they receive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import shortest_path

from ..caches import Cache, CachedGraph
from ..utils.text import plural
from .figures import INK, MUTED, PAPER, RIVAL, Chart, Figure, Picture
from .molecules import Molecule, MoleculePicture
from .outcomes import MAX_DRAWN_NODES, Example, row_title
from .page import Section

if TYPE_CHECKING:
    from matplotlib.axes import Axes


# --- the colour scale of attention, the same in all drawings of all reports, and its legend

#: Ends of the scale, in multiples of a graph's mean attention; colours are clipped beyond them.
#: Logarithmic: one node may have eleven times the mean, while most differ by less than two.
LOWEST, HIGHEST = 1 / 4, 8.0

#: Opacity at both ends. The letters of atoms are drawn on the colour and must stay readable.
_FAINT, _FULL = 0.04, 0.75


def attention_opacities(shares: np.ndarray) -> np.ndarray:
    """Return the opacity for positions on the scale, 0 to 1: ``[num_nodes]``."""
    return _FAINT + (_FULL - _FAINT) * shares


def attention_shares(received: np.ndarray) -> np.ndarray:
    """Return the position of each node of a graph on the scale, 0 to 1: ``[num_nodes]``.

    Args:
        received: The attention that each node of the *whole* graph receives, ``[num_nodes]``.
    """
    times = received / max(float(received.mean()), 1e-12)
    within = np.log2(np.clip(times, LOWEST, HIGHEST) / LOWEST)
    return np.asarray(within / np.log2(HIGHEST / LOWEST))


def scale_figure() -> Figure:
    """Draw the scale: a node at every doubling, as in the drawings."""
    ticks = {LOWEST: "¼ or less", 0.5: "½", 1.0: "1", 2.0: "2", 4.0: "4", HIGHEST: "8 or more"}

    def draw(axes: Axes) -> None:
        from matplotlib.colors import to_rgba

        places = np.arange(len(ticks))
        shares = places / places[-1]  # doublings are equal steps
        axes.scatter(
            places,
            np.zeros(len(ticks)),
            s=90,
            facecolors=[to_rgba(RIVAL, opacity) for opacity in attention_opacities(shares)],
            edgecolors=INK,
            linewidths=0.7,
        )
        for place, text in zip(places, ticks.values(), strict=True):
            axes.text(float(place), -0.9, text, ha="center", va="top", color=INK)
        axes.set_xlim(-0.6, len(ticks) - 0.4)
        axes.set_ylim(-2.2, 0.8)
        axes.set_axis_off()

    return Figure(
        name="attention-scale",
        title="Attention, times the mean of the graph",
        caption="",
        alternative="Scale of colours from a quarter of the mean attention or less, hardly "
        "coloured, to eight times the mean or more, full orange; each doubling is an equal step.",
        picture=Chart(draw, size=(4.2, 0.55)),
    )


# --- where to draw the nodes of a small graph

#: Steps of stress majorisation: more make no visible difference for a small graph.
_STEPS = 200


def layout(num_nodes: int, edges: np.ndarray) -> np.ndarray:
    """Place nodes so that their distances are like those in the graph: ``[num_nodes, 2]``.

    Classical scaling, improved by stress majorisation; the same graph always looks the same.
    Disconnected components stand side by side.

    Args:
        num_nodes: Number of nodes.
        edges: Pairs of nodes, ``[2, num_edges]``.
    """
    if num_nodes < 2:
        return np.zeros((num_nodes, 2))
    ones = np.ones(edges.shape[1])
    adjacency = coo_matrix((ones, (edges[0], edges[1])), shape=(num_nodes, num_nodes))
    distances = shortest_path(adjacency.tocsr(), directed=False, unweighted=True)
    reached = np.isfinite(distances)
    distances = np.where(reached, distances, distances[reached].max() + 1.5)
    places = _classical_scaling(distances)
    weights = 1 / np.maximum(distances, 1.0) ** 2
    np.fill_diagonal(weights, 0)
    inverse = np.linalg.pinv(np.diag(weights.sum(1)) - weights)
    for _ in range(_STEPS):
        gaps = np.linalg.norm(places[:, None] - places[None], axis=-1)
        pulls = weights * distances / np.maximum(gaps, 1e-9)
        np.fill_diagonal(pulls, 0)
        places = inverse @ (np.diag(pulls.sum(1)) - pulls) @ places
    _, _, axes = np.linalg.svd(places - places.mean(0), full_matrices=False)
    return places @ axes.T  # widest along x, as frames are


def _classical_scaling(distances: np.ndarray) -> np.ndarray:
    count = len(distances)
    centred = np.eye(count) - 1 / count
    values, vectors = np.linalg.eigh(-0.5 * centred @ distances**2 @ centred)
    places = vectors[:, -2:] * np.sqrt(np.maximum(values[-2:], 0))
    # Structurally equivalent nodes would start on one spot and never part.
    return places + 1e-3 * np.random.default_rng(0).standard_normal(places.shape)


#: Nodes that are drawn around a node or a pair.
_NEIGHBOURHOOD = 30


@dataclass(frozen=True)
class Drawn:
    """The part of a graph that is drawn."""

    #: Which nodes of the graph, ``[drawn]``.
    nodes: np.ndarray
    #: Pairs of drawn nodes, each once, ``[2, edges]``.
    edges: np.ndarray
    #: Drawn nodes that the prediction is about.
    marked: tuple[int, ...]


def example_figure(
    example: Example, cache: Cache, received: np.ndarray | None, molecule: Molecule | None
) -> Figure:
    """Draw the graph of a test row, or the neighbourhood of its node or link.

    Args:
        received: The attention that each node of the graph receives, ``[num_nodes]``; None if
            unknown.
        molecule: Of the graph, where it is one.
    """
    graph = cache[example.graph]
    num_nodes = int(cache.num_nodes[example.graph])
    focus = _focus(example, graph, cache)
    drawn = _part(graph, num_nodes, focus)
    opacities = None  # [drawn]
    if received is not None:
        opacities = attention_opacities(attention_shares(received)[drawn.nodes])
    picture: Picture
    if molecule is not None:
        picture = MoleculePicture(molecule.rdkit, opacities)
    else:
        picture = Chart(lambda axes: _draw(axes, drawn, opacities), size=(3.0, 2.1))
    size = plural(num_nodes, "atom" if molecule is not None else "node")
    if len(drawn.nodes) < num_nodes:
        size = f"{len(drawn.nodes)} of {size}"
    most = ""
    if received is not None:
        times = float(received[drawn.nodes].max()) * num_nodes
        most = f"; at most {times:.1f} times the mean attention"
    name = molecule.name if molecule is not None else ""
    title = name or row_title(example.name, cache.manifest.layout.level, cache.num_graphs)
    where = f"; row {example.name}" if name and name != example.name else ""
    return Figure(
        name=f"example-{example.rank}-{example.place}",
        title=f"{example.rank.capitalize()} {example.place}: {title}",
        caption=f"{example.text}; {size}{most}{where}.",
        alternative=f"Drawing of {'molecule' if molecule is not None else 'graph'} {title} "
        f"with {size}, {example.text}{most}.",
        picture=picture,
    )


def _focus(example: Example, graph: CachedGraph, cache: Cache) -> tuple[int, ...]:
    """Return the nodes a row is about: none for a graph, one for a node, two for a link."""
    level = cache.manifest.layout.level
    within = example.row - int(cache.label_ptr[example.graph])
    if level == "graph":
        return ()
    if level == "node":
        return (within,)
    assert graph.edge_label_index is not None  # of links
    return tuple(graph.edge_label_index[:, within].tolist())


def _part(graph: CachedGraph, num_nodes: int, focus: tuple[int, ...]) -> Drawn:
    """Return a small graph whole, or else the neighbourhood of the row's node or link."""
    edges = np.empty((2, 0), int) if graph.edge_index is None else graph.edge_index.numpy()
    nodes = np.arange(num_nodes)
    if focus and num_nodes > MAX_DRAWN_NODES:
        nodes = neighbourhood(edges, focus, _NEIGHBOURHOOD)
    kept = np.isin(edges, nodes).all(axis=0) & (edges[0] != edges[1])
    places = np.searchsorted(nodes, edges[:, kept])  # [2, edges]
    return Drawn(
        nodes=nodes,
        edges=np.unique(np.sort(places, axis=0), axis=1),
        marked=tuple(int(np.searchsorted(nodes, node)) for node in focus),
    )


def neighbourhood(edges: np.ndarray, focus: Sequence[int], size: int) -> np.ndarray:
    """Return at most ``size`` nodes nearest to some nodes, breadth first, in ascending order."""
    found = list(dict.fromkeys(focus))
    seen = set(found)
    for node in found:  # grows while it is walked
        around = np.concatenate([edges[1, edges[0] == node], edges[0, edges[1] == node]])
        for other in np.unique(around).tolist():
            if len(found) >= size:
                return np.sort(found)
            if other not in seen:
                seen.add(other)
                found.append(other)
    return np.sort(found)


def _draw(axes: Axes, drawn: Drawn, opacities: np.ndarray | None) -> None:
    from matplotlib.collections import LineCollection
    from matplotlib.colors import to_rgba

    places = layout(len(drawn.nodes), drawn.edges)  # [drawn, 2]
    axes.set_axis_off()
    axes.set_aspect("equal")
    axes.margins(0.1)
    axes.add_collection(
        LineCollection(places[drawn.edges.T], colors=MUTED, linewidths=0.8, zorder=1)
    )
    if len(drawn.marked) == 2:
        axes.plot(*places[list(drawn.marked)].T, color=INK, linestyle=":", linewidth=1.4, zorder=1)
    size = 90.0 if len(drawn.nodes) <= 20 else 45.0
    ring = [1.8 if at in drawn.marked else 0.7 for at in range(len(drawn.nodes))]
    # Paper first: edges must not show through nodes.
    x, y = places.T
    axes.scatter(x, y, s=size, color=PAPER, linewidths=0, zorder=2, clip_on=False)
    if opacities is None:
        opacities = attention_opacities(np.zeros(len(drawn.nodes)))
    axes.scatter(
        x,
        y,
        s=size,
        facecolors=[to_rgba(RIVAL, opacity) for opacity in opacities],
        edgecolors=INK,
        linewidths=ring,
        zorder=3,
        clip_on=False,
    )


def examples_section(figures: Sequence[Figure], *, attended: bool) -> Section:
    """Return the graphs that were predicted best and worst."""
    text = "The best and the worst predictions among the test rows of the best head's fold."
    if attended:
        text += " Colour shows how much attention this head pays to a node, on one scale for all."
    return Section(
        "examples",
        "Best and worst predictions",
        text=text if figures else "",
        figures=figures,
        legend=scale_figure() if figures and attended else None,
        small=True,
    )
