"""The plain formulas in NumPy."""

from __future__ import annotations

import numpy as np

from ..problem import AttentionArrays, AttentionProblem, accumulator
from .online import divisor, shift
from .score import (
    Visible,
    modify,
    row_numbers,
    seen_pairs,
    select,
    weighted_values,
)


def materialized_attention(
    problem: AttentionProblem, arrays: AttentionArrays, out: np.ndarray, lse: np.ndarray
) -> None:
    """Fill `out` and `lse` by one whole-array operation after the other."""
    if 0 in problem.lse_shape:
        return
    dtype = accumulator(problem.dtype)
    block = select(problem, arrays, ())
    rows, keys = slice(0, problem.tq), slice(0, problem.tk)
    with np.errstate(all="ignore"):
        s = np.empty((*problem.lse_shape, problem.tk), dtype)
        np.matmul(block.q.astype(dtype), block.k.astype(dtype).swapaxes(-1, -2), out=s)
        s *= dtype.type(problem.scale)
        modify(problem, block, rows, keys, s)
        seen = seen_pairs(problem, block, rows, keys, Visible.of(problem, block, rows))
        if seen is not None:
            np.copyto(s, -np.inf, where=~seen)
        if block.sinks is not None:  # a column of scores that has no value
            s = np.concatenate(
                [np.broadcast_to(block.sinks[..., None, None], (*s.shape[:-1], 1)), s],
                axis=-1,
                dtype=dtype,
            )
        m = s.max(axis=-1, keepdims=True, initial=-np.inf)
        p = np.exp(s - shift(m))
        total = p.sum(axis=-1, keepdims=True)
        if block.query_lengths is not None:
            total = np.where(row_numbers(rows) < block.query_lengths[..., None, None], total, 0)
        empty = total == 0
        p = np.where(empty, 0, p / divisor(total))[..., s.shape[-1] - problem.tk :]
        out[...] = weighted_values(p, block.v.astype(dtype), seen)
        lse[...] = np.where(empty, -np.inf, m + np.log(total))[..., 0]
