"""Exact attention and softmax inside JAX: under jit, grad, vmap and shard_map.

The functions take what functions of `jax.numpy` take and run the kernels of cuflash on CUDA
devices and its NumPy engine on CPUs, by XLA's foreign function interface: without a copy, and
without anything compiled but the kernels.
"""

from ._attention import dot_product_attention, flash_attention
from ._materialized import materialized_attention
from ._softmax import log_softmax, logsumexp, softmax

__all__ = [
    "dot_product_attention",
    "flash_attention",
    "log_softmax",
    "logsumexp",
    "materialized_attention",
    "softmax",
]
