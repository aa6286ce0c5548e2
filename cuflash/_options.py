"""What the options of calls may be: numbers, flags, names, axes. Errors name the argument."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Sequence

import numpy as np


def real_number(name: str, value: object) -> float:
    """Return a finite Python float; TypeError or ValueError naming the argument otherwise."""
    if isinstance(value, bool | np.bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a real number, got {type(value).__name__}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name} must be finite, got {value}")
    return number


def integer(name: str, value: object) -> int:
    """Return a Python int; TypeError naming the argument otherwise."""
    if isinstance(value, bool | np.bool):
        raise TypeError(f"{name} must be an integer, got {type(value).__name__}")
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {type(value).__name__}") from None
    if not -(2**61) <= number < 2**61:
        raise ValueError(f"{name} must fit in 62 bits, got {number}")
    return number


def choose_method(
    method: object, possible: Sequence[str], elsewhere: Sequence[str], why: str
) -> str:
    """Return `method` if it is "auto" or possible, or raise ValueError listing those that are."""
    if not isinstance(method, str):
        raise TypeError(f"method must be a string, got {type(method).__name__}")
    if method == "auto" or method in possible:
        return method
    can = ", ".join(repr(name) for name in ("auto", *possible))
    if method in elsewhere:
        raise ValueError(
            f"method {method!r} cannot run this problem {why}; methods that can: {can}"
        )
    raise ValueError(f"method {method!r} is unknown; methods that can run this problem: {can}")


def flag(name: str, value: object) -> bool:
    """Return a bool; TypeError naming the argument otherwise."""
    if value is True or value is False:
        return value
    if not isinstance(value, np.bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return bool(value)


def normalize_axes(axis: object, ndim: int) -> tuple[int, ...]:
    """Return the axes meant by an int, a tuple or None (all), from 0 and in rising order.

    A 0-d array can be asked for the axes 0 and -1, as in NumPy's reductions.
    """
    if axis is None:
        return tuple(range(ndim))
    axes = []
    for value in axis if isinstance(axis, tuple) else (axis,):
        number, bound = integer("axis", value), max(ndim, 1)
        if not -bound <= number < bound:
            raise np.exceptions.AxisError(number, ndim, "axis")
        axes.append(number % bound)
    if len(set(axes)) < len(axes):
        raise ValueError(f"axis {axis} names one axis twice")
    return tuple(sorted(axes)) if ndim else ()


def window_sides(window: object) -> tuple[int | None, int | None]:
    """Return (left, right) of a window, None where it is unlimited."""
    if window is None:
        return None, None
    if not isinstance(window, Sequence) or isinstance(window, str | bytes) or len(window) != 2:
        raise TypeError(f"window must be a pair (left, right) of integers or None, got {window!r}")
    sides = [None if side is None else integer("window", side) for side in window]
    if any(side is not None and side < 0 for side in sides):
        raise ValueError(
            f"window has a negative side: {window!r}; sides count keys and None means unlimited"
        )
    return sides[0], sides[1]
