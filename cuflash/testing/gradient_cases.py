"""Small inputs on which the gradients of other systems went wrong, from their public bug reports.

Each case is a function of a library, as in `cuflash.testing.cases`, that also has the gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, TypeAlias

import numpy as np

from cuflash import reference
from cuflash.testing.bounds import assert_gradients_close, expect_gradients
from cuflash.testing.cases import (
    _equal,
    _holds,
    _layouts_of_19,
    _normal,
    _one_element_in,
)
from cuflash.testing.problems import Array, dtype_of


class GradientLibrary(Protocol):
    """What the cases call."""

    def flash_attention(self, q: Any, k: Any, v: Any, /, **options: Any) -> Any:
        """Attention."""

    def flash_attention_vjp(
        self, dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, /, **options: Any
    ) -> Any:
        """Gradients of attention."""

    def flash_attention_varlen(
        self, q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, /, **options: Any
    ) -> Any:
        """Attention of sequences end to end."""

    def flash_attention_varlen_vjp(
        self,
        dout: Any,
        q: Any,
        k: Any,
        v: Any,
        out: Any,
        lse: Any,
        cu_seqlens_q: Any,
        cu_seqlens_k: Any,
        /,
        **options: Any,
    ) -> Any:
        """Gradients of attention of sequences end to end."""


GradientCase: TypeAlias = Callable[[GradientLibrary], None]


def _differentiate(
    library: GradientLibrary,
    q: Any,
    k: Any,
    v: Any,
    *,
    dout: Any = None,
    dlse: Any = None,
    check: bool = True,
    deterministic: bool = False,
    **options: Any,
) -> Any:
    """Run forward and backward, hold the gradients against the oracle and return them.

    Only deterministic ones may be compared bit by bit with others; they are held against those that
    need not be, which so say the same of NaN.
    """
    out, lse = library.flash_attention(q, k, v, return_lse=True, **options)
    if dout is None:
        dout = _normal(99, *out.shape).astype(out.dtype)
    pull_back = partial(library.flash_attention_vjp, dout, q, k, v, out, lse, dlse=dlse, **options)
    grads = pull_back()
    if deterministic:
        grads, others = pull_back(deterministic=True), grads
        _each_agrees(others, grads)
    if check:
        assert_gradients_close(grads, expect_gradients(dout, q, k, v, dlse=dlse, **options))
    return grads


def _each_agrees(grads: Any, exact: Any) -> None:
    for name, x, y in zip(grads._fields, grads, exact, strict=True):
        if x is not None:
            x, y = x.astype(np.float64), y.astype(np.float64)
            most = (1e-2 if grads.dq.dtype.itemsize == 2 else 1e-4) * (1 + np.abs(y))
            what = f"{name} and the deterministic one"
            _holds(np.isnan(x) == np.isnan(y), f"{what} are not NaN at the same places")
            _holds(np.isnan(x) | (np.abs(x - y) <= most), f"{what} differ")


def _each_equal(grads: Any, others: Any, what: str) -> None:
    for name, x, y in zip(grads._fields, grads, others, strict=True):
        if x is not None:
            _equal(x, y, f"{name} {what}")


def case_06(library: GradientLibrary) -> None:
    """Differentiate causal rows before the first key: they have no weight to divide by."""
    # flashinfer-ai/flashinfer#4452, MinghuasLab/flash-attention-npu#120
    q, k = _normal(0, 1, 2, 40, 16), _normal(1, 1, 2, 7, 16)
    grads = _differentiate(library, q, k, np.ones_like(k), causal=True)
    _equal(grads.dq[..., :33, :], np.zeros((1, 2, 33, 16)), "dq of rows 0 to 32")


def case_08(library: GradientLibrary) -> None:
    """Hide a key by a mask: what is stored there is multiplied by zero instead."""
    # pytorch/pytorch#101967
    clean = np.arange(8, dtype=np.float32).reshape(1, 1, 2, 4)
    mask = np.array([[True, False], [True, False]])
    for special in (1e10, np.inf, np.nan):
        spoiled = clean.copy()
        spoiled[..., 1, :] = special
        for k, v in ((spoiled, clean), (clean, spoiled), (spoiled, spoiled)):
            grads = _differentiate(library, clean, k, v, mask=mask)
            for name, x in (("dk", grads.dk), ("dv", grads.dv)):
                _equal(x[..., 1, :], np.zeros((1, 1, 4)), f"{name} of the key hidden")
            _holds(np.isfinite(grads.dq), f"dq is not finite, {special} hidden")


def case_12(library: GradientLibrary) -> None:
    """Sum grouped heads' gradients by the wrong rule."""
    # Dao-AILab/flash-attention#648
    q, k, v = _normal(0, 8, 5, 16), _normal(1, 2, 5, 16), _normal(2, 2, 5, 16)
    grads = _differentiate(library, q, k, v, enable_gqa=True)
    _holds(grads.dk.shape == k.shape, "dk does not have the shape of k")


def case_15(library: GradientLibrary) -> None:
    """Differentiate logits near -120 with a tail of half a tile: lse far below zero."""
    # pytorch/pytorch#196678
    for dtype in ("float16", "bfloat16"):
        for length in (64, 128, 192):
            q, k, v = (_normal(seed, 1, 1, length, 64) for seed in range(3))
            q, k = 0.1 * q, 0.1 * k
            q[..., 0], k[..., 0] = 1, -960
            q, k, v = (x.astype(dtype_of(dtype)) for x in (q, k, v))
            dout = _normal(3, *q.shape).astype(q.dtype)
            expected = expect_gradients(dout, q, k, v)
            for mask in (None, np.ones((length, length), bool)):
                grads = _differentiate(library, q, k, v, dout=dout, check=False, mask=mask)
                assert_gradients_close(grads, expected)
                for x in grads[:3]:
                    _holds(np.isfinite(x.astype(np.float64)), f"{dtype}: a gradient is not finite")


def case_18(library: GradientLibrary) -> None:
    """Align the causal diagonal at the wrong corner when Tq and Tk differ."""
    # pytorch/executorch#22426, pytorch/pytorch#103082, ml-explore/mlx#2835
    q, k, v = _normal(0, 4, 2, 64), _normal(1, 4, 5, 64), _normal(2, 4, 5, 64)
    settings: list[tuple[dict[str, Any], int]] = [({}, 5), ({"query_offset": 0}, 2)]
    for options, seen in settings:
        grads = _differentiate(library, q, k, v, causal=True, **options)
        _holds(grads.dv[..., :seen, :].any(axis=-1), "a visible key has no gradient")
        _equal(grads.dv[..., seen:, :], np.zeros((4, 5 - seen, 64)), "dv of keys that none sees")


def case_19(library: GradientLibrary) -> None:
    """Differentiate by views: strides of one operand used for another, or ignored."""
    # FlagAttention#46, pytorch/pytorch#112577, ROCm/pytorch#3230
    for name, views in _layouts_of_19():
        q, k, v = (np.array(x, order="C") for x in views)
        copied = _differentiate(library, q, k, v, check=name == "v by tokens", deterministic=True)
        viewed = _differentiate(library, *views, check=False, deterministic=True)
        _each_equal(viewed, copied, f"of {name}")


def case_21(library: GradientLibrary) -> None:
    """Read bias and operands that lie at odd places with wide loads."""
    # facebookresearch/xformers#813, #808
    q, k, v = (_normal(seed, 1, 16, 43, 64, dtype="float16") for seed in range(3))
    bias = _normal(3, 1, 16, 43, 48, dtype="float16")[..., :43]
    options: dict[str, Any] = {"check": False, "deterministic": True}
    plain = _differentiate(library, q, k, v, bias=np.array(bias), deterministic=True)
    cut = _differentiate(library, q, k, v, bias=bias, **options)
    _each_equal(cut, plain, "of a cut bias")
    odd = [_one_element_in(x) for x in (q, k, v)]
    moved = _differentiate(library, *odd, bias=_one_element_in(bias), **options)
    _each_equal(moved, plain, "of operands one element into a buffer")


def case_23(library: GradientLibrary) -> None:
    """Differentiate sequences of no query, or of one, end to end."""
    # Dao-AILab/flash-attention#1537, #2875
    q, k, v = _normal(0, 6, 2, 64), _normal(1, 2, 10, 64), _normal(2, 2, 10, 64)
    ends_q, ends_k = np.array([0, 0, 1, 1, 2]), np.array([0, 0, 3, 5, 10])
    options: dict[str, Any] = {"causal": True, "enable_gqa": True}
    out, lse = library.flash_attention_varlen(q, k, v, ends_q, ends_k, return_lse=True, **options)
    dout = _normal(3, *out.shape)
    grads = library.flash_attention_varlen_vjp(dout, q, k, v, out, lse, ends_q, ends_k, **options)
    expected = reference.attention_varlen_vjp(dout, q, k, v, ends_q, ends_k, **options)
    for name, x, y in zip("qkv", grads, expected, strict=False):
        _holds(np.abs(x - y) < 1e-5, f"d{name} is not the oracle's")
    for name, x in (("dk", grads.dk), ("dv", grads.dv)):
        _equal(x[:, 3:5], np.zeros((2, 2, 64)), f"{name} of the sequence without a query")


def case_25(library: GradientLibrary) -> None:
    """Differentiate a bias that broadcasts: its gradient has another shape, or is not summed."""
    # jax-ml/jax#30593, #27184, #28974
    q, k, v = (_normal(seed, 3, 4, n, 8) for seed, n in enumerate((5, 7, 7)))
    some = np.random.default_rng(3).random((3, 1, 1, 7)) < 0.7
    for shape in ((1, 4, 5, 7), (1, 1, 1, 7), (3, 1, 5, 7), (5, 7)):
        for mask in (None, some):
            grads = _differentiate(library, q, k, v, bias=_normal(4, *shape), mask=mask)
            _holds(grads.dbias.shape == shape, f"dbias has shape {grads.dbias.shape}, not {shape}")


def case_27(library: GradientLibrary) -> None:
    """Differentiate more batch entries, or heads, than one grid axis has blocks."""
    # Dao-AILab/flash-attention#1786, pytorch/pytorch#142228, flashinfer#4534
    count = 65537
    some = [0, 65534, 65535, 65536]
    for batch in ((count, 1), (1, count)):
        q, k, v = (_normal(seed, *batch, 2, 16, dtype="float16") for seed in range(3))
        dout = _normal(3, *q.shape, dtype="float16")
        grads = _differentiate(library, q, k, v, dout=dout, check=False)
        at = np.ix_(*(some if n == count else [0] for n in batch))
        expected = expect_gradients(dout[at], q[at], k[at], v[at])
        assert_gradients_close(type(grads)(*(x[at] for x in grads[:3])), expected)
        for x in grads[:3]:
            _holds(np.isfinite(x), "a gradient is not finite")


def case_softcap(library: GradientLibrary) -> None:
    """Cap logits of +-30 at 10: the slope 1 - tanh^2 left out."""
    # Dao-AILab/flash-attention#2402
    q = np.array([[30.0], [-30.0]], np.float32)
    k = np.array([[1.0], [-1.0], [0.1]], np.float32)
    _differentiate(library, q, k, np.eye(3, dtype=np.float32), scale=1.0, softcap=10.0)


def case_padded_tail(library: GradientLibrary) -> None:
    """Leave tokens after the last sequence: their gradients are what the memory held."""
    # Dao-AILab/flash-attention#1228
    q, k, v = (_normal(seed, 2, 12, 16) for seed in range(3))
    ends = np.array([0, 4, 9])
    out, lse = library.flash_attention_varlen(q, k, v, ends, ends, return_lse=True)
    dout = _normal(3, *out.shape)
    dout[:, 9:] = np.nan
    grads = library.flash_attention_varlen_vjp(dout, q, k, v, out, lse, ends, ends)
    for name, x in zip("qkv", grads, strict=False):
        _equal(x[:, 9:], np.zeros((2, 3, 16)), f"d{name} past the last sequence")
        _holds(np.isfinite(x), f"d{name} is not finite")


def case_deterministic(library: GradientLibrary) -> None:
    """Add up gradients in an order that changes from run to run."""
    # Dao-AILab/flash-attention#2244
    q = _normal(0, 2, 4, 200, 32)
    k, v = _normal(1, 2, 1, 200, 32), _normal(2, 2, 1, 200, 32)
    first = _differentiate(library, q, k, v, causal=True)
    out, lse = library.flash_attention(q, k, v, causal=True, return_lse=True)
    dout = _normal(99, *out.shape)
    runs = [
        library.flash_attention_vjp(dout, q, k, v, out, lse, causal=True, deterministic=True)
        for _ in range(30)
    ]
    for again in runs[1:]:
        _each_equal(again, runs[0], "of another run")
    for x, y in zip(first[:3], runs[0][:3], strict=True):
        _holds(np.abs(x - y) < 1e-4, "deterministic gradients differ from the others")


def case_nan_row(library: GradientLibrary) -> None:
    """Store NaN where only some rows see it: what does not see it is spoiled as well."""
    q, k, v = (_normal(seed, 1, 2, 200, 32) for seed in range(3))
    dout = _normal(3, *q.shape)
    options: dict[str, Any] = {"causal": True, "deterministic": True}
    clean = _differentiate(library, q, k, v, dout=dout, **options)

    def spoiled(x: Array) -> Array:
        x = x.copy()
        x[..., 100, :] = np.nan
        return x

    for name, operands in (("k", (q, spoiled(k), v)), ("v", (q, k, spoiled(v)))):
        grads = _differentiate(library, *operands, dout=dout, check=False, **options)
        before = grads.dq[..., :100, :]
        _equal(before, clean.dq[..., :100, :], f"dq before NaN in {name}")
        _holds(np.isnan(grads.dq[..., 100:, :]), f"dq from NaN in {name} on is not NaN")
    grads = _differentiate(library, q, k, v, dout=spoiled(dout), check=False, **options)
    others = np.arange(200) != 100
    _equal(grads.dq[..., others, :], clean.dq[..., others, :], "dq of rows without NaN in dout")
    for name in ("dk", "dv"):
        x, y = getattr(grads, name), getattr(clean, name)
        _equal(x[..., 101:, :], y[..., 101:, :], f"{name} of keys that the row does not see")
        _holds(np.isnan(x[..., :101, :]), f"{name} of keys that it sees is not NaN")


def case_uninitialised_cache(library: GradientLibrary) -> None:
    """Leave NaN or inf in a cache past key_lengths."""
    lengths = np.array([[0], [5], [64], [70]])
    q = _normal(0, 4, 2, 3, 16)
    k, v = _normal(1, 4, 2, 70, 16), _normal(2, 4, 2, 70, 16)
    unused = np.broadcast_to(np.arange(70)[:, None] >= lengths[..., None, None], k.shape)
    for causal in (False, True):
        k[unused] = v[unused] = 0
        options: dict[str, Any] = {"causal": causal, "key_lengths": lengths}
        options["deterministic"] = True
        clean = _differentiate(library, q, k, v, **options)
        for special in (np.nan, np.inf, -np.inf):
            k[unused] = v[unused] = special
            grads = _differentiate(library, q, k, v, check=False, **options)
            _each_equal(grads, clean, f"with {special} past the lengths")


def case_sink_alone(library: GradientLibrary) -> None:
    """Give a row a sink and no key: its gradient is dlse, and nothing of dout."""
    q, k = _normal(0, 2, 3, 8), _normal(1, 2, 5, 8)
    dlse = _normal(2, 2, 3)
    dout = np.full((2, 3, 8), np.nan, np.float32)
    sinks = np.array([0.5, -2], np.float32)
    grads = _differentiate(
        library, q, k, k, dout=dout, dlse=dlse, sinks=sinks, mask=np.zeros((3, 5), bool)
    )
    _holds(np.abs(grads.dsinks - dlse.sum(axis=-1)) < 1e-6, "dsinks is not the sum of dlse")
    for name, x in zip("qkv", grads, strict=False):
        _equal(x, np.zeros(x.shape), f"d{name}")


def case_weightless_row(library: GradientLibrary) -> None:
    """Make all scores of a row -inf by an infinite q, or k: the row has no part in any gradient."""
    for name in ("q", "k"):
        q, k, v = (np.abs(_normal(seed, 1, 4, 8)) for seed in range(3))
        operands = {"q": q, "k": k}
        operands[name][...] = np.abs(operands[name])
        if name == "q":
            q[0, 1], k[...] = -np.inf, np.abs(k) + 1
        else:
            k[...], q[0, [0, 2, 3]] = np.inf, 1
            q[0, 1] = -1
        seen = np.ones((4, 4), bool)
        if name == "k":  # rows of +inf are NaN: hide them
            seen[[0, 2, 3]] = False
        grads = _differentiate(library, q, k, v, mask=seen)
        for of, x in zip("qkv", grads, strict=False):
            _holds(np.isfinite(x), f"d{of} with inf in {name}: {x}")
        _equal(grads.dq[0, 1], np.zeros(8), f"dq of the row with inf in {name}")


#: Every case, by the name it has in test reports.
GRADIENT_CASES: dict[str, GradientCase] = {
    case.__name__: case
    for case in (
        case_06,
        case_08,
        case_12,
        case_15,
        case_18,
        case_19,
        case_21,
        case_23,
        case_25,
        case_27,
        case_softcap,
        case_padded_tail,
        case_deterministic,
        case_nan_row,
        case_uninitialised_cache,
        case_sink_alone,
        case_weightless_row,
    )
}
