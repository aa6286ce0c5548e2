"""Every softmax kernel compiles, for every architecture, and keeps its registers to itself.

Each variant is compiled for Hopper, and a subset that covers the templates for the others. With
CUFLASH_COMPILE_ALL=1 it is every variant for every architecture.
"""

import os
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from cuflash.device.compiler import compile_only
from cuflash.device.plans import softmax_kernels
from cuflash.problem import BFLOAT16, FLOATS

ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120")
#: Everywhere: the variants with the most registers and the most paths, for the dtypes that differ.
COVERING_DTYPES = (np.dtype(np.float64), BFLOAT16)
COVERING = (
    "cuflash::Softmax<float>, cuflash::kPacked, 8>",
    "cuflash::Softmax<double>, cuflash::kPacked, 8>",
    "cuflash::Softmax<float>, cuflash::kStrided>",
    "cuflash::LogSoftmaxVjp<float>, cuflash::kPacked, 4>",
    "cuflash::LogSoftmaxVjp<double>, cuflash::kScattered, 0>",
    "cuflash::State<double>, cuflash::kScattered>",
)


def programs():
    """Yield (source, dtype, architecture, expressions): what is compiled together."""
    everything = bool(os.environ.get("CUFLASH_COMPILE_ALL"))
    for architecture in ARCHITECTURES:
        for dtype in FLOATS:
            by_source = defaultdict(list)
            for source, expression in softmax_kernels(dtype):
                covers = dtype in COVERING_DTYPES and expression.endswith(COVERING)
                if everything or architecture == "sm_90a" or covers:
                    by_source[source].append(expression)
            for source, expressions in by_source.items():
                yield source, dtype.name, architecture, tuple(expressions)


PROGRAMS = list(programs())


@pytest.fixture(scope="module")
def reports():
    """Compile everything, several programs at a time: NVRTC releases the GIL."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield {
            program: pool.submit(compile_only, program[0], program[3], program[2])
            for program in PROGRAMS
        }


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: "-".join(p[:3]))
def test_compiles_without_spills(program, reports):
    for expression, report in reports[program].result().items():
        spilled = (report.spill_stores, report.spill_loads, report.stack)
        assert spilled == (0, 0, 0), f"{expression}: {report}"
        # A block of 512 threads must find room.
        assert report.registers <= 128, f"{expression}: {report}"
