"""Allocation of results."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

#: Bytes. A cache line, and what JAX asks of an array that it takes over without a copy.
ALIGNMENT = 64


def empty(
    shape: tuple[int, ...], dtype: np.dtype, strides: tuple[int, ...] | None = None
) -> np.ndarray:
    """Allocate an array, its axes in memory in the order of falling `strides` (None: C order).

    Axes with stride 0 (broadcast) go outermost: a result is never interleaved by an axis that its
    model does not have.
    """
    if strides is None:
        return _aligned(shape, dtype)
    order = sorted(
        range(len(shape)), key=lambda axis: -abs(strides[axis]) if strides[axis] else -np.inf
    )
    places = sorted(range(len(shape)), key=order.__getitem__)
    return _aligned([shape[axis] for axis in order], dtype).transpose(places)


def _aligned(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)
