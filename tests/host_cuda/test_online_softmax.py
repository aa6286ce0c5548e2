"""The (m, l) monoid of kernels/lib/online_softmax.cuh, as compiled."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from cuflash import reference
from cuflash.device.compiler import C_TYPES
from cuflash.testing.softmax_properties import MergeCase, merge_softmax_is_a_monoid
from tests.host_cuda import builder
from tests.host_cuda.test_shim import run

pytestmark = pytest.mark.skipif(not builder.available(), reason="no C++ compiler")

DTYPES = ["float32", "float64"]


def merge(a, b):
    """Merge two states by the device function, element by element."""
    pairs = np.stack([np.stack(part, axis=-1) for part in (a, b)])
    count = pairs[0].size // 2
    kernel = f"merge<{C_TYPES[pairs.dtype.name]}>"
    merged = run(kernel, pairs, np.zeros_like(pairs[0]), count, grid=-(-count // 32) or 1)
    return merged[..., 0], merged[..., 1]


@given(
    case=st.builds(
        MergeCase,
        shape=st.tuples(st.integers(1, 40)),
        dtype=st.sampled_from(DTYPES),
        magnitude=st.sampled_from([0.0, 1.0, 100.0, 1e4]),
        empty=st.sampled_from([0.0, 0.3, 1.0]),
        seed=st.integers(0, 2**16),
    )
)
def test_merge_is_a_commutative_monoid(case):
    merge_softmax_is_a_monoid(merge, case)


def test_merge_of_states_with_nan_and_infinity():
    m, n = (np.array(x).ravel() for x in np.meshgrid(*[[np.nan, np.inf, -np.inf, 1.0]] * 2))
    state = {np.inf: np.nan, -np.inf: 0.0, 1.0: 2.0}
    j, k = (np.array([state.get(x, np.nan) for x in part]) for part in (m, n))
    merged = merge((m, j), (n, k))
    np.testing.assert_array_equal(merged[0], np.maximum(m, n))
    clean = ~np.isnan(m) & ~np.isnan(n) & (m < np.inf) & (n < np.inf)
    np.testing.assert_array_equal(np.isnan(merged[1]), ~clean)
    np.testing.assert_array_equal(merged[1][clean], (j + k)[clean])


def test_exponentials_of_float64_are_right_to_a_unit_in_the_last_place(rng):
    """Where results are subnormal they are 0: 2^-1022 of the largest weight of a row."""
    least = np.log(np.finfo(np.float64).tiny)
    border = np.nextafter(0.5 * np.log(2), [0, 1])  # of the polynomial
    x = np.concatenate([-rng.uniform(0, -least, 5000), -rng.uniform(0, 1, 5000), -border, border])
    y = run("exponentials<double>", x, np.zeros_like(x), x.size, grid=-(-x.size // 32))
    exact = np.exp(x.astype(np.longdouble))
    assert np.max(np.abs(y - exact) / np.spacing(exact.astype(np.float64))) < 1

    x = np.array([0.0, -0.0, -np.inf, -1e308, least - 1, -746, np.inf, np.nan, 709.0])
    y = run("exponentials<double>", x, np.ones_like(x), x.size)
    np.testing.assert_allclose(y, [1, 1, 0, 0, 0, 0, np.inf, np.nan, np.exp(709.0)], rtol=4e-16)


@given(
    x=hnp.arrays(
        st.sampled_from(DTYPES),
        st.integers(0, 40),
        elements=st.one_of(
            st.floats(-100, 100, width=32),
            st.sampled_from([np.inf, -np.inf, np.nan, -0.0, 3e38, -3e38]),
        ),
    )
)
def test_push_gives_the_softmax(x):
    result = run(
        f"push<{C_TYPES[x.dtype.name]}>", x, np.zeros(3 + x.size, x.dtype), x.size, block=1
    )
    tolerance = {"rtol": 200 * np.finfo(x.dtype).eps, "atol": np.finfo(x.dtype).tiny}
    assert result[0] == x.max(initial=-np.inf) or np.isnan(x).any()
    np.testing.assert_allclose(result[3:], reference.softmax(x), **tolerance)
    # A logarithm near 0 is that of a sum near 1, which is rounded as 1 is.
    tolerance["atol"] = 8 * np.finfo(x.dtype).eps
    np.testing.assert_allclose(result[2], reference.logsumexp(x), **tolerance)
