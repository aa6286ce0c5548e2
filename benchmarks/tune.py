"""Whether the tables of tiles are right for the GPU at hand.

``python -m benchmarks.tune`` times, for every row of the tables of the attention forward (`wgmma`
and `mma`) that a measured problem takes, its tile and the neighbours that were rejected for it, in
interleaved rounds, and says which is the best: over all problems of the row, and in each. bfloat16,
B * T = 16384 tokens, H * D = 2048, full and causal, and with each option that changes scores.

It takes ``--seconds``, 300 by default. First all kernels are compiled; what that leaves is dealt
out to the problems as rounds, 7 at most and 2 at least. If even these do not fit, or kernels take
too long to compile, the rows that are left out are named. Nothing is changed: a table is text to be
edited, with the reason beside the tile.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cuflash.bench import device, peers, problems, rows, tiles, timing
from cuflash.bench.problems import AttentionShape
from cuflash.bench.tiles import TiledProblem

TABLES = ("wgmma", "mma")
TOKENS, WIDTHS = (256, 512, 2048, 8192), (64, 128, 256)
#: Tokens of problems with an option, which are full but for the causal one that ALiBi is for.
OPTION_TOKENS = (512, 4096)
#: A neighbour that is faster by less than this is no better: what repeated runs differ by.
SLACK = problems.TARGET_SLACK

#: Inputs used in rotation.
SETS = 2
#: Rounds of a problem, at least and at most, and the seconds of a tile in one.
ROUNDS, WINDOW = (2, 7), 0.01
#: Part of the time that kernels may take to compile.
COMPILE_PART = 0.6
#: Makes calls of a problem by tiles.
Bind = Callable[[Sequence[Any], TiledProblem], Mapping[Any, Sequence[timing.Call]]]


class Cell(NamedTuple):
    """A row of a table, and the problems that take it."""

    table: str
    tile: Any
    rejected: Sequence[Any]
    problems: Sequence[TiledProblem]

    @property
    def candidates(self) -> tuple[Any, ...]:
        """The tile and its neighbours."""
        return (self.tile, *self.rejected)

    def __str__(self) -> str:
        """Return table and tile."""
        return f"{self.table}: {named(self.tile)}"


class Verdict(NamedTuple):
    """The best tile of a row over its problems, and its rate over that of the table's tile."""

    best: Any
    gain: float


class Budget:
    """Deals out a time to measurements, as rounds: each gets its share of what is left."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds
        self._spent, self._timed = 0.0, 0

    def rounds(self, tiles_left: int) -> int:
        """Return the rounds of the next problem; 0 if there is no time for any.

        `tiles_left` counts the tiles of all problems that are still to be measured, this one's too.
        """
        least, most = ROUNDS
        left = self._end - time.monotonic()
        # At first a window is taken to cost two: counting the calls that fill it comes on top.
        each = self._spent / self._timed if self._timed else 2 * WINDOW
        fitting = int(left / (each * tiles_left))
        return min(most, max(least, fitting)) if left > 0 else 0

    def took(self, seconds: float, windows: int) -> None:
        """Learn what a measurement took."""
        self._spent += seconds
        self._timed += windows


def all_problems() -> Iterator[TiledProblem]:
    """Yield the problems."""
    for d, tokens, causal in product(WIDTHS, TOKENS, (False, True)):
        yield TiledProblem(shape_of(tokens, d, causal))
    for d, tokens, option in product(WIDTHS, OPTION_TOKENS, tiles.OPTIONS):
        yield TiledProblem(shape_of(tokens, d, option == "alibi_slopes"), option)


def shape_of(tokens: int, d: int, causal: bool) -> AttentionShape:
    """Return the shape of all tokens and features."""
    batch, heads = problems.DEVICE_TOKENS // tokens, problems.DEVICE_WIDTH // d
    return AttentionShape(batch, heads, tokens, d, causal, "bfloat16")


def cells(names: Sequence[str], wanted: Sequence[TiledProblem], limits: Any) -> list[Cell]:
    """Return the rows that the problems take on a device, if they have rejected neighbours."""
    found = []
    for table in names:
        taken: dict[Any, list[TiledProblem]] = {}
        for problem in wanted:
            choice = tiles.choice_of(table, problem, limits)
            if choice is not None and choice.rejected:
                taken.setdefault(choice, []).append(problem)
        found += [Cell(table, c.tile, c.rejected, tuple(p)) for c, p in taken.items()]
    return found


def batches(wanted: Sequence[Cell], limits: Any) -> Iterator[tuple[list[Cell], list[Any]]]:
    """Yield rows and their kernels, as many rows at a time as give every thread a few kernels."""
    least = 2 * (os.cpu_count() or 1)
    batch: list[Cell] = []
    names: dict[Any, None] = {}  # in order, each once
    for cell in wanted:
        batch.append(cell)
        for problem, tile in product(cell.problems, cell.candidates):
            names[tiles.kernel_of(problem, tile, limits)] = None
        if len(names) >= least:
            yield batch, list(names)
            batch, names = [], {}
    if batch:
        yield batch, list(names)


def compiled(wanted: Sequence[Cell], seconds: float, limits: Any) -> list[Cell]:
    """Compile the kernels of rows, in order, while the time lasts; return the rows that have."""
    ready: list[Cell] = []
    for batch, kernels in timing.within(seconds, batches(wanted, limits)):
        tiles.warm(kernels)
        ready += batch
    return ready


def measure(
    cell: Cell,
    problem: TiledProblem,
    bind: Bind,
    *,
    clock: timing.Clock | None = None,
    rounds: int = ROUNDS[1],
    window: float = WINDOW,
) -> list[rows.Row]:
    """Time the tiles of a row on one problem."""
    bound = bind(cell.candidates, problem)
    calls = {tile.expression: each for tile, each in bound.items()}
    result = timing.compare(calls, clock=clock, rounds=rounds, window=window)
    shape = problem.shape
    work = problems.attention_flops(shape) / 1e12
    return [
        {
            "table": cell.table,
            "tile": named(tile),
            "taken": tile == cell.tile,
            "dtype": shape.dtype,
            "T": shape.tokens,
            "D": shape.d,
            "causal": shape.causal,
            "option": problem.option,
            "rounds": rounds,
            **rows.timing(result, tile.expression, cell.tile.expression, work, "TFLOP/s"),
        }
        for tile in cell.candidates
    ]


def judge(cell: Cell, found: Sequence[Sequence[rows.Row]]) -> Verdict:
    """Compare a row's tiles over all of its problems, by the geometric mean of the speedups.

    Parameters
    ----------
    cell : Cell
        The row.
    found : sequence of sequence of Row
        What `measure` returns, a problem each.
    """
    gains = [
        math.exp(float(np.mean([math.log(row["speedup"]) for row in of_tile])))
        for of_tile in zip(*found, strict=True)
    ]
    best = int(np.argmax(gains))
    if gains[best] <= 1 + SLACK:
        return Verdict(cell.tile, 1.0)
    return Verdict(cell.candidates[best], gains[best])


def sentences(cell: Cell, verdict: Verdict, found: Sequence[Sequence[rows.Row]]) -> Iterator[str]:
    """Say which tile of a row is the best, and on which problems another one is ahead of it."""
    best = named(verdict.best)
    if verdict.best == cell.tile:
        yield f"{cell} holds"
    else:
        yield f"{cell} is beaten by {best}, {verdict.gain:.3f} times as fast"
    for problem, problem_rows in zip(cell.problems, found, strict=True):
        own = next(row["speedup"] for row in problem_rows if row["tile"] == best)
        fastest = max(problem_rows, key=lambda row: row["speedup"])
        ahead = fastest["speedup"] / own
        if ahead > 1 + SLACK:
            yield f"  {problem}: {fastest['tile']} is {ahead:.3f} times as fast"


def named(tile: Any) -> str:
    """Return a tile as its kernel's source has it."""
    return str(tile.expression).removeprefix("cuflash::")


def by_tiles(
    candidates: Sequence[Any], problem: TiledProblem
) -> Mapping[Any, Sequence[timing.Call]]:
    """Return calls of this library by tiles, on inputs used in rotation."""
    return tiles.calls_by(candidates, problem, SETS)


def report(wanted: Sequence[Cell], folder: Path | None, seconds: float) -> list[Verdict]:
    """Measure rows while the time lasts, print, and write what there is; name what is left out."""
    record = rows.Record("tune", folder, rows.device_environment)
    budget, verdicts, repeated = Budget(seconds), [], []
    left = sum(len(cell.candidates) * len(cell.problems) for cell in wanted)
    for cell in wanted:
        found = []
        for problem in cell.problems:
            rounds = budget.rounds(left)
            if not rounds:
                break
            began = time.monotonic()
            found.append(measure(cell, problem, by_tiles, clock=device.clock(), rounds=rounds))
            record.add(f"{cell.table}, {problem}", found[-1])
            peers.forget()
            budget.took(time.monotonic() - began, rounds * len(cell.candidates))
            left -= len(cell.candidates)
            repeated.append(rounds)
        if len(found) < len(cell.problems):
            break
        verdicts.append(judge(cell, found))
        print(*sentences(cell, verdicts[-1], found), sep="\n", end="\n\n", flush=True)
    record.close()
    if repeated:
        print(f"{len(repeated)} problems in {min(repeated)} to {max(repeated)} rounds")
    tell_left_out(wanted[len(verdicts) :], "out of time")
    return verdicts


def tell_left_out(left_out: Sequence[Cell], reason: str) -> None:
    """Name rows without a verdict."""
    for cell in left_out:
        print(f"left out, {reason}: {cell} ({'; '.join(map(str, cell.problems))})")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tune",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=TABLES)
    parser.add_argument("--seconds", type=float, default=300, help="for all of it")
    parser.add_argument("--results", type=Path, default=None, help="folder to write to, if any")
    chosen = parser.parse_args(arguments)
    began, limits = time.monotonic(), device.limits()
    wanted = cells(chosen.tables, list(all_problems()), limits)
    ready = compiled(wanted, COMPILE_PART * chosen.seconds, limits)
    took = time.monotonic() - began
    print(f"{len(ready)} of {len(wanted)} rows compiled in {took:.0f} s", flush=True)
    report(ready, chosen.results, chosen.seconds - took)
    tell_left_out(wanted[len(ready) :], "not compiled in time")


if __name__ == "__main__":
    main()
