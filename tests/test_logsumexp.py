"""What callers of the logsumexp of scores rely on beside its values: errors, outputs, layouts."""

import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import scipy.special

import cuflash
from cuflash import AttentionGrads, flash_logsumexp, flash_logsumexp_vjp, reference, workspace_size

SENTINEL = 77


def ones(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.ones(shape, dtype)


def call(dtype: Any = np.float32, **options: Any) -> dict[str, Any]:
    """Return the arguments of a call of batch shape (2, 4)."""
    rng = np.random.default_rng(0)
    shapes = {"q": (2, 4, 5, 8), "k": (2, 4, 6, 8)}
    x = {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
    return {**x, **options}


def pulled(x: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of the gradients of a call."""
    lse = flash_logsumexp(**x)
    return {"dlse": np.random.default_rng(1).standard_normal(lse.shape).astype(lse.dtype), **x} | {
        "lse": lse
    }


def test_is_the_logsumexp_of_the_products() -> None:
    x = call(np.float64)
    products = x["q"] @ x["k"].swapaxes(-1, -2)
    lse = flash_logsumexp(**x, scale=2.0)
    np.testing.assert_allclose(lse, scipy.special.logsumexp(2 * products, axis=-1), 1e-14)
    grads = flash_logsumexp_vjp(np.ones_like(lse), **x, lse=lse, scale=2.0)
    weights = scipy.special.softmax(2 * products, axis=-1)
    np.testing.assert_allclose(grads.dq, 2 * weights @ x["k"], 1e-13)
    np.testing.assert_allclose(grads.dk, 2 * weights.swapaxes(-1, -2) @ x["q"], 1e-13)
    assert grads.dv is None
    assert grads.dbias is None
    assert grads.dsinks is None


def test_oracle_agrees() -> None:
    x = call(np.float64, bias=ones(6, dtype="f8"), causal=True)
    lse = flash_logsumexp(**x)
    np.testing.assert_allclose(lse, reference.attention_logsumexp(**x), 1e-14, 1e-14)
    dlse = np.cos(np.arange(lse.size)).reshape(lse.shape)
    grads, expected = (
        flash_logsumexp_vjp(dlse, lse=lse, **x),
        reference.attention_logsumexp_vjp(dlse, **x),
    )
    for name in ("dq", "dk", "dbias"):
        np.testing.assert_allclose(getattr(grads, name), getattr(expected, name), 1e-13, 1e-14)


@pytest.mark.parametrize(
    ("argument", "wrong", "error", "told"),
    [
        ("q", None, TypeError, "must be an array"),
        ("q", ones(8), ValueError, "q has 1 axes"),
        ("k", None, TypeError, "must be an array"),
        ("k", ones(1)[0], ValueError, "k has 0 axes"),
        ("k", ones(6), ValueError, "k has 1 axes"),
        ("k", ones(2, 4, 6, 7), ValueError, "k has 7 features"),
        ("k", ones(3, 6, 8), ValueError, "which do not broadcast with those of q (2, 4, 5, 8)"),
        ("k", ones(2, 4, 6, 8, dtype="f8"), TypeError, "dtype float64 but q has float32"),
        ("mask", ones(6), TypeError, "a bool array is needed"),
        ("bias", ones(7), ValueError, "does not broadcast to (2, 4, 5, 6)"),
        ("key_lengths", 7, ValueError, "the value 7, outside 0..6"),
        ("num_splits", 0, ValueError, "must be at least 1"),
        ("method", "wgmma", ValueError, "methods that can: 'auto', 'tiled'"),
        ("workspace", ones(3), TypeError, "an array of uint8 is needed"),
        ("enable_gqa", 0, TypeError, "must be True or False"),
        ("out", ones(2, 4, 5, 1), ValueError, "shape (2, 4, 5, 1), the result has (2, 4, 5)"),
        ("out", ones(2, 4, 5, dtype="f8"), TypeError, "dtype float64, the result is float32"),
        ("out", np.broadcast_to(ones(1), (2, 4, 5)), ValueError, "out is read-only"),
    ],
)
def test_refused_naming_the_argument(
    argument: str, wrong: Any, error: type[Exception], told: str
) -> None:
    out = np.full((2, 4, 5), SENTINEL, np.float32)
    with pytest.raises(error, match=rf"^(?={argument}\b).*{re.escape(told)}"):
        flash_logsumexp(**{**call(), "out": out, argument: wrong})
    assert (out == SENTINEL).all()


@pytest.mark.parametrize(
    ("argument", "wrong", "error", "told"),
    [
        ("dlse", None, TypeError, "must be an array"),
        ("dlse", ones(2, 1, 5), ValueError, "shape (2, 1, 5), the result has (2, 4, 5)"),
        ("lse", None, TypeError, "must be an array"),
        ("lse", ones(2, 4, 5, dtype="f8"), TypeError, "dtype float64, the result is float32"),
        ("k", ones(2, 4, 6, 7), ValueError, "k has 7 features"),
        ("deterministic", 1, TypeError, "must be True or False"),
        ("workspace", ones(3, 3, dtype="u1"), ValueError, "one contiguous axis"),
        ("grads", (None,) * 5, TypeError, "must be an AttentionGrads, got tuple"),
    ],
)
def test_gradients_refused_naming_the_argument(
    argument: str, wrong: Any, error: type[Exception], told: str
) -> None:
    x = pulled(call())
    grads = AttentionGrads(dq=np.full(x["q"].shape, SENTINEL, np.float32))
    with pytest.raises(error, match=rf"^(?={argument}\b).*{re.escape(told)}"):
        flash_logsumexp_vjp(**{**x, "grads": grads, argument: wrong})
    assert (grads.dq == SENTINEL).all()


def test_there_is_no_gradient_of_values() -> None:
    x = pulled(call())
    with pytest.raises(ValueError, match="dv was given but there is no v"):
        flash_logsumexp_vjp(**x, grads=AttentionGrads(dv=np.zeros_like(x["k"])))


def test_out_keeps_clear_of_what_is_read() -> None:
    memory = np.zeros(1000, np.float32)
    x = call() | {"q": memory[:320].reshape(2, 4, 5, 8)}
    with pytest.raises(ValueError, match="out shares memory with q"):
        flash_logsumexp(**x, out=memory[300:340].reshape(2, 4, 5))


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", ml_dtypes.bfloat16])
def test_result_is_of_the_accumulators_type(dtype: Any) -> None:
    assert flash_logsumexp(**call(dtype)).dtype == ("f8" if dtype == "float64" else "f4")


def test_outputs_given_are_filled_and_returned() -> None:
    x = pulled(call(bias=ones(4, 1, 6), sinks=ones(4)))
    out = np.full((5, 4, 2), SENTINEL, np.float32).T
    assert flash_logsumexp(**{n: y for n, y in x.items() if "lse" not in n}, out=out) is out
    np.testing.assert_array_equal(out, x["lse"])
    expected = flash_logsumexp_vjp(**x)
    grads = AttentionGrads(
        **{n: np.full_like(y, SENTINEL) for n, y in expected._asdict().items() if y is not None}
    )
    assert grads.dv is None
    result = flash_logsumexp_vjp(**x, grads=grads)
    for name in ("dq", "dk", "dbias", "dsinks"):
        assert getattr(result, name) is getattr(grads, name)
        np.testing.assert_array_equal(getattr(grads, name), getattr(expected, name))


def test_grouped_heads() -> None:
    rng = np.random.default_rng(2)
    q, k = rng.standard_normal((2, 6, 5, 8)), rng.standard_normal((2, 3, 7, 8))
    repeated = np.repeat(k, 2, axis=1)
    out = np.empty((2, 6, 5))
    lse = flash_logsumexp(q, k, enable_gqa=True, out=out)
    assert lse is out
    np.testing.assert_allclose(lse, flash_logsumexp(q, repeated), 1e-14)
    dlse = rng.standard_normal(lse.shape)
    grads = flash_logsumexp_vjp(dlse, q, k, lse, enable_gqa=True)
    copies = flash_logsumexp_vjp(dlse, q, repeated, lse)
    np.testing.assert_allclose(grads.dq, copies.dq, 1e-13, 1e-15)
    np.testing.assert_allclose(grads.dk, copies.dk.reshape(2, 3, 2, 7, 8).sum(axis=2), 1e-13, 1e-15)


@pytest.mark.parametrize("tq, tk", [(0, 3), (3, 0), (0, 0)])
def test_no_tokens(tq: int, tk: int) -> None:
    q, k = np.ones((2, tq, 4)), np.ones((2, tk, 4))
    lse = flash_logsumexp(q, k)
    np.testing.assert_array_equal(lse, np.full((2, tq), -np.inf))
    grads = flash_logsumexp_vjp(np.ones_like(lse), q, k, lse)
    np.testing.assert_array_equal(grads.dq, np.zeros_like(q))
    np.testing.assert_array_equal(grads.dk, np.zeros_like(k))


def test_a_row_that_sees_nothing_and_a_sink() -> None:
    q, k, mask = np.ones((3, 2)), np.ones((4, 2)), np.array([[True], [False], [True]])
    np.testing.assert_array_equal(np.isneginf(flash_logsumexp(q, k, mask=mask)), ~mask[:, 0])
    lse = flash_logsumexp(q, k, mask=mask, sinks=np.array(0.5))
    assert lse[1] == 0.5
    dsinks = flash_logsumexp_vjp(np.ones(3), q, k, lse, mask=mask, sinks=np.array(0.5)).dsinks
    np.testing.assert_allclose(dsinks, np.exp(0.5 - lse).sum(), 1e-14)


def test_parts_of_the_keys_merge_by_logaddexp() -> None:
    x = call(np.float64)
    parts = [flash_logsumexp(x["q"], x["k"][..., keys, :]) for keys in np.split(np.arange(6), [2])]
    np.testing.assert_allclose(np.logaddexp(*parts), flash_logsumexp(**x), 1e-14)


def test_workspace_size_without_values() -> None:
    x = call()
    assert workspace_size(**x, v=None) == 0 == workspace_size(**x, v=None, backward=True)
    with pytest.raises(TypeError, match=r"^k must be an array"):
        workspace_size(x["q"], None, None)
    assert (
        flash_logsumexp(**x, workspace=np.empty(0, np.uint8)) == cuflash.flash_logsumexp(**x)
    ).all()
