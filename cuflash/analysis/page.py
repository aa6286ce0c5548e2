"""The interactive page: attention's memory and traffic, in one file that needs no network."""

from __future__ import annotations

import json
import math
from importlib.resources import files
from typing import Any

from bokeh.document import Document
from bokeh.embed import file_html
from bokeh.events import DocumentReady
from bokeh.layouts import column, row
from bokeh.models import (
    ColumnDataSource,
    CustomJS,
    CustomJSTickFormatter,
    Div,
    RadioButtonGroup,
    Slider,
)
from bokeh.plotting import figure
from bokeh.resources import INLINE

from ..problem import FLOATS
from .roofline import Roofline
from .traffic import METHODS, traffic
from .workload import COLORS, LABELS, TOKENS, Workload

__all__ = ["memory_page", "model", "script"]

_METHODS = METHODS["attention"]
_DTYPES = [dtype.name for dtype in FLOATS]


def script() -> str:
    """Return the functions that run in the page; those for the picture's data know no library."""
    return (files("cuflash") / "analysis" / "page.js").read_text(encoding="utf-8")


def model(gpu: Roofline) -> dict[str, Any]:
    """Return what the script is given: the traffic model in coefficients, and the GPU's memory.

    Parameters
    ----------
    gpu : Roofline
        Its name and memory are taken.

    Returns
    -------
    dict
        To be written as JSON. ``bytes[dtype][method][quantity]``, quantity "memory" or "moved", has
        the integers *quadratic*, *width* and *row* of B H T (quadratic T + width D + row).
    """
    return {
        "gpu": gpu.name,
        "capacity": gpu.memory,
        "tokens": TOKENS,
        "methods": _METHODS,
        "labels": LABELS,
        "colors": [COLORS[method] for method in _METHODS],
        "bytes": {
            dtype: {
                method: {
                    quantity: _coefficients(dtype, method, f"{quantity}_bytes")
                    for quantity in ("memory", "moved")
                }
                for method in _METHODS
            }
            for dtype in _DTYPES
        },
    }


def _coefficients(dtype: str, method: str, name: str) -> dict[str, int]:
    """Return the coefficients of a count from three values of it."""

    def count(tokens: int, d: int) -> int:
        return int(getattr(traffic("attention", (tokens, d), dtype, method), name))

    width = count(1, 2) - count(1, 1)
    quadratic = (count(2, 1) - 2 * count(1, 1)) // 2
    return {"quadratic": quadratic, "width": width, "row": count(1, 1) - width - quadratic}


def memory_page(work: Workload, gpu: Roofline) -> str:
    """Return the page as HTML.

    Parameters
    ----------
    work : Workload
        Where the sliders stand at first.
    gpu : Roofline
        Its memory is the line.

    Returns
    -------
    str
        One document, scripts and styles in it.
    """
    powers = [int(math.log2(tokens)) for tokens in (TOKENS[0], TOKENS[-1])]
    widgets = {
        # Powers of two in quarter steps; shown is T itself.
        "power": Slider(
            name="power",
            title="T, tokens",
            start=powers[0],
            end=powers[1],
            step=0.25,
            value=13,
            format=CustomJSTickFormatter(
                code="return Math.round(2 ** tick).toLocaleString('en-US')"
            ),
        ),
        "batch": _slider("batch", "B, batch size", work.batch, 64),
        "heads": _slider("heads", "H, heads", work.heads, 128),
        "d": _slider("d", "D, head dimension", work.d, 256),
        "dtype": RadioButtonGroup(name="dtype", labels=_DTYPES, active=_DTYPES.index(work.dtype)),
        "quantity": RadioButtonGroup(
            name="quantity", labels=["memory", "traffic relative to flash"], active=0
        ),
    }
    plot, view = _picture(gpu)
    view["summary"] = Div(name="summary")
    functions = script()
    callback = CustomJS(
        args={**widgets, **view},
        code=f"{functions}\nconst model = {json.dumps(model(gpu))};\n"
        f"update(model, {{{', '.join(widgets)}}}, {{{', '.join(view)}}});",
    )
    for name, widget in widgets.items():
        changed = "active" if name in ("dtype", "quantity") else "value"
        widget.js_on_change(changed, callback)
    document = Document(title="Attention: memory and traffic")
    document.js_on_event(DocumentReady, callback)
    controls = column(*widgets.values(), view["summary"], width=480)
    document.add_root(row(plot, controls, sizing_mode="stretch_width"))
    return str(file_html(document, INLINE))


def _slider(name: str, title: str, value: int, end: int) -> Slider:
    return Slider(name=name, title=title, start=1, end=max(end, value), step=1, value=value)


def _picture(gpu: Roofline) -> tuple[Any, dict[str, Any]]:
    """Return the picture, still empty, and the parts of it that the script brings up to date."""
    curves = ColumnDataSource({"tokens": [], **{method: [] for method in _METHODS}})
    here = ColumnDataSource({"tokens": [], "value": [], "color": []})
    crossings = ColumnDataSource(
        {name: [] for name in ("tokens", "value", "text", "color", "align", "x", "y")}
    )
    plot = figure(
        x_axis_type="log",
        y_axis_type="log",
        x_axis_label="tokens T",
        height=560,
        sizing_mode="stretch_width",
        toolbar_location="above",
    )
    with_prefix = CustomJSTickFormatter(code=f"{script()}\nreturn withPrefix(tick);")
    plot.yaxis.name = "value axis"
    plot.yaxis.formatter = with_prefix
    plot.xaxis.formatter = CustomJSTickFormatter(code="return tick.toLocaleString('en-US')")
    plot.xaxis.ticker = TOKENS[::2]
    for method in _METHODS:
        style = {"color": COLORS[method], "legend_label": LABELS[method], "line_width": 2}
        plot.line("tokens", method, source=curves, **style)
    capacity = plot.line(
        *([TOKENS[0], TOKENS[-1]], [gpu.memory, gpu.memory]),
        color="black",
        line_dash="dashed",
        legend_label=f"{gpu.name}: {gpu.memory / 1e9:.0f} GB",
    )
    plot.scatter("tokens", "value", color="color", size=9, source=here)
    plot.scatter("tokens", "value", color="color", marker="x", size=12, source=crossings)
    plot.text(
        *("tokens", "value", "text"),
        source=crossings,
        text_color="color",
        text_align="align",
        text_font_size="13px",
        x_offset="x",
        y_offset="y",
    )
    plot.legend.location = "top_left"
    plot.y_range.only_visible = True  # the capacity is no traffic
    sources = {"curves": curves, "here": here, "crossings": crossings}
    return plot, {**sources, "capacity": capacity, "axis": plot.yaxis[0]}
