"""How a merge is launched: warps of a row, blocks, and the merge of a forward's own shares."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..problem import ArraySpec, AttentionProblem, accumulator
from .compiler import C_TYPES, KernelName, Launch
from .parameters import (
    COMBINE_EVEN,
    FLOAT_TYPES,
    BatchPlan,
    write_array,
)

_SOURCE = "attention/combine.cu"
WARP = 32
#: Threads of a block of short merges: enough to hide the latency of reading the parts.
_THREADS = 256
#: Parts of a warp: it has so many under way at once (kPartsAtOnce), and few rows wait for them.
_WARP_PARTS = 4
#: kMostWarps of the kernel.
_MOST_WARPS = 16


def combine_kernels(dtype: np.dtype) -> Iterator[KernelName]:
    """Yield the merges of results in the accumulator of a dtype."""
    acc = C_TYPES[accumulator(dtype).name]
    for parts in ("ListedParts", "EvenParts"):
        yield KernelName(_SOURCE, f"cuflash::combine<{acc}, cuflash::{parts}>")
    for kernel in ("combine_states", "combine_vjp"):
        yield KernelName(_SOURCE, f"cuflash::{kernel}<{acc}>")


def even_block(
    problem: AttentionProblem,
    out: ArraySpec,
    lse: ArraySpec | None,
    batch: BatchPlan,
    splits: int,
) -> np.ndarray:
    """Return the parameters that merge partial results: C order of share, entry, row, column."""
    acc = accumulator(problem.dtype)
    block = COMBINE_EVEN.zeros()
    fields = block[0]
    batch.write(fields["batch"])
    fields["rows"], fields["values"] = problem.tq, problem.dv
    fields["warps"] = warps = row_warps(splits)
    fields["tiles"], _ = tiles_of_rows(problem.tq, WARP * warps)
    write_array(fields["out"], out, batch.strides[-2], 2)
    if lse is not None:
        write_array(fields["lse"], lse, batch.strides[-1], 1)
    parts = fields["parts"]
    parts["count"] = splits
    for name, row in (("out", problem.dv), ("lse", 1)):
        entry = problem.tq * row
        dense = parts[name]
        dense["batch_stride"][: len(batch.sizes)] = batch.dense_strides(entry)
        dense["row_stride"], dense["column_stride"] = row, 1
        dense["type"] = FLOAT_TYPES.index(acc.name)
        parts[f"{name}_step"] = batch.entries * entry
    return block


def even_launch(dtype: np.dtype, batch: BatchPlan, rows: int, splits: int) -> Launch:
    """Return the launch that merges partial results."""
    tiles, threads = tiles_of_rows(rows, WARP * row_warps(splits))
    kernel = f"combine<{C_TYPES[accumulator(dtype).name]}, cuflash::EvenParts>"
    return combine_launch(kernel, batch.entries * tiles, threads)


def combine_launch(kernel: str, grid: int, threads: int) -> Launch:
    """Return the launch of a merge's kernel."""
    return Launch(KernelName(_SOURCE, f"cuflash::{kernel}"), grid, threads)


def tiles_of_rows(rows: int, threads_of_row: int) -> tuple[int, int]:
    """Return blocks of a batch entry and threads of a block."""
    threads = max(threads_of_row, min(rows * threads_of_row, _THREADS))
    threads = -(-threads // WARP) * WARP
    return -(-rows // (threads // threads_of_row)), threads


def row_warps(parts: int) -> int:
    """Return the warps of a row: a power of two."""
    return min(_MOST_WARPS, 1 << max(0, -(-parts // _WARP_PARTS) - 1).bit_length())
