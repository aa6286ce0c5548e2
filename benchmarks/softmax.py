"""Softmax over the last axis on a GPU: every method, the peers, and the copy of the same bytes.

``python -m benchmarks.softmax`` measures all row lengths and dtypes in about eight minutes, most
of them spent on torch.compile, and writes ``benchmarks/results/<gpu>/softmax.csv`` after each.
``--quick`` takes under 40 seconds.

A row holds one method's rate, counted as one read and one write whatever the method really moves,
against one peer. With the device copy as the peer, *speedup* is the share of the copy's rate.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import cuflash
from cuflash.bench import device, peers, problems, rows, timing

RESULTS = Path(__file__).parent / "results"

COPY = "device copy"
METHODS = ("auto", "fused", "online", "naive")
#: Inputs used in rotation.
SETS = 2


@dataclass(frozen=True)
class Effort:
    """How much is measured."""

    lengths: Sequence[int] = problems.SOFTMAX_LENGTHS
    dtypes: Sequence[str] = ("float32", "bfloat16", "float16", "float64")
    elements: int = problems.SOFTMAX_ELEMENTS
    peers: Sequence[peers.Peer] = peers.DEVICE_SOFTMAX
    rounds: int = 7
    window: float = 0.06


FULL = Effort()
#: The peers that need no compilation of seconds.
READY = tuple(peer for peer in peers.DEVICE_SOFTMAX if peer.name != "torch.compile")
QUICK = Effort(lengths=(1024, 4096, 32768), dtypes=("float32",), elements=2**28, peers=READY)


def measure(effort: Effort, dtype: str, n: int) -> list[rows.Row]:
    """Measure one row length of one dtype."""
    shape = (effort.elements // n, n)
    inputs = [device.normal(shape, dtype, seed) for seed in range(SETS)]
    ours = {method: calls for method in METHODS if (calls := softmax_by(method, inputs))}
    theirs = peers.willing(effort.peers, [(x,) for x in inputs])
    competitors = {COPY: [device.copy(x) for x in inputs], **ours, **theirs}
    result = timing.compare(
        competitors, clock=device.clock(), rounds=effort.rounds, window=effort.window
    )

    terabytes = problems.softmax_bytes(math.prod(shape), inputs[0].itemsize) / 1e12
    pairs = [(name, COPY) for name in competitors]
    pairs += [("auto", peer) for peer in theirs]
    pairs += [(method, "fused") for method in ("naive", "online") if "fused" in ours]
    return [
        {
            "method": name,
            "dtype": dtype,
            "rows": shape[0],
            "N": n,
            **rows.timing(result, name, peer, terabytes, "TB/s"),
            **target(name, peer, dtype, n, result),
        }
        for name, peer in pairs
    ]


def softmax_by(method: str, inputs: Iterable[Any]) -> list[Callable[[], Any]]:
    """Return this library's calls; none if the method cannot run rows of this length."""
    calls = [lambda x=x: cuflash.softmax(x, method=method) for x in inputs]
    try:
        calls[0]()
    except ValueError:
        return []
    return calls


def target(name: str, peer: str, dtype: str, n: int, result: timing.Comparison) -> rows.Row:
    """Return the target of a method's time over fused's, and whether it is met."""
    applies = peer == "fused" and dtype == "float32" and n == problems.OVER_FUSED_LENGTH
    if not applies or name not in problems.OVER_FUSED:
        return {"target": "", "met": ""}
    low, high = problems.OVER_FUSED[name]
    times = result.speedup(peer, name).median
    return {"target": f"{low:g} to {high:g} times as long", "met": low <= times <= high}


def report(effort: Effort, folder: Path | None, seconds: float = math.inf) -> None:
    """Measure dtype by dtype while the time lasts, print, and write what there is."""
    grid = [(dtype, n) for dtype in effort.dtypes for n in effort.lengths]
    record = rows.Record("softmax", folder, rows.device_environment)
    done = 0
    for dtype, n in timing.within(seconds, grid):
        found = measure(effort, dtype, n)
        printed = [row for row in found if row["peer"] in (COPY, "fused")]
        record.add(f"Softmax, {dtype}, N = {n}", found, printed)
        peers.forget()
        done += 1
    record.close()
    if done < len(grid):
        print(f"out of time: {len(grid) - done} of {len(grid)} problems are not measured")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.softmax",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="three row lengths in float32")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin nothing after this")
    parser.add_argument("--lengths", type=int, nargs="+", help="row lengths N")
    parser.add_argument("--dtypes", nargs="+", help="of float32, bfloat16, float16, float64")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument(
        "--results",
        type=Path,
        help="folder to write to; the default is benchmarks/results, or nowhere with --quick",
    )
    chosen = parser.parse_args(arguments)
    base = QUICK if chosen.quick else FULL
    effort = replace(
        base,
        lengths=chosen.lengths or base.lengths,
        dtypes=chosen.dtypes or base.dtypes,
        peers=READY if chosen.no_compile else base.peers,
    )
    report(effort, chosen.results or (None if chosen.quick else RESULTS), chosen.seconds)


if __name__ == "__main__":
    main()
