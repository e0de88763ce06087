"""The head as a drop-in readout inside a PyG training script of your own.

    python examples/drop_in_readout.py                            # data made in code
    python examples/drop_in_readout.py --data tu:MUTAG --data-root DIR

The network keeps what every layer says in a list, and `HistoGraphHead` takes the place of pooling
and classifier. Both variants are trained from random weights, alike.
"""

import argparse

import torch
from torch import nn
from torch.nn import functional as F
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GINConv, global_mean_pool

import histograph_post as hg


class MeanPool(nn.Module):
    """The usual readout: the mean of the last layer and a linear classifier."""

    def __init__(self, width, num_classes):
        super().__init__()
        self.classifier = nn.Linear(width, num_classes)

    def forward(self, history, batch):
        return self.classifier(global_mean_pool(history[-1], batch))  # [num_graphs, num_classes]


class Net(nn.Module):
    """A GIN that hands the history of its nodes to a readout."""

    def __init__(self, num_features, num_classes, *, readout, width=32, num_layers=6):
        super().__init__()
        self.encoder = nn.Linear(num_features, width)
        self.convs = nn.ModuleList(
            GINConv(nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)))
            for _ in range(num_layers)
        )
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for _ in range(num_layers))
        if readout == "histograph":
            # The width of every entry of the history: the embedded input, then every layer.
            self.readout = hg.HistoGraphHead([width] * (num_layers + 1), num_classes, dim=32)
        else:
            self.readout = MeanPool(width, num_classes)

    def forward(self, x, edge_index, batch):
        history = [self.encoder(x)]  # of [num_nodes, width]
        for conv, norm in zip(self.convs, self.norms, strict=True):
            history.append(F.relu(norm(conv(history[-1], edge_index))))
        return self.readout(history, batch)  # [num_graphs, num_classes]


def accuracy(model, graphs):
    model.eval()
    correct = 0
    with torch.no_grad():
        for batch in DataLoader(graphs, batch_size=128):
            found = model(batch.x, batch.edge_index, batch.batch).argmax(dim=1)  # [num_graphs]
            correct += int((found == batch.y).sum())
    return correct / len(graphs)


def train(model, graphs, epochs):
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(epochs):
        model.train()
        for batch in DataLoader(graphs, batch_size=64, shuffle=True):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(batch.x, batch.edge_index, batch.batch), batch.y)
            loss.backward()
            optimizer.step()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="demo:")
    parser.add_argument("--data-root")
    parser.add_argument("--epochs", type=int, default=20)
    options = parser.parse_args()

    dataset = hg.load_data(options.data, root=options.data_root)
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(0)).tolist()
    held_out = len(dataset) // 4
    test, training = (
        [dataset.graphs[i] for i in part] for part in (order[:held_out], order[held_out:])
    )
    num_features = dataset.graphs[0].num_node_features
    num_classes = int(dataset.labels().max()) + 1
    for readout in ("mean pool", "histograph"):
        torch.manual_seed(0)
        model = Net(num_features, num_classes, readout=readout)
        train(model, training, options.epochs)
        print(f"{readout}: test accuracy {accuracy(model, test):.3f}")


if __name__ == "__main__":
    main()
