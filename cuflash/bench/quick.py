"""The one-minute report: each idea of the library against what it replaces, on the machine at hand.

Unfused forms and fused ones run interleaved in one process, and rates are given as shares of the
ceilings that the same run measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import cuflash

from .. import baselines, fused
from . import problems, rows, timing
from .machine import Ceilings, Machine, measure
from .problems import AttentionShape, Decode, Norm, Product, attention_flops

#: Rounds, and seconds of each competitor in a round.
ROUNDS, WINDOW = 3, 0.02
#: Options of dropout.
_DROPOUT: dict[str, Any] = {"p": 0.1, "seed": 1}

Calls = Mapping[str, Callable[[], Any]]


class Sizes(NamedTuple):
    """What is measured on one kind of machine."""

    softmax_elements: int
    softmax_lengths: Sequence[int]
    attention: Sequence[AttentionShape]
    gradients: Sequence[AttentionShape]
    decode: Sequence[Decode]
    norms: Sequence[Norm]
    products: Sequence[Product]


SIZES = {
    "host": Sizes(
        1 << 22,
        (128, 4096, 1 << 17),
        [AttentionShape(1, 4, tokens, 64) for tokens in (256, 512, 1024, 2048)],
        [AttentionShape(1, 4, tokens, 64) for tokens in (256, 512, 1024)],
        [Decode(1, 8, 2, tokens, 64, "float32") for tokens in (2048, 16384)],
        [Norm((64, 128, 512), "float32")],
        [Product(1024, 512, 512, "float32"), Product(8192, 16, 512, "float32")],
    ),
    "device": Sizes(
        1 << 27,
        (128, 1024, 8192, 1 << 16),
        [
            AttentionShape(1, 16, tokens, 64, dtype="bfloat16")
            for tokens in (512, 1024, 2048, 4096, 8192)
        ],
        # CuPy multiplies matrices of float16, not of bfloat16.
        [
            AttentionShape(1, 16, tokens, 64, dtype="float16")
            for tokens in (512, 1024, 2048, 4096, 8192)
        ],
        [Decode(8, 32, 8, tokens) for tokens in (1024, 4096, 16384)],
        [Norm((8, 4096, 4096))],
        [*problems.PRODUCTS[:1], *problems.PRODUCTS[2:3]],
    ),
}


class Step(NamedTuple):
    """A problem: what identifies its rows, what its calls do, and what makes them.

    The first call is what the others are held against.
    """

    subject: str
    problem: str
    size: int
    dtype: str
    work: float
    unit: str
    calls: Callable[[Machine], Calls]


def steps(sizes: Sizes) -> Iterator[Step]:
    """Yield the problems of a machine."""
    for n in sizes.softmax_lengths:
        shape = sizes.softmax_elements // n, n
        moved = problems.softmax_bytes(sizes.softmax_elements, 4)
        yield Step(
            *("softmax", f"{shape[0]} x {n}", n, "float32", moved, "TB/s"),
            partial(_softmax, shape=shape),
        )
    for subject, shapes, calls in (
        ("attention", sizes.attention, _attention),
        ("attention, gradients", sizes.gradients, _gradients),
    ):
        for attention in shapes:
            heads = f"B {attention.batch}, H {attention.heads}, D {attention.d}"
            work = attention_flops(attention, backward=calls is _gradients)
            yield Step(
                *(subject, heads, attention.tokens, attention.dtype, work, "TFLOP/s"),
                partial(calls, shape=attention),
            )
    for decode in sizes.decode:
        heads = f"B {decode.batch}, H {decode.heads} of {decode.key_heads}, D {decode.d}"
        yield Step(
            *("decoding", heads, decode.tokens, decode.dtype, decode.bytes, "TB/s"),
            partial(_decode, shape=decode),
        )
    for norm in sizes.norms:
        yield Step(
            *("dropout, bias, LayerNorm", " x ".join(map(str, norm.shape)), norm.shape[-1]),
            *(norm.dtype, norm.bytes, "TB/s"),
            partial(_norm, norm=norm),
        )
    for product in sizes.products:
        yield Step(
            *("matmul, bias, relu", f"{product.m} x {product.k} x {product.n}", product.k),
            *(product.dtype, product.flops, "TFLOP/s"),
            partial(_product, product=product),
        )


def _softmax(machine: Machine, *, shape: tuple[int, int]) -> Calls:
    x = machine.normal(shape, "float32", 0)
    return {
        "unfused": partial(baselines.unfused_softmax, x),
        "fused": partial(cuflash.softmax, x),
        "copy": machine.copy(x),
    }


def _attention(machine: Machine, *, shape: AttentionShape) -> Calls:
    size = (shape.batch, shape.heads, shape.tokens, shape.d)
    q, k, v = (machine.normal(size, shape.dtype, seed) for seed in range(3))
    return {
        "materialized": partial(baselines.materialized_attention, q, k, v),
        "scores fused": partial(baselines.scores_fused_attention, q, k, v),
        "flash": partial(cuflash.flash_attention, q, k, v),
    }


def _gradients(machine: Machine, *, shape: AttentionShape) -> Calls:
    size = (shape.batch, shape.heads, shape.tokens, shape.d)
    q, k, v, dout = (machine.normal(size, shape.dtype, seed) for seed in range(4))
    out, lse = cuflash.flash_attention(q, k, v, return_lse=True)
    scale = shape.d**-0.5
    weights = cuflash.softmax(q @ k.swapaxes(-1, -2) * scale)

    def by_stored_weights() -> tuple[Any, ...]:
        """Five passes over matrices of all pairs, one of them kept since the forward."""
        dscores = cuflash.softmax_vjp(dout @ v.swapaxes(-1, -2), weights) * scale
        transposed = dscores.swapaxes(-1, -2), weights.swapaxes(-1, -2)
        return dscores @ k, transposed[0] @ q, transposed[1] @ dout

    return {
        "materialized": by_stored_weights,
        "flash": partial(cuflash.flash_attention_vjp, dout, q, k, v, out, lse),
    }


def _decode(machine: Machine, *, shape: Decode) -> Calls:
    q, k, v = (machine.normal(size, shape.dtype, seed) for seed, size in enumerate(shape.shapes))
    grouped: dict[str, Any] = {"enable_gqa": True}
    return {
        "materialized": partial(baselines.materialized_attention, q, k, v, **grouped),
        "flash": partial(cuflash.flash_attention, q, k, v, **grouped),
        "copy": machine.copy(k),  # read and written: the bytes of both
    }


def _norm(machine: Machine, *, norm: Norm) -> Calls:
    x = machine.normal(norm.shape, norm.dtype, 0)
    vectors = [machine.normal(norm.shape[-1:], norm.dtype, seed) for seed in range(1, 4)]
    return {
        "unfused": partial(baselines.unfused_dropout_bias_layer_norm, x, *vectors, **_DROPOUT),
        "fused": partial(fused.dropout_bias_layer_norm, x, *vectors, **_DROPOUT),
        "copy": machine.copy(x),
    }


def _product(machine: Machine, *, product: Product) -> Calls:
    shapes = (product.m, product.k), (product.k, product.n), (product.n,)
    operands = [machine.normal(shape, product.dtype, seed) for seed, shape in enumerate(shapes)]
    return {
        "unfused": partial(baselines.unfused_matmul_bias_activation, *operands),
        "fused": partial(fused.matmul_bias_activation, *operands),
    }


class Report(NamedTuple):
    """What was measured: ceilings, and a row for each competitor of each problem."""

    ceilings: Ceilings
    rows: list[rows.Row]


def run(
    machine: Machine,
    sizes: Sizes | None = None,
    *,
    told: Callable[[int, int, str], None] = lambda done, count, name: None,
) -> Report:
    """Measure everything on a machine.

    Parameters
    ----------
    machine : Machine
        Where.
    sizes : Sizes, optional
        What; default: what fits the machine and a minute.
    told : callable, optional
        Is told how many of how many steps are done, and what is next.
    """
    sizes = SIZES[machine.name] if sizes is None else sizes
    found: list[rows.Row] = []
    todo = list(steps(sizes))
    count = 1 + len(todo)
    ceilings = measure(
        machine, window=WINDOW, told=lambda name: told(0, count, f"ceilings: {name}")
    )
    for done, step in enumerate(todo, start=1):
        told(done, count, f"{step.subject}, {step.problem}, {step.size}")
        found += _rows(step, machine, ceilings)
    told(count, count, "")
    return Report(ceilings, found)


def _rows(step: Step, machine: Machine, ceilings: Ceilings) -> Iterator[rows.Row]:
    calls = step.calls(machine)
    result = timing.compare(calls, clock=machine.clock(), rounds=ROUNDS, window=WINDOW)
    work, first = step.work / 1e12, next(iter(calls))
    roofline = ceilings.roofline
    ceiling = roofline.bandwidth if step.unit == "TB/s" else roofline.flops[step.dtype]
    for name in calls:
        timed = rows.timing(result, name, first, work, step.unit)
        yield {
            "subject": step.subject,
            "problem": step.problem,
            "size": step.size,
            "dtype": step.dtype,
            "method": name,
            "ms": timed["ms"],
            "rate": timed["rate"],
            "unit": step.unit,
            "of ceiling": timed["rate"] * 1e12 / ceiling,
            "peer": first,
            "speedup": timed["speedup"],
        }


def ceiling_rows(ceilings: Ceilings) -> list[rows.Row]:
    """Return the ceilings as rows: what, how much, and in which unit."""
    roofline = ceilings.roofline
    found: list[rows.Row] = [
        {"ceiling": "memory", "value": roofline.bandwidth / 1e12, "unit": "TB/s"}
    ]
    for dtype, rate in roofline.flops.items():
        found.append({"ceiling": f"matmul, {dtype}", "value": rate / 1e12, "unit": "TFLOP/s"})
        found.append(
            {"ceiling": f"ridge, {dtype}", "value": roofline.ridge(dtype), "unit": "FLOP/byte"}
        )
    if ceilings.launch is not None:
        found.append({"ceiling": "launch", "value": ceilings.launch * 1e6, "unit": "us"})
    return found


def by_subject(found: Sequence[rows.Row]) -> dict[str, list[rows.Row]]:
    """Return rows by their subject, in order."""
    subjects = dict.fromkeys(row["subject"] for row in found)
    return {subject: [row for row in found if row["subject"] == subject] for subject in subjects}
