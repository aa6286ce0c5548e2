"""Which library an array belongs to, and the way in and out.

Every public function opens its call here: the operands are recognised, all of one library, and
become *native* arrays (NumPy for the host engine, CuPy for the device engine) that share memory
with what the caller passed wherever the library allows it. Results go back as the caller's kind of
array. Nothing above or below this module knows JAX or PyTorch.
"""

from __future__ import annotations

import importlib
import numbers
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import ml_dtypes
import numpy as np

from .problem import ArraySpec

_DLPACK_CPU, _DLPACK_CUDA = 1, 2
#: Work allowed to `numpy.shares_memory`; past it two arrays whose bounds overlap are taken to share
#: memory.
_OVERLAP_WORK = 10_000


@dataclass(frozen=True, slots=True)
class Home:
    """Where the operands of one call live, and how results return there.

    Parameters
    ----------
    library : str
        Name of the library whose arrays came in.
    engine : {"host", "device"}
        The engine that computes: NumPy or CuPy.
    device : int
        Ordinal of the GPU, or of the CPU where a library has several; else 0.
    export : callable
        Native array to the caller's kind of array, without a copy where the library allows one.
    """

    library: str
    engine: str
    device: int
    export: Callable[[Any], Any]

    def restore(self, native: Any, given: object | None = None) -> Any:
        """Return `given`, the caller's output, or else `native` as the caller's kind of array.

        The caller's own output is handed over too: that is what makes the caller's stream wait for
        the work that fills it, and for the reads of operands whose memory it may use again.
        """
        result = self.export(native)
        return result if given is None else given


def _read(name: str, x: Any, reader: Callable[[Any], Any]) -> Any:
    """Return `reader(x)`; a library's refusal becomes a TypeError that names the argument."""
    try:
        return reader(x)
    except (BufferError, RuntimeError, TypeError) as error:
        raise TypeError(f"{name} cannot be read as an array: {error}") from error


def _identity(array: Any) -> Any:
    return array


def _numpy_scalars(array: np.ndarray) -> Any:
    """0-d results become NumPy scalars, as ufuncs return them."""
    return array[()] if array.ndim == 0 else array


_NUMPY = Home("numpy", "host", 0, _numpy_scalars)


def _from_numpy(name: str, x: Any) -> tuple[Home, np.ndarray]:
    if isinstance(x, np.ma.MaskedArray | np.matrix):
        raise TypeError(
            f"{name} is a {type(x).__name__}, whose own rules of arithmetic would be lost; "
            f"pass a plain numpy.ndarray"
        )
    array = np.asarray(x)
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    return _NUMPY, array


@cache
def _cupy_home(device: int) -> Home:
    return Home("cupy", "device", device, _identity)


def _from_cupy(name: str, x: Any) -> tuple[Home, Any]:
    return _cupy_home(x.data.device_id), x


def _hand_over(native: Any, from_dlpack: Callable[[Any], Any]) -> Any:
    """Pass a CuPy array on: its consumer's stream waits for CuPy's current one of its device."""
    with native.device:  # CuPy would take the stream of whichever device is current
        return from_dlpack(native)


def _from_torch(name: str, x: Any) -> tuple[Home, Any]:
    torch = sys.modules["torch"]
    if x.requires_grad:
        raise TypeError(
            f"{name} requires grad, which cuflash does not record; pass {name}.detach()"
        )
    if x.layout != torch.strided:
        raise TypeError(f"{name} has layout {x.layout}; a strided tensor is needed")
    if x.is_conj() or x.is_neg():
        raise TypeError(
            f"{name} is a lazy conjugate or negative view; pass {name}.resolve_conj().resolve_neg()"
        )
    is_bfloat16 = x.dtype == torch.bfloat16
    raw = x.view(torch.uint16) if is_bfloat16 else x

    def export(native: Any) -> Any:
        carrier = native.view(np.uint16) if native.dtype.name == "bfloat16" else native
        tensor = torch.from_dlpack(carrier)
        return tensor.view(torch.bfloat16) if native.dtype.name == "bfloat16" else tensor

    if x.device.type == "cpu":
        native = _read(name, raw, torch.Tensor.numpy)
        home = Home("torch", "host", 0, export)
    elif x.device.type == "cuda":
        native = _read(name, raw, importlib.import_module("cupy").from_dlpack)
        home = Home("torch", "device", x.device.index, partial(_hand_over, from_dlpack=export))
    else:
        raise TypeError(f"{name} is on {x.device}; cuflash runs on CPUs and CUDA GPUs")
    return home, native.view(ml_dtypes.bfloat16) if is_bfloat16 else native


def _from_jax(name: str, x: Any) -> tuple[Home, Any]:
    jax = sys.modules["jax"]
    if isinstance(x, jax.core.Tracer):
        raise TypeError(
            f"{name} is a JAX tracer; inside jit, grad or vmap use the functions of cuflash.jax"
        )
    devices = x.devices()
    if len(devices) != 1:
        raise ValueError(f"{name} is spread over {len(devices)} JAX devices; one device is needed")
    (device,) = devices

    if device.platform == "cpu":

        def export_cpu(native: np.ndarray) -> Any:
            with jax.default_device(device):
                return jax.device_put(native, may_alias=True)  # no copy of an aligned array

        # numpy.asarray of a CPU jax.Array is a read-only view of its buffer, bfloat16 included.
        return Home("jax", "host", device.id, export_cpu), _read(name, x, np.asarray)
    if device.platform in ("gpu", "cuda"):

        def export_cuda(native: Any) -> Any:
            # XLA may give the memory of an operand that was a temporary, or is donated next, to
            # its own next program, which waits for no reader on another stream.
            return jax.block_until_ready(_hand_over(native, jax.dlpack.from_dlpack))

        home = Home("jax", "device", device.local_hardware_id, export_cuda)
        return home, _read(name, x, importlib.import_module("cupy").from_dlpack)
    raise TypeError(f"{name} is on {device}; cuflash runs on CPUs and CUDA GPUs")


def _from_namespace(name: str, x: Any) -> tuple[Home, Any]:
    """Take an array of any library of the array API standard that speaks DLPack."""
    namespace = x.__array_namespace__() if hasattr(type(x), "__array_namespace__") else None
    if namespace is None or not hasattr(x, "__dlpack__") or not hasattr(namespace, "from_dlpack"):
        raise TypeError(
            f"{name} must be an array of NumPy, CuPy, JAX, PyTorch or another library with "
            f"__array_namespace__ and DLPack, got {type(x).__name__}"
        )

    library = type(x).__module__.partition(".")[0]
    kind, ordinal = x.__dlpack_device__()
    if kind == _DLPACK_CPU:
        native = _read(name, x, np.from_dlpack)
        return Home(library, "host", 0, namespace.from_dlpack), native
    if kind == _DLPACK_CUDA:
        native = _read(name, x, importlib.import_module("cupy").from_dlpack)
        export = partial(_hand_over, from_dlpack=namespace.from_dlpack)
        return Home(library, "device", ordinal, export), native
    raise TypeError(
        f"{name} is on DLPack device {kind}:{ordinal}; cuflash runs on CPUs and CUDA GPUs"
    )


_Reader = Callable[[str, Any], tuple[Home, Any]]
#: What recognises the arrays of each type that was met: asking the libraries takes a while.
_READERS: dict[type, _Reader] = {}


def _find_reader(x: object) -> _Reader:
    """Ask the libraries whose array this is; one that is not imported has made none."""
    if isinstance(x, np.ndarray | np.generic):
        return _from_numpy
    for library, attribute, reader in (
        ("cupy", "ndarray", _from_cupy),
        ("torch", "Tensor", _from_torch),
        ("jax", "Array", _from_jax),
    ):
        module = sys.modules.get(library)
        if module is not None and isinstance(x, getattr(module, attribute)):
            return reader
    return _from_namespace


def take(name: str, x: object) -> tuple[Home, Any]:
    """Recognise one array.

    Parameters
    ----------
    name : str
        The argument's name, for errors.
    x : array
        Any array.

    Returns
    -------
    home : Home
    native : numpy.ndarray or cupy.ndarray
        Shares memory with `x` wherever its library allows that.

    Raises
    ------
    TypeError
        `x` is no array of a supported library.
    """
    if type(x) is np.ndarray and x.dtype.isnative:
        return _NUMPY, x
    reader = _READERS.get(type(x))
    if reader is None:
        reader = _READERS[type(x)] = _find_reader(x)
    return reader(name, x)


def enter(
    arrays: Mapping[str, object],
    *,
    options: Mapping[str, object] | None = None,
    values: Mapping[str, object] | None = None,
    outputs: Mapping[str, object] | None = None,
) -> tuple[Home, dict[str, Any]]:
    """Open a call: recognise every argument, hold them to one library and device.

    Parameters
    ----------
    arrays : mapping of str to array
        Operands in order; the first one decides the library.
    options : mapping, optional
        More arrays, or None, which stays None.
    values : mapping, optional
        Integers (lengths, offsets), real numbers, arrays or None; integers become Python's, and
        NumPy arrays are taken from any library's caller, as values of the host.
    outputs : mapping, optional
        Arrays to write into, or None.

    Returns
    -------
    home : Home
    native : dict
        Every name of the four mappings with its native array, number or None.

    Raises
    ------
    TypeError
        An argument is no array, or of another library than the first; an output cannot be written.
    ValueError
        Arrays on two devices.
    """
    first = next(iter(arrays))
    home, native_first = take(first, arrays[first])
    native: dict[str, Any] = dict.fromkeys(options or {}) | {first: native_first}
    for name, x in (*arrays.items(), *(options or {}).items()):
        if name is not first and (x is not None or name in arrays):
            theirs, native[name] = take(name, x)
            _require_home(name, theirs, first, home)

    for name, x in (values or {}).items():
        if x is None or isinstance(x, numbers.Real):
            is_count = isinstance(x, numbers.Integral) and not isinstance(x, bool)
            native[name] = int(x) if is_count else x  # type: ignore[call-overload]
            continue
        theirs, native[name] = take(name, x)
        if theirs is not _NUMPY:
            _require_home(name, theirs, first, home)

    for name, x in (outputs or {}).items():
        native[name] = None
        if x is None:
            continue
        if isinstance(x, np.generic):
            raise TypeError(f"{name} is a NumPy scalar, which cannot be written to")
        if isinstance(x, np.ndarray) and not x.dtype.isnative:
            raise TypeError(
                f"{name} is byte-swapped ({x.dtype}); an output must have native byte order"
            )
        theirs, native[name] = take(name, x)
        _require_home(name, theirs, first, home)
        if theirs.library == "jax":
            raise TypeError(
                f"{name} is a JAX array, which cannot be written to; use the returned array"
            )
        if isinstance(native[name], np.ndarray) and not native[name].flags.writeable:
            raise ValueError(f"{name} is read-only")
    return home, native


def cupy_home(*arrays: Any) -> Home | None:
    """Return where arrays live if all are CuPy's and of one device, else None.

    A call with such arrays alone needs nothing of what `enter` does. None also until an array of
    CuPy has been taken.
    """
    device: int | None = None
    for x in arrays:
        if _READERS.get(type(x)) is not _from_cupy:
            return None
        if device is None:
            device = x.data.device_id
        elif x.data.device_id != device:
            return None
    return None if device is None else _cupy_home(device)


def _require_home(name: str, theirs: Home, first: str, home: Home) -> None:
    """Raise unless an array lives where the first one of its call does."""
    if theirs is home:
        return
    if theirs.library != home.library:
        raise TypeError(
            f"{name} is an array of {theirs.library} but {first} is one of {home.library}; "
            f"pass arrays of one library"
        )
    if (theirs.engine, theirs.device) != (home.engine, home.device):
        raise ValueError(
            f"{name} is on {theirs.engine} device {theirs.device} but {first} is on "
            f"{home.engine} device {home.device}"
        )


def describe(
    arrays: Mapping[str, object],
    *,
    options: Mapping[str, object],
    values: Mapping[str, object],
) -> tuple[str, dict[str, Any]]:
    """Describe the arguments of a call, which need not hold data.

    Parameters
    ----------
    arrays, options, values : mapping
        As in `enter`; a description, which has a shape and a dtype, may stand for an array.

    Returns
    -------
    engine : {"host", "device"}
        Where the first operand's library computes; for a description, which belongs to no library,
        "device" if there is a GPU.
    specs : dict
        An `ArraySpec` for each array; numbers and None as they are.

    Raises
    ------
    TypeError
        An argument is neither an array nor a description of one.
    """
    engine, specs = "", dict[str, Any]()
    for name, x in (*arrays.items(), *options.items(), *values.items()):
        if (x is None and name not in arrays) or (name in values and isinstance(x, numbers.Real)):
            specs[name] = x
            continue
        try:
            home, native = take(name, x)
            where, specs[name] = home.engine, ArraySpec.of(native)
        except TypeError as no_array:
            try:
                where, specs[name] = "", ArraySpec.of(x)
            except (AttributeError, TypeError):
                raise no_array from None
        engine = engine or where or _best_engine()
    return engine, specs


def _best_engine() -> str:
    try:
        return "device" if importlib.import_module("cupy").is_available() else "host"
    except ImportError:
        return "host"


def _shadow(x: Any) -> np.ndarray:
    """Return a NumPy array with the addresses of `x`, for overlap tests; never to be read."""
    if isinstance(x, np.ndarray):
        return x

    class _Addresses:
        __array_interface__ = {  # noqa: RUF012 - read once, by numpy.asarray below
            "version": 3,
            "data": (_address(x), True),
            "shape": x.shape,
            "strides": x.strides,
            "typestr": f"|V{x.dtype.itemsize}",
        }

    return np.asarray(_Addresses())


def _address(x: Any) -> int:
    return x.ctypes.data if isinstance(x, np.ndarray) else x.data.ptr


def _bounds(x: Any) -> tuple[int, int]:
    """Return the addresses between which all elements of a native array lie."""
    low = high = _address(x)
    if x.flags.c_contiguous:
        return low, low + x.nbytes
    for size, stride in zip(x.shape, x.strides, strict=True):
        if stride < 0:
            low += stride * (size - 1)
        else:
            high += stride * (size - 1)
    return (low, high + x.dtype.itemsize) if x.size else (low, low)


def shares_memory(a: Any, b: Any) -> bool:
    """Tell by bounded work whether two native arrays share an element; undecided counts as yes."""
    (low, high), (first, end) = _bounds(a), _bounds(b)
    return low < end and first < high and _share_elements(a, b)


def _share_elements(a: Any, b: Any) -> bool:
    try:
        # The stub knows only the two special values of max_work.
        return bool(np.shares_memory(_shadow(a), _shadow(b), max_work=_OVERLAP_WORK))  # type: ignore[arg-type]
    except (np.exceptions.TooHardError, OverflowError):
        return True


def same_view(a: Any, b: Any) -> bool:
    """Tell whether two native arrays name the same elements by the same indices and dtype."""
    return (_address(a), a.shape, a.strides, a.dtype) == (_address(b), b.shape, b.strides, b.dtype)


def overlaps_itself(x: Any) -> bool:
    """Tell whether two indices of an array can name one element: it cannot be an output."""
    if x.flags.c_contiguous:
        return False
    extent = 0
    # Sorted by stride, each axis must step past everything that the inner axes cover.
    for stride, size in sorted(
        (abs(s), n) for s, n in zip(x.strides, x.shape, strict=True) if n > 1
    ):
        if stride < extent + x.dtype.itemsize:
            return True
        extent += stride * (size - 1)
    return False


def refuse_overlap(outputs: Mapping[str, Any], inputs: Mapping[str, Any]) -> None:
    """Raise ValueError if an output shares an element with an input, another output or itself."""
    taken: list[tuple[str, Any, int, int]] | None = None
    for name, x in outputs.items():
        if x is None or not x.size:
            continue
        if overlaps_itself(x):
            raise ValueError(
                f"{name} has several indices for one element (strides {x.strides}); "
                f"it cannot be written to"
            )
        if taken is None:  # numbers, and arrays of the host beside a device's, cannot overlap
            kind = type(x)
            taken = [(other, y, *_bounds(y)) for other, y in inputs.items() if type(y) is kind]
        low, high = _bounds(x)
        for other, y, first, end in taken:
            if low < end and first < high and _share_elements(x, y):
                raise ValueError(f"{name} shares memory with {other}")
        taken.append((name, x, low, high))
