"""What to launch for dropout, bias and LayerNorm: tiles as data, each with its reason."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ..problem_fused import LANES, Dropout
from .compiler import C_TYPES, KernelName, Launch, ParameterBlock
from .executor import DeviceLimits
from .parameters import as_words
from .softmax_regimes import power_of_two
from .softmax_rows import CHUNK

ROW_ARRAY = ParameterBlock("cuflash::RowArray", {"data": np.uintp, "row_stride": np.int64})
PHILOX_ROUNDS = 10
PHILOX_KEYS = ParameterBlock(
    "cuflash::PhiloxKeys", dict.fromkeys(("low", "high"), (np.uint32, (PHILOX_ROUNDS,)))
)
REAL = ParameterBlock("cuflash::Real", {"wide": np.float64, "narrow": np.float32})
DROPOUT = ParameterBlock(
    "cuflash::Dropout",
    {"keys": PHILOX_KEYS, "offset": np.uint64, "threshold": np.uint32, "scale": REAL},
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
        "resident": np.int64,
        "share": REAL,
        "epsilon": REAL,
        "dropout": DROPOUT,
    },
)
#: Where the pointers of a call lie, as 8-byte words: x, residual, dy, y or dx, dresidual; bias,
#: gamma, beta; mean, rstd; the teams' sums; dbias, dgamma, dbeta. Behind them, its dropout.
_POINTERS = np.array(
    [
        LAYER_NORM_PARAMETERS.layout()[member] // 8 + i
        for member, count in (
            *((f"input[{i}].data", 1) for i in range(3)),
            *((f"output[{i}].data", 1) for i in range(2)),
            *(("vector", 3), ("statistic", 2), ("partial", 1), ("vector_result", 3)),
        )
        for i in range(count)
    ]
)
_DROPOUT = slice(LAYER_NORM_PARAMETERS.layout()["dropout"] // 8, None)
#: Added to the halves of the key from round to round: the golden ratio and the root of 3 less 1.
_WEYL = 0x9E3779B9, 0xBB67AE85
#: Shared memory of a block that is not its own dynamic one: sums, and 1 KB of the system.
_RESERVED = 2048
#: Columns and threads of a block of `column_sums`.
_SUM_COLUMNS, _SUM_THREADS = 32, 512


class RowsTile(NamedTuple):
    """How rows are held.

    Octets of a lane, most lanes of a row, threads of a block, blocks for a multiprocessor; rows of
    a team at a time, and how many times as many are under way: 0 for teams of one row, whose blocks
    come and go.
    """

    octets: int
    lanes: int
    threads: int
    blocks: int
    rows: int
    stages: int

    @property
    def columns(self) -> int:
        """Longest row that a team holds."""
        return LANES * self.octets * self.lanes

    def shared_bytes(self, itemsize: int, operands: int) -> int:
        """Dynamic shared memory of a block: octets of each thread under way."""
        rows = self.rows * self.stages * operands
        return LANES * itemsize * self.octets * self.threads * rows


#: Rows of any length and alignment, read anew from L2.
_ANY = RowsTile(0, 512, 512, 1, 1, 1)
#: By bytes of an element: the first that holds a row is taken. A row is one warp's as long as that
#: can hold it: its sums need no barrier. Registers for eight octets leave 16 warps to a
#: multiprocessor, 12 of wider elements. Short rows share a warp. Blocks that come and go keep all
#: multiprocessors busy to the end, which those that stay do not: N = 4096 in bfloat16 comes to 0.94
#: of the copy's rate for 0.79. Whole rows of eight octets of float32 lose by it: 0.41 for 0.60.
FORWARD_TILES = {
    2: (
        RowsTile(1, 4, 256, 4, 1, 4),
        RowsTile(4, 32, 64, 12, 1, 0),
        RowsTile(8, 32, 64, 8, 1, 0),
        RowsTile(8, 64, 64, 8, 1, 0),
        RowsTile(8, 128, 128, 4, 1, 0),
        RowsTile(8, 256, 256, 2, 1, 0),
        _ANY,
    ),
    4: (
        RowsTile(1, 4, 256, 4, 1, 4),
        RowsTile(4, 32, 128, 4, 1, 0),
        RowsTile(8, 32, 64, 6, 1, 1),
        RowsTile(8, 64, 64, 6, 1, 1),
        RowsTile(8, 128, 128, 3, 1, 1),
        RowsTile(8, 256, 256, 1, 1, 1),
        _ANY,
    ),
    8: (
        RowsTile(1, 4, 256, 2, 1, 2),
        RowsTile(4, 32, 64, 6, 1, 1),
        RowsTile(4, 64, 64, 6, 1, 1),
        RowsTile(4, 128, 128, 3, 1, 1),
        RowsTile(4, 256, 256, 1, 1, 1),
        _ANY,
    ),
}
#: The sums over rows take 24 registers an octet, so that rows are those of many lanes with few
#: octets. Two rows at a time halve the barriers.
BACKWARD_TILES = {
    2: (RowsTile(1, 512, 512, 1, 2, 2), RowsTile(2, 512, 512, 1, 1, 2), _ANY),
    4: (RowsTile(1, 512, 512, 1, 2, 1), RowsTile(2, 512, 512, 1, 1, 1), _ANY),
    8: (RowsTile(1, 256, 256, 1, 2, 1), _ANY),
}


def _kernel(
    dtype: np.dtype, tile: RowsTile, lanes: int, layout: str, residual: bool, gradient: bool
) -> KernelName:
    """Name a kernel for rows of this layout, of `lanes` lanes: 0 if the launch says how many.

    A kernel for fixed lanes takes it that rows fill more than half of what these hold: lanes are a
    power of two, no more than it takes. Layouts: "elements"; "packed", octets at multiples of 16
    bytes; "whole", octets for all that the lanes hold.
    """
    arguments = [C_TYPES[dtype.name], _c_bool(layout != "elements"), _c_bool(residual)]
    held = [tile.octets, lanes, tile.threads]
    if gradient:
        arguments += map(str, [*held, tile.rows, tile.stages])
        name = f"cuflash::layer_norm_vjp<{', '.join(arguments)}>"
        return KernelName("fused/layer_norm_backward.cu", name)
    arguments += [*map(str, [*held, tile.blocks, tile.stages]), _c_bool(layout == "whole")]
    return KernelName("fused/layer_norm.cu", f"cuflash::layer_norm<{', '.join(arguments)}>")


def _c_bool(flag: bool) -> str:
    return str(flag).lower()


def _variant(
    tile: RowsTile, lanes: int, columns: int, packed: bool, gradient: bool
) -> tuple[int, str]:
    """Return the lanes that a kernel is for, and the layout."""
    fixed = lanes if packed and tile.octets and lanes == tile.lanes else 0
    whole = fixed and not tile.stages and columns == tile.columns and not gradient
    return fixed, "whole" if whole else "packed" if packed else "elements"


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
                    yield _kernel(dtype, tile, tile.lanes, "packed", residual, gradient)
                if not tile.stages:
                    yield _kernel(dtype, tile, tile.lanes, "whole", residual, gradient)
                if 2 * before < tile.columns or not tile.octets:
                    yield _kernel(dtype, tile, 0, "packed", residual, gradient)
                before = tile.columns
            yield _kernel(dtype, _ANY, 0, "elements", residual, gradient)
    yield _sums_kernel(dtype)


@dataclass(frozen=True, slots=True, eq=False)
class LayerNormPlan:
    """The launches of one call, all with one parameter block; none if there are no rows.

    `parts` teams have sums of their own, of which gradients keep `parts` x 3 x columns
    accumulators.
    """

    launches: tuple[Launch, ...]
    parts: int
    _block: np.ndarray

    def parameters(self, pointers: Sequence[int], dropout: Dropout) -> np.ndarray:
        """Return the parameter block for these addresses, in the order of `_POINTERS`."""
        words = self._block.copy()
        words[_POINTERS] = pointers
        words[_DROPOUT] = _dropout_words(dropout)
        return words.view(LAYER_NORM_PARAMETERS.opaque)


@lru_cache(maxsize=4096)
def row_stride(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> int | None:
    """Return the bytes between rows whose columns lie end to end at one distance, else None."""
    if not math.prod(shape):
        return 0
    if shape[-1] > 1 and strides[-1] != itemsize:
        return None
    step = size = 0
    for length, stride in zip(shape[-2::-1], strides[-2::-1], strict=True):
        if length == 1:
            continue
        if size and stride != step * size:
            return None
        step, size = (step, size * length) if size else (stride, length)
    return step


@lru_cache(maxsize=4096)
def plan_layer_norm(
    dtype: np.dtype,
    rows: int,
    columns: int,
    packed: bool,
    residual: bool,
    gradient: bool,
    strides: tuple[int, ...],
    eps: float,
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
    strides : tuple of int
        Elements between rows of x, residual, dy, y or dx, dresidual; 0 where there is none.
    eps : float
        Added to the variance.
    limits : DeviceLimits
        The device.
    """
    tiles = (BACKWARD_TILES if gradient else FORWARD_TILES)[dtype.itemsize]
    operands = 1 + residual + gradient

    def shared_bytes(tile: RowsTile) -> int:
        return tile.shared_bytes(dtype.itemsize, operands)

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
    resident = limits.multiprocessors * tile.blocks
    grid = max(1, -(-rows // slots))
    if tile.stages:
        grid = min(grid, resident)
    kernel = _kernel(
        dtype, tile, *_variant(tile, lanes, columns, packed, gradient), residual, gradient
    )
    launches = [Launch(kernel, grid, tile.threads, shared_bytes=shared_bytes(tile))]
    if gradient:
        tiles_of_sums = 3 * -(-columns // _SUM_COLUMNS)
        launches.append(Launch(_sums_kernel(dtype), tiles_of_sums, _SUM_THREADS))
    launched = tuple(launches) if rows or gradient else ()
    block = LAYER_NORM_PARAMETERS.zeros()
    fields = block[0]
    fields["rows"], fields["columns"], fields["log2_lanes"] = rows, columns, lanes.bit_length() - 1
    fields["parts"], fields["resident"] = grid * slots, resident
    _write_real(fields["share"], 1 / columns)
    _write_real(fields["epsilon"], eps)
    fields["input"]["row_stride"], fields["output"]["row_stride"] = strides[:3], strides[3:]
    return LayerNormPlan(launched, grid * slots, as_words(block))


def _write_real(fields: np.void, number: float) -> None:
    fields["wide"] = number
    with np.errstate(over="ignore"):
        fields["narrow"] = number


def write_dropout(fields: np.void, dropout: Dropout) -> None:
    """Describe a mask to a kernel."""
    for half, name in enumerate(("low", "high")):
        key = dropout.seed >> 32 * half & 0xFFFFFFFF
        fields["keys"][name] = [
            (key + turn * _WEYL[half]) & 0xFFFFFFFF for turn in range(PHILOX_ROUNDS)
        ]
    fields["offset"], fields["threshold"] = dropout.offset, dropout.threshold
    _write_real(fields["scale"], dropout.scale)


@lru_cache(maxsize=64)
def _dropout_words(dropout: Dropout) -> np.ndarray:
    block = DROPOUT.zeros()
    write_dropout(block[0], dropout)
    return as_words(block)


def are_packed(
    columns: int, itemsize: int, pointers: Sequence[int], strides: Sequence[int]
) -> bool:
    """Tell whether rows, at these addresses and steps in bytes, are whole octets at 16 bytes."""
    return columns % LANES == 0 and not any(x % CHUNK for x in (*pointers, *strides))


def partial_bytes(plan: LayerNormPlan, columns: int, accumulator: np.dtype) -> int:
    """Return the bytes of the teams' sums."""
    return math.prod((plan.parts, 3, columns)) * accumulator.itemsize
