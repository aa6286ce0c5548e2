"""Sequences end to end on the host engine: the laws of the kit, and equality with single calls."""

from functools import partial
from unittest import mock

import pytest
from hypothesis import given

import cuflash
from cuflash.testing.properties import assert_bitwise_equal
from cuflash.testing.strategies import varlen_problems
from cuflash.testing.varlen import VARLEN_PROPERTIES
from tests.host.test_attention_properties import _BORDERS, _ENGINE, _SMALL_TILES, few_examples

every_property = pytest.mark.parametrize("law", VARLEN_PROPERTIES)


def in_small_tiles(*operands, **options):
    with mock.patch.object(_ENGINE, "_TILES", _SMALL_TILES):
        return cuflash.flash_attention_varlen(*operands, **options)


@every_property
@given(case=varlen_problems(borders=_BORDERS))
def test_small_tiles(law, case):
    VARLEN_PROPERTIES[law](in_small_tiles, case)


@every_property
@few_examples(3)
@given(case=varlen_problems(borders=_BORDERS))
def test_key_splits(law, case):
    VARLEN_PROPERTIES[law](partial(in_small_tiles, num_splits=3), case)


@given(case=varlen_problems(borders=_BORDERS))
def test_a_sequence_has_the_bits_of_a_call_of_its_own(case):
    out, lse = in_small_tiles(*(inputs := case.build())[:5], **inputs.options, return_lse=True)
    for rows, _, (q, k, v, options) in case.sequences():
        with mock.patch.object(_ENGINE, "_TILES", _SMALL_TILES):
            alone = cuflash.flash_attention(q, k, v, **options, return_lse=True)
        assert_bitwise_equal(out[..., rows, :], alone[0], "out", case)
        assert_bitwise_equal(lse[..., rows], alone[1], "lse", case)
