"""What `auto` takes for an attention problem on a device, and why: for ``cuflash info``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import numpy as np

from ..problem import ArraySpec, AttentionProblem, accumulator, c_strides
from .attention_plans import SIMT_TILES, attention_obstacles, plan_attention
from .attention_plans_decode import DECODE_TILES
from .attention_plans_mma import MMA_TILES
from .attention_plans_wgmma import WGMMA_TILES
from .executor import DeviceLimits


def report(problem: AttentionProblem, limits: DeviceLimits) -> Iterator[str]:
    """Yield lines: each family and its obstacle, then the plan of the one that is taken."""
    out = _dense(problem.out_shape, problem.dtype)
    lse = _dense(problem.lse_shape, accumulator(problem.dtype))
    plan = plan_attention(problem, out, lse, limits)
    for method, obstacle in attention_obstacles(problem, limits).items():
        taken = "taken" if method == plan.method else "could run it, more slowly"
        yield f"{method:8}{obstacle or taken}"
    if plan.forward is None:
        yield "there is nothing to write: no kernel runs"
        return
    yield ""
    yield f"kernel  {plan.forward.kernel.source}: {plan.forward.kernel.expression}"
    yield f"tile    {plan.tile.queries} queries x {plan.tile.keys} keys: {_reason(plan.tile)}"
    yield (
        f"launch  {plan.forward.grid} blocks of {plan.forward.block} threads, "
        f"{plan.forward.shared_bytes} bytes of shared memory each"
    )
    if plan.combine is None:
        yield "keys    in one share"
    else:
        yield f"keys    in {plan.splits} shares, merged by {plan.combine.kernel.expression}"
    yield f"memory  {plan.workspace} bytes of workspace beside out and lse"


def _dense(shape: tuple[int, ...], dtype: np.dtype) -> ArraySpec:
    return ArraySpec(shape, c_strides(shape, dtype.itemsize), dtype)


def _reason(tile: object) -> str:
    """Return why the tables have a tile."""
    tables: tuple[Iterable[Any], ...] = (WGMMA_TILES, MMA_TILES, DECODE_TILES, SIMT_TILES)
    return next(choice.reason for choice in chain(*tables) if choice.tile == tile)
