"""Plans of the softmax family: made without a GPU, from numbers."""

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuflash.device.plans import plan_softmax, softmax_kernels
from cuflash.device.softmax_regimes import (
    COLUMN_TILES,
    PART_BYTES,
    SHORT_LENGTHS,
    STAGE_BYTES,
    STREAM_SHAPES,
    STRIP_SHAPES,
    UNSTREAMED_BYTES,
    UNSTRIPPED_COLUMNS,
    ColumnTile,
    softmax_regimes,
)
from cuflash.device.softmax_rows import SOFTMAX_PARAMETERS, divisor, rows_of
from cuflash.problem import FLOATS, ArraySpec, SoftmaxProblem, accumulator
from cuflash.testing.strategies import softmax_problems
from tests.devices import H200, T4

METHODS = ["auto", "naive", "fused", "online", "cluster"]
NAMES = ["softmax", "log_softmax", "logsumexp", "softmax_state"]


def plan(x, axis=-1, where=None, *, operation="softmax", method="auto", limits=H200, aligned=True):
    problem = SoftmaxProblem.of(operation, {"x": x}, axis, where, method)
    spec = ArraySpec.of(np.empty(problem.out_shape, problem.out_dtype))
    outputs = (spec,) * (2 if operation == "softmax_state" else 1)
    return plan_softmax(problem, outputs, aligned, limits)


def parameters(made):
    """Return the parameter block of a plan."""
    block = made.parameters([0] * len(made.pointers), 0)
    return block.view(SOFTMAX_PARAMETERS.dtype)[0]


def row(length, dtype=np.float32):
    """Return something with the shape of (4, length), without its memory."""
    return np.broadcast_to(np.zeros((), dtype), (4, length))


def matrix(rows, length, dtype):
    """Return something with the shape and strides of a C-order matrix, without its memory."""
    x, item = np.zeros((), dtype), np.dtype(dtype).itemsize
    shape, strides = (rows, length), (length * item, item)
    return np.lib.stride_tricks.as_strided(x, shape, strides, writeable=False)


@given(size=st.integers(1, 2**31 - 1), data=st.data())
def test_division_by_multiplication(size, data):
    _, multiplier, shift = divisor(size)
    near = st.integers(0, (2**31 - 1) // size).map(lambda q: q * size)
    n = data.draw(near.flatmap(lambda n: st.sampled_from([max(n - 1, 0), n])))
    assert 0 <= multiplier < 2**32
    assert ((n * multiplier >> 32) + n) >> shift == n // size
    assert (n * multiplier >> 32) + n < 2**32


@given(
    case=softmax_problems(max_row=70_000, max_elements=200_000, borders=(256, 4096, 32768)),
    operation=st.sampled_from(NAMES),
    method=st.sampled_from(METHODS),
    limits=st.sampled_from([H200, T4, replace(H200, blocks=19)]),
    aligned=st.booleans(),
)
def test_every_plan_fits_the_device(case, operation, method, limits, aligned):
    x, options = case.build()
    x = x if x.dtype.isnative else x.astype(x.dtype.newbyteorder("="))
    length = np.prod([x.shape[a] for a in case.axes]) * x.dtype.itemsize
    if method == "cluster" and limits.cluster_blocks == 1:
        with pytest.raises(ValueError, match="'cluster' cannot run"):
            plan(x, **options, operation=operation, method=method, limits=limits)
        return
    if method == "fused" and length > limits.shared_per_block - 512:
        with pytest.raises(ValueError, match="'auto', 'naive', 'online'"):
            plan(x, **options, operation=operation, method=method, limits=limits)
        return
    made = plan(x, **options, operation=operation, method=method, limits=limits, aligned=aligned)
    known = set(softmax_kernels(x.dtype))
    for launch in made.launches:
        assert launch.kernel in known
        assert 1 <= launch.grid <= limits.blocks
        assert launch.block % 32 == 0
        assert 32 <= launch.block <= 512
        assert launch.shared_bytes <= limits.shared_per_block
    steps = STEPS["split" if made.method == "online" and made.workspaces else made.method]
    assert len(made.launches) == (0 if 0 in made_shape(x, case, operation) else len(steps))


STEPS = {
    "naive": ["max", "sum", "divide"],
    "fused": ["fused"],
    "online": ["online"],
    "split": ["states", "normalise"],
    "cluster": ["cluster"],
}


def made_shape(x, case, operation):
    reduces = operation in ("logsumexp", "softmax_state")
    return [n for a, n in enumerate(x.shape) if not (reduces and a in case.axes)]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("length", [1, 3, 16, 63, 1000, 4096, 20_000, 50_000])
def test_the_order_of_a_sum_does_not_depend_on_strides(dtype, length):
    x = np.zeros((4, length), dtype)
    views = [
        (x, -1),
        (x.T, 0),
        (np.asfortranarray(x), 1),
        (x[:, ::-1], 1),
        (np.broadcast_to(x[:1], x.shape), 1),
        (np.zeros((4, 2 * length), dtype)[:, ::2], 1),
    ]
    for method in METHODS[1:] if length * dtype.itemsize < 200_000 else ["naive", "online"]:
        made = [plan(view, axis, method=method) for view, axis in views]
        made.append(plan(x, where=np.ones(length, bool), method=method))
        made.append(plan(x, method=method, aligned=False))
        assert len({parameters(p)["log2_lanes"] for p in made}) == 1


def test_neighbouring_threads_read_neighbouring_elements():
    x = np.zeros((512, 512), np.float32)
    assert not parameters(plan(x, 1))["across"]
    assert parameters(plan(x, 0))["across"]
    assert parameters(plan(x.T, 1))["across"]
    assert not parameters(plan(x.T, 0))["across"]


def test_auto_follows_the_regimes():
    for limits, dtype, methods in (
        (H200, np.float32, ["fused", "cluster", "online"]),
        (H200, np.float64, ["fused", "cluster", "online"]),
        (T4, np.float32, ["fused", "online"]),
    ):
        regimes = softmax_regimes(limits)
        assert [regime.method for regime in regimes] == methods
        for regime, after in pairwise(regimes):
            longest = int(regime.row_bytes) // np.dtype(dtype).itemsize
            assert plan(row(longest, dtype), limits=limits).method == regime.method
            assert plan(row(longest + 4, dtype), limits=limits).method == after.method
            made = plan(row(longest, dtype), limits=limits, method=regime.method)
            assert made.method == regime.method
            beside = np.empty((longest, 4), dtype)
            assert plan(beside, 0, limits=limits).method != "cluster"


def test_rows_side_by_side_are_read_in_bundles_where_no_method_is_asked_for():
    def kernel(x, **options):
        return plan(x, 0, **options).launches[0].kernel.source

    x = np.zeros((100, 48), np.float32)
    assert kernel(x) == kernel(x[::2]) == "softmax/columns.cu"
    for other in (x[:, :47], x[:, 1:-3], x[:, ::2], x[:, ::-1], x.astype(np.int8)):
        aligned = other is not x[:, 1:-3]
        assert kernel(other.astype(np.float32) if aligned else other, aligned=False) != kernel(x)
    assert kernel(x, method="fused") == "softmax/fused.cu"
    assert kernel(x, where=np.ones((100, 1), bool)) == "softmax/fused.cu"


class Unreadable(np.ndarray):
    """An array whose elements are not to be touched, by a failing test's report neither."""

    def __repr__(self):
        return f"<{self.dtype} {self.shape}, strides {self.strides}>"


def side_by_side(length, rows, dtype):
    """Return what stands for a C-order matrix."""
    memory, strides = np.empty(1, dtype).view(Unreadable), (rows * dtype.itemsize, dtype.itemsize)
    return np.lib.stride_tricks.as_strided(memory, (length, rows), strides, subok=True)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("limits", [H200, T4], ids=["h200", "t4"])
@pytest.mark.parametrize("operation", ["softmax", "softmax_vjp"])
def test_every_tile_of_columns_takes_the_rows_that_it_holds(dtype, limits, operation):
    pairs = operation == "softmax_vjp"
    longest = 1  # an axis of one column is none
    for tile in COLUMN_TILES[dtype.itemsize, pairs]:
        shortest = longest + 1
        if tile.columns(limits) < shortest:  # without clusters
            continue
        if not tile.held and not pairs:  # shorter ones of so many rows may be strips
            shortest = max(shortest, STRIP_SHAPES[dtype.itemsize][-1].columns + 1)
        longest = tile.columns(limits) if tile.held else 4 * shortest
        for length in (shortest, longest):
            rows = tile.rows * tile.width * limits.multiprocessors
            x = side_by_side(length, rows, dtype)
            inputs = {"dy": x, "y": x} if pairs else {"x": x}
            problem = SoftmaxProblem.of(operation, inputs, 0)
            made = plan_softmax(problem, (ArraySpec.of(x),), True, limits)
            (launch,) = made.launches
            *_, held, blocks = launch.kernel.expression[:-1].split(", ")
            assert launch.kernel.source == "softmax/columns.cu"
            assert launch.kernel in set(softmax_kernels(dtype))
            assert int(held) == tile.held
            lanes = launch.block // tile.width * int(blocks)
            assert not tile.held or length <= lanes * tile.held
            assert 64 <= launch.block <= 512
            assert launch.grid == limits.multiprocessors * int(blocks)
            assert tile.held or blocks == "1"
            assert int(blocks) <= limits.cluster_blocks


def test_a_method_that_cannot_run_is_refused_and_those_that_can_are_named():
    with pytest.raises(ValueError, match=r"'cluster' .*: 'auto', 'naive', 'fused', 'online'"):
        plan(row(8), method="cluster", limits=T4)
    with pytest.raises(ValueError, match=r"'fused' .*: 'auto', 'naive', 'online', 'cluster'"):
        plan(row(100_000), method="fused")
    with pytest.raises(ValueError, match=r"'cluster' .*: 'auto', 'naive', 'online'"):
        plan(row(2**20), method="cluster")


def test_only_the_naive_method_and_rows_in_parts_need_a_workspace():
    needed = {method: plan(row(10), method=method).workspace_bytes for method in METHODS}
    assert needed == {"auto": 0, "naive": 4 * 2 * 4, "fused": 0, "online": 0, "cluster": 0}
    made = plan(row(2**22))
    assert made.workspace_bytes == 4 * 33 * 2 * 4  # rows, parts, pairs of float32
    assert made.launches[1].grid == 4 * 33


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("limits", [H200, T4], ids=["h200", "t4"])
def test_one_row_fills_the_device_and_many_are_not_split(dtype, limits):
    def launches(rows, length, **options):
        x = np.broadcast_to(np.zeros((), dtype), (rows, length))
        made = plan(x, limits=limits, **options)
        return [(launch.kernel.source, launch.grid) for launch in made.launches]

    long = [("softmax/split.cu", limits.multiprocessors)] * 2
    assert launches(1, 2**28) == long
    assert launches(1, 2**28, aligned=False) == long
    assert launches(limits.multiprocessors, 2**22) == [
        ("softmax/online.cu", limits.multiprocessors)
    ]
    part = PART_BYTES // dtype.itemsize
    assert launches(1, 2 * part, method="online")[0] == ("softmax/split.cu", 2)
    assert launches(1, 2 * part - 16, method="online") == [("softmax/online.cu", 1)]
    # The two launches agree on the parts, and every block has one.
    made = plan(np.broadcast_to(np.zeros((), dtype), (3, 2**28)), limits=limits)
    assert parameters(made)["parts"] == limits.multiprocessors // 3
    assert made.launches[0].grid == 3 * (limits.multiprocessors // 3)
    few = plan(np.broadcast_to(np.zeros((), dtype), (3, 2**28)), limits=replace(limits, blocks=7))
    assert {launch.grid for launch in few.launches} == {6}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_block_of_one_row_prefetches_the_row_that_takes_its_place(dtype):
    for chunks in (3, 8, 127, 256, 512, 1024, 2048, 4096, 8192, 8193, 2**15, 2**17):
        x = np.empty((4, chunks * 16 // dtype.itemsize), dtype)
        made = plan(x)
        (launch,) = made.launches
        ahead, blocks = parameters(made)["ahead"], parameters(made)["parts"]
        if launch.block == 64:
            assert ahead == 0  # small blocks, of several rows or with others enough beside them
            continue
        # As many as there can be at a time: by threads, and by 48 registers each.
        most = min(2048 // launch.block, 65536 // (48 * launch.block)) * 132 // blocks
        assert 132 // blocks <= ahead <= most
        assert parameters(plan(x, limits=T4))["ahead"] == 0


def test_equal_problems_share_one_plan():
    assert plan(row(10)) is plan(row(10))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"multiprocessors": 0}, "multiprocessors must be positive, got 0"),
        ({"shared_per_block": 10**6}, "shared_per_block must lie in"),
    ],
)
def test_limits_that_no_device_has(change, message):
    with pytest.raises(ValueError, match=message):
        replace(H200, **change)


@pytest.mark.parametrize(
    ("operation", "shapes"),
    [
        ("softmax_vjp", {"dy": (2**27,), "y": (2**27,)}),
        ("log_softmax_vjp", {"dy": (2**27,), "y": (2**27,)}),
        ("logsumexp_vjp", {"dlse": (1,), "x": (2**27,), "lse": (1,)}),
    ],
)
@pytest.mark.parametrize("limits", [H200, T4], ids=["h200", "t4"])
def test_gradients_of_one_long_row_fill_the_device(operation, shapes, limits):
    inputs = {name: np.empty((1, *shape), np.float32) for name, shape in shapes.items()}
    problem = SoftmaxProblem.of(operation, inputs, -1)
    out = (ArraySpec.of(np.empty((1, 2**27), np.float32)),)
    made = plan_softmax(problem, out, True, limits)
    assert [launch.grid for launch in made.launches] == [limits.multiprocessors] * (
        1 if operation == "logsumexp_vjp" else 2
    )
    assert {launch.kernel for launch in made.launches} <= set(softmax_kernels(np.dtype("f4")))
    assert made.workspace_bytes == 8 * limits.multiprocessors * (len(made.launches) - 1)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_tiles_are_narrower_where_they_would_be_few(dtype):
    for length in (2, 100, 500):
        held = [t for t in COLUMN_TILES[dtype.itemsize, False] if length <= t.columns(H200)][:-1]
        enough = held[0].rows * held[0].width * H200.multiprocessors
        for rows, tile in ((enough, held[0]), (enough - 8, held[-1])):
            (launch,) = plan(side_by_side(length, rows, dtype), 0).launches
            assert launch.grid == -(-rows // (tile.rows * tile.width))
            assert f", {tile.rows}, {tile.width}, {tile.held}, 1>" in launch.kernel.expression


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_tiles_that_are_read_twice_are_shared_where_they_are_few(dtype):
    tile = COLUMN_TILES[dtype.itemsize, False][-1]
    for tiles, blocks in ((1, 8), (131, 8), (132, 1)):
        (launch,) = plan(matrix(20_000, tiles * tile.rows * tile.width, dtype), 0).launches
        assert launch.grid == tiles * blocks
        assert launch.kernel.expression.endswith(f", 0, {blocks}>")


def resident(launch):
    """Return how many blocks a multiprocessor has shared memory, and 64 K registers, for."""
    assert launch.block in (256, 512)
    return 233472 // (launch.shared_bytes + 2048)


def strips(x, *, operation="softmax", limits=H200, **options):
    """Return the blocks of the clusters that stream strips, 0 if others take the rows."""
    method = options.pop("method", "auto")
    problem = SoftmaxProblem.of(operation, {"x": x}, -2, method=method, **options)
    out = SimpleNamespace(shape=problem.out_shape, dtype=problem.out_dtype)
    made = plan_softmax(problem, (ArraySpec.of(out),), True, limits)
    launch = made.launches[-1]
    if launch.kernel.source != "softmax/strips.cu":
        return 0
    assert {each.kernel for each in made.launches} <= set(softmax_kernels(x.dtype))
    assert made.launches[0].clears == SOFTMAX_PARAMETERS.layout()["states"] == made.workspaces[0]
    rows, held, warps, blocks = map(int, launch.kernel.expression.rstrip(">").split(", ")[2:])
    assert (launch.staying, launch.block, made.workspace) == (blocks, 32 * warps, 16)
    assert launch.grid == limits.multiprocessors * resident(launch) // blocks * blocks
    assert x.shape[-2] <= held * warps * blocks
    state = 2 * accumulator(x.dtype).itemsize
    exchange = -(-(32 + 2 * blocks * 32 * rows * state) // 128) * 128
    states = -(-(warps * (32 * rows + 1) + 32 * rows) * state // 128) * 128
    ring = warps * parameters(made)["stages"] * (STAGE_BYTES + 8)
    assert exchange + states + ring == launch.shared_bytes <= limits.shared_per_block - 1024
    return blocks


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_many_long_rows_side_by_side_are_strips(dtype):
    """At the borders of each shape; few rows, views, masks and gradients are not."""
    columns, few = UNSTRIPPED_COLUMNS, 16 // dtype.itemsize
    for shape in STRIP_SHAPES[dtype.itemsize]:
        enough = 8 * H200.multiprocessors * shape.resident * 32 * shape.rows // shape.blocks
        for length in (columns + 1, shape.columns):
            assert strips(side_by_side(length, enough, dtype)) == shape.blocks
            assert not strips(side_by_side(length, enough - few, dtype))
            more = side_by_side(length, enough + few, dtype)
            assert strips(more, operation="log_softmax") == shape.blocks
            assert not strips(side_by_side(length, enough + few - 1, dtype))
        columns = shape.columns
    assert not strips(side_by_side(UNSTRIPPED_COLUMNS, 2**20, dtype))
    assert not strips(side_by_side(columns + 1, 2**20, dtype))
    x = side_by_side(columns, 2**18, dtype)
    assert strips(x)
    small = ({"shared_per_block": 99 << 10}, {"cluster_blocks": 4}, {"multiprocessors": 7})
    for limits in (T4, *(replace(H200, **limit) for limit in small)):
        assert not strips(x, limits=limits)
    for other in ({"method": "online"}, {"where": np.ones(1, bool)}, {"operation": "logsumexp"}):
        assert not strips(x, **other)


def streams(x, *, operation="softmax", limits=H200, **options):
    """Return the blocks of the clusters that stream rows, 0 if others take them."""
    names = ("dy", "y") if "vjp" in operation else ("x",)
    method = options.pop("method", "auto")
    problem = SoftmaxProblem.of(operation, dict.fromkeys(names, x), -1, method=method, **options)
    made = plan_softmax(problem, (ArraySpec.of(x),), True, limits)
    *begin, launch = made.launches
    if launch.kernel.source != "softmax/stream.cu":
        assert not launch.staying
        return 0
    assert {each.kernel for each in made.launches} <= set(softmax_kernels(x.dtype))
    blocks, fields = launch.staying, parameters(made)
    method = "cluster" if blocks > 1 else "fused"
    assert (made.method, made.workspaces, made.workspace) == (
        method,
        (SOFTMAX_PARAMETERS.layout()["states"],),
        16,
    )
    assert [each.kernel.expression for each in begin] == ["cuflash::begin_dealing"]
    assert [each.clears for each in made.launches] == [made.workspaces[0], 0]
    held, warps, last = map(int, launch.kernel.expression.rstrip(">").split(", ")[2:])
    assert (last, 32 * warps, fields["parts"]) == (blocks, launch.block, blocks)
    assert launch.grid == limits.multiprocessors * resident(launch) // blocks * blocks
    # The ring takes a warp's chunks but for those that its lanes hold, and one stage to come.
    part = -(-x.shape[-1] * x.dtype.itemsize // (blocks * warps))
    kept = max(0, -(-(part - 512 * held) // STAGE_BYTES))
    assert kept < fields["stages"] if len(names) == 1 else kept == 0
    item = accumulator(x.dtype).itemsize
    exchange = -(-(32 + 2 * blocks * warps * 2 * item) // 128) * 128
    stages = warps * fields["stages"] * (STAGE_BYTES + 8)
    assert exchange + stages == launch.shared_bytes <= limits.shared_per_block - 1024
    return blocks


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("operation", ["softmax", "log_softmax", "softmax_vjp", "log_softmax_vjp"])
def test_many_long_rows_are_streamed(dtype, operation):
    """At the borders of each shape, in chunks; views, masks and methods are others' to take."""

    def of(length, rows=2000, **options):
        return streams(matrix(rows, length, dtype), operation=operation, **options)

    pairs = "vjp" in operation
    chunk = 16 // dtype.itemsize
    longest = UNSTREAMED_BYTES[dtype.itemsize, pairs] // dtype.itemsize
    assert not of(longest)
    for shape in STREAM_SHAPES[dtype.itemsize, pairs]:
        first, longest = longest, shape.row_bytes // dtype.itemsize
        for length in (first + chunk, longest - chunk, longest):
            assert of(length) == shape.blocks
        assert not of(longest - 1)
        enough = -(-8 * H200.multiprocessors * shape.resident // shape.blocks)
        assert of(longest, enough) == shape.blocks
        assert not of(longest, enough - 1)
    assert shape.blocks == 16
    assert not of(longest + chunk)
    for limits in (T4, replace(H200, shared_per_block=99 << 10), replace(H200, cluster_blocks=8)):
        assert not of(longest, limits=limits)
    if not pairs:
        for other in ({"method": "cluster"}, {"method": "online"}, {"where": np.ones(1, bool)}):
            assert not of(longest // 2, **other)


def test_streamed_rows_have_one_stride():
    x = np.zeros((), np.float32)
    shape, strides = (2, 1000, 2**16), (2**30, 2**19, 4)
    x = np.lib.stride_tricks.as_strided(x, shape, strides, writeable=False)
    assert [streams(rows) for rows in (x, *x)] == [0, 2, 2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"warps": 12}, "no such kernel"),
        ({"held": 3}, "no such kernel"),
        ({"blocks": 3}, "blocks must be 1 or one of"),
        ({"row_bytes": 1 << 23}, "no room"),
    ],
)
def test_shapes_validate_themselves(change, message):
    with pytest.raises(ValueError, match=message):
        replace(STREAM_SHAPES[4, False][-1], **change)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_short_rows_are_a_thread_each(dtype):
    for length in range(1, 10):
        x = np.zeros((1000, length), dtype)
        taken = length in SHORT_LENGTHS[dtype.itemsize]
        for operation in NAMES:
            (launch,) = plan(x, operation=operation).launches
            assert (launch.kernel.source == "softmax/short.cu") == taken
        if not taken:
            continue
        chunks = length // np.gcd(length, 16 // dtype.itemsize)
        together = max(4 // chunks, 1) * chunks * 16  # bytes of a thread
        rows = 256 * together // (length * dtype.itemsize)
        for count, grid in ((rows, 1), (rows + 1, 2), (7 * rows, 7)):
            (launch,) = plan(np.zeros((count, length), dtype)).launches
            assert (launch.grid, launch.block, launch.shared_bytes) == (grid, 256, 0)
        for other, options in (
            (x, {"aligned": False}),
            (x, {"where": np.ones(length, bool)}),
            (x, {"method": "online"}),
            (x[::2], {}),
            (np.zeros((1000, 2 * length), dtype)[:, ::2], {}),
        ):
            assert plan(other, **options).launches[0].kernel.source != "softmax/short.cu"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda made: {"pointers": (0, 4)}, "have no room"),
        (lambda made: {"pointers": (len(made.block) - 4,)}, "have no room"),
        (lambda made: {"workspaces": made.pointers}, "have no room"),
        (lambda made: {"workspace": 8, "workspaces": ()}, "nothing points to a workspace of 8"),
        (lambda made: {"launches": (made.launches[0]._replace(grid=0),)}, "a grid of 0 blocks"),
        (lambda made: {"launches": (made.launches[0]._replace(block=1024),)}, "of 1024 threads"),
    ],
)
def test_a_plan_that_no_device_can_run_is_refused(change, message):
    made = plan(row(10), method="fused")
    with pytest.raises(ValueError, match=message):
        replace(made, **change(made))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": 3}, "rows must be a power of two, got 3"),
        ({"width": 0}, "width must be a power of two, got 0"),
        ({"lanes": 64}, "16 x 64 threads; a block has 32 to 512"),
        ({"lanes": 1}, "16 x 1 threads"),
        ({"held": -1}, "held = -1"),
        ({"blocks": 32}, "blocks = 32"),
    ],
)
def test_a_tile_of_columns_that_cannot_run_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(ColumnTile(2, 16, 0, 32), **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: {"roles": rows.roles[1:]}, "are not the axes of 1 roles and 2 operands"),
        (lambda rows: {"specs": rows.specs[1:]}, "are not the axes of 2 roles and 1 operands"),
        (lambda rows: {"kept": rows.kept._replace(sizes=(1, 2, 3))}, "kept: .* are not the axes"),
        (lambda rows: {"full": (("input", 2),)}, "full: .* are not among the roles"),
    ],
)
def test_rows_of_other_operands_are_refused(change, message):
    x = row(10)
    rows = rows_of(SoftmaxProblem.of("softmax", {"x": x}, -1, None, "auto"), (ArraySpec.of(x),))
    with pytest.raises(ValueError, match=message):
        replace(rows, **change(rows))
