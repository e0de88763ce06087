"""Model specifications become modules; what cannot be built is explained in one line."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch_geometric.data import Batch, Data

from histograph_post.errors import CheckpointError, ConfigError, ModelError, NotFoundError
from histograph_post.models import BUILT_IN, ModelSpec, build_model, call_model, parse_args

MODELS = """
import torch
from torch import nn
from torch_geometric.nn import MessagePassing

class Net(nn.Module):
    def __init__(self, in_channels, num_classes, width: int = 3):
        super().__init__()
        self.sizes = in_channels, num_classes, width
    def forward(self, x):
        return x

class Conv(MessagePassing):
    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

class Broken(nn.Module):
    def __init__(self, depth):
        raise RuntimeError(f"depth {depth}\\nis too much")

def make(size=1):
    return nn.Linear(size, size)

def number():
    return 3

ready = nn.Linear(2, 2)
constant = 5
"""


@pytest.fixture
def models(tmp_path) -> Path:
    path = tmp_path / "my-models.py"
    path.write_text(MODELS)
    return path


def test_a_class_in_a_file(models):
    model = build_model(f"{models}:Net", {"in_channels": 1, "num_classes": 2, "width": 4})
    assert model.sizes == (1, 2, 4)


def test_a_factory_and_a_ready_module_in_a_file(models):
    assert build_model(f"{models}:make", {"size": 7}).in_features == 7
    assert isinstance(build_model(f"{models}:ready", {}), nn.Linear)


def test_sizes_of_the_data_fill_what_the_constructor_insists_on(models):
    model = build_model(f"{models}:Net", {"num_classes": 9}, in_dim=7, out_dim=2)
    assert model.sizes == (7, 9, 3)  # arguments win over the data, defaults stay


def test_a_message_passing_layer_in_a_file_runs(models):
    model = build_model(f"{models}:Conv", {})
    data = Data(x=torch.eye(2), edge_index=torch.tensor([[0], [1]]))
    out = call_model(model, Batch.from_data_list([data]))
    assert torch.equal(out, torch.tensor([[0.0, 0.0], [1.0, 0.0]]))


def test_a_class_in_a_package():
    assert build_model("torch.nn:Linear", {"in_features": 2, "out_features": 3}).out_features == 3


def test_a_module_of_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "net_of_this_folder.py").write_text("from torch import nn\nNet = nn.Identity")
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    assert isinstance(build_model("net_of_this_folder:Net", {}), nn.Identity)
    assert sys.path == before


def test_two_projects_do_not_mix(tmp_path):
    built = []
    for project, width in (("one", 1), ("two", 2)):
        folder = tmp_path / project
        (folder / "parts").mkdir(parents=True)
        (folder / "parts" / "__init__.py").write_text(f"WIDTH = {width}")
        (folder / "layers.py").write_text("from parts import WIDTH")
        (folder / "model.py").write_text(
            "from torch import nn\nimport layers\n"
            "class Net(nn.Module):\n    width = layers.WIDTH\n    def forward(self, x): return x\n"
        )
        built.append(build_model(f"{folder / 'model.py'}:Net", {}))
    assert [model.width for model in built] == [1, 2]
    assert not {"layers", "parts", "model"} & sys.modules.keys()
    assert not any(str(tmp_path) in entry for entry in sys.path)


def test_a_constructor_may_import_from_its_folder(tmp_path):
    (tmp_path / "late.py").write_text("WIDTH = 4")
    (tmp_path / "model.py").write_text(
        "from torch import nn\ndef make():\n    import late\n    return nn.Linear(late.WIDTH, 1)"
    )
    assert build_model(f"{tmp_path / 'model.py'}:make", {}).in_features == 4


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("Missing", {}, r"no 'Missing'; its models are Net, Conv, Broken"),
        (
            "Net",
            {"in_channels": 1},
            r"Net\(in_channels, num_classes, width=3\) missing.*'num_class",
        ),
        ("Net", {"deep": 1, "in_channels": 1, "num_classes": 1}, r"unexpected keyword .*'deep'"),
        ("Broken", {"depth": 9}, r"Broken\(depth=9\) failed: RuntimeError: depth 9 is too much"),
        ("number", {}, r"gave a int; expected an nn.Module"),
        ("constant", {}, r"is a int; expected a class, a function or a module"),
        ("ready", {"size": 3}, r"module already"),
    ],
)
def test_what_cannot_be_built_is_explained(models, name, args, message):
    with pytest.raises(ModelError, match=message) as caught:
        build_model(f"{models}:{name}", args)
    assert "\n" not in str(caught.value)


def test_a_file_without_a_name_asks_for_one(models):
    with pytest.raises(ModelError, match=r"needs a name, as in .*my-models.py:Broken; its models"):
        build_model(str(models), {})


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import not_a_module_anywhere", " at model.py:1: ModuleNotFoundError: No module named"),
        ("class Net(:", ": SyntaxError"),
        ("import json\njson.loads('?')", " at model.py:2: JSONDecodeError"),
        ("raise SystemExit(2)", " at model.py:1: SystemExit: 2"),
    ],
)
def test_a_file_that_cannot_be_imported(tmp_path, code, message):
    path = tmp_path / "model.py"
    path.write_text(code)
    before = set(sys.modules)
    with pytest.raises(ModelError, match=rf"importing .*model.py failed{message}"):
        build_model(f"{path}:Net", {})
    assert not [name for name in sys.modules.keys() - before if name.endswith("_model")]


def test_a_file_or_package_that_is_not_there(tmp_path):
    with pytest.raises(NotFoundError, match=r"nowhere.py does not exist"):
        build_model(f"{tmp_path / 'nowhere.py'}:Net", {})
    with pytest.raises(ModelError, match=r"importing no_such_package.x failed: ModuleNotFound"):
        build_model("no_such_package.x:Net", {})


def test_an_unknown_name_lists_the_built_in_ones():
    with pytest.raises(ModelError, match=r"'gni', did you mean gin\?.*gcn, gin.*file.py:Name"):
        build_model("gni", {})


@pytest.mark.parametrize("kind", BUILT_IN)
def test_a_built_in_model_takes_its_sizes_from_arguments_and_data(kind):
    model = build_model(kind, {"hidden": 8, "num_layers": 2}, in_dim=3, out_dim=4)
    assert (model.settings.in_dim, model.settings.out_dim, model.settings.hidden) == (3, 4, 8)
    assert len(model.convs) == 2


def test_none_and_booleans_are_words_for_a_built_in_model():
    args = parse_args(["norm=none", "pool=none", "residual=false", "hidden=8"])
    settings = build_model("gcn", args, in_dim=3, out_dim=4).settings
    assert (settings.norm, settings.pool, settings.residual) == ("none", "none", "none")
    assert build_model("gcn", {"residual": True}, in_dim=3, out_dim=4).settings.residual == "scaled"


@pytest.mark.parametrize(
    ("kind", "args", "message"),
    [
        ("gin", {"widht": 3}, r"no argument widht; it has in_dim, out_dim, hidden"),
        ("gin", {"norm": "instance"}, r"norm='instance' is not one of none, batch"),
        ("gin", {"hidden": 0}, r"hidden=0 is not a positive whole number"),
        ("gin", {"num_layers": "5"}, r"num_layers='5' is not a positive"),
        ("gin", {"dropout": 1.0}, r"dropout=1.0"),
        ("gat", {"hidden": 10, "heads": 4}, r"hidden=10 is not a multiple of heads=4"),
        ("gcn", {"edge_dim": 3}, r"gcn reads no edge features; gin, gat, gps do"),
        ("gin", {"in_dim": 5}, r"reads 5 node features, the data has 3"),
        ("gin", {"in_dim": []}, r"in_dim=\[\]"),
    ],
)
def test_wrong_settings_of_a_built_in_model(kind, args, message):
    with pytest.raises(ModelError, match=message):
        build_model(kind, args, in_dim=3, out_dim=2)


def test_a_built_in_model_without_sizes():
    with pytest.raises(ModelError, match=r"gin needs in_dim.*give in_dim=NUMBER"):
        build_model("gin", {}, out_dim=2)
    with pytest.raises(ModelError, match=r"gin needs out_dim"):
        build_model("gin", {}, in_dim=2)


def test_a_checkpoint_of_another_model_is_recognised():
    foreign = nn.Linear(2, 2).state_dict()
    with pytest.raises(ModelError, match=r"not made by the built-in gin .*'weight'.*file.py:Name"):
        build_model("gin", {}, state_dict=foreign, in_dim=3, out_dim=2)
    sage = build_model("sage", {}, in_dim=3, out_dim=2)
    with pytest.raises(ModelError, match=r"holds a built-in sage, not a gin"):
        build_model("gin", {}, state_dict=sage.state_dict())


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("64", 64),
        ("1e-3", 1e-3),
        ("true", True),
        ("False", False),
        ("none", None),
        ("[1, 2]", [1, 2]),
        ("[true, null]", [True, None]),
        ("(1, 'a')", (1, "a")),
        ("{'a': 1}", {"a": 1}),
        ("relu", "relu"),
        ("'64'", "64"),
        ("a=b", "a=b"),
        ("", ""),
        ("[a, b]", "[a, b]"),
        (r"'\d'", r"\d"),
        ("/data/x.csv", "/data/x.csv"),
        ("__import__('os')", "__import__('os')"),
    ],
)
def test_values_are_literals_where_they_parse(text, value):
    parsed = parse_args([f"name={text}"])["name"]
    assert parsed == value
    assert type(parsed) is type(value)


@given(st.text())
def test_any_value_parses(text):
    assert list(parse_args([f"name={text}"])) == ["name"]


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists))
def test_python_literals_survive(value):
    assert parse_args([f"name={value!r}"]) == {"name": value}


@pytest.mark.parametrize("pair", ["hidden", "=3", "a b=3", "--hidden=3"])
def test_malformed_pairs(pair):
    with pytest.raises(ConfigError, match=r"name=value"):
        parse_args([pair])


def test_a_name_given_twice_is_refused():
    with pytest.raises(ConfigError, match=r"'a' is given twice: 1 and '2'"):
        parse_args(["a=1", "b=1", "a=2"])


# --- sizes that a constructor insists on: the weights know them better than the data

SIZED = """
from torch import nn
from torch_geometric.nn import GATConv

class Logits(nn.Module):
    def __init__(self, in_dim, num_classes):
        super().__init__()
        self.conv = GATConv(in_dim, 3, heads=2)
        self.out = nn.Linear(6, num_classes)

class Heads(nn.Module):
    def __init__(self, in_dim, num_classes):
        super().__init__()
        self.out = GATConv(in_dim, num_classes, heads=4)

class Default(nn.Module):
    def __init__(self, in_dim, hidden=4, outputs=1, layers=1):
        super().__init__()
        self.first, self.out = nn.Linear(in_dim, hidden), nn.Linear(hidden, outputs)

class Folded(nn.Module):
    def __init__(self, in_dim, num_classes):
        super().__init__()
        self.out = nn.Linear(in_dim, 1 if num_classes <= 2 else num_classes)

class Categories(nn.Module):
    def __init__(self, num_features, out_dim):
        super().__init__()
        self.embedding = nn.Embedding(num_features, 4)
        self.out = nn.Linear(4, 2 * out_dim + 1)
"""


@pytest.fixture
def sized(tmp_path: Path) -> Path:
    path = tmp_path / "sized.py"
    path.write_text(SIZED)
    return path


@pytest.mark.parametrize("name", ["Logits", "Heads", "Folded"])
@pytest.mark.parametrize("classes", [1, 2, 3, 12])
@pytest.mark.parametrize("prefix", ["", "net."])
def test_the_weights_decide_the_number_of_outputs(
    sized: Path, name: str, classes: int, prefix: str
) -> None:
    saved = build_model(f"{sized}:{name}", {"in_dim": 7, "num_classes": classes}).state_dict()
    weights = {prefix + key: value for key, value in saved.items()}
    for guess in (1, None):  # two classes; links and data without labels
        filled: dict[str, Any] = {}
        built = build_model(
            f"{sized}:{name}", {}, state_dict=weights, in_dim=7, out_dim=guess, filled=filled
        )
        assert {k: v.shape for k, v in built.state_dict().items()} == {
            k: v.shape for k, v in saved.items()
        }
        assert filled["in_dim"] == 7
        # What the weights do not tell apart is as the data say.
        assert filled["num_classes"] == (1 if name == "Folded" and classes <= 2 else classes)


def test_both_sizes_may_be_other_than_the_data_say(sized: Path) -> None:
    args = {"num_features": 119, "out_dim": 5}
    saved = build_model(f"{sized}:Categories", args).state_dict()
    filled: dict[str, Any] = {}
    build_model(f"{sized}:Categories", {}, state_dict=saved, in_dim=2, out_dim=1, filled=filled)
    assert filled == args


def test_what_the_user_gives_wins(sized: Path) -> None:
    saved = build_model(f"{sized}:Logits", {"in_dim": 7, "num_classes": 2}).state_dict()
    built = build_model(f"{sized}:Logits", {"num_classes": 3}, state_dict=saved, in_dim=7)
    assert isinstance(built.out, nn.Linear)
    assert built.out.out_features == 3


def test_sizes_that_a_constructor_has_by_default_are_named(sized: Path) -> None:
    spec = f"{sized}:Default"
    weights = build_model(spec, {"hidden": 6, "outputs": 2}, in_dim=7).state_dict()
    expected = "--model-args hidden=6 --model-args outputs=2"
    with pytest.raises(ModelError, match=f"hidden=4, outputs=1 by default.*{expected}"):
        build_model(spec, {}, state_dict=weights, in_dim=7)


def test_weights_of_another_model_are_refused_as_before(sized: Path, tmp_path: Path) -> None:
    import torch

    torch.save({"conv.bias": torch.ones(9), "out.weight": torch.ones(4, 5)}, tmp_path / "a.pt")
    spec = ModelSpec(f"{sized}:Logits", {}, tmp_path / "a.pt", out_dim=1)
    with pytest.raises(CheckpointError, match="does not fit the model"):
        spec.load(in_dim=7)
