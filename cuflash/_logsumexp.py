"""The logsumexp of attention's scores alone, and its gradients: attention without values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ._attention import join_heads, open_call, require_workspace
from ._attention_vjp import pull_back
from .problem import AttentionArrays, accumulator
from .problem_vjp import AttentionGrads, AttentionResults


def flash_logsumexp(
    q: Any,
    k: Any,
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
    out: Any = None,
    num_splits: int | None = None,
    workspace: Any = None,
    method: str = "auto",
    check: bool = False,
) -> Any:
    r"""Logsumexp of the scores of `flash_attention`, in memory linear in the number of tokens.

    A generalised ufunc with signature ``(m,d),(n,d)->(m)``: with scores ``s = scale * q @ k.T``,
    changed by the options in the order softcap, bias, ALiBi, masks,

    .. math:: \mathrm{lse}_i = \log \sum_j e^{s_{ij}} .

    Of points, up to terms of each point alone, that is the log of a sum of Gaussian kernels, since
    ``-|x - y|**2 / 2 = x @ y - |x|**2 / 2 - |y|**2 / 2``: a kernel density, or a step of Sinkhorn's
    iterations [2]_ (`scale=1`, and the terms of the keys as a `bias`).

    Parameters
    ----------
    q : array, shape (..., Tq, D)
        Queries: float64, float32, float16 or bfloat16.
    k : array, shape (..., Tk, D)
        Keys, of q's dtype and library.
    scale, causal, window, query_offset, query_lengths, key_lengths, mask, bias
        As in `flash_attention`.
    alibi_slopes, softcap, sinks, enable_gqa
        As in `flash_attention`.
    out : array, optional
        Array for the result.
    num_splits : int, optional
        Number of shares of the keys computed apart and merged. Default: chosen from the shapes.
    workspace : uint8 array, optional
        One-dimensional scratch of at least ``workspace_size(q, k, None)`` bytes, to allocate
        nothing but the result.
    method : str
        "auto", or "tiled" on the host and a kernel family on the device, "simt" or "mma".
    check : bool
        Also check lengths that live on a GPU, which needs a synchronisation.

    Returns
    -------
    array, shape (..., Tq)
        Natural logarithm; float64 for float64 inputs, else float32. A row with no visible key is
        -inf.

    Raises
    ------
    TypeError, ValueError
        As `flash_attention`, naming the argument. Nothing is written.

    See Also
    --------
    flash_logsumexp_vjp : gradients.
    logsumexp : the same of an array that exists.

    References
    ----------
    .. [1] Milakov, Gimelshein, "Online normalizer calculation for softmax", 2018, Algorithm 3
       (arXiv:1805.02867).
    .. [2] Feydy, Sejourne, Vialard, Amari, Trouve, Peyre, "Interpolating between Optimal Transport
       and MMD using Sinkhorn Divergences", 2019, section 3 (arXiv:1810.08278).

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> q, k = np.zeros((2, 3)), np.ones((4, 3))
    >>> np.exp(cuflash.flash_logsumexp(q, k))
    array([4., 4.])
    """
    home, core, problem, arrays, outputs, heads, _ = open_call(
        AttentionArrays(
            q, k, None, mask, bias, alibi_slopes, sinks, query_offset, query_lengths, key_lengths
        ),
        {"out": out, "workspace": workspace},
        without_values=True,
        scale=scale,
        causal=causal,
        window=window,
        softcap=softcap,
        enable_gqa=enable_gqa,
        num_splits=num_splits,
        method=method,
        check=check,
    )
    with core.device_of(arrays.q):
        scratch, result = outputs.get("workspace"), outputs.get("out")
        if scratch is not None:
            require_workspace(scratch, core.attention_workspace(problem))
        if result is None:
            result = core.empty(problem.lse_shape, accumulator(problem.dtype))
        nothing = core.empty(problem.out_shape, problem.dtype)
        core.attention(problem, arrays, nothing, result, scratch)
    return home.restore(join_heads(result, -3, heads), out)


def flash_logsumexp_vjp(
    dlse: Any,
    q: Any,
    k: Any,
    lse: Any,
    *,
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
    r"""Gradients of `flash_logsumexp`, in memory linear in the number of tokens.

    The gradient of a logsumexp is the softmax: with ``P = exp(S - lse)``, computed again tile by
    tile,

    .. math:: dS_{ij} = P_{ij}\, \mathrm{dlse}_i, \quad
              dq = \sigma\, (dS \circ g)\, k, \quad
              dk = \sigma\, (dS \circ g)^T q

    where :math:`\sigma` is the scale and g the slope of the softcap, as in `flash_attention_vjp`
    with a cotangent of lse alone [1]_. The gradient of the bias is dS, that of a sink ``exp(sink -
    lse) * dlse``, summed over its rows.

    Parameters
    ----------
    dlse : array, shape (..., Tq)
        Cotangent of lse, of its dtype.
    q, k : array
        The operands of the forward.
    lse : array, shape (..., Tq)
        What the forward returned.
    deterministic : bool
        As in `flash_attention_vjp`.
    grads : AttentionGrads, optional
        Arrays to fill, each of its operand's shape and dtype; what is None is not computed.
        Default: all gradients there are, newly allocated.
    workspace : uint8 array, optional
        One-dimensional scratch of at least ``workspace_size(q, k, None, backward=True)`` bytes.
    method : str
        As in `flash_attention_vjp`.
    scale, causal, window, query_offset, query_lengths, key_lengths, mask, bias, sinks
        As the forward was given them. The scale gets no gradient.
    alibi_slopes, softcap, enable_gqa, check
        As the forward was given them. Slopes and the softcap get no gradient.

    Returns
    -------
    AttentionGrads
        dq, dk and, if the operand was given, dbias and dsinks, as `flash_attention_vjp` returns
        them; None for what was not asked for, and for dv.

    Raises
    ------
    TypeError, ValueError
        As `flash_attention_vjp`, naming the argument. Nothing is written.

    See Also
    --------
    logsumexp_vjp : the same of an array that exists.

    References
    ----------
    .. [1] Dao, Fu, Ermon, Rudra, Re, "FlashAttention: Fast and Memory-Efficient Exact Attention
       with IO-Awareness", 2022, appendix B.2 and Algorithm 4 (arXiv:2205.14135).

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> q, k = np.zeros((1, 2)), np.arange(8.0).reshape(4, 2)
    >>> lse = cuflash.flash_logsumexp(q, k, scale=1)
    >>> cuflash.flash_logsumexp_vjp(np.ones(1), q, k, lse, scale=1).dq  # the mean of the keys
    array([[3., 4.]])
    """
    return pull_back(
        AttentionArrays(
            q, k, None, mask, bias, alibi_slopes, sinks, query_offset, query_lengths, key_lengths
        ),
        AttentionResults(None, None, lse, dlse),
        grads,
        workspace,
        without_values=True,
        enable_gqa=enable_gqa,
        check=check,
        deterministic=deterministic,
        method=method,
        scale=scale,
        causal=causal,
        window=window,
        softcap=softcap,
    )
