"""Code that the user names is imported once per process, by whatever name it is given."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from torch import nn

from histograph_post.errors import ModelError, NotFoundError
from histograph_post.models import build_model
from histograph_post.utils.specifications import imported_place

#: A registry as GraphGym's, which refuses a name that is taken.
REGISTRY = """
NAMES = {}
def register(name):
    def bound(thing):
        if name in NAMES:
            raise KeyError(f"{name} is already registered")
        NAMES[name] = thing
        return thing
    return bound
"""
MODEL = """
from torch import nn
from {registry} import NAMES, register
from layers import Layer

@register("net")
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        from layers import Layer as again
        assert again is Layer
        self.layer = NAMES["layer"]()
        self.width = {width}

model = Net()
"""
LAYERS = """
from torch import nn
from {registry} import register

@register("layer")
class Layer(nn.Linear):
    def __init__(self):
        super().__init__(2, 2)
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model, its layers and its data, which register themselves in an installed package."""
    installed, project = tmp_path / "installed", tmp_path / "project"
    installed.mkdir()
    project.mkdir()
    registry = f"registry_{abs(hash(tmp_path))}"
    (installed / f"{registry}.py").write_text(REGISTRY)
    (project / "net.py").write_text(MODEL.format(registry=registry, width=2))
    (project / "layers.py").write_text(LAYERS.format(registry=registry))
    (project / "data.py").write_text("import layers, net\nfrom net import Net\n")
    monkeypatch.syspath_prepend(installed)
    monkeypatch.chdir(project)
    return project


def test_a_registry_is_filled_once(project: Path) -> None:
    first = build_model("net.py:Net", {})
    again = build_model(str(project / "net.py:Net"), {})
    dotted = build_model("net:Net", {})
    assert type(first) is type(again) is type(dotted)
    # The data import the model's file and its layers by their names.
    with imported_place("data.py", ModelError) as module:
        assert module.Net is type(first)
    assert isinstance(build_model("layers.py:Layer", {}), nn.Linear)
    # None of it stands in for the modules of another project.
    assert not {"net", "layers", "data"} & sys.modules.keys()


def test_a_dotted_name_comes_first(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(project)
    try:
        first = build_model("net:Net", {})
        assert type(build_model("net.py:Net", {})) is type(first)
    finally:
        for name in ("net", "layers"):
            sys.modules.pop(name, None)


def test_a_module_that_is_named_is_not_shared(project: Path) -> None:
    first, second = build_model("net.py:model", {}), build_model("net.py:model", {})
    assert first is not second
    nn.init.zeros_(first.layer.weight)
    assert bool(second.layer.weight.any())


def test_edited_code_is_imported_again(tmp_path: Path) -> None:
    (tmp_path / "edited.py").write_text("from beside import Net\n")
    source = "from torch import nn\nclass Net(nn.Linear):\n    def __init__(self):\n"
    for width in (2, 3):
        (tmp_path / "beside.py").write_text(f"{source}        super().__init__({width}, 1)\n")
        assert build_model(f"{tmp_path}/edited.py:Net", {}).in_features == width
    (tmp_path / "edited.py").write_text("from beside import Net as Other\n")
    with pytest.raises(ModelError, match="has no 'Net'"):
        build_model(f"{tmp_path}/edited.py:Net", {})


def test_a_file_that_is_not_there_is_named_in_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NotFoundError) as caught:
        build_model("absent.py:Net", {})
    assert str(tmp_path / "absent.py") in str(caught.value)
