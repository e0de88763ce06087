"""The README speaks of what is there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer

from histograph_cli.main import app

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = typer.main.get_command(app).commands


def test_every_command_is_in_the_readme() -> None:
    for name in COMMANDS:
        assert f"`histograph {name}`" in README, name


def shell_commands() -> list[list[str]]:
    blocks = re.findall(r"```bash\n(.*?)```", README, flags=re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [shlex.split(line) for line in lines if line.startswith("histograph ")]


@pytest.mark.parametrize("words", shell_commands(), ids=" ".join)
def test_commands_of_the_readme_have_the_options_they_use(words: list[str]) -> None:
    command = COMMANDS[words[1]]
    known = {option for parameter in command.params for option in parameter.opts}
    known |= {option for parameter in command.params for option in parameter.secondary_opts}
    for word in words[2:]:
        if word.startswith("-"):
            assert word in known, word


def test_links_of_the_readme_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


def test_python_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from histograph_post.backbone import build_model

    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model = build_model("gin", {"hidden": 8, "num_layers": 2}, in_dim=4, out_dim=1)
    (block,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    exec(compile(block, "README.md", "exec"), {"model": model})
