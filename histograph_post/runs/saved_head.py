"""The heads of a finished run: read from its folder, built with their weights, used as one.

Seeds differ in their initial weights and the order of their batches, folds in their training rows.
Their mean predicts better than any one of them, and how much they differ is the spread of a
prediction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from ..heads.base import Readout
from ..heads.registry import (
    RIVALS,
    HeadInfo,
    build_head,
    head_info,
    head_name,
    head_names,
    registered_heads,
)
from ..heads.standardize import EachLayerNorm, Standardizer, head_behind
from ..tasks import TargetScale, Task
from ..training.batches import HeadInputs, HeadNetwork
from ..utils.files import load_tensors
from ..utils.trust import trusted_code
from .fits import FIT_NAME, read_fit
from .records import HeadRecord, head_entries, head_record
from .run import HEAD_CONFIG_NAME, HEAD_NAME, Run, member_prefix, split_name
from .saved_backbone import SavedBackbone


class HeadMember(nn.Module):
    """One trained head, from standardised activations to outputs in the units of the labels.

    Args:
        standardizer: What brings the layers to one scale before it.
        scale: Of its training targets.
    """

    def __init__(self, head: Readout, standardizer: nn.Module | None, scale: TargetScale) -> None:
        super().__init__()
        self.standardizer = standardizer
        self.network = HeadNetwork(head)
        self.scale = scale

    def prepare(self, layers: Sequence[Tensor]) -> Tensor | list[Tensor]:
        """Return layers, each ``[num_nodes, D_l]`` as captured, standardised for the head."""
        if self.standardizer is not None:
            layers = self.standardizer(layers)  # L of [num_nodes, D_l]
        uniform = len({layer.size(1) for layer in layers}) == 1
        return torch.stack(list(layers), dim=1) if uniform else list(layers)  # [num_nodes, L, D]

    def forward(self, inputs: HeadInputs) -> Tensor:
        """Return an output per row: ``[rows, out_dim]``."""
        return self.scale.undo(self.network(inputs))


class HeadEnsemble(nn.Module):
    """The mean of the outputs of several heads: logits, or values in the units of the labels.

    Logits are divided by a temperature, so that the probabilities they stand for are calibrated.
    Every member undoes its own scale first, since the statistics and targets of folds differ.

    Args:
        members: The heads; those of one fold come together and share their standardizer.
        temperature: From validation; 1 leaves logits as they are.
    """

    def __init__(self, members: Sequence[HeadMember], temperature: float = 1.0) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)
        self.temperature = temperature

    def each(self, inputs: HeadInputs) -> Tensor:
        """Return the outputs of every member, each calibrated: ``[members, rows, out_dim]``.

        Args:
            inputs: Their history is a list of layers as captured, each ``[num_nodes, D_l]``.
        """
        found, before, prepared = [], None, inputs
        for number, member in enumerate(self.members):
            assert isinstance(member, HeadMember)
            if not number or member.standardizer is not before:
                before = member.standardizer
                prepared = replace(inputs, history=member.prepare(inputs.history))  # type: ignore[arg-type]
            found.append(member(prepared))  # [rows, out_dim]
        return torch.stack(found) / self.temperature

    def forward(self, inputs: HeadInputs) -> Tensor:
        """Return the mean over the members: ``[rows, out_dim]``."""
        return self.each(inputs).mean(dim=0)

    def __repr__(self) -> str:
        first = self.members[0]
        assert isinstance(first, HeadMember)
        name = type(first.network.head).__name__
        return f"HeadEnsemble({len(self.members)} x {name}, temperature={self.temperature:g})"


# --- read from the folder of a run

Built = tuple[Readout, Standardizer | EachLayerNorm | None]


@dataclass(frozen=True, kw_only=True)
class SavedMember(HeadRecord):
    """One trained head, and where its weights are."""

    file: Path
    #: What their names begin with there.
    prefix: str = ""


@dataclass(frozen=True, repr=False)
class SavedHead:
    """The head of a run: how to build it, what it predicts, what it was trained on."""

    run: Run
    #: Name of the readout.
    name: str
    task: Task
    target_names: tuple[str, ...]
    backbone: SavedBackbone
    #: The fits whose mean the run predicts with, those of a fold together.
    members: tuple[SavedMember, ...]
    #: The best of them, by validation.
    best: SavedMember
    #: What logits are divided by.
    temperature: float

    @classmethod
    def read(cls, run: Run) -> SavedHead:
        """Read ``head.json`` of a run; one of an earlier version has a single head."""
        stored, file = run.stored_head, run.folder / HEAD_NAME
        with run.reading_head():
            entries, members = stored.get("members"), list[SavedMember]()
            for number, entry in enumerate([{}] if entries is None else entries):
                place: dict[str, Any] = {"file": file}
                if run.readout is not None:
                    # Of another readout than the chosen one, every fit has a file of its own.
                    place = {"file": run.folder / entry["file"]}
                elif entries is not None:
                    place["prefix"] = member_prefix(number)
                record = head_record({**stored, **entry}, str(run.folder / HEAD_CONFIG_NAME))
                members.append(SavedMember(**vars(record), **place))
            where, names = str(run.folder / HEAD_CONFIG_NAME), tuple(stored["target_names"])
            task = Task.from_json(stored["task"], where=f"{where}: task")
            for member in members:
                expected = {"out_dim": task.out_dim, "level": task.level}
                built = {name: member.config.get(name, expected[name]) for name in expected}
                if built != expected or len(names) != task.num_targets:
                    raise ConfigError(
                        f"{where}: found a head for {built} and {len(names)} targets, expected "
                        f"those of its task: {expected} and {task.num_targets}"
                    )
            return cls(
                run=run,
                name=stored["head"],
                task=task,
                target_names=names,
                backbone=run.backbone,
                members=tuple(members),
                best=next(each for each in members if (each.fold, each.seed) == run.chosen),
                temperature=float(stored.get("temperature", 1.0)),
            )

    def __repr__(self) -> str:
        return f"SavedHead({self.name!r}, {len(self.members)} members, {str(self.run.folder)!r})"

    @property
    def info(self) -> HeadInfo:
        """The readout by its name; one that is code has to be named or trusted by the user."""
        try:
            return head_info(self.name)
        except ConfigError:
            pass
        spec = self.run.own_heads.get(self.name, "")
        named, problem = trusted_code("head", spec, {})
        if named is not None:
            return head_info(head_name(named))
        folder = self.run.folder
        if not spec:
            raise ConfigError(
                f"{folder}: found the head {self.name!r}, a class that a Python program used, "
                "expected you to name it, as in --head FILE.py:CLASS (head= in Python), or an "
                "installed package that provides this name"
            )
        raise ConfigError(
            f"{folder}: found the head {self.name!r}, which is code that a file names, so it was "
            f"not run; {problem}expected you to name it, as in --head {Path(spec).name} (head= in "
            f"Python), or to approve it: histograph trust {folder}"
        )

    def build(self) -> HeadEnsemble:
        """Return all members as one module."""
        one_of_each = {member.file: member for member in self.members}.values()
        files = {member.file: self._read(member) for member in one_of_each}
        built: list[HeadMember] = []
        for member in self.members:
            head, standardizer = self._build(member, files[member.file])
            if built and _same(built[-1].standardizer, standardizer):
                standardizer = built[-1].standardizer  # type: ignore[assignment]
            scale = TargetScale(**vars(member.target_scale))
            built.append(HeadMember(head, standardizer, scale))
        return HeadEnsemble(built, self.temperature)

    def weights(self) -> dict[str, Tensor]:
        """Return the weights of all members, as ``head.safetensors`` holds them."""
        found: dict[str, Tensor] = {}
        for number, member in enumerate(self.members):
            own = _under(member.prefix, self._read(member))
            found |= {f"{member_prefix(number)}{name}": value for name, value in own.items()}
        return found

    def build_one(self, fold: int, seed: int) -> Built:
        """Return the head of one fit, a member or not, and the standardisation of its inputs."""
        place = (fold, seed)
        member = next((each for each in self.members if (each.fold, each.seed) == place), None)
        if member is None:
            folder = self.run.fit_folder(self.run.head, fold, seed)
            record = head_record(read_fit(folder), str(folder / FIT_NAME))
            member = SavedMember(**vars(record), file=folder / HEAD_NAME)
        return self._build(member, self._read(member))

    def _read(self, member: SavedMember) -> dict[str, Tensor]:
        """Return the tensors of the file with a member's weights, which holds nothing else."""
        path = member.file
        # The file that describes how the head is built is checked as well.
        folder = self.run.folder
        fit = [] if path.parent == folder else [path.with_name(FIT_NAME)]
        self.run.require_own(*(each.relative_to(folder).as_posix() for each in (path, *fit)))
        tensors = load_tensors(path, "the weights of a head")
        members = [each for each in self.members if each.file == path] or [member]
        known = tuple(
            f"{each.prefix}{part}."
            for each in members
            for part in ("head", "standardizer")[: 1 + each.standardize]
        )
        if surplus := [name for name in tensors if not name.startswith(known)]:
            problem = f"found the tensor {surplus[0]!r}, expected only those of its heads"
            raise ConfigError(f"{path}: {problem}")
        return tensors

    def _build(self, member: SavedMember, tensors: Mapping[str, Tensor]) -> Built:
        info = self.info
        if member.source and info.source not in ("", member.source):
            raise ConfigError(
                f"{info.code or info.name}: found code {info.source[:12]}, expected "
                f"{member.source[:12]}, with which {self.run.folder} was trained; restore it, or "
                "train again"
            )
        head = build_head(info.name, **member.config)
        widths = self.backbone.capture.widths
        standardizer = Standardizer(widths) if member.standardize else None
        own = _under(member.prefix, tensors)
        try:
            if standardizer is not None:
                standardizer.load_state_dict(_under("standardizer.", own))
            head.load_state_dict(head_behind(standardizer, _under("head.", own)))
        except RuntimeError as error:
            reason = str(error).splitlines()[-1].strip()
            raise ConfigError(
                f"{member.file}: does not fit {HEAD_CONFIG_NAME}: {reason}"
            ) from error
        return head, EachLayerNorm(widths) if member.layer_norm else standardizer


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): value
        for name, value in tensors.items()
        if name.startswith(prefix)
    }


def _same(one: torch.nn.Module | None, other: torch.nn.Module | None) -> bool:
    """Whether two standardizers have the same statistics."""
    if one is None or other is None or type(one) is not type(other):
        return one is other
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(*pair) for pair in pairs)


# --- another readout of a run than the one it predicts with: by its name, from its fits


def own_name(run: Run, head: str | type[Readout]) -> str:
    """Return what a run calls a readout; a class is registered by this.

    That is the name of the class, unless the run was trained under one that a program had given it.
    """
    if isinstance(head, str) and ":" not in head:
        return head
    name, names = head_name(head), {str(Run(run.folder).stored_head["head"])}
    if run.is_finished:
        names |= {split_name(each)[0] for each in run.readouts}
    if name in names:
        return name
    known = {info.name: info.location for info in registered_heads()}
    same = [each for each in names if known.get(each) is known[name]]
    unknown = [each for each in names if each not in (*head_names(rivals=True), *run.own_heads)]
    found = same or unknown
    return head_name(head, found[0]) if len(found) == 1 else name


def readout_named(run: Run, head: str | type[Readout]) -> str | None:
    """Return the name of the readout that a user asks for; None for the one it predicts with.

    Args:
        run: The run, or an export, which has one readout.
        head: Its name, or a readout of the user's own, which is registered by this.
    """
    is_code = not isinstance(head, str) or ":" in head
    name = own_name(run, head)
    stored = Run(run.folder).stored_head["head"]
    if not run.is_finished:
        if name == stored:
            return None
        raise ConfigError(f"{run.folder}: found the head {stored!r} alone, expected {name!r}")
    chosen, kept = str(run.results["head"]), kept_readouts(run)
    if name == chosen or (name == stored and (is_code or name not in run.results["readouts"])):
        return None
    if name in kept:
        return name
    if name in RIVALS and name in run.readouts:
        raise ConfigError(
            f"head {name!r}: found a readout that is compared only, expected one that is saved: "
            f"{', '.join(kept)}"
        )
    # After fine-tuning, the head that it began with is one more row of the results, and not kept.
    hint = "; the run that was fine-tuned predicts with it, frozen" if name == stored else ""
    raise ConfigError(
        f"{run.folder}: found no readout {name!r} that was kept, expected one of "
        f"{', '.join(kept)}{hint}"
    )


def kept_readouts(run: Run) -> list[str]:
    """Return the readouts of a run that can be loaded, the one it predicts with first."""
    chosen, fits = str(run.results["head"]), run.results["fits"]
    if any("backbone" in fit for fit in fits):
        return [chosen]  # the others were trained on the frozen backbone
    others = [
        fit["head"]
        for fit in fits
        if (run.fit_folder(fit["head"], fit["fold"], fit["seed"]) / HEAD_NAME).is_file()
    ]
    return list(dict.fromkeys([chosen, *others]))


def stored_readout(run: Run, name: str, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``head.json`` as it would be if the run predicted with that readout.

    Its members are the fits on the backbone of the chosen head; of a solved readout, one per fold.
    A run of an earlier version has no temperature for it.

    Args:
        name: One of :func:`kept_readouts`.
        chosen: ``head.json``.
    """
    weights = {**run.plan.get("frozen", {}), **run.plan}.get("weights", ())
    own = chosen["backbone"]["weights_sha256"]
    fits = [
        fit
        for fit in run.results["fits"]
        if fit["head"] == name and (len(weights) < 2 or weights[fit["fold"]] == own)
    ]
    members: list[dict[str, Any]] = []
    for fit in sorted(fits, key=lambda fit: (fit["fold"], fit["seed"])):
        if "strength" in fit and any(each["fold"] == fit["fold"] for each in members):
            continue  # the same solution for every seed
        folder = run.fit_folder(name, fit["fold"], fit["seed"])
        stored = read_fit(folder)
        file = str((folder / HEAD_NAME).relative_to(run.folder))
        members.append({**head_entries(stored), "file": file})
    metric, sign = run.results["metric"], 1 if run.results["higher_is_better"] else -1
    scores = {(fit["fold"], fit["seed"]): fit["scores"].get("valid", {}) for fit in fits}
    best = max(
        members,
        key=lambda each: sign * scores[each["fold"], each["seed"]].get(metric, -sign * 1e300),
    )
    row = run.results["readouts"][name]
    return {
        **chosen,
        **head_entries(best),
        "head": name,
        "members": members,
        "temperature": row.get("temperature", 1.0),
    }
