"""Parameter blocks of the attention kernels, and the batch axes that they describe."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from ..problem import ArraySpec, AttentionProblem
from .compiler import ParameterBlock

#: Batch axes that a parameter block has room for, after merging; the engine loops over any others.
BATCH_AXES = 8
#: Parts that one launch of the merge takes, with strides and dtypes of their own.
LISTED_PARTS = 8

#: In the order of `FloatType` and `IntegerType` of the kernels.
FLOAT_TYPES = ("float64", "float32", "float16", "bfloat16")
INTEGER_TYPES = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
UNLIMITED = 2**61  # kUnlimited: a side of a window

_STRIDES = (np.int64, (BATCH_AXES,))
BATCH = ParameterBlock("cuflash::BatchAxes", {"size": _STRIDES, "count": np.int32})
BATCHED_ARRAY = ParameterBlock(
    "cuflash::BatchedArray",
    {
        "data": np.uintp,
        "batch_stride": _STRIDES,
        "row_stride": np.int64,
        "column_stride": np.int64,
        "type": np.int32,
    },
)
ENTRY_INTEGER = ParameterBlock(
    "cuflash::EntryInteger",
    {"data": np.uintp, "batch_stride": _STRIDES, "value": np.int64, "type": np.int32},
)
GRID = ParameterBlock(
    "cuflash::Grid", {"row_tiles": np.int64, "column_tiles": np.int32, "splits": np.int32}
)
SEQUENCE_ENDS = ParameterBlock(
    "cuflash::SequenceEnds", {"data": np.uintp, "stride": np.int64, "type": np.int32}
)
SEQUENCES = ParameterBlock(
    "cuflash::Sequences", {"queries": SEQUENCE_ENDS, "keys": SEQUENCE_ENDS, "count": np.int64}
)
SCORE_PARAMETERS = ParameterBlock(
    "cuflash::ScoreParameters",
    {
        "queries": np.int64,
        "keys": np.int64,
        "left": np.int64,
        "right": np.int64,
        "scale": np.float64,
        "softcap": np.float64,
        "default_offset": np.int32,
        "query_offset": ENTRY_INTEGER,
        "query_lengths": ENTRY_INTEGER,
        "key_lengths": ENTRY_INTEGER,
        "mask": BATCHED_ARRAY,
        "bias": BATCHED_ARRAY,
        "alibi_slopes": BATCHED_ARRAY,
        "sinks": BATCHED_ARRAY,
    },
)
ATTENTION_PARAMETERS = ParameterBlock(
    "cuflash::AttentionParameters",
    {
        "batch": BATCH,
        "grid": GRID,
        "q": BATCHED_ARRAY,
        "k": BATCHED_ARRAY,
        "v": BATCHED_ARRAY,
        "out": BATCHED_ARRAY,
        "lse": BATCHED_ARRAY,
        "out_split": np.int64,
        "lse_split": np.int64,
        "features": np.int64,
        "values": np.int64,
        "out_is_wide": np.int32,
        "queries_stay": np.int32,
        "group": np.int32,
        "members": np.int32,
        "score": SCORE_PARAMETERS,
        "sequences": SEQUENCES,
    },
)
VJP_PARAMETERS = ParameterBlock(
    "cuflash::VjpParameters",
    {
        "batch": BATCH,
        "summed": np.int64,
        "adds": np.int64,
        "grid": GRID,
        **dict.fromkeys(("q", "k", "v"), BATCHED_ARRAY),
        **dict.fromkeys(("dout", "out", "lse", "dlse", "delta"), BATCHED_ARRAY),
        **dict.fromkeys(("dq", "dk", "dv", "dbias", "dsinks", "dq_sums"), BATCHED_ARRAY),
        "features": np.int64,
        "values": np.int64,
        "chunks": np.int32,
        "dout_is_wide": np.int32,
        "score": SCORE_PARAMETERS,
        "sequences": SEQUENCES,
    },
)
LISTED_PARTS_BLOCK = ParameterBlock(
    "cuflash::ListedParts",
    {
        "out": (BATCHED_ARRAY, (LISTED_PARTS,)),
        "lse": (BATCHED_ARRAY, (LISTED_PARTS,)),
        "count": np.int32,
    },
)
EVEN_PARTS_BLOCK = ParameterBlock(
    "cuflash::EvenParts",
    {
        "out": BATCHED_ARRAY,
        "lse": BATCHED_ARRAY,
        "out_step": np.int64,
        "lse_step": np.int64,
        "count": np.int32,
    },
)


def _combine_block(parts: ParameterBlock) -> ParameterBlock:
    return ParameterBlock(
        f"cuflash::CombineParameters<{parts.c_name}>",
        {
            "batch": BATCH,
            "rows": np.int64,
            "values": np.int64,
            "out": BATCHED_ARRAY,
            "lse": BATCHED_ARRAY,
            "warps": np.int32,
            "tiles": np.int32,
            "parts": parts,
        },
    )


COMBINE_LISTED = _combine_block(LISTED_PARTS_BLOCK)
COMBINE_EVEN = _combine_block(EVEN_PARTS_BLOCK)
COMBINE_VJP = ParameterBlock(
    "cuflash::CombineVjpParameters",
    {
        "batch": BATCH,
        "rows": np.int64,
        "values": np.int64,
        "dout": BATCHED_ARRAY,
        "dlse": BATCHED_ARRAY,
        "tiles": np.int32,
        "parts": LISTED_PARTS_BLOCK,
        "grads": LISTED_PARTS_BLOCK,
    },
)


class Slots:
    """Where the pointers and integers of a parameter block lie, as 8-byte words.

    A block is copied and filled as words: a tenth of the time that its members would take.
    """

    def __init__(self, block: ParameterBlock, members: Sequence[str]) -> None:
        layout = block.layout()
        self._opaque = block.opaque
        self._words = np.array([layout[member] // 8 for member in members])

    def fill(self, template: np.ndarray, numbers: Sequence[int]) -> np.ndarray:
        """Return a copy of a block, given as words, with these numbers; opaque."""
        words = template.copy()
        words[self._words] = numbers
        return words.view(self._opaque)


def as_words(block: np.ndarray) -> np.ndarray:
    """Return a finished parameter block as the read-only words that `Slots.fill` takes."""
    words = block.view(np.int64)
    words.flags.writeable = False
    return words


class BatchPlan(NamedTuple):
    """Batch axes of all operands together, merged where every operand steps through them as one.

    Strides are in elements, one tuple an operand. Kernels see the inner axes and the engine loops
    over the outer ones, of which there are none but in extreme cases.
    """

    sizes: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]
    outer_sizes: tuple[int, ...]
    outer_strides: tuple[tuple[int, ...], ...]

    @property
    def entries(self) -> int:
        """Number of batch entries that one launch sees."""
        return math.prod(self.sizes)

    @classmethod
    def of(
        cls,
        shape: tuple[int, ...],
        specs: Sequence[ArraySpec | None],
        most_entries: int,
        most_axes: int = BATCH_AXES,
    ) -> BatchPlan:
        """Merge the operands' first len(shape) axes; at most `most_entries` entries a launch."""
        sizes: list[int] = []
        steps: list[tuple[int, ...]] = []
        for axis, size in enumerate(shape):
            if size == 1:
                continue
            step = tuple(
                0 if spec is None else spec.strides[axis] // spec.dtype.itemsize for spec in specs
            )
            if sizes and all(a == b * size for a, b in zip(steps[-1], step, strict=True)):
                sizes[-1] *= size
                steps[-1] = step
            else:
                sizes.append(size)
                steps.append(step)
        cut = max(0, len(sizes) - most_axes)
        while cut < len(sizes) and math.prod(sizes[cut:]) > most_entries:
            cut += 1

        def by_operand(axes: list[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
            return tuple(zip(*axes, strict=True)) if axes else ((),) * len(specs)

        return cls(
            tuple(sizes[cut:]), by_operand(steps[cut:]), tuple(sizes[:cut]), by_operand(steps[:cut])
        )

    def places(self, pointers: Sequence[int], itemsizes: Sequence[int]) -> list[Sequence[int]]:
        """Return, for each turn of the engine's loop, where every operand begins; 0 stays 0."""
        if not self.outer_sizes:
            return [pointers]
        return [
            [
                pointer
                and pointer + itemsize * sum(i * step for i, step in zip(index, steps, strict=True))
                for pointer, itemsize, steps in zip(
                    pointers, itemsizes, self.outer_strides, strict=True
                )
            ]
            for index in product(*map(range, self.outer_sizes))
        ]

    def without_rows(self) -> tuple[BatchPlan, int, tuple[int, ...]]:
        """Return the plan without its last axis, and that axis: its size, and every stride."""
        if not self.sizes:
            return self, 1, (0,) * len(self.strides)
        batch = self._replace(sizes=self.sizes[:-1], strides=tuple(s[:-1] for s in self.strides))
        return batch, self.sizes[-1], tuple(s[-1] for s in self.strides)

    def with_outermost(self, strides: Sequence[int]) -> BatchPlan:
        """Return the plan with one more axis in front, of size 1, by which operands step so."""
        return self._replace(
            sizes=(1, *self.sizes),
            strides=tuple((step, *s) for step, s in zip(strides, self.strides, strict=True)),
        )

    def with_innermost(self, size: int, strides: Sequence[int]) -> BatchPlan:
        """Return the plan with one more axis behind the others, never merged with them."""
        return self._replace(
            sizes=(*self.sizes, size),
            strides=tuple((*s, step) for step, s in zip(strides, self.strides, strict=True)),
        )

    def dense_strides(self, inner: int) -> tuple[int, ...]:
        """Return the strides of C-ordered entries of `inner` elements."""
        return tuple(inner * math.prod(self.sizes[a + 1 :]) for a in range(len(self.sizes)))

    def write(self, fields: Any) -> None:
        """Describe the axes to a kernel."""
        fields["size"][: len(self.sizes)] = self.sizes
        fields["count"] = len(self.sizes)


def write_array(
    fields: Any, spec: ArraySpec, batch_strides: Sequence[int], matrix_axes: int
) -> None:
    """Describe an operand, whose last `matrix_axes` axes are rows and columns, to a kernel."""
    fields["batch_stride"][: len(batch_strides)] = batch_strides
    steps = [stride // spec.dtype.itemsize for stride in spec.strides[-matrix_axes:]]
    for name, step in zip(
        ("row_stride", "column_stride"), steps if matrix_axes else (), strict=False
    ):
        fields[name] = step
    types = INTEGER_TYPES if spec.dtype.kind in "iu" else FLOAT_TYPES
    fields["type"] = types.index(spec.dtype.name) if spec.dtype.name in types else 0


# ------------------------------------------------------------------------- operands of attention

_INTEGER_OPTIONS = ("query_offset", "query_lengths", "key_lengths")
_ENDS = ("cu_seqlens_q", "cu_seqlens_k")
#: Where a parameter block describes an operand, if not under its name.
_MEMBERS = {
    name: f"score.{name}" for name in ("mask", "bias", "alibi_slopes", "sinks", *_INTEGER_OPTIONS)
} | {"cu_seqlens_q": "sequences.queries", "cu_seqlens_k": "sequences.keys"}
#: Axes of an operand after those of the batch.
_INNER_AXES = {
    **dict.fromkeys(("q", "k", "v", "mask", "bias", "out", "dout", "dq", "dk", "dv", "dbias"), 2),
    "dq_sums": 2,
    **dict.fromkeys(("lse", "dlse", "delta"), 1),
}
#: Of packed sequences: what is one for each of them and none of the batch's.
_OF_SEQUENCES = ("query_offset", "key_lengths", *_ENDS)


def slot_members(operands: Sequence[str]) -> list[str]:
    """Return where a parameter block has the addresses of operands, then integers as numbers."""
    return [f"{_MEMBERS.get(name, name)}.data" for name in operands] + [
        f"score.{name}.value" for name in _INTEGER_OPTIONS
    ]


def batch_plan(
    problem: AttentionProblem,
    named: Mapping[str, ArraySpec | None],
    most_entries: int,
    most_axes: int = BATCH_AXES,
) -> BatchPlan:
    """Plan the batch axes of the operands; sequences end to end take one more."""
    most_axes -= problem.sequences is not None
    return BatchPlan.of(problem.batch_shape, batch_specs(problem, named), most_entries, most_axes)


def batch_specs(
    problem: AttentionProblem, named: Mapping[str, ArraySpec | None]
) -> list[ArraySpec | None]:
    """Return the operands, None for those that have an axis of sequences instead of the batch's."""
    of_sequences = () if problem.sequences is None else _OF_SEQUENCES
    return [None if name in of_sequences else spec for name, spec in named.items()]


def with_sequences(
    batch: BatchPlan, problem: AttentionProblem, named: Mapping[str, ArraySpec | None]
) -> BatchPlan:
    """Return the axes as kernels see them: in front one for sequences, if these lie end to end."""
    if problem.sequences is None:
        return batch
    return batch.with_outermost(
        [
            spec.strides[0] // spec.dtype.itemsize
            if name in ("query_offset", "key_lengths") and spec is not None
            else 0
            for name, spec in named.items()
        ]
    )


def moduli(specs: Sequence[ArraySpec | None]) -> tuple[int, ...]:
    """Return what each operand's address must be a multiple of; () if strides forbid any."""
    read = [None if spec is None or 0 in spec.shape else spec for spec in specs]
    for spec in read:
        if spec is not None and any(
            stride % spec.dtype.itemsize
            for size, stride in zip(spec.shape, spec.strides, strict=True)
            if size > 1
        ):
            return ()
    return tuple(1 if spec is None else spec.dtype.itemsize for spec in read)


def write_problem(
    fields: Any,
    problem: AttentionProblem,
    named: Mapping[str, ArraySpec | None],
    axes: BatchPlan,
) -> None:
    """Describe a problem to a kernel: its operands and axes, sizes and options of the score."""
    axes.write(fields["batch"])
    for (name, spec), strides in zip(named.items(), axes.strides, strict=True):
        if spec is None:
            continue
        member = fields
        for part in _MEMBERS.get(name, name).split("."):
            member = member[part]
        if name in _ENDS:
            member["stride"] = spec.strides[0] // spec.dtype.itemsize
            member["type"] = INTEGER_TYPES.index(spec.dtype.name)
        else:
            write_array(member, spec, strides, _INNER_AXES.get(name, 0))
    fields["sequences"]["count"] = problem.sequences or 0
    fields["features"], fields["values"] = problem.d, problem.dv
    score = fields["score"]
    score["queries"], score["keys"] = problem.tq, problem.tk
    for name, side in (("left", problem.left), ("right", problem.right)):
        score[name] = UNLIMITED if side is None else min(side, UNLIMITED)
    score["scale"], score["softcap"] = problem.scale, problem.softcap or 0
    score["default_offset"] = problem.query_offset is None
