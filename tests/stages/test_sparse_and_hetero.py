"""Sparse adjacency matrices reach the model; graphs with several types of nodes are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.nn import GCNConv, global_mean_pool
from torch_geometric.transforms import ToSparseTensor

import histograph_post as hg
from histograph_post.errors import DataError
from histograph_post.training.options import TrainingOptions

from ..helpers import demo_graphs, histograph

# What torch and PyTorch Geometric say where these tests and models use sparse tensors.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse"),
    pytest.mark.filterwarnings("ignore:Converting sparse tensor to CSR format"),
]

SHORT = TrainingOptions(epochs=1)


class Net(nn.Module):
    """Takes a sparse matrix, and no edge_index at all."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = GCNConv(4, 8), GCNConv(8, 8)
        self.last = nn.Linear(8, 1)

    def states(self, x: Tensor, adj_t: Tensor) -> list[Tensor]:
        one = self.first(x, adj_t).relu()
        return [x, one, self.second(one, adj_t)]

    def forward(self, x: Tensor, adj_t: Tensor, batch: Tensor) -> Tensor:
        assert adj_t.layout != torch.strided
        x = self.first(x, adj_t).relu()
        return self.last(global_mean_pool(self.second(x, adj_t), batch))


class WholeNet(Net):
    def forward(self, data: Batch) -> Tensor:  # type: ignore[override]
        return super().forward(data.x, data.adj_t, data.batch)


def sparse_graphs(count: int, layout: torch.layout) -> list[Data]:
    """Demo graphs with directed, weighted edges in ``adj_t`` instead of ``edge_index``."""
    graphs = []
    for graph in demo_graphs(count):
        keep = torch.arange(graph.num_edges) % 3 > 0  # not symmetric
        weights = torch.linspace(0.5, 2, int(keep.sum()))
        made = Data(x=graph.x, y=graph.y, edge_index=graph.edge_index[:, keep], edge_weight=weights)
        graphs.append(ToSparseTensor(attr="edge_weight", layout=layout)(made))
    return graphs


@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_coo])
@pytest.mark.parametrize("kind", [Net, WholeNet])
def test_sparse_adjacency_reaches_forward(
    kind: type[Net], layout: torch.layout, tmp_path: Path
) -> None:
    model, graphs = kind().eval(), sparse_graphs(24, layout)
    assert "edge_index" not in graphs[0]
    cache = hg.cache(model, graphs, tmp_path / "c")
    assert cache is not None
    for number in (0, 11, 23):
        states = model.states(graphs[number].x, graphs[number].adj_t)
        found = cache[number].history  # L of [num_nodes, D_l]
        for expected, layer in zip(states, found, strict=True):
            assert torch.allclose(layer, expected, atol=1e-5)
        # What structural readouts see: from source to target, as everywhere.
        rows = graphs[number].adj_t.to_sparse_coo().indices()  # [2, num_edges]: target, source
        pairs = set(map(tuple, rows.flip(0).t().tolist()))
        assert set(map(tuple, cache[number].edge_index.t().tolist())) == pairs
    run = hg.train_head(tmp_path / "c", tmp_path / "run", head="sagpool", seeds=[0], training=SHORT)
    assert len(hg.predict(run, graphs[:5], model=model)) == 5
    tuned = hg.finetune(
        tmp_path / "c", tmp_path / "tuned", head="mean", model=model, data=graphs, training=SHORT
    )
    assert len(hg.predict(tuned, graphs[:5], model=model)) == 5


def test_model_sees_the_matrix_in_the_table(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "from torch_geometric.transforms import ToSparseTensor\n"
        "from histograph_post.data import load_data\n"
        "from torch import nn\n"
        "from torch_geometric.nn import GCNConv\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.a, self.b = GCNConv(4, 8), GCNConv(8, 2)\n"
        "    def forward(self, x, adj_t):\n"
        "        return self.b(self.a(x, adj_t).relu(), adj_t)\n"
        "def graphs():\n"
        "    graphs = load_data('demo:', args={'num_graphs': 6}).graphs\n"
        "    return [ToSparseTensor(layout=torch.sparse_csr)(graph) for graph in graphs]\n"
    )
    monkeypatch.chdir(tmp_path)
    scope: dict[str, type[nn.Module]] = {}
    exec(Path("mine.py").read_text(), scope)
    torch.save(scope["Net"]().state_dict(), "net.pt")
    done = histograph("inspect", "net.pt", "--model", "mine.py:Net", "--data", "mine.py:graphs")
    assert done.exit_code == 0, done.output
    assert "sparse_csr" in next(line for line in done.stdout.splitlines() if "adj_t [" in line)
    assert "edge_index read off adj_t" in done.stderr


def hetero() -> HeteroData:
    data = HeteroData()
    data["paper"].x, data["author"].x = torch.randn(3, 2), torch.randn(2, 2)
    data["author", "writes", "paper"].edge_index = torch.tensor([[0, 1], [0, 1]])
    return data


def test_hetero_data_is_refused_in_one_line(tmp_path: Path) -> None:
    torch.save([hetero(), hetero()], tmp_path / "graphs.pt")
    code = "import torch\ndef {}(): return torch.load({!r}, weights_only=False){}\n"
    file = str(tmp_path / "graphs.pt")
    (tmp_path / "own.py").write_text(code.format("all", file, "") + code.format("one", file, "[0]"))
    for given in (hetero(), [hetero()], Batch.from_data_list([hetero(), hetero()])):
        with pytest.raises(DataError, match=r"HeteroData \(node types paper, author\).*to_homog"):
            hg.cache(Net(), given, tmp_path / "c")
    for spec in (f"{tmp_path}/own.py:all", f"{tmp_path}/own.py:one", file):
        with pytest.raises(DataError, match=r"found HeteroData.*to_homogeneous"):
            hg.load_data(spec)
