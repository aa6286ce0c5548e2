"""Packed sequences: each one is an attention problem of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypedDict, Unpack, cast

import numpy as np
from numpy.typing import ArrayLike

from cuflash.reference._attention import ReferenceGrads, ScoreOptions, attention, attention_vjp
from cuflash.reference._wide import Result


class VarlenOptions(TypedDict, total=False):
    """Score options of packed sequences; query_offset and key_lengths are one int or one each."""

    scale: float | None
    causal: bool
    window: tuple[int | None, int | None] | None
    query_offset: ArrayLike | None
    key_lengths: ArrayLike | None
    alibi_slopes: ArrayLike | None
    softcap: float | None
    sinks: ArrayLike | None
    enable_gqa: bool


def _sequences(
    cu_seqlens_q: ArrayLike, cu_seqlens_k: ArrayLike, options: VarlenOptions
) -> Iterator[tuple[slice, slice, ScoreOptions]]:
    """Query tokens, key tokens and options of each sequence."""
    ends_q, ends_k = np.asarray(cu_seqlens_q), np.asarray(cu_seqlens_k)
    count = len(ends_q) - 1
    per_sequence = {
        name: np.broadcast_to(np.asarray(options[name]), count)
        for name in ("query_offset", "key_lengths")
        if options.get(name) is not None
    }
    for e in range(count):
        own = dict(options) | {name: int(values[e]) for name, values in per_sequence.items()}
        tokens_q, tokens_k = slice(*ends_q[e : e + 2]), slice(*ends_k[e : e + 2])
        yield tokens_q, tokens_k, cast(ScoreOptions, own)


def attention_varlen(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike,
    **options: Unpack[VarlenOptions],
) -> tuple[Result, Result]:
    """:func:`attention` of each sequence of a packed batch by itself.

    Parameters
    ----------
    q, k, v
        Shapes (..., total_q, D), (..., total_k, D), (..., total_k, Dv).
    cu_seqlens_q, cu_seqlens_k
        Ends of the sequences on the token axes, with a leading 0.
    **options
        See :class:`VarlenOptions`.

    Returns
    -------
    out, lse : numpy.ndarray
        float64, (..., total_q, Dv) and (..., total_q); tokens past the last end get 0 and -inf.
    """
    q, k, v = np.asarray(q), np.asarray(k), np.asarray(v)
    # Attention to no key at all has the shapes, zeros and -inf that tokens past the end need.
    own = cast(ScoreOptions, {"enable_gqa": options.get("enable_gqa", False)})
    out, lse = attention(q, k[..., :0, :], v[..., :0, :], **own)
    for rows, keys, own in _sequences(cu_seqlens_q, cu_seqlens_k, options):
        part = attention(q[..., rows, :], k[..., keys, :], v[..., keys, :], **own)
        out[..., rows, :], lse[..., rows] = part
    return out, lse


def attention_varlen_vjp(
    dout: ArrayLike,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike,
    *,
    dlse: ArrayLike | None = None,
    **options: Unpack[VarlenOptions],
) -> ReferenceGrads:
    """:func:`attention_vjp` of each sequence by itself; the sinks collect from all of them.

    Parameters
    ----------
    dout, dlse
        Cotangents of what :func:`attention_varlen` returns.
    q, k, v, cu_seqlens_q, cu_seqlens_k, **options
        As for :func:`attention_varlen`.

    Returns
    -------
    ReferenceGrads
        Without dbias; 0 for tokens past the last end.
    """
    dout, q, k, v = np.asarray(dout), np.asarray(q), np.asarray(k), np.asarray(v)
    dq, dk, dv = np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape)
    sinks = options.get("sinks")
    dsinks = None if sinks is None else [np.zeros(np.shape(sinks))]
    for rows, keys, own in _sequences(cu_seqlens_q, cu_seqlens_k, options):
        part = attention_vjp(
            dout[..., rows, :],
            q[..., rows, :],
            k[..., keys, :],
            v[..., keys, :],
            dlse=None if dlse is None else np.asarray(dlse)[..., rows],
            **own,
        )
        dq[..., rows, :], dk[..., keys, :], dv[..., keys, :] = part.dq, part.dk, part.dv
        if dsinks is not None and part.dsinks is not None:
            dsinks.append(part.dsinks)
    return ReferenceGrads(dq, dk, dv, None, None if dsinks is None else np.sum(dsinks, axis=0))
