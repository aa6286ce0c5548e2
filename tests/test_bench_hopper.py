"""What attention on Hopper must not slow down for: the benchmark's rows, on NumPy arrays."""

from __future__ import annotations

import math

import numpy as np
import pytest

import benchmarks.attention_hopper as hopper
import cuflash
from cuflash.bench import device, timing
from cuflash.bench.problems import AttentionShape

SHAPE = AttentionShape(2, 8, 24, 16, True, "bfloat16")


@pytest.mark.usefixtures("numpy_device")
def test_calls_are_what_their_names_say() -> None:
    calls = hopper.calls_of(SHAPE, "tiled")
    assert set(calls) == {hopper.PLAIN, *hopper.TARGETS}
    q, k, v = calls[hopper.PLAIN].args
    plain = calls[hopper.PLAIN]()
    np.testing.assert_array_equal(calls["view"](), plain)
    assert calls["view"].args[0].strides != q.strides
    half = calls["float16"]()
    assert half.dtype == np.float16
    np.testing.assert_allclose(half.astype(float), plain.astype(float), atol=0.05)
    assert calls["grouped"].args[1].shape == (2, 2, 24, 16)
    # Under no mask, scores with the first keys are the largest.
    growing = calls["growing"].args[1].astype(float)
    sizes = abs(growing / k.astype(float)).mean((0, 1, 3))
    assert (np.diff(sizes) < 0).all()
    assert sizes[0] == pytest.approx(hopper.GROWTH[0], rel=0.01)
    expected = cuflash.flash_attention(q, k[:, :2].repeat(4, 1), v[:, :2].repeat(4, 1), causal=True)
    np.testing.assert_array_equal(calls["grouped"](), expected)


class HalfClock(timing.HostClock):
    """Sees a clock of half the rate while float16 runs, which comes second."""

    def seconds(self, calls, count, start):
        dtype = calls[0].args[0].dtype
        self.megahertz = 500.0 if dtype == np.float16 else 1000.0
        return count * (2e-3 if dtype == np.float16 else 1e-3)


@pytest.mark.usefixtures("numpy_device")
def test_another_dtype_is_held_against_cycles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "clock", HalfClock)
    found = {row["call"]: row for row in hopper.measure(SHAPE, "tiled", rounds=2, window=1e-3)}
    assert found["float16"]["speedup"] == pytest.approx(0.5)
    assert found["float16"]["by cycles"] == pytest.approx(1)
    assert found["float16"]["met"]
    assert found["view"]["met"]
    assert found[hopper.PLAIN]["target"] == ""


def test_first_calls_share_a_cache_that_is_empty_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    program = (
        "import os, pathlib, sys\n"
        "assert sys.pycache_prefix and not sys.dont_write_bytecode\n"
        "mark = pathlib.Path(os.environ['CUPY_CACHE_DIR'], 'mark')\n"
        "print(0.05 if mark.exists() else 2.5)\n"
        "mark.touch()\n"
    )
    found = hopper.first_calls(program)
    assert [row["s"] for row in found] == [2.5, 0.05]
    assert [row["met"] for row in found] == [True, True]
    monkeypatch.setattr(hopper, "FIRST_CALLS", dict.fromkeys(hopper.FIRST_CALLS, 0.01))
    assert not any(row["met"] for row in hopper.first_calls(program))
    assert not math.isnan(found[0]["target"])
