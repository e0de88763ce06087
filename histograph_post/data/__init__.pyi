from .dataset import GraphDataset as GraphDataset
from .dataset import from_graphs as from_graphs
from .labels import LinkOptions as LinkOptions
from .spec import DataSpec as DataSpec
from .spec import load_data as load_data
