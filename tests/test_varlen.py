"""What callers of attention of sequences end to end rely on beside its values."""

import numpy as np
import pytest

import cuflash
from cuflash import flash_attention_varlen, workspace_size

ENDS_Q, ENDS_K = np.array([0, 2, 2, 5]), np.array([0, 3, 4, 9])


def operands(batch=(2,)):
    rng = np.random.default_rng(0)
    return [rng.normal(size=(*batch, *s)).astype(np.float32) for s in ((5, 8), (9, 8), (9, 3))]


BAD = [
    ("cu_seqlens_q", None, TypeError, "array"),
    ("cu_seqlens_k", 3, TypeError, "array"),
    ("cu_seqlens_q", [0, 2, 2, 5], TypeError, "array"),
    ("cu_seqlens_q", ENDS_Q.astype(float), TypeError, "int32 and int64"),
    ("cu_seqlens_k", ENDS_K.astype(np.int16), TypeError, "int32 and int64"),
    ("cu_seqlens_k", ENDS_K.astype(np.uint32), TypeError, "int32 and int64"),
    ("cu_seqlens_q", ENDS_Q[None], ValueError, r"shape \(1, 4\)"),
    ("cu_seqlens_q", ENDS_Q[:0], ValueError, r"shape \(0,\)"),
    ("cu_seqlens_q", np.int64(5), TypeError, "array"),
    ("cu_seqlens_k", ENDS_K[:3], ValueError, "length 3 .* 4"),
    ("cu_seqlens_q", np.array([1, 2, 2, 5]), ValueError, "begins with 1"),
    ("cu_seqlens_q", np.array([-1, 2, 2, 5]), ValueError, "begins with -1"),
    ("cu_seqlens_k", np.array([0, 4, 3, 9]), ValueError, "falls from 4 to 3 at index 2"),
    ("cu_seqlens_q", np.array([0, 2, 2, 6]), ValueError, "ends with 6; there are 5 tokens"),
    ("cu_seqlens_k", np.array([0, 1, 2, 2**62]), ValueError, "9 tokens"),
    ("key_lengths", np.array([3, 2, 5]), ValueError, "2 for sequence 1 of 1 keys"),
    ("key_lengths", 2, ValueError, "2 for sequence 1"),
    ("key_lengths", np.array([0, -1, 0]), ValueError, "-1"),
    ("key_lengths", np.array([1, 1]), ValueError, r"\(2,\).* broadcast to \(3,\)"),
    ("query_offset", np.zeros((2, 3), int), ValueError, "1 axes"),
    ("alibi_slopes", np.ones(3), ValueError, "broadcast"),
    ("method", "mma", ValueError, "tiled"),
    ("out", np.zeros((2, 5, 4), np.float32), ValueError, "shape"),
    ("workspace", np.zeros(3), TypeError, "uint8"),
]


@pytest.mark.parametrize(
    ("name", "value", "error", "message"), BAD, ids=[f"{b[0]}-{i}" for i, b in enumerate(BAD)]
)
def test_what_does_not_fit_is_refused_by_name(name, value, error, message):
    q, k, v = operands()
    arguments = {"cu_seqlens_q": ENDS_Q, "cu_seqlens_k": ENDS_K, name: value}
    with pytest.raises(error, match=rf"(?s){name}.*{message}"):
        flash_attention_varlen(q, k, v, **arguments)


@pytest.mark.parametrize("name", ["mask", "bias", "query_lengths"])
def test_options_of_dense_calls_are_refused(name):
    q, k, v = operands()
    with pytest.raises(TypeError, match=name):
        flash_attention_varlen(q, k, v, ENDS_Q, ENDS_K, **{name: np.ones(9)})
    with pytest.raises(ValueError, match=f"^{name} cannot"):
        workspace_size(q, k, v, varlen=True, **{name: np.ones(9, bool)})


def test_nothing_is_written_before_ends_are_refused():
    q, k, v = operands()
    out = np.full((2, 5, 3), 77, np.float32)
    with pytest.raises(ValueError, match="falls"):
        flash_attention_varlen(q, k, v, np.array([0, 3, 1, 5]), ENDS_K, out=out)
    assert (out == 77).all()


@pytest.mark.parametrize("dtype", [np.int32, np.int64, ">i4"])
@pytest.mark.parametrize("step", [1, -1, 2])
def test_ends_of_either_type_and_any_stride(dtype, step):
    q, k, v = operands()
    expected = flash_attention_varlen(q, k, v, ENDS_Q, ENDS_K)
    memory = np.zeros((2, 8), dtype)
    views = [row[::step][:4] for row in memory]
    views[0][...], views[1][...] = ENDS_Q, ENDS_K
    np.testing.assert_array_equal(flash_attention_varlen(q, k, v, *views), expected)


def test_tokens_before_heads_keep_their_order():
    q, k, v = operands((3,))
    tokens_first = [np.ascontiguousarray(x.swapaxes(0, 1)) for x in (q, k, v)]
    out = flash_attention_varlen(*[x.swapaxes(0, 1) for x in tokens_first], ENDS_Q, ENDS_K)
    assert out.swapaxes(0, 1).flags.c_contiguous
    np.testing.assert_array_equal(out, flash_attention_varlen(q, k, v, ENDS_Q, ENDS_K))


def test_options_of_heads_and_of_sequences_with_grouped_heads():
    rng = np.random.default_rng(1)
    q, (_, k, v) = rng.normal(size=(4, 5, 8)).astype(np.float32), operands()
    options = {
        "enable_gqa": True,
        "sinks": rng.normal(size=4),
        "alibi_slopes": rng.random(4),
        "key_lengths": np.array([2, 0, 5]),
        "query_offset": np.array([0, 7, -1]),
        "causal": True,
    }
    out, lse = flash_attention_varlen(q, k, v, ENDS_Q, ENDS_K, **options, return_lse=True)
    expected = cuflash.reference.attention_varlen(q, k, v, ENDS_Q, ENDS_K, **options)
    np.testing.assert_allclose(out, expected[0], rtol=0, atol=2e-6)
    np.testing.assert_allclose(lse, expected[1], rtol=0, atol=2e-6)


@pytest.mark.parametrize("ends", [[0], [0, 0], [0, 0, 0]])
@pytest.mark.parametrize("tokens", [0, 4])
def test_rows_of_no_sequence_are_empty(ends, tokens):
    q = k = v = np.full((2, tokens, 8), np.nan, np.float32)
    ends = np.array(ends, np.int32)
    lengths = np.zeros(len(ends) - 1, np.int64)
    out, lse = flash_attention_varlen(
        q, k, v, ends, ends, return_lse=True, sinks=np.ones(2), key_lengths=lengths
    )
    assert out.shape == (2, tokens, 8)
    assert (out == 0).all()
    assert (lse == -np.inf).all()


def test_outputs_and_workspace_of_the_caller():
    q, k, v = operands()
    out, lse = np.full((2, 5, 3), np.nan, np.float32), np.full((2, 5), np.nan, np.float32)
    need = workspace_size(q, k, v, varlen=True, key_lengths=np.array([1, 1, 1]), num_splits=2)
    workspace = np.zeros(need, np.uint8)
    result = flash_attention_varlen(q, k, v, ENDS_Q, ENDS_K, out=out, lse=lse, workspace=workspace)
    assert result[0] is out
    assert result[1] is lse
    with pytest.raises(ValueError, match="out shares memory with q"):
        flash_attention_varlen(q, k, k, ENDS_Q, ENDS_K, out=q)
    with pytest.raises(ValueError, match="lse shares memory with cu_seqlens_k"):
        shared = np.zeros(10, np.float32)
        ends = shared.view(np.int32)[:4]
        flash_attention_varlen(q, k, v, ENDS_Q, ends, lse=shared.reshape(2, 5))


def test_check_is_harmless_for_values_of_the_host():
    q, k, v = operands()
    out = flash_attention_varlen(q, k, v, ENDS_Q, ENDS_K, check=True)
    np.testing.assert_array_equal(out, flash_attention_varlen(q, k, v, ENDS_Q, ENDS_K))
