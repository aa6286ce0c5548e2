"""Gradients on Hopper's tensor cores: their laws, and each way through the barriers."""

from dataclasses import replace

import cupy
import numpy as np
import pytest
from hypothesis import given, reject, settings

import cuflash
from cuflash.device.executor import device_limits
from cuflash.problem_vjp import AttentionGrads
from cuflash.testing.bounds import assert_gradients_close, expect_gradients
from cuflash.testing.gradients import GRADIENT_PROPERTIES
from cuflash.testing.problems import AttentionCase
from cuflash.testing.strategies import attention_problems
from tests.device.test_attention import normal
from tests.device.test_attention_vjp import pulled_back

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels")]

#: Of float64 by their nature.
LAWS = sorted(GRADIENT_PROPERTIES.keys() - {"adjoint_identity", "finite_differences"})


@pytest.fixture(autouse=True)
def hopper():
    if device_limits(0).compute_capability != "90":
        pytest.skip("no Hopper GPU")


def pull_back(dout, q, k, v, *results, **options):
    """Pull back by this family, of copies that it can fetch; leave out what it refuses."""
    dout, q, k, v = map(cupy.ascontiguousarray, (dout, q, k, v))
    try:
        return cuflash.flash_attention_vjp(dout, q, k, v, *results, method="wgmma", **options)
    except ValueError as error:
        if "cannot run" not in str(error):
            raise
        reject()


def fit(case):
    """Give a case what this family needs.

    That is a query and a key, widths whose rows begin at multiples of 16 bytes, dout of q's dtype,
    and keys and lengths that are shared by the same entries.
    """
    width, value_width = (-(-x // 8) * 8 for x in (case.d, case.dv))
    lengths = ("query_offset", "query_lengths", "key_lengths")
    of_entries = any(isinstance(getattr(case, name), tuple) for name in lengths)
    keys = case.k_batch if case.enable_gqa or not of_entries else case.batch_shape
    return replace(
        case,
        q_batch=case.batch_shape,
        k_batch=keys,
        v_batch=keys,
        tq=max(1, case.tq),
        tk=max(1, case.tk),
        d=width,
        dv=value_width,
        seed=case.seed + (case.seed % 5 == 1),
    )


# With up to two tiles of keys, dq is the same in whatever order they come.
PROBLEMS = attention_problems(
    dtypes=("float16", "bfloat16"),
    options=(
        "causal", "window", "query_offset", "query_lengths", "key_lengths", "sinks", "enable_gqa",
    ),
    layouts=("contiguous",),
    borders=(64, 128, 192),
    max_tokens=256,
    max_features=128,
    max_batch_axes=2,
    max_products=400_000,
).map(fit)  # fmt: skip


@pytest.mark.parametrize("law", LAWS)
def test_property(law):
    @settings(max_examples=4)
    @given(case=PROBLEMS)
    def holds(case):
        GRADIENT_PROPERTIES[law](pulled_back(pull_back), case)

    holds()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("width", [40, 128])
@pytest.mark.parametrize(
    "tokens",
    # One query, one key, one tile, one tile and a row, very many; one tile of keys and many.
    [(1, 1), (1, 700), (64, 1), (128, 128), (129, 193), (65, 129), (130, 2000), (1000, 513)],
)
def test_tiles(tokens, width, causal):
    tq, tk = tokens
    case = AttentionCase(
        q_batch=(2,), k_batch=(1,), v_batch=(1,), tq=tq, tk=tk, d=width, dv=width,
        dtype="bfloat16", causal=causal,
    )  # fmt: skip
    GRADIENT_PROPERTIES["matches_oracle"](pulled_back(pull_back), case)


def problem(entries, tokens, width, **options):
    q, k, v, dout = (normal(i, entries, tokens, width, dtype=np.float16) for i in range(4))
    out, lse = cuflash.flash_attention(q, k, v, return_lse=True, **options)
    return dout, q, k, v, out, lse


@pytest.mark.parametrize("width", [64, 128])
def test_what_is_not_finite_in_several_tiles(width):
    """Blocks walk again, with the same bits where the NaN is not seen."""
    arrays = problem(3, 500, width, causal=True)
    expected = cuflash.flash_attention_vjp(*arrays, causal=True, method="wgmma")
    arrays[0][:, 200, 3] = cupy.nan
    got = cuflash.flash_attention_vjp(*arrays, causal=True, method="wgmma")
    for name in ("dk", "dv"):
        mine, before = getattr(got, name), getattr(expected, name)
        assert bool((mine[:, 201:] == before[:, 201:]).all())
    assert bool(cupy.isnan(got.dk[:, :201]).all() & cupy.isnan(got.dv[:, :201, 3]).all())
    others = cupy.arange(500) != 200
    assert bool(cupy.isnan(got.dq[:, 200]).all())
    assert float(abs(got.dq[:, others] - expected.dq[:, others]).max()) < 1e-3


@pytest.mark.parametrize("deterministic", [False, True])
def test_repeats_are_bit_equal(deterministic):
    """But for dq, unless that is asked for, to which tiles of keys add in whatever order."""
    arrays = problem(40, 1000, 128, causal=True)
    options = {"causal": True, "method": "wgmma", "deterministic": deterministic}
    first = cuflash.flash_attention_vjp(*arrays, **options)
    grads = AttentionGrads(*(cupy.empty_like(x) for x in first[:3]))
    differ = cupy.zeros((), bool)
    for _ in range(200):
        for x in grads[:3]:
            x[...] = cupy.nan
        cuflash.flash_attention_vjp(*arrays, grads=grads, **options)
        differ |= (grads.dk != first.dk).any() | (grads.dv != first.dv).any()
        differ |= (abs(grads.dq - first.dq) > (0 if deterministic else 1e-2)).any()
        differ |= cupy.isnan(grads.dq).any()
    assert not bool(differ)


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (150, 70)}])
def test_keys_that_add_in_order(options, width):
    """Each waits for those before it, of the ones that a row sees."""
    arrays = problem(30, 1500, width, **options)
    grads = [
        cuflash.flash_attention_vjp(*arrays, method="wgmma", deterministic=order, **options)
        for order in (False, True)
    ]
    assert bool((grads[0].dk == grads[1].dk).all() & (grads[0].dv == grads[1].dv).all())
    assert float(abs(grads[0].dq - grads[1].dq).max()) < 1e-2


def test_addresses_that_the_copy_engine_cannot_read():
    """A view one element into its memory goes to another family."""
    memory = normal(0, 4, 2 * 100 * 64 + 1, dtype=np.float16)
    dout, q, k, v = (x[1:].reshape(2, 100, 64) for x in memory)
    out, lse = cuflash.flash_attention(q, k, v, return_lse=True)
    got = cuflash.flash_attention_vjp(dout, q, k, v, out, lse, method="wgmma")
    expected = expect_gradients(*map(cupy.asnumpy, (dout, q, k, v)))
    assert_gradients_close(AttentionGrads(*map(cupy.asnumpy, got[:3])), expected)


def test_sequences_end_to_end():
    """Of any lengths, 0 too, each as by itself."""
    ends = np.concatenate([[0], np.random.default_rng(1).integers(0, 400, 30).cumsum()])
    q, dout = (normal(i, 4, int(ends[-1]), 64, dtype=np.float16) for i in range(2))
    k, v = (normal(i, 1, int(ends[-1]), 64, dtype=np.float16) for i in (2, 3))
    options = {"causal": True}
    out, lse = cuflash.flash_attention_varlen(q, k, v, ends, ends, return_lse=True, **options)
    results = [
        cuflash.flash_attention_varlen_vjp(
            dout, q, k, v, out, lse, ends, ends, method=method, **options
        )
        for method in ("wgmma", "simt")
    ]
    for mine, other in zip(results[0][:3], results[1][:3], strict=True):
        scale = float(abs(other).max())
        assert float(abs(mine.astype(np.float32) - other).max()) < 4e-3 * scale
