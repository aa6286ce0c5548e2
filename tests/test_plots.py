"""``cuflash plot``: what it writes, and how it fails."""

import sys
from pathlib import Path

import pytest

from cuflash.cli import main

ROOT = Path(__file__).resolve().parent.parent
RESULTS = {
    "softmax": ROOT / "benchmarks" / "results" / "nvidia-h200" / "softmax.csv",
    "attention": ROOT / "benchmarks" / "results" / "nvidia-h200" / "attention_wide.csv",
}
HOST_RESULTS = ROOT / "benchmarks" / "results" / "amd-epyc" / "host.csv"
MODEL = ("memory", "traffic", "roofline")


def arguments(subject: str) -> list[str]:
    results = ["--results", str(RESULTS[subject])] if subject in RESULTS else []
    return ["plot", subject, *results]


def refusal(given: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command that is refused and return its one line."""
    try:
        code = main(given)
    except SystemExit as exit:  # argparse's way
        code = exit.code
    captured = capsys.readouterr()
    assert (code, captured.out) == (2, "")
    assert captured.err.startswith("cuflash: error: ")
    assert captured.err.count("\n") == 1
    return captured.err


@pytest.mark.parametrize("subject", [*MODEL, *RESULTS])
@pytest.mark.parametrize(("suffix", "start"), [(".png", b"\x89PNG"), (".SVG", b"<?xml")])
def test_format_by_file_name(subject: str, suffix: str, start: bytes, tmp_path: Path) -> None:
    path = tmp_path / f"picture{suffix}"
    assert main([*arguments(subject), "-o", str(path)]) == 0
    assert path.read_bytes().startswith(start)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("subject", ["softmax", "attention"])
def test_one_result_file_for_both(subject: str, tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    assert main(["plot", subject, "--results", str(HOST_RESULTS), "-o", str(path)]) == 0
    assert path.stat().st_size > 10_000


@pytest.mark.parametrize("subject", MODEL)
def test_a_picture_drawn_again_is_the_same_file(subject: str, tmp_path: Path) -> None:
    first, second = tmp_path / "first.svg", tmp_path / "second.svg"
    for path in (first, second):
        assert main([*arguments(subject), "-o", str(path)]) == 0
    assert first.read_bytes() == second.read_bytes()


def test_options_reach_the_picture(tmp_path: Path) -> None:
    def drawn(*options: str) -> str:
        path = tmp_path / "picture.svg"
        assert main(["plot", "roofline", "-o", str(path), *options]) == 0
        return path.read_text()

    for options, fragment in [
        ([], "H100 SXM: 3.35 TB/s, 989 TFLOP/s"),
        (["--gpu", "t4", "--dtype", "float32"], "T4: 0.32 TB/s, 8 TFLOP/s"),
        (["--batch", "3", "--heads", "5", "--head-dim", "7"], "B = 3, H = 5, D = 7, bfloat16"),
        (["--tokens", "4000"], "T = 4,000"),
    ]:
        assert fragment in drawn(*options)


@pytest.mark.parametrize(
    ("given", "fragment"),
    [
        (["memory"], "give -o OUT, --html OUT or both"),
        (["traffic"], "required: -o"),
        (["pictures"], "invalid choice: 'pictures'"),
        ([], "SUBJECT"),
        (["memory", "-o", "picture.pdf"], "-o picture.pdf: the name must end in .png or .svg"),
        (["memory", "-o", "picture"], "must end in .png or .svg"),
        (["memory", "-o", "missing/picture.png"], "cannot write missing/picture.png"),
        (["memory", "-o", "p.png", "--heads", "0"], "--heads: invalid size value: '0'"),
        (["memory", "-o", "p.png", "--batch", "1" + 400 * "0"], "--batch: invalid size value"),
        (["memory", "-o", "p.png", "--head-dim", "1.5"], "--head-dim: invalid size value: '1.5'"),
        (["memory", "-o", "p.png", "--dtype", "int8"], "--dtype: invalid choice: 'int8'"),
        (["memory", "-o", "p.png", "--gpu", "v100"], "--gpu: invalid choice: 'v100'"),
        (["memory", "-o", "p.png", "--results", "r.csv"], "unrecognized arguments: --results"),
        (["softmax", "-o", "p.png"], "required: --results"),
        (["softmax", "-o", "p.png", "--results", "r.csv"], "cannot read r.csv"),
        (["softmax", "-o", "p.png", "--results", "."], "cannot read ."),
    ],
)
def test_wrong_arguments(
    given: list[str],
    fragment: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert fragment in refusal(["plot", *given], capsys)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("content", "fragment"),
    [
        (b"", "has no column method, dtype"),
        (b"method,dtype,rows,N,ms\n", "there is no row of softmax"),
        (
            b"method,dtype,rows,N,ms\nauto,float32,2,many,1\n",
            "N must be a positive integer, got 'many'",
        ),
        (b"method,dtype,rows,N,ms\nauto,float32,2,4,0\n", "ms must be a positive number, got '0'"),
        (b"method,dtype,rows,N,ms\nauto,float32,2,4,nan\n", "ms must be a positive number"),
        (b"method,dtype,rows,N,ms\nauto,float32,-2,4,1\n", "rows must be a positive integer"),
        (b"method,dtype,rows,N,ms\nauto,real,2,4,1\n", "real"),
        (b"method,dtype,rows,N,ms\nauto\n", "there is no row of softmax"),
        (b"\xff\xfe\x00", "is not a CSV file"),
        (b"method,dtype,B,H,T,D,causal,ms\n", "has no column rows, N"),
    ],
)
def test_wrong_result_file_leaves_the_earlier_picture(
    content: bytes, fragment: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results, picture = tmp_path / "results.csv", tmp_path / "picture.png"
    results.write_bytes(content)
    picture.write_bytes(b"earlier")
    given = ["plot", "softmax", "--results", str(results), "-o", str(picture)]
    error = refusal(given, capsys)
    assert fragment in error
    assert str(results) in error
    assert picture.read_bytes() == b"earlier"
    assert set(tmp_path.iterdir()) == {results, picture}


def test_no_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    given = ["plot", "memory", "--gpu", "device", "-o", str(tmp_path / "picture.png")]
    assert "--gpu device: " in refusal(given, capsys)
    assert not list(tmp_path.iterdir())


def test_without_matplotlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    error = refusal(["plot", "memory", "-o", str(tmp_path / "picture.png")], capsys)
    assert "matplotlib (pip install 'cuflash[plot]')" in error
    assert not list(tmp_path.iterdir())
