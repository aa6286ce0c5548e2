"""The frozen descriptions of the work: what they hold, and what they refuse."""

import dataclasses
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from cuflash._options import choose_method, flag, integer, normalize_axes, real_number
from cuflash.problem import (
    BFLOAT16,
    ArraySpec,
    AttentionArrays,
    AttentionProblem,
    SoftmaxProblem,
    accumulator,
    c_strides,
    check_lengths,
    keep_axes,
    require_float,
    require_output,
)

FLOATS = [np.dtype(t) for t in (np.float64, np.float32, np.float16, ml_dtypes.bfloat16)]
SHAPES = hnp.array_shapes(min_dims=0, max_dims=5, min_side=0, max_side=4)


def operands(dtype: Any = np.float32) -> dict[str, np.ndarray]:
    """Return q, k, v of batch shape (2, 4), partly broadcast."""
    return {
        "q": np.zeros((2, 1, 5, 8), dtype),
        "k": np.zeros((4, 6, 8), dtype),
        "v": np.zeros((2, 4, 6, 3), dtype),
    }


def describe(given: dict[str, Any] | None = None, **options: Any) -> AttentionProblem:
    return AttentionProblem.of(AttentionArrays(**(operands() | (given or {}))), **options)


class TestArraySpec:
    @given(shape=SHAPES, dtype=st.sampled_from(FLOATS))
    def test_strides_of_c_order_are_numpys(self, shape: tuple[int, ...], dtype: np.dtype) -> None:
        strides = c_strides(shape, dtype.itemsize)
        assert len(strides) == len(shape)
        if 0 not in shape:  # NumPy gives an empty array any strides
            assert strides == np.empty(shape, dtype).strides
        assert ArraySpec.of(SimpleNamespace(shape=shape, dtype=dtype)) == (shape, strides, dtype)

    @given(data=st.data(), target=SHAPES)
    def test_broadcasting_is_numpys(self, data: st.DataObject, target: tuple[int, ...]) -> None:
        shape = data.draw(hnp.broadcastable_shapes(target, max_dims=5, max_side=4) | SHAPES)
        x = np.empty(shape, np.float32)
        try:
            expected = np.broadcast_to(x, target)
        except ValueError:
            with pytest.raises(ValueError, match=r"^bias has shape .* does not broadcast to"):
                ArraySpec.of(x).broadcast_to(target, "bias")
        else:
            spec = ArraySpec.of(x).broadcast_to(target, "bias")
            assert spec.shape == target
            if shape != target:
                steps = zip(spec.strides, expected.strides, target, strict=True)
                assert all(mine == numpys or size < 2 for mine, numpys, size in steps)

    def test_anything_with_shape_and_dtype_can_be_described(self) -> None:
        view = np.empty((4, 6), np.float16)[::2, ::-3]
        assert ArraySpec.of(view) == ((2, 2), (24, -6), np.float16)
        bare = SimpleNamespace(shape=[2, 3], dtype="bfloat16", strides=None)
        assert ArraySpec.of(bare) == ((2, 3), (6, 2), BFLOAT16)


class TestArguments:
    """Each of these names the argument that it refuses."""

    @pytest.mark.parametrize("dtype", FLOATS)
    def test_accumulator(self, dtype: np.dtype) -> None:
        assert accumulator(dtype) == (np.float64 if dtype == np.float64 else np.float32)

    @pytest.mark.parametrize("value", [1, 1.5, np.float16(2), np.int8(-3), Fraction(1, 4), 0, -0.0])
    def test_real_numbers(self, value: Any) -> None:
        number = real_number("scale", value)
        assert type(number) is float
        assert number == value

    @pytest.mark.parametrize("value", [True, np.True_, "1", None, 1j, [1.0], np.array(1.0)])
    def test_not_a_real_number(self, value: Any) -> None:
        with pytest.raises(TypeError, match=r"^scale must be a real number, got "):
            real_number("scale", value)

    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, np.float16("inf"), 10**400])
    def test_not_finite(self, value: Any) -> None:
        with pytest.raises(ValueError, match=r"^scale must be finite, got "):
            real_number("scale", value)

    @pytest.mark.parametrize("value", [0, -5, 2**61 - 1, np.int8(3), np.uint64(3), np.array(3)])
    def test_integers(self, value: Any) -> None:
        number = integer("num_splits", value)
        assert type(number) is int
        assert number == value

    @pytest.mark.parametrize("value", [True, np.False_, 1.0, "1", None, np.array([3]), [3]])
    def test_not_an_integer(self, value: Any) -> None:
        with pytest.raises(TypeError, match=r"^num_splits must be an integer, got "):
            integer("num_splits", value)

    @pytest.mark.parametrize("value", [2**61, -(2**61) - 1, 10**30])
    def test_integers_with_which_positions_would_overflow(self, value: int) -> None:
        with pytest.raises(ValueError, match=r"^window must fit in 62 bits"):
            integer("window", value)

    def test_flags(self) -> None:
        assert flag("causal", True) is True
        assert flag("causal", np.False_) is False
        for value in (0, 1, None, "True", np.array(True)):
            with pytest.raises(TypeError, match=r"^causal must be True or False"):
                flag("causal", value)

    def test_methods(self) -> None:
        for method in ("auto", "simt", "mma"):
            assert choose_method(method, ("simt", "mma"), (), "here") == method
        with pytest.raises(ValueError, match=r"^method 'x' is unknown; .*: 'auto', 'simt', 'mma'$"):
            choose_method("x", ("simt", "mma"), ("tiled",), "here")
        message = r"^method 'tiled' cannot run this problem here; .*: 'auto', 'simt'$"
        with pytest.raises(ValueError, match=message):
            choose_method("tiled", ("simt",), ("tiled",), "here")
        with pytest.raises(TypeError, match=r"^method must be a string, got list"):
            choose_method(["simt"], ("simt",), (), "here")

    def test_floats(self) -> None:
        for dtype in FLOATS:
            require_float("q", dtype)
        for name in ("i4", "?", "c8", "O", "g", "float8_e4m3fn", ">f4"):
            with pytest.raises(TypeError, match=r"^q has dtype .*; accepted are float64, float32"):
                require_float("q", np.dtype(name))

    def test_outputs(self) -> None:
        spec = ArraySpec.of(np.empty((2, 3), np.float32))
        require_output("out", spec, (2, 3), FLOATS)
        with pytest.raises(ValueError, match=r"^out has shape \(2, 3\), the result has \(3, 2\)$"):
            require_output("out", spec, (3, 2), FLOATS)
        with pytest.raises(TypeError, match=r"^out has dtype float32, the result is float16 or bf"):
            require_output("out", spec, (2, 3), FLOATS[2:])

    @pytest.mark.parametrize("dtype", ["i1", "u1", "i4", "u8", "i8"])
    def test_lengths(self, dtype: str) -> None:
        check_lengths("key_lengths", np.array([0, 7, 3], dtype), 7)
        check_lengths("key_lengths", np.array([], dtype), 0)
        with pytest.raises(ValueError, match=r"^key_lengths has the value 7, outside 0\.\.6$"):
            check_lengths("key_lengths", np.array([0, 7, 3], dtype), 6)
        if dtype.startswith("i"):
            with pytest.raises(ValueError, match=r"^key_lengths has the value -1, outside 0\.\.6$"):
                check_lengths("key_lengths", np.array([0, 9, -1], dtype), 6)

    @given(ndim=st.integers(1, 6), data=st.data())
    def test_axes_are_numpys(self, ndim: int, data: st.DataObject) -> None:
        axes = st.integers(-8, 8)
        axis = data.draw(st.none() | axes | st.lists(axes, max_size=7).map(tuple))
        wanted = tuple(range(ndim)) if axis is None else axis
        try:
            expected = np.lib.array_utils.normalize_axis_tuple(wanted, ndim)
        except (ValueError, np.exceptions.AxisError) as error:
            with pytest.raises(type(error), match="axis"):
                normalize_axes(axis, ndim)
        else:
            assert normalize_axes(axis, ndim) == tuple(sorted(expected))

    def test_axes_of_a_scalar(self) -> None:
        assert normalize_axes(None, 0) == normalize_axes(0, 0) == normalize_axes(-1, 0) == ()
        with pytest.raises(np.exceptions.AxisError):
            normalize_axes(1, 0)
        for axis in (1.0, "0", [0], True):
            with pytest.raises(TypeError, match=r"^axis must be an integer"):
                normalize_axes(axis, 2)

    @given(shape=hnp.array_shapes(max_dims=5), data=st.data())
    def test_reduced_axes_come_back_with_size_1(
        self, shape: tuple[int, ...], data: st.DataObject
    ) -> None:
        axes = tuple(sorted(data.draw(st.sets(st.integers(0, len(shape) - 1)))))
        x = np.zeros(shape)
        kept = x.sum(axis=axes, keepdims=True)
        assert keep_axes(x.sum(axis=axes), axes, x.ndim).shape == kept.shape
        assert keep_axes(kept, axes, x.ndim) is kept


class TestAttentionProblem:
    def test_operands_are_described_at_their_full_shape(self) -> None:
        problem = describe()
        assert problem.batch_shape == (2, 4)
        assert (problem.tq, problem.tk, problem.d, problem.dv) == (5, 6, 8, 3)
        assert problem.q == ((2, 4, 5, 8), (160, 0, 32, 4), np.float32)
        assert problem.k == ((2, 4, 6, 8), (0, 192, 32, 4), np.float32)
        assert problem.v == ArraySpec.of(operands()["v"])
        assert problem.dtype == np.float32
        assert problem.out_shape == (2, 4, 5, 3)
        assert problem.lse_shape == (2, 4, 5)

    def test_options_are_described_at_their_full_shape(self) -> None:
        problem = describe(
            {
                "mask": np.ones((4, 1, 6), bool),
                "bias": np.ones((5, 6), BFLOAT16).T[::-1].T,
                "alibi_slopes": np.ones(4, np.float64),
                "sinks": np.ones((2, 1), np.float16),
                "query_offset": -3,
                "query_lengths": np.full((2, 1), 5, np.uint8),
                "key_lengths": np.full((1, 4), 6, np.int32),
            }
        )
        assert problem.mask == ((2, 4, 5, 6), (0, 6, 0, 1), np.bool)
        assert problem.bias == ((2, 4, 5, 6), (0, 0, 12, -2), BFLOAT16)
        assert problem.alibi_slopes == ((2, 4), (0, 8), np.float64)
        assert problem.sinks == ((2, 4), (2, 0), np.float16)
        assert problem.query_offset == ((2, 4), (0, 0), np.int64)
        assert problem.query_lengths == ((2, 4), (1, 0), np.uint8)
        assert problem.key_lengths == ((2, 4), (0, 4), np.int32)

    def test_it_depends_on_no_value(self) -> None:
        rng = np.random.default_rng(0)
        a, b = (
            describe(
                {name: rng.standard_normal(x.shape, x.dtype) for name, x in operands().items()}
                | {"key_lengths": rng.integers(0, 7, (2, 4)), "mask": rng.random((5, 6)) < 0.5}
            )
            for _ in range(2)
        )
        assert a == b
        assert hash(a) == hash(b)
        assert len({a, b, describe()}) == 2

    @pytest.mark.parametrize(
        "change",
        [
            {"scale": 2.0},
            {"causal": True},
            {"window": (1, None)},
            {"softcap": 1.0},
            {"num_splits": 2},
            {"method": "tiled"},
        ],
        ids=str,
    )
    def test_it_depends_on_every_option(self, change: dict[str, Any]) -> None:
        assert describe(**change) != describe()

    def test_it_cannot_be_changed(self) -> None:
        with pytest.raises(dataclasses.FrozenInstanceError):
            describe().scale = 1.0  # type: ignore[misc]

    def test_default_scale(self) -> None:
        assert describe().scale == pytest.approx(8**-0.5, rel=1e-15)
        assert describe(scale=-2).scale == -2.0
        assert describe(scale=0).scale == 0.0

    @pytest.mark.parametrize(
        ("window", "causal", "sides"),
        [
            (None, False, (None, None)),
            (None, True, (None, 0)),
            ((3, 4), False, (3, 4)),
            ((3, 4), True, (3, 0)),
            ((3, 0), True, (3, 0)),
            ((None, None), True, (None, 0)),
            ([None, 2], False, (None, 2)),
        ],
    )
    def test_causal_is_a_window(self, window: Any, causal: bool, sides: tuple[Any, Any]) -> None:
        problem = describe(window=window, causal=causal)
        assert (problem.left, problem.right) == sides

    @pytest.mark.parametrize("dtype", FLOATS)
    def test_dtypes(self, dtype: np.dtype) -> None:
        assert describe(operands(dtype)).dtype == dtype

    def test_lengths_without_values_are_not_checked(self) -> None:
        """Those of a GPU, of which the host knows the shape alone."""
        far = SimpleNamespace(shape=(2, 4), dtype=np.dtype(np.int64), strides=(32, 8))
        assert describe({"key_lengths": far}).key_lengths == ((2, 4), (32, 8), np.int64)

    def test_the_operand_that_does_not_fit_is_named(self) -> None:
        message = (
            r"^v has batch axes \(3,\) \(shape \(3, 6, 3\)\), which do not broadcast with those of "
            r"q \(2, 1, 5, 8\), k \(4, 6, 8\)$"
        )
        with pytest.raises(ValueError, match=message):
            describe({"v": np.zeros((3, 6, 3), np.float32)})


@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_grouped_heads_are_described_as_the_views_with_two_axes(key_heads: int) -> None:
    """The same problem, so that the same plans are found under it."""
    groups = 4 // key_heads
    q = np.ones((2, 5, 4, 8), np.float32).swapaxes(1, 2)
    k, v = (np.ones((2, key_heads, 6, n), np.float32)[:, ::-1] for n in (8, 3))
    options = {
        "mask": np.ones((4, 5, 6), bool),
        "bias": np.ones((2, 1, 5, 1), np.float32),
        "alibi_slopes": np.ones(4, np.float32),
        "sinks": np.ones((2, 4), np.float32),
        "query_offset": np.ones((1, 4), np.int64),
        "query_lengths": np.ones((2, 1), np.int64),
        "key_lengths": 3,
    }
    split = {
        "mask": options["mask"].reshape(key_heads, groups, 5, 6),
        "bias": options["bias"][:, :, None],
        "alibi_slopes": options["alibi_slopes"].reshape(key_heads, groups),
        "sinks": options["sinks"].reshape(2, key_heads, groups),
        "query_offset": options["query_offset"].reshape(1, key_heads, groups),
        "query_lengths": options["query_lengths"][:, :, None],
        "key_lengths": 3,
    }
    grouped = AttentionProblem.of(AttentionArrays(q, k, v, **options), enable_gqa=True)
    views = AttentionArrays(
        q.reshape(2, key_heads, groups, 5, 8), k[:, :, None], v[:, :, None], **split
    )
    expected = AttentionProblem.of(views)
    for field in dataclasses.fields(AttentionProblem):
        one, other = getattr(grouped, field.name), getattr(expected, field.name)
        if isinstance(one, ArraySpec):  # strides of axes of size 1 mean nothing
            assert (one.shape, one.dtype) == (other.shape, other.dtype)
            where = [size > 1 for size in one.shape]
            assert [s for s, w in zip(one.strides, where, strict=True) if w] == [
                s for s, w in zip(other.strides, where, strict=True) if w
            ]
        elif field.compare:
            assert one == other


class TestSoftmaxProblem:
    def test_result(self) -> None:
        x = np.zeros((2, 3, 4), np.float16)
        problem = SoftmaxProblem.of("softmax", {"x": x}, (-1, 0), method="online")
        assert problem.operand == ArraySpec.of(x)
        assert problem.axes == (0, 2)
        assert (problem.out_shape, problem.out_dtype) == ((2, 3, 4), np.float16)
        assert (problem.accumulator, problem.method) == (np.float32, "online")
        assert SoftmaxProblem.of("logsumexp", {"x": x}, 1).out_shape == (2, 1, 4)
        state = SoftmaxProblem.of("softmax_state", {"x": x}, None)
        assert (state.out_shape, state.out_dtype) == ((1, 1, 1), np.float32)

    @pytest.mark.parametrize("dtype", ["?", "u1", "i8"])
    def test_integers_become_float64(self, dtype: str) -> None:
        assert SoftmaxProblem.of("softmax", {"x": np.zeros(3, dtype)}, 0).out_dtype == np.float64

    @pytest.mark.parametrize("dtype", ["c8", "O", "M8[s]", "S1", "g"])
    def test_other_dtypes_are_refused(self, dtype: str) -> None:
        with pytest.raises(TypeError, match=r"^x has dtype .*; accepted are float64"):
            SoftmaxProblem.of("softmax", {"x": np.zeros(3, dtype)}, 0)

    def test_operands_agree(self) -> None:
        y = np.zeros((2, 3), np.float32)
        with pytest.raises(ValueError, match=r"^dy has shape \(3, 2\) but y has \(2, 3\)"):
            SoftmaxProblem.of("softmax_vjp", {"dy": y.T, "y": y}, 0)
        with pytest.raises(TypeError, match=r"^dy has dtype float64 but y has float32"):
            SoftmaxProblem.of("softmax_vjp", {"dy": y.astype("f8"), "y": y}, 0)

    @pytest.mark.parametrize("shape", [(2,), (2, 1)])
    def test_reduced_operands_keep_their_axes_or_lack_them(self, shape: tuple[int, ...]) -> None:
        x, lse = np.zeros((2, 3), np.float16), np.zeros(shape, np.float32)
        problem = SoftmaxProblem.of("logsumexp_vjp", {"dlse": lse, "x": x, "lse": lse}, 1)
        assert [spec.shape for spec in problem.inputs] == [(2, 1), (2, 3), (2, 1)]
        with pytest.raises(ValueError, match=r"^dlse has shape \(3,\); x of shape \(2, 3\)"):
            SoftmaxProblem.of("logsumexp_vjp", {"dlse": np.zeros(3), "x": x, "lse": lse}, 1)
        with pytest.raises(TypeError, match=r"^lse has dtype float64, which is neither"):
            SoftmaxProblem.of("logsumexp_vjp", {"dlse": lse, "x": x, "lse": lse.astype("f8")}, 1)

    def test_masks(self) -> None:
        x = np.zeros((2, 3))
        problem = SoftmaxProblem.of("softmax", {"x": x}, 0, where=np.ones(3, bool))
        assert problem.where == ((2, 3), (0, 1), np.bool)
        with pytest.raises(TypeError, match=r"^where has dtype int64; bool is needed"):
            SoftmaxProblem.of("softmax", {"x": x}, 0, where=np.ones(3, np.int64))
        with pytest.raises(ValueError, match=r"^where has shape \(2,\), which does not broadcast"):
            SoftmaxProblem.of("softmax", {"x": x}, 0, where=np.ones(2, bool))
