"""CUDA arrays of PyTorch and JAX by DLPack: nothing is copied, and streams wait both ways."""

import threading
from functools import partial
from types import SimpleNamespace

import cupy
import numpy as np
import pytest

import cuflash
from cuflash import baselines
from cuflash.device import engine
from cuflash.problem import BFLOAT16, FLOATS
from cuflash.testing.bounds import assert_attention_close, expect_attention
from tests.device.exchange import finishes, gate, open_library

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels")]


@pytest.fixture(params=["torch", "jax"])
def library(request):
    with open_library(request.param) as opened:
        yield opened


@pytest.fixture
def torch():
    with open_library("torch") as opened:
        yield opened


@pytest.fixture
def jax():
    with open_library("jax") as opened:
        yield opened


@pytest.fixture
def engine_calls(monkeypatch):
    """Record the arguments of the engine's calls."""
    calls = []

    def record(function, *arguments):
        calls.append(arguments)
        return function(*arguments)

    for name in ("attention", "softmax"):
        monkeypatch.setattr(engine, name, partial(record, getattr(engine, name)))
    return calls


def normal(seed, *shape, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape, np.float32).astype(dtype)


def leaves(result):
    """List the arrays of a result, which may be a tuple."""
    return list(result) if isinstance(result, tuple) else [result]


def assert_same_bits(got, expected):
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    assert got.tobytes() == expected.tobytes()


# ----------------------------------------------------------------------------- what goes in and out


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_attention_reads_and_returns_the_arrays_themselves(library, dtype, engine_calls):
    given = {
        "q": normal(0, 2, 3, 70, 16, dtype=dtype),
        "k": normal(1, 2, 1, 90, 16, dtype=dtype),
        "v": normal(2, 2, 3, 90, 24, dtype=dtype),
        "mask": np.random.default_rng(3).random((70, 90)) < 0.8,
        "bias": normal(4, 3, 1, 90),
        "alibi_slopes": normal(5, 3) ** 2,
        "sinks": normal(6, 3),
        "key_lengths": np.array([[50], [90]]),
        "query_offset": np.array([[7]], np.int32),
    }
    arrays = {name: library.array(x) for name, x in given.items()}
    results = cuflash.flash_attention(**arrays, causal=True, return_lse=True)
    ((_, seen, *outputs, _),) = engine_calls
    for name, x in arrays.items():
        assert getattr(seen, name).data.ptr == library.address(x), name
        assert getattr(seen, name).dtype == given[name].dtype, name
    expected = cuflash.flash_attention(
        **{name: cupy.asarray(x) for name, x in given.items()}, causal=True, return_lse=True
    )
    for result, native, right in zip(results, outputs, expected, strict=True):
        assert isinstance(result, library.type)
        assert library.is_on_gpu(result)
        assert library.address(result) == native.data.ptr
        assert_same_bits(library.numpy(result), cupy.asnumpy(right))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_softmax_reads_and_returns_the_arrays_themselves(library, dtype, engine_calls):
    x, where = normal(0, 37, 300, dtype=dtype), normal(1, 300) > -1
    there = [library.array(x), library.array(where)]
    y = cuflash.softmax(there[0], where=there[1])
    ((_, (seen,), mask, (output,)),) = engine_calls
    assert [seen.data.ptr, mask.data.ptr] == [library.address(a) for a in there]
    assert library.address(y) == output.data.ptr
    expected = cuflash.softmax(cupy.asarray(x), where=cupy.asarray(where))
    assert_same_bits(library.numpy(y), cupy.asnumpy(expected))


def every_function(a):
    """Call each public function with arrays of `a`; yield its name and its result."""
    yield "softmax", (y := cuflash.softmax(a.x, 0))
    yield "log_softmax", (log_y := cuflash.log_softmax(a.x, where=a.where))
    yield "logsumexp", (lse := cuflash.logsumexp(a.x))
    yield "logsumexp of all", cuflash.logsumexp(a.x, None)
    yield "softmax_vjp", cuflash.softmax_vjp(a.dy, y, 0)
    yield "log_softmax_vjp", cuflash.log_softmax_vjp(a.dy, log_y, where=a.where)
    yield "logsumexp_vjp", cuflash.logsumexp_vjp(lse, a.x, lse)
    yield "softmax_state", (state := cuflash.softmax_state(a.x))
    yield "merge_softmax", (merged := cuflash.merge_softmax(state, cuflash.softmax_state(a.dy)))
    yield "SoftmaxState.logsumexp", merged.logsumexp()
    yield "SoftmaxState.apply", merged.apply(a.x)
    yield "merge with the identity", cuflash.merge_softmax(cuflash.SoftmaxState(), state)
    one = cuflash.flash_attention(a.q, a.k, a.v, return_lse=True)
    two = cuflash.flash_attention(a.q, a.v, a.k, num_splits=2, return_lse=True)
    yield "flash_attention", one
    yield "flash_attention in parts", two
    yield "merge_attention", cuflash.merge_attention(*one, *two)
    yield "enable_gqa", cuflash.flash_attention(a.q, a.k[:, :1], a.v[:, :1], enable_gqa=True)
    yield "materialized_attention", baselines.materialized_attention(a.q, a.k, a.v)


def test_every_function_takes_and_returns_them(library):
    given = {
        "x": normal(0, 50, 70),
        "dy": normal(1, 50, 70),
        "where": normal(2, 70) > 0,
        "q": normal(3, 2, 4, 33, 16),
        "k": normal(4, 2, 4, 65, 16),
        "v": normal(5, 2, 4, 65, 16),
    }
    theirs = SimpleNamespace(**{name: library.array(x) for name, x in given.items()})
    ours = SimpleNamespace(**{name: cupy.asarray(x) for name, x in given.items()})
    for (name, got), (_, expected) in zip(
        every_function(theirs), every_function(ours), strict=True
    ):
        assert len(leaves(got)) == len(leaves(expected)), name
        for result, right in zip(leaves(got), leaves(expected), strict=True):
            assert isinstance(result, library.type), name
            assert library.is_on_gpu(result), name
            assert_same_bits(library.numpy(result), cupy.asnumpy(right))
    need = cuflash.workspace_size(ours.q, ours.k, ours.v, num_splits=2)
    assert cuflash.workspace_size(theirs.q, theirs.k, theirs.v, num_splits=2) == need > 0


@pytest.mark.parametrize("shape", [(0, 4), (4, 0)])
def test_empty_arrays(library, shape):
    x = library.array(np.empty(shape, np.float32))
    y = cuflash.softmax(x)
    assert isinstance(y, library.type)
    assert library.numpy(y).shape == shape
    q = library.array(normal(0, 3, 4))
    keys = library.array(np.empty((0, 4), np.float32))
    out, lse = cuflash.flash_attention(q, keys, keys, return_lse=True)
    np.testing.assert_array_equal(library.numpy(out), np.zeros((3, 4)))
    np.testing.assert_array_equal(library.numpy(lse), np.full(3, -np.inf))


LAYOUTS = {
    "transposed": lambda x: x.swapaxes(1, 2),
    "sliced": lambda x: x[:, 1::2, :, ::3],
    "one element in": lambda x: x.reshape(-1)[1:-23].reshape(3, 4, 5, 23, 2)[..., 0],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16], ids=str)
def test_strides_of_tensors(torch, layout, dtype, engine_calls):
    view = LAYOUTS[layout]
    memory = [normal(seed, 3, 8, 5, 24, dtype=dtype) for seed in range(3)]
    if layout == "one element in":
        memory = [normal(seed, 1 + 3 * 4 * 5 * 23 * 2 + 23, dtype=dtype) for seed in range(3)]
    q, k, v = (view(torch.array(x)) for x in memory)
    out = cuflash.flash_attention(q, k, v)
    ((_, seen, native, _, _),) = engine_calls
    for name, x in (("q", q), ("k", k), ("v", v)):
        assert getattr(seen, name).data.ptr == x.data_ptr()
        assert getattr(seen, name).strides == tuple(s * x.element_size() for s in x.stride())
    assert out.data_ptr() == native.data.ptr
    expected = cuflash.flash_attention(*(view(cupy.asarray(x)) for x in memory))
    assert out.stride() == tuple(s // expected.itemsize for s in expected.strides)
    assert_same_bits(torch.numpy(out.contiguous()), cupy.asnumpy(expected))


def test_expanded_tensors(torch):
    """Axes of stride 0, by which heads share keys."""
    q, k = normal(0, 2, 6, 20, 16), normal(1, 2, 1, 30, 16)
    shared = torch.array(k).expand(-1, 6, -1, -1)
    out = cuflash.flash_attention(torch.array(q), shared, shared)
    k = cupy.broadcast_to(cupy.asarray(k), (2, 6, 30, 16))
    expected = cuflash.flash_attention(cupy.asarray(q), k, k)
    assert_same_bits(torch.numpy(out), cupy.asnumpy(expected))


@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16], ids=str)
def test_tensors_are_filled_in_place(torch, dtype):
    given = [normal(seed, 2, t, 16, dtype=dtype) for seed, t in enumerate((5, 600, 600))]
    q, k, v = map(torch.array, given)
    zeros = torch.module.zeros
    for kind in {q.dtype, torch.module.float32}:
        out = zeros((5, 2, 16), dtype=kind, device="cuda").swapaxes(0, 1)
        lse = zeros((2, 5), device="cuda")
        need = cuflash.workspace_size(q, k, v, num_splits=3)
        workspace = zeros(need, dtype=torch.module.uint8, device="cuda")
        got = cuflash.flash_attention(q, k, v, num_splits=3, out=out, lse=lse, workspace=workspace)
        assert got[0] is out
        assert got[1] is lse
        assert bool(workspace.any())
        wide = np.float32 if kind == torch.module.float32 else dtype
        right = cupy.empty((5, 2, 16), wide).swapaxes(0, 1)
        arrays = map(cupy.asarray, given)
        _, right_lse = cuflash.flash_attention(*arrays, num_splits=3, out=right, return_lse=True)
        assert_same_bits(torch.numpy(out.contiguous()), cupy.asnumpy(right))
        assert_same_bits(torch.numpy(lse), cupy.asnumpy(right_lse))
    expected = torch.numpy(cuflash.softmax(q))
    assert cuflash.softmax(q, out=q) is q
    assert_same_bits(torch.numpy(q), expected)


# ------------------------------------------------------------------------------ what is turned down


def test_mixed_libraries_and_devices_are_refused(library, engine_calls):
    x = library.array(normal(0, 3, 4))
    name, array = library.name, cupy.asarray(normal(0, 3, 4))
    with pytest.raises(TypeError, match=f"^k is an array of cupy but q is one of {name}"):
        cuflash.flash_attention(x, array, x)
    with pytest.raises(TypeError, match=f"^v is an array of {name} but q is one of cupy"):
        cuflash.flash_attention(array, array, x)
    with pytest.raises(TypeError, match=f"^mask is an array of numpy but q is one of {name}"):
        cuflash.flash_attention(x, x, x, mask=np.ones((3, 3), bool))
    with pytest.raises(TypeError, match=f"^out is an array of cupy but x is one of {name}"):
        cuflash.softmax(x, out=array)
    if name == "torch":
        here = library.module.ones((3, 4))
    else:
        here = library.module.device_put(normal(0, 3, 4), library.module.devices("cpu")[0])
    with pytest.raises(ValueError, match=r"^k is on host device 0 but q is on device device 0"):
        cuflash.flash_attention(x, here, x)
    with pytest.raises(ValueError, match=r"^k is on device device 0 but q is on host device 0"):
        cuflash.flash_attention(here, x, x)
    with pytest.raises(ValueError, match=r"^y is on host device 0 but dy is on device device 0"):
        cuflash.softmax_vjp(x, here)
    assert not engine_calls


def test_lengths_may_be_values_of_the_host(library):
    x, lengths = library.array(normal(0, 2, 5, 4)), np.array([3, 5])
    expected = cuflash.flash_attention(x, x, x, key_lengths=library.array(lengths))
    got = cuflash.flash_attention(x, x, x, key_lengths=lengths)
    assert_same_bits(library.numpy(got), library.numpy(expected))


def test_tensors_that_cannot_be_honoured_are_refused(torch, engine_calls):
    x = torch.array(normal(0, 3, 4))
    with pytest.raises(TypeError, match=r"^k requires grad.*k\.detach\(\)"):
        cuflash.flash_attention(x, x.clone().requires_grad_(), x)
    with pytest.raises(TypeError, match=r"^out requires grad"):
        cuflash.softmax(x, out=x.clone().requires_grad_())
    with pytest.raises(ValueError, match=r"^out shares memory with v"):
        cuflash.flash_attention(x.clone(), x.clone(), x, out=x)
    with pytest.raises(ValueError, match=r"^key_lengths is on host device 0 but q is on device"):
        cuflash.flash_attention(x, x, x, key_lengths=torch.module.tensor(3))
    assert not engine_calls


def test_outputs_in_jax_arrays_are_refused(jax, engine_calls):
    x = jax.array(normal(0, 3, 4))
    with pytest.raises(TypeError, match=r"^out is a JAX array, which cannot be written"):
        cuflash.flash_attention(x, x, x, out=jax.module.numpy.zeros((3, 4), np.float32))
    with pytest.raises(TypeError, match=r"^out is a JAX array, which cannot be written"):
        cuflash.softmax(x, out=x)
    with pytest.raises(TypeError, match=r"^q is a JAX tracer.*use.* cuflash\.jax"):
        jax.module.jit(lambda a: cuflash.flash_attention(a, a, a))(x)
    assert not engine_calls


# -------------------------------------------------------------------------------- PyTorch's streams

#: 16 MB: PyTorch's pool keeps such blocks whole, and gives a freed one to the next of its size.
SHAPE = (1024, 4096)


@pytest.fixture(params=["theirs", "ours", "both"])
def streams(request, torch):
    """Streams of which one or both are no default stream, and so wait for nothing by themselves.

    `theirs` is PyTorch's current stream in a test, as CuPy sees it; `ours` is CuPy's.
    """
    own = torch.module.cuda.Stream() if request.param != "ours" else None
    null = cupy.cuda.Stream.null
    return SimpleNamespace(
        theirs=null if own is None else as_cupy_stream(own.cuda_stream),
        ours=null if request.param == "theirs" else cupy.cuda.Stream(non_blocking=True),
        enter=lambda: torch.module.cuda.stream(own or torch.module.cuda.default_stream()),
    )


def as_cupy_stream(pointer):
    """Return a stream of another library, which may not have CUDA's stream protocol yet."""
    foreign = SimpleNamespace(__cuda_stream__=lambda: (0, pointer))
    return cupy.cuda.Stream.from_external(foreign)


def softmax_of(x):
    return cupy.asnumpy(cuflash.softmax(cupy.asarray(x)))


def turns():
    """Yield whether a gate is to be closed: not in the first turn, for loading a kernel waits."""
    yield False
    cupy.cuda.Device().synchronize()
    yield True


def test_tensors_still_being_written_are_waited_for(torch, streams):
    """x is written behind a gate. A kernel that did not wait would be done with the old values."""
    old, new = normal(0, *SHAPE), normal(1, *SHAPE)
    x, fresh = torch.array(old), torch.array(new)
    for closed in turns():
        x.copy_(torch.array(old))
        cupy.cuda.Device().synchronize()
        with streams.enter(), streams.ours, gate(streams.theirs) as open_gate:
            if not closed:
                open_gate()
            x.copy_(fresh)
            y = cuflash.softmax(x)
            assert not closed or not finishes(streams.ours)
        assert_same_bits(torch.numpy(y), softmax_of(new))


def test_without_the_hand_over_the_old_values_would_be_read(torch, streams):
    """The test above can fail: with an exchange that orders nothing, the kernel does not wait."""
    old, new = normal(0, *SHAPE), normal(1, *SHAPE)
    x, fresh = torch.array(old), torch.array(new)
    for closed in turns():
        x.copy_(torch.array(old))
        cupy.cuda.Device().synchronize()
        with streams.enter(), streams.ours, gate(streams.theirs) as open_gate:
            if not closed:
                open_gate()
            x.copy_(fresh)
            y = cuflash.softmax(cupy.from_dlpack(x.__dlpack__(stream=-1)))
            assert not closed or finishes(streams.ours, 2)
    assert_same_bits(cupy.asnumpy(y), softmax_of(old))


@pytest.mark.parametrize("given", [False, True], ids=["new tensor", "out"])
def test_results_still_being_computed_are_waited_for(torch, streams, given):
    """The kernel runs behind a gate. PyTorch, if it did not wait, would be done with the poison."""
    values = normal(0, *SHAPE)
    x = torch.array(values)
    for closed in turns():
        out = torch.module.full_like(x, torch.module.nan) if given else None
        cupy.cuda.Device().synchronize()
        with streams.enter(), streams.ours, gate(streams.ours) as open_gate:
            if not closed:
                open_gate()
            z = cuflash.softmax(x, out=out).clone()
            assert not closed or not finishes(streams.theirs)
        assert_same_bits(torch.numpy(z), softmax_of(values))


def test_without_the_hand_over_poison_would_be_read(torch, streams):
    """The test above can fail: with an exchange that orders nothing, PyTorch does not wait."""
    x = cupy.asarray(normal(0, *SHAPE))
    for closed in turns():
        out = cupy.full_like(x, cupy.nan)
        cupy.cuda.Device().synchronize()
        with streams.enter(), streams.ours, gate(streams.ours) as open_gate:
            if not closed:
                open_gate()
            cuflash.softmax(x, out=out)
            z = torch.module.from_dlpack(out.__dlpack__(stream=-1)).clone()
            assert not closed or finishes(streams.theirs, 2)
    assert bool(z.isnan().all())


@pytest.mark.parametrize("given", [False, True], ids=["new tensor", "out"])
def test_tensors_may_be_temporaries(torch, streams, given):
    """An operand is freed while the kernel waits at a gate, and its memory written again at once.

    PyTorch does so in the order of its own stream, which must therefore wait for the kernel.
    """
    values = normal(0, *SHAPE)
    x = torch.array(values)
    for closed in turns():
        with streams.enter(), streams.ours:
            out = torch.module.empty_like(x) if given else None
            temporary = x + 0
            place = temporary.data_ptr()
            cupy.cuda.Device().synchronize()
            with gate(streams.ours) as open_gate:
                if not closed:
                    open_gate()
                y = cuflash.softmax(temporary, out=out)
                del temporary
                others = [torch.module.full_like(x, 7) for _ in range(16)]
                assert place in [other.data_ptr() for other in others]
                assert not closed or not finishes(streams.theirs)
        assert_same_bits(torch.numpy(y), softmax_of(values))


# ------------------------------------------------------------------------------------ JAX's streams


def open_soon(open_gate):
    """Open a gate from another thread, after what a call that did not wait would take."""
    timer = threading.Timer(0.2, open_gate)
    timer.start()
    return timer


@pytest.fixture(params=[False, True], ids=["null", "own"])
def ours(request):
    return cupy.cuda.Stream(non_blocking=True) if request.param else cupy.cuda.Stream.null


def test_jax_arrays_still_being_computed_are_waited_for(jax, ours):
    """x depends on an array that waits at a gate. Read too early, it is what its memory held."""
    elsewhere = cupy.cuda.Stream(non_blocking=True)
    for turn, closed in enumerate(turns()):
        values = normal(turn, *SHAPE)
        base = jax.array(values)
        with gate(elsewhere) as open_gate:
            if not closed:
                open_gate()
            with elsewhere:
                late = jax.module.dlpack.from_dlpack(cupy.zeros(1, np.float32))
            x = base + late
            timer = open_soon(open_gate)
            with ours:
                y = cuflash.softmax(x)
            timer.join()
        assert_same_bits(jax.numpy(y), softmax_of(values))


def test_results_for_jax_still_being_computed_are_waited_for(jax, ours):
    """The kernel runs behind a gate. JAX, if it did not wait, would read what the memory held."""
    for turn, closed in enumerate(turns()):
        values = normal(turn, *SHAPE)
        x = jax.array(values)
        with gate(ours) as open_gate:
            if not closed:
                open_gate()
            timer = open_soon(open_gate)
            with ours:
                z = -cuflash.softmax(x)
            timer.join()
        assert_same_bits(-jax.numpy(z), softmax_of(values))


def test_jax_arrays_may_be_temporaries(jax, ours):
    """An operand is freed while the kernel waits at a gate, and its memory written again at once.

    JAX does so in the order of its own stream, which takes no notice of the kernel.
    """
    for turn, closed in enumerate(turns()):
        values = normal(turn, *SHAPE)
        temporary = jax.array(values) + 0
        with gate(ours) as open_gate:
            if not closed:
                open_gate()
            timer = open_soon(open_gate)
            with ours:
                y = cuflash.softmax(temporary)
            del temporary
            others = [jax.module.numpy.full(SHAPE, 7, np.float32) for _ in range(16)]
            jax.module.block_until_ready(others)
            timer.join()
        assert_same_bits(jax.numpy(y), softmax_of(values))


# -------------------------------------------------------------------------- many hand-overs in turn


def attention_operands(turn):
    return [normal(3 * turn + i, 4, t, 64) + turn for i, t in enumerate((3, 500, 500))]


def test_the_newest_values_of_tensors_are_used(torch):
    """50 turns: a long kernel, new values, the call, all queued, and the null stream kept busy."""
    stream, ours = torch.module.cuda.Stream(), cupy.cuda.Stream(non_blocking=True)
    busy = cupy.ones((2048, 2048), np.float32)
    arrays = [torch.array(x) for x in attention_operands(0)]
    for turn in range(50):
        values = attention_operands(turn)
        fresh = [torch.array(x) for x in values]
        stream.wait_stream(torch.module.cuda.default_stream())
        busy @ busy
        with torch.module.cuda.stream(stream), ours:
            torch.module.cuda._sleep(1_000_000)
            for x, new in zip(arrays, fresh, strict=True):
                x.copy_(new)
            got = torch.numpy(cuflash.flash_attention(*arrays))
        assert_attention_close(got, None, expect_attention(*values))


def test_the_newest_values_of_jax_arrays_are_used(jax):
    """50 turns in which JAX is still computing the operands when they are handed over."""
    numpy = jax.module.numpy
    ours = cupy.cuda.Stream(non_blocking=True)
    large = numpy.ones(2**27, np.float32)

    @jax.module.jit
    def after_long_work(x, large, total):
        for _ in range(8):
            total = numpy.sum(numpy.sin(large + total))
        return x + 0 * total

    for turn in range(50):
        values = attention_operands(turn)
        with ours:
            arrays = [after_long_work(jax.array(x), large, np.float32(turn)) for x in values]
            got = jax.numpy(cuflash.flash_attention(*arrays))
        assert_attention_close(got, None, expect_attention(*values))
