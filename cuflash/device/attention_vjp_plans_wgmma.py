"""The tiles of `backward_wgmma`, gradients of attention on Hopper, as data with reasons."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import NamedTuple

import numpy as np

from ..problem import ArraySpec, AttentionProblem
from ..problem_vjp import AttentionVjpProblem
from .attention_plans import score_pipeline
from .attention_plans_mma import is_foldable, steps_of
from .attention_plans_wgmma import (
    SHARED_BYTES,
    Maps,
    fetch_obstacle,
    has_map,
    hopper_obstacle,
    map_of,
    mapped_block,
)
from .attention_vjp_stages import OPERANDS, Stage, Sweep, operand_specs, own_pointers, plan_stages
from .compiler import C_TYPES, KernelName, Launch
from .executor import DeviceLimits
from .parameters import VJP_PARAMETERS, BatchPlan, Slots, as_words, slot_members, with_sequences
from .tensor_map import ALIGNMENT, AXES

#: Operands that have a map, in the order of the parameter block.
_MAPPED = ("q", "k", "v", "dout")
#: What lies behind delta in the workspace, in the order of the parameter block.
_SCRATCH = ("exponents", "deltas", "sums", "damaged", "turns")
#: Each begins at a multiple of this, counted from delta: whole lines of memory.
_SCRATCH_ALIGNMENT = 128


BACKWARD_WGMMA_PARAMETERS = mapped_block(
    "cuflash::BackwardWgmmaParameters",
    [f"{name}_map" for name in _MAPPED],
    {
        "vjp": VJP_PARAMETERS,
        **dict.fromkeys(_SCRATCH, np.uintp),
        **dict.fromkeys(("row_tiles", "key_tiles", "damaged_count", "together"), np.int64),
    },
)
_SLOTS = Slots(
    BACKWARD_WGMMA_PARAMETERS, [*(f"vjp.{name}" for name in slot_members(OPERANDS)), *_SCRATCH]
)

#: Queries of a tile, in all kernels, and elements of a vector of 16 bytes.
_ROWS, _VECTOR = 64, 8


@dataclass(frozen=True, slots=True)
class BackwardWgmmaTile:
    """The tile of `backward_wgmma`, `BackwardTile` in the kernels.

    A block has `groups` warpgroups of 64 keys; `width` is what D and Dv are padded to. `stages` are
    tiles of queries under way. dq is computed in `parts` of its columns; with `early` the sum for
    dv starts beside the product for dS.
    """

    groups: int
    width: int
    stages: int
    parts: int
    early: bool

    def __post_init__(self) -> None:
        """Refuse what the kernel cannot be compiled for, or no multiprocessor has room for."""
        if self.groups not in (2, 3):
            raise ValueError(f"groups must be 2 or 3, got {self.groups}")
        if self.width != 64 * self.parts:
            raise ValueError(
                f"dq is computed 64 columns at a time: width must be {64 * self.parts} in "
                f"{self.parts} parts, got {self.width}"
            )
        most = {2: 128, 3: 64}[self.groups]
        if self.width > most:
            raise ValueError(f"width must be at most {most}, got {self.width}: registers")
        if self.stages < 2:
            raise ValueError(f"stages must be at least 2, got {self.stages}")
        if self.shared_bytes > SHARED_BYTES:
            raise ValueError(
                f"a block needs {self.shared_bytes} bytes of shared memory; "
                f"there are {SHARED_BYTES}"
            )

    @property
    def keys(self) -> int:
        """Keys of a block."""
        return 64 * self.groups

    @property
    def threads(self) -> int:
        """Threads of a block: the warpgroup that fetches and sums up dq, too."""
        return 128 * (self.groups + 1)

    @property
    def expression(self) -> str:
        """The tile as a C++ type."""
        numbers = (self.groups, self.width, self.stages, self.parts)
        return f"cuflash::BackwardTile<{', '.join(map(str, numbers))}, {str(self.early).lower()}>"

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block: tiles, then barriers and `KeyWork`."""
        rows = 2 * self.width * 2 + 4 + 8  # of q and dout, exponents, deltas twice
        keys = 2 * self.width * 2
        return (
            self.keys * (keys + 2 * 2 * _ROWS)
            + _ROWS * (self.stages * rows + 4 * self.width)
            + _WORK_BYTES
        )


#: `KeyRooms::kBytes` in the kernel.
_WORK_BYTES = 640


class BackwardWgmmaChoice(NamedTuple):
    """A row of the table: the widest heads that take the tile.

    `in_line` blocks of an entry run at a time where they add to dq in order: each begins two tiles
    of queries after the one before, and waits until then.
    """

    width: int
    tile: BackwardWgmmaTile
    in_line: int
    reason: str


BACKWARD_WGMMA_TILES = (
    BackwardWgmmaChoice(
        64, BackwardWgmmaTile(3, 64, 3, 1, False), 16,
        "three warpgroups: 64 columns of dk and dv leave registers for them, and queries are read"
        " once for 192 keys. 4 in line, of 33 entries that L2 does not hold, cost"
        " deterministic=True 0.24 to 0.27 in place of 0.17 at T = 8192",
    ),
    BackwardWgmmaChoice(
        128, BackwardWgmmaTile(2, 128, 3, 2, True), 4,
        "dk and dv take 128 of 216 registers; dq in two parts, so that 72 do for it. The sum for dv"
        " beside the product for dS: 0.02 fewer cycles. 32 in line under a causal mask of T = 8192"
        " cost 0.31 in place of 0.18",
    ),
)  # fmt: skip

_SCORES = ("PlainScore", "RangedScore")
#: Tokens that 32-bit positions of rows and keys leave room for.
_MOST_TOKENS = 2**30
#: Bytes of q, dout and the float32 dq of entries whose longest blocks come first: what L2 keeps.
_TOGETHER_BYTES = 32 << 20


def wgmma_vjp_obstacle(problem: AttentionVjpProblem, limits: DeviceLimits) -> str | None:
    """Return why Hopper's tensor cores cannot compute these gradients; None if they can.

    That does not depend on which gradients are asked for: each has the same bits alone.
    """
    forward = problem.forward
    obstacle = _forward_obstacle(forward, limits)
    if obstacle is not None:
        return obstacle
    if problem.results.dout.dtype != forward.dtype:
        return "needs dout of q's dtype"
    unread = fetch_obstacle(dict(zip(_MAPPED, _mapped_specs(problem), strict=True)))
    if unread is not None:
        return unread
    shared = _shared_axes(forward, forward.k)
    if _shared_axes(forward, forward.q):
        return "needs queries of their own in each batch entry"
    if _shared_axes(forward, forward.v) != shared:
        return "needs k and v that broadcast along the same axes"
    for name in () if forward.sequences else ("query_offset", "query_lengths", "key_lengths"):
        spec = getattr(forward, name)
        if spec is not None and any(spec.strides[axis] for axis in shared):
            return f"needs the same {name} for all queries that share keys"
    for gradients in _groups(problem):
        stage = _keys_stage(problem, gradients, limits)
        if stage is None:
            return "needs batch entries"
        if len(stage.batch.sizes) > AXES - 2 - (forward.sequences is not None):
            return "has room for three batch axes after merging"
        if stage.batch.outer_sizes or _row_tiles(forward) * stage.batch.entries > limits.blocks:
            return "has too many tiles for a launch"
    return None


def _shared_axes(problem: AttentionProblem, spec: ArraySpec) -> list[int]:
    """Return the batch axes along which an operand is the same."""
    sizes = enumerate(problem.batch_shape)
    return [axis for axis, size in sizes if size > 1 and not spec.strides[axis]]


def _groups(problem: AttentionVjpProblem) -> list[tuple[str, ...]]:
    """Return the gradients that are computed together: dk and dv if summed along the same axes."""
    asked = [name for name in ("dk", "dv") if getattr(problem.grads, name) is not None]
    alike = (
        len({tuple(_shared_axes(problem.forward, getattr(problem.grads, x))) for x in asked}) < 2
    )
    groups: list[tuple[str, ...]] = [tuple(asked)] if alike else [(name,) for name in asked]
    if problem.grads.dq is not None:
        groups[0] = (*groups[0], "dq")
    return [group or ("delta",) for group in groups]


def _forward_obstacle(problem: AttentionProblem, limits: DeviceLimits) -> str | None:
    """Return what of the forward problem is an obstacle."""
    obstacle = hopper_obstacle(problem, limits, BACKWARD_WGMMA_TILES[-1].width)
    if obstacle is not None:
        return obstacle
    if not (0 < problem.tk < _MOST_TOKENS and 0 < problem.tq < _MOST_TOKENS):
        return "needs queries and keys, and fewer than 2^30 of each"
    if score_pipeline(problem) not in _SCORES:
        return f"has no kernel for options that change scores: {', '.join(steps_of(problem))}"
    if not is_foldable(abs(problem.scale)):
        return f"needs a scale between 2^-64 and 2^64, or minus that, not {problem.scale:g}"
    return None


def wgmma_vjp_tile(problem: AttentionProblem) -> BackwardWgmmaTile:
    """Return the tile that a problem takes."""
    return _choice(problem).tile


def _choice(problem: AttentionProblem) -> BackwardWgmmaChoice:
    """Return the first row of the table that fits the problem."""
    width = max(problem.d, problem.dv)
    return next(choice for choice in BACKWARD_WGMMA_TILES if width <= choice.width)


def _kernel(name: str, dtype: np.dtype, tile: BackwardWgmmaTile, *flags: bool) -> KernelName:
    arguments = [C_TYPES[dtype.name], "cuflash::RangedScore<float>", tile.expression]
    arguments += [str(flag).lower() for flag in flags]
    source = "backward_wgmma" if name == "backward_wgmma" else "backward_wgmma_rows"
    return KernelName(f"attention/{source}.cu", f"cuflash::{name}<{', '.join(arguments)}>")


def wgmma_vjp_kernels(dtype: np.dtype) -> Iterator[KernelName]:
    """Yield every kernel that a plan for gradients of q, k, v of this dtype can launch."""
    if dtype.itemsize == 2:
        for choice in BACKWARD_WGMMA_TILES:
            for name, flag in product(("backward_wgmma_rows", "backward_wgmma"), (False, True)):
                yield _kernel(name, dtype, choice.tile, flag)
            yield _kernel("backward_wgmma_queries", dtype, choice.tile)


# ------------------------------------------------------------------------------------------- plans


def _row_tiles(problem: AttentionProblem) -> int:
    """Return the tiles of queries of an entry: of sequences end to end, one more for each."""
    return -(-problem.tq // _ROWS) + (problem.sequences or 0)


def _is_ordered(problem: AttentionVjpProblem) -> bool:
    """Tell whether tiles of keys have to add to dq in order: the sum of two has none."""
    tile = wgmma_vjp_tile(problem.forward)
    return problem.deterministic and problem.forward.tk > 2 * tile.keys


def _key_tiles(problem: AttentionProblem) -> int:
    return -(-problem.tk // wgmma_vjp_tile(problem).keys) + (problem.sequences or 0)


def _mapped_specs(problem: AttentionVjpProblem) -> tuple[ArraySpec, ...]:
    forward = problem.forward
    return forward.q, forward.k, forward.v, problem.results.dout


def _scratch_offsets(problem: AttentionProblem) -> list[int]:
    """Return where the members of `_SCRATCH` begin, counted from delta, and where they end."""
    entries = math.prod(problem.batch_shape)
    rows = entries * _row_tiles(problem) * _ROWS
    delta = 4 * math.prod(problem.lse_shape)
    sums = 4 * rows * wgmma_vjp_tile(problem).width
    offsets = [0]
    damaged, turns = 4 * (entries * _key_tiles(problem) + 1), rows // 4
    for size in (delta, 4 * rows, 8 * rows, sums, damaged, turns):
        offsets.append(-(-(offsets[-1] + size) // _SCRATCH_ALIGNMENT) * _SCRATCH_ALIGNMENT)
    return offsets[1:]


def wgmma_vjp_scratch(problem: AttentionProblem, limits: DeviceLimits) -> int:
    """Return the bytes of delta and of what lies behind it, if some call has a plan; else 0."""
    return _scratch_offsets(problem)[-1] if _forward_obstacle(problem, limits) is None else 0


class WgmmaStage(NamedTuple):
    """The kernels that fill gradients of q, k and v which are summed along the same axes."""

    gradients: tuple[str, ...]
    adds: tuple[bool, ...]
    maps: Maps
    vectors: tuple[int, ...]
    """Places of what else is read by whole vectors among the pointers."""
    kernels: tuple[Launch, ...]
    block: np.ndarray
    scratch: tuple[int | None, ...]
    """Where the members of `_SCRATCH` begin, counted from delta; None for null."""

    def maps_read(self, pointers: Sequence[int]) -> bool:
        """Tell whether the operands lie where TMA, or whole vectors, can read them."""
        return self.maps.read(pointers) and not any(pointers[x] % ALIGNMENT for x in self.vectors)

    def launches(
        self, pointers: Sequence[int], itemsizes: Sequence[int], values: Sequence[int]
    ) -> Iterator[tuple[Launch, np.ndarray]]:
        """Yield the kernels and their parameter block."""
        mine = own_pointers(pointers, self.gradients)
        delta = pointers[OPERANDS.index("delta")]
        places = [0 if offset is None else delta + offset for offset in self.scratch]
        block = self.maps.fill(_SLOTS.fill(self.block, [*mine, *values, *places]), pointers)
        for launch in self.kernels:
            yield launch, block


@lru_cache(maxsize=4096)
def _keys_stage(
    problem: AttentionVjpProblem, gradients: tuple[str, ...], limits: DeviceLimits
) -> Stage | None:
    """Return the stage of the kernel over keys as of any family; None without batch entries."""
    forward = problem.forward
    specs = operand_specs(problem)
    tile = wgmma_vjp_tile(forward)
    kernel = _kernel("backward_wgmma", forward.dtype, tile, _is_ordered(problem))
    sweep = Sweep(kernel, tile.threads, tile.shared_bytes, _key_tiles(forward))
    stages = plan_stages(problem, specs, gradients, gradients[0], sweep, limits)
    return stages[0] if stages else None


def wgmma_vjp_stages(problem: AttentionVjpProblem, limits: DeviceLimits) -> Iterator[WgmmaStage]:
    """Yield what computes the gradients of q, k and v that are asked for, and delta."""
    forward = problem.forward
    tile = wgmma_vjp_tile(forward)
    row_tiles, key_tiles = _row_tiles(forward), _key_tiles(forward)
    *places, _ = _scratch_offsets(forward)
    out = problem.results.out
    by_vectors = out.dtype == forward.dtype and has_map(out) and not forward.dv % _VECTOR
    for gradients in _groups(problem):
        stage = _keys_stage(problem, gradients, limits)
        assert stage is not None, "a method was checked to run the problem"
        block = BACKWARD_WGMMA_PARAMETERS.zeros()
        fields = block[0]
        fields["vjp"] = stage.block.view(VJP_PARAMETERS.dtype)[0]
        fields["row_tiles"], fields["key_tiles"] = row_tiles, key_tiles
        fields["damaged_count"] = stage.launch.grid
        fields["together"] = _together(problem, stage.launch.grid // key_tiles, limits)
        rows = row_tiles * stage.batch.entries
        name = _kernel("backward_wgmma_rows", forward.dtype, tile, by_vectors)
        kernels = [Launch(name, rows, 4 * tile.width)]
        if gradients != ("delta",):
            kernels.append(stage.launch)
        if "dq" in gradients:
            name = _kernel("backward_wgmma_queries", forward.dtype, tile)
            kernels.append(Launch(name, rows, 128))
        yield WgmmaStage(
            gradients=gradients,
            adds=stage.adds,
            maps=_plan_maps(problem, tile, stage.batch),
            vectors=(OPERANDS.index("out"),) if by_vectors else (),
            kernels=tuple(kernels),
            block=as_words(block),
            scratch=(*places[:-1], places[-1] if _is_ordered(problem) else None),
        )


def _together(problem: AttentionVjpProblem, entries: int, limits: DeviceLimits) -> int:
    """Return the entries whose blocks alternate, so that the first keys of all come first."""
    forward, wanted, ordered = problem.forward, 1, _is_ordered(problem)
    if forward.left is not None or forward.right is not None or ordered:
        wanted = _TOGETHER_BYTES // (forward.tq * wgmma_vjp_tile(forward).width * 8)
    if ordered:
        wanted = max(wanted, limits.multiprocessors // _choice(forward).in_line)
    return max(1, min(entries, wanted))


def _plan_maps(problem: AttentionVjpProblem, tile: BackwardWgmmaTile, batch: BatchPlan) -> Maps:
    forward = problem.forward
    named: Mapping[str, ArraySpec | None] = dict.fromkeys(OPERANDS)
    axes = with_sequences(batch, forward, named)
    places = tuple(map(OPERANDS.index, _MAPPED))
    rows = (_ROWS, tile.keys, tile.keys, _ROWS)
    specs = _mapped_specs(problem)
    tensors = [
        map_of(spec, axes.sizes, axes.strides[place], box_rows)
        for spec, place, box_rows in zip(specs, places, rows, strict=True)
    ]
    return Maps(tuple(tensors), places)
