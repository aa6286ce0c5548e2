"""Figures of result files. They need matplotlib, which is imported when one is drawn."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import sqrt
from typing import Any

from .rows import Row

#: Colour and dashes of a competitor's line; the shades of regimes, `split` too, have its colour.
_LINES = {
    "auto": ("black", "-"),
    "fused": ("tab:blue", "-"),
    "cluster": ("tab:green", "-"),
    "online": ("tab:orange", "-"),
    "split": ("tab:olive", "-"),
    "naive": ("tab:red", "-"),
    "torch": ("tab:purple", "--"),
    "torch.compile": ("tab:pink", "--"),
    "CuPy formula": ("tab:brown", "--"),
    "cupyx.scipy.special": ("tab:gray", ":"),
}
_COPY = "device copy"
_DTYPES = ("float32", "bfloat16", "float16", "float64")


def softmax_rates(rows: Iterable[Row]) -> Any:
    """Draw rates over row length, a panel for each dtype.

    Parameters
    ----------
    rows : iterable of Row
        Of ``softmax.csv``, numbers as text or not. Those of `softmax` over the last axis against
        the device copy are drawn, the copy itself as a dotted line, and `regime`, what `auto`
        takes, as shades.

    Returns
    -------
    matplotlib.figure.Figure
    """
    from matplotlib.figure import Figure

    kind = ("softmax", "-1", _COPY)
    drawn = [row for row in rows if (row["operation"], str(row["axis"]), row["peer"]) == kind]
    dtypes = [dtype for dtype in _DTYPES if any(row["dtype"] == dtype for row in drawn)]
    columns = min(len(dtypes), 2)
    height = -(-len(dtypes) // max(columns, 1))
    figure = Figure(figsize=(6.5 * columns, 4.2 * height), dpi=150, layout="constrained")
    for place, dtype in enumerate(dtypes, start=1):
        axes = figure.add_subplot(height, columns, place)
        _draw_panel(axes, [row for row in drawn if row["dtype"] == dtype])
        axes.set_title(f"softmax, {dtype}")
        if place == 1:
            axes.legend(fontsize="small", ncols=2)
    if drawn:
        figure.suptitle(drawn[0]["machine"])
    return figure


def _draw_panel(axes: Any, rows: Sequence[Row]) -> None:
    names = [_COPY, *(name for name in _LINES if any(row["method"] == name for row in rows))]
    for name in names:
        points = sorted((int(r["N"]), float(r["rate"])) for r in rows if r["method"] == name)
        color, dashes = _LINES.get(name, ("black", ":"))
        width = 2.2 if name == "auto" else 1.2
        axes.plot(*zip(*points, strict=True), dashes, color=color, lw=width, ms=3, label=name)
    taken = sorted({(int(row["N"]), row["regime"]) for row in rows})
    for method, first, last in regimes(taken):
        color, _ = _LINES.get(method, ("white", "-"))
        axes.axvspan(first, last, color=color, alpha=0.08, lw=0)
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("row length N; shaded by the method that auto takes")
    axes.set_ylabel("TB/s, one read and one write an element")


def regimes(taken: Sequence[tuple[int, str]]) -> list[tuple[str, float, float]]:
    """Return stretches of one method: (method, from, to) in row lengths.

    Parameters
    ----------
    taken : sequence of (int, str)
        Row lengths in rising order and the method taken at each. A border between two of them is
        drawn at their geometric mean.
    """
    if not taken:
        return []
    borders = [
        sqrt(n * after) for (n, method), (after, other) in pairwise(taken) if method != other
    ]
    methods = [taken[0][1]]
    methods += [other for (_, method), (_, other) in pairwise(taken) if method != other]
    edges = [float(taken[0][0]), *borders, float(taken[-1][0])]
    return [(m, a, b) for m, (a, b) in zip(methods, pairwise(edges), strict=True)]


#: Colours of the report: what is replaced, half of it fused, all of it, and the copy.
_REPORT = {
    "unfused": "tab:red",
    "materialized": "tab:red",
    "scores fused": "tab:orange",
    "fused": "tab:blue",
    "flash": "tab:blue",
    "copy": "tab:gray",
}


def report(rows: Sequence[Row], machine: str) -> Any:
    """Draw the one-minute report: softmax and attention over their sizes, chains as bars.

    Parameters
    ----------
    rows : sequence of Row
        Of `quick.run`.
    machine : str
        For the title.

    Returns
    -------
    matplotlib.figure.Figure
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 8), dpi=120, layout="constrained")
    labels = {
        "softmax": "row length N",
        "attention": "tokens T",
        "attention, gradients": "tokens T",
        "decoding": "keys T",
    }
    for place, (subject, label) in enumerate(labels.items(), start=1):
        axes = figure.add_subplot(2, 3, place)
        for method in dict.fromkeys(row["method"] for row in rows if row["subject"] == subject):
            line = [row for row in rows if (row["subject"], row["method"]) == (subject, method)]
            axes.plot(
                [row["size"] for row in line],
                [row["ms"] for row in line],
                marker="o",
                color=_REPORT[method],
                label=method,
            )
        axes.set(title=subject, xlabel=label, ylabel="ms", yscale="log")
        axes.set_xscale("log", base=2)
        axes.legend(fontsize="small")
    chains = [row for row in rows if row["subject"] not in labels and row["method"] != "copy"]
    names = [f"{row['subject']}\n{row['problem']}, {row['method']}" for row in chains]
    axes = figure.add_subplot(2, 3, (5, 6))
    axes.barh(names, [row["ms"] for row in chains], color=[_REPORT[r["method"]] for r in chains])
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelsize="small")
    axes.set(title="fused chains", xlabel="ms")
    figure.suptitle(machine)
    return figure
