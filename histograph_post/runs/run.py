"""The run folder: the options, the results, and everything needed to use what was trained.

config.toml       the options, resolved; can be given as --config
run.json          all that the result depends on; a run resumes only if it is the same
splits.json       which rows trained, validated and tested
metrics.jsonl     a line per epoch of every fit
results.json      scores per fit, means, deviations and paired differences
predictions.csv   the outputs for the test rows, the seeds of a fold averaged
head.safetensors  the heads that the run predicts with, and head.json, how to build them
model.safetensors its backbone, where that was trained too, and fold-0/ ..., one of every fold
fits/             every fit: readout, fold and seed
tensorboard/      event files, if they were asked for
study.log         the trials of a search, trials.csv, the same as a table, best.toml, the best
                  options, and trials/, fits of a trial that is not over
SHA256SUMS        the hash of every file above, which readers check
report.html       the report, after histograph report
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..caches import MANIFEST_NAME
from ..errors import ConfigError, HistographError, NotFoundError
from ..utils.decoding import read_json_file, read_json_lines, read_toml_file
from ..utils.files import read_regular, sha256_file
from ..utils.text import data_frame
from .records import check_head, check_log, check_plan, check_results

if TYPE_CHECKING:
    import pandas
    from torch import nn

    from ..heads.base import Readout
    from ..metrics import Key
    from ..splits import Splits
    from ..tasks import Task
    from .predicting import Embeddings
    from .saved_backbone import SavedBackbone
    from .saved_head import HeadEnsemble, SavedHead
    from .verdict import Verdict

CONFIG_NAME = "config.toml"
RUN_NAME = "run.json"
SPLITS_NAME = "splits.json"
METRICS_NAME = "metrics.jsonl"
RESULTS_NAME = "results.json"
PREDICTIONS_NAME = "predictions.csv"
HEAD_NAME = "head.safetensors"
HEAD_CONFIG_NAME = "head.json"
REPORT_NAME = "report.html"
MODEL_NAME = "model.safetensors"
FITS_NAME = "fits"
EVENTS_NAME = "tensorboard"
STUDY_NAME = "study.log"
TRIALS_NAME = "trials.csv"
BEST_NAME = "best.toml"
TRIAL_FITS_NAME = "trials"
SUMS_NAME = "SHA256SUMS"


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """Read one of a run's JSON files."""
    path = folder / name
    if not os.path.lexists(path):
        hint = "; run the same command again to finish it" if (folder / RUN_NAME).is_file() else ""
        raise ConfigError(f"{folder}: found no {name}, expected a finished run{hint}")
    value = read_json_file(path)
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: found {type(value).__name__}, expected an object")
    return value


Kind = Literal["train-head", "compare", "tune", "finetune", "pretrain", "export"]

#: Bytes of ``SHA256SUMS`` at most.
_MOST_SUMS = 2**28


@dataclass(frozen=True, eq=False)
class Run:
    """A run folder, whose files are read on first use and then cached.

    Only :attr:`task`, :attr:`saved_head`, :meth:`load_head` and :meth:`load_ensemble` need torch.

    Args:
        readout: Another readout of the run than the one it predicts with, see :meth:`with_head`.
    """

    folder: Path
    readout: str | None = None

    @classmethod
    def open(cls, folder: str | Path) -> Run:
        """Open a run folder; one that is not finished is refused."""
        run = cls(Path(folder))
        if not run.folder.is_dir():
            raise NotFoundError(f"{folder}: found no folder, expected a finished run")
        _ = run.results  # refuses
        return run

    @classmethod
    def of(cls, run: str | Path | Run) -> Run:
        """Return a run, or open its folder; an exported model is a run without results."""
        found = run if isinstance(run, Run) else cls(Path(run))
        if not found.folder.is_dir():
            raise NotFoundError(f"{found.folder}: found no folder, expected a run")
        if (found.folder / MANIFEST_NAME).is_file():
            raise ConfigError(
                f"{found.folder}: found a cache, expected a run; train one with "
                f"`histograph train-head {found.folder} -o RUN`"
            )
        return found

    @property
    def is_finished(self) -> bool:
        """Whether all of its fits are done; some may be left to other jobs."""
        return (self.folder / RESULTS_NAME).is_file()

    @property
    def name(self) -> str:
        """The name of the folder."""
        return self.folder.resolve().name

    # --- the small files

    @cached_property
    def sums(self) -> Mapping[str, str]:
        """``SHA256SUMS``: the hash of every file; none for a run of an earlier version."""
        path = self.folder / SUMS_NAME
        if not os.path.lexists(path):
            return {}
        text = read_regular(path, _MOST_SUMS).decode("utf-8", errors="replace")
        lines = [re.fullmatch(r"([0-9a-f]{64})  (.+)", line) for line in text.splitlines()]
        if not lines or not all(lines):
            raise ConfigError(f"{path}: not a list of SHA-256 sums")
        return {line[2]: line[1] for line in lines if line is not None}

    def require_own(self, *names: str) -> None:
        """Refuse files that have been edited since the run, or belong to another one."""
        for name in names:
            path = self.folder / name
            if not self.sums or not path.is_file():
                continue
            found, expected = sha256_file(path), self.sums.get(name, "nothing")
            if found != expected:
                raise ConfigError(
                    f"{path}: found other contents (SHA-256 {found[:12]}) than SHA256SUMS lists "
                    f"({expected[:12]}), expected the run's own; give its command again to mend it"
                )

    def _read(self, name: str, check: Callable[[Mapping[str, Any], str], None]) -> dict[str, Any]:
        found = read_json(self.folder, name)
        self.require_own(name)
        check(found, str(self.folder / name))
        return found

    @cached_property
    def results(self) -> Mapping[str, Any]:
        """``results.json``: scores, means, deviations and paired differences."""
        return self._read(RESULTS_NAME, check_results)

    @cached_property
    def plan(self) -> Mapping[str, Any]:
        """``run.json``: all that the result depends on; empty for an export."""
        there = os.path.lexists(self.folder / RUN_NAME)
        return self._read(RUN_NAME, check_plan) if there else {}

    @cached_property
    def config(self) -> Mapping[str, Any] | None:
        """``config.toml``: the options of the command; None for a run started from Python."""
        path = self.folder / CONFIG_NAME
        self.require_own(CONFIG_NAME)
        return read_toml_file(path) if os.path.lexists(path) else None

    @property
    def own_heads(self) -> dict[str, str]:
        """The user's own readouts that its command named: class to ``file.py:Class``."""
        options = self.config or {}
        given = [*str(options.get("heads", "")).split(","), str(options.get("head", ""))]
        return {spec.rpartition(":")[2]: spec for spec in given if ":" in spec}

    @cached_property
    def stored_head(self) -> Mapping[str, Any]:
        """``head.json``: the chosen head, its members and backbone; or those of another readout."""
        if self.is_finished and not os.path.lexists(self.folder / HEAD_CONFIG_NAME):
            self.require_readouts()
        stored = self._read(HEAD_CONFIG_NAME, check_head)
        if self.readout is None:
            return stored
        from .saved_head import stored_readout

        with self.reading_head():
            return stored_readout(self, self.readout, stored)

    @cached_property
    def splits(self) -> Splits:
        """``splits.json``: which rows trained, validated and tested."""
        from ..splits import Splits

        self.require_own(SPLITS_NAME)
        return Splits.load(self.folder / SPLITS_NAME)

    @cached_property
    def log(self) -> list[dict[str, Any]]:
        """``metrics.jsonl``: a line per epoch of every fit; empty if the file is gone."""
        path = self.folder / METRICS_NAME
        self.require_own(METRICS_NAME)
        return check_log(read_json_lines(path), str(path)) if os.path.lexists(path) else []

    # --- what they mean

    @property
    def kind(self) -> Kind:
        """The command that makes such a folder."""
        if not is_run(self.folder):
            return "export"
        stage = self.plan.get("stage")
        if stage is not None:
            return stage if stage in ("finetune", "tune") else "pretrain"
        if self.config is not None:
            return "train-head" if "head" in self.config else "compare"
        several = len(self.plan.get("heads", ())) > 2  # a readout and its baseline
        return "compare" if several else "train-head"

    def require_readouts(self) -> Run:
        """Return this run, refusing backbones that were pretrained with their own readout."""
        if "readouts" not in self.results:
            raise ConfigError(
                f"{self.folder}: found backbones without a head, expected a run with one; go on "
                f"with `histograph cache {self.folder} -o CACHES`"
            )
        return self

    @cached_property
    def task(self) -> Task:
        """What is predicted."""
        from ..tasks import Task

        where = f"{self.folder / RESULTS_NAME}: task"
        return Task.from_json(self.results["task"], where=where)

    @property
    def head(self) -> str:
        """The readout that the run predicts with, as tables and results name it."""
        return self.readout or str(self.require_readouts().results["head"])

    def with_head(self, head: str | type[Readout] | None) -> Run:
        """Return this run with another of its readouts, with which it then predicts.

        Args:
            head: A name of :attr:`readouts`; or one of your own as ``my_head.py:MyHead`` or the
                class, which is registered by this. None for the one the run predicts with.
        """
        if head is None:
            return self
        from .saved_head import readout_named

        return Run(self.folder, readout_named(self, head))

    @property
    def verdict(self) -> Verdict:
        """What to do, in a sentence: use the head, keep your own readout, or undecided."""
        from .verdict import verdict_of

        return verdict_of(self.require_readouts().results, self.readout)

    @property
    def readouts(self) -> list[str]:
        """Every readout that was trained, in the order of the run."""
        return list(dict.fromkeys(fit["head"] for fit in self.require_readouts().results["fits"]))

    @property
    def chosen(self) -> Key:
        """Fold and seed of the best single head, by validation."""
        return self.stored_head["fold"], self.stored_head["seed"]

    def scores(self, readout: str, part: str, metric: str | None = None) -> dict[Key, float]:
        """Return the score of each fold and seed that has one."""
        metric = metric or self.results["metric"]
        return {
            (fit["fold"], fit["seed"]): fit["scores"][part][metric]
            for fit in self.results["fits"]
            if fit["head"] == readout and metric in fit["scores"].get(part, {})
        }

    def fit_folder(self, readout: str, fold: int, seed: int) -> Path:
        """Return where one fit is kept."""
        return self.folder / fit_place(readout, fold, seed)

    def to_frame(self, *, fits: bool = False) -> pandas.DataFrame:
        """Return the results as a pandas frame (extra ``pandas``), the best by validation first.

        Args:
            fits: A row per fit, with every score, instead of one per readout.
        """
        from .summary import fit_rows, readout_rows

        run = self.require_readouts()
        return data_frame(fit_rows(run)) if fits else data_frame(readout_rows(run), "readout")

    def __repr__(self) -> str:
        if not self.is_finished or "readouts" not in self.results:
            return f"Run({str(self.folder)!r})"
        row = self.results["readouts"][self.head]
        test = (row.get("averaged") or row)["test"]
        score = "" if test is None else f", test {self.results['metric']} {test['mean']:.4f}"
        return f"Run({str(self.folder)!r}, {self.head}{score})"

    @cached_property
    def backbone(self) -> SavedBackbone:
        """What the run records of its backbone."""
        from .saved_backbone import SavedBackbone

        with self.reading_head():
            entry = self.stored_head["backbone"]
            return SavedBackbone.from_json(entry, self.folder / HEAD_CONFIG_NAME)

    @cached_property
    def saved_head(self) -> SavedHead:
        """The heads that the run predicts with: how to build them and what they predict."""
        from .saved_head import SavedHead

        return SavedHead.read(self)

    def load_head(
        self, fold: int | None = None, seed: int | None = None
    ) -> tuple[Readout, nn.Module | None]:
        """Return one trained head, and the standardisation of its inputs.

        By default the best single one, by validation, to look into or train further. The run
        predicts with the mean of all its members, see :meth:`load_ensemble`.
        """
        own_fold, own_seed = self.chosen
        place = (own_fold if fold is None else fold, own_seed if seed is None else seed)
        return self.saved_head.build_one(*place)

    def load_ensemble(self) -> HeadEnsemble:
        """Return the heads that the run predicts with as one, from activations to outputs."""
        return self.saved_head.build()

    def embed(self, data: Any, out: str | Path | None = None, **options: Any) -> Embeddings:
        """Return the vectors of new graphs; see :func:`.predicting.embed`."""
        from .predicting import embed

        return embed(self, data, out, **options)

    @contextmanager
    def reading_head(self) -> Iterator[None]:
        """Turn errors in what ``head.json`` holds into one that names the file."""
        try:
            yield
        except HistographError:
            raise
        except (LookupError, TypeError, AttributeError, ValueError, StopIteration) as error:
            raise ConfigError(
                f"{self.folder / HEAD_CONFIG_NAME}: not a head this version can read "
                f"({type(error).__name__}: {error})"
            ) from error


#: Stages of fits, beside that of a head on a frozen backbone.
TUNED, FINETUNED, END_TO_END = "tuned", "finetuned", "end-to-end"


def staged_name(head: str, stage: str) -> str:
    """Return the name of the fits of a readout in tables and results."""
    return f"{head}-{stage}" if stage else head


def split_name(name: str) -> tuple[str, str]:
    """Return the readout and the stage of fits with that name, see :func:`staged_name`."""
    for stage in (TUNED, FINETUNED, END_TO_END):
        if name.endswith(f"-{stage}"):
            return name.removesuffix(f"-{stage}"), stage
    return name, ""


def is_run(folder: Path) -> bool:
    """Whether a folder holds a run, finished or not."""
    return (folder / RUN_NAME).is_file() or (folder / RESULTS_NAME).is_file()


def member_prefix(number: int) -> str:
    """Return the prefix of a member's weights in ``head.safetensors``."""
    return f"member-{number}."


def fit_place(readout: str, fold: int, seed: int) -> Path:
    """Return where a fit is kept inside a run."""
    return Path(FITS_NAME) / readout.replace(" ", "-") / f"fold-{fold}-seed-{seed}"
