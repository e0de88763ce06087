"""Somebody's training script: a model, the data and a checkpoint, as people write them.

    python examples/custom_model.py OUT      # custom_model.sh does that, and goes on from there

Nothing in here knows of histograph-post. Its commands find the model as `custom_model.py:Net` and
the data as `custom_model.py:graphs`, and call both by the names in their signatures.
"""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import SAGEConv, global_max_pool, global_mean_pool
from torch_geometric.utils import to_undirected

NUM_FEATURES = 4


class Block(nn.Module):
    """A convolution with everything around it: norm, activation, dropout, residual."""

    def __init__(self, width, dropout):
        super().__init__()
        self.conv = SAGEConv(width, width)
        self.norm = nn.LayerNorm(width)
        self.dropout = dropout

    def forward(self, x, edge_index):
        update = F.gelu(self.norm(self.conv(x, edge_index)))
        return x + F.dropout(update, self.dropout, self.training)  # [num_nodes, width]


class Net(nn.Module):
    """Six blocks, and a readout of mean and maximum."""

    def __init__(self, num_features=NUM_FEATURES, width=24, num_blocks=6, dropout=0.1):
        super().__init__()
        self.encoder = nn.Linear(num_features, width)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(num_blocks))
        self.classifier = nn.Linear(2 * width, 2)

    def forward(self, data):
        x = self.encoder(data.x)  # [num_nodes, width]
        for block in self.blocks:
            x = block(x, data.edge_index)
        pooled = [global_mean_pool(x, data.batch), global_max_pool(x, data.batch)]
        return self.classifier(torch.cat(pooled, dim=1))  # [num_graphs, 2]


def graphs(num_graphs=400, seed=0):
    """Return growing networks: new nodes join anyone (class 0) or rather the popular (class 1)."""
    random = torch.Generator().manual_seed(seed)
    made = []
    for number in range(num_graphs):
        label = number % 2
        num_nodes = int(torch.randint(12, 36, (), generator=random))
        degree = torch.zeros(num_nodes)
        degree[:2] = 1
        edges = [(0, 1)]
        for node in range(2, num_nodes):
            popularity = degree[:node] ** label  # [node], all alike in class 0
            for other in torch.multinomial(popularity, 2, generator=random).tolist():
                edges.append((node, other))
                degree[[node, other]] += 1
        x = 0.5 * torch.randn(num_nodes, NUM_FEATURES, generator=random)
        x[:, 0] += degree / 4
        edge_index = to_undirected(torch.tensor(edges).T, num_nodes=num_nodes)
        made.append(Data(x=x, edge_index=edge_index, y=torch.tensor([label])))
    return made


def main(out, epochs=15):
    torch.manual_seed(0)
    out, data, model = Path(out), graphs(), Net()
    order = torch.randperm(len(data)).tolist()
    parts = {"train": order[:240], "valid": order[240:280], "test": order[280:]}
    loader = DataLoader([data[i] for i in parts["train"]], batch_size=32, shuffle=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(int(epochs)):
        total = 0.0
        for batch in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(batch), batch.y)
            loss.backward()
            optimizer.step()
            total += float(loss.detach())
        print(f"epoch {epoch}: loss {total / len(loader):.3f}")

    # The split belongs to the checkpoint: scores on graphs that it has seen would flatter it.
    (out / "split").mkdir(parents=True, exist_ok=True)
    for part, rows in parts.items():
        (out / "split" / f"{part}.txt").write_text("\n".join(map(str, rows)))
    state = {"epoch": epoch, "model_state_dict": model.state_dict()}
    torch.save({**state, "optimizer": optimizer.state_dict()}, out / "model.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
