"""Which problems the Hopper family takes, and what it tells the copy engine: needs no GPU."""

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("cupy", reason="plans live beside CuPy's launches")

from cuflash.device.attention_plans import attention_methods, plan_attention, workspace_bytes
from cuflash.device.attention_plans_wgmma import (
    WGMMA_PARAMETERS,
    WGMMA_STEP_TILES,
    WGMMA_TILES,
    wgmma_tile,
)
from cuflash.problem import ArraySpec, AttentionArrays, AttentionProblem
from tests.devices import H200

HALF = np.dtype(np.float16)
STATIC_LIMIT = 227 << 10


def spec(*shape, dtype=HALF, order=None):
    """Describe an array whose axes lie in memory in this order, the last one fastest."""
    strides, step = [0] * len(shape), dtype.itemsize
    for axis in reversed(order or range(len(shape))):
        strides[axis] = step
        step *= shape[axis]
    return ArraySpec(shape, tuple(strides), dtype)


def problem_of(q, k=None, v=None, **options):
    arrays = {name: options.pop(name) for name in AttentionArrays._fields if name in options}
    return AttentionProblem.of(AttentionArrays(q, k or q, v or k or q, **arrays), **options)


def takes(*args, limits=H200, **options):
    return "wgmma" in attention_methods(problem_of(*args, **options), limits)


def test_what_it_takes():
    assert takes(spec(2, 3, 64, 128))
    assert takes(spec(64, 8), spec(1, 8))
    assert takes(spec(2, 4, 100, 64, order=(0, 2, 1, 3)))
    assert takes(spec(64, 256), spec(64, 256), spec(64, 64))
    # Nothing is read of an empty array, whatever its strides.
    assert takes(ArraySpec((0, 65, 8), (0, 0, 0), HALF), spec(1, 8))


def test_what_it_leaves_to_others():
    q = spec(2, 100, 64)
    assert not takes(q, limits=replace(H200, compute_capability="80"))
    assert not takes(q, limits=replace(H200, compute_capability="100"))
    assert not takes(spec(2, 63, 64))  # most of a tile would be empty
    assert not takes(q, spec(2, 0, 64))
    assert not takes(spec(2, 100, 264))
    assert not takes(spec(2, 100, 64, dtype=np.dtype(np.float32)))
    # What TMA cannot read: columns apart, rows or entries in other steps than of 16 bytes, or back.
    assert not takes(spec(2, 100, 64, order=(0, 2, 1)))
    assert not takes(spec(2, 100, 60))
    assert not takes(q, ArraySpec((2, 100, 64), (12808, 128, 2), HALF))
    assert not takes(q, ArraySpec((2, 100, 64), (12800, -128, 2), HALF))


BOOL, SINGLE, DOUBLE = map(np.dtype, (bool, np.float32, np.float64))


def test_one_option_that_changes_scores():
    q, k = spec(2, 100, 64), spec(2, 96, 64)
    slopes = spec(2, dtype=SINGLE)
    assert takes(q, k, alibi_slopes=slopes)
    assert takes(q, k, softcap=30.0)
    assert takes(q, k, mask=spec(2, 100, 96, dtype=BOOL))
    assert takes(q, k, mask=spec(1, 96, dtype=BOOL))
    assert takes(q, k, bias=spec(100, 96, dtype=SINGLE))
    assert takes(q, k, bias=spec(2, 1, 96))
    # Not two of them, nor a scale that is a step; nor what no register has room for.
    assert not takes(q, k, softcap=30.0, alibi_slopes=slopes)
    assert not takes(q, k, scale=0.0)
    assert not takes(q, k, softcap=1e30)
    assert not takes(q, k, bias=spec(100, 96, dtype=DOUBLE))
    # Rows are read by 16 bytes.
    assert not takes(q, mask=spec(100, 100, dtype=BOOL))
    assert not takes(q, mask=ArraySpec((100, 100), (112, 1), BOOL))
    assert takes(q, bias=spec(100, 100, dtype=SINGLE))
    assert not takes(q, bias=spec(100, 100))
    assert not takes(q, k, mask=spec(100, 1, dtype=BOOL))
    assert not takes(q, k, mask=ArraySpec((100, 96), (104, 1), BOOL))
    assert not takes(q, k, mask=ArraySpec((2, 100, 96), (9608, 96, 1), BOOL))


def test_options_have_tiles_that_look_for_their_maximum():
    for width in (64, 128, 256):
        x = spec(2, 512, width)
        plan = plan_attention(problem_of(x, softcap=30.0, causal=True), x, None, H200)
        assert not plan.tile.topless
        assert "SoftcapScore" in plan.forward.kernel.expression
    # What a thread reads of a bias needs more registers than four warpgroups leave it.
    x = spec(2, 512, 64)
    tiles = [
        plan_attention(problem_of(x, **option), x, None, H200).tile
        for option in ({"softcap": 30.0}, {"bias": spec(512, 512)})
    ]
    assert [tile.groups for tile in tiles] == [4, 2]


def test_an_option_has_to_lie_at_a_multiple_of_16_bytes():
    x, mask = spec(2, 128, 64), spec(128, 128, dtype=BOOL)
    plan = plan_attention(problem_of(x, mask=mask), x, None, H200)
    pointers = [0] * 14
    assert plan.maps_read(pointers)
    pointers[3] = 8
    assert not plan.maps_read(pointers)


def test_a_diagonal_has_tiles_of_its_own():
    """Bounds that follow a query's position, not lengths alone, at widths where that pays."""

    def tile(width, tokens, **options):
        x = spec(2, tokens, width)
        bounds = {"causal": False, "window": None} | options
        return wgmma_tile(AttentionProblem.of(AttentionArrays(x, x, x), method="wgmma", **bounds))

    for width in (40, 64):
        assert not tile(width, 512, causal=True).turns
        assert not tile(width, 512, window=(10, None)).turns
        assert tile(width, 512).turns
        assert tile(width, 256, causal=True) == tile(width, 256)
    assert not tile(128, 1023, causal=True).topless
    assert tile(128, 1024, causal=True) == tile(128, 512) == tile(128, 1024)
    assert not tile(256, 4095, causal=True).topless
    assert tile(256, 4096, causal=True) == tile(256, 512) == tile(256, 4096)


@pytest.mark.parametrize(
    "choice", WGMMA_TILES + WGMMA_STEP_TILES, ids=lambda choice: str(choice.width)
)
def test_tiles_fit_a_block(choice):
    assert choice.tile.shared_bytes <= STATIC_LIMIT
    assert choice.tile.threads <= 1024


def test_parameters_are_a_whole_number_of_aligned_words():
    assert WGMMA_PARAMETERS.dtype.itemsize % 64 == 0
    assert WGMMA_PARAMETERS.layout()["attention"] == 4 * 128


def test_the_grid_stays_and_maps_follow_the_strides():
    q = spec(4, 16, 300, 64, order=(0, 2, 1, 3))
    k = spec(4, 1, 300, 64, order=(0, 2, 1, 3))
    problem = problem_of(q, k)
    out = spec(4, 16, 300, 64)
    plan = plan_attention(problem, out, None, H200)
    assert plan.method == "wgmma"
    assert plan.forward.grid == H200.multiprocessors < 4 * 16 * 3
    maps = dict(zip("qkvo", plan._maps.tensors, strict=True))
    assert maps["q"].sizes == (64, 300, 4, 16, 1)
    assert maps["k"].sizes == (64, 300, 4, 1, 1)  # heads that broadcast are one
    assert all(stride % 16 == 0 for tensor in maps.values() for stride in tensor.strides)
    assert plan._maps.read([16 * i for i in range(16)])
    assert not plan._maps.read([16 * i + 2 for i in range(16)])


def test_more_batch_axes_than_a_map_has_go_to_another_family_with_the_same_workspace():
    shape = (2, 3, 2, 3, 300, 64)
    scattered = spec(*shape, order=(3, 2, 1, 0, 4, 5))
    problem = problem_of(scattered, num_splits=2, method="wgmma")
    plan = plan_attention(problem, spec(*shape), None, H200)
    assert plan.method == "mma"
    assert plan.workspace == workspace_bytes(problem, H200) > 0


def test_results_that_are_not_rounded_do_not_leave_by_a_map():
    q = spec(2, 100, 64)
    wide = spec(2, 100, 64, dtype=np.dtype(np.float32))
    for out, num_splits, count in ((q, None, 4), (wide, None, 3), (q, 2, 3)):
        keys = spec(2, 1000, 64)
        plan = plan_attention(problem_of(q, keys, num_splits=num_splits or 1), out, None, H200)
        assert len(plan._maps.tensors) == count
