"""What cuflash is tested with, for testing any implementation of attention or softmax.

Cases describe inputs (`AttentionCase`, `VarlenCase`, `SoftmaxCase`, `MergeCase`), strategies draw
them (`attention_problems`, `varlen_problems`, `softmax_problems`, `merge_problems`: these need
hypothesis), bounds say how exact a result must be, and properties, functions of a callable and a
case, say what must hold: of attention, of its gradients, of softmax. `cuflash.testing.logsumexp`
gives those of attention a logsumexp of scores alone.
`cuflash.testing.adapters` has other libraries behind our signatures, and `cuflash.testing.fuzz`
(which needs hypothesis, too) holds an implementation to all of it, as the command ``cuflash fuzz``.
"""

from typing import TYPE_CHECKING, Any

from cuflash.testing.bounds import (
    Expected,
    ExpectedAttention,
    ExpectedGradients,
    assert_attention_close,
    assert_gradients_close,
    assert_softmax_close,
    error_bound,
    expect_attention,
    expect_gradients,
    expect_softmax,
    expect_softmax_vjp,
)
from cuflash.testing.cases import ALL_CASES
from cuflash.testing.gradient_cases import GRADIENT_CASES
from cuflash.testing.gradients import GRADIENT_PROPERTIES
from cuflash.testing.problems import AttentionCase, SoftmaxCase
from cuflash.testing.properties import ATTENTION_PROPERTIES
from cuflash.testing.softmax_properties import SOFTMAX_PROPERTIES, MergeCase
from cuflash.testing.varlen import VARLEN_PROPERTIES, VarlenCase
from cuflash.testing.varlen_gradients import VARLEN_GRADIENT_PROPERTIES

if TYPE_CHECKING:
    from cuflash.testing.strategies import (
        attention_problems,
        merge_problems,
        softmax_problems,
        varlen_problems,
    )

__all__ = [
    "AttentionCase",
    "SoftmaxCase",
    "MergeCase",
    "VarlenCase",
    "attention_problems",
    "softmax_problems",
    "merge_problems",
    "varlen_problems",
    "Expected",
    "ExpectedAttention",
    "ExpectedGradients",
    "error_bound",
    "expect_attention",
    "expect_gradients",
    "expect_softmax",
    "expect_softmax_vjp",
    "assert_attention_close",
    "assert_gradients_close",
    "assert_softmax_close",
    "ATTENTION_PROPERTIES",
    "GRADIENT_PROPERTIES",
    "SOFTMAX_PROPERTIES",
    "VARLEN_PROPERTIES",
    "VARLEN_GRADIENT_PROPERTIES",
    "ALL_CASES",
    "GRADIENT_CASES",
]


def __getattr__(name: str) -> Any:
    # The one module that needs hypothesis is imported when one of its names is asked for.
    if name in ("attention_problems", "softmax_problems", "merge_problems", "varlen_problems"):
        from cuflash.testing import strategies

        return getattr(strategies, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
