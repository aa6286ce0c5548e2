"""How the softmax kernels share out rows, and which of them `auto` takes: tables and thresholds.

Every number has its reason beside it. Thresholds are computed from the limits of a device. Shares
are of the rate of a copy, measured on an H200.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from .executor import DeviceLimits
from .softmax_rows import CHUNK

WARP = 32
#: Most threads of a block (`kMaxThreads`), and fewest: small blocks let the rows of one finish
#: while others load, but 32 blocks of a warp would not fill a multiprocessor (0.79, not 0.99).
MAX_THREADS, LEAST_THREADS = 512, 64

#: Chunks of a row for each lane of its team, by the most chunks of a row; rows beyond the last have
#: all threads of a block. 4 chunks are 64 bytes in flight a thread, at which enough threads are
#: resident to hide the latency of memory (0.97 to 1.00; 8 chunks 0.96, 1 chunk 0.40 to 0.90); rows
#: of 128 bytes and less would leave too few lanes to read whole sectors.
LANE_CHUNKS = ((8, 2), (2048, 4))
#: float64: a chunk has 2 elements to compute beside each exchange, so 8 are better where warps
#: exchange (0.99, 4 chunks 0.84 to 0.95).
LANE_CHUNKS_DOUBLE = ((8, 2), (256, 4), (4096, 8))
#: Gradients, which read two chunks for one (1.02 to 1.03).
LANE_CHUNKS_PAIR = ((512, 2), (2048, 4))
#: Most chunks that a lane holds in registers, 4 registers each: of a row, which at 16 leaves room
#: for one block of 512 threads (0.97 in float32, 0.91 in bfloat16, 0.90 in float64); of each of
#: two operands; and of these in clusters of 8 blocks or more, where nothing else holds the row
#: (float64: 4, as the exponential of log_softmax's gradient leaves no registers for more).
HELD_CHUNKS, HELD_PAIRS, HELD_PAIRS_IN_CLUSTER = 16, 4, 8
#: Threads of a cluster's blocks, in the order of preference: two blocks of 256 threads with 16
#: chunks a lane share a multiprocessor (N = 2^17 in float32 0.88, with 512 threads 0.86 and with
#: 8 chunks 0.87); 512 for rows that the largest cluster of those cannot hold.
CLUSTER_THREADS = (256, 512)
#: Sizes of clusters; the last two are the largest that devices have.
CLUSTERS = (2, 4, 8, 16)
#: Registers of a thread by the most chunks that it holds, as the kernels are compiled.
REGISTERS = ((4, 48), (8, 64), (HELD_CHUNKS, 128))
#: Blocks that a multiprocessor holds at most, by compute capability; 32 on the others.
SM_BLOCKS = {"75": 16, "86": 16, "87": 16, "89": 24}
#: The first compute capability that brings runs of bytes to L2 by one instruction.
PREFETCHES = 90
#: Least bytes of a row that a block reads where a row is split: enough that starting it is cheap.
PART_BYTES = 128 << 10
#: Least bytes that a warp reads together where rows lie side by side: two sectors of memory.
ACROSS_BYTES = 64
#: Bytes that a thread or warp gives to the others of its team, in two buffers (`kExchange`).
EXCHANGE = 2 * 16

#: Row lengths that `short.cu` takes, by bytes of an element, and the threads of its blocks: a row
#: of one thread needs no exchange (0.93 to 0.99 of the copy in place of 0.05 to 0.79; of single
#: elements 0.64 in 16 bits, 0.71 in float64). Longer rows have lanes enough.
SHORT_LENGTHS, SHORT_THREADS = {2: (1, 2, 3, 4, 8), 4: (1, 2, 3, 4), 8: (1, 2)}, 256


#: Of a stage of `stream` (`kStageBytes`), and the stages of a multiprocessor: most of its shared
#: memory. Its registers are all taken, too: by 16 warps with 16 chunks of float in a lane, or by 8
#: with 32.
STAGE_BYTES, STREAM_STAGES, STREAM_WARPS = 2048, 104, (8, 16)
#: The shared memory of a multiprocessor, and what each of its blocks leaves of it to what kernels
#: declare; the system takes as much.
STREAM_SHARED, STREAM_SPARE = 228 << 10, 1 << 10


class StreamRoom(NamedTuple):
    """The stages of each warp of a block, and its bytes of dynamic shared memory."""

    stages: int
    bytes: int

    @classmethod
    def of(cls, head: int, warps: int, resident: int) -> StreamRoom:
        """Return what `resident` blocks of a multiprocessor can have beside `head` bytes each."""
        head, of_all = -(-head // 128) * 128, warps * (STAGE_BYTES + 8)
        room = STREAM_SHARED // resident - 2 * STREAM_SPARE - head
        stages = min(STREAM_STAGES // (warps * resident), room // of_all)
        return cls(stages, head + stages * of_all)


@dataclass(frozen=True, slots=True)
class StreamShape:
    """A kernel of `stream.cu` and the longest rows, in bytes, that it takes.

    Clusters of `blocks` blocks of `warps` warps, whose lanes hold `held` chunks of each operand in
    registers and the others of a row where they were copied to.
    """

    row_bytes: int
    blocks: int
    warps: int
    held: int

    def __post_init__(self) -> None:
        """Refuse what the kernels cannot be compiled for, and rows that find no room."""
        if self.warps not in STREAM_WARPS or self.held * CHUNK * WARP % STAGE_BYTES:
            raise ValueError(f"warps = {self.warps}, held = {self.held}: no such kernel")
        if self.blocks not in (1, *CLUSTERS):
            raise ValueError(f"blocks must be 1 or one of {CLUSTERS}, got {self.blocks}")
        part = self.row_bytes // (self.blocks * self.warps)
        if part > self.held * CHUNK * WARP + (self.room(8).stages - 1) * STAGE_BYTES:
            raise ValueError(f"a warp has no room for {part} bytes of a row")

    @property
    def resident(self) -> int:
        """Blocks that share a multiprocessor (`kStreamBlocks`)."""
        return 2 if self.warps * self.held <= 64 else 1

    def room(self, accumulator_bytes: int) -> StreamRoom:
        """Return how a block uses shared memory: an exchange, and the warps' stages."""
        exchange = 32 + 2 * self.blocks * self.warps * 2 * accumulator_bytes
        return StreamRoom.of(exchange, self.warps, self.resident)


#: By bytes of an element and whether there are two operands, in rising order of rows. Each row
#: costs a warp some 300 instructions beside those of its elements, so that long parts pay: of float
#: 32 chunks a lane, and 8 warps (0.938 at N = 2^16 and 2^18, with 16 chunks and 16 warps 0.930 and
#: 0.927; at 2^20, half of it in shared memory, 0.887 and 0.891). 16-bit chunks have twice the
#: elements, whose weights would fit no registers beyond 8 chunks; 8 more of scores, exponentials
#: made twice, beat a larger cluster (N = 2^17 0.928 and 0.903; 2^18 0.967 and 0.919 as rows are
#: dealt out now; 2^19 0.927 and 0.821). Of float64 what 8 chunks leave in shared memory costs
#: nothing. Two blocks of 8 warps, one of which computes while the other waits, beat one of 16 at
#: N = 2^16 (0.941 and 0.911), but not at 2^15 (0.949 and 0.963) nor with 16 blocks a cluster (2^17
#: 0.887 and 0.884); beyond, 12 chunks are as many as do not spill (2^19 0.79, 32 chunks and 8 warps
#: 0.71).
STREAM_SHAPES: dict[tuple[int, bool], tuple[StreamShape, ...]] = {
    (2, False): (
        StreamShape(1 << 17, 1, 16, 8),
        StreamShape(1 << 18, 2, 16, 8),
        StreamShape(1 << 19, 4, 16, 8),
        StreamShape(1 << 20, 8, 16, 8),
        StreamShape(1 << 21, 16, 16, 8),
        StreamShape(1 << 22, 16, 8, 32),
    ),
    (4, False): (
        StreamShape(1 << 18, 2, 8, 32),
        StreamShape(1 << 19, 4, 8, 32),
        StreamShape(1 << 20, 8, 8, 32),
        StreamShape(1 << 22, 16, 8, 32),
    ),
    (8, False): (
        StreamShape(1 << 17, 1, 16, 8),
        StreamShape(1 << 18, 2, 16, 8),
        StreamShape(1 << 19, 8, 8, 8),
        StreamShape(1 << 20, 8, 16, 8),
        StreamShape(1 << 22, 16, 16, 12),
    ),
}
#: Gradients of any type: 0.957 at the least, in place of 0.55 to 0.92.
STREAM_SHAPES |= {
    (itemsize, True): tuple(StreamShape(n << 16, n, 16, 8) for n in (1, *CLUSTERS))
    for itemsize in (2, 4, 8)
}
#: Longest rows, in bytes, of each operand, that are left to what holds a row in a block, by bytes
#: of an element and whether there are two operands: it needs no ring while two blocks take turns
#: (16-bit rows of 64 KB 0.958, streamed 0.912; gradients of 32 KB 1.04), nor where one block's
#: prefetch keeps memory busy (float of 128 KB 0.979, streamed 0.957). 16 bits and float64 compute
#: for longer (bfloat16 of 128 KB 0.923, streamed 0.941, float16 0.958 and 0.958; float64 0.831 and
#: 0.915).
UNSTREAMED_BYTES = {(2, False): 1 << 16, (4, False): 1 << 17, (8, False): 1 << 16}
UNSTREAMED_BYTES |= {(itemsize, True): 1 << 15 for itemsize in (2, 4, 8)}
#: Least rows for each cluster that there may be: they are dealt out evenly, so that with fewer the
#: last round could cost more than streaming gains (264 rows of 2^16 in float32, 4 rounds: 0.895,
#: by `cluster` 0.828; but 200 rows, 3 rounds and a bit, 0.757 and 0.825).
STREAM_ROWS = 8


@dataclass(frozen=True, slots=True)
class StripShape:
    """A kernel of `strips.cu` and the most columns that it takes.

    Clusters of `blocks` blocks of `warps` warps, whose lanes hold `held` columns of `rows`
    neighbouring rows.
    """

    columns: int
    blocks: int
    rows: int
    warps: int
    held: int

    def __post_init__(self) -> None:
        """Refuse what the kernels cannot be compiled for, and columns that find no room."""
        if self.warps not in STREAM_WARPS or self.blocks not in (1, *CLUSTERS):
            raise ValueError(f"warps = {self.warps}, blocks = {self.blocks}: no such kernel")
        if self.columns > self.blocks * self.warps * self.held:
            raise ValueError(f"a strip has no room for {self.columns} columns")

    @property
    def resident(self) -> int:
        """Blocks that share a multiprocessor."""
        return max(STREAM_WARPS) // self.warps

    def room(self, accumulator_bytes: int) -> StreamRoom:
        """Return how a block uses shared memory: an exchange, states, and the warps' stages."""
        width, state = WARP * self.rows, 2 * accumulator_bytes
        exchange = 32 + 2 * self.blocks * width * state
        states = (self.warps * (width + 1) + width) * state
        return StreamRoom.of(-(-exchange // 128) * 128 + states, self.warps, self.resident)


#: By bytes of an element, in rising order. Blocks of 8 warps share a multiprocessor, and one
#: computes while the other waits (float32 0.91, 0.91 and 0.82 at N = 1024, 2048 and 4096, by one of
#: 16 warps 0.87, 0.81 and 0.79; as tiles 0.78, 0.68 and 0.65; float64 at 4096 0.74 and 0.69).
#: Pieces of memory are of 256 bytes, and of 128 where the cluster would have 16 blocks: in 16 bits
#: 0.82 and 0.74 at 1024, 0.77 and 0.70 at 2048, but 0.60 and 0.67 at 4096; tiles make 0.74, 0.68
#: and 0.61 there, and 0.55 at 8192 where strips make 0.59. Half as long rows gain 0.03 as strips of
#: 2 blocks (0.91, tiles 0.88 in float32; 0.89 and 0.85 in 16 bits): not worth their kernels.
STRIP_SHAPES: dict[int, tuple[StripShape, ...]] = {
    2: (
        *(StripShape(256 * n, n, rows=4, warps=8, held=32) for n in (4, 8)),
        *(StripShape(512 * n, n, rows=2, warps=8, held=64) for n in (8, 16)),
    ),
    4: tuple(StripShape(256 * n, n, rows=2, warps=8, held=32) for n in (4, 8, 16)),
    8: (
        *(StripShape(256 * n, n, rows=1, warps=8, held=32) for n in (4, 8, 16)),
        StripShape(8192, 16, rows=1, warps=16, held=32),
    ),
}
#: Most columns that are left to `columns`.
UNSTRIPPED_COLUMNS = 512


@dataclass(frozen=True, slots=True)
class ColumnTile:
    """A tile of `columns.cu`: `width` threads side by side with `rows` rows each.

    A lane holds `held` columns in registers, 0 where it reads them twice; a block has at most
    `lanes` lanes, and `blocks` of them are a cluster at most. Tiles that are read twice have such a
    cluster each where there are fewer of them than multiprocessors.
    """

    rows: int
    width: int
    held: int
    lanes: int
    blocks: int = 1

    def __post_init__(self) -> None:
        """Refuse what the kernels cannot be compiled for."""
        for name in ("rows", "width", "lanes", "blocks"):
            size = getattr(self, name)
            if size < 1 or size & (size - 1):
                raise ValueError(f"{name} must be a power of two, got {size}")
        if self.held < 0 or self.blocks > max(CLUSTERS):
            raise ValueError(f"held = {self.held}, blocks = {self.blocks}: no such tile")
        if not WARP <= self.width * self.lanes <= MAX_THREADS:
            raise ValueError(
                f"{self.width} x {self.lanes} threads; a block has {WARP} to {MAX_THREADS}"
            )

    def columns(self, limits: DeviceLimits) -> float:
        """Return the most columns of rows that the tile can take on a device."""
        blocks = min(self.blocks, limits.cluster_blocks)
        return self.held * self.lanes * blocks if self.held else math.inf


#: By bytes of an element and whether there are two operands, in the order of preference. Threads
#: side by side read 256 bytes of short rows (float32 of 128: 0.92, 128 bytes 0.83; of 256 0.94 and
#: 0.84; of 512 0.87 and 0.84; 16 bits of 128 0.91 and 0.84, of 512 0.59 and 0.83), then 128, and 64
#: where a block cannot hold that many rows. A lane holds 64 to 128 bytes, as few lanes as registers
#: allow, since every one is a state to be united; float32 256 bytes, for which a multiprocessor has
#: one block, where it saves a cluster of 2 (of 1024: 0.81 to 0.76). Fewer threads side by side
#: beat such a cluster in float64 (of 1024 0.76 to 0.73), and from a cluster of 16 on reading twice
#: is as fast (0.55 to 0.50 in 16 bits, 0.53 to 0.53 in float64 at N = 16384). Beside them the
#: shares at N = 128, 512, 1024 and 4096. Beyond: 0.58, 0.56 and 0.52 at 16384 in float32, 16 bits
#: and float64; at 65536, of 64 tiles, 0.50, 0.49 and 0.46, in a block each 0.33 in 16 bits.
COLUMN_TILES = {
    # 0.92, 0.87, 0.81, 0.68
    (4, False): (
        ColumnTile(2, 32, 16, 8),
        ColumnTile(2, 32, 32, 16),
        ColumnTile(1, 32, 64, 16),
        ColumnTile(1, 32, 32, 16, blocks=16),
        ColumnTile(2, 16, 0, 32, blocks=8),
    ),
    # 0.91, 0.82, 0.71, 0.60
    (2, False): (
        ColumnTile(4, 32, 16, 8),
        ColumnTile(2, 32, 32, 16),
        ColumnTile(2, 16, 32, 32, blocks=4),
        ColumnTile(4, 16, 0, 32, blocks=8),
    ),
    # 0.85, 0.84, 0.75, 0.63
    (8, False): (
        ColumnTile(1, 16, 8, 8),
        ColumnTile(1, 16, 16, 32),
        ColumnTile(1, 8, 16, 64, blocks=4),
        ColumnTile(1, 16, 0, 32, blocks=8),
    ),
    # 0.85, 0.82, 0.78, 0.63; beyond clusters 0.55
    (4, True): (ColumnTile(1, 32, 16, 16, blocks=16), ColumnTile(1, 32, 0, 16)),
    # 0.74, not measured, not measured, 0.52
    (2, True): (ColumnTile(2, 16, 8, 32), ColumnTile(2, 32, 0, 16)),
    # 0.86, 0.82, 0.78, 0.61; beyond clusters 0.50
    (8, True): (ColumnTile(1, 16, 8, 32, blocks=16), ColumnTile(1, 16, 0, 32)),
}


def column_tile(
    rows: int, columns: int, dtype: np.dtype, limits: DeviceLimits, *, pairs: bool
) -> ColumnTile:
    """Return the tile of rows side by side: the narrowest that holds them where tiles are few."""
    fitting = [t for t in COLUMN_TILES[dtype.itemsize, pairs] if columns <= t.columns(limits)]
    tiles = [tile for tile in fitting if tile.held] or fitting
    many = rows >= tiles[0].rows * tiles[0].width * limits.multiprocessors
    return tiles[0] if many else tiles[-1]


def power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least `n` and 1."""
    return 1 << max(n - 1, 0).bit_length()


def lanes_of(chunks: int, dtype: np.dtype, *, pairs: bool) -> int:
    """Return the lanes of a team. The order of a sum depends on it: of dtype and columns, then."""
    one = LANE_CHUNKS_DOUBLE if dtype.itemsize == 8 else LANE_CHUNKS
    for most, each in LANE_CHUNKS_PAIR if pairs else one:
        if chunks <= most:
            return power_of_two(-(-chunks // each))
    return MAX_THREADS


def held_chunks(blocks: int, dtype: np.dtype, *, pairs: bool) -> int:
    """Return the most chunks of each operand that a lane of a team of so many blocks holds."""
    if not pairs:
        return HELD_CHUNKS
    wide = dtype.itemsize == 8 or blocks < CLUSTERS[-2]
    return HELD_PAIRS if wide else HELD_PAIRS_IN_CLUSTER


def cluster_shape(chunks: int, limits: DeviceLimits) -> tuple[int, int]:
    """Return the blocks of a cluster that holds a row of so many chunks, and their threads."""
    for threads in CLUSTER_THREADS:
        blocks = max(CLUSTERS[0], power_of_two(-(-chunks // (threads * HELD_CHUNKS))))
        if blocks <= limits.cluster_blocks:
            break
    return blocks, threads


def pair_cluster(chunks: int, dtype: np.dtype, limits: DeviceLimits) -> int:
    """Return the blocks of the cluster that holds two operands' rows; 1 where it takes none.

    Rows that one block holds need none, and what the largest cluster cannot hold is read twice.
    """
    if chunks <= MAX_THREADS * HELD_PAIRS:
        return 1
    largest = limits.cluster_blocks
    if chunks > largest * MAX_THREADS * held_chunks(largest, dtype, pairs=True):
        return 1
    return min(power_of_two(-(-chunks // (MAX_THREADS * HELD_PAIRS))), largest)


def stream_shape(
    rows: int, chunks: int, dtype: np.dtype, limits: DeviceLimits, *, pairs: bool
) -> StreamShape | None:
    """Return the shape of the clusters that stream contiguous rows, or None."""
    row_bytes = chunks * CHUNK
    if row_bytes <= UNSTREAMED_BYTES[dtype.itemsize, pairs]:
        return None
    shapes = STREAM_SHAPES[dtype.itemsize, pairs]
    shape = next((shape for shape in shapes if row_bytes <= shape.row_bytes), None)
    return shape if shape and _stays(shape, rows, dtype, limits) else None


def strip_shape(
    rows: int, columns: int, dtype: np.dtype, limits: DeviceLimits
) -> StripShape | None:
    """Return the shape of the clusters that stream rows side by side, or None."""
    shapes = STRIP_SHAPES[dtype.itemsize]
    shape = next((shape for shape in shapes if columns <= shape.columns), None)
    if columns <= UNSTRIPPED_COLUMNS or shape is None:
        return None
    return shape if _stays(shape, rows // (WARP * shape.rows), dtype, limits) else None


def _stays(
    shape: StreamShape | StripShape, rows: int, dtype: np.dtype, limits: DeviceLimits
) -> bool:
    """Tell whether clusters of a shape can stay on a device, with rows or strips enough."""
    shared = shape.room(max(dtype.itemsize, 4)).bytes + STREAM_SPARE
    return (
        int(limits.compute_capability) >= PREFETCHES
        and shape.blocks <= min(limits.cluster_blocks, limits.multiprocessors)
        and shared <= limits.shared_per_block
        and shape.resident <= resident_blocks(limits, WARP * shape.warps, shared)
        and rows * shape.blocks >= STREAM_ROWS * limits.multiprocessors * shape.resident
    )


def resident_blocks(
    limits: DeviceLimits, threads: int, shared_bytes: int, registers: int = 0
) -> int:
    """Return how many blocks of a kernel a multiprocessor holds at a time.

    Registers are given out in units of 8 a thread, shared memory in units of 128 bytes; from
    compute capability 8.0 on, the system takes 1 KB of it for each block.
    """
    system = 1024 if int(limits.compute_capability) >= 80 else 0
    shared = -(-(shared_bytes + system) // 128) * 128
    bounds = [SM_BLOCKS.get(limits.compute_capability, 32), limits.threads_per_sm // threads]
    if shared:
        bounds.append(limits.shared_per_sm // shared)
    if registers:
        bounds.append(limits.registers_per_sm // (-(-registers // 8) * 8 * threads))
    return min(bounds)


def rows_ahead(limits: DeviceLimits, threads: int, chunks: int, blocks: int) -> int:
    """Return how far ahead of its own row a block of one team prefetches, in rows; 0: it does not.

    Just as far as the row that takes its place on the chip: one wave of rows lies in L2 then (from
    0.945 to 0.987 of the copy at N = 4096 in float32). Two waves push each other out (from 0.85 to
    0.68 at 2^18, in blocks spread over the GPU). A block too few in the estimate would have rows
    prefetched that are being read; one too many costs nothing.
    """
    if int(limits.compute_capability) < PREFETCHES:
        return 0
    registers = next(count for most, count in REGISTERS if chunks <= most)
    resident = max(1, resident_blocks(limits, threads, 0, registers))
    return max(1, resident * limits.multiprocessors // blocks)


def parts_of(rows: int, row_bytes: int, limits: DeviceLimits) -> int:
    """Return how many blocks share a row that no chip holds, so that few rows fill the GPU."""
    blocks = min(limits.multiprocessors, limits.blocks)
    return max(1, min(blocks // max(rows, 1), row_bytes // PART_BYTES))


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
        shared_capacity(limits),
        "a row is read once and held on chip: two trips, while a block can hold one",
    )
    online = Regime(
        "online",
        math.inf,
        "a row is read twice: three trips, at any length; few rows are split over all blocks",
    )
    if limits.cluster_blocks == 1:
        return fused, online
    return (
        replace(
            fused,
            row_bytes=min(fused.row_bytes, MAX_THREADS * HELD_CHUNKS * CHUNK),
            reason="a row is read once and held in registers: two trips, while a block can hold "
            "one; the row after it comes to L2 meanwhile",
        ),
        Regime(
            "cluster",
            cluster_capacity(limits),
            "a row is read once and held in the registers of several blocks: two trips, while a "
            "cluster can hold one",
        ),
        online,
    )


def shared_capacity(limits: DeviceLimits) -> int:
    """Return the bytes of the longest row that fused holds.

    Shared memory is the measure for rows in registers too: a contiguous array can do what its views
    can, and no more.
    """
    return limits.shared_per_block - exchange_bytes(MAX_THREADS, across=False)


def cluster_capacity(limits: DeviceLimits) -> int:
    """Return the bytes of the longest row that the largest cluster holds, in either memory."""
    if limits.cluster_blocks == 1:
        return 0
    return limits.cluster_blocks * min(shared_capacity(limits), MAX_THREADS * HELD_CHUNKS * CHUNK)


def exchange_bytes(threads: int, *, across: bool) -> int:
    """Return the bytes of shared memory before `Team::memory_end`."""
    return -(-(threads if across else threads // WARP) * EXCHANGE // 128) * 128
