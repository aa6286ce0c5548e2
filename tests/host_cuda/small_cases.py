"""A few small softmax calls that pass every tail, border, mask and empty row of the kernels.

Run as a program, it makes them in kernels built with AddressSanitizer, whose library must be loaded
before the interpreter's: ``LD_PRELOAD=... python -m tests.host_cuda.small_cases [FILE OLD NEW]``.
"""

import itertools
import sys
from dataclasses import replace
from unittest import mock

import numpy as np

import cuflash
from cuflash import engine, reference
from tests.host_cuda.builder import Edit
from tests.host_cuda.engine import H200, HostCuda

METHODS = ("naive", "fused", "online")
LENGTHS = (1, 7, 32, 37, 2100)
#: Few enough blocks at a time that some of so few rows are prefetched.
SMALL = replace(H200, multiprocessors=1, threads_per_sm=512)


def check(dtype=np.float32, lengths=LENGTHS, **options):
    """Compare all functions with the oracle; AssertionError or RuntimeError says what is wrong."""
    emulated = HostCuda(limits=SMALL, **options)
    rng = np.random.default_rng(0)
    tolerance = {"rtol": 40 * np.finfo(dtype).eps, "atol": 40 * np.finfo(dtype).eps}
    with mock.patch.object(engine, "load", lambda name: emulated):
        for length, axis in itertools.product(lengths, (0, 1)):
            # Of exactly these bytes: a sanitizer sees the ends of an allocation, not of a view.
            x = np.array(rng.normal(size=(8, length) if axis else (length, 8)), dtype)
            dy = np.array(rng.normal(size=x.shape), dtype)
            hidden = np.array(rng.random(x.shape) < 0.7)
            np.moveaxis(x, axis, 1)[3] = -np.inf
            for method, where in itertools.product(METHODS, (None, hidden)):
                out = np.empty_like(x)
                cuflash.softmax(x, axis, where=where, method=method, out=out)
                expected = reference.softmax(x, axis, where=where)
                np.testing.assert_allclose(out, expected, **tolerance)
            np.moveaxis(x, axis, 1)[1, -1] = np.nan
            for where in (None, hidden):
                y, dx = np.empty_like(x), np.empty_like(x)
                cuflash.log_softmax(x, axis, where=where, out=y)
                expected = reference.log_softmax(x, axis, where=where)
                np.testing.assert_allclose(y, expected, **tolerance)
                cuflash.softmax_vjp(dy, out, axis, where=where, out=dx)
                expected = reference.softmax_vjp(dy, out, axis, where=where)
                np.testing.assert_allclose(dx, expected, **tolerance)


if __name__ == "__main__":
    planted = [Edit(*sys.argv[1:])] if sys.argv[1:] else []
    check(lengths=(7, 32, 37, 2100), sanitize=True, edits=planted)
