"""The online recurrence, small enough to be read in one breath."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from cuflash.reference._wide import Result, ieee


@ieee
def online_attention(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, *, scale: float | None = None, tile: int = 3
) -> tuple[Result, Result]:
    """Attention in one pass over tiles of keys: the recurrence that every engine implements.

    A row carries its running maximum `m`, the sum `l` of ``exp(s - m)`` and the sum `o` of
    ``exp(s - m) * v`` over the keys met so far. A tile with a larger maximum rescales `l` and `o`
    by ``exp(m - m_new)`` (Milakov and Gimelshein 2018; Dao et al. 2022, algorithm 1). The division
    by `l` happens once, at the end.

    Parameters
    ----------
    q, k, v
        One head: shapes (Tq, D), (Tk, D), (Tk, Dv), all finite.
    scale
        Factor of the scores, ``1 / sqrt(D)`` by default.
    tile
        Keys taken at a time.

    Returns
    -------
    out, lse : numpy.ndarray
        float64, (Tq, Dv) and (Tq,).

    Examples
    --------
    >>> q, k, v = np.ones((1, 1)), np.arange(7.0)[:, None], np.eye(7)
    >>> out, lse = online_attention(q, k, v)  # tiles 0 1 2 | 3 4 5 | 6
    >>> out.round(3)
    array([[0.002, 0.004, 0.012, 0.032, 0.086, 0.233, 0.633]])
    >>> lse.round(3)
    array([6.458])
    """
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    m = np.full((len(q), 1), -np.inf)
    l = np.zeros((len(q), 1))  # noqa: E741 - the letter of the papers
    o = np.zeros((len(q), v.shape[-1]))
    for start in range(0, len(k), tile):
        keys = slice(start, start + tile)
        s = scale * q @ k[keys].T
        m_new = np.maximum(m, s.max(axis=-1, keepdims=True))
        rescale, p = np.exp(m - m_new), np.exp(s - m_new)
        l = rescale * l + p.sum(axis=-1, keepdims=True)  # noqa: E741
        o = rescale * o + p @ v[keys]
        m = m_new
    return o / np.where(l == 0, 1, l), (m + np.log(l))[:, 0]
