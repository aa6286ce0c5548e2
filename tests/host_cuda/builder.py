"""Kernels as shared libraries: the shipped source, the shim and g++."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from cuflash._sources import kernel_source
from cuflash.device.compiler import KernelName, ParameterBlock, inline_includes

HERE = Path(__file__).resolve().parent
BUILD = HERE.parent.parent / "build" / "host_cuda"
COMPILER = os.environ.get("CXX", "g++")
#: No contraction: an FMA is taken only where a kernel asks for one.
FLAGS = ("-std=c++17", "-O1", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off")
EXPORT = 'extern "C" __attribute__((visibility("default")))'
#: A fault is an error report and the end of the process, which the parent test sees.
SANITIZER = ("-fsanitize=address", "-fno-omit-frame-pointer", "-g")


class Edit(NamedTuple):
    """A textual change of a kernel file, for planting faults: `old` must be there, once."""

    file: str
    old: str
    new: str


def available() -> bool:
    """Tell whether there is a compiler."""
    return shutil.which(COMPILER) is not None


def _run(command: Sequence[str]) -> None:
    # A sanitizer that this process was started under is not for the compiler.
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")


def _cached(name: str, text: str, flags: Sequence[str], *inputs: str) -> Path:
    """Compile `text` unless the same was compiled before: the file's name is a digest of it all."""
    headers = "".join(path.read_text() for path in sorted((HERE / "include").iterdir()))
    key = hashlib.sha256("\0".join((COMPILER, *flags, *inputs, headers, text)).encode())
    target = BUILD / f"{name}-{key.hexdigest()[:20]}"
    if not target.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        # Under a name of its own until it is whole: several processes may build at once.
        source, unfinished = (BUILD / f"{target.name}.{os.getpid()}{end}" for end in (".cpp", ".o"))
        source.write_text(text)
        _run(
            (COMPILER, *flags, f"-I{HERE / 'include'}", str(source), *inputs, "-o", str(unfinished))
        )
        unfinished.replace(target)
        source.unlink()
    return target


def _flags(sanitize: bool) -> tuple[str, ...]:
    return FLAGS + SANITIZER * sanitize


def _runtime(sanitize: bool) -> Path:
    return _cached("runtime", (HERE / "runtime.cpp").read_text(), (*_flags(sanitize), "-O2", "-c"))


def _source(path: str, edits: Iterable[Edit] = ()) -> str:
    """Return the assembled source of a kernel file, or of a file beside this one."""

    def read(file: str) -> str:
        probe = HERE / file
        text = probe.read_text() if probe.exists() else kernel_source(file)
        for edit in edits:
            if edit.file == file:
                if text.count(edit.old) != 1:
                    raise ValueError(f"{file} has {text.count(edit.old)} places with {edit.old!r}")
                text = text.replace(edit.old, edit.new)
        return text

    return inline_includes(path, read)


@cache
def build(
    source: str, expressions: tuple[str, ...], edits: tuple[Edit, ...] = (), sanitize: bool = False
) -> ctypes.CDLL:
    """Return a library with kernels of one file, ``kernel_0`` and so on in the order given."""
    entries = "".join(
        f"{EXPORT} void kernel_{i}(const void* p) {{ cuda_on_host::call({expression}, p); }}\n"
        for i, expression in enumerate(expressions)
    )
    path = _cached(
        Path(source).stem,
        _source(source, edits) + '\n#line 1 "entries"\n' + entries,
        # Kernels of one template are one function in all libraries unless bound to their own.
        (*_flags(sanitize), "-shared", "-Wl,-Bsymbolic", "-include", "cuda_on_host.hpp"),
        str(_runtime(sanitize)),
    )
    library = ctypes.CDLL(str(path))
    library.cuda_on_host_launch.restype = ctypes.c_char_p
    return library


def c_layout(source: str, block: ParameterBlock) -> dict[str, int]:
    """Return the offsets of a parameter block's members in C++, and its size as "sizeof"."""
    members = list(block.layout())
    offsets = ", ".join(f"__builtin_offsetof({block.c_name}, {member})" for member in members)
    path = _cached(
        "layout",
        f"{_source(source)}\n"
        f"{EXPORT} const size_t layout[] = {{sizeof({block.c_name}), {offsets}}};\n",
        (*FLAGS, "-shared", "-include", "cuda_on_host.hpp"),
    )
    values = (ctypes.c_size_t * (len(members) + 1)).in_dll(ctypes.CDLL(str(path)), "layout")
    return dict(zip(("sizeof", *members), values, strict=True))


class HostKernel:
    """One kernel, run on the CPU.

    Parameters
    ----------
    kernel : KernelName
        File and expression, as the device engine names it.
    edits : sequence of Edit
        Faults to plant.
    sanitize : bool
        Build with AddressSanitizer; its library must then be loaded before Python's.
    """

    ORDERS = ("forward", "reverse", "random")

    def __init__(
        self, kernel: KernelName, *, edits: Sequence[Edit] = (), sanitize: bool = False
    ) -> None:
        self._library = build(kernel.source, (kernel.expression,), tuple(edits), sanitize)
        self._name = f"{kernel.source}: {kernel.expression}"

    def launch(
        self,
        grid: int | tuple[int, ...],
        block: int | tuple[int, ...],
        shared_bytes: int,
        parameters: np.ndarray,
        *,
        order: str = "forward",
        seed: int = 0,
    ) -> None:
        """Run the whole grid; RuntimeError if threads of a block part at a barrier."""
        shapes = []
        for shape in (grid, block):
            sizes = (shape,) if isinstance(shape, int) else shape
            shapes.append((ctypes.c_uint * 3)(*sizes, *(1,) * (3 - len(sizes))))
        error = self._library.cuda_on_host_launch(
            self._library.kernel_0,
            ctypes.c_void_p(parameters.ctypes.data),
            *shapes,
            ctypes.c_size_t(shared_bytes),
            self.ORDERS.index(order),
            ctypes.c_uint(seed),
        )
        if error is not None:
            raise RuntimeError(f"{self._name}: {error.decode()}")
