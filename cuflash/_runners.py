"""What the command line needs of an engine: its name, its arrays, and how to measure a call."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from .host.threads import worker_count


class Measured(NamedTuple):
    """Results of a call, the seconds it took, and its peak of memory beyond the results."""

    results: tuple[Any, ...]
    seconds: float
    extra_bytes: int


def _best(seconds: Callable[[], float]) -> float:
    """Repeat a timing for about a second and return the least: all that disturbs it adds to it."""
    times: list[float] = []
    while sum(times) < 1 and len(times) < 20:
        times.append(seconds())
    return min(times)


class Runner(Protocol):
    """An engine, as the command line sees it."""

    label: str

    def asarray(self, x: NDArray[Any]) -> Any:
        """Bring a NumPy array to the engine."""

    def asnumpy(self, x: Any) -> NDArray[Any]:
        """Bring an array of the engine to NumPy."""

    def measure(self, call: Callable[[], tuple[Any, ...]]) -> Measured:
        """Run `call`, which returns arrays, until its time is known."""


class HostRunner:
    """The NumPy engine."""

    def __init__(self) -> None:
        self.label = f"host (NumPy {np.__version__}, {worker_count()} CPUs)"

    def asarray(self, x: NDArray[Any]) -> NDArray[Any]:
        """Return `x`."""
        return x

    def asnumpy(self, x: Any) -> NDArray[Any]:
        """Return `x`, a NumPy array or scalar."""
        return np.asarray(x)

    def measure(self, call: Callable[[], tuple[Any, ...]]) -> Measured:
        """Run `call` once under tracemalloc, which warms up, then for its best time."""
        tracemalloc.start()
        try:
            results = call()
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

        def seconds() -> float:
            start = time.perf_counter()
            call()
            return time.perf_counter() - start

        return Measured(results, _best(seconds), peak - sum(x.nbytes for x in results))


class DeviceRunner:
    """The CuPy engine on the current device.

    Parameters
    ----------
    cupy : module
        CuPy, which this module does not import.
    """

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        gpu = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["name"].decode()
        self.label = f"device ({gpu}, CuPy {cupy.__version__})"

        class Peak(cupy.cuda.MemoryHook):  # type: ignore[misc]
            """Most bytes that were allocated at one time while the hook was set."""

            name = "peak"
            live = peak = 0

            def malloc_postprocess(self, **event: int) -> None:
                self.live += event["mem_size"]
                self.peak = max(self.peak, self.live)

            def free_postprocess(self, **event: int) -> None:
                self.live -= event["mem_size"]

        self._peak = Peak

    def asarray(self, x: NDArray[Any]) -> Any:
        """Copy `x` to the device."""
        return self._cupy.asarray(x)

    def asnumpy(self, x: Any) -> NDArray[Any]:
        """Copy `x` to the host."""
        return np.asarray(self._cupy.asnumpy(x))

    def measure(self, call: Callable[[], tuple[Any, ...]]) -> Measured:
        """Run `call` for its memory, which also compiles and warms up, then for its best time."""
        with self._peak() as hook:
            results = call()
        cuda = self._cupy.cuda

        def seconds() -> float:
            start, end = cuda.Event(), cuda.Event()
            start.record()
            call()
            end.record()
            end.synchronize()
            return float(cuda.get_elapsed_time(start, end)) / 1e3

        return Measured(results, _best(seconds), hook.peak - sum(x.nbytes for x in results))
