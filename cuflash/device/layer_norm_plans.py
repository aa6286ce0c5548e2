"""What to launch for dropout, bias and LayerNorm: tiles as data, each with its reason."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ..problem_fused import LANES, Dropout
from .compiler import KernelName, Launch, ParameterBlock
from .executor import DeviceLimits
from .plans import C_TYPES
from .softmax_regimes import power_of_two
from .softmax_rows import CHUNK

ROW_ARRAY = ParameterBlock("cuflash::RowArray", {"data": np.uintp, "row_stride": np.int64})
PHILOX_ROUNDS = 10
PHILOX_KEYS = ParameterBlock(
    "cuflash::PhiloxKeys", dict.fromkeys(("low", "high"), (np.uint32, (PHILOX_ROUNDS,)))
)
DROPOUT = ParameterBlock(
    "cuflash::Dropout",
    {"keys": PHILOX_KEYS, "offset": np.uint64, "threshold": np.uint32, "scale": np.float64},
)
LAYER_NORM_PARAMETERS = ParameterBlock(
    "cuflash::LayerNormParameters",
    {
        "rows": np.int64,
        "columns": np.int64,
        "log2_lanes": np.int32,
        "input": (ROW_ARRAY, (3,)),
        "output": (ROW_ARRAY, (2,)),
        "vector": (np.uintp, (3,)),
        "statistic": (np.uintp, (2,)),
        "partial": np.uintp,
        "vector_result": (np.uintp, (3,)),
        "parts": np.int64,
        "epsilon": np.float64,
        "dropout": DROPOUT,
    },
)
#: Added to the halves of the key from round to round: the golden ratio and the root of 3 less 1.
_WEYL = 0x9E3779B9, 0xBB67AE85
#: Shared memory of a block that is not its own dynamic one: sums, and 1 KB of the system.
_RESERVED = 2048
#: Columns and threads of a block of `column_sums`.
_SUM_COLUMNS, _SUM_THREADS = 32, 512


class RowsTile(NamedTuple):
    """How rows are held.

    Octets of a lane, most lanes of a row, threads of a block; blocks for a multiprocessor
    (forward), or rows at a time (backward); rows, or so many at a time, under way.
    """

    octets: int
    lanes: int
    threads: int
    repeats: int
    stages: int

    @property
    def columns(self) -> int:
        """Longest row that a team holds."""
        return LANES * self.octets * self.lanes

    def shared_bytes(self, itemsize: int, operands: int, rows: int) -> int:
        """Dynamic shared memory of a block: octets of each thread under way."""
        return LANES * itemsize * self.octets * self.threads * self.stages * operands * rows


#: Rows of any length and alignment, read anew from L2.
_ANY = RowsTile(0, 512, 512, 1, 1)
#: By bytes of an element: the first that holds a row is taken. A row is one warp's as long as that
#: can hold it: its sums need no barrier. Registers for eight octets leave 16 warps to a
#: multiprocessor, 12 of wider elements. Short rows share a warp.
FORWARD_TILES = {
    2: (
        RowsTile(1, 4, 256, 4, 4),
        RowsTile(4, 32, 128, 5, 2),
        RowsTile(8, 32, 64, 8, 2),
        RowsTile(8, 64, 64, 8, 2),
        RowsTile(8, 128, 128, 4, 2),
        RowsTile(8, 256, 256, 2, 2),
        _ANY,
    ),
    4: (
        RowsTile(1, 4, 256, 4, 4),
        RowsTile(4, 32, 128, 4, 2),
        RowsTile(8, 32, 64, 6, 1),
        RowsTile(8, 64, 64, 6, 1),
        RowsTile(8, 128, 128, 3, 1),
        RowsTile(8, 256, 256, 1, 1),
        _ANY,
    ),
    8: (
        RowsTile(1, 4, 256, 2, 2),
        RowsTile(4, 32, 64, 6, 1),
        RowsTile(4, 64, 64, 6, 1),
        RowsTile(4, 128, 128, 3, 1),
        RowsTile(4, 256, 256, 1, 1),
        _ANY,
    ),
}
#: The sums over rows take 24 registers an octet, so that rows are those of many lanes with few
#: octets. Two rows at a time halve the barriers.
BACKWARD_TILES = {
    2: (RowsTile(1, 512, 512, 2, 2), RowsTile(2, 512, 512, 1, 2), _ANY),
    4: (RowsTile(1, 512, 512, 2, 1), RowsTile(2, 512, 512, 1, 1), _ANY),
    8: (RowsTile(1, 256, 256, 2, 1), _ANY),
}


def _kernel(
    dtype: np.dtype, tile: RowsTile, fixed: bool, packed: bool, residual: bool, gradient: bool
) -> KernelName:
    """Name a kernel, for a fixed number of lanes or for any.

    A kernel for fixed lanes takes it that rows fill more than half of what these hold: lanes are a
    power of two, no more than it takes.
    """
    flags = [str(flag).lower() for flag in (packed, residual)]
    lanes = tile.lanes if fixed else 0
    numbers = [tile.octets, lanes, tile.threads, tile.repeats, tile.stages]
    arguments = ", ".join([C_TYPES[dtype.name], *flags, *map(str, numbers)])
    if gradient:
        name = f"cuflash::layer_norm_vjp<{arguments}>"
        return KernelName("fused/layer_norm_backward.cu", name)
    return KernelName("fused/layer_norm.cu", f"cuflash::layer_norm<{arguments}>")


def _is_fixed(tile: RowsTile, lanes: int, packed: bool) -> bool:
    return packed and tile.octets > 0 and lanes == tile.lanes


def _sums_kernel(dtype: np.dtype) -> KernelName:
    name = f"cuflash::column_sums<{C_TYPES[dtype.name]}>"
    return KernelName("fused/layer_norm_backward.cu", name)


def layer_norm_kernels(dtype: np.dtype) -> Iterator[KernelName]:
    """Yield every kernel that a plan for x of this dtype can launch."""
    for gradient, tiles in ((False, FORWARD_TILES), (True, BACKWARD_TILES)):
        for residual in (False, True):
            before = 0
            for tile in tiles[dtype.itemsize]:
                if tile.octets:
                    yield _kernel(dtype, tile, True, True, residual, gradient)
                if 2 * before < tile.columns or not tile.octets:
                    yield _kernel(dtype, tile, False, True, residual, gradient)
                before = tile.columns
            yield _kernel(dtype, _ANY, False, False, residual, gradient)
    yield _sums_kernel(dtype)


@dataclass(frozen=True, slots=True)
class LayerNormPlan:
    """The launches of one call, all with one parameter block; none if there are no rows.

    `parts` teams have sums of their own, of which gradients keep `parts` x 3 x columns
    accumulators.
    """

    launches: tuple[Launch, ...]
    log2_lanes: int
    parts: int


@lru_cache(maxsize=4096)
def plan_layer_norm(
    dtype: np.dtype,
    rows: int,
    columns: int,
    packed: bool,
    residual: bool,
    gradient: bool,
    limits: DeviceLimits,
) -> LayerNormPlan:
    """Plan one call.

    Parameters
    ----------
    dtype : dtype
        Of x.
    rows, columns : int
        Sizes of x.
    packed : bool
        All rows are octets at multiples of 16 bytes.
    residual : bool
        There is one.
    gradient : bool
        For the gradients.
    limits : DeviceLimits
        The device.
    """
    tiles = (BACKWARD_TILES if gradient else FORWARD_TILES)[dtype.itemsize]
    operands = 1 + residual + gradient

    def shared_bytes(tile: RowsTile) -> int:
        return tile.shared_bytes(dtype.itemsize, operands, tile.repeats if gradient else 1)

    held = next(
        tile
        for tile in tiles
        if (columns <= tile.columns and shared_bytes(tile) <= limits.shared_per_block - _RESERVED)
        or tile == _ANY
    )
    tile = held if packed else _ANY
    octets = -(-columns // LANES)
    # As many lanes for views that have to be read by elements: the same sums in the same order.
    lanes = min(held.lanes, power_of_two(-(-octets // max(1, held.octets))))
    slots = tile.threads // lanes
    blocks = 1 if gradient else tile.repeats
    grid = max(1, min(-(-rows // slots), limits.multiprocessors * blocks))
    fixed = _is_fixed(tile, lanes, packed)
    kernel = _kernel(dtype, tile, fixed, packed, residual, gradient)
    launches = [Launch(kernel, grid, tile.threads, shared_bytes=shared_bytes(tile))]
    if gradient:
        tiles_of_sums = 3 * -(-columns // _SUM_COLUMNS)
        launches.append(Launch(_sums_kernel(dtype), tiles_of_sums, _SUM_THREADS))
    launched = tuple(launches) if rows or gradient else ()
    return LayerNormPlan(launched, lanes.bit_length() - 1, grid * slots)


def write_dropout(fields: np.void, dropout: Dropout) -> None:
    """Describe a mask to a kernel."""
    for half, name in enumerate(("low", "high")):
        key = dropout.seed >> 32 * half & 0xFFFFFFFF
        fields["keys"][name] = [
            (key + turn * _WEYL[half]) & 0xFFFFFFFF for turn in range(PHILOX_ROUNDS)
        ]
    fields["offset"], fields["threshold"] = dropout.offset, dropout.threshold
    fields["scale"] = dropout.scale


def are_packed(
    columns: int, itemsize: int, pointers: Sequence[int], strides: Sequence[int]
) -> bool:
    """Tell whether rows, at these addresses and steps in bytes, are whole octets at 16 bytes."""
    return columns % LANES == 0 and not any(x % CHUNK for x in (*pointers, *strides))


def partial_bytes(plan: LayerNormPlan, columns: int, accumulator: np.dtype) -> int:
    """Return the bytes of the teams' sums."""
    return math.prod((plan.parts, 3, columns)) * accumulator.itemsize
