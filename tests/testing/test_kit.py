"""The kit itself: it passes a right implementation and catches each fault it exists to catch."""

import subprocess
import sys
from functools import partial

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import cuflash.testing
from cuflash import reference
from cuflash.testing import bounds, problems, softmax_properties
from cuflash.testing.bounds import Expected
from cuflash.testing.problems import DTYPES, LAYOUTS, AttentionCase, SoftmaxCase, arrange
from cuflash.testing.properties import (
    ATTENTION_PROPERTIES,
    assert_bitwise_equal,
    assert_near,
    split_of_keys,
)
from cuflash.testing.softmax_properties import SOFTMAX_PROPERTIES, MergeCase
from cuflash.testing.strategies import (
    OPTIONS,
    attention_problems,
    merge_problems,
    sizes,
    softmax_problems,
)
from tests.testing import faulty

small_attention = partial(
    attention_problems,
    borders=(16,),
    max_tokens=35,
    max_features=5,
    max_batch_axes=2,
    layouts=("contiguous", "fortran", "step"),
)
attention_cases = small_attention(options=sorted({*OPTIONS} - {"sinks"}))
softmax_cases = softmax_problems(
    borders=(16,), max_row=130, max_axes=3, layouts=("contiguous", "fortran", "step")
)


def run(check, cases, examples):
    """Hold `check` against drawn cases: the same ones every time, and no time for shrinking."""
    settings(
        max_examples=examples,
        phases=[Phase.generate],
        report_multiple_bugs=False,
        derandomize=True,
        database=None,
        deadline=None,
    )(given(cases)(lambda case: check(case)))()


def assert_caught(check, cases):
    with pytest.raises(AssertionError):
        run(check, cases, 400)


@pytest.mark.parametrize("law", ATTENTION_PROPERTIES)
def test_right_attention_passes(law):
    run(partial(ATTENTION_PROPERTIES[law], faulty.attention), attention_cases, 25)


@pytest.mark.parametrize(
    ("law", "fault"),
    [
        ("matches_oracle", "finite sentinel"),
        ("matches_oracle", "missing rescale"),
        ("matches_oracle", "normalises per tile"),
        ("matches_oracle", "float16 accumulator"),
        ("matches_oracle", "causal mask off by one"),
        ("matches_oracle", "drops a tail of one key"),
        ("matches_oracle", "lse in base 2"),
        ("key_permutation", "drops a tail of one key"),
        ("key_permutation", "missing rescale"),
        ("split_of_keys", "normalises per tile"),
        ("split_of_keys", "lse in base 2"),
        ("grouped_heads_equal_repeated_heads", "interleaves head groups"),
        ("linearity_in_v", "takes the absolute value"),
        ("weights_are_convex", "normalises per tile"),
        ("weights_are_convex", "finite sentinel"),
        ("shift_invariance", "epsilon in the denominator"),
        ("causal_future_independence", "causal mask off by one"),
        ("causal_future_independence", "multiplies by zero"),
        ("row_independence", "one maximum for all rows"),
        ("batch_independence", "one maximum for all entries"),
        ("unseen_nonfinite_never_leaks", "multiplies by zero"),
        ("nonfinite_key_reaches_only_rows_that_see_it", "multiplies by zero"),
        ("views_equal_copies", "ignores strides of v"),
        ("poisoned_outputs_fully_written", "leaves empty rows unwritten"),
        ("repeatable", "never the same"),
        ("inputs_unchanged", "scales q in place"),
        ("unrounded_output", "refuses a float32 out"),
    ],
)
def test_attention_fault_is_caught(law, fault):
    attention = partial(faulty.attention, fault=fault)
    assert_caught(partial(ATTENTION_PROPERTIES[law], attention), attention_cases)


def test_a_wrong_merge_is_caught():
    merge = partial(faulty.merge_attention, fault="mean of the parts")
    split = partial(split_of_keys, faulty.attention, merge=merge)
    assert_caught(split, attention_cases)


@pytest.mark.parametrize("name", ["out", "lse"])
def test_dtypes_of_results_are_looked_at(name):
    def attention(*operands, return_lse=False, **options):
        out, lse = faulty.attention(*operands, **options, return_lse=True)
        results = {"out": out, "lse": lse}
        results[name] = results[name].astype(np.float64)
        return tuple(results.values()) if return_lse else results["out"]

    with pytest.raises(AssertionError, match=f"{name} has dtype float64, not float32"):
        ATTENTION_PROPERTIES["matches_oracle"](attention, AttentionCase(tq=2, tk=3))


@pytest.mark.parametrize("law", SOFTMAX_PROPERTIES)
def test_right_softmax_passes(law):
    def check(case):
        SOFTMAX_PROPERTIES[law](faulty.softmax, case, "softmax")

    run(check, softmax_cases, 25)


@pytest.mark.parametrize(
    ("law", "fault"),
    [
        ("matches_oracle", "no maximum"),
        ("matches_oracle", "float16 sum"),
        ("matches_oracle", "ignores strides"),
        ("shift_invariance", "no maximum"),
        ("permutation", "drops the first element"),
        ("rows_sum_to_one", "epsilon in the denominator"),
        ("where_hides", "multiplies by where"),
        ("row_independence", "one maximum for all rows"),
        ("views_equal_copies", "ignores strides"),
        ("output_fully_written", "ignores out"),
        ("in_place", "clears out first"),
        ("repeatable", "never the same"),
    ],
)
def test_softmax_fault_is_caught(law, fault):
    softmax = partial(faulty.softmax, fault=fault)
    assert_caught(lambda case: SOFTMAX_PROPERTIES[law](softmax, case, "softmax"), softmax_cases)


def test_a_wrong_gradient_is_caught():
    def check(case, scale=1.0):
        def vjp(dy, y, **options):
            return (scale * reference.softmax_vjp(dy, y, **options)).astype(y.dtype)

        softmax_properties.vjp_matches_oracle(faulty.softmax, vjp, case, "softmax")

    run(check, softmax_cases, 25)
    assert_caught(partial(check, scale=1.1), softmax_cases)


@pytest.mark.parametrize(
    "fault",
    [
        "no guard of empty parts",
        "shifts by the first lse",
        "multiplies by zero",
        "loses the sign of zero",
    ],
)
def test_a_merge_that_is_no_monoid_is_caught(fault):
    law = softmax_properties.merge_attention_is_a_monoid
    wide = merge_problems(dtypes=("float32", "float64"))
    run(partial(law, faulty.merge_attention), wide, 25)
    assert_caught(partial(law, partial(faulty.merge_attention, fault=fault)), wide)


@pytest.mark.parametrize(
    "fault", ["no guard of empty parts", "poisoned maximum", "maximum by order"]
)
def test_states_that_are_no_monoid_are_caught(fault):
    law = softmax_properties.merge_softmax_is_a_monoid
    run(partial(law, faulty.merge_softmax), merge_problems(), 25)
    assert_caught(partial(law, partial(faulty.merge_softmax, fault=fault)), merge_problems())


def test_a_wrong_state_is_caught():
    law = softmax_properties.state_of_parts_merges
    run(partial(law, faulty.softmax_state, faulty.merge_softmax), softmax_cases, 25)
    wrong = partial(faulty.softmax_state, fault="no maximum")
    assert_caught(partial(law, wrong, faulty.merge_softmax), softmax_cases)
    wrong = partial(faulty.merge_softmax, fault="missing rescale")
    assert_caught(partial(law, faulty.softmax_state, wrong), softmax_cases)


class TestProblems:
    @settings(max_examples=25)
    @given(case=st.one_of(attention_problems(), softmax_problems(), merge_problems()))
    def test_repr_makes_the_same_arrays(self, case):
        names = {"AttentionCase": AttentionCase, "SoftmaxCase": SoftmaxCase, "MergeCase": MergeCase}
        again = eval(repr(case), names)
        assert again == case
        first = case.build()[0]
        second = again.build()[0]
        for x, y in (
            zip(first, second, strict=True) if isinstance(first, tuple) else [(first, second)]
        ):
            assert x.dtype == y.dtype
            assert x.strides == y.strides
            np.testing.assert_array_equal(x.astype(float), y.astype(float))

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_layouts_keep_the_values(self, layout, dtype):
        x = np.arange(24).reshape(2, 3, 4).astype(problems.dtype_of(dtype))
        view = arrange(x, layout)
        expected = np.broadcast_to(x[:1], x.shape) if layout == "broadcast" else x
        np.testing.assert_array_equal(view.astype(float), expected.astype(float))

    def test_layouts_are_what_they_say(self):
        x = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
        strides = {name: arrange(x, name).strides for name in LAYOUTS}
        assert strides["contiguous"] == strides["offset"] == (48, 16, 4)
        assert strides["fortran"] == (4, 8, 24)
        assert strides["tokens_first"] == (16, 32, 4)
        assert strides["reversed"] == (48, -16, -4)
        assert strides["step"] == (192, 64, 8)
        assert strides["packed"] == (144, 48, 4)
        assert strides["broadcast"] == (0, 16, 4)
        assert not arrange(x, "unaligned").flags.aligned
        assert not arrange(x, "byteswapped").dtype.isnative
        buffer = arrange(x, "step").base
        assert np.isnan(buffer[:, 1::2]).all()
        assert np.isnan(buffer[..., 1::2]).all()

    def test_unseen_values_are_those_that_no_row_sees(self):
        case = AttentionCase(
            q_batch=(4,), k_batch=(2,), v_batch=(2,), tq=2, tk=5, causal=True, query_offset=1,
            enable_gqa=True, bias=(5,), unseen="nan",
        )  # fmt: skip
        q, k, v, options = case.build()
        for x in (k, v):
            np.testing.assert_array_equal(np.isnan(x[0, :, 0]), [False] * 3 + [True] * 2)
        np.testing.assert_array_equal(np.isnan(options["bias"]), [False] * 3 + [True] * 2)
        assert not np.isnan(q).any()

    def test_visible_value_is_planted(self):
        for name in ("q", "k", "v"):
            case = AttentionCase(tq=3, tk=3, d=2, dv=2, visible=(name, "inf"))
            assert [np.isinf(x).sum() for x in case.build()[:3]] == [name == n for n in "qkv"]


class TestStrategies:
    @settings(max_examples=25)
    @given(
        case=attention_problems(
            dtypes=("float16",), options=("causal",), layouts=("offset",), logits=("ties",),
            max_tokens=9, max_features=3, max_batch_axes=1, non_finite=False,
        )
    )  # fmt: skip
    def test_filters_are_kept(self, case):
        assert case.dtype == "float16"
        assert case.q_layout == case.k_layout == case.v_layout == "offset"
        assert max(case.tq, case.tk) <= 9
        assert max(case.d, case.dv) <= 3
        assert len(case.batch_shape) <= 1
        drawn = {name for name in OPTIONS if getattr(case, name) not in (None, False)}
        assert drawn <= {"causal"}
        assert case.unseen is None
        assert case.visible is None

    def test_sizes_gather_at_the_borders(self):
        drawn = set()

        @settings(max_examples=300, database=None, derandomize=True)
        @given(n=sizes(0, 130, (64, 128)))
        def collect(n):
            assert 0 <= n <= 130
            drawn.add(n)

        collect()
        assert {0, 1, 63, 64, 65, 127, 128, 129} <= drawn

    def test_only_the_strategies_need_hypothesis(self):
        code = (
            "import sys; sys.modules['hypothesis'] = None; import cuflash.testing.cases; "
            "import cuflash.testing; cuflash.testing.AttentionCase().build()"
        )
        subprocess.run([sys.executable, "-c", code], check=True)

    def test_every_public_name_is_there(self):
        for name in cuflash.testing.__all__:
            assert getattr(cuflash.testing, name) is not None


class TestBounds:
    def test_formula(self):
        """One query, two keys, float32 data that naive and oracle agree on: scores 3 and -5."""
        q, k = np.ones((1, 1), np.float32), np.array([[3], [-5]], np.float32)
        v = np.array([[2.0], [0.0]], np.float32)
        expected = bounds.expect_attention(q, k, v, scale=1.0)
        naive, naive_lse = reference.attention(q, k, v, scale=1.0, precision=np.float32)
        u = 2.0**-24
        error = abs(naive - expected.out.value).max()
        assert expected.out.bound[0, 0] == 2 * error + (4 * u + 4 * u * 6) * 2
        lse, lse_error = expected.lse.value[0], abs(naive_lse - expected.lse.value).max()
        assert expected.lse.bound[0] == 2 * lse_error + 4 * u * (1 + abs(lse) + 5)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_naive_and_its_dtype_are_within_and_near_the_bound(self, dtype):
        case = AttentionCase(q_batch=(2,), k_batch=(2,), tq=40, tk=50, d=16, dv=16, dtype=dtype)
        expected = bounds.error_bound(case)
        naive, lse = reference.attention(*case.build()[:3], precision=bounds.accumulator(dtype))
        rounded = naive.astype(problems.dtype_of(dtype)).astype(np.float64)
        bounds.assert_attention_close(rounded, lse, case)
        largest = abs(case.build().v.astype(np.float64)).max()
        assert expected.out.bound.max() < 60 * bounds.UNIT_ROUNDOFF[dtype] * largest

    def test_empty_rows_have_no_slack(self):
        case = AttentionCase(tq=3, tk=2, causal=True)
        out, lse = (x.copy() for x in reference.attention(*case.build()[:3], causal=True))
        bounds.assert_attention_close(out, lse, case)
        out[0] = 1e-30
        with pytest.raises(AssertionError, match="sees no key"):
            bounds.assert_attention_close(out, lse, case)

    def test_message_says_where(self):
        case = AttentionCase(q_batch=(3,), k_batch=(3,), v_batch=(3,), tq=70, tk=129, causal=True)
        expected = bounds.error_bound(case)
        out = expected.out.value.copy()
        out[1, 64, 0] += 1
        with pytest.raises(AssertionError) as caught:
            bounds.assert_attention_close(out, expected.lse.value, case, borders=(64,))
        message = str(caught.value)
        assert "out[1, 64, 0]" in message
        assert "1 of 210 elements are off" in message
        assert "Query 64 (tile border 1*64+0) of batch entry (1,)" in message
        assert "sees 124 of 129 (tile border 2*64+1) keys, from 0 to 123" in message
        assert repr(case) in message

    def test_frobenius_limit(self):
        case = AttentionCase(tq=32, tk=40, d=8, dv=8)
        expected = bounds.error_bound(case)
        assert expected.out.frobenius == 1e-6
        out = expected.out.value * (1 + 2e-6)
        loose = expected._replace(out=expected.out._replace(bound=np.ones(out.shape)))
        with pytest.raises(AssertionError, match="Frobenius"):
            bounds.assert_attention_close(out, None, loose)
        wide = AttentionCase(tq=32, tk=40, d=8, dv=8, logits="shifted")
        assert bounds.error_bound(wide).out.frobenius is None

    def test_non_finite_values_must_be_where_the_oracle_has_them(self):
        expected = Expected(np.array([1.0, np.nan, np.inf]), np.full(3, 0.5))
        for actual, wrong in (
            ([1.4, np.nan, np.inf], [0, 0, 0]),
            ([1.0, np.nan, np.nan], [0, 0, 0]),
            ([1.6, 0.0, -np.inf], [1, 1, 1]),
            ([np.nan, np.inf, 1.0], [1, 1, 1]),
        ):
            np.testing.assert_array_equal(bounds.outliers(np.array(actual), expected), wrong)

    def test_softmax_message_says_where(self):
        x = np.zeros((3, 65), np.float32)
        expected = bounds.expect_softmax("softmax", x)
        y = expected.value.copy()
        y[2, 64] = 1
        with pytest.raises(AssertionError, match=r"softmax\[2, 64\].*Element 64 \(tile border"):
            bounds.assert_softmax_close(y, expected, borders=(32,))

    def test_a_softmax_case_is_its_own_bound(self):
        case = problems.SoftmaxCase(shape=(3, 65), axis=0, where=(3, 1), seed=4)
        x, options = case.build()
        y = reference.log_softmax(x, **options)
        expected = bounds.error_bound(case, "log_softmax")
        np.testing.assert_array_equal(expected.value, y)
        bounds.assert_softmax_close(y, case, name="log_softmax")
        y[1, 7] += 1
        with pytest.raises(AssertionError, match=r"row of 3\n") as caught:
            bounds.assert_softmax_close(y, case, name="log_softmax")
        assert repr(case) in str(caught.value)

    @pytest.mark.parametrize("compare", [assert_bitwise_equal, assert_near])
    def test_shapes_do_not_broadcast(self, compare):
        value = np.ones(3)
        expected = value if compare is assert_bitwise_equal else bounds.Expected(value, value)
        compare(value, expected, "out", None)
        with pytest.raises(AssertionError, match=r"out: shape \(1,\) instead of \(3,\)"):
            compare(value[:1], expected, "out", None)

    @pytest.mark.parametrize("axis", [0, 1, -1])
    def test_message_on_a_result_without_the_axis(self, axis):
        expected = bounds.expect_softmax("logsumexp", np.zeros((3, 65), np.float32), axis)
        with pytest.raises(AssertionError, match=rf"logsumexp\[0\].*over axis {axis}"):
            bounds.assert_softmax_close(expected.value + 1, expected, name="logsumexp", axis=axis)

    def test_softmax_bound_is_relative(self):
        x = np.array([0.0, -60.0, -200.0])
        expected = bounds.expect_softmax("softmax", x)
        assert expected.bound[1] < 1e-12 * expected.value[1] + 4e-16
