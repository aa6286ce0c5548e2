"""Attention in float64 with a pair bias and its gradient, inside JAX: what JAX does not fuse.

A bias for each pair of tokens, as structure prediction has it, is learnt in double precision. JAX
has no fused attention for float64, and the softmax of `jax.nn.dot_product_attention` is in float32
whatever its operands are. The program prints, for both inside `jax.jit`,

- the scratch memory that XLA plans for out and all gradients;
- the error of the loss, relative to the terms that it is the sum of, and of its gradient with
  respect to the bias, against the formula in extended precision, and, independently of any formula,
  against differences of the loss itself.

::

    python examples/jax_float64.py --tokens 512
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import cuflash.jax
from cuflash import reference

#: Heads and features of each.
HEADS, FEATURES = 2, 32
#: What cuflash's relative error of loss and gradient is below; that of a difference by its step.
TOLERANCE, DIFFERENCE_TOLERANCE = 1e-13, 1e-8

Attention = Callable[..., Any]


def inputs(tokens: int) -> dict[str, Any]:
    """Return q, k, v (T, H, D), a bias (H, T, T) and the cotangent of out."""
    rng = np.random.default_rng(0)
    shapes = dict.fromkeys(("query", "key", "value", "cotangent"), (tokens, HEADS, FEATURES))
    shapes["bias"] = (HEADS, tokens, tokens)
    return {name: rng.standard_normal(shape) for name, shape in shapes.items()}


def loss_and_gradient(attention: Attention) -> Any:
    """Return a compiled function of the inputs: loss, and its gradients by name."""

    def loss(differentiated: dict[str, Any], cotangent: Any) -> Any:
        return jnp.vdot(attention(**differentiated), cotangent)

    return jax.jit(jax.value_and_grad(loss))


def exact(given: dict[str, Any]) -> tuple[float, float, np.ndarray]:
    """Return the loss, the norm of its terms and its gradient with respect to the bias.

    By the formula. The terms cancel: by chance the loss is small beside their norm.
    """
    heads_first = {name: x.swapaxes(0, 1) for name, x in given.items() if name != "bias"}
    q, k, v, dout = (heads_first[name] for name in ("query", "key", "value", "cotangent"))
    out, _ = reference.attention(q, k, v, bias=given["bias"])
    grads = reference.attention_vjp(dout, q, k, v, bias=given["bias"])
    terms = out * dout
    return float(terms.sum()), float(np.linalg.norm(terms)), np.asarray(grads.dbias, np.float64)


def relative(x: Any, expected: Any) -> float:
    """Return the error of x in Frobenius norm, relative to what is expected."""
    return float(np.linalg.norm(np.asarray(x) - expected) / np.linalg.norm(expected))


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare, print, and fail if cuflash's errors are above what float64 has."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=256, help="sequence length (default 256)")
    chosen = parser.parse_args(arguments)
    if chosen.tokens < 2:
        parser.error("of one token the weight is 1, whatever the bias: the gradient is 0")

    with jax.enable_x64(True):
        given = inputs(chosen.tokens)
        loss, norm, dbias = exact(given)
        cotangent = given.pop("cotangent")
        # Along this direction the bias moves, and the loss by its product with the gradient.
        direction = dbias / np.linalg.norm(dbias)
        step = 1e-4
        print(f"{'':10}{'scratch MiB':>12}{'loss':>10}{'dbias':>10}{'difference':>12}")
        for name, attention in (
            ("jax.nn", jax.nn.dot_product_attention),
            ("cuflash", cuflash.jax.dot_product_attention),
        ):
            function = loss_and_gradient(attention)
            compiled = function.lower(given, cotangent).compile()
            value, gradients = compiled(given, cotangent)
            high, low = (
                compiled(given | {"bias": given["bias"] + shift * direction}, cotangent)[0]
                for shift in (step, -step)
            )
            slope = float(np.vdot(gradients["bias"], direction))
            errors = {
                "loss": abs(float(value) - loss) / norm,
                "dbias": relative(gradients["bias"], dbias),
                "difference": abs(float(high - low) / (2 * step) - slope) / abs(slope),
            }
            scratch = compiled.memory_analysis().temp_size_in_bytes / 2**20
            print(
                f"{name:10}{scratch:12.2f}{errors['loss']:10.1e}{errors['dbias']:10.1e}"
                f"{errors['difference']:12.1e}"
            )
    if not (errors["loss"] <= TOLERANCE and errors["dbias"] <= TOLERANCE):
        raise SystemExit(f"the errors of cuflash are above {TOLERANCE:.0e}")
    if not errors["difference"] <= DIFFERENCE_TOLERANCE:
        raise SystemExit(f"the gradient of cuflash is no derivative: {errors['difference']:.1e}")


if __name__ == "__main__":
    main()
