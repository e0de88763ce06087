"""The zoo's register: models in the style of public code, each with its history written by hand.

A model's ``forward`` says which tensors its history has to hold by the calls of :func:`keep` in it;
they do nothing unless the zoo itself is recording, which it does in a pass without capture. Models
that are imported as they are come with a function that replays their forward pass instead.

What belongs into a history (docs/capture.md): the embedded input; what each next message-passing
layer consumes; the last state; where weights or an aggregation lie between that and the pool, what
is pooled as well. Every branch is kept, in the order in which it ran; the last state stands last,
behind what is pooled of it. Where two readings are equally good, :func:`keep` names the reading a
tensor belongs to, and a comment says why.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, is_dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch_geometric.data import Batch

from histograph_post.capture import Capture, CapturePlan, plan_capture
from histograph_post.errors import HistographError
from histograph_post.models import call_model

from .graphs import BATCHES

Result = Literal["right", "refused", "wrong"]
ByHand = Callable[[nn.Module, Batch], Sequence[Tensor]]
AnyModule = TypeVar("AnyModule", bound=type[nn.Module])

#: A refusal has to say what to type, unless its entry says otherwise.
USEFUL = r"--layers"

TOLERANCE = 1e-5

#: What models and data warn of themselves: checkpoints without gradients, PyG's sparse matrices,
#: graphs that do not say how many nodes they have, functions in beta.
MODEL_WARNINGS = (
    "None of the inputs have requires_grad",
    "Sparse (invariant|CSR)",
    "Unable to accurately infer 'num_nodes'",
    "index_reduce",
)


@dataclass(frozen=True)
class Entry:
    """A model, and what capturing it has to come to."""

    name: str
    family: str
    make: Callable[[], nn.Module]
    data: str = "molecules"
    layers: str = "auto"
    #: What a refusal has to say; with ``either`` unset, given only where a refusal is expected.
    refused: str | None = None
    #: Whether the design allows a refusal as well as the history.
    either: bool = False
    #: Replays the forward pass of a model that has no calls of :func:`keep`.
    by_hand: ByHand | None = None
    #: The readings that differ in some of the tensors kept; the first is preferred.
    readings: tuple[str, ...] = ("",)

    @property
    def expected(self) -> str:
        """What the test accepts."""
        return "either" if self.either else "refused" if self.refused else "right"


@dataclass(frozen=True)
class Outcome:
    """What came of capturing one entry."""

    entry: Entry
    result: Result
    line: str  #: the refusal, or what is wrong
    wanted: list[int] = field(default_factory=list)  #: widths by hand
    names: list[str] = field(default_factory=list)  #: of the layers captured
    widths: list[int] = field(default_factory=list)

    @property
    def as_expected(self) -> bool:
        """Whether this is the outcome its entry records."""
        wanted = ("right", "refused") if self.entry.either else (self.entry.expected,)
        return self.result in wanted


ENTRIES: list[Entry] = []


def add(name: str, family: str, make: Callable[[], nn.Module], **options: Any) -> None:
    """Register a model by a function that makes it."""
    ENTRIES.append(Entry(name, family, make, **options))


def entry(name: str, family: str, **options: Any) -> Callable[[AnyModule], AnyModule]:
    """Register the class below, a model that needs no arguments."""

    def register(kind: AnyModule) -> AnyModule:
        add(name, family, kind, **options)
        return kind

    return register


# --- the history by hand


class _Recording:
    """The tensors kept in a pass that is being recorded."""

    tensors: list[Tensor] | None = None
    reading = ""


def keep(tensor: Tensor, *readings: str) -> Tensor:
    """Say that the history has to hold this tensor (in these readings of it), and return it."""
    if _Recording.tensors is not None and (not readings or _Recording.reading in readings):
        _Recording.tensors.append(tensor.detach().clone().flatten(1))  # [num_nodes, width]
    return tensor


def recording() -> bool:
    """Whether the history is being written down: a place to compute what ``forward`` does not."""
    return _Recording.tensors is not None


@contextmanager
def _recording(reading: str) -> Iterator[list[Tensor]]:
    _Recording.tensors, _Recording.reading = [], reading
    try:
        yield _Recording.tensors
    finally:
        _Recording.tensors = None


def histories_by_hand(entry: Entry, model: nn.Module, batch: Batch) -> list[list[Tensor]]:
    """Return the history in each of its readings, from passes without capture."""
    model = getattr(model, "_orig_mod", model)
    histories = []
    for reading in entry.readings:
        with _recording(reading) as tensors:
            if entry.by_hand is None:
                call_model(model, batch.clone())
            else:
                tensors.extend(x.flatten(1) for x in entry.by_hand(model, batch.clone()))
        histories.append(tensors)
    return histories


# --- capture against it


def examine(entry: Entry) -> Outcome:
    """Plan on one batch, capture another, and compare with the histories by hand."""
    torch.manual_seed(0)
    model = entry.make().eval()
    _as_if_trained(model)
    probe, later = BATCHES[entry.data]()
    with warnings.catch_warnings(), torch.no_grad():
        for message in MODEL_WARNINGS:
            warnings.filterwarnings("ignore", message=message)
        wanted = []
        if entry.refused is None or entry.either:
            wanted = histories_by_hand(entry, model, later)
        widths = [x.shape[1] for x in wanted[0]] if wanted else []
        try:
            plan = plan_capture(model, probe, layers=entry.layers)
            captured = Capture(model, plan).run(later.clone())
            # Without the wrapper of torch.compile: compiling is what this does not need.
            plain = call_model(getattr(model, "_orig_mod", model), later.clone())
        except HistographError as error:
            return _refused(entry, str(error), widths)
        except Exception as error:  # whatever else is raised is no refusal
            return Outcome(entry, "wrong", f"{type(error).__name__}: {error}", widths)
    # By hand in the order made; in the plan the last state stands behind what is pooled of it.
    at = len(plan.names) - 1
    while at and plan.names[at - 1].startswith("pooled"):
        at -= 1
    *found, state = captured.history
    found.insert(at, state)
    wrong = [_difference(found, history) for history in wanted]
    if not all(map(torch.equal, _tensors(captured.output), _tensors(plain))):
        return _captured(entry, "wrong", "another output with capture", plan, widths)
    if not wanted:
        return _captured(entry, "wrong", "captured, where a refusal is expected", plan, widths)
    if None in wrong:
        return _captured(entry, "right", "", plan, widths)
    return _captured(entry, "wrong", str(wrong[0]), plan, widths)


@torch.no_grad()
def _as_if_trained(model: nn.Module) -> None:
    """Move norms away from their start, where in ``eval()`` they hand on what they are given."""
    for module in model.modules():
        if "norm" in type(module).__name__.lower():
            for name, tensor in (
                *module.named_parameters(recurse=False),
                *module.named_buffers(recurse=False),
            ):
                if tensor.is_floating_point() and tensor.dim():
                    near = 0.5 if name.endswith(("weight", "running_var")) else -0.5
                    tensor.copy_(torch.rand(tensor.shape) + near)


def _tensors(output: Any) -> list[Tensor]:
    """Return the tensors of an output in order; an output may be nested."""
    if isinstance(output, Tensor):
        return [output]
    if is_dataclass(output):
        output = vars(output)
    parts = output.values() if isinstance(output, dict) else output or ()
    return [tensor for part in parts for tensor in _tensors(part)]


def _refused(entry: Entry, message: str, widths: list[int]) -> Outcome:
    line = message.splitlines()[0]
    useful = re.search(entry.refused or USEFUL, line) is not None
    return Outcome(entry, "refused" if useful else "wrong", line, widths)


def _captured(
    entry: Entry, result: Result, line: str, plan: CapturePlan, wanted: list[int]
) -> Outcome:
    return Outcome(entry, result, line, wanted, list(plan.names), list(plan.widths))


def _difference(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> str | None:
    """Say how a history differs from the one by hand; None if it does not."""
    if not wanted:
        return "nothing was kept by hand"
    if len(found) == len(wanted) and all(map(_close, found, wanted)):
        return None
    origins = [_position(x, wanted) for x in found]
    missing = [str(at) for at in range(len(wanted)) if at not in origins]
    parts = [f"{len(found)} layers where {len(wanted)} are by hand"]
    parts += [f"without {', '.join(missing)}"] if missing else []
    strange = [str(at) for at, origin in enumerate(origins) if origin is None]
    parts += [f"{', '.join(strange)} found nowhere by hand"] if strange else []
    if not missing and not strange:
        parts.append(f"in the order {origins}")
    return "; ".join(parts)


def _position(tensor: Tensor, among: Sequence[Tensor]) -> int | None:
    return next((at for at, other in enumerate(among) if _close(tensor, other)), None)


def _close(found: Tensor, wanted: Tensor) -> bool:
    same_kind = found.shape == wanted.shape and found.dtype == wanted.dtype
    return same_kind and torch.allclose(found, wanted, rtol=TOLERANCE, atol=TOLERANCE)
