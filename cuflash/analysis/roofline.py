"""The ceilings of a GPU: the least time of a kernel is set by its bytes or by its FLOPs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from .._options import integer, real_number
from ..problem import FLOATS
from .traffic import Traffic

__all__ = ["GPUS", "Roofline", "roofline"]

_DTYPES = tuple(dtype.name for dtype in FLOATS)


@dataclass(frozen=True, slots=True)
class Roofline:
    """The ceilings of one GPU.

    Parameters
    ----------
    name : str
        The GPU.
    bandwidth : float
        Bytes a second through HBM, reads and writes together.
    flops : mapping of str to float
        FLOPs a second by dtype, those of the fastest unit that keeps the dtype's accuracy.
    memory : int
        Bytes of HBM.
    """

    name: str
    bandwidth: float
    flops: Mapping[str, float]
    memory: int

    def ridge(self, dtype: str) -> float:
        """Return the intensity, FLOPs a byte, below which HBM is the limit."""
        return self.flops[dtype] / self.bandwidth

    def attainable(self, intensity: float, dtype: str) -> float:
        """Return the most FLOPs a second at an intensity (Williams et al., 2009)."""
        return min(self.flops[dtype], intensity * self.bandwidth)

    def seconds(self, traffic: Traffic, dtype: str) -> float:
        """Return the least time of a call, whose kernels run one after the other."""
        return sum(
            max(
                (kernel.read_bytes + kernel.written_bytes) / self.bandwidth,
                kernel.flops / self.flops[dtype],
            )
            for kernel in traffic.kernels
        )


def _gpu(name: str, terabytes: float, gigabytes: int, *teraflops: float) -> Roofline:
    """Return the ceilings of a data sheet: TB/s, GB, and TFLOP/s in the order of `_DTYPES`."""
    flops = {dtype: 1e12 * rate for dtype, rate in zip(_DTYPES, teraflops, strict=True)}
    return Roofline(name, 1e12 * terabytes, MappingProxyType(flops), gigabytes * 10**9)


#: From NVIDIA's data sheets: dense rates, float64 and 16 bits on tensor cores, float32 without.
#: The T4 has no tensor cores for float64 and bfloat16; it computes the latter in float32.
GPUS: Mapping[str, Roofline] = MappingProxyType(
    {
        "t4": _gpu("T4", 0.32, 16, 0.25, 8.1, 65, 8.1),
        "a100": _gpu("A100 SXM 80 GB", 2.039, 80, 19.5, 19.5, 312, 312),
        "h100": _gpu("H100 SXM", 3.35, 80, 67, 67, 989, 989),
        "h200": _gpu("H200", 4.8, 141, 67, 67, 989, 989),
    }
)

#: Multiply-adds a clock and multiprocessor by compute capability, in the order of `_DTYPES`: CUDA
#: C++ Programming Guide, throughput of arithmetic instructions, and for tensor cores (dense,
#: accumulating in float32) NVIDIA's architecture white papers.
_MULTIPLY_ADDS = {
    "75": (2, 64, 512, 64),
    "80": (64, 64, 1024, 1024),
    "86": (2, 128, 512, 512),
    "89": (2, 128, 512, 512),
    "90": (128, 128, 2048, 2048),
    "100": (64, 128, 4096, 4096),
    "120": (2, 128, 512, 512),
}


def roofline(
    gpu: str | int | None = None,
    *,
    bandwidth: float | None = None,
    flops: float | Mapping[str, float] | None = None,
    memory: int | None = None,
) -> Roofline:
    """Return the ceilings of a GPU: by name, of a device that is here, or from numbers.

    Parameters
    ----------
    gpu : str or int, optional
        A key of `GPUS`, or the number of a CUDA device, whose properties are read by CuPy: clocks,
        bus width, multiprocessors and memory. None takes all three numbers below.
    bandwidth : float, optional
        Bytes a second; replaces the GPU's, for instance by the measured rate of a copy.
    flops : float or mapping of str to float, optional
        FLOPs a second, of all dtypes or by dtype; replaces the GPU's.
    memory : int, optional
        Bytes; replaces the GPU's.

    Returns
    -------
    Roofline
        Of a device: what its highest clocks allow, which no kernel quite reaches.

    Raises
    ------
    TypeError, ValueError
        An argument is not one of those above; the message names it.
    RuntimeError
        A device is asked for, and CuPy, the device or a figure of it is missing.

    Examples
    --------
    >>> from cuflash import analysis
    >>> h100 = analysis.roofline("h100")
    >>> round(h100.ridge("bfloat16"))
    295
    >>> paper = analysis.roofline(bandwidth=3.3e12, flops=1e15, memory=80 * 10**9)
    >>> read = 8 * 4096 * 4096 * 2
    >>> f"{read / 1e6:.0f} MB in {read / paper.bandwidth * 1e6:.0f} us"
    '268 MB in 81 us'
    """
    given: dict[str, Any] = {}
    if bandwidth is not None:
        given["bandwidth"] = _positive("bandwidth", bandwidth)
    if flops is not None:
        given["flops"] = _flops(flops)
    if memory is not None:
        given["memory"] = integer("memory", memory)
        _positive("memory", memory)
    if gpu is None:
        missing = [name for name in ("bandwidth", "flops", "memory") if name not in given]
        if missing:
            raise ValueError(f"without a gpu, {', '.join(missing)} must be given")
        return Roofline("as given", **given)
    if isinstance(gpu, str):
        if gpu not in GPUS:
            raise ValueError(f"gpu {gpu!r} is unknown; known are {', '.join(GPUS)}")
        return replace(GPUS[gpu], **given)
    return _device(integer("gpu", gpu), given)


def _positive(name: str, value: object) -> float:
    number = real_number(name, value)
    if number <= 0:
        raise ValueError(f"{name} must be positive, got {value}")
    return number


def _flops(value: float | Mapping[str, float]) -> Mapping[str, float]:
    rates = value if isinstance(value, Mapping) else dict.fromkeys(_DTYPES, value)
    if set(rates) != set(_DTYPES):
        raise ValueError(f"flops must name {', '.join(_DTYPES)}, got {', '.join(map(str, rates))}")
    return MappingProxyType({name: _positive("flops", rate) for name, rate in rates.items()})


def _device(number: int, given: Mapping[str, Any]) -> Roofline:
    """Return the ceilings of a CUDA device, `given` in place of what its properties say."""
    try:
        import cupy
    except ImportError as error:
        raise RuntimeError(
            f"gpu {number} is a CUDA device, whose properties are read by CuPy "
            "(pip install 'cuflash[cuda13]', or cuda12)"
        ) from error
    runtime = cupy.cuda.runtime
    try:
        device, properties = cupy.cuda.Device(number), runtime.getDeviceProperties(number)
        attributes, capability = device.attributes, device.compute_capability
    except runtime.CUDARuntimeError as error:
        raise RuntimeError(f"gpu {number}: {error}") from error
    found: dict[str, Any] = {
        # Two transfers a clock, and a bus width in bits; clocks are in kHz.
        "bandwidth": 2e3 * attributes["MemoryClockRate"] * attributes["GlobalMemoryBusWidth"] / 8,
        "memory": int(properties["totalGlobalMem"]),
    }
    if capability in _MULTIPLY_ADDS:
        clocks = 1e3 * attributes["ClockRate"] * attributes["MultiProcessorCount"]
        found["flops"] = MappingProxyType(
            {
                dtype: 2 * clocks * each
                for dtype, each in zip(_DTYPES, _MULTIPLY_ADDS[capability], strict=True)
            }
        )
    elif "flops" not in given:
        raise RuntimeError(f"the rates of compute capability {capability} are unknown: give flops")
    return Roofline(properties["name"].decode(), **{**found, **given})
