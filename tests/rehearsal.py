"""An accelerator that is none, to rehearse on: it says nothing of speed, and much of habits.

Inside :func:`rehearse`, ``cuda`` (or ``mps``) is there. Its tensors hold real values, computed on
the CPU, but behave as if they were far away: they are refused beside CPU tensors, have no
``.numpy()``, and scattered sums may be taken in another order every time, as atomics on CUDA do.
``mps`` has no float64. A stream of CUDA is refused what another one has computed, unless it has
waited for an event of that. What would cost time on a device is counted, by the
line of this project that asked for it: kernels, reads for which the host waits, and copies from
host memory, pinned or not.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

#: What changes no value and launches nothing.
_VIEWS = {
    *("view", "detach", "t", "transpose", "permute", "slice", "select", "unsqueeze", "squeeze"),
    *("expand", "alias", "_unsafe_view", "split_with_sizes", "split", "unbind", "as_strided"),
    *("_reshape_alias", "unfold", "empty", "new_empty", "empty_like", "empty_strided", "diagonal"),
    *("lift_fresh", "new_empty_strided", "resize_", "set_", "_local_scalar_dense", "unsqueeze_"),
    *("squeeze_", "t_", "transpose_"),
}

#: What hands a number back, or makes a tensor whose size the host has to be told.
_READS = {
    *("_local_scalar_dense", "nonzero", "equal", "bincount", "masked_select", "unique_dim"),
    *("_unique2", "unique_consecutive", "is_nonzero"),
}

#: Where the devices let an index, or a number, be on the host.
_INDEXED = {"index", "index_put_", "index_put", "_index_put_impl_"}


@dataclass
class Counts:
    """What was asked of the device, by operation or by the line that asked."""

    kernels: Counter[str] = field(default_factory=Counter)
    #: Reads for which the host waits until the device has done all it was given.
    reads: Counter[str] = field(default_factory=Counter)
    #: Copies of host memory to the device, ``pageable`` or ``pinned``.
    copies: Counter[str] = field(default_factory=Counter)

    def clear(self) -> None:
        """Begin anew."""
        for counter in (self.kernels, self.reads, self.copies):
            counter.clear()


class MixedDevices(RuntimeError):
    """Tensors of the host and of the device met in one operation."""


class UnorderedStreams(RuntimeError):
    """A stream reads what another one may not have computed yet."""


class Stream:
    """A stream of a CUDA device; it knows how far it has waited for others."""

    def __init__(self, device: Any = None) -> None:
        self.done = 0
        self.waited: dict[Stream, int] = {}

    def record_event(self) -> tuple[Stream, int]:
        return self, self.done

    def wait_event(self, event: tuple[Stream, int]) -> None:
        stream, done = event
        self.waited[stream] = done


#: The stream of a thread, where it is not the default one.
_stream = threading.local()


@contextmanager
def _on_stream(stream: Stream) -> Iterator[None]:
    _stream.current = stream
    try:
        yield
    finally:
        del _stream.current


class DeviceTensor(Tensor):
    """A tensor that says it is on the device; to autograd it is on ``meta``."""

    values: Tensor
    home: torch.device

    @staticmethod
    def __new__(cls, values: Tensor, home: torch.device) -> DeviceTensor:
        strided = values.layout == torch.strided
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            values.size(),
            strides=values.stride() if strided else None,
            storage_offset=values.storage_offset() if strided else None,
            dtype=values.dtype,
            layout=values.layout,
            device=torch.device("meta"),
            requires_grad=False,
        )
        made.values, made.home = values, home
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    device = property(lambda self: self.home)
    is_cuda = property(lambda self: self.home.type == "cuda")
    is_mps = property(lambda self: self.home.type == "mps")
    is_cpu = property(lambda self: False)
    is_meta = property(lambda self: False)

    def __repr__(self) -> str:
        return f"DeviceTensor({self.values!r})"

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def new_tensor(self, data: Any, **settings: Any) -> Tensor:
        settings = {"dtype": self.dtype, "device": self.home, **settings}
        return torch.tensor(data, **settings)

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(f"can't convert {self.home} device type tensor to numpy")

    __array__ = numpy

    def __deepcopy__(self, memo: dict[int, Any]) -> DeviceTensor:
        if id(self) not in memo:
            copied = self.detach().clone().requires_grad_(self.requires_grad)
            if getattr(self, "_is_param", False):
                copied._is_param = True
            memo[id(self)] = copied
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.cpu().__reduce_ex__(protocol)

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        rehearsal = _running[-1]
        return rehearsal.run(function, args, kwargs or {})


#: The rehearsals that run, one at most.
_running: list[_Rehearsal] = []


class _Mode(TorchDispatchMode):
    """Sees what has no tensor of the device among its arguments: copies to it, new tensors."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return _running[-1].run(function, args, kwargs or {})


class _Rehearsal:
    """Runs operations on the values of tensors, and counts."""

    def __init__(self, home: torch.device, sums: str) -> None:
        self.home, self.sums = home, sums
        self.counts = Counts()
        self.generator = torch.Generator().manual_seed(0)
        self.pinned: dict[int, Any] = {}
        self.default_stream = Stream()
        #: The stream that wrote a storage last, and how much it had done then.
        self.written: dict[int, tuple[Stream, int]] = {}

    def run(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do one operation of PyTorch's dispatcher, in the order of the streams."""
        read = _addresses((args, kwargs))
        stream = self.stream()
        for address in read:
            writer, done = self.written.get(address, (stream, 0))
            if writer is not stream and stream.waited.get(writer, 0) < done:
                raise UnorderedStreams(f"{_asked_by()} reads what another stream may still write")
        result = self._run(function, args, kwargs)
        written = _addresses(args[:1]) if function._schema.is_mutable else _addresses(result) - read
        stream.done += 1
        self.written |= dict.fromkeys(written, (stream, stream.done))
        return result

    def _run(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = function.overloadpacket.__name__
        if function._can_decompose() and name not in ("pin_memory", "is_pinned"):
            with _Mode():
                result = function.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        tensors = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, Tensor)]
        ours = [each for each in tensors if isinstance(each, DeviceTensor)]
        wanted = kwargs.get("device")
        makes_ours = wanted is not None and (
            torch.device(wanted).type == self.home.type
            # As PyTorch itself sees them; models are built on the real one, with empty tensors.
            or (torch.device(wanted).type == "meta" and (bool(ours) or "empty" not in name))
        )
        if name == "_to_copy":
            return self._to(args[0], makes_ours, kwargs)
        if name == "copy_":
            return self._copy(*args)
        if not ours and not makes_ours:
            return self._on_the_host(function, args, kwargs)
        self._refuse_mixing(name, tensors)
        if name in _FUSED:
            self.counts.kernels[name] += 1
            return self._wrapped(_FUSED[name](*self._bare(args), **self._bare(kwargs)))
        self._count(name, args)
        if makes_ours:
            kwargs = {**kwargs, "device": torch.device("cpu"), "pin_memory": False}
            if "pin_memory" not in [each.name for each in function._schema.arguments]:
                kwargs.pop("pin_memory")
        bare_args, bare_kwargs = self._bare(args), self._bare(kwargs)
        if self.sums == "any" or (
            self.sums == "atomic" and not torch.are_deterministic_algorithms_enabled()
        ):
            bare_args = self._in_any_order(name, bare_args)
        result = function(*bare_args, **bare_kwargs)
        return self._result(function, name, args, kwargs, result)

    def stream(self) -> Stream:
        """Return the stream that this thread computes on."""
        return getattr(_stream, "current", self.default_stream)

    def _on_the_host(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kwargs.get("pin_memory"):
            made = function(*args, **{**kwargs, "pin_memory": False})
            self.pin(made)
            return made
        return function(*args, **kwargs)

    def pin(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self.pinned[storage.data_ptr()] = storage

    def is_pinned(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self.pinned

    def _to(self, source: Tensor, makes_ours: bool, kwargs: dict[str, Any]) -> Tensor:
        """Copy to another device or type."""
        ours, wanted = isinstance(source, DeviceTensor), kwargs.get("device")
        stays = wanted is None or ours == makes_ours
        values = self._bare(source)
        settings = {**kwargs, "non_blocking": False}
        if makes_ours:
            settings["device"] = torch.device("cpu")
        same = stays and kwargs.get("dtype") in (None, values.dtype) and ours
        result = values if same else torch.ops.aten._to_copy.default(values, **settings)
        if ours and not stays:
            self.counts.reads[f"copy to the host: {_asked_by()}"] += 1
            return result
        if not ours and not stays:
            self._count_copy(source)
        elif ours and not same:
            self.counts.kernels["_to_copy"] += 1
        return self._wrapped(result) if ours or makes_ours else result

    def _copy(self, target: Tensor, source: Any, non_blocking: bool = False) -> Tensor:
        """Copy into memory that is there."""
        if isinstance(source, Tensor) and isinstance(target, DeviceTensor) != isinstance(
            source, DeviceTensor
        ):
            if isinstance(target, DeviceTensor):
                self._count_copy(source)
            elif not (non_blocking and self.is_pinned(target)):
                self.counts.reads[f"copy to the host: {_asked_by()}"] += 1
        elif isinstance(target, DeviceTensor):
            self.counts.kernels["copy_"] += 1
        torch.ops.aten.copy_.default(self._bare(target), self._bare(source))
        return target

    def _count_copy(self, source: Tensor) -> None:
        kind = "pinned" if self.is_pinned(source) else "pageable"
        self.counts.copies[f"{kind}: {_asked_by()}"] += 1

    def _refuse_mixing(self, name: str, tensors: list[Tensor]) -> None:
        strangers = [
            each for each in tensors if not isinstance(each, DeviceTensor) and each.dim() > 0
        ]
        if any(each.is_meta for each in strangers):
            raise MixedDevices(f"{name} got a list as index, asked by {_asked_by()}")
        if name in _INDEXED:
            indices = [each for each in strangers if not each.is_floating_point()]
            strangers = [each for each in strangers if each.is_floating_point()]
            for each in indices:
                self._count_copy(each)
        if strangers:
            shapes = [list(each.shape) for each in strangers]
            raise MixedDevices(
                f"Expected all tensors to be on the same device: {name} got {self.home} and cpu "
                f"{shapes}, asked by {_asked_by()}"
            )

    def _count(self, name: str, args: tuple[Any, ...]) -> None:
        masks = name in _INDEXED and any(
            isinstance(each, Tensor) and each.dtype in (torch.bool, torch.uint8)
            for each in args[1] or ()
        )
        sizes_unknown = name == "repeat_interleave"  # without output_size; with it, none is here
        if name in _READS or masks or sizes_unknown:
            self.counts.reads[f"{name}: {_asked_by()}"] += 1
        if name not in _VIEWS:
            self.counts.kernels[name] += 1

    def _in_any_order(self, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Shuffle the terms of scattered sums."""
        if name not in ("scatter_add", "scatter_add_", "index_add", "index_add_"):
            return args
        target, dim, index, source, *rest = args
        if not index.numel():
            return args
        places = torch.randperm(index.size(dim if index.dim() > 1 else 0), generator=self.generator)
        index = index.index_select(dim if index.dim() > 1 else 0, places)
        return (target, dim, index, source.index_select(dim, places), *rest)

    def _result(
        self, function: Any, name: str, args: tuple[Any, ...], kwargs: Any, result: Any
    ) -> Any:
        """Return what was changed in place itself, and the rest as tensors of the device."""
        if not function._schema.is_mutable:
            return self._wrapped(result)
        written = [
            args[place] if place < len(args) else kwargs.get(argument.name)
            for place, argument in enumerate(function._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        if not function._schema.returns:
            return None
        if name.endswith("_") and name.rstrip("_") + "_" in _VIEWS:  # a new shape
            with torch._C._DisableTorchDispatch():
                function(*args, **kwargs)
        if isinstance(result, tuple):
            return tuple(written) if len(written) == len(result) else self._wrapped(result)
        return written[0]

    def _bare(self, values: Any) -> Any:
        return tree_map(
            lambda each: each.values if isinstance(each, DeviceTensor) else each, values
        )

    def _wrapped(self, values: Any) -> Any:
        def wrap(each: Any) -> Any:
            if not isinstance(each, Tensor) or isinstance(each, DeviceTensor):
                return each
            if self.home.type == "mps" and each.dtype in (torch.float64, torch.complex128):
                raise TypeError(
                    "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't "
                    f"support float64. Asked by {_asked_by()}"
                )
            # Views of tensors from outside of inference mode have to be such tensors themselves.
            with torch.inference_mode(False):
                return DeviceTensor(each, self.home)

        return tree_map(wrap, values)


def _addresses(values: Any) -> set[int]:
    """Return where the dense tensors of the device among some values are."""
    ours = [each.values for each in tree_flatten(values)[0] if isinstance(each, DeviceTensor)]
    return {each.untyped_storage().data_ptr() for each in ours if each.layout == torch.strided}


def _asked_by() -> str:
    """Return the line of this project, or of whatever is next to it, that led here."""
    frame, outside = sys._getframe(1), ""
    while frame is not None:
        path = frame.f_code.co_filename
        for room in ("/histograph_post/", "/cli/", "/benchmarks/"):
            if room in path and "site-packages" not in path:
                return f"{path.rpartition(room)[2]}:{frame.f_lineno}"
        if not outside and "/torch/" not in path and path != __file__:
            outside = f"{path.rpartition('/')[2]}:{frame.f_lineno}"
        frame = frame.f_back
    return outside


# --- what CUDA does in one kernel, and a CPU in many


def _fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    **others: Any,
) -> Tensor:
    """Attention whose kernel takes masks of any kind, as numbers to add."""
    if not isinstance(query, DeviceTensor):
        return _attention_of_torch(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, **others
        )
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(
            ~attn_mask, -torch.inf
        )
    run = torch.ops.aten._scaled_dot_product_efficient_attention.default
    return run(
        query, key, value, attn_mask, query.requires_grad, dropout_p, is_causal, scale=scale
    )[0]


def _fused_dropout(
    rows: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    if not isinstance(rows, DeviceTensor):
        return _dropout_of_torch(rows, p, training, inplace)
    return torch.native_dropout(rows, p, training)[0] if training and p else rows


_attention_of_torch = torch.nn.functional.scaled_dot_product_attention
_dropout_of_torch = torch.nn.functional.dropout


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    seed = torch.randint(1 << 62, ())
    weights, kept = _weights(query, key, bias, dropout_p, scale, seed)
    # What the kernel saves beside the result, only its backward reads.
    return weights * kept @ value, query.new_zeros(query.shape[:3]), seed, torch.zeros_like(seed)


def _attend_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    out: Tensor,
    log_sumexp: Tensor,
    seed: Tensor,
    offset: Tensor,
    dropout_p: float,
    grad_input_mask: list[bool],
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor | None, ...]:
    weights, kept = _weights(query, key, bias, dropout_p, scale, seed)
    grad_weights = grad @ value.mT * kept
    grad_scores = weights * (grad_weights - (grad_weights * weights).sum(-1, keepdim=True))
    grad_scores = grad_scores * _scale(query, scale)
    return grad_scores @ key, grad_scores.mT @ query, (weights * kept).mT @ grad, None


def _weights(
    query: Tensor,
    key: Tensor,
    bias: Tensor | None,
    dropout_p: float,
    scale: float | None,
    seed: Tensor,
) -> tuple[Tensor, Tensor | float]:
    """Return attention weights, and what they are multiplied by for dropout."""
    scores = query @ key.mT * _scale(query, scale)
    weights = (scores if bias is None else scores + bias).softmax(-1)
    if not dropout_p:
        return weights, 1.0
    generator = torch.Generator().manual_seed(int(seed))
    return weights, (torch.rand(weights.shape, generator=generator) >= dropout_p) / (1 - dropout_p)


def _scale(query: Tensor, scale: float | None) -> float:
    return query.size(-1) ** -0.5 if scale is None else scale


_FUSED: dict[str, Callable[..., Any]] = {
    "_scaled_dot_product_efficient_attention": _attend,
    "_scaled_dot_product_efficient_attention_backward": _attend_backward,
}


# --- a machine with such a device


@contextmanager
def rehearse(
    kind: str = "cuda", *, sums: str = "ordered", devices: int = 1, memory: int = 1 << 30
) -> Iterator[Counts]:
    """Let this machine have a device of a kind, ``cuda`` or ``mps``; yield what is asked of it.

    Args:
        kind: Of the device.
        sums: ``ordered``; ``atomic``, in any order unless deterministic algorithms are asked for;
            or ``any``, as of a kernel that has no other.
        devices: How many there are.
        memory: Bytes that each has left.
    """
    rehearsal = _Rehearsal(torch.device(kind, 0), sums)
    run_thread = threading.Thread.run

    def run_in_mode(thread: threading.Thread) -> None:
        with _Mode():
            run_thread(thread)

    def pin_memory(tensor: Tensor, device: Any = None) -> Tensor:
        pinned = tensor.clone()
        rehearsal.pin(pinned)
        return pinned

    there = {
        "torch.cuda._lazy_init": lambda: None,
        "torch.cuda.is_available": lambda: kind == "cuda",
        "torch.cuda.device_count": lambda: devices if kind == "cuda" else 0,
        "torch.cuda.current_device": lambda: 0,
        "torch.cuda.Stream": Stream,
        "torch.cuda.stream": _on_stream,
        "torch.cuda.current_stream": lambda _=None: rehearsal.stream(),
        "torch.cuda.mem_get_info": lambda *_: (memory, memory),
        "torch.mps.recommended_max_memory": lambda: memory,
        "torch.mps.driver_allocated_memory": lambda: 0,
        "torch.cuda.get_rng_state": lambda *_: torch.get_rng_state(),
        "torch.cuda.set_rng_state": lambda *_: None,
        "torch.backends.mps.is_available": lambda: kind == "mps",
        "torch.accelerator.synchronize": lambda *_: None,
        "torch.backends.cudnn.is_acceptable": lambda _: False,
        "torch.Tensor.pin_memory": pin_memory,
        "torch.Tensor.is_pinned": lambda tensor, device=None: rehearsal.is_pinned(tensor),
        "torch.nn.functional.scaled_dot_product_attention": _fused_attention,
        "torch.nn.functional.dropout": _fused_dropout,
        "torch.utils._foreach_utils._foreach_supported_types": [
            *_foreach_utils._foreach_supported_types,
            DeviceTensor,
        ],
        "torch.utils._foreach_utils._get_foreach_kernels_supported_devices": lambda: ["meta"],
        "threading.Thread.run": run_in_mode,
    }
    only_host = torch._C._only_lift_cpu_tensors()
    with ExitStack() as stack:
        for name, value in there.items():
            stack.enter_context(mock.patch(name, value))
        torch._C._set_only_lift_cpu_tensors(True)
        stack.callback(torch._C._set_only_lift_cpu_tensors, only_host)
        _running.append(rehearsal)
        stack.callback(_running.pop)
        stack.enter_context(_Mode())
        yield rehearsal.counts
