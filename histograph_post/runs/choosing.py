"""Another readout of a run than the one it predicts with: found by name, read from its fits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from ..heads.registry import RIVALS, head_name
from .run import HEAD_NAME, RESULTS_NAME, Run, read_json

if TYPE_CHECKING:
    from ..heads.base import Readout

#: What ``fit.json`` says of a fit, and ``head.json`` of a member.
_OF_A_MEMBER = ("fold", "seed", "config", "standardize", "layer_norm", "target_scale")


def readout_named(run: Run, head: str | type[Readout]) -> str | None:
    """Return the readout of a run that a user asks for; None for the one it predicts with.

    Args:
        run: The run, or an export, which has one readout.
        head: Its name, or a readout of one's own, which gets a name by this.
    """
    is_code = not isinstance(head, str) or ":" in head
    name = head_name(head) if is_code else str(head)
    stored = Run(run.folder).stored_head["head"]
    if not (run.folder / RESULTS_NAME).is_file():
        if name == stored:
            return None
        raise ConfigError(f"{run.folder}: found the head {stored!r} alone, expected {name!r}")
    chosen, kept = str(run.results["head"]), kept_readouts(run)
    if name == chosen or (name == stored and (is_code or name not in kept)):
        return None
    if name in kept:
        return name
    if name in RIVALS and name in run.readouts:
        raise ConfigError(
            f"head {name!r}: found a readout that is compared only, expected one that is saved: "
            f"{', '.join(kept)}"
        )
    raise ConfigError(f"{run.folder}: found no readout {name!r}, expected one of {', '.join(kept)}")


def kept_readouts(run: Run) -> list[str]:
    """Return the readouts of a run that can be loaded, the one it predicts with first."""
    chosen, fits = str(run.results["head"]), run.results["fits"]
    if any("backbone" in fit for fit in fits):
        return [chosen]  # the others read another backbone than the one that was trained
    others = [
        fit["head"]
        for fit in fits
        if (run.fit_folder(fit["head"], fit["fold"], fit["seed"]) / HEAD_NAME).is_file()
    ]
    return list(dict.fromkeys([chosen, *others]))


def stored_readout(run: Run, name: str, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return what ``head.json`` would say if the run predicted with that readout.

    Its members are the fits that read the backbone of the chosen head, of those that are solved one
    of each fold. A run of an earlier version has no temperature for it.

    Args:
        run: The run.
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
        stored = {"layer_norm": False, **read_json(folder, "fit.json")}
        file = str((folder / HEAD_NAME).relative_to(run.folder))
        members.append({part: stored[part] for part in _OF_A_MEMBER} | {"file": file})
    metric, sign = run.results["metric"], 1 if run.results["higher_is_better"] else -1
    scores = {(fit["fold"], fit["seed"]): fit["scores"].get("valid", {}) for fit in fits}
    best = max(
        members,
        key=lambda each: sign * scores[each["fold"], each["seed"]].get(metric, -sign * 1e300),
    )
    row = run.results["readouts"][name]
    return {
        **chosen,
        **{part: best[part] for part in _OF_A_MEMBER},
        "head": name,
        "members": members,
        "temperature": row.get("temperature", 1.0),
    }
