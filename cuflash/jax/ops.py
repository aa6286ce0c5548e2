"""The primitive that all functions here are made of: one call of the engines inside a program.

Its derivative is a `jax.custom_vjp` of the same call, made when a derivative is asked for and not
before. That order matters: a `jax.vmap` inside a `jax.grad` has then become a batch axis, and the
gradient of what was not mapped is summed over it by the kernels, not after them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding, PartitionSpec

from ..problem_vjp import OPERAND_OF
from . import host
from .calls import (
    TARGET,
    AttentionCall,
    AttentionVjpCall,
    Call,
    NeedsCopiesError,
    Operand,
    SoftmaxCall,
    encode,
)

_GRADIENT_OF = {operand: name for name, operand in OPERAND_OF.items()}

call_p = Primitive("cuflash")
call_p.multiple_results = True


def bind(call: Call, operands: Sequence[Any]) -> list[Any]:
    """Make a call of arrays or tracers, which are its input buffers; return its outputs."""
    return call_p.bind(*_vary_alike(operands), call=call)


def _vary_alike(operands: Sequence[Any]) -> Sequence[Any]:
    """Inside `jax.shard_map`: let what is the same on all devices count as different too.

    JAX wants the operands of a call alike in that; the gradient becomes a sum over the devices.
    """
    varying = list(map(_varying_axes, operands))
    everywhere = frozenset().union(*varying)
    return [
        jax.lax.pcast(x, tuple(sorted(everywhere - mine, key=str)), to="varying")
        for x, mine in zip(operands, varying, strict=True)
    ]


def _varying_axes(x: Any) -> frozenset[str]:
    kind = jax.typeof(x)
    # Before JAX 0.10 it had another name.
    return kind.vma if hasattr(kind, "vma") else kind.manual_axis_type.varying


def _run(*operands: Any, call: Call) -> list[Any]:
    # A call is compiled as JAX's own operations are, whatever its users are debugging. Where its
    # checks find something JAX runs a program again, operation by operation: this is one.
    with jax.disable_jit(False), jax.debug_nans(False), jax.debug_infs(False):
        results = _compiled(call)(*operands)
    # An lse of -inf is no failure: it stands for no keys.
    _raise_on_special(results[:1] if isinstance(call, AttentionCall) else results)
    return results


def _raise_on_special(results: Sequence[Any]) -> None:
    """Do what `jax.debug_nans` and `jax.debug_infs` ask for."""
    for name, asked, found in (
        ("nan", jax.config.jax_debug_nans, jnp.isnan),
        ("inf", jax.config.jax_debug_infs, jnp.isinf),
    ):
        if asked:
            with jax.debug_nans(False), jax.debug_infs(False):
                special = any(bool(found(x).any()) for x in results)
            if special:
                raise FloatingPointError(f"invalid value ({name}) encountered in cuflash")


@lru_cache(maxsize=1024)
def _compiled(call: Call) -> Any:
    return jax.jit(partial(call_p.bind, call=call))


def _describe(*operands: Any, call: Call) -> list[Any]:
    return [
        operands[i].update(
            shape=x.shape,
            dtype=x.spec.dtype,
            weak_type=False,
            sharding=_spread_alike(operands[i].sharding, call.inputs[i], x),
        )
        for i, x in zip(call.like, call.outputs, strict=True)
    ]


def _spread_alike(sharding: Any, read: Operand, made: Operand) -> Any:
    """Where the axes of a mesh are explicit: spread a result over them as an input is.

    That is along the axes that both have, in the problem, with one size.
    """
    spec: list[Any] = [None] * len(made.shape)
    for to, at in zip(made.view, read.view, strict=False):
        if to is not None and at is not None and made.shape[to] == read.shape[at]:
            spec[to] = sharding.spec[at]
    return NamedSharding(sharding.mesh, PartitionSpec(*spec))


def _batch(
    operands: Sequence[Any], axes: Sequence[int | None], *, call: Call
) -> tuple[list[Any], list[int]]:
    size = next(x.shape[a] for x, a in zip(operands, axes, strict=True) if a is not None)
    return bind(call.batched(size, axes), operands), [0] * len(call.outputs)


call_p.def_impl(_run)
call_p.def_abstract_eval(_describe)
batching.primitive_batchers[call_p] = _batch

# ---------------------------------------------------------------------------------------- lowering


def _lower(*operands: Any, call: Call, platform: str) -> list[Any]:
    try:
        workspace = _prepare(call, platform)
    except NeedsCopiesError:
        return _copied(call, operands)
    results = [jax.ShapeDtypeStruct(x.shape, x.spec.dtype) for x in call.outputs]
    if workspace:
        results.append(jax.ShapeDtypeStruct((workspace,), np.uint8))
    made = jax.ffi.ffi_call(TARGET, results)(*operands, call=encode(call, workspace))
    return list(made[: len(call.outputs)])


def _prepare(call: Call, platform: str) -> int:
    if platform == "cpu":
        return host.prepare(call)
    from . import device  # only now: it needs CuPy

    return device.prepare(call)


def _copied(call: Call, operands: Sequence[Any]) -> list[Any]:
    """Make a call for which the device engine would copy operands, with copies made by XLA."""
    if isinstance(call, AttentionVjpCall):
        # Gradients that several launches add to: 16 bits would round each sum.
        wide = _in_float32(call)
        read = [x.astype(to.spec.dtype) for x, to in zip(operands, wide.inputs, strict=True)]
        made = bind(wide, read)
        return [x.astype(to.spec.dtype) for x, to in zip(made, call.outputs, strict=True)]
    assert isinstance(call, SoftmaxCall)
    # Axes that do not merge into few: rows and columns.
    order = (*(a for a in range(len(call.shape)) if a not in call.axes), *call.axes)
    kept = len(order) - len(call.axes)

    def flat(x: Any) -> Any:
        x = x.transpose(order)
        return x.reshape(math.prod(x.shape[:kept]), math.prod(x.shape[kept:]))

    seen = [
        flat(jnp.broadcast_to(see(x, operand), spec.shape))
        for x, operand, spec in zip(operands, call.operands, call.seen, strict=False)
    ]
    out_shape = [call.out.shape[a] for a in order]
    rows = math.prod(out_shape[:kept])
    out = Operand((rows, math.prod(out_shape[kept:])), call.out.dtype, (0, 1))
    (made,) = bind(
        replace(
            call,
            shape=(rows, math.prod(call.shape[a] for a in call.axes)),
            axes=(1,),
            operands=tuple(map(Operand.of, seen)),
            out=out,
        ),
        seen,
    )
    return [made.reshape(out_shape).transpose(np.argsort(order))]


def _in_float32(call: AttentionVjpCall) -> AttentionVjpCall:
    def wide(operand: Operand) -> Operand:
        return operand._replace(dtype="float32") if operand.spec.dtype.itemsize == 2 else operand

    operands = tuple(
        (name, wide(x) if name in ("q", "k", "v") else x) for name, x in call.forward.operands
    )
    forward = replace(
        call.forward, operands=operands, out=wide(call.forward.out), lse=call.forward.lse
    )
    return AttentionVjpCall(
        forward,
        tuple(map(wide, call.read)),
        tuple((name, wide(x)) for name, x in call.grads),
    )


def see(x: Any, operand: Operand) -> Any:
    """Return a buffer as the problem sees it, size 1 where it has no axis."""
    moved = x.transpose([axis for axis in operand.view if axis is not None])
    absent = [at for at, axis in enumerate(operand.view) if axis is None]
    return jnp.expand_dims(moved, absent)


for _platform in ("cpu", "cuda"):
    _rule = mlir.lower_fun(partial(_lower, platform=_platform), multiple_results=True)
    mlir.register_lowering(call_p, _rule, platform=_platform)

# ------------------------------------------------------------------------------------- derivatives


def _jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, call: Call
) -> tuple[Sequence[Any], Sequence[Any]]:
    if isinstance(call, AttentionVjpCall):
        raise NotImplementedError(
            f"the gradient of cuflash.jax.flash_attention has no derivative; {_WAY_OUT}"
        )
    primals, dense = tuple(primals), tuple(map(ad.instantiate_zeros, tangents))
    if isinstance(call, SoftmaxCall) and call.operation.endswith("_vjp"):
        (tangent,) = jax.jvp(partial(_softmax_vjp_formula, call), primals, dense)[1:]
        return bind(call, primals), [tangent]
    wanted = tuple(not isinstance(x, ad.Zero) for x in tangents)
    if isinstance(call, AttentionCall):
        for (name, _), asked in zip(call.operands, wanted, strict=True):
            if asked and name not in _GRADIENT_OF:
                raise NotImplementedError(
                    f"{name} has no gradient in cuflash.jax.flash_attention; pass "
                    f"jax.lax.stop_gradient({name}), or use cuflash.jax.materialized_attention, "
                    "the same by the plain formula"
                )
    try:
        return jax.jvp(_differentiable(call, wanted), primals, dense)
    except TypeError as error:
        if "forward-mode" not in str(error):
            raise
        way_out = _WAY_OUT if isinstance(call, AttentionCall) else f"use jax.nn's {call.operation}"
        raise NotImplementedError(
            f"functions of cuflash.jax have no derivative in forward mode; {way_out}"
        ) from error


#: For derivatives that there is no kernel for.
_WAY_OUT = (
    "for second derivatives and forward mode use cuflash.jax.materialized_attention, the same by "
    "the plain formula, inside jax.jit"
)
ad.primitive_jvps[call_p] = _jvp


@lru_cache(maxsize=1024)
def _differentiable(call: AttentionCall | SoftmaxCall, wanted: tuple[bool, ...]) -> Any:
    """Return a call as a function that JAX can pull cotangents back through, to some operands."""
    pull_back: Callable[..., Any] = (
        _attention_vjp if isinstance(call, AttentionCall) else _softmax_vjp
    )

    def plain(*operands: Any) -> list[Any]:
        return bind(call, operands)

    def forward(*operands: Any) -> tuple[list[Any], Any]:
        values = [x.value for x in operands]
        results = bind(call, values)
        return results, (values, results)

    def backward(residuals: Any, cotangents: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(pull_back(call, wanted, *residuals, cotangents))

    function = jax.custom_vjp(plain)
    function.defvjp(forward, backward, symbolic_zeros=True)
    return function


def _attention_vjp(
    call: AttentionCall,
    wanted: tuple[bool, ...],
    values: list[Any],
    results: list[Any],
    cotangents: Sequence[Any],
) -> list[Any]:
    grads = [
        (_GRADIENT_OF[name], operand)
        for (name, operand), asked in zip(call.operands, wanted, strict=True)
        if asked and name in _GRADIENT_OF
    ]
    dout, dlse = cotangents
    read, buffers = [call.out, *call.outputs], [_dense(dout), *results]
    if not isinstance(dlse, SymbolicZero):
        read.append(call.lse)
        buffers.append(dlse)
    forward = replace(call, num_splits=None, method="auto")
    vjp = AttentionVjpCall(forward, tuple(read), tuple(grads))
    order = [OPERAND_OF[name] for name, _ in grads]
    made = dict(zip(order, bind(vjp, [*values, *buffers]), strict=True)) if grads else {}
    return [made.get(name) for name, _ in call.operands]


def _dense(cotangent: Any) -> Any:
    if isinstance(cotangent, SymbolicZero):
        return jnp.zeros(cotangent.shape, cotangent.dtype)
    return cotangent


def _softmax_vjp(
    call: SoftmaxCall,
    wanted: tuple[bool, ...],
    values: list[Any],
    results: list[Any],
    cotangents: Sequence[Any],
) -> list[Any]:
    x, *where = call.operands
    of_x, of_y = (x, values[0]), (call.out, results[0])
    read = [(call.out, _dense(cotangents[0]))]
    read += [of_x, of_y] if call.operation == "logsumexp" else [of_y]
    read += zip(where, values[1:], strict=True)
    operands, buffers = zip(*read, strict=True)
    broadcasts = None in x.view
    vjp = replace(
        call,
        operation=f"{call.operation}_vjp",
        operands=tuple(operands),
        out=Operand(call.shape, x.dtype, tuple(range(len(call.shape)))) if broadcasts else x,
        method="auto",
    )
    (made,) = bind(vjp, buffers)
    return [_sum_unseen(made, x) if broadcasts else made, *[None] * len(where)]


def _sum_unseen(gradient: Any, operand: Operand) -> Any:
    """Return the gradient of a buffer, given that of what is seen of it."""
    absent = tuple(at for at, axis in enumerate(operand.view) if axis is None)
    present = [axis for axis in operand.view if axis is not None]
    return gradient.sum(absent).transpose(np.argsort(present))


def _softmax_vjp_formula(call: SoftmaxCall, *operands: Any) -> Any:
    """Return what a call for a gradient returns, in terms of JAX's own operations."""
    seen = [
        jnp.broadcast_to(see(x, operand), spec.shape)
        for x, operand, spec in zip(operands, call.operands, call.seen, strict=False)
    ]
    where = seen.pop() if call.masked else True
    total = partial(jnp.sum, axis=call.axes, keepdims=True)
    cotangent = jnp.where(where, seen[0], 0)
    if call.operation == "softmax_vjp":
        y = seen[1]
        result = y * (cotangent - total(y * cotangent))
    elif call.operation == "log_softmax_vjp":
        result = cotangent - jnp.exp(seen[1]) * total(cotangent)
    else:
        x, lse = seen[1:]
        empty = jnp.isneginf(lse)
        weights = jnp.exp(x - jnp.where(empty, 0, lse))
        result = jnp.where(empty, 0, cotangent * weights)
    result = jnp.where(where, result, 0).astype(call.out.spec.dtype)
    return _sum_unseen(result, call.out)
