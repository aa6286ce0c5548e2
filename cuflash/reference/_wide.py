"""One precision for everything in between, float64 out."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

Wide: TypeAlias = NDArray[np.floating[Any]]
Result: TypeAlias = NDArray[np.float64]

ieee = np.errstate(all="ignore")
"""Decorates the public functions: inf - inf, 0 * inf and log(0) are answers here, not accidents."""


def widen(x: ArrayLike, precision: DTypeLike) -> Wide:
    """Return `x` in the dtype of the computation: exactly, if that is the wider one."""
    array = np.asarray(x)
    if array.dtype != np.longdouble:
        array = array.astype(np.float64)  # bfloat16 has no direct way to longdouble
    return array.astype(precision)


def narrow(x: Wide) -> Result:
    """Round the finished result to float64, once."""
    return x.astype(np.float64)
