"""The traffic model beside ncu's counts: which calls are made, what is summed, what is written."""

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import benchmarks.memory_wall
import benchmarks.traffic
import cuflash
from benchmarks.memory_traffic import DRAM_READ, DRAM_WRITTEN
from benchmarks.traffic import MARKER, Case, between_markers, describe, tables
from cuflash import analysis
from cuflash.bench import device, rows

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "nvidia-h200" / "traffic.csv"
SMALL = [
    Case("softmax", (4, 8192), "float32", "unfused"),
    Case("softmax", (4, 8192), "float32", "online"),
    Case("attention", (1, 2, 16, 8), "float32", "materialized"),
    Case("attention", (1, 2, 16, 8), "float32", "flash"),
    Case("attention_vjp", (1, 2, 16, 8), "float32", "flash"),
]


def counts(read: float, written: float) -> dict[str, float]:
    return {DRAM_READ: read, DRAM_WRITTEN: written}


@pytest.fixture
def numpy_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def normal(shape: tuple[int, ...], dtype: str, seed: int) -> np.ndarray:
        return np.random.default_rng(seed).standard_normal(shape).astype(dtype)

    monkeypatch.setattr(device, "normal", normal)


def test_every_method_of_the_model_is_measured_at_several_sizes() -> None:
    cases = benchmarks.traffic.cases()
    assert len(set(cases)) == len(cases)
    sizes: dict[tuple[str, str], set[tuple[int, ...]]] = {}
    for case in cases:
        sizes.setdefault((case.op, case.method), set()).add(case.shape)
        assert case.model.moved_bytes > 0
    wanted = {(op, method) for op, methods in analysis.METHODS.items() for method in methods}
    wanted -= {("attention_vjp", "materialized"), ("matmul", "single")}
    assert set(sizes) == wanted
    assert all(len(shapes) >= 2 for shapes in sizes.values())
    # Results as large as L2 or larger, where traffic is looked at.
    assert all(case.model.written_bytes > 60e6 for case in cases if case.shape[0] > 1)


def test_kernels_between_two_markers_are_added_up() -> None:
    log = [
        ("generator", counts(1, 1)),
        (MARKER, counts(0, 0)),
        ("a", counts(10, 1)),
        ("b", counts(20, 2)),
        (MARKER, counts(0, 0)),
        ("generator", counts(1, 1)),
        (MARKER, counts(0, 0)),
        (MARKER, counts(0, 0)),
    ]
    assert between_markers(log) == [counts(30, 3), counts(0, 0)]


def test_a_row_holds_the_model_beside_what_was_found() -> None:
    row = describe(SMALL[1], (2e-3, 512), counts(300_000, 131_072), first=4e-3)
    assert (row["model read"], row["model written"]) == (0.262144, 0.131072)
    assert (row["read"], row["written"]) == (0.3, 0.131072)
    assert row["counted"] == pytest.approx((300_000 + 131_072) / 393_216)
    assert (row["ms"], row["speedup"], row["auxiliary"], row["extra"]) == (2, 2, 0, 0.000512)
    assert describe(SMALL[1], (2e-3, 512), None, first=4e-3)["counted"] == ""


@pytest.mark.usefixtures("numpy_device")
def test_calls_are_those_of_the_library() -> None:
    shape = (1, 2, 16, 8)
    rungs = benchmarks.traffic.calls("attention", shape, "float64")
    results = {name: call() for name, call in rungs.items()}
    out, lse = results["flash"]
    assert lse.shape == (1, 2, 16)
    for name in ("materialized", "scores_fused"):
        np.testing.assert_allclose(results[name], out, atol=1e-12)
    (gradients,) = (
        c() for c in benchmarks.traffic.calls("attention_vjp", shape, "float64").values()
    )
    assert gradients.dq.shape == shape
    for op, size in (("dropout_bias_layer_norm", (3, 16)), ("matmul_bias_activation", (4, 8, 5))):
        unfused, fused = (c() for c in benchmarks.traffic.calls(op, size, "float32").values())
        np.testing.assert_allclose(unfused, fused, atol=1e-5)
    assert set(benchmarks.traffic.calls("softmax", (3, 5), "float32")) == {
        *analysis.METHODS["softmax"]
    }


@pytest.mark.usefixtures("numpy_device")
def test_what_runs_under_ncu_makes_each_call_between_markers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launched: list[str] = []
    pool = SimpleNamespace(free_all_blocks=lambda: None)
    stand_in = SimpleNamespace(
        RawKernel=lambda code, name: lambda *_: launched.append(name),
        get_default_memory_pool=lambda: pool,
    )
    monkeypatch.setitem(sys.modules, "cupy", stand_in)
    monkeypatch.setattr(
        cuflash, "softmax", lambda x, *, method: launched.append(f"{method} {x.shape}")
    )
    monkeypatch.setattr(
        benchmarks.traffic.baselines, "unfused_softmax", lambda x: launched.append("unfused")
    )
    benchmarks.traffic.launch(SMALL[:2])
    assert launched == [MARKER, "unfused", MARKER, MARKER, "online (4, 8192)", MARKER]


def test_counts_belong_to_the_calls_that_were_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = benchmarks.traffic.cases()
    asked: list[list[str]] = []
    log = [(MARKER, counts(0, 0)), ("a", counts(1, 2)), (MARKER, counts(0, 0))]

    def ncu(path: Path, options: list[str], arguments: list[str]) -> str:
        asked.append(arguments)
        return ""

    monkeypatch.setattr(benchmarks.traffic, "ncu", ncu)
    monkeypatch.setattr(benchmarks.traffic, "parse", lambda said: log)
    assert benchmarks.traffic.count(cases[3:4]) == [counts(1, 2)]
    assert asked[0][-2:] == ["--launch", "3"]
    with pytest.raises(RuntimeError, match="2 calls were made; ncu counted 1"):
        benchmarks.traffic.count(cases[3:5])


def test_tables_are_those_of_a_run() -> None:
    found = [describe(case, (1e-3, 10**6), counts(2e6, 1e6), 3e-3) for case in SMALL]
    made = tables([{name: str(value) for name, value in row.items()} for row in found])
    assert made["rungs"].startswith("| T | materialized, ms | materialized, extra MB | flash, ms |")
    assert "| 16 | 1 | 1 | 1 | 1 | 3 |" in made["rungs"]
    assert "| softmax | 4 x 8192 | float32 | online | 0 | 3 | 7.63 |" in made["counted"]
    assert "attention |" not in made["counted"]


@pytest.mark.skipif(not RESULTS.exists(), reason="there are no results yet")
@pytest.mark.parametrize("page", ["traffic-model.md", "memory-wall.md"])
def test_the_documents_are_those_of_the_results(page: str) -> None:
    document = (ROOT / "docs" / page).read_text()
    made = tables(rows.read_rows(RESULTS))
    assert benchmarks.memory_wall.fill(document, made) == document
