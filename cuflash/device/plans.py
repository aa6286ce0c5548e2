"""What to launch for a problem: methods, tiles and thresholds as data, each with its reason.

A plan depends on shapes, strides, dtypes, options and the limits of a device, never on values.
Making one needs no GPU: the limits can be given as numbers.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
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
_WARP = 32
#: Most threads of a block (`kMaxThreads`), and how many it has where nothing asks for more: small
#: blocks let the rows of one finish while others load.
_MAX_THREADS, _BLOCK_THREADS = 512, 128

#: Lanes of a team by the most chunks of a row, else all threads of a block. Rows of up to 4 KB stay
#: within a warp, which needs no barrier; 4 chunks a lane are 64 bytes in flight a thread, at which
#: enough threads are resident to hide the latency of memory; 4 lanes read two sectors at a time.
_LANES = ((1, 1), (2, 2), (16, 4), (32, 8), (64, 16), (256, 32), (512, 128), (1024, 256))
#: The same for gradients, which read two chunks for one.
_PAIR_LANES = (
    (1, 1),
    (2, 2),
    (16, 4),
    (32, 8),
    (64, 16),
    (128, 32),
    (256, 64),
    (512, 128),
    (1024, 256),
)
#: Most chunks that a lane holds in registers, 4 registers each: of a row, of each of two operands,
#: and in a cluster of all the blocks there can be, which leaves one block a multiprocessor.
_HELD_CHUNKS, _HELD_PAIRS, _HELD_IN_CLUSTER = 8, 4, 16
#: The same for float64, whose exponential leaves no registers for more.
_HELD_DOUBLE = 4
#: Sizes of clusters; the last two are the largest that devices have.
_CLUSTERS = (2, 4, 8, 16)
#: Least bytes that a warp reads together where rows lie side by side: two sectors of memory.
_ACROSS_BYTES = 64
#: Tiles of `columns.cu` in the order of preference: bundles of rows side by side (16 bytes each,
#: two make a sector of memory), and the most columns that a lane holds in registers. Rows that none
#: of them holds are read twice.
_TILES = ((8, 8), (4, 8), (2, 8), (2, 16))
_OPEN_TILE = {8: (2, 0), 4: (4, 0), 2: (4, 0)}  # by bytes an element: registers again
#: Bytes that a thread or warp gives to the others of its team, in two buffers (`kExchange`).
_EXCHANGE = 2 * 16

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
    def chunks(self) -> int:
        """Chunks of a row, the last one perhaps not whole."""
        return -(-self.columns * self.dtype.itemsize // _CHUNK)

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

    def bundled(self, aligned: bool) -> bool:
        """Tell whether `columns.cu` can read the rows: some side by side in each 16 bytes."""
        vector = _CHUNK // self.dtype.itemsize
        if not aligned or len(self.reduced.sizes) > 1 or _WHERE in self.roles:
            return False
        for role in self.full:
            i = self.roles.index(role)
            *outer, last = self.kept.strides[i]
            if last != 1 or any(s % vector for s in (*outer, self.reduced.strides[i][0])):
                return False
        return self.kept.sizes[-1] % vector == 0 and self.lie_side_by_side()

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
_REDUCED_VJPS = ("SoftmaxVjp", "LogSoftmaxVjp")


def _kernel(
    file: str, template: str, dtype: np.dtype, operation: str | None, layout: str, *counts: int
) -> KernelName:
    arguments = [C_TYPES[dtype.name]]
    if operation is not None:
        arguments.append(f"cuflash::{operation}<{C_TYPES[accumulator(dtype).name]}>")
    arguments.append(f"cuflash::{layout}")
    arguments += map(str, counts)
    return KernelName(f"softmax/{file}.cu", f"cuflash::{template}<{', '.join(arguments)}>")


def _powers_of_two(last: int) -> list[int]:
    return [1 << i for i in range(last.bit_length())]


def softmax_kernels(dtype: np.dtype, *, clusters: bool = True) -> Iterator[KernelName]:
    """Yield every kernel of the softmax family that a plan for this dtype can launch."""
    forward = [_OPERATIONS[name] for name in _FORWARD]
    for layout in _LAYOUTS:
        packed = layout == "kPacked"
        for operation in forward:
            for count in (0, *(_powers_of_two(_held(dtype, pairs=False)[0]) if packed else ())):
                yield _kernel("fused", "fused", dtype, operation, layout, count)
            yield _kernel("online", "online", dtype, operation, layout)
            yield _kernel("naive", "apply", dtype, operation, layout)
        for operation in _REDUCED_VJPS:
            for count in (0, *(_powers_of_two(_HELD_PAIRS) if packed else ())):
                yield _kernel("backward", "reduced_vjp", dtype, operation, layout, count)
        yield _kernel("naive", "naive_maximum", dtype, None, layout)
        yield _kernel("naive", "naive_normalizer", dtype, None, layout)
        yield _kernel("backward", "logsumexp_vjp", dtype, None, layout)
        for width, held in _tiles(dtype) if packed else ():
            for operation in forward:
                for count in _powers_of_two(held) if (width, held) == _TILES[0] else (held,):
                    yield _columns_kernel(dtype, operation, width, count)
        for blocks in _CLUSTERS if clusters else ():
            for operation in forward:
                for count in _cluster_chunks(dtype, blocks, packed, pairs=False):
                    yield _kernel("cluster", "cluster", dtype, operation, layout, count, blocks)
            for operation in _REDUCED_VJPS if packed else ():
                for count in _cluster_chunks(dtype, blocks, packed, pairs=True):
                    yield _kernel("cluster", "cluster_vjp", dtype, operation, layout, count, blocks)


def _columns_kernel(dtype: np.dtype, operation: str, width: int, held: int) -> KernelName:
    types = f"{C_TYPES[dtype.name]}, cuflash::{operation}<{C_TYPES[accumulator(dtype).name]}>"
    return KernelName("softmax/columns.cu", f"cuflash::columns<{types}, {width}, {held}>")


def _tiles(dtype: np.dtype) -> tuple[tuple[int, int], ...]:
    """Return the tiles of `columns.cu`: 16 columns of 16-bit rows and their states are too many."""
    return (
        *(t for t in _TILES if dtype.itemsize > 2 or t[1] <= _HELD_CHUNKS),
        _OPEN_TILE[dtype.itemsize],
    )


def _held(dtype: np.dtype, *, pairs: bool) -> tuple[int, int]:
    """Return the most chunks of each operand in a lane's registers: of a block, of a cluster."""
    if dtype.itemsize == 8:
        return _HELD_DOUBLE, _HELD_DOUBLE
    return (_HELD_PAIRS, _HELD_IN_CLUSTER // 2) if pairs else (_HELD_CHUNKS, _HELD_IN_CLUSTER)


def _cluster_chunks(dtype: np.dtype, blocks: int, packed: bool, *, pairs: bool) -> tuple[int, ...]:
    """Return what a lane of a cluster can hold in registers, 0 for shared memory."""
    least, most = _held(dtype, pairs=pairs)
    if not packed:
        return (0,)
    if most == least:
        return (least,) if pairs else (least, 0)
    return (least, most) if blocks >= _CLUSTERS[-2] else (least,)


@dataclass(frozen=True, slots=True)
class Regime:
    """A method and the longest row, in bytes, for which `auto` takes it."""

    method: str
    row_bytes: float
    reason: str


def softmax_regimes(limits: DeviceLimits) -> tuple[Regime, ...]:
    """Return the methods of `auto` in rising order of the rows they take."""
    fused = Regime(
        "fused",
        _shared_capacity(limits),
        "a row is read once and held on chip: two trips, while a block can hold one",
    )
    online = Regime("online", math.inf, "a row is read twice: three trips, at any length")
    if limits.cluster_blocks == 1:
        return fused, online
    return (
        replace(
            fused,
            row_bytes=_MAX_THREADS * _HELD_CHUNKS * _CHUNK,
            reason="a row is read once and held in registers: two trips, while two blocks with a "
            "row each share a multiprocessor and one computes as the other waits",
        ),
        Regime(
            "cluster",
            limits.cluster_blocks * _MAX_THREADS * _HELD_IN_CLUSTER * _CHUNK,
            "a row is read once and held in the registers of several blocks: two trips, while a "
            "cluster can hold one",
        ),
        online,
    )


def _shared_capacity(limits: DeviceLimits) -> int:
    """Return the bytes of the longest row that fused holds.

    Shared memory is the measure for rows in registers too: a contiguous array can do what its views
    can, and no more.
    """
    return limits.shared_per_block - _exchange_bytes(_MAX_THREADS, across=False)


def _cluster_capacity(limits: DeviceLimits) -> int:
    """Return the bytes of the longest row that the largest cluster holds, in either memory."""
    if limits.cluster_blocks == 1:
        return 0
    return limits.cluster_blocks * min(
        _shared_capacity(limits), _MAX_THREADS * _HELD_IN_CLUSTER * _CHUNK
    )


def _exchange_bytes(threads: int, *, across: bool) -> int:
    """Return the bytes of shared memory before `Team::memory_end`."""
    return -(-(threads if across else threads // _WARP) * _EXCHANGE // 128) * 128


def _lanes(chunks: int, table: tuple[tuple[int, int], ...]) -> int:
    """Return the lanes of a team. The order of a sum depends on it: of dtype and columns, then."""
    return next((lanes for most, lanes in table if chunks <= most), _MAX_THREADS)


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
    plan = _Planner(problem, rows, rows.layout(aligned), limits, method)
    bundled = problem.method == "auto" and rows.bundled(aligned)
    if not math.prod(outputs[0].shape):
        launches: tuple[Launch, ...] = ()
    elif problem.operation in _FORWARD:
        launches = plan.columns() if bundled else getattr(plan, method)()
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
    row_bytes = rows.chunks * _CHUNK
    possible = ["naive", "online"]
    if row_bytes <= _shared_capacity(limits):
        possible.insert(1, "fused")
    if row_bytes <= _cluster_capacity(limits):
        possible.append("cluster")
    method = choose_method(
        problem.method,
        possible,
        ("naive", "fused", "online", "cluster"),
        f"on this device: a row has {row_bytes} bytes",
    )
    if method != "auto":
        return method
    if rows.lie_side_by_side():
        # The lanes of a warp of a cluster read columns, each in a sector of its own.
        return "fused" if "fused" in possible else "online"
    return next(r.method for r in softmax_regimes(limits) if row_bytes <= r.row_bytes)


class _Planner:
    """The launches of one problem; `across` and `slots` as in `Team` of the kernels."""

    def __init__(
        self, problem: SoftmaxProblem, rows: _Rows, layout: str, limits: DeviceLimits, method: str
    ) -> None:
        self._problem, self._rows, self._layout, self._limits = problem, rows, layout, limits
        self._packed = layout == "kPacked"
        self._across = not self._packed and rows.lie_side_by_side()
        self._blocks, self._slots = 1, 1
        pairs = problem.operation in ("softmax_vjp", "log_softmax_vjp")
        self._held, self._held_in_cluster = _held(rows.dtype, pairs=pairs)
        if method == "cluster" or (pairs and self._packed and self._pairs_need_cluster()):
            self._across = False
            needed = power_of_two(-(-rows.chunks // (_MAX_THREADS * self._held)))
            self._blocks = min(max(needed, _CLUSTERS[0]), limits.cluster_blocks)
            self._lanes = self._blocks * _MAX_THREADS
            return
        self._lanes = _lanes(rows.chunks, _PAIR_LANES if pairs else _LANES)
        self._slots = max(1, _BLOCK_THREADS // self._lanes)
        if self._across:
            least = _ACROSS_BYTES // rows.dtype.itemsize
            self._slots = min(max(self._slots, least), _MAX_THREADS // self._lanes)

    def naive(self) -> tuple[Launch, ...]:
        return (
            self._launch("naive", "naive_maximum"),
            self._launch("naive", "naive_normalizer"),
            self.apply(),
        )

    def fused(self) -> tuple[Launch, ...]:
        chunks = self._register_chunks()
        if not chunks:
            self._fit_shared()
        held = 0 if chunks else self._held_bytes(self._slots)
        return (self._launch("fused", "fused", self._operation(), chunks, held=held),)

    def cluster(self) -> tuple[Launch, ...]:
        chunks = self._register_chunks()
        held = 0 if chunks else self._lane_chunks() * _MAX_THREADS * _CHUNK
        counts = chunks, self._blocks
        return (self._launch("cluster", "cluster", self._operation(), *counts, held=held),)

    def online(self) -> tuple[Launch, ...]:
        return (self._launch("online", "online", self._operation()),)

    def columns(self) -> tuple[Launch, ...]:
        """Return `fused` or `online` for rows side by side, with an order of sums of its own."""
        rows = self._rows
        fitting = (t for t in _tiles(rows.dtype) if rows.columns <= _MAX_THREADS // t[0] * t[1])
        width, held = next(fitting, _OPEN_TILE[rows.dtype.itemsize])
        lanes = _MAX_THREADS // width
        if held:
            lanes = max(power_of_two(-(-rows.columns // held)), _BLOCK_THREADS // width)
            held = power_of_two(-(-rows.columns // lanes))
        tile = width * _CHUNK // rows.dtype.itemsize
        threads = width * lanes
        states = tile * (threads // _WARP + 1) * 2 * accumulator(rows.dtype).itemsize
        return (
            Launch(
                _columns_kernel(rows.dtype, self._operation(), width, held),
                grid=min(-(-rows.rows // tile), self._limits.blocks),
                block=threads,
                shared_bytes=states,
            ),
        )

    def apply(self) -> Launch:
        return self._launch("naive", "apply", self._operation())

    def backward(self) -> Launch:
        if self._problem.operation == "logsumexp_vjp":
            return self._launch("backward", "logsumexp_vjp")
        if self._blocks > 1:
            counts = self._register_chunks(), self._blocks
            return self._launch("cluster", "cluster_vjp", self._operation(), *counts)
        return self._launch("backward", "reduced_vjp", self._operation(), self._register_chunks())

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
        fields["log2_lanes"], fields["across"] = self._lanes.bit_length() - 1, self._across
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

    def _pairs_need_cluster(self) -> bool:
        """Tell whether two operands fit the registers of a cluster but not those of a block."""
        blocks, dtype = self._limits.cluster_blocks, self._rows.dtype
        held, in_cluster = _held(dtype, pairs=True)
        chunks = self._rows.chunks
        return blocks > 1 and _MAX_THREADS * held < chunks <= blocks * _MAX_THREADS * in_cluster

    def _lane_chunks(self) -> int:
        return -(-self._rows.chunks // self._lanes)

    def _register_chunks(self) -> int:
        """Return the chunks that each lane holds in registers, or 0."""
        needed = power_of_two(self._lane_chunks())
        if not self._packed:
            return 0
        if self._blocks > 1:
            return max(needed, self._held) if needed <= self._held_in_cluster else 0
        return needed if needed <= self._held else 0

    def _held_bytes(self, slots: int) -> int:
        """Return the bytes of shared memory in which fused holds rows, see `Held`."""
        chunks = self._rows.chunks if slots == 1 else slots * self._lanes * self._lane_chunks()
        return chunks * _CHUNK

    def _fit_shared(self) -> None:
        """Give up rows of a block until two blocks share a multiprocessor, or else one fits."""

        def needed(slots: int) -> int:
            exchange = _exchange_bytes(slots * self._lanes, across=self._across)
            return self._held_bytes(slots) + exchange

        least = max(1, _WARP // self._lanes)
        while self._slots > least and needed(self._slots) > self._limits.shared_per_sm // 2:
            self._slots //= 2
        if self._slots == 1:
            self._across = False

    def _launch(
        self,
        file: str,
        kernel: str,
        operation: str | None = None,
        *counts: int,
        held: int = 0,
    ) -> Launch:
        rows, blocks = self._rows, self._blocks
        threads = self._slots * self._lanes // blocks
        teams = min(-(-rows.rows // self._slots), self._limits.blocks // blocks)
        return Launch(
            _kernel(file, kernel, rows.dtype, operation, self._layout, *counts),
            grid=teams * blocks,
            block=threads,
            shared_bytes=_exchange_bytes(threads, across=self._across) + held,
        )
