"""Kernels on small ragged problems: a program for compute-sanitizer to watch.

Memory comes from cudaMalloc itself, so that an access past the end of an array is one past the end
of an allocation.
"""

import sys

import cupy
import ml_dtypes
import numpy as np

import cuflash

cupy.cuda.set_allocator(None)
rng = np.random.default_rng(0)


def normal(*shape: int, dtype: object = np.float32) -> cupy.ndarray:
    return cupy.asarray(rng.standard_normal(shape).astype(dtype))


def every_family() -> None:
    """Run every family but wgmma, which few rows do not take."""
    for dtype in (np.float64, np.float32, ml_dtypes.bfloat16):
        for shape, axis in (((3, 1000), -1), ((37, 9), 0), ((3, 5, 7), (0, 2))):
            x = normal(*shape, dtype=dtype)
            for method in ("naive", "fused", "online"):
                y = cuflash.softmax(x, axis, method=method)
            cuflash.logsumexp(x, axis, where=x > 0)
            cuflash.softmax_vjp(x, y, axis)

        q, k, v = (normal(2, tokens, 40, dtype=dtype) for tokens in (37, 70, 70))
        v = v[..., :23]
        cuflash.flash_attention(q, k, v)
        cuflash.flash_attention(q, k, v, causal=True, window=(30, None), num_splits=2)
        options = {
            "mask": cupy.asarray(rng.random((37, 70)) < 0.7),
            "bias": normal(1, 70),
            "alibi_slopes": normal(2),
            "sinks": normal(2),
            "softcap": 3.0,
            "key_lengths": cupy.asarray([5, 70]),
        }
        out, lse = cuflash.flash_attention(q, k, v, return_lse=True, **options)
        cuflash.flash_attention_vjp(out, q, k, v, out, lse, dlse=lse, **options)
        cuflash.flash_attention_vjp(out, q[:, :, :30], k[0, :, :30], v[0], out, lse, causal=True)
        v[0, 60] = np.nan
        cuflash.flash_attention(q, k, v, **options)
        cuflash.flash_attention_vjp(out, q, k, v, out, lse, **options)
        heads = normal(6, 3, 40, dtype=dtype)
        cuflash.flash_attention(heads, k, v, causal=True, num_splits=2, enable_gqa=True)
        cuflash.merge_attention(out, lse, out, lse)
        cuflash.merge_attention_vjp(out, lse, out, lse, out, lse)
    cuflash.softmax(normal(270, 8196))  # the last rows prefetch none
    for columns in (100, 600):
        x = normal(columns, 64)
        cuflash.softmax_vjp(x, cuflash.softmax(x, 0), 0)
    cuflash.softmax(normal(2, 40_000))
    x = normal(2, 90_000)
    cuflash.softmax(x, method="online")
    cuflash.softmax_vjp(x, cupy.asfortranarray(x))  # of views: no cluster holds them
    state = cuflash.softmax_state(normal(5, 300))
    cuflash.merge_softmax(state, state).apply(normal(5, 300))


def forward_tiles() -> None:
    """Run attention on more rows than a tile has: on Hopper that is `forward_wgmma`."""
    for d in (64, 128, 256):
        q, k, v = (normal(2, tokens, d, dtype=ml_dtypes.bfloat16) for tokens in (130, 304, 304))
        lengths = cupy.asarray([130, 304])
        cuflash.flash_attention(q, k, v, causal=True)
        cuflash.flash_attention(q, k, v, key_lengths=lengths, num_splits=2)
        cuflash.flash_attention(q, k, v, mask=cupy.asarray(rng.random((130, 304)) < 0.7))
        v[0, 60] = np.nan
        cuflash.flash_attention(q, k, v, causal=True)


def backward_tiles() -> None:
    """Run the gradients of such problems, `backward_wgmma` on Hopper, and no other wgmma."""
    for d in (64, 128):
        q, k, v = (normal(2, tokens, d, dtype=ml_dtypes.bfloat16) for tokens in (130, 304, 304))
        out, lse = cuflash.flash_attention(q, k, v, causal=True, return_lse=True, method="simt")
        cuflash.flash_attention_vjp(out, q, k, v, out, lse, causal=True)


if __name__ == "__main__":
    runs = (every_family, forward_tiles, backward_tiles)
    {run.__name__: run for run in runs}[sys.argv[1]]()
    cupy.cuda.Device().synchronize()
