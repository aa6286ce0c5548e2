"""The tiles of `backward_tf32`, gradients in float32 on tensor cores, as data, with reasons."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from ..problem import AttentionProblem
from .attention_vjp_plans_pairs import PairsFamily, needed_bytes
from .executor import DeviceLimits
from .tile_tables import TileChoice, TileTable


@dataclass(frozen=True, slots=True)
class Tf32VjpTile:
    """The tile of `backward_tf32`, `Tf32VjpTile` in the kernel.

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
        if self.row_tiles not in (1, 2):
            raise ValueError(f"row_tiles must be 1 or 2, got {self.row_tiles}")
        if self.met not in (16, 32, 64, 128):
            raise ValueError(f"met must be a power of 2 in 16..128, got {self.met}")
        if self.width < 64 or self.width % 64:
            raise ValueError(f"width must be a positive multiple of 64, got {self.width}")
        if self.blocks < 1:
            raise ValueError(f"blocks must be positive, got {self.blocks}")
        # Warps share 32 columns each of dq, and own keys by whole pairs of warps.
        if 64 * self.pairs % self.width:
            raise ValueError(f"{self.pairs} pairs of warps cannot share {self.width} columns")
        # Rows that threads copy at a time, as `ChunkCopies` numbers them.
        step, rest = divmod(4 * self.threads, self.width)
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
        return f"cuflash::Tf32VjpTile<{', '.join(map(str, numbers))}>"

    def shared_bytes(self, *, handed: int) -> int:
        """Return the dynamic shared memory of a block whose warps hand over so many tiles."""
        pairs = handed * self.own * self.met
        return 4 * (2 * (self.own + 2 * self.met) * self.width + pairs)


TF32_VJP_TILES = (
    TileChoice(
        64, 64, Tf32VjpTile(2, 2, 32, 64, 2),
        "32 rows a warp: the parts of what they meet serve two products; two blocks, so that one "
        "multiplies while the other weighs: 44.8 against 40.8 TFLOP/s of one with four pairs, 39.9 "
        "of three with 16 rows a warp",
    ),
    TileChoice(
        128, 128, Tf32VjpTile(2, 1, 32, 128, 2),
        "with 32 rows sums of dk, or dv, would take 128 registers; two blocks as above, 43.4 "
        "against 39.2",
    ),
)  # fmt: skip
TF32_VJP = PairsFamily(
    "backward_tf32", "float", TileTable(TF32_VJP_TILES, partial(needed_bytes, itemsize=4))
)


def tf32_vjp_obstacle(problem: AttentionProblem, limits: DeviceLimits) -> str | None:
    """Return why TF32 tensor cores cannot compute these gradients; None if they can."""
    if int(limits.compute_capability) < 80:
        return "needs compute capability 8.0 for float32"
    return TF32_VJP.table.obstacle(problem, limits)
