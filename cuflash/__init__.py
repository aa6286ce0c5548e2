"""Exact softmax and FlashAttention for arrays: NumPy or CuPy, JAX or PyTorch by DLPack."""

from . import analysis, baselines, fused, reference
from ._attention import flash_attention, workspace_size
from ._attention_vjp import flash_attention_varlen_vjp, flash_attention_vjp
from ._logsumexp import flash_logsumexp, flash_logsumexp_vjp
from ._online import (
    SoftmaxState,
    merge_attention,
    merge_attention_vjp,
    merge_softmax,
    softmax_state,
)
from ._softmax import log_softmax, log_softmax_vjp, logsumexp, logsumexp_vjp, softmax, softmax_vjp
from ._varlen import flash_attention_varlen
from ._version import __version__
from .problem_vjp import AttentionGrads

__all__ = [
    "AttentionGrads",
    "SoftmaxState",
    "__version__",
    "analysis",
    "baselines",
    "flash_attention",
    "flash_attention_varlen",
    "flash_attention_varlen_vjp",
    "flash_attention_vjp",
    "flash_logsumexp",
    "flash_logsumexp_vjp",
    "fused",
    "log_softmax",
    "log_softmax_vjp",
    "logsumexp",
    "logsumexp_vjp",
    "merge_attention",
    "merge_attention_vjp",
    "merge_softmax",
    "reference",
    "softmax",
    "softmax_state",
    "softmax_vjp",
    "workspace_size",
]
