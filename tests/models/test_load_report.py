from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import GCNConv

from histograph_post.errors import CheckpointError
from histograph_post.models import (
    KeyMap,
    KeyRule,
    load_into,
    read_checkpoint,
    read_key_map,
)

from .conftest import assert_holds, checkpoint_of, mismatch, randomized, small_model


def rows(error: CheckpointError) -> dict[str, list[str]]:
    """The table's rows by the name of the tensor, as words."""
    lines = error.details.split("\n\n")[0].splitlines()[1:]
    split = [line.replace("wrong shape", "wrong-shape").split(maxsplit=2) for line in lines]
    return {words[1]: [words[0], " ".join(words[2].split())] for words in split}


def suggested(error: CheckpointError, path: Path, heading: str) -> KeyMap:
    """The key map of the table, as a user would paste it into a file."""
    _, _, text = error.details.partition(f"A key map (--key-map FILE.toml) {heading}:\n")
    assert text
    path.write_text("\n".join(line for line in text.splitlines() if line[0] != "("))
    return read_key_map(path)


def test_a_mismatch_changes_nothing_and_says_everything() -> None:
    model = small_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state_dict = randomized(model)
    state_dict["0.wieght"] = state_dict.pop("0.weight")
    state_dict["2.weight"] = torch.zeros(5, 4)
    state_dict["unrelated"] = torch.zeros(9, 9, 9)

    error = mismatch(model, state_dict)

    assert_holds(model, before)
    assert "1 missing, 2 unexpected, 1 wrongly shaped, 7 fit" in str(error)
    assert "first: missing 0.weight [4, 3], nearest 0.wieght" in str(error)
    assert rows(error) == {
        "0.weight": ["missing", "[4, 3] 0.wieght"],
        "2.weight": ["wrong-shape", "[5, 4] [2, 4]"],
        "0.wieght": ["unexpected", "[4, 3] 0.weight"],
        "unrelated": ["unexpected", "[9, 9, 9]"],
    }


def test_the_nearest_name_has_the_same_shape_if_there_is_one() -> None:
    model = nn.ModuleDict({"output": nn.Linear(4, 2, bias=False)})
    files = {"outputs.weight": torch.zeros(7, 7), "out.weight": torch.zeros(2, 4)}
    assert rows(mismatch(model, files))["output.weight"] == ["missing", "[2, 4] out.weight"]


class ConvolutionNet(nn.Module):
    def __init__(self, features: int = 7) -> None:
        super().__init__()
        self.convs = nn.ModuleList([GCNConv(features, 16), GCNConv(16, 16), GCNConv(16, 3)])
        self.head = nn.Linear(3, 2)


def old_layout(state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    """The names and the layout PyG had before version 2.0."""
    return {
        name.replace(".lin.weight", ".weight"): tensor.T if ".lin.weight" in name else tensor
        for name, tensor in state_dict.items()
    }


@pytest.mark.parametrize("features", [7, 16, -1])
def test_weights_of_old_pyg_load_with_the_suggested_key_map(tmp_path: Path, features: int) -> None:
    state_dict = randomized(ConvolutionNet(abs(features)))
    model = ConvolutionNet(features)
    error = mismatch(model, old_layout(state_dict))
    if features == 7:
        assert "its transpose" in str(error)
    key_map = suggested(error, tmp_path / "map.toml", "that fits")
    # Also the square one, whose shape does not give it away.
    assert all(rule.transpose for rule in key_map.rules)
    load_into(model, checkpoint_of(old_layout(state_dict)), key_map=key_map)
    assert_holds(model, state_dict)


def test_weights_of_old_pyg_load_with_one_line() -> None:
    model = ConvolutionNet()
    state_dict = randomized(model)
    key_map = KeyMap((KeyRule("convs.*.weight", "convs.*.lin.weight", transpose=True),))
    load_into(model, checkpoint_of(old_layout(state_dict)), key_map=key_map)
    assert_holds(model, state_dict)


def test_a_renamed_layer_is_not_transposed(tmp_path: Path) -> None:
    """Other matrices with the same renaming show that the square one is as it should be."""
    model = ConvolutionNet()
    state_dict = randomized(model)
    renamed = {name.replace(".lin.weight", ".weight"): value for name, value in state_dict.items()}
    key_map = suggested(mismatch(model, renamed), tmp_path / "map.toml", "that fits")
    load_into(model, checkpoint_of(renamed), key_map=key_map)
    assert_holds(model, state_dict)


def test_square_weights_of_old_pyg_are_taken_for_transposed(tmp_path: Path) -> None:
    model = nn.ModuleList([GCNConv(8, 8), GCNConv(8, 8)])
    state_dict = randomized(model)
    error = mismatch(model, old_layout(state_dict))
    assert "A square matrix fits transposed or not" in error.details
    key_map = suggested(error, tmp_path / "map.toml", "that fits")
    load_into(model, checkpoint_of(old_layout(state_dict)), key_map=key_map)
    assert_holds(model, state_dict)


def test_old_pyg_behind_a_prefix(tmp_path: Path) -> None:
    model = ConvolutionNet()
    state_dict = randomized(model)
    content = {f"net.{name}": tensor for name, tensor in old_layout(state_dict).items()}
    key_map = suggested(mismatch(model, content), tmp_path / "map.toml", "that fits")
    load_into(model, checkpoint_of(content), key_map=key_map)
    assert_holds(model, state_dict)


def test_a_prefix_that_only_some_names_lack(tmp_path: Path) -> None:
    model = nn.ModuleDict({"conv": nn.Linear(3, 4), "head": nn.Linear(4, 2)})
    state_dict = randomized(model)
    content = {name.removeprefix("head."): tensor for name, tensor in state_dict.items()}
    key_map = suggested(mismatch(model, content), tmp_path / "map.toml", "that fits")
    load_into(model, checkpoint_of(content), key_map=key_map)
    assert_holds(model, state_dict)


def test_a_transposed_tensor_is_recognised(tmp_path: Path) -> None:
    model = small_model()
    state_dict = randomized(model)
    turned = {**state_dict, "0.weight": state_dict["0.weight"].T}
    error = mismatch(model, turned)
    assert "first: wrong shape 0.weight [3, 4] for [4, 3], its transpose" in str(error)
    key_map = suggested(error, tmp_path / "map.toml", "that fits")
    load_into(model, checkpoint_of(turned), key_map=key_map)
    assert_holds(model, state_dict)


@pytest.mark.parametrize(("in_file", "in_model"), [("", "gnn."), ("net.", "gnn.")])
def test_a_prefix_of_the_model_is_one_line_or_a_list(
    tmp_path: Path, in_file: str, in_model: str
) -> None:
    inner = small_model()
    model = nn.ModuleDict({"gnn": inner}) if in_model else inner
    state_dict = randomized(inner)
    renamed = {in_file + name: value for name, value in state_dict.items()}
    error = mismatch(model, renamed)
    key_map = suggested(error, tmp_path / "map.toml", "that fits")
    if not in_file:
        assert key_map.rules == (KeyRule("*", "gnn.*"),)
    load_into(model, checkpoint_of(renamed), key_map=key_map)
    assert_holds(inner, state_dict)


def deep_model(count: int, names: tuple[str, str, str]) -> nn.ModuleDict:
    """Convolutions, batch norms and a classifier under some names."""
    convs, norms, head = names
    return nn.ModuleDict(
        {
            convs: nn.ModuleList([nn.Linear(4, 4) for _ in range(count)]),
            norms: nn.ModuleList([nn.BatchNorm1d(4) for _ in range(count)]),
            head: nn.Linear(4, 4),
        }
    )


def test_a_proposal_for_a_deep_model_is_complete_and_short(tmp_path: Path) -> None:
    """All tensors have one of two shapes, and more of them than the table shows are renamed."""
    file = deep_model(30, ("gnns", "batch_norms", "linear"))
    model = deep_model(30, ("convs", "bns", "head"))
    state_dict = randomized(file)
    key_map = suggested(mismatch(model, state_dict), tmp_path / "map.toml", "that fits")
    assert KeyRule("gnns.*.weight", "convs.*.weight") in key_map.rules
    assert len(key_map.rules) == 9
    load_into(model, checkpoint_of(state_dict), key_map=key_map)
    assert list(model.state_dict()) == [
        name.replace("gnns", "convs").replace("batch_norms", "bns").replace("linear", "head")
        for name in state_dict
    ]
    for old, new in zip(state_dict.values(), model.state_dict().values(), strict=True):
        assert torch.equal(old, new)


def test_a_batch_norm_is_never_proposed_for_a_linear_layer() -> None:
    """Their biases have the same shape, and the names are as alike as can be."""
    model = nn.ModuleDict({"norm1": nn.Linear(4, 4), "other": nn.Linear(4, 4)})
    file = nn.ModuleDict({"norm2": nn.BatchNorm1d(4), "out": nn.BatchNorm1d(4)})
    assert "A key map" not in mismatch(model, randomized(file)).details
    layer_norm = nn.ModuleDict({"norm1": nn.LayerNorm(4), "other": nn.LayerNorm(4)})
    assert "A key map" not in mismatch(layer_norm, randomized(file)).details


def test_what_does_not_cover_the_model_is_not_proposed() -> None:
    model = nn.ModuleDict({"conv": nn.Linear(3, 4), "head": nn.Linear(4, 2)})
    state_dict = randomized(nn.ModuleDict({"gnn": nn.Linear(3, 4), "loss": nn.Linear(7, 7)}))
    assert "A key map" not in mismatch(model, state_dict).details


def test_a_proposal_names_what_it_leaves_out(tmp_path: Path) -> None:
    model = nn.ModuleDict({"conv": nn.Linear(3, 4)})
    state_dict = randomized(nn.ModuleDict({"gnn": nn.Linear(3, 4), "loss": nn.Linear(7, 7)}))
    key_map = suggested(mismatch(model, state_dict), tmp_path / "map.toml", "that fits")
    assert {rule.old for rule in key_map.rules if rule.new is None} == {"loss.weight", "loss.bias"}
    load_into(model, checkpoint_of(state_dict), key_map=key_map)
    assert torch.equal(model["conv"].weight, state_dict["gnn.weight"])


def test_a_proposal_for_an_encoder_says_what_stays_without_weights() -> None:
    model = nn.ModuleDict({"encoder": small_model(), "head": nn.Linear(2, 1)})
    error = mismatch(model, randomized(small_model()))
    assert "that fits, but for 2 missing" in error.details
    assert '"*" = "encoder.*"' in error.details


def test_lines_of_the_key_map_that_match_nothing_are_listed() -> None:
    model = small_model()
    renamed = {f"net.{name}": value for name, value in randomized(model).items()}
    key_map = KeyMap((KeyRule("nett.*", "*"), KeyRule("net.0.*", "0.*")))
    error = mismatch(model, renamed, key_map)
    assert error.details.endswith("Lines of the key map that match nothing: nett.*")


def test_the_table_stays_readable_for_a_wholly_different_model() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(200)))
    error = mismatch(model, {f"a{index}.b\x1b[0m": torch.zeros(2, 2) for index in range(300)})
    lines = error.details.splitlines()
    assert "and 350 more missing" in lines
    assert "and 250 more unexpected" in lines
    assert len(lines) < 200
    assert "\x1b" not in error.details


def test_the_wrong_one_of_two_real_files(shared_data: Path) -> None:
    """The perceptron instead of the graph network of the same tutorial."""
    layers = [GCNConv(1433, 16), nn.ReLU(), nn.Dropout(), GCNConv(16, 7)]
    model = nn.ModuleDict({"layers": nn.ModuleList(layers)})
    path = shared_data / "checkpoints/uvadlc_tutorial7/NodeLevelMLP.ckpt"
    with pytest.raises(CheckpointError, match="2 missing, 2 unexpected") as caught:
        load_into(model, read_checkpoint(path))
    missing = rows(caught.value)["layers.0.lin.weight"]
    assert missing == ["missing", "[16, 1433] layers.0.weight"]
