"""A readout of one's own: registered, named by its file, offered by a package, or the class."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from histograph_post.errors import ConfigError, DataError
from histograph_post.heads import (
    Graphs,
    History,
    Readout,
    build_head,
    head_config,
    head_info,
    head_name,
    head_names,
    register_head,
    registry,
)

EXAMPLE = Path(__file__).parents[2] / "examples" / "my_head.py"


@pytest.fixture(autouse=True)
def no_names_left() -> Iterator[None]:
    before = dict(registry._registered)
    yield
    registry._registered.clear()
    registry._registered.update(before)


class Largest(Readout):
    """The largest channel of the last layer.

    More than the first line is for readers of the code.
    """

    def build(self, *, sign: float = 1.0) -> None:
        self.sign = sign
        self.finish(1)

    def pool_graphs(self, history: History, graphs: Graphs, edge_index: Tensor | None) -> Tensor:
        return graphs.mean(self.sign * history[:, -1].amax(1, keepdim=True))  # [num_graphs, 1]


def test_a_registered_readout_is_built_by_its_name() -> None:
    assert register_head("largest")(Largest) is Largest
    assert "largest" in head_names("graph")
    assert "largest" not in head_names("node")
    assert head_info("largest").description == "The largest channel of the last layer"
    head = build_head("largest", [3, 3], 1, sign=-1.0)
    again = build_head("largest", **head_config("largest", head))
    assert type(again) is Largest
    assert again.sign == -1.0
    with pytest.raises(ConfigError, match="found option 'sgn', expected one of dim, dropout, sign"):
        build_head("largest", [3, 3], 1, sgn=1)


def test_a_class_is_called_by_its_own_name_or_by_the_one_it_was_given() -> None:
    assert head_name(Largest) == "Largest"
    register_head("big")(type("Big", (Largest,), {}))
    assert head_name(head_info("big").load()) == "big"
    assert head_name("mean") == "mean"


def test_the_example_is_named_by_its_file_and_gives_mean_and_maximum() -> None:
    assert head_name(f"{EXAMPLE}:MeanAndMax") == "MeanAndMax"
    assert head_info("MeanAndMax").code == f"{EXAMPLE}:MeanAndMax"
    head = build_head("MeanAndMax", [2, 2], 1)
    history = torch.tensor([[[1.0, 2.0], [3.0, 4.0]], [[5.0, 0.0], [1.0, 2.0]]])  # [2, L, D]
    graphs = Graphs.from_batch(None, 2, None, history.device)
    rows = head.pool_graphs(history, graphs, None)
    assert rows.tolist() == [[3.0, 1.0, 2.0, 3.0, 5.0, 2.0, 3.0, 4.0]]


def test_an_installed_package_offers_a_readout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "readouts-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: readouts\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[histograph_post.heads]\nfirst = readouts_of_others:First\n"
    )
    (tmp_path / "readouts_of_others.py").write_text(
        "from histograph_post.heads.readouts import LastLayer\n"
        "class First(LastLayer):\n    'Another last layer.'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert "first" in head_names("graph")
    assert head_info("first").load().__name__ == "First"
    assert build_head("first", [3], 1).config()["in_dims"] == [3]
    monkeypatch.delitem(sys.modules, "readouts_of_others")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (f"{EXAMPLE}:Median", "found no 'Median', expected a readout"),
        (f"{EXAMPLE}:torch", "found <module 'torch'.*expected a subclass"),
        ("os:system", "standard library"),
        ("torch.nn:Linear", "found <class 'torch.nn.*expected a subclass"),
        ("histogram", "such as histograph.*or your own as file.py:Class"),
    ],
)
def test_what_is_no_readout_is_refused(spec: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        head_name(spec)


@pytest.mark.parametrize(("name", "message"), [("mean", "another name"), ("a/b", "a folder")])
def test_names_that_cannot_be_given(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        register_head(name)(Largest)


class Unfinished(Largest):
    """A readout whose maker forgot the classifier."""

    def build(self) -> None:
        """Make nothing."""


class Flat(Largest):
    """A readout that pools over the whole batch."""

    def pool_graphs(self, history: History, graphs: Graphs, edge_index: Tensor | None) -> Tensor:
        return history[:, -1].amax().view(1, 1)


def test_what_a_readout_forgot_is_said_by_its_name() -> None:
    with pytest.raises(ConfigError, match=r"Unfinished.build: found no classifier, expected it"):
        Unfinished([3, 3], 1)
    batch = torch.tensor([0, 0, 1, 1])
    with pytest.raises(DataError, match=r"Flat.pool_graphs: found \[1, 1\], expected \[2, 1\]"):
        Flat([3, 3], 1)(torch.randn(4, 2, 3), batch)


def test_one_that_is_solved_learns_nothing_before_its_classifier() -> None:
    class Mapped(Readout):
        solved = True

        def build(self) -> None:
            self.map = torch.nn.Linear(self.in_dims[-1], 2)
            self.finish(2, linear=True)

    with pytest.raises(ConfigError, match="Mapped: found solved = True and weights before"):
        Mapped([3, 3], 1)
