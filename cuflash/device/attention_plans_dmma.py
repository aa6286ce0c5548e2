"""The tiles of `forward_dmma`, attention on float64 tensor cores, as data, with their reasons."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from ..problem import AttentionProblem
from .compiler import KernelName
from .executor import DeviceLimits
from .tile_tables import TileChoice, TileTable

#: Compute capabilities whose tensor cores multiply float64 faster than vector units do, twice as
#: fast. Others have few float64 units, or tensor cores that are no faster.
DMMA_CAPABILITIES = ("80", "90")
SCORES = ("PlainScore", "RangedScore", "FullScore")


@dataclass(frozen=True, slots=True)
class DmmaTile:
    """The tile of `forward_dmma`, `DmmaTile` in the kernel.

    A warp owns 16 query rows, a block `warps` warps, `keys` keys at a time and `values` columns of
    v. `features` is the width that D is padded to. With `queries_held` a warp keeps its queries in
    registers, else it reads them again for each tile of keys.
    """

    warps: int
    keys: int
    features: int
    values: int
    queries_held: bool
    blocks: int

    def __post_init__(self) -> None:
        """Refuse what the kernel cannot be compiled for."""
        if not 3 <= self.warps <= 32:
            raise ValueError(f"warps must lie in 3..32, got {self.warps}")
        if self.keys < 16 or self.keys % 16 or self.keys > 128:
            raise ValueError(f"keys must be a multiple of 16 in 16..128, got {self.keys}")
        for name in ("features", "values"):
            size = getattr(self, name)
            if size < 32 or size % 32:
                raise ValueError(f"{name} must be a positive multiple of 32, got {size}")
            # Rows that threads copy at a time, as `DoubleCopies` numbers them.
            step, rest = divmod(64 * self.warps, size)
            if rest or step & (step - 1) or self.keys % step:
                raise ValueError(
                    f"{self.warps} warps cannot copy rows of {size} {name} in equal parts"
                )
        if self.blocks < 1:
            raise ValueError(f"blocks must be positive, got {self.blocks}")

    @property
    def queries(self) -> int:
        """Query rows of a block."""
        return 16 * self.warps

    @property
    def expression(self) -> str:
        """The tile as a C++ type."""
        numbers = (self.warps, self.keys, self.features, self.values)
        held = str(self.queries_held).lower()
        return f"cuflash::DmmaTile<{', '.join(map(str, numbers))}, {held}, {self.blocks}>"

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        queries = 0 if self.queries_held else self.queries * self.features
        aside = 3 * self.queries  # of each row, what there is of groups of keys besides out
        return 8 * (queries + 2 * self.keys * (self.features + self.values) + aside)


#: Columns of v past the tile's are further blocks, which compute the same scores.
DMMA_TILES = (
    TileChoice(
        32, 32, DmmaTile(4, 32, 32, 32, True, 2),
        "queries and sums take 32 registers each",
    ),
    TileChoice(
        64, 64, DmmaTile(4, 32, 64, 64, False, 2),
        "queries in registers would leave too few to read ahead; two blocks, so that one "
        "multiplies while the other weighs",
    ),
    TileChoice(
        128, math.inf, DmmaTile(8, 16, 128, 128, False, 1),
        "sums take 128 registers; 16 keys leave room for 128 queries in shared memory",
    ),
    TileChoice(
        128, math.inf, DmmaTile(4, 16, 128, 128, False, 1),
        "sums take 128 registers; 64 queries and two tiles of 16 keys fit the 163 KB of sm_80",
    ),
    TileChoice(
        256, math.inf, DmmaTile(4, 16, 256, 128, False, 1),
        "64 queries and two tiles of keys and values fill shared memory; sums of more columns of v "
        "would not fit in registers",
    ),
)  # fmt: skip
#: Shared memory of a block that is not dynamic: `BlockWork` and what else all its threads know.
_STATIC_SHARED = 1536
_TABLE = TileTable(DMMA_TILES, lambda tile: tile.shared_bytes + _STATIC_SHARED)


def dmma_obstacle(problem: AttentionProblem, limits: DeviceLimits) -> str | None:
    """Return why float64 tensor cores cannot run this problem on a device; None if they can."""
    if limits.compute_capability not in DMMA_CAPABILITIES:
        return "needs tensor cores that multiply float64 faster than simt (sm_80, sm_90)"
    return _TABLE.obstacle(problem, limits)


def dmma_tile(problem: AttentionProblem, limits: DeviceLimits) -> DmmaTile:
    """Return the first tile of the table that fits the problem and the device."""
    return _TABLE.tile_of(problem, limits)


def forward_dmma(score: str, tile: DmmaTile) -> KernelName:
    """Name the kernel for a score pipeline and a tile."""
    return KernelName(
        "attention/forward_dmma.cu",
        f"cuflash::forward_dmma<cuflash::{score}<double>, {tile.expression}>",
    )


def dmma_kernels() -> Iterator[KernelName]:
    """Yield every kernel that a plan for q, k, v in float64 can launch."""
    for tile, score in product(_TABLE.tiles(), SCORES):
        yield forward_dmma(score, tile)
