"""The device engine on the CPU: its own plans and launches, with NumPy arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from cuflash import host
from cuflash.device.compiler import Launch
from cuflash.device.executor import DeviceLimits
from cuflash.device.softmax import compute, with_inputs
from cuflash.problem import SoftmaxProblem
from tests import devices
from tests.host_cuda.builder import Edit, HostKernel

#: Blocks run one after another here: no clusters.
H200 = replace(devices.H200, cluster_blocks=1)


@dataclass
class HostExecutor:
    """Runs launches one thread of a block at a time; `launched` lists them."""

    limits: DeviceLimits = H200
    order: str = "forward"
    seed: int = 0
    edits: Sequence[Edit] = ()
    sanitize: bool = False
    launched: list[Launch] = field(default_factory=list)

    def address(self, x: np.ndarray) -> int:
        return x.ctypes.data

    def allocate(self, nbytes: int) -> np.ndarray:
        # What a kernel must not read is NaN.
        memory = np.full(nbytes + 16, 0xFF, np.uint8)
        start = -memory.ctypes.data % 16
        return memory[start : start + nbytes]

    def broadcast_to(self, x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        return np.broadcast_to(x, shape)

    def launch(self, launch: Launch, parameters: np.ndarray) -> None:
        kernel = HostKernel(launch.kernel, edits=self.edits, sanitize=self.sanitize)
        kernel.launch(
            launch.grid,
            launch.block,
            launch.shared_bytes,
            parameters,
            order=self.order,
            seed=self.seed,
        )
        self.launched.append(launch)


class HostCuda:
    """A `cuflash.engine.Engine` of NumPy arrays and the kernels and plans of the device."""

    def __init__(self, **options: Any) -> None:
        self.executor = HostExecutor(**options)

    device_of, empty = staticmethod(host.device_of), staticmethod(host.empty)
    merge_softmax = staticmethod(host.merge_softmax)

    def softmax(
        self,
        problem: SoftmaxProblem,
        inputs: Sequence[np.ndarray],
        where: np.ndarray | None,
        outputs: Sequence[np.ndarray],
    ) -> None:
        aligned = [np.require(x, requirements="A") for x in inputs]
        compute(with_inputs(problem, aligned), aligned, where, outputs, self.executor)
