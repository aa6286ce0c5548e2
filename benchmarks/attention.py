"""Attention forward on a GPU: each kernel family, PyTorch's backends, and cuBLAS's matmul.

``python -m benchmarks.attention`` measures float32 and float64, full and causal, in about a minute;
``--table forward16`` the 24 bfloat16 rows with B * T = 16384 tokens and H * D = 2048 in about three
minutes, or those of them that ``--rows`` names. ``--quick`` takes under 30 seconds. Each writes
``benchmarks/results/<gpu>/attention_<table>.csv`` after every problem.

A row holds one method's rate against one peer. With the matmul as the peer, *speedup* is the share
of its rate: 8192 x 8192 x 8192 in the same dtype (float16 for bfloat16), in the same rounds.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cuflash
from cuflash.bench import device, peers, problems, rows, timing
from cuflash.bench.problems import AttentionShape

RESULTS = Path(__file__).parent / "results"

MATMUL = "matmul"
#: Inputs used in rotation.
SETS = 2


@dataclass(frozen=True)
class Table:
    """Problems, their peers, and what a problem's first method is to reach against which peer."""

    shapes: Sequence[AttentionShape]
    peers: Sequence[peers.Peer]
    target: Callable[[AttentionShape, rows.Row], tuple[float, bool] | None]


def has_wide_target(shape: AttentionShape) -> bool:
    """Tell whether a float32 or float64 problem is one that plain CUDA has a least rate for."""
    return shape.d == 64 and not shape.causal


def wide_target(shape: AttentionShape, row: rows.Row) -> tuple[float, bool] | None:
    """Plain CUDA has a least rate."""
    if row["peer"] != MATMUL or not has_wide_target(shape):
        return None
    wanted = problems.WIDE_TARGETS[shape.dtype]
    return wanted, row["rate"] >= wanted


CUDNN = "torch SDPA cuDNN"
_FORWARD16 = {t.shape: t.over_cudnn for t in problems.ATTENTION_TARGETS if not t.backward}


def forward16_target(shape: AttentionShape, row: rows.Row) -> tuple[float, bool] | None:
    """16-bit rows are held against the best peer known, by way of cuDNN."""
    if row["peer"] != CUDNN:
        return None
    wanted = _FORWARD16[shape]
    return wanted, problems.meets(row["speedup"], wanted)


def torch_backends(*names: str) -> list[peers.Peer]:
    """Return PyTorch's backends of these names."""
    wanted = {f"torch SDPA {name}" for name in names}
    return [peer for peer in peers.DEVICE_ATTENTION if peer.name in wanted]


TABLES = {
    "wide": Table(problems.WIDE_ATTENTION, torch_backends("efficient", "math"), wide_target),
    "forward16": Table(tuple(_FORWARD16), torch_backends("cuDNN", "flash"), forward16_target),
}


def measure(
    table: Table,
    shape: AttentionShape,
    methods: Sequence[str],
    *,
    rounds: int = 7,
    window: float = 0.06,
) -> list[rows.Row]:
    """Measure one problem by every method; the first one is held against the peers."""
    inputs = device.attention_inputs(shape, SETS)
    ours = {method: calls for method in methods if (calls := attention_by(method, shape, inputs))}
    theirs = peers.willing(table.peers, inputs, causal=shape.causal)
    competitors = {MATMUL: [device.matmul(shape.dtype)], **ours, **theirs}
    result = timing.compare(competitors, clock=device.clock(), rounds=rounds, window=window)

    work = {name: problems.attention_flops(shape) / 1e12 for name in competitors}
    work[MATMUL] = device.MATMUL_FLOPS / 1e12
    pairs = [(name, MATMUL) for name in competitors]
    pairs += [(name, peer) for name in list(ours)[:1] for peer in theirs]
    found = []
    for name, peer in pairs:
        row = {
            "method": name,
            "dtype": shape.dtype,
            "B": shape.batch,
            "H": shape.heads,
            "T": shape.tokens,
            "D": shape.d,
            "causal": shape.causal,
            **rows.timing(result, name, peer, work[name], "TFLOP/s", peer_work=work[peer]),
        }
        wanted = table.target(shape, row) if name in ours else None
        row["target"], row["met"] = wanted or ("", "")
        found.append(row)
    return found


def attention_by(
    method: str, shape: AttentionShape, inputs: Sequence[tuple[Any, ...]]
) -> list[Callable[[], Any]]:
    """Return this library's calls; none if the method cannot run the problem here."""
    calls = [
        lambda x=x: cuflash.flash_attention(*x, causal=shape.causal, method=method) for x in inputs
    ]
    try:
        calls[0]()
    except ValueError as error:
        print(f"{method} is left out: {error}", flush=True)
        return []
    return calls


def report(
    name: str,
    shapes: Sequence[AttentionShape],
    methods: Sequence[str],
    folder: Path | None,
    seconds: float = math.inf,
) -> None:
    """Measure problems of a table while the time lasts, print, and write what there is."""
    record = rows.Record(f"attention_{name}", folder, rows.device_environment)
    done = 0
    for shape in timing.within(seconds, shapes):
        found = measure(TABLES[name], shape, methods)
        causal = ", causal" if shape.causal else ""
        record.add(f"Attention, {shape.dtype}, T = {shape.tokens}, D = {shape.d}{causal}", found)
        peers.forget()
        done += 1
    record.close()
    if done < len(shapes):
        print(f"out of time: {len(shapes) - done} of {len(shapes)} problems are not measured")


def picked(text: str, count: int) -> list[int]:
    """Return the indices that a list such as "0,4-7" names."""
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        try:
            indices = range(int(first), int(last if dash else first) + 1)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{part!r} is neither a row nor a range") from None
        if not indices or indices[-1] >= count:
            raise argparse.ArgumentTypeError(f"{part!r}: the table has rows 0 to {count - 1}")
        found += indices
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.attention",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--table", choices=TABLES, default="wide")
    subset = parser.add_mutually_exclusive_group()
    subset.add_argument("--rows", help='rows of the table, such as "0,4-7"')
    subset.add_argument("--list", action="store_true", help="number the table's rows and stop")
    subset.add_argument("--quick", action="store_true", help="the wide rows that have a target")
    parser.add_argument("--methods", nargs="+", default=["auto", "simt"])
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin nothing after this")
    parser.add_argument(
        "--results",
        type=Path,
        help="folder to write to; the default is benchmarks/results, or nowhere with --quick",
    )
    chosen = parser.parse_args(arguments)
    shapes = TABLES[chosen.table].shapes
    if chosen.list:
        for i, shape in enumerate(shapes):
            print(i, shape)
        return
    if chosen.rows:
        try:
            shapes = [shapes[i] for i in picked(chosen.rows, len(shapes))]
        except argparse.ArgumentTypeError as error:
            parser.error(f"--rows: {error}")
    if chosen.quick:
        if chosen.table != "wide":
            parser.error("--quick is of the wide table")
        shapes = [shape for shape in shapes if has_wide_target(shape)]
    folder = chosen.results or (None if chosen.quick else RESULTS)
    report(chosen.table, shapes, chosen.methods, folder, chosen.seconds)


if __name__ == "__main__":
    main()
