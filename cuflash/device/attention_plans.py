"""What to launch for an attention problem: tiles and split counts as data, each with its reason.

As in `plans`, a plan depends on shapes, strides, dtypes, options and the limits of a device, never
on values, and making one needs no GPU.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import NamedTuple

import numpy as np

from ..problem import ArraySpec, AttentionProblem, accumulator
from .attention_plans_combine import combine_kernels, even_block, even_launch
from .attention_plans_decode import (
    DecodeChoice,
    DecodeTile,
    Packing,
    Shares,
    decode_choice,
    decode_mma,
    decode_shares,
    has_options,
    packing,
)
from .attention_plans_dmma import (
    DmmaTile,
    dmma_kernels,
    dmma_obstacle,
    dmma_tile,
    forward_dmma,
)
from .attention_plans_mma import (
    MmaTile,
    forward_mma,
    has_full_matrices,
    is_foldable,
    mma_kernels,
    mma_obstacle,
    mma_score,
    mma_tile,
)
from .attention_plans_tf32 import (
    Tf32Tile,
    forward_tf32,
    is_tf32_faster,
    tf32_kernels,
    tf32_obstacle,
    tf32_tile,
)
from .attention_plans_wgmma import (
    READ_BY_CHUNKS,
    WGMMA_PARAMETERS,
    Maps,
    WgmmaTile,
    forward_wgmma,
    out_has_map,
    plan_maps,
    wgmma_kernels,
    wgmma_obstacle,
    wgmma_score,
    wgmma_tile,
)
from .compiler import C_TYPES, KernelName, Launch
from .executor import DeviceLimits
from .parameters import (
    ATTENTION_PARAMETERS,
    BATCH_AXES,
    COMBINE_EVEN,
    BatchPlan,
    Slots,
    as_words,
    batch_plan,
    batch_specs,
    moduli,
    slot_members,
    with_sequences,
    write_problem,
)

# ------------------------------------------------------------------------------------- simt: tiles


@dataclass(frozen=True, slots=True)
class SimtTile:
    """The tile of `forward_simt`, `SimtTile` in the kernel.

    A thread owns `rows` query rows and `columns` keys, a warp 4 x 8 threads, a block `warps` warps.
    Shared memory holds `features` features of queries and keys at a time and `values` columns of v.
    """

    rows: int
    columns: int
    warps: int
    features: int
    values: int
    blocks: int
    chunked: bool

    def __post_init__(self) -> None:
        """Refuse what the kernel cannot be compiled for."""
        for name, multiple in (("features", 16), ("values", 32)):
            if getattr(self, name) % multiple:
                raise ValueError(
                    f"{name} must be a multiple of {multiple}, got {getattr(self, name)}"
                )
        if not 1 <= self.warps <= 32:
            raise ValueError(f"warps must lie in 1..32, got {self.warps}")

    @property
    def queries(self) -> int:
        """Query rows of a block."""
        return 4 * self.rows * self.warps

    @property
    def keys(self) -> int:
        """Keys of a tile."""
        return 8 * self.columns

    @property
    def expression(self) -> str:
        """The tile as a C++ type."""
        numbers = (self.rows, self.columns, self.warps, self.features, self.values, self.blocks)
        return f"cuflash::SimtTile<{', '.join(map(str, numbers))}, {str(self.chunked).lower()}>"

    def shared_bytes(self, itemsize: int, chunks: int) -> int:
        """Return the dynamic shared memory of a block that holds `chunks` chunks of its queries."""
        row = self.features + 16 // itemsize
        keys = self.keys * (row + self.values)
        weights = self.queries * (self.keys + 8)
        return itemsize * (keys + weights + chunks * self.queries * row)


class SimtChoice(NamedTuple):
    """A row of the table: the most queries, features and value columns that take the tile."""

    accumulator: str
    queries: float
    features: float
    values: float
    tile: SimtTile
    reason: str


#: The first row that fits a problem is taken; value columns past the last one are further blocks.
SIMT_TILES = (
    SimtChoice(
        "float32", 16, math.inf, 64, SimtTile(1, 8, 4, 64, 64, 3, True),
        "decoding waits for memory: 16 rows, so that few lanes compute for rows that are not there",
    ),
    SimtChoice(
        "float32", 16, math.inf, math.inf, SimtTile(1, 8, 4, 64, 128, 2, True),
        "decoding waits for memory: 16 rows; more columns of v would not leave 64 KB (sm_75)",
    ),
    SimtChoice(
        "float32", math.inf, 32, 32, SimtTile(8, 4, 4, 32, 32, 2, False),
        "8 x 4 scores a thread: 12 shared accesses for 128 FMA, in three quarters of their time",
    ),
    SimtChoice(
        "float32", math.inf, 64, 64, SimtTile(8, 4, 4, 64, 64, 2, False),
        "8 x 4 scores and 64 sums of out a thread: 8 x 8 scores, or a third block, would spill",
    ),
    SimtChoice(
        "float32", math.inf, math.inf, math.inf, SimtTile(4, 8, 4, 64, 128, 2, True),
        "half the rows for twice the columns of v: again 64 accumulators of out",
    ),
    SimtChoice(
        "float64", 16, math.inf, 64, SimtTile(1, 4, 4, 64, 64, 3, True),
        "decoding waits for memory: 16 rows, so that few lanes compute for rows that are not there",
    ),
    SimtChoice(
        "float64", 16, math.inf, math.inf, SimtTile(1, 4, 4, 64, 128, 2, True),
        "decoding waits for memory: 16 rows; 32 keys keep it in 64 KB",
    ),
    SimtChoice(
        "float64", math.inf, 32, 32, SimtTile(4, 4, 4, 32, 32, 2, False),
        "a number takes two registers, and an FMA twice the time: half the rows suffice",
    ),
    SimtChoice(
        "float64", math.inf, 64, 64, SimtTile(4, 4, 4, 64, 64, 2, False),
        "half the rows of float32: 4 x 8 scores would spill beside the sums by blocks of features",
    ),
    SimtChoice(
        "float64", math.inf, math.inf, math.inf, SimtTile(2, 4, 4, 64, 128, 2, True),
        "half the rows for twice the columns of v; 4 rows spill",
    ),
)  # fmt: skip

#: Shared memory of a block that is not its own dynamic one: 1 KB of the system, `BlockWork`, and
#: the normalizers of groups of keys.
_RESERVED_SHARED = 3072
#: Blocks a multiprocessor from which on keys are left whole: what it runs at once.
_WAVE = 2
#: Queries for which `simt` has tiles of their own.
FEW_QUERIES = 16
#: Least key tiles of a share: below, writing and merging partial results costs more than it gains.
_SHARE_TILES = 4


def simt_tile(problem: AttentionProblem, limits: DeviceLimits) -> SimtTile:
    """Return the first tile of the table that fits the problem and a block's shared memory."""
    acc = accumulator(problem.dtype)
    for choice in SIMT_TILES:
        if (
            choice.accumulator == acc.name
            and problem.mean_tq <= choice.queries
            and problem.d <= choice.features
            and problem.dv <= choice.values
            and choice.tile.shared_bytes(acc.itemsize, 1)
            <= limits.shared_per_block - _RESERVED_SHARED
        ):
            return choice.tile
    # Small shared memory (64 KB before sm_80): the smallest tile takes any problem.
    return next(
        choice.tile
        for choice in SIMT_TILES
        if choice.accumulator == acc.name and choice.values == math.inf
    )


Tile = SimtTile | MmaTile | DmmaTile | Tf32Tile | DecodeTile | WgmmaTile
#: Those that a plan can be asked for, so that tables can be measured.
TunedTile = MmaTile | WgmmaTile
SCORES = ("PlainScore", "RangedScore", "FullScore")


def score_pipeline(problem: AttentionProblem) -> str:
    """Return the score pipeline that has what the problem asks for, and little else."""
    pairwise = (problem.softcap, problem.bias, problem.alibi_slopes, problem.mask)
    bounds = (problem.left, problem.right, problem.key_lengths, problem.query_lengths)
    if any(option is not None for option in pairwise):
        return "FullScore"
    return "RangedScore" if any(option is not None for option in bounds) else "PlainScore"


def _forward_simt(dtype: np.dtype, score: str, tile: SimtTile) -> KernelName:
    c_type, acc = C_TYPES[dtype.name], C_TYPES[accumulator(dtype).name]
    return KernelName(
        "attention/forward_simt.cu",
        f"cuflash::forward_simt<{c_type}, cuflash::{score}<{acc}>, {tile.expression}>",
    )


def attention_kernels(dtype: np.dtype, limits: DeviceLimits | None = None) -> Iterator[KernelName]:
    """Yield every kernel that a plan for q, k, v of this dtype, or a merge of them, can launch.

    With a device, some are left out that it never takes.
    """
    acc = accumulator(dtype)
    for choice, score in product(SIMT_TILES, SCORES):
        if choice.accumulator == acc.name:
            yield _forward_simt(dtype, score, choice.tile)
    if dtype == np.float64:
        yield from dmma_kernels()
    elif dtype == np.float32:
        yield from tf32_kernels()
    else:
        yield from mma_kernels(dtype, limits)
    yield from wgmma_kernels(dtype)
    yield from combine_kernels(dtype)


def attention_obstacles(problem: AttentionProblem, limits: DeviceLimits) -> dict[str, str | None]:
    """Return why each kernel family cannot run a problem, None if it can, the fastest first."""
    of_dtype = {"float64": dmma_obstacle, "float32": tf32_obstacle}
    obstacle = of_dtype.get(problem.dtype.name, mma_obstacle)(problem, limits)
    families: dict[str, str | None] = {"mma": obstacle, "simt": None}
    if problem.dtype.name in of_dtype:
        slow = problem.dtype == np.float32 and not is_tf32_faster(limits)
        if slow or problem.mean_tq <= FEW_QUERIES:
            # A few rows wait for memory, and fill no tile of tensor cores.
            families = dict(reversed(families.items()))
    return {"wgmma": wgmma_obstacle(problem, score_pipeline(problem), limits), **families}


def attention_methods(problem: AttentionProblem, limits: DeviceLimits) -> tuple[str, ...]:
    """Return the kernel families that can run a problem on a device, the fastest first."""
    obstacles = attention_obstacles(problem, limits)
    return tuple(method for method, obstacle in obstacles.items() if obstacle is None)


class _Forward(NamedTuple):
    """How a family runs a problem."""

    method: str
    tile: Tile
    kernel: KernelName
    threads: int
    shared_bytes: int
    queries_stay: bool
    packing: Packing = Packing()
    decode: DecodeChoice | None = None

    def row_tiles(self, problem: AttentionProblem) -> int:
        """Return the tiles of rows of a batch entry or group."""
        queries = self.tile.queries // self.packing.members
        return -(-problem.tq // queries) * self.packing.tiles

    def in_clusters(self, problem: AttentionProblem, shares: Shares) -> _Forward:
        """Return how clusters run it, if they merge the shares."""
        tile = shares.clustered
        if tile is None:
            return self
        kernel = decode_mma(problem.dtype, "RangedScore", tile, shares.splits)
        return self._replace(
            tile=tile, kernel=kernel, threads=32 * tile.warps, shared_bytes=tile.shared_bytes
        )


@lru_cache(maxsize=4096)
def _forward(
    problem: AttentionProblem, limits: DeviceLimits, given: TunedTile | None = None
) -> _Forward:
    """Choose family, tile and kernel: those of a given tile, if any."""
    method, score = problem.method, score_pipeline(problem)
    if given is not None:
        method = "wgmma" if isinstance(given, WgmmaTile) else "mma"
    elif method == "auto":
        method = attention_methods(problem, limits)[0]
    if method == "wgmma":
        wgmma = given if isinstance(given, WgmmaTile) else wgmma_tile(problem)
        pipeline = wgmma_score(problem, score)
        assert pipeline is not None, "a method was checked to run the problem"
        kernel = forward_wgmma(problem.dtype, pipeline, wgmma)
        return _Forward(method, wgmma, kernel, wgmma.threads, wgmma.shared_bytes, True)
    if method == "mma" and problem.dtype == np.float64:
        score = score if is_foldable(problem.scale) else "FullScore"  # other scales are a step
        dmma = dmma_tile(problem, limits)
        kernel = forward_dmma(score, dmma)
        return _Forward(method, dmma, kernel, 32 * dmma.warps, dmma.shared_bytes, True)
    if method == "mma" and problem.dtype == np.float32:
        score = score if is_foldable(problem.scale) else "FullScore"
        tf32 = tf32_tile(problem, limits)
        kernel = forward_tf32(score, tf32)
        return _Forward(method, tf32, kernel, 32 * tf32.warps, tf32.shared_bytes, True)
    if method == "mma":
        score = mma_score(problem, score)
        full = has_full_matrices(limits)
        decode = decode_choice(problem, limits) if full and given is None else None
        if decode is not None:
            kernel = decode_mma(problem.dtype, score, decode.tile)
            threads, shared = 32 * decode.tile.warps, decode.tile.shared_bytes
            if has_options(score):
                decode = decode._replace(clustered=None)
            packed = packing(problem)
            return _Forward(method, decode.tile, kernel, threads, shared, True, packed, decode)
        mma = given if isinstance(given, MmaTile) else mma_tile(problem, score, limits)
        kernel = forward_mma(problem.dtype, score, mma, full=full)
        return _Forward(method, mma, kernel, 32 * mma.warps, mma.shared_bytes, True)
    tile = simt_tile(problem, limits)
    held = _held_chunks(problem, tile, limits)
    return _Forward(
        method="simt",
        tile=tile,
        kernel=_forward_simt(problem.dtype, score, tile),
        threads=32 * tile.warps,
        shared_bytes=tile.shared_bytes(accumulator(problem.dtype).itemsize, held),
        queries_stay=held * tile.features >= problem.d,
    )


def _most_shares(
    problem: AttentionProblem, limits: DeviceLimits, given: TunedTile | None
) -> Shares:
    """Return the shares of the keys that there is workspace for.

    That of sequences end to end is that of their tokens as one, as if there were no more of them:
    the workspace is to be known from shapes of tokens.
    """
    if problem.sequences is not None:
        problem = replace(problem, cu_seqlens_q=None, cu_seqlens_k=None)
    forward = _forward(problem, limits, given)
    tile = forward.tile
    tiles = -(-problem.tk // tile.keys)
    if problem.num_splits is not None:
        return Shares(max(1, min(problem.num_splits, tiles)))
    if forward.decode is not None:
        return decode_shares(problem, forward.packing, forward.decode, limits)
    blocks = (
        math.prod(problem.batch_shape)
        * forward.row_tiles(problem)
        * max(1, -(-problem.dv // tile.values))
    )
    wave = 1 if isinstance(tile, WgmmaTile) else _WAVE
    wanted = wave * limits.multiprocessors // max(blocks, 1)
    return Shares(max(1, min(wanted, tiles // _SHARE_TILES)))


def _shares(problem: AttentionProblem, limits: DeviceLimits, given: TunedTile | None) -> Shares:
    """Return the shares of the keys."""
    most, forward = _most_shares(problem, limits, given), _forward(problem, limits, given)
    if problem.sequences is None or problem.num_splits is not None or forward.decode is None:
        return most
    found = decode_shares(problem, forward.packing, forward.decode, limits)
    return found if found.apart <= most.apart else Shares(most.apart)


# ------------------------------------------------------------------------------------------- plans

#: Operands in the order of their pointers; `out` and `lse` are the arrays to fill.
_OPERANDS = (
    "q", "k", "v", "mask", "bias", "alibi_slopes", "sinks",
    "query_offset", "query_lengths", "key_lengths", "cu_seqlens_q", "cu_seqlens_k", "out", "lse",
)  # fmt: skip
_RESULTS = _OPERANDS.index("out")
_SLOT_MEMBERS = slot_members(_OPERANDS)
_FORWARD_SLOTS = Slots(ATTENTION_PARAMETERS, _SLOT_MEMBERS)
_WGMMA_SLOTS = Slots(WGMMA_PARAMETERS, [f"attention.{member}" for member in _SLOT_MEMBERS])
_MAPPED = tuple(_OPERANDS.index(name) for name in ("q", "k", "v", "out"))
_READ_BY_CHUNKS = tuple(_OPERANDS.index(name) for name in READ_BY_CHUNKS)
_EVEN_SLOTS = Slots(COMBINE_EVEN, ["out.data", "lse.data", "parts.out.data", "parts.lse.data"])
#: Partial results begin at a multiple of this.
_ALIGNMENT = 16


@lru_cache(maxsize=4096)
def workspace_bytes(
    problem: AttentionProblem, limits: DeviceLimits, given: TunedTile | None = None
) -> int:
    """Return the bytes of partial results: (out, lse) of every row for each share of the keys.

    Sequences may need less.
    """
    splits = _most_shares(problem, limits, given).apart
    rows = math.prod(problem.lse_shape)
    if splits == 1 or not rows:
        return 0
    itemsize = accumulator(problem.dtype).itemsize
    return splits * rows * (problem.dv + 1) * itemsize + _ALIGNMENT


@dataclass(frozen=True, slots=True, eq=False)
class AttentionPlan:
    """The launches of one attention call.

    `forward` is None if there is nothing to write, `combine` unless the keys are split over blocks
    that make up no cluster of `cluster` blocks.
    """

    method: str
    tile: Tile
    splits: int
    cluster: int
    workspace: int
    batch: BatchPlan
    itemsizes: tuple[int, ...]
    forward: Launch | None
    combine: Launch | None
    _forward_block: np.ndarray
    _combine_block: np.ndarray | None
    _defaults: tuple[int, int, int]
    _lse_start: int
    """Bytes from the partial results' out to their lse."""
    _maps: Maps | None
    _moduli: tuple[int, ...]
    """What addresses must be multiples of; none if a stride is no multiple of its element."""

    def __post_init__(self) -> None:
        """Refuse a plan that would leave partial results unmerged, or merge what nobody wrote."""
        if self.cluster not in (1, self.splits):
            raise ValueError(f"{self.splits} shares of the keys in clusters of {self.cluster}")
        if (self.splits > self.cluster) != (self.combine is not None):
            raise ValueError(f"{self.splits} shares of the keys with the merge {self.combine}")
        if self.combine is not None and self.forward is not None and not self.workspace:
            raise ValueError("partial results need a workspace")

    def reads(self, pointers: Sequence[int]) -> bool:
        """Tell whether all elements lie at multiples of their size, as the device needs them."""
        return bool(self._moduli) and not any(map(operator.mod, pointers, self._moduli))

    def maps_read(self, pointers: Sequence[int]) -> bool:
        """Tell whether what is fetched by TMA, if anything is, lies at multiples of 16 bytes."""
        return self._maps is None or self._maps.read(pointers)

    def _fill(self, numbers: Sequence[int]) -> np.ndarray:
        """Return the parameters of the forward kernel."""
        if self._maps is None:
            return _FORWARD_SLOTS.fill(self._forward_block, numbers)
        return self._maps.fill(_WGMMA_SLOTS.fill(self._forward_block, numbers), numbers)

    def launches(
        self, pointers: Sequence[int], integers: Sequence[int | None], workspace: int
    ) -> Iterator[tuple[Launch, np.ndarray]]:
        """Yield kernels and their parameter blocks, in order.

        Parameters
        ----------
        pointers : sequence of int
            Addresses of q, k, v, mask, bias, alibi_slopes, sinks, query_offset, query_lengths,
            key_lengths, cu_seqlens_q, cu_seqlens_k, out and lse; 0 for what is absent or a number.
        integers : sequence of int or None
            query_offset, query_lengths and key_lengths where they are numbers.
        workspace : int
            Address of `self.workspace` bytes; 0 if that is 0.
        """
        if self.forward is None:
            return
        values: Sequence[int] = self._defaults
        if any(integers) or 0 in integers:
            values = [
                default if value is None else value
                for value, default in zip(integers, values, strict=True)
            ]
        if self.combine is None:
            for places in self.batch.places(pointers, self.itemsizes):
                yield self.forward, self._fill([*places, *values])
            return
        assert self._combine_block is not None
        partial_out = -(-workspace // _ALIGNMENT) * _ALIGNMENT
        partial = [partial_out, partial_out + self._lse_start]
        for places in self.batch.places(pointers, self.itemsizes):
            numbers = [*places[:_RESULTS], *partial, *values]
            yield self.forward, self._fill(numbers)
            results = [*places[_RESULTS:], *partial]
            yield self.combine, _EVEN_SLOTS.fill(self._combine_block, results)


@lru_cache(maxsize=4096)
def plan_attention(
    problem: AttentionProblem,
    out: ArraySpec,
    lse: ArraySpec | None,
    limits: DeviceLimits,
    given: TunedTile | None = None,
) -> AttentionPlan:
    """Plan one attention call.

    Parameters
    ----------
    problem : AttentionProblem
        Its lengths and offsets, if arrays, are arrays of the device.
    out, lse : ArraySpec
        The arrays to fill; `lse` may be absent.
    limits : DeviceLimits
        The device.
    given : TunedTile, optional
        The tile to run by, instead of the one that the tables have for the problem.

    Returns
    -------
    AttentionPlan
        Without launches if there is nothing to write.
    """
    acc = accumulator(problem.dtype)
    shares = _shares(problem, limits, given)
    forward = _forward(problem, limits, given).in_clusters(problem, shares)
    tile, splits, parts = forward.tile, shares.splits, shares.apart
    # A sequence's last tile may be a part: there is one more for each, see lib/sequences.cuh.
    row_tiles = forward.row_tiles(problem) + (problem.sequences or 0) * forward.packing.tiles
    column_tiles = max(1, -(-problem.dv // tile.values))
    named = {name: getattr(problem, name) for name in _OPERANDS[:_RESULTS]}
    named |= {"out": out, "lse": lse}
    specs = tuple(named.values())
    blocks_per_entry = max(1, row_tiles * column_tiles * splits)
    most_entries = max(1, limits.blocks // blocks_per_entry)
    batch = _batch_plan(problem, named, most_entries, forward.packing)
    rows = batch.entries * problem.tq

    axes = with_sequences(batch, problem, named)
    maps = None
    if isinstance(tile, WgmmaTile):
        mapped_out = out if out_has_map(problem, out, splits) else None
        maps = plan_maps(problem, tile, axes, mapped_out, _MAPPED, _READ_BY_CHUNKS)
        if maps is None:  # batch axes in more than three steps
            fallback = replace(problem, method="mma", num_splits=splits)
            return plan_attention(fallback, out, lse, limits)
        block = WGMMA_PARAMETERS.zeros()
        block[0]["tiles"] = blocks_per_entry * batch.entries
        block[0]["out_by_map"] = mapped_out is not None
        fields = block[0]["attention"]
    else:
        block = ATTENTION_PARAMETERS.zeros()
        fields = block[0]
    fields["grid"]["row_tiles"] = row_tiles
    fields["grid"]["column_tiles"] = column_tiles
    fields["grid"]["splits"] = splits
    write_problem(fields, problem, named, axes)
    fields["out_is_wide"] = parts > 1 or out.dtype != problem.dtype

    fields["group"], fields["members"] = forward.packing[1:]

    combine_block = None
    if parts > 1:
        combine_block = even_block(problem, out, lse, batch, parts)
        even = combine_block[0]["parts"]
        for name in ("out", "lse"):
            fields[name] = even[name]
            shift = len(axes.sizes) - len(batch.sizes)
            fields[name]["batch_stride"] = np.roll(even[name]["batch_stride"], shift)
            fields[f"{name}_split"] = even[f"{name}_step"]

    fields["queries_stay"] = forward.queries_stay
    empty = not rows * math.prod(batch.outer_sizes)
    return AttentionPlan(
        method=forward.method,
        tile=tile,
        splits=splits,
        cluster=splits // parts,
        workspace=workspace_bytes(problem, limits, given) if parts > 1 else 0,
        batch=batch,
        itemsizes=tuple(0 if spec is None else spec.dtype.itemsize for spec in specs),
        forward=None
        if empty
        else Launch(
            forward.kernel,
            grid=min(
                blocks_per_entry * batch.entries // forward.packing.size,
                limits.multiprocessors if maps is not None else limits.blocks,
            ),
            block=forward.threads,
            shared_bytes=forward.shared_bytes,
        ),
        combine=None if parts == 1 else even_launch(problem.dtype, batch, problem.tq, parts),
        _forward_block=as_words(block),
        _combine_block=None if combine_block is None else as_words(combine_block),
        _defaults=(0, problem.tq, problem.tk),
        _lse_start=parts * rows * problem.dv * acc.itemsize,
        _maps=maps,
        _moduli=moduli(specs),
    )


def _batch_plan(
    problem: AttentionProblem,
    named: dict[str, ArraySpec | None],
    most_entries: int,
    packed: Packing,
) -> BatchPlan:
    """Plan the batch axes of the operands, a packed group's last."""
    shape, axis = problem.batch_shape, packed.axis
    if axis is None:
        return batch_plan(problem, named, most_entries)
    specs = batch_specs(problem, named)
    outer = BatchPlan.of(
        (*shape[:axis], *shape[axis + 1 :]),
        [spec and _without_axis(spec, axis) for spec in specs],
        most_entries,
        BATCH_AXES - 1 - (problem.sequences is not None),
    )
    steps = [spec and spec.strides[axis] // spec.dtype.itemsize for spec in specs]
    return outer.with_innermost(packed.size, [step or 0 for step in steps])


def _without_axis(spec: ArraySpec, axis: int) -> ArraySpec:
    """Describe the first entry along an axis."""
    shape, strides = spec.shape, spec.strides
    return spec._replace(
        shape=shape[:axis] + shape[axis + 1 :], strides=strides[:axis] + strides[axis + 1 :]
    )


def _held_chunks(problem: AttentionProblem, tile: SimtTile, limits: DeviceLimits) -> int:
    """Return how many chunks of its queries a block holds.

    All of them if that costs no block of its multiprocessor, else one, read again for each key
    tile: from the L2 cache, as the keys are.
    """
    chunks = -(-problem.d // tile.features)
    share = limits.shared_per_sm // tile.blocks - _RESERVED_SHARED
    needed = tile.shared_bytes(accumulator(problem.dtype).itemsize, chunks)
    return chunks if needed <= min(share, limits.shared_per_block) else 1
