"""The oracle: softmax, attention and fused chains by brute force, to be read beside the formulas.

Operands are widened exactly to :data:`numpy.longdouble` (80-bit extended precision on x86, float64
where the platform has nothing wider), the whole score matrix is built, and only the result is
rounded, to float64. A product costs a few nanoseconds: one head of 500 tokens takes about 0.2 s.
Nothing here is shared with the engines that are tested against it.

Two rules of the library are visible in the code: what a row does not see is taken out by a *select*
(``where``), never by a product with zero, and an empty row divides by one instead of zero.
"""

from cuflash.reference._attention import (
    ReferenceGrads,
    ScoreOptions,
    attention,
    attention_jvp,
    attention_logsumexp,
    attention_logsumexp_vjp,
    attention_scores,
    attention_vjp,
    merge_attention,
    merge_attention_vjp,
)
from cuflash.reference._fused import (
    LayerNormReferenceGrads,
    LayerNormResult,
    dropout_bias_layer_norm,
    dropout_bias_layer_norm_vjp,
    dropout_mask,
    matmul_bias_activation,
    philox,
)
from cuflash.reference._online import online_attention
from cuflash.reference._softmax import (
    log_softmax,
    log_softmax_vjp,
    logsumexp,
    logsumexp_vjp,
    softmax,
    softmax_vjp,
)
from cuflash.reference._varlen import VarlenOptions, attention_varlen, attention_varlen_vjp

__all__ = [
    "LayerNormReferenceGrads",
    "LayerNormResult",
    "ReferenceGrads",
    "ScoreOptions",
    "VarlenOptions",
    "attention",
    "attention_jvp",
    "attention_logsumexp",
    "attention_logsumexp_vjp",
    "attention_scores",
    "attention_varlen",
    "attention_varlen_vjp",
    "attention_vjp",
    "dropout_bias_layer_norm",
    "dropout_bias_layer_norm_vjp",
    "dropout_mask",
    "log_softmax",
    "log_softmax_vjp",
    "logsumexp",
    "logsumexp_vjp",
    "matmul_bias_activation",
    "merge_attention",
    "merge_attention_vjp",
    "online_attention",
    "philox",
    "softmax",
    "softmax_vjp",
]
