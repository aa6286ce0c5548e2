"""The softmax family: what users call."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from . import engine, interop
from ._options import choose_method, flag
from .problem import ArraySpec, SoftmaxProblem, keep_axes, require_output

Axis = int | tuple[int, ...] | None


def array_like(name: str, x: object) -> Any:
    """Return sequences and Python scalars as NumPy arrays, anything else as it is."""
    if not isinstance(x, numbers.Number | Sequence) or isinstance(x, np.generic):
        return x
    try:
        return np.asarray(x)
    except ValueError as error:
        raise ValueError(f"{name} is a sequence that makes no array: {error}") from None


def run(
    operation: str,
    inputs: Mapping[str, object],
    axis: object = (),
    *,
    where: object = None,
    out: object = None,
    keepdims: bool = True,
    method: object = "auto",
) -> list[Any]:
    """Validate a call, let the operands' engine compute it and return results of their library.

    Parameters
    ----------
    operation : str
        One of `SoftmaxProblem`.
    inputs : mapping of str to array_like
        Operands by name, in the order of `SoftmaxProblem`.
    axis, where, out, keepdims, method
        As the public functions take them.

    Returns
    -------
    list of array
        One result, or maximum and normalizer for "softmax_state".
    """
    operands = {name: array_like(name, x) for name, x in inputs.items()}
    mask = array_like("where", where)
    # A mask written out as a sequence is a value of the host, free to meet arrays of any library.
    apart = where is not None and mask is not where
    home, native = interop.enter(
        operands,
        options=None if apart else {"where": mask},
        values={"where": mask} if apart else None,
        outputs={"out": out},
    )
    mask, given = native.pop("where"), native.pop("out")
    methods = engine.SOFTMAX_METHODS[home.engine]
    elsewhere = {name for known in engine.SOFTMAX_METHODS.values() for name in known}
    problem = SoftmaxProblem.of(
        operation,
        native,
        axis,
        mask,
        choose_method(method, methods, tuple(elsewhere), f"on the {home.engine} engine"),
    )
    keepdims = flag("keepdims", keepdims)

    arrays = [keep_axes(x, problem.axes, len(problem.operand.shape)) for x in native.values()]
    core = engine.load(home.engine)
    if given is not None:
        kept = problem.out_shape
        shape = kept if keepdims else tuple(np.delete(kept, problem.axes).tolist())
        require_output("out", ArraySpec.of(given), shape, (problem.out_dtype,))
        in_place = operation in ("softmax", "log_softmax") and interop.same_view(given, native["x"])
        read = {} if in_place else native
        interop.refuse_overlap({"out": given}, {**read, "where": mask})
        targets, results = [keep_axes(given, problem.axes, len(kept))], [given]
    else:
        count = 2 if operation == "softmax_state" else 1
        with core.device_of(arrays[0]):
            targets = [
                core.empty(problem.out_shape, problem.out_dtype, problem.operand.strides)
                for _ in range(count)
            ]
        results = targets if keepdims else [x.squeeze(problem.axes) for x in targets]
    core.softmax(problem, arrays, mask, targets)
    return [home.restore(result, out) for result in results]


def softmax(
    x: Any,
    axis: Axis = -1,
    *,
    where: Any = None,
    out: Any = None,
    method: str = "auto",
) -> Any:
    r"""Softmax over one or more axes: ``exp(x - max) / sum(exp(x - max))``.

    Parameters
    ----------
    x : array_like
        Array of any shape and strides. float16 and bfloat16 are accumulated in float32; integers
        and bool are computed in float64.
    axis : int, tuple of int or None, default -1
        Axes that are normalised together; None takes all.
    where : array_like of bool, optional
        Broadcasts to the shape of `x`. Where False, an element takes no part, whatever it holds,
        and its result is 0.
    out : array, optional
        Array for the result, of its shape and dtype. It may be `x` itself.
    method : {"auto", "naive", "fused", "online", "cluster"}, default "auto"
        The algorithm; "cluster" exists on GPUs only.

    Returns
    -------
    array
        Of the library and shape of `x`, its axes in the same order in memory; the dtype is that of
        `x`, or float64 for integers and bool. A row that sees nothing, or only -inf, is 0; a row
        that sees NaN or +inf is NaN.

    Raises
    ------
    TypeError
        Unsupported dtypes, `where` not bool, arrays of different libraries, `out` of another dtype.
    ValueError
        `axis` out of range (`numpy.exceptions.AxisError`) or repeated; `where` that does not
        broadcast to `x`; `out` of another shape, read-only, or sharing memory with an input in
        another way than being `x`; an unknown `method`, or one of another engine.

    Notes
    -----
    "naive" makes a pass each for the maximum, the sum and the division, "fused" keeps a row on chip
    (in cache) between one read and one write, and "online" reads long rows once to update the pair
    :math:`m, l` [1]_ and once more to normalise.

    References
    ----------
    .. [1] M. Milakov and N. Gimelshein, "Online normalizer calculation for softmax", 2018,
       arXiv:1805.02867, algorithm 3.
    """
    return run("softmax", {"x": x}, axis, where=where, out=out, method=method)[0]


def log_softmax(
    x: Any,
    axis: Axis = -1,
    *,
    where: Any = None,
    out: Any = None,
    method: str = "auto",
) -> Any:
    """Logarithm of the softmax: ``x - max - log(sum(exp(x - max)))``.

    Parameters
    ----------
    x : array_like
        Array of any shape and strides, as in `softmax`.
    axis : int, tuple of int or None, default -1
        Axes that are normalised together; None takes all.
    where : array_like of bool, optional
        Broadcasts to the shape of `x`. Where False, an element takes no part, whatever it holds,
        and its result is -inf.
    out : array, optional
        Array for the result, of its shape and dtype. It may be `x` itself.
    method : {"auto", "naive", "fused", "online", "cluster"}, default "auto"
        The algorithm, as in `softmax`.

    Returns
    -------
    array
        As `softmax` returns it: -inf where the softmax is 0 by -inf, NaN where it is NaN.

    Raises
    ------
    TypeError, ValueError
        As in `softmax`.

    See Also
    --------
    softmax
    """
    return run("log_softmax", {"x": x}, axis, where=where, out=out, method=method)[0]


def logsumexp(
    x: Any,
    axis: Axis = -1,
    *,
    where: Any = None,
    keepdims: bool = False,
    out: Any = None,
) -> Any:
    """Logarithm of the sum of exponentials: ``max + log(sum(exp(x - max)))``.

    Parameters
    ----------
    x : array_like
        Array of any shape and strides, as in `softmax`.
    axis : int, tuple of int or None, default -1
        Axes that are reduced; None takes all.
    where : array_like of bool, optional
        Broadcasts to the shape of `x`. Where False, an element takes no part.
    keepdims : bool, default False
        Keep the reduced axes with size 1.
    out : array, optional
        Array for the result, of its shape and dtype.

    Returns
    -------
    array
        The shape of `x` without `axis`, or with size 1 there; the dtype is that of `x`, or float64
        for integers and bool. -inf for a row that sees nothing, or only -inf; NaN for one that sees
        NaN, else +inf for one that sees +inf, as in `scipy.special.logsumexp`.

    Raises
    ------
    TypeError, ValueError
        As in `softmax`; `out` may not share memory with an input.
    """
    return run("logsumexp", {"x": x}, axis, where=where, out=out, keepdims=keepdims)[0]


def softmax_vjp(
    dy: Any,
    y: Any,
    axis: Axis = -1,
    *,
    where: Any = None,
    out: Any = None,
) -> Any:
    """Pull a cotangent back through the softmax: ``dx = y * (dy - sum(y * dy))``.

    Parameters
    ----------
    dy : array_like
        Cotangent of `y`, of its shape and dtype.
    y : array_like
        Result of `softmax`.
    axis : int, tuple of int or None, default -1
        Axes that were normalised together.
    where : array_like of bool, optional
        The mask that `softmax` was given. Where False, the gradient is 0 and `dy` is not used.
    out : array, optional
        Array for the result, of its shape and dtype.

    Returns
    -------
    array
        Gradient of the shape of `y`, and of its dtype (float64 for integers and bool). 0 in a row
        whose `y` is all 0, whatever `dy` holds there.

    Raises
    ------
    TypeError, ValueError
        As in `softmax`; also dtypes (TypeError) or shapes (ValueError) of `dy` and `y` that differ.
        `out` may not share memory with an input.
    """
    return run("softmax_vjp", {"dy": dy, "y": y}, axis, where=where, out=out)[0]


def log_softmax_vjp(
    dy: Any,
    y: Any,
    axis: Axis = -1,
    *,
    where: Any = None,
    out: Any = None,
) -> Any:
    """Pull a cotangent back through the log-softmax: ``dx = dy - exp(y) * sum(dy)``.

    Parameters
    ----------
    dy : array_like
        Cotangent of `y`, of its shape and dtype.
    y : array_like
        Result of `log_softmax`.
    axis : int, tuple of int or None, default -1
        Axes that were normalised together.
    where : array_like of bool, optional
        The mask that `log_softmax` was given. Where False, the gradient is 0 and `dy` is not used.
    out : array, optional
        Array for the result, of its shape and dtype.

    Returns
    -------
    array
        Gradient of the shape of `y`, and of its dtype (float64 for integers and bool). 0 in a row
        whose `y` is all -inf, whatever `dy` holds there.

    Raises
    ------
    TypeError, ValueError
        As in `softmax_vjp`.
    """
    return run("log_softmax_vjp", {"dy": dy, "y": y}, axis, where=where, out=out)[0]


def logsumexp_vjp(
    dlse: Any,
    x: Any,
    lse: Any,
    axis: Axis = -1,
    *,
    where: Any = None,
    out: Any = None,
) -> Any:
    """Pull a cotangent back through the logsumexp: ``dx = dlse * exp(x - lse)``.

    Parameters
    ----------
    dlse : array_like
        Cotangent of `lse`.
    x : array_like
        Operand of `logsumexp`.
    lse : array_like
        Result of `logsumexp`. It and `dlse` may each have the reduced axes with size 1 or lack
        them, and be of the dtype of `x` or of its accumulator (float32 for 16-bit dtypes).
    axis : int, tuple of int or None, default -1
        Axes that were reduced.
    where : array_like of bool, optional
        The mask that `logsumexp` was given. Where False, the gradient is 0.
    out : array, optional
        Array for the result, of its shape and dtype.

    Returns
    -------
    array
        Gradient of the shape of `x`, and of its dtype (float64 for integers and bool). 0 in a row
        whose `lse` is -inf.

    Raises
    ------
    TypeError, ValueError
        As in `softmax`; also shapes or dtypes of `dlse` and `lse` that do not fit `x`. `out` may
        not share memory with an input.
    """
    inputs = {"dlse": dlse, "x": x, "lse": lse}
    return run("logsumexp_vjp", inputs, axis, where=where, out=out)[0]
