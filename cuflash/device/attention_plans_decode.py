"""The tiles of `decode_mma`, few queries and many keys on tensor cores, as data with reasons."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np

from ..problem import AttentionProblem
from .compiler import KernelName
from .executor import DeviceLimits
from .plans import C_TYPES


@dataclass(frozen=True, slots=True)
class DecodeTile:
    """The tile of `decode_mma`, `DecodeTile` in the kernel.

    A block has 16 query rows and `warps` warps, each of which takes slices of `slice_keys` keys and
    has `stages` of them in shared memory. `features` and `values` are the widths that D and Dv are
    padded to. With `queries_held` a warp keeps the queries in registers.
    """

    warps: int
    slice_keys: int
    features: int
    values: int
    stages: int
    queries_held: bool
    blocks: int

    def __post_init__(self) -> None:
        """Refuse what the kernel cannot be compiled for."""
        for name in ("slice_keys", "features", "values"):
            size = getattr(self, name)
            if size < 16 or size % 16:
                raise ValueError(f"{name} must be a positive multiple of 16, got {size}")
        for name, least, most in (("warps", 3, 32), ("stages", 2, 8), ("blocks", 1, 32)):
            if not least <= getattr(self, name) <= most:
                raise ValueError(f"{name} must lie in {least}..{most}, got {getattr(self, name)}")

    @property
    def queries(self) -> int:
        """Query rows of a block."""
        return ROWS

    @property
    def keys(self) -> int:
        """Keys that the warps of a block take at a time."""
        return self.warps * self.slice_keys

    @property
    def expression(self) -> str:
        """The tile as a C++ type."""
        numbers = (self.warps, self.slice_keys, self.features, self.values, self.stages)
        held = str(self.queries_held).lower()
        return f"cuflash::DecodeTile<{', '.join(map(str, numbers))}, {held}, {self.blocks}>"

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        stages = self.stages * self.keys * (self.features + self.values)
        return 2 * (ROWS * self.features + stages)


class DecodeChoice(NamedTuple):
    """A row of the table: the most features and value columns that take the tile."""

    features: int
    values: int
    tile: DecodeTile
    reason: str


#: Rows of a block: what a matrix instruction has at least.
ROWS = 16
#: Least tiles of keys of a share: fewer do not fill the stages.
_SHARE_TILES = 4
#: Most shares: the merge reads a result of each.
_MOST_SHARES = 512
# Microseconds of a call, as they were measured on an H200 with D = 128 (docs/kernels.md): what
# blocks take to begin and end beside their keys, what the launch that merges shares adds, and what
# numbers of blocks have to differ by to be told apart.
_TURN_US = 4.0
_MERGE_US = 4.6
_EQUAL_US = 1.0
#: Bytes a microsecond of keys and values: of a whole device, by its multiprocessors, and what a
#: block streams alone, which is as much as two of them have.
_STREAM = 4500e3 / 132
_BLOCK_STREAM = 65e3
#: The first row that fits a problem, and whose blocks a multiprocessor has room for, is taken.
#: 4 TB/s with a latency of a microsecond are 32 KB under way on each of 132 multiprocessors, and
#: twice that where only half of them have a block. Tiles that fill a multiprocessor with one block
#: (8 warps, slices of 32 keys, 6 stages) were within 1 % of these on an H200 with one block each,
#: up to 5 % faster with one for every second, and 4 to 15 % slower in two turns.
DECODE_TILES = (
    DecodeChoice(
        64, 64, DecodeTile(4, 32, 64, 64, 3, True, 2),
        "two blocks have 128 KB under way, one alone 64 KB",
    ),
    DecodeChoice(
        64, 64, DecodeTile(4, 32, 64, 64, 2, True, 2), "two blocks in 164 KB (sm_80)"
    ),
    DecodeChoice(
        128, 128, DecodeTile(4, 16, 128, 128, 3, True, 2),
        "as above; 2 stages are as fast with two blocks, 27 % slower with one",
    ),
    DecodeChoice(
        128, 128, DecodeTile(4, 16, 128, 128, 2, True, 2), "two blocks in 164 KB (sm_80)"
    ),
    DecodeChoice(
        256, 256, DecodeTile(4, 16, 256, 256, 3, False, 1),
        "sums take 128 registers: queries are read again for each slice",
    ),
    DecodeChoice(
        256, 256, DecodeTile(4, 16, 256, 256, 2, False, 1),
        "what 164 KB (sm_80) have room for; 99 KB (sm_86, sm_89) have none: forward_mma",
    ),
)  # fmt: skip

#: Shared memory of a block that is not its own dynamic one: 1 KB of the system, and `PackedRows`
#: with every option.
_RESERVED_SHARED = 8192


class Packing(NamedTuple):
    """Batch entries of a group, which share their keys, in one block.

    The group is the `axis` of the batch, None if there is no such axis; `members` of its `size`
    entries are in a block.
    """

    axis: int | None = None
    size: int = 1
    members: int = 1

    @property
    def tiles(self) -> int:
        """Blocks that share a group."""
        return -(-self.size // self.members)

    @property
    def queries(self) -> int:
        """Queries of each member that a block has."""
        return ROWS // self.members


def packing(problem: AttentionProblem) -> Packing:
    """Choose the group: the largest axis along which k and v broadcast, if its rows fit.

    All queries of a member must fit, so that a block sees the keys that a block of one entry's rows
    would see: shares of the keys, and with them every bit, are the same. Sequences end to end are
    not packed for the same reason.
    """
    room = ROWS // max(1, problem.tq)
    shared = [
        axis
        for axis, size in enumerate(problem.batch_shape)
        if size > 1 and problem.k.strides[axis] == problem.v.strides[axis] == 0
    ]
    if room < 2 or not shared or problem.sequences is not None:
        return Packing()
    axis = max(shared, key=lambda axis: problem.batch_shape[axis])
    size = problem.batch_shape[axis]
    return Packing(axis, size, -(-size // -(-size // room)))


def decode_tile(problem: AttentionProblem, limits: DeviceLimits) -> DecodeTile | None:
    """Return the first tile that fits the problem and the device, None if there is none."""
    if problem.mean_tq > ROWS:
        return None
    fitting = [
        choice.tile
        for choice in DECODE_TILES
        if problem.d <= choice.features
        and problem.dv <= choice.values
        and choice.tile.shared_bytes + _RESERVED_SHARED <= limits.shared_per_block
    ]
    for tile in fitting:
        if tile.blocks * (tile.shared_bytes + _RESERVED_SHARED) <= limits.shared_per_sm:
            return tile
    return min(fitting, key=lambda tile: tile.shared_bytes, default=None)


def decode_splits(blocks: int, tiles: int, tile: DecodeTile, limits: DeviceLimits) -> int:
    """Return the number of shares of `tiles` tiles of keys, given the blocks without shares.

    The fastest by a model: blocks run in turns of as many as there are places for, a turn takes its
    bytes over the rate of the device, or of a block if those are few, and shares take a merge.
    """
    most = max(1, min(tiles // _SHARE_TILES, _MOST_SHARES))
    splits = np.arange(1, most + 1)
    share = -(-tiles // splits) * (2 * tile.keys * (tile.features + tile.values))
    places = tile.blocks * limits.multiprocessors
    turns, left = np.divmod(max(1, blocks) * splits, places)

    def turn(running: int | np.ndarray) -> np.ndarray:
        device = running * share / (_STREAM * limits.multiprocessors)
        return _TURN_US + np.maximum(device, share / _BLOCK_STREAM)

    time = turns * turn(places) + (left > 0) * turn(left) + _MERGE_US * (splits > 1)
    if time[0] <= time.min():
        return 1
    # Of equal ones the most: blocks of several multiprocessors even out.
    return int(splits[time <= time.min() + _EQUAL_US][-1])


def decode_mma(dtype: np.dtype, score: str, tile: DecodeTile) -> KernelName:
    """Name the kernel for a dtype, a tile and the least score pipeline that serves a call."""
    score = "RangedScore" if score in ("PlainScore", "RangedScore") else "FullScore"
    return KernelName(
        "attention/decode_mma.cu",
        f"cuflash::decode_mma<{C_TYPES[dtype.name]}, cuflash::{score}<float>, {tile.expression}>",
    )


def decode_kernels(dtype: np.dtype) -> Iterator[KernelName]:
    """Yield every kernel for q, k, v of this dtype.

    Of pipelines there are two: bounds cost nothing where all rows see all of a slice, and options
    hide behind memory.
    """
    for choice, score in product(DECODE_TILES, ("RangedScore", "FullScore")):
        yield decode_mma(dtype, score, choice.tile)
