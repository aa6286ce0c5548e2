"""No kernel reads or writes out of bounds, or races in shared memory."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.gpu
@pytest.mark.usefixtures("kernels")  # compiled once, in parallel, for the processes watched too
@pytest.mark.parametrize(
    ("tool", "run"),
    # Not racecheck of forward_wgmma: docs/kernels.md says what it reports, and why that is no race.
    [
        ("memcheck", "every_family"),
        ("racecheck", "every_family"),
        ("memcheck", "forward_tiles"),
        ("memcheck", "backward_tiles"),
        ("racecheck", "backward_tiles"),
    ],
)
def test_small_run_is_clean(tool, run):
    result = subprocess.run(
        [
            *("compute-sanitizer", "--tool", tool, "--error-exitcode", "9"),
            *(sys.executable, "-m", "tests.device.small_run", run),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=150,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
