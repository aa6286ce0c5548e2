"""What the Hopper kernel makes of dot products, on the CPU; its products are not emulated."""

import numpy as np
import pytest

from cuflash.device.attention_plans import plan_attention
from cuflash.device.compiler import KernelName
from cuflash.problem import BFLOAT16, ArraySpec, AttentionArrays, AttentionProblem
from tests.devices import H200
from tests.host_cuda import builder

pytestmark = pytest.mark.skipif(not builder.available(), reason="no C++ compiler")

TQ, TK, SCALE = 37, 208, 0.25


def made(score, tile, dots, **options):
    """Return the scores, times 1 / SCALE where the kernel leaves the scale to the weights."""
    x = np.zeros((TQ, 64), np.float16), np.zeros((TK, 64), np.float16)
    arrays = {n: options.pop(n) for n in AttentionArrays._fields if n in options}
    offset = arrays.get("query_offset")
    specs = {n: a if a is offset else ArraySpec.of(a) for n, a in arrays.items()}
    q, k = map(ArraySpec.of, x)
    problem = AttentionProblem.of(
        AttentionArrays(q, k, k, **specs), scale=SCALE, method="mma", num_splits=1, **options
    )
    plan = plan_attention(problem, q, None, H200)
    out = np.full((TQ, TK), np.nan, np.float32)
    given = {"q": dots, "k": x[1], "v": x[1]} | arrays
    pointers = [
        given[n].ctypes.data if n in given and given[n] is not offset else 0
        for n in AttentionArrays._fields
    ]
    numbers = [offset, None, None]
    ((_, parameters),) = plan.launches([*pointers, out.ctypes.data, 0], numbers, 0)
    expression = f"cuflash::change_scores<cuflash::{score}<float>, cuflash::Shape<{tile}>>"
    builder.HostKernel(KernelName("wgmma_scores.cu", expression)).launch(1, 32, 0, parameters)
    return out


@pytest.fixture
def dots(rng):
    return 4 * rng.standard_normal((TQ, TK), np.float32)


TILES = pytest.mark.parametrize("tile", ["64, 64", "128, 64", "128, 128", "64, 256"])


@TILES
@pytest.mark.parametrize("cap", [0.5, 50.0])
def test_softcap(tile, cap, dots):
    expected = cap * np.tanh(dots.astype(np.float64) * SCALE / cap)
    got = made("SoftcapScore", tile, dots, softcap=cap)
    np.testing.assert_allclose(got, expected, rtol=3e-6)


@TILES
@pytest.mark.parametrize(("slope", "offset"), [(0.25, 100), (1e30, 100), (2.0**-40, 2**40 + 1)])
def test_slopes(tile, slope, offset, dots):
    """Small ones, one that takes distances out of range, and distances of more than 32 bits."""
    distance = np.abs(np.arange(TQ)[:, None] + offset - np.arange(TK))
    expected = dots * SCALE - slope * distance
    slopes = np.full((), slope, np.float32)
    got = made("AlibiScore", tile, dots, alibi_slopes=slopes, query_offset=offset)
    np.testing.assert_allclose(got * SCALE, expected, rtol=1e-6, atol=1e-6)


@TILES
@pytest.mark.parametrize("byte", [1, 0x80, 0x7F])
def test_masks(tile, byte, dots, rng):
    """Bytes that are not 0, whichever, show a pair; some tiles have none of them, or all."""
    mask = rng.random((TQ, TK)) < 0.5
    mask[:16, :128], mask[16:32, 128:] = False, True
    expected = np.where(mask, dots, -np.inf)
    octets = mask.view(np.uint8) * np.uint8(byte)
    np.testing.assert_array_equal(made("MaskScore", tile, dots, mask=octets.view(bool)), expected)
    row = mask[20:21].copy()
    expected = np.where(row, dots, -np.inf)
    np.testing.assert_array_equal(made("MaskScore", tile, dots, mask=row), expected)


@TILES
@pytest.mark.parametrize("dtype", [np.float32, np.float16, BFLOAT16], ids=str)
def test_biases(tile, dtype, dots, rng):
    bias = rng.standard_normal((TQ, TK)).astype(dtype)
    expected = dots * SCALE + bias.astype(np.float32)
    np.testing.assert_array_equal(made("BiasScore", tile, dots, bias=bias), expected)
