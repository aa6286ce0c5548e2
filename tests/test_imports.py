"""What `import cuflash` loads and costs, and which file may import what."""

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from types import FunctionType
from typing import NamedTuple

import pytest

from cuflash import engine

PACKAGE = Path(__file__).resolve().parent.parent / "cuflash"
FILES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))

# Where a library may be imported: by the file as a whole, or inside its functions only.
OPTIONAL_LIBRARIES = {
    "cupy": {
        "anywhere": ("device/*", "jax/*"),
        "in functions": (
            *("interop.py", "cli.py", "analysis/roofline.py"),
            *("bench/*", "testing/adapters.py"),
        ),
    },
    "jax": {
        "anywhere": ("jax/*",),
        "in functions": ("interop.py", "cli.py", "bench/*", "testing/adapters.py"),
    },
    "torch": {
        "anywhere": (),
        "in functions": ("interop.py", "cli.py", "bench/*", "testing/adapters.py"),
    },
}
LIBRARY_OF = {"cupyx": "cupy", "cupy_backends": "cupy", "jaxlib": "jax"}


class Import(NamedTuple):
    module: str
    in_function: bool
    line: int


def imports(source: str, file: str) -> Iterator[Import]:
    """Yield the imports of a file of the package, relative ones made absolute."""

    def visit(node: ast.AST, in_function: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, in_function, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            package = ("cuflash", *PurePosixPath(file).parent.parts)
            parents = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*parents, *([node.module] if node.module else [])])
            for alias in node.names:
                yield Import(f"{base}.{alias.name}", in_function, node.lineno)
        inside = in_function or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, inside)

    yield from visit(ast.parse(source), False)


def forbidden_imports(source: str, file: str) -> list[str]:
    """List the imports that the package's layering does not allow in a file."""
    room = PurePosixPath(file).parts[0]
    other_engine = {"host": "cuflash.device", "device": "cuflash.host"}.get(room)
    found = []
    for module, in_function, line in imports(source, file):
        library = module.split(".")[0]
        rule = OPTIONAL_LIBRARIES.get(LIBRARY_OF.get(library, library))
        if rule is not None:
            patterns = rule["anywhere"] + (rule["in functions"] if in_function else ())
            if not any(PurePosixPath(file).match(pattern) for pattern in patterns):
                found.append(f"{file}:{line}: {module}")
        if other_engine and f"{module}.".startswith(f"{other_engine}."):
            found.append(f"{file}:{line}: {module}")
    return found


@pytest.mark.parametrize("file", FILES)
def test_layering(file: str) -> None:
    assert forbidden_imports((PACKAGE / file).read_text(encoding="utf-8"), file) == []


@pytest.mark.parametrize(
    ("file", "source", "allowed"),
    [
        ("device/softmax.py", "import cupy as cp", True),
        ("host/softmax.py", "import cupy", False),
        ("interop.py", "def f():\n    import cupy", True),
        ("interop.py", "import cupy", False),
        ("_softmax.py", "def f():\n    from cupyx.scipy import special", False),
        ("jax/ops.py", "import jax.numpy as jnp", True),
        ("bench/peers.py", "def f():\n    import torch", True),
        ("bench/peers.py", "import torch", False),
        ("jax/ops.py", "import torch", False),
        ("host/softmax.py", "from cuflash.device import plans", False),
        ("host/softmax.py", "from ..device.plans import tile", False),
        ("host/softmax.py", "def f():\n    from .. import device", False),
        ("host/softmax.py", "from . import attention", True),
        ("device/attention.py", "import cuflash.host.attention", False),
        ("_attention.py", "from cuflash import device, host", True),
    ],
)
def test_layering_rule(file: str, source: str, allowed: bool) -> None:
    assert (forbidden_imports(source, file) == []) is allowed


def run_python(code: str) -> str:
    """Run code in a new interpreter and return what it printed."""
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_import_loads_no_optional_library() -> None:
    code = """
import sys
import cuflash
optional = {"cupy", "jax", "torch", "scipy", "hypothesis", "matplotlib", "bokeh"}
print(sorted(optional & sys.modules.keys()))
"""
    assert run_python(code).strip() == "[]"


def test_import_works_where_no_optional_library_is_installed() -> None:
    code = """
import sys
for name in ("cupy", "cuda", "jax", "torch", "scipy", "hypothesis", "matplotlib", "bokeh"):
    sys.modules[name] = None
import cuflash
assert all(hasattr(cuflash, name) for name in cuflash.__all__)
print(cuflash.softmax([0.0, 0.0]).tolist())
"""
    assert run_python(code).strip() == "[0.5, 0.5]"


def test_import_time() -> None:
    code = """
import time
import numpy
start = time.process_time()
import cuflash
print(time.process_time() - start)
"""
    # The fastest of several runs, in time of the process: what else the machine does varies.
    assert min(float(run_python(code)) for _ in range(5)) < 0.2


def test_first_call_of_attention_imports_nothing_else_of_the_device_engine() -> None:
    pytest.importorskip("cupy")
    code = """
import sys
import numpy
from cuflash import engine
from cuflash.problem import ArraySpec, AttentionArrays, AttentionProblem, c_strides
from tests.devices import H200
core = engine.load("device")
core.device_of, core.empty, core.attention  # as a call asks for them
from cuflash.device.attention import plan_attention
q = ArraySpec((3, 200, 64), c_strides((3, 200, 64), 2), numpy.dtype("float16"))
plan = plan_attention(AttentionProblem.of(AttentionArrays(q, q, q)), q, None, H200)
assert plan.method == "wgmma"
print(*sorted(name for name in sys.modules if name.startswith("cuflash.device.")))
print("concurrent.futures" in sys.modules)
"""
    modules, pool = run_python(code).splitlines()
    others = ("vjp", "softmax", "online", "merge", "fused", "layer_norm", "baselines")
    loaded = [name.removeprefix("cuflash.device.") for name in modules.split()]
    assert "attention_plans_wgmma" in loaded
    assert [name for name in loaded if name == "plans" or any(x in name for x in others)] == []
    assert pool == "False"


def test_device_engine_has_every_function() -> None:
    pytest.importorskip("cupy")
    core = engine.load("device")
    # A function of a module's own name, whichever of the two was asked for first.
    importlib.import_module("cuflash.device.softmax")
    for name in vars(engine.Engine):
        if not name.startswith("_"):
            assert isinstance(getattr(core, name), FunctionType), name
    with pytest.raises(AttributeError, match="no attribute 'other'"):
        _ = core.other  # type: ignore[attr-defined]
