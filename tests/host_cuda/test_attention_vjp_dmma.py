"""Gradients on float64 tensor cores on the CPU: every tile of the table, with every pipeline."""

from dataclasses import replace
from functools import partial

import hypothesis
import numpy as np
import pytest
from hypothesis import settings

import cuflash
from cuflash.device.attention_vjp_plans_dmma import (
    DMMA_VJP,
    DMMA_VJP_TILES,
    DmmaVjpTile,
    dmma_vjp_obstacle,
)
from cuflash.device.attention_vjp_plans_pairs import PAIRS_SCORES
from cuflash.testing.gradients import GRADIENT_PROPERTIES
from cuflash.testing.problems import AttentionCase
from cuflash.testing.strategies import attention_problems, varlen_problems
from cuflash.testing.varlen_gradients import VARLEN_GRADIENT_PROPERTIES
from tests.devices import H200
from tests.host_cuda import builder
from tests.host_cuda.builder import Edit
from tests.host_cuda.pairs import A100_LIKE, Pairs, Sweeps
from tests.host_cuda.test_attention import ORDERS, on_host_cuda, use
from tests.host_cuda.test_attention_vjp import FAULTY_CASES, problem_of

pytestmark = pytest.mark.skipif(not builder.available(), reason="no C++ compiler")

PAIRS = Pairs(np.dtype(np.float64), DMMA_VJP, "backward_dmma")
gradients, operands, doubles = PAIRS.gradients, PAIRS.operands, PAIRS.normal


@pytest.fixture
def executor(monkeypatch):
    return use(monkeypatch, limits=A100_LIKE)


@pytest.fixture
def take(monkeypatch):
    yield from PAIRS.taking(monkeypatch)


# ------------------------------------------------------------------------------------------- tiles


@pytest.mark.parametrize("score", PAIRS_SCORES)
@pytest.mark.parametrize("choice", DMMA_VJP_TILES, ids=lambda x: x.tile.expression[9:])
def test_tile(choice, score, executor, take):
    """With columns to fill up, rows that differ in what they see, and NaN where no row looks."""
    take(choice)
    # Rows that are copied by words, and by elements.
    fewer = {"RangedScore": 2, "FullScore": 3}[score]
    q, k, v, dout = operands(choice.features - fewer, choice.features)
    options = PAIRS.options(score)
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


class TestSweeps(Sweeps):
    pairs = PAIRS


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
