"""The names of torch functions, by what they do to the rows of nodes."""

from __future__ import annotations

#: Functions that multiply matrices.
LINEAR = frozenset(
    {"linear", "matmul", "__matmul__", "__rmatmul__", "mm", "addmm", "bmm", "baddbmm", "spmm"}
    | {"einsum", "bilinear", "tensordot", "sparse_mm"}
)

#: Functions that read or write rows by an index.
INDEXING = frozenset(
    {"index_select", "gather", "take_along_dim", "__getitem__", "__setitem__", "embedding"}
    | {"index_add", "index_add_", "index_copy", "index_copy_", "index_put", "index_put_"}
    | {"scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_"}
    | {"scatter_mean", "scatter_max", "segment_reduce", "index_reduce", "index_reduce_", "index"}
)

#: Functions that cut a tensor into parts.
SLICING = frozenset(
    {"chunk", "split", "split_with_sizes", "tensor_split", "unbind", "narrow", "hsplit"}
    | {"__getitem__", "select", "unsafe_chunk", "unsafe_split"}
)

#: Functions that put tensors side by side, or one into a part of the other.
CONCATENATING = frozenset(
    {"cat", "concat", "concatenate", "hstack", "column_stack", "dstack", "stack", "__setitem__"}
)

SUMMING = frozenset({"add", "add_", "__add__", "__radd__", "__iadd__", "sub", "lerp", "addcmul"})
MAXIMISING = frozenset({"max", "maximum", "fmax", "min", "minimum"})
MULTIPLYING = frozenset({"mul", "mul_", "__mul__", "__rmul__", "multiply"})

#: Functions by which layers are joined.
JOINING = CONCATENATING | SUMMING | MAXIMISING | MULTIPLYING

#: Functions that end a network with a row per node.
SQUASHING = frozenset({"softmax", "log_softmax", "sigmoid", "sigmoid_", "logsigmoid"})

#: Functions that make a weight per node.
GATING = SQUASHING | {"exp", "exp_", "tanh"}

RESHAPING = frozenset({"squeeze", "squeeze_", "view", "reshape", "flatten", "__getitem__"})
