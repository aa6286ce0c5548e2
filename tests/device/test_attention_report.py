"""What `cuflash info` says of attention: each obstacle and each reason by itself. Needs no GPU."""

import re
from dataclasses import replace

import numpy as np
import pytest

from cuflash.device import attention_plans, attention_report
from cuflash.device.attention_plans_decode import DECODE_TILES
from cuflash.device.attention_plans_dmma import DMMA_TILES
from cuflash.device.attention_plans_mma import MMA_TILES, SM75_TILES
from cuflash.device.attention_plans_tf32 import TF32_TILES
from cuflash.device.attention_plans_wgmma import WGMMA_STEP_TILES, WGMMA_TILES
from cuflash.problem import ArraySpec, AttentionArrays, AttentionProblem, c_strides
from tests.devices import H200, T4

HALF, SINGLE, DOUBLE = map(np.dtype, (np.float16, np.float32, np.float64))
TABLES = (
    *(WGMMA_TILES, WGMMA_STEP_TILES, MMA_TILES, SM75_TILES, DECODE_TILES, DMMA_TILES, TF32_TILES),
    attention_plans.SIMT_TILES,
)


def spec(*shape, strides=None, dtype=HALF):
    return ArraySpec(shape, strides or c_strides(shape, dtype.itemsize), dtype)


Q, BACKWARDS, UNALIGNED = (
    spec(2, 96, 64, strides=(12288, step, 2)) for step in (128, -128, 130)
)  # fmt: skip
APART = spec(2, 96, 64, strides=(24576, 256, 4))
#: Axes that merge neither with each other nor, by their gaps, with those beside them.
MANY = spec(2, 2, 2, 2, 96, 64, strides=(10**6 * 16, 10**5 * 16, 32768, 12800, 128, 2))
SLOPES = spec(2, dtype=SINGLE)


def told(q, k=None, v=None, limits=H200, options=None, **more):
    """Return the first lines of the report by family, and the rest."""
    k = q if k is None else k
    arrays = AttentionArrays(q, k, k if v is None else v, **(options or {}))
    lines = list(attention_report.report(AttentionProblem.of(arrays, **more), limits))
    families = dict(line.split(maxsplit=1) for line in lines[:3])
    return families, "\n".join(lines[3:])


@pytest.mark.parametrize(
    ("problem", "taken", "obstacle"),
    [
        ({"q": spec(2, 96, 64, dtype=SINGLE)}, "mma", "needs float16 or bfloat16, not float32"),
        ({"q": spec(2, 96, 64, dtype=DOUBLE)}, "mma", "needs float16 or bfloat16, not float64"),
        (
            {"q": spec(2, 96, 264)},
            "simt",
            "needs at most 256 features and 1 to 256 columns of v, not 264 and 264",
        ),
        (
            {"q": Q, "v": APART},
            "mma",
            "cannot fetch v by TMA: its last axis is not contiguous, but has a stride of 4 bytes",
        ),
        (
            {"q": Q, "k": UNALIGNED},
            "mma",
            "cannot fetch k by TMA: its axis -2 has a stride of 130 bytes, "
            "which is no multiple of 16",
        ),
        (
            {"q": BACKWARDS, "k": Q},
            "mma",
            "cannot fetch q by TMA: its axis -2 has a stride of -128 bytes, which is negative",
        ),
        ({"q": MANY}, "mma", "needs batch axes that merge into 3"),
        ({"q": Q, "limits": T4}, "mma", "needs compute capability 9.0, not 7.5"),
        (
            {"q": Q, "limits": replace(H200, compute_capability="100")},
            "mma",
            "needs compute capability 9.0, not 10.0",
        ),
        ({"q": spec(2, 63, 64)}, "mma", "needs 64 queries: 63 leave most of a tile empty"),
        (
            {"q": Q, "softcap": 3.0, "options": {"alibi_slopes": SLOPES}},
            "mma",
            "has no kernel for several options that change scores: softcap, alibi_slopes",
        ),
        ({"q": Q, "scale": 0.0}, "mma", "needs a scale between 2^-64 and 2^64, not 0"),
        ({"q": Q, "softcap": 1e-30}, "mma", "needs a softcap between 2^-60 and 2^60, not 1e-30"),
        (
            {"q": Q, "options": {"bias": spec(96, 96, dtype=DOUBLE)}},
            "mma",
            "has no kernel for a bias of float64",
        ),
        (
            {"q": Q, "k": spec(2, 90, 64), "options": {"bias": spec(96, 90)}},
            "mma",
            "cannot read bias by 16 bytes: its rows have 180 bytes, no multiple of 16",
        ),
        (
            {"q": Q, "options": {"mask": spec(96, 96, strides=(100, 1), dtype=np.dtype(bool))}},
            "mma",
            "cannot read mask by 16 bytes: its axis -2 has a stride of 100 bytes, "
            "which is no multiple of 16",
        ),
    ],
)
def test_what_keeps_a_problem_from_wgmma(problem, taken, obstacle):
    families, _ = told(**problem)
    assert families["wgmma"].startswith(obstacle)
    assert families[taken] == "taken"


@pytest.mark.parametrize(
    ("problem", "family", "said"),
    [
        ({"q": Q}, "wgmma", "wgmma, of tiles that TMA fetches"),
        ({"q": Q, "softcap": 3.0, "causal": True}, "wgmma", "SoftcapScore"),
        ({"q": spec(2, 8, 64), "k": Q}, "mma", "decode_mma.cu"),
        ({"q": spec(2, 40, 64), "k": Q}, "mma", "forward_mma.cu"),
        ({"q": Q, "limits": T4}, "mma", "forward_mma_sm75.cu"),
        ({"q": spec(2, 96, 64, dtype=DOUBLE)}, "mma", "float64 on tensor cores (DMMA)"),
        ({"q": spec(2, 96, 64, dtype=SINGLE)}, "mma", "in three of TF32"),
        ({"q": spec(2, 96, 300)}, "simt", "plain CUDA"),
    ],
)
def test_what_a_problem_runs_by(problem, family, said):
    families, rest = told(**problem)
    assert families[family] == "taken"
    assert said in rest
    assert ("go to mma" in rest) == (family == "wgmma")


def test_why_another_family_is_slower():
    assert "mma.sync is slower" in told(Q)[0]["mma"]
    assert "without tensor cores" in told(Q)[0]["simt"]
    q = spec(2, 96, 64, dtype=SINGLE)
    assert "16 queries or fewer" in told(spec(2, 16, 64, dtype=SINGLE), q)[0]["mma"]
    ada = replace(H200, compute_capability="89")
    assert "three products in TF32 are slower" in told(q, limits=ada)[0]["mma"]


def test_reasons_need_no_other_row():
    elsewhere = re.compile(r"\b(above|below|as (for|at|in|without|with) )")
    reasons = [choice.reason for table in TABLES for choice in table]
    assert min(map(len, reasons)) > 20
    assert [reason for reason in reasons if elsewhere.search(reason)] == []
