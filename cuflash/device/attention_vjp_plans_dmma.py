"""The tiles of `backward_dmma`, gradients on float64 tensor cores, as data with their reasons."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ..problem import AttentionProblem
from .attention_plans_dmma import DMMA_CAPABILITIES
from .attention_vjp_stages import Sweep
from .compiler import KernelName
from .executor import DeviceLimits

#: Score pipelines: bounds cost nothing where there are none.
DMMA_VJP_SCORES = ("RangedScore", "FullScore")


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

    def shared_bytes(self, *, of_keys: bool) -> int:
        """Return the dynamic shared memory of a block."""
        handed = self.own * self.met * (1 if of_keys else 2)
        return 8 * (2 * (self.own + 2 * self.met) * self.width + handed)


class DmmaVjpChoice(NamedTuple):
    """A row of the table: the widest heads that take the tile."""

    width: int
    tile: DmmaVjpTile
    reason: str


#: The first row that fits a problem, and a block's shared memory, is taken.
DMMA_VJP_TILES = (
    DmmaVjpChoice(
        64, DmmaVjpTile(4, 1, 32, 64, 1),
        "two products of a tile add to a sum at a time; with 32 rows a pair of warps, which read "
        "shared memory less often, sums spill",
    ),
    DmmaVjpChoice(
        128, DmmaVjpTile(4, 1, 16, 128, 1),
        "sums of dk, or dv, take 128 registers; 64 rows leave room for two tiles of 16",
    ),
    DmmaVjpChoice(
        128, DmmaVjpTile(2, 1, 16, 128, 1), "as above, in the 163 KB of a block of sm_80",
    ),
)  # fmt: skip


def _needed_bytes(tile: DmmaVjpTile, *, of_keys: bool) -> int:
    """Return the most shared memory of a block, with `VjpWork` and what is known of its rows."""
    queries = 128 if of_keys else tile.own
    return tile.shared_bytes(of_keys=of_keys) + 640 + 32 * queries + tile.own


def _tile(width: int, limits: DeviceLimits) -> DmmaVjpTile | None:
    """Return the first tile of the table for such heads that fits the device, if one does."""
    for choice in DMMA_VJP_TILES:
        needed = max(_needed_bytes(choice.tile, of_keys=of_keys) for of_keys in (True, False))
        if width <= choice.width and needed <= limits.shared_per_block:
            return choice.tile
    return None


def dmma_vjp_obstacle(problem: AttentionProblem, limits: DeviceLimits) -> str | None:
    """Return why float64 tensor cores cannot compute these gradients; None if they can."""
    if limits.compute_capability not in DMMA_CAPABILITIES:
        return "needs tensor cores that multiply float64 faster than simt (sm_80, sm_90)"
    if _tile(max(problem.d, problem.dv), limits) is None:
        most = DMMA_VJP_TILES[-1].width
        return f"has gradients in float64 up to {most} features, given shared memory for them"
    return None


def _backward_dmma(score: str, tile: DmmaVjpTile, *, of_keys: bool) -> KernelName:
    arguments = (f"cuflash::{score}<double>", tile.expression, str(of_keys).lower())
    return KernelName(
        "attention/backward_dmma.cu", f"cuflash::backward_dmma<{', '.join(arguments)}>"
    )


def dmma_sweep(
    problem: AttentionProblem, score: str, limits: DeviceLimits, *, of_keys: bool
) -> Sweep:
    """Return the kernel that fills dk and dv, or dq, given the least pipeline for the options."""
    tile = _tile(max(problem.d, problem.dv), limits)
    if tile is None:
        raise ValueError("no tile fits: see dmma_vjp_obstacle")
    tokens = problem.tk if of_keys else problem.tq
    return Sweep(
        _backward_dmma("RangedScore" if score != "FullScore" else score, tile, of_keys=of_keys),
        threads=tile.threads,
        shared_bytes=tile.shared_bytes(of_keys=of_keys),
        # Of sequences end to end the last tile may be a part: there is one more for each.
        row_tiles=-(-tokens // tile.own) + (problem.sequences or 0),
    )


def dmma_vjp_kernels(limits: DeviceLimits | None = None) -> Iterator[KernelName]:
    """Yield every kernel that a plan for gradients of q, k, v in float64 can launch.

    With `limits`, those that it can launch on such a device.
    """
    tiles = [choice.tile for choice in DMMA_VJP_TILES]
    if limits is not None:
        tiles = [x for x in tiles if _tile(x.width, limits) == x]
    for tile in tiles:
        for score in DMMA_VJP_SCORES:
            for of_keys in (True, False):
                yield _backward_dmma(score, tile, of_keys=of_keys)
