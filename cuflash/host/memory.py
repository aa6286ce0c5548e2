"""Allocation of results."""

from __future__ import annotations

import ctypes
import math
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import numpy as np

from ..problem import c_strides

#: Bytes. A cache line, and what JAX asks of an array that it takes over without a copy.
ALIGNMENT = 64


def device_of(x: np.ndarray) -> AbstractContextManager[Any]:
    """Do nothing: arrays of NumPy lie on no device."""
    return _NOTHING


_NOTHING = nullcontext()


def empty(
    shape: tuple[int, ...], dtype: np.dtype, strides: tuple[int, ...] | None = None
) -> np.ndarray:
    """Allocate an array, its axes in memory in the order of falling `strides` (None: C order).

    Axes with stride 0 (broadcast) go outermost: a result is never interleaved by an axis that its
    model does not have.
    """
    size, result_strides = _layout(shape, dtype.itemsize, strides)
    memory = np.empty(size + ALIGNMENT, np.uint8)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(memory.data)) % ALIGNMENT
    return np.ndarray(shape, dtype, memory, start, result_strides)


@lru_cache(maxsize=1024)
def _layout(
    shape: tuple[int, ...], itemsize: int, strides: tuple[int, ...] | None
) -> tuple[int, tuple[int, ...]]:
    """Return the bytes and the strides of an array whose axes lie in the order of `strides`."""
    order = list(range(len(shape)))
    if strides is not None:
        order.sort(key=lambda axis: -abs(strides[axis]) if strides[axis] else -math.inf)
    packed = c_strides([shape[axis] for axis in order], itemsize)
    places = sorted(order, key=order.__getitem__)
    return math.prod(shape) * itemsize, tuple(packed[place] for place in places)
