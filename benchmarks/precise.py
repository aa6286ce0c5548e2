"""Attention in float32 and float64 on a GPU, and its gradients: speed, with the error beside it.

``python -m benchmarks.precise`` takes about ten minutes and writes
``benchmarks/results/<gpu>/precise.csv`` after every problem: D = 32, 64 and 128 at B * T = 16384
tokens of 16 heads, and 4096 short problems, as quantum Monte Carlo codes have them. The peers are
PyTorch's memory-efficient and materialised attention, JAX's xla implementation in its highest
precision, and the formula as a CuPy user writes it, all in the same rounds.

Where JAX is installed, calls are timed by the wall clock until the GPU is done: it has streams of
its own.
*error* is ||x - x*|| / ||x*|| of the first rows of the first head, x* from the oracle in extended
precision: of out, or in the backward of dq.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.attention import RESULTS, SETS, attention_of, torch_backends, vjp_of
from benchmarks.jax import Clock
from cuflash import reference
from cuflash.bench import device, peers, problems, rows, timing
from cuflash.bench.problems import AttentionShape

#: Rows whose error is measured.
ROWS = 64
#: Tokens of all sequences of a problem, and its heads.
TOKENS, HEADS = 16384, 16
SHAPES = tuple(
    AttentionShape(TOKENS // tokens, HEADS, tokens, d, dtype=dtype)
    for dtype in ("float32", "float64")
    for d in (32, 64, 128)
    for tokens in (256, 1024, 4096, 16384)
) + tuple(AttentionShape(4096, 1, 128, 64, dtype=dtype) for dtype in ("float32", "float64"))


# ------------------------------------------------------------------------------------------- peers


def formula(q: Any, k: Any, v: Any) -> peers.Call:
    """Return attention as a CuPy user writes it, with T x T weights."""
    scale = q.dtype.type(q.shape[-1] ** -0.5)
    return lambda: _weights(q, k, scale) @ v


def formula_vjp(dout: Any, q: Any, k: Any, v: Any) -> peers.Call:
    """Return its gradients: two matrices of T x T, of weights that are made again."""
    scale = q.dtype.type(q.shape[-1] ** -0.5)

    def call() -> Any:
        p = _weights(q, k, scale)
        ds = dout @ v.swapaxes(-1, -2)
        ds -= (ds * p).sum(axis=-1, keepdims=True)
        ds *= p
        ds *= scale
        return ds @ k, ds.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ dout

    return call


def _weights(q: Any, k: Any, scale: Any) -> Any:
    p = q @ k.swapaxes(-1, -2)
    p *= scale
    p -= p.max(axis=-1, keepdims=True)
    np.exp(p, out=p)
    p /= p.sum(axis=-1, keepdims=True)
    return p


def jax_attention(q: Any, k: Any, v: Any) -> peers.Call:
    """Return JAX's xla implementation, compiled, of (B, T, N, H) views of these."""
    import jax

    compiled = jax.jit(_in_highest).lower(*(operands := _to_jax(q, k, v))).compile()
    return partial(compiled, *operands)


def jax_attention_vjp(dout: Any, q: Any, k: Any, v: Any) -> peers.Call:
    """Return its gradients: the backward alone, of what its forward kept."""
    import jax

    cotangent, *operands = _to_jax(dout, q, k, v)
    _, pull_back = jax.vjp(_in_highest, *operands)
    return partial(jax.jit(pull_back).lower(cotangent).compile(), cotangent)


def _in_highest(q: Any, k: Any, v: Any) -> Any:
    import jax

    with jax.default_matmul_precision("highest"):
        return jax.nn.dot_product_attention(q, k, v, implementation="xla")


def _to_jax(*arrays: Any) -> list[Any]:
    import jax

    rows_of_heads = [x.swapaxes(1, 2).copy() for x in arrays]
    if isinstance(arrays[0], np.ndarray):
        return [jax.numpy.asarray(x) for x in rows_of_heads]
    return [jax.dlpack.from_dlpack(x) for x in rows_of_heads]


JAX = "JAX xla, highest"
PEERS = {
    False: (
        *torch_backends("efficient", "math"),
        peers.Peer(JAX, "jax", jax_attention),
        peers.Peer("CuPy formula", "cupy", formula),
    ),
    True: (
        *torch_backends("efficient", "math", backward=True),
        peers.Peer(JAX, "jax", jax_attention_vjp),
        peers.Peer("CuPy formula", "cupy", formula_vjp),
    ),
}


# ---------------------------------------------------------------------------------------- measuring


def expected(arrays: Sequence[Any], *, backward: bool) -> np.ndarray:
    """Return the first rows of out, or of dq, of the first head by the oracle."""
    # Of queries and their cotangents no row needs another's.
    first = [_on_host(x[0, 0]) for x in arrays]
    if backward:
        dout, q, k, v = first
        return reference.attention_vjp(dout[:ROWS], q[:ROWS], k, v).dq
    q, k, v = first
    return reference.attention(q[:ROWS], k, v)[0]


def error(name: str, result: Any, wanted: np.ndarray) -> float:
    """Return the relative error of the same rows of what a call returned."""
    first = result[0] if isinstance(result, tuple | list) else result
    head = first[0, :, 0] if name == JAX else first[0, 0]
    found = _on_host(head[:ROWS]).astype(np.float64)
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def _on_host(x: Any) -> np.ndarray:
    fetch = getattr(x, "get", None) or getattr(x, "cpu", None)
    return np.asarray(x if fetch is None else fetch())


def measure(
    shape: AttentionShape,
    backward: bool,
    clock: timing.Clock,
    *,
    method: str = "auto",
    rounds: int = 5,
    window: float = 0.06,
) -> list[rows.Row]:
    """Measure one problem; ours is held against each peer."""
    inputs = device.attention_inputs(shape, SETS, backward=backward)
    bind: Callable[..., peers.Call] = vjp_of if backward else attention_of
    calls = {"cuflash": [bind(method, shape, arrays) for arrays in inputs]}
    calls |= peers.willing(PEERS[backward], inputs)
    wanted = expected(inputs[0], backward=backward)
    errors = {name: error(name, of_sets[0](), wanted) for name, of_sets in calls.items()}
    result = timing.compare(calls, clock=clock, rounds=rounds, window=window)
    work = problems.attention_flops(shape, backward=backward) / 1e12
    # Alone if no peer can run it.
    return [
        {
            "pass": "backward" if backward else "forward",
            "dtype": shape.dtype,
            "B": shape.batch,
            "H": shape.heads,
            "T": shape.tokens,
            "D": shape.d,
            **rows.timing(result, "cuflash", peer, work, "TFLOP/s"),
            "error": errors["cuflash"],
            "peer error": errors[peer],
        }
        for peer in (list(calls)[1:] or list(calls))
    ]


def clock_of_all() -> timing.Clock:
    """Return a clock for the calls of every library that is here."""
    if find_spec("jax") is None:
        return device.clock()
    import cupy
    import jax

    jax.config.update("jax_enable_x64", True)
    return Clock(cupy.cuda.Device().synchronize, device.SmClock())


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.precise",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--dtypes", nargs="+", default=["float32", "float64"])
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin nothing after this")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to write to")
    chosen = parser.parse_args(arguments)
    record = rows.Record("precise", chosen.results, rows.device_environment)
    clock = clock_of_all()
    pairs = [
        (x, backward) for x in SHAPES if x.dtype in chosen.dtypes for backward in (False, True)
    ]
    for shape, backward in timing.within(chosen.seconds, pairs):
        subject = "Gradients" if backward else "Attention"
        title = f"{subject}, {shape.dtype}, B = {shape.batch}, T = {shape.tokens}, D = {shape.d}"
        record.add(title, measure(shape, backward, clock))
        peers.forget()
    record.close()


if __name__ == "__main__":
    main()
