"""The CuPy engine: problems become plans, plans become launches of the kernels."""

from .attention import attention, attention_methods, attention_workspace
from .attention_vjp import attention_vjp, attention_vjp_methods, attention_vjp_workspace
from .baselines import materialized_attention
from .memory import device_of, empty
from .online import merge_attention, merge_attention_vjp, merge_softmax
from .softmax import softmax

__all__ = [
    "attention",
    "attention_methods",
    "attention_vjp",
    "attention_vjp_methods",
    "attention_vjp_workspace",
    "attention_workspace",
    "device_of",
    "empty",
    "materialized_attention",
    "merge_attention",
    "merge_attention_vjp",
    "merge_softmax",
    "softmax",
]
