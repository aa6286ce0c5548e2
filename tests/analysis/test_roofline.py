"""Ceilings by name, from numbers, and from the properties of a device."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from cuflash.analysis import GPUS, Kernel, Traffic, roofline, traffic

NUMBERS = {"bandwidth": 3.3e12, "flops": 1e15, "memory": 80 * 10**9}


class FakeError(Exception):
    pass


def cupy_with(attributes: dict[str, int], capability: str, memory: int, name: str) -> Any:
    """Return what `roofline` uses of CuPy, with one device in it."""

    def device(number: int) -> Any:
        if number:
            raise FakeError("invalid device ordinal")
        return SimpleNamespace(attributes=attributes, compute_capability=capability)

    runtime = SimpleNamespace(
        CUDARuntimeError=FakeError,
        getDeviceProperties=lambda number: {"name": name.encode(), "totalGlobalMem": memory},
    )
    return SimpleNamespace(cuda=SimpleNamespace(Device=device, runtime=runtime))


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in for CuPy on an H200, with that GPU's attributes."""
    attributes = {
        "MemoryClockRate": 3_201_000,
        "GlobalMemoryBusWidth": 6144,
        "ClockRate": 1_980_000,
        "MultiProcessorCount": 132,
    }
    fake = cupy_with(attributes, "90", 150_109_880_320, "NVIDIA H200")
    monkeypatch.setitem(sys.modules, "cupy", fake)


def test_a_read_of_an_activation_takes_81_microseconds() -> None:
    activation = 8 * 4096 * 4096 * 2
    read = Traffic((Kernel(activation, 0, 0),), 0, activation)
    assert round(1e6 * roofline(**NUMBERS).seconds(read, "bfloat16")) == 81


def test_numbers() -> None:
    found = roofline(**NUMBERS)
    assert (found.bandwidth, found.memory) == (3.3e12, 80 * 10**9)
    assert set(found.flops.values()) == {1e15}
    by_dtype = dict.fromkeys(found.flops, 1e15) | {"float64": 5e13}
    assert roofline(**{**NUMBERS, "flops": by_dtype}).flops == by_dtype


@pytest.mark.parametrize("name", GPUS)
def test_the_two_ceilings_meet_at_the_ridge(name: str) -> None:
    gpu = roofline(name)
    for dtype, peak in gpu.flops.items():
        ridge = gpu.ridge(dtype)
        assert gpu.attainable(ridge, dtype) == pytest.approx(peak)
        assert gpu.attainable(2 * ridge, dtype) == peak
        assert gpu.attainable(ridge / 2, dtype) == pytest.approx(peak / 2)


def test_least_time_of_one_kernel_is_flops_over_what_is_attainable() -> None:
    gpu = roofline("h100")
    for tokens in (128, 8192):
        counted = traffic("attention", (1, 32, tokens, 128), "bfloat16", "flash")
        rate = gpu.attainable(counted.intensity, "bfloat16")
        assert gpu.seconds(counted, "bfloat16") == pytest.approx(counted.flops / rate)
        assert (rate == gpu.flops["bfloat16"]) is (tokens == 8192)


def test_kernels_do_not_overlap() -> None:
    gpu = roofline(bandwidth=10.0, flops=100.0, memory=1)
    bound_by_memory, bound_by_flops = Kernel(15, 5, 10), Kernel(1, 1, 300)
    assert gpu.seconds(Traffic((bound_by_memory, bound_by_flops), 0, 1), "float32") == 2 + 3


def test_numbers_replace_those_of_a_gpu() -> None:
    measured = roofline("h200", bandwidth=4.2e12)
    assert measured.bandwidth == 4.2e12
    assert (measured.flops, measured.memory) == (GPUS["h200"].flops, GPUS["h200"].memory)


@pytest.mark.usefixtures("h200")
def test_device_properties_are_near_the_data_sheet() -> None:
    found, sheet = roofline(0), GPUS["h200"]
    assert found.name == "NVIDIA H200"
    assert found.memory == 150_109_880_320
    assert found.bandwidth == pytest.approx(sheet.bandwidth, rel=0.05)
    for dtype, rate in sheet.flops.items():
        assert found.flops[dtype] == pytest.approx(rate, rel=0.1)


@pytest.mark.usefixtures("h200")
def test_numbers_replace_those_of_a_device() -> None:
    assert roofline(0, bandwidth=4.2e12).bandwidth == 4.2e12


@pytest.mark.usefixtures("h200")
def test_device_that_is_not_there() -> None:
    with pytest.raises(RuntimeError, match="gpu 1: invalid device ordinal"):
        roofline(1)


def test_device_of_an_unknown_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    attributes = {"MemoryClockRate": 1, "GlobalMemoryBusWidth": 8}
    monkeypatch.setitem(sys.modules, "cupy", cupy_with(attributes, "130", 1, "NVIDIA Next"))
    with pytest.raises(RuntimeError, match="compute capability 130 are unknown: give flops"):
        roofline(0)
    assert roofline(0, flops=1e15).bandwidth == 2000


def test_device_without_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(RuntimeError, match=r"cuflash\[cuda13\]"):
        roofline(0)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({}, ValueError, "without a gpu, bandwidth, flops, memory must be given"),
        ({"bandwidth": 1e12}, ValueError, "without a gpu, flops, memory must be given"),
        ({"gpu": "v100"}, ValueError, "gpu 'v100' is unknown; known are t4"),
        ({"gpu": 0.5}, TypeError, "gpu must be an integer"),
        ({**NUMBERS, "bandwidth": 0}, ValueError, "bandwidth must be positive"),
        ({**NUMBERS, "bandwidth": "fast"}, TypeError, "bandwidth must be a real number"),
        ({**NUMBERS, "flops": -1.0}, ValueError, "flops must be positive"),
        ({**NUMBERS, "flops": {"float16": 1e15}}, ValueError, "flops must name float64"),
        ({**NUMBERS, "memory": 0}, ValueError, "memory must be positive"),
        ({**NUMBERS, "memory": 8e10}, TypeError, "memory must be an integer"),
    ],
)
def test_refused(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        roofline(**arguments)
