"""Gradients on tensor cores on the CPU: every tile of the tables, with every score pipeline."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

import cuflash
from cuflash.device import attention_vjp_plans, attention_vjp_plans_mma
from cuflash.device.attention_vjp_plans_mma import KEYS_TILES, QUERIES_TILES, KeysTile
from cuflash.problem import BFLOAT16
from cuflash.problem_vjp import AttentionGrads
from cuflash.testing.bounds import assert_gradients_close, expect_gradients
from cuflash.testing.gradients import GRADIENT_PROPERTIES
from cuflash.testing.problems import AttentionCase
from tests.devices import H200
from tests.host_cuda import builder
from tests.host_cuda.builder import Edit
from tests.host_cuda.test_attention import normal, on_host_cuda, use
from tests.host_cuda.test_attention_vjp import FAULTY_CASES

pytestmark = pytest.mark.skipif(not builder.available(), reason="no C++ compiler")

TQ, TK = 70, 150
_rng = partial(np.random.default_rng, 5)
#: The options of a call, by the score pipeline that serves it.
OPTIONS = {
    "RangedScore": {"window": (60, 20), "key_lengths": 140},
    "FullScore": {
        "softcap": 2.0,
        "bias": _rng().normal(size=(1, 1, TK)),
        "alibi_slopes": np.float32([0.5, -0.1]),
        "mask": _rng().random((TQ, TK)) < 0.7,
        "window": (None, 20),
    },
}
HALF = np.float16
TABLES = {"KEYS_TILES": KEYS_TILES, "QUERIES_TILES": QUERIES_TILES}
TILES = [
    pytest.param(table, choice, score, id=f"{choice.tile.expression[9:]}-{score}")
    for table, choices in TABLES.items()
    for choice in choices
    for score in choice.scores
]


@pytest.fixture
def tiles(monkeypatch):
    """Return a function that lets every plan take a tile of a table, until the test ends."""
    cache = attention_vjp_plans.plan_attention_vjp

    choose = attention_vjp_plans_mma.vjp_mma_tile

    def take(table, choice):
        def chosen(given, *args, **options):
            return choice.tile if given is TABLES[table] else choose(given, *args, **options)

        monkeypatch.setattr(attention_vjp_plans_mma, "vjp_mma_tile", chosen)
        cache.cache_clear()

    yield take
    cache.cache_clear()


@pytest.fixture
def staged(tiles):
    """Take a tile whose sums of dq leave by shared memory, of which the cases have several."""
    tiles("KEYS_TILES", next(c for c in KEYS_TILES if c.tile.staged and c.tile.queries == 64))


def operands(d, dv, dtype=HALF):
    shapes = ((TQ, d), (TK, d), (TK, dv), (TQ, dv))
    return [normal(seed, 2, *shape, dtype=dtype) for seed, shape in enumerate(shapes)]


def gradients(q, k, v, dout, *, given=None, **options):
    """Run forward and backward by `mma`, and compare with the oracle."""
    out, lse = cuflash.flash_attention(q, k, v, return_lse=True, **options)
    call = {"dlse": normal(9, *lse.shape), "method": "mma", **(given or {})}
    grads = cuflash.flash_attention_vjp(dout, q, k, v, out, lse, **call, **options)
    if call.get("grads") is None:
        expected = expect_gradients(dout, q, k, v, dlse=call["dlse"], **options)
        assert_gradients_close(grads, expected)
    return grads


def launched(executor):
    """Return the kernels that ran after the forward."""
    names = [launch.kernel.expression.split("<")[0][9:] for launch in executor.launched]
    return names[names.index("row_deltas") :]


# ------------------------------------------------------------------------------------------- tiles


@pytest.mark.parametrize(("table", "choice", "score"), TILES)
def test_tile(table, choice, score, tiles, monkeypatch):
    """With columns to fill up, rows that differ in what they see, and NaN where no row looks."""
    executor = use(monkeypatch)
    tiles(table, choice)
    q, k, v, dout = operands(choice.width - 3, choice.width)
    options = OPTIONS[score]
    if "key_lengths" in options:
        k[:, options["key_lengths"] :] = v[:, options["key_lengths"] :] = np.nan
    gradients(q, k, v, dout, given={"deterministic": table == "QUERIES_TILES"}, **options)
    wanted = f"cuflash::{score}<float>, {choice.tile.expression}"
    assert any(wanted in launch.kernel.expression for launch in executor.launched)


def test_tiles_are_chosen_by_shape_and_score():
    """No row of the tables is out of reach but by the limits of a device."""
    limits = [H200]
    for capability, shared in (("80", 164 << 10), ("86", 100 << 10)):
        small = {"shared_per_sm": shared, "shared_per_block": shared - 1024}
        limits.append(replace(H200, compute_capability=capability, **small))
    for table in TABLES.values():
        chosen = {
            attention_vjp_plans_mma.vjp_mma_tile(table, width, score, limit, staged=staged)
            for staged in (False, True)
            for width in (8, 64, 100, 128, 200, 256)
            for score in OPTIONS
            for limit in limits
        }
        assert chosen == {choice.tile for choice in table}


def test_tiles_that_no_kernel_has_are_refused():
    right = KeysTile(64, 64, 64, 8, 2, 2, 2, False, 1)
    for wrong in (
        {"keys": 48},
        {"width": 96},
        {"warps": 2},
        {"warps": 6},
        {"queries": 512, "warps": 8},
        {"pair_rows": 8},
        {"sum_rows": 8},
        {"warps": 16},
        {"stages": 3},
    ):
        with pytest.raises(ValueError, match=r"must|no multiples|no thread"):
            replace(right, **wrong)


# ------------------------------------------------------------------------------- one sweep, or two


def test_dq_by_atomics_unless_deterministic(monkeypatch):
    """dk and dv have the same bits either way; sums of dq are in the workspace."""
    executor = use(monkeypatch)
    q, k, v, dout = operands(64, 64)
    one = gradients(q, k, v, dout, causal=True)
    assert launched(executor) == [
        "row_deltas",
        "backward_mma_clear",
        "backward_mma_keys",
        "backward_mma_round",
    ]
    executor.launched.clear()
    two = gradients(q, k, v, dout, causal=True, given={"deterministic": True})
    assert launched(executor) == ["row_deltas", "backward_mma_keys", "backward_mma_queries"]
    np.testing.assert_array_equal(one.dk, two.dk)
    np.testing.assert_array_equal(one.dv, two.dv)


@pytest.mark.parametrize("deterministic", [False, True])
def test_each_gradient_alone_has_the_same_bits(deterministic, monkeypatch):
    use(monkeypatch)
    q, k, v, dout = operands(40, 24)
    given = {"deterministic": deterministic}
    everything = gradients(q, k[:1], v, dout, causal=True, given=given)
    for name, x in zip(("dq", "dk", "dv"), (q, k[:1], v), strict=True):
        buffer = np.full_like(x, np.nan)
        asked = {**given, "grads": AttentionGrads(**{name: buffer})}
        gradients(q, k[:1], v, dout, causal=True, given=asked)
        np.testing.assert_array_equal(buffer, getattr(everything, name))


@pytest.mark.parametrize("deterministic", [False, True])
def test_operands_that_broadcast(deterministic, monkeypatch):
    """Heads of a group, one query for all, keys of all and values of each, all at once."""
    use(monkeypatch)
    given = {"deterministic": deterministic}
    q, k, v = normal(0, 3, 1, 33, 16), normal(1, 1, 2, 40, 16), normal(2, 3, 1, 40, 20)
    q, k, v = (x.astype(BFLOAT16) for x in (q, k, v))
    dout = normal(3, 3, 2, 33, 20).astype(BFLOAT16)
    gradients(q, k, v, dout, given=given, sinks=normal(4, 2), bias=normal(5, 33, 1))
    gradients(q[:1, 0], k, v, dout, given=given)


@pytest.mark.parametrize("choice", [c for c in QUERIES_TILES if "FullScore" in c.scores], ids=str)
@pytest.mark.parametrize("bias", [(2, 3, 70, 40), (3, 1, 40), (2, 1, 70, 1), (1, 1), ()])
def test_bias_of_every_shape(bias, choice, tiles, monkeypatch):
    executor = use(monkeypatch)
    tiles("QUERIES_TILES", choice)
    q, k, v = normal(0, 2, 3, 70, 8), normal(1, 2, 1, 40, 8), normal(2, 2, 3, 40, 8)
    q, k, v = (x.astype(HALF) for x in (q, k, v))
    k[..., 39, :] = np.nan  # of which no row sees anything
    dout = normal(3, 2, 3, 70, 8).astype(HALF)
    options = {"softcap": 2.0, "causal": True, "query_offset": -31}
    dbias = gradients(q, k, v, dout, bias=normal(3, *bias), **options).dbias
    assert dbias.shape == bias
    assert "backward_mma_bias" in launched(executor)


def test_dout_in_float32(monkeypatch):
    use(monkeypatch)
    q, k, v, dout = operands(40, 24)
    for deterministic in (False, True):
        gradients(q, k, v, dout.astype(np.float32), given={"deterministic": deterministic})


@pytest.mark.parametrize("deterministic", [False, True])
def test_strides_change_no_bit(deterministic, monkeypatch):
    """Rows that are no vectors, columns apart, and backwards; gradients too."""
    use(monkeypatch)
    arrays = operands(24, 24)
    given = {"deterministic": deterministic}
    plain = gradients(*arrays, given=given)

    def views(x):
        apart = np.zeros((*x.shape[:-1], 2 * x.shape[-1] + 1), x.dtype)[..., ::2][..., :-1]
        backwards = np.zeros_like(x)[:, ::-1, ::-1]
        return apart, np.zeros_like(x.swapaxes(-1, -2)).swapaxes(-1, -2), backwards

    for kind in range(3):
        copies = [views(x)[kind] for x in arrays]
        for copy, x in zip(copies, arrays, strict=True):
            copy[...] = x
        buffers = AttentionGrads(*(views(x)[kind] for x in arrays[:3]))
        gradients(*copies, given={**given, "grads": buffers})
        for got, want in zip(buffers[:3], plain[:3], strict=True):
            np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_key_that_is_not_finite_reaches_who_sees_it(deterministic, monkeypatch):
    """Its weight is 0 where its score is -inf, and 0 times inf is NaN: in its column alone."""
    use(monkeypatch)
    q, k, v, dout = operands(32, 32)
    q[:, :, 3] = np.abs(q[:, :, 3]) + 1
    given = {"deterministic": deterministic}
    clean = gradients(q, k, v, dout, causal=True, query_offset=0, given=given)
    k[0, 20, 3] = -np.inf
    out, lse = cuflash.flash_attention(
        q, k, v, causal=True, query_offset=0, return_lse=True, method="mma"
    )
    grads = cuflash.flash_attention_vjp(
        dout, q, k, v, out, lse, causal=True, query_offset=0, method="mma", **given
    )
    assert np.isnan(grads.dq[0, 20:, 3]).all()
    assert np.isfinite(np.delete(grads.dq[0], 3, axis=-1)).all()
    # dlse of the clean call is not zero, but it is nothing to dv.
    np.testing.assert_array_equal(grads.dv[1], clean.dv[1])
    again = cuflash.flash_attention_vjp(
        dout, q, k, v, out, lse, causal=True, query_offset=0, method="mma", **given
    )
    np.testing.assert_array_equal(grads.dq[0, :20], again.dq[0, :20])
    assert np.isfinite(grads.dq[1]).all()


def test_infinite_cotangents_and_queries_that_are_seen(monkeypatch):
    """inf stays inf, in its column of dv; NaN of a query is in all that dk_j sums."""
    use(monkeypatch)
    q, k, v, dout = operands(16, 16)
    dout[0, 5, 2] = np.inf
    out, lse = cuflash.flash_attention(q, k, v, return_lse=True, method="mma")
    grads = cuflash.flash_attention_vjp(dout, q, k, v, out, lse, method="mma")
    assert np.isposinf(grads.dv[0, :, 2]).all()
    assert np.isfinite(np.delete(grads.dv[0], 2, axis=-1)).all()
    assert not np.isfinite(grads.dk[0]).any()
    assert np.isfinite(grads.dk[1]).all()


def test_what_only_other_families_can_run():
    q = normal(0, 3, 200)
    with pytest.MonkeyPatch.context() as patch:
        use(patch)
        with pytest.raises(ValueError, match=r"cannot run this problem.*'auto', 'simt'"):
            cuflash.flash_attention_vjp(q, q, q, q, q, q[:, 0], method="mma")
        wide = normal(0, 3, 260, dtype=HALF)
        with pytest.raises(ValueError, match=r"cannot run this problem.*'auto', 'simt'"):
            cuflash.workspace_size(wide, wide, wide, backward=True, method="mma")


# ----------------------------------------------------------------------------------- planted faults

STEPS, MMA = "attention/backward_mma.cuh", "attention/backward_mma.cu"
PUT_BACK = "attention/nonfinite_gradients.cuh"
FAULTS = {
    "no barrier before pairs are summed": (MMA, "__syncthreads();  // all pairs are there", ""),
    "delta left out": (STEPS, "(flow - state.delta);", "flow;"),
    "slope of the softcap left out": (STEPS, "gradient *= slope[j];", ";"),
    "rows without keys not told from others": (
        STEPS,
        "if (!score.is_used(row) || lse == -infinity<float>()) return x;",
        "",
    ),
    "unseen pairs have weight": (STEPS, "dot = seen ? weight : kUnseen<float>;", "dot = weight;"),
    "unseen pairs have a gradient": (STEPS, "flow = seen ? gradient : 0;", "flow = gradient;"),
    "mask not asked": (STEPS, "!(hidden >> j & 1)", "true"),
    "tiles that are not whole taken for whole": (
        MMA,
        "const bool whole = __all_sync(kFullWarp, all_see);",
        "const bool whole = true;",
    ),
    "no second turn for non-finite values": (
        MMA,
        "damaged_rows<SumPart>(sums);\n        if (rows) block.redo = 1;",
        "damaged_rows<SumPart>(sums);",
    ),
    "non-finite keys multiplied by 0": (MMA, "keys_damaged = true;", ";"),
    "non-finite values not put back": (PUT_BACK, "x = narrow<T>(widen(x) + total);", ";"),
    "scale of dq left out": (
        MMA,
        "const float scale = block.score.scale;",
        "const float scale = 1;",
    ),
    "scale of dk left out": (MMA, "of_values ? 1 : block.score.scale", "1"),
    "sums of dq not cleared": (MMA, "first[i] = make_float4(0, 0, 0, 0);", ";"),
    "states of the tile before": (MMA, "if (more) keep_state(tile + 1);", ""),
    "sums of dq added before all are there": (MMA, "__syncthreads();  // all sums are there", ""),
    "sums of dq staged over those that are added": (
        MMA,
        "if constexpr (kStagesQueries) wait_for_boxes_read();\n                __syncthreads();",
        "__syncthreads();",
    ),
    "one entry of a sum left out": (
        MMA,
        "for (int64 entry = 0; entry < p.summed; ++entry) {\n            block.enter(p, entry);\n"
        "            const EntryBounds",
        "for (int64 entry = p.summed > 1; entry < p.summed; ++entry) {\n"
        "            block.enter(p, entry);\n            const EntryBounds",
    ),
}
LAWS = ("matches_oracle", "unseen_nonfinite_never_leaks", "nonfinite_row_reaches_only_what_it_sees")
#: Those of the plain kernels, and NaN in keys that no row sees, for masks hide them.
CASES = [
    replace(case, dtype="float16")
    for case in (*FAULTY_CASES, AttentionCase(tq=70, tk=80, d=40, dv=40, mask=(80,), unseen="nan"))
]


def laws_of_16_bits(**options):
    """With atomic additions, which have an order on the CPU."""
    for order in ("forward", "reverse"):
        run = on_host_cuda(cuflash.flash_attention_vjp, order=order, **options)

        def call(*args, run=run, **given):
            return run(*args, **(given | {"deterministic": False}))

        for case in CASES:
            for law in LAWS:
                GRADIENT_PROPERTIES[law](call, case)


def test_nothing_planted(staged):
    laws_of_16_bits()


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_found(fault, staged):
    with pytest.raises((AssertionError, RuntimeError)):
        laws_of_16_bits(edits=(Edit(*FAULTS[fault]),))
