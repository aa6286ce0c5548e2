"""Attention and softmax inside JAX on a GPU: the calls' own stream, memory and graphs."""

import threading
from functools import partial

import cupy
import numpy as np
import pytest

import cuflash
from cuflash.testing.bounds import assert_gradients_close, expect_gradients
from tests.device.exchange import open_library

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def jax():
    with open_library("jax") as opened:
        yield opened.module


@pytest.fixture(scope="module")
def inside(jax):
    """The functions under test."""
    import cuflash.jax

    return cuflash.jax


def normal(jax, seed, *shape, dtype="float32"):
    x = np.random.default_rng(seed).standard_normal(shape)
    return jax.numpy.asarray(x, jax.numpy.dtype(dtype))


OPTIONS = {
    "float32": {"causal": True, "window": (40, None), "softcap": 5.0},
    "float64": {"key_lengths": 50},
    "float16": {"num_splits": 3},
    "bfloat16": {"causal": True},
}


@pytest.mark.parametrize("dtype", OPTIONS)
def test_forward_has_the_bits_of_cupy(jax, inside, dtype):
    q, k, v = (normal(jax, i, 2, 3, n, 64, dtype=dtype) for i, n in enumerate((100, 130, 130)))
    attend = partial(inside.flash_attention, **OPTIONS[dtype], return_lse=True)
    results = jax.jit(attend)(q, k, v)
    expected = cuflash.flash_attention(
        *map(cupy.from_dlpack, (q, k, v)), **OPTIONS[dtype], return_lse=True
    )
    for x, y in zip(results, expected, strict=True):
        np.testing.assert_array_equal(
            np.asarray(x).astype(float), cupy.asnumpy(y.astype(cupy.float64))
        )


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_gradients(jax, inside, dtype):
    q, k, v = (normal(jax, i, 2, n, 64, dtype=dtype) for i, n in enumerate((70, 90, 90)))
    bias, sinks = normal(jax, 3, 70, 90), normal(jax, 4, 2)
    options = {"causal": True}

    def attend(q, k, v, bias, sinks):
        return inside.flash_attention(q, k, v, bias=bias, sinks=sinks, **options)

    dout = normal(jax, 5, 2, 70, 64, dtype=dtype)
    grads = jax.jit(lambda dout, *x: jax.vjp(attend, *x)[1](dout))(dout, q, k, v, bias, sinks)
    arrays = list(map(np.asarray, (dout, q, k, v)))
    options |= {"bias": np.asarray(bias), "sinks": np.asarray(sinks)}
    expected = expect_gradients(*arrays, **options)
    assert_gradients_close(cuflash.AttentionGrads(*map(np.asarray, grads)), expected)


def test_vmap_is_a_batch_axis(jax, inside):
    q, k, v = (normal(jax, i, *s) for i, s in enumerate(((40, 3, 64), (50, 64), (50, 3, 64))))
    mapped = jax.jit(jax.vmap(inside.flash_attention, (1, None, 1)))(q, k, v)
    for i in range(3):
        expected = inside.flash_attention(q[:, i], k, v[:, i])
        np.testing.assert_allclose(mapped[i], expected, atol=2e-6)


def test_jax_computes_the_same(jax, inside):
    q, k, v = (normal(jax, i, 2, n, h, 64) for i, (n, h) in enumerate([(50, 4), (70, 2), (70, 2)]))
    bias, mask = normal(jax, 3, 4, 50, 70), normal(jax, 4, 2, 1, 50, 70) > -1
    lengths = jax.numpy.asarray([70, 33], "int32")
    several = {"bias": bias, "mask": mask, "key_value_seq_lengths": lengths}
    for options in ({"is_causal": True}, {"local_window_size": (9, 3)}, several):
        ours = inside.dot_product_attention(q, k, v, **options)
        with jax.default_matmul_precision("highest"):
            theirs = jax.nn.dot_product_attention(q, k, v, **options)
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_softmax_and_its_gradient(jax, inside):
    # Of a row each thread block; so long that several share it and need a workspace; so many that
    # they are dealt out to clusters.
    for dtype, *shape in (
        ("float32", 40, 300),
        ("float32", 2, 1 << 20),
        ("float64", 1100, 1 << 14),
    ):
        x = normal(jax, 0, *shape, dtype=dtype)
        y, dx = jax.jit(jax.value_and_grad(lambda x: (inside.softmax(x) ** 2).sum()))(x)
        their_y, their_dx = jax.value_and_grad(lambda x: (jax.nn.softmax(x) ** 2).sum())(x)
        np.testing.assert_allclose(y, their_y, rtol=1e-4)
        np.testing.assert_allclose(dx, their_dx, atol=1e-6)
        np.testing.assert_allclose(
            inside.logsumexp(x), jax.scipy.special.logsumexp(x, -1), rtol=1e-5
        )


def test_the_newest_values_are_used(jax, inside):
    """Long work before and after on XLA's stream, in one program and from one to the next."""
    large = normal(jax, 9, 2048, 2048)

    @jax.jit
    def step(x):
        late = x + 0 * (large @ large)[0, 0]
        out = inside.flash_attention(late, late, late)
        return out + 0 * (large @ large)[0, 0]

    x = expected = normal(jax, 0, 2, 40, 64)
    for _ in range(10):
        x = step(x)
    for _ in range(10):
        expected = jax.block_until_ready(inside.flash_attention(expected, expected, expected))
    np.testing.assert_allclose(x, expected, atol=1e-5)


def test_a_call_allocates_and_compiles_nothing(jax, inside, monkeypatch):
    from cuflash.device import compiler

    class Hook(cupy.cuda.MemoryHook):
        name = "count"
        allocated = 0

        def malloc_postprocess(self, **of):
            Hook.allocated += 1

    q = normal(jax, 0, 2, 100, 64, dtype="float16")
    function = jax.jit(partial(inside.flash_attention, num_splits=2))
    compiled = function.lower(q, q, q).compile()
    monkeypatch.setattr(compiler.cupy, "RawModule", None)
    with Hook():
        out = jax.block_until_ready(compiled(q, q, q))
    assert Hook.allocated == 0
    assert np.isfinite(np.asarray(out)).all()


def test_calls_are_captured_in_command_buffers(jax, inside, monkeypatch):
    """Many calls in one program, which XLA records in graphs: fresh values in every run."""
    from cuflash.jax import device

    captured = []

    def run(text, addresses, ordinal, stream, of=device.run):
        captured.append(cupy.cuda.runtime.streamIsCapturing(stream))
        of(text, addresses, ordinal, stream)

    monkeypatch.setattr(device, "run", run)

    @jax.jit
    def chain(x):
        for _ in range(8):
            x = inside.softmax(inside.flash_attention(x, x, x, causal=True) + 1)
        return x

    for seed in range(4):
        x = normal(jax, seed, 2, 60, 64)
        expected = cupy.from_dlpack(x)
        for _ in range(8):
            expected = cuflash.softmax(
                cuflash.flash_attention(expected, expected, expected, causal=True) + 1
            )
        np.testing.assert_allclose(chain(x), cupy.asnumpy(expected), atol=1e-6)
    assert captured.count(True) >= 16  # all calls of the program


def test_errors_of_a_call_reach_the_caller(jax, inside, monkeypatch):
    from cuflash.jax import device

    q = normal(jax, 0, 3, 64)
    function = jax.jit(lambda q: inside.flash_attention(q, q, q))
    good = np.asarray(function(q))

    def fail(*arguments):
        raise ValueError("no such luck")

    with monkeypatch.context() as patch:
        patch.setattr(device, "run", fail)
        with pytest.raises(jax.errors.JaxRuntimeError, match="ValueError: no such luck"):
            jax.block_until_ready(function(q + 1))
    np.testing.assert_array_equal(function(q), good)


def test_calls_from_several_threads(jax, inside):
    function = jax.jit(lambda q: inside.flash_attention(q, q, q))
    inputs = [normal(jax, seed, 2, 50, 64) for seed in range(4)]
    expected = [np.asarray(function(q)) for q in inputs]
    failures = []

    def work(q, result):
        for _ in range(20):
            if not (np.asarray(function(q)) == result).all():
                failures.append(q)

    threads = [
        threading.Thread(target=work, args=pair) for pair in zip(inputs, expected, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_memory_is_linear(jax, inside):
    device = jax.devices("gpu")[0]
    q = normal(jax, 0, 1, 16384, 64, dtype="bfloat16")
    compiled = (
        jax.jit(jax.grad(lambda q: inside.flash_attention(q, q, q).astype("float32").sum()))
        .lower(q)
        .compile()
    )
    analysis = compiled.memory_analysis()
    assert analysis.temp_size_in_bytes < 40 * q.nbytes
    assert device.platform == "gpu"
    jax.block_until_ready(compiled(q))
