"""The tiles of `backward_dmma`, gradients on float64 tensor cores, as data with their reasons."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from ..problem import AttentionProblem
from .attention_plans_dmma import DMMA_CAPABILITIES
from .attention_vjp_plans_pairs import PairsFamily, needed_bytes
from .executor import DeviceLimits
from .tile_tables import TileChoice, TileTable


@dataclass(frozen=True, slots=True)
class DmmaVjpTile:
    """The tile of `backward_dmma`, `DmmaVjpTile` in the kernel.

    A block owns `row_tiles` x 16 keys, or queries, for each of `pairs` pairs of warps, and meets
    `met` of the others at a time; `width` is what D and Dv are padded to.
    """

    pairs: int
    row_tiles: int
    met: int
    width: int
    blocks: int

    def __post_init__(self) -> None:
        """Refuse what the kernel cannot be compiled for."""
        if not 2 <= self.pairs <= 16:
            raise ValueError(f"pairs must lie in 2..16, got {self.pairs}")
        if self.row_tiles < 1 or self.blocks < 1:
            raise ValueError(f"row_tiles and blocks must be positive, got {self}")
        if self.met not in (16, 32, 64, 128):
            raise ValueError(f"met must be a power of 2 in 16..128, got {self.met}")
        if self.own > self.threads:
            raise ValueError(f"{self.threads} threads are too few for {self.own} rows")
        if self.width < 64 or self.width % 64:
            raise ValueError(f"width must be a positive multiple of 64, got {self.width}")
        # Rows that threads copy at a time, as `DoubleCopies` numbers them.
        step, rest = divmod(2 * self.threads, self.width)
        if rest or step & (step - 1) or self.met % step or self.own % step:
            raise ValueError(f"{self.threads} threads cannot copy rows of {self.width} evenly")

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 64 * self.pairs

    @property
    def own(self) -> int:
        """Rows that a block owns."""
        return 16 * self.row_tiles * self.pairs

    @property
    def expression(self) -> str:
        """The tile as a C++ type."""
        numbers = (self.pairs, self.row_tiles, self.met, self.width, self.blocks)
        return f"cuflash::DmmaVjpTile<{', '.join(map(str, numbers))}>"

    def shared_bytes(self, *, handed: int) -> int:
        """Return the dynamic shared memory of a block whose warps hand over so many tiles."""
        pairs = handed * self.own * self.met
        return 8 * (2 * (self.own + 2 * self.met) * self.width + pairs)


DMMA_VJP_TILES = (
    TileChoice(
        64, 64, DmmaVjpTile(4, 1, 32, 64, 1),
        "two products of a tile add to a sum at a time; with 32 rows a pair of warps, which read "
        "shared memory less often, sums spill",
    ),
    TileChoice(
        64, 64, DmmaVjpTile(4, 1, 16, 64, 1), "what fits in the 163 KB of a block of sm_80",
    ),
    TileChoice(
        128, 128, DmmaVjpTile(4, 1, 16, 128, 1),
        "sums of dk, or dv, take 128 registers; 64 rows leave room for two tiles of 16",
    ),
    TileChoice(
        128, 128, DmmaVjpTile(2, 1, 16, 128, 1), "as above, for sm_80",
    ),
)  # fmt: skip
DMMA_VJP = PairsFamily(
    "backward_dmma", "double", TileTable(DMMA_VJP_TILES, partial(needed_bytes, itemsize=8))
)


def dmma_vjp_obstacle(problem: AttentionProblem, limits: DeviceLimits) -> str | None:
    """Return why float64 tensor cores cannot compute these gradients; None if they can."""
    if limits.compute_capability not in DMMA_CAPABILITIES:
        return "needs tensor cores that multiply float64 faster than simt (sm_80, sm_90)"
    return DMMA_VJP.table.obstacle(problem, limits)
