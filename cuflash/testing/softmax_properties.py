"""What holds for any exact softmax, and for merging partial results.

A property of the softmax family takes the callable under test, a :class:`SoftmaxCase` and the name
of what the callable computes: "softmax", "log_softmax" or "logsumexp", each with the signature of
cuflash's function of that name. It raises AssertionError where the law is broken. A law that does
not speak of a function lets it pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from cuflash.testing.bounds import (
    UNIT_ROUNDOFF,
    Expected,
    accumulator,
    assert_softmax_close,
    expect_softmax,
    expect_softmax_vjp,
)
from cuflash.testing.problems import Array, Case, Shape, SoftmaxCase, arrange, dtype_of
from cuflash.testing.properties import assert_bitwise_equal, assert_near, copy_of

SOFTMAX_NAMES = ("softmax", "log_softmax", "logsumexp")

Softmax: TypeAlias = Callable[..., Any]
SoftmaxProperty: TypeAlias = Callable[[Softmax, SoftmaxCase, str], None]


def _result_dtype(case: SoftmaxCase) -> np.dtype[Any]:
    return dtype_of(case.dtype if case.dtype in UNIT_ROUNDOFF else "float64")


def _axis_moved(x: Any, case: SoftmaxCase, at: Any) -> Any:
    """Index the first axis of the rows with `at`."""
    index: list[Any] = [slice(None)] * len(case.shape)
    index[case.axes[0]] = at
    return x[tuple(index)]


def matches_oracle(softmax: Softmax, case: SoftmaxCase, name: str) -> None:
    """Check that every element is within its bound, and the dtype."""
    x, options = case.build()
    actual = np.asarray(softmax(x, **options))
    if actual.dtype != _result_dtype(case):
        raise AssertionError(
            f"{name} has dtype {actual.dtype}, not {_result_dtype(case)}\n{case!r}"
        )
    assert_softmax_close(actual, case, name=name)


def shift_invariance(softmax: Softmax, case: SoftmaxCase, name: str) -> None:
    """Check that a constant added to all logits is added to logsumexp and changes nothing else."""
    x, options = case.build()
    # Halves below 64 and their sums with 64 are exact in every dtype, bfloat16 too.
    on_grid = np.clip(np.rint(2 * x.astype(np.float64)) / 2, -60, 60).astype(_result_dtype(case))
    shift = 64
    moved = (on_grid.astype(np.float64) + shift).astype(on_grid.dtype)
    bound = sum(expect_softmax(name, z, **options).bound for z in (on_grid, moved))
    result = np.asarray(softmax(on_grid, **options)).astype(np.float64)
    if name == "logsumexp":
        result = result + shift
    actual = softmax(moved, **options)
    assert_near(actual, Expected(result, np.asarray(bound)), f"{name} after a shift", case)


def permutation(softmax: Softmax, case: SoftmaxCase, name: str) -> None:
    """Check that permuting the logits of a row permutes the result, and leaves logsumexp."""
    x, options = case.build()
    order = np.random.default_rng(case.seed).permutation(case.shape[case.axes[0]])
    where = options.get("where")
    if where is not None:
        options["where"] = _axis_moved(np.broadcast_to(where, x.shape), case, order)
    actual = np.asarray(softmax(_axis_moved(x, case, order), **options))
    options["where"] = where
    result = np.asarray(softmax(x, **options)).astype(np.float64)
    bound = 2 * expect_softmax(name, x, **options).bound
    if name != "logsumexp":
        result, bound = (_axis_moved(a, case, order) for a in (result, bound))
    assert_near(actual, Expected(result, bound), f"{name} of permuted logits", case)


def rows_sum_to_one(softmax: Softmax, case: SoftmaxCase, name: str) -> None:
    """Check that probabilities are in [0, 1] and sum to one, or to zero in an empty row."""
    if name == "logsumexp":
        return
    x, options = case.build()
    y = np.asarray(softmax(x, **options)).astype(np.float64)
    expected = expect_softmax(name, x, **options)
    p, oracle = (np.exp(a) if name == "log_softmax" else a for a in (y, expected.value))
    bound = expected.bound * (oracle if name == "log_softmax" else 1)
    if not ((p >= 0) & (p <= 1 + 2 * bound) | np.isnan(expected.value)).all():
        raise AssertionError(f"a probability is NaN or outside [0, 1]\n{case!r}")
    total = oracle.sum(axis=case.axis)  # 1, 0 or NaN
    slack = 2 * np.where(np.isnan(bound), 0, bound).sum(axis=case.axis) + 1e-12
    actual = p.sum(axis=case.axis)
    assert_near(actual, Expected(np.rint(total), slack), f"sum of {name}", case)


def where_hides(softmax: Softmax, case: SoftmaxCase, name: str) -> None:
    """Check that what `where` excludes may hold anything and counts as -inf, bit for bit."""
    x, options = case.build()
    where = options.setdefault("where", np.ones((1,) * x.ndim, bool))
    if x.dtype.kind in "iub":
        return
    clean = softmax(np.where(where, x, x.dtype.type(-np.inf)).astype(x.dtype), **options)
    for special in (np.nan, np.inf, 0):
        spoiled = np.where(where, x, x.dtype.type(special)).astype(x.dtype)
        what = f"{name} with {special} outside of where"
        assert_bitwise_equal(softmax(spoiled, **options), clean, what, case)


def row_independence(softmax: Softmax, case: SoftmaxCase, name: str) -> None:
    """Check that no bit of a row depends on another row."""
    outer = [a for a in range(len(case.shape)) if a not in case.axes and case.shape[a] > 1]
    x, options = case.build()
    if not outer or x.dtype.kind in "iub":
        return
    axis = outer[0]
    x = np.array(x)
    clean = np.asarray(softmax(x, **options))
    changed = x.copy()
    changed.swapaxes(0, axis)[0] = np.nan
    actual = np.asarray(softmax(changed, **options))
    if name == "logsumexp":
        axis -= sum(a < axis for a in case.axes)
    others = slice(1, None)
    rows, clean_rows = (np.moveaxis(a, axis, 0)[others] for a in (actual, clean))
    assert_bitwise_equal(rows, clean_rows, f"{name} after changing other rows", case)


def views_equal_copies(softmax: Softmax, case: SoftmaxCase, name: str) -> None:
    """Check that a view gives the bits that its contiguous copy gives."""
    x, options = case.build()
    copied = softmax(copy_of(x), **options)
    assert_bitwise_equal(softmax(x, **options), copied, f"{name} of a view", case)


def output_fully_written(softmax: Softmax, case: SoftmaxCase, name: str) -> None:
    """Check that a given out is returned with every element written: the bits without it."""
    x, options = case.build()
    clean = np.asarray(softmax(x, **options))
    out = arrange(np.full(clean.shape, np.nan, clean.dtype), "contiguous")
    if softmax(x, **options, out=out) is not out:
        raise AssertionError(f"{name}: the out given is not the one returned\n{case!r}")
    assert_bitwise_equal(out, clean, f"{name} in a given out", case)


def in_place(softmax: Softmax, case: SoftmaxCase, name: str) -> None:
    """Check that out may be x itself."""
    x, options = case.build()
    if name == "logsumexp" or x.dtype != _result_dtype(case) or not x.dtype.isnative:
        return
    x = np.array(x)
    clean = softmax(x, **options)
    result = softmax(x, **options, out=x)
    if result is not x:
        raise AssertionError(f"{name}: the out given is not the one returned\n{case!r}")
    assert_bitwise_equal(x, clean, f"{name} in place", case)


def repeatable(softmax: Softmax, case: SoftmaxCase, name: str) -> None:
    """Check that the same call gives the same bits and leaves x as it is."""
    x, options = case.build()
    first = softmax(x, **options)
    assert_bitwise_equal(softmax(x, **options), first, f"{name} of a second call", case)
    assert_bitwise_equal(x, case.build().x, "x", case)


#: Every property of the softmax family, by name.
SOFTMAX_PROPERTIES: dict[str, SoftmaxProperty] = {
    law.__name__: law
    for law in (
        matches_oracle,
        shift_invariance,
        permutation,
        rows_sum_to_one,
        where_hides,
        row_independence,
        views_equal_copies,
        output_fully_written,
        in_place,
        repeatable,
    )
}


def vjp_matches_oracle(
    forward: Softmax, vjp: Callable[..., Any], case: SoftmaxCase, name: str
) -> None:
    """Check a gradient; `forward` and `vjp` have the signatures of `name` and ``<name>_vjp``."""
    x, options = case.build()
    y = np.asarray(forward(x, **options))
    rng = np.random.default_rng([case.seed, 2])
    dy = arrange(rng.normal(size=y.shape).astype(y.dtype), case.layout)
    if case.layout == "byteswapped":
        y = arrange(y, case.layout)
    primals = (x, y) if name == "logsumexp" else (y,)
    actual = vjp(dy, *primals, **options)
    expected = expect_softmax_vjp(f"{name}_vjp", dy, *primals, **options)
    assert_softmax_close(actual, expected, name=f"{name}_vjp", axis=case.axis, hint=repr(case))


# ------------------------------------------------------------------------------- merging


class Part(NamedTuple):
    """Attention over some of the keys."""

    out: Array
    lse: Array


@dataclass(frozen=True, repr=False)
class MergeCase(Case):
    """Three partial results; `build` makes them.

    `magnitude` scales lse, to zeros of both signs if it is 0; `empty` is the share of rows without
    a key, whose out is NaN.
    """

    shape: Shape = (1,)
    dv: int = 1
    dtype: str = "float32"
    magnitude: float = 1.0
    empty: float = 0.2
    seed: int = 0

    def build(self) -> tuple[Part, Part, Part]:
        """Make the parts, the same ones every time."""
        return self._part(0), self._part(1), self._part(2)

    def _part(self, stream: int) -> Part:
        rng = np.random.default_rng([self.seed, stream])
        out = rng.normal(size=(*self.shape, self.dv)).astype(dtype_of(self.dtype))
        dead = np.asarray(rng.random(self.shape) < self.empty)
        out[dead] = np.nan
        lse = np.where(dead, -np.inf, self.magnitude * rng.normal(size=self.shape))
        return Part(out, lse.astype(accumulator(self.dtype)))


def merge_attention_is_a_monoid(merge: Callable[..., Any], case: MergeCase) -> None:
    """Check that merging is commutative and has an identity, bit for bit, and is associative.

    Associative within (8 + 4 * max abs(lse)) * eps of the accumulator, relative to the largest
    abs(out); that is asked of unrounded parts, float32 and float64, only.
    """
    a, b, c = case.build()
    ab, ba = merge(*a, *b), merge(*b, *a)
    assert_bitwise_equal(ab[0], ba[0], "out of b + a", case)
    assert_bitwise_equal(ab[1], ba[1], "lse of b + a", case)

    nothing = Part(np.full_like(a.out, np.nan), np.full_like(a.lse, -np.inf))
    alive = a.lse > -np.inf
    for merged in (merge(*a, *nothing), merge(*nothing, *a)):
        assert_bitwise_equal(merged[0][alive], a.out[alive], "out of a + nothing", case)
        assert_bitwise_equal(merged[1], a.lse, "lse of a + nothing", case)
        assert_bitwise_equal(merged[0][~alive], 0 * merged[0][~alive], "out of nothing", case)

    if case.dtype not in ("float32", "float64"):
        return
    left, right = merge(*ab, *c), merge(*a, *merge(*b, *c))
    lse = np.stack([part.lse for part in (a, b, c)]).astype(np.float64)
    largest = np.where(np.isfinite(lse), np.abs(lse), 0).max(initial=0)
    allowed = (8 + 4 * largest) * UNIT_ROUNDOFF[case.dtype]
    sizes = np.abs([np.where(p.lse[..., None] > -np.inf, p.out, 0) for p in (a, b, c)])
    for what, x, y, scale in (
        ("out", left[0], right[0], sizes.max(initial=0)),
        ("lse", left[1], right[1], 1),
    ):
        expected = Expected(np.asarray(y, np.float64), np.full(np.shape(y), allowed * scale))
        assert_near(x, expected, f"{what} of (a + b) + c", case)


def merge_softmax_is_a_monoid(merge: Callable[..., Any], case: MergeCase) -> None:
    """Check that merging (maximum, normalizer) pairs obeys the laws of merge_attention."""
    states = []
    for part in case.build():
        dead = part.lse == -np.inf
        normalizer = np.where(dead, 0, 1 + np.abs(part.out[..., 0].astype(np.float64)))
        states.append((part.lse, normalizer.astype(part.lse.dtype)))
    a, b, c = states
    ab, ba = merge(a, b), merge(b, a)
    identity = np.full_like(a[0], -np.inf), np.zeros_like(a[1])
    for what, x, y in (
        ("b + a", ba, ab),
        ("a + identity", merge(a, identity), a),
        ("identity + a", merge(identity, a), a),
    ):
        assert_bitwise_equal(x[0], y[0], f"maximum of {what}", case)
        assert_bitwise_equal(x[1], y[1], f"normalizer of {what}", case)
    left, right = merge(ab, c), merge(a, merge(b, c))
    assert_bitwise_equal(left[0], right[0], "maximum of (a + b) + c", case)
    maxima = np.stack([a[0], b[0], c[0]])
    largest = np.where(np.isfinite(maxima), np.abs(maxima), 0).max(initial=0)
    allowed = (8 + 4 * largest) * UNIT_ROUNDOFF[accumulator(case.dtype)]
    value = np.asarray(right[1], np.float64)
    expected = Expected(value, allowed * np.abs(value))
    assert_near(left[1], expected, "normalizer of (a + b) + c", case)


def state_of_parts_merges(
    softmax_state: Callable[..., Any], merge: Callable[..., Any], case: SoftmaxCase
) -> None:
    """Check that the states of two parts of a row merge to the state of the row."""
    x, options = case.build()
    where = np.broadcast_to(options.pop("where", True), x.shape)
    cut = case.shape[case.axes[0]] // 2
    parts = [
        softmax_state(_axis_moved(x, case, at), **options, where=_axis_moved(where, case, at))
        for at in (slice(cut), slice(cut, None))
    ]
    merged = merge(*parts)
    whole = softmax_state(x, **options, where=where)
    # Of zeros of both signs, either may be the maximum.
    got, wanted = (np.asarray(state[0]) + 0.0 for state in (merged, whole))
    assert_bitwise_equal(got, wanted, "maximum of merged parts", case)
    expected = expect_softmax("logsumexp", x, **options, where=where)
    with np.errstate(all="ignore"):
        maximum, normalizer = (np.asarray(part).astype(np.float64) for part in merged)
        lse = (maximum + np.log(normalizer)).reshape(expected.value.shape)
    # A row that sees +inf has no state to speak of.
    value = np.where(np.isposinf(expected.value), np.nan, expected.value)
    assert_near(lse, Expected(value, 2 * expected.bound), "logsumexp of merged parts", case)
