"""``cuflash fuzz``: a progress bar, a table, and what failed with the lines that reproduce it."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

from hypothesis.configuration import set_hypothesis_home_dir

from . import __version__
from ._files import replacing
from .testing.fuzz import Outcome, checks, fuzz

_BAR = 24
#: Seconds between two drawings of the progress bar.
_REDRAW = 0.1


class _Progress:
    """A line on a terminal's stderr that is drawn over itself; nothing where there is none."""

    def __init__(self, examples: int) -> None:
        self._examples = examples
        self._done = 0
        self._start = time.monotonic()
        self._drawn = 0.0
        self._shown = sys.stderr.isatty()

    def tick(self, outcome: Outcome) -> None:
        """Count a case."""
        if outcome.failure is None:
            self._done += 1
        now = time.monotonic()
        if self._shown and now - self._drawn > _REDRAW:
            self._drawn = now
            done = min(self._done, self._examples)
            full = _BAR * done // self._examples
            doing = f"{outcome.function} {outcome.name}"
            if outcome.failure is not None:
                doing += ", shrinking"
            print(
                f"\r\x1b[K[{'#' * full}{'.' * (_BAR - full)}] {done}/{self._examples} "
                f"{now - self._start:.0f} s  {doing}",
                end="",
                file=sys.stderr,
                flush=True,
            )

    def clear(self) -> None:
        """Take the line away."""
        if self._shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def run(target: str, *, examples: int, seed: int, names: Sequence[str], file: Path | None) -> bool:
    """Fuzz, print the report, write it as JSON if a file is named.

    Parameters
    ----------
    target, examples, seed, names
        As :func:`cuflash.testing.fuzz.fuzz` takes them.
    file
        Gets the report.

    Returns
    -------
    bool
        Whether every property held.

    Raises
    ------
    ValueError
        If the target supports none of what was drawn, after that has been printed and written.
    KeyboardInterrupt
        If it was interrupted, after what was known by then has been printed and written.
    """
    checks(target, names)  # refuses before a file is opened
    if file is None:
        outcomes, interrupted = _outcomes(target, examples, seed, names)
    else:
        with replacing(file) as stream:
            outcomes, interrupted = _outcomes(target, examples, seed, names)
            entries = {
                "cuflash": __version__,
                "target": target,
                "seed": seed,
                "examples": examples,
                "interrupted": interrupted,
                "properties": [_entry(outcome) for outcome in outcomes],
            }
            stream.write(json.dumps(entries, indent=1).encode() + b"\n")
    for line in report(target, outcomes):
        print(line)
    if interrupted:
        print("\nInterrupted: the last property was not finished.", flush=True)
        raise KeyboardInterrupt
    if not any(outcome.passed or outcome.failure for outcome in outcomes):
        raise ValueError(f"{target} supports none of the cases that were drawn: nothing is known")
    return all(outcome.failure is None for outcome in outcomes)


def _outcomes(
    target: str, examples: int, seed: int, names: Sequence[str]
) -> tuple[list[Outcome], bool]:
    progress = _Progress(examples)
    outcomes: list[Outcome] = []
    with TemporaryDirectory() as folder, _interrupts_between_cases() as check:

        def tick(outcome: Outcome) -> None:
            progress.tick(outcome)
            check()

        set_hypothesis_home_dir(folder)  # by default it leaves one where the user is
        try:
            for outcome in fuzz(target, examples=examples, seed=seed, names=names, tick=tick):
                outcomes.append(outcome)
        except KeyboardInterrupt:
            return outcomes, True
        finally:
            set_hypothesis_home_dir(None)
            progress.clear()
    return outcomes, False


@contextmanager
def _interrupts_between_cases() -> Iterator[Callable[[], None]]:
    """Let Ctrl-C wait for the function yielded, which raises KeyboardInterrupt after one.

    Raised anywhere, it can be lost in a callback or in a library that catches everything. The
    second one does not wait.
    """
    asked = False

    def note(signum: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True

    def check() -> None:
        if asked:
            raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:  # somebody else's, or ignored
        yield check
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, before)


def _entry(outcome: Outcome) -> dict[str, Any]:
    failure = outcome.failure
    return {
        "function": outcome.function,
        "property": outcome.name,
        "passed": outcome.passed,
        "unsupported": outcome.unsupported,
        "failure": failure
        and {
            "case": repr(failure.case),
            "message": failure.message,
            "values": failure.values,
            "snippet": failure.snippet,
        },
    }


def report(target: str, outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Yield what is printed, in pieces of one or more lines."""
    yield f"{target}\n"
    yield f"{'function':12}{'property':46}{'passed':>8}{'unsupported':>13}"
    for outcome in outcomes:
        yield (
            f"{outcome.function:12}{outcome.name:46}{outcome.passed:8}{outcome.unsupported:13}"
            + "  FAILED" * (outcome.failure is not None)
        )
    failures = [outcome.failure for outcome in outcomes if outcome.failure is not None]
    unasked = sum(not outcome.passed and outcome.failure is None for outcome in outcomes)
    yield f"\n{len(failures)} of {len(outcomes)} properties failed" + (
        f", and {unasked} had no case that {target} supports." if unasked else "."
    )
    for failure in failures:
        yield f"\n{failure.function}, {failure.name}: {failure.message}\n"
        for name, value in failure.values.items():
            yield f"  {name} = " + value.replace("\n", "\n" + " " * (len(name) + 5))
        yield "\nTo reproduce it:\n"
        yield from ("    " + line if line else "" for line in failure.snippet.splitlines())
