"""The plain formulas in CuPy, and attention whose first two operations are one kernel."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import cupy
import numpy as np

from ..problem import (
    ArraySpec,
    AttentionArrays,
    AttentionProblem,
    SoftmaxProblem,
    accumulator,
    softcap_linear,
)
from ..problem_fused import (
    ACTIVATIONS,
    Dropout,
    LayerNormArrays,
    LayerNormProblem,
    MatmulProblem,
)
from . import memory
from .attention import respecified
from .baselines_plans import STEP_PARAMETERS, plan_scores, step_launch
from .executor import CurrentDevice, Executor
from .fused import compute_layer_norm, compute_matmul
from .layer_norm_plans import write_dropout
from .softmax import softmax

#: Positions are kept this far from the ends of int64 at most, so that window sides can be added.
_FAR = 2**62


def materialized_attention(
    problem: AttentionProblem, arrays: AttentionArrays, out: Any, lse: Any | None
) -> None:
    """Fill `out` with softmax(scale * q @ k.T) @ v, one whole-array operation at a time, and `lse`.

    Allocates two arrays of all scores, with options more, and synchronises once.
    """
    if 0 in problem.lse_shape:
        return
    sources = AttentionArrays(*map(memory.readable, arrays))
    bare = problem.softcap is problem.left is problem.right is None
    if bare and all(x is None for x in sources[3:]) and bool(cupy.isfinite(sources.v).all()):
        three_operations(problem, sources, out, lse)
    else:
        lse = cupy.empty(problem.lse_shape, accumulator(problem.dtype)) if lse is None else lse
        formula(problem, sources, out, lse)


def three_operations(
    problem: AttentionProblem, arrays: AttentionArrays, out: Any, lse: Any | None
) -> None:
    """Compute S = scale * q @ k.T, P = softmax(S) and P @ v where every row sees every key.

    S and P are in the accumulator's dtype. lse takes one more pass over S.
    """
    q, k, v = (x.astype(accumulator(problem.dtype), copy=False) for x in arrays[:3])
    s = cupy.matmul(q * q.dtype.type(problem.scale), k.swapaxes(-1, -2))
    p = cupy.empty_like(s)
    softmax(SoftmaxProblem.of("softmax", {"x": s}, -1), [s], None, [p])
    if lse is not None:
        log = cupy.empty((*s.shape[:-1], 1), s.dtype)
        softmax(SoftmaxProblem.of("logsumexp", {"x": s}, -1), [s], None, [log])
        # Of an infinite score logsumexp makes inf, attention NaN.
        lse[...] = cupy.where(log == np.inf, log.dtype.type(np.nan), log)[..., 0]
    del s
    out[...] = cupy.matmul(p, v)


def formula(problem: AttentionProblem, arrays: AttentionArrays, out: Any, lse: Any) -> None:
    """Do what `materialized_attention` says with aligned arrays."""
    dtype = accumulator(problem.dtype)
    q, k, v = (x.astype(dtype) for x in arrays[:3])
    rows = cupy.arange(problem.tq, dtype=np.int64)[:, None]
    keys = cupy.arange(problem.tk, dtype=np.int64)
    query_lengths = _integers(arrays.query_lengths, problem.tq, 0, problem.tq)
    key_lengths = _integers(arrays.key_lengths, problem.tk, 0, problem.tk)
    offset = key_lengths - query_lengths
    if arrays.query_offset is not None:
        offset = _integers(arrays.query_offset, 0, -_FAR, _FAR)
    distance = rows + offset - keys
    used = rows < query_lengths

    s = cupy.matmul(q, k.swapaxes(-1, -2)) * dtype.type(problem.scale)
    if problem.softcap is not None:
        cap = dtype.type(problem.softcap)
        linear = cupy.abs(s) < cap * dtype.type(softcap_linear(dtype))
        s = cupy.where(linear, s, cupy.tanh(s / cap) * cap)
    if arrays.bias is not None:
        wide = np.result_type(accumulator(arrays.bias.dtype), dtype)
        s = (s.astype(wide) + arrays.bias.astype(wide)).astype(dtype)
    if arrays.alibi_slopes is not None:
        slopes = arrays.alibi_slopes.astype(dtype)[..., None, None]
        s = s - slopes * cupy.abs(distance).astype(dtype)

    seen = used & (keys < key_lengths)
    if problem.left is not None:
        seen = seen & (distance <= problem.left)
    if problem.right is not None:
        seen = seen & (distance >= -problem.right)
    if arrays.mask is not None:
        seen = seen & arrays.mask
    s = cupy.where(seen, s, dtype.type(-np.inf))
    s = cupy.broadcast_to(s, (*problem.lse_shape, problem.tk))
    if arrays.sinks is not None:  # a column of scores that has no value
        sinks = arrays.sinks.astype(dtype)[..., None, None]
        s = cupy.concatenate([cupy.broadcast_to(sinks, (*problem.lse_shape, 1)), s], axis=-1)

    m = dtype.type(-np.inf) if not s.shape[-1] else s.max(axis=-1, keepdims=True)
    m = cupy.where(m == -np.inf, dtype.type(0), m)
    p = cupy.exp(s - m)
    total = cupy.where(used, p.sum(axis=-1, keepdims=True), dtype.type(0))
    empty = total == 0
    p = cupy.where(empty, dtype.type(0), p / cupy.where(empty, dtype.type(1), total))
    out[...] = _weighted_values(p[..., s.shape[-1] - problem.tk :], v, seen).astype(out.dtype)
    log = m + cupy.log(cupy.where(empty, dtype.type(1), total))
    lse[...] = cupy.where(empty, dtype.type(-np.inf), log)[..., 0]


def _integers(x: Any, absent: int, low: int, high: int) -> Any:
    """Return lengths or offsets with two more axes, within bounds."""
    values = cupy.asarray(absent if x is None else x).astype(np.int64)
    return cupy.clip(values, low, high)[..., None, None]


def _weighted_values(p: Any, v: Any, seen: Any) -> Any:
    """Return p @ v, to which an unseen value adds nothing, whatever it holds."""
    finite = cupy.isfinite(v)
    total = cupy.matmul(p, cupy.where(finite, v, v.dtype.type(0)))
    if bool(finite.all()):
        return total

    def count(pairs: Any, values: Any) -> Any:
        """Tell for each (row, column) whether such a pair meets such a value."""
        return cupy.matmul(pairs.astype(v.dtype), values.astype(v.dtype)) > 0

    seen = cupy.broadcast_to(seen, p.shape)
    nan = count(seen, cupy.isnan(v)) | count(seen & (p == 0), cupy.isinf(v))
    total = total + cupy.where(count(seen & (p > 0), v == np.inf), v.dtype.type(np.inf), 0)
    total = total - cupy.where(count(seen & (p > 0), v == -np.inf), v.dtype.type(np.inf), 0)
    return cupy.where(nan, v.dtype.type(np.nan), total)


# ------------------------------------------------------------------------------ half of it fused


def scores_fused_attention(
    problem: AttentionProblem, arrays: AttentionArrays, out: Any, lse: Any | None
) -> None:
    """Fill `out` and `lse`: P = softmax(q @ k.T) by one kernel, and P @ v by another.

    Allocates P, and synchronises once: rows that see values that are not finite take these from the
    plain formula.
    """
    if 0 in problem.lse_shape:
        return
    lse = cupy.empty(problem.lse_shape, accumulator(problem.dtype)) if lse is None else lse
    sources = AttentionArrays(*map(memory.readable, arrays))
    problem = respecified(problem, arrays, sources)
    results = [memory.aligned(x, copy=False) for x in (out, lse)]
    compute_scores_fused(problem, sources, results[0], results[1], formula, CurrentDevice())
    for result, given in zip(results, (out, lse), strict=True):
        memory.copy_unaligned(result, given)


def compute_scores_fused(
    problem: AttentionProblem,
    arrays: AttentionArrays,
    out: Any,
    lse: Any,
    plain: Callable[[AttentionProblem, AttentionArrays, Any, Any], None],
    executor: Executor,
) -> None:
    """Do what `scores_fused_attention` says with aligned arrays of the executor's library.

    `plain` is the formula for them.
    """
    wide = arrays.v.astype(accumulator(problem.dtype))
    finite = np.isfinite(wide)
    if bool(finite.all()):
        _attend_in_halves(problem, arrays, out, lse, executor)
        return
    # Elsewhere the bits are those of values that are 0 in their place: 0 * NaN is NaN.
    clean = arrays._replace(v=np.where(finite, wide, 0).astype(problem.dtype))
    _attend_in_halves(respecified(problem, arrays, clean), clean, out, lse, executor)
    seen = _allocate(out.shape, problem.dtype, executor)
    plain(problem, arrays, seen, _allocate(lse.shape, lse.dtype, executor))
    both = [x.astype(wide.dtype) for x in (out, seen)]
    out[...] = np.where(np.isfinite(both[1]), *both).astype(problem.dtype)


def _attend_in_halves(
    problem: AttentionProblem, arrays: AttentionArrays, out: Any, lse: Any, executor: Executor
) -> None:
    """Fill `out` and `lse` where all values are finite."""
    vector = 16 // problem.dtype.itemsize
    keys = -(-problem.tk // vector) * vector  # rows at multiples of 16 bytes
    weights = _allocate((*problem.lse_shape, keys), problem.dtype, executor)[..., : problem.tk]
    plan = plan_scores(problem, ArraySpec.of(weights), ArraySpec.of(lse), executor.limits)
    given = (*arrays[:10], weights, lse)
    pointers = [0 if x is None or type(x) is int else executor.address(x) for x in given]
    integers = [x if type(x) is int else None for x in arrays[7:10]]
    for launch, parameters in plan.launches(pointers, integers):
        executor.launch(launch, parameters)
    nothing = _allocate((problem.dv,), problem.dtype, executor)
    nothing[...] = 0
    operands = {"a": weights, "b": arrays.v, "bias": nothing}
    compute_matmul(MatmulProblem.of(operands, None), [*operands.values()], out, executor)


# ------------------------------------------------------------------------ one kernel an operation


class _Steps:
    """Steps over the rows of one shape, in C order, one launch each."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype, executor: Executor) -> None:
        self._rows, self._columns = math.prod(shape[:-1]), shape[-1]
        self._dtype, self._executor = dtype, executor

    def run(
        self,
        step: str,
        x: Any,
        y: Any = None,
        *,
        vector: Any = None,
        statistic: Any = None,
        activation: int = 0,
        dropout: Dropout | None = None,
    ) -> None:
        """Read `x`, and write `y` or `statistic`."""
        if not self._rows * self._columns:
            return
        block = STEP_PARAMETERS.zeros()
        fields = block[0]
        fields["rows"], fields["columns"] = self._rows, self._columns
        arrays = {"x": x, "y": y, "vector": vector, "statistic": statistic}
        pointers = {
            name: self._executor.address(array)
            for name, array in arrays.items()
            if array is not None
        }
        for name, pointer in pointers.items():
            fields[name] = pointer
        fields["activation"] = activation
        if dropout is not None:
            write_dropout(fields["dropout"], dropout)
        launch = step_launch(
            self._dtype,
            step,
            self._rows,
            self._columns,
            [*pointers.values()],
            self._executor.limits,
        )
        self._executor.launch(launch, block.view(STEP_PARAMETERS.opaque))


def _allocate(shape: tuple[int, ...], dtype: np.dtype, executor: Executor) -> Any:
    return executor.allocate(math.prod(shape) * dtype.itemsize).view(dtype).reshape(shape)


def _in_order(x: Any) -> Any:
    return x if x.flags.c_contiguous else x.copy()


def unfused_softmax(x: Any, y: Any) -> None:
    """Fill `y`, in C order, with the softmax over the last axis: maximum, exp, sum, division."""
    with memory.device_of(y):
        compute_softmax_steps(memory.aligned(x), y, CurrentDevice())


def compute_softmax_steps(x: Any, y: Any, executor: Executor) -> None:
    """Do what `unfused_softmax` says with aligned arrays of the executor's library."""
    steps, x = _Steps(x.shape, x.dtype, executor), _in_order(x)
    weights = _allocate(x.shape, x.dtype, executor)
    statistic = _allocate(x.shape[:-1], accumulator(x.dtype), executor)
    steps.run("Top", x, statistic=statistic)
    steps.run("ShiftedExponential", x, weights, statistic=statistic)
    steps.run("Total", weights, statistic=statistic)
    steps.run("Divide", weights, y, statistic=statistic)


def unfused_matmul_bias_activation(
    problem: MatmulProblem, a: Any, b: Any, bias: Any, out: Any
) -> None:
    """Fill `out`, in C order: the product, then the bias, then the activation."""
    with memory.device_of(out):
        sources = [memory.aligned(x) for x in (a, b, bias)]
        compute_matmul_steps(problem, sources, out, CurrentDevice())


def compute_matmul_steps(
    problem: MatmulProblem, sources: Sequence[Any], out: Any, executor: Executor
) -> None:
    """Do what `unfused_matmul_bias_activation` says with arrays of the executor's library."""
    a, b, bias = sources[0], sources[1], _in_order(sources[2])
    product, shifted = (_allocate(out.shape, problem.dtype, executor) for _ in range(2))
    nothing = _allocate(bias.shape, problem.dtype, executor)
    nothing[...] = 0
    plain = replace(problem, activation=None)
    compute_matmul(plain, [a, b, nothing], product, executor)
    steps = _Steps(out.shape, problem.dtype, executor)
    steps.run("AddBias", product, shifted, vector=bias)
    steps.run("Activate", shifted, out, activation=ACTIVATIONS.index(problem.activation))


def unfused_dropout_bias_layer_norm(
    problem: LayerNormProblem, dropout: Dropout, arrays: LayerNormArrays, y: Any
) -> None:
    """Fill `y`, in C order: the bias, then dropout, then LayerNorm."""
    with memory.device_of(y):
        sources = LayerNormArrays(*(x if x is None else memory.aligned(x) for x in arrays))
        compute_layer_norm_steps(problem, dropout, sources, y, CurrentDevice())


def compute_layer_norm_steps(
    problem: LayerNormProblem,
    dropout: Dropout,
    arrays: LayerNormArrays,
    y: Any,
    executor: Executor,
) -> None:
    """Do what `unfused_dropout_bias_layer_norm` says with arrays of the executor's library."""
    x, bias = _in_order(arrays.x), _in_order(arrays.bias)
    shifted, dropped = (_allocate(x.shape, problem.dtype, executor) for _ in range(2))
    nothing = _allocate(bias.shape, problem.dtype, executor)
    nothing[...] = 0
    steps = _Steps(x.shape, problem.dtype, executor)
    steps.run("AddBias", x, shifted, vector=bias)
    steps.run("Drop", shifted, dropped, dropout=dropout)
    plain = LayerNormArrays(dropped, nothing, arrays.gamma, arrays.beta)
    everything = Dropout(0, 0, 0)
    compute_layer_norm(problem, everything, plain, (y, None, None), executor)
