"""The two places where something is measured: the host by NumPy, and the current CUDA device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np

from ..analysis import Roofline, roofline
from ..problem import FLOATS
from . import device, rows
from .problems import dtype_of
from .timing import Call, Clock, HostClock, compare

#: Rows and columns of the matrices of the host's ceiling, a second of one core.
_HOST_MATMUL_SIZE = 2048
#: Bytes of a copy: past the caches.
_COPY_BYTES = {"host": 1 << 28, "device": 1 << 30}


class Machine(Protocol):
    """Where calls are measured."""

    name: str

    def normal(self, shape: tuple[int, ...], dtype: str, seed: int) -> Any:
        """Return normal random numbers."""

    def copy(self, x: Any) -> Call:
        """Return the copy of an array: the ceiling of memory traffic."""

    def matmul(self, dtype: str) -> tuple[Call, float]:
        """Return a large matrix product, the ceiling of arithmetic, and its FLOPs."""

    def idle(self) -> Call | None:
        """Return a launch of a kernel that does nothing; None where nothing is launched."""

    def clock(self) -> Clock:
        """Return what times calls."""

    def environment(self) -> Mapping[str, str]:
        """Describe the machine and its libraries."""

    def memory(self) -> int:
        """Return the bytes of memory."""


class Host:
    """NumPy and its BLAS."""

    name = "host"

    def normal(self, shape: tuple[int, ...], dtype: str, seed: int) -> np.ndarray:
        """Return normal random numbers."""
        x = np.random.default_rng(seed).standard_normal(shape, np.float32)
        return x.astype(dtype_of(dtype))

    def copy(self, x: np.ndarray) -> Call:
        """Return the copy to memory that was touched before."""
        target = x.copy()
        return lambda: np.copyto(target, x)

    def matmul(self, dtype: str) -> tuple[Call, float]:
        """Return a product in the dtype's accumulator: BLAS has no other."""
        wide = "float64" if dtype == "float64" else "float32"
        a = self.normal((_HOST_MATMUL_SIZE, _HOST_MATMUL_SIZE), wide, 0)
        return lambda: a @ a, 2.0 * _HOST_MATMUL_SIZE**3

    def idle(self) -> None:
        """Return None: a call of NumPy launches nothing."""

    def clock(self) -> Clock:
        """Return a wall clock."""
        return HostClock()

    def environment(self) -> Mapping[str, str]:
        """Describe the machine and its libraries."""
        return rows.host_environment()

    def memory(self) -> int:
        """Return the bytes that the kernel says there are; 1 where it does not say."""
        try:
            with open("/proc/meminfo", encoding="ascii") as file:
                return int(file.readline().split()[1]) << 10
        except OSError:
            return 1


class Device:
    """The current CUDA device, by CuPy."""

    name = "device"

    def normal(self, shape: tuple[int, ...], dtype: str, seed: int) -> Any:
        """Return normal random numbers."""
        return device.normal(shape, dtype, seed)

    def copy(self, x: Any) -> Call:
        """Return the copy within the device."""
        return device.copy(x)

    def matmul(self, dtype: str) -> tuple[Call, float]:
        """Return the product by cuBLAS."""
        return device.matmul(dtype), device.MATMUL_FLOPS

    def idle(self) -> Call:
        """Return the launch of a kernel that does nothing."""
        return device.idle()

    def clock(self) -> Clock:
        """Return a clock on the current stream."""
        return device.clock()

    def environment(self) -> Mapping[str, str]:
        """Describe the GPU and its libraries."""
        return rows.device_environment()

    def memory(self) -> int:
        """Return the bytes of the device."""
        return device.memory()


class Ceilings(NamedTuple):
    """What a machine reached: its roofline, and seconds from one launch to the next."""

    roofline: Roofline
    launch: float | None


def measure(
    machine: Machine,
    *,
    rounds: int = 3,
    window: float = 0.05,
    told: Callable[[str], None] = lambda name: None,
) -> Ceilings:
    """Measure the ceilings of a machine.

    Parameters
    ----------
    machine : Machine
        Where.
    rounds, window
        As `timing.compare` takes them.
    told : callable, optional
        Is told what is measured next.
    """

    def seconds(name: str, call: Call) -> float:
        told(name)
        clock = machine.clock()
        return compare({name: call}, clock=clock, rounds=rounds, window=window).median(name)

    x = machine.normal((_COPY_BYTES[machine.name] // 4,), "float32", 0)
    bandwidth = 2 * x.nbytes / seconds("copy", machine.copy(x))
    del x
    flops = {}
    for dtype in (dtype.name for dtype in FLOATS):
        call, work = machine.matmul(dtype)
        flops[dtype] = work / seconds(f"matmul, {dtype}", call)
    idle = machine.idle()
    launch = None if idle is None else seconds("launch", idle)
    measured = roofline(bandwidth=bandwidth, flops=flops, memory=machine.memory())
    return Ceilings(measured, launch)
