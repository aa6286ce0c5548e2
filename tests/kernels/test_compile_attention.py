"""Every attention kernel compiles, for every architecture, and keeps its registers to itself.

Each variant is compiled once, and a subset that covers the templates for the other architectures.
With CUFLASH_COMPILE_ALL=1 it is every variant for every architecture.
"""

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

pytest.importorskip("cupy", reason="kernels are compiled through CuPy")

from cuflash.device.attention_plans import SIMT_TILES, attention_kernels
from cuflash.device.compiler import compile_only
from cuflash.problem import FLOATS, accumulator

ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120")
#: Where the figures of each dtype are measured. 16-bit inputs have kernels of their own there.
HOME = {"float64": "sm_90a", "float32": "sm_90a", "float16": "sm_80", "bfloat16": "sm_80"}
#: Everywhere: these dtypes, in the variant with the most registers and paths.
COVERING_DTYPES = ("float64", "bfloat16")
#: ptxas fills 255 registers, and for 16-bit inputs, converted as they are loaded, 2 words more.
MOST_SPILLED = {"float64": 0, "float32": 0, "float16": 8, "bfloat16": 8}


def programs():
    """Yield (dtype, architecture, source, expressions): what is compiled together."""
    everything = bool(os.environ.get("CUFLASH_COMPILE_ALL"))
    for architecture in ARCHITECTURES:
        for dtype in FLOATS:
            home = architecture == HOME[dtype.name]
            kernels = list(attention_kernels(dtype))
            tile = next(
                choice.tile
                for choice in SIMT_TILES
                if choice.accumulator == accumulator(dtype).name and choice.values == 64
            )
            for source, expression in kernels:
                covers = "FullScore" in expression and tile.expression in expression
                if everything or home or (covers and dtype.name in COVERING_DTYPES):
                    yield dtype.name, architecture, source, expression


PROGRAMS = list(programs())


@pytest.fixture(scope="module")
def reports():
    """Compile everything, several programs at a time: NVRTC releases the GIL."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield {
            program: pool.submit(compile_only, program[2], program[3:], program[1])
            for program in PROGRAMS
        }


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: "-".join(p[:2]) + "-" + p[3][9:])
def test_compiles_without_spills(program, reports):
    dtype, architecture, _, expression = program
    report = reports[program].result()[expression]
    if architecture == HOME[dtype]:
        assert max(report.spill_stores, report.spill_loads) <= MOST_SPILLED[dtype], report


def test_every_variant_is_compiled_once():
    compiled = {(p[0], p[3]) for p in PROGRAMS if p[1] == HOME[p[0]]}
    wanted = {(d.name, k.expression) for d in FLOATS for k in attention_kernels(d)}
    assert compiled == wanted
    assert len(list(attention_kernels(np.dtype(np.float32)))) == 5 * 3 + 3
