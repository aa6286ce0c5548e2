"""Host time of one call from Python on CuPy arrays, and which stages of the call it goes to.

``python -m benchmarks.overhead`` takes about 20 seconds and writes
``benchmarks/results/<gpu>/overhead.csv``. The problems are so small that the GPU never makes the
host wait. The first call, which compiles, is not counted.

*us* is the median of many calls as they are. The stages are medians of other calls, in which the
functions named in `STAGES` are wrapped in a timer; *rest* is what these calls spent elsewhere.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from time import perf_counter_ns
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

import cuflash
from cuflash.bench import device, problems, rows

RESULTS = Path(__file__).parent / "results"

#: Calls of each kind, and after how many the GPU's queue is emptied, outside the measured time.
CALLS, BATCH = 2000, 100

#: Stages of a call, in order: the function that each is, where the call looks it up.
STAGES = {
    "attention": {
        "enter": ("cuflash._attention", "enter"),
        "problem": ("cuflash.problem", "AttentionProblem.of"),
        "outputs": ("cuflash._attention", "_check_outputs"),
        "allocate": ("cuflash.device.engine", "empty"),
        "plan": ("cuflash.device.attention", "plan_attention"),
        "fill": ("cuflash.device.parameters", "Slots.fill"),
        "launch": ("cuflash.device.executor", "CurrentDevice.launch"),
    },
    "softmax": {
        "enter": ("cuflash.interop", "enter"),
        "problem": ("cuflash.problem", "SoftmaxProblem.of"),
        "outputs": ("cuflash.interop", "refuse_overlap"),
        "allocate": ("cuflash.device.engine", "empty"),
        "plan": ("cuflash.device.softmax", "plan_softmax"),
        "fill": ("cuflash.device.plans", "SoftmaxPlan.parameters"),
        "launch": ("cuflash.device.executor", "CurrentDevice.launch"),
    },
}

Stages = Mapping[str, tuple[str, str]]


class Case(NamedTuple):
    """A call to be timed: its family, what is special about it, and the call."""

    family: str
    options: str
    call: Callable[[], Any]


def cases() -> list[Case]:
    """Return calls on 4-D CuPy arrays with different options."""
    import cupy

    q, k, v = device.normal((3, 2, 8, 64, 64), "float32", seed=0)
    out, lse = cupy.empty_like(q), cupy.empty(q.shape[:-1], np.float32)
    mask = cupy.ones((64, 64), np.bool)
    bias = device.normal((8, 64, 64), "float32", seed=1)
    slopes = cupy.full(8, 0.5, np.float32)
    lengths = cupy.full((2, 1), 40, np.int32)
    bytes_needed = cuflash.workspace_size(q, k, v, num_splits=2)
    workspace = cupy.empty(bytes_needed, np.uint8)
    attend = partial(cuflash.flash_attention, q, k, v)
    torch_order = partial(cuflash.flash_attention, *(x.swapaxes(1, 2) for x in (q, k, v)))
    few_keys = partial(cuflash.flash_attention, q, k[:, :2], v[:, :2], enable_gqa=True)
    where = cupy.ones(64, np.bool)
    return [
        Case("attention", "", attend),
        Case("attention", "out=", partial(attend, out=out)),
        Case("attention", "out=, lse=", partial(attend, out=out, lse=lse)),
        Case("attention", "causal", partial(attend, causal=True)),
        Case("attention", "causal, window", partial(attend, causal=True, window=(16, 0))),
        Case("attention", "swapped axes", torch_order),
        Case("attention", "enable_gqa", few_keys),
        Case("attention", "key_lengths on the host", partial(attend, key_lengths=40)),
        Case("attention", "key_lengths on the device", partial(attend, key_lengths=lengths)),
        Case("attention", "mask, bias", partial(attend, mask=mask, bias=bias)),
        Case("attention", "alibi, softcap", partial(attend, alibi_slopes=slopes, softcap=30.0)),
        Case("attention", "2 splits", partial(attend, num_splits=2)),
        Case(
            "attention",
            "2 splits, out=, workspace=",
            partial(attend, num_splits=2, out=out, workspace=workspace),
        ),
        Case("softmax", "", partial(cuflash.softmax, q)),
        Case("softmax", "out=", partial(cuflash.softmax, q, out=out)),
        Case("softmax", "where=", partial(cuflash.softmax, q, where=where)),
        Case("softmax", "naive", partial(cuflash.softmax, q, method="naive")),
        Case("softmax", "axis 1", partial(cuflash.softmax, q, axis=1)),
    ]


def measure(
    case: Case, synchronize: Callable[[], object], calls: int = CALLS, stages: Stages | None = None
) -> rows.Row:
    """Return the median microseconds of a call, and of each stage; 0 for one that it lacks."""
    stages = STAGES[case.family] if stages is None else stages
    case.call()
    whole = [total for total, _ in run(case.call, synchronize, calls, {})]
    timed = run(case.call, synchronize, calls, stages)
    spent = {name: np.median([parts[name] for _, parts in timed]) / 1e3 for name in stages}
    rest = np.median([total - sum(parts.values()) for total, parts in timed]) / 1e3
    target = problems.CALL_MICROSECONDS[case.family]
    lower, median, upper = np.quantile(whole, (0.25, 0.5, 0.75)) / 1e3
    return {
        "call": case.family,
        "options": case.options,
        "us": float(median),
        "lower": float(lower),
        "upper": float(upper),
        **{name: float(x) for name, x in spent.items()},
        "rest": float(rest),
        "target": target,
        "met": bool(median <= target),
    }


def run(
    call: Callable[[], Any], synchronize: Callable[[], object], calls: int, stages: Stages
) -> list[tuple[int, dict[str, int]]]:
    """Return, for each call, its nanoseconds and those that it spent in each stage."""
    found: list[tuple[int, dict[str, int]]] = []
    parts = dict.fromkeys(stages, 0)
    with ExitStack() as stack:
        for name, (module, path) in stages.items():
            *owners, attribute = path.split(".")
            owner = importlib.import_module(module)
            for step in owners:
                owner = getattr(owner, step)
            wrapped = timer(getattr(owner, attribute), parts, name)
            stack.enter_context(mock.patch.object(owner, attribute, wrapped))
        for i in range(calls):
            if i % BATCH == 0:
                synchronize()
            before = dict(parts)
            began = perf_counter_ns()
            call()
            taken = perf_counter_ns() - began
            found.append((taken, {name: parts[name] - before[name] for name in parts}))
    synchronize()
    return found


def timer(function: Callable[..., Any], parts: dict[str, int], name: str) -> Callable[..., Any]:
    """Return the function with its time added to ``parts[name]``."""

    def timed(*args: Any, **options: Any) -> Any:
        began = perf_counter_ns()
        try:
            return function(*args, **options)
        finally:
            parts[name] += perf_counter_ns() - began

    return timed


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write the results."""
    import cupy

    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.overhead",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--calls", type=int, default=CALLS, help=f"of each kind (default {CALLS})")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to write to")
    chosen = parser.parse_args(arguments)
    record = rows.Record("overhead", chosen.results, rows.device_environment)
    synchronize = cupy.cuda.get_current_stream().synchronize
    record.add("Host time", [measure(case, synchronize, chosen.calls) for case in cases()])
    record.close()


if __name__ == "__main__":
    main()
