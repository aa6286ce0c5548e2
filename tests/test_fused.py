"""Fused chains: what is accepted and refused, the random bits, gradients by differences."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cuflash
from cuflash import fused, reference
from cuflash.problem_fused import Dropout


def operands(shape: tuple[int, ...] = (2, 3, 10), **changes: Any) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    x, vectors = rng.standard_normal(shape), rng.standard_normal((3, *shape[-1:]))
    names = ("x", "bias", "gamma", "beta")
    return {**dict(zip(names, (x, *vectors), strict=True)), "p": 0.25, "seed": 1, **changes}


# ---------------------------------------------------------------------------------------- product


@pytest.mark.parametrize(
    ("activation", "formula"),
    [
        (None, lambda x: x),
        ("relu", lambda x: np.maximum(x, 0)),
        ("gelu_tanh", lambda x: x / (1 + np.exp(-np.sqrt(8 / np.pi) * (x + 0.044715 * x**3)))),
    ],
)
def test_activations(activation: str | None, formula: Any) -> None:
    x = np.linspace(-6, 6, 49).reshape(7, 7)
    out = fused.matmul_bias_activation(x, np.eye(7), np.zeros(7), activation=activation)
    np.testing.assert_allclose(out, formula(x), rtol=1e-12, atol=1e-15)


def test_gelu_is_the_normal_distribution() -> None:
    special = pytest.importorskip("scipy.special")
    x = np.linspace(-12, 12, 49).reshape(7, 7)
    out = fused.matmul_bias_activation(x, np.eye(7), np.zeros(7), activation="gelu")
    np.testing.assert_allclose(out, x * special.ndtr(x), rtol=1e-14)


def test_relu_is_the_default_and_keeps_nan() -> None:
    a, bias = np.array([[-1.0, np.nan, 2.0]]).T, np.zeros(1)
    out = fused.matmul_bias_activation(a, np.ones((1, 1)), bias)
    np.testing.assert_array_equal(out, [[0.0], [np.nan], [2.0]])


def test_batch_axes_broadcast_as_in_matmul() -> None:
    rng = np.random.default_rng(0)
    a, b, bias = rng.standard_normal((3, 1, 4, 5)), rng.standard_normal((2, 5, 6)), np.ones(6)
    out = fused.matmul_bias_activation(a, b, bias, activation=None)
    np.testing.assert_allclose(out, a @ b + 1, rtol=1e-13)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"a": np.ones(3)}, ValueError, "a has 1 axes"),
        ({"b": np.ones((4, 5))}, ValueError, r"b has 4 rows \(shape \(4, 5\)\) but a has 3 col"),
        ({"bias": np.ones(4)}, ValueError, r"bias has shape \(4,\) but .* has \(5,\)"),
        ({"a": np.ones((2, 2, 3)), "b": np.ones((3, 3, 5))}, ValueError, "do not broadcast"),
        ({"b": np.ones((3, 5), np.float32)}, TypeError, "b has dtype float32 but a has float64"),
        ({"a": np.ones((2, 3), int)}, TypeError, "a has dtype int64; accepted are float64"),
        ({"activation": np.array(["relu"])}, TypeError, "activation must be a str or None"),
        ({"activation": "swish"}, ValueError, "'swish' is unknown; known are None, 'relu'"),
        ({"out": np.empty((2, 4))}, ValueError, r"out has shape \(2, 4\), the result has \(2, 5\)"),
        ({"out": np.empty((2, 5), np.float32)}, TypeError, "out has dtype float32"),
        ({"a": "matrix"}, TypeError, "a must be an array"),
    ],
)
def test_matmul_refuses(change: dict[str, Any], error: type, message: str) -> None:
    call: dict[str, Any] = {"a": np.ones((2, 3)), "b": np.ones((3, 5)), "bias": np.ones(5)}
    with pytest.raises(error, match=message):
        fused.matmul_bias_activation(**{**call, **change})


def test_matmul_does_not_write_over_its_operands() -> None:
    a = np.ones((4, 4))
    with pytest.raises(ValueError, match="out shares memory with a"):
        fused.matmul_bias_activation(a, np.eye(4), np.zeros(4), out=a)


# ------------------------------------------------------------------------------------ random bits


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0xFFFFFFFF,) * 4,
            (0xFFFFFFFF,) * 2,
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_is_that_of_its_authors(counter: Any, key: Any, words: Any) -> None:
    """Known answers of the Random123 library."""
    assert reference.philox(key, counter) == words


def test_lanes_are_numbered_by_elements() -> None:
    words = reference.philox((5, 7), (2**32 - 1, 0, 0, 0)), reference.philox((5, 7), (0, 1, 0, 0))
    lanes = [half for w in (*words[0], *words[1]) for half in (w % 2**16, w // 2**16)]
    kept = reference.dropout_mask((3, 5), p=0.5, seed=5 + 7 * 2**32, offset=2**32 - 1)
    np.testing.assert_array_equal(kept.ravel(), np.array(lanes[:15]) >= 2**15)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_keeps_its_share(p: float) -> None:
    """Within five standard deviations, along rows and columns too."""
    shape = (256, 512)
    ones, zeros = np.ones(shape[1]), np.zeros(shape[1])
    stats = np.zeros(shape[0])
    dy = np.tile([1.0, 3.0], (shape[0], shape[1] // 2))
    dx = fused.dropout_bias_layer_norm_vjp(
        dy, np.zeros(shape), zeros, ones, stats, stats + 1, p=p, seed=2024
    ).dx
    for axis in (None, 0, 1):
        count = dx.size if axis is None else shape[axis]
        deviation = np.abs((dx != 0).mean(axis=axis) - (1 - p))
        assert (deviation < 5 * np.sqrt(p * (1 - p) / count)).all()
    values = np.unique(np.abs(dx))
    np.testing.assert_allclose(values, [0, 1 / (1 - round(p * 65536) / 65536)], rtol=1e-14)


def test_probability_is_rounded_to_sixteen_bits() -> None:
    assert Dropout.of(0.3, 0, 0).threshold == 19661
    assert Dropout.of(0.0, 0, 0).scale == 1
    assert Dropout.of(0.3, 0, 0).scale == 65536 / (65536 - 19661)
    # All of it: nothing is left to be scaled.
    assert Dropout.of(1 - 2.0**-30, 0, 0) == (65536, 0, 0)
    y = fused.dropout_bias_layer_norm(**operands(p=1 - 2.0**-30))
    np.testing.assert_array_equal(y, np.broadcast_to(operands()["beta"], y.shape))


def test_offsets_continue_a_mask() -> None:
    whole = reference.dropout_mask((6, 8), p=0.5, seed=3, offset=10)
    part = reference.dropout_mask((2, 8), p=0.5, seed=3, offset=14)
    np.testing.assert_array_equal(whole[4:], part)


# -------------------------------------------------------------------------------------- LayerNorm


def test_without_dropout_it_is_layer_norm() -> None:
    x = operands(p=0, eps=1e-3)
    y, mean, rstd = fused.dropout_bias_layer_norm(**x, return_stats=True)
    z = x["x"] + x["bias"]
    np.testing.assert_allclose(mean, z.mean(-1), rtol=1e-13, atol=1e-15)
    np.testing.assert_allclose(rstd, 1 / np.sqrt(z.var(-1) + 1e-3), rtol=1e-13)
    expected = (z - mean[..., None]) * rstd[..., None] * x["gamma"] + x["beta"]
    np.testing.assert_allclose(y, expected, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("name", ["x", "bias", "gamma", "beta", "residual"])
def test_gradients_are_differences(name: str) -> None:
    x = operands(residual=np.random.default_rng(5).standard_normal((2, 3, 10)))
    rng = np.random.default_rng(6)
    dy, direction = rng.standard_normal((2, 3, 10)), rng.standard_normal(x[name].shape)

    def loss(step: float) -> float:
        moved = {**x, name: x[name] + step * direction}
        return float((dy * fused.dropout_bias_layer_norm(**moved)).sum())

    _, mean, rstd = fused.dropout_bias_layer_norm(**x, return_stats=True)
    given = {key: value for key, value in x.items() if key != "beta"}
    grads = fused.dropout_bias_layer_norm_vjp(dy, mean=mean, rstd=rstd, **given)
    slope = (loss(1e-6) - loss(-1e-6)) / 2e-6
    assert slope == pytest.approx((getattr(grads, f"d{name}") * direction).sum(), rel=1e-6)


def test_a_single_row_has_statistics_that_are_numbers() -> None:
    x = operands((10,))
    _, mean, rstd = fused.dropout_bias_layer_norm(**x, return_stats=True)
    assert np.ndim(mean) == np.ndim(rstd) == 0
    x.pop("beta")
    grads = fused.dropout_bias_layer_norm_vjp(np.ones(10), mean=mean, rstd=rstd, **x)
    np.testing.assert_array_equal(grads.dbeta, 1)
    assert grads.dresidual is None


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"p": 1}, ValueError, r"p must lie in \[0, 1\), got 1"),
        ({"p": -0.1}, ValueError, "p must lie in"),
        ({"p": np.nan}, ValueError, "p must be finite"),
        ({"p": "0.5"}, TypeError, "p must be a real number"),
        ({"seed": -1}, ValueError, r"seed must lie in \[0, 2\*\*64\), got -1"),
        ({"seed": 2**64}, ValueError, "seed must lie in"),
        ({"seed": 0.5}, TypeError, "seed must be an integer, got float"),
        ({"seed": True}, TypeError, "seed must be an integer, got bool"),
        ({"offset": -1}, ValueError, "offset must not be negative"),
        ({"offset": None}, TypeError, "offset must be an integer"),
        ({"eps": -1e-5}, ValueError, "eps must not be negative"),
        ({"return_stats": 1}, TypeError, "return_stats must be True or False"),
        ({"x": np.zeros((3, 0))}, ValueError, "at least one column"),
        ({"x": np.float64(1)}, ValueError, "x has 0 axes"),
        ({"x": np.zeros((3, 10), int)}, TypeError, "x has dtype int64; accepted are"),
        ({"gamma": np.ones(9)}, ValueError, r"gamma has shape \(9,\); with x .* it is \(10,\)"),
        ({"bias": np.ones(10, np.float32)}, TypeError, "bias has dtype float32; with x float64"),
        ({"residual": np.ones((3, 10))}, ValueError, r"residual has shape \(3, 10\)"),
    ],
)
def test_layer_norm_refuses(change: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        fused.dropout_bias_layer_norm(**operands(**change))


def test_gradients_want_the_statistics_of_the_forward() -> None:
    x = operands()
    x.pop("beta")
    with pytest.raises(ValueError, match=r"mean has shape \(2,\); with x .* it is \(2, 3\)"):
        fused.dropout_bias_layer_norm_vjp(x["x"], mean=np.ones(2), rstd=np.ones((2, 3)), **x)
    half = {name: x[name].astype(ml_dtypes.bfloat16) for name in ("x", "bias", "gamma")}
    with pytest.raises(TypeError, match="rstd has dtype float64; with x bfloat16 it is float32"):
        fused.dropout_bias_layer_norm_vjp(
            half["x"], **half, p=0, seed=0,
            mean=np.ones((2, 3), np.float32), rstd=np.ones((2, 3)),
        )  # fmt: skip


def test_arrays_of_other_libraries() -> None:
    import array_api_strict

    x = {
        name: array_api_strict.asarray(value) if isinstance(value, np.ndarray) else value
        for name, value in operands().items()
    }
    y = cuflash.fused.dropout_bias_layer_norm(**x)
    assert type(y) is type(x["x"])
    np.testing.assert_array_equal(np.from_dlpack(y), fused.dropout_bias_layer_norm(**operands()))
