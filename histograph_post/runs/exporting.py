"""Export: the heads of a run as a program without this package, or the whole model as a folder.

The program is checked before it is written: loaded again, and compared with the head on batches of
other sizes than the one it was traced with.
"""

from __future__ import annotations

import io
import logging
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.export import export as trace
from torch.export import load as load_program
from torch.export import save as save_program

from ..caches.manifest import CANARY_NAME
from ..errors import ModelError, OutputExistsError
from ..heads.base import Readout
from ..heads.standardize import Standardizer
from ..training.batches import HeadInputs
from ..utils.files import (
    config_text,
    finished_name,
    save_tensors,
    to_json,
    write_bytes,
    write_json,
    write_text,
)
from ..utils.outputs import OutputFolder, output_file
from .folder import write_checksums
from .predictor import load
from .run import CONFIG_NAME, HEAD_CONFIG_NAME, HEAD_NAME, MODEL_NAME, SUMS_NAME, Run
from .saved_head import SavedHead

#: The file inside a ``.pt2`` that describes inputs and outputs.
DESCRIPTION_NAME = "histograph.json"

#: Nodes per graph of the batch that is traced, and of those the program is checked on.
_TRACED_SIZES = (3, 4, 4)
_CHECKED_SIZES: tuple[tuple[int, ...], ...] = ((1,), (7,), (1, 1), (2, 9, 4, 1, 150), (3,) * 40)

#: Largest difference to the head, relative to the largest output (or 1).
_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Exported:
    """What was exported."""

    path: Path
    #: A line of Python that calls it.
    usage: str
    #: Largest difference to the head on the batches of the check; None for a whole model.
    difference: float | None = None


class HeadProgram(nn.Module):
    """The heads of a run, from captured activations to outputs.

    Shapes:
        - **history:** as captured, ``[num_nodes, L, D]``, or one ``[num_nodes, D_l]`` per layer
        - **sizes:** nodes of each graph, ``[num_graphs]``, such as ``batch.ptr.diff()``
        - **pairs:** pairs of nodes to score, ``[2, num_pairs]``, for links only
        - **output:** a row per graph, node or pair, the mean over the heads: logits, calibrated
          if the run has a temperature, or values in the units of the labels
    """

    def __init__(self, saved: SavedHead) -> None:
        super().__init__()
        self.heads = saved.build()

    def forward(
        self, history: Tensor | Sequence[Tensor], sizes: Tensor, pairs: Tensor | None = None
    ) -> Tensor:
        """Return the outputs of a batch of graphs, none of them empty."""
        layers = list(history.unbind(1)) if isinstance(history, Tensor) else list(history)
        nodes = torch.arange(layers[0].size(0), device=sizes.device)  # [num_nodes]
        batch = torch.searchsorted(sizes.cumsum(0), nodes, right=True)  # [num_nodes]
        outputs: Tensor = self.heads(HeadInputs(layers, batch, sizes.size(0), pairs=pairs))
        return outputs  # [rows, out_dim]


def export(
    run: str | Path | Run,
    out: str | Path,
    *,
    whole: bool = False,
    model: nn.Module | str | None = None,
    head: str | type[Readout] | None = None,
    checkpoint: str | Path | None = None,
    key_map: str | Path | None = None,
    trust: bool = False,
    in_dim: int | None = None,
    overwrite: bool = False,
    config: Mapping[str, Any] | None = None,
) -> Exported:
    """Export the head of a run as a ``torch.export`` program, or the whole model as a folder.

    Args:
        run: A finished run, or its folder.
        out: A ``.pt2`` file, or a folder for the whole model.
        whole: Backbone and head together, for :func:`~histograph_post.load` without the cache.
        model: See :func:`~histograph_post.load`, as for ``checkpoint``, ``key_map``, ``trust`` and
            ``in_dim``; for the whole model only.
        head: Another readout of the run than the one it predicts with, by name; or your own, as
            ``my_head.py:MyHead`` or the class.
        overwrite: Replace an older export.
        config: The options this came from, saved beside the file, or in the folder.
    """
    opened, target = Run.of(run).with_head(head), Path(out)
    if not whole:
        return _export_head(opened.saved_head, target, overwrite=overwrite, config=config)
    given: dict[str, Any] = {"checkpoint": checkpoint, "key_map": key_map, "trust": trust}
    with OutputFolder(target, _is_ours) as output:
        _refuse_others(target, overwrite=overwrite)
        predictor = load(opened, model=model, in_dim=in_dim, device="cpu", **given)
        folder = output.replace()  # an export appears only once it is complete
        _refuse_others(folder, overwrite=True)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        save_tensors(folder / MODEL_NAME, predictor.backbone.state_dict())
        stored = dict(opened.stored_head)
        if opened.readout is None:
            write_bytes(folder / HEAD_NAME, (opened.folder / HEAD_NAME).read_bytes())
        else:  # its members are put into one file
            write_bytes(folder / HEAD_NAME, save(opened.saved_head.weights()))
            stored["members"] = [
                {name: value for name, value in member.items() if name != "file"}
                for member in stored["members"]
            ]
        named = opened.backbone.model
        if isinstance(model, str):
            named = named.to_follow(model)
        backbone = replace(
            opened.backbone,
            file=folder / HEAD_CONFIG_NAME,
            model=replace(named, checkpoint=Path(MODEL_NAME)),
            cache=folder,
            in_run=True,
        )
        opened.backbone.carry_canary(folder)
        write_json(backbone.file, {**stored, "backbone": backbone.to_json()})
        if config is not None:
            write_text(folder / CONFIG_NAME, config_text(config))
        write_checksums(folder)
        load(folder, model=model, in_dim=in_dim, device="cpu")  # refuses other weights
        output.finish()
    code = "..." if isinstance(model, nn.Module) else repr(named.spec)
    arguments = "" if named.is_built_in else f", model={code}"
    if own := opened.saved_head.info.code:
        arguments += f", head={own!r}"
    return Exported(target, f"hg.load({str(target)!r}{arguments})(batch)")


def _export_head(
    saved: SavedHead, target: Path, *, overwrite: bool, config: Mapping[str, Any] | None
) -> Exported:
    if saved.info.needs_edge_index:
        raise ModelError(_refusal(saved, "it changes the graph as it goes"))
    program = HeadProgram(saved).eval()
    if any(getattr(each, "needs_edge_index", False) for each in program.modules()):
        raise ModelError(_refusal(saved, "it attends along edges"))
    with output_file(target, overwrite=overwrite, config=config) as write:
        buffer = io.BytesIO()
        description = {DESCRIPTION_NAME: to_json(describe(saved))}
        save_program(trace_program(program, saved), buffer, extra_files=description)
        buffer.seek(0)
        difference = check_program(load_program(buffer), program, saved)
        write(buffer.getvalue())
    inputs = "history, sizes, pairs" if saved.task.level == "link" else "history, sizes"
    usage = f"torch.export.load({str(target)!r}).module()({inputs})"
    return Exported(target, usage, difference)


def trace_program(program: HeadProgram, saved: SavedHead) -> ExportedProgram:
    """Trace a head for any number of nodes, graphs and pairs."""
    nodes, graphs = Dim("num_nodes", min=1), Dim("num_graphs", min=1)
    inputs = random_inputs(program, saved, _TRACED_SIZES)
    shapes: list[Any] = [{0: nodes}, {0: graphs}]
    if isinstance(inputs[0], list):
        shapes[0] = [{0: nodes}] * len(inputs[0])
    if len(inputs) > 2:
        shapes.append({1: Dim("num_pairs", min=1)})
    try:
        with _silence():
            return trace(program, inputs, dynamic_shapes=tuple(shapes))
    except Exception as error:  # the tracer raises errors of many kinds
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(_refusal(saved, reason)) from error


@contextmanager
def _silence() -> Iterator[None]:
    """Silence the tracer's long logs about what it cannot trace; its error is enough."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*were assigned during export")  # LSTMs
            yield
    finally:
        logging.disable(before)


def check_program(program: ExportedProgram, head: HeadProgram, saved: SavedHead) -> float:
    """Compare a program with the head on batches of other sizes; return the largest difference."""
    loaded, largest = program.module(), 0.0
    for sizes in _CHECKED_SIZES:
        inputs = random_inputs(head, saved, sizes)
        with torch.no_grad():
            expected, found = head(*inputs), loaded(*inputs)  # [rows, out_dim]
        difference = float((expected - found).abs().max())
        if not difference <= _TOLERANCE * max(1.0, float(expected.abs().max())):
            raise ModelError(
                _refusal(saved, f"the program is {difference:.2g} off on graphs of {list(sizes)}")
            )
        largest = max(largest, difference)
    return largest


def random_inputs(program: HeadProgram, saved: SavedHead, sizes: Sequence[int]) -> tuple[Any, ...]:
    """Return activations like those the head was trained on, for graphs of these sizes."""
    random = torch.Generator().manual_seed(len(sizes))
    num_nodes = sum(sizes)
    standardizer = program.heads.members[0].standardizer
    layers = []
    for at, width in enumerate(saved.backbone.capture.widths):
        rows = torch.randn(num_nodes, width, generator=random)  # [num_nodes, D_l]
        if isinstance(standardizer, Standardizer):
            mean, scale = standardizer.statistics(at)  # [D_l]
            rows = rows * scale + mean
        layers.append(rows)
    uniform = len({layer.size(1) for layer in layers}) == 1
    history = torch.stack(layers, dim=1) if uniform else layers  # [num_nodes, L, D]
    if saved.task.level != "link":
        return history, torch.tensor(sizes)
    pairs = torch.randint(num_nodes, (2, 2 * num_nodes), generator=random)  # [2, num_pairs]
    return history, torch.tensor(sizes), pairs


def describe(saved: SavedHead) -> dict[str, Any]:
    """Return the inputs and outputs of a program, as plain values."""
    capture = saved.backbone.capture
    return {
        "head": saved.name,
        "inputs": {
            "history": [{"layer": p.name, "width": p.width} for p in capture.points],
            "sizes": "nodes of each graph",
            **({"pairs": "pairs of nodes, [2, num_pairs]"} if saved.task.level == "link" else {}),
        },
        "output": "values in the units of the labels"
        if saved.task.kind == "regression"
        else "logits",
        "heads": [{"fold": each.fold, "seed": each.seed} for each in saved.members],
        "temperature": saved.temperature,
        "task": saved.task.to_json(),
        "target_names": list(saved.target_names),
        "backbone_weights_sha256": saved.backbone.model.weights_sha256,
    }


def _refusal(saved: SavedHead, reason: str) -> str:
    return (
        f"head {saved.name!r}: found no way to make a program of it ({reason}); export the whole "
        "model with --whole"
    )


def _is_ours(name: str) -> bool:
    """Whether a file of that name belongs to an export."""
    return name in (CONFIG_NAME, MODEL_NAME, HEAD_NAME, HEAD_CONFIG_NAME, CANARY_NAME, SUMS_NAME)


def _refuse_others(folder: Path, *, overwrite: bool) -> None:
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    foreign = {name for name in names if not _is_ours(finished_name(name))}
    if foreign:
        raise OutputExistsError(
            f"{folder}: found {min(foreign)!r}, which is not an export's; choose another -o"
        )
    if names and not overwrite:
        raise OutputExistsError(
            f"{folder}: found an older export; choose another -o, or --overwrite"
        )
