r"""Kernel regression as attention: a terrain from noisy measurements, good ones and bad ones.

The estimate of Nadaraya and Watson (1964) at x is the mean of the measurements v_j at y_j with the
weights w_j exp(-|x - y_j|^2 / 2 h^2). In units of the bandwidth h that is attention of x to y with
the scores x.y_j - |y_j|^2 / 2 + log w_j: a bias for each key, which holds the precision w_j of a
measurement, and memory linear in the number of points::

    python -m examples.kernel_regression                    # seconds on two CPU cores
    python -m examples.kernel_regression --plot terrain.png
    python -m examples.kernel_regression --full --array-library cupy   # 154 GB as a matrix

h is chosen by leaving one out: the share of a measurement in its own estimate follows from lse, so
that no measurement needs a sum of its own. The terrain comes with matplotlib.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import cuflash
from examples.points import Bar, Terrain, command_line, describe_size, terrain, to_numpy

#: Errors, in metres, of the two kinds of measurements, and the share of the good ones.
ERRORS, GOOD = (10.0, 150.0), 0.3
#: Bandwidths to choose from, in distances between neighbouring measurements.
BANDWIDTHS = (0.35, 0.5, 0.7, 1.0, 1.4)


def regress(x: Any, y: Any, v: Any, bandwidth: float, log_weights: Any) -> tuple[Any, Any]:
    """Estimate values at x from values v at y.

    Parameters
    ----------
    x : array, shape (M, D)
        Where to estimate.
    y, v : array, shape (N, D) and (N,)
        Where what was measured.
    bandwidth : float
        Standard deviation of the Gaussian kernel.
    log_weights : array, shape (N,)
        Of each measurement.

    Returns
    -------
    estimate, log_total : array, shape (M,)
        The weighted mean, and the logarithm of the sum of its weights.
    """
    x, y = x / bandwidth, y / bandwidth
    bias = log_weights - (y * y).sum(axis=-1) / 2
    out, lse = cuflash.flash_attention(x, y, v[:, None], scale=1.0, bias=bias, return_lse=True)
    return out[:, 0], lse - (x * x).sum(axis=-1) / 2


def leave_one_out(y: Any, v: Any, bandwidth: float, log_weights: Any) -> Any:
    """Estimate each value from all others: shape (N,)."""
    estimate, log_total = regress(y, y, v, bandwidth, log_weights)
    # A share of one, to rounding, is that of a point without neighbours.
    share = np.exp(log_weights - log_total).clip(0, 1 - 1e-6)
    return (estimate - share * v) / (1 - share)


def error(estimate: Any, v: Any, weights: Any) -> float:
    """Return the root of the weighted mean of the squared error."""
    return float((weights * (estimate - v) ** 2).sum() / weights.sum()) ** 0.5


def verify(xp: Any, dtype: str) -> float:
    """Return the largest difference, in metres, to the formula with all weights in memory."""
    from scipy.spatial.distance import cdist

    ground, rng = terrain(), np.random.default_rng(1)
    at = rng.choice(ground.heights.size, 500, replace=False)
    x, y, v = ground.places[at], ground.places[at[:300]], ground.heights.ravel()[at[:300]]
    log_weights, bandwidth = rng.normal(size=300), 0.05
    weights = np.exp(log_weights - cdist(x, y, "sqeuclidean") / (2 * bandwidth**2))
    arrays = (xp.asarray(a.astype(dtype)) for a in (x, y, v, log_weights))
    x, y, v, log_weights = arrays
    estimate, _ = regress(x, y, v, bandwidth, log_weights)
    return float(abs(to_numpy(estimate) - weights @ to_numpy(v) / weights.sum(axis=1)).max())


def plot(ground: Terrain, measured: np.ndarray, at: np.ndarray, estimate: np.ndarray) -> Any:
    """Draw measurements, estimate and truth; returns a matplotlib figure."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4), layout="constrained")
    shown = np.full(ground.heights.size, np.nan)
    shown[at] = measured
    pictures = {"measured": shown, "estimated": estimate, "true": ground.heights}
    low, high = ground.heights.min(), ground.heights.max()
    for axes, (title, heights) in zip(figure.subplots(1, 3), pictures.items(), strict=True):
        heights = heights.reshape(ground.heights.shape)
        image = axes.imshow(heights, vmin=low, vmax=high, cmap="terrain", interpolation="none")
        axes.set(title=title, xticks=[], yticks=[])
    figure.colorbar(image, ax=figure.axes, label="metres")
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """Estimate every cell of the terrain from measurements of some, or of all."""
    args, xp = command_line(__doc__, argv, full="measure every cell", peer="scipy")
    ground, rng = terrain(), np.random.default_rng(0)
    cells = ground.heights.size
    at = np.arange(cells) if args.full else rng.choice(cells, min(args.size, cells), replace=False)
    deviation = np.where(rng.random(at.size) < GOOD, *ERRORS)
    measured = ground.heights.ravel()[at] + deviation * rng.standard_normal(at.size)

    arrays = ground.places, ground.places[at], measured, deviation**-2.0
    places, y, v, precision = (xp.asarray(a.astype(args.dtype)) for a in arrays)
    log_weights, mean = np.log(precision), v.mean()
    v = v - mean  # what is large and common would cost digits
    distance = (cells / at.size) ** 0.5 / max(ground.heights.shape)
    print(describe_size(cells, at.size, y.dtype))
    bar, errors = Bar(len(BANDWIDTHS) + 1), {}
    for factor in BANDWIDTHS:
        bandwidth = factor * distance
        errors[bandwidth] = error(leave_one_out(y, v, bandwidth, log_weights), v, precision)
        bar(at.size**2)
    best = min(errors, key=errors.__getitem__)
    estimate = to_numpy(regress(places, y, v, best, log_weights)[0]) + float(mean)
    bar(cells * at.size)
    ones = np.ones(cells)
    for name, heights in (("mean of all", np.full(cells, float(mean))), ("estimate", estimate)):
        print(f"error of the {name}: {error(heights, ground.heights.ravel(), ones):.1f} m")
    if args.verify:
        print(f"largest difference to the formula: {verify(xp, args.dtype):.1e} m")
    if args.plot:
        plot(ground, measured, at, estimate).savefig(args.plot)


if __name__ == "__main__":
    main()
