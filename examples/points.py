"""What the examples about points in space share: real data, a command line, a progress bar.

The data come with matplotlib: a terrain, 344 x 403 heights around the Jacksboro fault in Tennessee,
and a photograph, of which the examples take grey patches of 8 x 8 pixels.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

#: Height of a cell of the terrain, and side of a patch of the photograph, in pixels.
CELL_METRES, PATCH = 90, 8


class Terrain(NamedTuple):
    """Heights in metres, (rows, columns), and the place of each cell, (rows * columns, 2)."""

    heights: np.ndarray
    places: np.ndarray


def terrain() -> Terrain:
    """Return the terrain; places are in units of its longer side, with the middle at 0."""
    from matplotlib.cbook import get_sample_data

    with get_sample_data("jacksboro_fault_dem.npz") as data:
        heights = data["elevation"].astype(np.float64)
    places = np.stack(np.indices(heights.shape), axis=-1).reshape(-1, 2).astype(np.float64)
    return Terrain(heights, (places - places.mean(axis=0)) / max(heights.shape))


def patches() -> np.ndarray:
    """Return all patches of the photograph, grey from 0 to 1: (rows, columns, 64)."""
    from matplotlib.cbook import get_sample_data
    from matplotlib.image import imread

    with get_sample_data("grace_hopper.jpg") as file:
        grey = imread(file, format="jpg") @ np.array([0.299, 0.587, 0.114]) / 255
    windows = np.lib.stride_tricks.sliding_window_view(grey, (PATCH, PATCH))
    return windows.reshape(*windows.shape[:2], PATCH * PATCH)


def to_numpy(array: Any) -> np.ndarray:
    """Bring an array of either library to the host."""
    return array.get() if hasattr(array, "get") else np.asarray(array)


def command_line(
    doc: str | None, argv: Sequence[str] | None, *, full: str, peer: str
) -> tuple[argparse.Namespace, Any]:
    """Parse a program's arguments; return them and the array library to compute with.

    Parameters
    ----------
    doc : str
        What ``--help`` prints.
    argv : sequence of str, optional
        The arguments.
    full : str
        What ``--full`` does.
    peer : str
        The library that ``--verify`` needs.
    """
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=int, default=4000, help="points (default: %(default)s)")
    parser.add_argument("--full", action="store_true", help=full)
    parser.add_argument("--dtype", choices=("float64", "float32"), default="float64")
    parser.add_argument("--array-library", choices=("numpy", "cupy"), default="numpy")
    parser.add_argument("--verify", action="store_true", help=f"compare with {peer}, at 500 points")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a picture")
    args = parser.parse_args(argv)
    if args.size < 100:
        parser.error(f"--size {args.size}: 100 or more are needed")
    if importlib.util.find_spec("matplotlib") is None:
        parser.error("the data come with matplotlib (pip install 'cuflash[plot]')")
    if args.verify and importlib.util.find_spec(peer) is None:
        parser.error(f"--verify needs {peer} (pip install 'cuflash[examples]')")
    if args.plot:  # before the work, not after it
        from matplotlib.figure import Figure

        if not args.plot.parent.is_dir():
            parser.error(f"--plot {args.plot}: no such folder")
        if args.plot.suffix[1:] not in Figure().canvas.get_supported_filetypes():
            parser.error(f"--plot {args.plot}: name a .png, .svg or .pdf file")
    try:
        xp = import_module(args.array_library)
        if xp is not np:
            xp.cuda.runtime.getDeviceCount()  # raises if there is none
    except (ImportError, RuntimeError) as error:
        parser.error(f"--array-library {args.array_library}: {error}")
    return args, xp


class Bar:
    """A progress bar on standard error: steps, seconds, and pairs of points a second."""

    width = 32

    def __init__(self, total: int) -> None:
        self.total, self.done, self.pairs, self.start = total, 0, 0, time.perf_counter()

    def __call__(self, pairs: int, note: str = "") -> None:
        """Draw the bar after a step over this many pairs; end the line when all is done."""
        self.done += 1
        self.pairs += pairs
        seconds = time.perf_counter() - self.start
        bar = "#" * (self.width * self.done // self.total)
        print(
            f"\r[{bar:<{self.width}}] {self.done} of {self.total}, {seconds:.1f} s, "
            f"{self.pairs / max(seconds, 1e-9) / 1e9:.2f} billion pairs/s{note}",
            end="\n" if self.done == self.total else "",
            file=sys.stderr,
            flush=True,
        )


def describe_size(rows: int, columns: int, dtype: np.dtype) -> str:
    """Say what is computed, and what it would take with the matrix in memory."""
    nbytes = rows * columns * dtype.itemsize
    size = f"{nbytes / 1e9:.0f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.0f} MB"
    return f"{rows} x {columns} pairs in {dtype}: {size} as a matrix, which is never built"
