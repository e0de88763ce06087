"""What makes a notebook pleasant: bars where nobody else watches, and tables as data frames."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..errors import MissingExtraError

if TYPE_CHECKING:
    import pandas

#: Told how much is done, and how much there is in all.
Update = Callable[[float, float], None]


@contextmanager
def notebook_bar(what: str, *, watched: bool = False) -> Iterator[Update | None]:
    """Yield what moves a bar in a notebook; None elsewhere, where nothing is printed unasked.

    Args:
        what: Stands before the bar.
        watched: Somebody is told about the progress already: no bar.
    """
    if watched or "ipykernel" not in sys.modules:
        yield None
        return
    from tqdm.auto import tqdm

    with tqdm(desc=what, bar_format="{l_bar}{bar}| {elapsed} so far, {remaining} left") as bar:

        def update(done: float, total: float) -> None:
            bar.total, bar.n = total, done
            bar.refresh()

        yield update


def data_frame(rows: Sequence[Mapping[str, Any]], index: str | None = None) -> pandas.DataFrame:
    """Return rows as a pandas frame (extra ``pandas``).

    Args:
        rows: One mapping per row.
        index: The column that names the rows.
    """
    try:
        import pandas
    except ImportError:
        raise MissingExtraError("a data frame", extra="pandas") from None
    frame = pandas.DataFrame(list(rows))
    return frame if index is None else frame.set_index(index)
