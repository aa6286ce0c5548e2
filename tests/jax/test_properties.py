"""Attention, its gradients and the softmax family inside JAX against the laws of the kit."""

import pytest
from hypothesis import given, settings

from cuflash.testing.adapters import ADAPTERS, cuflash_jax_vjp
from cuflash.testing.gradients import GRADIENT_PROPERTIES
from cuflash.testing.softmax_properties import SOFTMAX_NAMES
from cuflash.testing.strategies import attention_problems

ADAPTER = ADAPTERS["cuflash-jax"]
#: Functions of JAX fill no arrays of their caller and compute all gradients of what is given.
GRADIENT_LAWS = sorted(
    GRADIENT_PROPERTIES.keys() - {"poisoned_outputs_fully_written", "only_what_is_asked_for"}
)
SMALL = {"layouts": ("contiguous",), "borders": (16,), "max_tokens": 20, "max_features": 9}


# Each new shape is a program that JAX compiles, which takes longer than it runs.
def few_examples(law):
    return settings(max_examples=max(1, settings().max_examples // 10))(law)


@pytest.mark.parametrize("law", ADAPTER["attention"].properties())
def test_attention(law):
    adapter = ADAPTER["attention"]

    @few_examples
    @given(case=attention_problems(**SMALL))
    def holds(case):
        adapter.properties()[law](case)

    holds()


@pytest.mark.parametrize("law", GRADIENT_LAWS)
@few_examples
@given(case=attention_problems(**SMALL))
def test_gradients(law, case):
    GRADIENT_PROPERTIES[law](cuflash_jax_vjp, case)


@pytest.mark.parametrize(
    ("name", "law"), [(name, law) for name in SOFTMAX_NAMES for law in ADAPTER[name].properties()]
)
def test_softmax(name, law):
    @few_examples
    @given(case=ADAPTER[name].problems())
    def holds(case):
        ADAPTER[name].properties()[law](case)

    holds()
