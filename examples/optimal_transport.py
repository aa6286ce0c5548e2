r"""Entropic optimal transport by Sinkhorn's iterations: how to level a mountain range.

Monge (1781) asked how to move earth from where it is to where it shall be, with the least work.
Here the earth is a terrain above its lowest point, and shall be level. With masses a_i at x_i and
b_j at y_j, the cost |x - y|^2 / 2 and an entropy of weight eps, the best plan is

    P_ij = a_i b_j exp((f_i + g_j - |x_i - y_j|^2 / 2) / eps),

and Sinkhorn's iterations set f, then g, so that one set of sums of P is right (Cuturi 2013,
arXiv:1306.0895). In the log domain each is a logsumexp over all pairs,

    f_i = |x_i|^2 / 2 - eps log sum_j exp(x_i . y_j / eps + bias_j),
    bias_j = (g_j - |y_j|^2 / 2) / eps + log b_j,

that is one `cuflash.flash_logsumexp` with the scale 1 / eps and a bias for each key: memory linear
in the number of points. Where the earth of x_i goes in the mean is attention to y with these
scores::

    python -m examples.optimal_transport                    # seconds on two CPU cores
    python -m examples.optimal_transport --plot level.png
    python -m examples.optimal_transport --full --dtype float32 --array-library cupy

With ``--full`` a cost matrix takes 77 GB in float32 and 154 GB in float64, and a solver in the log
domain has several. The terrain comes with matplotlib.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

import cuflash
from examples.points import CELL_METRES, Bar, command_line, describe_size, terrain, to_numpy

#: Weights of the entropy, in units of the squared longer side: each starts where the one before
#: ended, which takes far fewer iterations than the last alone (Schmitzer 2019, arXiv:1610.06519).
SCHEDULE = (0.1, 0.03, 0.01, 0.003, 0.001)
ITERATIONS = 10
"""Of each weight."""


class Measure(NamedTuple):
    """Masses, which sum to one, at points: shapes (N, D) and (N,)."""

    points: Any
    masses: Any


class Transport(NamedTuple):
    """What the iterations found for `source` (f) and `target` (g), at the last weight `epsilon`."""

    source: Measure
    target: Measure
    f: Any
    g: Any
    epsilon: float


def conjugate(at: Any, measure: Measure, potential: Any, epsilon: float) -> Any:
    """Return the potential at other points that makes the sums of the plan over `measure` right."""
    lse = cuflash.flash_logsumexp(
        at, measure.points, scale=1 / epsilon, bias=_bias(measure, potential, epsilon)
    )
    return (at * at).sum(axis=-1) / 2 - epsilon * lse


def _bias(measure: Measure, potential: Any, epsilon: float) -> Any:
    half_square = (measure.points**2).sum(axis=-1) / 2
    return (potential - half_square) / epsilon + np.log(measure.masses)


def sinkhorn(
    source: Measure,
    target: Measure,
    schedule: Sequence[float],
    iterations: int,
    progress: Callable[[int, str], None] = lambda pairs, note: None,
) -> Transport:
    """Solve entropic optimal transport.

    Parameters
    ----------
    source, target : Measure
        NumPy or CuPy.
    schedule : sequence of float
        Falling weights of the entropy.
    iterations : int
        Of each weight.
    progress : callable
        Called after each iteration with the pairs it took, and the mass that was not in place yet.
    """
    f, g = 0 * source.masses, 0 * target.masses
    for epsilon in schedule:
        for _ in range(iterations):
            f = conjugate(source.points, target, g, epsilon)
            before, g = g, conjugate(target.points, source, f, epsilon)
            # Before its update, the plan's sums over the source were b exp((before - g) / eps).
            amiss = (target.masses * abs(np.expm1((before - g) / epsilon))).sum()
            progress(2 * len(f) * len(g), f", {float(amiss):.1e} of the mass amiss")
    return Transport(source, target, f, g, schedule[-1])


def destinations(plan: Transport) -> Any:
    """Return where the mass at each point of the source goes in the mean: shape (N, D)."""
    return cuflash.flash_attention(
        plan.source.points,
        plan.target.points,
        plan.target.points,
        scale=1 / plan.epsilon,
        bias=_bias(plan.target, plan.g, plan.epsilon),
    )


def cost(plan: Transport) -> float:
    """Return the mean of ``|x - y|**2 / 2`` under the plan, from sums over its rows alone."""
    (x, a), (y, b) = plan.source, plan.target
    squares = (a * (x * x).sum(axis=-1)).sum() / 2 + (b * (y * y).sum(axis=-1)).sum() / 2
    return float(squares - (a * (x * destinations(plan)).sum(axis=-1)).sum())


def measures(at: np.ndarray, dtype: str, xp: Any) -> tuple[Measure, Measure]:
    """Return the earth of these cells of the terrain, and as much of it in each of them."""
    ground = terrain()
    earth = ground.heights.ravel()[at] - ground.heights.min() + 1.0
    points = xp.asarray(ground.places[at].astype(dtype))
    masses = xp.asarray((earth / earth.sum()).astype(dtype))
    return Measure(points, masses), Measure(points, xp.full_like(masses, 1 / len(masses)))


def verify(xp: Any, dtype: str) -> float:
    """Return the largest difference of a plan to POT's, relative to its largest mass."""
    import ot

    at = np.random.default_rng(1).choice(terrain().heights.size, 500, replace=False)
    source, target = measures(at, dtype, xp)
    plan = sinkhorn(source, target, (0.1, 0.02), 200)
    x, y, a, b, f, g = (
        to_numpy(z).astype(np.float64)
        for z in (source.points, target.points, source.masses, target.masses, plan.f, plan.g)
    )
    costs = ((x[:, None] - y) ** 2).sum(axis=-1) / 2
    ours = a[:, None] * b * np.exp((f[:, None] + g - costs) / plan.epsilon)
    a, b = a / a.sum(), b / b.sum()  # to its precision
    theirs = ot.sinkhorn(a, b, costs, plan.epsilon, method="sinkhorn_log", stopThr=1e-12)
    return float(abs(ours - theirs).max() / theirs.max())


def plot(heights: np.ndarray, at: np.ndarray, moves: np.ndarray) -> Any:
    """Draw the terrain and where its earth goes; returns a matplotlib figure."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 6), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(heights, cmap="terrain")
    rows, columns = np.unravel_index(at, heights.shape)
    shown = np.random.default_rng(0).choice(len(at), min(len(at), 600), replace=False)
    moved = moves[shown] * max(heights.shape)
    axes.quiver(
        columns[shown],
        rows[shown],
        moved[:, 1],
        moved[:, 0],
        angles="xy",
        scale_units="xy",
        scale=1,
    )
    axes.set(title="where the earth goes", xticks=[], yticks=[])
    figure.colorbar(image, ax=axes, label="metres")
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """Level the terrain, or as many of its cells as were asked for."""
    args, xp = command_line(__doc__, argv, full="all cells to all cells", peer="ot")
    heights = terrain().heights
    at, rng = np.arange(heights.size), np.random.default_rng(0)
    if not args.full:
        at = rng.choice(at, min(args.size, at.size), replace=False)
    source, target = measures(at, args.dtype, xp)
    print(describe_size(at.size, at.size, source.masses.dtype))
    bar = Bar(len(SCHEDULE) * ITERATIONS)
    plan = sinkhorn(source, target, SCHEDULE, ITERATIONS, bar)
    moves = to_numpy(destinations(plan) - source.points)
    ways = CELL_METRES * max(heights.shape) * np.hypot(*moves.T)
    print(f"the mean way of the earth: {(to_numpy(source.masses) * ways).sum():.0f} m")
    print(f"its cost, in units of the longer side squared: {cost(plan):.3e}")
    if args.verify:
        print(f"largest difference to POT's plan, relative: {verify(xp, args.dtype):.1e}")
    if args.plot:
        plot(heights, at, moves).savefig(args.plot)


if __name__ == "__main__":
    main()
