"""Tables of docs/memory-wall.md and docs/kernels.md from result files.

`benchmarks.softmax_regimes` writes them.

A table stands between ``<!-- table: name -->`` and ``<!-- /table -->``; the prose around it stays.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from cuflash.bench import problems, rows

_TABLE = re.compile(r"(<!-- table: (?P<name>\w+) -->\n).*?(<!-- /table -->)", re.DOTALL)

COPY = "device copy"
METHODS = ("naive", "fused", "online", "cluster", "auto")
TORCH = ("torch", "torch.compile")
PEERS = (*TORCH, "CuPy formula")
#: Row lengths of the tables by method and by dtype.
WALK = (128, *(2**power for power in range(10, 21)), *problems.SOFTMAX_SPLIT_LENGTHS)
DTYPES = ("float32", "bfloat16", "float16", "float64")
FIGURE = "figure"
TABLES = (
    "run",
    "walk",
    "dtypes",
    "family",
    "across",
    "traffic",
    "unheld",
    "occupancy",
    "claims",
    "regimes",
)
#: What stands for a table until there is a run.
PENDING = "*To be filled in by a run on the GPU.*\n"


def write(
    path: Path,
    timed: Sequence[rows.Row],
    counted: Sequence[rows.Row],
    claims: Sequence[rows.Row],
) -> None:
    """Write the tables of a document anew."""
    path.write_text(fill(path.read_text(), tables(timed, counted, claims)))


def fill(document: str, made: Mapping[str, str]) -> str:
    """Return a document with the tables that were made in place of those that it has."""

    def replaced(found: re.Match[str]) -> str:
        if found["name"] not in made:  # another benchmark's
            return found[0]
        return f"{found[1]}{made[found['name']]}{found[3]}"

    return _TABLE.sub(replaced, document)


def tables(
    timed: Sequence[rows.Row], counted: Sequence[rows.Row], claims: Sequence[rows.Row]
) -> dict[str, str]:
    """Return the tables by name, from softmax.csv, memory_traffic.csv and softmax_regimes.csv.

    A run that ends with the last of them made all three; without it, no table is filled in.
    """
    if not claims:
        return dict.fromkeys((FIGURE, *TABLES), PENDING)
    last = [row for row in timed if row["axis"] == "-1"]
    found = (
        run(timed),
        walk([row for row in last if row["dtype"] == "float32"]),
        dtypes(last),
        family(last),
        across([row for row in timed if row["axis"] == "0"]),
        traffic(counted),
        unheld([row for row in last if row["dtype"] == "float32"], counted),
        occupancy(claims),
        told(claims),
        regimes(claims),
    )
    made = {name: rows.markdown(table) for name, table in zip(TABLES, found, strict=True)}
    return {FIGURE: figure(timed), **made}


def run(timed: Sequence[rows.Row]) -> list[rows.Row]:
    """Return where the figures are from."""
    first = timed[0]
    return [{name: first[name] for name in ("machine", "driver", "cupy", "nvrtc", "peers", "date")}]


def figure(timed: Sequence[rows.Row]) -> str:
    """Return the image that `benchmarks.softmax` draws, as seen from a document beside the code."""
    path = rows.result_path(Path("../benchmarks/results"), "softmax", timed[0]["machine"])
    return f"![Softmax: rates over row length]({path.with_suffix('.png').as_posix()})\n"


def _shares(timed: Sequence[rows.Row], operation: str) -> dict[tuple[str, int, str], str]:
    """Return the share of the copy's rate by (dtype, row length, competitor)."""
    return {
        (row["dtype"], int(row["N"]), row["method"]): f"{float(row['speedup']):.2f}"
        for row in timed
        if (row["operation"], row["peer"]) == (operation, COPY)
    }


def walk(timed: Sequence[rows.Row]) -> list[rows.Row]:
    """Return the share of the copy's rate by row length: the methods in turn, and the peers."""
    shares = _shares(timed, "softmax")
    taken = {int(row["N"]): row["regime"] for row in timed if row["operation"] == "softmax"}
    return [
        {
            "N": n,
            **{name: shares.get(("float32", n, name), "") for name in (*METHODS, *PEERS)},
            "auto takes": taken[n],
        }
        for n in WALK
        if n in taken
    ]


def dtypes(timed: Sequence[rows.Row]) -> list[rows.Row]:
    """Return the share of `auto` by row length and dtype, beside the better of PyTorch's."""
    shares = _shares(timed, "softmax")
    measured = sorted({n for _, n, _ in shares if n in WALK})
    columns = [d for d in DTYPES if any(dtype == d for dtype, _, _ in shares)]

    return [
        {
            "N": n,
            **{
                name: text
                for dtype in columns
                for name, text in (
                    (dtype, shares.get((dtype, n, "auto"), "")),
                    (f"torch, {dtype}", max(shares.get((dtype, n, peer), "") for peer in TORCH)),
                )
            },
        }
        for n in measured
    ]


def family(timed: Sequence[rows.Row]) -> list[rows.Row]:
    """Return the share of `auto` for the rest of the family, beside the better of PyTorch's."""
    found: list[rows.Row] = []
    for operation in list(problems.SOFTMAX_OPERATIONS)[1:]:
        shares = _shares(timed, operation)
        for dtype in DTYPES:
            for n in sorted({n for d, n, _ in shares if d == dtype}):
                found.append(
                    {
                        "operation": operation,
                        "dtype": dtype,
                        "N": n,
                        "auto": shares[dtype, n, "auto"],
                        "torch": max(shares.get((dtype, n, peer), "") for peer in TORCH),
                        "CuPy formula": shares.get((dtype, n, "CuPy formula"), ""),
                    }
                )
    return found


def across(timed: Sequence[rows.Row]) -> list[rows.Row]:
    """Return the share of `auto` over the first axis, of softmax and its gradient."""
    shares = {operation: _shares(timed, operation) for operation in ("softmax", "softmax_vjp")}
    measured = {(dtype, n) for found in shares.values() for dtype, n, _ in found}
    return [
        {
            "dtype": dtype,
            "N": n,
            **{
                name if peer == "auto" else f"{name}, {peer}": found.get((dtype, n, peer), "")
                for name, found in shares.items()
                for peer in ("auto", "torch")
            },
        }
        for dtype, n in sorted(measured, key=lambda each: (DTYPES.index(each[0]), each[1]))
    ]


def traffic(counted: Sequence[rows.Row]) -> list[rows.Row]:
    """Return DRAM bytes an element, counted, beside the trips that theory says."""
    compared = {row["N"] for row in counted if row["method"] == "naive"}
    return [
        {
            "N": row["N"],
            "method": row["regime"],
            "trips": problems.SOFTMAX_TRIPS[row["method"]],
            "bytes by trips": row["theory"],
            "bytes counted": f"{float(row['DRAM bytes an element']):.1f}",
            "rows in flight, MB": f"{float(row['wave MB']):.0f}",
            "later reads that L2 absorbs": _percent(row["absorbed"]),
        }
        for row in counted
        if row["N"] in compared
    ]


def unheld(timed: Sequence[rows.Row], counted: Sequence[rows.Row]) -> list[rows.Row]:
    """Return what `naive` and `online`, which hold no row, reach and bring through DRAM."""
    shares = _shares(timed, "softmax")
    by_length: dict[int, dict[str, rows.Row]] = {}
    for row in counted:
        by_length.setdefault(int(row["N"]), {})[row["method"]] = row
    methods = ("naive", "online")
    return [
        {
            "N": n,
            **{name: shares["float32", n, name] for name in methods},
            **{f"{name}, bytes": _bytes_of_trips(found[name]) for name in methods},
            "rows in flight of online, MB": f"{float(found['online']['wave MB']):.0f}",
            "its second read that L2 absorbs": _percent(found["online"]["absorbed"]),
        }
        for n, found in by_length.items()
        if all(name in found and ("float32", n, name) in shares for name in methods)
    ]


def _bytes_of_trips(row: rows.Row) -> str:
    return f"{float(row['DRAM bytes an element']):.1f} of {row['theory']}"


def occupancy(claims: Sequence[rows.Row]) -> list[rows.Row]:
    """Return occupancy by row length: of the source's kernel on two GPUs, and of our `fused`."""
    found: dict[int, dict[str, str]] = {}
    for row in claims:
        if row["quantity"] == "occupancy":
            *_, gpu = row["claim"].partition(" without opt-in, ")
            name = f"source's kernel, {gpu}" if gpu else "fused, predicted"
            by_name = found.setdefault(int(row["N"]), {})
            by_name[name] = _percent(row["here"] if gpu else row["predicted"])
            if not gpu:
                by_name["fused, counted"] = _percent(row["here"])
    columns = dict.fromkeys(name for by_name in found.values() for name in by_name)
    return [
        {"N": n, "KB a row": n * 4 // 1024, **{name: found[n].get(name, "") for name in columns}}
        for n in sorted(found)
    ]


def told(claims: Sequence[rows.Row]) -> list[rows.Row]:
    """Return the statements for which the source gives a figure."""
    return [
        {
            "statement": row["claim"],
            "N": row["N"],
            "what": row["quantity"],
            **{name: _short(row[name]) for name in ("source", "theory", "here")},
            "holds": {"True": "yes", "False": "no"}.get(str(row["holds"]), ""),
        }
        for row in claims
        if row["source"] != ""
    ]


def regimes(claims: Sequence[rows.Row]) -> list[rows.Row]:
    """Return where each method begins."""
    return [
        {
            "method": row["method"],
            "taken from N": row["predicted"],
            "as fast as the one before from N (measured lengths)": row["here"],
        }
        for row in claims
        if row["claim"].startswith(f"{row['method']} follows")
    ]


def _percent(share: object) -> str:
    return "" if share == "" else f"{float(str(share)):.0%}"


def _short(value: object) -> str:
    return (
        "" if value == "" else f"{float(str(value)):.3g}" if float(str(value)) < 100 else f"{value}"
    )
