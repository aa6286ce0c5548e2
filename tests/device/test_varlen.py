"""Sequences end to end on a GPU: the laws of the kit, and ends that live there."""

import itertools
from functools import partial

import cupy
import numpy as np
import pytest
from hypothesis import given, settings

import cuflash
from cuflash.testing.bounds import assert_attention_close, expect_attention
from cuflash.testing.strategies import varlen_problems
from cuflash.testing.varlen import VARLEN_PROPERTIES
from tests.device.test_attention import (
    BFLOAT16,
    METHODS,
    _Peak,
    by_family,
    normal,
    on_device,
    rounded,
)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels")]

PROBLEMS = varlen_problems(borders=(16, 32, 64, 128), max_tokens=200, max_features=140)


@pytest.mark.parametrize("splits", [None, 3])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("law", VARLEN_PROPERTIES)
def test_property(law, method, splits):
    call = by_family(partial(cuflash.flash_attention_varlen, num_splits=splits), method)

    @settings(max_examples=max(1, settings().max_examples // (2 if splits is None else 5)))
    @given(case=PROBLEMS)
    def holds(case):
        VARLEN_PROPERTIES[law](on_device(call), case)

    holds()


@pytest.mark.parametrize("where", [np, cupy])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_many_sequences(where, dtype):
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, 80, (2, 700))
    ends_q, ends_k = np.concatenate([np.zeros((2, 1), int), lengths.cumsum(axis=1)], axis=1)
    shapes = ((4, ends_q[-1], 64), (2, ends_k[-1], 64), (2, ends_k[-1], 32))
    q, k, v = (normal(seed, *shape, dtype=dtype) for seed, shape in enumerate(shapes))
    options = {"causal": True, "enable_gqa": True}
    ends = map(where.asarray, (ends_q, ends_k))
    out, lse = cuflash.flash_attention_varlen(q, k, v, *ends, **options, return_lse=True)
    for e in (0, 1, 349, 350, 698, 699):
        rows, keys = slice(*ends_q[e : e + 2]), slice(*ends_k[e : e + 2])
        own = [cupy.asnumpy(x) for x in (q[:, rows], k[:, keys], v[:, keys])]
        expected = expect_attention(*own, **options)
        assert_attention_close(cupy.asnumpy(out[:, rows]), cupy.asnumpy(lse[:, rows]), expected)


@pytest.mark.parametrize(("d", "causal"), [(64, False), (128, True)])
def test_tiles_of_one_sequence_and_others(d, causal):
    """Whole tiles leave by other means than those with another sequence's rows behind their own."""
    lengths = np.array([256, 0, 150, 256, 1])
    ends = np.concatenate([[0], lengths.cumsum()])
    tokens = ends[-1] + 40  # of no sequence
    q, k, v = (normal(seed, 2, tokens, d, dtype=BFLOAT16) for seed in range(3))
    out, lse = normal(3, *q.shape, dtype=BFLOAT16), cupy.full(q.shape[:2], np.nan, np.float32)
    out.view(np.uint16).fill(0x7FC0)  # NaN
    call = partial(cuflash.flash_attention_varlen, q, k, v, causal=causal, num_splits=1)
    call(*map(cupy.asarray, (ends, ends)), out=out, lse=lse)
    for start, end in itertools.pairwise(ends):
        rows = slice(start, end)
        if start == end:
            continue
        own = [cupy.asnumpy(x[:, rows]) for x in (q, k, v)]
        expected = expect_attention(*own, causal=causal)
        assert_attention_close(cupy.asnumpy(out[:, rows]), cupy.asnumpy(lse[:, rows]), expected)
    assert not cupy.asnumpy(out[:, ends[-1] :]).any()
    assert (cupy.asnumpy(lse[:, ends[-1] :]) == -np.inf).all()


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, BFLOAT16], ids=str)
def test_memory_is_the_results(dtype):
    """By every family of kernels: no record of an allocation has a byte for each score."""
    ends = cupy.asarray([0, 200, 4200, 4200, 8192])
    q, k, v = (normal(seed, 2, 8192, 64, dtype=dtype) for seed in range(3))
    for method in ("auto", *METHODS):
        size = by_family(partial(cuflash.workspace_size, varlen=True, num_splits=1), method)
        scratch = cupy.empty(size(q, k, v), np.uint8)
        call = by_family(partial(cuflash.flash_attention_varlen, num_splits=1), method)
        with _Peak() as peak:
            out, lse = call(q, k, v, ends, ends, return_lse=True)
        assert peak.peak == sum(map(rounded, (out.nbytes, lse.nbytes, scratch.nbytes)))
        assert peak.largest < 3992**2
        with _Peak() as peak:
            call(q, k, v, ends, ends, out=out, lse=lse, workspace=scratch)
        assert peak.peak == 0


def test_ends_on_the_device_are_not_read_by_the_host():
    q, k, v = normal(0, 5, 8), normal(1, 9, 8), normal(2, 9, 8)
    good = np.array([0, 2, 5]), np.array([0, 4, 9])
    for name, at, value, tame in (
        ("cu_seqlens_q", 0, 1, 0),
        ("cu_seqlens_q", 1, -7, 0),
        ("cu_seqlens_k", 1, 2**40, 9),
        ("cu_seqlens_k", 2, 2**62, 9),
    ):
        ends = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), map(np.copy, good), strict=True))
        ends[name][at] = tame
        expected = cuflash.reference.attention_varlen(*map(cupy.asnumpy, (q, k, v)), **ends)[0]
        ends[name][at] = value
        wild = {n: cupy.asarray(x) for n, x in ends.items()}
        out = cuflash.flash_attention_varlen(q, k, v, **wild)
        np.testing.assert_allclose(cupy.asnumpy(out), expected, rtol=0, atol=1e-5)
        with pytest.raises(ValueError, match=name):
            cuflash.flash_attention_varlen(q, k, v, **wild, check=True)
        with pytest.raises(ValueError, match=name):
            cuflash.flash_attention_varlen(q, k, v, **ends)


def test_a_call_can_be_captured_into_a_graph():
    q, k, v = (cupy.zeros((2, 300, 40), np.float32) for _ in range(3))
    ends = cupy.zeros(5, np.int32)
    out, lse = cupy.empty_like(q), cupy.empty(q.shape[:-1], np.float32)
    call = partial(
        cuflash.flash_attention_varlen, q, k, v, ends, ends, out=out, lse=lse, num_splits=1
    )
    call()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        call()
        graph = stream.end_capture()
    rng = np.random.default_rng(0)
    for _ in range(3):
        values = [rng.normal(size=x.shape).astype(np.float32) for x in (q, k, v)]
        now = np.sort(rng.integers(0, 301, 5)).astype(np.int32)
        now[0] = 0
        for x, value in zip((q, k, v, ends), (*values, now), strict=True):
            x.set(value)
        out.fill(np.nan)
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        expected = cuflash.reference.attention_varlen(*values, now, now)
        np.testing.assert_allclose(cupy.asnumpy(out), expected[0], rtol=0, atol=1e-5)
        np.testing.assert_allclose(cupy.asnumpy(lse), expected[1], rtol=0, atol=1e-5)
