"""Absurd options, hostile files and code that misbehaves: one line and an exit code, soon."""

from __future__ import annotations

import gzip
import os
import pickle
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch_geometric.data import Data
from typer.testing import Result

from histograph_post.errors import ConfigError
from histograph_post.models import build_model

from ..helpers import demo_graphs, histograph, make_model

HUGE = 10**30


def refused(done: Result, code: int = 1) -> str:
    """The one line of a command that was refused."""
    assert isinstance(done.exception, SystemExit), done.exception  # and no traceback
    assert done.exit_code == code, done.output
    assert all(line.isprintable() for line in done.stderr.splitlines())
    if code == 2:
        return " ".join(done.stderr.replace("│", " ").split())
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("error: "))
    return line


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("--dim 1000000000", 1, "dim: found 1000000000, expected at most"),
        (f"--dim {HUGE}", 1, "expected at most"),
        ("--dim 1048576", 1, "GB, expected at most the"),
        ("--lr inf", 1, "lr: found inf, expected a finite number from 1e-30 to 1e+30"),
        ("--lr nan", 1, "expected a finite number"),
        ("--lr 1e308", 1, "expected a finite number"),
        ("--lr 1e400", 1, "expected a finite number"),
        ("--weight-decay inf", 1, "expected a finite number"),
        ("--clip inf", 1, "expected a finite number"),
        ("--epochs 1" + "0" * 30, 1, "expected a whole number from 1 to"),
        ("--epochs 1" + "0" * 400, 1, "expected a whole number from 1 to"),
        (f"--batch-size {HUGE}", 1, "expected a whole number from 1 to"),
        ("--seeds 0-1000000000", 2, "seeds"),
        (f"--seeds 0-{HUGE}", 2, "seeds"),
        ("--seeds \x1b[2J", 2, "--seeds ?[2J: expected numbers"),
        ("--head-args dim=nan", 1, "expected a whole number"),
        ("--head-args level=node", 1, "found the option 'level', expected none of that name"),
        ("--fits \u00b2/\u00b3", 2, "--fits"),
        (f"--fits 0/{'9' * 5000}", 2, "expected I/N"),
        (f"--memory-limit {'9' * 400}GB", 2, "expected a size"),
        (f"--split kfold:{'9' * 5000}", 1, "expected kfold:K with K from 3 to"),
        ("--split random --split-seed -1", 1, "split_seed: found -1, expected a whole number"),
        (f"--folds 3 --split-seed {2**32}", 1, "split_seed: found 4294967296, expected"),
        ("--head-args mlp_layers=100000", 1, "mlp_layers: found 100000, expected at most 1000"),
        ("--attention-heads 1000000000", 1, "heads: found 1000000000, expected at most"),
        ("--folds 1000000000", 1, "expected kfold:K with K from 3 to"),
        ("--memory-limit nan", 2, "memory-limit"),
        ("--device cuda:99999999999999999999", 1, "expected auto, cpu, cuda or mps"),
        ("--metric \x1b[31m", 1, r"metric: found '\x1b[31m'"),
    ],
)
def test_options(words: str, code: int, said: str, demo_cache: Path, tmp_path: Path) -> None:
    done = histograph("train-head", demo_cache, "-o", tmp_path / "run", *words.split(" "))
    assert said in refused(done, code)


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("hidden=1000000000000", "GB, expected at most the"),
        ("hidden=100000", "GB, expected at most the"),
        ("in_dim=[1000000000000]", "GB, expected at most the"),
        ("out_dim=10000000000000", "GB, expected at most the"),
        ("num_layers=100000000", "num_layers: found 100000000, expected at most 1000"),
        ("hidden=nan", "not a positive whole number"),
    ],
)
def test_sizes_of_a_built_in_model(argument: str, said: str, tmp_path: Path) -> None:
    words = ["--model", "gin", "--data", "demo:", "--data-args", "num_graphs=20"]
    done = histograph("pretrain", *words, "--model-args", argument, "-o", tmp_path / "out")
    assert said in refused(done)


def test_sizes_of_a_public_model_and_of_generated_data(tmp_path: Path) -> None:
    words = ["pretrain", "--model", "gin", "--data", "demo:", "-o", tmp_path / "out"]
    assert "2 to 10000000 graphs" in refused(
        histograph(*words, "--data-args", "num_graphs=1000000000000")
    )
    for name, value, said in (("emb_dim", 10**8, "GB, expected"), ("num_layer", 10**8, "to 1000")):
        with pytest.raises(ConfigError, match=said):
            build_model("pretrain-gnns:gin", {name: value})


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with the weights of a model and graphs for it."""
    monkeypatch.chdir(tmp_path)
    torch.save(make_model().state_dict(), "good.pt")
    torch.save(demo_graphs(12), "graphs.pt")
    return tmp_path


def cached(data: str = "graphs.pt", checkpoint: str = "good.pt", model: str = "gin") -> Result:
    words = ["--model", model, "--checkpoint", checkpoint, "--data", data]
    return histograph("cache", *words, "-o", "out.cache")


@pytest.mark.parametrize("content", [b"a = " + b"[" * 10**5, b".".join([b"a"] * 10**5) + b" = 1"])
def test_deep_configurations(content: bytes, place: Path, demo_cache: Path) -> None:
    Path("deep.toml").write_bytes(content)
    said = refused(histograph("train-head", demo_cache, "-o", "run", "--config", "deep.toml"), 2)
    assert "nested too deep" in said


@pytest.mark.parametrize("words", [("--metric", "\udcff"), ("-o", "r\udcff")])
def test_options_that_are_no_text(words: tuple[str, ...], place: Path, demo_cache: Path) -> None:
    said = refused(histograph("train-head", demo_cache, "-o", "run", *words))
    assert "among the options, expected UTF-8" in said
    assert not Path("run").exists()


@pytest.mark.parametrize("option", ["seeds = {}", "lr = {}", "head-args = [{}]"])
def test_numbers_of_thousands_of_digits_in_a_configuration(
    option: str, place: Path, demo_cache: Path
) -> None:
    Path("long.toml").write_text(option.format("0x" + "f" * 5000))
    said = refused(histograph("train-head", demo_cache, "-o", "run", "--config", "long.toml"), 2)
    assert "a whole number of 20000 bits, expected at most 64" in said


@pytest.mark.parametrize("name", ["pipe.toml", "/dev/zero", "/dev/null"])
def test_pipes_and_devices_are_no_configuration(name: str, place: Path, demo_cache: Path) -> None:
    os.mkfifo("pipe.toml")
    for words, code in (
        (["train-head", demo_cache, "-o", "run", "--config", name], 2),
        (["cache", "--model", "gin", "--checkpoint", "good.pt", "--key-map", name], 1),
    ):
        data = ["--data", "graphs.pt", "-o", "a.cache"] if code == 1 else []
        assert "pipe or device" in refused(histograph(*words, *data), code)


# --- files


def expanded(graph: Data) -> None:
    graph.x = torch.ones(1, 4).expand(2**40, 4)


def many_nodes(graph: Data) -> None:
    graph.num_nodes = 2**33
    del graph.x


def infinite(graph: Data) -> None:
    graph.y = torch.tensor([float("inf")])


def infinite_number(graph: Data) -> None:
    graph.y = float("-inf")


def nested(graph: Data) -> None:
    graph.x = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


def set_label(value: object, graph: Data) -> None:
    graph.y = value


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (expanded, "a tensor that claims more than the file holds"),
        (many_nodes, "found 8589934592 nodes, expected no more than fits in"),
        (infinite, "y is infinite, expected finite labels"),
        (infinite_number, "y is infinite, expected finite labels"),
        (nested, "it asks for torch._utils._rebuild_nested_tensor"),
        (partial(set_label, 10**400), "y is a whole number of 1329 bits, expected a dense"),
        (partial(set_label, torch.tensor([1e300], dtype=torch.double)), "y is 1e+300, exp"),
        (partial(set_label, torch.tensor([1j])), "y is complex64 [1], expected real numbers"),
    ],
)
def test_graphs(change: Callable[[Data], None], said: str, place: Path) -> None:
    graphs = demo_graphs(12)
    change(graphs[3])
    torch.save(graphs, "graphs.pt")
    assert said in refused(cached())


@pytest.mark.parametrize(
    ("slices", "said"),
    [
        (torch.zeros(1, dtype=torch.long).expand(10**9), "claims more than the file holds"),
        (torch.zeros(10**5).long(), "slices, expected no more than there are nodes"),
    ],
)
def test_more_slices_than_nodes(slices: torch.Tensor, said: str, place: Path) -> None:
    graph = demo_graphs(2)[0].to_dict()
    torch.save((graph, dict.fromkeys(graph, slices), Data), "graphs.pt")
    assert said in refused(cached())


def test_a_line_without_end_in_a_small_archive(place: Path) -> None:
    with gzip.open("bomb.csv.gz", "wb", 1) as file:
        file.write(b"smiles,y\n" + b"C" * (2**24 + 9))
    assert "found a line of more than 16777216 characters" in refused(cached("smiles:bomb.csv.gz"))


@pytest.mark.parametrize("cell", ["inf", "-Infinity", "1e400"])
def test_infinite_labels_in_a_table(cell: str, place: Path) -> None:
    Path("some.csv").write_text(f"smiles,y,z\nC,1,0\nCC,{cell},1\nCCC,0,1\n")
    said = f"column 'y': found '{cell}' in row 2, expected finite numbers"
    assert said in refused(cached("smiles:some.csv"))
    words = ["--model", "gin", "--data", "smiles:some.csv", "--data-args", "targets=y"]
    assert said in refused(histograph("pretrain", *words, "-o", "out"))


@pytest.mark.filterwarnings("ignore:Sparse", "ignore:The PyTorch API of nested tensors")
def test_checkpoints_with_odd_tensors_and_names(place: Path) -> None:
    weights = make_model().state_dict()
    for odd in (
        torch.eye(3).to_sparse(),
        torch.eye(3).to_sparse_csr(),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    ):
        torch.save({**weights, "odd": odd}, "odd.pt")
        assert histograph("inspect", "odd.pt").exit_code == 0
        done = cached(checkpoint="odd.pt")
        assert done.exit_code == 0 or "odd" in refused(done)
    torch.save({**weights, "a\ud800.weight\x1b[31m": torch.ones(2)}, "odd.pt")
    assert histograph("inspect", "odd.pt").exit_code == 0
    assert r"unexpected a\ud800.weight\x1b[31m [2]" in refused(cached(checkpoint="odd.pt"))
    torch.save({**weights, "odd": torch.ones(1).expand(2**40)}, "odd.pt")
    assert "a tensor that claims more than the file holds" in refused(
        histograph("inspect", "odd.pt")
    )


@pytest.mark.parametrize(
    "content",
    [
        b"}q\x00r\xff\xff\xff\x7f.",  # a place in the memo beyond 2^31
        b"\x8d" + struct.pack("<Q", 2**31) + b"a.",  # texts and bytes of 2 GB
        b"\x8e" + struct.pack("<Q", 2**31) + b"a.",
        b"\x96" + struct.pack("<Q", 2**31) + b"a.",
        b"cbuiltins\nbytearray\nJ\xff\xff\xff\x7f\x85R.",
    ],
)
def test_pickles_that_claim_two_gigabytes(content: bytes, place: Path) -> None:
    Path("odd.pt").write_bytes(b"\x80\x05" + content)
    refused(histograph("inspect", "odd.pt"))


# --- code of the user

CODE = """
import sys
from torch import nn
import histograph_post as hg

ESCAPES = "\\x1b[31m\\x1b]0;title\\x07\\u202e"

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 1)

    def forward(self, x, edge_index, batch):
        raise PROBLEM

def graphs():
    raise PROBLEM

class Silent(Exception):
    def __str__(self):
        raise RuntimeError("no message")
"""


@pytest.mark.parametrize(
    ("problem", "said"),
    [
        ("SystemExit(0)", "found SystemExit(0), expected no exit from it"),
        ("BaseException('no\\nmore')", "found BaseException(no more), expected no exit"),
        ("GeneratorExit()", "found GeneratorExit(), expected no exit"),
        ("ValueError(ESCAPES + 'bad')", "ValueError: ?[31m?]0;title??bad"),
        ("Silent()", "Silent: "),
        ("MemoryError(ESCAPES + 'no more')", "?[31m?]0;title??no more"),
    ],
)
def test_code_that_ends_the_process_or_steers_the_terminal(
    problem: str, said: str, place: Path
) -> None:
    Path("mine.py").write_text(CODE.replace("PROBLEM", problem))
    torch.save({"lin.weight": torch.ones(1, 4), "lin.bias": torch.ones(1)}, "lin.pt")
    assert said in refused(cached(model="mine.py:Net", checkpoint="lin.pt"))
    assert said in refused(cached(data="mine.py:graphs"))
    Path("other.py").write_text(CODE + f"\nraise {problem}\n")
    refused(cached(model="other.py:Net"))


def test_weights_of_nothing(place: Path) -> None:
    Path("odd.pt").write_bytes(pickle.dumps({}))
    assert "expected the weights of a model" in refused(cached(checkpoint="odd.pt"))
