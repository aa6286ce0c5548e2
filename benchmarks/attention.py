"""Attention on a GPU: each kernel family, PyTorch's backends, and cuBLAS's matmul.

``python -m benchmarks.attention`` measures float32 and float64, full and causal, in about a minute;
``--table wide_vjp`` their gradients. ``--table forward16`` takes the 24 bfloat16 rows with B * T =
16384 tokens and H * D = 2048 in about three minutes, ``--table backward16`` their gradients,
``--table decode`` one query a head against long keys; ``--rows`` names some rows of a table.
``--quick`` takes under 30 seconds. Each writes
``benchmarks/results/<gpu>/attention_<table>.csv`` after every problem.

A row holds one method's rate against one peer. With the matmul as the peer, *speedup* is the share
of its rate: 8192 x 8192 x 8192 in the same dtype (float16 for bfloat16), in the same rounds.
Decoding reads keys and values: its rate is their bytes over the time, the device copy (read and
written bytes) stands in the matmul's place, and every call is a CUDA graph.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import cuflash
from cuflash.bench import device, peers, problems, rows, timing
from cuflash.bench.problems import AttentionShape, Decode

RESULTS = Path(__file__).parent / "results"

MATMUL, COPY = "matmul", "copy"
#: Bytes of the copy that decoding is held against.
COPY_BYTES = 2**30
#: Inputs used in rotation.
SETS = 2


@dataclass(frozen=True)
class Table:
    """Problems, their peers, and what a problem's first method is to reach against which peer."""

    shapes: Sequence[Any]
    peers: Sequence[peers.Peer]
    target: Callable[[Any, rows.Row], tuple[float, bool] | None]
    backward: bool = False


def has_wide_target(shape: AttentionShape) -> bool:
    """Tell whether a float32 or float64 problem is one that plain CUDA has a least rate for."""
    return shape.d == 64 and not shape.causal


def wide_target(shape: AttentionShape, row: rows.Row) -> tuple[float, bool] | None:
    """Plain CUDA has a least rate."""
    if row["peer"] != MATMUL or not has_wide_target(shape):
        return None
    wanted = problems.WIDE_TARGETS[shape.dtype]
    return wanted, row["rate"] >= wanted


def wide_vjp_target(shape: AttentionShape, row: rows.Row) -> tuple[float, bool] | None:
    """Plain CUDA has a least rate in gradients, too."""
    if row["peer"] != MATMUL or shape.causal:
        return None
    wanted = problems.WIDE_VJP_TARGETS[shape.dtype]
    return wanted, row["rate"] >= wanted


CUDNN = "torch SDPA cuDNN"
_FORWARD16 = {t.shape: t.over_cudnn for t in problems.ATTENTION_TARGETS if not t.backward}
_BACKWARD16 = {t.shape: t.over_cudnn for t in problems.ATTENTION_TARGETS if t.backward}


def over_cudnn(
    targets: Mapping[AttentionShape, float], shape: AttentionShape, row: rows.Row
) -> tuple[float, bool] | None:
    """16-bit rows are held against the best peer known, by way of cuDNN."""
    if row["peer"] != CUDNN:
        return None
    wanted = targets[shape]
    return wanted, problems.meets(row["speedup"], wanted)


def forward16_target(shape: AttentionShape, row: rows.Row) -> tuple[float, bool] | None:
    """Long rows of wide heads are held against the matmul too."""
    if row["peer"] != MATMUL:
        return over_cudnn(_FORWARD16, shape, row)
    if row["method"] != "auto" or not has_matmul_target(shape):
        return None
    wanted = problems.MATMUL_SHARE
    return wanted, row["speedup"] >= wanted


def has_matmul_target(shape: AttentionShape) -> bool:
    """Tell whether a 16-bit problem has a least share of the matmul's rate."""
    wide = shape.d >= problems.MATMUL_SHARE_WIDTH
    return wide and not shape.causal and shape.tokens >= problems.MATMUL_SHARE_TOKENS


def decode_target(shape: Decode, row: rows.Row) -> tuple[float, bool] | None:
    """Hold decoding against both peers, and against the copy where bytes are many."""
    if row["peer"] == COPY:
        wanted = problems.DECODE_SHARE
        return (wanted, row["speedup"] >= wanted) if is_large(shape) else None
    return 1.0, problems.meets(row["speedup"], 1.0)


def is_large(shape: Decode) -> bool:
    """Tell whether decoding has a least share of the copy's rate."""
    return shape.bytes >= problems.DECODE_SHARE_BYTES


def torch_backends(*names: str, backward: bool = False) -> list[peers.Peer]:
    """Return PyTorch's backends of these names."""
    wanted = {f"torch SDPA {name}" for name in names}
    every = peers.DEVICE_ATTENTION_VJP if backward else peers.DEVICE_ATTENTION
    return [peer for peer in every if peer.name in wanted]


TABLES = {
    "wide": Table(problems.WIDE_ATTENTION, torch_backends("efficient", "math"), wide_target),
    "wide_vjp": Table(
        problems.WIDE_ATTENTION,
        torch_backends("efficient", "math", backward=True),
        wide_vjp_target,
        backward=True,
    ),
    "forward16": Table(tuple(_FORWARD16), torch_backends("cuDNN", "flash"), forward16_target),
    "backward16": Table(
        tuple(_BACKWARD16),
        torch_backends("cuDNN", "flash", backward=True),
        partial(over_cudnn, _BACKWARD16),
        backward=True,
    ),
    "decode": Table(problems.DECODE, peers.DEVICE_DECODE, decode_target),
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
    inputs = device.attention_inputs(shape, SETS, backward=table.backward)
    bind = vjp_of if table.backward else attention_of
    ours = {name: calls for name in methods if (calls := calls_by(name, bind, shape, inputs))}
    theirs = peers.willing(table.peers, inputs, causal=shape.causal)
    competitors = {MATMUL: [device.matmul(shape.dtype)], **ours, **theirs}
    result = timing.compare(competitors, clock=device.clock(), rounds=rounds, window=window)

    flops = problems.attention_flops(shape, backward=table.backward)
    work = dict.fromkeys(competitors, flops / 1e12)
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


def measure_decode(
    table: Table,
    shape: Decode,
    methods: Sequence[str],
    *,
    rounds: int = 7,
    window: float = 0.06,
) -> list[rows.Row]:
    """Measure a decoding step by every method; the first one is held against the peers."""
    inputs = device.decode_inputs(shape, SETS)
    ours = {method: calls for method in methods if (calls := decode_by(method, inputs))}
    theirs = peers.willing(table.peers, inputs)
    copy = device.copy(device.scratch(COPY_BYTES))
    competitors = {COPY: [copy], **ours, **theirs}
    result = timing.compare(competitors, clock=device.clock(), rounds=rounds, window=window)

    work = dict.fromkeys(competitors, shape.bytes / 1e12) | {COPY: 2 * COPY_BYTES / 1e12}
    pairs = [(name, COPY) for name in competitors]
    pairs += [(name, peer) for name in list(ours)[:1] for peer in theirs]
    found = []
    for name, peer in pairs:
        row = {
            "method": name,
            "dtype": "bfloat16",
            "B": shape.batch,
            "H": shape.heads,
            "Hkv": shape.key_heads,
            "T": shape.tokens,
            "D": shape.d,
            **rows.timing(result, name, peer, work[name], "TB/s", peer_work=work[peer]),
        }
        wanted = table.target(shape, row) if name in ours else None
        row["target"], row["met"] = wanted or ("", "")
        found.append(row)
    return found


def decode_by(method: str, inputs: Sequence[tuple[Any, ...]]) -> list[Callable[[], Any]]:
    """Return this library's decoding steps, which allocate nothing."""
    options = {"method": method, "enable_gqa": True}
    calls = []
    for arrays in inputs:
        out = cuflash.flash_attention(*arrays, **options)
        need = cuflash.workspace_size(*arrays, **options)
        workspace = device.scratch(need) if need else None
        call = partial(cuflash.flash_attention, *arrays, **options, out=out, workspace=workspace)
        calls.append(device.captured(call))
    return calls


def attention_of(method: str, shape: AttentionShape, arrays: tuple[Any, ...]) -> Callable[[], Any]:
    """Return this library's call for q, k, v."""
    return partial(cuflash.flash_attention, *arrays, causal=shape.causal, method=method)


def vjp_of(method: str, shape: AttentionShape, arrays: tuple[Any, ...]) -> Callable[[], Any]:
    """Return this library's call for the gradients of dout, q, k, v: the backward alone."""
    dout, *inputs = arrays
    out, lse = cuflash.flash_attention(*inputs, causal=shape.causal, return_lse=True)
    options = {"causal": shape.causal, "method": method}
    return partial(cuflash.flash_attention_vjp, dout, *inputs, out, lse, **options)


def calls_by(
    method: str,
    bind: Callable[[str, AttentionShape, tuple[Any, ...]], Callable[[], Any]],
    shape: AttentionShape,
    inputs: Sequence[tuple[Any, ...]],
) -> list[Callable[[], Any]]:
    """Return this library's calls; none if the method cannot run the problem here."""
    calls = [bind(method, shape, arrays) for arrays in inputs]
    try:
        calls[0]()
    except ValueError as error:
        print(f"{method} is left out: {error}", flush=True)
        return []
    return calls


def report(
    name: str,
    shapes: Sequence[Any],
    methods: Sequence[str],
    folder: Path | None,
    seconds: float = math.inf,
) -> None:
    """Measure problems of a table while the time lasts, print, and write what there is."""
    record = rows.Record(f"attention_{name}", folder, rows.device_environment)
    done = 0
    for shape in timing.within(seconds, shapes):
        if isinstance(shape, Decode):
            found = measure_decode(TABLES[name], shape, methods)
            title = f"Decoding, bfloat16, B = {shape.batch}, Hkv = {shape.key_heads}"
        else:
            found = measure(TABLES[name], shape, methods)
            causal = ", causal" if shape.causal else ""
            subject = "Gradients" if TABLES[name].backward else "Attention"
            title = f"{subject}, {shape.dtype}, D = {shape.d}{causal}"
        record.add(f"{title}, T = {shape.tokens}", found)
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
