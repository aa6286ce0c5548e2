"""The command ``cuflash fuzz`` and what is behind it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cuflash.cli import main
from cuflash.testing import AttentionCase
from cuflash.testing.fuzz import fuzz
from tests.testing import faulty

HERE = __name__
ROOT = Path(__file__).resolve().parents[2]


def attention(q, k, v, *, causal=False, return_lse=False):
    return faulty.attention(q, k, v, causal=causal, return_lse=return_lse)


def tail_dropped(q, k, v):
    return faulty.attention(q, k, v, fault="drops a tail of one key")


def breaks_at_three_keys(q, k, v):
    if k.shape[-2] >= 3 and q.shape[-2] >= 2:
        raise IndexError("three keys")
    return attention(q, k, v)


def has_another_fault_without_keys(q, k, v):
    if k.shape[-2] == 0 and q.shape[-2] >= 2:
        raise KeyError("no keys")
    return breaks_at_three_keys(q, k, v)


def leaves(q, k, v):
    if q.shape[-2] >= 2:
        sys.exit(0)
    return attention(q, k, v)


def refuses_bfloat16(x, axis=-1, *, out=None):
    if x.dtype.name == "bfloat16":
        raise NotImplementedError
    return faulty.softmax(x, axis, out=out)


def refuses(x):
    raise NotImplementedError


def sleeps(x):
    time.sleep(0.05)
    return faulty.softmax(x)


SHAPES = []


def records(x, axis=-1):
    SHAPES.append(x.shape)
    return faulty.softmax(x, axis)


def outcomes(name, **options):
    return {o.name: o for o in list(fuzz(f"{HERE}:{name}", **options))}


def test_right_attention_has_no_failure():
    found = outcomes("attention", examples=60)
    assert all(outcome.failure is None for outcome in found.values())
    assert sum(outcome.passed for outcome in found.values()) == 60


def test_failure_is_small_and_its_snippet_raises_it():
    (outcome,) = outcomes("tail_dropped", examples=300, names=["matches_oracle"]).values()
    failure = outcome.failure
    assert failure.case == AttentionCase(tk=1)
    assert failure.values["q"] == "[[0.12573022]] float32 (1, 1)"
    assert failure.message.startswith("out[0, 0] is ")
    assert "AttentionCase" not in failure.message
    with pytest.raises(AssertionError, match=r"out\[0, 0\] is "):
        exec(failure.snippet, {})


def test_an_error_is_a_failure():
    (outcome,) = outcomes("breaks_at_three_keys", examples=100, names=["repeatable"]).values()
    assert outcome.failure.case == AttentionCase(tq=2, tk=3)
    assert outcome.failure.message == "raised IndexError: three keys"


def test_shrinking_keeps_to_the_fault_and_counts_nothing():
    passed_before = []

    def note(outcome):
        if outcome.failure is not None:
            passed_before.append(outcome.passed)

    target = f"{HERE}:has_another_fault_without_keys"
    (outcome,) = list(fuzz(target, examples=100, names=["repeatable"], tick=note))
    assert outcome.failure.message == "raised IndexError: three keys"
    assert outcome.failure.case == AttentionCase(tq=2, tk=3)
    assert len(passed_before) > 1
    assert set(passed_before) == {outcome.passed}


def test_leaving_is_a_failure(capsys):
    arguments = ["fuzz", f"{HERE}:leaves", "--examples", "100", "--property", "repeatable"]
    assert main(arguments) == 1
    printed = capsys.readouterr().out
    assert "raised SystemExit: 0" in printed
    assert "case = AttentionCase(tq=2)" in printed


def test_what_is_unsupported_is_counted():
    found = outcomes("refuses_bfloat16", examples=100, names=["matches_oracle", "in_place"])
    outcome = found["matches_oracle"]
    assert outcome.unsupported > 0
    assert outcome.passed + outcome.unsupported == 50


def test_seed_chooses_the_cases():
    def drawn(seed):
        SHAPES.clear()
        outcomes("records", examples=20, seed=seed, names=["repeatable"])
        return list(SHAPES)

    assert drawn(0) == drawn(0) != drawn(1)


class TestCommand:
    def test_report(self, capsys, tmp_path):
        file = tmp_path / "report.json"
        arguments = ["fuzz", f"{HERE}:tail_dropped", "--examples", "300", "--json", str(file)]
        names = ["--property", "matches_oracle", "--property", "repeatable"]
        assert main([*arguments, *names]) == 1
        printed = capsys.readouterr().out
        report = json.loads(file.read_text())
        first, second = report["properties"]
        assert report["target"] == f"{HERE}:tail_dropped"
        assert not report["interrupted"]
        assert first["property"] == "matches_oracle"
        assert second["failure"] is None
        assert second["passed"] == 150
        assert "1 of 2 properties failed." in printed
        assert first["failure"]["message"] in printed
        for line in first["failure"]["snippet"].splitlines():
            assert line in printed

    def test_exit_code_without_failures(self, capsys):
        assert main(["fuzz", "cuflash-host", "--examples", "45", "--seed", "3"]) == 0
        assert "0 of 45 properties failed." in capsys.readouterr().out

    def test_a_target_that_supports_nothing_is_no_success(self, capsys):
        names = ["--property", "matches_oracle", "--property", "repeatable"]
        assert main(["fuzz", f"{HERE}:refuses", "--examples", "20", *names]) == 2
        captured = capsys.readouterr()
        assert f"0 of 2 properties failed, and 2 had no case that {HERE}:refuses" in captured.out
        assert "supports none of the cases" in captured.err

    def test_a_gpu_is_asked_for(self, capsys, monkeypatch):
        cupy = pytest.importorskip("cupy")
        monkeypatch.setattr(cupy, "is_available", lambda: False)
        assert main(["fuzz", "cupyx"]) == 2
        assert "needs a GPU" in capsys.readouterr().err

    def test_nothing_is_left_in_the_folder_of_the_user(self, tmp_path):
        code = "from cuflash.cli import main; main(['fuzz', 'cuflash-host', '--examples', '45'])"
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, check=True)
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["nothing"], "there is no target nothing"),
            (["cupyx:x"], "cannot import cupyx:x"),
            (["cuflash-host", "--property", "beauty"], "cannot be asked for beauty"),
            (["cuflash-host", "--json", "/nowhere/report.json"], "cannot write"),
            (["cuflash-host", "--examples", "0"], "positive integer"),
        ],
    )
    def test_wrong_arguments(self, arguments, message, capsys):
        try:
            code = main(["fuzz", *arguments])
        except SystemExit as exit:
            code = exit.code
        captured = capsys.readouterr()
        assert code == 2
        assert captured.out == ""
        assert message in captured.err

    def test_hypothesis_is_asked_for(self, capsys, monkeypatch):
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        assert main(["fuzz", "cuflash-host"]) == 2
        assert "cuflash[testing]" in capsys.readouterr().err

    @pytest.mark.skipif(os.name == "nt", reason="signals are POSIX's")
    def test_interruption_leaves_a_valid_report(self, tmp_path):
        file = tmp_path / "report.json"
        # A shell starts what is in the background with interrupts ignored.
        code = (
            "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
            "from cuflash.cli import main; sys.exit(main(sys.argv[1:]))"
        )
        arguments = ["fuzz", f"{HERE}:sleeps", "--examples", "4000", "--json", str(file)]
        with subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            while not list(tmp_path.iterdir()):  # the report is open: the run has begun
                time.sleep(0.05)
            time.sleep(1)
            process.send_signal(signal.SIGINT)
            printed, _ = process.communicate()
        assert process.returncode == 130
        assert "Interrupted" in printed
        report = json.loads(file.read_text())
        assert report["interrupted"]
        assert report["properties"][0]["property"] == "matches_oracle"
        assert [path.name for path in tmp_path.iterdir()] == ["report.json"]

    def test_progress_bar_is_for_terminals(self, capsys, monkeypatch):
        monkeypatch.setattr("cuflash._fuzz._REDRAW", 0)
        arguments = ["fuzz", f"{HERE}:attention", "--examples", "8", "--property", "repeatable"]
        assert main(arguments) == 0
        assert capsys.readouterr().err == ""
        monkeypatch.setattr("sys.stderr.isatty", lambda: True)
        assert main(arguments) == 0
        drawn = capsys.readouterr().err
        assert "[###.....................] 1/8 0 s  attention repeatable" in drawn
        assert drawn.endswith("\r\x1b[K")
