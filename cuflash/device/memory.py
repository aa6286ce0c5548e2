"""Allocation of results, and arrays whose elements lie at odd addresses."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import cupy
import numpy as np


def empty(shape: tuple[int, ...], dtype: np.dtype, strides: tuple[int, ...] | None = None) -> Any:
    """Allocate an array whose axes lie in memory from the largest to the smallest of `strides`.

    None means C order. Axes with stride 0 (broadcast) go outermost: a result is never interleaved
    by an axis that its model does not have.
    """
    order = None if strides is None else _order(strides)
    if order is None:
        return cupy.empty(shape, dtype)
    memory = cupy.empty([shape[axis] for axis in order], dtype)
    return memory.transpose([order.index(axis) for axis in range(len(shape))])


@lru_cache(maxsize=1024)
def _order(strides: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the axes from the outermost to the innermost; None if that is C order."""
    axes = range(len(strides))
    order = sorted(axes, key=lambda axis: -abs(strides[axis]) if strides[axis] else -np.inf)
    return None if order == list(axes) else tuple(order)


def device_of(x: Any) -> AbstractContextManager[Any]:
    """Make the device of an array the current one."""
    device = x.data.device_id
    if device == cupy.cuda.runtime.getDevice():
        return _NOTHING  # the common case, for a tenth of the time
    return cupy.cuda.Device(device)


_NOTHING = nullcontext()


def is_aligned(x: Any) -> bool:
    """Tell whether every element lies at a multiple of its size, as the device needs it."""
    itemsize = x.itemsize
    return not x.data.ptr % itemsize and _are_multiples(x.strides, itemsize)


@lru_cache(maxsize=1024)
def _are_multiples(strides: tuple[int, ...], itemsize: int) -> bool:
    return not any(stride % itemsize for stride in strides)


def aligned(x: Any, *, copy: bool = True) -> Any:
    """Return `x` if its elements are aligned, else a new array, with its values if `copy`."""
    if is_aligned(x):
        return x
    return _bytes(x).copy().view(x.dtype)[..., 0] if copy else cupy.empty(x.shape, x.dtype)


def readable(x: Any) -> Any:
    """Return an operand as kernels can read it: uploaded, aligned; numbers and None as they are."""
    if isinstance(x, cupy.ndarray):
        return x if is_aligned(x) else aligned(x)
    return cupy.asarray(x) if isinstance(x, np.ndarray) else x


def copy_unaligned(source: Any, target: Any) -> None:
    """Copy `source` to an array that `aligned` replaced by it; nothing to do if it did not."""
    if source is not target:
        _bytes(target)[...] = _bytes(source)


def _bytes(x: Any) -> Any:
    """Return a view of an array's bytes, with one more axis."""
    shape, strides = (*x.shape, x.dtype.itemsize), (*x.strides, 1)
    return cupy.ndarray(shape, np.uint8, memptr=x.data, strides=strides)
