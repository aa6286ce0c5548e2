"""What measurements on a GPU share: inputs made there, ceilings, and the rate of its processors."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable
from contextlib import suppress
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from .problems import AttentionShape, Decode, dtype_of
from .timing import Call, CudaClock

if TYPE_CHECKING:
    from ..device.executor import DeviceLimits
    from ..device.occupancy import Residency

#: NVML's name for the clock of the multiprocessors (`nvmlClockType_t`).
_NVML_CLOCK_SM = 1

#: Rows and columns of the matrices whose product is the ceiling of arithmetic, and what it takes.
MATMUL_SIZE = 8192
MATMUL_FLOPS = 2.0 * MATMUL_SIZE**3


class SmClock:
    """Reads the clock of the current device's multiprocessors, in MHz, from the driver's NVML.

    NaN where there is no NVML, or where it does not tell.
    """

    def __init__(self) -> None:
        self._handle = ctypes.c_void_p()
        self._nvml = _open_nvml(self._handle)

    def __call__(self) -> float:
        """Return the present rate."""
        rate = ctypes.c_uint()
        if self._nvml is None:
            return math.nan
        failed = self._nvml.nvmlDeviceGetClockInfo(self._handle, _NVML_CLOCK_SM, ctypes.byref(rate))
        return math.nan if failed else float(rate.value)


def _open_nvml(handle: ctypes.c_void_p) -> Any:
    """Return NVML with the handle of CuPy's current device, or None."""
    import cupy

    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    bus = cupy.cuda.Device().pci_bus_id.encode()
    failed = nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByPciBusId_v2(bus, ctypes.byref(handle))
    return None if failed else nvml


def clock() -> CudaClock:
    """Return a clock for calls on the current device that also reads its rate."""
    return CudaClock(SmClock())


def normal(shape: tuple[int, ...], dtype: str, seed: int) -> Any:
    """Return normal random numbers on the current device."""
    import cupy

    generator = cupy.random.default_rng(seed)
    wide = np.float64 if dtype == "float64" else np.float32
    return generator.standard_normal(shape, dtype=wide).astype(dtype_of(dtype), copy=False)


def attention_inputs(
    shape: AttentionShape, sets: int, *, backward: bool = False
) -> list[tuple[Any, ...]]:
    """Return sets of normal random q, k, v on the current device, to be used in rotation.

    For the backward dout comes before them.
    """
    size = (3 + backward, shape.batch, shape.heads, shape.tokens, shape.d)
    return [tuple(normal(size, shape.dtype, seed)) for seed in range(sets)]


def decode_inputs(shape: Decode, sets: int) -> list[tuple[Any, ...]]:
    """Return sets of normal random q, k, v of a decoding step, to be used in rotation."""
    return [
        tuple(normal(size, shape.dtype, 3 * i + j) for j, size in enumerate(shape.shapes))
        for i in range(sets)
    ]


def given(x: np.ndarray) -> Any:
    """Return a copy of an array on the current device."""
    import cupy

    return cupy.asarray(x)


def scratch(nbytes: int) -> Any:
    """Return uninitialised bytes on the current device."""
    import cupy

    return cupy.empty(nbytes, np.uint8)


def captured(call: Call) -> Call:
    """Return a call as a CUDA graph, so that its host time is that of a launch.

    It was made once before, and what it writes to must live as long as the graph.
    """
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        call()
        graph = stream.end_capture()

    def replay() -> None:
        graph.launch(cupy.cuda.get_current_stream())

    return replay


def softmax_regime(dtype: str, rows: int, n: int, axis: int = -1) -> str:
    """Return how `auto` runs rows over an axis of a matrix on the current device."""
    from ..device.occupancy import plan_rows, regime

    return regime(plan_rows(limits(), dtype_of(dtype), rows, n, axis=axis))


def softmax_residency(dtype: str, rows: int, n: int, method: str) -> Residency:
    """Predict how a method runs on the current device; ValueError if it cannot."""
    from ..device.occupancy import residency

    return residency(limits(), dtype_of(dtype), n, method, rows)


def warm_softmax(
    problems: Iterable[tuple[str, str, int, int]], methods: Iterable[str], elements: int
) -> None:
    """Compile what (operation, dtype, row length, axis) launch, several kernels at a time."""
    from ..device.compiler import warm
    from ..device.occupancy import plan_rows

    kernels = []
    for (operation, dtype, n, axis), method in product(problems, methods):
        with suppress(ValueError):  # the method cannot run such rows
            plan = plan_rows(limits(), dtype_of(dtype), elements // n, n, operation, method, axis)
            kernels += [launch.kernel for launch in plan.launches]
    warm(kernels)


def limits() -> DeviceLimits:
    """Return the limits of the current device."""
    import cupy

    from ..device.executor import device_limits

    return device_limits(cupy.cuda.runtime.getDevice())


def copy(x: Any) -> Call:
    """Return the copy of an array's memory within the device: the ceiling of memory traffic."""
    import cupy

    target = cupy.empty_like(x)
    return lambda: target.data.copy_from_device_async(x.data, x.nbytes)


def matmul(dtype: str) -> Call:
    """Return a square matrix product by cuBLAS, the ceiling of arithmetic.

    bfloat16 and float16 have the same rate; it is taken in float16, which CuPy can multiply.
    """
    import cupy

    name = "float16" if dtype == "bfloat16" else dtype
    a, b = normal((2, MATMUL_SIZE, MATMUL_SIZE), name, seed=0)
    return lambda: cupy.matmul(a, b)


def idle() -> Call:
    """Return the launch of a kernel that does nothing: what lies between two launches."""
    import cupy

    kernel = cupy.RawKernel('extern "C" __global__ void idle() {}', "idle")
    return lambda: kernel((1,), (32,), ())


def extra_bytes(call: Call) -> int:
    """Return the peak of what CuPy's pool hands out during a call, its results aside.

    `call` returns an array or a tuple of arrays and None, arrays that it allocates.
    """
    import cupy

    class Peak(cupy.cuda.MemoryHook):  # type: ignore[misc]  # CuPy has no types
        name = "peak"
        live = peak = 0

        def malloc_postprocess(self, **event: Any) -> None:
            self.live += event["mem_size"]
            self.peak = max(self.peak, self.live)

        def free_postprocess(self, **event: Any) -> None:
            self.live -= event["mem_size"]

    with Peak() as hook:
        results = call()
    arrays = results if isinstance(results, tuple) else (results,)
    # The pool rounds sizes up; what is left of the results is not a call's own.
    rounded = sum(-(-x.nbytes // _POOL_BYTES) * _POOL_BYTES for x in arrays if x is not None)
    return int(hook.peak) - rounded


#: What sizes of blocks of CuPy's memory pool are multiples of.
_POOL_BYTES = 512


def memory() -> int:
    """Return the bytes of the current device."""
    import cupy

    return int(cupy.cuda.Device().mem_info[1])
