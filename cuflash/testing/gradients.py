"""What holds for the gradients of any exact attention.

A property takes the callable under test, which has the signature of
``cuflash.flash_attention_vjp`` on NumPy arrays, and an :class:`AttentionCase`; it raises
AssertionError where the law is broken. The cotangents come with the case, and out and lse are the
oracle's, rounded: the gradients are tested by themselves.

A callable returns None for a gradient it does not have: then the laws speak of the others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from cuflash import reference
from cuflash.problem_vjp import AttentionGrads
from cuflash.reference import ReferenceGrads
from cuflash.reference._attention import sum_heads, sum_to
from cuflash.testing.bounds import (
    SMALLEST_SUBNORMAL,
    UNIT_ROUNDOFF,
    Expected,
    ExpectedGradients,
    accumulator,
    assert_gradients_close,
    expect_gradients,
)
from cuflash.testing.problems import (
    LAYOUTS,
    Array,
    AttentionCase,
    arrange,
    dtype_of,
)
from cuflash.testing.properties import assert_bitwise_equal, assert_near, copy_of

Vjp: TypeAlias = Callable[..., Any]
GradientProperty: TypeAlias = Callable[[Vjp, AttentionCase], None]

NAMES = AttentionGrads._fields
_OPERANDS = dict(zip(NAMES, ("q", "k", "v", "bias", "sinks"), strict=True))


class GradientInputs(NamedTuple):
    """Arrays of a call; `options` are its keyword arguments, dlse apart."""

    dout: Array
    q: Array
    k: Array
    v: Array
    out: Array
    lse: Array
    dlse: Array | None
    options: dict[str, Any]

    @property
    def operands(self) -> dict[str, Array]:
        """The arrays that have a gradient, by the gradient's name."""
        named = {"q": self.q, "k": self.k, "v": self.v, **self.options}
        return {name: named[of] for name, of in _OPERANDS.items() if of in named}

    def of(self, **changed: Any) -> GradientInputs:
        """Change operands, cotangents or options; out and lse follow."""
        return with_results(self._replace(**changed))


def with_results(inputs: GradientInputs) -> GradientInputs:
    """Return the inputs with the oracle's out and lse, rounded to what the forward returns."""
    out, lse = reference.attention(inputs.q, inputs.k, inputs.v, **inputs.options)
    dtype = dtype_of(accumulator(inputs.q.dtype.name))
    with np.errstate(over="ignore"):
        return inputs._replace(
            out=out.astype(inputs.q.dtype.newbyteorder("=")), lse=lse.astype(dtype)
        )


def gradient_inputs(case: AttentionCase) -> GradientInputs:
    """Make the arrays of a case and cotangents beside them, the same ones every time.

    dlse is None in every other case. dout has a layout of its own, and is float32 beside 16-bit
    operands in some cases. Where a row sees nothing it is `case.unseen`, as q is.
    """
    q, k, v, options = case.build()
    rng = np.random.default_rng([case.seed, 20])
    acc = accumulator(case.dtype)
    batch = case.batch_shape
    dout = rng.normal(size=(*batch, case.tq, case.dv))
    if case.unseen is not None:
        _, seen = reference.attention_scores(q, k, v, **options)
        dout[~seen.any(axis=-1)] = float(case.unseen)
    dout = dout.astype(dtype_of(acc if case.seed % 5 == 1 else case.dtype))
    layout = LAYOUTS[int(rng.integers(len(LAYOUTS)))]
    dout = arrange(dout, "contiguous" if layout == "broadcast" else layout)
    dlse = rng.normal(size=(*batch, case.tq)).astype(acc) if case.seed % 2 else None
    return with_results(GradientInputs(dout, q, k, v, dout, dout, dlse, options))


@functools.lru_cache(maxsize=8)
def gradient_bound(case: AttentionCase) -> ExpectedGradients:
    """Return oracle and bounds of a case; see :func:`expect_gradients`."""
    return _expect(gradient_inputs(case))


def _expect(inputs: GradientInputs) -> ExpectedGradients:
    dout, q, k, v, _, _, dlse, options = inputs
    return expect_gradients(dout, q, k, v, dlse=dlse, **options)


def _run(vjp: Vjp, inputs: GradientInputs, **more: Any) -> Any:
    return vjp(*inputs[:6], dlse=inputs.dlse, **inputs.options, **more)


def _run_fixed(vjp: Vjp, inputs: GradientInputs, **more: Any) -> Any:
    """As `_run`, where bits are compared: others than deterministic gradients may differ."""
    return _run(vjp, inputs, deterministic=True, **more)


def _each(*results: Any) -> Iterator[tuple[Any, ...]]:
    """Yield the name and the members of results, where they are not None."""
    for name in NAMES:
        members = [getattr(result, name) for result in results]
        if all(x is not None for x in members):
            yield name, *members


def _assert_equal(actual: Any, expected: Any, what: str, case: object) -> None:
    for name, x, y in _each(actual, expected):
        assert_bitwise_equal(x, y, f"{name} {what}", case)


def _finite(case: AttentionCase) -> AttentionCase:
    return replace(case, visible=None)


def _smooth(case: AttentionCase) -> AttentionCase:
    """Make a case one that is differentiated well: float64, finite, scores of moderate size."""
    return replace(
        _finite(case),
        dtype="float64",
        logits="normal",
        unseen=None,
        bias_minus_inf=False,
        bias_dtype="float64",
    )


# ------------------------------------------------------------------------------ values


def matches_oracle(vjp: Vjp, case: AttentionCase) -> None:
    """Check accuracy, shapes and dtypes: each gradient has those of its operand."""
    inputs = gradient_inputs(case)
    grads = _run(vjp, inputs)
    for name, x in inputs.operands.items():
        gradient = getattr(grads, name)
        if gradient is not None and gradient.dtype != x.dtype.newbyteorder("="):
            raise AssertionError(f"{name} has dtype {gradient.dtype}, not {x.dtype}\n{case!r}")
    assert_gradients_close(grads, gradient_bound(case), hint=repr(case))


def adjoint_identity(vjp: Vjp, case: AttentionCase) -> None:
    """Check that <dout, J t> + <dlse, J t> is <gradients, t>, by the forward derivative J."""
    case = _smooth(case)
    inputs = gradient_inputs(case)
    tangents = _tangents(inputs, case)
    moved = reference.attention_jvp(inputs.q, inputs.k, inputs.v, tangents, **inputs.options)
    _assert_pairs(vjp, inputs, tangents, moved, 0, case)


def finite_differences(vjp: Vjp, case: AttentionCase) -> None:
    """Check the gradients against differences of the forward in extended precision, to 1e-7."""
    case = _smooth(case)
    inputs = gradient_inputs(case)
    tangents = _tangents(inputs, case)
    step, ends = 1e-6, []
    for sign in (1, -1):
        at = {
            name: x.astype(np.longdouble) + sign * step * tangent
            for (name, x), tangent in zip(
                inputs.operands.items(), (t for t in tangents if t is not None), strict=True
            )
        }
        options = inputs.options | {
            _OPERANDS[n]: x for n, x in at.items() if n[1:] in inputs.options
        }
        ends.append(reference.attention(at["dq"], at["dk"], at["dv"], **options))
    with np.errstate(invalid="ignore"):
        moved = [
            np.where(np.isfinite(high), (high - low) / (2 * step), 0)
            for high, low in zip(*ends, strict=True)
        ]
    _assert_pairs(vjp, inputs, tangents, moved, 1e-7, case)


def _tangents(inputs: GradientInputs, case: AttentionCase) -> ReferenceGrads:
    """Draw a direction for each operand, along which scores move by about one."""
    rng = np.random.default_rng([case.seed, 21])
    drawn = {
        name: rng.normal(size=x.shape) / (np.sqrt(case.d) if name in ("dq", "dk") else 1)
        for name, x in inputs.operands.items()
    }
    if "dsinks" in drawn:  # a sink of -inf has nowhere to move
        drawn["dsinks"] = np.where(np.isfinite(inputs.operands["dsinks"]), drawn["dsinks"], 0)
    none = dict.fromkeys(NAMES)
    return ReferenceGrads(**{**none, **drawn})  # type: ignore[arg-type]


def _assert_pairs(
    vjp: Vjp,
    inputs: GradientInputs,
    tangents: ReferenceGrads,
    moved: Any,
    tolerance: float,
    case: AttentionCase,
) -> None:
    """Assert that the cotangents' product with what moved is the gradients' with the tangents."""
    grads, expected = _run(vjp, inputs), _expect(inputs)
    left, right, allowed, size = 0.0, 0.0, 0.0, 0.0
    for _, gradient, tangent, of_gradient in _each(grads, tangents, expected):
        right += float(np.sum(gradient.astype(np.float64) * tangent))
        allowed += float(np.sum(of_gradient.bound * np.abs(tangent)))
    for cotangent, of_result in zip((inputs.dout, inputs.dlse), moved, strict=True):
        if cotangent is not None:
            left += float(np.sum(cotangent.astype(np.float64) * of_result))
            size += float(np.sum(np.abs(cotangent.astype(np.float64) * of_result)))
    if any(getattr(grads, name) is None for name in inputs.operands):
        return
    allowed += tolerance * (1 + size) + 1e-13 * size
    if not abs(left - right) <= allowed:
        raise AssertionError(
            f"<cotangents, J t> = {left!r} but <gradients, t> = {right!r}, off by "
            f"{abs(left - right):.3g}; allowed are {allowed:.3g}\n{case!r}"
        )


def linearity_in_dout(vjp: Vjp, case: AttentionCase) -> None:
    """Check that gradients are linear in the cotangents: even plus odd rows, a change of sign."""
    case = replace(_finite(case), unseen=None)
    inputs, expected = gradient_inputs(case), gradient_bound(case)
    even = np.arange(case.tq) % 2 == 0

    def of_rows(rows: Array) -> Any:
        # Selects, like a change of sign, are exact in every dtype.
        dout = np.where(rows[:, None], inputs.dout, inputs.dout.dtype.type(0))
        dlse = inputs.dlse
        if dlse is not None:
            dlse = np.where(rows, dlse, dlse.dtype.type(0))
        return _run(vjp, inputs._replace(dout=dout, dlse=dlse))

    whole, evens, odds = (_run(vjp, inputs), of_rows(even), of_rows(~even))
    dlse = None if inputs.dlse is None else -inputs.dlse
    negative = _run(vjp, inputs._replace(dout=-inputs.dout, dlse=dlse))
    for name, total, a, b, minus, e in _each(whole, evens, odds, negative, expected):
        allowed = Expected(total.astype(np.float64), 3 * e.bound)
        both = a.astype(np.float64) + b.astype(np.float64)
        assert_near(both, allowed, f"{name} of even + odd rows of dout", case)
        assert_near(-minus.astype(np.float64), allowed, f"{name} of -dout", case)


def gradient_of_lse(vjp: Vjp, case: AttentionCase) -> None:
    """Check that dlse is an input like dout: alone it gives the gradients of lse, and None is 0."""
    case = replace(_finite(case), unseen=None)
    inputs = gradient_inputs(case)
    zero = np.zeros_like(inputs.lse)
    with_zero, without = (_run_fixed(vjp, inputs._replace(dlse=dlse)) for dlse in (zero, None))
    _assert_equal(with_zero, without, "with dlse zero, or None", case)
    dlse = np.random.default_rng([case.seed, 22]).normal(size=zero.shape).astype(zero.dtype)
    alone = inputs._replace(dout=np.zeros_like(inputs.dout), dlse=dlse)
    grads = _run(vjp, alone)
    assert_gradients_close(grads, _expect(alone), hint=f"dout = 0, {case!r}")


def broadcast_equals_repeated_then_summed(vjp: Vjp, case: AttentionCase) -> None:
    """Check that what broadcasts, grouped heads too, gets the sum of its copies' gradients."""
    case = _finite(case)
    inputs, expected = gradient_inputs(case), gradient_bound(case)
    batch, scores = case.batch_shape, (*case.batch_shape, case.tq, case.tk)
    q, k, v = inputs.q, inputs.k, inputs.v
    if case.enable_gqa:
        k, v = (np.repeat(x, q.shape[-3] // x.shape[-3], axis=-3) for x in (k, v))
    heads_of = {"dk": k.shape, "dv": v.shape}
    options = {name: x for name, x in inputs.options.items() if name != "enable_gqa"}
    full = {"bias": scores, "sinks": batch}
    options |= {n: np.array(np.broadcast_to(options[n], full[n])) for n in full if n in options}
    q, k, v = (np.array(np.broadcast_to(x, (*batch, *x.shape[-2:]))) for x in (q, k, v))
    repeated = _run(vjp, inputs._replace(q=q, k=k, v=v, options=options))
    for name, own, copies, e in _each(_run(vjp, inputs), repeated, expected):
        wide = copies.astype(np.float64)
        total = sum_heads(wide, heads_of.get(name, own.shape), own.shape)
        # The gradients of the copies are rounded each.
        size = np.where(np.isfinite(wide), np.abs(wide), 0)
        rounding = sum_heads(size, heads_of.get(name, own.shape), own.shape)
        bound = 2 * e.bound + UNIT_ROUNDOFF[own.dtype.name] * rounding
        count = copies.size / max(own.size, 1)
        bound = bound + count * SMALLEST_SUBNORMAL[own.dtype.name]
        allowed = Expected(total.astype(np.float64), bound)
        assert_near(own, allowed, f"{name} of what broadcasts", case)


# ---------------------------------------------------------------------------- influence


def unseen_gradients_are_zero(vjp: Vjp, case: AttentionCase) -> None:
    """Check that rows and keys that see nothing have gradient 0, exactly, whatever they hold."""
    inputs = gradient_inputs(_finite(case))
    _, seen = reference.attention_scores(inputs.q, inputs.k, inputs.v, **inputs.options)
    by_key = seen.swapaxes(-1, -2)
    touched = {"dq": seen.any(-1), "dk": by_key.any(-1), "dv": by_key.any(-1), "dbias": seen}
    grads = _run(vjp, inputs)
    for name, flags in touched.items():
        gradient = getattr(grads, name)
        if gradient is None:
            continue
        shape = gradient.shape if name == "dbias" else gradient.shape[:-1]
        if case.enable_gqa and name in ("dk", "dv"):
            *batch, heads, tokens = flags.shape
            groups = flags.reshape(*batch, shape[-2], heads // shape[-2], tokens)
            flags = np.asarray(groups.any(axis=-2))
        own = sum_to(np.asarray(flags, np.float64), shape) > 0
        if np.asarray(gradient[~own]).astype(np.float64).any():
            raise AssertionError(f"{name} is not 0 where nothing is seen\n{case!r}")


def unseen_nonfinite_never_leaks(vjp: Vjp, case: AttentionCase) -> None:
    """Check that what no row sees, and dout of rows that see nothing, may as well be zero."""
    clean = _run_fixed(vjp, gradient_inputs(replace(case, unseen="0")))
    for special in ("nan", "inf", "-inf"):
        grads = _run_fixed(vjp, gradient_inputs(replace(case, unseen=special)))
        _assert_equal(grads, clean, f"with {special} in unseen places", case)


def nonfinite_row_reaches_only_what_it_sees(vjp: Vjp, case: AttentionCase) -> None:
    """Check that NaN in one row of dout spoils its dq, and dk, dv of the keys that it sees."""
    case = replace(_finite(case), bias_minus_inf=False, sinks=None)
    if not case.tq:
        return
    inputs = _own_memory(gradient_inputs(case), case)
    _, seen = reference.attention_scores(inputs.q, inputs.k, inputs.v, **inputs.options)
    row = int(np.random.default_rng(case.seed).integers(case.tq))
    clean = _run_fixed(vjp, inputs)
    dout = inputs.dout.copy()
    dout[..., row, :] = np.nan
    grads = _run_fixed(vjp, inputs._replace(dout=dout))
    sees = seen[..., row, :]
    if case.enable_gqa:
        *batch, heads, tokens = sees.shape
        own_heads = inputs.k.shape[-3]
        groups = sees.reshape(*batch, own_heads, heads // own_heads, tokens)
        sees = np.asarray(groups.any(axis=-2))
    spoiled = {"dk": sees, "dv": sees, "dq": np.zeros(inputs.q.shape[:-1], bool)}
    spoiled["dq"][..., row] = seen[..., row, :].any(axis=-1)
    for name, gradient, before in _each(grads, clean):
        if name not in spoiled:
            continue
        reached, what = spoiled[name], f"{name} with NaN in dout of row {row}"
        assert_bitwise_equal(gradient[~reached], before[~reached], what, case)
        # All scores' gradients are NaN; where a scale or an operand is 0, 0 * NaN is, too.
        if not np.isnan(gradient[reached].astype(np.float64)).all():
            raise AssertionError(f"{what} is not NaN in all that it sees\n{case!r}")


def _own_memory(inputs: GradientInputs, case: AttentionCase) -> GradientInputs:
    """Copy operands and cotangents to the full batch shape, to change entries one by one."""

    def full(x: Array) -> Array:
        batch = case.batch_shape
        if case.enable_gqa:
            batch = (*batch[:-1], x.shape[-3])
        return np.array(np.broadcast_to(x, (*batch, *x.shape[-2:])))

    return inputs._replace(
        q=full(inputs.q), k=full(inputs.k), v=full(inputs.v), dout=np.array(inputs.dout)
    )


def row_independence(vjp: Vjp, case: AttentionCase) -> None:
    """Check that no bit of dq of a row depends on another query or its cotangents."""
    if not case.tq:
        return
    inputs = _own_memory(gradient_inputs(case), case)
    row = int(np.random.default_rng(case.seed).integers(case.tq))
    others = np.arange(case.tq) != row
    clean = _run_fixed(vjp, inputs)
    q, dout = inputs.q.copy(), inputs.dout.copy()
    q[..., row, :] = dout[..., row, :] = np.nan
    for name, gradient, before in _each(_run_fixed(vjp, inputs.of(q=q, dout=dout)), clean):
        if name == "dq":
            what = f"dq after changing row {row}"
            assert_bitwise_equal(gradient[..., others, :], before[..., others, :], what, case)


def batch_independence(vjp: Vjp, case: AttentionCase) -> None:
    """Check that no bit of a batch entry's gradients depends on another entry."""
    # Heads that share keys are not independent of each other.
    axes = len(case.batch_shape) - case.enable_gqa
    if axes < 1 or case.batch_shape[0] < 2:
        return
    inputs = _own_memory(gradient_inputs(case), case)
    entry = int(np.random.default_rng(case.seed).integers(case.batch_shape[0]))
    others = np.arange(case.batch_shape[0]) != entry
    clean = _run_fixed(vjp, inputs)
    changed = {name: getattr(inputs, name).copy() for name in ("q", "k", "v", "dout")}
    for x in changed.values():
        x[entry] = np.nan
    for name, gradient, before in _each(_run_fixed(vjp, inputs.of(**changed)), clean):
        if name in ("dq", "dk", "dv"):
            what = f"{name} after changing batch entry {entry}"
            assert_bitwise_equal(gradient[others], before[others], what, case)


# ------------------------------------------------------------------------------- memory


def views_equal_copies(vjp: Vjp, case: AttentionCase) -> None:
    """Check that views give the bits that their contiguous copies give."""
    inputs = gradient_inputs(case)
    options = {name: copy_of(x) for name, x in inputs.options.items()}
    copies = GradientInputs._make([*map(copy_of, inputs[:7]), options])
    _assert_equal(_run_fixed(vjp, inputs), _run_fixed(vjp, copies), "of views", case)


def poisoned_outputs_fully_written(vjp: Vjp, case: AttentionCase) -> None:
    """Check that given arrays are returned, with every element written and nothing beside."""
    inputs = gradient_inputs(case)
    clean = _run_fixed(vjp, inputs)
    for layout in ("contiguous", "step", "reversed"):
        buffers = {
            name: arrange(np.full(x.shape, np.nan, x.dtype), layout)
            for name, x in clean._asdict().items()
            if x is not None and np.ndim(x)
        }
        result = _run_fixed(vjp, inputs, grads=AttentionGrads(**buffers))
        for name, buffer in buffers.items():
            if getattr(result, name) is not buffer:
                raise AssertionError(f"the {name} given is not the one returned\n{case!r}")
            assert_bitwise_equal(buffer, getattr(clean, name), f"{layout} {name}", case)
            if layout == "step" and buffer.base is not None:
                around = buffer.base.copy()
                around[..., ::2, ::2] = np.nan
                if not np.isnan(around.astype(np.float64)).all():
                    raise AssertionError(f"something beside {name} was written\n{case!r}")


def only_what_is_asked_for(vjp: Vjp, case: AttentionCase) -> None:
    """Check that each gradient can be asked for by itself, and has the same bits."""
    inputs = gradient_inputs(case)
    every = _run_fixed(vjp, inputs)
    for name, x in every._asdict().items():
        if x is None or not np.ndim(x):
            continue
        buffer = np.full(x.shape, np.nan, x.dtype)
        alone = _run_fixed(vjp, inputs, grads=AttentionGrads(**{name: buffer}))
        assert_bitwise_equal(buffer, x, f"{name} asked for alone", case)
        if any(getattr(alone, other) is not None for other in NAMES if other != name):
            raise AssertionError(f"more than {name} was returned\n{case!r}")


def repeatable(vjp: Vjp, case: AttentionCase) -> None:
    """Check that deterministic gradients have the same bits in every call."""
    inputs = gradient_inputs(case)
    first, again = (_run_fixed(vjp, inputs) for _ in range(2))
    _assert_equal(again, first, "of a second call", case)


def inputs_unchanged(vjp: Vjp, case: AttentionCase) -> None:
    """Check that nothing that is read is written."""
    inputs, fresh = gradient_inputs(case), gradient_inputs(case)
    _run(vjp, inputs)
    for name, x, y in zip(GradientInputs._fields[:7], inputs[:7], fresh[:7], strict=True):
        if x is not None and y is not None:
            assert_bitwise_equal(x, y, name, case)
    for name, x in inputs.options.items():
        if isinstance(x, np.ndarray):
            assert_bitwise_equal(x, fresh.options[name], name, case)


#: Every property of the gradients of attention, by name.
GRADIENT_PROPERTIES: dict[str, GradientProperty] = {
    law.__name__: law
    for law in (
        matches_oracle,
        adjoint_identity,
        finite_differences,
        linearity_in_dout,
        gradient_of_lse,
        broadcast_equals_repeated_then_summed,
        unseen_gradients_are_zero,
        unseen_nonfinite_never_leaks,
        nonfinite_row_reaches_only_what_it_sees,
        row_independence,
        batch_independence,
        views_equal_copies,
        poisoned_outputs_fully_written,
        only_what_is_asked_for,
        repeatable,
        inputs_unchanged,
    )
}
