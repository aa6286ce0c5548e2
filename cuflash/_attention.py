"""Attention as users call it: validation, a frozen problem, and hand over to the engine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from . import engine, interop
from ._options import choose_method, flag
from ._sequences import check_sequences
from .problem import (
    FIRST_INTEGER,
    ArraySpec,
    AttentionArrays,
    AttentionProblem,
    accumulator,
    check_lengths,
    head_axes,
    joined,
    require_output,
)
from .problem_vjp import AttentionVjpProblem

#: Of the ends of sequences where only their description matters.
_ENDS = np.dtype(np.int32)


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
    out: Any = None,
    lse: Any = None,
    num_splits: int | None = None,
    workspace: Any = None,
    method: str = "auto",
    check: bool = False,
) -> Any:
    r"""Exact attention in memory linear in the number of tokens.

    A generalised ufunc with signature ``(m,d),(n,d),(n,e)->(m,e)``: the last two axes are (tokens,
    features), every leading axis is a batch axis and broadcasts as in `numpy.matmul`. With scores
    ``s = scale * q @ k.T``, changed by the options in the order softcap, bias, ALiBi, masks,

    .. math:: \mathrm{out}_i = \sum_j \frac{e^{s_{ij}}}{\sum_{j'} e^{s_{ij'}}}\, v_j, \qquad
              \mathrm{lse}_i = \log \sum_j e^{s_{ij}} .

    Parameters
    ----------
    q : array, shape (..., Tq, D)
        Queries: float64, float32, float16 or bfloat16. A (B, T, H, D) array is passed as
        ``q.swapaxes(1, 2)``, without a copy.
    k : array, shape (..., Tk, D)
        Keys, of q's dtype and library.
    v : array, shape (..., Tk, Dv)
        Values, of q's dtype and library. Dv may differ from D.
    scale : float, optional
        Factor on the scores; default ``1 / sqrt(D)``. Any finite number.
    causal : bool
        Query i stands at position ``i + query_offset`` and sees the keys j up to its position.
    window : (left, right), optional
        Query i sees keys from ``position - left`` to ``position + right``, both included; None is
        unlimited on that side.
    query_offset : int or integer array, optional
        Position of query 0 among the keys; an array has as many axes as the batch shape, size 1
        where it broadcasts. Default: number of keys minus number of queries of that batch entry, so
        that the last query stands at the last key. 0 gives the top-left alignment of PyTorch and
        JAX.
    query_lengths, key_lengths : int or integer array, optional
        Used tokens of each batch entry, axes as `query_offset`. Keys past the length are unseen;
        rows past it are out 0, lse -inf.
    mask : bool array, optional
        True = attend. Broadcasts to batch shape + (Tq, Tk), is never built at that size.
    bias : float array, optional
        Added to the scores. Broadcasts as `mask`. A bias of -inf gives weight 0 but, unlike `mask`,
        does not hide a NaN in k or v.
    alibi_slopes : float array, optional
        ALiBi [4]_: ``-slope * abs(position - j)`` is added. Broadcasts to the batch shape; per
        head, shape (H,).
    softcap : float, optional
        Scores become ``softcap * tanh(scores / softcap)``.
    sinks : float array, optional
        One more logit per batch entry that takes part in the denominator, and in lse, with no
        value. Broadcasts to the batch shape.
    enable_gqa : bool
        Grouped-query heads: q has G times as many heads on axis -3 as k and v; query head h uses
        key head ``h // G``. All options use q's head axis.
    return_lse : bool
        Return ``(out, lse)``.
    out : array, optional
        Array for the result, shape (..., Tq, Dv), dtype of q, or float32 for 16-bit inputs (results
        left unrounded, for merging).
    lse : array, optional
        Array for the logsumexp; implies `return_lse`.
    num_splits : int, optional
        Number of shares of the keys computed apart and merged. Default: chosen from the shapes.
    workspace : uint8 array, optional
        One-dimensional scratch of at least `workspace_size` bytes, to allocate nothing but the
        results.
    method : str
        "auto", or "tiled" on the host.
    check : bool
        Also check lengths that live on a GPU, which needs a synchronisation. Values of the host are
        always checked.

    Returns
    -------
    out : array, shape (..., Tq, Dv)
        Same library and dtype as q, its axes laid out in memory in q's order. A row with no visible
        key is 0.
    lse : array, shape (..., Tq)
        Natural logarithm; float64 for float64 inputs, else float32. A row with no visible key is
        -inf. Only if asked for.

    Raises
    ------
    TypeError
        An argument of the wrong kind, library or dtype.
    ValueError
        Shapes, lengths or options that do not fit; an output that overlaps an input. Nothing is
        written.

    See Also
    --------
    merge_attention : attention over the union of two key sets.
    cuflash.baselines.materialized_attention : the same by the formula, with the scores in memory.

    References
    ----------
    .. [1] Dao, Fu, Ermon, Rudra, Re, "FlashAttention: Fast and Memory-Efficient Exact Attention
       with IO-Awareness", 2022, Algorithm 1 (arXiv:2205.14135).
    .. [2] Milakov, Gimelshein, "Online normalizer calculation for softmax", 2018
       (arXiv:1805.02867).
    .. [3] Rabe, Staats, "Self-attention Does Not Need O(n^2) Memory", 2021 (arXiv:2112.05682).
    .. [4] Press, Smith, Lewis, "Train Short, Test Long: Attention with Linear Biases", 2022
       (arXiv:2108.12409).

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> q = k = v = np.eye(2)
    >>> cuflash.flash_attention(q, k, v, causal=True)[0]
    array([1., 0.])
    """
    call = open_call(
        AttentionArrays(
            q, k, v, mask, bias, alibi_slopes, sinks, query_offset, query_lengths, key_lengths
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


def workspace_size(
    q: Any,
    k: Any,
    v: Any,
    *,
    backward: bool = False,
    varlen: bool = False,
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
    num_splits: int | None = None,
    method: str = "auto",
) -> int:
    """Bytes of scratch that an attention call of these shapes needs as its `workspace`.

    Only shapes, strides and dtypes are looked at, so q, k, v and the array options may also be
    descriptions without data: anything with `shape`, `dtype` and, unless in C order, `strides`.

    Parameters
    ----------
    q, k, v : array or description
        As in `flash_attention`; a v of None asks for `flash_logsumexp`, or its gradients.
    backward : bool
        Ask for the call of the gradients, all of them, instead of the forward. The same for
        deterministic ones or others; `num_splits` has no meaning there.
    varlen : bool
        q, k and v hold sequences end to end, as `flash_attention_varlen` takes them.
    scale, causal, window, query_offset, query_lengths, key_lengths, mask, bias, alibi_slopes, \
softcap, sinks, enable_gqa, num_splits, method

        As in `flash_attention`.

    Returns
    -------
    int
        At most linear in the number of tokens. The NumPy engine needs none from its caller.

    Raises
    ------
    TypeError, ValueError
        As `flash_attention`.
    """
    given = AttentionArrays(
        q, k, v, mask, bias, alibi_slopes, sinks, query_offset, query_lengths, key_lengths
    )
    if flag("varlen", varlen):
        # Of the sequences it matters only that lengths and offsets are one for each.
        of_each = [x.shape for x in (query_offset, key_lengths) if hasattr(x, "shape")]
        ends = ArraySpec((1 + max([math.prod(x) for x in of_each], default=0),), (4,), _ENDS)
        given = given._replace(cu_seqlens_q=ends, cu_seqlens_k=ends)
    operands, array_options, values = _by_role(given, without_values=v is None)
    engine_name, described = interop.describe(operands, options=array_options, values=values)
    if v is None:
        described["v"] = described["k"].without_columns()
    core, arrays = engine.load(engine_name), AttentionArrays(**described)
    differentiated = flag("backward", backward)
    problem = AttentionProblem.of(
        arrays,
        enable_gqa=enable_gqa,
        scale=scale,
        causal=causal,
        window=window,
        softcap=softcap,
        num_splits=None if differentiated else num_splits,
        method="auto" if differentiated else method,
    )
    if differentiated:
        problems = [
            AttentionVjpProblem.of_all(
                problem, arrays, enable_gqa=enable_gqa, deterministic=fixed, method=method
            )
            for fixed in (False, True)
        ]
        check_method(problems[0].method, core.attention_vjp_methods(problems[0]), engine_name)
        return max(map(core.attention_vjp_workspace, problems))
    check_method(problem.method, core.attention_methods(problem), engine_name)
    return core.attention_workspace(problem)


class AttentionCall(NamedTuple):
    """An attention call, opened: everything checked, nothing computed."""

    home: interop.Home
    core: engine.Engine
    problem: AttentionProblem
    arrays: AttentionArrays
    outputs: dict[str, Any]
    """Those that were given."""
    heads: tuple[int, int] | None
    """(Key heads, query heads for each) if `enable_gqa` split the head axes in two."""
    q_strides: tuple[int, ...]


def open_call(
    given: AttentionArrays,
    outputs_given: dict[str, Any],
    *,
    enable_gqa: object,
    check: object = False,
    without_values: bool = False,
    **options: Any,
) -> AttentionCall:
    """Recognise and validate the arguments of an attention call; outputs may be None.

    Of a call without values the one result, called `out`, is the logsumexp.
    """
    home, arrays, outputs, _ = enter(given, outputs_given, without_values=without_values)
    core = engine.load(home.engine)
    problem = AttentionProblem.of(arrays, enable_gqa=enable_gqa, **options)
    heads = (problem.batch_shape[-2], problem.batch_shape[-1]) if enable_gqa else None
    if problem.method != "auto":
        with core.device_of(arrays.q):
            check_method(problem.method, core.attention_methods(problem), home.engine)
    if outputs:
        axes = {"out": -2} if without_values else {"out": -3, "lse": -2}
        _check_outputs(problem, outputs, axes, arrays, heads)
        for name, axis in axes.items():
            if heads is not None and name in outputs:
                outputs[name] = split_axis(outputs[name], axis, heads)
    arrays = ready(problem, arrays, heads, check)
    return AttentionCall(home, core, problem, arrays, outputs, heads, arrays.q.strides)


def ready(
    problem: AttentionProblem,
    arrays: AttentionArrays,
    heads: tuple[int, int] | None,
    check: object,
) -> AttentionArrays:
    """Check the values of lengths and ends, and return the arrays as an engine takes them."""
    if heads is not None:
        arrays = _group_heads(arrays, heads)
    if flag("check", check):
        for name, limit in (("query_lengths", problem.tq), ("key_lengths", problem.tk)):
            lengths = getattr(arrays, name)
            if hasattr(lengths, "get"):  # on a GPU; values of the host were checked
                check_lengths(name, lengths.get(), limit)
    if problem.sequences is not None:
        check_sequences(problem, arrays, wait=bool(check))
        if not problem.sequences:  # there is no element to read
            arrays = arrays._replace(query_offset=None, key_lengths=None)
    return arrays


def complete(call: AttentionCall, return_lse: object, out: Any, lse: Any) -> Any:
    """Allocate what the caller did not give, compute, and return the caller's kind of arrays."""
    home, core, problem, arrays, outputs, heads, q_strides = call
    return_lse = flag("return_lse", return_lse) or lse is not None
    result, result_lse = outputs.get("out"), outputs.get("lse")
    with core.device_of(arrays.q):
        if "workspace" in outputs:
            require_workspace(outputs["workspace"], core.attention_workspace(problem))
        if result is None:
            strides = _result_strides(problem, q_strides)
            result = core.empty(problem.out_shape, problem.dtype, strides)
        if return_lse and result_lse is None:
            result_lse = core.empty(problem.lse_shape, accumulator(problem.dtype))
        core.attention(problem, arrays, result, result_lse, outputs.get("workspace"))

    result = home.restore(join_heads(result, -4, heads), out)
    return (result, home.restore(join_heads(result_lse, -3, heads), lse)) if return_lse else result


def enter(
    given: AttentionArrays,
    outputs_given: dict[str, Any],
    results: dict[str, Any] | None = None,
    *,
    without_values: bool = False,
) -> tuple[interop.Home, AttentionArrays, dict[str, Any], dict[str, Any]]:
    """Recognise the arrays of a call, and those outputs that are given.

    `results` are what a backward reads besides the operands, without those that are None and may
    be. Return where all live, the operands, the outputs and the results. For a call that has no v,
    it is a view of k without columns.
    """
    results = results or {}
    outputs = {name: x for name, x in outputs_given.items() if x is not None}
    options = [x for x in given[3:] if x is not None and type(x) is not int]
    home = interop.cupy_home(
        *given[: 2 if without_values else 3], *results.values(), *options, *outputs.values()
    )
    arrays = given
    if home is None:
        operands, array_options, values = _by_role(given, without_values=without_values)
        home, native = interop.enter(
            operands | results, options=array_options, values=values, outputs=outputs
        )
        arrays = AttentionArrays._make(map(native.get, AttentionArrays._fields))
        outputs, results = ({name: native[name] for name in part} for part in (outputs, results))
    if without_values:
        arrays = arrays._replace(v=arrays.k[..., :0] if arrays.k.ndim else arrays.k)
    return home, arrays, outputs, results


def _by_role(
    given: AttentionArrays, *, without_values: bool
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Split the arguments into operands, array options, and integers; None is left out.

    An operand that is None stays, to be refused by name, but for v in a call that has none.
    """
    operands = {"q": given[0], "k": given[1]}
    if not without_values:
        operands["v"] = given[2]
    options: dict[str, Any] = {}
    values: dict[str, Any] = {}
    for i in range(3, len(given)):
        if given[i] is not None:
            (options if i < FIRST_INTEGER else values)[given._fields[i]] = given[i]
    return operands, options, values


def check_method(method: str, possible: Sequence[str], engine_name: str) -> None:
    """Raise unless the engine can run a problem, whose possible methods these are, by `method`."""
    if method != "auto":
        known = [name for names in engine.ATTENTION_METHODS.values() for name in names]
        choose_method(method, possible, known, f"on the {engine_name}")


def _check_outputs(
    problem: AttentionProblem,
    outputs: dict[str, Any],
    axes: dict[str, int],
    arrays: AttentionArrays,
    heads: tuple[int, int] | None,
) -> None:
    """Raise unless the outputs fit the problem and keep clear of its inputs and each other.

    `axes` has the head axis of each result. Arrays are as they were given, with one head axis.
    """
    given = tuple(
        (name, axes.get(name), ArraySpec(x.shape, x.strides, x.dtype))
        for name, x in outputs.items()
    )
    _check_layouts(problem, given, heads)
    interop.refuse_overlap(outputs, arrays._asdict())


@lru_cache(maxsize=1024)
def _check_layouts(
    problem: AttentionProblem,
    given: tuple[tuple[str, int | None, ArraySpec], ...],
    heads: tuple[int, int] | None,
) -> None:
    """Raise unless outputs, each with its name and head axis, have the shapes and dtypes they need.

    What passed once is not looked at again: it would take a tenth of the time of a call.
    """
    acc = accumulator(problem.dtype)
    rows = problem.out_shape, [problem.dtype, acc][: 1 + (problem.dtype.itemsize == 2)]
    logs = problem.lse_shape, [acc]
    for name, axis, spec in given:
        if axis is None:
            check_workspace(spec)
        else:
            full, dtypes = rows if axis == -3 else logs
            require_output(name, spec, joined(full, axis - 1, heads), dtypes)


def check_workspace(spec: ArraySpec) -> None:
    """Raise unless an array is bytes end to end."""
    # Strides of axes without a second element are whatever its library likes.
    if len(spec.shape) != 1 or (spec.shape[0] > 1 and spec.strides != (spec.dtype.itemsize,)):
        raise ValueError(
            f"workspace has shape {spec.shape} and strides {spec.strides}; "
            f"one contiguous axis of bytes is needed"
        )
    if spec.dtype != np.uint8:
        raise TypeError(f"workspace has dtype {spec.dtype}; an array of uint8 is needed")


def require_workspace(workspace: Any, need: int) -> None:
    """Raise unless the caller's workspace has the bytes that a problem needs."""
    if workspace.nbytes < need:
        raise ValueError(f"workspace has {workspace.nbytes} bytes; this problem needs {need}")


def _result_strides(problem: AttentionProblem, q_strides: tuple[int, ...]) -> tuple[int, ...]:
    """Return strides in the order of q's axes in memory, for the allocation of the result."""
    return (0,) * (len(problem.batch_shape) + 2 - len(q_strides)) + q_strides


def _group_heads(arrays: AttentionArrays, heads: tuple[int, int]) -> AttentionArrays:
    """View the head axes of arrays that `enable_gqa` speaks of as two, as the problem has them."""
    views = {
        name: split_axis(getattr(arrays, name), axis, sizes)
        for name, (axis, sizes) in head_axes(arrays, heads).items()
    }
    return arrays._replace(**views)


def split_axis(x: Any, axis: int, heads: tuple[int, int]) -> Any:
    """View the axis of the heads as two; what broadcasts along it still does."""
    if x is None or not hasattr(x, "shape") or len(x.shape) < -axis:
        return x
    at = len(x.shape) + axis
    return x.reshape(*x.shape[:at], *((1, 1) if x.shape[at] == 1 else heads), *x.shape[at + 1 :])


def join_heads(x: Any, axis: int, heads: tuple[int, int] | None) -> Any:
    """Undo on a result what `enable_gqa` did to the operands: one head axis again, by a view."""
    return x if x is None or heads is None else x.reshape(joined(x.shape, axis, heads))
