"""The bytes that an operation moves through device memory, method by method.

A method is a list of kernels; each reads its operands from HBM, computes, and writes its results
back. Nothing stays on chip from one kernel to the next: that is the model, and what fusion saves.
An operand that several blocks of one kernel need at the same time counts once, as if the L2 cache
served all but the first; a second pass of one kernel over an operand counts again. Counts are
Python integers: exact at any size.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from ..problem import FLOATS, accumulator

__all__ = ["METHODS", "Kernel", "Traffic", "largest_tokens", "scores_bytes", "traffic"]

#: The methods of each operation, the one that moves most first.
METHODS: Mapping[str, tuple[str, ...]] = {
    "softmax": ("unfused", "naive", "online", "fused", "cluster"),
    "matmul": ("single",),
    "matmul_bias_activation": ("unfused", "fused"),
    "dropout_bias_layer_norm": ("unfused", "fused"),
    "attention": ("materialized", "scores_fused", "flash"),
    "attention_vjp": ("materialized", "flash"),
}


class Kernel(NamedTuple):
    """What one kernel reads from HBM, writes to it, and computes.

    Parameters
    ----------
    read_bytes, written_bytes : int
        Through HBM.
    flops : int
        Floating-point operations.
    """

    read_bytes: int
    written_bytes: int
    flops: int


@dataclass(frozen=True, slots=True)
class Traffic:
    """What one call moves, computes and keeps.

    Parameters
    ----------
    kernels : tuple of Kernel
        In the order in which they run.
    auxiliary_bytes : int
        Memory beyond operands and results, at its peak.
    operand_bytes : int
        Operands and results.
    """

    kernels: tuple[Kernel, ...]
    auxiliary_bytes: int
    operand_bytes: int

    @property
    def read_bytes(self) -> int:
        """Bytes read from HBM."""
        return sum(kernel.read_bytes for kernel in self.kernels)

    @property
    def written_bytes(self) -> int:
        """Bytes written to HBM."""
        return sum(kernel.written_bytes for kernel in self.kernels)

    @property
    def moved_bytes(self) -> int:
        """Bytes read and written."""
        return self.read_bytes + self.written_bytes

    @property
    def flops(self) -> int:
        """Floating-point operations."""
        return sum(kernel.flops for kernel in self.kernels)

    @property
    def intensity(self) -> float:
        """Arithmetic intensity, FLOPs a byte moved."""
        return self.flops / self.moved_bytes

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory in use at the peak: operands, results and what goes beyond them."""
        return self.operand_bytes + self.auxiliary_bytes


class _Itemsize(NamedTuple):
    """Bytes of an element, and of an element of the dtype in which sums are kept."""

    element: int
    accumulator: int


def _softmax(shape: tuple[int, ...], size: _Itemsize, method: str, _: int | None) -> Traffic:
    elements, rows = math.prod(shape), math.prod(shape[:-1])
    x, statistic = elements * size.element, rows * size.accumulator
    kernels = {
        # max; exp(x - max); its sum; the division.
        "unfused": (
            Kernel(x, statistic, elements),
            Kernel(x + statistic, x, 2 * elements),
            Kernel(x, statistic, elements),
            Kernel(x + statistic, x, elements),
        ),
        # max; sum of exp(x - max); exp(x - max) / sum. The statistics of a row travel, too.
        "naive": (
            Kernel(x, statistic, elements),
            Kernel(x + statistic, statistic, 3 * elements),
            Kernel(x + 2 * statistic, x, 3 * elements),
        ),
        "online": (Kernel(2 * x, x, 10 * elements),),
        "fused": (Kernel(x, x, 7 * elements),),
        "cluster": (Kernel(x, x, 7 * elements),),
    }[method]
    auxiliary = {"unfused": x + statistic, "naive": 2 * statistic}.get(method, 0)
    return Traffic(kernels, auxiliary, 2 * x)


def _matmul(shape: tuple[int, ...], size: _Itemsize, _: str, __: int | None) -> Traffic:
    m, k, n = shape
    operands, c = (m * k + k * n) * size.element, m * n * size.element
    return Traffic((Kernel(operands, c, 2 * m * k * n),), 0, operands + c)


def _matmul_bias_activation(
    shape: tuple[int, ...], size: _Itemsize, method: str, _: int | None
) -> Traffic:
    m, _k, n = shape
    product = _matmul(shape, size, "single", None)
    elements, c, bias = m * n, m * n * size.element, n * size.element
    kernels = {
        "unfused": (
            *product.kernels,
            Kernel(c + bias, c, elements),
            Kernel(c, c, elements),
        ),
        "fused": (Kernel(product.read_bytes + bias, c, product.flops + 2 * elements),),
    }[method]
    # An operation's operand and result exist at the same time; the last result is no extra.
    return Traffic(kernels, c if method == "unfused" else 0, product.operand_bytes + bias)


def _dropout_bias_layer_norm(
    shape: tuple[int, ...], size: _Itemsize, method: str, _: int | None
) -> Traffic:
    elements = math.prod(shape)
    x, vector = elements * size.element, shape[-1] * size.element
    kernels = {
        # x + bias; dropout, its mask drawn anew and never stored; LayerNorm with gamma and beta.
        "unfused": (
            Kernel(x + vector, x, elements),
            Kernel(x, x, 2 * elements),
            Kernel(x + 2 * vector, x, 7 * elements),
        ),
        "fused": (Kernel(x + 3 * vector, x, 10 * elements),),
    }[method]
    return Traffic(kernels, x if method == "unfused" else 0, 2 * x + 3 * vector)


def _passes(tokens: int, d: int, size: _Itemsize, on_chip_bytes: int | None) -> int:
    """Return how often a kernel of attention streams one side of the scores past the other."""
    if on_chip_bytes is None:
        return 1
    row = 4 * d * size.element
    if on_chip_bytes < row:
        raise ValueError(
            f"on_chip_bytes must hold a row of q, k, v and out, {row} bytes, got {on_chip_bytes}"
        )
    return -(-tokens // (on_chip_bytes // row))


def _attention(
    shape: tuple[int, ...], size: _Itemsize, method: str, on_chip_bytes: int | None
) -> Traffic:
    *batch, tokens, d = shape
    heads = math.prod(batch)
    x, scores = heads * tokens * d * size.element, heads * tokens**2 * size.element
    lse = heads * tokens * size.accumulator
    product = 2 * heads * tokens**2 * d  # FLOPs
    if method == "materialized":
        kernels = (
            Kernel(2 * x, scores, product),  # S = q k^T
            Kernel(scores, scores, 0),  # P = softmax(S), its rows held on chip
            Kernel(scores + x, x, product),  # out = P v
        )
        return Traffic(kernels, 2 * scores, 4 * x)
    if method == "scores_fused":
        # P = softmax(q k^T); out = P v
        return Traffic(
            (Kernel(2 * x, scores, product), Kernel(scores + x, x, product)), scores, 4 * x
        )
    streamed = _passes(tokens, d, size, on_chip_bytes) * 2 * x  # k and v
    return Traffic((Kernel(x + streamed, x + lse, 2 * product),), lse, 4 * x)


def _attention_vjp(
    shape: tuple[int, ...], size: _Itemsize, method: str, on_chip_bytes: int | None
) -> Traffic:
    *batch, tokens, d = shape
    heads = math.prod(batch)
    x, scores = heads * tokens * d * size.element, heads * tokens**2 * size.element
    statistic = heads * tokens * size.accumulator
    product = 2 * heads * tokens**2 * d  # FLOPs
    if method == "materialized":
        kernels = [
            Kernel(scores + x, x, product),  # dv = P^T dout
            Kernel(2 * x, scores, product),  # dP = dout v^T
            Kernel(2 * scores, scores, 0),  # dS = P (dP - rowsum(P dP))
            Kernel(scores + x, x, product),  # dq = dS k
            Kernel(scores + x, x, product),  # dk = dS^T q
        ]
        # P, kept from the forward, with dP and dS.
        return Traffic(tuple(kernels), 3 * scores, 7 * x)
    passes = _passes(tokens, d, size, on_chip_bytes)
    dq_sum = heads * tokens * d * size.accumulator
    streamed = 2 * x + 2 * statistic  # q and dout, lse and delta
    swept = (
        Kernel(2 * x, statistic + dq_sum, 0),  # delta = rowsum(dout out); dq = 0
        Kernel(2 * x + passes * (streamed + dq_sum), 2 * x + passes * dq_sum, 5 * product),
        Kernel(dq_sum, x, 0),  # the sum becomes dq
    )
    return Traffic(swept, statistic + dq_sum, 8 * x + statistic)


class _Model(NamedTuple):
    formula: Callable[[tuple[int, ...], _Itemsize, str, int | None], Traffic]
    shape: str
    least_axes: int
    most_axes: float = math.inf


_MODELS = {
    "softmax": _Model(_softmax, "(..., N)", 1),
    "matmul": _Model(_matmul, "(M, K, N)", 3, 3),
    "matmul_bias_activation": _Model(_matmul_bias_activation, "(M, K, N)", 3, 3),
    "dropout_bias_layer_norm": _Model(_dropout_bias_layer_norm, "(..., N)", 1),
    "attention": _Model(_attention, "(..., T, D)", 2),
    "attention_vjp": _Model(_attention_vjp, "(..., T, D)", 2),
}


def traffic(
    op: str,
    shape: Sequence[int],
    dtype: DTypeLike,
    method: str,
    *,
    on_chip_bytes: int | None = None,
) -> Traffic:
    r"""Count the HBM bytes, FLOPs and memory of an operation done by a method.

    Parameters
    ----------
    op : str
        A key of `METHODS`.
    shape : sequence of int
        Positive sizes: (..., N) of softmax and dropout_bias_layer_norm over the last axis;
        (M, K, N) of a product (M, K) @ (K, N); (..., T, D) of q, k and v in self-attention.
    dtype : dtype or str
        float64, float32, float16 or bfloat16. Sums, lse and other statistics are float64 for
        float64, else float32.
    method : str
        One of ``METHODS[op]``.
    on_chip_bytes : int, optional
        Of method flash: the fast memory of one block, without a cache behind it. By default K and V
        are read from HBM once, because the blocks of a head run at the same time and share them in
        the L2 cache.

    Returns
    -------
    Traffic
        Exact integers.

    Raises
    ------
    TypeError, ValueError
        An argument is not one of those above; the message names it.

    Notes
    -----
    An element is one of the array in question; e is its size in bytes.

    **softmax.** unfused makes a pass for each operation, the exponentials in memory: 4 reads and 2
    writes an element, 5 FLOPs. naive is safe softmax in three kernels: 3 reads and 1 write an
    element [1]_ (algorithm 2), and the statistics of each row. online merges maximum and sum into
    one pass: 2 reads and 1 write (algorithm 3). fused and cluster hold the row on chip: 1 read and
    1 write. FLOPs an element: 1 for the maximum, 3 for sum += exp(x - m), 3 for exp(x - m) / sum;
    online has 7 in m, l = max(m, x), l exp(m - m') + exp(x - m'), and the last 3.

    **matmul.** (M K + K N + M N) e bytes and 2 M K N FLOPs. With N = 1, a matrix by a vector, that
    is 2 / e FLOPs a byte: one a byte at 16 bits [2]_.

    **matmul_bias_activation.** The unfused kernels read and write the product twice more; fused
    adds only the bias. An activation counts as one FLOP.

    **dropout_bias_layer_norm.** Unfused, 3 reads and 3 writes; fused, 1 and 1. Ten FLOPs: bias 1,
    dropout's comparison and scale 2, mean 1, difference 1, variance 2, and normalisation 3.

    **attention.** The three rungs, T^2 elements being one matrix of scores a head [3]_
    (algorithm 0):

    ============ =================================== ==========================
    method       HBM elements a head                 extra memory, elements
    ============ =================================== ==========================
    materialized 4 T D + 4 T^2                       2 T^2, S and P
    scores_fused 4 T D + 2 T^2                       T^2, P
    flash        4 T D and the lse                   the lse
    ============ =================================== ==========================

    FLOPs are those of the products, 4 T^2 D, as the papers count; those of softmax are left out.

    With on_chip_bytes, M elements, a tile of q has M / (4 D) rows, rounded down (algorithm 1,
    line 1, has the same quarter), and K and V are read once a tile: 2 T D x 4 T D / M. That is
    :math:`\Theta(T^2 D^2 / M)`, theorem 2 of [3]_; proposition 3 there shows that no exact
    algorithm does better for all M from D to T D.

    **attention_vjp.** materialized is algorithm 3 of [3]_: 7 T^2 elements through HBM, and P of
    the forward kept. Its products are 4. flash (algorithm 4, in the order of [4]_) computes the
    scores again, 5 products: delta = rowsum(dout out) first; then each tile of keys streams q,
    dout, lse and delta past it and adds to sums of dq in the dtype of sums, which become dq last.
    Plain CUDA and deterministic gradients have no such sums, but a sweep of its own for dq.

    References
    ----------
    .. [1] Milakov, Gimelshein. Online normalizer calculation for softmax. arXiv:1805.02867, 2018.
    .. [2] Williams, Waterman, Patterson. Roofline: an insightful visual performance model for
       multicore architectures. Communications of the ACM 52(4), 2009.
    .. [3] Dao, Fu, Ermon, Rudra, Ré. FlashAttention: fast and memory-efficient exact attention with
       IO-awareness. arXiv:2205.14135, 2022.
    .. [4] Dao. FlashAttention-2: faster attention with better parallelism and work partitioning.
       arXiv:2307.08691, 2023.

    Examples
    --------
    >>> from cuflash import analysis
    >>> shape = (1, 1, 8192, 128)
    >>> analysis.traffic("attention", shape, "float16", "materialized").auxiliary_bytes // 2**20
    256
    >>> analysis.traffic("attention", shape, "float16", "flash").auxiliary_bytes // 2**10
    32
    """
    _require("op", op, METHODS)
    model = _MODELS[op]
    _require("method", method, METHODS[op], f" for {op}")
    sizes = _sizes("shape", shape)
    if not model.least_axes <= len(sizes) <= model.most_axes:
        raise ValueError(f"shape must be {model.shape} for {op}, got {sizes}")
    if on_chip_bytes is not None:
        if method != "flash":
            raise ValueError(f"on_chip_bytes goes with method 'flash', not with {method!r}")
        (on_chip_bytes,) = _sizes("on_chip_bytes", (on_chip_bytes,))
    return model.formula(sizes, _itemsize(dtype), method, on_chip_bytes)


def scores_bytes(shape: Sequence[int], dtype: DTypeLike) -> int:
    """Return the bytes of one matrix of scores a head: B h T^2 elements.

    Parameters
    ----------
    shape : sequence of int
        Of q, k and v: (..., T, D).
    dtype : dtype or str
        As `traffic` takes it.

    Returns
    -------
    int
        What `materialized` keeps twice, `scores_fused` once and `flash` never.

    Raises
    ------
    TypeError, ValueError
        As `traffic`.

    Examples
    --------
    >>> scores_bytes((1, 1, 8192, 64), "float16") // 2**20
    128
    """
    return traffic("attention", shape, dtype, "scores_fused").auxiliary_bytes


def largest_tokens(shape: Sequence[int], dtype: DTypeLike, method: str, capacity: int) -> int:
    """Return the most tokens whose attention fits into memory: q, k, v, out and what is extra.

    Parameters
    ----------
    shape : sequence of int
        Of q, k and v without the axis of tokens: (..., D).
    dtype : dtype or str
        As `traffic` takes it.
    method : str
        Of attention.
    capacity : int
        Bytes of memory.

    Returns
    -------
    int
        0 if one token does not fit.

    Raises
    ------
    TypeError, ValueError
        As `traffic`; capacity is not a positive integer.

    Examples
    --------
    >>> [largest_tokens((1, 32, 128), "float16", m, 80 * 10**9) for m in METHODS["attention"]]
    [24872, 35100, 2431906]
    """
    sizes = _sizes("shape", shape)
    if not sizes:
        raise ValueError(f"shape must be (..., D), got {sizes}")
    (capacity,) = _sizes("capacity", (capacity,))
    *batch, d = sizes

    def fits(tokens: int) -> bool:
        return traffic("attention", (*batch, tokens, d), dtype, method).memory_bytes <= capacity

    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _require(
    name: str, value: object, accepted: Sequence[str] | Mapping[str, Any], of: str = ""
) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a string, got {type(value).__name__}")
    if value not in accepted:
        raise ValueError(f"{name} {value!r} is unknown{of}; known are {', '.join(accepted)}")


def _sizes(name: str, values: Sequence[int]) -> tuple[int, ...]:
    """Return Python integers, which do not overflow; unlike an array's sizes they may be huge."""
    try:
        sizes = tuple(map(operator.index, values))
    except TypeError:
        raise TypeError(f"{name} must hold integers, got {values!r}") from None
    if any(size < 1 for size in sizes):
        raise ValueError(f"{name} must be positive, got {values!r}")
    return sizes


def _itemsize(dtype: DTypeLike) -> _Itemsize:
    names = ", ".join(each.name for each in FLOATS)
    refusal = TypeError(f"dtype {dtype!r} is not one of {names}")
    if dtype is None:  # float64 to NumPy
        raise refusal
    try:
        found = np.dtype(dtype)
    except TypeError:
        raise refusal from None
    if found not in FLOATS:
        raise refusal
    return _Itemsize(found.itemsize, accumulator(found).itemsize)
