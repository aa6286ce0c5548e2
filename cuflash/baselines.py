"""What the fast paths are measured against: the plain formulas and all their memory traffic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import engine, interop
from ._attention import join_heads, open_call
from ._options import flag, normalize_axes
from .problem import AttentionArrays, accumulator, require_float
from .problem_fused import Dropout, LayerNormArrays, LayerNormProblem, MatmulProblem

__all__ = [
    "materialized_attention",
    "scores_fused_attention",
    "unfused_dropout_bias_layer_norm",
    "unfused_matmul_bias_activation",
    "unfused_softmax",
]


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
    """Attention by the formula ``softmax(scale * q @ k.T) @ v``, with all scores in memory.

    Parameters
    ----------
    q, k, v, scale, causal, window, query_offset, query_lengths, key_lengths, mask, bias, \
alibi_slopes, softcap, sinks, enable_gqa, return_lse

        As in `cuflash.flash_attention`.

    Returns
    -------
    out, lse
        As `cuflash.flash_attention`, to rounding. Extra memory is several times batch x Tq x Tk
        elements.

    Raises
    ------
    TypeError, ValueError
        As `cuflash.flash_attention`.
    """
    return _attention(
        "materialized_attention",
        AttentionArrays(
            q, k, v, mask, bias, alibi_slopes, sinks, query_offset, query_lengths, key_lengths
        ),
        return_lse,
        scale=scale,
        causal=causal,
        window=window,
        softcap=softcap,
        enable_gqa=enable_gqa,
    )


def scores_fused_attention(
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
    """Attention of which half is fused: ``P = softmax(scale * q @ k.T)`` at once, then ``P @ v``.

    Parameters
    ----------
    q, k, v, scale, causal, window, query_offset, query_lengths, key_lengths, mask, bias, \
alibi_slopes, softcap, sinks, enable_gqa, return_lse

        As in `cuflash.flash_attention`.

    Returns
    -------
    out, lse
        As `cuflash.flash_attention`, to rounding: P is rounded to the dtype of q. Extra memory is
        batch x Tq x Tk elements, and twice that is the traffic: half of what
        `materialized_attention` moves, and it still grows with Tq x Tk.

    Raises
    ------
    TypeError, ValueError
        As `cuflash.flash_attention`.
    """
    return _attention(
        "scores_fused_attention",
        AttentionArrays(
            q, k, v, mask, bias, alibi_slopes, sinks, query_offset, query_lengths, key_lengths
        ),
        return_lse,
        scale=scale,
        causal=causal,
        window=window,
        softcap=softcap,
        enable_gqa=enable_gqa,
    )


def _attention(name: str, arrays: AttentionArrays, return_lse: object, **options: Any) -> Any:
    """Validate a call, let the engine's function of this name compute it, return its results."""
    wanted = flag("return_lse", return_lse)
    call = open_call(arrays, {}, **options)
    problem, core = call.problem, call.core
    with core.device_of(call.arrays.q):
        out = core.empty(problem.out_shape, problem.dtype)
        lse = core.empty(problem.lse_shape, accumulator(problem.dtype)) if wanted else None
        getattr(core, name)(problem, call.arrays, out, lse)
    out = call.home.restore(join_heads(out, -4, call.heads))
    return (out, call.home.restore(join_heads(lse, -3, call.heads))) if wanted else out


def unfused_softmax(x: Any, axis: int = -1) -> Any:
    """Softmax by one pass for each operation: maximum, exp, sum, division.

    Parameters
    ----------
    x : array
        Array of floats of any shape.
    axis : int, default -1
        Axis that is normalised.

    Returns
    -------
    array
        As `cuflash.softmax`, to rounding: exp(x - max) is kept in the dtype of `x`. Four reads and
        two writes an element, where `cuflash.softmax` makes one and one.

    Raises
    ------
    TypeError, ValueError
        As `cuflash.softmax`; integers are refused.
    """
    home, native = interop.enter({"x": x})
    operand = native["x"]
    require_float("x", operand.dtype)
    (last,) = normalize_axes((axis,), operand.ndim) or (0,)
    core = engine.load(home.engine)
    rows = operand.reshape(1) if not operand.ndim else operand.swapaxes(last, -1)
    with core.device_of(operand):
        y = core.empty(rows.shape, operand.dtype)
        core.unfused_softmax(rows, y)
    return home.restore(y.reshape(()) if not operand.ndim else y.swapaxes(last, -1))


def unfused_matmul_bias_activation(
    a: Any, b: Any, bias: Any, *, activation: str | None = "relu"
) -> Any:
    """Matrix product, bias and activation by one pass for each.

    Parameters
    ----------
    a, b, bias, activation
        As in `cuflash.fused.matmul_bias_activation`.

    Returns
    -------
    array
        As from there, to rounding: the product, and the product with the bias, are kept in the
        dtype of `a`, and are read and written once more each.

    Raises
    ------
    TypeError, ValueError
        As there.
    """
    home, native = interop.enter({"a": a, "b": b, "bias": bias})
    problem, core = MatmulProblem.of(native, activation), engine.load(home.engine)
    with core.device_of(native["a"]):
        out = core.empty(problem.out_shape, problem.dtype)
        core.unfused_matmul_bias_activation(problem, native["a"], native["b"], native["bias"], out)
    return home.restore(out)


def unfused_dropout_bias_layer_norm(
    x: Any,
    bias: Any,
    gamma: Any,
    beta: Any,
    *,
    p: float,
    seed: int,
    offset: int = 0,
    eps: float = 1e-5,
) -> Any:
    """Bias, dropout and LayerNorm by one pass for each.

    Parameters
    ----------
    x, bias, gamma, beta, p, seed, offset, eps
        As in `cuflash.fused.dropout_bias_layer_norm`.

    Returns
    -------
    array
        As from there, with the same mask, to rounding: x + bias, and what dropout makes of it, are
        kept in the dtype of `x`. Three reads and three writes an element in place of one and one.

    Raises
    ------
    TypeError, ValueError
        As there.
    """
    home, native = interop.enter({"x": x, "bias": bias, "gamma": gamma, "beta": beta})
    arrays = LayerNormArrays(**native)
    problem, dropout = LayerNormProblem.of(arrays, eps), Dropout.of(p, seed, offset)
    core = engine.load(home.engine)
    with core.device_of(arrays.x):
        y = core.empty(problem.x.shape, problem.dtype)
        core.unfused_dropout_bias_layer_norm(problem, dropout, arrays, y)
    return home.restore(y)
