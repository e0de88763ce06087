"""Layers with several tensors, drawn at random: in which order they come, and what they are.

Node states, coordinates, a first state and edge states go in and out in any order, by position, by
keyword, in a tuple or a dictionary. The readout consumes node states alone, so these are the
history.
"""

from __future__ import annotations

import functools
import random

import torch
from torch import nn
from torch_geometric.nn import MessagePassing, global_add_pool, global_mean_pool

from .branches import mlp
from .graphs import EDGE_FEATURES, FEATURES, WIDTH
from .registry import add, keep
from .states import sum_to_nodes

FAMILY = "drawn at random, several tensors"

#: The ones the tests look at.
SEEDS = range(10)

STYLES = ("positions", "keywords", "tuple", "dictionary")


class Update(nn.Module):
    """New states of nodes and, if they are there, of coordinates and edges."""

    def __init__(self, tensors, updates_pos):
        super().__init__()
        self.tensors, self.updates_pos = tensors, updates_pos
        width = 2 * WIDTH + ("pos" in tensors) + WIDTH * ("e" in tensors)
        self.edge, self.node = mlp(width, WIDTH, WIDTH), mlp(2 * WIDTH, WIDTH, WIDTH)
        self.move, self.edges = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, WIDTH)

    def new(self, state, edge_index, gather):
        h = state["h"]
        row, col = edge_index
        parts = [h[row], h[col]]
        if "pos" in state:
            apart = state["pos"][row] - state["pos"][col]  # [num_edges, 3]
            parts.append(apart.pow(2).sum(1, keepdim=True))
        if "e" in state:
            parts.append(state["e"])
        messages = torch.tanh(self.edge(torch.cat(parts, dim=1)))  # [num_edges, width]
        gathered = gather(messages, col, len(h))
        first = state.get("h0", h)
        made = {"h": first + torch.tanh(self.node(torch.cat([h, gathered], dim=1)))}
        if "pos" in state:
            moved = state["pos"]
            if self.updates_pos:
                moved = moved + gather(apart * self.move(messages), col, len(h)) / 9
            made["pos"] = moved
        if "e" in state:
            made["e"] = state["e"] + torch.tanh(self.edges(messages))
        if "h0" in state:
            made["h0"] = state["h0"]
        return made


class Layer(Update):
    """Takes and returns its tensors in the order and manner it was made with."""

    def __init__(self, tensors, updates_pos, order, out_order, style):
        super().__init__(tensors, updates_pos)
        self.order, self.out_order, self.style = order, out_order, style

    def forward(self, *args, **named):
        if self.style == "keywords":
            state = named
        elif self.style == "dictionary":
            state = dict(args[0])
        else:
            state = dict(zip(self.order, args[0] if self.style == "tuple" else args, strict=True))
        edge_index = state.pop("edge_index")
        made = self.new(state, edge_index, sum_to_nodes)
        if self.style == "dictionary":
            return made
        return tuple(made[name] for name in self.out_order)


class PygLayer(Layer, MessagePassing):
    """The same as one of PyG's."""

    def __init__(self, *args):
        MessagePassing.__init__(self)
        Layer.__init__(self, *args)


class DrawnStates(nn.Module):
    def __init__(self, seed):
        super().__init__()
        source = random.Random(seed)
        tensors = ["h", *(name for name in ("pos", "e", "h0") if source.random() < 0.6)]
        order, out_order = [*tensors, "edge_index"], list(tensors)
        source.shuffle(order)
        source.shuffle(out_order)
        self.tensors, self.order, self.out_order = tensors, order, out_order
        self.style = source.choice(STYLES)
        updates_pos, by_pyg = source.random() < 0.6, source.random() < 0.5
        self.per_node = source.random() < 0.3
        kind = PygLayer if by_pyg else Layer
        if by_pyg and self.style == "dictionary":
            kind = Layer
        self.recipe = f"{kind.__name__}({', '.join(order)}) by {self.style}"
        self.embed, self.edges = nn.Linear(FEATURES, WIDTH), nn.Linear(EDGE_FEATURES, WIDTH)
        self.layers = nn.ModuleList(
            kind(tensors, updates_pos, order, out_order, self.style) for _ in range(3)
        )
        self.pool = source.choice([global_add_pool, global_mean_pool])
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x, pos, edge_index, edge_attr, batch):
        h = keep(self.embed(x))
        given = {"h": h, "pos": pos, "e": self.edges(edge_attr), "h0": torch.relu(h)}
        state = {name: given[name] for name in self.tensors}
        for layer in self.layers:
            named = {**state, "edge_index": edge_index}
            ordered = [named[name] for name in self.order]
            if self.style == "keywords":
                made = layer(**dict(zip(self.order, ordered, strict=True)))
            elif self.style == "dictionary":
                made = layer(named)
            else:
                made = layer(tuple(ordered)) if self.style == "tuple" else layer(*ordered)
            if self.style == "dictionary":
                state = made
            else:
                state = dict(zip(self.out_order, made, strict=True))
            keep(state["h"])
        if self.per_node:
            return self.head(state["h"])
        return self.head(self.pool(state["h"], batch))


def add_drawn(seeds) -> None:
    """Register the models of these seeds, every third on graphs with as many edges as nodes."""
    for seed in seeds:
        add(
            f"states {seed}: {DrawnStates(seed).recipe}",
            FAMILY,
            functools.partial(DrawnStates, seed),
            data="molecules" if seed % 3 else "cycles",
        )


add_drawn(SEEDS)
