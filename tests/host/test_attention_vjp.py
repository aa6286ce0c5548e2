"""What is the host engine's own about gradients: memory, threads, and rows on the edge."""

import tracemalloc
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash import AttentionGrads
from cuflash.host import threads
from cuflash.testing.gradient_cases import GRADIENT_CASES


@pytest.mark.parametrize("case", GRADIENT_CASES)
def test_case(case: str) -> None:
    GRADIENT_CASES[case](cuflash)


def differentiate(dout: Any, q: Any, k: Any, v: Any, **options: Any) -> AttentionGrads:
    out, lse = cuflash.flash_attention(q, k, v, return_lse=True, **options)
    return cuflash.flash_attention_vjp(dout, q, k, v, out, lse, **options)


def normal(*shape: int, seed: int = 0, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def peak_bytes(*operands: np.ndarray, **options: Any) -> int:
    """Return what forward and backward allocate at most at a time, results included."""
    tracemalloc.start()
    try:
        differentiate(*operands, **options)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("heads", [1, 3])
def test_peak_memory_is_linear_in_the_number_of_tokens(
    heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of several threads one has, by chance, let go of its tiles when the others have theirs.
    monkeypatch.setattr(threads, "worker_count", lambda: 1)
    sizes = [1024, 2048, 4096, 8192, 16384]
    peaks = []
    for tokens in sizes:
        # With a window, so that the test does not take as long as all scores would.
        operands = [normal(heads, tokens, 8, seed=seed, dtype=np.float16) for seed in range(4)]
        peaks.append(peak_bytes(*operands, window=(300, 0)))
    # Below 2048 tokens it is the tiles that count. One float32 dk and dv of a head are 64 bytes a
    # token; there are eight partial sums of both, the whole's, and copies.
    for tokens, peak in zip(sizes[2:], peaks[2:], strict=True):
        assert peak - peaks[1] < 16 * 64 * heads * (tokens - sizes[1])


def test_a_gradient_as_large_as_its_bias_has_one_float32_sum() -> None:
    tokens = 2048
    q, k, v, dout = (normal(4, tokens, 4, seed=seed) for seed in range(4))
    bias = normal(tokens, tokens, dtype=np.float16)
    peak = peak_bytes(dout, q, k, v, bias=bias)
    assert peak < (2 + 4 + 2) * tokens**2  # the gradient, its sum, and tiles


@pytest.mark.parametrize("shape", [(1,), (2, 3), (9,)])
def test_bits_do_not_depend_on_the_number_of_threads(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    q, dout = normal(*shape, 700, 8), normal(*shape, 700, 8, seed=3)
    k, v = normal(700, 8, seed=1), normal(700, 8, seed=2)
    bias, sinks = normal(700, 700, seed=4), normal(shape[-1], seed=5)
    results = []
    for workers in (1, 2, 5):
        monkeypatch.setattr(threads, "worker_count", lambda workers=workers: workers)
        threads._pool.cache_clear()
        results.append(differentiate(dout, q, k, v, bias=bias, sinks=sinks, causal=True))
        threads._pool.cache_clear()
    for other in results[1:]:
        for x, y in zip(other, results[0], strict=True):
            np.testing.assert_array_equal(x, y)


def test_rows_past_their_length_are_not_read() -> None:
    q, k, v, dout = (normal(2, 6, 4, seed=seed) for seed in range(4))
    lengths = np.array([4, 6])
    out, lse = cuflash.flash_attention(q, k, v, query_lengths=lengths, return_lse=True)
    dlse = normal(2, 6, seed=5)
    options: Any = {"query_lengths": lengths, "sinks": np.zeros(2, np.float32)}
    clean = cuflash.flash_attention_vjp(dout, q, k, v, out, lse, dlse=dlse, **options)
    for x in (q, dout, out, lse[..., None], dlse[..., None]):
        x[0, 4:] = np.nan
    grads = cuflash.flash_attention_vjp(dout, q, k, v, out, lse, dlse=dlse, **options)
    for x, y in zip(grads, clean, strict=True):
        np.testing.assert_array_equal(x, y)


def test_an_infinite_score_is_nan_in_what_its_row_sees() -> None:
    q, k, v, dout = (normal(5, 4, seed=seed) for seed in range(4))
    q[2, 0], k[3, 0] = np.inf, 1
    k[:3, 0] = -1  # the row's other scores are -inf
    k[4, 0] = -1
    grads = differentiate(dout, q, k, v)
    assert np.isnan(grads.dq[2]).all()
    assert np.isfinite(np.delete(grads.dq, 2, axis=0)).all()


def test_an_infinite_lse_is_nan_in_its_row() -> None:
    q, k, v, dout = (normal(5, 4, seed=seed) for seed in range(4))
    out, lse = cuflash.flash_attention(q, k, v, return_lse=True)
    lse[2] = np.inf
    grads = cuflash.flash_attention_vjp(dout, q, k, v, out, lse)
    assert np.isnan(grads.dq[2]).all()
    assert np.isfinite(np.delete(grads.dq, 2, axis=0)).all()


def test_a_row_of_weights_that_are_all_zero_has_gradient_zero() -> None:
    """Keys under a bias of -inf are seen; the row's lse is -inf all the same."""
    q, k, v, dout = (normal(3, 4, seed=seed) for seed in range(4))
    bias = np.zeros((3, 3), np.float32)
    bias[1], dout[1] = -np.inf, np.nan
    grads = differentiate(dout, q, k, v, bias=bias)
    expected = cuflash.reference.attention_vjp(dout, q, k, v, bias=bias)
    for name in ("dq", "dk", "dv", "dbias"):
        np.testing.assert_allclose(getattr(grads, name), getattr(expected, name), 1e-4, 1e-6)
    assert not grads.dq[1].any()
    assert not grads.dbias[1].any()
    for x in grads[:4]:
        assert np.isfinite(x).all()


@pytest.mark.parametrize("infinite", ["q", "k"])
def test_what_a_row_without_weights_holds_reaches_no_gradient(infinite: str) -> None:
    """All scores of a row are -inf, by an infinite query or by infinite keys."""
    rng = np.random.default_rng(0)
    q, k, v, dout = (np.abs(rng.standard_normal((4, 8))) + 1 for _ in range(4))
    mask = np.ones((4, 4), np.bool)
    if infinite == "q":
        q[1] = -np.inf
    else:
        q[1], k[...] = -1, np.inf
        mask[[0, 2, 3]] = False  # they would be NaN
    grads = differentiate(dout, q, k, v, mask=mask)
    assert grads.dq is not None
    np.testing.assert_array_equal(grads.dq[1], 0)
    for x in grads:
        assert x is None or np.isfinite(x).all()


@pytest.mark.parametrize("scale", [1e30, -1e30, 1e-30, 0.0])
def test_scales_of_any_size(scale: float) -> None:
    q, k, v, dout = (normal(4, 3, seed=seed) for seed in range(4))
    grads = differentiate(dout, q, k, v, scale=scale)
    expected = cuflash.reference.attention_vjp(dout, q, k, v, scale=scale)
    for name in ("dq", "dk"):
        size = abs(scale) * 30
        error = np.abs(getattr(grads, name).astype(np.float64) - getattr(expected, name))
        assert (error <= 1e-6 * size).all()


def test_one_array_for_all_operands() -> None:
    x = normal(2, 40, 8)
    copies = differentiate(x.copy(), x.copy(), x.copy(), x.copy(), scale=1.5)
    for a, b in zip(differentiate(x, x, x, x, scale=1.5)[:3], copies[:3], strict=True):
        np.testing.assert_array_equal(a, b)


def test_sums_that_overflow_do_so_in_silence() -> None:
    q, k, v = (normal(2, 4, 3, seed=seed, dtype=np.float16) for seed in range(3))
    dout = np.full((2, 4, 3), 60000, np.float16)
    grads = differentiate(dout, q, k, v[0])
    assert np.isinf(grads.dv).any()
    dout = np.where(np.arange(2)[:, None, None] == 0, np.inf, -np.inf) * np.ones((2, 4, 3))
    grads = differentiate(dout.astype(np.float16), q, k, v[0])
    assert np.isnan(grads.dv).all()
