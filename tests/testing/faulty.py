"""Small implementations with a fault to order: what each property must be able to catch."""

import itertools

import numpy as np

from cuflash import reference
from cuflash.testing.problems import dtype_of

_calls = itertools.count()


@np.errstate(all="ignore")
def attention(q, k, v, *, fault=None, return_lse=False, out=None, lse=None, **options):
    """Online attention in tiles of 16 keys, with the signature of flash_attention; no sinks."""
    dtype = dtype_of(q.dtype.name)
    acc = np.dtype(np.float64 if dtype == np.float64 else np.float32)
    if fault == "scales q in place":
        q *= q.dtype.type(0.5)
    if fault == "ignores strides of v":
        v = v.ravel(order="K").reshape(v.shape)
    if options.get("enable_gqa"):
        repeat = np.tile if fault == "interleaves head groups" else np.repeat
        groups = q.shape[-3] // k.shape[-3]
        k, v = (
            np.moveaxis(_along_first(repeat, np.moveaxis(x, -3, 0), groups), 0, -3) for x in (k, v)
        )
        options = {name: x for name, x in options.items() if name != "enable_gqa"}
    if fault == "causal mask off by one" and options.get("causal"):
        lengths = [options.get(n, m) for n, m in (("key_lengths", k), ("query_lengths", q))]
        lengths = [n if n is not m else m.shape[-2] for n, m in zip(lengths, (k, q), strict=True)]
        offset = options.get("query_offset", lengths[0] - lengths[1])
        options["query_offset"] = offset + 1
    scores, seen = reference.attention_scores(q, k, v, precision=np.float64, **options)
    scores, v = scores.astype(acc), v.astype(acc)
    if fault == "drops a tail of one key" and k.shape[-2] % 16 == 1:
        seen = seen & (np.arange(k.shape[-2]) < k.shape[-2] - 1)
        scores = np.where(seen, scores, -np.inf).astype(acc)
    sentinel = fault == "finite sentinel"
    if sentinel:
        scores, seen = np.where(seen, scores, acc.type(-1e30)), np.ones_like(seen)

    m = np.full((*scores.shape[:-1], 1), -np.inf, acc)
    l = np.zeros_like(m)  # noqa: E741
    o = np.zeros((*scores.shape[:-1], v.shape[-1]), acc)
    for start in range(0, scores.shape[-1], 16):
        keys = slice(start, start + 16)
        s, visible = scores[..., keys], seen[..., keys]
        m_new = np.maximum(m, s.max(axis=-1, keepdims=True))
        if fault == "one maximum for all rows":
            m_new = np.broadcast_to(m_new.max(axis=-2, keepdims=True, initial=-np.inf), m.shape)
        if fault == "one maximum for all entries":
            m_new = np.broadcast_to(m_new.max(initial=-np.inf), m.shape)
        shift = np.where(m_new == -np.inf, 0, m_new)
        p = np.where(visible, np.exp(s - shift), 0)
        rescale = np.exp(m - shift) if fault != "missing rescale" else 1
        terms = p[..., None] * v[..., None, keys, :]
        if fault != "multiplies by zero":
            terms = np.where(visible[..., None], terms, 0)
        l = rescale * l + p.sum(axis=-1, keepdims=True)  # noqa: E741
        if fault == "normalises per tile":
            o = o + terms.sum(axis=-2) / np.maximum(p.sum(axis=-1, keepdims=True), 1e-30)
        else:
            o = rescale * o + terms.sum(axis=-2)
        if fault == "float16 accumulator":
            o = o.astype(np.float16).astype(acc)
        m = m_new

    if fault != "normalises per tile":
        o = o / np.where(l == 0, 1, l)
    if fault == "takes the absolute value":
        o = np.abs(o)
    if fault == "never the same":
        o = o * (1 + next(_calls))
    new_lse = (np.where(l == 0, 0, m) + np.log(l))[..., 0]
    if fault == "epsilon in the denominator":  # of unshifted exponentials: no guard of empty rows
        o = o / (1 + 1e-3 * np.exp(-new_lse))[..., None]
    if fault == "lse in base 2":
        new_lse = new_lse / np.log(acc.type(2))
    given = out is not None
    if not given:
        out = np.empty(o.shape, dtype)
    if not (fault == "refuses a float32 out" and out.dtype != dtype):
        rows = np.ones(o.shape[:-1], bool)
        if fault == "leaves empty rows unwritten" and given:
            rows = seen.any(axis=-1)
        out[rows] = o[rows].astype(out.dtype)
    if lse is None and not return_lse:
        return out
    if lse is None:
        return out, new_lse.astype(acc)
    lse[...] = new_lse
    return out, lse


def _along_first(repeat, x, groups):
    return repeat(x, groups, axis=0) if repeat is np.repeat else np.concatenate([x] * groups)


@np.errstate(all="ignore")
def softmax(x, axis=-1, *, fault=None, where=None, out=None):
    """softmax with the signature of cuflash.softmax."""
    dtype = x.dtype if x.dtype.kind in "fV" else np.dtype(np.float64)
    if not dtype.isnative:
        dtype = dtype.newbyteorder("=")
    acc = np.dtype(np.float64 if dtype == np.float64 else np.float32)
    if out is None or fault == "ignores out":
        out = np.empty(x.shape, dtype)
    if fault == "clears out first":
        out[...] = 0
    if fault == "ignores strides":
        x = x.ravel(order="K").reshape(x.shape)
    seen = np.broadcast_to(True if where is None else where, x.shape)
    z = x.astype(acc)
    z = z * seen if fault == "multiplies by where" else np.where(seen, z, -np.inf)
    of_all = fault == "one maximum for all rows"
    m = z.max(axis=None if of_all else axis, keepdims=True, initial=-np.inf)
    if fault == "no maximum":
        m = np.zeros_like(m)
    p = np.exp(z - np.where(m == -np.inf, 0, m))
    if fault == "drops the first element":
        p[(slice(0, 1),) * p.ndim] = 0
    total = p.sum(axis=axis, keepdims=True)
    if fault == "float16 sum":
        total = p.astype(np.float16).sum(axis=axis, keepdims=True, dtype=np.float16)
    if fault == "epsilon in the denominator":
        total = total + 1e-3
    y = p / np.where(total == 0, 1, total)
    if fault == "never the same":
        y = y * (1 + next(_calls))
    out[...] = np.where(seen, y, 0).astype(out.dtype)
    return out


@np.errstate(all="ignore")
def merge_attention(out_a, lse_a, out_b, lse_b, *, fault=None):
    """merge_attention for float32 and float64 parts."""
    m = np.maximum(lse_a, lse_b)
    shift = np.where(m == -np.inf, 0, m)
    if fault == "no guard of empty parts":
        shift = m
    if fault == "shifts by the first lse":
        shift = lse_a
    a, b = (np.exp(lse - shift)[..., None] for lse in (lse_a, lse_b))
    total = a + b
    if fault == "mean of the parts":
        a, b = np.ones_like(a), np.ones_like(b)
    parts = a * out_a, b * out_b
    if fault != "multiplies by zero":
        parts = [
            np.where(lse[..., None] == -np.inf, 0, part)
            for lse, part in zip((lse_a, lse_b), parts, strict=True)
        ]
    out = sum(parts) / np.where(total == 0, 1, total)
    lse = shift + np.log(total[..., 0])
    if fault != "loses the sign of zero":
        lse = np.where(total[..., 0] == 1, shift, lse)
    return out.astype(out_a.dtype), lse.astype(lse_a.dtype)


@np.errstate(all="ignore")
def merge_softmax(a, b, *, fault=None):
    """merge_softmax of (maximum, normalizer) pairs."""
    m = np.maximum(a[0], b[0])
    if fault != "maximum by order":
        m = np.where((a[0] == 0) & (b[0] == 0), a[0] + b[0], m)
    shift = m if fault == "no guard of empty parts" else np.where(m == -np.inf, 0, m)
    if fault == "missing rescale":
        return m, a[1] + b[1]
    if fault == "poisoned maximum":
        m = np.maximum(m, 0)
    return m, a[1] * np.exp(a[0] - shift) + b[1] * np.exp(b[0] - shift)


@np.errstate(all="ignore")
def softmax_state(x, axis=-1, *, where=None, fault=None):
    """softmax_state, axes kept."""
    acc = np.dtype(np.float64 if x.dtype == np.float64 else np.float32)
    z = np.where(True if where is None else where, x.astype(acc), -np.inf)
    m = z.max(axis=axis, keepdims=True, initial=-np.inf)
    shift = np.where(m == -np.inf, 0, m)
    p = np.exp(z - (0 if fault == "no maximum" else shift))
    return m.astype(acc), p.sum(axis=axis, keepdims=True)
