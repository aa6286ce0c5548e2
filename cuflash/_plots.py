"""``cuflash plot``: pictures of the traffic model and of benchmark results, and a page to try."""

from __future__ import annotations

import argparse
import csv
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from . import analysis
from ._files import replacing
from .analysis.workload import Workload
from .problem import FLOATS

#: What a result file must tell, by subject.
_COLUMNS = {
    "softmax": ("method", "dtype", "rows", "N", "ms"),
    "attention": ("method", "dtype", "B", "H", "T", "D", "causal", "ms"),
}


def _size(text: str) -> int:
    if not 1 <= int(text) < 2**31:
        raise ValueError
    return int(text)


# argparse names the type in its message on a value that cannot be converted.
_size.__name__ = "size"


def add_command(commands: Any) -> None:
    """Add ``plot`` to the command line's commands.

    Parameters
    ----------
    commands : argparse's sub-parsers
        Their parsers report errors in the command line's way, and so do those made here.
    """
    plot = commands.add_parser("plot", help="pictures of memory, traffic and measured results")
    subjects = plot.add_subparsers(title="subjects", required=True, metavar="SUBJECT")
    parser = type(plot)

    def output(required: bool) -> argparse.ArgumentParser:
        parent = parser(add_help=False)
        parent.add_argument(
            *("-o", "--output"), type=Path, required=required, metavar="OUT", help="a .png or .svg"
        )
        return parent

    model = parser(add_help=False)
    model.add_argument("--batch", type=_size, default=1, help="default: %(default)s")
    model.add_argument("--heads", type=_size, default=32, help="default: %(default)s")
    model.add_argument("--head-dim", type=_size, default=128, help="default: %(default)s")
    model.add_argument(
        "--dtype",
        choices=[dtype.name for dtype in FLOATS],
        default="bfloat16",
        help="default: %(default)s",
    )
    model.add_argument(
        "--gpu",
        choices=(*analysis.GPUS, "device"),
        default="h100",
        help="by its data sheet, or the CUDA device that is here (default: %(default)s)",
    )

    memory = subjects.add_parser(
        "memory", parents=[output(False), model], help="attention's memory and least time over T"
    )
    memory.add_argument(
        "--html", type=Path, metavar="OUT", help="an interactive page in one file, for any browser"
    )
    memory.set_defaults(run=_memory)
    traffic = subjects.add_parser(
        "traffic", parents=[output(True), model], help="bytes through HBM, before and after fusion"
    )
    traffic.set_defaults(run=_traffic)
    roofline = subjects.add_parser(
        "roofline", parents=[output(True), model], help="each kernel under the ceilings of a GPU"
    )
    roofline.add_argument("--tokens", type=_size, default=8192, help="default: %(default)s")
    roofline.set_defaults(run=_roofline)
    for subject in _COLUMNS:
        measured = subjects.add_parser(
            subject,
            parents=[output(True)],
            help=f"measured {subject}, from a benchmark's result file",
        )
        measured.add_argument("--results", type=Path, required=True, metavar="CSV")
        measured.set_defaults(run=_measured, subject=subject)


def _memory(args: argparse.Namespace) -> None:
    if args.output is None and args.html is None:
        raise ValueError("plot memory: give -o OUT, --html OUT or both")
    if args.html is not None:
        _require("bokeh", "--html")
    if args.output is not None:
        _draw(args, lambda charts: charts.memory(_workload(args), _gpu(args)))
    if args.html is not None:
        from .analysis.page import memory_page

        text = memory_page(_workload(args), _gpu(args))
        with replacing(args.html) as file:
            file.write(text.encode())


def _traffic(args: argparse.Namespace) -> None:
    _draw(args, lambda charts: charts.traffic_over_tokens(_workload(args)))


def _roofline(args: argparse.Namespace) -> None:
    _draw(args, lambda charts: charts.roofline(_workload(args), _gpu(args), args.tokens))


def _measured(args: argparse.Namespace) -> None:
    def figure(charts: Any) -> Any:
        rows = _read_results(args.results, _COLUMNS[args.subject])
        try:
            return getattr(charts, args.subject)(rows)
        except (TypeError, ValueError) as error:  # NumPy's TypeError: there is no such dtype
            raise ValueError(f"{args.results}: {error}") from error

    _draw(args, figure)


def _draw(args: argparse.Namespace, figure: Callable[[Any], Any]) -> None:
    """Write a figure in the format that the file's name tells."""
    form = args.output.suffix.lower().removeprefix(".")
    if form not in ("png", "svg"):
        raise ValueError(f"-o {args.output}: the name must end in .png or .svg")
    _require("matplotlib", "plot")
    from .analysis import charts

    drawn = figure(charts)
    with replacing(args.output) as file:
        _save(drawn, file, form)


def _save(figure: Any, file: IO[bytes], form: str) -> None:
    from matplotlib import rc_context

    # A picture drawn again is the same file: no date in it, and names of its parts not random. Text
    # in an SVG stays text.
    with rc_context({"svg.hashsalt": "cuflash", "svg.fonttype": "none"}):
        metadata = {"Date": None} if form == "svg" else None
        figure.savefig(file, format=form, dpi=120, metadata=metadata)


def _require(library: str, what: str) -> None:
    if importlib.util.find_spec(library) is None:
        raise ValueError(f"{what} needs {library} (pip install 'cuflash[plot]')")


def _workload(args: argparse.Namespace) -> Workload:
    return Workload(args.batch, args.heads, args.head_dim, args.dtype)


def _gpu(args: argparse.Namespace) -> analysis.Roofline:
    try:
        return analysis.roofline(0 if args.gpu == "device" else args.gpu)
    except RuntimeError as error:
        raise ValueError(f"--gpu {args.gpu}: {error}") from error


def _read_results(path: Path, columns: tuple[str, ...]) -> list[dict[str, str]]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            rows, found = list(reader), reader.fieldnames or ()
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from error
    except (csv.Error, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a CSV file: {error}") from error
    missing = [name for name in columns if name not in found]
    if missing:
        raise ValueError(f"{path} has no column {', '.join(missing)}")
    return rows
