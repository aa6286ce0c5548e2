"""The pages on fuzzing print what the command prints, and their findings are still found."""

import doctest
import math
import re
import sys
from pathlib import Path

import pytest

from cuflash.cli import main

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


@pytest.mark.parametrize("command", RUNS)
def test_tutorial_prints_what_the_command_prints(command, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    code = main(command.split())
    assert code == (0 if ":attention " in command else 1)
    assert alike(RUNS[command].strip(), capsys.readouterr().out.strip())


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
