"""Every attention kernel compiles, for every architecture, and has no local memory.

Each variant is compiled once, and a subset that covers the templates for the other architectures.
With CUFLASH_COMPILE_ALL=1 it is every variant for every architecture.
"""

import os
import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

pytest.importorskip("cupy", reason="kernels are compiled through CuPy")

from cuflash.device.attention_plans import SIMT_TILES, attention_kernels
from cuflash.device.attention_plans_decode import CLUSTER_SHARES, DECODE_TILES
from cuflash.device.attention_plans_dmma import DMMA_CAPABILITIES, DMMA_TILES
from cuflash.device.attention_plans_mma import MMA_TILES, sm75_kernels
from cuflash.device.attention_plans_tf32 import TF32_TILES
from cuflash.device.attention_plans_wgmma import WGMMA_TILES
from cuflash.device.attention_vjp_plans import VJP_TILES, attention_vjp_kernels
from cuflash.device.attention_vjp_plans_dmma import DMMA_VJP_TILES
from cuflash.device.attention_vjp_plans_mma import KEYS_TILES, QUERIES_TILES
from cuflash.device.attention_vjp_plans_pairs import PAIRS_SCORES
from cuflash.device.attention_vjp_plans_tf32 import TF32_VJP_TILES
from cuflash.device.attention_vjp_plans_wgmma import BACKWARD_WGMMA_TILES
from cuflash.device.compiler import compile_only
from cuflash.problem import BFLOAT16, FLOATS, accumulator

ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120")
#: Where the figures of each dtype are measured. 16-bit inputs have kernels of their own there.
HOME = {"float64": "sm_90a", "float32": "sm_90a", "float16": "sm_80", "bfloat16": "sm_80"}
#: Everywhere: these dtypes, in the variant with the most registers and paths.
COVERING_DTYPES = ("float64", "bfloat16")
COVERING_WGMMA = (
    "PlainScore<float>, cuflash::WgmmaTile<2, 128, 64,",
    "cuflash::backward_wgmma<__half, cuflash::RangedScore<float>, cuflash::BackwardTile<2, 128,",
)
COVERING_MMA_TILES = (
    "MmaTile<2, 4, 64, 64, 64,",
    "DmmaTile<4, 32, 64, 64,",
    "DmmaVjpTile<4, 1, 32, 64,",
    "DecodeTile<4, 16, 128, 128, 3,",
    "KeysTile<128, 64, 64,",
)
#: On Hopper too, in bfloat16: by one ptxas or another these filled their registers and spilled.
TIGHT = (
    "BiasScore<float>, cuflash::MmaTile<2, 4, 64, 64, 64,",
    "SimtTile<4, 8, 4, 64, 128, 2, true>",
)
COVERING_SM75 = (
    "FullScore<float>, cuflash::MmaTile<1, 4, 32, 128, 128, false, 1>>",
    "RangedScore<float>, cuflash::MmaTile<1, 4, 32, 64, 64, true, 2>>",
)


def programs():
    """Yield (dtype, architecture, source, expressions): what is compiled together."""
    for architecture in ARCHITECTURES:
        for dtype in FLOATS:
            for source, expression in (*attention_kernels(dtype), *attention_vjp_kernels(dtype)):
                if is_compiled(dtype, architecture, expression):
                    yield dtype.name, architecture, source, expression


def is_mma(expression):
    """Tell whether a kernel uses the tensor cores of sm_80."""
    return re.search("_d?mma|_tf32", expression.split("<")[0]) is not None


def is_staged(expression):
    """Tell whether a kernel of gradients adds by bulk copies."""
    return "KeysTile<" in expression and expression.split("KeysTile<")[1].split(", ")[7] == "true"


def capable(expression):
    """Return the architectures that have the instructions of a kernel."""
    if "_wgmma" in expression:
        return ("sm_90a",)
    if "_dmma" in expression:
        return tuple(a for a in ARCHITECTURES if a[3:].removesuffix("a") in DMMA_CAPABILITIES)
    if is_staged(expression) or is_clustered(expression):
        return ARCHITECTURES[4:]
    return ARCHITECTURES[1:] if is_mma(expression) else ARCHITECTURES


def is_clustered(expression):
    """Tell whether a kernel's blocks make up clusters."""
    return "_cluster<" in expression


def home_of(dtype, expression):
    """Return where the figures of a kernel are measured."""
    return "sm_90a" if is_staged(expression) or is_clustered(expression) else HOME[dtype]


def is_compiled(dtype, architecture, expression):
    """Tell whether a variant is compiled for an architecture: in the short run not always."""
    hopper, tensor_cores = "_wgmma" in expression, is_mma(expression)
    if architecture not in capable(expression):
        return False
    if os.environ.get("CUFLASH_COMPILE_ALL"):
        return True
    if hopper:
        # The two 16-bit types differ in the names of their instructions.
        return dtype.name == "bfloat16" or any(part in expression for part in COVERING_WGMMA)
    home = architecture == home_of(dtype.name, expression)
    if architecture == "sm_90a" and dtype == BFLOAT16 and any(tile in expression for tile in TIGHT):
        return True
    if "_tf32" in expression:
        # Nowhere may it spill: ptxas fills its registers in another way on each of the two. Of
        # gradients those that add to dq have the most of them.
        most = "backward" not in expression or expression.endswith("true, true>")
        return architecture == "sm_90a" or (architecture == "sm_80" and most)
    if tensor_cores:
        # Seconds each: the two 16-bit types differ by one instruction.
        covers = any(tile in expression for tile in COVERING_MMA_TILES)
        if home:
            return dtype.name in COVERING_DTYPES or covers
        return covers and dtype.name in COVERING_DTYPES and "RangedScore" in expression
    acc = accumulator(dtype).name
    if "backward" in expression:
        # Seconds each, too.
        tile = [choice.tile for choice in VJP_TILES if choice.accumulator == acc][-1]
        covers = tile.expression in expression and "keys" in expression and "Full" in expression
        home &= dtype.name != "float16" or covers
    else:
        tile = next(x.tile for x in SIMT_TILES if x.accumulator == acc and x.values == 64)
        covers = "FullScore" in expression and tile.expression in expression
    return home or (covers and dtype.name in COVERING_DTYPES)


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
def test_compiles_without_local_memory(program, reports):
    """What a thread has is in registers: no array of scores of its own, and nothing spilled."""
    dtype, architecture, _, expression = program
    report = reports[program].result()[expression]
    assert not report.serialized
    if architecture in (home_of(dtype, expression), "sm_90a") or "_tf32" in expression:
        assert report.spill_stores == report.spill_loads == report.stack == 0, report


SM75 = [
    (kernel, architecture)
    for kernel in sm75_kernels()
    for architecture in ("sm_75", "sm_90a")
    if os.environ.get("CUFLASH_COMPILE_ALL")
    or (kernel.expression.endswith(COVERING_SM75) and architecture == "sm_75")
]


@pytest.mark.parametrize(("kernel", "architecture"), SM75, ids=str)
def test_products_of_sm_75_compile_without_local_memory(kernel, architecture):
    """They run on newer devices too, where the GPU suite runs them."""
    (report,) = compile_only(kernel.source, [kernel.expression], architecture).values()
    assert max(report.spill_stores, report.spill_loads, report.stack) == 0, report


def test_the_long_run_leaves_no_variant_out(monkeypatch):
    monkeypatch.setenv("CUFLASH_COMPILE_ALL", "1")
    compiled = {(p[0], p[1], p[3]) for p in programs()}
    for dtype in FLOATS:
        for kernel in (*attention_kernels(dtype), *attention_vjp_kernels(dtype)):
            for architecture in capable(kernel.expression):
                assert (dtype.name, architecture, kernel.expression) in compiled


def test_every_variant_is_compiled_once():
    compiled = {(p[0], p[3]) for p in PROGRAMS if p[1] == home_of(p[0], p[3]) or "_wgmma" in p[3]}
    wanted = {
        (dtype.name, kernel.expression)
        for dtype in FLOATS
        for kernel in (*attention_kernels(dtype), *attention_vjp_kernels(dtype))
    }
    missing = wanted - compiled
    assert compiled <= wanted
    # What float16 leaves out here is compiled for bfloat16.
    assert {(d, e.replace("__half", "__nv_bfloat16")) for d, e in missing} <= {
        ("float16", expression) for dtype, expression in compiled if dtype == "bfloat16"
    }
    assert len(list(attention_kernels(np.dtype(np.float32)))) == 5 * 3 + 3 * len(TF32_TILES) + 4
    assert len(list(attention_vjp_kernels(np.dtype(np.float32)))) == (
        3 * (2 * 3 + 1) + 2 + 3 * len(PAIRS_SCORES) * len(TF32_VJP_TILES) + 2
    )
    keys = {True: 0, False: 0}
    for choice in KEYS_TILES:
        keys[choice.tile.staged] += len(choice.scores)
    queries = sum(len(choice.scores) for choice in QUERIES_TILES)
    bias = sum("FullScore" in choice.scores for choice in QUERIES_TILES)
    wanted = keys[True] + 2 * keys[False] + queries + bias + 2
    assert sum(is_mma(k.expression) for k in attention_vjp_kernels(BFLOAT16)) == wanted
    float64 = [k for k in attention_kernels(np.dtype(np.float64)) if is_mma(k.expression)]
    assert len(float64) == 3 * len(DMMA_TILES)
    float64 = [k for k in attention_vjp_kernels(np.dtype(np.float64)) if is_mma(k.expression)]
    assert len(float64) == 3 * len(PAIRS_SCORES) * len(DMMA_VJP_TILES)
    by_family = Counter(k.expression.split("<")[0][9:] for k in attention_kernels(BFLOAT16))
    assert by_family["forward_mma"] == sum(7 if choice.steps else 2 for choice in MMA_TILES)
    assert by_family["decode_mma"] == 2 * len(DECODE_TILES)
    clustered = sum(choice.clustered is not None for choice in DECODE_TILES)
    assert by_family["decode_mma_cluster"] == clustered * len(CLUSTER_SHARES)
    plain = sum(1 if choice.diagonal else 2 for choice in WGMMA_TILES)
    assert by_family["forward_wgmma"] == plain + 3 * 4
    gradients = [k for k in attention_vjp_kernels(BFLOAT16) if "_wgmma" in k.expression]
    assert len(gradients) == len(BACKWARD_WGMMA_TILES) * (2 + 2 + 1)
