"""Where a history came from: the code that made it, and one graph to try that code on again.

A backbone is known by the hash of its weights, but the same weights in a file that was edited give
other activations. So a cache keeps the hash of the model's classes and a *canary*: one small graph
of the data and its activations. Whoever builds the backbone again runs the canary: activations that
differ by more than rounding are refused. So are classes that differ while the activations do not,
since other graphs may reach what was edited. Comments, docstrings and the rest of a file may
change. What is recorded here is compared, never opened or run.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import platform
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..errors import CacheError, HistographError, ModelError
from ..utils.decoding import Sha256
from ..utils.files import read_limited

if TYPE_CHECKING:
    from torch import nn

    from ..capture import CapturePlan
    from ..data import GraphDataset
    from .canary import Canary

#: The file of the canary, in a cache, a run and an export.
CANARY_NAME = "canary.safetensors"

#: A longer one is not ours.
CANARY_LIMIT = 64 * 2**20

#: Packages whose files are known by their version.
_LIBRARIES = ("torch", "torch_geometric", "histograph_post")


@dataclass(frozen=True)
class Provenance:
    """What a cache, or a run, records of the code of its backbone."""

    #: Absolute path -> hash of what each file defines of the model's classes, libraries aside.
    sources: Mapping[str, Sha256]
    #: Of the libraries that ran it.
    versions: Mapping[str, str]
    #: The folder that relative names on the command line start from.
    folder: str
    #: Of the file of the canary; None for a model that could not be tried on a small graph.
    canary_sha256: Sha256 | None

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


def take_provenance(
    model: nn.Module, plan: CapturePlan, dataset: GraphDataset
) -> tuple[Provenance, bytes | None]:
    """Return what is recorded of a model's code, and the contents of the canary's file."""
    from .canary import Canary

    canary = Canary.take(model, plan, dataset)
    contents = None if canary is None else canary.to_bytes()
    if contents is not None and len(contents) > CANARY_LIMIT:
        contents = None
    sha256 = None if contents is None else hashlib.sha256(contents).hexdigest()
    return Provenance(_sources(model), _versions(), str(Path.cwd()), sha256), contents


def read_canary(folder: Path, sha256: str) -> Canary:
    """Read the canary of a cache or a run, refusing any but the one that is recorded."""
    from .canary import Canary

    path = folder / CANARY_NAME
    contents = read_limited(path, CANARY_LIMIT)
    found = hashlib.sha256(contents).hexdigest()
    if found != sha256:
        raise CacheError(f"{path}: found checksum {found}, expected {sha256}")
    return Canary.from_bytes(contents, str(path))


def check_provenance(
    recorded: Provenance, folder: Path, model: nn.Module, plan: CapturePlan
) -> None:
    """Refuse a model whose code is another one, or gives other activations, than recorded.

    Args:
        recorded: What the cache or the run says of the code.
        folder: Where it says so, and where the canary is.
        model: The backbone as it was built now, with the recorded weights.
        plan: What is captured of it.

    Raises:
        ModelError: with both hashes, and the first layer that differs.
    """
    changed = _changed(recorded.sources, model)
    again = "restore that code, or cache again"
    if recorded.canary_sha256 is None:
        if changed:
            raise ModelError(f"{changed}; {again}")
        return
    canary = read_canary(folder, recorded.canary_sha256)
    try:
        differing = list(canary.differences(model, plan))
        described = "" if not differing else _described(differing, len(plan.points))
    except HistographError as error:
        described = f"on its canary graph: {error}"
    if described:
        raise ModelError(
            f"the model's activations are not those that {folder} was made with: {described}"
            f"{_other_versions(recorded.versions)}; {changed or 'its source is the same'}; {again}"
        )
    if changed:
        raise ModelError(
            f"{changed}; its activations on the canary graph of {folder} are the same, but other "
            f"graphs may reach what was edited; {again}"
        )


def _described(differing: Sequence[tuple[str, float]], total: int) -> str:
    name, difference = differing[0]
    return (
        f"layer {name!r} differs by {difference:.1e} (relative), the first of {len(differing)} "
        f"of {total} layers that do"
    )


# --- the code


def _sources(model: nn.Module) -> dict[str, str]:
    """Return for each file a hash of the model's classes in it, comments and docstrings aside."""
    parts: dict[Path, set[str]] = {}
    for kind in {kind for module in model.modules() for kind in type(module).__mro__}:
        if kind is object or kind.__module__.partition(".")[0] in _LIBRARIES:
            continue
        try:
            path = Path(inspect.getsourcefile(kind) or "")
            tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
        except (OSError, TypeError, SyntaxError):  # typed in, or made by a function
            continue
        if path.is_file():
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
                    node.body = node.body[1:]
            parts.setdefault(path.resolve(), set()).add(ast.unparse(tree))
    return {
        str(path): hashlib.sha256("\n".join(sorted(codes)).encode()).hexdigest()
        for path, codes in sorted(parts.items())
    }


def _changed(recorded: Mapping[str, str], model: nn.Module) -> str:
    """Say which file has other classes, with both hashes; a file may be at another place."""
    found = _sources(model)
    # What earlier versions recorded is the hash of the whole file.
    whole = {hashlib.sha256(Path(path).read_bytes()).hexdigest(): path for path in found}
    known = {sha256: found[whole[sha256]] for sha256 in recorded.values() if sha256 in whole}
    lost = [
        path for path, sha256 in recorded.items() if known.get(sha256, sha256) not in found.values()
    ]
    new = [
        path
        for path, sha256 in found.items()
        if sha256 not in {*recorded.values(), *known.values()}
    ]
    if not lost:  # a class that came on top is for the canary to judge
        return ""
    expected = f"{recorded[lost[0]][:12]} ({lost[0]})"
    shown = f"{new[0]}: found source {found[new[0]][:12]}" if new else "found no source file"
    return f"{shown}, expected {expected}"


def _versions() -> dict[str, str]:
    import numpy
    import torch
    import torch_geometric

    return {
        "histograph_post": __version__,
        "python": platform.python_version(),
        "numpy": numpy.__version__,
        "torch": torch.__version__,
        "torch_geometric": torch_geometric.__version__,
    }


def _other_versions(recorded: Mapping[str, str]) -> str:
    now = _versions()
    changed = [
        f"{name} {version} then, {now.get(name, 'none')} now"
        for name, version in recorded.items()
        if now.get(name) != version
    ]
    return f" ({'; '.join(changed or ['with the same versions of the libraries'])})"
