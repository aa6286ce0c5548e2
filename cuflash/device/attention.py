"""Attention on the device: problem, plan, launches.

Everything but the functions of `Engine` works on arrays of any library through an `Executor`, so
that the tests run these plans on the CPU.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import cupy
import numpy as np

from ..problem import ArraySpec, AttentionArrays, AttentionProblem
from . import attention_plans as plans
from . import memory
from .attention_plans import AttentionPlan, TunedTile, plan_attention, workspace_bytes
from .executor import CurrentDevice, Executor, device_limits


def attention_methods(problem: AttentionProblem) -> tuple[str, ...]:
    """Return the kernel families that can run this problem here."""
    return plans.attention_methods(problem, device_limits(cupy.cuda.runtime.getDevice()))


def attention_workspace(problem: AttentionProblem) -> int:
    """Return the bytes of workspace for this problem on the current device."""
    return workspace_bytes(problem, device_limits(cupy.cuda.runtime.getDevice()))


def attention(
    problem: AttentionProblem, arrays: AttentionArrays, out: Any, lse: Any, workspace: Any
) -> None:
    """Fill `out` and, unless None, `lse`, on the current stream of the arrays' device.

    Arrays whose elements lie at addresses that the device cannot read them from are copied, lengths
    and offsets that are NumPy arrays are uploaded, and a workspace is allocated if none is given.
    """
    with memory.device_of(out):
        executor = CurrentDevice()
        on_device = np.ndarray not in map(type, arrays)
        if on_device and compute(problem, arrays, out, lse, workspace, executor):
            return
        sources = AttentionArrays(*[x if x is None else memory.readable(x) for x in arrays])
        out_memory = memory.aligned(out, copy=False)
        lse_memory = None if lse is None else memory.aligned(lse, copy=False)
        problem = respecified(problem, arrays, sources)
        compute(problem, sources, out_memory, lse_memory, workspace, executor)
        memory.copy_unaligned(out_memory, out)
        memory.copy_unaligned(lse_memory, lse)


def respecified(
    problem: AttentionProblem, given: AttentionArrays, sources: AttentionArrays
) -> AttentionProblem:
    """Return the problem with the strides of arrays that were copied."""
    if all(map(operator.is_, sources, given)):
        return problem
    copies: dict[str, Any] = {
        name: ArraySpec.of(source).broadcast_to(getattr(problem, name).shape, name)
        for name, source in sources._asdict().items()
        if source is not getattr(given, name)
    }
    return replace(problem, **copies)


def compute(
    problem: AttentionProblem,
    arrays: AttentionArrays,
    out: Any,
    lse: Any,
    workspace: Any,
    executor: Executor,
    given: TunedTile | None = None,
) -> bool:
    """Do what `attention` says with arrays of the executor's library, or nothing and say False.

    It does nothing if some elements do not lie at multiples of their size. With a tile given it
    runs by that one, whatever the tables say.
    """
    plan = plan_attention(
        problem,
        ArraySpec(out.shape, out.strides, out.dtype),
        None if lse is None else ArraySpec(lse.shape, lse.strides, lse.dtype),
        executor.limits,
        given,
    )
    pointers = [
        0 if x is None or type(x) is int else executor.address(x) for x in (*arrays, out, lse)
    ]
    if not plan.reads(pointers):
        return False
    if not plan.maps_read(pointers):
        problem = replace(problem, method="mma", num_splits=plan.splits)
        return compute(problem, arrays, out, lse, workspace, executor)
    if plan.workspace and workspace is None:
        workspace = executor.allocate(plan.workspace)
    integers = [
        x if type(x) is int else None
        for x in (arrays.query_offset, arrays.query_lengths, arrays.key_lengths)
    ]
    scratch = executor.address(workspace) if plan.workspace else 0
    launch_plan(plan, pointers, integers, scratch, executor)
    return True


def launch_plan(
    plan: AttentionPlan,
    pointers: Sequence[int],
    integers: Sequence[int | None],
    workspace: int,
    executor: Executor,
) -> None:
    """Start a plan's kernels: allocates, synchronises and, once they are loaded, compiles nothing.

    Parameters
    ----------
    plan : AttentionPlan
        From `plan_attention`.
    pointers, integers, workspace
        As `AttentionPlan.launches` takes them.
    executor : Executor
        Where the kernels run.
    """
    for launch, parameters in plan.launches(pointers, integers, workspace):
        executor.launch(launch, parameters)
