"""The plain formulas in CuPy."""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np

from ..problem import AttentionArrays, AttentionProblem, accumulator, softcap_linear
from . import memory

#: Positions are kept this far from the ends of int64 at most, so that window sides can be added.
_FAR = 2**62


def materialized_attention(
    problem: AttentionProblem, arrays: AttentionArrays, out: Any, lse: Any
) -> None:
    """Fill `out` and `lse` with softmax(scale * q @ k.T) @ v, one whole-array operation at a time.

    Allocates several arrays of all scores, and synchronises once.
    """
    if 0 in problem.lse_shape:
        return
    formula(problem, AttentionArrays(*map(memory.readable, arrays)), out, lse)


def formula(problem: AttentionProblem, arrays: AttentionArrays, out: Any, lse: Any) -> None:
    """Do what `materialized_attention` says with aligned arrays."""
    dtype = accumulator(problem.dtype)
    q, k, v = (x.astype(dtype) for x in arrays[:3])
    rows = cupy.arange(problem.tq, dtype=np.int64)[:, None]
    keys = cupy.arange(problem.tk, dtype=np.int64)
    query_lengths = _integers(arrays.query_lengths, problem.tq, 0, problem.tq)
    key_lengths = _integers(arrays.key_lengths, problem.tk, 0, problem.tk)
    offset = key_lengths - query_lengths
    if arrays.query_offset is not None:
        offset = _integers(arrays.query_offset, 0, -_FAR, _FAR)
    distance = rows + offset - keys
    used = rows < query_lengths

    s = cupy.matmul(q, k.swapaxes(-1, -2)) * dtype.type(problem.scale)
    if problem.softcap is not None:
        cap = dtype.type(problem.softcap)
        linear = cupy.abs(s) < cap * dtype.type(softcap_linear(dtype))
        s = cupy.where(linear, s, cupy.tanh(s / cap) * cap)
    if arrays.bias is not None:
        wide = np.result_type(accumulator(arrays.bias.dtype), dtype)
        s = (s.astype(wide) + arrays.bias.astype(wide)).astype(dtype)
    if arrays.alibi_slopes is not None:
        slopes = arrays.alibi_slopes.astype(dtype)[..., None, None]
        s = s - slopes * cupy.abs(distance).astype(dtype)

    seen = used & (keys < key_lengths)
    if problem.left is not None:
        seen = seen & (distance <= problem.left)
    if problem.right is not None:
        seen = seen & (distance >= -problem.right)
    if arrays.mask is not None:
        seen = seen & arrays.mask
    s = cupy.where(seen, s, dtype.type(-np.inf))
    s = cupy.broadcast_to(s, (*problem.lse_shape, problem.tk))
    if arrays.sinks is not None:  # a column of scores that has no value
        sinks = arrays.sinks.astype(dtype)[..., None, None]
        s = cupy.concatenate([cupy.broadcast_to(sinks, (*problem.lse_shape, 1)), s], axis=-1)

    m = dtype.type(-np.inf) if not s.shape[-1] else s.max(axis=-1, keepdims=True)
    m = cupy.where(m == -np.inf, dtype.type(0), m)
    p = cupy.exp(s - m)
    total = cupy.where(used, p.sum(axis=-1, keepdims=True), dtype.type(0))
    empty = total == 0
    p = cupy.where(empty, dtype.type(0), p / cupy.where(empty, dtype.type(1), total))
    out[...] = _weighted_values(p[..., s.shape[-1] - problem.tk :], v, seen).astype(out.dtype)
    log = m + cupy.log(cupy.where(empty, dtype.type(1), total))
    lse[...] = cupy.where(empty, dtype.type(-np.inf), log)[..., 0]


def _integers(x: Any, absent: int, low: int, high: int) -> Any:
    """Return lengths or offsets with two more axes, within bounds."""
    values = cupy.asarray(absent if x is None else x).astype(np.int64)
    return cupy.clip(values, low, high)[..., None, None]


def _weighted_values(p: Any, v: Any, seen: Any) -> Any:
    """Return p @ v, to which an unseen value adds nothing, whatever it holds."""
    finite = cupy.isfinite(v)
    total = cupy.matmul(p, cupy.where(finite, v, v.dtype.type(0)))
    if bool(finite.all()):
        return total

    def count(pairs: Any, values: Any) -> Any:
        """Tell for each (row, column) whether such a pair meets such a value."""
        return cupy.matmul(pairs.astype(v.dtype), values.astype(v.dtype)) > 0

    seen = cupy.broadcast_to(seen, p.shape)
    nan = count(seen, cupy.isnan(v)) | count(seen & (p == 0), cupy.isinf(v))
    total = total + cupy.where(count(seen & (p > 0), v == np.inf), v.dtype.type(np.inf), 0)
    total = total - cupy.where(count(seen & (p > 0), v == -np.inf), v.dtype.type(np.inf), 0)
    return cupy.where(nan, v.dtype.type(np.nan), total)
