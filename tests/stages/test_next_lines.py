"""What `next:` says can be copied: flags are repeated, globs and spaces are quoted."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import torch

import histograph_post as hg
from histograph_post.models import build_model

from ..helpers import demo_graphs, histograph, make_model


def next_words(done: object) -> list[str]:
    """The words of the command that comes next, as the shell would split them."""
    assert done.exit_code == 0, done.output  # type: ignore[attr-defined]
    lines = done.stdout.splitlines()  # type: ignore[attr-defined]
    (line,) = [line for line in lines if line.startswith("next: histograph ")]
    return shlex.split(line.removeprefix("next: histograph "))


def filled_in(words: list[str], **blanks: object) -> list[str]:
    """The words with what is to be filled in."""
    return [str(blanks.get(word, word)) for word in words]


def test_every_next_line_does_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my folder").mkdir()
    state = {f"old.{name}": value for name, value in make_model().state_dict().items()}
    torch.save({"state_dict": state, "model": make_model()}, "my folder/net.pt")  # needs trust
    Path("my names.toml").write_text('"old.*" = "*"\n')
    done = histograph("inspect", "my folder/net.pt", "--trust-checkpoint")
    words = next_words(done)
    assert words[:2] == ["inspect", "my folder/net.pt"]
    assert "--trust-checkpoint" in words
    demo = ("--data-args", "num_graphs=24", "--key-map", "my names.toml")
    words = [word if word != "SPEC" else "gin" for word in words]
    words[words.index("--data") + 1] = "demo:"
    done = histograph(*words, *demo, "--layers", "convs.*,1")
    words = next_words(done)
    for flag, value in (
        ("--layers", "convs.*,1"),
        ("--key-map", "my names.toml"),
        ("--data-args", "num_graphs=24"),
        ("--checkpoint", "my folder/net.pt"),
    ):
        assert words[words.index(flag) + 1] == value
    assert "--trust-checkpoint" in words
    line = next(line for line in done.stdout.splitlines() if line.startswith("next: "))
    assert "'convs.*,1'" in line
    assert "'my names.toml'" in line
    words = next_words(histograph(*filled_in(words, CACHE="my folder/a cache")))
    assert words[:2] == ["train-head", "my folder/a cache"]
    quick = ("--head", "mean", "--seeds", 0, "--epochs", 1)
    words = next_words(histograph(*filled_in(words, RUN="my folder/run"), *quick))
    assert words[:2] == ["predict", "my folder/run"]
    assert "--trust-checkpoint" not in words  # remembered, by whoever gave it
    assert words[words.index("--key-map") + 1] == "my names.toml"
    done = histograph(*filled_in(words, SPEC="demo:"))
    assert done.exit_code == 0, done.output


def test_the_model_is_found_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(
        "from torch_geometric.nn import GIN\n\nclass Net(GIN):\n"
        "    def __init__(self):\n        super().__init__(4, 8, num_layers=2, out_channels=1)\n"
    )
    torch.save(build_model("net.py:Net", {}, in_dim=4, out_dim=1).state_dict(), "net.pt")
    demo = ("--data", "demo:", "--data-args", "num_graphs=24")
    made = histograph("cache", "--model", "net.py:Net", "--checkpoint", "net.pt", *demo, "-o", "c")
    assert made.exit_code == 0, made.output
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    quick = ("--head", "mean", "--seeds", 0, "--epochs", 1)
    words = next_words(histograph("train-head", "../c", "-o", "run", *quick))
    assert words[words.index("--model") + 1] == f"{tmp_path / 'net.py'}:Net"
    done = histograph(*filled_in(words, SPEC="demo:"), "--data-args", "num_graphs=24")
    assert done.exit_code == 0, done.output


def test_inspect_from_python_shows_what_the_command_shows(tmp_path: Path) -> None:
    model, graphs = make_model(), demo_graphs(24)
    torch.save(model.state_dict(), tmp_path / "net.pt")
    done = histograph(
        *("inspect", tmp_path / "net.pt", "--model", "gin", "--data", "demo:"),
        *("--data-args", "num_graphs=24"),
    )
    found = hg.inspect(model, graphs)
    shown = repr(found)
    assert done.exit_code == 0, done.output
    for _, columns, rows in found.tables():
        assert all(column in shown for column in columns)
        for row in rows:
            for cell in filter(None, row):
                assert cell in shown
                assert cell.split()[0] in done.stdout
    for note in found.notes:
        assert f"note: {note}" in shown
        assert note in done.stderr
    assert found.layers[0] == "input"
    assert found.widths == (8, 8, 8, 8)
    assert hg.inspect(model, graphs, layers="1:").widths == (8, 8, 8)
