"""Kernel regression, kernel density, optimal transport: against libraries, in little memory."""

import importlib.util
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from scipy.optimize import linear_sum_assignment
from scipy.special import logsumexp

pytest.importorskip("matplotlib", reason="the data come with matplotlib")

from examples import kernel_density, kernel_regression, optimal_transport, points
from examples.kernel_density import Density
from examples.kernel_regression import leave_one_out, regress
from examples.optimal_transport import Measure, cost, destinations, measures, sinkhorn

PROGRAMS = [kernel_regression, kernel_density, optimal_transport]


@pytest.mark.parametrize(
    ("program", "of_float64", "of_float32"),
    [
        (kernel_regression, 1e-9, 1e-2),
        (kernel_density, 1e-7, 1e-2),
        (optimal_transport, 1e-9, 1e-4),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_agrees_with_another_library(
    program: ModuleType, of_float64: float, of_float32: float, dtype: str
) -> None:
    if program is optimal_transport:
        pytest.importorskip("ot", reason="POT is not installed")
    assert program.verify(np, dtype) < (of_float64 if dtype == "float64" else of_float32)


def test_leaving_one_out_is_the_regression_without_it(rng: np.random.Generator) -> None:
    y, v, log_weights = rng.random((40, 2)), rng.normal(size=40), rng.normal(size=40)
    for i, estimate in enumerate(leave_one_out(y, v, 0.2, log_weights)):
        others = np.arange(40) != i
        direct, _ = regress(y[i : i + 1], y[others], v[others], 0.2, log_weights[others])
        np.testing.assert_allclose(estimate, direct[0], 1e-9)


def test_density_adds_up_to_one(rng: np.random.Generator) -> None:
    density = Density(rng.normal(size=(50, 1)) * 3, 0.3)
    x = np.linspace(-40, 40, 20_001)
    assert np.exp(density.logpdf(x[:, None])).sum() * (x[1] - x[0]) == pytest.approx(1, rel=1e-9)


def test_iterations_are_those_of_the_formula(rng: np.random.Generator) -> None:
    x, y = rng.random((30, 3)), rng.random((20, 3))
    a, b = rng.dirichlet(np.ones(30)), rng.dirichlet(np.ones(20))
    plan = sinkhorn(Measure(x, a), Measure(y, b), (0.3, 0.1), 7)
    costs = ((x[:, None] - y) ** 2).sum(axis=-1) / 2
    f, g = np.zeros(30), np.zeros(20)
    for epsilon in (0.3, 0.1):
        for _ in range(7):
            f = -epsilon * logsumexp((g - costs) / epsilon, axis=1, b=b)
            g = -epsilon * logsumexp((f[:, None] - costs) / epsilon, axis=0, b=a[:, None])
    np.testing.assert_allclose(plan.f, f, 1e-11, 1e-13)
    np.testing.assert_allclose(plan.g, g, 1e-11, 1e-13)
    weights = b * np.exp((g - costs) / 0.1)
    weights /= weights.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(destinations(plan), weights @ y, 1e-11)


def test_little_entropy_is_the_best_assignment(rng: np.random.Generator) -> None:
    (x, y), ones = rng.random((2, 12, 2)), np.full(12, 1 / 12)
    schedule = 0.1 * 0.5 ** np.arange(11)
    plan = sinkhorn(Measure(x, ones), Measure(y, ones), schedule.tolist(), 200)
    costs = ((x[:, None] - y) ** 2).sum(axis=-1) / 2
    rows, columns = linear_sum_assignment(costs)
    assert cost(plan) == pytest.approx(costs[rows, columns].mean(), rel=1e-3)


def test_earth_is_neither_made_nor_lost() -> None:
    source, target = measures(np.arange(0, 138_632, 700), "float64", np)
    assert source.masses.sum() == pytest.approx(1) == target.masses.sum()
    notes: list[str] = []
    plan = sinkhorn(source, target, (0.05,), 300, lambda pairs, note: notes.append(note))
    amiss = [float(note.split()[1]) for note in notes]
    assert amiss[0] > 0.05
    assert amiss[-1] < 1e-10
    middle = (source.masses[:, None] * destinations(plan)).sum(axis=0)
    np.testing.assert_allclose(middle, (target.masses[:, None] * target.points).sum(axis=0))


def calls(size: int) -> list[tuple[Callable[[], object], int]]:
    """Return what each example does, at a size, and the pairs it is about."""
    rng = np.random.default_rng(0)
    x, v = rng.random((size, 2)), rng.random(size)
    of_patches = rng.normal(size=(size, 64))
    measure = Measure(x, np.full(size, 1 / size))
    return [
        (lambda: regress(x, x, v, 0.1, 0 * v), size**2),
        (lambda: Density(of_patches, 0.8).logpdf(of_patches), size**2),
        (lambda: sinkhorn(measure, measure, (0.1,), 1), size**2),
    ]


@pytest.mark.parametrize("which", range(3), ids=[p.__name__ for p in PROGRAMS])
def test_matrix_is_never_built(which: int) -> None:
    call, pairs = calls(4000)[which]
    call()
    tracemalloc.start()
    call()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 * pairs / 4


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_program_draws_and_reports(
    program: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "picture.png"
    verify = ["--verify"] * (
        program is not optimal_transport or bool(importlib.util.find_spec("ot"))
    )
    program.main(["--size", "300", "--plot", str(picture), *verify])
    printed = capsys.readouterr()
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "as a matrix, which is never built" in printed.out
    assert ("largest difference" in printed.out) == bool(verify)
    assert re.search(r"\] (\d+) of \1, ", printed.err)
    assert printed.err.endswith("\n")


def test_regression_finds_the_ground(capsys: pytest.CaptureFixture[str]) -> None:
    kernel_regression.main(["--size", "2000"])
    flat, estimate = re.findall(r"([\d.]+) m$", capsys.readouterr().out, re.MULTILINE)
    assert float(estimate) < float(flat) / 2


def test_data_are_what_they_are() -> None:
    ground, windows = points.terrain(), points.patches()
    assert ground.heights.shape == (344, 403)
    assert (ground.heights.min(), ground.heights.max()) == (236, 1076)
    assert ground.places.shape == (344 * 403, 2)
    assert abs(ground.places).max() < 0.5
    assert windows.shape == (593, 505, 64)
    assert 0 <= windows.min() < windows.max() <= 1


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--size", "9"], "--size 9: 100 or more are needed"),
        (["--plot", "nowhere/at.png"], "no such folder"),
        (["--plot", "picture.what"], "name a .png, .svg or .pdf file"),
    ],
)
def test_arguments_are_refused_before_the_work(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        kernel_density.main(arguments)
    assert told in capsys.readouterr().err
