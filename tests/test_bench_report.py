"""The one-minute report and the measured ceilings, on small problems of the host."""

import base64
import io
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cuflash import _bench, cli
from cuflash.bench import machine, quick, rows
from cuflash.bench.problems import AttentionShape, Decode, Norm, Product

SIZES = quick.Sizes(
    256,
    (16, 64),
    [AttentionShape(1, 2, tokens, 4) for tokens in (4, 8)],
    [AttentionShape(1, 2, 5, 4, dtype="float64")],
    [Decode(2, 4, 2, 6, 8, "float32")],
    [Norm((2, 3, 8), "float64")],
    [Product(4, 5, 6, "float32")],
)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(machine._COPY_BYTES, "host", 1 << 12)
    monkeypatch.setattr(machine, "_HOST_MATMUL_SIZE", 16)
    monkeypatch.setitem(quick.SIZES, "host", SIZES)
    monkeypatch.setattr(quick, "WINDOW", 1e-4)


def test_ceilings_make_a_roofline() -> None:
    told: list[str] = []
    found = machine.measure(machine.Host(), rounds=1, window=1e-4, told=told.append)
    dtypes = ["float64", "float32", "float16", "bfloat16"]
    assert told == ["copy", *(f"matmul, {dtype}" for dtype in dtypes)]
    assert list(found.roofline.flops) == dtypes
    assert found.roofline.memory > 1 << 20
    assert found.launch is None  # nothing is launched here
    names = [row["ceiling"] for row in quick.ceiling_rows(found._replace(launch=3e-6))]
    assert names[:3] == ["memory", "matmul, float64", "ridge, float64"]
    assert names[-1] == "launch"


def test_every_idea_is_held_against_what_it_replaces() -> None:
    told: list[tuple[int, int, str]] = []
    found = quick.run(machine.Host(), told=lambda *progress: told.append(progress)).rows
    methods = {(row["subject"], row["method"], row["peer"]) for row in found}
    assert methods == {
        *(("softmax", method, "unfused") for method in ("unfused", "fused", "copy")),
        *(
            ("attention", method, "materialized")
            for method in ("materialized", "scores fused", "flash")
        ),
        *(("attention, gradients", method, "materialized") for method in ("materialized", "flash")),
        *(("decoding", method, "materialized") for method in ("materialized", "flash", "copy")),
        *(("dropout, bias, LayerNorm", m, "unfused") for m in ("unfused", "fused", "copy")),
        *(("matmul, bias, relu", method, "unfused") for method in ("unfused", "fused")),
    }
    assert [row["speedup"] for row in found if row["method"] == row["peer"]] == [1] * 8
    assert all(row["of ceiling"] > 0 for row in found)
    assert told[0][:2] == (0, 9)
    assert told[-1] == (9, 9, "")
    assert [done for done, *_ in told] == sorted(done for done, *_ in told)


def test_gradients_are_the_same_with_weights_kept_and_computed_again() -> None:
    calls = quick._gradients(machine.Host(), shape=SIZES.gradients[0])
    kept, again = calls["materialized"](), calls["flash"]()
    for name, one, other in zip(("dq", "dk", "dv"), kept, again[:3], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-13, err_msg=name)


def test_decoding_reads_what_a_copy_of_its_keys_moves() -> None:
    (shape,) = SIZES.decode
    calls = quick._decode(machine.Host(), shape=shape)
    np.testing.assert_allclose(calls["flash"](), calls["materialized"](), rtol=1e-5, atol=1e-6)
    keys = int(np.prod(shape.shapes[1])) * 4
    assert shape.bytes == 2 * keys


class Tables(HTMLParser):
    """Collects the cells of a page, and what it loads from elsewhere."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.cells: list[str] = []
        self.sources: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.sources += [str(value) for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        self.cells.append(data)


def test_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "new" / "folder"
    assert cli.main(["bench", "--engine", "host", "-o", str(folder)]) == 0
    printed = capsys.readouterr()
    assert "scores fused" in printed.out
    assert not printed.err  # no bar where there is no terminal
    assert {file.name for file in folder.iterdir()} == {"bench.csv", "bench.png", "report.html"}
    found = rows.read_rows(folder / "bench.csv")
    assert [row["method"] for row in found[:3]] == ["unfused", "fused", "copy"]
    assert found[0]["machine"] == rows.host_environment()["machine"]
    text = (folder / "report.html").read_text("utf-8")
    page = Tables(text)
    assert "matmul, bias, relu" in page.cells
    assert found[0]["ms"] in page.cells
    (source,) = page.sources
    kind, _, content = source.partition(",")
    assert kind == "data:image/png;base64"
    assert base64.b64decode(content) == (folder / "bench.png").read_bytes()


def test_report_without_matplotlib(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_bench.importlib.util, "find_spec", lambda name: None)
    _bench.report(machine.Host(), tmp_path)
    assert "matplotlib is not installed" in capsys.readouterr().out
    assert {file.name for file in tmp_path.iterdir()} == {"bench.csv", "report.html"}
    assert "<img" not in (tmp_path / "report.html").read_text("utf-8")


def test_pages_escape_what_they_show() -> None:
    text = _bench.page({"a < b": [{"x": "<i>"}]}, {"machine": "A & B"}, None)
    assert "<i>" not in text
    assert {"a < b", "A & B", "<i>"} <= set(Tables(text).cells)


def test_bar_of_a_terminal() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    bar = _bench.Progress(terminal)
    bar(0, 2, "a long name")
    bar(1, 2, "b")
    bar(2, 2, "")
    lines = terminal.getvalue().split("\r")
    assert lines[1] == f"[{'.' * 30}] 0/2 a long name"
    assert lines[2].rstrip() == f"[{'#' * 15}{'.' * 15}] 1/2 b"
    assert len(lines[2]) == len(lines[1])  # nothing is left of the line before
    assert not lines[3].strip()


def test_info_measures(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "_device_obstacle", lambda: "none here")
    assert cli.main(["info", "--measure"]) == 0
    out = capsys.readouterr().out
    assert "by the host engine" in out
    assert re.search(r"^matmul, float64 +[0-9.e-]+ +TFLOP/s$", out, re.MULTILINE)


def test_the_device_is_asked_in_its_own_way(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: dict[str, Any] = {
        "normal": lambda shape, dtype, seed: np.zeros(shape),
        "copy": lambda x: x.copy,
        "matmul": lambda dtype: np.ones(3).sum,
        "idle": lambda: np.ones(3).sum,
        "memory": lambda: 7,
        "clock": machine.HostClock,
    }
    for name, call in calls.items():
        monkeypatch.setattr(machine.device, name, call)
    monkeypatch.setattr(rows, "device_environment", lambda: {"machine": "No GPU"})
    monkeypatch.setitem(machine._COPY_BYTES, "device", 1 << 12)
    there = _bench.machine_of("device")
    found = machine.measure(there, rounds=1, window=1e-4)
    assert found.roofline.memory == 7
    assert found.launch is not None
    assert there.environment() == {"machine": "No GPU"}
    assert there.name in quick.SIZES
    assert "cupy" not in sys.modules or there.matmul("float32")[1] == 2.0 * 8192**3
