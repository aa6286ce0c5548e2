"""What the fast paths are measured against: the plain formulas and all their memory traffic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ._attention import join_heads, open_call
from ._options import flag
from .problem import AttentionArrays, accumulator

__all__ = ["materialized_attention"]


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
    call = open_call(
        AttentionArrays(
            q, k, v, mask, bias, alibi_slopes, sinks, query_offset, query_lengths, key_lengths
        ),
        {},
        scale=scale,
        causal=causal,
        window=window,
        softcap=softcap,
        enable_gqa=enable_gqa,
    )
    problem, core = call.problem, call.core
    with core.device_of(call.arrays.q):
        out = core.empty(problem.out_shape, problem.dtype)
        lse = core.empty(problem.lse_shape, accumulator(problem.dtype))
        core.materialized_attention(problem, call.arrays, out, lse)
    out, lse = (
        call.home.restore(join_heads(out, -4, call.heads)),
        call.home.restore(join_heads(lse, -3, call.heads)),
    )
    return (out, lse) if flag("return_lse", return_lse) else out
