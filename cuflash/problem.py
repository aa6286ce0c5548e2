"""Frozen, self-validating descriptions of the work: all that engines read to plan it.

A problem holds shapes, strides, dtypes and options, never values of arrays, so that equal problems
have equal plans and a plan can be kept under its problem. The arrays travel beside it, in
`AttentionArrays` or as plain arguments.
"""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Any, NamedTuple, Self

import ml_dtypes
import numpy as np

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOATS = (np.dtype(np.float64), np.dtype(np.float32), np.dtype(np.float16), BFLOAT16)
#: Axes of an operand: `numpy.broadcast` takes no more.
MAX_AXES = 32
_FLOAT_NAMES = ", ".join(dtype.name for dtype in FLOATS)


def accumulator(dtype: np.dtype) -> np.dtype:
    """Return the dtype in which sums over `dtype` are kept: float64 for float64, else float32."""
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


class ArraySpec(NamedTuple):
    """Shape, strides (bytes) and dtype of an array, without its address."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype

    @classmethod
    def of(cls, x: Any) -> Self:
        """Describe an array, or anything with `shape`, `dtype` and, unless C order, `strides`."""
        shape, strides, dtype = tuple(x.shape), getattr(x, "strides", None), np.dtype(x.dtype)
        if strides is None:
            strides = c_strides(shape, dtype.itemsize)
        return cls(shape, tuple(strides), dtype)

    def broadcast_to(self, shape: tuple[int, ...], name: str) -> Self:
        """Return the spec of `numpy.broadcast_to(x, shape)`, or raise ValueError naming it."""
        if self.shape == shape:
            return self
        if len(self.shape) > len(shape) or any(
            mine not in (1, theirs)
            for mine, theirs in zip(self.shape[::-1], shape[::-1], strict=False)
        ):
            raise ValueError(f"{name} has shape {self.shape}, which does not broadcast to {shape}")
        absent = len(shape) - len(self.shape)
        strides = tuple(
            stride if mine == theirs else 0
            for mine, theirs, stride in zip(self.shape, shape[absent:], self.strides, strict=True)
        )
        return type(self)(shape, (0,) * absent + strides, self.dtype)


def c_strides(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Return the byte strides of a C-contiguous array."""
    strides = [itemsize]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(size, 1))
    return tuple(reversed(strides)) if shape else ()


def require_float(name: str, dtype: np.dtype) -> None:
    """Raise TypeError unless `dtype` is one that kernels compute with."""
    if dtype not in FLOATS:
        raise TypeError(f"{name} has dtype {dtype}; accepted are {_FLOAT_NAMES}")


def require_same(name: str, got: object, first: str, want: object, what: str) -> None:
    """Raise (TypeError for dtypes, ValueError for shapes) unless two arguments agree."""
    if got != want:
        error = TypeError if what == "dtype" else ValueError
        raise error(f"{name} has {what} {got} but {first} has {want}; they must be equal")


def require_output(
    name: str, spec: ArraySpec, shape: tuple[int, ...], dtypes: Sequence[np.dtype]
) -> None:
    """Raise unless an output array has this shape and one of these dtypes."""
    if spec.shape != shape:
        raise ValueError(f"{name} has shape {spec.shape}, the result has {shape}")
    if spec.dtype not in dtypes:
        accepted = " or ".join(dtype.name for dtype in dtypes)
        raise TypeError(f"{name} has dtype {spec.dtype}, the result is {accepted}")


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


class AttentionArrays(NamedTuple):
    """The arrays of one attention call; lengths and offsets may be Python ints.

    `cu_seqlens_q` and `cu_seqlens_k` are there if the tokens are sequences end to end.
    """

    q: Any
    k: Any
    v: Any
    mask: Any = None
    bias: Any = None
    alibi_slopes: Any = None
    sinks: Any = None
    query_offset: Any = None
    query_lengths: Any = None
    key_lengths: Any = None
    cu_seqlens_q: Any = None
    cu_seqlens_k: Any = None


_FIRST_INTEGER = AttentionArrays._fields.index("query_offset")
_INTEGERS = AttentionArrays._fields[_FIRST_INTEGER:]
_ENDS = ("cu_seqlens_q", "cu_seqlens_k")
_END_DTYPES = (np.dtype(np.int32), np.dtype(np.int64))


@dataclass(frozen=True, slots=True)
class AttentionProblem:
    """One attention call, described.

    Every `ArraySpec` is the operand broadcast to its full shape, with stride 0 on axes that
    broadcast: `q` has shape `batch_shape + (Tq, D)`, `k` `batch_shape + (Tk, D)`, `v` `batch_shape
    + (Tk, Dv)`, `mask` and `bias` `batch_shape + (Tq, Tk)`, the rest `batch_shape`. An absent
    option is None. Query i of an entry stands at position i + offset and sees the keys from
    position - left to position + right, None meaning no bound on that side; causal is right = 0.

    With `cu_seqlens_q` and `cu_seqlens_k`, of shape (sequences + 1,), the token axes hold sequences
    end to end, and each is what an entry is otherwise: `query_offset` and `key_lengths` have shape
    (sequences,).
    """

    batch_shape: tuple[int, ...]
    q: ArraySpec
    k: ArraySpec
    v: ArraySpec
    scale: float
    softcap: float | None
    left: int | None
    right: int | None
    mask: ArraySpec | None
    bias: ArraySpec | None
    alibi_slopes: ArraySpec | None
    sinks: ArraySpec | None
    query_offset: ArraySpec | None
    query_lengths: ArraySpec | None
    key_lengths: ArraySpec | None
    num_splits: int | None
    method: str
    cu_seqlens_q: ArraySpec | None = None
    cu_seqlens_k: ArraySpec | None = None
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Hash once what plans are kept under."""
        values = tuple(getattr(self, f.name) for f in fields(self) if f.compare)
        object.__setattr__(self, "_hash", hash(values))

    def __hash__(self) -> int:
        return self._hash

    @property
    def tq(self) -> int:
        """Number of queries of a batch entry."""
        return self.q.shape[-2]

    @property
    def tk(self) -> int:
        """Number of keys of a batch entry."""
        return self.k.shape[-2]

    @property
    def mean_tq(self) -> int:
        """Number of queries of a batch entry, or of a sequence on average."""
        return -(-self.tq // max(1, self.sequences or 1))

    @property
    def sequences(self) -> int | None:
        """Number of sequences that lie end to end; None if an entry is one."""
        return None if self.cu_seqlens_q is None else self.cu_seqlens_q.shape[0] - 1

    @property
    def d(self) -> int:
        """Features of a query or key."""
        return self.q.shape[-1]

    @property
    def dv(self) -> int:
        """Features of a value."""
        return self.v.shape[-1]

    @property
    def dtype(self) -> np.dtype:
        """Dtype of q, k and v."""
        return self.q.dtype

    @property
    def out_shape(self) -> tuple[int, ...]:
        """Shape of the result."""
        return (*self.batch_shape, self.tq, self.dv)

    @property
    def lse_shape(self) -> tuple[int, ...]:
        """Shape of the logsumexp."""
        return (*self.batch_shape, self.tq)

    @classmethod
    def of(
        cls,
        arrays: AttentionArrays,
        *,
        scale: object = None,
        causal: object = False,
        window: object = None,
        softcap: object = None,
        num_splits: object = None,
        method: object = "auto",
    ) -> AttentionProblem:
        """Validate the arguments of an attention call and describe it.

        Raises
        ------
        TypeError, ValueError
            Naming the argument, what came and what is accepted.
        """
        # Plain tuples, which make cheap keys: this is on the way of every call.
        layouts = [
            None if x is None else (x.shape, x.strides, x.dtype) for x in arrays[:_FIRST_INTEGER]
        ]
        integers = arrays[_FIRST_INTEGER:]
        if any([x is not None for x in integers]):
            layouts += [
                None if x is None else _describe_integers(name, x)
                for name, x in zip(_INTEGERS, integers, strict=True)
            ]
        options = (scale, causal, _window(window), softcap, num_splits, method)
        describe = _attention_problem if _is_hashable(options) else _attention_problem.__wrapped__
        problem = describe(tuple(layouts), *options)
        if len(layouts) > _FIRST_INTEGER:
            for name, limit in (("query_lengths", problem.tq), ("key_lengths", problem.tk)):
                lengths = getattr(arrays, name)
                if isinstance(lengths, numbers.Real | np.ndarray):
                    check_lengths(name, lengths, limit)
        return problem


Layout = tuple[tuple[int, ...], tuple[int, ...], np.dtype]


@lru_cache(maxsize=1024, typed=True)
def _attention_problem(
    layouts: tuple[Layout | None, ...],
    scale: object,
    causal: object,
    window: tuple[int | None, int | None],
    softcap: object,
    num_splits: object,
    method: object,
) -> AttentionProblem:
    """Do the part of `AttentionProblem.of` that depends on descriptions alone, once for each."""
    if not isinstance(method, str):
        raise TypeError(f"method must be a string, got {type(method).__name__}")
    specs = AttentionArrays(*[None if x is None else ArraySpec(*x) for x in layouts])
    q, k, v = specs[:3]
    for name, spec in (("q", q), ("k", k), ("v", v)):
        if len(spec.shape) < 2:
            raise ValueError(
                f"{name} has {len(spec.shape)} axes; the last two are (tokens, features)"
            )
        if len(spec.shape) > MAX_AXES:
            raise ValueError(f"{name} has {len(spec.shape)} axes; {MAX_AXES} are possible")
        require_float(name, spec.dtype)
        require_same(name, spec.dtype, "q", q.dtype, "dtype")
    if q.shape[-1] < 1:
        raise ValueError(f"q has shape {q.shape}; at least one feature is needed")
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(
            f"k has {k.shape[-1]} features (shape {k.shape}) "
            f"but q has {q.shape[-1]} (shape {q.shape})"
        )
    if v.shape[-2] != k.shape[-2]:
        raise ValueError(
            f"v has {v.shape[-2]} tokens (shape {v.shape}) "
            f"but k has {k.shape[-2]} (shape {k.shape})"
        )
    batch = _batch_shape(q=q, k=k, v=v)
    tq, tk = q.shape[-2], k.shape[-2]

    entries, sequences = batch, _sequences(specs)
    if sequences is not None:
        entries = (sequences,)
        for name in ("mask", "bias", "query_lengths"):
            if getattr(specs, name) is not None:
                raise ValueError(f"{name} cannot be used with sequences end to end")
    mask = _broadcast("mask", specs.mask, (*batch, tq, tk))
    if mask is not None and mask.dtype != np.bool:
        raise TypeError(
            f"mask has dtype {mask.dtype}; a bool array is needed (True = attend), "
            f"additive terms go to bias"
        )
    floats: dict[str, ArraySpec | None] = {}
    for name, shape in (("bias", (*batch, tq, tk)), ("alibi_slopes", batch), ("sinks", batch)):
        floats[name] = option = _broadcast(name, getattr(specs, name), shape)
        if option is not None:
            require_float(name, option.dtype)

    left, right = window
    if flag("causal", causal):
        right = 0 if right is None else min(right, 0)
    if num_splits is not None:
        num_splits = integer("num_splits", num_splits)
        if num_splits < 1:
            raise ValueError(f"num_splits must be at least 1, got {num_splits}")
    return AttentionProblem(
        batch_shape=batch,
        q=q.broadcast_to((*batch, tq, q.shape[-1]), "q"),
        k=k.broadcast_to((*batch, tk, k.shape[-1]), "k"),
        v=v.broadcast_to((*batch, tk, v.shape[-1]), "v"),
        scale=1 / math.sqrt(q.shape[-1]) if scale is None else _scale(scale, q.dtype),
        softcap=None if softcap is None else _softcap(softcap, q.dtype),
        left=left,
        right=right,
        mask=mask,
        bias=floats["bias"],
        alibi_slopes=floats["alibi_slopes"],
        sinks=floats["sinks"],
        query_offset=_positions("query_offset", specs.query_offset, entries),
        query_lengths=_positions("query_lengths", specs.query_lengths, entries),
        key_lengths=_positions("key_lengths", specs.key_lengths, entries),
        num_splits=num_splits,
        method=method,
        cu_seqlens_q=specs.cu_seqlens_q,
        cu_seqlens_k=specs.cu_seqlens_k,
    )


def _sequences(specs: AttentionArrays) -> int | None:
    """Return the number of sequences end to end, None if there are no such; validate their ends."""
    ends = [getattr(specs, name) for name in _ENDS]
    if ends == [None, None]:
        return None
    for name, spec in zip(_ENDS, ends, strict=True):
        if spec is None or spec == _INTEGER:
            raise TypeError(f"{name} must be an array of int32 or int64")
        if spec.dtype not in _END_DTYPES:
            raise TypeError(f"{name} has dtype {spec.dtype}; accepted are int32 and int64")
        if len(spec.shape) != 1 or not spec.shape[0]:
            raise ValueError(
                f"{name} has shape {spec.shape}; it needs one axis, a 0 and each sequence's end"
            )
    require_same("cu_seqlens_k", ends[1].shape[0], "cu_seqlens_q", ends[0].shape[0], "length")
    return int(ends[0].shape[0]) - 1


def _is_hashable(x: object) -> bool:
    try:
        hash(x)
    except TypeError:
        return False
    return True


#: Stands for a Python integer among specs, whose value is no part of a problem. No array has it.
_INTEGER = ArraySpec((), (-1,), np.dtype(np.int64))


def _describe_integers(name: str, x: Any) -> ArraySpec:
    if isinstance(x, ArraySpec):
        return x
    if not isinstance(x, np.ndarray) and isinstance(x, numbers.Real):
        integer(name, x)
        return _INTEGER
    return ArraySpec.of(x)


def _scale(scale: object, dtype: np.dtype) -> float:
    """Return the nearest scale that the accumulator holds: an infinite one would make 0 a NaN."""
    largest = float(np.finfo(accumulator(dtype)).max)
    return min(max(real_number("scale", scale), -largest), largest)


def _softcap(softcap: object, dtype: np.dtype) -> float:
    """Return the nearest cap that is a normal number of the accumulator, for the same reason."""
    cap = real_number("softcap", softcap)
    if cap <= 0:
        raise ValueError(f"softcap must be positive, got {cap}")
    limits = np.finfo(accumulator(dtype))
    return min(max(cap, float(limits.tiny)), float(limits.max))


def softcap_linear(dtype: np.dtype) -> float:
    """Return the x below which x - tanh(x), at most x^3 / 3, is lost to rounding."""
    return math.sqrt(np.finfo(dtype).eps) / 2


def _batch_shape(**specs: ArraySpec) -> tuple[int, ...]:
    """Broadcast the leading axes, naming the operand that does not fit."""
    batch: tuple[int, ...] = ()
    for name, spec in specs.items():
        try:
            batch = np.broadcast_shapes(batch, spec.shape[:-2])
        except ValueError:
            before = ", ".join(f"{n} {s.shape}" for n, s in specs.items() if n != name)
            raise ValueError(
                f"{name} has batch axes {spec.shape[:-2]} (shape {spec.shape}), "
                f"which do not broadcast with those of {before}"
            ) from None
    return batch


def _broadcast(name: str, spec: ArraySpec | None, shape: tuple[int, ...]) -> ArraySpec | None:
    return None if spec is None else spec.broadcast_to(shape, name)


def _window(window: object) -> tuple[int | None, int | None]:
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


def _positions(name: str, spec: ArraySpec | None, batch: tuple[int, ...]) -> ArraySpec | None:
    """Describe lengths or offsets: an integer, or an integer array with the axes of the batch.

    The axes are those of batch entries, or the one of sequences.
    """
    if spec is None:
        return None
    if spec == _INTEGER:
        return ArraySpec((), (), np.dtype(np.int64)).broadcast_to(batch, name)
    if spec.dtype.kind not in "iu":
        raise TypeError(f"{name} has dtype {spec.dtype}; integers are needed")
    if len(spec.shape) != len(batch):
        raise ValueError(
            f"{name} has shape {spec.shape}; it needs {len(batch)} axes, those of {batch}, "
            f"size 1 where it broadcasts"
        )
    return spec.broadcast_to(batch, name)


def check_lengths(name: str, values: Any, limit: int) -> None:
    """Raise ValueError unless every length lies within its axis."""
    if isinstance(values, int):
        low = high = values
    else:
        low, high = int(np.min(values, initial=0)), int(np.max(values, initial=0))
    if low < 0 or high > limit:
        raise ValueError(f"{name} has the value {low if low < 0 else high}, outside 0..{limit}")


_REDUCED = ("dlse", "lse")
_STATE = ("maximum", "normalizer")


@dataclass(frozen=True, slots=True)
class SoftmaxProblem:
    """One call of the softmax family, described.

    `inputs` are the operands of `operation`, in this order; each has the full shape unless it is
    called reduced here, which means size 1 on `axes`:

    - "softmax", "log_softmax", "logsumexp", "softmax_state": x
    - "softmax_vjp", "log_softmax_vjp": dy, y
    - "logsumexp_vjp": dlse (reduced), x, lse (reduced)
    - "state_logsumexp": maximum, normalizer
    - "state_apply": x, maximum, normalizer (the state broadcast to the shape of x)

    `axes` are those that are normalised together, in rising order; `where` is broadcast to the full
    shape. The result has shape `out_shape`, reduced axes kept, and dtype `out_dtype`.
    """

    operation: str
    inputs: tuple[ArraySpec, ...]
    axes: tuple[int, ...]
    where: ArraySpec | None
    out_shape: tuple[int, ...]
    out_dtype: np.dtype
    method: str

    @property
    def operand(self) -> ArraySpec:
        """The input whose shape is the full one and whose axis order the result takes."""
        return self.inputs[_main_operand(self.operation)]

    @property
    def accumulator(self) -> np.dtype:
        """Dtype of maxima and sums."""
        return accumulator(self.out_dtype)

    @classmethod
    def of(
        cls,
        operation: str,
        inputs: Mapping[str, Any],
        axis: object = (),
        where: Any = None,
        method: str = "auto",
    ) -> Self:
        """Validate the arguments of a call and describe it; `inputs` in the order given above.

        Raises
        ------
        TypeError, ValueError
            Naming the argument, what came and what is accepted.
        """
        specs = {name: ArraySpec.of(x) for name, x in inputs.items()}
        dtypes = {name: _softmax_dtype(name, spec.dtype) for name, spec in specs.items()}
        main = tuple(specs)[_main_operand(operation)]
        shape, dtype = specs[main].shape, dtypes[main]
        axes = normalize_axes(axis, len(shape))
        without = tuple(size for a, size in enumerate(shape) if a not in axes)
        reduced = tuple(1 if a in axes else size for a, size in enumerate(shape))
        for name, spec in specs.items():
            if name in _REDUCED:
                if spec.shape not in (without, reduced):
                    raise ValueError(
                        f"{name} has shape {spec.shape}; {main} of shape {shape} reduced over axis "
                        f"{axis} has {without} or {reduced}"
                    )
                if dtypes[name] not in (dtype, accumulator(dtype)):
                    raise TypeError(
                        f"{name} has dtype {spec.dtype}, which is neither that of {main} "
                        f"({specs[main].dtype}) nor its accumulator's ({accumulator(dtype)})"
                    )
                specs[name] = ArraySpec.of(keep_axes(inputs[name], axes, len(shape)))
            elif name in _STATE:
                require_same(name, spec.dtype, "this state", accumulator(dtype), "dtype")
                specs[name] = spec.broadcast_to(shape, name)
            else:
                require_same(name, spec.shape, main, shape, "shape")
                require_same(name, dtypes[name], main, dtype, "dtype")
        mask = None if where is None else ArraySpec.of(where).broadcast_to(shape, "where")
        if mask is not None and mask.dtype != np.bool:
            raise TypeError(f"where has dtype {mask.dtype}; bool is needed (True = takes part)")
        reduces = operation in ("logsumexp", "softmax_state")
        return cls(
            operation=operation,
            inputs=tuple(specs.values()),
            axes=axes,
            where=mask,
            out_shape=reduced if reduces else shape,
            out_dtype=accumulator(dtype) if operation == "softmax_state" else dtype,
            method=method,
        )


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


def keep_axes(x: Any, axes: tuple[int, ...], ndim: int) -> Any:
    """Return a reduced array, which may lack its reduced axes, with them as axes of size 1."""
    if x.ndim == ndim or not axes:
        return x
    return x[tuple(None if a in axes else slice(None) for a in range(ndim))]


def _main_operand(operation: str) -> int:
    return 1 if operation.endswith("_vjp") else 0


def _softmax_dtype(name: str, dtype: np.dtype) -> np.dtype:
    """Return the dtype an operand is taken to: its own, or float64 for integers and bool."""
    if dtype.kind in "biu":
        return np.dtype(np.float64)
    if dtype not in FLOATS:
        raise TypeError(f"{name} has dtype {dtype}; accepted are {_FLOAT_NAMES}, integers, bool")
    return dtype
