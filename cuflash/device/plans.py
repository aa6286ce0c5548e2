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

import numpy as np

from .._options import choose_method
from ..problem import ArraySpec, SoftmaxProblem, accumulator
from .compiler import C_TYPES, KernelName, Launch
from .executor import DeviceLimits
from .softmax_regimes import (
    ACROSS_BYTES,
    CLUSTERS,
    COLUMN_TILES,
    HELD_CHUNKS,
    HELD_PAIRS,
    LEAST_THREADS,
    MAX_THREADS,
    SHORT_LENGTHS,
    SHORT_THREADS,
    STREAM_SHAPES,
    STRIP_SHAPES,
    WARP,
    ColumnTile,
    StreamRoom,
    StreamShape,
    StripShape,
    cluster_capacity,
    cluster_shape,
    column_tile,
    exchange_bytes,
    held_chunks,
    lanes_of,
    pair_cluster,
    parts_of,
    power_of_two,
    rows_ahead,
    shared_capacity,
    softmax_regimes,
    stream_shape,
    strip_shape,
)
from .softmax_rows import CHUNK, SOFTMAX_PARAMETERS, STATISTICS, WHERE, Rows, divisor, rows_of


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

    def __post_init__(self) -> None:
        """Refuse what would write past the parameter block, or launch what no device can run."""
        places = sorted((*self.pointers, *self.workspaces))
        ends = [*places[1:], len(self.block)]
        if any(end - place < _POINTER.size for place, end in zip(places, ends, strict=False)):
            raise ValueError(
                f"pointers at {places} of a block of {len(self.block)} bytes have no room"
            )
        if self.workspace and not self.workspaces:
            raise ValueError(f"nothing points to a workspace of {self.workspace} bytes")
        for launch in self.launches:
            if launch.grid < 1 or not 1 <= launch.block <= MAX_THREADS:
                raise ValueError(
                    f"a grid of {launch.grid} blocks of {launch.block} threads; there must be "
                    f"blocks, of 1 to {MAX_THREADS}"
                )

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
    return _OFFSETS["where.data" if role == WHERE else f"{member}[{i}].data"]


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
#: What writes whole rows, and so gains by reading the next one meanwhile.
_STREAMED = ("Softmax", "LogSoftmax", *_REDUCED_VJPS)
#: What reduces nothing.
_ELEMENTWISE = ("logsumexp_vjp", "state_apply")


def _kernel(
    file: str,
    template: str,
    dtype: np.dtype,
    operation: str | None,
    layout: str | None,
    *counts: int,
) -> KernelName:
    arguments = [C_TYPES[dtype.name]]
    if operation is not None:
        arguments.append(f"cuflash::{operation}<{C_TYPES[accumulator(dtype).name]}>")
    if layout is not None:
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
            for count in (0, *(_powers_of_two(HELD_CHUNKS) if packed else ())):
                yield _kernel("fused", "fused", dtype, operation, layout, count)
            yield _kernel("online", "online", dtype, operation, layout)
            yield _kernel("split", "split", dtype, operation, layout)
            yield _kernel("naive", "apply", dtype, operation, layout)
        for operation in _REDUCED_VJPS:
            for count in (0, *(_powers_of_two(HELD_PAIRS) if packed else ())):
                yield _kernel("backward", "reduced_vjp", dtype, operation, layout, count)
            yield _kernel("split", "split_sums", dtype, operation, layout)
            yield _kernel("split", "split_vjp", dtype, operation, layout)
        yield _kernel("split", "split_states", dtype, None, layout)
        yield _kernel("naive", "naive_maximum", dtype, None, layout)
        yield _kernel("naive", "naive_normalizer", dtype, None, layout)
        yield _kernel("backward", "logsumexp_vjp", dtype, None, layout)
        for blocks in CLUSTERS if clusters else ():
            for operation in forward:
                count = HELD_CHUNKS if packed else 0
                yield _kernel("cluster", "cluster", dtype, operation, layout, count, blocks)
            for operation in _REDUCED_VJPS if packed else ():
                for count in sorted({HELD_PAIRS, held_chunks(blocks, dtype, pairs=True)}):
                    yield _kernel("cluster", "cluster_vjp", dtype, operation, layout, count, blocks)
    for operation in forward:
        for length in SHORT_LENGTHS[dtype.itemsize]:
            yield _kernel("short", "short_rows", dtype, operation, None, length)
    if clusters:
        yield _BEGIN_DEALING
    for operation in _STREAMED if clusters else ():
        shapes = STREAM_SHAPES[dtype.itemsize, operation in _REDUCED_VJPS]
        yield from dict.fromkeys(_stream_kernel(dtype, operation, shape) for shape in shapes)
    for operation in (o for o in _STREAMED if clusters and o not in _REDUCED_VJPS):
        for strips in STRIP_SHAPES[dtype.itemsize]:
            yield _strips_kernel(dtype, operation, strips)
    for operation, pairs in (*((o, False) for o in forward), *((o, True) for o in _REDUCED_VJPS)):
        for tile in COLUMN_TILES[dtype.itemsize, pairs]:
            most = tile.blocks if clusters else 1
            for blocks in _powers_of_two(most) if tile.held else sorted({1, most}):
                yield _columns_kernel(dtype, operation, tile, blocks)


#: No row has been dealt out to a cluster.
_BEGIN_DEALING = KernelName("softmax/stream.cu", "cuflash::begin_dealing")


def _stream_kernel(dtype: np.dtype, operation: str, shape: StreamShape) -> KernelName:
    template = "stream_vjp" if operation in _REDUCED_VJPS else "stream"
    counts = shape.held, shape.warps, shape.blocks
    return _kernel("stream", template, dtype, operation, None, *counts)


def _strips_kernel(dtype: np.dtype, operation: str, shape: StripShape) -> KernelName:
    counts = shape.rows, shape.held, shape.warps, shape.blocks
    return _kernel("strips", "strips", dtype, operation, None, *counts)


def _columns_kernel(dtype: np.dtype, operation: str, tile: ColumnTile, blocks: int) -> KernelName:
    template = "columns_vjp" if operation in _REDUCED_VJPS else "columns"
    counts = tile.rows, tile.width, tile.held, blocks
    return _kernel("columns", template, dtype, operation, None, *counts)


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
    rows = rows_of(problem, outputs)
    if not rows.fits:
        raise TooManyAxes
    method = _method(problem, rows, limits)
    plan = _Planner(problem, rows, rows.layout(aligned), limits, method)
    # Ways of `auto` alone: each sums in an order of its own, a method in one for all layouts.
    free = problem.method == "auto" and not plan.splits(method)
    bundled = free and rows.bundled(aligned)
    if bundled:
        plan.take_strips()
    short = free and aligned and rows.columns in SHORT_LENGTHS[rows.dtype.itemsize]
    if not math.prod(outputs[0].shape):
        launches: tuple[Launch, ...] = ()
    elif plan.streamed is not None:
        launches = plan.stream(plan.streamed)
    elif problem.operation in _FORWARD:
        if short and rows.contiguous():
            launches = (plan.short(),)
        else:
            launches = plan.columns() if bundled else getattr(plan, method)()
    elif problem.operation.startswith("state"):
        launches = (plan.apply(),)
    else:
        bundled = bundled and _OPERATIONS.get(problem.operation) in _REDUCED_VJPS
        launches = plan.columns() if bundled else plan.backward()
    workspaces, workspace = plan.workspaces(method)
    return SoftmaxPlan(
        method=plan.method,
        launches=launches,
        block=plan.block(statistics=method == "naive").tobytes(),
        pointers=tuple(map(_pointer_offset, rows.roles)),
        workspaces=workspaces,
        workspace=workspace,
    )


def _method(problem: SoftmaxProblem, rows: Rows, limits: DeviceLimits) -> str:
    if problem.operation not in _FORWARD:
        return "auto"
    row_bytes = rows.chunks * CHUNK
    possible = ["naive", "online"]
    if row_bytes <= shared_capacity(limits):
        possible.insert(1, "fused")
    if limits.cluster_blocks > 1 and row_bytes <= cluster_capacity(limits):
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
    regimes = softmax_regimes(limits)
    return next(regime.method for regime in regimes if row_bytes <= regime.row_bytes)


class _Planner:
    """The launches of one problem; `lanes` (in a block), `across` and `slots` as in `Team`."""

    def __init__(
        self, problem: SoftmaxProblem, rows: Rows, layout: str, limits: DeviceLimits, method: str
    ) -> None:
        self._problem, self._rows, self._layout, self._limits = problem, rows, layout, limits
        self._packed = layout == "kPacked"
        self._across = not self._packed and rows.lie_side_by_side()
        self._blocks, self._slots, self._ahead = 1, 1, 0
        operation = _OPERATIONS.get(problem.operation)
        self._pairs = operation in _REDUCED_VJPS
        #: How clusters stream the rows, which must be many, or None.
        self.streamed: StreamShape | None = None
        #: How they stream strips of rows side by side, likewise.
        self.strips: StripShape | None = None
        self.method = method
        if self._streamable(operation):
            self.streamed = stream_shape(
                rows.rows, rows.chunks, rows.dtype, limits, pairs=self._pairs
            )
        if self.streamed is not None:
            self._blocks, self._lanes = self.streamed.blocks, WARP * self.streamed.warps
            self.method = "cluster" if self._blocks > 1 else "fused"
        elif method == "cluster":
            self._blocks, self._lanes = cluster_shape(rows.chunks, limits)
        elif self.splits(method):
            self._blocks = parts_of(rows.rows, rows.chunks * CHUNK, limits)
            self._lanes = MAX_THREADS
        elif self._pairs and self._packed:
            self._blocks = pair_cluster(rows.chunks, rows.dtype, limits)
            self._lanes = MAX_THREADS
        if self._blocks > 1:
            self._across = False
            return
        self._lanes = lanes_of(rows.chunks, rows.dtype, pairs=self._pairs)
        self._slots = max(1, LEAST_THREADS // self._lanes)
        if self._across:
            least = ACROSS_BYTES // rows.dtype.itemsize
            self._slots = min(max(self._slots, least), MAX_THREADS // self._lanes)

    def _streamable(self, operation: str | None) -> bool:
        one_stride = len(self._rows.kept.sizes) == 1
        automatic = self._problem.method == "auto"
        return self._packed and one_stride and automatic and operation in _STREAMED

    def take_strips(self) -> None:
        """Stream rows side by side, of which the kernels can read bundles, if they are many."""
        rows, one_stride = self._rows, len(self._rows.kept.sizes) == 1
        operation = _OPERATIONS.get(self._problem.operation)
        if one_stride and operation in _STREAMED and not self._pairs:
            self.strips = strip_shape(rows.rows, rows.columns, rows.dtype, self._limits)
        if self.strips is not None:
            self._blocks, self._lanes = self.strips.blocks, WARP * self.strips.warps

    def splits(self, method: str) -> bool:
        """Tell whether the rows are too few for a block each, and not held by any."""
        rows, limits = self._rows, self._limits
        if parts_of(rows.rows, rows.chunks * CHUNK, limits) == 1:
            return False
        if self._pairs:
            clusters = pair_cluster(rows.chunks, rows.dtype, limits) > 1
            return not (self._packed and (clusters or rows.chunks <= MAX_THREADS * HELD_PAIRS))
        return method == "online" or self._problem.operation in _ELEMENTWISE

    def workspaces(self, method: str) -> tuple[tuple[int, ...], int]:
        """Return where pointers to workspaces belong, and how many bytes each has."""
        if self.streamed is not None or self.strips is not None:
            return (_OFFSETS["states"],), CHUNK
        entry = self._rows.rows * accumulator(self._rows.dtype).itemsize
        if method == "naive":
            return tuple(map(_pointer_offset, STATISTICS)), entry
        if self.splits(method) and self._problem.operation not in _ELEMENTWISE:
            return (_OFFSETS["states"],), 2 * entry * self._blocks
        return (), 0

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
        if chunks and self._lanes > LEAST_THREADS:  # smaller blocks have rows enough in flight
            self._ahead = rows_ahead(self._limits, self._lanes, chunks, 1)
        return (self._launch("fused", "fused", self._operation(), chunks, held=held),)

    def cluster(self) -> tuple[Launch, ...]:
        chunks = HELD_CHUNKS if self._packed else 0
        held = 0 if chunks else self._lane_chunks() * self._lanes * CHUNK
        if chunks:
            self._ahead = rows_ahead(self._limits, self._lanes, chunks, self._blocks)
        counts = chunks, self._blocks
        return (self._launch("cluster", "cluster", self._operation(), *counts, held=held),)

    def online(self) -> tuple[Launch, ...]:
        if self._blocks > 1:
            return (
                self._launch("split", "split_states"),
                self._launch("split", "split", self._operation()),
            )
        return (self._launch("online", "online", self._operation()),)

    def stream(self, shape: StreamShape) -> tuple[Launch, ...]:
        """Return the kernels for many long rows."""
        return self._dealt(_stream_kernel(self._rows.dtype, self._operation(), shape), shape)

    def _dealt(self, kernel: KernelName, shape: StreamShape | StripShape) -> tuple[Launch, ...]:
        """Return what deals rows out to clusters: no more of them than there can be at a time."""
        return (
            Launch(_BEGIN_DEALING, grid=1, block=1, clears=_OFFSETS["states"]),
            Launch(
                kernel,
                grid=self._limits.multiprocessors * shape.resident // shape.blocks * shape.blocks,
                block=WARP * shape.warps,
                shared_bytes=self._room(shape).bytes,
                staying=shape.blocks,
            ),
        )

    def _room(self, shape: StreamShape | StripShape) -> StreamRoom:
        return shape.room(accumulator(self._rows.dtype).itemsize)

    def short(self) -> Launch:
        """Return the kernel for contiguous rows that are a thread's each."""
        rows = self._rows
        vector = CHUNK // rows.dtype.itemsize
        chunks = rows.columns // math.gcd(rows.columns, vector)
        of_block = max(4 // chunks, 1) * SHORT_THREADS * chunks * vector // rows.columns
        return Launch(
            _kernel("short", "short_rows", rows.dtype, self._operation(), None, rows.columns),
            grid=min(-(-rows.rows // of_block), self._limits.blocks),
            block=SHORT_THREADS,
        )

    def columns(self) -> tuple[Launch, ...]:
        """Return the kernels for rows side by side, with orders of sums of their own."""
        rows, limits = self._rows, self._limits
        if self.strips is not None:
            return self._dealt(
                _strips_kernel(rows.dtype, self._operation(), self.strips), self.strips
            )
        tile = column_tile(rows.rows, rows.columns, rows.dtype, limits, pairs=self._pairs)
        lanes, blocks, count = tile.lanes, 1, -(-rows.rows // (tile.width * tile.rows))
        if not tile.held and tile.blocks <= limits.cluster_blocks:
            blocks = tile.blocks if count < limits.multiprocessors else 1
        if tile.held:
            lanes = max(power_of_two(-(-rows.columns // tile.held)), LEAST_THREADS // tile.width)
            blocks = max(1, lanes // tile.lanes)
            lanes //= blocks
        threads, tile_rows = tile.width * lanes, tile.width * tile.rows
        state = 2 * accumulator(rows.dtype).itemsize
        return (
            Launch(
                _columns_kernel(rows.dtype, self._operation(), tile, blocks),
                grid=min(count, limits.blocks // blocks) * blocks,
                block=threads,
                shared_bytes=2 * (threads // WARP + blocks) * tile_rows * state,
            ),
        )

    def apply(self) -> Launch:
        return self._launch("naive", "apply", self._operation())

    def backward(self) -> tuple[Launch, ...]:
        if self._problem.operation == "logsumexp_vjp":
            return (self._launch("backward", "logsumexp_vjp"),)
        operation, chunks = self._operation(), self._register_chunks()
        if self.splits("auto"):
            return (
                self._launch("split", "split_sums", operation),
                self._launch("split", "split_vjp", operation),
            )
        if self._blocks > 1:
            return (self._launch("cluster", "cluster_vjp", operation, chunks, self._blocks),)
        return (self._launch("backward", "reduced_vjp", operation, chunks),)

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
        fields["parts"], fields["ahead"] = self._blocks, self._ahead
        dealt = self.streamed or self.strips
        fields["stages"] = self._room(dealt).stages if dealt else 0
        for (member, i), spec, kept, reduced in zip(
            rows.roles, rows.specs, rows.kept.strides, rows.reduced.strides, strict=True
        ):
            operand = fields[member] if member == "where" else fields[member][i]
            operand["kept_stride"][: len(kept)] = kept
            operand["reduced_stride"][: len(reduced)] = reduced
            operand["wide"] = member != "where" and spec.dtype != rows.dtype
        if statistics:
            strides = [math.prod(rows.kept.sizes[a + 1 :]) for a in range(len(rows.kept.sizes))]
            for member, i in STATISTICS:
                operand = fields[member][i]
                operand["kept_stride"][: len(strides)] = strides
                operand["wide"] = True
        return block

    def _operation(self) -> str:
        return _OPERATIONS[self._problem.operation]

    def _lane_chunks(self) -> int:
        return -(-self._rows.chunks // (self._lanes * self._blocks))

    def _register_chunks(self) -> int:
        """Return the chunks of each operand that a lane holds in registers, or 0."""
        if not self._packed:
            return 0
        needed = power_of_two(self._lane_chunks())
        if self._blocks > 1:
            needed = max(needed, HELD_PAIRS)
        most = held_chunks(self._blocks, self._rows.dtype, pairs=self._pairs)
        return needed if needed <= most else 0

    def _held_bytes(self, slots: int) -> int:
        """Return the bytes of shared memory in which fused holds rows, see `Held`."""
        chunks = self._rows.chunks if slots == 1 else slots * self._lanes * self._lane_chunks()
        return chunks * CHUNK

    def _fit_shared(self) -> None:
        """Give up rows of a block until two blocks share a multiprocessor, or else one fits."""

        def needed(slots: int) -> int:
            exchange = exchange_bytes(slots * self._lanes, across=self._across)
            return self._held_bytes(slots) + exchange

        least = max(1, WARP // self._lanes)
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
        threads = self._slots * self._lanes
        teams = min(-(-rows.rows // self._slots), self._limits.blocks // blocks)
        return Launch(
            _kernel(file, kernel, rows.dtype, operation, self._layout, *counts),
            grid=teams * blocks,
            block=threads,
            shared_bytes=exchange_bytes(threads, across=self._across) + held,
        )
