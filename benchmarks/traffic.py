"""The traffic model held against the hardware: bytes through DRAM, memory and time, by method.

``python -m benchmarks.traffic`` takes about two minutes and writes
``benchmarks/results/<gpu>/traffic.csv``: for each problem and method what
`cuflash.analysis.traffic` says beside what NVIDIA Nsight Compute (`ncu` on the PATH, and permission
to read the hardware's counters) counts and what CuPy's memory pool hands out. ``--document PAGE``
measures nothing and writes a page's tables anew, from the file as it is.

*read*, *written*: megabytes through DRAM. ncu empties the caches before each kernel, so that
nothing is served from what the kernel before left there; what a kernel wrote last may lie in L2
when counting ends, up to its size, and is missing in *written*. *counted* is their sum over the
model's. *extra* is the peak of a call's memory, results aside, *auxiliary* the model's. Times are
medians of interleaved rounds.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import cuflash
from cuflash import analysis, baselines, fused
from cuflash.bench import device, fused_peers, rows, timing

from .memory_traffic import DRAM_READ, DRAM_WRITTEN, Counts, ncu, parse
from .memory_wall import PENDING, fill

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"

ROUNDS, WINDOW = 3, 0.03
#: The kernel that is launched before and after each call.
MARKER = "traffic_marker"


class Case(NamedTuple):
    """A problem and a method, as `cuflash.analysis.traffic` takes them."""

    op: str
    shape: tuple[int, ...]
    dtype: str
    method: str

    @property
    def model(self) -> analysis.Traffic:
        """What the model says."""
        return analysis.traffic(self.op, self.shape, self.dtype, self.method)

    @property
    def problem(self) -> tuple[str, tuple[int, ...], str]:
        """What the methods have in common."""
        return self.op, self.shape, self.dtype


def cases() -> list[Case]:
    """Return what is measured, the methods of a problem side by side.

    Softmax of 512 MiB; the chains at the shapes that have targets; attention of 65536 tokens in
    all, so that results are larger than L2, and of one entry, whose memory grows with its tokens.
    """
    elements = 2**27
    problems: list[tuple[str, tuple[int, ...], str]] = [
        *(("softmax", (elements // n, n), "float32") for n in _EVERY),
        *(("matmul_bias_activation", (m, k, 4096), "bfloat16") for m, k in _PRODUCTS),
        *(("dropout_bias_layer_norm", shape, "bfloat16") for shape in _NORMS),
        *(("attention", (65536 // t, 8, t, 128), "bfloat16") for t in (1024, 4096, 8192)),
        ("attention", (16, 8, 4096, 128), "float32"),
        *(("attention", (1, 8, t, 128), "bfloat16") for t in _TOKENS),
        *(("attention_vjp", (65536 // t, 8, t, 128), "bfloat16") for t in (1024, 4096, 8192)),
        ("attention_vjp", (16, 8, 4096, 128), "float32"),
    ]
    return [
        Case(*problem, method)
        for problem in problems
        for method in analysis.METHODS[problem[0]]
        if (problem[0], method) not in _ABSENT
        if problem[0] != "softmax" or problem[1][-1] in _LENGTHS.get(method, _EVERY)
    ]


_EVERY = (1024, 8192, 65536)
#: Rows of softmax that a block holds, and that are worth several.
_LENGTHS = {"fused": _EVERY[:2], "cluster": _EVERY[1:]}
_PRODUCTS = ((8192, 4096), (65536, 256), (65536, 64))
_NORMS = ((8, 4096, 4096), (262144, 768))
_TOKENS = (512, 1024, 2048, 4096, 8192, 16384)
#: Methods of the model that no function runs.
_ABSENT = {("attention_vjp", "materialized")}
_DROPOUT: Mapping[str, Any] = {"p": fused_peers.PROBABILITY, "seed": 1}


def calls(op: str, shape: tuple[int, ...], dtype: str) -> dict[str, Callable[[], Any]]:
    """Return a problem's methods as calls on inputs of its own."""
    if op == "softmax":
        x = device.normal(shape, dtype, 0)
        held = {
            method: partial(cuflash.softmax, x, method=method)
            for method in ("naive", "online", "fused", "cluster")
        }
        return {"unfused": partial(baselines.unfused_softmax, x), **held}
    if op == "matmul_bias_activation":
        m, k, n = shape
        operands = [device.normal(s, dtype, i) for i, s in enumerate(((m, k), (k, n), (n,)))]
        return {
            "unfused": partial(baselines.unfused_matmul_bias_activation, *operands),
            "fused": partial(fused.matmul_bias_activation, *operands),
        }
    if op == "dropout_bias_layer_norm":
        sizes = (shape, *(shape[-1:] for _ in range(3)))
        operands = [device.normal(size, dtype, i) for i, size in enumerate(sizes)]
        steps = baselines.unfused_dropout_bias_layer_norm
        return {
            "unfused": partial(steps, *operands, **_DROPOUT),
            "fused": partial(fused.dropout_bias_layer_norm, *operands, **_DROPOUT),
        }
    q, k, v, dout = device.normal((4, *shape), dtype, 0)
    if op == "attention_vjp":
        saved = cuflash.flash_attention(q, k, v, return_lse=True)
        return {"flash": partial(cuflash.flash_attention_vjp, dout, q, k, v, *saved)}
    return {
        "materialized": partial(baselines.materialized_attention, q, k, v),
        "scores_fused": partial(baselines.scores_fused_attention, q, k, v),
        "flash": partial(cuflash.flash_attention, q, k, v, return_lse=True),
    }


# ------------------------------------------------------------------------------------------ counted


def launch(chosen: Iterable[Case]) -> None:
    """Make each call once between two markers: what runs under ncu."""
    import cupy

    marker = cupy.RawKernel(f'extern "C" __global__ void {MARKER}() {{}}', MARKER)
    for problem, group in groupby(chosen, lambda case: case.problem):
        of_method = calls(*problem)
        for case in group:
            marker((1,), (1,), ())
            of_method[case.method]()
            marker((1,), (1,), ())
        del of_method
        cupy.get_default_memory_pool().free_all_blocks()


def count(chosen: Sequence[Case]) -> list[Counts]:
    """Run `launch` under ncu and return the counts of each case, summed over its kernels.

    Raises
    ------
    RuntimeError
        ncu is missing or failed, with what it said, or other calls were counted than were made.
    """
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        arguments = ["-m", "benchmarks.traffic", "--launch", *map(str, positions(chosen))]
        said = ncu(log, ["--metrics", f"{DRAM_READ},{DRAM_WRITTEN}"], arguments)
    found = between_markers(parse(said))
    if len(found) != len(chosen):
        raise RuntimeError(f"{len(chosen)} calls were made; ncu counted {len(found)}")
    return found


def positions(chosen: Sequence[Case]) -> list[int]:
    """Return where cases are in the list of all."""
    everything = cases()
    return [everything.index(case) for case in chosen]


def between_markers(counted: Sequence[tuple[str, Counts]]) -> list[Counts]:
    """Return the sums of the kernels between the first and second marker, third and fourth, ..."""
    found: list[Counts] = []
    inside = False
    for kernel, counts in counted:
        if kernel == MARKER:
            inside = not inside
            if inside:
                found.append({DRAM_READ: 0.0, DRAM_WRITTEN: 0.0})
        elif inside:
            found[-1] = {name: value + counts[name] for name, value in found[-1].items()}
    return found


# ----------------------------------------------------------------------------------------- measured


def measure(chosen: Sequence[Case]) -> dict[Case, tuple[float, int]]:
    """Return the median seconds of each case, and the bytes that its call needs beside results."""
    found = {}
    for problem, group in groupby(chosen, lambda case: case.problem):
        of_method = calls(*problem)
        own = {case.method: of_method[case.method] for case in group}
        result = timing.compare(own, clock=device.clock(), rounds=ROUNDS, window=WINDOW)
        for method, call in own.items():
            found[Case(*problem, method)] = result.median(method), device.extra_bytes(call)
    return found


def describe(
    case: Case, measured: tuple[float, int], counts: Counts | None, first: float
) -> rows.Row:
    """Return the row of a case; `first` are the seconds of its problem's first method."""
    model = case.model
    seconds, extra = measured
    moved = None if counts is None else (counts[DRAM_READ], counts[DRAM_WRITTEN])
    return {
        "op": case.op,
        "shape": " x ".join(map(str, case.shape)),
        "dtype": case.dtype,
        "method": case.method,
        "ms": seconds * 1e3,
        "speedup": first / seconds,
        "model read": model.read_bytes / 1e6,
        "model written": model.written_bytes / 1e6,
        "read": "" if moved is None else moved[0] / 1e6,
        "written": "" if moved is None else moved[1] / 1e6,
        "counted": "" if moved is None else sum(moved) / model.moved_bytes,
        "auxiliary": model.auxiliary_bytes / 1e6,
        "extra": extra / 1e6,
    }


def report(chosen: Sequence[Case], folder: Path | None, *, counting: bool) -> None:
    """Measure, count, print, and write what there is."""
    record = rows.Record("traffic", folder, rows.device_environment)
    measured = measure(chosen)
    counts: Sequence[Counts | None] = [None] * len(chosen)
    if counting:
        try:
            counts = count(chosen)
        except RuntimeError as error:
            print(f"nothing was counted: {error}", file=sys.stderr)
    for _, group in groupby(zip(chosen, counts, strict=True), lambda pair: pair[0].problem):
        pairs = list(group)
        (case, _), first = pairs[0], measured[pairs[0][0]][0]
        found = [describe(each, measured[each], counted, first) for each, counted in pairs]
        record.add(f"{case.op}, {found[0]['shape']}, {case.dtype}", found)
    record.close()


# ----------------------------------------------------------------------------------------- document


def tables(found: Sequence[rows.Row]) -> dict[str, str]:
    """Return the tables of the documents by name, from the rows of a result file."""
    if not found:
        return dict.fromkeys(("counted", "rungs"), PENDING)
    return {"counted": rows.markdown(_counted(found)), "rungs": rows.markdown(_rungs(found))}


def _counted(found: Sequence[rows.Row]) -> list[rows.Row]:
    """Return a line for each case that was counted: megabytes by the model and by ncu."""
    return [
        {
            **{name: row[name] for name in ("op", "shape", "dtype", "method")},
            "MB, model": f"{float(row['model read']) + float(row['model written']):.0f}",
            "MB, counted": f"{float(row['read']) + float(row['written']):.0f}",
            "ratio": f"{float(row['counted']):.2f}",
        }
        for row in found
        if row["counted"] != "" and not _is_rung(row)
    ]


def _rungs(found: Sequence[rows.Row]) -> list[rows.Row]:
    """Return a line for each length of one entry's attention: time and memory, rung by rung."""
    lines: dict[str, rows.Row] = {}
    for row in filter(_is_rung, found):
        line = lines.setdefault(row["shape"], {"T": row["shape"].split(" x ")[-2]})
        line[f"{row['method']}, ms"] = f"{float(row['ms']):.3g}"
        line[f"{row['method']}, extra MB"] = f"{float(row['extra']):.3g}"
        if row["method"] == "flash":
            line["flash is faster by"] = f"{float(row['speedup']):.3g}"
    return [*lines.values()]


def _is_rung(row: rows.Row) -> bool:
    return bool(row["op"] == "attention" and row["shape"].startswith("1 x "))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, count, print, and write the results."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.traffic",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--launch",
        type=int,
        nargs="+",
        metavar="CASE",
        help="count nothing, only make these calls: what runs under ncu",
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to write to")
    parser.add_argument("--document", type=Path, help="measure nothing, write its tables")
    parser.add_argument(
        "--uncounted", action="store_true", help="times and memory alone, without ncu"
    )
    chosen = parser.parse_args(arguments)
    if chosen.launch:
        everything = cases()
        launch([everything[at] for at in chosen.launch])
    elif chosen.document:
        (path,) = chosen.results.glob("*/traffic.csv")
        made = tables(rows.read_rows(path))
        chosen.document.write_text(fill(chosen.document.read_text(), made))
    else:
        report(cases(), chosen.results, counting=not chosen.uncounted)


if __name__ == "__main__":
    main()
