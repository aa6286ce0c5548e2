"""The frozen description of a call for the gradients of attention, beside `problem.py`."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ._options import flag
from .problem import (
    ArraySpec,
    AttentionArrays,
    AttentionProblem,
    accumulator,
    c_strides,
    head_axes,
    joined,
    require_output,
    require_same,
    split_heads,
)


class AttentionGrads(NamedTuple):
    """Gradients of an attention call, each of its operand's shape and dtype.

    Parameters
    ----------
    dq, dk, dv, dbias, dsinks : array, optional
        Gradients of q, k, v, bias and sinks; as an argument, the arrays to fill. None for what is
        not asked for, and for operands that were not given.
    """

    dq: Any = None
    dk: Any = None
    dv: Any = None
    dbias: Any = None
    dsinks: Any = None


class AttentionResults(NamedTuple):
    """What the backward reads besides the operands: cotangents, and what the forward returned."""

    dout: Any
    out: Any
    lse: Any
    dlse: Any = None


#: The operand that each gradient belongs to.
OPERAND_OF = dict(zip(AttentionGrads._fields, ("q", "k", "v", "bias", "sinks"), strict=True))


@dataclass(frozen=True, slots=True)
class AttentionVjpProblem:
    """One call for the gradients of attention, described.

    `forward` describes the operands and options, its method "auto". `results` are specs of the full
    shapes: `dout` and `out` `forward.out_shape`, `lse` and `dlse` `forward.lse_shape`, dlse None if
    it is zero. `dout` and `out` have the dtype of q each, or float32 where that has 16 bits.

    `grads` are specs of the gradients to fill, None for those nobody asked for. As in `forward`,
    each is broadcast to the full shape of its operand. Stride 0 on an axis of several elements says
    that the operand broadcasts along it: the gradient is the sum over it. (A view with stride 0 is
    an operand of full shape, and its gradient has strides.) The arrays beside it have as many axes,
    size 1 on those that are summed.
    """

    forward: AttentionProblem
    results: AttentionResults
    grads: AttentionGrads
    deterministic: bool
    method: str
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Hash once what plans are kept under."""
        values = self.forward, self.results, self.grads, self.deterministic, self.method
        object.__setattr__(self, "_hash", hash(values))

    def __hash__(self) -> int:
        return self._hash

    @classmethod
    def of(
        cls,
        forward: AttentionProblem,
        operands: AttentionArrays,
        results: AttentionResults,
        grads: AttentionGrads,
        *,
        enable_gqa: object = False,
        deterministic: object = False,
        method: object = "auto",
    ) -> AttentionVjpProblem:
        """Validate what the backward is given besides a forward problem, and describe it.

        All arrays are as the caller has them: with `enable_gqa` they have one head axis.

        Raises
        ------
        TypeError, ValueError
            Naming the argument, what came and what is accepted.
        """
        if not isinstance(method, str):
            raise TypeError(f"method must be a string, got {type(method).__name__}")
        # This is on the way of every call.
        return _vjp_problem(
            forward,
            _heads(forward, enable_gqa),
            tuple(map(_layout, operands)),
            tuple(map(_layout, results)),
            tuple(map(_layout, grads)),
            flag("deterministic", deterministic),
            method,
        )

    @classmethod
    def of_all(
        cls,
        forward: AttentionProblem,
        operands: AttentionArrays,
        *,
        enable_gqa: object,
        **flags: Any,
    ) -> AttentionVjpProblem:
        """Describe the call for all gradients, with all that it can be given in its widest type.

        The operands may be without data, as everything else here is.
        """
        heads = _heads(forward, enable_gqa)
        acc = accumulator(forward.dtype)
        out = _contiguous(joined(forward.out_shape, -4, heads), acc)
        lse = _contiguous(joined(forward.lse_shape, -3, heads), acc)
        grads = {
            name: _contiguous(tuple(x.shape), np.dtype(x.dtype))
            for name, operand in OPERAND_OF.items()
            if (x := getattr(operands, operand)) is not None
        }
        results = AttentionResults(out, out, lse, lse)
        return cls.of(
            forward, operands, results, AttentionGrads(**grads), enable_gqa=enable_gqa, **flags
        )


_Layouts: TypeAlias = tuple[tuple[tuple[int, ...], tuple[int, ...], np.dtype] | None, ...]


def _layout(x: Any) -> Any:
    """Describe an array as a bare tuple, which makes a cheap key; nothing else has a gradient."""
    return None if x is None or not hasattr(x, "strides") else (x.shape, x.strides, x.dtype)


@lru_cache(maxsize=1024)
def _vjp_problem(
    forward: AttentionProblem,
    heads: tuple[int, int] | None,
    operands: _Layouts,
    results: _Layouts,
    grads: _Layouts,
    deterministic: bool,
    method: str,
) -> AttentionVjpProblem:
    """Do the part of `AttentionVjpProblem.of` that depends on descriptions, once for each."""

    def specs(layouts: _Layouts) -> list[ArraySpec | None]:
        return [None if x is None else ArraySpec(*x) for x in layouts]

    given = AttentionArrays(*specs(operands))
    return AttentionVjpProblem(
        forward=forward,
        results=_result_specs(forward, AttentionResults(*specs(results)), heads),
        grads=_gradient_specs(forward, given, AttentionGrads(*specs(grads)), heads),
        deterministic=deterministic,
        method=method,
    )


def _heads(forward: AttentionProblem, enable_gqa: object) -> tuple[int, int] | None:
    """Return (key heads, query heads for each) if one head axis was split into these."""
    if not flag("enable_gqa", enable_gqa):
        return None
    return forward.batch_shape[-2], forward.batch_shape[-1]


def _contiguous(shape: tuple[int, ...], dtype: np.dtype) -> ArraySpec:
    return ArraySpec(shape, c_strides(shape, dtype.itemsize), dtype)


def _result_specs(
    forward: AttentionProblem, results: AttentionResults, heads: tuple[int, int] | None
) -> AttentionResults:
    """Describe cotangents and results, or raise naming the one that does not fit."""
    acc = accumulator(forward.dtype)
    of_rows = forward.out_shape, -4, [forward.dtype, acc][: 1 + (forward.dtype.itemsize == 2)]
    of_logs = forward.lse_shape, -3, [acc]
    specs: dict[str, ArraySpec] = {}
    for name, spec in results._asdict().items():
        if spec is None:
            continue
        full, axis, dtypes = of_rows if name in ("dout", "out") else of_logs
        require_output(name, spec, joined(full, axis, heads), dtypes)
        specs[name] = spec if heads is None else split_heads(spec, axis + 1, heads)
    return AttentionResults(**specs)


def _gradient_specs(
    forward: AttentionProblem,
    operands: AttentionArrays,
    grads: AttentionGrads,
    heads: tuple[int, int] | None,
) -> AttentionGrads:
    """Describe the gradients to fill, or raise naming the one that does not fit its operand."""
    specs: dict[str, ArraySpec] = {}
    for name, operand in OPERAND_OF.items():
        spec, x = getattr(grads, name), getattr(operands, operand)
        if spec is None:
            continue
        if x is None:
            raise ValueError(f"{name} was given but {operand} was not; there is no such gradient")
        for what in ("shape", "dtype"):
            require_same(name, getattr(spec, what), operand, getattr(x, what), what)
        if heads is not None:
            axis, sizes = head_axes(operands, heads)[operand]
            if len(spec.shape) >= -axis:
                size = spec.shape[len(spec.shape) + axis]
                spec = split_heads(spec, axis, (1, 1) if size == 1 else sizes)
        specs[name] = spec.broadcast_to(getattr(forward, operand).shape, name)
    return AttentionGrads(**specs)
