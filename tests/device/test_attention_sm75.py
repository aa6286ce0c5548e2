"""The products of sm_75 on the GPU at hand, which has them whatever it is."""

from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings

import cuflash
from cuflash.device.attention_plans_mma import sm75_kernels
from cuflash.device.compiler import warm
from cuflash.testing.bounds import assert_attention_close, expect_attention
from cuflash.testing.properties import ATTENTION_PROPERTIES
from cuflash.testing.strategies import attention_problems
from tests.device.test_attention import on_device
from tests.device.test_fused import as_if

pytestmark = pytest.mark.gpu

TURING = {"compute_capability": "75", "shared_per_sm": 1 << 16, "shared_per_block": 1 << 16}
#: To the widest tile; few options, for the sake of the kernels that they need.
PROBLEMS = attention_problems(
    dtypes=("float16",),
    options=("causal", "window", "key_lengths", "mask"),
    borders=(32, 64, 128),
    max_tokens=200,
    max_features=128,
)


@pytest.fixture(scope="module", autouse=True)
def kernels():
    """Compile what is needed, several at a time."""
    scores = ("PlainScore", "RangedScore", "MaskScore")
    warm([k for k in sm75_kernels() if any(f"::{score}<" in k.expression for score in scores)])


@pytest.mark.parametrize(
    "law", ["matches_oracle", "unseen_nonfinite_never_leaks", "row_independence"]
)
def test_property(law):
    @settings(max_examples=12)
    @given(case=PROBLEMS)
    def holds(case):
        with as_if(**TURING):
            ATTENTION_PROPERTIES[law](on_device(cuflash.flash_attention), case)

    holds()


@pytest.mark.parametrize("widths", [(32, 32), (61, 64), (96, 128)])
def test_each_tile(widths, rng):
    """Rows of features that end within 16 bytes, of an array that has no more."""
    shapes = ((150, widths[0]), (333, widths[0]), (333, widths[1]))
    q, k, v = (rng.normal(size=(2, 3, *shape)).astype(np.float16) for shape in shapes)
    with as_if(**TURING) as launched:
        call = on_device(partial(cuflash.flash_attention, return_lse=True, causal=True))
        out, lse = call(q, k, v)
    assert launched[0] in {kernel.expression for kernel in sm75_kernels()}
    assert_attention_close(out, lse, expect_attention(q, k, v, causal=True))
