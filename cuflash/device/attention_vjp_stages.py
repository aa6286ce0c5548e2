"""A stage of the gradients of attention: a kernel, its grid, and the launches that fill one."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

from ..problem import ArraySpec, accumulator, c_strides
from ..problem_vjp import AttentionVjpProblem
from .compiler import KernelName, Launch
from .executor import DeviceLimits
from .parameters import (
    BATCH_AXES,
    VJP_PARAMETERS,
    BatchPlan,
    Slots,
    as_words,
    batch_plan,
    slot_members,
    with_sequences,
    write_problem,
)

#: Operands in the order of their pointers. The last ones are in the workspace: what kernels leave
#: for each other.
OPERANDS = (
    "q", "k", "v", "mask", "bias", "alibi_slopes", "sinks",
    "query_offset", "query_lengths", "key_lengths", "cu_seqlens_q", "cu_seqlens_k",
    "dout", "out", "lse", "dlse", "dq", "dk", "dv", "dbias", "dsinks",
    "delta", "dq_sums",
)  # fmt: skip
RESULTS = ("dout", "out", "lse", "dlse")
GRADIENTS = ("dq", "dk", "dv", "dbias", "dsinks")
SCRATCH = ("delta", "dq_sums")
_SLOTS = Slots(VJP_PARAMETERS, [*slot_members(OPERANDS), "adds"])
#: `decode_batch` counts entries in 32 bits.
_MOST_ENTRIES = 2**32 - 1


def own_pointers(pointers: Sequence[int], gradients: Sequence[str]) -> list[int]:
    """Return the addresses of operands, of gradients those of `gradients` alone."""
    return [
        pointer if name in gradients or name not in GRADIENTS else 0
        for name, pointer in zip(OPERANDS, pointers, strict=True)
    ]


class Sweep(NamedTuple):
    """A kernel that fills gradients, and its tiles of one of their batch entries."""

    kernel: KernelName
    threads: int
    shared_bytes: int
    row_tiles: int
    column_tiles: int = 1
    chunks: int = 1
    """Of the features, as a block goes through them."""


class Stage(NamedTuple):
    """A kernel that fills one gradient, several or none, in one launch or several."""

    launch: Launch
    gradients: tuple[str, ...]
    batch: BatchPlan
    adds: tuple[bool, ...]
    """Of each launch, whether an earlier one left a part of its sums."""
    block: np.ndarray

    @property
    def kernels(self) -> tuple[Launch, ...]:
        """What is launched."""
        return (self.launch,)

    def launches(
        self, pointers: Sequence[int], itemsizes: Sequence[int], values: Sequence[int]
    ) -> Iterator[tuple[Launch, np.ndarray]]:
        """Yield the kernel and its parameter blocks."""
        mine = own_pointers(pointers, self.gradients)
        for places, adds in zip(self.batch.places(mine, itemsizes), self.adds, strict=True):
            yield self.launch, _SLOTS.fill(self.block, [*places, *values, adds])


def operand_specs(
    problem: AttentionVjpProblem, dq_sums: ArraySpec | None = None
) -> dict[str, ArraySpec | None]:
    """Return what `OPERANDS` names."""
    forward = problem.forward
    acc = accumulator(forward.dtype)
    given = {name: getattr(problem.results, name) for name in RESULTS}
    given |= problem.grads._asdict()
    given["delta"] = ArraySpec(forward.lse_shape, c_strides(forward.lse_shape, acc.itemsize), acc)
    given["dq_sums"] = dq_sums
    return {name: given[name] if name in given else getattr(forward, name) for name in OPERANDS}


def bias_tiles(bias: ArraySpec, rows: int, columns: int) -> tuple[int, int]:
    """Return the tiles of dbias along its axes: an axis that is summed is one, of any size."""
    of_rows, of_columns = (
        -(-size // step) if stride else 1
        for size, step, stride in zip(
            bias.shape[-2:], (rows, columns), bias.strides[-2:], strict=True
        )
    )
    return of_rows, of_columns


def plan_stages(
    problem: AttentionVjpProblem,
    specs: Mapping[str, ArraySpec | None],
    gradients: tuple[str, ...],
    owner: str,
    sweep: Sweep,
    limits: DeviceLimits,
) -> list[Stage]:
    """Return the stage in which a kernel fills these gradients; none if it has no block.

    `specs` describes what `OPERANDS` names. Blocks are shared out along the batch axes of the
    operand `owner`, and walk over the others.
    """
    forward = problem.forward
    named = {
        name: None if name in GRADIENTS and name not in gradients else spec
        for name, spec in specs.items()
    }
    tiles = sweep.row_tiles * sweep.column_tiles
    whole = batch_plan(forward, named, _MOST_ENTRIES, len(forward.batch_shape) + 1)
    batch, entries, summed, adds = _kept_before_summed(
        BatchPlan(
            whole.outer_sizes + whole.sizes,
            tuple(map(operator.add, whole.outer_strides, whole.strides)),
            (),
            ((),) * len(named),
        ),
        OPERANDS.index(owner),
        BATCH_AXES - (forward.sequences is not None),
        max(1, limits.blocks // max(1, tiles)),
    )
    grid = tiles * entries
    if not grid:
        return []
    block = VJP_PARAMETERS.zeros()
    fields = block[0]
    write_problem(fields, forward, named, with_sequences(batch, forward, named))
    fields["summed"] = summed
    fields["grid"]["row_tiles"] = sweep.row_tiles
    fields["grid"]["column_tiles"] = sweep.column_tiles
    fields["grid"]["splits"] = 1
    fields["chunks"] = sweep.chunks
    fields["dout_is_wide"] = problem.results.dout.dtype != forward.dtype
    launch = Launch(sweep.kernel, grid, sweep.threads, sweep.shared_bytes)
    return [Stage(launch, gradients, batch, adds, as_words(block))]


def _kept_before_summed(
    batch: BatchPlan, gradient: int, most_axes: int, most_entries: int
) -> tuple[BatchPlan, int, int, tuple[bool, ...]]:
    """Order the batch axes for one gradient: those that it has, then those it is summed along.

    Returns
    -------
    batch : BatchPlan
        What does not fit a launch is outer: axes of the gradient first.
    entries, summed : int
        Of a launch: entries of the gradient, and of the sum that each is.
    adds : tuple of bool
        Of each turn of the engine's loop, whether it adds to the sums of an earlier one.
    """
    # A sum over no entry is one that begins and does not go on.
    nothing = False
    kept: list[int] = []
    summed: list[int] = []
    outer: list[int] = []
    sizes = list(batch.sizes)
    for axis, step in enumerate(batch.strides[gradient]):
        (kept if step else summed).append(axis)
        if not step and not sizes[axis]:
            nothing, sizes[axis] = True, 1

    def size_of(axes: list[int]) -> int:
        return math.prod(sizes[axis] for axis in axes)

    def too_many() -> bool:
        return (
            len(kept) + len(summed) > most_axes
            or size_of(kept) > most_entries
            or size_of(kept + summed) > _MOST_ENTRIES
        )

    while kept and too_many():
        outer.append(kept.pop(0))
    loops_over = len(outer)
    while summed and too_many():
        outer.append(summed.pop(0))

    def chosen(axes: list[int]) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
        strides = tuple(tuple(steps[axis] for axis in axes) for steps in batch.strides)
        return tuple(sizes[axis] for axis in axes), strides

    adds = tuple(
        any(index[loops_over:]) for index in product(*(range(sizes[axis]) for axis in outer))
    )
    ordered = BatchPlan(*chosen(kept + summed), *chosen(outer))
    return ordered, size_of(kept), 0 if nothing else size_of(summed), adds
