"""Attention and its gradients with every score in memory."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypedDict, Unpack

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from cuflash.reference._wide import Result, Wide, ieee, narrow, widen


class ScoreOptions(TypedDict, total=False):
    """Score options, with the meaning and defaults of ``cuflash.flash_attention``."""

    scale: float | None
    causal: bool
    window: tuple[int | None, int | None] | None
    query_offset: ArrayLike | None
    query_lengths: ArrayLike | None
    key_lengths: ArrayLike | None
    mask: ArrayLike | None
    bias: ArrayLike | None
    alibi_slopes: ArrayLike | None
    softcap: float | None
    sinks: ArrayLike | None
    enable_gqa: bool


class ReferenceGrads(NamedTuple):
    """Gradients in float64, each of its operand's shape; None for an operand that was not given.

    Of a logsumexp alone, dv is of no columns.
    """

    dq: Result
    dk: Result
    dv: Result
    dbias: Result | None
    dsinks: Result | None


class _Scores(NamedTuple):
    """What the rows see. `k` and `v` are the operands with grouped heads repeated."""

    k: Wide
    v: Wide
    values: Wide  # batch + (Tq, Tk), -inf where unseen
    seen: NDArray[np.bool_]  # batch + (Tq, Tk)
    gain: Wide  # batch + (Tq, Tk): derivative of a score with respect to its dot product q.k
    sink: Wide  # batch + (Tq, 1), -inf where there is none


def _score(
    q: Wide,
    k: Wide,
    v: Wide,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    query_offset: ArrayLike | None = None,
    query_lengths: ArrayLike | None = None,
    key_lengths: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    alibi_slopes: ArrayLike | None = None,
    softcap: float | None = None,
    sinks: ArrayLike | None = None,
    enable_gqa: bool = False,
) -> _Scores:
    if enable_gqa:  # a group of query heads shares its keys and values: the same, repeated
        k, v = (np.repeat(x, q.shape[-3] // x.shape[-3], axis=-3) for x in (k, v))
    batch = np.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
    (tq, d), tk = q.shape[-2:], k.shape[-2]
    shape = (*batch, tq, tk)

    queries = _per_entry(tq if query_lengths is None else query_lengths)
    keys = _per_entry(tk if key_lengths is None else key_lengths)
    offset = keys - queries if query_offset is None else _per_entry(query_offset)
    i, j = np.arange(tq)[:, None], np.arange(tk)
    distance = i + offset - j  # from key j forward to the position of query i

    seen = (i < queries) & (j < keys)
    if causal:
        seen = seen & (distance >= 0)
    left, right = window or (None, None)
    if left is not None:
        seen = seen & (distance <= left)
    if right is not None:
        seen = seen & (distance >= -right)
    if mask is not None:
        seen = seen & np.asarray(mask, bool)
    seen = np.broadcast_to(seen, shape)

    precision = q.dtype
    gain = widen(1 / math.sqrt(d) if scale is None else scale, precision)
    s = gain * (q @ k.swapaxes(-1, -2))
    if softcap is not None:
        t = np.tanh(s / softcap)
        s, gain = softcap * t, gain * (1 - t * t)
    if bias is not None:
        s = s + widen(bias, precision)
    if alibi_slopes is not None:
        s = s - widen(alibi_slopes, precision)[..., None, None] * np.abs(distance).astype(precision)

    sink = widen(-np.inf if sinks is None else sinks, precision)[..., None, None]
    return _Scores(
        k,
        v,
        values=np.where(seen, s, -np.inf),
        seen=seen,
        gain=np.broadcast_to(gain, shape),
        sink=np.broadcast_to(np.where(i < queries, sink, -np.inf), (*batch, tq, 1)),
    )


def _per_entry(lengths: ArrayLike) -> NDArray[np.int64]:
    """Give an integer for each batch entry the two axes of the score matrix as well."""
    return np.asarray(lengths, np.int64)[..., None, None]


def _distribution(s: _Scores) -> tuple[Wide, Wide]:
    """Return the probabilities, batch + (Tq, Tk), and lse, batch + (Tq, 1)."""
    maximum = np.maximum(s.values.max(axis=-1, keepdims=True, initial=-np.inf), s.sink)
    shift = np.where(maximum == -np.inf, 0, maximum)
    weights = np.exp(s.values - shift)
    total = weights.sum(axis=-1, keepdims=True) + np.exp(s.sink - shift)
    p = np.where(s.seen, weights / np.where(total == 0, 1, total), 0)
    return p, shift + np.log(total)


def _contract(p: Wide, seen: NDArray[np.bool_], x: Wide) -> Wide:
    """``p @ x`` in which x[j] reaches row i only if seen[i, j], whatever x[j] holds."""
    if np.isfinite(x).all():
        return p @ x
    batch = np.broadcast_shapes(p.shape[:-2], x.shape[:-2])
    out = np.zeros((*batch, p.shape[-2], x.shape[-1]), p.dtype)
    for i in range(p.shape[-2]):
        terms = p[..., i, :, None] * x
        out[..., i, :] = np.where(seen[..., i, :, None], terms, 0).sum(axis=-2)
    return out


def sum_to(gradient: Wide, shape: tuple[int, ...]) -> Wide:
    """Transpose of broadcasting from `shape`."""
    gradient = np.sum(gradient, axis=tuple(range(gradient.ndim - len(shape))))
    stretched = tuple(a for a, n in enumerate(shape) if n == 1 != gradient.shape[a])
    summed: Wide = np.sum(gradient, axis=stretched, keepdims=True)
    return summed


def sum_heads(gradient: Wide, repeated: tuple[int, ...], shape: tuple[int, ...]) -> Wide:
    """Transpose of broadcasting from `repeated`, itself `shape` with heads repeated in groups."""
    gradient = sum_to(gradient, repeated)
    if repeated == shape:
        return gradient
    *batch, heads, tokens, features = shape
    groups = (*batch, heads, repeated[-3] // heads, tokens, features)
    summed: Wide = np.sum(gradient.reshape(groups), axis=-3)
    return summed


@ieee
def attention_scores(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    precision: DTypeLike = np.longdouble,
    **options: Unpack[ScoreOptions],
) -> tuple[Result, NDArray[np.bool_]]:
    """Scores after every option but the sinks, and which pairs are seen: both batch + (Tq, Tk).

    Parameters
    ----------
    q, k, v
        As for :func:`attention`; of `v` only the batch axes matter.
    precision
        Dtype of the computation.
    **options
        See :class:`ScoreOptions`.

    Returns
    -------
    scores : numpy.ndarray
        float64, -inf where unseen.
    seen : numpy.ndarray
        Boolean.
    """
    s = _score(*(widen(x, precision) for x in (q, k, v)), **options)
    return narrow(s.values), s.seen


@ieee
def attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    precision: DTypeLike = np.longdouble,
    **options: Unpack[ScoreOptions],
) -> tuple[Result, Result]:
    """Attention with the score matrix in full: ``softmax(q @ k.T * scale, options) @ v``.

    Parameters
    ----------
    q, k, v
        Shapes (..., Tq, D), (..., Tk, D), (..., Tk, Dv); leading axes broadcast to the batch shape.
    precision
        Dtype of the computation; float32 makes this the plain formula in single precision.
    **options
        See :class:`ScoreOptions`. Applied in the order scale, softcap, bias, ALiBi, masks; `sinks`
        add one logit to each row, in the denominator only.

    Returns
    -------
    out : numpy.ndarray
        float64, batch + (Tq, Dv); 0 in rows that see no key. NaN where a visible score or the sink
        is NaN or +inf.
    lse : numpy.ndarray
        float64, batch + (Tq,): natural logarithm of the sum of exponentials; -inf in rows with
        neither a visible key nor a sink.
    """
    s = _score(*(widen(x, precision) for x in (q, k, v)), **options)
    p, lse = _distribution(s)
    # Of a sink alone that is NaN or +inf no value takes a share, and yet the row has no weights.
    out = np.where(np.isnan(lse), np.nan, _contract(p, s.seen, s.v))
    return narrow(out), narrow(lse[..., 0])


def attention_logsumexp(
    q: ArrayLike,
    k: ArrayLike,
    *,
    precision: DTypeLike = np.longdouble,
    **options: Unpack[ScoreOptions],
) -> Result:
    """Logsumexp of attention's scores, which no value changes: :func:`attention` without values.

    Parameters
    ----------
    q, k
        Shapes (..., Tq, D), (..., Tk, D); leading axes broadcast to the batch shape.
    precision
        Dtype of the computation.
    **options
        See :class:`ScoreOptions`.

    Returns
    -------
    numpy.ndarray
        float64, batch + (Tq,); -inf in rows with neither a visible key nor a sink.
    """
    _, lse = attention(q, k, _no_values(k), precision=precision, **options)
    return lse


def _no_values(k: ArrayLike) -> NDArray[Any]:
    """Values of no columns for these keys."""
    return np.asarray(k)[..., :0]


@ieee
def merge_attention(
    out_a: ArrayLike, lse_a: ArrayLike, out_b: ArrayLike, lse_b: ArrayLike
) -> tuple[Result, Result]:
    """Attention over the union of two key sets, from attention over each.

    Parameters
    ----------
    out_a, lse_a, out_b, lse_b
        What :func:`attention` returns for either set. An lse of -inf is an empty set, whatever its
        out holds.

    Returns
    -------
    out, lse : numpy.ndarray
        float64; the weights of the parts are ``exp(lse_a - lse)`` and ``exp(lse_b - lse)``.
    """
    lse = np.logaddexp(widen(lse_a, np.longdouble), widen(lse_b, np.longdouble))
    out = np.zeros(np.shape(out_a), np.longdouble)
    for part, part_lse in ((out_a, lse_a), (out_b, lse_b)):
        share = np.exp(widen(part_lse, np.longdouble) - lse)[..., None]
        empty = np.equal(part_lse, -np.inf)[..., None]
        out += np.where(empty, 0, share * widen(part, np.longdouble))
    return narrow(out), narrow(lse)


@ieee
def merge_attention_vjp(
    dout: ArrayLike,
    dlse: ArrayLike,
    out_a: ArrayLike,
    lse_a: ArrayLike,
    out_b: ArrayLike,
    lse_b: ArrayLike,
) -> tuple[Result, Result, Result, Result]:
    """Pull `dout` and `dlse` back through :func:`merge_attention`.

    Parameters
    ----------
    dout, dlse
        Cotangents of the merged out and lse.
    out_a, lse_a, out_b, lse_b
        As for :func:`merge_attention`.

    Returns
    -------
    dout_a, dlse_a, dout_b, dlse_b : numpy.ndarray
        float64, 0 for a part that is an empty set: with p the share of a part and out the merged
        one, ``p * dout`` and ``p * (dlse + sum(dout * (out_part - out)))``.
    """
    out, _ = merge_attention(out_a, lse_a, out_b, lse_b)
    lse = np.logaddexp(widen(lse_a, np.longdouble), widen(lse_b, np.longdouble))
    cotangent = widen(dout, np.longdouble)
    results = []
    for part, part_lse in ((out_a, lse_a), (out_b, lse_b)):
        empty = np.equal(part_lse, -np.inf)
        share = np.exp(widen(part_lse, np.longdouble) - lse)
        rise = np.sum(cotangent * (widen(part, np.longdouble) - out), axis=-1)
        results.append(narrow(np.where(empty[..., None], 0, share[..., None] * cotangent)))
        results.append(narrow(np.where(empty, 0, share * (widen(dlse, np.longdouble) + rise))))
    return results[0], results[1], results[2], results[3]


@ieee
def attention_vjp(
    dout: ArrayLike,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    dlse: ArrayLike | None = None,
    precision: DTypeLike = np.longdouble,
    **options: Unpack[ScoreOptions],
) -> ReferenceGrads:
    """Pull `dout`, and `dlse` if given, back through :func:`attention`.

    With ``P`` the probabilities and ``dP = dout @ v.T``, the gradient of the scores is
    ``dS = P * (dP - sum(P * dP) + dlse)`` (Dao et al. 2022, appendix B.4, with the cotangent of lse
    added). A pair that is not seen takes no part, whatever its operands hold.

    Parameters
    ----------
    dout
        Cotangent of out, batch + (Tq, Dv).
    q, k, v
        As for :func:`attention`.
    dlse
        Cotangent of lse, batch + (Tq,); None is zero.
    precision
        Dtype of the computation.
    **options
        See :class:`ScoreOptions`.

    Returns
    -------
    ReferenceGrads
        dq, dk, dv, dbias, dsinks, each of its operand's shape: axes that broadcast are summed.
    """
    q, own_k, own_v, dout = (widen(x, precision) for x in (q, k, v, dout))
    s = _score(q, own_k, own_v, **options)
    p, lse = _distribution(s)
    # A row that sees nothing but weights of 0 stays what it is: it has no part in any gradient.
    seen = s.seen & (lse != -np.inf)
    dlse = widen(0 if dlse is None else dlse, precision)[..., None]

    dp = np.where(seen, dout @ s.v.swapaxes(-1, -2), 0)
    delta = np.sum(np.where(seen, p * dp, 0), axis=-1, keepdims=True)
    ds = np.where(seen, p * (dp - delta + dlse), 0)
    ddot = np.where(seen, ds * s.gain, 0)
    seen_by = seen.swapaxes(-1, -2)
    dq = _contract(ddot, seen, s.k)
    dk = _contract(ddot.swapaxes(-1, -2), seen_by, q)
    dv = _contract(p.swapaxes(-1, -2), seen_by, dout)

    bias, sinks = options.get("bias"), options.get("sinks")
    # A sink of -inf is no sink, whatever the row holds.
    of_rows = np.where(s.sink == -np.inf, 0, np.exp(s.sink - lse) * (dlse - delta))
    dsink = of_rows.sum(axis=(-2, -1))
    return ReferenceGrads(
        dq=narrow(sum_to(dq, q.shape)),
        dk=narrow(sum_heads(dk, s.k.shape, own_k.shape)),
        dv=narrow(sum_heads(dv, s.v.shape, own_v.shape)),
        dbias=None if bias is None else narrow(sum_to(ds, np.shape(bias))),
        dsinks=None if sinks is None else narrow(sum_to(dsink, np.shape(sinks))),
    )


def attention_logsumexp_vjp(
    dlse: ArrayLike,
    q: ArrayLike,
    k: ArrayLike,
    *,
    precision: DTypeLike = np.longdouble,
    **options: Unpack[ScoreOptions],
) -> ReferenceGrads:
    """Pull `dlse` back through :func:`attention_logsumexp`: ``dS = P * dlse``.

    Parameters
    ----------
    dlse
        Cotangent of lse, batch + (Tq,).
    q, k
        As for :func:`attention_logsumexp`.
    precision
        Dtype of the computation.
    **options
        See :class:`ScoreOptions`.

    Returns
    -------
    ReferenceGrads
        dq, dk, dbias, dsinks, each of its operand's shape: axes that broadcast are summed.
    """
    nothing = np.zeros((*np.shape(dlse), 0))
    return attention_vjp(nothing, q, k, _no_values(k), dlse=dlse, precision=precision, **options)


@ieee
def attention_jvp(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    tangents: ReferenceGrads,
    **options: Unpack[ScoreOptions],
) -> tuple[Result, Result]:
    """Push tangents of the operands forward through :func:`attention`, all of which is finite.

    The adjoint of :func:`attention_vjp`, written down by itself: with ``dS`` the tangent of the
    scores, that of lse is the mean of dS under the probabilities, and ``dP = P * (dS - dlse)``.

    Parameters
    ----------
    q, k, v
        As for :func:`attention`.
    tangents
        Of q, k, v, bias and sinks, each of its operand's shape; None is zero.
    **options
        See :class:`ScoreOptions`.

    Returns
    -------
    out, lse : numpy.ndarray
        Tangents of what :func:`attention` returns, float64; 0 in rows with no logit.
    """
    q, k, v = (widen(x, np.longdouble) for x in (q, k, v))
    s = _score(q, k, v, **options)
    p, lse = _distribution(s)
    of_q, of_k, of_v = (widen(x, np.longdouble) for x in tangents[:3])
    if options.get("enable_gqa"):
        of_k, of_v = (np.repeat(x, q.shape[-3] // x.shape[-3], axis=-3) for x in (of_k, of_v))
    ds = s.gain * (of_q @ s.k.swapaxes(-1, -2) + q @ of_k.swapaxes(-1, -2))
    if tangents.dbias is not None:
        ds = ds + widen(tangents.dbias, np.longdouble)
    of_lse = np.sum(p * ds, axis=-1, keepdims=True)
    if tangents.dsinks is not None:
        p_sink = np.where(s.sink == -np.inf, 0, np.exp(s.sink - lse))
        of_lse = of_lse + p_sink * widen(tangents.dsinks, np.longdouble)[..., None, None]
    return narrow(p * (ds - of_lse) @ s.v + p @ of_v), narrow(of_lse[..., 0])
