"""Dataclasses are made of JSON only if every field has the annotated type."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

import pytest

from histograph_post.errors import ConfigError, DataError
from histograph_post.utils.decoding import Count, Form, Positive, Sha256, decode

SOILS = ("clay", "sand")


@dataclass(frozen=True)
class Leaf:
    color: Literal["green", "red"]
    area: float

    def __post_init__(self) -> None:
        if self.area < 0:
            raise DataError(f"found area = {self.area}, expected more")


@dataclass(frozen=True)
class Tree:
    name: str
    birds: Count
    roots: Positive
    depth: int
    evergreen: bool
    digest: Sha256
    leaves: tuple[Leaf, ...]
    sizes: Mapping[str, tuple[int, ...]]
    soil: Annotated[str, Form("one of the soils", lambda value: value in SOILS, str.upper)]
    notes: Any
    best: Leaf | None
    label: str | None = None


TREE: dict[str, Any] = {
    "name": "oak",
    "birds": 0,
    "roots": 1,
    "depth": -3,
    "evergreen": False,
    "digest": "a" * 64,
    "leaves": [{"color": "green", "area": 2}, {"color": "red", "area": 0.5}],
    "sizes": {"winter": [1, 2], "summer": []},
    "soil": "clay",
    "notes": [None, {"any": "thing"}],
    "best": {"color": "red", "area": 1.5},
    "label": "x",
}


def test_every_field_becomes_its_type() -> None:
    tree = decode(Tree, TREE, "tree.json")
    assert tree.leaves == (Leaf("green", 2.0), Leaf("red", 0.5))
    assert type(tree.leaves[0].area) is float
    assert tree.soil == "CLAY"
    assert tree.best == Leaf("red", 1.5)
    assert tree.sizes == {"winter": (1, 2), "summer": ()}
    assert decode(Tree, {**TREE, "best": None, "label": None}, "tree.json").label is None
    assert asdict(tree)["notes"] == TREE["notes"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": 3}, "found name = 3, expected a text"),
        ({"birds": -1}, "found birds = -1, expected a whole number from 0"),
        ({"birds": 2**63}, "expected a whole number from 0"),
        ({"birds": True}, "found birds = True, expected a whole number from 0"),
        ({"roots": 0}, "found roots = 0, expected a whole number from 1"),
        ({"depth": 1.0}, "found depth = 1.0, expected a whole number"),
        ({"depth": False}, "found depth = False, expected a whole number"),
        ({"evergreen": 1}, "found evergreen = 1, expected true or false"),
        ({"digest": "A" * 64}, "expected 64 hexadecimal digits"),
        ({"leaves": {}}, "found leaves = {}, expected a list"),
        ({"leaves": [7]}, "found leaves[0] = 7, expected an object"),
        ({"leaves": [{"color": "green"}]}, "leaves[0]: found no 'area', expected one"),
        (
            {"leaves": [*TREE["leaves"], {"color": "blue", "area": 1}]},
            "leaves[2]: found color = 'blue', expected one of green, red",
        ),
        ({"leaves": [{"color": "red", "area": -1}]}, "leaves[0]: found area = -1.0, expected more"),
        ({"best": {"color": "red", "area": "1"}}, "best: found area = '1', expected a number"),
        ({"best": {"color": "red", "area": 10**400}}, "0..., expected a number"),
        ({"best": {"color": "red", "area": 16**5000}}, "a number of 20001 bits, expected a number"),
        ({"best": {**TREE["best"], "x": 1}}, "best: found the unknown field 'x', expected none"),
        ({"best": 3}, "found best = 3, expected an object"),
        ({"sizes": []}, "found sizes = [], expected an object"),
        ({"sizes": {"winter": ["1"]}}, "found sizes['winter'][0] = '1', expected a whole number"),
        ({"soil": "air"}, "found soil = 'air', expected one of the soils"),
        ({"label": 3}, "found label = 3, expected a text or null"),
        ({"more": 1}, "found the unknown field 'more', expected none"),
        ({"name": list(range(99))}, "..., expected a text"),
    ],
)
def test_anything_else_is_refused_by_its_place(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^tree.json: .*{re.escape(message)}") as error:
        decode(Tree, TREE | change, "tree.json", error=ConfigError)
    assert len(str(error.value)) < 150


@pytest.mark.parametrize("value", [None, [], 3, "oak"])
def test_something_that_is_no_object_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match=r"^tree.json: found .*, expected an object"):
        decode(Tree, value, "tree.json", error=ConfigError)


def test_what_may_be_missing_and_what_may_be_more() -> None:
    without = {key: value for key, value in TREE.items() if key != "label"}
    with pytest.raises(ConfigError, match="found no 'label'"):
        decode(Tree, without, "tree.json", error=ConfigError)
    assert decode(Tree, without, "tree.json", defaults=True).label is None
    with pytest.raises(ConfigError, match="found no 'name'"):
        decode(Tree, {"label": "x"}, "tree.json", error=ConfigError, defaults=True)
    assert decode(Tree, {**TREE, "more": 1}, "tree.json", unknown=True) == decode(Tree, TREE, "")
