"""Fused chains on the NumPy engine: properties of drawn cases."""

import pytest
from hypothesis import given

from cuflash import fused
from cuflash.testing.fused import (
    LAYER_NORM_PROPERTIES,
    MATMUL_PROPERTIES,
    layer_norm_cases,
    matmul_cases,
)


@pytest.mark.parametrize("law", MATMUL_PROPERTIES)
def test_matmul(law):
    @given(case=matmul_cases())
    def holds(case):
        MATMUL_PROPERTIES[law](fused.matmul_bias_activation, case)

    holds()


@pytest.mark.parametrize("law", LAYER_NORM_PROPERTIES)
def test_layer_norm(law):
    @given(case=layer_norm_cases())
    def holds(case):
        LAYER_NORM_PROPERTIES[law](
            fused.dropout_bias_layer_norm, fused.dropout_bias_layer_norm_vjp, case
        )

    holds()
