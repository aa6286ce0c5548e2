"""Plans of the merges: what to launch to unite results over disjoint sets of keys."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ..problem import ArraySpec, AttentionProblem, accumulator
from .compiler import KernelName, Launch
from .executor import DeviceLimits
from .parameters import (
    COMBINE_EVEN,
    COMBINE_LISTED,
    FLOAT_TYPES,
    BatchPlan,
    Slots,
    as_words,
    write_array,
)
from .plans import C_TYPES

_SOURCE = "attention/combine.cu"
_WARP = 32
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
    yield KernelName(_SOURCE, f"cuflash::combine_states<{acc}>")


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
    fields["warps"] = warps = _row_warps(splits)
    fields["tiles"], _ = _tiles(problem.tq, _WARP * warps)
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
    tiles, threads = _tiles(rows, _WARP * _row_warps(splits))
    kernel = f"combine<{C_TYPES[accumulator(dtype).name]}, cuflash::EvenParts>"
    return _combine_launch(kernel, batch.entries * tiles, threads)


def _combine_launch(kernel: str, grid: int, threads: int) -> Launch:
    return Launch(KernelName(_SOURCE, f"cuflash::{kernel}"), grid, threads)


def _tiles(rows: int, threads_of_row: int) -> tuple[int, int]:
    """Return blocks of a batch entry and threads of a block."""
    threads = max(threads_of_row, min(rows * threads_of_row, _THREADS))
    threads = -(-threads // _WARP) * _WARP
    return -(-rows // (threads // threads_of_row)), threads


def _row_warps(parts: int) -> int:
    """Return the warps of a row: a power of two."""
    return min(_MOST_WARPS, 1 << max(0, -(-parts // _WARP_PARTS) - 1).bit_length())


@dataclass(frozen=True, slots=True, eq=False)
class MergePlan:
    """The launch that merges up to `LISTED_PARTS` parts; None if there is nothing to write."""

    launch: Launch | None
    batch: BatchPlan
    itemsizes: tuple[int, ...]
    _slots: Slots
    _block: np.ndarray

    def launches(self, pointers: Sequence[int]) -> Iterator[tuple[Launch, np.ndarray]]:
        """Yield the kernel and its parameter block, as often as the engine loops.

        `pointers` are the addresses of the two results, then of the two arrays of each part.
        """
        if self.launch is None:
            return
        for places in self.batch.places(pointers, self.itemsizes):
            yield self.launch, self._slots.fill(self._block, places)


@lru_cache(maxsize=4096)
def plan_merge(
    results: tuple[ArraySpec, ArraySpec],
    parts: tuple[tuple[ArraySpec, ArraySpec], ...],
    limits: DeviceLimits,
) -> MergePlan:
    """Plan the merge of (out, lse) pairs, or of (normalizer, maximum) pairs, into one.

    The first of each pair has one axis more than the second in attention (columns), and as many in
    a softmax state; all have the shapes of the results.
    """
    out, lse = results
    acc = accumulator(lse.dtype)
    columns = len(out.shape) > len(lse.shape)
    flat = (out, lse, *(spec for part in parts for spec in part))
    whole = BatchPlan.of(lse.shape, flat, limits.blocks)
    batch, rows, row_strides = whole.without_rows()

    block = COMBINE_LISTED.zeros()
    fields = block[0]
    batch.write(fields["batch"])
    fields["rows"], fields["values"] = rows, out.shape[-1] if columns else 1
    fields["warps"] = warps = _row_warps(len(parts))
    tiles, threads = _tiles(rows, _WARP * warps if columns else 1)
    fields["tiles"] = tiles
    listed = fields["parts"]
    listed["count"] = len(parts)
    places = [fields["out"], fields["lse"]]
    places += [listed[name][i] for i in range(len(parts)) for name in ("out", "lse")]
    for i, (place, spec) in enumerate(zip(places, flat, strict=True)):
        place["batch_stride"][: len(batch.sizes)] = batch.strides[i]
        place["row_stride"] = row_strides[i]
        if columns and i % 2 == 0:
            place["column_stride"] = spec.strides[-1] // spec.dtype.itemsize
        place["type"] = FLOAT_TYPES.index(spec.dtype.name)

    c_type = C_TYPES[acc.name]
    kernel = f"combine<{c_type}, cuflash::ListedParts>" if columns else f"combine_states<{c_type}>"
    members = [f"parts.{name}[{i}].data" for i in range(len(parts)) for name in ("out", "lse")]
    return MergePlan(
        launch=_combine_launch(kernel, batch.entries * tiles, threads)
        if math.prod(lse.shape)
        else None,
        batch=batch,
        itemsizes=tuple(spec.dtype.itemsize for spec in flat),
        _slots=Slots(COMBINE_LISTED, ["out.data", "lse.data", *members]),
        _block=as_words(block),
    )
