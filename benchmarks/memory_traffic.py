"""DRAM bytes an element of each softmax method, counted by ncu, beside the trips that theory says.

``python -m benchmarks.memory_traffic`` runs itself under NVIDIA Nsight Compute (`ncu` on the PATH,
and permission to read the hardware's counters), which launches each method once at each row length,
and writes ``benchmarks/results/<gpu>/memory_traffic.csv``. It takes about a minute.

The second and third read of an element may be served by the L2 cache: *absorbed* is the share of
them that did not reach DRAM, and *predicted* the bytes if all of `online`'s second read is absorbed
while the rows in flight, *wave MB*, fit in L2. ncu empties the cache before each kernel. What a
kernel wrote last may still lie in the cache when counting ends, up to the cache's size, so that
*written* is a few percent low. *occupancy* is the share of a multiprocessor's warps that were
resident, on average over the run of a method's only kernel, and *resident* what was predicted.
"""

from __future__ import annotations

import argparse
import csv
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import cuflash
from cuflash.bench import device, problems, rows

if TYPE_CHECKING:
    from cuflash.device.occupancy import Residency

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"

DTYPE, ITEMSIZE = "float32", 4
ELEMENTS = 2**28
#: The rows of the last are few enough to be split over the GPU.
LENGTHS = (1024, 4096, 65536, 2**19, 2**23)
#: Row lengths around those where a multiprocessor holds many rows, two, one: `fused` alone.
FUSED_LENGTHS = (2048, 8192, 16384, 20480, 32768, 49152)
METHODS = ("naive", "fused", "online", "cluster")
DRAM_READ, DRAM_WRITTEN = "dram__bytes_read.sum", "dram__bytes_write.sum"
L2_READ = "lts__t_sectors_op_read.sum"
WARPS = "sm__warps_active.avg.pct_of_peak_sustained_active"
SECTOR_BYTES = 32
METRICS = (DRAM_READ, DRAM_WRITTEN, L2_READ, WARPS)

Counts = Mapping[str, float]


class Launched(NamedTuple):
    """A method at a row length, and how it is predicted to run."""

    method: str
    n: int
    residency: Residency


def planned(
    elements: int, lengths: Iterable[int], fused_lengths: Iterable[int]
) -> Iterator[Launched]:
    """Yield what is to be launched: each method at each row length that it can hold."""
    pairs = [(method, n) for n in lengths for method in METHODS]
    for method, n in [*pairs, *(("fused", n) for n in fused_lengths)]:
        with suppress(ValueError):  # a row does not fit on chip
            yield Launched(method, n, device.softmax_residency(DTYPE, elements // n, n, method))


def launch(elements: int, pairs: Iterable[tuple[str, int]]) -> None:
    """Launch methods at row lengths, once each: what runs under ncu."""
    x = device.normal((elements,), DTYPE, seed=0)
    for method, n in pairs:
        cuflash.softmax(x[: elements // n * n].reshape(-1, n), method=method)


def count(elements: int, launched: Sequence[Launched]) -> list[rows.Row]:
    """Run `launch` under ncu and return its rows.

    Raises
    ------
    RuntimeError
        ncu is missing or failed; with what it said.
    """
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        said = ncu(log, *ncu_arguments(elements, launched))
    return describe(launched, parse(said), elements)


def ncu(log: Path, options: Sequence[str], arguments: Sequence[str]) -> str:
    """Run Python with `arguments` under ncu, which writes to `log`; return what it wrote.

    Raises
    ------
    RuntimeError
        ncu is missing or failed; with what it said.
    """
    if shutil.which("ncu") is None:
        raise RuntimeError("ncu (NVIDIA Nsight Compute) is not on the PATH")
    command = [
        *("ncu", "--clock-control", "none", *options),
        *("--csv", "--print-units", "base", "--log-file", str(log)),
        *(sys.executable, *arguments),
    ]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    said = log.read_text() if log.exists() else ""
    if result.returncode:
        raise RuntimeError(f"ncu failed:\n{said}\n{result.stdout}\n{result.stderr}")
    return said


def ncu_arguments(elements: int, launched: Sequence[Launched]) -> tuple[list[str], list[str]]:
    """Return ncu's options and Python's arguments that count the launches of `launch`."""
    kernels = "|".join(dict.fromkeys(k for each in launched for k in each.residency.kernels))
    options = [
        *("--kernel-name-base", "function", "--kernel-name", f"regex:^({kernels})$"),
        *("--metrics", ",".join(METRICS)),
    ]
    pairs = [f"{each.method}:{each.n}" for each in launched]
    script = ["-m", "benchmarks.memory_traffic", "--elements", str(elements), "--launch", *pairs]
    return options, script


def parse(log: str) -> list[tuple[str, Counts]]:
    """Return each launch's kernel and counts by metric, in the order of ncu's CSV.

    Raises
    ------
    RuntimeError
        With what ncu said, if there is no table in it or a metric has no number.
    """
    lines = log.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        raise RuntimeError(f"ncu counted nothing:\n{log}")
    launches: dict[str, tuple[str, dict[str, float]]] = {}
    for row in csv.DictReader(line for line in lines[start:] if line.startswith('"')):
        # The name alone, or all of it: void cuflash::fused<float, ...>(...)
        name = re.search(r"(\w+)(?=[<(]|$)", row["Kernel Name"])
        kernel = name[1] if name else row["Kernel Name"]
        try:
            value = float(row["Metric Value"].replace(",", ""))
        except ValueError:
            raise RuntimeError(f"ncu has no number for {row['Metric Name']}:\n{log}") from None
        launches.setdefault(row["ID"], (kernel, {}))[1][row["Metric Name"]] = value
    return list(launches.values())


def describe(
    launched: Sequence[Launched], counted: Sequence[tuple[str, Counts]], elements: int
) -> list[rows.Row]:
    """Return a row for each of `launched` from the counts of its kernels, which follow in order.

    Raises
    ------
    RuntimeError
        Other kernels were counted than were launched.
    """
    wanted = [kernel for each in launched for kernel in each.residency.kernels]
    found = [kernel for kernel, _ in counted]
    if found != wanted:
        raise RuntimeError(f"launched were {wanted}; ncu counted {found}")
    rest = iter(counted)
    return [
        describe_one(each, [next(rest)[1] for _ in each.residency.kernels], elements)
        for each in launched
    ]


def describe_one(launched: Launched, counts: Sequence[Counts], elements: int) -> rows.Row:
    """Return the row of one method, whose kernels counted `counts`: bytes an element."""
    method, n, residency = launched
    trips, length = problems.SOFTMAX_TRIPS[method], elements // n * n

    def total(metric: str) -> float:
        return sum(each[metric] for each in counts) / length

    read, written = total(DRAM_READ), total(DRAM_WRITTEN)
    again = (trips - 2) * ITEMSIZE  # what is read after the first read, beside the one write
    return {
        "method": method,
        "dtype": DTYPE,
        "rows": length // n,
        "N": n,
        "regime": residency.regime,
        "DRAM read": read,
        "DRAM written": written,
        "DRAM bytes an element": read + written,
        "theory": trips * ITEMSIZE,
        "predicted": residency.trips * ITEMSIZE,
        "wave MB": residency.wave_bytes / 1e6,
        "L2 read": total(L2_READ) * SECTOR_BYTES,
        "absorbed": 1 - (read - ITEMSIZE) / again if again else "",
        "occupancy": counts[0][WARPS] / 100 if len(counts) == 1 else "",
        "resident": residency.occupancy if len(counts) == 1 else "",
    }


def pair(text: str) -> tuple[str, int]:
    """Read a method and a row length, ``fused:1024``."""
    method, _, n = text.partition(":")
    return method, int(n)


def main(arguments: Sequence[str] | None = None) -> None:
    """Count, print, and write the results."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.memory_traffic",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--launch",
        type=pair,
        nargs="+",
        metavar="METHOD:N",
        help="count nothing, only launch these: what runs under ncu",
    )
    parser.add_argument("--elements", type=int, default=ELEMENTS)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="row lengths N")
    parser.add_argument(
        "--fused-lengths", type=int, nargs="*", default=FUSED_LENGTHS, help="of fused alone"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to write to")
    chosen = parser.parse_args(arguments)
    if chosen.launch:
        launch(chosen.elements, chosen.launch)
        return
    record = rows.Record("memory_traffic", chosen.results, rows.device_environment)
    try:
        found = count(
            chosen.elements, list(planned(chosen.elements, chosen.lengths, chosen.fused_lengths))
        )
    except RuntimeError as error:
        parser.exit(1, f"nothing was counted: {error}\n")
    record.add("Softmax, bytes an element", found)
    record.close()


if __name__ == "__main__":
    main()
