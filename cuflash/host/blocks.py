"""How an array is cut into blocks that stay in cache."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from . import threads

#: One slice for each of the axes that are cut, so that indexing with a box keeps every axis.
Box = tuple[slice, ...]

#: Bytes of one block: a few of them lie in a core's second-level cache together.
BLOCK_BYTES = 1 << 19


def boxes(shape: Sequence[int], size: int) -> list[Box]:
    """Cut an index space, in C order, into boxes of at most `size` elements (but at least one).

    A box spans all of the trailing axes that fit, a piece of one axis and single indices of the
    axes before it. An empty index space has no boxes; that of a 0-d array has one.
    """
    if 0 in shape:
        return []
    cut, inner = len(shape), 1
    while cut and inner * shape[cut - 1] <= size:
        cut -= 1
        inner *= shape[cut]
    steps = [1] * (cut - 1) + [max(1, size // inner)] * (cut > 0) + list(shape[cut:])
    pieces = [
        [slice(start, min(start + step, length)) for start in range(0, length, step)]
        for length, step in zip(shape, steps, strict=True)
    ]
    return list(itertools.product(*pieces))


def volume(box: Box) -> int:
    """Return the number of elements of a box."""
    return math.prod(part.stop - part.start for part in box)


def memory_order(strides: Sequence[int]) -> list[int]:
    """Return the axes from the largest to the smallest stride."""
    return sorted(range(len(strides)), key=lambda axis: -abs(strides[axis]))


def for_each_run(count: int, work: Callable[[range], None]) -> None:
    """Call `work` on runs of range(count) that together cover it, on the engine's thread pool.

    A run is long enough to pay for the scratch memory that `work` allocates, and there are enough
    runs for the processors to end at about the same time. NumPy's floating point warnings are off
    within `work`.
    """

    def quiet(run: range) -> None:
        with np.errstate(all="ignore"):  # of the thread that runs, not the one that calls
            work(run)

    length = max(1, -(-count // (4 * threads.worker_count())))
    runs = [range(start, min(start + length, count)) for start in range(0, count, length)]
    if len(runs) == 1:
        quiet(runs[0])
    elif runs:
        threads.run([partial(quiet, run) for run in runs])
