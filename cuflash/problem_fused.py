"""The frozen descriptions of fused chains, beside `problem.py`."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np

from ._options import integer, real_number
from .problem import MAX_AXES, ArraySpec, accumulator, require_float, require_same

#: What `activation` may be, in the order of `Activation` of the kernels; None is the identity.
ACTIVATIONS = (None, "relu", "gelu", "gelu_tanh")
#: A lane of random bits, which decides over one element, has so many values.
LANE_VALUES = 1 << 16
#: Elements that one call of Philox decides over.
LANES = 8


@dataclass(frozen=True, slots=True)
class MatmulProblem:
    """activation(a @ b + bias), described.

    `a` has shape `batch_shape + (M, K)` and `b` `batch_shape + (K, N)`, with stride 0 on axes that
    broadcast; `bias` has shape (N,).
    """

    batch_shape: tuple[int, ...]
    a: ArraySpec
    b: ArraySpec
    bias: ArraySpec
    activation: str | None

    @property
    def sizes(self) -> tuple[int, int, int]:
        """M, K, N."""
        return self.a.shape[-2], self.a.shape[-1], self.b.shape[-1]

    @property
    def dtype(self) -> np.dtype:
        """Dtype of operands and result."""
        return self.a.dtype

    @property
    def out_shape(self) -> tuple[int, ...]:
        """Shape of the result."""
        return (*self.batch_shape, self.a.shape[-2], self.b.shape[-1])

    @classmethod
    def of(cls, arrays: Mapping[str, Any], activation: object) -> Self:
        """Validate a call and describe it; TypeError or ValueError naming the argument."""
        a, b, bias = (ArraySpec.of(arrays[name]) for name in ("a", "b", "bias"))
        for name, spec in (("a", a), ("b", b), ("bias", bias)):
            require_float(name, spec.dtype)
            require_same(name, spec.dtype, "a", a.dtype, "dtype")
        for name, spec in (("a", a), ("b", b)):
            if not 2 <= len(spec.shape) <= MAX_AXES:
                raise ValueError(f"{name} has {len(spec.shape)} axes; 2 to {MAX_AXES} are possible")
        if a.shape[-1] != b.shape[-2]:
            raise ValueError(
                f"b has {b.shape[-2]} rows (shape {b.shape}) "
                f"but a has {a.shape[-1]} columns (shape {a.shape})"
            )
        require_same("bias", bias.shape, "a row of the result", (b.shape[-1],), "shape")
        try:
            batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        except ValueError:
            raise ValueError(
                f"b has shape {b.shape}, whose batch axes do not broadcast with those of "
                f"a, {a.shape}"
            ) from None
        if not isinstance(activation, str | None):
            raise TypeError(f"activation must be a str or None, got {type(activation).__name__}")
        if activation not in ACTIVATIONS:
            known = ", ".join(map(repr, ACTIVATIONS))
            raise ValueError(f"activation {activation!r} is unknown; known are {known}")
        return cls(
            batch,
            a.broadcast_to((*batch, *a.shape[-2:]), "a"),
            b.broadcast_to((*batch, *b.shape[-2:]), "b"),
            bias,
            activation,
        )


class Dropout(NamedTuple):
    """Which elements are dropped: those whose 16 random bits are below `threshold`.

    The bits are lane e % 8 of Philox4x32-10 with the counter e // 8 + offset and the key `seed`, e
    being the element's number in C order.
    """

    threshold: int
    seed: int
    offset: int

    @property
    def scale(self) -> float:
        """Factor of what is kept: 1 / (1 - p) of the p that the threshold stands for."""
        kept = LANE_VALUES - self.threshold
        return LANE_VALUES / kept if kept else 0.0

    @classmethod
    def of(cls, p: object, seed: object, offset: object) -> Self:
        """Validate the options of a call; TypeError or ValueError naming the argument."""
        probability = real_number("p", p)
        if not 0 <= probability < 1:
            raise ValueError(f"p must lie in [0, 1), got {p}")
        if isinstance(seed, bool | np.bool):
            raise TypeError(f"seed must be an integer, got {type(seed).__name__}")
        try:
            key = operator.index(seed)  # type: ignore[arg-type]
        except TypeError:
            raise TypeError(f"seed must be an integer, got {type(seed).__name__}") from None
        if not 0 <= key < 1 << 64:
            raise ValueError(f"seed must lie in [0, 2**64), got {key}")
        first = integer("offset", offset)
        if first < 0:
            raise ValueError(f"offset must not be negative, got {first}")
        return cls(round(probability * LANE_VALUES), key, first)


class LayerNormArrays(NamedTuple):
    """The operands of a call; `dy`, `mean` and `rstd` are there for gradients alone."""

    x: Any
    bias: Any
    gamma: Any
    beta: Any = None
    residual: Any = None
    dy: Any = None
    mean: Any = None
    rstd: Any = None


@dataclass(frozen=True, slots=True)
class LayerNormProblem:
    """LayerNorm of dropout(x + bias) + residual over the last axis, or its gradients, described.

    What the random bits are is told apart, in `Dropout`. `eps` is not read for gradients.
    """

    x: ArraySpec
    residual: ArraySpec | None
    eps: float

    @property
    def dtype(self) -> np.dtype:
        """Dtype of operands and result."""
        return self.x.dtype

    @property
    def accumulator(self) -> np.dtype:
        """Dtype of statistics and sums."""
        return accumulator(self.x.dtype)

    @property
    def columns(self) -> int:
        """Length of a row."""
        return self.x.shape[-1]

    @property
    def rows_shape(self) -> tuple[int, ...]:
        """Shape of the statistics."""
        return self.x.shape[:-1]

    @classmethod
    def of(cls, arrays: LayerNormArrays, eps: object) -> Self:
        """Validate a call and describe it; TypeError or ValueError naming the argument."""
        x = ArraySpec.of(arrays.x)
        require_float("x", x.dtype)
        if not 1 <= len(x.shape) <= MAX_AXES:
            raise ValueError(f"x has {len(x.shape)} axes; 1 to {MAX_AXES} are possible")
        if x.shape[-1] < 1:
            raise ValueError(f"x has shape {x.shape}; at least one column is needed")
        shapes = {
            **dict.fromkeys(("bias", "gamma", "beta"), x.shape[-1:]),
            **dict.fromkeys(("residual", "dy"), x.shape),
            **dict.fromkeys(("mean", "rstd"), x.shape[:-1]),
        }
        for name, shape in shapes.items():
            array = getattr(arrays, name)
            if array is None:
                continue
            spec = ArraySpec.of(array)
            statistic = name in ("mean", "rstd")
            expected = accumulator(x.dtype) if statistic else x.dtype
            if spec.dtype != expected:
                raise TypeError(f"{name} has dtype {spec.dtype}; with x {x.dtype} it is {expected}")
            if spec.shape != shape:
                raise ValueError(f"{name} has shape {spec.shape}; with x {x.shape} it is {shape}")
        number = real_number("eps", eps)
        if number < 0:
            raise ValueError(f"eps must not be negative, got {eps}")
        residual = None if arrays.residual is None else ArraySpec.of(arrays.residual)
        return cls(x, residual, number)


class LayerNormGrads(NamedTuple):
    """Gradients of `dropout_bias_layer_norm`, each of its operand's shape and dtype.

    Parameters
    ----------
    dx, dbias, dgamma, dbeta : array
        Gradients of x, bias, gamma and beta.
    dresidual : array or None
        Gradient of the residual, None if there was none.
    """

    dx: Any
    dbias: Any
    dgamma: Any
    dbeta: Any
    dresidual: Any = None
