"""The tiles of `forward_tf32`, float32 attention on tensor cores, as data, with their reasons."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from ..problem import AttentionProblem
from .compiler import KernelName
from .executor import DeviceLimits
from .tile_tables import TileChoice, TileTable

#: Compute capabilities whose tensor cores multiply TF32 more than three times as fast as vector
#: units multiply float32: there three products for one are faster. On others (sm_86, 89, 120) they
#: are as fast, or twice.
TF32_CAPABILITIES = ("80", "90", "100", "103")
SCORES = ("PlainScore", "RangedScore", "FullScore")


@dataclass(frozen=True, slots=True)
class Tf32Tile:
    """The tile of `forward_tf32`, `Tf32Tile` in the kernel.

    A warp owns `row_tiles` times 16 query rows, a block `warps` warps, `keys` keys at a time and
    `values` columns of v. `features` is the width that D is padded to.
    """

    row_tiles: int
    warps: int
    keys: int
    features: int
    values: int
    blocks: int

    def __post_init__(self) -> None:
        """Refuse what the kernel cannot be compiled for."""
        if not 3 <= self.warps <= 32:
            raise ValueError(f"warps must lie in 3..32, got {self.warps}")
        for name in ("row_tiles", "blocks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.keys < 16 or self.keys % 16 or self.keys * self.row_tiles > 128:
            raise ValueError(
                f"keys must be a multiple of 16 in 16..{128 // self.row_tiles}, got {self.keys}"
            )
        for name in ("features", "values"):
            size = getattr(self, name)
            if size < 32 or size % 32:
                raise ValueError(f"{name} must be a positive multiple of 32, got {size}")
            # Rows that threads copy at a time, as `ChunkCopies` numbers them.
            step, rest = divmod(128 * self.warps, size)
            if rest or step & (step - 1) or self.keys % step:
                raise ValueError(
                    f"{self.warps} warps cannot copy rows of {size} {name} in equal parts"
                )

    @property
    def queries(self) -> int:
        """Query rows of a block."""
        return 16 * self.row_tiles * self.warps

    @property
    def expression(self) -> str:
        """The tile as a C++ type."""
        numbers = (
            self.row_tiles, self.warps, self.keys, self.features, self.values, self.blocks,
        )  # fmt: skip
        return f"cuflash::Tf32Tile<{', '.join(map(str, numbers))}>"

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        return 4 * (self.queries * self.features + 2 * self.keys * (self.features + self.values))


#: Columns of v past the tile's are further blocks, which compute the same scores.
TF32_TILES = (
    TileChoice(
        64, 64, Tf32Tile(2, 4, 32, 64, 64, 2),
        "32 rows a warp: the parts of keys and values serve two products",
    ),
    TileChoice(
        128, math.inf, Tf32Tile(1, 8, 32, 128, 128, 1),
        "sums of 128 columns leave registers for 16 rows a warp",
    ),
)  # fmt: skip
#: Shared memory of a block that is not dynamic: `BlockWork` and what else all its threads know.
_STATIC_SHARED = 6144
_TABLE = TileTable(TF32_TILES, lambda tile: tile.shared_bytes + _STATIC_SHARED)


def tf32_obstacle(problem: AttentionProblem, limits: DeviceLimits) -> str | None:
    """Return why TF32 tensor cores cannot run this problem on a device; None if they can."""
    if int(limits.compute_capability) < 80:
        return "needs compute capability 8.0 for float32"
    return _TABLE.obstacle(problem, limits)


def is_tf32_faster(limits: DeviceLimits) -> bool:
    """Tell whether three TF32 products are faster than one in float32 on a device."""
    return limits.compute_capability in TF32_CAPABILITIES


def tf32_tile(problem: AttentionProblem, limits: DeviceLimits) -> Tf32Tile:
    """Return the first tile of the table that fits the problem and the device."""
    return _TABLE.tile_of(problem, limits)


def forward_tf32(score: str, tile: Tf32Tile) -> KernelName:
    """Name the kernel for a score pipeline and a tile."""
    return KernelName(
        "attention/forward_tf32.cu",
        f"cuflash::forward_tf32<cuflash::{score}<float>, {tile.expression}>",
    )


def tf32_kernels() -> Iterator[KernelName]:
    """Yield every kernel that a plan for q, k, v in float32 can launch on tensor cores."""
    for tile, score in product(_TABLE.tiles(), SCORES):
        yield forward_tf32(score, tile)
