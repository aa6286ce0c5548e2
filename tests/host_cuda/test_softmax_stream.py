"""Streamed rows, by one block: the ring, rows in registers and shared memory, rows cut short.

Clusters are a GPU's. Copies of the shim arrive as late as they may, when they are waited for, and
what they will overwrite is NaN until then.
"""

import ml_dtypes
import numpy as np
import pytest

from cuflash import reference
from cuflash.device.compiler import C_TYPES, KernelName, Launch
from cuflash.device.plans import plan_softmax
from cuflash.device.softmax_regimes import STAGE_BYTES
from cuflash.device.softmax_rows import SOFTMAX_PARAMETERS
from cuflash.problem import ArraySpec, SoftmaxProblem, accumulator
from cuflash.testing.bounds import assert_softmax_close, expect_softmax, expect_softmax_vjp
from tests.host_cuda import builder
from tests.host_cuda.builder import Edit
from tests.host_cuda.engine import H200, HostExecutor
from tests.host_cuda.far_scores import MIDDLES, around, assert_accurate

pytestmark = pytest.mark.skipif(not builder.available(), reason="no C++ compiler")

DTYPES = ["float64", "float32", "float16", "bfloat16"]
OPERATIONS = {
    "softmax": "Softmax",
    "log_softmax": "LogSoftmax",
    "softmax_vjp": "SoftmaxVjp",
    "log_softmax_vjp": "LogSoftmaxVjp",
}
WARPS, HELD, STAGES = 2, 4, 4
#: In chunks: a lane's, a line of 128 bytes, one warp's alone, a stage of each warp, all that a lane
#: holds, and with the rest that the ring has room for.
CHUNKS = (1, 8, 9, 15, 17, 63, 127, 255, 256, 257, 300, 511, 512, 513, 1023, 1024)


def stream(operation, inputs, blocks=2, stages=STAGES, **options):
    """Return what the kernel makes of rows."""
    named = dict(zip(("dy", "y") if "vjp" in operation else ("x",), inputs, strict=True))
    problem = SoftmaxProblem.of(operation, named, -1)
    out = np.full(inputs[0].shape, np.nan, inputs[0].dtype)
    plan = plan_softmax(problem, (ArraySpec.of(out),), True, H200)
    arrays = [np.require(a, requirements="A") for a in (*inputs, out)]
    block = plan.parameters([a.ctypes.data for a in arrays], 0).view(SOFTMAX_PARAMETERS.dtype)
    block = block.copy()
    dealt = np.full(4, -1, np.int32)
    block["stages"], block["states"] = stages, dealt.ctypes.data
    dtype = inputs[0].dtype
    types = f"{C_TYPES[dtype.name]}, cuflash::{OPERATIONS[operation]}"
    template = "stream_vjp" if "vjp" in operation else "stream"
    name = f"cuflash::{template}<{types}<{C_TYPES[accumulator(dtype).name]}>, {HELD}, {WARPS}, 1>"
    shared = 128 + WARPS * stages * (STAGE_BYTES + 8)
    executor = HostExecutor(**options)
    for launch in (
        Launch(KernelName("softmax/stream.cu", "cuflash::begin_dealing"), 1, 1),
        Launch(KernelName("softmax/stream.cu", name), blocks, 32 * WARPS, shared),
    ):
        executor.launch(launch, block)
    return out


def numbers(dtype):
    return np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


@pytest.mark.parametrize("order", builder.HostKernel.ORDERS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_rows(name, dtype, order, rng):
    """Rows of -inf, of NaN, with scores that rise; more rows than blocks, and fewer."""
    for chunks in CHUNKS:
        for rows in (1, 7):
            x = 4 * rng.normal(size=(rows, chunks * 16 // numbers(dtype).itemsize))
            x = x.astype(numbers(dtype))
            if rows > 1:
                x[1], x[2, : x.shape[1] // 2], x[3, -1], x[4, 0] = -np.inf, -np.inf, np.nan, np.inf
                x[4, 1::2], x[5] = -np.inf, np.sort(x[5])
            y = stream(name, (x,), order=order)
            assert_softmax_close(y, expect_softmax(name, x, -1), name=name)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_gradients(name, dtype, rng):
    for chunks in (c for c in CHUNKS if c <= 32 * HELD * WARPS):
        shape = (7, chunks * 16 // numbers(dtype).itemsize)
        x, dy = (rng.normal(size=shape).astype(numbers(dtype)) for _ in range(2))
        x[1], x[2, : shape[1] // 2] = -np.inf, -np.inf
        y = getattr(reference, name)(x).astype(x.dtype)
        dx = stream(f"{name}_vjp", (dy, y), order="random")
        assert_softmax_close(dx, expect_softmax_vjp(f"{name}_vjp", dy, y), name=name)
        assert not dx[1].any()


@pytest.mark.parametrize("middle", MIDDLES)
@pytest.mark.parametrize("chunks", [33, 1023])
def test_float64_is_as_accurate_far_from_zero(chunks, middle, rng):
    """In registers, and in the ring, too."""
    x = around(middle, (9, 2 * chunks), rng)
    assert_accurate(stream("softmax", (x,)), x)


@pytest.mark.parametrize("stages", [1, 2, 3, 32])
def test_rings_of_other_sizes(stages, rng):
    x = rng.normal(size=(9, (1 + min(stages, 5)) * 128 * WARPS * 4 - 4)).astype(np.float32)
    y = stream("softmax", (x,), stages=stages)
    np.testing.assert_allclose(y, reference.softmax(x), rtol=1e-5)


FEED, EXCHANGE = "softmax/feed.cuh", "softmax/exchange.cuh"
FAULTS = {
    "stages fetched before all have read them": Edit(FEED, "        __syncwarp();\n", ""),
    "a stage that is not given back": Edit("softmax/stream.cu", "feed.fetch(1);", ""),
    "parity that never turns": Edit(FEED, "parity_ ^= stage == last_;", ""),
    "a lane past the end": Edit(FEED, "if (has(s, j)) words", "words"),
    "a warp that hears itself alone": Edit(EXCHANGE, "visit(values[i]);", "visit(values[0]);"),
    "one buffer for all exchanges": Edit(EXCHANGE, "+ turn * kCount", ""),
    "rows that nobody is dealt": Edit(EXCHANGE, "atomicAdd(dealt_, 1)", "atomicAdd(dealt_, 2)"),
    "a row that is fetched before it is known": Edit(FEED, "++row_ < known_", "++row_ <= known_"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_caught(fault, rng):
    """By rows that the ring does not hold, or by such that it holds more of than are known."""
    long = rng.normal(size=(24, 3 * 128 * WARPS * 4 - 4)).astype(np.float32)
    for x in (long, long[:, :512].copy()):
        try:
            y = stream("softmax", (x,), edits=[FAULTS[fault]])
        except RuntimeError:  # a barrier without an arrival
            return
        if not np.allclose(y, reference.softmax(x), rtol=1e-5):
            return
    pytest.fail("the fault is not seen")
