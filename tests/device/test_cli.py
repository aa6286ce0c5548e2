"""The command line on the device engine."""

import numpy as np
import pytest

from cuflash.cli import main

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels")]


def test_attend_and_softmax_are_those_of_the_host(tmp_path, rng):
    q, k, v = rng.standard_normal((3, 2, 70, 16)).astype(np.float32)
    np.savez(tmp_path / "in.npz", q=q, k=k, v=v, key_lengths=np.array([3, 70]))
    np.save(tmp_path / "x.npy", q)
    for engine in ("host", "device"):
        out = str(tmp_path / engine)
        attend = ["attend", str(tmp_path / "in.npz"), "-o", out + ".npz", "--causal"]
        assert main([*attend, "--engine", engine]) == 0
        softmax = ["softmax", str(tmp_path / "x.npy"), "-o", out + ".npy", "--axis", "1"]
        assert main([*softmax, "--engine", engine]) == 0
    with np.load(tmp_path / "host.npz") as host, np.load(tmp_path / "device.npz") as device:
        for name in ("out", "lse"):
            np.testing.assert_allclose(device[name], host[name], 1e-5, 1e-5)
    y, expected = np.load(tmp_path / "device.npy"), np.load(tmp_path / "host.npy")
    np.testing.assert_allclose(y, expected, 1e-5, 1e-6)


def test_demo_and_info(capsys):
    assert main(["demo", "--engine", "device", "--repeats", "2"]) == 0
    assert capsys.readouterr().out.startswith("engine  device (NVIDIA")
    assert main(["info"]) == 0
    assert "device" in capsys.readouterr().out
