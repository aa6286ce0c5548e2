"""Rows of float64 around numbers of any magnitude, whose weights are known to more digits."""

import numpy as np

#: Near 0, beside the border of what is near, and where neighbours are up to 2**944 apart.
MIDDLES = (0.0, 63.0, -65.0, 1e4, -1e9, 2.0**52, -(2.0**56), 1e300, -1.7e308)


def around(middle, shape, rng):
    """Return rows spread over 1 and 300 numbers by turns, some scores -inf, some far below."""
    x = rng.normal(size=shape)
    x[1::2] *= 100
    # Far up, neighbours that can be told from each other.
    x = middle + np.maximum(1, np.spacing(abs(middle))) * np.where(np.isfinite(x), x, 0)
    x[2, ::3], x[3, 1::2], x[4], x[5] = -np.inf, -1e308, -np.inf, middle
    x[6, 5] = np.nextafter(middle + 70, np.inf)
    return x


def assert_accurate(y, x):
    """Compare with weights of extended precision: a few roundings, and one for each of x - max."""
    top = x.max(1, keepdims=True)
    below = (x - np.where(np.isfinite(top), top, 0)).astype(np.longdouble)
    expected = np.exp(below)
    with np.errstate(invalid="ignore"):
        expected = np.where(np.isfinite(top), expected / expected.sum(1, keepdims=True), 0)
    bound = (8e-15 + 3e-16 * np.minimum(-below, 800)) * expected + 3e-308
    assert (abs(y - expected) <= bound).all(), np.max(abs(y - expected) / bound)
