"""The softmax family on a GPU: every method, the peers, and the device copy.

``python -m benchmarks.softmax`` measures all row lengths and dtypes in about a quarter of an hour,
a third of it spent on torch.compile. It writes ``benchmarks/results/<gpu>/softmax.csv`` after each,
and at the end ``softmax.png`` beside it: rates over N. ``--axis 0`` measures rows side by side
instead of contiguous ones, ``--quick`` takes under a minute. A run can be done in parts, each with
``--append``; ``--plot`` draws what was measured before.

A row holds one method's rate, counted as one read or write of every operand whatever the method
really moves, against one peer. With the device copy as the peer, *speedup* is the share of the
copy's rate. *regime* is what `auto` takes: a method, `columns` for rows side by side, `short` and
`stream` for contiguous rows of few elements and for many long ones, or `split` where few long rows
are spread over the GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import cuflash
from cuflash.bench import charts, device, peers, problems, rows, timing
from cuflash.bench.softmax_peers import softmax_peers

RESULTS = Path(__file__).parent / "results"

COPY = "device copy"
METHODS = ("auto", "fused", "cluster", "online", "naive")
#: Columns that name a problem.
KEY = ("operation", "dtype", "N", "axis")
#: Inputs used in rotation.
SETS = 2


class Problem(NamedTuple):
    """An operation on rows of `n` elements, which lie in the last axis of a matrix or the first."""

    operation: str
    dtype: str
    n: int
    axis: int = -1


@dataclass(frozen=True)
class Effort:
    """How much is measured: `lengths` of rows by operation, all dtypes of each."""

    lengths: Mapping[str, Sequence[int]]
    axis: int = -1
    dtypes: Sequence[str] = ("float32", "bfloat16", "float16", "float64")
    elements: int = problems.SOFTMAX_ELEMENTS
    methods: Sequence[str] = METHODS
    peers: Callable[[str, int], Sequence[peers.Peer]] = softmax_peers
    rounds: int = 7
    window: float = 0.06

    def grid(self) -> list[Problem]:
        """Return the problems in order."""
        return [
            Problem(operation, dtype, n, self.axis)
            for dtype in self.dtypes
            for operation, lengths in self.lengths.items()
            for n in lengths
        ]


def ready(operation: str, axis: int) -> Sequence[peers.Peer]:
    """Return the peers that need no compilation of seconds."""
    return softmax_peers(operation, axis, compiled=False)


def named(names: Sequence[str], operation: str, axis: int) -> Sequence[peers.Peer]:
    """Return the peers of these names."""
    return [peer for peer in softmax_peers(operation, axis) if peer.name in names]


FULL = Effort(
    {operation: problems.SOFTMAX_FAMILY_LENGTHS for operation in problems.SOFTMAX_OPERATIONS}
    | {"softmax": problems.SOFTMAX_LENGTHS + problems.SOFTMAX_SPLIT_LENGTHS}
)
ACROSS = Effort(
    dict.fromkeys(("softmax", "softmax_vjp"), problems.SOFTMAX_ACROSS_LENGTHS),
    axis=0,
    methods=("auto",),
)
QUICK = Effort(
    {
        "softmax": (128, 1024, 4096, 2**15, 2**17, 2**20),
        "log_softmax": (4096,),
        "softmax_vjp": (4096,),
    },
    dtypes=("float32",),
    peers=ready,
)


def measure(effort: Effort, problem: Problem) -> list[rows.Row]:
    """Measure one row length of one dtype."""
    operation, dtype, n, axis = problem
    count = effort.elements // n
    inputs = [
        arguments(operation, (n, count) if axis == 0 else (count, n), dtype, seed, axis)
        for seed in range(SETS)
    ]
    methods = [
        method
        for method in (effort.methods if operation == "softmax" else METHODS[:1])
        if method != "cluster" or n >= problems.CLUSTER_LENGTH
    ]
    ours = {
        method: calls for method in methods if (calls := calls_by(method, operation, inputs, axis))
    }
    theirs = peers.willing(effort.peers(operation, axis), inputs)
    copied = [device.copy(max(operands, key=lambda x: x.nbytes)) for operands in inputs]
    competitors = {COPY: copied, **ours, **theirs}
    result = timing.compare(
        competitors, clock=device.clock(), rounds=effort.rounds, window=effort.window
    )

    def terabytes(name: str) -> float:
        kind = "softmax" if name == COPY else operation
        return problems.softmax_bytes(count * n, problems.dtype_of(dtype).itemsize, kind) / 1e12

    pairs = [(name, COPY) for name in competitors]
    pairs += [("auto", peer) for peer in theirs if "auto" in ours]
    if "fused" in ours:
        pairs += [(method, "fused") for method in ("cluster", "online", "naive") if method in ours]
    regime = device.softmax_regime(dtype, count, n, axis) if operation == "softmax" else ""
    found = []
    for name, peer in pairs:
        timed = rows.timing(result, name, peer, terabytes(name), "TB/s", peer_work=terabytes(peer))
        least, met = target(problem, name, peer, timed["speedup"])
        found.append(
            {
                "operation": operation,
                "method": name,
                "dtype": dtype,
                "rows": count,
                "N": n,
                "axis": axis,
                "regime": regime,
                **timed,
                "target": least,
                "met": met,
            }
        )
    return found


def arguments(
    operation: str, shape: tuple[int, int], dtype: str, seed: int, axis: int = -1
) -> tuple[Any, ...]:
    """Return operands of normal random numbers; of a gradient, the result that it is taken at."""
    x = device.normal(shape, dtype, seed)
    if not operation.endswith("_vjp"):
        return (x,)
    y = getattr(cuflash, operation.removesuffix("_vjp"))(x, axis)
    cotangent = device.normal(y.shape, dtype, seed + SETS)
    return (cotangent, x, y) if operation == "logsumexp_vjp" else (cotangent, y)


def calls_by(
    method: str, operation: str, inputs: Sequence[tuple[Any, ...]], axis: int = -1
) -> list[Callable[[], Any]]:
    """Return this library's calls; none if the method cannot run rows of this length."""
    options = {"method": method} if operation == "softmax" else {}
    calls = [
        partial(getattr(cuflash, operation), *operands, axis, **options) for operands in inputs
    ]
    try:
        calls[0]()
    except ValueError:
        return []
    return calls


def target(problem: Problem, name: str, peer: str, speedup: float) -> tuple[Any, Any]:
    """Return the target of a pair and whether it is met; two empty strings if it has none."""
    operation, dtype, n, axis = problem
    share = problems.softmax_share(operation, dtype, n, axis)
    held = (peer, dtype, n) == ("fused", "float32", problems.OVER_FUSED_LENGTH)
    if held and name in problems.OVER_FUSED:
        low, high = problems.OVER_FUSED[name]
        return f"{low:g} to {high:g} times as long", low <= 1 / speedup <= high
    least = None
    if name == "auto":
        least = {
            COPY: share,
            "CuPy formula": problems.OVER_FORMULA
            if operation == "softmax" and share and axis
            else None,
            "torch": problems.OVER_TORCH,
            "torch.compile": problems.OVER_TORCH,
        }.get(peer)
    return ("", "") if least is None else (least, problems.meets(speedup, least))


def report(
    effort: Effort, folder: Path | None, seconds: float = math.inf, *, append: bool = False
) -> None:
    """Measure problem by problem while the time lasts, print, and write what there is."""
    record = rows.Record("softmax", folder, rows.device_environment, KEY if append else ())
    grid = effort.grid()
    device.warm_softmax(grid, effort.methods, effort.elements)
    done = 0
    for problem in timing.within(seconds, grid):
        found = measure(effort, problem)
        printed = [row for row in found if row["peer"] in (COPY, "fused")]
        title = f"{problem.operation}, {problem.dtype}, N = {problem.n}, axis {problem.axis}"
        record.add(title, found, printed)
        peers.forget()
        done += 1
    record.close()
    if done < len(grid):
        print(f"out of time: {len(grid) - done} of {len(grid)} problems are not measured")
    if folder is not None:
        plot(rows.result_path(folder, "softmax", rows.device_environment()["machine"]))


def plot(path: Path) -> None:
    """Draw the figure of a result file beside it, where matplotlib is installed."""
    if importlib.util.find_spec("matplotlib") is None:
        print(f"{path} has no figure: matplotlib is not installed (pip install 'cuflash[plot]')")
        return
    charts.softmax_rates(rows.read_rows(path)).savefig(path.with_suffix(".png"))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write the results and draw them."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.softmax",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="a few row lengths in float32")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin nothing after this")
    parser.add_argument("--lengths", type=int, nargs="+", help="row lengths N")
    parser.add_argument("--dtypes", nargs="+", choices=FULL.dtypes, metavar="DTYPE")
    parser.add_argument(
        "--operations", nargs="+", choices=problems.SOFTMAX_OPERATIONS, metavar="NAME"
    )
    parser.add_argument(
        "--elements", type=int, help="of x (default 2^29, which needs 40 GB in float64)"
    )
    parser.add_argument("--window", type=float, help="seconds of each in a round (default 0.06)")
    parser.add_argument("--rounds", type=int, help="in which each is measured (default 7)")
    parser.add_argument("--axis", type=int, choices=(-1, 0), default=-1, help="to reduce")
    parser.add_argument("--methods", nargs="+", choices=METHODS, metavar="NAME")
    parser.add_argument("--peers", nargs="*", metavar="NAME", help="by their names in the results")
    parser.add_argument(
        "--append", action="store_true", help="keep the file's rows of what is not measured now"
    )
    parser.add_argument("--plot", action="store_true", help="measure nothing, draw what there is")
    parser.add_argument(
        "--results",
        type=Path,
        help="folder to write to; the default is benchmarks/results, or nowhere with --quick",
    )
    chosen = parser.parse_args(arguments)
    folder = chosen.results or (None if chosen.quick else RESULTS)
    if chosen.plot:
        for path in sorted((folder or RESULTS).glob("*/softmax.csv")):
            plot(path)
        return
    base = ACROSS if chosen.axis == 0 else QUICK if chosen.quick else FULL
    effort = replace(
        base,
        lengths={
            operation: chosen.lengths or base.lengths.get(operation, FULL.lengths[operation])
            for operation in chosen.operations or base.lengths
        },
        dtypes=chosen.dtypes or base.dtypes,
        elements=chosen.elements or base.elements,
        window=chosen.window or base.window,
        rounds=chosen.rounds or base.rounds,
        methods=chosen.methods or base.methods,
        peers=base.peers if chosen.peers is None else partial(named, chosen.peers),
    )
    report(effort, folder, chosen.seconds, append=chosen.append)


if __name__ == "__main__":
    main()
