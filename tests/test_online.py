"""Softmax states and partial attention results: values, identity, commutativity, refusals."""

import itertools

import ml_dtypes
import numpy as np
import pytest

import cuflash
from cuflash import (
    SoftmaxState,
    merge_attention,
    merge_attention_vjp,
    merge_softmax,
    reference,
    softmax_state,
)

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
inf, nan = np.inf, np.nan


def bits(x):
    return np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}")


def assert_same(got, expected):
    """Compare tuples of arrays bit for bit."""
    for g, e in zip(got, expected, strict=True):
        assert g.dtype == e.dtype
        np.testing.assert_array_equal(bits(g), bits(e))


# ---------------------------------------------------------------------------------- states


@pytest.mark.parametrize("axis", [-1, 0, (0, 2), None])
@pytest.mark.parametrize(
    ("dtype", "kept"),
    [("f8", "f8"), ("f4", "f4"), ("f2", "f4"), (BFLOAT16, "f4"), ("i4", "f8"), ("?", "f8")],
)
def test_state_holds_maximum_and_normalizer(axis, dtype, kept, rng):
    x = (3 * rng.standard_normal((3, 4, 70))).astype(dtype)
    state = softmax_state(x, axis)
    wide = x.astype(np.float64)
    maximum = wide.max(axis, keepdims=True)
    assert state.maximum.dtype == state.normalizer.dtype == kept
    np.testing.assert_array_equal(state.maximum, maximum)
    normalizer = np.exp(wide - maximum).sum(axis, keepdims=True)
    np.testing.assert_allclose(state.normalizer, normalizer, rtol=2e-6)
    lse = state.logsumexp()
    assert lse.dtype == kept
    expected = reference.logsumexp(x, axis, keepdims=True)
    np.testing.assert_allclose(lse, expected, rtol=1e-6, atol=1e-6)
    y = state.apply(x)
    assert y.dtype == cuflash.softmax(x).dtype
    eps = float(ml_dtypes.finfo(y.dtype).eps)
    np.testing.assert_allclose(y.astype("f8"), reference.softmax(x, axis), rtol=4 * eps, atol=1e-7)


def test_states_of_pieces_merge_to_the_state_of_the_whole(rng):
    x = 5 * rng.standard_normal((4, 90))
    whole = softmax_state(x)
    for cuts in ([45], [1, 2, 89], [30, 30, 60]):
        state = SoftmaxState()
        for piece in np.split(x, cuts, axis=-1):
            state = merge_softmax(state, softmax_state(piece))
        np.testing.assert_array_equal(state.maximum, whole.maximum)
        np.testing.assert_allclose(state.normalizer, whole.normalizer, rtol=1e-14)
        np.testing.assert_allclose(state.apply(x), reference.softmax(x), rtol=1e-13)


def test_merge_is_commutative_bit_for_bit_and_associative(rng):
    a, b, c = (softmax_state(10 * rng.standard_normal((50, 20)).astype("f4")) for _ in range(3))
    assert_same(merge_softmax(a, b), merge_softmax(b, a))
    left, right = merge_softmax(merge_softmax(a, b), c), merge_softmax(a, merge_softmax(b, c))
    np.testing.assert_array_equal(left.maximum, right.maximum)
    np.testing.assert_allclose(left.normalizer, right.normalizer, rtol=5e-7)


@pytest.mark.parametrize("garbage", [0.0, 7.0, nan, inf])
def test_a_state_of_nothing_is_the_identity(garbage, rng):
    state = softmax_state(rng.standard_normal((5, 8)).astype("f4"))
    nothing = SoftmaxState(np.full((5, 1), -inf, "f4"), np.full((5, 1), garbage, "f4"))
    assert_same(merge_softmax(state, nothing), state)
    assert_same(merge_softmax(nothing, state), state)
    assert_same(merge_softmax(state, SoftmaxState()), state)
    empty = merge_softmax(nothing, nothing)
    assert (empty.maximum == -inf).all()
    assert (bits(empty.normalizer) == 0).all()


def test_states_of_rows_without_elements():
    state = softmax_state(np.empty((2, 0), "f4"))
    assert state.maximum.tolist() == [[-inf], [-inf]]
    assert state.normalizer.tolist() == [[0], [0]]
    assert state.logsumexp().tolist() == [[-inf], [-inf]]
    assert state.apply(np.array([[1.0, nan], [-inf, 0]], "f4")).tolist() == [[0, 0], [0, 0]]
    hidden = softmax_state(np.array([[nan, 1.0]]), where=[[False, True]])
    assert [x.item() for x in hidden] == [1, 1]


def test_infinite_states():
    state = softmax_state(np.array([[inf, 1.0], [nan, 1.0], [2.0, 2.0]]))
    assert state.logsumexp()[0] == inf
    assert np.isnan(state.logsumexp()[1])
    merged = merge_softmax(state, softmax_state(np.zeros((3, 4))))
    np.testing.assert_array_equal(merged.logsumexp()[:2], state.logsumexp()[:2])
    assert np.isfinite(merged.logsumexp()[2])


def test_states_broadcast(rng):
    a, b = softmax_state(rng.random((3, 1, 4))), softmax_state(rng.random((5, 4)))
    merged = merge_softmax(a, b)
    assert merged.maximum.shape == (3, 5, 1)
    row = merge_softmax(SoftmaxState(*(x[2] for x in a)), SoftmaxState(*(x[[4]] for x in b)))
    assert_same((x[2, [4]] for x in merged), row)
    weak = merge_softmax(a, SoftmaxState(0, 1))
    assert_same(weak, merge_softmax(a, SoftmaxState(np.array(0.0), np.array(1.0))))
    both = merge_softmax(SoftmaxState(0.0, 1.0), SoftmaxState(0.0, 1.0))
    assert both == (0.0, 2.0)


@pytest.mark.parametrize(
    ("a", "b", "error", "message"),
    [
        ((0.0, 1.0), SoftmaxState(), TypeError, "a must be a SoftmaxState, got tuple"),
        (SoftmaxState(), None, TypeError, "b must be a SoftmaxState, got NoneType"),
        (
            SoftmaxState(np.zeros(2), np.ones(2)),
            SoftmaxState(np.zeros(2, "f4"), np.ones(2, "f4")),
            TypeError,
            r"b\.maximum has dtype float32 but a\.maximum has float64",
        ),
        (
            SoftmaxState(np.zeros(2, "f2"), np.ones(2, "f2")),
            SoftmaxState(),
            TypeError,
            r"a\.maximum has dtype float16; accepted are float32, float64",
        ),
        (
            SoftmaxState(np.zeros(2), np.ones(2)),
            SoftmaxState(np.zeros(3), np.ones(3)),
            ValueError,
            r"a and b do not broadcast: a\.maximum \(2,\)",
        ),
    ],
)
def test_states_that_do_not_merge(a, b, error, message):
    with pytest.raises(error, match=message):
        merge_softmax(a, b)


def test_states_apply_only_to_what_fits_them(rng):
    state = softmax_state(rng.random((3, 4), "f4"))
    with pytest.raises(ValueError, match=r"maximum has shape \(3, 1\), which does not broadcast"):
        state.apply(np.zeros(4, "f4"))
    with pytest.raises(TypeError, match="maximum has dtype float32"):
        state.apply(np.zeros((3, 4)))
    assert state.apply(np.zeros((3, 4), "f2")).dtype == np.float16


# -------------------------------------------------------------------------- partial attention


def part(rng, shape=(2, 3, 5), dv=4, dtype="f4", scale=10.0):
    lse_dtype = "f8" if np.dtype(dtype) == "f8" else "f4"
    out = rng.standard_normal((*shape, dv)).astype(dtype)
    return out, (scale * rng.standard_normal(shape)).astype(lse_dtype)


@pytest.mark.parametrize(
    ("a", "b", "merged"),
    [
        ("f8", "f8", "f8"),
        ("f4", "f4", "f4"),
        ("f2", "f2", "f2"),
        (BFLOAT16, BFLOAT16, BFLOAT16),
        ("f4", "f2", "f4"),
        (BFLOAT16, "f4", "f4"),
    ],
)
def test_merge_attention_is_the_softmax_of_the_logsumexps(a, b, merged, rng):
    parts = part(rng, dtype=a), part(rng, dtype=b)
    out, lse = merge_attention(*parts[0], *parts[1])
    assert out.dtype == merged
    assert lse.dtype == ("f8" if merged == "f8" else "f4")
    lses = np.stack([p[1] for p in parts]).astype("f8")
    weights = reference.softmax(lses, 0)
    expected = sum(w[..., None] * p[0].astype("f8") for w, p in zip(weights, parts, strict=True))
    eps = float(ml_dtypes.finfo(merged).eps)
    rounding = 4e-6 if lse.dtype == "f4" else 1e-14  # of the lse, which the weights inherit
    np.testing.assert_allclose(out.astype("f8"), expected, rtol=0, atol=4 * eps + rounding)
    np.testing.assert_allclose(lse, reference.logsumexp(lses, 0), rtol=3e-7)


def test_merging_parts_of_the_keys_gives_attention_over_all(rng):
    q, k, v = (rng.standard_normal((2, n, 8)) for n in (5, 12, 12))
    scores = q @ k.swapaxes(-1, -2)
    parts = []
    for keys in (slice(0, 3), slice(3, 3), slice(3, 12)):
        s = scores[..., keys]
        parts.append((reference.softmax(s) @ v[:, keys], reference.logsumexp(s)))
    for order in itertools.permutations(parts):
        out, lse = merge_attention(*merge_attention(*order[0], *order[1]), *order[2])
        np.testing.assert_allclose(out, reference.softmax(scores) @ v, rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(lse, reference.logsumexp(scores), rtol=1e-14)


@pytest.mark.parametrize("dtype", ["f8", "f4", "f2", BFLOAT16], ids=str)
def test_an_lse_of_minus_infinity_is_the_identity_bit_for_bit(dtype, rng):
    out, lse = part(rng, dtype=dtype)
    out[0, 0, 0] = -0.0
    out[0, 0, 1, 0] = nan
    lse[0, 0, 0] = -0.0
    for garbage in (nan, inf, 1.0):
        nothing = np.full_like(out, garbage), np.full_like(lse, -inf)
        assert_same(merge_attention(out, lse, *nothing), (out, lse))
        assert_same(merge_attention(*nothing, out, lse), (out, lse))
        empty_out, empty_lse = merge_attention(*nothing, *nothing)
        assert (bits(empty_out) == 0).all()
        assert (empty_lse == -inf).all()


def test_rows_are_empty_one_by_one(rng):
    (out_a, lse_a), (out_b, lse_b) = part(rng), part(rng)
    out_a[1, 1], lse_a[1, 1] = nan, -inf
    out_b[1, 1, 2], lse_b[1, 1, 2] = inf, -inf
    out, lse = merge_attention(out_a, lse_a, out_b, lse_b)
    rest = np.arange(5) != 2
    assert_same((out[1, 1][rest], lse[1, 1][rest]), (out_b[1, 1][rest], lse_b[1, 1][rest]))
    assert (out[1, 1, 2] == 0).all()
    assert lse[1, 1, 2] == -inf
    clean = merge_attention(out_a[0], lse_a[0], out_b[0], lse_b[0])
    assert_same((out[0], lse[0]), clean)


@pytest.mark.parametrize("dtype", ["f8", "f4"])
def test_merge_attention_is_commutative_bit_for_bit_and_associative(dtype, rng):
    for scale in (0.1, 10, 1000):
        a, b, c = (part(rng, (40, 30), dtype=dtype, scale=scale) for _ in range(3))
        assert_same(merge_attention(*a, *b), merge_attention(*b, *a))
        left = merge_attention(*merge_attention(*a, *b), *c)
        right = merge_attention(*a, *merge_attention(*b, *c))
        largest = max(np.abs(p[0]).max() for p in (a, b, c))
        lse = max(np.abs(p[1]).max() for p in (a, b, c))
        bound = (8 + 4 * lse) * float(np.finfo(left[0].dtype).eps) / 2 * largest
        assert np.abs(left[0] - right[0]).max() <= bound


def test_merge_attention_does_not_overflow():
    largest = np.full((1, 1, 2), np.finfo("f4").max)
    lse = np.array([[3.0]], "f4")
    out, merged = merge_attention(largest, lse, largest, lse)
    np.testing.assert_array_equal(out, largest)
    np.testing.assert_allclose(merged, 3 + np.log(2))
    far = merge_attention(largest, lse + 1e30, -largest, lse - 1e30)
    assert_same(far, (largest, lse + np.float32(1e30)))


def test_merge_attention_honours_strides_and_axis_order(rng):
    a, b = part(rng, (3, 40, 7)), part(rng, (3, 40, 7))
    expected = merge_attention(*a, *b)
    views = [np.asfortranarray(x) for x in a] + [x[::-1].copy()[::-1] for x in b]
    assert_same(merge_attention(*views), expected)
    swapped = [x.swapaxes(1, 2).copy().swapaxes(1, 2) for x in (*a, *b)]
    got = merge_attention(*swapped)
    assert_same(got, expected)
    assert all(x.swapaxes(1, 2).flags.c_contiguous for x in got)


def test_merge_attention_without_elements():
    for shape in ((0, 4, 3), (2, 0, 3), (2, 4, 0)):
        out, lse = np.zeros(shape, "f4"), np.zeros(shape[:-1], "f4")
        merged, merged_lse = merge_attention(out, lse, out, lse)
        assert merged.shape == shape
        np.testing.assert_allclose(merged_lse, np.log(2) + lse)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"out_b": np.zeros((2, 3, 5))}, ValueError, r"out_b has shape \(2, 3, 5\) but out_a"),
        ({"lse_a": np.zeros((2, 4))}, ValueError, r"lse_a has shape \(2, 4\); out_a"),
        ({"lse_b": np.zeros((2, 3, 1))}, ValueError, r"lse_b has shape \(2, 3, 1\)"),
        ({"lse_b": np.zeros((2, 3), "f4")}, TypeError, "lse_b has dtype float32; out_b of dtype"),
        ({"out_a": np.zeros((2, 3, 4), "i8")}, TypeError, "out_a has dtype int64; accepted are"),
        ({"out_a": [[0.0]]}, TypeError, "out_a must be an array"),
        ({"lse_a": None}, TypeError, "lse_a must be an array"),
    ],
)
def test_parts_that_do_not_merge(changed, error, message):
    out, lse = np.zeros((2, 3, 4)), np.zeros((2, 3))
    arguments = {"out_a": out, "lse_a": lse, "out_b": out, "lse_b": lse} | changed
    with pytest.raises(error, match=message):
        merge_attention(**arguments)


@pytest.mark.parametrize(("a", "b"), [("f8", "f4"), ("f2", "f8"), ("f2", BFLOAT16)])
def test_precisions_that_do_not_merge(a, b, rng):
    with pytest.raises(TypeError, match=r"out_b has dtype .* but out_a has .*; they must be equal"):
        merge_attention(*part(rng, dtype=a), *part(rng, dtype=b))


def test_outputs_need_tokens_and_features():
    x = np.zeros(3)
    with pytest.raises(ValueError, match=r"out_a has shape \(3,\); the last two axes are"):
        merge_attention(x, np.zeros(()), x, np.zeros(()))


# ---------------------------------------------------------------- gradients of the merge


def cotangents(rng, a, b):
    out, lse = merge_attention(*a, *b)
    return tuple(rng.standard_normal(x.shape).astype(x.dtype) for x in (out, lse))


@pytest.mark.parametrize(
    ("a", "b"), [("f8", "f8"), ("f4", "f4"), ("f2", "f2"), ("f4", BFLOAT16), (BFLOAT16, "f4")]
)
def test_gradients_of_the_merge(a, b, rng):
    parts = part(rng, dtype=a), part(rng, dtype=b)
    upstream = cotangents(rng, *parts)
    grads = merge_attention_vjp(*upstream, *parts[0], *parts[1])
    expected = reference.merge_attention_vjp(*upstream, *parts[0], *parts[1])
    for got, want, x in zip(grads, expected, (*parts[0], *parts[1]), strict=True):
        assert (got.dtype, got.shape) == (x.dtype, x.shape)
        eps = float(ml_dtypes.finfo(x.dtype).eps)
        np.testing.assert_allclose(got.astype("f8"), want, rtol=4 * eps, atol=16 * eps)


def test_gradients_of_the_merge_swap_with_the_parts(rng):
    a, b = part(rng), part(rng)
    upstream = cotangents(rng, a, b)
    of_a_b = merge_attention_vjp(*upstream, *a, *b)
    of_b_a = merge_attention_vjp(*upstream, *b, *a)
    assert_same(of_b_a[2:] + of_b_a[:2], of_a_b)


def test_the_gradients_of_lse_add_up(rng):
    """Both parts' lse raised by one raise the merged lse by one, and change no out."""
    a, b = part(rng, dtype="f8"), part(rng, dtype="f8")
    upstream = cotangents(rng, a, b)
    _, of_a, _, of_b = merge_attention_vjp(*upstream, *a, *b)
    np.testing.assert_allclose(of_a + of_b, upstream[1], rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("garbage", [0.0, nan, inf])
def test_an_empty_part_has_gradient_zero_and_leaves_all_to_the_other(garbage, rng):
    a = part(rng)
    nothing = np.full_like(a[0], garbage), np.full_like(a[1], -inf)
    dout, dlse = cotangents(rng, a, a)
    dlse[0, 0] = -0.0
    zeros = np.zeros_like(dout), np.zeros_like(dlse)
    assert_same(merge_attention_vjp(dout, dlse, *a, *nothing), (dout, dlse, *zeros))
    assert_same(merge_attention_vjp(dout, dlse, *nothing, *a), (*zeros, dout, dlse))
    spoiled = np.full_like(dout, nan), np.full_like(dlse, nan)
    assert_same(merge_attention_vjp(*spoiled, *nothing, *nothing), (*zeros, *zeros))


def test_a_cotangent_of_lse_that_is_not_given_is_zero(rng):
    a, b = part(rng), part(rng)
    dout, dlse = cotangents(rng, a, b)
    without = merge_attention_vjp(dout, None, *a, *b)
    zero = merge_attention_vjp(dout, np.zeros_like(dlse), *a, *b)
    for x, y in zip(without, zero, strict=True):
        np.testing.assert_array_equal(x, y)


def test_gradients_of_the_merge_of_views(rng):
    a, b = part(rng, (3, 40, 7)), part(rng, (3, 40, 7))
    upstream = cotangents(rng, a, b)
    expected = merge_attention_vjp(*upstream, *a, *b)
    views = [np.asfortranarray(x) for x in (*upstream, *a)] + [x[::-1].copy()[::-1] for x in b]
    assert_same(merge_attention_vjp(*views), expected)
    for shape in ((0, 4, 3), (2, 0, 3), (2, 4, 0)):
        out, lse = np.zeros(shape, "f4"), np.ones(shape[:-1], "f4")
        grads = merge_attention_vjp(out, lse, out, lse, out, lse)
        np.testing.assert_allclose(grads[1], lse / 2)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"dout": np.zeros((2, 3, 5))}, ValueError, r"dout has shape \(2, 3, 5\), the result has"),
        ({"dout": np.zeros((2, 3, 4), "f4")}, TypeError, "dout has dtype float32, the result is"),
        ({"dout": None}, TypeError, "dout must be an array"),
        ({"dlse": np.zeros((2, 3, 1))}, ValueError, r"dlse has shape \(2, 3, 1\), the result"),
        ({"dlse": np.zeros((2, 3), "f4")}, TypeError, "dlse has dtype float32, the result is"),
        ({"lse_b": np.zeros((2, 3), "f4")}, TypeError, "lse_b has dtype float32; out_b of dtype"),
    ],
)
def test_cotangents_that_do_not_fit_the_merge(changed, error, message):
    out, lse = np.zeros((2, 3, 4)), np.zeros((2, 3))
    arguments = {"dout": out, "dlse": lse, "out_a": out, "lse_a": lse, "out_b": out, "lse_b": lse}
    with pytest.raises(error, match=f"^{message}"):
        merge_attention_vjp(**arguments | changed)


def test_pytorch_parts_merge_to_tensors(rng):
    torch = pytest.importorskip("torch")
    a, b = part(rng), part(rng)
    got = merge_attention(*map(torch.from_numpy, (*a, *b)))
    assert all(isinstance(x, torch.Tensor) for x in got)
    assert_same([x.numpy() for x in got], merge_attention(*a, *b))
    state = softmax_state(torch.from_numpy(a[0]))
    merged = merge_softmax(SoftmaxState(), state)
    assert isinstance(merged.maximum, torch.Tensor)
    assert isinstance(merged.apply(torch.from_numpy(a[0])), torch.Tensor)
