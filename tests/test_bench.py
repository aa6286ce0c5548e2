"""The parts of the benchmarks: timing in rounds, problems, peers, result files, and the driver."""

import csv
import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import benchmarks.host
from cuflash.bench import peers, problems, rows
from cuflash.bench.problems import AttentionShape
from cuflash.bench.timing import Comparison, CudaClock, HostClock, compare, extra_bytes


class FakeClock:
    """Every call advances the time by what it returns; windows are kept with their names."""

    def __init__(self) -> None:
        self.windows: list[tuple[list[object], float]] = []

    def seconds(self, calls: Sequence, count: int, start: int) -> float:
        results = [calls[i % len(calls)]() for i in range(start, start + count)]
        total = sum(seconds for _, seconds in results)
        self.windows.append(([name for name, _ in results], total))
        return total


def test_rounds_alternate_and_fill_their_windows() -> None:
    clock = FakeClock()
    result = compare(
        {"slow": lambda: ("slow", 0.5), "fast": lambda: ("fast", 0.001)},
        clock=clock,
        rounds=4,
        window=0.06,
    )
    order = [names[0] for names, _ in clock.windows[-8:]]
    assert order == ["slow", "fast", "fast", "slow"] * 2
    assert all(total >= 0.06 for _, total in clock.windows[-8:])
    assert {len(names) for names, _ in clock.windows[-8:] if names[0] == "slow"} == {1}
    assert result.median("slow") == pytest.approx(0.5)
    assert result.speedup("fast", "slow").median == pytest.approx(500)


def test_inputs_rotate_within_and_across_windows() -> None:
    clock = FakeClock()
    calls = [lambda i=i: (i, 1.0) for i in range(3)]
    compare({"a": calls}, clock=clock, rounds=6, window=1.0)
    assert list(itertools.chain(*(names for names, _ in clock.windows[-6:]))) == [0, 1, 2, 0, 1, 2]


def test_ratios_are_taken_within_rounds() -> None:
    # A machine that slows down by 10 changes each time but no ratio.
    result = Comparison({"a": [1.0, 10.0, 1.0, 10.0], "b": [2.0, 20.0, 2.0, 20.0]})
    assert result.speedup("a", "b") == (2.0, 2.0, 2.0)
    assert result.speedup("b", "a").median == 0.5
    assert Comparison({"a": [1.0] * 5, "b": [1, 2, 3, 4, 5]}).speedup("a", "b") == (2, 3, 4)


def test_clock_that_never_ticks_is_given_more_calls() -> None:
    class Coarse:
        def seconds(self, calls: Sequence, count: int, start: int) -> float:
            return 1.0 if count > 1000 else 0.0

    assert compare({"a": int}, clock=Coarse(), rounds=1, window=0.5).median("a") < 1e-3


def test_host_clock_times_the_calls() -> None:
    done: list[int] = []
    taken = HostClock().seconds([lambda: done.append(0), lambda: done.append(1)], 3, 1)
    assert done == [1, 0, 1]
    assert 0 < taken < 10


def test_cuda_clock_takes_the_time_between_events(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = pytest.importorskip("cupy")
    log: list[str] = []

    class Event:
        def record(self) -> None:
            log.append("record")

        def synchronize(self) -> None:
            log.append("synchronize")

    monkeypatch.setattr(cupy.cuda, "Event", Event)
    monkeypatch.setattr(cupy.cuda, "get_elapsed_time", lambda began, ended: 250.0)
    assert CudaClock().seconds([lambda: log.append("call")], 2, 0) == 0.25
    assert log == ["record", "call", "call", "record", "synchronize"]


def test_extra_bytes_leave_the_results_out() -> None:
    def call() -> np.ndarray:
        scratch = np.ones(3_000_000, np.uint8)
        return scratch[:1_000_000].copy()

    assert extra_bytes(call) == pytest.approx(3_000_000, abs=20_000)
    assert extra_bytes(lambda: (np.ones(1_000_000, np.uint8), np.ones(8))) < 20_000


def test_attention_flops() -> None:
    full = AttentionShape(batch=2, heads=3, tokens=5, d=7)
    scores = np.einsum("bhid,bhjd->bhij", *np.ones((2, 2, 3, 5, 7)))
    assert problems.attention_flops(full) == 2 * 2 * scores.size * 7
    causal = AttentionShape(batch=2, heads=3, tokens=5, d=7, causal=True)
    assert problems.attention_flops(causal) == problems.attention_flops(full) / 2
    assert problems.attention_flops(full, backward=True) == 2.5 * problems.attention_flops(full)


def test_bytes() -> None:
    k = v = np.empty((2, 4, 100, 8), np.float16)
    assert problems.decode_bytes(2, 4, 100, 8, 2) == k.nbytes + v.nbytes
    assert problems.softmax_bytes(k.size, 2) == k.nbytes + v.nbytes


def test_device_rows_have_one_amount_of_work() -> None:
    targets = problems.ATTENTION_TARGETS
    assert len(set(targets)) == len(targets) == 2 * 3 * 4 * 2
    for shape, _, over_cudnn in targets:
        assert shape.batch * shape.tokens == problems.DEVICE_TOKENS
        assert shape.heads * shape.d == problems.DEVICE_WIDTH
        assert 1 <= over_cudnn < 1.3


def test_targets_have_their_slack() -> None:
    assert problems.meets(0.99, 1.0)
    assert problems.meets(1.2, 1.0)
    assert not problems.meets(0.98, 1.0)


def test_inputs_are_sets_of_one_dtype() -> None:
    shape = AttentionShape(1, 2, 3, 4, dtype="bfloat16")
    first, second = shape.inputs(sets=2)
    assert all(x.dtype.name == "bfloat16" and x.shape == (1, 2, 3, 4) for x in (*first, *second))
    assert not np.array_equal(first[0], second[0])
    assert not np.array_equal(first[0], first[1])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_peers_compute_the_same_attention(dtype: str, causal: bool) -> None:
    from cuflash import reference

    (inputs,) = AttentionShape(1, 2, 6, 4, dtype=dtype).inputs()
    expected, _ = reference.attention(*inputs, causal=causal)
    tolerance = {"float64": 1e-13, "float32": 1e-6, "float16": 2e-3, "bfloat16": 2e-2}[dtype]
    math = peers.DEVICE_ATTENTION[-1]  # the one backend that runs anywhere
    for peer in peers.installed((peers.NUMPY_ATTENTION, peers.TORCH_ATTENTION, math)):
        out = peer.make(*inputs, causal=causal)()
        if peer.library == "torch":
            out = out.double().numpy()
        np.testing.assert_allclose(np.asarray(out, np.float64), expected, atol=tolerance)


def test_scipy_softmax_is_along_the_axis() -> None:
    x = np.random.default_rng(0).standard_normal((3, 5))
    np.testing.assert_allclose(peers.scipy_softmax(x, axis=0)().sum(axis=0), 1)


def test_peers_need_their_library() -> None:
    absent = peers.Peer("absent", "no_such_library", peers.numpy_attention)
    assert peers.installed((absent, peers.NUMPY_ATTENTION)) == [peers.NUMPY_ATTENTION]


def test_rows_carry_their_environment(tmp_path: Path) -> None:
    environment = {"machine": "Some CPU (R) 9000", "numpy": "2"}
    path = rows.write_rows(
        tmp_path, "subject", [{"n": 1, "ms": 0.123456}, {"n": 2, "extra": "x"}], environment
    )
    assert path == tmp_path / "some-cpu-r-9000" / "subject.csv"
    with path.open(newline="") as file:
        first, second = csv.DictReader(file)
    assert first == {"n": "1", "ms": "0.1235", "extra": "", **environment}
    assert second == {"n": "2", "ms": "", "extra": "x", **environment}


def test_environment_names_the_machine() -> None:
    environment = rows.host_environment()
    assert environment["machine"]
    assert int(environment["cpus"]) >= 1
    assert environment["numpy"] == np.__version__


def test_table_is_aligned() -> None:
    lines = rows.table([{"name": "a", "ms": 1.0}, {"name": "long name", "ms": 2.5}]).split("\n")
    assert lines == ["name       ms", "a          1", "long name  2.5"]
    assert rows.table([]) == ""


def test_host_benchmark(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = AttentionShape(1, 2, 8, 4)
    effort = benchmarks.host.Effort(
        rounds=2,
        window=1e-4,
        attention=small,
        long_tokens=16,
        short=[small],
        dtypes=[AttentionShape(1, 2, 8, 4, dtype="float16")],
        softmax_elements=64,
        softmax_lengths=[16],
    )
    benchmarks.host.report(effort, tmp_path)
    (path,) = tmp_path.glob("*/host.csv")
    with path.open(newline="") as file:
        found = list(csv.DictReader(file))
    assert {row["method"] for row in found} == {"tiled", "auto", "naive", "fused", "online"}
    timed = [row for row in found if row["speedup"]]
    assert all(float(row["lower"]) <= float(row["speedup"]) <= float(row["upper"]) for row in timed)
    memory = [row for row in found if row["extra MiB"]]
    assert [int(row["T"]) for row in memory] == [8, 16]
    printed = capsys.readouterr().out
    assert "Softmax, last axis" in printed
    assert str(path) in printed
