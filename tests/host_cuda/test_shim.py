"""The shim itself: it runs CUDA as CUDA runs, and reports what CUDA would hide."""

import ml_dtypes
import numpy as np
import pytest

from cuflash.device.compiler import C_TYPES, KernelName, ParameterBlock
from tests.host_cuda import builder

pytestmark = pytest.mark.skipif(not builder.available(), reason="no C++ compiler")

PARAMETERS = ParameterBlock(
    "probe::Parameters", {"data": np.uintp, "result": np.uintp, "count": np.int64}
)


def run(kernel, data, result, count=0, *, grid=1, block=32, shared_bytes=0, **options):
    """Run a kernel of probe.cu and return `result`."""
    block_of = PARAMETERS.zeros()
    block_of["data"], block_of["result"] = data.ctypes.data, result.ctypes.data
    block_of["count"] = count
    host = builder.HostKernel(KernelName("probe.cu", f"probe::{kernel}"))
    host.launch(grid, block, shared_bytes, block_of, **options)
    return result


NOTHING = np.zeros(1)


def test_every_thread_of_every_block_runs_once():
    result = np.zeros(2 * 3 * 2 * 4 * 5 * 3, np.int32)
    run("number", NOTHING, result, grid=(2, 3, 2), block=(4, 5, 3))
    np.testing.assert_array_equal(result, np.arange(result.size))


@pytest.mark.parametrize("order", builder.HostKernel.ORDERS)
def test_warp_collectives(order):
    lane = np.arange(32)
    result = run("collectives", NOTHING, np.zeros((32, 5), np.int32), order=order)
    np.testing.assert_array_equal(result[:, 0], lane ^ 5)
    np.testing.assert_array_equal(result[:, 1], np.where(lane + 3 < 32, lane + 3, lane))
    np.testing.assert_array_equal(result[:, 2], np.where(lane >= 3, lane - 3, lane))
    np.testing.assert_array_equal(result[:, 3], lane // 8 * 8 + 2)
    np.testing.assert_array_equal(result[:, 4].view(np.uint32), 0xAAAAAAAA)


@pytest.mark.parametrize("order", builder.HostKernel.ORDERS)
def test_groups_of_lanes_go_their_own_ways(order):
    result = run("groups", NOTHING, np.zeros(32), order=order)
    sums = np.arange(32).reshape(4, 8).sum(axis=1) * 8.0 ** np.arange(4)
    np.testing.assert_array_equal(result, sums.repeat(8))


def test_shared_memory_of_each_block_is_nan_at_first():
    result = run(
        "uninitialised", NOTHING, np.zeros((3, 64, 2), np.int32), grid=3, block=64, shared_bytes=256
    )
    assert result.all()


@pytest.mark.parametrize("order", builder.HostKernel.ORDERS)
def test_a_missing_barrier_shows_in_any_order(order):
    x = np.arange(64, dtype=np.float32)
    options = {"count": 64, "block": 64, "shared_bytes": 256, "order": order}
    result = run("reverse<true>", x, np.zeros_like(x), **options)
    np.testing.assert_array_equal(result, x[::-1])
    assert np.isnan(run("reverse<false>", x, np.zeros_like(x), **options)).any()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("kReturn", "thread 0 has returned while thread 16 waits at __syncthreads, line"),
        ("kBranch", "thread 0 waits at __syncthreads, line .* while thread 16 has returned"),
        ("kTwoBarriers", "thread 0 waits at __syncthreads, line .* while thread 16 waits"),
        ("kShuffle", "thread 0 waits for its warp, line .* while thread 16 has returned"),
        ("kMask", "reads a lane that does not take part"),
    ],
)
def test_divergence_is_an_error(kind, message):
    with pytest.raises(RuntimeError, match=message):
        run(f"diverge<probe::{kind}>", NOTHING, np.zeros(32, np.int32))


def test_source_that_does_not_compile_is_an_error_with_the_compilers_message():
    with pytest.raises(RuntimeError, match="not_there"):
        run("not_there", NOTHING, NOTHING)


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_16_bit_conversions(name, rng):
    dtype = np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
    x = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    launch = {"count": x.size, "grid": 256, "block": 256}
    wide = run(f"widen_all<{C_TYPES[name]}>", x, np.zeros(x.size, np.float32), **launch)
    np.testing.assert_array_equal(wide, x.astype(np.float32))

    # All magnitudes, and the points halfway between two neighbours.
    bits = rng.integers(0, 1 << 32, 1 << 15, dtype=np.uint64).astype(np.uint32).view(np.float32)
    ties = (wide[: 1 << 14].astype(np.float64) + wide[1 : (1 << 14) + 1]) / 2
    y = np.concatenate([bits, ties.astype(np.float32), -ties.astype(np.float32)])
    result = run(f"narrow_all<{C_TYPES[name]}>", y, np.zeros(y.size, dtype), **launch)
    with np.errstate(all="ignore"):
        expected = y.astype(dtype).astype(np.float32)
    np.testing.assert_array_equal(result.astype(np.float32), expected)
