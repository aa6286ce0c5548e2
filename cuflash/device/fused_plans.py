"""What to launch for a matrix product with an epilogue: kernels and tiles, with their reasons."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ..problem import ArraySpec, accumulator
from ..problem_fused import ACTIVATIONS, LANES, MatmulProblem
from .attention_plans_dmma import DMMA_CAPABILITIES
from .attention_plans_tf32 import TF32_CAPABILITIES
from .attention_plans_wgmma import Maps, has_map, mapped_block
from .compiler import C_TYPES, KernelName, Launch, ParameterBlock
from .executor import DeviceLimits
from .layer_norm_plans import are_packed
from .parameters import BATCH, BATCHED_ARRAY, BatchPlan, Slots, as_words, write_array
from .tensor_map import ALIGNMENT, AXES, TensorMap

MATMUL_PARAMETERS = ParameterBlock(
    "cuflash::MatmulParameters",
    {
        "batch": BATCH,
        **dict.fromkeys(("a", "b", "out"), BATCHED_ARRAY),
        "bias": np.uintp,
        "rows": np.int64,
        "columns": np.int64,
        "depth": np.int64,
        "row_tiles": np.int32,
        "column_tiles": np.int32,
        "activation": np.int32,
    },
)
MATMUL_MAPS = mapped_block(
    "cuflash::MatmulMaps", ("a", "b", "out"), {"matmul": MATMUL_PARAMETERS, "tiles": np.int64}
)

_POINTERS = ("a.data", "b.data", "out.data", "bias")
_SLOTS = Slots(MATMUL_PARAMETERS, _POINTERS)
_MAPPED_SLOTS = Slots(MATMUL_MAPS, [f"matmul.{member}" for member in _POINTERS])

#: Terms of a stage of `matmul_wgmma`, and rows of a box of results.
_WGMMA_DEPTH, _WGMMA_OUT_ROWS = 64, 16
#: Bytes of a panel of results on its way out, and of the barriers.
_WGMMA_PANEL, _WGMMA_BARRIERS = _WGMMA_OUT_ROWS * 128, 256


class ProductTile(NamedTuple):
    """The tile of `matmul_wgmma`, `WgmmaProduct` in the kernel.

    Warpgroups of 64 rows, columns, stages under way, and panels of 64 columns of results that each
    warp has on their way out.
    """

    groups: int
    columns: int
    stages: int
    panels: int

    @property
    def rows(self) -> int:
        """Rows of a tile."""
        return 64 * self.groups

    @property
    def threads(self) -> int:
        """Threads of a block: the producer's warpgroup too."""
        return 128 * (self.groups + 1)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        stage = 2 * _WGMMA_DEPTH * (self.rows + self.columns)
        panels = 4 * self.groups * self.panels * _WGMMA_PANEL
        return self.stages * stage + panels + _WGMMA_BARRIERS


#: The largest accumulator: 1.5 times the products for a byte from L2 of 128 x 128.
DEEP = ProductTile(2, 256, 4, 2)
#: Four warpgroups: where products are short, twice the results are on their way out at a time.
SHALLOW = ProductTile(4, 128, 3, 2)
#: For few tiles.
SMALL = ProductTile(2, 128, 6, 2)
PRODUCT_TILES = (DEEP, SHALLOW, SMALL)
#: Most terms of a product that is bound by its results.
SHALLOW_TERMS = 512


class WideTile(NamedTuple):
    """The tile of `matmul_wide`, `WideProduct` in the kernel.

    Tiles of 16 rows, and columns, of a warp; warps down and across a block; stages under way;
    blocks that a multiprocessor should hold; how many times 8 columns a warp multiplies at a time.
    """

    row_tiles: int
    columns: int
    down: int
    across: int
    stages: int
    blocks: int
    at_once: int

    @property
    def rows(self) -> int:
        """Rows of a tile."""
        return 16 * self.row_tiles * self.down

    @property
    def all_columns(self) -> int:
        """Columns of a tile."""
        return self.columns * self.across

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.down * self.across

    def shared_bytes(self, dtype: np.dtype, k: int) -> int:
        """Dynamic shared memory of a block: 128 bytes of terms of each row and column, and sums."""
        operands = 128 * self.stages * (self.rows + self.all_columns)
        kept = dtype == np.float32 and k > WIDE_SUM_TERMS
        return operands + (4 * self.rows * self.all_columns if kept else 0)


#: Terms after which sums of float32 are added to others, as in the kernel.
WIDE_SUM_TERMS = 1024
#: Two blocks of 4 warps, of 64 x 32 results each: one computes while the other waits or stores.
WIDE_TILE = WideTile(4, 32, 2, 2, 3, 2, 2)


def product_tile(problem: MatmulProblem, limits: DeviceLimits) -> ProductTile:
    """Return the tile for the depth of a product, or the smallest one for few tiles."""
    m, k, n = problem.sizes
    tile = SHALLOW if k <= SHALLOW_TERMS else DEEP
    tiles = -(-m // tile.rows) * -(-n // tile.columns) * math.prod(problem.batch_shape)
    return tile if tiles >= limits.multiprocessors else SMALL


class _Kernel(NamedTuple):
    """How a product is computed: the kernel, its tile and its launch."""

    method: str
    name: KernelName
    rows: int
    columns: int
    threads: int
    shared_bytes: int


def _simt(dtype: np.dtype) -> _Kernel:
    rows, columns = (64, 64) if accumulator(dtype).itemsize == 8 else (128, 64)
    name = KernelName("fused/matmul_simt.cu", f"cuflash::matmul_simt<{C_TYPES[dtype.name]}>")
    return _Kernel("simt", name, rows, columns, 256, 0)


def _mma(dtype: np.dtype, terms_in_rows: bool) -> _Kernel:
    flag = str(terms_in_rows).lower()
    name = KernelName("fused/matmul_mma.cu", f"cuflash::matmul_mma<{C_TYPES[dtype.name]}, {flag}>")
    stages, depth = 4, 32
    return _Kernel("mma", name, 128, 128, 256, 2 * stages * depth * (128 + 128))


def _wgmma(dtype: np.dtype, terms_in_rows: bool, tile: ProductTile) -> _Kernel:
    shape = ", ".join([*map(str, tile), str(terms_in_rows).lower()])
    name = KernelName(
        "fused/matmul_wgmma.cu",
        f"cuflash::matmul_wgmma<{C_TYPES[dtype.name]}, cuflash::WgmmaProduct<{shape}>>",
    )
    return _Kernel("wgmma", name, tile.rows, tile.columns, tile.threads, tile.shared_bytes)


def _wide(dtype: np.dtype, terms_in_rows: bool, k: int) -> _Kernel:
    tile, name = WIDE_TILE, C_TYPES[dtype.name]
    shape = ", ".join([name, *map(str, tile), str(terms_in_rows).lower()])
    return _Kernel(
        "mma",
        KernelName(
            "fused/matmul_wide.cu",
            f"cuflash::matmul_wide<{name}, cuflash::WideProduct<{shape}>>",
        ),
        tile.rows,
        tile.all_columns,
        tile.threads,
        tile.shared_bytes(dtype, k),
    )


def matmul_kernels(dtype: np.dtype) -> Iterator[KernelName]:
    """Yield every kernel that a plan for operands of this dtype can launch."""
    yield _simt(dtype).name
    if dtype.itemsize > 2:
        yield from (_epilogue(dtype, packed) for packed in (False, True))
        yield from (_wide(dtype, terms_in_rows, 1).name for terms_in_rows in (False, True))
    if dtype.itemsize == 2:
        for terms_in_rows in (False, True):
            yield _mma(dtype, terms_in_rows).name
            for tile in PRODUCT_TILES:
                yield _wgmma(dtype, terms_in_rows, tile).name


EPILOGUE_PARAMETERS = ParameterBlock(
    "cuflash::EpilogueParameters",
    {
        "rows": np.int64,
        "columns": np.int64,
        **dict.fromkeys(("x", "bias"), np.uintp),
        "activation": np.int32,
    },
)
_EPILOGUE_THREADS, _EPILOGUE_BLOCKS = 256, 8
#: Terms from which on cuBLAS, with a second kernel's two trips over the results, is faster than
#: `matmul_simt`: half as fast in float32, and a fifth in float64, which cuBLAS computes on tensor
#: cores.
LIBRARY_TERMS = 64
#: The same of `matmul_wide`, measured on an H200: in float32 it is faster at any depth, in float64,
#: with four fifths of cuBLAS's rate, 0.96 of the pair's time at 512 terms and 1.04 at 768.
WIDE_LIBRARY_TERMS = {"float32": math.inf, "float64": 640}


def takes_library(problem: MatmulProblem, limits: DeviceLimits) -> bool:
    """Tell whether a product is left to cuBLAS, and its epilogue to a kernel of its own."""
    if problem.dtype.itemsize == 2:
        return False
    if problem.dtype == np.float32 and os.environ.get("CUPY_TF32", "0") != "0":
        return False  # CuPy would round the operands to TF32
    m, k, n = problem.sizes
    if tensor_cores(problem, limits):
        tiles = -(-m // WIDE_TILE.rows) * -(-n // WIDE_TILE.all_columns)
        # What leaves multiprocessors without a tile cuBLAS divides further: 0.6 of the time for
        # 64 tiles and 132 multiprocessors, 1.4 for 128.
        if 4 * tiles * math.prod(problem.batch_shape) >= 3 * limits.multiprocessors:
            return k >= WIDE_LIBRARY_TERMS[problem.dtype.name]
    return k >= LIBRARY_TERMS


def _epilogue(dtype: np.dtype, packed: bool) -> KernelName:
    expression = f"cuflash::epilogue<{C_TYPES[dtype.name]}, {str(packed).lower()}>"
    return KernelName("fused/epilogue.cu", expression)


def plan_epilogue(
    problem: MatmulProblem, x: int, bias: int, limits: DeviceLimits
) -> tuple[Launch, np.ndarray]:
    """Return the launch of the epilogue of a product in C order at `x`, and its parameters."""
    *outer, columns = problem.out_shape
    rows, itemsize = math.prod(outer), problem.dtype.itemsize
    packed = are_packed(columns, itemsize, (x, bias), ())
    block = EPILOGUE_PARAMETERS.zeros()
    fields = block[0]
    fields["rows"], fields["columns"], fields["x"], fields["bias"] = rows, columns, x, bias
    fields["activation"] = ACTIVATIONS.index(problem.activation)
    blocks = -(-rows * -(-columns // LANES) // _EPILOGUE_THREADS)
    grid = max(1, min(blocks, limits.multiprocessors * _EPILOGUE_BLOCKS))
    launch = Launch(_epilogue(problem.dtype, packed), grid, _EPILOGUE_THREADS)
    return launch, block.view(EPILOGUE_PARAMETERS.opaque)


def tensor_cores(problem: MatmulProblem, limits: DeviceLimits) -> bool:
    """Tell whether tensor cores compute a problem, if they can read its operands."""
    k = problem.a.shape[-1]
    if problem.dtype.itemsize == 2:
        capable = int(limits.compute_capability) >= 80
    elif problem.dtype == np.float32:
        capable = limits.compute_capability in TF32_CAPABILITIES
    else:
        capable = limits.compute_capability in DMMA_CAPABILITIES
    return capable and k > 0 and max(problem.sizes) < 2**31


def terms_in_rows(b: ArraySpec) -> bool:
    """Tell whether the terms of a product are neighbours in memory in b (K, N)."""
    return b.strides[-2] == b.dtype.itemsize and b.shape[-2] > 1


def transposed(spec: ArraySpec) -> ArraySpec:
    """Return the spec with its last two axes exchanged."""
    shape, strides = spec.shape, spec.strides
    return ArraySpec(
        (*shape[:-2], shape[-1], shape[-2]), (*strides[:-2], strides[-1], strides[-2]), spec.dtype
    )


def is_fetched(name: str, spec: ArraySpec) -> bool:
    """Tell whether rows of a, or rows or columns of b, can be copied by 16 bytes."""
    matrix = transposed(spec) if name == "b" and terms_in_rows(spec) else spec
    *_, rows, _ = matrix.shape
    return has_map(matrix) and (rows == 1 or matrix.strides[-2] > 0)  # no row for another


@dataclass(frozen=True, slots=True, eq=False)
class MatmulPlan:
    """The launches of one product; `launch` is None if there is nothing to write."""

    method: str
    launch: Launch | None
    batch: BatchPlan
    itemsize: int
    _block: np.ndarray
    _maps: Maps | None

    def launches(self, pointers: Sequence[int]) -> Iterator[tuple[Launch, np.ndarray]]:
        """Yield the kernel and its parameter blocks, for addresses of a, b, out and bias."""
        if self.launch is None:
            return
        for places in self.batch.places(pointers, (self.itemsize,) * len(pointers)):
            if self._maps is None:
                yield self.launch, _SLOTS.fill(self._block, places)
            else:
                block = _MAPPED_SLOTS.fill(self._block, places)
                yield self.launch, self._maps.fill(block, places)


@lru_cache(maxsize=4096)
def plan_matmul(
    problem: MatmulProblem, out: ArraySpec, aligned: bool, limits: DeviceLimits
) -> MatmulPlan:
    """Plan one product.

    Parameters
    ----------
    problem : MatmulProblem
        With 16-bit tensor cores, rows of its a, and rows or columns of its b, are fetched by 16
        bytes.
    out : ArraySpec
        The array to fill.
    aligned : bool
        It starts at a multiple of 16 bytes.
    limits : DeviceLimits
        The device.
    """
    problem, out = _with_joined_rows(problem, out)
    problem = replace(problem, a=_unstepped(problem.a), b=_unstepped(problem.b))
    in_rows = terms_in_rows(problem.b)
    m, k, n = problem.sizes
    specs = (problem.a, problem.b, out, None)
    mapped = False
    if tensor_cores(problem, limits):
        narrow = problem.dtype.itemsize == 2
        mapped = narrow and limits.compute_capability == "90" and aligned and has_map(out)
        whole = BatchPlan.of(problem.batch_shape, specs, limits.blocks)
        mapped = mapped and len(whole.sizes) <= AXES - 2 and not whole.outer_sizes
        kernel = _mma(problem.dtype, in_rows) if narrow else _wide(problem.dtype, in_rows, k)
        if mapped:
            tile = product_tile(problem, limits)
            kernel = _wgmma(problem.dtype, in_rows, tile)
    else:
        kernel = _simt(problem.dtype)
    row_tiles, column_tiles = -(-m // kernel.rows), -(-n // kernel.columns)
    tiles_per_entry = max(1, row_tiles * column_tiles)
    batch = BatchPlan.of(problem.batch_shape, specs, max(1, limits.blocks // tiles_per_entry))
    mapped = mapped and not batch.outer_sizes
    tiles = tiles_per_entry * batch.entries

    block = (MATMUL_MAPS if mapped else MATMUL_PARAMETERS).zeros()
    fields = block[0]["matmul"] if mapped else block[0]
    batch.write(fields["batch"])
    for name, spec, strides in zip(("a", "b", "out"), specs[:3], batch.strides[:3], strict=True):
        write_array(fields[name], spec, strides, 2)
    fields["rows"], fields["depth"], fields["columns"] = m, k, n
    fields["row_tiles"], fields["column_tiles"] = row_tiles, column_tiles
    fields["activation"] = ACTIVATIONS.index(problem.activation)
    maps = None
    if mapped:
        block[0]["tiles"] = tiles
        maps = _maps(problem, out, batch, in_rows, kernel)
    empty = not math.prod(out.shape)
    return MatmulPlan(
        kernel.method,
        None
        if empty
        else Launch(
            kernel.name,
            grid=min(tiles, limits.multiprocessors) if mapped else tiles,
            block=kernel.threads,
            shared_bytes=kernel.shared_bytes,
        ),
        batch,
        problem.dtype.itemsize,
        as_words(block),
        maps,
    )


def _maps(
    problem: MatmulProblem, out: ArraySpec, batch: BatchPlan, in_rows: bool, kernel: _Kernel
) -> Maps:
    b = transposed(problem.b) if in_rows else problem.b
    boxes = (kernel.rows, kernel.columns if in_rows else _WGMMA_DEPTH, _WGMMA_OUT_ROWS)
    tensors = []
    for place, (spec, box_rows) in enumerate(zip((problem.a, b, out), boxes, strict=True)):
        itemsize = spec.dtype.itemsize
        axes = [
            (size, stride * itemsize)
            for size, stride in zip(batch.sizes, batch.strides[place], strict=True)
        ]
        rows, inner = spec.shape[-2:]
        step = spec.strides[-2] if rows > 1 else ALIGNMENT
        tensors.append(TensorMap.of(spec.dtype, inner, rows, step, axes, box_rows))
    return Maps(tuple(tensors), (0, 1, 2))


def _unstepped(spec: ArraySpec) -> ArraySpec:
    """Return the spec with stride 0 where an axis has size 1.

    What lies beyond is not read, but its address must be one that could be.
    """
    strides = (
        0 if size == 1 else stride for size, stride in zip(spec.shape, spec.strides, strict=True)
    )
    return spec._replace(strides=tuple(strides))


def _with_joined_rows(problem: MatmulProblem, out: ArraySpec) -> tuple[MatmulProblem, ArraySpec]:
    """Join batch axes along which b is one matrix with the rows of a, where these lie on end.

    One matrix of many rows has fewer tiles that are parts than many of few.
    """
    a, b = problem.a, problem.b

    def joins(spec: ArraySpec) -> bool:
        return spec.strides[-3] == spec.shape[-2] * spec.strides[-2]

    def joined(spec: ArraySpec) -> ArraySpec:
        shape, strides = spec.shape, spec.strides
        return ArraySpec(
            (*shape[:-3], shape[-3] * shape[-2], shape[-1]),
            (*strides[:-3], *strides[-2:]),
            spec.dtype,
        )

    while len(a.shape) > 2 and b.strides[-3] == 0 and joins(a) and joins(out):
        a, out = joined(a), joined(out)
        b = ArraySpec((*b.shape[:-3], *b.shape[-2:]), (*b.strides[:-3], *b.strides[-2:]), b.dtype)
    return MatmulProblem(a.shape[:-2], a, b, problem.bias, problem.activation), out
