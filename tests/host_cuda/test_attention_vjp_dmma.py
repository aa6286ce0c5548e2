"""Gradients on float64 tensor cores on the CPU: every tile of the table, with every pipeline."""

from dataclasses import replace
from functools import partial

import hypothesis
import numpy as np
import pytest
from hypothesis import settings

import cuflash
from cuflash.device import attention_vjp_plans
from cuflash.device.attention_vjp_plans_dmma import (
    DMMA_VJP,
    DMMA_VJP_TILES,
    DmmaVjpTile,
    dmma_vjp_obstacle,
)
from cuflash.device.attention_vjp_plans_pairs import PAIRS_SCORES
from cuflash.problem_vjp import AttentionGrads
from cuflash.testing.bounds import assert_gradients_close, expect_gradients
from cuflash.testing.gradients import GRADIENT_PROPERTIES
from cuflash.testing.problems import AttentionCase
from cuflash.testing.strategies import attention_problems, varlen_problems
from cuflash.testing.varlen_gradients import VARLEN_GRADIENT_PROPERTIES
from tests.devices import H200
from tests.host_cuda import builder
from tests.host_cuda.builder import Edit
from tests.host_cuda.test_attention import ORDERS, normal, on_host_cuda, use
from tests.host_cuda.test_attention_vjp import FAULTY_CASES, problem_of

pytestmark = pytest.mark.skipif(not builder.available(), reason="no C++ compiler")

#: A GPU that has these tensor cores, and not those of Hopper.
A100_LIKE = replace(H200, compute_capability="80")
TQ, TK = 70, 150
_rng = partial(np.random.default_rng, 5)
#: The options of a call, by the score pipeline that serves it.
OPTIONS = {
    "RangedScore": {"window": (60, 20), "key_lengths": 140, "query_lengths": 68},
    "FullScore": {
        "softcap": 2.0,
        "bias": _rng().normal(size=(1, 1, TK)),
        "alibi_slopes": np.float64([0.5, -0.1]),
        "mask": _rng().random((TQ, TK)) < 0.7,
        "window": (None, 20),
    },
}


def doubles(seed, *shape):
    return normal(seed, *shape, dtype=np.float64)


def operands(d, dv, tq=TQ, tk=TK):
    shapes = ((tq, d), (tk, d), (tk, dv), (tq, dv))
    return [doubles(seed, 2, *shape) for seed, shape in enumerate(shapes)]


def gradients(q, k, v, dout, *, given=None, **options):
    """Run forward and backward by `mma`, and compare with the oracle."""
    out, lse = cuflash.flash_attention(q, k, v, return_lse=True, method="simt", **options)
    call = {"dlse": doubles(9, *lse.shape), "method": "mma", **(given or {})}
    grads = cuflash.flash_attention_vjp(dout, q, k, v, out, lse, **call, **options)
    if call.get("grads") is None:
        expected = expect_gradients(dout, q, k, v, dlse=call["dlse"], **options)
        assert_gradients_close(grads, expected)
    return grads


@pytest.fixture
def executor(monkeypatch):
    return use(monkeypatch, limits=A100_LIKE)


@pytest.fixture
def take(monkeypatch):
    """Return a function that lets every plan take a row of the table, until the test ends."""
    cache = attention_vjp_plans.plan_attention_vjp

    def taken(choice):
        family = replace(DMMA_VJP, table=replace(DMMA_VJP.table, choices=(choice,)))
        monkeypatch.setitem(attention_vjp_plans.PAIRS, "float64", family)
        cache.cache_clear()

    yield taken
    cache.cache_clear()


# ------------------------------------------------------------------------------------------- tiles


@pytest.mark.parametrize("score", PAIRS_SCORES)
@pytest.mark.parametrize("choice", DMMA_VJP_TILES, ids=lambda x: x.tile.expression[9:])
def test_tile(choice, score, executor, take):
    """With columns to fill up, rows that differ in what they see, and NaN where no row looks."""
    take(choice)
    # Rows that are copied by words, and by elements.
    fewer = {"RangedScore": 2, "FullScore": 3}[score]
    q, k, v, dout = operands(choice.features - fewer, choice.features)
    options = OPTIONS[score]
    if "key_lengths" in options:
        k[:, options["key_lengths"] :] = v[:, options["key_lengths"] :] = np.nan
        q[:, options["query_lengths"] :] = dout[:, options["query_lengths"] :] = np.nan
    wanted = f"backward_dmma<cuflash::{score}<double>, {choice.tile.expression}"
    for deterministic in (False, True):
        executor.launched.clear()
        gradients(q, k, v, dout, given={"deterministic": deterministic}, **options)
        launched = [launch.kernel.expression for launch in executor.launched]
        assert sum(wanted in expression for expression in launched) == 1 + deterministic


def test_tiles_are_chosen_by_shape_and_shared_memory():
    """No row of the table is out of reach; other heads and other GPUs keep the plain kernels."""
    small = replace(A100_LIKE, shared_per_sm=164 << 10, shared_per_block=163 << 10)
    tiny = replace(small, shared_per_block=99 << 10)
    chosen = [
        DMMA_VJP.table.tile_of(problem_of(*[(3, width)] * 3, dtype=np.float64), limits)
        for width in (8, 64, 65, 128)
        for limits in (H200, small)
    ]
    assert set(chosen) == {choice.tile for choice in DMMA_VJP_TILES}
    for limits, able in (
        (H200, True),
        (A100_LIKE, True),
        (replace(H200, compute_capability="86"), False),
        (tiny, False),
    ):
        for width in (128, 129):
            problem = problem_of(*[(3, width)] * 3, dtype=np.float64)
            can = dmma_vjp_obstacle(problem, limits) is None
            assert can == (able and width == 128)


@pytest.mark.parametrize(
    "wrong",
    [
        {"pairs": 1},
        {"pairs": 3},
        {"row_tiles": 0},
        {"row_tiles": 8},
        {"met": 24},
        {"met": 256},
        {"width": 96},
        {"blocks": 0},
    ],
    ids=str,
)
def test_tiles_that_no_kernel_has_are_refused(wrong):
    with pytest.raises(ValueError, match=r"must|too few|cannot copy"):
        replace(DmmaVjpTile(4, 1, 32, 64, 1), **wrong)


# ------------------------------------------------------------------------------------------ sweeps


def launched(executor):
    """Return the kernels that ran after the forward."""
    names = [launch.kernel.expression.split("<")[0][9:] for launch in executor.launched]
    return names[names.index("row_deltas") :]


def test_dq_by_atomics_unless_deterministic(executor):
    """dk and dv have the same bits either way; sums of dq are in the workspace."""
    q, k, v, dout = operands(64, 64)
    one = gradients(q, k, v, dout, causal=True)
    sums = "query_sums"
    assert launched(executor) == ["row_deltas", sums, "backward_dmma", sums]
    executor.launched.clear()
    two = gradients(q, k, v, dout, causal=True, given={"deterministic": True})
    assert launched(executor) == ["row_deltas", "backward_dmma", "backward_dmma"]
    np.testing.assert_array_equal(one.dk, two.dk)
    np.testing.assert_array_equal(one.dv, two.dv)
    need = cuflash.workspace_size(q, k, v, backward=True, method="mma")
    assert need <= 8 * 2 * TQ * 65 + 32


@pytest.mark.parametrize("deterministic", [False, True])
def test_each_gradient_alone_has_the_same_bits(deterministic, executor):
    q, k, v, dout = operands(40, 24)
    given = {"deterministic": deterministic}
    everything = gradients(q, k[:1], v, dout, causal=True, given=given)
    for name, x in zip(("dq", "dk", "dv"), (q, k[:1], v), strict=True):
        buffer = np.full_like(x, np.nan)
        asked = {**given, "grads": AttentionGrads(**{name: buffer})}
        gradients(q, k[:1], v, dout, causal=True, given=asked)
        np.testing.assert_array_equal(buffer, getattr(everything, name))


@pytest.mark.parametrize("deterministic", [False, True])
def test_operands_that_broadcast(deterministic, executor):
    """Heads of a group, one query for all, keys of all and values of each, all at once."""
    given = {"deterministic": deterministic}
    q, k, v = doubles(0, 3, 1, 33, 16), doubles(1, 1, 2, 40, 16), doubles(2, 3, 1, 40, 20)
    dout = doubles(3, 3, 2, 33, 20)
    gradients(q, k, v, dout, given=given, sinks=doubles(4, 2), bias=doubles(5, 33, 1))
    gradients(q[:1, 0], k, v, dout, given=given)
    assert "backward_bias" in launched(executor)


@pytest.mark.parametrize("deterministic", [False, True])
def test_launches_add_to_every_gradient(deterministic, executor):
    q = doubles(0, *(2,) * 10, 1, 2)[::-1, :, ::-1, :, ::-1, :, ::-1, :, ::-1]
    given = {"deterministic": deterministic}
    gradients(q, doubles(1, 3, 2), doubles(2, 3, 2), np.ones_like(q), given=given)
    assert launched(executor).count("backward_dmma") > 2


@pytest.mark.parametrize("deterministic", [False, True])
def test_strides_change_no_bit(deterministic, executor):
    """Rows that are no vectors, columns apart, and backwards; gradients too."""
    arrays = operands(24, 24)
    given = {"deterministic": deterministic}
    plain = gradients(*arrays, given=given)

    def views(x):
        apart = np.zeros((*x.shape[:-1], 2 * x.shape[-1] + 1))[..., ::2][..., :-1]
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


# ---------------------------------------------------------------------------------------- accuracy


@pytest.mark.parametrize("d", [64, 128])
def test_equal_terms(d, executor):
    """Terms that are all alike, added one by one, would err in one direction: like their number."""
    q, dout = np.full((4096, d), 0.1), np.full((4096, 8), 1.1)
    k, v = np.full((40, d), 0.1), doubles(0, 40, 8)
    grads = gradients(q, k, v, dout, given={"dlse": np.zeros(4096)})
    assert np.abs(grads.dv * 40 / (4096 * 1.1) - 1).max() < 4e-15


@pytest.mark.parametrize("scale", [1e30, -1e30, 1e-30, 0.0, 1e4])
def test_scales_of_any_size(scale, executor):
    gradients(*(doubles(seed, 4, 3) for seed in range(4)), scale=scale)


def test_an_infinite_lse_is_nan_in_its_row(executor):
    q, k, v, dout = (doubles(seed, 5, 4) for seed in range(4))
    out, lse = cuflash.flash_attention(q, k, v, return_lse=True)
    lse[2] = np.inf
    grads = cuflash.flash_attention_vjp(dout, q, k, v, out, lse, method="mma")
    assert np.isnan(grads.dq[2]).all()
    assert np.isfinite(np.delete(grads.dq, 2, axis=0)).all()


# -------------------------------------------------------------------------------------------- laws

PROBLEMS = attention_problems(
    dtypes=["float64"], borders=(16, 32, 64), max_tokens=70, max_features=70, max_batch_axes=2,
    max_products=60_000,
)  # fmt: skip
SEQUENCES = varlen_problems(
    dtypes=["float64"], borders=(16, 32), max_tokens=70, max_sequences=5, max_batch_axes=2,
    max_products=400,
)  # fmt: skip


@pytest.mark.parametrize("law", GRADIENT_PROPERTIES)
def test_property(law):
    @settings(max_examples=max(1, settings().max_examples // 5))
    @hypothesis.given(case=PROBLEMS, order=ORDERS)
    def holds(case, order):
        call = partial(cuflash.flash_attention_vjp, method="mma")
        GRADIENT_PROPERTIES[law](on_host_cuda(call, order=order, limits=A100_LIKE), case)

    holds()


@pytest.mark.parametrize("law", VARLEN_GRADIENT_PROPERTIES)
def test_sequences_end_to_end(law):
    @settings(max_examples=max(1, settings().max_examples // 5))
    @hypothesis.given(case=SEQUENCES, order=ORDERS)
    def holds(case, order):
        call = partial(cuflash.flash_attention_varlen_vjp, method="mma")
        VARLEN_GRADIENT_PROPERTIES[law](on_host_cuda(call, order=order, limits=A100_LIKE), case)

    holds()


# ----------------------------------------------------------------------------------- planted faults

DMMA, STEPS, ROWS, PUT_BACK = (
    f"attention/{name}"
    for name in (
        "backward_dmma.cu", "backward_pairs.cuh", "backward_rows.cu", "nonfinite_gradients.cuh",
    )
)  # fmt: skip
FAULTS = {
    "no barrier before what is handed over": (
        DMMA,
        "__syncthreads();  // what is handed over is there",
        "",
    ),
    "delta left out": (DMMA, "place_of(pairs, i) -= below;", ";"),
    "slope of the softcap left out": (STEPS, "multiply_add(weight, slope[i], T(0))", "weight"),
    "rows without keys not told from others": (
        STEPS,
        "if (lse == -infinity<T>()) return x;",
        "",
    ),
    "unseen pairs have weight": (
        STEPS,
        "place_of(dots, i) = seen ? weight : kUnseen<T>;",
        "place_of(dots, i) = weight;",
    ),
    "unseen pairs have a gradient": (
        STEPS,
        "return has_bits_of_unseen(weight) ? kUnseen<T> :",
        "return",
    ),
    "mask not asked": (STEPS, "!(hidden >> i & 1)", "true"),
    "queries of tiles before": (DMMA, "tile % Tile::kGroup == 0", "tile == 0"),
    "no second turn for non-finite values": (
        DMMA,
        "damaged[warp_row + own_row(i) + g] = block.redo = true;",
        ";",
    ),
    "non-finite values not cleared": (
        DMMA,
        "keep_finite<2 * kMet,",
        "if (false) keep_finite<2 * kMet,",
    ),
    "non-finite values not put back": (PUT_BACK, "x = narrow<T>(widen(x) + total);", ";"),
    "slopes added before all are there": (
        DMMA,
        "__syncthreads();  // all slopes are there",
        "",
    ),
    "slopes of pairs that are left out": (
        DMMA,
        "shown ? pairs[m][j][e] : none,",
        "pairs[m][j][e],",
    ),
    "non-finite keys multiplied by 0": (DMMA, "keys_damaged = true;", ";"),
    "sums of dq not cleared": (ROWS, "sums.at(row, i % columns) = 0;", ";"),
    "scale of dq left out": (
        ROWS,
        "sums.at(row, i % columns) * block.score.scale",
        "sums.at(row, i % columns)",
    ),
    "scale left out": (DMMA, "kOfKeys && !of_values ? 1 : block.score.scale", "1"),
    "one entry of a sum left out": (
        DMMA,
        "for (int64 entry = 0; entry < p.summed; ++entry) {\n            block.enter(p, entry);\n"
        "            const EntryBounds",
        "for (int64 entry = p.summed > 1; entry < p.summed; ++entry) {\n"
        "            block.enter(p, entry);\n            const EntryBounds",
    ),
    "sums of what is seen alone": (
        DMMA,
        "const bool shown = !see_nothing",
        "const bool shown = see_nothing",
    ),
}
LAWS = ("matches_oracle", "unseen_nonfinite_never_leaks", "nonfinite_row_reaches_only_what_it_sees")
#: Those of the plain kernels, NaN in keys that no row sees, for masks hide them, and queries of
#: more tiles than are looked up at a time.
CASES = [
    replace(case, dtype="float64")
    for case in (
        *FAULTY_CASES,
        AttentionCase(tq=70, tk=80, d=40, dv=40, mask=(80,), unseen="nan"),
        AttentionCase(tq=200, tk=20, d=4, dv=4),
    )
]


def laws_of_doubles(**options):
    """By both ways to dq; atomic additions have an order on the CPU."""
    for order, deterministic in (("forward", False), ("reverse", False), ("reverse", True)):
        run = on_host_cuda(cuflash.flash_attention_vjp, order=order, limits=A100_LIKE, **options)

        def call(*args, run=run, deterministic=deterministic, **given):
            return run(*args, **(given | {"method": "mma", "deterministic": deterministic}))

        for case in CASES:
            for law in LAWS:
                GRADIENT_PROPERTIES[law](call, case)


def test_nothing_planted():
    laws_of_doubles()


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_found(fault):
    with pytest.raises((AssertionError, RuntimeError)):
        laws_of_doubles(edits=(Edit(*FAULTS[fault]),))
