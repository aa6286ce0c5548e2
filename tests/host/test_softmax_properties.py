"""The softmax family and the merges on the host engine against every property of the kit."""

from functools import partial

import pytest
from hypothesis import given

import cuflash
from cuflash.testing import softmax_properties
from cuflash.testing.problems import DTYPES
from cuflash.testing.softmax_properties import SOFTMAX_NAMES, SOFTMAX_PROPERTIES
from cuflash.testing.strategies import merge_problems, softmax_problems

METHODS = ("naive", "fused", "online")
CALLABLES = {("logsumexp", "auto"): cuflash.logsumexp} | {
    (name, method): partial(getattr(cuflash, name), method=method)
    for name in ("softmax", "log_softmax")
    for method in METHODS
}


@pytest.mark.parametrize(("name", "method"), CALLABLES)
@pytest.mark.parametrize("law", SOFTMAX_PROPERTIES)
@given(case=softmax_problems(dtypes=(*DTYPES, "int32", "bool")))
def test_property(law, name, method, case):
    SOFTMAX_PROPERTIES[law](CALLABLES[name, method], case, name)


@pytest.mark.parametrize("name", SOFTMAX_NAMES)
@given(case=softmax_problems())
def test_vjp_matches_oracle(name, case):
    forward, vjp = (getattr(cuflash, n) for n in (name, f"{name}_vjp"))
    softmax_properties.vjp_matches_oracle(forward, vjp, case, name)


@given(case=softmax_problems())
def test_states_of_parts_merge(case):
    softmax_properties.state_of_parts_merges(cuflash.softmax_state, cuflash.merge_softmax, case)


@given(case=merge_problems())
def test_merge_attention_is_a_monoid(case):
    softmax_properties.merge_attention_is_a_monoid(cuflash.merge_attention, case)


@given(case=merge_problems())
def test_merge_softmax_is_a_monoid(case):
    def merge(a, b):
        return cuflash.merge_softmax(cuflash.SoftmaxState(*a), cuflash.SoftmaxState(*b))

    softmax_properties.merge_softmax_is_a_monoid(merge, case)
