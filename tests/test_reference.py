"""The oracle against SciPy, finite differences and answers worked by hand."""

import doctest
import functools

import numpy as np
import pytest
import scipy.special
from numpy.testing import assert_allclose, assert_array_equal

from cuflash import reference
from cuflash.reference import _online

LN2 = np.log(2.0)
AXES = [-1, 0, 1, (0, 2), (0, 1, 2), None]


def rng(seed=0):
    return np.random.default_rng(seed)


def finite_difference(function, x, cotangents, step=1e-5):
    """Gradient of sum(function(x) * cotangents), in extended precision and of fourth order."""
    gradient = np.zeros(x.shape)
    for at in np.ndindex(x.shape):
        total = 0.0
        for shift, weight in ((1, 8), (-1, -8), (2, -1), (-2, 1)):
            moved = x.astype(np.longdouble)
            moved[at] += shift * step
            outputs = function(moved)
            pairs = zip(outputs, cotangents, strict=True)
            total += weight * sum(np.sum(out * dout) for out, dout in pairs)
        gradient[at] = total / (12 * step)
    return gradient


class TestSoftmax:
    @pytest.mark.parametrize("axis", AXES)
    @pytest.mark.parametrize("name", ["softmax", "log_softmax", "logsumexp"])
    def test_equals_scipy(self, name, axis):
        x = 30 * rng().normal(size=(3, 5, 7))
        x[0, 0, 0] = -np.inf
        expected = getattr(scipy.special, name)(x, axis=axis)
        assert_allclose(getattr(reference, name)(x, axis=axis), expected, rtol=1e-13, atol=1e-14)

    def test_logsumexp_keeps_axes(self):
        x = rng().normal(size=(3, 5, 7))
        expected = scipy.special.logsumexp(x, axis=(0, 2), keepdims=True)
        assert_allclose(reference.logsumexp(x, axis=(0, 2), keepdims=True), expected, rtol=1e-14)

    @pytest.mark.parametrize("special", [np.nan, np.inf])
    def test_non_finite_logit_spoils_its_row_as_in_scipy(self, special):
        x = np.array([[0.0, special, 1.0], [0.0, 1.0, 2.0]])
        with np.errstate(invalid="ignore"):
            assert_array_equal(reference.softmax(x)[0], scipy.special.softmax(x, axis=-1)[0])
            expected = scipy.special.logsumexp(x, axis=-1)
        assert_allclose(reference.logsumexp(x), expected, rtol=1e-15)
        assert np.isnan(reference.log_softmax(x)[0]).all()
        assert np.isfinite(reference.softmax(x)[1]).all()

    def test_empty_rows(self):
        for x in (np.full((2, 3), -np.inf), np.zeros((2, 0))):
            assert_array_equal(reference.softmax(x), np.zeros(x.shape))
            assert_array_equal(reference.log_softmax(x), np.full(x.shape, -np.inf))
            assert_array_equal(reference.logsumexp(x), [-np.inf, -np.inf])

    @pytest.mark.parametrize("axis", AXES)
    def test_where_equals_minus_infinity(self, axis):
        x = rng().normal(size=(3, 5, 7))
        where = rng(1).random((5, 1)) < 0.5
        where[0] = True
        hidden = np.where(where, x, -np.inf)
        spoiled = np.where(where, x, np.nan)
        for name in ("softmax", "log_softmax", "logsumexp"):
            function = functools.partial(getattr(reference, name), axis=axis)
            assert_array_equal(function(spoiled, where=where), function(hidden))

    @pytest.mark.parametrize("axis", [-1, (0, 1), None])
    @pytest.mark.parametrize("name", ["softmax", "log_softmax", "logsumexp"])
    @pytest.mark.parametrize("masked", [False, True])
    def test_vjp_equals_finite_differences(self, name, axis, masked):
        x = rng().normal(size=(2, 3, 4))
        where = rng(3).random(x.shape) < 0.7 if masked else None
        forward = functools.partial(getattr(reference, name), axis=axis, where=where)
        y = forward(x)
        dy = rng(1).normal(size=y.shape)
        vjp = getattr(reference, f"{name}_vjp")
        options = {"axis": axis, "where": where}
        dx = vjp(dy, x, y, **options) if name == "logsumexp" else vjp(dy, y, **options)

        def finite(z):
            return [np.where(np.isfinite(out := forward(z)), out, 0)]

        assert_allclose(dx, finite_difference(finite, x, [dy]), atol=1e-9)

    def test_vjp_takes_nothing_from_unseen_elements(self):
        where = np.array([True, True, False])
        dy = np.array([1.0, 2.0, np.nan])
        y = reference.softmax([0.0, 1.0, np.nan], where=where)
        assert_allclose(reference.softmax_vjp(dy, y, where=where).sum(), 0, atol=1e-16)
        log_y = reference.log_softmax([0.0, 1.0, np.nan], where=where)
        assert reference.log_softmax_vjp(dy, log_y, where=where)[2] == 0
        lse = reference.logsumexp([0.0, 1.0, np.nan], where=where)
        dx = reference.logsumexp_vjp(2.0, [0.0, 1.0, np.nan], lse, where=where)
        assert dx[2] == 0
        assert_allclose(dx.sum(), 2)

    def test_vjp_of_an_empty_row_is_zero(self):
        x = np.full((2, 3), -np.inf)
        ones = np.ones((2, 3))
        assert_array_equal(reference.softmax_vjp(ones, reference.softmax(x)), 0 * ones)
        assert_array_equal(reference.log_softmax_vjp(ones, reference.log_softmax(x)), 0 * ones)
        dx = reference.logsumexp_vjp(np.ones(2), x, reference.logsumexp(x))
        assert_array_equal(dx, 0 * ones)


def visible(tq, tk, **options):
    """Which keys each query sees, read off the output: with v the identity it is the weights."""
    q, k = np.zeros((tq, 1)), np.zeros((tk, 1))
    out, _ = reference.attention(q, k, np.eye(tk), **options)
    return ["".join("1" if w > 0 else "0" for w in row) for row in out]


class TestVisibility:
    def test_causal_is_bottom_right_by_default(self):
        assert visible(2, 5, causal=True) == ["11110", "11111"]
        assert visible(1, 4, causal=True) == ["1111"]
        assert visible(4, 2, causal=True) == ["00", "00", "10", "11"]

    def test_causal_top_left(self):
        assert visible(2, 5, causal=True, query_offset=0) == ["10000", "11000"]

    def test_window_is_inclusive_and_relative_to_the_position(self):
        assert visible(2, 5, window=(1, 0)) == ["00110", "00011"]
        assert visible(2, 5, window=(0, 1), query_offset=0) == ["11000", "01100"]
        assert visible(2, 5, window=(None, 1), query_offset=1) == ["11100", "11110"]
        assert visible(2, 5, window=(1, None), query_offset=2) == ["01111", "00111"]
        assert visible(2, 5, window=(1, 3), causal=True) == ["00110", "00011"]

    def test_lengths_move_the_diagonal(self):
        assert visible(2, 5, causal=True, key_lengths=3) == ["11000", "11100"]
        assert visible(3, 5, causal=True, query_lengths=2) == ["11110", "11111", "00000"]
        assert visible(2, 3, query_lengths=0) == ["000", "000"]

    def test_lengths_are_taken_by_batch_entry(self):
        q, k, v = np.zeros((2, 3, 1, 1)), np.zeros((2, 3, 4, 1)), np.eye(4)
        lengths = np.array([[1], [3]])
        out, lse = reference.attention(q, k, v, key_lengths=lengths)
        assert_allclose(lse[..., 0], np.log([[1] * 3, [3] * 3]), atol=1e-18)
        assert_allclose(out[0, :, 0], [[1, 0, 0, 0]] * 3)
        assert_allclose(out[1, :, 0], [[1 / 3, 1 / 3, 1 / 3, 0]] * 3)

    def test_mask_true_is_attended(self):
        mask = np.array([[True, False, True], [False, False, False]])
        assert visible(2, 3, mask=mask) == ["101", "000"]
        assert visible(2, 3, mask=mask[:1]) == ["101", "101"]


class TestAttention:
    def test_softmax_times_values(self):
        q, k, v = (
            rng(s).normal(size=(2, 3, n, d)) for s, n, d in ((0, 4, 5), (1, 6, 5), (2, 6, 3))
        )
        s = q @ k.swapaxes(-1, -2) / np.sqrt(5)
        out, lse = reference.attention(q, k, v)
        assert_allclose(out, scipy.special.softmax(s, axis=-1) @ v, rtol=1e-13)
        assert_allclose(lse, scipy.special.logsumexp(s, axis=-1), rtol=1e-13)
        assert out.dtype == lse.dtype == np.float64

    def test_order_of_the_options(self):
        """Scale, softcap, bias, ALiBi: two keys, worked by hand."""
        out, lse = reference.attention(
            [[2.0]],
            [[3.0], [-5.0]],
            np.eye(2),
            scale=0.5,
            softcap=2.0,
            bias=np.array([0.25, -0.5]),
            alibi_slopes=0.125,
            query_offset=3,
        )
        s = np.array(
            [2 * np.tanh(1.5) + 0.25 - 0.125 * 3, 2 * np.tanh(-2.5) - 0.5 - 0.125 * 2],
        )
        assert_allclose(lse, [np.log(np.exp(s).sum())], rtol=1e-15)
        assert_allclose(out[0], np.exp(s) / np.exp(s).sum(), rtol=1e-15)
        scores, seen = reference.attention_scores(
            [[2.0]], [[3.0], [-5.0]], np.eye(2), scale=0.5, softcap=2.0, mask=[True, False]
        )
        assert_allclose(scores, [[2 * np.tanh(1.5), -np.inf]], rtol=1e-15)
        assert_array_equal(seen, [[True, False]])

    def test_no_keys(self):
        out, lse = reference.attention(
            np.ones((2, 3, 4, 8)), np.ones((2, 3, 0, 8)), np.ones((2, 3, 0, 8))
        )
        assert_array_equal(out, np.zeros((2, 3, 4, 8)))
        assert_array_equal(lse, np.full((2, 3, 4), -np.inf))

    def test_rows_before_the_first_key(self):
        """Forty causal queries on seven keys: the first 33 see nothing."""
        q, k = rng().normal(size=(1, 2, 40, 16)), rng(1).normal(size=(1, 2, 7, 16))
        v = np.ones((1, 2, 7, 16))
        out, lse = reference.attention(q, k, v, causal=True)
        assert_array_equal(out[..., :33, :], np.zeros((1, 2, 33, 16)))
        assert_array_equal(lse[..., :33], np.full((1, 2, 33), -np.inf))
        assert_allclose(out[..., 33:, :], 1, rtol=1e-15)
        assert_allclose(
            lse[..., 33, None], np.sum(q[..., 33, None, :] * k[..., :1, :], axis=-1) / 4, rtol=1e-12
        )

    def test_lse_is_a_natural_logarithm(self):
        assert reference.attention([[1.0, 2.0]], [[3.0, 4.0]], [[1.0]], scale=1.0)[1][0] == 11

    def test_grouped_heads(self):
        q = np.ones((8, 1, 16))
        k = np.stack([np.ones((5, 16)), -np.ones((5, 16))])
        _, lse = reference.attention(q, k, k, enable_gqa=True)
        assert_allclose(lse[:, 0], np.log(5) + np.repeat([4.0, -4.0], 4), rtol=1e-15)

    def test_extreme_logits(self):
        q, k = np.ones((1, 128)), np.full((64, 128), -1600.0)
        k[0] = -1536
        v = rng().normal(size=(64, 128))
        out, lse = reference.attention(q, k, v)
        assert_allclose(out[0], v[0], rtol=1e-15)
        assert_allclose(lse, [-17377.856], rtol=1e-7)

    def test_bias_of_minus_infinity_is_a_weight_of_zero_that_hides_nothing(self):
        q, k, v = np.ones((1, 1)), np.zeros((3, 1)), np.array([[1.0], [2.0], [4.0]])
        bias = np.array([0.0, 0.0, -np.inf])
        out, lse = reference.attention(q, k, v, bias=bias)
        assert_allclose(out, [[1.5]])
        assert_allclose(lse, [LN2])
        out, _ = reference.attention(q, k, np.where(v == 4, np.nan, v), bias=bias)
        assert np.isnan(out).all()
        out, lse = reference.attention(q, k, v, bias=np.full(3, -np.inf))
        assert_array_equal(out, [[0.0]])
        assert_array_equal(lse, [-np.inf])

    @pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
    def test_unseen_keys_may_hold_anything(self, special):
        q, k, v = (rng(s).normal(size=(4, 3)) for s in range(3))
        clean = reference.attention(q, k, v, causal=True)
        k[2] = v[2] = special
        out, lse = reference.attention(q, k, v, causal=True)
        assert_array_equal(out[:2], clean[0][:2])
        assert_array_equal(lse[:2], clean[1][:2])
        assert not np.isfinite(out[2:]).any()

    def test_query_that_sees_nothing_may_hold_anything(self):
        q, k = np.full((2, 1), np.nan), np.ones((1, 1))
        out, lse = reference.attention(q, k, k, mask=np.array([[False], [True]]))
        assert_array_equal(out, [[0.0], [np.nan]])
        assert_array_equal(lse, [-np.inf, np.nan])

    def test_visible_non_finite_value_spoils_its_column(self):
        v = np.array([[1.0, 2.0], [np.inf, 2.0]])
        out, lse = reference.attention(np.zeros((2, 1)), np.zeros((2, 1)), v, causal=True)
        assert_array_equal(out, [[1.0, 2.0], [np.inf, 2.0]])
        assert_allclose(lse, [0, LN2])

    def test_sinks(self):
        q, k, v = np.zeros((2, 3, 1)), np.zeros((2, 1)), np.ones((2, 1))
        sinks = np.array([np.log(2.0), -np.inf])
        mask = np.array([[True, True], [True, False], [False, False]])
        out, lse = reference.attention(q, k, v, sinks=sinks, mask=mask)
        assert_allclose(out[0, :, 0], [1 / 2, 1 / 3, 0])
        assert_allclose(lse[0], np.log([4, 3, 2]))
        assert_allclose(out[1, :, 0], [1, 1, 0])
        assert_allclose(lse[1], [LN2, 0, -np.inf])
        out, lse = reference.attention(q, k, v, sinks=sinks, query_lengths=[1])
        assert_array_equal(lse[:, 1:], np.full((2, 2), -np.inf))

    def test_merge_is_the_union_of_the_keys(self):
        q, k, v = (rng(s).normal(size=(2, n, 4)) for s, n in ((0, 3), (1, 7), (2, 7)))
        parts = [reference.attention(q, k[:, s], v[:, s]) for s in (slice(3), slice(3, 7))]
        out, lse = reference.merge_attention(*parts[0], *parts[1])
        assert_allclose(out, reference.attention(q, k, v)[0], rtol=1e-13)
        assert_allclose(lse, reference.attention(q, k, v)[1], rtol=1e-13)
        nothing = np.full((2, 3, 4), np.nan), np.full((2, 3), -np.inf)
        for merged in (
            reference.merge_attention(*parts[0], *nothing),
            reference.merge_attention(*nothing, *parts[0]),
        ):
            assert_array_equal(merged[0], parts[0][0])
            assert_array_equal(merged[1], parts[0][1])

    def test_precision_is_that_of_the_plain_formula(self):
        q, k, v = (rng(s).normal(size=(5, 4)) for s in range(3))
        exact, _ = reference.attention(q, k, v)
        single, _ = reference.attention(q, k, v, precision=np.float32)
        assert_array_equal(single, single.astype(np.float32))
        assert 0 < abs(single - exact).max() < 1e-6

    def test_varlen_is_each_sequence_by_itself(self):
        q, k, v = (rng(s).normal(size=(6, 9, 4)) for s in range(3))
        k, v = k[:2, :8], v[:2, :8]
        options = {"causal": True, "enable_gqa": True, "sinks": np.arange(6.0)}
        out, lse = reference.attention_varlen(
            q, k, v, [0, 3, 3, 8], [0, 2, 3, 8], key_lengths=[1, 1, 4], **options
        )
        first = reference.attention(q[:, :3], k[:, :1], v[:, :1], **options)
        last = reference.attention(q[:, 3:8], k[:, 3:7], v[:, 3:7], **options)
        assert_array_equal(out[:, :3], first[0])
        assert_array_equal(lse[:, :3], first[1])
        assert_array_equal(out[:, 3:8], last[0])
        assert_array_equal(lse[:, 3:8], last[1])
        assert_array_equal(out[:, 8], np.zeros((6, 4)))
        assert_array_equal(lse[:, 8], np.full(6, -np.inf))


OPTIONS = {
    "plain": {},
    "scale": {"scale": -0.7},
    "causal": {"causal": True},
    "lengths": {
        "query_lengths": np.array([[2], [4]]),
        "key_lengths": np.array([[5, 3]]),
        "window": (2, 1),
    },
    "mask": {"mask": rng(7).random((2, 1, 4, 5)) < 0.5},
    "bias": {"bias": rng(8).normal(size=(2, 1, 5))},
    "bias of each pair": {"bias": rng(8).normal(size=(2, 2, 4, 5)), "causal": True},
    "softcap": {"softcap": 0.5, "scale": 1.0},
    "alibi": {"alibi_slopes": np.array([0.5, 0.25])},
    "sinks": {"sinks": np.array([0.5, -np.inf]), "mask": rng(9).random((4, 5)) < 0.4},
    "sink of each entry": {"sinks": rng(9).normal(size=(2, 1)), "causal": True},
}


class TestGradients:
    """float64 finite differences of the oracle's own forward."""

    @pytest.mark.parametrize("name", OPTIONS)
    def test_equal_finite_differences(self, name):
        options = dict(OPTIONS[name])
        operands = {
            "q": rng(0).normal(size=(2, 2, 4, 3)),
            "k": rng(1).normal(size=(2, 1, 5, 3)),
            "v": rng(2).normal(size=(2, 5, 2)),
        }
        operands |= {n: options.pop(n) for n in ("bias", "sinks") if n in options}
        out, lse = reference.attention(**operands, **options)
        dout, dlse = rng(3).normal(size=out.shape), rng(4).normal(size=lse.shape)
        grads = reference.attention_vjp(dout, **operands, dlse=dlse, **options)
        for operand, value in operands.items():

            def forward(x, operand=operand):
                o, l = reference.attention(**operands | {operand: x}, **options)  # noqa: E741
                return o, np.where(np.isfinite(l), l, 0)

            gradient = getattr(grads, f"d{operand}")
            assert gradient.shape == value.shape
            difference = finite_difference(
                forward, np.where(np.isfinite(value), value, -50), (dout, dlse)
            )
            assert_allclose(gradient, difference, atol=1e-9, err_msg=operand)

    @pytest.mark.parametrize("name", OPTIONS)
    def test_forward_derivative_equals_differences(self, name):
        options = dict(OPTIONS[name])
        operands = {
            "q": rng(0).normal(size=(2, 2, 4, 3)),
            "k": rng(1).normal(size=(2, 1, 5, 3)),
            "v": rng(2).normal(size=(2, 5, 2)),
        }
        operands |= {n: options.pop(n) for n in ("bias", "sinks") if n in options}
        tangents = {n: rng(5 + i).normal(size=x.shape) for i, (n, x) in enumerate(operands.items())}
        results = []
        for step in (1e-5, -1e-5):
            moved = {n: x.astype(np.longdouble) + step * tangents[n] for n, x in operands.items()}
            results.append(reference.attention(**moved, **options))
        given = {"bias": None, "sinks": None} | tangents
        jvp = reference.attention_jvp(
            operands["q"],
            operands["k"],
            operands["v"],
            reference.ReferenceGrads(*(given[n] for n in ("q", "k", "v", "bias", "sinks"))),
            **options,
            **{n: operands[n] for n in ("bias", "sinks") if n in operands},
        )
        for derivative, high, low in zip(jvp, *results, strict=True):
            seen = np.isfinite(high)
            assert_allclose(derivative[seen], (high[seen] - low[seen]) / 2e-5, atol=1e-8)
            assert_array_equal(derivative[~seen], 0)

    @pytest.mark.parametrize("empty", [(), ("a",), ("b",)])
    def test_merge_equals_finite_differences(self, empty):
        parts = {
            "out_a": rng(0).normal(size=(5, 3)),
            "lse_a": rng(1).normal(size=5),
            "out_b": rng(2).normal(size=(5, 3)),
            "lse_b": rng(3).normal(size=5),
        }
        for part in empty:
            parts[f"lse_{part}"][1:] = -np.inf
            parts[f"out_{part}"][1:] = np.nan
        dout, dlse = rng(4).normal(size=(5, 3)), rng(5).normal(size=5)
        grads = reference.merge_attention_vjp(dout, dlse, **parts)
        for (name, value), gradient in zip(parts.items(), grads, strict=True):

            def forward(x, name=name):
                return reference.merge_attention(**parts | {name: x})

            assert_allclose(gradient, finite_difference(forward, value, (dout, dlse)), atol=1e-9)

    def test_grouped_heads_sum_over_their_group(self):
        q, k, v = (rng(s).normal(size=(h, 3, 2)) for s, h in ((0, 6), (1, 2), (2, 2)))
        dout = rng(3).normal(size=(6, 3, 2))
        grads = reference.attention_vjp(dout, q, k, v, enable_gqa=True, causal=True)
        by_broadcasting = reference.attention_vjp(
            dout.reshape(2, 3, 3, 2), q.reshape(2, 3, 3, 2), k[:, None], v[:, None], causal=True
        )
        assert_allclose(grads.dq, by_broadcasting.dq.reshape(6, 3, 2), rtol=1e-13)
        assert_allclose(grads.dk, by_broadcasting.dk[:, 0], rtol=1e-13)
        assert_allclose(grads.dv, by_broadcasting.dv[:, 0], rtol=1e-13)

    def test_no_visible_key_but_a_sink(self):
        q, k, v = (rng(s).normal(size=(2, 3, 2)) for s in range(3))
        dout, dlse = rng(3).normal(size=(2, 3, 2)), np.array([[1.0, 2, 4], [8, 16, 32]])
        grads = reference.attention_vjp(
            dout, q, k, v, dlse=dlse, sinks=np.zeros(2), mask=False, query_lengths=[2]
        )
        assert_array_equal(grads.dsinks, [3.0, 24.0])
        for gradient in grads[:3]:
            assert_array_equal(gradient, np.zeros((2, 3, 2)))

    def test_unseen_pairs_give_nothing(self):
        """Causal with NaN in row 2 of v, then of dout: what does not meet it is clean."""
        q, k, v, dout = (rng(s).normal(size=(4, 2)) for s in range(4))
        clean = reference.attention_vjp(dout, q, k, v, causal=True)
        spoiled_v, spoiled_dout = v.copy(), dout.copy()
        spoiled_v[2] = np.nan
        spoiled_dout[2] = np.nan
        grads = reference.attention_vjp(dout, q, k, spoiled_v, causal=True)
        assert_array_equal(grads.dq[:2], clean.dq[:2])
        assert np.isnan(grads.dq[2:]).all()
        grads = reference.attention_vjp(spoiled_dout, q, k, v, causal=True)
        assert_array_equal(grads.dq[[0, 1, 3]], clean.dq[[0, 1, 3]])
        assert_array_equal(grads.dk[3], clean.dk[3])
        assert_array_equal(grads.dv[3], clean.dv[3])
        assert np.isnan(grads.dv[:3]).all()

    def test_padded_queries_are_unread(self):
        q, k, v, dout = (rng(s).normal(size=(4, 2)) for s in range(4))
        q[3] = dout[3] = np.nan
        dlse = np.array([1.0, 2.0, 3.0, np.nan])
        grads = reference.attention_vjp(dout, q, k, v, dlse=dlse, query_lengths=3)
        assert_array_equal(grads.dq[3], [0.0, 0.0])
        assert all(np.isfinite(g).all() for g in grads[:3])

    def test_varlen_collects_from_each_sequence(self):
        q, k, v, dout = (rng(s).normal(size=(2, 5, 3)) for s in range(4))
        sinks, dlse = np.array([0.5, 1.0]), rng(5).normal(size=(2, 5))
        grads = reference.attention_varlen_vjp(
            dout, q, k, v, [0, 2, 4], [0, 3, 5], dlse=dlse, sinks=sinks
        )
        parts = [
            reference.attention_vjp(
                *(x[:, rows] for x in (dout, q)), *(x[:, keys] for x in (k, v)),
                dlse=dlse[:, rows], sinks=sinks,
            )
            for rows, keys in ((slice(0, 2), slice(0, 3)), (slice(2, 4), slice(3, 5)))
        ]  # fmt: skip
        assert_array_equal(grads.dq[:, 2:4], parts[1].dq)
        assert_array_equal(grads.dq[:, 4], np.zeros((2, 3)))
        assert_array_equal(grads.dk, np.concatenate([p.dk for p in parts], axis=1))
        assert_allclose(grads.dsinks, parts[0].dsinks + parts[1].dsinks, rtol=1e-15)


class TestOnline:
    @pytest.mark.parametrize("tk", [0, 1, 2, 3, 4, 6, 10])
    def test_three_key_tiles_equal_the_whole(self, tk):
        q, k, v = (rng(s).normal(size=(n, 4)) for s, n in ((0, 5), (1, tk), (2, tk)))
        out, lse = reference.online_attention(q, 20 * k, v)
        expected_out, expected_lse = reference.attention(q, 20 * k, v)
        assert_allclose(out, expected_out, atol=1e-14)
        assert_allclose(lse, expected_lse, rtol=1e-14)

    def test_its_example(self):
        failures, tried = doctest.testmod(_online)
        assert failures == 0
        assert tried > 0


def test_a_row_that_sees_nothing_has_gradient_zero_whatever_comes_back() -> None:
    dy, nothing = np.array([[np.nan, np.inf]]), np.full((1, 2), -np.inf)
    np.testing.assert_array_equal(reference.softmax_vjp(dy, np.zeros((1, 2))), [[0, 0]])
    np.testing.assert_array_equal(reference.log_softmax_vjp(dy, nothing), [[0, 0]])
    back = reference.logsumexp_vjp(dy[:, 0], nothing, np.array([-np.inf]))
    np.testing.assert_array_equal(back, [[0, 0]])
