"""The parts of the benchmarks: timing in rounds, problems, peers, result files, and the driver."""

import csv
import ctypes
import importlib
import itertools
import math
import sys
import types
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import benchmarks.attention
import benchmarks.host
import benchmarks.overhead
import cuflash
from cuflash.bench import device, peers, problems, rows, timing
from cuflash.bench.problems import AttentionShape
from cuflash.bench.timing import Comparison, CudaClock, HostClock, compare, extra_bytes
from cuflash.problem import AttentionProblem


class FakeClock:
    """Every call advances the time by what it returns; windows are kept with their names."""

    megahertz = math.nan

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
        megahertz = math.nan

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

    # The rate is read while the work runs: after all of it is queued, before the wait for its end.
    log.clear()
    clock = CudaClock(meter=lambda: log.append("meter") or 1980.0)
    clock.seconds([lambda: log.append("call")], 1, 0)
    assert log == ["record", "call", "record", "meter", "synchronize"]
    assert clock.megahertz == 1980


def test_rates_of_the_processor_are_kept_by_competitor() -> None:
    class Falling:
        megahertz = 2000.0

        def seconds(self, calls: Sequence, count: int, start: int) -> float:
            self.megahertz = 1000.0 + calls[0]()
            return 1.0

    result = compare({"a": lambda: 1, "b": lambda: 2}, clock=Falling(), rounds=3)
    assert result.clock("a") == 1001
    assert result.clock("b") == 1002
    assert math.isnan(compare({"a": lambda: 0}, rounds=1, window=0).clock("a"))
    assert math.isnan(Comparison({"a": [1.0]}).clock("a"))


def test_nothing_is_begun_that_may_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(timing.time, "monotonic", lambda: now[0])

    def done(seconds: float) -> list[int]:
        found = []
        for took in timing.within(seconds, [3, 1, 5, 1, 1]):
            found.append(took)
            now[0] += took
        return found

    assert done(math.inf) == [3, 1, 5, 1, 1]
    assert done(13) == [3, 1, 5]  # 9 have passed, and the next may take 5
    assert done(14) == [3, 1, 5, 1]
    assert done(2) == [3]


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
    assert [row["peer"] for row in timed if row["subject"] == "Attention, gradients"] == [
        "forward",
        "forward",
    ]
    assert all(float(row["lower"]) <= float(row["speedup"]) <= float(row["upper"]) for row in timed)
    memory = [row for row in found if row["extra MiB"]]
    assert [int(row["T"]) for row in memory] == [8, 16]
    printed = capsys.readouterr().out
    assert "Softmax, last axis" in printed
    assert str(path) in printed


# ------------------------------------------------------------------------------------- the device


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """Stand for the driver's library, on a machine whose GPU has a bus address."""
    cupy = pytest.importorskip("cupy")

    def handle_of(bus: bytes, handle: object) -> int:
        handle._obj.value = 77 if bus == b"0000:3B:00.0" else 0
        return 0

    def clock_of(handle: ctypes.c_void_p, kind: int, rate: object) -> int:
        rate._obj.value = 1755 if (handle.value, kind) == (77, 1) else 0
        return library.error

    library = types.SimpleNamespace(
        error=0,
        nvmlInit_v2=lambda: 0,
        nvmlDeviceGetHandleByPciBusId_v2=handle_of,
        nvmlDeviceGetClockInfo=clock_of,
    )
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    gpu = types.SimpleNamespace(pci_bus_id="0000:3B:00.0")
    monkeypatch.setattr(cupy.cuda, "Device", lambda: gpu)
    return library


def test_rate_of_the_current_device(nvml: types.SimpleNamespace) -> None:
    assert device.SmClock()() == 1755
    nvml.error = 3  # not supported
    assert math.isnan(device.SmClock()())
    nvml.nvmlInit_v2 = lambda: 9  # no driver
    nvml.error = 0
    assert math.isnan(device.SmClock()())


def test_no_rate_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cupy")

    def absent(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", absent)
    assert math.isnan(device.SmClock()())


def test_peers_that_refuse_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    def refuses(x: np.ndarray, *, factor: int) -> peers.Call:
        def call() -> None:
            raise RuntimeError("no kernel for this dtype\nand more")

        return call

    def doubles(x: np.ndarray, *, factor: int) -> peers.Call:
        return lambda: factor * x

    candidates = (
        peers.Peer("refuses", "numpy", refuses),
        peers.Peer("absent", "no_such_library", doubles),
        peers.Peer("doubles", "numpy", doubles),
    )
    found = peers.willing(candidates, [(np.arange(2),), (np.arange(3),)], factor=2)
    assert list(found) == ["doubles"]
    assert [call().tolist() for call in found["doubles"]] == [[0, 2], [0, 2, 4]]
    printed = capsys.readouterr().out
    assert "refuses is left out: no kernel for this dtype\n" in printed
    assert "absent" not in printed


def test_rates_are_compared_where_work_differs() -> None:
    result = Comparison({"a": [1.0, 2.0], "b": [4.0, 8.0]}, {"a": [1500.0, 1700.0]})
    row = rows.timing(result, "a", "b", 3.0, "TB/s")
    assert (row["speedup"], row["rate"], row["peer rate"]) == (4, 2, 0.5)
    assert row["SM MHz"] == 1600
    row = rows.timing(result, "a", "b", 3.0, "TB/s", peer_work=12.0)
    assert (row["speedup"], row["lower"], row["upper"]) == (1, 1, 1)
    assert (row["rate"], row["peer rate"]) == (2, 2)


def test_record_is_written_after_every_batch(tmp_path: Path) -> None:
    record = rows.Record("subject", tmp_path, lambda: {"machine": "GPU"})
    for n in (1, 2):
        record.add("title", [{"n": n}])
        with (tmp_path / "gpu" / "subject.csv").open(newline="") as file:
            assert [int(row["n"]) for row in csv.DictReader(file)] == list(range(1, n + 1))


@pytest.mark.usefixtures("numpy_device")
def test_attention_benchmark() -> None:
    shape = AttentionShape(1, 2, 8, 64, dtype="float32")
    table = benchmarks.attention.Table(
        [shape], [peers.NUMPY_ATTENTION], benchmarks.attention.wide_target
    )
    found = benchmarks.attention.measure(
        table,
        shape,
        ["auto", "tiled", "simt"],
        rounds=2,
        window=1e-4,
    )
    pairs = {(row["method"], row["peer"]): row for row in found}
    assert {name for name, _ in pairs} == {"matmul", "auto", "tiled", "NumPy formula"}
    assert ("auto", "NumPy formula") in pairs
    assert ("tiled", "NumPy formula") not in pairs
    row = pairs["auto", "matmul"]
    assert row["rate"] == pytest.approx(problems.attention_flops(shape) / row["ms"] / 1e9)
    assert row["peer rate"] == pytest.approx(2 * 8192**3 / row["peer ms"] / 1e9)
    assert row["target"] == 10
    assert row["met"] is False
    assert pairs["NumPy formula", "matmul"]["target"] == ""


@pytest.mark.usefixtures("numpy_device")
def test_gradients_benchmark() -> None:
    """The backward alone, by 2.5 times the operations; peers get dout, too."""
    seen = []

    def stand_in(*arrays: np.ndarray, causal: bool) -> peers.Call:
        seen.append([x.shape for x in arrays])
        return lambda: arrays[0].copy()

    shape = AttentionShape(1, 2, 8, 16, dtype="float64")
    table = benchmarks.attention.Table(
        [shape],
        [peers.Peer("stand-in", "numpy", stand_in)],
        benchmarks.attention.wide_vjp_target,
        backward=True,
    )
    found = benchmarks.attention.measure(table, shape, ["auto", "simt"], rounds=2, window=1e-4)
    assert seen == [[(1, 2, 8, 16)] * 4] * benchmarks.attention.SETS
    pairs = {(row["method"], row["peer"]): row for row in found}
    assert {name for name, _ in pairs} == {"matmul", "auto", "stand-in"}
    row = pairs["auto", "matmul"]
    assert row["rate"] == pytest.approx(10 * 2 * 8**2 * 16 / row["ms"] / 1e9)
    assert (row["target"], row["met"]) == (4.0, False)
    assert pairs["auto", "stand-in"]["target"] == pairs["stand-in", "matmul"]["target"] == ""


@pytest.mark.parametrize(("name", "wanted"), [("forward16", 1.11), ("backward16", 1.19)])
def test_sixteen_bit_rows_are_held_against_cudnn(name: str, wanted: float) -> None:
    table = benchmarks.attention.TABLES[name]
    shape = next(x for x in table.shapes if (x.d, x.tokens, x.causal) == (64, 8192, True))
    assert len(table.shapes) == 24
    assert [peer.name for peer in table.peers] == ["torch SDPA cuDNN", "torch SDPA flash"]
    row = {"method": "auto", "peer": "torch SDPA cuDNN", "speedup": wanted - 0.01}
    assert table.target(shape, row) == (wanted, True)
    assert table.target(shape, {**row, "speedup": wanted - 0.02}) == (wanted, False)
    assert table.target(shape, {**row, "peer": "matmul"}) is None


@pytest.mark.parametrize(
    ("d", "tokens", "causal", "method", "held"),
    [
        (128, 8192, False, "auto", True),
        (256, 16384, False, "auto", True),
        (128, 8192, True, "auto", False),
        (128, 2048, False, "auto", False),
        (64, 8192, False, "auto", False),
        (128, 8192, False, "simt", False),
    ],
)
def test_long_rows_of_wide_heads_are_held_against_the_matmul(
    d: int, tokens: int, causal: bool, method: str, held: bool
) -> None:
    table = benchmarks.attention.TABLES["forward16"]
    shape = next(x for x in table.shapes if (x.d, x.tokens, x.causal) == (d, tokens, causal))
    for share in (0.9, 0.89):
        row = {"method": method, "peer": "matmul", "speedup": share}
        assert table.target(shape, row) == ((0.9, share >= 0.9) if held else None)


@pytest.mark.usefixtures("numpy_device")
def test_decode_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes of K and V over the time; a peer sees the groups of heads as they are."""
    seen = []

    def stand_in(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> peers.Call:
        seen.append((q.shape, k.shape, v.shape, q.dtype.name))
        return lambda: k.copy()

    monkeypatch.setattr(benchmarks.attention, "COPY_BYTES", 1000)
    shape = problems.Decode(2, 6, 3, 40, 16)
    table = benchmarks.attention.Table(
        [shape], [peers.Peer("stand-in", "numpy", stand_in)], benchmarks.attention.decode_target
    )
    found = benchmarks.attention.measure_decode(
        table, shape, ["auto", "tiled"], rounds=2, window=1e-4
    )
    keys = (2, 3, 40, 16)
    assert set(seen) == {((2, 6, 1, 16), keys, keys, "bfloat16")}
    pairs = {(row["method"], row["peer"]): row for row in found}
    assert set(pairs) == {(x, "copy") for x in ("copy", "auto", "tiled", "stand-in")} | {
        ("auto", "stand-in")
    }
    row = pairs["auto", "copy"]
    assert row["rate"] == pytest.approx(2 * 2 * math.prod(keys) / row["ms"] / 1e9)
    assert row["peer rate"] == pytest.approx(2 * 1000 / row["peer ms"] / 1e9)
    assert row["target"] == ""
    assert pairs["auto", "stand-in"]["target"] == 1.0
    assert pairs["stand-in", "copy"]["target"] == ""


def test_decoding_has_a_share_of_the_copy_where_bytes_are_many() -> None:
    table = benchmarks.attention.TABLES["decode"]
    assert [peer.name for peer in table.peers] == ["torch SDPA cuDNN", "torch SDPA flash"]
    wanted = [table.target(shape, {"peer": "copy", "speedup": 0.9}) for shape in table.shapes]
    assert wanted == [None, None, (0.9, True), (0.9, True)]
    large = table.shapes[-1]
    assert table.target(large, {"peer": "copy", "speedup": 0.89}) == (0.9, False)
    for speedup, met in ((0.99, True), (0.98, False)):
        row = {"peer": "torch SDPA flash", "speedup": speedup}
        assert table.target(large, row) == (1.0, met)


def test_rows_are_picked_by_number() -> None:
    assert benchmarks.attention.picked("0,4-6", 7) == [0, 4, 5, 6]
    for wrong in ("7", "3-1", "a", "-1", ""):
        with pytest.raises(Exception, match=r"table has rows|neither"):
            benchmarks.attention.picked(wrong, 7)


def test_attention_options_that_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--quick", "--table", "forward16"], ["--rows", "99"], ["--rows", "0-x"]):
        with pytest.raises(SystemExit):
            benchmarks.attention.main(arguments)
        assert "error" in capsys.readouterr().err
    benchmarks.attention.main(["--list"])
    assert len(capsys.readouterr().out.splitlines()) == len(problems.WIDE_ATTENTION)


# ----------------------------------------------------------------------------------- host overhead


def test_stages_are_functions_of_the_engine() -> None:
    pytest.importorskip("cupy")
    for stages in benchmarks.overhead.STAGES.values():
        for module, path in stages.values():
            owner = importlib.import_module(module)
            for name in path.split("."):
                owner = getattr(owner, name)
            assert callable(owner)


def test_overhead_is_split_by_stage() -> None:
    x = np.ones((1, 1, 2, 4), np.float32)
    case = benchmarks.overhead.Case(
        "attention", "causal", lambda: cuflash.flash_attention(x, x, x, causal=True)
    )
    stages = {
        "enter": ("cuflash.interop", "enter"),
        "problem": ("cuflash.problem", "AttentionProblem.of"),
        "never": ("cuflash.interop", "describe"),
    }
    before = AttentionProblem.__dict__["of"], cuflash.interop.enter
    emptied: list[None] = []
    row = benchmarks.overhead.measure(case, lambda: emptied.append(None), 20, stages)
    assert row["lower"] <= row["us"] <= row["upper"]
    assert min(row["enter"], row["problem"], row["rest"]) > 0
    assert row["never"] == 0
    assert row["met"] == (row["us"] <= 40)
    assert len(emptied) == 4
    assert (AttentionProblem.__dict__["of"], cuflash.interop.enter) == before


@pytest.mark.usefixtures("numpy_device")
def test_every_call_of_the_overhead_benchmark_is_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", np)
    cases = benchmarks.overhead.cases()
    assert {case.family for case in cases} == set(benchmarks.overhead.STAGES)
    for case in cases:
        result = case.call()
        for x in result if isinstance(result, tuple) else (result,):
            assert np.isfinite(x).all()
