"""Attention on the host engine against every property of the kit."""

import importlib
from functools import partial
from unittest import mock

import pytest
from hypothesis import example, given, settings

import cuflash
from cuflash.testing.problems import AttentionCase
from cuflash.testing.properties import ATTENTION_PROPERTIES, split_of_keys
from cuflash.testing.strategies import attention_problems

# Tiles as they ship are larger than most problems that are quick to check: with small ones, small
# problems have many tiles, and borders between them everywhere.
_ENGINE = importlib.import_module("cuflash.host.attention")
_SMALL_TILES = _ENGINE.TileSizes(
    query_rows=16,
    scores=16 * 32,
    min_keys=32,
    max_keys=64,
    worth_threads=2**12,
    keys_outermost=20,
    keys_outermost_added=10,
    small_product=2**10,
    small_matrix=2**6,
)
_BORDERS = (16, 32, 64)

every_property = pytest.mark.parametrize("law", ATTENTION_PROPERTIES)


def few_examples(share):
    """Settings with a share of the profile's examples: for variants of what is tested in full."""
    return settings(max_examples=max(1, settings().max_examples // share))


def in_small_tiles(*operands, **options):
    with mock.patch.object(_ENGINE, "_TILES", _SMALL_TILES):
        return cuflash.flash_attention(*operands, **options)


@every_property
@given(case=attention_problems(borders=_BORDERS))
@example(case=AttentionCase(tq=3, tk=70, mask=(3, 70)))  # a mask over a partial tile
@example(case=AttentionCase(tk=15, d=5, dv=5, k_layout="packed"))
@example(case=AttentionCase(tk=2, d=3, dv=3, dtype="float64", k_layout="unaligned", seed=65536))
def test_small_tiles(law, case):
    ATTENTION_PROPERTIES[law](in_small_tiles, case)


@every_property
@few_examples(3)
@given(case=attention_problems(borders=_BORDERS))
def test_key_splits(law, case):
    ATTENTION_PROPERTIES[law](partial(in_small_tiles, num_splits=3), case)


@every_property
@few_examples(5)
@given(
    case=attention_problems(
        borders=(256, 512),
        max_tokens=514,
        max_features=17,
        max_batch_axes=1,
        max_products=5_000_000,
    )
)
def test_tiles_as_shipped(law, case):
    ATTENTION_PROPERTIES[law](partial(cuflash.flash_attention, method="tiled"), case)


@given(case=attention_problems(borders=_BORDERS))
def test_parts_merge_to_the_whole(case):
    split_of_keys(in_small_tiles, case, merge=cuflash.merge_attention)
