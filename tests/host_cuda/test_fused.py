"""The kernels of fused chains, by the public functions: tiles, layouts and orders of threads."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cuflash import engine, fused, reference
from cuflash.device.fused import compute_epilogue
from cuflash.device.fused_plans import (
    EPILOGUE_PARAMETERS,
    MATMUL_PARAMETERS,
    WIDE_SUM_TERMS,
    takes_library,
)
from cuflash.device.layer_norm_plans import LAYER_NORM_PARAMETERS
from cuflash.problem_fused import ACTIVATIONS, MatmulProblem
from cuflash.testing.fused import (
    LAYER_NORM_PROPERTIES,
    LAYOUTS,
    MATMUL_PROPERTIES,
    LayerNormCase,
    MatmulCase,
    layer_norm_cases,
    layer_norm_matches_oracle,
    layer_norm_vjp_matches_oracle,
    matmul_cases,
    matmul_matches_oracle,
)
from tests import devices
from tests.host_cuda import builder
from tests.host_cuda.engine import H200, HostCuda

pytestmark = pytest.mark.skipif(not builder.available(), reason="no C++ compiler")

#: Few blocks, so that each of them has several rows or tiles.
LIMITS = replace(H200, multiprocessors=2)
#: No TMA here: of the tensor cores, those of sm_80.
AMPERE = replace(LIMITS, compute_capability="80")
TURING = replace(LIMITS, compute_capability="75")


def use(patch, **options):
    """Let the public functions run the device engine on the CPU; return its executor."""
    emulated = HostCuda(**{"limits": LIMITS, **options})
    patch.setattr(engine, "load", lambda name: emulated)
    return emulated.executor


orders = st.sampled_from(builder.HostKernel.ORDERS)


@pytest.mark.parametrize("law", MATMUL_PROPERTIES)
@pytest.mark.parametrize("limits", [TURING, AMPERE], ids=["simt", "mma"])
def test_matmul(law, limits):
    @settings(max_examples=20)
    @given(case=matmul_cases(), order=orders, seed=st.integers(0, 99))
    def holds(case, order, seed):
        with pytest.MonkeyPatch.context() as patch:
            use(patch, limits=limits, order=order, seed=seed)
            MATMUL_PROPERTIES[law](fused.matmul_bias_activation, case)

    holds()


@pytest.mark.parametrize("sizes", [(130, 40, 129), (257, 136, 8), (1, 100, 264)])
@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
@pytest.mark.parametrize(
    ("dtype", "limits", "kernel"),
    [
        ("float16", AMPERE, "matmul_mma"),
        ("bfloat16", AMPERE, "matmul_mma"),
        ("float32", AMPERE, "matmul_wide"),
        ("float32", TURING, "matmul_simt"),
        ("float64", AMPERE, "matmul_wide"),
    ],
    ids=["float16", "bfloat16", "float32", "float32-simt", "float64"],
)
@pytest.mark.parametrize("order", builder.HostKernel.ORDERS)
def test_matmul_of_several_tiles(sizes, layout, dtype, limits, kernel, order, monkeypatch):
    executor = use(monkeypatch, limits=limits, order=order)
    case = MatmulCase(dtype, ((2,), ()), sizes, ("contiguous", layout, "steps"), "relu", 1)
    matmul_matches_oracle(fused.matmul_bias_activation, case)
    assert {kernel in launch.kernel.expression for launch in executor.launched} == {True}


def test_matmul_of_many_terms(monkeypatch):
    """Sums of float32 are added to others twice, and those to the last."""
    use(monkeypatch, limits=AMPERE)
    case = MatmulCase("float32", ((), ()), (3, 2 * WIDE_SUM_TERMS + 100, 5), LAYOUTS[:3], None, 1)
    matmul_matches_oracle(fused.matmul_bias_activation, case)


@pytest.mark.parametrize("limits", [TURING, AMPERE], ids=["simt", "mma"])
def test_matmul_of_operands_that_broadcast(limits, monkeypatch, rng):
    use(monkeypatch, limits=limits)
    row, matrix = rng.standard_normal(64), rng.standard_normal((64, 40))
    a = np.broadcast_to(row.astype(np.float16), (2, 9, 64))
    b = np.broadcast_to(matrix.astype(np.float16), (2, 64, 40))
    out = fused.matmul_bias_activation(a, b, np.broadcast_to(b[0, 0, 0], (40,)), activation=None)
    expected = a.astype(np.float64) @ b.astype(np.float64) + float(b[0, 0, 0])
    np.testing.assert_allclose(out, expected, rtol=2e-3, atol=2e-2)


@pytest.mark.parametrize(
    ("dtype", "batch", "sizes", "limits", "taken"),
    [
        ("float32", (), (4096, 4096, 4096), devices.H200, False),
        ("float32", (), (4096, 1, 4096), devices.H200, False),
        ("float32", (), (1, 4096, 4096), devices.H200, True),
        ("float32", (9,), (100, 4096, 1000), devices.H200, False),
        ("float32", (), (4096, 63, 4096), TURING, False),
        ("float32", (), (4096, 64, 4096), TURING, True),
        ("float64", (), (4096, 512, 4096), devices.H200, False),
        ("float64", (), (4096, 768, 4096), devices.H200, True),
        ("float64", (), (64, 512, 64), devices.H200, True),
        ("float16", (), (1, 4096, 64), devices.H200, False),
    ],
)
def test_what_is_left_to_a_library(dtype, batch, sizes, limits, taken, monkeypatch):
    """Deep products that no kernel here computes as fast; none that would be rounded to TF32."""
    m, k, n = sizes
    shapes = {"a": (*batch, m, k), "b": (k, n), "bias": (n,)}
    arrays = {name: np.broadcast_to(np.zeros((), dtype), shape) for name, shape in shapes.items()}
    problem = MatmulProblem.of(arrays, None)
    monkeypatch.setenv("CUPY_TF32", "0")
    assert takes_library(problem, limits) is taken
    monkeypatch.setenv("CUPY_TF32", "1")
    assert takes_library(problem, limits) is (taken and dtype == "float64")


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("columns", [5, 16, 520])
def test_epilogue_of_a_library(activation, columns, rng):
    executor = HostCuda(limits=LIMITS).executor
    a, b = rng.standard_normal((2, 3, 70)), rng.standard_normal((70, columns))
    bias = rng.standard_normal(columns)
    product = a @ b
    problem = MatmulProblem.of({"a": a, "b": b, "bias": bias}, activation)
    compute_epilogue(problem, product, bias[::-1], executor)
    expected = fused.matmul_bias_activation(a, b, bias[::-1].copy(), activation=activation)
    np.testing.assert_allclose(product, expected, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("law", LAYER_NORM_PROPERTIES)
def test_layer_norm(law):
    @settings(max_examples=30)
    @given(case=layer_norm_cases(), order=orders, seed=st.integers(0, 99))
    def holds(case, order, seed):
        with pytest.MonkeyPatch.context() as patch:
            use(patch, order=order, seed=seed)
            LAYER_NORM_PROPERTIES[law](
                fused.dropout_bias_layer_norm, fused.dropout_bias_layer_norm_vjp, case
            )

    holds()


#: Rows and what holds them: octets, lanes and threads of the forward, octets and threads of the
#: gradients.
LONG = [
    ("float16", 4096, "true, true, 8, 64, 64", "true, true, 1, 512, 512"),
    ("bfloat16", 4104, "true, true, 8, 128, 128", "true, true, 2, 512, 512"),
    ("bfloat16", 16384, "true, true, 8, 256, 256", "true, true, 0, 0, 512"),
    ("bfloat16", 1032, "true, true, 8, 32, 64", "true, true, 1, 0, 512"),
    ("float32", 264, "true, true, 4, 0, 128", "true, true, 1, 0, 512"),
    ("float32", 520, "true, true, 4, 32, 128", "true, true, 1, 0, 512"),
    ("float32", 16392, "true, true, 0, 0, 512", "true, true, 0, 0, 512"),
    ("float32", 4099, "false, true, 0, 0, 512", "false, true, 0, 0, 512"),
    ("float64", 2048, "true, true, 4, 64, 64", "true, true, 1, 256, 256"),
    ("float64", 8192, "true, true, 4, 256, 256", "true, true, 0, 0, 512"),
]


@pytest.mark.parametrize(("dtype", "columns", "forward", "backward"), LONG)
def test_layer_norm_of_long_rows(dtype, columns, forward, backward, monkeypatch):
    executor = use(monkeypatch)
    case = LayerNormCase(
        dtype, (3, columns), "contiguous", 0.2, 7, 1, 1e-5, residual=True, mean=1.0, seed=3
    )
    functions = fused.dropout_bias_layer_norm, fused.dropout_bias_layer_norm_vjp
    layer_norm_matches_oracle(*functions, case)
    assert forward in executor.launched[-1].kernel.expression
    layer_norm_vjp_matches_oracle(*functions, case)
    assert backward in executor.launched[-2].kernel.expression


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("columns", [24, 519, 4096])
def test_rows_far_from_zero(dtype, columns, monkeypatch):
    """Where the squares' sum cancels; a row of one number has no variance at all."""
    use(monkeypatch)
    functions = fused.dropout_bias_layer_norm, fused.dropout_bias_layer_norm_vjp
    case = LayerNormCase(
        dtype, (5, columns), "contiguous", 0.0, 7, 1, 1e-5, residual=False, mean=-90.0, seed=3
    )
    layer_norm_matches_oracle(*functions, case)
    vectors = [case.operands()[name] for name in ("gamma", "beta")]
    x = np.full((3, columns), 77, vectors[0].dtype)
    y = functions[0](x, 0 * vectors[0], *vectors, p=0, seed=0)
    np.testing.assert_array_equal(y, np.broadcast_to(vectors[1], x.shape))


def test_views_of_long_rows_equal_copies(monkeypatch, rng):
    """Lanes of views that are read by elements have the octets that those of copies hold."""
    use(monkeypatch)
    x = rng.standard_normal((2, 8200)).astype(np.float32)
    vectors = rng.standard_normal((3, 8200)).astype(np.float32)
    y = fused.dropout_bias_layer_norm(x, *vectors, p=0.5, seed=1)
    memory = np.zeros(x.size + 1, np.float32)
    memory[1:] = x.ravel()
    view = memory[1:].reshape(x.shape)
    np.testing.assert_array_equal(fused.dropout_bias_layer_norm(view, *vectors, p=0.5, seed=1), y)


def test_a_block_that_has_room_for_no_row_reads_it_from_memory(monkeypatch, rng):
    """A row of float32 that fills 128 KB of shared memory, on a GPU that has half of it."""
    executor = use(monkeypatch, limits=devices.T4)
    x = rng.standard_normal((2, 16384)).astype(np.float32)
    vectors = rng.standard_normal((3, 16384)).astype(np.float32)
    y = fused.dropout_bias_layer_norm(x, *vectors, p=0.5, seed=1)
    assert "layer_norm<float, true, false, 0," in executor.launched[-1].kernel.expression
    monkeypatch.undo()
    expected = fused.dropout_bias_layer_norm(x, *vectors, p=0.5, seed=1)
    np.testing.assert_allclose(y, expected, atol=1e-4)


def test_dropout_by_any_first_element(monkeypatch):
    """Rows of any length begin at any lane of their counter."""
    use(monkeypatch)
    for columns in range(1, 20):
        shape, options = (5, columns), {"p": 0.4, "seed": 9, "offset": 3}
        kept = reference.dropout_mask(shape, **options)
        stats, vector = np.zeros(5), np.ones(columns)
        dy = np.eye(5, columns) + 2
        grads = fused.dropout_bias_layer_norm_vjp(
            dy, np.zeros(shape), 0 * vector, vector, stats, stats + 1, **options,
            residual=np.zeros(shape),
        )  # fmt: skip
        np.testing.assert_array_equal(grads.dx != 0, kept & (grads.dresidual != 0))


@pytest.mark.parametrize("dtype", ["float64", "float16"])  # in pairs, and one at a time
def test_the_element_at_the_threshold_is_kept(dtype, monkeypatch):
    """Of lanes (2 i, 2 i + 1) = (x, y), p = x / 65536 keeps x; what lies one above drops it."""
    use(monkeypatch)
    lanes = reference.philox((9, 0), (0, 0, 0, 0))
    vector, dy = np.ones(8, dtype), np.arange(8, dtype=dtype)[None]
    stats = np.zeros(1, np.float64 if dtype == "float64" else np.float32)
    for element in range(8):
        lane = lanes[element // 2] >> 16 * (element % 2) & 0xFFFF
        for threshold in (lane, lane + 1):
            grads = fused.dropout_bias_layer_norm_vjp(
                dy, 0 * dy, 0 * vector, vector, stats, stats + 1, p=threshold / 65536, seed=9
            )
            assert (grads.dx[0, element] != 0) == (threshold == lane)


def test_teams_without_rows_leave_no_sums(monkeypatch, rng):
    """Blocks of many teams, of which few have a row: the sums of the others are 0, not memory."""
    use(monkeypatch, limits=H200)
    x, dy = rng.standard_normal((2, 3, 64))
    stats = np.zeros(3), np.ones(3)
    grads = fused.dropout_bias_layer_norm_vjp(dy, x, np.zeros(64), np.ones(64), *stats, p=0, seed=0)
    np.testing.assert_allclose(grads.dbeta, dy.sum(axis=0), rtol=1e-14)
    empty = x[:0], np.zeros(64), np.ones(64), stats[0][:0], stats[1][:0]
    for name, grad in (
        fused.dropout_bias_layer_norm_vjp(dy[:0], *empty, p=0.5, seed=0)._asdict().items()
    ):
        if name in ("dbias", "dgamma", "dbeta"):
            np.testing.assert_array_equal(grad, 0.0)


@pytest.mark.parametrize(
    ("source", "block"),
    [
        ("fused/matmul_simt.cu", MATMUL_PARAMETERS),
        ("fused/epilogue.cu", EPILOGUE_PARAMETERS),
        ("fused/layer_norm.cu", LAYER_NORM_PARAMETERS),
    ],
    ids=["matmul", "epilogue", "layer_norm"],
)
def test_parameters_lie_where_the_kernel_reads_them(source, block):
    expected = {"sizeof": block.dtype.itemsize, **block.layout()}
    assert builder.c_layout(source, block) == expected
