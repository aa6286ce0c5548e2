"""What else computes the fused chains on a GPU, as peers: PyTorch, and NVIDIA's libraries by it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from .peers import Call, Peer, tensor

#: Of dropout, in every benchmark.
PROBABILITY = 0.1

PRODUCT_ALONE, PRODUCT_STEPS, EPILOGUE = "cuBLAS alone", "cuBLAS, bias, relu", "cuBLASLt epilogue"


def _product(a: Any, b: Any, bias: Any) -> Any:
    import torch

    return torch.relu(torch.matmul(a, b) + bias)


def _norm(x: Any, bias: Any, gamma: Any, beta: Any) -> Any:
    from torch.nn import functional

    z = functional.dropout(x + bias, PROBABILITY, training=True)
    return functional.layer_norm(z, x.shape[-1:], gamma, beta)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function through torch.compile, one object for all inputs."""
    import torch

    compiled: Callable[..., Any] = torch.compile(function, dynamic=False)
    return compiled


def _calling(find: Callable[[], Callable[..., Any]]) -> Callable[..., Call]:
    """Return what makes the call of a function, which is found when it is made."""

    def make(*arrays: Any) -> Call:
        function, tensors = find(), [tensor(x) for x in arrays]
        return lambda: function(*tensors)

    return make


def _alone() -> Callable[..., Any]:
    import torch

    return lambda a, b, bias: torch.matmul(a, b)


def _epilogue() -> Callable[..., Any]:
    import torch

    return lambda a, b, bias: torch._addmm_activation(bias, a, b)


def product_peers(*, compiled: bool = True) -> tuple[Peer, ...]:
    """Return the peers of a product with bias and ReLU; torch.compile takes seconds."""
    return (
        Peer(PRODUCT_ALONE, "torch", _calling(_alone)),
        Peer(PRODUCT_STEPS, "torch", _calling(lambda: _product)),
        Peer(EPILOGUE, "torch", _calling(_epilogue)),
        *((Peer("torch.compile", "torch", _calling(lambda: _compiled(_product))),) * compiled),
    )


def norm_peers(*, compiled: bool = True) -> tuple[Peer, ...]:
    """Return the peers of dropout, bias and LayerNorm."""
    return (
        Peer("torch", "torch", _calling(lambda: _norm)),
        *((Peer("torch.compile", "torch", _calling(lambda: _compiled(_norm))),) * compiled),
    )
