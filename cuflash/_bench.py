"""``cuflash bench``: the one-minute report, as a table, a CSV file, a picture and a page."""

from __future__ import annotations

import argparse
import base64
import html
import importlib.util
import io
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from ._files import replacing
from .bench import quick, rows
from .bench.machine import Device, Host, Machine

#: Columns of the printed tables: those that all rows of a subject share go to its title.
_SHOWN = ("problem", "size", "dtype", "method", "ms", "rate", "unit", "of ceiling", "speedup")
_BAR = 30

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; margin: 0.5rem 0 1.5rem }
th, td { padding: 0.15rem 0.7rem; text-align: right; border-bottom: 1px solid #ddd }
th:first-child, td:first-child { text-align: left }
img { max-width: 100% }
"""
#: What a reader is to see in each table.
_NOTES = {
    "softmax": "Unfused: four reads and two writes of each element; fused: one and one.",
    "attention": "Materialized: scores and weights in memory. Scores fused: only the weights, half "
    "the traffic, and it still grows with the square of the tokens. Flash: neither.",
    "dropout, bias, LayerNorm": "One kernel in place of three: one read and one write of each "
    "element in place of three and three.",
    "matmul, bias, relu": "The epilogue in the kernel of the product. It is as good as free where "
    "the product is deep, and most of the time where it is shallow.",
}


class Progress:
    """A bar that is drawn anew in one line of a terminal, and nothing elsewhere."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._drawn = 0

    def __call__(self, done: int, count: int, name: str) -> None:
        """Draw how much is done and what is next; the last call wipes the line."""
        if not self._stream.isatty():
            return
        filled = _BAR * done // count
        bar = f"[{'#' * filled}{'.' * (_BAR - filled)}] {done}/{count} {name}" if name else ""
        self._stream.write(f"\r{bar:<{self._drawn}}" + "\r" * (not name))
        self._stream.flush()
        self._drawn = len(bar)


def add_command(commands: Any, engine: argparse.ArgumentParser) -> None:
    """Add ``bench`` to the command line's commands."""
    bench = commands.add_parser(
        "bench", parents=[engine], help="what fusion saves on this machine, in about a minute"
    )
    bench.add_argument(
        *("-o", "--output"),
        type=Path,
        default=Path("cuflash-bench"),
        metavar="FOLDER",
        help="for bench.csv, bench.png and report.html (default: %(default)s)",
    )
    bench.set_defaults(run=run)


def machine_of(engine: str) -> Machine:
    """Return where an engine of this name computes."""
    return Device() if engine == "device" else Host()


def run(args: argparse.Namespace) -> None:
    """Measure, print and write the report."""
    from .cli import engine_at_hand

    report(machine_of(engine_at_hand(args.engine)), args.output)


def report(machine: Machine, folder: Path, sizes: quick.Sizes | None = None) -> None:
    """Measure on a machine, print tables, and write the three files of a report."""
    measured = quick.run(machine, sizes, told=Progress(sys.stderr))
    environment = machine.environment()
    tables = {"ceilings": quick.ceiling_rows(measured.ceilings)}
    for subject, found in quick.by_subject(measured.rows).items():
        tables[subject] = [{name: row[name] for name in _SHOWN} for row in found]
    for title, table in tables.items():
        print(f"{title}\n{rows.table(table)}\n")

    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / "bench.csv") as file:
        file.write(rows.csv_text(measured.rows, environment).encode())
    written = ["bench.csv"]
    picture = None
    if importlib.util.find_spec("matplotlib") is None:
        print("there is no picture: matplotlib is not installed (pip install 'cuflash[plot]')")
    else:
        picture = _picture(measured.rows, environment["machine"])
        with replacing(folder / "bench.png") as file:
            file.write(picture)
        written.append("bench.png")
    with replacing(folder / "report.html") as file:
        file.write(page(tables, environment, picture).encode())
    print(f"{', '.join(written)} and report.html are in {folder}")


def _picture(found: Sequence[rows.Row], machine: str) -> bytes:
    from .bench import charts

    file = io.BytesIO()
    charts.report(found, machine).savefig(file, format="png")
    return file.getvalue()


def page(
    tables: Mapping[str, Sequence[rows.Row]],
    environment: Mapping[str, str],
    picture: bytes | None,
) -> str:
    """Return the report as a page in one file, which needs no network."""
    parts = [
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">',
        f"<title>cuflash on {html.escape(environment['machine'])}</title>",
        f"<style>{_STYLE}</style></head><body>",
        f"<h1>What fusion saves on {html.escape(environment['machine'])}</h1>",
    ]
    if picture is not None:
        encoded = base64.b64encode(picture).decode()
        parts.append(f'<img alt="rates and times" src="data:image/png;base64,{encoded}">')
    for title, table in tables.items():
        parts.append(f"<h2>{html.escape(title)}</h2>")
        if title in _NOTES:
            parts.append(f"<p>{html.escape(_NOTES[title])}</p>")
        parts.append(rows.html_table(table))
    parts.append("<h2>Where this was measured</h2>")
    described = [{"": name, "value": value} for name, value in environment.items() if value]
    parts += [rows.html_table(described), "</body></html>\n"]
    return "\n".join(parts)
