"""What the pictures show is what the model and the result files say."""

from typing import Any

import pytest

from cuflash.analysis import GPUS, METHODS, charts, traffic
from cuflash.analysis.workload import LABELS, TOKENS, Workload

WORK = Workload(batch=2, heads=8, d=64, dtype="float16")
GPU = GPUS["h100"]


def lines(axes: Any) -> dict[str, tuple[list[float], list[float]]]:
    """Return the labelled lines of an axes: x and y by label."""
    return {
        line.get_label(): (list(line.get_xdata()), list(line.get_ydata()))
        for line in axes.lines
        if not line.get_label().startswith("_")
    }


def test_memory_and_time_over_tokens() -> None:
    left, right = charts.memory(WORK, GPU).axes
    for method in METHODS["attention"]:
        counted = [traffic("attention", (2, 8, t, 64), "float16", method) for t in TOKENS]
        assert lines(left)[LABELS[method]] == (list(TOKENS), [c.memory_bytes for c in counted])
        assert lines(right)[LABELS[method]][1] == [GPU.seconds(c, "float16") for c in counted]
    assert lines(left)["H100 SXM: 80 GB"][1] == [80e9, 80e9]


def test_memory_names_where_the_gpu_ends() -> None:
    left, _ = charts.memory(WORK, GPU).axes
    texts = [text.get_text() for text in left.texts]
    assert texts == [f"T = {WORK.limit(m, GPU.memory):,}" for m in ("materialized", "scores_fused")]


def test_traffic_over_tokens() -> None:
    left, right = charts.traffic_over_tokens(WORK).axes
    for method in METHODS["attention"]:
        moved = [traffic("attention", (2, 8, t, 64), "float16", method).moved_bytes for t in TOKENS]
        assert lines(left)[LABELS[method]] == (list(TOKENS), moved)
    names = [label.get_text() for label in right.get_yticklabels()]
    widths = [bar.get_width() for bar in right.patches]
    ratios = dict(zip(names, widths, strict=True))
    assert ratios["softmax\nunfused"] == pytest.approx(3, rel=0.01)
    assert ratios["softmax\nnaive"] == pytest.approx(2, rel=0.01)
    assert ratios["softmax\nonline"] == 1.5
    assert ratios["dropout_bias_layer_norm\nunfused"] == pytest.approx(3, rel=0.01)
    assert [name for name, ratio in ratios.items() if ratio == 1] == [
        *("softmax\nfused", "softmax\ncluster"),
        *("dropout_bias_layer_norm\nfused", "matmul_bias_activation\nfused"),
    ]


def test_roofline_points_lie_under_the_roof() -> None:
    (axes,) = charts.roofline(WORK, GPU, 4096).axes
    points = [line for line in axes.lines if line.get_marker() == "o"]
    assert len(points) == 2 * 5
    for before, after in zip(points[::2], points[1::2], strict=True):
        (x, y), (fused_x, fused_y) = (
            (line.get_xdata()[0], line.get_ydata()[0]) for line in (before, after)
        )
        assert y <= GPU.attainable(x, "float16") * (1 + 1e-12)
        assert fused_y == pytest.approx(GPU.attainable(fused_x, "float16"))
        assert (fused_x, fused_y) >= (x, y)
    fused = {line.get_label(): line.get_xdata()[0] for line in points[1::2]}
    flash = traffic("attention", (2, 8, 4096, 64), "float16", "flash")
    assert fused["attention"] == flash.intensity
    assert fused["matrix times vector"] == pytest.approx(1, rel=0.01)


def row(**cells: object) -> dict[str, str]:
    return {name: str(cell) for name, cell in cells.items()}


def test_softmax_rates() -> None:
    rows = [
        row(
            method="auto",
            dtype="float32",
            rows=2**20,
            N=1024,
            ms=2.0,
            peer="copy",
            **{"peer ms": 1.0},
            machine="GPU",
        ),
        row(method="auto", dtype="float32", rows=2**10, N=2**20, ms=4.0, peer="", machine="GPU"),
        row(method="auto", dtype="bfloat16", rows=2**20, N=1024, ms=1.0, machine="GPU"),
        row(method="tiled", dtype="float32", rows="", N="", ms=1.0, machine="GPU"),
        row(method="auto", dtype="float32", rows=1, N=1, ms=9.0, operation="softmax_vjp"),
        row(method="auto", dtype="float32", rows=1, N=1, ms=9.0, operation="softmax", axis=0),
    ]
    figure = charts.softmax(rows)
    single, half = figure.axes
    assert figure.get_suptitle() == "GPU"
    assert (single.get_title(), half.get_title()) == ("softmax, float32", "softmax, bfloat16")
    rate = 2 * 4 * 2**30 / 2e-3 / 1e12
    assert lines(single)["auto"] == ([1024, 2**20], pytest.approx([rate, rate / 2]))
    assert lines(single)["copy"] == ([1024], pytest.approx([2 * rate]))
    assert lines(half)["auto"] == ([1024], pytest.approx([rate]))
    assert single.lines[0].get_color() == half.lines[0].get_color()


def test_attention_times_and_rates() -> None:
    cells = {"dtype": "float32", "D": 64, "causal": False}
    rows = [
        row(method="tiled", B=1, H=2, T=128, ms=2.0, peer="formula", **{"peer ms": 6.0}, **cells),
        row(method="tiled", B=2, H=2, T=128, ms=8.0, peer="matmul", **{"peer ms": 1.0}, **cells),
        row(method="tiled", B=1, H=1, T=256, ms=4.0, **cells),
        row(method="tiled", B=1, H=1, T=256, ms=1.0, **(cells | {"causal": True})),
        row(method="flash_attention", B=1, H=1, T=512, ms="", **cells),
    ]
    time, causal_time, rate, causal_rate = charts.attention(rows).axes
    assert lines(time)["tiled"] == ([128, 256], pytest.approx([1.5e-3, 4e-3]))
    assert lines(time)["formula"] == ([128], pytest.approx([3e-3]))
    assert set(lines(time)) == {"tiled", "formula"}
    flops = 4 * 256**2 * 64
    assert lines(rate)["tiled"][1][1] == pytest.approx(flops / 4e-3 / 1e12)
    assert lines(causal_rate)["tiled"][1] == pytest.approx([flops / 2 / 1e-3 / 1e12])
    assert causal_time.get_title() == "float32, D = 64, causal"


@pytest.mark.parametrize("subject", ["softmax", "attention"])
def test_no_rows(subject: str) -> None:
    with pytest.raises(ValueError, match=f"no row of {subject}"):
        getattr(charts, subject)([row(method="auto", ms=1.0)])


@pytest.mark.parametrize(("seconds", "label"), [(3e-3, "3 ms"), (2e-6, "2 µs"), (40.0, "40 s")])
def test_a_short_axis_has_labels_with_units(seconds: float, label: str) -> None:
    cells = {"dtype": "float32", "B": 1, "H": 1, "T": 128, "D": 64, "causal": False}
    figure = charts.attention(
        [
            row(method=name, ms=1e3 * factor * seconds, **cells)
            for name, factor in (("a", 0.8), ("b", 1.0), ("c", 1.2))
        ]
    )
    figure.draw_without_rendering()
    axis = figure.axes[0].yaxis
    texts = [text.get_text() for minor in (False, True) for text in axis.get_ticklabels(minor)]
    assert label in [text.replace(" ", " ") for text in texts]


def test_sizes_as_they_are_spoken_of() -> None:
    figure = charts.memory(WORK, GPU)
    figure.draw_without_rendering()
    shown = [label.get_text() for label in figure.axes[0].get_xticklabels()]
    assert {"256", "4k", "1M"} <= set(shown)
