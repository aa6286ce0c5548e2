r"""A Gaussian kernel density in 64 dimensions: which patches of a photograph are common.

With the data whitened, ``z = L^-1 (x - mean) / h`` for the Cholesky factor L of their covariance,
the logarithm of the density at x is, up to a constant and -|z|^2 / 2,

    log sum_j exp(z . z_j - |z_j|^2 / 2),

one `cuflash.flash_logsumexp` with a bias for each key. `scipy.stats.gaussian_kde` is the same; what
it holds at a time grows with the number of points, ours does not::

    python -m examples.kernel_density                       # seconds on two CPU cores
    python -m examples.kernel_density --plot patches.png
    python -m examples.kernel_density --full --array-library cupy   # 179 GB as a matrix

The density is that of half of the patches, and h what makes the other half most likely. The
photograph comes with matplotlib.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

import cuflash
from examples.points import PATCH, Bar, command_line, describe_size, patches, to_numpy

#: Factors h to choose from; Scott's rule, n^(-1 / (d + 4)), gives 0.84 to 0.89 here.
FACTORS = (0.5, 0.7, 0.85, 1.0, 1.2)


class Density:
    """A Gaussian kernel density.

    Parameters
    ----------
    data : array, shape (n, d)
        NumPy or CuPy.
    factor : float
        Bandwidth: the kernel's covariance is ``factor**2`` times that of the data.
    xp : module
        The library of the data.
    """

    def __init__(self, data: Any, factor: float, xp: Any = np) -> None:
        n, d = data.shape
        self.mean = data.mean(axis=0, dtype=np.float64)
        centred = data - self.mean
        covariance = to_numpy(centred.T @ centred) / (n - 1)
        lower = factor * np.linalg.cholesky(covariance)  # small: on the host
        self.inverse = xp.asarray(np.linalg.inv(lower).T)
        log_det = float(np.log(np.diag(lower)).sum())
        self.log_norm = math.log(n) + log_det + d / 2 * math.log(2 * math.pi)
        self.points = self.whitened(data)
        self.bias = -(self.points**2).sum(axis=-1) / 2

    def whitened(self, x: Any) -> Any:
        """Return points in units of the kernel."""
        return ((x - self.mean) @ self.inverse).astype(x.dtype)

    def logpdf(self, x: Any) -> Any:
        """Return the logarithm of the density at x: shape (m, d) to (m,)."""
        z = self.whitened(x)
        lse = cuflash.flash_logsumexp(z, self.points, scale=1.0, bias=self.bias)
        return lse - (z * z).sum(axis=-1) / 2 - self.log_norm


def sample(size: int | None, dtype: str) -> tuple[np.ndarray, np.ndarray, tuple[int, int] | None]:
    """Return patches to make a density of, and others: in all `size` at random places, or all.

    All are those of even and of odd rows; with them comes how many the latter are each way. A grey
    level is an interval: noise of its width keeps equal patches apart.
    """
    windows, rng = patches(), np.random.default_rng(0)
    halves, shape = [windows[::2], windows[1::2]], None
    if size is None:
        shape = halves[1].shape[:2]
    else:
        flat = windows.reshape(-1, PATCH * PATCH)
        flat = flat[rng.choice(len(flat), min(size, len(flat)), replace=False)]
        halves = [flat[::2], flat[1::2]]
    x, y = (half.reshape(-1, PATCH * PATCH) for half in halves)
    x, y = ((half + rng.random(half.shape) / 255).astype(dtype) for half in (x, y))
    return x, y, shape


def verify(xp: Any, dtype: str) -> float:
    """Return the largest difference of a log density to SciPy's."""
    from scipy.stats import gaussian_kde

    x, y, _ = sample(500, dtype)
    density = gaussian_kde(x.T.astype(np.float64), 0.85)
    ours = to_numpy(Density(xp.asarray(x), 0.85, xp).logpdf(xp.asarray(y)))
    return float(abs(ours - density.logpdf(y.T.astype(np.float64))).max())


def plot(x: np.ndarray, logpdf: np.ndarray, shape: tuple[int, int] | None) -> Any:
    """Draw the most and the least common patches, and a map of all; returns a matplotlib figure."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5), layout="constrained")
    order = np.argsort(logpdf)
    left, right = figure.subplots(1, 2)
    chosen = order[np.linspace(0, len(order) - 1, 64).astype(int)]
    tiles = x[chosen].reshape(8, 8, PATCH, PATCH)
    sheet = np.pad(tiles, ((0, 0), (0, 0), (1, 1), (1, 1))).swapaxes(1, 2)
    left.imshow(sheet.reshape(8 * (PATCH + 2), -1), cmap="gray", vmin=0, vmax=1)
    left.set(title="patches, from rare to common", xticks=[], yticks=[])
    if shape is None:
        right.hist(logpdf, bins=100)
        right.set(xlabel="log density", ylabel="patches")
    else:
        right.imshow(logpdf.reshape(shape))
        right.set(title="log density of the patch at each place", xticks=[], yticks=[])
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """Choose a bandwidth, and say how likely patches are."""
    args, xp = command_line(__doc__, argv, full="all patches of the photograph", peer="scipy")
    data, others, shape = sample(None if args.full else args.size, args.dtype)
    x, y = xp.asarray(data), xp.asarray(others)
    print(describe_size(len(y), len(x), x.dtype))
    bar, found = Bar(len(FACTORS)), {}
    for factor in FACTORS:
        found[factor] = to_numpy(Density(x, factor, xp).logpdf(y))
        bar(len(x) * len(y))
    best = max(FACTORS, key=lambda factor: found[factor].mean())
    for factor, logpdf in found.items():
        chosen = "  <- the most likely" if factor == best else ""
        print(f"h = {factor}: mean log density {logpdf.mean():.2f}{chosen}")
    if args.verify:
        print(f"largest difference to scipy.stats.gaussian_kde: {verify(xp, args.dtype):.1e}")
    if args.plot:
        plot(others, found[best], shape).savefig(args.plot)


if __name__ == "__main__":
    main()
