"""The problems that are measured, as data, and what their times are divided into."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import ml_dtypes
import numpy as np


def dtype_of(name: str) -> np.dtype:
    """Return a dtype by name, bfloat16 included."""
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


@dataclass(frozen=True)
class AttentionShape:
    """Self-attention of `heads` heads over `tokens` tokens: q, k, v (batch, heads, tokens, d)."""

    batch: int
    heads: int
    tokens: int
    d: int
    causal: bool = False
    dtype: str = "float32"

    def inputs(self, sets: int = 1, seed: int = 0) -> list[tuple[np.ndarray, ...]]:
        """Return sets of normal random q, k, v to be used in rotation."""
        rng = np.random.default_rng(seed)
        shape = (3, self.batch, self.heads, self.tokens, self.d)
        draws = (rng.standard_normal(shape, np.float32) for _ in range(sets))
        return [tuple(draw.astype(dtype_of(self.dtype))) for draw in draws]


def attention_flops(shape: AttentionShape, *, backward: bool = False) -> float:
    """Return the floating-point operations of two matmuls, halved for causal.

    The backward counts as 2.5 forwards: five matmuls, one of them the scores again. That is how
    FlashAttention's papers count; exp and the rest are not in it.
    """
    pairs = shape.batch * shape.heads * shape.tokens**2
    return 4 * pairs * shape.d * (0.5 if shape.causal else 1) * (2.5 if backward else 1)


def decode_bytes(batch: int, key_heads: int, tokens: int, d: int, itemsize: int) -> int:
    """Return the bytes of K and V, which decoding one query a head reads once."""
    return 2 * batch * key_heads * tokens * d * itemsize


def softmax_bytes(elements: int, itemsize: int, operation: str = "softmax") -> int:
    """Return the bytes of each operand read and written once, whatever a method really moves."""
    return SOFTMAX_OPERATIONS[operation] * elements * itemsize


#: Passes over device memory an element, reads and writes together; one is the write.
SOFTMAX_TRIPS = {"naive": 4, "fused": 2, "online": 3, "cluster": 2}
#: Operands as large as x, results included: the fewest trips that there can be.
SOFTMAX_OPERATIONS = {
    "softmax": 2,
    "log_softmax": 2,
    "logsumexp": 1,
    "softmax_vjp": 3,
    "log_softmax_vjp": 3,
    "logsumexp_vjp": 2,
}


class Decode(NamedTuple):
    """One query a head against a cache of `tokens` keys, with grouped heads."""

    batch: int
    heads: int
    key_heads: int
    tokens: int
    d: int = 128
    dtype: str = "bfloat16"

    @property
    def bytes(self) -> int:
        """Bytes of K and V."""
        itemsize = dtype_of(self.dtype).itemsize
        return decode_bytes(self.batch, self.key_heads, self.tokens, self.d, itemsize)

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of q, k and v."""
        q = (self.batch, self.heads, 1, self.d)
        k = (self.batch, self.key_heads, self.tokens, self.d)
        return q, k, k


class Target(NamedTuple):
    """A device row: the speed of the best peer seen, as a ratio to cuDNN's in the same run."""

    shape: AttentionShape
    backward: bool
    over_cudnn: float


#: Tokens and width of every device row: batch * tokens and heads * d.
DEVICE_TOKENS, DEVICE_WIDTH = 16384, 2048
#: A target is met at this much below it: what repeated runs differ by.
TARGET_SLACK = 0.01

# The best of cuDNN (torch SDPA), FlashAttention-2 (torch SDPA) and FlashAttention-4 over cuDNN, on
# an H200, bfloat16: for (backward, d), columns are tokens 512, 2048, 8192, 16384, each full then
# causal.
_OVER_CUDNN = {
    (False, 64): (1.00, 1.00, 1.00, 1.00, 1.14, 1.11, 1.12, 1.10),
    (False, 128): (1.00, 1.00, 1.00, 1.00, 1.08, 1.03, 1.06, 1.00),
    (False, 256): (1.00, 1.00, 1.06, 1.03, 1.00, 1.18, 1.01, 1.06),
    (True, 64): (1.18, 1.26, 1.18, 1.22, 1.14, 1.19, 1.19, 1.21),
    (True, 128): (1.05, 1.13, 1.03, 1.13, 1.11, 1.08, 1.12, 1.07),
    (True, 256): (1.04, 1.00, 1.00, 1.00, 1.01, 1.00, 1.03, 1.00),
}
_COLUMNS = [(tokens, causal) for tokens in (512, 2048, 8192, 16384) for causal in (False, True)]


def _device_shape(tokens: int, d: int, causal: bool) -> AttentionShape:
    batch, heads = DEVICE_TOKENS // tokens, DEVICE_WIDTH // d
    return AttentionShape(batch, heads, tokens, d, causal, "bfloat16")


ATTENTION_TARGETS = tuple(
    Target(_device_shape(tokens, d, causal), backward, ratio)
    for (backward, d), ratios in _OVER_CUDNN.items()
    for (tokens, causal), ratio in zip(_COLUMNS, ratios, strict=True)
)

#: float32 and float64 on the device, where peers exist but in part.
WIDE_ATTENTION = tuple(
    AttentionShape(batch, 16, 4096, d, causal, dtype)
    for dtype, batch in (("float32", 2), ("float64", 1))
    for d in (64, 128)
    for causal in (False, True)
)
#: Least TFLOP/s of plain CUDA on an H200: full attention with D = 64, and all its gradients.
WIDE_TARGETS = {"float32": 10.0, "float64": 5.0}
WIDE_VJP_TARGETS = {"float32": 8.0, "float64": 4.0}

DECODE = (
    Decode(1, 32, 8, 65536),
    Decode(8, 32, 8, 8192),
    Decode(64, 32, 8, 8192),
    Decode(1, 32, 32, 65536),
)
#: Least share of a large matmul's rate, without mask, and the width and tokens from which on.
MATMUL_SHARE, MATMUL_SHARE_WIDTH, MATMUL_SHARE_TOKENS = 0.9, 128, 8192

#: Least share of the copy's rate, and the bytes of K and V from which on it is wanted: of fewer,
#: launches and the merge of shares are a tenth.
DECODE_SHARE, DECODE_SHARE_BYTES = 0.9, 2**30

#: Softmax over the last axis of (SOFTMAX_ELEMENTS / n, n), on the device: x alone is 17 times the
#: L2 of an H200 in 16 bits.
SOFTMAX_ELEMENTS = 2**29
SOFTMAX_LENGTHS = tuple(2**i for i in range(21))
#: Shortest rows that a cluster is measured with: shorter ones leave most of its threads idle, and
#: with as many rows a call takes seconds.
CLUSTER_LENGTH = 4096
#: Rows of which SOFTMAX_ELEMENTS are so few that each is split over the GPU.
SOFTMAX_SPLIT_LENGTHS = (2**24, 2**27)
#: Row lengths over the first axis, where rows lie side by side.
SOFTMAX_ACROSS_LENGTHS = (128, 512, 1024, 4096, 16384)
#: Row lengths at which the rest of the family is measured.
SOFTMAX_FAMILY_LENGTHS = tuple(2**i for i in (7, 10, 13, 16, 18))

#: Least share of the device copy's rate by the longest row, from SHORTEST_WALL on: at the memory
#: wall all but launches, tails and the reductions' latency is hidden.
SHORTEST_WALL = 128
_Shares = tuple[tuple[int, float], ...]
_WALL: _Shares = ((2**16, 0.97), (2**18, 0.95), (2**20, 0.90))
_WALL_DOUBLE: _Shares = ((2**17, 0.90), (2**20, 0.80))
_WALL_VJP: _Shares = ((2**16, 0.95),)
#: Over the first axis, where no read is longer than what neighbouring rows fill.
_WALL_ACROSS: _Shares = ((2**12, 0.80), (2**20, 0.55))
#: Least speed of softmax over the plain CuPy formula, and of everything over each of PyTorch's.
OVER_FORMULA, OVER_TORCH = 8.0, 0.98


def softmax_share(operation: str, dtype: str, n: int, axis: int = -1) -> float | None:
    """Return the least share of the copy's rate for rows of a length; None if there is none."""
    double = dtype == "float64"
    tables = {
        "softmax": _WALL_DOUBLE if double else _WALL,
        "log_softmax": _WALL_DOUBLE if double else _WALL,
        "softmax_vjp": () if double else _WALL_VJP,
        "log_softmax_vjp": () if double else _WALL_VJP,
    }
    if axis == 0:
        tables = {"softmax": _WALL_ACROSS}
    if n < SHORTEST_WALL:
        return None
    return next((share for longest, share in tables.get(operation, ()) if n <= longest), None)


#: A method's time as a multiple of fused's, at this row length in float32: what the trips say, with
#: a margin; part of online's third trip is served by the L2 cache.
OVER_FUSED_LENGTH = 4096
OVER_FUSED = {"naive": (1.7, 2.3), "online": (1.0, 1.5)}


class Product(NamedTuple):
    """A matrix product (m, k) by (k, n) with bias and ReLU."""

    m: int
    k: int
    n: int
    dtype: str = "bfloat16"

    @property
    def flops(self) -> float:
        """Floating-point operations of the product alone."""
        return 2.0 * self.m * self.k * self.n


class Norm(NamedTuple):
    """Dropout of x + bias, then LayerNorm, of x with this shape."""

    shape: tuple[int, ...]
    dtype: str = "bfloat16"
    backward: bool = False

    @property
    def trips(self) -> int:
        """Operands as large as x, results included."""
        return 3 if self.backward else 2

    @property
    def bytes(self) -> int:
        """Bytes of them."""
        return self.trips * math.prod(self.shape) * dtype_of(self.dtype).itemsize


#: The products of transformers: deep, where arithmetic is the wall, and shallow, where writing is.
PRODUCTS = (
    Product(8192, 4096, 4096),
    Product(65536, 256, 4096),
    Product(65536, 64, 4096),
    Product(8192, 4096, 4096, "float16"),
    Product(4096, 4096, 4096, "float32"),
    Product(4096, 4096, 4096, "float64"),
)
#: The first is the source's own: 268 MB an activation.
NORMS = (
    Norm((8, 4096, 4096)),
    Norm((8, 4096, 4096), backward=True),
    Norm((8, 4096, 4096), "float32"),
    Norm((65536, 768)),
    Norm((16384, 8192)),
)
#: Least share of the copy's rate, of two trips at the source's shape.
NORM_SHARE = 0.93
#: Least speed of a product with its epilogue over the product alone by cuBLAS, in 16 bits at the
#: first shape, and over cuBLASLt's own epilogue at all of these.
OVER_PRODUCT, OVER_EPILOGUE = 0.80, 0.80

#: Row lengths at which online's second read leaves the L2 cache of an H200.
ONLINE_FADES = (4096, 16384, 65536, 2**18)

#: Microseconds of the host that a call on the device may take after the first.
CALL_MICROSECONDS = {"attention": 40.0, "softmax": 60.0}

#: The host engine: long attention, short attention of many heads, dtypes and softmax.
HOST_ATTENTION = AttentionShape(1, 8, 4096, 64)
HOST_LONG_TOKENS = 16384
HOST_SHORT = tuple(
    AttentionShape(batch, heads, tokens, 64)
    for batch, heads in ((1, 12), (8, 8), (64, 8), (64, 12))
    for tokens in (16, 32, 64, 128)
)
HOST_DTYPES = tuple(
    AttentionShape(1, 8, 1024, 64, dtype=dtype) for dtype in ("float64", "float16", "bfloat16")
)
HOST_SOFTMAX_ELEMENTS = 2**22
HOST_SOFTMAX_LENGTHS = (2**4, 2**7, 2**10, 2**13, 2**16, 2**20)


def meets(ratio: float, target: float) -> bool:
    """Tell whether a measured median ratio meets a target."""
    return ratio >= target - TARGET_SLACK or math.isclose(ratio, target - TARGET_SLACK)
