"""The tiles of `decode_mma`, few queries and many keys on tensor cores, as data with reasons."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..problem import AttentionProblem
from .compiler import C_TYPES, KernelName
from .executor import DeviceLimits


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
    def key_bytes(self) -> int:
        """Keys and values of such a tile."""
        return 2 * self.keys * (self.features + self.values)

    @property
    def expression(self) -> str:
        """The tile as a C++ type."""
        numbers = (self.warps, self.slice_keys, self.features, self.values, self.stages)
        held = str(self.queries_held).lower()
        return f"cuflash::DecodeTile<{', '.join(map(str, numbers))}, {held}, {self.blocks}>"

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        return 2 * ROWS * self.features + self.stages * self.key_bytes


class DecodeChoice(NamedTuple):
    """A row of the table: the most features and value columns that take the tile.

    `clustered` is the tile of blocks whose cluster merges their shares of the keys, where that was
    measured to be faster.
    """

    features: int
    values: int
    tile: DecodeTile
    reason: str
    clustered: DecodeTile | None = None


class Shares(NamedTuple):
    """How many shares the keys are split into.

    With a tile, the shares are those of a cluster's blocks, which have that tile and merge them.
    """

    splits: int
    clustered: DecodeTile | None = None

    @property
    def apart(self) -> int:
        """Partial results of a row that a launch of its own has to merge."""
        return 1 if self.clustered else self.splits


#: Rows of a block: what a matrix instruction has at least.
ROWS = 16
#: Least tiles of keys of a share: fewer do not fill the stages.
_SHARE_TILES = 4
#: Most shares: the merge reads a result of each.
_MOST_SHARES = 512
#: Shares that clusters merge (sm_90). A multiprocessor has one block of a cluster: where it had
#: two, clusters that did not fit beside the others began when those ended.
CLUSTER_SHARES = (2, 8)
#: Least tiles of keys of a cluster's share.
_CLUSTER_TILES = 2
# Microseconds of a call, as they were measured on an H200 with D = 128 (docs/kernels.md): what
# blocks take to begin and end beside their keys, what the launch that merges shares adds, what
# clusters that do, and what numbers of blocks have to differ by to be told apart.
_TURN_US = 4.0
_MERGE_US = 4.6
_CLUSTER_MERGE_US = 1.0
_EQUAL_US = 1.0
#: Bytes a microsecond of keys and values: of a whole device, by its multiprocessors, and what a
#: block streams alone, which is as much as two of them have.
_STREAM = 4500e3 / 132
_BLOCK_STREAM = 65e3
#: What a block of a cluster streams, which has all of its multiprocessor's memory.
_CLUSTER_BLOCK_STREAM = 67.5e3
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
        "two blocks have 128 KB under way, one alone 64 KB; 2 stages are as fast with two blocks, "
        "27 % slower with one",
        DecodeTile(4, 32, 128, 128, 3, True, 1),
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
    would see: shares of the keys, and with them every bit, are the same. Of sequences those of mean
    length must fit, and shares are of all keys that a sequence has.
    """
    room = ROWS // max(1, problem.mean_tq)
    shared = [
        axis
        for axis, size in enumerate(problem.batch_shape)
        if size > 1 and problem.k.strides[axis] == problem.v.strides[axis] == 0
    ]
    if room < 2 or not shared:
        return Packing()
    axis = max(shared, key=lambda axis: problem.batch_shape[axis])
    size = problem.batch_shape[axis]
    return Packing(axis, size, -(-size // -(-size // room)))


def decode_choice(problem: AttentionProblem, limits: DeviceLimits) -> DecodeChoice | None:
    """Return the row for the problem on the device, None if there is none."""
    return None if problem.mean_tq > ROWS else _first_choice(problem.d, problem.dv, limits)


def _first_choice(features: int, values: int, limits: DeviceLimits) -> DecodeChoice | None:
    """Return the first row that has room for so many columns and fits the device."""
    fitting = [
        choice
        for choice in DECODE_TILES
        if features <= choice.features
        and values <= choice.values
        and _block_bytes(choice.tile) <= limits.shared_per_block
    ]
    for choice in fitting:
        if choice.tile.blocks * _block_bytes(choice.tile) <= limits.shared_per_sm:
            return choice
    return min(fitting, key=lambda choice: choice.tile.shared_bytes, default=None)


def _block_bytes(tile: DecodeTile) -> int:
    return tile.shared_bytes + _RESERVED_SHARED


def decode_shares(
    problem: AttentionProblem, packed: Packing, choice: DecodeChoice, limits: DeviceLimits
) -> Shares:
    """Return the shares of a problem's keys; of sequences end to end, for those of mean length."""
    sequences = max(1, problem.sequences or 1)
    groups = math.prod(problem.batch_shape) // packed.size * sequences
    blocks = groups * packed.tiles * -(-problem.mean_tq // packed.queries)
    return shares_of(blocks, -(-problem.tk // sequences), choice, limits)


def shares_of(blocks: int, keys: int, choice: DecodeChoice, limits: DeviceLimits) -> Shares:
    """Return the shares of so many keys, given the blocks without shares.

    The fastest by a model: blocks run in turns of as many as there are places for, a turn takes its
    bytes over the rate of the device, or of a block if those are few, and shares take a merge.
    """
    blocks, tile = max(1, blocks), choice.tile

    def turn(running: Any, share: Any, stream: float) -> Any:
        """Return the time of blocks that run at once, each with a share of bytes."""
        device = running * share / (_STREAM * limits.multiprocessors)
        return _TURN_US + np.maximum(device, share / stream)

    tiles = -(-keys // tile.keys)
    splits = np.arange(1, max(1, min(tiles // _SHARE_TILES, _MOST_SHARES)) + 1)
    share = -(-tiles // splits) * tile.key_bytes
    places = tile.blocks * limits.multiprocessors
    turns, left = np.divmod(blocks * splits, places)
    whole, rest = turn(places, share, _BLOCK_STREAM), turn(left, share, _BLOCK_STREAM)
    time = turns * whole + (left > 0) * rest + _MERGE_US * (splits > 1)
    # Of equal ones the most: blocks of several multiprocessors even out.
    most = int(splits[time <= time.min() + _EQUAL_US][-1])
    best, found = (time[0], Shares(1)) if time[0] <= time.min() else (time[most - 1], Shares(most))
    clustered = choice.clustered
    if clustered is None or _block_bytes(clustered) > limits.shared_per_block:
        return found
    tiles = -(-keys // clustered.keys)
    for count in CLUSTER_SHARES:
        if blocks <= clusters(count, limits) and tiles >= count * _CLUSTER_TILES:
            streamed = -(-tiles // count) * clustered.key_bytes
            taken = turn(blocks * count, streamed, _CLUSTER_BLOCK_STREAM) + _CLUSTER_MERGE_US
            if taken < best:
                best, found = taken, Shares(count, clustered)
    return found


def clusters(blocks: int, limits: DeviceLimits) -> int:
    """Return how many clusters run at once, of blocks that take a multiprocessor each.

    Multiprocessors come in pairs, of which no two blocks leave one over, and these in groups, of
    which a cluster takes what it has: 66, 30, 15 and 7 clusters of 2, 4, 8 and 16 blocks run on the
    132 multiprocessors of an H200. What groups leave over is taken for an eleventh of all.
    """
    if blocks > limits.cluster_blocks:
        return 0
    left = limits.multiprocessors // 11 if blocks > 2 else 0
    return (limits.multiprocessors - left) // blocks


def decode_mma(dtype: np.dtype, score: str, tile: DecodeTile, cluster: int = 1) -> KernelName:
    """Name the kernel for a dtype, a tile and the least score pipeline that serves a call.

    Clusters of more than one block merge the shares of their blocks.
    """
    score = "FullScore" if has_options(score) else "RangedScore"
    arguments = f"{C_TYPES[dtype.name]}, cuflash::{score}<float>, {tile.expression}"
    name = "decode_mma" if cluster == 1 else "decode_mma_cluster"
    more = "" if cluster == 1 else f", {cluster}"
    return KernelName("attention/decode_mma.cu", f"cuflash::{name}<{arguments}{more}>")


def has_options(score: str) -> bool:
    """Tell whether a pipeline changes scores, or hides them by more than bounds."""
    return score not in ("PlainScore", "RangedScore")


def decode_kernels(dtype: np.dtype, limits: DeviceLimits | None = None) -> Iterator[KernelName]:
    """Yield every kernel for q, k, v of this dtype, of a device or of all.

    Of pipelines there are two: bounds cost nothing where all rows see all of a slice, and options
    hide behind memory. Clusters have the first alone, as few calls have the other.
    """
    for choice in DECODE_TILES:
        if limits and _first_choice(choice.features, choice.values, limits) is not choice:
            continue
        for score in ("RangedScore", "FullScore"):
            yield decode_mma(dtype, score, choice.tile)
        if choice.clustered is None or (limits and limits.cluster_blocks == 1):
            continue
        for cluster in CLUSTER_SHARES:
            yield decode_mma(dtype, "RangedScore", choice.clustered, cluster)
