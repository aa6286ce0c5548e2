"""The plain formulas in NumPy, whole arrays at a time, and attention whose first half is fused."""

from __future__ import annotations

import numpy as np

from ..problem import AttentionArrays, AttentionProblem, accumulator
from ..problem_fused import Dropout, LayerNormArrays, LayerNormProblem, MatmulProblem
from .fused import ACTIVATIONS, drop, normalize
from .online import divisor, shift
from .score import (
    Visible,
    modify,
    row_numbers,
    seen_pairs,
    select,
    weighted_values,
)

#: Scores of a block of rows whose softmax is taken before they leave the cache.
_SCORES = 1 << 19


def materialized_attention(
    problem: AttentionProblem, arrays: AttentionArrays, out: np.ndarray, lse: np.ndarray | None
) -> None:
    """Fill `out` and `lse` by one whole-array operation after the other."""
    if 0 in problem.lse_shape:
        return
    lse = np.empty(problem.lse_shape, accumulator(problem.dtype)) if lse is None else lse
    block = select(problem, arrays, ())
    rows = slice(0, problem.tq)
    with np.errstate(all="ignore"):
        p, seen = _weights(problem, _widened(problem, block), rows, lse)
        out[...] = weighted_values(p, block.v.astype(p.dtype, copy=False), seen)


def scores_fused_attention(
    problem: AttentionProblem, arrays: AttentionArrays, out: np.ndarray, lse: np.ndarray | None
) -> None:
    """Fill `out` and `lse`: P = softmax(q @ k.T) block by block, all of it kept, then P @ v."""
    if 0 in problem.lse_shape:
        return
    lse = np.empty(problem.lse_shape, accumulator(problem.dtype)) if lse is None else lse
    block = select(problem, arrays, ())
    wide = accumulator(problem.dtype)
    p = np.empty((*problem.lse_shape, problem.tk), problem.dtype)
    each = p.size // problem.tq
    count = max(1, _SCORES // max(1, each))
    parts = [slice(start, min(start + count, problem.tq)) for start in range(0, problem.tq, count)]
    seen = []
    with np.errstate(all="ignore"):
        block = _widened(problem, block)
        for rows in parts:
            weights, pairs = _weights(problem, block, rows, lse[..., rows])
            p[..., rows, :] = weights
            seen.append(pairs)
        v = block.v.astype(wide, copy=False)
        for rows, pairs in zip(parts, seen, strict=True):
            out[..., rows, :] = weighted_values(p[..., rows, :].astype(wide, copy=False), v, pairs)


def _widened(problem: AttentionProblem, block: AttentionArrays) -> AttentionArrays:
    """Return operands with q and k in the accumulator's precision."""
    wide = accumulator(problem.dtype)
    q, k = (x.astype(wide, copy=False) for x in (block.q, block.k))
    return block._replace(q=q, k=k)


def _weights(
    problem: AttentionProblem, block: AttentionArrays, rows: slice, lse: np.ndarray
) -> tuple[np.ndarray, np.ndarray | None]:
    """Return softmax(q @ k.T) of some rows and which pairs are seen, None for all; fill lse."""
    dtype, keys = accumulator(problem.dtype), slice(0, problem.tk)
    s = np.empty((*lse.shape, problem.tk), dtype)
    np.matmul(block.q[..., rows, :], block.k.swapaxes(-1, -2), out=s)
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
    lse[...] = np.where(empty, -np.inf, m + np.log(total))[..., 0]
    return np.where(empty, 0, p / divisor(total))[..., s.shape[-1] - problem.tk :], seen


def unfused_softmax(x: np.ndarray, y: np.ndarray) -> None:
    """Fill `y` with the softmax over the last axis: maximum, exp, sum, division."""
    wide = accumulator(x.dtype)
    with np.errstate(all="ignore"):
        z = x.astype(wide, copy=False)
        e = np.exp(z - shift(z.max(axis=-1, keepdims=True, initial=-np.inf)))
        y[...] = e / divisor(e.sum(axis=-1, keepdims=True))


def unfused_matmul_bias_activation(
    problem: MatmulProblem, a: np.ndarray, b: np.ndarray, bias: np.ndarray, out: np.ndarray
) -> None:
    """Fill `out`: the product, then the bias, then the activation."""
    wide = accumulator(problem.dtype)
    with np.errstate(all="ignore"):
        product = np.matmul(a.astype(wide, copy=False), b.astype(wide, copy=False))
        out[...] = ACTIVATIONS[problem.activation](product + bias.astype(wide))


def unfused_dropout_bias_layer_norm(
    problem: LayerNormProblem, dropout: Dropout, arrays: LayerNormArrays, y: np.ndarray
) -> None:
    """Fill `y`: the bias, then dropout, then LayerNorm."""
    wide = problem.accumulator
    with np.errstate(all="ignore"):
        shifted = arrays.x.astype(wide) + arrays.bias.astype(wide)
        z = drop(dropout, shifted, 0)
        normalize(z, problem.eps)
        y[...] = z * arrays.gamma.astype(wide) + arrays.beta.astype(wide)
