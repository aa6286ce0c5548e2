"""Attention of sequences that lie end to end, as users call it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ._attention import complete, open_call
from .problem import AttentionArrays


def flash_attention_varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: Sequence[int | None] | None = None,
    query_offset: Any = None,
    key_lengths: Any = None,
    alibi_slopes: Any = None,
    softcap: float | None = None,
    sinks: Any = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    out: Any = None,
    lse: Any = None,
    num_splits: int | None = None,
    workspace: Any = None,
    method: str = "auto",
    check: bool = False,
) -> Any:
    """Exact attention of sequences of different lengths, end to end without padding, in one launch.

    Sequence e has the queries ``cu_seqlens_q[e]`` to ``cu_seqlens_q[e + 1] - 1`` and the keys
    ``cu_seqlens_k[e]`` to ``cu_seqlens_k[e + 1] - 1``, and is what `flash_attention` of these alone
    is; positions count from its own first token.

    Parameters
    ----------
    q : array, shape (..., total_q, D)
        Queries of all sequences. A (total_q, H, D) array is passed as ``q.swapaxes(0, 1)``, without
        a copy. Leading axes (heads) broadcast as in `flash_attention`.
    k : array, shape (..., total_k, D)
        Keys, of q's dtype and library.
    v : array, shape (..., total_k, Dv)
        Values, of q's dtype and library.
    cu_seqlens_q, cu_seqlens_k : int32 or int64 array, shape (sequences + 1,)
        A 0 and the end of each sequence on the token axis of q, and of k and v. They never fall and
        end with at most the number of tokens. NumPy arrays, or arrays of q's library; those on a
        GPU are not read by the host.
    scale, causal, window, softcap, enable_gqa
        As in `flash_attention`.
    query_offset : int or integer array of shape (sequences,), optional
        Position of each sequence's first query among its keys. Default: its number of used keys
        minus its number of queries.
    key_lengths : int or integer array of shape (sequences,), optional
        How many of each sequence's keys are used.
    alibi_slopes, sinks : float array, optional
        As in `flash_attention`: they broadcast to the leading axes; per head, shape (H,).
    return_lse, out, lse, num_splits, workspace, method
        As in `flash_attention`; `workspace_size` takes ``varlen=True``.
    check : bool
        Also check lengths and ends that live on a GPU, which needs a synchronisation. Without it,
        ends there that are not as they should be are held within the arrays: results then mean
        nothing, and nothing is read or written out of bounds.

    Returns
    -------
    out : array, shape (..., total_q, Dv)
        As of `flash_attention`. Rows past the last sequence are 0.
    lse : array, shape (..., total_q)
        As of `flash_attention`; -inf past the last sequence. Only if asked for.

    Raises
    ------
    TypeError, ValueError
        As `flash_attention`, and for ends that are no such. Nothing is written.

    See Also
    --------
    flash_attention : the same for sequences of one length, or padded to it.

    References
    ----------
    .. [1] Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning",
       2023 (arXiv:2307.08691).

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> q = k = v = np.eye(5)
    >>> ends = np.array([0, 2, 5])
    >>> out = cuflash.flash_attention_varlen(q, k, v, ends, ends)
    >>> bool((out[:2] == cuflash.flash_attention(q[:2], k[:2], v[:2])).all())
    True
    """
    for name, ends in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if ends is None:
            raise TypeError(f"{name} must be an array of int32 or int64, got None")
    call = open_call(
        AttentionArrays(
            q,
            k,
            v,
            alibi_slopes=alibi_slopes,
            sinks=sinks,
            query_offset=query_offset,
            key_lengths=key_lengths,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
        ),
        {"out": out, "lse": lse, "workspace": workspace},
        scale=scale,
        causal=causal,
        window=window,
        softcap=softcap,
        enable_gqa=enable_gqa,
        num_splits=num_splits,
        method=method,
        check=check,
    )
    return complete(call, return_lse, out, lse)
