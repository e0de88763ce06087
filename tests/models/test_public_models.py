"""Public checkpoints by name: the networks are their formulas, and files of others are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.data import Batch

from histograph_post.data import DataSpec, GraphDataset
from histograph_post.errors import HistographError
from histograph_post.models import ModelSpec, build_model, call_model
from histograph_post.models.public_models import family_of
from histograph_post.models.spec import RECIPES, Pretrained, load_pretrained, one_command
from histograph_post.utils.specifications import PUBLIC_MODELS

pytest.importorskip("rdkit")

MOLECULES = (
    "CC(=O)Oc1ccccc1C(=O)O", "CN1C=NC2=C1C(=O)N(C(=O)N2C)C", "C", "F/C=C/F", "C[C@H](N)C(=O)O",
    "ClCCl", "c1ccc2ccccc2c1", "CCCCCCO", "O=C(O)C#N", "BrC1CCCC1",
)  # fmt: skip


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("molecules") / "molecules.csv"
    rows = [f"{smiles},{number % 2}" for number, smiles in enumerate(MOLECULES)]
    path.write_text("\n".join(["smiles,active", *rows]))
    return path


@pytest.fixture(scope="module")
def datasets(table: Path) -> dict[str, GraphDataset]:
    return {
        features: DataSpec(f"smiles:{table}", {"mol_features": features}).load()
        for features in ("pretrain", "ogb")
    }


def make(name: str, dataset: GraphDataset, out: int | None = None, **args: Any) -> nn.Module:
    """A small network whose batch norms have seen the molecules, as those of trained ones have."""
    torch.manual_seed(0)
    model = build_model(name, {"num_layer": 3, "emb_dim": 8, **args}, out_dim=out)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=2.0)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            nn.init.normal_(module.weight, mean=1.0, std=0.2)
            module.momentum = 1.0
    with torch.no_grad():
        call_model(model.train(), Batch.from_data_list(dataset.graphs))
    return model.eval()


def data_of(name: str, datasets: dict[str, GraphDataset]) -> GraphDataset:
    return datasets[RECIPES[name].features]


def load(name: str, weights: Any, table: Path, tmp_path: Path, **args: Any) -> Pretrained:
    file = tmp_path / "file.pth"
    torch.save(weights, file)
    return load_pretrained(ModelSpec(name, args, file), DataSpec(f"smiles:{table}"))


# --- the networks are their formulas: an edge at a time -------------------------------------------


def by_hand(name: str, weights: dict[str, Tensor], batch: Batch, residual: bool = False) -> Tensor:
    """The embedding of every atom, from the weights of an encoder, written as sums over edges."""
    x, bonds = batch.x.tolist(), batch.edge_attr.tolist()
    edges = list(zip(*batch.edge_index.tolist(), bonds, strict=True))
    ogb, kind = name.startswith("ogb"), name.split(":")[1].split("-")[0]
    tables = (
        [weights[f"atom_encoder.atom_embedding_list.{i}.weight"] for i in range(9)]
        if ogb
        else [weights["x_embedding1.weight"], weights["x_embedding2.weight"]]
    )
    h = torch.stack([sum(t[v] for t, v in zip(tables, row, strict=True)) for row in x])
    if not ogb:
        edges += [(node, node, [4, 0]) for node in range(len(x))]
    virtual = weights["virtualnode_embedding.weight"][0] if "virtual" in name else None
    layers = 1 + max(int(key.split(".")[1]) for key in weights if key.startswith("batch_norms."))
    for layer in range(layers):
        given = h if virtual is None else h + virtual
        start = f"{'convs' if ogb else 'gnns'}.{layer}."
        of = {k.removeprefix(start): w for k, w in weights.items() if k.startswith(start)}
        h = norm(convolution(f"{name.split(':')[0]}:{kind}", of, given, edges), weights, layer)
        h = h.relu() if layer < layers - 1 else h
        h = h + given if residual else h
        if virtual is not None and layer < layers - 1:
            pooled = torch.stack([given[batch.batch == g].sum(0) for g in batch.batch.tolist()])
            moved = virtual_mlp(weights, layer, pooled + virtual)
            virtual = virtual + moved if residual else moved
    return h


def norm(h: Tensor, weights: dict[str, Tensor], layer: int | str) -> Tensor:
    start = f"batch_norms.{layer}." if isinstance(layer, int) else layer
    mean, var, scale, shift = (
        weights[start + part] for part in ("running_mean", "running_var", "weight", "bias")
    )
    return (h - mean) / (var + 1e-5).sqrt() * scale + shift


def linear(h: Tensor, of: dict[str, Tensor], start: str) -> Tensor:
    return h @ of[f"{start}.weight"].T + of[f"{start}.bias"]


def virtual_mlp(weights: dict[str, Tensor], layer: int, h: Tensor) -> Tensor:
    start = f"mlp_virtualnode_list.{layer}"
    h = norm(linear(h, weights, f"{start}.0"), weights, f"{start}.1.").relu()
    return norm(linear(h, weights, f"{start}.3"), weights, f"{start}.4.").relu()


def convolution(kind: str, of: dict[str, Tensor], h: Tensor, edges: list[Any]) -> Tensor:
    out_degree = [sum(source == node for source, _, _ in edges) for node in range(len(h))]
    in_degree = [sum(target == node for _, target, _ in edges) for node in range(len(h))]
    if kind.startswith("ogb"):
        tables = [of[f"bond_encoder.bond_embedding_list.{i}.weight"] for i in range(3)]
    else:
        tables = [of["edge_embedding1.weight"], of["edge_embedding2.weight"]]
    bond = [sum(t[v] for t, v in zip(tables, values, strict=True)) for *_, values in edges]
    total = torch.zeros_like(h)
    if kind == "ogb:gin":
        for (source, target, _), b in zip(edges, bond, strict=True):
            total[target] += (h[source] + b).relu()
        h = linear((1 + of["eps"]) * h + total, of, "mlp.0")
        return linear(norm(h, of, "mlp.1.").relu(), of, "mlp.3")
    if kind == "ogb:gcn":
        h = linear(h, of, "linear")
        size = torch.tensor(out_degree) + 1.0
        for (source, target, _), b in zip(edges, bond, strict=True):
            total[target] += (h[source] + b).relu() / (size[source] * size[target]).sqrt()
        return total + (h + of["root_emb.weight"]).relu() / size[:, None]
    if kind == "pretrain-gnns:gat":
        return attention(of, h, edges, bond)
    if "linear.weight" in of:
        h = linear(h, of, "linear")
    h = h @ of["weight"] if kind == "molclr:gcn" else h
    for (source, target, _), b in zip(edges, bond, strict=True):
        share = 1.0
        if kind == "pretrain-gnns:gcn":
            share = (out_degree[source] * out_degree[target]) ** -0.5
        if kind == "pretrain-gnns:sage":
            share = 1 / in_degree[target]
        total[target] += share * (h[source] + b)
    if kind == "pretrain-gnns:sage":
        return total / total.norm(dim=1, keepdim=True)
    if kind.endswith("gin"):
        return linear(linear(total, of, "mlp.0").relu(), of, "mlp.2")
    return total + of["bias"] if kind == "molclr:gcn" else total


def attention(of: dict[str, Tensor], h: Tensor, edges: list[Any], bond: list[Any]) -> Tensor:
    width = h.shape[1]
    h = linear(h, of, "weight_linear").reshape(-1, 2, width)
    values = [h[e[0]] + b.reshape(2, width) for e, b in zip(edges, bond, strict=True)]
    scores = torch.stack(
        [
            (torch.cat([h[e[1]], v], 1) * of["att"][0]).sum(1)
            for e, v in zip(edges, values, strict=True)
        ]
    )
    scores = torch.where(scores > 0, scores, 0.2 * scores).double()
    raised = (scores - scores.max()).exp()
    total = torch.zeros(len(h), 2, width, dtype=torch.double)
    for number, (source, target, _) in enumerate(edges):
        leaving = sum(raised[i] for i, edge in enumerate(edges) if edge[0] == source)
        total[target] += (raised[number] / leaving)[:, None] * values[number]
    return total.mean(1).float() + of["bias"]


@pytest.mark.parametrize("name", PUBLIC_MODELS)
def test_the_networks_equal_their_formulas(name: str, datasets: dict[str, GraphDataset]) -> None:
    dataset = data_of(name, datasets)
    batch = Batch.from_data_list(dataset.graphs)
    for args in ({}, {"residual": True}) if name.startswith("ogb") else ({},):
        model = make(name, dataset, **args)
        expected = by_hand(name, model.state_dict(), batch, residual=bool(args))
        with torch.inference_mode():
            torch.testing.assert_close(call_model(model, batch), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("pretrain-gnns:gcn", "chem_gcn_contextpred.pth"),
        ("pretrain-gnns:gcn", "chem_gcn_supervised_contextpred.pth"),
        ("pretrain-gnns:sage", "chem_graphsage_contextpred.pth"),
    ],
)
def test_published_weights_are_read_and_no_other_family_takes_them(
    name: str, file: str, shared_data: Path
) -> None:
    path = shared_data / "checkpoints" / "pretrain-gnns" / file
    data = DataSpec(f"smiles:{shared_data / 'mol' / 'ESOL_delaney-processed.csv'}", {"targets": ""})
    found = load_pretrained(ModelSpec(name, checkpoint=path), data)
    assert found.data.args["mol_features"] == "pretrain"
    batch = Batch.from_data_list(found.dataset.graphs[:4])
    weights = torch.load(path, weights_only=True, map_location="cpu")
    with torch.inference_mode():
        output = call_model(found.model, batch)
    torch.testing.assert_close(output, by_hand(name, weights, batch), rtol=1e-3, atol=1e-3)
    other = {"pretrain-gnns:gcn": "sage", "pretrain-gnns:sage": "gcn"}[name]
    with pytest.raises(HistographError, match=f"found the weights of {name}.*type --model {name}"):
        load_pretrained(
            ModelSpec(f"pretrain-gnns:{other}", checkpoint=path), data, dataset=found.dataset
        )


# --- files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PUBLIC_MODELS)
def test_a_file_is_only_taken_for_what_it_is(
    name: str, datasets: dict[str, GraphDataset], table: Path, tmp_path: Path
) -> None:
    weights = make(name, data_of(name, datasets)).state_dict()
    assert family_of(weights) == name
    # In any order: safetensors sorts names, and 10 comes before 2.
    found = load(name, dict(sorted(weights.items(), reverse=True)), table, tmp_path)
    assert len(found.model.state_dict()) == len(weights)
    for other in PUBLIC_MODELS:
        if other != name:
            with pytest.raises(HistographError, match=f"--model {name}$") as refused:
                load(other, weights, table, tmp_path)
            assert "\n" not in str(refused.value)


@pytest.mark.parametrize("start", ["gnn.", "molecule_model.", "module.gnn.", "model.gnn."])
def test_a_fine_tuned_file_brings_its_own_readout(
    start: str, datasets: dict[str, GraphDataset], table: Path, tmp_path: Path
) -> None:
    encoder = make("pretrain-gnns:gin", datasets["pretrain"]).state_dict()
    outer = start[: start.rstrip(".").rfind(".") + 1]
    readout = nn.Linear(8, 1)
    weights = {f"{start}{key}": value for key, value in encoder.items()}
    last = readout.state_dict()
    weights |= {f"{outer}graph_pred_linear.{key}": value for key, value in last.items()}
    found = load("pretrain-gnns:gin", {"epoch": 3, "state_dict": weights}, table, tmp_path)
    batch = Batch.from_data_list(found.dataset.graphs)
    rows = by_hand("pretrain-gnns:gin", encoder, batch)
    means = torch.stack([rows[batch.batch == g].mean(0) for g in range(len(MOLECULES))])
    with torch.inference_mode():
        torch.testing.assert_close(call_model(found.model, batch), readout(means))


def test_what_only_served_to_train_an_encoder_is_left_out_and_named(
    datasets: dict[str, GraphDataset], table: Path, tmp_path: Path
) -> None:
    weights = make("molclr:gin", datasets["pretrain"]).state_dict()
    projection = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2)).state_dict()
    weights |= {f"out_lin.{key}": value for key, value in projection.items()}
    weights |= {f"feat_lin.{key}": value for key, value in nn.Linear(8, 4).state_dict().items()}
    found = load("molclr:gin", weights, table, tmp_path)
    assert any("left out" in note and "feat_lin" in note for note in found.notes)
    assert "mol_features=pretrain, which molclr:gin was trained on" in found.notes


def test_a_whole_ogb_model_predicts(
    datasets: dict[str, GraphDataset], table: Path, tmp_path: Path
) -> None:
    model = make("ogb:gin-virtual", datasets["ogb"], out=1)
    found = load("ogb:gin-virtual", {"model_state_dict": model.state_dict()}, table, tmp_path)
    batch = Batch.from_data_list(datasets["ogb"].graphs)
    with torch.inference_mode():
        assert torch.equal(call_model(found.model, batch), call_model(model, batch))
        assert call_model(model, batch).shape == (len(MOLECULES), 1)


def test_a_residual_connection_that_was_not_named_is_seen_in_what_the_weights_do(
    datasets: dict[str, GraphDataset], table: Path, tmp_path: Path
) -> None:
    model = make("ogb:gcn", datasets["ogb"], residual=True)
    with torch.no_grad():  # inputs that outweigh what the layers add
        model.atom_encoder.atom_embedding_list[0].weight.mul_(20)
        call_model(model.train(), Batch.from_data_list(datasets["ogb"].graphs))
    with pytest.raises(HistographError, match="type --model-args residual=true"):
        load("ogb:gcn", model.state_dict(), table, tmp_path)
    assert load("ogb:gcn", model.state_dict(), table, tmp_path, residual=True).model.residual


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ({"conv.weight": torch.ones(2, 2)}, "found none of the weights of pretrain-gnns:gcn"),
        ("two", "found 2 tables of atoms.*--state NAME"),
    ],
)
def test_other_files_are_refused_in_one_line(
    weights: Any,
    expected: str,
    datasets: dict[str, GraphDataset],
    table: Path,
    tmp_path: Path,
) -> None:
    if weights == "two":
        one = make("pretrain-gnns:gcn", datasets["pretrain"]).state_dict()
        weights = {f"{side}.{key}": v for side in ("left", "right") for key, v in one.items()}
    with pytest.raises(HistographError, match=expected):
        load("pretrain-gnns:gcn", weights, table, tmp_path)


# --- names, arguments, features -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "args", "expected"),
    [
        ("pretrain-gnns:gcnn", {}, "did you mean pretrain-gnns:gcn?"),
        ("ogb:gat", {}, "no model called 'ogb:gat'"),
        ("ogb:gin", {"virtual_node": True}, "unknown argument 'virtual_node', expected one of"),
        ("ogb:gin", {"JK": "concat"}, "JK=concat, expected one of last, sum"),
        (
            "molclr:gcn",
            {"num_layer": "five"},
            "found num_layer = .five., expected a whole number",
        ),
    ],
)
def test_what_a_public_model_does_not_have(name: str, args: dict[str, Any], expected: str) -> None:
    with pytest.raises(HistographError, match=expected.replace("?", r"\?")):
        build_model(name, args)


@pytest.mark.parametrize(
    "asked", [{"out_dim": 10**12}, {"out_dim": 10**15}, {"filled": {"atoms": [10**12, *[3] * 8]}}]
)
def test_outputs_and_tables_beyond_memory_are_refused(asked: dict[str, Any]) -> None:
    with pytest.raises(HistographError, match=r"ogb:gcn: found sizes that take .* GB, expected at"):
        build_model("ogb:gcn", {}, **asked)


@pytest.mark.parametrize("name", ["ogb:gin", "pretrain-gnns:gin"])
@pytest.mark.parametrize("size", ["x", None, -1, [], ["a"], [-1], [1] * 50, 10**400])
@pytest.mark.parametrize("of", ["atoms", "bonds", "emb_dim"])
def test_odd_sizes_out_of_a_file_are_refused(name: str, size: Any, of: str) -> None:
    with pytest.raises(HistographError, match=f"{name}: found|expected a finite number"):
        build_model(name, {}, filled={of: size})


def test_features_are_chosen_by_the_name_and_others_are_refused(
    datasets: dict[str, GraphDataset], table: Path, tmp_path: Path
) -> None:
    file = tmp_path / "file.pth"
    torch.save(make("ogb:gin", datasets["ogb"]).state_dict(), file)
    spec = ModelSpec("ogb:gin", checkpoint=file)
    assert load_pretrained(spec, DataSpec(f"smiles:{table}")).data.args == {"mol_features": "ogb"}
    with pytest.raises(
        HistographError, match="found mol_features=pretrain, expected mol_features=ogb"
    ):
        load_pretrained(spec, DataSpec(f"smiles:{table}", {"mol_features": "pretrain"}))
    with pytest.raises(HistographError, match="reads 9 node features, the data has 4"):
        load_pretrained(spec, DataSpec("demo:", {"num_graphs": 4}))


def test_every_public_model_has_a_recipe_with_its_source_and_command() -> None:
    assert tuple(RECIPES) == PUBLIC_MODELS
    for name, recipe in RECIPES.items():
        words = one_command(recipe)
        assert f"--model {name} --checkpoint {recipe.files} " in words
        assert "histograph report" in words
        assert "github.com/" in recipe.source
        assert recipe.licence == "MIT"
