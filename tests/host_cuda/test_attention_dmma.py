"""The kernel on float64 tensor cores on the CPU: every tile of its table with every pipeline."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings

import cuflash
from cuflash.device.attention_plans_dmma import DMMA_TILES, SCORES
from cuflash.testing.bounds import assert_attention_close, expect_attention
from cuflash.testing.cases import ALL_CASES
from cuflash.testing.properties import ATTENTION_PROPERTIES
from cuflash.testing.strategies import attention_problems
from tests.devices import H200
from tests.host_cuda import builder
from tests.host_cuda.test_attention import (
    ORDERS,
    OTHER_CASES,
    equal_terms,
    on_host_cuda,
    plan_of,
    use,
)

pytestmark = pytest.mark.skipif(not builder.available(), reason="no C++ compiler")

#: A GPU that has these tensor cores, and not those of Hopper.
A100_LIKE = replace(H200, compute_capability="80")
TQ, TK = 70, 150
_rng = partial(np.random.default_rng, 5)
#: The options of a call, by the score pipeline that serves it.
OPTIONS = {
    "PlainScore": {"sinks": np.float64([0.5, -np.inf])},
    "RangedScore": {"window": (60, 20), "key_lengths": 140, "query_lengths": 68},
    "FullScore": {
        "softcap": 2.0,
        "bias": _rng().normal(size=(2, 1, TK)),
        "alibi_slopes": np.float64([0.5, -0.1]),
        "mask": _rng().random((TQ, 1)) < 0.7,
        "window": (None, 20),
    },
}


def operands(d, dv, tq=TQ, tk=TK):
    rng = np.random.default_rng(d)
    return [rng.normal(size=(2, *s)) for s in ((tq, d), (tk, d), (tk, dv))]


@pytest.fixture
def executor(monkeypatch):
    return use(monkeypatch, limits=A100_LIKE)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("tile", [choice.tile for choice in DMMA_TILES], ids=lambda x: x.expression)
def test_tile(tile, score, executor, plans_of_one_tile):
    """With columns to fill up, rows that differ in what they see, and NaN where no row looks."""
    plans_of_one_tile(tile)
    # Tiles that are copied whole, by words, and by elements.
    fewer = {"PlainScore": 0, "RangedScore": 2, "FullScore": 3}[score]
    q, k, v = operands(tile.features - fewer, tile.values if fewer == 0 else tile.values + fewer)
    options = OPTIONS[score]
    if "key_lengths" in options:
        k[:, options["key_lengths"] :] = v[:, options["key_lengths"] :] = np.nan
    out, lse = cuflash.flash_attention(q, k, v, **options, method="mma", return_lse=True)
    assert f"cuflash::{score}<" in executor.launched[0].kernel.expression
    assert tile.expression in executor.launched[0].kernel.expression
    assert_attention_close(out, lse, expect_attention(q, k, v, **options))


@pytest.mark.parametrize("law", ATTENTION_PROPERTIES)
def test_property(law):
    problems = attention_problems(
        dtypes=["float64"], borders=(16, 32, 64), max_tokens=70, max_features=70, max_batch_axes=2,
        max_products=60_000,
    )  # fmt: skip

    @settings(max_examples=max(1, settings().max_examples // 5))
    @given(case=problems, order=ORDERS)
    def holds(case, order):
        call = partial(cuflash.flash_attention, method="mma")
        ATTENTION_PROPERTIES[law](on_host_cuda(call, order=order, limits=A100_LIKE), case)

    holds()


def attend(q, k, v, **options):
    """Attend by these kernels whatever they are for."""
    fits = q.dtype == np.float64 and q.shape[-1] <= 256
    return cuflash.flash_attention(q, k, v, **({"method": "mma"} if fits else {}) | options)


@pytest.mark.parametrize("name", sorted(set(ALL_CASES) - OTHER_CASES))
def test_case(name, executor):
    public = {name: getattr(cuflash, name) for name in cuflash.__all__}
    ALL_CASES[name](SimpleNamespace(**public | {"flash_attention": attend}))


@pytest.mark.parametrize("splits", [1, 2, 5])
def test_shares_of_the_keys(splits, executor):
    q, k, v = operands(64, 24, tk=300)
    options = {"causal": True, "sinks": np.array([0.5, 3]), "key_lengths": np.array([40, 300])}
    out, lse = cuflash.flash_attention(
        q, k, v, **options, method="mma", num_splits=splits, return_lse=True
    )
    assert_attention_close(out, lse, expect_attention(q, k, v, **options))
    assert len(executor.launched) == (1 if splits == 1 else 2)


@pytest.mark.parametrize("d", [64, 62, 63])
def test_values_that_are_not_finite(d, executor):
    """Rows that do not see them are as if they were not there; the others have them."""
    q, k, v = operands(d, d)
    v[0, 40, 3], v[0, 120, 5], v[1, 149] = np.nan, np.inf, -np.inf
    out, lse = cuflash.flash_attention(q, k, v, causal=True, method="mma", return_lse=True)
    assert_attention_close(out, lse, expect_attention(q, k, v, causal=True))
    finite = np.nan_to_num(v, posinf=0, neginf=0)
    clean = cuflash.flash_attention(q, k, finite, causal=True, method="mma")
    np.testing.assert_array_equal(out[1, :-1], clean[1, :-1])


@pytest.mark.parametrize("layout", ["transposed", "odd rows", "reversed", "broadcast"])
def test_rows_that_are_not_copied_by_words(layout, executor):
    q, k, v = operands(33, 20)
    change = {
        "transposed": lambda x: x.swapaxes(1, 2).copy().swapaxes(1, 2),
        "odd rows": lambda x: np.pad(x, ((0, 0), (0, 0), (1, 4)))[..., 1:-4],
        "reversed": lambda x: x[:, ::-1, ::-1],
        "broadcast": lambda x: np.broadcast_to(x[:1], x.shape),
    }[layout]
    arrays = [change(x) for x in (q, k, v)]
    out = change(np.full_like(operands(33, 20)[2][:, :TQ], np.nan))
    out = out if out.flags.writeable else np.full((2, TQ, 20), np.nan)
    lse = np.full((2, TQ), np.nan)
    cuflash.flash_attention(*arrays, method="mma", out=out, lse=lse)
    assert_attention_close(out, lse, expect_attention(*arrays))


@pytest.mark.parametrize("d", [64, 128, 256])
def test_equal_terms(d, executor):
    """Terms that are all alike, added one by one, would err in one direction: like their number."""
    q, k, v = np.full((40, d), 0.1), np.full((4096, d), 0.1), np.full((4096, 8), 1.1)
    out, lse = cuflash.flash_attention(q, k, v, method="mma", num_splits=1, return_lse=True)
    assert_attention_close(out, lse, expect_attention(q, k, v))
    assert np.abs(out / 1.1 - 1).max() < 4e-15
    out, lse = cuflash.flash_attention(q, k[:1], v[:1], method="mma", return_lse=True)
    assert_attention_close(out, lse, expect_attention(q, k[:1], v[:1]))


def test_equal_terms_of_more_keys_than_sums_of_tiles_can_add(executor):
    q, k, v = equal_terms(17, 2**16, 8, np.float64)
    out, lse = cuflash.flash_attention(q, k, v, method="mma", num_splits=1, return_lse=True)
    assert_attention_close(out, lse, expect_attention(q, k, v))


@pytest.mark.parametrize(("rise", "value"), [(0, np.nan), (1, np.inf), (-1, -np.inf)])
@pytest.mark.parametrize("dv", [3, 32])
def test_groups_of_tiles(dv, rise, value, executor):
    """Maxima that rise and fall by group; values that few rows see; rows without keys."""
    tk = 36_000
    q, k, v = (
        np.random.default_rng(n).normal(size=(4, t, n)) for t, n in ((5, 2), (tk, 2), (tk, dv))
    )
    v[:, 20_000, 1] = value
    offset = np.array([-6, 19_998, 19_999, 35_996])
    options = {"bias": np.linspace(0, 300 * rise, tk), "causal": True, "query_offset": offset}
    out, lse = cuflash.flash_attention(
        q, k, v, **options, method="mma", num_splits=1, return_lse=True
    )
    assert_attention_close(out, lse, expect_attention(q, k, v, **options))


@pytest.mark.parametrize("size", [1e2, 2e4, 1e8, 1e15, 1e150])
@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"sinks": np.float64([3e9, -1])}, {"scale": -0.3}], ids=str
)
def test_large_scores(options, size, executor):
    """Exponents of weights, where a score is rounded to more than they can bear."""
    q, k, v = operands(64, 64)
    q, k = np.sign(q) * size, np.sign(k) * size
    out, lse = cuflash.flash_attention(q, k, v, **options, method="mma", return_lse=True)
    assert_attention_close(out, lse, expect_attention(q, k, v, **options))


@pytest.mark.parametrize("score", SCORES)
def test_scores_that_rise_late(score, executor):
    """Rows move to a new reference by their own scores: no other row's change their bits."""
    options = OPTIONS[score]
    q, k, v = operands(64, 64)
    before, _ = cuflash.flash_attention(q, k, v, **options, method="mma", return_lse=True)
    q[:, ::3] *= 40
    out, lse = cuflash.flash_attention(q, k, v, **options, method="mma", return_lse=True)
    assert_attention_close(out, lse, expect_attention(q, k, v, **options))
    for start in (1, 2):
        np.testing.assert_array_equal(out[:, start::3], before[:, start::3])


@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
def test_scores_that_are_no_numbers(value, executor):
    """By a bias, in either sign of NaN; -inf alone is a weight of 0."""
    q, k, v = operands(64, 64)
    bias = np.zeros((TQ, TK))
    bias[3, 40], bias[50], bias[60, 149] = value, value, value
    out, lse = cuflash.flash_attention(q, k, v, bias=bias, method="mma", return_lse=True)
    assert_attention_close(out, lse, expect_attention(q, k, v, bias=bias))


def test_sequences_end_to_end(executor):
    q, k, v = (x[0] for x in operands(40, 50))
    ends_q, ends_k = np.array([0, 5, 5, 40, TQ]), np.array([0, 50, 60, 61, TK])
    out, lse = cuflash.flash_attention_varlen(
        q, k, v, ends_q, ends_k, causal=True, method="mma", return_lse=True
    )
    for i in range(4):
        rows, keys = slice(*ends_q[i : i + 2]), slice(*ends_k[i : i + 2])
        expected = expect_attention(q[rows], k[keys], v[keys], causal=True)
        assert_attention_close(out[rows], lse[rows], expected)


def test_the_family_is_for_gpus_whose_tensor_cores_are_faster():
    """Elsewhere, and for a few rows, auto is the plain kernel."""
    shape = (64, 64, 64, 64)
    for capability, method in (("80", "mma"), ("86", "simt"), ("89", "simt"), ("90", "mma")):
        limits = replace(H200, compute_capability=capability)
        assert plan_of(*shape, dtype=np.float64, limits=limits).method == method
    assert plan_of(3, 64, 64, 64, dtype=np.float64).method == "simt"
    assert plan_of(64, 64, 257, 64, dtype=np.float64).method == "simt"


def test_tiles_are_chosen_by_shape_and_shared_memory():
    """No row of the table is out of reach."""
    a100 = {"compute_capability": "80", "shared_per_sm": 164 << 10, "shared_per_block": 163 << 10}
    small = replace(H200, **a100)
    chosen = {
        plan_of(64, 64, d, dv, dtype=np.float64, limits=limits).tile
        for d, dv in ((8, 8), (64, 64), (100, 300), (256, 8))
        for limits in (H200, small)
    }
    assert {choice.tile for choice in DMMA_TILES} <= chosen
    assert plan_of(64, 64, 256, 64, dtype=np.float64, limits=small).method == "simt"
    tiny = replace(small, shared_per_block=99_000)
    assert plan_of(64, 64, 32, 32, dtype=np.float64, limits=tiny).method == "mma"
    assert plan_of(64, 64, 32, 33, dtype=np.float64, limits=tiny).method == "simt"
