"""The handler of calls on CUDA devices: plans and launches of the device engine, on XLA's stream.

What takes time is done when a program is compiled (`prepare`): plans are made, kernels compiled and
loaded, and the workspace that plans ask for becomes one more result of the call. A call itself
writes the addresses of its buffers into parameter blocks, unless it had them before, and starts
kernels. It allocates, synchronises and compiles nothing on the device and does the same in every
call, so that XLA may capture it in a CUDA graph.
"""

from __future__ import annotations

import math
import threading
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple, NoReturn, TypeAlias

import cupy
import jax
import numpy as np

from .. import engine
from .._attention import check_method
from .._options import choose_method
from ..device.attention import compute as attend
from ..device.attention_plans import attention_methods
from ..device.attention_vjp import compute as pull_back
from ..device.clusters import fitting_clusters
from ..device.compiler import Launch, warm
from ..device.executor import DeviceLimits, device_limits, ready
from ..device.softmax import compute as compute_softmax
from ..problem import ArraySpec, AttentionArrays, AttentionProblem, SoftmaxProblem
from ..problem_vjp import AttentionGrads, AttentionResults, AttentionVjpProblem
from . import ffi_abi
from .calls import TARGET, AttentionCall, Call, NeedsCopiesError, SoftmaxCall, decode

#: Parts of the workspace begin at multiples of this, as XLA's own buffers do on a GPU.
_ALIGNMENT = 256
#: As they do on a CPU.
_LEAST_ALIGNMENT = 64


class Slot:
    """Stands for the array in a buffer whose address only the call knows."""

    def __init__(self, index: int, spec: ArraySpec) -> None:
        self.index = index
        self.shape, self.strides, self.dtype = spec
        self.size = int(np.prod(spec.shape))

    def astype(self, dtype: Any) -> NoReturn:
        """Refuse: the copy would need memory."""
        raise NeedsCopiesError


class Recorder:
    """An executor that starts nothing: it notes what is to be started.

    What plans allocate lies in the workspace, of `capacity` bytes, one after the other.
    """

    def __init__(
        self, limits: DeviceLimits, addresses: Sequence[int], workspace: int, capacity: float
    ) -> None:
        self.limits, self.addresses = limits, list(addresses)
        self.workspace, self.capacity, self.used = workspace, capacity, 0
        self.launches: list[tuple[Launch, np.ndarray]] = []

    def address(self, x: Slot) -> int:
        """Return where an array lies."""
        return self.addresses[x.index]

    def allocate(self, nbytes: int) -> Slot:
        """Take bytes of the workspace."""
        start = -(-self.used // _ALIGNMENT) * _ALIGNMENT
        self.used = start + nbytes
        if self.used > self.capacity:  # as if it had been compiled for another device
            raise RuntimeError(f"a workspace of {self.capacity} bytes is too small: {self.used}")
        self.addresses.append(self.workspace + start)
        return Slot(len(self.addresses) - 1, ArraySpec((nbytes,), (1,), np.dtype(np.uint8)))

    def broadcast_to(self, x: Slot, shape: tuple[int, ...]) -> NoReturn:
        """Refuse: what is broadcast is copied next."""
        raise NeedsCopiesError

    def launch(self, launch: Launch, parameters: np.ndarray) -> None:
        """Note a launch."""
        self.launches.append((launch, parameters))


@dataclass(frozen=True)
class _Engine:
    """The device engine as calls need it, on an executor and slots."""

    executor: Any

    def attention(
        self, problem: AttentionProblem, arrays: AttentionArrays, out: Any, lse: Any, workspace: Any
    ) -> None:
        _require(attend(problem, arrays, out, lse, workspace, self.executor))

    def attention_vjp(
        self,
        problem: AttentionVjpProblem,
        arrays: AttentionArrays,
        results: AttentionResults,
        grads: AttentionGrads,
        workspace: Any,
    ) -> None:
        _require(pull_back(problem, arrays, results, grads, workspace, self.executor))

    def softmax(
        self, problem: SoftmaxProblem, inputs: Sequence[Any], where: Any, outputs: Sequence[Any]
    ) -> None:
        compute_softmax(problem, inputs, where, outputs, self.executor)


def _require(done: bool) -> None:
    if not done:
        raise ValueError("a buffer does not lie at a multiple of its elements' size")


def prepare(call: Call) -> int:
    """Compile and load, on every device of this process, the kernels that a call starts.

    Returns
    -------
    int
        Bytes of workspace, which the call takes as its last buffer.

    Raises
    ------
    ValueError
        The method cannot run this problem; those that can are listed.
    NeedsCopiesError
        See there.
    """
    need = 0
    for device in jax.local_devices(backend="cuda"):
        ordinal = device.local_hardware_id
        with cupy.cuda.Device(ordinal):
            rehearsal = rehearse(call, device_limits(ordinal))
            launches = [launch for launch, _ in rehearsal.launches]
            warm(launch.kernel for launch in launches)
            for launch in launches:
                if launch.staying:
                    fitting_clusters(launch, ordinal)
            need = max(need, rehearsal.used)
    return need


def rehearse(call: Call, limits: DeviceLimits) -> Recorder:
    """Do all of a call but the launches, with addresses that nothing lies at."""
    if isinstance(call, AttentionCall):
        check_method(call.method, attention_methods(call.problem, limits), "device")
    if isinstance(call, SoftmaxCall):
        methods = engine.SOFTMAX_METHODS
        choose_method(call.method, methods["device"], methods["host"], "on the device engine")
    addresses = [(i + 1) * _ALIGNMENT for i in range(len(call.seen))]
    recorder = Recorder(limits, addresses, _ALIGNMENT, math.inf)
    getattr(_Engine(recorder), call.kind)(*_arguments(call))
    return recorder


def _arguments(call: Call) -> tuple[Any, ...]:
    return call.arguments(list(map(Slot, range(len(call.seen)), call.seen)))


class _Program(NamedTuple):
    """A call with all that does not change from one time to the next."""

    kind: str
    arguments: tuple[Any, ...]
    workspace: int
    buffers: int


@lru_cache(maxsize=1024)
def _program(text: bytes) -> _Program:
    call, workspace = decode(text)
    return _Program(call.kind, _arguments(call), workspace, len(call.seen) + bool(workspace))


def launches_of(text: bytes, addresses: Sequence[int], device: int) -> list[tuple[Launch, Any]]:
    """Return what a call starts if its buffers, and the workspace as the last one, lie there."""
    kind, arguments, capacity, buffers = _program(text)
    if len(addresses) != buffers:
        raise ValueError(f"a call has {len(addresses)} buffers; {buffers} are needed")
    workspace = addresses[-1] if capacity else 0
    recorder = Recorder(device_limits(device), addresses, workspace, capacity)
    getattr(_Engine(recorder), kind)(*arguments)
    return recorder.launches


#: A launch but for a stream, the address of its block's address, and 0.
Start: TypeAlias = Callable[[int, int, int], None]


class Prepared(NamedTuple):
    """What a program starts on a device: all but where its buffers lie.

    `words` are the parameter blocks, end to end, each so many bytes after the `begins`, and a word
    for the address of each. `places` are the words of blocks that are addresses, with a buffer and
    what the word is behind its address.
    """

    starts: tuple[Start, ...]
    words: array[int]
    begins: tuple[int, ...]
    places: tuple[tuple[int, int, int], ...]


@lru_cache(maxsize=1024)
def prepared(text: bytes, device: int) -> Prepared | None:
    """Return the launches of a program on the current device, their blocks but for addresses.

    What in them is an address tell two sets of places for the buffers: it moves as its buffer does.
    None if something else differs too.
    """
    order = np.arange(1, _program(text).buffers + 1)
    # Each buffer moves by an amount of its own, in the low and in the high half of an address.
    moves = (order << 36) + (order << 12)
    first = order << 32
    at_first, at_second = (
        launches_of(text, addresses.tolist(), device) for addresses in (first, first + moves)
    )
    if not at_first or [x for x, _ in at_first] != [x for x, _ in at_second]:
        return None
    blocks = [block.view(np.int64) for _, block in at_first]
    words, moved = np.concatenate(blocks), np.concatenate([x.view(np.int64) for _, x in at_second])
    if words.size != moved.size:
        return None
    moved -= words
    places = np.flatnonzero(moved)
    buffers = np.minimum(np.searchsorted(moves, moved[places]), moves.size - 1)
    if (moves[buffers] != moved[places]).any():
        return None
    starts = tuple(ready(launch, device) for launch, _ in at_first)
    begins = np.cumsum([0, *(block.nbytes for block in blocks[:-1])]).tolist()
    offsets = words[places] - first[buffers]
    found = zip(places.tolist(), buffers.tolist(), offsets.tolist(), strict=True)
    pointers = bytes(len(starts) * words.itemsize)
    return Prepared(starts, array("q", words.tobytes() + pointers), tuple(begins), tuple(found))


class Bound(NamedTuple):
    """What a call starts, each with the address of its block's address, and what lies there."""

    starts: tuple[tuple[Start, int], ...]
    memory: Any


@lru_cache(maxsize=1024)
def bound(text: bytes, addresses: tuple[int, ...], device: int) -> Bound:
    """Return what a call starts on the current device if its buffers lie there.

    A program that runs again and again finds its buffers at few sets of places.
    """
    # Plans ask whether an address is a multiple of at most this, and 0 is no address.
    usual = not any(address % _LEAST_ALIGNMENT or not address for address in addresses)
    known = prepared(text, device) if usual else None
    blocks: Any = None
    if known is None or len(addresses) != _program(text).buffers:
        launches = launches_of(text, addresses, device)
        starts = tuple(ready(launch, device) for launch, _ in launches)
        blocks = [block for _, block in launches]
        words = array("q", [block.ctypes.data for block in blocks])
        begin, _ = words.buffer_info()
    else:
        # Words of Python: NumPy takes twice as long for so few.
        starts, words = known.starts, known.words[:]
        for place, buffer, offset in known.places:
            words[place] = addresses[buffer] + offset
        begin, count = words.buffer_info()
        first = count - len(starts)
        for i, offset in enumerate(known.begins):
            words[first + i] = begin + offset
        begin += first * words.itemsize
    pointers = range(begin, begin + len(starts) * words.itemsize, words.itemsize)
    return Bound(tuple(zip(starts, pointers, strict=True)), (blocks, words))


class _Thread(threading.local):
    """What is kept for each thread that XLA calls from."""

    #: Whether CUDA has a context here, which CuPy's own launches see to each time.
    has_context = False


_thread = _Thread()


def execute(text: bytes, addresses: list[int], frame: ffi_abi.CallFrame) -> None:
    """Start the kernels of a call on its stream."""
    device = current = cupy.cuda.runtime.getDevice()
    if _device_count() > 1:
        device = ffi_abi.device_ordinal(frame)
        if device is None:  # an old XLA, which has made it the current one
            device = current
    stream = ffi_abi.stream(frame)
    if device == current:
        if not _thread.has_context:
            cupy.cuda.runtime.setDevice(device)
            _thread.has_context = True
        run(text, addresses, device, stream)
        return
    with cupy.cuda.Device(device):
        run(text, addresses, device, stream)


@cache
def _device_count() -> int:
    return cupy.cuda.runtime.getDeviceCount()


def run(text: bytes, addresses: Sequence[int], device: int, stream: int) -> None:
    """Start the kernels of a call on the current device."""
    call = bound(text, tuple(addresses), device)  # kept, as its blocks are, until all have started
    for start, pointer in call.starts:
        start(stream, pointer, 0)


handler = ffi_abi.handler(execute, ffi_abi.COMMAND_BUFFER_COMPATIBLE)
jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(handler), platform="CUDA")
