"""Fused chains in NumPy: rows in blocks that stay in cache, their mask drawn as they are read."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ..problem import accumulator
from ..problem_fused import (
    LANE_VALUES,
    LANES,
    Dropout,
    LayerNormArrays,
    LayerNormGrads,
    LayerNormProblem,
    MatmulProblem,
)
from .blocks import BLOCK_BYTES, boxes, for_each_run

#: Elements of the result that are computed at a time: the product of a block outweighs the call.
_MATMUL_ELEMENTS = 1 << 20

# Constants of Philox4x32 (Salmon, Moraes, Dror and Shaw, 2011): multipliers, and what is added to
# the halves of the key from round to round.
_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def matmul_bias_activation(
    problem: MatmulProblem, a: np.ndarray, b: np.ndarray, bias: np.ndarray, out: np.ndarray
) -> None:
    """Fill `out`, one block of rows at a time: of the product only that block is kept."""
    wide = accumulator(problem.dtype)
    a = np.broadcast_to(a, problem.a.shape)
    shift = bias.astype(wide)
    rows = max(1, _MATMUL_ELEMENTS // max(1, out.shape[-1]))
    with np.errstate(all="ignore"):
        # As in `numpy.matmul`, b is converted once for all entries that share it.
        factors = np.broadcast_to(b.astype(wide, copy=False), problem.b.shape)
        for index in np.ndindex(problem.batch_shape):
            for start in range(0, out.shape[-2], rows):
                part = slice(start, start + rows)
                product = a[index][part].astype(wide, copy=False) @ factors[index]
                product += shift
                out[index][part] = ACTIVATIONS[problem.activation](product)


def _relu(x: np.ndarray) -> np.ndarray:
    return np.maximum(x, 0, out=x)


def _gelu(x: np.ndarray) -> np.ndarray:
    # NumPy has no error function; the one of Python's math is exact to the last place or two.
    scaled = (x * x.dtype.type(-math.sqrt(0.5))).ravel().tolist()
    x *= np.fromiter(map(math.erfc, scaled), x.dtype, x.size).reshape(x.shape)
    x *= x.dtype.type(0.5)
    return x


def _gelu_tanh(x: np.ndarray) -> np.ndarray:
    number = x.dtype.type
    inner = number(math.sqrt(2 / math.pi)) * (x + number(0.044715) * x * x * x)
    return number(0.5) * x * (number(1) + np.tanh(inner))


ACTIVATIONS: dict[str | None, Callable[[np.ndarray], np.ndarray]] = {
    None: lambda x: x,
    "relu": _relu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
}


# ------------------------------------------------------------------------------------------ masks


def philox(seed: int, counters: np.ndarray) -> np.ndarray:
    """Return the random bits of counters below 2^64, one row of four 32-bit words each."""
    keys = [seed >> 32 * half & 0xFFFFFFFF for half in range(2)]
    x, y = counters & _LOW, counters >> _HALF
    z = w = np.zeros_like(x)
    for turn in range(_ROUNDS):
        low, high = (
            np.uint64((key + turn * step) & 0xFFFFFFFF)
            for key, step in zip(keys, _WEYL, strict=True)
        )
        first, second = x * _MULTIPLIERS[0], z * _MULTIPLIERS[1]
        x, y = (second >> _HALF) ^ y ^ low, second & _LOW
        z, w = (first >> _HALF) ^ w ^ high, first & _LOW
    return np.stack((x, y, z, w), axis=-1).astype("<u4")


def kept(dropout: Dropout, first: int, count: int) -> np.ndarray:
    """Return which of `count` elements from number `first` on are kept."""
    begin, end = first // LANES, -(-(first + count) // LANES)
    bits = philox(dropout.seed, np.arange(begin, end, dtype=np.uint64) + np.uint64(dropout.offset))
    skipped = first - begin * LANES
    return bits.view("<u2").reshape(-1)[skipped : skipped + count] >= dropout.threshold


def drop(dropout: Dropout, x: np.ndarray, first: int) -> np.ndarray:
    """Drop elements of rows that follow each other from number `first` on."""
    if not dropout.threshold:
        return x
    if dropout.threshold == LANE_VALUES:
        return np.zeros_like(x)
    mask = kept(dropout, first, x.size).reshape(x.shape)
    return np.where(mask, x * x.dtype.type(dropout.scale), x.dtype.type(0))


# ------------------------------------------------------------------------------------- LayerNorm


def normalize(z: np.ndarray, eps: float) -> tuple[np.ndarray, np.ndarray]:
    """Make rows of mean 0 and variance 1; return their mean and 1 / sqrt(variance + eps)."""
    mean = z.mean(axis=-1, keepdims=True)
    z -= mean
    variance = np.square(z).mean(axis=-1, keepdims=True)
    rstd = 1 / np.sqrt(variance + z.dtype.type(eps))
    z *= rstd
    return mean, rstd


class _Rows:
    """The operands of a call as (rows, columns), read in blocks in the accumulator's precision."""

    def __init__(
        self, problem: LayerNormProblem, dropout: Dropout, arrays: LayerNormArrays
    ) -> None:
        self.wide, self.columns = problem.accumulator, problem.columns
        self.shape, self._dropout = problem.rows_shape, dropout
        size = max(1, BLOCK_BYTES // self.wide.itemsize // self.columns)
        self.boxes = boxes(self.shape, size)
        self._x, self._residual = arrays.x, arrays.residual
        self.bias, self.gamma = (
            np.asarray(x).astype(self.wide) for x in (arrays.bias, arrays.gamma)
        )

    def read(self, x: np.ndarray, box: tuple[slice, ...]) -> np.ndarray:
        """Return the rows of a box."""
        return x[box].astype(self.wide).reshape(-1, self.columns)

    def drop(self, x: np.ndarray, box: tuple[slice, ...]) -> np.ndarray:
        """Drop elements of the rows of a box, which follow each other in C order."""
        first = 0
        for size, part in zip(self.shape, box, strict=True):
            first = first * size + part.start
        return drop(self._dropout, x, first * self.columns)

    def hidden(self, box: tuple[slice, ...]) -> np.ndarray:
        """Return dropout(x + bias) + residual of the rows of a box."""
        z = self.drop(self.read(self._x, box) + self.bias, box)
        if self._residual is not None:
            z += self.read(self._residual, box)
        return z


def dropout_bias_layer_norm(
    problem: LayerNormProblem,
    dropout: Dropout,
    arrays: LayerNormArrays,
    y: np.ndarray,
    mean: np.ndarray | None,
    rstd: np.ndarray | None,
) -> None:
    """Fill `y` and, unless None, `mean` and `rstd`, one block of rows at a time."""
    rows = _Rows(problem, dropout, arrays)
    beta = arrays.beta.astype(rows.wide)

    def work(run: range) -> None:
        for i in run:
            box = rows.boxes[i]
            z = rows.hidden(box)
            average, scale = normalize(z, problem.eps)
            z *= rows.gamma
            z += beta
            y[box] = z.reshape(y[box].shape)
            for target, values in ((mean, average), (rstd, scale)):
                if target is not None:
                    target[box] = values.reshape(target[box].shape)

    for_each_run(len(rows.boxes), work)


def dropout_bias_layer_norm_vjp(
    problem: LayerNormProblem, dropout: Dropout, arrays: LayerNormArrays, grads: LayerNormGrads
) -> None:
    """Fill the gradients; sums over rows are kept in float64, in the order of the blocks."""
    rows = _Rows(problem, dropout, arrays)
    sums = np.zeros((len(rows.boxes), 3, rows.columns))

    def work(run: range) -> None:
        for i in run:
            box = rows.boxes[i]
            mean, rstd = (np.asarray(x)[box].reshape(-1, 1) for x in (arrays.mean, arrays.rstd))
            xhat = (rows.hidden(box) - mean) * rstd
            dy = rows.read(arrays.dy, box)
            scaled = dy * rows.gamma
            along = (scaled * xhat).mean(axis=-1, keepdims=True)
            dz = (scaled - scaled.mean(axis=-1, keepdims=True) - xhat * along) * rstd
            if grads.dresidual is not None:
                grads.dresidual[box] = dz.reshape(grads.dresidual[box].shape)
            dx = rows.drop(dz, box)
            grads.dx[box] = dx.reshape(grads.dx[box].shape)
            for total, terms in zip(sums[i], (dx, dy * xhat, dy), strict=True):
                terms.sum(axis=0, dtype=np.float64, out=total)

    for_each_run(len(rows.boxes), work)
    results: tuple[Any, ...] = (grads.dbias, grads.dgamma, grads.dbeta)
    for target, total in zip(results, sums.sum(axis=0), strict=True):
        target[...] = total
