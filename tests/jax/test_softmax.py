"""The softmax family inside JAX: what its transformations make of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cuflash.jax import log_softmax, logsumexp, softmax

OURS = {"softmax": softmax, "log_softmax": log_softmax, "logsumexp": logsumexp}


def normal(rng, *shape):
    return jnp.asarray(rng.normal(size=shape), np.float32)


@pytest.mark.parametrize("axis", [-1, (0, 2), None])
@pytest.mark.parametrize("name", OURS)
def test_gradients_are_those_of_jax(rng, name, axis):
    x = normal(rng, 3, 4, 5)
    where = jnp.asarray(rng.random((4, 5)) < 0.7).at[1].set(False)

    def total(function, **options):
        def call(x):
            result = function(x, axis=axis, **options)
            return (jnp.where(jnp.isfinite(result), result, 0) ** 2).sum()

        return jax.jit(jax.value_and_grad(call))

    ours = OURS[name]
    theirs = getattr(jax.nn, name)
    for options in ({}, {"where": where}):
        for made, expected in zip(
            total(ours, **options)(x), total(theirs, **options)(x), strict=True
        ):
            np.testing.assert_allclose(made, jnp.nan_to_num(expected), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", OURS)
def test_second_derivatives(rng, name):
    x, where = normal(rng, 2, 4), jnp.array([True, True, False, True])

    def second(function):
        return jax.jacrev(jax.jacrev(lambda x: (function(x, where=where)[..., :2] ** 2).sum()))(x)

    made, expected = (
        second(lambda x, where, f=f: jnp.atleast_2d(f(x, axis=-1, where=where)))
        for f in (OURS[name], getattr(jax.nn, name))
    )
    np.testing.assert_allclose(made, expected, atol=1e-5)
    with pytest.raises(NotImplementedError, match=f"jax.nn's {name}"):
        jax.jacfwd(OURS[name])(x)


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("axes", [(2, None), (0, 1), (None, 0)])
def test_vmap(rng, name, axes):
    x = normal(rng, *(3, 4) if axes[0] is None else (3, 4, 2))
    x = x if axes[0] in (None, 2) else jnp.moveaxis(x, 2, 0)
    where = jnp.asarray(rng.random((3, 4)) < 0.7)
    if axes[1] is not None:
        where = jnp.stack([where, ~where], axes[1])

    def call(x, where):
        return OURS[name](x, where=where, axis=0)

    def loop(x, where):
        def entry(a, axis, i):
            return a if axis is None else jnp.take(a, i, axis)

        return jnp.stack([call(entry(x, axes[0], i), entry(where, axes[1], i)) for i in range(2)])

    def gradient(function):
        def total(x):
            result = function(x, where)
            return (jnp.where(jnp.isfinite(result), result, 0) ** 2).sum()

        return jax.grad(total)(x)

    mapped = jax.vmap(call, axes)
    np.testing.assert_array_equal(mapped(x, where), loop(x, where))
    np.testing.assert_allclose(gradient(mapped), gradient(loop), atol=1e-6)


def test_results_without_their_axes():
    x = jnp.zeros((2, 3, 4))
    assert logsumexp(x, (0, 2)).shape == (3,)
    assert logsumexp(x, (0, 2), keepdims=True).shape == (1, 3, 1)
    assert logsumexp(x, None).shape == ()
    assert softmax(jnp.arange(3)).dtype == np.float32


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"axis": 3}, np.exceptions.AxisError, "axis 3"),
        ({"where": jnp.ones(4)}, TypeError, "where has dtype"),
        ({"where": "x"}, TypeError, "where must be an array, got str"),
        ({"method": "cluster"}, ValueError, "on the host engine"),
        ({"method": "mma"}, ValueError, "unknown"),
    ],
)
def test_arguments_are_refused_by_name(options, error, message):
    with pytest.raises(error, match=message):
        jax.jit(lambda x: softmax(x, **options))(jnp.ones((2, 4)))


@pytest.mark.parametrize("function", [softmax, log_softmax, logsumexp])
def test_what_is_no_array_is_refused_by_name(function):
    with pytest.raises(TypeError, match="x must be an array, got NoneType"):
        function(None)
