"""How far a result may lie from the oracle, and assertions that say where it lies farther.

The accuracy contract. Let eps be the unit roundoff of the dtype and eps_acc that of its
accumulator (float64 for float64, float32 for the others); for a query row let V be the largest
abs(v) and S the largest abs(score) that it sees. With `ref` the oracle on the same, already rounded
inputs and `naive` the materialised formula in the accumulator's precision, rounded to the dtype at
the end,

    abs(out - ref) <= 2 * max abs(naive - ref) + (4 * eps + 4 * eps_acc * (1 + S)) * V
    abs(lse - ref) <= 2 * max abs(naive - ref) + 4 * eps_acc * (1 + abs(ref) + S)

Where the terms come from. A score is a rounded dot product, of error about eps_acc * S: the weight
exp(s - m) inherits that as a relative error, and so does the normaliser, a sum of weights. A
weighted mean of values with relative errors e in its weights is off by at most 2 * e * V. Rounding
the weights to the dtype before they meet v, as matrix units need it, and rounding the result cost
another few eps * V. What remains is how the dot products and sums themselves are ordered, and how
far their terms cancel: a score near 0 can be the sum of large terms, which no order of summation
rounds less than they are large. That depends on the data, and the error of the plain formula on the
same data, doubled, measures it, for lse as for out.

Gradients have the same form, four times, with V replaced by what their terms add up to if none
cancels. For a row let L be the larger of S and abs(lse), u = 4 * eps + 4 * eps_acc * (1 + L),
A_j = sum over features of abs(dout * v_j), and A the largest A_j that the row sees. The weight
P_j = exp(s_j - lse) has a relative error within u. dP_j = dout . v_j is at most A_j, and delta =
dout . out - dlse, of an out that is rounded to the dtype, at most A + abs(dlse): so the error of
dS_j = P_j * (dP_j - delta) is within u * P_j * (A_j + A + abs(dlse)) =: u * N_j, and

    dbias: u * N_j        dq: abs(scale) * sum over keys of u * N_j * abs(k_j)
    dsinks: u * P_sink * (A + abs(dlse)), over rows
    dk: abs(scale) * sum over rows of u * N_j * abs(q)      dv: sum over rows of u * P_j * abs(dout)

each summed over what broadcasts. The slope of a softcap is at most 1. Where P_j or dS_j falls below
the numbers of its type, it is lost: P_j + tiny stands for it. The limit on the relative Frobenius
norm is 4 times that of the forward. It is asked of gradients that do not cancel, as those of a
single key do: their norm is at least a third of that of their terms, added in quadrature.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cuflash import reference
from cuflash.reference._attention import sum_heads, sum_to
from cuflash.testing.problems import AttentionCase, SoftmaxCase, dtype_of

Floats: TypeAlias = NDArray[np.float64]

UNIT_ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
SMALLEST_SUBNORMAL = {
    "float64": 2.0**-1074,
    "float32": 2.0**-149,
    "float16": 2.0**-24,
    "bfloat16": 2.0**-133,
}
#: Below this an accumulator may flush to zero.
SMALLEST_NORMAL = {"float64": 2.0**-1022, "float32": 2.0**-126}
#: Largest relative error in the Frobenius norm, for S <= 30 and at least 64 elements.
FROBENIUS = {"float64": 1e-14, "float32": 1e-6, "float16": 1e-3, "bfloat16": 8e-3}


def accumulator(dtype: str) -> str:
    """Return the name of the dtype in which sums over `dtype` are kept."""
    return "float64" if dtype == "float64" else "float32"


class Expected(NamedTuple):
    """One array that a call must return: the oracle's, and how far each element may be from it."""

    value: Floats
    bound: Floats
    frobenius: float | None = None
    """Limit on the relative Frobenius norm of the error, where the contract sets one."""


class ExpectedAttention(NamedTuple):
    """What an attention call must return."""

    out: Expected
    lse: Expected
    seen: NDArray[np.bool_]
    """Which pairs are seen, batch shape + (Tq, Tk)."""


def _finite_max(x: Floats, axis: int | None = -1) -> Floats:
    largest: Floats = np.where(np.isfinite(x), np.abs(x), 0).max(axis=axis, initial=0)
    return largest


def expect_attention(q: ArrayLike, k: ArrayLike, v: ArrayLike, **options: Any) -> ExpectedAttention:
    """Return what ``flash_attention(q, k, v, **options)`` must give, by the accuracy contract.

    Parameters
    ----------
    q, k, v
        NumPy arrays of one dtype.
    **options
        Score options.

    Returns
    -------
    ExpectedAttention
        Oracle and bounds; the derivation of the bounds is in this module's docstring.
    """
    dtype = np.asarray(q).dtype.name
    eps, eps_acc = UNIT_ROUNDOFF[dtype], UNIT_ROUNDOFF[accumulator(dtype)]
    out, lse = reference.attention(q, k, v, **options)
    naive, naive_lse = reference.attention(q, k, v, precision=accumulator(dtype), **options)
    naive = naive.astype(dtype_of(dtype)).astype(np.float64)
    scores, seen = reference.attention_scores(q, k, v, **options)

    largest_score = _finite_max(scores)
    value_sizes = _finite_max(np.asarray(v).astype(np.float64))
    if options.get("enable_gqa") and value_sizes.ndim > 1:
        value_sizes = np.repeat(value_sizes, seen.shape[-3] // value_sizes.shape[-2], axis=-2)
    largest_value = np.where(seen, value_sizes[..., None, :], 0).max(axis=-1, initial=0)
    with np.errstate(invalid="ignore"):
        naive_error = _finite_max(naive - out, axis=None)
        naive_lse_error = _finite_max(naive_lse - lse, axis=None)
    row = (4 * eps + 4 * eps_acc * (1 + largest_score)) * largest_value
    row = np.where(seen.any(axis=-1), 2 * naive_error + row, 0)  # an empty row is 0, no less
    out_bound = np.broadcast_to(row[..., None], out.shape)
    lse_size = np.where(np.isfinite(lse), np.abs(lse), 0)
    lse_bound = 2 * naive_lse_error + 4 * eps_acc * (1 + lse_size + largest_score)
    limit = None
    if out.size >= 64 and largest_score.max(initial=0) <= 30:
        # Scores near 30 alone cost the formula itself more than the limit, in some rows.
        with np.errstate(invalid="ignore", divide="ignore"):
            limit = max(
                FROBENIUS[dtype], 2 * float(np.linalg.norm(naive - out) / np.linalg.norm(out))
            )
    return ExpectedAttention(Expected(out, out_bound, limit), Expected(lse, lse_bound), seen)


@overload
def error_bound(case: AttentionCase) -> ExpectedAttention: ...
@overload
def error_bound(case: SoftmaxCase, name: str = ...) -> Expected: ...
@functools.lru_cache(maxsize=8)
def error_bound(
    case: AttentionCase | SoftmaxCase, name: str = "softmax"
) -> ExpectedAttention | Expected:
    """Return oracle and bounds of a drawn case: the accuracy contract as numbers.

    Parameters
    ----------
    case
        What was drawn.
    name
        Of a softmax case: `softmax`, `log_softmax` or `logsumexp`.

    Returns
    -------
    ExpectedAttention or Expected
        See :func:`expect_attention` and :func:`expect_softmax`.
    """
    if isinstance(case, SoftmaxCase):
        x, options = case.build()
        return expect_softmax(name, x, **options)
    inputs = case.build()
    return expect_attention(inputs.q, inputs.k, inputs.v, **inputs.options)


class ExpectedGradients(NamedTuple):
    """What a call for the gradients of attention must return; None for operands not given."""

    dq: Expected
    dk: Expected
    dv: Expected
    dbias: Expected | None = None
    dsinks: Expected | None = None


def expect_gradients(
    dout: ArrayLike,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    dlse: ArrayLike | None = None,
    **options: Any,
) -> ExpectedGradients:
    """Return what the gradients of attention must be, by the accuracy contract.

    Parameters
    ----------
    dout, dlse
        Cotangents of out and lse.
    q, k, v
        NumPy arrays of one dtype.
    **options
        Score options.

    Returns
    -------
    ExpectedGradients
        Oracle and bounds; the derivation of the bounds is in this module's docstring.
    """
    dtype = np.asarray(q).dtype.name
    value = reference.attention_vjp(dout, q, k, v, dlse=dlse, **options)
    precision = accumulator(dtype)
    naive = reference.attention_vjp(dout, q, k, v, dlse=dlse, precision=precision, **options)
    sizes = _gradient_sizes(dout, q, k, v, dlse, options)
    expected: dict[str, Expected] = {}
    for name, of_value, of_naive in zip(value._fields, value, naive, strict=True):
        if of_value is None or of_naive is None:
            continue
        operand = options[name[1:]] if name in ("dbias", "dsinks") else q
        own = np.asarray(operand).dtype.name
        size = sizes.plain[name]
        bound = sizes.weighted[name] + UNIT_ROUNDOFF[own] * size
        with np.errstate(invalid="ignore", over="ignore"):
            rounded = of_naive.astype(dtype_of(own)).astype(np.float64)
            error = _finite_max(rounded - of_value, axis=None)
            norm, terms = np.linalg.norm(of_value), np.linalg.norm(sizes.quadrature[name])
        limit = None
        if sizes.moderate and size.size >= 64 and norm > terms / 3:
            of_naive_error = float(np.linalg.norm(rounded - of_value) / norm)
            limit = 4 * max(FROBENIUS[dtype], FROBENIUS[own], 2 * of_naive_error)
        touched = size > 0  # what nobody sees has gradient 0, no less
        bound = np.where(touched, 4 * (2 * error + bound) + SMALLEST_SUBNORMAL[own], 0)
        expected[name] = Expected(of_value, bound, limit)
    return ExpectedGradients(**expected)


_Sizes: TypeAlias = dict[str, Floats]


class _GradientSizes(NamedTuple):
    """What the terms of each gradient add up to if none cancels; by the gradient's name."""

    plain: _Sizes
    weighted: _Sizes
    """With each row times its u."""
    quadrature: _Sizes
    """The root of the sum of squares: what terms of random signs add up to."""
    moderate: bool
    """Whether all scores are small enough for the limit on the Frobenius norm."""


def _gradient_sizes(
    dout: ArrayLike,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    dlse: ArrayLike | None,
    options: dict[str, Any],
) -> _GradientSizes:
    dtype = np.asarray(q).dtype.name
    eps, eps_acc = UNIT_ROUNDOFF[dtype], UNIT_ROUNDOFF[accumulator(dtype)]
    tiny = SMALLEST_NORMAL[accumulator(dtype)] + SMALLEST_SUBNORMAL[dtype]
    scores, seen = reference.attention_scores(q, k, v, **options)
    _, lse = reference.attention(q, k, v, **options)
    own_q, own_k, own_v, rise, of_lse = (
        _magnitude(x) for x in (q, k, v, dout, 0 if dlse is None else dlse)
    )
    all_k, all_v = own_k, own_v
    if options.get("enable_gqa"):
        all_k, all_v = (
            np.repeat(x, own_q.shape[-3] // x.shape[-3], axis=-3) for x in (own_k, own_v)
        )
    with np.errstate(all="ignore"):
        p = np.where(seen, np.exp(scores - lse[..., None]), 0)
    p = np.where(seen, np.where(np.isfinite(p), p, 0) + tiny, 0)
    bias, sinks = options.get("bias"), options.get("sinks")
    sink = np.asarray(-np.inf if sinks is None else sinks).astype(np.float64)[..., None]
    with np.errstate(all="ignore"):
        share = np.where(lse > -np.inf, np.nan_to_num(np.exp(sink - lse)) + tiny, 0)
    scale = options.get("scale")
    scale = own_q.shape[-1] ** -0.5 if scale is None else abs(scale)

    def sizes(u: Floats, power: int = 1) -> _Sizes:
        weights = (p * u[..., None]) ** power
        products = np.where(seen, rise**power @ (all_v**power).swapaxes(-1, -2), 0)
        largest = products.max(axis=-1, initial=0) + of_lse**power
        n = weights * (products + largest[..., None])
        of_sinks = ((share * u) ** power * largest).sum(axis=-1)
        sums = {
            "dq": sum_to(scale**power * n @ all_k**power, own_q.shape),
            "dk": sum_heads(
                scale**power * n.swapaxes(-1, -2) @ own_q**power, all_k.shape, own_k.shape
            ),
            "dv": sum_heads(weights.swapaxes(-1, -2) @ rise**power, all_v.shape, own_v.shape),
        }
        if bias is not None:
            sums["dbias"] = sum_to(n, np.shape(bias))
        if sinks is not None:
            sums["dsinks"] = sum_to(of_sinks, np.shape(sinks))
        return {name: (x ** (1 / power)).astype(np.float64) for name, x in sums.items()}

    reach = np.maximum(_finite_max(scores), _magnitude(lse))
    ones = np.ones_like(lse)
    return _GradientSizes(
        plain=sizes(ones),
        weighted=sizes(4 * eps + 4 * eps_acc * (1 + reach)),
        quadrature=sizes(ones, power=2),
        moderate=bool(_finite_max(scores, axis=None) <= 30),
    )


def _magnitude(x: ArrayLike) -> Floats:
    """Return abs(x), 0 where it is not finite."""
    size = np.abs(np.asarray(x).astype(np.float64))
    return np.where(np.isfinite(size), size, 0)


def assert_gradients_close(
    grads: Any, expected: ExpectedGradients, *, borders: Sequence[int] = (), hint: str = ""
) -> None:
    """Assert that gradients of attention keep the accuracy contract.

    Parameters
    ----------
    grads
        What ``flash_attention_vjp`` returned; a member that is None is not looked at.
    expected
        From :func:`expect_gradients`.
    borders
        Tile sizes of the engine, to say in the message which of their multiples is near.
    hint
        What the message ends with: how to make the inputs again.

    Raises
    ------
    AssertionError
        Says which element is off the most, and by how much.
    """

    def describe(index: tuple[int, ...]) -> str:
        return f"Token {near_border(index[-2], borders)}" if len(index) > 1 else ""

    for name, of_name in expected._asdict().items():
        actual = getattr(grads, name)
        if actual is not None:
            if of_name is None:
                raise AssertionError(f"{name} was returned for an operand that was not given")
            _assert_close(name, actual, of_name, describe, f"\n{hint}" if hint else "")


def expect_softmax(name: str, x: ArrayLike, axis: Any = -1, where: Any = None) -> Expected:
    """Return what `softmax`, `log_softmax` or `logsumexp` (by `name`) must give.

    The contract's form for logits that are given exactly. With ``d = max - x`` exact but for one
    rounding, exp(-d) has the relative error eps_acc * (1 + d), and the normaliser that of the mean
    of d under the weights, at most eps_acc * (1 + log n) for rows of n. As d is at most -log y,

        abs(y - ref) <= 2 * max abs(naive - ref) + (4 * eps + 4 * eps_acc * (1 + log n - log y)) * y

    The logarithms have 4 * eps * abs(ref) + 4 * eps_acc * (1 + log n + abs(ref)) in its place. The
    maximum of the naive error is taken over a row.
    """
    dtype = np.asarray(x).dtype.name
    dtype = dtype if dtype in UNIT_ROUNDOFF else "float64"
    function = getattr(reference, name)
    value = np.asarray(function(x, axis, where=where))
    naive = np.asarray(function(x, axis, where=where, precision=accumulator(dtype)))
    log_n = np.log(max(1, np.asarray(x).size))
    eps, eps_acc = UNIT_ROUNDOFF[dtype], UNIT_ROUNDOFF[accumulator(dtype)]
    size = np.where(np.isfinite(value), np.abs(value), 0)
    if name == "softmax":
        with np.errstate(divide="ignore"):
            surprise = np.where(size > 0, -np.log(size), 0)
        bound = (4 * eps + 4 * eps_acc * (1 + log_n + surprise)) * size
    else:
        bound = 4 * eps * size + 4 * eps_acc * (1 + log_n + size)
    reduced = name == "logsumexp"
    return Expected(value, bound + _naive_term(naive, value, dtype, () if reduced else axis))


def expect_softmax_vjp(
    name: str, cotangent: ArrayLike, *primals: ArrayLike, axis: Any = -1, where: Any = None
) -> Expected:
    """Return what `softmax_vjp`, `log_softmax_vjp` or `logsumexp_vjp` (by `name`) must give.

    Four times the contract's form, V replaced by the sum of the magnitudes that the formula adds:
    abs(y) * (abs(dy) + sum abs(y * dy)) for softmax, abs(dy) + exp(y) * sum abs(dy) for
    log_softmax, (1 + abs(x - lse)) * abs(dx) for logsumexp.
    """
    dtype = np.asarray(primals[0]).dtype.name
    function = getattr(reference, name)
    value = function(cotangent, *primals, axis, where=where)
    naive = function(cotangent, *primals, axis, where=where, precision=accumulator(dtype))
    eps, eps_acc = UNIT_ROUNDOFF[dtype], UNIT_ROUNDOFF[accumulator(dtype)]
    first = np.asarray(primals[0]).astype(np.float64)
    seen = np.broadcast_to(True if where is None else where, first.shape)
    with np.errstate(all="ignore"):
        if name == "logsumexp_vjp":
            lse = np.asarray(primals[1]).astype(np.float64)
            if lse.ndim != first.ndim:
                lse = np.expand_dims(lse, tuple(range(first.ndim)) if axis is None else axis)
            size = np.abs(value) * (1 + np.abs(first - lse))
        else:
            dy = np.where(seen, np.abs(np.asarray(cotangent).astype(np.float64)), 0)
            weight = np.where(seen, np.abs(first if name == "softmax_vjp" else np.exp(first)), 0)
            total = np.sum(weight * dy if name == "softmax_vjp" else dy, axis=axis, keepdims=True)
            size = weight * (dy + total) if name == "softmax_vjp" else dy + weight * total
    log_n = np.log(max(1, first.size))
    bound = (4 * eps + 4 * eps_acc * (1 + log_n)) * np.where(np.isfinite(size), size, 0)
    return Expected(value, 4 * (bound + _naive_term(naive, value, dtype, axis)))


def _naive_term(naive: Floats, value: Floats, dtype: str, axis: Any) -> Floats:
    """Twice the naive error of each row, and what underflow may lose."""
    with np.errstate(invalid="ignore", over="ignore"):
        error = naive.astype(dtype_of(dtype)).astype(np.float64) - value
    error = np.where(np.isfinite(error), np.abs(error), 0)
    row: Floats = error.max(axis=axis, keepdims=True, initial=0) if axis != () else error
    return 2 * row + SMALLEST_SUBNORMAL[dtype] + SMALLEST_NORMAL[accumulator(dtype)]


def outliers(actual: Floats, expected: Expected) -> NDArray[Any]:
    """Return the elements that break the bound.

    Where the oracle is NaN, only NaN will do; where it is an infinity, that or NaN: a weight that
    underflows makes NaN of an infinite value. Elsewhere the result is finite and within the bound.
    """
    with np.errstate(invalid="ignore"):
        close = np.abs(actual - expected.value) <= expected.bound
    infinite = np.isinf(expected.value)
    close |= np.isnan(actual) & (infinite | np.isnan(expected.value))
    close |= infinite & (actual == expected.value)
    return np.logical_not(close)


def near_border(n: int, borders: Iterable[int]) -> str:
    """Say which multiple of a tile size `n` is within one of, if any."""
    for tile in sorted(borders, reverse=True):
        multiple = max(1, round(n / tile))
        if abs(n - multiple * tile) <= 1:
            return f"{n} (tile border {multiple}*{tile}{n - multiple * tile:+d})"
    return str(n)


def _assert_close(name: str, actual: Any, expected: Expected, describe: Any, hint: str) -> None:
    actual = np.asarray(actual).astype(np.float64)
    if actual.shape != expected.value.shape:
        raise AssertionError(f"{name} has shape {actual.shape}, not {expected.value.shape}{hint}")
    wrong = outliers(actual, expected)
    if wrong.any():
        with np.errstate(invalid="ignore", divide="ignore"):
            error = np.abs(actual - expected.value)
            excess = np.where(np.isnan(error), np.inf, error / expected.bound)
        at = np.unravel_index(np.argmax(np.where(wrong, excess, -1)), wrong.shape)
        index = tuple(int(i) for i in at)
        raise AssertionError(
            f"{name}{list(index)} is {actual[at]!s}, expected {expected.value[at]!s}: off by "
            f"{error[at]:.3g}, {excess[at]:.3g} times the bound {expected.bound[at]:.3g}; "
            f"{wrong.sum()} of {wrong.size} elements are off. {describe(index)}{hint}"
        )
    if expected.frobenius is not None and np.isfinite(expected.value).all():
        scale = np.linalg.norm(expected.value)
        error_norm = np.linalg.norm(actual - expected.value)
        if error_norm > expected.frobenius * scale:
            raise AssertionError(
                f"{name} is off by {error_norm / scale:.3g} in relative Frobenius norm, more than "
                f"{expected.frobenius:.3g}{hint}"
            )


def assert_close(name: str, actual: Any, expected: Expected, case: object) -> None:
    """Assert that an array keeps its bound; the message names the case."""
    _assert_close(name, actual, expected, lambda index: "", f"\n{case}")


def assert_attention_close(
    out: Any,
    lse: Any,
    expected: ExpectedAttention | AttentionCase,
    *,
    borders: Sequence[int] = (),
) -> None:
    """Assert that an attention result keeps the accuracy contract.

    Parameters
    ----------
    out, lse
        Arrays to check; `lse` may be None.
    expected
        From :func:`expect_attention`, or a case.
    borders
        Tile sizes of the engine, to say in the message which of their multiples is near.

    Raises
    ------
    AssertionError
        Says which element is off the most, by how much, and what its row sees.
    """
    hint = ""
    if isinstance(expected, AttentionCase):
        hint = f"\n{expected!r}"
        expected = error_bound(expected)
    seen = expected.seen

    def describe(index: tuple[int, ...]) -> str:
        row = index[: seen.ndim - 1]
        keys = np.flatnonzero(seen[row])
        place = f"Query {near_border(row[-1], borders)}"
        if len(row) > 1:
            place += f" of batch entry {row[:-1]}"
        if not len(keys):
            return f"{place} sees no key"
        first, last = (near_border(int(key), borders) for key in (keys[0], keys[-1]))
        total = near_border(seen.shape[-1], borders)
        return f"{place} sees {len(keys)} of {total} keys, from {first} to {last}"

    _assert_close("out", out, expected.out, describe, hint)
    if lse is not None:
        _assert_close("lse", lse, expected.lse, describe, hint)


def assert_softmax_close(
    actual: Any,
    expected: Expected | SoftmaxCase,
    *,
    name: str = "softmax",
    axis: Any = -1,
    borders: Sequence[int] = (),
    hint: str = "",
) -> None:
    """Assert that a result of the softmax family keeps its bound.

    Parameters
    ----------
    actual
        Array to check.
    expected
        From :func:`expect_softmax` or :func:`expect_softmax_vjp`, or a case.
    name
        Function that made it.
    axis
        Axis of the rows, for the message; a case has its own.
    borders
        Tile sizes of the engine, to say in the message which of their multiples is near.
    hint
        What the message ends with: how to make the inputs again.

    Raises
    ------
    AssertionError
        Says which element is off the most, by how much, and where in its row it lies.
    """
    if isinstance(expected, SoftmaxCase):
        axis, hint = expected.axis, hint or repr(expected)
        expected = error_bound(expected, name)
    shape = expected.value.shape

    def describe(index: tuple[int, ...]) -> str:
        if not isinstance(axis, int) or name == "logsumexp":  # whose rows are single elements
            return f"Rows run over axis {axis}"
        length = near_border(shape[axis], borders)
        return f"Element {near_border(index[axis], borders)} of a row of {length}"

    _assert_close(name, actual, expected, describe, f"\n{hint}" if hint else "")
