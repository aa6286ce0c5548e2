"""What to launch to merge results over disjoint sets of keys, and for the gradients of a merge."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ..problem import ArraySpec, accumulator
from .attention_plans_combine import WARP, combine_launch, row_warps, tiles_of_rows
from .compiler import C_TYPES, Launch, ParameterBlock
from .executor import DeviceLimits
from .parameters import (
    COMBINE_LISTED,
    COMBINE_VJP,
    FLOAT_TYPES,
    LISTED_PARTS,
    BatchPlan,
    Slots,
    as_words,
)


@dataclass(frozen=True, slots=True, eq=False)
class MergePlan:
    """The launch of a merge of up to `LISTED_PARTS` parts, or of its gradients; None: no rows."""

    launch: Launch | None
    batch: BatchPlan
    itemsizes: tuple[int, ...]
    _slots: Slots
    _block: np.ndarray

    def __post_init__(self) -> None:
        """Refuse arrays that are not the plan's, and a block that warps do not make up."""
        operands = len(self.itemsizes)
        if operands % 2 or not 4 <= operands <= 2 + 2 * LISTED_PARTS:
            raise ValueError(f"1 to {LISTED_PARTS} parts are merged, not {operands / 2 - 1}")
        if len(self.batch.strides) != operands:
            raise ValueError(f"{operands} arrays with strides of {len(self.batch.strides)}")
        if self.launch is not None and (self.launch.block % WARP or self.launch.grid < 1):
            raise ValueError(f"rows are taken by whole warps, not by {self.launch}")

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
    flat = (out, lse, *(spec for part in parts for spec in part))
    c_type, columns = C_TYPES[accumulator(lse.dtype).name], len(out.shape) > len(lse.shape)
    places = [f"parts.{name}[{i}]" for i in range(len(parts)) for name in ("out", "lse")]
    return _plan_rows(
        f"combine<{c_type}, cuflash::ListedParts>" if columns else f"combine_states<{c_type}>",
        COMBINE_LISTED,
        dict(zip(("out", "lse", *places), flat, strict=True)),
        limits,
        parts=len(parts),
    )


@lru_cache(maxsize=4096)
def plan_merge_vjp(
    cotangents: tuple[ArraySpec, ArraySpec | None],
    parts: tuple[tuple[ArraySpec, ArraySpec], ...],
    grads: tuple[tuple[ArraySpec, ArraySpec], ...],
    limits: DeviceLimits,
) -> MergePlan:
    """Plan the gradients of the merge of two (out, lse) pairs, all of one shape.

    The addresses of `MergePlan.launches` are those of the cotangents, of the parts and of their
    gradients, 0 for a dlse of zero.
    """
    named = dict(zip(("dout", "dlse"), cotangents, strict=True))
    for group, pairs in (("parts", parts), ("grads", grads)):
        for i, (of_out, of_lse) in enumerate(pairs):
            named |= {f"{group}.out[{i}]": of_out, f"{group}.lse[{i}]": of_lse}
    c_type = C_TYPES[parts[0][1].dtype.name]
    return _plan_rows(f"combine_vjp<{c_type}>", COMBINE_VJP, named, limits)


def _plan_rows(
    kernel: str,
    parameters: ParameterBlock,
    named: dict[str, ArraySpec | None],
    limits: DeviceLimits,
    parts: int | None = None,
) -> MergePlan:
    """Plan a kernel that goes by rows; `parts`, unless None, are those of a merge.

    `named` are its arrays by their places in the parameter block, those of out and of lse in turns.
    """
    flat = tuple(named.values())
    lse = flat[3]
    assert flat[0] is not None, "the first array says whether there are columns"
    assert lse is not None, "the first part has an lse"
    columns = len(flat[0].shape) > len(lse.shape)
    whole = BatchPlan.of(lse.shape, flat, limits.blocks)
    batch, rows, row_strides = whole.without_rows()

    block = parameters.zeros()
    fields = block[0]
    batch.write(fields["batch"])
    fields["rows"], fields["values"] = rows, flat[0].shape[-1] if columns else 1
    warps = 1
    if parts is not None:
        fields["parts"]["count"] = parts
        fields["warps"] = warps = row_warps(parts)
    tiles, threads = tiles_of_rows(rows, WARP * warps if columns else 1)
    fields["tiles"] = tiles
    for i, (name, spec) in enumerate(named.items()):
        if spec is None:
            continue
        group, _, member = name.rpartition(".")
        place = fields[group] if group else fields
        array, _, index = member.partition("[")
        place = place[array][int(index[:-1])] if index else place[array]
        place["batch_stride"][: len(batch.sizes)] = batch.strides[i]
        place["row_stride"] = row_strides[i]
        if columns and i % 2 == 0:
            place["column_stride"] = spec.strides[-1] // spec.dtype.itemsize
        place["type"] = FLOAT_TYPES.index(spec.dtype.name)
    return MergePlan(
        launch=combine_launch(kernel, batch.entries * tiles, threads)
        if math.prod(lse.shape)
        else None,
        batch=batch,
        itemsizes=tuple(0 if spec is None else spec.dtype.itemsize for spec in flat),
        _slots=Slots(parameters, [f"{name}.data" for name in named]),
        _block=as_words(block),
    )
