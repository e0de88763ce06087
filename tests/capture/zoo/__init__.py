"""Architectures in the style of public code, each with its history by hand.

``registry.py`` says how an entry is made and examined; the other files are the models, by style.
``python -m tests.capture.zoo`` prints the table of docs/capture.md.
"""

from . import (  # noqa: F401 - each registers its models
    after_layers,
    around,
    between,
    blocks,
    branches,
    chosen,
    conditions,
    depth,
    drawn,
    drawn_states,
    edges,
    forms,
    frameworks,
    geometric,
    hierarchical,
    hops,
    joins,
    lasts,
    levels,
    mixtures,
    molecules,
    node_level,
    own_pools,
    pairs,
    plain,
    published,
    pyg_models,
    read_out,
    readouts,
    rows,
    running,
    shapes,
    signatures,
    space,
    states,
    streams,
    transformers,
    unusual,
)
from .registry import ENTRIES, Entry, Outcome, examine

__all__ = ["ENTRIES", "Entry", "Outcome", "examine"]
