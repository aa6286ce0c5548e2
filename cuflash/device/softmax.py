"""The softmax family on the device: problem, plan, launches.

Everything but `softmax` itself works on arrays of any library through an `Executor`, so that the
tests run these plans on the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..problem import ArraySpec, SoftmaxProblem
from . import memory
from .executor import CurrentDevice, Executor
from .plans import SoftmaxPlan, TooManyAxes, plan_softmax


def softmax(
    problem: SoftmaxProblem, inputs: Sequence[Any], where: Any, outputs: Sequence[Any]
) -> None:
    """Fill `outputs` as `problem.operation` says; inputs and outputs in the order of the problem.

    Runs on the current stream of the arrays' device. The output of softmax and log_softmax may be
    the input itself. Integers are converted to float64 first; arrays whose elements lie at
    addresses that the device cannot read them from, and those whose axes do not merge into 6 kept
    and 4 reduced ones, are copied. Nothing else is allocated but the statistics of the naive
    method and those of the parts of rows that are split.

    Raises
    ------
    ValueError
        The method cannot run this problem; those that can are listed.
    """
    with memory.device_of(outputs[0]):
        sources = [memory.aligned(x) for x in inputs]
        targets = [memory.aligned(x, copy=False) for x in outputs]
        if any([source is not x for source, x in zip(sources, inputs, strict=True)]):
            problem = with_inputs(problem, sources)
        compute(problem, sources, where, targets, CurrentDevice())
        for target, output in zip(targets, outputs, strict=True):
            memory.copy_unaligned(target, output)


def with_inputs(problem: SoftmaxProblem, inputs: Sequence[Any]) -> SoftmaxProblem:
    """Return the problem as it reads for other arrays of the same values."""
    specs = tuple(
        ArraySpec.of(x).broadcast_to(spec.shape, "x")
        for x, spec in zip(inputs, problem.inputs, strict=True)
    )
    return problem if specs == problem.inputs else replace(problem, inputs=specs)


def compute(
    problem: SoftmaxProblem,
    inputs: Sequence[Any],
    where: Any,
    outputs: Sequence[Any],
    executor: Executor,
) -> None:
    """Do what `softmax` says with aligned arrays of the executor's library."""
    if any(spec.dtype.kind in "biu" for spec in problem.inputs):
        inputs = [x.astype(np.float64) if x.dtype.kind in "biu" else x for x in inputs]
        problem = with_inputs(problem, inputs)
    arrays = [*inputs, *([] if where is None else [where]), *outputs]
    pointers = [executor.address(x) for x in arrays]
    vectors = all(pointer % 16 == 0 for pointer in pointers)
    try:
        plan = plan_softmax(
            problem, tuple(ArraySpec.of(x) for x in outputs), vectors, executor.limits
        )
    except TooManyAxes:
        _compute_copied(problem, inputs, where, outputs, executor)
        return
    if plan.workspaces:
        workspace = executor.allocate(plan.workspace_bytes)
        launch_plan(plan, pointers, executor.address(workspace), executor)
    else:
        launch_plan(plan, pointers, 0, executor)


def launch_plan(
    plan: SoftmaxPlan, pointers: Sequence[int], workspace: int, executor: Executor
) -> None:
    """Start a plan's kernels: allocates, synchronises and, once they are loaded, compiles nothing.

    Parameters
    ----------
    plan : SoftmaxPlan
        From `plan_softmax`.
    pointers : sequence of int
        Addresses of the inputs, of `where` if the problem has one, and of the outputs.
    workspace : int
        Address of `plan.workspace_bytes` bytes, aligned to 16; not read if there are none.
    executor : Executor
        Where the kernels run.
    """
    parameters = plan.parameters(pointers, workspace)
    for launch in plan.launches:
        executor.launch(launch, parameters)


def _compute_copied(
    problem: SoftmaxProblem,
    inputs: Sequence[Any],
    where: Any,
    outputs: Sequence[Any],
    executor: Executor,
) -> None:
    """Copy all operands to (rows, columns), where their axes merge into one each, and back."""
    shape, axes = problem.operand.shape, problem.axes
    order = (*(a for a in range(len(shape)) if a not in axes), *axes)

    def flat(x: Any, spec: ArraySpec) -> Any:
        moved = executor.broadcast_to(x, spec.shape).transpose(order)
        kept, reduced = moved.shape[: -len(axes) or None], moved.shape[len(shape) - len(axes) :]
        return moved.reshape(math.prod(kept), math.prod(reduced)).copy()

    sources = [flat(x, spec) for x, spec in zip(inputs, problem.inputs, strict=True)]
    mask = None if where is None else flat(where, problem.where)  # type: ignore[arg-type]
    targets = [flat(x, ArraySpec.of(x)) for x in outputs]
    compute(
        replace(
            problem,
            inputs=tuple(map(ArraySpec.of, sources)),
            axes=(1,),
            where=None if mask is None else ArraySpec.of(mask),
            out_shape=targets[0].shape,
        ),
        sources,
        mask,
        targets,
        executor,
    )
    for target, output in zip(targets, outputs, strict=True):
        permuted = output.transpose(order)
        permuted[...] = target.reshape(permuted.shape)
