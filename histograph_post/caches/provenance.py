"""Where a history came from: the code that made it, and one graph to try that code on again.

A backbone is known by the hash of its weights, but the same weights in a file that was edited give
other activations. So a cache keeps a *canary*: one small graph of the data and its activations.
Whoever builds the backbone again runs the canary: activations that differ by more than rounding
are refused, and a file that differs while they do not is only noted, since a comment was edited.
What is recorded here is compared, never opened or run.
"""

from __future__ import annotations

import hashlib
import inspect
import platform
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

    #: Absolute path -> hash of each file that defines a module of the model, libraries aside.
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
) -> list[str]:
    """Refuse a model whose code gives other activations than recorded; return what to note.

    Args:
        recorded: What the cache or the run says of the code.
        folder: Where it says so, and where the canary is.
        model: The backbone as it was built now, with the recorded weights.
        plan: What is captured of it.

    Raises:
        ModelError: for other activations, with both hashes and the first layer that differs.
    """
    found = _sources(model)
    changed = _changed(recorded.sources, found)
    if recorded.canary_sha256 is None:
        if not changed:
            return []
        raise ModelError(
            f"{changed}; {folder} has no canary to tell whether the activations are still the "
            "same; restore that file, or cache again"
        )
    canary = read_canary(folder, recorded.canary_sha256)
    try:
        differing = list(canary.differences(model, plan))
        described = "" if not differing else _described(differing, len(plan.points))
    except HistographError as error:
        described = f"on its canary graph: {error}"
    if described:
        raise ModelError(
            f"the model's activations are not those that {folder} was made with: {described}"
            f"{_other_versions(recorded.versions)}; {changed or 'its source is the same'}; restore "
            "that code, or cache again"
        )
    if not changed:
        return []
    return [f"{changed}, but its activations on the canary graph are the same: going on"]


def _described(differing: Sequence[tuple[str, float]], total: int) -> str:
    name, difference = differing[0]
    return (
        f"layer {name!r} differs by {difference:.1e} (relative), the first of {len(differing)} "
        f"of {total} layers that do"
    )


# --- the code


def _sources(model: nn.Module) -> dict[str, str]:
    """Return the hashes of the files that define the modules of a model, libraries aside."""
    found: dict[str, str] = {}
    for kind in {type(module) for module in model.modules()}:
        if kind.__module__.partition(".")[0] in _LIBRARIES:
            continue
        code = getattr(inspect.unwrap(kind.forward), "__code__", None)
        path = Path(getattr(code, "co_filename", ""))
        if path.is_file():
            found[str(path.resolve())] = hashlib.sha256(path.read_bytes()).hexdigest()
    return dict(sorted(found.items()))


def _changed(recorded: Mapping[str, str], found: Mapping[str, str]) -> str:
    """Say which file is another one, with both hashes; a file may be at another place."""
    lost = [path for path, sha256 in recorded.items() if sha256 not in found.values()]
    new = [path for path, sha256 in found.items() if sha256 not in recorded.values()]
    if not lost and not new:
        return ""
    expected = f"{recorded[lost[0]][:12]} ({lost[0]})" if lost else "none"
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
