"""What callers of the gradients rely on beside their values: errors, outputs, layouts, options."""

import re
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cuflash
from cuflash import AttentionGrads, flash_attention, flash_attention_vjp, workspace_size

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
SENTINEL = 77


def ones(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.ones(shape, dtype)


def call(dtype: Any = np.float32, **options: Any) -> dict[str, Any]:
    """Return all arguments of a call of batch shape (2, 4), out and lse those of the forward."""
    rng = np.random.default_rng(0)
    shapes = {"q": (2, 4, 5, 8), "k": (2, 4, 6, 8), "v": (2, 4, 6, 3)}
    x = {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
    out, lse = flash_attention(**x, **options, return_lse=True)
    dout = rng.standard_normal(out.shape).astype(dtype)
    return {"dout": dout, **x, "out": out, "lse": lse, **options}


def buffers(x: dict[str, Any]) -> AttentionGrads:
    """Return arrays to fill, of every operand that is there."""
    return AttentionGrads(
        **{
            f"d{name}": np.full(x[name].shape, SENTINEL, x[name].dtype)
            for name in ("q", "k", "v", "bias", "sinks")
            if name in x
        }
    )


@pytest.mark.parametrize(
    ("argument", "wrong", "error", "told"),
    [
        ("dout", ones(2, 4, 5, 8), ValueError, "shape (2, 4, 5, 8), the result has (2, 4, 5, 3)"),
        ("dout", ones(4, 5, 3), ValueError, "shape (4, 5, 3), the result has (2, 4, 5, 3)"),
        ("dout", ones(2, 4, 5, 3, dtype="f8"), TypeError, "dtype float64, the result is float32"),
        ("dout", None, TypeError, "must be an array"),
        ("dout", [[1.0]], TypeError, "must be an array"),
        ("out", ones(2, 4, 6, 3), ValueError, "shape (2, 4, 6, 3), the result has (2, 4, 5, 3)"),
        ("out", ones(2, 4, 5, 3, dtype="f2"), TypeError, "dtype float16, the result is float32"),
        ("out", None, TypeError, "must be an array"),
        ("lse", ones(2, 4, 5, 1), ValueError, "shape (2, 4, 5, 1), the result has (2, 4, 5)"),
        ("lse", ones(2, 4, 5, dtype="f8"), TypeError, "dtype float64, the result is float32"),
        ("lse", None, TypeError, "must be an array"),
        ("dlse", ones(2, 1, 5), ValueError, "shape (2, 1, 5), the result has (2, 4, 5)"),
        ("dlse", ones(2, 4, 5, dtype="i4"), TypeError, "dtype int32, the result is float32"),
        ("k", ones(2, 4, 6, 7), ValueError, "k has 7 features"),
        ("k", ones(2, 4, 6, 8, dtype="f8"), TypeError, "dtype float64 but q has float32"),
        ("mask", ones(6), TypeError, "a bool array is needed"),
        ("key_lengths", 7, ValueError, "the value 7, outside 0..6"),
        ("query_lengths", ones(4, 1, dtype=int), ValueError, ""),
        ("deterministic", 1, TypeError, "must be True or False"),
        ("check", "no", TypeError, "must be True or False"),
        ("enable_gqa", 0, TypeError, "must be True or False"),
        ("scale", np.inf, ValueError, "must be finite"),
        ("softcap", 0.0, ValueError, "must be positive"),
        ("method", None, TypeError, "must be a string"),
        ("method", "wgmma", ValueError, "methods that can: 'auto', 'tiled'"),
        ("method", "fast", ValueError, "methods that can run this problem: 'auto', 'tiled'"),
        ("workspace", ones(3), TypeError, "an array of uint8 is needed"),
        ("workspace", ones(3, 3, dtype="u1"), ValueError, "one contiguous axis"),
        ("grads", (None,) * 5, TypeError, "must be an AttentionGrads, got tuple"),
    ],
)
def test_refused_naming_the_argument_with_nothing_written(
    argument: str, wrong: Any, error: type[Exception], told: str
) -> None:
    x = call()
    grads = buffers(x)
    arguments = {**x, "grads": grads, argument: wrong}
    with pytest.raises(error, match=rf"^(?={argument}\b).*{re.escape(told)}"):
        flash_attention_vjp(**arguments)
    for gradient in grads[:3]:
        assert (gradient == SENTINEL).all()


@pytest.mark.parametrize(
    ("name", "wrong", "error", "told"),
    [
        ("dq", ones(2, 4, 5, 7), ValueError, "(2, 4, 5, 7) but q has (2, 4, 5, 8)"),
        ("dk", ones(4, 6, 8), ValueError, "(4, 6, 8) but k has (2, 4, 6, 8)"),
        ("dv", ones(2, 4, 6, 3, dtype="f8"), TypeError, "float64 but v has float32"),
        ("dbias", ones(2, 4, 5, 6), ValueError, "(2, 4, 5, 6) but bias has (4, 1, 6)"),
        ("dsinks", ones(4), ValueError, "dsinks was given but sinks was not"),
        ("dq", np.broadcast_to(ones(1), (2, 4, 5, 8)), ValueError, "dq is read-only"),
        ("dq", [0.0], TypeError, "must be an array"),
        ("dq", ones(2, 4, 5, 8, dtype=">f4"), TypeError, "byte-swapped"),
    ],
)
def test_buffers_that_do_not_fit_are_refused(
    name: str, wrong: Any, error: type[Exception], told: str
) -> None:
    x = call(bias=ones(4, 1, 6))
    grads = buffers(x)._replace(**{name: wrong})
    with pytest.raises(error, match=rf"^(?={name}\b).*{re.escape(told)}"):
        flash_attention_vjp(**x, grads=grads)
    for other, gradient in grads._asdict().items():
        assert other == name or gradient is None or (gradient == SENTINEL).all()


@pytest.mark.parametrize("name", ["dout", "q", "k", "v", "out", "lse", "dlse", "bias"])
def test_gradients_keep_clear_of_what_is_read(name: str) -> None:
    x = call(bias=ones(2, 4, 5, 6))
    x["dlse"] = ones(2, 4, 5)
    memory = np.zeros(4096, np.float32)
    shared = memory[1 : 1 + x[name].size].reshape(x[name].shape)
    shared[...] = x[name]
    x[name] = shared
    dk = memory[x[name].size :][:384].reshape(2, 4, 6, 8)  # one element in common
    before = memory.copy()
    with pytest.raises(ValueError, match=f"^dk shares memory with {name}$"):
        flash_attention_vjp(**x, grads=AttentionGrads(dk=dk))
    np.testing.assert_array_equal(memory, before)


def test_gradients_keep_clear_of_each_other_and_the_workspace() -> None:
    x = call()
    memory = np.zeros(1000, np.float32)
    dk, dv = memory[:384].reshape(2, 4, 6, 8), memory[383:527].reshape(2, 4, 6, 3)
    with pytest.raises(ValueError, match=r"^dv shares memory with dk$"):
        flash_attention_vjp(**x, grads=AttentionGrads(dk=dk, dv=dv))
    with pytest.raises(ValueError, match=r"^workspace shares memory with dk$"):
        flash_attention_vjp(**x, grads=AttentionGrads(dk=dk), workspace=memory.view(np.uint8))


def test_another_library_is_refused_by_name() -> None:
    import array_api_strict

    x = call()
    for name in ("dout", "out", "lse"):
        with pytest.raises(TypeError, match=f"^{name} is an array of array_api_strict but q is"):
            flash_attention_vjp(**x | {name: array_api_strict.asarray(x[name])})


@pytest.mark.parametrize(
    ("argument", "wrong", "told"),
    [
        ("dout", ones(2, 2, 2, 5, 3), "shape (2, 2, 2, 5, 3), the result has (2, 4, 5, 3)"),
        ("lse", ones(2, 2, 5), "shape (2, 2, 5), the result has (2, 4, 5)"),
        ("grads", AttentionGrads(dk=ones(2, 4, 6, 8)), "(2, 4, 6, 8) but k has (2, 2, 6, 8)"),
        ("grads", AttentionGrads(dbias=ones(2, 2, 1, 6)), "(2, 2, 1, 6) but bias has (4, 1, 6)"),
    ],
)
def test_messages_about_grouped_heads_tell_the_shapes_that_were_given(
    argument: str, wrong: Any, told: str
) -> None:
    x = call()
    x |= {"k": x["k"][:, :2], "v": x["v"][:, :2], "bias": ones(4, 1, 6)}
    with pytest.raises(ValueError, match=re.escape(told)):
        flash_attention_vjp(**x | {argument: wrong}, enable_gqa=True)


# ------------------------------------------------------------------------------- results


def test_no_gradient_without_its_operand() -> None:
    grads = flash_attention_vjp(**call())
    assert type(grads) is AttentionGrads
    assert grads.dbias is grads.dsinks is None
    grads = flash_attention_vjp(**call(bias=ones(6), sinks=ones(4)))
    assert grads.dbias.shape == (6,)
    assert grads.dsinks.shape == (4,)


def test_nothing_asked_for_is_nothing_done() -> None:
    assert flash_attention_vjp(**call(), grads=AttentionGrads()) == AttentionGrads()


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, BFLOAT16], ids=str)
def test_gradients_have_the_dtypes_of_their_operands(dtype: Any) -> None:
    bias, sinks = ones(5, 6, dtype="f2"), ones(4, dtype="f8")
    grads = flash_attention_vjp(**call(dtype, bias=bias, sinks=sinks))
    assert [x.dtype for x in grads] == [dtype] * 3 + [np.float16, np.float64]


@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16], ids=str)
def test_16_bit_operands_take_float32_results(dtype: Any) -> None:
    x = call(dtype)
    wide = {name: x[name].astype(np.float32) for name in ("dout", "out")}
    for names in (("dout",), ("out",), ("dout", "out")):
        grads = flash_attention_vjp(**x | {name: wide[name] for name in names})
        for gradient, same in zip(grads[:3], flash_attention_vjp(**x)[:3], strict=True):
            np.testing.assert_array_equal(gradient, same)


def test_allocated_gradients_lie_as_their_operands_do() -> None:
    x = call()
    for name in ("q", "k", "v"):
        x[name] = np.array(x[name].swapaxes(1, 2)).swapaxes(1, 2)
    grads = flash_attention_vjp(**x)
    for name, gradient in zip("qkv", grads, strict=False):
        assert gradient.strides == x[name].strides


def test_a_view_of_stride_0_has_a_gradient_of_its_full_shape() -> None:
    x = call()
    one = x["k"][:1]
    view = flash_attention_vjp(**x | {"k": np.broadcast_to(one, x["k"].shape)}).dk
    summed = flash_attention_vjp(**x | {"k": one}).dk
    assert (view.shape, summed.shape) == ((2, 4, 6, 8), (1, 4, 6, 8))
    np.testing.assert_allclose(view.sum(axis=0, keepdims=True), summed, rtol=1e-5, atol=1e-6)
    assert (view[0] != view[1]).any()


def test_operands_without_batch_axes_collect_from_all() -> None:
    x = call()
    k = x["k"][0, 0]
    grads = flash_attention_vjp(**x | {"k": k})
    each = flash_attention_vjp(**x | {"k": np.array(np.broadcast_to(k, x["k"].shape))})
    assert grads.dk.shape == (6, 8)
    np.testing.assert_allclose(grads.dk, each.dk.sum(axis=(0, 1)), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(grads.dq, each.dq)


def test_grouped_heads_are_those_of_two_axes() -> None:
    x = call()
    x |= {"k": x["k"][:, :2], "v": x["v"][:, :2], "bias": ones(4, 5, 6), "sinks": ones(1)}
    grads = flash_attention_vjp(**x, enable_gqa=True)
    split = {
        name: x[name].reshape(2, 2, 2, *x[name].shape[2:]) for name in ("dout", "q", "out", "lse")
    }
    split |= {"k": x["k"][:, :, None], "v": x["v"][:, :, None]}
    split |= {"bias": x["bias"].reshape(2, 2, 5, 6), "sinks": x["sinks"]}
    for gradient, same in zip(grads, flash_attention_vjp(**split), strict=True):
        np.testing.assert_array_equal(gradient, same.reshape(gradient.shape))


def test_grouped_heads_fill_buffers_of_the_shapes_given() -> None:
    x = call()
    x |= {"k": x["k"][:, :2], "v": x["v"][:, :2], "bias": ones(4, 5, 6), "sinks": ones(4)}
    grads = buffers(x)
    result = flash_attention_vjp(**x, enable_gqa=True, grads=grads)
    assert all(a is b for a, b in zip(result, grads, strict=True))
    for gradient, same in zip(grads, flash_attention_vjp(**x, enable_gqa=True), strict=True):
        np.testing.assert_array_equal(gradient, same)


@pytest.mark.parametrize("empty", ["batch", "tq", "tk"])
def test_empty_problems_have_gradients_of_zero(empty: str) -> None:
    sizes = {"batch": 3, "tq": 4, "tk": 5} | {empty: 0}
    batch, tq, tk = sizes.values()
    q, k, v = ones(batch, tq, 8), ones(1, tk, 8), ones(tk, 2)
    sinks = ones(1)
    out, lse = flash_attention(q, k, v, sinks=sinks, return_lse=True)
    grads = flash_attention_vjp(out, q, k, v, out, lse, sinks=sinks)
    for gradient, operand in zip(grads, (q, k, v), strict=False):
        assert gradient.shape == operand.shape
        assert not gradient.any()
    assert grads.dsinks == 0


def test_parts_given_the_whole_add_up() -> None:
    """Parts of the keys, with the out and lse of all, have the whole's gradients in their sum."""
    x = call(np.float64)
    whole = flash_attention_vjp(**x)
    parts = [
        flash_attention_vjp(**x | {"k": x["k"][..., keys, :], "v": x["v"][..., keys, :]})
        for keys in (slice(0, 2), slice(2, None))
    ]
    np.testing.assert_allclose(parts[0].dq + parts[1].dq, whole.dq, rtol=1e-12, atol=1e-14)
    both = np.concatenate([part.dk for part in parts], axis=-2)
    np.testing.assert_allclose(both, whole.dk, rtol=1e-12, atol=1e-14)


def test_split_computations_stay_differentiable() -> None:
    """Attention to two parts of the keys, merged, has the gradients of attention to all."""
    x = call(np.float64)
    dlse = np.random.default_rng(1).standard_normal(x["lse"].shape)
    whole = flash_attention_vjp(**x, dlse=dlse)
    halves = [
        (x["q"], x["k"][..., keys, :], x["v"][..., keys, :])
        for keys in (slice(0, 4), slice(4, None))
    ]
    parts = [flash_attention(*half, return_lse=True) for half in halves]
    merged = cuflash.merge_attention_vjp(x["dout"], dlse, *parts[0], *parts[1])
    grads = [
        flash_attention_vjp(merged[i], *half, *part, dlse=merged[i + 1])
        for i, half, part in zip((0, 2), halves, parts, strict=True)
    ]
    np.testing.assert_allclose(grads[0].dq + grads[1].dq, whole.dq, rtol=1e-12, atol=1e-14)
    for i in (1, 2):
        both = np.concatenate([grads[0][i], grads[1][i]], axis=-2)
        np.testing.assert_allclose(both, whole[i], rtol=1e-12, atol=1e-14)


# -------------------------------------------------------------------------- end to end


def test_ends_of_sequences_are_needed() -> None:
    x = call()
    for ends in ((None, np.array([0, 6])), (np.array([0, 5]), None)):
        with pytest.raises(TypeError, match=r"^cu_seqlens_. must be an array of int32 or int64"):
            cuflash.flash_attention_varlen_vjp(*x.values(), *ends)
    with pytest.raises(ValueError, match=r"^cu_seqlens_q ends with 6; there are 5 tokens"):
        cuflash.flash_attention_varlen_vjp(*x.values(), np.array([0, 6]), np.array([0, 6]))


def test_sequences_of_grouped_heads() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((heads, 7, 8)) for heads in (4, 2, 2))
    ends = np.array([0, 3, 7])
    options: Any = {"enable_gqa": True, "causal": True, "sinks": ones(4, dtype="f8")}
    out, lse = cuflash.flash_attention_varlen(q, k, v, ends, ends, return_lse=True, **options)
    dout = rng.standard_normal(out.shape)
    grads = cuflash.flash_attention_varlen_vjp(dout, q, k, v, out, lse, ends, ends, **options)
    expected = cuflash.reference.attention_varlen_vjp(dout, q, k, v, ends, ends, **options)
    for name in ("dq", "dk", "dv", "dsinks"):
        np.testing.assert_allclose(
            getattr(grads, name), getattr(expected, name), rtol=1e-12, atol=1e-13
        )


# --------------------------------------------------------------------- other libraries


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pytorch_tensors(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    x = call(np.float32)
    tensors = {name: torch.from_numpy(a) for name, a in x.items()}
    for name in ("dout", "q", "k", "v", "out"):
        tensors[name] = tensors[name].to(getattr(torch, dtype))
    grads = flash_attention_vjp(**tensors)
    q, k, v = (tensors[name].float().requires_grad_() for name in "qkv")
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    out.backward(tensors["dout"].float())
    tolerance = 1e-5 if dtype == "float32" else 5e-2
    for own, theirs in zip(grads, (q, k, v), strict=False):
        assert own.dtype == getattr(torch, dtype)
        torch.testing.assert_close(own.float(), theirs.grad, rtol=tolerance, atol=tolerance)


def test_jax_arrays() -> None:
    jax = pytest.importorskip("jax")
    x = call(np.float32)
    grads = flash_attention_vjp(**{name: jax.numpy.asarray(a) for name, a in x.items()})
    assert all(isinstance(gradient, jax.Array) for gradient in grads[:3])
    for own, same in zip(grads[:3], flash_attention_vjp(**x)[:3], strict=True):
        np.testing.assert_array_equal(np.asarray(own), same)


# --------------------------------------------------------------------------- workspace


def test_the_workspace_of_the_backward_covers_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is that of all gradients, deterministic or not, asked from descriptions alone."""
    asked: list[Any] = []

    def need(problem: Any) -> int:
        asked.append(problem)
        return 16 if problem.deterministic else 8

    monkeypatch.setattr("cuflash.host.attention_vjp_workspace", need)
    x = call(bias=ones(5, 6), sinks=ones(1))
    operands = {name: x[name] for name in ("q", "k", "v", "bias", "sinks")}
    assert workspace_size(**operands, backward=True) == 16
    described, deterministic = asked
    assert deterministic.deterministic
    with pytest.raises(ValueError, match=r"^workspace has 7 bytes; this problem needs 8$"):
        flash_attention_vjp(**x, workspace=np.empty(7, np.uint8))
    flash_attention_vjp(**x, workspace=np.empty(8, np.uint8))
    assert asked[-1].forward == described.forward
    assert asked[-1].grads == described.grads


def test_the_workspace_of_grouped_heads_is_asked_for_one_head_axis() -> None:
    shapes = {"q": (4, 5, 8), "k": (2, 6, 8), "v": (2, 6, 8), "bias": (4, 1, 6), "sinks": (4,)}
    described = {n: SimpleNamespace(shape=s, dtype="float16") for n, s in shapes.items()}
    assert type(workspace_size(**described, backward=True, enable_gqa=True)) is int
    with pytest.raises(ValueError, match=r"^method 'fast' is unknown"):
        workspace_size(**described, backward=True, enable_gqa=True, method="fast")
