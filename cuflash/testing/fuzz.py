"""Hold an implementation to every property that has something to ask of it.

hypothesis draws the cases and shrinks those that fail; what is kept of a property is an
:class:`Outcome`, and of its smallest failing case a :class:`Failure`, which can show its values and
the lines of Python that make it again.
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import Any

import hypothesis
import numpy as np
from hypothesis import HealthCheck, Phase

from cuflash.testing.adapters import Adapter, find

#: Elements of an array that are all shown.
_SHOWN = 12


@dataclass(frozen=True)
class Failure:
    """The smallest failing case that was found.

    Parameters
    ----------
    target, function, name
        What failed: target as :func:`cuflash.testing.adapters.find` takes it.
    case
        The input.
    error
        What it raised: AssertionError of the property, or an error of the implementation, which
        may be SystemExit.
    """

    target: str
    function: str
    name: str
    case: Any
    error: Exception | SystemExit

    @property
    def message(self) -> str:
        """What is wrong, in the words of the error, without the case."""
        # A property may have changed the case that it names.
        text = str(self.error).partition(f"\n{type(self.case).__name__}(")[0]
        if isinstance(self.error, AssertionError):
            return text
        return f"raised {type(self.error).__name__}: {text}"

    @property
    def values(self) -> dict[str, str]:
        """The arrays and options of the case; of large arrays the corners."""
        *operands, options = self.case.build()
        names = ("q", "k", "v") if len(operands) == 3 else ("x",)
        return {
            name: _shown(value)
            for name, value in {**dict(zip(names, operands, strict=True)), **options}.items()
        }

    @property
    def snippet(self) -> str:
        """A Python program that raises the error."""
        kind = type(self.case).__name__
        laws = "ATTENTION_PROPERTIES" if self.function == "attention" else "SOFTMAX_PROPERTIES"
        name = "" if self.function == "attention" else f', "{self.function}"'
        return (
            f"from cuflash.testing import {laws}, {kind}\n"
            f"from cuflash.testing.adapters import find\n\n"
            f'{self.function} = find("{self.target}")["{self.function}"]\n'
            f"case = {self.case!r}\n"
            f'{laws}["{self.name}"]({self.function}, case{name})\n'
        )


def _shown(value: Any) -> str:
    if not isinstance(value, np.ndarray):
        return repr(value)
    text = np.array2string(value, separator=", ", threshold=_SHOWN, edgeitems=2)
    return f"{text} {value.dtype.name} {value.shape}"


@dataclass
class Outcome:
    """What came of one property.

    Parameters
    ----------
    function, name
        What was asked.
    passed
        How many cases passed.
    unsupported
        How many could not be asked: NotImplementedError.
    failure
        The smallest case that did not pass; `passed` were drawn before the first.
    """

    function: str
    name: str
    passed: int = 0
    unsupported: int = 0
    failure: Failure | None = None


def checks(
    target: str, names: Sequence[str] = ()
) -> list[tuple[Adapter, str, Callable[[Any], None]]]:
    """Return what a target can be asked, as (adapter, name of the property, property).

    Parameters
    ----------
    target
        As :func:`cuflash.testing.adapters.find` takes it.
    names
        The properties that are wanted; all if it is empty.

    Raises
    ------
    ValueError
        If a name is that of no property which can be asked of the target.
    """
    found = [
        (adapter, name, law)
        for adapter in find(target).values()
        for name, law in adapter.properties().items()
    ]
    known = dict.fromkeys(name for _, name, _ in found)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(
            f"{target} cannot be asked for {', '.join(unknown)}; its properties are "
            f"{', '.join(known)}"
        )
    return [check for check in found if not names or check[1] in names]


def fuzz(
    target: str,
    *,
    examples: int = 1000,
    seed: int = 0,
    names: Sequence[str] = (),
    tick: Callable[[Outcome], None] = lambda outcome: None,
) -> Iterator[Outcome]:
    """Hold a target to its properties; yield what came of each before it begins.

    An outcome grows while its property runs and is complete when the next one is yielded: so an
    interrupted run leaves what it knew.

    Parameters
    ----------
    target
        As :func:`cuflash.testing.adapters.find` takes it.
    examples
        Number of cases in all, dealt out evenly, at least one to a property.
    seed
        The same seed draws the same cases, as long as neither hypothesis nor the source changes.
    names
        The properties that are wanted; all if it is empty.
    tick
        Called with the outcome after each case, those of shrinking included.

    Yields
    ------
    Outcome
        One for each property of each function of the target.
    """
    wanted = checks(target, names)
    for index, (adapter, name, law) in enumerate(wanted):
        share = max(1, (index + 1) * examples // len(wanted) - index * examples // len(wanted))
        outcome = Outcome(adapter.function, name)
        yield outcome
        _hold(adapter, law, outcome, target, share, seed, tick)


def _hold(
    adapter: Adapter,
    law: Callable[[Any], None],
    outcome: Outcome,
    target: str,
    examples: int,
    seed: int,
    tick: Callable[[Outcome], None],
) -> None:
    def hold(case: Any) -> None:
        try:
            with warnings.catch_warnings(), np.errstate(all="ignore"):
                warnings.simplefilter("ignore")  # of other libraries, before they raise
                law(case)
        except NotImplementedError:
            outcome.unsupported += outcome.failure is None
        except (Exception, SystemExit) as error:
            outcome.failure = Failure(target, outcome.function, outcome.name, case, error)
            raise
        else:
            outcome.passed += outcome.failure is None
        finally:
            tick(outcome)

    drawn = hypothesis.given(adapter.problems())(hold)
    run = hypothesis.seed(seed)(
        hypothesis.settings(
            max_examples=examples,
            phases=(Phase.generate, Phase.shrink),
            database=None,
            deadline=None,
            report_multiple_bugs=False,
            print_blob=False,
            suppress_health_check=list(HealthCheck),
        )(drawn)
    )
    try:
        run()
    except (Exception, SystemExit):
        # Kept above: the last that failed is the smallest. Else hypothesis itself has failed.
        if outcome.failure is None:
            raise
        _shrink_fields(adapter, hold, outcome)


def _shrink_fields(adapter: Adapter, hold: Callable[[Any], None], outcome: Outcome) -> None:
    """Make the failing case smaller field by field, as long as it fails at the same place.

    hypothesis shrinks what was drawn choice by choice, and stops where two choices would have to
    change at a time: at a size that lies at a tile border, or a layout.
    """
    failure = outcome.failure
    tried = {repr(failure.case)} if failure else set()
    while failure is not None:
        for case in map(adapter.fit, _smaller(failure.case)):
            if repr(case) in tried:
                continue
            tried.add(repr(case))
            try:
                case.build()
            except Exception:  # shapes that do not go together
                continue
            with suppress(Exception, SystemExit):
                hold(case)
            if outcome.failure is not failure:
                break
        else:
            return
        if outcome.failure and _place(outcome.failure.error) != _place(failure.error):
            outcome.failure = failure  # another fault
        failure = outcome.failure


def _smaller(case: Any) -> Iterator[Any]:
    """Yield cases with one field at its default, or one integer smaller."""
    for field in fields(case):
        value = getattr(case, field.name)
        if value != field.default:
            yield replace(case, **{field.name: field.default})
            if type(value) is int:
                yield from (replace(case, **{field.name: n}) for n in range(value))


def _place(error: BaseException) -> tuple[type[BaseException], str, int]:
    """Return what tells faults apart: the kind of error and the line that raised it."""
    *_, (frame, line) = traceback.walk_tb(error.__traceback__)
    return type(error), frame.f_code.co_filename, line
