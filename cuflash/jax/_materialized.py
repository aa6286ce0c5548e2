"""Attention by its formula, in terms of JAX's own operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from .._attention import join_heads, ready
from .._options import flag
from ..problem import FIRST_INTEGER, AttentionArrays, AttentionProblem, accumulator
from ._attention import as_arrays, specs_of


def materialized_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: Sequence[int | None] | None = None,
    query_offset: Any = None,
    query_lengths: Any = None,
    key_lengths: Any = None,
    mask: Any = None,
    bias: Any = None,
    alibi_slopes: Any = None,
    softcap: float | None = None,
    sinks: Any = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
) -> Any:
    """Attention by the formula, all scores in memory: with derivatives of any order and direction.

    The way out where `flash_attention` has no derivative: second derivatives and forward mode. Use
    it inside `jax.jit`, so that XLA fuses what it can. What is not seen has weight 0 here, so that
    a NaN that nobody sees does harm in k and v.

    Parameters
    ----------
    q, k, v, scale, causal, window, query_offset, query_lengths, key_lengths, mask, bias
        As of `flash_attention`.
    alibi_slopes, softcap, sinks, enable_gqa, return_lse
        As of `flash_attention`.

    Returns
    -------
    out : array, shape (..., Tq, Dv)
        Of q's dtype.
    lse : array, shape (..., Tq)
        float64 for float64 inputs, else float32. Only if asked for.

    Raises
    ------
    TypeError, ValueError
        As `flash_attention`.

    See Also
    --------
    cuflash.baselines.materialized_attention : the same for arrays outside of JAX.

    References
    ----------
    .. [1] Vaswani et al., "Attention Is All You Need", 2017, equation 1 (arXiv:1706.03762).
    """
    given = AttentionArrays(
        q, k, v, mask, bias, alibi_slopes, sinks, query_offset, query_lengths, key_lengths
    )
    arrays = as_arrays(given)
    problem = AttentionProblem.of(
        specs_of(arrays),
        enable_gqa=enable_gqa,
        scale=scale,
        causal=causal,
        window=window,
        softcap=softcap,
    )
    heads = (problem.batch_shape[-2], problem.batch_shape[-1]) if enable_gqa else None
    arrays = _with_integers(problem, ready(problem, arrays, heads, False))
    acc = accumulator(problem.dtype)
    scores = _scores(problem, arrays, acc)
    seen = jnp.broadcast_to(_seen(problem, arrays), scores.shape)
    # Masked twice, or the derivative of what is not chosen would be a NaN.
    scores = jnp.where(seen, scores, -jnp.inf)
    sinks = arrays.sinks
    if sinks is not None:
        sinks = jnp.broadcast_to(sinks, problem.batch_shape).astype(acc)[..., None, None]
    top = scores.max(axis=-1, keepdims=True, initial=-jnp.inf)
    if sinks is not None:
        top = jnp.maximum(top, sinks)
    top = jnp.where(jnp.isneginf(top), 0, top)
    weights = jnp.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.where(_used_rows(problem, arrays), jnp.exp(sinks - top), 0)
    empty = total == 0
    safe = jnp.where(empty, 1, total)
    out = jnp.matmul(weights / safe, arrays.v.astype(acc), precision="highest")
    out = join_heads(out.astype(problem.dtype), -4, heads)
    if not flag("return_lse", return_lse):
        return out
    lse = jnp.where(empty, -jnp.inf, jnp.log(safe) + top)[..., 0]
    return out, join_heads(lse, -3, heads)


def _with_integers(problem: AttentionProblem, arrays: AttentionArrays) -> AttentionArrays:
    """Return arrays with lengths and offsets signed, and so that no distance overflows."""
    integer = jnp.result_type(int)
    most = int(jnp.iinfo(integer).max) - problem.tq - problem.tk

    def within(x: Any) -> Any:
        if isinstance(x, int):
            return max(-most, min(x, most))
        holds = jnp.iinfo(x.dtype)
        x = jnp.clip(x, max(-most, int(holds.min)), min(most, int(holds.max)))
        return x.astype(integer)

    numbers = arrays[FIRST_INTEGER:]
    return AttentionArrays(
        *arrays[:FIRST_INTEGER], *[None if x is None else within(x) for x in numbers]
    )


def _column(problem: AttentionProblem, x: Any) -> Any:
    """Return lengths or offsets, or what is of an entry, as (..., 1, 1)."""
    return jnp.broadcast_to(jnp.asarray(x), problem.batch_shape)[..., None, None]


def _used_rows(problem: AttentionProblem, arrays: AttentionArrays) -> Any:
    rows = jnp.arange(problem.tq)[:, None]
    lengths = arrays.query_lengths
    return rows < _column(problem, problem.tq if lengths is None else lengths)


def _distance(problem: AttentionProblem, arrays: AttentionArrays) -> Any:
    """Return key minus position of the query."""
    offset = arrays.query_offset
    if offset is None:
        keys = problem.tk if arrays.key_lengths is None else arrays.key_lengths
        queries = problem.tq if arrays.query_lengths is None else arrays.query_lengths
        offset = jnp.asarray(keys) - jnp.asarray(queries)
    rows, keys = jnp.arange(problem.tq)[:, None], jnp.arange(problem.tk)
    return keys - rows - _column(problem, offset)


def _seen(problem: AttentionProblem, arrays: AttentionArrays) -> Any:
    seen = _used_rows(problem, arrays)
    if arrays.key_lengths is not None:
        seen = seen & (jnp.arange(problem.tk) < _column(problem, arrays.key_lengths))
    distance = _distance(problem, arrays)
    most = int(jnp.iinfo(distance.dtype).max)
    if problem.left is not None:
        seen = seen & (distance >= -min(problem.left, most))
    if problem.right is not None:
        seen = seen & (distance <= min(problem.right, most))
    return seen if arrays.mask is None else seen & arrays.mask


def _scores(problem: AttentionProblem, arrays: AttentionArrays, acc: Any) -> Any:
    q, k = arrays.q.astype(acc), arrays.k.astype(acc)
    scores = problem.scale * jnp.matmul(q, k.swapaxes(-1, -2), precision="highest")
    # Not the operands: on an explicit mesh, axes that they do not have would count as not sharded.
    scores = jnp.broadcast_to(scores, (*problem.batch_shape, problem.tq, problem.tk))
    if problem.softcap is not None:
        scores = problem.softcap * jnp.tanh(scores / problem.softcap)
    if arrays.bias is not None:
        scores = scores + arrays.bias.astype(acc)
    if arrays.alibi_slopes is not None:
        slopes = _column(problem, arrays.alibi_slopes.astype(acc))
        scores = scores - slopes * abs(_distance(problem, arrays))
    return scores
