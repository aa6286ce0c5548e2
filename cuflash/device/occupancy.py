"""What a GPU makes of the softmax regimes: resident blocks, predicted trips to memory.

Needs no GPU: limits can be numbers, and registers are what NVRTC reports.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from ..problem import ArraySpec, SoftmaxProblem
from .compiler import CompileReport, KernelName, compile_only
from .executor import DeviceLimits, device_limits
from .plans import SoftmaxPlan, plan_softmax
from .softmax_regimes import (
    SHORT_LENGTHS,
    STREAM_SHAPES,
    UNSTREAMED_BYTES,
    WARP,
    Regime,
    resident_blocks,
    softmax_regimes,
    stream_shape,
)
from .softmax_rows import CHUNK, SOFTMAX_PARAMETERS

__all__ = [
    "KNOWN_GPUS",
    "MANY_ROWS",
    "SOURCE_LENGTHS",
    "Residency",
    "device_limits",
    "plan_rows",
    "regime",
    "report",
    "residency",
    "source_occupancy",
    "source_report",
]

#: Shared memory of a block that does not ask for more, on every GPU.
_SHARED_WITHOUT_OPT_IN = 48 << 10
#: Row lengths that are reported.
_LENGTHS = tuple(1 << power for power in range(21))
_ACROSS_LENGTHS = tuple(1 << power for power in range(6, 17, 2))
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

    regime: str
    """As `regime` names it."""
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
    """Predicted passes over memory, without a second read that hits in L2."""
    absorbed: bool
    """Whether there is such a read: a wave fits in L2, and rows are read twice."""


def plan_rows(
    limits: DeviceLimits,
    dtype: np.dtype,
    rows: int,
    length: int,
    operation: str = "softmax",
    method: str = "auto",
    axis: int = -1,
) -> SoftmaxPlan:
    """Return the plan of an operation over the last or the first axis of a matrix.

    Raises
    ------
    ValueError
        The method cannot run rows of this length.
    """
    x, row = (
        SimpleNamespace(shape=(n, rows) if axis == 0 else (rows, n), ndim=2, dtype=dtype)
        for n in (length, 1)
    )
    operands = {"dy": x, "y": x} if operation.endswith("_vjp") else {"x": x}
    if operation == "logsumexp_vjp":
        operands = {"dlse": row, "x": x, "lse": row}
    problem = SoftmaxProblem.of(operation, operands, axis, None, method)
    out = SimpleNamespace(shape=problem.out_shape, dtype=problem.out_dtype)
    return plan_softmax(problem, (ArraySpec.of(out),), True, limits)


def regime(plan: SoftmaxPlan) -> str:
    """Return the name by which a plan's way to share out rows goes: a method, or a way of `auto`.

    These are `short` and `stream` for contiguous rows of few bytes and for many long ones,
    `columns` for rows side by side, `strips` for many long ones of those, and `split` for few long
    rows.
    """
    last = _name(plan.launches[-1].kernel)
    ways = {name: name for name in ("columns", "split", "stream", "strips")} | {
        "short_rows": "short"
    }
    return ways.get(last, plan.method)


def residency(
    limits: DeviceLimits,
    dtype: np.dtype,
    length: int,
    method: str = "auto",
    rows: int = MANY_ROWS,
    axis: int = -1,
) -> Residency:
    """Predict how softmax of rows runs, which lie in the last or side by side in the first axis.

    Raises
    ------
    ValueError
        The method cannot run rows of this length.
    """
    plan = plan_rows(limits, dtype, rows, length, method=method, axis=axis)
    launch, taken = plan.launches[-1], regime(plan)
    compiled = _compiled(launch.kernel, limits.compute_capability)
    shared = launch.shared_bytes + compiled.shared
    blocks = resident_blocks(limits, launch.block, shared, compiled.registers)
    if taken == "columns":
        tile_rows, width, held, parts = _counts(launch.kernel)
        in_flight = blocks * limits.multiprocessors // parts * tile_rows * width
        trips = 2 if held else 3
    elif taken == "strips":
        strip_rows, _, _, parts = _counts(launch.kernel)
        in_flight, trips = blocks * limits.multiprocessors // parts * strip_rows * WARP, 2
    elif taken == "short":
        parts, trips = 1, 2
        in_flight = blocks * limits.multiprocessors * -(-rows // launch.grid)
    else:
        fields = np.frombuffer(plan.block, SOFTMAX_PARAMETERS.dtype)[0]
        parts = int(fields["parts"])
        teams = blocks * launch.block * limits.multiprocessors >> int(fields["log2_lanes"])
        in_flight = teams // parts
        trips = _TRIPS[plan.method]
    wave_bytes = min(in_flight, rows) * length * dtype.itemsize
    absorbed = trips == 3 and wave_bytes <= limits.l2_bytes
    return Residency(
        regime=taken,
        kernels=tuple(_name(each.kernel) for each in plan.launches),
        parts=parts,
        threads=launch.block,
        blocks=blocks,
        occupancy=blocks * launch.block / limits.threads_per_sm,
        wave_bytes=wave_bytes,
        trips=trips - absorbed,
        absorbed=absorbed,
    )


def _name(kernel: KernelName) -> str:
    return kernel.expression.partition("<")[0].rpartition("::")[2]


def _counts(kernel: KernelName) -> list[int]:
    """Return the arguments of `columns` or `strips` after its types, see their shapes."""
    return [int(count) for count in kernel.expression.rstrip(">").rsplit(", ", 4)[1:]]


@cache
def _compiled(kernel: KernelName, compute_capability: str) -> CompileReport:
    arch = f"sm_{compute_capability}{'a' if compute_capability == '90' else ''}"
    return compile_only(kernel.source, [kernel.expression], arch)[kernel.expression]


def report(limits: DeviceLimits, dtype: np.dtype) -> Iterator[str]:
    """Yield lines: the regimes of `auto`, and what they come to at each of some row lengths."""
    yield from _residency_lines(limits, dtype, _LENGTHS, axis=-1)
    yield ""
    yield from _regime_lines(softmax_regimes(limits), dtype)
    yield from _way_lines(limits, dtype)
    yield ""
    yield "rows side by side: the first axis of a matrix"
    yield from _residency_lines(limits, dtype, _ACROSS_LENGTHS, axis=0)


def _residency_lines(
    limits: DeviceLimits, dtype: np.dtype, lengths: Sequence[int], axis: int
) -> Iterator[str]:
    """Yield a table; of contiguous rows also the blocks that work on one if there is no other."""
    alone = f"{'if alone':>10}" if axis else ""
    head = f"{'N':>9}  {'regime':8}{'threads':>7}{'blocks/SM':>11}{'occupancy':>11}"
    yield f"{head}{'blocks/row':>12}{alone}  trips"
    for length in lengths:
        found = residency(limits, dtype, length, axis=axis)
        if axis:
            alone = f"{residency(limits, dtype, length, rows=1).parts:10}"
        row = f"{length:9}  {found.regime:8}{found.threads:7}{found.blocks:11}"
        row = f"{row}{found.occupancy:11.0%}{found.parts:12}{alone}  {found.trips}"
        yield row + (" (second read in L2)" if found.absorbed else "")


def _regime_lines(regimes: tuple[Regime, ...], dtype: np.dtype) -> Iterator[str]:
    for each in regimes:
        bounded = each.row_bytes < float("inf")
        reach = f"to N = {int(each.row_bytes) // dtype.itemsize}" if bounded else "beyond"
        yield f"{each.method:8}{reach}: {each.reason}"


def _way_lines(limits: DeviceLimits, dtype: np.dtype) -> Iterator[str]:
    """Yield what `auto` makes of contiguous rows beside the methods that it could be asked for."""
    lengths = ", ".join(map(str, SHORT_LENGTHS[dtype.itemsize]))
    yield f"{'short':8}N = {lengths}, end to end: a row is a thread's, nothing is exchanged"
    longest = [
        shape.row_bytes
        for shape in STREAM_SHAPES[dtype.itemsize, False]
        if stream_shape(MANY_ROWS, shape.row_bytes // CHUNK, dtype, limits, pairs=False)
    ]
    if longest:
        first, last = (
            n // dtype.itemsize for n in (UNSTREAMED_BYTES[dtype.itemsize, False], longest[-1])
        )
        yield (
            f"{'stream':8}N = {first + 1} to {last}, many rows: clusters that stay hold a row each "
            "while the next ones come to shared memory"
        )


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
