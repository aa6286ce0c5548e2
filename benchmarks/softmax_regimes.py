"""What a T4 once showed about softmax's methods, statement by statement, on the GPU at hand.

``python -m benchmarks.softmax_regimes`` measures nothing itself. It reads ``softmax.csv`` and
``memory_traffic.csv`` of ``benchmarks/results/<gpu>/``, predicts what kernels as shipped do on that
GPU, and writes ``softmax_regimes.csv`` beside them. ``--device-like h200`` does so without the GPU;
``--document docs/memory-wall.md docs/kernels.md`` also writes the tables of these anew.

The source: float32 softmax on a Tesla T4 in three versions. v1 is `naive`, v2 `fused` with its row
in the shared memory of a block of 256 threads that asks for no more than every block may have, v3
`online`. A row of the table has the source's figure, what the trips to memory say (*theory*), what
shipped kernels and the limits of the GPU say (*predicted*), and what was found *here*.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cuflash.bench import problems, rows

from . import memory_wall

if TYPE_CHECKING:
    from cuflash.device.executor import DeviceLimits

RESULTS = Path(__file__).parent / "results"

DTYPE, ITEMSIZE = "float32", 4
SOURCE_GPU = "Tesla T4"
#: v2 over v1 by row length; v3's bytes, of three trips, over the rate of DRAM at N = 1024; the row
#: length at which v2's occupancy is half, and the longest row that it holds.
SOURCE_FUSED_OVER_NAIVE = {1024: 2.02, 2048: 1.86, 4096: 1.92}
SOURCE_ONLINE_LENGTH, SOURCE_ONLINE_RATE = 1024, 1.11
SOURCE_OCCUPANCY, SOURCE_LONGEST = {8192: 0.5}, 12288
#: Row lengths are searched in these steps.
STEP = 1024
#: What is within it counts as equally fast: what repeated runs differ by.
SLACK = problems.TARGET_SLACK

COLUMNS = ("source", "theory", "predicted", "here", "lower", "upper", "holds")


def claim(
    statement: str, method: str, n: int | str, quantity: str, origin: rows.Row, **found: Any
) -> rows.Row:
    """Return a row; `origin` is one of the run that it was found in, whose environment it takes."""
    return {
        "claim": statement,
        "method": method,
        "dtype": DTYPE,
        "N": n,
        "quantity": quantity,
        **{column: found.get(column, "") for column in COLUMNS},
        **{column: origin.get(column, "") for column in rows.ENVIRONMENT},
    }


def fused_over_naive(timed: Sequence[rows.Row]) -> Iterator[rows.Row]:
    """Yield rows: one kernel that holds its row takes half of three kernels' time."""
    low, high = problems.OVER_FUSED["naive"]
    for row in timed:
        n = int(row["N"])
        if (row["method"], row["peer"]) == ("naive", "fused") and n in SOURCE_FUSED_OVER_NAIVE:
            here = 1 / float(row["speedup"])
            yield claim(
                "fused is twice as fast as naive",
                "fused",
                n,
                "naive's time over fused's",
                row,
                source=SOURCE_FUSED_OVER_NAIVE[n],
                theory=problems.SOFTMAX_TRIPS["naive"] / problems.SOFTMAX_TRIPS["fused"],
                here=here,
                lower=1 / float(row["upper"]),
                upper=1 / float(row["lower"]),
                holds=low <= here <= high,
            )


def online_over_memory(timed: Sequence[rows.Row]) -> Iterator[rows.Row]:
    """Yield rows: short rows of online move more bytes than DRAM could, for L2 serves a part."""
    trips = problems.SOFTMAX_TRIPS["online"] / 2
    for row in timed:
        if (row["method"], row["peer"]) != ("online", "device copy"):
            continue
        short = int(row["N"]) == SOURCE_ONLINE_LENGTH
        if short or int(row["N"]) in problems.ONLINE_FADES:
            here = trips * float(row["speedup"])
            yield claim(
                "online passes the rate of DRAM while L2 serves its second read",
                "online",
                int(row["N"]),
                "bytes of three trips over the copy's rate",
                row,
                source=SOURCE_ONLINE_RATE if short else "",
                theory=1.0,
                here=here,
                lower=trips * float(row["lower"]),
                upper=trips * float(row["upper"]),
                holds=here > 1 if short else "",
            )


def trips(counted: Sequence[rows.Row]) -> Iterator[rows.Row]:
    """Yield rows: passes over DRAM that ncu counted, and what L2 took off them."""
    for row in counted:
        method, n = row["method"], int(row["N"])
        here = float(row["DRAM bytes an element"]) / ITEMSIZE
        predicted = round(float(row["predicted"]) / ITEMSIZE)
        yield claim(
            "an element makes as many trips to DRAM as the method reads and writes it",
            method,
            n,
            "trips to DRAM",
            row,
            theory=problems.SOFTMAX_TRIPS[method],
            predicted=predicted,
            here=here,
            holds=round(here) == predicted,
        )
        if method == "online":
            fits = predicted < problems.SOFTMAX_TRIPS[method]
            absorbed = float(row["absorbed"])
            yield claim(
                "L2 absorbs online's second read while a wave of rows fits",
                method,
                n,
                f"share absorbed, wave of {float(row['wave MB']):.0f} MB",
                row,
                predicted=float(fits),
                here=absorbed,
                holds=(absorbed > 0.5) == fits,
            )


def source_occupancy(name: str, limits: DeviceLimits, origin: rows.Row) -> Iterator[rows.Row]:
    """Yield rows: occupancy as the source's conditions make it on a GPU."""
    from cuflash.device import occupancy

    statement = f"occupancy of a row in shared memory without opt-in, {name}"
    here = {n: occupancy.source_occupancy(limits, n)[1] for n in occupancy.SOURCE_LENGTHS}
    for n, share in here.items():
        told = SOURCE_OCCUPANCY.get(n, "") if name == SOURCE_GPU else ""
        holds = share == told if told else ""
        yield claim(
            statement, "fused", n, "occupancy", origin, source=told, here=share, holds=holds
        )
    fitting = (n for n in range(STEP, 2**16, STEP) if occupancy.source_occupancy(limits, n)[0])
    longest = max(fitting)
    yield claim(
        statement,
        "fused",
        longest,
        "longest row",
        origin,
        source=SOURCE_LONGEST,
        here=longest,
        holds=longest == SOURCE_LONGEST,
    )


def fused_occupancy(limits: DeviceLimits, counted: Sequence[rows.Row]) -> Iterator[rows.Row]:
    """Yield rows: occupancy of the shipped kernel, counted by ncu, and where it falls by half."""
    statement = "occupancy of fused halves where a multiprocessor holds half as many rows"
    found = {int(row["N"]): row for row in counted if row["method"] == "fused"}
    for n in sorted(found):
        here, predicted = float(found[n]["occupancy"]), float(found[n]["resident"])
        yield claim(
            statement,
            "fused",
            n,
            "occupancy",
            found[n],
            predicted=predicted,
            here=here,
            holds=abs(here - predicted) <= 0.1,
        )
    if not found:
        return
    falls = [
        after
        for n, after in pairwise(sorted(found))
        if float(found[after]["occupancy"]) < 0.6 * float(found[n]["occupancy"])
    ]
    here = min(falls, default=None)
    predicted = cliff(limits)
    expected = min((n for n in found if predicted and n >= predicted), default=None)
    yield claim(
        statement,
        "fused",
        "",
        "row length from which it is half; here, the first that was counted",
        found[min(found)],
        predicted=predicted or "none",
        here=here or "none",
        holds=here == expected,
    )


def cliff(limits: DeviceLimits) -> int | None:
    """Return the least row length, a multiple of STEP, from which half as many blocks reside."""
    from cuflash.device.occupancy import residency

    dtype, before = problems.dtype_of(DTYPE), None
    for n in range(STEP, 2**20, STEP):
        try:
            now = residency(limits, dtype, n, "fused")
        except ValueError:  # the longest row has been passed
            return None
        if before and now.threads == before.threads and 2 * now.blocks <= before.blocks:
            return n
        before = now
    return None


def regimes(limits: DeviceLimits, timed: Sequence[rows.Row]) -> Iterator[rows.Row]:
    """Yield rows: where each method begins to be taken, and to be the faster one."""
    from cuflash.device.plans import softmax_regimes

    rates = rates_of(timed)
    taken = softmax_regimes(limits)
    for before, regime in pairwise(taken):
        first = int(before.row_bytes) // ITEMSIZE + 1
        here = overtakes(rates, regime.method, before.method)
        yield claim(
            f"{regime.method} follows {before.method}",
            regime.method,
            "",
            "row length from which it is taken; here, the first measured at which it is as fast",
            timed[0],
            predicted=first,
            here=here or "none",
            holds="",
        )
    for row in timed:
        if (row["regime"], row["method"], row["peer"]) == ("split", "auto", "device copy"):
            yield claim(
                "few long rows fill the GPU too",
                "online",
                int(row["N"]),
                f"share of the copy's rate, {row['rows']} rows",
                row,
                theory=2 / problems.SOFTMAX_TRIPS["online"],
                here=float(row["speedup"]),
                lower=float(row["lower"]),
                upper=float(row["upper"]),
            )
    for n, by_method in sorted(rates.items()):
        others = {m: rate for m, rate in by_method.items() if m in problems.SOFTMAX_TRIPS}
        if "auto" in by_method and others:
            fastest = max(others, key=others.__getitem__)
            here = by_method["auto"] / others[fastest]
            yield claim(
                "auto takes the fastest method",
                fastest,
                n,
                "auto's rate over the fastest method's",
                timed[0],
                theory=1.0,
                here=here,
                holds=here >= 1 - 2 * SLACK,
            )


def rates_of(timed: Sequence[rows.Row]) -> dict[int, dict[str, float]]:
    """Return rates by row length and competitor."""
    found: dict[int, dict[str, float]] = {}
    for row in timed:
        if row["peer"] == "device copy":
            found.setdefault(int(row["N"]), {})[row["method"]] = float(row["rate"])
    return found


def overtakes(rates: dict[int, dict[str, float]], method: str, other: str) -> int | None:
    """Return the least row length from which a method is never slower than another one."""
    first = None
    for n, by_method in sorted(rates.items(), reverse=True):
        if method not in by_method:
            continue
        if by_method[method] < (1 - SLACK) * by_method.get(other, 0.0):
            break
        first = n
    return first


def table(
    limits: DeviceLimits, timed: Sequence[rows.Row], counted: Sequence[rows.Row]
) -> list[rows.Row]:
    """Return all rows from those of softmax.csv and memory_traffic.csv; the latter may be none."""
    from cuflash.device.occupancy import KNOWN_GPUS

    kind = ("softmax", DTYPE, "-1")
    timed = [row for row in timed if (row["operation"], row["dtype"], row["axis"]) == kind]
    timed.sort(key=lambda row: int(row["N"]))
    return [
        *fused_over_naive(timed),
        *source_occupancy(SOURCE_GPU, KNOWN_GPUS["t4"], timed[0]),
        *source_occupancy(timed[0]["machine"], limits, timed[0]),
        *fused_occupancy(limits, counted),
        *online_over_memory(timed),
        *trips(counted),
        *regimes(limits, timed),
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the results of a GPU, and write the table and, if asked to, the documents."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.softmax_regimes",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device-like", choices=("h200",), help="of a GPU that is not here")
    parser.add_argument(
        "--document", type=Path, nargs="+", default=[], help="write the tables of these files anew"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder with results")
    chosen = parser.parse_args(arguments)
    machine, limits = _gpu(chosen.device_like)
    timed, counted = (
        rows.read_rows(rows.result_path(chosen.results, subject, machine))
        for subject in ("softmax", "memory_traffic")
    )
    if not timed:
        parser.exit(1, f"{chosen.results} has no softmax.csv of this GPU\n")
    found = table(limits, timed, counted)
    path = rows.write_rows(chosen.results, "softmax_regimes", [], {"machine": machine}, found)
    hidden = {"dtype", *rows.ENVIRONMENT}
    print(rows.table({k: v for k, v in row.items() if k not in hidden} for row in found))
    for document in chosen.document:
        memory_wall.write(document, timed, counted, rows.read_rows(path))


def _gpu(like: str | None) -> tuple[str, DeviceLimits]:
    """Return the name under which a GPU has results, and its limits."""
    from cuflash.device import occupancy

    if like is not None:
        return f"NVIDIA {like}", occupancy.KNOWN_GPUS[like]
    import cupy

    limits = occupancy.device_limits(cupy.cuda.runtime.getDevice())
    return rows.device_environment()["machine"], limits


if __name__ == "__main__":
    main()
