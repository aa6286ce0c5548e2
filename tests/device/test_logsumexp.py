"""The logsumexp of scores alone on a GPU: the laws of attention, without values."""

from functools import partial

import cupy
import numpy as np
import pytest
from hypothesis import given, settings

import cuflash
from cuflash.problem import BFLOAT16
from cuflash.testing.gradients import GRADIENT_PROPERTIES
from cuflash.testing.logsumexp import (
    as_attention,
    as_attention_vjp,
    equals_lse_of_attention,
    without_values,
)
from cuflash.testing.properties import ATTENTION_PROPERTIES
from tests.device.arrays import on_device
from tests.device.test_attention import PROBLEMS, _Peak, attend, normal, rounded
from tests.device.test_attention_vjp import PROBLEMS as GRADIENT_PROBLEMS
from tests.device.test_attention_vjp import pulled_back

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels")]

few_examples = settings(max_examples=max(1, settings().max_examples // 10))


@pytest.mark.parametrize("splits", [None, 3])
@few_examples
@given(case=PROBLEMS.map(without_values))
def test_matches_oracle(splits, case):
    logsumexp = on_device(partial(cuflash.flash_logsumexp, num_splits=splits))
    ATTENTION_PROPERTIES["matches_oracle"](as_attention(logsumexp), case)


@pytest.mark.parametrize(
    "law", ["unseen_nonfinite_never_leaks", "views_equal_copies", "poisoned_outputs_fully_written"]
)
@few_examples
@given(case=PROBLEMS.map(without_values))
def test_property(law, case):
    logsumexp = on_device(partial(cuflash.flash_logsumexp, method="simt"))
    ATTENTION_PROPERTIES[law](as_attention(logsumexp), case)


@few_examples
@given(case=PROBLEMS)
def test_equals_the_lse_of_attention_to_any_values(case):
    equals_lse_of_attention(on_device(cuflash.flash_logsumexp), attend(), case)


@pytest.mark.parametrize(
    "law", ["matches_oracle", "unseen_nonfinite_never_leaks", "poisoned_outputs_fully_written"]
)
@few_examples
@given(case=GRADIENT_PROBLEMS.map(without_values))
def test_property_of_gradients(law, case):
    vjp = as_attention_vjp(pulled_back(cuflash.flash_logsumexp_vjp))
    GRADIENT_PROPERTIES[law](vjp, case)


@pytest.mark.parametrize("tq", [1, 4096])
@pytest.mark.parametrize("dtype", [np.float64, np.float32, BFLOAT16], ids=str)
def test_memory_is_the_result_and_the_stated_workspace(tq, dtype):
    q, k = (normal(t, 2, 4, t, 64, dtype=dtype) for t in (tq, 4096))
    workspace = cuflash.workspace_size(q, k, None)
    assert bool(workspace) == (tq == 1)
    with _Peak() as peak:
        lse = cuflash.flash_logsumexp(q, k)
    assert peak.peak == rounded(lse.nbytes) + rounded(workspace)
    scratch = cupy.empty(workspace, np.uint8)
    with _Peak() as peak:
        assert cuflash.flash_logsumexp(q, k, out=lse, workspace=scratch) is lse
    assert peak.peak == 0
