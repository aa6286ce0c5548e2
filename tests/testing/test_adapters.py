"""Adapters: what they say is supported, and that the libraries behind them compute the same."""

from importlib.util import find_spec

import numpy as np
import pytest

import cuflash
from cuflash import cli
from cuflash.testing import ATTENTION_PROPERTIES, AttentionCase, SoftmaxCase
from cuflash.testing.adapters import ADAPTERS, Adapter, adapt, find
from cuflash.testing.softmax_properties import SOFTMAX_NAMES, SOFTMAX_PROPERTIES
from tests.testing.faulty import attention as right_attention

#: What every library computes alike: rows that see finite keys, of a size that is not empty.
COMMON = [
    AttentionCase(q_batch=(2, 3), k_batch=(2, 3), v_batch=(2, 3), tq=5, tk=7, d=4, dv=4, **options)
    for options in (
        {},
        {"scale": 0.5},
        {"dtype": "bfloat16"},
        {"bias": (5, 7)},
        {"mask": (2, 1, 1, 7), "seed": 4},
        {"causal": True, "query_offset": 0},
    )
] + [
    AttentionCase(
        q_batch=(1, 4), k_batch=(1, 2), v_batch=(1, 2), tq=3, tk=3, d=2, dv=2, enable_gqa=True
    )
]
ONLY_JAX = [
    AttentionCase(q_batch=(2, 1), k_batch=(2, 1), v_batch=(2, 1), tq=4, tk=6, **options)
    for options in ({"window": (1, None), "query_offset": 0}, {"key_lengths": 3})
]


@pytest.mark.parametrize("case", [*COMMON, *ONLY_JAX], ids=repr)
@pytest.mark.parametrize("target", ["jax", "torch", "cuflash-host"])
def test_attention_of_other_libraries(target, case):
    adapter = ADAPTERS[target]["attention"]
    pytest.importorskip(adapter.library)
    if target == "torch" and case in ONLY_JAX:
        with pytest.raises(NotImplementedError):
            adapter(*case.build()[:3], **case.build().options)
    else:
        # Each library rounds in its own places: what is compared is the translation of the options.
        inputs = case.build()
        out = adapter(*inputs[:3], **inputs.options).astype(np.float64)
        expected = cuflash.flash_attention(*inputs[:3], **inputs.options).astype(np.float64)
        np.testing.assert_allclose(out, expected, atol=2e-2 if case.dtype == "bfloat16" else 1e-6)


@pytest.mark.parametrize("name", SOFTMAX_NAMES)
@pytest.mark.parametrize("target", ["scipy", "torch", "cuflash-host"])
def test_softmax_of_other_libraries(target, name):
    adapter = ADAPTERS[target][name]
    pytest.importorskip(adapter.library)
    for case in (SoftmaxCase(shape=(3, 40), values="wide"), SoftmaxCase(shape=(4, 2), axis=0)):
        SOFTMAX_PROPERTIES["matches_oracle"](adapter, case, name)


def test_cupyx_has_what_its_adapters_call():
    special = pytest.importorskip("cupyx.scipy.special")
    assert ADAPTERS["cupyx"].keys() == set(SOFTMAX_NAMES)
    assert all(callable(getattr(special, name)) for name in ADAPTERS["cupyx"])


def test_unsupported_options_are_refused():
    case = AttentionCase(q_batch=(1, 1), k_batch=(1, 1), v_batch=(1, 1), tq=2, tk=3)
    inputs = case.build()
    adapter = ADAPTERS["torch"]["attention"]
    with pytest.raises(NotImplementedError, match="softcap"):
        adapter(*inputs[:3], softcap=2.0)
    with pytest.raises(NotImplementedError, match="where"):
        ADAPTERS["scipy"]["softmax"](inputs.q, where=np.ones(1, bool))
    for target in ("jax", "torch"):
        if find_spec(target):
            with pytest.raises(NotImplementedError, match="first key"):
                ADAPTERS[target]["attention"](*inputs[:3], causal=True)


def test_options_are_those_of_the_signature():
    def attention(q, k, v, *, scale=None, mask=None):
        return right_attention(q, k, v, scale=scale, mask=mask)

    adapter = adapt(attention)
    assert adapter.function == "attention"
    assert adapter.accepts == {"scale", "mask"}
    asked = adapter.properties()
    assert {"matches_oracle", "row_independence"} <= asked.keys()
    assert not {"split_of_keys", "unrounded_output", "causal_future_independence"} & asked.keys()
    asked["matches_oracle"](AttentionCase(tq=3, tk=20, d=4, mask=(3, 20)))
    assert adapt(right_attention).properties().keys() == ATTENTION_PROPERTIES.keys()


@pytest.mark.parametrize(
    ("name", "function"),
    [("softmax", "softmax"), ("my_log_softmax", "log_softmax"), ("logsumexp2", "logsumexp")],
)
def test_functions_are_told_by_name_and_operands(name, function):
    adapter = adapt(lambda x: x, name)
    assert adapter.function == function
    case = adapter._without_options(SoftmaxCase(shape=(2, 3), axis=0, where=(3,)))
    assert case == SoftmaxCase(shape=(2, 3))
    assert ("rows_sum_to_one" in adapter.properties()) == (function != "logsumexp")


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("nothing", "there is no target nothing; give cuflash-host, cuflash-jax"),
        ("cuflash.nothing:f", "No module named"),
        ("cuflash:nothing", "has no attribute 'nothing'"),
        ("cuflash:__version__", "is not callable"),
        ("cuflash:merge_attention", "takes 4 operands"),
    ],
)
def test_targets_that_are_none(target, message):
    with pytest.raises(ValueError, match=message):
        find(target)


@pytest.mark.parametrize("code", ["1 / 0", "def f(:", "raise SystemExit(0)"])
def test_modules_that_cannot_be_imported(code, tmp_path, monkeypatch):
    (tmp_path / "cannot_be_imported.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"cannot import .*: (Zero|Syntax|SystemExit)"):
        find("cannot_be_imported:f")


def test_the_command_line_names_them():
    """By itself: to ask the adapters would cost every command their import."""
    assert f"{', '.join(ADAPTERS)} or package.module:callable" == cli._TARGET_HELP


def test_a_target_may_be_an_adapter():
    assert isinstance(RIGHT, Adapter)
    assert find(f"{__name__}:RIGHT") == {"attention": RIGHT}


RIGHT = adapt(right_attention)
