"""Which code a specification may lead to.

Only what the user names, on the command line or as an argument in Python, or what is built in, is
code. A specification that a file holds (``head.json``, a cache's manifest, a fold's
``config.toml``) is data: whoever wrote the file must not choose what runs on this machine, unless
the user has approved that very code before (``trust.py``). ``importing.py`` imports it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, Self

from ..errors import DataError, ModelError
from .trust import trusted_code

#: The models of this package.
BUILT_IN_MODELS: Final = ("gcn", "gin", "gat", "sage", "gps")

#: Networks of public checkpoints, which this package also has.
PUBLIC_MODELS: Final = (
    *("pretrain-gnns:gcn", "pretrain-gnns:gin", "pretrain-gnns:gat", "pretrain-gnns:sage"),
    *("molclr:gcn", "molclr:gin"),
    *("ogb:gcn", "ogb:gin", "ogb:gcn-virtual", "ogb:gin-virtual"),
)

#: What comes before the colon of the data that this package reads itself.
BUILT_IN_DATA: Final = (
    *("tu", "planetoid", "actor", "wiki", "ogbg", "moleculenet", "smiles", "demo"),
)

#: Files of graphs, which are read without running code from them.
GRAPH_FILES: Final = (".pt", ".pth")

#: What stands for the specification of a model or data that was handed over in memory.
IN_MEMORY: Final = "memory"


def is_built_in(what: Literal["model", "data"], spec: Any) -> bool:
    """Whether a specification leads to no code but that of this package."""
    if not isinstance(spec, str):
        return False
    if what == "model":
        return spec in BUILT_IN_MODELS or spec in PUBLIC_MODELS
    kind, colon, _ = spec.partition(":")
    return (bool(colon) and kind in BUILT_IN_DATA) or spec.endswith(GRAPH_FILES)


@dataclass(frozen=True)
class Specification:
    """A model or data by name, as the user gave it or as a file recorded it.

    The rule of this module stands here: whatever turns a specification into code asks
    :meth:`to_follow` first, which refuses one that a file recorded, unless it is built in or the
    user has trusted it.
    """

    #: What is specified, which is also the name of the flag.
    WHAT: ClassVar[Literal["model", "data"]]

    spec: str
    #: Arguments of the constructor, or of the data.
    args: Mapping[str, Any] = field(default_factory=dict)
    #: The file that this was read from; None for what the user named.
    recorded_in: str | None = field(default=None, compare=False, kw_only=True)

    @property
    def is_built_in(self) -> bool:
        """Whether it leads to no code but that of this package."""
        return is_built_in(self.WHAT, self.spec)

    def to_follow(self, given: str | None = None) -> Self:
        """Return what may become code: what the user gave, named or trusted, or what is built in.

        Args:
            given: What the user names now; it replaces what was recorded, arguments aside.

        Raises:
            ModelError: for a recorded model that is code and that the user has not named.
            DataError: for such data.
        """
        if given is not None:
            return replace(self, spec=given, recorded_in=None)
        if self.recorded_in is None or self.is_built_in:
            return self
        what, where = self.WHAT, self.recorded_in
        model = what == "model"
        kind = ModelError if model else DataError
        example = "my_model.py:Net" if model else "my_data.py:graphs"
        if self.spec == IN_MEMORY:
            raise kind(
                f"{where}: found a {what} that was handed over in memory, expected it again with "
                f"{what}= in Python, or by name, as in --{what} {example}"
            )
        named, problem = trusted_code(what, str(self.spec), self.args)
        if named is not None:
            return replace(self, spec=named, recorded_in=None)
        raise kind(
            f"{where}: found the {what} {self.spec!r}, which is code that a file names, so it was "
            f"not run; {problem}expected you to name it, as in --{what} {example} ({what}= in "
            f"Python), or to approve it: histograph trust {Path(where).parent}"
        )
