"""Attention on a GPU: the laws of the kit, and what only a device can get wrong."""

import ctypes
import threading
from functools import partial
from types import SimpleNamespace

import cupy
import numpy as np
import pytest
from cupy_backends.cuda.api import driver
from hypothesis import example, given, settings

import cuflash
from cuflash import baselines, reference
from cuflash.device import engine
from cuflash.device.attention_plans_dmma import DMMA_CAPABILITIES
from cuflash.device.compiler import load
from cuflash.device.executor import device_limits
from cuflash.problem import BFLOAT16, AttentionArrays, AttentionProblem
from cuflash.testing.bounds import assert_attention_close, expect_attention
from cuflash.testing.cases import ALL_CASES
from cuflash.testing.problems import AttentionCase
from cuflash.testing.properties import ATTENTION_PROPERTIES, split_of_keys
from cuflash.testing.softmax_properties import MergeCase, merge_attention_is_a_monoid
from cuflash.testing.strategies import attention_problems, merge_problems
from tests.device.arrays import to_device

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels")]

#: Not "auto": it may take another family for other strides, and so has no bits to compare.
METHODS = ["mma", "simt"]
PROBLEMS = attention_problems(borders=(16, 32, 64, 128), max_tokens=300, max_features=300)


def on_device(function):
    """Let a function of CuPy arrays take NumPy arrays, out= and lse= included, and return them."""

    def call(*args, out=None, lse=None, **options):
        given = {name: x for name, x in (("out", out), ("lse", lse)) if x is not None}
        outputs = {name: to_device(x) for name, x in given.items()}
        sent = {
            name: to_device(np.asarray(x))
            if isinstance(x, np.ndarray | np.inexact | np.bool)
            else x
            for name, x in options.items()
        }
        results = function(*map(to_device, args), **sent, **outputs)
        for name, x in given.items():
            fetch_memory(outputs[name], x)
        pairs = {id(there): given[name] for name, there in outputs.items()}

        def fetch(x):
            return pairs[id(x)] if id(x) in pairs else cupy.asnumpy(x)

        return tuple(map(fetch, results)) if isinstance(results, tuple) else fetch(results)

    return call


def fetch_memory(there, here):
    """Copy all bytes between the ends of a device array, those between its elements too."""
    low, high = np.lib.array_utils.byte_bounds(here) if here.size else (0, 0)
    if low == high:
        return
    start = there.data - (here.ctypes.data - low)
    octets = cupy.asnumpy(cupy.ndarray((high - low,), np.uint8, memptr=start))
    ctypes.memmove(low, octets.ctypes.data, high - low)


def by_family(function, method):
    """Fix the method of an attention function, to "simt" for what tensor cores cannot run."""

    def call(q, k, v, *args, **options):
        capability = cupy.cuda.Device().compute_capability
        if q.dtype == np.float64:
            runs = q.shape[-1] <= 256 and capability in DMMA_CAPABILITIES
        elif q.dtype == np.float32:
            runs = q.shape[-1] <= 128 and int(capability) >= 80
        else:
            runs = q.dtype.itemsize == 2 and max(q.shape[-1], v.shape[-1]) <= 256
            runs &= int(capability) >= 80
        return function(
            q, k, v, *args, method="simt" if method == "mma" and not runs else method, **options
        )

    return call


def attend(method="auto", **fixed):
    return on_device(by_family(partial(cuflash.flash_attention, **fixed), method))


def normal(seed, *shape, dtype=np.float32):
    return to_device(np.random.default_rng(seed).standard_normal(shape, np.float32).astype(dtype))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("law", ATTENTION_PROPERTIES)
def test_property(law, method):
    @settings(max_examples=max(1, settings().max_examples // (2 if method == "simt" else 5)))
    @given(case=PROBLEMS)
    def holds(case):
        ATTENTION_PROPERTIES[law](attend(method), case)

    holds()


@settings(max_examples=10)
@given(case=PROBLEMS)
def test_shares_of_the_keys(case):
    for splits in (2, 5):
        ATTENTION_PROPERTIES["matches_oracle"](attend(num_splits=splits), case)
        ATTENTION_PROPERTIES["unseen_nonfinite_never_leaks"](attend(num_splits=splits), case)


@settings(max_examples=10)
@given(case=PROBLEMS)
def test_parts_merge_to_the_whole(case):
    split_of_keys(attend(), case, merge=on_device(cuflash.merge_attention))


@settings(max_examples=10)
@given(case=merge_problems())
@example(case=MergeCase(shape=(3, 70), dv=40, empty=0.4))
def test_merge_attention_is_a_monoid(case):
    merge_attention_is_a_monoid(on_device(cuflash.merge_attention), case)


# CuPy compiles its own kernels for each dtype and number of axes, a second for each example.
@settings(max_examples=5)
@given(case=attention_problems(borders=(16, 64), max_tokens=70, max_features=40))
def test_the_plain_formula(case):
    ATTENTION_PROPERTIES["matches_oracle"](on_device(baselines.materialized_attention), case)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ALL_CASES)
def test_case(name, method):
    ALL_CASES[name](
        SimpleNamespace(
            # A view is a copy's equal by one method; "auto" has kernels of its own for short rows.
            softmax=on_device(partial(cuflash.softmax, method="fused")),
            softmax_vjp=on_device(cuflash.softmax_vjp),
            logsumexp=on_device(cuflash.logsumexp),
            flash_attention=attend(method),
            merge_attention=on_device(cuflash.merge_attention),
        )
    )


_LARGER_OPTIONS = [{}, {"causal": True}, {"window": (70, 5), "softcap": 3.0}]


@pytest.mark.parametrize(
    ("dtype", "options"),
    # 16-bit types run on tensor cores, by loops of their own for each score pipeline.
    [(name, options) for name in ("float16", "bfloat16") for options in _LARGER_OPTIONS]
    + [(name, _LARGER_OPTIONS[-1]) for name in ("float32", "float64")],
)
@pytest.mark.parametrize(
    "shape", [(513, 511, 64, 64), (200, 1500, 128, 80), (129, 300, 31, 200), (5, 4000, 256, 256)]
)
def test_larger_problems(shape, dtype, options):
    tq, tk, d, dv = shape
    case = AttentionCase(
        q_batch=(2, 1),
        k_batch=(2, 2),
        v_batch=(2,),
        tq=tq,
        tk=tk,
        d=d,
        dv=dv,
        dtype=dtype,
        **options,
    )
    ATTENTION_PROPERTIES["matches_oracle"](attend(), case)


# ------------------------------------------------------------------------------- what a device adds


def rows_of(q, k, v, index, **options):
    """Return the oracle's result for one batch entry of device arrays."""
    entry = [cupy.asnumpy(x[index]) for x in (q, k, v)]
    return expect_attention(*entry, **options)


@pytest.mark.parametrize("shape", [(65537, 1), (1, 65537), (3, 40000)])
def test_more_entries_than_a_grid_has_in_y(shape):
    q, k, v = (normal(seed, *shape, 2, 16, dtype=np.float16) for seed in range(3))
    out = cupy.full_like(q, cupy.nan)
    out, lse = cuflash.flash_attention(q, k, v, causal=True, out=out, return_lse=True)
    assert not bool(cupy.isnan(out).any())
    for index in ((0, 0), tuple(n // 2 for n in shape), tuple(n - 1 for n in shape)):
        expected = rows_of(q, k, v, index, causal=True)
        assert_attention_close(cupy.asnumpy(out[index]), cupy.asnumpy(lse[index]), expected)


def test_offsets_past_2_to_the_31():
    """Elements of q, k, v, a mask and out that lie more than 2^31 elements into their memory."""
    memory = cupy.zeros(2**31 + 4096, np.float16)
    far = memory[2**31 :].reshape(64, 64)
    far[...] = normal(0, 64, 64, dtype=np.float16)
    strides = (2**31 * 2, 128, 2)
    pair = cupy.ndarray((2, 64, 64), np.float16, memptr=memory.data, strides=strides)
    mask = cupy.ones(2**31 + 4096, np.bool_)
    mask[2**31 :] = cupy.arange(4096) % 3 > 0
    masks = cupy.ndarray((2, 64, 64), np.bool_, memptr=mask.data, strides=(2**31, 64, 1))
    result = cupy.zeros(2**31 + 4096, np.float16)
    out = cupy.ndarray((2, 64, 64), np.float16, memptr=result.data, strides=strides)
    cuflash.flash_attention(pair, pair, pair, mask=masks, out=out)
    x, seen = cupy.asnumpy(far), cupy.asnumpy(masks[1])
    expected = expect_attention(x, x, x, mask=seen)
    assert_attention_close(cupy.asnumpy(out[1]), None, expected)


class _Peak(cupy.cuda.MemoryHook):
    """Counts bytes that the pool hands out and takes back."""

    name = "peak"

    def __init__(self):
        self.live = self.peak = self.largest = 0

    def malloc_postprocess(self, **event):
        self.live += event["mem_size"]
        self.largest = max(self.largest, event["mem_size"])
        self.peak = max(self.peak, self.live)

    def free_postprocess(self, **event):
        self.live -= event["mem_size"]


def rounded(nbytes):
    return -(-nbytes // 512) * 512


@pytest.mark.parametrize("tq", [1, 4096])
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, BFLOAT16], ids=str)
def test_memory_is_the_results_and_the_stated_workspace(tq, dtype):
    """By every family of kernels: no record of an allocation has a byte for each score."""
    q, k, v = (normal(t, 2, 4, t, 64, dtype=dtype) for t in (tq, 4096, 4096))
    for method in engine.attention_methods(AttentionProblem.of(AttentionArrays(q, k, v))):
        workspace = cuflash.workspace_size(q, k, v, method=method)
        assert bool(workspace) == (tq == 1)
        call = partial(cuflash.flash_attention, q, k, v, method=method)
        with _Peak() as peak:
            out, lse = call(return_lse=True)
        assert peak.peak == rounded(out.nbytes) + rounded(lse.nbytes) + rounded(workspace)
        assert tq == 1 or peak.largest < 8 * tq * 4096
        scratch = cupy.empty(workspace, np.uint8)
        with _Peak() as peak:
            call(out=out, lse=lse, workspace=scratch)
        assert peak.peak == 0


#: CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES of the driver, which CuPy does not name.
LOCAL_SIZE_BYTES = 3
#: Of a thread, where registers were filled for other devices than this one.
MOST_LOCAL_ELSEWHERE = 64


def test_kernels_have_no_local_memory(kernels):
    """What a thread has is in registers: of all kernels of attention and softmax, as loaded."""
    local = {
        name.expression: driver.funcGetAttribute(LOCAL_SIZE_BYTES, load(name, 0).ptr)
        for name in kernels
    }
    assert {name.source.split("/")[0] for name in kernels} == {"attention", "softmax"}
    most = 0 if device_limits(0).compute_capability == "90" else MOST_LOCAL_ELSEWHERE
    assert {name: size for name, size in local.items() if size > most} == {}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_equal_weights_of_more_keys_than_sums_of_tiles_can_add(dtype):
    """In one share: without sums of groups of tiles, out and lse err by several times the bound."""
    q, k = np.full((2, 17, 8), 0.1, dtype), np.full((2, 2**16, 8), 0.1, dtype)
    k[1, 0] *= 3  # all weights of an entry are 1, or all but one are equal and below
    v = np.full((2, 2**16, 1), 1.1, dtype)
    expected = expect_attention(q, k, v)
    for method in METHODS:
        out, lse = attend(method, num_splits=1, return_lse=True)(q, k, v)
        assert_attention_close(out, lse, expected)


def test_lengths_on_the_device_are_not_read_by_the_host():
    q, k, v = normal(0, 3, 1, 5, 8), normal(1, 3, 2, 9, 8), normal(2, 3, 2, 9, 8)
    wild = np.array([-5, 2**62, 4])
    out = cuflash.flash_attention(q, k, v, key_lengths=cupy.asarray(wild)[:, None])
    tame = np.clip(wild, 0, 9)[:, None]
    expected = reference.attention(*map(cupy.asnumpy, (q, k, v)), key_lengths=tame)[0]
    np.testing.assert_allclose(cupy.asnumpy(out), expected, rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="key_lengths"):
        cuflash.flash_attention(q, k, v, key_lengths=cupy.asarray(wild)[:, None], check=True)
    out = cuflash.flash_attention(q, k, v, key_lengths=tame, query_offset=np.array([[1], [2], [3]]))
    assert out.shape == (3, 2, 5, 8)


@pytest.mark.parametrize("method", ["auto", "simt"])
def test_the_current_stream_is_used(method):
    """On a stream that waits for nothing, behind a long kernel, with the null stream kept busy."""
    stream = cupy.cuda.Stream(non_blocking=True)
    busy = cupy.ones((2048, 2048), np.float32)
    rng = np.random.default_rng(0)
    q, k, v = (cupy.empty((4, t, 64), np.float32) for t in (3, 500, 500))
    cuflash.flash_attention(q, k, v, method=method)
    for turn in range(50):
        busy @ busy
        values = [rng.normal(size=x.shape).astype(np.float32) + turn for x in (q, k, v)]
        with stream:
            for _ in range(3):
                busy @ busy
            for x, value in zip((q, k, v), values, strict=True):
                x.set(value, stream=stream)
            got = cupy.asnumpy(cuflash.flash_attention(q, k, v, method=method), stream=stream)
        stream.synchronize()
        assert_attention_close(got, None, expect_attention(*values))


@pytest.mark.parametrize("splits", [1, 4])
def test_a_call_can_be_captured_into_a_graph(splits):
    q, k, v = (cupy.zeros((2, 3, t, 40), np.float32) for t in (5, 600, 600))
    lengths = cupy.zeros((2, 1), np.int32)
    out, lse = cupy.empty_like(q), cupy.empty(q.shape[:-1], np.float32)
    need = cuflash.workspace_size(q, k, v, num_splits=splits, key_lengths=lengths)
    options = {"key_lengths": lengths, "num_splits": splits, "causal": True}
    if need:
        options["workspace"] = cupy.empty(need, np.uint8)
    call = partial(cuflash.flash_attention, q, k, v, out=out, lse=lse, **options)
    call()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        call()
        graph = stream.end_capture()
    rng = np.random.default_rng(0)
    for _ in range(3):
        values = [rng.normal(size=x.shape).astype(np.float32) for x in (q, k, v)]
        counts = rng.integers(0, 600, (2, 1)).astype(np.int32)
        for x, value in zip((q, k, v, lengths), (*values, counts), strict=True):
            x.set(value)
        out.fill(np.nan)
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        expected = expect_attention(*values, key_lengths=counts, causal=True)
        assert_attention_close(cupy.asnumpy(out), cupy.asnumpy(lse), expected)


def test_a_merge_can_be_captured_into_a_graph():
    """Its results take the memory that those of the call before gave back to the stream's pool."""
    shapes = ((2, 70, 40), (2, 70)) * 2
    given = [cupy.zeros(shape, np.float32) for shape in shapes]
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        cuflash.merge_attention(*given)
        stream.begin_capture()
        results = cuflash.merge_attention(*given)
        graph = stream.end_capture()
    rng = np.random.default_rng(0)
    for _ in range(3):
        values = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
        values[0][0, :9], values[1][0, :9] = np.nan, -np.inf
        for x, value in zip(given, values, strict=True):
            x.set(value)
        for x in results:
            x.fill(np.nan)
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        for x, expected in zip(results, cuflash.merge_attention(*values), strict=True):
            np.testing.assert_allclose(cupy.asnumpy(x), expected, rtol=2e-6, atol=2e-6)


def test_two_host_threads_at_once():
    failures = []

    def work(seed):
        try:
            rng = np.random.default_rng(seed)
            with cupy.cuda.Stream(non_blocking=True) as stream:
                for tq in range(1, 41):
                    values = [
                        rng.normal(size=(2, t, 16)).astype(np.float32) for t in (tq, 300, 300)
                    ]
                    out = cuflash.flash_attention(*map(cupy.asarray, values), num_splits=1 + tq % 3)
                    got = cupy.asnumpy(out, stream=stream)
                    stream.synchronize()
                    assert_attention_close(got, None, expect_attention(*values))
        except Exception as failure:  # of any kind: reported by the main thread
            failures.append(failure)

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures, failures


def test_thirty_runs_are_bit_equal():
    q, k, v = (normal(seed, 2, 8, 500, 64) for seed in range(3))
    first = cuflash.flash_attention(q, k, v, causal=True, num_splits=3)
    for _ in range(29):
        assert bool((cuflash.flash_attention(q, k, v, causal=True, num_splits=3) == first).all())


def test_many_parts():
    q, k, v = normal(0, 3, 5, 16), normal(1, 3, 200, 16), normal(2, 3, 200, 40)
    parts = [
        cuflash.flash_attention(q, k[:, i : i + 10], v[:, i : i + 10], return_lse=True)
        for i in range(0, 200, 10)
    ]
    out, lse = cupy.empty_like(parts[0][0]), cupy.empty_like(parts[0][1])
    engine.merge_attention(parts, out, lse)
    expected = expect_attention(*map(cupy.asnumpy, (q, k, v)))
    np.testing.assert_allclose(cupy.asnumpy(out), expected.out.value, rtol=0, atol=2e-6)
    np.testing.assert_allclose(cupy.asnumpy(lse), expected.lse.value, rtol=2e-6)


def test_results_lie_where_the_operands_do():
    """On the last of the devices, while the first is the current one."""
    last = cupy.cuda.runtime.getDeviceCount() - 1
    with cupy.cuda.Device(last):
        q, k, v = (normal(i, 3, 70, 64) for i in range(3))
        expected = (
            *cuflash.flash_attention(q, k, v, return_lse=True, num_splits=2),
            cuflash.softmax(q),
            *cuflash.merge_attention(q, q[..., 0], k, k[..., 0]),
        )
    with cupy.cuda.Device(0):
        results = (
            *cuflash.flash_attention(q, k, v, return_lse=True, num_splits=2),
            cuflash.softmax(q),
            *cuflash.merge_attention(q, q[..., 0], k, k[..., 0]),
        )
    assert {x.device.id for x in results} == {last}
    for result, wanted in zip(results, expected, strict=True):
        np.testing.assert_array_equal(cupy.asnumpy(result), cupy.asnumpy(wanted))


@pytest.mark.parametrize(
    ("dtype", "method"), [(np.float32, "simt"), (np.float32, "mma"), (np.float64, "simt")]
)
def test_equal_weights_of_many_keys(dtype, method):
    """Terms that are all alike, added one by one, would err in one direction: like their number."""
    q, k = np.ones((40, 64), dtype), np.ones((16384, 64), dtype)
    v = np.full((16384, 64), 1.1, dtype)
    out, lse = attend(method, num_splits=1)(q, k, v, return_lse=True)
    assert_attention_close(out, lse, expect_attention(q, k, v))
    assert np.abs(out / v[0] - 1).max() < 1e-5 * np.finfo(dtype).eps / np.finfo(np.float32).eps


@pytest.mark.parametrize("d", [64, 128])
def test_long_rows_whose_scores_rise(d):
    """What was summed of a row, wherever it is kept, follows each new maximum."""
    rng = np.random.default_rng(d)
    q, k, v = (rng.standard_normal((2, n, d), np.float32) for n in (140, 4500, 4500))
    k *= np.linspace(0.2, 5, 4500, dtype=np.float32)[:, None]
    v[1, 4400, 3] = np.nan
    out, lse = attend("mma", num_splits=1)(q, k, v, causal=True, return_lse=True)
    assert_attention_close(out, lse, expect_attention(q, k, v, causal=True))


@pytest.mark.parametrize("method", ["simt", "mma"])
def test_nonfinite_values_of_a_share_without_weight(method):
    """A bias of -inf gives weight 0, and 0 times NaN is NaN, wherever the keys are cut."""
    dtype = np.float16 if method == "mma" else np.float32
    q, k, v = (normal(i, 2, n, 32, dtype=dtype) for i, n in enumerate((30, 600, 600)))
    v[:, 500, 1] = cupy.nan
    bias = cupy.zeros(600, np.float32)
    for weightless in (slice(256, None), slice(None)):
        bias[weightless] = -cupy.inf
        for splits in (1, 2, 5):
            out = cuflash.flash_attention(q, k, v, bias=bias, num_splits=splits, method=method)
            assert bool(cupy.isnan(out[..., 1]).all())
            assert int(cupy.isnan(out).sum()) == 60
