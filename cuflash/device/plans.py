"""What to launch for a problem: methods, tiles and thresholds as data, each with its reason.

A plan depends on shapes, strides, dtypes, options and the limits of a device, never on values.
Making one needs no GPU: the limits can be given as numbers.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ..problem import ArraySpec, SoftmaxProblem, accumulator, choose_method
from .compiler import KernelName, Launch, ParameterBlock
from .executor import DeviceLimits

#: Names of the dtypes in C++.
C_TYPES = {
    "float64": "double",
    "float32": "float",
    "float16": "__half",
    "bfloat16": "__nv_bfloat16",
}


def power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least `n` and 1."""
    return 1 << max(n - 1, 0).bit_length()


# ------------------------------------------------------------------------------------ softmax: rows

#: Axes that the parameter block has room for, after merging. Past it operands are copied first.
_KEPT_AXES, _REDUCED_AXES = 6, 4
#: Columns of scattered rows are numbered in 31 bits: the kernels divide by multiplication.
_SCATTERED_COLUMNS = 2**31 - 1

#: Bytes that one thread moves at a time.
_CHUNK = 16
#: Lanes of a team before each has more than one chunk: 8 * 16 bytes are a cache line.
_LINE_LANES = 8
#: Most chunks that a lane holds in registers, 4 registers each: 128 bytes in flight a thread hide
#: the latency of memory at half occupancy.
_HELD_CHUNKS = 8
#: Threads of a block at most (`kMaxThreads`), and where nothing asks for more: small blocks let
#: the rows of one finish while others load.
_MAX_THREADS, _BLOCK_THREADS = 512, 128
#: Least bytes that a warp reads together where rows lie side by side: two sectors of memory.
_ACROSS_BYTES = 64
_WARP = 32

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
        "lanes": np.int32,
        "across": np.int32,
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
class _Rows:
    """A problem as rows of columns, in the roles that operands have in the kernels."""

    dtype: np.dtype
    roles: tuple[tuple[str, int], ...]
    specs: tuple[ArraySpec, ...]
    full: tuple[tuple[str, int], ...]
    kept: _Axes
    reduced: _Axes

    @property
    def rows(self) -> int:
        return math.prod(self.kept.sizes)

    @property
    def columns(self) -> int:
        return math.prod(self.reduced.sizes)

    @property
    def lanes(self) -> int:
        """Lanes of a team. The order of a sum depends on it: of dtype and columns alone, then."""
        if self.chunks <= _LINE_LANES * _HELD_CHUNKS:
            return min(power_of_two(self.chunks), _LINE_LANES)
        return min(power_of_two(-(-self.chunks // _HELD_CHUNKS)), _MAX_THREADS)

    @property
    def chunks(self) -> int:
        """Chunks of a row, the last one perhaps not whole."""
        return -(-self.columns * self.dtype.itemsize // _CHUNK)

    @property
    def lane_chunks(self) -> int:
        """Most chunks of a lane."""
        return -(-self.chunks // self.lanes)

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
        vector = _CHUNK // self.dtype.itemsize
        packed = aligned and self.columns % vector == 0 and _WHERE not in self.roles
        for role in self.full:
            i = self.roles.index(role)
            steps = self.reduced.strides[i][0], *(s % vector for s in self.kept.strides[i])
            packed = packed and steps == (1, *(0,) * len(self.kept.sizes))
        return "kPacked" if packed else "kStrided"

    def lie_side_by_side(self) -> bool:
        """Tell whether neighbouring rows of an input are nearer than neighbouring columns."""
        i = self.roles.index(self.full[0]) if self.full else 0
        return 0 < abs(self.kept.strides[i][-1]) < abs(self.reduced.strides[i][-1])


_WHERE = ("where", 0)
#: Where the kernels take a row's maximum and normalizer from.
_STATISTICS = (("input", 1), ("input", 2))
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


def _rows(problem: SoftmaxProblem, outputs: tuple[ArraySpec, ...]) -> _Rows:
    shape = problem.operand.shape
    roles = [("input", i) for i in _INPUT_ROLES.get(problem.operation, (0, 1, 2))]
    named = list(zip(roles, problem.inputs, strict=False))
    if problem.where is not None:
        named.append((_WHERE, problem.where))
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
    return _Rows(
        dtype=main.dtype,
        roles=tuple(role for role, _ in named),
        specs=specs,
        full=_FULL_ROLES[problem.operation],
        kept=_merge(kept, specs, shape),
        reduced=_merge(reduced, specs, shape),
    )


# ----------------------------------------------------------------------------------- softmax: plans


@dataclass(frozen=True, slots=True)
class SoftmaxPlan:
    """Launches in order, all with one parameter block.

    `block` is that block without pointers; those of the inputs, of `where` and of the outputs, in
    this order, go to the byte offsets `pointers`. Launches that need memory of their own have
    `workspace` bytes of it at each of the offsets `workspaces`.
    """

    method: str
    launches: tuple[Launch, ...]
    block: bytes
    pointers: tuple[int, ...]
    workspaces: tuple[int, ...]
    workspace: int

    @property
    def workspace_bytes(self) -> int:
        """Bytes that the launches need beside inputs and outputs."""
        return self.workspace * len(self.workspaces)

    def parameters(self, pointers: Sequence[int], workspace: int) -> np.ndarray:
        """Return the parameter block for arrays and a workspace at these addresses."""
        block = bytearray(self.block)
        for offset, pointer in zip(self.pointers, pointers, strict=True):
            _POINTER.pack_into(block, offset, pointer)
        for i, offset in enumerate(self.workspaces):
            _POINTER.pack_into(block, offset, workspace + i * self.workspace)
        return np.frombuffer(block, SOFTMAX_PARAMETERS.opaque)


_POINTER = struct.Struct("@P")
_OFFSETS = SOFTMAX_PARAMETERS.layout()


def _pointer_offset(role: tuple[str, int]) -> int:
    member, i = role
    return _OFFSETS["where.data" if role == _WHERE else f"{member}[{i}].data"]


class TooManyAxes(Exception):  # noqa: N818 - a request for a copy, not an error
    """The operands have to be copied to (rows, columns) first."""


_OPERATIONS = {
    "softmax": "Softmax",
    "log_softmax": "LogSoftmax",
    "logsumexp": "Logsumexp",
    "softmax_state": "State",
    "state_logsumexp": "Logsumexp",
    "state_apply": "Softmax",
    "softmax_vjp": "SoftmaxVjp",
    "log_softmax_vjp": "LogSoftmaxVjp",
}
_FORWARD = ("softmax", "log_softmax", "logsumexp", "softmax_state")
_LAYOUTS = ("kPacked", "kStrided", "kScattered")
#: Chunks of each of its two operands that the backward holds, for as many registers.
_HELD_PAIRS = _HELD_CHUNKS // 2


def _kernel(
    file: str,
    template: str,
    dtype: np.dtype,
    operation: str | None,
    layout: str,
    chunks: int | None = None,
) -> KernelName:
    arguments = [C_TYPES[dtype.name]]
    if operation is not None:
        arguments.append(f"cuflash::{operation}<{C_TYPES[accumulator(dtype).name]}>")
    arguments.append(f"cuflash::{layout}")
    if chunks is not None:
        arguments.append(str(chunks))
    return KernelName(f"softmax/{file}.cu", f"cuflash::{template}<{', '.join(arguments)}>")


def softmax_kernels(dtype: np.dtype) -> Iterator[KernelName]:
    """Yield every kernel of the softmax family that a plan for this dtype can launch."""
    forward = [_OPERATIONS[name] for name in _FORWARD]
    for layout in _LAYOUTS:
        chunks = [0]
        if layout == "kPacked":
            chunks += [1 << i for i in range(_HELD_CHUNKS.bit_length())]
        for count in chunks:
            for operation in forward:
                yield _kernel("fused", "fused", dtype, operation, layout, count)
            for operation in ("SoftmaxVjp", "LogSoftmaxVjp") if count <= _HELD_PAIRS else ():
                yield _kernel("backward", "reduced_vjp", dtype, operation, layout, count)
        for operation in forward:
            yield _kernel("online", "online", dtype, operation, layout)
            yield _kernel("naive", "apply", dtype, operation, layout)
        yield _kernel("naive", "naive_maximum", dtype, None, layout)
        yield _kernel("naive", "naive_normalizer", dtype, None, layout)
        yield _kernel("backward", "logsumexp_vjp", dtype, None, layout)


@dataclass(frozen=True, slots=True)
class Regime:
    """A method and the longest row, in bytes, for which `auto` takes it."""

    method: str
    row_bytes: float
    reason: str


def softmax_regimes(limits: DeviceLimits) -> tuple[Regime, ...]:
    """Return the methods of `auto` in rising order of the rows they take."""
    return (
        Regime(
            "fused",
            _row_capacity(limits),
            "a row is read once and held on chip: two trips, while a block can hold one",
        ),
        Regime("online", math.inf, "a row is read twice: three trips, at any length"),
    )


def _row_capacity(limits: DeviceLimits) -> int:
    """Return the bytes of the longest row that fused holds, scratch of the reductions left out.

    Shared memory is the measure for rows in registers too: a contiguous array can do what its views
    can, and no more.
    """
    return limits.shared_per_block - _scratch(_MAX_THREADS, across=False, itemsize=8)


def _scratch(threads: int, *, across: bool, itemsize: int) -> int:
    """Return the bytes of `Team::scratch_bytes`."""
    values = threads if across else threads // _WARP
    return -(-values * itemsize // 128) * 128


def _held_bytes(rows: _Rows, slots: int = 1) -> int:
    """Return the bytes of shared memory in which fused holds rows, see `Held` in fused.cu."""
    chunks = rows.chunks if slots == 1 else slots * rows.lanes * rows.lane_chunks
    return chunks * _CHUNK


@lru_cache(maxsize=4096)
def plan_softmax(
    problem: SoftmaxProblem, outputs: tuple[ArraySpec, ...], aligned: bool, limits: DeviceLimits
) -> SoftmaxPlan:
    """Plan one call of the softmax family.

    Parameters
    ----------
    problem : SoftmaxProblem
        Its inputs are of the kernels' dtypes: no integers.
    outputs : tuple of ArraySpec
        The arrays to fill.
    aligned : bool
        All arrays of the full shape start at a multiple of 16 bytes.
    limits : DeviceLimits
        The device.

    Returns
    -------
    SoftmaxPlan
        Without launches if there is nothing to write.

    Raises
    ------
    ValueError
        The method cannot run this problem; those that can are listed.
    TooManyAxes
        The axes do not merge into few enough.
    """
    rows = _rows(problem, outputs)
    if not rows.fits:
        raise TooManyAxes
    method = _method(problem, rows, limits)
    plan = _Planner(problem, rows, rows.layout(aligned), limits)
    if not math.prod(outputs[0].shape):
        launches: tuple[Launch, ...] = ()
    elif problem.operation in _FORWARD:
        launches = getattr(plan, method)()
    elif problem.operation.startswith("state"):
        launches = (plan.apply(),)
    else:
        launches = (plan.backward(),)
    return SoftmaxPlan(
        method=method,
        launches=launches,
        block=plan.block(statistics=method == "naive").tobytes(),
        pointers=tuple(map(_pointer_offset, rows.roles)),
        workspaces=tuple(map(_pointer_offset, _STATISTICS)) if method == "naive" else (),
        workspace=rows.rows * accumulator(rows.dtype).itemsize,
    )


def _method(problem: SoftmaxProblem, rows: _Rows, limits: DeviceLimits) -> str:
    if problem.operation not in _FORWARD:
        return "auto"
    possible = ["naive", "online"]
    if _held_bytes(rows) <= _row_capacity(limits):
        possible.insert(1, "fused")
    method = choose_method(
        problem.method,
        possible,
        ("naive", "fused", "online", "cluster"),
        f"on this device: a row has {_held_bytes(rows)} bytes",
    )
    if method != "auto":
        return method
    return next(r.method for r in softmax_regimes(limits) if _held_bytes(rows) <= r.row_bytes)


class _Planner:
    """The launches of one problem; `across` and `slots` as in `Team` of the kernels."""

    def __init__(
        self, problem: SoftmaxProblem, rows: _Rows, layout: str, limits: DeviceLimits
    ) -> None:
        self._problem, self._rows, self._layout, self._limits = problem, rows, layout, limits
        self._across = layout != "kPacked" and rows.lie_side_by_side()
        lanes, itemsize = rows.lanes, rows.dtype.itemsize
        slots = max(1, _BLOCK_THREADS // lanes)
        if self._across:
            slots = min(max(slots, _ACROSS_BYTES // itemsize), _MAX_THREADS // lanes)
        self._slots = slots

    def naive(self) -> tuple[Launch, ...]:
        return (
            self._launch("naive", "naive_maximum"),
            self._launch("naive", "naive_normalizer"),
            self.apply(),
        )

    def fused(self) -> tuple[Launch, ...]:
        registers = self._layout == "kPacked" and self._rows.lane_chunks <= _HELD_CHUNKS
        chunks = power_of_two(self._rows.lane_chunks) if registers else 0
        if not registers:
            self._fit_shared()
        held = 0 if registers else _held_bytes(self._rows, self._slots)
        return (self._launch("fused", "fused", self._operation(), chunks=chunks, held=held),)

    def online(self) -> tuple[Launch, ...]:
        return (self._launch("online", "online", self._operation(), values=2),)

    def apply(self) -> Launch:
        return self._launch("naive", "apply", self._operation())

    def backward(self) -> Launch:
        if self._problem.operation == "logsumexp_vjp":
            return self._launch("backward", "logsumexp_vjp")
        holds = self._layout == "kPacked" and self._rows.lane_chunks <= _HELD_PAIRS
        chunks = power_of_two(self._rows.lane_chunks) if holds else 0
        return self._launch("backward", "reduced_vjp", self._operation(), chunks=chunks)

    def block(self, *, statistics: bool) -> np.ndarray:
        """Return the parameter block without pointers; with the rows' statistics in a workspace."""
        rows = self._rows
        block = SOFTMAX_PARAMETERS.zeros()
        fields = block[0]
        fields["rows"], fields["columns"] = rows.rows, rows.columns
        fields["kept_size"][: len(rows.kept.sizes)] = rows.kept.sizes
        if len(rows.reduced.sizes) > 1:
            for axis, size in enumerate(rows.reduced.sizes):
                fields["reduced"][axis] = divisor(max(size, 1))
        fields["kept_axes"] = len(rows.kept.sizes)
        fields["reduced_axes"] = len(rows.reduced.sizes)
        fields["lanes"], fields["across"] = rows.lanes, self._across
        for (member, i), spec, kept, reduced in zip(
            rows.roles, rows.specs, rows.kept.strides, rows.reduced.strides, strict=True
        ):
            operand = fields[member] if member == "where" else fields[member][i]
            operand["kept_stride"][: len(kept)] = kept
            operand["reduced_stride"][: len(reduced)] = reduced
            operand["wide"] = member != "where" and spec.dtype != rows.dtype
        if statistics:
            strides = [math.prod(rows.kept.sizes[a + 1 :]) for a in range(len(rows.kept.sizes))]
            for member, i in _STATISTICS:
                operand = fields[member][i]
                operand["kept_stride"][: len(strides)] = strides
                operand["wide"] = True
        return block

    def _operation(self) -> str:
        return _OPERATIONS[self._problem.operation]

    def _fit_shared(self) -> None:
        """Give up rows of a block until two blocks share a multiprocessor, or else one fits."""
        rows = self._rows

        def needed(slots: int) -> int:
            itemsize = accumulator(rows.dtype).itemsize
            scratch = _scratch(slots * rows.lanes, across=self._across, itemsize=itemsize)
            return _held_bytes(rows, slots) + scratch

        least = max(1, _WARP // rows.lanes)
        while self._slots > least and needed(self._slots) > self._limits.shared_per_sm // 2:
            self._slots //= 2
        if self._slots == 1:
            self._across = False

    def _launch(
        self,
        file: str,
        kernel: str,
        operation: str | None = None,
        *,
        chunks: int | None = None,
        held: int = 0,
        values: int = 1,
    ) -> Launch:
        rows = self._rows
        threads = self._slots * rows.lanes
        itemsize = values * accumulator(rows.dtype).itemsize
        return Launch(
            _kernel(file, kernel, rows.dtype, operation, self._layout, chunks),
            grid=min(-(-rows.rows // self._slots), self._limits.blocks),
            block=threads,
            shared_bytes=_scratch(threads, across=self._across, itemsize=itemsize) + held,
        )
