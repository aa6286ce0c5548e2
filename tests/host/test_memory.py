"""Where results lie in memory."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuflash.host import empty

DTYPES = [np.dtype(t) for t in (np.float64, np.float32, np.float16, ml_dtypes.bfloat16)]


@given(shape=st.lists(st.integers(0, 5), max_size=6).map(tuple), dtype=st.sampled_from(DTYPES))
def test_c_order_and_aligned(shape: tuple[int, ...], dtype: np.dtype) -> None:
    x = empty(shape, dtype)
    assert (x.shape, x.dtype) == (shape, dtype)
    assert x.flags.c_contiguous
    assert x.flags.writeable
    assert x.size == 0 or x.ctypes.data % 64 == 0


@given(shape=st.lists(st.integers(1, 5), min_size=1, max_size=6).map(tuple), data=st.data())
def test_axes_lie_in_memory_in_the_order_of_the_strides(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    strides = tuple(data.draw(st.integers(-99, 99)) for _ in shape)
    x = empty(shape, np.dtype(np.float32), strides)
    assert x.shape == shape
    # Outermost first: broadcast axes, then by falling stride, equal ones as they come.
    order = sorted(range(len(shape)), key=lambda a: (strides[a] != 0, -abs(strides[a]), a))
    assert x.transpose(order).flags.c_contiguous


@pytest.mark.parametrize("order", ["C", "F"])
def test_the_order_of_an_array_is_kept(order: str) -> None:
    like = np.empty((3, 4, 5), order=order)
    assert empty(like.shape, like.dtype, like.strides).strides == like.strides
