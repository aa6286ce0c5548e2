"""softmax, log_softmax, logsumexp and their gradients, by their definitions."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from cuflash.reference._wide import Result, Wide, ieee, narrow, widen

Axis: TypeAlias = int | tuple[int, ...] | None


class _Normalized(NamedTuple):
    seen: NDArray[np.bool_]
    weights: Wide  # exp(x - maximum), 0 where unseen
    maximum: Wide
    total: Wide  # sum of the weights: exactly 0 in a row with nothing but -inf


def _normalize(x: Wide, axis: Axis, where: ArrayLike | None) -> _Normalized:
    seen = _seen(where, x)
    maximum = np.where(seen, x, -np.inf).max(axis=axis, keepdims=True, initial=-np.inf)
    shift = np.where(maximum == -np.inf, 0, maximum)
    weights = np.where(seen, np.exp(x - shift), 0)
    return _Normalized(seen, weights, maximum, weights.sum(axis=axis, keepdims=True))


def _seen(where: ArrayLike | None, x: Wide) -> NDArray[np.bool_]:
    return np.broadcast_to(np.asarray(True if where is None else where, bool), x.shape)


def _axes(axis: Axis, ndim: int) -> tuple[int, ...]:
    if axis is None:
        return tuple(range(ndim))
    return (axis,) if isinstance(axis, int) else axis


@ieee
def softmax(
    x: ArrayLike,
    axis: Axis = -1,
    *,
    where: ArrayLike | None = None,
    precision: DTypeLike = np.longdouble,
) -> Result:
    """``exp(x - max) / sum(exp(x - max))`` over `axis`.

    Parameters
    ----------
    x
        Array of any shape.
    axis
        Axis or axes that are normalised together; None takes all.
    where
        Boolean, broadcasts to the shape of `x`; elements where it is False are unseen and get 0.
    precision
        Dtype of the computation; float32 makes this the plain formula in single precision.

    Returns
    -------
    numpy.ndarray
        float64, the shape of `x`. A row that sees nothing, or only -inf, is 0; a row that sees NaN
        or +inf is NaN at every element it sees.
    """
    n = _normalize(widen(x, precision), axis, where)
    return narrow(np.where(n.seen, n.weights / np.where(n.total == 0, 1, n.total), 0))


@ieee
def log_softmax(
    x: ArrayLike,
    axis: Axis = -1,
    *,
    where: ArrayLike | None = None,
    precision: DTypeLike = np.longdouble,
) -> Result:
    """``x - max - log(sum(exp(x - max)))`` over `axis`; -inf where :func:`softmax` is 0."""
    x = widen(x, precision)
    n = _normalize(x, axis, where)
    alive = n.seen & (n.total != 0)
    return narrow(np.where(alive, x - n.maximum - np.log(n.total), -np.inf))


@ieee
def logsumexp(
    x: ArrayLike,
    axis: Axis = -1,
    *,
    where: ArrayLike | None = None,
    keepdims: bool = False,
    precision: DTypeLike = np.longdouble,
) -> Result:
    """``max + log(sum(exp(x - max)))`` over `axis`; the max itself where that is infinite."""
    n = _normalize(widen(x, precision), axis, where)
    lse = np.where(np.isinf(n.maximum), n.maximum, n.maximum + np.log(n.total))
    return narrow(lse if keepdims else lse.squeeze(_axes(axis, lse.ndim)))


@ieee
def softmax_vjp(
    dy: ArrayLike,
    y: ArrayLike,
    axis: Axis = -1,
    *,
    where: ArrayLike | None = None,
    precision: DTypeLike = np.longdouble,
) -> Result:
    """Pull `dy` back through ``y = softmax(x)``: ``dx = y * (dy - sum(y * dy))``, 0 if unseen.

    A row that is 0 throughout, which is that of an x of -inf, has gradient 0 whatever `dy` holds.
    """
    dy, y = widen(dy, precision), widen(y, precision)
    seen = _seen(where, y)
    alive = seen & (np.where(seen, y, 0) != 0).any(axis=axis, keepdims=True)
    inner = np.where(alive, y * dy, 0).sum(axis=axis, keepdims=True)
    return narrow(np.where(alive, y * (dy - inner), 0))


@ieee
def log_softmax_vjp(
    dy: ArrayLike,
    y: ArrayLike,
    axis: Axis = -1,
    *,
    where: ArrayLike | None = None,
    precision: DTypeLike = np.longdouble,
) -> Result:
    """Pull `dy` back through ``y = log_softmax(x)``: ``dx = dy - exp(y) * sum(dy)``, 0 if unseen.

    A row that is -inf throughout has gradient 0: small changes of its x leave it where it is.
    """
    dy, y = widen(dy, precision), widen(y, precision)
    seen = _seen(where, y)
    alive = seen & (np.where(seen, y, -np.inf) != -np.inf).any(axis=axis, keepdims=True)
    total = np.where(seen, dy, 0).sum(axis=axis, keepdims=True)
    return narrow(np.where(alive, dy - np.exp(y) * total, 0))


@ieee
def logsumexp_vjp(
    dlse: ArrayLike,
    x: ArrayLike,
    lse: ArrayLike,
    axis: Axis = -1,
    *,
    where: ArrayLike | None = None,
    precision: DTypeLike = np.longdouble,
) -> Result:
    """Pull `dlse` back through ``lse = logsumexp(x)``: ``dx = dlse * exp(x - lse)``, 0 if unseen.

    `dlse` and `lse` have the reduced shape, with or without the axes of length one. A row whose
    `lse` is -inf has gradient 0.
    """
    x, dlse, lse = (widen(a, precision) for a in (x, dlse, lse))
    if lse.ndim != x.ndim:
        lse, dlse = (np.expand_dims(a, _axes(axis, x.ndim)) for a in (lse, dlse))
    alive = _seen(where, x) & (lse != -np.inf)
    return narrow(np.where(alive, dlse * np.exp(x - lse), 0))
