"""The attention kernels on the CPU, by the public functions: every option, in small problems."""

import os
import subprocess
import sys
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import cuflash
from cuflash import engine
from cuflash.device.attention import compute
from cuflash.device.attention_plans import SIMT_TILES, plan_attention
from cuflash.device.parameters import (
    ATTENTION_PARAMETERS,
    COMBINE_EVEN,
    COMBINE_LISTED,
    COMBINE_VJP,
    VJP_PARAMETERS,
    BatchPlan,
)
from cuflash.problem import ArraySpec, AttentionArrays, AttentionProblem
from cuflash.testing.bounds import assert_attention_close, expect_attention
from cuflash.testing.cases import ALL_CASES
from cuflash.testing.problems import AttentionCase
from cuflash.testing.properties import ATTENTION_PROPERTIES, split_of_keys
from cuflash.testing.strategies import attention_problems
from tests.devices import H200, T4
from tests.host_cuda import builder
from tests.host_cuda.attention_engine import HostCudaAttention, check_bounds
from tests.host_cuda.builder import Edit
from tests.host_cuda.engine import HostExecutor

pytestmark = pytest.mark.skipif(not builder.available(), reason="no C++ compiler")

#: Too little shared memory for two blocks that hold 100 features of their queries.
LITTLE_SHARED = replace(H200, shared_per_sm=200_000, shared_per_block=99_000)

#: Small tiles of scores end at multiples of these, in queries or keys.
BORDERS = (16, 32)
PROBLEMS = attention_problems(
    borders=BORDERS, max_tokens=40, max_features=40, max_batch_axes=2, max_products=60_000
)
ORDERS = st.sampled_from(builder.HostKernel.ORDERS)
#: By the kernel without tensor cores, whatever the shape.
plain = partial(cuflash.flash_attention, method="simt")
MASK_OVER_A_PARTIAL_TILE = AttentionCase(tq=3, tk=70, mask=(3, 70))


def use(patch, **options):
    """Let the public functions run the device engine on the CPU."""
    emulated = HostCudaAttention(**options)
    patch.setattr(engine, "load", lambda name: emulated)
    return emulated.executor


def on_host_cuda(function, **options):
    def call(*args, **kwargs):
        with pytest.MonkeyPatch.context() as patch:
            use(patch, **options)
            return function(*args, **kwargs)

    return call


def equal_terms(tq, tk, d, dtype):
    """Return q, k and v of two entries: all weights are 1, or all but one are equal and below."""
    q, k = np.full((2, tq, d), 0.1, dtype), np.full((2, tk, d), 0.1, dtype)
    k[1, 0] *= 3
    return q, k, np.full((2, tk, 1), 1.1, dtype)


def normal(seed, *shape, dtype=np.float32):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("weightless", [slice(64, None), slice(None)])
def test_nonfinite_values_of_a_share_without_weight(weightless, value):
    """A bias of -inf gives weight 0, and 0 times NaN is NaN, wherever the keys are cut."""
    q, k, v = normal(0, 5, 16), normal(1, 128, 16), normal(2, 128, 4)
    v[100, 1] = value
    bias = np.zeros(128, np.float32)
    bias[weightless] = -np.inf
    out, lse = on_host_cuda(cuflash.flash_attention)(
        q, k, v, bias=bias, num_splits=2, return_lse=True
    )
    expected, expected_lse = cuflash.flash_attention(q, k, v, bias=bias, return_lse=True)
    assert np.isnan(out[:, 1]).all()
    np.testing.assert_allclose(out, expected, 1e-5, 1e-6)
    np.testing.assert_allclose(lse, expected_lse, 1e-5)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("tq", "d"), [(4, 64), (40, 128)])
def test_equal_weights_of_many_keys(tq, d, dtype):
    """Terms that are all alike, added one by one, would err in one direction: like their number."""
    q, k = np.ones((tq, d), dtype), np.ones((4096, d), dtype)
    v = np.full((4096, d), 1.1, dtype)
    out, lse = on_host_cuda(plain)(q, k, v, num_splits=1, return_lse=True)
    assert_attention_close(out, lse, expect_attention(q, k, v))
    assert np.abs(out / v[0] - 1).max() < 2e-6 * np.finfo(dtype).eps / np.finfo(np.float32).eps


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("tq", [1, 17])
def test_equal_weights_of_more_keys_than_sums_of_tiles_can_add(tq, dtype):
    """In one share: without sums of groups of tiles, out and lse err by several times the bound."""
    q, k, v = equal_terms(tq, 2**16, 1, dtype)
    call = on_host_cuda(cuflash.flash_attention)
    out, lse = call(q, k, v, method="simt", num_splits=1, return_lse=True)
    assert_attention_close(out, lse, expect_attention(q, k, v))


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize(("rise", "value"), [(0, np.nan), (1, np.inf), (-1, -np.inf)])
def test_groups_of_tiles(rise, value, dtype):
    """Maxima that rise and fall by group; values that few rows see; rows without keys."""
    tk = 36_000
    q, k, v = normal(0, 5, 2, dtype=dtype), normal(1, tk, 2, dtype=dtype), normal(2, tk, 3)
    v = v.astype(dtype)
    v[20_000, 1] = value
    bias = np.linspace(0, 300 * rise, tk)
    offset = np.array([-6, 19_998, 19_999, 35_996])[:, None]  # an entry each
    options = {"bias": bias, "causal": True, "query_offset": offset[:, 0]}
    q, k, v = (np.broadcast_to(x, (4, *x.shape)) for x in (q, k, v))
    out, lse = on_host_cuda(cuflash.flash_attention)(
        q, k, v, **options, method="simt", num_splits=1, return_lse=True
    )
    assert_attention_close(out, lse, expect_attention(q, k, v, **options))


@pytest.mark.parametrize("law", ATTENTION_PROPERTIES)
def test_property(law):
    @settings(max_examples=max(1, settings().max_examples // 2))
    @given(case=PROBLEMS, splits=st.sampled_from((None, None, 2)), order=ORDERS)
    @example(case=MASK_OVER_A_PARTIAL_TILE, splits=None, order="forward")
    def holds(case, splits, order):
        call = partial(plain, num_splits=splits)
        ATTENTION_PROPERTIES[law](on_host_cuda(call, order=order), case)

    holds()


@settings(max_examples=max(1, settings().max_examples // 5))
@given(case=PROBLEMS)
def test_parts_merge_to_the_whole(case):
    merge = on_host_cuda(cuflash.merge_attention)
    split_of_keys(on_host_cuda(plain), case, merge=merge)


#: Of softmax alone; of too many blocks to run one after the other.
OTHER_CASES = {"case_02", "case_03", "case_27"}


@pytest.mark.parametrize("name", sorted(set(ALL_CASES) - OTHER_CASES))
def test_case(name, monkeypatch):
    use(monkeypatch)
    ALL_CASES[name](cuflash)


# ------------------------------------------------------------------------------------------- tiles

#: One problem for each tile.
SHAPES = {
    "decode": (3, 70, 20, 20),
    "decode, chunks of features": (3, 40, 70, 9),
    "decode, two blocks of values": (2, 40, 8, 140),
    "32": (70, 40, 32, 31),
    "64": (40, 70, 33, 64),
    "chunks of features, two blocks of values": (30, 70, 130, 131),
}


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_tile(shape, dtype, monkeypatch):
    use(monkeypatch)
    tq, tk, d, dv = SHAPES[shape]
    case = AttentionCase(
        q_batch=(2,), tq=tq, tk=tk, d=d, dv=dv, dtype=dtype, causal=True, unseen="nan"
    )
    inputs = case.build()
    out, lse = plain(*inputs[:3], **inputs.options, return_lse=True)
    assert_attention_close(out, lse, case)


def test_every_tile_is_taken():
    """The shapes above leave no row of the table untried."""
    taken = {
        plan_of(*shape, dtype=dtype, method="simt").tile
        for shape in SHAPES.values()
        for dtype in (np.float32, np.float64)
    }
    assert taken == {choice.tile for choice in SIMT_TILES}


@pytest.mark.parametrize("stay", [True, False])
def test_features_past_what_a_block_holds(stay, monkeypatch):
    limits = H200 if stay else LITTLE_SHARED
    executor = use(monkeypatch, limits=limits)
    q, k, v = normal(0, 20, 100), normal(1, 70, 100), normal(2, 70, 16)
    out, lse = plain(q, k, v, causal=True, return_lse=True)
    assert_attention_close(out, lse, expect_attention(q, k, v, causal=True))
    held = executor.launched[0].shared_bytes
    assert (held > 100_000) == stay


def test_queries_held_and_read_again_give_the_same_bits(monkeypatch):
    q, k, v = normal(0, 20, 100), normal(1, 70, 100), normal(2, 70, 16)
    results = []
    for limits in (H200, LITTLE_SHARED):
        use(monkeypatch, limits=limits)
        results.append(plain(q, k, v))
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_small_shared_memory_takes_a_small_tile(dtype, monkeypatch):
    executor = use(monkeypatch, limits=T4)
    q, k, v = (normal(seed, 40, 64, dtype=dtype) for seed in range(3))
    out, lse = cuflash.flash_attention(q, k, v, return_lse=True)
    assert_attention_close(out, lse, expect_attention(q, k, v))
    assert executor.launched[0].shared_bytes <= T4.shared_per_block - 1024


# ---------------------------------------------------------------------------------- shares, merges


def plan_of(tq, tk, d, dv, *, dtype=np.float32, batch=(), limits=H200, **options):
    spec = [
        np.broadcast_to(np.zeros((), dtype), (*batch, *s)) for s in ((tq, d), (tk, d), (tk, dv))
    ]
    problem = AttentionProblem.of(AttentionArrays(*spec), **options)
    out = ArraySpec.of(np.broadcast_to(np.zeros((), dtype), problem.out_shape))
    return plan_attention(problem, out, None, limits)


def test_sums_of_float16_are_kept_in_float32():
    """Over several tiles of keys: lse would have errors of 2^-11 else."""
    q, k, v = (normal(i, t, 40, dtype=np.float16) for i, t in enumerate((20, 300, 300)))
    out, lse = on_host_cuda(plain)(q, k, v, return_lse=True)
    assert_attention_close(out, lse, expect_attention(q, k, v))


def test_few_queries_split_long_keys():
    assert plan_of(1, 65536, 64, 64).splits == 256
    assert plan_of(1, 65536, 64, 64, batch=(32,)).splits == 8
    assert plan_of(1, 300, 64, 64).splits == 1
    assert plan_of(4096, 4096, 64, 64, batch=(32,)).splits == 1
    assert plan_of(1, 300, 64, 64, num_splits=3).splits == 3
    assert plan_of(1, 300, 64, 64, num_splits=300).splits == 5, "no share is without a tile"


@pytest.mark.parametrize("odd", ["address", "stride"])
@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
def test_elements_at_odd_addresses_are_left_to_the_caller(name, odd):
    whole = {n: normal(0, 3, t, 8) for n, t in (("q", 5), ("k", 9), ("v", 9), ("out", 5))}
    x = whole[name]
    memory = np.zeros(2 * x.nbytes, np.uint8)
    if odd == "address":
        whole[name] = memory[2 : 2 + x.nbytes].view(np.float32).reshape(x.shape)
    else:
        whole[name] = np.ndarray(x.shape, np.float32, memory, strides=(x[0].nbytes + 2, 32, 4))
    arrays, out = AttentionArrays(whole["q"], whole["k"], whole["v"]), whole["out"]
    executor = HostExecutor()
    problem = AttentionProblem.of(arrays)
    assert not compute(problem, arrays, out, None, None, executor)
    assert not executor.launched
    aligned = AttentionArrays(*[np.require(a, requirements="A") for a in arrays[:3]])
    problem = AttentionProblem.of(aligned)
    assert compute(problem, aligned, np.zeros(out.shape, out.dtype), None, None, executor)


@pytest.mark.parametrize("splits", [1, 2, 5, 40])
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_shares_of_the_keys(splits, dtype, monkeypatch):
    executor = use(monkeypatch)
    q, k, v = (normal(seed, 2, 3, t, 8, dtype=dtype) for seed, t in enumerate((5, 300, 300)))
    options = {"causal": True, "sinks": normal(3, 3), "key_lengths": np.array([[10], [300]])}
    out, lse = cuflash.flash_attention(q, k, v, **options, return_lse=True, num_splits=splits)
    assert_attention_close(out, lse, expect_attention(q, k, v, **options))
    assert len(executor.launched) == (1 if splits == 1 else 2)


def test_workspace_of_the_caller(monkeypatch):
    executor = use(monkeypatch)
    q, k, v = normal(0, 2, 1, 8), normal(1, 2, 300, 8), normal(2, 2, 300, 8)
    need = cuflash.workspace_size(q, k, v, num_splits=3)
    assert 3 * 2 * 9 * 4 <= need <= 3 * 2 * 9 * 4 + 16
    around = np.full(need + 40, 77, np.uint8)
    for start in range(16, 24):
        monkeypatch.setattr(executor, "allocate", None)
        workspace = around[start : start + need]
        out = cuflash.flash_attention(q, k, v, num_splits=3, workspace=workspace)
        np.testing.assert_allclose(out, cuflash.reference.attention(q, k, v)[0], rtol=1e-5)
        assert (around[:start] == 77).all()
        assert (around[start + need :] == 77).all()
        around[...] = 77


@pytest.mark.parametrize("count", [1, 2, 8, 9, 20])
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_many_parts(count, dtype, monkeypatch):
    use(monkeypatch)
    q, k, v = normal(0, 3, 5, 8), normal(1, 3, 5 * count, 8), normal(2, 3, 5 * count, 40)
    q, k, v = (x.astype(dtype) for x in (q, k, v))
    parts = [
        cuflash.flash_attention(
            q, k[:, i : i + 5], v[:, i : i + 5], return_lse=True, query_offset=-i, causal=True
        )
        for i in range(0, 5 * count, 5)
    ]
    out, lse = (np.full_like(x, np.nan) for x in parts[0])
    engine.load("device").merge_attention(parts, out, lse)
    expected = expect_attention(q, k, v, causal=True, query_offset=0)
    rounding = {np.float64: 1e-14, np.float32: 2e-6, np.float16: 4e-3}[dtype]
    np.testing.assert_allclose(out, expected.out.value, rtol=0, atol=rounding)
    np.testing.assert_allclose(lse, expected.lse.value, rtol=rounding, atol=rounding)


def test_a_result_may_be_one_of_the_parts(monkeypatch):
    use(monkeypatch)
    a, b = ((normal(seed, 4, 40), normal(seed + 2, 4)) for seed in range(2))
    out, lse = cuflash.merge_attention(*a, *b)
    engine.load("device").merge_attention([a, b], *a)
    np.testing.assert_array_equal(a[0], out)
    np.testing.assert_array_equal(a[1], lse)


# ---------------------------------------------------------------------------------- batches, grids


def test_more_batch_axes_than_a_block_has_room_for(monkeypatch):
    executor = use(monkeypatch)
    q = normal(0, *(2, 3) * 5, 2, 4)[::-1, :, :1, :, :1, :, :1, :, :1, :2]
    k, v = (normal(seed, *(1, 3, 1, 1) * 2, 1, 2, 3, 4) for seed in (1, 2))
    lengths = np.arange(3).reshape(3, *(1,) * 6)
    for splits in (None, 2):
        q_few = q[..., :1, :1, :, :]
        mask = np.random.default_rng(3).random((1, 2, 3)) < 0.7
        lengths = np.random.default_rng(4).integers(0, 4, q_few.shape[:2] + (1,) * 8)
        options = {"key_lengths": lengths, "mask": mask}
        out, lse = cuflash.flash_attention(
            q_few, k, v, **options, return_lse=True, num_splits=splits
        )
        assert_attention_close(out, lse, expect_attention(q_few, k, v, **options))
    assert executor.launched


def test_axes_merge_where_all_operands_do():
    def spec(*shape, strides=None):
        x = np.zeros(shape, np.float32)
        return ArraySpec.of(
            x if strides is None else np.lib.stride_tricks.as_strided(x, shape, strides)
        )

    merged = BatchPlan.of((2, 3, 4), [spec(2, 3, 4, 5), None], 2**31)
    assert merged.sizes == (24,)
    assert merged.strides == ((5,), (0,))
    shared = ArraySpec.of(np.broadcast_to(np.zeros((2, 1, 4, 5), np.float32), (2, 3, 4, 5)))
    merged = BatchPlan.of((2, 3, 4), [spec(2, 3, 4, 5), shared], 2**31)
    assert merged.sizes == (2, 3, 4)
    assert merged.strides[1] == (20, 0, 5)
    cut = BatchPlan.of((2, 3, 4), [spec(2, 3, 4, 5), shared], 12)
    assert (cut.outer_sizes, cut.sizes) == ((2,), (3, 4))
    assert list(cut.places([1000, 0], [4, 2])) == [[1000, 0], [1240, 0]]


def test_a_grid_larger_than_the_device_allows(monkeypatch):
    executor = use(monkeypatch, limits=replace(H200, blocks=5))
    q, k, v = normal(0, 4, 3, 2, 8), normal(1, 3, 7, 8), normal(2, 4, 1, 7, 8)
    out = cuflash.flash_attention(q, k, v)
    np.testing.assert_allclose(out, cuflash.reference.attention(q, k, v)[0], rtol=2e-5)
    assert [launch.grid for launch in executor.launched] == [3] * 4


@pytest.mark.parametrize("shape", [(0, 3, 4, 4), (3, 0, 4, 4), (0, 0, 1, 1), (3, 5, 4, 0)])
def test_empty_arrays(shape, monkeypatch):
    executor = use(monkeypatch)
    tq, tk, d, dv = shape
    out, lse = cuflash.flash_attention(
        normal(0, 2, tq, d), normal(1, 2, tk, d), normal(2, 2, tk, dv), return_lse=True
    )
    assert (out.shape, lse.shape) == ((2, tq, dv), (2, tq))
    assert bool(executor.launched) == bool(tq)
    if not tk:
        np.testing.assert_array_equal(out, 0)
        np.testing.assert_array_equal(lse, -np.inf)
    out = cuflash.flash_attention(normal(0, 0, 3, 4), normal(1, 2, 4), normal(2, 2, 4))
    assert out.shape == (0, 3, 4)


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64", "uint8", "uint32", "uint64"])
def test_integers_of_every_type(dtype, monkeypatch):
    use(monkeypatch)
    q, k, v = normal(0, 3, 4, 8), normal(1, 3, 9, 8), normal(2, 3, 9, 8)
    lengths = np.array([0, 5, 9], dtype)
    options = {"key_lengths": lengths, "query_lengths": lengths // 3, "causal": True}
    out, lse = cuflash.flash_attention(q, k, v, **options, return_lse=True)
    assert_attention_close(out, lse, expect_attention(q, k, v, **options))


def lengths_that_nobody_checked(excess):
    """Return wild lengths of up to 4 queries and 9 keys, every pair of them, and tame ones."""
    wild = [[-excess, 3, most + excess] for most in (4, 9)]
    queries, keys = (x.ravel() for x in np.meshgrid(*wild))
    names = ("query_lengths", "key_lengths")
    tame = dict(zip(names, (np.clip(queries, 0, 4), np.clip(keys, 0, 9)), strict=True))
    return dict(zip(names, (queries, keys), strict=True)), tame


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("excess", [2, 2**62])
def test_lengths_that_nobody_checked_are_clamped(excess, causal, monkeypatch):
    """Values on a device are not read by the host: the kernels keep them within the arrays."""
    use(monkeypatch)
    wild, tame = lengths_that_nobody_checked(excess)
    # Behind the last entry there is one that a length too large would show.
    q, k, v = (normal(seed, 10, tokens, 8)[:-1] for seed, tokens in enumerate((4, 9, 9)))
    problem = AttentionProblem.of(AttentionArrays(q, k, v, **tame), causal=causal)
    out, lse = np.full((9, 4, 8), np.nan, np.float32), np.full((9, 4), np.nan, np.float32)
    engine.load("device").attention(problem, AttentionArrays(q, k, v, **wild), out, lse, None)
    assert_attention_close(out, lse, expect_attention(q, k, v, causal=causal, **tame))


# --------------------------------------------------------------------------------- parameter blocks


@pytest.mark.parametrize(
    ("source", "block"),
    [
        ("attention/parameters.cuh", ATTENTION_PARAMETERS),
        ("attention/combine.cu", COMBINE_LISTED),
        ("attention/combine.cu", COMBINE_EVEN),
        ("attention/combine.cu", COMBINE_VJP),
        ("attention/backward.cuh", VJP_PARAMETERS),
    ],
)
def test_parameter_blocks_are_the_same_in_both_languages(source, block):
    ours = {"sizeof": block.dtype.itemsize, **block.layout()}
    assert builder.c_layout(source, block) == ours


# ---------------------------------------------------------------------------------- planted faults

SIMT, SCORE = "attention/forward_simt.cu", "lib/score.cuh"
FAULTS = {
    "no barrier before tiles are loaded": Edit(
        SIMT, "__syncthreads();  // everyone is done with the tiles before these", ""
    ),
    "last key of a range not loaded": Edit(
        SIMT, "block.any.last + 1 - first_key", "block.any.last - first_key"
    ),
    "off by one in the causal bound": Edit(
        SCORE, "min(position + right, keys - 1)", "min(position + right + 1, keys - 1)"
    ),
    "tail of the keys not masked": Edit(SIMT, "if (key < low || key >= high)", "if (key < low)"),
    "no guard for rows without keys": Edit(
        SIMT, "return m == -infinity<A>() ? A(0) : m;", "return m;"
    ),
    "sums not rescaled": Edit(SIMT, "out[i][c] *= factor;", ";"),
    "no second turn for non-finite values": Edit(SIMT, "if (damaged) block.redo = 1;", ""),
    "a seen NaN taken for 0": Edit("lib/nonfinite.cuh", "if (counts) total", "if (false) total"),
}
LAWS = (
    "matches_oracle",
    "poisoned_outputs_fully_written",
    "nonfinite_key_reaches_only_rows_that_see_it",
)
#: Rows without keys first; more rows than a block has; a diagonal with NaN beyond it.
FAULTY_CASE = AttentionCase(
    q_batch=(2,), tq=140, tk=70, d=40, dv=40, logits="ascending", causal=True, unseen="nan"
)


def three_laws(**options):
    for order in builder.HostKernel.ORDERS:
        call = on_host_cuda(plain, order=order, **options)
        for law in LAWS:
            ATTENTION_PROPERTIES[law](call, FAULTY_CASE)


def test_nothing_planted():
    three_laws()


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_found(fault):
    with pytest.raises((AssertionError, RuntimeError)):
        three_laws(edits=(FAULTS[fault],))


def sanitized(which, *fault):
    """Run the small calls, `which` they are, under AddressSanitizer in a process of its own."""
    library = subprocess.run(
        [builder.COMPILER, "-print-file-name=libasan.so"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    # Python's own blocks never go back to malloc before it ends: not leaks.
    environment = {"LD_PRELOAD": library, "ASAN_OPTIONS": "detect_leaks=0"}
    return subprocess.run(
        [sys.executable, "-m", "tests.host_cuda.attention_engine", which, *fault],
        cwd=builder.HERE.parent.parent,
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )


def test_the_small_calls_launch_every_kernel_of_merges():
    launched = {launch.kernel.expression.partition("<")[0] for launch in check_bounds()}
    assert launched >= {f"cuflash::combine{end}" for end in ("", "_states", "_vjp")}


def test_no_access_out_of_bounds():
    run = sanitized("forward")
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize(
    "fault",
    [
        Edit(SIMT, "if (row >= block.end_row) continue;", ""),
        Edit(
            "lib/tile.cuh",
            "r < end && c < columns)\n            x",
            "r <= end && c < columns)\n            x",
        ),
    ],
    ids=["rows past the end written", "keys past the end read"],
)
def test_an_access_out_of_bounds_is_found(fault):
    run = sanitized("forward", *fault)
    assert run.returncode != 0
    assert "AddressSanitizer: heap-buffer-overflow" in run.stderr


# ------------------------------------------------------------------------------------------ states


def test_merge_softmax_is_the_hosts(monkeypatch):
    use(monkeypatch)
    rng = np.random.default_rng(0)
    states = [
        cuflash.SoftmaxState(
            rng.choice([-np.inf, np.inf, np.nan, 0.0, 3.5], 40).astype(np.float32),
            rng.choice([0.0, 1.0, 2.5, np.nan], 40).astype(np.float32),
        )
        for _ in range(2)
    ]
    got = cuflash.merge_softmax(*states)
    again = cuflash.merge_softmax(*states[::-1])
    with_identity = cuflash.merge_softmax(states[0], cuflash.SoftmaxState())
    monkeypatch.undo()
    want = cuflash.merge_softmax(*states)
    for mine, swapped, theirs in zip(got, again, want, strict=True):
        np.testing.assert_array_equal(mine, swapped)
        np.testing.assert_allclose(mine, theirs, rtol=1e-6)
    for mine, theirs in zip(
        with_identity, cuflash.merge_softmax(states[0], cuflash.SoftmaxState()), strict=True
    ):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("softcap", [1e-300, 1e-40, 1e30, 1e300])
def test_softcap_of_any_size(softcap, monkeypatch, rng):
    use(monkeypatch)
    q, k, v = rng.standard_normal((3, 7, 4)).astype(np.float32)
    out, lse = cuflash.flash_attention(q, k, v, softcap=softcap, return_lse=True)
    assert_attention_close(out, lse, expect_attention(q, k, v, softcap=softcap))


@pytest.mark.parametrize("bias", [-1e300, 1e300, -np.inf])
def test_bias_past_the_range_of_the_scores(bias, monkeypatch, rng):
    use(monkeypatch)
    q, k, v = rng.standard_normal((3, 5, 4)).astype(np.float32)
    out, lse = cuflash.flash_attention(q, k, v, bias=np.full((5, 5), bias), return_lse=True)
    expected = np.zeros_like(out) if np.isinf(bias) else np.broadcast_to(v.mean(axis=0), out.shape)
    np.testing.assert_allclose(out, expected, 1e-6, 1e-6)
    assert np.isinf(lse).all() == np.isinf(bias)


LARGEST = float(np.finfo(np.float32).max)
#: The bias of a score of +-2e32 beside two of 0: the weights and lse of the row, and those of a row
#: of that key alone.
PAST_THE_RANGE = {
    "no wider than the scores, below": (np.float32, -1, [0, 0.5, 0.5], np.log(2), 0, -np.inf),
    "no wider than the scores, above": (np.float32, 1, [np.nan] * 3, np.nan, np.nan, np.nan),
    "wider, below": (np.float64, -1, [0, 0.5, 0.5], np.log(2), 1, -LARGEST),
    "wider, above": (np.float64, 1, [1, 0, 0], LARGEST, 1, LARGEST),
}


@pytest.mark.parametrize("runs_kernels", [False, True])
@pytest.mark.parametrize("bias", PAST_THE_RANGE)
def test_sums_past_the_range_of_the_accumulator(bias, runs_kernels, monkeypatch):
    """As docs/guarantees.md says, on both engines: -inf or NaN, or the largest number."""
    if runs_kernels:
        use(monkeypatch)
    dtype, sign, weights, of_row, weight, of_key = PAST_THE_RANGE[bias]
    q, k, v = np.float32([[sign * 2e16]]), np.float32([[1e16], [0], [0]]), np.eye(3, dtype="f4")
    added = np.array([sign * LARGEST, 0, 0], dtype)
    out, lse = cuflash.flash_attention(q, k, v, scale=1.0, bias=added, return_lse=True)
    np.testing.assert_allclose(out, [weights], rtol=1e-6)
    np.testing.assert_allclose(lse, [of_row], rtol=1e-6)
    out, lse = cuflash.flash_attention(
        q, k[:1], v[:1, :1], scale=1.0, bias=added[:1], return_lse=True
    )
    np.testing.assert_array_equal(out, [[weight]])
    np.testing.assert_array_equal(lse, np.float32([of_key]))


@pytest.mark.parametrize("runs_kernels", [False, True])
def test_products_past_the_range_of_the_accumulator(runs_kernels, monkeypatch):
    if runs_kernels:
        use(monkeypatch)
    v = np.eye(3, dtype=np.float32)
    q, k = np.float32([[1e30], [-1e30]]), np.float32([[1e30], [0], [0]])
    out, lse = cuflash.flash_attention(q, k, v, scale=1e-30, return_lse=True)
    np.testing.assert_allclose(out, [[np.nan] * 3, [0, 0.5, 0.5]])
    np.testing.assert_allclose(lse, [np.nan, np.log(2)], rtol=1e-6)
    # A scale past the range is the largest number within.
    q, k = np.float32([[1]]), np.float32([[1], [-1], [0]])
    for sign in (-1, 1):
        out, lse = cuflash.flash_attention(q, k, v, scale=sign * 1e300, return_lse=True)
        np.testing.assert_array_equal(out, v[[0 if sign > 0 else 1]])
        np.testing.assert_array_equal(lse, np.float32([LARGEST]))
