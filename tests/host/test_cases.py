"""The inputs on which other systems went wrong, on the host engine."""

from functools import partial
from types import SimpleNamespace

import pytest

import cuflash
from cuflash.testing.cases import ALL_CASES


@pytest.mark.parametrize("case", ALL_CASES)
def test_case(case):
    ALL_CASES[case](cuflash)


@pytest.mark.parametrize("method", ["naive", "fused", "online"])
@pytest.mark.parametrize("case", ["case_02", "case_03"])
def test_softmax_method(case, method):
    library = SimpleNamespace(
        softmax=partial(cuflash.softmax, method=method),
        softmax_vjp=cuflash.softmax_vjp,
        logsumexp=cuflash.logsumexp,
    )
    ALL_CASES[case](library)
