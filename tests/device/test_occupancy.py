"""Occupancy and trips predicted for GPUs that need not be here."""

from dataclasses import replace

import numpy as np
import pytest

from cuflash.device.occupancy import (
    MANY_ROWS,
    SOURCE_LENGTHS,
    plan_rows,
    report,
    residency,
    source_occupancy,
    source_report,
)
from cuflash.device.softmax_regimes import resident_blocks, softmax_regimes
from cuflash.problem import FLOATS
from tests.devices import H200, T4

FLOAT32 = np.dtype(np.float32)


def test_blocks_are_bounded_by_what_runs_out_first():
    assert resident_blocks(H200, 128, 0) == 16  # threads
    assert resident_blocks(H200, 32, 0) == 32  # blocks
    assert resident_blocks(T4, 32, 0) == 16
    assert resident_blocks(H200, 256, 0, registers=64) == 4
    assert resident_blocks(H200, 256, 0, registers=65) == 3  # given out in units of 8
    assert resident_blocks(H200, 256, 113 << 10) == 2  # 1 KB of each block is the system's
    assert resident_blocks(H200, 256, (113 << 10) + 1) == 1
    assert resident_blocks(T4, 256, 32 << 10) == 2
    assert resident_blocks(T4, 256, (32 << 10) + 1) == 1


def test_occupancy_of_the_source_on_its_gpu():
    found = {n: source_occupancy(T4, n) for n in (*SOURCE_LENGTHS, 8193, 12289)}
    assert found == {
        1024: (4, 1), 2048: (4, 1), 4096: (4, 1),
        8192: (2, 0.5), 8193: (1, 0.25), 12288: (1, 0.25),
        12289: (0, 0), 16384: (0, 0),
    }  # fmt: skip
    *lines, last = source_report(T4)
    assert [line.split() for line in lines[4:]] == [
        ["8192", "32", "2", "50%"],
        ["12288", "48", "1", "25%"],
    ]
    assert last.endswith("does not fit: 12288 is the longest row")


@pytest.mark.parametrize("limits", [H200, T4], ids=["h200", "t4"])
def test_residency_follows_the_plan(limits):
    for regime in softmax_regimes(limits)[:-1]:
        length = int(regime.row_bytes) // 4
        found = residency(limits, FLOAT32, length)
        launch = plan_rows(limits, FLOAT32, MANY_ROWS, length).launches[-1]
        assert found.regime == {"cluster": "stream"}.get(regime.method, regime.method)
        few = residency(limits, FLOAT32, length, rows=10)
        assert (few.regime, few.trips) == (regime.method, 2)
        assert found.threads == launch.block
        assert found.blocks >= 1
        assert found.occupancy == found.blocks * found.threads / limits.threads_per_sm <= 1
        assert found.trips == 2
    with pytest.raises(ValueError, match="'fused' cannot run"):
        residency(limits, FLOAT32, 2**20, "fused")


def test_the_second_read_is_predicted_to_hit_while_a_wave_fits():
    found = residency(H200, FLOAT32, 4096, "online")
    assert found.kernels == ("online",)
    assert found.trips == 2
    # Whole blocks work on whole rows.
    rows = found.wave_bytes // (4096 * 4)
    assert found.wave_bytes == rows * 4096 * 4
    assert rows % (found.blocks * H200.multiprocessors) == 0
    assert residency(H200, FLOAT32, 4096, "online", rows=3).wave_bytes == 3 * 4096 * 4
    small = replace(H200, l2_bytes=found.wave_bytes - 1)
    assert residency(small, FLOAT32, 4096, "online").trips == 3
    naive = residency(H200, FLOAT32, 4096, "naive")
    assert (naive.kernels, naive.trips) == (("naive_maximum", "naive_normalizer", "apply"), 4)


def test_a_row_has_as_many_blocks_as_hold_or_split_it():
    assert residency(H200, FLOAT32, 2**15).parts == 1
    for rows, way, parts in ((131, "cluster", 16), (132, "stream", 8)):
        found = residency(H200, FLOAT32, 2**18, rows=rows)
        assert (found.regime, found.parts, found.trips) == (way, parts, 2)
        resident = found.blocks * H200.multiprocessors // found.parts
        assert found.wave_bytes == resident * 2**20
    assert residency(H200, FLOAT32, 2**22).parts == 1
    split = residency(H200, FLOAT32, 2**22, rows=3)
    assert (split.regime, split.kernels) == ("split", ("split_states", "split"))
    assert split.parts == H200.multiprocessors // 3


@pytest.mark.parametrize(
    ("length", "regime", "parts", "trips", "width"),
    [
        (128, "columns", 1, 2, 256),
        (4096, "strips", 16, 2, 256),
        (8192, "columns", 16, 2, 128),
        (2**15, "columns", 1, 3, 128),
    ],
)
def test_rows_side_by_side_are_tiles(length, regime, parts, trips, width):
    found = residency(H200, FLOAT32, length, axis=0)
    launch = plan_rows(H200, FLOAT32, MANY_ROWS, length, axis=0).launches[-1]
    assert (found.regime, found.parts, found.trips) == (regime, parts, trips)
    assert found.threads == launch.block
    # Whole tiles are in flight.
    tiles = found.wave_bytes / (width * length)
    assert tiles == found.blocks * H200.multiprocessors // parts
    assert not found.absorbed


@pytest.mark.parametrize(
    "operation", ["log_softmax", "logsumexp", "softmax_vjp", "log_softmax_vjp", "logsumexp_vjp"]
)
def test_the_family_has_plans_by_shape(operation):
    (launch,) = plan_rows(H200, FLOAT32, 5, 1000, operation).launches
    stem = operation.partition("_vjp")[0].replace("_", "")
    assert stem in launch.kernel.expression.lower()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_report_has_a_line_for_each_length_and_each_regime(dtype):
    lines = list(report(T4, dtype))
    blank, end = (i for i, line in enumerate(lines) if not line)
    assert [int(line.split()[0]) for line in lines[1:blank]] == [2**i for i in range(21)]
    assert [line.split()[0] for line in lines[blank + 1 : end]] == ["fused", "online", "short"]
    split = [int(line.split()[6]) for line in lines[1:blank]]
    assert split[0] == 1 < split[-2] < split[-1] <= T4.multiprocessors
    assert "beyond" in lines[end - 2]
    assert [line.split()[1] for line in lines[end + 3 :]] == ["columns"] * 6


@pytest.mark.parametrize(("dtype", "first"), [("float32", 2**15), ("float64", 2**13)])
def test_report_names_the_ways_of_contiguous_rows(dtype, first):
    dtype = np.dtype(dtype)
    lines = list(report(H200, dtype))
    short, stream = (line for line in lines if line.startswith(("short", "stream")))
    last = 2**22 // dtype.itemsize
    assert f"N = {first + 1} to {last}, many rows" in stream
    assert residency(H200, dtype, last).regime == "stream"
    assert residency(H200, dtype, first).regime == "fused"
    assert residency(H200, dtype, 2 * last).regime == "online"
    assert "N = 1, 2" in short
    alone = residency(H200, dtype, 2, rows=2**26)
    assert (alone.regime, alone.trips, alone.threads, alone.parts) == ("short", 2, 256, 1)
    # 64 bytes of rows a thread.
    assert alone.wave_bytes == alone.blocks * H200.multiprocessors * 256 * 64
