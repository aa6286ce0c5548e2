"""No kernel lands that no GPU has run."""

import json
from pathlib import Path

from tests.gpu_record import RECORD, RECORDED, digest


def test_the_recorded_source_is_this_tree() -> None:
    record = json.loads(RECORD.read_text())
    assert record["passed"] > 0
    assert record["digest"] == digest(), (
        f"{', '.join(RECORDED)} changed since the last complete GPU run; on a machine with a GPU, "
        f"run `python -m pytest -m gpu` and commit {RECORD.name}"
    )


def test_digest_sees_every_change(tmp_path: Path) -> None:
    kernel = tmp_path / "kernels" / "lib" / "a.cuh"
    kernel.parent.mkdir(parents=True)
    (tmp_path / "cuflash").mkdir()
    for name in ("_options.py", "problem.py", "problem_vjp.py", "interop.py"):
        (tmp_path / "cuflash" / name).write_text("")
    seen = set()
    for change in (
        lambda: kernel.write_text("1"),
        lambda: kernel.write_text("2"),
        lambda: kernel.rename(kernel.with_name("b.cuh")),
        lambda: (tmp_path / "cuflash" / "problem.py").write_text("x"),
    ):
        change()
        seen.add(digest(tmp_path))
    assert len(seen) == 4
    (tmp_path / "kernels" / "notes.md").write_text("not run by anything")
    assert digest(tmp_path) in seen
