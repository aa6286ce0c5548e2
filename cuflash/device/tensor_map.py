"""Tensor maps: what Hopper's copy engine (TMA) is told of a tensor, made by the CUDA driver."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from .driver import cuda_driver

#: Axes of every map: elements and rows, then three of the batch.
AXES = 5
#: Bytes that addresses and strides are multiples of.
ALIGNMENT = 16
#: Elements of a box along the contiguous axis: 128 bytes, which the swizzle permutes.
BOX_ELEMENTS = 64
_WORDS = 16  # of 8 bytes: CUtensorMap

# CUtensorMapDataType, CUtensorMapSwizzle and CUtensorMapL2promotion of cuda.h.
_DATA_TYPES = {"float16": 6, "bfloat16": 9}
_SWIZZLE_128 = 3
_L2_PROMOTION_128 = 2


class TensorMap(NamedTuple):
    """A tensor of 16-bit elements but for its address.

    `sizes` counts elements, rows and entries of the batch axes; `strides` are the bytes from one
    row, or entry, to the next. A box has 64 elements of `box_rows` rows.
    """

    dtype: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box_rows: int

    @classmethod
    def of(
        cls,
        dtype: np.dtype,
        columns: int,
        rows: int,
        row_stride: int,
        batch: Sequence[tuple[int, int]],
        box_rows: int,
    ) -> TensorMap:
        """Describe matrices, given the size and the stride in bytes of each batch axis.

        An axis along which the tensor broadcasts has one entry: kernels ask for no other.
        """
        kept = [(size, stride) if stride else (1, ALIGNMENT) for size, stride in batch]
        kept += [(1, ALIGNMENT)] * (AXES - 2 - len(kept))
        return cls(
            dtype.name,
            (columns, rows, *(size for size, _ in kept)),
            (row_stride, *(stride for _, stride in kept)),
            box_rows,
        )


@lru_cache(maxsize=4096)
def encode(tensor: TensorMap, address: int) -> np.ndarray:
    """Return the map of a tensor at an address, as 16 words of 8 bytes.

    Raises
    ------
    RuntimeError
        The driver refuses the tensor.
    """
    memory = np.zeros(2 * _WORDS, np.int64)
    start = -memory.ctypes.data % 64 // 8  # the driver wants a multiple of 64 bytes
    words = memory[start : start + _WORDS]
    box = (BOX_ELEMENTS, tensor.box_rows, *[1] * (AXES - 2))
    status = cuda_driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(words.ctypes.data),
        _DATA_TYPES[tensor.dtype],
        ctypes.c_uint32(AXES),
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * AXES)(*tensor.sizes),
        (ctypes.c_uint64 * (AXES - 1))(*tensor.strides),
        (ctypes.c_uint32 * AXES)(*box),
        (ctypes.c_uint32 * AXES)(*[1] * AXES),
        0,  # not interleaved
        _SWIZZLE_128,
        _L2_PROMOTION_128,
        0,  # what lies outside is 0
    )
    if status:
        raise RuntimeError(f"cuTensorMapEncodeTiled: error {status} for {tensor} at {address:#x}")
    words.flags.writeable = False
    return words
