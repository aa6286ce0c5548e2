"""Pictures of the model and of result files, by matplotlib (the `plot` extra)."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter, LogFormatter

from ..bench.problems import AttentionShape, attention_flops, softmax_bytes
from .roofline import Roofline
from .traffic import METHODS, Traffic, traffic
from .workload import COLORS, LABELS, TOKENS, Workload

__all__ = ["attention", "memory", "roofline", "softmax", "traffic_over_tokens"]

Row = Mapping[str, str]


def memory(work: Workload, gpu: Roofline) -> Figure:
    """Draw attention's memory and least time over T, and where the GPU's memory ends.

    Parameters
    ----------
    work : Workload
        Sizes and dtype.
    gpu : Roofline
        Its memory is a line, its other ceilings give the times.

    Returns
    -------
    matplotlib.figure.Figure
    """
    figure = Figure(figsize=(12, 5), layout="constrained")
    figure.suptitle(f"Attention, {work}")
    left, right = figure.subplots(1, 2)
    # The labels of two crossings that are near each other part to both sides.
    above, below = ("right", (-6, 8)), ("left", (6, -14))
    for method in METHODS["attention"]:
        counted = [work.at(tokens, method) for tokens in TOKENS]
        style = {"color": COLORS[method], "label": LABELS[method], "marker": ".", "ms": 4}
        left.plot(TOKENS, [each.memory_bytes for each in counted], **style)
        right.plot(TOKENS, [gpu.seconds(each, work.dtype) for each in counted], **style)
        limit = work.limit(method, gpu.memory)
        if TOKENS[0] <= limit <= TOKENS[-1]:
            left.plot([limit], [gpu.memory], "o", color=COLORS[method], ms=7)
            side, offset = below if method == "scores_fused" else above
            left.annotate(
                f"T = {limit:,}",
                (limit, gpu.memory),
                xytext=offset,
                textcoords="offset points",
                ha=side,
                fontsize="small",
                color=COLORS[method],
            )
    label = f"{gpu.name}: {gpu.memory / 1e9:.0f} GB"
    left.axhline(gpu.memory, color="black", ls="--", lw=1, label=label)
    _over_tokens(left, "memory: q, k, v, out and what is extra", "B")
    _over_tokens(right, f"least time on {gpu.name}", "s")
    return figure


def traffic_over_tokens(work: Workload) -> Figure:
    """Draw the bytes that attention moves over T, and those of other chains next to fused ones.

    Parameters
    ----------
    work : Workload
        Sizes and dtype.

    Returns
    -------
    matplotlib.figure.Figure
    """
    figure = Figure(figsize=(12, 5), layout="constrained")
    left, right = figure.subplots(1, 2)
    for method in METHODS["attention"]:
        moved = [work.at(tokens, method).moved_bytes for tokens in TOKENS]
        left.plot(TOKENS, moved, ".-", ms=4, color=COLORS[method], label=LABELS[method])
    left.set_title(f"Attention, {work}")
    _over_tokens(left, "bytes through HBM", "B")

    names, ratios, colors = [], [], []
    for op, shape in _chains(work, 4096).items():
        moved_by = {m: traffic(op, shape, work.dtype, m).moved_bytes for m in METHODS[op]}
        for method, moved_bytes in moved_by.items():
            names.append(f"{op}\n{method}")
            ratios.append(moved_bytes / moved_by["fused"])
            colors.append("tab:blue" if moved_bytes <= moved_by["fused"] else "tab:red")
    bars = right.barh(names, ratios, color=colors)
    right.bar_label(bars, fmt="%.2f", padding=3)
    right.invert_yaxis()
    right.set_xlim(0, 1.1 * max(ratios))
    right.set_xlabel("bytes through HBM, fused = 1")
    right.set_title(f"Other chains, {_size(4096)} tokens")
    return figure


def roofline(work: Workload, gpu: Roofline, tokens: int) -> Figure:
    """Draw the ceilings of a GPU and each kernel as a point under them, before and after fusion.

    Parameters
    ----------
    work : Workload
        Sizes and dtype.
    gpu : Roofline
        The ceilings.
    tokens : int
        T.

    Returns
    -------
    matplotlib.figure.Figure
    """
    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.add_subplot(
        xlabel="arithmetic intensity, FLOP a byte through HBM", ylabel="FLOP/s at the least time"
    )
    chains: dict[str, tuple[Traffic, Traffic]] = {
        op: (traffic(op, s, work.dtype, METHODS[op][0]), traffic(op, s, work.dtype, "fused"))
        for op, s in _chains(work, tokens).items()
    }
    chains["attention"] = (work.at(tokens, "materialized"), work.at(tokens, "flash"))
    vector = traffic("matmul", (work.heads * work.d, work.heads * work.d, 1), work.dtype, "single")
    chains["matrix times vector"] = (vector, vector)

    intensities = [each.intensity for pair in chains.values() for each in pair]
    ridge = gpu.ridge(work.dtype)
    span = np.geomspace(min(*intensities, ridge) / 4, 4 * max(*intensities, ridge), 257)
    roof = [gpu.attainable(x, work.dtype) for x in span]
    axes.loglog(span, roof, color="black", lw=1.2)
    axes.axvline(ridge, color="black", ls=":", lw=1)
    axes.annotate(
        f"ridge: {ridge:.0f} FLOP a byte",
        (ridge, min(roof)),
        xytext=(4, 4),
        textcoords="offset points",
        fontsize="small",
    )
    for number, (op, (before, after)) in enumerate(chains.items()):
        start, end = (
            (each.intensity, each.flops / gpu.seconds(each, work.dtype)) for each in (before, after)
        )
        color = f"C{number}"
        axes.plot(*start, "o", color=color, mfc="white", ms=8)
        axes.plot(*end, "o", color=color, ms=8, label=op)
        if start != end:
            arrow = {"arrowstyle": "->", "color": color, "connectionstyle": "arc3,rad=0.3"}
            axes.annotate("", end, start, arrowprops={**arrow, "shrinkA": 5, "shrinkB": 5})
    axes.set_title(
        f"{gpu.name}: {gpu.bandwidth / 1e12:.2f} TB/s, {gpu.flops[work.dtype] / 1e12:.0f} TFLOP/s\n"
        f"T = {tokens:,}, {work}; hollow before fusion, full after"
    )
    axes.legend(loc="upper left", fontsize="small")
    axes.grid(alpha=0.3)
    return figure


def _chains(work: Workload, tokens: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of what stands around attention in a transformer, by operation."""
    width = work.heads * work.d
    return {
        "softmax": (work.batch, work.heads, tokens, tokens),
        "dropout_bias_layer_norm": (work.batch, tokens, width),
        # As narrow as a head: with a small K, an epilogue weighs most.
        "matmul_bias_activation": (work.batch * tokens, work.d, width),
    }


def softmax(rows: Sequence[Row]) -> Figure:
    """Draw measured rates of softmax over row length, a panel for each dtype.

    Parameters
    ----------
    rows : sequence of mapping
        Of a result file: method, dtype, rows, N, ms, and peer with peer ms. If they tell operation
        and axis, those of softmax over the last axis are drawn.

    Returns
    -------
    matplotlib.figure.Figure

    Raises
    ------
    ValueError
        No row is of this kind.
    """
    panels: dict[str, _Lines] = defaultdict(_lines)
    for row in rows:
        if row.get("operation", "softmax") != "softmax" or row.get("axis", "-1") != "-1":
            continue
        if row.get("N"):
            n, dtype = _count(row, "N"), row["dtype"]
            moved = softmax_bytes(_count(row, "rows") * n, np.dtype(dtype).itemsize)
            for name, seconds in _measured(row):
                panels[dtype][name][n].append(moved / seconds / 1e12)
    figure, colors = _panels(panels, "softmax", height=4.5), _colors(panels)
    for axes, (dtype, lines) in zip(figure.axes, panels.items(), strict=True):
        axes.set_title(f"softmax, {dtype}")
        _draw(axes, lines, colors)
        axes.set(ylabel="TB/s, one read and one write an element", ylim=0)
        _powers_of_two(axes, "row length N")
        axes.legend(fontsize="small")
    return _signed(figure, rows)


def attention(rows: Sequence[Row]) -> Figure:
    """Draw measured times and rates of attention over T, a column for each problem.

    Parameters
    ----------
    rows : sequence of mapping
        Of a result file: method, dtype, B, H, T, D, causal, ms, and peer with peer ms. Of several
        batch sizes at one T the median is drawn.

    Returns
    -------
    matplotlib.figure.Figure

    Raises
    ------
    ValueError
        No row is of this kind.
    """
    times: dict[str, _Lines] = defaultdict(_lines)
    rates: dict[str, _Lines] = defaultdict(_lines)
    for row in rows:
        if not row.get("T") or not row.get("ms"):
            continue
        batch, heads, tokens, d = (_count(row, name) for name in "BHTD")
        causal = row["causal"] == "True"
        flops = attention_flops(AttentionShape(batch, heads, tokens, d, causal))
        panel = f"{row['dtype']}, D = {d}{', causal' if causal else ''}"
        for name, seconds in _measured(row):
            if name != "matmul":  # a ceiling of the same run, no attention
                times[panel][name][tokens].append(seconds / (batch * heads))
                rates[panel][name][tokens].append(flops / seconds / 1e12)
    figure, colors = _panels(times, "attention", height=4, rows_each=2), _colors(times)
    upper, lower = figure.axes[: len(times)], figure.axes[len(times) :]
    for axes, below, panel in zip(upper, lower, times, strict=True):
        axes.set_title(panel)
        _draw(axes, times[panel], colors)
        _draw(below, rates[panel], colors)
        _over_tokens(axes, "time a head", "s")
        below.set(ylabel="TFLOP/s", ylim=0)
        _powers_of_two(below, "tokens T")
    return _signed(figure, rows)


#: Values by competitor and size.
_Lines = dict[str, dict[int, list[float]]]


def _lines() -> _Lines:
    return defaultdict(lambda: defaultdict(list))


def _count(row: Row, column: str) -> int:
    """Return a positive integer; ValueError naming the column otherwise."""
    try:
        count = int(row[column])
    except (TypeError, ValueError):
        count = 0
    if count < 1:
        raise ValueError(f"{column} must be a positive integer, got {row[column]!r}")
    return count


def _measured(row: Row) -> list[tuple[str, float]]:
    """Return the competitors of a row and their seconds; ValueError if one is no time."""
    found = []
    for name, column in ((row["method"], "ms"), (row.get("peer"), "peer ms")):
        text = row.get(column)
        if name and text:
            try:
                seconds = 1e-3 * float(text)
            except ValueError:
                seconds = math.nan
            if not 0 < seconds < math.inf:
                raise ValueError(f"{column} must be a positive number, got {text!r}")
            found.append((name, seconds))
    return found


def _panels(
    panels: Mapping[str, object], subject: str, height: float, rows_each: int = 1
) -> Figure:
    if not panels:
        raise ValueError(f"there is no row of {subject}")
    count = len(panels)
    figure = Figure(figsize=(max(5 * count, 7), height * rows_each), layout="constrained")
    figure.subplots(rows_each, count)
    return figure


def _draw(axes: Any, lines: _Lines, colors: Mapping[str, str]) -> None:
    for name, values in sorted(lines.items()):
        sizes = sorted(values)
        medians = [statistics.median(values[n]) for n in sizes]
        axes.plot(sizes, medians, ".-", color=colors[name], label=name)


def _colors(panels: Mapping[str, _Lines]) -> dict[str, str]:
    """Return a competitor's colour, the same in every panel."""
    names = sorted({name for lines in panels.values() for name in lines})
    return {name: f"C{number}" for number, name in enumerate(names)}


def _signed(figure: Figure, rows: Sequence[Row]) -> Figure:
    machines = dict.fromkeys(row["machine"] for row in rows if row.get("machine"))
    figure.suptitle(", ".join(machines))
    return figure


class _MinorFormatter(LogFormatter):
    """The labels between powers of ten that a short axis needs, with prefix and unit."""

    def __init__(self, unit: str) -> None:
        super().__init__()
        self._with_prefix = EngFormatter(unit)

    def __call__(self, x: float, pos: int | None = None) -> str:
        return self._with_prefix(x) if super().__call__(x, pos) else ""


def _over_tokens(axes: Any, label: str, unit: str) -> None:
    """Finish an axes over T whose other axis is logarithmic, too."""
    axes.set(ylabel=label, yscale="log")
    axes.yaxis.set_major_formatter(EngFormatter(unit))
    axes.yaxis.set_minor_formatter(_MinorFormatter(unit))
    _powers_of_two(axes, "tokens T")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")


def _powers_of_two(axes: Any, label: str) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: _size(x)))
    axes.set_xlabel(label)


def _size(count: float) -> str:
    """Return 4096 as 4k, as sizes are spoken of."""
    for power, prefix in ((20, "M"), (10, "k")):
        if count >= 2**power:
            return f"{count / 2**power:g}{prefix}"
    return f"{count:g}"
