"""The frozen description of a call for the gradients of attention, beside `problem.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

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
        heads = _heads(forward, enable_gqa)
        return cls(
            forward=forward,
            results=AttentionResults(**_result_specs(forward, results, heads)),
            grads=AttentionGrads(**_gradient_specs(forward, operands, grads, heads)),
            deterministic=flag("deterministic", deterministic),
            method=method,
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


def _heads(forward: AttentionProblem, enable_gqa: object) -> tuple[int, int] | None:
    """Return (key heads, query heads for each) if one head axis was split into these."""
    if not flag("enable_gqa", enable_gqa):
        return None
    return forward.batch_shape[-2], forward.batch_shape[-1]


def _contiguous(shape: tuple[int, ...], dtype: np.dtype) -> ArraySpec:
    return ArraySpec(shape, c_strides(shape, dtype.itemsize), dtype)


def _result_specs(
    forward: AttentionProblem, results: AttentionResults, heads: tuple[int, int] | None
) -> Mapping[str, ArraySpec]:
    """Describe cotangents and results, or raise naming the one that does not fit."""
    acc = accumulator(forward.dtype)
    rows = [forward.dtype] if forward.dtype.itemsize > 2 else [forward.dtype, acc]
    specs = {name: ArraySpec.of(x) for name, x in results._asdict().items() if x is not None}
    for name, spec in specs.items():
        full, axis, dtypes = (
            (forward.lse_shape, -3, [acc])
            if name in ("lse", "dlse")
            else (forward.out_shape, -4, rows)
        )
        require_output(name, spec, joined(full, axis, heads), dtypes)
        if heads is not None:
            specs[name] = split_heads(spec, axis + 1, heads)
    return specs


def _gradient_specs(
    forward: AttentionProblem,
    operands: AttentionArrays,
    grads: AttentionGrads,
    heads: tuple[int, int] | None,
) -> Mapping[str, ArraySpec]:
    """Describe the gradients to fill, or raise naming the one that does not fit its operand."""
    specs: dict[str, ArraySpec] = {}
    for name, operand in OPERAND_OF.items():
        gradient, x = getattr(grads, name), getattr(operands, operand)
        if gradient is None:
            continue
        if x is None:
            raise ValueError(f"{name} was given but {operand} was not; there is no such gradient")
        spec, full = ArraySpec.of(gradient), getattr(forward, operand).shape
        if spec.shape != tuple(x.shape):
            raise ValueError(
                f"{name} has shape {spec.shape} but {operand} has {tuple(x.shape)}; "
                f"they must be equal"
            )
        if spec.dtype != x.dtype:
            raise TypeError(
                f"{name} has dtype {spec.dtype} but {operand} has {np.dtype(x.dtype)}; "
                f"they must be equal"
            )
        if heads is not None:
            axis, sizes = head_axes(operands, heads)[operand]
            if len(spec.shape) >= -axis:
                size = spec.shape[len(spec.shape) + axis]
                spec = split_heads(spec, axis, (1, 1) if size == 1 else sizes)
        specs[name] = spec.broadcast_to(full, name)
    return specs
