"""The interactive page: its script against the model, and the page itself in a browser."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from py_mini_racer import MiniRacer

from cuflash.analysis import GPUS, METHODS, page, traffic
from cuflash.analysis.workload import TOKENS, Workload
from cuflash.cli import main

GPU = GPUS["h100"]
METHODS_SHOWN = METHODS["attention"]
DTYPES = ("float64", "float32", "float16", "bfloat16")
BROWSER = shutil.which("chromium")


@pytest.fixture(scope="module")
def call() -> Callable[..., Any]:
    """Return a function that calls one of the script's."""
    engine = MiniRacer()
    engine.eval(page.script())
    engine.eval(f"const model = {json.dumps(page.model(GPU))};")

    def call(expression: str) -> Any:
        return json.loads(engine.eval(f"JSON.stringify({expression})"))

    return call


SETTINGS = st.fixed_dictionaries(
    {
        "batch": st.integers(1, 64),
        "heads": st.integers(1, 128),
        "d": st.integers(1, 256),
        "tokens": st.integers(TOKENS[0], TOKENS[-1]),
        "dtype": st.sampled_from(DTYPES),
        "quantity": st.sampled_from(["memory", "traffic"]),
    }
)


@given(settings=SETTINGS)
def test_coefficients_are_the_model(settings: dict[str, Any]) -> None:
    batch, heads, d, tokens = (settings[name] for name in ("batch", "heads", "d", "tokens"))
    by_method = page.model(GPU)["bytes"][settings["dtype"]]
    for method in METHODS_SHOWN:
        counted = traffic("attention", (batch, heads, tokens, d), settings["dtype"], method)
        for quantity in ("memory", "moved"):
            of = by_method[method][quantity]
            per_token = of["quadratic"] * tokens + of["width"] * d + of["row"]
            assert batch * heads * tokens * per_token == getattr(counted, f"{quantity}_bytes")


@given(settings=SETTINGS)
def test_script_shows_what_the_model_says(
    call: Callable[..., Any], settings: dict[str, Any]
) -> None:
    work = Workload(*(settings[name] for name in ("batch", "heads", "d", "dtype")))
    shown = call(f"evaluate(model, {json.dumps(settings)})")
    assert tuple(shown) == METHODS_SHOWN

    def value(tokens: int, method: str) -> float:
        if settings["quantity"] == "memory":
            return work.at(tokens, method).memory_bytes
        return work.at(tokens, method).moved_bytes / work.at(tokens, "flash").moved_bytes

    for method, found in shown.items():
        assert found["curve"] == pytest.approx([value(t, method) for t in TOKENS], rel=1e-12)
        assert found["here"] == pytest.approx(value(settings["tokens"], method), rel=1e-12)
        memory = work.at(settings["tokens"], method).memory_bytes
        assert found["memory"] == pytest.approx(memory, rel=1e-12)
        assert found["limit"] == work.limit(method, GPU.memory)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 "),
        (999, "999 "),
        (1000, "1 k"),
        (1.5e9, "1.5 G"),
        (24_871e6, "24.9 G"),
        (2e16, "20 P"),
    ],
)
def test_prefixes(call: Callable[..., Any], value: float, text: str) -> None:
    assert call(f"withPrefix({value})") == text


WIDGETS = {
    "power": {"value": 13},
    "batch": {"value": 1},
    "heads": {"value": 32},
    "d": {"value": 128},
    "dtype": {"active": 2, "labels": DTYPES},
    "quantity": {"active": 0},
}
PARTS = ("curves", "here", "crossings", "capacity", "axis", "summary")


def updated(call: Callable[..., Any], **widgets: dict[str, Any]) -> dict[str, Any]:
    """Return the parts of the picture after the script has read `widgets`."""
    parts = {name: {} for name in PARTS}
    return call(
        f"((view) => {{ update(model, {json.dumps(WIDGETS | widgets)}, view); return view; }})"
        f"({json.dumps(parts)})"
    )


def test_update_names_the_crossings(call: Callable[..., Any]) -> None:
    view = updated(call)
    crossings = view["crossings"]["data"]
    assert crossings["text"] == ["T = 24,872", "T = 35,100"]
    assert crossings["tokens"] == [24_872, 35_100]
    assert crossings["value"] == [GPU.memory] * 2
    assert len({len(column) for column in crossings.values()}) == 1
    assert view["capacity"]["visible"] is True
    for fragment in ("T = 8,192 on H100 SXM, 80 GB", "T = 24,872", "T = 2,431,906", "fits"):
        assert fragment in view["summary"]["text"]
    assert "does not fit" not in view["summary"]["text"]


def test_update_at_other_widgets(call: Callable[..., Any]) -> None:
    view = updated(call, power={"value": 15.25}, dtype={"active": 1, "labels": DTYPES})
    work = Workload(1, 32, 128, "float32")
    assert view["here"]["data"]["tokens"] == [38_968] * 3
    assert view["here"]["data"]["value"] == [
        work.at(38_968, method).memory_bytes for method in METHODS_SHOWN
    ]
    assert view["summary"]["text"].count("does not fit") == 2


def test_update_to_traffic(call: Callable[..., Any]) -> None:
    view = updated(call, quantity={"active": 1})
    assert view["curves"]["data"]["flash"] == [1] * len(TOKENS)
    assert view["crossings"]["data"]["tokens"] == []
    assert view["capacity"]["visible"] is False
    assert view["axis"]["axis_label"] == "bytes through HBM, flash = 1"


def test_a_crossing_off_the_axis_is_named_in_words_only(call: Callable[..., Any]) -> None:
    view = updated(call, batch={"value": 64}, heads={"value": 10**6})
    assert view["crossings"]["data"]["tokens"] == []
    limit = Workload(64, 10**6, 128, "float16").limit("materialized", GPU.memory)
    assert f"T = {limit}<" in view["summary"]["text"]


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the page as the command writes it."""
    path = tmp_path_factory.mktemp("page") / "memory.html"
    assert main(["plot", "memory", "--html", str(path), "--heads", "16"]) == 0
    assert list(path.parent.iterdir()) == [path]
    return path


def test_page_is_self_contained(html: Path) -> None:
    outside = []

    class Finder(HTMLParser):
        def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
            outside.extend((tag, *each) for each in attributes if each[0] in ("src", "href"))

    Finder().feed(html.read_text(encoding="utf-8"))
    assert outside == []


def test_page_starts_where_the_options_say(html: Path) -> None:
    (embedded,) = re.findall(
        r'<script type="application/json"[^>]*>(.*?)</script>', html.read_text(), re.DOTALL
    )
    (heads,) = (each for each in objects(json.loads(embedded)) if each.get("name") == "heads")
    assert heads["value"] == 16


def objects(tree: Any) -> Iterator[dict[str, Any]]:
    """Yield every object in a JSON tree."""
    if isinstance(tree, dict):
        yield tree
    for branch in (
        tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    ):
        yield from objects(branch)


def test_page_and_picture_in_one_call(tmp_path: Path) -> None:
    paths = [tmp_path / "memory.svg", tmp_path / "memory.html"]
    assert main(["plot", "memory", "-o", str(paths[0]), "--html", str(paths[1])]) == 0
    assert sorted(tmp_path.iterdir()) == sorted(paths)


def test_without_bokeh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "bokeh", None)
    assert main(["plot", "memory", "--html", str(tmp_path / "memory.html")]) == 2
    assert "--html needs bokeh (pip install 'cuflash[plot]')" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


# Moves the page's widgets once it is drawn and writes what it then says into its title. The page
# answers a change after the script that made it has gone on.
DRIVER = """
<script>
const moment = () => new Promise((resume) => setTimeout(resume, 100));
(async () => {
  while (!globalThis.Bokeh?.documents[0]?.is_idle) await moment();
  const get = (name) => Bokeh.documents[0].get_model_by_name(name);
  const said = [];
  for (const change of [
    { heads: { value: 16 } },
    { power: { value: 15 }, batch: { value: 4 } },
    { d: { value: 64 }, dtype: { active: 0 } },
    { quantity: { active: 1 } },
  ]) {
    for (const [name, properties] of Object.entries(change)) get(name).setv(properties);
    await moment();
    said.push(get("summary").text);
  }
  said.push(get("value axis").axis_label);
  document.title = JSON.stringify(said);
})();
</script>
"""


class Title(HTMLParser):
    """The title of a page."""

    inside, text = False, ""

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.inside = tag == "title"

    def handle_data(self, data: str) -> None:
        self.text += data if self.inside else ""

    def handle_endtag(self, tag: str) -> None:
        self.inside = False


@pytest.mark.skipif(BROWSER is None, reason="no chromium")
def test_page_in_a_browser(html: Path, tmp_path: Path) -> None:
    driven = tmp_path / "driven.html"
    driven.write_text(html.read_text(encoding="utf-8") + DRIVER, encoding="utf-8")
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--host-resolver-rules=MAP * ~NOTFOUND",
    ]
    result = subprocess.run(
        [
            *(str(BROWSER), *options, f"--user-data-dir={tmp_path / 'profile'}"),
            *("--virtual-time-budget=20000", "--dump-dom", driven.as_uri()),
        ],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )

    title = Title()
    title.feed(result.stdout)
    *said, label = json.loads(title.text)
    assert label == "bytes through HBM, flash = 1"
    works = [
        (13, Workload(1, 16, 128, "bfloat16")),
        (15, Workload(4, 16, 128, "bfloat16")),
        *[(15, Workload(4, 16, 64, "float64"))] * 2,
    ]
    for text, (power, work) in zip(said, works, strict=True):
        assert f"T = {2**power:,} on H100 SXM" in text
        limits = re.findall(r"T = ([\d,]+)</td></tr>", text)
        assert limits == [f"{work.limit(method, GPU.memory):,}" for method in METHODS_SHOWN]
