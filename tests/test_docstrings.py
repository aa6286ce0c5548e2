"""Every public name explains itself, in numpydoc form, and its examples run."""

import doctest
import importlib
import importlib.util
import inspect
import pkgutil
import re
from collections.abc import Callable
from typing import Any

import pytest

import cuflash

# device/ and jax/ import their library, which need not be there.
JAX = [importlib.import_module("cuflash.jax")] if importlib.util.find_spec("jax") else []
MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(cuflash.__path__, "cuflash.")
    if not re.match(r"cuflash\.(device|jax|__main__)\b", module.name)
    or (JAX and re.match(r"cuflash\.jax\._", module.name))
)
PUBLIC = {
    f"{module.__name__}.{name}": getattr(module, name)
    for module in (cuflash, cuflash.analysis, cuflash.baselines, cuflash.fused, *JAX)
    for name in module.__all__
    if callable(getattr(module, name))
}


def sections(call: Callable[..., Any]) -> dict[str, str]:
    """Split a docstring at its underlined titles."""
    parts = re.split(r"^(\w[\w ]*)\n-{3,}\n", inspect.getdoc(call) or "", flags=re.MULTILINE)
    return {"Summary": parts[0], **dict(zip(parts[1::2], parts[2::2], strict=True))}


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name: str) -> None:
    failed, _ = doctest.testmod(importlib.import_module(name))
    assert not failed


def test_there_are_examples() -> None:
    finder = doctest.DocTestFinder(exclude_empty=True)
    modules = [importlib.import_module(name) for name in MODULES]
    assert any(test.examples for module in modules for test in finder.find(module))


@pytest.mark.parametrize("name", PUBLIC)
def test_summary_is_one_line(name: str) -> None:
    summary = sections(PUBLIC[name])["Summary"].split("\n\n")[0].strip()
    assert summary.endswith((".", "``"))
    assert "\n" not in summary


@pytest.mark.parametrize("name", PUBLIC)
def test_every_parameter_is_described(name: str) -> None:
    entries = re.findall(r"^(\S.*?)(?: :.*)?$", sections(PUBLIC[name])["Parameters"], re.MULTILINE)
    described = [parameter.strip() for entry in entries for parameter in entry.split(",")]
    assert sorted(described) == sorted(inspect.signature(PUBLIC[name]).parameters)


@pytest.mark.parametrize("name", [n for n, call in PUBLIC.items() if inspect.isfunction(call)])
@pytest.mark.parametrize("section", ["Returns", "Raises"])
def test_results_and_errors_are_described(name: str, section: str) -> None:
    assert sections(PUBLIC[name])[section].strip()
