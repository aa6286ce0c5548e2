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
        64, DmmaVjpTile(4, 1, 16, 64, 1), "what fits in the 163 KB of a block of sm_80",
    ),
    DmmaVjpChoice(
        128, DmmaVjpTile(4, 1, 16, 128, 1),
        "sums of dk, or dv, take 128 registers; 64 rows leave room for two tiles of 16",
    ),
    DmmaVjpChoice(
        128, DmmaVjpTile(2, 1, 16, 128, 1), "as above, for sm_80",
    ),
)  # fmt: skip


#: Rows of a block of the kernel that clears sums and makes dq of them, and its threads.
_SUM_ROWS, _SUM_THREADS = 32, 128


def _needed_bytes(tile: DmmaVjpTile) -> int:
    """Return the most shared memory of a block, with `VjpWork` and what is known of its rows."""
    # Looked up are 128 queries at a time, or those that the block owns.
    return tile.shared_bytes(of_keys=False) + 704 + 32 * 128 + tile.own


def _tile(width: int, limits: DeviceLimits) -> DmmaVjpTile | None:
    """Return the first tile of the table for such heads that fits the device, if one does."""
    for choice in DMMA_VJP_TILES:
        needed = _needed_bytes(choice.tile)
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


def _backward_dmma(
    score: str, tile: DmmaVjpTile, *, of_keys: bool, adds_queries: bool = False
) -> KernelName:
    flags = (str(flag).lower() for flag in (of_keys, adds_queries))
    arguments = (f"cuflash::{score}<double>", tile.expression, *flags)
    return _kernel(f"backward_dmma<{', '.join(arguments)}>")


def _kernel(expression: str) -> KernelName:
    return KernelName("attention/backward_dmma.cu", f"cuflash::{expression}")


def dmma_keys(
    problem: AttentionProblem, score: str, limits: DeviceLimits, *, adds_queries: bool = False
) -> Sweep:
    """Return the kernel that fills dk and dv, and adds to sums of dq."""
    return _sweep(problem, score, limits, problem.tk, of_keys=True, adds_queries=adds_queries)


def dmma_queries(problem: AttentionProblem, score: str, limits: DeviceLimits) -> Sweep:
    """Return the kernel that fills dq without atomic additions."""
    return _sweep(problem, score, limits, problem.tq, of_keys=False, adds_queries=False)


def _sweep(
    problem: AttentionProblem,
    score: str,
    limits: DeviceLimits,
    tokens: int,
    *,
    of_keys: bool,
    adds_queries: bool,
) -> Sweep:
    tile = _tile(max(problem.d, problem.dv), limits)
    if tile is None:
        raise ValueError("no tile fits: see dmma_vjp_obstacle")
    score = "RangedScore" if score != "FullScore" else score
    return Sweep(
        _backward_dmma(score, tile, of_keys=of_keys, adds_queries=adds_queries),
        threads=tile.threads,
        shared_bytes=tile.shared_bytes(of_keys=of_keys and not adds_queries),
        row_tiles=_row_tiles(problem, tokens, tile.own),
    )


def dmma_rows(problem: AttentionProblem, *, clears: bool) -> Sweep:
    """Return the kernel that clears sums of dq, or makes dq of them."""
    kernel = _kernel(f"backward_dmma_sums<{str(clears).lower()}>")
    return Sweep(kernel, _SUM_THREADS, 0, _row_tiles(problem, problem.tq, _SUM_ROWS))


def _row_tiles(problem: AttentionProblem, tokens: int, rows: int) -> int:
    """Return the tiles of an entry. Of sequences end to end the last may be a part of each."""
    return -(-tokens // rows) + (problem.sequences or 0)


def dmma_vjp_kernels(limits: DeviceLimits | None = None) -> Iterator[KernelName]:
    """Yield every kernel that a plan for gradients of q, k, v in float64 can launch.

    With `limits`, those that it can launch on such a device.
    """
    tiles = [choice.tile for choice in DMMA_VJP_TILES]
    if limits is not None:
        tiles = [x for x in tiles if _tile(x.width, limits) == x]
    for tile in tiles:
        for score in DMMA_VJP_SCORES:
            yield _backward_dmma(score, tile, of_keys=False)
            for adds_queries in (False, True):
                yield _backward_dmma(score, tile, of_keys=True, adds_queries=adds_queries)
    for clears in ("true", "false"):
        yield _kernel(f"backward_dmma_sums<{clears}>")
