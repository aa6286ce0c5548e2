"""The baselines' kernels on the CPU: half of attention, and single steps."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cuflash import baselines, engine
from cuflash.problem import AttentionArrays, AttentionProblem
from cuflash.testing.problems import AttentionCase
from cuflash.testing.properties import ATTENTION_PROPERTIES
from cuflash.testing.strategies import attention_problems
from tests.host_cuda import builder
from tests.host_cuda.engine import H200, HostCuda

pytestmark = pytest.mark.skipif(not builder.available(), reason="no C++ compiler")

#: Of the tensor cores those of sm_80, and none.
AMPERE = replace(H200, compute_capability="80", multiprocessors=2)
TURING = replace(AMPERE, compute_capability="75")


@pytest.mark.parametrize("limits", [TURING, AMPERE], ids=["simt", "mma"])
@pytest.mark.parametrize("law", ["matches_oracle", "unseen_nonfinite_never_leaks"])
def test_scores_fused_attention(law: str, limits: Any) -> None:
    dtypes = ("float16", "bfloat16") if limits is AMPERE else ("float64", "float32", "bfloat16")

    @settings(max_examples=15)
    @given(
        case=attention_problems(dtypes=dtypes, max_tokens=90, max_features=40),
        order=st.sampled_from(builder.HostKernel.ORDERS),
    )
    def holds(case: Any, order: str) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine, "load", lambda name: HostCuda(limits=limits, order=order))
            ATTENTION_PROPERTIES[law](baselines.scores_fused_attention, case)

    holds()


@pytest.mark.parametrize("order", builder.HostKernel.ORDERS)
def test_columns_that_are_no_chunks(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """More rows than a warp has, which leave one by one: no warp writes those of another."""
    case = AttentionCase(tq=65, tk=1, d=1, dv=1, dtype="bfloat16")
    monkeypatch.setattr(engine, "load", lambda name: HostCuda(limits=AMPERE, order=order))
    ATTENTION_PROPERTIES["matches_oracle"](baselines.scores_fused_attention, case)


def test_rows_that_do_not_see_nan_keep_their_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    case = AttentionCase(
        q_batch=(1,), k_batch=(1,), v_batch=(1,),
        tq=1, tk=15, d=2, dv=2, dtype="bfloat16", key_lengths=(1,),
    )  # fmt: skip
    monkeypatch.setattr(engine, "load", lambda name: HostCuda(limits=AMPERE))
    ATTENTION_PROPERTIES["unseen_nonfinite_never_leaks"](baselines.scores_fused_attention, case)


@pytest.mark.parametrize("d", [64, 128, 256])
def test_each_width_of_heads(d: int, monkeypatch: pytest.MonkeyPatch, rng: Any) -> None:
    emulated = HostCuda(limits=AMPERE)
    monkeypatch.setattr(engine, "load", lambda name: emulated)
    q, k, v = rng.standard_normal((3, 2, 70, d)).astype(np.float16)
    options = {"causal": True, "sinks": np.array([0.5, -1]), "return_lse": True}
    out, lse = baselines.scores_fused_attention(q, k, v, **options)
    monkeypatch.undo()
    expected = baselines.materialized_attention(q, k, v, **options)
    np.testing.assert_allclose(out, expected[0], atol=4e-3)
    np.testing.assert_allclose(lse, expected[1], atol=1e-5)
    assert f" {d}, 16, false" in emulated.executor.launched[0].kernel.expression


@pytest.mark.parametrize("dtype", [np.float64, np.float16])
@pytest.mark.parametrize("columns", [5, 16, 2056])
def test_steps(dtype: Any, columns: int, monkeypatch: pytest.MonkeyPatch, rng: Any) -> None:
    emulated = HostCuda(limits=AMPERE)
    x = rng.standard_normal((3, 4, columns)).astype(dtype)
    x[1, 2] = -np.inf
    vectors = rng.standard_normal((3, columns)).astype(dtype)
    b = rng.standard_normal((columns, 9)).astype(dtype)
    calls = [
        lambda: baselines.unfused_softmax(x),
        lambda: baselines.unfused_softmax(x, 0),
        lambda: baselines.unfused_matmul_bias_activation(x[0], b, b[0], activation="gelu"),
        lambda: baselines.unfused_dropout_bias_layer_norm(x[0], *vectors, p=0.3, seed=4),
    ]
    expected = [call() for call in calls]
    monkeypatch.setattr(engine, "load", lambda name: emulated)
    tolerance = {"atol": 1e-13} if dtype == np.float64 else {"rtol": 8e-3, "atol": 8e-3}
    for call, value in zip(calls, expected, strict=True):
        np.testing.assert_allclose(call(), value, **tolerance)
    assert len({launch.kernel for launch in emulated.executor.launched}) >= 9


def test_nan_is_the_maximum_of_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "load", lambda name: HostCuda(limits=AMPERE))
    x = np.zeros((2, 9))
    x[0, 3] = np.nan
    np.testing.assert_array_equal(np.isnan(baselines.unfused_softmax(x)), [[True] * 9, [False] * 9])


def test_nothing_to_attend_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "load", lambda name: HostCuda(limits=AMPERE))
    q, k = np.zeros((2, 3, 8), np.float16), np.zeros((2, 0, 8), np.float16)
    out, lse = baselines.scores_fused_attention(q, k, k, return_lse=True)
    np.testing.assert_array_equal(out, 0)
    np.testing.assert_array_equal(lse, -np.inf)
    assert AttentionProblem.of(AttentionArrays(q, k, k)).lse_shape == (2, 3)
