"""How blocks that stay share out the tiles of a grid."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.host_cuda import builder
from tests.host_cuda.test_shim import run

pytestmark = pytest.mark.skipif(not builder.available(), reason="no C++ compiler")


def deal(rows, entries, multiprocessors, single=0):
    """Return how often each tile is taken, and how long each block works under a causal mask."""
    tiles = (rows + single) * entries
    blocks = min(tiles, multiprocessors)
    result = np.zeros(tiles + blocks, np.int32)
    shape = np.array([rows + single, tiles, single], np.int32)
    run("deal", shape, result, grid=blocks, block=1)
    return result[:tiles], result[tiles:]


@given(
    rows=st.integers(1, 40),
    entries=st.integers(1, 40),
    blocks=st.integers(1, 140),
    single=st.integers(0, 9),
)
def test_every_tile_is_taken_once(rows, entries, blocks, single):
    taken, _ = deal(rows, entries, blocks, single)
    assert (taken == 1).all()


@given(rows=st.integers(1, 20), entries=st.integers(1, 40), blocks=st.integers(1, 140))
def test_blocks_work_equally_long(rows, entries, blocks):
    """Under a causal mask too: no two differ by more than a pair of row tiles, or a bit."""
    _, work = deal(2 * rows, entries, blocks)
    assert np.ptp(work) <= 2 * rows + 1


def test_few_tiles_are_spread_over_all_blocks():
    _, work = deal(2, 66, 132)
    assert np.ptp(work) <= 1
    _, work = deal(4, 33, 132)
    assert (work > 0).all()


@pytest.mark.parametrize("sequences", [2, 8, 32])
def test_tiles_that_may_be_empty_change_no_block_s_others(sequences):
    """Whatever their number: of equal sequences the work is dealt out as that of one problem."""
    _, alone = deal(128, 16, 132)
    _, work = deal(128, 16, 132, sequences)
    np.testing.assert_array_equal(work, alone)
