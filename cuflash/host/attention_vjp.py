"""Tiled gradients of attention in NumPy: scores computed again from (q, k, lse), tile by tile.

A block is a slice of the batch and some of its tiles of query rows. For each tile of rows it walks
over the keys they see. With P = exp(S - lse) and delta = rowsum(dout * out) - dlse (Dao et al.
2022, Algorithm 4; Dao 2023, Algorithm 2),

    dS = P * (dout V^T - delta),  dQ += dS K,  dK += dS^T Q,  dV += P^T dout.

Gradients are sums over blocks: over row tiles, over entries that broadcast, over sequences. What is
added by several *lanes*, which run in any order, has a partial sum for each of them, and the sums
are added in the order of the lanes. How work is cut into lanes follows from shapes alone, so that
the bits of a gradient do too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ..engine import ATTENTION_METHODS
from ..problem import AttentionArrays, AttentionProblem, accumulator
from ..problem_vjp import AttentionGrads, AttentionResults, AttentionVjpProblem
from .attention import TilePlan, TileSizes, fixed_layout, sequences
from .score import (
    Index,
    Visible,
    add_terms,
    cap,
    cap_slope,
    row_numbers,
    seen_pairs,
    select,
    weighted_values,
)
from .threads import run

_TILES = TileSizes()
#: Row tiles of one group of batch entries are shared among lanes until there are as many.
_FEW_LANES = 8
#: At most so many lanes of a problem: what entries share has a partial sum in each.
_MOST_LANES = 64

#: Sums by the gradient's name and the part of it, a start for each axis.
_Key: TypeAlias = tuple[str, tuple[int, ...]]


def attention_vjp_methods(problem: AttentionVjpProblem) -> tuple[str, ...]:
    """Return the one method of this engine, which runs every problem."""
    del problem
    return ATTENTION_METHODS["host"]


def attention_vjp_workspace(problem: AttentionVjpProblem) -> int:
    """Return 0: the threads allocate their tiles, and nothing is needed from the caller."""
    del problem
    return 0


def attention_vjp(
    problem: AttentionVjpProblem,
    arrays: AttentionArrays,
    results: AttentionResults,
    grads: AttentionGrads,
    workspace: object,
) -> None:
    """Fill the gradients that are not None."""
    del workspace
    sums = {
        name: _zeros(x, accumulator(problem.forward.dtype))
        for name, x in grads._asdict().items()
        if x is not None
    }
    lanes = [
        lane
        for piece in _pieces(_Piece(problem.forward, arrays, results, sums))
        for lane in _lanes(piece)
    ]
    uses: dict[_Key, int] = {}
    for lane in lanes:
        for key in lane.keys:
            uses[key] = uses.get(key, 0) + 1
    shared = {key for key, count in uses.items() if count > 1}
    run([partial(lane.run, shared) for lane in lanes])
    with np.errstate(all="ignore"):  # sums of infinities, and what 16 bits do not hold
        for lane in lanes:
            lane.add_partial_sums()
        for name, total in sums.items():
            if total is not getattr(grads, name):
                np.copyto(getattr(grads, name), total, casting="same_kind")


def _zeros(gradient: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return the gradient, if that is as wide as its sum, or else an array to sum in; all zero."""
    if gradient.dtype.itemsize < dtype.itemsize:
        return np.zeros(gradient.shape, dtype)
    gradient[...] = 0
    return gradient


class _Piece(NamedTuple):
    """A problem of entries with their own tokens, its arrays, and the sums of its gradients."""

    problem: AttentionProblem
    arrays: AttentionArrays
    results: AttentionResults
    sums: dict[str, np.ndarray]
    origin: Mapping[str, int] = {}
    """First token, on the whole axis, of each gradient that has tokens."""


def _pieces(whole: _Piece) -> Iterator[_Piece]:
    """Yield the problem itself, or each of the sequences that lie end to end."""
    if whole.problem.sequences is None:
        yield whole
        return
    results, sums = whole.results, whole.sums
    for problem, arrays, rows, keys in sequences(whole.problem, whole.arrays):
        tokens = {"dq": rows, "dk": keys, "dv": keys}
        yield _Piece(
            problem,
            arrays,
            AttentionResults(
                results.dout[..., rows, :],
                results.out[..., rows, :],
                results.lse[..., rows],
                None if results.dlse is None else results.dlse[..., rows],
            ),
            {n: x[..., tokens[n], :] if n in tokens else x for n, x in sums.items()},
            {name: part.start for name, part in tokens.items()},
        )


class _Unit(NamedTuple):
    """A slice of the batch and tiles of its rows."""

    entries: Index
    row_tiles: list[slice]
    share: int


class _Lane:
    """Units of work done one after the other, and their part of the sums."""

    def __init__(self, piece: _Piece, plan: TilePlan, units: Sequence[_Unit]) -> None:
        self._piece = piece
        self._plan = plan
        self._units = units
        self._partial: dict[_Key, tuple[np.ndarray, np.ndarray]] = {}
        self.keys = {self._key(name, unit) for unit in units for name in piece.sums}

    def _region(self, name: str, unit: _Unit) -> tuple[slice, ...]:
        return tuple(
            slice(0, 1) if size == 1 else part
            for size, part in zip(self._piece.sums[name].shape, unit.entries, strict=False)
        )

    def _key(self, name: str, unit: _Unit) -> _Key:
        """Name the part of a sum that a unit adds to."""
        own_rows = name == "dq" or (name == "dbias" and self._piece.sums[name].shape[-2] != 1)
        share, origin = unit.share if own_rows else 0, self._piece.origin.get(name, 0)
        return name, (origin, share, *(part.start for part in self._region(name, unit)))

    def run(self, shared: set[_Key]) -> None:
        """Do the work; into partial sums where other lanes add as well."""
        with np.errstate(all="ignore"):
            for unit in self._units:
                targets = {}
                for name, total in self._piece.sums.items():
                    region: Any = (*self._region(name, unit), ...)  # a view, of no axes as well
                    target = total[region]
                    key = self._key(name, unit)
                    if key in shared:
                        if key not in self._partial:
                            self._partial[key] = np.zeros(target.shape, target.dtype), target
                        target = self._partial[key][0]
                    targets[name] = target
                _Block(self._piece, self._plan, unit.entries, targets).add(unit.row_tiles)

    def add_partial_sums(self) -> None:
        """Add the partial sums of this lane to the whole."""
        for part, total in self._partial.values():
            total += part
        self._partial.clear()


def _bias_with_rows(piece: _Piece) -> tuple[int, ...] | None:
    """Return the shape, with all axes, of a bias that has a part for each row of scores.

    Also if its gradient is not asked for: no order of a sum is to depend on that.
    """
    bias = piece.arrays.bias
    if bias is None or bias.ndim < 2 or bias.shape[-2] == 1:
        return None
    return (1,) * (len(piece.problem.lse_shape) + 1 - bias.ndim) + bias.shape


def _lanes(piece: _Piece) -> Iterator[_Lane]:
    """Cut a problem into lanes.

    Entries that share a bias with rows are of one lane: its gradient can be as large as all scores
    are, and is not to be kept in parts.
    """
    problem = piece.problem
    if 0 in problem.lse_shape:
        return
    plan = TilePlan.of(problem, _TILES)
    row_tiles = [slice(i, min(i + plan.rows, problem.tq)) for i in range(0, problem.tq, plan.rows)]
    groups: dict[object, list[Index]] = {}
    sizes = _bias_with_rows(piece)
    for index in plan.batches(problem.batch_shape):
        key = [part.start for part in index]
        if sizes is not None:
            key = [0 if size == 1 else at for at, size in zip(key, sizes, strict=False)]
        groups.setdefault(tuple(key), []).append(index)
    # Every n-th tile makes a share, since causal tiles grow with the row.
    shares = min(len(row_tiles), -(-_FEW_LANES // len(groups)))
    work = [
        [_Unit(index, row_tiles[share::shares], share) for index in group]
        for group in groups.values()
        for share in range(shares)
    ]
    count = min(len(work), _MOST_LANES)
    for i in range(count):
        part = work[len(work) * i // count : len(work) * (i + 1) // count]
        yield _Lane(piece, plan, list(chain.from_iterable(part)))


class _Scratch(NamedTuple):
    """Memory of a block's tiles, used again and again: fresh memory would cost page faults."""

    scores: np.ndarray
    cotangents: np.ndarray
    keys: np.ndarray
    values: np.ndarray


class _Block:
    """One slice of the batch, and where the gradients of its operands are summed."""

    def __init__(
        self, piece: _Piece, plan: TilePlan, index: Index, targets: dict[str, np.ndarray]
    ) -> None:
        problem, dtype = piece.problem, plan.dtype
        block = select(problem, piece.arrays, index)
        self.problem = problem
        self.plan = plan
        self.targets = targets
        self.operands = block._replace(
            k=fixed_layout(block.k, dtype), v=fixed_layout(block.v, dtype)
        )
        self.results = AttentionResults(*(None if x is None else x[index] for x in piece.results))
        self.entries = self.results.lse.shape[:-1]
        self.finite_keys = bool(np.isfinite(self.operands.k).all())
        sizes = (
            plan.rows * plan.keys,
            plan.rows * plan.keys,
            plan.keys * problem.d,
            plan.keys * problem.dv,
        )
        self.scratch = _Scratch(*(np.empty(math.prod(self.entries) * n, dtype) for n in sizes))

    def add(self, row_tiles: list[slice]) -> None:
        """Add what these rows contribute to the gradients."""
        for rows in row_tiles:
            self._add_rows(rows)

    def _add_rows(self, rows: slice) -> None:
        plan, problem, block = self.plan, self.problem, self.operands
        dtype, targets = plan.dtype, self.targets
        visible = Visible.of(problem, block, rows)
        dout, lse, delta, weightless = self._row_terms(rows, visible)
        q = fixed_layout(block.q[..., rows, :], dtype)
        if plan.query_scale is not None:
            q = q * plan.query_scale
        elif np.may_share_memory(q, block.k):
            q = q.copy()  # of one array with itself NumPy takes another product, of other bits
        if "dsinks" in targets:
            of_rows = -np.exp(block.sinks[..., None].astype(dtype) - lse) * delta
            of_rows[lse == np.inf] = 0  # there is no logit, nor a sink
            absent = np.broadcast_to(block.sinks[..., None] == -np.inf, of_rows.shape)
            of_rows[absent] = 0  # whatever the row holds
            _add(targets["dsinks"], of_rows.sum(axis=-1))

        # What the query of a row without weights holds reaches nothing.
        reaching = q if weightless is None else np.where(weightless[..., None], 0, q)
        finite_q = bool(np.isfinite(reaching).all())
        finite_dout = bool(np.isfinite(dout).all())
        dq = np.zeros((*lse.shape, problem.d), dtype)
        for first in range(0, problem.tk, plan.keys):
            keys = slice(first, min(first + plan.keys, problem.tk))
            if visible is not None and visible.sees_none(keys):
                continue
            seen = seen_pairs(problem, block, rows, keys, visible)
            if seen is not None and not seen.any():
                continue
            hidden = None if seen is None else ~seen
            seen_by = None if seen is None else seen.swapaxes(-1, -2)
            k = block.k[..., keys, :]

            p, slope = self._probabilities(rows, keys, q, lse, hidden)
            if "dv" in targets:
                dv = self._product(
                    self.scratch.values, p.swapaxes(-1, -2), dout, seen_by, finite_dout
                )
                _add(targets["dv"][..., keys, :], dv)
            ds = _view(self.scratch.cotangents, p.shape)
            np.matmul(dout, block.v[..., keys, :].swapaxes(-1, -2), out=ds)
            ds -= delta[..., None]
            ds *= p
            if hidden is not None:
                np.copyto(ds, 0, where=hidden)
            if weightless is not None:
                np.copyto(ds, 0, where=weightless[..., None])
            if "dbias" in targets:
                target = targets["dbias"]
                own_rows = rows if target.shape[-2] != 1 else slice(None)
                own_keys = keys if target.shape[-1] != 1 else slice(None)
                _add(target[..., own_rows, own_keys], ds)
            if slope is not None:
                ds *= slope
                if hidden is not None:
                    np.copyto(ds, 0, where=hidden)
            if "dk" in targets:
                ds_by_key = ds.swapaxes(-1, -2)
                dk = self._product(self.scratch.keys, ds_by_key, reaching, seen_by, finite_q)
                if plan.query_scale is None:
                    dk *= plan.score_scale
                _add(targets["dk"][..., keys, :], dk)
            if "dq" in targets:
                dq += self._product(None, ds, k, seen, self.finite_keys)
        if "dq" in targets:
            dq *= dtype.type(problem.scale)
            if weightless is not None:
                dq[weightless] = 0
            _add(targets["dq"][..., rows, :], dq)

    def _row_terms(
        self, rows: slice, visible: Visible | None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]:
        """Return dout, lse and delta = rowsum(dout * out) - dlse of the rows.

        An lse of -inf becomes inf: exp(s - lse) is then 0. Such rows, the last of what is returned
        unless there is none, and rows past their length count nothing.
        """
        dtype, block = self.plan.dtype, self.operands
        lse = self.results.lse[..., rows].astype(dtype)
        weightless = lse == -np.inf
        lse = np.where(np.isinf(lse), np.where(lse < 0, -lse, np.nan), lse)
        dout = np.array(self.results.dout[..., rows, :], dtype, order="C")
        delta = np.multiply(dout, self.results.out[..., rows, :], dtype=dtype).sum(axis=-1)
        if block.sinks is not None and not np.isfinite(delta).all():
            delta[self._blind(rows, visible)] = 0
        if self.results.dlse is not None:
            delta -= self.results.dlse[..., rows]
        if block.query_lengths is not None:
            past = row_numbers(rows)[:, 0] >= block.query_lengths[..., None]
            past = np.broadcast_to(past, lse.shape)
            lse[past], dout[past], delta[past] = np.inf, 0, 0
        if not weightless.any():
            return dout, lse, delta, None
        dout[weightless], delta[weightless] = 0, 0
        return dout, lse, delta, weightless

    def _blind(self, rows: slice, visible: Visible | None) -> np.ndarray:
        """Tell which rows see no key: a sink may give them an lse all the same."""
        blind = np.ones((*self.entries, rows.stop - rows.start), bool)
        for first in range(0, self.problem.tk, self.plan.keys):
            keys = slice(first, min(first + self.plan.keys, self.problem.tk))
            seen = seen_pairs(self.problem, self.operands, rows, keys, visible)
            blind &= False if seen is None else ~seen.any(axis=-1)
        return blind

    def _probabilities(
        self,
        rows: slice,
        keys: slice,
        q: np.ndarray,
        lse: np.ndarray,
        hidden: np.ndarray | None,
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Return P = exp(S - lse) of a tile and, with a softcap, the slope of S."""
        k = self.operands.k[..., keys, :]
        p = _view(self.scratch.scores, (*lse.shape, keys.stop - keys.start))
        np.matmul(q, k.swapaxes(-1, -2), out=p)
        if self.plan.score_scale is not None:
            p *= self.plan.score_scale
        cap(self.problem, p)
        slope = cap_slope(self.problem, p)
        add_terms(self.problem, self.operands, rows, keys, p)
        p -= lse[..., None]
        np.exp(p, out=p)
        if hidden is not None:
            np.copyto(p, 0, where=hidden)
        return p, slope

    def _product(
        self,
        memory: np.ndarray | None,
        weights: np.ndarray,
        x: np.ndarray,
        seen: np.ndarray | None,
        finite: bool,
    ) -> np.ndarray:
        """Return weights @ x, to which what is not seen adds nothing, whatever x holds there."""
        if not finite:
            return weighted_values(weights, x, seen)
        shape = (*weights.shape[:-1], x.shape[-1])
        return np.matmul(weights, x, out=None if memory is None else _view(memory, shape))


def _view(memory: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    return memory[: math.prod(shape)].reshape(shape)


def _add(total: np.ndarray, x: np.ndarray) -> None:
    """Add to a sum, over the axes of which it has one element."""
    axes = tuple(
        a for a, (n, of_x) in enumerate(zip(total.shape, x.shape, strict=True)) if n != of_x
    )
    total += x.sum(axis=axes, keepdims=True) if axes else x
