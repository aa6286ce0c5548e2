"""How many thread-block clusters run on a GPU at a time: asked of the CUDA driver."""

from __future__ import annotations

import ctypes
from functools import cache

from .compiler import Launch, load
from .driver import cuda_driver

#: CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION of cuda.h.
_CLUSTER_DIMENSION = 4


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute; of its union the cluster's shape."""

    _fields_ = [
        ("id", ctypes.c_int),
        ("padding", ctypes.c_char * 4),
        ("value", ctypes.c_uint * 16),
    ]


class _Configuration(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint),
    ]


@cache
def fitting_clusters(launch: Launch, device: int) -> int:
    """Return how many clusters of a launch's kernel fit on the device, the current one, at a time.

    A multiprocessor that is left over where a group of them holds no further cluster counts for
    nothing, which no limit of a device tells. At least 1, so that a launch that cannot run fails.

    Raises
    ------
    RuntimeError
        The driver refuses the question.
    """
    attribute = _Attribute(id=_CLUSTER_DIMENSION)
    attribute.value[:3] = launch.staying, 1, 1
    configuration = _Configuration(
        grid=(launch.grid, 1, 1),
        block=(launch.block, 1, 1),
        shared_bytes=launch.shared_bytes,
        attributes=ctypes.pointer(attribute),
        attribute_count=1,
    )
    count = ctypes.c_int()
    status = cuda_driver().cuOccupancyMaxActiveClusters(
        ctypes.byref(count),
        ctypes.c_void_p(load(launch.kernel, device).ptr),
        ctypes.byref(configuration),
    )
    if status:
        raise RuntimeError(f"cuOccupancyMaxActiveClusters: error {status} for {launch}")
    return max(count.value, 1)
