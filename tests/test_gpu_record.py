"""No kernel lands that no GPU has run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu_record import RECORD, RECORDED, ROOT, collected, digest

#: A tree of two GPU tests and one of another kind, which writes a record of its own.
TREE = {
    "pyproject.toml": """
[tool.pytest.ini_options]
testpaths = ["suite"]
addopts = ["-m", "not gpu"]
markers = ["gpu: ..."]
""",
    "conftest.py": """
from pathlib import Path
from tests import gpu_record
gpu_record.ROOT = Path(__file__).parent
gpu_record.RECORD = gpu_record.ROOT / "record.json"
gpu_record.environment = dict
pytest_configure = gpu_record.watch
""",
    "suite/test_one.py": """
import pytest
@pytest.mark.gpu
def test_a(): pass
def test_b(): pass
""",
    "suite/more/test_two.py": """
import pytest
@pytest.mark.gpu
def test_c(): pass
""",
}


def test_the_recorded_source_is_this_tree() -> None:
    record = json.loads(RECORD.read_text())
    assert record["passed"] > 0
    assert record["digest"] == digest(), (
        f"{', '.join(RECORDED)} changed since the last complete GPU run; on a machine with a GPU, "
        f"run `python -m pytest -m gpu` and commit {RECORD.name}"
    )


def test_every_gpu_test_was_run() -> None:
    pytest.importorskip("cupy", reason="without it no GPU test is collected")
    passed = json.loads(RECORD.read_text())["passed"]
    assert passed == collected(), "the last run of the GPU tests left some out, or there are others"


def test_no_gpu_test_is_where_none_is_collected() -> None:
    for path in (ROOT / "tests" / "analysis").glob("test_*.py"):
        assert "mark.gpu" not in path.read_text(), path


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in TREE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def recorded(tree: Path, *options: str) -> int | None:
    """Run the GPU tests of a tree and return how many the record counts, None if there is none."""
    done = subprocess.run(
        (sys.executable, "-m", "pytest", "-q", "-m", "gpu", *options),
        cwd=tree,
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    record = tree / "record.json"
    return json.loads(record.read_text())["passed"] if record.exists() else None


def test_a_complete_run_is_recorded(tree: Path) -> None:
    assert recorded(tree) == 2


@pytest.mark.parametrize(
    "options",
    [
        ["suite/test_one.py"],
        ["-k", "test_a"],
        ["--deselect", "suite/test_one.py::test_a"],
        ["--ignore", "suite/more"],
        ["--ignore-glob", "*more*"],
        ["--lf"],
        ["--ff"],
        ["--sw"],
        ["-o", "testpaths=suite/more"],
        ["-p", "leave_out"],
    ],
    ids=" ".join,
)
def test_a_run_of_a_part_is_not_recorded(options: list[str], tree: Path) -> None:
    (tree / "leave_out.py").write_text(
        "def pytest_ignore_collect(collection_path): return collection_path.name == 'more' or None"
    )
    assert recorded(tree, *options) is None


def test_digest_sees_every_change(tmp_path: Path) -> None:
    kernel = tmp_path / "kernels" / "lib" / "a.cuh"
    plan, handler = (tmp_path / "cuflash" / name / "x.py" for name in ("device", "jax"))
    for path in (kernel, plan, handler):
        path.parent.mkdir(parents=True)
    for name in ("_options.py", "problem.py", "problem_vjp.py", "interop.py"):
        (tmp_path / "cuflash" / name).write_text("")
    seen = set()
    for change in (
        lambda: kernel.write_text("1"),
        lambda: kernel.write_text("2"),
        lambda: kernel.rename(kernel.with_name("b.cuh")),
        lambda: (tmp_path / "cuflash" / "problem.py").write_text("x"),
        lambda: plan.write_text("1"),
        lambda: handler.write_text("1"),
    ):
        change()
        seen.add(digest(tmp_path))
    assert len(seen) == 6
    (tmp_path / "kernels" / "notes.md").write_text("not run by anything")
    assert digest(tmp_path) in seen
