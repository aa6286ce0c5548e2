"""Attention as users of JAX call it: validation, a described call, results of their shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._attention import join_heads, ready
from .._options import flag
from ..problem import (
    FIRST_INTEGER,
    ArraySpec,
    AttentionArrays,
    AttentionProblem,
    accumulator,
    check_lengths,
)
from ._arrays import as_array
from .calls import AttentionCall, Operand, View
from .ops import bind

#: Operands with axes of tokens or features behind the batch axes.
_WITH_MATRICES = ("q", "k", "v", "mask", "bias")


def flash_attention(
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
    num_splits: int | None = None,
    method: str = "auto",
    check: bool = False,
    deterministic: bool = False,
) -> Any:
    """Exact attention in memory linear in the number of tokens, as a function of JAX.

    What it computes is said at `cuflash.flash_attention`. It may be used inside `jax.jit`,
    `jax.vmap` of any axes, where an operand that is not mapped is not repeated, and
    `jax.shard_map`, where each shard runs by itself. Under `jax.jit` alone with operands that are
    spread over devices, XLA gathers them first.

    It can be differentiated in reverse, with respect to q, k, v, bias and sinks; both results have
    cotangents. What is not differentiated costs nothing; to ask for the gradient of `alibi_slopes`
    is an error.

    Parameters
    ----------
    q : array, shape (..., Tq, D)
        Queries: float64 (with ``jax_enable_x64``), float32, float16 or bfloat16.
    k, v : array, shape (..., Tk, D) and (..., Tk, Dv)
        Keys and values, of q's dtype.
    scale, causal, window, mask, bias, alibi_slopes, softcap, sinks, enable_gqa
        As of `cuflash.flash_attention`. Numbers and flags are part of the compiled program.
    query_offset, query_lengths, key_lengths : int or integer array, optional
        As of `cuflash.flash_attention`. Another int means another program; what changes from call
        to call should be an array or, as the counter of a loop is, a number that is traced. The
        values of JAX's arrays are looked at when the program runs: on CPUs a length out of range
        is an error then, on CUDA devices it is clamped.
    return_lse : bool
        Return ``(out, lse)``.
    num_splits, method
        As of `cuflash.flash_attention`; methods are those of the engine that the program is
        compiled for.
    check : bool
        Check the values of lengths now. They must be arrays, not tracers.
    deterministic : bool
        Let gradients be bit-equal from run to run.

    Returns
    -------
    out : array, shape (..., Tq, Dv)
        Of q's dtype.
    lse : array, shape (..., Tq)
        float64 for float64 inputs, else float32. Only if asked for.

    Raises
    ------
    TypeError, ValueError
        As `cuflash.flash_attention`, when the function is traced. A method that cannot run the
        problem is refused when the program is compiled.
    NotImplementedError
        A derivative of the gradient was asked for. `materialized_attention` has any.

    See Also
    --------
    dot_product_attention : the same behind the signature of `jax.nn.dot_product_attention`.

    References
    ----------
    .. [1] Dao, Fu, Ermon, Rudra, Re, "FlashAttention: Fast and Memory-Efficient Exact Attention
       with IO-Awareness", 2022, Algorithms 1 and 4 (arXiv:2205.14135).

    Examples
    --------
    >>> import jax, jax.numpy as jnp, cuflash.jax
    >>> x = jnp.eye(2)
    >>> gradient = jax.grad(lambda v: cuflash.jax.flash_attention(x, x, v, causal=True).sum())
    >>> gradient(x).sum(axis=1).round(3)
    Array([2.66, 1.34], dtype=float32)
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
        num_splits=num_splits,
        method=method,
    )
    for name, limit in (("query_lengths", problem.tq), ("key_lengths", problem.tk)):
        lengths = getattr(given, name)
        if lengths is not None and (not isinstance(lengths, jax.Array) or flag("check", check)):
            if isinstance(lengths, jax.core.Tracer):
                raise TypeError(f"{name} is traced: check=True needs its values")
            check_lengths(name, np.asarray(lengths), limit)
    heads = (problem.batch_shape[-2], problem.batch_shape[-1]) if enable_gqa else None
    arrays = ready(problem, arrays, heads, False)
    batch_axes = len(problem.batch_shape)
    views = {
        name: _aligned(x.ndim, batch_axes + 2 * (name in _WITH_MATRICES))
        for name, x in arrays._asdict().items()
        if hasattr(x, "ndim")
    }
    order = tuple(range(batch_axes + 2))
    out, lse = attend(problem, arrays, views, order, flag("deterministic", deterministic))
    out = join_heads(out, -4, heads)
    return (out, join_heads(lse, -3, heads)) if flag("return_lse", return_lse) else out


def as_arrays(given: AttentionArrays) -> AttentionArrays:
    """Return all as arrays of JAX, but for None and lengths and offsets that are numbers.

    A traced number, an array without axes, gets those of the batch.
    """
    converted: list[Any] = []
    for at, (name, x) in enumerate(zip(given._fields, given, strict=True)):
        if x is None and name not in ("q", "k", "v"):
            converted.append(x)
        elif at >= FIRST_INTEGER and isinstance(x, int | np.integer):
            converted.append(x if isinstance(x, int) else int(x))
        else:
            if at >= FIRST_INTEGER and isinstance(x, np.ndarray):
                _require_kept(name, x)
            converted.append(as_array(name, x))
    axes = max(x.ndim for x in converted[:3]) - 2
    for at in range(FIRST_INTEGER, len(converted)):
        if getattr(converted[at], "ndim", None) == 0:
            converted[at] = converted[at].reshape((1,) * axes)
    return AttentionArrays(*converted)


def _require_kept(name: str, x: np.ndarray) -> None:
    """Raise ValueError if JAX would make other integers of these: without x64 it has 32 bits."""
    dtype = jax.dtypes.canonicalize_dtype(x.dtype)
    if x.dtype.kind in "iu" and (x.astype(dtype) != x).any():
        raise ValueError(f"{name} has values outside {dtype}; jax_enable_x64 allows them")


def specs_of(arrays: AttentionArrays) -> AttentionArrays:
    """Describe arrays, which are dense in C order; numbers and None stay."""
    return AttentionArrays(*[ArraySpec.of(x) if hasattr(x, "shape") else x for x in arrays])


def _aligned(axes: int, all_axes: int) -> View:
    """See an array with axes in front that it does not have."""
    return (*(None,) * (all_axes - axes), *range(axes))


def attend(
    problem: AttentionProblem,
    arrays: AttentionArrays,
    views: dict[str, View],
    order: tuple[int, ...],
    deterministic: bool,
) -> tuple[Any, Any]:
    """Make the call of a problem with arrays that are seen as `views` says.

    `order` are the axes of the result, the last of which stays last, in their order in memory; lse
    has the same without it.
    """
    operands = {name: getattr(arrays, name) for name in views}
    integers = zip(arrays._fields[FIRST_INTEGER:], arrays[FIRST_INTEGER:], strict=True)
    acc = accumulator(problem.dtype)

    def result(shape: tuple[int, ...], dtype: np.dtype, axes: tuple[int, ...]) -> Operand:
        view = tuple(axes.index(axis) for axis in range(len(axes)))
        return Operand(tuple(shape[axis] for axis in axes), dtype.name, view)

    call = AttentionCall(
        batch=problem.batch_shape,
        operands=tuple((name, Operand.of(x, views[name])) for name, x in operands.items()),
        integers=tuple((name, x) for name, x in integers if isinstance(x, int)),
        out=result(problem.out_shape, problem.dtype, order),
        lse=result(problem.lse_shape, acc, order[:-1]),
        scale=problem.scale,
        softcap=problem.softcap,
        left=problem.left,
        right=problem.right,
        num_splits=problem.num_splits,
        method=problem.method,
        deterministic=deterministic,
    )
    out, lse = bind(call, list(operands.values()))
    return out, lse


def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
) -> Any:
    """Stand in for `jax.nn.dot_product_attention`: its arguments, axes and alignment.

    Axes are named as there: batch B, queries T, keys S, heads N of queries and K of keys and
    values, features H. Arrays are read and written in that layout, without a transposed copy. What
    differs: a row that sees no key is 0 with residual -inf, where JAX averages all values; float64
    is computed in float64, where JAX's softmax is in float32; the residual is not rounded to 16
    bits and can be differentiated; values may have other features than keys; one of the arrays
    bias and mask may have fewer than four axes.

    Parameters
    ----------
    query : array, shape (B, T, N, H) or (T, N, H)
        Queries: float64 (with ``jax_enable_x64``), float32, float16 or bfloat16.
    key, value : array, shape (B, S, K, H) or (S, K, H)
        Keys and values; N is a multiple of K.
    bias, mask : array, optional
        Broadcast to (B, N, T, S): added to the scores, and bool, True = attend.
    scale : float, optional
        Factor on the scores; default ``1 / sqrt(H)``.
    is_causal : bool
        Query i sees the keys up to i: the first query stands at the first key.
    query_seq_lengths, key_value_seq_lengths : integer array, shape (B,), optional
        Used tokens of each batch entry. Rows of unused queries are 0.
    local_window_size : int or (left, right), optional
        Query i sees the keys from ``i - left`` to ``i + right``; an int is both.
    implementation : {None, "xla", "cudnn"}
        None is cuflash; with a name the call is handed over to JAX.
    return_residual : bool
        Return ``(out, residual)``.

    Returns
    -------
    out : array, shape of query, with the features of value
        Attention.
    residual : array, shape (B, T, N) or (T, N)
        Logsumexp of the scores of each row: float64 for float64 inputs, else float32.

    Raises
    ------
    TypeError, ValueError
        Arguments that do not fit, by the names that they have in `flash_attention`.
    NotImplementedError
        As `flash_attention`.

    References
    ----------
    .. [1] Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning",
       2023, section 3.1 (arXiv:2307.08691).
    """
    if implementation is not None:
        return jax.nn.dot_product_attention(
            query,
            key,
            value,
            bias,
            mask,
            scale=scale,
            is_causal=is_causal,
            query_seq_lengths=query_seq_lengths,
            key_value_seq_lengths=key_value_seq_lengths,
            local_window_size=local_window_size,
            implementation=implementation,
            return_residual=return_residual,
        )
    query, key, value = (
        _by_token(name, x) for name, x in (("query", query), ("key", key), ("value", value))
    )
    for name, x in (("key", key), ("value", value)):
        if x.ndim != query.ndim or x.shape[:-3] != query.shape[:-3]:
            raise ValueError(f"{name} has shape {x.shape} but query has {query.shape}")
    if key.shape[-3:-1] != value.shape[-3:-1]:
        raise ValueError(f"value has shape {value.shape} but key has {key.shape}")
    heads, key_heads = query.shape[-2], key.shape[-2]
    if heads % key_heads if key_heads else heads:
        raise ValueError(f"query has {heads} heads, no multiple of the {key_heads} of key")
    groups = heads // key_heads if key_heads else 1
    grouped = (key_heads, groups)

    # Logical axes are (B, K, G, T, features), of which the token comes first in memory.
    first = query.ndim - 3
    entries, token = tuple(range(first)), first
    q = query.reshape(*query.shape[:-2], *grouped, query.shape[-1])
    views: dict[str, View] = {
        "q": (*entries, token + 1, token + 2, token, token + 3),
        **dict.fromkeys(("k", "v"), (*entries, token + 1, None, token, token + 2)),
    }
    per_pair = {}
    for name, x in (("mask", mask), ("bias", bias)):
        if x is not None:
            x = per_pair[name] = _pairs(name, x, first, heads, grouped)
            views[name] = _aligned(x.ndim, first + 4)
    batch, tokens, keys = query.shape[:first], query.shape[-3], key.shape[-3]
    lengths = {
        "query_lengths": _lengths("query_seq_lengths", query_seq_lengths, batch, tokens),
        "key_lengths": _lengths("key_value_seq_lengths", key_value_seq_lengths, batch, keys),
    }
    for name, x in lengths.items():
        if x is not None:
            views[name] = (*range(x.ndim), *(None,) * (first + 2 - x.ndim))
    if isinstance(local_window_size, int):
        local_window_size = (local_window_size, local_window_size)
    arrays = AttentionArrays(q, key, value, query_offset=0, **per_pair, **lengths)
    seen = {name: Operand.of(getattr(arrays, name), view).spec for name, view in views.items()}
    problem = AttentionProblem.of(
        arrays._replace(**seen),
        scale=scale,
        causal=flag("is_causal", is_causal),
        window=local_window_size,
    )
    order = (*entries, token + 2, token, token + 1, token + 3)
    out, lse = attend(problem, arrays, views, order, deterministic=False)
    out = out.reshape(*query.shape[:-1], value.shape[-1])
    return (out, lse.reshape(query.shape[:-1])) if flag("return_residual", return_residual) else out


def _by_token(name: str, x: Any) -> Any:
    x = as_array(name, x)
    if x.ndim not in (3, 4):
        raise ValueError(f"{name} has {x.ndim} axes; it needs (B, tokens, heads, features)")
    return x


def _pairs(name: str, x: Any, first: int, heads: int, grouped: tuple[int, int]) -> Any:
    """Return mask or bias with the axis of the heads as two."""
    x = as_array(name, x)
    if x.ndim == 4 and not first:  # JAX gives q, k and v a first axis of size 1 then
        if x.shape[0] != 1:
            raise ValueError(f"{name} has shape {x.shape}, but query has no batch axis")
        x = x.reshape(x.shape[1:])
    if x.ndim < 3:
        return x
    if x.shape[-3] not in (1, heads):
        raise ValueError(f"{name} has shape {x.shape}; query has {heads} heads")
    split = (1, 1) if x.shape[-3] == 1 else grouped
    return x.reshape(*x.shape[:-3], *split, *x.shape[-2:])


def _lengths(name: str, x: Any, batch: tuple[int, ...], limit: int) -> Any:
    """Return lengths within the array: a larger one means all tokens, as in JAX."""
    if x is None:
        return None
    # Of NumPy before it is of JAX, which may keep 32 bits only.
    clip = np.clip if isinstance(x, np.ndarray) else jnp.clip
    x = x if isinstance(x, np.ndarray) else as_array(name, x)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(f"{name} has dtype {x.dtype}; integers are needed")
    if x.shape != (batch or (1,)):
        raise ValueError(f"{name} has shape {x.shape}; it needs one for each batch entry, {batch}")
    # The limit may be more than the dtype can hold, and would be made another number.
    return jnp.asarray(clip(x.reshape(batch), 0, min(limit, jnp.iinfo(x.dtype).max)))
