"""The benchmark of the softmax family: what it measures, its targets, peers and figure."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

import benchmarks.softmax
from benchmarks.softmax import Effort, Problem
from cuflash.bench import charts, device, peers, problems, rows, softmax_peers
from tests.devices import H200

OPERATIONS = list(problems.SOFTMAX_OPERATIONS)


def scipy_alone(operation: str, axis: int) -> list[peers.Peer]:
    return [peers.SCIPY_SOFTMAX] if operation == "softmax" else []


def effort(**changes: object) -> Effort:
    base = {
        "lengths": {"softmax": [16, problems.OVER_FUSED_LENGTH]},
        "dtypes": ["float32"],
        "elements": 2**13,
        "peers": scipy_alone,
        "rounds": 2,
        "window": 1e-4,
    }
    return Effort(**{**base, **changes})


@pytest.mark.usefixtures("numpy_device")
def test_softmax_benchmark(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    benchmarks.softmax.report(effort(), tmp_path)
    found = rows.read_rows(tmp_path / "no-gpu" / "softmax.csv")
    pairs = [(row["method"], row["peer"]) for row in found if row["N"] == "16"]
    assert len(set(pairs)) == len(pairs)
    assert ("device copy", "device copy") in pairs
    assert ("auto", "scipy.special.softmax") in pairs
    assert ("naive", "fused") in pairs
    (copied,) = [row for row in found if row["method"] == "device copy" and row["N"] == "16"]
    assert float(copied["speedup"]) == 1
    assert {row["rows"] for row in found if row["N"] == "16"} == {"512"}
    assert {row["regime"] for row in found} == {"fused"}
    targets = {row["method"] for row in found if row["target"] and row["peer"] == "fused"}
    assert targets == {"naive", "online"}
    assert all(row["N"] == "4096" for row in found if row["target"])
    assert (tmp_path / "no-gpu" / "softmax.png").read_bytes().startswith(b"\x89PNG")

    assert "out of time" not in capsys.readouterr().out
    benchmarks.softmax.report(effort(), None, seconds=1e-3)
    assert "1 of 2 problems are not measured" in capsys.readouterr().out


@pytest.mark.usefixtures("numpy_device")
@pytest.mark.parametrize("operation", OPERATIONS[1:])
def test_the_rest_of_the_family_is_measured_in_its_own_bytes(operation: str) -> None:
    found = benchmarks.softmax.measure(effort(), Problem(operation, "float64", 16))
    by_method = {row["method"]: row for row in found}
    assert list(by_method) == ["device copy", "auto"]
    moved = {"device copy": 2, "auto": problems.SOFTMAX_OPERATIONS[operation]}
    for method, row in by_method.items():
        assert row["rate"] * row["ms"] == pytest.approx(moved[method] * 2**13 * 8 / 1e9)


@pytest.mark.usefixtures("numpy_device")
def test_operands_of_gradients_belong_together() -> None:
    dy, y = benchmarks.softmax.arguments("softmax_vjp", (3, 5), "float64", 0)
    np.testing.assert_allclose(y.sum(axis=-1), 1)
    assert dy.shape == y.shape
    dlse, x, lse = benchmarks.softmax.arguments("logsumexp_vjp", (3, 5), "float64", 0)
    np.testing.assert_allclose(lse, np.log(np.exp(x).sum(axis=-1)))
    assert dlse.shape == lse.shape


@pytest.mark.usefixtures("numpy_device")
def test_a_run_in_parts_fills_one_file(tmp_path: Path) -> None:
    path = tmp_path / "no-gpu" / "softmax.csv"
    benchmarks.softmax.report(effort(lengths={"softmax": [16, 64]}), tmp_path)
    before = [row for row in rows.read_rows(path) if row["N"] == "16"]
    again = effort(lengths={"softmax": [64], "log_softmax": [16]})
    benchmarks.softmax.report(again, tmp_path, append=True)
    found = rows.read_rows(path)
    assert [row for row in found if (row["operation"], row["N"]) == ("softmax", "16")] == before
    counts = {n: sum(row["N"] == n for row in found) for n in ("16", "64")}
    assert counts == {"16": len(before) + 2, "64": len(before)}
    benchmarks.softmax.report(again, tmp_path)
    assert {(row["operation"], row["N"]) for row in rows.read_rows(path)} == {
        ("softmax", "64"),
        ("log_softmax", "16"),
    }


@pytest.mark.usefixtures("numpy_device")
def test_rows_side_by_side_are_measured(tmp_path: Path) -> None:
    across = {"lengths": {"softmax": [16], "softmax_vjp": [16]}, "axis": 0, "methods": ["auto"]}
    benchmarks.softmax.report(effort(lengths={"softmax": [16]}), tmp_path)
    benchmarks.softmax.report(effort(**across), tmp_path, append=True)
    found = rows.read_rows(tmp_path / "no-gpu" / "softmax.csv")
    assert {row["axis"] for row in found if row["method"] == "naive"} == {"-1"}
    first = [row for row in found if row["axis"] == "0"]
    assert [(row["operation"], row["method"], row["peer"]) for row in first] == [
        ("softmax", "device copy", "device copy"),
        ("softmax", "auto", "device copy"),
        ("softmax", "scipy.special.softmax", "device copy"),
        ("softmax", "auto", "scipy.special.softmax"),
        ("softmax_vjp", "device copy", "device copy"),
        ("softmax_vjp", "auto", "device copy"),
    ]
    target = benchmarks.softmax.target
    assert target(Problem("softmax", "float32", 4096, 0), "auto", "device copy", 0.79)[1]
    assert not target(Problem("softmax", "float32", 8192, 0), "auto", "device copy", 0.5)[1]
    assert target(Problem("softmax_vjp", "float32", 512, 0), "auto", "device copy", 1) == ("", "")


@pytest.mark.usefixtures("numpy_device")
def test_a_run_can_be_narrowed(tmp_path: Path) -> None:
    benchmarks.softmax.main(
        [
            *("--results", str(tmp_path), "--elements", "1024", "--window", "1e-4"),
            *("--rounds", "2", "--operations", "softmax", "--lengths", "16"),
            *("--dtypes", "float64", "--methods", "auto", "online", "--peers"),
        ]
    )
    found = rows.read_rows(tmp_path / "no-gpu" / "softmax.csv")
    assert [row["method"] for row in found] == ["device copy", "auto", "online"]
    assert [x.name for x in benchmarks.softmax.named(["torch"], "softmax", 0)] == ["torch"]


def test_kernels_are_compiled_for_the_rows_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cupy")
    from cuflash.device import compiler

    def warmed(*problem: object) -> set[str]:
        kernels: list[compiler.KernelName] = []
        monkeypatch.setattr(compiler, "warm", kernels.extend)
        device.warm_softmax([Problem(*problem)], ["auto"], problems.SOFTMAX_ELEMENTS)
        return {kernel.source for kernel in kernels}

    monkeypatch.setattr(device, "limits", lambda: H200)
    assert warmed("softmax", "float32", 2**20) == {"softmax/stream.cu"}
    assert warmed("softmax", "float32", 2**21) == {"softmax/online.cu"}
    assert warmed("softmax", "float32", 2**24) == {"softmax/split.cu"}
    assert warmed("softmax_vjp", "float32", 512, 0) == {"softmax/columns.cu"}
    regimes = [
        device.softmax_regime("float32", 2**29 // n, n) for n in (4, 2**15, 2**16, 2**18, 2**24)
    ]
    assert regimes == ["short", "fused", "stream", "stream", "split"]
    assert device.softmax_regime("float32", 2**20, 512, 0) == "columns"


def test_time_over_fused_has_its_bounds() -> None:
    def target(name: str, peer: str, speedup: float, dtype: str = "float32") -> tuple:
        return benchmarks.softmax.target(Problem("softmax", dtype, 4096), name, peer, speedup)

    assert target("naive", "fused", 1 / 2.2) == ("1.7 to 2.3 times as long", True)
    assert target("online", "fused", 1 / 1.6)[1] is False
    assert target("online", "fused", 1 / 1.2, "float64") == ("", "")
    assert target("online", "device copy", 0.7) == ("", "")


@pytest.mark.parametrize(
    ("operation", "dtype", "n", "share"),
    [
        ("softmax", "float32", 64, None),
        ("softmax", "float32", 128, 0.97),
        ("log_softmax", "bfloat16", 2**16, 0.97),
        ("softmax", "float16", 2**17, 0.95),
        ("softmax", "float32", 2**19, 0.90),
        ("softmax", "float32", 2**21, None),
        ("softmax", "float64", 2**17, 0.90),
        ("softmax", "float64", 2**18, 0.80),
        ("softmax_vjp", "float32", 2**16, 0.95),
        ("log_softmax_vjp", "float16", 2**17, None),
        ("softmax_vjp", "float64", 1024, None),
        ("logsumexp", "float32", 1024, None),
    ],
)
def test_shares_of_the_copy(operation: str, dtype: str, n: int, share: float | None) -> None:
    assert problems.softmax_share(operation, dtype, n) == share
    problem = Problem(operation, dtype, n)
    if share is None:
        assert benchmarks.softmax.target(problem, "auto", "device copy", 0.1) == ("", "")
    else:
        near = share - problems.TARGET_SLACK
        assert benchmarks.softmax.target(problem, "auto", "device copy", near) == (share, True)
        assert benchmarks.softmax.target(problem, "auto", "device copy", near - 0.01)[1] is False
    assert benchmarks.softmax.target(problem, "auto", "torch.compile", 0.96) == (0.98, False)
    assert benchmarks.softmax.target(problem, "fused", "device copy", 0.1) == ("", "")


@pytest.mark.usefixtures("numpy_device")
def test_method_that_cannot_run_is_left_out() -> None:
    x = np.ones((2, 3))
    assert benchmarks.softmax.calls_by("cluster", "softmax", [(x,)]) == []
    (call,) = benchmarks.softmax.calls_by("naive", "softmax", [(x,)])
    np.testing.assert_allclose(call(), 1 / 3)


def test_what_can_be_measured_is_covered() -> None:
    grid = benchmarks.softmax.FULL.grid()
    assert len(set(grid)) == len(grid) == 4 * (23 + 5 * 5)
    assert {problem.operation for problem in grid} == set(OPERATIONS)
    quick = benchmarks.softmax.QUICK.grid()
    assert all(problem in grid or problem.n == 4096 for problem in quick)
    assert "torch.compile" not in [peer.name for peer in benchmarks.softmax.ready("softmax", -1)]
    assert "torch.compile" in [peer.name for peer in softmax_peers.softmax_peers("softmax")]


@pytest.mark.parametrize("axis", [-1, 0])
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.usefixtures("numpy_device")
def test_peers_compute_the_same(operation: str, axis: int, monkeypatch: pytest.MonkeyPatch) -> None:
    operands = benchmarks.softmax.arguments(operation, (4, 33), "float64", 0, axis)
    monkeypatch.setitem(sys.modules, "cupy", np)
    expected = benchmarks.softmax.calls_by("auto", operation, [operands], axis)[0]()
    formula, torch = (
        peer
        for peer in softmax_peers.softmax_peers(operation, axis, compiled=False)
        if peer.library != "cupyx"  # which has no CPU
    )
    for peer in (formula, torch) if torch.installed else (formula,):
        np.testing.assert_allclose(np.asarray(peer.make(*operands)()), expected, atol=1e-14)


# ---------------------------------------------------------------------------------------- figures


def rate(dtype: str, method: str, n: int, share: float, regime: str = "fused") -> rows.Row:
    """Return a row of softmax.csv against the copy, as text, as it is read."""
    found = {
        "operation": "softmax",
        "method": method,
        "dtype": dtype,
        "N": n,
        "axis": "-1",
        "regime": regime,
        "rate": 4.2 * share,
        "peer": "device copy",
        "speedup": share,
        "lower": share - 0.01,
        "upper": share + 0.01,
        "machine": "NVIDIA H200",
    }
    return {name: str(value) for name, value in found.items()}


def test_figure_has_a_panel_for_each_dtype_and_a_line_for_each_method(tmp_path: Path) -> None:
    drawn = [
        rate(dtype, method, n, 0.5 + 0.1 * i)
        for dtype in ("bfloat16", "float32")
        for i, method in enumerate(("device copy", "naive", "auto"))
        for n in (1024, 128)
    ]
    others = {"operation": "log_softmax"}, {"axis": "0"}
    figure = charts.softmax_rates(
        [*drawn, *({**drawn[0], **other, "dtype": "float64"} for other in others)]
    )
    assert [axes.get_title() for axes in figure.axes] == ["softmax, float32", "softmax, bfloat16"]
    (line,) = [x for x in figure.axes[0].lines if x.get_label() == "naive"]
    np.testing.assert_allclose(line.get_xydata(), [(128, 4.2 * 0.6), (1024, 4.2 * 0.6)])
    assert {x.get_label() for x in figure.axes[1].lines} == {"device copy", "naive", "auto"}

    path = rows.write_rows(tmp_path, "softmax", drawn, {"machine": "GPU"})
    benchmarks.softmax.main(["--plot", "--results", str(tmp_path)])
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_regimes_meet_between_row_lengths() -> None:
    taken = [(128, "fused"), (512, "fused"), (2048, "cluster"), (8192, "cluster"), (32768, "fused")]
    assert charts.regimes(taken) == [
        ("fused", 128, 1024),
        ("cluster", 1024, 16384),
        ("fused", 16384, 32768),
    ]
    assert charts.regimes([]) == []


@pytest.mark.usefixtures("numpy_device")
def test_without_matplotlib_there_is_the_table_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    benchmarks.softmax.report(effort(lengths={"softmax": [16]}), tmp_path)
    assert sorted(path.name for path in tmp_path.glob("*/*")) == ["softmax.csv"]
    (line,) = [x for x in capsys.readouterr().out.splitlines() if "matplotlib" in x]
    assert "no figure" in line
