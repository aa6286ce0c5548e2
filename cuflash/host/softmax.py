"""Softmax, its relatives and their gradients in NumPy: rows in blocks, long rows in tiles.

A tile is copied into scratch memory, and its elements are added in an order that follows from its
length alone. So neither the strides of an array nor the rows beside it change a bit of the result,
and an axis of any stride needs no transposed copy of the array.

The methods are those of the kernels. naive makes three passes over all rows: maximum, sum, divide.
fused holds a whole row in scratch between reading it and writing it. online reads a row in tiles to
update (m, l), and once more to normalise it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np

from ..problem import SoftmaxProblem
from .blocks import BLOCK_BYTES, Box, boxes, for_each_run, memory_order, volume
from .online import divisor, logsumexp, shift

#: Longest row that `auto` holds in scratch. Memory sets it, a row for each thread: online, which
#: takes each exponential twice, took 1.5 to 2.6 times as long at all lengths from 2^16 to 2^23
#: (float32, AMD Zen 4).
_FUSED_LENGTH = 1 << 20
#: The same where rows lie side by side, of which a block takes several: lines that are read for one
#: element cost more (1.5 times as long as online at 2^16, 3 times at 2^17).
_FUSED_LENGTH_BESIDE = 1 << 16
#: An online row is cut in about this many tiles...
_ONLINE_TILES = 8
#: ...of at least and at most so many elements: a tile must outweigh some twenty NumPy calls.
_ONLINE_TILE_RANGE = 16, 1 << 14
#: Tiles up to this length lie in scratch with their rows side by side: NumPy's loops then run over
#: the rows, where loops over so few elements would cost more than the elements.
_SHORT = 64
#: Rows of a block, at least and if cache allows, where rows lie side by side in the array: lines of
#: float32, and an odd number of them, as a power of two would use a few sets of the cache only.
_BESIDE = 16, 80


def _tile_length(length: int, method: str, longest: int) -> int:
    """Return how much of a row is in scratch at a time: up to `longest` all, if methods may."""
    if method == "fused" or (method != "online" and length <= longest):
        return max(1, length)
    low, high = _ONLINE_TILE_RANGE
    return min(max(low, (1 << (length - 1).bit_length()) // _ONLINE_TILES), high)


@dataclass(frozen=True)
class _Cut:
    """A problem's rows in blocks, and each row in tiles.

    `order` transposes every operand to (kept axes from the largest stride to the smallest, reduced
    axes as they were): the first `kept` axes number the rows, and `blocks` cut them. `tiles` cut
    the rest. `beside`: neighbours in memory are of different rows.
    """

    order: tuple[int, ...]
    kept: int
    beside: bool
    blocks: list[Box]
    tiles: list[Box]

    @classmethod
    def of(cls, problem: SoftmaxProblem) -> Self:
        """Choose the cut. It reads strides only for the order of the rows and their number."""
        shape, strides, _ = problem.operand
        axes = [a for a in range(len(shape)) if a not in problem.axes]
        kept = [axes[i] for i in memory_order([strides[a] for a in axes])]
        length = math.prod(shape[a] for a in problem.axes)
        along = min((abs(strides[a]) for a in problem.axes if shape[a] > 1), default=0)
        across = min((abs(strides[a]) for a in kept if shape[a] > 1), default=0)
        beside = 0 < across < along
        longest = _FUSED_LENGTH_BESIDE if beside else _FUSED_LENGTH
        tile = _tile_length(length, problem.method, longest)
        rows = max(1, BLOCK_BYTES // problem.accumulator.itemsize // tile)
        if tile <= _SHORT or (beside and tile <= longest):
            low, high = _BESIDE
            rows = max(rows + low, min(low * rows, high))
        return cls(
            order=(*kept, *problem.axes),
            kept=len(kept),
            beside=beside,
            blocks=boxes([shape[a] for a in kept], rows),
            tiles=boxes([shape[a] for a in problem.axes], tile),
        )


class _Tile(NamedTuple):
    """Scratch memory seen in two ways: as the axes of the operand, and as (rows, elements)."""

    box: np.ndarray
    flat: np.ndarray


class _Block:
    """Rows of one block: their tiles on the way into scratch memory and out of it."""

    def __init__(self, cut: _Cut, rows: Box, mask: np.ndarray | None, scratch: np.ndarray) -> None:
        self.tiles = cut.tiles
        self.dtype = scratch.dtype
        self._kept = cut.kept
        self._beside = cut.beside
        self._rows = rows
        self._mask = mask
        self._scratch = scratch

    def _part(self, x: np.ndarray, tile: Box = ()) -> np.ndarray:
        index: tuple[Any, ...] = (*self._rows, *tile, ...)  # with ... a 0-d array stays an array
        return x[index]

    def load(self, x: np.ndarray, tile: Box, fill: float, slot: int = 0) -> _Tile:
        """Copy a tile into a slot of the scratch memory, with `fill` for what `where` hides."""
        source, kept = self._part(x, tile), self._kept
        rows, length = math.prod(source.shape[:kept]), math.prod(source.shape[kept:])
        memory = self._scratch[slot, : source.size]
        if length > _SHORT and not self._beside:
            loaded = _Tile(memory.reshape(source.shape), memory.reshape(rows, length))
        else:
            turned = memory.reshape(source.shape[kept:] + source.shape[:kept])
            axes = range(source.ndim)
            box = turned.transpose([(a + source.ndim - kept) % source.ndim for a in axes])
            loaded = _Tile(box, memory.reshape(length, rows).T)
        np.copyto(loaded.box, source)
        self._hide(loaded, tile, fill)
        return loaded

    def store(self, out: np.ndarray, tile: Box, result: _Tile, fill: float) -> None:
        """Copy a tile of the result out, with `fill` for what `where` hides."""
        self._hide(result, tile, fill)
        np.copyto(self._part(out, tile), result.box, casting="same_kind")

    def _hide(self, loaded: _Tile, tile: Box, fill: float) -> None:
        if self._mask is not None:
            np.copyto(loaded.box, fill, where=~self._part(self._mask, tile))

    def column(self, x: np.ndarray) -> np.ndarray:
        """Return a copy of this block's rows of a reduced array, as (rows, 1)."""
        return self._part(x).astype(self.dtype).reshape(-1, 1)

    def store_column(self, out: np.ndarray, column: np.ndarray) -> None:
        """Write (rows, 1) to a reduced array."""
        target = self._part(out)
        np.copyto(target, column.reshape(target.shape), casting="same_kind")

    def constant(self, value: float) -> np.ndarray:
        """Return (rows, 1) of one value."""
        return np.full((volume(self._rows), 1), value, self.dtype)

    def sum(self, x: np.ndarray) -> np.ndarray:
        """Sum (rows, elements) in scratch to (rows, 1), in an order fixed by the length alone."""
        rows, length = x.shape
        work: np.ndarray
        if length > _SHORT:
            if x.flags.c_contiguous:
                return np.add.reduce(x, axis=1, keepdims=True)
            work = self._scratch[-1, : x.size].reshape(rows, length)
            np.copyto(work, x)
            return np.add.reduce(work, axis=1, keepdims=True)
        columns = x.T
        work = self._scratch[-1, : (length + 1) // 2 * rows].reshape(-1, rows)
        while length > 1:
            half, left = length // 2, (length + 1) // 2
            np.add(columns[:half], columns[left:length], out=work[:half])
            work[half:left] = columns[half:left]
            columns, length = work, left
        return columns[:length].T.copy()


# Each function below does one block. x, y, dy are operands of the full shape, dlse, lse, maximum
# and normalizer reduced ones, m and l this block's (rows, 1) of maximum and normalizer.


def _maximum(block: _Block, x: np.ndarray) -> np.ndarray:
    m = block.constant(-np.inf)
    for tile in block.tiles:
        np.maximum(m, block.load(x, tile, -np.inf).flat.max(axis=1, keepdims=True), out=m)
    return m


def _exp(x: np.ndarray, m: np.ndarray) -> np.ndarray:
    """Replace x in scratch by exp(x - m)."""
    np.subtract(x, shift(m), out=x)
    return np.exp(x, out=x)


def _sum(block: _Block, x: np.ndarray, m: np.ndarray) -> np.ndarray:
    total = block.constant(0)
    for tile in block.tiles:
        total += block.sum(_exp(block.load(x, tile, -np.inf).flat, m))
    return total


def _online(block: _Block, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, _Tile | None]:
    """Return (m, l) after one pass, and the last tile, left in scratch as exp(x - m)."""
    m, total, loaded = block.constant(-np.inf), block.constant(0), None
    for tile in block.tiles:
        loaded = block.load(x, tile, -np.inf)
        above = np.maximum(m, loaded.flat.max(axis=1, keepdims=True))
        total *= _exp(m, above)
        total += block.sum(_exp(loaded.flat, above))
        m = above
    return m, total, loaded


def _divide(
    block: _Block,
    x: np.ndarray,
    out: np.ndarray,
    m: np.ndarray,
    total: np.ndarray,
    exponentials: _Tile | None = None,
) -> None:
    """Write exp(x - m) / l; a row of one tile may have its exponentials in scratch already."""
    for tile in block.tiles:
        if exponentials is None or len(block.tiles) > 1:
            loaded = block.load(x, tile, -np.inf)
            _exp(loaded.flat, m)
        else:
            loaded = exponentials
        np.divide(loaded.flat, divisor(total), out=loaded.flat)
        block.store(out, tile, loaded, 0)


def _subtract(
    block: _Block, x: np.ndarray, out: np.ndarray, m: np.ndarray, total: np.ndarray
) -> None:
    """Write x - m - log(l)."""
    log_total = np.log(divisor(total))
    for tile in block.tiles:
        loaded = block.load(x, tile, -np.inf)
        np.subtract(loaded.flat, shift(m), out=loaded.flat)
        np.subtract(loaded.flat, log_total, out=loaded.flat)
        block.store(out, tile, loaded, -np.inf)


def _softmax(block: _Block, x: np.ndarray, out: np.ndarray) -> None:
    m, total, exponentials = _online(block, x)
    _divide(block, x, out, m, total, exponentials)


def _log_softmax(block: _Block, x: np.ndarray, out: np.ndarray) -> None:
    m, total, _ = _online(block, x)
    _subtract(block, x, out, m, total)


def _logsumexp(block: _Block, x: np.ndarray, out: np.ndarray) -> None:
    m, total, _ = _online(block, x)
    block.store_column(out, logsumexp(m, total))


def _state(block: _Block, x: np.ndarray, maximum: np.ndarray, normalizer: np.ndarray) -> None:
    m, total, _ = _online(block, x)
    block.store_column(maximum, m)
    block.store_column(normalizer, total)


def _state_logsumexp(
    block: _Block, maximum: np.ndarray, normalizer: np.ndarray, out: np.ndarray
) -> None:
    block.store_column(out, logsumexp(block.column(maximum), block.column(normalizer)))


def _state_apply(
    block: _Block, x: np.ndarray, maximum: np.ndarray, normalizer: np.ndarray, out: np.ndarray
) -> None:
    m = block.column(maximum)
    y = _exp(block.column(x), m) / divisor(block.column(normalizer))
    y[m == -np.inf] = 0
    block.store_column(out, y)


def _softmax_vjp(block: _Block, dy: np.ndarray, y: np.ndarray, out: np.ndarray) -> None:
    """Write y * (dy - sum(y * dy)), and 0 in rows whose y is all 0, whatever dy holds."""
    inner = block.constant(0)
    for tile in block.tiles:
        product = block.load(y, tile, 0).flat
        product *= block.load(dy, tile, 0, slot=1).flat
        inner += block.sum(product)
    empty = ~np.isfinite(inner)
    if empty.any():  # with a finite sum, an empty row's 0 * (dy - 0) is 0 already
        for tile in block.tiles:
            empty &= (block.load(y, tile, 0).flat == 0).all(axis=1, keepdims=True)
    for tile in block.tiles:
        loaded, gradient = block.load(y, tile, 0), block.load(dy, tile, 0, slot=1)
        gradient.flat[...] -= inner
        gradient.flat[...] *= loaded.flat
        np.copyto(gradient.flat, 0, where=empty)
        block.store(out, tile, gradient, 0)


def _log_softmax_vjp(block: _Block, dy: np.ndarray, y: np.ndarray, out: np.ndarray) -> None:
    """Write dy - exp(y) * sum(dy), and 0 in rows whose y is all -inf."""
    summed, top = block.constant(0), _maximum(block, y)
    for tile in block.tiles:
        summed += block.sum(block.load(dy, tile, 0).flat)
    for tile in block.tiles:
        loaded, gradient = block.load(y, tile, -np.inf), block.load(dy, tile, 0, slot=1)
        np.exp(loaded.flat, out=loaded.flat)
        np.multiply(loaded.flat, summed, out=loaded.flat)
        np.subtract(gradient.flat, loaded.flat, out=gradient.flat)
        np.copyto(gradient.flat, 0, where=top == -np.inf)
        block.store(out, tile, gradient, 0)


def _logsumexp_vjp(
    block: _Block, dlse: np.ndarray, x: np.ndarray, lse: np.ndarray, out: np.ndarray
) -> None:
    """Write dlse * exp(x - lse), and 0 in rows whose lse is -inf."""
    cotangent, log = block.column(dlse), block.column(lse)
    for tile in block.tiles:
        loaded = block.load(x, tile, -np.inf)
        np.multiply(_exp(loaded.flat, log), cotangent, out=loaded.flat)
        np.copyto(loaded.flat, 0, where=log == -np.inf)
        block.store(out, tile, loaded, 0)


#: One function for each operation: (block, *inputs, *outputs).
_OPERATIONS: dict[str, Callable[..., None]] = {
    "softmax": _softmax,
    "log_softmax": _log_softmax,
    "logsumexp": _logsumexp,
    "softmax_state": _state,
    "state_logsumexp": _state_logsumexp,
    "state_apply": _state_apply,
    "softmax_vjp": _softmax_vjp,
    "log_softmax_vjp": _log_softmax_vjp,
    "logsumexp_vjp": _logsumexp_vjp,
}
_NORMALISE = {"softmax": _divide, "log_softmax": _subtract}


def softmax(
    problem: SoftmaxProblem,
    inputs: Sequence[np.ndarray],
    where: np.ndarray | None,
    outputs: Sequence[np.ndarray],
) -> None:
    """Fill `outputs` as `problem.operation` says; inputs and outputs in the order of the problem.

    The output of softmax and log_softmax may be the input itself.
    """
    cut = _Cut.of(problem)
    shape, dtype = problem.operand.shape, problem.accumulator
    operands = [
        np.broadcast_to(x, spec.shape).transpose(cut.order)
        for x, spec in zip(inputs, problem.inputs, strict=True)
    ]
    results = [x.transpose(cut.order) for x in outputs]
    mask = None if where is None else np.broadcast_to(where, shape).transpose(cut.order)
    capacity = max(map(volume, cut.blocks), default=0) * max(map(volume, cut.tiles), default=0)

    def each(work: Callable[[int, _Block], None]) -> None:
        def run(blocks: range) -> None:
            scratch = np.empty((2, capacity), dtype)
            for i in blocks:
                work(i, _Block(cut, cut.blocks[i], mask, scratch))

        for_each_run(len(cut.blocks), run)

    if problem.method == "naive":
        (x,), (out,) = operands, results
        m: dict[int, np.ndarray] = {}
        total: dict[int, np.ndarray] = {}
        each(lambda i, block: m.update({i: _maximum(block, x)}))
        each(lambda i, block: total.update({i: _sum(block, x, m[i])}))
        each(lambda i, block: _NORMALISE[problem.operation](block, x, out, m[i], total[i]))
    else:
        operation = _OPERATIONS[problem.operation]
        each(lambda _, block: operation(block, *operands, *results))
