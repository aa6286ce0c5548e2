"""Gradients of attention on the device: problem, plan, launches.

As in `attention`, everything but the functions of `Engine` works on arrays of any library through
an `Executor`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cupy
import numpy as np

from ..problem import ArraySpec, AttentionArrays
from ..problem_vjp import AttentionGrads, AttentionResults, AttentionVjpProblem
from . import attention_vjp_plans as plans
from . import memory
from .attention import respecified
from .attention_vjp_plans import plan_attention_vjp, vjp_workspace_bytes
from .executor import CurrentDevice, Executor, device_limits


def attention_vjp_methods(problem: AttentionVjpProblem) -> tuple[str, ...]:
    """Return the kernel families that can run this problem here, the fastest first."""
    return plans.attention_vjp_methods(problem, device_limits(cupy.cuda.runtime.getDevice()))


def attention_vjp_workspace(problem: AttentionVjpProblem) -> int:
    """Return the bytes of workspace for this problem on the current device."""
    return vjp_workspace_bytes(problem, device_limits(cupy.cuda.runtime.getDevice()))


def attention_vjp(
    problem: AttentionVjpProblem,
    arrays: AttentionArrays,
    results: AttentionResults,
    grads: AttentionGrads,
    workspace: Any,
) -> None:
    """Fill the gradients that are not None, on the current stream of the arrays' device.

    What is copied, uploaded or allocated is as in `attention`.
    """
    with memory.device_of(arrays.q):
        executor = CurrentDevice()
        on_device = np.ndarray not in map(type, arrays)
        if on_device and compute(problem, arrays, results, grads, workspace, executor):
            return
        sources = AttentionArrays(*[x if x is None else memory.readable(x) for x in arrays])
        read = AttentionResults(*[x if x is None else memory.readable(x) for x in results])
        written = AttentionGrads(
            *[x if x is None else memory.aligned(x, copy=False) for x in grads]
        )
        problem = with_copies(problem, (arrays, sources), read, written)
        compute(problem, sources, read, written, workspace, executor)
        for source, target in zip(written, grads, strict=True):
            memory.copy_unaligned(source, target)


def with_copies(
    problem: AttentionVjpProblem,
    operands: tuple[AttentionArrays, AttentionArrays],
    results: AttentionResults,
    grads: AttentionGrads,
) -> AttentionVjpProblem:
    """Return the problem with the strides of what may have been copied; operands before, after."""
    return replace(
        problem,
        forward=respecified(problem.forward, *operands),
        results=AttentionResults(*[x if x is None else ArraySpec.of(x) for x in results]),
        grads=AttentionGrads(
            *[
                x if x is None else ArraySpec.of(x).broadcast_to(spec.shape, name)
                for name, spec, x in zip(grads._fields, problem.grads, grads, strict=True)
            ]
        ),
    )


def compute(
    problem: AttentionVjpProblem,
    arrays: AttentionArrays,
    results: AttentionResults,
    grads: AttentionGrads,
    workspace: Any,
    executor: Executor,
) -> bool:
    """Do what `attention_vjp` says with arrays of the executor's library, or nothing: False.

    It does nothing if some elements do not lie at multiples of their size.
    """
    if any(x is not None and not x.size for x in grads):
        # Of gradients without elements, strides do not tell which axes they are summed along.
        grads = AttentionGrads(*[x if x is not None and x.size else None for x in grads])
        asked = [None if x is None else spec for x, spec in zip(grads, problem.grads, strict=True)]
        problem = replace(problem, grads=AttentionGrads(*asked))
    plan = plan_attention_vjp(problem, executor.limits)
    if any(getattr(grads, name).dtype.itemsize == 2 for name in plan.added):
        return _compute_in_float32(problem, arrays, results, grads, workspace, executor)
    pointers = [
        0 if x is None or type(x) is int else executor.address(x)
        for x in (*arrays, *results, *grads)
    ]
    if not plan.reads(pointers):
        return False
    if not plan.maps_read(pointers):
        others = plans.attention_vjp_methods(problem, executor.limits)[1:]
        problem = replace(problem, method=others[0])
        return compute(problem, arrays, results, grads, workspace, executor)
    if plan.workspace and workspace is None:
        workspace = executor.allocate(plan.workspace)
    integers = [
        x if type(x) is int else None
        for x in (arrays.query_offset, arrays.query_lengths, arrays.key_lengths)
    ]
    scratch = executor.address(workspace) if plan.workspace else 0
    for launch, parameters in plan.launches(pointers, integers, scratch):
        executor.launch(launch, parameters)
    return True


def _compute_in_float32(
    problem: AttentionVjpProblem,
    arrays: AttentionArrays,
    results: AttentionResults,
    grads: AttentionGrads,
    workspace: Any,
    executor: Executor,
) -> bool:
    """Compute with copies, for gradients that launches add to: 16 bits would round each sum."""

    def widened(x: Any) -> Any:
        return x if x is None or x.dtype.itemsize != 2 else x.astype(np.float32)

    operands = arrays._replace(**{name: widened(getattr(arrays, name)) for name in ("q", "k", "v")})
    read, written = map(widened, results), AttentionGrads(*map(widened, grads))
    wide_results = AttentionResults(*read)
    wide = with_copies(problem, (arrays, operands), wide_results, written)
    wide = replace(wide, method="auto")  # which may have been one of 16 bits
    done = compute(wide, operands, wide_results, written, workspace, executor)
    for source, target in zip(written, grads, strict=True):
        if source is not target:
            target[...] = source.astype(target.dtype)
    return done
