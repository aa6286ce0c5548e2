"""What users pass as arrays, as arrays of JAX."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def as_array(name: str, x: Any) -> Any:
    """Return an argument as an array; an error names it if JAX makes none of it.

    Raises
    ------
    TypeError
        It is no array, or of keys of JAX's random numbers.
    ValueError
        A number is too large for the integers that JAX has.
    """
    if isinstance(x, np.ndarray) and not x.dtype.isnative:  # which JAX does not take
        x = x.astype(x.dtype.newbyteorder("="))
    try:
        array = jnp.asarray(x)
    except OverflowError as error:
        raise ValueError(f"{name}: {error}; jax_enable_x64 allows larger ones") from error
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} must be an array, got {type(x).__name__}: {error}") from error
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        raise TypeError(f"{name} must be an array of numbers, got keys: {array.dtype}")
    return array
