"""hypothesis strategies that draw the cases of :mod:`cuflash.testing.problems`.

They draw shapes, options, layouts and a seed. Sizes gather where kernels go wrong: 0, 1, one less
and one more than the tile sizes given as `borders`. A case is a few integers and names, so it
shrinks quickly to a small one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from cuflash.testing.problems import (
    DTYPES,
    LAYOUTS,
    LOGITS,
    SOFTMAX_VALUES,
    AttentionCase,
    Shape,
    SoftmaxCase,
)
from cuflash.testing.softmax_properties import MergeCase
from cuflash.testing.varlen import VARLEN_OPTIONS, VarlenCase

#: Options of attention that can be drawn, by their names as keyword arguments.
OPTIONS = (
    "scale",
    "causal",
    "window",
    "query_offset",
    "query_lengths",
    "key_lengths",
    "mask",
    "bias",
    "alibi_slopes",
    "softcap",
    "sinks",
    "enable_gqa",
)
_SEEDS = st.integers(0, 2**16)
# Length of an axis that is none of the long ones. An empty one leaves nothing to compare: rarely.
_FEW = st.sampled_from((1, 2, 3, 2, 3, 2, 3, 2, 3, 5, 5, 0))
_SPECIALS = ("nan", "inf", "-inf")


def sizes(least: int, most: int, borders: Sequence[int] = ()) -> st.SearchStrategy[int]:
    """Draw a size from `least` to `most`, often small, often within one of a border."""
    near = sorted({b + step for b in borders for step in (-1, 0, 1) if least <= b + step <= most})
    small = st.integers(max(least, 1), max(least, min(most, 8)))
    any_size = st.integers(least, most)
    return st.one_of(small, st.sampled_from(near), any_size) if near else st.one_of(small, any_size)


@st.composite
def broadcasting_to(draw: st.DrawFn, shape: Shape) -> Shape:
    """Draw a shape that broadcasts to `shape`: some axes of size one, some leading ones absent."""
    absent = draw(st.integers(0, len(shape)))
    return tuple(1 if draw(st.booleans()) else n for n in shape[absent:])


@st.composite
def attention_problems(
    draw: st.DrawFn,
    *,
    dtypes: Sequence[str] = DTYPES,
    options: Sequence[str] = OPTIONS,
    layouts: Sequence[str] = LAYOUTS,
    logits: Sequence[str] = LOGITS,
    borders: Sequence[int] = (16, 64, 128),
    max_tokens: int = 130,
    max_features: int = 130,
    max_batch_axes: int = 3,
    max_products: int = 1_500_000,
    non_finite: bool = True,
) -> AttentionCase:
    """Draw an attention problem.

    Parameters
    ----------
    draw
        Given by hypothesis.
    dtypes, options, layouts, logits
        What may be drawn.
    borders
        Tile sizes of the implementation under test.
    max_tokens, max_features, max_batch_axes
        Largest Tq and Tk, D and Dv, number of batch axes.
    max_products
        Largest number of multiplications of an example: bounds its time. Larger draws lose batch
        entries first.
    non_finite
        Whether NaN and infinities are planted.

    Returns
    -------
    AttentionCase
        What was drawn.
    """
    tq = draw(sizes(0, max_tokens, borders))
    tk = draw(sizes(0, max_tokens, borders))
    d = draw(sizes(1, max_features, borders))
    dv = draw(st.one_of(st.just(d), sizes(1, max_features, borders)))
    batch = draw(st.lists(_FEW, max_size=max_batch_axes).map(tuple))
    if math.prod(batch) * tq * tk * (d + dv) > max_products:
        batch = (1,) * len(batch)
    fields: dict[str, Any] = {"tq": tq, "tk": tk, "d": d, "dv": dv}
    fields |= draw(_batches(batch, "enable_gqa" in options))
    whole = AttentionCase(**fields)
    batch = whole.batch_shape

    fields["dtype"] = draw(st.sampled_from(dtypes))
    for name in ("q_layout", "k_layout", "v_layout", "option_layout"):
        fields[name] = draw(st.sampled_from(layouts))
    fields["logits"] = draw(st.sampled_from(logits))
    fields |= draw(_options(batch, tq, tk, options))
    if non_finite:
        fields["unseen"] = draw(st.sampled_from((None, *_SPECIALS)))
        operands = ["q", "k", "v"] + ["bias"] * (fields.get("bias") is not None)
        # Where every weight is an exact zero, IEEE and a select disagree on zero times NaN.
        if not fields.get("bias_minus_inf"):
            planted = st.tuples(st.sampled_from(operands), st.sampled_from(_SPECIALS))
            fields["visible"] = draw(st.one_of(st.none(), planted))
    return AttentionCase(**fields, seed=draw(_SEEDS))


@st.composite
def _batches(draw: st.DrawFn, batch: Shape, grouped_heads: bool) -> dict[str, Any]:
    """Draw the batch axes of q, k and v, which broadcast to at most `batch`."""
    if grouped_heads and batch and batch[-1] and draw(st.booleans()):
        group = draw(st.integers(1, 4))
        rest = batch[:-1]
        heads = batch[-1]
        return {
            "q_batch": (*draw(broadcasting_to(rest)), heads * group),
            "k_batch": (*draw(broadcasting_to(rest)), heads),
            "v_batch": (*draw(broadcasting_to(rest)), heads),
            "enable_gqa": True,
        }
    return {f"{name}_batch": draw(broadcasting_to(batch)) for name in "qkv"}


@st.composite
def _options(
    draw: st.DrawFn, batch: Shape, tq: int, tk: int, allowed: Sequence[str]
) -> dict[str, Any]:
    """Draw score options, each in one example of four."""
    per_pair = broadcasting_to((*batch, tq, tk))
    per_entry = st.tuples(*(st.sampled_from(sorted({1, n})) for n in batch))
    bounds = st.one_of(st.none(), st.integers(0, max(tk, 1)))
    offsets = st.integers(min(0, tk - tq) - 2, max(0, tk - tq) + 2)
    values: dict[str, st.SearchStrategy[Any]] = {
        "scale": st.sampled_from([0.0, 1.0, -0.5, 0.125]),
        "causal": st.just(True),
        "window": st.tuples(bounds, bounds),
        "query_offset": st.one_of(offsets, per_entry),
        "query_lengths": st.one_of(st.integers(0, tq), per_entry),
        "key_lengths": st.one_of(st.integers(0, tk), per_entry),
        "mask": per_pair,
        "bias": per_pair,
        "alibi_slopes": broadcasting_to(batch),
        "softcap": st.sampled_from([0.5, 10.0, 50.0]),
        "sinks": broadcasting_to(batch),
    }
    drawn = {
        name: draw(value)
        for name, value in values.items()
        if name in allowed and draw(st.integers(0, 3)) == 3
    }
    if "bias" in drawn:
        drawn["bias_dtype"] = draw(st.sampled_from(DTYPES))
        drawn["bias_minus_inf"] = draw(st.booleans())
    return drawn


@st.composite
def varlen_problems(
    draw: st.DrawFn,
    /,
    *,
    borders: Sequence[int] = (16, 64, 128),
    max_tokens: int = 130,
    max_sequences: int = 6,
    max_features: int = 40,
    max_batch_axes: int = 2,
    **others: Any,
) -> VarlenCase:
    """Draw sequences that lie end to end.

    Parameters
    ----------
    draw
        Given by hypothesis.
    borders, max_tokens
        Of one sequence, as in `attention_problems`.
    max_sequences
        Largest number of sequences.
    max_features, max_batch_axes, **others
        As in `attention_problems`.

    Returns
    -------
    VarlenCase
        What was drawn.
    """
    length = sizes(0, max_tokens, borders)
    lengths = draw(st.lists(st.tuples(length, length), max_size=max_sequences).map(tuple))
    past = st.sampled_from((0, 0, 1, 5))
    whole = draw(
        attention_problems(
            options=VARLEN_OPTIONS,
            max_tokens=1,
            max_features=max_features,
            max_batch_axes=max_batch_axes,
            **others,
        )
    )
    tq, tk = (sum(n) for n in zip((0, 0), *lengths, strict=True))
    return VarlenCase(
        whole=replace(whole, tq=tq + draw(past), tk=tk + draw(past), unseen=None),
        lengths=lengths,
        query_offset=draw(st.booleans()),
        key_lengths=draw(st.booleans()),
        ends_dtype=draw(st.sampled_from(("int32", "int64"))),
        ends_layout=draw(st.sampled_from(("contiguous", "offset", "unaligned", "byteswapped"))),
    )


@st.composite
def softmax_problems(
    draw: st.DrawFn,
    *,
    dtypes: Sequence[str] = DTYPES,
    layouts: Sequence[str] = LAYOUTS,
    values: Sequence[str] = SOFTMAX_VALUES,
    borders: Sequence[int] = (32, 256, 1024),
    max_row: int = 2049,
    max_axes: int = 4,
    max_elements: int = 40_000,
) -> SoftmaxCase:
    """Draw a softmax problem.

    Parameters
    ----------
    draw
        Given by hypothesis.
    dtypes, layouts, values
        What may be drawn; integer dtypes may be among the dtypes.
    borders
        Row lengths at which the implementation under test changes its ways.
    max_row, max_axes, max_elements
        Longest axis, number of axes, number of elements. Larger draws lose rows first.

    Returns
    -------
    SoftmaxCase
        What was drawn.
    """
    ndim = draw(st.integers(1, max_axes))
    shape = draw(st.lists(_FEW, min_size=ndim, max_size=ndim))
    long_axis = draw(st.integers(0, ndim - 1))
    shape[long_axis] = draw(sizes(0, max_row, borders))
    if math.prod(shape) > max_elements:
        shape = [n if a == long_axis else 1 for a, n in enumerate(shape)]
    axes = st.integers(-ndim, ndim - 1)
    some = st.lists(st.integers(0, ndim - 1), min_size=1, max_size=ndim, unique=True).map(tuple)
    axis = draw(st.one_of(st.just(long_axis), axes, some, st.none()))
    return SoftmaxCase(
        shape=tuple(shape),
        axis=axis,
        dtype=draw(st.sampled_from(dtypes)),
        layout=draw(st.sampled_from(layouts)),
        values=draw(st.sampled_from(values)),
        where=draw(st.one_of(st.none(), broadcasting_to(tuple(shape)))),
        seed=draw(_SEEDS),
    )


@st.composite
def merge_problems(draw: st.DrawFn, *, dtypes: Sequence[str] = DTYPES) -> MergeCase:
    """Draw three partial results to merge.

    Parameters
    ----------
    draw
        Given by hypothesis.
    dtypes
        Dtypes of out that may be drawn.

    Returns
    -------
    MergeCase
        What was drawn.
    """
    return MergeCase(
        shape=tuple(draw(st.lists(_FEW, min_size=1, max_size=3))),
        dv=draw(st.integers(1, 9)),
        dtype=draw(st.sampled_from(dtypes)),
        magnitude=draw(st.sampled_from((1.0, 0.0, 30.0, 1e4))),
        empty=draw(st.sampled_from((0.2, 0.0, 1.0))),
        seed=draw(_SEEDS),
    )
