"""The command line: what it computes, and how it fails."""

import os
import re
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cuflash
from cuflash.cli import main

BATCH, TQ, TK, D = (2, 3), 5, 7, 4


@pytest.fixture
def operands(rng: np.random.Generator) -> dict[str, np.ndarray]:
    shapes = {"q": (*BATCH, TQ, D), "k": (*BATCH, TK, D), "v": (*BATCH, TK, D)}
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """Return where input and output lie, with an earlier output in place."""
    output = tmp_path / "out"
    output.write_bytes(b"earlier")
    return tmp_path / "in", output


def save(path: Path, arrays: dict[str, Any]) -> None:
    with open(path, "wb") as file:
        np.savez(file, **arrays)


def attend(files: tuple[Path, Path], arrays: dict[str, Any], *options: str) -> dict[str, Any]:
    save(files[0], arrays)
    assert main(["attend", str(files[0]), "-o", str(files[1]), "--engine", "host", *options]) == 0
    with np.load(files[1]) as results:
        return dict(results)


def assert_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str], *fragments: str
) -> None:
    """Assert that the command ends with code 2 and one line on stderr that holds `fragments`."""
    try:
        code = main(arguments)
    except SystemExit as exit:  # argparse's way
        code = exit.code
    captured = capsys.readouterr()
    assert code == 2
    assert captured.out == ""
    assert captured.err.startswith("cuflash: error: ")
    assert captured.err.count("\n") == 1
    for fragment in fragments:
        assert fragment in captured.err


def assert_untouched(files: tuple[Path, Path]) -> None:
    """Assert that the earlier output is all there, and no temporary file beside it."""
    assert files[1].read_bytes() == b"earlier"
    assert set(files[1].parent.iterdir()) <= set(files)


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ([], {}),
        (["--causal"], {"causal": True}),
        (["--window", "2", "none"], {"window": (2, None)}),
        (["--window", "1", "0", "--query-offset", "-1"], {"window": (1, 0), "query_offset": -1}),
        (["--scale", "0.7", "--softcap", "1.5"], {"scale": 0.7, "softcap": 1.5}),
        (["--method", "tiled"], {"method": "tiled"}),
    ],
)
def test_attend_passes_its_options_on(
    arguments: list[str],
    options: dict[str, Any],
    operands: dict[str, np.ndarray],
    files: tuple[Path, Path],
) -> None:
    results = attend(files, operands, *arguments)
    out, lse = cuflash.flash_attention(**operands, return_lse=True, **options)
    assert results.keys() == {"out", "lse"}
    np.testing.assert_array_equal(results["out"], out, strict=True)
    np.testing.assert_array_equal(results["lse"], lse, strict=True)


def test_attend_takes_array_options_from_the_file(
    operands: dict[str, np.ndarray], files: tuple[Path, Path], rng: np.random.Generator
) -> None:
    options = {
        "mask": rng.random((TQ, TK)) < 0.8,
        "bias": rng.standard_normal((BATCH[1], 1, TK)),
        "query_lengths": np.array([[5], [3]]),
        "key_lengths": np.array([[7], [4]]),
        "query_offset": np.array(2),
        "alibi_slopes": np.array([0.5, 0.25, 0.0]),
        "sinks": np.array([0.0, 1.0, -np.inf]),
    }
    results = attend(files, operands | options, "--causal")
    options["query_offset"] = 2
    out, lse = cuflash.flash_attention(**operands, causal=True, return_lse=True, **options)
    np.testing.assert_array_equal(results["out"], out, strict=True)
    np.testing.assert_array_equal(results["lse"], lse, strict=True)


def test_array_options_without_axes(
    operands: dict[str, np.ndarray], files: tuple[Path, Path]
) -> None:
    options = {
        "mask": np.array(True),
        "bias": np.array(0.25),
        "alibi_slopes": np.array(0.5),
        "sinks": np.array(-1.0),
        "key_lengths": np.array(3),
    }
    results = attend(files, operands | options)
    options = {name: np.full((1, 1), x) for name, x in options.items()}
    out, lse = cuflash.flash_attention(**operands, return_lse=True, **options)
    np.testing.assert_array_equal(results["out"], out, strict=True)
    np.testing.assert_array_equal(results["lse"], lse, strict=True)


def test_attend_groups_heads(files: tuple[Path, Path], rng: np.random.Generator) -> None:
    q, k, v = (rng.standard_normal((heads, 6, D), np.float32) for heads in (4, 2, 2))
    results = attend(files, {"q": q, "k": k, "v": v}, "--enable-gqa")
    out = cuflash.flash_attention(q, k, v, enable_gqa=True)
    np.testing.assert_array_equal(results["out"], out, strict=True)


@pytest.mark.parametrize("convert", [False, True])
def test_bfloat16_passes_through_files(
    convert: bool, operands: dict[str, np.ndarray], files: tuple[Path, Path]
) -> None:
    rounded = {name: x.astype(ml_dtypes.bfloat16) for name, x in operands.items()}
    results = attend(files, operands, "--dtype", "bfloat16") if convert else attend(files, rounded)
    out, lse = cuflash.flash_attention(**rounded, return_lse=True)
    np.testing.assert_array_equal(results["out"].view(ml_dtypes.bfloat16), out, strict=True)
    np.testing.assert_array_equal(results["lse"], lse, strict=True)


@pytest.mark.parametrize(
    ("arguments", "function", "axis"),
    [
        ([], cuflash.softmax, -1),
        (["--axis", "0"], cuflash.softmax, 0),
        (["--axis", "0,-1"], cuflash.softmax, (0, -1)),
        (["--axis", "none", "--log"], cuflash.log_softmax, None),
        (["--method", "online", "--log"], cuflash.log_softmax, -1),
    ],
)
def test_softmax(
    arguments: list[str],
    function: Any,
    axis: Any,
    files: tuple[Path, Path],
    rng: np.random.Generator,
) -> None:
    x = rng.standard_normal((3, 4, 5), np.float32)
    with open(files[0], "wb") as file:
        np.save(file, x)
    assert main(["softmax", str(files[0]), "-o", str(files[1]), *arguments]) == 0
    method = "online" if "online" in arguments else "auto"
    np.testing.assert_array_equal(
        np.load(files[1]), function(x, axis=axis, method=method), strict=True
    )


def damaged(operands: dict[str, np.ndarray], path: Path) -> None:
    save(path, operands)
    content = bytearray(path.read_bytes())
    content[200:400] = bytes(200)
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("write", "fragment"),
    [
        (lambda operands, path: None, "No such file"),
        (lambda operands, path: path.mkdir(), "directory"),
        (lambda operands, path: path.write_bytes(b""), ".npz"),
        (lambda operands, path: path.write_text("q, k, v"), ".npz"),
        (lambda operands, path: path.write_bytes(b"PK\3\4 no zip file"), ".npz"),
        (damaged, ".npz"),
        (lambda operands, path: path.write_bytes(b"\x93NUMPY\1\0"), ".npz"),
    ],
    ids=["missing", "folder", "empty", "text", "no zip", "damaged", "cut"],
)
def test_unreadable_input_is_one_line(
    write: Any,
    fragment: str,
    operands: dict[str, np.ndarray],
    files: tuple[Path, Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    write(operands, files[0])
    assert_refused(["attend", str(files[0]), "-o", str(files[1])], capsys, str(files[0]), fragment)
    assert_untouched(files)


@pytest.mark.parametrize(
    ("change", "arguments", "fragment"),
    [
        ({"v": None}, [], "no array v"),
        ({"key_length": np.array(3)}, [], "key_length"),
        ({"q": np.zeros((2, 3, 5, 6), np.float32)}, [], "q"),
        ({"k": np.zeros((2, 3, 7, 4))}, [], "float64"),
        ({"q": np.zeros(4, np.float32)}, [], "q"),
        ({"q": np.zeros((2, 3, 5, 4), np.int32)}, [], "int32"),
        ({"mask": np.zeros((5, 7))}, [], "mask"),
        ({"key_lengths": np.array([[8], [1]])}, [], "key_lengths"),
        ({"query_offset": np.array(3)}, ["--query-offset", "3"], "query_offset"),
        ({"q": np.array([None])}, [], "in"),
        ({}, ["--scale", "nan"], "scale"),
        ({}, ["--softcap", "-1"], "softcap"),
        ({}, ["--window", "-1", "0"], "window"),
        ({}, ["--window", "1"], "--window"),
        ({}, ["--method", "wgmma"], "tiled"),
        ({}, ["--num-splits", "0"], "--num-splits"),
        ({}, ["--casual"], "--casual"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict | list) else value,
)
def test_wrong_arrays_and_options_are_one_line(
    change: dict[str, Any],
    arguments: list[str],
    fragment: str,
    operands: dict[str, np.ndarray],
    files: tuple[Path, Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    arrays = {name: x for name, x in (operands | change).items() if x is not None}
    save(files[0], arrays)
    command = ["attend", str(files[0]), "-o", str(files[1]), "--engine", "host", *arguments]
    assert_refused(command, capsys, fragment)
    assert_untouched(files)


def test_single_and_named_arrays_are_not_mixed_up(
    operands: dict[str, np.ndarray], files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    save(files[0], operands)
    assert_refused(["softmax", str(files[0]), "-o", str(files[1])], capsys, ".npy")
    with open(files[0], "wb") as file:
        np.save(file, operands["q"])
    assert_refused(["attend", str(files[0]), "-o", str(files[1])], capsys, ".npz")
    assert_refused(["softmax", str(files[0]), "-o", str(files[1]), "--axis", "4"], capsys, "axis")
    assert_untouched(files)


@pytest.mark.parametrize(
    ("value", "dtype", "fragment"),
    [
        (1 + 2j, "float32", "complex128"),
        (np.datetime64("2024-01-01"), "float64", "datetime64"),
        (np.timedelta64(5, "s"), "float32", "timedelta64"),
        ("7", "float32", "<U1"),
        (b"7", "float32", "|S1"),
        (1e5, "float16", "float16"),
        (70000, "float16", "float16"),
        (1e300, "float32", "float32"),
        (-1e300, "bfloat16", "bfloat16"),
    ],
    ids=str,
)
def test_what_a_conversion_would_change_is_refused(
    value: Any,
    dtype: str,
    fragment: str,
    files: tuple[Path, Path],
    operands: dict[str, np.ndarray],
    capsys: pytest.CaptureFixture[str],
) -> None:
    x = np.full((2, 3, 5, 4), value)
    with open(files[0], "wb") as file:
        np.save(file, x)
    options = ["-o", str(files[1]), "--engine", "host", "--dtype", dtype]
    assert_refused(["softmax", str(files[0]), *options], capsys, "x ", fragment)
    save(files[0], operands | {"q": x})
    assert_refused(["attend", str(files[0]), *options], capsys, "q ", fragment)
    assert_untouched(files)


@pytest.mark.parametrize(
    "x", [np.array([True, False]), np.array([3, -7]), np.array([1.0, -np.inf])]
)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_real_numbers_are_converted(x: np.ndarray, dtype: str, files: tuple[Path, Path]) -> None:
    with open(files[0], "wb") as file:
        np.save(file, x)
    command = ["softmax", str(files[0]), "-o", str(files[1]), "--engine", "host", "--dtype", dtype]
    assert main(command) == 0
    expected = cuflash.softmax(x.astype(dtype))
    result = np.load(files[1])
    if dtype == "bfloat16":
        result = result.view(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(result, expected, strict=True)


@pytest.mark.skipif(not hasattr(os, "pathconf"), reason="this system does not tell")
def test_names_as_long_as_the_file_system_allows(
    operands: dict[str, np.ndarray], tmp_path: Path
) -> None:
    output = tmp_path / ("x" * os.pathconf(tmp_path, "PC_NAME_MAX"))
    attend((tmp_path / "in", output), operands)
    assert set(tmp_path.iterdir()) == {tmp_path / "in", output}


def test_output_that_cannot_be_written_is_one_line(
    operands: dict[str, np.ndarray], files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    save(files[0], operands)
    for output in (files[0].parent, files[0].parent / "no such folder" / "out", Path(os.devnull)):
        assert_refused(["attend", str(files[0]), "-o", str(output)], capsys, str(output))
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)


def test_interruption_leaves_no_trace(
    operands: dict[str, np.ndarray], files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    save(files[0], operands)
    monkeypatch.setattr(cuflash, "flash_attention", interrupted)
    assert main(["attend", str(files[0]), "-o", str(files[1])]) == 130
    assert_untouched(files)


def test_failure_while_writing_leaves_no_trace(
    operands: dict[str, np.ndarray],
    files: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def disk_full(file: Any, **_: Any) -> None:
        file.write(b"half")
        raise OSError(28, "No space left on device")

    save(files[0], operands)
    monkeypatch.setattr(np, "savez", disk_full)
    assert_refused(["attend", str(files[0]), "-o", str(files[1])], capsys, "No space left")
    assert_untouched(files)


def test_output_keeps_links_and_permissions(
    operands: dict[str, np.ndarray], files: tuple[Path, Path]
) -> None:
    files[1].chmod(0o640)
    link = files[1].with_name("link")
    link.symlink_to(files[1])
    attend((files[0], link), operands)
    assert link.is_symlink()
    assert stat.S_IMODE(files[1].stat().st_mode) == 0o640
    with np.load(files[1]) as results:
        assert "out" in results


def test_regimes_of_a_gpu_that_is_not_here(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("cupy")
    assert main(["info", "--softmax", "--device-like", "t4"]) == 0
    regimes, source = capsys.readouterr().out.split("without opt-in\n")
    assert "fused   to N = " in regimes
    assert "online  beyond" in regimes
    occupancy = {
        int(n): rest[-1] for n, *rest in (line.split() for line in source.splitlines()[1:])
    }
    assert occupancy[4096] == "100%"
    assert occupancy[8192] == "50%"
    assert "does not fit: 12288 is the longest row" in source
    assert_refused(["info", "--softmax", "--device-like", "abacus"], capsys, "t4, h200")
    assert_refused(["info", "--device-like", "t4"], capsys, "--softmax")


@pytest.mark.parametrize(
    "option",
    [
        *("--causal", "--enable-gqa", "--scale 0", "--window 1 none", "--softcap 2"),
        *("--num-splits 2", "--options mask", "--strides 1,1"),
    ],
)
@pytest.mark.parametrize("subject", ["", "--softmax "])
def test_info_refuses_options_of_attention_for_what_has_none(
    subject: str, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = f"{option.split()[0]} goes with --attention"
    assert_refused(["info", *f"{subject}{option}".split()], capsys, said)


@pytest.mark.parametrize(
    "asked", ["9" * 20 + ",64", "2,3,400,64 --strides " + "9" * 20 + ",1,1,1 1,1,1,1 1,1,1,1"]
)
def test_info_refuses_what_64_bits_cannot_address(
    asked: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("cupy", reason="it knows the kernels")
    ask = f"info --device-like h200 --dtype bfloat16 --attention {asked}"
    assert_refused(ask.split(), capsys, "beyond 64 bits")


@pytest.mark.parametrize(
    ("arguments", "taken", "said"),
    [
        (["2,16,4096,128"], "wgmma", "tile    128 queries x 128 keys: the largest tile"),
        (["2,16,4096,128", "--softcap", "30"], "wgmma", "cuflash::SoftcapScore<float>"),
        (["2,16,4096,128", "--softcap", "1e30"], "mma", "wgmma   needs a softcap between"),
        (["2,16,512,256", "--softcap", "30"], "wgmma", "128 queries x 64 keys: 64 keys leave room"),
        (["2,16,4096,128", "--device-like", "t4"], "simt", "mma     needs compute capability 8.0"),
        (
            ["2,16,4096,64", "--device-like", "t4", "--dtype", "float16"],
            "mma",
            "forward_mma_sm75.cu",
        ),
        (["2,16,4096,300"], "simt", "wgmma   needs at most 256 features"),
        (["2,16,4096,64", "--dtype", "float32"], "mma", "forward_tf32.cu"),
        (["2,16,8,64", "--dtype", "float32"], "simt", "mma     could run it, more slowly"),
        (["2,16,4096,200", "--dtype", "float32"], "simt", "mma     has no tile of 200 features"),
        (["4,64,64", "4,0,64", "--causal"], "mma", "wgmma   needs 1 to"),
        (["1,32,1,128", "1,8,65536,128", "--enable-gqa"], "mma", "shares, merged by"),
        (["0,64,64"], "", "there is nothing to write"),
        (
            ["2,64,64", "--strides", "4096,64,1", "8192,128,2", "4096,64,1"],
            "mma",
            "wgmma   cannot fetch k by TMA: its last axis is not contiguous",
        ),
        (["2,64,64", "--scale", "1e30"], "mma", "wgmma   needs a scale between 2^-64 and 2^64"),
        (["2,64,64", "--window", "9", "none", "--options", "mask"], "wgmma", "MaskScore"),
    ],
)
def test_the_kernel_of_an_attention(
    arguments: list[str], taken: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("cupy")
    like = [] if "--device-like" in arguments else ["--device-like", "h200"]
    assert main(["info", "--dtype", "bfloat16", *like, "--attention", *arguments]) == 0
    out = capsys.readouterr().out
    assert said in out
    assert not taken or re.search(rf"^{taken} +taken$", out, re.MULTILINE)


@pytest.mark.parametrize(
    ("device", "dtype", "features", "taken", "said"),
    [
        ("t4", "bfloat16", 128, "simt", "mma     needs compute capability 8.0"),
        ("h200", "float32", 128, "mma", "backward_tf32.cu"),
        ("h200", "float32", 129, "simt", "mma     has no tile of 129 features"),
    ],
)
def test_the_family_of_its_gradients(
    device: str,
    dtype: str,
    features: int,
    taken: str,
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("cupy")
    shape = f"2,16,4096,{features}"
    ask = ["info", "--dtype", dtype, "--device-like", device, "--attention", shape]
    assert main(ask) == 0
    gradients = capsys.readouterr().out.partition("gradients of q, k and v")[2]
    assert re.search(rf"^ +{taken} +taken$", gradients, re.MULTILINE)
    assert said in gradients
    assert "row_deltas" in gradients


def test_shapes_that_are_none_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("cupy")
    ask = ["info", "--device-like", "h200", "--attention"]
    assert_refused([*ask, "2,x"], capsys, "'2,x' is no shape")
    assert_refused([*ask, "8"], capsys, "q has 1 axes")
    assert_refused([*ask, "8,8", "8,9"], capsys, "k has 9 features")
    assert_refused([*ask, "8,8", "--strides", "8,1"], capsys, "as many lists as arrays")
    assert_refused([*ask, "8,8", "--strides", "8,x"], capsys, "invalid list of integers")
    assert_refused([*ask, "8,8", "8,8", "8,8", "8,8"], capsys, "q, k and v are three")


def test_info_without_cupy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert main(["info"]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines["cuflash"] == cuflash.__version__
    assert lines["NumPy"] == np.__version__
    assert "threads" in lines["BLAS"]
    assert "CuPy is not installed" in lines["engines"]
    assert "not available" in lines["CuPy"]


def test_device_engine_without_cupy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert_refused(["demo", "--engine", "device"], capsys, "CuPy is not installed")


def run_module(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cuflash", *arguments]
    return subprocess.run(command, text=True, capture_output=True, timeout=120, check=False)


def test_info_as_it_is() -> None:
    done = run_module("info")
    assert done.returncode == 0
    assert done.stderr == ""
    assert "engines" in done.stdout


def test_exit_code_of_the_module(tmp_path: Path) -> None:
    missing = tmp_path / "missing.npy"
    done = run_module("softmax", str(missing), "-o", str(tmp_path / "out.npy"))
    assert done.returncode == 2
    assert done.stderr == f"cuflash: error: cannot read {missing}: No such file or directory\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(os.name == "nt", reason="a POSIX shell is needed")
def test_closed_pipe_is_no_traceback() -> None:
    command = f"{sys.executable} -m cuflash demo --engine host --repeats 1 | head -n 1"
    done = subprocess.run(
        ["sh", "-c", command], text=True, capture_output=True, timeout=120, check=True
    )
    assert done.stdout.startswith("engine")
    assert done.stderr == ""
