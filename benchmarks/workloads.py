"""What the measurements run on: data sets, backbones and caches, each made once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch_geometric.data import Batch

from histograph_post.caches import Cache
from histograph_post.caches.caching import cache
from histograph_post.data import GraphDataset, from_graphs, load_data
from histograph_post.heads.history import layer_statistics
from histograph_post.heads.ragged import Graphs
from histograph_post.models import ModelSpec, build_model, call_model

from .generated import generate

#: Where a folder of data keeps the weights of the molecule GCN.
CHECKPOINT = Path("checkpoints/pretrain-gnns/chem_gcn_contextpred.pth")


@dataclass(frozen=True)
class Sizes:
    """How much is run: less is quicker, and tells less."""

    #: Turns of every contender; the median of them counts.
    rounds: int = 5
    #: Head steps in a turn.
    steps: int = 5
    #: Graphs of a batch.
    batch_size: int = 64
    #: Graphs of a data set, at most; the largest has 4,110.
    num_graphs: int = 5000
    #: Batches of an epoch against the padded algorithm.
    padded_batches: int = 5
    #: Convolutions of the deep backbone and of the shallow one.
    deep: int = 32
    shallow: int = 5
    #: Width of both, and of every head.
    width: int = 64
    #: Width of the molecule GCN.
    molecule_width: int = 300
    #: Epochs after which the metrics of two caches are compared.
    epochs: int = 5
    #: Epochs of readouts that are compared side by side.
    compared_epochs: int = 15


#: Enough to see that everything runs and where the ratios are, about.
QUICK = Sizes(rounds=2, steps=1, num_graphs=128, padded_batches=1, epochs=2, compared_epochs=2)


@dataclass(frozen=True)
class GraphRows:
    """Random activations for the nodes of some graphs."""

    #: ``[num_nodes, L, D]``.
    history: Tensor
    #: Graph of each node, sorted: ``[num_nodes]``.
    batch: Tensor
    num_graphs: int

    @classmethod
    def random(cls, num_nodes: np.ndarray, layers: int, width: int) -> GraphRows:
        """Draw them for graphs of so many nodes each."""
        batch = torch.arange(len(num_nodes)).repeat_interleave(torch.from_numpy(num_nodes))
        generator = torch.Generator().manual_seed(0)
        history = torch.randn(len(batch), layers, width, generator=generator)
        return cls(history, batch, len(num_nodes))

    @cached_property
    def statistics(self) -> Tensor:
        """Statistics of the layers of every graph: ``[num_graphs, 3, L * D]``."""
        num_nodes, device = len(self.batch), self.batch.device
        graphs = Graphs.from_batch(self.batch, num_nodes, self.num_graphs, device)
        return layer_statistics(self.history, graphs)

    def __str__(self) -> str:
        nodes, layers, width = self.history.shape
        return f"{self.num_graphs} graphs, {nodes} nodes, L = {layers}, D = {width}"


@dataclass(frozen=True)
class Subject:
    """A backbone with the data it runs on."""

    model: nn.Module
    dataset: GraphDataset
    #: What they are, in a few words.
    about: str


class Workloads:
    """Data sets, backbones and caches in the sizes that are asked for.

    Args:
        folder: Where caches are written.
        sizes: How much is run.
        data_root: Real data, only read: ``tu/NAME/raw``, ``mol/BBBP.csv`` and the checkpoint of
            pretrain-gnns; without it graphs are generated in the sizes of the same sets.
    """

    def __init__(self, folder: Path, sizes: Sizes, data_root: Path | None = None) -> None:
        self.folder = folder
        self.sizes = sizes
        self.data_root = data_root
        self._caches: dict[tuple[str, str], Cache] = {}

    @cached_property
    def proteins(self) -> GraphDataset:
        """PROTEINS: graphs of very different sizes."""
        return self._dataset("PROTEINS", "tu:PROTEINS")

    @cached_property
    def molecules(self) -> GraphDataset:
        """BBBP: molecules, in the encoding of pretrain-gnns."""
        return self._dataset("BBBP", "smiles:mol/BBBP.csv", mol_features="pretrain")

    @cached_property
    def deep_gin(self) -> Subject:
        """The deep GIN on PROTEINS."""
        return self._gin(self.proteins, "PROTEINS", self.sizes.deep)

    @cached_property
    def shallow_gin(self) -> Subject:
        """The shallow GIN on NCI1."""
        return self._gin(self._dataset("NCI1", "tu:NCI1"), "NCI1", self.sizes.shallow)

    @cached_property
    def molecule_gcn(self) -> Subject:
        """The GCN of pretrain-gnns on BBBP."""
        checkpoint = None if self.data_root is None else self.data_root / CHECKPOINT
        model = make_molecule_gcn(self.molecules, self.sizes.molecule_width, checkpoint)
        about = f"GCN-5 x {self.sizes.molecule_width}, {self.about('BBBP', self.molecules)}"
        return Subject(model, self.molecules, about)

    def about(self, name: str, dataset: GraphDataset) -> str:
        """Describe a data set: its name and its size."""
        title = name if self.data_root is not None else f"generated in the sizes of {name}"
        nodes = dataset.num_nodes
        return f"{title}: {len(dataset)} graphs of {nodes.mean():.0f} nodes, at most {nodes.max()}"

    def cache(self, subject: Subject, dtype: str = "float32") -> Cache:
        """Return the activations of a backbone on its data."""
        key = (subject.about, dtype)
        if key not in self._caches:
            place = self.folder / f"{len(self._caches)}.cache"
            made = cache(subject.model, subject.dataset, place, device="cpu", dtype=dtype)
            assert made is not None  # this is the only job
            self._caches[key] = made
        return self._caches[key]

    def _gin(self, dataset: GraphDataset, name: str, num_layers: int) -> Subject:
        width = self.sizes.width
        model = make_gin(dataset, num_layers, width)
        return Subject(model, dataset, f"GIN-{num_layers} x {width}, {self.about(name, dataset)}")

    def _dataset(self, name: str, spec: str, **args: str) -> GraphDataset:
        if self.data_root is None:
            return generate(name, self.sizes.num_graphs)
        found = load_data(spec, root=self.data_root, args=args)
        # Some sets are sorted by class.
        order = np.random.default_rng(0).permutation(len(found))[: self.sizes.num_graphs]
        return from_graphs([found.graphs[index] for index in order], spec=spec)


_MOLECULE_GCN = "pretrain-gnns:gcn"
#: Graphs from which the running statistics of batch norm are taken.
_STATISTICS_GRAPHS = 256


def make_gin(dataset: GraphDataset, num_layers: int, width: int) -> nn.Module:
    """Return the built-in GIN with batch norm, with random weights."""
    torch.manual_seed(0)
    sizes = {"hidden": width, "num_layers": num_layers}
    columns = int(dataset.graphs[0].num_node_features)
    return _with_statistics(build_model("gin", sizes, in_dim=columns, out_dim=1), dataset)


def make_molecule_gcn(dataset: GraphDataset, width: int, checkpoint: Path | None) -> nn.Module:
    """Return the molecule GCN: with the weights of a checkpoint, or with random ones."""
    torch.manual_seed(0)
    if checkpoint is not None:
        return ModelSpec(_MOLECULE_GCN, checkpoint=checkpoint).load()
    return _with_statistics(build_model(_MOLECULE_GCN, {"emb_dim": width}), dataset)


@torch.no_grad()
def _with_statistics(model: nn.Module, dataset: GraphDataset) -> nn.Module:
    """Set the running statistics of batch norm: with random weights activations grow with depth."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.momentum = 1.0  # take those of this one batch
    call_model(model.train(), Batch.from_data_list(dataset.graphs[:_STATISTICS_GRAPHS]))
    return model.eval()
