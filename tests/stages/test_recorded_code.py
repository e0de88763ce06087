"""What a file names as model or data is data: no command runs code that its user did not name."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from typer.testing import Result

import histograph_post as hg
from histograph_post.caches.manifest import MANIFEST_NAME, read_manifest, write_manifest
from histograph_post.data import load_data
from histograph_post.errors import DataError, HistographError, ModelError
from histograph_post.experiments.folds import open_caches
from histograph_post.models import build_model
from histograph_post.utils.files import sha256_file
from histograph_post.utils.specifications import BUILT_IN_DATA, is_built_in

from ..helpers import histograph

CODE = """
import functools
from os import system
from subprocess import getoutput
from torch import nn
from torch_geometric.data import Data
from torch_geometric.datasets import FakeDataset
from torch_geometric.nn import GCNConv, global_mean_pool
from histograph_post.data import load_data

class Net(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.first, self.second = GCNConv(4, width), GCNConv(width, width)
        self.last = nn.Linear(width, 1)

    def forward(self, x, edge_index, batch):
        x = self.second(self.first(x, edge_index).relu(), edge_index)
        return self.last(global_mean_pool(x, batch))

def make():
    return Net()

def graphs():
    return load_data("demo:", args={"num_graphs": 30}).graphs

few = functools.partial(Net, width=4)
shell = functools.partial(getoutput, "touch SENTINEL")
"""
MODEL = ("--model", "mine.py:Net")
DATA = ("--data", "mine.py:graphs")
QUICK = ("--epochs", 1, "--dim", 8, "-q")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and data of a user's own file: pretrained, cached and with a head, by command."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "mine.py").write_text(CODE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for words in (
            ("pretrain", *MODEL, *DATA, "--epochs", 1, "--folds", 3, "-o", "folds", "-q"),
            ("cache", "folds", *MODEL, *DATA, "-o", "caches", "-q"),
            ("train-head", "caches", "-o", "run", *QUICK),
        ):
            done = histograph(*words)
            assert done.exit_code == 0, done.output
    return folder


@pytest.fixture
def work(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of that to forge, which is also the current folder."""
    folder = tmp_path / "work"
    shutil.copytree(made, folder)
    monkeypatch.chdir(folder)
    yield folder
    for name in ("mine", "zoo", "zoo.inner"):  # modules of this folder, imported by name
        sys.modules.pop(name, None)


#: Every command that rebuilds a backbone: its words, and the files that tell it which.
COMMANDS: dict[str, tuple[tuple[object, ...], tuple[str, ...]]] = {
    "predict": (("predict", "run", *DATA, "-o", "out.csv"), ("run/head.json",)),
    "export": (("export", "run", "--whole", "-o", "out"), ("run/head.json",)),
    "finetune-run": (
        ("finetune", "run", "-o", "out", "--epochs", 1, "-q"),
        ("run/head.json", *(f"caches/fold-{k}.cache/manifest.json" for k in range(3))),
    ),
    "finetune-cache": (
        ("finetune", "caches", "-o", "out", *QUICK),
        tuple(f"caches/fold-{k}.cache/manifest.json" for k in range(3)),
    ),
    "cache": (
        ("cache", "folds", "-o", "out", "-q"),
        tuple(f"folds/fold-{k}/config.toml" for k in range(3)),
    ),
}

#: What a forger could name; each creates SENTINEL as soon as it is imported or called.
ATTACKS: dict[str, tuple[str, dict[str, Any]]] = {
    "os": ("os:system", {"command": "touch SENTINEL"}),
    "subprocess": ("subprocess:getoutput", {"cmd": "touch SENTINEL"}),
    "file": ("evil.py:Net", {}),
    "module": ("evil:Net", {}),
    "imported": ("mine.py:shell", {}),
}


def forge(file: Path, what: str, spec: Any, args: dict[str, Any]) -> None:
    """Let a file name another model or other data; whoever can do that mends the hashes too."""
    before = sha256_file(file)
    _forge(file, what, spec, args)
    for other in file.parent.rglob("*"):
        if other.is_file() and before.encode() in other.read_bytes():
            other.write_text(other.read_text().replace(before, sha256_file(file)))
    (file.parent.parent / "SHA256SUMS").unlink(missing_ok=True)  # as in earlier versions


def _forge(file: Path, what: str, spec: Any, args: dict[str, Any]) -> None:
    if file.suffix == ".toml":
        pairs = [f"{name}={value!r}" for name, value in args.items()]
        stored = tomllib.loads(file.read_text()) | {what: spec, f"{what}_args": pairs}
        file.write_text(tomli_w.dumps(stored))
        return
    if file.name == MANIFEST_NAME:  # with a checksum that is right
        _, manifest = read_manifest(file.parent)
        entry = replace(getattr(manifest, what), spec=spec, args=args)
        write_manifest(file.parent, replace(manifest, **{what: entry}))
        return
    stored = json.loads(file.read_text())
    stored["backbone"][what] |= {"spec": spec, "args": args}
    file.write_text(json.dumps(stored))


def plant(folder: Path) -> None:
    """Put a module that acts when it is imported wherever a relative name could be looked for."""
    places = (folder, *(folder / place for place in ("run", "folds", "folds/fold-0", "caches")))
    for place in places:
        sentinel = folder / "SENTINEL"
        (place / "evil.py").write_text(f"open({str(sentinel)!r}, 'w').close()\nNet = None\n")


def assert_refused(done: Result, spec: str, file: str, flag: str) -> None:
    assert done.exit_code == 1, done.output
    assert not Path("SENTINEL").exists()
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    for part in (spec, file, flag):
        assert part in line
    assert not Path("out").exists()
    assert not Path("out.csv").exists()


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("command", COMMANDS)
def test_forged_model_is_refused_unread(work: Path, command: str, attack: str) -> None:
    words, files = COMMANDS[command]
    spec, args = ATTACKS[attack]
    plant(work)
    for file in files:
        forge(work / file, "model", spec, args)
    given = DATA if command in ("finetune-run", "finetune-cache", "cache") else ()
    assert_refused(histograph(*words, *given), repr(spec), Path(files[-1]).name, "--model my_model")


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("command", ["finetune-run", "finetune-cache", "cache"])
def test_forged_data_is_refused_unread(work: Path, command: str, attack: str) -> None:
    words, files = COMMANDS[command]
    spec, args = ATTACKS[attack]
    plant(work)
    for file in files:
        forge(work / file, "data", spec, args)
    assert_refused(histograph(*words, *MODEL), repr(spec), Path(files[-1]).name, "--data my_data")


@pytest.mark.parametrize("command", ["finetune-run", "finetune-cache", "cache"])
def test_an_address_that_a_file_names_is_not_fetched(work: Path, command: str) -> None:
    torch.save(load_data("demo:", args={"num_graphs": 30}).graphs, work / "graphs.pt")
    words, files = COMMANDS[command]
    spec = f"file://{work / 'graphs.pt'}"  # as a server's, but there
    for file in files:
        forge(work / file, "data", spec, {})
    assert_refused(histograph(*words, *MODEL), repr(spec), Path(files[-1]).name, f"--data {spec}")


def test_one_forged_fold_among_honest_ones_is_refused(work: Path) -> None:
    for place in ("caches/fold-{}.cache/manifest.json", "folds/fold-{}/config.toml"):
        for fold in (0, 1):
            forge(work / place.format(fold), "model", "gin", {"hidden": 8})
        forge(work / place.format(2), "model", "os:system", {"command": "touch SENTINEL"})
    # Not even what the user named is imported before all folds were looked at.
    Path("mine.py").write_text(f"open('SENTINEL', 'w').close()\n{CODE}")
    for command in ("finetune-cache", "cache"):
        words, files = COMMANDS[command]
        assert_refused(histograph(*words, *DATA), "'os:system'", files[-1], "--model")


@pytest.mark.parametrize("command", COMMANDS)
def test_code_that_the_user_names_is_run(work: Path, command: str) -> None:
    words, files = COMMANDS[command]
    data = DATA if command in ("finetune-run", "finetune-cache", "cache") else ()
    assert_refused(histograph(*words, *data), "'mine.py:Net'", Path(files[-1]).name, "--model")
    sizes = ("--in-dim", 4) if command == "export" else ()
    done = histograph(*words, *MODEL, *data, *sizes)
    assert done.exit_code == 0, done.output
    assert Path("out").exists() or Path("out.csv").exists()


def test_what_the_user_names_replaces_what_a_file_names(work: Path) -> None:
    for file in ("run/head.json", "caches/fold-0.cache/manifest.json", "folds/fold-0/config.toml"):
        for what in ("model", "data"):
            forge(work / file, what, "os:system", {})
    shutil.copytree("folds/fold-0", "fold")
    done = histograph("cache", "fold", *MODEL, *DATA, "-o", "again.cache", "-q")
    assert done.exit_code == 0, done.output
    (cache,) = open_caches("again.cache")
    assert (cache.manifest.model.spec, cache.manifest.data.spec) == (MODEL[1], DATA[1])
    done = histograph("predict", "run", *MODEL, *DATA, "-o", "out.csv")
    assert done.exit_code == 0, done.output


def test_python_follows_the_same_rule(work: Path) -> None:
    calls: tuple[Callable[..., Any], ...] = (
        lambda **named: hg.load("run", **named),
        lambda **named: hg.predict("run", "demo:", **named),
        lambda **named: hg.export("run", "out", whole=True, **named),
        lambda **named: hg.finetune("caches", "out", data="mine.py:graphs", **named),
    )
    for call in calls:
        with pytest.raises(ModelError, match=r"'mine\.py:Net', which is code.*model= in Python"):
            call()
        with pytest.raises(HistographError, match="standard library"):
            call(model="subprocess:getoutput")
    with pytest.raises(DataError, match=r"'mine\.py:graphs', which is code.*data= in Python"):
        hg.finetune("caches", "out", model="mine.py:Net")
    assert not Path("out").exists()
    assert hg.load("run", model="mine.py:Net").task.kind == "binary"


@pytest.mark.parametrize("spec", [None, 3, ["os:system"], {"a": 1}, "", "memory", "gin\nos:system"])
def test_specification_that_is_none_is_refused_in_one_line(work: Path, spec: Any) -> None:
    forge(work / "run/head.json", "model", spec, {})
    done = histograph("predict", "run", "--data", "demo:", "-o", "out.csv")
    assert_refused(done, "memory" if spec == "memory" else repr(spec), "head.json", "--model")


def test_next_command_names_the_code_again(work: Path) -> None:
    done = histograph("train-head", "caches", "-o", "again", "--epochs", 1, "--dim", 8)
    assert f"next: histograph predict again {' '.join(MODEL)} --data SPEC" in done.stdout
    done = histograph("export", "run", "--whole", *MODEL, "-o", "model")
    assert f"next: histograph predict model {' '.join(MODEL)} --data SPEC" in done.stdout
    assert "hg.load('model', model='mine.py:Net')(batch)" in done.stdout
    done = histograph("pretrain", *MODEL, *DATA, "--epochs", 1, "-o", "more")
    assert f"next: histograph cache more {' '.join((*MODEL, *DATA))} -o CACHES" in done.stdout
    # A folder that may come from anybody is not quoted as advice.
    assert "next: histograph cache folds --model SPEC --data SPEC" in (
        histograph("inspect", "folds").stdout
    )
    assert "next: histograph predict model --model SPEC --data" in (
        histograph("inspect", "model").stdout
    )


# --- what a specification of the user's own may lead to -------------------------------------------


@pytest.mark.parametrize("spec", ["mine.py:system", "mine.py:getoutput", "mine.py:shell"])
def test_what_a_file_only_imported_is_not_called(work: Path, spec: str) -> None:
    args = {"cmd": "touch SENTINEL"} if spec.endswith("getoutput") else {}
    with pytest.raises(ModelError, match=r"comes from .*expected an nn\.Module, or a function"):
        build_model(spec, args)
    with pytest.raises(DataError, match=r"comes from .*expected a function that is defined there"):
        load_data(spec, args=args)
    assert not Path("SENTINEL").exists()


@pytest.mark.parametrize(
    "spec", ["os:system", "subprocess:getoutput", "os.path:join", "builtins:eval", "this:s"]
)
def test_standard_library_has_no_models_and_no_data(spec: str) -> None:
    with pytest.raises(ModelError, match="standard library"):
        build_model(spec, {})
    with pytest.raises(DataError, match="standard library"):
        load_data(spec)


def test_classes_functions_and_partials_of_a_file_are_built(work: Path) -> None:
    for name, width in (("Net", 8), ("make", 8), ("few", 4)):
        assert build_model(f"mine.py:{name}", {}).last.in_features == width
    assert build_model("mine:make", {}).last.in_features == 8
    assert len(load_data("mine.py:graphs")) == 30
    assert len(load_data("mine.py:FakeDataset", args={"num_graphs": 3})) == 3


def test_function_of_a_submodule_belongs_to_its_package(work: Path) -> None:
    Path("zoo").mkdir()
    Path("zoo/__init__.py").write_text("from .inner import graphs, make\nfrom mine import few\n")
    Path("zoo/inner.py").write_text(CODE)
    assert build_model("zoo:make", {}).last.in_features == 8
    assert len(load_data("zoo:graphs")) == 30


def test_built_in_data_never_leads_to_a_module(work: Path) -> None:
    for kind in BUILT_IN_DATA:
        Path(f"{kind}.py").write_text("open('SENTINEL', 'w').close()")
        assert is_built_in("data", f"{kind}:Net")
        if kind == "demo":
            continue
        with pytest.raises(HistographError):
            load_data(f"{kind}:Net.csv", root=work)
    assert not Path("SENTINEL").exists()


@pytest.mark.parametrize(  # Python puts the current folder on its path for a module alone
    "launcher", [pytest.param("entry point", marks=pytest.mark.long), "module"]
)
def test_nothing_is_imported_from_the_current_folder(launcher: str, work: Path) -> None:
    for name in ("rich", "torch", "numpy", "typer", "evil", "usercustomize", "json", "optuna"):
        (work / f"{name}.py").write_text("open('SENTINEL', 'w').close()")
    start = {"entry point": [shutil.which("histograph", path=Path(sys.executable).parent)]}
    words = start.get(launcher, [sys.executable, "-m", "histograph_cli"])
    done = subprocess.run(
        [*words, "predict", "run", "--data", "demo:", "-o", "out.csv"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
    assert "which is code that a file names" in done.stderr
    assert not Path("SENTINEL").exists()


# --- what the user has approved before ------------------------------------------------------------


@pytest.fixture
def trusting(work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user who trusts nothing yet."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return work


def test_trusted_code_is_run_until_it_changes(trusting: Path) -> None:
    (trusting / "beside.py").write_text("width = 8\n")
    (trusting / "mine.py").write_text(f"import beside\n{CODE}")
    asked = histograph("trust", "run")  # shows it, but nobody is there to say yes
    assert asked.exit_code == 1
    assert str(trusting / "mine.py") in asked.stdout.replace("\n", "")
    predict = ("predict", "run", *DATA, "-o", "out.csv", "-q")
    assert_refused(histograph(*predict), "'mine.py:Net'", "head.json", "histograph trust run")

    done = histograph("trust", "run", "--yes", "--json")
    assert done.exit_code == 0, done.output
    assert [entry["what"] for entry in json.loads(done.stdout)["trusted"]] == ["model", "data"]
    commands = {
        "predict": (*predict[:-3], "-o", "trusted.csv", "-q"),
        "export": ("export", "run", "--whole", "-o", "exported", "--in-dim", 4, "-q"),
        "finetune": ("finetune", "caches", "-o", "tuned", *QUICK),
        "cache": ("cache", "folds", "-o", "cached", "-q"),
    }
    for words in commands.values():
        done = histograph(*words)
        assert done.exit_code == 0, done.output

    # From another folder the approved file is meant, not one of that name there.
    other = trusting / "other"
    other.mkdir()
    (other / "mine.py").write_text(f"open({str(trusting / 'SENTINEL')!r}, 'w').close()")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(other)
        done = histograph("predict", "../run", "--data", "demo:", "-o", "out.csv", "-q")
        assert done.exit_code == 0, done.output
    assert not (trusting / "SENTINEL").exists()

    (trusting / "beside.py").write_text("width = 9\n")
    refused = histograph(*predict)
    assert_refused(refused, "mine.py is not what you trusted", "head.json", "--model")
    (trusting / "beside.py").write_text("width = 8\n")
    assert histograph("trust", "--revoke", "mine.py:Net").exit_code == 0
    assert_refused(histograph(*predict), "'mine.py:Net'", "head.json", "--model")
    assert histograph("trust", "--revoke", "mine.py:Net").exit_code == 1


@pytest.mark.parametrize(
    ("spec", "args"),
    [("mine.py:make", {}), ("mine.py:Net", {"width": 4}), ("mine:Net", {}), ("./mine.py:Net", {})],
)
def test_trust_is_for_one_name_with_its_arguments(
    trusting: Path, spec: str, args: dict[str, Any]
) -> None:
    assert histograph("trust", "caches", "--yes").exit_code == 0
    forge(trusting / "run/head.json", "model", spec, args)
    done = histograph("predict", "run", *DATA, "-o", "out.csv")
    assert_refused(done, repr(spec), "head.json", "--model my_model")


def test_module_that_is_shadowed_is_not_the_trusted_one(trusting: Path) -> None:
    (trusting / "zoo").mkdir()
    for name in ("__init__", "inner"):
        (trusting / "zoo" / f"{name}.py").write_text(CODE)
    forge(trusting / "run/head.json", "model", "zoo.inner:Net", {})
    assert histograph("trust", "run", "--yes").exit_code == 0
    predict = ("predict", "run", *DATA, "-o", "out.csv", "-q")
    other = trusting / "other"
    shutil.copytree(trusting / "run", other / "run")
    (other / "zoo").mkdir()
    for name in ("__init__", "inner"):
        (other / "zoo" / f"{name}.py").write_text("open('SENTINEL', 'w').close()")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(other)
        assert_refused(histograph(*predict), "does not lead to", "head.json", "--model")
    done = histograph(*predict)
    assert done.exit_code == 0, done.output


#: Puts something beside trusted code that Python would run instead, or also.
SMUGGLED: dict[str, Callable[[Path, str], None]] = {
    # As Python writes it, for a source of this size and time.
    "bytecode": lambda folder, evil: _plant_bytecode(folder / "mine.py", evil),
    # What the library asks for is looked for on the path, too.
    "installed name": lambda folder, evil: (folder / "pandas.py").write_text(evil),
    "package": lambda folder, evil: _plant_package(folder / "lazy", evil),
    "compiled": lambda folder, evil: _plant_compiled(folder / "beside", b"\x7fELF no module"),
}


def _plant_bytecode(source: Path, evil: str) -> None:
    file = Path(importlib.util.cache_from_source(str(source)))
    file.parent.mkdir(exist_ok=True)
    code = compile(evil, str(source), "exec")
    found = source.stat()
    data = importlib._bootstrap_external._code_to_timestamp_pyc(  # type: ignore[attr-defined]
        code, int(found.st_mtime), found.st_size
    )
    file.write_bytes(data)


def _plant_package(folder: Path, evil: str) -> None:
    folder.mkdir()
    (folder / "__init__.py").write_text(evil)


def _plant_compiled(stem: Path, data: bytes) -> None:
    stem.with_name(stem.name + importlib.machinery.EXTENSION_SUFFIXES[0]).write_bytes(data)


@pytest.mark.parametrize("smuggled", SMUGGLED)
def test_nothing_beside_trusted_code_is_run(trusting: Path, smuggled: str) -> None:
    (trusting / "beside.py").write_text("width = 8\n")
    asks = "import beside\ntry:\n    __import__('pan' + 'das'), __import__('la' + 'zy')\n"
    (trusting / "mine.py").write_text(f"{asks}except ImportError:\n    pass\n{CODE}")
    assert histograph("trust", "run", "--yes").exit_code == 0
    SMUGGLED[smuggled](trusting, f"open({str(trusting / 'SENTINEL')!r}, 'w').close()\n")
    pandas = sys.modules.pop("pandas", None)
    try:
        done = histograph("predict", "run", "--data", "demo:", "-o", "out.csv", "-q")
    finally:
        if pandas is not None:
            sys.modules["pandas"] = pandas
    assert not Path("SENTINEL").exists()
    if smuggled == "compiled":  # a module of that name that Python would prefer
        assert_refused(done, "is not what you trusted", "head.json", "--model")
    else:
        assert done.exit_code == 0, done.output


def test_a_pipe_in_the_place_of_trusted_code_is_not_waited_for(trusting: Path) -> None:
    assert histograph("trust", "run", "--yes").exit_code == 0
    Path("mine.py").unlink()
    os.mkfifo("mine.py")
    done = histograph("predict", "run", "--data", "demo:", "-o", "out.csv")
    assert_refused(done, "is not what you trusted", "head.json", "--model")


def test_trusted_code_that_changes_meanwhile_is_not_run(trusting: Path) -> None:
    assert histograph("trust", "run", "--yes").exit_code == 0
    named = hg.Run.open("run").backbone.model.to_follow()  # checked here, imported below
    Path("mine.py").write_text(f"open('SENTINEL', 'w').close()\n{CODE}")
    with pytest.raises(ModelError, match="other code than you approved"):
        build_model(named.spec, {})
    assert not Path("SENTINEL").exists()


def test_what_a_named_package_imports_is_not_looked_for_in_the_current_folder(
    trusting: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = tmp_path / "installed"
    installed.mkdir()
    monkeypatch.syspath_prepend(installed)
    (installed / "there.py").write_text(f"try:\n    import lazy\nexcept ImportError: pass\n{CODE}")
    Path("lazy.py").write_text("open('SENTINEL', 'w').close()")
    assert build_model("there:make", {}).last.in_features == 8
    assert not Path("SENTINEL").exists()


@pytest.mark.parametrize("spec", ["this:s", "evil.py:Net", "evil:Net", "nowhere.py:Net"])
def test_asking_for_trust_runs_nothing(trusting: Path, spec: str) -> None:
    plant(trusting)
    forge(trusting / "run/head.json", "model", spec, {})
    done = histograph("trust", "run", "--yes")
    assert done.exit_code == (0 if spec != "nowhere.py:Net" else 1), done.output
    if spec == "this:s":  # approved or not, it is no model
        assert "standard library" in histograph("predict", "run", *DATA, "-o", "out.csv").stderr
    assert not Path("SENTINEL").exists()


def test_checkpoints_and_code_are_one_list_that_only_its_user_writes(trusting: Path) -> None:
    store = Path(os.environ["XDG_STATE_HOME"]) / "histograph-post"
    store.mkdir(parents=True, mode=0o700)
    (store / "trusted-checkpoints").write_text("a" * 64 + "\n")  # of an earlier version
    (store / "trusted.json.host-1.partial").write_text("{")  # of a process that was killed
    assert histograph("trust", "run", "--yes").exit_code == 0
    listed = json.loads(histograph("trust", "--json").stdout)["trusted"]
    assert [entry["what"] for entry in listed] == ["checkpoint", "model", "data"]
    assert [path.name for path in store.iterdir()] == ["trusted.json"]
    for place, mode in ((store / "trusted.json", 0o666), (store, 0o770)):
        before = place.stat().st_mode
        place.chmod(mode)
        refused = histograph("trust")
        assert refused.exit_code == 1
        assert f"chmod go-w {place}" in refused.stderr
        place.chmod(before)
    assert histograph("trust").exit_code == 0
