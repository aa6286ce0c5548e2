"""The demo: its data, what it derives from them, and what it prints."""

import json
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from cuflash import _demo, reference
from cuflash._runners import HostRunner
from cuflash.cli import main

README = Path(__file__).resolve().parent.parent / "README.md"


@pytest.fixture
def layer(rng: np.random.Generator) -> _demo.Layer:
    """A text that is longer than one block of query rows."""
    q, k, v = rng.standard_normal((3, 1, 3, 100, 8), np.float32)
    return _demo.Layer(q, k, v, tuple(f"token{i}" for i in range(100)), {"layer": 0})


def softmax_weights(layer: _demo.Layer) -> np.ndarray:
    scores = layer.q[0] @ layer.k[0].swapaxes(-1, -2) / np.sqrt(layer.q.shape[-1])
    return reference.softmax(scores)


def test_packaged_layer() -> None:
    layer = _demo.Layer.read()
    assert os.path.getsize(Path(_demo.__file__).parent / "_data" / "minilm_layer.npz") < 2e6
    assert layer.q.shape == layer.k.shape == layer.v.shape == (1, 12, len(layer.tokens), 32)
    assert layer.q.dtype == np.float32
    assert layer.tokens[:4] == ("[CLS]", "it", "is", "interesting")
    assert layer.tokens[-1] == "[SEP]"
    # The tokens spell the text.
    text = re.sub(r"\W", "", layer.provenance["text"]).lower()
    assert re.sub(r"\W", "", "".join(layer.tokens[1:-1])) == text


@pytest.mark.parametrize("times", [1, 3])
def test_oracle_of_a_repeated_text(times: int, layer: _demo.Layer) -> None:
    got = _demo.repeated_oracle(*reference.attention(layer.q, layer.k, layer.v), times)
    for x, expected in zip(got, reference.attention(*layer.repeated(times)), strict=True):
        np.testing.assert_allclose(x, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("head", [None, 1])
def test_attention_weights(head: int | None, layer: _demo.Layer) -> None:
    blocks = list(_demo.attention_weights(layer, HostRunner(), head))
    assert [len(block) for block in blocks] == [64, 36]
    weights = softmax_weights(layer)
    expected = weights.mean(axis=0) if head is None else weights[head]
    np.testing.assert_allclose(np.concatenate(blocks), expected, rtol=1e-5)


def test_strongest_keys(layer: _demo.Layer) -> None:
    weights = softmax_weights(layer)[0]
    for row, strongest in zip(weights, _demo.strongest_keys(iter([weights]), 4), strict=True):
        largest = sorted(range(len(row)), key=lambda j: -row[j])[:4]
        assert strongest == [(j, row[j]) for j in largest]


@pytest.mark.parametrize("count", [1, 2, 7, 40])
def test_columns_hold_every_cell_once(count: int) -> None:
    cells = [f"cell{i}" + "." * (i % 20) for i in range(count)]
    lines = list(_demo.in_columns(cells))
    assert sorted(" ".join(lines).split()) == sorted(cells)
    assert max(map(len, lines)) <= 100


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert main(["demo", "--engine", "host", *arguments]) == 0
    return capsys.readouterr().out.splitlines()


def test_report(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, "--repeats", "3")
    layer = _demo.Layer.read()
    tokens = len(layer.tokens)
    assert lines[0].startswith("engine  host (NumPy")
    assert lines[1] == f"input   q, k, v {layer.q.shape} float32"
    # Head 8 looks one token ahead.
    assert any(re.search(r"\bnatural  selection 9\d", line) for line in lines)
    rows = [line.split() for line in lines if "_attention " in line]
    assert [(row[0], row[1]) for row in rows] == [
        (str(n), method)
        for n in (tokens, 3 * tokens)
        for method in ("flash_attention", "materialized_attention")
    ]
    for row in rows:
        # float32 with scores up to 23, |v| up to 3: the accuracy contract's bound.
        assert 0 < float(row[-2]) < 2e-5
        assert 0 < float(row[-1]) < 2e-5
    flash, materialized = (float(row[3]) for row in rows[-2:])
    assert flash < materialized / 2


def test_readme_shows_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """Every line of the README's block is printed, in that order; figures and "..." are free."""

    def masked(line: str) -> str:
        return re.sub(r"\s*[\d.]+(e-\d+)?", " 0", line).rstrip()

    block = re.search(r"<!-- demo -->\n```\n(.*?)```\n<!-- /demo -->", README.read_text(), re.S)
    assert block is not None
    shown = [line for line in block.group(1).splitlines() if line.strip() != "..."]
    rest = iter([masked(line) for line in printed(capsys, "--repeats", "2")])
    for line in shown:
        assert masked(line) in rest, f"not printed at this place: {line}"


def test_mean_over_heads_and_number_of_keys(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, "--repeats", "1", "--head", "mean", "--keys", "1")
    assert any("(mean over heads)" in line for line in lines)
    assert any(re.match(r" +\[CLS\]  \S+ \d+ ", line) for line in lines)


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        (["--head", "12"], "0 to 11"),
        (["--head", "-1"], "0 to 11"),
        (["--head", "first"], "--head"),
        (["--keys", "0"], "--keys"),
        (["--file", "missing.npz"], "missing.npz"),
    ],
)
def test_wrong_options_are_one_line(
    arguments: list[str], fragment: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(["demo", *arguments])
    except SystemExit as exit:
        code = exit.code
    captured = capsys.readouterr()
    assert code == 2
    assert captured.out == ""
    assert captured.err.startswith("cuflash: error: ")
    assert captured.err.count("\n") == 1
    assert fragment in captured.err


@pytest.mark.parametrize(
    ("change", "fragment"),
    [
        ({"tokens": np.array(["a", "b"])}, "tokens"),
        ({"k": np.zeros((1, 2, 3, 5), np.float32)}, "shape"),
        ({"provenance": None}, "provenance"),
        ({"provenance": np.array("{")}, "provenance"),
        ({"provenance": np.array("{}")}, "provenance"),
    ],
)
def test_wrong_layer_file(
    change: dict[str, np.ndarray | None],
    fragment: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arrays = dict.fromkeys("qkv", np.zeros((1, 2, 3, 4), np.float32)) | {
        "tokens": np.array(["a", "b", "c"]),
        "provenance": np.array(json.dumps({"model": "m", "layer": 0, "source": "s"})),
    }
    path = tmp_path / "layer.npz"
    np.savez(path, **{name: x for name, x in (arrays | change).items() if x is not None})
    assert main(["demo", "--file", str(path)]) == 2
    error = capsys.readouterr().err
    assert fragment in error
    assert error.count("\n") == 1


def test_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "map.png"
    printed(capsys, "--repeats", "1", "--plot", str(path))
    assert path.read_bytes().startswith(b"\x89PNG")
    assert list(tmp_path.iterdir()) == [path]


def test_plot_without_matplotlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["demo", "--plot", str(tmp_path / "map.png")]) == 2
    assert "cuflash[plot]" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
