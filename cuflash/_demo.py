"""``cuflash demo``: attention over a real text, measured, checked and looked into.

The data, written by ``examples/minilm.py``, are q, k and v of one layer of a sentence encoder.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import baselines, flash_attention, reference
from ._files import read_npz
from ._runners import Runner

#: Query rows whose attention weights exist at one time.
_BLOCK = 64
_LINE_WIDTH = 100
_MIB = 2**20

Array = NDArray[Any]


@dataclass(frozen=True)
class Layer:
    """One layer's attention operands over one text.

    Parameters
    ----------
    q, k, v : numpy.ndarray
        (1, H, T, D).
    tokens : tuple of str
        T of them.
    provenance : dict
        Where they are from; the demo prints the entries model, layer and source.
    """

    q: Array
    k: Array
    v: Array
    tokens: tuple[str, ...]
    provenance: dict[str, Any]

    @classmethod
    def read(cls, path: Path | None = None) -> Layer:
        """Read a file of ``examples/minilm.py --write-layer``, by default the packaged one."""
        if path is None:
            with as_file(files("cuflash") / "_data" / "minilm_layer.npz") as packaged:
                return cls.read(packaged)
        arrays = read_npz(path)
        missing = {"q", "k", "v", "tokens", "provenance"} - arrays.keys()
        if missing:
            raise ValueError(f"{path} has no array {', '.join(sorted(missing))}")
        q, k, v, tokens = (arrays[name] for name in ("q", "k", "v", "tokens"))
        if q.ndim != 4 or q.shape[0] != 1 or not (q.shape == k.shape == v.shape):
            raise ValueError(
                f"{path}: q, k and v must be of one shape (1, H, T, D), got {q.shape}, {k.shape} "
                f"and {v.shape}"
            )
        if tokens.shape != q.shape[2:3]:
            raise ValueError(f"{path}: {q.shape[2]} tokens are needed, got shape {tokens.shape}")
        return cls(q, k, v, tuple(tokens.tolist()), _provenance(path, str(arrays["provenance"])))

    def repeated(self, times: int) -> tuple[Array, Array, Array]:
        """Return q, k, v of the text `times` times over."""
        q, k, v = (np.concatenate([x] * times, axis=-2) for x in (self.q, self.k, self.v))
        return q, k, v

    def heads(self, head: int | None) -> slice:
        """Return the slice of head axis that is one head, or all for None."""
        count = self.q.shape[1]
        if head is None:
            return slice(None)
        if not 0 <= head < count:
            raise ValueError(f"there is no head {head}: heads are 0 to {count - 1}")
        return slice(head, head + 1)


def _provenance(path: Path, text: str) -> dict[str, Any]:
    try:
        entries = json.loads(text)
    except ValueError:
        entries = None
    if not isinstance(entries, dict) or not {"model", "layer", "source"} <= entries.keys():
        raise ValueError(f"{path}: provenance must be a JSON object with model, layer and source")
    return entries


def repeated_oracle(out: Array, lse: Array, times: int) -> tuple[Array, Array]:
    """Turn the exact out and lse of a text into those of the text `times` times over.

    Each key is there `times` times, with a `times`-th of its weight each: out stays what it was and
    lse grows by log(times).
    """
    return np.concatenate([out] * times, axis=-2), np.concatenate(
        [lse] * times, axis=-1
    ) + math.log(times)


@dataclass(frozen=True)
class Row:
    """One method at one number of tokens; an error is the largest difference to the oracle."""

    tokens: int
    method: str
    seconds: float
    extra_bytes: int
    out_error: float
    lse_error: float

    HEADINGS = (
        f"{'':30}{'time':>10}{'extra memory':>16}{'error of out':>16}{'error of lse':>16}",
        f"{'tokens':>6}  {'method':22}{'ms':>10}{'MiB':>16}{'max abs':>16}{'max abs':>16}",
    )

    def __str__(self) -> str:
        """Return the row in the columns of HEADINGS."""
        return (
            f"{self.tokens:6d}  {self.method:22}{1e3 * self.seconds:10.1f}"
            f"{self.extra_bytes / _MIB:16.1f}{self.out_error:16.1e}{self.lse_error:16.1e}"
        )


def compare(layer: Layer, runner: Runner, repeats: tuple[int, ...]) -> Iterator[Row]:
    """Measure flash_attention and the materialised formula on the text, for each of `repeats`."""
    exact = reference.attention(layer.q, layer.k, layer.v)
    for times in repeats:
        operands = [runner.asarray(x) for x in layer.repeated(times)]
        expected = repeated_oracle(*exact, times)
        for method in (flash_attention, baselines.materialized_attention):
            call = partial(method, *operands, return_lse=True)
            results, seconds, extra = runner.measure(call)
            out_error, lse_error = (
                float(np.abs(runner.asnumpy(got) - want).max())
                for got, want in zip(results, expected, strict=True)
            )
            yield Row(
                times * len(layer.tokens), method.__name__, seconds, extra, out_error, lse_error
            )


def attention_weights(layer: Layer, runner: Runner, head: int | None) -> Iterator[Array]:
    """Yield the attention weights of one head, or their mean over heads, some query rows at a time.

    A weight is ``exp(score - lse)``: with the lse at hand any block of rows is normalised by
    itself, and no T x T array is needed.

    Parameters
    ----------
    layer : Layer
        The data.
    runner : Runner
        The engine that computes the lse.
    head : int or None
        The head; None is the mean over heads.

    Yields
    ------
    numpy.ndarray
        (rows, T); each row adds up to one.
    """
    heads = layer.heads(head)
    _, lse = flash_attention(*map(runner.asarray, (layer.q, layer.k, layer.v)), return_lse=True)
    q, k, lse = layer.q[0, heads], layer.k[0, heads], runner.asnumpy(lse)[0, heads]
    scale = 1 / math.sqrt(q.shape[-1])
    for start in range(0, q.shape[-2], _BLOCK):
        rows = slice(start, start + _BLOCK)
        scores = scale * q[:, rows] @ k.swapaxes(-1, -2)
        yield np.exp(scores - lse[:, rows, None]).mean(axis=0)


def strongest_keys(weights: Iterator[Array], count: int) -> Iterator[list[tuple[int, float]]]:
    """Yield for each query row its `count` largest weights, as (key, weight), largest first."""
    for block in weights:
        order = np.argsort(-block, axis=-1, kind="stable")[:, :count]
        largest = np.take_along_axis(block, order, axis=-1)
        for keys, values in zip(order.tolist(), largest.tolist(), strict=True):
            yield list(zip(keys, values, strict=True))


def in_columns(cells: list[str]) -> Iterator[str]:
    """Yield the lines of a list set in as many columns as there is room for, read downwards."""
    width = max(map(len, cells)) + 2
    lines = math.ceil(len(cells) / max(1, (_LINE_WIDTH + 2) // width))
    for line in range(lines):
        yield "".join(f"{cell:{width}}" for cell in cells[line::lines]).rstrip()


def report(
    layer: Layer, runner: Runner, *, head: int | None, keys: int, repeats: int
) -> Iterator[str]:
    """Yield the lines that ``cuflash demo`` prints.

    Parameters
    ----------
    layer : Layer
        The data.
    runner : Runner
        The engine.
    head : int or None
        The head whose strongest keys are listed; None is the mean over heads.
    keys : int
        How many of them for each query.
    repeats : int
        The text is also measured `repeats` times over.
    """
    provenance = layer.provenance
    yield f"engine  {runner.label}"
    yield f"input   q, k, v {layer.q.shape} {layer.q.dtype}"
    yield f"model   {provenance['model']}, layer {provenance['layer']}"
    yield f"text    {provenance['source']}"
    yield ""
    yield f"Each token and its strongest keys, with their weights in percent ({_name(head)}):"
    yield ""
    width = max(map(len, layer.tokens))
    strongest = strongest_keys(attention_weights(layer, runner, head), keys)
    cells = [
        f"{token:>{width}}  "
        + "  ".join(f"{layer.tokens[key]} {100 * weight:.0f}" for key, weight in of_token)
        for token, of_token in zip(layer.tokens, strongest, strict=True)
    ]
    yield from in_columns(cells)
    yield ""
    yield from Row.HEADINGS
    yield from map(str, compare(layer, runner, (1, repeats) if repeats > 1 else (1,)))
    yield ""
    yield "Error: to the oracle in float64. Extra memory: peak beyond operands and results."
    if repeats > 1:
        yield f"The longer input is the text {repeats} times over."


def attention_map(layer: Layer, runner: Runner, head: int | None) -> Any:
    """Return a matplotlib figure of the attention weights: a picture has to hold all of them."""
    from matplotlib.colors import PowerNorm
    from matplotlib.figure import Figure

    inches = 3 + len(layer.tokens) / 18
    figure = Figure(figsize=(inches, inches), dpi=200, layout="constrained")
    axes = figure.add_subplot(
        title=f"Layer {layer.provenance['layer']}, {_name(head)}", xlabel="key", ylabel="query"
    )
    weights = np.concatenate(list(attention_weights(layer, runner, head)))
    image = axes.imshow(weights, cmap="magma", norm=PowerNorm(0.5))
    ticks = np.arange(len(layer.tokens))
    axes.set_xticks(ticks, layer.tokens, rotation=90, fontsize=3.5)
    axes.set_yticks(ticks, layer.tokens, fontsize=3.5)
    axes.tick_params(length=1, width=0.3, pad=0.5)
    figure.colorbar(image, label="attention weight", shrink=0.6)
    return figure


def _name(head: int | None) -> str:
    return "mean over heads" if head is None else f"head {head}"
