"""Precise attention: the benchmark's rows and errors, on NumPy arrays."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from benchmarks import precise
from cuflash import reference
from cuflash.bench import peers, timing
from cuflash.bench.problems import AttentionShape


def test_every_problem_is_there_once() -> None:
    assert len(set(precise.SHAPES)) == len(precise.SHAPES)
    wanted = itertools.product(("float32", "float64"), (32, 64, 128), (256, 1024, 4096, 16384))
    assert {(x.dtype, x.d, x.tokens) for x in precise.SHAPES} >= set(wanted)
    assert AttentionShape(4096, 1, 128, 64, dtype="float64") in precise.SHAPES


@pytest.mark.usefixtures("numpy_device")
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(("dtype", "most"), [("float32", 1e-5), ("float64", 1e-14)])
def test_rows_and_errors(
    backward: bool, dtype: str, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = precise.formula_vjp if backward else precise.formula
    rough = peers.Peer("rough", "numpy", lambda *arrays: lambda: rounded(make(*arrays)()))
    right = peers.Peer("right", "numpy", make)
    absent = peers.Peer("absent", "no_such_library", make)
    monkeypatch.setitem(precise.PEERS, backward, (right, absent, rough))
    shape = AttentionShape(2, 2, 70, 8, dtype=dtype)
    found = precise.measure(
        shape, backward, timing.HostClock(), method="tiled", rounds=2, window=1e-4
    )
    assert [row["peer"] for row in found] == ["right", "rough"]
    for row in found:
        assert row["pass"] == ("backward" if backward else "forward")
        assert row["rate"] * row["ms"] == pytest.approx(row["peer rate"] * row["peer ms"])
        assert 0 < row["error"] < most
    assert 0 < found[0]["peer error"] < most
    assert 1e-4 < found[1]["peer error"] < 1e-2


def rounded(result: object) -> object:
    if isinstance(result, tuple):
        return tuple(x.astype(np.float16).astype(x.dtype) for x in result)
    assert isinstance(result, np.ndarray)
    return result.astype(np.float16).astype(result.dtype)


@pytest.mark.usefixtures("numpy_device")
def test_without_a_peer_the_row_stands_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(precise.PEERS, False, ())
    shape = AttentionShape(1, 1, 4, 8)
    (row,) = precise.measure(
        shape, False, timing.HostClock(), method="tiled", rounds=1, window=1e-4
    )
    assert row["peer"] == "cuflash"
    assert row["speedup"] == 1


def test_the_formula_is_the_oracles() -> None:
    dout, q, k, v = np.random.default_rng(0).normal(size=(4, 2, 3, 10, 4))
    np.testing.assert_allclose(
        precise.formula(q, k, v)(), reference.attention(q, k, v)[0], rtol=1e-12
    )
    wanted = reference.attention_vjp(dout, q, k, v)
    for x, y in zip(precise.formula_vjp(dout, q, k, v)(), wanted[:3], strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-11, atol=1e-13)
