"""Gradients on the host engine against every property of the kit."""

import importlib
from unittest import mock

import pytest
from hypothesis import example, given

import cuflash
from cuflash.testing.gradients import GRADIENT_PROPERTIES
from cuflash.testing.problems import AttentionCase
from cuflash.testing.strategies import attention_problems, varlen_problems
from cuflash.testing.varlen_gradients import VARLEN_GRADIENT_PROPERTIES
from tests.host.test_attention_properties import _BORDERS, _SMALL_TILES, few_examples

#: A bias that entries share, which also share their keys: two sums over entries.
SHARED_BIAS = AttentionCase(
    q_batch=(2, 3), k_batch=(1,), v_batch=(1,), tq=15, tk=15, dtype="float64", bias=(3, 15, 15),
    bias_dtype="float64", enable_gqa=True,
)  # fmt: skip

_ENGINE = importlib.import_module("cuflash.host.attention_vjp")


def in_small_tiles(*operands, **options):
    with mock.patch.object(_ENGINE, "_TILES", _SMALL_TILES):
        return cuflash.flash_attention_vjp(*operands, **options)


def varlen_in_small_tiles(*operands, **options):
    with mock.patch.object(_ENGINE, "_TILES", _SMALL_TILES):
        return cuflash.flash_attention_varlen_vjp(*operands, **options)


@pytest.mark.parametrize("law", GRADIENT_PROPERTIES)
@given(case=attention_problems(borders=_BORDERS, max_tokens=70, max_products=400_000))
@example(case=SHARED_BIAS)
def test_small_tiles(law, case):
    GRADIENT_PROPERTIES[law](in_small_tiles, case)


@pytest.mark.parametrize("law", GRADIENT_PROPERTIES)
@few_examples(5)
@given(
    case=attention_problems(
        borders=(256, 512),
        max_tokens=514,
        max_features=17,
        max_batch_axes=1,
        max_products=2_000_000,
    )
)
def test_tiles_as_shipped(law, case):
    GRADIENT_PROPERTIES[law](cuflash.flash_attention_vjp, case)


@pytest.mark.parametrize("law", VARLEN_GRADIENT_PROPERTIES)
@few_examples(2)
@given(case=varlen_problems(borders=_BORDERS, max_tokens=70))
def test_sequences_end_to_end(law, case):
    VARLEN_GRADIENT_PROPERTIES[law](varlen_in_small_tiles, case)
