"""Sequences end to end in the shipped kernels on the CPU: the laws, and ends nobody checked."""

from functools import partial

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import cuflash
from cuflash import engine
from cuflash.problem import AttentionArrays, AttentionProblem
from cuflash.testing.problems import AttentionCase
from cuflash.testing.strategies import varlen_problems
from cuflash.testing.varlen import VARLEN_PROPERTIES, VarlenCase
from tests.host_cuda import builder
from tests.host_cuda.test_attention import normal, on_host_cuda, use

pytestmark = pytest.mark.skipif(not builder.available(), reason="no C++ compiler")

PROBLEMS = varlen_problems(
    borders=(16, 32), max_tokens=40, max_sequences=5, max_batch_axes=2, max_products=400
)
ORDERS = st.sampled_from(builder.HostKernel.ORDERS)


@pytest.mark.parametrize("law", VARLEN_PROPERTIES)
def test_property(law):
    @settings(max_examples=max(1, settings().max_examples // 2))
    @given(case=PROBLEMS, splits=st.sampled_from((None, None, 2)), order=ORDERS)
    @example(  # many more sequences than a tile has rows, most of them empty
        case=VarlenCase(
            whole=AttentionCase(tq=40, tk=40), lengths=((0, 0),) * 50 + ((40, 40),) + ((0, 0),) * 9
        ),
        splits=None,
        order="forward",
    )
    def holds(case, splits, order):
        call = partial(cuflash.flash_attention_varlen, num_splits=splits)
        VARLEN_PROPERTIES[law](on_host_cuda(call, order=order), case)

    holds()


def test_one_launch_whose_grid_has_room_for_every_sequence(monkeypatch):
    executor = use(monkeypatch)
    q, k, v = (normal(seed, 3, 300, 8) for seed in range(3))
    ends = np.array([0, 1, 1, 150, 300])
    cuflash.flash_attention_varlen(q, k, v, ends, ends, num_splits=1)
    (launch,) = executor.launched
    assert launch.grid == 3 * (-(-300 // 128) + 4)


def test_short_sequences_take_the_tile_of_short_queries(monkeypatch):
    executor = use(monkeypatch)
    q, k, v = normal(0, 64, 8), normal(1, 640, 8), normal(2, 640, 8)
    single, packed = np.arange(65), np.arange(65) * 10
    cuflash.flash_attention_varlen(q, k, v, single, packed, num_splits=1)
    cuflash.flash_attention(q[:1], k, v, num_splits=1)
    assert len({launch.kernel for launch in executor.launched}) == 1


def monotone(ends, total):
    """What the kernels make of any list of ends, written down once more."""
    held = {len(ends) - 1: int(np.clip(ends[-1], 0, total))} | {0: 0}

    def hold(low, high):
        if high - low > 1:
            middle = (low + high) // 2
            held[middle] = int(np.clip(ends[middle], held[low], held[high]))
            hold(low, middle)
            hold(middle, high)

    hold(0, len(ends) - 1)
    return np.array([held[i] for i in range(len(ends))])


WILD = st.one_of(st.integers(-3, 45), st.sampled_from((-(2**63), 2**63 - 1, 2**40)))


def test_ends_that_nobody_checked_are_held_within_the_arrays(monkeypatch):
    use(monkeypatch)

    @given(count=st.integers(0, 7), data=st.data())
    def holds(count, data):
        q, k, v = normal(0, 30, 8), normal(1, 40, 8), normal(2, 40, 8)
        wild_q, wild_k = (
            np.array(data.draw(st.lists(WILD, min_size=count + 1, max_size=count + 1)), np.int64)
            for _ in range(2)
        )
        good = np.zeros(count + 1, np.int64)
        arrays = AttentionArrays(q, k, v, cu_seqlens_q=good, cu_seqlens_k=good)
        problem = AttentionProblem.of(arrays)
        arrays = arrays._replace(cu_seqlens_q=wild_q, cu_seqlens_k=wild_k)
        out, lse = np.full((30, 8), np.nan, np.float32), np.full(30, np.nan, np.float32)
        engine.load("device").attention(problem, arrays, out, lse, None)
        expected = cuflash.reference.attention_varlen(
            q, k, v, monotone(wild_q, 30), monotone(wild_k, 40)
        )
        np.testing.assert_allclose(out, expected[0], atol=1e-5)
        np.testing.assert_allclose(lse, expected[1], atol=1e-5)

    holds()
