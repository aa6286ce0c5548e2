"""Attention in tiles of 16 keys, right and in four ways wrong: what docs/fuzzing.md fuzzes.

The wrong ones are mistakes that real kernels had. Each differs from the right one in one line.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

TILE = 16


@np.errstate(all="ignore")  # NaN and infinities are among the inputs
def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    mask: Any = None,
    causal: bool = False,
    return_lse: bool = False,
    hidden: float = -np.inf,
    rescale: bool = True,
    per_tile: bool = False,
    wide: bool = True,
) -> Any:
    """Attend, one tile of keys after another.

    Parameters
    ----------
    q, k, v : numpy.ndarray
        (..., Tq, D), (..., Tk, D) and (..., Tk, Dv); their leading axes broadcast.
    mask : numpy.ndarray of bool, optional
        Which of the (..., Tq, Tk) pairs are seen.
    causal : bool
        Hide the keys after a query, the last of which stands at the last key.
    return_lse : bool
        Return (out, lse).
    hidden : float
        The score of a pair that is hidden.
    rescale : bool
        Whether a tile that raises the maximum scales down what was summed before it.
    per_tile : bool
        Divide by the sum of weights tile by tile.
    wide : bool
        Sum float16 in float32.

    Returns
    -------
    out : numpy.ndarray
        (..., Tq, Dv), of the dtype of q.
    lse : numpy.ndarray
        (..., Tq), if asked for.
    """
    dtype = np.result_type(q)  # in native byte order
    rows, keys = q.shape[-2], k.shape[-2]
    accumulator = np.dtype(np.float64 if dtype == np.float64 else np.float32)
    kept = accumulator if wide or dtype != np.float16 else dtype
    q, k, v = (np.array(x, kept, order="C") for x in (q, k, v))
    seen = np.ones((rows, keys), bool) if mask is None else np.asarray(mask)
    if causal:
        seen = seen & np.tri(rows, keys, keys - rows, dtype=bool)
    batch = np.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2], seen.shape[:-2])
    seen = np.broadcast_to(seen, (*batch, rows, keys))

    m = np.full((*batch, rows, 1), -np.inf, kept)
    l = np.zeros_like(m)  # noqa: E741 - its name in the papers
    out = np.zeros((*batch, rows, v.shape[-1]), kept)
    for start in range(0, keys, TILE):
        tile = slice(start, start + TILE)
        s = q @ k[..., tile, :].swapaxes(-1, -2) * kept.type(q.shape[-1] ** -0.5)
        s = np.where(seen[..., tile], s, kept.type(hidden))
        m_new = np.maximum(m, s.max(axis=-1, keepdims=True))
        shift = np.where(m_new == -np.inf, 0, m_new)
        p = np.exp(s - shift)
        visible = p[..., None] > 0 if hidden > -np.inf else seen[..., tile, None]
        added = np.where(visible, p[..., None] * v[..., None, tile, :], 0).sum(axis=-2)
        total = p.sum(axis=-1, keepdims=True)
        factor = np.exp(m - shift) if rescale else 1
        out = factor * out + (added / np.where(total == 0, 1, total) if per_tile else added)
        l = factor * l + total  # noqa: E741
        m = m_new
    out = out if per_tile else out / np.where(l == 0, 1, l)
    lse = np.where(l == 0, -np.inf, m + np.log(l))[..., 0]
    return (out.astype(dtype), lse.astype(accumulator)) if return_lse else out.astype(dtype)


finite_sentinel = partial(attention, hidden=-10000.0)
missing_rescale = partial(attention, rescale=False)
normalized_per_tile = partial(attention, per_tile=True)
float16_sums = partial(attention, wide=False)
