"""The kernels of attention's gradients on the CPU, by the public functions: every option."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
from cuflash.device.attention_vjp import compute
from cuflash.device.attention_vjp_plans import VJP_TILES, vjp_tile
from cuflash.problem import BFLOAT16, AttentionArrays, AttentionProblem
from cuflash.problem_vjp import AttentionGrads, AttentionResults, AttentionVjpProblem
from cuflash.testing.bounds import assert_gradients_close, expect_gradients
from cuflash.testing.gradient_cases import GRADIENT_CASES
from cuflash.testing.gradients import GRADIENT_PROPERTIES
from cuflash.testing.problems import AttentionCase
from cuflash.testing.strategies import attention_problems, varlen_problems
from cuflash.testing.varlen_gradients import VARLEN_GRADIENT_PROPERTIES
from tests.devices import H200, T4
from tests.host_cuda import builder
from tests.host_cuda.builder import Edit
from tests.host_cuda.engine import HostExecutor
from tests.host_cuda.test_attention import (
    lengths_that_nobody_checked,
    normal,
    on_host_cuda,
    sanitized,
    use,
)

pytestmark = pytest.mark.skipif(not builder.available(), reason="no C++ compiler")

#: Tiles of pairs end at multiples of these.
BORDERS = (16, 32, 64)
PROBLEMS = attention_problems(
    borders=BORDERS, max_tokens=70, max_features=40, max_batch_axes=2, max_products=60_000
)
SEQUENCES = varlen_problems(
    borders=BORDERS, max_tokens=70, max_sequences=5, max_batch_axes=2, max_products=400
)
ORDERS = st.sampled_from(builder.HostKernel.ORDERS)


@pytest.mark.parametrize("law", GRADIENT_PROPERTIES)
def test_property(law):
    @settings(max_examples=max(1, settings().max_examples // 2))
    @given(case=PROBLEMS, order=ORDERS)
    def holds(case, order):
        GRADIENT_PROPERTIES[law](on_host_cuda(cuflash.flash_attention_vjp, order=order), case)

    holds()


@pytest.mark.parametrize("law", VARLEN_GRADIENT_PROPERTIES)
def test_sequences_end_to_end(law):
    @settings(max_examples=max(1, settings().max_examples // 2))
    @given(case=SEQUENCES, order=ORDERS)
    def holds(case, order):
        call = on_host_cuda(cuflash.flash_attention_varlen_vjp, order=order)
        VARLEN_GRADIENT_PROPERTIES[law](call, case)

    holds()


#: Of too many blocks to run one after the other.
OTHER_CASES = {"case_27"}


@pytest.mark.parametrize("name", sorted(set(GRADIENT_CASES) - OTHER_CASES))
def test_case(name, monkeypatch):
    use(monkeypatch)
    GRADIENT_CASES[name](cuflash)


def gradients(q, k, v, *, dout=None, given=None, **options):
    """Run forward and backward, and compare with the oracle; returns the gradients."""
    out, lse = cuflash.flash_attention(q, k, v, return_lse=True, **options)
    rng = np.random.default_rng(9)
    if dout is None:
        dout = rng.normal(size=out.shape).astype(out.dtype)
    dlse = rng.normal(size=lse.shape).astype(lse.dtype)
    call = {"dlse": dlse, **(given or {})}
    grads = cuflash.flash_attention_vjp(dout, q, k, v, out, lse, **call, **options)
    assert_gradients_close(grads, expect_gradients(dout, q, k, v, dlse=dlse, **options))
    return grads


# ------------------------------------------------------------------------------------------- tiles

#: One problem for each tile.
SHAPES = {
    "32": (70, 90, 32, 31),
    "64": (70, 90, 64, 40),
    "chunks of features, more of v": (70, 90, 65, 131),
}


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_tile(shape, dtype):
    tq, tk, d, dv = SHAPES[shape]
    case = AttentionCase(
        q_batch=(2,), tq=tq, tk=tk, d=d, dv=dv, dtype=dtype, causal=True, unseen="nan"
    )
    for law in ("matches_oracle", "unseen_nonfinite_never_leaks"):
        GRADIENT_PROPERTIES[law](on_host_cuda(cuflash.flash_attention_vjp), case)


def test_every_tile_is_taken():
    """The shapes above leave no row of the table untried."""
    taken = set()
    for tq, tk, d, dv in SHAPES.values():
        for dtype in (np.float32, np.float64):
            taken.add(vjp_tile(problem_of((tq, d), (tk, d), (tk, dv), dtype), H200))
    assert taken == {choice.tile for choice in VJP_TILES}


def problem_of(q, k, v, dtype=np.float32, **options):
    operands = [np.broadcast_to(np.zeros((), dtype), shape) for shape in (q, k, v)]
    return AttentionProblem.of(AttentionArrays(*operands), **options)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_small_shared_memory_takes_a_small_tile(dtype, monkeypatch):
    executor = use(monkeypatch, limits=T4)
    q, k, v = (normal(seed, 70, 64, dtype=dtype) for seed in range(3))
    gradients(q, k, v, causal=True)
    backward = [launch for launch in executor.launched if "backward" in launch.kernel.source]
    assert len(backward) == 3
    assert all(launch.shared_bytes <= T4.shared_per_block - 4096 for launch in backward)


# ----------------------------------------------------------------------------------------- batches


def launched(executor):
    """Return the names of the kernels that ran after the forward."""
    names = [launch.kernel.expression.split("<")[0][9:] for launch in executor.launched]
    return names[names.index("row_deltas") :]


def test_one_launch_for_keys_and_values_that_broadcast_alike(monkeypatch):
    executor = use(monkeypatch)
    q, k, v = normal(0, 2, 3, 9, 8), normal(1, 2, 1, 11, 8), normal(2, 2, 1, 11, 8)
    gradients(q, k, v)
    assert launched(executor) == ["row_deltas", "backward_keys", "backward_queries"]
    executor.launched.clear()
    gradients(q, k, normal(3, 2, 3, 11, 8), bias=normal(4, 11), sinks=normal(5, 3))
    assert launched(executor) == [
        "row_deltas",
        "backward_keys",
        "backward_keys",
        "backward_queries",
        "backward_bias",
        "sink_gradients",
    ]


@pytest.mark.parametrize("bias", [(2, 3, 70, 40), (3, 1, 40), (2, 1, 70, 1), (1, 1), (40,), ()])
def test_bias_of_every_shape(bias, monkeypatch):
    use(monkeypatch)
    q, k, v = normal(0, 2, 3, 70, 8), normal(1, 2, 1, 40, 8), normal(2, 2, 3, 40, 8)
    dbias = gradients(q, k, v, bias=normal(3, *bias), softcap=2.0, causal=True).dbias
    assert dbias.shape == bias


def test_more_batch_axes_than_a_block_has_room_for(monkeypatch):
    """Of a gradient that is summed along all but one of them, launches add to what is there."""
    executor = use(monkeypatch)
    q = normal(0, *(2, 3) * 5, 2, 4)[::-1, :, :1, :, :1, :, :1, :, :1, :2]
    k, v = normal(1, 3, 1, 1, 1, 1, 1, 1, 1, 3, 4), normal(2, *(1, 3, 1, 1) * 2, 1, 2, 3, 4)
    q = q[..., :1, :1, :, :]
    gradients(q, k, v, mask=np.random.default_rng(3).random((1, 2, 3)) < 0.7)
    summed = normal(0, *(2,) * 10, 1, 2)[::-1, :, ::-1, :, ::-1, :, ::-1, :, ::-1]
    few = summed[..., :1, :, :1, :, :1, :, :]
    executor.launched.clear()
    gradients(summed, normal(1, 3, 2), normal(2, 3, 2))
    assert launched(executor).count("backward_keys") > 1
    gradients(few, few, normal(3, 1, 2))


def low_logits(dtype):
    """Every logit is near -17000, and that of key 0 outweighs the others."""
    q, k = np.ones((1, 128)), np.full((64, 128), -1600.0)
    k[0] = -1536
    return (*(x.astype(dtype) for x in (q, k)), normal(2, 64, 128, dtype=dtype)), {}


FORWARD_CASES = {
    "09: no keys": ((normal(0, 2, 4, 8), normal(1, 2, 0, 8), normal(2, 2, 0, 8)), {}),
    "13: float16": low_logits(np.float16),
    "13: bfloat16": low_logits(BFLOAT16),
    "13: float32": low_logits(np.float32),
    "ALiBi, the last query alone": (
        (normal(0, 2, 4, 1, 16), normal(1, 2, 4, 33, 16), normal(2, 2, 4, 33, 16)),
        {"alibi_slopes": np.float32([1 / 2, 1 / 4, 1 / 8, 1 / 16]), "causal": True},
    ),
}


@pytest.mark.parametrize("where", ["kernels", "NumPy"])
@pytest.mark.parametrize("name", FORWARD_CASES)
def test_what_broke_forwards_elsewhere(name, where, monkeypatch):
    """Cases that speak of the forward alone, in gradients."""
    operands, options = FORWARD_CASES[name]
    if where == "kernels":
        use(monkeypatch)
    out, lse = cuflash.flash_attention(*operands, return_lse=True, **options)
    dout = normal(3, *out.shape).astype(out.dtype)
    grads = cuflash.flash_attention_vjp(dout, *operands, out, lse, **options)
    assert_gradients_close(grads, expect_gradients(dout, *operands, **options))


def test_a_row_of_weights_that_are_all_zero_has_gradient_zero(monkeypatch):
    """Keys under a bias of -inf are seen; dout of the row is not, NaN as it may be."""
    use(monkeypatch)
    q, k, v = (normal(seed, 3, 4) for seed in range(3))
    bias, dout = np.zeros((3, 3), np.float32), normal(3, 3, 4)
    bias[1], dout[1] = -np.inf, np.nan
    out, lse = cuflash.flash_attention(q, k, v, bias=bias, return_lse=True)
    grads = cuflash.flash_attention_vjp(dout, q, k, v, out, lse, bias=bias)
    assert_gradients_close(grads, expect_gradients(dout, q, k, v, bias=bias))
    assert not grads.dq[1].any()


def test_16_bits_do_not_round_what_launches_add(monkeypatch):
    """dv of as many equal terms as bfloat16 cannot count, 256 in each launch."""
    use(monkeypatch)
    q = np.zeros((280, *(2,) * 8, 1, 1), BFLOAT16)[:, ::-1, :, ::-1, :, ::-1, :, ::-1]
    k, v = np.zeros((1, 1), BFLOAT16), np.ones((1, 1), BFLOAT16)
    out, lse = np.ones_like(q), np.zeros(q.shape[:-1], np.float32)
    asked = AttentionGrads(None, None, np.empty_like(v))
    for method in ("auto", "mma"):
        asked.dv[...] = 0
        cuflash.flash_attention_vjp(
            np.ones_like(out), q, k, v, out, lse, grads=asked, method=method
        )
        assert float(asked.dv[0, 0]) == 280 * 256


def test_launches_add_to_every_gradient(monkeypatch):
    executor = use(monkeypatch)
    q = normal(0, *(2,) * 10, 1, 2)[::-1, :, ::-1, :, ::-1, :, ::-1, :, ::-1]
    gradients(q, normal(1, 3, 2), normal(2, 3, 2), bias=normal(3, 1, 3), sinks=normal(4))
    for kernel in ("backward_keys", "backward_bias", "sink_gradients"):
        assert launched(executor).count(kernel) > 1


def test_a_grid_larger_than_the_device_allows(monkeypatch):
    executor = use(monkeypatch, limits=replace(H200, blocks=5))
    gradients(normal(0, 4, 3, 2, 8), normal(1, 3, 7, 8), normal(2, 4, 1, 7, 8))
    assert all(launch.grid <= 5 for launch in executor.launched)
    assert launched(executor).count("backward_queries") == 4


@pytest.mark.parametrize("shape", [(0, 3, 4, 4), (3, 0, 4, 4), (0, 0, 1, 1), (3, 5, 4, 0)])
def test_empty_arrays(shape, monkeypatch):
    use(monkeypatch)
    tq, tk, d, dv = shape
    q, k, v = normal(0, 2, tq, d), normal(1, 1, tk, d), normal(2, tk, dv)
    for bias in ((1, 1), (1, tk), (tq, 1), (2, tq, tk)):
        gradients(q, k, v, bias=normal(3, *bias), sinks=normal(4))
    grads = gradients(normal(0, 0, 3, 4), normal(1, 1, 2, 4), normal(2, 2, 4), sinks=normal(3, 1))
    assert not any(np.any(x) for x in (grads.dk, grads.dv, grads.dsinks))


# ------------------------------------------------------------------------------ memory, and values


def test_workspace_of_the_caller(monkeypatch):
    executor = use(monkeypatch)
    q, k, v = normal(0, 2, 5, 8), normal(1, 2, 30, 8), normal(2, 2, 30, 8)
    need = cuflash.workspace_size(q, k, v, backward=True)
    assert 2 * 5 * 4 <= need <= 2 * 5 * 4 + 16
    around = np.full(need + 40, 77, np.uint8)
    monkeypatch.setattr(executor, "allocate", None)
    for start in range(16, 24):
        gradients(q, k, v, given={"workspace": around[start : start + need]})
        assert (around[:start] == 77).all()
        assert (around[start + need :] == 77).all()
        around[...] = 77


def test_bytes_grow_with_the_tokens():
    needs = [
        cuflash.workspace_size(*[np.broadcast_to(np.float32(0), (2, t, 64))] * 3, backward=True)
        for t in (1024, 65536)
    ]
    assert needs[1] <= 64 * needs[0]


@pytest.mark.parametrize("excess", [2, 2**62])
def test_lengths_that_nobody_checked_are_clamped(excess, monkeypatch):
    """Values on a device are not read by the host: the kernels keep them within the arrays."""
    executor = use(monkeypatch)
    wild, tame = lengths_that_nobody_checked(excess)
    q, k, v = (normal(seed, 10, tokens, 8)[:-1] for seed, tokens in enumerate((4, 9, 9)))
    out, lse = cuflash.flash_attention(q, k, v, return_lse=True, **tame)
    grads = AttentionGrads(*(np.full_like(x, np.nan) for x in (q, k, v)))
    forward = AttentionProblem.of(AttentionArrays(q, k, v, **tame))
    results = AttentionResults(out, out, lse)
    arrays = AttentionArrays(q, k, v, **wild)
    problem = AttentionVjpProblem.of(forward, arrays, results, grads)
    assert compute(problem, arrays, results, grads, None, executor)
    assert_gradients_close(grads, expect_gradients(out, q, k, v, **tame))


@pytest.mark.parametrize("name", ["q", "dout", "lse", "dk"])
def test_elements_at_odd_addresses_are_left_to_the_caller(name):
    x = {n: normal(0, 5, 8) for n in ("q", "k", "v", "dout", "out", "dq", "dk", "dv")}
    x["lse"] = normal(1, 5)
    memory = np.zeros(x[name].nbytes + 2, np.uint8)
    x[name] = memory[2:].view(np.float32).reshape(x[name].shape)
    arrays = AttentionArrays(x["q"], x["k"], x["v"])
    results = AttentionResults(x["dout"], x["out"], x["lse"])
    grads = AttentionGrads(x["dq"], x["dk"], x["dv"])
    problem = AttentionVjpProblem.of(AttentionProblem.of(arrays), arrays, results, grads)
    executor = HostExecutor()
    assert not compute(problem, arrays, results, grads, None, executor)
    assert not executor.launched


def test_a_sink_alone_takes_all_of_dlse(monkeypatch):
    """A row that sees no key has an out of 0: dout is nothing to it, whatever it holds."""
    use(monkeypatch)
    q, k, v = normal(0, 5, 8), normal(1, 3, 8), normal(2, 3, 8)
    dout = np.full((5, 8), np.nan, np.float32)
    dout[2:] = normal(3, 3, 8)
    grads = gradients(q, k, v, dout=dout, causal=True, sinks=np.float32(0.5))
    assert np.isfinite(grads.dsinks)
    assert not grads.dq[:2].any()


@pytest.mark.parametrize("scale", [1e30, -1e30, 1e-30, 0.0])
def test_scales_of_any_size(scale, monkeypatch):
    use(monkeypatch)
    gradients(normal(0, 4, 3), normal(1, 4, 3), normal(2, 4, 3), scale=scale)


def test_an_infinite_lse_is_nan_in_its_row(monkeypatch):
    use(monkeypatch)
    q, k, v, dout = (normal(seed, 5, 4) for seed in range(4))
    out, lse = cuflash.flash_attention(q, k, v, return_lse=True)
    lse[2] = np.inf
    grads = cuflash.flash_attention_vjp(dout, q, k, v, out, lse)
    assert np.isnan(grads.dq[2]).all()
    assert np.isfinite(np.delete(grads.dq, 2, axis=0)).all()


def test_dsinks_of_rows_past_their_length(monkeypatch):
    """Whatever out, lse and their cotangents hold there."""
    use(monkeypatch)
    q, k, v, dout = (normal(seed, 2, 6, 4) for seed in range(4))
    options = {"query_lengths": np.array([4, 6]), "sinks": np.zeros(2, np.float32)}
    out, lse = cuflash.flash_attention(q, k, v, return_lse=True, **options)
    clean = cuflash.flash_attention_vjp(dout, q, k, v, out, lse, **options)
    for x in (q, dout, out, lse[..., None]):
        x[0, 4:] = np.nan
    grads = cuflash.flash_attention_vjp(dout, q, k, v, out, lse, **options)
    for x, y in zip(grads, clean, strict=True):
        np.testing.assert_array_equal(x, y)


# ----------------------------------------------------------------------------------- planted faults

PAIRS, SIMT, ROWS = (f"attention/backward{name}" for name in (".cuh", "_simt.cu", "_rows.cu"))
SCORE = "lib/score.cuh"
FAULTS = {
    "no barrier before tiles are loaded": Edit(
        PAIRS, "__syncthreads();  // everyone is done with the tiles before these", ""
    ),
    "delta left out": Edit(PAIRS, "flow - state.delta", "flow"),
    "slope of the softcap left out": Edit(
        PAIRS, "slope = multiply_add(slope, x.slope, A(0));", ";"
    ),
    "rows without keys not told from others": Edit(
        PAIRS, "if (x.lse != -infinity<A>()) {", "if (true) {"
    ),
    "unseen pairs have weight": Edit(PAIRS, "? weight : kUnseen<A>", "? weight : weight"),
    "mask not asked": Edit(PAIRS, "seen = block.score.sees(", "block.score.sees("),
    "last row that sees a key left out": Edit(SCORE, "end - 1 + left", "end - 2 + left"),
    "first row that sees a key left out": Edit(
        SCORE, "begin - right - shift, 0LL", "begin - right - shift + 1, 0LL"
    ),
    "no second turn for non-finite values": Edit(
        SIMT, "if (!all_finite(dk) || !all_finite(dv)) block.redo = 1;", ""
    ),
    "unseen values multiplied in the second turn": Edit(
        "lib/tile.cuh", "if (!kSeenOnly || !is_unseen(left[i].element[e]))", ""
    ),
    "one entry of a sum left out": Edit(
        SIMT,
        "for (int64 entry = 0; entry < p.summed; ++entry) {\n            block.enter(p, entry);\n"
        "            const EntryBounds",
        "for (int64 entry = p.summed > 1; entry < p.summed; ++entry) {\n"
        "            block.enter(p, entry);\n            const EntryBounds",
    ),
    "scale left out": Edit(SIMT, "p.features, dq, block.score.scale", "p.features, dq, A(1)"),
    "rows of dbias not summed": Edit(PAIRS, "sums[threadIdx.x] = sum;", ""),
    "dlse left out": Edit(ROWS, "sum -= dlse.at(row);", ";"),
    "sign of dsinks": Edit(ROWS, "sum -= exponential", "sum += exponential"),
}
LAWS = (
    "matches_oracle",
    "unseen_nonfinite_never_leaks",
    "nonfinite_row_reaches_only_what_it_sees",
)
_COMMON = AttentionCase(
    q_batch=(2, 3), k_batch=(2, 1), v_batch=(2, 1), tq=70, tk=80, d=40, dv=40, seed=1
)
#: Rows without keys first, a diagonal with NaN beyond it; a band from one tile into the next; rows
#: whose scores are all -inf; every option.
FAULTY_CASES = (
    replace(_COMMON, tq=90, causal=True, unseen="nan"),
    replace(_COMMON, tq=80, window=(1, 1), unseen="nan"),
    replace(_COMMON, tk=2, bias=(70, 2), bias_minus_inf=True),
    replace(_COMMON, softcap=1.0, mask=(70, 80), bias=(1, 80), sinks=(3,), query_lengths=(1, 3)),
)


def three_laws(**options):
    for order in builder.HostKernel.ORDERS:
        call = on_host_cuda(cuflash.flash_attention_vjp, order=order, **options)
        for case in FAULTY_CASES:
            for law in LAWS:
                GRADIENT_PROPERTIES[law](call, case)


def test_nothing_planted():
    three_laws()


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_found(fault):
    with pytest.raises((AssertionError, RuntimeError)):
        three_laws(edits=(FAULTS[fault],))


def test_no_access_out_of_bounds():
    run = sanitized("gradients")
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize(
    "fault",
    [
        Edit(SIMT, "if (column >= columns) continue;", ""),
        Edit(PAIRS, "if (block.score.is_used(row)) {", "if (row < 70) {"),
    ],
    ids=["columns past the end written", "rows past the end read"],
)
def test_an_access_out_of_bounds_is_found(fault):
    run = sanitized("gradients", *fault)
    assert run.returncode != 0
    assert "AddressSanitizer: heap-buffer-overflow" in run.stderr
