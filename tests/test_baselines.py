"""The plain formula: what the fast paths are measured against must be right itself."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cuflash
from cuflash import fused
from cuflash.baselines import (
    materialized_attention,
    scores_fused_attention,
    unfused_dropout_bias_layer_norm,
    unfused_matmul_bias_activation,
    unfused_softmax,
)


def operands(dtype: Any = np.float64, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = {"q": (2, 4, 5, 8), "k": (2, 1, 6, 8), "v": (4, 6, 3)}
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


OPTIONS: list[dict[str, Any]] = [
    {},
    {"scale": -0.3},
    {"scale": 0},
    {"causal": True},
    {"causal": True, "query_offset": np.array([[-2], [3]])},
    {"window": (1, 2), "query_offset": 0},
    {"query_lengths": np.array([[3], [0]]), "key_lengths": np.array([[4], [6]])},
    {"key_lengths": np.array([[0, 1, 2, 6]]), "causal": True},
    {"mask": np.arange(30).reshape(5, 6) % 3 > 0},
    {"mask": np.zeros(6, bool)},
    {"bias": np.linspace(-3, 3, 4 * 5 * 6).reshape(4, 5, 6)},
    {"bias": np.where(np.arange(6) % 2, -np.inf, 0.5)},
    {"alibi_slopes": np.array([0.5, 0.25, 0.125, 0.0])},
    {"softcap": 0.7},
    {"sinks": np.array([0.3, -np.inf, 2.0, -1.0])},
    {"sinks": np.array([[1.0], [2.0]]), "mask": np.zeros(6, bool)},
    {"sinks": np.ones(4), "query_lengths": 2},
    {"softcap": 2.0, "bias": np.ones((5, 1)), "alibi_slopes": np.ones(4), "causal": True},
]


@pytest.mark.parametrize("attend", [materialized_attention, scores_fused_attention])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_it_is_the_formula(options: dict[str, Any], attend: Any) -> None:
    out, lse = attend(**operands(), **options, return_lse=True)
    expected, expected_lse = cuflash.reference.attention(**operands(), **options)
    assert (out.shape, lse.shape) == ((2, 4, 5, 3), (2, 4, 5))
    np.testing.assert_allclose(out, expected, rtol=0, atol=4e-15)
    np.testing.assert_allclose(lse, expected_lse, rtol=4e-15, atol=4e-15)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(np.float32, 1e-6), (np.float16, 1e-3), (ml_dtypes.bfloat16, 8e-3)],
    ids=["float32", "float16", "bfloat16"],
)
def test_dtypes(dtype: Any, tolerance: float) -> None:
    x = operands(dtype)
    out, lse = materialized_attention(**x, return_lse=True)
    assert out.dtype == dtype
    assert lse.dtype == np.float32
    expected, expected_lse = cuflash.reference.attention(**x)
    error = np.linalg.norm(out.astype(np.float64) - expected) / np.linalg.norm(expected)
    assert error <= tolerance
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-6, atol=1e-6)


def test_grouped_heads() -> None:
    rng = np.random.default_rng(1)
    q, k, v = rng.standard_normal((2, 6, 5, 4)), *rng.standard_normal((2, 2, 3, 7, 4))
    options: Any = {"sinks": rng.standard_normal(6), "mask": rng.random((6, 5, 7)) < 0.6}
    out, lse = materialized_attention(q, k, v, enable_gqa=True, return_lse=True, **options)
    expected = materialized_attention(
        q, k.repeat(2, axis=1), v.repeat(2, axis=1), return_lse=True, **options
    )
    np.testing.assert_allclose(out, expected[0], rtol=1e-14)
    np.testing.assert_allclose(lse, expected[1], rtol=1e-14)


def test_the_lse_is_returned_if_asked_for() -> None:
    out, _ = materialized_attention(**operands(), return_lse=True)
    np.testing.assert_array_equal(materialized_attention(**operands()), out)
    for value in (1, None, "yes"):
        with pytest.raises(TypeError, match=r"^return_lse must be True or False"):
            materialized_attention(**operands(), return_lse=value)  # type: ignore[arg-type]


def test_what_is_not_seen_does_not_count() -> None:
    x = operands()
    clean, clean_lse = materialized_attention(**x, key_lengths=4, return_lse=True)
    x["k"][..., 4:, :] = np.nan
    x["v"][..., 4:, :] = np.inf
    out, lse = materialized_attention(**x, key_lengths=4, return_lse=True)
    np.testing.assert_array_equal(out, clean)
    np.testing.assert_array_equal(lse, clean_lse)


@pytest.mark.parametrize(
    ("tq", "tk", "batch"), [(0, 3, (2,)), (3, 0, (2,)), (2, 3, (0,)), (2, 0, (0, 3)), (1, 1, ())]
)
@pytest.mark.parametrize(
    "options", [{}, {"causal": True, "query_offset": 9}, {"window": (9, 9)}, {"key_lengths": None}]
)
def test_empty_axes(tq: int, tk: int, batch: tuple[int, ...], options: dict[str, Any]) -> None:
    q, k = np.ones((*batch, tq, 4)), np.ones((*batch, tk, 4))
    if "key_lengths" in options:
        options = {"key_lengths": np.full(batch, tk), "query_lengths": np.full(batch, tq)}
    out, lse = materialized_attention(q, k, k, return_lse=True, **options)
    assert out.shape == q.shape
    np.testing.assert_array_equal(out, 1.0 if tk else 0.0)
    np.testing.assert_array_equal(lse, 2.0 if tk else -np.inf)


def test_arrays_of_other_libraries() -> None:
    import array_api_strict

    x = {name: array_api_strict.asarray(a) for name, a in operands().items()}
    out = materialized_attention(**x)
    assert type(out) is type(x["q"])
    np.testing.assert_array_equal(np.from_dlpack(out), materialized_attention(**operands()))


def test_rows_that_do_not_fit_are_taken_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    from cuflash.host import baselines

    x = operands(np.float32)
    whole = scores_fused_attention(**x, causal=True, query_lengths=4, return_lse=True)
    monkeypatch.setattr(baselines, "_SCORES", 100)
    parts = scores_fused_attention(**x, causal=True, query_lengths=4, return_lse=True)
    for got, expected in zip(parts, whole, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-6)


@pytest.mark.parametrize("axis", [-1, 0, 1])
def test_unfused_softmax(axis: int) -> None:
    x = np.random.default_rng(0).standard_normal((4, 5, 6))
    x[1, 2] = -np.inf
    np.testing.assert_allclose(
        unfused_softmax(x, axis), cuflash.reference.softmax(x, axis), rtol=1e-14, atol=1e-300
    )
    assert unfused_softmax(np.float64(3.0)) == 1
    with pytest.raises(TypeError, match="x has dtype int64"):
        unfused_softmax(np.arange(3))
    with pytest.raises(np.exceptions.AxisError):
        unfused_softmax(x, 3)


@pytest.mark.parametrize("activation", [None, "relu", "gelu", "gelu_tanh"])
def test_unfused_product(activation: str | None) -> None:
    rng = np.random.default_rng(0)
    a, b, bias = rng.standard_normal((2, 4, 5)), rng.standard_normal((5, 3)), np.arange(3.0)
    np.testing.assert_allclose(
        unfused_matmul_bias_activation(a, b, bias, activation=activation),
        fused.matmul_bias_activation(a, b, bias, activation=activation),
        rtol=1e-13,
    )


@pytest.mark.parametrize("p", [0.0, 0.3, 1 - 2.0**-30])
def test_unfused_layer_norm_has_the_fused_ones_mask(p: float) -> None:
    x = np.random.default_rng(0).standard_normal((3, 4, 9))
    vectors = np.random.default_rng(1).standard_normal((3, 9))
    options = {"p": p, "seed": 5, "offset": 2, "eps": 1e-3}
    np.testing.assert_allclose(
        unfused_dropout_bias_layer_norm(x, *vectors, **options),
        fused.dropout_bias_layer_norm(x, *vectors, **options),
        rtol=1e-12,
        atol=1e-13,
    )
