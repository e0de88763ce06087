"""A GraphGPS backbone: PyG's GPSConv with random-walk encodings, cached and read out, from Python.

    python examples/graph_gps.py OUT                              # a folder to write; needs no data

The same model by command, for a checkpoint of it:

    histograph cache --model examples/graph_gps.py:GPS --checkpoint OUT/gps.pt \
        --data examples/graph_gps.py:graphs -o gps.cache
"""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GINConv, GPSConv, global_mean_pool
from torch_geometric.transforms import AddRandomWalkPE

import histograph_post as hg
from histograph_post.data import from_graphs
from histograph_post.splits import resolve_splits

WALK_LENGTH = 8


class GPS(nn.Module):
    """Local message passing and global attention in every layer, and a mean pool."""

    def __init__(self, num_features=4, num_classes=2, width=32, num_layers=4, heads=4):
        super().__init__()
        self.encoder = nn.Linear(num_features, width - WALK_LENGTH)
        self.walk_norm = nn.BatchNorm1d(WALK_LENGTH)
        self.convs = nn.ModuleList(
            GPSConv(width, GINConv(nn.Sequential(nn.Linear(width, width), nn.ReLU())), heads=heads)
            for _ in range(num_layers)
        )
        self.classifier = nn.Linear(width, num_classes)

    def forward(self, x, walk_pe, edge_index, batch):
        x = torch.cat([self.encoder(x), self.walk_norm(walk_pe)], dim=1)  # [num_nodes, width]
        for conv in self.convs:
            x = conv(x, edge_index, batch)
        return self.classifier(global_mean_pool(x, batch))  # [num_graphs, num_classes]


def graphs(num_graphs=300):
    """Return graphs with how often a random walk comes home, which `forward` asks for by name."""
    encode = AddRandomWalkPE(WALK_LENGTH, attr_name="walk_pe")
    return [
        encode(graph) for graph in hg.load_data("demo:", args={"num_graphs": num_graphs}).graphs
    ]


def train(model, training, epochs):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model.train()
    for _ in range(epochs):
        for batch in DataLoader(training, batch_size=32, shuffle=True):
            optimizer.zero_grad()
            out = model(batch.x, batch.walk_pe, batch.edge_index, batch.batch)
            F.cross_entropy(out, batch.y).backward()
            optimizer.step()


def main(out, num_graphs=300, epochs=15):
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    dataset = from_graphs(graphs(int(num_graphs)))
    splits = resolve_splits(dataset, "stratified:0.6,0.1,0.3")

    torch.manual_seed(0)
    model = GPS()
    train(model, [dataset.graphs[row] for row in splits.folds[0].train], int(epochs))
    torch.save(model.state_dict(), out / "gps.pt")

    # Any nn.Module and any list of graphs; the layers are found in a probe pass.
    cache = hg.cache(model, dataset, out / "gps.cache", split=splits)
    print("captured:", ", ".join(cache.layer_names))

    training = hg.TrainingOptions(epochs=int(epochs))
    run = hg.train_head(cache, out / "head", dim=32, seeds=(0, 1), training=training)
    for readout, found in run.results["readouts"].items():
        test = found["test"]
        print(f"{readout}: test accuracy {test['mean']:.3f} ± {test['deviation']:.3f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
