"""Capture points: where in a forward pass a tensor is taken, and the plan of all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Literal, get_args

from ..errors import CaptureError

Kind = Literal["input", "output", "function"]


@dataclass(frozen=True)
class CapturePoint:
    """One tensor of a forward pass, named by where it appears."""

    #: What is shown: ``input``, or the layer that made the tensor.
    name: str
    #: An argument of a module, an output of a module, or the tensor of a function call.
    kind: Kind
    #: The module; for a function call the module whose end the call is counted from.
    module: str
    #: Which call of the module in a forward pass, from 1.
    call: int
    #: Which tensor, among the arguments or outputs; for a function its outputs, then arguments.
    index: int
    #: Numbers per node.
    width: int
    #: What consumes the tensor, for the table.
    consumer: str
    #: The function calls from the end of the module to the tensor, checked at run time.
    calls: tuple[str, ...] = ()

    @property
    def function(self) -> str | None:
        """The function whose tensor is taken, if it is not a module's."""
        return self.calls[-1] if self.calls else None

    @property
    def place(self) -> str:
        """Where the tensor is taken, in words."""
        module = (self.module or "the model") + (f" (call {self.call})" if self.call > 1 else "")
        if self.kind == "function":
            return f"{' > '.join(self.calls)} after {module}"
        return f"{self.kind} of {module}"


@dataclass(frozen=True)
class CapturePlan:
    """The tensors that make up a model's history, in execution order."""

    points: tuple[CapturePoint, ...]
    #: What a user should know about them.
    notes: tuple[str, ...] = ()

    #: The columns of :meth:`table`.
    COLUMNS: ClassVar[tuple[str, ...]] = ("layer", "name", "width", "taken at", "consumed by")

    @property
    def names(self) -> tuple[str, ...]:
        """The name of each layer."""
        return tuple(point.name for point in self.points)

    @property
    def widths(self) -> tuple[int, ...]:
        """Numbers per node of each layer."""
        return tuple(point.width for point in self.points)

    def table(self) -> list[tuple[str, ...]]:
        """Return a row per layer, with the columns :attr:`COLUMNS`."""
        return [
            (str(position), point.name, str(point.width), point.place, point.consumer)
            for position, point in enumerate(self.points)
        ]

    def to_json(self) -> dict[str, Any]:
        """Return the plan as plain JSON values."""
        points = [{**asdict(point), "calls": list(point.calls)} for point in self.points]
        return {"points": points, "notes": list(self.notes)}

    @classmethod
    def from_json(cls, value: Any) -> CapturePlan:
        """Return the plan stored by :meth:`to_json`.

        Raises:
            CaptureError: if the value is anything else.
        """
        if not isinstance(value, Mapping):
            raise CaptureError(f"capture plan: found {type(value).__name__}, expected an object")
        entries, notes = value.get("points"), value.get("notes")
        if not isinstance(entries, list) or not entries:
            raise CaptureError("capture plan: expected a list of points")
        if not isinstance(notes, list) or not _are_strings(notes):
            raise CaptureError("capture plan: expected a list of notes")
        return cls(tuple(_read_point(at, entry) for at, entry in enumerate(entries)), tuple(notes))


def _are_strings(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, str) for value in values)


def _read_point(position: int, entry: Any) -> CapturePoint:
    where = f"capture plan, point {position}"
    names = {field.name for field in fields(CapturePoint)}
    if not isinstance(entry, Mapping) or set(entry) != names:
        found = ", ".join(map(str, entry)) if isinstance(entry, Mapping) else repr(entry)
        raise CaptureError(f"{where}: found {found}, expected {', '.join(sorted(names))}")
    valid = {
        **{name: isinstance(entry[name], str) for name in ("name", "module", "consumer")},
        **{
            name: type(entry[name]) is int and entry[name] >= least
            for name, least in (("call", 1), ("index", 0), ("width", 1))
        },
        "kind": entry["kind"] in get_args(Kind),
        "calls": _are_strings(entry["calls"])
        and bool(entry["calls"]) == (entry["kind"] == "function"),
    }
    for name, fine in valid.items():
        if not fine:
            raise CaptureError(f"{where}: {name} cannot be {entry[name]!r}")
    return CapturePoint(**{**entry, "calls": tuple(entry["calls"])})
