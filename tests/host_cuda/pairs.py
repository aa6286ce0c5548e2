"""What the tests of gradients on wide tensor cores have in common: float64's and float32's."""

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest

import cuflash
from cuflash.device import attention_vjp_plans
from cuflash.problem_vjp import AttentionGrads
from cuflash.testing.bounds import assert_gradients_close, expect_gradients
from tests.devices import H200
from tests.host_cuda.test_attention import normal

#: A GPU that has these tensor cores, and not those of Hopper.
A100_LIKE = replace(H200, compute_capability="80")
TQ, TK = 70, 150


def launched(executor):
    """Return the kernels that ran after the forward."""
    names = [launch.kernel.expression.split("<")[0][9:] for launch in executor.launched]
    return names[names.index("row_deltas") :]


class Pairs(NamedTuple):
    """The kernels of one dtype: its family of plans and their name."""

    dtype: np.dtype
    family: Any
    kernel: str

    def normal(self, seed, *shape):
        return normal(seed, *shape, dtype=self.dtype)

    def operands(self, d, dv, tq=TQ, tk=TK):
        shapes = ((tq, d), (tk, d), (tk, dv), (tq, dv))
        return [self.normal(seed, 2, *shape) for seed, shape in enumerate(shapes)]

    def options(self, score):
        """Return the options of a call that a score pipeline serves."""
        if score == "RangedScore":
            return {"window": (60, 20), "key_lengths": 140, "query_lengths": 68}
        return {
            "softcap": 2.0,
            "bias": np.random.default_rng(5).normal(size=(1, 1, TK)).astype(self.dtype),
            "alibi_slopes": np.array([0.5, -0.1], self.dtype),
            "mask": np.random.default_rng(5).random((TQ, TK)) < 0.7,
            "window": (None, 20),
        }

    def gradients(self, q, k, v, dout, *, given=None, **options):
        """Run forward and backward by `mma`, and compare with the oracle."""
        out, lse = cuflash.flash_attention(q, k, v, return_lse=True, method="simt", **options)
        call = {"dlse": self.normal(9, *lse.shape), "method": "mma", **(given or {})}
        grads = cuflash.flash_attention_vjp(dout, q, k, v, out, lse, **call, **options)
        if call.get("grads") is None:
            expected = expect_gradients(dout, q, k, v, dlse=call["dlse"], **options)
            assert_gradients_close(grads, expected)
        return grads

    def taking(self, monkeypatch):
        """Yield a function that lets every plan take a row of the table, until the test ends."""
        cache = attention_vjp_plans.plan_attention_vjp

        def taken(choice):
            family = self.family
            family = replace(family, table=replace(family.table, choices=(choice,)))
            monkeypatch.setitem(attention_vjp_plans.PAIRS, self.dtype.name, family)
            cache.cache_clear()

        yield taken
        cache.cache_clear()


class Sweeps:
    """Which kernels run, and what they read and write, whatever the dtype of `pairs`."""

    pairs: Pairs

    def test_dq_by_atomics_unless_deterministic(self, executor):
        """dk and dv have the same bits either way; sums of dq are in the workspace."""
        q, k, v, dout = self.pairs.operands(64, 64)
        one = self.pairs.gradients(q, k, v, dout, causal=True)
        sums = "query_sums"
        assert launched(executor) == ["row_deltas", sums, self.pairs.kernel, sums]
        executor.launched.clear()
        two = self.pairs.gradients(q, k, v, dout, causal=True, given={"deterministic": True})
        assert launched(executor) == ["row_deltas", self.pairs.kernel, self.pairs.kernel]
        np.testing.assert_array_equal(one.dk, two.dk)
        np.testing.assert_array_equal(one.dv, two.dv)
        need = cuflash.workspace_size(q, k, v, backward=True, method="mma")
        assert need <= 8 * 2 * TQ * 65 + 32

    @pytest.mark.parametrize("deterministic", [False, True])
    def test_each_gradient_alone_has_the_same_bits(self, deterministic, executor):
        q, k, v, dout = self.pairs.operands(40, 24)
        given = {"deterministic": deterministic}
        everything = self.pairs.gradients(q, k[:1], v, dout, causal=True, given=given)
        for name, x in zip(("dq", "dk", "dv"), (q, k[:1], v), strict=True):
            buffer = np.full_like(x, np.nan)
            asked = {**given, "grads": AttentionGrads(**{name: buffer})}
            self.pairs.gradients(q, k[:1], v, dout, causal=True, given=asked)
            np.testing.assert_array_equal(buffer, getattr(everything, name))

    @pytest.mark.parametrize("deterministic", [False, True])
    def test_operands_that_broadcast(self, deterministic, executor):
        """Heads of a group, one query for all, keys of all and values of each, all at once."""
        given = {"deterministic": deterministic}
        q, k, v = (
            self.pairs.normal(0, 3, 1, 33, 16),
            self.pairs.normal(1, 1, 2, 40, 16),
            self.pairs.normal(2, 3, 1, 40, 20),
        )
        dout = self.pairs.normal(3, 3, 2, 33, 20)
        self.pairs.gradients(
            q,
            k,
            v,
            dout,
            given=given,
            sinks=self.pairs.normal(4, 2),
            bias=self.pairs.normal(5, 33, 1),
        )
        self.pairs.gradients(q[:1, 0], k, v, dout, given=given)
        assert "backward_bias" in launched(executor)

    @pytest.mark.parametrize("deterministic", [False, True])
    def test_launches_add_to_every_gradient(self, deterministic, executor):
        q = self.pairs.normal(0, *(2,) * 10, 1, 2)[::-1, :, ::-1, :, ::-1, :, ::-1, :, ::-1]
        given = {"deterministic": deterministic}
        self.pairs.gradients(
            q, self.pairs.normal(1, 3, 2), self.pairs.normal(2, 3, 2), np.ones_like(q), given=given
        )
        assert launched(executor).count(self.pairs.kernel) > 2

    @pytest.mark.parametrize("deterministic", [False, True])
    def test_strides_change_no_bit(self, deterministic, executor):
        """Rows that are no vectors, columns apart, and backwards; gradients too."""
        arrays = self.pairs.operands(24, 24)
        given = {"deterministic": deterministic}
        plain = self.pairs.gradients(*arrays, given=given)

        def views(x):
            apart = np.zeros((*x.shape[:-1], 2 * x.shape[-1] + 1), x.dtype)[..., ::2][..., :-1]
            backwards = np.zeros_like(x)[:, ::-1, ::-1]
            return apart, np.zeros_like(x.swapaxes(-1, -2)).swapaxes(-1, -2), backwards

        for kind in range(3):
            copies = [views(x)[kind] for x in arrays]
            for copy, x in zip(copies, arrays, strict=True):
                copy[...] = x
            buffers = AttentionGrads(*(views(x)[kind] for x in arrays[:3]))
            self.pairs.gradients(*copies, given={**given, "grads": buffers})
            for got, want in zip(buffers[:3], plain[:3], strict=True):
                np.testing.assert_array_equal(got, want)
