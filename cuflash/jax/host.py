"""The handler of calls on CPUs: the buffers as NumPy arrays, and the host engine."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import jax
import numpy as np

from .. import engine, host
from .._attention import check_method
from .._options import choose_method
from ..problem import ArraySpec, check_lengths
from . import ffi_abi
from .calls import TARGET, AttentionCall, AttentionVjpCall, Call, SoftmaxCall, decode


def prepare(call: Call) -> int:
    """Raise unless the engine can run the call by its method; return the bytes of workspace."""
    if isinstance(call, AttentionCall):
        check_method(call.method, host.attention_methods(call.problem), "host")
    if isinstance(call, SoftmaxCall):
        methods = engine.SOFTMAX_METHODS
        choose_method(call.method, methods["host"], methods["device"], "on the host engine")
    return 0


def execute(text: bytes, addresses: list[int], frame: ffi_abi.CallFrame) -> None:
    """Compute a call."""
    call, layouts = _program(text)
    arrays = [_array(*layout, at) for layout, at in zip(layouts, addresses, strict=True)]
    if not isinstance(call, SoftmaxCall):
        _check_lengths(call, arrays)
    getattr(host, call.kind)(*call.arguments(arrays))


def _check_lengths(call: AttentionCall | AttentionVjpCall, arrays: list[np.ndarray]) -> None:
    """Hold lengths to the arrays: the engine takes them for values that were looked at."""
    forward = call if isinstance(call, AttentionCall) else call.forward
    limits = {"query_lengths": forward.problem.tq, "key_lengths": forward.problem.tk}
    for (name, _), x in zip(forward.operands, arrays, strict=False):
        if name in limits:
            check_lengths(name, x, limits[name])


@lru_cache(maxsize=1024)
def _program(text: bytes) -> tuple[Call, tuple[tuple[ArraySpec, int], ...]]:
    """Return a call and, of each array, how it lies in a buffer of so many bytes."""
    call, _ = decode(text)
    sizes = [operand.nbytes for operand in (*call.inputs, *call.outputs)]
    return call, tuple(zip(call.seen, sizes, strict=True))


def _array(spec: ArraySpec, nbytes: int, address: int) -> np.ndarray:
    """Return a view of a buffer."""
    if not nbytes:
        return np.empty(spec.shape, spec.dtype)
    memory: Any = (ctypes.c_char * nbytes).from_address(address)
    return np.ndarray(spec.shape, spec.dtype, memory, 0, spec.strides)


handler = ffi_abi.handler(execute)
jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(handler), platform="cpu")
