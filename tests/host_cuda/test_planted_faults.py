"""Faults planted in the shipped source turn the tests red: proof that those can fail."""

import os
import re
import subprocess
import sys

import numpy as np
import pytest

from cuflash.device.plans import softmax_kernels
from tests.host_cuda import builder
from tests.host_cuda.builder import Edit
from tests.host_cuda.small_cases import check, check_entries, check_long_rows

pytestmark = pytest.mark.skipif(not builder.available(), reason="no C++ compiler")

ROWS, FUSED, COLUMNS = "softmax/rows.cuh", "softmax/fused.cuh", "softmax/columns.cu"
STATE = "lib/online_softmax.cuh"
FAULTS = {
    "no barrier between writing and reading": Edit(
        ROWS, "values[warp] = value;\n        __syncthreads();\n", "values[warp] = value;\n"
    ),
    "one buffer where two take turns": Edit(ROWS, "turn_ ^= 1;", ""),
    "no barrier between the steps across warps": Edit(
        ROWS,
        "values[threadIdx.x] = value;\n            __syncthreads();",
        "values[threadIdx.x] = value;",
    ),
    "a barrier that not all teams reach": Edit(
        FUSED, "group.m = team.reduce_group", "if (active) group.m = team.reduce_group"
    ),
    "off by one at the end of a row, read": Edit(
        ROWS, "= column + v < Index(p.columns) ? at", "= column + v <= Index(p.columns) ? at"
    ),
    "off by one at the end of a row, written": Edit(
        ROWS, "if (column + v < Index(p.columns)) at", "if (column + v <= Index(p.columns)) at"
    ),
    "tail of a row not masked": Edit(ROWS, "? at(column + v) : fill;", "? at(column + v) : T{};"),
    "no guard for a row of -inf": Edit(STATE, "|| m == -infinity<A>() ?", "?"),
    "an empty row divided by its sum": Edit(
        STATE,
        "if (l == A(0)) return A(0);\n        return m == infinity<A>() ? not_a_number<A>() : A(1)",
        "return A(1)",
    ),
    "hidden columns of a NaN row": Edit(
        FUSED, "where.hide(column, result", "if (false) where.hide(column, result"
    ),
    "where read at the wrong column": Edit(
        ROWS, "&& !at(column + v)) chunk", "&& !at(column)) chunk"
    ),
    "states of warps united before they are there": Edit(
        "softmax/columns.cuh", "            __syncthreads();\n", ""
    ),
    "lanes of rows side by side united without a common maximum": Edit(
        "softmax/columns.cuh", "l[v] = state[v].relative_to(m[v]);", "l[v] = state[v].l;"
    ),
}
#: Faults for a process of their own under AddressSanitizer: they would break this one, or nothing.
OUT_OF_BOUNDS = {
    "off by one at the end of a row, written": FAULTS["off by one at the end of a row, written"],
    "a prefetch past the last row": Edit(FUSED, "|| row >= p.rows) return;", ") return;"),
    "a prefetch past the end of a row": Edit(
        FUSED, "left < team.lanes * kVector<T> ? int(left) :", ""
    ),
    "rows side by side written past their end": Edit(
        COLUMNS, "if (i < mine) store_bundle", "store_bundle"
    ),
}


@pytest.mark.parametrize("order", builder.HostKernel.ORDERS)
def test_the_source_as_it_is_passes(order):
    check(order=order)
    check_entries(order=order)


def test_the_small_cases_launch_every_kernel_and_operation():
    """All that AddressSanitizer could watch: clusters are emulated by nothing."""

    def told(kernels):
        functions = {(k.source, k.expression.partition("<")[0]) for k in kernels}
        return functions, {x for k in kernels for x in re.findall(r"::([A-Z]\w+)", k.expression)}

    launches = [*check(), *check_entries(), *check_long_rows()]
    assert told([launch.kernel for launch in launches]) == told(
        list(softmax_kernels(np.dtype(np.float32), clusters=False))
    )


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_found(fault):
    with pytest.raises((AssertionError, RuntimeError)):
        for order in builder.HostKernel.ORDERS:
            check(edits=[FAULTS[fault]], order=order)


def sanitized(*fault):
    """Run the small cases under AddressSanitizer, in a process that has loaded it first."""
    library = subprocess.run(
        [builder.COMPILER, "-print-file-name=libasan.so"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    # Python's own blocks never go back to malloc before it ends: not leaks.
    environment = {"LD_PRELOAD": library, "ASAN_OPTIONS": "detect_leaks=0"}
    return subprocess.run(
        [sys.executable, "-m", "tests.host_cuda.small_cases", *fault],
        cwd=builder.HERE.parent.parent,
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )


def test_no_access_out_of_bounds():
    run = sanitized()
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("fault", OUT_OF_BOUNDS)
def test_an_access_out_of_bounds_is_found(fault):
    run = sanitized(*OUT_OF_BOUNDS[fault])
    assert run.returncode != 0
    assert "AddressSanitizer: heap-buffer-overflow" in run.stderr, run.stderr
