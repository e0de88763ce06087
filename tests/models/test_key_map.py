from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from histograph_post.errors import CheckpointError, ConfigError, NotFoundError
from histograph_post.models import KeyMap, KeyRule, read_key_map

MATRIX = torch.arange(6.0).reshape(2, 3)


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_toml_and_json_say_the_same(tmp_path: Path) -> None:
    toml = """
        "encoder.*" = "*"
        "convs.*.weight" = { to = "convs.*.lin.weight", transpose = true }
        "head.*" = false
        unquoted.0.name = "quoted"
        unquoted.0.table = { to = "other" }
    """
    entries = {
        "encoder.*": "*",
        "convs.*.weight": {"to": "convs.*.lin.weight", "transpose": True},
        "head.*": False,
        "unquoted.0.name": "quoted",
        "unquoted.0.table": {"to": "other"},
    }
    expected = KeyMap(
        (
            KeyRule("encoder.*", "*"),
            KeyRule("convs.*.weight", "convs.*.lin.weight", transpose=True),
            KeyRule("head.*", None),
            KeyRule("unquoted.0.name", "quoted"),
            KeyRule("unquoted.0.table", "other"),
        )
    )
    assert read_key_map(write(tmp_path / "map.toml", toml)) == expected
    assert read_key_map(write(tmp_path / "map.json", json.dumps(entries))) == expected
    # The text of a key map is a file that gives it.
    assert read_key_map(write(tmp_path / "again.toml", str(expected))) == expected


def test_names_are_changed_tensors_turned_and_left_out() -> None:
    key_map = KeyMap(
        (
            KeyRule("convs.1.weight", "second"),
            KeyRule("convs.*.weight", "layers.*.lin.weight", transpose=True),
            KeyRule("a.*.b.*", "*.and.*"),
            KeyRule("head.*", None),
        )
    )
    names = ["convs.0.weight", "convs.1.weight", "a.x.b.y.z", "head.weight", "other"]
    renamed = key_map.apply(dict.fromkeys(names, MATRIX))
    assert list(renamed) == ["layers.0.lin.weight", "second", "x.and.y.z", "other"]
    assert torch.equal(renamed["layers.0.lin.weight"], MATRIX.T)
    assert torch.equal(renamed["second"], MATRIX)


def test_a_dot_is_a_dot() -> None:
    assert list(KeyMap((KeyRule("a.b", "c"),)).apply({"axb": MATRIX})) == ["axb"]


@given(st.dictionaries(st.text(min_size=1), st.just(MATRIX)))
def test_the_identity_changes_nothing(tensors: dict[str, torch.Tensor]) -> None:
    assert KeyMap((KeyRule("*", "*"),)).apply(tensors) == tensors


def test_two_tensors_cannot_get_one_name() -> None:
    with pytest.raises(CheckpointError, match="a and b both become c"):
        KeyMap((KeyRule("a", "c"), KeyRule("b", "c"))).apply({"a": MATRIX, "b": MATRIX})


def test_only_a_matrix_has_a_transpose() -> None:
    with pytest.raises(CheckpointError, match=r"bias .* shape \[2\]; expected a matrix"):
        KeyMap((KeyRule("*", "*", transpose=True),)).apply({"bias": torch.ones(2)})


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('"a" = 3', "a: found 3; expected a name"),
        ('"a" = ""', "expected a name"),
        ('"a" = true', "expected a name"),
        ('"a" = { to = "b", turn = true }', "expected a name"),
        ('"a" = { to = "b", transpose = "yes" }', "expected a name"),
        ('"a.*" = "b"', "found 1 and 0 wildcards"),
        ('"a" = ', "not a readable TOML file"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, text: str, found: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_key_map(write(tmp_path / "map.toml", text))
    assert found in str(caught.value)
    assert "map.toml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_no_key_map(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        read_key_map(tmp_path / "absent.toml")
    with pytest.raises(ConfigError, match="broken JSON"):
        read_key_map(write(tmp_path / "map.json", "a = b"))
    with pytest.raises(ConfigError, match="found a list"):
        read_key_map(write(tmp_path / "map.json", "[]"))
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not a readable TOML file"):
        read_key_map(tmp_path / "binary.toml")
    with pytest.raises(ConfigError, match="found a folder, pipe or device"):
        read_key_map("/dev/zero")
