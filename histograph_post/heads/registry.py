"""Every readout by name; those of this package are known without loading torch.

A custom readout is a subclass of :class:`~.base.Readout`. It gets a name by :func:`register_head`,
by the entry point group ``histograph_post.heads`` of an installed package, or where it is used: as
``file.py:Class``, ``package.module:Class`` or the class itself.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property, partial
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import ConfigError, one_line, raised_at
from ..utils import LEVELS
from ..utils.machine import require_memory
from ..utils.sources import code_sha256
from ..utils.specifications import imported_place
from .option_checks import checked_options, own_code, require_separate_graphs

if TYPE_CHECKING:
    from torch import nn

    from .base import Readout

_Class = TypeVar("_Class", bound="type[Readout]")

#: Installed packages offer readouts under this name, as ``name = "package.module:Class"``.
ENTRY_POINTS = "histograph_post.heads"


@dataclass(frozen=True)
class HeadInfo:
    """What is known of a readout before it is loaded.

    Attributes:
        name: What the user types.
        description: One line for help texts and tables.
        location: ``module:Class``, the module relative to this package; or the class itself.
        levels: What it can predict.
        needs_edge_index: Whether it needs the edges of the graphs.
        warm_starts: Whether it can start at the checkpoint's own predictions.
        preset: Options of the class that this name stands for.
        defaults: Options whose default is another one than that of the class.
        simple: Whether it is a fixed pooling and a classifier: what a head has to beat.
        lr: The learning rate that suits it on data of many graphs, by validation scores on frozen
            molecule networks: a few linear maps need larger steps than attention does.
        code: The specification that a custom readout was given by, if any.
        installed: Whether a custom readout is offered by an installed package.
    """

    name: str
    description: str
    location: str | type[Readout]
    levels: tuple[str, ...] = ("graph",)
    needs_edge_index: bool = False
    warm_starts: bool = False
    preset: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    simple: bool = False
    lr: float = 1e-3
    code: str | None = None
    installed: bool = False

    @classmethod
    def of_class(cls, name: str, head: type[Readout], **known: Any) -> HeadInfo:
        """Return what the class of a custom readout declares."""
        return cls(
            name,
            (inspect.getdoc(head) or "").partition("\n")[0].rstrip("."),
            head,
            levels=head.levels,
            needs_edge_index=head.needs_edge_index,
            warm_starts=hasattr(head, "warm_start"),
            **known,
        )

    def load(self) -> type[Readout]:
        """Return the class, imported now if it has not been before."""
        if not isinstance(self.location, str):
            return self.location
        module, _, name = self.location.partition(":")
        found: type[Readout] = getattr(import_module(module, __package__), name)
        return found

    @cached_property
    def source(self) -> str:
        """A hash of the code of a custom readout, whatever named it.

        Empty for a class of a script or notebook that runs, which changes for other reasons.
        """
        if isinstance(self.location, str):
            return ""
        home, own = (name.partition(".")[0] for name in (self.location.__module__, __name__))
        return "" if home in ("__main__", own) else code_sha256(self.location)

    def options(self) -> dict[str, Any]:
        """Return the options this readout takes and their defaults."""
        given = ("in_dims", "out_dim", "level", *self.preset)  # by build_head itself
        declared = inspect.signature(self.load()).parameters
        options = {name: option.default for name, option in declared.items() if name not in given}
        return {**options, **self.defaults}


#: Of the paper's own form: what the paper itself tunes or leaves out to see what it is worth.
_PAPER_DEFAULTS = MappingProxyType({"normalization": "signed", "residual": False})
#: The rest: without what this package has added.
_PAPER_PRESET = MappingProxyType(
    {"layer_heads": 1, "mix": "last", "probe": 0.0, "output_norm": False}
)
#: The options that turn HistoGraph into the paper's own form.
PAPER_FORM: Mapping[str, Any] = MappingProxyType({**_PAPER_DEFAULTS, **_PAPER_PRESET})


def _variants(location: str, option: str, **shared: Any) -> Callable[..., HeadInfo]:
    """Return what describes the readouts of one class that differ in the value of one option."""

    def describe(name: str, description: str, value: Any, **known: Any) -> HeadInfo:
        return HeadInfo(name, description, location, preset={option: value}, **shared, **known)

    return describe


_histograph = partial(
    HeadInfo, location=".histograph:HistoGraphHead", levels=LEVELS, warm_starts=True
)
_last_layer = _variants(".readouts:LastLayer", "reduce", simple=True)
_simple = partial(HeadInfo, simple=True, levels=LEVELS)
_probe = partial(HeadInfo, location=".readouts:Probe", simple=True, levels=("graph", "node"))
_jumping = _variants(".readouts:JumpingKnowledge", "mode", levels=LEVELS)
_with_edges = partial(HeadInfo, needs_edge_index=True)
_second_order = _variants(".set_pooling:SOPool", "mode")
_covariance = _variants(".set_pooling:DKEPool", "robust")

_HEADS = (
    _histograph("histograph", "attention over the history of layers, then over the nodes"),
    _histograph(
        "histograph-paper",
        "HistoGraph in the paper's own form",
        preset=_PAPER_PRESET,
        defaults=_PAPER_DEFAULTS,
    ),
    _last_layer("mean", "mean over the nodes of the last layer", "mean", lr=1e-2),
    _last_layer("sum", "sum over the nodes of the last layer", "sum"),
    _last_layer("max", "maximum over the nodes of the last layer", "max", lr=1e-2),
    _last_layer("mlp", "MLP probe of the last layer, node by node", "mean", levels=LEVELS[1:]),
    _simple("linear", "(mean) last layer and a linear map, solved", ".readouts:LinearProbe"),
    _simple("layer-mean", "mean over all layers", ".readouts:LayerMean"),
    _simple(
        "concat",
        "(mean) of every layer, concatenated, and a linear map, solved",
        ".readouts:Concat",
    ),
    _probe("probe", "mean, maximum and deviation of every layer, and a linear map, solved"),
    _jumping("jk-cat", "JumpingKnowledge: layers concatenated per node", "cat", lr=3e-3),
    _jumping("jk-max", "JumpingKnowledge: maximum over layers per node", "max", lr=3e-3),
    _jumping("jk-lstm", "JumpingKnowledge: LSTM attention over layers per node", "lstm"),
    HeadInfo("attention", "softmax-gated sum of nodes", ".set_pooling:AttentionReadout"),
    HeadInfo("set2set", "LSTM attending to the nodes in steps", ".set_pooling:Set2Set"),
    HeadInfo("sortpool", "first k sorted nodes, 1-D convolution", ".set_pooling:SortPool"),
    HeadInfo(
        "set-transformer",
        "self-attention over nodes, attention pooling",
        ".set_pooling:SetTransformer",
    ),
    HeadInfo("gmt", "Graph Multiset Transformer", ".set_pooling:GraphMultisetTransformer"),
    _with_edges(
        "topkpool", "TopK pooling: nodes dropped by a learned projection", ".structural:TopKPool"
    ),
    _with_edges("sagpool", "SAGPool: nodes dropped by a graph convolution", ".structural:SAGPool"),
    _with_edges(
        "asap", "ASAP: attention over neighbourhoods, the best kept", ".structural:ASAPool"
    ),
    _with_edges("edgepool", "EdgePool: edges contracted by score", ".structural:EdgePool"),
    _with_edges(
        "diffpool", "DiffPool: soft clusters from a graph convolution", ".structural:DiffPool"
    ),
    _with_edges(
        "mincutpool", "MinCutPool: soft clusters that cut few edges", ".structural:MinCutPool"
    ),
    _second_order("sopool", "SOPool: second-order pooling, bilinear mapping", "bilinear"),
    _second_order("sopool-attention", "SOPool: second-order pooling, attentional", "attentional"),
    _covariance("dkepool", "DKEPool: mean and covariance of the nodes", False),
    _covariance("dkepool-robust", "DKEPool for few nodes: square root of the covariance", True),
)

#: The readouts of this package, in the order of help texts.
HEADS: Mapping[str, HeadInfo] = MappingProxyType({info.name: info for info in _HEADS})

#: The readout whose features rivals are fitted on.
RIVALS_READ = "probe"

#: What readouts are compared with, but what is never saved as a head.
RIVALS: Mapping[str, HeadInfo] = MappingProxyType(
    {
        "svm": _probe("svm", "RBF support vectors on what probe reads; compared only"),
        "boosting": _probe("boosting", "boosted trees on what probe reads; compared only"),
    }
)

#: Readouts, rivals included, that a head has to beat to be worth it.
SIMPLE = tuple(name for name, info in {**HEADS, **RIVALS}.items() if info.simple)

#: Readouts that were registered in this process.
_registered: dict[str, HeadInfo] = {}


def register_head(name: str) -> Callable[[_Class], _Class]:
    """Give a custom readout a name, for every function that takes the name of a head.

    Used as a decorator::

        @hg.register_head("mine")
        class Mine(Readout): ...
    """

    def register(head: _Class) -> _Class:
        _register(name, head)
        return head

    return register


def _register(name: str, head: Any, **known: Any) -> str:
    from .base import Readout

    if not (isinstance(head, type) and issubclass(head, Readout)):
        found = known.get("code") or f"{head!r}"
        raise ConfigError(
            f"head {name!r}: found {found}, expected a subclass of histograph_post.heads.Readout"
        )
    if not hasattr(head, "__signature__"):
        found = "an __init__ and " if head.__init__ is not Readout.__init__ else ""
        raise ConfigError(
            f"head {name!r}: found {found}no build, expected build(self, *, OPTION=...), which "
            "makes the modules in place of __init__"
        )
    if name in HEADS or name in RIVALS:
        raise ConfigError(f"head {name!r}: found a readout of this package, expected another name")
    if not re.fullmatch(r"[A-Za-z0-9][\w.+-]*", name):
        raise ConfigError(
            f"head {name!r}: found a name that cannot name a folder, "
            "expected letters, digits, '-', '_', '.' or '+'"
        )
    _registered[name] = HeadInfo.of_class(name, head, **known)
    return name


def head_name(head: str | type[Readout], called: str | None = None) -> str:
    """Return the name of a readout; one that is given as code is registered under its class's.

    Args:
        head: A name; ``file.py:Class`` or ``package.module:Class``, whose class is imported; or a
            class.
        called: The name to register code under instead.
    """
    if not isinstance(head, str):
        known = [name for name, info in _registered.items() if info.location is head]
        return known[0] if known and not called else _register(called or head.__name__, head)
    if ":" not in head:
        if head.endswith(".py"):
            raise ConfigError(f"head: found {head!r}, expected a class of it{_classes(head)}")
        return head_info(head).name
    place, _, name = head.rpartition(":")
    with imported_place(place, ConfigError) as module:
        if not hasattr(module, name):
            raise ConfigError(
                f"{place}: found no {name!r}, expected a class of it{_classes(place)}"
            )
        return _register(called or name, getattr(module, name), code=head)


def _classes(file: str) -> str:
    """Return the specifications of the classes of a file, which is parsed and not run."""
    try:
        tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return f", as {file}:Class"
    found = [f"{file}:{node.name}" for node in tree.body if isinstance(node, ast.ClassDef)]
    return f", as {' or '.join(found[:3]) or f'{file}:Class'}"


def registered_heads() -> tuple[HeadInfo, ...]:
    """Return the readouts that were registered in this process."""
    return tuple(_registered.values())


def head_names(level: str | None = None, *, rivals: bool = False) -> tuple[str, ...]:
    """Return the names of all readouts, or of those that work at one level.

    Args:
        level: ``graph``, ``node`` or ``link``.
        rivals: Whether to include those that are compared only.
    """
    names = dict.fromkeys([*HEADS, *(RIVALS if rivals else ()), *_installed(), *_registered])
    return tuple(name for name in names if level is None or level in head_info(name).levels)


def _installed() -> dict[str, EntryPoint]:
    """Return what installed packages offer, by name; nothing is imported."""
    return {entry.name: entry for entry in entry_points(group=ENTRY_POINTS)}


def refuse_rivals(*names: str) -> None:
    """Refuse rivals where a readout is to be trained and saved."""
    for name in names:
        if name in RIVALS:
            raise ConfigError(
                f"head {name!r}: found a rival that is compared only, expected a readout that is "
                "saved as a head; `histograph compare` has it"
            )


def head_info(name: str) -> HeadInfo:
    """Return what is known of a readout; an unknown name is refused with the nearest ones."""
    for known in (HEADS, RIVALS, _registered):
        if name in known:
            return known[name]
    if entry := _installed().get(name):
        try:
            _register(name, entry.load(), installed=True)
        except ConfigError:
            raise
        except Exception as error:  # what a package raises when it is imported
            at = raised_at(error)
            raise ConfigError(
                f"head {name!r}: {entry.value} of an installed package failed"
                f"{f' at {at}' if at else ''}: {one_line(error)}; repair or uninstall it"
            ) from error
        return _registered[name]
    names = head_names(rivals=True)
    near = get_close_matches(name, names, n=3) or names
    raise ConfigError(
        f"head: found {name!r}, expected a readout such as {', '.join(near[:6])}, "
        "or your own as file.py:Class"
    )


def is_solved(name: str, level: str) -> bool:
    """Whether fits of a readout, or rival, are solved at a level: they then depend on no seed."""
    return level != "link" and head_info(name).load().solved


def build_head(
    name: str, in_dims: Sequence[int], out_dim: int, level: str = "graph", **options: Any
) -> Readout:
    """Build a readout by name.

    Args:
        name: One of :func:`head_names`.
        in_dims: Width of each layer of the history.
        out_dim: Number of outputs per graph or node; 1 for links.
        level: ``graph``, ``node`` or ``link``.
        options: Any of the readout's own options, see :meth:`HeadInfo.options`.
    """
    refuse_rivals(name)
    info = head_info(name)
    if level not in info.levels:
        raise ConfigError(
            f"head {name!r}: found level {level!r}, expected {' or '.join(info.levels)}"
        )
    readout, options = info.load(), checked_options(info, options)
    options = {**info.preset, **info.defaults, **options}
    build = partial(readout, in_dims, out_dim, level=level, **options)
    with own_code(readout):
        require_memory(f"head {name!r}", options.values(), build, bytes_per_weight=16)
        head = build()
    if not isinstance(info.location, str):
        require_separate_graphs(head)
    return head


def build_reader(
    name: str, in_dims: Sequence[int], out_dim: int, level: str = "graph", **options: Any
) -> Readout:
    """Build a readout as :func:`build_head` does; for a rival, the one whose features it reads."""
    reader = RIVALS_READ if name in RIVALS else name
    return build_head(reader, in_dims, out_dim, level, **options)


def head_config(name: str, head: nn.Module) -> dict[str, Any]:
    """Return what builds a head again, as plain values: ``build_head(name, **config)``."""
    config: Any = head.config
    return {key: value for key, value in config().items() if key not in head_info(name).preset}
