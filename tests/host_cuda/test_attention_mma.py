"""The tensor-core kernel on the CPU: every tile of its table with every score pipeline."""

from functools import partial

import numpy as np
import pytest

import cuflash
from cuflash.device import attention_plans
from cuflash.device.attention_plans_mma import MMA_TILES
from cuflash.testing.bounds import assert_attention_close, expect_attention
from tests.devices import H200
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
    for choice in MMA_TILES
    for score in OPTIONS
    if choice.steps or score in ("PlainScore", "RangedScore")
]


def operands(d, dv, dtype=np.float16):
    rng = np.random.default_rng(d)
    return [rng.normal(size=(2, *s)).astype(dtype) for s in ((TQ, d), (TK, d), (TK, dv))]


@pytest.fixture
def plans_of_one_tile(monkeypatch):
    """Return a function that lets every plan take a tile, until the test ends."""
    caches = (attention_plans._forward, attention_plans.plan_attention)

    def take(tile):
        monkeypatch.setattr(attention_plans, "mma_tile", lambda *problem: tile)

    for cache in caches:
        cache.cache_clear()
    yield take
    for cache in caches:
        cache.cache_clear()


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
