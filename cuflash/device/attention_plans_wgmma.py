"""The tiles of `forward_wgmma`, attention on the tensor cores of Hopper, as data with reasons."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from ..problem import ArraySpec, AttentionProblem
from .attention_plans_mma import BOUNDS, SINGLE_STEPS, WIDEST, mma_score, steps_of
from .compiler import C_TYPES, KernelName, ParameterBlock
from .executor import DeviceLimits
from .parameters import ATTENTION_PARAMETERS, BatchPlan
from .tensor_map import ALIGNMENT, AXES, TensorMap, encode

#: A struct of maps begins, and ends, at a multiple of this.
STRUCT_ALIGNMENT = 64
#: 8-byte words of a map.
MAP_WORDS = 16
#: Operands that have a map, in the order of the parameter block, and where they are among the
#: pointers of a plan.
_MAPPED = ("q", "k", "v", "out")
#: Options that have an element for each pair.
READ_BY_CHUNKS = ("mask", "bias")


def mapped_block(c_name: str, maps: Sequence[str], fields: dict[str, Any]) -> ParameterBlock:
    """Declare a struct of tensor maps and other members."""
    members: dict[str, Any] = {**{name: (np.int64, (MAP_WORDS,)) for name in maps}, **fields}
    size = ParameterBlock("", members).dtype.itemsize
    if size % STRUCT_ALIGNMENT:
        padding = (STRUCT_ALIGNMENT - size % STRUCT_ALIGNMENT) // 8
        members["padding"] = (np.int64, (padding,))
    return ParameterBlock(c_name, members)


WGMMA_PARAMETERS = mapped_block(
    "cuflash::WgmmaParameters",
    _MAPPED,
    {"attention": ATTENTION_PARAMETERS, "tiles": np.int64, "out_by_map": np.int32},
)

#: Keys of a tile, by its width, for which `lib/ptx_wgmma.cuh` has the products.
_KEYS_BY_WIDTH = {64: (64, 128), 128: (64, 128), 256: (64,)}
#: Most shared memory of a block of Hopper.
SHARED_BYTES = 227 << 10


@dataclass(frozen=True, slots=True)
class WgmmaTile:
    """The tile of `forward_wgmma`, `WgmmaTile` in the kernel.

    A block has `groups` warpgroups of 64 query rows and takes `keys` keys at a time; `width` is
    what D and Dv are padded to. `stages` are tiles of keys and of values under way, `query_stages`
    warpgroups' queries: with more than `groups`, those of the next tile come ahead of time. With
    `turns` one warpgroup starts its products while the others have their softmax; with `topless`
    whole tiles go without a maximum.
    """

    groups: int
    keys: int
    width: int
    stages: int
    query_stages: int
    turns: bool
    topless: bool

    def __post_init__(self) -> None:
        """Refuse what the kernel cannot be compiled for, or no multiprocessor has room for."""
        if not 2 <= self.groups <= 4:
            raise ValueError(f"groups must lie in 2..4, got {self.groups}")
        if self.width not in _KEYS_BY_WIDTH:
            raise ValueError(f"width must be one of {[*_KEYS_BY_WIDTH]}, got {self.width}")
        if self.keys not in _KEYS_BY_WIDTH[self.width]:
            raise ValueError(
                f"keys must be one of {[*_KEYS_BY_WIDTH[self.width]]} at width {self.width}, "
                f"got {self.keys}"
            )
        for name, least in (("stages", 1), ("query_stages", self.groups)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if self.shared_bytes > SHARED_BYTES:
            raise ValueError(
                f"a block needs {self.shared_bytes} bytes of shared memory; "
                f"there are {SHARED_BYTES}"
            )

    @property
    def queries(self) -> int:
        """Query rows of a block."""
        return 64 * self.groups

    @property
    def values(self) -> int:
        """Columns of v and out of a block."""
        return self.width

    @property
    def threads(self) -> int:
        """Threads of a block: the producer's warpgroup too."""
        return 128 * (self.groups + 1)

    @property
    def expression(self) -> str:
        """The tile as a C++ type."""
        numbers = (self.groups, self.keys, self.width, self.stages, self.query_stages)
        flags = (str(flag).lower() for flag in (self.turns, self.topless))
        return f"cuflash::WgmmaTile<{', '.join([*map(str, numbers), *flags])}>"

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block: tiles, then slots and barriers."""
        out = self.queries * min(self.width, _OUT_COLUMNS)
        rows = 64 * self.query_stages + 2 * self.stages * self.keys
        return 2 * (self.width * rows + out) + _SLOT_BYTES


#: Columns of results that are in shared memory at a time.
_OUT_COLUMNS = 128
#: Room for 4 slots, the barriers and the list of tiles that are taken again.
_SLOT_BYTES = 2816


class WgmmaChoice(NamedTuple):
    """A row of the table: the widest heads, and the queries, that take the tile.

    Queries are `least` or more and fewer than `below`; with `diagonal` only where bounds follow the
    query's position (causal, window). `rejected` are neighbours that were slower. `steps` are the
    options that change the scores of the tile, one at a time.
    """

    width: int
    least: int
    below: float
    diagonal: bool
    tile: WgmmaTile
    reason: str
    rejected: tuple[WgmmaTile, ...]
    steps: tuple[str, ...] = ()


# Figures are rates over cuDNN's at T = 512, 2048 and 8192.
_D64 = WgmmaTile(4, 64, 64, 4, 8, True, True)
_D64_APART = WgmmaTile(4, 64, 64, 6, 8, False, True)
_D64_SMALL = WgmmaTile(2, 128, 64, 3, 4, True, True)
_D64_THREE = WgmmaTile(3, 64, 64, 6, 6, False, True)
_D128 = WgmmaTile(2, 128, 128, 2, 4, True, True)
_D128_EXACT = replace(_D128, topless=False)
_D256 = WgmmaTile(2, 64, 256, 2, 2, True, True)
_D256_EXACT = replace(_D256, topless=False)

#: The first row that fits a problem is taken.
WGMMA_TILES = (
    WgmmaChoice(
        64, 512, math.inf, True, _D64_APART,
        "under a diagonal warpgroups have different keys: without turns and with six stages they"
        " may be three tiles apart. Causal 1.08, 1.18, 1.21; with turns and four stages 0.85, 1.06,"
        " 1.17; three warpgroups 0.64, 0.88, 0.89",
        (_D64, replace(_D64, turns=False), _D64_THREE),
    ),
    WgmmaChoice(
        64, 512, math.inf, False, _D64,
        "at 64 columns the exponentials of a tile take as long as its products: the more"
        " warpgroups, the more of them run beside products. 1.00, 1.15, 1.22; without turns 1.04,"
        " 1.12, 1.19; three warpgroups 0.69, 0.88, 0.93",
        (replace(_D64, turns=False), _D64_APART, _D64_THREE),
    ),
    WgmmaChoice(
        64, 0, math.inf, False, _D64_SMALL,
        "few queries fill tiles of 128 rows better than of 256",
        (_D64,),
    ),
    WgmmaChoice(
        128, 0, 1024, True, _D128_EXACT,
        "in the few whole tiles that a diagonal leaves, three of five of a pair, to look for the"
        " maximum is cheaper than to find late that one was higher. Causal at T = 512 1.00, without"
        " the maximum 0.93; at 2048 1.20, then 1.25; without turns 0.97",
        (_D128, replace(_D128_EXACT, turns=False)),
    ),
    WgmmaChoice(
        128, 0, math.inf, False, _D128,
        "the largest tile of keys that leaves two stages. 1.01, 1.14, 1.18, causal 0.90, 1.22,"
        " 1.19; without turns 0.97, 1.12, 1.15 and 0.86, 1.18, 1.17; three warpgroups with 64 keys"
        " 0.73, 0.92, 1.00 and 0.71, 0.95, 0.90; two with 64, no turns, 0.94, 1.02, 1.04 and 0.88,"
        " 1.08, 1.11",
        (
            replace(_D128, turns=False),
            WgmmaTile(2, 64, 128, 4, 4, False, True),
            WgmmaTile(3, 64, 128, 3, 5, False, True),
        ),
    ),
    WgmmaChoice(
        256, 0, 4096, True, _D256_EXACT,
        "64 keys leave room for results on their way out. In the few whole tiles that a diagonal"
        " leaves, to look for the maximum is cheaper than to find late that one was higher: causal"
        " 1.01, 1.20, then 1.16; without the maximum 0.89, 1.17, then 1.19; without turns 0.98,"
        " 1.20",
        (_D256, replace(_D256_EXACT, turns=False)),
    ),
    WgmmaChoice(
        256, 0, math.inf, False, _D256,
        "64 keys leave room for results on their way out. 1.02, 1.14, 1.17; with the maximum 0.97,"
        " 1.08, 1.14; with queries of the next tile ahead of time, and results that leave from"
        " registers, 0.88, 1.07, 1.15",
        (_D256_EXACT, replace(_D256_EXACT, turns=False)),
    ),
)  # fmt: skip

_STEPS = tuple(SINGLE_STEPS)
#: The same for scores that an option changes: such tiles look for their maximum, all of them.
WGMMA_STEP_TILES = (
    WgmmaChoice(
        64, 0, math.inf, False, replace(_D64_SMALL, topless=False),
        "224 registers a thread: the float32 bias of a tile waits there while products run. Time"
        " over the plain call at T = 4096 2.46; three warpgroups 2.43, at 512 1.94 and 2.72",
        (replace(_D64_THREE, topless=False),), ("bias",),
    ),
    WgmmaChoice(
        64, 0, math.inf, False, replace(_D64_APART, topless=False),
        "without turns and with six stages warpgroups may be three tiles apart. Time over the plain"
        " call of causal ALiBi at T = 512 1.21, with turns and four stages 1.38, two warpgroups"
        " 1.79; at 4096 without mask 1.46, 1.38, 1.58",
        (
            replace(_D64, topless=False), replace(_D64_SMALL, topless=False),
            replace(_D64_THREE, topless=False),
        ),
        ("softcap", "alibi_slopes", "mask"),
    ),
    WgmmaChoice(
        128, 0, math.inf, False, _D128_EXACT,
        "the largest tile of keys that leaves two stages. Time over the plain call with a random"
        " mask at T = 4096 1.46, without turns 1.64, two warpgroups with 64 keys half as much more",
        (
            replace(_D128_EXACT, turns=False),
            WgmmaTile(2, 64, 128, 4, 4, True, False),
        ),
        _STEPS,
    ),
    WgmmaChoice(
        256, 0, math.inf, False, _D256_EXACT,
        "64 keys leave room for results on their way out. Time over the plain call with a random"
        " mask at T = 4096 1.26, without turns 1.40",
        (replace(_D256_EXACT, turns=False),), _STEPS,
    ),
)  # fmt: skip
#: The smallest and largest softcap with which no step of tanh(s / cap) leaves float32.
_CAPS = (2.0**-60, 2.0**60)
#: 32-bit positions leave room for the rows of a tile: `Band` in lib/score.cuh, ends of sequences.
_MOST_TOKENS = 2**31 - 512
#: Fewer query rows leave most of a tile empty: `mma` has smaller ones.
_LEAST_QUERIES = 64


def wgmma_obstacle(problem: AttentionProblem, score: str, limits: DeviceLimits) -> str | None:
    """Return why Hopper's tensor cores cannot run this problem; None if they can."""
    obstacle = hopper_obstacle(problem, limits, WIDEST)
    if obstacle is not None:
        return obstacle
    if not (0 < problem.tk <= _MOST_TOKENS and problem.tq <= _MOST_TOKENS):
        return f"needs 1 to {_MOST_TOKENS} keys, and no more queries"
    if problem.mean_tq < _LEAST_QUERIES:
        return f"needs {_LEAST_QUERIES} queries: {problem.mean_tq} leave most of a tile empty"
    if wgmma_score(problem, score) is None:
        steps = steps_of(problem)
        if len(steps) > 1:
            return f"has no kernel for several options that change scores: {', '.join(steps)}"
        return f"needs a scale between 2^-64 and 2^64, not {problem.scale:g}"
    if problem.softcap is not None and not _CAPS[0] < problem.softcap < _CAPS[1]:
        return f"needs a softcap between 2^-60 and 2^60, not {problem.softcap:g}"
    if problem.bias is not None and problem.bias.dtype.itemsize > 4:
        return f"has no kernel for a bias of {problem.bias.dtype.name}"
    for name in READ_BY_CHUNKS:
        option = getattr(problem, name)
        reason = None if option is None else chunk_obstacle(option)
        if reason is not None:
            return f"cannot read {name} by 16 bytes: {reason}"
    return fetch_obstacle({name: getattr(problem, name) for name in ("q", "k", "v")})


def hopper_obstacle(problem: AttentionProblem, limits: DeviceLimits, widest: int) -> str | None:
    """Return what GPU, dtype and widths have against Hopper's tensor cores; None if nothing."""
    present = limits.compute_capability
    if present != "90":
        return f"needs compute capability 9.0, not {present[:-1]}.{present[-1]}"
    if problem.dtype.itemsize != 2:
        return f"needs float16 or bfloat16, not {problem.dtype.name}"
    if not (problem.d <= widest and 0 < problem.dv <= widest):
        wanted = f"needs at most {widest} features and 1 to {widest} columns of v"
        return f"{wanted}, not {problem.d} and {problem.dv}"
    return None


def fetch_obstacle(operands: Mapping[str, ArraySpec]) -> str | None:
    """Return which array TMA cannot read, and why; None if it can read all."""
    for name, spec in operands.items():
        reason = map_obstacle(spec)
        if reason is not None:
            return f"cannot fetch {name} by TMA: {reason}"
    return None


def map_obstacle(spec: ArraySpec) -> str | None:
    """Return why TMA cannot read an array: rows end to end, all else in steps of 16 bytes."""
    if 0 in spec.shape:
        return None
    if spec.strides[-1] != spec.dtype.itemsize:
        return f"its last axis is not contiguous, but has a stride of {spec.strides[-1]} bytes"
    for axis in range(-len(spec.shape), -1):
        stride = spec.strides[axis]
        if spec.shape[axis] == 1:
            continue
        if stride < 0:
            fault = "is negative"
        elif stride % ALIGNMENT:
            fault = f"is no multiple of {ALIGNMENT}"
        elif stride >= 2**40:
            fault = "is too large"
        else:
            continue
        return f"its axis {axis} has a stride of {stride} bytes, which {fault}"
    return None


def has_map(spec: ArraySpec) -> bool:
    """Tell whether TMA can read an array."""
    return map_obstacle(spec) is None


def chunk_obstacle(spec: ArraySpec) -> str | None:
    """Return why the rows of an array are not whole chunks of 16 bytes; None if they are."""
    row = spec.shape[-1] * spec.dtype.itemsize
    if row % ALIGNMENT:
        return f"its rows have {row} bytes, no multiple of {ALIGNMENT}"
    return map_obstacle(spec)


#: Why a problem without any other obstacle runs by `mma`: its plan finds no maps.
AXES_OBSTACLE = f"needs batch axes that merge into {AXES - 2}, with the strides of all operands"


def wgmma_score(problem: AttentionProblem, score: str) -> str | None:
    """Return the score pipeline, given the least one; None if there is no kernel for it."""
    score = mma_score(problem, score)
    return score if score in (*BOUNDS, *SINGLE_STEPS.values()) else None


def wgmma_choice(problem: AttentionProblem) -> WgmmaChoice:
    """Return the first row of the tables that fits the problem."""
    width, queries = max(problem.d, problem.dv), problem.mean_tq
    diagonal = problem.left is not None or problem.right is not None
    steps = steps_of(problem)
    return next(
        choice
        for choice in (WGMMA_STEP_TILES if steps else WGMMA_TILES)
        if width <= choice.width
        and choice.least <= queries < choice.below
        and (diagonal or not choice.diagonal)
        and all(name in choice.steps for name in steps)
    )


def wgmma_tile(problem: AttentionProblem) -> WgmmaTile:
    """Return the tile of that row."""
    return wgmma_choice(problem).tile


def forward_wgmma(dtype: np.dtype, score: str, tile: WgmmaTile) -> KernelName:
    """Name the kernel for a dtype, a score pipeline and a tile."""
    c_type = C_TYPES[dtype.name]
    return KernelName(
        "attention/forward_wgmma.cu",
        f"cuflash::forward_wgmma<{c_type}, cuflash::{score}<float>, {tile.expression}>",
    )


def wgmma_kernels(dtype: np.dtype) -> Iterator[KernelName]:
    """Yield every kernel that a plan for q, k, v of this dtype can launch."""
    if dtype.itemsize == 2:
        for choice in WGMMA_TILES:
            for score in BOUNDS[choice.diagonal :]:
                yield forward_wgmma(dtype, score, choice.tile)
        for choice in WGMMA_STEP_TILES:
            for name in choice.steps:
                yield forward_wgmma(dtype, SINGLE_STEPS[name], choice.tile)


class Maps(NamedTuple):
    """The tensor maps of a plan, and where their addresses are among its pointers.

    `others` are the places of operands without a map that are read in steps of 16 bytes, too.
    """

    tensors: tuple[TensorMap, ...]
    places: tuple[int, ...]
    others: tuple[int, ...] = ()

    def read(self, pointers: Sequence[int]) -> bool:
        """Tell whether the operands lie where they can be read so."""
        return not any(pointers[place] % ALIGNMENT for place in (*self.places, *self.others))

    def fill(self, block: np.ndarray, pointers: Sequence[int]) -> np.ndarray:
        """Write the maps of operands at these addresses into a parameter block; return it."""
        words = block.view(np.int64)
        for i, (tensor, place) in enumerate(zip(self.tensors, self.places, strict=True)):
            words[i * MAP_WORDS : (i + 1) * MAP_WORDS] = encode(tensor, pointers[place])
        return block


def plan_maps(
    problem: AttentionProblem,
    tile: WgmmaTile,
    axes: BatchPlan,
    out: ArraySpec | None,
    places: Sequence[int],
    others: Sequence[int] = (),
) -> Maps | None:
    """Return the maps of q, k, v and, unless None, out; None if there are too many batch axes.

    `axes` has the strides of all operands in the order of the plan's pointers, `places` the places
    of q, k, v and out among them, `others` those that `Maps` has beside them.
    """
    if len(axes.sizes) > AXES - 2 or axes.outer_sizes:
        return None
    tensors = []
    operands = [problem.q, problem.k, problem.v] + ([] if out is None else [out])
    rows = (64, tile.keys, tile.keys, 16)
    for spec, place, box_rows in zip(operands, places, rows, strict=False):
        tensors.append(map_of(spec, axes.sizes, axes.strides[place], box_rows))
    return Maps(tuple(tensors), tuple(places[: len(tensors)]), tuple(others))


def map_of(
    spec: ArraySpec, sizes: Sequence[int], strides: Sequence[int], box_rows: int
) -> TensorMap:
    """Return the map of an operand that takes these steps, in elements, along the batch axes."""
    itemsize = spec.dtype.itemsize
    batch = [(size, stride * itemsize) for size, stride in zip(sizes, strides, strict=True)]
    step = spec.strides[-2] if spec.shape[-2] > 1 else ALIGNMENT
    return TensorMap.of(spec.dtype, spec.shape[-1], spec.shape[-2], step, batch, box_rows)


def out_has_map(problem: AttentionProblem, out: ArraySpec, splits: int) -> bool:
    """Tell whether results can leave by TMA: whole rows, already rounded.

    Of sequences end to end that is so for tiles whose rows are all of one.
    """
    return splits == 1 and out.dtype == problem.dtype and has_map(out)
