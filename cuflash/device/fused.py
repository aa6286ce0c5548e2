"""Fused chains on the device: problem, plan, launches.

As in `attention`, all but the functions of `Engine` works on arrays of any library through an
`Executor`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import cupy

from ..problem import ArraySpec
from ..problem_fused import (
    Dropout,
    LayerNormArrays,
    LayerNormGrads,
    LayerNormProblem,
    MatmulProblem,
)
from . import memory
from .executor import CurrentDevice, Executor
from .fused_plans import is_fetched, plan_epilogue, plan_matmul, takes_library, tensor_cores
from .layer_norm_plans import are_packed, partial_bytes, plan_layer_norm, row_stride
from .tensor_map import ALIGNMENT


def matmul_bias_activation(problem: MatmulProblem, a: Any, b: Any, bias: Any, out: Any) -> None:
    """Fill `out` on the current stream of the arrays' device.

    Operands of tensor cores whose rows do not lie at multiples of 16 bytes are copied. Deep
    products of float32 and float64 are cuBLAS's, and their epilogue is a kernel of its own.
    """
    with memory.device_of(out):
        sources = [memory.aligned(x) for x in (a, b, bias)]
        target = memory.aligned(out, copy=False)
        if takes_library(problem, CurrentDevice().limits) and target.size:
            product = target if target.flags.c_contiguous else cupy.empty_like(target, order="C")
            cupy.matmul(*sources[:2], out=product)
            compute_epilogue(problem, product, sources[2], CurrentDevice())
            if product is not target:
                target[...] = product
        else:
            compute_matmul(problem, sources, target, CurrentDevice())
        memory.copy_unaligned(target, out)


def compute_epilogue(problem: MatmulProblem, product: Any, bias: Any, executor: Executor) -> None:
    """Turn a product in C order, of the executor's library, into activation(product + bias)."""
    bias = _contiguous(bias)
    pointers = executor.address(product), executor.address(bias)
    executor.launch(*plan_epilogue(problem, *pointers, executor.limits))


def compute_matmul(
    problem: MatmulProblem, sources: Sequence[Any], out: Any, executor: Executor
) -> None:
    """Do what `matmul_bias_activation` says with aligned arrays of the executor's library."""
    a, b, bias = sources
    if not bias.flags.c_contiguous or executor.address(bias) % ALIGNMENT:
        bias = bias.copy()
    if tensor_cores(problem, executor.limits):
        a, b = _fetched("a", a, executor), _fetched("b", b, executor)
    specs = [
        ArraySpec.of(x).broadcast_to((*problem.batch_shape, *x.shape[-2:]), name)
        for name, x in (("a", a), ("b", b))
    ]
    pointers = [executor.address(x) for x in (a, b, out, bias)]
    plan = plan_matmul(
        replace(problem, a=specs[0], b=specs[1]),
        ArraySpec.of(out),
        pointers[2] % ALIGNMENT == 0,
        executor.limits,
    )
    for launch, parameters in plan.launches(pointers):
        executor.launch(launch, parameters)


def _fetched(name: str, x: Any, executor: Executor) -> Any:
    """Return a matrix that can be copied by 16 bytes: itself, or a copy with rows filled up."""
    if executor.address(x) % ALIGNMENT == 0 and is_fetched(name, ArraySpec.of(x)):
        return x
    *outer, columns = x.shape
    vector = ALIGNMENT // x.dtype.itemsize
    shape = (*outer, -(-columns // vector) * vector)
    copy = executor.allocate(math.prod(shape) * x.dtype.itemsize).view(x.dtype).reshape(shape)
    copy = copy[..., :columns]
    copy[...] = x
    return copy


def dropout_bias_layer_norm(
    problem: LayerNormProblem,
    dropout: Dropout,
    arrays: LayerNormArrays,
    y: Any,
    mean: Any,
    rstd: Any,
) -> None:
    """Fill `y` and, unless None, `mean` and `rstd`, on the current stream of the arrays' device.

    Operands whose rows do not lie at one distance are copied.
    """
    with memory.device_of(y):
        compute_layer_norm(problem, dropout, _aligned(arrays), (y, mean, rstd), CurrentDevice())


def dropout_bias_layer_norm_vjp(
    problem: LayerNormProblem, dropout: Dropout, arrays: LayerNormArrays, grads: LayerNormGrads
) -> None:
    """Fill the gradients, on the current stream of the arrays' device.

    Allocates the sums of rows that teams of threads have, about 13 MB on an H200.
    """
    with memory.device_of(grads.dx):
        compute_layer_norm(problem, dropout, _aligned(arrays), grads, CurrentDevice())


def _aligned(arrays: LayerNormArrays) -> LayerNormArrays:
    return LayerNormArrays(*(x if x is None else memory.aligned(x) for x in arrays))


def compute_layer_norm(
    problem: LayerNormProblem,
    dropout: Dropout,
    arrays: LayerNormArrays,
    results: tuple[Any, Any, Any] | LayerNormGrads,
    executor: Executor,
) -> None:
    """Fill (y, mean, rstd) or gradients with aligned arrays of the executor's library.

    Results lie in C order.
    """
    grads = results if isinstance(results, LayerNormGrads) else None
    rows, columns = math.prod(problem.rows_shape), problem.columns
    itemsize, address = problem.dtype.itemsize, executor.address
    inputs = [_with_even_rows(x) for x in (arrays.x, arrays.residual, arrays.dy)]
    vectors = [_contiguous(x) for x in (arrays.bias, arrays.gamma, arrays.beta)]
    if grads is None:
        outputs, statistics = [results[0], None], list(results[1:])
        sums = []
    else:
        outputs = [grads.dx, grads.dresidual]
        statistics = [_contiguous(x) for x in (arrays.mean, arrays.rstd)]
        sums = [grads.dbias, grads.dgamma, grads.dbeta]
    pointers = [0 if x is None else address(x) for x in (*inputs, *outputs, *vectors)]
    strides = [
        (x is not None and row_stride(x.shape, x.strides, itemsize)) or 0
        for x in (*inputs, *outputs)
    ]
    plan = plan_layer_norm(
        problem.dtype,
        rows,
        columns,
        are_packed(columns, itemsize, pointers, strides),
        arrays.residual is not None,
        grads is not None,
        tuple(stride // itemsize for stride in strides),
        problem.eps,
        executor.limits,
    )
    if grads is not None:
        partial = executor.allocate(partial_bytes(plan, columns, problem.accumulator))
        sums.insert(0, partial)
    pointers += [0 if x is None else address(x) for x in statistics]
    pointers += [address(x) for x in sums] or [0] * 4
    parameters = plan.parameters(pointers, dropout)
    for launch in plan.launches:
        executor.launch(launch, parameters)


def _contiguous(x: Any) -> Any:
    return x if x is None or x.flags.c_contiguous else x.copy()


def _with_even_rows(x: Any) -> Any:
    """Return `x` if its columns lie end to end and its rows at one distance, else a copy."""
    if x is None or row_stride(x.shape, x.strides, x.dtype.itemsize) is not None:
        return x
    return x.copy()
