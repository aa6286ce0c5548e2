"""Attention inside JAX on a GPU, against the same calls on CuPy arrays and JAX's own attention.

``python -m benchmarks.jax`` takes about a minute and writes ``benchmarks/results/<gpu>/jax.csv``
after every problem: bfloat16 against JAX's cudnn implementation, float32 and float64 against xla in
its default and its highest precision, forward, and forward with the gradients of q, k and v.
``--table handler`` measures the host time of the Python handler of a call, which XLA pays unless it
replays a command buffer, and writes ``jax_handler.csv``.

All calls are compiled programs, called from Python, whose arrays are (B, T, N, H). *scratch* is
what XLA plans beside arguments and results, by its own statistics.
"""

from __future__ import annotations

import argparse
import math
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib import import_module
from itertools import product
from pathlib import Path
from time import perf_counter, perf_counter_ns
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

import cuflash
from cuflash.bench import device, problems, rows, timing
from cuflash.bench.problems import AttentionShape

RESULTS = Path(__file__).parent / "results"

#: Problems in the order of their table: each forward, and with gradients.
SHAPES = (
    AttentionShape(2, 16, 8192, 128, False, "bfloat16"),
    AttentionShape(2, 16, 8192, 128, True, "bfloat16"),
    AttentionShape(1, 8, 8192, 64, False, "float32"),
    AttentionShape(1, 4, 8192, 64, False, "float64"),
)
OURS, CUPY = "cuflash.jax", "cuflash on CuPy"
#: Share of the speed on CuPy arrays to keep inside JAX, by the size of an element.
SHARES = {2: 0.97, 4: 0.95, 8: 0.95}
#: The most microseconds of host time that a call may take.
HANDLER_MICROSECONDS = 40


class Clock:
    """Wall-clock time of calls that JAX or CuPy queue, until the GPU is done with all of them."""

    megahertz = math.nan

    def __init__(self, synchronize: Callable[[], Any], meter: Callable[[], float]) -> None:
        self._synchronize, self._meter = synchronize, meter

    def seconds(self, calls: Sequence[timing.Call], count: int, start: int) -> float:
        """Run `count` calls in rotation and return their time."""
        import jax

        self._synchronize()
        began = perf_counter()
        for i in range(start, start + count):
            result = calls[i % len(calls)]()
        self.megahertz = self._meter()
        jax.block_until_ready(result)
        self._synchronize()
        return perf_counter() - began


class Competitor(NamedTuple):
    """A call, and the bytes that XLA plans for it beside arguments and results, if it does."""

    call: timing.Call
    scratch: float = math.nan


def jax_attentions(shape: AttentionShape) -> dict[str, Callable[..., Any]]:
    """Return the functions of q, k and v to be compiled, by name; ours first."""
    import jax

    from cuflash.jax import dot_product_attention

    def in_highest(*operands: Any, **options: Any) -> Any:
        with jax.default_matmul_precision("highest"):
            return jax.nn.dot_product_attention(*operands, **options)

    theirs: dict[str, Callable[..., Any]] = {}
    if problems.dtype_of(shape.dtype).itemsize == 2:
        theirs["JAX cudnn"] = partial(jax.nn.dot_product_attention, implementation="cudnn")
    else:
        theirs |= {"JAX xla": jax.nn.dot_product_attention, "JAX xla, highest": in_highest}
    return {
        name: partial(function, is_causal=shape.causal)
        for name, function in {OURS: dot_product_attention, **theirs}.items()
    }


def gradients(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of q, k, v and the cotangent of out: out and the gradients."""
    import jax

    def call(q: Any, k: Any, v: Any, dout: Any) -> Any:
        out, pull_back = jax.vjp(function, q, k, v)
        return out, *pull_back(dout)

    return call


def competitors(shape: AttentionShape, backward: bool) -> dict[str, Competitor]:
    """Return the calls that can do a problem, compiled, ours and that on CuPy arrays first."""
    import jax

    size = shape.batch, shape.tokens, shape.heads, shape.d
    arrays = [device.normal(size, shape.dtype, seed) for seed in range(3 + backward)]
    operands = [
        jax.numpy.asarray(x) if isinstance(x, np.ndarray) else jax.dlpack.from_dlpack(x)
        for x in arrays
    ]
    found: dict[str, Competitor] = {}
    for name, function in jax_attentions(shape).items():
        try:
            program = jax.jit(gradients(function) if backward else function)
            compiled = program.lower(*operands).compile()
            jax.block_until_ready(compiled(*operands))
        except Exception as error:
            if name == OURS:
                raise
            print(f"{name} is left out: {str(error).partition(chr(10))[0]}", flush=True)
            continue
        memory = compiled.memory_analysis()
        scratch = memory.temp_size_in_bytes if memory is not None else math.nan
        found[name] = Competitor(partial(compiled, *operands), scratch)
    on_cupy = partial(cupy_call, *(x.swapaxes(1, 2) for x in arrays), causal=shape.causal)
    return {OURS: found.pop(OURS), CUPY: Competitor(on_cupy), **found}


def cupy_call(q: Any, k: Any, v: Any, dout: Any = None, *, causal: bool) -> Any:
    """Attend to CuPy arrays, and pull dout back if there is one."""
    options: dict[str, Any] = {"causal": causal, "query_offset": 0}
    out, lse = cuflash.flash_attention(q, k, v, **options, return_lse=True)
    if dout is None:
        return out
    return out, cuflash.flash_attention_vjp(dout, q, k, v, out, lse, **options)


def measure(
    shape: AttentionShape,
    backward: bool,
    clock: timing.Clock,
    *,
    rounds: int = 7,
    window: float = 0.06,
) -> list[rows.Row]:
    """Measure one problem; ours is held against all others."""
    found = competitors(shape, backward)
    calls = {name: competitor.call for name, competitor in found.items()}
    result = timing.compare(calls, clock=clock, rounds=rounds, window=window)
    flops = problems.attention_flops(shape)
    if backward:
        flops += problems.attention_flops(shape, backward=True)
    itemsize = problems.dtype_of(shape.dtype).itemsize
    wanted = {CUPY: SHARES[itemsize], "JAX cudnn": 1.0}
    table = []
    for peer in [name for name in found if name != OURS]:
        row = {
            "pass": "forward, backward" if backward else "forward",
            "dtype": shape.dtype,
            "B": shape.batch,
            "H": shape.heads,
            "T": shape.tokens,
            "D": shape.d,
            "causal": shape.causal,
            **rows.timing(result, OURS, peer, flops / 1e12, "TFLOP/s"),
            "scratch MiB": found[OURS].scratch / 2**20,
            "peer scratch MiB": found[peer].scratch / 2**20,
            "target": wanted.get(peer, ""),
            "met": "",
        }
        if peer in wanted:
            row["met"] = problems.meets(row["speedup"], wanted[peer])
        table.append(row)
    return table


# ------------------------------------------------------------------------------------- the handler


def handler_calls() -> dict[str, Callable[[], Any]]:
    """Return small programs of one call each, compiled, by what they do."""
    import jax

    from cuflash.jax import flash_attention, softmax

    def normal(dtype: str) -> Any:
        x = np.random.default_rng(0).standard_normal((1, 2, 64, 64))
        return jax.numpy.asarray(x, jax.numpy.dtype(dtype))

    calls: dict[str, Callable[[], Any]] = {}
    for dtype in ("float32", "bfloat16"):
        x = normal(dtype)
        out, pull_back = jax.vjp(lambda q: flash_attention(q, q, q), x)
        for name, function in (
            ("attention", lambda q: flash_attention(q, q, q)),
            ("gradients", pull_back),
            ("softmax", softmax),
        ):
            argument = out if name == "gradients" else x
            compiled = jax.jit(function).lower(argument).compile()
            calls[f"{name}, {dtype}"] = partial(compiled, argument)
    return calls


class Timed(NamedTuple):
    """A handler that notes how long each call takes, and the name that XLA knows it by.

    `forget` makes it forget where buffers lay in the calls before.
    """

    target: str
    handler: Any
    nanoseconds: list[int]
    forget: Callable[[], None]


@cache
def timed_handler(platform: str) -> Timed:
    """Register a handler that is not fit for command buffers: XLA runs it each time."""
    import jax

    from cuflash.jax import ffi_abi

    module = import_module(f"cuflash.jax.{'host' if platform == 'cpu' else 'device'}")
    spent: list[int] = []
    # All that Python does: reading the call's frame, too.
    with mock.patch.object(ffi_abi, "Handler", lambda function: function):
        handle = ffi_abi.handler(lambda *call: module.execute(*call))

    def timed(frame: Any) -> int | None:
        began = perf_counter_ns()
        error = handle(frame)
        spent.append(perf_counter_ns() - began)
        return error

    bound = getattr(module, "bound", None)
    forget = bound.cache_clear if bound else lambda: None
    timer = Timed(f"cuflash_timed_{platform}", ffi_abi.Handler(timed), spent, forget)
    jax.ffi.register_ffi_target(timer.target, jax.ffi.pycapsule(timer.handler), platform=platform)
    return timer


def measure_handlers(platform: str, count: int = 500) -> list[rows.Row]:
    """Return the host time of the handler in each of some calls.

    The buffers of a program that runs again and again lie at places that were seen before, here
    one of nine; a call with buffers at new places writes parameter blocks of its own.
    """
    import jax

    from cuflash.jax import ops

    timer = timed_handler(platform)
    with mock.patch.object(ops, "TARGET", timer.target):
        calls = handler_calls()
    found = []
    for (name, call), places in product(calls.items(), ("seen", "new")):
        for _ in range(20):
            jax.block_until_ready(call())
        timer.nanoseconds.clear()
        kept = deque(maxlen=8)  # so that results lie elsewhere than those of the last calls
        for _ in range(count):
            if places == "new":
                timer.forget()
            kept.append(jax.block_until_ready(call()))
        lower, median, upper = np.quantile(timer.nanoseconds, (0.25, 0.5, 0.75)) / 1e3
        row = {"call": name, "places": places, "us": float(median)}
        row |= {"lower": float(lower), "upper": float(upper), "target": HANDLER_MICROSECONDS}
        found.append({**row, "met": bool(median <= HANDLER_MICROSECONDS)})
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.jax",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--table", choices=("attention", "handler"), default="attention")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin nothing after this")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to write to")
    chosen = parser.parse_args(arguments)
    import cupy
    import jax

    jax.config.update("jax_enable_x64", True)
    if chosen.table == "handler":
        record = rows.Record("jax_handler", chosen.results, rows.device_environment)
        record.add("Host time of the handler", measure_handlers("CUDA"))
        record.close()
        return
    record = rows.Record("jax", chosen.results, rows.device_environment)
    clock = Clock(cupy.cuda.Device().synchronize, device.SmClock())
    pairs = [(shape, backward) for shape in SHAPES for backward in (False, True)]
    for shape, backward in timing.within(chosen.seconds, pairs):
        title = f"{shape.dtype}, D = {shape.d}{', causal' if shape.causal else ''}"
        record.add(
            f"{title}{', with gradients' if backward else ''}", measure(shape, backward, clock)
        )
    record.close()


if __name__ == "__main__":
    main()
