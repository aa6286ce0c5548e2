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
    """Compare functions of x's shape with the oracle; return what was launched.

    AssertionError or RuntimeError says what is wrong.
    """
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
    return emulated.executor.launched


def check_entries(limits=SMALL, sizes=((8, 7), (8, 37), (8, 2100)), axes=(0, 1), **options):
    """Compare what makes an entry of a row, or reads one; return what was launched."""
    emulated = HostCuda(limits=limits, **options)
    rng = np.random.default_rng(0)
    tolerance = {"rtol": 1e-5, "atol": 1e-6}
    with mock.patch.object(engine, "load", lambda name: emulated):
        for shape, axis in itertools.product(sizes, axes):
            shape = shape if axis else shape[::-1]
            x, dy = (np.array(rng.normal(size=shape), np.float32) for _ in range(2))
            np.moveaxis(x, axis, 1)[1] = -np.inf
            dlse = np.array(np.take(dy, 0, axis))
            for where in (None, np.array(rng.random(shape) < 0.7)):
                lse, y, dx = np.empty_like(dlse), np.empty_like(x), np.empty_like(x)
                cuflash.logsumexp(x, axis, where=where, out=lse)
                expected = reference.logsumexp(x, axis, where=where)
                np.testing.assert_allclose(lse, expected, **tolerance)
                cuflash.logsumexp_vjp(dlse, x, lse, axis, where=where, out=dx)
                expected = reference.logsumexp_vjp(dlse, x, lse, axis, where=where)
                np.testing.assert_allclose(dx, expected, **tolerance)
                state = cuflash.softmax_state(x, axis, where=where)
                np.testing.assert_allclose(state.logsumexp().reshape(lse.shape), lse, **tolerance)
                if where is None:
                    expected = reference.softmax(x, axis)
                    np.testing.assert_allclose(state.apply(x), expected, **tolerance)
                for name in ("softmax", "log_softmax"):
                    getattr(cuflash, name)(x, axis, where=where, out=y)
                    expected = getattr(reference, name)(x, axis, where=where)
                    np.testing.assert_allclose(y, expected, **tolerance)
                    getattr(cuflash, f"{name}_vjp")(dy, y, axis, where=where, out=dx)
                    expected = getattr(reference, f"{name}_vjp")(dy, y, axis, where=where)
                    np.testing.assert_allclose(dx, expected, rtol=1e-4, atol=1e-4)
    return emulated.executor.launched


def check_long_rows(**options):
    """Do the same with rows that no block holds: read twice, or shared by several blocks."""
    sizes = ((2, 70_000), (2, 70_001))  # two parts, of whole chunks and not
    return [
        launch
        for limits in (SMALL, H200)
        for launch in check_entries(limits, sizes, (1,), **options)
    ]


if __name__ == "__main__":
    planted = [Edit(*sys.argv[1:])] if sys.argv[1:] else []
    check(lengths=(7, 32, 37, 2100), sanitize=True, edits=planted)
    check_entries(sanitize=True, edits=planted)
    check_long_rows(sanitize=True, edits=planted)
