"""The kernels that merge results over disjoint sets of keys, by the public functions."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import cuflash
from cuflash import engine, reference
from cuflash.testing.softmax_properties import (
    MergeCase,
    merge_attention_is_a_monoid,
    merge_softmax_is_a_monoid,
)
from cuflash.testing.strategies import merge_problems
from tests.host_cuda import builder
from tests.host_cuda.test_attention import normal, on_host_cuda, use

pytestmark = pytest.mark.skipif(not builder.available(), reason="no C++ compiler")

ORDERS = st.sampled_from(builder.HostKernel.ORDERS)
#: More columns than a warp has lanes, rows enough for several blocks, some of them with no key.
SEVERAL_BLOCKS = MergeCase(shape=(3, 70), dv=40, empty=0.4)


def parts_of(count, dtype, rng):
    """Return (out, lse) pairs, some rows of which saw no key: lse -inf, and out of NaN there."""
    outs, lses = rng.normal(size=(count, 3, 5, 40)), 5 * rng.normal(size=(count, 3, 5))
    empty = rng.random(lses.shape) < 0.4
    empty[0], empty[:, 0, 0] = True, True
    outs[empty], lses[empty] = np.nan, -np.inf
    return list(zip(outs.astype(dtype), lses.astype(np.promote_types(dtype, "f4")), strict=True))


@settings(max_examples=max(1, settings().max_examples // 2))
@given(case=merge_problems(), order=ORDERS)
@example(case=SEVERAL_BLOCKS, order="forward")
def test_merge_attention_is_a_monoid(case, order):
    merge_attention_is_a_monoid(on_host_cuda(cuflash.merge_attention, order=order), case)


@settings(max_examples=max(1, settings().max_examples // 2))
@given(case=merge_problems(), order=ORDERS)
@example(case=SEVERAL_BLOCKS, order="forward")
def test_merge_softmax_is_a_monoid(case, order):
    merge = on_host_cuda(cuflash.merge_softmax, order=order)
    merge_softmax_is_a_monoid(
        lambda a, b: merge(cuflash.SoftmaxState(*a), cuflash.SoftmaxState(*b)), case
    )


@pytest.mark.parametrize("garbage", [0.0, 7.0, np.nan, np.inf])
def test_a_state_of_nothing_is_the_identity(garbage, monkeypatch):
    use(monkeypatch)
    state = cuflash.SoftmaxState(normal(0, 40), np.exp(normal(1, 40)))
    nothing = cuflash.SoftmaxState(np.full(40, -np.inf, "f4"), np.full(40, garbage, "f4"))
    for pair, expected in (
        ((state, nothing), state),
        ((nothing, state), state),
        ((nothing, nothing), (nothing.maximum, np.zeros(40, "f4"))),
    ):
        for x, y in zip(cuflash.merge_softmax(*pair), expected, strict=True):
            np.testing.assert_array_equal(x, y, strict=True)


@pytest.mark.parametrize("count", [2, 8, 9, 17])
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_parts_without_keys_change_no_bit(count, dtype, monkeypatch, rng):
    """One launch takes 8 parts: beside it there are sums that are themselves parts."""
    use(monkeypatch)
    merge = engine.load("device").merge_attention
    parts = parts_of(count, dtype, rng)
    out, lse = (np.full_like(x, np.nan) for x in parts[0])
    merge(parts, out, lse)
    cleaned = [(np.nan_to_num(o), s) for o, s in parts]
    again = [np.full_like(x, np.nan) for x in parts[0]]
    merge(cleaned, *again)
    np.testing.assert_array_equal(out, again[0])
    np.testing.assert_array_equal(lse, again[1])
    expected = cleaned[0]
    for part in cleaned[1:]:
        expected = reference.merge_attention(*expected, *part)
    rounding = {np.float64: 1e-14, np.float32: 4e-6, np.float16: 4e-3}[dtype]
    np.testing.assert_allclose(out, expected[0], rtol=rounding, atol=rounding)
    np.testing.assert_allclose(lse, expected[1], rtol=rounding, atol=rounding)
    assert not out[0, 0].any()
    assert (lse[0, 0] == -np.inf).all()


@pytest.mark.parametrize("garbage", [0.0, np.nan, np.inf])
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_an_empty_part_has_gradient_zero_and_leaves_all_to_the_other(
    garbage, dtype, monkeypatch, rng
):
    use(monkeypatch)
    a = normal(0, 3, 5, 40, dtype=dtype), normal(1, 3, 5, dtype=np.promote_types(dtype, "f4"))
    nothing = np.full_like(a[0], garbage), np.full_like(a[1], -np.inf)
    given = tuple(rng.normal(size=x.shape).astype(x.dtype) for x in a)
    zeros = tuple(map(np.zeros_like, a))
    spoiled = tuple(np.full_like(x, np.nan) for x in a)
    for cotangents, parts, expected in (
        (given, (a, nothing), (given, zeros)),
        (given, (nothing, a), (zeros, given)),
        (spoiled, (nothing, nothing), (zeros, zeros)),
    ):
        got = cuflash.merge_attention_vjp(*cotangents, *parts[0], *parts[1])
        for x, y in zip(got, (*expected[0], *expected[1]), strict=True):
            np.testing.assert_array_equal(x, y, strict=True)


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_gradients_of_the_merge(dtype, monkeypatch, rng):
    use(monkeypatch)
    a, b = parts_of(3, dtype, rng)[1:]
    given = tuple(rng.normal(size=x.shape).astype(x.dtype) for x in a)
    got = cuflash.merge_attention_vjp(*given, *a, *b)
    wanted = reference.merge_attention_vjp(*given, *a, *b)
    rounding = {np.float64: 1e-13, np.float32: 2e-5, np.float16: 4e-3}[dtype]
    for x, y in zip(got, wanted, strict=True):
        np.testing.assert_allclose(x, y, rtol=rounding, atol=rounding)
