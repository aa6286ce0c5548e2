"""Whether the tables of tiles are right for the GPU at hand.

``python -m benchmarks.tune`` times, for every row of the tables of the attention forward (`wgmma`
and `mma`) that a measured problem takes, its tile and the neighbours that were rejected for it, in
interleaved rounds, and says which is the best: over all problems of the row, and in each. bfloat16,
B * T = 16384 tokens, H * D = 2048, full and causal. It takes under five minutes, most of them to
compile; ``--seconds`` begins no row after that. Nothing is changed: a table is text to be edited,
with the reason beside the tile.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cuflash.bench import device, peers, problems, rows, tiles, timing
from cuflash.bench.problems import AttentionShape

TABLES = ("wgmma", "mma")
TOKENS, WIDTHS = (256, 512, 2048, 8192), (64, 128, 256)
#: A neighbour that is faster by less than this is no better: what repeated runs differ by.
SLACK = problems.TARGET_SLACK

#: Inputs used in rotation.
SETS = 2
#: Makes calls of a problem by a tile.
Bind = Callable[[AttentionShape, Any], Sequence[timing.Call]]


class Cell(NamedTuple):
    """A row of a table, and the problems that take it."""

    table: str
    tile: Any
    rejected: Sequence[Any]
    shapes: Sequence[AttentionShape]


class Verdict(NamedTuple):
    """The best tile of a row over its problems, and its rate over that of the table's tile."""

    best: Any
    gain: float


def all_shapes() -> Iterator[AttentionShape]:
    """Yield the problems."""
    for d, tokens, causal in product(WIDTHS, TOKENS, (False, True)):
        batch, heads = problems.DEVICE_TOKENS // tokens, problems.DEVICE_WIDTH // d
        yield AttentionShape(batch, heads, tokens, d, causal, "bfloat16")


def cells(names: Sequence[str], shapes: Sequence[AttentionShape], limits: Any) -> list[Cell]:
    """Return the rows that the problems take on a device, if they have rejected neighbours."""
    found = []
    for table in names:
        taken: dict[Any, list[AttentionShape]] = {}
        for shape in shapes:
            choice = tiles.choice_of(table, shape, limits)
            if choice is not None and choice.rejected:
                taken.setdefault(choice, []).append(shape)
        found += [Cell(table, c.tile, c.rejected, tuple(s)) for c, s in taken.items()]
    return found


def measure(
    cell: Cell,
    shape: AttentionShape,
    bind: Bind,
    *,
    clock: timing.Clock | None = None,
    rounds: int = 7,
    window: float = 0.01,
) -> list[rows.Row]:
    """Time the tiles of a row on one problem."""
    candidates = (cell.tile, *cell.rejected)
    calls = {tile.expression: bind(shape, tile) for tile in candidates}
    result = timing.compare(calls, clock=clock, rounds=rounds, window=window)
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
            **rows.timing(result, tile.expression, cell.tile.expression, work, "TFLOP/s"),
        }
        for tile in candidates
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
    candidates = (cell.tile, *cell.rejected)
    gains = [
        math.exp(float(np.mean([math.log(row["speedup"]) for row in of_tile])))
        for of_tile in zip(*found, strict=True)
    ]
    best = int(np.argmax(gains))
    if gains[best] <= 1 + SLACK:
        return Verdict(cell.tile, 1.0)
    return Verdict(candidates[best], gains[best])


def sentences(cell: Cell, verdict: Verdict, found: Sequence[Sequence[rows.Row]]) -> Iterator[str]:
    """Say which tile of a row is the best, and on which problems another one is ahead of it."""
    name, best = f"{cell.table}: {named(cell.tile)}", named(verdict.best)
    if verdict.best == cell.tile:
        yield f"{name} holds"
    else:
        yield f"{name} is beaten by {best}, {verdict.gain:.3f} times as fast"
    for shape, problem_rows in zip(cell.shapes, found, strict=True):
        own = next(row["speedup"] for row in problem_rows if row["tile"] == best)
        fastest = max(problem_rows, key=lambda row: row["speedup"])
        ahead = fastest["speedup"] / own
        if ahead > 1 + SLACK:
            yield f"  {described(shape)}: {fastest['tile']} is {ahead:.3f} times as fast"


def named(tile: Any) -> str:
    """Return a tile as its kernel's source has it."""
    return str(tile.expression).removeprefix("cuflash::")


def described(shape: AttentionShape) -> str:
    """Return what tells a problem from the others of a row."""
    return f"D = {shape.d}, T = {shape.tokens}{', causal' if shape.causal else ''}"


def by_tile(shape: AttentionShape, tile: Any) -> list[timing.Call]:
    """Return calls of this library by a tile, on inputs used in rotation."""
    inputs = device.attention_inputs(shape, SETS)
    return [tiles.call_by(tile, shape, arrays) for arrays in inputs]


def report(wanted: Sequence[Cell], folder: Path | None, seconds: float) -> list[Verdict]:
    """Measure rows while the time lasts, print, and write what there is."""
    record = rows.Record("tune", folder, rows.device_environment)
    verdicts = []
    for cell in timing.within(seconds, wanted):
        found = []
        for shape in cell.shapes:
            found.append(measure(cell, shape, by_tile, clock=device.clock()))
            record.add(f"{cell.table}, {described(shape)}", found[-1])
            peers.forget()
        verdicts.append(judge(cell, found))
        print(*sentences(cell, verdicts[-1], found), sep="\n", end="\n\n", flush=True)
    record.close()
    if len(verdicts) < len(wanted):
        print(f"out of time: {len(wanted) - len(verdicts)} rows are not measured")
    return verdicts


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tune",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=TABLES)
    parser.add_argument("--seconds", type=float, default=270, help="begin no row after this")
    parser.add_argument("--results", type=Path, default=None, help="folder to write to, if any")
    chosen = parser.parse_args(arguments)
    began = time.monotonic()
    wanted = cells(chosen.tables, list(all_shapes()), device.limits())
    tiles.warm_tiles(
        (shape, tile)
        for cell in wanted
        for shape in cell.shapes
        for tile in (cell.tile, *cell.rejected)
    )
    report(wanted, chosen.results, chosen.seconds - (time.monotonic() - began))


if __name__ == "__main__":
    main()
