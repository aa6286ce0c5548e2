"""Tables of tiles and their rejected neighbours: which problems, and which tile is the best."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cupy", reason="tiles live beside CuPy's launches")

from benchmarks import tune
from cuflash.bench import device
from cuflash.bench.problems import AttentionShape
from cuflash.bench.rows import read_rows
from cuflash.device.attention_plans_wgmma import WGMMA_TILES, WgmmaTile
from tests.devices import H200

A100 = replace(H200, compute_capability="80", shared_per_block=166912)
TAKEN = WgmmaTile(2, 128, 128, 2, 4, True, True)
CALM = WgmmaTile(2, 128, 128, 2, 4, False, True)
SMALL = WgmmaTile(2, 64, 128, 4, 4, True, True)
SHORT = AttentionShape(32, 16, 512, 128, True, "bfloat16")
LONG = AttentionShape(2, 16, 8192, 128, False, "bfloat16")
CELL = tune.Cell("wgmma", TAKEN, (CALM, SMALL), (SHORT, LONG))


class FakeClock:
    """Takes calls at their word: each returns its seconds."""

    megahertz = math.nan

    def seconds(self, calls: Sequence[Callable[[], Any]], count: int, start: int) -> float:
        return sum(calls[i % len(calls)]() for i in range(start, start + count))


def measured(times: dict[tuple[AttentionShape, WgmmaTile], float]) -> list[list[Any]]:
    """Measure CELL where a call takes 1 ms, or what `times` says."""

    def bind(shape: AttentionShape, tile: WgmmaTile) -> list[Callable[[], float]]:
        return [lambda: times.get((shape, tile), 1e-3)]

    return [tune.measure(CELL, s, bind, clock=FakeClock(), rounds=2) for s in CELL.shapes]


def said(found: list[list[Any]]) -> list[str]:
    return list(tune.sentences(CELL, tune.judge(CELL, found), found))


def test_rows_have_rates_and_speedups_over_the_taken_tile() -> None:
    found = measured({(LONG, SMALL): 2e-3})
    assert [[row["tile"] for row in rows] for rows in found] == [
        [tune.named(tile) for tile in (TAKEN, CALM, SMALL)]
    ] * 2
    assert [row["taken"] for row in found[1]] == [True, False, False]
    assert [row["speedup"] for row in found[1]] == pytest.approx([1, 1, 0.5])
    flops = 4 * 2 * 16 * 8192**2 * 128
    assert found[1][2]["rate"] == pytest.approx(flops / 1e12 / 2e-3)


def test_a_table_holds_unless_a_neighbour_is_ahead_by_more_than_runs_differ() -> None:
    for times in ({}, {(SHORT, CALM): 0.995e-3, (LONG, CALM): 0.995e-3}):
        found = measured(times)
        assert tune.judge(CELL, found) == (TAKEN, 1.0)
        assert said(found) == [f"wgmma: {tune.named(TAKEN)} holds"]


def test_a_better_neighbour_over_all_problems_is_named() -> None:
    found = measured({(SHORT, SMALL): 1e-3 / 1.2, (LONG, SMALL): 1e-3 / 0.9})
    best, gain = tune.judge(CELL, found)
    assert best == SMALL
    assert gain == pytest.approx(math.sqrt(1.2 * 0.9))
    first, *others = said(found)
    assert first == (
        f"wgmma: {tune.named(TAKEN)} is beaten by {tune.named(SMALL)}, 1.039 times as fast"
    )
    # The problem that it loses on is named, too.
    assert others == [f"  D = 128, T = 8192: {tune.named(TAKEN)} is 1.111 times as fast"]


def test_cells_are_the_rows_that_problems_take() -> None:
    shapes = list(tune.all_shapes())
    found = tune.cells(["wgmma"], shapes, H200)
    assert sorted(map(id, (s for cell in found for s in cell.shapes))) == sorted(map(id, shapes))
    assert {cell.tile for cell in found} == {choice.tile for choice in WGMMA_TILES}
    for cell in found:
        assert cell.tile not in cell.rejected
        assert len({tile.width for tile in (cell.tile, *cell.rejected)}) == 1
    assert tune.cells(["wgmma"], shapes, A100) == []
    assert {cell.table for cell in tune.cells(["mma"], shapes, A100)} == {"mma"}


@pytest.mark.usefixtures("numpy_device")
def test_a_report_ends_with_its_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(device, "clock", FakeClock)
    monkeypatch.setattr(tune, "by_tile", lambda shape, tile: [lambda: 1e-3])
    assert tune.report([CELL, CELL], tmp_path, 1e9) == [(TAKEN, 1.0)] * 2
    assert capsys.readouterr().out.count("holds") == 2
    assert len(read_rows(tmp_path / "no-gpu" / "tune.csv")) == 2 * 2 * 3
    assert tune.report([CELL], None, -1) == []
    assert "out of time: 1 rows are not measured" in capsys.readouterr().out
