"""The algebra of the online softmax: the (m, l) pair of maximum and normalizer, and its merge.

M. Milakov and N. Gimelshein, "Online normalizer calculation for softmax" (2018), arXiv:1805.02867.
All that is delicate in it, the rows of nothing but -inf, is settled here and only here.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import numpy as np

from .blocks import BLOCK_BYTES, boxes, for_each_run, memory_order


def shift(maximum: np.ndarray) -> np.ndarray:
    """Return what to subtract before exp: the maximum, or a finite number where it is -inf.

    So exp(x - shift) is 0 for each x of an empty row, where -inf - -inf would be NaN.
    """
    return np.maximum(maximum, np.finfo(maximum.dtype).min)


def divisor(normalizer: np.ndarray) -> np.ndarray:
    """Return what to divide by: the normalizer, or 1 where it is 0 (an empty row)."""
    return np.where(normalizer == 0, normalizer.dtype.type(1), normalizer)


def _larger(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the maximum, of two zeros the one that their sum is.

    `numpy.maximum` of 0.0 and -0.0 is one or the other, whichever comes first.
    """
    return np.where((a == 0) & (b == 0), a + b, np.maximum(a, b))


def logsumexp(maximum: np.ndarray, normalizer: np.ndarray) -> np.ndarray:
    """Return maximum + log(normalizer): the maximum itself, bit for bit, if that is the whole sum.

    A maximum of +inf comes with a normalizer of NaN (inf - inf) and is its own logsumexp.
    """
    alone = np.isinf(maximum) | (normalizer == 1)
    return np.where(alone, maximum, maximum + np.log(normalizer))


def _weighted_sum(
    weights: Sequence[np.ndarray], values: Sequence[np.ndarray], empty: Sequence[np.ndarray]
) -> np.ndarray:
    """Return the sum of weight * value, to which an empty part adds nothing, whatever it holds."""

    def term(weight: np.ndarray, value: np.ndarray, dead: np.ndarray) -> np.ndarray:
        product = np.multiply(weight, value, dtype=weight.dtype)
        # -0.0 is the identity of addition: 0.0 would turn the -0.0 of another part into 0.0.
        return np.where(dead, weight.dtype.type(-0.0), product) if dead.any() else product

    return reduce(np.add, map(term, weights, values, empty))


def merge_softmax(
    parts: Sequence[tuple[Any, Any]], maximum: np.ndarray, normalizer: np.ndarray
) -> None:
    """Fill (maximum, normalizer) with the merge of (m, l) pairs, which broadcast to their shape.

    m = max m_i, l = sum of l_i * exp(m_i - m): equation 4 of arXiv:1805.02867. With two parts
    every operation is commutative, so the order of the parts changes no bit.
    """
    dtype = maximum.dtype
    maxima = [np.broadcast_to(np.asarray(m, dtype), maximum.shape) for m, _ in parts]
    with np.errstate(all="ignore"):
        m = reduce(_larger, maxima)
        total = _weighted_sum(
            [np.exp(part - shift(m)) for part in maxima],
            [np.asarray(sums, dtype) for _, sums in parts],
            [part == -np.inf for part in maxima],
        )
    np.copyto(maximum, m)
    np.copyto(normalizer, np.where(m == -np.inf, dtype.type(0), total))


def merge_attention(
    parts: Sequence[tuple[np.ndarray, np.ndarray]], out: np.ndarray, lse: np.ndarray
) -> None:
    """Fill (out, lse) with attention over the union of the key sets of all (out_i, lse_i).

    m = max lse_i, w_i = exp(lse_i - m), lse = m + log(sum of w_i) and out = sum of p_i * out_i with
    p_i = w_i / sum of w_i, in the dtype of `lse`. With two parts every operation is commutative. A
    part may be `out` itself.
    """
    order = memory_order(out.strides[:-1])
    outs = [o.transpose(*order, -1) for o, _ in parts]
    lses = [part.transpose(order) for _, part in parts]
    out, lse = out.transpose(*order, -1), lse.transpose(order)
    row_bytes = max(1, out.shape[-1]) * lse.itemsize
    blocks = boxes(lse.shape, max(1, BLOCK_BYTES // row_bytes))

    def work(run: range) -> None:
        for rows in blocks[run.start : run.stop]:
            logs = [part[rows] for part in lses]
            m = reduce(np.maximum, logs)
            weights = [np.exp(part - shift(m)) for part in logs]
            total = reduce(np.add, weights)
            merged = _weighted_sum(
                [(w / divisor(total))[..., None] for w in weights],
                [o[rows] for o in outs],
                [(part == -np.inf)[..., None] for part in logs],
            )
            merged[m == -np.inf] = 0
            np.copyto(out[rows], merged, casting="same_kind")
            np.copyto(lse[rows], logsumexp(m, total))

    for_each_run(len(blocks), work)


def merge_attention_vjp(
    cotangents: tuple[np.ndarray, np.ndarray | None],
    parts: Sequence[tuple[np.ndarray, np.ndarray]],
    grads: Sequence[tuple[np.ndarray, np.ndarray]],
) -> None:
    """Fill the (dout_i, dlse_i) of the two parts (out_i, lse_i) of a merge.

    With p_i the parts' weights, dout_i = p_i * dout, and the softmax over the two parts gives
    dlse_a = p_a * dlse + p_a * p_b * sum(dout * (out_a - out_b)), likewise dlse_b.
    """
    dout, dlse = cotangents
    dtype = np.result_type(*(part_lse for _, part_lse in parts))
    row_bytes = max(1, dout.shape[-1]) * dtype.itemsize
    blocks = boxes(dout.shape[:-1], max(1, BLOCK_BYTES // row_bytes))

    def work(run: range) -> None:
        for rows in blocks[run.start : run.stop]:
            logs = [part_lse[rows] for _, part_lse in parts]
            outs = [out[rows].astype(dtype) for out, _ in parts]
            empty = [log == -np.inf for log in logs]
            reference = shift(np.maximum(*logs))
            weights = [np.exp(log - reference) for log in logs]
            total = divisor(weights[0] + weights[1])
            shares = [weight / total for weight in weights]
            rise = dout[rows].astype(dtype)
            apart = np.sum(rise * (outs[0] - outs[1]), axis=-1)
            between = apart * (shares[0] * shares[1])
            for part, share, gone, term in zip(
                grads, shares, empty, (between, -between), strict=True
            ):
                of_out = np.where(gone[..., None], dtype.type(0), share[..., None] * rise)
                np.copyto(part[0][rows], of_out, casting="same_kind")
                of_lse = np.zeros_like(share) if dlse is None else share * dlse[rows]
                np.add(of_lse, term, out=of_lse, where=~(empty[0] | empty[1]))
                np.copyto(part[1][rows], np.where(gone, dtype.type(0), of_lse))

    for_each_run(len(blocks), work)
