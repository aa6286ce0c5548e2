"""The tiles of `backward_mma`, gradients of attention on tensor cores, as data with reasons."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from ..problem import ArraySpec, AttentionProblem
from .attention_plans_mma import MmaTile, full_mma_obstacle, is_foldable
from .attention_vjp_stages import Sweep, bias_tiles
from .compiler import C_TYPES, KernelName
from .executor import DeviceLimits


@dataclass(frozen=True, slots=True)
class KeysTile:
    """The tile of `backward_mma_keys`, `KeysTile` in the kernel.

    A block has `keys` keys and meets `queries` queries at a time; `width` is what D and Dv are
    padded to. Of its `warps`, `pair_rows` stand along the queries of a tile of pairs, the others
    along its keys; half of them have sums of dk and half of dv, `sum_rows` of a half along the keys
    and the others along the columns. `stages` tiles of queries are under way. With `staged`, what
    is added to dq leaves by way of shared memory, from sm_90 on.
    """

    keys: int
    queries: int
    width: int
    warps: int
    pair_rows: int
    sum_rows: int
    stages: int
    staged: bool
    blocks: int

    def __post_init__(self) -> None:
        """Refuse what the kernel cannot be compiled for."""
        for name in ("keys", "queries", "width"):
            size = getattr(self, name)
            if size < 32 or size & (size - 1):
                raise ValueError(f"{name} must be a power of 2 from 32 on, got {size}")
        if not 4 <= self.warps <= 32 or self.warps & (self.warps - 1):
            raise ValueError(f"warps must be a power of 2 in 4..32, got {self.warps}")
        if self.queries > 32 * self.warps:
            raise ValueError(
                f"{self.warps} warps have no thread for each of {self.queries} queries"
            )
        parts = {
            "rows of pairs": (self.queries, self.pair_rows),
            "columns of pairs": (self.keys * self.pair_rows, self.warps),
            "rows of sums": (self.keys, self.sum_rows),
            "columns of sums": (self.width * self.sum_rows, self.warps // 2),
        }
        for name, (size, count) in parts.items():
            if size % (16 * count):
                raise ValueError(f"{size} {name} are no multiples of 16 for each of {count} warps")
        if self.stages not in (1, 2):
            raise ValueError(f"stages must be 1 or 2, got {self.stages}")

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.warps

    @property
    def expression(self) -> str:
        """The tile as a C++ type."""
        numbers = (
            self.keys, self.queries, self.width, self.warps,
            self.pair_rows, self.sum_rows, self.stages, str(self.staged).lower(), self.blocks,
        )  # fmt: skip
        return f"cuflash::KeysTile<{', '.join(map(str, numbers))}>"

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        rows = 2 * self.keys + 2 * self.stages * self.queries
        sums = self.staged * self.queries * (4 * self.width + 32)
        return 2 * (rows * self.width + 2 * self.queries * self.keys) + sums


AnyTile = TypeVar("AnyTile", KeysTile, MmaTile)


class VjpMmaChoice(NamedTuple, Generic[AnyTile]):
    """A row of a table: the widest heads, and the score pipelines, that take the tile."""

    width: int
    scores: tuple[str, ...]
    tile: AnyTile
    reason: str


#: Bounds alone, which cost nothing where there are none; or whatever else changes scores.
_BOUNDS, _ALL = ("RangedScore",), ("RangedScore", "FullScore")
#: The first row that fits a problem, and whose blocks a multiprocessor has room for, is taken.
KEYS_TILES = (
    VjpMmaChoice(
        64, _BOUNDS, KeysTile(128, 128, 64, 8, 2, 2, 1, True, 1),
        "half the barriers of 64 queries at a time: 216 against 191 TFLOP/s at T = 8192; 64 keys,"
        " in blocks of 4 or 8 warps of which two share a multiprocessor, 202 and 181",
    ),
    VjpMmaChoice(
        64, _BOUNDS, KeysTile(128, 128, 64, 8, 2, 2, 1, False, 1),
        "nothing is added, or before sm_90",
    ),
    VjpMmaChoice(
        64, _ALL, KeysTile(128, 64, 64, 8, 2, 2, 2, True, 1),
        "32 x 32 pairs a warp leave registers for steps",
    ),
    VjpMmaChoice(
        64, _ALL, KeysTile(128, 64, 64, 8, 2, 2, 2, False, 1),
        "nothing is added, or before sm_90; fits in 99 KB (sm_86, sm_89)",
    ),
    VjpMmaChoice(
        128, _BOUNDS, KeysTile(128, 64, 128, 8, 2, 2, 2, True, 1),
        "64 x 64 sums a warp take 128 registers, 32 x 32 pairs 64; 16 x 64 pairs are a tenth"
        " slower, 64 keys in two blocks, which add to dq twice as often, a fifth",
    ),
    VjpMmaChoice(
        128, _BOUNDS, KeysTile(128, 64, 128, 8, 2, 2, 2, False, 1),
        "nothing is added, or before sm_90",
    ),
    VjpMmaChoice(
        128, _ALL, KeysTile(64, 64, 128, 8, 2, 2, 2, True, 1),
        "half the sums leave registers for steps",
    ),
    VjpMmaChoice(
        128, _ALL, KeysTile(64, 64, 128, 8, 2, 2, 2, False, 1), "nothing is added, or before sm_90",
    ),
    VjpMmaChoice(
        128, _ALL, KeysTile(64, 32, 128, 8, 2, 2, 2, False, 1), "what fits in 99 KB",
    ),
    VjpMmaChoice(
        256, _ALL, KeysTile(64, 64, 256, 8, 2, 1, 1, True, 1),
        "half the keys of 128 features: sums of 64 x 64 a warp again; room for one tile of queries",
    ),
    VjpMmaChoice(
        256, _ALL, KeysTile(64, 64, 256, 8, 2, 1, 2, False, 1),
        "nothing is added: two tiles of queries, 8.1 against 8.6 ms at T = 8192",
    ),
    VjpMmaChoice(
        256, _ALL, KeysTile(64, 64, 256, 8, 2, 1, 1, False, 1), "what fits in 164 KB (sm_80)",
    ),
    VjpMmaChoice(
        256, _ALL, KeysTile(32, 32, 256, 4, 2, 1, 1, False, 1), "what fits in 99 KB",
    ),
)  # fmt: skip
QUERIES_TILES = (
    VjpMmaChoice(
        64, _BOUNDS, MmaTile(2, 4, 64, 64, 64, False, 2),
        "32 rows a warp: each fragment read from shared memory serves two products; 5.4 ms at"
        " T = 8192, 6.2 with 16 rows, 6.8 with 32 keys",
    ),
    VjpMmaChoice(
        64, _ALL, MmaTile(2, 4, 32, 64, 64, False, 2),
        "half the keys leave registers for steps",
    ),
    VjpMmaChoice(
        128, _BOUNDS, MmaTile(2, 4, 32, 128, 128, False, 2),
        "as for 64 features: 5.0 ms, 7.0 with 16 rows a warp",
    ),
    VjpMmaChoice(
        128, _ALL, MmaTile(1, 4, 32, 128, 128, False, 2),
        "16 rows leave registers for steps, and fit in 99 KB",
    ),
    VjpMmaChoice(
        256, _ALL, MmaTile(1, 8, 32, 256, 256, False, 1),
        "16 rows a warp: their sums take 128 registers; 6.7 ms, 8.0 with four warps",
    ),
    VjpMmaChoice(
        256, _ALL, MmaTile(1, 4, 16, 256, 256, False, 1),
        "what fits in 99 KB",
    ),
)  # fmt: skip

#: Shared memory that the system takes for each block of a multiprocessor.
_SYSTEM_SHARED = 1024
#: Rows of a block of the kernels that clear and round sums, and their threads.
_SUM_ROWS, _SUM_THREADS = 32, 128


def mma_vjp_obstacle(problem: AttentionProblem, limits: DeviceLimits) -> str | None:
    """Return why tensor cores cannot compute these gradients; None if they can."""
    return full_mma_obstacle(problem, limits)


def vjp_mma_tile(
    table: Sequence[VjpMmaChoice[AnyTile]],
    width: int,
    score: str,
    limits: DeviceLimits,
    *,
    staged: bool = False,
) -> AnyTile:
    """Return the first tile of a table that fits heads so wide, a pipeline and the device."""
    staged = staged and int(limits.compute_capability) >= 90
    fitting = [
        choice.tile
        for choice in table
        if width <= choice.width and score in choice.scores and staged >= _is_staged(choice.tile)
    ]
    for tile in fitting:
        needed = _shared_bytes(tile) + _static_bytes(tile)
        on_sm = tile.blocks * (needed + _SYSTEM_SHARED)
        if needed <= limits.shared_per_block and on_sm <= limits.shared_per_sm:
            return tile
    return min(fitting, key=_shared_bytes)


def _is_staged(tile: KeysTile | MmaTile) -> bool:
    return isinstance(tile, KeysTile) and tile.staged


def _shared_bytes(tile: KeysTile | MmaTile) -> int:
    if isinstance(tile, KeysTile):
        return tile.shared_bytes
    # Of queries there are two operands here: dout too.
    return tile.shared_bytes + 2 * tile.queries * tile.values


def _static_bytes(tile: KeysTile | MmaTile) -> int:
    """Return the most that a block has beside: `VjpWork`, and what is known of its rows."""
    if isinstance(tile, KeysTile):
        return 640 + 32 * tile.queries + tile.keys
    return 1024 + 9 * tile.queries


def _pairs_kernel(
    name: str, dtype: np.dtype, score: str, tile: KeysTile | MmaTile, *flags: bool
) -> KernelName:
    arguments = [C_TYPES[dtype.name], f"cuflash::{score}<float>", tile.expression]
    arguments += [str(flag).lower() for flag in flags]
    return KernelName("attention/backward_mma.cu", f"cuflash::{name}<{', '.join(arguments)}>")


def _rows_kernel(name: str, dtype: np.dtype) -> KernelName:
    return KernelName("attention/backward_mma.cu", f"cuflash::{name}<{C_TYPES[dtype.name]}>")


def _pipeline(problem: AttentionProblem, score: str) -> str:
    """Return the score pipeline, given the least one that has what the problem asks for."""
    return "RangedScore" if score != "FullScore" and is_foldable(problem.scale) else "FullScore"


def mma_keys(
    problem: AttentionProblem, score: str, limits: DeviceLimits, *, adds_queries: bool = False
) -> Sweep:
    """Return the kernel that fills dk and dv, and adds to sums of dq."""
    width, score = max(problem.d, problem.dv), _pipeline(problem, score)
    tile = vjp_mma_tile(KEYS_TILES, width, score, limits, staged=adds_queries)
    return Sweep(
        _pairs_kernel("backward_mma_keys", problem.dtype, score, tile, adds_queries),
        threads=tile.threads,
        shared_bytes=_shared_bytes(tile),
        row_tiles=_row_tiles(problem, problem.tk, tile.keys),
    )


def mma_queries(problem: AttentionProblem, score: str, limits: DeviceLimits) -> Sweep:
    """Return the kernel that fills dq without atomic additions."""
    width, score = max(problem.d, problem.dv), _pipeline(problem, score)
    tile = vjp_mma_tile(QUERIES_TILES, width, score, limits)
    return Sweep(
        _pairs_kernel("backward_mma_queries", problem.dtype, score, tile),
        threads=32 * tile.warps,
        shared_bytes=_shared_bytes(tile),
        row_tiles=_row_tiles(problem, problem.tq, tile.queries),
    )


def mma_bias(problem: AttentionProblem, bias: ArraySpec, limits: DeviceLimits) -> Sweep:
    """Return the kernel that fills dbias."""
    tile = vjp_mma_tile(QUERIES_TILES, max(problem.d, problem.dv), "FullScore", limits)
    rows, columns = bias_tiles(bias, tile.queries, tile.keys)
    return Sweep(
        _pairs_kernel("backward_mma_bias", problem.dtype, "FullScore", tile),
        threads=32 * tile.warps,
        shared_bytes=_shared_bytes(tile),
        row_tiles=rows,
        column_tiles=columns,
    )


def mma_rows(name: str, problem: AttentionProblem) -> Sweep:
    """Return the kernel that clears sums of dq, or rounds them."""
    tiles = _row_tiles(problem, problem.tq, _SUM_ROWS)
    return Sweep(_rows_kernel(name, problem.dtype), _SUM_THREADS, 0, tiles)


def _row_tiles(problem: AttentionProblem, tokens: int, rows: int) -> int:
    """Return the tiles of an entry. Of sequences end to end the last may be a part of each."""
    return -(-tokens // rows) + (problem.sequences or 0)


def mma_vjp_kernels(dtype: np.dtype, limits: DeviceLimits | None = None) -> Iterator[KernelName]:
    """Yield every kernel that a plan for gradients of q, k, v of this dtype can launch.

    With `limits`, those that it can launch on such a device.
    """
    if dtype.itemsize != 2:
        return
    widths = sorted({choice.width for choice in KEYS_TILES})

    def rows(table: Sequence[VjpMmaChoice[AnyTile]], score: str, staged: bool) -> list[AnyTile]:
        if limits is not None:
            taken = (vjp_mma_tile(table, w, score, limits, staged=staged) for w in widths)
            return list(dict.fromkeys(taken))
        return [
            choice.tile
            for choice in table
            if score in choice.scores and staged >= _is_staged(choice.tile)
        ]

    for score in _ALL:
        for adds_queries in (True, False):
            for tile in rows(KEYS_TILES, score, adds_queries):
                yield _pairs_kernel("backward_mma_keys", dtype, score, tile, adds_queries)
        for other in rows(QUERIES_TILES, score, False):
            yield _pairs_kernel("backward_mma_queries", dtype, score, other)
    for other in rows(QUERIES_TILES, "FullScore", False):
        yield _pairs_kernel("backward_mma_bias", dtype, "FullScore", other)
    yield _rows_kernel("backward_mma_clear", dtype)
    yield _rows_kernel("backward_mma_round", dtype)
