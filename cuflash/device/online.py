"""Merging partial results on the device, any number of parts.

As in `attention`, all but the functions of `Engine` works on arrays of any library through an
`Executor`.
"""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

import cupy
import numpy as np

from ..problem import ArraySpec
from . import memory
from .attention_plans_combine import plan_merge
from .executor import CurrentDevice, Executor
from .parameters import LISTED_PARTS

Pair = tuple[Any, Any]


def merge_softmax(parts: Sequence[Pair], maximum: Any, normalizer: Any) -> None:
    """Fill (maximum, normalizer) with the merge of (m, l) pairs, which broadcast to their shape.

    m = max m_i, l = sum of l_i * exp(m_i - m). With two parts the order changes no bit.
    """
    with memory.device_of(maximum):

        def array(x: Any) -> Any:
            x = cupy.asarray(x, maximum.dtype) if isinstance(x, numbers.Real) else memory.aligned(x)
            return cupy.broadcast_to(x, maximum.shape)

        results = [memory.aligned(x, copy=False) for x in (normalizer, maximum)]
        pairs = [(array(total), array(top)) for top, total in parts]
        merge(pairs, (results[0], results[1]), CurrentDevice())
        for result, given in zip(results, (normalizer, maximum), strict=True):
            memory.copy_unaligned(result, given)


def merge_attention(parts: Sequence[Pair], out: Any, lse: Any) -> None:
    """Fill (out, lse) with attention over the union of the parts' key sets.

    m = max lse_i, w_i = exp(lse_i - m), lse = m + log(sum of w_i) and out = sum of p_i * out_i with
    p_i = w_i / sum of w_i, in the dtype of `lse`. With two parts the order changes no bit. A part
    may be `out` itself.
    """
    with memory.device_of(out):
        results = [memory.aligned(x, copy=False) for x in (out, lse)]
        pairs = [(memory.aligned(o), memory.aligned(s)) for o, s in parts]
        merge(pairs, (results[0], results[1]), CurrentDevice())
        for result, given in zip(results, (out, lse), strict=True):
            memory.copy_unaligned(result, given)


def merge(parts: Sequence[Pair], results: Pair, executor: Executor) -> None:
    """Merge (out, lse) or (normalizer, maximum) pairs; all have the shapes of the results.

    More parts than one launch takes are merged from the left, into accumulators.
    """
    while len(parts) > LISTED_PARTS:
        lse = results[1]
        carry = (
            _accumulator(results[0].shape, lse.dtype, executor),
            _accumulator(lse.shape, lse.dtype, executor),
        )
        _merge(parts[:LISTED_PARTS], carry, executor)
        parts = [carry, *parts[LISTED_PARTS:]]
    _merge(parts, results, executor)


def _accumulator(shape: tuple[int, ...], dtype: np.dtype, executor: Executor) -> Any:
    nbytes = int(np.prod(shape)) * dtype.itemsize
    return executor.allocate(nbytes).view(dtype).reshape(shape)


def _merge(parts: Sequence[Pair], results: Pair, executor: Executor) -> None:
    pairs = [results, *parts]
    specs = [(ArraySpec.of(a), ArraySpec.of(b)) for a, b in pairs]
    plan = plan_merge(specs[0], tuple(specs[1:]), executor.limits)
    pointers = [executor.address(x) for pair in pairs for x in pair]
    for launch, parameters in plan.launches(pointers):
        executor.launch(launch, parameters)
