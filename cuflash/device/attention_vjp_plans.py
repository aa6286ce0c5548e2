"""What to launch for the gradients of attention: families, tiles as data, a stage a gradient."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from ..problem import ArraySpec, AttentionProblem, accumulator, c_strides
from ..problem_vjp import AttentionVjpProblem
from .attention_plans import SCORES, score_pipeline
from .attention_plans_tf32 import is_tf32_faster
from .attention_vjp_plans_dmma import DMMA_VJP, dmma_vjp_obstacle
from .attention_vjp_plans_mma import (
    mma_bias,
    mma_keys,
    mma_queries,
    mma_rows,
    mma_vjp_kernels,
    mma_vjp_obstacle,
)
from .attention_vjp_plans_pairs import PairsFamily
from .attention_vjp_plans_tf32 import TF32_VJP, tf32_vjp_obstacle
from .attention_vjp_plans_wgmma import (
    WgmmaStage,
    wgmma_vjp_kernels,
    wgmma_vjp_obstacle,
    wgmma_vjp_scratch,
    wgmma_vjp_stages,
)
from .attention_vjp_stages import (
    GRADIENTS,
    OPERANDS,
    SCRATCH,
    Stage,
    Sweep,
    bias_tiles,
    operand_specs,
    plan_stages,
)
from .compiler import C_TYPES, KernelName, Launch
from .executor import DeviceLimits
from .parameters import moduli

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
        "float64", 64, PairTile(2, 4, 4, 64, 2),
        "a number takes two registers, and an FMA twice the time: half the rows and columns",
    ),
    VjpChoice(
        "float64", math.inf, PairTile(2, 2, 8, 128, 1),
        "all of 128 features at once, as in float32: 6.6 against 3.5 TFLOP/s at D = 128; of 32 "
        "rows and 32 keys 6.1, with 4 warps 5.1; 191 KB",
    ),
    VjpChoice(
        "float64", math.inf, PairTile(2, 4, 4, 64, 2), "where a block has less",
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


def attention_vjp_kernels(
    dtype: np.dtype, limits: DeviceLimits | None = None
) -> Iterator[KernelName]:
    """Yield every kernel that a plan for gradients of q, k, v of this dtype can launch.

    With `limits`, those on tensor cores that it can launch on such a device.
    """
    acc = accumulator(dtype)
    tiles = dict.fromkeys(choice.tile for choice in VJP_TILES if choice.accumulator == acc.name)
    for tile in tiles:
        for name, score in product(("backward_keys", "backward_queries"), SCORES):
            yield _backward_simt(name, dtype, score, tile)
        yield _backward_simt("backward_bias", dtype, "FullScore", tile)
    pairs = PAIRS.get(dtype.name)
    yield from mma_vjp_kernels(dtype, limits) if pairs is None else pairs.kernels(limits)
    yield _backward_rows("row_deltas", acc)
    yield _backward_rows("sink_gradients", acc)
    yield from wgmma_vjp_kernels(dtype)


# ---------------------------------------------------------------------------------------- families

#: What the dtypes of more than 16 bits have on tensor cores.
PAIRS: dict[str, PairsFamily[Any]] = {"float64": DMMA_VJP, "float32": TF32_VJP}


def attention_vjp_obstacles(
    problem: AttentionVjpProblem, limits: DeviceLimits
) -> dict[str, str | None]:
    """Return why each kernel family cannot run a problem, None if it can, the fastest first."""
    forward = problem.forward
    of_dtype = {"float64": dmma_vjp_obstacle, "float32": tf32_vjp_obstacle}
    obstacle = of_dtype.get(forward.dtype.name, mma_vjp_obstacle)(forward, limits)
    families: dict[str, str | None] = {"mma": obstacle, "simt": None}
    if forward.dtype == np.float32 and not is_tf32_faster(limits):
        families = dict(reversed(families.items()))
    return {"wgmma": wgmma_vjp_obstacle(problem, limits), **families}


def attention_vjp_methods(problem: AttentionVjpProblem, limits: DeviceLimits) -> tuple[str, ...]:
    """Return the kernel families that can run a problem on a device, the fastest first."""
    obstacles = attention_vjp_obstacles(problem, limits)
    return tuple(method for method, obstacle in obstacles.items() if obstacle is None)


def _method(problem: AttentionVjpProblem, limits: DeviceLimits) -> str:
    """Return the family that runs a problem."""
    if problem.method == "auto":
        return attention_vjp_methods(problem, limits)[0]
    return problem.method


def _sweeps(
    problem: AttentionVjpProblem,
    specs: dict[str, ArraySpec | None],
    method: str,
    limits: DeviceLimits,
) -> Iterator[tuple[str, tuple[str, ...], Sweep]]:
    """Yield, in order, operands among whose batch entries kernels are shared out, what they fill.

    `specs` describes what `OPERANDS` names; there is a "dq_sums" if dq is to be summed by atomics.
    """
    forward = problem.forward
    acc = accumulator(forward.dtype)

    def asked(*names: str) -> tuple[str, ...]:
        return tuple(name for name in names if specs[name] is not None)

    # Of sequences end to end the last tile of rows may be a part: there is one more for each.
    tiles = -(-forward.tq // _DELTA_ROWS) + (forward.sequences or 0)
    yield "delta", (), Sweep(_backward_rows("row_deltas", acc), _DELTA_THREADS, 0, tiles)
    by_key = [asked("dk", "dv")]
    if not _summed_alike(specs["dk"], specs["dv"], len(forward.batch_shape)):
        by_key = [("dk",), ("dv",)]
    of_queries = asked("dq")
    score = score_pipeline(forward)
    pairs = PAIRS.get(forward.dtype.name)
    keys, queries = (pairs.keys, pairs.queries) if pairs else (mma_keys, mma_queries)
    if specs["dq_sums"] is not None:
        clears, ends = (
            (pairs.rows(forward, clears=True), pairs.rows(forward, clears=False))
            if pairs
            else (mma_rows("backward_mma_clear", forward), mma_rows("backward_mma_round", forward))
        )
        yield "dq_sums", (), clears
        for i, gradients in enumerate(by_key):
            sweep = keys(forward, score, limits, adds_queries=i == 0)
            yield (*gradients, "k")[0], gradients, sweep
        yield "dq", of_queries, ends
    else:
        for gradients in filter(None, (*by_key, of_queries)):
            if method == "mma":
                sweep = (queries if "dq" in gradients else keys)(forward, score, limits)
            else:
                sweep = _simt_sweep(forward, gradients, limits)
            yield gradients[0], gradients, sweep
    bias = specs["dbias"]
    if bias is not None:
        # Of pairs of warps there is no kernel for it: it has few products, and many stores.
        by_mma = method == "mma" and pairs is None
        sweep = mma_bias(forward, bias, limits) if by_mma else _simt_bias(forward, bias, limits)
        yield "dbias", ("dbias",), sweep


def _sink_sweep(forward: AttentionProblem) -> Sweep:
    """Return the kernel that fills dsinks from deltas, whoever left them."""
    kernel = _backward_rows("sink_gradients", accumulator(forward.dtype))
    return Sweep(kernel, _SINK_THREADS, 0, 1)


def _simt_sweep(
    forward: AttentionProblem, gradients: tuple[str, ...], limits: DeviceLimits
) -> Sweep:
    """Return the plain kernel that fills dq, or dk and dv."""
    tile = vjp_tile(forward, limits)
    of_queries = "dq" in gradients
    tokens = forward.tq if of_queries else forward.tk
    features = max(forward.dv if name == "dv" else forward.d for name in gradients)
    return _simt_launch(
        "backward_queries" if of_queries else "backward_keys",
        forward,
        score_pipeline(forward),
        tile,
        # Of sequences end to end the last tile may be a part: there is one more for each.
        -(-tokens // tile.tile_rows) + (forward.sequences or 0),
        -(-features // tile.features),
    )


def _simt_bias(forward: AttentionProblem, bias: ArraySpec, limits: DeviceLimits) -> Sweep:
    """Return the plain kernel that fills dbias."""
    tile = vjp_tile(forward, limits)
    rows, columns = bias_tiles(bias, tile.tile_rows, tile.tile_columns)
    return _simt_launch("backward_bias", forward, "FullScore", tile, rows, columns)


def _simt_launch(
    name: str, forward: AttentionProblem, score: str, tile: PairTile, rows: int, columns: int
) -> Sweep:
    return Sweep(
        _backward_simt(name, forward.dtype, score, tile),
        threads=32 * tile.warps,
        shared_bytes=tile.shared_bytes(accumulator(forward.dtype).itemsize),
        row_tiles=rows,
        column_tiles=columns,
        chunks=max(1, -(-max(forward.d, forward.dv) // tile.features)),
    )


# ------------------------------------------------------------------------------------------- plans

#: Deltas begin at a multiple of this, and so does what follows them.
_ALIGNMENT = 16
#: Rows of sums of dq are of whole vectors of 16 bits, so that they are rounded by vectors.
_SUM_COLUMNS = 8


def vjp_workspace_bytes(problem: AttentionVjpProblem, limits: DeviceLimits) -> int:
    """Return the bytes of workspace: a number for each row, and sums of dq if it has any.

    They are enough for every dtype of dout, on which the family may depend.
    """
    sums = _dq_sums(problem, _method(problem, limits))
    size = _delta_bytes(problem.forward)
    if sums is not None:
        size = _aligned(size) + _own_bytes(sums)
    if problem.method in ("auto", "wgmma"):
        size = max(size, wgmma_vjp_scratch(problem.forward, limits))
    return size + _ALIGNMENT if size else 0


def _delta_bytes(forward: AttentionProblem) -> int:
    return math.prod(forward.lse_shape) * accumulator(forward.dtype).itemsize


def _aligned(place: int) -> int:
    return -(-place // _ALIGNMENT) * _ALIGNMENT


def _dq_sums(problem: AttentionVjpProblem, method: str) -> ArraySpec | None:
    """Describe the array in which dq is summed by atomic additions, if it is to be."""
    dq = problem.grads.dq
    if method != "mma" or problem.deterministic or dq is None:
        return None
    *batch, rows, features = dq.shape
    own = [size if step else 1 for size, step in zip(batch, dq.strides, strict=False)]
    shape = (*own, rows, -(-features // _SUM_COLUMNS) * _SUM_COLUMNS)
    acc = accumulator(problem.forward.dtype)
    sums = ArraySpec(shape, c_strides(shape, acc.itemsize), acc)
    return sums.broadcast_to((*batch, *shape[-2:]), "dq_sums")


def _own_bytes(sums: ArraySpec) -> int:
    """Return the bytes of the elements that a spec has of its own."""
    own = (size for size, step in zip(sums.shape, sums.strides, strict=True) if step)
    return math.prod(own) * sums.dtype.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class AttentionVjpPlan:
    """The launches of one call for gradients; none if there is nothing to write."""

    method: str
    workspace: int
    stages: tuple[Stage | WgmmaStage, ...]
    itemsizes: tuple[int, ...]
    added: tuple[str, ...]
    """Gradients that later launches add to: each stores what it has so far."""
    _defaults: tuple[int, int, int]
    _sums_start: int
    """Bytes from deltas to sums of dq."""
    _moduli: tuple[int, ...]

    def __post_init__(self) -> None:
        """Refuse a plan that would fill a gradient twice, or add to one that it does not fill."""
        filled = [name for stage in self.stages for name in stage.gradients]
        if len(set(filled)) < len(filled) or not set(self.added) <= set(filled):
            raise ValueError(f"stages fill {filled} and add to {self.added}")

    def reads(self, pointers: Sequence[int]) -> bool:
        """Tell whether all elements lie at multiples of their size, as the device needs them."""
        return bool(self._moduli) and not any(map(operator.mod, pointers, self._moduli))

    def maps_read(self, pointers: Sequence[int]) -> bool:
        """Tell whether what is fetched by maps lies where it can be."""
        return all(x.maps_read(pointers) for x in self.stages if isinstance(x, WgmmaStage))

    def launches(
        self, pointers: Sequence[int], integers: Sequence[int | None], workspace: int
    ) -> Iterator[tuple[Launch, np.ndarray]]:
        """Yield kernels and their parameter blocks, in order.

        Parameters
        ----------
        pointers : sequence of int
            Addresses of what `OPERANDS` names, but for `SCRATCH`; 0 for what is absent or a number.
        integers : sequence of int or None
            query_offset, query_lengths and key_lengths where they are numbers.
        workspace : int
            Address of `self.workspace` bytes; 0 if that is 0.
        """
        values = [
            default if value is None else value
            for value, default in zip(integers, self._defaults, strict=True)
        ]
        delta = _aligned(workspace)
        scratch = [delta, delta + self._sums_start]
        for stage in self.stages:
            yield from stage.launches([*pointers, *scratch], self.itemsizes, values)


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
    method = _method(problem, limits)
    specs = operand_specs(problem, _dq_sums(problem, method))
    stages: list[Stage | WgmmaStage] = []
    if any(specs[name] is not None for name in GRADIENTS):
        if method == "wgmma":
            stages += wgmma_vjp_stages(problem, limits)
        else:
            for owner, gradients, sweep in _sweeps(problem, specs, method, limits):
                stages += plan_stages(problem, specs, gradients, owner, sweep, limits)
        if specs["dsinks"] is not None:
            sweep = _sink_sweep(forward)
            stages += plan_stages(problem, specs, ("dsinks",), "dsinks", sweep, limits)
    return AttentionVjpPlan(
        added=tuple(name for stage in stages if any(stage.adds) for name in stage.gradients),
        method=method,
        workspace=vjp_workspace_bytes(problem, limits) if stages else 0,
        stages=tuple(stages),
        itemsizes=tuple(0 if x is None else x.dtype.itemsize for x in specs.values()),
        _defaults=(0, forward.tq, forward.tk),
        _sums_start=_aligned(_delta_bytes(forward)),
        _moduli=moduli([specs[name] for name in OPERANDS if name not in SCRATCH]),
    )


def _summed_alike(a: ArraySpec | None, b: ArraySpec | None, axes: int) -> bool:
    """Tell whether two gradients are summed along the same batch axes."""
    if a is None or b is None:
        return True
    return all(
        size == 1 or bool(mine) == bool(theirs)
        for size, mine, theirs in zip(a.shape[:axes], a.strides, b.strides, strict=False)
    )
