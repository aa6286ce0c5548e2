"""The score pipeline in NumPy: who sees whom, and what becomes of a score before the softmax.

Everything here works on a tile: `rows` and `keys` are slices of the token axes, and arrays have the
batch axes of the block in front, size 1 where they broadcast.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from ..problem import FIRST_INTEGER, AttentionArrays, AttentionProblem, softcap_linear

Index = tuple[slice, ...]

#: Offsets are kept within this, so that window sides, which have 62 bits, can be added in int64.
_FAR = 2**62


@lru_cache(maxsize=1024)
def _full_shapes(problem: AttentionProblem) -> AttentionArrays:
    """Return the shapes of all operands with every axis of the batch."""
    batch, scores = problem.batch_shape, (*problem.lse_shape, problem.tk)
    operands = problem.q.shape, problem.k.shape, problem.v.shape
    return AttentionArrays(*operands, scores, scores, *[batch] * 5)


@lru_cache(maxsize=1024)
def _is_whole(problem: AttentionProblem) -> bool:
    """Tell whether arrays have every axis of the batch, unbroadcast, and none is of integers."""
    specs = [getattr(problem, name) for name in AttentionArrays._fields]
    broadcasts = any(0 in spec.strides for spec in specs if spec is not None)
    return not broadcasts and specs[FIRST_INTEGER:] == [None] * (len(specs) - FIRST_INTEGER)


def select(problem: AttentionProblem, arrays: AttentionArrays, index: Index) -> AttentionArrays:
    """Take a block's batch entries of every array; lengths and offsets become safe int64.

    An empty index takes all. An axis that broadcasts has size 1 in the block, its data taken once.
    """
    if not index and _is_whole(problem):
        return arrays
    block: list[np.ndarray | None] = []
    axes = len(problem.batch_shape)
    for x, shape in zip(arrays, _full_shapes(problem), strict=True):
        if x is None:
            block.append(x)
            continue
        if getattr(x, "shape", None) != shape:
            x = np.broadcast_to(x, shape)
        if 0 in x.strides:
            parts = index or (slice(None),) * axes
            x = x[
                tuple(
                    slice(0, 1) if stride == 0 else part
                    for part, stride in zip(parts, x.strides, strict=False)
                )
            ]
        elif index:
            x = x[index]
        block.append(x)
    for i in range(FIRST_INTEGER, len(block)):
        if (x := block[i]) is not None:
            block[i] = np.clip(x, -_FAR, _FAR).astype(np.int64)
    return AttentionArrays._make(block)


class Visible(NamedTuple):
    """The keys first..last that each row of a block sees, mask aside; shapes batch + (rows, 1)."""

    first: np.ndarray
    last: np.ndarray
    min_first: int
    max_first: int
    min_last: int
    max_last: int

    @classmethod
    def of(cls, problem: AttentionProblem, block: AttentionArrays, rows: slice) -> Visible | None:
        """Return what a block's rows see; None if that is every key."""
        if (problem.left, problem.right, problem.key_lengths, problem.query_lengths) == (None,) * 4:
            return None
        positions = positions_of(problem, block, rows)
        key_lengths = (
            problem.tk if block.key_lengths is None else block.key_lengths[..., None, None]
        )
        first = 0 if problem.left is None else np.maximum(positions - problem.left, 0)
        last = np.subtract(key_lengths, 1)
        if problem.right is not None:
            last = np.minimum(last, positions + problem.right)
        if block.query_lengths is not None:
            last = np.where(row_numbers(rows) < block.query_lengths[..., None, None], last, -1)
        first, last, _ = np.broadcast_arrays(first, last, positions)
        return cls(
            first, last, int(first.min()), int(first.max()), int(last.min()), int(last.max())
        )

    def sees_none(self, keys: slice) -> bool:
        """Tell whether no row sees any of the keys."""
        return self.min_first >= keys.stop or self.max_last < keys.start

    def sees_all(self, keys: slice) -> bool:
        """Tell whether every row sees all of the keys."""
        return self.max_first <= keys.start and self.min_last >= keys.stop - 1


def row_numbers(rows: slice) -> np.ndarray:
    """Return the numbers of the rows as a column."""
    return np.arange(rows.start, rows.stop, dtype=np.int64)[:, None]


def positions_of(problem: AttentionProblem, block: AttentionArrays, rows: slice) -> np.ndarray:
    """Return the position of each query of the block among the keys: batch + (rows, 1)."""
    if block.query_offset is not None:
        offset = block.query_offset[..., None, None]
    else:  # the last query of an entry stands at its last key
        query_lengths = (
            problem.tq if block.query_lengths is None else block.query_lengths[..., None, None]
        )
        key_lengths = (
            problem.tk if block.key_lengths is None else block.key_lengths[..., None, None]
        )
        offset = key_lengths - query_lengths
    return row_numbers(rows) + offset


def seen_pairs(
    problem: AttentionProblem,
    block: AttentionArrays,
    rows: slice,
    keys: slice,
    visible: Visible | None,
) -> np.ndarray | None:
    """Return which pairs of a tile are visible, broadcastable to its scores; None if all are."""
    seen: np.ndarray | None = None
    if visible is not None and not visible.sees_all(keys):
        j = np.arange(keys.start, keys.stop)
        seen = j <= visible.last
        if visible.max_first > keys.start:
            seen &= j >= visible.first
    if block.mask is not None:
        mask = block.mask[..., rows, keys]
        seen = mask if seen is None else seen & mask
    return seen


def modify(
    problem: AttentionProblem,
    block: AttentionArrays,
    rows: slice,
    keys: slice,
    s: np.ndarray,
) -> None:
    """Apply softcap, bias and ALiBi to a tile of scaled scores, in place."""
    cap(problem, s)
    add_terms(problem, block, rows, keys, s)


def cap(problem: AttentionProblem, s: np.ndarray) -> None:
    """Apply the softcap to a tile of scaled scores, in place."""
    if problem.softcap is None:
        return
    limit = s.dtype.type(problem.softcap)
    capped = s / limit
    np.tanh(capped, out=capped)
    capped *= limit
    # Far below the cap a score stays as it is, and s / limit could lose it to underflow.
    np.copyto(s, capped, where=~(np.abs(s) < limit * softcap_linear(s.dtype)))


def cap_slope(problem: AttentionProblem, capped: np.ndarray) -> np.ndarray | None:
    """Return the derivative of capped scores by the scores, 1 - tanh^2; None without a softcap."""
    if problem.softcap is None:
        return None
    t = capped / capped.dtype.type(problem.softcap)
    slope: np.ndarray = (1 - t) * (1 + t)  # near the cap 1 - t * t would lose its digits
    return slope


def add_terms(
    problem: AttentionProblem,
    block: AttentionArrays,
    rows: slice,
    keys: slice,
    s: np.ndarray,
) -> None:
    """Add bias and ALiBi to a tile of capped scores, in place."""
    if block.bias is not None:
        bias = block.bias[..., rows, keys]
        if bias.dtype.itemsize <= s.dtype.itemsize:
            np.add(s, bias, out=s)
        else:
            # A finite sum stays finite in fewer bits: a row that sees keys of bias -1e300 only, as
            # masks are written by some, is their mean and not empty.
            total, largest = s + bias, np.finfo(s.dtype).max
            np.clip(total, -largest, largest, out=total, where=np.isfinite(total))
            np.copyto(s, total, casting="same_kind")
    if block.alibi_slopes is not None:
        positions = positions_of(problem, block, rows)
        distance = np.abs(positions - np.arange(keys.start, keys.stop)).astype(s.dtype)
        s -= block.alibi_slopes[..., None, None].astype(s.dtype) * distance


def weighted_values(weights: np.ndarray, v: np.ndarray, seen: np.ndarray | None) -> np.ndarray:
    """Return weights @ v, an unseen value counting nothing whatever it holds.

    A seen non-finite value counts as IEEE arithmetic says.

    The finite values go through the same matmul as always, so that rows which see only those keep
    their bits.
    """
    finite = np.isfinite(v)
    total = np.matmul(weights, np.where(finite, v, v.dtype.type(0)))
    if finite.all():
        return total
    seen = np.broadcast_to(True if seen is None else seen, weights.shape)
    count = partial(_count, dtype=v.dtype)
    nan = count(seen, np.isnan(v)) | count(seen & (weights == 0), np.isinf(v))
    raised, lowered = seen & (weights > 0), seen & (weights < 0)
    plus = count(raised, v == np.inf) | count(lowered, v == -np.inf)
    minus = count(raised, v == -np.inf) | count(lowered, v == np.inf)
    total[plus] += np.inf
    total[minus] -= np.inf
    total[nan] = np.nan
    return total


def _count(pairs: np.ndarray, values: np.ndarray, dtype: Any) -> np.ndarray:
    """Tell for each (row, column) whether a pair of the row meets a true value of the column."""
    return np.matmul(pairs.astype(dtype), values.astype(dtype)) > 0
