"""Start a head where the checkpoint stands: recover the checkpoint's own classifier from a cache.

A cache holds the last layer and the model's own outputs. Where the model's readout is a mean pool
and a linear map (or, for nodes, a linear map), that map is the solution of a linear system, and
solving it needs neither the model nor its code. Channels that never move leave the solution open;
the smallest one is taken, which gives the same outputs on these graphs.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..errors import ConfigError
from ..tasks import TargetScale, Task
from ..training.head_batches import LoadedCache

#: The largest error of the recovered classifier, relative to the spread of the outputs, that
#: rounding in single precision explains.
TOLERANCE = 1e-3


def own_classifier(loaded: LoadedCache, task: Task, scale: TargetScale) -> tuple[Tensor, Tensor]:
    """Return weight ``[out_dim, D_last]`` and bias ``[out_dim]`` of the checkpoint's classifier.

    They give what the network learns: regression targets at their training ``scale``.

    Raises:
        ConfigError: where the checkpoint's own readout is not a linear map of the (mean) last
            layer, or gives no outputs that fit the task.
    """
    where = f"{loaded.cache.path}: warm start"
    outputs = loaded.own_logits(task)  # [rows, width]
    if outputs is None:
        raise ConfigError(f"{where}: found no outputs of the model's own that fit the task")
    rows = loaded.last_layer().double().numpy()  # [num_nodes, D_last]
    if task.level == "graph":
        sizes = np.diff(loaded.ptr)
        rows = np.add.reduceat(rows, loaded.ptr[:-1]) / sizes[:, None]  # [num_graphs, D_last]
    padded = np.hstack([rows, np.ones((len(rows), 1))])  # [rows, D_last + 1]
    solution = np.linalg.lstsq(padded, outputs.astype(np.float64), rcond=1e-7)[0]
    error = float(np.abs(padded @ solution - outputs).max())
    spread = float(outputs.std())
    if not error <= TOLERANCE * float(np.abs(outputs).max()):
        raise ConfigError(
            f"{where}: the checkpoint's own readout is no linear map of the last layer's "
            f"{'mean' if task.level == 'graph' else 'rows'}: found an error of {error:.2g}, "
            f"expected rounding (outputs spread by {spread:.2g})"
        )
    weight, bias = solution[:-1].T, solution[-1]  # [width, D_last], [width]
    if task.kind == "binary" and len(bias) == 2:
        # The head has one logit where the checkpoint has two: their difference.
        weight, bias = weight[1:] - weight[:1], bias[1:] - bias[:1]
    if scale.mean:
        weight = weight / np.array(scale.deviation)[:, None]
        bias = (bias - np.array(scale.mean)) / np.array(scale.deviation)
    return torch.from_numpy(weight).float(), torch.from_numpy(bias).float()
