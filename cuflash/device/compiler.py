"""From CUDA C++ source to loaded kernels: assembly, parameter blocks, compilation.

A kernel is named by its file and one C++ expression, such as
``cuflash::naive_maximum<float, cuflash::kPacked>``. Each is compiled at its first use, alone, by
NVRTC through CuPy, which keeps the result on disk. All kernels take one argument: a parameter block
by value.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import cupy
import numpy as np
from cupy._core import core as cupy_core
from cupy_backends.cuda.api import driver
from cupy_backends.cuda.libs import nvrtc

from .._sources import kernel_source

_INCLUDE = re.compile(r'^#include "(?P<path>[^"]+)"\n', re.MULTILINE)
_STANDARD = "-std=c++17"

#: Names of the dtypes in C++.
C_TYPES = {
    "float64": "double",
    "float32": "float",
    "float16": "__half",
    "bfloat16": "__nv_bfloat16",
}


class KernelName(NamedTuple):
    """One instantiation: a file below the kernel folder, and the C++ expression that names it."""

    source: str
    expression: str


class Launch(NamedTuple):
    """How a kernel is started: all but its parameters. Threads are along x.

    `staying` is 0, or the blocks of a cluster where clusters stay until all work is done: then no
    more of the grid is started than fits on the device at a time. `clears` is 0, or where in the
    parameter block the address of the int lies that the kernel makes 0, and does nothing else.
    """

    kernel: KernelName
    grid: int
    block: int
    shared_bytes: int = 0
    staying: int = 0
    clears: int = 0


@cache
def assemble(path: str) -> str:
    """Return a kernel file with our own includes in their place, each once.

    CuPy's cache takes the source's text as its key and does not see files that the text includes,
    so that an edited header would not recompile the kernels that use it.

    Parameters
    ----------
    path : str
        File below the kernel folder, such as ``"softmax/fused.cu"``; includes are relative to that
        folder too.

    Returns
    -------
    str
        Source in which compilers report the lines of the original files.
    """
    return inline_includes(path, kernel_source)


def inline_includes(path: str, read: Callable[[str], str]) -> str:
    """Do what `assemble` does with files as `read` gives them."""
    return "".join(_expand(path, read, set()))


def _expand(path: str, read: Callable[[str], str], done: set[str]) -> Iterator[str]:
    done.add(path)
    text = read(path).replace("#pragma once\n", "\n")
    yield f'#line 1 "{path}"\n'
    position = 0
    for include in _INCLUDE.finditer(text):
        yield text[position : include.start()]
        if include["path"] not in done:
            yield from _expand(include["path"], read, done)
        position = include.end()
        yield f'#line {text.count(chr(10), 0, position) + 1} "{path}"\n'
    yield text[position:]


# --------------------------------------------------------------------------------------- parameters


class ParameterBlock:
    """A C struct that a kernel takes by value, declared in Python.

    Parameters
    ----------
    c_name : str
        The struct's name in C++.
    fields : dict of str to dtype
        Members in order: a dtype, ``(dtype, shape)`` for an array, or another block. Pointers are
        ``numpy.uintp``. The layout is C's: every member at a multiple of its alignment.
    """

    def __init__(self, c_name: str, fields: Mapping[str, Any]) -> None:
        self.c_name = c_name
        described = []
        for name, field in fields.items():
            kind, shape = field if isinstance(field, tuple) else (field, ())
            kind = kind.dtype if isinstance(kind, ParameterBlock) else np.dtype(kind)
            described.append((name, kind, shape))
        self.dtype: np.dtype[Any] = np.dtype(described, align=True)
        #: The block without its members: those of a structured array CuPy would describe one by
        #: one at each launch, at 90 us for these.
        self.opaque: np.dtype[Any] = np.dtype((np.void, self.dtype.itemsize))

    def zeros(self) -> np.ndarray:
        """Return a block of zeros; being an array of size one, CuPy passes it by value."""
        return np.zeros(1, self.dtype)

    def layout(self) -> dict[str, int]:
        """Return the offset of every member, nested ones by their path (``x.stride``)."""
        return dict(_offsets(self.dtype, "", 0))


def _offsets(dtype: np.dtype, prefix: str, start: int) -> Iterator[tuple[str, int]]:
    for name in dtype.names or ():
        kind, offset = dtype.fields[name][:2]  # type: ignore[index]
        yield prefix + name, start + offset
        if kind.subdtype is not None:
            base, shape = kind.subdtype
            if base.names is not None:
                for i in range(shape[0]):
                    at = start + offset + i * base.itemsize
                    yield from _offsets(base, f"{prefix}{name}[{i}].", at)
        else:
            yield from _offsets(kind, f"{prefix}{name}.", start + offset)


# ------------------------------------------------------------------------------------------ loading


def _arch_option(compute_capability: str) -> tuple[str, ...]:
    """Hopper's own instructions need the target sm_90a; elsewhere CuPy's choice holds."""
    return ("-arch=sm_90a",) if compute_capability == "90" else ()


#: CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED of the driver, which CuPy does not name.
_NON_PORTABLE_CLUSTER_SIZE_ALLOWED = 14


@cache
def load(kernel: KernelName, device: int) -> Any:
    """Return a compiled kernel, a `cupy.cuda.Function`; `device` must be the current one.

    Compiled at most once a process and device, and taken from CuPy's disk cache if it is there.
    """
    options = (_STANDARD, *_arch_option(cupy.cuda.Device(device).compute_capability))
    module = cupy.RawModule(
        code=assemble(kernel.source), options=options, name_expressions=(kernel.expression,)
    )
    function = module.get_function(kernel.expression)
    most = cupy.cuda.runtime.deviceGetAttribute(
        cupy.cuda.runtime.cudaDevAttrMaxSharedMemoryPerBlockOptin, device
    )
    # Dynamic shared memory above 48 KB must be asked for. The limit costs nothing: what a launch
    # takes is the launch's own figure.
    function.max_dynamic_shared_size_bytes = most - function.shared_size_bytes
    if int(cupy.cuda.Device(device).compute_capability) >= 90:
        # So must clusters of more than 8 blocks, which not every such device has.
        driver.funcSetAttribute(function.kernel.ptr, _NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1)
    return function.kernel  # a RawKernel would look the device up again at each launch


def warm(kernels: Iterable[KernelName], threads: int | None = None) -> None:
    """Compile kernels for the current device, several at a time: NVRTC releases the GIL."""
    from concurrent.futures import ThreadPoolExecutor  # only now: most processes never do this

    device = cupy.cuda.Device()

    def compile_one(kernel: KernelName) -> None:
        with device:
            load(kernel, device.id)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(compile_one, dict.fromkeys(kernels)))


# --------------------------------------------------------------------------------- without a device


class CompileReport(NamedTuple):
    """What ptxas says of one kernel: registers and bytes a thread, static shared bytes a block.

    `serialized`: products of warpgroups (wgmma) wait for each other, none runs beside arithmetic.
    """

    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    shared: int
    serialized: bool = False


_ENTRY = re.compile(
    r"Compiling entry function '(?P<name>[^']+)'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads.*?"
    r"Used (?P<registers>\d+) registers(?P<rest>[^\n]*)",
    re.DOTALL,
)
_SERIALIZED = re.compile(
    r"wgmma\.mma_async instructions are serialized .*? in the function '([^']+)'"
)
_SHARED = re.compile(r"(\d+) bytes smem")


def compile_only(source: str, expressions: Sequence[str], arch: str) -> dict[str, CompileReport]:
    """Compile kernels of one file as `load` does, on a machine without GPU or driver.

    Parameters
    ----------
    source : str
        File below the kernel folder.
    expressions : sequence of str
        Instantiations, compiled together.
    arch : str
        Target such as ``"sm_90a"``.

    Returns
    -------
    dict of str to CompileReport
        By expression.

    Raises
    ------
    RuntimeError
        With the compiler's log.
    """
    options = cupy_core.assemble_cupy_compiler_options((_STANDARD,))
    # All but the last two as CuPy compiles.
    options += ("-ftz=true", "--device-as-default-execution-space")
    options += (f"-arch={arch}", "--ptxas-options=-v")
    program = nvrtc.createProgram(assemble(source), source, (), ())
    try:
        for expression in expressions:
            nvrtc.addNameExpression(program, expression)
        try:
            nvrtc.compileProgram(program, options)
        except nvrtc.NVRTCError as error:
            raise RuntimeError(f"{source} for {arch}:\n{nvrtc.getProgramLog(program)}") from error
        log = nvrtc.getProgramLog(program)
        serialized = set(_SERIALIZED.findall(log))
        reports = {
            entry["name"]: CompileReport(
                registers=int(entry["registers"]),
                stack=int(entry["stack"]),
                spill_stores=int(entry["stores"]),
                spill_loads=int(entry["loads"]),
                shared=int(match[1]) if (match := _SHARED.search(entry["rest"])) else 0,
                serialized=entry["name"] in serialized,
            )
            for entry in _ENTRY.finditer(log)
        }
        return {name: reports[nvrtc.getLoweredName(program, name)] for name in expressions}
    finally:
        nvrtc.destroyProgram(program)
