"""What must hold of fused chains: drawn cases, error bounds, and properties of callables.

The bounds have the form of the accuracy contract (see `bounds`). For a product, M = abs(a) @ abs(b)
+ abs(bias) is what the terms of a sum add up to if none cancels, and no activation has a slope
above 1.13:

    abs(out - ref) <= 2 * max abs(naive - ref) + 4 * eps * abs(ref) + 5 * eps_acc * M

For LayerNorm let S be the largest abs(z) * rstd of a row, which tells by how much z - mean cancels:

    abs(y - ref) <= 2 * max abs(naive - ref) + 4 * eps * (abs(xhat * gamma) + abs(beta))
                    + 4 * eps_acc * (1 + S) * (1 + abs(xhat)) * abs(gamma)

and likewise, relative to their size, mean (S) and rstd (1 + S). Gradients are allowed four times as
much, with the terms that they add up in place of V.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from cuflash import reference
from cuflash.problem_fused import ACTIVATIONS
from cuflash.testing.bounds import (
    SMALLEST_NORMAL,
    SMALLEST_SUBNORMAL,
    UNIT_ROUNDOFF,
    Expected,
    Floats,
    accumulator,
    assert_close,
)
from cuflash.testing.problems import dtype_of

DTYPES = ("float64", "float32", "float16", "bfloat16")
#: How an operand lies in memory.
LAYOUTS = ("contiguous", "transposed", "steps", "reversed", "offset")

Call = Callable[..., Any]


def laid_out(x: NDArray[Any], layout: str) -> NDArray[Any]:
    """Return a view equal to `x` of memory that is arranged in another way."""
    if layout == "transposed" and x.ndim > 1:
        return x.swapaxes(-1, -2).copy().swapaxes(-1, -2)
    if layout == "steps":
        wide = np.zeros((*x.shape[:-1], 2 * x.shape[-1]), x.dtype)
        wide[..., ::2] = x
        return wide[..., ::2]
    if layout == "reversed":
        return x[..., ::-1].copy()[..., ::-1]
    if layout == "offset":
        memory = np.zeros(x.size + 1, x.dtype)
        memory[1:] = x.ravel()
        return memory[1:].reshape(x.shape)
    return x


@dataclass(frozen=True)
class MatmulCase:
    """A call of `matmul_bias_activation`."""

    dtype: str
    batch: tuple[tuple[int, ...], tuple[int, ...]]
    sizes: tuple[int, int, int]
    layouts: tuple[str, str, str]
    activation: str | None
    seed: int

    def operands(self) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        """Return a, b and bias."""
        rng = np.random.default_rng(self.seed)
        m, k, n = self.sizes
        shapes = ((*self.batch[0], m, k), (*self.batch[1], k, n), (n,))
        a, b, bias = (
            laid_out(rng.standard_normal(shape).astype(dtype_of(self.dtype)), layout)
            for shape, layout in zip(shapes, self.layouts, strict=True)
        )
        return a, b, bias


@st.composite
def matmul_cases(
    draw: st.DrawFn, *, dtypes: tuple[str, ...] = DTYPES, largest: int = 40
) -> MatmulCase:
    """Draw products of matrices up to `largest`."""
    size = st.integers(0, largest) | st.sampled_from([1, 8, 16, 32])
    batch = st.sampled_from([((), ()), ((2,), ()), ((), (3,)), ((2, 1), (3,)), ((0,), (1,))])
    layout = st.sampled_from(LAYOUTS)
    return MatmulCase(
        draw(st.sampled_from(dtypes)),
        draw(batch),
        draw(st.tuples(size, size, size)),
        draw(st.tuples(layout, layout, layout)),
        draw(st.sampled_from(ACTIVATIONS)),
        draw(st.integers(0, 2**32 - 1)),
    )


def expect_matmul(a: Any, b: Any, bias: Any, activation: str | None) -> Expected:
    """Return what `matmul_bias_activation` must give, by the accuracy contract."""
    dtype = a.dtype.name
    eps, eps_acc = UNIT_ROUNDOFF[dtype], UNIT_ROUNDOFF[accumulator(dtype)]
    compute = partial(reference.matmul_bias_activation, a, b, bias, activation=activation)
    value = compute()
    naive = compute(precision=accumulator(dtype)).astype(a.dtype).astype(np.float64)
    wide = [np.abs(x.astype(np.float64)) for x in (a, b, bias)]
    terms = wide[0] @ wide[1] + wide[2]
    bound = 2 * _worst(naive, value) + 4 * eps * np.abs(value) + 5 * eps_acc * terms
    return Expected(value, bound + _lost(dtype))


def _worst(naive: Floats, value: Floats) -> float:
    return float(np.abs(naive - value).max(initial=0))


def _lost(dtype: str) -> float:
    """Return what may be flushed to zero, and the distance of subnormal numbers."""
    return SMALLEST_NORMAL[accumulator(dtype)] + SMALLEST_SUBNORMAL[dtype]


def matmul_matches_oracle(call: Call, case: MatmulCase) -> None:
    """Keep the bound, in a fresh result and in a poisoned `out`."""
    a, b, bias = case.operands()
    expected = expect_matmul(a, b, bias, case.activation)
    out = call(a, b, bias, activation=case.activation)
    assert (out.dtype, out.shape) == (a.dtype, expected.value.shape)
    assert_close("out", out, expected, case)
    given = np.full(expected.value.shape, np.nan, a.dtype)
    assert call(a, b, bias, activation=case.activation, out=given) is given
    np.testing.assert_array_equal(given, out)


def matmul_rows_are_independent(call: Call, case: MatmulCase) -> None:
    """NaN in a row of a, or in a column of b, reaches that row or column alone, bit for bit."""
    a, b, bias = (x.copy() for x in case.operands())
    clean = call(a, b, bias, activation=case.activation)
    if not clean.size or not a.shape[-1]:
        return
    rng = np.random.default_rng(case.seed + 1)
    row, column = rng.integers(a.shape[-2]), rng.integers(b.shape[-1])
    a[..., row, rng.integers(a.shape[-1])] = np.nan
    b[..., rng.integers(b.shape[-2]), column] = np.nan
    out = call(a, b, bias, activation=case.activation)
    assert np.isnan(out[..., row, :]).all()
    assert np.isnan(out[..., column]).all()
    rest = np.ones(clean.shape, bool)
    rest[..., row, :] = rest[..., column] = False
    np.testing.assert_array_equal(out[rest], clean[rest])


def matmul_of_extremes(call: Call, case: MatmulCase) -> None:
    """Infinite terms add up as IEEE has it, and the largest number is one like others."""
    a, b, bias = (x.copy() for x in case.operands())
    if not all(x.size for x in (a, b, bias)):
        return
    rng = np.random.default_rng(case.seed + 1)
    row, term, column = (rng.integers(size) for size in case.sizes)
    largest = row - 1  # another row, if there is one
    a[..., largest, :] = 0
    a[..., largest, term] = ml_dtypes.finfo(a.dtype).max  # type: ignore[no-untyped-call]
    a[..., row, term] = np.inf
    b[..., term, :] /= 64
    b[..., term, column] = 0
    with np.errstate(invalid="ignore"):
        value = reference.matmul_bias_activation(a, b, bias, activation=None)
        out = call(a, b, bias, activation=None).astype(np.float64)
    finite = np.isfinite(value)
    np.testing.assert_array_equal(out[~finite], value[~finite])
    assert np.isfinite(out[finite]).all()
    if case.sizes[0] > 1:
        tolerance = 8 * UNIT_ROUNDOFF[case.dtype]
        np.testing.assert_allclose(out[..., largest, :], value[..., largest, :], rtol=tolerance)


MATMUL_PROPERTIES: Mapping[str, Callable[[Call, MatmulCase], None]] = {
    "matches_oracle": matmul_matches_oracle,
    "rows_are_independent": matmul_rows_are_independent,
    "of_extremes": matmul_of_extremes,
}


# -------------------------------------------------------------------------------------- LayerNorm


@dataclass(frozen=True)
class LayerNormCase:
    """A call of `dropout_bias_layer_norm`."""

    dtype: str
    shape: tuple[int, ...]
    layout: str
    p: float
    key: int
    offset: int
    eps: float
    residual: bool
    mean: float
    seed: int

    @property
    def options(self) -> dict[str, Any]:
        """Options of the mask."""
        return {"p": self.p, "seed": self.key, "offset": self.offset}

    def operands(self) -> dict[str, Any]:
        """Return x, bias, gamma, beta and, perhaps, residual."""
        rng = np.random.default_rng(self.seed)
        vector = self.shape[-1:]
        shapes = {"x": self.shape, "bias": vector, "gamma": vector, "beta": vector}
        if self.residual:
            shapes["residual"] = self.shape
        found = {
            name: rng.standard_normal(shape).astype(dtype_of(self.dtype))
            for name, shape in shapes.items()
        }
        found["x"] = (found["x"] + found["x"].dtype.type(self.mean)).astype(found["x"].dtype)
        return {name: laid_out(x, self.layout) for name, x in found.items()}

    def cotangent(self) -> NDArray[Any]:
        """Return dy."""
        dy = np.random.default_rng(self.seed + 1).standard_normal(self.shape)
        return laid_out(dy.astype(dtype_of(self.dtype)), self.layout)


@st.composite
def layer_norm_cases(
    draw: st.DrawFn,
    *,
    dtypes: tuple[str, ...] = DTYPES,
    columns: tuple[int, ...] = (1, 5, 8, 16, 37, 64, 100, 256),
) -> LayerNormCase:
    """Draw calls with a few rows of one of the lengths `columns`."""
    rows = draw(st.sampled_from([(), (1,), (3,), (2, 3), (0,), (1, 5, 1)]))
    return LayerNormCase(
        draw(st.sampled_from(dtypes)),
        (*rows, draw(st.sampled_from(columns))),
        draw(st.sampled_from(LAYOUTS)),
        draw(st.sampled_from([0.0, 0.1, 0.5, 0.9, 1 - 2.0**-20])),
        draw(st.integers(0, 2**64 - 1)),
        draw(st.sampled_from([0, 1, 2**32 - 1, 2**40])),
        draw(st.sampled_from([1e-5, 1e-3, 1.0])),
        draw(st.booleans()),
        draw(st.sampled_from([0.0, 3.0, -40.0])),
        draw(st.integers(0, 2**32 - 1)),
    )


@dataclass(frozen=True)
class _Sizes:
    """Oracle and sizes that bounds are made of."""

    result: reference.LayerNormResult
    cancelled: Floats
    """1 + S of each row."""
    naive: reference.LayerNormResult


def _sizes(case: LayerNormCase) -> _Sizes:
    operands = case.operands()
    compute = partial(reference.dropout_bias_layer_norm, **operands, **case.options, eps=case.eps)
    result = compute()
    z = result.normalized / result.rstd[..., None] + result.mean[..., None]
    cancelled = 1 + np.abs(z).max(axis=-1) * result.rstd
    return _Sizes(result, cancelled, compute(precision=accumulator(case.dtype)))


def expect_layer_norm(case: LayerNormCase) -> tuple[Expected, Expected, Expected]:
    """Return what y, mean and rstd must be, by the accuracy contract."""
    sizes, operands = _sizes(case), case.operands()
    eps, eps_acc = UNIT_ROUNDOFF[case.dtype], UNIT_ROUNDOFF[accumulator(case.dtype)]
    y, mean, rstd, xhat = sizes.result
    gamma, beta = (np.abs(operands[name].astype(np.float64)) for name in ("gamma", "beta"))
    naive = sizes.naive.y.astype(dtype_of(case.dtype)).astype(np.float64)
    loss = 4 * eps_acc * sizes.cancelled
    bound = (
        2 * _worst(naive, y)
        + 4 * eps * (np.abs(xhat) * gamma + beta)
        + loss[..., None] * (1 + np.abs(xhat)) * gamma
    )
    mean_bound = 2 * _worst(sizes.naive.mean, mean) + loss / rstd
    rstd_bound = 2 * _worst(sizes.naive.rstd, rstd) + loss * rstd
    lost = _lost(case.dtype)
    return (
        Expected(y, bound + lost),
        Expected(mean, mean_bound + lost),
        Expected(rstd, rstd_bound + lost),
    )


def expect_layer_norm_vjp(case: LayerNormCase, mean: Any, rstd: Any) -> dict[str, Expected]:
    """Return what the gradients must be, at the statistics that the forward returned."""
    operands, dy = case.operands(), case.cotangent()
    operands.pop("beta")
    compute = partial(
        reference.dropout_bias_layer_norm_vjp,
        dy, **operands, mean=mean, rstd=rstd, **case.options,
    )  # fmt: skip
    exact, naive = compute(), compute(precision=accumulator(case.dtype))
    sizes = _sizes(case)
    xhat = np.abs(sizes.result.normalized)
    size, scale = np.abs(dy.astype(np.float64)), np.abs(np.asarray(rstd, np.float64))[..., None]
    scaled = size * np.abs(operands["gamma"].astype(np.float64))
    terms_z = scale * (
        scaled
        + scaled.mean(axis=-1, keepdims=True)
        + (1 + xhat) * (scaled * (1 + xhat)).mean(axis=-1, keepdims=True)
    )
    kept = 65536 - round(case.p * 65536)
    terms_x = terms_z * (65536 / kept if kept else 0)
    rows = tuple(range(dy.ndim - 1))
    cancelled = sizes.cancelled[..., None]
    terms = {
        "dx": terms_x * cancelled,
        "dbias": (terms_x * cancelled).sum(axis=rows),
        "dgamma": (size * (1 + xhat) * cancelled).sum(axis=rows),
        "dbeta": size.sum(axis=rows),
        "dresidual": terms_z * cancelled,
    }
    eps, eps_acc = UNIT_ROUNDOFF[case.dtype], UNIT_ROUNDOFF[accumulator(case.dtype)]
    found = {}
    for name, total in terms.items():
        value, plain = getattr(exact, name), getattr(naive, name)
        plain = plain.astype(dtype_of(case.dtype)).astype(np.float64)
        bound = 4 * (2 * _worst(plain, value) + 4 * eps * np.abs(value) + 4 * eps_acc * total)
        found[name] = Expected(value, bound + _lost(case.dtype))
    if not case.residual:
        found.pop("dresidual")
    return found


def layer_norm_matches_oracle(call: Call, vjp: Call, case: LayerNormCase) -> None:
    """y, mean and rstd lie within their bounds; asking for statistics changes no bit of y."""
    operands = case.operands()
    y, mean, rstd = call(**operands, **case.options, eps=case.eps, return_stats=True)
    for got, expected, name in zip(
        (y, mean, rstd), expect_layer_norm(case), ("y", "mean", "rstd"), strict=True
    ):
        assert_close(name, got, expected, case)
    assert (y.dtype, y.shape) == (operands["x"].dtype, case.shape)
    assert mean.dtype == rstd.dtype == accumulator(case.dtype)
    np.testing.assert_array_equal(call(**operands, **case.options, eps=case.eps), y)


def layer_norm_vjp_matches_oracle(call: Call, vjp: Call, case: LayerNormCase) -> None:
    """Gradients lie within their bounds."""
    operands = case.operands()
    _, mean, rstd = call(**operands, **case.options, eps=case.eps, return_stats=True)
    operands.pop("beta")
    grads = vjp(case.cotangent(), **operands, mean=mean, rstd=rstd, **case.options)
    assert (grads.dresidual is None) == (not case.residual)
    for name, expected in expect_layer_norm_vjp(case, mean, rstd).items():
        got = getattr(grads, name)
        assert got.dtype == case.cotangent().dtype
        assert_close(name, got, expected, case)


def mask_is_the_oracles(call: Call, vjp: Call, case: LayerNormCase) -> None:
    """Dx is 0 where the oracle's mask drops an element, and there alone: the same bits."""
    dtype = dtype_of(case.dtype)
    vector = np.ones(case.shape[-1], dtype)
    stats = np.zeros(case.shape[:-1], accumulator(case.dtype))
    x = np.zeros(case.shape, dtype)
    # With these statistics every xhat is 0 and dresidual is dy - mean(dy).
    dy = laid_out((1 + np.arange(x.size) % 5).reshape(case.shape).astype(dtype), case.layout)
    grads = vjp(
        dy, laid_out(x, case.layout), 0 * vector, vector, stats, stats + 1, **case.options,
        residual=x,
    )  # fmt: skip
    kept = reference.dropout_mask(case.shape, **case.options)
    np.testing.assert_array_equal(grads.dx != 0, kept & (grads.dresidual != 0))


def dropped_values_vanish(call: Call, vjp: Call, case: LayerNormCase) -> None:
    """Whatever a dropped element of x holds, NaN too, it changes no bit."""
    operands = case.operands()
    kept = reference.dropout_mask(case.shape, **case.options)
    clean = call(**operands, **case.options, eps=case.eps)
    operands["x"] = laid_out(
        np.where(kept, operands["x"], operands["x"].dtype.type(np.nan)), case.layout
    )
    np.testing.assert_array_equal(call(**operands, **case.options, eps=case.eps), clean)


def rows_are_independent(call: Call, vjp: Call, case: LayerNormCase) -> None:
    """NaN that is kept makes its own row NaN and changes no bit of the others."""
    operands = case.operands()
    kept = reference.dropout_mask(case.shape, **case.options)
    clean = call(**operands, **case.options, eps=case.eps)
    if not kept.any():
        return
    index = tuple(np.argwhere(kept)[case.seed % kept.sum()])
    x = operands["x"].copy()
    x[index] = np.nan
    y = call(**{**operands, "x": laid_out(x, case.layout)}, **case.options, eps=case.eps)
    assert np.isnan(y[index[:-1]]).all()
    y[index[:-1]] = clean[index[:-1]]
    np.testing.assert_array_equal(y, clean)


def layer_norm_views_equal_copies(call: Call, vjp: Call, case: LayerNormCase) -> None:
    """How operands lie in memory changes no bit, where the kernel takes rows as they are."""
    operands = case.operands()
    copies = {name: x.copy() for name, x in operands.items()}
    y = call(**operands, **case.options, eps=case.eps)
    np.testing.assert_array_equal(call(**copies, **case.options, eps=case.eps), y)


LAYER_NORM_PROPERTIES: Mapping[str, Callable[[Call, Call, LayerNormCase], None]] = {
    "matches_oracle": layer_norm_matches_oracle,
    "vjp_matches_oracle": layer_norm_vjp_matches_oracle,
    "mask_is_the_oracles": mask_is_the_oracles,
    "dropped_values_vanish": dropped_values_vanish,
    "rows_are_independent": rows_are_independent,
    "views_equal_copies": layer_norm_views_equal_copies,
}
