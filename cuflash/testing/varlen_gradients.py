"""What holds for the gradients of any exact attention of sequences that lie end to end.

A property takes the callable under test, which has the signature of
``cuflash.flash_attention_varlen_vjp`` on NumPy arrays, and a :class:`VarlenCase`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from cuflash import reference
from cuflash.problem_vjp import AttentionGrads
from cuflash.testing.bounds import (
    Expected,
    accumulator,
    assert_gradients_close,
    expect_gradients,
)
from cuflash.testing.problems import Array, dtype_of
from cuflash.testing.properties import assert_bitwise_equal, assert_near, copy_of
from cuflash.testing.varlen import VarlenCase

Vjp: TypeAlias = Callable[..., Any]
VarlenGradientProperty: TypeAlias = Callable[[Vjp, VarlenCase], None]


class _Packed(NamedTuple):
    """Arrays of a call with sequences end to end."""

    dout: Array
    q: Array
    k: Array
    v: Array
    out: Array
    lse: Array
    cu_seqlens_q: Array
    cu_seqlens_k: Array
    dlse: Array
    options: dict[str, Any]


def _packed(case: VarlenCase) -> _Packed:
    """Make the arrays of a case and cotangents beside them; NaN past the last sequence."""
    q, k, v, ends_q, ends_k, options = case.build()
    out, lse = reference.attention_varlen(q, k, v, ends_q, ends_k, **options)
    rng = np.random.default_rng([case.whole.seed, 20])
    acc = dtype_of(accumulator(case.whole.dtype))
    dtype = q.dtype.newbyteorder("=")
    dout = rng.normal(size=out.shape)
    dout[..., int(ends_q[-1]) :, :] = np.nan
    dlse = rng.normal(size=lse.shape).astype(acc)
    with np.errstate(over="ignore"):
        results = out.astype(dtype), lse.astype(acc)
    return _Packed(dout.astype(dtype), q, k, v, *results, ends_q, ends_k, dlse, options)


def _run_varlen(vjp: Vjp, inputs: _Packed, **more: Any) -> Any:
    return vjp(*inputs[:8], dlse=inputs.dlse, **inputs.options, **more)


def each_sequence_matches_oracle(vjp: Vjp, case: VarlenCase) -> None:
    """Check each sequence's gradients, what all share in sum, and that there are no others."""
    inputs = _packed(case)
    grads = _run_varlen(vjp, inputs)
    of_sinks: list[Expected] = []
    end_q = end_k = 0
    for rows, keys, (q, k, v, options) in case.sequences():
        dout, dlse = inputs.dout[..., rows, :], inputs.dlse[..., rows]
        expected = expect_gradients(dout, q, k, v, dlse=dlse, **options)
        own = AttentionGrads(
            *(
                None if x is None else x[..., tokens, :]
                for x, tokens in ((grads.dq, rows), (grads.dk, keys), (grads.dv, keys))
            )
        )
        assert_gradients_close(own, expected, hint=f"rows {rows.start}..{rows.stop}: {case!r}")
        if expected.dsinks is not None:
            of_sinks.append(expected.dsinks)
        end_q, end_k = int(rows.stop), int(keys.stop)
    for name, x, end in (("dq", grads.dq, end_q), ("dk", grads.dk, end_k), ("dv", grads.dv, end_k)):
        if x is not None and x[..., end:, :].astype(np.float64).any():
            raise AssertionError(f"{name} past the last sequence is not 0\n{case!r}")
    if of_sinks and grads.dsinks is not None:
        total = Expected(
            np.sum([x.value for x in of_sinks], axis=0), np.sum([x.bound for x in of_sinks], axis=0)
        )
        assert_near(grads.dsinks, total, "dsinks", case)


def sequence_independence(vjp: Vjp, case: VarlenCase) -> None:
    """Check that no bit of a sequence's gradients depends on another one's tokens."""
    sequences = list(case.sequences())
    if not sequences:
        return
    inputs = _packed(case)
    inputs = inputs._replace(
        **{name: copy_of(getattr(inputs, name)) for name in ("q", "k", "v", "dout", "out", "lse")}
    )
    clean = _run_varlen(vjp, inputs, deterministic=True)
    kept = sequences[int(np.random.default_rng(case.whole.seed).integers(len(sequences)))]
    rows, keys = kept.rows, kept.keys
    for x, tokens in (
        (inputs.q, rows),
        (inputs.dout, rows),
        (inputs.out, rows),
        (inputs.lse[..., None], rows),
        (inputs.k, keys),
        (inputs.v, keys),
    ):
        x[..., : tokens.start, :] = np.nan
        x[..., tokens.stop :, :] = np.nan
    grads = _run_varlen(vjp, inputs, deterministic=True)
    for name, tokens in (("dq", rows), ("dk", keys), ("dv", keys)):
        own, before = getattr(grads, name), getattr(clean, name)
        if own is not None:
            what = f"{name} after changing all other sequences"
            assert_bitwise_equal(own[..., tokens, :], before[..., tokens, :], what, case)


def packed_outputs_fully_written(vjp: Vjp, case: VarlenCase) -> None:
    """Check that given arrays are returned, with every token of them written."""
    inputs = _packed(case)
    clean = _run_varlen(vjp, inputs, deterministic=True)
    buffers = {
        name: np.full(x.shape, np.nan, x.dtype)
        for name, x in clean._asdict().items()
        if x is not None and np.ndim(x)
    }
    result = _run_varlen(vjp, inputs, deterministic=True, grads=AttentionGrads(**buffers))
    for name, buffer in buffers.items():
        if getattr(result, name) is not buffer:
            raise AssertionError(f"the {name} given is not the one returned\n{case!r}")
        assert_bitwise_equal(buffer, getattr(clean, name), name, case)


#: Every property of the gradients of sequences end to end, by name.
VARLEN_GRADIENT_PROPERTIES: dict[str, VarlenGradientProperty] = {
    law.__name__: law
    for law in (
        each_sequence_matches_oracle,
        sequence_independence,
        packed_outputs_fully_written,
    )
}
