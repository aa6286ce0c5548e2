"""Arrays of every library in, the same kind out, and which memory they share."""

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.lib.stride_tricks import as_strided

import cuflash
from cuflash import flash_attention, interop
from cuflash.problem import ArraySpec

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOATS = ["float64", "float32", "float16", "bfloat16"]


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def address(x: np.ndarray) -> int:
    return int(x.__array_interface__["data"][0])


class Exporter:
    """What a library shows of its arrays, here one that then gives none away."""

    def __init__(self, namespace: Any = np, device: tuple[int, int] = (1, 0)) -> None:
        self._namespace, self._device = namespace, device

    def __array_namespace__(self) -> Any:
        return self._namespace

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device

    def __dlpack__(self, **_: Any) -> Any:
        raise BufferError("not today")


class TestNumPy:
    def test_an_array_comes_in_as_it_is(self) -> None:
        x = normal(3, 4)
        home, native = interop.take("x", x)
        assert native is x
        assert (home.library, home.engine, home.device) == ("numpy", "host", 0)

    def test_memory_maps(self, tmp_path: Any) -> None:
        path = tmp_path / "x"
        normal(3, 4).tofile(path)
        x = np.memmap(path, np.float32, "r", shape=(3, 4))
        _, native = interop.take("x", x)
        assert type(native) is np.ndarray
        assert np.shares_memory(native, x)
        result = flash_attention(x, x, x)
        assert type(result) is np.ndarray
        np.testing.assert_array_equal(result, flash_attention(*[normal(3, 4)] * 3))

    @pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
    def test_byte_swapped_arrays(self, dtype: str) -> None:
        x = normal(3, 4).astype(dtype)
        swapped = x.astype(x.dtype.newbyteorder())
        assert not swapped.dtype.isnative
        lengths = np.array(2).astype(np.dtype(np.int64).newbyteorder())
        for native, other in ((x, swapped), (swapped, x)):
            result = flash_attention(native, other, x, key_lengths=lengths, bias=other[:, :3])
            assert result.dtype.isnative
            np.testing.assert_array_equal(
                result, flash_attention(x, x, x, key_lengths=2, bias=x[:, :3])
            )
        np.testing.assert_array_equal(cuflash.softmax(swapped), cuflash.softmax(x))

    def test_subclasses_give_plain_arrays(self) -> None:
        class Image(np.ndarray):
            pass

        x = normal(3, 4).view(Image)
        assert type(flash_attention(x, x, x)) is np.ndarray

    @pytest.mark.parametrize("kind", [np.ma.MaskedArray, np.matrix])
    def test_subclasses_with_other_arithmetic_are_refused(self, kind: type[np.ndarray]) -> None:
        x = normal(3, 4)
        with pytest.raises(TypeError, match=f"^k is a {kind.__name__}.*numpy.ndarray"):
            flash_attention(x, x.view(kind), x)
        with pytest.raises(TypeError, match=f"^x is a {kind.__name__}"):
            cuflash.softmax(x.view(kind))
        with pytest.raises(TypeError, match=f"^out is a {kind.__name__}"):
            cuflash.softmax(x, out=np.empty_like(x).view(kind))

    def test_0d_results_are_scalars(self) -> None:
        assert type(cuflash.softmax(np.float32(3))) is np.float32
        assert type(cuflash.logsumexp(normal(4))) is np.float32
        assert type(cuflash.logsumexp([1, 2])) is np.float64
        out = np.empty((), np.float32)
        assert cuflash.logsumexp(normal(4), out=out) is out

    def test_a_scalar_is_no_output(self) -> None:
        with pytest.raises(TypeError, match=r"^out is a NumPy scalar"):
            cuflash.softmax(np.float32(3), out=np.float32(0))


class TestOtherLibraries:
    """A library that cuflash does not know by name: array_api_strict, standing for all."""

    def test_arrays_come_in_and_go_out_without_a_copy(self) -> None:
        import array_api_strict

        x = array_api_strict.asarray(normal(3, 4))
        home, native = interop.take("x", x)
        assert home.library == "array_api_strict"
        assert np.shares_memory(native, np.from_dlpack(x))
        back = home.export(native)
        assert type(back) is type(x)
        assert np.shares_memory(np.from_dlpack(back), native)

    def test_results_are_of_the_same_library(self) -> None:
        import array_api_strict

        a = normal(2, 3, 4)
        x = array_api_strict.asarray(a)
        mask = np.tri(3, dtype=bool)
        out, lse = flash_attention(
            x,
            x,
            x,
            mask=array_api_strict.asarray(mask),
            return_lse=True,
            query_offset=np.array([0]),
        )
        assert type(out) is type(lse) is type(x)
        expected, expected_lse = flash_attention(a, a, a, mask=mask, return_lse=True)
        np.testing.assert_array_equal(np.from_dlpack(out), expected)
        np.testing.assert_array_equal(np.from_dlpack(lse), expected_lse)
        total = cuflash.logsumexp(x, axis=None)
        assert type(total) is type(x)
        assert total.shape == ()

    def test_outputs_are_filled(self) -> None:
        import array_api_strict

        a = normal(3, 4)
        x = array_api_strict.asarray(a)
        out = array_api_strict.zeros((3, 4), dtype=array_api_strict.float32)
        assert flash_attention(x, x, x, out=out) is out
        np.testing.assert_array_equal(np.from_dlpack(out), flash_attention(a, a, a))

    def test_libraries_do_not_mix(self) -> None:
        import array_api_strict

        a = normal(3, 4)
        x = array_api_strict.asarray(a)
        message = "^v is an array of numpy but q is one of array_api_strict; .*one library$"
        with pytest.raises(TypeError, match=message):
            flash_attention(x, x, a)
        with pytest.raises(TypeError, match=r"^y is an array of array_api_strict but dy is"):
            cuflash.softmax_vjp(a, x)
        with pytest.raises(TypeError, match=r"^where is an array of numpy but x is"):
            cuflash.softmax(x, where=np.ones((3, 4), bool))

    @pytest.mark.parametrize(
        "thing",
        [
            object(),
            "text",
            b"bytes",
            {1: 2},
            {1, 2},
            bytearray(8),
            memoryview(bytes(8)),
            np.float32,
            SimpleNamespace(shape=(3, 4), dtype=np.dtype("f4"), strides=(16, 4)),
            SimpleNamespace(__array_interface__=normal(3, 4).__array_interface__),
            Exporter(namespace=None),
            Exporter(namespace=SimpleNamespace()),
        ],
        ids=lambda x: type(x).__name__,
    )
    def test_anything_else_is_refused(self, thing: Any) -> None:
        x = normal(3, 4)
        for arguments in ((thing, x, x), (x, thing, x), (x, x, thing)):
            name = "qkv"[[a is thing for a in arguments].index(True)]
            with pytest.raises(TypeError, match=f"^{name} must be an array of NumPy.*got "):
                flash_attention(*arguments)

    def test_a_library_that_refuses_is_named_with_the_argument(self) -> None:
        with pytest.raises(TypeError, match=r"^k cannot be read as an array: not today"):
            flash_attention(normal(3, 4), Exporter(), normal(3, 4))

    def test_other_devices_are_refused(self) -> None:
        with pytest.raises(TypeError, match=r"^x is on DLPack device 8:1.*CPUs and CUDA GPUs"):
            interop.take("x", Exporter(device=(8, 1)))


class FakeCuPy:
    """As much of a cupy.ndarray as is looked at above the engine; `base` tells its addresses."""

    def __init__(self, base: np.ndarray, device: int = 0) -> None:
        self.shape, self.strides, self.dtype, self.size = (
            base.shape,
            base.strides,
            base.dtype,
            base.size,
        )
        self.flags, self.nbytes = base.flags, base.nbytes
        self.data = SimpleNamespace(ptr=address(base), device_id=device)


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let `FakeCuPy` be what an imported cupy calls ndarray."""
    fake = SimpleNamespace(ndarray=FakeCuPy, is_available=lambda: True)
    monkeypatch.setitem(sys.modules, "cupy", fake)
    return


class TestCuPy:
    def test_an_array_without_the_library_is_unknown(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Unknown(FakeCuPy):
            """A type not seen before: those seen are remembered."""

        monkeypatch.delitem(sys.modules, "cupy", raising=False)
        with pytest.raises(TypeError, match=r"^x must be an array of NumPy, CuPy"):
            interop.take("x", Unknown(normal(3)))
        assert "cupy" not in sys.modules

    @pytest.mark.usefixtures("cupy")
    def test_an_array_comes_in_as_it_is(self) -> None:
        x = FakeCuPy(normal(3, 4), device=5)
        home, native = interop.take("x", x)
        assert native is x
        assert (home.library, home.engine, home.device) == ("cupy", "device", 5)
        assert home.restore(native) is x

    @pytest.mark.usefixtures("cupy")
    def test_the_short_way_in_is_for_cupy_alone(self) -> None:
        x, other = FakeCuPy(normal(3, 4), device=5), FakeCuPy(normal(2), device=6)
        home, _ = interop.take("x", x)
        assert interop.cupy_home(x, x) is home
        assert interop.cupy_home(x, other) is None
        assert interop.cupy_home(x, None) is None
        assert interop.cupy_home(normal(3), x) is None
        assert interop.cupy_home() is None

    @pytest.mark.usefixtures("cupy")
    def test_lengths_may_be_values_of_the_host(self) -> None:
        x, lengths = FakeCuPy(normal(3, 4)), np.array([3])
        home, native = interop.enter({"q": x}, values={"a": lengths, "b": 3, "c": None})
        assert home.engine == "device"
        assert native == {"q": x, "a": lengths, "b": 3, "c": None}

    @pytest.mark.usefixtures("cupy")
    def test_libraries_and_devices_do_not_mix(self) -> None:
        x = FakeCuPy(normal(3, 4))
        with pytest.raises(TypeError, match=r"^k is an array of numpy but q is one of cupy"):
            interop.enter({"q": x, "k": normal(3, 4)})
        with pytest.raises(TypeError, match=r"^lengths is an array of cupy but q is one of numpy"):
            interop.enter({"q": normal(3, 4)}, values={"lengths": x})
        with pytest.raises(ValueError, match=r"^out is on device device 1 but q is on device dev"):
            interop.enter({"q": x}, outputs={"out": FakeCuPy(normal(3, 4), device=1)})

    @pytest.mark.usefixtures("cupy")
    def test_overlap_is_told_by_addresses(self) -> None:
        x = normal(6, 4)
        shares = interop.shares_memory
        assert shares(FakeCuPy(x), FakeCuPy(x))
        assert shares(FakeCuPy(x[:4]), FakeCuPy(x[3:]))
        assert not shares(FakeCuPy(x[:3]), FakeCuPy(x[3:]))
        assert not shares(FakeCuPy(x[::2]), FakeCuPy(x[1::2]))
        assert not shares(FakeCuPy(x[:, ::-2]), FakeCuPy(x[:, ::2]))
        assert shares(FakeCuPy(x.T), FakeCuPy(x[2:3].view(np.uint8)))
        assert interop.same_view(FakeCuPy(x), FakeCuPy(x[:]))
        assert not interop.same_view(FakeCuPy(x), FakeCuPy(x[:5]))
        assert not interop.same_view(FakeCuPy(x), FakeCuPy(x.view(np.int32)))
        empty = FakeCuPy(x[:0])
        empty.data.ptr = 0
        assert not shares(empty, FakeCuPy(x))

        with pytest.raises(ValueError, match=r"^out shares memory with k$"):
            interop.refuse_overlap(
                {"out": FakeCuPy(x[:3]), "lse": None}, {"q": FakeCuPy(x[3:]), "k": FakeCuPy(x[2:])}
            )
        with pytest.raises(ValueError, match=r"^lse shares memory with out$"):
            interop.refuse_overlap({"out": FakeCuPy(x), "lse": FakeCuPy(x[0])}, {"q": None})
        with pytest.raises(ValueError, match=r"^out has several indices for one element"):
            interop.refuse_overlap({"out": FakeCuPy(np.broadcast_to(x, (2, 6, 4)))}, {})
        interop.refuse_overlap({"out": FakeCuPy(x[:3])}, {"q": FakeCuPy(x[3:]), "k": x, "n": 3})


class TestHandOver:
    """The way out orders streams, which is the consumer's `from_dlpack` and so must be called."""

    @pytest.fixture
    def log(self) -> list[str]:
        return []

    @pytest.fixture
    def result(self, log: list[str]) -> Any:
        """What the engine filled: an array whose device can be made the current one."""

        class Device:
            def __enter__(self) -> None:
                log.append("enter")

            def __exit__(self, *_: object) -> None:
                log.append("leave")

        return SimpleNamespace(device=Device())

    @pytest.fixture
    def from_dlpack(self, log: list[str]) -> Any:
        def from_dlpack(x: Any) -> Any:
            log.append("from_dlpack")
            return x

        return from_dlpack

    def take(self, monkeypatch: pytest.MonkeyPatch, x: Any) -> interop.Home:
        taken = []
        fake = SimpleNamespace(ndarray=FakeCuPy, from_dlpack=taken.append)
        monkeypatch.setitem(sys.modules, "cupy", fake)
        home, _ = interop.take("x", x)
        assert taken == [x]  # the array, not a capsule: CuPy tells its producer which stream waits
        return home

    def test_results_leave_on_their_own_device(
        self, monkeypatch: pytest.MonkeyPatch, log: list[str], result: Any, from_dlpack: Any
    ) -> None:
        home = self.take(monkeypatch, Exporter(SimpleNamespace(from_dlpack=from_dlpack), (2, 1)))
        assert (home.engine, home.device) == ("device", 1)
        assert home.restore(result) is result
        assert log == ["enter", "from_dlpack", "leave"]

    def test_the_callers_output_is_handed_over_too(
        self, monkeypatch: pytest.MonkeyPatch, log: list[str], result: Any, from_dlpack: Any
    ) -> None:
        home = self.take(monkeypatch, Exporter(SimpleNamespace(from_dlpack=from_dlpack), (2, 1)))
        given = object()
        assert home.restore(result, given) is given
        assert log == ["enter", "from_dlpack", "leave"]

    def test_results_for_jax_are_finished(
        self, monkeypatch: pytest.MonkeyPatch, log: list[str], result: Any, from_dlpack: Any
    ) -> None:
        """JAX may write the memory of a temporary operand as soon as the call returns."""

        class Array:
            def devices(self) -> set[Any]:
                return {gpu}

        def block_until_ready(x: Any) -> Any:
            log.append("block_until_ready")
            return x

        class FakeGpu:
            platform, local_hardware_id = "gpu", 1

        gpu = FakeGpu()
        fake = SimpleNamespace(
            Array=Array,
            core=SimpleNamespace(Tracer=FakeCuPy),
            dlpack=SimpleNamespace(from_dlpack=from_dlpack),
            block_until_ready=block_until_ready,
        )
        monkeypatch.setitem(sys.modules, "jax", fake)
        home = self.take(monkeypatch, Array())
        assert (home.library, home.engine, home.device) == ("jax", "device", 1)
        assert home.restore(result) is result
        assert log == ["enter", "from_dlpack", "leave", "block_until_ready"]


class TestOverlap:
    @given(
        shape=st.lists(st.integers(1, 4), max_size=3),
        strides=st.lists(st.integers(-6, 6), min_size=3, max_size=3),
    )
    def test_overlap_with_itself_is_never_missed(
        self, shape: list[int], strides: list[int]
    ) -> None:
        x = as_strided(np.zeros(128, np.int16)[64:], shape, [2 * s for s in strides[: len(shape)]])
        offsets = {np.dot(index, x.strides) for index in np.ndindex(x.shape)}
        assert interop.overlaps_itself(x) or len(offsets) == x.size

    @given(layout=hnp.array_shapes(max_dims=4, max_side=4), data=st.data())
    def test_views_of_an_array_do_not_overlap_themselves(
        self, layout: tuple[int, ...], data: st.DataObject
    ) -> None:
        index = data.draw(hnp.basic_indices(layout, allow_newaxis=True, allow_ellipsis=False))
        view = np.zeros(layout, np.int16)[index].T
        assert not interop.overlaps_itself(view)

    def test_what_takes_too_much_work_to_tell_counts_as_overlap(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        memory = np.zeros(10**6, np.uint8)
        a = as_strided(memory, (4, 4, 4), (18701, 5548, 16317))
        b = as_strided(memory[1:], (4, 4, 4), (13418, 56, 7884))
        assert not interop.shares_memory(a, b)
        monkeypatch.setattr(interop, "_OVERLAP_WORK", 1)
        assert interop.shares_memory(a, b)
        assert not interop.shares_memory(a, memory.copy())


class TestDescriptions:
    def test_arrays_are_described_where_they_are(self) -> None:
        x = normal(3, 4).T
        engine, specs = interop.describe(
            {"q": x}, options={"mask": None}, values={"n": 3, "none": None}
        )
        assert engine == "host"
        assert specs == {
            "q": ArraySpec((4, 3), (4, 16), np.dtype("f4")),
            "mask": None,
            "n": 3,
            "none": None,
        }

    @pytest.mark.usefixtures("cupy")
    def test_a_description_runs_where_a_gpu_is(self, monkeypatch: pytest.MonkeyPatch) -> None:
        q = SimpleNamespace(shape=(3, 4), dtype="bfloat16")
        engine, specs = interop.describe({"q": q}, options={}, values={})
        assert (engine, specs["q"]) == ("device", ArraySpec((3, 4), (8, 2), BFLOAT16))
        array = normal(3, 4)
        assert interop.describe({"q": array, "k": q}, options={}, values={})[0] == "host"
        monkeypatch.setattr(sys.modules["cupy"], "is_available", lambda: False)
        assert interop.describe({"q": q}, options={}, values={})[0] == "host"
        monkeypatch.setitem(sys.modules, "cupy", None)  # not installed
        assert interop.describe({"q": q}, options={}, values={})[0] == "host"

    @pytest.mark.parametrize("thing", [None, 3, "text", [[1.0]], SimpleNamespace(shape=(3, 4))])
    def test_anything_else_is_refused(self, thing: Any) -> None:
        with pytest.raises(TypeError, match=r"^k must be an array"):
            interop.describe({"q": normal(3, 4), "k": thing}, options={}, values={})


class TestTorch:
    @pytest.fixture
    def torch(self) -> Any:
        return pytest.importorskip("torch")

    @pytest.mark.parametrize("dtype", FLOATS)
    def test_results_are_tensors(self, torch: Any, dtype: str) -> None:
        a = normal(2, 5, 3, 8).astype(dtype)
        x = torch.from_numpy(normal(2, 5, 3, 8)).to(getattr(torch, dtype)).transpose(1, 2)
        out, lse = flash_attention(x, x, x, causal=True, return_lse=True)
        assert (type(out), out.dtype, out.shape) == (torch.Tensor, x.dtype, x.shape)
        assert lse.dtype == (torch.float64 if dtype == "float64" else torch.float32)
        assert out.transpose(1, 2).is_contiguous()
        a = a.swapaxes(1, 2)
        expected, expected_lse = flash_attention(a, a, a, causal=True, return_lse=True)
        np.testing.assert_array_equal(out.double().numpy(), expected.astype(np.float64))
        np.testing.assert_array_equal(lse.numpy(), expected_lse)
        assert cuflash.logsumexp(x, axis=None).shape == ()
        assert cuflash.softmax(x).dtype == x.dtype

    @pytest.mark.parametrize("dtype", FLOATS)
    def test_nothing_is_copied(self, torch: Any, dtype: str) -> None:
        x = torch.ones((3, 4), dtype=getattr(torch, dtype)).T
        home, native = interop.take("x", x)
        assert native.dtype.name == dtype
        assert (native.shape, address(native)) == ((4, 3), x.data_ptr())
        back = home.export(native)
        assert (back.data_ptr(), back.dtype, back.stride()) == (x.data_ptr(), x.dtype, x.stride())
        out = torch.zeros((3, 4), dtype=x.dtype)
        ones = torch.ones_like(out)
        assert flash_attention(ones, ones, ones, out=out) is out
        assert bool((out == 1).all())

    def test_float32_output(self, torch: Any) -> None:
        x = torch.ones((3, 4), dtype=torch.bfloat16)
        out = torch.zeros((3, 4))
        assert flash_attention(x, x, x, out=out) is out
        assert bool((out == 1).all())

    def test_what_cannot_be_honoured_is_refused(self, torch: Any) -> None:
        x = torch.ones((3, 4))
        refused = {
            r"requires grad.*k\.detach\(\)": x.clone().requires_grad_(),
            "layout": x.to_sparse(),
            "on meta": x.to("meta"),
            "lazy": torch.ones((3, 4), dtype=torch.complex64).conj(),
            "complex64": torch.ones((3, 4), dtype=torch.complex64),
            "cannot be read.*Float8": x.to(torch.float8_e4m3fn),
            "array of numpy but q is one of torch": x.numpy(),
        }
        for message, k in refused.items():
            with pytest.raises(TypeError, match=f"^k .*{message}"):
                flash_attention(x, k, x)
        with pytest.raises(TypeError, match=r"^out requires grad"):
            flash_attention(x, x, x, out=x.clone().requires_grad_())
        with pytest.raises(ValueError, match=r"^out shares memory with v"):
            flash_attention(x.clone(), x.clone(), x, out=x)
        with pytest.raises(TypeError, match=r"^q cannot be read"):
            torch.vmap(lambda a: flash_attention(a, a, a))(torch.ones((2, 3, 4)))

    def test_lengths_of_either_library(self, torch: Any) -> None:
        x = torch.from_numpy(normal(2, 5, 4))
        of_torch = flash_attention(x, x, x, key_lengths=torch.tensor([3, 5]))
        assert torch.equal(of_torch, flash_attention(x, x, x, key_lengths=np.array([3, 5])))


class TestJax:
    @pytest.fixture
    def jax(self) -> Iterator[Any]:
        jax = pytest.importorskip("jax")
        jax.config.update("jax_enable_x64", True)
        yield jax
        jax.config.update("jax_enable_x64", False)

    @pytest.mark.parametrize("dtype", FLOATS)
    def test_results_are_jax_arrays(self, jax: Any, dtype: str) -> None:
        a = normal(2, 3, 5, 8).astype(dtype)
        x = jax.numpy.asarray(a)
        out, lse = flash_attention(x, x, x, causal=True, return_lse=True)
        assert isinstance(out, jax.Array)
        assert (out.dtype.name, out.devices()) == (dtype, x.devices())
        expected, expected_lse = flash_attention(a, a, a, causal=True, return_lse=True)
        assert lse.dtype == expected_lse.dtype
        np.testing.assert_array_equal(np.asarray(out), expected)
        np.testing.assert_array_equal(np.asarray(lse), expected_lse)
        assert isinstance(cuflash.logsumexp(x, axis=None), jax.Array)

    @pytest.mark.parametrize("dtype", FLOATS)
    def test_nothing_is_copied(self, jax: Any, dtype: str) -> None:
        x = jax.numpy.ones((3, 4), dtype)
        home, native = interop.take("x", x)
        assert native.dtype.name == dtype
        assert address(native) == x.unsafe_buffer_pointer()
        result = cuflash.host.empty((30, 40), native.dtype)
        assert home.export(result).unsafe_buffer_pointer() == address(result)

    def test_what_cannot_be_honoured_is_refused(self, jax: Any) -> None:
        x = jax.numpy.ones((3, 4))

        def attend(a: Any) -> Any:
            return flash_attention(a, a, a)

        for transform in (jax.jit, lambda f: jax.grad(lambda a: f(a).sum())):
            with pytest.raises(TypeError, match=r"^q is a JAX tracer.*use.* cuflash\.jax"):
                transform(attend)(x)
        with pytest.raises(TypeError, match=r"^out is a JAX array, which cannot be written"):
            flash_attention(x, x, x, out=jax.numpy.zeros((3, 4)))
        with pytest.raises(TypeError, match=r"^out is an array of numpy but q is one of jax"):
            flash_attention(x, x, x, out=np.zeros((3, 4)))
        with pytest.raises(TypeError, match=r"^k is an array of numpy but q is one of jax"):
            flash_attention(x, np.asarray(x), x)
        with pytest.raises(TypeError, match=r"^v cannot be read as an array: .*PRNGKey"):
            flash_attention(x, x, jax.random.key(0))

    def test_workspace_size_needs_no_values(
        self, jax: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("cuflash.interop._best_engine", lambda: "host")
        x = jax.ShapeDtypeStruct((3, 4), "bfloat16")
        assert cuflash.workspace_size(x, x, x) == 0

        def size(a: Any) -> int:
            return cuflash.workspace_size(a, a, a)

        assert jax.jit(size)(jax.numpy.ones((3, 4))) == 0
