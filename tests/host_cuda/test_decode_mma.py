"""Few queries and many keys on the CPU: packed rows, slices of warps, shares, and their merge."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

import cuflash
from cuflash.device import attention_plans
from cuflash.device.attention_plans_decode import (
    DECODE_TILES,
    DecodeTile,
    Packing,
    clusters,
    decode_choice,
    packing,
    shares_of,
)
from cuflash.device.attention_plans_mma import MmaTile
from cuflash.problem import ArraySpec, AttentionArrays, AttentionProblem
from cuflash.testing.bounds import assert_attention_close, expect_attention
from tests.devices import H200
from tests.host_cuda import builder
from tests.host_cuda.builder import Edit
from tests.host_cuda.test_attention import on_host_cuda, use

pytestmark = pytest.mark.skipif(not builder.available(), reason="no C++ compiler")

BATCH, HEADS, GROUP, TK = 2, 6, 3, 300
LENGTHS = np.array([[TK - 7], [131]])
A100 = replace(
    H200,
    compute_capability="80",
    cluster_blocks=1,
    shared_per_sm=164 << 10,
    shared_per_block=163 << 10,
)
A10 = replace(H200, compute_capability="86", shared_per_sm=100 << 10, shared_per_block=99 << 10)
attend = partial(cuflash.flash_attention, method="mma", enable_gqa=True, return_lse=True)


def operands(tq, d, dv, dtype=np.float16, heads=HEADS):
    rng = np.random.default_rng(d)
    shapes = (heads, tq, d), (heads // GROUP, TK, d), (heads // GROUP, TK, dv)
    return [rng.normal(size=(BATCH, *shape)).astype(dtype) for shape in shapes]


def options(tq, seed=0):
    """Return options that differ between the heads of a group, and keys that no row sees."""
    rng = np.random.default_rng(seed)
    return {
        "window": (250, None),
        "causal": True,
        "key_lengths": LENGTHS - np.arange(HEADS),
        "query_lengths": rng.integers(0, tq + 1, (BATCH, HEADS)),
        "softcap": 3.0,
        "bias": rng.normal(size=(HEADS, tq, TK)).astype(np.float32),
        "mask": rng.random((BATCH, HEADS, tq, TK)) < 0.8,
        "alibi_slopes": rng.normal(size=HEADS).astype(np.float32) / 8,
        "sinks": rng.normal(size=HEADS).astype(np.float32),
    }


@pytest.mark.parametrize("full", [False, True], ids=["bounds", "options"])
@pytest.mark.parametrize("choice", DECODE_TILES, ids=lambda choice: choice.tile.expression[19:-1])
def test_tile(choice, full, monkeypatch, plans_of_one_tile):
    """Columns to fill up, groups of heads, ragged keys with NaN behind them, two shares."""
    executor = use(monkeypatch)
    plans_of_one_tile(choice)
    q, k, v = operands(5, choice.features - 3, choice.values)
    k[:, :, LENGTHS.max() :] = v[:, :, LENGTHS.max() :] = np.nan
    chosen = options(5) if full else {"causal": True, "key_lengths": LENGTHS}
    out, lse = attend(q, k, v, **chosen, num_splits=2)
    assert_attention_close(out, lse, expect_attention(q, k, v, **chosen, enable_gqa=True))
    decode, combine = executor.launched
    assert choice.tile.expression in decode.kernel.expression
    assert ("FullScore" if full else "RangedScore") in decode.kernel.expression
    assert decode.grid == BATCH * (HEADS // GROUP) * 2, "a block has a group's rows"
    assert "EvenParts" in combine.kernel.expression


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("full", [False, True], ids=["bounds", "options"])
@pytest.mark.parametrize("tq", [1, 5])
def test_packed_rows_have_the_bits_of_rows_alone(tq, full, splits, monkeypatch):
    executor = use(monkeypatch)
    q, k, v = operands(tq, 64, 64)
    chosen = options(tq) if full else {"causal": True}
    packed = attend(q, k, v, **chosen, num_splits=splits)
    repeated = (np.repeat(x, GROUP, axis=1) for x in (k, v))
    alone = attend(q, *repeated, **chosen, num_splits=splits)
    grids = [launch.grid for launch in executor.launched if "decode" in launch.kernel.expression]
    assert grids == [BATCH * HEADS // GROUP * splits, BATCH * HEADS * splits]
    for one, other in zip(packed, alone, strict=True):
        np.testing.assert_array_equal(one, other)


def test_any_axes_and_strides_are_packed(monkeypatch):
    """The group need not be the last axis, nor its rows next to each other, nor aligned."""
    executor = use(monkeypatch)
    rng = np.random.default_rng(0)
    q = rng.normal(size=(2, 1, 20, 3, 31)).astype(np.float16).transpose(2, 0, 3, 1, 4)[:, ::-1]
    k, v = (rng.normal(size=(3, 33, n)).astype(np.float16).swapaxes(-1, -2) for n in (40, 40))
    k, v = k[:, :, :31], v[:, :, 1:30]
    out, lse = cuflash.flash_attention(q, k, v, method="mma", return_lse=True)
    assert_attention_close(out, lse, expect_attention(q, k, v))
    assert executor.launched[0].grid == 2 * 3 * 2, "20 rows of a group are two blocks of 10"


@pytest.mark.parametrize("splits", [1, 2])
def test_groups_of_sequences_end_to_end(splits, monkeypatch):
    """Heads that share keys are packed; of a sequence with more queries than fit, several blocks
    have the bits that one of its rows alone has."""
    executor = use(monkeypatch)
    rng = np.random.default_rng(splits)
    ends_q, ends_k = np.array([0, 1, 2, 2, 12, 13]), np.array([0, 90, 90, 400, 800, 801])
    shapes = (HEADS, 15, 64), (HEADS // GROUP, 820, 64), (HEADS // GROUP, 820, 64)
    q, k, v = (rng.normal(size=shape).astype(np.float16) for shape in shapes)
    chosen = {
        "causal": True,
        "key_lengths": np.array([80, 0, 310, 388, 1]),
        "alibi_slopes": rng.normal(size=HEADS).astype(np.float32) / 8,
        "sinks": rng.normal(size=HEADS).astype(np.float32),
        "num_splits": splits,
        "method": "mma",
        "return_lse": True,
        "enable_gqa": True,
    }
    packed = cuflash.flash_attention_varlen(q, k, v, ends_q, ends_k, **chosen)
    repeated = (np.repeat(x, GROUP, axis=0) for x in (k, v))
    alone = cuflash.flash_attention_varlen(q, *repeated, ends_q, ends_k, **chosen)
    grids = [launch.grid for launch in executor.launched if "decode" in launch.kernel.expression]
    assert grids == [2 * (3 + 5) * splits, HEADS * (1 + 5) * splits]
    for one, other in zip(packed, alone, strict=True):
        np.testing.assert_array_equal(one, other)
    for name in ("num_splits", "method", "return_lse"):
        del chosen[name]
    lengths = chosen.pop("key_lengths")
    for e, length in enumerate(lengths):
        rows, keys = slice(*ends_q[e : e + 2]), slice(*ends_k[e : e + 2])
        expected = expect_attention(
            q[:, rows], k[:, keys], v[:, keys], **chosen, key_lengths=int(length)
        )
        assert_attention_close(*(x[:, rows] for x in packed), expected)


def test_nonfinite_values_reach_the_rows_that_see_them(monkeypatch):
    """Of a group's heads, some see a NaN or an infinite value, and no other's bits change."""
    use(monkeypatch)
    q, k, v = operands(2, 64, 64)
    seen = np.ones((HEADS, 1, TK), np.bool)
    seen[::2, :, 100] = seen[1::3, :, 200] = False
    before, _ = attend(q, k, v, mask=seen, num_splits=1)
    v[:, :, 100, 3], v[:, :, 200, 5] = np.nan, np.inf
    after, lse = attend(q, k, v, mask=seen, num_splits=1)
    assert_attention_close(after, lse, expect_attention(q, k, v, mask=seen, enable_gqa=True))
    clean = np.isfinite(after)
    assert not clean.all()
    np.testing.assert_array_equal(after[clean], before[clean])


@pytest.mark.parametrize("splits", [2, 7, 64])
@pytest.mark.parametrize("dv", [1, 128, 200])
def test_shares_are_merged(splits, dv, monkeypatch):
    """By one warp a row or by several, and by more columns than lanes."""
    executor = use(monkeypatch)
    rng = np.random.default_rng(dv)
    q, k, v = (rng.normal(size=(4, *s)).astype(np.float32) for s in ((1, 8), (2100, 8), (2100, dv)))
    lengths = np.array([0, 5, 1000, 2100])  # shares without a key
    out, lse = cuflash.flash_attention(
        q, k, v, key_lengths=lengths, num_splits=splits, return_lse=True
    )
    assert_attention_close(out, lse, expect_attention(q, k, v, key_lengths=lengths))
    assert executor.launched[1].block == 32 * {2: 1, 7: 2, 64: 16}[splits]


# --------------------------------------------------------------------------------------- choices


def problem_of(tq, heads, key_heads, *, tk=4096, d=64, batch=2, **more):
    shapes = ((batch, heads, tq, d), (batch, key_heads, tk, d), (batch, key_heads, tk, d))
    arrays = [np.broadcast_to(np.zeros((), np.float16), shape) for shape in shapes]
    # Of stride 0 in every axis all would broadcast.
    specs = [ArraySpec.of(np.lib.stride_tricks.as_strided(x, x.shape, _dense(x))) for x in arrays]
    described = AttentionArrays(*[_Described(spec) for spec in specs])
    return AttentionProblem.of(described, enable_gqa=True, **more)


def _dense(x):
    return tuple(x.itemsize * int(np.prod(x.shape[axis + 1 :])) for axis in range(x.ndim))


class _Described:
    def __init__(self, spec):
        self.shape, self.strides, self.dtype = spec


@pytest.mark.parametrize(
    ("tq", "heads", "key_heads", "wanted"),
    [
        (1, 8, 8, Packing()),
        (1, 32, 8, Packing(2, 4, 4)),
        (4, 32, 8, Packing(2, 4, 4)),
        (5, 32, 8, Packing(2, 4, 2)),  # 3 would fit: two blocks of 2 are as many as 3 and 1
        (9, 32, 8, Packing()),
        (1, 40, 2, Packing(2, 20, 10)),
        (1, 64, 1, Packing(2, 64, 16)),
    ],
)
def test_groups(tq, heads, key_heads, wanted):
    assert packing(problem_of(tq, heads, key_heads)) == wanted


def test_the_largest_shared_axis_is_the_group():
    q = np.zeros((3, 2, 5, 1, 8), np.float16)
    k = np.zeros((2, 1, 9, 8), np.float16)
    assert packing(AttentionProblem.of(AttentionArrays(q, k, k))) == Packing(2, 5, 5)


def test_tiles_by_device():
    problems = [problem_of(1, 8, 8, d=d) for d in (64, 128, 256)]
    assert {decode_choice(p, g) for p in problems for g in (H200, A100)} == {*DECODE_TILES}
    assert decode_choice(problem_of(16, 8, 8), H200) is not None
    assert decode_choice(problem_of(17, 8, 8), H200) is None
    for d, kind in ((64, DecodeTile), (128, DecodeTile), (256, MmaTile)):
        out = ArraySpec.of(np.broadcast_to(np.zeros((), np.float16), (2, 8, 1, 1, d)))
        plan = attention_plans.plan_attention(problem_of(1, 8, 8, d=d), out, None, A10)
        assert isinstance(plan.tile, kind)


@pytest.mark.parametrize(
    ("groups", "tk", "apart", "clustered"),
    [
        (8, 65536, 32, 8),  # 256 blocks, which run at once
        (64, 8192, 4, 2),
        (32, 65536, 8, 8),  # clusters of 2 would be 64 blocks, which stream less than memory gives
        (8, 8192, 32, 8),
        (8, 2048, 8, 8),  # no shorter shares than of 4 tiles, in clusters of 2 larger ones
        (2, 65536, 132, 132),  # clusters would leave most of the device without work
        (512, 8192, 1, 1),  # two turns without shares
        (64, 2048, 1, 2),  # half of the places, yet a launch takes longer than it saves
        (8, 256, 1, 1),
        (264, 8192, 1, 1),
        (296, 8192, 2, 2),  # 32 blocks of a second turn would leave the device to wait
        (0, 0, 1, 1),
    ],
)
def test_shares(groups, tk, apart, clustered):
    choice = decode_choice(problem_of(1, 8, 8, d=128), H200)
    alone = shares_of(groups, tk, choice, replace(H200, cluster_blocks=1))
    assert alone == (apart, None)
    found = shares_of(groups, tk, choice, H200)
    assert found.splits == clustered
    assert found.clustered == (None if clustered == apart and found == alone else choice.clustered)


def test_clusters_that_run_at_once():
    """As the driver counts them for blocks that fill a multiprocessor (docs/kernels.md)."""
    assert [clusters(blocks, H200) for blocks in (2, 4, 8, 16)] == [66, 30, 15, 7]
    assert clusters(2, A100) == 0


def test_a_cluster_merges_its_shares():
    """In the forward's launch, without a workspace; elsewhere, and if asked for, it takes both."""
    for limits, given, options, cluster in (
        (H200, None, {}, 8),
        (H200, None, {"softcap": 3.0}, 1),
        (H200, 8, {}, 1),
        (A100, None, {}, 1),
    ):
        problem = problem_of(1, 32, 8, tk=8192, d=128, batch=1, num_splits=given, **options)
        out = ArraySpec.of(np.zeros(problem.out_shape, np.float16))
        plan = attention_plans.plan_attention(problem, out, None, limits)
        assert plan.cluster == cluster
        assert plan.splits >= 8
        assert plan.forward.grid == 8 * plan.splits
        assert plan.forward.kernel.expression.endswith(", 8>") == (cluster == 8)
        assert (plan.combine is None) == (cluster == 8) == (plan.workspace == 0)
        assert attention_plans.workspace_bytes(problem, limits) == plan.workspace


def test_sequences_may_take_less_than_the_workspace_of_their_tokens():
    """Whose number `workspace_size` is not told; shares are those of sequences of mean length."""
    q, k = np.zeros((32, 64, 64), np.float16), np.zeros((8, 1, 9000, 64), np.float16)
    ends_q, ends_k = np.arange(65), np.arange(65) * 140
    arrays = AttentionArrays(
        q.reshape(8, 4, 64, 64), k, k, cu_seqlens_q=ends_q, cu_seqlens_k=ends_k
    )
    for given, splits, needed in ((None, 1, False), (3, 3, True)):
        problem = AttentionProblem.of(arrays, num_splits=given, method="mma")
        out = ArraySpec.of(np.zeros(problem.out_shape, np.float16))
        plan = attention_plans.plan_attention(problem, out, None, H200)
        assert isinstance(plan.tile, DecodeTile)
        assert plan.splits == splits
        assert plan.forward.grid == 8 * (16 + 64) * splits, "four queries of four heads a block"
        assert (plan.workspace > 0) == needed == (plan.combine is not None)
        assert attention_plans.workspace_bytes(problem, H200) >= plan.workspace


def test_shares_scale_with_the_device():
    """Half a device has half the places and half the rate, for half the groups."""
    choice = DECODE_TILES[0]._replace(clustered=None)
    half = replace(H200, multiprocessors=H200.multiprocessors // 2)
    for groups, keys in ((8, 131072), (64, 16384), (64, 4096), (296, 16384), (512, 16384)):
        of_half = shares_of(groups // 2, keys, choice, half)
        assert shares_of(groups, keys, choice, H200) == of_half


# ---------------------------------------------------------------------------------- planted faults

DECODE = "attention/decode_mma.cu"
FAULTS = {
    "a warp's sums are not rescaled": Edit(
        DECODE, "= exp2_approximate(states[i].x - sums.reference);", "= 1;"
    ),
    "a stage is overwritten early": Edit(
        DECODE, "wait_for_copies<kStages - 2>();", "wait_for_copies<kStages - 1>();"
    ),
    "rows of other members": Edit(
        "attention/packed_rows.cuh",
        "const int member = first_member + own % members;",
        "const int member = first_member;",
    ),
    "options of other members": Edit(
        "attention/packed_rows.cuh",
        "if (p.group > 1) row.index.on_axis[p.batch.count - 1] = member;",
        "",
    ),
    "no second turn": Edit(DECODE, "damaged[r] = block.redo = 1;", ";"),
    "a sink in every warp": Edit(
        DECODE, "block.work.split == 0 && warp == 0", "block.work.split == 0"
    ),
    "a share of the parts is lost": Edit(
        "attention/combine.cu", "count * (own + 1) / p.warps", "count * own / p.warps"
    ),
}


def attend_to_all(**more):
    q, k, v = operands(2, 64, 64)
    v[:, :, 291:] = np.nan  # of a group's heads, one does not see it
    chosen = options(2)
    for splits in (1, 9):
        call = on_host_cuda(attend, **more)
        out, lse = call(q, k, v, **chosen, num_splits=splits)
        assert_attention_close(out, lse, expect_attention(q, k, v, **chosen, enable_gqa=True))


def test_nothing_planted():
    attend_to_all()


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_found(fault):
    with pytest.raises((AssertionError, RuntimeError)):
        attend_to_all(edits=(FAULTS[fault],))
