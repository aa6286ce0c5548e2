"""The traffic model: the figures of its sources, its own laws, and what it refuses."""

import itertools
import re
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuflash.analysis import METHODS, largest_tokens, scores_bytes, traffic
from cuflash.bench.problems import SOFTMAX_TRIPS, AttentionShape, attention_flops, dtype_of

SHAPES = {
    "softmax": (3, 5, 7),
    "matmul": (3, 5, 7),
    "matmul_bias_activation": (3, 5, 7),
    "dropout_bias_layer_norm": (3, 5, 7),
    "attention": (2, 3, 5, 7),
    "attention_vjp": (2, 3, 5, 7),
}
COUNTS = ("read_bytes", "written_bytes", "flops", "auxiliary_bytes", "operand_bytes")
DTYPES = ("float64", "float32", "float16", "bfloat16")
EVERY_METHOD = [(op, method) for op, methods in METHODS.items() for method in methods]
GB = 10**9


def test_an_activation_is_268_megabytes() -> None:
    moved = traffic("dropout_bias_layer_norm", (8, 4096, 4096), "bfloat16", "fused")
    assert round(moved.written_bytes / 1e6) == 268


def test_scores_at_8192_tokens_are_128_mebibytes() -> None:
    assert scores_bytes((8192, 64), "float16") == 128 * 2**20


@pytest.mark.parametrize(("batch", "heads", "tokens"), [(1, 1, 200_000), (8, 32, 12_500)])
def test_scores_alone_reach_80_gigabytes(batch: int, heads: int, tokens: int) -> None:
    assert scores_bytes((batch, heads, tokens, 128), "float16") == 80 * GB
    assert largest_tokens((batch, heads, 128), "float16", "scores_fused", 80 * GB) < tokens
    assert largest_tokens((batch, heads, 128), "float16", "flash", 80 * GB) > tokens


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_matrix_by_a_vector_is_one_flop_a_byte_at_16_bits(dtype: str) -> None:
    intensity = traffic("matmul", (8192, 8192, 1), dtype, "single").intensity
    limit = 2 / np.dtype(dtype).itemsize
    assert 0.999 * limit < intensity < limit


@pytest.mark.parametrize("method", METHODS["softmax"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_softmax_trips(method: str, dtype: str) -> None:
    rows, n = 3, 2**20
    counted = traffic("softmax", (rows, n), dtype, method)
    trip = rows * n * np.dtype(dtype).itemsize
    travels = {"unfused": 4, "naive": 5}.get(method, 0)
    statistics = travels * rows * (8 if dtype == "float64" else 4)
    trips = {"unfused": 6, **SOFTMAX_TRIPS}[method]
    assert counted.moved_bytes == trips * trip + statistics
    assert counted.operand_bytes == 2 * trip


def test_fusing_dropout_bias_and_layer_norm_saves_two_thirds() -> None:
    shape = (8, 4096, 4096)
    unfused, fused = (
        traffic("dropout_bias_layer_norm", shape, "bfloat16", m) for m in ("unfused", "fused")
    )
    assert unfused.moved_bytes - 3 * fused.moved_bytes == -6 * 4096 * 2  # the vectors, read once
    assert unfused.flops == fused.flops
    assert (unfused.auxiliary_bytes, fused.auxiliary_bytes) == (prod(shape) * 2, 0)


def test_fusing_an_epilogue_saves_four_trips_of_the_product() -> None:
    m, k, n = 512, 64, 256
    unfused, fused = (
        traffic("matmul_bias_activation", (m, k, n), "float16", method)
        for method in ("unfused", "fused")
    )
    assert unfused.moved_bytes - fused.moved_bytes == 4 * m * n * 2
    assert fused.moved_bytes == (m * k + k * n + n + m * n) * 2
    assert fused.flops == 2 * m * k * n + 2 * m * n


def test_fusing_half_of_attention_saves_half_of_the_scores_traffic() -> None:
    shape = (2, 3, 4096, 64)
    scores = scores_bytes(shape, "float16")
    operands = 4 * prod(shape) * 2
    moved = {m: traffic("attention", shape, "float16", m).moved_bytes for m in METHODS["attention"]}
    assert moved["materialized"] - operands == 4 * scores
    assert moved["scores_fused"] - operands == 2 * scores
    assert moved["flash"] - operands == 2 * 3 * 4096 * 4  # the lse


@pytest.mark.parametrize("op", ["attention", "attention_vjp"])
def test_flash_grows_with_tokens_and_the_rest_with_their_square(op: str) -> None:
    for method in METHODS[op]:
        one, two = (traffic(op, (tokens, 64), "float16", method) for tokens in (10**9, 2 * 10**9))
        growth = 2 if method == "flash" else 4
        for name in ("moved_bytes", "memory_bytes"):
            assert getattr(two, name) / getattr(one, name) == pytest.approx(growth, rel=1e-6)


@pytest.mark.parametrize("backward", [False, True])
def test_flops_of_flash_are_those_that_benchmarks_count(backward: bool) -> None:
    shape = AttentionShape(2, 3, 1024, 64)
    op = "attention_vjp" if backward else "attention"
    counted = traffic(op, (2, 3, 1024, 64), "float16", "flash").flops
    assert counted == attention_flops(shape, backward=backward)


@pytest.mark.parametrize(
    ("dtype", "accumulator"), [("bfloat16", 4), ("float32", 4), ("float64", 8)]
)
def test_dq_is_summed_apart(dtype: str, accumulator: int) -> None:
    tokens, d = 64, 16
    counted = traffic("attention_vjp", (tokens, d), dtype, "flash")
    sums, delta = tokens * d * accumulator, tokens * accumulator
    assert counted.auxiliary_bytes == delta + sums
    results = 3 * tokens * d * dtype_of(dtype).itemsize
    assert counted.written_bytes == delta + 2 * sums + results  # zeros, then the sums


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("on_chip_bytes", [2**16, 2**17, 2**18])
def test_io_bound(d: int, on_chip_bytes: int) -> None:
    """Theorem 2 of Dao et al.: N^2 d^2 / M elements, here with the factor 8 of a quarter tile."""
    tokens, elements = 2**17, on_chip_bytes // 2
    counted = traffic("attention", (tokens, d), "float16", "flash", on_chip_bytes=on_chip_bytes)
    once = traffic("attention", (tokens, d), "float16", "flash")
    streamed = counted.read_bytes - tokens * d * 2
    assert streamed == 8 * tokens**2 * d**2 // elements * 2
    assert counted.written_bytes == once.written_bytes


@given(
    tokens=st.integers(1, 2**14),
    d=st.integers(1, 256),
    rows=st.integers(1, 512),
    op=st.sampled_from(["attention", "attention_vjp"]),
)
def test_fast_memory_only_helps(tokens: int, d: int, rows: int, op: str) -> None:
    def moved(on_chip_bytes: int | None) -> int:
        return traffic(op, (tokens, d), "float16", "flash", on_chip_bytes=on_chip_bytes).moved_bytes

    row = 4 * d * 2
    assert moved(rows * row) >= moved((rows + 1) * row) >= moved(None)
    assert moved(tokens * row) == moved(None)


@given(
    op_method=st.sampled_from(EVERY_METHOD),
    dtype=st.sampled_from(DTYPES),
    sizes=st.lists(st.integers(1, 10**30), min_size=4, max_size=4),
)
def test_counts_are_exact_at_any_size(
    op_method: tuple[str, str], dtype: str, sizes: list[int]
) -> None:
    op, method = op_method
    shape = sizes[: len(SHAPES[op])]
    counted = traffic(op, shape, dtype, method)
    assert all(type(getattr(counted, name)) is int for name in COUNTS)
    # Each count is a + b n in the size n of the first axis, to the last digit.
    first, second, third = (
        traffic(op, (factor * shape[0], *shape[1:]), dtype, method) for factor in (1, 2, 3)
    )
    for name in COUNTS:
        a, b, c = (getattr(each, name) for each in (first, second, third))
        assert c - b == b - a


@pytest.mark.parametrize("kind", [np.int32, np.uint8, np.int64])
def test_numpy_sizes_do_not_overflow(kind: Any) -> None:
    shape = (kind(100),) * 4
    for op, method in EVERY_METHOD:
        few = shape[: len(SHAPES[op])]
        assert traffic(op, few, "float16", method) == traffic(
            op, [100] * len(few), "float16", method
        )


@pytest.mark.parametrize("op", METHODS)
def test_no_method_moves_more_than_the_one_before(op: str) -> None:
    shape = (*(1024,) * (len(SHAPES[op]) - 1), 16)
    moved = [traffic(op, shape, "float16", method).moved_bytes for method in METHODS[op]]
    assert moved == sorted(moved, reverse=True)


@pytest.mark.parametrize(("op", "method"), EVERY_METHOD)
def test_nothing_is_read_or_written_less_than_once(op: str, method: str) -> None:
    counted = traffic(op, SHAPES[op], "float16", method)
    assert counted.moved_bytes >= counted.operand_bytes
    assert counted.memory_bytes == counted.operand_bytes + counted.auxiliary_bytes
    assert counted.intensity == counted.flops / (counted.read_bytes + counted.written_bytes)


@pytest.mark.parametrize("dtype", ["bfloat16", ml_dtypes.bfloat16, np.dtype(ml_dtypes.bfloat16)])
def test_dtypes_by_name_and_by_type(dtype: Any) -> None:
    assert scores_bytes((4, 2), dtype) == 32


@given(
    sizes=st.lists(st.integers(1, 64), min_size=1, max_size=4),
    dtype=st.sampled_from(DTYPES),
    method=st.sampled_from(METHODS["attention"]),
    capacity=st.integers(1, 10**24),
)
def test_largest_tokens_fit_and_one_more_does_not(
    sizes: list[int], dtype: str, method: str, capacity: int
) -> None:
    *batch, d = sizes
    tokens = largest_tokens(sizes, dtype, method, capacity)
    if tokens:
        held = traffic("attention", (*batch, tokens, d), dtype, method)
        assert held.memory_bytes <= capacity
    over = traffic("attention", (*batch, tokens + 1, d), dtype, method)
    assert over.memory_bytes > capacity


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"op": "conv"}, ValueError, "op 'conv' is unknown; known are softmax"),
    ({"op": 3}, TypeError, "op must be a string"),
    ({"method": "fast"}, ValueError, "method 'fast' is unknown for attention; known are materi"),
    ({"method": None}, TypeError, "method must be a string"),
    ({"shape": (8,)}, ValueError, r"shape must be \(..., T, D\) for attention"),
    ({"op": "matmul", "method": "single", "shape": (2, 2)}, ValueError, r"\(M, K, N\)"),
    ({"op": "matmul", "method": "single", "shape": (2, 2, 2, 2)}, ValueError, r"\(M, K, N\)"),
    ({"shape": (8, 0)}, ValueError, "shape must be positive"),
    ({"shape": (-8, 8)}, ValueError, "shape must be positive"),
    ({"shape": (8.0, 8)}, TypeError, "shape must hold integers"),
    ({"shape": 8}, TypeError, "shape must hold integers"),
    ({"dtype": "int8"}, TypeError, "dtype 'int8' is not one of float64"),
    ({"dtype": "float17"}, TypeError, "dtype 'float17' is not one of"),
    ({"dtype": None}, TypeError, "dtype None is not one of"),
    ({"on_chip_bytes": 63}, ValueError, "on_chip_bytes must hold a row .* 64 bytes, got 63"),
    ({"on_chip_bytes": -1}, ValueError, "on_chip_bytes must be positive"),
    ({"on_chip_bytes": 1.5}, TypeError, "on_chip_bytes must hold integers"),
    ({"on_chip_bytes": 9, "method": "materialized"}, ValueError, "goes with method 'flash'"),
]


@pytest.mark.parametrize(("change", "error", "message"), REFUSED)
def test_refused(change: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = {"op": "attention", "shape": (8, 8), "dtype": "float16", "method": "flash"}
    with pytest.raises(error, match=message):
        traffic(**{**arguments, **change})


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"shape": ()}, ValueError, r"shape must be \(..., D\)"),
        ({"capacity": 0}, ValueError, "capacity must be positive"),
        ({"capacity": 1e9}, TypeError, "capacity must hold integers"),
        ({"method": "fused"}, ValueError, "method 'fused' is unknown for attention"),
    ],
)
def test_largest_tokens_refused(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    arguments = {"shape": (8,), "dtype": "float16", "method": "flash", "capacity": 80 * GB}
    with pytest.raises(error, match=message):
        largest_tokens(**{**arguments, **change})


def test_every_method_is_documented() -> None:
    for name in itertools.chain(METHODS, *METHODS.values()):
        assert name == "single" or re.search(rf"\b{name}\b", traffic.__doc__ or "")


def test_the_table_of_the_documentation() -> None:
    page = (Path(__file__).parents[2] / "docs" / "traffic-model.md").read_text(encoding="utf-8")
    _, table, _ = re.split("<!-- /?largest tokens -->", page)
    rows = re.findall(r"^\| (\d+) \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \|$", table, re.MULTILINE)
    assert len(rows) == 3
    for heads, *shown in rows:
        shape = (int(heads), 128)
        assert shown == [
            f"{largest_tokens(shape, 'float16', method, 80 * GB):,}"
            for method in METHODS["attention"]
        ]


def test_formulas_of_the_backward() -> None:
    tokens, d = 512, 16
    elements, scores = tokens * d, tokens**2
    materialized, flash = (
        traffic("attention_vjp", (tokens, d), "bfloat16", method)
        for method in METHODS["attention_vjp"]
    )
    assert materialized.read_bytes == 2 * (5 * elements + 5 * scores)
    assert materialized.written_bytes == 2 * (3 * elements + 2 * scores)
    assert materialized.auxiliary_bytes == 2 * 3 * scores
    assert flash.read_bytes == 2 * 6 * elements + 4 * (2 * elements + 2 * tokens)
    assert flash.written_bytes == 2 * 3 * elements + 4 * (2 * elements + tokens)
    assert flash.auxiliary_bytes == 4 * (elements + tokens)
