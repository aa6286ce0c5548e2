"""The handler for CUDA devices on the CPU: all but the launch, with kernels run by g++'s code."""

import ctypes
import json
import subprocess
import sys
import threading
import time
from array import array
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cuflash
from cuflash.jax import calls, ffi_abi, flash_attention, host, logsumexp, ops, softmax
from tests.jax.xla import Xla

pytest.importorskip("cupy")
from tests.host_cuda import builder

pytestmark = pytest.mark.skipif(not builder.available(), reason="no C++ compiler")

EMULATED = "cuflash_emulated"


@cache
def register_emulated():
    """Register the handler for CUDA devices as one for the CPU; return it, to be kept."""
    from cuflash.jax import device

    handler = ffi_abi.handler(lambda text, addresses, _: device.run(text, addresses, 0, 0x5EED))
    jax.ffi.register_ffi_target(EMULATED, jax.ffi.pycapsule(handler), platform="cpu")
    return handler


class Block:
    """What is known of a block where it is launched, as far as the emulation asks for it."""

    def __init__(self, pointer):
        self.ctypes = SimpleNamespace(data=ctypes.c_int64.from_address(pointer).value)


@pytest.fixture
def launched(monkeypatch):
    """Let programs for the CPU run the handler for CUDA devices; kernels that are started."""
    from cuflash.jax import device
    from tests import devices
    from tests.host_cuda.engine import HostExecutor

    limits = replace(devices.H200, cluster_blocks=1, compute_capability="89")
    executor = HostExecutor(limits=limits)

    def ready(launch, ordinal):
        def start(stream, pointer, extra):
            # What the handler says of device and stream is what XLA said.
            assert (ordinal, stream, extra) == (0, 0x5EED, 0)
            executor.launch(launch, Block(pointer))

        return start

    monkeypatch.setattr(device, "ready", ready)
    monkeypatch.setattr(device, "device_limits", lambda device: limits)
    monkeypatch.setattr(ops, "TARGET", EMULATED)
    monkeypatch.setattr(host, "prepare", lambda call: device.rehearse(call, limits).used)

    register_emulated()
    jax.clear_caches()
    ops._compiled.cache_clear()
    device.prepared.cache_clear()
    device.bound.cache_clear()
    yield executor.launched
    jax.clear_caches()
    ops._compiled.cache_clear()


def normal(rng, *shape, dtype=np.float32):
    return jnp.asarray(rng.normal(size=shape), dtype)


def families(launched):
    return [launch.kernel.expression.partition("<")[0].split("::")[-1] for launch in launched]


@pytest.mark.parametrize(
    ("options", "dtype", "kernels"),
    [
        ({}, np.float32, ["forward_simt"]),
        ({"num_splits": 2, "key_lengths": 60}, np.float32, ["forward_simt", "combine"]),
        ({"causal": True}, jnp.bfloat16, ["forward_mma"]),
    ],
)
def test_forward(launched, rng, options, dtype, kernels):
    q, k, v = (normal(rng, 2, *shape, dtype=dtype) for shape in ((33, 8), (70, 8), (70, 6)))
    out = jax.jit(lambda *x: flash_attention(*x, **options))(q, k, v)
    expected = cuflash.flash_attention(*map(np.asarray, (q, k, v)), **options)
    tolerance = 1e-2 if dtype == jnp.bfloat16 else 1e-5
    np.testing.assert_allclose(out.astype(float), expected.astype(float), atol=tolerance)
    assert families(launched) == kernels


def test_gradients_under_vmap(launched, rng):
    q, k, v = (normal(rng, *shape) for shape in ((5, 3, 8), (7, 3, 8), (7, 6)))
    bias = normal(rng, 5, 7)

    def total(q, k, v, bias):
        mapped = jax.vmap(lambda q, k, bias: flash_attention(q, k, v, bias=bias), (1, 1, None))(
            q, k, bias
        )
        return (mapped**2).sum()

    grads = jax.jit(jax.grad(total, (0, 1, 2, 3)))(q, k, v, bias)
    started = families(launched)
    assert started.count("backward_bias") == started.count("forward_simt") == 1

    def entry(i, q, k, v, bias):
        return (cuflash.jax.materialized_attention(q[:, i], k[:, i], v, bias=bias) ** 2).sum()

    def by_formula(*operands):
        return sum(entry(i, *operands) for i in range(3))

    expected = jax.grad(by_formula, (0, 1, 2, 3))(q, k, v, bias)
    for x, y in zip(grads, expected, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)


def test_softmax_and_its_gradient(launched, rng):
    x = normal(rng, 3, 40)
    where = jnp.asarray(rng.random(40) < 0.7)
    dx = jax.jit(jax.grad(lambda x: (softmax(x, where=where) ** 2).sum()))(x)
    expected = jax.grad(lambda x: (jax.nn.softmax(x, where=where) ** 2).sum())(x)
    np.testing.assert_allclose(dx, expected, atol=1e-6)
    np.testing.assert_allclose(softmax(x, method="naive").sum(-1), 1, atol=1e-6)
    assert families(launched)[-3:] == ["naive_maximum", "naive_normalizer", "apply"]


def test_copies_that_the_engine_would_make_are_made_by_xla(launched, rng):
    # Kept and reduced axes in turn, which do not merge.
    x = normal(rng, *(2,) * 12)
    axes = tuple(range(1, 12, 2))
    np.testing.assert_allclose(logsumexp(x, axes), jax.nn.logsumexp(x, axes), atol=1e-5)


def test_gradients_of_16_bits_that_are_added_up_are_float32(launched):
    # More axes to sum over than a launch has, and axes between them so that they do not merge.
    q, k = (
        jax.ShapeDtypeStruct((*axes, 1, 1), jnp.bfloat16) for axes in ((2,) * 17, (1, 2) * 8 + (1,))
    )

    def gradients(q, k):
        return jax.grad(lambda k: flash_attention(q, k, k).astype(np.float32).sum())(k)

    text = jax.jit(gradients).lower(q, k).as_text()
    backward = text[text.index("attention_vjp") :]
    assert "float32" in backward and "bfloat16" not in backward
    assert "bfloat16" in text[: text.index("attention_vjp")]


def test_methods_are_those_of_the_device(launched, rng):
    q = normal(rng, 2, 3, 8)
    for method, message in (("tiled", "cannot run this problem on the device"), ("x", "unknown")):
        with pytest.raises(ValueError, match=message):
            jax.jit(lambda q, method=method: flash_attention(q, q, q, method=method))(q)
    with pytest.raises(
        ValueError,
        match="methods that can run this problem: 'auto', 'naive', 'fused', 'online', 'cluster'",
    ):
        softmax(q, method="y")


def test_the_handler_asks_xla_for_stream_and_device(launched, rng, monkeypatch):
    from cuflash.jax import device

    monkeypatch.setattr(device.cupy.cuda.runtime, "getDevice", lambda: 0)
    monkeypatch.setattr(device.cupy.cuda.runtime, "setDevice", lambda ordinal: None)
    (call,) = called(lambda: flash_attention(*[jnp.zeros((4, 8), np.float32)] * 3))
    text = calls.encode(call, 0).encode()
    seen = []
    # One device; several; several and an XLA that does not tell which.
    for count, size in ((1, 0), (2, 1 << 10), (2, 8)):
        monkeypatch.setattr(device, "_device_count", lambda count=count: count)
        xla = Xla(device=0 if count > 1 else 7)
        xla.api.struct_size = size
        q, k, v, out = (np.array(normal(rng, 4, 8)) for _ in range(4))
        seen.append((q, k, v, out, np.empty(4, np.float32)))
        frame = xla.frame(text, seen[-1][:3], seen[-1][3:])
        for _ in range(2):  # buffers at new places, and once more at the same
            out[...] = np.nan
            assert device.handler(ctypes.byref(frame)) is None
            np.testing.assert_allclose(out, cuflash.flash_attention(q, k, v), atol=1e-6)
            q += 1
    refused = Xla(device=0, stream=0)
    assert device.handler(ctypes.byref(refused.frame(text, seen[0][:3], seen[0][3:])))
    assert "no stream" in refused.errors[0][1]


def test_another_device_is_the_current_one_for_a_call(monkeypatch):
    from cuflash.jax import device

    current = [0]

    class Device:
        def __init__(self, ordinal):
            self.ordinal = ordinal

        def __enter__(self):
            current.append(self.ordinal)

        def __exit__(self, *error):
            current.pop()

    ran = []
    monkeypatch.setattr(device.cupy.cuda.runtime, "getDevice", lambda: current[-1])
    monkeypatch.setattr(device.cupy.cuda, "Device", Device)
    monkeypatch.setattr(device, "_device_count", lambda: 4)
    monkeypatch.setattr(device, "run", lambda *call: ran.append((current[-1], *call)))
    for ordinal in (3, 0):
        xla = Xla(device=ordinal)
        assert device.handler(ctypes.byref(xla.frame(b"a call", [], []))) is None
    assert ran == [(3, b"a call", [], 3, 0x5EED), (0, b"a call", [], 0, 0x5EED)]
    assert current == [0]


def test_blocks_are_made_once_and_get_the_addresses_of_each_call(launched, rng, monkeypatch):
    from cuflash.jax import device

    recorded = []
    monkeypatch.setattr(
        device,
        "launches_of",
        lambda *call, of=device.launches_of: recorded.append(call) or of(*call),
    )
    q, k, v, dout = (normal(rng, 70, 8) for _ in range(4))
    k = jnp.concatenate([k, k])
    v = jnp.concatenate([v, -v])

    def gradients(q, k, v):
        out, pull_back = jax.vjp(lambda *x: flash_attention(*x, num_splits=2), q, k, v)
        return out, pull_back(dout)

    program = jax.jit(gradients)
    kept = []  # so that the next call's results lie elsewhere
    for scale in (1, 2, 3):
        kept.append(program(scale * q, k, v))
        expected = jax.vjp(lambda *x: ops_of_jax(*x), scale * q, k, v)
        np.testing.assert_allclose(kept[-1][0], expected[0], atol=1e-5)
        for mine, theirs in zip(kept[-1][1], expected[1](dout), strict=True):
            np.testing.assert_allclose(mine, theirs, atol=1e-5)
    assert len(recorded) == 2 * 2  # two programs, two sets of places


@pytest.fixture
def started(monkeypatch):
    """Starts of one kernel that all programs have: on stream, block, its words."""
    from cuflash.jax import device

    found = []

    def start(stream, pointer, extra):
        time.sleep(0.05)  # time enough for another thread to write its addresses
        at = Block(pointer).ctypes.data
        found.append((stream, at, list((ctypes.c_int64 * 3).from_address(at))))

    program = device.Prepared((start,), array("q", [0, 0, 7, 0]), (0,), ((0, 0, 0), (1, 1, 16)))
    monkeypatch.setattr(device, "prepared", lambda text, ordinal: program)
    monkeypatch.setattr(device, "_program", lambda text: SimpleNamespace(buffers=2))
    device.bound.cache_clear()
    yield found
    device.bound.cache_clear()


def test_threads_in_one_program_have_blocks_of_their_own(started):
    """Each starts its kernels with its own addresses, however long a launch takes."""
    from cuflash.jax import device

    both = threading.Barrier(2, timeout=60)

    def call(stream):
        both.wait()
        device.run(b"a call", [stream * 64, stream * 128], 0, stream)

    threads = [threading.Thread(target=call, args=(stream,)) for stream in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    blocks = sorted((stream, words) for stream, _, words in started)
    assert blocks == [(1, [64, 144, 7]), (2, [128, 272, 7])]


def test_blocks_of_places_that_were_seen_are_used_again(started):
    from cuflash.jax import device

    calls = ((b"a", 128, 0), (b"a", 192, 0), (b"b", 128, 0), (b"a", 128, 1), (b"a", 128, 0))
    for text, second, ordinal in calls:
        device.run(text, [64, second], ordinal, 0x5EED)
    assert [words for _, _, words in started] == [[64, 16 + x, 7] for _, x, _ in calls]
    places = [at for _, at, _ in started]
    assert len(set(places)) == 4
    assert places[4] == places[0]


@pytest.mark.parametrize("second", [64 + 8, 64 + 32, 0])
def test_places_that_plans_may_ask_about_have_a_plan_of_their_own(started, monkeypatch, second):
    """An address that is a multiple of less than XLA's buffers' are, or none."""
    from cuflash.jax import device

    planned = []
    monkeypatch.setattr(device, "launches_of", lambda *call: planned.append(call) or [])
    for _ in range(2):
        device.run(b"a call", [64, second], 0, 1)
    assert planned == [(b"a call", (64, second), 0)]
    assert not started


def test_a_thread_that_calls_has_a_context(monkeypatch):
    """Once a thread: XLA calls from its own, where CuPy has started nothing yet."""
    from cuflash.jax import device

    seen = []
    runtime = SimpleNamespace(
        getDevice=lambda: 0, setDevice=lambda ordinal: seen.append(("context", ordinal))
    )
    monkeypatch.setattr(device.cupy.cuda, "runtime", runtime)
    monkeypatch.setattr(device, "_device_count", lambda: 1)
    monkeypatch.setattr(device.ffi_abi, "stream", lambda frame: 7)
    monkeypatch.setattr(device, "run", lambda *call: seen.append(call))

    def calls():
        for _ in range(2):
            device.execute(b"a call", [64], None)

    thread = threading.Thread(target=calls)
    thread.start()
    thread.join()
    assert seen == [("context", 0), *[(b"a call", [64], 0, 7)] * 2]


def ops_of_jax(q, k, v):
    return jax.nn.softmax(q @ k.T / np.sqrt(q.shape[-1])) @ v


@pytest.mark.parametrize("difference", ["launches", "a word", "a word by half", "sizes"])
def test_what_depends_on_addresses_otherwise_is_not_prepared(
    launched, rng, monkeypatch, difference
):
    from cuflash.jax import device

    x = normal(rng, 4, 8)
    (call,) = called(lambda: flash_attention(x, x, x))
    text = calls.encode(call, 0).encode()

    def launches_of(text, addresses, ordinal, of=device.launches_of):
        moved = addresses[0] != 1 << 32
        ((launch, block),) = of(text, addresses, ordinal)
        words = block.view(np.int64).copy()
        if moved and difference == "launches":
            launch = launch._replace(grid=launch.grid + 1)
        elif moved and difference == "sizes":
            words = words[:-1]
        elif difference == "a word":
            words[-1] = 7 * moved
        elif difference == "a word by half":
            words[-1] = addresses[0] >> 32
        return [(launch, words)]

    monkeypatch.setattr(device, "launches_of", launches_of)
    assert device.prepared(text, 0) is None
    device.prepared.cache_clear()
    monkeypatch.undo()


def test_parts_of_the_workspace_lie_apart():
    from cuflash.jax import device
    from tests import devices

    recorder = device.Recorder(devices.H200, [], 1 << 20, 1024)
    parts = [(recorder.address(recorder.allocate(n)), n) for n in (1, 256, 257, 0)]
    assert [start - (1 << 20) for start, _ in parts] == [0, 256, 512, 1024]
    assert recorder.used == 1024
    with pytest.raises(RuntimeError, match="too small"):
        recorder.allocate(1)


def test_a_program_is_prepared_for_every_device(monkeypatch, rng):

    from cuflash.jax import device
    from tests import devices

    x = normal(rng, 70, 8)
    (call,) = called(lambda: flash_attention(x, x, x, num_splits=3))
    (alone,) = called(lambda: flash_attention(x, x, x, num_splits=1))
    warmed = []
    monkeypatch.setattr(
        device.jax,
        "local_devices",
        lambda backend: [SimpleNamespace(local_hardware_id=i) for i in (0, 2)],
    )
    monkeypatch.setattr(device.cupy.cuda, "Device", lambda ordinal: nullcontext())
    # The one that is asked last needs no workspace.
    rehearse = device.rehearse
    monkeypatch.setattr(device, "device_limits", lambda ordinal: ordinal)
    monkeypatch.setattr(
        device,
        "rehearse",
        lambda call, ordinal: rehearse(call if ordinal == 0 else alone, devices.H200),
    )
    monkeypatch.setattr(device, "warm", lambda kernels: warmed.append(list(kernels)))
    assert device.prepare(call) == rehearse(call, devices.H200).used > 3 * 70 * 8 * 4
    assert len(warmed) == 2
    assert [k.expression.partition("<")[0] for k in warmed[0]] == [
        "cuflash::forward_tf32",
        "cuflash::combine",
    ]


def test_clusters_that_stay_are_counted_when_a_program_is_compiled(monkeypatch):
    """Rows that are dealt out: the driver is not asked in a call, which XLA may be recording."""
    from cuflash.jax import device
    from tests import devices

    (call,) = called(lambda: softmax(jnp.zeros((1100, 1 << 16))))
    asked = []
    monkeypatch.setattr(
        device.jax, "local_devices", lambda backend: [SimpleNamespace(local_hardware_id=3)]
    )
    monkeypatch.setattr(device.cupy.cuda, "Device", lambda ordinal: nullcontext())
    monkeypatch.setattr(device, "device_limits", lambda ordinal: devices.H200)
    monkeypatch.setattr(device, "warm", lambda kernels: None)
    monkeypatch.setattr(device, "fitting_clusters", lambda *launch: asked.append(launch))
    assert device.prepare(call) == 16
    begin, stay = (launch for launch, _ in device.rehearse(call, devices.H200).launches)
    assert begin.kernel.expression == "cuflash::begin_dealing"
    assert stay.staying
    assert asked == [(stay, 3)]


def test_addresses_between_elements_are_refused(launched, rng):
    from cuflash.jax import device

    x = normal(rng, 4, 8)
    (call,) = called(lambda: flash_attention(x, x, x))
    with pytest.raises(ValueError, match="multiple of its elements' size"):
        device.run(calls.encode(call, 0).encode(), [256, 258, 256, 256, 256], 0, 0x5EED)


def test_a_workspace_that_is_too_small_is_refused(launched, rng):
    from cuflash.jax import device

    x = normal(rng, 70, 8)
    (call,) = called(lambda: flash_attention(x, x, x, num_splits=2))
    with pytest.raises(RuntimeError, match="a workspace of 99 bytes is too small"):
        device.run(calls.encode(call, 99).encode(), [256] * 6, 0, 0x5EED)
    assert not launched


def test_buffers_are_counted(launched, rng):
    from cuflash.jax import device

    x = normal(rng, 70, 8)
    (call,) = called(lambda: flash_attention(x, x, x, num_splits=2))
    with pytest.raises(ValueError, match="a call has 5 buffers; 6 are needed"):
        device.run(calls.encode(call, 1 << 20).encode(), [256] * 5, 0, 0x5EED)
    assert not launched


def test_calls_may_be_captured():
    from cuflash.jax import device

    asked = ffi_abi.Metadata()
    extension = ffi_abi.MetadataExtension(
        ffi_abi.ExtensionBase(type=ffi_abi.EXTENSION_METADATA), ctypes.pointer(asked)
    )
    start = ctypes.cast(ctypes.pointer(extension), ctypes.POINTER(ffi_abi.ExtensionBase))
    for module, traits in ((device, ffi_abi.COMMAND_BUFFER_COMPATIBLE), (host, 0)):
        frame = ffi_abi.CallFrame(extension_start=start)
        assert module.handler(ctypes.byref(frame)) is None
        assert asked.traits == traits


# -------------------------------------------------------------------------------- calls as text


def called(function):
    """Return the calls in a program."""
    return [
        equation.params["call"]
        for equation in jax.make_jaxpr(function)().eqns
        if equation.primitive is ops.call_p
    ]


def test_calls_are_read_as_they_were_written(rng):
    q = normal(rng, 2, 3, 5, 8)

    def all_kinds():
        out, pull_back = jax.vjp(
            lambda q: flash_attention(q, q, q, key_lengths=4, window=(2, 1), softcap=0.1), q
        )
        return pull_back(out), softmax(q, (0, 2), where=q > 0)

    found = called(all_kinds)
    assert {type(call) for call in found} == {
        calls.AttentionCall,
        calls.AttentionVjpCall,
        calls.SoftmaxCall,
    }
    for call in found:
        again, workspace = calls.decode(calls.encode(call, 123).encode())
        assert (again, workspace) == (call, 123)
        assert again.problem == call.problem


def test_calls_of_another_version_are_refused(rng):
    x = normal(rng, 2, 8)
    (call,) = called(lambda: softmax(x))
    _, *rest = json.loads(calls.encode(call, 0))
    with pytest.raises(ValueError, match=r"compiled with cuflash 0\.0.*compilation cache"):
        calls.decode(json.dumps(["0.0", *rest]).encode())


def test_programs_of_the_cache_on_disk_run_in_another_process(tmp_path):
    code = f"""
import jax, numpy as np
jax.config.update("jax_compilation_cache_dir", {str(tmp_path)!r})
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
from jax._src import monitoring
"""
    code += """
from cuflash.jax import flash_attention
x = np.eye(4, dtype=np.float32)
hits = []
jax.monitoring.register_event_listener(lambda name, **_: hits.append(name))
out = jax.jit(lambda x: flash_attention(x, x, x))(x)
print(any("cache_hits" in name for name in hits), np.asarray(out).sum())
"""
    printed = [
        subprocess.run(
            [sys.executable, "-c", code], check=True, capture_output=True, text=True
        ).stdout.split()
        for _ in range(2)
    ]
    assert printed == [["False", "4.0"], ["True", "4.0"]]
