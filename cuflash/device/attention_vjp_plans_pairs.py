"""Gradients by kernels in which two warps share rows: `backward_dmma` and `backward_tf32`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Generic, Protocol, TypeVar

from ..problem import AttentionProblem
from .attention_vjp_stages import Sweep
from .compiler import KernelName
from .executor import DeviceLimits
from .tile_tables import TileTable

#: Score pipelines: bounds cost nothing where there are none.
PAIRS_SCORES = ("RangedScore", "FullScore")
#: Rows of a block of the kernel that clears sums and makes dq of them, and its threads.
_SUM_ROWS, _SUM_THREADS = 32, 128


class PairsTile(Protocol):
    """A tile: a block owns keys, or queries, shared by pairs of warps, and meets the others."""

    @property
    def threads(self) -> int:
        """Threads of a block."""

    @property
    def own(self) -> int:
        """Rows that a block owns."""

    @property
    def expression(self) -> str:
        """The tile as a C++ type."""

    def shared_bytes(self, *, handed: int) -> int:
        """Return the dynamic shared memory of a block whose warps hand over so many tiles."""


AnyPairsTile = TypeVar("AnyPairsTile", bound=PairsTile)


def needed_bytes(tile: PairsTile, itemsize: int) -> int:
    """Return the most shared memory of a block, with `VjpWork` and what is known of its rows."""
    # Looked up are 128 queries at a time, or those that the block owns.
    states = max(128, tile.own) * max(16, 3 * itemsize)
    return tile.shared_bytes(handed=2) + 704 + states + tile.own


@dataclass(frozen=True)
class PairsFamily(Generic[AnyPairsTile]):
    """The kernels of one dtype: `kernel` is their name and their file's, `c_type` the dtype's."""

    kernel: str
    c_type: str
    table: TileTable[AnyPairsTile]

    def keys(
        self,
        problem: AttentionProblem,
        score: str,
        limits: DeviceLimits,
        *,
        adds_queries: bool = False,
    ) -> Sweep:
        """Return the kernel that fills dk and dv, and adds to sums of dq."""
        handed = 1 + adds_queries
        return self._sweep(problem, score, limits, problem.tk, handed, True, adds_queries)

    def queries(self, problem: AttentionProblem, score: str, limits: DeviceLimits) -> Sweep:
        """Return the kernel that fills dq without atomic additions."""
        return self._sweep(problem, score, limits, problem.tq, 2, False, False)

    def _sweep(
        self,
        problem: AttentionProblem,
        score: str,
        limits: DeviceLimits,
        tokens: int,
        handed: int,
        *flags: bool,
    ) -> Sweep:
        tile = self.table.tile_of(problem, limits)
        return Sweep(
            self._kernel("RangedScore" if score != "FullScore" else score, tile, *flags),
            threads=tile.threads,
            shared_bytes=tile.shared_bytes(handed=handed),
            row_tiles=_row_tiles(problem, tokens, tile.own),
        )

    def rows(self, problem: AttentionProblem, *, clears: bool) -> Sweep:
        """Return the kernel that clears sums of dq, or makes dq of them."""
        tiles = _row_tiles(problem, problem.tq, _SUM_ROWS)
        return Sweep(self._sums_kernel(clears), _SUM_THREADS, 0, tiles)

    def kernels(self, limits: DeviceLimits | None = None) -> Iterator[KernelName]:
        """Yield every kernel that a plan can launch; with `limits`, on such a device."""
        for tile, score in product(self.table.tiles(limits), PAIRS_SCORES):
            for flags in ((False, False), (True, False), (True, True)):
                yield self._kernel(score, tile, *flags)
        for clears in (True, False):
            yield self._sums_kernel(clears)

    def _kernel(self, score: str, tile: AnyPairsTile, *flags: bool) -> KernelName:
        arguments = [f"cuflash::{score}<{self.c_type}>", tile.expression]
        arguments += [str(flag).lower() for flag in flags]
        source = f"attention/{self.kernel}.cu"
        return KernelName(source, f"cuflash::{self.kernel}<{', '.join(arguments)}>")

    def _sums_kernel(self, clears: bool) -> KernelName:
        expression = f"cuflash::query_sums<{self.c_type}, {str(clears).lower()}>"
        return KernelName("attention/backward_rows.cu", expression)


def _row_tiles(problem: AttentionProblem, tokens: int, rows: int) -> int:
    """Return the tiles of an entry. Of sequences end to end the last may be a part of each."""
    return -(-tokens // rows) + (problem.sequences or 0)
