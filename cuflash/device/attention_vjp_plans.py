"""What to launch for the gradients of attention: tiles as data, and a stage for each gradient."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import NamedTuple

import numpy as np

from ..problem import ArraySpec, AttentionProblem, accumulator, c_strides
from ..problem_vjp import AttentionVjpProblem
from .attention_plans import SCORES, score_pipeline
from .compiler import KernelName, Launch
from .executor import DeviceLimits
from .parameters import (
    BATCH_AXES,
    VJP_PARAMETERS,
    BatchPlan,
    Slots,
    as_words,
    batch_plan,
    moduli,
    slot_members,
    with_sequences,
    write_problem,
)
from .plans import C_TYPES

# ------------------------------------------------------------------------------------------- tiles


@dataclass(frozen=True, slots=True)
class PairTile:
    """A tile of pairs of `backward_simt`, `PairTile` in the kernels.

    A thread owns `rows` x `columns` pairs, a warp 4 x 8 threads, a block `warps` warps. Shared
    memory holds `features` features of q and k, and of dout and v, at a time; `blocks` blocks are
    to share a multiprocessor.
    """

    rows: int
    columns: int
    warps: int
    features: int
    blocks: int

    def __post_init__(self) -> None:
        """Refuse what the kernels cannot be compiled for."""
        if self.features % 32:
            raise ValueError(f"features must be a multiple of 32, got {self.features}")
        if not 4 <= self.warps <= 32:
            raise ValueError(f"warps must lie in 4..32, got {self.warps}")

    @property
    def tile_rows(self) -> int:
        """Rows of a block."""
        return 4 * self.rows * self.warps

    @property
    def tile_columns(self) -> int:
        """Columns of a tile."""
        return 8 * self.columns

    @property
    def expression(self) -> str:
        """The tile as a C++ type."""
        numbers = (self.rows, self.columns, self.warps, self.features, self.blocks)
        return f"cuflash::PairTile<{', '.join(map(str, numbers))}>"

    def shared_bytes(self, itemsize: int) -> int:
        """Return the dynamic shared memory of a block."""
        operands = 2 * (self.tile_rows + self.tile_columns) * (self.features + 16 // itemsize)
        pairs = 2 * self.tile_rows * (self.tile_columns + 8)
        return itemsize * (operands + pairs)


class VjpChoice(NamedTuple):
    """A row of the table: the most features, of q or v, that take the tile."""

    accumulator: str
    features: float
    tile: PairTile
    reason: str


#: The first row that fits a problem is taken; features past those of a tile are further chunks, and
#: further blocks.
VJP_TILES = (
    VjpChoice(
        "float32", 32, PairTile(4, 4, 4, 32, 2),
        "48 KB: also what takes any problem where a block has no more than 64 KB (sm_75)",
    ),
    VjpChoice(
        "float32", 64, PairTile(4, 8, 4, 64, 2),
        "64 accumulators of dk and dv, 32 of a product: more would spill; 12 shared accesses for "
        "128 FMA, in three quarters of their time",
    ),
    VjpChoice(
        "float32", math.inf, PairTile(2, 8, 8, 128, 1),
        "all of 128 features at once, or scores are made again for each 64 of a gradient: 17.4 "
        "against 10.1 TFLOP/s at D = 128; 172 KB",
    ),
    VjpChoice(
        "float32", math.inf, PairTile(4, 8, 4, 64, 2), "where a block has less",
    ),
    VjpChoice(
        "float64", 32, PairTile(2, 4, 4, 32, 2),
        "55 KB, as above",
    ),
    VjpChoice(
        "float64", math.inf, PairTile(2, 4, 4, 64, 2),
        "a number takes two registers, and an FMA twice the time: half the rows and columns",
    ),
)  # fmt: skip

#: Shared memory of a block that is not its own dynamic one: 1 KB of the system, `VjpWork`, and what
#: is known of the queries of a tile.
_RESERVED_SHARED = 4096
#: Rows of a block of `row_deltas`, and threads of the kernels that go by rows.
_DELTA_ROWS = 32
_DELTA_THREADS, _SINK_THREADS = 128, 256


def vjp_tile(problem: AttentionProblem, limits: DeviceLimits) -> PairTile:
    """Return the first tile of the table that fits the problem and a block's shared memory."""
    acc = accumulator(problem.dtype)
    tiles = [choice for choice in VJP_TILES if choice.accumulator == acc.name]
    for choice in tiles:
        fits = choice.tile.shared_bytes(acc.itemsize) <= limits.shared_per_block - _RESERVED_SHARED
        if max(problem.d, problem.dv) <= choice.features and fits:
            return choice.tile
    return tiles[0].tile


def _backward_simt(name: str, dtype: np.dtype, score: str, tile: PairTile) -> KernelName:
    c_type, acc = C_TYPES[dtype.name], C_TYPES[accumulator(dtype).name]
    return KernelName(
        "attention/backward_simt.cu",
        f"cuflash::{name}<{c_type}, cuflash::{score}<{acc}>, {tile.expression}>",
    )


def _backward_rows(name: str, acc: np.dtype) -> KernelName:
    return KernelName("attention/backward_rows.cu", f"cuflash::{name}<{C_TYPES[acc.name]}>")


def attention_vjp_kernels(dtype: np.dtype) -> Iterator[KernelName]:
    """Yield every kernel that a plan for gradients of q, k, v of this dtype can launch."""
    acc = accumulator(dtype)
    tiles = dict.fromkeys(choice.tile for choice in VJP_TILES if choice.accumulator == acc.name)
    for tile in tiles:
        for name, score in product(("backward_keys", "backward_queries"), SCORES):
            yield _backward_simt(name, dtype, score, tile)
        yield _backward_simt("backward_bias", dtype, "FullScore", tile)
    yield _backward_rows("row_deltas", acc)
    yield _backward_rows("sink_gradients", acc)


# ------------------------------------------------------------------------------------------- plans

#: Operands in the order of their pointers.
OPERANDS = (
    "q", "k", "v", "mask", "bias", "alibi_slopes", "sinks",
    "query_offset", "query_lengths", "key_lengths", "cu_seqlens_q", "cu_seqlens_k",
    "dout", "out", "lse", "dlse", "dq", "dk", "dv", "dbias", "dsinks", "delta",
)  # fmt: skip
_RESULTS = ("dout", "out", "lse", "dlse")
_GRADIENTS = ("dq", "dk", "dv", "dbias", "dsinks", "delta")
_SLOTS = Slots(VJP_PARAMETERS, [*slot_members(OPERANDS), "adds"])
#: Deltas begin at a multiple of this.
_ALIGNMENT = 16
#: `decode_batch` counts entries in 32 bits.
_MOST_ENTRIES = 2**32 - 1


def vjp_workspace_bytes(problem: AttentionProblem) -> int:
    """Return the bytes of workspace: a number for each row."""
    rows = math.prod(problem.lse_shape)
    return rows * accumulator(problem.dtype).itemsize + _ALIGNMENT if rows else 0


class Stage(NamedTuple):
    """A kernel that fills one gradient, or two, in one launch or several."""

    launch: Launch
    gradients: tuple[str, ...]
    batch: BatchPlan
    adds: tuple[bool, ...]
    """Of each launch, whether an earlier one left a part of its sums."""
    block: np.ndarray

    def launches(
        self, pointers: Sequence[int], itemsizes: Sequence[int], values: Sequence[int]
    ) -> Iterator[tuple[Launch, np.ndarray]]:
        """Yield the kernel and its parameter blocks."""
        mine = [
            pointer if name in self.gradients or name not in _GRADIENTS[:-1] else 0
            for name, pointer in zip(OPERANDS, pointers, strict=True)
        ]
        for places, adds in zip(self.batch.places(mine, itemsizes), self.adds, strict=True):
            yield self.launch, _SLOTS.fill(self.block, [*places, *values, adds])


@dataclass(frozen=True, slots=True, eq=False)
class AttentionVjpPlan:
    """The launches of one call for gradients; none if there is nothing to write."""

    tile: PairTile
    workspace: int
    stages: tuple[Stage, ...]
    itemsizes: tuple[int, ...]
    added: tuple[str, ...]
    """Gradients that later launches add to: each stores what it has so far."""
    _defaults: tuple[int, int, int]
    _moduli: tuple[int, ...]

    def reads(self, pointers: Sequence[int]) -> bool:
        """Tell whether all elements lie at multiples of their size, as the device needs them."""
        return bool(self._moduli) and not any(map(operator.mod, pointers, self._moduli))

    def launches(
        self, pointers: Sequence[int], integers: Sequence[int | None], workspace: int
    ) -> Iterator[tuple[Launch, np.ndarray]]:
        """Yield kernels and their parameter blocks, in order.

        Parameters
        ----------
        pointers : sequence of int
            Addresses of what `OPERANDS` names, but for delta; 0 for what is absent or a number.
        integers : sequence of int or None
            query_offset, query_lengths and key_lengths where they are numbers.
        workspace : int
            Address of `self.workspace` bytes; 0 if that is 0.
        """
        values = [
            default if value is None else value
            for value, default in zip(integers, self._defaults, strict=True)
        ]
        delta = -(-workspace // _ALIGNMENT) * _ALIGNMENT
        for stage in self.stages:
            yield from stage.launches([*pointers, delta], self.itemsizes, values)


@lru_cache(maxsize=4096)
def plan_attention_vjp(problem: AttentionVjpProblem, limits: DeviceLimits) -> AttentionVjpPlan:
    """Plan one call for gradients.

    Parameters
    ----------
    problem : AttentionVjpProblem
        Its lengths and offsets, if arrays, are arrays of the device; its gradients have elements.
    limits : DeviceLimits
        The device.

    Returns
    -------
    AttentionVjpPlan
        Without stages if there is nothing to write.
    """
    forward = problem.forward
    specs = _operand_specs(problem)
    tile = vjp_tile(forward, limits)
    stages = []
    groups = [("delta",), ("dk", "dv"), ("dq",), ("dbias",), ("dsinks",)]
    if not _summed_alike(specs["dk"], specs["dv"], len(forward.batch_shape)):
        groups[1:2] = [("dk",), ("dv",)]
    if any(specs[name] is not None for name in _GRADIENTS[:-1]):
        for group in groups:
            asked = tuple(name for name in group if specs[name] is not None)
            if asked:
                stages += _stage(problem, specs, asked, tile, limits)
    return AttentionVjpPlan(
        added=tuple(name for stage in stages if any(stage.adds) for name in stage.gradients),
        tile=tile,
        workspace=vjp_workspace_bytes(forward) if stages else 0,
        stages=tuple(stages),
        itemsizes=tuple(0 if x is None else x.dtype.itemsize for x in specs.values()),
        _defaults=(0, forward.tq, forward.tk),
        _moduli=moduli(list(specs.values())[:-1]),
    )


def _operand_specs(problem: AttentionVjpProblem) -> dict[str, ArraySpec | None]:
    """Return what `OPERANDS` names."""
    forward = problem.forward
    acc = accumulator(forward.dtype)
    given = {name: getattr(problem.results, name) for name in _RESULTS}
    given |= problem.grads._asdict()
    given["delta"] = ArraySpec(forward.lse_shape, c_strides(forward.lse_shape, acc.itemsize), acc)
    return {name: given[name] if name in given else getattr(forward, name) for name in OPERANDS}


def _summed_alike(a: ArraySpec | None, b: ArraySpec | None, axes: int) -> bool:
    """Tell whether two gradients are summed along the same batch axes."""
    if a is None or b is None:
        return True
    return all(
        size == 1 or bool(mine) == bool(theirs)
        for size, mine, theirs in zip(a.shape[:axes], a.strides, b.strides, strict=False)
    )


def _stage(
    problem: AttentionVjpProblem,
    specs: dict[str, ArraySpec | None],
    gradients: tuple[str, ...],
    tile: PairTile,
    limits: DeviceLimits,
) -> list[Stage]:
    """Return the stage that fills these gradients; none if they have no elements."""
    forward = problem.forward
    kernel, row_tiles, column_tiles = _tiles(problem, specs, gradients, tile)
    named = {
        name: None if name in _GRADIENTS[:-1] and name not in gradients else spec
        for name, spec in specs.items()
    }
    whole = batch_plan(forward, named, _MOST_ENTRIES, len(forward.batch_shape) + 1)
    batch, entries, summed, adds = _kept_before_summed(
        BatchPlan(
            whole.outer_sizes + whole.sizes,
            tuple(map(operator.add, whole.outer_strides, whole.strides)),
            (),
            ((),) * len(named),
        ),
        OPERANDS.index(gradients[0]),
        BATCH_AXES - (forward.sequences is not None),
        max(1, limits.blocks // max(1, row_tiles * column_tiles)),
    )
    grid = row_tiles * column_tiles * entries
    if not grid:
        return []
    block = VJP_PARAMETERS.zeros()
    fields = block[0]
    write_problem(fields, forward, named, with_sequences(batch, forward, named))
    fields["summed"] = summed
    fields["grid"]["row_tiles"], fields["grid"]["column_tiles"] = row_tiles, column_tiles
    fields["grid"]["splits"] = 1
    fields["chunks"] = max(1, -(-max(forward.d, forward.dv) // tile.features))
    fields["dout_is_wide"] = problem.results.dout.dtype != forward.dtype
    threads = {"row_deltas": _DELTA_THREADS, "sink_gradients": _SINK_THREADS}
    by_rows = threads.get(kernel)
    acc = accumulator(forward.dtype)
    launch = Launch(
        _backward_rows(kernel, acc)
        if by_rows
        else _backward_simt(
            kernel,
            forward.dtype,
            "FullScore" if kernel == "backward_bias" else score_pipeline(forward),
            tile,
        ),
        grid=grid,
        block=by_rows or 32 * tile.warps,
        shared_bytes=0 if by_rows else tile.shared_bytes(acc.itemsize),
    )
    return [Stage(launch, gradients, batch, adds, as_words(block))]


def _tiles(
    problem: AttentionVjpProblem,
    specs: dict[str, ArraySpec | None],
    gradients: tuple[str, ...],
    tile: PairTile,
) -> tuple[str, int, int]:
    """Return the kernel of these gradients, and the tiles of rows and of columns of an entry.

    Of sequences end to end the last tile may be a part: there is one more for each, see
    lib/sequences.cuh.
    """
    forward = problem.forward
    more = forward.sequences or 0
    if "dsinks" in gradients:
        return "sink_gradients", 1, 1
    if "delta" in gradients:
        return "row_deltas", -(-forward.tq // _DELTA_ROWS) + more, 1
    bias = specs["dbias"]
    if bias is not None and "dbias" in gradients:
        # An axis that is summed is one tile, be there elements along it or not.
        steps = (tile.tile_rows, tile.tile_columns)
        rows, columns = (
            -(-size // step) if stride else 1
            for size, step, stride in zip(bias.shape[-2:], steps, bias.strides[-2:], strict=True)
        )
        return "backward_bias", rows, columns
    of_queries = "dq" in gradients
    tokens = forward.tq if of_queries else forward.tk
    features = max(forward.dv if name == "dv" else forward.d for name in gradients)
    return (
        "backward_queries" if of_queries else "backward_keys",
        -(-tokens // tile.tile_rows) + more,
        -(-features // tile.features),
    )


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
