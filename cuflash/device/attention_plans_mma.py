"""The tiles of `forward_mma`, attention on tensor cores, as data, each with its reason."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np

from ..problem import AttentionProblem
from .attention_plans_decode import decode_kernels
from .compiler import C_TYPES, KernelName
from .executor import DeviceLimits


@dataclass(frozen=True, slots=True)
class MmaTile:
    """The tile of `forward_mma`, `MmaTile` in the kernel.

    A warp owns `row_tiles` times 16 query rows, a block `warps` warps and `keys` keys at a time.
    `features` and `values` are the widths that D and Dv are padded to. With `queries_held` a warp
    keeps its queries in registers, else it reads them again for each tile of keys.
    """

    row_tiles: int
    warps: int
    keys: int
    features: int
    values: int
    queries_held: bool
    blocks: int

    def __post_init__(self) -> None:
        """Refuse what the kernel cannot be compiled for."""
        for name in ("keys", "features", "values"):
            size = getattr(self, name)
            if size < 16 or size % 16:
                raise ValueError(f"{name} must be a positive multiple of 16, got {size}")
        for name in ("row_tiles", "blocks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        for name, most in (("warps", 32), ("keys", 128)):
            if not 1 <= getattr(self, name) <= most:
                raise ValueError(f"{name} must lie in 1..{most}, got {getattr(self, name)}")
        for rows, columns in (("queries", "features"), ("keys", "features"), ("keys", "values")):
            # 16-byte chunks side by side that threads copy, as `SwizzledTile` permutes them.
            side_by_side = math.gcd(getattr(self, columns) // 8, 8)
            step = 32 * self.warps // side_by_side
            if step % 8 or getattr(self, rows) % step:
                raise ValueError(
                    f"{self.warps} warps copy {step} rows of {columns} at a time: not a multiple "
                    f"of 8 that divides {getattr(self, rows)} {rows}"
                )
        if 4 * self.queries * self.values > self.shared_bytes:
            raise ValueError(
                f"results of {self.queries} queries and {self.values} values, in float32, have no "
                f"room in {self.shared_bytes} bytes of shared memory"
            )

    @property
    def queries(self) -> int:
        """Query rows of a block."""
        return 16 * self.row_tiles * self.warps

    @property
    def expression(self) -> str:
        """The tile as a C++ type."""
        numbers = (self.row_tiles, self.warps, self.keys, self.features, self.values)
        held = str(self.queries_held).lower()
        return f"cuflash::MmaTile<{', '.join(map(str, numbers))}, {held}, {self.blocks}>"

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        return 2 * (self.queries * self.features + 2 * self.keys * (self.features + self.values))


class MmaChoice(NamedTuple):
    """A row of the table: the most queries, features and value columns that take the tile.

    `steps` tells whether scores may have steps, which need registers of their own. `rejected` are
    neighbours that it was preferred to.
    """

    queries: float
    features: int
    values: int
    steps: bool
    tile: MmaTile
    reason: str
    rejected: tuple[MmaTile, ...] = ()


#: The first row that fits a problem, and whose blocks a multiprocessor has room for, is taken.
MMA_TILES = (
    MmaChoice(
        math.inf, 32, 32, True, MmaTile(2, 4, 64, 32, 32, True, 2),
        "32 rows a warp: each fragment of keys and values read from shared memory serves two "
        "products",
    ),
    MmaChoice(
        1024, 64, 64, False, MmaTile(1, 4, 64, 64, 64, False, 4),
        "short rows wait for their first keys and for their results to leave: twice the blocks",
        (MmaTile(2, 4, 64, 64, 64, True, 2),),
    ),
    MmaChoice(
        math.inf, 64, 64, True, MmaTile(2, 4, 64, 64, 64, True, 2),
        "32 rows a warp: each fragment of keys and values read from shared memory serves two "
        "products; queries in registers are not read again for each tile of keys",
        (MmaTile(1, 4, 64, 64, 64, False, 4), MmaTile(2, 4, 64, 64, 64, False, 2)),
    ),
    MmaChoice(
        math.inf, 96, 96, False, MmaTile(2, 4, 64, 96, 96, False, 2),
        "the sums of 32 rows leave no registers to hold queries in",
    ),
    MmaChoice(
        math.inf, 96, 96, True, MmaTile(2, 4, 32, 96, 96, False, 2),
        "half the keys: registers for steps",
    ),
    MmaChoice(
        math.inf, 128, 128, False, MmaTile(2, 4, 64, 128, 128, False, 2),
        "the sums of 32 rows leave no registers to hold queries in",
        (MmaTile(2, 4, 32, 128, 128, False, 2), MmaTile(1, 8, 64, 128, 128, False, 1)),
    ),
    MmaChoice(
        math.inf, 128, 128, True, MmaTile(2, 4, 32, 128, 128, False, 2),
        "half the keys: registers for steps, and two blocks in 164 KB (sm_80)",
    ),
    MmaChoice(
        math.inf, 192, 128, True, MmaTile(2, 4, 32, 192, 128, False, 2),
        "32 keys leave room for two blocks, and registers for steps",
    ),
    MmaChoice(
        math.inf, 256, 256, True, MmaTile(1, 8, 64, 256, 256, False, 1),
        "16 rows a warp: their sums take 128 registers",
        (MmaTile(1, 4, 32, 256, 256, False, 1),),
    ),
    MmaChoice(
        math.inf, 256, 256, True, MmaTile(1, 4, 32, 256, 256, False, 1),
        "what fits in the 99 KB of sm_86 and sm_89",
    ),
)  # fmt: skip

#: The same for compute capability 7.5, float16 alone: two blocks, or one, in 64 KB.
SM75_TILES = (
    MmaChoice(
        math.inf, 32, 32, True, MmaTile(2, 4, 64, 32, 32, True, 2),
        "32 rows a warp: each fragment of keys and values read from shared memory serves two "
        "products",
    ),
    MmaChoice(
        math.inf, 64, 64, True, MmaTile(1, 4, 32, 64, 64, True, 2),
        "half the rows and keys: two blocks, of which one computes while the other's loads arrive",
    ),
    MmaChoice(
        math.inf, 128, 128, True, MmaTile(1, 4, 32, 128, 128, False, 1),
        "48 KB: one block; wider ones have no room for 32 keys, of whose masks a lane has 16 bytes",
    ),
)  # fmt: skip
#: From here on there are background copies, products of depth 16, and bfloat16.
_FULL_MATRICES = 80

#: Score pipelines without steps, and those with a single one, by the option that is the step.
BOUNDS = ("PlainScore", "RangedScore")
SINGLE_STEPS = {
    "softcap": "SoftcapScore",
    "bias": "BiasScore",
    "alibi_slopes": "AlibiScore",
    "mask": "MaskScore",
}
_STEPS = (*SINGLE_STEPS.values(), "FullScore")
#: Those that come after the scale, which is thus never folded into the exponent.
_SCALED_STEPS = ("softcap", "bias")
#: The widest heads there is a tile for.
WIDEST = 256
#: Shared memory of a block that is not its own dynamic one: 1 KB of the system, and `BlockWork`.
_RESERVED_SHARED = 2048
_FOLDABLE = (2.0**-64, 2.0**64)


def mma_obstacle(problem: AttentionProblem, limits: DeviceLimits) -> str | None:
    """Return why tensor cores cannot run this problem on a device; None if they can."""
    if problem.dtype.itemsize != 2:
        return f"needs float16 or bfloat16, not {problem.dtype.name}"
    if max(problem.d, problem.dv) > WIDEST:
        wanted = f"needs at most {WIDEST} features and columns of v"
        return f"{wanted}, not {problem.d} and {problem.dv}"
    if has_full_matrices(limits):
        return None
    widest = SM75_TILES[-1]
    if int(limits.compute_capability) < 75:
        return "needs compute capability 7.5"
    if problem.dtype != np.float16:
        return "needs compute capability 8.0 for bfloat16"
    if max(problem.d, problem.dv) > widest.features:
        return f"needs compute capability 8.0 for more than {widest.features} features"
    return None


def full_mma_obstacle(problem: AttentionProblem, limits: DeviceLimits) -> str | None:
    """Return the same for kernels that need the matrix instructions of sm_80."""
    obstacle = mma_obstacle(problem, limits)
    if obstacle is None and not has_full_matrices(limits):
        return "needs compute capability 8.0"
    return obstacle


def has_full_matrices(limits: DeviceLimits) -> bool:
    """Tell whether a device has the matrix instructions of sm_80, not those of sm_75 alone."""
    return int(limits.compute_capability) >= _FULL_MATRICES


def mma_score(problem: AttentionProblem, score: str) -> str:
    """Return the score pipeline, given the least of those that every family has."""
    steps = steps_of(problem)
    foldable = is_foldable(problem.scale)
    if len(steps) == 1 and (foldable or steps[0] in _SCALED_STEPS):
        return SINGLE_STEPS[steps[0]]
    return score if foldable else "FullScore"  # other scales are a step


def steps_of(problem: AttentionProblem) -> list[str]:
    """Return the options of a problem that change scores, or hide them one by one."""
    return [name for name in SINGLE_STEPS if getattr(problem, name) is not None]


def is_foldable(scale: float) -> bool:
    """Tell whether a scale can be folded into the base-2 exponent without overflow or loss."""
    least, most = _FOLDABLE
    return least <= scale <= most


def mma_choice(problem: AttentionProblem, score: str, limits: DeviceLimits) -> MmaChoice:
    """Return the first row of the table that fits the problem and the device."""
    fitting = [
        choice
        for choice in (MMA_TILES if has_full_matrices(limits) else SM75_TILES)
        if problem.mean_tq <= choice.queries
        and problem.d <= choice.features
        and problem.dv <= choice.values
        and (choice.steps or score in BOUNDS)
    ]
    for choice in fitting:
        needed = choice.tile.shared_bytes + _RESERVED_SHARED
        within = choice.tile.blocks * needed <= limits.shared_per_sm
        if within and needed <= limits.shared_per_block:
            return choice
    return min(fitting, key=lambda choice: choice.tile.shared_bytes)


def mma_tile(problem: AttentionProblem, score: str, limits: DeviceLimits) -> MmaTile:
    """Return the tile of that row."""
    return mma_choice(problem, score, limits).tile


def forward_mma(dtype: np.dtype, score: str, tile: MmaTile, *, full: bool = True) -> KernelName:
    """Name the kernel for a dtype, a score pipeline and a tile; `full` as `has_full_matrices`."""
    return KernelName(
        "attention/forward_mma.cu" if full else "attention/forward_mma_sm75.cu",
        f"cuflash::forward_mma<{C_TYPES[dtype.name]}, cuflash::{score}<float>, {tile.expression}>",
    )


def mma_kernels(dtype: np.dtype, limits: DeviceLimits | None = None) -> Iterator[KernelName]:
    """Yield every kernel that a plan for q, k, v of this dtype can launch, on a device or any."""
    if dtype.itemsize == 2:
        for choice in MMA_TILES:
            for score in BOUNDS + _STEPS * choice.steps:
                yield forward_mma(dtype, score, choice.tile)
        yield from decode_kernels(dtype, limits)


def sm75_kernels() -> Iterator[KernelName]:
    """Yield every kernel that a plan for compute capability 7.5 can launch on tensor cores."""
    for choice, score in product(SM75_TILES, BOUNDS + _STEPS):
        yield forward_mma(np.dtype(np.float16), score, choice.tile, full=False)
