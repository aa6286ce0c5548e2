"""What one foreign call computes, described: all that is known when a program is traced.

A call is told by buffers, dense in C order, in the order of its `inputs` and `outputs`, and by a
description of them that is part of the compiled program. It is a frozen, hashable value, so that
JAX can compare programs by it, and it is written into them as text (`encode`), so that a program
that JAX took from its cache on disk means the same in another process.

A vmapped axis becomes one more batch axis (`batched`): nothing is moved or repeated, since a
problem has strides.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, Self, TypeAlias

import ml_dtypes
import numpy as np

from .._version import __version__
from ..problem import ArraySpec, AttentionArrays, AttentionProblem, SoftmaxProblem, c_strides
from ..problem_vjp import OPERAND_OF, AttentionGrads, AttentionResults, AttentionVjpProblem

#: Under which XLA knows the handlers, of each platform one.
TARGET = "cuflash"
#: Of each axis of a problem the axis of the buffer, None if it has none: there it broadcasts.
View: TypeAlias = tuple[int | None, ...]


class NeedsCopiesError(Exception):
    """An engine would copy operands of a call, for which its handler has no memory."""


class Operand(NamedTuple):
    """A buffer of a call, and how it is seen."""

    shape: tuple[int, ...]
    dtype: str
    view: View

    @classmethod
    def of(cls, x: Any, view: View | None = None) -> Self:
        """Describe an array; without a view it is seen as it lies."""
        axes = tuple(range(x.ndim)) if view is None else view
        return cls(tuple(x.shape), np.dtype(x.dtype).name, axes)

    @property
    def spec(self) -> ArraySpec:
        """What a problem sees, with size 1 and stride 0 on axes that the buffer does not have."""
        dtype = np.dtype(getattr(ml_dtypes, self.dtype, self.dtype))
        strides = c_strides(self.shape, dtype.itemsize)
        return ArraySpec(
            tuple(1 if axis is None else self.shape[axis] for axis in self.view),
            tuple(0 if axis is None else strides[axis] for axis in self.view),
            dtype,
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        return math.prod(self.shape) * self.spec.dtype.itemsize

    def batched(self, size: int, axis: int | None) -> Self:
        """Describe the buffer with one more axis, the first one that is seen; None: without it."""
        if axis is None:
            return self._replace(view=(None, *self.view))
        moved = [a if a is None or a < axis else a + 1 for a in self.view]
        return self._replace(
            shape=(*self.shape[:axis], size, *self.shape[axis:]), view=(axis, *moved)
        )


@dataclass(frozen=True)
class AttentionCall:
    """Attention: results are out and lse.

    `operands` are pairs of a name in `AttentionArrays` and a buffer seen with all axes of the
    problem, `integers` lengths and offsets that are numbers. `batch` is the batch shape, which all
    of q, k and v may broadcast to. `deterministic` is for the gradients.
    """

    #: The function of an engine.
    kind: ClassVar[str] = "attention"

    batch: tuple[int, ...]
    operands: tuple[tuple[str, Operand], ...]
    integers: tuple[tuple[str, int], ...]
    out: Operand
    lse: Operand
    scale: float
    softcap: float | None
    left: int | None
    right: int | None
    num_splits: int | None
    method: str
    deterministic: bool

    @property
    def inputs(self) -> tuple[Operand, ...]:
        """Buffers that are read."""
        return tuple(operand for _, operand in self.operands)

    @property
    def outputs(self) -> tuple[Operand, ...]:
        """Buffers that are written."""
        return self.out, self.lse

    @property
    def like(self) -> tuple[int, ...]:
        """Of each output the input whose axes it has."""
        return 0, 0  # q

    def batched(self, size: int, axes: Sequence[int | None]) -> Self:
        """Describe many such calls as one, each buffer with its own axis of them, or None."""
        named = zip(self.operands, axes, strict=True)
        return replace(
            self,
            batch=(size, *self.batch),
            operands=tuple((name, x.batched(size, axis)) for (name, x), axis in named),
            out=self.out.batched(size, 0),
            lse=self.lse.batched(size, 0),
        )

    @cached_property
    def arrays(self) -> AttentionArrays:
        """Specs of the operands as they are seen, and numbers."""
        specs: dict[str, Any] = {name: operand.spec for name, operand in self.operands}
        return AttentionArrays(**specs, **dict(self.integers))

    @cached_property
    def problem(self) -> AttentionProblem:
        """The problem that an engine takes."""
        q = self.arrays.q
        return AttentionProblem.of(
            self.arrays._replace(q=q.broadcast_to((*self.batch, *q.shape[-2:]), "q")),
            scale=self.scale,
            window=(self.left, self.right),
            softcap=self.softcap,
            num_splits=self.num_splits,
            method=self.method,
        )

    @cached_property
    def seen(self) -> tuple[ArraySpec, ...]:
        """Specs of the arrays that `arguments` takes."""
        full = [getattr(self.problem, name) for name, _ in self.operands]
        return (*full, self.out.spec, self.lse.spec)

    def arguments(self, arrays: Sequence[Any]) -> tuple[Any, ...]:
        """Return what an engine's function takes, given inputs and outputs as they are seen."""
        *operands, out, lse = arrays
        return self.problem, self.named(operands), out, lse, None

    def named(self, operands: Sequence[Any]) -> AttentionArrays:
        """Return operands by name, with the numbers beside them."""
        arrays = dict(zip((name for name, _ in self.operands), operands, strict=True))
        return AttentionArrays(**arrays, **dict(self.integers))

    @classmethod
    def decoded(cls, fields: list[Any]) -> Self:
        """Read what `encode` wrote."""
        batch, operands, integers, out, lse, *options = fields
        named = tuple((name, Operand(*x)) for name, x in operands)
        return cls(batch, named, integers, Operand(*out), Operand(*lse), *options)


@dataclass(frozen=True)
class AttentionVjpCall:
    """Gradients of attention: results are those of `grads`.

    `read` are dout, out, lse and, unless it is zero, dlse; `grads` pairs of a name in
    `AttentionGrads` and a buffer, which is seen with size 1 on axes that are summed.
    """

    kind: ClassVar[str] = "attention_vjp"

    forward: AttentionCall
    read: tuple[Operand, ...]
    grads: tuple[tuple[str, Operand], ...]

    @property
    def inputs(self) -> tuple[Operand, ...]:
        """Buffers that are read."""
        return (*self.forward.inputs, *self.read)

    @property
    def outputs(self) -> tuple[Operand, ...]:
        """Buffers that are written."""
        return tuple(operand for _, operand in self.grads)

    @property
    def like(self) -> tuple[int, ...]:
        """Of each output the input whose axes it has."""
        names = [name for name, _ in self.forward.operands]
        return tuple(names.index(OPERAND_OF[name]) for name, _ in self.grads)

    def batched(self, size: int, axes: Sequence[int | None]) -> Self:
        """Describe many such calls as one: each has gradients of its own."""
        count = len(self.forward.operands)
        read = zip(self.read, axes[count:], strict=True)
        return replace(
            self,
            forward=self.forward.batched(size, axes[:count]),
            read=tuple(operand.batched(size, axis) for operand, axis in read),
            grads=tuple((name, operand.batched(size, 0)) for name, operand in self.grads),
        )

    @cached_property
    def problem(self) -> AttentionVjpProblem:
        """The problem that an engine takes."""
        forward = self.forward.problem
        full = [forward.out_shape, forward.out_shape, forward.lse_shape, forward.lse_shape]
        read = zip(AttentionResults._fields, self.read, full, strict=False)
        grads = {
            name: operand.spec.broadcast_to(getattr(forward, OPERAND_OF[name]).shape, name)
            for name, operand in self.grads
        }
        return AttentionVjpProblem(
            forward=forward,
            results=AttentionResults(
                *[x.spec.broadcast_to(shape, name) for name, x, shape in read]
            ),
            grads=AttentionGrads(**grads),
            deterministic=self.forward.deterministic,
            method="auto",
        )

    @cached_property
    def seen(self) -> tuple[ArraySpec, ...]:
        """Specs of the arrays that `arguments` takes."""
        read = self.problem.results[: len(self.read)]
        return (*self.forward.seen[:-2], *read, *(operand.spec for operand in self.outputs))

    def arguments(self, arrays: Sequence[Any]) -> tuple[Any, ...]:
        """Return what an engine's function takes, given inputs and outputs as they are seen."""
        first, last = len(self.forward.operands), len(self.inputs)
        results = AttentionResults(*arrays[first:last])
        names = [name for name, _ in self.grads]
        grads = AttentionGrads(**dict(zip(names, arrays[last:], strict=True)))
        return self.problem, self.forward.named(arrays[:first]), results, grads, None

    @classmethod
    def decoded(cls, fields: list[Any]) -> Self:
        """Read what `encode` wrote."""
        forward, read, grads = fields
        return cls(
            AttentionCall.decoded(forward),
            tuple(Operand(*x) for x in read),
            tuple((name, Operand(*x)) for name, x in grads),
        )


@dataclass(frozen=True)
class SoftmaxCall:
    """An operation of the softmax family, as `SoftmaxProblem` has it; one result.

    `operands` are its inputs, seen with all axes, those of reduced ones with size 1; `where` may
    be the last one. `shape` is the full shape.
    """

    kind: ClassVar[str] = "softmax"

    operation: str
    shape: tuple[int, ...]
    axes: tuple[int, ...]
    operands: tuple[Operand, ...]
    masked: bool
    out: Operand
    method: str

    @property
    def inputs(self) -> tuple[Operand, ...]:
        """Buffers that are read."""
        return self.operands

    @property
    def outputs(self) -> tuple[Operand, ...]:
        """Buffers that are written."""
        return (self.out,)

    @property
    def like(self) -> tuple[int, ...]:
        """Of each output the input whose axes it has."""
        return (1 if self.operation == "logsumexp_vjp" else 0,)  # x, or what has its shape

    def batched(self, size: int, axes: Sequence[int | None]) -> Self:
        """Describe many such calls as one, each buffer with its own axis of them, or None."""
        return replace(
            self,
            shape=(size, *self.shape),
            axes=tuple(axis + 1 for axis in self.axes),
            operands=tuple(
                operand.batched(size, axis)
                for operand, axis in zip(self.operands, axes, strict=True)
            ),
            out=self.out.batched(size, 0),
        )

    @cached_property
    def problem(self) -> SoftmaxProblem:
        """The problem that an engine takes."""
        inputs = self.seen[: len(self.operands) - self.masked]
        return SoftmaxProblem(
            operation=self.operation,
            inputs=inputs,
            axes=self.axes,
            where=self.seen[len(inputs)] if self.masked else None,
            out_shape=self.out.spec.shape,
            out_dtype=self.out.spec.dtype,
            method=self.method,
        )

    @cached_property
    def seen(self) -> tuple[ArraySpec, ...]:
        """Specs of the arrays that `arguments` takes."""
        reduced = tuple(1 if a in self.axes else n for a, n in enumerate(self.shape))
        names = _SOFTMAX_INPUTS[self.operation] + ("where",) * self.masked
        specs = [
            operand.spec.broadcast_to(reduced if name in _REDUCED else self.shape, name)
            for name, operand in zip(names, self.operands, strict=True)
        ]
        return (*specs, self.out.spec)

    def arguments(self, arrays: Sequence[Any]) -> tuple[Any, ...]:
        """Return what an engine's function takes, given inputs and output as they are seen."""
        *inputs, out = arrays
        where = inputs.pop() if self.masked else None
        return self.problem, inputs, where, [out]

    @classmethod
    def decoded(cls, fields: list[Any]) -> Self:
        """Read what `encode` wrote."""
        operation, shape, axes, operands, masked, out, method = fields
        read = tuple(Operand(*x) for x in operands)
        return cls(operation, shape, axes, read, masked, Operand(*out), method)


_SOFTMAX_INPUTS = {
    "softmax": ("x",),
    "log_softmax": ("x",),
    "logsumexp": ("x",),
    "softmax_vjp": ("dy", "y"),
    "log_softmax_vjp": ("dy", "y"),
    "logsumexp_vjp": ("dlse", "x", "lse"),
}
_REDUCED = ("dlse", "lse")

Call: TypeAlias = AttentionCall | AttentionVjpCall | SoftmaxCall
_KINDS: dict[str, type[Call]] = {
    kind.kind: kind for kind in (AttentionCall, AttentionVjpCall, SoftmaxCall)
}


def encode(call: Call, workspace: int) -> str:
    """Write a call as text, with the bytes of its workspace and the version of what can read it."""
    return json.dumps([__version__, call.kind, workspace, astuple(call)], separators=(",", ":"))


def decode(text: bytes) -> tuple[Call, int]:
    """Read a call, and the bytes of its workspace.

    Raises
    ------
    ValueError
        It was written by another version: the program came from a cache on disk.
    """
    version, kind, workspace, fields = _tuples(json.loads(text))
    if version != __version__:
        raise ValueError(
            f"this program was compiled with cuflash {version}, now there is {__version__}; "
            f"clear JAX's compilation cache"
        )
    return _KINDS[kind].decoded(fields), workspace


def _tuples(x: Any) -> Any:
    return tuple(map(_tuples, x)) if isinstance(x, list) else x
