"""The softmax kernels, by the public functions: each method, layout and order of threads."""

import functools
import itertools
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
from cuflash import engine, reference
from cuflash.device.softmax_regimes import COLUMN_TILES, PART_BYTES, SHORT_LENGTHS, rows_ahead
from cuflash.device.softmax_rows import SOFTMAX_PARAMETERS
from cuflash.testing.bounds import assert_softmax_close, expect_softmax, expect_softmax_vjp
from cuflash.testing.softmax_properties import (
    SOFTMAX_NAMES,
    SOFTMAX_PROPERTIES,
    state_of_parts_merges,
    vjp_matches_oracle,
)
from cuflash.testing.strategies import softmax_problems
from tests.host_cuda import builder
from tests.host_cuda.engine import H200, HostCuda

pytestmark = pytest.mark.skipif(not builder.available(), reason="no C++ compiler")

EXAMPLES = 50
METHODS = ["naive", "fused", "online"]
#: Row lengths at which lanes, chunks or layouts change, for one of the dtypes.
BORDERS = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
FLOATS = ("float64", "float32", "float16", "bfloat16")
NUMBERS = {n: np.dtype(ml_dtypes.bfloat16 if n == "bfloat16" else n) for n in FLOATS}


def cases(dtypes):
    return softmax_problems(dtypes=dtypes, borders=BORDERS, max_row=1100, max_elements=4000)


def use(patch, **options):
    """Let the public functions run the device engine on the CPU; return its executor."""
    emulated = HostCuda(**options)
    patch.setattr(engine, "load", lambda name: emulated)
    return emulated.executor


def functions(name, method):
    """Return the function called `name`, bound to a method if it takes one."""
    function = getattr(cuflash, name)
    return functools.partial(function, method=method) if name != "logsumexp" else function


def hypothesis_test(check, dtypes=FLOATS):
    """Run check(case, method) on drawn cases under drawn orders of threads."""

    @settings(max_examples=EXAMPLES)
    @given(
        case=cases(dtypes),
        method=st.sampled_from(METHODS),
        order=st.sampled_from(builder.HostKernel.ORDERS),
        seed=st.integers(0, 99),
        blocks=st.sampled_from([1, 2**31 - 1]),
    )
    def holds(case, method, order, seed, blocks):
        with pytest.MonkeyPatch.context() as patch:
            use(patch, order=order, seed=seed, limits=replace(H200, blocks=blocks))
            check(case, method)

    holds()


#: logsumexp has no method to fix: views may have an order of sums of their own.
LAWS = [
    (name, law)
    for name, law in itertools.product(SOFTMAX_NAMES, SOFTMAX_PROPERTIES)
    if (name, law) != ("logsumexp", "views_equal_copies")
]


@pytest.mark.parametrize(("name", "law"), LAWS)
def test_property(name, law):
    hypothesis_test(
        lambda case, method: SOFTMAX_PROPERTIES[law](functions(name, method), case, name),
        (*FLOATS, "int16", "bool"),
    )


@pytest.mark.parametrize("name", SOFTMAX_NAMES)
def test_gradient(name):
    vjp = getattr(cuflash, f"{name}_vjp")
    hypothesis_test(
        lambda case, method: vjp_matches_oracle(functions(name, method), vjp, case, name)
    )


@pytest.mark.parametrize(
    ("dtype", "sizes"),
    [
        ("float16", (3.0, 300.0, 2048.0, 65504.0)),
        ("bfloat16", (3.0, 300.0, 65504.0, 2.0**20 - 4096, 2.0**20, 1e12, 1e20, 3e38)),
    ],
)
def test_large_scores_of_16_bits(dtype, sizes, monkeypatch):
    """Rows of a score and its next lower neighbours: where they are far apart, they still add."""
    use(monkeypatch)
    dtype = NUMBERS[dtype]
    for top in (*sizes, *(-size for size in sizes)):
        below = np.arange(300, dtype=np.uint16) % 3  # in units of the last place
        bits = np.array(top, dtype).view(np.uint16) + (below if top < 0 else -below)
        x = np.stack([bits, bits[:1].repeat(300)]).view(dtype)
        y = cuflash.softmax(x, method="fused").astype(np.float64)
        expected = reference.softmax(x.astype(np.float64))
        np.testing.assert_allclose(y, expected, rtol=ml_dtypes.finfo(dtype).eps, atol=1e-7)


def test_states_of_parts_merge():
    hypothesis_test(
        lambda case, method: state_of_parts_merges(
            cuflash.softmax_state, cuflash.merge_softmax, case
        )
    )


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("length", sorted({b + d for b in BORDERS for d in (-1, 0, 1)}))
def test_borders(method, length, monkeypatch, rng):
    """Every way to hold a row, forwards and backwards, and each exactly as long as it may be."""
    use(monkeypatch)
    x = rng.normal(size=(3, length)).astype(np.float32)
    dy = rng.normal(size=(3, length)).astype(np.float32)
    y = cuflash.softmax(x, method=method)
    np.testing.assert_allclose(y, reference.softmax(x), rtol=1e-5)
    np.testing.assert_array_equal(cuflash.softmax(x.T, 0, method=method), y.T)
    dx = cuflash.softmax_vjp(dy, y)
    np.testing.assert_allclose(dx, reference.softmax_vjp(dy, y), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(cuflash.softmax_vjp(dy.T, y.T, 0), dx.T, rtol=1e-5, atol=1e-6)


#: Rows and what fused does with them: chunks in registers, 0 for shared memory.
HELD = [
    ((3, 4), np.float32, "kPacked, 1"),
    ((3, 32), np.float32, "kPacked, 2"),
    ((3, 36), np.float32, "kPacked, 4"),
    ((3, 8192), np.float32, "kPacked, 4"),
    ((3, 8196), np.float32, "kPacked, 8"),
    ((1, 16384), np.float32, "kPacked, 8"),
    ((1, 16388), np.float32, "kPacked, 16"),
    ((1, 32768), np.float32, "kPacked, 16"),
    ((1, 32772), np.float32, "kPacked, 0"),
    ((1, 57984), np.float32, "kPacked, 0"),
    ((3, 33), np.float32, "kStrided, 0"),
    ((3, 512), np.float64, "kPacked, 4"),
    ((3, 514), np.float64, "kPacked, 8"),
    ((3, 8192), np.float64, "kPacked, 8"),
    ((3, 8194), np.float64, "kPacked, 16"),
    ((1, 16384), np.float64, "kPacked, 16"),
    ((1, 16386), np.float64, "kPacked, 0"),
]


@pytest.mark.parametrize(("shape", "dtype", "kernel"), HELD)
def test_how_fused_holds_a_row(shape, dtype, kernel, monkeypatch, rng):
    executor = use(monkeypatch)
    x = rng.normal(size=shape).astype(dtype)
    y = cuflash.softmax(x, method="fused")
    eps = np.finfo(dtype).eps
    np.testing.assert_allclose(y, reference.softmax(x), rtol=200 * eps, atol=eps**2)
    assert executor.launched[-1].kernel.expression.endswith(f"cuflash::{kernel}>")


def test_fused_refuses_a_row_that_no_block_can_hold(monkeypatch):
    use(monkeypatch)
    x = np.zeros((1, 60000), np.float32)
    message = "method 'fused' cannot run .* a row has 240000 bytes; .* 'auto', 'naive', 'online'"
    with pytest.raises(ValueError, match=message):
        cuflash.softmax(x, method="fused")
    np.testing.assert_allclose(cuflash.softmax(x), 1 / 60000, rtol=1e-6)


SHORT = [(dtype, n) for dtype in FLOATS for n in SHORT_LENGTHS[NUMBERS[dtype].itemsize]]


@pytest.mark.parametrize(("dtype", "length"), SHORT)
@pytest.mark.parametrize("rows", [2, 3, 1023, 4099])
def test_short_rows(rows, dtype, length, monkeypatch, rng):
    """One block, and two with more to do than once; a last chunk that is not whole."""
    executor = use(monkeypatch, order="random", limits=replace(H200, blocks=2))
    x = rng.normal(size=(rows, length)).astype(NUMBERS[dtype])
    x[0], x[-1], x[rows // 2, 0] = -np.inf, np.nan, -np.inf
    for name in SOFTMAX_NAMES:
        y = getattr(cuflash, name)(x)
        assert_softmax_close(y, expect_softmax(name, x, -1), name=name)
        assert executor.launched[-1].kernel.expression.startswith("cuflash::short_rows")
    state = cuflash.softmax_state(x)
    assert executor.launched[-1].kernel.source == "softmax/short.cu"
    np.testing.assert_array_equal(state.maximum[:, 0], x.astype(state.maximum.dtype).max(-1))
    clean = cuflash.softmax(x)
    assert cuflash.softmax(x, out=x) is x
    assert clean.tobytes() == x.tobytes()


def test_rows_that_are_short_but_not_for_one_thread(monkeypatch, rng):
    """Other lengths, views, rows beside others, masked ones, and methods that were asked for."""
    executor = use(monkeypatch)
    memory = rng.normal(size=1004).astype(np.float32)
    memory = memory[-memory.ctypes.data // 4 % 4 :]  # of whole chunks
    x = memory[:400].reshape(100, 4)
    where = np.array([True, True, False, True])
    for other, axis, mask, method, short in (
        (x, -1, None, "auto", True),
        (memory[:500].reshape(100, 5), -1, None, "auto", False),
        (x[:, :3], -1, None, "auto", False),
        (x[::2], -1, None, "auto", False),
        (memory[1:401].reshape(100, 4), -1, None, "auto", False),
        (x.T, -1, None, "auto", False),
        (x.T, 0, None, "auto", True),
        (x, -1, where, "auto", False),
        (x, -1, None, "fused", False),
    ):  # fmt: skip
        out = np.empty_like(other, order="K")
        y = cuflash.softmax(other, axis, where=mask, method=method, out=out)
        np.testing.assert_allclose(y, reference.softmax(other, axis, where=mask), rtol=1e-5)
        assert (executor.launched[-1].kernel.source == "softmax/short.cu") is short


@pytest.mark.parametrize("order", builder.HostKernel.ORDERS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("length", [2, 16, 17, 64, 65, 129, 513, 1025, 4100])
def test_rows_side_by_side(length, dtype, order, monkeypatch, rng):
    """Every tile, one of rows that are not all there, and rows that are -inf, NaN or masked."""
    executor = use(monkeypatch, order=order)
    x = rng.normal(size=(length, 2, 24)).astype(
        ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    )
    x[:, 0, 3], x[: length // 2, 0, 5], x[length // 2, 1, 4] = -np.inf, -np.inf, np.nan
    for name in SOFTMAX_NAMES:
        y = getattr(cuflash, name)(x, 0)
        assert_softmax_close(y, expect_softmax(name, x, 0), name=name)
        assert executor.launched[-1].kernel.source == "softmax/columns.cu"


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("length", [2, 31, 128, 129, 512, 513])
def test_many_rows_side_by_side(length, dtype, monkeypatch, rng):
    """The tiles of many rows, which are many where there is one multiprocessor."""
    executor = use(monkeypatch, order="random", limits=replace(H200, multiprocessors=1))
    x = rng.normal(size=(length, 136)).astype(NUMBERS[dtype])
    x[:, 3], x[: length // 2, 5], x[length // 2, 135] = -np.inf, -np.inf, np.nan
    for name in ("softmax", "log_softmax"):
        y = getattr(cuflash, name)(x, 0)
        assert_softmax_close(y, expect_softmax(name, x, 0), name=name)
        tiles = COLUMN_TILES[x.itemsize, False]
        tile = next(tile for tile in tiles if length <= tile.columns(executor.limits))
        expected = f" {tile.rows}, {tile.width}, {tile.held}, 1>"
        assert executor.launched[-1].kernel.expression.endswith(expected)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_gradients_of_rows_side_by_side(name, dtype, monkeypatch, rng):
    """At the borders of each tile, with rows that are not all there and empty ones."""
    executor = use(monkeypatch)
    numbers = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    for length in (2, 16, 17, 127, 128, 129, 255, 256, 257, 513, 2049):
        x, dy = (rng.normal(size=(length, 3, 24)).astype(numbers) for _ in range(2))
        x[:, 0, 3], x[: length // 2, 0, 5], x[length // 2, 1, 4] = -np.inf, -np.inf, np.nan
        y = getattr(reference, name)(x, 0).astype(numbers)
        dx = getattr(cuflash, f"{name}_vjp")(dy, y, 0)
        assert executor.launched[-1].kernel.expression.startswith("cuflash::columns_vjp")
        assert not dx[:, 0, 3].any()
        expected = getattr(reference, f"{name}_vjp")(dy, y, 0).astype(np.float64)
        scale = np.nanmax(np.abs(expected))
        eps = {"float64": 1e-14, "float32": 2e-6, "bfloat16": 1e-2}[dtype]
        np.testing.assert_allclose(dx.astype(np.float64), expected, rtol=eps, atol=eps * scale)


@pytest.mark.parametrize("length", [1028, 2044, 2048, 2052, 4096, 4100])
def test_rows_that_are_prefetched(length, monkeypatch, rng):
    """More rows than blocks at a time; the shim reads all that a prefetch names."""
    limits = replace(H200, multiprocessors=1, threads_per_sm=1024)
    executor = use(monkeypatch, limits=limits)
    x = rng.normal(size=(20, length)).astype(np.float32)
    y = cuflash.softmax(x, method="fused")
    np.testing.assert_allclose(y, reference.softmax(x), rtol=2e-5)
    assert 0 < rows_ahead(limits, executor.launched[-1].block, 4, 1) < len(x)


@pytest.mark.parametrize("order", builder.HostKernel.ORDERS)
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize("excess", [-8, 0, 1])
def test_few_long_rows_are_split(excess, dtype, order, monkeypatch, rng):
    """At the least length of three parts, of whole chunks and not; rows of NaN and of -inf."""
    executor = use(monkeypatch, order=order)
    numbers = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    length = 3 * PART_BYTES // numbers.itemsize + excess
    x = rng.normal(size=(4, length)).astype(numbers)
    x[1], x[2, : length // 2], x[3, -1] = -np.inf, -np.inf, np.nan
    for name in SOFTMAX_NAMES:
        y = functions(name, "online")(x)
        assert_softmax_close(y, expect_softmax(name, x, -1), name=name)
        first, second = executor.launched[-2:]
        assert first.kernel.expression.startswith("cuflash::split_states<")
        assert second.kernel.source == "softmax/split.cu"
        assert first.grid == second.grid == 4 * (3 if excess >= 0 else 2)
    if excess == 0:
        where = rng.random(length) < 0.5
        y = cuflash.softmax(x, where=where, method="online")
        assert_softmax_close(y, expect_softmax("softmax", x, -1, where=where), name="softmax")
        view = np.zeros((4, length, 2), numbers)[..., 0]
        view[...] = x
        np.testing.assert_array_equal(
            *(cuflash.softmax(a, method="online").astype(np.float64) for a in (view, x))
        )


@pytest.mark.parametrize("order", builder.HostKernel.ORDERS)
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize("excess", [-8, 0, 1])
def test_gradients_of_few_long_rows_are_split(excess, dtype, order, monkeypatch, rng):
    executor = use(monkeypatch, order=order)
    numbers = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    length = 3 * PART_BYTES // numbers.itemsize + excess
    parts = 3 if excess >= 0 else 2
    x, dy = (rng.normal(size=(3, length)).astype(numbers) for _ in range(2))
    x[1], x[2, : length // 2] = -np.inf, -np.inf
    where = rng.random(length) < 0.5 if excess == 0 else None
    for name in ("softmax", "log_softmax"):
        y = getattr(reference, name)(x, where=where).astype(numbers)
        dx = getattr(cuflash, f"{name}_vjp")(dy, y, where=where)
        assert_softmax_close(dx, expect_softmax_vjp(f"{name}_vjp", dy, y, where=where), name=name)
        assert not dx[1].any()
        assert [launch.grid for launch in executor.launched[-2:]] == [3 * parts] * 2
        assert executor.launched[-1].kernel.expression.startswith("cuflash::split_vjp<")
    lse = reference.logsumexp(x, where=where, keepdims=True).astype(numbers)
    dx = cuflash.logsumexp_vjp(dy[:, :1], x, lse, where=where)
    expected = expect_softmax_vjp("logsumexp_vjp", dy[:, :1], x, lse, where=where)
    assert_softmax_close(dx, expected, name="logsumexp")
    assert executor.launched[-1].grid == 3 * parts
    y = cuflash.softmax_state(x).apply(x)
    assert_softmax_close(y, expect_softmax("softmax", x), name="softmax")
    assert executor.launched[-1].grid == 3 * parts


@pytest.mark.parametrize("method", METHODS)
def test_several_reduced_axes_without_a_copy(method, monkeypatch, rng):
    executor = use(monkeypatch)
    x = rng.normal(size=(3, 4, 5, 6, 7)).astype(np.float32)
    where = rng.random((4, 1, 6, 1)) < 0.7
    for axis in ((0, 2, 4), (1, 3), (0, 1, 3)):
        y = cuflash.softmax(x, axis, where=where, method=method)
        np.testing.assert_allclose(y, reference.softmax(x, axis, where=where), rtol=1e-5)
        assert "kScattered" in executor.launched[-1].kernel.expression


@pytest.mark.parametrize("method", METHODS)
def test_more_axes_than_the_kernels_have_room_for(method, monkeypatch, rng):
    executor = use(monkeypatch)
    x = rng.normal(size=(2, 3) * 7).astype(np.float32)[:, :2, :, :1, :, :2]
    axis = tuple(range(0, 14, 2))
    where = rng.random(x.shape[-3:]) < 0.7
    out = np.full(x.shape, np.nan, np.float32)
    y = cuflash.softmax(x, axis, where=where, method=method, out=out)
    assert y is out
    np.testing.assert_allclose(y, reference.softmax(x, axis, where=where), rtol=1e-5)
    dx = cuflash.softmax_vjp(x, y, axis, where=where)
    expected = reference.softmax_vjp(x, y, axis, where=where)
    np.testing.assert_allclose(dx, expected, rtol=1e-4, atol=1e-7)
    assert "kStrided" in executor.launched[-1].kernel.expression
    assert cuflash.softmax(x[..., :0], axis, method=method).shape == (*x.shape[:-1], 0)
    state = cuflash.softmax_state(x, axis)
    lse = reference.logsumexp(x, axis, keepdims=True)
    np.testing.assert_allclose(state.logsumexp(), lse, rtol=1e-6)
    np.testing.assert_allclose(state.apply(x), reference.softmax(x, axis), rtol=1e-5)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("name", "n", "exponent"), [("float16", 4096, 12), ("bfloat16", 512, 9)])
def test_sums_of_16_bit_rows_are_wide(method, name, n, exponent, monkeypatch):
    use(monkeypatch)
    dtype = ml_dtypes.bfloat16 if name == "bfloat16" else np.float16
    y = cuflash.softmax(np.zeros((2, n), dtype), method=method)
    np.testing.assert_array_equal(y.astype(np.float32), 2.0**-exponent)


def test_logsumexp_of_a_long_float16_row(monkeypatch):
    use(monkeypatch)
    lse = cuflash.logsumexp(np.zeros((1, 65536), np.float16))
    assert lse.dtype == np.float16
    np.testing.assert_array_equal(lse, np.float16(11.0904))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("slope", [-80, 80])
def test_scores_that_rise_along_a_row(slope, method, monkeypatch):
    """A lane meets larger and larger scores: what it has summed has to follow."""
    use(monkeypatch)
    x = np.linspace(0, slope, 40_000, dtype=np.float32)[None]
    y = cuflash.softmax(x, method=method)
    np.testing.assert_allclose(y, reference.softmax(x), rtol=2e-5, atol=1e-37)


@pytest.mark.parametrize("method", METHODS)
def test_a_million_terms_do_not_lose_each_other(method, monkeypatch):
    """A lane adds 2^11 of 2^20 equal terms: a plain sum in float32 drifts."""
    use(monkeypatch)
    x = np.full((1, 1 << 20), 0.7, np.float32)
    x[0, 0] = 0
    if method == "fused":
        x = x[:, :50_000]
    y = cuflash.softmax(x, method=method)
    np.testing.assert_allclose(y, reference.softmax(x), rtol=4e-7)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("axis", [0, 1])
def test_an_infinite_score_is_followed_by_many(axis, dtype, monkeypatch, rng):
    """A sum that has become infinite stays so over all that a lane adds to it."""
    use(monkeypatch)
    x = rng.normal(size=(8, 70_000)).astype(dtype)
    dy, y = np.zeros_like(x), np.full_like(x, 2.0**-17)
    x[0, 0] = x[1, 35_000] = dy[0, 0] = dy[1, 35_000] = np.inf
    if axis == 0:
        x, dy, y = (np.ascontiguousarray(a.T) for a in (x, dy, y))
    infinite = np.arange(8) < 2
    np.testing.assert_array_equal(np.isposinf(cuflash.logsumexp(x, axis)), infinite)
    state = cuflash.softmax_state(x, axis)
    for entries in (state.maximum, state.logsumexp()):
        np.testing.assert_array_equal(np.isposinf(entries.ravel()), infinite)
    dx = cuflash.softmax_vjp(dy, y, axis)
    np.testing.assert_array_equal(dx, reference.softmax_vjp(dy, y, axis))


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32"])
def test_a_float32_state_with_narrower_arrays(name, monkeypatch, rng):
    use(monkeypatch)
    dtype = ml_dtypes.bfloat16 if name == "bfloat16" else np.dtype(name)
    x = rng.normal(size=(4, 5, 33)).astype(dtype)
    state = cuflash.softmax_state(x)
    assert state.maximum.dtype == state.normalizer.dtype == np.float32
    wide = x.astype(np.float64)
    lse = state.logsumexp()
    np.testing.assert_allclose(lse.squeeze(-1), reference.logsumexp(wide), rtol=1e-6)
    rtol = {"float16": 2e-3, "bfloat16": 1e-2, "float32": 1e-6}[name]
    y = state.apply(x)
    np.testing.assert_allclose(y.astype(np.float64), reference.softmax(wide), rtol=rtol)
    dlse = rng.normal(size=lse.shape).astype(np.float32)
    dx = cuflash.logsumexp_vjp(dlse, x, lse).astype(np.float64)
    np.testing.assert_allclose(dx, reference.logsumexp_vjp(dlse, wide, lse), rtol=2 * rtol)


def test_gradients_of_integers_are_float64(monkeypatch):
    use(monkeypatch)
    x = np.array([[3, 1, 2]])
    lse = cuflash.logsumexp(x)
    dx = cuflash.logsumexp_vjp(np.array([2]), x, lse)
    assert dx.dtype == np.float64
    np.testing.assert_allclose(dx, 2 * reference.softmax(x), rtol=1e-14)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0), (3, 0, 2)])
def test_empty_arrays(shape, monkeypatch):
    use(monkeypatch)
    x = np.zeros(shape, np.float32)
    for method, axis in itertools.product(METHODS, range(len(shape))):
        assert cuflash.softmax(x, axis, method=method).shape == shape
        np.testing.assert_array_equal(cuflash.logsumexp(x, axis), reference.logsumexp(x, axis))


def test_gradients_of_empty_rows_do_not_read_their_cotangent(monkeypatch):
    use(monkeypatch)
    dy = np.array([[np.nan, np.inf, 1, 2]], np.float32)
    np.testing.assert_array_equal(cuflash.softmax_vjp(dy, np.zeros_like(dy)), 0)
    np.testing.assert_array_equal(cuflash.log_softmax_vjp(dy, np.full_like(dy, -np.inf)), 0)
    nothing = np.array([-np.inf], np.float32)
    np.testing.assert_array_equal(cuflash.logsumexp_vjp(dy[:, 0], dy, nothing), 0)


@pytest.mark.parametrize("order", builder.HostKernel.ORDERS)
def test_teams_of_all_sizes_in_either_mapping(order, monkeypatch, rng):
    executor = use(monkeypatch, order=order)
    for length, method in itertools.product((5, 40, 700, 1500, 3000, 5000), METHODS):
        x = rng.normal(size=(length, 9)).astype(np.float32)
        x[3:, 2] = -np.inf
        beside = cuflash.softmax(x, 0, method=method)
        np.testing.assert_allclose(beside, reference.softmax(x, 0), rtol=1e-5)
        alone = cuflash.softmax(np.ascontiguousarray(x.T), method=method)
        np.testing.assert_array_equal(alone, beside.T)
    assert {launch.block for launch in executor.launched} >= {64, 128, 256, 512}


def test_the_parameter_block_is_the_same_in_both_languages():
    ours = {"sizeof": SOFTMAX_PARAMETERS.dtype.itemsize, **SOFTMAX_PARAMETERS.layout()}
    assert builder.c_layout("softmax/rows.cuh", SOFTMAX_PARAMETERS) == ours
