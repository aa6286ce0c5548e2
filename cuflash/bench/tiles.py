"""Rows of the tables of attention's tiles: which one a problem takes, and calls by any tile."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from . import device
from .problems import AttentionShape, dtype_of
from .timing import Call

if TYPE_CHECKING:
    from ..device.attention_plans import TunedTile
    from ..device.attention_plans_mma import MmaChoice
    from ..device.attention_plans_wgmma import WgmmaChoice
    from ..device.executor import DeviceLimits
    from ..problem import AttentionProblem


def choice_of(
    table: str, shape: AttentionShape, limits: DeviceLimits
) -> WgmmaChoice | MmaChoice | None:
    """Return the row of a table, "wgmma" or "mma", that a problem takes, if it can run it."""
    from ..device.attention_plans import attention_methods, score_pipeline
    from ..device.attention_plans_mma import mma_choice
    from ..device.attention_plans_wgmma import wgmma_choice

    problem = _problem(shape)
    if table not in attention_methods(problem, limits):
        return None
    if table == "wgmma":
        return wgmma_choice(problem)
    return mma_choice(problem, score_pipeline(problem), limits)


def call_by(tile: TunedTile, shape: AttentionShape, arrays: tuple[Any, ...]) -> Call:
    """Return attention of q, k, v on the current device by a tile, into an array of its own."""
    import cupy

    from ..device.attention import compute
    from ..device.executor import CurrentDevice
    from ..problem import AttentionArrays

    operands, out = AttentionArrays(*arrays), cupy.empty_like(arrays[0])
    return partial(compute, _problem(shape), operands, out, None, None, CurrentDevice(), given=tile)


def warm_tiles(wanted: Iterable[tuple[AttentionShape, TunedTile]]) -> None:
    """Compile the kernels of problems by tiles, several at a time."""
    from ..device.attention_plans import plan_attention
    from ..device.compiler import KernelName, warm

    kernels: dict[KernelName, None] = {}  # in order, each once
    for shape, tile in wanted:
        problem = _problem(shape)
        plan = plan_attention(problem, problem.q, None, device.limits(), tile)
        if plan.forward is not None:
            kernels[plan.forward.kernel] = None
    warm(kernels)


def _problem(shape: AttentionShape) -> AttentionProblem:
    from ..problem import ArraySpec, AttentionArrays, AttentionProblem, c_strides

    size, dtype = (shape.batch, shape.heads, shape.tokens, shape.d), dtype_of(shape.dtype)
    spec = ArraySpec(size, c_strides(size, dtype.itemsize), np.dtype(dtype))
    return AttentionProblem.of(AttentionArrays(spec, spec, spec), causal=shape.causal)
