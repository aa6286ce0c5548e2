"""Gradients of attention as users call them: validation, a frozen problem, hand over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import engine, interop
from ._attention import (
    check_method,
    check_workspace,
    enter,
    ready,
    require_workspace,
    split_axis,
)
from .problem import ArraySpec, AttentionArrays, AttentionProblem, head_axes, joined
from .problem_vjp import OPERAND_OF, AttentionGrads, AttentionResults, AttentionVjpProblem


def flash_attention_vjp(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    *,
    dlse: Any = None,
    deterministic: bool = False,
    grads: AttentionGrads | None = None,
    workspace: Any = None,
    method: str = "auto",
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
    check: bool = False,
) -> AttentionGrads:
    r"""Gradients of `flash_attention`, in memory linear in the number of tokens.

    Pulls cotangents of out and lse back to q, k, v, bias and sinks. Nothing of size Tq x Tk is
    kept from the forward: the probabilities ``P = exp(S - lse)`` are computed again, tile by tile,
    and with ``dP = dout @ v.T`` and ``delta = sum(dout * out) - dlse`` over each row,

    .. math:: dS_{ij} = P_{ij} (dP_{ij} - \delta_i), \quad
              dv = P^T dout, \quad
              dq = \sigma\, (dS \circ g)\, k, \quad
              dk = \sigma\, (dS \circ g)^T q

    where :math:`\sigma` is the scale and g the slope of the softcap, ``1 - tanh(s / softcap)**2``
    (without one 1) [1]_. The gradient of the bias is dS, that of a sink ``-exp(sink - lse) *
    delta``, summed over its rows.

    Parameters
    ----------
    dout : array, shape (..., Tq, Dv)
        Cotangent of out, in its shape; dtype of q, or float32 for 16-bit inputs.
    q, k, v : array
        The operands of the forward.
    out : array, shape (..., Tq, Dv)
        What the forward returned; dtype of q, or float32 for 16-bit inputs.
    lse : array, shape (..., Tq)
        What the forward returned. A part of a split computation may be given the out and lse of
        the whole, with its `dout`, and gets its share of the gradients.
    dlse : array, shape (..., Tq), optional
        Cotangent of lse, of its dtype. Default: zero.
    deterministic : bool
        Bit-equal gradients from run to run. The NumPy engine's always are; on a GPU, dq of 16 bits,
        or on tensor cores, is summed by atomic additions otherwise, which takes less time and more
        workspace.
    grads : AttentionGrads, optional
        Arrays to fill, each of its operand's shape and dtype; what is None is not computed.
        Default: all gradients there are, newly allocated.
    workspace : uint8 array, optional
        One-dimensional scratch of at least ``workspace_size(..., backward=True)`` bytes.
    method : str
        "auto", or "tiled" on the host and a kernel family on the device, "simt" or "mma".
    scale, causal, window, query_offset, query_lengths, key_lengths, mask, bias, sinks
        As the forward was given them. The scale gets no gradient.
    alibi_slopes, softcap, enable_gqa, check
        As the forward was given them. Slopes and the softcap get no gradient.

    Returns
    -------
    AttentionGrads
        dq, dk, dv and, if the operand was given, dbias and dsinks; None for what was not asked
        for. Each has its operand's shape, dtype and order of axes in memory: axes of size 1 or
        absent that broadcast, grouped heads too, are summed; a view with stride 0 gets a gradient
        of the view's shape. A pair that is not seen contributes nothing, whatever its operands
        hold; a row with no visible key has gradient 0.

    Raises
    ------
    TypeError, ValueError
        As `flash_attention`, naming the argument. Nothing is written.

    See Also
    --------
    merge_attention_vjp : gradients of the merge of two parts.

    References
    ----------
    .. [1] Dao, Fu, Ermon, Rudra, Re, "FlashAttention: Fast and Memory-Efficient Exact Attention
       with IO-Awareness", 2022, appendix B.2 and Algorithm 4 (arXiv:2205.14135).
    .. [2] Rabe, Staats, "Self-attention Does Not Need O(n^2) Memory", 2021, section 3
       (arXiv:2112.05682).

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> q, k, v = np.ones((1, 2)), np.ones((4, 2)), np.arange(4.0)[:, None]
    >>> out, lse = cuflash.flash_attention(q, k, v, return_lse=True)
    >>> cuflash.flash_attention_vjp(np.ones_like(out), q, k, v, out, lse).dv.ravel()
    array([0.25, 0.25, 0.25, 0.25])
    """
    return pull_back(
        AttentionArrays(
            q, k, v, mask, bias, alibi_slopes, sinks, query_offset, query_lengths, key_lengths
        ),
        AttentionResults(dout, out, lse, dlse),
        grads,
        workspace,
        enable_gqa=enable_gqa,
        check=check,
        deterministic=deterministic,
        method=method,
        scale=scale,
        causal=causal,
        window=window,
        softcap=softcap,
    )


def flash_attention_varlen_vjp(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    *,
    dlse: Any = None,
    deterministic: bool = False,
    grads: AttentionGrads | None = None,
    workspace: Any = None,
    method: str = "auto",
    scale: float | None = None,
    causal: bool = False,
    window: Sequence[int | None] | None = None,
    query_offset: Any = None,
    key_lengths: Any = None,
    alibi_slopes: Any = None,
    softcap: float | None = None,
    sinks: Any = None,
    enable_gqa: bool = False,
    check: bool = False,
) -> AttentionGrads:
    """Gradients of `flash_attention_varlen`: of sequences end to end, without padding.

    Parameters
    ----------
    dout : array, shape (..., total_q, Dv)
        Cotangent of out. Rows past the last sequence are not read.
    q, k, v : array
        The operands of the forward.
    out : array, shape (..., total_q, Dv)
        What the forward returned.
    lse : array, shape (..., total_q)
        What the forward returned.
    cu_seqlens_q, cu_seqlens_k : int32 or int64 array, shape (sequences + 1,)
        As the forward was given them.
    dlse : array, shape (..., total_q), optional
        Cotangent of lse.
    deterministic, grads, workspace, method
        As in `flash_attention_vjp`.
    scale, causal, window, query_offset, key_lengths, alibi_slopes, softcap, sinks, enable_gqa, \
check

        As the forward was given them.

    Returns
    -------
    AttentionGrads
        As of `flash_attention_vjp`, without dbias. Tokens past the last sequence, and keys past
        their sequence's key length, have gradient 0; dsinks collects from all sequences.

    Raises
    ------
    TypeError, ValueError
        As `flash_attention_varlen`, naming the argument. Nothing is written.

    See Also
    --------
    flash_attention_vjp : the equations, and the same for sequences of one length.

    References
    ----------
    .. [1] Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning",
       2023, Algorithm 2 (arXiv:2307.08691).

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> q = k = v = np.eye(5)
    >>> ends = np.array([0, 2, 5])
    >>> out, lse = cuflash.flash_attention_varlen(q, k, v, ends, ends, return_lse=True)
    >>> cuflash.flash_attention_varlen_vjp(out, q, k, v, out, lse, ends, ends).dq.shape
    (5, 5)
    """
    for name, ends in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if ends is None:
            raise TypeError(f"{name} must be an array of int32 or int64, got None")
    return pull_back(
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
        AttentionResults(dout, out, lse, dlse),
        grads,
        workspace,
        enable_gqa=enable_gqa,
        check=check,
        deterministic=deterministic,
        method=method,
        scale=scale,
        causal=causal,
        window=window,
        softcap=softcap,
    )


def pull_back(
    given: AttentionArrays,
    results_given: AttentionResults,
    grads_given: AttentionGrads | None,
    workspace: Any,
    *,
    enable_gqa: object,
    check: object,
    deterministic: object,
    method: object,
    without_values: bool = False,
    **options: Any,
) -> AttentionGrads:
    """Validate a call, allocate what is to be, compute, return the caller's kind of arrays.

    A call without values has neither v nor dout and out, and needs dlse.
    """
    buffers = _requested(grads_given)
    if without_values and "dv" in buffers:
        raise ValueError("dv was given but there is no v; there is no such gradient")
    absent = ("dout", "out") if without_values else ("dlse",) if results_given.dlse is None else ()
    home, arrays, outputs, read = enter(
        given,
        {**buffers, "workspace": workspace},
        {name: x for name, x in results_given._asdict().items() if name not in absent},
        without_values=without_values,
    )
    core, scratch = engine.load(home.engine), outputs.pop("workspace", None)
    forward = AttentionProblem.of(arrays, enable_gqa=enable_gqa, **options)
    heads = (forward.batch_shape[-2], forward.batch_shape[-1]) if enable_gqa else None
    with core.device_of(arrays.q):
        if grads_given is None:
            outputs = {
                name: core.empty(x.shape, x.dtype, x.strides)
                for name, operand in OPERAND_OF.items()
                if (x := getattr(arrays, operand)) is not None
                and not (without_values and operand == "v")
            }
        if without_values:
            nothing = core.empty(joined(forward.out_shape, -4, heads), forward.dtype)
            read |= {"dout": nothing, "out": nothing}
        results = AttentionResults(**read)
        problem = AttentionVjpProblem.of(
            forward,
            arrays,
            results,
            AttentionGrads(**outputs),
            enable_gqa=enable_gqa,
            deterministic=deterministic,
            method=method,
        )
        check_method(problem.method, core.attention_vjp_methods(problem), home.engine)
        if grads_given is not None or scratch is not None:
            if scratch is not None:
                check_workspace(ArraySpec.of(scratch))
            written = outputs if scratch is None else outputs | {"workspace": scratch}
            interop.refuse_overlap(written, arrays._asdict() | read)
        if scratch is not None:
            require_workspace(scratch, core.attention_vjp_workspace(problem))
        operands = ready(forward, arrays, heads, check)
        core.attention_vjp(
            problem,
            operands,
            _split_results(results, heads),
            _full_gradients(problem, outputs, arrays, heads),
            scratch,
        )
    return AttentionGrads(
        **{name: home.restore(x, buffers.get(name)) for name, x in outputs.items()}
    )


def _requested(grads: AttentionGrads | None) -> dict[str, Any]:
    """Return the caller's buffers by name, or raise TypeError if they are not in their tuple."""
    if grads is None:
        return {}
    if not isinstance(grads, AttentionGrads):
        raise TypeError(f"grads must be an AttentionGrads, got {type(grads).__name__}")
    return {name: x for name, x in grads._asdict().items() if x is not None}


def _split_results(results: AttentionResults, heads: tuple[int, int] | None) -> AttentionResults:
    """View the head axis as the two of the problem."""
    if heads is None:
        return results
    axes = AttentionResults(dout=-3, out=-3, lse=-2, dlse=-2)
    return AttentionResults(
        *(split_axis(x, axis, heads) for x, axis in zip(results, axes, strict=True))
    )


def _full_gradients(
    problem: AttentionVjpProblem,
    gradients: dict[str, Any],
    arrays: AttentionArrays,
    heads: tuple[int, int] | None,
) -> AttentionGrads:
    """View the gradients with every axis of the problem, size 1 where they are summed."""
    views = {}
    for name, x in gradients.items():
        if heads is not None:
            axis, sizes = head_axes(arrays, heads)[OPERAND_OF[name]]
            x = split_axis(x, axis, sizes)
        absent = len(getattr(problem.grads, name).shape) - x.ndim
        views[name] = x[(None,) * absent + (...,)]
    return AttentionGrads(**views)
