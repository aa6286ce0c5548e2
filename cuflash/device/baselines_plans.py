"""What the baselines launch: a kernel for each operation, or for two of attention's three."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ..problem import ArraySpec, AttentionProblem, accumulator
from .attention_plans import score_pipeline
from .attention_plans_mma import MmaTile, full_mma_obstacle, mma_score
from .compiler import C_TYPES, KernelName, Launch, ParameterBlock
from .executor import DeviceLimits
from .layer_norm_plans import DROPOUT, are_packed
from .parameters import (
    ATTENTION_PARAMETERS,
    BatchPlan,
    Slots,
    as_words,
    slot_members,
    write_problem,
)

_OPERANDS = (
    "q", "k", "v", "mask", "bias", "alibi_slopes", "sinks",
    "query_offset", "query_lengths", "key_lengths", "out", "lse",
)  # fmt: skip
_SLOTS = Slots(ATTENTION_PARAMETERS, slot_members(_OPERANDS))
#: Queries of a block of `scores_simt`.
_SIMT_QUERIES, _SIMT_THREADS = 64, 128
#: Tiles of `scores_mma` by the widest heads that take them; those of `forward_mma`, without values.
MMA_TILES = {
    64: MmaTile(2, 4, 64, 64, 16, False, 2),
    128: MmaTile(2, 4, 64, 128, 16, False, 2),
    256: MmaTile(1, 4, 64, 256, 16, False, 1),
}
#: Every option is one of the latter's steps.
MMA_SCORES = ("RangedScore", "FullScore")


class _Kernel(NamedTuple):
    """A kernel and its tile."""

    name: KernelName
    queries: int
    threads: int
    shared_bytes: int


def _simt(dtype: np.dtype) -> _Kernel:
    c_type, acc = C_TYPES[dtype.name], C_TYPES[accumulator(dtype).name]
    expression = f"cuflash::scores_simt<{c_type}, cuflash::FullScore<{acc}>>"
    name = KernelName("baselines/scores_simt.cu", expression)
    return _Kernel(name, _SIMT_QUERIES, _SIMT_THREADS, 0)


def _mma(dtype: np.dtype, score: str, tile: MmaTile) -> _Kernel:
    c_type = C_TYPES[dtype.name]
    expression = f"cuflash::scores_mma<{c_type}, cuflash::{score}<float>, {tile.expression}>"
    name = KernelName("baselines/scores_mma.cu", expression)
    shared = 2 * tile.features * (tile.queries + 2 * tile.keys)
    return _Kernel(name, tile.queries, 32 * tile.warps, shared)


def scores_kernels(dtype: np.dtype) -> Iterator[KernelName]:
    """Yield every kernel that a plan for q and k of this dtype can launch."""
    yield _simt(dtype).name
    if dtype.itemsize == 2:
        for tile in MMA_TILES.values():
            for score in MMA_SCORES:
                yield _mma(dtype, score, tile).name


@dataclass(frozen=True, slots=True, eq=False)
class ScoresPlan:
    """The launches of one call; `launch` is None if there is nothing to write."""

    launch: Launch | None
    batch: BatchPlan
    itemsizes: tuple[int, ...]
    _block: np.ndarray
    _defaults: tuple[int, int, int]

    def launches(
        self, pointers: Sequence[int], integers: Sequence[int | None]
    ) -> Iterator[tuple[Launch, np.ndarray]]:
        """Yield the kernel and its parameters, as `AttentionPlan.launches` does."""
        if self.launch is None:
            return
        values = [
            default if value is None else value
            for value, default in zip(integers, self._defaults, strict=True)
        ]
        for places in self.batch.places(pointers, self.itemsizes):
            yield self.launch, _SLOTS.fill(self._block, [*places, *values])


@lru_cache(maxsize=256)
def plan_scores(
    problem: AttentionProblem, weights: ArraySpec, lse: ArraySpec, limits: DeviceLimits
) -> ScoresPlan:
    """Plan the kernel that fills `weights` (..., Tq, Tk) and `lse` (..., Tq)."""
    if full_mma_obstacle(problem, limits) is None:
        score = mma_score(problem, score_pipeline(problem))
        known = score if score in MMA_SCORES else "FullScore"
        score = "RangedScore" if score == "PlainScore" else known
        width = next(width for width in MMA_TILES if problem.d <= width)
        kernel = _mma(problem.dtype, score, MMA_TILES[width])
    else:
        kernel = _simt(problem.dtype)
    named = {name: getattr(problem, name) for name in _OPERANDS[:-2]}
    named |= {"v": problem.k, "out": weights, "lse": lse}
    specs = tuple(named.values())
    row_tiles = -(-problem.tq // kernel.queries)
    batch = BatchPlan.of(problem.batch_shape, specs, max(1, limits.blocks // max(1, row_tiles)))
    block = ATTENTION_PARAMETERS.zeros()
    fields = block[0]
    write_problem(fields, problem, named, batch)
    fields["grid"]["row_tiles"] = row_tiles
    fields["grid"]["column_tiles"] = fields["grid"]["splits"] = 1
    fields["values"] = problem.d
    launch = Launch(
        kernel.name, row_tiles * batch.entries, kernel.threads, shared_bytes=kernel.shared_bytes
    )
    return ScoresPlan(
        launch if math.prod(problem.lse_shape) else None,
        batch,
        tuple(0 if spec is None else spec.dtype.itemsize for spec in specs),
        as_words(block),
        (0, problem.tq, problem.tk),
    )


# ---------------------------------------------------------------------------------- single steps

STEP_PARAMETERS = ParameterBlock(
    "cuflash::StepParameters",
    {
        "rows": np.int64,
        "columns": np.int64,
        **dict.fromkeys(("x", "y", "vector", "statistic"), np.uintp),
        "activation": np.int32,
        "dropout": DROPOUT,
    },
)
MAP_STEPS = ("AddBias", "Activate", "Drop", "ShiftedExponential", "Divide")
REDUCE_STEPS = ("Top", "Total")
_STEP_THREADS = 256
#: Blocks for a multiprocessor: all that fit.
_STEP_BLOCKS = 8


def _step(dtype: np.dtype, step: str, packed: bool) -> KernelName:
    c_type, flag = C_TYPES[dtype.name], str(packed).lower()
    if step in REDUCE_STEPS:
        expression = f"cuflash::reduce_step<{c_type}, {flag}, cuflash::{step}>"
    else:
        expression = f"cuflash::map_step<{c_type}, {flag}, cuflash::{step}<{c_type}>>"
    return KernelName("baselines/steps.cu", expression)


def step_kernels(dtype: np.dtype) -> Iterator[KernelName]:
    """Yield every kernel of single steps for operands of this dtype."""
    for step in (*MAP_STEPS, *REDUCE_STEPS):
        for packed in (False, True):
            yield _step(dtype, step, packed)


def step_launch(
    dtype: np.dtype,
    step: str,
    rows: int,
    columns: int,
    pointers: Sequence[int],
    limits: DeviceLimits,
) -> Launch:
    """Plan one step of arrays (rows, columns) in C order at these addresses."""
    packed = are_packed(columns, dtype.itemsize, pointers, ())
    blocks = rows if step in REDUCE_STEPS else -(-rows * (-(-columns // 8)) // _STEP_THREADS)
    grid = max(1, min(blocks, limits.multiprocessors * _STEP_BLOCKS))
    return Launch(_step(dtype, step, packed), grid, _STEP_THREADS)
