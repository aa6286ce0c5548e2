"""The kernel on TF32 tensor cores on the CPU: every tile of its table with every pipeline."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings

import cuflash
from cuflash.device.attention_plans_tf32 import SCORES, TF32_TILES
from cuflash.testing.bounds import assert_attention_close, expect_attention
from cuflash.testing.cases import ALL_CASES
from cuflash.testing.properties import ATTENTION_PROPERTIES
from cuflash.testing.strategies import attention_problems
from tests.devices import H200
from tests.host_cuda import builder
from tests.host_cuda.builder import Edit
from tests.host_cuda.test_attention import ORDERS, OTHER_CASES, on_host_cuda, plan_of, use

pytestmark = pytest.mark.skipif(not builder.available(), reason="no C++ compiler")

#: A GPU that has these tensor cores, and not those of Hopper.
A100_LIKE = replace(H200, compute_capability="80")
TQ, TK = 70, 150
_rng = partial(np.random.default_rng, 5)
#: The options of a call, by the score pipeline that serves it.
OPTIONS = {
    "PlainScore": {"sinks": np.float32([0.5, -np.inf])},
    "RangedScore": {"window": (60, 20), "key_lengths": 140, "query_lengths": 68},
    "FullScore": {
        "softcap": 2.0,
        "bias": _rng().normal(size=(2, 1, TK)).astype(np.float32),
        "alibi_slopes": np.float32([0.5, -0.1]),
        "mask": _rng().random((TQ, 1)) < 0.7,
        "window": (None, 20),
    },
}


def operands(d, dv, tq=TQ, tk=TK):
    rng = np.random.default_rng(d)
    shapes = ((tq, d), (tk, d), (tk, dv))
    return [rng.normal(size=(2, *s)).astype(np.float32) for s in shapes]


@pytest.fixture
def executor(monkeypatch):
    return use(monkeypatch, limits=A100_LIKE)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("tile", [choice.tile for choice in TF32_TILES], ids=lambda x: x.expression)
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
        dtypes=["float32"], borders=(16, 32, 64), max_tokens=70, max_features=70, max_batch_axes=2,
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
    fits = q.dtype == np.float32 and q.shape[-1] <= 128
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


LARGEST = np.finfo(np.float32).max


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_keys_that_are_not_finite(value, score, executor):
    """Of +inf a row is NaN, of -inf it does not see the key; rows of other keys have their bits."""
    q, k, v = operands(64, 64)
    q[..., 5] = np.abs(q[..., 5]) + np.float32(0.1)
    q[:, ::7, 5] *= -1
    options = {"PlainScore": {}, "RangedScore": {"causal": True}}.get(score, {"softcap": 3.0})
    clean, _ = cuflash.flash_attention(q, k, v, **options, method="mma", return_lse=True)
    k[:, 100, 5] = value
    out, lse = cuflash.flash_attention(q, k, v, **options, method="mma", return_lse=True)
    assert_attention_close(out, lse, expect_attention(q, k, v, **options))
    if score == "RangedScore":
        np.testing.assert_array_equal(out[:, : 100 - (TK - TQ)], clean[:, : 100 - (TK - TQ)])
        assert np.isnan(out).any() or value == -np.inf


def test_keys_that_are_too_large_for_two_parts(executor):
    """Rounded to TF32 they would be infinite; the others' scores keep their bits."""
    q, k, v = operands(64, 64)
    q[..., 5] = np.float32(2e-38)
    clean, clean_lse = cuflash.flash_attention(q, k, v, method="mma", return_lse=True)
    k[0, 100, 5], k[1, 7, 5] = LARGEST, -LARGEST
    out, lse = cuflash.flash_attention(q, k, v, method="mma", return_lse=True)
    assert_attention_close(out, lse, expect_attention(q, k, v))
    assert (lse != clean_lse).all() and np.isfinite(clean).all()


@pytest.mark.parametrize("value", [LARGEST, -LARGEST, np.float32(3.4e38)])
def test_the_largest_values(value, executor):
    """Of one key each row's result is finite."""
    q, k, v = operands(64, 64, tk=70)
    v[:, ::2, ::3] = value
    options = {"window": (0, 0)}
    out = cuflash.flash_attention(q, k, v, **options, method="mma")
    np.testing.assert_allclose(out, v, rtol=2.5e-4)


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
    out = out if out.flags.writeable else np.full((2, TQ, 20), np.nan, np.float32)
    lse = np.full((2, TQ), np.nan, np.float32)
    cuflash.flash_attention(*arrays, method="mma", out=out, lse=lse)
    assert_attention_close(out, lse, expect_attention(*arrays))


@pytest.mark.parametrize("d", [64, 128])
def test_equal_terms(d, executor):
    """Terms that are all alike, added one by one, would err in one direction: like their number."""
    terms = (((40, d), 0.1), ((8192, d), 0.1), ((8192, 8), 1.1))
    q, k, v = (np.full(shape, x, np.float32) for shape, x in terms)
    out, lse = cuflash.flash_attention(q, k, v, method="mma", num_splits=1, return_lse=True)
    assert_attention_close(out, lse, expect_attention(q, k, v))
    assert np.abs(out / v[0] - 1).max() < 2e-6
    k[0] *= 3  # all other weights are equal, and below 1
    out, lse = cuflash.flash_attention(q, k, v, method="mma", num_splits=1, return_lse=True)
    assert np.abs(out / v[0] - 1).max() < 2e-6
    assert np.abs(lse - cuflash.reference.attention(q, k, v)[1]).max() < 1e-6
    out, lse = cuflash.flash_attention(q, k[:1], v[:1], method="mma", return_lse=True)
    assert_attention_close(out, lse, expect_attention(q, k[:1], v[:1]))


@pytest.mark.parametrize("layout", ["whole", "parts"])
@pytest.mark.parametrize("d", [64, 128])
def test_sums_of_long_rows(d, layout, executor):
    """Those that lie among the results follow a reference that rises, and a second turn."""
    q, k, v = (x[:1] for x in operands(d, d, tq=40, tk=4500))
    k *= np.linspace(0.2, 5, 4500, dtype=np.float32)[:, None]
    v[:, 4480, 7] = np.nan
    out = np.full((1, 40, d + 3), np.nan, np.float32)[..., : d if layout == "parts" else None]
    if layout == "whole":
        out = out[..., 3:].copy()
    lse = np.full((1, 40), np.nan, np.float32)
    options = {"method": "mma", "num_splits": 1, "causal": True}
    cuflash.flash_attention(q, k, v, **options, out=out, lse=lse)
    assert_attention_close(out, lse, expect_attention(q, k, v, causal=True))
    assert np.isnan(out[0, 21:, 7]).all() and np.isfinite(out[0, :19]).all()


@pytest.mark.parametrize("size", [1e2, 2e4, 1e8, 1e15, 1e18])
@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"sinks": np.float32([3e9, -1])}, {"scale": -0.3}], ids=str
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


KERNEL, TILE = "attention/forward_tf32.cu", "attention/tf32_tile.cuh"
FAULTS = {
    "plain TF32": Edit(TILE, "int part = 0; part < 3;", "int part = 2; part < 3;"),
    "a tile read before it is there": Edit(KERNEL, "wait_for_copies<0>();", ""),
    "no second turn": Edit(KERNEL, "if (damaged) block.redo = 1;", ""),
    "infinite scores left as they are": Edit(TILE, "left |= 1ull << n;", ";"),
    "stored sums as they were": Edit(KERNEL, "stored.element[n], factor,", "stored.element[n], 1,"),
    "sums of long rows forgotten": Edit(
        KERNEL, "if (tile > kTilesApart) add_stored_sums", "if (false) add_stored_sums"
    ),
    "normalizers of long rows forgotten": Edit(
        KERNEL, "if (tile > kTilesApart) add_stored_normalizer(i);", ""
    ),
}


def three_calls(**options):
    """Attend to a few keys, to one that is infinite, and to many of scores that rise."""
    call = on_host_cuda(cuflash.flash_attention, limits=A100_LIKE, **options)
    q, k, v = operands(64, 64)
    far = k.copy()
    far[:, 3, 5] = -np.inf * q[0, 0, 5]
    q[..., 5] = q[0, 0, 5]
    many, their_v = (x[:1] for x in operands(64, 32, tk=2100)[1:])
    many = many * np.linspace(0.2, 5, 2100, dtype=np.float32)[:, None]
    for keys, values in ((k, v), (far, v), (many, their_v)):
        x = q[: len(keys)]
        out, lse = call(x, keys, values, method="mma", num_splits=1, return_lse=True)
        assert_attention_close(out, lse, expect_attention(x, keys, values))


def test_nothing_planted():
    three_calls()


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_found(fault):
    with pytest.raises((AssertionError, RuntimeError)):
        for order in builder.HostKernel.ORDERS:
            three_calls(edits=(FAULTS[fault],), order=order)


def test_the_family_is_for_gpus_whose_tensor_cores_are_faster():
    """Elsewhere, for a few rows and for wide heads, auto is the plain kernel."""
    for capability, method in (("75", "simt"), ("80", "mma"), ("89", "simt"), ("90", "mma")):
        limits = replace(H200, compute_capability=capability)
        assert plan_of(64, 64, 64, 64, limits=limits).method == method
    assert plan_of(64, 64, 64, 64, limits=limits, method="mma").method == "mma"
    assert plan_of(3, 64, 64, 64).method == "simt"
    assert plan_of(64, 64, 129, 64).method == "simt"


def test_tiles_are_chosen_by_shape_and_shared_memory():
    """No row of the table is out of reach."""
    shapes = ((8, 8), (64, 64), (100, 300), (64, 65))
    chosen = {plan_of(64, 64, d, dv).tile for d, dv in shapes}
    assert {choice.tile for choice in TF32_TILES} <= chosen
    small = replace(H200, compute_capability="80", shared_per_block=99_000)
    assert plan_of(64, 64, 64, 64, limits=small).method == "mma"
    assert plan_of(64, 64, 65, 64, limits=small).method == "simt"
