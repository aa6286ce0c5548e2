"""A softmax problem as rows of columns: merged axes, operands' roles, the parameter block."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..problem import ArraySpec, SoftmaxProblem
from .compiler import ParameterBlock

#: Axes that the parameter block has room for, after merging. Past it operands are copied first.
_KEPT_AXES, _REDUCED_AXES = 6, 4
#: Columns of scattered rows are numbered in 31 bits: the kernels divide by multiplication.
_SCATTERED_COLUMNS = 2**31 - 1

#: Bytes that one thread moves at a time.
CHUNK = 16

OPERAND = ParameterBlock(
    "cuflash::Operand",
    {
        "data": np.uintp,
        "kept_stride": (np.int64, (_KEPT_AXES,)),
        "reduced_stride": (np.int64, (_REDUCED_AXES,)),
        "wide": np.int32,
    },
)
DIVISOR = ParameterBlock(
    "cuflash::Divisor", {"size": np.uint32, "multiplier": np.uint32, "shift": np.uint32}
)
SOFTMAX_PARAMETERS = ParameterBlock(
    "cuflash::SoftmaxParameters",
    {
        "rows": np.int64,
        "columns": np.int64,
        "kept_size": (np.int64, (_KEPT_AXES,)),
        "reduced": (DIVISOR, (_REDUCED_AXES,)),
        "kept_axes": np.int32,
        "reduced_axes": np.int32,
        "log2_lanes": np.int32,
        "across": np.int32,
        "parts": np.int32,
        "stages": np.int32,
        "ahead": np.int64,
        "states": np.uintp,
        "input": (OPERAND, (3,)),
        "where": OPERAND,
        "output": (OPERAND, (2,)),
    },
)


def divisor(size: int) -> tuple[int, int, int]:
    """Return (size, multiplier, shift) with n // size == ((n * multiplier >> 32) + n) >> shift.

    For 0 <= n < 2**31: T. Granlund and P. Montgomery, "Division by invariant integers using
    multiplication" (1994), figure 4.1.
    """
    shift = (size - 1).bit_length()
    return size, (((1 << shift) - size) << 32) // size + 1, shift


class _Axes(NamedTuple):
    """Axes of all operands together: sizes, and for each operand its strides in elements."""

    sizes: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]


def _merge(axes: Sequence[int], specs: Sequence[ArraySpec], shape: tuple[int, ...]) -> _Axes:
    """Merge neighbours of `axes` that every operand steps through as one; one is left at least."""
    sizes: list[int] = []
    strides: list[list[int]] = []
    for axis in axes:
        size = shape[axis]
        if size == 1:
            continue
        steps = [spec.strides[axis] // spec.dtype.itemsize for spec in specs]
        if sizes and all(a == b * size for a, b in zip(strides[-1], steps, strict=True)):
            sizes[-1] *= size
            strides[-1] = steps
        else:
            sizes.append(size)
            strides.append(steps)
    if not sizes:
        sizes, strides = [1], [[0] * len(specs)]
    return _Axes(tuple(sizes), tuple(zip(*strides, strict=True)))


@dataclass(frozen=True, slots=True)
class Rows:
    """A problem as rows of columns, in the roles that operands have in the kernels."""

    dtype: np.dtype
    roles: tuple[tuple[str, int], ...]
    specs: tuple[ArraySpec, ...]
    full: tuple[tuple[str, int], ...]
    kept: _Axes
    reduced: _Axes

    def __post_init__(self) -> None:
        """Refuse operands without strides, and axes without the operands' strides."""
        for name, axes in (("kept", self.kept), ("reduced", self.reduced)):
            counts = {len(axes.strides), len(self.roles), len(self.specs)}
            if len(counts) > 1 or any(len(s) != len(axes.sizes) for s in axes.strides):
                raise ValueError(
                    f"{name}: {axes} are not the axes of {len(self.roles)} roles and "
                    f"{len(self.specs)} operands"
                )
        if not set(self.full) <= set(self.roles):
            raise ValueError(f"full: {self.full} are not among the roles {self.roles}")

    @property
    def rows(self) -> int:
        """Number of rows."""
        return math.prod(self.kept.sizes)

    @property
    def columns(self) -> int:
        """Number of columns."""
        return math.prod(self.reduced.sizes)

    @property
    def chunks(self) -> int:
        """Chunks of a row, the last one perhaps not whole."""
        return -(-self.columns * self.dtype.itemsize // CHUNK)

    @property
    def fits(self) -> bool:
        """Tell whether the parameter block has room for the axes."""
        scattered = len(self.reduced.sizes) > 1 and self.columns > _SCATTERED_COLUMNS
        return (
            len(self.kept.sizes) <= _KEPT_AXES
            and len(self.reduced.sizes) <= _REDUCED_AXES
            and not scattered
        )

    def layout(self, aligned: bool) -> str:
        """Return the name of the kernels' layout."""
        if len(self.reduced.sizes) > 1:
            return "kScattered"
        vector = CHUNK // self.dtype.itemsize
        packed = aligned and self.columns % vector == 0 and WHERE not in self.roles
        for role in self.full:
            i = self.roles.index(role)
            steps = self.reduced.strides[i][0], *(s % vector for s in self.kept.strides[i])
            packed = packed and steps == (1, *(0,) * len(self.kept.sizes))
        return "kPacked" if packed else "kStrided"

    def bundled(self, aligned: bool) -> bool:
        """Tell whether `columns.cu` can read the rows: some side by side in each 16 bytes."""
        vector = CHUNK // self.dtype.itemsize
        if not aligned or len(self.reduced.sizes) > 1 or WHERE in self.roles:
            return False
        for role in self.full:
            i = self.roles.index(role)
            *outer, last = self.kept.strides[i]
            if last != 1 or any(s % vector for s in (*outer, self.reduced.strides[i][0])):
                return False
        return self.kept.sizes[-1] % vector == 0 and self.lie_side_by_side()

    def contiguous(self) -> bool:
        """Tell whether several rows lie end to end in every operand that has columns."""
        strides = (self.columns,), (int(self.columns > 1),)
        return WHERE not in self.roles and all(
            (self.kept.strides[i], self.reduced.strides[i]) == strides
            for i in map(self.roles.index, self.full)
        )

    def lie_side_by_side(self) -> bool:
        """Tell whether neighbouring rows of an input are nearer than neighbouring columns."""
        i = self.roles.index(self.full[0]) if self.full else 0
        return 0 < abs(self.kept.strides[i][-1]) < abs(self.reduced.strides[i][-1])


WHERE = ("where", 0)
#: Where the kernels take a row's maximum and normalizer from.
STATISTICS = (("input", 1), ("input", 2))
#: Kernel roles of the operands that have columns, an input of the main operand's strides first.
_FULL_ROLES: dict[str, tuple[tuple[str, int], ...]] = {
    "softmax": (("input", 0), ("output", 0)),
    "log_softmax": (("input", 0), ("output", 0)),
    "logsumexp": (("input", 0),),
    "softmax_state": (("input", 0),),
    "softmax_vjp": (("input", 1), ("input", 0), ("output", 0)),
    "log_softmax_vjp": (("input", 1), ("input", 0), ("output", 0)),
    "logsumexp_vjp": (("input", 1), ("output", 0)),
    "state_logsumexp": (),
    "state_apply": (("input", 0), ("output", 0)),
}
#: Kernel roles of an operation's inputs, in the order of `SoftmaxProblem`.
_INPUT_ROLES = {"state_logsumexp": (1, 2)}


def rows_of(problem: SoftmaxProblem, outputs: tuple[ArraySpec, ...]) -> Rows:
    """Return a problem, and the arrays to fill, as rows of columns."""
    shape = problem.operand.shape
    roles = [("input", i) for i in _INPUT_ROLES.get(problem.operation, (0, 1, 2))]
    named = list(zip(roles, problem.inputs, strict=False))
    if problem.where is not None:
        named.append((WHERE, problem.where))
    named += [(("output", i), spec) for i, spec in enumerate(outputs)]
    specs = tuple(
        spec.broadcast_to(shape, role[0]) if spec.shape != shape else spec for role, spec in named
    )

    reduced: Sequence[int] = problem.axes
    if problem.operation == "state_apply":
        # A state's own broadcast axes are the columns: it is read once a row.
        states = specs[1:3]
        reduced = [a for a in range(len(shape)) if not any(spec.strides[a] for spec in states)]
    main = problem.operand

    def pitch(axis: int) -> int:
        return abs(main.strides[axis] or specs[-1].strides[axis])

    kept = sorted((a for a in range(len(shape)) if a not in reduced), key=pitch, reverse=True)
    return Rows(
        dtype=main.dtype,
        roles=tuple(role for role, _ in named),
        specs=specs,
        full=_FULL_ROLES[problem.operation],
        kept=_merge(kept, specs, shape),
        reduced=_merge(reduced, specs, shape),
    )
