"""The record of the last complete GPU run: which source it ran, where, and how many tests passed.

No machine of continuous integration has a GPU, so it asks instead whether a GPU has run exactly
this source: `digest` of the tree must be the recorded one.
"""

import hashlib
import importlib.metadata
import json
import platform
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "tests" / "gpu_record.json"
#: All that decides what a GPU executes and with which arguments.
RECORDED = (
    "kernels",
    "cuflash/device",
    "cuflash/jax",
    "cuflash/_options.py",
    "cuflash/problem.py",
    "cuflash/problem_vjp.py",
    "cuflash/interop.py",
)
_SOURCES = (".cu", ".cuh", ".py")


def digest(root: Path = ROOT) -> str:
    """Return the SHA-256 of the recorded files, names included, whatever the checkout's place."""
    files = []
    for entry in RECORDED:
        path = root / entry
        files += [path] if path.is_file() else [p for p in path.rglob("*") if p.suffix in _SOURCES]
    total = hashlib.sha256()
    for path in sorted(files):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        total.update(f"{path.relative_to(root).as_posix()} {content}\n".encode())
    return total.hexdigest()


def environment() -> dict[str, Any]:
    """Describe the GPU at hand and the versions that compiled for it."""
    import cupy

    properties = cupy.cuda.runtime.getDeviceProperties(0)
    return {
        "gpu": properties["name"].decode(),
        "driver": cupy.cuda.runtime.driverGetVersion(),
        "cupy": cupy.__version__,
        "nvrtc": ".".join(map(str, cupy.cuda.nvrtc.getVersion())),
        "numpy": importlib.metadata.version("numpy"),
        "python": platform.python_version(),
    }


def write(passed: int) -> None:
    """Record a run in which every collected GPU test passed."""
    record = {"digest": digest(), "passed": passed, **environment()}
    RECORD.write_text(json.dumps(record, indent=2) + "\n")
