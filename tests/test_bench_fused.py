"""The benchmark of fused chains: what it measures, its targets and peers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import benchmarks.fused
from benchmarks.fused import COPY, FUSED, UNFUSED, Effort
from cuflash.bench import fused_peers, peers, problems, rows
from cuflash.bench.problems import Norm, Product

SMALL = (Norm((2, 3, 16), "float32"), Norm((5, 16), backward=True), Product(4, 5, 6, "float64"))


def numpy_product(a: Any, b: Any, bias: Any) -> peers.Call:
    return lambda: np.maximum(a @ b + bias, 0)


@pytest.mark.usefixtures("numpy_device")
def test_fused_benchmark(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = peers.Peer(fused_peers.PRODUCT_ALONE, "numpy", numpy_product)
    monkeypatch.setattr(fused_peers, "product_peers", lambda compiled: (alone,))
    monkeypatch.setattr(fused_peers, "norm_peers", lambda compiled: ())
    effort = Effort(SMALL, compiled=False, rounds=2, window=1e-4)
    benchmarks.fused.report(effort, tmp_path)
    found = rows.read_rows(tmp_path / "no-gpu" / "fused.csv")
    pairs = [(row["operation"], row["method"], row["peer"]) for row in found]
    assert pairs == [
        ("dropout_bias_layer_norm", COPY, COPY),
        ("dropout_bias_layer_norm", FUSED, COPY),
        ("dropout_bias_layer_norm", UNFUSED, COPY),
        ("dropout_bias_layer_norm", FUSED, UNFUSED),
        ("dropout_bias_layer_norm_vjp", COPY, COPY),
        ("dropout_bias_layer_norm_vjp", FUSED, COPY),
        ("matmul_bias_activation", FUSED, fused_peers.PRODUCT_ALONE),
        ("matmul_bias_activation", UNFUSED, fused_peers.PRODUCT_ALONE),
        ("matmul_bias_activation", fused_peers.PRODUCT_ALONE, fused_peers.PRODUCT_ALONE),
        ("matmul_bias_activation", FUSED, UNFUSED),
    ]
    assert {row["target"] for row in found} == {""}
    assert "out of time" not in capsys.readouterr().out
    benchmarks.fused.report(effort, None, seconds=1e-6)
    assert "problems are not measured" in capsys.readouterr().out


@pytest.mark.usefixtures("numpy_device")
def test_rates_count_each_operand_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_peers, "product_peers", lambda compiled: ())
    effort = Effort((), compiled=False, rounds=1, window=1e-4)
    moved = 5 * 16 * 2
    for row in benchmarks.fused.measure(effort, SMALL[1]):
        trips = 2 if row["method"] == COPY else 3
        assert row["rate"] * row["ms"] == pytest.approx(trips * moved / 1e9)
    for row in benchmarks.fused.measure(effort, SMALL[2]):
        assert row["rate"] * row["ms"] == pytest.approx(2 * 4 * 5 * 6 / 1e9)


def test_targets() -> None:
    target, first = benchmarks.fused.target, problems.PRODUCTS[0]
    assert target(problems.NORMS[0], FUSED, COPY, 0.92) == (0.93, True)
    assert target(problems.NORMS[0], UNFUSED, COPY, 0.3) == ("", "")
    assert target(problems.NORMS[1], FUSED, COPY, 0.3) == ("", "")
    assert target(first, FUSED, fused_peers.PRODUCT_ALONE, 0.7) == (0.8, False)
    assert target(first, FUSED, fused_peers.PRODUCT_STEPS, 0.7) == ("", "")
    assert target(problems.PRODUCTS[1], FUSED, fused_peers.PRODUCT_STEPS, 1.2) == (1.0, True)
    assert target(problems.PRODUCTS[2], FUSED, fused_peers.EPILOGUE, 0.79) == (0.8, True)


def test_peers_compute_the_chains() -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    a, b, bias = rng.standard_normal((3, 4)), rng.standard_normal((4, 5)), rng.standard_normal(5)
    for peer in fused_peers.product_peers(compiled=False)[1:]:
        got = peer.make(a, b, bias)()
        np.testing.assert_allclose(got.numpy(), np.maximum(a @ b + bias, 0))
    for peer in fused_peers.norm_peers(compiled=False):
        y = peer.make(rng.standard_normal((3, 40)), *rng.standard_normal((3, 40)))()
        assert isinstance(y, torch.Tensor)
        assert y.shape == (3, 40)


@pytest.mark.usefixtures("numpy_device")
def test_tables_of_the_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = peers.Peer(fused_peers.PRODUCT_ALONE, "numpy", numpy_product)
    monkeypatch.setattr(fused_peers, "product_peers", lambda compiled: (alone,))
    monkeypatch.setattr(fused_peers, "norm_peers", lambda compiled: ())
    benchmarks.fused.report(Effort(SMALL, compiled=False, rounds=1, window=1e-4), tmp_path)
    page = tmp_path / "page.md"
    names = ("norms", "products")
    page.write_text("".join(f"<!-- table: {name} -->\n<!-- /table -->\n" for name in names))
    benchmarks.fused.main(["--document", str(page), "--results", str(tmp_path)])
    lines = page.read_text().splitlines()
    assert lines[1] == "| shape | dtype | fused | unfused |"
    assert lines[3].startswith("| 2 x 3 x 16 | float32 | ")
    assert lines[4].startswith("| 5 x 16 | bfloat16, gradients | ")
    assert lines[7] == "| shape | dtype | fused | unfused | cuBLAS alone |"
    assert set(benchmarks.fused.tables([])) == {"norms", "products"}


def test_the_document_has_the_tables() -> None:
    text = (Path(__file__).parent.parent / "docs" / "fused-chains.md").read_text("utf-8")
    for name in benchmarks.fused.tables([]):
        assert f"<!-- table: {name} -->" in text
