"""Small frozen descriptions of inputs, from which the arrays are made.

A case holds shapes, layouts, options and a seed, never elements: it is quick to shrink, and its
repr is the line of Python that makes the same arrays again.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, NamedTuple, TypeAlias

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from cuflash import reference

Shape: TypeAlias = tuple[int, ...]
Array: TypeAlias = NDArray[Any]

DTYPES = ("float64", "float32", "float16", "bfloat16")

#: Memory layouts that `arrange` knows.
LAYOUTS = (
    "contiguous",
    "fortran",  # axes in reverse order
    "tokens_first",  # a (B, T, H, D) array, its middle axes swapped by a view
    "reversed",  # negative strides on the last two axes
    "step",  # every other token and feature of a larger array
    "packed",  # the middle third of (..., T, 3, D), as a packed qkv has it
    "offset",  # starts one element into its buffer
    "unaligned",  # starts one byte into its buffer
    "broadcast",  # stride 0 on the first axis
    "byteswapped",  # the other byte order, where the dtype has one
)

#: How q and k are drawn.
LOGITS = (
    "normal",
    "wide",  # nearly one-hot weights
    "zero",  # equal weights
    "shifted",  # a large negative constant on every score
    "ascending",  # each key outdoes those before it: the running maximum never rests
    "ties",  # scores of magnitude 1e5, many of them equal
)


def dtype_of(name: str) -> np.dtype[Any]:
    """Return the dtype of a name, bfloat16 included."""
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def arrange(values: Array, layout: str) -> Array:
    """Return an array equal to `values` that lies in memory as `layout` says.

    What surrounds its elements in the buffer is NaN (1 for integers and bool), so that reading
    there shows. "broadcast" repeats the first entry of axis 0. An array with too few axes for a
    layout is made contiguous.
    """
    dtype, shape = values.dtype, values.shape
    filler = 1 if dtype.kind in "iub" else np.nan
    last = (..., slice(None, None, 2), slice(None, None, 2))
    flipped = (..., slice(None, None, -1), slice(None, None, -1))
    match layout:
        case "fortran":
            return np.array(values, order="F")
        case "tokens_first" if values.ndim >= 3:
            return np.array(values.swapaxes(-2, -3), order="C").swapaxes(-2, -3)
        case "reversed" if values.ndim >= 2:
            return np.array(values[flipped], order="C")[flipped]
        case "step" if values.ndim >= 2:
            buffer = np.full((*shape[:-2], 2 * shape[-2], 2 * shape[-1]), filler, dtype)
            buffer[last] = values
            return buffer[last]
        case "packed" if values.ndim >= 2:
            buffer = np.full((*shape[:-1], 3, shape[-1]), filler, dtype)
            buffer[..., 1, :] = values
            return buffer[..., 1, :]
        case "offset":
            buffer = np.full(values.size + 1, filler, dtype)
            buffer[1:] = values.ravel()
            return buffer[1:].reshape(shape)
        case "unaligned":
            octets = np.zeros(values.nbytes + 1, np.uint8)
            moved = octets[1:].view(dtype).reshape(shape)
            moved[...] = values
            return moved
        case "broadcast" if values.ndim >= 1:
            return np.broadcast_to(np.array(values[:1], order="C"), shape)
        case "byteswapped" if dtype.name != "bfloat16":
            return values.astype(dtype.newbyteorder())
    return np.array(values, order="C")


class Case:
    """Gives a dataclass a repr without the fields that have their default value."""

    def __repr__(self) -> str:
        shown = (
            f"{f.name}={value!r}"
            for f in fields(self)  # type: ignore[arg-type]
            if (value := getattr(self, f.name)) != f.default
        )
        return f"{type(self).__name__}({', '.join(shown)})"


class AttentionInputs(NamedTuple):
    """Arrays of an attention call; `options` are its keyword arguments."""

    q: Array
    k: Array
    v: Array
    options: dict[str, Any]


@dataclass(frozen=True, repr=False)
class AttentionCase(Case):
    """A drawn attention problem; `build` makes its arrays.

    An option that is an array is given by its shape; `query_offset`, `query_lengths` and
    `key_lengths` may be an int too.

    Examples
    --------
    >>> case = AttentionCase(tq=2, tk=3, d=4, dv=5, causal=True)
    >>> case
    AttentionCase(tq=2, tk=3, d=4, dv=5, causal=True)
    >>> case.build().v.shape
    (3, 5)
    """

    q_batch: Shape = ()
    k_batch: Shape = ()
    v_batch: Shape = ()
    tq: int = 1
    tk: int = 1
    d: int = 1
    dv: int = 1
    dtype: str = "float32"
    q_layout: str = "contiguous"
    k_layout: str = "contiguous"
    v_layout: str = "contiguous"
    logits: str = "normal"
    scale: float | None = None
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    query_offset: int | Shape | None = None
    query_lengths: int | Shape | None = None
    key_lengths: int | Shape | None = None
    mask: Shape | None = None
    bias: Shape | None = None
    bias_dtype: str = "float32"
    bias_minus_inf: bool = False
    option_layout: str = "contiguous"
    alibi_slopes: Shape | None = None
    softcap: float | None = None
    sinks: Shape | None = None
    enable_gqa: bool = False
    unseen: str | None = None
    """What everything that no row sees is set to: "nan", "inf", "-inf", "0"; None leaves it."""
    visible: tuple[str, str] | None = None
    """Operand ("q", "k", "v" or "bias") and value of one element that is set, seen or not."""
    seed: int = 0

    @property
    def batch_shape(self) -> Shape:
        """Batch shape of the result."""
        return np.broadcast_shapes(self.q_batch, *self._key_batches)

    @property
    def _key_batches(self) -> tuple[Shape, Shape]:
        if self.enable_gqa:
            heads = self.q_batch[-1:]
            return (*self.k_batch[:-1], *heads), (*self.v_batch[:-1], *heads)
        return self.k_batch, self.v_batch

    def build(self) -> AttentionInputs:
        """Make q, k, v and the options, the same ones every time."""
        dtype = dtype_of(self.dtype)
        values = {name: x.astype(dtype) for name, x in self._operands().items()}
        options = self._options()
        if self.unseen is not None:
            self._set_unseen(values, options, float(self.unseen))
        if self.visible is not None:
            name, special = self.visible
            target = options["bias"] if name == "bias" else values[name]
            if target.size:
                target.flat[self._rng(9).integers(target.size)] = float(special)
        layouts = {"q": self.q_layout, "k": self.k_layout, "v": self.v_layout}
        arrays = {name: arrange(x, layouts[name]) for name, x in values.items()}
        for name in ("mask", "bias"):
            if name in options:
                options[name] = arrange(options[name], self.option_layout)
        return AttentionInputs(**arrays, options=options)

    def _rng(self, stream: int) -> np.random.Generator:
        """One stream an operand: shrinking one shape leaves the others' values as they are."""
        return np.random.default_rng([self.seed, stream])

    def _operands(self) -> dict[str, Array]:
        q = self._rng(0).normal(size=(*self.q_batch, self.tq, self.d))
        k = self._rng(1).normal(size=(*self.k_batch, self.tk, self.d))
        v = self._rng(2).normal(size=(*self.v_batch, self.tk, self.dv))
        match self.logits:
            case "wide":  # by one feature: a dot product with much cancellation has no small error
                q[..., 0] *= 8 * np.sqrt(self.d)
            case "zero":
                q[...] = 0
            case "shifted":
                q[..., 0], k[..., 0] = 4, -64
            case "ascending":
                q[..., 0], k[..., 0] = np.sqrt(self.d), np.arange(self.tk) / 4
            case "ties":
                q[...] = 64
                k[...] = 32 * self._rng(1).integers(-8, 9, size=(*k.shape[:-1], 1))
        layouts = self.q_layout, self.k_layout, self.v_layout
        return {
            name: _repeated(x, layout)
            for name, x, layout in zip("qkv", (q, k, v), layouts, strict=True)
        }

    def _options(self) -> dict[str, Any]:
        options: dict[str, Any] = {
            name: value
            for name in ("scale", "window", "softcap")
            if (value := getattr(self, name)) is not None
        }
        options |= {name: True for name in ("causal", "enable_gqa") if getattr(self, name)}
        default_offset = self.tk - self.tq
        low, high = min(-2, default_offset - 2), max(2, default_offset + 2)
        for stream, (name, least, most) in enumerate(
            [
                ("query_offset", low, high),
                ("query_lengths", 0, self.tq),
                ("key_lengths", 0, self.tk),
            ]
        ):
            value = getattr(self, name)
            if isinstance(value, tuple):
                value = self._rng(10 + stream).integers(least, most, size=value, endpoint=True)
            if value is not None:
                options[name] = value
        if self.mask is not None:
            rng = self._rng(3)
            rows = rng.random((*self.mask[:-1], 1)) < 0.8  # the rest sees nothing
            options["mask"] = _repeated((rng.random(self.mask) < 0.7) & rows, self.option_layout)
        if self.bias is not None:
            bias = self._rng(4).normal(size=self.bias)
            if self.bias_minus_inf:
                bias[self._rng(5).random(self.bias) < 0.2] = -np.inf
            bias = _repeated(bias, self.option_layout)
            options["bias"] = bias.astype(dtype_of(self.bias_dtype))
        if self.alibi_slopes is not None:
            exponents = self._rng(6).integers(1, 9, size=self.alibi_slopes)
            options["alibi_slopes"] = np.float32(2) ** -exponents.astype(np.float32)
        if self.sinks is not None:
            rng = self._rng(7)
            sinks = rng.normal(size=self.sinks).astype(np.float32)
            options["sinks"] = np.where(rng.random(self.sinks) < 0.2, np.float32(-np.inf), sinks)
        return options

    def _set_unseen(self, values: dict[str, Array], options: dict[str, Any], to: float) -> None:
        q, k, v = values["q"], values["k"], values["v"]
        _, seen = reference.attention_scores(q, k, v, **options)
        unseen_keys = np.asarray(~seen.any(axis=-2))
        k_batch, v_batch = self._key_batches
        for name, batch in (("k", k_batch), ("v", v_batch)):
            nobody = _all_to(unseen_keys, (*batch, self.tk))
            own = values[name].shape[:-1]
            if nobody.shape != own:  # keys of a group of heads
                groups = (*own[:-1], seen.shape[-3] // own[-2], self.tk)
                nobody = np.asarray(nobody.reshape(groups).all(axis=-2))
            values[name][_shared(nobody, getattr(self, f"{name}_layout"))] = to
        blind = _all_to(np.asarray(~seen.any(axis=-1)), values["q"].shape[:-1])
        values["q"][_shared(blind, self.q_layout)] = to
        if "bias" in options:
            bias = options["bias"]
            bias[_shared(_all_to(~seen, bias.shape), self.option_layout)] = to


def _repeated(values: Array, layout: str) -> Array:
    """Give values what a broadcast layout will make of them, so that it is known what is seen."""
    return np.array(arrange(values, layout)) if layout == "broadcast" else values


def _all_to(flags: Array, shape: Shape) -> Array:
    """Reduce to `shape`, which broadcasts to that of `flags`, by logical and."""
    flags = np.asarray(flags.all(axis=tuple(range(flags.ndim - len(shape)))))
    stretched = tuple(a for a, n in enumerate(shape) if n == 1 != flags.shape[a])
    return np.asarray(flags.all(axis=stretched, keepdims=True))


def _shared(flags: Array, layout: str) -> Array:
    """Let elements that share memory along axis 0 share the flag that all of them have."""
    if layout == "broadcast" and flags.ndim:
        return np.broadcast_to(flags.all(axis=0, keepdims=True), flags.shape)
    return flags


class SoftmaxInputs(NamedTuple):
    """Arrays of a softmax call; `options` are its keyword arguments."""

    x: Array
    options: dict[str, Any]


#: How the elements of a softmax are drawn.
SOFTMAX_VALUES = (
    "normal",
    "wide",
    "zero",
    "shifted",
    "ascending",
    "extreme",  # up to a quarter of the largest finite number, either sign
    "minus_inf",  # rows and elements of -inf
    "non_finite",  # NaN and both infinities, sparsely
)


@dataclass(frozen=True, repr=False)
class SoftmaxCase(Case):
    """A drawn softmax problem; `build` makes its arrays.

    Examples
    --------
    >>> case = SoftmaxCase(shape=(2, 3), axis=0, layout="reversed")
    >>> case.build().x.strides
    (-12, -4)
    """

    shape: Shape = (1,)
    axis: int | Shape | None = -1
    dtype: str = "float32"
    layout: str = "contiguous"
    values: str = "normal"
    where: Shape | None = None
    seed: int = 0

    @property
    def axes(self) -> Shape:
        """The axes of a row, not negative and in order."""
        axis = range(len(self.shape)) if self.axis is None else self.axis
        axis = (axis,) if isinstance(axis, int) else axis
        return tuple(sorted(a % len(self.shape) for a in axis))

    def build(self) -> SoftmaxInputs:
        """Make x and the options, the same ones every time."""
        dtype = dtype_of(self.dtype)
        x = self._elements()
        if dtype.kind in "iub":  # which have no special values
            x = np.rint(np.clip(np.nan_to_num(x), -100, 100))
        x = x.astype(dtype)
        options: dict[str, Any] = {"axis": self.axis}
        if self.where is not None:
            options["where"] = np.random.default_rng([self.seed, 1]).random(self.where) < 0.6
        return SoftmaxInputs(arrange(x, self.layout), options)

    def _elements(self) -> Array:
        rng = np.random.default_rng([self.seed, 0])
        x = rng.normal(size=self.shape)
        kind = rng.random(self.shape)
        match self.values:
            case "wide":
                return 16 * x
            case "zero":
                return 0 * x
            case "shifted":
                return x - 512
            case "ascending":
                return np.arange(x.size).reshape(x.shape) / 8
            case "extreme":
                dtype = dtype_of(self.dtype if self.dtype in DTYPES else "float32")
                most = float(ml_dtypes.finfo(dtype).max) / 4  # type: ignore[no-untyped-call]
                return np.where(kind < 0.5, np.sign(x) * most, x)
            case "minus_inf":
                dead = rng.random(
                    tuple(1 if a in self.axes else n for a, n in enumerate(self.shape))
                )
                return np.where((kind < 0.4) | (dead < 0.3), -np.inf, x)
            case "non_finite":
                specials = rng.choice([np.nan, np.inf, -np.inf], size=self.shape)
                return np.where(kind < 0.1, specials, x)
        return x
