"""From a data specification and its arguments to a data set.

====================================  =============================================================
``tu:PROTEINS``                       a set of the TU collection
``planetoid:Cora``                    Cora, CiteSeer, PubMed
``actor:``, ``wiki:chameleon``        heterophilic node sets as Geom-GCN prepared them
``ogbg:molhiv``                       Open Graph Benchmark, graph level
``moleculenet:BBBP``                  MoleculeNet, as PyG keeps it
``smiles:file.csv``                   molecules with targets
``graphs.pt``                         graphs saved with ``torch.save``
``file.py:function``                  a function of yours that returns graphs
``package.module:function``           the same, from an installed package
``demo:``                             small random graphs made in code
====================================  =============================================================

Any of them takes ``level=link``: some edges are held out, to be predicted (see :mod:`.labels`).
Arguments are ``k=v`` from the command line (text) or from Python (any value). torch and what reads
the data are imported when data are loaded: commands that only show a specification need none of it.
"""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import ConfigError, DataError
from ..utils import LEVELS, Level
from ..utils.specifications import (
    BUILT_IN_DATA,
    GRAPH_FILES,
    Specification,
    imported_place,
    is_built_in,
)
from ..utils.text import first_line

if TYPE_CHECKING:
    from .dataset import GraphDataset
    from .labels import LinkOptions

#: What comes before the colon of molecules, and their encoding without ``mol_features``.
MOLECULE_SOURCES = {"smiles": "ogb", "ogbg": "ogb", "moleculenet": "pyg"}

#: Every form of a data specification, for messages.
FORMS = (
    "tu:NAME, planetoid:NAME, actor:, wiki:NAME, ogbg:NAME, moleculenet:NAME, smiles:FILE.csv, "
    "demo:, FILE.pt, FILE.py:FUNCTION, PACKAGE.MODULE:FUNCTION"
)


#: Called with what is done so far, and all there is.
OnProgress = Callable[[int, int], None] | None


@dataclass(frozen=True)
class Reading:
    """How rows become graphs; the graphs do not depend on it, so no file records it."""

    #: Where graphs that stay on disk are kept, for this command and for others like it; None for a
    #: folder that is removed with the process.
    folder: Path | None = None
    #: Processes that read rows; 0 for this one alone, None for as many as there are cores.
    workers: int | None = None
    #: Whether a long table is sampled for now; later, each job reads rows of its own.
    sampled: bool = False
    #: The file or package whose code reads the rows.
    place: str = ""
    #: Called with the number of rows.
    on_progress: OnProgress = None

    def __post_init__(self) -> None:
        if self.workers is not None and self.workers < 0:
            raise ConfigError(f"workers: found {self.workers}, expected 0 or more")

    def importable(self) -> AbstractContextManager[object]:
        """Let the code that reads rows import what is beside it, as when it was loaded."""
        return imported_place(self.place, DataError) if self.place else nullcontext()


@dataclass(frozen=True)
class DataSpec(Specification):
    """Data by name and arguments; once they are loaded, their fingerprint and size as well."""

    WHAT = "data"

    #: Offline copies of benchmark data; never recorded in a cache or a run.
    root: Path | None = None
    #: Of the graphs and labels; empty before the data are loaded, when the counts are 0.
    fingerprint: str = ""
    num_graphs: int = 0
    num_nodes: int = 0
    #: How they are read; never recorded either.
    reading: Reading | None = field(default=None, compare=False)

    @classmethod
    def of(cls, dataset: GraphDataset, args: Mapping[str, Any]) -> DataSpec:
        """Return what files record of loaded data."""
        return cls(
            dataset.spec,
            dict(args),
            fingerprint=dataset.fingerprint(),
            num_graphs=len(dataset),
            num_nodes=int(dataset.num_nodes.sum()),
        )

    def load(self) -> GraphDataset:
        """Load the data; code that only a file names is refused."""
        followed = self.to_follow()
        return load_data(
            followed.spec, root=followed.root, args=followed.args, reading=self.reading
        )

    @property
    def mol_features(self) -> str | None:
        """The encoding of molecules; None for other data."""
        default = MOLECULE_SOURCES.get(self.spec.partition(":")[0])
        return None if default is None else str(self.args.get("mol_features", default))

    def for_prediction(self, trained_on: DataSpec, targets: Sequence[str]) -> DataSpec:
        """Return data to predict, with the arguments that they share with the training data.

        Molecules are encoded as they were then. The labels of a table are the columns that the
        head predicts, if it has all of them; otherwise it has none.

        Raises:
            DataError: for molecules that would be encoded differently.
        """
        args = dict(self.args)
        expected = trained_on.mol_features
        if self.mol_features is not None and expected is not None:
            found = args.setdefault("mol_features", expected)
            if found != expected:
                raise DataError(
                    f"{self.spec}: found mol_features={found}, expected mol_features={expected}, "
                    "which the head was trained on"
                )
        if self.spec.startswith("smiles:") and "targets" not in args:
            from .tables import args_for_prediction

            path = _locate(self.spec.removeprefix("smiles:"), self.root)
            args = {**args_for_prediction(path, trained_on.args, targets), **args}
        return replace(self, args=args)


#: The environment variable with the folder of offline copies.
ROOT_VARIABLE = "HISTOGRAPH_DATA_ROOT"


def load_data(
    spec: str,
    *,
    root: str | Path | None = None,
    args: Mapping[str, Any] | None = None,
    reading: Reading | None = None,
) -> GraphDataset:
    """Load the data that ``spec`` names.

    ``root`` holds offline copies of the benchmark sets and is only read; relative files are also
    looked for there. It defaults to the environment variable ``HISTOGRAPH_DATA_ROOT``. ``args``
    depend on the kind of data; an unknown one is refused. ``reading`` applies to graphs that stay
    on disk (see :mod:`.streaming`).
    """
    args = args or {}
    root = root or os.environ.get(ROOT_VARIABLE) or None
    root = None if root is None else Path(root)
    kind, colon, name = spec.partition(":")
    if colon and kind == "smiles":
        from .molecules import load_smiles

        dataset = load_smiles(_locate(name, root), args, reading)
        dataset.spec = spec  # as the user named it, wherever the file was found
        return dataset
    if colon and kind in BUILT_IN_DATA:
        load = getattr(import_module(f".{BUILT_IN_DATA[kind]}", __package__), f"load_{kind}")
        # Only tables can be read in parts.
        return load(name, root, args, *([reading] if kind == "moleculenet" else []))
    if colon and kind in _ALIASES:
        raise DataError(f"{spec}: found no kind of data {kind!r}, expected {_ALIASES[kind]}{name}")
    if spec.endswith(GRAPH_FILES):
        from .files import load_graph_file

        return load_graph_file(_locate(spec, root), args, spec=spec)
    if kind and name and "/" not in name and not is_built_in("data", spec):
        from .files import load_function

        return load_function(spec, root, args, reading)
    raise DataError(f"{spec}: not a data specification, expected one of {FORMS}{_hint(spec)}")


#: Other names that users may try for a kind of data -> its name here.
_ALIASES = {
    **dict.fromkeys(("ogb", "ogbg-mol", "OGB"), "ogbg:"),
    **dict.fromkeys(("TU", "tudataset", "TUDataset"), "tu:"),
    **dict.fromkeys(("Planetoid", "planet"), "planetoid:"),
    **dict.fromkeys(("wikipedia", "Wikipedia"), "wiki:"),
    **dict.fromkeys(("csv", "smi"), "smiles:"),
}


def _hint(spec: str) -> str:
    """Return how a file would be named, for the end of an error."""
    if spec.endswith((".ckpt", ".safetensors", ".tar")):
        return "; this looks like a checkpoint, give it with --checkpoint"
    if spec.endswith((".csv", ".csv.gz", ".parquet", ".arrow", ".feather")):
        return f"; molecules are named smiles:{spec}"
    return f"; name the function, as in {spec}:graphs" if spec.endswith(".py") else ""


def _locate(name: str, root: Path | None) -> Path:
    """Return a file as given, or under the root if it is only there; a URL is downloaded."""
    if "://" in name:
        return _downloaded(name)
    path = Path(name).expanduser()
    if not path.exists() and root is not None and (root / path).exists():
        return root / path
    return path


@functools.cache
def _downloaded(url: str) -> Path:
    """Return a copy of a file at any URL that fsspec reads, removed with the process."""
    import fsspec

    folder = Path(tempfile.mkdtemp(prefix="histograph-url-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    target = folder / url.rpartition("/")[2]
    try:
        with fsspec.open(url, "rb") as source, target.open("wb") as copy:
            shutil.copyfileobj(source, copy)
    except ImportError as error:
        raise DataError(f"{url}: {error}; pip install 'histograph-post[remote]'") from None
    except Exception as error:  # of whatever kind the protocol has
        raise DataError(f"{url}: not read ({type(error).__name__}: {first_line(error)})") from error
    return target


# --- arguments

#: Arguments of sources whose graphs may lack features.
FEATURE_ARGS = ("features", "max_degree")

#: Arguments on what is predicted, which every source takes.
LEVEL_ARGS = ("level", "link_seed", "link_split", "link_negatives")

#: The argument that decides whether graphs stay on disk, whatever the number of rows.
STREAM_ARGS = ("stream",)

_TRUTH = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}

_Default = TypeVar("_Default")


def check_names(args: Mapping[str, Any], valid: Collection[str], *, spec: str) -> None:
    """Raise :class:`DataError` for an argument that this kind of data does not take."""
    for name in args:
        if name not in valid:
            known = ", ".join(sorted(valid))
            raise DataError(f"{spec}: unknown data argument {name!r}, expected one of {known}")


def as_bool(args: Mapping[str, Any], name: str, *, default: _Default, spec: str) -> bool | _Default:
    """Return a true/false argument."""
    if name not in args:
        return default
    truth = _TRUTH.get(str(args[name]).lower())
    if truth is None:
        raise DataError(f"{spec}: {name}={args[name]}, expected true or false")
    return truth


def as_int(args: Mapping[str, Any], name: str, *, default: _Default, spec: str) -> int | _Default:
    """Return a whole-number argument."""
    value = args.get(name)
    if value is None:
        return default
    try:
        return int(str(value))
    except ValueError:
        raise DataError(f"{spec}: {name}={value}, expected a whole number") from None


def as_choice(
    args: Mapping[str, Any], name: str, choices: Collection[str], *, default: str, spec: str
) -> str:
    """Return an argument that is one of a few choices."""
    value = str(args.get(name, default))
    if value not in choices:
        raise DataError(f"{spec}: {name}={value}, expected one of {', '.join(choices)}")
    return value


def level_options(
    args: Mapping[str, Any], *, own: Level | None = None, spec: str
) -> dict[str, Any]:
    """Return the options of :func:`.dataset.from_graphs` on what is predicted.

    ``own`` is the level of a source that has only one; its links can always be predicted as well.
    """
    choices = LEVELS if own is None else (own, "link")
    level = as_choice(args, "level", choices, default="", spec=spec) if "level" in args else own
    given = [name for name in LEVEL_ARGS[1:] if name in args]
    if given and level != "link":
        raise DataError(f"{spec}: found {given[0]} without level=link")
    return {"level": level, "links": _link_options(args, spec) if given else None}


def _link_options(args: Mapping[str, Any], spec: str) -> LinkOptions:
    from ..splits.making import parse_shares
    from .labels import LinkOptions

    defaults = LinkOptions()
    shares = args.get("link_split", defaults.shares)
    text = shares if isinstance(shares, str) else ",".join(map(str, shares))
    negatives = args.get("link_negatives", defaults.negatives)
    try:
        ratio = float(negatives)
    except (TypeError, ValueError):
        raise DataError(f"{spec}: link_negatives={negatives}, expected a number") from None
    return LinkOptions(
        shares=parse_shares(text, where=f"{spec}: link_split"),
        seed=as_int(args, "link_seed", default=defaults.seed, spec=spec),
        negatives=ratio,
    )


def feature_options(args: Mapping[str, Any], *, spec: str) -> dict[str, Any]:
    """Return the options of :func:`.dataset.from_graphs` on featureless graphs."""
    return {
        "features": str(args.get("features", "auto")),
        "max_degree": as_int(args, "max_degree", default=None, spec=spec),
    }
