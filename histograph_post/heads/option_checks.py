"""Checks of readouts: options before one is built, and the parts of a custom one.

A custom readout that lacks something, or fails, ends in one line that names its class.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, HistographError, one_line, raised_at
from ..utils.decoding import require_sane

if TYPE_CHECKING:
    from .base import Readout
    from .registry import HeadInfo

#: By annotation: the types of its values, and what an error calls them.
_KINDS: Mapping[str, tuple[tuple[type, ...], str]] = MappingProxyType(
    {
        "int": ((int,), "a whole number"),
        "float": ((int, float), "a number"),
        "bool": ((bool,), "true or false"),
        "str": ((str,), "a word"),
        "None": ((type(None),), "none"),
    }
)


def checked_options(info: HeadInfo, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a readout; unknown ones, and values of another kind, are refused."""
    valid = info.options()
    unknown = [option for option in options if option not in valid]
    if unknown:
        raise ConfigError(
            f"head {info.name!r}: found option {unknown[0]!r}, expected one of {', '.join(valid)}"
        )
    # The command line reads `none` as None, but it is a value of some options that take text.
    found = {
        name: "none" if value is None and isinstance(valid[name], str) else value
        for name, value in options.items()
    }
    parameters = inspect.signature(info.load()).parameters
    for name, value in found.items():
        _check_kind(info.name, parameters[name], value)
        require_sane(name, value)
    return found


def _check_kind(head: str, parameter: inspect.Parameter, value: Any) -> None:
    """Refuse a value of another kind than its option is annotated with, if that is a plain one."""
    annotation: Any = parameter.annotation
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
    kinds = [part.strip() for part in str(text).split("|")]
    if any(kind not in _KINDS for kind in kinds):
        return
    for kind in kinds:
        types, _ = _KINDS[kind]
        if isinstance(value, types) and (kind == "bool" or not isinstance(value, bool)):
            return
    several = ""
    if isinstance(value, str) and re.search(r",\s*\w+=", value):
        several = "; give --head-args once for each option"
    raise ConfigError(
        f"head {head!r}: found {parameter.name}={value!r}, expected "
        f"{' or '.join(_KINDS[kind][1] for kind in kinds)}{several}"
    )


@contextmanager
def own_code(head: type[Readout] | Readout) -> Iterator[None]:
    """Turn an exception inside a custom readout into one line that says where it was raised.

    Exceptions inside the readouts of this package stay as they are.
    """
    try:
        yield
    except HistographError:
        raise
    except Exception as error:
        readout = head if isinstance(head, type) else type(head)
        if (readout.__module__ or "").partition(".")[0] == __name__.partition(".")[0]:
            raise
        where = raised_at(error, inspect.getsourcefile(readout))
        if not where:
            raise
        raise ConfigError(
            f"head {readout.__name__!r} failed at {where}: {one_line(error)}"
        ) from error


def declared_signature(readout: type[Readout], base: type[Readout]) -> inspect.Signature:
    """Return the signature of a readout's constructor: shared options, then those of ``build``.

    Options are given by name, whether or not ``build`` has a ``*`` before them.
    """
    shared = list(inspect.signature(base.__init__).parameters.values())[1:-1]
    taken = {parameter.name for parameter in shared}
    own = []
    for parameter in list(inspect.signature(readout.build).parameters.values())[1:]:
        name = parameter.name
        where = f"{readout.__name__}.build: found the option {name!r}"
        if name in taken:
            raise ConfigError(f"{where}, which every readout has: leave it out, read self.{name}")
        if hasattr(base, name):
            raise ConfigError(f"{where}, expected a name that no readout has")
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ConfigError(f"{where} of any number, expected each option by its name")
        own.append(parameter.replace(kind=parameter.KEYWORD_ONLY))
    return inspect.Signature([*shared, *own])


def given_options(readout: type[Readout], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the value of every option of ``build``; one without a value is refused."""
    if not hasattr(readout, "__signature__"):
        raise ConfigError(f"{readout.__name__}: found no build, expected it to make the modules")
    try:
        bound = inspect.signature(readout.build).bind(None, **options)
    except TypeError as error:
        raise ConfigError(f"{readout.__name__}.build: {error}") from error
    bound.apply_defaults()
    return dict(list(bound.arguments.items())[1:])  # without the readout itself


def require_parts(head: Readout, base: type[Readout]) -> None:
    """Refuse a readout, once it is built, that lacks what every readout has to have."""
    from .standardize import LimitedLinear  # which loads torch: commands complete without

    kind, name = type(head), type(head).__name__
    if kind.classify is base.classify and not hasattr(head, "classifier"):
        raise ConfigError(
            f"{name}.build: found no classifier, expected it to end with "
            "self.finish(the width of a row)"
        )
    limited = isinstance(getattr(head, "classifier", None), LimitedLinear)
    if head.is_solved and not (head.is_fixed and limited):
        raise ConfigError(
            f"{name}: found solved = True and other weights than a linear classifier's, expected "
            "build to end with self.finish(the width of a row, linear=True)"
        )
    if (kind.forward, kind.classifier_inputs) != (base.forward, base.classifier_inputs):
        return  # it does not need the methods that these call
    has_graphs = kind.pool_graphs is not base.pool_graphs and head.level == "graph"
    if kind.node_rows is base.node_rows and not has_graphs:
        wanted = "pool_graphs or node_rows" if head.level == "graph" else "node_rows"
        raise ConfigError(f"{name}: found no {wanted}, expected it for {head.level} tasks")
    for method in ("pool_graphs", "node_rows"):
        taken = list(inspect.signature(getattr(base, method)).parameters)[1:]
        try:
            inspect.signature(getattr(head, method)).bind(*taken)
        except TypeError as error:
            raise ConfigError(
                f"{name}.{method}: {error}, expected to be given {', '.join(taken)}"
            ) from error


def require_separate_graphs(head: Readout) -> None:
    """Refuse a custom readout whose output for a graph depends on the graphs beside it.

    Nothing else would show it: such a readout trains, and its scores depend on the batches. It is
    tried on two small random graphs, alone and side by side; where it raises on those, nothing is
    said: it may need larger ones, and before training it is tried on the user's own.
    """
    import torch

    training, generator = head.training, torch.Generator().manual_seed(0)

    def outputs(*graphs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the outputs of graphs, given by their layers ``[n, D_l]``, in one batch."""
        sizes = torch.tensor([len(layers[0]) for layers in graphs])
        batch = torch.arange(len(graphs)).repeat_interleave(sizes)  # [num_nodes]
        nodes = torch.arange(len(batch))
        ring = torch.cat([part.roll(1) for part in nodes.split(sizes.tolist())])  # [num_nodes]
        history = [torch.cat(rows) for rows in zip(*graphs, strict=True)]  # [num_nodes, D_l] each
        found: torch.Tensor = head(history, batch, edge_index=torch.stack([nodes, ring]))
        return found

    graphs = [
        [torch.randn(n, width, generator=generator) for width in head.in_dims] for n in (4, 5)
    ]
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            head.eval()
            together, alone = outputs(*graphs), torch.cat([outputs(graph) for graph in graphs])
    except Exception:
        return
    finally:
        head.train(training)
    if not torch.allclose(together, alone, rtol=1e-3, atol=1e-4, equal_nan=True):
        raise ConfigError(
            f"{type(head).__name__}: found outputs of a graph that depend on the graphs beside it "
            "in a batch, expected none that do: reduce nodes by graphs.mean or graphs.sum, not "
            "over all rows"
        )
