"""What a GPU makes of the softmax regimes: resident blocks, predicted trips to memory.

Needs no GPU: limits can be numbers, and registers are what NVRTC reports.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from ..problem import ArraySpec, SoftmaxProblem
from .compiler import KernelName, compile_only
from .executor import DeviceLimits, device_limits
from .plans import plan_softmax
from .softmax_regimes import Regime, resident_blocks, softmax_regimes

__all__ = ["KNOWN_GPUS", "device_limits", "report", "resident_blocks", "source_report", "trips"]

#: Shared memory of a block that does not ask for more, on every GPU.
_SHARED_WITHOUT_OPT_IN = 48 << 10
#: Row lengths that are reported.
_LENGTHS = tuple(1 << power for power in range(7, 21))
#: Threads of a block of the kernel that first showed the regimes, and its row lengths.
_SOURCE_THREADS, _SOURCE_LENGTHS = 256, (1024, 2048, 4096, 8192, 12288, 16384)
_TRIPS = {"naive": 4, "fused": 2, "cluster": 2}

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


def trips(method: str, row_bytes: int, blocks: int, limits: DeviceLimits) -> str:
    """Return the predicted trips to memory for each element, reads and writes.

    The second read of `online` is none while the rows of all resident blocks fit in L2.
    """
    if method != "online":
        return str(_TRIPS[method])
    in_flight = row_bytes * blocks * limits.multiprocessors
    return "2 (second read in L2)" if in_flight <= limits.l2_bytes else "3"


def _registers(kernel: KernelName, limits: DeviceLimits) -> int:
    suffix = "a" if limits.compute_capability == "90" else ""
    arch = f"sm_{limits.compute_capability}{suffix}"
    return compile_only(kernel.source, [kernel.expression], arch)[kernel.expression].registers


def report(limits: DeviceLimits, dtype: np.dtype) -> Iterator[str]:
    """Yield lines: the regimes of `auto`, and what they come to at each of some row lengths."""
    yield f"{'N':>9}  {'method':8}{'threads':>7}{'blocks/SM':>11}{'occupancy':>11}  trips"
    registers: dict[KernelName, int] = {}
    for length in _LENGTHS:
        spec = ArraySpec((1 << 16, length), (length * dtype.itemsize, dtype.itemsize), dtype)
        problem = SoftmaxProblem("softmax", (spec,), (1,), None, spec.shape, dtype, "auto")
        plan = plan_softmax(problem, (spec,), True, limits)
        launch = plan.launches[0]
        kernel = launch.kernel
        if kernel not in registers:
            registers[kernel] = _registers(kernel, limits)
        blocks = resident_blocks(limits, launch.block, launch.shared_bytes, registers[kernel])
        share = blocks * launch.block / limits.threads_per_sm
        row = f"{length:9}  {plan.method:8}{launch.block:7}{blocks:11}{share:11.0%}  "
        yield row + trips(plan.method, length * dtype.itemsize, blocks, limits)
    yield ""
    yield from _regime_lines(softmax_regimes(limits), dtype)


def _regime_lines(regimes: tuple[Regime, ...], dtype: np.dtype) -> Iterator[str]:
    for regime in regimes:
        bounded = regime.row_bytes < float("inf")
        reach = f"to N = {int(regime.row_bytes) // dtype.itemsize}" if bounded else "beyond"
        yield f"{regime.method:8}{reach}: {regime.reason}"


def source_report(limits: DeviceLimits) -> Iterator[str]:
    """Yield lines: a float32 row in the shared memory of a block of 256 threads, without opt-in.

    How the regimes were first found: occupancy falls where shared memory holds fewer blocks than
    there is room for, and the row ends where a block can have no more.
    """
    plain = replace(limits, shared_per_block=min(_SHARED_WITHOUT_OPT_IN, limits.shared_per_block))
    yield f"{'N':>9}{'KB a block':>12}{'blocks/SM':>11}{'occupancy':>11}"
    for length in _SOURCE_LENGTHS:
        needed = 4 * length
        row = f"{length:9}{needed / 1024:12.0f}"
        if needed > plain.shared_per_block:
            yield f"{row}  does not fit: {plain.shared_per_block // 4} is the longest row"
            continue
        blocks = resident_blocks(plain, _SOURCE_THREADS, needed)
        yield f"{row}{blocks:11}{blocks * _SOURCE_THREADS / plain.threads_per_sm:11.0%}"
