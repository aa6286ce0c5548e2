"""Descriptions of calls for gradients: what engines plan by."""

from typing import Any

import numpy as np
import pytest

from cuflash.problem import AttentionArrays, AttentionProblem
from cuflash.problem_vjp import AttentionGrads, AttentionResults, AttentionVjpProblem


def ones(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.ones(shape, dtype)


def describe(
    operands: AttentionArrays,
    grads: AttentionGrads,
    *,
    enable_gqa: bool = False,
    **flags: Any,
) -> AttentionVjpProblem:
    """Describe a call with results in C order."""
    forward = AttentionProblem.of(operands, enable_gqa=enable_gqa)
    shape = forward.out_shape
    if enable_gqa:
        shape = (*shape[:-4], shape[-4] * shape[-3], *shape[-2:])
    results = AttentionResults(ones(*shape), ones(*shape), ones(*shape[:-1]))
    return AttentionVjpProblem.of(forward, operands, results, grads, enable_gqa=enable_gqa, **flags)


def test_stride_0_says_what_is_summed() -> None:
    k = ones(1, 6, 8)
    operands = AttentionArrays(
        ones(2, 3, 5, 8), k, np.broadcast_to(k, (2, 3, 6, 8)), bias=ones(3, 1, 6), sinks=ones()
    )
    grads = AttentionGrads(
        *(ones(*x.shape) for x in operands[:3]), ones(3, 1, 6), np.ones((), np.float32)
    )
    problem = describe(operands, grads)
    assert problem.grads.dq.strides == (480, 160, 32, 4)
    assert problem.grads.dk.shape == (2, 3, 6, 8)
    assert problem.grads.dk.strides == (0, 0, 32, 4)
    # The view has one element for many indices; its gradient does not.
    assert problem.forward.v.strides == (0, 0, 32, 4)
    assert problem.grads.dv.strides == (576, 192, 32, 4)
    assert problem.grads.dbias.shape == (2, 3, 5, 6)
    assert problem.grads.dbias.strides == (0, 24, 0, 4)
    assert problem.grads.dsinks.strides == (0, 0)


def test_grouped_heads_are_two_axes() -> None:
    operands = AttentionArrays(
        ones(2, 6, 5, 8), ones(2, 2, 7, 8), ones(1, 2, 7, 4), bias=ones(1, 7), sinks=ones(6)
    )
    grads = AttentionGrads(
        *(ones(*x.shape) for x in operands[:3]), dbias=ones(1, 7), dsinks=ones(6)
    )
    problem = describe(operands, grads, enable_gqa=True)
    assert problem.grads.dq.shape == (2, 2, 3, 5, 8)
    assert problem.grads.dq.strides == (960, 480, 160, 32, 4)
    assert problem.grads.dk.strides == (448, 224, 0, 32, 4)
    assert problem.grads.dv.strides == (0, 112, 0, 16, 4)
    assert problem.grads.dbias.strides == (0, 0, 0, 0, 4)
    assert problem.grads.dsinks.strides == (0, 12, 4)
    assert problem.results.dout.shape == (2, 2, 3, 5, 4)
    assert problem.results.lse.strides == (120, 60, 20, 4)


def test_equal_calls_have_one_description() -> None:
    operands = AttentionArrays(ones(5, 8), ones(6, 8), ones(6, 8))
    grads = AttentionGrads(dk=ones(6, 8))
    problem = describe(operands, grads)
    assert describe(operands, grads) == problem
    assert hash(describe(operands, grads)) == hash(problem)
    assert describe(operands, grads, deterministic=True) != problem
    assert describe(operands, grads, method="tiled") != problem
    assert describe(operands, AttentionGrads(dk=ones(6, 16)[:, ::2])) != problem
    assert describe(operands, AttentionGrads(dv=ones(6, 8))) != problem


@pytest.mark.parametrize("enable_gqa", [False, True])
def test_all_that_a_call_can_ask_for(enable_gqa: bool) -> None:
    operands = AttentionArrays(
        *(ones(2, n, 8, dtype=np.float16) for n in (5, 6, 6)), bias=ones(2, 5, 6)
    )
    forward = AttentionProblem.of(operands, enable_gqa=enable_gqa)
    problem = AttentionVjpProblem.of_all(forward, operands, enable_gqa=enable_gqa)
    assert [x is None for x in problem.grads] == [False] * 4 + [True]
    assert problem.grads.dq.dtype == np.float16
    assert problem.results.dout.dtype == problem.results.dlse.dtype == np.float32
    assert problem.results.out.shape == forward.out_shape
    assert problem.results.dlse.shape == forward.lse_shape
