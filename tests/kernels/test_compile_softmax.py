"""Every softmax kernel compiles, for every architecture, and keeps its registers to itself.

Each variant is compiled for Hopper, and a subset that covers the templates for the others and for
float16. With
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
WITH_CLUSTERS = ("sm_90a", "sm_100", "sm_120")
#: Everywhere: the variants with the most registers and the most paths, for the dtypes that differ.
COVERING_DTYPES = (np.dtype(np.float64), BFLOAT16)
COVERING = (
    "cuflash::Softmax<float>, cuflash::kPacked, 4>",
    "cuflash::Softmax<float>, cuflash::kPacked, 8>",
    "cuflash::Softmax<double>, cuflash::kPacked, 8>",
    "cuflash::LogSoftmax<double>, cuflash::kPacked, 8>",
    "cuflash::Softmax<float>, cuflash::kPacked, 16>",
    "cuflash::Softmax<double>, cuflash::kPacked, 16>",
    "cuflash::Softmax<float>, cuflash::kStrided>",
    "cuflash::LogSoftmaxVjp<float>, cuflash::kPacked, 4>",
    "cuflash::LogSoftmaxVjp<double>, cuflash::kPacked, 4>",
    "cuflash::LogSoftmaxVjp<double>, cuflash::kScattered, 0>",
    "cuflash::LogSoftmaxVjp<double>, cuflash::kScattered>",
    "cuflash::State<double>, cuflash::kScattered>",
    "cuflash::Softmax<float>, 2, 32, 32, 1>",
    "cuflash::Softmax<float>, 1, 32, 64, 1>",
    "cuflash::LogSoftmax<float>, 4, 32, 16, 1>",
    "cuflash::LogSoftmax<float>, 2, 16, 32, 4>",
    "cuflash::Softmax<float>, 4, 16, 0, 1>",
    "cuflash::Softmax<float>, 4, 16, 0, 8>",
    "cuflash::LogSoftmax<double>, 1, 8, 16, 4>",
    "cuflash::LogSoftmax<double>, 1, 16, 16, 1>",
    "cuflash::LogSoftmax<double>, 1, 16, 8, 1>",
    "cuflash::Softmax<double>, 1, 16, 0, 1>",
    "cuflash::LogSoftmaxVjp<float>, 2, 16, 8, 1>",
    "cuflash::LogSoftmaxVjp<double>, 1, 16, 8, 1>",
    "cuflash::LogSoftmaxVjp<double>, 1, 16, 8, 16>",
    "cuflash::LogSoftmaxVjp<double>, 1, 16, 0, 1>",
    "cuflash::Softmax<float>, cuflash::kPacked, 16, 8>",
    "cuflash::Softmax<double>, cuflash::kPacked, 16, 16>",
    "cuflash::LogSoftmax<float>, 3>",
    "cuflash::LogSoftmax<double>, 2>",
    "cuflash::LogSoftmax<float>, 8, 16, 8>",
    "cuflash::LogSoftmax<float>, 32, 8, 16>",
    "cuflash::LogSoftmax<double>, 8, 16, 8>",
    "cuflash::LogSoftmax<double>, 12, 16, 16>",
    "cuflash::LogSoftmax<float>, 4, 32, 8, 8>",
    "cuflash::LogSoftmax<double>, 1, 32, 8, 8>",
    "cuflash::LogSoftmaxVjp<float>, 8, 16, 16>",
    "cuflash::LogSoftmaxVjp<double>, 8, 16, 16>",
)


def is_taken(source, architecture):
    """Tell whether a GPU of the architecture ever runs the kernels of a file.

    Rows stream through more shared memory than the 99 KB that a block may have on those of sm_120.
    """
    return architecture != "sm_120" or source not in ("softmax/stream.cu", "softmax/strips.cu")


def programs():
    """Yield (source, dtype, architecture, expressions): what is compiled together."""
    everything = bool(os.environ.get("CUFLASH_COMPILE_ALL"))
    for architecture in ARCHITECTURES:
        for dtype in FLOATS:
            by_source = defaultdict(list)
            clusters = architecture in WITH_CLUSTERS
            for source, expression in softmax_kernels(dtype, clusters=clusters):
                covers = expression.endswith(COVERING)
                if architecture == "sm_90a":  # float16 differs from bfloat16 by its conversions
                    wanted = covers or dtype != np.float16
                else:
                    wanted = covers and dtype in COVERING_DTYPES
                if everything or wanted:
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
def test_compiles_and_keeps_its_registers(program, reports):
    source, _, architecture, _ = program
    for expression, report in reports[program].result().items():
        spilled = max(report.spill_stores, report.spill_loads, report.stack)
        assert spilled == 0 or not is_taken(source, architecture), f"{expression}: {report}"
        # A block of 512 threads must find room, or one of 8 warps with 32 chunks a lane.
        most = 255 if ", 32, 8, " in expression else 128
        assert report.registers <= most, f"{expression}: {report}"
