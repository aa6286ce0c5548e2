"""The softmax family as users of JAX call it."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from .._options import flag
from .._softmax import Axis
from ..problem import ArraySpec, SoftmaxProblem
from ._arrays import as_array
from .calls import Operand, SoftmaxCall
from .ops import bind


def softmax(x: Any, axis: Axis = -1, *, where: Any = None, method: str = "auto") -> Any:
    """Softmax over one or more axes: ``exp(x - max) / sum(exp(x - max))``.

    Parameters
    ----------
    x : array_like
        Array of any shape. float16 and bfloat16 are accumulated in float32; integers and bool are
        computed in JAX's default float.
    axis : int, tuple of int or None, default -1
        Axes that are normalised together; None takes all.
    where : array_like of bool, optional
        Broadcasts to the shape of `x`. Where False, an element takes no part, whatever it holds,
        and its result is 0.
    method : str, default "auto"
        The algorithm, as of `cuflash.softmax`.

    Returns
    -------
    array
        Of the shape and dtype of `x`. A row that sees nothing, or only -inf, is 0.

    Raises
    ------
    TypeError, ValueError
        As `cuflash.softmax`, when the function is traced; for `method`, when it is compiled.

    References
    ----------
    .. [1] M. Milakov and N. Gimelshein, "Online normalizer calculation for softmax", 2018,
       arXiv:1805.02867, algorithm 3.
    """
    return _run("softmax", x, axis, where, method)[0]


def log_softmax(x: Any, axis: Axis = -1, *, where: Any = None, method: str = "auto") -> Any:
    """Logarithm of the softmax: ``x - max - log(sum(exp(x - max)))``.

    Parameters
    ----------
    x : array_like
        As of `softmax`.
    axis : int, tuple of int or None, default -1
        Axes that are normalised together; None takes all.
    where : array_like of bool, optional
        As of `softmax`; where False, the result is -inf.
    method : str, default "auto"
        The algorithm, as of `cuflash.softmax`.

    Returns
    -------
    array
        Of the shape and dtype of `x`; -inf in a row that sees nothing, or only -inf.

    Raises
    ------
    TypeError, ValueError
        As `softmax`.
    """
    return _run("log_softmax", x, axis, where, method)[0]


def logsumexp(x: Any, axis: Axis = -1, *, where: Any = None, keepdims: bool = False) -> Any:
    """Logarithm of the sum of exponentials: ``max + log(sum(exp(x - max)))``.

    Parameters
    ----------
    x : array_like
        As of `softmax`.
    axis : int, tuple of int or None, default -1
        Axes that are reduced; None takes all.
    where : array_like of bool, optional
        Broadcasts to the shape of `x`. Where False, an element takes no part.
    keepdims : bool, default False
        Keep the reduced axes with size 1.

    Returns
    -------
    array
        The shape of `x` without `axis`, or with size 1 there; its dtype. -inf for a row that sees
        nothing, or only -inf.

    Raises
    ------
    TypeError, ValueError
        As `softmax`.
    """
    result, axes = _run("logsumexp", x, axis, where)
    return result if flag("keepdims", keepdims) else result.squeeze(axes)


def _run(
    operation: str, x: Any, axis: Axis, where: Any, method: str = "auto"
) -> tuple[Any, tuple[int, ...]]:
    """Return the result, with reduced axes of size 1, and the axes."""
    x = as_array("x", x)
    if x.dtype.kind in "biu":
        x = x.astype(jnp.result_type(float))
    buffers = [x] if where is None else [x, as_array("where", where)]
    mask = ArraySpec.of(buffers[1]) if where is not None else None
    problem = SoftmaxProblem.of(operation, {"x": ArraySpec.of(x)}, axis, mask, method)
    call = SoftmaxCall(
        operation=operation,
        shape=x.shape,
        axes=problem.axes,
        operands=tuple(
            Operand.of(b, (*(None,) * (x.ndim - b.ndim), *range(b.ndim))) for b in buffers
        ),
        masked=where is not None,
        out=Operand(problem.out_shape, problem.out_dtype.name, tuple(range(x.ndim))),
        method=method,
    )
    return bind(call, buffers)[0], problem.axes
