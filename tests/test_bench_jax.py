"""The benchmark inside JAX: what it compares, on the CPU."""

import time

import numpy as np
import pytest

pytest.importorskip("jax")

import benchmarks.jax as benchmark
from cuflash.bench import problems
from cuflash.bench.problems import AttentionShape


@pytest.mark.usefixtures("numpy_device")
@pytest.mark.parametrize("backward", [False, True])
def test_rows_of_attention(backward):
    shape = AttentionShape(1, 2, 16, 8, True, "float32")
    clock = benchmark.Clock(lambda: None, lambda: 1000.0)
    found = benchmark.measure(shape, backward, clock, rounds=2, window=1e-4)
    rows = {row["peer"]: row for row in found}
    assert list(rows) == [benchmark.CUPY, "JAX xla", "JAX xla, highest"]
    assert rows[benchmark.CUPY]["target"] == 0.95
    assert rows["JAX xla"]["target"] == ""
    row = rows["JAX xla"]
    flops = problems.attention_flops(shape) * (3.5 if backward else 1)
    assert row["rate"] == pytest.approx(flops / row["ms"] / 1e9)
    assert row["pass"] == ("forward, backward" if backward else "forward")
    assert row["scratch MiB"] < row["peer scratch MiB"]
    assert row["SM MHz"] == 1000


@pytest.mark.usefixtures("numpy_device")
def test_all_compute_the_same():
    shape = AttentionShape(1, 2, 16, 8, True, "float32")
    results = [c.call() for c in benchmark.competitors(shape, False).values()]
    for result in results:
        # On CuPy arrays heads come before tokens.
        by_token = result if result.shape == (1, 16, 2, 8) else result.swapaxes(1, 2)
        np.testing.assert_allclose(by_token, results[0], atol=1e-6)


@pytest.mark.usefixtures("numpy_device")
def test_cudnn_is_left_out_where_it_cannot_run(capsys):
    shape = AttentionShape(1, 2, 16, 8, False, "bfloat16")
    assert list(benchmark.competitors(shape, False)) == [benchmark.OURS, benchmark.CUPY]
    assert "JAX cudnn is left out" in capsys.readouterr().out


def test_host_time_of_the_handler(monkeypatch):
    found = benchmark.measure_handlers("cpu", count=3)
    calls = [row["call"].split(",")[0] for row in found[:6:2]]
    assert calls == ["attention", "gradients", "softmax"]
    assert [row["places"] for row in found[:2]] == ["seen", "new"]
    from cuflash.jax import host

    slow = host.execute

    def execute(*call):
        time.sleep(0.02)
        slow(*call)

    monkeypatch.setattr(host, "execute", execute)
    found = benchmark.measure_handlers("cpu", count=3)
    assert all(row["us"] > 20_000 and not row["met"] for row in found)


def test_host_time_of_the_handler_is_all_of_it(monkeypatch):
    from cuflash.jax import ffi_abi

    read = ffi_abi.addresses

    def addresses(frame):
        time.sleep(0.02)
        return read(frame)

    monkeypatch.setattr(ffi_abi, "addresses", addresses)
    found = benchmark.measure_handlers("cpu", count=3)
    assert all(row["us"] > 20_000 for row in found)
