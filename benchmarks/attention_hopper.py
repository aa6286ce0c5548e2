"""Whether attention on Hopper is as fast whatever the data, the dtype, the layout and the heads.

``python -m benchmarks.attention_hopper`` takes about half a minute and writes
``benchmarks/results/<gpu>/attention_hopper.csv``: B * T = 16384 tokens, H * D = 2048, each call
against the plain one (bfloat16, normal random numbers, contiguous) in the same rounds. *speedup* is
the ratio of rates, *by cycles* that ratio at equal clocks, *target* the least of it that is asked:
of the ratio by cycles for another dtype, else of the speedup.

- *float16*: the same numbers in the other dtype.
- *growing*: keys are walked from the last to the first and grow towards the first, so that every
  tile has larger scores than all before.
- *view*: (B, T, H, D) arrays with their axes swapped.
- *grouped*: four heads share their keys.

The last rows are the first call of a process, in seconds: with an empty kernel cache, and with one
that another process has filled. Python's bytecode is cached with the kernels, as it is of a package
that is installed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import cuflash
from benchmarks.attention import RESULTS
from cuflash.bench import device, peers, problems, rows, timing
from cuflash.bench.problems import AttentionShape

#: (tokens, d, causal) of the problems.
SHAPES = ((2048, 64, True), (8192, 64, False), (2048, 128, True), (8192, 128, False),
          (8192, 256, True))  # fmt: skip
PLAIN = "plain"
#: The least speedup over the plain call.
TARGETS = {"float16": 0.97, "growing": 1 / 1.35, "view": 1.0, "grouped": 1.0}
#: Query heads that share their keys.
GROUP = 4
#: How much larger the first keys are than normal, and the last ones.
GROWTH = (6.0, 0.01)

#: The seconds of a first call, by a process of its own.
_FIRST_CALL = """
import time
import cupy, numpy, cuflash
q, k, v = cupy.zeros((3, 2, 16, 1024, 128), numpy.float16)
cupy.cuda.Device().synchronize()
began = time.perf_counter()
cuflash.flash_attention(q, k, v, causal=True)
cupy.cuda.Device().synchronize()
print(time.perf_counter() - began)
"""
#: The most seconds of it.
FIRST_CALLS = {"nothing cached": 3.0, "cached on disk": 0.1}


def calls_of(shape: AttentionShape, method: str) -> dict[str, Callable[[], Any]]:
    """Return the calls of a problem."""
    plain = device.normal((3, shape.batch, shape.heads, shape.tokens, shape.d), "float32", 0)
    growth = device.given(np.linspace(*GROWTH, shape.tokens, dtype=np.float32)[:, None])
    growing = plain.copy()
    growing[1] *= growth
    bfloat16 = plain.astype(problems.dtype_of("bfloat16"))
    key_heads = max(shape.heads // GROUP, 1)
    view = bfloat16.swapaxes(2, 3).copy().swapaxes(2, 3)
    arrays = {
        PLAIN: tuple(bfloat16),
        "float16": tuple(plain.astype(np.float16)),
        "growing": tuple(growing.astype(bfloat16.dtype)),
        "view": tuple(view),
        "grouped": (bfloat16[0], *bfloat16[1:, :, :key_heads]),
    }
    options = {"causal": shape.causal, "method": method, "enable_gqa": True}
    return {name: partial(cuflash.flash_attention, *a, **options) for name, a in arrays.items()}


def measure(
    shape: AttentionShape, method: str = "auto", *, rounds: int = 7, window: float = 0.03
) -> list[rows.Row]:
    """Measure one problem, each call against the plain one."""
    calls = calls_of(shape, method)
    result = timing.compare(calls, clock=device.clock(), rounds=rounds, window=window)
    work = problems.attention_flops(shape) / 1e12
    found = []
    for name in calls:
        timed = rows.timing(result, name, PLAIN, work, "TFLOP/s")
        by_cycles = timed["speedup"] * result.clock(PLAIN) / result.clock(name)
        wanted = TARGETS.get(name)
        reached = by_cycles if name == "float16" else timed["speedup"]
        found.append(
            {
                "call": name,
                "B": shape.batch,
                "H": shape.heads,
                "T": shape.tokens,
                "D": shape.d,
                "causal": shape.causal,
                **timed,
                "by cycles": by_cycles,
                "target": "" if wanted is None else wanted,
                "met": "" if wanted is None else problems.meets(reached, wanted),
            }
        )
    return found


def first_calls(program: str = _FIRST_CALL) -> list[rows.Row]:
    """Measure the first call of a process, twice over one kernel cache that is empty at first."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for name, most in FIRST_CALLS.items():
            caches = {"CUPY_CACHE_DIR": folder, "PYTHONPYCACHEPREFIX": f"{folder}/python"}
            run = subprocess.run(
                [sys.executable, "-c", program],
                env={**os.environ, "PYTHONDONTWRITEBYTECODE": "", **caches},
                capture_output=True,
                text=True,
                check=True,
            )
            seconds = float(run.stdout)
            found.append(
                {"call": f"first, {name}", "s": seconds, "target": most, "met": seconds <= most}
            )
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.attention_hopper",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to write to")
    chosen = parser.parse_args(arguments)
    record = rows.Record("attention_hopper", chosen.results, rows.device_environment)
    for tokens, d, causal in SHAPES:
        batch, heads = problems.DEVICE_TOKENS // tokens, problems.DEVICE_WIDTH // d
        shape = AttentionShape(batch, heads, tokens, d, causal, "bfloat16")
        record.add(f"D = {d}, T = {tokens}{', causal' if causal else ''}", measure(shape))
        peers.forget()
    record.add("The first call", first_calls())
    record.close()


if __name__ == "__main__":
    main()
