"""The CuPy engine: problems become plans, plans become launches of the kernels."""

from importlib import import_module
from typing import Any

from .attention import attention, attention_methods, attention_workspace
from .attention_vjp import attention_vjp, attention_vjp_methods, attention_vjp_workspace
from .memory import device_of, empty
from .online import merge_attention, merge_attention_vjp, merge_softmax
from .softmax import softmax

#: Imported at their first use: a first call of attention should not wait for them.
_LATER = {
    **dict.fromkeys(
        ("dropout_bias_layer_norm", "dropout_bias_layer_norm_vjp", "matmul_bias_activation"),
        "fused",
    ),
    **dict.fromkeys(
        (
            "materialized_attention",
            "scores_fused_attention",
            "unfused_dropout_bias_layer_norm",
            "unfused_matmul_bias_activation",
            "unfused_softmax",
        ),
        "baselines",
    ),
}

__all__ = [
    "attention",
    "attention_methods",
    "attention_vjp",
    "attention_vjp_methods",
    "attention_vjp_workspace",
    "attention_workspace",
    "device_of",
    "empty",
    "merge_attention",
    "merge_attention_vjp",
    "merge_softmax",
    "softmax",
    *_LATER,
]


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(f".{_LATER[name]}", __name__), name)
    return found
