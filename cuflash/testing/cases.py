"""Small inputs on which other systems went wrong, from their public bug reports.

Each case is a function of a library: the module ``cuflash``, or any object with functions of its
names and signatures on NumPy arrays, such as one that fixes the method. It raises AssertionError
where the result is wrong. The inputs are written new; a source is named for its kind of mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeAlias

import numpy as np

from cuflash import reference
from cuflash.testing.bounds import (
    assert_attention_close,
    assert_softmax_close,
    expect_attention,
    expect_softmax,
    expect_softmax_vjp,
)
from cuflash.testing.problems import Array, dtype_of
from cuflash.testing.properties import assert_bitwise_equal


class Library(Protocol):
    """What the cases call."""

    def softmax(self, x: Any, /, axis: Any = -1) -> Any:
        """Softmax."""

    def softmax_vjp(self, dy: Any, y: Any, /, axis: Any = -1) -> Any:
        """Gradient of softmax."""

    def logsumexp(self, x: Any, /, axis: Any = -1) -> Any:
        """Logsumexp."""

    def flash_attention(self, q: Any, k: Any, v: Any, /, **options: Any) -> Any:
        """Attention."""

    def merge_attention(self, out_a: Any, lse_a: Any, out_b: Any, lse_b: Any, /) -> Any:
        """Attention over the union of two key sets."""


Case: TypeAlias = Callable[[Library], None]

_LOW = ("float16", "bfloat16")


def _normal(seed: int, *shape: int, dtype: str = "float32") -> Array:
    return np.random.default_rng(seed).normal(size=shape).astype(dtype_of(dtype))


def _attend(library: Library, q: Any, k: Any, v: Any, **options: Any) -> tuple[Array, Array]:
    """Attend, hold the result against the oracle and return it."""
    out, lse = library.flash_attention(q, k, v, return_lse=True, **options)
    assert_attention_close(out, lse, expect_attention(q, k, v, **options))
    return out, lse


def _equal(actual: Any, expected: Any, what: str) -> None:
    assert_bitwise_equal(actual, expected, what, "")


def _holds(condition: Any, what: str) -> None:
    if not np.all(condition):
        raise AssertionError(what)


def case_02(library: Library) -> None:
    """Sum a long row of 16-bit ones: the sum overflows, or stands still, in 16 bits."""
    # huggingface/candle#3717, sonos/tract#2586, google-research/last#43
    for dtype, length in (("float16", 4096), ("bfloat16", 512)):
        y = library.softmax(np.zeros((2, length), dtype_of(dtype)))
        _equal(y, np.full((2, length), 1 / length), f"softmax of {length} {dtype} zeros")
    lse = library.logsumexp(np.zeros((1, 65536), np.float16))
    _equal(lse, [np.float16(11.0904)], "logsumexp of 65536 float16 zeros")


def case_03(library: Library) -> None:
    """Normalise views: strides taken for those of a contiguous array."""
    # tracel-ai/burn#4815, flagos-ai/Torch-FL#171
    a = np.arange(12, dtype=np.float32).reshape(3, 4)
    fortran = np.asfortranarray(_normal(0, 65, 33))
    for x, axis in ((a.T, 1), (a[:, ::-1], 1), (a[::2], 1), (fortran, 0)):
        y = np.asarray(library.softmax(x, axis=axis))
        copied = np.asarray(library.softmax(np.array(x, order="C"), axis=axis))
        _holds(np.abs(y - copied) <= np.spacing(copied), "softmax of a view is not that of a copy")
        assert_softmax_close(y, expect_softmax("softmax", x, axis), axis=axis)
        dy = np.ones_like(x)[::-1] * x
        dx = library.softmax_vjp(dy, y, axis=axis)
        expected = expect_softmax_vjp("softmax_vjp", dy, y, axis=axis)
        assert_softmax_close(dx, expected, name="softmax_vjp", axis=axis)


def case_06(library: Library) -> None:
    """Attend with fewer keys than queries: causal rows before the first key."""
    # flashinfer-ai/flashinfer#4452, MinghuasLab/flash-attention-npu#120
    q, k = _normal(0, 1, 2, 40, 16), _normal(1, 1, 2, 7, 16)
    out, lse = _attend(library, q, k, np.ones_like(k), causal=True)
    _equal(out[..., :33, :], np.zeros((1, 2, 33, 16)), "out of rows 0 to 32")
    _equal(lse[..., :33], np.full((1, 2, 33), -np.inf), "lse of rows 0 to 32")
    _holds(np.abs(out[..., 33:, :] - 1) < 1e-6, "out of rows 33 to 39 is not 1")


def case_08(library: Library) -> None:
    """Hide a key by a mask: what is stored there is multiplied by zero instead."""
    # pytorch/pytorch#101967
    clean = np.arange(8, dtype=np.float32).reshape(1, 1, 2, 4)
    mask = np.array([[True, False], [True, False]])
    for special in (1e10, np.inf, np.nan):
        spoiled = clean.copy()
        spoiled[..., 1, :] = special
        for k, v in ((spoiled, clean), (clean, spoiled), (spoiled, spoiled)):
            out, lse = _attend(library, clean, k, v, mask=mask)
            _equal(out, np.broadcast_to(clean[..., :1, :], out.shape), f"out, {special} hidden")
            _holds(np.isfinite(lse), f"lse is not finite, {special} hidden")


def case_09(library: Library) -> None:
    """Attend to no keys at all, and merge the result: lse of the wrong sign."""
    # Dao-AILab/flash-attention#978
    q, nothing = _normal(0, 2, 3, 4, 8), _normal(1, 2, 3, 0, 8)
    out, lse = library.flash_attention(q, nothing, nothing, return_lse=True)
    _equal(out, np.zeros((2, 3, 4, 8)), "out")
    _equal(lse, np.full((2, 3, 4), -np.inf), "lse")
    other = _attend(library, q, _normal(2, 2, 3, 5, 8), _normal(3, 2, 3, 5, 8))
    for merged in (
        library.merge_attention(out, lse, *other),
        library.merge_attention(*other, out, lse),
    ):
        _equal(merged[0], other[0], "out merged with nothing")
        _equal(merged[1], other[1], "lse merged with nothing")


def case_12(library: Library) -> None:
    """Take lse in base 2, or the key head by the wrong rule."""
    # pytorch/pytorch#181645, Dao-AILab/flash-attention#648
    q, k = np.array([[1, 2]], np.float32), np.array([[3, 4]], np.float32)
    _, lse = _attend(library, q, k, k, scale=1.0)
    _equal(lse, [11.0], "lse of one key")
    ones, length = np.ones((8, 3, 16), np.float32), 5
    k = np.stack([np.ones((length, 16)), -np.ones((length, 16))]).astype(np.float32)
    _, lse = _attend(library, ones, k, k, enable_gqa=True)
    signs = np.repeat([4.0, -4.0], 4)[:, None]
    _holds(np.abs(lse - np.log(length) - signs) < 1e-5, "lse by head is not log(5) +- 4")


def case_13(library: Library) -> None:
    """Attend with every logit near -17000: a finite stand-in for -inf is larger than they are."""
    # flashinfer-ai/flashinfer#4267
    for dtype in (*_LOW, "float32"):
        q, k = np.ones((1, 1, 1, 128)), np.full((1, 1, 64, 128), -1600.0)
        k[..., 0, :] = -1536
        q, k = (x.astype(dtype_of(dtype)) for x in (q, k))
        v = _normal(0, 1, 1, 64, 128, dtype=dtype)
        out, lse = _attend(library, q, k, v)
        if dtype == "float32":  # a unit in the last place, which two TF32 parts do not always hold
            _holds(np.abs(out - v[..., :1, :]) <= 2**-23 * np.abs(v[..., :1, :]), "float32 out")
        else:
            _equal(out, v[..., :1, :], f"{dtype} out")
        _holds(np.abs(lse + 17377.856) < 0.01, f"{dtype} lse is not -17377.856")


def case_15(library: Library) -> None:
    """Attend with logits near -120 and a tail of half a tile: the tail's zeros win the maximum."""
    # pytorch/pytorch#196678
    for dtype in _LOW:
        for length in (64, 128, 192):
            q, k, v = (_normal(seed, 1, 2, length, 64) for seed in range(3))
            q, k = 0.1 * q, 0.1 * k
            q[..., 0], k[..., 0] = 1, -960
            q, k, v = (x.astype(dtype_of(dtype)) for x in (q, k, v))
            out, lse = _attend(library, q, k, v)
            _holds(np.abs(lse + 120) < 8, f"{dtype} lse is not near -120")
            mask = np.ones((length, length), bool)
            masked, masked_lse = _attend(library, q, k, v, mask=mask)
            largest = np.abs(v.astype(np.float64)).max()
            difference = np.abs(masked.astype(np.float64) - out.astype(np.float64))
            _holds(difference <= 0.02 * largest, f"{dtype}: a mask of True changes out")
            _holds(np.abs(masked_lse - lse) < 1e-3, f"{dtype}: a mask of True changes lse")


def case_18(library: Library) -> None:
    """Align the causal diagonal at the wrong corner when Tq and Tk differ."""
    # pytorch/executorch#22426, pytorch/pytorch#103082, ml-explore/mlx#2835
    q, k, v = _normal(0, 1, 4, 1, 64), _normal(1, 1, 4, 16, 64), _normal(2, 1, 4, 16, 64)
    last, last_lse = _attend(library, q, k, v, causal=True)
    everything, everything_lse = _attend(library, q, k, v)
    _holds(np.abs(last - everything) < 1e-6, "the last query does not see every key")
    _holds(np.abs(last_lse - everything_lse) < 1e-6, "the last query does not see every key")
    first, _ = _attend(library, q, k, v, causal=True, query_offset=0)
    _holds(np.abs(first - v[..., :1, :]) < 1e-6, "the first query does not see key 0 only")
    zeros_q, zeros_k = np.zeros((2, 1), np.float32), np.zeros((5, 1), np.float32)
    for options, rows in (({}, ("11110", "11111")), ({"query_offset": 0}, ("10000", "11000"))):
        weights, _ = _attend(
            library, zeros_q, zeros_k, np.eye(5, dtype=np.float32), causal=True, **options
        )
        seen = tuple("".join("01"[int(w > 0)] for w in row) for row in weights)
        _holds(seen == rows, f"visible keys are {seen}, not {rows}, with {options}")


def _layouts_of_19() -> Iterator[tuple[str, tuple[Array, Array, Array]]]:
    batch, heads, tokens, features = 1, 16, 62, 128
    plain = [_normal(seed, batch, heads, tokens, features) for seed in range(3)]
    by_token = [np.array(x.swapaxes(1, 2)).swapaxes(1, 2) for x in plain]
    yield "v by tokens", (plain[0], plain[1], by_token[2])
    yield "k by tokens", (plain[0], by_token[1], plain[2])
    packed = np.stack([x.swapaxes(1, 2) for x in plain], axis=2)  # (B, S, 3, H, D)
    q, k, v = (packed[:, :, n].swapaxes(1, 2) for n in range(3))
    yield "slices of one packed array", (q, k, v)
    stepped = [np.repeat(x, 2, axis=-1)[..., ::2] for x in plain]
    q, k, v = (np.array(x[..., ::-1, :])[..., ::-1, :] for x in stepped)
    yield "S-axis stride -1", (q, k, v)
    yield "D-axis stride 2", (stepped[0], stepped[1], stepped[2])
    q, k, v = (np.repeat(x[..., ::-1, :], 2, axis=-1)[..., ::-1, ::2] for x in plain)
    yield "S-axis stride -1 and D-axis stride 2", (q, k, v)


def case_19(library: Library) -> None:
    """Attend to views: strides of one operand used for another, or ignored."""
    # FlagAttention#46, pytorch/pytorch#112577, ROCm/pytorch#3230
    for name, views in _layouts_of_19():
        q, k, v = (np.array(x, order="C") for x in views)
        out, lse = library.flash_attention(*views, return_lse=True)
        copied, copied_lse = _attend(library, q, k, v)
        _equal(out, copied, f"out of {name}")
        _equal(lse, copied_lse, f"lse of {name}")


def _one_element_in(x: Array) -> Array:
    buffer = np.zeros(x.size + 1, x.dtype)
    buffer[1:] = x.ravel()
    return buffer[1:].reshape(x.shape)


def case_21(library: Library) -> None:
    """Read bias, mask and operands that lie at odd places with wide loads."""
    # facebookresearch/xformers#813, #808
    q, k, v = (_normal(seed, 1, 16, 43, 64, dtype="float16") for seed in range(3))
    wide_bias = _normal(3, 1, 16, 43, 48, dtype="float16")
    wide_mask = wide_bias > -1
    for cut in (lambda x: np.array(x[..., :43]), lambda x: x[..., :43]):
        _attend(library, q, k, v, bias=cut(wide_bias))
        _attend(library, q, k, v, mask=cut(wide_mask))
    odd = [_one_element_in(x) for x in (q, k, v)]
    _attend(library, *odd, bias=_one_element_in(wide_bias[..., :43]))
    _attend(library, *odd, mask=_one_element_in(wide_mask[..., :43]))


def case_27(library: Library) -> None:
    """Attend with more batch entries, or heads, than one grid axis has blocks."""
    # Dao-AILab/flash-attention#1786, pytorch/pytorch#142228, flashinfer#4534
    count = 65537
    some = [0, 65534, 65535, 65536]
    for batch in ((count, 1), (1, count)):
        q, k, v = (_normal(seed, *batch, 2, 16, dtype="float16") for seed in range(3))
        out = np.full(q.shape, np.nan, np.float16)
        lse = np.full(q.shape[:-1], np.nan, np.float32)
        library.flash_attention(q, k, v, out=out, lse=lse)
        _holds(np.isfinite(out), "some of out was not written")
        _holds(np.isfinite(lse), "some of lse was not written")
        at = np.ix_(*(some if n == count else [0] for n in batch))
        assert_attention_close(out[at], lse[at], expect_attention(q[at], k[at], v[at]))
    x = _normal(3, count, 3)
    assert_softmax_close(library.softmax(x), expect_softmax("softmax", x))


def case_softcap(library: Library) -> None:
    """Cap logits of +-30 at 10: the cap left out, or used before the scale."""
    # Dao-AILab/flash-attention#2402
    q = np.array([[30.0], [-30.0]], np.float32)
    k = np.array([[1.0], [-1.0], [0.1]], np.float32)
    _, lse = _attend(library, q, k, np.eye(3, dtype=np.float32), scale=1.0, softcap=10.0)
    capped = 10 * np.tanh(np.array([3.0, -3.0, 0.3]))
    _holds(abs(lse[0] - np.log(np.exp(capped).sum())) < 1e-5, "lse is not that of capped logits")


def case_alibi_decode(library: Library) -> None:
    """Decode the last query by itself: ALiBi distances counted from the wrong end."""
    # Dao-AILab/flash-attention#907, vllm#945
    q, k, v = (_normal(seed, 2, 4, 33, 16) for seed in range(3))
    slopes = np.array([1 / 2, 1 / 4, 1 / 8, 1 / 16], np.float32)
    options: dict[str, Any] = {"alibi_slopes": slopes, "causal": True}
    full, full_lse = _attend(library, q, k, v, **options)
    last, last_lse = _attend(library, q[..., -1:, :], k, v, **options)
    _holds(np.abs(last - full[..., -1:, :]) < 1e-6, "the last row differs when decoded alone")
    _holds(np.abs(last_lse - full_lse[..., -1:]) < 1e-5, "its lse differs when decoded alone")


def case_nan_key(library: Library) -> None:
    """Store NaN at a key that only later queries see: it reaches earlier ones in its tile."""
    q, k, v = (_normal(seed, 1, 2, 200, 32) for seed in range(3))
    clean, clean_lse = _attend(library, q, k, v, causal=True)
    for name in ("k", "v"):
        operands = {"k": k.copy(), "v": v.copy()}
        operands[name][..., 100, :] = np.nan
        out, lse = library.flash_attention(
            q, operands["k"], operands["v"], causal=True, return_lse=True
        )
        _equal(out[..., :100, :], clean[..., :100, :], f"out before NaN in {name}")
        _equal(lse[..., :100], clean_lse[..., :100], f"lse before NaN in {name}")
        _holds(np.isnan(out[..., 100:, :]), f"out from NaN in {name} on is not NaN")


def case_uninitialised_cache(library: Library) -> None:
    """Leave NaN or inf in a cache past key_lengths."""
    lengths = np.array([[0], [5], [64], [70]])
    q = _normal(0, 4, 2, 3, 16)
    k, v = _normal(1, 4, 2, 70, 16), _normal(2, 4, 2, 70, 16)
    unused = np.broadcast_to(np.arange(70)[:, None] >= lengths[..., None, None], k.shape)
    k[unused] = v[unused] = 0
    for options in ({}, {"causal": True}):
        clean, clean_lse = _attend(library, q, k, v, key_lengths=lengths, **options)
        for special in (np.nan, np.inf, -np.inf):
            k[unused] = v[unused] = special
            out, lse = library.flash_attention(
                q, k, v, key_lengths=lengths, return_lse=True, **options
            )
            _equal(out, clean, f"out with {special} past the lengths")
            _equal(lse, clean_lse, f"lse with {special} past the lengths")
        k[unused] = v[unused] = 0


def case_bias_hides_nothing(library: Library) -> None:
    """Give a key the bias -inf: its weight is 0, but a NaN there is seen, as IEEE has it."""
    q, k, v = (_normal(seed, 3, 8) for seed in range(3))
    bias = np.array([0, 0, -np.inf], np.float32)
    two, two_lse = reference.attention(q, k[:2], v[:2])
    out, lse = _attend(library, q, k, v, bias=bias)
    _holds(np.abs(out - two) < 1e-6, "a bias of -inf does not take the key away")
    _holds(np.abs(lse - two_lse) < 1e-5, "a bias of -inf does not take the key away")
    v[2, 3] = np.nan
    out, _ = _attend(library, q, k, v, bias=bias)
    _holds(np.isnan(out) == (np.arange(8) == 3), "not just the column of the NaN is NaN")


def case_nonfinite_sink(library: Library) -> None:
    """Make a sink NaN or +inf: its rows are NaN, those too that see no key, and no others."""
    sinks = np.array([0.5, np.inf, np.nan, -np.inf], np.float32)
    for dtype in ("float32", "bfloat16"):
        k, v = (_normal(seed, 4, 70, 64, dtype=dtype) for seed in range(2))
        for tq, options in ((80, {"causal": True}), (3, {"key_lengths": 0}), (3, {})):
            q = _normal(2, 4, tq, 64, dtype=dtype)
            out, lse = _attend(library, q, k, v, sinks=sinks, **options)
            poisoned = np.array([False, True, True, False])
            _holds(np.isnan(lse) == poisoned[:, None], f"lse with {sinks}: {lse}")
            _holds(np.isnan(out) == poisoned[:, None, None], f"out with {sinks}: {out}")


#: Every case, by the name it has in test reports.
ALL_CASES: dict[str, Case] = {
    case.__name__: case
    for case in (
        case_02,
        case_03,
        case_06,
        case_08,
        case_09,
        case_12,
        case_13,
        case_15,
        case_18,
        case_19,
        case_21,
        case_27,
        case_softcap,
        case_alibi_decode,
        case_nan_key,
        case_uninitialised_cache,
        case_bias_hides_nothing,
        case_nonfinite_sink,
    )
}
