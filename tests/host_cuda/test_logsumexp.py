"""The logsumexp of scores alone by the device engine's plans and kernels, on the CPU."""

from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
from cuflash.testing.gradients import GRADIENT_PROPERTIES
from cuflash.testing.logsumexp import (
    as_attention,
    as_attention_vjp,
    without_values,
)
from cuflash.testing.properties import ATTENTION_PROPERTIES
from tests.host_cuda import builder
from tests.host_cuda.test_attention import PROBLEMS, on_host_cuda

pytestmark = pytest.mark.skipif(not builder.available(), reason="no C++ compiler")

#: What says the most of a result without values, for the time that kernels take on a CPU.
LAWS = ("matches_oracle", "split_of_keys", "unseen_nonfinite_never_leaks", "views_equal_copies")
GRADIENT_LAWS = (
    "matches_oracle",
    "broadcast_equals_repeated_then_summed",
    "unseen_nonfinite_never_leaks",
    "poisoned_outputs_fully_written",
)


@pytest.mark.parametrize("law", LAWS)
def test_property(law):
    @settings(max_examples=max(1, settings().max_examples // 2))
    @given(case=PROBLEMS.map(without_values), splits=st.sampled_from((None, None, 2)))
    def holds(case, splits):
        call = partial(cuflash.flash_logsumexp, num_splits=splits)
        ATTENTION_PROPERTIES[law](as_attention(on_host_cuda(call)), case)

    holds()


@pytest.mark.parametrize("law", GRADIENT_LAWS)
def test_property_of_gradients(law):
    @settings(max_examples=max(1, settings().max_examples // 3))
    @given(case=PROBLEMS.map(without_values))
    def holds(case):
        vjp = as_attention_vjp(on_host_cuda(cuflash.flash_logsumexp_vjp))
        GRADIENT_PROPERTIES[law](vjp, case)

    holds()
