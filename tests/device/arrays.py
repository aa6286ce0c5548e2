"""NumPy arrays to the device and back, with their layout in memory."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import cupy
import numpy as np
from numpy.lib.array_utils import byte_bounds

#: Memory of CuPy's pool is aligned to this.
_POOL = 512


def to_device(x: np.ndarray) -> Any:
    """Return a CuPy array equal to `x` with its strides, and its address modulo 512."""
    if not x.dtype.isnative:
        x = x.astype(x.dtype.newbyteorder("="))
    low, high = byte_bounds(x) if x.size else (x.ctypes.data, x.ctypes.data)
    start = low % _POOL
    memory = cupy.empty(start + high - low, np.uint8)
    pointer = ctypes.cast(low, ctypes.POINTER(ctypes.c_uint8))
    memory[start:] = cupy.asarray(np.ctypeslib.as_array(pointer, (high - low,)))
    first = memory.data + start + (x.ctypes.data - low)
    return cupy.ndarray(x.shape, x.dtype, memptr=first, strides=x.strides)


def on_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function of CuPy arrays take NumPy arrays, lists of them and out=, and return them."""

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        there: dict[int, Any] = {}

        def send(x: Any) -> Any:
            if isinstance(x, tuple | list):
                return type(x)(*map(send, x)) if hasattr(x, "_fields") else type(x)(map(send, x))
            if isinstance(x, np.generic) and not isinstance(x, np.integer):
                x = np.asarray(x)  # what indexing makes of an option without axes
            if not isinstance(x, np.ndarray):
                return x
            if id(x) not in there:  # one array stays one: out may be x itself
                there[id(x)] = to_device(x)
            return there[id(x)]

        sent = [send(x) for x in args]
        options_sent = {name: send(x) for name, x in options.items()}
        result = function(*sent, **options_sent)
        out = options.get("out")
        if out is not None:
            assert result is options_sent["out"]
            out[...] = cupy.asnumpy(result)
            return out
        return _fetch(result)

    return call


def _fetch(result: Any) -> Any:
    if isinstance(result, tuple):
        fetched = map(_fetch, result)
        return type(result)(*fetched) if hasattr(result, "_fields") else tuple(fetched)
    return None if result is None else cupy.asnumpy(result)
