"""Strips of rows side by side, by one block: the ring, pieces of columns, strips cut short.

As in the tests of streamed rows: clusters are a GPU's, and copies of the shim arrive late.
"""

import numpy as np
import pytest

from cuflash import reference
from cuflash.device.compiler import KernelName, Launch
from cuflash.device.plans import C_TYPES, plan_softmax
from cuflash.device.softmax_regimes import STAGE_BYTES
from cuflash.device.softmax_rows import SOFTMAX_PARAMETERS
from cuflash.problem import FLOATS, ArraySpec, SoftmaxProblem, accumulator
from cuflash.testing.bounds import assert_softmax_close, expect_softmax
from tests.host_cuda import builder
from tests.host_cuda.builder import Edit
from tests.host_cuda.engine import H200, HostExecutor
from tests.host_cuda.far_scores import MIDDLES, around, assert_accurate

pytestmark = pytest.mark.skipif(not builder.available(), reason="no C++ compiler")

WARPS = 2
#: The neighbouring rows of a lane, and the columns that it holds of them.
SHAPES = {"float64": (1, 32), "float32": (2, 32), "float16": (2, 64), "bfloat16": (4, 32)}
WIDTH = 64  # of a strip in float32
OPERATIONS = {"softmax": "Softmax", "log_softmax": "LogSoftmax"}
#: Of a warp: none, one, a stage, and all that there is room for.
COLUMNS = (1, 2, 3, 15, 16, 17, 18, 31, 33, 62, 63, 64)


def strips(x, operation="softmax", blocks=2, stages=3, **options):
    """Return what the kernel makes of the columns of a matrix, which are its rows."""
    problem = SoftmaxProblem.of(operation, {"x": x}, 0)
    y = np.full_like(x, np.nan)
    plan = plan_softmax(problem, (ArraySpec.of(y),), True, H200)
    block = plan.parameters([x.ctypes.data, y.ctypes.data], 0).view(SOFTMAX_PARAMETERS.dtype).copy()
    dealt = np.full(4, -1, np.int32)
    block["stages"], block["states"] = stages, dealt.ctypes.data
    item, (rows, held) = accumulator(x.dtype), SHAPES[x.dtype.name]
    types = f"{C_TYPES[x.dtype.name]}, cuflash::{OPERATIONS[operation]}<{C_TYPES[item.name]}>"
    name = f"cuflash::strips<{types}, {rows}, {held}, {WARPS}, 1>"
    width, state = 32 * rows, 2 * item.itemsize
    exchange, states = 32 + 2 * width * state, (WARPS * (width + 1) + width) * state
    shared = sum(-(-n // 128) * 128 for n in (exchange, states))
    shared += WARPS * stages * (STAGE_BYTES + 8)
    executor = HostExecutor(**options)
    for launch in (
        Launch(KernelName("softmax/stream.cu", "cuflash::begin_dealing"), 1, 1),
        Launch(KernelName("softmax/strips.cu", name), blocks, 32 * WARPS, shared),
    ):
        executor.launch(launch, block)
    return y


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("order", builder.HostKernel.ORDERS)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_columns(operation, order, dtype, rng):
    """Rows of -inf, of NaN, with scores that rise; more strips than blocks know of, and fewer."""
    few, width = 16 // dtype.itemsize, 32 * SHAPES[dtype.name][0]
    for columns in COLUMNS:
        for rows in (8, width - few, width, width + few, 9 * width + few):
            x = (4 * rng.normal(size=(columns, rows))).astype(dtype)
            x[:, 1], x[: columns // 2, 2], x[-1, 3] = -np.inf, -np.inf, np.nan
            x[:, -1] = np.sort(x[:, -1])
            y = strips(x, operation, order=order)
            assert_softmax_close(y, expect_softmax(operation, x, 0), name=operation)


def test_rows_of_infinity_are_not_numbers(rng):
    x = rng.normal(size=(40, 2 * WIDTH)).astype(np.float32)
    x[7, 5] = np.inf
    y = strips(x)
    assert np.isnan(y[:, 5]).all()
    clean = np.delete(x, 5, 1)
    np.testing.assert_allclose(np.delete(y, 5, 1), reference.softmax(clean, 0), rtol=1e-5)


@pytest.mark.parametrize("middle", MIDDLES)
def test_float64_is_as_accurate_far_from_zero(middle, rng):
    x = np.ascontiguousarray(around(middle, (128, 60), rng).T)
    assert_accurate(strips(x).T, x.T)


@pytest.mark.parametrize("stages", [1, 2, 7])
def test_rings_of_other_sizes(stages, rng):
    x = rng.normal(size=(50, 7 * WIDTH)).astype(np.float32)
    np.testing.assert_allclose(strips(x, stages=stages), reference.softmax(x, 0), rtol=1e-5)


def test_bits_do_not_depend_on_the_other_rows(rng):
    x = rng.normal(size=(64, 3 * WIDTH)).astype(np.float32)
    alone = np.ascontiguousarray(x[:, WIDTH:])
    np.testing.assert_array_equal(strips(alone), strips(x)[:, WIDTH:])


STRIPS = "softmax/strips.cu"
FAULTS = {
    "a warp's states read before all are there": Edit(
        STRIPS, "        __syncthreads();\n        // Lanes", "        // Lanes"
    ),
    "a piece that nobody copies": Edit(STRIPS, "if (lane < units) {", "if (lane < units - 1) {"),
    "columns past the end": Edit(STRIPS, "j < left, lowest<T>()", "j < left, T(0)"),
    "united states read before all are there": Edit(
        STRIPS, "        __syncthreads();\n\n        const int64 row", "        const int64 row"
    ),
    "states of the next row": Edit(
        STRIPS, "kPitch + warp * kEach + j]", "kPitch + warp * kEach + (j ^ 1)]"
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_caught(fault, rng):
    x = rng.normal(size=(50, 5 * WIDTH + 4)).astype(np.float32)
    try:
        y = strips(x, edits=[FAULTS[fault]], order="random")
    except RuntimeError:  # a barrier without an arrival
        return
    assert not np.allclose(y, reference.softmax(x, 0), rtol=1e-5)
