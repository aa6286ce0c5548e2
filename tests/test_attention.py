"""What callers of attention rely on beside its values: errors, outputs, layouts, options."""

import inspect
import re
from collections.abc import Callable
from fractions import Fraction
from types import SimpleNamespace
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

import cuflash
from cuflash import flash_attention, workspace_size

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def strict_array(x: Any) -> Any:
    """Return an array of a library that is none of those known by name."""
    import array_api_strict  # tests of GPU machines may do without it

    return array_api_strict.asarray(x)


SENTINEL = 77


def operands() -> dict[str, np.ndarray]:
    """Return q, k, v of batch shape (2, 4)."""
    rng = np.random.default_rng(0)
    shapes = {"q": (2, 4, 5, 8), "k": (2, 4, 6, 8), "v": (2, 4, 6, 3)}
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


class Bad(NamedTuple):
    """A call that must be refused: what differs from `operands()`, and how it is refused."""

    argument: str
    error: type[Exception]
    changes: Callable[[dict[str, np.ndarray]], dict[str, Any]]
    message: str = ""

    def __repr__(self) -> str:
        return self.argument  # the identifier of the test


def bad(argument: str, error: type[Exception], *values: Any, message: str = "") -> list[Bad]:
    """Return a case for each value of one argument."""
    return [Bad(argument, error, lambda _, x=x: {argument: x}, message) for x in values]


def bad_from(
    argument: str,
    error: type[Exception],
    make: Callable[[dict[str, np.ndarray]], dict[str, Any]],
    message: str = "",
) -> Bad:
    """Return a case whose arguments are made from the operands."""
    return Bad(argument, error, make, message)


def ones(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.ones(shape, dtype)


def frozen(x: np.ndarray) -> np.ndarray:
    x.flags.writeable = False
    return x


def not_floats(*shape: int) -> list[np.ndarray]:
    """Return arrays of the dtypes that are not computed with."""
    dtypes = ("i4", "u1", "?", "c8", "c16", "g", "O", "M8[s]", "m8[s]", "U3", "S3", [("x", "f4")])
    arrays = [np.zeros(shape, dtype) for dtype in dtypes]
    return [*arrays, np.zeros(shape, ml_dtypes.float8_e4m3fn)]


# Anything but a real number, an integer, a flag, a pair of integers.
NOT_REAL = (
    "1",
    b"1",
    True,
    np.True_,
    1j,
    np.complex64(1),
    [1.0],
    (1.0,),
    np.ones(1),
    np.array(1.0),
)
NOT_INTEGER = (1.5, np.float64(1), "1", True, [1], None)
NOT_A_FLAG = (0, 1, None, "yes", 1.0, np.array(True), [True])

REFUSED_BY_SHAPE = [
    *bad("q", TypeError, None, 1.0, "q", [[1.0, 2.0]], ((1.0,),), object(), *not_floats(5, 8)),
    *bad("q", ValueError, np.float32(1), ones(), ones(8), ones(*[1] * 33), message="axes"),
    *bad("q", ValueError, ones(2, 4, 5, 0), message="feature"),
    *bad("k", TypeError, None, 1, [[1.0]], *not_floats(2, 4, 6, 8)),
    *bad("k", TypeError, ones(2, 4, 6, 8, dtype="f8"), ones(2, 4, 6, 8, dtype="f2")),
    *bad("k", ValueError, ones(8), ones(2, 4, 6, 7), ones(3, 4, 6, 8), ones(2, 3, 6, 8)),
    *bad("v", TypeError, 1, [[1.0]], *not_floats(2, 4, 6, 3)),
    *bad("v", TypeError, ones(2, 4, 6, 3, dtype=BFLOAT16)),
    *bad("v", ValueError, ones(3), ones(2, 4, 5, 3), ones(2, 4, 1, 3), ones(2, 5, 6, 3)),
    *bad("scale", TypeError, *NOT_REAL),
    *bad("scale", ValueError, np.nan, np.inf, -np.inf, np.float32("nan"), 10**400),
    *bad("softcap", TypeError, *NOT_REAL),
    *bad("softcap", ValueError, 0, 0.0, -1, -0.5, np.nan, np.inf, -np.inf, 10**400),
    *bad("causal", TypeError, *NOT_A_FLAG),
    *bad("window", TypeError, 3, 1.5, "ab", b"ab", (1,), (1, 2, 3), {1, 2}, np.array([1, 2])),
    *bad("window", TypeError, (1.0, 2), ("1", 2), (True, 0), (None, [1]), (1, np.array([2, 3]))),
    *bad("window", ValueError, (-1, 2), (2, -1), (None, -1), message="negative"),
    *bad("window", ValueError, (-(2**70), None), (0, 2**61), message="62 bits"),
    *bad("query_offset", TypeError, 1.5, "1", True, np.True_, [[1]], ones(2, 4), (1,)),
    *bad("query_offset", ValueError, np.array([1, 2]), ones(1, 1, 1, dtype=int), message="axes"),
    *bad("query_offset", ValueError, ones(3, 1, dtype=int), ones(2, 3, dtype=int), 2**61, -(2**80)),
    *bad("mask", TypeError, 1, True, [[True]], "mask", *not_floats(5, 6)[:2], ones(5, 6)),
    *bad("mask", ValueError, ones(5, 5, dtype=bool), ones(6, 5, dtype=bool)),
    *bad("mask", ValueError, ones(3, 1, 5, 6, dtype=bool), ones(2, 2, 4, 5, 6, dtype=bool)),
    *bad("bias", TypeError, 1, 0.5, [[0.0]], *not_floats(5, 6)),
    *bad("bias", ValueError, ones(5, 5), ones(2, 1, 5, 6)[:, [0, 0, 0]], ones(2, 2, 4, 5, 6)),
    *bad("alibi_slopes", TypeError, 1, 0.5, [0.1], *not_floats(4)),
    *bad("alibi_slopes", ValueError, ones(2), ones(4, 2), ones(2, 4, 5), ones(1, 2, 4)),
    *bad("sinks", TypeError, 1, 0.5, (0.1,), *not_floats(4)),
    *bad("sinks", ValueError, ones(2), ones(2, 3), ones(2, 4, 5), ones(1, 2, 4)),
    *bad("num_splits", TypeError, *NOT_INTEGER[:-1]),
    *bad("num_splits", ValueError, 0, -1, 2**63),
    *bad("enable_gqa", TypeError, *NOT_A_FLAG),
    bad_from("q", ValueError, lambda x: {"q": x["q"][:, :3], "enable_gqa": True}, "heads"),
    bad_from("q", ValueError, lambda x: {"q": x["q"][0, 0], "enable_gqa": True}, "head axis"),
    bad_from(
        "q", ValueError, lambda x: {"k": x["k"][:, :3], "v": x["v"][:, :3], "enable_gqa": True}
    ),
    bad_from(
        "q", ValueError, lambda x: {"k": x["k"][:, :0], "v": x["v"][:, :0], "enable_gqa": True}
    ),
    bad_from("k", ValueError, lambda x: {"k": x["k"][0, 0], "enable_gqa": True}, "head axis"),
    bad_from("v", ValueError, lambda x: {"v": x["v"][:, :2], "enable_gqa": True}, "heads"),
    *[
        bad_from(
            name,
            ValueError,
            lambda x, name=name, wrong=wrong: {
                "k": x["k"][:, :2],
                "v": x["v"][:, :2],
                "enable_gqa": True,
                name: wrong,
            },
            rf"{re.escape(str(wrong.shape))}, which does not broadcast to \(2, 4",
        )
        for name, wrong in {
            "mask": ones(2, 5, 6, dtype=bool),
            "bias": ones(2, 5, 6),
            "sinks": ones(2),
            "alibi_slopes": ones(2),
            "key_lengths": ones(2, 2, dtype=int),
        }.items()
    ],
    *bad("method", TypeError, None, 1, ["tiled"], np.array(["tiled"])),
    *bad("method", ValueError, "", "fast", "TILED", message=r"unknown.*'auto', 'tiled'"),
    *bad("method", ValueError, "simt", "mma", "wgmma", message=r"cannot run.*'auto', 'tiled'"),
    *[
        case
        for name in ("query_lengths", "key_lengths")
        for case in (
            *bad(name, TypeError, 1.5, "1", True, np.True_, [[1], [2]], ones(2, 4)),
            *bad(name, TypeError, ones(2, 4, dtype=bool), ones(2, 4, dtype="O")),
            *bad(name, ValueError, np.array(1), np.array([1, 2]), ones(1, 1, 1, dtype=int)),
            *bad(name, ValueError, ones(3, 1, dtype=int), ones(1, 2, dtype=int)),
            *bad(name, ValueError, -1, 7, np.int64(-1), np.uint8(200), message="outside 0"),
        )
    ],
]

REFUSED_BY_VALUE = [
    *bad("v", TypeError, None),  # but workspace_size(q, k, None) is that of flash_logsumexp
    *[
        case
        for name in ("query_lengths", "key_lengths")
        for case in bad(
            name,
            ValueError,
            np.array([[1], [7]]),
            np.array([[-1, 1, 1, 1]]),
            np.array([[255]], np.uint8),
            np.full((2, 4), 2**63, np.uint64),
            message="outside 0",
        )
    ],
    *bad("check", TypeError, *NOT_A_FLAG),
]

OTHER_LIBRARY = [
    bad_from(
        argument,
        TypeError,
        lambda _, argument=argument, x=x: {argument: strict_array(x)},
        "array_api_strict",
    )
    for argument, x in {
        "k": ones(2, 4, 6, 8),
        "v": ones(2, 4, 6, 3),
        "mask": ones(5, 6, dtype=bool),
        "bias": ones(5, 6),
        "sinks": ones(4),
        "alibi_slopes": ones(4),
        "key_lengths": ones(2, 4, dtype=int),
        "out": ones(2, 4, 5, 3),
        "lse": ones(2, 4, 5),
        "workspace": ones(9, dtype="u1"),
    }.items()
]

REFUSED_OUTPUTS = [
    *bad("return_lse", TypeError, *NOT_A_FLAG),
    *bad("out", TypeError, 1, "out", [[0.0]], np.float32(0), np.ma.zeros((2, 4, 5, 3), "f4")),
    *bad("out", TypeError, ones(2, 4, 5, 3, dtype="f8"), ones(2, 4, 5, 3, dtype="f2")),
    *bad("out", TypeError, ones(2, 4, 5, 3).astype(">f4"), message="byte"),
    *bad("out", ValueError, ones(2, 4, 5, 8), ones(2, 4, 5, 1), ones(4, 5, 3), ones(1, 2, 4, 5, 3)),
    *bad("out", ValueError, frozen(ones(2, 4, 5, 3)), message="read-only"),
    *bad(
        "out",
        ValueError,
        as_strided(ones(5, 3), (2, 4, 5, 3), (0, 0, 12, 4)),
        as_strided(ones(99), (2, 4, 5, 3), (192, 48, 8, 4)),
        message="several indices",
    ),
    bad_from("out", ValueError, lambda x: {"v": x["k"], "out": x["q"]}, "shares memory with q"),
    bad_from(
        "out",
        ValueError,
        lambda x: {"v": x["v"], "out": as_strided(x["v"], (2, 4, 5, 3), x["v"].strides)},
        "shares memory with v",
    ),
    bad_from(
        "out",
        ValueError,
        lambda x: {"out": (both := ones(2, 4, 5, 6))[..., :3], "bias": both},
        "shares memory with bias",
    ),
    bad_from(
        "lse",
        ValueError,
        lambda x: {"out": (both := ones(2, 4, 5, 4))[..., :3], "lse": both[..., 2]},
        "shares memory with out",
    ),
    *bad("lse", TypeError, 1, [0.0], ones(2, 4, 5, dtype="f8"), ones(2, 4, 5, dtype="f2")),
    *bad("lse", ValueError, ones(2, 4, 6), ones(2, 4, 5, 1), ones(4, 5)),
    *bad("lse", ValueError, frozen(ones(2, 4, 5)), message="read-only"),
    bad_from("lse", ValueError, lambda x: {"lse": x["k"][..., :5, 0]}, "shares memory with k"),
    *bad("workspace", TypeError, bytearray(9), ones(9), ones(9, dtype="i1"), ones(9, dtype="?")),
    *bad("workspace", TypeError, ones(9, dtype="i1"), message="an array of uint8 is needed"),
    *bad("workspace", ValueError, ones(3, 3, dtype="u1"), ones(), ones(18, dtype="u1")[::2]),
    *bad("workspace", ValueError, frozen(ones(9, dtype="u1")), message="read-only"),
    bad_from(
        "workspace",
        ValueError,
        lambda x: {"workspace": x["k"].reshape(-1).view("u1")},
        "shares memory with k",
    ),
    bad_from(
        "out",
        ValueError,
        lambda x: {
            "q": x["q"],
            "k": x["k"][:, :2],
            "v": x["v"][:, :2],
            "enable_gqa": True,
            "out": ones(2, 2, 2, 5, 3),
        },
    ),
]


@pytest.mark.parametrize(
    "case", [*REFUSED_BY_SHAPE, *REFUSED_BY_VALUE, *OTHER_LIBRARY, *REFUSED_OUTPUTS], ids=repr
)
def test_bad_input_is_refused_by_name_and_nothing_is_written(case: Bad) -> None:
    arguments = operands()
    arguments |= {"out": np.full((2, 4, 5, 3), SENTINEL, "f4"), "lse": np.full((2, 4, 5), 7, "f4")}
    arguments |= case.changes(arguments)
    arrays = [x for x in arguments.values() if isinstance(x, np.ndarray) and x.dtype != object]
    before = [x.tobytes() for x in arrays]
    q, k, v = (arguments.pop(name) for name in "qkv")
    with pytest.raises(case.error, match=rf"(?s)^{case.argument}\b.*{case.message}"):
        flash_attention(q, k, v, **arguments)
    assert [x.tobytes() for x in arrays] == before


@pytest.mark.parametrize(
    ("call", "case"),
    [
        (call, case)
        for call in (workspace_size, cuflash.baselines.materialized_attention)
        for case in REFUSED_BY_SHAPE
        if case.argument in inspect.signature(call).parameters
    ],
    ids=lambda x: x.__name__ if callable(x) else repr(x),
)
def test_the_other_functions_refuse_the_same(call: Callable[..., Any], case: Bad) -> None:
    arguments = operands() | case.changes(operands())
    q, k, v = (arguments.pop(name) for name in "qkv")
    with pytest.raises(case.error, match=rf"(?s)^{case.argument}\b.*{case.message}"):
        call(q, k, v, **arguments)


@pytest.mark.parametrize("kind", [np.ma.MaskedArray, np.matrix])
def test_subclasses_with_other_arithmetic_are_refused(kind: type[np.ndarray]) -> None:
    x = ones(5, 8).view(kind)
    with pytest.raises(TypeError, match=rf"^q is a {kind.__name__}"):
        flash_attention(x, ones(5, 8), ones(5, 8))


def test_a_workspace_of_the_size_asked_for() -> None:
    """On the host that is nothing, where an array's stride means nothing."""
    x = operands()
    for size in (workspace_size(**x), 1):
        for workspace in (np.empty(size, np.uint8), as_strided(np.empty(9, "u1"), (size,), (7,))):
            np.testing.assert_array_equal(
                flash_attention(**x, workspace=workspace), flash_attention(**x)
            )


def test_too_small_a_workspace_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cuflash.host.attention_workspace", lambda problem: 100)
    x, out = operands(), np.full((2, 4, 5, 3), SENTINEL, "f4")
    assert workspace_size(**x) == 100
    with pytest.raises(ValueError, match=r"^workspace has 99 bytes; this problem needs 100"):
        flash_attention(**x, out=out, workspace=np.empty(99, np.uint8))
    assert (out == SENTINEL).all()
    flash_attention(**x, out=out, workspace=np.empty(100, np.uint8))
    assert not (out == SENTINEL).any()


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("scale", [1e300, -1e300, 5e-324])
def test_scale_past_the_accumulator_leaves_zero_scores_zero(dtype: type, scale: float) -> None:
    zero, v = np.zeros((2, 3), dtype), np.arange(6, dtype=dtype).reshape(2, 3)
    np.testing.assert_array_equal(flash_attention(zero, zero, v, scale=scale)[0], v.mean(axis=0))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("softcap", [1e-300, 1e-40, 1e30, 1e38, 1e300])
def test_softcap_of_any_size(dtype: type, softcap: float, rng: np.random.Generator) -> None:
    q, k, v = rng.standard_normal((3, 7, 4)).astype(dtype)
    q[0] = 0
    out, lse = flash_attention(q, k, v, softcap=softcap, return_lse=True)
    expected = cuflash.reference.attention(q, k, v, softcap=softcap)
    tolerance = 8 * np.finfo(dtype).eps
    np.testing.assert_allclose(out, expected[0], tolerance, tolerance)
    np.testing.assert_allclose(lse, expected[1], tolerance, tolerance)


FAR = 2**61 - 1


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"scale": np.float32(0.5)}, {"scale": 0.5}),
        ({"scale": np.int8(2)}, {"scale": 2.0}),
        ({"scale": 0}, {"scale": 0.0}),
        ({"scale": Fraction(-3, 2)}, {"scale": -1.5}),
        ({"softcap": np.float16(2)}, {"softcap": 2.0}),
        ({"causal": np.True_}, {"causal": True}),
        ({"causal": True, "window": (None, 3)}, {"causal": True}),
        ({"window": [1, None]}, {"window": (1, None)}),
        ({"window": (np.int32(0), np.uint8(3))}, {"window": (0, 3)}),
        ({"window": (FAR, FAR)}, {}),
        ({"query_offset": np.int16(-3), "causal": True}, {"query_offset": -3, "causal": True}),
        (
            {"query_offset": FAR, "causal": True, "window": (FAR, None)},
            {"window": (0, None), "query_offset": 0},
        ),
        ({"query_offset": FAR, "causal": True}, {}),
        ({"query_offset": -FAR, "window": (0, FAR)}, {"window": (None, 0), "query_offset": 0}),
        ({"query_offset": -FAR, "window": (0, 0)}, {"key_lengths": 0}),
        ({"query_offset": np.full((2, 4), -(2**63)), "window": (0, FAR)}, {"key_lengths": 0}),
        ({"query_offset": np.full((2, 4), 2**64 - 1, np.uint64), "causal": True}, {}),
        ({"key_lengths": np.array([[6], [0]], np.uint8)}, {"key_lengths": np.array([[6], [0]])}),
        ({"query_lengths": 0, "key_lengths": np.int64(6)}, {"query_lengths": 0}),
        ({"mask": np.True_}, {}),
        ({"bias": np.float64(2)}, {"bias": np.full((5, 6), 2.0)}),
        ({"sinks": np.float16(1)}, {"sinks": np.ones(4)}),
        ({"num_splits": np.int64(3)}, {}),
        ({"num_splits": 10**6}, {}),
    ],
    ids=str,
)
def test_unusual_values_that_mean_something(given: dict[str, Any], meant: dict[str, Any]) -> None:
    out, lse = flash_attention(**operands(), **given, return_lse=True)
    expected, expected_lse = cuflash.reference.attention(**operands(), **meant)
    np.testing.assert_allclose(out, expected, rtol=0, atol=2e-6)
    np.testing.assert_allclose(lse, expected_lse, rtol=2e-6, atol=2e-6)


def test_outputs_are_filled_and_returned() -> None:
    x = operands()
    expected, expected_lse = flash_attention(**x, return_lse=True)
    out, lse = np.full_like(expected, np.nan), np.full_like(expected_lse, np.nan)
    both = flash_attention(**x, out=out, lse=lse)
    assert both[0] is out
    assert both[1] is lse
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(lse, expected_lse)
    out[...] = np.nan
    assert flash_attention(**x, out=out) is out
    np.testing.assert_array_equal(out, expected)
    lse[...] = np.nan
    fresh, same = flash_attention(**x, lse=lse)
    assert same is lse
    np.testing.assert_array_equal(lse, expected_lse)
    np.testing.assert_array_equal(fresh, expected)


def test_outputs_may_be_memory_mapped(tmp_path: Any) -> None:
    x = operands()
    out = np.memmap(tmp_path / "out", np.float32, "w+", shape=(2, 4, 5, 3))
    assert flash_attention(**x, out=out) is out
    np.testing.assert_array_equal(out, flash_attention(**x))


@pytest.mark.parametrize("dtype", [np.dtype(np.float16), BFLOAT16], ids=str)
def test_float32_output_holds_the_unrounded_results(dtype: np.dtype) -> None:
    x = {name: a.astype(dtype) for name, a in operands().items()}
    rounded = flash_attention(**x)
    assert rounded.dtype == dtype
    unrounded = flash_attention(**x, out=np.empty(rounded.shape, np.float32))
    assert unrounded.dtype == np.float32
    np.testing.assert_array_equal(unrounded.astype(dtype), rounded)
    assert (unrounded != rounded.astype(np.float32)).mean() > 0.5


def _unaligned(shape: tuple[int, ...]) -> np.ndarray:
    memory = np.empty(4 * int(np.prod(shape)) + 1, np.uint8)
    return memory[1:].view(np.float32).reshape(shape)


@pytest.mark.parametrize(
    "empty",
    [
        lambda shape: np.empty(shape, np.float32, order="F"),
        lambda shape: np.empty(shape[::-1], np.float32).T,
        lambda shape: np.empty([3 * n for n in shape], np.float32)[
            tuple([slice(1, None, 3)] * len(shape))
        ],
        lambda shape: np.empty(shape, np.float32)[tuple([slice(None, None, -1)] * len(shape))],
        _unaligned,
    ],
    ids=["fortran", "transposed", "stepped", "reversed", "unaligned"],
)
@pytest.mark.parametrize("grouped", [False, True], ids=["", "grouped"])
@pytest.mark.parametrize("num_splits", [None, 3])
def test_outputs_of_any_strides(
    empty: Callable[[tuple[int, ...]], np.ndarray], grouped: bool, num_splits: int | None
) -> None:
    rng = np.random.default_rng(1)
    q = rng.standard_normal((2, 4, 5, 8), np.float32)
    k, v = rng.standard_normal((2, 2, 2 if grouped else 4, 2000, 8), np.float32)
    options: Any = {"enable_gqa": grouped, "num_splits": num_splits}
    expected, expected_lse = flash_attention(q, k, v, **options, return_lse=True)
    out, lse = empty((2, 4, 5, 8)), empty((2, 4, 5))
    out[...] = lse[...] = np.nan
    result = flash_attention(q, k, v, **options, out=out, lse=lse)
    assert result[0] is out
    assert result[1] is lse
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(lse, expected_lse)


@pytest.mark.parametrize("key_heads", [4, 2, 1])
@pytest.mark.parametrize("tokens", [1, 5])
def test_the_result_has_the_axis_order_of_q(key_heads: int, tokens: int) -> None:
    rng = np.random.default_rng(2)
    q = rng.standard_normal((2, tokens, 4, 8), np.float32)
    k, v = rng.standard_normal((2, 2, 6, key_heads, 8), np.float32)
    out = flash_attention(*(x.swapaxes(1, 2) for x in (q, k, v)), enable_gqa=key_heads < 4)
    assert out.shape == (2, 4, tokens, 8)
    assert out.swapaxes(1, 2).flags.c_contiguous
    assert flash_attention(*(np.ascontiguousarray(x) for x in (out, out, out))).flags.c_contiguous


@pytest.mark.parametrize("axes", [(0, 1, 2, 3), (3, 2, 1, 0), (1, 0, 3, 2), (2, 0, 3, 1)])
def test_the_result_has_any_axis_order_of_q(axes: tuple[int, ...]) -> None:
    shape = (2, 4, 5, 8)
    q = np.ones([shape[axis] for axis in axes], np.float32).transpose(np.argsort(axes))
    assert q.shape == shape
    assert flash_attention(q, q, q).transpose(axes).flags.c_contiguous


@pytest.mark.parametrize("key_heads", [0, 2])
def test_no_grouped_heads(key_heads: int) -> None:
    q, k = np.ones((3, 0, 5, 8)), np.ones((3, key_heads, 6, 8))
    options: Any = {"sinks": np.ones(0), "mask": np.ones((1, 5, 6), bool), "enable_gqa": True}
    out, lse = np.empty((3, 0, 5, 8)), np.empty((3, 0, 5))
    given = flash_attention(q, k, k, out=out, lse=lse, **options)
    assert given[0] is out
    assert given[1] is lse
    for function in (flash_attention, cuflash.baselines.materialized_attention):
        results = function(q, k, k, return_lse=True, **options)
        assert [x.shape for x in results] == [(3, 0, 5, 8), (3, 0, 5)]


def test_grouped_heads_are_broadcasting_and_options_use_the_heads_of_q() -> None:
    rng = np.random.default_rng(3)
    q = rng.standard_normal((2, 6, 5, 8), np.float32)
    k = rng.standard_normal((2, 3, 7, 8), np.float32)
    v = rng.standard_normal((2, 3, 7, 4), np.float32)
    options: dict[str, Any] = {
        "mask": rng.random((6, 5, 7)) < 0.7,
        "bias": rng.standard_normal((2, 6, 1, 7)),
        "alibi_slopes": rng.random(6, np.float32),
        "sinks": rng.standard_normal((2, 6), np.float32),
        "query_offset": rng.integers(0, 4, (1, 6)),
        "query_lengths": rng.integers(3, 6, (2, 1)),
        "key_lengths": rng.integers(2, 8, (2, 6)),
        "causal": True,
    }
    out, lse = flash_attention(q, k, v, enable_gqa=True, return_lse=True, **options)
    assert out.shape == (2, 6, 5, 4)
    assert lse.shape == (2, 6, 5)
    expected = cuflash.reference.attention(q, k.repeat(2, axis=1), v.repeat(2, axis=1), **options)
    np.testing.assert_allclose(out, expected[0], rtol=0, atol=1e-6)
    np.testing.assert_allclose(lse, expected[1], rtol=1e-6, atol=1e-6)

    split = flash_attention(q.reshape(2, 3, 2, 5, 8), k[:, :, None], v[:, :, None])
    np.testing.assert_array_equal(
        flash_attention(q, k, v, enable_gqa=True), split.reshape(out.shape)
    )


@pytest.mark.parametrize(
    ("argument", "wrong", "told"),
    [
        ("q", ones(2, 5, 5, 8), "q has 5 heads, no multiple of the 2 of k"),
        ("k", ones(2, 2, 6, 7), "k has 7 features (shape (2, 2, 6, 7)) but q has 8 (shape (2, 4, "),
        ("v", ones(2, 2, 5, 3), "v has 5 tokens (shape (2, 2, 5, 3)) but k has 6 (shape (2, 2, 6"),
        ("k", ones(3, 2, 6, 8), "k has batch axes (3, 2) (shape (3, 2, 6, 8)), which do not bro"),
        ("k", ones(3, 2, 6, 8), "with those of q (2, 4, 5, 8)"),
        ("mask", ones(2, 5, 6, dtype=bool), "(2, 5, 6), which does not broadcast to (2, 4, 5, 6)"),
        ("bias", ones(5, 7), "(5, 7), which does not broadcast to (2, 4, 5, 6)"),
        ("alibi_slopes", ones(2), "(2,), which does not broadcast to (2, 4)"),
        ("sinks", ones(2, 2), "(2, 2), which does not broadcast to (2, 4)"),
        ("query_offset", ones(4, dtype=int), "shape (4,); it needs 2 axes, those of (2, 4), size"),
        ("key_lengths", ones(2, 2, dtype=int), "(2, 2), which does not broadcast to (2, 4)"),
        ("out", ones(2, 2, 5, 3), "out has shape (2, 2, 5, 3), the result has (2, 4, 5, 3)"),
        ("out", ones(3), "out has shape (3,), the result has (2, 4, 5, 3)"),
        (
            "out",
            as_strided(ones(4, 5, 3), (2, 4, 5, 3), (0, 60, 12, 4)),
            "(strides (0, 60, 12, 4))",
        ),
        ("lse", ones(2, 2, 2, 5), "lse has shape (2, 2, 2, 5), the result has (2, 4, 5)"),
    ],
)
def test_messages_about_grouped_heads_tell_the_shapes_that_were_given(
    argument: str, wrong: np.ndarray, told: str
) -> None:
    x: dict[str, Any] = operands() | {"k": ones(2, 2, 6, 8), "v": ones(2, 2, 6, 3)}
    with pytest.raises(ValueError, match=rf"^(?={argument}\b).*{re.escape(told)}"):
        flash_attention(**x | {argument: wrong}, enable_gqa=True)


@pytest.mark.parametrize("axes", [31, 32])
def test_grouped_heads_take_one_axis_of_those_possible(axes: int) -> None:
    shape = (*[1] * (axes - 3), 2, 3, 4)
    x = ones(*shape)
    if axes < 32:
        assert flash_attention(x, x, x, enable_gqa=True).shape == shape
    else:
        with pytest.raises(ValueError, match=r"^q has 32 axes; 31 are possible"):
            flash_attention(x, x, x, enable_gqa=True)


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, BFLOAT16], ids=str)
def test_splits_change_rounding_only(dtype: Any) -> None:
    rng = np.random.default_rng(4)
    q, k, v = (rng.standard_normal((2, n, 16)).astype(dtype) for n in (20, 3000, 3000))
    whole, whole_lse = flash_attention(q, k, v, return_lse=True, num_splits=1)
    for num_splits in (2, 3, 5, 1000):
        out, lse = flash_attention(q, k, v, return_lse=True, num_splits=num_splits)
        assert (out.dtype, lse.dtype) == (whole.dtype, whole_lse.dtype)
        wide = np.float64
        accumulated = np.finfo(lse.dtype).eps
        rounding = max(float(ml_dtypes.finfo(dtype).eps), 8 * accumulated)
        np.testing.assert_allclose(
            out.astype(wide), whole.astype(wide), rtol=rounding, atol=rounding
        )
        np.testing.assert_allclose(lse, whole_lse, rtol=4 * accumulated)


def test_tiled_is_what_auto_runs_on_the_host() -> None:
    x = operands()
    np.testing.assert_array_equal(flash_attention(**x, method="tiled"), flash_attention(**x))


def test_inputs_may_be_read_only_and_stay_as_they_are() -> None:
    x = operands()
    before = {name: a.copy() for name, a in x.items()}
    for a in x.values():
        a.flags.writeable = False
    lengths = np.array([[3], [6]])
    lengths.flags.writeable = False
    flash_attention(**x, causal=True, softcap=1.0, key_lengths=lengths, bias=np.zeros((5, 6)))
    for name, a in x.items():
        np.testing.assert_array_equal(a, before[name])
    np.testing.assert_array_equal(lengths, [[3], [6]])


def test_same_array_for_all_operands() -> None:
    x = operands()["k"]
    np.testing.assert_array_equal(flash_attention(x, x, x), flash_attention(x, x.copy(), x.copy()))


class TestWorkspaceSize:
    def test_the_numpy_engine_needs_none(self) -> None:
        assert workspace_size(**operands()) == 0
        assert type(workspace_size(**operands(), backward=True, varlen=True)) is int

    @pytest.mark.parametrize("grouped", [False, True])
    def test_descriptions_stand_for_arrays(
        self, grouped: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The engine is asked about one and the same problem."""
        asked = []
        monkeypatch.setattr("cuflash.interop._best_engine", lambda: "host")
        monkeypatch.setattr(
            "cuflash.host.attention_workspace", lambda problem: asked.append(problem) or 5
        )
        x = operands()
        if grouped:
            x |= {"k": x["k"][:, :2], "v": x["v"][:, ::2]}
        options = {
            "mask": ones(4, 5, 6, dtype=bool),
            "bias": ones(1, 1, 6).swapaxes(0, 2).T,
            "sinks": ones(4),
            "alibi_slopes": ones(2, 4),
            "key_lengths": ones(2, 1, dtype=int),
        }

        def describe(a: np.ndarray) -> SimpleNamespace:
            return SimpleNamespace(shape=a.shape, strides=a.strides, dtype=a.dtype)

        def without_strides(a: np.ndarray) -> SimpleNamespace:
            return SimpleNamespace(shape=a.shape, dtype=a.dtype.name)

        more: Any = {"causal": True, "window": (3, 3), "enable_gqa": grouped, "query_offset": 2}
        assert workspace_size(**x, **options, **more) == 5
        described = {name: describe(a) for name, a in (x | options).items()}
        assert workspace_size(**described, **more) == 5
        contiguous = {name: np.ascontiguousarray(a) for name, a in (x | options).items()}
        assert workspace_size(**contiguous, **more) == 5
        bare = {name: without_strides(a) for name, a in (x | options).items()}
        assert workspace_size(**bare, **more) == 5
        flash_attention(**x, **options, **more, workspace=np.empty(5, np.uint8))
        assert asked[0] == asked[1] == asked[4]
        assert asked[2] == asked[3]
        assert (asked[0] == asked[2]) is not grouped

    @pytest.mark.parametrize("name", ["backward", "varlen"])
    @pytest.mark.parametrize("value", NOT_A_FLAG)
    def test_flags(self, name: str, value: Any) -> None:
        options: Any = {name: value}
        with pytest.raises(TypeError, match=f"^{name} "):
            workspace_size(**operands(), **options)
