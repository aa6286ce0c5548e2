"""Sequences that lie end to end: cases, and what holds for any exact attention of them.

A property takes the callable under test, which has the signature of
``cuflash.flash_attention_varlen`` on NumPy arrays, and a :class:`VarlenCase`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from cuflash.testing.bounds import accumulator, assert_attention_close, expect_attention
from cuflash.testing.problems import (
    Array,
    AttentionCase,
    AttentionInputs,
    Case,
    arrange,
    dtype_of,
)
from cuflash.testing.properties import assert_bitwise_equal, copy_of

#: Options of one sequence that can be used with sequences end to end.
VARLEN_OPTIONS = (
    "scale",
    "causal",
    "window",
    "alibi_slopes",
    "softcap",
    "sinks",
    "enable_gqa",
)


class VarlenInputs(NamedTuple):
    """Arrays of a call; `options` are its keyword arguments."""

    q: Array
    k: Array
    v: Array
    cu_seqlens_q: Array
    cu_seqlens_k: Array
    options: dict[str, Any]


class OneSequence(NamedTuple):
    """A sequence of a call: its tokens, and the call of it alone."""

    rows: slice
    keys: slice
    inputs: AttentionInputs


@dataclass(frozen=True, repr=False)
class VarlenCase(Case):
    """Sequences end to end; `build` makes the arrays.

    `whole` describes q, k and v with all tokens, and the options but for lengths and offsets;
    `lengths` are queries and keys of each sequence, which may leave tokens at the end. With
    `query_offset` or `key_lengths` each sequence has one.
    """

    whole: AttentionCase
    lengths: tuple[tuple[int, int], ...] = ()
    query_offset: bool = False
    key_lengths: bool = False
    ends_dtype: str = "int32"
    ends_layout: str = "contiguous"

    def build(self) -> VarlenInputs:
        """Make the arrays and the options, the same ones every time."""
        q, k, v, options = self.whole.build()
        rng = np.random.default_rng([self.whole.seed, 100])
        count = len(self.lengths)
        if self.query_offset:
            options["query_offset"] = rng.integers(-4, 8, size=count)
        if self.key_lengths:
            keys = np.array([n for _, n in self.lengths], np.int64)
            options["key_lengths"] = rng.integers(0, keys, endpoint=True)
        ends = np.cumsum([(0, 0), *self.lengths], axis=0).astype(self.ends_dtype)
        ends_q, ends_k = (arrange(ends[:, i], self.ends_layout) for i in (0, 1))
        return VarlenInputs(q, k, v, ends_q, ends_k, options)

    def sequences(self) -> Iterator[OneSequence]:
        """Yield each sequence as a problem of its own, on views of the arrays."""
        q, k, v, ends_q, ends_k, options = self.build()
        for e in range(len(self.lengths)):
            rows, keys = slice(*ends_q[e : e + 2]), slice(*ends_k[e : e + 2])
            own = {
                name: int(x[e]) if name in ("query_offset", "key_lengths") else x
                for name, x in options.items()
            }
            inputs = AttentionInputs(q[..., rows, :], k[..., keys, :], v[..., keys, :], own)
            yield OneSequence(rows, keys, inputs)


Varlen: TypeAlias = Callable[..., Any]
VarlenProperty: TypeAlias = Callable[[Varlen, VarlenCase], None]


def _run(varlen: Varlen, inputs: VarlenInputs, **more: Any) -> tuple[Array, Array]:
    out, lse = varlen(*inputs[:5], **inputs.options, return_lse=True, **more)
    return out, lse


def _assert_close(out: Array, lse: Array, case: VarlenCase) -> None:
    end = 0
    for rows, _, (q, k, v, options) in case.sequences():
        expected = expect_attention(q, k, v, **options)
        try:
            assert_attention_close(out[..., rows, :], lse[..., rows], expected)
        except AssertionError as error:
            raise AssertionError(f"rows {rows.start}..{rows.stop}: {error}\n{case!r}") from None
        end = int(rows.stop)
    if np.asarray(out[..., end:, :]).any() or (lse[..., end:] != -np.inf).any():
        raise AssertionError(f"rows past the last sequence are not empty\n{case!r}")


def each_sequence_matches_oracle(varlen: Varlen, case: VarlenCase) -> None:
    """Check that each sequence is what attention of it alone is, by the accuracy contract."""
    out, lse = _run(varlen, case.build())
    for name, x, dtype in (
        ("out", out, case.whole.dtype),
        ("lse", lse, accumulator(case.whole.dtype)),
    ):
        if x.dtype != dtype_of(dtype):
            raise AssertionError(f"{name} has dtype {x.dtype}, not {dtype}\n{case!r}")
    _assert_close(out, lse, case)


def order_of_sequences(varlen: Varlen, case: VarlenCase) -> None:
    """Check that sequences in another order have the same bits, each at its new place."""
    inputs = case.build()
    out, lse = _run(varlen, inputs)
    order = np.random.default_rng(case.whole.seed).permutation(len(case.lengths))
    sequences = list(case.sequences())

    def moved(x: Array, axis: str) -> Array:
        """Reorder the tokens of a (..., tokens, features) array; those past the end stay."""
        parts = [x[..., getattr(sequences[e], axis), :] for e in order]
        end = max((getattr(s, axis).stop for s in sequences), default=0)
        return np.concatenate([*parts, x[..., end:, :]], axis=-2)

    lengths = [case.lengths[e] for e in order]
    ends_q, ends_k = np.cumsum([(0, 0), *lengths], axis=0).astype(case.ends_dtype).T
    options = dict(inputs.options)
    for name in ("query_offset", "key_lengths"):
        if name in options:
            options[name] = options[name][order]
    other = VarlenInputs(
        moved(inputs.q, "rows"),
        moved(inputs.k, "keys"),
        moved(inputs.v, "keys"),
        ends_q,
        ends_k,
        options,
    )
    out_moved, lse_moved = _run(varlen, other)
    assert_bitwise_equal(out_moved, moved(out, "rows"), "out in another order", case)
    lse_there = moved(lse[..., None], "rows")[..., 0]
    assert_bitwise_equal(lse_moved, lse_there, "lse in another order", case)


def sequence_independence(varlen: Varlen, case: VarlenCase) -> None:
    """Check that no bit of a sequence depends on another one's tokens, or on those past the end."""
    inputs = case.build()
    q, k, v = (copy_of(x) for x in inputs[:3])
    clean = _run(varlen, inputs._replace(q=q, k=k, v=v))
    sequences = list(case.sequences())
    if not sequences:
        return
    kept = sequences[int(np.random.default_rng(case.whole.seed).integers(len(sequences)))]
    for x, tokens in ((q, kept.rows), (k, kept.keys), (v, kept.keys)):
        x[..., : tokens.start, :] = np.nan
        x[..., tokens.stop :, :] = np.nan
    out, lse = _run(varlen, inputs._replace(q=q, k=k, v=v))
    rows, what = kept.rows, "after changing all other sequences"
    assert_bitwise_equal(out[..., rows, :], clean[0][..., rows, :], f"out {what}", case)
    assert_bitwise_equal(lse[..., rows], clean[1][..., rows], f"lse {what}", case)


def empty_sequences_change_nothing(varlen: Varlen, case: VarlenCase) -> None:
    """Check that sequences of no token between the others leave these as they are."""
    case = replace(case, query_offset=False, key_lengths=False)
    between: list[tuple[int, int]] = []
    for pair in case.lengths:
        between += [(0, 0), pair]
    more = replace(case, lengths=(*between, (0, 0), (0, 0)))
    out, lse = _run(varlen, more.build())
    _assert_close(out, lse, case)


def one_sequence_is_attention(varlen: Varlen, case: VarlenCase) -> None:
    """Check the one sequence of all tokens."""
    case = replace(case, lengths=((case.whole.tq, case.whole.tk),))
    out, lse = _run(varlen, case.build())
    _assert_close(out, lse, case)


def poisoned_outputs_fully_written(varlen: Varlen, case: VarlenCase) -> None:
    """Check that given outputs are returned, with every row of them written."""
    inputs = case.build()
    clean = _run(varlen, inputs)
    for layout in ("contiguous", "step"):
        out, lse = (arrange(np.full(x.shape, np.nan, x.dtype), layout) for x in clean)
        result = varlen(*inputs[:5], **inputs.options, out=out, lse=lse)
        if result[0] is not out or result[1] is not lse:
            raise AssertionError(f"the outputs given are not those returned\n{case!r}")
        assert_bitwise_equal(out, clean[0], f"{layout} out", case)
        assert_bitwise_equal(lse, clean[1], f"{layout} lse", case)


def views_equal_copies(varlen: Varlen, case: VarlenCase) -> None:
    """Check that views give the bits that their contiguous copies give."""
    inputs = case.build()
    copies = _run(varlen, VarlenInputs._make([*map(copy_of, inputs[:5]), inputs.options]))
    out, lse = _run(varlen, inputs)
    assert_bitwise_equal(out, copies[0], "out of views", case)
    assert_bitwise_equal(lse, copies[1], "lse of views", case)


#: Every property of attention of sequences end to end, by name.
VARLEN_PROPERTIES: dict[str, VarlenProperty] = {
    law.__name__: law
    for law in (
        each_sequence_matches_oracle,
        order_of_sequences,
        sequence_independence,
        empty_sequences_change_nothing,
        one_sequence_is_attention,
        poisoned_outputs_fully_written,
        views_equal_copies,
    )
}
