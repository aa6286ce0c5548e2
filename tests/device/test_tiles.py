"""Tiles and plans of attention and of merges refuse what no kernel can run: needs no GPU."""

import re
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("cupy", reason="plans live beside CuPy's launches")

from cuflash._sources import kernel_source
from cuflash.device.attention_plans_decode import DecodeTile
from cuflash.device.attention_plans_dmma import DmmaTile
from cuflash.device.attention_plans_mma import MmaTile
from cuflash.device.attention_plans_tf32 import Tf32Tile
from cuflash.device.attention_plans_wgmma import WGMMA_STEP_TILES, WGMMA_TILES, WgmmaTile
from cuflash.device.attention_vjp_plans import PairTile, plan_attention_vjp
from cuflash.device.attention_vjp_plans_wgmma import BACKWARD_WGMMA_TILES, BackwardWgmmaTile
from cuflash.device.merge_plans import plan_merge
from cuflash.problem import ArraySpec, AttentionArrays, AttentionProblem
from cuflash.problem_vjp import AttentionVjpProblem
from tests.devices import H200

MMA = MmaTile(2, 4, 64, 64, 64, True, 2)
DMMA = DmmaTile(4, 32, 64, 64, False, 2)
TF32 = Tf32Tile(2, 4, 32, 64, 64, 2)
WGMMA = WgmmaTile(2, 128, 128, 2, 4, True, True)
DECODE = DecodeTile(4, 32, 64, 64, 3, True, 2)
BACKWARD_WGMMA = BackwardWgmmaTile(2, 128, 3, 2, True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"keys": 24}, "keys must be a positive multiple of 16, got 24"),
        ({"keys": 0}, "keys must be a positive multiple of 16, got 0"),
        ({"keys": 144}, r"keys must lie in 1\.\.128, got 144"),
        ({"features": 40}, "features must be a positive multiple of 16, got 40"),
        ({"values": 8}, "values must be a positive multiple of 16, got 8"),
        ({"row_tiles": 0}, "row_tiles must be positive, got 0"),
        ({"warps": 0}, r"warps must lie in 1\.\.32, got 0"),
        ({"warps": 33}, r"warps must lie in 1\.\.32, got 33"),
        ({"blocks": 0}, "blocks must be positive, got 0"),
        ({"warps": 3}, "3 warps copy 12 rows of features at a time"),
        ({"keys": 16, "warps": 8}, "that divides 16 keys"),
        ({"warps": 16, "features": 16, "values": 256}, "rows of features at a time"),
        ({"features": 32, "values": 192, "keys": 32}, "results of 128 queries and 192 values"),
    ],
)
def test_an_mma_tile_that_cannot_be_compiled_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(MMA, **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"warps": 2}, r"warps must lie in 3\.\.32, got 2"),
        ({"keys": 24}, r"keys must be a multiple of 16 in 16\.\.128, got 24"),
        ({"keys": 144}, "keys must be a multiple of 16"),
        ({"features": 48}, "features must be a positive multiple of 32, got 48"),
        ({"values": 0}, "values must be a positive multiple of 32, got 0"),
        ({"warps": 6}, "6 warps cannot copy rows of 64 features in equal parts"),
        ({"features": 512}, "4 warps cannot copy rows of 512 features"),
        ({"warps": 32, "keys": 16}, "32 warps cannot copy rows of 64 features"),
        ({"blocks": 0}, "blocks must be positive, got 0"),
    ],
)
def test_a_tile_in_float64_that_cannot_be_compiled_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(DMMA, **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"warps": 2}, r"warps must lie in 3\.\.32, got 2"),
        ({"row_tiles": 0}, "row_tiles must be positive, got 0"),
        ({"blocks": 0}, "blocks must be positive, got 0"),
        ({"keys": 24}, r"keys must be a multiple of 16 in 16\.\.64, got 24"),
        ({"keys": 80}, r"keys must be a multiple of 16 in 16\.\.64, got 80"),
        ({"features": 48}, "features must be a positive multiple of 32, got 48"),
        ({"values": 0}, "values must be a positive multiple of 32, got 0"),
        ({"warps": 6}, "6 warps cannot copy rows of 64 features in equal parts"),
        ({"warps": 32, "keys": 16}, "32 warps cannot copy rows of 64 features in equal parts"),
    ],
)
def test_a_tile_in_float32_that_cannot_be_compiled_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(TF32, **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"groups": 1}, r"groups must lie in 2\.\.4, got 1"),
        ({"groups": 5}, r"groups must lie in 2\.\.4, got 5"),
        ({"width": 96}, r"width must be one of \[64, 128, 256\], got 96"),
        ({"width": 192}, "width must be one of"),
        ({"keys": 120}, r"keys must be one of \[64, 128\] at width 128, got 120"),
        ({"keys": 128, "width": 256}, r"keys must be one of \[64\] at width 256, got 128"),
        ({"stages": 0}, "stages must be at least 1, got 0"),
        ({"query_stages": 1}, "query_stages must be at least 2, got 1"),
        ({"stages": 3}, "a block needs .* bytes of shared memory; there are 232448"),
    ],
)
def test_a_wgmma_tile_that_cannot_run_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(WGMMA, **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slice_keys": 24}, "slice_keys must be a positive multiple of 16, got 24"),
        ({"features": 0}, "features must be a positive multiple of 16, got 0"),
        ({"values": 72}, "values must be a positive multiple of 16, got 72"),
        ({"warps": 2}, r"warps must lie in 3\.\.32, got 2"),
        ({"stages": 1}, r"stages must lie in 2\.\.8, got 1"),
        ({"blocks": 0}, r"blocks must lie in 1\.\.32, got 0"),
    ],
)
def test_a_decode_tile_that_cannot_be_compiled_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(DECODE, **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"groups": 1}, "groups must be 2 or 3, got 1"),
        ({"groups": 3}, "width must be at most 64, got 128"),
        ({"width": 64}, "width must be 128 in 2 parts, got 64"),
        ({"parts": 4}, "width must be 256 in 4 parts, got 128"),
        ({"parts": 4, "width": 256}, "width must be at most 128, got 256"),
        ({"stages": 1}, "stages must be at least 2, got 1"),
        ({"stages": 4}, "a block needs .* bytes of shared memory; there are 232448"),
    ],
)
def test_a_tile_of_gradients_that_cannot_run_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(BACKWARD_WGMMA, **change)


def test_every_product_of_the_kernel_has_a_tile_that_may_take_it():
    text = kernel_source("lib/ptx_wgmma.cuh")
    products = re.findall(r"^CUFLASH_HELD_PRODUCTS\((\d+), \d+, (\d+),", text, re.MULTILINE)
    there = {(int(width), 16 * int(steps)) for width, steps in products}
    small, taken = replace(WGMMA, stages=1, query_stages=2), set()
    for width in range(16, 257, 16):
        for keys in range(16, 257, 16):
            try:
                taken.add((width, replace(small, width=width, keys=keys).keys))
            except ValueError:
                continue
    assert taken == there
    # Gradients multiply tiles of 64 queries.
    assert {(choice.tile.width, 64) for choice in BACKWARD_WGMMA_TILES} <= there
    choices = WGMMA_TILES + WGMMA_STEP_TILES
    assert {(choice.tile.width, choice.tile.keys) for choice in choices} <= taken


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda plan: {"stages": plan.stages * 2}, "stages fill"),
        (lambda plan: {"added": ("dbias",)}, "and add to"),
    ],
)
def test_a_plan_that_fills_gradients_twice_or_not_at_all_is_refused(change, message):
    x = np.broadcast_to(np.float32(0), (2, 3, 8))
    arrays = AttentionArrays(x, x, x)
    problem = AttentionVjpProblem.of_all(AttentionProblem.of(arrays), arrays, enable_gqa=False)
    plan = plan_attention_vjp(problem, H200)
    with pytest.raises(ValueError, match=message):
        replace(plan, **change(plan))


def specs(count):
    """Return (out, lse) of a result and its parts."""
    out, lse = (np.broadcast_to(np.float32(0), shape) for shape in ((3, 5, 8), (3, 5)))
    return [(ArraySpec.of(out), ArraySpec.of(lse))] * count


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"features": 48}, "features must be a multiple of 32, got 48"),
        ({"warps": 3}, r"warps must lie in 4\.\.32, got 3"),
        ({"warps": 33}, r"warps must lie in 4\.\.32, got 33"),
    ],
)
def test_tile_of_gradients(change, message):
    with pytest.raises(ValueError, match=message):
        replace(PairTile(4, 4, 4, 32, 2), **change)


@pytest.mark.parametrize("count", [1, 2, 8])
def test_merges_are_planned(count):
    result, *parts = specs(count + 1)
    plan = plan_merge(result, tuple(parts), H200)
    assert len(plan.itemsizes) == 2 + 2 * count


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda plan: {"itemsizes": plan.itemsizes[:3]}, "1 to 8 parts are merged, not 0.5"),
        (lambda plan: {"itemsizes": plan.itemsizes[:2]}, "1 to 8 parts are merged, not 0"),
        (lambda plan: {"itemsizes": (4,) * 20}, "1 to 8 parts are merged, not 9"),
        (lambda plan: {"itemsizes": plan.itemsizes[:4]}, "4 arrays with strides of 6"),
        (lambda plan: {"launch": plan.launch._replace(block=48)}, "by whole warps"),
        (lambda plan: {"launch": plan.launch._replace(grid=0)}, "by whole warps"),
    ],
)
def test_a_merge_of_other_arrays_is_refused(change, message):
    result, *parts = specs(3)
    plan = plan_merge(result, tuple(parts), H200)
    with pytest.raises(ValueError, match=message):
        replace(plan, **change(plan))
