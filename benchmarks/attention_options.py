"""What options of attention cost on a GPU, against the same call without them.

``python -m benchmarks.attention_options`` takes about a minute and a half and writes
``benchmarks/results/<gpu>/attention_options.csv`` after every problem: bfloat16, B * T = 16384
tokens, H * D = 2048, by each kernel family that ``--methods`` names.

*speedup* is the rate over that of the plain call (of the same window without a bound on the left,
for windows; of the dense call, for sequences end to end), median of ratios within a round, so that
1 / speedup is what the option costs. *target* is the least: a mask or a bias may cost what reading
it once takes at the rate of a device copy in the same run, and 15 %.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import cuflash
from benchmarks.attention import COPY, COPY_BYTES, RESULTS
from cuflash.bench import device, peers, problems, rows, timing
from cuflash.bench.problems import AttentionShape

#: (tokens, d) of the problems.
SHAPES = ((512, 64), (4096, 64), (512, 128), (4096, 128))
#: The window on the left, as a part of the tokens, and the tiles in which what it shows is counted.
WINDOW_PART, WINDOW_TILE = 8, 128


class Option(NamedTuple):
    """Keywords of a call, the name of the one it is held against, and what it may cost of that."""

    name: str
    keywords: dict[str, Any]
    base: str
    most: float
    bytes: int = 0
    """Read beside q, k and v: what that takes is allowed on top."""


def options_of(shape: AttentionShape) -> Iterator[Option]:
    """Yield options of a problem, their arrays on the current device."""
    pairs = (shape.tokens, shape.tokens)
    of_heads = (shape.heads, *pairs)
    yield Option("plain", {}, "plain", 1)
    yield Option("causal", {"causal": True}, "causal", 1)
    slopes = abs(device.normal((shape.heads,), "float32", 0)) / 8
    yield Option("alibi", {"alibi_slopes": slopes}, "plain", 1.10)
    yield Option("softcap", {"softcap": 30.0}, "plain", 1.25)
    for name, size in (("", pairs), (" of heads", of_heads)):
        bias = device.normal(size, "float32", 1)
        yield Option(f"bias{name}", {"bias": bias}, "plain", 1.15, bias.nbytes)
        mask = bias > -1
        yield Option(f"mask{name}", {"mask": mask}, "plain", 1.15, mask.nbytes)
    left = shape.tokens // WINDOW_PART
    part = seen_tiles(shape.tokens, left) / seen_tiles(shape.tokens, shape.tokens)
    yield Option("window", {"causal": True, "window": (left, None)}, "causal", 1.15 * part)


def seen_tiles(tokens: int, left: int) -> int:
    """Return the tiles of queries and keys that a causal window shows anything of."""
    first = np.arange(0, tokens, WINDOW_TILE)
    lowest = np.maximum(first - left, 0) // WINDOW_TILE
    return int((first // WINDOW_TILE - lowest + 1).sum())


def measure(
    shape: AttentionShape, method: str, *, rounds: int = 7, window: float = 0.03
) -> list[rows.Row]:
    """Measure one problem with each option; none of them where the family cannot run it."""
    q, k, v = device.attention_inputs(shape, 1)[0]
    options = list(options_of(shape))
    calls: dict[str, Callable[[], Any]] = {}
    for option in options:
        keywords = {"method": method, **option.keywords}
        calls[option.name] = partial(cuflash.flash_attention, q, k, v, **keywords)
    calls["sequences"] = sequences(shape, (q, k, v), method)
    options.append(Option("sequences", {}, "plain", 1.05))
    for name, call in list(calls.items()):
        try:
            call()
        except ValueError as error:
            print(f"{method}, {name}, is left out: {error}", flush=True)
            del calls[name]
    calls[COPY] = device.copy(device.scratch(COPY_BYTES))
    result = timing.compare(calls, clock=device.clock(), rounds=rounds, window=window)

    seconds = {name: float(np.median(times)) for name, times in result.seconds.items()}
    work = problems.attention_flops(shape) / 1e12
    found = []
    for option in options:
        if option.name not in calls or option.base not in calls:
            continue
        reading = option.bytes / (2 * COPY_BYTES) * seconds[COPY]
        wanted = 1 / (option.most + reading / seconds[option.base])
        row = {
            "method": method,
            "option": option.name,
            "dtype": shape.dtype,
            "B": shape.batch,
            "H": shape.heads,
            "T": shape.tokens,
            "D": shape.d,
            **rows.timing(result, option.name, option.base, work, "TFLOP/s", peer_work=work),
        }
        compared = option.name != option.base
        row["target"] = round(wanted, 3) if compared else ""
        row["met"] = problems.meets(row["speedup"], wanted) if compared else ""
        found.append(row)
    return found


def sequences(shape: AttentionShape, arrays: Sequence[Any], method: str) -> Callable[[], Any]:
    """Return the plain call with the batch's entries end to end, as sequences of equal lengths."""
    tokens = shape.batch * shape.tokens
    packed = [x.swapaxes(0, 1).reshape(shape.heads, tokens, shape.d) for x in arrays]
    ends = device.given(np.arange(0, tokens + 1, shape.tokens))
    return partial(cuflash.flash_attention_varlen, *packed, ends, ends, method=method)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.attention_options",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--methods", nargs="+", default=["mma", "auto"])
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to write to")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin nothing after this")
    chosen = parser.parse_args(arguments)
    record = rows.Record("attention_options", chosen.results, rows.device_environment)
    shapes = [
        AttentionShape(problems.DEVICE_TOKENS // tokens, problems.DEVICE_WIDTH // d, tokens, d,
                       dtype="bfloat16")
        for tokens, d in SHAPES
    ]  # fmt: skip
    problems_of = [(shape, method) for shape in shapes for method in chosen.methods]
    for shape, method in timing.within(chosen.seconds, problems_of):
        title = f"Options, {method}, bfloat16, D = {shape.d}, T = {shape.tokens}"
        record.add(title, measure(shape, method))
        peers.forget()
    record.close()


if __name__ == "__main__":
    main()
