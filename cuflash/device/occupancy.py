"""What a GPU makes of the softmax regimes: resident blocks, predicted trips to memory.

Needs no GPU: limits can be numbers, and registers are what NVRTC reports.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from ..problem import ArraySpec, SoftmaxProblem
from .compiler import CompileReport, KernelName, compile_only
from .executor import DeviceLimits, device_limits
from .plans import SoftmaxPlan, plan_softmax
from .softmax_regimes import Regime, resident_blocks, softmax_regimes
from .softmax_rows import SOFTMAX_PARAMETERS

__all__ = [
    "KNOWN_GPUS",
    "MANY_ROWS",
    "SOURCE_LENGTHS",
    "Residency",
    "device_limits",
    "plan_rows",
    "report",
    "residency",
    "source_occupancy",
    "source_report",
]

#: Shared memory of a block that does not ask for more, on every GPU.
_SHARED_WITHOUT_OPT_IN = 48 << 10
#: Row lengths that are reported.
_LENGTHS = tuple(1 << power for power in range(21))
#: More rows than any GPU has in flight.
MANY_ROWS = 1 << 20
#: Threads of a block of the kernel that first showed the regimes, and its row lengths.
_SOURCE_THREADS, SOURCE_LENGTHS = 256, (1024, 2048, 4096, 8192, 12288, 16384)
#: Passes over memory of an element, reads and writes, if the cache serves none.
_TRIPS = {"naive": 4, "fused": 2, "online": 3, "cluster": 2}

#: GPUs that can be reported on without having one.
KNOWN_GPUS = {
    "t4": DeviceLimits(
        compute_capability="75",
        multiprocessors=40,
        threads_per_sm=1024,
        registers_per_sm=65536,
        shared_per_sm=64 << 10,
        shared_per_block=64 << 10,
        l2_bytes=4 << 20,
    ),
    "h200": DeviceLimits(
        compute_capability="90",
        multiprocessors=132,
        threads_per_sm=2048,
        registers_per_sm=65536,
        shared_per_sm=228 << 10,
        shared_per_block=227 << 10,
        l2_bytes=60 << 20,
        cluster_blocks=16,
    ),
}


class Residency(NamedTuple):
    """How rows of one length run on a GPU."""

    method: str
    kernels: tuple[str, ...]
    """Names, in the order of their launches; the rest is about the first."""
    parts: int
    """Blocks that share a row: of a cluster, or anywhere on the GPU where rows are split."""
    threads: int
    """Of a block."""
    blocks: int
    """That a multiprocessor holds at a time."""
    occupancy: float
    """Resident threads, as a share of those that a multiprocessor can hold."""
    wave_bytes: int
    """Of the rows that all resident blocks work on at a time."""
    trips: int
    """Predicted passes over memory: no second read of `online` while a wave fits in L2."""


def plan_rows(
    limits: DeviceLimits,
    dtype: np.dtype,
    rows: int,
    length: int,
    operation: str = "softmax",
    method: str = "auto",
) -> SoftmaxPlan:
    """Return the plan of an operation on contiguous rows.

    Raises
    ------
    ValueError
        The method cannot run rows of this length.
    """
    x, row = (SimpleNamespace(shape=(rows, n), ndim=2, dtype=dtype) for n in (length, 1))
    operands = {"dy": x, "y": x} if operation.endswith("_vjp") else {"x": x}
    if operation == "logsumexp_vjp":
        operands = {"dlse": row, "x": x, "lse": row}
    problem = SoftmaxProblem.of(operation, operands, -1, None, method)
    out = SimpleNamespace(shape=problem.out_shape, dtype=problem.out_dtype)
    return plan_softmax(problem, (ArraySpec.of(out),), True, limits)


def residency(
    limits: DeviceLimits,
    dtype: np.dtype,
    length: int,
    method: str = "auto",
    rows: int = MANY_ROWS,
) -> Residency:
    """Predict how softmax of contiguous rows runs: by default of as many as a GPU can work on.

    Raises
    ------
    ValueError
        The method cannot run rows of this length.
    """
    plan = plan_rows(limits, dtype, rows, length, method=method)
    launch = plan.launches[0]
    compiled = _compiled(launch.kernel, limits.compute_capability)
    shared = launch.shared_bytes + compiled.shared
    blocks = resident_blocks(limits, launch.block, shared, compiled.registers)
    fields = np.frombuffer(plan.block, SOFTMAX_PARAMETERS.dtype)[0]
    teams = blocks * launch.block * limits.multiprocessors >> int(fields["log2_lanes"])
    parts = int(fields["parts"])
    wave_bytes = min(teams // parts, rows) * length * dtype.itemsize
    absorbed = plan.method == "online" and wave_bytes <= limits.l2_bytes
    return Residency(
        method=plan.method,
        kernels=tuple(_name(each.kernel) for each in plan.launches),
        parts=parts,
        threads=launch.block,
        blocks=blocks,
        occupancy=blocks * launch.block / limits.threads_per_sm,
        wave_bytes=wave_bytes,
        trips=_TRIPS[plan.method] - absorbed,
    )


def _name(kernel: KernelName) -> str:
    return kernel.expression.partition("<")[0].rpartition("::")[2]


@cache
def _compiled(kernel: KernelName, compute_capability: str) -> CompileReport:
    arch = f"sm_{compute_capability}{'a' if compute_capability == '90' else ''}"
    return compile_only(kernel.source, [kernel.expression], arch)[kernel.expression]


def report(limits: DeviceLimits, dtype: np.dtype) -> Iterator[str]:
    """Yield lines: the regimes of `auto`, and what they come to at each of some row lengths."""
    yield (
        f"{'N':>9}  {'method':8}{'threads':>7}{'blocks/SM':>11}{'occupancy':>11}"
        f"{'blocks/row':>12}{'if alone':>10}  trips"
    )
    for length in _LENGTHS:
        found, alone = (residency(limits, dtype, length, rows=rows) for rows in (MANY_ROWS, 1))
        row = f"{length:9}  {found.method:8}{found.threads:7}{found.blocks:11}"
        row = f"{row}{found.occupancy:11.0%}{found.parts:12}{alone.parts:10}  {found.trips}"
        yield row + (" (second read in L2)" if found.trips < _TRIPS[found.method] else "")
    yield ""
    yield from _regime_lines(softmax_regimes(limits), dtype)


def _regime_lines(regimes: tuple[Regime, ...], dtype: np.dtype) -> Iterator[str]:
    for regime in regimes:
        bounded = regime.row_bytes < float("inf")
        reach = f"to N = {int(regime.row_bytes) // dtype.itemsize}" if bounded else "beyond"
        yield f"{regime.method:8}{reach}: {regime.reason}"


def source_occupancy(limits: DeviceLimits, length: int) -> tuple[int, float]:
    """Return resident blocks and occupancy under the conditions that first showed the regimes.

    A float32 row in the shared memory of a block of 256 threads that asks for no more of it than
    every block may have; (0, 0) if it does not fit.
    """
    if 4 * length > _SHARED_WITHOUT_OPT_IN:
        return 0, 0.0
    blocks = resident_blocks(limits, _SOURCE_THREADS, 4 * length)
    return blocks, blocks * _SOURCE_THREADS / limits.threads_per_sm


def source_report(limits: DeviceLimits) -> Iterator[str]:
    """Yield lines: `source_occupancy`, which falls where shared memory holds fewer blocks."""
    yield f"{'N':>9}{'KB a block':>12}{'blocks/SM':>11}{'occupancy':>11}"
    for length in SOURCE_LENGTHS:
        blocks, occupancy = source_occupancy(limits, length)
        row = f"{length:9}{length / 256:12.0f}"
        if blocks:
            yield f"{row}{blocks:11}{occupancy:11.0%}"
        else:
            yield f"{row}  does not fit: {_SHARED_WITHOUT_OPT_IN // 4} is the longest row"
