"""A small character language model, trained in NumPy or CuPy by gradients written by hand.

No framework: each layer is a class of a few lines with its backward beside its forward, and
attention is `cuflash.flash_attention` with `cuflash.flash_attention_vjp`. The model is a
transformer (Vaswani et al. 2017, arXiv:1706.03762) of two blocks that normalise their input first,
as in GPT-2; the text is eight sonnets of Shakespeare, which it learns by heart::

    python examples/train_tiny.py                        # under a minute on two CPU cores
    python examples/train_tiny.py --plot loss.png        # and a picture of the loss
    python examples/train_tiny.py --array-library cupy   # on a GPU, by the same code

The loss is the mean of -log(probability of the next character). It starts near log(55) = 4.0, a
guess among the 55 characters of the text, and ends below 0.3. What remains is mostly the first
characters of a window, before which there is nothing to tell by. The seed determines everything.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from threadpoolctl import ThreadpoolController

import cuflash

#: In the public domain.
TEXT = Path(__file__).resolve().parent / "data/sonnets.txt"
TEXT_SOURCE = "William Shakespeare, sonnets 18, 29, 30, 55, 60, 73, 116 and 130 (1609)"

#: What the loss falls below by the default options, as the mean of the last REPORTED steps.
TARGET = 0.3
REPORTED = 10

#: Products this small gain little from more threads, and lose much where cores are shared.
one_blas_thread = ThreadpoolController().wrap(limits=1, user_api="blas")


@dataclass(frozen=True)
class Config:
    """B windows of T characters a step; C features, in H heads; blocks; Adam's largest rate."""

    batch: int = 16
    context: int = 64
    features: int = 64
    heads: int = 4
    blocks: int = 2
    rate: float = 8e-3


# ------------------------------------------------------------------------------------------ layers
#
# `y, saved = layer(x)` is the forward, which saves what the backward needs, and
# `dx = layer.vjp(dy, saved)` the backward: dy is the gradient of the loss with respect to y, dx
# that with respect to x. Those with respect to the layer's parameters are added to what these hold.


class Parameter:
    """An array that is learnt, and the gradient of the loss with respect to it."""

    def __init__(self, value: Any) -> None:
        self.value, self.gradient = value, 0 * value


class Source:
    """Where first values come from: the same numbers in every array library, by the seed."""

    def __init__(self, seed: int, xp: ModuleType = np, dtype: Any = np.float32) -> None:
        self.rng, self.xp, self.dtype = np.random.default_rng(seed), xp, dtype

    def normal(self, *shape: int, deviation: float) -> Parameter:
        """Return a parameter of independent normal values with mean 0."""
        values = deviation * self.rng.standard_normal(shape)
        return Parameter(self.xp.asarray(values, self.dtype))

    def constant(self, *shape: int, value: float) -> Parameter:
        """Return a parameter that is the same everywhere."""
        return Parameter(self.xp.full(shape, value, self.dtype))


class Layer:
    """A differentiable function of arrays (B, T, ...), with its parameters."""

    parameters: tuple[Parameter, ...] = ()

    def __call__(self, x: Any) -> tuple[Any, Any]:
        """Return y, and what `vjp` needs of this call."""
        raise NotImplementedError

    def vjp(self, dy: Any, saved: Any) -> Any:
        """Add to the gradients of the parameters, and return dx."""
        raise NotImplementedError


class Embedding(Layer):
    """Character ids (B, T) to vectors (B, T, C): one of the character and one of its place."""

    def __init__(self, source: Source, characters: int, places: int, size: int) -> None:
        # At first, what a character is counts for more than where it stands.
        self.characters = source.normal(characters, size, deviation=size**-0.5)
        self.places = source.normal(places, size, deviation=0.2 * size**-0.5)
        self.parameters = self.characters, self.places
        self.xp = source.xp

    def __call__(self, ids: Any) -> tuple[Any, Any]:
        """Look both up, and add them."""
        return self.characters.value[ids] + self.places.value[: ids.shape[1]], ids

    def vjp(self, dy: Any, ids: Any) -> None:
        """Add dy to the rows that were looked up; ids have no gradient."""
        # By a product with one-hot rows the order of the sums is the same in every run; the atomic
        # additions of a scatter have none on a GPU.
        hot = one_hot(ids, len(self.characters.value), dy.dtype, self.xp)
        self.characters.gradient += rows(hot).T @ rows(dy)
        self.places.gradient[: dy.shape[1]] += dy.sum(axis=0)


class Affine(Layer):
    """``x @ weight + bias``; a gain of 1 keeps the size of x at first."""

    def __init__(self, source: Source, size_in: int, size_out: int, gain: float = 1) -> None:
        self.weight = source.normal(size_in, size_out, deviation=gain * size_in**-0.5)
        self.bias = source.constant(size_out, value=0)
        self.parameters = self.weight, self.bias

    def __call__(self, x: Any) -> tuple[Any, Any]:
        """Return ``x @ weight + bias``, and x."""
        return product(x, self.weight.value) + self.bias.value, x

    def vjp(self, dy: Any, x: Any) -> Any:
        """Add ``x.T @ dy`` to dweight and the sum of dy to dbias; return ``dy @ weight.T``."""
        self.weight.gradient += rows(x).T @ rows(dy)
        self.bias.gradient += rows(dy).sum(axis=0)
        return product(dy, self.weight.value.T)


class LayerNorm(Layer):
    """Each vector to mean 0 and variance 1; then gain and bias."""

    def __init__(self, source: Source, size: int) -> None:
        self.gain = source.constant(size, value=1)
        self.bias = source.constant(size, value=0)
        self.parameters = self.gain, self.bias

    def __call__(self, x: Any) -> tuple[Any, Any]:
        """Return ``(x - mean) / sqrt(variance + epsilon) * gain + bias``."""
        centred = x - x.mean(axis=-1, keepdims=True)
        scale = ((centred * centred).mean(axis=-1, keepdims=True) + 1e-5) ** -0.5
        normal = centred * scale
        return normal * self.gain.value + self.bias.value, (normal, scale)

    def vjp(self, dy: Any, saved: Any) -> Any:
        """Return dx, without parts along 1 and x: adding those to x would not change y."""
        normal, scale = saved
        self.gain.gradient += rows(dy * normal).sum(axis=0)
        self.bias.gradient += rows(dy).sum(axis=0)
        dnormal = dy * self.gain.value
        along = (dnormal * normal).mean(axis=-1, keepdims=True)
        return scale * (dnormal - dnormal.mean(axis=-1, keepdims=True) - along * normal)


class Gelu(Layer):
    """``x * Phi(x)`` by tanh (Hendrycks and Gimpel 2016, arXiv:1606.08415)."""

    def __init__(self, xp: ModuleType) -> None:
        self.xp = xp

    def __call__(self, x: Any) -> tuple[Any, Any]:
        """Return ``x * (1 + tanh(z)) / 2`` with z = sqrt(2 / pi) (x + 0.044715 x^3)."""
        tanh = self.xp.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x))
        return x * (1 + tanh) / 2, (x, tanh)

    def vjp(self, dy: Any, saved: Any) -> Any:
        """Apply the product rule, with ``tanh' = 1 - tanh**2``."""
        x, tanh = saved
        slope = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x * x) * (1 - tanh * tanh)
        return dy * (1 + tanh + x * slope) / 2


class Heads(Layer):
    """Causal attention: q, k and v side by side (B, T, 3C), in H heads, to (B, T, C)."""

    def __init__(self, heads: int, xp: ModuleType) -> None:
        self.heads, self.xp = heads, xp

    def split(self, qkv: Any) -> Any:
        """View (B, T, 3C) as q, k and v, each (B, H, T, D): flash attention takes any strides."""
        return qkv.reshape(*qkv.shape[:2], 3, self.heads, -1).transpose(2, 0, 3, 1, 4)

    def __call__(self, qkv: Any) -> tuple[Any, Any]:
        """Return ``softmax(q @ k.T / sqrt(D)) @ v``, where no character sees a later one."""
        q, k, v = self.split(qkv)
        out, lse = cuflash.flash_attention(q, k, v, causal=True, return_lse=True)
        batch, heads, tokens, size = out.shape
        joined = out.swapaxes(1, 2).reshape(batch, tokens, heads * size)
        return joined, (qkv, out, lse)

    def vjp(self, dy: Any, saved: Any) -> Any:
        """Compute the T x T weights again from q, k and lse, a tile at a time: none are saved."""
        qkv, out, lse = saved
        q, k, v = self.split(qkv)
        dout = dy.reshape(*dy.shape[:2], self.heads, -1).swapaxes(1, 2)
        dqkv = self.xp.empty_like(qkv)
        grads = cuflash.AttentionGrads(*self.split(dqkv))
        cuflash.flash_attention_vjp(
            dout, q, k, v, out, lse, causal=True, deterministic=True, grads=grads
        )
        return dqkv


class Chain(Layer):
    """One layer after the other; backward, the other way round."""

    def __init__(self, *layers: Layer) -> None:
        self.layers = layers
        self.parameters = tuple(p for layer in layers for p in layer.parameters)

    def __call__(self, x: Any) -> tuple[Any, Any]:
        """Apply the layers in turn, and keep what each of them saves."""
        saved = []
        for layer in self.layers:
            x, of_layer = layer(x)
            saved.append(of_layer)
        return x, saved

    def vjp(self, dy: Any, saved: Any) -> Any:
        """Go back, last layer first: each takes the gradient of what it gave."""
        for layer, of_layer in zip(reversed(self.layers), reversed(saved), strict=True):
            dy = layer.vjp(dy, of_layer)
        return dy


class Residual(Chain):
    """``x + chain(x)``: what the chain adds to x."""

    def __call__(self, x: Any) -> tuple[Any, Any]:
        """Return ``x + chain(x)``."""
        y, saved = super().__call__(x)
        return x + y, saved

    def vjp(self, dy: Any, saved: Any) -> Any:
        """Return ``dy`` by the direct way, plus what comes back through the chain."""
        return dy + super().vjp(dy, saved)


def rows(x: Any) -> Any:
    """View (..., C) as (tokens, C)."""
    return x.reshape(-1, x.shape[-1])


def product(x: Any, matrix: Any) -> Any:
    """``x @ matrix`` as one product of matrices: NumPy would make one of each batch entry."""
    return (rows(x) @ matrix).reshape(*x.shape[:-1], -1)


def one_hot(ids: Any, size: int, dtype: Any, xp: ModuleType) -> Any:
    """(...) ids to (..., size): 1 at the id, else 0."""
    return xp.eye(size, dtype=dtype)[ids]


# ---------------------------------------------------------------------------------- model and loss


class Model(Chain):
    """Ids (B, T) to scores (B, T, V) of the character that follows each.

    Parameters
    ----------
    vocabulary : str
        The V characters; an id is an index into it.
    config : Config
        Sizes.
    seed : int
        Of the first weights.
    xp : module
        numpy or cupy.
    dtype : dtype
        float32, or float64 to check gradients.
    """

    def __init__(
        self,
        vocabulary: str,
        config: Config,
        *,
        seed: int = 0,
        xp: ModuleType = np,
        dtype: Any = np.float32,
    ) -> None:
        self.vocabulary, self.config, self.xp = vocabulary, config, xp
        source, size = Source(seed, xp, dtype), config.features
        layers: list[Layer] = [Embedding(source, len(vocabulary), config.context, size)]
        for _ in range(config.blocks):
            layers += [
                Residual(
                    LayerNorm(source, size),
                    Affine(source, size, 3 * size),
                    Heads(config.heads, xp),
                    Affine(source, size, size, gain=0.1),
                ),
                Residual(
                    LayerNorm(source, size),
                    Affine(source, size, 4 * size),
                    Gelu(xp),
                    Affine(source, 4 * size, size, gain=0.1),
                ),
            ]
        super().__init__(*layers, LayerNorm(source, size), Affine(source, size, len(vocabulary)))

    def encode(self, text: str) -> np.ndarray:
        """Characters to ids, on the host."""
        index = {character: i for i, character in enumerate(self.vocabulary)}
        return np.array([index[character] for character in text])

    @one_blas_thread
    def backpropagate(self, ids: Any, following: Any) -> float:
        """Return the loss, and add its gradients to the parameters'.

        It is the mean of -log(probability) of the characters `following`, (B, T), each after those
        of `ids`, (B, T), that stand before it.
        """
        scores, saved = self(ids)
        log_p = cuflash.log_softmax(scores)
        hot = one_hot(following, len(self.vocabulary), scores.dtype, self.xp) / following.size
        self.vjp(cuflash.log_softmax_vjp(-hot, log_p), saved)
        return -float((hot * log_p).sum())

    @one_blas_thread
    def probabilities(self, ids: Sequence[int], temperature: float = 1) -> np.ndarray:
        """Return those of the character that follows, float64 on the host."""
        scores, _ = self(self.xp.asarray([ids]))
        return to_numpy(cuflash.softmax(scores[0, -1].astype(np.float64) / temperature))

    def sample(
        self, start: str, count: int, *, seed: int = 0, temperature: float = 0.5
    ) -> Iterator[str]:
        """Draw `count` characters, each from the probabilities after those before it.

        Below a temperature of 1 what is likely is drawn more often still, and what is not less.
        """
        rng, ids = np.random.default_rng(seed), self.encode(start).tolist()
        for _ in range(count):
            probabilities = self.probabilities(ids[-self.config.context :], temperature)
            ids.append(int(rng.choice(len(self.vocabulary), p=probabilities)))
            yield self.vocabulary[ids[-1]]


# ---------------------------------------------------------------------------------------- training


class Adam:
    """Steps against the gradient, each entry's by its own scale (Kingma and Ba 2015).

    arXiv:1412.6980, algorithm 1.
    """

    decay = 0.9, 0.99
    epsilon = 1e-8

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        self.parameters, self.steps = parameters, 0
        self.moments = [(0 * p.value, 0 * p.value) for p in parameters]

    def step(self, rate: float) -> None:
        """Change the parameters by their gradients, which are 0 afterwards."""
        self.steps += 1
        unbias_mean, unbias_square = (1 - decay**self.steps for decay in self.decay)
        for p, (mean, square) in zip(self.parameters, self.moments, strict=True):
            mean += (1 - self.decay[0]) * (p.gradient - mean)
            square += (1 - self.decay[1]) * (p.gradient * p.gradient - square)
            scale = (square / unbias_square) ** 0.5 + self.epsilon
            p.value -= rate / unbias_mean * mean / scale
            p.gradient[...] = 0


def train(model: Model, text: str, steps: int, seed: int = 0) -> Iterator[float]:
    """Train on windows of the text at random places; yield each step's loss."""
    config, rng = model.config, np.random.default_rng(seed)
    windows = np.lib.stride_tricks.sliding_window_view(model.encode(text), config.context + 1)
    adam = Adam(model.parameters)
    for step in range(steps):
        batch = model.xp.asarray(windows[rng.integers(len(windows), size=config.batch)])
        loss = model.backpropagate(batch[:, :-1], batch[:, 1:])
        # The rate rises at first, while Adam knows little, and falls to 0 at the end.
        adam.step(config.rate * min(1, (step + 1) / 20) * (1 - step / steps))
        yield loss


# ----------------------------------------------------------------------------------------- program


class Bar:
    """A progress bar on standard error, with the loss."""

    width = 32

    def __init__(self, total: int) -> None:
        self.total, self.start = total, time.perf_counter()

    def __call__(self, done: int, loss: float) -> None:
        """Draw the bar; end the line when all is done."""
        bar = "#" * (self.width * done // self.total)
        seconds = time.perf_counter() - self.start
        print(
            f"\r[{bar:<{self.width}}] {done} of {self.total}, {seconds:.1f} s, loss {loss:.2f}",
            end="\n" if done == self.total else "",
            file=sys.stderr,
            flush=True,
        )


def plot(losses: Sequence[float], characters: int) -> Any:
    """Draw the loss over the steps; returns a matplotlib figure."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, len(losses) + 1), losses, label="loss of a step")
    axes.axhline(math.log(characters), color="gray", ls=":", label="all characters as likely")
    axes.axhline(TARGET, color="black", ls="--", lw=1, label="to be reached")
    axes.set(xlabel="step", ylabel="-log(probability)", ylim=(0, None))
    axes.legend()
    return figure


def to_numpy(array: Any) -> np.ndarray:
    """Bring an array of either library to the host."""
    return array.get() if hasattr(array, "get") else array


def main(argv: Sequence[str] | None = None) -> None:
    """Train, and write what the model has learnt to write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", type=Path, default=TEXT, help="file to learn (default: sonnets)")
    parser.add_argument("--steps", type=int, default=700, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, windows and the sample")
    parser.add_argument("--sample", type=int, default=300, help="characters (default: %(default)s)")
    parser.add_argument("--array-library", choices=("numpy", "cupy"), default="numpy")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a picture of the loss")
    args = parser.parse_args(argv)
    config = Config()
    for name, least in (("steps", 1), ("sample", 0), ("seed", 0)):
        if getattr(args, name) < least:
            parser.error(f"--{name} {getattr(args, name)}: {least} or more is needed")
    if args.plot:
        # Before the training, not after it.
        if importlib.util.find_spec("matplotlib") is None:
            parser.error("--plot needs matplotlib (pip install 'cuflash[plot]')")
        if not args.plot.parent.is_dir():
            parser.error(f"--plot {args.plot}: no such folder")
        if args.plot.suffix[1:] not in plot([], 1).canvas.get_supported_filetypes():
            parser.error(f"--plot {args.plot}: name a .png, .svg or .pdf file")
    try:
        text = args.text.read_text(encoding="utf-8")
        xp = import_module(args.array_library)
        if xp is not np:
            xp.cuda.runtime.getDeviceCount()  # raises if there is none
    except (OSError, UnicodeDecodeError) as error:
        parser.error(f"--text {args.text}: {error}")
    except (ImportError, RuntimeError) as error:
        parser.error(f"--array-library {args.array_library}: {error}")
    if len(text) <= config.context:
        parser.error(f"--text {args.text}: {config.context + 1} characters at least are needed")

    model = Model("".join(sorted(set(text))), config, seed=args.seed, xp=xp)
    losses: list[float] = []
    bar = Bar(args.steps)
    for loss in train(model, text, args.steps, args.seed):
        losses.append(loss)
        bar(len(losses), loss)
    last = losses[-REPORTED:]
    print(f"loss {sum(last) / len(last):.3f}, the mean of the last {len(last)} steps\n")
    start = text[: config.context].splitlines(keepends=True)[0]
    print(start + "".join(model.sample(start, args.sample, seed=args.seed)))
    if args.plot:
        plot(losses, len(model.vocabulary)).savefig(args.plot)


if __name__ == "__main__":
    main()
