"""PyTorch and JAX on the GPU behind one face, and a gate that holds a stream.

Neither library is imported before a test asks for it.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any

import cupy
import numpy as np
import pytest

from cuflash.problem import BFLOAT16


def _load(name: str) -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the library, about what it imports itself
        return pytest.importorskip(name)


class Torch:
    """CUDA tensors."""

    name = "torch"

    def __init__(self) -> None:
        self.module = _load("torch")
        if not self.module.cuda.is_available():
            pytest.skip("PyTorch has no CUDA")
        self.type = self.module.Tensor

    def array(self, x: np.ndarray) -> Any:
        """Copy a NumPy array to the GPU."""
        bits = x.view(np.uint16) if x.dtype == BFLOAT16 else x
        tensor = self.module.from_numpy(np.array(bits, order="C")).cuda()
        return tensor.view(self.module.bfloat16) if x.dtype == BFLOAT16 else tensor

    def numpy(self, x: Any) -> np.ndarray:
        """Copy a tensor to the host, after the work that is queued on its current stream."""
        if x.dtype == self.module.bfloat16:
            return x.view(self.module.uint16).cpu().numpy().view(BFLOAT16)
        return x.cpu().numpy()

    def address(self, x: Any) -> int:
        """Return where a tensor's first element lies."""
        return x.data_ptr()

    def is_on_gpu(self, x: Any) -> bool:
        """Tell whether a result lies where the operands do."""
        return x.device == self.module.device("cuda", 0)


class Jax:
    """Arrays of JAX's first GPU; made with 64-bit types on."""

    name = "jax"

    def __init__(self) -> None:
        # Otherwise JAX takes three quarters of the GPU's memory at its first array.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        self.module = _load("jax")
        try:
            self.gpu = self.module.devices("gpu")[0]
        except RuntimeError as error:
            pytest.skip(f"JAX has no GPU: {error}")
        self.type = self.module.Array

    def array(self, x: np.ndarray) -> Any:
        """Copy a NumPy array to the GPU."""
        return self.module.device_put(x, self.gpu)

    def numpy(self, x: Any) -> np.ndarray:
        """Copy an array to the host, after the work that makes it."""
        return np.asarray(x)

    def address(self, x: Any) -> int:
        """Return where an array's first element lies."""
        return x.unsafe_buffer_pointer()

    def is_on_gpu(self, x: Any) -> bool:
        """Tell whether a result lies where the operands do."""
        return x.devices() == {self.gpu}


@contextmanager
def open_library(name: str) -> Iterator[Any]:
    """Give "torch" or "jax", or skip the test."""
    if name == "torch":
        yield Torch()
        return
    library = Jax()
    library.module.config.update("jax_enable_x64", True)
    yield library
    library.module.config.update("jax_enable_x64", False)


_GATE = r"""
extern "C" __global__ void wait(const volatile int* open, long long patience) {
    const long long start = clock64();
    while (*open == 0 && clock64() - start < patience) {}
}
"""
#: Clock cycles, some 5 s: where the host waits for a closed gate, a test fails and nothing hangs.
_PATIENCE = 10**10


@cache
def _gate_kernel() -> Any:
    return cupy.RawKernel(_GATE, "wait")


@contextmanager
def gate(stream: Any) -> Iterator[Callable[[], None]]:
    """Hold all that is queued on a CuPy stream from here on until the given function is called.

    Unlike a long kernel, a gate gives a program that does not wait all the time it needs to do the
    wrong thing. On leaving, the gate is opened and the device waited for.
    """
    memory = cupy.cuda.alloc_pinned_memory(4)  # the device sees it under the same address
    flag = np.frombuffer(memory, np.int32, 1)
    flag[0] = 0

    def open_gate() -> None:
        flag[0] = 1

    with stream:
        _gate_kernel()((1,), (1,), (np.uintp(memory.ptr), np.int64(_PATIENCE)))
    try:
        yield open_gate
    finally:
        open_gate()
        cupy.cuda.Device().synchronize()


def finishes(stream: Any, seconds: float = 0.1) -> bool:
    """Tell whether a CuPy stream gets done with what is queued on it within some time."""
    event = stream.record()
    give_up = time.monotonic() + seconds
    while not event.done and time.monotonic() < give_up:
        time.sleep(0.001)
    return event.done
