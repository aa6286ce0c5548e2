"""A small transformer in JAX, trained with its own attention and with cuflash's in its place.

One line changes: `jax.nn.dot_product_attention` or `cuflash.jax.dot_product_attention`. The model
learns characters of eight sonnets for a few steps in float32 and in bfloat16, compiled by `jax.jit`
with its gradients, and the losses of the two are compared step by step::

    python examples/jax_attention.py              # 20 steps, seconds on two CPU cores
    python examples/jax_attention.py --steps 200

In float32 they are equal to TOLERANCE, which rounding alone explains. In bfloat16 JAX rounds the
weights before it multiplies them with the values, and cuflash does not: there the losses go apart
by a part of the dtype's own precision.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import cuflash.jax

#: In the public domain: William Shakespeare, eight sonnets (1609).
TEXT = Path(__file__).resolve().parent / "data/sonnets.txt"

#: How far the losses of the two may be apart, relative to JAX's.
TOLERANCE = {"float32": 1e-6, "bfloat16": 1e-3}

#: B windows of T characters a step; C features in H heads; blocks; the rate of gradient descent.
BATCH, CONTEXT, FEATURES, HEADS, BLOCKS, RATE = 8, 64, 64, 4, 2, 0.1

Attention = Callable[..., Any]


def initial(vocabulary: int, seed: int = 0) -> dict[str, Any]:
    """Return parameters in float32."""
    keys = iter(jax.random.split(jax.random.key(seed), 3 + 4 * BLOCKS))

    def normal(*shape: int) -> Any:
        return jax.random.normal(next(keys), shape) / math.sqrt(shape[0])

    return {
        "characters": normal(vocabulary, FEATURES),
        "places": normal(CONTEXT, FEATURES),
        "blocks": [
            {
                "qkv": normal(FEATURES, 3 * FEATURES),
                "out": normal(FEATURES, FEATURES),
                "wide": normal(FEATURES, 4 * FEATURES),
                "narrow": normal(4 * FEATURES, FEATURES),
            }
            for _ in range(BLOCKS)
        ],
        "logits": normal(FEATURES, vocabulary),
    }


def normalized(x: Any) -> Any:
    """Return x with mean 0 and deviation 1 of its features."""
    wide = x.astype(jnp.float32)
    wide = wide - wide.mean(-1, keepdims=True)
    return (wide * jax.lax.rsqrt((wide**2).mean(-1, keepdims=True) + 1e-5)).astype(x.dtype)


def loss_of(parameters: Any, text: Any, *, attention: Attention, dtype: str) -> Any:
    """Return the mean of -log(probability of the next character) over windows (B, T + 1)."""
    p = jax.tree.map(lambda x: x.astype(dtype), parameters)
    ids, targets = text[:, :-1], text[:, 1:]
    x = p["characters"][ids] + p["places"]
    for block in p["blocks"]:
        qkv = normalized(x) @ block["qkv"]
        q, k, v = jnp.moveaxis(qkv.reshape(*x.shape[:2], 3, HEADS, -1), 2, 0)
        attended = attention(q, k, v, is_causal=True)
        x = x + attended.reshape(x.shape) @ block["out"]
        x = x + jax.nn.gelu(normalized(x) @ block["wide"]) @ block["narrow"]
    logits = (normalized(x) @ p["logits"]).astype(jnp.float32)
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)
    return -chosen.mean()


def train(attention: Attention, dtype: str, steps: int, text: np.ndarray) -> list[float]:
    """Return the loss at each step; the windows are the same for the same number of steps."""

    @jax.jit
    def step(parameters: Any, windows: Any) -> Any:
        loss = partial(loss_of, attention=attention, dtype=dtype)
        value, gradients = jax.value_and_grad(loss)(parameters, windows)
        return value, jax.tree.map(lambda p, g: p - RATE * g, parameters, gradients)

    rng = np.random.default_rng(0)
    parameters, losses = initial(int(text.max()) + 1), []
    for _ in range(steps):
        starts = rng.integers(len(text) - CONTEXT, size=(BATCH, 1))
        value, parameters = step(parameters, text[starts + np.arange(CONTEXT + 1)])
        losses.append(float(value))
    return losses


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, print the losses, and fail if they are further apart than rounding explains."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=20, help="of training (default 20)")
    chosen = parser.parse_args(arguments)

    characters = np.frombuffer(TEXT.read_bytes(), np.uint8)
    text = np.unique(characters, return_inverse=True)[1].astype(np.int32)
    print(f"{'':10}{'first loss':>12}{'last loss':>12}{'cuflash':>12}{'apart':>12}")
    for dtype, tolerance in TOLERANCE.items():
        theirs, ours = (
            np.array(train(attention, dtype, chosen.steps, text))
            for attention in (jax.nn.dot_product_attention, cuflash.jax.dot_product_attention)
        )
        apart = float(np.max(np.abs(ours - theirs) / theirs))
        print(f"{dtype:10}{theirs[0]:12.4f}{theirs[-1]:12.4f}{ours[-1]:12.4f}{apart:12.1e}")
        if not apart <= tolerance:
            raise SystemExit(f"the losses in {dtype} are {apart:.1e} apart, not {tolerance:.0e}")


if __name__ == "__main__":
    main()
