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
    decode_splits,
    decode_tile,
    packing,
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
A100 = replace(H200, compute_capability="80", shared_per_sm=164 << 10, shared_per_block=163 << 10)
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
    plans_of_one_tile(choice.tile)
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
    taken = {decode_tile(problem_of(1, 8, 8, d=d), g) for d in (64, 128, 256) for g in (H200, A100)}
    assert taken == {choice.tile for choice in DECODE_TILES}
    assert decode_tile(problem_of(16, 8, 8), H200) is not None
    assert decode_tile(problem_of(17, 8, 8), H200) is None
    for d, kind in ((64, DecodeTile), (128, DecodeTile), (256, MmaTile)):
        out = ArraySpec.of(np.broadcast_to(np.zeros((), np.float16), (2, 8, 1, 1, d)))
        plan = attention_plans.plan_attention(problem_of(1, 8, 8, d=d), out, None, A10)
        assert isinstance(plan.tile, kind)


@pytest.mark.parametrize(
    ("groups", "tk", "wanted"),
    [
        (8, 65536, 32),  # 256 blocks, which run at once
        (64, 8192, 4),
        (32, 65536, 8),
        (8, 8192, 32),
        (8, 2048, 8),  # shares of 4 tiles, no shorter ones
        (512, 8192, 1),  # two turns without shares
        (64, 2048, 1),  # half of the places, yet a merge takes longer than it saves
        (8, 512, 1),
        (264, 8192, 1),
        (296, 8192, 2),  # 32 blocks of a second turn would leave the device to wait
        (0, 0, 1),
    ],
)
def test_shares(groups, tk, wanted):
    tile = decode_tile(problem_of(1, 8, 8, d=128), H200)
    assert decode_splits(groups, -(-tk // tile.keys), tile, H200) == wanted


def test_shares_scale_with_the_device():
    """Half a device has half the places and half the rate, for half the groups."""
    tile = DECODE_TILES[0].tile
    half = replace(H200, multiprocessors=H200.multiprocessors // 2)
    for groups, tiles in ((8, 1024), (64, 128), (64, 32), (296, 128), (512, 128)):
        assert decode_splits(groups, tiles, tile, H200) == decode_splits(
            groups // 2, tiles, tile, half
        )


# ---------------------------------------------------------------------------------- planted faults

DECODE = "attention/decode_mma.cu"
FAULTS = {
    "a warp's sums are not rescaled": Edit(
        DECODE, "= exp2_approximate(states[w][r].x - reference);", "= 1;"
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
