"""The ctypes mirror of XLA's structures against the header that jaxlib ships."""

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import jax
import numpy as np
import pytest

from cuflash.jax import ffi_abi
from tests.jax.xla import Xla

STRUCTURES = {
    "XLA_FFI_Extension_Base": ffi_abi.ExtensionBase,
    "XLA_FFI_Api_Version": ffi_abi.ApiVersion,
    "XLA_FFI_Error_Create_Args": ffi_abi.ErrorCreateArgs,
    "XLA_FFI_Buffer": ffi_abi.Buffer,
    "XLA_FFI_ByteSpan": ffi_abi.ByteSpan,
    "XLA_FFI_Args": ffi_abi.Args,
    "XLA_FFI_Rets": ffi_abi.Rets,
    "XLA_FFI_Attrs": ffi_abi.Attrs,
    "XLA_FFI_Stream_Get_Args": ffi_abi.StreamGetArgs,
    "XLA_FFI_DeviceOrdinal_Get_Args": ffi_abi.DeviceOrdinalGetArgs,
    "XLA_FFI_Metadata": ffi_abi.Metadata,
    "XLA_FFI_Metadata_Extension": ffi_abi.MetadataExtension,
    "XLA_FFI_Api": ffi_abi.Api,
    "XLA_FFI_CallFrame": ffi_abi.CallFrame,
}
NUMBERS = {
    "XLA_FFI_Extension_Metadata": ffi_abi.EXTENSION_METADATA,
    "XLA_FFI_ExecutionStage_EXECUTE": ffi_abi.STAGE_EXECUTE,
    "XLA_FFI_Error_Code_INVALID_ARGUMENT": ffi_abi.ERROR_INVALID_ARGUMENT,
    "XLA_FFI_Error_Code_INTERNAL": ffi_abi.ERROR_INTERNAL,
    "XLA_FFI_AttrType_STRING": ffi_abi.ATTRIBUTE_STRING,
    "XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE": ffi_abi.COMMAND_BUFFER_COMPATIBLE,
    "XLA_FFI_API_MAJOR": ffi_abi.API_MAJOR,
}
#: What a release named anew, by the name that it had.
RENAMED = """
#if XLA_FFI_API_MINOR >= 4
#define XLA_FFI_Extension_Base XLA_FFI_InternalExtension
#endif
"""


def members(name):
    """Return the members of one of our structures that C is asked for.

    Functions of the interface that we do not call have been renamed between releases; they lie
    between those that we do call, whose places show that all are there.
    """
    called = [n for n, kind in ffi_abi.Api._fields_ if kind is not ctypes.c_void_p]
    return called if name == "XLA_FFI_Api" else [n for n, _ in STRUCTURES[name]._fields_]


@pytest.fixture(scope="module")
def header(tmp_path_factory):
    """What the header says of each name: offset and size of members, values of constants."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        pytest.skip("no C++ compiler")
    asked = [(name, member) for name in STRUCTURES for member in members(name)]
    lines = [
        f"offsetof({name}, {member}), sizeof((({name}*)0)->{member})," for name, member in asked
    ]
    lines += [f"{name}, 0," for name in NUMBERS]
    source = tmp_path_factory.mktemp("abi") / "layout.cpp"
    source.write_text(
        "#include <stdio.h>\n#include <xla/ffi/api/c_api.h>\n"
        + RENAMED
        + "long long numbers[][2] = {"
        + "\n".join(lines)
        + "};\n"
        'int main() { for (auto& pair : numbers) printf("%lld %lld\\n", pair[0], pair[1]); }\n'
    )
    program = source.with_suffix("")
    subprocess.run((compiler, f"-I{jax.ffi.include_dir()}", source, "-o", program), check=True)
    printed = subprocess.run(program, check=True, capture_output=True, text=True).stdout
    pairs = [tuple(map(int, line.split())) for line in printed.splitlines()]
    return dict(zip([*asked, *NUMBERS], pairs, strict=True))


@pytest.mark.parametrize("name", STRUCTURES)
def test_structures_are_those_of_the_header(header, name):
    for member in members(name):
        ours = getattr(STRUCTURES[name], member)
        assert (ours.offset, ours.size) == header[name, member], member


def test_numbers_are_those_of_the_header(header):
    assert {name: header[name][0] for name in NUMBERS} == NUMBERS


def test_declarations_stand_above_the_structures():
    """The C declarations in the comments name the members of the structures, in their order."""
    lines = Path(ffi_abi.__file__).read_text().splitlines()
    for name, kind in STRUCTURES.items():
        at = lines.index(f"class {kind.__name__}(ctypes.Structure):")
        start = max(i for i in range(at) if lines[i].startswith(("# struct", "# typedef struct")))
        assert f" {name} {{" in lines[start]
        declared = [
            line.split(";")[0].split()[-1].lstrip("*") for line in lines[start + 1 : at - 1]
        ]
        shown = [member for member in declared if member.isidentifier()]
        assert shown == [member for member, _ in kind._fields_][: len(shown)]


# ------------------------------------------------------------------------------------ the handler


def test_a_call_is_decoded():
    xla, seen = Xla(), []
    x, y, empty = np.zeros(3), np.zeros(2), np.zeros(0)
    frame = xla.frame(b"what to do", [x, y], [empty])
    frame.rets.rets[0].contents.data = None
    handle = ffi_abi.handler(lambda *call: seen.append(call[:2]))
    assert handle(ctypes.byref(frame)) is None
    assert seen == [(b"what to do", [x.ctypes.data, y.ctypes.data, 0])]
    assert ffi_abi.stream(frame) == 0x5EED
    assert ffi_abi.device_ordinal(frame) == 3


def test_other_stages_do_nothing():
    frame = Xla().frame(b"", [], [], stage=ffi_abi.STAGE_EXECUTE - 1)
    assert ffi_abi.handler(lambda *call: 1 / 0)(ctypes.byref(frame)) is None


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError("wrong \u03b1"), ffi_abi.ERROR_INVALID_ARGUMENT),
        (TypeError("kind"), ffi_abi.ERROR_INVALID_ARGUMENT),
        (ZeroDivisionError("deep"), ffi_abi.ERROR_INTERNAL),
        (KeyboardInterrupt(), ffi_abi.ERROR_INTERNAL),
    ],
)
def test_an_exception_becomes_an_error(error, code):
    def execute(*call):
        raise error

    xla = Xla()
    frame = xla.frame(b"", [], [])
    assert ffi_abi.handler(execute)(ctypes.byref(frame)) == 0xBAD
    assert xla.errors == [(code, f"cuflash: {type(error).__name__}: {error}")]


class UnspeakableError(Exception):
    def __str__(self):
        raise RuntimeError


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (RuntimeError("half \udc80"), r"cuflash: RuntimeError: half \udc80"),
        (UnspeakableError(), "cuflash: UnspeakableError"),
    ],
)
def test_an_error_without_a_readable_message_is_an_error(error, message):
    def execute(*call):
        raise error

    xla = Xla()
    assert ffi_abi.handler(execute)(ctypes.byref(xla.frame(b"", [], []))) == 0xBAD
    assert xla.errors == [(ffi_abi.ERROR_INTERNAL, message)]


def test_a_call_without_its_attribute_is_an_error():
    xla = Xla()
    frame = xla.frame(b"", [], [])
    frame.attrs.size = 0
    assert ffi_abi.handler(lambda *call: None)(ctypes.byref(frame)) == 0xBAD
    assert "one string is needed" in xla.errors[0][1]


def test_queries_are_answered():
    asked = ffi_abi.Metadata()
    extension = ffi_abi.MetadataExtension(
        ffi_abi.ExtensionBase(type=ffi_abi.EXTENSION_METADATA), ctypes.pointer(asked)
    )
    start = ctypes.cast(ctypes.pointer(extension), ctypes.POINTER(ffi_abi.ExtensionBase))
    frame = ffi_abi.CallFrame(extension_start=start)
    handle = ffi_abi.handler(lambda *call: 1 / 0, ffi_abi.COMMAND_BUFFER_COMPATIBLE)
    assert handle(ctypes.byref(frame)) is None
    assert (asked.api_version.major_version, asked.api_version.minor_version) == (0, 1)
    assert asked.traits == ffi_abi.COMMAND_BUFFER_COMPATIBLE


def test_late_members_are_not_read_where_they_are_not():
    xla = Xla()
    frame = xla.frame(b"", [], [])
    xla.api.struct_size = ffi_abi.Api.XLA_FFI_DeviceOrdinal_Get.offset
    assert ffi_abi.device_ordinal(frame) is None
    refusing = Xla(stream=0, device=None)
    frame = refusing.frame(b"", [], [])
    assert ffi_abi.device_ordinal(frame) is None
    with pytest.raises(RuntimeError, match="no stream"):
        ffi_abi.stream(frame)
