"""Timing of competitors against each other: interleaved rounds, equal windows, rotated inputs.

Clocks and neighbours change what a machine can do by more than the differences that matter. So
nothing is timed alone: in every round each competitor runs for one window, in an order that
alternates from round to round, and only ratios within a round are compared.
"""

from __future__ import annotations

import math
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, Self, TypeVar

import numpy as np

Call = Callable[[], object]
Item = TypeVar("Item")

#: A window's calls are counted anew until they fill it, by at most this factor at a time: the first
#: calls may be slow (allocation, caches) without saying much about the later ones.
_GROWTH = 16


class Clock(Protocol):
    """Times a run of calls that may only be queued when they return."""

    megahertz: float
    """Rate that the processor ran at towards the end of the last run; NaN if nobody looked."""

    def seconds(self, calls: Sequence[Call], count: int, start: int) -> float:
        """Run `count` calls, ``calls[start % len(calls)]`` first, and return their time."""


class HostClock:
    """Wall-clock time of calls that have ended when they return."""

    megahertz = math.nan

    def seconds(self, calls: Sequence[Call], count: int, start: int) -> float:
        """Run `count` calls in rotation and return their time."""
        began = time.perf_counter()
        for i in range(start, start + count):
            calls[i % len(calls)]()
        return time.perf_counter() - began


class CudaClock:
    """Time between two events on CuPy's current stream, on which the calls must put their work.

    PyTorch and CuPy both use the legacy default stream unless told otherwise, so that their calls
    can be timed beside each other.

    Parameters
    ----------
    meter : callable, optional
        Returns the rate of the processor in MHz, such as `cuflash.bench.device.SmClock`. It is
        called when all work is queued and, unless the calls are shorter than their launches, most
        of it still runs.
    """

    def __init__(self, meter: Callable[[], float] | None = None) -> None:
        self._meter = meter
        self.megahertz = math.nan

    def seconds(self, calls: Sequence[Call], count: int, start: int) -> float:
        """Run `count` calls in rotation and return the time between the events around them."""
        import cupy

        began, ended = cupy.cuda.Event(), cupy.cuda.Event()
        began.record()
        for i in range(start, start + count):
            calls[i % len(calls)]()
        ended.record()
        if self._meter is not None:
            self.megahertz = self._meter()
        ended.synchronize()
        return float(cupy.cuda.get_elapsed_time(began, ended)) / 1e3


class Quartiles(NamedTuple):
    """Quartiles of a quantity over the rounds."""

    lower: float
    median: float
    upper: float

    @classmethod
    def of(cls, values: Any) -> Self:
        """Return the quartiles of a sequence of numbers."""
        return cls(*(float(x) for x in np.quantile(values, (0.25, 0.5, 0.75))))


@dataclass(frozen=True)
class Comparison:
    """Seconds of one call of each competitor, round by round, and MHz of the processor."""

    seconds: Mapping[str, Sequence[float]]
    megahertz: Mapping[str, Sequence[float]] = field(default_factory=dict)

    def median(self, name: str) -> float:
        """Return the median seconds of one call."""
        return Quartiles.of(self.seconds[name]).median

    def clock(self, name: str) -> float:
        """Return the median MHz while a competitor ran; NaN if unknown."""
        return Quartiles.of(self.megahertz.get(name, [math.nan])).median

    def speedup(self, name: str, over: str) -> Quartiles:
        """Return how many times as fast as `over` a competitor is, from ratios within rounds."""
        return Quartiles.of(np.divide(self.seconds[over], self.seconds[name]))


def compare(
    competitors: Mapping[str, Call | Sequence[Call]],
    *,
    clock: Clock | None = None,
    rounds: int = 7,
    window: float = 0.06,
) -> Comparison:
    """Time competitors in interleaved rounds.

    Parameters
    ----------
    competitors : mapping of str to callable or sequence of callables
        Several callables do the same work on different inputs and are called in turn, so that no
        input stays in a cache by being the only one.
    clock : Clock, optional
        Default: `HostClock`.
    rounds : int
        Rounds in which every competitor is timed once.
    window : float
        Seconds that a competitor runs for in a round, at least; always a whole number of calls.

    Returns
    -------
    Comparison
    """
    clock = HostClock() if clock is None else clock
    calls = {name: [c] if callable(c) else list(c) for name, c in competitors.items()}
    for each in calls.values():
        clock.seconds(each, len(each), 0)  # compiles, loads and allocates what first calls do
    counts = {name: _fill(clock, each, window) for name, each in calls.items()}

    seconds: dict[str, list[float]] = {name: [] for name in calls}
    megahertz: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds):
        for name in list(calls) if turn % 2 == 0 else reversed(calls):
            count = counts[name]
            seconds[name].append(clock.seconds(calls[name], count, turn * count) / count)
            megahertz[name].append(clock.megahertz)
    return Comparison(seconds, megahertz)


def _fill(clock: Clock, calls: Sequence[Call], window: float) -> int:
    """Return the number of calls that fills a window."""
    count = 1
    while (taken := clock.seconds(calls, count, 0)) < window:
        wanted = 1.1 * count * window / taken if taken > 0 else math.inf
        count = math.ceil(min(wanted, _GROWTH * count))
    return count


def within(seconds: float, items: Iterable[Item]) -> Iterator[Item]:
    """Yield items while the time lasts: the next one only if the longest so far would still fit."""
    began = time.monotonic()
    longest = 0.0
    for item in items:
        before = time.monotonic()
        if before - began + longest > seconds:
            return
        yield item
        longest = max(longest, time.monotonic() - before)


def extra_bytes(call: Callable[[], Any]) -> int:
    """Return the peak of Python's and NumPy's allocations during a call, its results aside.

    `call` returns an array or a tuple of arrays that it allocates.
    """
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        results = call()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    arrays = results if isinstance(results, tuple) else (results,)
    return peak - before - sum(x.nbytes for x in arrays)
