"""How the softmax kernels share out rows, and which of them `auto` takes: tables and thresholds.

Every number has its reason beside it. Thresholds are computed from the limits of a device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from .executor import DeviceLimits
from .softmax_rows import CHUNK

WARP = 32
#: Most threads of a block (`kMaxThreads`), and how many it has where nothing asks for more: small
#: blocks let the rows of one finish while others load.
MAX_THREADS, BLOCK_THREADS = 512, 128

#: Lanes of a team by the most chunks of a row, else all threads of a block. Rows of up to 4 KB stay
#: within a warp, which needs no barrier; 4 chunks a lane are 64 bytes in flight a thread, at which
#: enough threads are resident to hide the latency of memory; 4 lanes read two sectors at a time.
LANES = ((1, 1), (2, 2), (16, 4), (32, 8), (64, 16), (256, 32), (512, 128), (1024, 256))
#: The same for gradients, which read two chunks for one.
PAIR_LANES = (
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
HELD_CHUNKS, HELD_PAIRS, HELD_IN_CLUSTER = 8, 4, 16
#: The same for float64, whose exponential leaves no registers for more.
HELD_DOUBLE = 4
#: Sizes of clusters; the last two are the largest that devices have.
CLUSTERS = (2, 4, 8, 16)
#: Least bytes that a warp reads together where rows lie side by side: two sectors of memory.
ACROSS_BYTES = 64
#: Tiles of `columns.cu` in the order of preference: bundles of rows side by side (16 bytes each,
#: two make a sector of memory), and the most columns that a lane holds in registers. Rows that none
#: of them holds are read twice.
TILES = ((8, 8), (4, 8), (2, 8), (2, 16))
OPEN_TILE = {8: (2, 0), 4: (4, 0), 2: (4, 0)}  # by bytes an element: registers again
#: Bytes that a thread or warp gives to the others of its team, in two buffers (`kExchange`).
EXCHANGE = 2 * 16


def power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least `n` and 1."""
    return 1 << max(n - 1, 0).bit_length()


def tiles_of(dtype: np.dtype) -> tuple[tuple[int, int], ...]:
    """Return the tiles of `columns.cu`: 16 columns of 16-bit rows and their states are too many."""
    return (
        *(t for t in TILES if dtype.itemsize > 2 or t[1] <= HELD_CHUNKS),
        OPEN_TILE[dtype.itemsize],
    )


def held_chunks(dtype: np.dtype, *, pairs: bool) -> tuple[int, int]:
    """Return the most chunks of each operand in a lane's registers: of a block, of a cluster."""
    if dtype.itemsize == 8:
        return HELD_DOUBLE, HELD_DOUBLE
    return (HELD_PAIRS, HELD_IN_CLUSTER // 2) if pairs else (HELD_CHUNKS, HELD_IN_CLUSTER)


def cluster_chunks(dtype: np.dtype, blocks: int, packed: bool, *, pairs: bool) -> tuple[int, ...]:
    """Return what a lane of a cluster can hold in registers, 0 for shared memory."""
    least, most = held_chunks(dtype, pairs=pairs)
    if not packed:
        return (0,)
    if most == least:
        return (least,) if pairs else (least, 0)
    return (least, most) if blocks >= CLUSTERS[-2] else (least,)


@dataclass(frozen=True, slots=True)
class Regime:
    """A method and the longest row, in bytes, for which `auto` takes it."""

    method: str
    row_bytes: float
    reason: str


def softmax_regimes(limits: DeviceLimits, dtype: np.dtype) -> tuple[Regime, ...]:
    """Return the methods of `auto` in rising order of the rows they take."""
    fused = Regime(
        "fused",
        shared_capacity(limits),
        "a row is read once and held on chip: two trips, while a block can hold one",
    )
    online = Regime("online", math.inf, "a row is read twice: three trips, at any length")
    if limits.cluster_blocks == 1:
        return fused, online
    fused = replace(
        fused,
        row_bytes=MAX_THREADS * HELD_CHUNKS * CHUNK,
        reason="a row is read once and held in registers: two trips, while two blocks with a "
        "row each share a multiprocessor and one computes as the other waits",
    )
    if dtype.itemsize == 8:
        # Exponentials of float64 take longer than a third trip: what holds rows in one block a
        # multiprocessor has nothing to compute them beside.
        return fused, online
    return (
        fused,
        Regime(
            "cluster",
            limits.cluster_blocks * MAX_THREADS * HELD_IN_CLUSTER * CHUNK,
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
    return limits.cluster_blocks * min(
        shared_capacity(limits), MAX_THREADS * HELD_IN_CLUSTER * CHUNK
    )


def exchange_bytes(threads: int, *, across: bool) -> int:
    """Return the bytes of shared memory before `Team::memory_end`."""
    return -(-(threads if across else threads // WARP) * EXCHANGE // 128) * 128


def lanes_of(chunks: int, table: tuple[tuple[int, int], ...]) -> int:
    """Return the lanes of a team. The order of a sum depends on it: of dtype and columns, then."""
    return next((lanes for most, lanes in table if chunks <= most), MAX_THREADS)
