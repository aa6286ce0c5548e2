"""Partial results and their merge: the softmax state, and attention over parts of the keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from . import engine, interop
from ._softmax import Axis, array_like, run
from .problem import ArraySpec, accumulator, require_float, require_output, require_same


class SoftmaxState(NamedTuple):
    """Maximum m and normalizer l = sum(exp(x - m)) of rows: all a softmax must know of them.

    States form a commutative monoid under `merge_softmax`; ``SoftmaxState()`` is the identity.

    Parameters
    ----------
    maximum : array, default -inf
        Maximum of each row, -inf for one that is empty.
    normalizer : array, default 0
        Sum of ``exp(x - maximum)`` of each row.

    References
    ----------
    .. [1] M. Milakov and N. Gimelshein, "Online normalizer calculation for softmax", 2018,
       arXiv:1805.02867, section 3.1.
    """

    maximum: Any = -np.inf
    normalizer: Any = 0.0

    def logsumexp(self) -> Any:
        """Return ``maximum + log(normalizer)``, of the state's shape; -inf for empty rows.

        Returns
        -------
        array
            Of the state's shape, dtype and library.
        """
        return run("state_logsumexp", self._asdict())[0]

    def apply(self, x: Any) -> Any:
        """Return the softmax of `x` under this state: ``exp(x - maximum) / normalizer``.

        Parameters
        ----------
        x : array_like
            Elements the state has taken in. The state broadcasts to its shape, as states keep the
            reduced axes with size 1, and is of its accumulator's dtype.

        Returns
        -------
        array
            Of the shape of `x`, and of its dtype (float64 for integers and bool). 0 in empty rows.

        Raises
        ------
        TypeError, ValueError
            `x` is of another library or precision than the state, or of a shape it does not
            broadcast to.
        """
        return run("state_apply", {"x": x, **self._asdict()})[0]


def softmax_state(x: Any, axis: Axis = -1, *, where: Any = None) -> SoftmaxState:
    """Maximum and normalizer of the rows of an array.

    Parameters
    ----------
    x : array_like
        Array of any shape, as in `softmax`.
    axis : int, tuple of int or None, default -1
        Axes that make a row; None takes all.
    where : array_like of bool, optional
        Broadcasts to the shape of `x`. Where False, an element takes no part.

    Returns
    -------
    SoftmaxState
        Arrays of the shape of `x` with size 1 on `axis`: float64 for float64, integers and bool,
        else float32.

    Raises
    ------
    TypeError, ValueError
        As in `softmax`.
    """
    return SoftmaxState(*run("softmax_state", {"x": x}, axis, where=where))


def merge_softmax(a: SoftmaxState, b: SoftmaxState) -> SoftmaxState:
    """State of the rows of two states together.

    ``m = max(m_a, m_b)`` and ``l = l_a * exp(m_a - m) + l_b * exp(m_b - m)``.

    Parameters
    ----------
    a, b : SoftmaxState
        Four arrays of one library and dtype (float32 or float64) whose shapes broadcast; Python
        numbers take the dtype of the others.

    Returns
    -------
    SoftmaxState
        The same for both orders, bit for bit. A part with maximum -inf leaves the other as it is,
        bit for bit, whatever its normalizer.

    Raises
    ------
    TypeError, ValueError
        Libraries or dtypes that differ or are not supported, shapes that do not broadcast.

    References
    ----------
    .. [1] M. Milakov and N. Gimelshein, "Online normalizer calculation for softmax", 2018,
       arXiv:1805.02867, equation 4.
    """
    fields: dict[str, object] = {}
    for name, state in (("a", a), ("b", b)):
        if not isinstance(state, SoftmaxState):
            raise TypeError(f"{name} must be a SoftmaxState, got {type(state).__name__}")
        fields |= {f"{name}.maximum": state[0], f"{name}.normalizer": state[1]}
    weak = {name: x for name, x in fields.items() if type(x) in (int, float)}
    if len(weak) == len(fields):
        weak = {}
    home, native = interop.enter(
        {n: array_like(n, x) for n, x in fields.items() if n not in weak}, values=weak
    )
    specs = {n: ArraySpec.of(x) for n, x in native.items() if n not in weak}
    first, spec = next(iter(specs.items()))
    for name, other in specs.items():
        if other.dtype not in (np.float32, np.float64):
            raise TypeError(f"{name} has dtype {other.dtype}; accepted are float32, float64")
        require_same(name, other.dtype, first, spec.dtype, "dtype")
    try:
        shape = np.broadcast_shapes(*(other.shape for other in specs.values()))
    except ValueError:
        shapes = ", ".join(f"{name} {other.shape}" for name, other in specs.items())
        raise ValueError(f"a and b do not broadcast: {shapes}") from None
    core = engine.load(home.engine)
    parts = [(native[f"{n}.maximum"], native[f"{n}.normalizer"]) for n in ("a", "b")]
    with core.device_of(native[first]):
        maximum, normalizer = (core.empty(shape, spec.dtype) for _ in range(2))
        core.merge_softmax(parts, maximum, normalizer)
    return SoftmaxState(home.restore(maximum), home.restore(normalizer))


def merge_attention(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any) -> tuple[Any, Any]:
    """Attention over the union of two disjoint key sets, from the results over each, exactly.

    ``lse = log(exp(lse_a) + exp(lse_b))`` and
    ``out = exp(lse_a - lse) * out_a + exp(lse_b - lse) * out_b``.

    Parameters
    ----------
    out_a, out_b : array (..., T, Dv)
        Outputs of the same queries over the two key sets, of equal shape. Their dtypes are equal,
        or one is float32 and the other float16 or bfloat16.
    lse_a, lse_b : array (..., T)
        Their logsumexp: float64 for float64 outputs, else float32.

    Returns
    -------
    out : array (..., T, Dv)
        float32 if either part is, else the parts' dtype.
    lse : array (..., T)
        Both are the same for both orders, bit for bit. A row whose lse is -inf in one part is the
        other part's row, bit for bit, whatever the first one's output holds; if it is -inf in both,
        out is 0 and lse -inf.

    Raises
    ------
    TypeError
        Libraries that differ, dtypes that differ otherwise than said or are not supported.
    ValueError
        Shapes that do not fit.

    References
    ----------
    .. [1] T. Dao, D. Haziza, F. Massa and G. Sizov, "Flash-Decoding for long-context inference",
       2023: the reduction of its second step.
    """
    home, native = interop.enter({"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b})
    specs = {name: ArraySpec.of(x) for name, x in native.items()}
    out, merged = specs["out_a"], _merged_dtype(specs)
    core = engine.load(home.engine)
    parts = [(native["out_a"], native["lse_a"]), (native["out_b"], native["lse_b"])]
    with core.device_of(native["out_a"]):
        result = core.empty(out.shape, merged, out.strides)
        lse = core.empty(out.shape[:-1], accumulator(merged), specs["lse_a"].strides)
        core.merge_attention(parts, result, lse)
    return home.restore(result), home.restore(lse)


def _merged_dtype(specs: Mapping[str, ArraySpec]) -> np.dtype:
    """Return the dtype of the merge of two parts, or raise naming what does not fit."""
    out, other = specs["out_a"], specs["out_b"]
    if len(out.shape) < 2:
        raise ValueError(f"out_a has shape {out.shape}; the last two axes are (tokens, features)")
    require_same("out_b", other.shape, "out_a", out.shape, "shape")
    for part in ("a", "b"):
        dtype = specs[f"out_{part}"].dtype
        require_float(f"out_{part}", dtype)
        lse = specs[f"lse_{part}"]
        if lse.shape != out.shape[:-1]:
            raise ValueError(
                f"lse_{part} has shape {lse.shape}; out_{part} of shape {out.shape} "
                f"needs {out.shape[:-1]}"
            )
        if lse.dtype != accumulator(dtype):
            raise TypeError(
                f"lse_{part} has dtype {lse.dtype}; out_{part} of dtype {dtype} needs "
                f"{accumulator(dtype)}"
            )
    merged = out.dtype
    if other.dtype != out.dtype:
        merged = np.dtype(np.float32)
        if merged not in (out.dtype, other.dtype) or np.float64 in (out.dtype, other.dtype):
            raise TypeError(
                f"out_b has dtype {other.dtype} but out_a has {out.dtype}; they must be equal, or "
                f"one float32 and the other float16 or bfloat16"
            )
    return merged


def merge_attention_vjp(
    dout: Any, dlse: Any, out_a: Any, lse_a: Any, out_b: Any, lse_b: Any
) -> tuple[Any, Any, Any, Any]:
    r"""Gradients of `merge_attention`.

    With the parts' weights ``w_a = exp(lse_a - lse)`` and ``w_b = exp(lse_b - lse)``, whose sum is
    1,

    .. math:: dout_a = w_a\, dout, \qquad
              dlse_a = w_a\, dlse + w_a w_b \sum dout \cdot (out_a - out_b)

    with the sum over the features, and likewise for b.

    Parameters
    ----------
    dout : array (..., T, Dv)
        Cotangent of the merged out, of its shape and dtype.
    dlse : array (..., T) or None
        Cotangent of the merged lse, of its dtype; None is zero.
    out_a, lse_a, out_b, lse_b : array
        What `merge_attention` was given.

    Returns
    -------
    dout_a, dlse_a, dout_b, dlse_b : array
        Each of its operand's shape and dtype. A part whose lse is -inf has gradients 0, whatever
        its out holds, and those of the other part are dout and dlse.

    Raises
    ------
    TypeError
        Libraries that differ, dtypes that do not fit.
    ValueError
        Shapes that do not fit.

    References
    ----------
    .. [1] T. Dao, D. Haziza, F. Massa and G. Sizov, "Flash-Decoding for long-context inference",
       2023: the merge; its gradient is that of a softmax over two parts.
    """
    home, native = interop.enter(
        {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b, "dout": dout},
        options={"dlse": dlse},
    )
    specs = {name: ArraySpec.of(x) for name, x in native.items() if x is not None}
    merged = _merged_dtype(specs)
    shape = specs["out_a"].shape
    require_output("dout", specs["dout"], shape, [merged])
    if "dlse" in specs:
        require_output("dlse", specs["dlse"], shape[:-1], [accumulator(merged)])
    core = engine.load(home.engine)
    parts = [(native["out_a"], native["lse_a"]), (native["out_b"], native["lse_b"])]
    with core.device_of(native["out_a"]):
        grads = [tuple(core.empty(x.shape, x.dtype, x.strides) for x in part) for part in parts]
        core.merge_attention_vjp((native["dout"], native["dlse"]), parts, grads)
    (dout_a, dlse_a), (dout_b, dlse_b) = [tuple(map(home.restore, pair)) for pair in grads]
    return dout_a, dlse_a, dout_b, dlse_b
