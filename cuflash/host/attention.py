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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import pairwise, product
from typing import Any, NamedTuple

import numpy as np

from ..engine import ATTENTION_METHODS
from ..problem import ArraySpec, AttentionArrays, AttentionProblem, accumulator
from .online import merge_attention, shift
from .score import (
    Index,
    Visible,
    modify,
    row_numbers,
    seen_pairs,
    select,
    weighted_values,
)
from .threads import run, worker_count


class TileSizes(NamedTuple):
    """The numbers that plans follow from.

    Tiles are from float32 at D = 64 on a core with 1 MiB of L2 (AMD Zen 4, OpenBLAS): 256 x 512
    took 0.58 s of CPU time for 4096^2 x 8 scores, 128 x 512 0.65, 64 x 512 0.70, 64 x 2048 0.86,
    256 x 256 0.72. Fewer rows leave BLAS short of work, a larger tile leaves L2.
    """

    query_rows: int = 256
    scores: int = 256 * 512
    """Of a tile, over all batch entries of the block."""
    min_keys: int = 512
    max_keys: int = 8192
    """A tile of few rows gets more keys, up to here: past it windows and lengths could skip too
    little."""
    worth_threads: int = 2**19
    """Scores that take longer than handing a block to another thread."""
    keys_outermost: int = 128
    """The scores of a tile of up to this many keys lie with the keys outermost, so that NumPy's
    reductions over keys run along the rows: the maximum of a row of 16 takes 50 ns by itself and 3
    ns so, that of a row of 128 70 and 12. Past this, matmul loses as much by the larger strides."""
    keys_outermost_added: int = 32
    """The same where a bias or ALiBi is added, which lies the other way: at 64 keys the sum would
    take twice as long as all the rest."""
    small_product: int = 2**18
    """Multiplications of a matmul that OpenBLAS does not share among threads."""
    small_matrix: int = 9216
    """Elements of a matrix whose product with a vector it does not share."""


_TILES = TileSizes()
# Below this many blocks of work, keys at least this long are split so that other cores can help.
_FEW_BLOCKS = 4
_LONG_KEYS = 16384
_MAX_SPLITS = 8
# Queries are scaled instead of scores where they are fewer and no exponent can be lost by that.
_FOLDABLE_SCALE = (2.0**-10, 1.0)


@dataclass(frozen=True, slots=True)
class TilePlan:
    """How a problem is cut and scaled; a function of shapes and options alone."""

    rows: int
    keys: int
    axis: int
    """Batch axis cut into spans: those before it are cut to single entries, those after never."""
    span: int
    splits: int
    dtype: np.dtype
    """Of scores and sums."""
    query_scale: Any
    """Factor on the queries, or None."""
    score_scale: Any
    """Factor on the scores, or None."""
    divide_weights: bool
    """Whether the weights are divided by their sum: they are all of one tile, and fewer than their
    products with wider values."""
    keys_outermost: int
    """Keys of a tile up to which its scores lie with the keys outermost."""
    alone: bool
    """Whether the problem is one tile, no part of which the pool or BLAS would give to a second
    thread."""

    @classmethod
    def of(cls, problem: AttentionProblem, sizes: TileSizes | None = None) -> TilePlan:
        """Choose tile sizes for a problem."""
        return _tile_plan(problem, _TILES if sizes is None else sizes)

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


@lru_cache(maxsize=1024)
def _tile_plan(problem: AttentionProblem, sizes: TileSizes) -> TilePlan:
    batch_shape, tq, tk = problem.batch_shape, problem.tq, problem.tk
    rows = max(1, min(tq, sizes.query_rows))
    keys = max(1, min(tk, sizes.max_keys, max(sizes.min_keys, sizes.scores // rows)))
    room = max(1, sizes.scores // (rows * max(1, tk)))  # only short entries share a block
    if tq * tk * math.prod(batch_shape) >= sizes.worth_threads:
        room = min(room, -(-math.prod(batch_shape) // _FEW_BLOCKS))
    axis, span, entries = 0, 1, room
    for axis in reversed(range(len(batch_shape))):
        span = max(1, min(entries, batch_shape[axis]))
        entries //= max(1, batch_shape[axis])
        if entries < 2:
            break
    tiles = -(-tk // keys)
    splits = problem.num_splits
    if splits is None:
        blocks = math.prod(batch_shape) * -(-tq // rows)
        splits = _MAX_SPLITS if blocks < _FEW_BLOCKS and tk >= _LONG_KEYS else 1
    dtype = accumulator(problem.dtype)
    scale = dtype.type(problem.scale)
    fold = tk > problem.d and _FOLDABLE_SCALE[0] <= abs(problem.scale) <= _FOLDABLE_SCALE[1]
    added = problem.bias is not None or problem.alibi_slopes is not None
    keys_outermost = sizes.keys_outermost_added if added else sizes.keys_outermost
    sides = tq, tk, problem.d, problem.dv
    small = sizes.small_product if min(sides) > 1 else sizes.small_matrix
    alone = (
        0 < math.prod(batch_shape) <= room
        and (rows, keys) == (tq, tk)
        and tk <= keys_outermost
        and tq * tk * max(sides[2:]) <= small
    )
    return TilePlan(
        rows=rows,
        keys=keys,
        axis=axis,
        span=span,
        splits=max(1, min(splits, tiles)),
        dtype=dtype,
        query_scale=scale if fold else None,
        score_scale=None if fold else scale,
        divide_weights=tiles == 1 and tk < problem.dv and problem.sinks is None,
        keys_outermost=keys_outermost,
        alone=alone,
    )


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
    pieces = [_Piece(problem, arrays, out, lse)]
    if problem.sequences is not None:
        out[...] = 0  # rows past the last sequence
        if lse is not None:
            lse[...] = -np.inf
        pieces = [
            _Piece(own, views, out[..., rows, :], None if lse is None else lse[..., rows])
            for own, views, rows, _ in sequences(problem, arrays)
        ]
    elif (plan := TilePlan.of(problem)).alone:
        _attend_rows(problem, plan, arrays, (), [slice(0, problem.tq)], _Part(0, 1, out, lse))
        return
    tasks: list[Callable[[], None]] = []
    merges: list[Callable[[], None]] = []
    for piece in pieces:
        _plan_tasks(piece, tasks, merges)
    run(tasks)
    for merge in merges:
        merge()


class _Piece(NamedTuple):
    """A problem of entries with their own tokens, and its arrays."""

    problem: AttentionProblem
    arrays: AttentionArrays
    out: np.ndarray
    lse: np.ndarray | None


def sequences(
    problem: AttentionProblem, arrays: AttentionArrays
) -> Iterator[tuple[AttentionProblem, AttentionArrays, slice, slice]]:
    """Yield each sequence of those that lie end to end as a problem of its own.

    With it come its arrays, which are views, and its tokens on the axes of queries and keys.
    """
    ends_q, ends_k = arrays.cu_seqlens_q, arrays.cu_seqlens_k
    integers = {
        name: np.broadcast_to(x, len(ends_q) - 1)
        for name in ("query_offset", "key_lengths")
        if (x := getattr(arrays, name)) is not None
    }
    for e in range(len(ends_q) - 1):
        rows, keys = (slice(*map(int, ends[e : e + 2])) for ends in (ends_q, ends_k))
        own = arrays._replace(
            q=arrays.q[..., rows, :],
            k=arrays.k[..., keys, :],
            v=arrays.v[..., keys, :],
            cu_seqlens_q=None,
            cu_seqlens_k=None,
            **{name: np.broadcast_to(x[e], problem.batch_shape) for name, x in integers.items()},
        )
        specs: dict[str, Any] = {name: ArraySpec.of(getattr(own, name)) for name in integers}
        for name in ("q", "k", "v"):
            spec = ArraySpec.of(getattr(own, name))
            specs[name] = spec.broadcast_to((*problem.batch_shape, *spec.shape[-2:]), name)
        yield replace(problem, **specs, cu_seqlens_q=None, cu_seqlens_k=None), own, rows, keys


def _plan_tasks(
    piece: _Piece, tasks: list[Callable[[], None]], merges: list[Callable[[], None]]
) -> None:
    """Add what is to be done for a problem, and what after that if its keys are split."""
    problem, arrays, out, lse = piece
    if 0 in problem.lse_shape:
        return
    plan = TilePlan.of(problem)
    tiles = -(-problem.tk // plan.keys)
    if plan.splits == 1:
        parts = [_Part(0, tiles, out, lse)]
    else:
        results = [
            (np.empty(out.shape, plan.dtype), np.empty(problem.lse_shape, plan.dtype))
            for _ in range(plan.splits)
        ]
        edges = [tiles * i // plan.splits for i in range(plan.splits + 1)]
        parts = [
            _Part(first, last, *result)
            for (first, last), result in zip(pairwise(edges), results, strict=True)
        ]
        merged_lse = np.empty(problem.lse_shape, plan.dtype) if lse is None else lse
        merges.append(partial(merge_attention, results, out, merged_lse))

    row_tiles = [slice(i, min(i + plan.rows, problem.tq)) for i in range(0, problem.tq, plan.rows)]
    blocks = [(index, part) for index in plan.batches(problem.batch_shape) for part in parts]
    # Row tiles of one batch slice share its converted keys and values, so they stay together unless
    # that leaves cores idle. Every n-th tile makes a share, since causal tiles grow with the row.
    shares = min(len(row_tiles), -(-4 * worker_count() // len(blocks)))
    tasks += [
        partial(_attend_rows, problem, plan, arrays, index, row_tiles[share::shares], part)
        for index, part in blocks
        for share in range(shares)
    ]


def _has_fixed_layout(x: np.ndarray, dtype: np.dtype) -> bool:
    """Tell whether x has this dtype and rows end to end: BLAS rounds otherwise for some strides."""
    flags, columns = x.flags, x.shape[-1]
    if x.dtype != dtype or not flags.aligned:
        return False
    if flags.c_contiguous and columns > 1 and x.shape[-2] > 1:  # says nothing of an axis of size 1
        return True
    return x.strides[-2:] == (columns * x.itemsize, x.itemsize)


def fixed_layout(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return x, or a copy of it, in the accumulator's dtype with its rows end to end."""
    return x if _has_fixed_layout(x, dtype) else np.array(x, dtype, order="C")


def _attend_rows(
    problem: AttentionProblem,
    plan: TilePlan,
    arrays: AttentionArrays,
    index: Index,
    row_tiles: list[slice],
    part: _Part,
) -> None:
    """Compute the rows of `row_tiles` for one slice of the batch and one share of the keys."""
    dtype = plan.dtype
    block = select(problem, arrays, index)
    if not (_has_fixed_layout(block.k, dtype) and _has_fixed_layout(block.v, dtype)):
        block = block._replace(k=fixed_layout(block.k, dtype), v=fixed_layout(block.v, dtype))
    out = part.out[index]
    lse = None if part.lse is None else part.lse[index]
    # One tile of scores, used again and again: fresh memory would cost a page fault every 4 KiB.
    scores = np.empty(math.prod(out.shape[:-2]) * plan.rows * plan.keys, dtype)
    with np.errstate(all="ignore"):
        for rows in row_tiles:
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
    maximum, normalizer, mean = _online(problem, plan, block, rows, tiles, scores, out)
    if np.count_nonzero(np.isfinite(mean)) < mean.size:
        # A weight of 0 does not hide a NaN or inf in a value: only now is it asked who sees which.
        again = partial(_online, problem, plan)
        maximum, normalizer, mean = again(block, rows, tiles, scores, out, hide_unseen=True)
        if _sum_can_overflow(block.v):
            # The sum of finite values can leave the range of its type where their mean does not.
            mean, shrink = mean.copy(), mean.dtype.type(2.0 ** -problem.tk.bit_length())
            block = block._replace(v=block.v * shrink)
            shrunk = again(block, rows, tiles, scores, out, hide_unseen=True).numerator
            # Rounding may take a mean of the largest numbers past them; infinite values stay so.
            largest = np.finfo(shrunk.dtype).max * shrink
            shrunk = np.where(np.isinf(shrunk), shrunk, shrunk.clip(-largest, largest))
            mean = np.where(np.isfinite(mean), mean, shrunk / shrink)
    if block.query_lengths is not None:
        past = row_numbers(rows)[:, 0] >= block.query_lengths[..., None]
        past = np.broadcast_to(past, normalizer.shape)
        normalizer[past] = 0
        mean[past] = 0
    if mean is not out:
        out[...] = mean
    if lse is not None:
        lse[...] = np.where(normalizer == 0, -np.inf, maximum + np.log(normalizer))


def _online(
    problem: AttentionProblem,
    plan: TilePlan,
    block: AttentionArrays,
    rows: slice,
    tiles: tuple[int, int],
    scores: np.ndarray,
    out: np.ndarray,
    *,
    hide_unseen: bool = False,
) -> _State:
    """Run the online recurrence over a range of key tiles.

    Return its last state, the numerator divided by the normalizer. `scores` and, where its layout
    allows, `out` are memory to compute in: that numerator may be `out`.
    """
    dtype, shape, tk = plan.dtype, out.shape[:-1], problem.tk
    q = fixed_layout(block.q[..., rows, :], dtype)
    if plan.query_scale is not None:
        q = q * plan.query_scale
    elif np.may_share_memory(q, block.k):
        q = q.copy()  # of one array with itself NumPy takes another product, of other bits
    visible = Visible.of(problem, block, rows)
    target = out if _has_fixed_layout(out, dtype) else np.empty(out.shape, dtype)

    state: _State | None = None
    if block.sinks is not None and tiles[0] == 0:  # a logit before all keys that has no value
        sinks = np.broadcast_to(block.sinks[..., None], shape).astype(dtype)
        target[...] = 0
        counts = 1 + (sinks - sinks)  # NaN of NaN and +inf, even if no key follows
        state = _State(sinks, np.where(sinks == -np.inf, 0, counts), target)

    for tile in range(*tiles):
        first = tile * plan.keys
        keys = slice(first, min(first + plan.keys, tk))
        if visible is not None and visible.sees_none(keys):
            continue
        seen = seen_pairs(problem, block, rows, keys, visible)
        if seen is not None and not seen.any():
            continue
        s, flat = _tile_of_scores(scores, shape, keys.stop - first, plan.keys_outermost)
        np.matmul(q, block.k[..., keys, :].swapaxes(-1, -2), out=s)
        if plan.score_scale is not None:
            flat *= plan.score_scale
        modify(problem, block, rows, keys, s)
        if seen is not None:
            np.copyto(s, -np.inf, where=~seen)

        maximum = np.maximum.reduce(flat, axis=1).reshape(shape)
        if state is not None:
            np.maximum(state.maximum, maximum, out=maximum)
        reference = shift(maximum)
        flat -= reference.reshape(-1, 1)
        np.exp(flat, out=flat)
        sums = _row_sums(flat)
        if plan.divide_weights:
            flat /= _divisor(sums)[:, None]
        total = sums.reshape(shape)
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
    if not plan.divide_weights:
        np.divide(state.numerator, _divisor(state.normalizer)[..., None], out=state.numerator)
    return state


def _sum_can_overflow(v: np.ndarray) -> bool:
    """Tell whether the finite values of as many tokens can add up to more than their type holds."""
    largest = np.max(np.abs(v), where=np.isfinite(v), initial=0)
    return bool(largest > np.finfo(v.dtype).max / v.shape[-2])


def _divisor(normalizer: np.ndarray) -> np.ndarray:
    """Return what to divide numerators by: the normalizer, or 1 where it is 0 (an empty row).

    Any other is at least 1: the largest score has the weight exp(0).
    """
    return np.maximum(normalizer, normalizer.dtype.type(1))


def _tile_of_scores(
    memory: np.ndarray, shape: tuple[int, ...], width: int, keys_outermost: int
) -> tuple[np.ndarray, np.ndarray]:
    """View memory as a tile's scores, batch + (rows, keys), and as all its rows, (rows, keys)."""
    memory = memory[: math.prod(shape) * width]
    flat = memory.reshape(width, -1).T if width <= keys_outermost else memory.reshape(-1, width)
    return flat.reshape(*shape, width), flat


def _row_sums(flat: np.ndarray) -> np.ndarray:
    """Return the sum of each row of a 2-d array, keys outermost or not."""
    if flat.flags.c_contiguous:  # BLAS takes a tenth of the time of NumPy's pairwise sum
        return flat @ np.ones(flat.shape[1], flat.dtype)
    return np.add.reduce(flat, axis=1)
