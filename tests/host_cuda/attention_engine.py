"""Attention and merges of the device engine on the CPU: its plans and kernels, with NumPy arrays.

Run as a program, it makes a few small calls in kernels built with AddressSanitizer, whose library
must be loaded before the interpreter's:
``LD_PRELOAD=... python -m tests.host_cuda.attention_engine WHICH [FILE OLD NEW]``,
WHICH being forward or gradients.
"""

import sys
from dataclasses import replace
from unittest import mock

import numpy as np

import cuflash
from cuflash import engine, host, reference
from cuflash.device.attention import compute, respecified
from cuflash.device.attention_plans import attention_methods, workspace_bytes
from cuflash.device.attention_vjp import compute as compute_vjp
from cuflash.device.attention_vjp import with_copies
from cuflash.device.attention_vjp_plans import attention_vjp_methods, vjp_workspace_bytes
from cuflash.device.online import merge, merge_vjp
from cuflash.problem import AttentionArrays, AttentionProblem
from cuflash.problem_vjp import AttentionGrads
from cuflash.testing.bounds import (
    assert_attention_close,
    assert_gradients_close,
    expect_attention,
    expect_gradients,
)
from tests.host_cuda.builder import Edit
from tests.host_cuda.engine import HostExecutor


class HostCudaAttention:
    """The attention part of `cuflash.engine.Engine`."""

    def __init__(self, **options):
        self.executor = HostExecutor(**options)
        if self.executor.limits.compute_capability == "90":
            # As a GPU before Hopper, whose own instructions nothing emulates.
            limits = replace(self.executor.limits, compute_capability="89")
            self.executor.limits = limits

    device_of, empty = staticmethod(host.device_of), staticmethod(host.empty)

    def attention_methods(self, problem):
        return attention_methods(problem, self.executor.limits)

    def attention_workspace(self, problem):
        return workspace_bytes(problem, self.executor.limits)

    def attention(self, problem, arrays, out, lse, workspace):
        sources = AttentionArrays(
            *(np.require(x, requirements="A") if isinstance(x, np.ndarray) else x for x in arrays)
        )
        problem = respecified(problem, arrays, sources)
        assert compute(problem, sources, out, lse, workspace, self.executor)

    def attention_vjp_methods(self, problem):
        return attention_vjp_methods(problem, self.executor.limits)

    def attention_vjp_workspace(self, problem):
        return vjp_workspace_bytes(problem, self.executor.limits)

    def attention_vjp(self, problem, arrays, results, grads, workspace):
        sources, read, written = (
            type(given)(
                *(
                    np.require(x, requirements="A") if isinstance(x, np.ndarray) else x
                    for x in given
                )
            )
            for given in (arrays, results, grads)
        )
        problem = with_copies(problem, (arrays, sources), read, written)
        assert compute_vjp(problem, sources, read, written, workspace, self.executor)
        for source, target in zip(written, grads, strict=True):
            if source is not target:
                target[...] = source

    def merge_attention(self, parts, out, lse):
        merge(parts, (out, lse), self.executor)

    def merge_attention_vjp(self, cotangents, parts, grads):
        merge_vjp(cotangents, parts, grads, self.executor)

    def merge_softmax(self, parts, maximum, normalizer):
        def full(x):
            return np.broadcast_to(np.asarray(x, maximum.dtype), maximum.shape)

        pairs = [(full(total), full(top)) for top, total in parts]
        merge(pairs, (normalizer, maximum), self.executor)


def check_bounds(**options):
    """Attend with arrays of exactly their bytes, past tile ends in every axis, and merge."""
    rng = np.random.default_rng(0)
    emulated = HostCudaAttention(**options)
    with mock.patch.object(engine, "load", lambda name: emulated):
        for tq, tk, d, dv in ((5, 37, 7, 9), (37, 35, 20, 33), (17, 70, 68, 130)):
            q, k, v = (rng.normal(size=(2, *s)) for s in ((tq, d), (tk, d), (tk, dv)))
            q, k, v = (np.array(x, np.float32) for x in (q, k, v))
            mask = np.array(rng.random((tq, tk)) < 0.8)
            v[:, -1] = np.nan
            for more in ({}, {"causal": True}, {"mask": mask, "bias": rng.normal(size=tk)}):
                given = more | {"key_lengths": np.array([tk - 1, tk - 2])}
                # On tensor cores two tiles of rows a warp, and two blocks of columns.
                for method, splits in (("simt", 1), ("simt", 2), ("mma", 1))[: 3 if d > 64 else 2]:
                    how = {"method": method, "num_splits": splits}
                    out, lse = np.empty((2, tq, dv), np.float32), np.empty((2, tq), np.float32)
                    cuflash.flash_attention(q, k, v, **given, **how, out=out, lse=lse)
                    assert_attention_close(out, lse, expect_attention(q, k, v, **given))
            check_wild_ends(emulated, q, k, v)
        check_bounds_of_merges(rng)
    return emulated.executor.launched


def check_bounds_of_merges(rng):
    """Merge results and states, and pull back, with rows past a block's last and odd columns."""

    def parts(*shapes):
        return [np.array(rng.normal(size=shape), np.float32) for shape in shapes]

    for rows, columns in ((1, 1), (9, 33), (130, 7)):
        shapes = [(2, rows, columns), (2, rows)] * 2
        pairs = parts(*shapes)
        pairs[1][0] = -np.inf
        out, lse = cuflash.merge_attention(*pairs)
        for x, expected in zip((out, lse), reference.merge_attention(*pairs), strict=True):
            np.testing.assert_allclose(x, expected, rtol=1e-5, atol=1e-6)
        given = [*parts(*shapes[:2]), *pairs]
        grads = cuflash.merge_attention_vjp(*given)
        for x, expected in zip(grads, reference.merge_attention_vjp(*given), strict=True):
            np.testing.assert_allclose(x, expected, rtol=1e-4, atol=1e-5)
        a, b = (cuflash.SoftmaxState(m, np.exp(n)) for m, n in (pairs[1::2], parts(*shapes[1::2])))
        merged = cuflash.merge_softmax(a, b)
        expected = np.logaddexp(*(state.maximum + np.log(state.normalizer) for state in (a, b)))
        total = merged.maximum + np.log(merged.normalizer)
        np.testing.assert_allclose(total, expected, rtol=1e-5, atol=1e-5)


def check_bounds_of_gradients(**options):
    """Pull back through tiles that end in every axis, each array being of exactly its bytes."""
    rng = np.random.default_rng(0)
    emulated = HostCudaAttention(**options)
    with mock.patch.object(engine, "load", lambda name: emulated):
        q, k, v, dout = (
            np.array(rng.normal(size=(2, *s)), np.float32)
            for s in ((67, 67), (70, 67), (70, 70), (67, 70))
        )
        k[:, -1] = np.nan
        bounds = {"causal": True, "key_lengths": np.array([69, 68])}
        whole = {"bias": rng.normal(size=(67, 70)), "sinks": rng.normal(size=2)}
        for more in (bounds, bounds | whole):
            out, lse = reference.attention(q, k, v, **more)
            out, lse = out.astype(np.float32), lse.astype(np.float32)
            grads = {name: np.empty_like(x) for name, x in (("dq", q), ("dk", k), ("dv", v))}
            grads |= {f"d{name}": np.empty_like(whole[name]) for name in whole if name in more}
            grads = AttentionGrads(**grads)
            cuflash.flash_attention_vjp(dout, q, k, v, out, lse, grads=grads, **more)
            assert_gradients_close(grads, expect_gradients(dout, q, k, v, **more))


def check_wild_ends(emulated, q, k, v):
    """Attend with ends of sequences that are none, each array being of exactly its bytes."""
    far = 2**62
    for wild in ([0, far, -far, 20], [9, 3, -1, far], [-far, -far, -far, -far], [far] * 4):
        good = np.zeros(len(wild), np.int64)
        arrays = AttentionArrays(q, k, v, cu_seqlens_q=good, cu_seqlens_k=good)
        problem = AttentionProblem.of(arrays, causal=True)
        ends = np.array(wild, np.int64)
        arrays = arrays._replace(cu_seqlens_q=ends, cu_seqlens_k=ends[::-1].copy())
        out, lse = np.empty(problem.out_shape, np.float32), np.empty(problem.lse_shape, np.float32)
        emulated.attention(problem, arrays, out, lse, None)


if __name__ == "__main__":
    planted = [Edit(*sys.argv[2:])] if sys.argv[2:] else []
    checks = {"forward": check_bounds, "gradients": check_bounds_of_gradients}
    checks[sys.argv[1]](sanitize=True, edits=planted)
