"""The pages on fuzzing print what the command prints, and their findings are still found."""

import doctest
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from cuflash import _fuzz
from cuflash.cli import main
from cuflash.testing.fuzz import Failure, Outcome

ROOT = Path(__file__).resolve().parents[2]
TUTORIAL = (ROOT / "docs" / "fuzzing.md").read_text("utf-8")
FINDINGS = (ROOT / "docs" / "fuzzing-findings.md").read_text("utf-8")
RUNS = dict(re.findall(r"<!-- run -->\n```\n\$ cuflash (.*)\n\n?((?:.*\n)*?)```", TUTORIAL))
NUMBER = re.compile(r"-?\d+\.?\d*(?:e[-+]?\d+)?")
LIBRARIES = {"JAX": "jax", "PyTorch": "torch", "SciPy": "scipy"}


def alike(shown: str, printed: str) -> bool:
    """Compare texts, integers exactly, others as far as rounding is the same on every CPU.

    How the plain formula rounds is a part of the bound.
    """
    if NUMBER.sub("#", shown) != NUMBER.sub("#", printed):
        return False
    pairs = zip(NUMBER.findall(shown), NUMBER.findall(printed), strict=True)
    return all(
        x == y or ("." in x and math.isclose(float(x), float(y), rel_tol=0.3)) for x, y in pairs
    )


def test_comparison_sees_a_difference():
    assert alike("off by 1.0", "off by 1.2")
    assert not alike("off by 1.0", "off by 2.0")
    assert not alike("3 of 4", "3 in 4")
    assert not alike("30 of 40", "31 of 40")


def test_there_are_runs():
    faults = ("finite_sentinel", "missing_rescale", "normalized_per_tile", "float16_sums")
    for name in ("attention", *faults):
        assert any(f"wrong_attention:{name} " in command for command in RUNS), name


def failed(report: str) -> list[tuple[str, str]]:
    """Return the properties that a report lists, and whether each failed."""
    return re.findall(r"^attention +(\w+) +\d+ +\d+(  FAILED)?$", report, re.MULTILINE)


@pytest.mark.parametrize("command", RUNS)
def test_runs_of_the_tutorial_find_what_it_shows(command, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    code = main(command.split())
    assert code == (0 if ":attention " in command else 1)
    assert failed(capsys.readouterr().out) == failed(RUNS[command])


@pytest.mark.parametrize("command", [c for c in RUNS if ":attention " not in c])
def test_failures_are_shown_as_the_command_prints_them(command, monkeypatch):
    """Which case a run ends at depends on what hypothesis draws; what is printed of it does not."""
    monkeypatch.chdir(ROOT)
    shown = RUNS[command]
    _, target, *_ = command.split()
    ((name, _),) = failed(shown)
    (passed,) = re.findall(rf"^attention +{name} +(\d+)", shown, re.MULTILINE)
    snippet = "\n".join(line[4:] for line in shown.partition("reproduce it:\n\n")[2].splitlines())
    names: dict[str, Any] = {}
    with pytest.raises(AssertionError) as raised:
        exec(snippet, names)
    failure = Failure(target, "attention", name, names["case"], raised.value)
    assert failure.snippet.strip() == snippet.strip()
    printed = _fuzz.report(target, [Outcome("attention", name, int(passed), 0, failure)])
    assert alike(shown.strip(), "\n".join(printed))


@pytest.mark.parametrize("name", LIBRARIES)
def test_findings_are_found(name):
    pytest.importorskip(LIBRARIES[name])
    section = re.search(rf"^## {name} .*\n((?:.*\n)*?)(?=^## |\Z)", FINDINGS, re.MULTILINE).group(1)
    # A fence would be taken for a line of output.
    examples = doctest.DocTestParser().get_doctest(
        re.sub(r"^```.*$", "", section, flags=re.MULTILINE), {}, name, None, 0
    )
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    results = runner.run(examples, out=sys.stderr.write)
    assert results.attempted
    assert not results.failed
