"""Fused chains on a GPU: a product with its epilogue, and dropout, bias and LayerNorm.

``python -m benchmarks.fused`` measures both tables in about two minutes, most of them spent on
torch.compile, and writes ``benchmarks/results/<gpu>/fused.csv``. ``--quick`` takes the problems
that have a target, without torch.compile. ``--document docs/fused-chains.md`` writes that page's
tables anew, from the file as it is.

Rates of products count their FLOPs, those of LayerNorm each operand read or written once. A row
holds one competitor's rate against one peer: products against cuBLAS alone, LayerNorm against the
device copy, ours against all.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from cuflash import baselines, fused
from cuflash.bench import device, fused_peers, peers, problems, rows, timing
from cuflash.bench.problems import Norm, Product

from .memory_wall import PENDING, fill

RESULTS = Path(__file__).parent / "results"

COPY, FUSED, UNFUSED = "device copy", "fused", "unfused"
#: Inputs used in rotation.
SETS = 2
Problem = Product | Norm
Peers = Callable[[], Sequence[peers.Peer]]


@dataclass(frozen=True)
class Effort:
    """How much is measured."""

    problems: Sequence[Problem]
    compiled: bool = True
    rounds: int = 7
    window: float = 0.06


FULL = Effort((*problems.NORMS, *problems.PRODUCTS))
QUICK = Effort((problems.NORMS[0], *problems.PRODUCTS[:3]), compiled=False)


def measure(effort: Effort, problem: Problem) -> list[rows.Row]:
    """Measure one problem."""
    if isinstance(problem, Product):
        return _measure_product(effort, problem)
    return _measure_norm(effort, problem)


def _measure_product(effort: Effort, problem: Product) -> list[rows.Row]:
    inputs = [
        tuple(
            device.normal(shape, problem.dtype, seed + SETS * i)
            for i, shape in enumerate(
                ((problem.m, problem.k), (problem.k, problem.n), (problem.n,))
            )
        )
        for seed in range(SETS)
    ]
    ours = {
        FUSED: [partial(fused.matmul_bias_activation, *x) for x in inputs],
        UNFUSED: [partial(baselines.unfused_matmul_bias_activation, *x) for x in inputs],
    }
    theirs = peers.willing(fused_peers.product_peers(compiled=effort.compiled), inputs)
    against = fused_peers.PRODUCT_ALONE if fused_peers.PRODUCT_ALONE in theirs else FUSED
    named = {
        "operation": "matmul_bias_activation",
        "shape": f"{problem.m} x {problem.k} x {problem.n}",
    }
    return _compare(effort, problem, ours | theirs, against, theirs, named, 1.0)


def _measure_norm(effort: Effort, problem: Norm) -> list[rows.Row]:
    columns = problem.shape[-1:]
    options = {"p": fused_peers.PROBABILITY, "seed": 1}
    inputs = [
        tuple(
            device.normal(shape, problem.dtype, seed + SETS * i)
            for i, shape in enumerate((problem.shape, columns, columns, columns))
        )
        for seed in range(SETS)
    ]
    competitors = {COPY: [device.copy(x[0]) for x in inputs]}
    if problem.backward:
        competitors[FUSED] = [_gradients(x, options) for x in inputs]
        theirs: dict[str, Any] = {}
    else:
        layer_norm = partial(fused.dropout_bias_layer_norm, **options)
        steps = partial(baselines.unfused_dropout_bias_layer_norm, **options)
        competitors[FUSED] = [partial(layer_norm, *x) for x in inputs]
        competitors[UNFUSED] = [partial(steps, *x) for x in inputs]
        theirs = peers.willing(fused_peers.norm_peers(compiled=effort.compiled), inputs)
    operation = "dropout_bias_layer_norm" + "_vjp" * problem.backward
    named = {"operation": operation, "shape": " x ".join(map(str, problem.shape))}
    copied = 2 / problem.trips  # of the copy's bytes in those of the operation
    return _compare(effort, problem, competitors | theirs, COPY, theirs, named, copied)


def _gradients(operands: tuple[Any, ...], options: dict[str, Any]) -> Callable[[], Any]:
    """Return the call for the gradients at the forward's statistics, with x as the cotangent."""
    x, bias, gamma, _ = operands
    _, mean, rstd = fused.dropout_bias_layer_norm(*operands, **options, return_stats=True)
    return lambda: fused.dropout_bias_layer_norm_vjp(x, x, bias, gamma, mean, rstd, **options)


def _compare(
    effort: Effort,
    problem: Problem,
    competitors: dict[str, Any],
    against: str,
    theirs: Sequence[str] | dict[str, Any],
    named: dict[str, Any],
    copied: float,
) -> list[rows.Row]:
    result = timing.compare(
        competitors, clock=device.clock(), rounds=effort.rounds, window=effort.window
    )
    product = isinstance(problem, Product)
    work, unit = (problem.flops, "TFLOP/s") if product else (problem.bytes, "TB/s")

    def amount(name: str) -> float:
        return work / 1e12 * (copied if name == COPY else 1)

    pairs = [(name, against) for name in competitors]
    pairs += [(FUSED, peer) for peer in (UNFUSED, *theirs) if peer in competitors]
    found = []
    for name, peer in dict.fromkeys(pairs):
        timed = rows.timing(result, name, peer, amount(name), unit, peer_work=amount(peer))
        least, met = target(problem, name, peer, timed["speedup"])
        found.append(
            {**named, "method": name, "dtype": problem.dtype, **timed, "target": least, "met": met}
        )
    return found


def target(problem: Problem, name: str, peer: str, speedup: float) -> tuple[Any, Any]:
    """Return the target of a pair and whether it is met; two empty strings if it has none."""
    wanted: dict[str, float] = {}
    if name == FUSED and problem == problems.NORMS[0]:
        wanted[COPY] = problems.NORM_SHARE
    elif name == FUSED and problem in problems.PRODUCTS[:3]:
        wanted[fused_peers.EPILOGUE] = problems.OVER_EPILOGUE
        if problem == problems.PRODUCTS[0]:
            wanted[fused_peers.PRODUCT_ALONE] = problems.OVER_PRODUCT
        else:
            wanted[fused_peers.PRODUCT_STEPS] = 1.0
    least = wanted.get(peer)
    return ("", "") if least is None else (least, problems.meets(speedup, least))


def report(effort: Effort, folder: Path | None, seconds: float = math.inf) -> None:
    """Measure problem by problem while the time lasts, print, and write what there is."""
    record = rows.Record("fused", folder, rows.device_environment)
    done = 0
    for problem in timing.within(seconds, effort.problems):
        found = measure(effort, problem)
        record.add(f"{found[0]['operation']}, {problem.dtype}, {found[0]['shape']}", found)
        peers.forget()
        done += 1
    record.close()
    if done < len(effort.problems):
        left = len(effort.problems) - done
        print(f"out of time: {left} of {len(effort.problems)} problems are not measured")


def tables(found: Sequence[rows.Row]) -> dict[str, str]:
    """Return the tables of the document by name, from the rows of a result file."""
    if not found:
        return {"norms": PENDING, "products": PENDING}
    norms = [row for row in found if row["operation"].startswith("dropout")]
    products = [row for row in found if row["operation"].startswith("matmul")]
    return {
        "norms": rows.markdown(_by_problem(norms, COPY, "speedup")),
        "products": rows.markdown(_by_problem(products, fused_peers.PRODUCT_ALONE, "ms")),
    }


def _by_problem(found: Sequence[rows.Row], peer: str, quantity: str) -> list[rows.Row]:
    """Return a line for each problem with a column for each competitor, held against a peer."""
    held = [row for row in found if row["peer"] == peer and row["method"] != COPY]
    methods = dict.fromkeys(row["method"] for row in held)
    lines: dict[tuple[str, str, str], dict[str, str]] = {}
    for row in held:
        key = row["operation"], row["shape"], row["dtype"]
        backward = ", gradients" * row["operation"].endswith("_vjp")
        line = lines.setdefault(
            key,
            {"shape": row["shape"], "dtype": row["dtype"] + backward, **dict.fromkeys(methods, "")},
        )
        line[row["method"]] = f"{float(row[quantity]):.3g}"
    return [*lines.values()]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fused",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="problems that have a target")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin nothing after this")
    parser.add_argument(
        "--results",
        type=Path,
        help="folder to write to; the default is benchmarks/results, or nowhere with --quick",
    )
    parser.add_argument("--document", type=Path, help="measure nothing, write its tables")
    chosen = parser.parse_args(arguments)
    if chosen.document:
        (path,) = (chosen.results or RESULTS).glob("*/fused.csv")
        document = chosen.document
        document.write_text(fill(document.read_text(), tables(rows.read_rows(path))))
        return
    folder = chosen.results or (None if chosen.quick else RESULTS)
    report(QUICK if chosen.quick else FULL, folder, chosen.seconds)


if __name__ == "__main__":
    main()
