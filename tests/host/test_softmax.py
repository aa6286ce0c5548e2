"""The NumPy softmax engine: its methods, and what its blocks and tiles may not change."""

import itertools
import tracemalloc

import numpy as np
import pytest

import cuflash
from cuflash import reference
from cuflash.host import blocks, threads

METHODS = ["naive", "fused", "online"]
LENGTHS = [1, 2, 15, 17, 63, 64, 65, 100, 129, 1000]


def reduced(x, axis):
    return cuflash.logsumexp(x, axis), *cuflash.softmax_state(x, axis)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("axis", [0, 1])
def test_each_method_is_exact_at_every_length(method, length, axis, rng):
    x = 5 * rng.standard_normal((length, 9) if axis == 0 else (9, length))
    where = rng.random(x.shape) < 0.8
    for mask in (None, where):
        for name in ("softmax", "log_softmax"):
            got = getattr(cuflash, name)(x, axis, where=mask, method=method)
            expected = getattr(reference, name)(x, axis, where=mask)
            np.testing.assert_allclose(got, expected, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("shape", "axis"), [((3, 90_000), 1), ((90_000, 3), 0), ((2, 50, 1000), None)]
)
def test_each_method_is_exact_on_long_rows(method, shape, axis, rng):
    x = 5 * rng.standard_normal(shape)
    got = cuflash.softmax(x, axis, method=method)
    np.testing.assert_allclose(got, reference.softmax(x, axis), rtol=1e-12, atol=0)
    dy = rng.standard_normal(shape)
    expected = reference.softmax_vjp(dy, got, axis)
    np.testing.assert_allclose(cuflash.softmax_vjp(dy, got, axis), expected, rtol=1e-9, atol=1e-18)
    lse = cuflash.logsumexp(x, axis)
    np.testing.assert_allclose(lse, reference.logsumexp(x, axis), rtol=1e-14)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_tiles_before_and_after_a_non_finite_element(method, poison):
    x = np.zeros((3, 1000), np.float32)
    x[1, 500] = poison
    y = cuflash.softmax(x, method=method)
    assert np.isnan(y[1]).all()
    np.testing.assert_array_equal(y[::2], np.float32(1e-3))
    x[1] = -np.inf
    assert (cuflash.softmax(x, method=method)[1] == 0).all()
    x[1, 700:] = 1  # -inf only, in all the tiles before
    np.testing.assert_array_equal(cuflash.softmax(x, method=method)[1, 700:], np.float32(1 / 300))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_row_has_the_same_bits_alone_and_among_others(method, length, dtype, rng):
    x = rng.standard_normal((200, length)).astype(dtype)
    alone = np.concatenate(
        [cuflash.softmax(x[i : i + 1], method=method) for i in range(0, 200, 29)]
    )
    np.testing.assert_array_equal(cuflash.softmax(x, method=method)[::29], alone)
    alone = np.concatenate([cuflash.logsumexp(x[i : i + 1]) for i in range(0, 200, 29)])
    np.testing.assert_array_equal(cuflash.logsumexp(x)[::29], alone)
    others = np.where(np.arange(200)[:, None] == 100, x, np.nan).astype(dtype)
    expected = cuflash.softmax(x, method=method)[100]
    np.testing.assert_array_equal(cuflash.softmax(others, method=method)[100], expected)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_memory_order_changes_no_bit(method, length, dtype, rng):
    x = rng.standard_normal((30, length)).astype(dtype)
    beside = np.asfortranarray(x)
    for name in ("softmax", "log_softmax"):
        function = getattr(cuflash, name)
        expected = function(x, method=method)
        np.testing.assert_array_equal(function(beside, method=method), expected)
        np.testing.assert_array_equal(function(x.T, 0, method=method).T, expected)
    for got, expected in zip(reduced(beside, 1), reduced(x, 1), strict=True):
        np.testing.assert_array_equal(got, expected)
    got = cuflash.log_softmax_vjp(beside, beside)
    np.testing.assert_array_equal(got, cuflash.log_softmax_vjp(x, x))


def test_the_size_of_blocks_changes_no_bit(rng, monkeypatch):
    x = rng.standard_normal((4, 50, 70)).astype(np.float32)
    expected = [cuflash.softmax(x, axis) for axis in (0, 1, 2, (0, 2))]
    merged = cuflash.merge_attention(x, x[..., 0], -x, x[..., 1])
    monkeypatch.setattr("cuflash.host.online.BLOCK_BYTES", 1000)
    # The function hides its module's name in the package.
    monkeypatch.setitem(cuflash.host.softmax.__globals__, "BLOCK_BYTES", 1000)
    for axis, y in zip((0, 1, 2, (0, 2)), expected, strict=True):
        np.testing.assert_array_equal(cuflash.softmax(x, axis), y)
    for got, whole in zip(
        cuflash.merge_attention(x, x[..., 0], -x, x[..., 1]), merged, strict=True
    ):
        np.testing.assert_array_equal(got, whole)


@pytest.mark.parametrize(
    ("shape", "axis", "methods"),
    [
        ((2000, 4000), 1, ["auto", *METHODS]),
        ((2000, 4000), 0, ["auto", *METHODS]),
        ((200_000, 40), 0, ["auto", *METHODS]),
        ((12, 1_000_000), 1, ["auto", "naive", "online"]),
        ((8_000_000,), 0, ["auto", "naive", "online"]),  # fused holds the row, here the array
    ],
)
def test_memory_beyond_the_output_is_a_few_blocks(shape, axis, methods, monkeypatch):
    monkeypatch.setattr(threads, "worker_count", lambda: 1)
    x = np.ones(shape, np.float32)
    for method in methods:
        out = np.empty_like(x)
        tracemalloc.start()
        try:
            cuflash.softmax(x, axis, out=out, method=method)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        np.testing.assert_array_equal(out, np.float32(1 / shape[axis]))
        assert peak < x.nbytes / 4


def test_merges_of_many_parts(rng):
    x = rng.standard_normal((7, 5, 6))
    parts = [cuflash.softmax_state(piece) for piece in x]
    maximum, normalizer = np.empty((2, 5, 1))
    cuflash.host.merge_softmax(parts, maximum, normalizer)
    together = cuflash.softmax_state(np.concatenate(list(x), axis=-1))
    np.testing.assert_array_equal(maximum, together.maximum)
    np.testing.assert_allclose(normalizer, together.normalizer, rtol=1e-14)

    outs, lses = rng.standard_normal((7, 5, 3)), rng.standard_normal((7, 5))
    outs[2], lses[2] = np.nan, -np.inf
    out, lse = np.empty((5, 3)), np.empty(5)
    cuflash.host.merge_attention(list(zip(outs, lses, strict=True)), out, lse)
    weights = reference.softmax(lses, 0)
    expected = np.einsum("pt,ptd->td", np.delete(weights, 2, 0), np.delete(outs, 2, 0))
    np.testing.assert_allclose(out, expected, rtol=1e-13)
    np.testing.assert_allclose(lse, reference.logsumexp(lses, 0), rtol=1e-14)


def test_auto_holds_long_rows_in_scratch(rng):
    """Up to a mebi-element; where rows lie side by side, fewer."""
    for shape, axis, method in [
        ((2, 1 << 20), 1, "fused"),
        ((1, (1 << 20) + 1), 1, "online"),
        ((1 << 16, 3), 0, "fused"),
        (((1 << 16) + 1, 3), 0, "online"),
    ]:
        x = 5 * rng.standard_normal(shape)
        results = {m: cuflash.softmax(x, axis, method=m) for m in ("auto", "fused", "online")}
        np.testing.assert_array_equal(results["auto"], results[method])
        assert (results["fused"] != results["online"]).any()


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (4, 1, 6), (2, 3, 4, 5)])
@pytest.mark.parametrize("size", [1, 4, 20, 1000])
def test_boxes_partition_the_index_space(shape, size):
    count = np.zeros(shape, int)
    cut = blocks.boxes(shape, size)
    for box in cut:
        assert blocks.volume(box) == count[box].size <= size
        count[(*box, ...)] += 1
    assert (count == 1).all()
    assert len(cut) == 1 or size < count.size
    assert blocks.boxes((*shape, 0), size) == []


def test_runs_cover_the_range_on_the_pool():
    for count in (0, 1, 5, 1000):
        runs = []
        blocks.for_each_run(count, runs.append)
        assert sorted(itertools.chain(*runs)) == list(range(count))
