"""The CuPy engine: problems become plans, plans become launches of the kernels."""

from .attention import attention, attention_methods, attention_workspace
from .attention_vjp import attention_vjp, attention_vjp_methods, attention_vjp_workspace
from .baselines import (
    materialized_attention,
    scores_fused_attention,
    unfused_dropout_bias_layer_norm,
    unfused_matmul_bias_activation,
    unfused_softmax,
)
from .fused import dropout_bias_layer_norm, dropout_bias_layer_norm_vjp, matmul_bias_activation
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
    "dropout_bias_layer_norm",
    "dropout_bias_layer_norm_vjp",
    "empty",
    "materialized_attention",
    "matmul_bias_activation",
    "merge_attention",
    "merge_attention_vjp",
    "merge_softmax",
    "scores_fused_attention",
    "softmax",
    "unfused_dropout_bias_layer_norm",
    "unfused_matmul_bias_activation",
    "unfused_softmax",
]
