"""The documentation: it runs, it is complete, and it leads somewhere."""

from __future__ import annotations

import importlib
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

import histograph_post as hg
from histograph_cli.app import app, reference
from histograph_post.heads.histograph import HistoGraphConfig
from histograph_post.heads.registry import HEADS, RIVALS

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(
    [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "examples" / "README.md",
        *(ROOT / "docs").glob("*.md"),
    ]
)
COMMANDS = typer.main.get_command(app).commands

#: The pages show commands as one would give them; to test the words, an epoch of a seed is enough.
QUICKLY = dict.fromkeys(("pretrain", "finetune"), ("--epochs", "1"))
QUICKLY |= dict.fromkeys(("train-head", "compare", "tune"), ("--epochs", "1", "--seeds", "0"))
QUICKLY["tune"] += ("--trials", "2")


@dataclass(frozen=True)
class Block:
    """A block of code: its language, the file it is (if any), and whether it is not to be run."""

    language: str
    file: str
    skipped: bool
    text: str


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(page: str) -> Iterator[Block]:
    pattern = r"(?:<!-- ([^\n]*) -->\n)?^( *)```(\w+) ?([^\n]*)\n(.*?)^\2```$"
    for mark, _, language, file, text in re.findall(pattern, page, flags=re.MULTILINE | re.DOTALL):
        skipped = mark.startswith("not run: ") or mark == "test command"
        yield Block(language, file, skipped, dedent(text))


def run_page(
    page: str, bash: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, **added: tuple[str, ...]
) -> None:
    """Do what a reader would: save the files, type the commands, run the Python."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(folder))
    namespace: dict[str, Any] = {}
    for block in blocks(page):
        if block.skipped:
            continue
        if block.file:
            (folder / block.file).write_text(block.text)
        elif block.language == "bash":
            script = f"set -euo pipefail\n{block.text}"
            done = bash("-c", script, cwd=folder, added=QUICKLY | added)
            assert done.returncode == 0, f"{block.text}\n{done.stdout}\n{done.stderr}"
        elif block.language == "python":
            exec(compile(block.text, "page", "exec"), namespace)


class Evaluated:
    """Runs an expression when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return eval, ("1 + 1",)


def save_net(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Save checkpoints of `my_model.py:Net`, in the forms that the pages speak of."""
    monkeypatch.syspath_prepend(folder)
    module = importlib.import_module("my_model")
    torch.manual_seed(0)
    net = module.Net(4, 1)
    torch.save({"state_dict": net.state_dict()}, folder / "model.ckpt")
    torch.save(net.state_dict(), folder / "model.pt")
    torch.save({"weights": net.state_dict(), "extra": Evaluated()}, folder / "code.pt")
    torch.save({"student": net.state_dict(), "other": net.state_dict()}, folder / "two.pt")
    torch.save(module.Net(4, 1).state_dict(), folder / "other.ckpt")
    del sys.modules["my_model"]


# --- what the pages show works --------------------------------------------------------------------


def test_the_readme_runs(
    bash: Any, shared_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uvadlc = shared_data / "checkpoints" / "uvadlc_tutorial7"
    shutil.copy(uvadlc / "GraphLevelGraphConv.ckpt", tmp_path / "model.ckpt")
    model = read("examples/uvadlc_graph_conv.py").replace("class GraphGNNModel", "class Net")
    (tmp_path / "my_model.py").write_text(model)
    (tmp_path / "datasets").symlink_to(shared_data / "tu")
    # Three folds tell as much of the words as ten.
    run_page(read("README.md"), bash, tmp_path, monkeypatch, cache=("--split", "kfold:3"))
    assert (tmp_path / "runs" / "mutag-readouts" / "report.html").is_file()
    assert len((tmp_path / "predictions.csv").read_text().splitlines()) == 189


def test_the_guide_runs(bash: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = read("docs/guide.md")
    (model,) = [block for block in blocks(page) if block.file == "my_model.py"]
    (tmp_path / "my_model.py").write_text(model.text)
    save_net(tmp_path, monkeypatch)
    run_page(page, bash, tmp_path, monkeypatch)
    assert (tmp_path / "rings.html").is_file()


def test_the_python_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_page(read("docs/python.md"), None, tmp_path, monkeypatch)
    assert "nowhere: no such folder" in capsys.readouterr().out


def test_errors_say_what_the_faq_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (model,) = [block for block in blocks(read("docs/guide.md")) if block.file == "my_model.py"]
    bonds = (
        "\n\nclass NetWithBonds(Net):\n"
        "    def forward(self, x, edge_index, edge_attr, batch):\n"
        "        return super().forward(x, edge_index, batch)\n"
    )
    Path("my_model.py").write_text(model.text + bonds)
    Path("edited_model.py").write_text(
        model.text.replace("= self.embedding(x)", "= -self.embedding(x)")
    )
    save_net(tmp_path, monkeypatch)
    torch.save(hg.load_data("demo:", args={"num_graphs": 30}).graphs, "graphs.pt")
    net = "--model my_model.py:Net --checkpoint model.ckpt --data graphs.pt"
    for command in (f"cache {net} -o mine.cache", f"cache {net} -o half.cache"):
        assert CliRunner().invoke(app, command.split()).exit_code == 0
    Path("half.cache/manifest.json").unlink()
    trained = "train-head mine.cache --dim 8 --epochs 1 -o runs/mine"
    assert CliRunner().invoke(app, trained.split()).exit_code == 0
    consoles = [block.text for block in blocks(read("docs/faq.md")) if block.language == "console"]
    said = "".join(consoles).splitlines()
    for command, expected in zip(said[::2], said[1::2], strict=True):
        result = CliRunner().invoke(app, shlex.split(command.removeprefix("$ histograph ")))
        found = result.stderr.splitlines()[-1]
        assert result.exit_code == 1, command
        pattern = expected.replace("[", "[[]").replace("...", "*")
        assert fnmatchcase(found, pattern), f"{command}\n{found}\n{expected}"


# --- nothing is missing ---------------------------------------------------------------------------


def test_the_reference_of_the_commands_is_up_to_date() -> None:
    assert read("docs/commands.md") == reference(), (
        "python -m histograph_cli.app > docs/commands.md"
    )
    for name in COMMANDS:
        assert f"| [`histograph {name}`](#histograph-{name}) | " in reference(), name


def test_every_readout_option_and_function_is_documented() -> None:
    guide, api = read("docs/guide.md"), read("docs/python.md")
    assert [name for name in (*HEADS, *RIVALS) if f"`{name}`" not in guide] == []
    assert [name for name in hg.__all__ if f"hg.{name}" not in api] == []
    options = {field.name for field in fields(HistoGraphConfig)} - {"in_dims", "out_dim"}
    assert sorted(name for name in options if f"`{name}`" not in api) == []


def shell_commands() -> list[str]:
    shown = [block for page in PAGES for block in blocks(page.read_text(encoding="utf-8"))]
    text = "\n".join(block.text for block in shown if block.language == "bash")
    lines = text.replace("\\\n", " ").splitlines()
    return [line for line in lines if line.startswith("histograph ")]


@pytest.mark.parametrize("line", dict.fromkeys(shell_commands()))
def test_commands_that_are_shown_have_the_options_they_use(line: str) -> None:
    words = shlex.split(line.split(" | ")[0])
    command = COMMANDS[words[1]]
    known = {option for parameter in command.params for option in parameter.opts}
    known |= {option for parameter in command.params for option in parameter.secondary_opts}
    assert [word for word in words[2:] if word.startswith("-") and word not in known] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)]+)\)", text) + re.findall(r'src="([^"]+)"', text)
    for link in links:
        target, _, anchor = link.partition("#")
        path = (page.parent / target) if target else page
        assert path.exists(), link
        if anchor:
            headings = re.findall(
                r"^#+ (.*)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE
            )
            slugs = [
                re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings
            ]
            assert anchor in slugs, link
