"""softmax, log_softmax, logsumexp and their gradients: what holds for every engine and library."""

import ml_dtypes
import numpy as np
import pytest
import scipy.special

import cuflash
from cuflash import reference

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [np.dtype(t) for t in (np.float64, np.float32, np.float16)] + [BFLOAT16]
FORWARD = [cuflash.softmax, cuflash.log_softmax, cuflash.logsumexp]
SHAPES_AND_AXES = [
    ((5, 7), -1),
    ((3, 300), 1),
    ((300, 3), 0),
    ((3, 4, 5, 6), (1, -1)),
    ((2, 3, 4), None),
    ((6,), 0),
    ((), None),
    ((2, 3), ()),
]
inf, nan = np.inf, np.nan


def eps(dtype):
    return float(ml_dtypes.finfo(dtype).eps)


def assert_close(got, expected, dtype, scale=4.0):
    """Compare with float64 values, to a few roundings of the result's largest element."""
    assert got.dtype == dtype
    assert got.shape == expected.shape
    bound = scale * eps(dtype) * (1 + np.abs(expected).max(initial=0))
    np.testing.assert_allclose(got.astype(np.float64), expected, rtol=0, atol=bound)


def bits(x):
    return np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}")


def names(function):
    return function.__name__


# ---------------------------------------------------------------------------------- values


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "axis"), SHAPES_AND_AXES)
@pytest.mark.parametrize("function", FORWARD, ids=names)
def test_agrees_with_the_oracle_and_scipy(function, shape, axis, dtype, rng):
    x = np.asarray(3 * rng.standard_normal(shape)).astype(dtype)
    expected = getattr(reference, names(function))(x, axis)
    assert_close(function(x, axis), expected, dtype)
    if axis != ():
        wide = x.astype(np.float64)
        from_scipy = getattr(scipy.special, names(function))(wide, axis=axis)
        np.testing.assert_allclose(function(wide, axis), from_scipy, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize(("shape", "axis"), SHAPES_AND_AXES)
@pytest.mark.parametrize("masked", [False, True])
def test_gradients_agree_with_the_oracle(shape, axis, masked, rng):
    x, dy = rng.standard_normal((2, *shape))
    where = rng.random(shape) < 0.7 if masked else None
    for function in (cuflash.softmax, cuflash.log_softmax):
        y = np.asarray(function(x, axis, where=where))
        vjp = f"{names(function)}_vjp"
        expected = getattr(reference, vjp)(dy, y, axis, where=where)
        assert_close(getattr(cuflash, vjp)(dy, y, axis, where=where), expected, np.float64)
    for keepdims in (False, True):
        lse = np.asarray(cuflash.logsumexp(x, axis, where=where, keepdims=keepdims))
        dlse = rng.standard_normal(lse.shape)
        expected = reference.logsumexp_vjp(dlse, x, lse, axis, where=where)
        got = cuflash.logsumexp_vjp(dlse, x, lse, axis, where=where)
        assert_close(got, expected, np.float64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_have_their_operands_dtype(dtype, rng):
    x, dy = (rng.standard_normal((2, 5, 33))).astype(dtype)
    y, log_y, lse = cuflash.softmax(x), cuflash.log_softmax(x), cuflash.logsumexp(x)
    assert_close(cuflash.softmax_vjp(dy, y), reference.softmax_vjp(dy, y), dtype)
    assert_close(cuflash.log_softmax_vjp(dy, log_y), reference.log_softmax_vjp(dy, log_y), dtype)
    expected = reference.logsumexp_vjp(dy[:, 0], x, lse)
    assert_close(cuflash.logsumexp_vjp(dy[:, 0], x, lse), expected, dtype)


def test_logsumexp_vjp_takes_16_bit_operands_with_float32_statistics(rng):
    x = rng.standard_normal((4, 9)).astype(np.float16)
    lse = cuflash.logsumexp(x.astype(np.float32))
    got = cuflash.logsumexp_vjp(np.ones(4, np.float16), x, lse)
    assert_close(got, reference.softmax(x), np.float16)


def test_sums_of_16_bit_elements_are_wider():
    half = cuflash.softmax(np.zeros((2, 4096), np.float16))
    assert half.dtype == np.float16
    assert (half == 2.0**-12).all()
    brain = cuflash.softmax(np.zeros((2, 512), BFLOAT16))
    assert brain.dtype == BFLOAT16
    assert (brain == 2.0**-9).all()
    lse = cuflash.logsumexp(np.zeros((1, 65536), np.float16))
    assert lse.dtype == np.float16
    assert lse == np.float16(np.log(65536))


@pytest.mark.parametrize("dtype", [np.bool, np.int8, np.uint64, np.int64], ids=names)
def test_integers_and_bool_compute_in_float64(dtype):
    x = np.array([[0, 1, 1], [1, 0, 0]]).astype(dtype)
    for function in FORWARD:
        expected = getattr(reference, names(function))(x)
        assert_close(function(x), expected, np.float64)
    lse = cuflash.logsumexp(x)
    assert_close(cuflash.logsumexp_vjp([1, 1], x, lse), reference.softmax(x), np.float64)


def test_sequences_and_scalars():
    assert_close(cuflash.softmax([1.0, 2.0]), reference.softmax([1.0, 2.0]), np.float64)
    assert_close(cuflash.softmax([[1, 2], [3, 5]], 0), reference.softmax([[1, 2], [3, 5]], 0), "f8")
    assert_close(cuflash.softmax([1.0, 2.0], where=[True, False]), np.array([1.0, 0]), np.float64)
    for axis in (0, -1, None):
        assert cuflash.softmax(3, axis) == 1.0
        assert cuflash.logsumexp(3.5, axis) == 3.5
    assert isinstance(cuflash.logsumexp(np.arange(3.0)), np.float64)
    assert cuflash.softmax(np.float32(2)).dtype == np.float32
    assert cuflash.softmax_vjp([1, 0], [0.5, 0.5]).tolist() == [0.25, -0.25]
    assert cuflash.softmax(np.ones(2, np.float32), where=True).tolist() == [0.5, 0.5]


# --------------------------------------------------------------- empty rows, NaN, infinity


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_that_sees_nothing(dtype):
    x = np.array([[-inf, -inf, -inf], [1, 2, 3]], dtype)
    y, log_y = cuflash.softmax(x), cuflash.log_softmax(x)
    assert bits(y[0]).tolist() == [0, 0, 0]
    assert (log_y[0] == -inf).all()
    assert cuflash.logsumexp(x)[0] == -inf
    np.testing.assert_array_equal(y[1], cuflash.softmax(x[1]))
    dy = np.array([[nan, inf, 1], [1, 0, 0]], dtype)
    assert (cuflash.softmax_vjp(dy, y)[0] == 0).all()
    assert (cuflash.log_softmax_vjp(dy, log_y)[0] == 0).all()
    lse = cuflash.logsumexp(x)
    assert (cuflash.logsumexp_vjp(np.array([nan, 1], dtype), x, lse)[0] == 0).all()
    assert np.isfinite(cuflash.softmax_vjp(dy, y)[1].astype(np.float64)).all()


def test_a_row_whose_elements_are_all_hidden():
    x = np.array([[nan, inf, 1.0], [1, 2, 3]])
    where = np.array([[False], [True]])
    assert cuflash.softmax(x, where=where)[0].tolist() == [0, 0, 0]
    assert cuflash.log_softmax(x, where=where)[0].tolist() == [-inf] * 3
    assert cuflash.logsumexp(x, where=where)[0] == -inf
    assert cuflash.softmax_vjp(x, x, where=where)[0].tolist() == [0, 0, 0]
    assert cuflash.log_softmax_vjp(x, x, where=where)[0].tolist() == [0, 0, 0]
    lse = np.array([-inf, 3.4])
    assert cuflash.logsumexp_vjp(np.array([nan, 1]), x, lse, where=where)[0].tolist() == [0, 0, 0]


@pytest.mark.parametrize("poison", [nan, inf, -inf, 1e300])
@pytest.mark.parametrize("length", [6, 200])
def test_hidden_elements_contribute_nothing(poison, length, rng):
    x, dy = rng.standard_normal((2, 4, length))
    where = rng.random((4, length)) < 0.6
    clean, poisoned = np.where(where, x, 0), np.where(where, x, poison)
    dclean, dpoisoned = np.where(where, dy, 0), np.where(where, dy, poison)
    for function, hidden in ((cuflash.softmax, 0), (cuflash.log_softmax, -inf)):
        y = function(clean, where=where)
        np.testing.assert_array_equal(function(poisoned, where=where), y)
        assert (y[~where] == hidden).all()
        vjp = getattr(cuflash, f"{names(function)}_vjp")
        dx = vjp(dclean, y, where=where)
        np.testing.assert_array_equal(vjp(dpoisoned, np.where(where, y, poison), where=where), dx)
        assert (dx[~where] == 0).all()
    lse = cuflash.logsumexp(clean, where=where)
    np.testing.assert_array_equal(cuflash.logsumexp(poisoned, where=where), lse)
    dx = cuflash.logsumexp_vjp(lse, poisoned, lse, where=where)
    np.testing.assert_array_equal(dx, cuflash.logsumexp_vjp(lse, clean, lse, where=where))
    assert (dx[~where] == 0).all()


def test_where_broadcasts(rng):
    x = rng.standard_normal((3, 4, 5))
    for shape in ((5,), (4, 1), (3, 1, 1), (1, 4, 5), ()):
        where = rng.random(shape) < 0.5
        full = np.broadcast_to(where, x.shape).copy()
        np.testing.assert_array_equal(
            cuflash.softmax(x, 1, where=where), cuflash.softmax(x, 1, where=full)
        )
        expected = reference.softmax(x, 1, where=where)
        assert_close(cuflash.softmax(x, 1, where=where), expected, np.float64)


@pytest.mark.parametrize(
    ("row", "softmax", "lse"),
    [
        ([nan, 1, 2], nan, nan),
        ([inf, 1, 2], nan, inf),
        ([inf, inf, -inf], nan, inf),
        ([inf, nan, 2], nan, nan),
        ([-inf, nan, 2], nan, nan),
    ],
)
def test_nan_and_infinity_stay_in_their_row(row, softmax, lse):
    x = np.array([[1.0, 2, 3], row, [4, 5, 6]])
    for function in (cuflash.softmax, cuflash.log_softmax):
        y = function(x)
        assert np.isnan(y[1]).all() == np.isnan(softmax)
        np.testing.assert_array_equal(y[[0, 2]], function(x[[0, 2]]))
    np.testing.assert_array_equal(cuflash.logsumexp(x)[1], lse)
    np.testing.assert_array_equal(cuflash.logsumexp(x)[[0, 2]], cuflash.logsumexp(x[[0, 2]]))
    with np.errstate(all="ignore"):
        assert np.isnan(scipy.special.softmax(x, axis=-1)[1]).all() == np.isnan(softmax)
        np.testing.assert_array_equal(scipy.special.logsumexp(x, axis=-1)[1], lse)


def test_a_row_of_nan_keeps_its_hidden_elements():
    x, where = np.array([nan, 1.0, 2.0]), np.array([True, True, False])
    for function, hidden in ((cuflash.softmax, 0), (cuflash.log_softmax, -inf)):
        y = function(x, where=where)
        np.testing.assert_array_equal(y, [nan, nan, hidden])
        vjp = getattr(cuflash, f"{names(function)}_vjp")
        np.testing.assert_array_equal(vjp(x, y, where=where), [nan, nan, 0])
    lse = cuflash.logsumexp(x, where=where)
    np.testing.assert_array_equal(cuflash.logsumexp_vjp(1.0, x, lse, where=where), [nan, nan, 0])


def test_minus_infinity_beside_finite_elements():
    x = np.array([-inf, 0, 0], np.float32)
    assert cuflash.softmax(x).tolist() == [0, 0.5, 0.5]
    assert cuflash.log_softmax(x)[0] == -inf
    assert cuflash.logsumexp(x) == np.log(np.float32(2))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_extreme_elements_neither_overflow_nor_warn(dtype):
    top = float(ml_dtypes.finfo(dtype).max)
    x = np.array([[top, -top, 0], [-top, -top, -inf]], dtype)
    assert cuflash.softmax(x).tolist() == [[1, 0, 0], [0.5, 0.5, 0]]
    assert cuflash.logsumexp(x).tolist() == [top, -top]
    assert cuflash.log_softmax(x)[0, 0] == 0


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 3), (2, 0, 4)])
@pytest.mark.parametrize("axis", [0, -1, None])
def test_arrays_without_elements(shape, axis):
    x = np.empty(shape, np.float32)
    assert cuflash.softmax(x, axis).shape == shape
    assert cuflash.log_softmax_vjp(x, x, axis).shape == shape
    lse = np.asarray(cuflash.logsumexp(x, axis))
    assert lse.shape == x.sum(axis).shape
    assert (lse == -inf).all()
    assert cuflash.logsumexp_vjp(lse, x, lse, axis).shape == shape


# ----------------------------------------------------------------------- layouts and `out`


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strided_views_equal_their_copies_bit_for_bit(dtype, rng):
    small = np.arange(12).reshape(3, 4).astype(dtype)
    large = rng.standard_normal((65, 133)).astype(dtype)
    views = [
        small.T,
        small[:, ::-1],
        small[::2],
        large.T,
        large[::-1, ::3],
        np.broadcast_to(large[:, :1], (65, 80)),
        np.asfortranarray(large),
        np.frombuffer(b"\0" + large.tobytes(), np.uint8)[1:].view(dtype).reshape(large.shape),
    ]
    for view in views:
        copy = view.copy(order="C")
        for axis in (0, 1, None):
            for function in FORWARD:
                np.testing.assert_array_equal(
                    bits(np.asarray(function(view, axis))), bits(np.asarray(function(copy, axis)))
                )
            got = cuflash.softmax_vjp(view, view, axis)
            np.testing.assert_array_equal(bits(got), bits(cuflash.softmax_vjp(copy, copy, axis)))


def test_results_take_their_operands_axis_order(rng):
    x = rng.standard_normal((2, 5, 3, 4)).swapaxes(1, 2)
    assert cuflash.softmax(x).swapaxes(1, 2).flags.c_contiguous
    assert cuflash.log_softmax_vjp(x.copy(), x).swapaxes(1, 2).flags.c_contiguous
    fortran = np.asfortranarray(rng.standard_normal((6, 7)))
    assert cuflash.softmax(fortran, 0).flags.f_contiguous
    assert cuflash.logsumexp(x).swapaxes(1, 2).flags.c_contiguous


@pytest.mark.parametrize("method", ["auto", "naive", "fused", "online"])
@pytest.mark.parametrize("function", [cuflash.softmax, cuflash.log_softmax], ids=names)
@pytest.mark.parametrize("axis", [0, 1])
def test_out_may_be_the_operand(function, method, axis, rng):
    x = rng.standard_normal((70, 150)).astype(np.float32)
    expected = function(x, axis, method=method)
    assert function(x, axis, out=x, method=method) is x
    np.testing.assert_array_equal(x, expected)
    alias = x[:]  # another object for the same elements
    again = function(x.copy(), axis, method=method)
    assert function(x, axis, out=alias, method=method) is alias
    np.testing.assert_array_equal(x, again)


def test_out_is_filled_whatever_its_strides(rng):
    x = rng.standard_normal((6, 40))
    for out in (np.full((40, 6), nan).T, np.full((12, 80), nan)[::2, ::-2]):
        assert cuflash.softmax(x, out=out) is out
        np.testing.assert_array_equal(out, cuflash.softmax(x))
    for keepdims, shape in ((False, (6,)), (True, (6, 1))):
        out = np.full(shape, nan)
        assert cuflash.logsumexp(x, keepdims=keepdims, out=out) is out
        np.testing.assert_array_equal(out, cuflash.logsumexp(x, keepdims=keepdims))
    y = cuflash.softmax(x)
    out = np.full_like(x, nan)
    assert cuflash.softmax_vjp(x, y, out=out) is out
    np.testing.assert_array_equal(out, cuflash.softmax_vjp(x, y))
    scalar = np.array(nan)
    assert cuflash.logsumexp(x, None, out=scalar) is scalar
    assert scalar == cuflash.logsumexp(x, None)


def _refused_outputs():
    x = np.arange(12.0).reshape(3, 4)
    read_only = np.zeros((3, 4))
    read_only.flags.writeable = False
    buffer = np.arange(16.0)
    overlapping = np.lib.stride_tricks.as_strided(buffer[:12], (3, 4), (8, 8))
    shifted = buffer[:12].reshape(3, 4), buffer[1:13].reshape(3, 4)
    return [
        pytest.param(x, np.zeros((4, 3)), ValueError, r"out has shape \(4, 3\)", id="shape"),
        pytest.param(x, np.zeros((3, 4), "f4"), TypeError, "out has dtype float32", id="dtype"),
        pytest.param(x, np.zeros((3, 4), ">f8"), TypeError, "out is byte-swapped", id="swapped"),
        pytest.param(x, read_only, ValueError, "out is read-only", id="read-only"),
        pytest.param(x, x[:, ::-1], ValueError, "out shares memory with x", id="reversed"),
        pytest.param(*shifted, ValueError, "out shares memory with x", id="shifted"),
        pytest.param(x, overlapping, ValueError, "out has several indices", id="itself"),
        pytest.param(x, [[0.0] * 4] * 3, TypeError, "out must be an array", id="list"),
        pytest.param(x, np.ma.zeros((3, 4)), TypeError, "out is a MaskedArray", id="masked"),
    ]


@pytest.mark.parametrize(("x", "out", "error", "message"), _refused_outputs())
def test_outputs_that_are_refused_are_not_written(x, out, error, message):
    before = np.array(out, copy=True)
    for function in (cuflash.softmax, cuflash.log_softmax):
        with pytest.raises(error, match=message):
            function(x, out=out)
    np.testing.assert_array_equal(np.asarray(out), before)


def test_outputs_of_gradients_and_logsumexp_may_not_be_operands(rng):
    x, y = rng.standard_normal((2, 4, 4))
    for function in (cuflash.softmax_vjp, cuflash.log_softmax_vjp):
        for name, out in (("dy", x), ("y", y)):
            with pytest.raises(ValueError, match=f"out shares memory with {name}"):
                function(x, y, out=out)
    with pytest.raises(ValueError, match="out shares memory with x"):
        cuflash.logsumexp(x, out=x[0])
    with pytest.raises(ValueError, match="out shares memory with lse"):
        cuflash.logsumexp_vjp(x[0], x, y[0], out=y)
    memory = np.ones(16)
    with pytest.raises(ValueError, match="out shares memory with where"):
        cuflash.softmax(x, where=memory.view(bool)[:4], out=memory.reshape(4, 4))


# -------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    "x",
    [
        np.zeros(3, np.complex64),
        np.array([1, None], object),
        np.array(["a"]),
        np.zeros(2, "M8[s]"),
        np.zeros(2, np.longdouble),
        np.zeros(2, ml_dtypes.float8_e4m3fn),
        "text",
        1j,
    ],
    ids=lambda x: str(getattr(x, "dtype", x)),
)
def test_unsupported_dtypes(x):
    for function in FORWARD:
        with pytest.raises(TypeError, match=r"x has dtype .*; accepted are float64"):
            function(x)


@pytest.mark.parametrize(
    "x",
    [None, np.zeros((2, 2)).view(np.matrix), np.ma.zeros(3), {1.0}, object()],
    ids=lambda x: type(x).__name__,
)
def test_what_is_no_array(x):
    with pytest.raises(TypeError, match=r"^x "):
        cuflash.softmax(x)


def test_ragged_sequences():
    with pytest.raises(ValueError, match=r"^x is a sequence that makes no array"):
        cuflash.softmax([[1, 2], [3]])


@pytest.mark.parametrize(
    ("shape", "axis", "error", "message"),
    [
        ((2, 3), 2, np.exceptions.AxisError, "axis 2 is out of bounds"),
        ((2, 3), -3, np.exceptions.AxisError, "axis -3 is out of bounds"),
        ((2, 3), (0, 5), np.exceptions.AxisError, "axis 5 is out of bounds"),
        ((), 1, np.exceptions.AxisError, "axis 1 is out of bounds"),
        ((2, 3), (1, -1), ValueError, "names one axis twice"),
        ((2, 3), 1.0, TypeError, "axis must be an integer, got float"),
        ((2, 3), True, TypeError, "axis must be an integer, got bool"),
        ((2, 3), [0, 1], TypeError, "axis must be an integer, got list"),
    ],
)
def test_axes_that_are_refused(shape, axis, error, message):
    x = np.zeros(shape)
    for function in FORWARD:
        with pytest.raises(error, match=message):
            function(x, axis)
    with pytest.raises(error, match=message):
        cuflash.softmax_vjp(x, x, axis)


@pytest.mark.parametrize(
    ("where", "error", "message"),
    [
        (np.ones(3), TypeError, "where has dtype float64; bool is needed"),
        ([1, 0, 1], TypeError, "where has dtype int64; bool is needed"),
        (np.ones(2, bool), ValueError, r"where has shape \(2,\), which does not broadcast"),
        (np.ones((1, 2, 3), bool), ValueError, r"where has shape \(1, 2, 3\)"),
        (np.ma.ones(3, bool), TypeError, "where is a MaskedArray"),
    ],
)
def test_masks_that_are_refused(where, error, message):
    for function in FORWARD:
        with pytest.raises(error, match=message):
            function(np.zeros((2, 3)), where=where)


def test_methods_that_are_refused():
    can = "'auto', 'naive', 'fused', 'online'$"
    for function in (cuflash.softmax, cuflash.log_softmax):
        with pytest.raises(ValueError, match=f"method 'cluster' cannot run this problem .*{can}"):
            function(np.zeros(3), method="cluster")
        with pytest.raises(ValueError, match=f"method 'fast' is unknown; .*{can}"):
            function(np.zeros(3), method="fast")


def test_operands_of_gradients_must_agree():
    x = np.zeros((2, 3))
    for function in (cuflash.softmax_vjp, cuflash.log_softmax_vjp):
        with pytest.raises(TypeError, match="dy has dtype float32 but y has float64"):
            function(x.astype(np.float32), x)
        with pytest.raises(ValueError, match=r"dy has shape \(3,\) but y has \(2, 3\)"):
            function(x[0], x)
    with pytest.raises(ValueError, match=r"dlse has shape \(3,\); x .* has \(2,\) or \(2, 1\)"):
        cuflash.logsumexp_vjp(x[0], x, x[:, 0])
    with pytest.raises(ValueError, match=r"lse has shape \(2, 3\)"):
        cuflash.logsumexp_vjp(x[:, 0], x, x)
    with pytest.raises(TypeError, match=r"^lse has dtype float64, which is neither that of x"):
        cuflash.logsumexp_vjp(np.zeros(2, "f4"), x.astype("f4"), x[:, 0])


def test_keepdims_must_be_a_flag():
    with pytest.raises(TypeError, match="keepdims must be True or False"):
        cuflash.logsumexp(np.zeros(3), keepdims=1)


# ----------------------------------------------------------------- other kinds of arrays


def test_numpy_arrays_of_unusual_storage(tmp_path, rng):
    x = rng.standard_normal((5, 6)).astype(np.float32)
    expected = cuflash.softmax(x)
    swapped = cuflash.softmax(x.astype(">f4"))
    assert swapped.dtype.isnative
    np.testing.assert_array_equal(swapped, expected)
    memmap = np.memmap(tmp_path / "x", np.float32, "w+", shape=x.shape)
    memmap[...] = x
    np.testing.assert_array_equal(cuflash.softmax(memmap), expected)
    assert cuflash.softmax(memmap, out=memmap) is memmap
    np.testing.assert_array_equal(memmap, expected)
    x.flags.writeable = False
    np.testing.assert_array_equal(cuflash.softmax(x), expected)


def test_pytorch_tensors_come_back_as_tensors(rng):
    torch = pytest.importorskip("torch")
    array = rng.standard_normal((4, 6)).astype(np.float32)
    x = torch.from_numpy(array)
    y = cuflash.softmax(x, where=[True] * 5 + [False])
    assert isinstance(y, torch.Tensor)
    np.testing.assert_array_equal(y.numpy(), cuflash.softmax(array, where=[True] * 5 + [False]))
    assert cuflash.log_softmax(x.bfloat16()).dtype == torch.bfloat16
    assert cuflash.softmax(x, out=x) is x
    with pytest.raises(TypeError, match="where is an array of numpy but x is one of torch"):
        cuflash.softmax(x, where=np.ones(6, bool))


def test_jax_arrays_come_back_as_jax_arrays(rng):
    jax = pytest.importorskip("jax")
    array = rng.standard_normal((4, 6)).astype(np.float32)
    y = cuflash.softmax(jax.numpy.asarray(array), 0)
    assert isinstance(y, jax.Array)
    np.testing.assert_array_equal(np.asarray(y), cuflash.softmax(array, 0))
    with pytest.raises(TypeError, match="out is a JAX array"):
        cuflash.softmax(y, out=y)


def test_arrays_of_the_standard_come_back_as_their_own(rng):
    strict = pytest.importorskip("array_api_strict")
    array = rng.standard_normal((4, 6)).astype(np.float32)
    y = cuflash.logsumexp(strict.asarray(array))
    assert isinstance(y, type(strict.asarray(array)))
    np.testing.assert_array_equal(np.from_dlpack(y), cuflash.logsumexp(array))
