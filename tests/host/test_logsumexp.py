"""The logsumexp of scores on the host engine against the kit, and its memory."""

import importlib
import tracemalloc
from functools import partial
from unittest import mock

import numpy as np
import pytest
from hypothesis import given

import cuflash
from cuflash.testing.logsumexp import (
    LOGSUMEXP_GRADIENT_PROPERTIES,
    as_attention,
    as_attention_vjp,
    equals_lse_of_attention,
    without_values,
)
from cuflash.testing.properties import ATTENTION_PROPERTIES
from cuflash.testing.strategies import attention_problems
from tests.host.test_attention_properties import _BORDERS, _SMALL_TILES, few_examples

PROBLEMS = attention_problems(borders=_BORDERS, max_tokens=70, max_products=400_000)


def in_small_tiles(function):
    def call(*operands, **options):
        with (
            mock.patch.object(importlib.import_module("cuflash.host.attention"), *tiles),
            mock.patch.object(importlib.import_module("cuflash.host.attention_vjp"), *tiles),
        ):
            return function(*operands, **options)

    tiles = "_TILES", _SMALL_TILES
    return call


logsumexp = in_small_tiles(cuflash.flash_logsumexp)


@pytest.mark.parametrize("law", ATTENTION_PROPERTIES)
@few_examples(2)
@given(case=PROBLEMS.map(without_values))
def test_property(law, case):
    ATTENTION_PROPERTIES[law](as_attention(logsumexp), case)
    ATTENTION_PROPERTIES[law](as_attention(partial(logsumexp, num_splits=3)), case)


@pytest.mark.parametrize("law", LOGSUMEXP_GRADIENT_PROPERTIES)
@few_examples(2)
@given(case=PROBLEMS.map(without_values))
def test_property_of_gradients(law, case):
    vjp = as_attention_vjp(in_small_tiles(cuflash.flash_logsumexp_vjp))
    LOGSUMEXP_GRADIENT_PROPERTIES[law](vjp, case)


@given(case=PROBLEMS)
def test_equals_the_lse_of_attention_to_any_values(case):
    equals_lse_of_attention(logsumexp, in_small_tiles(cuflash.flash_attention), case)


def test_memory_is_linear():
    def peak(tokens):
        q = np.ones((tokens, 4))
        lse = cuflash.flash_logsumexp(q, q)  # fills caches
        tracemalloc.start()
        cuflash.flash_logsumexp(q, q, out=lse)
        cuflash.flash_logsumexp_vjp(lse, q, q, lse)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most

    small, large = peak(2000), peak(8000)
    assert large < small + 16 * 8 * 4 * 8000  # a matrix of 8000^2 would be 4000 times that
