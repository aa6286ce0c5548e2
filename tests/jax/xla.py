"""The part of XLA that a handler sees, made in Python."""

import ctypes

from cuflash.jax import ffi_abi


class Xla:
    """An interface whose calls are on one stream of one device; `errors` are those created."""

    def __init__(self, stream=0x5EED, device=3):
        self.errors = []

        def create(request):
            asked = request.contents
            self.errors.append((asked.errc, asked.message.decode()))
            return 0xBAD

        def give_stream(request):
            request.contents.stream = stream or None
            return None if stream else 0xBAD

        def give_device(request):
            request.contents.device_ordinal = device or 0
            return None if device is not None else 0xBAD

        kinds = dict(ffi_abi.Api._fields_)
        self.api = ffi_abi.Api(struct_size=ctypes.sizeof(ffi_abi.Api))
        for name, function in (
            ("XLA_FFI_Error_Create", create),
            ("XLA_FFI_Stream_Get", give_stream),
            ("XLA_FFI_DeviceOrdinal_Get", give_device),
        ):
            setattr(self.api, name, kinds[name](function))

    def frame(self, text, arguments, results, stage=ffi_abi.STAGE_EXECUTE):
        """Return a call with NumPy arrays."""
        span = ffi_abi.ByteSpan(ctypes.cast(ctypes.c_char_p(text), ctypes.c_void_p), len(text))
        self.alive = [text, span, arguments, results]

        def pointers(arrays):
            buffers = [ffi_abi.Buffer(data=x.ctypes.data) for x in arrays]
            self.alive.append(buffers)
            return (ctypes.POINTER(ffi_abi.Buffer) * len(arrays))(*map(ctypes.pointer, buffers))

        return ffi_abi.CallFrame(
            api=ctypes.pointer(self.api),
            stage=stage,
            args=ffi_abi.Args(size=len(arguments), args=pointers(arguments)),
            rets=ffi_abi.Rets(size=len(results), rets=pointers(results)),
            attrs=ffi_abi.Attrs(
                size=1,
                types=(ctypes.c_int * 1)(ffi_abi.ATTRIBUTE_STRING),
                attrs=(ctypes.c_void_p * 1)(ctypes.addressof(span)),
            ),
        )
