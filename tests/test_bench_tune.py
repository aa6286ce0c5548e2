"""Tables of tiles and their rejected neighbours: which problems, and which tile is the best."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cupy", reason="tiles live beside CuPy's launches")

from benchmarks import tune
from cuflash.bench import device, tiles
from cuflash.bench.problems import AttentionShape
from cuflash.bench.rows import read_rows
from cuflash.bench.tiles import TiledProblem
from cuflash.device.attention_plans_wgmma import WGMMA_STEP_TILES, WGMMA_TILES, WgmmaTile
from tests.devices import H200

A100 = replace(H200, compute_capability="80", shared_per_block=166912)
TAKEN = WgmmaTile(2, 128, 128, 2, 4, True, True)
CALM = WgmmaTile(2, 128, 128, 2, 4, False, True)
SMALL = WgmmaTile(2, 64, 128, 4, 4, True, True)
SHORT = TiledProblem(AttentionShape(32, 16, 512, 128, True, "bfloat16"))
LONG = TiledProblem(AttentionShape(2, 16, 8192, 128, False, "bfloat16"))
CELL = tune.Cell("wgmma", TAKEN, (CALM, SMALL), (SHORT, LONG))


class FakeClock:
    """Takes calls at their word: each returns its seconds."""

    megahertz = math.nan

    def seconds(self, calls: Sequence[Callable[[], Any]], count: int, start: int) -> float:
        return sum(calls[i % len(calls)]() for i in range(start, start + count))


Calls = Mapping[WgmmaTile, list[Callable[[], float]]]


def measured(times: dict[tuple[TiledProblem, WgmmaTile], float]) -> list[list[Any]]:
    """Measure CELL where a call takes 1 ms, or what `times` says."""

    def bind(candidates: Sequence[WgmmaTile], problem: TiledProblem) -> Calls:
        seconds = {tile: times.get((problem, tile), 1e-3) for tile in candidates}
        return {tile: [partial(float, taken)] for tile, taken in seconds.items()}

    return [tune.measure(CELL, p, bind, clock=FakeClock(), rounds=2) for p in CELL.problems]


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
    problems = list(tune.all_problems())
    found = tune.cells(["wgmma"], problems, H200)
    taken = [problem for cell in found for problem in cell.problems]
    assert sorted(map(str, taken)) == sorted(map(str, problems))
    rows = {(cell.tile, tuple(cell.rejected)) for cell in found}
    assert rows == {(row.tile, row.rejected) for row in (*WGMMA_TILES, *WGMMA_STEP_TILES)}
    for cell in found:
        assert cell.tile not in cell.rejected
        assert len({tile.width for tile in cell.candidates}) == 1
    assert tune.cells(["wgmma"], problems, A100) == []
    assert {cell.table for cell in tune.cells(["mma"], problems, A100)} == {"mma"}


@pytest.mark.parametrize("option", tiles.OPTIONS)
@pytest.mark.usefixtures("numpy_device")
def test_problems_are_described_as_their_arrays_are(option: str) -> None:
    problem = TiledProblem(AttentionShape(2, 3, 64, 64, False, "bfloat16"), option)
    described = problem.described()
    (arrays,) = problem.arrays(1)
    assert sorted(arrays) == sorted({"k", "q", "v", option} - {"softcap"})
    for name, x in arrays.items():
        assert getattr(described, name).dtype == x.dtype
        assert np.broadcast_shapes(x.shape, getattr(described, name).shape)
    assert getattr(described, option) is not None
    assert str(problem) == f"D = 64, T = 64, {option}"


def test_kernels_are_compiled_while_the_time_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    wanted = tune.cells(["wgmma"], list(tune.all_problems()), H200)
    batches = list(tune.batches(wanted, H200))
    assert [cell for batch, _ in batches for cell in batch] == wanted
    assert min(len(kernels) for _, kernels in batches[:-1]) >= 8
    expressions = {kernel.expression for _, kernels in batches for kernel in kernels}
    for score in ("Plain", "Ranged", "Softcap", "Bias", "Alibi", "Mask"):
        assert any(f"cuflash::{score}Score" in expression for expression in expressions)

    monkeypatch.setattr(tiles, "warm", lambda kernels: None)
    assert tune.compiled(wanted, 1e9, H200) == wanted
    assert tune.compiled(wanted, -1, H200) == []


def test_a_budget_deals_out_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    budget = tune.Budget(10)
    assert budget.rounds(1) == tune.ROUNDS[1]
    budget.took(2.0, 20)  # a tenth of a second for a tile and round
    now[0] = 2.0
    assert budget.rounds(16) == 5
    assert budget.rounds(1000) == tune.ROUNDS[0]
    now[0] = 10.0
    assert budget.rounds(1) == 0


@pytest.mark.usefixtures("numpy_device")
def test_a_report_names_what_it_leaves_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(device, "clock", FakeClock)
    monkeypatch.setattr(
        tune, "by_tiles", lambda candidates, problem: {t: [lambda: 1e-3] for t in candidates}
    )
    assert tune.report([CELL, CELL], tmp_path, 1e9) == [(TAKEN, 1.0)] * 2
    said = capsys.readouterr().out
    assert said.count("holds") == 2
    assert "4 problems in 7 to 7 rounds" in said
    assert "left out" not in said
    assert len(read_rows(tmp_path / "no-gpu" / "tune.csv")) == 2 * 2 * 3
    assert tune.report([CELL], None, -1) == []
    assert f"left out, out of time: {CELL} ({SHORT}; {LONG})" in capsys.readouterr().out
