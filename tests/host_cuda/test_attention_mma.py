"""The tensor-core kernel on the CPU: every tile of its table with every score pipeline."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

import cuflash
from cuflash.device.attention_plans_mma import MMA_TILES, SM75_TILES
from cuflash.problem import BFLOAT16
from cuflash.testing.bounds import assert_attention_close, expect_attention
from tests.devices import H200, T4
from tests.host_cuda import builder
from tests.host_cuda.test_attention import plan_of, use

pytestmark = pytest.mark.skipif(not builder.available(), reason="no C++ compiler")

TQ, TK = 70, 150
_rng = partial(np.random.default_rng, 5)
#: The options of a call, by the score pipeline that serves it.
OPTIONS = {
    "PlainScore": {},
    "RangedScore": {"window": (60, 20), "key_lengths": 140},
    "SoftcapScore": {"softcap": 2.0, "causal": True},
    "BiasScore": {"bias": _rng().normal(size=(TQ, TK)).astype(np.float32), "window": (60, None)},
    "AlibiScore": {"alibi_slopes": np.float32([0.5, -0.1]), "causal": True},
    "MaskScore": {"mask": _rng().random((TQ, TK)) < 0.7, "key_lengths": 130},
    "FullScore": {
        "softcap": 2.0,
        "bias": _rng().normal(size=(2, 1, TK)),
        "alibi_slopes": np.float32([0.5, -0.1]),
        "mask": _rng().random((TQ, 1)) < 0.7,
        "window": (None, 20),
    },
}
TILES = [
    pytest.param(choice.tile, score, id=f"{choice.tile.expression[17:-1]}-{score}")
    for choice in (*MMA_TILES, *SM75_TILES)
    for score in OPTIONS
    if choice.steps or score in ("PlainScore", "RangedScore")
]


def operands(d, dv, dtype=np.float16):
    rng = np.random.default_rng(d)
    return [rng.normal(size=(2, *s)).astype(dtype) for s in ((TQ, d), (TK, d), (TK, dv))]


@pytest.mark.parametrize(("tile", "score"), TILES)
def test_tile(tile, score, monkeypatch, plans_of_one_tile):
    """With columns to fill up, rows that differ in what they see, and NaN where no row looks."""
    executor = use(monkeypatch)
    plans_of_one_tile(tile)
    q, k, v = operands(tile.features - 3, tile.values)
    options = OPTIONS[score]
    if "key_lengths" in options:
        k[:, options["key_lengths"] :] = v[:, options["key_lengths"] :] = np.nan
    out, lse = cuflash.flash_attention(q, k, v, **options, method="mma", return_lse=True)
    assert f"cuflash::{score}<" in executor.launched[0].kernel.expression
    assert tile.expression in executor.launched[0].kernel.expression
    assert_attention_close(out, lse, expect_attention(q, k, v, **options))


def test_the_instructions_of_sm_75_take_float16_alone():
    def source(dtype, d, queries=300, limits=T4):
        return plan_of(queries, 300, d, d, dtype=dtype, limits=limits).forward.kernel.source

    assert source(np.float16, 64) == "attention/forward_mma_sm75.cu"
    assert source(np.float16, 64, queries=1) == "attention/forward_mma_sm75.cu"
    newer = replace(H200, compute_capability="80")
    assert source(np.float16, 64, limits=newer) == "attention/forward_mma.cu"
    for dtype, d in ((np.float16, 129), (BFLOAT16, 64), (np.float32, 64)):
        assert source(dtype, d) == "attention/forward_simt.cu"


def _aligned(masks):
    """Return masks whose rows begin at multiples of 16 bytes."""
    *batch, keys = masks.shape
    whole = np.zeros(np.prod(batch) * 160 + 16, np.bool)
    start = -whole.ctypes.data % 16
    rows = whole[start : start + np.prod(batch) * 160].reshape(*batch, 160)[..., :keys]
    rows[...] = masks
    return rows


@pytest.mark.parametrize("layout", ["by words", "by bytes"])
@pytest.mark.parametrize(
    "mask",
    [
        _rng().random((TQ, TK)) < 0.7,
        np.arange(TQ)[:, None] // 32 == np.arange(TK) // 64,  # tiles with all bits, or none
        np.broadcast_to(np.arange(TK) % 3 > 0, (TQ, TK)),
    ],
    ids=["random", "blocks", "keys"],
)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"key_lengths": 130}], ids=str)
@pytest.mark.parametrize("features", [64, 128, 256])  # of tiles with 32, 16 and 16 bytes a lane
def test_masks(features, options, mask, layout, monkeypatch):
    """As bits of whole words where rows allow it: tiles without any are left out."""
    use(monkeypatch)
    q, k, v = operands(features, 16)
    k[0, 100], v[0, 100] = np.nan, np.inf
    masks = np.stack([mask, mask])
    masks[0, :, 100] = False
    if layout == "by words":
        masks = _aligned(masks)
    out, lse = cuflash.flash_attention(
        q, k, v, mask=masks, **options, method="mma", return_lse=True
    )
    assert_attention_close(out, lse, expect_attention(q, k, v, mask=masks, **options))


def test_masks_of_any_bytes(monkeypatch):
    """True is what is not 0, as in a view of other bytes."""
    use(monkeypatch)
    q, k, v = operands(64, 64)
    mask = _rng().random((TQ, TK)) < 0.7
    bytes_ = _aligned(mask).view(np.uint8)
    bytes_[...] = np.where(mask, _rng().integers(1, 256, mask.shape), 0)
    out, lse = cuflash.flash_attention(
        q, k, v, mask=bytes_.view(np.bool), method="mma", return_lse=True
    )
    assert_attention_close(out, lse, expect_attention(q, k, v, mask=mask))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64])
@pytest.mark.parametrize("keys", [TK, TK - 1])
def test_biases(keys, dtype, monkeypatch):
    """Two elements at a time where they begin at a multiple of both; of odd rows one by one."""
    use(monkeypatch)
    q, k, v = operands(64, 64)
    k, v = k[:, :keys], v[:, :keys]
    bias = _rng().normal(size=(2, TQ, keys)).astype(dtype)
    bias[0, 3, :20] = -np.inf
    out, lse = cuflash.flash_attention(q, k, v, bias=bias, method="mma", return_lse=True)
    assert_attention_close(out, lse, expect_attention(q, k, v, bias=bias))


@pytest.mark.parametrize("slopes", [[0.5, -0.1], [np.nan, 2], [np.inf, 0], [1e3, -4]], ids=str)
@pytest.mark.parametrize("offset", [0, 80, 300, -100, 2**23])
@pytest.mark.parametrize("window", [None, (0, 0), (5, 70), (None, 3)], ids=str)
def test_alibi(window, offset, slopes, monkeypatch):
    """Keys before, around and after the queries, near and too far for distances as floats.

    What a row sees in a window is near, so that its scores are small beside other distances.
    """
    use(monkeypatch)
    q, k, v = operands(64, 64)
    if offset == 2**23 or window is None:
        slopes = np.clip(slopes, -2, 2)  # scores past 1e8 are too large for tensor cores
    options = {"alibi_slopes": np.float32(slopes), "query_offset": offset, "window": window}
    out, lse = cuflash.flash_attention(q, k, v, **options, method="mma", return_lse=True)
    assert_attention_close(out, lse, expect_attention(q, k, v, **options))


@pytest.mark.parametrize("offset", [0, 300, -100])
def test_steep_slopes(offset, monkeypatch):
    """Scores that rise by more than float16 holds from one tile of keys to the next."""
    use(monkeypatch)
    q, k, v = operands(64, 64)
    options = {"alibi_slopes": np.float32([-3, 100]), "query_offset": offset}
    out, lse = cuflash.flash_attention(q, k, v, **options, method="mma", return_lse=True)
    assert_attention_close(out, lse, expect_attention(q, k, v, **options))


@pytest.mark.parametrize("tq", [TQ, 3])  # by rows of a sequence, and packed
@pytest.mark.parametrize("size", [1e2, 2e4])
@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"sinks": np.float32([3e9, -1])}], ids=str
)
def test_large_scores(options, size, tq, monkeypatch):
    """Exponents of weights, where a score is rounded to more than they can bear."""
    use(monkeypatch)
    q, k, v = operands(64, 64)
    q, k = (np.sign(x) * np.float16(size) for x in (q[:, :tq], k))
    out, lse = cuflash.flash_attention(q, k, v, **options, method="mma", return_lse=True)
    assert_attention_close(out, lse, expect_attention(q, k, v, **options))


def test_a_row_moves_by_its_own_score_alone(monkeypatch):
    """Whether a score is too much above the rest is asked of the same number for all rows."""
    use(monkeypatch)
    rng = _rng()
    for _ in range(20):
        q, k, v = (rng.normal(size=(n, 64)).astype(np.float16) for n in (32, 128, 128))
        k[64:] = (k[:64].astype(np.float32) * rng.uniform(1, 4, (64, 1))).astype(np.float16)
        before, _ = cuflash.flash_attention(q, k, v, method="mma", return_lse=True)
        q[1] *= 30
        after, _ = cuflash.flash_attention(q, k, v, method="mma", return_lse=True)
        np.testing.assert_array_equal(np.delete(after, 1, axis=0), np.delete(before, 1, axis=0))


@pytest.mark.parametrize("cap", [1e-4, 0.5, 2.0, 30.0, 255.0, 1e4, 1e25])
@pytest.mark.parametrize(
    ("window", "size"), [(None, 30), (None, 0.01), ((0, 0), 1), ((0, 0), 0.01)], ids=str
)
def test_softcaps(window, size, cap, monkeypatch):
    """Scores that are small beside the cap keep their digits, those of a single key too."""
    use(monkeypatch)
    q, k, v = operands(64, 64)
    q = (q * np.where(np.arange(TQ) % 3, size, 1)[:, None]).astype(np.float16)
    options = {"softcap": cap, "window": window}
    out, lse = cuflash.flash_attention(q, k, v, **options, method="mma", return_lse=True)
    assert_attention_close(out, lse, expect_attention(q, k, v, **options))


@pytest.mark.parametrize("scale", [-0.3, 0.0, 1e-30])
@pytest.mark.parametrize("score", ["SoftcapScore", "BiasScore", "AlibiScore", "MaskScore"])
def test_scales_that_are_not_folded_into_the_exponent(score, scale, monkeypatch):
    use(monkeypatch)
    q, k, v = operands(64, 64)
    options = {**OPTIONS[score], "scale": scale}
    out, lse = cuflash.flash_attention(q, k, v, **options, method="mma", return_lse=True)
    assert_attention_close(out, lse, expect_attention(q, k, v, **options))


def test_tiles_are_chosen_by_shape_and_score():
    """No row of the table is out of reach but by the limits of a device."""
    chosen = {
        plan_of(tq, 64, d, dv, dtype=np.float16, **options).tile
        for tq in (64, 4096)
        for d, dv in ((8, 8), (64, 64), (96, 96), (128, 128), (192, 128), (256, 256))
        for options in ({}, {"softcap": 1.0})
    }
    small = {choice.tile for choice in MMA_TILES if choice.tile.shared_bytes <= 99 * 1024} - chosen
    assert chosen | small == {choice.tile for choice in MMA_TILES}
    assert len(small) == 1
    assert all(tile.shared_bytes <= H200.shared_per_block for tile in chosen)


@pytest.mark.parametrize("score", ["PlainScore", "RangedScore"])
def test_scores_that_rise_late(score, monkeypatch):
    """Rows move to a new reference by their own scores: no other row's change their bits."""
    use(monkeypatch)
    options = OPTIONS[score]
    q, k, v = operands(64, 64)
    before, _ = cuflash.flash_attention(q, k, v, **options, method="mma", return_lse=True)
    q[:, ::3] *= 40
    out, lse = cuflash.flash_attention(q, k, v, **options, method="mma", return_lse=True)
    assert_attention_close(out, lse, expect_attention(q, k, v, **options))
    for start in (1, 2):
        np.testing.assert_array_equal(out[:, start::3], before[:, start::3])
