"""Tiled attention in NumPy: online softmax over key tiles, BLAS within, blocks on threads.

A block is a slice of the batch and a tile of query rows. It walks over the key tiles that its rows
can see with the running maximum m, normalizer l and numerator o of Milakov and Gimelshein (2018)
and Dao et al. (2022), so that nothing of size Tq x Tk exists.

Every matmul of a block sees operands of one fixed layout and tiles at fixed places, whatever the
strides and values of the inputs: that is what makes a view equal its copy, and a row independent of
the others, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, product
from typing import NamedTuple

import numpy as np

from ..engine import ATTENTION_METHODS
from ..problem import AttentionArrays, AttentionProblem, accumulator
from .online import divisor, merge_attention, shift
from .score import (
    Index,
    Visible,
    broadcast,
    modify,
    row_numbers,
    seen_pairs,
    select,
    weighted_values,
)
from .threads import run, worker_count

# Tile sizes, from float32 at D = 64 on a core with 1 MiB of L2 (AMD Zen 4, OpenBLAS): 256 x 512
# took 0.58 s of CPU time for 4096^2 x 8 scores, 128 x 512 0.65, 64 x 512 0.70, 64 x 2048 0.86, 256
# x 256 0.72. Fewer rows leave BLAS short of work, a larger tile leaves L2.
_QUERY_ROWS = 256
_SCORES = 256 * 512  # of a tile, over all batch entries of the block
_MIN_KEYS = 512
# A tile of few rows gets more keys, up to here: past it windows and lengths could skip too little.
_MAX_KEYS = 8192
# Below this many blocks of work, keys at least this long are split so that other cores can help.
_FEW_BLOCKS = 4
_LONG_KEYS = 16384
# Scores that take longer than handing a block to another thread.
_WORTH_THREADS = 2**19
# Rows up to here are reduced column by column.
_SHORT_ROW = 32
_MAX_SPLITS = 8
# Queries are scaled instead of scores where they are fewer and no exponent can be lost by that.
_FOLDABLE_SCALE = (2.0**-10, 1.0)


@dataclass(frozen=True, slots=True)
class TilePlan:
    """How a problem is cut; a function of shapes alone."""

    rows: int
    keys: int
    axis: int
    """Batch axis cut into spans: those before it are cut to single entries, those after never."""
    span: int
    splits: int

    @classmethod
    def of(cls, problem: AttentionProblem) -> TilePlan:
        """Choose tile sizes for a problem."""
        rows = max(1, min(problem.tq, _QUERY_ROWS))
        keys = max(1, min(problem.tk, _MAX_KEYS, max(_MIN_KEYS, _SCORES // rows)))
        entries = max(1, _SCORES // (rows * max(1, problem.tk)))  # only short entries share a block
        if problem.tq * problem.tk * math.prod(problem.batch_shape) >= _WORTH_THREADS:
            entries = min(entries, -(-math.prod(problem.batch_shape) // _FEW_BLOCKS))
        axis, span = 0, 1
        for axis in reversed(range(len(problem.batch_shape))):
            span = max(1, min(entries, problem.batch_shape[axis]))
            entries //= max(1, problem.batch_shape[axis])
            if entries < 2:
                break
        tiles = -(-problem.tk // keys)
        splits = problem.num_splits
        if splits is None:
            blocks = math.prod(problem.batch_shape) * -(-problem.tq // rows)
            splits = _MAX_SPLITS if blocks < _FEW_BLOCKS and problem.tk >= _LONG_KEYS else 1
        return cls(rows, keys, axis, span, max(1, min(splits, tiles)))

    def batches(self, batch_shape: tuple[int, ...]) -> Iterator[Index]:
        """Yield the index, a slice an axis, of each block's batch entries."""
        if not batch_shape:
            yield ()
            return
        steps = [1] * self.axis + [self.span] + list(batch_shape[self.axis + 1 :])
        starts = [
            range(0, size, max(1, step)) for size, step in zip(batch_shape, steps, strict=True)
        ]
        for start in product(*starts):
            yield tuple(slice(i, i + step) for i, step in zip(start, steps, strict=True))


class _Part(NamedTuple):
    """Where the result of one share of the keys goes."""

    first: int
    last: int
    out: np.ndarray
    lse: np.ndarray | None


class _State(NamedTuple):
    """The online recurrence's state for a block's rows after some of their keys."""

    maximum: np.ndarray
    """m, the largest score so far: batch + (rows,)."""
    normalizer: np.ndarray
    """l, the sum of exp(score - m): batch + (rows,)."""
    numerator: np.ndarray
    """o, the sum of exp(score - m) * v: batch + (rows, Dv)."""


def attention_methods(problem: AttentionProblem) -> tuple[str, ...]:
    """Return the one method of this engine, which runs every problem."""
    del problem
    return ATTENTION_METHODS["host"]


def attention_workspace(problem: AttentionProblem) -> int:
    """Return 0: the threads allocate their tiles, and nothing is needed from the caller."""
    del problem
    return 0


def attention(
    problem: AttentionProblem,
    arrays: AttentionArrays,
    out: np.ndarray,
    lse: np.ndarray | None,
    workspace: object,
) -> None:
    """Fill `out` and, unless None, `lse`."""
    del workspace
    if 0 in problem.lse_shape:
        return
    dtype = accumulator(problem.dtype)
    plan = TilePlan.of(problem)
    whole = broadcast(problem, arrays)
    tiles = -(-problem.tk // plan.keys)
    results: list[tuple[np.ndarray, np.ndarray]] = []
    if plan.splits == 1:
        parts = [_Part(0, tiles, out, lse)]
    else:
        results = [
            (np.empty(out.shape, dtype), np.empty(problem.lse_shape, dtype))
            for _ in range(plan.splits)
        ]
        edges = [tiles * i // plan.splits for i in range(plan.splits + 1)]
        parts = [
            _Part(first, last, *result)
            for (first, last), result in zip(pairwise(edges), results, strict=True)
        ]

    row_tiles = [slice(i, i + plan.rows) for i in range(0, problem.tq, plan.rows)]
    blocks = [(index, part) for index in plan.batches(problem.batch_shape) for part in parts]
    # Row tiles of one batch slice share its converted keys and values, so they stay together unless
    # that leaves cores idle. Every n-th tile makes a share, since causal tiles grow with the row.
    shares = min(len(row_tiles), -(-4 * worker_count() // len(blocks)))
    run(
        [
            partial(_attend_rows, problem, plan, whole, index, row_tiles[share::shares], part)
            for index, part in blocks
            for share in range(shares)
        ]
    )
    if results:
        merge_attention(results, out, np.empty(problem.lse_shape, dtype) if lse is None else lse)


def _has_fixed_layout(x: np.ndarray, dtype: np.dtype) -> bool:
    """Tell whether x has this dtype and rows end to end: BLAS rounds otherwise for some strides."""
    end_to_end = x.strides[-2:] == (x.shape[-1] * x.itemsize, x.itemsize)
    return x.dtype == dtype and end_to_end and x.flags.aligned


def _fixed_layout(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return x, or a copy of it, in the accumulator's dtype with its rows end to end."""
    return x if _has_fixed_layout(x, dtype) else np.array(x, dtype, order="C")


def _attend_rows(
    problem: AttentionProblem,
    plan: TilePlan,
    whole: AttentionArrays,
    index: Index,
    row_tiles: list[slice],
    part: _Part,
) -> None:
    """Compute the rows of `row_tiles` for one slice of the batch and one share of the keys."""
    dtype = accumulator(problem.dtype)
    block = select(whole, index)
    block = block._replace(k=_fixed_layout(block.k, dtype), v=_fixed_layout(block.v, dtype))
    out = part.out[index]
    lse = None if part.lse is None else part.lse[index]
    # One tile of scores, used again and again: fresh memory would cost a page fault every 4 KiB.
    scores = np.empty(math.prod(out.shape[:-2]) * plan.rows * plan.keys, dtype)
    with np.errstate(all="ignore"):
        for rows in row_tiles:
            rows = slice(rows.start, min(rows.stop, problem.tq))
            _attend(
                problem,
                plan,
                block,
                rows,
                (part.first, part.last),
                scores,
                out[..., rows, :],
                None if lse is None else lse[..., rows],
            )


def _attend(
    problem: AttentionProblem,
    plan: TilePlan,
    block: AttentionArrays,
    rows: slice,
    tiles: tuple[int, int],
    scores: np.ndarray,
    out: np.ndarray,
    lse: np.ndarray | None,
) -> None:
    """Compute one tile of query rows over a range of key tiles: fill `out` and `lse`."""
    online = partial(_online, problem, plan, rows, tiles, scores, out)
    maximum, normalizer, numerator = online(block, hide_unseen=False)
    mean: np.ndarray | None = None
    if not np.isfinite(numerator).all():
        # A weight of 0 does not hide a NaN or inf in a value: only now is it asked who sees which.
        maximum, normalizer, numerator = online(block, hide_unseen=True)
        if _sum_can_overflow(block.v):
            # The sum of finite values can leave the range of its type where their mean does not.
            total, shrink = numerator.copy(), numerator.dtype.type(2.0 ** -problem.tk.bit_length())
            shrunk = online(block._replace(v=block.v * shrink), hide_unseen=True).numerator
            weight = divisor(normalizer)[..., None]
            mean = np.where(np.isfinite(total), total / weight, shrunk / weight / shrink)
    if block.query_lengths is not None:
        past = row_numbers(rows)[:, 0] >= block.query_lengths[..., None]
        past = np.broadcast_to(past, normalizer.shape)
        normalizer[past] = 0
        (numerator if mean is None else mean)[past] = 0
    if mean is None:
        np.divide(numerator, divisor(normalizer)[..., None], out=out, casting="same_kind")
    else:
        out[...] = mean
    if lse is not None:
        lse[...] = np.where(normalizer == 0, -np.inf, maximum + np.log(normalizer))


def _online(
    problem: AttentionProblem,
    plan: TilePlan,
    rows: slice,
    tiles: tuple[int, int],
    scores: np.ndarray,
    out: np.ndarray,
    block: AttentionArrays,
    *,
    hide_unseen: bool,
) -> _State:
    """Run the online recurrence over a range of key tiles.

    `scores` and, where its layout allows, `out` are memory to compute in: the numerator returned
    may be `out`.
    """
    dtype, shape = scores.dtype, out.shape[:-1]
    scale = dtype.type(problem.scale)
    fold = problem.tk > problem.d and _FOLDABLE_SCALE[0] <= abs(problem.scale) <= _FOLDABLE_SCALE[1]
    q = _fixed_layout(block.q[..., rows, :], dtype)
    if fold:
        q = q * scale
    visible = Visible.of(problem, block, rows)
    ones = np.ones(plan.keys, dtype)
    target = out if _has_fixed_layout(out, dtype) else np.empty(out.shape, dtype)

    state: _State | None = None
    if block.sinks is not None and tiles[0] == 0:  # a logit before all keys that has no value
        sinks = np.broadcast_to(block.sinks[..., None], shape).astype(dtype)
        target[...] = 0
        state = _State(sinks, (sinks != -np.inf).astype(dtype), target)

    for tile in range(*tiles):
        keys = slice(tile * plan.keys, min((tile + 1) * plan.keys, problem.tk))
        if visible is not None and visible.sees_none(keys):
            continue
        seen = seen_pairs(problem, block, rows, keys, visible)
        if seen is not None and not seen.any():
            continue
        width = keys.stop - keys.start
        flat = scores[: math.prod(shape) * width].reshape(-1, width)
        s = flat.reshape(*shape, width)
        np.matmul(q, block.k[..., keys, :].swapaxes(-1, -2), out=s)
        if not fold:
            s *= scale
        modify(problem, block, rows, keys, s)
        if seen is not None:
            np.copyto(s, -np.inf, where=~seen)

        maximum = _row_maximum(flat).reshape(shape)
        if state is not None:
            np.maximum(state.maximum, maximum, out=maximum)
        reference = shift(maximum)
        s -= reference[..., None]
        np.exp(s, out=s)
        total = (flat @ ones[:width]).reshape(shape)
        v = block.v[..., keys, :]
        if hide_unseen:
            weighted = weighted_values(s, v, seen)
        else:
            weighted = np.matmul(s, v, out=target if state is None else None)
        if state is None:
            state = _State(maximum, total, weighted)
        else:
            rescale = np.exp(state.maximum - reference)
            total += state.normalizer * rescale
            np.multiply(state.numerator, rescale[..., None], out=state.numerator)
            np.add(state.numerator, weighted, out=state.numerator)
            state = _State(maximum, total, state.numerator)
    if state is None:
        target[...] = 0
        state = _State(np.full(shape, -np.inf, dtype), np.zeros(shape, dtype), target)
    return state


def _sum_can_overflow(v: np.ndarray) -> bool:
    """Tell whether the finite values of as many tokens can add up to more than their type holds."""
    largest = np.max(np.abs(v), where=np.isfinite(v), initial=0)
    return bool(largest > np.finfo(v.dtype).max / v.shape[-2])


def _row_maximum(rows: np.ndarray) -> np.ndarray:
    """Return the largest element of each row of a 2-d array."""
    width = rows.shape[1]
    if width > _SHORT_ROW:
        return rows.max(axis=1)
    largest = rows[:, 0].copy()  # a reduction would pay about 40 ns a row, whatever its length
    for column in range(1, width):
        np.maximum(largest, rows[:, column], out=largest)
    return largest
