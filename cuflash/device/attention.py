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

from ..problem import ArraySpec, AttentionArrays, AttentionProblem
from . import attention_plans as plans
from . import memory
from .attention_plans import INTEGER_OPTIONS, AttentionPlan, plan_attention, workspace_bytes
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
        sources = AttentionArrays(*[x if x is None else memory.readable(x) for x in arrays])
        out_memory = memory.aligned(out, copy=False)
        lse_memory = None if lse is None else memory.aligned(lse, copy=False)
        problem = respecified(problem, arrays, sources)
        compute(problem, sources, out_memory, lse_memory, workspace, CurrentDevice())
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
) -> None:
    """Do what `attention` says with aligned arrays of the executor's library."""
    plan = plan_attention(
        problem,
        ArraySpec.of(out),
        None if lse is None else ArraySpec.of(lse),
        executor.limits,
    )
    if plan.workspace and workspace is None:
        workspace = executor.allocate(plan.workspace)

    operands = (*arrays, out, lse)
    launch_plan(
        plan,
        [0 if x is None or type(x) is int else executor.address(x) for x in operands],
        [
            x if type(x) is int else None
            for x in (getattr(arrays, name) for name in INTEGER_OPTIONS)
        ],
        executor.address(workspace) if plan.workspace else 0,
        executor,
    )


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
