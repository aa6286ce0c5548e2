"""The CUDA driver, asked for what CuPy has no call for."""

from __future__ import annotations

import ctypes
from functools import cache


@cache
def cuda_driver() -> ctypes.CDLL:
    """Return the driver's library, which CuPy has loaded where there is a GPU."""
    return ctypes.CDLL("libcuda.so.1")
