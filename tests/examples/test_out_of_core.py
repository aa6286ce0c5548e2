"""Attention to keys streamed from disk: against one call, and the order of copies and kernels."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash.testing.bounds import assert_attention_close, expect_attention
from examples import out_of_core


def files(folder: Path, shape: tuple[int, int, int], dtype: str) -> list[np.ndarray]:
    out_of_core.make_files(folder, shape, np.dtype(dtype))
    return [np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("k", "v")]


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("chunk", [7, 64, 1000])
@pytest.mark.parametrize("causal", [False, True])
def test_chunks_merge_to_one_call(
    dtype: str, chunk: int, causal: bool, rng: np.random.Generator
) -> None:
    k, v = (rng.standard_normal((100, 2, n)).astype(dtype) for n in (8, 5))
    q = rng.standard_normal((4, 9, 8)).astype(dtype)
    seen: list[tuple[int, int]] = []
    out, lse = out_of_core.attend(
        q, k, v, chunk=chunk, causal=causal, progress=lambda *x: seen.append(x)
    )
    operands = q, k.swapaxes(0, 1), v.swapaxes(0, 1)
    assert out.dtype == dtype
    assert_attention_close(out, lse, expect_attention(*operands, causal=causal, enable_gqa=True))
    assert [done for done, _ in seen] == [min(i + chunk, 100) for i in range(0, 100, chunk)]
    assert {total for _, total in seen} == {100}


def test_no_keys_are_an_empty_result() -> None:
    k = np.zeros((0, 2, 8), np.float32)
    out, lse = out_of_core.attend(np.ones((2, 3, 8), np.float32), k, k, chunk=4)
    assert (out == 0).all()
    assert (lse == -np.inf).all()


def test_program_streams_files_and_verifies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--keys", "1000", "--heads", "2", "--features", "16", "--queries", "5"]
    folder = ["--folder", str(tmp_path), "--group", "2", "--chunk", "300", "--causal", "--verify"]
    out_of_core.main([*sizes, *folder])
    printed = capsys.readouterr()
    assert "1000 keys in 4 chunks" in printed.out
    errors = [float(line.split()[-1]) for line in printed.out.splitlines() if "difference" in line]
    assert len(errors) == 2
    assert max(errors) < 1e-5
    assert "100% of 0.00 GB" in printed.err
    assert printed.err.endswith("\n")
    before = (tmp_path / "k.npy").stat().st_mtime_ns
    out_of_core.main([*sizes, *folder])
    assert (tmp_path / "k.npy").stat().st_mtime_ns == before, "files that are there are read"


# ------------------------------------------------------------------------------- copies and kernels


class Queue:
    """A stream that does nothing until it must: what a GPU may do at the latest."""

    def __init__(self, non_blocking: bool = False) -> None:
        self.steps: list[Callable[[], None]] = []

    def run(self, count: int | None = None) -> None:
        """Do the first steps, or all."""
        steps = self.steps[:count]
        del self.steps[:count]
        for step in steps:
            step()

    def add(self, step: Callable[[], None]) -> None:
        self.steps.append(step)

    def record(self) -> "Mark":
        return Mark().record(self)

    def wait_event(self, event: "Mark") -> None:
        state = event.state
        self.add(lambda: event.reach(state))

    def synchronize(self) -> None:
        self.run()


class Mark:
    """An event: a place in a queue, which those who wait for it make the queue reach."""

    def __init__(self, disable_timing: bool = False) -> None:
        self.state: dict[str, Any] = {"reached": True, "queue": None}

    def record(self, queue: Queue) -> "Mark":
        state: dict[str, Any] = {"reached": False, "queue": queue}
        queue.add(lambda: state.update(reached=True))
        self.state = state
        return self

    def reach(self, state: dict[str, Any]) -> None:
        while not state["reached"]:
            state["queue"].run(1)

    def synchronize(self) -> None:
        self.reach(self.state)


class DeviceArray:
    """Memory of the simulated GPU."""

    def __init__(self, memory: np.ndarray) -> None:
        self.memory = memory

    def __getitem__(self, index: Any) -> "DeviceArray":
        return DeviceArray(self.memory[index])

    def set(self, values: np.ndarray, stream: Queue) -> None:
        stream.add(lambda: np.copyto(self.memory, values))


@pytest.mark.parametrize("early", ["", "copies", "kernels"])
@pytest.mark.parametrize("tokens", [0, 1, 5, 6, 29])
def test_no_buffer_is_overwritten_or_read_too_early(
    early: str, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With streams that run as late as they may, and one of them as early as its waits allow."""
    compute, streams = Queue(), []

    def stream(non_blocking: bool) -> Queue:
        streams.append(Queue())
        return streams[-1]

    def empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        return np.full(shape, -1, dtype)

    cuda = SimpleNamespace(Event=Mark, Stream=stream, get_current_stream=lambda: compute)
    fake = SimpleNamespace(cuda=cuda, empty=lambda *x: DeviceArray(empty(*x)))
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setitem(sys.modules, "cupyx", SimpleNamespace(empty_pinned=empty))

    k = np.arange(tokens * 6).reshape(tokens, 2, 3)
    v = -k
    seen: list[tuple[int, np.ndarray, np.ndarray]] = []
    for start, k_chunk, v_chunk in out_of_core.device_chunks(k, v, 5):
        chunk = (k_chunk.memory, v_chunk.memory)
        compute.add(lambda start=start, chunk=chunk: seen.append((start, *map(np.copy, chunk))))
        if early:
            (streams[0] if early == "copies" else compute).run()
    compute.run()
    assert [start for start, *_ in seen] == list(range(0, max(tokens, 1), 5))
    np.testing.assert_array_equal(np.concatenate([a for _, a, _ in seen]), k)
    np.testing.assert_array_equal(np.concatenate([b for _, _, b in seen]), v)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("causal", [False, True])
def test_on_a_gpu(dtype: str, causal: bool, tmp_path: Path, rng: np.random.Generator) -> None:
    import cupy

    k, v = files(tmp_path, (50_000, 2, 64), dtype)
    q = cupy.asarray(rng.standard_normal((4, 100, 64), np.float32).astype(dtype))
    whole = [cupy.asarray(x).swapaxes(0, 1) for x in (k, v)]
    expected = cuflash.flash_attention(q, *whole, causal=causal, enable_gqa=True, return_lse=True)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        got = out_of_core.attend(q, k, v, chunk=3001, causal=causal)
        stream.synchronize()
    # Both are within the accuracy contract of what is exact, for scores up to 8.
    eps, eps_acc = float(np.finfo(dtype).eps) / 2, float(np.finfo(np.float32).eps) / 2
    bound = 2 * (4 * eps + 4 * eps_acc * 9) * float(abs(v).max())
    for ours, theirs, most in zip(got, expected, (bound, 2 * 4 * eps_acc * 32), strict=True):
        assert float(abs(ours.astype("f8") - theirs.astype("f8")).max()) <= most
