"""What else computes the same, as calls to be timed. Each imports its library only when made.

A peer takes the problem's arrays and returns a callable without arguments. Arrays are NumPy's for
the host and CuPy's for the device; other libraries see them by DLPack, without a copy.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np

Call = Callable[[], Any]


class Peer(NamedTuple):
    """A competitor: its name in tables, the library it needs, and what makes its call."""

    name: str
    library: str
    make: Callable[..., Call]

    @property
    def installed(self) -> bool:
        """Whether its library can be imported."""
        return find_spec(self.library) is not None


def installed(peers: Iterable[Peer]) -> list[Peer]:
    """Return the peers whose libraries are there."""
    return [peer for peer in peers if peer.installed]


def willing(
    peers: Iterable[Peer], inputs: Sequence[tuple[Any, ...]], **options: Any
) -> dict[str, list[Call]]:
    """Return the calls of the installed peers that can do a problem, one for each set of inputs.

    Each is called once. One that raises does not support the dtype, the shape or the GPU, or needs
    more memory than there is.
    """
    found: dict[str, list[Call]] = {}
    for peer in installed(peers):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # PyTorch warns of every reason before it raises
                calls = [peer.make(*arrays, **options) for arrays in inputs]
                calls[0]()
        except Exception as error:
            print(f"{peer.name} is left out: {str(error).partition(chr(10))[0]}", flush=True)
        else:
            found[peer.name] = calls
    return found


def forget() -> None:
    """Let CuPy and PyTorch give back memory, and PyTorch what it compiled, between problems.

    torch.compile gives up on a function that it has compiled for eight shapes.
    """
    if "cupy" in sys.modules:
        sys.modules["cupy"].get_default_memory_pool().free_all_blocks()
    if "torch" in sys.modules:
        sys.modules["torch"].cuda.empty_cache()
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()


def numpy_attention(q: Any, k: Any, v: Any, *, causal: bool = False) -> Call:
    """Return the formula as a NumPy user writes it; 16-bit inputs by way of float32, for BLAS."""
    wide = np.dtype(np.float64 if q.dtype == np.float64 else np.float32)
    scale = wide.type(q.shape[-1] ** -0.5)

    def call() -> Any:
        s = q.astype(wide, copy=False) @ k.astype(wide, copy=False).swapaxes(-1, -2) * scale
        if causal:
            s = np.where(np.tri(*s.shape[-2:], dtype=np.bool), s, -np.inf)
        p = np.exp(s - s.max(axis=-1, keepdims=True))
        p /= p.sum(axis=-1, keepdims=True)
        return (p @ v.astype(wide, copy=False)).astype(q.dtype, copy=False)

    return call


def scipy_softmax(x: Any, *, axis: int = -1) -> Call:
    """Return `scipy.special.softmax`."""
    from scipy import special

    return lambda: special.softmax(x, axis=axis)


def tensor(x: Any) -> Any:
    """Return a PyTorch tensor that shares memory with a NumPy or CuPy array."""
    import torch

    if x.dtype.name == "bfloat16":  # no DLPack export knows it on every side
        return torch.from_dlpack(x.view(np.uint16)).view(torch.bfloat16)
    return torch.from_dlpack(x)


def torch_attention(
    q: Any, k: Any, v: Any, *, causal: bool = False, enable_gqa: bool = False
) -> Call:
    """Return PyTorch's scaled_dot_product_attention, its backend chosen by PyTorch."""
    from torch.nn.functional import scaled_dot_product_attention

    tensors = [tensor(x) for x in (q, k, v)]
    options = {"is_causal": causal, "enable_gqa": enable_gqa}
    return lambda: scaled_dot_product_attention(*tensors, **options)


def _torch_backend(name: str) -> Callable[..., Call]:
    def make(q: Any, k: Any, v: Any, **options: bool) -> Call:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        backend, attend = getattr(SDPBackend, name), torch_attention(q, k, v, **options)

        def call() -> Any:
            with sdpa_kernel(backend):
                return attend()

        return call

    return make


def _torch_backend_decode(name: str) -> Callable[..., Call]:
    def make(q: Any, k: Any, v: Any) -> Call:
        """Return the call as a CUDA graph: on the host it takes as long as on the GPU."""
        import torch

        call = _torch_backend(name)(q, k, v, enable_gqa=True)
        call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return graph.replay

    return make


def _torch_backend_vjp(name: str) -> Callable[..., Call]:
    def make(dout: Any, q: Any, k: Any, v: Any, *, causal: bool = False) -> Call:
        """Return the backward alone: the forward ran once, its graph is kept."""
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel

        inputs = [tensor(x).requires_grad_() for x in (q, k, v)]
        cotangent = tensor(dout)
        with sdpa_kernel(getattr(SDPBackend, name)):
            out = torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=causal)
        return lambda: torch.autograd.grad(out, inputs, cotangent, retain_graph=True)

    return make


NUMPY_ATTENTION = Peer("NumPy formula", "numpy", numpy_attention)
TORCH_ATTENTION = Peer("torch SDPA", "torch", torch_attention)
SCIPY_SOFTMAX = Peer("scipy.special.softmax", "scipy", scipy_softmax)

_BACKENDS = {
    "cuDNN": "CUDNN_ATTENTION",
    "flash": "FLASH_ATTENTION",
    "efficient": "EFFICIENT_ATTENTION",
    "math": "MATH",
}
DEVICE_ATTENTION = tuple(
    Peer(f"torch SDPA {label}", "torch", _torch_backend(name)) for label, name in _BACKENDS.items()
)
DEVICE_DECODE = tuple(
    Peer(f"torch SDPA {label}", "torch", _torch_backend_decode(_BACKENDS[label]))
    for label in ("cuDNN", "flash")
)
DEVICE_ATTENTION_VJP = tuple(
    Peer(f"torch SDPA {label}", "torch", _torch_backend_vjp(name))
    for label, name in _BACKENDS.items()
)
