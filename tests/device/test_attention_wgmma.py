"""The Hopper family: its laws, and each way through its barriers."""

import itertools
from dataclasses import replace

import cupy
import numpy as np
import pytest
from hypothesis import given, settings

import cuflash
from cuflash.device.executor import device_limits
from cuflash.testing.bounds import assert_attention_close, expect_attention
from cuflash.testing.problems import AttentionCase
from cuflash.testing.properties import ATTENTION_PROPERTIES
from cuflash.testing.strategies import attention_problems
from tests.device.test_attention import normal, on_device

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels")]


@pytest.fixture(autouse=True)
def hopper():
    if device_limits(0).compute_capability != "90":
        pytest.skip("no Hopper GPU")


#: What changes scores: there are kernels for one of them at a time.
STEPS = ("softcap", "bias", "alibi_slopes", "mask")


def attend(**fixed):
    """Attend by this family, of copies that it can fetch; outside of its domain by `mma`."""

    def call(q, k, v, **options):
        q, k, v = map(cupy.ascontiguousarray, (q, k, v))
        runs = q.shape[-2] >= 64 and k.shape[-2] > 0
        runs &= sum(options.get(name) is not None for name in STEPS) <= 1
        for name in ("mask", "bias"):
            if (x := options.get(name)) is not None:
                shape = (*x.shape[:-1], k.shape[-2])
                options[name] = cupy.ascontiguousarray(cupy.broadcast_to(x, shape))
                runs &= x.dtype != np.float64 and k.shape[-2] * x.dtype.itemsize % 16 == 0
        method = "wgmma" if runs else "mma"
        return cuflash.flash_attention(q, k, v, method=method, **fixed, **options)

    return on_device(call)


def fit(case):
    """Give a case the least rows, rows in steps of 16 bytes, and at most one of `STEPS`."""
    width, value_width = (-(-x // 8) * 8 for x in (case.d, case.dv))
    tq, tk = 64 + case.tq, max(1, case.tk)
    present = [name for name in STEPS if getattr(case, name) is not None]
    chosen = present[case.seed % len(present)] if present else None
    changes = {name: None for name in present if name != chosen}
    if chosen in ("mask", "bias"):
        tk = -(-tk // 16) * 16
        sizes = (*case.batch_shape, tq, tk)
        shape = getattr(case, chosen)
        own = sizes[len(sizes) - len(shape) :]
        changes[chosen] = tuple(1 if n == 1 else full for n, full in zip(shape, own, strict=True))
    return replace(case, tq=tq, tk=tk, d=width, dv=value_width, **changes)


PROBLEMS = attention_problems(
    dtypes=("float16", "bfloat16"),
    options=("causal", "window", "query_offset", "key_lengths", "sinks", "enable_gqa", *STEPS),
    layouts=("contiguous",),
    borders=(64, 80, 128),
    max_tokens=330,
    max_features=256,
    max_batch_axes=2,
).map(fit)


@pytest.mark.parametrize("law", ATTENTION_PROPERTIES)
def test_property(law):
    @settings(max_examples=6)
    @given(case=PROBLEMS)
    def holds(case):
        ATTENTION_PROPERTIES[law](attend(), case)

    holds()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("width", [8, 64, 80, 128, 200, 256])
@pytest.mark.parametrize(
    "tokens",
    # One key, one tile, one tile and a key, very many; one row tile and many.
    [
        (64, 1),
        (128, 80),
        (128, 128),
        (129, 129),
        (200, 3000),
        (1000, 513),
        (513, 1000),
        (520, 1),
        (600, 64),
        (600, 65),
        (513, 192),
    ],
)
def test_tiles(tokens, width, causal):
    tq, tk = tokens
    case = AttentionCase(
        q_batch=(2,), k_batch=(2,), v_batch=(2,), tq=tq, tk=tk, d=width, dv=width,
        dtype="bfloat16", causal=causal,
    )  # fmt: skip
    ATTENTION_PROPERTIES["matches_oracle"](attend(), case)


@pytest.mark.parametrize(("width", "tokens"), [(128, 1100), (256, 4100)])
def test_whole_tiles_under_a_diagonal(width, tokens):
    """Long enough for whole tiles to go without a maximum; the oracle would take a minute."""
    q, k, v = (normal(i, tokens, width, dtype=np.float16) for i in range(3))
    results = [
        cuflash.flash_attention(q, k, v, causal=True, return_lse=True, method=method)
        for method in ("wgmma", "mma")
    ]
    for results_of_both in zip(*results, strict=True):
        x, y = (result.astype(np.float32) for result in results_of_both)
        assert bool((abs(x - y) <= 2e-3 * cupy.maximum(abs(y), 1)).all())


@pytest.mark.parametrize(
    # Tiles of 64, 128 and 256 columns.
    ("width", "dtype"),
    [(64, "bfloat16"), (72, "float16"), (136, "bfloat16")],
)
@pytest.mark.parametrize(
    "option",
    [
        {"softcap": 10.0},
        {"softcap": 0.5, "logits": "wide", "causal": True},
        {"alibi_slopes": (2,), "window": (90, 40)},
        {"mask": (2, 100, 208), "causal": True},
        {"mask": (2, 1, 208), "key_lengths": 190},
        {"bias": (2, 100, 208), "causal": True, "sinks": (2,)},
        {"bias": (100, 208), "bias_dtype": "float16", "bias_minus_inf": True},
        {"bias": (2, 1, 208), "bias_dtype": "bfloat16", "window": (70, 50)},
    ],
    ids=str,
)
def test_options(option, width, dtype):
    """Among them rows of which the mask hides all, and a tile of keys and one of rows in part."""
    case = AttentionCase(
        q_batch=(2,), tq=100, tk=208, d=width, dv=width, dtype=dtype, unseen="nan", **option
    )
    for law in ("matches_oracle", "unseen_nonfinite_never_leaks"):
        ATTENTION_PROPERTIES[law](attend(), case)


@pytest.mark.parametrize("width", [64, 128, 256])
def test_options_that_hide_or_outweigh_whole_tiles(width):
    """Tiles come from the last to the first: a row's reference is not that of what it sees."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, n, width)).astype(np.float16) for n in (256, 640, 640))
    mask = np.zeros((256, 640), bool)
    mask[:200, :100] = rng.random((200, 100)) < 0.5
    mask[:20, 256:384] = True
    bias = np.zeros((256, 640), np.float32)
    bias[::2, 128:] = -1e30
    bias[1::4, :256] = 1e9
    bias[3::4, 300:400] = -np.inf
    for option in ({"mask": mask}, {"bias": bias}):
        out, lse = attend()(q, k, v, return_lse=True, **option)
        assert_attention_close(out, lse, expect_attention(q, k, v, **option))


def test_slopes_and_distances_that_are_far_from_zero():
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((3, n, 64)).astype(np.float16) for n in (100, 300, 300))
    for slopes, offset in ((1e-7, 1 << 25), (1e30, 0), (-0.5, 100)):
        options = {"alibi_slopes": np.full(3, slopes, np.float32), "query_offset": offset}
        out, lse = attend()(q, k, v, return_lse=True, **options)
        assert_attention_close(out, lse, expect_attention(q, k, v, **options))


@pytest.mark.parametrize("splits", [2, 5])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (100, 30)}])
def test_shares_of_the_keys(options, splits):
    """With shares of which some rows see nothing."""
    case = AttentionCase(q_batch=(3,), tq=300, tk=1500, d=64, dv=128, dtype="float16", **options)
    ATTENTION_PROPERTIES["matches_oracle"](attend(num_splits=splits), case)


#: How large 2000 keys are, which are walked from the last on: "steep" ones leave the range of
#: floats within a tile.
GROWTHS = {
    "growing": np.linspace(8, 0.01, 2000),
    "steep": np.linspace(800, 0.01, 2000),
    "then falling": 8 - abs(np.linspace(-7.99, 7.99, 2000)),
    "steep, then even": np.minimum(np.linspace(1200, 0.01, 2000), 600),
}


def growing(width, rows, growth):
    """Return queries, and keys and values of that growth."""
    q, k, v = (
        np.random.default_rng(i).standard_normal((2, tokens, width)).astype(np.float16)
        for i, tokens in enumerate((rows, 2000, 2000))
    )
    return q, (k * GROWTHS[growth][:, None]).astype(np.float16), v


@pytest.mark.parametrize("growth", GROWTHS)
@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize(("rows", "causal"), [(300, False), (600, False), (600, True)])
def test_scores_that_grow_towards_the_keys_that_come_last(width, growth, rows, causal):
    """Tiles are walked from the last key on, without looking for a maximum: it must be found."""
    q, k, v = growing(width, rows, growth)
    out, lse = attend()(q, k, v, return_lse=True, causal=causal)
    assert_attention_close(out, lse, expect_attention(q, k, v, causal=causal))


@pytest.mark.parametrize("growth", GROWTHS)
@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_rows_have_their_bits_whatever_the_scores_of_others(width, growth, causal):
    """Some rows' scores grow, those of others in their warps do not."""
    q, k, v = growing(width, 600, growth)
    out, lse = attend()(q, k, v, return_lse=True, causal=causal)
    rows = [0, 9, 100, 263, 299, 599]
    alone = np.zeros_like(q)
    alone[:, rows] = q[:, rows]
    out_alone, lse_alone = attend()(alone, k, v, return_lse=True, causal=causal)
    assert (out_alone[:, rows] == out[:, rows]).all()
    assert (lse_alone[:, rows] == lse[:, rows]).all()


@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize(("entries", "rows"), [(3, 64), (3, 600), (6000, 64)])
def test_values_that_no_row_sees(entries, rows, width):
    """All tiles are taken again, with the same bits, and a block cannot list so many of them."""
    q, k, v = (
        normal(i, entries, tokens, width, dtype=np.float16) for i, tokens in enumerate((rows, 8, 8))
    )
    v[:, 7] = 0
    expected = cuflash.flash_attention(q, k, v, key_lengths=7, method="wgmma")
    v[:, 7] = cupy.nan
    out = cuflash.flash_attention(q, k, v, key_lengths=7, method="wgmma")
    assert bool((out == expected).all())
    v[:, 5, 3] = cupy.inf
    out = cuflash.flash_attention(q, k, v, key_lengths=7, method="wgmma")
    assert bool(cupy.isposinf(out[..., 3]).all())
    out[..., 3] = expected[..., 3]
    assert bool((out == expected).all())


@pytest.mark.parametrize("damaged", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("rows", [320, 700])
def test_blocks_of_many_tiles_with_warpgroups_that_see_little(rows, width, causal, damaged):
    """Blocks go from tile to tile as if each were alone, also where rows end early.

    The last tile of rows leaves warpgroups without any, which let most keys pass, unless all
    meet because values are taken again.
    """
    q, k, v = (
        normal(i, 3, tokens, width, dtype=np.float16) for i, tokens in enumerate((rows, 900, 900))
    )
    if damaged:
        v[:, 850:] = cupy.nan
    options = {"causal": causal, "key_lengths": 850, "num_splits": 1, "method": "wgmma"}
    alone = cuflash.flash_attention(q, k, v, **options)
    many = [cupy.broadcast_to(x, (150, *x.shape)) for x in (q, k, v)]
    assert bool((cuflash.flash_attention(*many, **options) == alone).all())
    assert bool(cupy.isfinite(alone).all())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("width", [64, 128, 256])
def test_repeats_are_bit_equal(width, causal):
    q, k, v = (normal(i, 40, 700, width, dtype=np.float16) for i in range(3))
    first, first_lse = cuflash.flash_attention(
        q, k, v, causal=causal, return_lse=True, method="wgmma"
    )
    out, lse = cupy.empty_like(first), cupy.empty_like(first_lse)
    differ = cupy.zeros((), bool)
    for _ in range(200):
        out[...] = lse[...] = cupy.nan
        cuflash.flash_attention(q, k, v, causal=causal, out=out, lse=lse, method="wgmma")
        differ |= (out != first).any() | (lse != first_lse).any()
    assert not bool(differ)


@pytest.mark.parametrize(
    "options",
    [{"window": (90, 40)}, {"key_lengths": 190}, {"key_lengths": (2,), "sinks": (2,)}],
)
@pytest.mark.parametrize("width", [64, 128, 256])
def test_bounds_of_long_rows(width, options):
    case = AttentionCase(
        q_batch=(2,), k_batch=(2,), v_batch=(2,), tq=600, tk=700, d=width, dv=width,
        dtype="bfloat16", **options,
    )  # fmt: skip
    ATTENTION_PROPERTIES["matches_oracle"](attend(), case)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("width", [64, 128, 256])
def test_views_have_the_bits_of_their_copies(width, causal):
    """Tensor maps are over the caller's own strides: tokens first, or parts of one array."""
    options = {"causal": causal, "method": "wgmma"}
    by_token = normal(0, 2, 600, 3, 4, width, dtype=np.float16)
    q, k, v = (by_token[:, :, i].swapaxes(1, 2) for i in range(3))
    expected = cuflash.flash_attention(*map(cupy.ascontiguousarray, (q, k, v)), **options)
    assert bool((cuflash.flash_attention(q, k, v, **options) == expected).all())
    out = cupy.full((2, 600, 4, width), cupy.nan, np.float16)
    cuflash.flash_attention(q, k, v, out=out.swapaxes(1, 2), **options)
    assert bool((out.swapaxes(1, 2) == expected).all())

    rows = normal(1, 2, 2 * 600 + 8, width + 8, dtype=np.float16)
    q, k, v = rows[:, :1200:2, :width], rows[:1, 8::2, 8:], rows[0, :600, :width]
    copies = map(cupy.ascontiguousarray, (q, k, v))
    expected = cuflash.flash_attention(*copies, **options)
    assert bool((cuflash.flash_attention(q, k, v, **options) == expected).all())


@pytest.mark.parametrize("step", [0, 8])
def test_rows_that_overlap(step):
    """A row of all keys, and rows that begin within others."""
    q, x = normal(0, 2, 200, 64, dtype=np.float16), normal(1, 2, 4096, dtype=np.float16)
    k = cupy.lib.stride_tricks.as_strided(x, (2, 300, 64), (x.strides[0], 2 * step, 2))
    copy = cupy.ascontiguousarray(k)
    expected = cuflash.flash_attention(q, copy, copy, method="wgmma")
    assert bool((cuflash.flash_attention(q, k, k, method="wgmma") == expected).all())


def test_addresses_that_the_copy_engine_cannot_read():
    """A view one element into its memory goes to another family; so with a mask's."""
    memory = normal(0, 3, 2 * 100 * 64 + 1, dtype=np.float16)
    q, k, v = (x[1:].reshape(2, 100, 64) for x in memory)
    out = cuflash.flash_attention(q, k, v, method="wgmma")
    copies = q.copy(), k.copy(), v.copy()
    assert bool((out == cuflash.flash_attention(*copies, method="mma")).all())
    whole = normal(1, 100 * 112 + 1) > 0
    mask = whole[1:].reshape(100, 112)[:, :96]
    keys = [x[:, :96] for x in copies[1:]]
    out = cuflash.flash_attention(copies[0], *keys, mask=mask, method="wgmma")
    expected = cuflash.flash_attention(copies[0], *keys, mask=mask, method="mma")
    assert bool((out == expected).all())


def test_sequences_end_to_end():
    rng = np.random.default_rng(1)
    ends = np.concatenate([[0], rng.integers(1, 400, 30).cumsum()])
    q, k, v = (normal(i, 2, int(ends[-1]), 64, dtype=np.float16) for i in range(3))
    out, lse = cuflash.flash_attention_varlen(
        q, k, v, ends, ends, causal=True, return_lse=True, method="wgmma"
    )
    for begin, end in itertools.pairwise(ends):
        own = [cupy.asnumpy(x[:, begin:end]) for x in (q, k, v)]
        expected = expect_attention(*own, causal=True)
        got = cupy.asnumpy(out[:, begin:end]), cupy.asnumpy(lse[:, begin:end])
        assert_attention_close(*got, expected)
