"""Few queries and many keys on a GPU, against the formula in float64 there."""

from functools import partial
from typing import NamedTuple

import cupy
import ml_dtypes
import numpy as np
import pytest

import cuflash
from cuflash.device.executor import device_limits
from tests.device.arrays import to_device

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels")]

BFLOAT16 = ml_dtypes.bfloat16


@pytest.fixture(autouse=True)
def tensor_cores():
    if int(device_limits(0).compute_capability) < 80:
        pytest.skip("no tensor cores that decode_mma runs on")


class Decode(NamedTuple):
    """A problem of `batch` entries, whose key heads serve `group` heads each."""

    batch: int
    key_heads: int
    group: int
    tq: int
    tk: int
    d: int
    dv: int
    dtype: type = BFLOAT16
    causal: bool = False
    lengths: tuple[int, ...] | None = None

    def inputs(self):
        """Return q, k, v; NaN and infinity lie behind the lengths."""
        rng = np.random.default_rng(self.d)
        heads = self.key_heads * self.group
        shapes = (heads, self.tq, self.d), (self.key_heads, self.tk, self.d)
        shapes += ((self.key_heads, self.tk, self.dv),)
        q, k, v = (rng.standard_normal((self.batch, *s), np.float32) for s in shapes)
        for entry, length in enumerate(self.lengths or ()):
            k[entry, :, length:], v[entry, :, length:] = np.nan, np.inf
        return [x.astype(self.dtype) for x in (q, k, v)]

    def options(self):
        """Return the options of the call."""
        given = {"causal": self.causal, "method": "mma", "enable_gqa": True}
        if self.lengths is not None:
            given["key_lengths"] = cupy.asarray(self.lengths)[:, None]
        return given


PROBLEMS = {
    "D 64": Decode(3, 8, 4, 1, 3000, 64, 64, np.float16),
    "D 80": Decode(1, 1, 64, 1, 3001, 80, 72),
    "D 128": Decode(1, 8, 8, 1, 8192, 128, 128),
    "D 256": Decode(3, 8, 4, 1, 3000, 256, 256),
    "causal": Decode(2, 2, 4, 4, 1000, 128, 128, np.float16, True),
    "lengths": Decode(3, 4, 8, 1, 3000, 128, 128, BFLOAT16, False, (0, 77, 2990)),
    "lengths, causal": Decode(3, 8, 2, 7, 3000, 64, 64, BFLOAT16, True, (0, 5, 2990)),
}


def formula(problem, q, k, v):
    """Return out, lse and sum p |v|, in float64 on the GPU."""
    q, k, v = (cupy.nan_to_num(cupy.asarray(x.astype(np.float64)), posinf=0) for x in (q, k, v))
    k, v = (cupy.repeat(x, problem.group, axis=1) for x in (k, v))
    lengths = problem.lengths or (problem.tk,) * problem.batch
    ends = cupy.asarray(lengths)[:, None, None, None]
    key, query = cupy.arange(problem.tk), cupy.arange(problem.tq)[:, None]
    if problem.causal:
        ends = cupy.minimum(ends, ends + query - problem.tq + 1)
    s = cupy.where(key < ends, q @ k.swapaxes(-1, -2) / np.sqrt(problem.d), -np.inf)
    m = cupy.maximum(s.max(axis=-1, keepdims=True), -1e300)
    p = cupy.exp(s - m)
    l = p.sum(axis=-1, keepdims=True)  # noqa: E741
    p /= cupy.where(l > 0, l, 1)
    lse = cupy.where(l > 0, m + cupy.log(cupy.where(l > 0, l, 1)), -np.inf)[..., 0]
    return p @ v, lse, p @ cupy.abs(v)


def poisoned(*shape, dtype):
    return to_device(np.full(shape, np.nan, dtype))


def assert_right(problem, out, lse, arrays):
    """Weights and results are rounded to 16 bits, and nothing else to less than float32."""
    expected, expected_lse, weight = map(cupy.asnumpy, formula(problem, *arrays))
    half_ulp = float(ml_dtypes.finfo(problem.dtype).eps) / 2
    got = cupy.asnumpy(out).astype(np.float64)
    assert (abs(got - expected) <= 2.5 * half_ulp * weight + 1e-6).all()
    np.testing.assert_allclose(cupy.asnumpy(lse), expected_lse, rtol=0, atol=1e-5)


@pytest.mark.parametrize("splits", [None, 1, 5])
@pytest.mark.parametrize("name", PROBLEMS)
def test_formula(name, splits):
    problem = PROBLEMS[name]
    arrays = problem.inputs()
    out = poisoned(*arrays[0].shape[:-1], problem.dv, dtype=problem.dtype)
    lse = poisoned(*arrays[0].shape[:-1], dtype=np.float32)
    cuflash.flash_attention(
        *map(to_device, arrays), **problem.options(), num_splits=splits, out=out, lse=lse
    )
    assert_right(problem, out, lse, arrays)


@pytest.mark.parametrize("splits", [1, 5])
@pytest.mark.parametrize("name", PROBLEMS)
def test_packed_rows_have_the_bits_of_rows_alone(name, splits):
    problem = PROBLEMS[name]
    q, k, v = problem.inputs()
    repeated = [np.repeat(x, problem.group, axis=1) for x in (k, v)]
    results = []
    for keys, values in ((k, v), repeated, (k, v)):
        out = poisoned(*q.shape[:-1], problem.dv, dtype=problem.dtype)
        lse = poisoned(*q.shape[:-1], dtype=np.float32)
        operands = map(to_device, (q, keys, values))
        cuflash.flash_attention(*operands, **problem.options(), num_splits=splits, out=out, lse=lse)
        results.append([cupy.asnumpy(out).view(np.uint16), cupy.asnumpy(lse)])
    for packed, *others in zip(*results, strict=True):
        for other in others:
            np.testing.assert_array_equal(packed, other)


@pytest.mark.parametrize("splits", [None, 5])
def test_nonfinite_values_reach_the_rows_that_see_them(splits):
    """In whichever share they are, of a cluster or not; no other's bits change."""
    q, k, v = Decode(4, 2, 3, 4, 6000, 128, 128).inputs()
    call = partial(
        cuflash.flash_attention,
        *map(to_device, (q, k)),
        causal=True,
        window=(2999, None),
        method="mma",
        enable_gqa=True,
        num_splits=splits,
    )
    before = call(to_device(v)).view(np.uint16)
    v[:, :, 2999, 3], v[:, :, 5998, 5] = np.nan, np.inf
    after = call(to_device(v)).view(np.uint16)
    changed = np.zeros((4, 128), np.bool)
    changed[:3, 3] = changed[2:, 5] = True  # query i sees keys 2997 + i to 5996 + i
    # Exponents of ones alone are those of NaN and infinity.
    infinite = cupy.asnumpy(after & 0x7F80) == 0x7F80
    np.testing.assert_array_equal(infinite, np.broadcast_to(changed, infinite.shape))
    np.testing.assert_array_equal(cupy.asnumpy(after)[~infinite], cupy.asnumpy(before)[~infinite])


@pytest.mark.parametrize("splits", [None, 6])
def test_a_captured_call_reads_the_lengths_anew(splits):
    problem = Decode(4, 2, 8, 1, 4000, 128, 128)
    q, k, v = arrays = problem.inputs()
    lengths = cupy.zeros((4, 1), np.int32)
    options = {**problem.options(), "key_lengths": lengths, "num_splits": splits}
    operands = [to_device(x) for x in arrays]
    out = poisoned(*q.shape, dtype=problem.dtype)
    lse = poisoned(*q.shape[:-1], dtype=np.float32)
    need = cuflash.workspace_size(
        *operands, num_splits=splits, key_lengths=lengths, enable_gqa=True
    )
    call = partial(
        cuflash.flash_attention,
        *operands,
        **options,
        out=out,
        lse=lse,
        workspace=cupy.empty(max(1, need), np.uint8),
    )
    call()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        call()
        graph = stream.end_capture()
    for counts in ((4000, 1, 2000, 7), (0, 3999, 5, 4000)):
        lengths.set(np.array(counts, np.int32)[:, None])
        lse.fill(np.nan)
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        assert_right(problem._replace(lengths=counts), out, lse, (q, k, v))
