"""Fused chains, and the random bits of dropout, by their definitions."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from cuflash.reference._wide import Result, Wide, ieee, narrow, widen

_WORD = 2**32


def philox(key: tuple[int, int], counter: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10: four random words of 32 bits for a key of two and a counter of four.

    Notes
    -----
    J. K. Salmon, M. A. Moraes, R. O. Dror and D. E. Shaw, "Parallel random numbers: as easy as 1,
    2, 3", SC 2011, section 4.3 and the Random123 library.
    """
    (k0, k1), (c0, c1, c2, c3) = key, counter
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c0, _WORD)
        high1, low1 = divmod(0xCD9E8D57 * c2, _WORD)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) % _WORD, (k1 + 0xBB67AE85) % _WORD
    return c0, c1, c2, c3


def dropout_mask(
    shape: tuple[int, ...], *, p: float, seed: int, offset: int = 0
) -> NDArray[np.bool_]:
    """Which elements of an array dropout keeps.

    Element e, in C order, has lane e % 8 of 16 bits of the counter e // 8 + offset, and is kept if
    that is at least round(p * 65536). Lanes 2 i and 2 i + 1 are the lower and the upper half of
    word i.
    """
    key = seed % _WORD, seed // _WORD
    lanes: list[int] = []
    for number in range(-(-math.prod(shape) // 8)):
        high, low = divmod(number + offset, _WORD)
        for word in philox(key, (low, high, 0, 0)):
            lanes += word % 2**16, word // 2**16
    kept = np.array(lanes[: math.prod(shape)], np.int64) >= round(p * 2**16)
    return kept.reshape(shape)


@ieee
def matmul_bias_activation(
    a: ArrayLike,
    b: ArrayLike,
    bias: ArrayLike,
    *,
    activation: str | None = "relu",
    precision: DTypeLike = np.longdouble,
) -> Result:
    """``activation(a @ b + bias)``; `precision` is the dtype of the computation."""
    x = np.matmul(widen(a, precision), widen(b, precision)) + widen(bias, precision)
    number = x.dtype.type
    if activation == "relu":
        x = np.where(x < 0, number(0), x)
    elif activation == "gelu":
        normal = np.vectorize(lambda v: 0.5 * math.erfc(-float(v) / math.sqrt(2)), otypes=[x.dtype])
        x = x * (normal(x) if x.size else x)
    elif activation == "gelu_tanh":
        x = x / 2 * (1 + np.tanh(np.sqrt(number(2 / np.pi)) * (x + number(0.044715) * x**3)))
    return narrow(x)


class LayerNormResult(NamedTuple):
    """What `dropout_bias_layer_norm` returns, and the normalised rows before gamma and beta."""

    y: Result
    mean: Result
    rstd: Result
    normalized: Result


def _hidden(
    x: Wide, bias: ArrayLike, kept: NDArray[np.bool_], p: float, residual: ArrayLike | None
) -> Wide:
    share = round(p * 2**16) / 2**16
    # A share of 1 keeps nothing, to be divided by 1 - 1.
    z = np.where(kept, (x + widen(bias, x.dtype)) / x.dtype.type(1 - share if share < 1 else 1), 0)
    return z if residual is None else z + widen(residual, x.dtype)


@ieee
def dropout_bias_layer_norm(
    x: ArrayLike,
    bias: ArrayLike,
    gamma: ArrayLike,
    beta: ArrayLike,
    *,
    p: float,
    seed: int,
    offset: int = 0,
    eps: float = 1e-5,
    residual: ArrayLike | None = None,
    precision: DTypeLike = np.longdouble,
) -> LayerNormResult:
    """LayerNorm of ``dropout(x + bias) + residual`` over the last axis."""
    wide = widen(x, precision)
    kept = dropout_mask(wide.shape, p=p, seed=seed, offset=offset)
    z = _hidden(wide, bias, kept, p, residual)
    mean = z.mean(axis=-1, keepdims=True)
    rstd = 1 / np.sqrt(((z - mean) ** 2).mean(axis=-1, keepdims=True) + wide.dtype.type(eps))
    normalized = (z - mean) * rstd
    y = normalized * widen(gamma, precision) + widen(beta, precision)
    return LayerNormResult(
        narrow(y), narrow(mean[..., 0]), narrow(rstd[..., 0]), narrow(normalized)
    )


class LayerNormReferenceGrads(NamedTuple):
    """Gradients of x, bias, gamma, beta and the residual."""

    dx: Result
    dbias: Result
    dgamma: Result
    dbeta: Result
    dresidual: Result


@ieee
def dropout_bias_layer_norm_vjp(
    dy: ArrayLike,
    x: ArrayLike,
    bias: ArrayLike,
    gamma: ArrayLike,
    mean: ArrayLike,
    rstd: ArrayLike,
    *,
    p: float,
    seed: int,
    offset: int = 0,
    residual: ArrayLike | None = None,
    precision: DTypeLike = np.longdouble,
) -> LayerNormReferenceGrads:
    """Gradients of :func:`dropout_bias_layer_norm` at its statistics `mean` and `rstd`."""
    wide, cotangent = widen(x, precision), widen(dy, precision)
    kept = dropout_mask(wide.shape, p=p, seed=seed, offset=offset)
    scale = widen(rstd, precision)[..., None]
    xhat = (_hidden(wide, bias, kept, p, residual) - widen(mean, precision)[..., None]) * scale
    scaled = cotangent * widen(gamma, precision)
    dz = scale * (
        scaled
        - scaled.mean(axis=-1, keepdims=True)
        - xhat * (scaled * xhat).mean(axis=-1, keepdims=True)
    )
    share = round(p * 2**16) / 2**16
    dx = np.where(kept, dz / dz.dtype.type(1 - share if share < 1 else 1), 0)
    rows = tuple(range(wide.ndim - 1))
    return LayerNormReferenceGrads(
        narrow(dx),
        narrow(dx.sum(axis=rows)),
        narrow((cotangent * xhat).sum(axis=rows)),
        narrow(cotangent.sum(axis=rows)),
        narrow(dz),
    )
