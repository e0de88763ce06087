"""What the cells of a study need: parts of data, splits, backbones and caches.

    data/       parts of tables of molecules
    splits/     every fold of every split, in a file of its own
    backbones/  networks without weights of their own, trained on each fold
    caches/     activations: one cache per checkpoint and data, or one per trained fold

Each is made when it is first needed and stays.
"""

from __future__ import annotations

import csv
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

import histograph_post as hg
from histograph_post.caches.manifest import MANIFEST_NAME
from histograph_post.errors import DataError, SplitError
from histograph_post.models import ModelSpec
from histograph_post.splits import Split, Splits, resolve_splits
from histograph_post.utils.files import atomic_path

from .plan import Budget, Cell, Data, Study, Unit, model_beside

#: Rows of a table are drawn with this seed.
_ROWS_SEED = 0


@dataclass
class Materials:
    """The folder of a study, where everything is found or made."""

    study: Study
    #: The study file, beside which models are.
    file: Path
    budget: Budget
    out: Path
    data_root: Path
    #: Called with a line before each step.
    log: Callable[[str], None] = print
    _loaded: tuple[str, hg.GraphDataset] | None = None

    def cache(self, unit: Unit) -> hg.Cache:
        """Return the activations that a unit is read from."""
        cell = unit.cell
        if cell.checkpoint.weights is not None:
            folder = self.out / "caches" / cell.data.name / f"{cell.checkpoint.name}.cache"
            weights = self.data_root / cell.checkpoint.weights
        else:
            folder = self.out / "caches" / cell.name / f"fold-{unit.fold}.cache"
            weights = self.out / "backbones" / cell.name / f"fold-{unit.fold}" / "model.safetensors"
        if (folder / MANIFEST_NAME).is_file():
            return hg.Cache.open(folder)
        if cell.checkpoint.weights is None:
            self._pretrain(unit)
        self.log(f"cache {folder.relative_to(self.out)}")
        dataset = self.dataset(cell.data)
        model = ModelSpec(
            model_beside(self.file, cell.checkpoint.model), dict(cell.checkpoint.args), weights
        ).load(in_dim=int(dataset.graphs[0].num_node_features))
        folder.parent.mkdir(parents=True, exist_ok=True)
        made = hg.cache(model, dataset, folder, splits=Splits.load(self.split(unit)))
        assert made is not None  # this is the only job
        return made

    def split(self, unit: Unit) -> Path:
        """Return the file of the split of a unit, which has that fold alone."""
        cell = unit.cell
        place = self.out / "splits" / cell.data.name / cell.split
        path = place / f"fold-{unit.fold}.json"
        if not path.is_file():
            splits = resolve_splits(self.dataset(cell.data), self._split_spec(cell))
            expected = self.study.splits[cell.split].folds
            if len(splits.folds) != expected:
                raise SplitError(
                    f"{cell.name}: found {len(splits.folds)} folds, expected {expected}"
                )
            place.mkdir(parents=True, exist_ok=True)
            for number, fold in enumerate(splits.folds):
                if self.study.splits[cell.split].inner:
                    fold = _inner(fold)
                replace(splits, folds=(fold,)).save(place / f"fold-{number}.json")
        return path

    def dataset(self, data: Data) -> hg.GraphDataset:
        """Return a data set; the last one stays in memory, because its cells come together."""
        if self._loaded is None or self._loaded[0] != data.name:
            spec, root = data.spec, self.data_root
            if data.rows is not None or data.columns is not None:
                root = self.out / "data"
                spec = f"smiles:{self._part(data).name}"
            self._loaded = (data.name, hg.load_data(spec, root=root, args=data.args))
        return self._loaded[1]

    def _split_spec(self, cell: Cell) -> str:
        """Return a split as the library takes it; a folder of index files is in the data root."""
        spec = self.study.split_spec(cell)
        return str(self.data_root / spec) if (self.data_root / spec).is_dir() else spec

    def _pretrain(self, unit: Unit) -> None:
        """Train the network of a cell on one fold."""
        cell = unit.cell
        self.log(f"pretrain {unit.name}")
        hg.pretrain(
            model_beside(self.file, cell.checkpoint.model),
            cell.data.spec,
            self.out / "backbones" / cell.name,
            model_args=cell.checkpoint.args,
            data_args=cell.data.args,
            data_root=self.data_root,
            split=self._split_spec(cell),
            metric=cell.data.metric,
            training=self.study.pretraining(cell, self.budget),
            only=[unit.fold],
            jobs=1,
        )

    def _part(self, data: Data) -> Path:
        """Return the file with a part of a table of molecules."""
        path = self.out / "data" / f"{data.name}.csv"
        if path.is_file():
            return path
        source = self.data_root / data.spec.partition(":")[2]
        if not data.spec.startswith("smiles:") or not source.is_file():
            raise DataError(
                f"data {data.name}: found {data.spec!r}, expected a table of molecules in "
                f"{self.data_root}, of which rows or columns can be taken"
            )
        with source.open(newline="", encoding="utf-8") as file:
            header, *lines = csv.reader(file)
        chosen = list(range(len(lines)))
        if data.rows is not None:
            if data.rows > len(lines):
                raise DataError(
                    f"data {data.name}: found {len(lines)} rows, expected at least {data.rows}"
                )
            chosen = sorted(random.Random(_ROWS_SEED).sample(chosen, data.rows))
        columns = list(range(len(header)))
        if data.columns is not None:
            smiles = header.index("smiles")
            targets = [column for column in columns if column != smiles]
            columns = sorted([smiles, *targets[: data.columns]])
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(path) as partial, partial.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow([header[column] for column in columns])
            writer.writerows([lines[row][column] for column in columns] for row in chosen)
        return path


def _inner(fold: Split) -> Split:
    """Return a fold whose test part is half of its validation part; the other half validates."""
    drawn = np.random.default_rng(_ROWS_SEED).permutation(fold.valid)
    middle = len(drawn) // 2
    return Split(fold.train, np.sort(drawn[:middle]), np.sort(drawn[middle:]))
