"""Strict loading: a checkpoint and a model agree on every tensor, or nothing goes on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..errors import CheckpointError
from ..utils.files import atomic_path
from .key_map import KeyMap
from .reading import Checkpoint
from .report import KeyRow, LoadReport, Shape, is_transpose, suggest_key_map, with_nearest
from .unpickling import printable

# --- the weights of a network: their identity, one hash, and the file they are kept in


def weights_sha256(state_dict: Mapping[str, Any]) -> str:
    """Return a SHA-256 over names, dtypes, shapes and bytes, in the order of the names.

    The same weights give the same hash whatever file format, device or prefix they came with.
    Extra state that is no tensor does not count; a built-in model's settings do.
    """
    digest = hashlib.sha256()
    for name, value in sorted(state_dict.items()):
        if not isinstance(value, Tensor):
            continue
        tensor = value.detach().cpu().contiguous()
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def save_weights(state_dict: Mapping[str, Any], path: Path) -> None:
    """Write parameters and buffers as a safetensors file."""
    # Cloned, because weights that are tied share memory, which the format refuses.
    weights = {
        name: value.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, value in state_dict.items()
        if isinstance(value, Tensor)
    }
    with atomic_path(path) as partial:
        partial.write_bytes(save(weights))  # its own writer leaves files that others cannot read


#: What an honest checkpoint may lack: counters that old versions of torch did not keep, and a
#: module's own notes, which are no weights.
_OPTIONAL = ("num_batches_tracked", "_extra_state")


def load_into(
    model: nn.Module, checkpoint: Checkpoint, *, key_map: KeyMap | None = None
) -> LoadReport:
    """Copy a checkpoint's tensors into a model; a mismatch raises, with a table as its details.

    The names are tried without the prefixes of wrappers first, then with them: a model may have a
    ``model.`` of its own. Floating-point values take the precision of the model's parameters.
    """
    expected = {
        name: value
        for name, value in model.state_dict(keep_vars=True).items()
        if isinstance(value, Tensor)
    }
    attempts = [(_compare(expected, tensors), tensors) for tensors in _namings(checkpoint, key_map)]
    report, tensors = max(attempts, key=lambda attempt: (attempt[0].ok, attempt[0].loaded))
    if not report.ok:
        report = with_nearest(report)
        if key_map is None:
            report = _with_suggestion(report, expected, tensors)
        details = report.table()
        if key_map is not None and (idle := _idle_rules(checkpoint, key_map)):
            details += "\n\nLines of the key map that match nothing: " + ", ".join(idle)
        raise CheckpointError(
            f"{checkpoint.path}: does not fit the model: {report.summary()}", details=details
        )
    fitted = {
        name: tensor if is_lazy(expected[name]) else tensor.reshape(expected[name].shape)
        for name, tensor in tensors.items()
    }
    try:
        model.load_state_dict(fitted, strict=False)
    except RuntimeError as error:
        # What only a layer itself can tell, such as the output width of a lazy one.
        reason = str(error).strip().splitlines()[-1].strip()
        raise CheckpointError(
            f"{checkpoint.path}: does not fit the model: {printable(reason)}"
        ) from error
    return report


def _namings(checkpoint: Checkpoint, key_map: KeyMap | None) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors under each set of names they may go by, barest first."""
    for kept in range(len(checkpoint.stripped) + 1):
        prefix = "".join(checkpoint.stripped[len(checkpoint.stripped) - kept :])
        tensors = {prefix + name: tensor for name, tensor in checkpoint.state_dict.items()}
        yield tensors if key_map is None else key_map.apply(tensors)


def _idle_rules(checkpoint: Checkpoint, key_map: KeyMap) -> list[str]:
    names = {name for tensors in _namings(checkpoint, None) for name in tensors}
    return [printable(rule.old) for rule in key_map.rules if not any(map(rule.matches, names))]


def _compare(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> LoadReport:
    """Hold a file's tensors against a model's, without looking for similar names yet."""
    wrong = tuple(
        KeyRow("wrong shape", name, _shape(found[name]), _shape(value), note=note)
        for name, value in expected.items()
        if name in found and (note := _misfit(found[name], value)) is not None
    )
    fitting = found.keys() & expected.keys() - {row.name for row in wrong}
    filled = {id(expected[name]) for name in fitting}
    # torch before 0.4.1 did not save the counter of batch norm, and safetensors saves a tensor
    # that the model has under several names once.
    defaulted = tuple(
        name
        for name, value in expected.items()
        if name not in found and (name.endswith(_OPTIONAL) or id(value) in filled)
    )
    return LoadReport(
        loaded=len(fitting),
        missing=tuple(
            KeyRow("missing", name, in_model=_shape(value))
            for name, value in expected.items()
            if name not in found and name not in defaulted
        ),
        unexpected=tuple(
            KeyRow("unexpected", name, in_file=_shape(value))
            for name, value in found.items()
            if name not in expected
        ),
        wrong_shape=wrong,
        defaulted=defaulted,
        converted=sum(found[name].dtype != expected[name].dtype for name in fitting),
    )


def _shape(tensor: Tensor) -> Shape | None:
    return None if is_lazy(tensor) else tuple(tensor.shape)


def _misfit(found: Tensor, expected: Tensor) -> str | None:
    """Say why a tensor cannot go where its name points; empty for its shape, None if it can."""
    if found.is_floating_point() != expected.is_floating_point():
        return f"{found.dtype} in the file, {expected.dtype} in the model".replace("torch.", "")
    shapes = _shape(found), _shape(expected)
    if shapes[1] is None or shapes[0] == shapes[1] or set(shapes) == {(), (1,)}:
        return None
    return "its transpose" if is_transpose(*shapes) else ""


def _with_suggestion(
    report: LoadReport, expected: Mapping[str, Tensor], found: Mapping[str, Tensor]
) -> LoadReport:
    """Add the key map to try, and whether it would settle everything."""
    suggestion = suggest_key_map(report)
    if suggestion is None:
        return report
    try:
        fits = _compare(expected, suggestion.apply(found)).ok
    except CheckpointError:  # two tensors would get the same name
        fits = False
    return replace(report, suggestion=suggestion, suggestion_fits=fits)
