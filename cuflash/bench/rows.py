"""Result rows: printed as a table, kept as CSV with the environment they were measured in."""

from __future__ import annotations

import csv
import datetime
import html
import io
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from .._version import __version__
from .timing import Comparison

Row = Mapping[str, Any]

#: Columns that describe a measurement on a device.
ENVIRONMENT = (
    "machine",
    "driver",
    "cupy",
    "nvrtc",
    "peers",
    "python",
    "cuflash",
    "revision",
    "date",
)
_PEER_LIBRARIES = ("scipy", "torch", "jax")


def host_environment() -> dict[str, str]:
    """Describe the machine and the libraries of a measurement on the host."""
    from ..host.threads import worker_count

    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    return {
        "machine": _cpu_name(),
        "cpus": str(worker_count()),
        "numpy": np.__version__,
        "blas": f"{blas['name']} {blas['version']}",
        **_software(),
    }


def device_environment() -> dict[str, str]:
    """Describe the GPU and the libraries of a measurement on the current device."""
    import cupy

    properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)
    return {
        "machine": properties["name"].decode(),
        "driver": _driver(),
        "cupy": cupy.__version__,
        "nvrtc": ".".join(map(str, cupy.cuda.nvrtc.getVersion())),
        **_software(),
    }


@cache
def _driver() -> str:
    """Return the version of the GPU's driver, which takes nvidia-smi up to a second to tell."""
    return _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")


def _software() -> dict[str, str]:
    peers = [
        f"{name} {sys.modules[name].__version__}" for name in _PEER_LIBRARIES if name in sys.modules
    ]
    return {
        "peers": "; ".join(peers),
        "python": platform.python_version(),
        "cuflash": __version__,
        "revision": _revision(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        found = re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE)
        if found:
            return found[1].strip()
    return platform.processor() or platform.machine()


def _revision() -> str:
    """Return the commit of the checkout this package runs from, "+" if changed since, or ""."""
    here = Path(__file__).resolve().parent
    commit = _output("git", "-C", str(here), "rev-parse", "--short", "HEAD")
    changed = commit and _output("git", "-C", str(here), "status", "--porcelain", "-uno")
    return f"{commit}+" if changed else commit


def _output(program: str, *arguments: str) -> str:
    """Return the first line that a program prints, or "" where it is missing or fails."""
    if shutil.which(program) is None:
        return ""
    result = subprocess.run([program, *arguments], capture_output=True, text=True, check=False)
    return result.stdout.partition("\n")[0].strip() if result.returncode == 0 else ""


def timing(
    result: Comparison,
    name: str,
    peer: str,
    work: float,
    unit: str,
    *,
    peer_work: float | None = None,
) -> Row:
    """Describe the speed of a competitor and, from ratios within rounds, its speedup over a peer.

    Parameters
    ----------
    result : Comparison
        Both were in it.
    name, peer : str
        The competitor and what it is held against.
    work : float
        What a call does, in `unit` times seconds.
    unit : str
        Such as "TB/s".
    peer_work : float, optional
        What a call of the peer does, if that is not the same: rates are compared, not times.
    """
    peer_work = work if peer_work is None else peer_work
    lower, median, upper = (x * work / peer_work for x in result.speedup(name, peer))
    seconds, peer_seconds = result.median(name), result.median(peer)
    return {
        "ms": seconds * 1e3,
        "rate": work / seconds,
        "unit": unit,
        "peer": peer,
        "peer ms": peer_seconds * 1e3,
        "peer rate": peer_work / peer_seconds,
        "speedup": median,
        "lower": lower,
        "upper": upper,
        "SM MHz": result.clock(name),
    }


class Record:
    """Rows as they come: printed at once, and the file written anew, so that a run can be cut off.

    Parameters
    ----------
    subject : str
        Names the file.
    folder : Path or None
        As `write_rows` takes it; None writes nothing.
    environment : callable
        Describes the machine; called whenever the file is written, since libraries appear in it
        once they are loaded.
    keep : sequence of str, optional
        Columns that name a problem. The file's rows about problems that this run does not add stay
        in it, so that one file can come of several runs. Without, the file is replaced.
    """

    def __init__(
        self,
        subject: str,
        folder: Path | None,
        environment: Callable[[], Mapping[str, str]],
        keep: Sequence[str] = (),
    ) -> None:
        self._subject, self._folder, self._environment = subject, folder, environment
        self._rows: list[Row] = []
        self._keep, self._kept = keep, list[Row]()
        if keep and folder is not None:
            self._kept = read_rows(result_path(folder, subject, environment()["machine"]))

    def add(self, title: str, found: Sequence[Row], printed: Sequence[Row] | None = None) -> None:
        """Add rows, and print them, or those that are given to be printed."""
        print(f"{title}\n{table(found if printed is None else printed)}\n", flush=True)
        self._rows += found
        if self._folder is not None:
            done = {self._problem(row) for row in self._rows}
            kept = [row for row in self._kept if self._problem(row) not in done]
            write_rows(self._folder, self._subject, self._rows, self._environment(), kept)

    def _problem(self, row: Row) -> tuple[str, ...]:
        return tuple(_text(row.get(column, "")) for column in self._keep)

    def close(self) -> None:
        """Print the environment."""
        described = [f"{name}: {value}" for name, value in self._environment().items() if value]
        print("\n".join(described), flush=True)


def result_path(folder: Path, subject: str, machine: str) -> Path:
    """Return ``folder/<machine>/<subject>.csv``."""
    slug = re.sub(r"[^a-z0-9]+", "-", machine.lower()).strip("-")
    return folder / slug / f"{subject}.csv"


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a file, all values as text; none if there is no file."""
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def write_rows(
    folder: Path,
    subject: str,
    rows: Sequence[Row],
    environment: Mapping[str, str],
    kept: Sequence[Row] = (),
) -> Path:
    """Write ``folder/<machine>/<subject>.csv``, every row with its environment.

    Rows may have different columns; a column that a row lacks is left empty. Before them go those
    of `kept`, which have an environment already.

    Returns
    -------
    pathlib.Path
        The file, replaced as a whole.
    """
    path = result_path(folder, subject, environment["machine"])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(csv_text(rows, environment, kept), encoding="utf-8", newline="")
    return path


def csv_text(rows: Sequence[Row], environment: Mapping[str, str], kept: Sequence[Row] = ()) -> str:
    """Return what `write_rows` writes."""
    complete = [*kept, *({**row, **environment} for row in rows)]
    columns = list(dict.fromkeys(column for row in [*rows, *complete] for column in row))
    file = io.StringIO()
    writer = csv.DictWriter(file, columns, lineterminator="\n")
    writer.writeheader()
    for row in complete:
        writer.writerow({name: _text(value) for name, value in row.items()})
    return file.getvalue()


def html_table(rows: Iterable[Row]) -> str:
    """Lay rows of the same columns out as a table of HTML."""
    cells = [{name: _text(value) for name, value in row.items()} for row in rows]
    lines = [("th", list(cells[0])), *(("td", list(cell.values())) for cell in cells)]
    text = [
        f"<tr>{''.join(f'<{tag}>{html.escape(value)}</{tag}>' for value in line)}</tr>"
        for tag, line in lines
    ]
    return "<table>\n{}\n</table>".format("\n".join(text))


def markdown(rows: Iterable[Row]) -> str:
    """Lay rows of the same columns out as a table of Markdown; without rows, as nothing."""
    cells = [{name: _text(value) for name, value in row.items()} for row in rows]
    if not cells:
        return ""
    lines = [list(cells[0]), ["---"] * len(cells[0]), *(list(cell.values()) for cell in cells)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def table(rows: Iterable[Row]) -> str:
    """Lay rows of the same columns out as text, one line each below a line of names."""
    cells = [{name: _text(value) for name, value in row.items()} for row in rows]
    if not cells:
        return ""
    widths = {name: max(len(name), *(len(cell[name]) for cell in cells)) for name in cells[0]}
    lines = [{name: name for name in widths}, *cells]
    return "\n".join(
        "  ".join(line[name].ljust(width) for name, width in widths.items()).rstrip()
        for line in lines
    )


def _text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
