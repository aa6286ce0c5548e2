"""The functions of the CuPy engine, each imported with its module at its first use.

A first call waits for what it needs: that of attention neither for gradients nor for softmax.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_MODULES = {
    "attention": ("attention", "attention_methods", "attention_workspace"),
    "attention_vjp": ("attention_vjp", "attention_vjp_methods", "attention_vjp_workspace"),
    "baselines": (
        "materialized_attention",
        "scores_fused_attention",
        "unfused_dropout_bias_layer_norm",
        "unfused_matmul_bias_activation",
        "unfused_softmax",
    ),
    "fused": ("dropout_bias_layer_norm", "dropout_bias_layer_norm_vjp", "matmul_bias_activation"),
    "memory": ("device_of", "empty"),
    "online": ("merge_attention", "merge_attention_vjp", "merge_softmax"),
    "softmax": ("softmax",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f".{_MODULE_OF[name]}", __package__)
    found = globals()[name] = getattr(module, name)
    return found
