"""The record of the last complete GPU run: which source it ran, where, and how many tests passed.

No machine of continuous integration has a GPU, so it asks instead whether a GPU has run exactly
this source: `digest` of the tree must be the recorded one.
"""

import hashlib
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "tests" / "gpu_record.json"
#: All that decides what a GPU executes and with which arguments.
RECORDED = (
    "kernels",
    "cuflash/device",
    "cuflash/jax",
    "cuflash/_options.py",
    "cuflash/problem.py",
    "cuflash/problem_vjp.py",
    "cuflash/interop.py",
)
_SOURCES = (".cu", ".cuh", ".py")
#: Options of pytest that may leave tests out; what else does is seen when they are counted.
_SELECTING = (
    *("keyword", "deselect", "ignore", "ignore_glob"),
    *("lf", "failedfirst", "stepwise", "stepwise_skip"),
)


def digest(root: Path = ROOT) -> str:
    """Return the SHA-256 of the recorded files, names included, whatever the checkout's place."""
    files = []
    for entry in RECORDED:
        path = root / entry
        files += [path] if path.is_file() else [p for p in path.rglob("*") if p.suffix in _SOURCES]
    total = hashlib.sha256()
    for path in sorted(files):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        total.update(f"{path.relative_to(root).as_posix()} {content}\n".encode())
    return total.hexdigest()


def environment() -> dict[str, Any]:
    """Describe the GPU at hand and the versions that compiled for it."""
    import cupy

    properties = cupy.cuda.runtime.getDeviceProperties(0)
    return {
        "gpu": properties["name"].decode(),
        "driver": cupy.cuda.runtime.driverGetVersion(),
        "cupy": cupy.__version__,
        "nvrtc": ".".join(map(str, cupy.cuda.nvrtc.getVersion())),
        "numpy": importlib.metadata.version("numpy"),
        "python": platform.python_version(),
    }


def collected() -> int:
    """Count the GPU tests of the tree, in a process that knows no options of this one."""
    done = subprocess.run(
        (
            *(sys.executable, "-m", "pytest", "-p", "no:cacheprovider"),
            *("-m", "gpu", "--collect-only", "-q"),
        ),
        cwd=ROOT,
        env={name: x for name, x in os.environ.items() if not name.startswith("PYTEST_")},
        capture_output=True,
        text=True,
    )
    count = re.search(r"^(\d+)(/\d+)? tests? collected", done.stdout, re.MULTILINE)
    if done.returncode or not count:
        raise RuntimeError(f"GPU tests could not be collected\n{done.stdout}{done.stderr}")
    return int(count[1])


def write(passed: int) -> None:
    """Record a run in which every GPU test passed."""
    record = {"digest": digest(), "passed": passed, **environment()}
    RECORD.write_text(json.dumps(record, indent=2) + "\n")


def watch(config: pytest.Config) -> None:
    """Let a run of the whole GPU suite write the record; the processes of xdist leave it to one."""
    whole = config.args == config.getini("testpaths")
    whole &= not any(config.getoption(name, None) for name in _SELECTING)
    if config.option.markexpr == "gpu" and whole and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Run())


class _Run:
    """Writes the record after a run of all GPU tests in which each one passed."""

    def __init__(self) -> None:
        self.outcomes: dict[str, int] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count the outcome of each test, and everything but success of its set-up and end."""
        if report.when == "call" or not report.passed:
            self.outcomes[report.outcome] = self.outcomes.get(report.outcome, 0) + 1

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Count a module that could not be collected or was skipped whole."""
        if not report.passed:
            self.outcomes[report.outcome] = self.outcomes.get(report.outcome, 0) + 1

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Write the record, unless tests failed, were skipped or did not run at all."""
        if exitstatus or set(self.outcomes) != {"passed"}:
            return
        if self.outcomes["passed"] == collected():
            write(self.outcomes["passed"])
