"""What else computes the softmax family on a GPU, over the last or first axis, as peers.

The formulas are what an array user writes; each function of an operation takes its operands in the
order of this library's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from .peers import Call, Peer, tensor


def _softmax(xp: Any, axis: int, x: Any) -> Any:
    e = xp.exp(x - x.max(axis=axis, keepdims=True))
    return e / e.sum(axis=axis, keepdims=True)


def _log_softmax(xp: Any, axis: int, x: Any) -> Any:
    d = x - x.max(axis=axis, keepdims=True)
    return d - xp.log(xp.exp(d).sum(axis=axis, keepdims=True))


def _logsumexp(xp: Any, axis: int, x: Any) -> Any:
    m = x.max(axis=axis, keepdims=True)
    return (m + xp.log(xp.exp(x - m).sum(axis=axis, keepdims=True))).squeeze(axis)


def _softmax_vjp(xp: Any, axis: int, dy: Any, y: Any) -> Any:
    product = y * dy
    return product - y * product.sum(axis=axis, keepdims=True)


def _log_softmax_vjp(xp: Any, axis: int, dy: Any, y: Any) -> Any:
    return dy - xp.exp(y) * dy.sum(axis=axis, keepdims=True)


def _logsumexp_vjp(xp: Any, axis: int, dlse: Any, x: Any, lse: Any) -> Any:
    kept = (None, ...) if axis == 0 else (..., None)
    return dlse[kept] * xp.exp(x - lse[kept])


#: By operation: the formula in terms of an array library.
FORMULAS: Mapping[str, Callable[..., Any]] = {
    "softmax": _softmax,
    "log_softmax": _log_softmax,
    "logsumexp": _logsumexp,
    "softmax_vjp": _softmax_vjp,
    "log_softmax_vjp": _log_softmax_vjp,
    "logsumexp_vjp": _logsumexp_vjp,
}


def _torch(operation: str, axis: int) -> Callable[..., Any]:
    """Return PyTorch's own function; of gradients, what its backward calls."""
    import torch

    aten = torch.ops.aten
    functions: dict[str, Callable[..., Any]] = {
        "softmax": lambda x: torch.softmax(x, axis),
        "log_softmax": lambda x: torch.log_softmax(x, axis),
        "logsumexp": lambda x: torch.logsumexp(x, axis),
        "softmax_vjp": lambda dy, y: aten._softmax_backward_data(dy, y, axis, y.dtype),
        "log_softmax_vjp": lambda dy, y: aten._log_softmax_backward_data(dy, y, axis, y.dtype),
        "logsumexp_vjp": lambda dlse, x, lse: _logsumexp_vjp(torch, axis, dlse, x, lse),
    }
    return functions[operation]


@cache
def _torch_compiled(operation: str, axis: int) -> Callable[..., Any]:
    """Return it through torch.compile, one object for all inputs: it compiles once a shape."""
    import torch

    compiled: Callable[..., Any] = torch.compile(_torch(operation, axis), dynamic=False)
    return compiled


def _cupy_formula(operation: str, axis: int) -> Callable[..., Call]:
    def make(*arrays: Any) -> Call:
        import cupy

        return lambda: FORMULAS[operation](cupy, axis, *arrays)

    return make


def _cupyx(operation: str, axis: int) -> Callable[..., Call]:
    def make(*arrays: Any) -> Call:
        from cupyx.scipy import special

        function = getattr(special, operation)
        return lambda: function(*arrays, axis=axis)

    return make


def _torch_peer(
    operation: str, axis: int, function: Callable[[str, int], Callable[..., Any]]
) -> Callable[..., Call]:
    def make(*arrays: Any) -> Call:
        call, tensors = function(operation, axis), [tensor(x) for x in arrays]
        return lambda: call(*tensors)

    return make


def softmax_peers(operation: str, axis: int = -1, *, compiled: bool = True) -> tuple[Peer, ...]:
    """Return the peers of an operation, with or without torch.compile, which takes seconds."""
    library = () if operation.endswith("_vjp") else (_cupyx(operation, axis),)
    compilers = (_torch_peer(operation, axis, _torch_compiled),) if compiled else ()
    return (
        Peer("CuPy formula", "cupy", _cupy_formula(operation, axis)),
        *(Peer("cupyx.scipy.special", "cupyx", make) for make in library),
        Peer("torch", "torch", _torch_peer(operation, axis, _torch)),
        *(Peer("torch.compile", "torch", make) for make in compilers),
    )
