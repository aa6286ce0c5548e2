"""Attention inside JAX: what its transformations make of it."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

import cuflash
import cuflash.host
from cuflash import reference
from cuflash.jax import (
    dot_product_attention,
    flash_attention,
    logsumexp,
    materialized_attention,
    softmax,
)
from cuflash.testing.bounds import assert_attention_close, assert_gradients_close, expect_gradients
from cuflash.testing.problems import AttentionCase
from cuflash.testing.properties import ATTENTION_PROPERTIES

OPTIONS = [
    {},
    {"causal": True, "softcap": 3.0},
    {"window": (2, None), "query_offset": 1, "scale": -0.4},
    {"key_lengths": np.array([[3], [7]]), "query_lengths": np.int64(4), "causal": True},
]


def normal(rng, *shape, dtype=np.float32):
    return jnp.asarray(rng.normal(size=shape), dtype)


@pytest.fixture
def qkv(rng):
    return [normal(rng, 2, 3, *shape) for shape in ((5, 8), (7, 8), (7, 6))]


def loss(function, **options):
    """A scalar that depends on all of out and lse."""

    def call(*operands):
        out, lse = function(*operands, **options, return_lse=True)
        return (out**2).sum() + jnp.where(jnp.isfinite(lse), jnp.sin(lse), 0).sum()

    return call


def close(actual, expected, tolerance=1e-5):
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_jit_has_the_bits_of_numpy(qkv, options):
    traced = jax.jit(lambda *x: flash_attention(*x, **options, return_lse=True))(*qkv)
    expected = cuflash.flash_attention(*map(np.asarray, qkv), **options, return_lse=True)
    for x, y in zip(traced, expected, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
def test_dtypes(dtype):
    case = AttentionCase(q_batch=(2,), k_batch=(2,), tq=9, tk=11, dtype=dtype, causal=True)
    inputs = case.build()
    with jax.enable_x64(True):
        function = jax.jit(lambda *x: flash_attention(*x, causal=True, return_lse=True))
        out, lse = function(*map(jnp.asarray, inputs[:3]))
        assert out.dtype == dtype
        assert lse.dtype == ("float64" if dtype == "float64" else "float32")
        assert_attention_close(np.asarray(out), np.asarray(lse), case)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_plain_formula_is_the_same_and_its_gradients(qkv, options):
    ours, formula = (loss(f, **options) for f in (flash_attention, materialized_attention))
    close(ours(*qkv), formula(*qkv))
    close(jax.grad(ours, (0, 1, 2))(*qkv), jax.jit(jax.grad(formula, (0, 1, 2)))(*qkv))


@pytest.mark.parametrize(
    "case",
    [
        AttentionCase(
            q_batch=(2, 4),
            k_batch=(2, 2),
            v_batch=(1, 2),
            tq=5,
            tk=9,
            d=6,
            dv=3,
            enable_gqa=True,
            mask=(4, 1, 9),
            bias=(2, 1, 5, 9),
            alibi_slopes=(4,),
            sinks=(2, 4),
            key_lengths=(2, 1),
            query_lengths=3,
            seed=seed,
        )
        for seed in range(3)
    ],
    ids=range(3),
)
def test_the_plain_formula_keeps_the_contract(case):
    def call(*operands, **options):
        with jax.enable_x64(True):
            arrays = {
                name: jnp.asarray(x) if isinstance(x, np.ndarray) else x
                for name, x in options.items()
            }
            results = materialized_attention(*map(jnp.asarray, operands), **arrays)
            return jax.tree.map(np.asarray, results)

    ATTENTION_PROPERTIES["matches_oracle"](call, case)


def test_gradients_of_bias_and_sinks(rng, qkv):
    # As wide as the batch, and broadcast along every axis in turn.
    bias, sinks = normal(rng, 3, 1, 7), normal(rng, 3)

    def call(q, k, v, bias, sinks):
        return flash_attention(q, k, v, bias=bias, sinks=sinks, causal=True)

    out, pull_back = jax.vjp(call, *qkv, bias, sinks)
    dout = normal(rng, *out.shape)
    grads = cuflash.AttentionGrads(*map(np.asarray, pull_back(dout)))
    arrays = [np.asarray(x) for x in (dout, *qkv)]
    options = {"bias": np.asarray(bias), "sinks": np.asarray(sinks), "causal": True}
    assert_gradients_close(grads, expect_gradients(*arrays, **options))


def test_only_what_is_differentiated_is_computed(rng, qkv):
    bias = normal(rng, 2, 3, 5, 7)
    made = str(jax.make_jaxpr(jax.grad(loss(flash_attention, bias=bias)))(*qkv))
    assert re.findall(r"grads=\(\('(\w+)'", made) == ["dq"]
    assert "dbias" not in made


def test_the_engine_is_told_to_be_deterministic(qkv, monkeypatch):
    pull_back, told = cuflash.host.attention_vjp, []

    def note(problem, *arguments):
        told.append(problem.deterministic)
        return pull_back(problem, *arguments)

    monkeypatch.setattr(cuflash.host, "attention_vjp", note)
    for deterministic in (False, True):
        of = loss(flash_attention, deterministic=deterministic)
        jax.block_until_ready(jax.grad(of)(*qkv))
    assert told == [False, True]


def test_a_cotangent_that_is_zero_is_not_read(qkv):
    def of_out(*x):
        return flash_attention(*x, return_lse=True)[0].sum()

    def of_lse(*x):
        return flash_attention(*x, return_lse=True)[1].sum()

    reads = {
        function: len(re.findall(r"cuflash\[", text)) and text.rpartition("cuflash[")[2]
        for function in (of_out, of_lse)
        for text in [str(jax.make_jaxpr(jax.grad(function))(*qkv))]
    }
    # dout, out and lse; with a cotangent of lse one more.
    count = {f: len(re.findall("Operand", text)) for f, text in reads.items()}
    assert count[of_lse] == count[of_out] + 1
    dq = jax.grad(of_lse)(*qkv)
    close(dq, jax.grad(lambda *x: materialized_attention(*x, return_lse=True)[1].sum())(*qkv))


def test_second_derivatives_are_refused_by_name(qkv):
    def call(q):
        return flash_attention(q, *qkv[1:]).sum()

    for function in (jax.jacrev(jax.grad(call)), jax.jit(jax.jacrev(jax.grad(call)))):
        with pytest.raises(NotImplementedError, match="materialized_attention"):
            function(qkv[0])

    def formula(q):
        return materialized_attention(q, *qkv[1:]).sum()

    q = qkv[0][0, 0, :2]
    assert jax.jit(jax.hessian(lambda q: formula(q[None, None])))(q).shape == (2, 8, 2, 8)


def test_a_gradient_that_there_is_none_of_is_refused_by_name(qkv):
    def call(slopes, q):
        return flash_attention(q, *qkv[1:], alibi_slopes=slopes).sum()

    slopes = jnp.full(qkv[0].shape[-3], 0.5, jnp.float32)
    for gradient in (jax.grad(call), jax.jit(jax.grad(call, argnums=(0, 1)))):
        with pytest.raises(NotImplementedError, match=r"alibi_slopes has no gradient"):
            gradient(slopes, qkv[0])
    assert jax.grad(call, argnums=1)(slopes, qkv[0]).shape == qkv[0].shape

    def fixed(slopes, q):
        return call(jax.lax.stop_gradient(slopes), q)

    assert not jax.grad(fixed)(slopes, qkv[0]).any()


# ---------------------------------------------------------------------------------- vmap, sharding


def attend_with_bias(q, k, v, bias):
    return flash_attention(q, k, v, bias=bias, causal=True)


@pytest.mark.parametrize(
    "axes", [(0, 0, 0, 0), (1, None, -1, None), (None, None, None, 2), (None, 3, None, None)]
)
def test_vmap_of_any_axis_is_a_loop(rng, axes):
    shapes = ((3, 5, 8), (3, 7, 8), (3, 7, 6), (3, 5, 7))
    operands = [
        normal(rng, *shape) if axis is None else jnp.moveaxis(normal(rng, 2, *shape), 0, axis)
        for shape, axis in zip(shapes, axes, strict=True)
    ]

    def entry(i, operands):
        pairs = zip(operands, axes, strict=True)
        return [x if axis is None else jnp.take(x, i, axis) for x, axis in pairs]

    def loop(*operands):
        return jnp.stack([attend_with_bias(*entry(i, operands)) for i in range(2)])

    mapped = jax.vmap(attend_with_bias, axes)
    close(mapped(*operands), loop(*operands))

    def of(function):
        return jax.jit(jax.grad(lambda *x: (function(*x) ** 2).sum(), (0, 1, 2, 3)))

    close(of(mapped)(*operands), of(loop)(*operands))
    each = jax.vmap(of(attend_with_bias), axes)(*operands)
    close([x[1] for x in each], of(attend_with_bias)(*entry(1, operands)))


def test_nested_vmap_and_jacobians(rng):
    q, k, v = normal(rng, 4, 2, 3, 8), normal(rng, 5, 2, 8), normal(rng, 2, 5, 6)
    out = jax.vmap(jax.vmap(flash_attention, (1, 1, 0)), (2, None, None))(q, k, v)
    assert out.shape == (3, 2, 4, 6)
    for i, j in itertools.product(range(3), range(2)):
        close(out[i, j], flash_attention(q[:, j, i], k[:, j], v[j]))
    q, k, v = q[:, 0, 0], k[:, 0], v[0]
    jacobians = jax.jacrev(flash_attention, (0, 1, 2))(q, k, v)
    close(jacobians, jax.jacrev(materialized_attention, (0, 1, 2))(q, k, v))


def operations(function, *operands):
    """Return the names of what XLA runs."""
    text = jax.jit(function).lower(*operands).compile().as_text()
    entry = text[text.index("ENTRY") :]
    return set(re.findall(r"= \S+ ([a-z-]+)\(", re.sub(r"\([^()]*\) (?=custom-call)", "x ", entry)))


ONLY_THE_CALL = {"parameter", "custom-call", "get-tuple-element", "bitcast", "tuple"}


def test_nothing_is_copied_or_repeated(rng, qkv):
    _, k, v = qkv
    mapped = jax.vmap(flash_attention, (2, None, None))
    assert operations(mapped, normal(rng, 2, 3, 4, 5, 8), k, v) <= ONLY_THE_CALL
    grouped = normal(rng, 2, 5, 6, 8), normal(rng, 2, 7, 2, 8), normal(rng, 2, 7, 2, 8)
    assert operations(dot_product_attention, *grouped) <= ONLY_THE_CALL
    by_token = normal(rng, 2, 5, 3, 8)
    moved = operations(lambda q: flash_attention(q.swapaxes(1, 2), k, v), by_token)
    assert not moved <= ONLY_THE_CALL


def test_the_gradient_of_a_shared_bias_is_summed_by_the_call(rng, qkv):
    bias = normal(rng, 3, 5, 7)

    def total(bias):
        return jax.vmap(attend_with_bias, (0, 0, 0, None))(*qkv, bias).sum()

    made = operations(jax.grad(total), bias)
    assert "reduce" not in made
    expected = sum(
        jax.grad(lambda bias, i=i: attend_with_bias(*(x[i] for x in qkv), bias).sum())(bias)
        for i in range(2)
    )
    close(jax.grad(total)(bias), expected)


@pytest.mark.parametrize("check", [True, False])
def test_shard_map_over_batch_and_heads(rng, check):
    if len(jax.devices("cpu")) < 8:
        pytest.skip("JAX was started with one device")
    shapes = ((4, 2, 5, 8), (4, 2, 7, 8), (4, 2, 7, 6), (2, 5, 7))
    operands = [normal(rng, *shape) for shape in shapes]
    mesh = jax.make_mesh((4, 2), ("b", "h"), axis_types=(AxisType.Auto,) * 2)
    both, heads = PartitionSpec("b", "h"), PartitionSpec("h")
    sharded = jax.shard_map(
        attend_with_bias,
        mesh=mesh,
        in_specs=(both, both, both, heads),
        out_specs=both,
        check_vma=check,
    )

    def of(function):
        return jax.jit(
            jax.value_and_grad(lambda *x: (function(*x) ** 2).sum(), argnums=(0, 1, 2, 3))
        )

    close(of(sharded)(*operands), of(attend_with_bias)(*operands))
    assert operations(sharded, *operands) <= {*ONLY_THE_CALL, "copy"}


def test_meshes_with_explicit_axes(rng):
    """There a result's type says how it is spread: as q or the operand of a gradient, if it can."""
    if len(jax.devices("cpu")) < 4:
        pytest.skip("JAX was started with one device")
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)

    def spread(spec, *shape):
        return normal(rng, *shape), jax.sharding.NamedSharding(mesh, PartitionSpec(*spec))

    def of(function):
        def total(*x):
            out, lse = function(*x)
            return (out**2).sum() + lse.sum(), (out, lse)

        return jax.jit(jax.value_and_grad(total, (0, 1, 2), has_aux=True))

    def with_lse(q, k, v):
        return flash_attention(q, k, v, return_lse=True)

    def with_residual(q, k, v):
        return dot_product_attention(q, k, v, is_causal=True, return_residual=True)

    def by_formula(q, k, v):
        return materialized_attention(q, k, v, bias=q[..., :1, :1], return_lse=True)

    def of_softmax(q, k, v):
        return softmax(q) * v[:, 0].sum(), logsumexp(q) + k.sum()

    for function, operands, specs in (
        # Tokens; axes that are not there; features, which those of v are not as many as.
        (
            with_lse,
            [
                spread((None, "a", "b"), 4, 6, 8),
                spread(("a",), 6, 8),
                spread((None, "b"), 2, 4, 6, 5),
            ],
            [(None, None, "a", None), (None, None, "a")],
        ),
        (
            by_formula,
            [spread(("a", "b"), 2, 4, 6, 8)] + [spread(("a",), 2, 1, 7, 8) for _ in range(2)],
            [("a", "b", None, None), ("a", "b", None)],
        ),
        (
            with_residual,
            [spread(("a", None, "b"), 2, 5, 4, 8)]
            + [spread(("a", None, "b"), 2, 7, 2, 8) for _ in range(2)],
            [("a", None, "b", None), ("a", None, "b")],
        ),
        (
            of_softmax,
            [spread(("a", "b"), 4, 8), spread((), 1), spread((), 1, 1)],
            [("a", "b"), ("a",)],
        ),
    ):
        arrays, shardings = zip(*operands, strict=True)
        expected = of(function)(*arrays)
        with jax.set_mesh(mesh):
            made = of(function)(*map(jax.device_put, arrays, shardings))
        close(jax.tree.map(np.asarray, made), jax.tree.map(np.asarray, expected))
        (_, results), grads = made
        assert [x.sharding.spec for x in results] == [PartitionSpec(*x) for x in specs]
        for gradient, sharding in zip(grads, shardings, strict=True):
            assert gradient.sharding.is_equivalent_to(sharding, gradient.ndim)


def test_without_jit(qkv):
    with jax.disable_jit():
        out = flash_attention(*qkv)
        dq = jax.grad(lambda q: flash_attention(q, *qkv[1:]).sum())(qkv[0])
    close(out, flash_attention(*qkv))
    close(dq, jax.grad(lambda q: flash_attention(q, *qkv[1:]).sum())(qkv[0]))


@pytest.mark.parametrize("wrapped", [lambda f: f, jax.jit])
def test_debugging_of_special_values(qkv, wrapped):
    q, k, v = qkv
    spoilt = [v.at[..., 0, 0].set(x) for x in (jnp.nan, jnp.inf)]
    with jax.debug_nans(True), jax.debug_infs(True):
        # No key is seen: lse is -inf, and no failure.
        wrapped(lambda q: flash_attention(q, k, v, key_lengths=0))(q)
        for v, name in zip(spoilt, ("nan", "inf"), strict=True):
            with pytest.raises(FloatingPointError, match=rf"\({name}\) encountered in cuflash"):
                wrapped(lambda v: flash_attention(q, k, v))(v)


def test_the_loops_of_jax(qkv):
    q, k, v = qkv

    def step(carry, query):
        out = flash_attention(query, k, v[..., :8].repeat(2, -1)[..., :8])
        return carry + out, out.sum()

    def total(q):
        carry, sums = jax.lax.scan(jax.checkpoint(step), jnp.zeros_like(q), jnp.stack([q, 2 * q]))
        return carry.sum() + sums.sum()

    def plain(q):
        outs = [step(0, x)[0] for x in (q, 2 * q)]
        return 2 * sum(out.sum() for out in outs)

    close(jax.jit(jax.value_and_grad(total))(q), jax.value_and_grad(plain)(q))


# --------------------------------------------------------------------------------------- arguments


def test_lengths_may_be_traced(qkv):
    function = jax.jit(lambda n: flash_attention(*qkv, key_lengths=n, causal=True))
    for n in ([[2], [7]], [[0], [1]]):
        lengths = np.array(n)
        expected = flash_attention(*qkv, key_lengths=lengths, causal=True)
        np.testing.assert_array_equal(function(lengths), expected)
    assert function._cache_size() == 1


@pytest.mark.parametrize("formula", [flash_attention, materialized_attention])
@pytest.mark.parametrize("name", ["query_offset", "query_lengths", "key_lengths"])
def test_a_number_may_be_traced(qkv, formula, name):
    function = jax.jit(lambda n: formula(*qkv, **{name: n}, causal=True))
    for n in (1, 4):
        close(function(n), formula(*qkv, **{name: n}, causal=True))
    assert function._cache_size() == 1


@pytest.mark.parametrize("formula", [flash_attention, materialized_attention])
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint32"])
def test_lengths_and_offsets_of_any_integers(qkv, formula, dtype):
    lengths = {"key_lengths": np.array([[2], [7]]), "query_lengths": np.array([[5], [4]])}
    narrow = {name: jnp.asarray(x, dtype) for name, x in lengths.items()}
    close(formula(*qkv, **narrow, causal=True), flash_attention(*qkv, **lengths, causal=True))
    offset = jnp.asarray([[3], [0]], dtype)
    expected = flash_attention(*qkv, query_offset=np.array([[3], [0]]), window=(1, 0))
    close(formula(*qkv, query_offset=offset, window=(1, 0)), expected)


@pytest.mark.parametrize("formula", [flash_attention, materialized_attention])
def test_numbers_that_32_bits_do_not_hold(qkv, formula):
    everything = flash_attention(*qkv)
    for offset in (1 << 40, jnp.full((1, 1), (1 << 31) - 1, jnp.int32)):
        close(formula(*qkv, query_offset=offset, causal=True), everything)
    close(formula(*qkv, window=(1 << 40, 1 << 50)), everything)
    wide = np.full((1, 1), 1 << 40)
    with pytest.raises(ValueError, match="query_offset has values outside int32"):
        formula(*qkv, query_offset=wide, causal=True)
    with jax.enable_x64(True):
        close(formula(*qkv, query_offset=wide, causal=True), everything)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"mask": np.ones((5, 7))}, TypeError, "mask has dtype float32"),
        ({"bias": np.ones((4, 7))}, ValueError, "bias has shape"),
        ({"causal": 1}, TypeError, "causal must be True or False"),
        ({"key_lengths": 8}, ValueError, "key_lengths has the value 8"),
        ({"key_lengths": np.array([[8], [0]])}, ValueError, "key_lengths has the value 8"),
        ({"key_lengths": np.array([1, 2])}, ValueError, "key_lengths has shape"),
        ({"key_lengths": [[8], [0]]}, ValueError, "key_lengths has the value 8"),
        ({"key_lengths": True}, TypeError, "key_lengths must be an integer"),
        ({"bias": "x"}, TypeError, "bias must be an array, got str"),
        ({"bias": 1}, TypeError, "bias has dtype int"),
        ({"method": "naive"}, ValueError, "methods that can"),
        ({"method": "mma"}, ValueError, "cannot run this problem on the host"),
        ({"deterministic": 1}, TypeError, "deterministic must be"),
        ({"return_lse": 1}, TypeError, "return_lse must be"),
    ],
)
def test_arguments_are_refused_by_name(qkv, options, error, message):
    with pytest.raises(error, match=message):
        jax.jit(lambda *x: flash_attention(*x, **options))(*qkv)


def test_what_is_no_array_is_named(qkv):
    with pytest.raises(TypeError, match="q must be an array, got NoneType"):
        flash_attention(None, *qkv[1:])


def test_values_of_lengths(qkv):
    lengths = jnp.array([[8], [1]])
    with pytest.raises(ValueError, match="key_lengths has the value 8"):
        flash_attention(*qkv, key_lengths=lengths, check=True)
    with pytest.raises(TypeError, match="key_lengths is traced"):
        jax.jit(lambda x: flash_attention(*qkv, key_lengths=x, check=True))(lengths)
    # Where the values are known only as the program runs, it fails with the message.
    with pytest.raises(jax.errors.JaxRuntimeError, match="key_lengths has the value 8"):
        jax.block_until_ready(flash_attention(*qkv, key_lengths=lengths))
    # The process, and JAX in it, are well after that.
    assert np.isfinite(flash_attention(*qkv, key_lengths=lengths - 1)).all()


# ---------------------------------------------------------------------------------- as jax.nn's own

B, T, S, N, K, H = 2, 5, 7, 4, 2, 8
LENGTHS = {"query_seq_lengths": np.array([3, 5]), "key_value_seq_lengths": np.array([7, 4])}


@pytest.mark.parametrize(
    ("heads", "options"),
    [((N, N), {"scale": 0.3, "bias": (B, N, T, S)}), ((N, 1), {**LENGTHS, "mask": (B, N, 1, S)})]
    + [
        ((N, K), options)
        for options in (
            {},
            {"scale": 0.3, "is_causal": True},
            {"bias": (B, N, T, S), "mask": (1, 1, T, S)},
            {"bias": (1, N, T, 1), "mask": (B, 1, 1, S), "is_causal": True},
            {"local_window_size": (2, 1)},
            {"local_window_size": 1, "is_causal": True},
            {**LENGTHS, "is_causal": True},
            {"key_value_seq_lengths": LENGTHS["key_value_seq_lengths"], "mask": (B, N, T, S)},
        )
    ],
    ids=str,
)
def test_as_jax_computes_it(rng, heads, options):
    query = normal(rng, B, T, heads[0], H)
    key, value = normal(rng, B, S, heads[1], H), normal(rng, B, S, heads[1], H)
    options = dict(options)
    for name in ("bias", "mask"):
        if name in options:
            options[name] = normal(rng, *options[name])
    if "mask" in options:
        options["mask"] = (options["mask"] > -0.5).at[..., :1].set(True)
    for name in LENGTHS.keys() & options.keys():
        options[name] = jnp.asarray(options[name], jnp.int32)

    def of(function):
        def total(*operands):
            out, residual = function(*operands, **options, return_residual=True)
            return (out**2).sum(), (out, residual)

        return jax.value_and_grad(total, (0, 1, 2), has_aux=True)

    (_, (out, residual)), grads = of(dot_product_attention)(query, key, value)
    (_, (theirs, their_residual)), their_grads = of(jax.nn.dot_product_attention)(query, key, value)
    close((out, *grads), (theirs, *their_grads))
    # JAX gives a query past its length the logsumexp of what it masks with.
    used = jnp.isfinite(residual)
    close(jnp.where(used, residual, 0), jnp.where(used, their_residual, 0))


def test_without_a_batch_axis_and_by_name(rng):
    query, key = normal(rng, T, N, H), normal(rng, S, K, H)
    bias = normal(rng, 1, N, T, S)
    ours = dot_product_attention(query, key, key, bias, return_residual=True)
    close(ours, jax.nn.dot_product_attention(query, key, key, bias, return_residual=True))
    handed_over = dot_product_attention(query, key, key, implementation="xla")
    np.testing.assert_array_equal(handed_over, jax.nn.dot_product_attention(query, key, key))


def test_lengths_past_the_array_mean_all_tokens(rng):
    query, key = normal(rng, B, T, N, H), normal(rng, B, S, K, H)
    lengths = {
        "query_seq_lengths": jnp.array([T + 1, 2], jnp.int32),
        "key_value_seq_lengths": jnp.array([3, S + 9], jnp.int32),
    }
    ours = dot_product_attention(query, key, key, **lengths)
    none = dict.fromkeys(lengths, jnp.zeros(B, jnp.int32))
    np.testing.assert_array_equal(dot_product_attention(query, key, key, **none), 0)
    close(ours, jax.nn.dot_product_attention(query, key, key, **lengths))
    wide = {name: np.asarray(x, np.int64) for name, x in lengths.items()}
    wide["key_value_seq_lengths"][1] += 1 << 32
    close(dot_product_attention(query, key, key, **wide), ours)


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_lengths_of_a_dtype_that_does_not_hold_the_number_of_tokens(rng, dtype):
    query, key = normal(rng, B, T, N, H), normal(rng, B, 300, K, H)
    lengths = np.array([3, 120])
    ours = dot_product_attention(query, key, key, key_value_seq_lengths=lengths.astype(dtype))
    wide = jnp.asarray(lengths, jnp.int32)
    close(ours, jax.nn.dot_product_attention(query, key, key, key_value_seq_lengths=wide))
    traced = jax.jit(lambda n: dot_product_attention(query, key, key, key_value_seq_lengths=n))
    close(traced(jnp.asarray(lengths, dtype)), ours)


def test_where_jax_differs(rng):
    """A row that sees no key is 0 here; and float64 is float64."""
    query, key = normal(rng, 1, T, N, H), normal(rng, 1, S, N, H)
    mask = jnp.ones((1, 1, T, S), bool).at[:, :, 2].set(False)
    out, residual = dot_product_attention(query, key, key, mask=mask, return_residual=True)
    assert not out[:, 2].any() and jnp.isneginf(residual[:, 2]).all()
    assert jax.nn.dot_product_attention(query, key, key, mask=mask)[:, 2].all()
    with jax.enable_x64(True):
        query, key = (x.astype(jnp.float64) for x in (query, key))
        out = np.asarray(dot_product_attention(query, key, key))
        heads_first = [np.asarray(x).swapaxes(1, 2) for x in (query, key)]
        expected = reference.attention(heads_first[0], heads_first[1], heads_first[1])[0]
        np.testing.assert_allclose(out.swapaxes(1, 2), expected.astype(float), rtol=1e-13)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"query": (2, 5, 8)}, ValueError, "key has shape"),
        ({"query": (1, 5, 4, 8)}, ValueError, "key has shape"),
        ({"query": (5, 8)}, ValueError, "query has 2 axes"),
        ({"query": None}, TypeError, "query must be an array, got NoneType"),
        ({"query": (2, 5, 3, 8)}, ValueError, "query has 3 heads, no multiple of the 2 of key"),
        ({"value": (2, 6, 2, 8)}, ValueError, "value has shape"),
        ({"bias": (2, 3, 5, 7)}, ValueError, "bias has shape"),
        ({"query_seq_lengths": (3,)}, ValueError, "query_seq_lengths has shape"),
        ({"key_value_seq_lengths": 1.5}, TypeError, "key_value_seq_lengths has dtype"),
    ],
)
def test_what_does_not_fit_is_named(change, error, message):
    shapes = {"query": (2, 5, 4, 8), "key": (2, 7, 2, 8), "value": (2, 7, 2, 8)} | change
    arguments = {
        name: np.ones(x, int if "lengths" in name else np.float32) if isinstance(x, tuple) else x
        for name, x in shapes.items()
    }
    with pytest.raises(error, match=message):
        dot_product_attention(**arguments)
