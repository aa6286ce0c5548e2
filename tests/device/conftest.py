"""These tests need CuPy, though most of them no GPU: without it they are not collected."""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cuflash.device.compiler import KernelName

collect_ignore_glob = [] if importlib.util.find_spec("cupy") else ["test_*.py"]

# As many hardware queues as there can be, before CUDA starts: streams that share one also wait for
# each other, and tests of what waits for what could see that.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


#: The compute capabilities that have what a kernel is made of, where not all have it.
_CAPABLE = {
    "attention/backward_dmma.cu": lambda capability: capability >= 80,
    "attention/backward_mma.cu": lambda capability: capability >= 80,
    "attention/backward_tf32.cu": lambda capability: capability >= 80,
    "attention/decode_mma.cu": lambda capability: capability >= 80,
    "attention/forward_dmma.cu": lambda capability: capability >= 80,
    "attention/forward_mma.cu": lambda capability: capability >= 80,
    "attention/forward_tf32.cu": lambda capability: capability >= 80,
    "attention/forward_wgmma.cu": lambda capability: capability == 90,
    "attention/backward_wgmma.cu": lambda capability: capability == 90,
    "attention/backward_wgmma_rows.cu": lambda capability: capability == 90,
}


#: Of CuPy's pool: more than a test of a few tiles leaves there.
_KEPT_BYTES = 1 << 30


@pytest.fixture(autouse=True)
def large_memory_goes_back(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let the processes that share the GPU have what a test of large arrays has done with."""
    yield
    if "gpu" in request.keywords:
        import cupy

        pool = cupy.get_default_memory_pool()
        if pool.free_bytes() > _KEPT_BYTES:
            pool.free_all_blocks()


@pytest.fixture(scope="session")
def kernels() -> list[KernelName]:
    """Compile every kernel, in parallel, before the first test that runs one; return their names.

    They also go to CuPy's cache on disk, where the processes that tests start find them.
    """
    from cuflash.device.attention_plans import attention_kernels
    from cuflash.device.attention_plans_mma import sm75_kernels
    from cuflash.device.attention_vjp_plans import attention_vjp_kernels
    from cuflash.device.compiler import warm
    from cuflash.device.executor import device_limits
    from cuflash.device.plans import softmax_kernels
    from cuflash.problem import FLOATS

    limits = device_limits(0)
    # Attention first: a kernel takes ten times as long as one of softmax.
    names = [
        name
        for dtype in FLOATS
        for name in (*attention_kernels(dtype, limits), *attention_vjp_kernels(dtype, limits))
        if _CAPABLE.get(name.source, bool)(int(limits.compute_capability))
    ]
    if int(limits.compute_capability) < 80:
        names += sm75_kernels()
    for dtype in FLOATS:
        names += softmax_kernels(dtype, clusters=limits.cluster_blocks > 1)
    warm(names)
    return names
