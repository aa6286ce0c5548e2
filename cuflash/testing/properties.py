"""What holds for any exact attention and softmax, one function for each law.

A property of attention takes the callable under test, which has the signature of
``cuflash.flash_attention`` on NumPy arrays, and an :class:`AttentionCase`; it raises AssertionError
where the law is broken. Some laws only speak of part of the options: then the property changes the
case first (:func:`key_permutation` drops what depends on a key's place), so that every case can be
given to every property.

"Bitwise" means equal bits, NaN equal to NaN: same method, same shapes, nothing else may matter.

A callable that has no lse returns None for it: then the laws speak of out alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np

from cuflash import reference
from cuflash.testing.bounds import (
    UNIT_ROUNDOFF,
    Expected,
    accumulator,
    assert_attention_close,
    error_bound,
    expect_attention,
)
from cuflash.testing.problems import Array, AttentionCase, AttentionInputs, arrange, dtype_of

Attention: TypeAlias = Callable[..., Any]
Merge: TypeAlias = Callable[[Any, Any, Any, Any], tuple[Any, Any]]
AttentionProperty: TypeAlias = Callable[[Attention, AttentionCase], None]


def _run(attention: Attention, inputs: AttentionInputs) -> tuple[Array, Array]:
    q, k, v, options = inputs
    out, lse = attention(q, k, v, **options, return_lse=True)
    # An lse that is not there equals itself, and nothing more is asked of it.
    return out, np.full(out.shape[:-1], np.nan) if lse is None else lse


def assert_same_shape(actual: Array, expected: Array, what: str, case: object) -> None:
    """Assert it of two arrays that would broadcast otherwise."""
    if actual.shape != expected.shape:
        raise AssertionError(f"{what}: shape {actual.shape} instead of {expected.shape}\n{case!r}")


def assert_bitwise_equal(actual: Any, expected: Any, what: str, case: object) -> None:
    """Assert equal shapes and bits, but for the bits of a NaN."""
    actual, expected = (np.asarray(x).astype(np.float64) for x in (actual, expected))
    assert_same_shape(actual, expected, what, case)
    same = (actual == expected) & (np.signbit(actual) == np.signbit(expected))
    same |= np.isnan(actual) & np.isnan(expected)
    if not same.all():
        at = tuple(int(i) for i in np.argwhere(~same)[0])
        raise AssertionError(
            f"{what}: {(~same).sum()} of {same.size} elements differ, first at {at}: "
            f"{actual[at]!s} instead of {expected[at]!s}\n{case!r}"
        )


def assert_near(actual: Any, expected: Expected, what: str, case: object) -> None:
    """Assert that two results differ by no more than both may be off."""
    actual = np.asarray(actual).astype(np.float64)
    assert_same_shape(actual, expected.value, what, case)
    with np.errstate(invalid="ignore"):
        near = np.abs(actual - expected.value) <= expected.bound
    near |= actual == expected.value
    near |= ~np.isfinite(actual) & ~np.isfinite(expected.value)
    if not near.all():
        at = tuple(int(i) for i in np.argwhere(~near)[0])
        raise AssertionError(
            f"{what}: {(~near).sum()} of {near.size} elements differ, first at {at}: "
            f"{actual[at]!s} instead of {expected.value[at]!s}, allowed are "
            f"{expected.bound[at]:.3g}\n{case!r}"
        )


def _pair(of: Any, *bounds: Any) -> Expected:
    return Expected(np.asarray(of).astype(np.float64), np.asarray(sum(bounds)))


def _without_order(case: AttentionCase) -> AttentionCase:
    """Drop the options that depend on where a key stands."""
    return replace(case, causal=False, window=None, alibi_slopes=None, key_lengths=None)


def _finite(case: AttentionCase) -> AttentionCase:
    return replace(case, visible=None)


def _own_memory(inputs: AttentionInputs, case: AttentionCase) -> AttentionInputs:
    """Copy q, k, v to the full batch shape, so that their entries can be changed one by one."""

    def full(x: Array) -> Array:
        batch = case.batch_shape
        if case.enable_gqa:
            batch = (*batch[:-1], x.shape[-3])
        return np.array(np.broadcast_to(x, (*batch, *x.shape[-2:])))

    return AttentionInputs(full(inputs.q), full(inputs.k), full(inputs.v), inputs.options)


# ------------------------------------------------------------------------------ values


def matches_oracle(attention: Attention, case: AttentionCase) -> None:
    """Check that out and lse keep the accuracy contract and have the dtypes they should."""
    inputs = case.build()
    out, lse = attention(*inputs[:3], **inputs.options, return_lse=True)
    for name, x, dtype in (("out", out, case.dtype), ("lse", lse, accumulator(case.dtype))):
        if x is not None and x.dtype != dtype_of(dtype):
            raise AssertionError(f"{name} has dtype {x.dtype}, not {dtype}\n{case!r}")
    assert_attention_close(out, lse, case)
    alone = attention(inputs.q, inputs.k, inputs.v, **inputs.options)
    assert_bitwise_equal(alone, out, "out depends on whether lse is asked for", case)


def key_permutation(attention: Attention, case: AttentionCase) -> None:
    """Check that the order of the keys does not matter."""
    case = _without_order(case)
    inputs, expected = case.build(), error_bound(case)
    order = np.random.default_rng(case.seed).permutation(case.tk)
    options = dict(inputs.options)
    for name in ("mask", "bias"):
        if name in options and options[name].ndim and options[name].shape[-1] == case.tk:
            options[name] = options[name][..., order]
    moved = AttentionInputs(inputs.q, inputs.k[..., order, :], inputs.v[..., order, :], options)
    out, lse = _run(attention, inputs)
    out_moved, lse_moved = _run(attention, moved)
    bounds = expected.out.bound, expected.lse.bound
    assert_near(out_moved, _pair(out, 2 * bounds[0]), "out after permuting keys", case)
    assert_near(lse_moved, _pair(lse, 2 * bounds[1]), "lse after permuting keys", case)


def split_of_keys(
    attention: Attention, case: AttentionCase, merge: Merge = reference.merge_attention
) -> None:
    """Check that attention to two parts of the keys, merged, is attention to all of them."""
    case = _finite(case)
    inputs, expected = case.build(), error_bound(case)
    at = int(np.random.default_rng(case.seed).integers(case.tk, endpoint=True))
    results: list[Array] = []
    bounds = []
    for start, stop in ((0, at), (at, case.tk)):
        part = _keys(inputs, case, start, stop)
        if results:  # a sink counts once
            part.options.pop("sinks", None)
        out, lse = attention(*part[:3], **part.options, return_lse=True)
        if lse is None:
            return
        results += out, lse
        allowed = expect_attention(part.q, part.k, part.v, **part.options)
        bounds.append((allowed.out.bound, allowed.lse.bound))
    out, lse = merge(*results)
    # The parts' own errors, those of their weights by the lse, and one rounding more.
    of_lse = expected.lse.bound + np.maximum(bounds[0][1], bounds[1][1])
    size = np.abs(np.asarray(inputs.v).astype(np.float64))
    largest = np.where(np.isfinite(size), size, 0).max(initial=0)
    of_out = expected.out.bound + np.maximum(bounds[0][0], bounds[1][0])
    of_out = of_out + 2 * of_lse[..., None] * largest
    assert_near(out, _pair(expected.out.value, of_out), f"out split at key {at}", case)
    assert_near(lse, _pair(expected.lse.value, of_lse), f"lse split at key {at}", case)


def _keys(inputs: AttentionInputs, case: AttentionCase, start: int, stop: int) -> AttentionInputs:
    """Keep only the keys from start to stop, and everything else where it was."""
    options = dict(inputs.options)
    for name in ("mask", "bias"):
        if name in options and options[name].ndim and options[name].shape[-1] == case.tk:
            options[name] = options[name][..., start:stop]
    lengths = options.get("key_lengths", case.tk)
    offset = options.get("query_offset", lengths - options.get("query_lengths", case.tq))
    options["query_offset"] = offset - start
    if "key_lengths" in options:
        options["key_lengths"] = np.clip(lengths - start, 0, stop - start)
    keys = slice(start, stop)
    return AttentionInputs(inputs.q, inputs.k[..., keys, :], inputs.v[..., keys, :], options)


def grouped_heads_equal_repeated_heads(attention: Attention, case: AttentionCase) -> None:
    """Check that grouped heads give what repeating the key heads for each query head gives."""
    if not case.enable_gqa:
        return
    inputs, expected = case.build(), error_bound(case)
    out, lse = _run(attention, inputs)
    heads = case.q_batch[-1]
    k, v = (np.repeat(x, heads // x.shape[-3], axis=-3) for x in (inputs.k, inputs.v))
    options = {name: x for name, x in inputs.options.items() if name != "enable_gqa"}
    repeated = _run(attention, AttentionInputs(inputs.q, k, v, options))
    bounds = 2 * expected.out.bound, 2 * expected.lse.bound
    assert_near(out, _pair(repeated[0], bounds[0]), "out of grouped heads", case)
    assert_near(lse, _pair(repeated[1], bounds[1]), "lse of grouped heads", case)


def linearity_in_v(attention: Attention, case: AttentionCase) -> None:
    """Check that out is linear in v: even rows plus odd rows, and a change of sign."""
    case = _finite(case)
    inputs, expected = case.build(), error_bound(case)
    even = np.arange(case.tk)[:, None] % 2 == 0
    zero = inputs.v.dtype.type(0)
    # Selects and a change of sign are exact in every dtype.
    outs = [
        np.asarray(_run(attention, inputs._replace(v=v))[0]).astype(np.float64)
        for v in (
            inputs.v,
            np.where(even, inputs.v, zero).astype(inputs.v.dtype),
            np.where(even, zero, inputs.v).astype(inputs.v.dtype),
            (-inputs.v).astype(inputs.v.dtype),
        )
    ]
    bound = expected.out.bound
    assert_near(outs[1] + outs[2], _pair(outs[0], 3 * bound), "out of even + odd values", case)
    assert_near(-outs[3], _pair(outs[0], 2 * bound), "out of -v", case)


def weights_are_convex(attention: Attention, case: AttentionCase) -> None:
    """Check that out is a convex mix of v: with a share of 0 where there is a sink, or no key."""
    case = replace(_finite(case), unseen=None)
    inputs = case.build()
    ones = inputs._replace(v=np.ones(inputs.v.shape, inputs.v.dtype))
    expected = expect_attention(ones.q, ones.k, ones.v, **ones.options)
    total = np.asarray(_run(attention, ones)[0]).astype(np.float64)
    bound = expected.out.bound
    has_weight = expected.out.value > 0
    low = np.where(has_weight & ("sinks" not in ones.options), 1, 0)
    if not ((low - bound <= total) & (total <= has_weight + bound)).all():
        raise AssertionError(f"weights sum to {total.min()}..{total.max()}\n{case!r}")
    expected = error_bound(case)
    out = np.asarray(_run(attention, inputs)[0]).astype(np.float64)
    v = np.asarray(inputs.v).astype(np.float64)
    if case.enable_gqa:
        v = np.repeat(v, case.q_batch[-1] // v.shape[-3], axis=-3)
    # A sink, like an empty row, draws towards 0.
    low = np.minimum(v.min(axis=-2, keepdims=True, initial=np.inf), 0)
    high = np.maximum(v.max(axis=-2, keepdims=True, initial=-np.inf), 0)
    inside = (low - expected.out.bound <= out) & (out <= high + expected.out.bound)
    if not inside.all():
        at = tuple(int(i) for i in np.argwhere(~inside)[0])
        raise AssertionError(f"out{at} = {out[at]} lies outside the values' range\n{case!r}")


def shift_invariance(attention: Attention, case: AttentionCase) -> None:
    """Check that a constant added to a row's scores is added to lse and leaves out as it is."""
    case = replace(_finite(case), sinks=None, unseen=None)
    inputs = case.build()
    shift = np.float64(2.0) ** np.arange(case.tq)[:, None].clip(0, 6)
    wide = accumulator(case.dtype)
    bias = inputs.options.get("bias", np.zeros(1)).astype(np.float64).astype(wide)
    moved_bias = (bias + shift).astype(wide)
    exact = inputs._replace(options=inputs.options | {"bias": bias})
    moved = inputs._replace(options=inputs.options | {"bias": moved_bias})
    bounds = [
        (e.out.bound, e.lse.bound)
        for e in (expect_attention(*i[:3], **i.options) for i in (exact, moved))
    ]
    # bias + shift is rounded: every score of a row moves by up to that.
    largest = np.where(np.isfinite(bias), np.abs(bias), 0).max(initial=0)
    rounding = UNIT_ROUNDOFF[wide] * (64 + largest)
    size = np.abs(np.asarray(inputs.v).astype(np.float64)).max(initial=0)
    out, lse = _run(attention, exact)
    out_moved, lse_moved = _run(attention, moved)
    of_out = _pair(out, bounds[0][0], bounds[1][0], 2 * rounding * size)
    of_lse = _pair(lse + shift[:, 0], bounds[0][1], bounds[1][1], rounding)
    assert_near(out_moved, of_out, "out after a shift of the scores", case)
    assert_near(lse_moved, of_lse, "lse after a shift of the scores", case)


# ---------------------------------------------------------------------------- influence


def causal_future_independence(attention: Attention, case: AttentionCase) -> None:
    """Check that under a causal mask no bit of a row depends on later keys."""
    case = replace(case, causal=True, query_offset=None, query_lengths=None, key_lengths=None)
    inputs = _own_memory(case.build(), case)
    rng = np.random.default_rng(case.seed)
    cut = int(rng.integers(case.tk, endpoint=True))
    past = np.arange(case.tq) + case.tk - case.tq < cut
    clean = _run(attention, inputs)
    for special in (None, np.nan):
        k, v = inputs.k.copy(), inputs.v.copy()
        for x in (k, v):
            later = x[..., cut:, :]
            later[...] = rng.normal(size=later.shape) if special is None else special
        out, lse = _run(attention, inputs._replace(k=k, v=v))
        what = f"after changing keys from {cut} on"
        assert_bitwise_equal(out[..., past, :], clean[0][..., past, :], f"out {what}", case)
        assert_bitwise_equal(lse[..., past], clean[1][..., past], f"lse {what}", case)


def row_independence(attention: Attention, case: AttentionCase) -> None:
    """Check that no bit of a row depends on another query."""
    if not case.tq:
        return
    inputs = _own_memory(case.build(), case)
    rng = np.random.default_rng(case.seed)
    row = int(rng.integers(case.tq))
    others = np.arange(case.tq) != row
    clean = _run(attention, inputs)
    for special in (None, np.nan):
        q = inputs.q.copy()
        q[..., row, :] = rng.normal(size=q[..., row, :].shape) if special is None else special
        out, lse = _run(attention, inputs._replace(q=q))
        what = f"after changing query {row}"
        assert_bitwise_equal(out[..., others, :], clean[0][..., others, :], f"out {what}", case)
        assert_bitwise_equal(lse[..., others], clean[1][..., others], f"lse {what}", case)


def batch_independence(attention: Attention, case: AttentionCase) -> None:
    """Check that no bit of a batch entry depends on another entry."""
    # Heads that share keys are not independent of each other.
    axes = len(case.batch_shape) - case.enable_gqa
    if axes < 1 or case.batch_shape[0] < 2:
        return
    inputs = _own_memory(case.build(), case)
    rng = np.random.default_rng(case.seed)
    entry = int(rng.integers(case.batch_shape[0]))
    others = np.arange(case.batch_shape[0]) != entry
    clean = _run(attention, inputs)
    for special in (None, np.nan):
        q, k, v = (x.copy() for x in inputs[:3])
        for x in (q, k, v):
            x[entry] = rng.normal(size=x[entry].shape) if special is None else special
        out, lse = _run(attention, inputs._replace(q=q, k=k, v=v))
        what = f"after changing batch entry {entry}"
        assert_bitwise_equal(out[others], clean[0][others], f"out {what}", case)
        assert_bitwise_equal(lse[others], clean[1][others], f"lse {what}", case)


def unseen_nonfinite_never_leaks(attention: Attention, case: AttentionCase) -> None:
    """Check that what no row sees may as well be zero, bit for bit, whatever it holds."""
    clean = _run(attention, replace(case, unseen="0").build())
    for special in ("nan", "inf", "-inf"):
        out, lse = _run(attention, replace(case, unseen=special).build())
        assert_bitwise_equal(out, clean[0], f"out with {special} in unseen places", case)
        assert_bitwise_equal(lse, clean[1], f"lse with {special} in unseen places", case)


def nonfinite_key_reaches_only_rows_that_see_it(attention: Attention, case: AttentionCase) -> None:
    """Check that NaN in one row of k or v spoils the rows that see it and no bit of another."""
    if not case.tk:
        return
    case = replace(_finite(case), bias_minus_inf=False)
    inputs = _own_memory(case.build(), case)
    _, seen = reference.attention_scores(*inputs[:3], **inputs.options)
    key = int(np.random.default_rng(case.seed).integers(case.tk))
    sees = seen[..., key]
    clean = _run(attention, inputs)
    for name in ("k", "v"):
        spoiled = getattr(inputs, name).copy()
        spoiled[..., key, :] = np.nan
        out, lse = _run(attention, inputs._replace(**{name: spoiled}))
        what = f"with NaN in {name} at key {key}"
        assert_bitwise_equal(out[~sees], clean[0][~sees], f"out of unseeing rows {what}", case)
        assert_bitwise_equal(lse[~sees], clean[1][~sees], f"lse of unseeing rows {what}", case)
        if not np.isnan(np.asarray(out[sees]).astype(np.float64)).all():
            raise AssertionError(f"{what}: out is not NaN in all rows that see it\n{case!r}")
        if name == "k" and not np.isnan(lse[sees]).all():
            raise AssertionError(f"{what}: lse is not NaN in all rows that see it\n{case!r}")


# ------------------------------------------------------------------------------- memory


def views_equal_copies(attention: Attention, case: AttentionCase) -> None:
    """Check that a view gives the bits that its contiguous copy gives."""
    inputs = case.build()
    q, k, v = (copy_of(x) for x in inputs[:3])
    options = {name: copy_of(x) for name, x in inputs.options.items()}
    copies = _run(attention, AttentionInputs(q, k, v, options))
    out, lse = _run(attention, inputs)
    assert_bitwise_equal(out, copies[0], "out of views", case)
    assert_bitwise_equal(lse, copies[1], "lse of views", case)


def copy_of(x: Any) -> Any:
    """Copy an array to C order and native byte order; return anything else as it is."""
    if not isinstance(x, np.ndarray):
        return x
    return np.array(x, x.dtype if x.dtype.isnative else x.dtype.newbyteorder("="), order="C")


def poisoned_outputs_fully_written(attention: Attention, case: AttentionCase) -> None:
    """Check that given outputs are returned, with every element written and nothing beside."""
    inputs = case.build()
    clean_out, clean_lse = _run(attention, inputs)
    for layout in ("contiguous", "step", "reversed"):
        out = arrange(np.full(clean_out.shape, np.nan, clean_out.dtype), layout)
        lse = arrange(np.full(clean_lse.shape, np.nan, clean_lse.dtype), layout)
        result = attention(*inputs[:3], **inputs.options, out=out, lse=lse)
        if result[0] is not out or result[1] is not lse:
            raise AssertionError(f"the outputs given are not those returned\n{case!r}")
        assert_bitwise_equal(out, clean_out, f"{layout} out", case)
        assert_bitwise_equal(lse, clean_lse, f"{layout} lse", case)
        if layout == "step" and out.base is not None:
            around = out.base.copy()
            around[..., ::2, ::2] = np.nan
            if not np.isnan(around.astype(np.float64)).all():
                raise AssertionError(f"something beside out was written\n{case!r}")


def repeatable(attention: Attention, case: AttentionCase) -> None:
    """Check that the same call gives the same bits."""
    inputs = case.build()
    first, again = _run(attention, inputs), _run(attention, inputs)
    assert_bitwise_equal(again[0], first[0], "out of a second call", case)
    assert_bitwise_equal(again[1], first[1], "lse of a second call", case)


def inputs_unchanged(attention: Attention, case: AttentionCase) -> None:
    """Check that nothing that is read is written."""
    inputs, fresh = case.build(), case.build()
    _run(attention, inputs)
    for name, x, y in zip("qkv", inputs[:3], fresh[:3], strict=True):
        assert_bitwise_equal(x, y, name, case)
    for name, x in inputs.options.items():
        if isinstance(x, np.ndarray):
            assert_bitwise_equal(x, fresh.options[name], name, case)


def unrounded_output(attention: Attention, case: AttentionCase) -> None:
    """Check that 16-bit inputs can have a float32 out, of the same accuracy."""
    if case.dtype not in ("float16", "bfloat16"):
        return
    inputs, expected = case.build(), error_bound(case)
    out = np.full(expected.out.value.shape, np.nan, np.float32)
    lse = np.full(expected.lse.value.shape, np.nan, np.float32)
    attention(*inputs[:3], **inputs.options, out=out, lse=lse)
    assert_attention_close(out, lse, case)


#: Every property of attention, by name.
ATTENTION_PROPERTIES: dict[str, AttentionProperty] = {
    law.__name__: law
    for law in (
        matches_oracle,
        key_permutation,
        split_of_keys,
        grouped_heads_equal_repeated_heads,
        linearity_in_v,
        weights_are_convex,
        shift_invariance,
        causal_future_independence,
        row_independence,
        batch_independence,
        unseen_nonfinite_never_leaks,
        nonfinite_key_reaches_only_rows_that_see_it,
        views_equal_copies,
        poisoned_outputs_fully_written,
        repeatable,
        inputs_unchanged,
        unrounded_output,
    )
}
