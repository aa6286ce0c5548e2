"""Gradients on float32 tensor cores on the CPU: every tile of the table, with every pipeline."""

from dataclasses import replace
from functools import partial

import hypothesis
import numpy as np
import pytest
from hypothesis import settings

import cuflash
from cuflash.device.attention_vjp_plans_pairs import PAIRS_SCORES
from cuflash.device.attention_vjp_plans_tf32 import (
    TF32_VJP,
    TF32_VJP_TILES,
    Tf32VjpTile,
    tf32_vjp_obstacle,
)
from cuflash.testing.gradients import GRADIENT_PROPERTIES
from cuflash.testing.problems import AttentionCase
from cuflash.testing.strategies import attention_problems, varlen_problems
from cuflash.testing.varlen_gradients import VARLEN_GRADIENT_PROPERTIES
from tests.devices import H200
from tests.host_cuda import builder
from tests.host_cuda.builder import Edit
from tests.host_cuda.pairs import A100_LIKE, TQ, Pairs, Sweeps
from tests.host_cuda.test_attention import ORDERS, on_host_cuda, use
from tests.host_cuda.test_attention_vjp import FAULTY_CASES, problem_of

pytestmark = pytest.mark.skipif(not builder.available(), reason="no C++ compiler")

LARGEST = np.finfo(np.float32).max
PAIRS = Pairs(np.dtype(np.float32), TF32_VJP, "backward_tf32")
gradients, operands, floats = PAIRS.gradients, PAIRS.operands, PAIRS.normal


@pytest.fixture
def executor(monkeypatch):
    return use(monkeypatch, limits=A100_LIKE)


@pytest.fixture
def take(monkeypatch):
    yield from PAIRS.taking(monkeypatch)


# ------------------------------------------------------------------------------------------- tiles


@pytest.mark.parametrize("score", PAIRS_SCORES)
@pytest.mark.parametrize("choice", TF32_VJP_TILES, ids=lambda x: x.tile.expression[9:])
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
    wanted = f"backward_tf32<cuflash::{score}<float>, {choice.tile.expression}"
    for deterministic in (False, True):
        executor.launched.clear()
        gradients(q, k, v, dout, given={"deterministic": deterministic}, **options)
        launched = [launch.kernel.expression for launch in executor.launched]
        assert sum(wanted in expression for expression in launched) == 1 + deterministic


def test_tiles_are_chosen_by_shape_and_shared_memory():
    """No row of the table is out of reach; other heads and small GPUs keep the plain kernels."""
    small = replace(A100_LIKE, shared_per_sm=164 << 10, shared_per_block=163 << 10)
    tiny = replace(small, shared_per_block=99 << 10)
    chosen = [
        TF32_VJP.table.tile_of(problem_of(*[(3, width)] * 3), limits)
        for width in (8, 64, 65, 128)
        for limits in (H200, small)
    ]
    assert set(chosen) == {choice.tile for choice in TF32_VJP_TILES}
    for limits, able in (
        (H200, True),
        (A100_LIKE, True),
        (replace(H200, compute_capability="86"), True),
        (replace(H200, compute_capability="75"), False),
        (tiny, False),
    ):
        for width in (128, 129):
            problem = problem_of(*[(3, width)] * 3, dtype=np.float32)
            can = tf32_vjp_obstacle(problem, limits) is None
            assert can == (able and width == 128)


@pytest.mark.parametrize(
    "wrong",
    [
        {"pairs": 1},
        {"pairs": 3},
        {"row_tiles": 0},
        {"row_tiles": 3},
        {"met": 24},
        {"met": 256},
        {"width": 96},
        {"width": 128, "pairs": 3},
        {"pairs": 8, "met": 16},
        {"blocks": 0},
    ],
    ids=str,
)
def test_tiles_that_no_kernel_has_are_refused(wrong):
    with pytest.raises(ValueError, match=r"must|cannot"):
        replace(Tf32VjpTile(4, 2, 32, 64, 1), **wrong)


# ------------------------------------------------------------------------------------------ sweeps


class TestSweeps(Sweeps):
    pairs = PAIRS


# ---------------------------------------------------------------------------------------- accuracy


@pytest.mark.parametrize("d", [64, 128])
def test_equal_terms(d, executor):
    """Terms that are all alike, added one by one, would err in one direction: like their number."""
    q, dout = np.full((4096, d), 0.1, np.float32), np.full((4096, 8), 1.1, np.float32)
    k, v = np.full((40, d), 0.1, np.float32), floats(0, 40, 8)
    grads = gradients(q, k, v, dout, given={"dlse": np.zeros(4096, np.float32)})
    error = np.abs(grads.dv.astype(np.float64) * 40 / (4096 * 1.1) - 1).max()
    assert error < 2e-6


@pytest.mark.parametrize("scale", [1e30, -1e30, 1e-30, 0.0, 1e4])
def test_scales_of_any_size(scale, executor):
    gradients(*(floats(seed, 4, 3) for seed in range(4)), scale=scale)


def test_an_infinite_lse_is_nan_in_its_row(executor):
    q, k, v, dout = (floats(seed, 5, 4) for seed in range(4))
    out, lse = cuflash.flash_attention(q, k, v, return_lse=True)
    lse[2] = np.inf
    grads = cuflash.flash_attention_vjp(dout, q, k, v, out, lse, method="mma")
    assert np.isnan(grads.dq[2]).all()
    assert np.isfinite(np.delete(grads.dq, 2, axis=0)).all()


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, LARGEST], ids=str)
def test_operands_without_parts(value, deterministic, executor):
    """Infinity, and what rounds to it, is no sum of two parts: who sees it has what is due."""
    q, k, v, dout = operands(40, 40)
    given = {"deterministic": deterministic, "dlse": np.zeros((2, TQ), np.float32)}
    q[..., 5] = np.sign(q[..., 5]) * np.float32(1e-30)
    k[0, 100, 5], dout = value, dout / 10  # sums of dq do not pass the range
    gradients(q, k, v, dout, given=given, causal=True)


def test_sums_of_many_rows(executor):
    """Those that lie among the results are added to, after non-finite values too."""
    q, k, v, dout = (x[:1] for x in operands(24, 24, tq=2200, tk=70))
    dout[0, 2100, 3] = np.inf
    grads = gradients(q, k, v, dout, causal=True)
    assert np.isfinite(grads.dv[0, :, :3]).all()


# -------------------------------------------------------------------------------------------- laws

PROBLEMS = attention_problems(
    dtypes=["float32"], borders=(16, 32, 64), max_tokens=70, max_features=70, max_batch_axes=2,
    max_products=60_000,
)  # fmt: skip
SEQUENCES = varlen_problems(
    dtypes=["float32"], borders=(16, 32), max_tokens=70, max_sequences=5, max_batch_axes=2,
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

KERNEL, PARTS, TILE = (
    f"attention/{name}" for name in ("backward_tf32.cu", "backward_tf32.cuh", "tf32_tile.cuh")
)
#: Of what is not the float64 kernel's too, whose faults are planted beside its tests.
FAULTS = {
    "no barrier before what is handed over": (
        KERNEL,
        "__syncthreads();  // what is handed over is there, and slopes have been added",
        "",
    ),
    "a tile read before it is there": (KERNEL, "wait_for_copies<0>();", ""),
    "delta left out": (KERNEL, "pair_of(pairs, i) -= below;", ";"),
    "non-finite values not cleared": (
        KERNEL,
        "keep_divisible<2 *",
        "if (false) keep_divisible<2 *",
    ),
    "slopes of pairs that are left out": (
        KERNEL,
        "shown ? pair(from, n) : kUnseen<float>;",
        "pair(from, n);",
    ),
    "keys without parts multiplied": (KERNEL, "keys_damaged = true;", ";"),
    "plain TF32": (TILE, "int part = 0; part < 3;", "int part = 2; part < 3;"),
    "another own key": (
        PARTS,
        "[2 * j + n / 2][n % 2 * 2 + e]",
        "[2 * j + n % 2][n / 2 * 2 + e]",
    ),
}
LAWS = ("matches_oracle", "unseen_nonfinite_never_leaks", "nonfinite_row_reaches_only_what_it_sees")
#: Those of the plain kernels, NaN in keys that no row sees, for masks hide them, and queries of
#: more tiles than are looked up at a time.
CASES = [
    replace(case, dtype="float32")
    for case in (
        *FAULTY_CASES,
        AttentionCase(tq=70, tk=80, d=40, dv=40, mask=(80,), unseen="nan"),
        AttentionCase(tq=200, tk=20, d=4, dv=4),
    )
]


def laws_of_floats(**options):
    """By both ways to dq; atomic additions have an order on the CPU."""
    for order, deterministic in (("forward", False), ("reverse", False), ("reverse", True)):
        run = on_host_cuda(cuflash.flash_attention_vjp, order=order, limits=A100_LIKE, **options)

        def call(*args, run=run, deterministic=deterministic, **given):
            return run(*args, **(given | {"method": "mma", "deterministic": deterministic}))

        for case in CASES:
            for law in LAWS:
                GRADIENT_PROPERTIES[law](call, case)


def test_nothing_planted():
    laws_of_floats()


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_found(fault):
    with pytest.raises((AssertionError, RuntimeError)):
        laws_of_floats(edits=(Edit(*FAULTS[fault]),))
