"""Frozen, self-validating descriptions of the work: all that engines read to plan it.

A problem holds shapes, strides, dtypes and options, never values of arrays, so that equal problems
have equal plans and a plan can be kept under its problem. The arrays travel beside it, in
`AttentionArrays` or as plain arguments.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Any, NamedTuple, Self

import ml_dtypes
import numpy as np

from ._options import flag, integer, normalize_axes, real_number, window_sides

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOATS = (np.dtype(np.float64), np.dtype(np.float32), np.dtype(np.float16), BFLOAT16)
#: Axes of an operand: `numpy.broadcast` takes no more.
MAX_AXES = 32
_FLOAT_NAMES = ", ".join(dtype.name for dtype in FLOATS)


def accumulator(dtype: np.dtype) -> np.dtype:
    """Return the dtype in which sums over `dtype` are kept: float64 for float64, else float32."""
    return FLOATS[0] if dtype == FLOATS[0] else FLOATS[1]


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

    def without_columns(self) -> Self:
        """Return the spec of the view `x[..., :0]`, of x itself if that has no axis."""
        return self._replace(shape=(*self.shape[:-1], *(0 for _ in self.shape[-1:])))

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


#: Where lengths, offsets and ends of sequences begin among the arrays.
FIRST_INTEGER = AttentionArrays._fields.index("query_offset")
_INTEGERS = ("query_offset", "query_lengths", "key_lengths")
_ENDS = ("cu_seqlens_q", "cu_seqlens_k")
_END_DTYPES = (np.dtype(np.int32), np.dtype(np.int64))
#: What an `ArraySpec` holds, as a bare tuple, which makes a cheap key.
_Layout = tuple[tuple[int, ...], tuple[int, ...], np.dtype]


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
        enable_gqa: object = False,
        scale: object = None,
        causal: object = False,
        window: object = None,
        softcap: object = None,
        num_splits: object = None,
        method: object = "auto",
    ) -> AttentionProblem:
        """Validate the arguments of an attention call and describe it.

        With `enable_gqa` the arrays have one head axis, and the problem has two in its place: (key
        heads, query heads for each).

        Raises
        ------
        TypeError, ValueError
            Naming the argument, what came and what is accepted.
        """
        # This is on the way of every call, most often one with the first three arrays only.
        layouts: list[_Layout | None] = [
            None if x is None else (x.shape, x.strides, x.dtype) for x in arrays[:FIRST_INTEGER]
        ]
        integers = arrays[FIRST_INTEGER:]
        if any([x is not None for x in integers]):
            layouts += map(_describe_integers, arrays._fields[FIRST_INTEGER:], integers)
        options = (enable_gqa, scale, causal, window_sides(window), softcap, num_splits, method)
        describe = _attention_problem if _is_hashable(options) else _attention_problem.__wrapped__
        problem = describe(tuple(layouts), *options)
        if len(layouts) > FIRST_INTEGER:
            for name, limit in (("query_lengths", problem.tq), ("key_lengths", problem.tk)):
                lengths = getattr(arrays, name)
                if isinstance(lengths, numbers.Real | np.ndarray):
                    check_lengths(name, lengths, limit)
        return problem


@lru_cache(maxsize=1024, typed=True)
def _attention_problem(
    layouts: tuple[_Layout | None, ...],
    enable_gqa: object,
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
    grouped = flag("enable_gqa", enable_gqa)
    specs = AttentionArrays(*[None if x is None else ArraySpec(*x) for x in layouts])
    q, k, v = specs[:3]
    for name, spec in (("q", q), ("k", k), ("v", v)):
        if len(spec.shape) < 2:
            raise ValueError(
                f"{name} has {len(spec.shape)} axes; the last two are (tokens, features)"
            )
        if len(spec.shape) > MAX_AXES - grouped:
            raise ValueError(
                f"{name} has {len(spec.shape)} axes; {MAX_AXES - grouped} are possible"
            )
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
    heads = _grouped_heads(q=q, k=k, v=v) if grouped else None
    batch = _batch_shape(grouped, q=q, k=k, v=v)
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
    members: dict[str, Any] = {"k": k, "v": v, "mask": mask}
    members["q"] = q.broadcast_to((*batch, tq, q.shape[-1]), "q")
    for name, shape in (("bias", (*batch, tq, tk)), ("alibi_slopes", batch), ("sinks", batch)):
        members[name] = option = _broadcast(name, getattr(specs, name), shape)
        if option is not None:
            require_float(name, option.dtype)
    for name in _INTEGERS:
        members[name] = _positions(name, getattr(specs, name), entries)

    left, right = window
    if flag("causal", causal):
        right = 0 if right is None else min(right, 0)
    if num_splits is not None:
        num_splits = integer("num_splits", num_splits)
        if num_splits < 1:
            raise ValueError(f"num_splits must be at least 1, got {num_splits}")
    if heads is not None:  # only now: messages are about the shapes that were given
        batch = (*batch[:-1], *heads)
        for name, (axis, sizes) in head_axes(specs, heads).items():
            if members[name] is not None:
                members[name] = split_heads(members[name], axis, sizes)
    for name, x in (("k", k), ("v", v)):
        members[name] = members[name].broadcast_to((*batch, tk, x.shape[-1]), name)
    return AttentionProblem(
        batch_shape=batch,
        scale=1 / math.sqrt(q.shape[-1]) if scale is None else _scale(scale, q.dtype),
        softcap=None if softcap is None else _softcap(softcap, q.dtype),
        left=left,
        right=right,
        num_splits=num_splits,
        method=method,
        cu_seqlens_q=specs.cu_seqlens_q,
        cu_seqlens_k=specs.cu_seqlens_k,
        **members,
    )


def _grouped_heads(**specs: ArraySpec) -> tuple[int, int]:
    """Return (key heads, query heads for each), or raise ValueError naming who does not fit."""
    for name, spec in specs.items():
        if len(spec.shape) < 3:
            raise ValueError(
                f"{name} has shape {spec.shape}; enable_gqa needs a head axis, (..., H, T, D)"
            )
    q, k, v = (spec.shape[-3] for spec in specs.values())
    if k != v:
        raise ValueError(f"v has {v} heads but k has {k}; enable_gqa needs as many")
    if q % k if k else q:
        raise ValueError(f"q has {q} heads, no multiple of the {k} of k")
    return k, q // k if k else 1


def head_axes(
    arrays: AttentionArrays, heads: tuple[int, int]
) -> dict[str, tuple[int, tuple[int, int]]]:
    """Return the axis of the heads of each array that has one, and the two sizes it is split in."""
    of_heads = ["alibi_slopes", "sinks"]
    if arrays.cu_seqlens_q is None:  # else lengths and offsets are those of sequences
        of_heads += _INTEGERS
    return {
        **dict.fromkeys(("k", "v"), (-3, (heads[0], 1))),
        **dict.fromkeys(("q", "mask", "bias"), (-3, heads)),
        **dict.fromkeys(of_heads, (-1, heads)),
    }


def split_heads(spec: ArraySpec, axis: int, sizes: tuple[int, int]) -> ArraySpec:
    """Describe the view with the head axis as two axes."""
    at = len(spec.shape) + axis
    shape, strides = list(spec.shape), list(spec.strides)
    shape[at : at + 1] = sizes
    strides[at : at + 1] = strides[at] * sizes[1], strides[at]
    return ArraySpec(tuple(shape), tuple(strides), spec.dtype)


def joined(shape: tuple[int, ...], axis: int, heads: tuple[int, int] | None) -> tuple[int, ...]:
    """Return the shape with the two head axes, of which `axis` is the first, as one."""
    if heads is None:
        return shape
    at = len(shape) + axis
    return (*shape[:at], heads[0] * heads[1], *shape[at + 2 :])


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


def _describe_integers(name: str, x: Any) -> _Layout | None:
    if x is None:
        return None
    if isinstance(x, numbers.Real):
        integer(name, x)
        return _INTEGER
    return x.shape, x.strides, x.dtype


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


def _batch_shape(grouped: bool, **specs: ArraySpec) -> tuple[int, ...]:
    """Broadcast the leading axes, naming the operand that does not fit.

    Heads in groups broadcast to q's.
    """
    batch: tuple[int, ...] = ()
    before: list[str] = []
    for name, spec in specs.items():
        axes = spec.shape[:-2]
        try:
            batch = np.broadcast_shapes(batch, (*axes[:-1], 1) if grouped and name != "q" else axes)
        except ValueError:
            raise ValueError(
                f"{name} has batch axes {axes} (shape {spec.shape}), "
                f"which do not broadcast with those of {', '.join(before)}"
            ) from None
        before.append(f"{name} {spec.shape}")
    return batch


def _broadcast(name: str, spec: ArraySpec | None, shape: tuple[int, ...]) -> ArraySpec | None:
    return None if spec is None else spec.broadcast_to(shape, name)


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
    ) -> SoftmaxProblem:
        """Validate the arguments of a call and describe it; `inputs` in the order given above.

        Raises
        ------
        TypeError, ValueError
            Naming the argument, what came and what is accepted.
        """
        specs = tuple([ArraySpec.of(x) for x in inputs.values()])
        mask = None if where is None else ArraySpec.of(where)
        describe = _softmax_problem if _is_hashable(axis) else _softmax_problem.__wrapped__
        return describe(operation, tuple(inputs), specs, axis, mask, method)


@lru_cache(maxsize=1024, typed=True)
def _softmax_problem(
    operation: str,
    names: tuple[str, ...],
    described: tuple[ArraySpec, ...],
    axis: object,
    where: ArraySpec | None,
    method: str,
) -> SoftmaxProblem:
    """Do the part of `SoftmaxProblem.of` that depends on descriptions alone, once for each."""
    specs = dict(zip(names, described, strict=True))
    dtypes = {name: _softmax_dtype(name, spec.dtype) for name, spec in specs.items()}
    main = names[_main_operand(operation)]
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
            if spec.shape != reduced:
                kept = iter(spec.strides)
                strides = tuple(0 if a in axes else next(kept) for a in range(len(shape)))
                specs[name] = ArraySpec(reduced, strides, spec.dtype)
        elif name in _STATE:
            require_same(name, spec.dtype, "this state", accumulator(dtype), "dtype")
            specs[name] = spec.broadcast_to(shape, name)
        else:
            require_same(name, spec.shape, main, shape, "shape")
            require_same(name, dtypes[name], main, dtype, "dtype")
    mask = None if where is None else where.broadcast_to(shape, "where")
    if mask is not None and mask.dtype != np.bool:
        raise TypeError(f"where has dtype {mask.dtype}; bool is needed (True = takes part)")
    reduces = operation in ("logsumexp", "softmax_state")
    return SoftmaxProblem(
        operation=operation,
        inputs=tuple(specs.values()),
        axes=axes,
        where=mask,
        out_shape=reduced if reduces else shape,
        out_dtype=accumulator(dtype) if operation == "softmax_state" else dtype,
        method=method,
    )


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
