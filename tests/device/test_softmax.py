"""The softmax family on a GPU: the laws of all engines, and what only a device can get wrong."""

import functools
import itertools
import threading

import cupy
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
from cuflash import reference
from cuflash.device.compiler import Launch
from cuflash.device.executor import CurrentDevice, device_limits
from cuflash.device.plans import plan_softmax, softmax_kernels
from cuflash.device.softmax import launch_plan
from cuflash.device.softmax_regimes import PART_BYTES, cluster_capacity, rows_ahead
from cuflash.device.softmax_rows import SOFTMAX_PARAMETERS
from cuflash.problem import BFLOAT16, FLOATS, ArraySpec, SoftmaxProblem
from cuflash.testing.softmax_properties import (
    SOFTMAX_NAMES,
    SOFTMAX_PROPERTIES,
    state_of_parts_merges,
    vjp_matches_oracle,
)
from cuflash.testing.strategies import softmax_problems
from tests.device.arrays import on_device, to_device

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels")]

METHODS = ["naive", "fused", "online"]
BORDERS = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
#: Laws that compare bits of arrays that lie differently: `auto` may order their sums differently.
BITS_OF_VIEWS = ("views_equal_copies", "output_fully_written")
DTYPES = tuple(dtype.name for dtype in FLOATS)
#: Of a result, in the norm: the accuracy contract, and a tenth of it for float64.
EPS = {"float64": 1e-15, "float32": 1e-6, "float16": 1e-3, "bfloat16": 8e-3}


def assert_close_in_norm(x, expected, eps):
    """Compare up to `eps` in norm, and to the rounding of what is subnormal in the type of x."""
    subnormal = float(ml_dtypes.finfo(x.dtype).smallest_subnormal) * np.sqrt(x.size)
    error = np.linalg.norm(x.astype(np.float64) - expected)
    assert error <= eps * np.linalg.norm(expected) + subnormal


def methods():
    """Return the methods of this device."""
    return [*METHODS, *(["cluster"] if device_limits(0).cluster_blocks > 1 else [])]


def functions(name, method):
    function = getattr(cuflash, name)
    return on_device(
        functools.partial(function, method=method) if name != "logsumexp" else function
    )


def hypothesis_test(check, dtypes=DTYPES, others=("auto",)):
    @settings(max_examples=40)
    @given(
        case=softmax_problems(dtypes=dtypes, borders=BORDERS, max_row=20_000),
        method=st.sampled_from([*methods(), *others]),
    )
    def holds(case, method):
        check(case, method)

    holds()


#: logsumexp has no method to fix.
LAWS = [
    (name, law)
    for name, law in itertools.product(SOFTMAX_NAMES, SOFTMAX_PROPERTIES)
    if name != "logsumexp" or law not in BITS_OF_VIEWS
]


@pytest.mark.parametrize(("name", "law"), LAWS)
def test_property(name, law):
    hypothesis_test(
        lambda case, method: SOFTMAX_PROPERTIES[law](functions(name, method), case, name),
        (*DTYPES, "int16", "bool"),
        others=() if law in BITS_OF_VIEWS else ("auto",),
    )


@pytest.mark.parametrize("name", SOFTMAX_NAMES)
def test_gradient(name):
    vjp = on_device(getattr(cuflash, f"{name}_vjp"))
    hypothesis_test(
        lambda case, method: vjp_matches_oracle(functions(name, method), vjp, case, name)
    )


def test_states_of_parts_merge():
    state = on_device(cuflash.softmax_state)
    hypothesis_test(lambda case, method: state_of_parts_merges(state, cuflash.merge_softmax, case))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_borders(method, dtype, rng):
    lengths = sorted({b + d for b in BORDERS for d in (-1, 0, 1)})
    eps = EPS[dtype.name]
    for length in lengths:
        x = rng.normal(size=(5, length)).astype(dtype)
        y = functions("softmax", method)(x)
        assert_close_in_norm(y, reference.softmax(x), eps)
        beside = functions("softmax", method)(np.ascontiguousarray(x.T), 0)
        assert np.ascontiguousarray(beside.T).tobytes() == y.tobytes(), length


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("dtype", "n", "exponent"), [(np.float16, 4096, 12), (BFLOAT16, 512, 9)])
def test_sums_of_16_bit_rows_are_wide(method, dtype, n, exponent):
    y = cuflash.softmax(cupy.zeros((2, n), dtype), method=method)
    np.testing.assert_array_equal(cupy.asnumpy(y).astype(np.float32), 2.0**-exponent)
    lse = cuflash.logsumexp(cupy.zeros((1, 65536), np.float16))
    np.testing.assert_array_equal(cupy.asnumpy(lse), np.float16(11.0904))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("rows", [65535, 65536, 65537, 200_000])
def test_more_rows_than_a_grid_has_in_y(method, rows, rng):
    x = rng.normal(size=(rows, 2)).astype(np.float16)
    out = np.full(x.shape, np.nan, np.float16)
    functions("softmax", method)(x, out=out)
    np.testing.assert_allclose(out, reference.softmax(x), rtol=2e-3)


def test_more_than_2_to_the_31_rows():
    x = cupy.zeros((2**31 + 100, 1), np.float16)
    x[-1] = cupy.nan
    y = cuflash.softmax(x, out=x)
    assert bool((y[:-1] == 1).all())
    assert bool(cupy.isnan(y[-1, 0]))


@pytest.mark.parametrize("excess", [100, 104])  # the second is a multiple of 16 bytes
def test_a_row_of_more_than_2_to_the_31_columns(excess):
    x = cupy.zeros((1, 2**31 + excess), np.float16)
    x[0, -1] = 20  # at an offset past 31 bits, and a fifth of the sum
    lse = np.logaddexp(np.log(2.0**31), 20)
    np.testing.assert_allclose(cuflash.logsumexp(x).item(), lse, rtol=1e-3)
    y = cuflash.log_softmax(x, method="online", out=x)
    np.testing.assert_allclose(y[0, 0].item(), -lse, rtol=1e-3)
    np.testing.assert_allclose(y[0, -1].item(), 20 - lse, rtol=1e-3)


def test_offsets_past_2_to_the_31_between_rows():
    x = cupy.zeros((3, 2**30, 1), np.float16)
    x[:, 5] = cupy.arange(3, dtype=np.float16)[:, None]
    y = cuflash.softmax(x, 0)
    np.testing.assert_allclose(
        cupy.asnumpy(y[:, 5, 0]), reference.softmax(np.arange(3.0)), rtol=2e-3
    )
    assert bool((y[:, -1] == y[0, 0]).all())


class _Peak(cupy.cuda.MemoryHook):
    """Counts bytes that the pool hands out and takes back."""

    name = "peak"

    def __init__(self):
        self.live = self.peak = 0

    def malloc_postprocess(self, **event):
        self.live += event["mem_size"]
        self.peak = max(self.peak, self.live)

    def free_postprocess(self, **event):
        self.live -= event["mem_size"]


@pytest.mark.parametrize(("method", "workspace"), [("naive", 4096), ("fused", 0), ("online", 0)])
@pytest.mark.parametrize("axis", [0, 1, (0, 2)])
def test_memory_beyond_the_output_is_the_workspace(method, workspace, axis):
    x = cupy.zeros((64, 64, 128), np.float32)
    rows = x.size // np.prod([x.shape[a] for a in np.atleast_1d(axis)])
    out = cupy.empty_like(x)
    with _Peak() as peak:
        cuflash.softmax(x, axis, method=method, out=out)
    assert peak.peak <= (8 * rows + 512 if workspace else 0)


def test_the_current_stream_is_used(rng):
    """On a stream that waits for nothing, behind a long kernel, with the null stream kept busy."""
    stream = cupy.cuda.Stream(non_blocking=True)
    busy = cupy.ones((2048, 2048), np.float32)
    x = cupy.empty((64, 1000), np.float32)
    for turn in range(50):
        busy @ busy
        value = rng.normal(size=x.shape).astype(np.float32) + turn
        with stream:
            for _ in range(3):
                busy @ busy
            x.set(value, stream=stream)
            y = cuflash.softmax(x, method=METHODS[turn % 3])
            got = cupy.asnumpy(y, stream=stream)
        np.testing.assert_allclose(got, reference.softmax(value), rtol=1e-5)


@pytest.mark.parametrize(
    ("method", "shape"), [*((m, (32, 500)) for m in METHODS), ("online", (2, 200_000))]
)
def test_the_lowest_call_can_be_captured_into_a_graph(method, shape, rng):
    x = cupy.zeros(shape, np.float32)
    out = cupy.empty_like(x)
    problem = SoftmaxProblem.of("softmax", {"x": x}, method=method, axis=-1)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        executor = CurrentDevice()
        plan = plan_softmax(problem, (ArraySpec.of(out),), True, executor.limits)
        workspace = executor.allocate(plan.workspace_bytes)
        stream.begin_capture()
        launch_plan(plan, [x.data.ptr, out.data.ptr], workspace.data.ptr, executor)
        graph = stream.end_capture()
    for _ in range(3):
        value = rng.normal(size=x.shape).astype(np.float32)
        x.set(value)
        out.fill(np.nan)
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        np.testing.assert_allclose(cupy.asnumpy(out), reference.softmax(value), rtol=1e-5)


def test_two_host_threads_at_once(rng):
    values = [rng.normal(size=(50, 1000)).astype(np.float32) + i for i in range(2)]
    failures = []

    def work(value):
        try:
            with cupy.cuda.Stream(non_blocking=True) as stream:
                for turn in range(100):
                    y = cuflash.softmax(to_device(value), method=METHODS[turn % 3])
                    got = cupy.asnumpy(y, stream=stream)
                    np.testing.assert_allclose(got, reference.softmax(value), rtol=1e-5)
        except Exception as failure:  # of any kind: reported by the main thread
            failures.append(failure)

    workers = [threading.Thread(target=work, args=(value,)) for value in values]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures, failures


def test_a_refused_launch_is_an_error():
    kernel = next(softmax_kernels(np.dtype(np.float32)))
    with pytest.raises(cupy.cuda.driver.CUDADriverError):
        CurrentDevice().launch(Launch(kernel, 1, 4096), SOFTMAX_PARAMETERS.zeros())


def test_a_method_that_cannot_run_is_refused():
    x = cupy.zeros((1, 600_000), np.float32)
    out = cupy.full_like(x, 7)
    for method in ("fused", "cluster"):
        with pytest.raises(ValueError, match=r"'auto', 'naive', 'online'$"):
            cuflash.softmax(x, method=method, out=out)
    assert bool((out == 7).all())


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_rows_that_a_cluster_holds(dtype, rng):
    """Each number of blocks and of chunks a lane, at its borders, in registers and not."""
    if "cluster" not in methods():
        pytest.skip("no clusters here")
    eps = EPS[dtype.name]
    longest = cluster_capacity(device_limits(0)) // dtype.itemsize
    for power, step in itertools.product(range(6), (-1, 0, 1)):
        length = (longest >> power) + step
        if length > longest:
            continue
        x = rng.normal(size=(3, length)).astype(dtype)
        x[1, : length // 2] = -np.inf
        y = functions("softmax", "cluster")(x)
        expected = reference.softmax(x)
        assert_close_in_norm(y, expected, eps)
        view = np.zeros((3, 2 * length), dtype)[:, ::2]
        view[...] = x
        np.testing.assert_array_equal(functions("softmax", "cluster")(view), y)
        dy = np.maximum(x, 0)
        dx = on_device(cuflash.softmax_vjp)(dy, y)
        assert_close_in_norm(dx, reference.softmax_vjp(dy, y), 8 * eps)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("chunks", "held"), [(512, 4), (1024, 4), (4096, 8), (8191, 16)])
def test_rows_that_are_prefetched(chunks, held, dtype, rng):
    """As many rows as are prefetched at a time, one more and one less; rows cut short."""
    length = chunks * 16 // dtype.itemsize
    ahead = rows_ahead(device_limits(0), max(chunks // held, 64), held, 1)
    for rows in {1, 2, max(ahead - 1, 1), ahead + 1, 2 * ahead + 1}:
        x = rng.standard_normal((rows, length), np.float32).astype(dtype)
        y = functions("softmax", "fused")(x)
        assert_close_in_norm(y, reference.softmax(x.astype(np.float64)), EPS[dtype.name])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("parts", [2, 5])
def test_few_long_rows_are_split(parts, dtype, rng):
    least = parts * PART_BYTES // dtype.itemsize
    for length in (least - 8, least, least + 1):
        x = rng.normal(size=(3, length)).astype(dtype)
        x[1, ::2] = -np.inf
        wide = x.astype(np.float64)
        y = functions("softmax", "online")(x)
        assert_close_in_norm(y, reference.softmax(wide), EPS[dtype.name])
        view = np.zeros((3, length, 2), dtype)[..., 0]
        view[...] = x
        assert functions("softmax", "online")(view).tobytes() == y.tobytes()
        x[2, -1] = np.nan
        y = functions("softmax", "online")(x)
        assert np.isnan(y[2].astype(np.float64)).all()
        assert not np.isnan(y[:2].astype(np.float64)).any()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("excess", [-8, 0, 1])
def test_gradients_of_few_long_rows_are_split(excess, dtype, rng):
    """Longer than any cluster holds, and of views that none holds."""
    longest = max(cluster_capacity(device_limits(0)), 4 * PART_BYTES) // dtype.itemsize
    for length, step in ((longest + 64 + excess, 1), (4 * PART_BYTES // dtype.itemsize, 2)):
        y, dy = np.zeros((2, 2, length, step), dtype)[..., 0]
        dy[...] = rng.normal(size=dy.shape)
        y[...] = reference.softmax(rng.normal(size=y.shape))
        y[1] = 0
        dx = on_device(cuflash.softmax_vjp)(dy, y)
        expected = reference.softmax_vjp(dy.astype(np.float64), y.astype(np.float64))
        assert_close_in_norm(dx, expected, 4 * EPS[dtype.name])
        assert not dx[1].any()
        lse = reference.logsumexp(dy, keepdims=True).astype(dtype)
        dx = on_device(cuflash.logsumexp_vjp)(dy[:, :1], dy, lse)
        wide = (a.astype(np.float64) for a in (dy[:, :1], dy, lse))
        assert_close_in_norm(dx, reference.logsumexp_vjp(*wide), 4 * EPS[dtype.name])


def test_one_row_of_2_to_the_28_columns():
    x = cupy.zeros((1, 2**28), np.float32)
    x[0, -1] = 20
    y = cuflash.softmax(x, out=x)
    normalizer = 2**28 - 1 + np.exp(20.0)
    np.testing.assert_allclose(cupy.asnumpy(y[0, :2]), 1 / normalizer, rtol=1e-6)
    np.testing.assert_allclose(y[0, -1].item(), np.exp(20.0) / normalizer, rtol=1e-6)
    np.testing.assert_allclose(y.sum(dtype=np.float64).item(), 1, rtol=1e-6)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_rows_side_by_side_and_their_gradients(dtype, rng):
    """At the borders of every tile: lanes, blocks of a cluster, and rows read twice."""
    borders = [2] + [1 << power for power in range(4, 15)]
    for length in sorted({b + d for b in borders for d in (-1, 0, 1)} - {1}):
        x = rng.normal(size=(length, 72)).astype(dtype)
        x[:, 3], x[: length // 2, 5] = -np.inf, -np.inf
        wide = x.astype(np.float64)
        y = on_device(cuflash.softmax)(x, 0)
        assert_close_in_norm(y, reference.softmax(wide, 0), EPS[dtype.name])
        dy = rng.normal(size=x.shape).astype(dtype)
        dx = on_device(cuflash.softmax_vjp)(dy, y, 0)
        expected = reference.softmax_vjp(dy.astype(np.float64), y.astype(np.float64), 0)
        assert_close_in_norm(dx, expected, 4 * EPS[dtype.name])
        assert not dx[:, 3].any()


def test_unaligned_elements(rng):
    for shift in (1, 2, 4):
        octets = cupy.zeros(40 * 33 * 8 + shift, np.uint8)
        memory = octets.data + shift
        x = cupy.ndarray((40, 33), np.float64, memptr=memory)
        value = rng.normal(size=x.shape)
        octets[shift:] = cupy.asarray(value.ravel().view(np.uint8))
        y = cuflash.softmax(x, out=x)
        assert y is x
        got = cupy.asnumpy(octets[shift:]).view(np.float64).reshape(value.shape)
        np.testing.assert_allclose(got, reference.softmax(value), rtol=1e-13)
