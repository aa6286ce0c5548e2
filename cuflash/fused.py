"""Chains of operations in one kernel: what lies between them never reaches memory."""

from __future__ import annotations

from typing import Any

from . import engine, interop
from ._options import flag
from .problem import ArraySpec, require_output
from .problem_fused import (
    Dropout,
    LayerNormArrays,
    LayerNormGrads,
    LayerNormProblem,
    MatmulProblem,
)

__all__ = [
    "LayerNormGrads",
    "dropout_bias_layer_norm",
    "dropout_bias_layer_norm_vjp",
    "matmul_bias_activation",
]


def matmul_bias_activation(
    a: Any, b: Any, bias: Any, *, activation: str | None = "relu", out: Any = None
) -> Any:
    r"""Matrix product, bias and activation: ``activation(a @ b + bias)``.

    Parameters
    ----------
    a : array
        Shape (..., M, K), any strides.
    b : array
        Shape (..., K, N), any strides; the batch axes broadcast as in `numpy.matmul`.
    bias : array
        Shape (N,).
    activation : {"relu", "gelu", "gelu_tanh", None}, default "relu"
        max(x, 0); x times the normal distribution function of x; its approximation by tanh [1]_;
        nothing.
    out : array, optional
        Array for the result, of its shape and dtype.

    Returns
    -------
    array
        Shape (..., M, N), of the dtype of `a` and `b`. Sums are kept in float32, for float64 in
        float64, and rounded once, after the activation.

    Raises
    ------
    TypeError
        Dtypes that are unsupported or differ, arrays of different libraries.
    ValueError
        Shapes that do not fit, an unknown `activation`, `out` of another shape, read-only, or
        sharing memory with an input.

    Notes
    -----
    Apart, a bias and an activation read and write the product once more each. On a GPU all of it is
    one kernel, on tensor cores for float16 and bfloat16, where operands whose rows it cannot fetch
    are copied first. In float32 and float64 that holds below 64 terms: from there on the product is
    cuBLAS's, which gains more than one kernel for bias and activation costs; not in float32 where
    ``CUPY_TF32`` asks CuPy for less. `cuflash.analysis.traffic` tells what fusion saves.

    References
    ----------
    .. [1] D. Hendrycks and K. Gimpel, "Gaussian error linear units", 2016, arXiv:1606.08415.

    Examples
    --------
    >>> import numpy as np
    >>> from cuflash import fused
    >>> fused.matmul_bias_activation(np.eye(2), np.ones((2, 2)), np.array([-3.0, 1.0]))
    array([[0., 2.],
           [0., 2.]])
    """
    home, native = interop.enter({"a": a, "b": b, "bias": bias}, outputs={"out": out})
    given = native.pop("out")
    problem = MatmulProblem.of(native, activation)
    core = engine.load(home.engine)
    result = given
    if given is not None:
        require_output("out", ArraySpec.of(given), problem.out_shape, (problem.dtype,))
        interop.refuse_overlap({"out": given}, native)
    else:
        with core.device_of(native["a"]):
            result = core.empty(problem.out_shape, problem.dtype)
    core.matmul_bias_activation(problem, native["a"], native["b"], native["bias"], result)
    return home.restore(result, out)


def dropout_bias_layer_norm(
    x: Any,
    bias: Any,
    gamma: Any,
    beta: Any,
    *,
    p: float,
    seed: int,
    offset: int = 0,
    eps: float = 1e-5,
    residual: Any = None,
    return_stats: bool = False,
) -> Any:
    r"""Bias, dropout, residual and LayerNorm over the last axis.

    With z = dropout(x + bias) + residual,

    .. math:: y = \frac{z - \bar z}{\sqrt{\overline{(z - \bar z)^2} + \epsilon}} \gamma + \beta.

    Parameters
    ----------
    x : array
        Shape (..., N), any strides.
    bias, gamma, beta : array
        Shape (N,), of the dtype of `x`.
    p : float
        Probability of being dropped, 0 <= p < 1, rounded to a multiple p' of 2**-16. What is kept
        is divided by 1 - p'.
    seed : int
        Key of the random bits, 0 <= seed < 2**64.
    offset : int, default 0
        First counter, 0 <= offset < 2**61. Arrays that share a seed have masks of their own if
        their offsets are at least an eighth of their elements apart.
    eps : float, default 1e-5
        Added to the variance.
    residual : array, optional
        Of the shape and dtype of `x`.
    return_stats : bool, default False
        Also return mean and rstd, which the gradients need.

    Returns
    -------
    y : array
        Of the shape and dtype of `x`.
    mean, rstd : array
        Mean of z and 1 / sqrt(variance + eps) of each row, shape (...), in the accumulator's dtype:
        float32, for float64 float64.

    Raises
    ------
    TypeError
        Dtypes that are unsupported or do not fit, arrays of different libraries, a `seed` or
        `offset` that is no integer.
    ValueError
        Shapes that do not fit, and `p`, `seed`, `offset` or `eps` out of range.

    Notes
    -----
    The mask is that of Philox4x32-10 [1]_, the same bit for bit on every engine and for every
    layout in memory: element e of `x`, counted in C order, has lane e % 8, of 16 bits, of the
    counter e // 8 + offset, and is kept if that is at least round(p * 65536). It is drawn anew for
    the gradients and stored nowhere.

    References
    ----------
    .. [1] J. K. Salmon, M. A. Moraes, R. O. Dror and D. E. Shaw, "Parallel random numbers: as easy
       as 1, 2, 3", SC 2011.
    """
    home, native = interop.enter(
        {"x": x, "bias": bias, "gamma": gamma, "beta": beta}, options={"residual": residual}
    )
    arrays = LayerNormArrays(**native)
    problem, dropout = LayerNormProblem.of(arrays, eps), Dropout.of(p, seed, offset)
    with_stats = flag("return_stats", return_stats)
    core = engine.load(home.engine)
    with core.device_of(arrays.x):
        y = core.empty(problem.x.shape, problem.dtype)
        stats = [
            core.empty(problem.rows_shape, problem.accumulator) if with_stats else None
            for _ in range(2)
        ]
    core.dropout_bias_layer_norm(problem, dropout, arrays, y, *stats)
    return tuple(map(home.restore, (y, *stats))) if with_stats else home.restore(y)


def dropout_bias_layer_norm_vjp(
    dy: Any,
    x: Any,
    bias: Any,
    gamma: Any,
    mean: Any,
    rstd: Any,
    *,
    p: float,
    seed: int,
    offset: int = 0,
    residual: Any = None,
) -> LayerNormGrads:
    r"""Pull a cotangent back through `dropout_bias_layer_norm`.

    Parameters
    ----------
    dy : array
        Cotangent of y, of the shape and dtype of `x`.
    x, bias, gamma, residual : array
        As `dropout_bias_layer_norm` took them.
    mean, rstd : array
        What it returned.
    p, seed, offset
        As there.

    Returns
    -------
    LayerNormGrads
        dx, dbias, dgamma, dbeta and, with a residual, dresidual. With :math:`\hat x = (z - \bar z)
        \cdot \mathrm{rstd}` and bars for means over a row,

        .. math:: dz = \mathrm{rstd} \left(dy\,\gamma - \overline{dy\,\gamma}
            - \hat x\, \overline{dy\,\gamma\,\hat x}\right)

        is dresidual; dx is that, dropped and scaled as x was; dbias, dgamma and dbeta are the sums
        of dx, dy xhat and dy over rows.

    Raises
    ------
    TypeError, ValueError
        As `dropout_bias_layer_norm`.
    """
    home, native = interop.enter(
        {"dy": dy, "x": x, "bias": bias, "gamma": gamma, "mean": mean, "rstd": rstd},
        options={"residual": residual},
    )
    arrays = LayerNormArrays(**native)
    problem, dropout = LayerNormProblem.of(arrays, 0), Dropout.of(p, seed, offset)
    core = engine.load(home.engine)
    shapes = [problem.x.shape, *[(problem.columns,)] * 3, problem.x.shape]
    with core.device_of(arrays.x):
        grads = LayerNormGrads(*(core.empty(shape, problem.dtype) for shape in shapes[:4]))
        if arrays.residual is not None:
            grads = grads._replace(dresidual=core.empty(shapes[4], problem.dtype))
    core.dropout_bias_layer_norm_vjp(problem, dropout, arrays, grads)
    return LayerNormGrads(*(x if x is None else home.restore(x) for x in grads))
