"""Where plans run: the limits of a device, and the launch of a kernel on it."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Protocol

import cupy
import numpy as np

from .clusters import fitting_clusters
from .compiler import Launch, load


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """What plans read of a device; bytes are bytes, the rest counts.

    `shared_per_block` is the most that a block can ask for (the opt-in limit), `shared_per_sm` what
    the blocks on a multiprocessor have together. `cluster_blocks` is the size of the largest
    thread-block cluster, 1 where there are none.
    """

    compute_capability: str
    multiprocessors: int
    threads_per_sm: int
    registers_per_sm: int
    shared_per_sm: int
    shared_per_block: int
    l2_bytes: int
    blocks: int = 2**31 - 1
    cluster_blocks: int = 1

    def __post_init__(self) -> None:
        """Refuse numbers that no device has."""
        for name in (
            "multiprocessors",
            "threads_per_sm",
            "registers_per_sm",
            "blocks",
            "cluster_blocks",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if not 0 < self.shared_per_block <= self.shared_per_sm:
            raise ValueError(
                f"shared_per_block must lie in 1..shared_per_sm ({self.shared_per_sm}), "
                f"got {self.shared_per_block}"
            )


def _cluster_blocks(compute_capability: str) -> int:
    """Return the largest cluster: 16 where a kernel may ask for more than the portable 8."""
    major = int(compute_capability[:-1])
    return 1 if major < 9 else 16 if major in (9, 10) else 8


@cache
def device_limits(device: int) -> DeviceLimits:
    """Return what plans read of a device."""
    runtime = cupy.cuda.runtime

    def attribute(name: str) -> int:
        # One by one: `Device.attributes` reads all of them, some of them slowly.
        return int(runtime.deviceGetAttribute(getattr(runtime, f"cudaDevAttr{name}"), device))

    return DeviceLimits(
        compute_capability=cupy.cuda.Device(device).compute_capability,
        multiprocessors=attribute("MultiProcessorCount"),
        threads_per_sm=attribute("MaxThreadsPerMultiProcessor"),
        registers_per_sm=attribute("MaxRegistersPerMultiprocessor"),
        shared_per_sm=attribute("MaxSharedMemoryPerMultiprocessor"),
        shared_per_block=attribute("MaxSharedMemoryPerBlockOptin"),
        l2_bytes=attribute("L2CacheSize"),
        blocks=attribute("MaxGridDimX"),
        cluster_blocks=_cluster_blocks(cupy.cuda.Device(device).compute_capability),
    )


class Executor(Protocol):
    """What runs plans: a device, or in the tests the CPU."""

    @property
    def limits(self) -> DeviceLimits:
        """What plans read of the device."""

    def address(self, x: Any) -> int:
        """Return where an array of the executor's library lies."""

    def allocate(self, nbytes: int) -> Any:
        """Return an array of bytes, aligned to at least 16."""

    def broadcast_to(self, x: Any, shape: tuple[int, ...]) -> Any:
        """Return a view of an array, as `numpy.broadcast_to`."""

    def launch(self, launch: Launch, parameters: np.ndarray) -> None:
        """Start a kernel with a parameter block; an error is raised."""


class CurrentDevice:
    """Runs plans on CuPy's current device and stream."""

    def __init__(self) -> None:
        self.device = cupy.cuda.runtime.getDevice()
        self.stream = cupy.cuda.get_current_stream()

    @property
    def limits(self) -> DeviceLimits:
        """What plans read of the device."""
        return device_limits(self.device)

    def address(self, x: Any) -> int:
        """Return the device pointer of a CuPy array."""
        return int(x.data.ptr)

    def allocate(self, nbytes: int) -> Any:
        """Return bytes of CuPy's memory pool."""
        return cupy.empty(nbytes, np.uint8)

    def broadcast_to(self, x: Any, shape: tuple[int, ...]) -> Any:
        """Return a view of a CuPy array."""
        return cupy.broadcast_to(x, shape)

    def launch(self, launch: Launch, parameters: np.ndarray) -> None:
        """Start a kernel.

        Allocates, synchronises and, after the first call with this kernel, compiles nothing.

        Raises
        ------
        cupy.cuda.driver.CUDADriverError
            The launch was refused.
        """
        if launch.clears:  # at 5 us less than by a kernel
            (address,) = struct.unpack_from("@P", parameters.tobytes(), launch.clears)
            cupy.cuda.runtime.memsetAsync(address, 0, 4, self.stream.ptr)
            return
        load(launch.kernel, self.device)(
            *((_blocks(launch, self.device),), (launch.block,), (parameters,)),
            shared_mem=launch.shared_bytes,
            stream=self.stream,
        )


def ready(launch: Launch, device: int) -> Callable[[int, int, int], None]:
    """Return the driver's cuLaunchKernel with all of a launch but its last three arguments.

    They are a stream, the address of an array that has the address of the parameter block, and 0.
    """
    kernel = load(launch.kernel, device)
    blocks = _blocks(launch, device), 1, 1
    threads = launch.block, 1, 1
    return partial(
        cupy.cuda.driver.launchKernel, kernel.ptr, *blocks, *threads, launch.shared_bytes
    )


def _blocks(launch: Launch, device: int) -> int:
    if not launch.staying:
        return launch.grid
    return min(launch.grid, launch.staying * fitting_clusters(launch, device))
