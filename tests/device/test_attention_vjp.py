"""Gradients of attention on a GPU: the laws of the kit, and what only a device can get wrong."""

from functools import partial
from types import SimpleNamespace

import cupy
import numpy as np
import pytest
from hypothesis import given, settings

import cuflash
from cuflash.problem import BFLOAT16
from cuflash.problem_vjp import AttentionGrads
from cuflash.testing.bounds import UNIT_ROUNDOFF, assert_gradients_close, expect_gradients
from cuflash.testing.gradient_cases import GRADIENT_CASES
from cuflash.testing.gradients import GRADIENT_PROPERTIES
from cuflash.testing.problems import dtype_of
from cuflash.testing.strategies import attention_problems, varlen_problems
from cuflash.testing.varlen_gradients import VARLEN_GRADIENT_PROPERTIES
from tests.device.arrays import to_device
from tests.device.test_attention import _Peak, fetch_memory, normal, on_device, rounded

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels")]

BORDERS = (16, 32, 64)
PROBLEMS = attention_problems(
    borders=BORDERS, max_tokens=140, max_features=140, max_products=400_000
)
SEQUENCES = varlen_problems(borders=BORDERS, max_tokens=140, max_features=70)


def pulled_back(function):
    """Let a function of CuPy arrays take NumPy arrays, grads= included, and return them."""

    def send(x):
        return to_device(np.asarray(x)) if isinstance(x, np.ndarray | np.inexact | np.bool) else x

    def call(*args, grads=None, **options):
        given = [x for x in grads or AttentionGrads()]
        buffers = AttentionGrads(*map(send, given))
        sent = {name: send(x) for name, x in options.items()}
        result = function(*map(send, args), grads=buffers if grads else None, **sent)
        if not grads:
            return AttentionGrads(*[None if x is None else cupy.asnumpy(x) for x in result])
        for there, here, returned in zip(buffers, given, result, strict=True):
            assert returned is there
            if here is not None:
                fetch_memory(there, here)
        return AttentionGrads(*given)

    return call


@pytest.mark.parametrize("law", GRADIENT_PROPERTIES)
def test_property(law):
    @settings(max_examples=max(1, settings().max_examples // 4))
    @given(case=PROBLEMS)
    def holds(case):
        GRADIENT_PROPERTIES[law](pulled_back(cuflash.flash_attention_vjp), case)

    holds()


@pytest.mark.parametrize("law", VARLEN_GRADIENT_PROPERTIES)
def test_sequences_end_to_end(law):
    @settings(max_examples=max(1, settings().max_examples // 4))
    @given(case=SEQUENCES)
    def holds(case):
        VARLEN_GRADIENT_PROPERTIES[law](pulled_back(cuflash.flash_attention_varlen_vjp), case)

    holds()


@pytest.mark.parametrize("name", GRADIENT_CASES)
def test_case(name):
    GRADIENT_CASES[name](
        SimpleNamespace(
            flash_attention=on_device(cuflash.flash_attention),
            flash_attention_varlen=on_device(cuflash.flash_attention_varlen),
            flash_attention_vjp=pulled_back(cuflash.flash_attention_vjp),
            flash_attention_varlen_vjp=pulled_back(cuflash.flash_attention_varlen_vjp),
        )
    )


# ------------------------------------------------------------------------------- larger problems


def formula(dout, q, k, v, dlse, seen, *, bias=0.0, softcap=None):
    """Return the gradients by the plain formula in float64, of the full batch."""
    dout, q, k, v, dlse = (x.astype(np.float64) for x in (dout, q, k, v, dlse))
    scale = q.shape[-1] ** -0.5
    s, slope = scale * q @ k.swapaxes(-1, -2), 1.0
    if softcap:
        t = cupy.tanh(s / softcap)
        s, slope = softcap * t, 1 - t * t
    s = cupy.where(seen, s + bias, -np.inf)
    p = cupy.exp(s - s.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    delta = (dout * (p @ v)).sum(axis=-1) - dlse
    ds = p * (dout @ v.swapaxes(-1, -2) - delta[..., None])
    dot = scale * ds * slope
    return dot @ k, dot.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ dout, ds


def summed(x, shape):
    """Sum over the axes along which `shape` broadcasts."""
    x = x.sum(axis=tuple(range(x.ndim - len(shape))))
    axes = tuple(axis for axis, size in enumerate(shape) if size == 1)
    return x.sum(axis=axes, keepdims=True)


@pytest.mark.parametrize(
    ("dtype", "method"),
    [(name, "auto") for name in ("float64", "float32", "float16", "bfloat16")]
    # Where there are tensor cores, what they do not take is left to the plain kernels.
    + [("float64", "simt"), ("float32", "simt")],
)
@pytest.mark.parametrize(
    ("tokens", "features", "options"),
    [
        ((1025, 1023), (64, 64), {}),
        ((700, 1100), (128, 80), {"causal": True}),
        ((1100, 1500), (40, 32), {"softcap": 3.0, "causal": True}),
        ((300, 2000), (20, 30), {"causal": True, "bias": True}),
    ],
)
def test_larger_problems(tokens, features, options, dtype, method):
    (tq, tk), (d, dv) = tokens, features
    q, dout, dlse = (normal(seed, 2, 4, tq, size) for seed, size in enumerate((d, dv, 1)))
    k, v = normal(3, 2, 1, tk, d), normal(4, 4, tk, dv)
    q, dout, k, v = (x.astype(dtype_of(dtype)) for x in (q, dout, k, v))
    seen = cupy.arange(tk) <= cupy.arange(tq)[:, None] + tk - tq
    options, bias = dict(options), 0.0
    if options.pop("bias", False):
        options["bias"] = bias = normal(5, 4, 1, tk)
    out, lse = cuflash.flash_attention(q, k, v, return_lse=True, **options)
    dlse = dlse[..., 0].astype(lse.dtype)
    grads = cuflash.flash_attention_vjp(
        dout, q, k, v, out, lse, dlse=dlse, method=method, **options
    )
    if not options.pop("causal", False):
        seen[...] = True
    expected = formula(dout, q, k, v, dlse, seen, **(options | {"bias": bias}))
    for name, got, want in zip(grads._fields, grads, expected, strict=False):
        if got is not None:
            error = got.astype(np.float64) - summed(want, got.shape)
            # Sums of many terms of either sign are smaller than their terms.
            unit = max(UNIT_ROUNDOFF[name] for name in (dtype, got.dtype.name))
            limit = 40 * unit * cupy.linalg.norm(want)
            assert cupy.linalg.norm(error) <= limit, name


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("features", "options"),
    [
        ((64, 64), {"causal": True}),
        ((128, 100), {"window": (300, 20)}),
        ((256, 200), {"causal": True}),
        ((128, 128), {"softcap": 3.0, "bias": True}),
    ],
)
def test_tensor_cores_before_hopper(features, options, deterministic):
    """`mma`, which `auto` leaves to others on some GPUs: many tiles, and parts of tiles."""
    (d, dv), (tq, tk), options = features, (1100, 1300), dict(options)
    q, dout = normal(0, 2, 4, tq, d), normal(1, 2, 4, tq, dv)
    k, v, dlse = normal(2, 2, 1, tk, d), normal(3, 4, tk, dv), normal(4, 2, 4, tq)
    q, dout, k, v = (x.astype(dtype_of("bfloat16")) for x in (q, dout, k, v))
    position = cupy.arange(tq)[:, None] + tk - tq
    left, right = options.get("window", (tk, 0 if options.get("causal") else tk))
    seen = (cupy.arange(tk) <= position + right) & (cupy.arange(tk) >= position - left)
    bias = 0.0
    if options.pop("bias", False):
        options["bias"] = bias = normal(5, 4, tq, tk)
    out, lse = cuflash.flash_attention(q, k, v, return_lse=True, **options)
    grads = cuflash.flash_attention_vjp(
        dout, q, k, v, out, lse, dlse=dlse, deterministic=deterministic, method="mma", **options
    )
    want = formula(dout, q, k, v, dlse, seen, bias=bias, softcap=options.get("softcap"))
    for name, got, full in zip(grads._fields, grads, want, strict=False):
        if got is not None:
            error = got.astype(np.float64) - summed(full, got.shape)
            limit = 40 * UNIT_ROUNDOFF["bfloat16"] * cupy.linalg.norm(full)
            assert cupy.linalg.norm(error) <= limit, name


@pytest.mark.parametrize("shape", [(65537, 1), (1, 65537), (3, 40000)])
def test_more_entries_than_a_grid_has_in_y(shape):
    q, k, v, dout = (normal(seed, *shape, 2, 16, dtype=np.float16) for seed in range(4))
    out, lse = cuflash.flash_attention(q, k, v, causal=True, return_lse=True)
    grads = AttentionGrads(*(cupy.full_like(x, cupy.nan) for x in (q, k, v)))
    cuflash.flash_attention_vjp(dout, q, k, v, out, lse, causal=True, grads=grads)
    assert not any(bool(cupy.isnan(x).any()) for x in grads[:3])
    for index in ((0, 0), tuple(n // 2 for n in shape), tuple(n - 1 for n in shape)):
        entry = [cupy.asnumpy(x[index]) for x in (dout, q, k, v)]
        own = AttentionGrads(*(cupy.asnumpy(x[index]) for x in grads[:3]))
        assert_gradients_close(own, expect_gradients(*entry, causal=True))


def test_offsets_past_2_to_the_31():
    """Elements of operands and gradients more than 2^31 elements into their memory."""

    def pair():
        memory = cupy.zeros(2**31 + 4096, np.float16)
        strides = (2**31 * 2, 128, 2)
        return cupy.ndarray((2, 64, 64), np.float16, memptr=memory.data, strides=strides)

    x, dout, grad = pair(), normal(0, 2, 64, 64, dtype=np.float16), pair()
    x[1] = normal(1, 64, 64, dtype=np.float16)
    out, lse = cuflash.flash_attention(x, x, x, return_lse=True)
    others = [cupy.empty((2, 64, 64), np.float16) for _ in range(2)]
    for grads in ((grad, *others), (*others, grad)):
        cuflash.flash_attention_vjp(dout, x, x, x, out, lse, grads=AttentionGrads(*grads))
        own = AttentionGrads(*(cupy.asnumpy(g[1]) for g in grads))
        far = cupy.asnumpy(x[1])
        assert_gradients_close(own, expect_gradients(cupy.asnumpy(dout[1]), far, far, far))


# -------------------------------------------------------------------------- memory, streams, graphs


@pytest.mark.parametrize(
    ("dtype", "method"),
    [
        (np.float64, "simt"),
        (np.float64, "mma"),
        (np.float32, "simt"),
        (np.float32, "mma"),
        (np.float16, "simt"),
        (np.float16, "mma"),
        (np.float16, "auto"),
        (BFLOAT16, "auto"),
    ],
)
def test_memory_is_linear_in_the_number_of_tokens(dtype, method):
    """Their results, a number for each row, of 16 bits a few, and the sums of dq."""
    for tokens in (1024, 16384):
        q, k, v, dout = (normal(seed, 2, tokens, 64, dtype=dtype) for seed in range(4))
        options = {"window": (500, 0), "method": method}
        with _Peak() as peak:
            # Shares of the keys would have a workspace of their own.
            out, lse = cuflash.flash_attention(q, k, v, return_lse=True, num_splits=1, **options)
            grads = cuflash.flash_attention_vjp(dout, q, k, v, out, lse, **options)
        assert peak.largest < 2 * tokens**2  # not a byte for each score
        workspace = cuflash.workspace_size(q, k, v, backward=True, **options)
        sums = lse.itemsize * q.size if method != "simt" or q.itemsize == 2 else 0
        most = sums + (5 if q.itemsize == 2 else 1) * lse.nbytes
        assert workspace <= most + 32
        results = [rounded(x.nbytes) for x in (out, lse, *grads[:3])]
        assert peak.peak == sum(results) + rounded(workspace)
        scratch = cupy.empty(workspace, np.uint8)
        call = partial(cuflash.flash_attention_vjp, dout, q, k, v, out, lse, **options)
        with _Peak() as peak:
            call(grads=grads, workspace=scratch)
        assert peak.peak == 0


def test_the_current_stream_is_used():
    """On a stream that waits for nothing, behind a long kernel, with the null stream kept busy."""
    stream = cupy.cuda.Stream(non_blocking=True)
    busy = cupy.ones((2048, 2048), np.float32)
    rng = np.random.default_rng(0)
    shapes = [(2, 5, 16), (2, 5, 16), (2, 70, 16), (2, 70, 16), (2, 5, 16), (2, 5)]
    arrays = [cupy.empty(shape, np.float32) for shape in shapes]
    cuflash.flash_attention_vjp(*arrays)
    for turn in range(20):
        busy @ busy
        dout, q, k, v = (rng.normal(size=s).astype(np.float32) + turn % 3 for s in shapes[:4])
        results = cuflash.reference.attention(q, k, v)
        values = [dout, q, k, v, *(x.astype(np.float32) for x in results)]
        with stream:
            for _ in range(3):
                busy @ busy
            for x, value in zip(arrays, values, strict=True):
                x.set(value, stream=stream)
            grads = cuflash.flash_attention_vjp(*arrays)
            got = AttentionGrads(*(cupy.asnumpy(x, stream=stream) for x in grads[:3]))
        stream.synchronize()
        assert_gradients_close(got, expect_gradients(*values[:4]))


def test_a_call_can_be_captured_into_a_graph():
    q, k, v, dout = (cupy.zeros((2, 3, t, 40), np.float32) for t in (50, 200, 200, 50))
    lengths = cupy.zeros((2, 1), np.int32)
    sinks = cupy.zeros(3, np.float32)
    options = {"key_lengths": lengths, "causal": True, "sinks": sinks}
    out, lse = cuflash.flash_attention(q, k, v, return_lse=True, **options)
    grads = AttentionGrads(*map(cupy.empty_like, (q, k, v)), dsinks=cupy.empty_like(sinks))
    workspaces = [
        cupy.empty(max(1, cuflash.workspace_size(q, k, v, backward=backward, **options)), np.uint8)
        for backward in (False, True)
    ]

    def call():
        results = {"out": out, "lse": lse, "workspace": workspaces[0]}
        cuflash.flash_attention(q, k, v, **results, **options)
        cuflash.flash_attention_vjp(
            dout, q, k, v, out, lse, grads=grads, workspace=workspaces[1], **options
        )

    call()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        call()
        graph = stream.end_capture()
    rng = np.random.default_rng(0)
    for _ in range(3):
        values = [rng.normal(size=x.shape).astype(np.float32) for x in (dout, q, k, v)]
        counts = rng.integers(0, 200, (2, 1)).astype(np.int32)
        for x, value in zip((dout, q, k, v, lengths), (*values, counts), strict=True):
            x.set(value)
        for x in grads:
            if x is not None:
                x.fill(np.nan)
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        expected = expect_gradients(
            *values, key_lengths=counts, causal=True, sinks=cupy.asnumpy(sinks)
        )
        got = AttentionGrads(*[None if x is None else cupy.asnumpy(x) for x in grads])
        assert_gradients_close(got, expected)


def test_lengths_on_the_device_are_not_read_by_the_host():
    q, k, v = normal(0, 3, 1, 5, 8), normal(1, 3, 2, 9, 8), normal(2, 3, 2, 9, 8)
    wild = np.array([-5, 2**62, 4])
    tame = np.clip(wild, 0, 9)[:, None]
    lengths = cupy.asarray(wild)[:, None]
    out, lse = cuflash.flash_attention(q, k, v, key_lengths=lengths, return_lse=True)
    grads = cuflash.flash_attention_vjp(out, q, k, v, out, lse, key_lengths=lengths)
    expected = expect_gradients(*map(cupy.asnumpy, (out, q, k, v)), key_lengths=tame)
    assert_gradients_close(AttentionGrads(*map(cupy.asnumpy, grads[:3])), expected)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_thirty_runs_are_bit_equal(dtype):
    q, k, v = normal(0, 2, 8, 500, 64), normal(1, 2, 1, 500, 64), normal(2, 1, 8, 500, 64)
    q, k, v, bias = (x.astype(dtype_of(dtype)) for x in (q, k, v, normal(3, 8, 1, 500)))
    out, lse = cuflash.flash_attention(q, k, v, causal=True, bias=bias, return_lse=True)
    runs = [
        cuflash.flash_attention_vjp(
            out, q, k, v, out, lse, causal=True, bias=bias, deterministic=True
        )
        for _ in range(30)
    ]
    for again in runs[1:]:
        for x, y in zip(again[:4], runs[0][:4], strict=True):
            assert bool((x == y).all())


def test_merge_attention_vjp():
    rng = np.random.default_rng(0)
    pairs = [
        (rng.normal(size=(3, 50, 40)).astype(np.float32), rng.normal(size=(3, 50)))
        for _ in range(3)
    ]
    (dout, dlse), (out_a, lse_a), (out_b, lse_b) = ((o, s.astype(np.float32)) for o, s in pairs)
    lse_a[0, :5], out_a[0, :5], lse_b[0, 5:9] = -np.inf, np.nan, -np.inf
    values = (dout, dlse, out_a, lse_a, out_b, lse_b)
    got = cuflash.merge_attention_vjp(*map(cupy.asarray, values))
    for x, y in zip(got, cuflash.merge_attention_vjp(*values), strict=True):
        np.testing.assert_allclose(cupy.asnumpy(x), y, rtol=2e-5, atol=2e-6)
