"""The C structures by which XLA calls a foreign function, as far as our handlers need them.

A mirror in ctypes of ``xla/ffi/api/c_api.h``, which jaxlib ships: each structure has its C
declaration above it. XLA writes its own ``struct_size`` into what it passes, which is larger in
releases that appended members; a handler declares the version it was written for and may use no
more than that has, unless a size says that it is there.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, TypeAlias

#: The version we declare: the first one of the typed interface that all members used here are in,
#: but for `XLA_FFI_DeviceOrdinal_Get`, whose presence is tested.
API_MAJOR, API_MINOR = 0, 1
#: XLA_FFI_Extension_Metadata: the call asks what the handler is, instead of calling it.
EXTENSION_METADATA = 1
#: XLA_FFI_ExecutionStage_EXECUTE.
STAGE_EXECUTE = 3
#: XLA_FFI_Error_Code_INVALID_ARGUMENT and XLA_FFI_Error_Code_INTERNAL.
ERROR_INVALID_ARGUMENT, ERROR_INTERNAL = 3, 13
#: XLA_FFI_AttrType_STRING.
ATTRIBUTE_STRING = 4
#: XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE: the same device work in every call, which may
#: be captured in a CUDA graph and replayed.
COMMAND_BUFFER_COMPATIBLE = 1


# typedef struct XLA_FFI_Extension_Base {
#   size_t struct_size;
#   XLA_FFI_Extension_Type type;
#   struct XLA_FFI_Extension_Base* next;
# } XLA_FFI_Extension_Base;
class ExtensionBase(ctypes.Structure):
    """XLA_FFI_Extension_Base."""

    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("type", ctypes.c_int),
        ("next", ctypes.c_void_p),
    ]


# struct XLA_FFI_Api_Version {
#   size_t struct_size;
#   XLA_FFI_Extension_Base* extension_start;
#   int major_version;  // out
#   int minor_version;  // out
# };
class ApiVersion(ctypes.Structure):
    """XLA_FFI_Api_Version."""

    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.POINTER(ExtensionBase)),
        ("major_version", ctypes.c_int),
        ("minor_version", ctypes.c_int),
    ]


# struct XLA_FFI_Error_Create_Args {
#   size_t struct_size;
#   XLA_FFI_Extension_Base* extension_start;
#   const char* message;
#   XLA_FFI_Error_Code errc;
# };
class ErrorCreateArgs(ctypes.Structure):
    """XLA_FFI_Error_Create_Args."""

    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.POINTER(ExtensionBase)),
        ("message", ctypes.c_char_p),
        ("errc", ctypes.c_int),
    ]


# struct XLA_FFI_Buffer {
#   size_t struct_size;
#   XLA_FFI_Extension_Base* extension_start;
#   XLA_FFI_DataType dtype;
#   void* data;
#   int64_t rank;
#   int64_t* dims;  // length == rank
# };
class Buffer(ctypes.Structure):
    """XLA_FFI_Buffer."""

    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.POINTER(ExtensionBase)),
        ("dtype", ctypes.c_int),
        ("data", ctypes.c_void_p),
        ("rank", ctypes.c_int64),
        ("dims", ctypes.POINTER(ctypes.c_int64)),
    ]


# typedef struct XLA_FFI_ByteSpan {
#   const char* ptr;
#   size_t len;
# } XLA_FFI_ByteSpan;
class ByteSpan(ctypes.Structure):
    """XLA_FFI_ByteSpan."""

    _fields_ = [
        ("ptr", ctypes.c_void_p),
        ("len", ctypes.c_size_t),
    ]


# struct XLA_FFI_Args {
#   size_t struct_size;
#   XLA_FFI_Extension_Base* extension_start;
#   int64_t size;
#   XLA_FFI_ArgType* types;  // length == size
#   void** args;             // length == size
# };
class Args(ctypes.Structure):
    """XLA_FFI_Args; all arguments are buffers."""

    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.POINTER(ExtensionBase)),
        ("size", ctypes.c_int64),
        ("types", ctypes.POINTER(ctypes.c_int)),
        ("args", ctypes.POINTER(ctypes.POINTER(Buffer))),
    ]


# struct XLA_FFI_Rets {
#   size_t struct_size;
#   XLA_FFI_Extension_Base* extension_start;
#   int64_t size;
#   XLA_FFI_RetType* types;  // length == size
#   void** rets;             // length == size
# };
class Rets(ctypes.Structure):
    """XLA_FFI_Rets; all results are buffers."""

    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.POINTER(ExtensionBase)),
        ("size", ctypes.c_int64),
        ("types", ctypes.POINTER(ctypes.c_int)),
        ("rets", ctypes.POINTER(ctypes.POINTER(Buffer))),
    ]


# struct XLA_FFI_Attrs {
#   size_t struct_size;
#   XLA_FFI_Extension_Base* extension_start;
#   int64_t size;
#   XLA_FFI_AttrType* types;   // length == size
#   XLA_FFI_ByteSpan** names;  // length == size
#   void** attrs;              // length == size
# };
class Attrs(ctypes.Structure):
    """XLA_FFI_Attrs."""

    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.POINTER(ExtensionBase)),
        ("size", ctypes.c_int64),
        ("types", ctypes.POINTER(ctypes.c_int)),
        ("names", ctypes.POINTER(ctypes.POINTER(ByteSpan))),
        ("attrs", ctypes.POINTER(ctypes.c_void_p)),
    ]


# struct XLA_FFI_Stream_Get_Args {
#   size_t struct_size;
#   XLA_FFI_Extension_Base* extension_start;
#   XLA_FFI_ExecutionContext* ctx;
#   void* stream;  // out
# };
class StreamGetArgs(ctypes.Structure):
    """XLA_FFI_Stream_Get_Args."""

    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.POINTER(ExtensionBase)),
        ("ctx", ctypes.c_void_p),
        ("stream", ctypes.c_void_p),
    ]


# struct XLA_FFI_DeviceOrdinal_Get_Args {
#   size_t struct_size;
#   XLA_FFI_Extension_Base* extension_start;
#   XLA_FFI_ExecutionContext* ctx;
#   int32_t device_ordinal;  // out
# };
class DeviceOrdinalGetArgs(ctypes.Structure):
    """XLA_FFI_DeviceOrdinal_Get_Args."""

    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.POINTER(ExtensionBase)),
        ("ctx", ctypes.c_void_p),
        ("device_ordinal", ctypes.c_int32),
    ]


# struct XLA_FFI_Metadata {
#   size_t struct_size;
#   XLA_FFI_Api_Version api_version;
#   XLA_FFI_Handler_Traits traits;
#   ... (of handlers that keep a state)
# };
class Metadata(ctypes.Structure):
    """XLA_FFI_Metadata."""

    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("api_version", ApiVersion),
        ("traits", ctypes.c_uint32),
    ]


# struct XLA_FFI_Metadata_Extension {
#   XLA_FFI_Extension_Base extension_base;
#   XLA_FFI_Metadata* metadata;
# };
class MetadataExtension(ctypes.Structure):
    """XLA_FFI_Metadata_Extension."""

    _fields_ = [
        ("extension_base", ExtensionBase),
        ("metadata", ctypes.POINTER(Metadata)),
    ]


_ErrorCreate = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(ErrorCreateArgs))
_StreamGet = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(StreamGetArgs))
_DeviceOrdinalGet = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(DeviceOrdinalGetArgs))


# struct XLA_FFI_Api {
#   size_t struct_size;
#   XLA_FFI_Extension_Base* extension_start;
#   XLA_FFI_Api_Version api_version;
#   const XLA_FFI_InternalApi* internal_api;
#   XLA_FFI_Error_Create* XLA_FFI_Error_Create;
#   ... (pointers to functions)
# };
class Api(ctypes.Structure):
    """XLA_FFI_Api; of the functions that we do not call a pointer."""

    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.POINTER(ExtensionBase)),
        ("api_version", ApiVersion),
        ("internal_api", ctypes.c_void_p),
        ("XLA_FFI_Error_Create", _ErrorCreate),
        ("XLA_FFI_Error_GetMessage", ctypes.c_void_p),
        ("XLA_FFI_Error_Destroy", ctypes.c_void_p),
        ("XLA_FFI_Handler_Register", ctypes.c_void_p),
        ("XLA_FFI_Stream_Get", _StreamGet),
        ("XLA_FFI_Type_Register", ctypes.c_void_p),
        ("XLA_FFI_ExecutionContext_Get", ctypes.c_void_p),
        ("XLA_FFI_State_Set", ctypes.c_void_p),
        ("XLA_FFI_State_Get", ctypes.c_void_p),
        ("XLA_FFI_DeviceMemory_Allocate", ctypes.c_void_p),
        ("XLA_FFI_DeviceMemory_Free", ctypes.c_void_p),
        ("XLA_FFI_ThreadPool_Schedule", ctypes.c_void_p),
        ("XLA_FFI_ThreadPool_NumThreads", ctypes.c_void_p),
        ("XLA_FFI_Future_Create", ctypes.c_void_p),
        ("XLA_FFI_Future_SetAvailable", ctypes.c_void_p),
        ("XLA_FFI_Future_SetError", ctypes.c_void_p),
        ("XLA_FFI_RunId_Get", ctypes.c_void_p),
        ("XLA_FFI_DeviceOrdinal_Get", _DeviceOrdinalGet),
    ]


# struct XLA_FFI_CallFrame {
#   size_t struct_size;
#   XLA_FFI_Extension_Base* extension_start;
#   const XLA_FFI_Api* api;
#   XLA_FFI_ExecutionContext* ctx;
#   XLA_FFI_ExecutionStage stage;
#   XLA_FFI_Args args;
#   XLA_FFI_Rets rets;
#   XLA_FFI_Attrs attrs;
#   XLA_FFI_Future* future;  // out
# };
class CallFrame(ctypes.Structure):
    """XLA_FFI_CallFrame; the pointer to the future is not set by a handler that has finished."""

    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.POINTER(ExtensionBase)),
        ("api", ctypes.POINTER(Api)),
        ("ctx", ctypes.c_void_p),
        ("stage", ctypes.c_int),
        ("args", Args),
        ("rets", Rets),
        ("attrs", Attrs),
        ("future", ctypes.c_void_p),
    ]


#: ``typedef XLA_FFI_Error* XLA_FFI_Handler(XLA_FFI_CallFrame* call_frame);``
Handler = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(CallFrame))
#: What a handler does with a call: the attribute, addresses of arguments and results, the frame.
Execute: TypeAlias = Callable[[bytes, list[int], CallFrame], None]


def handler(execute: Execute, traits: int = 0) -> Any:
    """Return the C function of a handler whose calls have one attribute, a string.

    An exception becomes the error that XLA reports, with its type and message: a ValueError or
    TypeError is an invalid argument, any other internal. The result must be kept as long as XLA
    may call it.
    """

    def handle(frame_pointer: Any) -> int | None:
        frame = frame_pointer.contents
        try:
            if frame.extension_start and _answer_query(frame.extension_start, traits):
                return None
            if frame.stage == STAGE_EXECUTE:
                execute(attribute(frame.attrs), addresses(frame), frame)
            return None
        except BaseException as error:  # nothing may pass into the C code that called
            return _error(frame, error)

    return Handler(handle)


def _answer_query(extension: Any, traits: int) -> bool:
    """Fill in what XLA asks about the handler, if that is what the call is for."""
    if extension.contents.type != EXTENSION_METADATA:
        return False
    asked = ctypes.cast(extension, ctypes.POINTER(MetadataExtension)).contents.metadata.contents
    asked.api_version.major_version = API_MAJOR
    asked.api_version.minor_version = API_MINOR
    asked.traits = traits
    return True


def attribute(attrs: Attrs) -> bytes:
    """Return the one attribute of a call."""
    if attrs.size != 1 or attrs.types[0] != ATTRIBUTE_STRING:
        raise TypeError(f"a call has {attrs.size} attributes; one string is needed")
    span = ByteSpan.from_address(attrs.attrs[0])
    return ctypes.string_at(span.ptr, span.len)


def addresses(frame: CallFrame) -> list[int]:
    """Return where arguments and then results lie; 0 for those without elements."""
    args, rets = frame.args, frame.rets
    buffers = args.args[: args.size] + rets.rets[: rets.size]
    return [buffer.contents.data or 0 for buffer in buffers]


def stream(frame: CallFrame) -> int:
    """Return the CUDA stream that the call is to work on."""
    request = StreamGetArgs(_SIZE_OF_STREAM_GET, None, frame.ctx, None)
    if frame.api.contents.XLA_FFI_Stream_Get(request):
        raise RuntimeError("XLA has no stream for this call")
    return request.stream or 0


_SIZE_OF_STREAM_GET = ctypes.sizeof(StreamGetArgs)


def device_ordinal(frame: CallFrame) -> int | None:
    """Return the number of the call's device, or None if this XLA cannot tell."""
    api = frame.api.contents
    if api.struct_size < Api.XLA_FFI_DeviceOrdinal_Get.offset + ctypes.sizeof(ctypes.c_void_p):
        return None
    size = ctypes.sizeof(DeviceOrdinalGetArgs)
    request = DeviceOrdinalGetArgs(size, None, frame.ctx, 0)
    if api.XLA_FFI_DeviceOrdinal_Get(request):
        return None
    return request.device_ordinal


def _error(frame: CallFrame, error: BaseException) -> int:
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:  # of the error's own __str__
        text = type(error).__name__
    message = f"cuflash: {text}".encode(errors="backslashreplace")
    request = ErrorCreateArgs(
        ctypes.sizeof(ErrorCreateArgs),
        None,
        message,
        ERROR_INVALID_ARGUMENT if isinstance(error, ValueError | TypeError) else ERROR_INTERNAL,
    )
    return frame.api.contents.XLA_FFI_Error_Create(request)
