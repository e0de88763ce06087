"""Several processes that train one network together, as ``torchrun`` starts them.

Each process (*rank*) takes its part of the graphs of every batch, and DistributedDataParallel sums
the gradients, so that a step is that of one process with the same batch. Only the first rank
writes, and the others follow its decisions.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..errors import WorkerError

_Value = TypeVar("_Value")

#: The others wait while the first rank writes, or trains something small by itself. If a rank
#: ends, `torchrun` and the connection notice at once.
_TIMEOUT = timedelta(days=7)

#: Key of the rank that failed first.
_FAILED = "histograph failed"


def asked_for_ranks() -> bool:
    """Whether this process is one of several, by the variables that ``torchrun`` sets."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


@dataclass(frozen=True)
class Ranks:
    """This process among those that train one network."""

    rank: int
    size: int
    device: torch.device
    #: Keys and values that all ranks can read and set.
    store: Any

    @classmethod
    def start(cls, device: torch.device) -> Ranks | None:
        """Join the other processes; None if there are none. Every process calls it once."""
        global _current
        if _current is None and asked_for_ranks():
            # Not every build of torch has these.
            from torch.distributed import PrefixStore, rendezvous  # type: ignore[attr-defined]

            store, rank, size = next(rendezvous("env://"))
            if device.type == "cuda":
                torch.cuda.set_device(device)
            dist.init_process_group(
                "nccl" if device.type == "cuda" else "gloo",
                store=PrefixStore("group", store),
                rank=rank,
                world_size=size,
                timeout=_TIMEOUT,
            )
            _current = cls(rank, size, device, store)
        return _current

    @property
    def is_first(self) -> bool:
        """Whether this process is the one that writes."""
        return self.rank == 0

    def from_first(self, value: Any = None) -> Any:
        """Return the value of the first rank; every rank has to call it."""
        values = [value]
        dist.broadcast_object_list(values, src=0, device=self.device)
        return values[0]

    def state_of_first(self, state: Mapping[str, Any]) -> Any:
        """Return the training state of the first rank, whatever its device."""
        packed = io.BytesIO()
        if self.is_first:
            torch.save(dict(state), packed)
        sent = self.from_first(packed.getvalue())
        return torch.load(io.BytesIO(sent), weights_only=True, map_location="cpu")

    def gather(self, value: _Value) -> list[_Value]:
        """Return the values of all ranks, in order; every rank has to call it."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def sum(self, value: Tensor) -> Tensor:
        """Return the sum of a tensor over the ranks."""
        value = value.detach().to(self.device, copy=True)
        dist.all_reduce(value)
        return value

    def wrap(self, network: nn.Module) -> nn.Module:
        """Return a network whose backward pass averages gradients over the ranks.

        Made anew for every epoch: which parameters are trained may change between them.
        """
        return DistributedDataParallel(network, find_unused_parameters=True)

    def same_buffers(self, network: nn.Module) -> None:
        """Give all ranks the buffers of the first: running statistics are of each rank's graphs."""
        for buffer in network.buffers():
            dist.broadcast(buffer, src=0)

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """Let the first rank that fails raise its error; the others exit silently."""
        try:
            yield
        except BaseException as error:
            first = str(self.rank)
            with suppress(Exception):  # the store ends with the process that hosts it
                first = self.store.compare_set(_FAILED, "", str(self.rank)).decode()
            if first != str(self.rank):
                raise SystemExit(1) from None
            if isinstance(error, dist.DistError) or "gloo" in str(error):
                raise WorkerError(
                    "found that another process of torchrun ended, expected its part of the "
                    "gradients; if memory ran out, run the same command again with a smaller "
                    "--batch-size"
                ) from error
            raise


#: Set once, by :meth:`Ranks.start`.
_current: Ranks | None = None


def current_ranks() -> Ranks | None:
    """Return the processes that train together with this one; None if it trains alone."""
    return _current
