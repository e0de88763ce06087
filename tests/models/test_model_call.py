"""Models are called by the names in their forward signature, and their prediction is found."""

from __future__ import annotations

import functools
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.data import Batch, Data
from torch_geometric.nn import GAE, GAT, GCN, GIN, GCNConv, Sequential, global_mean_pool

from histograph_post.caches.caching import cache
from histograph_post.data import load_data
from histograph_post.errors import CaptureError, ModelError
from histograph_post.models import call_model, prediction
from histograph_post.models.model_call import OutputForm


@pytest.fixture
def batch() -> Batch:
    torch.manual_seed(0)
    graphs = [
        Data(
            x=torch.randn(nodes, 4),
            edge_index=torch.tensor([[0, 1], [1, 0]]),
            edge_attr=torch.randn(2, 3),
            pos=torch.randn(nodes, 2),
            z=torch.arange(nodes),
            y=torch.tensor([nodes]),
        )
        for nodes in (3, 2)
    ]
    return Batch.from_data_list(graphs)


def module_with(forward) -> nn.Module:
    """A module whose class has the given forward."""
    return type("Model", (nn.Module,), {"forward": forward})()


@pytest.mark.parametrize(
    ("forward", "expected"),
    [
        (lambda self, x: x, "x"),
        (lambda self, edge_index, x: edge_index, "edge_index"),
        (lambda self, x, batch: batch, "batch"),
        (lambda self, z, pos, batch: z, "z"),
        (lambda self, z, pos, batch: pos, "pos"),
        (lambda self, x, /, edge_index: x, "x"),
        (lambda self, x, *, edge_attr: edge_attr, "edge_attr"),
        (lambda self, node_features, edge_index: node_features, "x"),
        (lambda self, h, edges: h, "x"),
        (lambda self, x, edge_index, batch_idx: batch_idx, "batch"),
        (lambda self, x, edge_features: edge_features, "edge_attr"),
        (lambda self, x, edge_attr=None: edge_attr, "edge_attr"),
    ],
)
def test_attributes_are_passed_by_name(batch, forward, expected):
    assert call_model(module_with(forward), batch) is batch[expected]


@pytest.mark.parametrize(
    "forward",
    [
        lambda self, data: data,
        lambda self, batch: batch,
        lambda self, g: g,
        lambda self, inputs, return_embedding=False: inputs,
        lambda self, data, batch: data,
        lambda self, *args: args[0],
    ],
)
def test_a_parameter_for_the_whole_batch(batch, forward):
    assert call_model(module_with(forward), batch) is batch


@pytest.mark.parametrize("name", ["batch_size", "num_graphs"])
def test_the_number_of_graphs(batch, name):
    scope: dict[str, object] = {}
    exec(f"def forward(self, x, {name}=None): return {name}", scope)
    assert call_model(module_with(scope["forward"]), batch) == 2


def test_optional_parameters_the_data_lacks_keep_their_default(batch):
    model = module_with(lambda self, x, edge_weight="default", flag=True: (edge_weight, flag))
    assert call_model(model, batch) == ("default", True)


def test_a_model_never_sees_its_labels_by_default(batch):
    assert call_model(module_with(lambda self, x, y=None: y), batch) is None
    assert call_model(module_with(lambda self, x, y: y), batch) is batch.y  # it insists


def test_variable_arguments_receive_nothing(batch):
    model = module_with(lambda self, x, *args, **kwargs: (args, kwargs))
    assert call_model(model, batch) == ((), {})


def test_a_missing_input_is_named(batch):
    model = module_with(lambda self, x, edge_weight: x)
    with pytest.raises(ModelError, match=r"Model\.forward needs 'edge_weight'.*has batch, edge_"):
        call_model(model, batch)


@pytest.mark.parametrize("network", [GCN, GAT, GIN])
def test_models_of_torch_geometric(batch, network):
    model = network(4, 8, num_layers=2).eval()
    assert torch.equal(call_model(model, batch), model(batch.x, batch.edge_index))


def test_a_sequential_of_torch_geometric(batch):
    layers = [(GCNConv(4, 8), "x, edge_index -> x"), (global_mean_pool, "x, batch -> x")]
    assert call_model(Sequential("x, edge_index, batch", layers), batch).shape == (2, 8)


def test_wrapped_models(batch):
    class Net(nn.Module):
        def forward(self, x: Tensor, batch: Tensor) -> Tensor:
            return global_mean_pool(x, batch)

    def logged(forward):
        @functools.wraps(forward)
        def wrapper(*args, **kwargs):
            return forward(*args, **kwargs)

        return wrapper

    decorated = type("Decorated", (Net,), {"forward": logged(Net.forward)})()
    replaced = Net()
    replaced.forward = functools.partial(replaced.forward)
    scale = module_with(lambda self, x, factor: x * factor)
    scale.forward = functools.partial(scale.forward, factor=2)
    expected = global_mean_pool(batch.x, batch.batch)
    for model in (Net(), nn.DataParallel(Net()), decorated, replaced):
        assert torch.equal(call_model(model, batch), expected)
    assert torch.equal(call_model(scale, batch), batch.x * 2)
    compiled = torch.compile(Net(), backend="eager")
    assert torch.equal(call_model(compiled, batch), expected)


def test_hooks_run(batch):
    model, seen = GCN(4, 8, num_layers=1), []
    model.register_forward_hook(lambda module, args, output: seen.append(output))
    assert call_model(model, batch) is seen[0]


def test_a_failing_model_is_reported_with_its_input(batch):
    batch.x = torch.ones(5, 4, dtype=torch.long)
    with pytest.raises(ModelError, match=r"x \[5, 4\] int64.*x holds integers") as caught:
        call_model(GCN(4, 8, num_layers=1), batch)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value.__cause__, RuntimeError)


@pytest.mark.parametrize("error", [CaptureError("ours"), torch.OutOfMemoryError("theirs")])
def test_errors_that_are_not_about_the_input_pass_through(batch, error):
    def forward(self, x):
        raise error

    with pytest.raises(type(error)) as caught:
        call_model(module_with(forward), batch)
    assert caught.value is error


Named = namedtuple("Named", ["embedding", "logits"])


@dataclass
class Outputs:
    loss: Tensor
    hidden: Tensor
    y_hat: Tensor


WANTED = torch.arange(6.0).reshape(3, 2)
NODES = torch.zeros(7, 4)
OTHER = torch.zeros(3, 5)


@pytest.mark.parametrize(
    "output",
    [
        WANTED,
        (WANTED, NODES),
        (NODES, WANTED),
        [NODES, (torch.tensor(1.0), WANTED)],
        {"embedding": NODES, "anything": WANTED},
        {"hidden": OTHER, "logits": WANTED},
        OrderedDict(loss=torch.tensor(0.5), out=WANTED),
        {"model": {"hidden": OTHER, "Pred": WANTED}},
        Named(OTHER, WANTED),
        Outputs(torch.tensor(0.5), OTHER, WANTED),
        (torch.zeros(3, dtype=torch.long), WANTED),
        (torch.zeros(3, 2, 2), WANTED),
        (None, "text", 3, WANTED),
    ],
)
def test_the_prediction_is_found(output):
    assert prediction(output, rows=3) is WANTED


def test_row_counts_are_tried_in_order():
    assert prediction((NODES, WANTED), rows=[3, 7]) is WANTED
    assert prediction((NODES, WANTED), rows=[7, 3]) is NODES


def test_a_single_target_becomes_a_column():
    assert torch.equal(prediction(torch.tensor([1.0, 2.0]), rows=2), torch.tensor([[1.0], [2.0]]))
    # What squeeze() leaves of a batch of one graph; a loss in front of it is not the prediction.
    assert torch.equal(prediction(torch.tensor(4.0), rows=1), torch.tensor([[4.0]]))
    both = (torch.tensor(0.5), torch.tensor([4.0]))
    assert torch.equal(prediction(both, rows=1), torch.tensor([[4.0]]))


def test_a_graph_handed_back_holds_no_prediction(batch):
    assert prediction(batch, rows=[2, 5]) is None


@pytest.mark.parametrize("output", [None, NODES, torch.zeros(3).long(), {}, SimpleNamespace()])
def test_nothing_fits(output):
    assert prediction(output, rows=3) is None


def test_the_output_to_take_can_be_named():
    assert prediction((OTHER, WANTED), rows=3, key=1) is WANTED
    assert prediction({"logits": OTHER, "aux": {"b": WANTED}}, rows=3, key="aux.b") is WANTED
    with pytest.raises(ModelError, match=r"no output 'c'; it returns a, b"):
        prediction({"a": OTHER, "b": WANTED}, rows=3, key="c")
    with pytest.raises(ModelError, match=r"\[7, 4\].*with 3 or 5 rows"):
        prediction((NODES, WANTED), rows=[3, 5], key=0)


def test_an_autoencoder_is_called_as_its_encoder_asks(batch):
    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = GCNConv(4, 2)

        def forward(self, x, edge_index):
            return self.conv(x, edge_index)

    model = GAE(Encoder())
    expected = model.encode(batch.x, batch.edge_index)
    assert torch.equal(call_model(model, batch), expected)


# --- probabilities are told from logits by how they are made, not by their size


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: torch.sigmoid(x), True),
        (lambda x: x.sigmoid().squeeze(-1), True),
        (lambda x: nn.Sigmoid()(x).view(-1), True),
        (lambda x: nn.functional.softmax(x, dim=-1), True),
        (lambda x: nn.functional.log_softmax(x, dim=-1), False),
        (lambda x: x.sigmoid() * 3, False),
        (lambda x: x, False),
    ],
)
def test_form(function, expected: bool) -> None:
    with OutputForm() as form:
        output = function(torch.randn(4, 2) + 0)
    assert form.is_probability(output) is expected


class Net(nn.Module):
    def __init__(self, squash: bool) -> None:
        super().__init__()
        self.squash = squash
        self.conv = GCNConv(4, 8)
        self.lin = nn.Linear(8, 1)
        nn.init.constant_(self.lin.bias, 0.2)

    def forward(self, x, edge_index, batch):
        logits = self.lin(global_mean_pool(self.conv(x, edge_index).relu(), batch)) * 0.1 + 0.3
        return torch.sigmoid(logits).squeeze(-1) if self.squash else logits


def test_own_score_is_the_same_for_logits_and_probabilities(tmp_path: Path) -> None:
    dataset = load_data("demo:", args={"num_graphs": 40})
    scores = []
    for squash in (False, True):
        torch.manual_seed(0)
        written = cache(Net(squash), dataset, tmp_path / f"{squash}.cache")
        assert written is not None
        outputs = written.outputs()
        # Both look like probabilities; only one is.
        assert outputs is not None
        assert ((outputs > 0) & (outputs < 1)).all()
        own = written.manifest.own_metrics
        assert own is not None
        assert own["probabilities"] is squash
        scores.append(own["all"])
    assert scores[0] == pytest.approx(scores[1])
