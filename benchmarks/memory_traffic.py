"""DRAM bytes an element of each softmax method, counted by ncu, beside the trips that theory says.

``python -m benchmarks.memory_traffic`` runs itself under NVIDIA Nsight Compute (`ncu` on the PATH,
and permission to read the hardware's counters), which launches each method once at each row length,
and writes ``benchmarks/results/<gpu>/memory_traffic.csv``. It takes about a minute.

The second and third read of an element may be served by the L2 cache: *absorbed* is the share of
them that did not reach DRAM. ncu empties the cache before each kernel. What a kernel wrote last may
still lie in the cache when counting ends, up to the cache's size, so that *written* is a few
percent low.
"""

from __future__ import annotations

import argparse
import csv
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import cuflash
from cuflash.bench import device, problems, rows

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"

ELEMENTS = 2**28
LENGTHS = (1024, 4096, 65536)
#: The kernels of each method, in order.
KERNELS = {
    "naive": ("naive_maximum", "naive_normalizer", "apply"),
    "fused": ("fused",),
    "online": ("online",),
}
DRAM_READ, DRAM_WRITTEN = "dram__bytes_read.sum", "dram__bytes_write.sum"
L2_READ = "lts__t_sectors_op_read.sum"
SECTOR_BYTES = 32
METRICS = (DRAM_READ, DRAM_WRITTEN, L2_READ)

Counts = Mapping[str, float]


def launch(elements: int, lengths: Iterable[int]) -> None:
    """Launch each method once at each row length that it can hold, and print what was launched.

    This is what runs under ncu.
    """
    x = device.normal((elements,), "float32", seed=0)
    for n in lengths:
        for method in KERNELS:
            try:
                cuflash.softmax(x.reshape(-1, n), method=method)
            except ValueError:  # a row does not fit on chip
                continue
            print(method, n, flush=True)


def count(elements: int, lengths: Sequence[int]) -> list[rows.Row]:
    """Run `launch` under ncu and return its rows.

    Raises
    ------
    RuntimeError
        ncu is missing or failed; with what it said.
    """
    if shutil.which("ncu") is None:
        raise RuntimeError("ncu (NVIDIA Nsight Compute) is not on the PATH")
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        result = subprocess.run(
            ncu_command(log, elements, lengths),
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        said = log.read_text() if log.exists() else ""
    if result.returncode:
        raise RuntimeError(f"ncu failed:\n{said}\n{result.stdout}\n{result.stderr}")
    order = [line.split() for line in result.stdout.splitlines() if line.strip()]
    return describe([(method, int(n)) for method, n in order], parse(said), elements)


def ncu_command(log: Path, elements: int, lengths: Sequence[int]) -> list[str]:
    """Return the command that counts the launches of `launch`."""
    kernels = "|".join(name for names in KERNELS.values() for name in names)
    return [
        "ncu",
        *("--clock-control", "none"),
        *("--kernel-name-base", "function", "--kernel-name", f"regex:^({kernels})$"),
        *("--metrics", ",".join(METRICS)),
        *("--csv", "--print-units", "base", "--log-file", str(log)),
        *(sys.executable, "-m", "benchmarks.memory_traffic", "--launch"),
        *("--elements", str(elements), "--lengths", *map(str, lengths)),
    ]


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
    order: Sequence[tuple[str, int]], launches: Sequence[tuple[str, Counts]], elements: int
) -> list[rows.Row]:
    """Return a row for each (method, row length) from the launches, which follow in this order.

    Raises
    ------
    RuntimeError
        Other kernels were counted than were launched.
    """
    wanted = [kernel for method, _ in order for kernel in KERNELS[method]]
    counted = [kernel for kernel, _ in launches]
    if counted != wanted:
        raise RuntimeError(f"launched were {wanted}; ncu counted {counted}")
    rest = iter(launches)
    return [
        describe_one(method, n, [next(rest)[1] for _ in KERNELS[method]], elements)
        for method, n in order
    ]


def describe_one(method: str, n: int, counts: Sequence[Counts], elements: int) -> rows.Row:
    """Return the row of one method, whose kernels counted `counts`: bytes an element of float32."""
    itemsize, trips = 4, problems.SOFTMAX_TRIPS[method]

    def total(metric: str) -> float:
        return sum(each[metric] for each in counts) / elements

    read, written = total(DRAM_READ), total(DRAM_WRITTEN)
    again = (trips - 2) * itemsize  # what is read after the first read, beside the one write
    return {
        "method": method,
        "dtype": "float32",
        "rows": elements // n,
        "N": n,
        "DRAM read": read,
        "DRAM written": written,
        "DRAM bytes an element": read + written,
        "theory": trips * itemsize,
        "L2 read": total(L2_READ) * SECTOR_BYTES,
        "absorbed": 1 - (read - itemsize) / again if again else "",
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Count, print, and write the results."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.memory_traffic",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--launch", action="store_true", help="only launch: what runs under ncu")
    parser.add_argument("--elements", type=int, default=ELEMENTS)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="row lengths N")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to write to")
    chosen = parser.parse_args(arguments)
    if any(chosen.elements % n for n in chosen.lengths):
        parser.error("--lengths must divide --elements")
    if chosen.launch:
        launch(chosen.elements, chosen.lengths)
        return
    record = rows.Record("memory_traffic", chosen.results, rows.device_environment)
    record.add("Softmax, bytes an element", count(chosen.elements, chosen.lengths))
    record.close()


if __name__ == "__main__":
    main()
