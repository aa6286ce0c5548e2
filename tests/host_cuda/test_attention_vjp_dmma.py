"""Gradients on float64 tensor cores on the CPU: every tile of the table, with every pipeline."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings

import cuflash
from cuflash.device import attention_vjp_plans, attention_vjp_plans_dmma
from cuflash.device.attention_vjp_plans_dmma import DMMA_VJP_SCORES, DMMA_VJP_TILES, DmmaVjpTile
from cuflash.problem_vjp import AttentionGrads
from cuflash.testing.bounds import assert_gradients_close, expect_gradients
from cuflash.testing.gradients import GRADIENT_PROPERTIES
from cuflash.testing.problems import AttentionCase
from cuflash.testing.strategies import attention_problems
from tests.devices import H200
from tests.host_cuda import builder
from tests.host_cuda.builder import Edit
from tests.host_cuda.test_attention import ORDERS, normal, on_host_cuda, use
from tests.host_cuda.test_attention_vjp import FAULTY_CASES

pytestmark = pytest.mark.skipif(not builder.available(), reason="no C++ compiler")

#: A GPU that has these tensor cores, and not those of Hopper.
A100_LIKE = replace(H200, compute_capability="80")
TQ, TK = 70, 150
_rng = partial(np.random.default_rng, 5)
#: The options of a call, by the score pipeline that serves it.
OPTIONS = {
    "RangedScore": {"window": (60, 20), "key_lengths": 140, "query_lengths": 68},
    "FullScore": {
        "softcap": 2.0,
        "bias": _rng().normal(size=(1, 1, TK)),
        "alibi_slopes": np.float64([0.5, -0.1]),
        "mask": _rng().random((TQ, TK)) < 0.7,
        "window": (None, 20),
    },
}


def doubles(seed, *shape):
    return normal(seed, *shape, dtype=np.float64)


def operands(d, dv, tq=TQ, tk=TK):
    shapes = ((tq, d), (tk, d), (tk, dv), (tq, dv))
    return [doubles(seed, 2, *shape) for seed, shape in enumerate(shapes)]


def gradients(q, k, v, dout, *, given=None, **options):
    """Run forward and backward by `mma`, and compare with the oracle."""
    out, lse = cuflash.flash_attention(q, k, v, return_lse=True, method="simt", **options)
    call = {"dlse": doubles(9, *lse.shape), "method": "mma", **(given or {})}
    grads = cuflash.flash_attention_vjp(dout, q, k, v, out, lse, **call, **options)
    if call.get("grads") is None:
        expected = expect_gradients(dout, q, k, v, dlse=call["dlse"], **options)
        assert_gradients_close(grads, expected)
    return grads


@pytest.fixture
def executor(monkeypatch):
    return use(monkeypatch, limits=A100_LIKE)


@pytest.fixture
def take(monkeypatch):
    """Return a function that lets every plan take a tile, until the test ends."""
    cache = attention_vjp_plans.plan_attention_vjp

    def taken(tile):
        monkeypatch.setattr(attention_vjp_plans_dmma, "_tile", lambda *problem: tile)
        cache.cache_clear()

    yield taken
    cache.cache_clear()


# ------------------------------------------------------------------------------------------- tiles


@pytest.mark.parametrize("score", DMMA_VJP_SCORES)
@pytest.mark.parametrize("choice", DMMA_VJP_TILES, ids=lambda x: x.tile.expression[9:])
def test_tile(choice, score, executor, take):
    """With columns to fill up, rows that differ in what they see, and NaN where no row looks."""
    take(choice.tile)
    # Rows that are copied by words, and by elements.
    fewer = {"RangedScore": 2, "FullScore": 3}[score]
    q, k, v, dout = operands(choice.width - fewer, choice.width)
    options = OPTIONS[score]
    if "key_lengths" in options:
        k[:, options["key_lengths"] :] = v[:, options["key_lengths"] :] = np.nan
        q[:, options["query_lengths"] :] = dout[:, options["query_lengths"] :] = np.nan
    gradients(q, k, v, dout, **options)
    wanted = f"backward_dmma<cuflash::{score}<double>, {choice.tile.expression}"
    launched = [launch.kernel.expression for launch in executor.launched]
    assert sum(wanted in expression for expression in launched) == 2
