"""Which gradients the Hopper family takes, and what it launches: needs no GPU."""

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("cupy", reason="plans live beside CuPy's launches")

from cuflash.device.attention_vjp_plans import (
    attention_vjp_methods,
    attention_vjp_obstacles,
    plan_attention_vjp,
    vjp_workspace_bytes,
)
from cuflash.device.attention_vjp_plans_wgmma import (
    BACKWARD_WGMMA_PARAMETERS,
    BACKWARD_WGMMA_TILES,
)
from cuflash.device.attention_vjp_stages import OPERANDS
from cuflash.problem import ArraySpec, AttentionArrays, AttentionProblem
from cuflash.problem_vjp import AttentionGrads, AttentionResults, AttentionVjpProblem
from tests.device.test_attention_wgmma_plans import STATIC_LIMIT, spec
from tests.devices import H200

SINGLE = np.dtype(np.float32)


def problem_of(q, k=None, v=None, *, causal=False, dout=None, grads=None, method="auto", **more):
    deterministic = more.pop("deterministic", False)
    k = k or q
    arrays = AttentionArrays(q, k, v or k, **more)
    forward = AttentionProblem.of(
        arrays, scale=more.get("scale"), causal=causal, window=None, softcap=None,
        num_splits=None, method="auto",
    )  # fmt: skip
    out = spec(*forward.out_shape, dtype=forward.dtype)
    return AttentionVjpProblem.of(
        forward,
        arrays,
        AttentionResults(dout or out, out, spec(*forward.lse_shape, dtype=SINGLE)),
        AttentionGrads(q, k, v or k) if grads is None else grads,
        deterministic=deterministic,
        method=method,
    )


def obstacle(*args, limits=H200, **options):
    return attention_vjp_obstacles(problem_of(*args, **options), limits)["wgmma"]


def test_what_it_takes():
    assert obstacle(spec(2, 3, 64, 128)) is None
    assert obstacle(spec(1, 8), spec(1, 8)) is None
    assert obstacle(spec(2, 4, 100, 64, order=(0, 2, 1, 3))) is None
    assert obstacle(spec(64, 128), spec(64, 128), spec(64, 40)) is None
    assert obstacle(spec(2, 4, 4, 100, 64), spec(2, 4, 1, 100, 64)) is None
    assert obstacle(spec(2, 100, 64), deterministic=True) is None


def test_what_it_leaves_to_others():
    q = spec(2, 100, 64)
    assert "9.0" in obstacle(q, limits=replace(H200, compute_capability="100"))
    assert "queries and keys" in obstacle(spec(2, 0, 64), spec(2, 5, 64))
    assert "128 features" in obstacle(spec(2, 100, 136))
    assert "float16" in obstacle(spec(2, 100, 64, dtype=SINGLE))
    mask = ArraySpec((100, 100), (100, 1), np.dtype(bool))
    assert "change scores" in obstacle(q, mask=mask)
    assert "dout of q's dtype" in obstacle(q, dout=spec(2, 100, 64, dtype=SINGLE))
    assert "fetch q" in obstacle(spec(2, 100, 60))
    assert "fetch dout" in obstacle(q, dout=spec(2, 100, 64, order=(0, 2, 1)))
    assert "queries of their own" in obstacle(spec(1, 100, 64), spec(3, 100, 64))
    assert "along the same axes" in obstacle(
        spec(2, 3, 100, 64), spec(2, 1, 100, 64), spec(1, 3, 100, 64)
    )
    lengths = ArraySpec((2, 3), (12, 4), np.dtype(np.int32))
    grouped = (spec(2, 3, 100, 64), spec(2, 1, 100, 64))
    assert "same key_lengths" in obstacle(*grouped, key_lengths=lengths)
    scattered = spec(2, 3, 2, 3, 100, 64, order=(3, 2, 1, 0, 4, 5))
    assert "three batch axes" in obstacle(scattered)


def test_what_is_asked_for_decides_nothing():
    """So that each gradient has the same bits alone."""
    q, k = spec(2, 4, 100, 64), spec(2, 1, 100, 64)
    for name in ("dq", "dk", "dv"):
        grads = AttentionGrads(**{name: q if name == "dq" else k})
        problem = problem_of(q, k, grads=grads)
        assert attention_vjp_methods(problem, H200)[0] == "wgmma"
        (stage,) = plan_attention_vjp(problem, H200).stages
        assert stage.gradients == (name,)


@pytest.mark.parametrize("choice", BACKWARD_WGMMA_TILES, ids=lambda choice: str(choice.width))
def test_tiles_fit_a_block(choice):
    assert choice.tile.shared_bytes <= STATIC_LIMIT
    assert choice.tile.threads <= 1024
    # What warpgroups ask for, of what a block starts with.
    keys, queries = {2: (216, 72), 3: (144, 80)}[choice.tile.groups]
    start = 65536 // choice.tile.threads // 8 * 8
    assert queries + choice.tile.groups * keys <= (choice.tile.groups + 1) * start


def test_parameters_are_whole_and_small():
    layout = BACKWARD_WGMMA_PARAMETERS.layout()
    assert BACKWARD_WGMMA_PARAMETERS.dtype.itemsize % 64 == 0
    assert BACKWARD_WGMMA_PARAMETERS.dtype.itemsize <= 4096
    assert layout["vjp.batch.size"] == 4 * 128


def blocks(problem, workspace=1 << 20):
    """Return what a call launches, and the parameter blocks, with maps left out."""
    plan = plan_attention_vjp(problem, H200)
    pointers = [4096 * (i + 1) for i in range(OPERANDS.index("delta"))]
    found = []
    for stage in plan.stages:
        assert stage.maps_read(pointers)
        stage = stage._replace(maps=stage.maps._replace(tensors=(), places=()))
        delta = [workspace] + [0] * (len(OPERANDS) - len(pointers) - 1)
        for launch, block in stage.launches([*pointers, *delta], plan.itemsizes, [0, 0, 0]):
            found.append((launch, block.view(BACKWARD_WGMMA_PARAMETERS.dtype)[0]))
    return plan, found


def test_grouped_heads_are_one_block_of_keys():
    q, k = spec(2, 4, 4, 1000, 64), spec(2, 4, 1, 1000, 64)
    plan, launches = blocks(problem_of(q, k, causal=True))
    names = [launch.kernel.expression.split("<")[0][9:] for launch, _ in launches]
    assert names == ["backward_wgmma_rows", "backward_wgmma", "backward_wgmma_queries"]
    assert [launch.grid for launch, _ in launches] == [16 * 2 * 16, 6 * 8, 16 * 2 * 16]
    block = launches[0][1]
    assert block["vjp"]["summed"] == 4
    assert (block["row_tiles"], block["key_tiles"], block["damaged_count"]) == (16, 6, 48)
    assert block["together"] == 8
    # What lies in the workspace does not overlap, and is all of it.
    starts = [int(block[name]) for name in ("exponents", "deltas", "sums", "damaged")]
    rows = 16 * 2 * 16 * 64
    sizes = (4 * rows, 8 * rows, 4 * 64 * rows, 4 * 49)
    ends = [start + size for start, size in zip(starts, sizes, strict=True)]
    assert starts[0] >= (1 << 20) + 4 * 32 * 1000
    assert all(end <= start for end, start in zip(ends, starts[1:], strict=False))
    assert ends[-1] <= (1 << 20) + plan.workspace
    assert block["turns"] == 0


def test_gradients_summed_along_different_axes_are_computed_apart():
    """k is an operand of full shape without strides, v one that broadcasts."""
    q = spec(3, 100, 64)
    view = ArraySpec((3, 100, 64), (0, 128, 2), q.dtype)
    arrays = AttentionArrays(q, view, spec(1, 100, 64))
    grads = AttentionGrads(q, q, spec(1, 100, 64))
    forward = problem_of(q, spec(1, 100, 64)).forward
    problem = AttentionVjpProblem.of(forward, arrays, problem_of(q).results, grads, method="wgmma")
    _, launches = blocks(problem)
    assert [launch.grid for launch, _ in launches] == [6, 3, 6, 6, 1]
    assert [block["vjp"]["summed"] for _, block in launches] == [1, 1, 1, 3, 3]


def test_order_is_kept_where_it_matters():
    for tokens, deterministic, ordered in ((256, True, 0), (257, True, 1), (257, False, 0)):
        q = spec(2, tokens, 128)
        _, launches = blocks(problem_of(q, deterministic=deterministic))
        assert (launches[0][1]["turns"] > 0) == ordered
        assert launches[1][0].kernel.expression.endswith(("false>", "true>")[ordered])


def test_out_is_read_by_vectors_where_it_has_them():
    q, v = spec(2, 100, 64), ArraySpec((2, 100, 20), (4800, 48, 2), np.dtype(np.float16))
    for problem, by_vectors in ((problem_of(q), True), (problem_of(q, q, v, dout=v), False)):
        plan, launches = blocks(problem)
        assert launches[0][0].kernel.expression.endswith(("false>", "true>")[by_vectors])
        misplaced = [4096 + 2 * (name == "out") for name in OPERANDS]
        assert plan.maps_read(misplaced) == (not by_vectors)


def test_workspace_is_enough_for_every_dout():
    q = spec(2, 1000, 64)
    wide = problem_of(q, dout=spec(2, 1000, 64, dtype=SINGLE))
    for problem in (problem_of(q), wide):
        plan = plan_attention_vjp(problem, H200)
        assert plan.workspace <= vjp_workspace_bytes(wide, H200)
