"""What users pass as arrays, as arrays of JAX."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp


def as_array(name: str, x: Any) -> Any:
    """Return an argument as an array; TypeError names it if JAX makes none of it."""
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} must be an array, got {type(x).__name__}: {error}") from error
