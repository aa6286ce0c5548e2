"""The device engine on the CPU: its own plans and launches, with NumPy arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from cuflash import host
from cuflash.device.attention import respecified
from cuflash.device.baselines import (
    compute_layer_norm_steps,
    compute_matmul_steps,
    compute_scores_fused,
    compute_softmax_steps,
)
from cuflash.device.compiler import Launch
from cuflash.device.executor import DeviceLimits
from cuflash.device.fused import compute_layer_norm, compute_matmul
from cuflash.device.softmax import compute, with_inputs
from cuflash.problem import AttentionArrays, AttentionProblem, SoftmaxProblem, accumulator
from cuflash.problem_fused import (
    Dropout,
    LayerNormArrays,
    LayerNormGrads,
    LayerNormProblem,
    MatmulProblem,
)
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
    attention_methods = staticmethod(host.attention_methods)

    def softmax(
        self,
        problem: SoftmaxProblem,
        inputs: Sequence[np.ndarray],
        where: np.ndarray | None,
        outputs: Sequence[np.ndarray],
    ) -> None:
        aligned = [np.require(x, requirements="A") for x in inputs]
        compute(with_inputs(problem, aligned), aligned, where, outputs, self.executor)

    def matmul_bias_activation(
        self,
        problem: MatmulProblem,
        a: np.ndarray,
        b: np.ndarray,
        bias: np.ndarray,
        out: np.ndarray,
    ) -> None:
        aligned = [np.require(x, requirements="A") for x in (a, b, bias)]
        compute_matmul(problem, aligned, out, self.executor)

    def dropout_bias_layer_norm(
        self,
        problem: LayerNormProblem,
        dropout: Dropout,
        arrays: LayerNormArrays,
        *results: np.ndarray | None,
    ) -> None:
        compute_layer_norm(problem, dropout, _aligned(arrays), results, self.executor)

    def dropout_bias_layer_norm_vjp(
        self,
        problem: LayerNormProblem,
        dropout: Dropout,
        arrays: LayerNormArrays,
        grads: LayerNormGrads,
    ) -> None:
        compute_layer_norm(problem, dropout, _aligned(arrays), grads, self.executor)

    def scores_fused_attention(
        self,
        problem: AttentionProblem,
        arrays: AttentionArrays,
        out: np.ndarray,
        lse: np.ndarray | None,
    ) -> None:
        if 0 in problem.lse_shape:
            return
        lse = np.empty(problem.lse_shape, accumulator(problem.dtype)) if lse is None else lse
        sources = AttentionArrays(
            *(np.require(x, None, "A") if isinstance(x, np.ndarray) else x for x in arrays)
        )
        problem = respecified(problem, arrays, sources)
        compute_scores_fused(problem, sources, out, lse, host.materialized_attention, self.executor)

    def unfused_softmax(self, x: np.ndarray, y: np.ndarray) -> None:
        compute_softmax_steps(np.require(x, None, "A"), y, self.executor)

    def unfused_matmul_bias_activation(
        self,
        problem: MatmulProblem,
        a: np.ndarray,
        b: np.ndarray,
        bias: np.ndarray,
        out: np.ndarray,
    ) -> None:
        compute_matmul_steps(problem, [a, b, bias], out, self.executor)

    def unfused_dropout_bias_layer_norm(
        self, problem: LayerNormProblem, dropout: Dropout, arrays: LayerNormArrays, y: np.ndarray
    ) -> None:
        compute_layer_norm_steps(problem, dropout, arrays, y, self.executor)


def _aligned(arrays: LayerNormArrays) -> LayerNormArrays:
    return LayerNormArrays(*(x if x is None else np.require(x, None, "A") for x in arrays))
