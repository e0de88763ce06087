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
    assert head_info("first").source  # a run is held to the code that it was trained with
    with pytest.raises(ConfigError, match="such as first"):
        head_info("frist")
    monkeypatch.delitem(sys.modules, "readouts_of_others")

    (tmp_path / "readouts_of_others.py").write_text("import a_module_that_is_not_there\n")
    registry._registered.clear()
    with pytest.raises(ConfigError, match=r"head 'first': readouts_of_others:First.*a_module_that"):
        head_info("first")


class Centred(Largest):
    """The largest channel above the mean of all nodes of the batch."""

    def pool_graphs(self, history: History, graphs: Graphs, edge_index: Tensor | None) -> Tensor:
        last = self.layers(history)[-1]  # [num_nodes, D]
        return graphs.mean((last - last.mean(0)).amax(1, keepdim=True))  # [num_graphs, 1]


def test_a_readout_that_sees_other_graphs_of_its_batch_is_refused() -> None:
    state = torch.get_rng_state()
    with pytest.raises(ConfigError, match="Centred: found outputs of a graph that depend on"):
        build_head(head_name(Centred), [3, 3], 1)
    build_head(head_name(Largest), [3, 3], 1)
    torch.manual_seed(0)
    first = build_head(head_name(Largest), [3, 3], 1).state_dict()
    torch.manual_seed(0)
    assert all(map(torch.equal, first.values(), Largest([3, 3], 1).state_dict().values()))
    torch.set_rng_state(state)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (f"{EXAMPLE}:Median", "found no 'Median', expected a class of it, as .*:MeanAndMax"),
        (f"{EXAMPLE}:torch", "found .*my_head.py:torch, expected a subclass"),
        ("os:system", "standard library"),
        ("torch.nn:Linear", "found torch.nn:Linear, expected a subclass"),
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

    with pytest.raises(ConfigError, match="Mapped: found solved = True and other weights"):
        Mapped([3, 3], 1)


def test_options_need_no_star_and_need_not_be_kept() -> None:
    class Scaled(Largest):
        """Options by position, none of them kept."""

        def build(self, factor: float = 2.0, times: int = 1) -> None:
            self.sign = factor * times
            self.finish(1)

    register_head("scaled")(Scaled)
    head = build_head("scaled", [3, 3], 1, times=3)
    config = head_config("scaled", head)
    assert (config["factor"], config["times"]) == (2.0, 3)
    assert build_head("scaled", **config).sign == 6.0


class Made(Readout):
    """Makes its modules in the wrong method."""

    def __init__(self, in_dims: list[int], out_dim: int, **options: int) -> None:
        super().__init__(in_dims, out_dim)
        self.map = torch.nn.Linear(in_dims[-1], out_dim)


def test_modules_are_made_in_build() -> None:
    with pytest.raises(ConfigError, match="'Made': found an __init__ and no build, expected build"):
        head_name(Made)


def test_an_option_that_is_kept_as_something_else_is_saved_as_it_was_given() -> None:
    class Tensored(Largest):
        """Keeps its option as a tensor."""

        def build(self, *, sign: float = 1.0) -> None:
            self.sign = torch.tensor(sign)
            self.finish(1)

    assert Tensored([3, 3], 1, sign=-1.0).config()["sign"] == -1.0


def test_an_option_without_a_value_and_a_method_of_other_arguments_are_refused_by_name() -> None:
    class Needs(Largest):
        """Has an option without a default."""

        def build(self, *, sign: float) -> None:
            self.finish(1)

    with pytest.raises(ConfigError, match=r"Needs\.build: missing a required argument: 'sign'"):
        Needs([3, 3], 1)

    class Short(Largest):
        """Pools without the graphs."""

        def pool_graphs(self, history: History) -> Tensor:  # type: ignore[override]
            return history[:, -1]

    with pytest.raises(ConfigError, match=r"Short.pool_graphs: too many .* history, graphs, edge"):
        Short([3, 3], 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("*, dim: int = 3", r"Own.build: found the option 'dim', which every readout has: leave"),
        ("*, train: bool = True", "found the option 'train', expected a name that no readout has"),
        ("**more", "found the option 'more' of any number, expected each option by its name"),
    ],
)
def test_options_that_cannot_be_are_refused_by_name(options: str, message: str) -> None:
    code = f"class Own(Readout):\n    def build(self, {options}) -> None: ...\n"
    with pytest.raises(ConfigError, match=message):
        exec(code, {"Readout": Readout})


def test_a_readout_that_pools_nothing_is_refused_by_name() -> None:
    class Lazy(Readout):
        """Has no pooling."""

        levels = ("graph", "node")

        def build(self) -> None:
            self.finish(1)

    with pytest.raises(ConfigError, match="Lazy: found no pool_graphs or node_rows, expected it"):
        Lazy([3], 1)
    with pytest.raises(ConfigError, match="Lazy: found no node_rows, expected it for node tasks"):
        Lazy([3], 1, level="node")
    with pytest.raises(ConfigError, match="Empty: found no build"):
        type("Empty", (Readout,), {})([3], 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dropout": "abc"}, "found dropout='abc', expected a number"),
        ({"heads": "x"}, "found heads='x', expected a whole number"),
        ({"mlp_layers": 1.5}, "found mlp_layers=1.5, expected a whole number"),
        ({"residual": 2}, "found residual=2, expected true or false"),
        ({"history_layers": "all"}, "expected a whole number or none"),
        ({"dropout": "0.1,dim=32"}, "give --head-args once for each option"),
        ({"mix": 3}, "found mix=3, expected a word"),
    ],
)
def test_values_are_of_the_kind_that_the_option_is(
    options: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build_head("histograph", [8, 8], 1, **options)


def test_what_fails_inside_is_said_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "failing.py"
    file.write_text(
        "from histograph_post.heads import Readout\n"
        "class Failing(Readout):\n"
        "    def build(self):\n"
        "        self.finish(len(self.nothing))\n"
        "    def pool_graphs(self, history, graphs, edge_index): ...\n"
    )
    name = head_name(f"{file}:Failing")
    with pytest.raises(ConfigError, match=r"'Failing' failed at failing.py:4: Attrib"):
        build_head(name, [3], 1)
    with pytest.raises(ConfigError, match=r"expected a class of it, as .*failing.py:Failing$"):
        head_name(str(file))
