"""What `auto` takes for an attention problem and its gradients, and why: for ``cuflash info``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np

from ..problem import ArraySpec, AttentionProblem, accumulator, c_strides
from ..problem_vjp import AttentionGrads, AttentionResults, AttentionVjpProblem
from .attention_plans import FEW_QUERIES, SIMT_TILES, attention_obstacles, plan_attention
from .attention_plans_decode import DECODE_TILES
from .attention_plans_dmma import DMMA_TILES
from .attention_plans_mma import MMA_TILES, SM75_TILES
from .attention_plans_tf32 import TF32_TILES
from .attention_plans_wgmma import AXES_OBSTACLE, WGMMA_TILES, WgmmaTile, wgmma_choice
from .attention_vjp_plans import attention_vjp_obstacles, plan_attention_vjp
from .executor import DeviceLimits

#: What a kernel is, by its file.
_KERNELS = {
    "attention/forward_wgmma.cu": "16 bits on Hopper: wgmma, of tiles that TMA fetches",
    "attention/decode_mma.cu": "16 bits, few queries: the warps of a block share its keys",
    "attention/forward_mma.cu": "16 bits on tensor cores, by mma.sync",
    "attention/forward_mma_sm75.cu": "float16 on tensor cores, by the mma.sync of sm_75",
    "attention/forward_dmma.cu": "float64 on tensor cores (DMMA)",
    "attention/forward_tf32.cu": "float32 on tensor cores, a product in three of TF32",
    "attention/forward_simt.cu": "plain CUDA: any dtype, shape and option",
}


def report(problem: AttentionProblem, limits: DeviceLimits) -> Iterator[str]:
    """Yield lines: each family and its obstacle, then the plan of the one that is taken."""
    out = _dense(problem.out_shape, problem.dtype)
    lse = _dense(problem.lse_shape, accumulator(problem.dtype))
    plan = plan_attention(problem, out, lse, limits)
    obstacles = attention_obstacles(problem, limits)
    if obstacles["wgmma"] is None and plan.method != "wgmma":
        obstacles["wgmma"] = AXES_OBSTACLE
    few = problem.mean_tq <= FEW_QUERIES
    yield from _families(obstacles, plan.method, few_queries=few)
    if plan.forward is None:
        yield "there is nothing to write: no kernel runs"
        return
    yield ""
    yield f"kernel  {plan.forward.kernel.source}: {plan.forward.kernel.expression}"
    yield f"        {_KERNELS[plan.forward.kernel.source]}"
    reason = _reason(problem, plan.tile)
    yield f"tile    {plan.tile.queries} queries x {plan.tile.keys} keys: {reason}"
    yield (
        f"launch  {plan.forward.grid} blocks of {plan.forward.block} threads, "
        f"{plan.forward.shared_bytes} bytes of shared memory each"
    )
    if plan.splits == 1:
        yield "keys    in one share"
    elif plan.combine is None:
        yield f"keys    in {plan.splits} shares, merged by the clusters of their blocks"
    else:
        yield f"keys    in {plan.splits} shares, merged by {plan.combine.kernel.expression}"
    yield f"memory  {plan.workspace} bytes of workspace beside out and lse"
    if plan.method == "wgmma":
        yield "arrays  that begin at no multiple of 16 bytes, which TMA needs, go to mma"
    yield ""
    yield "gradients of q, k and v"
    for line in _gradients(problem, out, lse, limits):
        yield f"    {line}"


def _gradients(
    problem: AttentionProblem, out: ArraySpec, lse: ArraySpec, limits: DeviceLimits
) -> Iterator[str]:
    vjp = AttentionVjpProblem(
        forward=replace(problem, num_splits=None),
        results=AttentionResults(out, out, lse),
        grads=AttentionGrads(problem.q, problem.k, problem.v),
        deterministic=False,
        method="auto",
    )
    plan = plan_attention_vjp(vjp, limits)
    yield from _families(attention_vjp_obstacles(vjp, limits), plan.method)
    for launch in chain.from_iterable(stage.kernels for stage in plan.stages):
        yield f"kernel  {launch.kernel.source}: {launch.kernel.expression}, {launch.grid} blocks"
    yield f"memory  {plan.workspace} bytes of workspace"


def _families(
    obstacles: Mapping[str, str | None], taken: str, *, few_queries: bool = False
) -> Iterator[str]:
    slower = {"mma": "mma.sync is slower than wgmma", "simt": "without tensor cores"}
    if taken == "simt" and few_queries:
        slower["mma"] = f"{FEW_QUERIES} queries or fewer leave most of its tiles empty"
    elif taken == "simt":
        slower["mma"] = "on this GPU three products in TF32 are slower than one in float32"
    for method, obstacle in obstacles.items():
        able = "taken" if method == taken else f"could run it, more slowly: {slower.get(method)}"
        yield f"{method:8}{obstacle or able}"


def _dense(shape: tuple[int, ...], dtype: np.dtype) -> ArraySpec:
    return ArraySpec(shape, c_strides(shape, dtype.itemsize), dtype)


def _reason(problem: AttentionProblem, tile: object) -> str:
    """Return why the tables have a tile."""
    if isinstance(tile, WgmmaTile):
        wgmma = wgmma_choice(problem)
        measured = " (rates over cuDNN's at T = 512, 2048 and 8192 on an H200)"
        return wgmma.reason + measured * (wgmma in WGMMA_TILES)
    for decode in DECODE_TILES:
        if tile in (decode.tile, decode.clustered):
            return decode.reason
    tables: tuple[Iterable[Any], ...] = MMA_TILES, SM75_TILES, DMMA_TILES, TF32_TILES, SIMT_TILES
    return next(choice.reason for choice in chain(*tables) if choice.tile == tile)
