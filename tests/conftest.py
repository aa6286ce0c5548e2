"""Settings and fixtures of the whole suite."""

import os
import zlib

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

from cuflash.bench import device, peers, problems, rows, timing
from tests import gpu_record

# Several devices of the CPU for JAX, which reads this when its first array is made.
os.environ["XLA_FLAGS"] = " ".join(
    [*os.environ.get("XLA_FLAGS", "").split(), "--xla_force_host_platform_device_count=8"]
)

# ci: the same examples in every run, so that a failure is the change's own.
# dev, thorough: new examples in every run; choose one by --hypothesis-profile.
# No deadline, no verdict on slowness: examples differ in size by orders of magnitude, and
# machines are shared.
_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow], "print_blob": True}
settings.register_profile("ci", derandomize=True, max_examples=50, **_COMMON)
settings.register_profile("dev", max_examples=50, **_COMMON)
settings.register_profile("thorough", max_examples=1000, **_COMMON)
settings.load_profile("ci")


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Return a generator whose seed depends on the test's name alone, not on the order of tests."""
    return np.random.default_rng(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture
def numpy_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the benchmarks of the device run on NumPy arrays and the host engine."""

    def normal(shape: tuple[int, ...], dtype: str, seed: int) -> np.ndarray:
        x = np.random.default_rng(seed).standard_normal(shape)
        return x.astype(problems.dtype_of(dtype))

    monkeypatch.setattr(device, "normal", normal)
    monkeypatch.setattr(device, "given", np.copy)
    monkeypatch.setattr(device, "copy", lambda x: x.copy)
    monkeypatch.setattr(device, "matmul", lambda dtype: np.ones(16).sum)
    monkeypatch.setattr(device, "scratch", lambda nbytes: np.empty(nbytes, np.uint8))
    monkeypatch.setattr(device, "captured", lambda call: call)
    monkeypatch.setattr(device, "clock", timing.HostClock)
    monkeypatch.setattr(device, "softmax_regime", lambda dtype, rows, n, axis: "fused")
    monkeypatch.setattr(device, "warm_softmax", lambda problems, methods, elements: None)
    monkeypatch.setattr(peers, "forget", lambda: None)
    monkeypatch.setattr(rows, "device_environment", lambda: {"machine": "No GPU"})


def pytest_configure(config: pytest.Config) -> None:
    """Watch a run of the whole GPU suite."""
    gpu_record.watch(config)
