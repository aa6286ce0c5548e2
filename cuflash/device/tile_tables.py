"""Tables of tiles as data, and which row of a table a problem takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from ..problem import AttentionProblem
from .executor import DeviceLimits

AnyTile = TypeVar("AnyTile")


class TileChoice(NamedTuple, Generic[AnyTile]):
    """A row of a table: the most features and value columns that take the tile."""

    features: int
    values: float
    tile: AnyTile
    reason: str


@dataclass(frozen=True, slots=True)
class TileTable(Generic[AnyTile]):
    """Rows of which the first that fits a problem, and a block's shared memory, is taken."""

    choices: tuple[TileChoice[AnyTile], ...]
    needed_bytes: Callable[[AnyTile], int]
    """All shared memory of a block."""

    def _find(self, features: int, values: float, limits: DeviceLimits) -> AnyTile | None:
        for choice in self.choices:
            fits = self.needed_bytes(choice.tile) <= limits.shared_per_block
            if features <= choice.features and values <= choice.values and fits:
                return choice.tile
        return None

    def obstacle(self, problem: AttentionProblem, limits: DeviceLimits) -> str | None:
        """Return why no tile fits a problem and a device; None if one does."""
        if self._find(problem.d, problem.dv, limits) is not None:
            return None
        wide = f"{problem.d} features and {problem.dv} columns of v"
        return f"has no tile of {wide} in {problem.dtype.name} for this shared memory"

    def tile_of(self, problem: AttentionProblem, limits: DeviceLimits) -> AnyTile:
        """Return the tile of a problem that has no obstacle."""
        tile = self._find(problem.d, problem.dv, limits)
        assert tile is not None, "a method was checked to run the problem"
        return tile

    def tiles(self, limits: DeviceLimits | None = None) -> list[AnyTile]:
        """Return every tile; with `limits`, those that problems take on such a device."""
        return [
            x.tile
            for x in self.choices
            if limits is None or self._find(x.features, x.values, limits) == x.tile
        ]
