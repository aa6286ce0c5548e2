"""What `auto` makes of contiguous rows on a GPU: short ones by a thread, long ones streamed."""

from dataclasses import replace

import cupy
import numpy as np
import pytest

import cuflash
from cuflash import reference
from cuflash.device.clusters import fitting_clusters
from cuflash.device.executor import CurrentDevice, device_limits
from cuflash.device.plans import plan_softmax
from cuflash.device.softmax import compute, launch_plan
from cuflash.device.softmax_regimes import (
    SHORT_LENGTHS,
    STREAM_SHAPES,
    STRIP_SHAPES,
    UNSTREAMED_BYTES,
    UNSTRIPPED_COLUMNS,
    stream_shape,
)
from cuflash.problem import BFLOAT16, FLOATS, ArraySpec, SoftmaxProblem
from tests.device.arrays import on_device

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels")]

BITS = {2: np.uint16, 4: np.uint32, 8: np.uint64}
#: Of a row, in the norm: the accuracy contract.
EPS = {"float64": 1e-14, "float32": 1e-6, "float16": 1e-3, "bfloat16": 8e-3}
#: The smallest number of a type, and so the rounding of what is near 0.
TINY = {"float64": 0.0, "float32": 1.4e-45, "float16": 6e-8, "bfloat16": 9.2e-41}
ROWS = 33


class FewClusters(CurrentDevice):
    """A GPU of two clusters, for which few rows are many."""

    def __init__(self, blocks):
        super().__init__()
        self.launched = []
        self.few = replace(device_limits(self.device), multiprocessors=2 * blocks)

    @property
    def limits(self):
        return self.few

    def launch(self, launch, parameters):
        self.launched.append(launch)
        super().launch(launch, parameters)


def bits(x):
    return x.view(BITS[x.dtype.itemsize])


def wide(x):
    """Return float64 of the same values."""
    if x.dtype == BFLOAT16:
        return (bits(x).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return x.astype(np.float64)


def upload(x, shift=0):
    """Return an array on the device, `shift` elements from where memory is aligned."""
    there = cupy.empty(x.size + shift, x.dtype)[shift:].reshape(x.shape)
    bits(there).set(bits(x))
    return there


def put(x, where, value):
    """Set elements of an array of any dtype."""
    bits(x)[where] = bits(np.array(value).astype(x.dtype))[()]


def matrix(base, rows, length, shift=0):
    """Return rows that begin at successive elements of `base`, `shift` elements into memory."""
    memory = cupy.empty(rows * length + shift, base.dtype)
    x = memory[shift:].reshape(rows, length)
    for row in range(rows):
        bits(x)[row] = bits(base)[row : row + length]
    return x


def run(operation, inputs, executor, out=None, where=None, axis=-1):
    """Return what an operation gives on an executor, in memory that was NaN."""
    names = ("dy", "y") if "vjp" in operation else ("x",)
    if out is None:
        out = cupy.empty_like(inputs[0])
        out.view(np.uint8).fill(0xFF)
    problem = SoftmaxProblem.of(operation, dict(zip(names, inputs, strict=True)), axis, where)
    compute(problem, inputs, where, [out], executor)
    return out


def softmax(x):
    weights = cupy.exp(x - x.max(1, keepdims=True))
    return weights / weights.sum(1, keepdims=True)


def log_softmax(x):
    x = x - x.max(1, keepdims=True)
    return x - cupy.log(cupy.exp(x).sum(1, keepdims=True))


def assert_rows_close(actual, expected, eps):
    """Compare up to eps[0] in the norm of each row, and eps[1] an element."""
    actual, hidden = wide(actual), cupy.isneginf(expected)
    assert bool((cupy.isneginf(actual) == hidden).all())
    actual, expected = (cupy.where(hidden, 0, a) for a in (actual, expected))
    error = cupy.sqrt(((actual - expected) ** 2).sum(1))
    bound = eps[0] * cupy.sqrt((expected**2).sum(1)) + eps[1] * np.sqrt(actual.shape[1])
    assert bool((error <= bound).all()), (error / bound).max()


def needs_streams():
    if not stream_shape(10**6, 2**14, np.dtype(np.float32), device_limits(0), pairs=False):
        pytest.skip("nothing streams rows here")


def shapes(dtype, *, pairs=False):
    """Yield (blocks, length): at the borders of each shape, in chunks."""
    longest = UNSTREAMED_BYTES[dtype.itemsize, pairs]
    for shape in STREAM_SHAPES[dtype.itemsize, pairs]:
        if shape.blocks <= device_limits(0).cluster_blocks:
            for nbytes in (longest + 16, shape.row_bytes - 16, shape.row_bytes):
                yield shape.blocks, nbytes // dtype.itemsize
        longest = shape.row_bytes


def numbers(dtype, size):
    return upload(np.random.default_rng(size).standard_normal(size, np.float32).astype(dtype))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_streamed_rows(dtype):
    """Ordinary rows, and those with -inf, NaN or +inf; softmax in place."""
    needs_streams()
    eps = EPS[dtype.name], TINY[dtype.name]
    base = numbers(dtype, 2**22 // dtype.itemsize + ROWS)
    for blocks, length in shapes(dtype):
        executor = FewClusters(blocks)
        x = matrix(base, ROWS, length)
        put(x, 0, -np.inf)
        put(x, (1, slice(None, None, 2)), np.nan)
        put(x, (2, 0), np.inf)
        put(x, (3, slice(None, None, 3)), -np.inf)
        if dtype.itemsize == 8:
            x[4] += 1e9
        exact = wide(x[3:])
        for name, function in (("softmax", softmax), ("log_softmax", log_softmax)):
            y = run(name, [x], executor)
            assert_rows_close(y[3:], function(exact), eps)
            assert bool(cupy.isnan(wide(y[1:3])).all())
            nothing = getattr(reference, name)(np.full(2, -np.inf))[0]
            assert bool((wide(y[0]) == nothing).all())
        clean = run("softmax", [x], executor)
        assert run("softmax", [x], executor, out=x) is x
        assert bool((bits(x) == bits(clean)).all())
        assert {launch.staying for launch in executor.launched} == {0, blocks}


@pytest.mark.parametrize("dtype", [d for d in FLOATS if d.itemsize < 8], ids=str)
def test_gradients_of_streamed_rows(dtype):
    needs_streams()
    eps = 4 * EPS[dtype.name], TINY[dtype.name]
    base = numbers(dtype, 2**20 // dtype.itemsize + ROWS)
    backwards = bits(base)[::-1].copy().view(dtype)
    for blocks, length in shapes(dtype, pairs=True):
        executor = FewClusters(blocks)
        x, dy = matrix(base, ROWS, length), matrix(backwards, ROWS, length)
        put(x, 0, -np.inf)
        put(x, (1, slice(None, None, 3)), -np.inf)
        for name in ("softmax", "log_softmax"):
            y = run(name, [x], CurrentDevice())
            dx = run(f"{name}_vjp", [dy, y], executor)
            of_y, of_dy = wide(y), wide(dy)
            if name == "softmax":
                expected = of_y * (of_dy - (of_y * of_dy).sum(1, keepdims=True))
            else:
                expected = of_dy - cupy.exp(of_y) * of_dy.sum(1, keepdims=True)
            assert_rows_close(dx[1:], expected[1:], eps)
            assert not bool(wide(dx[0]).any())
        assert {launch.staying for launch in executor.launched} == {0, blocks}


def test_rows_that_are_not_streamed():
    """Off by an element, not of whole chunks, or masked: as right, by other kernels."""
    needs_streams()
    executor = FewClusters(2)
    base = numbers(np.float32, 2**17)
    length = 2**16 + 8
    x = matrix(base, ROWS, length)
    mask = cupy.arange(length) % 3 > 0
    for other, where in (
        (matrix(base, ROWS, length, shift=1), None),
        (matrix(base, ROWS, length - 1), None),
        (matrix(base, ROWS, length + 1), None),
        (x, mask),
    ):
        y = run("softmax", [other], executor, where=where)
        exact = wide(other) if where is None else cupy.where(where, wide(other), -np.inf)
        assert_rows_close(y, softmax(exact), (1e-6, 0))
    assert all(not launch.staying for launch in executor.launched)


def test_streamed_rows_repeat_their_bits_on_any_stream():
    """30 times in a graph and out of it, behind what the stream has to do before."""
    needs_streams()
    for blocks in (2, 16):
        length = blocks * 2**15 - 4
        x = matrix(numbers(np.float32, length + ROWS), ROWS, length)
        first = run("softmax", [x], FewClusters(blocks))
        assert_rows_close(first, softmax(wide(x)), (1e-6, 0))
        stream = cupy.cuda.Stream(non_blocking=True)
        cupy.cuda.Device().synchronize()
        with stream:
            executor = FewClusters(blocks)
            late, out = cupy.zeros_like(x), cupy.empty_like(x)
            problem = SoftmaxProblem.of("softmax", {"x": late}, -1)
            plan = plan_softmax(problem, (ArraySpec.of(out),), True, executor.limits)
            assert plan.launches[-1].staying == blocks
            pointers, workspace = [late.data.ptr, out.data.ptr], cupy.empty(16, np.uint8)
            stream.begin_capture()
            launch_plan(plan, pointers, workspace.data.ptr, executor)
            graph = stream.end_capture()
            for turn in range(30):
                out.fill(np.nan)
                late.fill(turn)
                late[...] = x
                if turn % 2:
                    graph.launch(stream)
                else:
                    launch_plan(plan, pointers, workspace.data.ptr, executor)
                assert bool((bits(out) == bits(first)).all()), turn


def test_a_full_gpu_of_streamed_rows():
    needs_streams()
    limits = device_limits(0)
    length = 2**15 + 4
    x = matrix(numbers(np.float32, 2**17), 8 * limits.multiprocessors + 5, length)
    problem = SoftmaxProblem.of("softmax", {"x": x}, -1)
    _, launch = plan_softmax(problem, (ArraySpec.of(x),), True, limits).launches
    assert launch.staying == 2
    assert 1 <= fitting_clusters(launch, 0) <= limits.multiprocessors // 2
    y = cuflash.softmax(x)
    online = cuflash.softmax(x, method="online")
    np.testing.assert_allclose(cupy.asnumpy(y.sum(1, dtype=np.float64)), 1, rtol=5e-6)
    assert bool((abs(y - online) <= 1e-5 * online).all())


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_many_rows_side_by_side(dtype):
    """Tiles that only many rows take, at their borders, with the last one not whole."""
    executor = FewClusters(1)
    columns = 264
    base = numbers(dtype, 2050 * columns)
    for length in (2, 128, 129, 512, 513, 1024, 1025, 2050):
        x = bits(base)[: length * columns].copy().view(dtype).reshape(length, columns)
        put(x, (slice(None), 3), -np.inf)
        put(x, (slice(None, None, 2), 5), -np.inf)
        put(x, (0, 6), np.nan)
        exact = cupy.ascontiguousarray(wide(x).T)
        for name, function in (("softmax", softmax), ("log_softmax", log_softmax)):
            y = cupy.ascontiguousarray(bits(run(name, [x], executor, axis=0)).T).view(dtype)
            for rows in (slice(0, 3), slice(4, 6), slice(7, None)):
                eps = EPS[dtype.name], TINY[dtype.name]
                assert_rows_close(y[rows], function(exact[rows]), eps)
            assert bool(cupy.isnan(wide(y[6])).all())
    sources = {launch.kernel.source for launch in executor.launched}
    assert sources == {"softmax/columns.cu"}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_streamed_strips(dtype):
    """At the borders of each shape, with a last strip that is narrow; rows of -inf, NaN and inf."""
    needs_streams()
    eps, longest = (EPS[dtype.name], TINY[dtype.name]), UNSTRIPPED_COLUMNS
    base = numbers(dtype, 17 * 2**20)
    for shape in STRIP_SHAPES[dtype.itemsize]:
        if shape.blocks > device_limits(0).cluster_blocks:
            continue
        executor = FewClusters(shape.blocks)
        rows = 16 * shape.resident * 32 * shape.rows + 72
        for length in (longest + 1, shape.columns):
            x = bits(base)[: length * rows].copy().view(dtype).reshape(length, rows)
            put(x, (slice(None), 3), -np.inf)
            put(x, (slice(None, None, 2), 5), -np.inf)
            put(x, (0, 6), np.nan)
            put(x, (-1, -1), np.inf)
            if dtype.itemsize == 8:
                x[:, 8] += 1e9
            exact = cupy.ascontiguousarray(wide(x).T)
            for name, function in (("softmax", softmax), ("log_softmax", log_softmax)):
                y = cupy.ascontiguousarray(bits(run(name, [x], executor, axis=0)).T).view(dtype)
                for some in (slice(0, 3), slice(4, 6), slice(7, -1)):
                    assert_rows_close(y[some], function(exact[some]), eps)
                assert bool(cupy.isnan(wide(y[6])).all() & cupy.isnan(wide(y[-1])).all())
                assert bool((wide(y[3]) == (0 if name == "softmax" else -np.inf)).all())
        longest = shape.columns
        kernels = {launch.kernel.source for launch in executor.launched if launch.staying}
        assert kernels == {"softmax/strips.cu"}


SHORT = [(dtype, n) for dtype in FLOATS for n in SHORT_LENGTHS[dtype.itemsize]]


@pytest.mark.parametrize(("dtype", "length"), SHORT, ids=str)
def test_short_rows(dtype, length, rng):
    """Around a block's, and many; rows of -inf and NaN; by chunks that are not whole at the end."""
    executor = CurrentDevice()
    for rows in (2, 3, 1023, 1025, 4097, 100_003):
        x = rng.normal(size=(rows, length)).astype(dtype)
        x[0], x[-1], x[rows // 2, 0] = -np.inf, np.nan, -np.inf
        there = upload(x)
        problem = SoftmaxProblem.of("softmax", {"x": there}, -1)
        (launch,) = plan_softmax(problem, (ArraySpec.of(there),), True, executor.limits).launches
        assert launch.kernel.source == "softmax/short.cu"
        for name in ("softmax", "log_softmax", "logsumexp"):
            y = getattr(cuflash, name)(there)
            expected = getattr(reference, name)(x.astype(np.float64))
            np.testing.assert_allclose(
                cupy.asnumpy(y).astype(np.float64),
                expected,
                rtol=2 * EPS[dtype.name],
                atol=2 * EPS[dtype.name],
            )
        y = cuflash.softmax(there)
        beside = on_device(cuflash.softmax)(x, method="fused").astype(np.float64)
        for other in (y, cuflash.softmax(upload(x, 1)), cuflash.softmax(there, out=there)):
            got, atol = cupy.asnumpy(other).astype(np.float64), 2 * TINY[dtype.name]
            np.testing.assert_allclose(got, beside, rtol=2 * EPS[dtype.name], atol=atol)
