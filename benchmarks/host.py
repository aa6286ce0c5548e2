"""The NumPy engine against the plain formula, PyTorch's CPU attention and SciPy's softmax.

``python -m benchmarks.host`` takes two to three minutes on two idle cores and writes
``benchmarks/results/<cpu>/host.csv``. Peers that are not installed are left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import cuflash
from cuflash.bench import problems, rows
from cuflash.bench.peers import NUMPY_ATTENTION, SCIPY_SOFTMAX, TORCH_ATTENTION, Peer, installed
from cuflash.bench.problems import AttentionShape
from cuflash.bench.timing import Comparison, compare, extra_bytes

RESULTS = Path(__file__).parent / "results"

FULL_NAME, CAUSAL_NAME = "cuflash full", "cuflash causal"

#: Inputs used in rotation.
SETS = 2


@dataclass(frozen=True)
class Effort:
    """How much is measured."""

    rounds: int
    window: float
    attention: AttentionShape
    long_tokens: int
    short: Sequence[AttentionShape]
    dtypes: Sequence[AttentionShape]
    softmax_elements: int
    softmax_lengths: Sequence[int]


FULL = Effort(
    rounds=7,
    window=0.06,
    attention=problems.HOST_ATTENTION,
    long_tokens=problems.HOST_LONG_TOKENS,
    short=problems.HOST_SHORT,
    dtypes=problems.HOST_DTYPES,
    softmax_elements=problems.HOST_SOFTMAX_ELEMENTS,
    softmax_lengths=problems.HOST_SOFTMAX_LENGTHS,
)
#: Shows that everything runs, and roughly how fast.
QUICK = Effort(
    rounds=3,
    window=0.01,
    attention=replace(problems.HOST_ATTENTION, tokens=1024),
    long_tokens=4096,
    short=problems.HOST_SHORT[::5],
    dtypes=[replace(shape, tokens=256) for shape in problems.HOST_DTYPES],
    softmax_elements=2**18,
    softmax_lengths=(2**4, 2**10, 2**18),
)


def measure(effort: Effort) -> Iterator[tuple[str, list[rows.Row]]]:
    """Yield the rows of one subject after the other, with its title."""
    yield "Attention, long", long_attention(effort)
    yield "Attention, gradients", gradients(effort)
    yield "Attention, memory beyond inputs and outputs", attention_memory(effort)
    yield (
        "Attention, short and many heads",
        [row for shape in effort.short for row in attention(effort, shape, [NUMPY_ATTENTION])],
    )
    peers = installed((NUMPY_ATTENTION, TORCH_ATTENTION))
    yield (
        "Attention, dtypes",
        [row for shape in effort.dtypes for row in attention(effort, shape, peers)],
    )
    yield (
        "Softmax, last axis",
        [row for n in effort.softmax_lengths for row in softmax(effort, n)],
    )


def long_attention(effort: Effort) -> list[rows.Row]:
    """Measure full and causal attention in the same rounds, against the peers and each other."""
    full = effort.attention
    causal = replace(full, causal=True)
    torch = installed((TORCH_ATTENTION,))
    inputs = full.inputs(SETS)
    competitors = {
        FULL_NAME: [ours(*x) for x in inputs],
        CAUSAL_NAME: [ours(*x, causal=True) for x in inputs],
        NUMPY_ATTENTION.name: [NUMPY_ATTENTION.make(*x) for x in inputs],
    }
    for peer in torch:
        competitors[peer.name] = [peer.make(*x) for x in inputs]
        competitors[f"{peer.name} causal"] = [peer.make(*x, causal=True) for x in inputs]
    result = compare(competitors, rounds=effort.rounds, window=effort.window)

    found = [attention_row(full, result, FULL_NAME, NUMPY_ATTENTION.name)]
    found += [attention_row(full, result, FULL_NAME, peer.name) for peer in torch]
    found += [attention_row(causal, result, CAUSAL_NAME, FULL_NAME)]
    found += [attention_row(causal, result, CAUSAL_NAME, f"{peer.name} causal") for peer in torch]
    return found


def attention(effort: Effort, shape: AttentionShape, peers: Sequence[Peer]) -> list[rows.Row]:
    """Measure one attention problem against peers."""
    inputs = shape.inputs(SETS)
    competitors = {
        peer.name: [peer.make(*x, causal=shape.causal) for x in inputs] for peer in peers
    }
    competitors["cuflash"] = [ours(*x, causal=shape.causal) for x in inputs]
    result = compare(competitors, rounds=effort.rounds, window=effort.window)
    return [attention_row(shape, result, "cuflash", peer.name) for peer in peers]


def gradients(effort: Effort) -> list[rows.Row]:
    """Measure gradients against the forward; their speed over it is below 1."""
    found: list[rows.Row] = []
    for causal in (False, True):
        shape = replace(effort.attention, causal=causal)
        inputs = shape.inputs(SETS)
        competitors = {
            "backward": [backward(*x, causal=causal) for x in inputs],
            "forward": [ours(*x, causal=causal) for x in inputs],
        }
        result = compare(competitors, rounds=effort.rounds, window=effort.window)
        work = problems.attention_flops(shape, backward=True) / 1e9
        found.append({**describe(shape), **timing(result, "backward", "forward", work, "GFLOP/s")})
    return found


def backward(q: Any, k: Any, v: Any, *, causal: bool = False) -> Callable[[], Any]:
    """Return the call for the gradients of attention; v stands in for the cotangent."""
    out, lse = cuflash.flash_attention(q, k, v, causal=causal, return_lse=True)
    return lambda: cuflash.flash_attention_vjp(v, q, k, v, out, lse, causal=causal)


def ours(q: Any, k: Any, v: Any, *, causal: bool = False) -> Callable[[], Any]:
    """Return the call of this library that peers are compared with."""
    return lambda: cuflash.flash_attention(q, k, v, causal=causal)


def attention_row(shape: AttentionShape, result: Comparison, name: str, peer: str) -> rows.Row:
    """Describe a problem, its time and rate, and its speed over a peer's in the same rounds."""
    return {
        **describe(shape),
        **timing(result, name, peer, problems.attention_flops(shape) / 1e9, "GFLOP/s"),
    }


def describe(shape: AttentionShape) -> rows.Row:
    """Return the columns that name an attention problem."""
    return {
        "method": "tiled",
        "dtype": shape.dtype,
        "B": shape.batch,
        "H": shape.heads,
        "T": shape.tokens,
        "D": shape.d,
        "causal": shape.causal,
    }


def timing(result: Comparison, name: str, peer: str, work: float, unit: str) -> rows.Row:
    """Return the columns of a timing: `work` in `unit` times seconds, and the speed over a peer."""
    lower, median, upper = result.speedup(name, peer)
    seconds = result.median(name)
    return {
        "ms": seconds * 1e3,
        "rate": work / seconds,
        "unit": unit,
        "peer": peer,
        "peer ms": result.median(peer) * 1e3,
        "speedup": median,
        "lower": lower,
        "upper": upper,
    }


def attention_memory(effort: Effort) -> list[rows.Row]:
    """Measure the memory of full attention above inputs and outputs."""
    found: list[rows.Row] = []
    for tokens in (effort.attention.tokens, effort.long_tokens):
        shape = replace(effort.attention, tokens=tokens)
        (inputs,) = shape.inputs()
        extra = extra_bytes(ours(*inputs))
        scores = shape.batch * shape.heads * tokens**2 * problems.dtype_of(shape.dtype).itemsize
        found.append({**describe(shape), "extra MiB": extra / 2**20, "scores MiB": scores / 2**20})
    return found


def softmax(effort: Effort, n: int) -> list[rows.Row]:
    """Measure softmax over the last axis by every method of this engine."""
    shape = (effort.softmax_elements // n, n)
    rng = np.random.default_rng(0)
    inputs = [rng.standard_normal(shape, np.float32) for _ in range(SETS)]
    peers = installed((SCIPY_SOFTMAX,))
    competitors: dict[str, list[Callable[[], Any]]] = {
        peer.name: [peer.make(x) for x in inputs] for peer in peers
    }
    methods = ("auto", "naive", "fused", "online")
    for method in methods:
        competitors[method] = [softmax_by(method, x) for x in inputs]
    result = compare(competitors, rounds=effort.rounds, window=effort.window)
    gigabytes = problems.softmax_bytes(effort.softmax_elements, 4) / 1e9
    peer_names = [peer.name for peer in peers] or ["naive"]
    return [
        {
            "method": method,
            "dtype": "float32",
            "rows": shape[0],
            "N": n,
            **timing(result, method, peer, gigabytes, "GB/s"),
        }
        for method in methods
        for peer in peer_names
    ]


def softmax_by(method: str, x: Any) -> Callable[[], Any]:
    """Return a call of this library's softmax."""
    return lambda: cuflash.softmax(x, method=method)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small problems, a few seconds")
    parser.add_argument(
        "--results",
        type=Path,
        help="folder to write to; the default is benchmarks/results, or nowhere with --quick",
    )
    chosen = parser.parse_args(arguments)
    report(QUICK if chosen.quick else FULL, chosen.results or (None if chosen.quick else RESULTS))


def report(effort: Effort, folder: Path | None) -> None:
    """Print every subject's table as it is measured, then write all rows to `folder`."""
    every: list[rows.Row] = []
    for title, found in measure(effort):
        print(f"{title}\n{rows.table(found)}\n", flush=True)
        every += [{"subject": title, **row} for row in found]
    environment = rows.host_environment()
    print("\n".join(f"{name}: {value}" for name, value in environment.items() if value))
    if folder is not None:
        print(f"written: {rows.write_rows(folder, 'host', every, environment)}")


if __name__ == "__main__":
    main()
