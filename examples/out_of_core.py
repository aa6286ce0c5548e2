"""Attention to keys and values that are larger than memory: streamed from disk, merged exactly.

K and V are files of shape (tokens, heads, features), opened as `numpy.memmap`. A chunk of tokens at
a time is read and attended to, and the partial results are merged by their logsumexp, so that what
is in memory is the queries, the result and two chunks. On a GPU the next chunk is read and copied
while the kernel works on the one before: two streams, and two buffers of pinned memory::

    python examples/out_of_core.py --keys 1000000           # makes K and V in a temporary folder
    python examples/out_of_core.py --folder data --dtype float16   # data/k.npy and data/v.npy
    python examples/out_of_core.py --verify                 # against one call on all keys

The merge is that of the online softmax (Milakov and Gimelshein, 2018, arXiv:1805.02867): the result
differs from that of one call in rounding alone.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import cuflash

#: Bytes of K and V in a chunk, by default: long enough for the bus and the kernel, small beside a
#: GPU's memory.
CHUNK_BYTES = 256 << 20

Progress = Callable[[int, int], None]


class Chunk(NamedTuple):
    """Keys and values of the tokens from `start` on, each (tokens, heads, features)."""

    start: int
    k: Any
    v: Any


def attend(
    q: Any,
    k: np.ndarray,
    v: np.ndarray,
    *,
    chunk: int,
    causal: bool = False,
    progress: Progress = lambda done, total: None,
) -> tuple[Any, Any]:
    """Attention of q to keys and values that need not fit into memory.

    Parameters
    ----------
    q : array, shape (query heads, queries, features)
        NumPy or CuPy: that is where the work is done.
    k, v : numpy.ndarray, shape (tokens, key heads, features)
        Usually memory maps. Query heads share key heads in groups.
    chunk : int
        Tokens in memory at a time.
    causal : bool
        The last query stands at the last key, and none sees later ones.
    progress : callable
        Called with the number of tokens done, and of all.

    Returns
    -------
    out, lse : array
        As `cuflash.flash_attention` of all keys returns them, to rounding.
    """
    tokens = len(k)
    on_device = not isinstance(q, np.ndarray)
    xp = import_module("cupy") if on_device else np
    total: tuple[Any, Any] | None = None
    for start, k_chunk, v_chunk in (device_chunks if on_device else host_chunks)(k, v, chunk):
        # Partial results of 16-bit inputs stay in float32, so that rounding comes once, at the end.
        wide = xp.empty((*q.shape[:-1], v.shape[-1]), np.promote_types(q.dtype, np.float32))
        part = cuflash.flash_attention(
            q,
            k_chunk.swapaxes(0, 1),
            v_chunk.swapaxes(0, 1),
            causal=causal,
            query_offset=tokens - q.shape[-2] - start,
            enable_gqa=True,
            out=wide,
            return_lse=True,
        )
        total = part if total is None else cuflash.merge_attention(*total, *part)
        progress(start + len(k_chunk), tokens)
    assert total is not None, "no tokens are one chunk of none"
    return total[0].astype(q.dtype, copy=False), total[1]


def spans(tokens: int, size: int) -> list[slice]:
    """Cut the tokens into chunks; no tokens are one chunk."""
    return [slice(i, min(i + size, tokens)) for i in range(0, max(tokens, 1), size)]


def host_chunks(k: np.ndarray, v: np.ndarray, size: int) -> Iterator[Chunk]:
    """Yield chunks as views: the operating system reads them as they are used."""
    for span in spans(len(k), size):
        yield Chunk(span.start, k[span], v[span])


class _Buffer:
    """Room for a chunk in pinned memory and on the GPU."""

    def __init__(self, k: np.ndarray, v: np.ndarray, size: int) -> None:
        cupy, cupyx = import_module("cupy"), import_module("cupyx")
        shapes = [(min(size, len(x)), *x.shape[1:]) for x in (k, v)]
        self.pinned = [cupyx.empty_pinned(s, x.dtype) for s, x in zip(shapes, (k, v), strict=True)]
        self.device = [cupy.empty(s, x.dtype) for s, x in zip(shapes, (k, v), strict=True)]
        self.copied = cupy.cuda.Event(disable_timing=True)
        self.used = cupy.cuda.Event(disable_timing=True)


def device_chunks(k: np.ndarray, v: np.ndarray, size: int) -> Iterator[Chunk]:
    """Yield chunks on the GPU; the next one is on its way while the caller works on one.

    A chunk holds until the next is asked for, and is to be used on the stream that is current then.
    """
    cupy = import_module("cupy")
    compute, copy = cupy.cuda.get_current_stream(), cupy.cuda.Stream(non_blocking=True)
    buffers = [_Buffer(k, v, size) for _ in range(2)]
    parts = spans(len(k), size)

    def send(i: int) -> None:
        buffer, span = buffers[i % 2], parts[i]
        count = span.stop - span.start
        buffer.copied.synchronize()  # the copy before last has left the pinned memory
        copy.wait_event(buffer.used)  # and the kernel that it was for has read the GPU's
        for x, pinned, device in zip((k, v), buffer.pinned, buffer.device, strict=True):
            pinned[:count] = x[span]  # reads the file
            device[:count].set(pinned[:count], stream=copy)
        buffer.copied.record(copy)

    copy.wait_event(compute.record())  # the pool may hand out memory that is still being used there
    send(0)
    for i, span in enumerate(parts):
        buffer, count = buffers[i % 2], span.stop - span.start
        compute.wait_event(buffer.copied)
        yield Chunk(span.start, *(x[:count] for x in buffer.device))
        buffer.used.record(compute)
        if i + 1 < len(parts):
            send(i + 1)
    copy.synchronize()  # nothing is in flight when the buffers are freed


class Bar:
    """A progress bar on standard error, for streams of `nbytes` bytes."""

    width = 40

    def __init__(self, nbytes: int) -> None:
        self.nbytes, self.start = nbytes, time.perf_counter()

    def __call__(self, done: int, total: int) -> None:
        """Draw the bar; end the line when all is done."""
        share = done / total if total else 1.0
        rate = share * self.nbytes / max(time.perf_counter() - self.start, 1e-9)
        bar = "#" * round(self.width * share)
        end = "\n" if done == total else ""
        print(
            f"\r[{bar:<{self.width}}] {share:4.0%} of {self.nbytes / 1e9:.2f} GB, "
            f"{rate / 1e9:.2f} GB/s",
            end=end,
            file=sys.stderr,
            flush=True,
        )


def make_files(folder: Path, shape: tuple[int, int, int], dtype: np.dtype) -> None:
    """Write random k.npy and v.npy, a piece at a time."""
    rng = np.random.default_rng(0)
    for name in ("k", "v"):
        file = np.lib.format.open_memmap(folder / f"{name}.npy", "w+", dtype, shape)
        for span in spans(len(file), 1 << 16):
            file[span] = rng.standard_normal(file[span].shape, np.float32)
        file.flush()


def main(argv: Sequence[str] | None = None) -> None:
    """Stream K and V from files and say how long it took."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, help="where k.npy and v.npy are, or are made")
    parser.add_argument("--keys", type=int, default=1 << 17, help="tokens of files to be made")
    parser.add_argument("--heads", type=int, default=4, help="key heads of files to be made")
    parser.add_argument("--features", type=int, default=64, help="of files to be made")
    parser.add_argument("--dtype", choices=("float64", "float32", "float16"), default="float32")
    parser.add_argument("--queries", type=int, default=128)
    parser.add_argument("--group", type=int, default=1, help="query heads of a key head")
    parser.add_argument("--chunk", type=int, help="tokens in memory at a time (default: 256 MB)")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--array-library", choices=("numpy", "cupy"), default="numpy")
    parser.add_argument("--verify", action="store_true", help="compare with one call on all keys")
    args = parser.parse_args(argv)
    try:
        xp = import_module(args.array_library)
        if xp is not np:
            xp.cuda.runtime.getDeviceCount()  # raises if there is none
    except (ImportError, RuntimeError) as error:
        parser.error(f"--array-library {args.array_library}: {error}")

    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        if not (folder / "k.npy").is_file():
            make_files(folder, (args.keys, args.heads, args.features), np.dtype(args.dtype))
        k, v = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("k", "v"))
        shape = (k.shape[1] * args.group, args.queries, k.shape[2])
        q = xp.asarray(np.random.default_rng(1).standard_normal(shape, np.float32).astype(k.dtype))
        nbytes = k.nbytes + v.nbytes
        chunk = args.chunk or max(1, CHUNK_BYTES * len(k) // max(nbytes, 1))
        bar = Bar(nbytes)
        start = time.perf_counter()
        if xp is np:
            out, lse = attend(q, k, v, chunk=chunk, causal=args.causal, progress=bar)
        else:
            with xp.cuda.Stream(non_blocking=True) as stream:
                stream.wait_event(xp.cuda.Stream.null.record())
                out, lse = attend(q, k, v, chunk=chunk, causal=args.causal, progress=bar)
                stream.synchronize()
        seconds = time.perf_counter() - start
        print(
            f"{len(k)} keys in {len(spans(len(k), chunk))} chunks: {seconds:.2f} s, "
            f"{nbytes / seconds / 1e9:.2f} GB/s"
        )
        if args.verify:
            whole = cuflash.flash_attention(
                q,
                xp.asarray(k).swapaxes(0, 1),
                xp.asarray(v).swapaxes(0, 1),
                causal=args.causal,
                enable_gqa=True,
                return_lse=True,
            )
            for name, ours, theirs in zip(("out", "lse"), (out, lse), whole, strict=True):
                error = float(abs(ours.astype(np.float64) - theirs.astype(np.float64)).max())
                print(f"largest difference of {name} to one call on all keys: {error:.1e}")


if __name__ == "__main__":
    main()
