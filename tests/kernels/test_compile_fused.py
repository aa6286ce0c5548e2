"""The kernels of fused chains and baselines compile and keep their registers to themselves.

Each variant is compiled for Hopper, and one of each template and kind of dtype for the other
architectures. With CUFLASH_COMPILE_ALL=1 it is every variant for every architecture.
"""

import itertools
import os
import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

pytest.importorskip("cupy", reason="kernels are compiled through CuPy")

from cuflash.device.baselines_plans import scores_kernels, step_kernels
from cuflash.device.compiler import compile_only
from cuflash.device.fused_plans import matmul_kernels
from cuflash.device.layer_norm_plans import layer_norm_kernels, plan_layer_norm
from cuflash.problem import BFLOAT16, FLOATS
from tests.devices import H200

ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120")
#: Everywhere, in these dtypes.
COVERING_DTYPES = (np.dtype(np.float64), BFLOAT16)
COVERING = (
    "matmul_simt<double>",
    "matmul_mma<__nv_bfloat16, true>",
    "matmul_wide<double, cuflash::WideProduct<double, 4, 32, 2, 2, 3, 2, 2, true>>",
    "layer_norm<double, true, true, 4, 64, 64, 6, 1, false>",
    "layer_norm<__nv_bfloat16, true, true, 8, 64, 64, 8, 0, false>",
    "layer_norm_vjp<__nv_bfloat16, true, true, 1, 512, 512, 2, 2>",
    "layer_norm_vjp<double, false, true, 0, 0, 512, 1, 1>",
    "reduce_step<__nv_bfloat16, false, cuflash::Top>",
)
#: Most bytes of local memory: registers are capped so that enough blocks share a multiprocessor.
#: Addresses that `matmul_simt` would form again for each slice cost it a quarter of its speed.
MOST_LOCAL = {
    "matmul_simt": 72,
    "layer_norm_vjp<double, false, true,": 8,
    "map_step<double, false, cuflash::ShiftedExponential": 8,
}
#: Seconds each; the other widths differ by one number.
LONG = ("FullScore<float>, cuflash::MmaTile<2, 4, 64, 64,", "FullScore<float>, cuflash::MmaTile<1,")


def kernels(dtype):
    """Yield every kernel for a dtype."""
    for names in (matmul_kernels, layer_norm_kernels, scores_kernels, step_kernels):
        yield from names(dtype)


def programs():
    """Yield (dtype, architecture, source, expression): what is compiled."""
    everything = bool(os.environ.get("CUFLASH_COMPILE_ALL"))
    for architecture in ARCHITECTURES:
        for dtype in FLOATS:
            for source, expression in kernels(dtype):
                if "wgmma" in expression and architecture != "sm_90a":
                    continue
                if re.search("_(mma|wide)<", expression) and architecture == "sm_75":
                    continue
                covers = expression.removeprefix("cuflash::") in COVERING
                # float16 differs from bfloat16 by its conversions and by names of instructions.
                home = architecture == "sm_90a" and dtype != np.float16
                home &= not any(text in expression for text in LONG)
                if dtype != BFLOAT16:  # and leave out what has less to hold, or nothing
                    home &= "true, false," not in expression and "_step<" not in expression
                if everything or home or (covers and dtype in COVERING_DTYPES):
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
def test_compiles_and_keeps_its_registers(program, reports):
    _, architecture, _, expression = program
    report = reports[program].result()[expression]
    assert not report.serialized
    if architecture == "sm_90a":
        template = expression.removeprefix("cuflash::")
        most = next((n for name, n in MOST_LOCAL.items() if template.startswith(name)), 0)
        assert max(report.stack, report.spill_stores, report.spill_loads) <= most, report


def test_the_covering_variants_are_there():
    names = {name.expression for dtype in FLOATS for name in kernels(dtype)}
    assert {f"cuflash::{name}" for name in COVERING} <= names


def test_plans_launch_what_is_compiled():
    names = {name for dtype in FLOATS for name in layer_norm_kernels(dtype)}
    for dtype in FLOATS:
        for columns in sorted(
            {n + d for n in (8, 32, 256, 1024, 2**14, 2**15) for d in (-7, 0, 8)}
        ):
            for packed, residual, gradient in itertools.product((False, True), repeat=3):
                plan = plan_layer_norm(
                    dtype, 9, columns, packed, residual, gradient, (columns,) * 5, 0.0, H200
                )
                assert {launch.kernel for launch in plan.launches} <= names
