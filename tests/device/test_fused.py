"""Fused chains and baselines on a GPU: laws, each family and tile, streams and memory."""

from contextlib import contextmanager
from dataclasses import replace

import cupy
import numpy as np
import pytest
from hypothesis import given, settings

from cuflash import baselines, fused, reference
from cuflash.device import executor, fused_plans
from cuflash.device.baselines_plans import scores_kernels, step_kernels
from cuflash.device.compiler import warm
from cuflash.device.executor import device_limits
from cuflash.device.fused_plans import matmul_kernels
from cuflash.device.layer_norm_plans import layer_norm_kernels
from cuflash.problem import BFLOAT16, FLOATS
from cuflash.testing.fused import (
    LAYER_NORM_PROPERTIES,
    MATMUL_PROPERTIES,
    LayerNormCase,
    MatmulCase,
    layer_norm_cases,
    layer_norm_matches_oracle,
    layer_norm_vjp_matches_oracle,
    matmul_cases,
    matmul_matches_oracle,
)
from cuflash.testing.properties import ATTENTION_PROPERTIES
from cuflash.testing.strategies import attention_problems
from tests.device.arrays import on_device

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """Compile what is run here, several kernels at a time."""
    capability = int(device_limits(0).compute_capability)
    names = []
    for dtype in FLOATS:
        names += [*layer_norm_kernels(dtype), *step_kernels(dtype), *matmul_kernels(dtype)]
    names += scores_kernels(BFLOAT16)
    warm(
        name
        for name in names
        if (not any(x in name.expression for x in ("_mma<", "_wide<")) or capability >= 80)
        and ("_wgmma<" not in name.expression or capability == 90)
    )


@contextmanager
def as_if(**changes):
    """Let plans see other limits of the device, and say which kernels were launched."""
    launched, launch = [], executor.CurrentDevice.launch
    limits = replace(device_limits(0), **changes)

    def record(self, started, parameters):
        launched.append(started.kernel.expression)
        launch(self, started, parameters)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor.CurrentDevice, "launch", record)
        patch.setattr(executor.CurrentDevice, "limits", limits)
        yield launched


FAMILIES = {"simt": "75", "mma": "80", "wgmma": "90"}
matmul = on_device(fused.matmul_bias_activation)
layer_norm = on_device(fused.dropout_bias_layer_norm)
layer_norm_vjp = on_device(fused.dropout_bias_layer_norm_vjp)


def skip_unless_capable(family):
    if int(FAMILIES[family]) > int(device_limits(0).compute_capability):
        pytest.skip(f"no {family}")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("law", MATMUL_PROPERTIES)
def test_matmul(law, family):
    skip_unless_capable(family)
    dtypes = {
        "simt": ("float64", "float32", "bfloat16"),
        "mma": ("float64", "float32", "float16", "bfloat16"),
        "wgmma": ("float16", "bfloat16"),
    }[family]
    # Of float32 and float64, one multiprocessor leaves nothing to cuBLAS for want of tiles.
    changes = {"multiprocessors": 1} if family == "mma" else {}

    @settings(max_examples=15)
    @given(case=matmul_cases(dtypes=dtypes, largest=140))
    def holds(case):
        with as_if(compute_capability=FAMILIES[family], **changes):
            MATMUL_PROPERTIES[law](matmul, case)

    holds()


def test_sums_of_many_terms():
    """Terms that are alike err in one direction: 460 units, added one by one 16 at a time."""
    skip_unless_capable("mma")
    a, b = np.full((3, 2**16), 0.1, np.float32), np.full((2**16, 5), 0.3, np.float32)
    with as_if(compute_capability="80", multiprocessors=1) as launched:
        out = matmul(a, b, np.zeros(5, np.float32), activation=None)
    assert "matmul_wide<float" in launched[0]
    value = 2**16 * np.float64(a[0, 0]) * np.float64(b[0, 0])
    np.testing.assert_allclose(out, value, rtol=32 * 2**-24)


@pytest.mark.parametrize("tile", fused_plans.PRODUCT_TILES, ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
@pytest.mark.parametrize("sizes", [(1000, 328, 776), (130, 64, 264), (129, 8, 8)])
def test_each_tile_of_hopper(tile, layout, sizes, monkeypatch):
    """Tiles that are parts, more tiles than blocks, fewer and more terms than stages."""
    skip_unless_capable("wgmma")
    monkeypatch.setattr(fused_plans, "product_tile", lambda problem, limits: tile)
    layouts = ("contiguous", layout, "contiguous")
    case = MatmulCase("bfloat16", ((2, 2), (2, 1)), sizes, layouts, "gelu", 3)
    fused_plans.plan_matmul.cache_clear()
    with as_if(multiprocessors=7) as launched:
        matmul_matches_oracle(matmul, case)
    fused_plans.plan_matmul.cache_clear()
    assert all(f"WgmmaProduct<{tile.groups}, {tile.columns}," in name for name in launched)


@pytest.mark.parametrize("law", LAYER_NORM_PROPERTIES)
def test_layer_norm(law):
    @settings(max_examples=15)
    @given(case=layer_norm_cases())
    def holds(case):
        LAYER_NORM_PROPERTIES[law](layer_norm, layer_norm_vjp, case)

    holds()


@pytest.mark.parametrize("dtype", [dtype.name for dtype in FLOATS])
@pytest.mark.parametrize("columns", [256, 512, 1024, 2040, 4096, 8192, 16384, 20000])
def test_layer_norm_of_long_rows(dtype, columns):
    """Each tile, with more rows than teams run at once and without."""
    case = LayerNormCase(
        dtype, (3, columns), "contiguous", 0.2, 7, 1, 1e-5, residual=True, mean=1.0, seed=3
    )
    layer_norm_matches_oracle(layer_norm, layer_norm_vjp, case)
    with as_if(multiprocessors=1):
        layer_norm_vjp_matches_oracle(layer_norm, layer_norm_vjp, case)


def test_many_rows_repeat_bit_for_bit(rng):
    x, dy = rng.standard_normal((2, 5000, 264)).astype(BFLOAT16)
    vectors = rng.standard_normal((3, 264)).astype(BFLOAT16)
    options = {"p": 0.3, "seed": 2**63, "offset": 2**33}
    y, mean, rstd = layer_norm(x, *vectors, **options, return_stats=True)
    grads = layer_norm_vjp(dy, x, *vectors[:2], mean, rstd, **options)
    for _ in range(3):
        np.testing.assert_array_equal(layer_norm(x, *vectors, **options), y)
        again = layer_norm_vjp(dy, x, *vectors[:2], mean, rstd, **options)
        for one, other in zip(again[:4], grads[:4], strict=True):
            np.testing.assert_array_equal(one, other)
    host = fused.dropout_bias_layer_norm(x, *vectors, **options, return_stats=True)
    np.testing.assert_allclose(mean, host[1], rtol=1e-4, atol=1e-6)
    expected = fused.dropout_bias_layer_norm_vjp(dy, x, *vectors[:2], *host[1:], **options)
    for name in ("dbias", "dgamma", "dbeta"):
        got, value = (np.asarray(getattr(g, name), np.float64) for g in (grads, expected))
        assert np.linalg.norm(got - value) <= 8e-3 * np.linalg.norm(value)


def test_host_and_device_have_one_mask():
    shape, options = (7, 1001), {"p": 0.37, "seed": 123456789012345, "offset": 5}
    stats, vector = np.zeros(7, np.float32), np.ones(1001, np.float32)
    dy = np.tile(np.arange(7, dtype=np.float32)[:, None], 1001)
    dy[:, 0] += 100
    arguments = (dy, 0 * dy, 0 * vector, vector, stats, stats + 1)
    dropped = layer_norm_vjp(*arguments, **options).dx == 0
    np.testing.assert_array_equal(dropped, ~reference.dropout_mask(shape, **options))
    np.testing.assert_array_equal(
        dropped, fused.dropout_bias_layer_norm_vjp(*arguments, **options).dx == 0
    )


def test_chains_run_on_the_current_stream_and_in_graphs(rng):
    x = cupy.asarray(rng.standard_normal((64, 512)), np.float32)
    a = x.astype(np.float16)
    vectors = cupy.ones((3, 512), np.float32)

    def chain():
        y = fused.dropout_bias_layer_norm(x, *vectors, p=0.1, seed=3)
        return y, fused.matmul_bias_activation(a, a.T, a[0, :64])

    expected = chain()
    cupy.cuda.Device().synchronize()  # x changes below, on a stream that waits for nothing
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        results = chain()
        graph = stream.end_capture()
        x *= 2  # after the capture, before the launch: what is captured reads it then
        x /= 2
        graph.launch(stream)
    stream.synchronize()
    for result, value in zip(results, expected, strict=True):
        cupy.testing.assert_array_equal(result, value)


@pytest.mark.parametrize("law", ["matches_oracle", "unseen_nonfinite_never_leaks"])
def test_scores_fused_attention(law):
    @settings(max_examples=6)
    @given(case=attention_problems(dtypes=("bfloat16",), max_tokens=200, max_features=70))
    def holds(case):
        ATTENTION_PROPERTIES[law](on_device(baselines.scores_fused_attention), case)

    holds()


@pytest.mark.parametrize("dtype", [np.float64, BFLOAT16], ids=["float64", "bfloat16"])
def test_steps(dtype, rng):
    x = rng.standard_normal((300, 2056)).astype(dtype)
    vectors = rng.standard_normal((3, 2056)).astype(dtype)
    b = rng.standard_normal((2056, 24)).astype(dtype)
    tolerance = {"atol": 1e-11} if dtype == np.float64 else {"rtol": 1.6e-2, "atol": 3e-2}
    for function, arguments, options in (
        (baselines.unfused_softmax, (x,), {}),
        (baselines.unfused_softmax, (x, 0), {}),
        (baselines.unfused_matmul_bias_activation, (x, b, b[0]), {"activation": "gelu_tanh"}),
        (baselines.unfused_dropout_bias_layer_norm, (x, *vectors), {"p": 0.2, "seed": 1}),
    ):
        got = on_device(function)(*arguments, **options)
        expected = function(*arguments, **options)
        np.testing.assert_allclose(got.astype(np.float64), expected.astype(np.float64), **tolerance)
