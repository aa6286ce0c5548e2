"""How the NumPy engine does its work: the tiles it takes, the ones it leaves out, its memory."""

import importlib
import math
import tracemalloc
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

import cuflash
from cuflash import flash_attention
from cuflash.host.attention import TilePlan
from cuflash.problem import ArraySpec, AttentionArrays, AttentionProblem, c_strides

MIB = 2**20


def problem_of(
    batch: tuple[int, ...], tq: int, tk: int, d: int = 4, **options: Any
) -> AttentionProblem:
    """Describe a problem without making its arrays."""
    dtype = np.dtype(np.float32)
    specs = [
        ArraySpec(shape, c_strides(shape, dtype.itemsize), dtype)
        for shape in ((*batch, tq, d), (*batch, tk, d), (*batch, tk, d))
    ]
    return AttentionProblem.of(AttentionArrays(*specs), **options)


def extra_memory(call: Callable[[], Any]) -> int:
    """Return the peak of what a call allocates beyond what it returns."""
    tracemalloc.start()
    try:
        kept = call()
        current, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    del kept
    return peak - current


class TestTilePlan:
    @given(
        batch=st.lists(st.integers(0, 7), max_size=5).map(tuple),
        tq=st.integers(0, 3000),
        tk=st.integers(0, 30000),
        num_splits=st.none() | st.integers(1, 50),
    )
    def test_blocks_cover_the_batch_exactly_once_and_fit(
        self, batch: tuple[int, ...], tq: int, tk: int, num_splits: int | None
    ) -> None:
        plan = TilePlan.of(problem_of(batch, tq, tk, num_splits=num_splits))
        covered = np.zeros(batch, int)
        for index in plan.batches(batch):
            assert len(index) == len(batch)
            covered[index] += 1
            # Scores of a tile: a few arrays of this size lie in cache together.
            assert covered[index].size * plan.rows * plan.keys <= 256 * 512
        assert (covered == 1).all()
        assert 1 <= plan.rows <= max(tq, 1)
        assert 1 <= plan.keys <= max(tk, 1)
        tiles = -(-tk // plan.keys)
        assert 1 <= plan.splits <= max(tiles, 1)
        if num_splits is not None:
            assert plan.splits == max(1, min(num_splits, tiles))

    def test_short_problems_share_blocks_and_long_ones_do_not(self) -> None:
        assert len(list(TilePlan.of(problem_of((10000,), 8, 8)).batches((10000,)))) < 50
        assert len(list(TilePlan.of(problem_of((3, 4), 300, 700)).batches((3, 4)))) == 12

    def test_long_keys_of_few_queries_are_split(self) -> None:
        assert TilePlan.of(problem_of((1,), 1, 10**6)).splits > 1
        assert TilePlan.of(problem_of((64,), 1, 10**6)).splits == 1
        assert TilePlan.of(problem_of((1,), 1, 10**6, num_splits=1)).splits == 1

    def test_a_small_problem_is_computed_on_the_thread_that_asks(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Without the pool, and without taking BLAS's threads away."""
        engine = importlib.import_module("cuflash.host.attention")
        asked: list[int] = []
        monkeypatch.setattr(engine, "run", lambda tasks: asked.append(len(tasks)))
        for batch, tokens, d, is_small in (
            ((1, 12), 64, 64, True),
            ((1, 12), 65, 64, False),  # BLAS would share a product
            ((8, 4), 64, 64, True),
            ((33,), 64, 64, False),  # two blocks
            ((2,), 128, 16, True),
            ((2,), 129, 15, False),  # keys innermost: their sum is BLAS's
            ((9,), 1, 9216, True),
            ((9,), 1, 9217, False),  # BLAS would share a matrix times a vector
        ):
            x = np.ones((*batch, tokens, d), np.float32)
            flash_attention(x, x, x)
            assert bool(asked) is not is_small, (batch, tokens, d)
            asked.clear()


@pytest.mark.parametrize("options", [{}, {"scale": 1.0}, {"scale": 3.0}])
@pytest.mark.parametrize(("tokens", "d"), [(4, 64), (64, 64), (130, 8), (300, 16)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_queries_that_are_the_keys_have_the_bits_of_copies(
    tokens: int, d: int, dtype: type, options: dict[str, Any], rng: np.random.Generator
) -> None:
    """NumPy multiplies an array by its own transpose in another way than by that of a copy."""
    x = rng.standard_normal((2, tokens, d)).astype(dtype)
    apart = flash_attention(x, x.copy(), x, **options)
    y = np.asfortranarray(x)
    for same in (flash_attention(x, x, x, **options), flash_attention(y, y, x, **options)):
        np.testing.assert_array_equal(same, apart)
    np.testing.assert_array_equal(
        flash_attention(x[:, 1:], x, x, **options),
        flash_attention(x[:, 1:].copy(), x, x, **options),
    )


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("infinite", [False, True])
def test_the_mean_of_the_largest_numbers_is_finite(
    dtype: type, infinite: bool, rng: np.random.Generator
) -> None:
    """Rounded weights may add up to more than 1; an infinite value stays infinite."""
    q, k = rng.standard_normal((2, 40, 2)).astype(dtype)
    v = np.full((40, 2), np.finfo(dtype).max)
    v[:, 1] *= -1
    if infinite:
        v[7] = np.inf, -np.inf
    out = flash_attention(q, k, v)
    expected = v[7] if infinite else v[0]
    np.testing.assert_allclose(out, np.broadcast_to(expected, out.shape), rtol=1e-5)


@pytest.mark.parametrize("name", ["query_offset", "query_lengths", "key_lengths"])
def test_no_entries_have_no_lengths_to_look_at(name: str) -> None:
    x, none = np.ones((0, 4, 8), np.float32), np.ones(0, np.int64)
    out, lse = flash_attention(x, x, x, causal=True, return_lse=True, **{name: none})
    assert (out.shape, lse.shape) == ((0, 4, 8), (0, 4))


@pytest.mark.parametrize(
    ("tq", "tk", "d", "dv"),
    [
        (128, 128, 16, 16),
        (128, 129, 16, 16),
        (7, 128, 3, 129),
        (7, 129, 3, 130),
        (64, 64, 64, 64),
        (64, 64, 64, 65),
        (256, 128, 8, 8),
        (257, 128, 8, 8),
        (1, 128, 72, 72),
        (1, 128, 73, 72),
        (9, 32, 4, 40),
        (9, 33, 4, 40),
        (300, 513, 5, 5),
        (256, 520, 3, 600),
        (1, 1, 1, 1),
    ],
)
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (np.float32, {}),
        (np.float16, {}),
        (np.float64, {"causal": True}),
        (np.float32, {"bias": np.ones(1, np.float32), "alibi_slopes": np.float32([0.5, 0])}),
    ],
)
def test_either_side_of_the_borders_of_plans(
    tq: int,
    tk: int,
    d: int,
    dv: int,
    dtype: type,
    options: dict[str, Any],
    rng: np.random.Generator,
) -> None:
    """One tile or several, keys innermost or outermost, weights or results divided."""
    shapes = (3, 1, tq, d), (2, tk, d), (1, 2, tk, dv)
    q, k, v = (rng.standard_normal(shape).astype(dtype) for shape in shapes)
    out, lse = flash_attention(q, k, v, **options, return_lse=True)
    expected, expected_lse = cuflash.reference.attention(q, k, v, **options)
    for result, correct in ((out, expected), (lse, expected_lse)):
        bound = 16 * float(np.finfo(result.dtype).eps)
        np.testing.assert_allclose(result.astype(np.float64), correct, rtol=bound, atol=bound)
    for name, x in (("q", q), ("k", k), ("v", v)):  # a view, end to end and not, gives the same
        full = np.broadcast_to(x, (3, 2, *x.shape[-2:]))
        apart = np.zeros((*full.shape, 2), dtype)[..., 0]
        apart[...] = full
        for other in (full, full.copy(), apart):
            again = flash_attention(**{"q": q, "k": k, "v": v, name: other}, **options)
            np.testing.assert_array_equal(again, out)


@pytest.mark.parametrize("stride", [0, 4, -4, 7, 1000])
@pytest.mark.parametrize("axis", [-2, -1])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_strides_of_axes_of_size_one_mean_nothing(
    name: str, axis: int, stride: int, rng: np.random.Generator
) -> None:
    """NumPy calls such an array contiguous whatever they are, BLAS does not."""
    shapes = {"q": (3, 5, 20), "k": (3, 7, 20), "v": (3, 7, 9)}
    if axis == -2:
        shapes["k"], shapes["v"], shapes["q"] = (3, 1, 20), (3, 1, 9), (3, 1, 20)
    else:
        shapes["q"], shapes["k"], shapes["v"] = (3, 5, 1), (3, 7, 1), (3, 7, 1)
    x = {key: rng.standard_normal(shape, np.float32) for key, shape in shapes.items()}
    strides = list(x[name].strides)
    strides[axis] = stride
    given = x | {name: as_strided(x[name], shapes[name], strides)}
    np.testing.assert_array_equal(flash_attention(**given), flash_attention(**x))


class TestTiles:
    """What is asked of a tile, told by the calls of `modify`, which sees each computed tile."""

    @pytest.fixture
    def computed(self, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
        """List the (row, key) tiles that are computed, as (rows.start, keys.start)."""
        tiles: list[tuple[int, int]] = []
        engine = importlib.import_module("cuflash.host.attention")  # the package has the function
        modify = engine.modify

        def note(*arguments: Any) -> None:
            rows, keys = (x for x in arguments if isinstance(x, slice))
            tiles.append((rows.start, keys.start))
            modify(*arguments)

        monkeypatch.setattr(engine, "modify", note)
        return tiles

    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"causal": True},
            {"causal": True, "query_offset": 0},
            {"causal": True, "query_offset": -1},
            {"causal": True, "query_offset": -600},
            {"causal": True, "query_offset": 5000},
            {"causal": True, "query_offset": -5000},
            {"window": (0, 0)},
            {"window": (100, 30)},
            {"window": (None, 30), "query_offset": 7},
            {"window": (512, None)},
            {"window": (2, 3), "query_offset": 511},
            {"key_lengths": 512},
            {"key_lengths": 513},
            {"key_lengths": 0},
            {"query_lengths": 256},
            {"query_lengths": 257, "causal": True},
            {"query_lengths": 0},
            {"query_lengths": 300, "key_lengths": 900, "window": (10, 10)},
            {"mask": "blocks"},
            {"mask": "blocks", "causal": True},
            {"mask": "nothing"},
        ],
        ids=str,
    )
    def test_only_those_that_somebody_sees_are_computed(
        self, options: dict[str, Any], computed: list[tuple[int, int]]
    ) -> None:
        tq, tk = 700, 1600
        q, k, v = (np.ones((1, n, 2), np.float32) for n in (tq, tk, tk))
        if "mask" in options:
            mask = np.zeros((tq, tk), bool)
            if options["mask"] == "blocks":
                mask[:300, 600:700] = mask[699, 1599] = True
            options = options | {"mask": mask}
        flash_attention(q, k, v, **options)

        expected = set()
        seen = np.isfinite(cuflash.reference.attention_scores(q, k, k, **options)[0][0])
        plan = TilePlan.of(problem_of((1,), tq, tk))
        assert (plan.rows, plan.keys) == (256, 512)
        for row in range(0, tq, plan.rows):
            for key in range(0, tk, plan.keys):
                if seen[row : row + plan.rows, key : key + plan.keys].any():
                    expected.add((row, key))
        assert sorted(computed) == sorted(expected)

    def test_entries_of_different_lengths_are_told_apart(
        self, computed: list[tuple[int, int]]
    ) -> None:
        q, k = np.ones((3, 700, 2), np.float32), np.ones((3, 1600, 2), np.float32)
        flash_attention(q, k, k, key_lengths=np.array([0, 512, 1600]))
        assert len(computed) == 3 * (0 + 1 + 4)

    def test_bad_values_that_are_not_seen_cost_nothing(
        self, computed: list[tuple[int, int]]
    ) -> None:
        """Values are looked at for NaN only where a result came out non-finite."""
        q, k = np.ones((1, 256, 2), np.float32), np.ones((1, 1024, 2), np.float32)
        v = k.copy()
        v[:, 512:] = k[:, 512:] = np.nan
        out = flash_attention(q, k, v, key_lengths=512)
        assert computed == [(0, 0)]
        np.testing.assert_allclose(out, 1)
        computed.clear()
        v[:, 5] = np.nan
        flash_attention(q, k, v, key_lengths=512)
        assert computed == [(0, 0)] * 2


class TestRange:
    """Numbers far from 1 whose results are not."""

    @pytest.mark.parametrize("tk", [3, 600])
    def test_scores_in_range_of_operands_that_are_not(self, tk: int) -> None:
        """Multiplying q by the scale would overflow."""
        q, v = np.full((5, 2), 1e30, np.float32), np.ones((tk, 3), np.float32)
        k = np.linspace(0, 1e-30, 2 * tk, dtype=np.float32).reshape(tk, 2)
        out, lse = flash_attention(q, k, v, scale=1e10, return_lse=True)
        expected, expected_lse = cuflash.reference.attention(q, k, v, scale=1e10)
        assert expected_lse[0] > 1e10
        np.testing.assert_allclose(out, expected, rtol=1e-6)
        np.testing.assert_allclose(lse, expected_lse, rtol=1e-6)

    @pytest.mark.parametrize("dtype", [np.float32, np.float64])
    def test_a_cap_far_above_the_scores_changes_no_bit(self, dtype: Any) -> None:
        """The scores divided by it are subnormal."""
        q, k, v = np.random.default_rng(0).standard_normal((3, 40, 8)).astype(dtype)
        q *= dtype(1e-3)
        cap = float(np.finfo(dtype).max)
        got = flash_attention(q, k, v, softcap=cap, return_lse=True)
        for x, expected in zip(got, flash_attention(q, k, v, return_lse=True), strict=True):
            np.testing.assert_array_equal(x, expected)

    @pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16], ids=str)
    @pytest.mark.parametrize(
        "function", [flash_attention, cuflash.baselines.materialized_attention]
    )
    def test_a_finite_bias_past_the_accumulator_is_finite(
        self, dtype: Any, function: Callable[..., Any]
    ) -> None:
        """A row with nothing but such a bias is a row like others; -inf is still -inf."""
        q, k = np.ones((4, 8), dtype), np.ones((6, 8), dtype)
        v = np.random.default_rng(0).standard_normal((6, 3)).astype(dtype)
        bias = np.zeros((4, 6))
        bias[0] = -1e300
        bias[1, 1:] = -1e300
        bias[2, 2] = 1e300
        bias[3] = -np.inf
        out, lse = function(q, k, v, bias=bias, return_lse=True)
        expected = cuflash.reference.attention(q, k, v, bias=bias)[0]
        np.testing.assert_allclose(expected[0], v.astype(np.float64).mean(axis=0), rtol=1e-12)
        np.testing.assert_allclose(out.astype(np.float64), expected, rtol=8e-3, atol=8e-3)
        largest = np.finfo(np.float32).max
        np.testing.assert_array_equal(lse[[0, 2, 3]], np.float32([-largest, largest, -np.inf]))


class TestMemory:
    """The bounds of the accuracy contract's memory line; B=1, H=8, D=64 unless said otherwise."""

    @staticmethod
    def attend(tokens: int, heads: int, dtype: Any = np.float32, **options: Any) -> int:
        x = np.ones((1, heads, tokens, 64), dtype)
        return extra_memory(lambda: flash_attention(x, x, x, **options))

    @pytest.fixture(autouse=True)
    def warm(self) -> None:
        self.attend(10, 1)

    def test_4096_tokens(self) -> None:
        assert self.attend(4096, 8, return_lse=True) < 64 * MIB

    def test_16384_tokens(self) -> None:
        """Two heads, to save time: the tiles in memory are those of the threads."""
        assert self.attend(16384, 2) < 200 * MIB

    @pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16], ids=str)
    def test_grows_at_most_linearly(self, dtype: Any) -> None:
        options: Any = {"window": (100, 100)}
        short, long = (self.attend(tokens, 1, dtype, **options) for tokens in (4096, 32768))
        assert long < 8 * short

    def test_options_are_never_built_at_full_size(self) -> None:
        tokens = 4096
        rng = np.random.default_rng(0)
        options: dict[str, Any] = {
            "mask": rng.random(tokens) < 0.5,
            "bias": rng.random((tokens, 1)),
            "alibi_slopes": np.ones(1),
            "query_lengths": np.array([[tokens - 1]]),
            "causal": True,
            "softcap": 5.0,
        }
        assert self.attend(tokens, 1, **options) < 64 * MIB  # scores alone would be this much

    def test_short_entries_of_large_batches(self) -> None:
        x = np.ones((20000, 4, 8), np.float16)
        assert extra_memory(lambda: flash_attention(x, x, x)) < 16 * MIB


class TestShapes:
    def test_int_lengths_without_batch_axes(self) -> None:
        """The batch shape is (), as is that of an int."""
        q, k = np.ones((5, 4)), np.eye(6, 4)
        out = flash_attention(q, k, k, query_lengths=3, key_lengths=2, query_offset=0, causal=True)
        expected = cuflash.reference.attention(q[:3], k[:2], k[:2], query_offset=0, causal=True)[0]
        np.testing.assert_allclose(out[:3], expected)
        np.testing.assert_array_equal(out[3:], 0)

    def test_many_batch_axes(self) -> None:
        q, k, v = np.random.default_rng(0).standard_normal((3, 2, 3, 2, 5, 4))
        many = (2, *[1] * 20, 3, *[1] * 7, 2)
        out = flash_attention(
            q.reshape(*many, 5, 4), k.reshape(*many, 5, 4), v.reshape(*many, 5, 4)
        )
        assert out.shape == (*many, 5, 4)
        np.testing.assert_allclose(out.reshape(q.shape), flash_attention(q, k, v), rtol=1e-13)

    @pytest.mark.parametrize("batch", [(70000,), (2, 40000), (300, 300)])
    def test_large_batches(self, batch: tuple[int, ...]) -> None:
        rng = np.random.default_rng(0)
        q, k, v = rng.standard_normal((3, *batch, 2, 1))
        s = q * k.swapaxes(-1, -2)
        p = np.exp(s) / np.exp(s).sum(axis=-1, keepdims=True)
        np.testing.assert_allclose(flash_attention(q, k, v), p @ v, rtol=1e-12, atol=1e-12)

    @pytest.mark.parametrize(
        ("q_batch", "k_batch", "v_batch"),
        [
            ((), (3,), (2, 1)),
            ((2, 1, 1), (4, 1), (3,)),
            ((0, 3), (3,), (1, 3)),
            ((1,), (0,), (1,)),
            ((2, 0, 4), (1, 1, 4), ()),
        ],
    )
    @pytest.mark.parametrize(
        ("tq", "tk", "d", "dv"),
        [(1, 1, 1, 1), (5, 3, 2, 7), (0, 4, 1, 2), (4, 0, 3, 2), (3, 2, 1, 0)],
    )
    def test_broadcasting_and_empty_axes(
        self,
        q_batch: tuple[int, ...],
        k_batch: tuple[int, ...],
        v_batch: tuple[int, ...],
        tq: int,
        tk: int,
        d: int,
        dv: int,
    ) -> None:
        rng = np.random.default_rng(0)
        q = rng.standard_normal((*q_batch, tq, d))
        k = rng.standard_normal((*k_batch, tk, d))
        v = rng.standard_normal((*v_batch, tk, dv))
        out, lse = flash_attention(q, k, v, return_lse=True)
        batch = np.broadcast_shapes(q_batch, k_batch, v_batch)
        assert (out.shape, lse.shape) == ((*batch, tq, dv), (*batch, tq))
        s = q @ k.swapaxes(-1, -2) / math.sqrt(d)
        total = np.exp(s).sum(axis=-1, keepdims=True)
        with np.errstate(divide="ignore", invalid="ignore"):
            expected = (np.exp(s) / total if tk else s) @ v
            np.testing.assert_allclose(out, np.broadcast_to(expected, out.shape), atol=1e-14)
            expected_lse = np.log(total[..., 0])
        np.testing.assert_allclose(lse, np.broadcast_to(expected_lse, lse.shape), atol=1e-14)


@pytest.mark.parametrize("splits", [None, 2])
@pytest.mark.parametrize(
    ("dtype", "large"), [(np.float64, 1.7e308), (np.float32, 3e38), (ml_dtypes.bfloat16, 3e38)]
)
def test_the_mean_of_large_values_is_in_range_where_their_sum_is_not(
    dtype: type, large: float, splits: int | None, rng: np.random.Generator
) -> None:
    q, k = (rng.standard_normal((n, 8)).astype(dtype) for n in (30, 1300))
    v = np.full((1300, 3), large).astype(dtype)
    v[:, 1] *= np.where(np.arange(1300) % 2, 1, -1).astype(dtype)
    options = {"causal": True, "query_lengths": 28}
    out = flash_attention(q, k, v, num_splits=splits, **options)
    expected, _ = cuflash.reference.attention(q, k, v, **options)
    eps = 8e-3 if dtype is ml_dtypes.bfloat16 else 1000 * np.finfo(dtype).eps
    np.testing.assert_allclose(out.astype(float) / large, expected / large, atol=eps)
    v[1290, 2] = np.inf  # seen by the last rows only
    again = flash_attention(q, k, v, num_splits=splits, **options)
    sees = np.arange(30) + 1300 - 28 >= 1290
    np.testing.assert_array_equal(np.isinf(again[:28, 2]), sees[:28])
    np.testing.assert_array_equal(again[:, :2], out[:, :2])


@pytest.mark.parametrize(
    "options", [{"causal": True}, {"key_lengths": 0}, {"mask": np.zeros((9, 5), np.bool)}], ids=str
)
def test_a_sink_that_is_not_finite_makes_its_rows_nan(options: dict[str, Any]) -> None:
    """Those too that see no key, by whatever option, and no others."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((4, n, 8)) for n in (9, 5, 5))
    options = {**options, "sinks": np.array([0.5, np.inf, np.nan, -np.inf])}
    out, lse = flash_attention(q, k, v, return_lse=True, **options)
    poisoned = np.array([False, True, True, False])
    np.testing.assert_array_equal(
        np.isnan(out), np.broadcast_to(poisoned[:, None, None], out.shape)
    )
    np.testing.assert_array_equal(np.isnan(lse), np.broadcast_to(poisoned[:, None], lse.shape))
    expected, expected_lse = cuflash.reference.attention(q, k, v, **options)
    np.testing.assert_allclose(out, expected, atol=1e-14)
    np.testing.assert_allclose(lse, expected_lse, atol=1e-14)
    dout = rng.standard_normal(out.shape)
    grads = cuflash.flash_attention_vjp(dout, q, k, v, out, lse, **options)
    expected_grads = cuflash.reference.attention_vjp(dout, q, k, v, **options)
    for name in ("dq", "dk", "dv", "dsinks"):
        np.testing.assert_allclose(
            getattr(grads, name), getattr(expected_grads, name), atol=1e-13, err_msg=name
        )
