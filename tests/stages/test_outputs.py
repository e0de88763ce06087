"""Outputs that are killed, replaced, written twice at once or tampered with."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import typer
from safetensors.torch import load_file, save_file

import histograph_post as hg
from histograph_cli.app import app
from histograph_post.errors import ConfigError, OutputExistsError, OutputInUseError
from histograph_post.experiments.options import FitProgress
from histograph_post.training.options import TrainingOptions
from histograph_post.utils.outputs import OutputLock

from ..helpers import contents, demo_graphs, histograph, make_model
from ..soak.commands import COMMANDS

QUICK = TrainingOptions(epochs=2, lr=1e-2)


class KilledError(Exception):
    """Stands for a kill where nothing is written at the same time."""


def kill(progress: FitProgress) -> None:
    raise KilledError


def train(cache: Path, out: Path, **options: object) -> hg.Run:
    given = {"head": "set2set", "dim": 4, "seeds": [0], "training": QUICK, "jobs": 1, **options}
    return hg.train_head(cache, out, **given)  # type: ignore[arg-type]


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.fixture(scope="module")
def finished(demo_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that tests copy."""
    return train(demo_cache, tmp_path_factory.mktemp("finished") / "run").folder


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A run of the test's own."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


# --- kills


SOAK = """
import os, runpy, sys
for number in (1, 2):
    os.dup2(os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
os.chdir(folder)
sys.path.insert(0, str(folder))
sys.argv = ["soak", *asked]
runpy.run_module("tests.soak", run_name="__main__", alter_sys=True)
"""


def test_every_command_survives_a_kill_at_any_moment(
    tmp_path: Path, forked: Callable[..., int]
) -> None:
    """A sample of ``python -m tests.soak``, which tries them all."""
    asked = ["crashes", "--every", "100", "--seed", "11"]
    for name in ("cache, several shards", "train-head --overwrite", "export --whole", "predict"):
        asked += ["--command", name]
    code = forked(SOAK, folder=Path(__file__).parents[2], asked=asked, out=tmp_path / "said")
    said = (tmp_path / "said").read_text()
    assert code == 0, said
    assert re.search(r"\| \*\*all\*\* \| \| [1-9]\d* \| ", said)


def test_the_soak_has_every_command_that_writes() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    writing = {name for name, each in commands.items() if any(p.name == "out" for p in each.params)}
    assert {command.name.split()[0].strip(",") for command in COMMANDS} == {*writing, "trust"}


def test_what_is_replaced_stays_until_the_end_and_the_same_command_goes_on(
    demo_cache: Path, run: Path
) -> None:
    before = (run / "results.json").read_bytes()
    (run / "notes.txt").write_text("mine")
    seen: list[int] = []

    def kill_in_the_second_fit(progress: FitProgress) -> None:
        if progress.head == "mean":
            raise KilledError

    options = {"dim": 8, "overwrite": True}
    with pytest.raises(KilledError):
        train(demo_cache, run, **options, on_epoch=kill_in_the_second_fit)
    assert (run / "results.json").read_bytes() == before
    assert names(run.parent) == {"run", "run.partial"}
    found = train(
        demo_cache, run, **options, on_epoch=lambda progress: seen.append(progress.head != "mean")
    )
    assert found.folder == run
    assert not any(seen)  # that one was done
    assert found.plan["heads"][-1]["options"] == {"dim": 8}
    assert names(run.parent) == {"run"}
    assert (run / "notes.txt").read_text() == "mine"
    # Another one begins again.
    train(demo_cache, run, **options, on_epoch=lambda progress: seen.append(True))
    assert any(seen)


def test_an_interrupted_run_goes_on_also_if_it_may_overwrite(
    demo_cache: Path, tmp_path: Path
) -> None:
    with pytest.raises(KilledError):
        train(demo_cache, tmp_path / "run", overwrite=True, on_epoch=kill)
    marker = (tmp_path / "run" / "run.json").stat().st_mtime_ns
    train(demo_cache, tmp_path / "run", overwrite=True)
    assert (tmp_path / "run" / "run.json").stat().st_mtime_ns == marker


# --- two writers


def test_the_second_writer_is_refused_in_one_line(demo_cache: Path, run: Path) -> None:
    words = ("train-head", demo_cache, "-o", run, "--overwrite")
    with OutputLock(run):
        done = histograph(*words)
        assert done.exit_code == 1
        assert done.stderr.startswith(f"error: {run}: found another writer (")
        assert len(done.stderr.splitlines()) == 1
        with pytest.raises(OutputInUseError):
            hg.export(run, run, whole=True, overwrite=True)
    with OutputLock(run.parent / "a.csv"), pytest.raises(OutputInUseError):
        hg.predict(run, demo_graphs(4), run.parent / "a.csv", model=make_model())


def test_jobs_that_train_a_fold_each_share_the_folder(tmp_path: Path) -> None:
    given = {"training": QUICK, "split": "kfold:3", "data_args": {"num_graphs": 30}, "jobs": 1}
    model = {"model_args": {"hidden": 4, "num_layers": 2}}

    def train_others(progress: FitProgress) -> None:
        if not (tmp_path / "out" / "fold-1").exists():
            hg.pretrain("gin", "demo:", tmp_path / "out", only=[1], **given, **model)
            with pytest.raises(OutputInUseError):
                hg.pretrain("gin", "demo:", tmp_path / "out", only=[0], **given, **model)
            with pytest.raises(OutputInUseError):
                hg.pretrain("gin", "demo:", tmp_path / "out", **given, **model)

    found = hg.pretrain(
        *("gin", "demo:", tmp_path / "out"), only=[0], on_epoch=train_others, **given, **model
    )
    assert [fold["fold"] for fold in found.results["folds"]] == [0, 1]
    found = hg.pretrain("gin", "demo:", tmp_path / "out", **given, **model)
    assert [fold["fold"] for fold in found.results["folds"]] == [0, 1, 2]
    assert names(tmp_path) == {"out"}


# --- what belongs together


def test_a_run_lists_its_files_as_sha256sum_does(run: Path) -> None:
    listed = dict(line.split("  ")[::-1] for line in (run / "SHA256SUMS").read_text().splitlines())
    files = {path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file()}
    assert set(listed) == files - {"SHA256SUMS"}
    if shutil.which("sha256sum") is not None:
        words = ["sha256sum", "-c", "--quiet", "SHA256SUMS"]
        assert subprocess.run(words, cwd=run, check=False).returncode == 0


def flip(path: Path, place: int = -3) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("unlisted", [False, True])
def test_weights_of_another_run_are_not_used(
    demo_cache: Path, run: Path, tmp_path: Path, unlisted: bool
) -> None:
    other = train(demo_cache, tmp_path / "other", seeds=[1])
    shutil.copyfile(other.folder / "head.safetensors", run / "head.safetensors")
    if unlisted:
        sums = (run / "SHA256SUMS").read_text().splitlines(keepends=True)
        others = [line for line in sums if not line.endswith("  head.safetensors\n")]
        (run / "SHA256SUMS").write_text("".join(others))
    uses: tuple[Callable[[], object], ...] = (
        lambda: hg.predict(run, demo_graphs(4), model=make_model()),
        lambda: hg.export(run, tmp_path / "whole", whole=True, model=make_model()),
        lambda: hg.export(run, tmp_path / "head.pt2"),
        lambda: hg.Run.open(run).load_head(),
    )
    for use in uses:
        with pytest.raises(ConfigError, match=r"head\.safetensors: found other contents"):
            use()
    shutil.copyfile(other.folder / "head.json", run / "head.json")
    with pytest.raises(ConfigError, match=r"head\.json: found other contents"):
        hg.report(run, tmp_path / "page.html")
    assert names(tmp_path) == {"run", "other"}


def test_options_that_were_edited_are_noticed(run: Path, tmp_path: Path) -> None:
    (run / "config.toml").write_text("epochs = 2\n")
    with pytest.raises(ConfigError, match=r"config\.toml: found other contents"):
        hg.report(run, tmp_path / "page.html")


def test_weights_that_no_head_calls_for_are_refused(run: Path) -> None:
    (run / "SHA256SUMS").unlink()
    weights = load_file(run / "head.safetensors")
    save_file(weights | {"member-1.head.x": torch.ones(1)}, run / "head.safetensors")
    with pytest.raises(ConfigError, match=r"head\.safetensors: found the tensor 'member-1\.head"):
        hg.Run.open(run).load_ensemble()


@pytest.mark.parametrize(
    ("command", "out"),
    [
        *(("finetune", "run"), ("finetune", "run/tuned"), ("finetune", "run/fits")),
        *(("export", "run/head.safetensors"), ("report", "run/results.json")),
    ],
)
def test_nothing_takes_the_place_of_what_it_is_made_from(
    run: Path, monkeypatch: pytest.MonkeyPatch, command: str, out: str
) -> None:
    monkeypatch.chdir(run.parent)
    before = contents(run)
    done = histograph(command, "run", "-o", out, "--overwrite")
    assert done.exit_code == 1
    assert re.fullmatch(rf"error: {out}: found .* it would be made from, .*\n", done.stderr)
    assert contents(run) == before
    with pytest.raises(OutputExistsError, match="would be made from"):
        hg.finetune(run, run, overwrite=True)


def test_data_are_not_replaced_by_their_predictions(run: Path, tmp_path: Path) -> None:
    table = tmp_path / "molecules.csv"
    table.write_text("smiles,y\nCC,1\n")
    done = histograph("predict", run, "--data", f"smiles:{table}", "-o", table, "--overwrite")
    assert "found what it would be made from" in done.stderr
    assert table.read_text() == "smiles,y\nCC,1\n"


def test_an_export_is_bound_together_as_well(run: Path, tmp_path: Path) -> None:
    hg.export(run, tmp_path / "whole", whole=True, model=make_model())
    flip(tmp_path / "whole" / "head.safetensors")
    with pytest.raises(ConfigError, match=r"head\.safetensors: found other contents"):
        hg.load(tmp_path / "whole", model=make_model())


def test_a_fit_of_another_run_or_a_changed_one_is_fitted_again(
    demo_cache: Path, run: Path, tmp_path: Path
) -> None:
    before = json.loads((run / "results.json").read_text())
    with pytest.raises(KilledError):
        train(demo_cache, tmp_path / "other", training=TrainingOptions(epochs=1), on_epoch=kill)
    other = train(demo_cache, tmp_path / "other", training=TrainingOptions(epochs=1)).folder
    (run / "results.json").unlink()
    fit = Path("fits/mean/fold-0-seed-0")
    shutil.rmtree(run / fit)
    shutil.copytree(other / fit, run / fit)
    flip(run / "fits/set2set/fold-0-seed-0/test.safetensors")
    notes: list[str] = []
    found = train(demo_cache, run, on_note=notes.append)
    assert found.results == before
    assert len(notes) == 2
    assert all(note.endswith("fitted again") for note in notes)
    assert any(f"{fit}: found a fit of another run" in note for note in notes)


def test_a_changed_backbone_of_a_fold_is_not_cached(tmp_path: Path) -> None:
    model = {"model_args": {"hidden": 4, "num_layers": 2}, "data_args": {"num_graphs": 30}}
    hg.pretrain("gin", "demo:", tmp_path / "out", training=QUICK, jobs=1, **model)
    flip(tmp_path / "out" / "fold-0" / "model.safetensors")
    done = histograph("cache", tmp_path / "out", "-o", tmp_path / "caches")
    assert done.exit_code == 1
    assert "model.safetensors: found other contents" in done.stderr


def test_a_bit_that_flips_before_the_manifest_is_written_is_found(tmp_path: Path) -> None:
    dataset, small = hg.load_data("demo:", args={"num_graphs": 40}), {"shard_bytes": 20_000}
    hg.cache(make_model(), dataset, tmp_path / "whole", **small)  # type: ignore[arg-type]
    out = tmp_path / "out"
    assert hg.cache(make_model(), dataset, out, part=(0, 2), **small) is None  # type: ignore[arg-type]
    shard = next(out.glob("shard-*.h5"))
    flip(shard, os.path.getsize(shard) // 2)
    assert hg.cache(make_model(), dataset, out, **small) is not None  # type: ignore[arg-type]
    for path in (tmp_path / "whole").iterdir():
        assert (out / path.name).read_bytes() == path.read_bytes(), path.name
    assert names(out) == names(tmp_path / "whole")
