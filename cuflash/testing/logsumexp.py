"""Laws of the logsumexp of scores alone: those of attention to values without columns.

`as_attention` and `as_attention_vjp` dress a function with the signature of
``cuflash.flash_logsumexp``, or of its gradients, as attention whose values have no columns, and
`without_values` takes the values of a case away: every property of attention, and of its gradients,
then says what must hold of lse, dq, dk, dbias and dsinks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np

from cuflash.problem_vjp import AttentionGrads
from cuflash.testing.bounds import error_bound
from cuflash.testing.gradients import GRADIENT_PROPERTIES
from cuflash.testing.problems import AttentionCase
from cuflash.testing.properties import Attention, assert_near

Logsumexp: TypeAlias = Callable[..., Any]

#: The laws of gradients that speak of more than a cotangent of out.
LOGSUMEXP_GRADIENT_PROPERTIES = {
    name: law
    for name, law in GRADIENT_PROPERTIES.items()
    if name != "nonfinite_row_reaches_only_what_it_sees"
}


def without_values(case: AttentionCase) -> AttentionCase:
    """Return the case with values that have no columns, and no batch axes that k has not.

    Its seed is odd: of those, `gradient_inputs` makes a cotangent of lse.
    """
    if case.visible is not None and case.visible[0] == "v":
        case = replace(case, visible=("k", case.visible[1]))
    return replace(
        case,
        q_batch=case.batch_shape,
        v_batch=case.k_batch,
        dv=0,
        v_layout="contiguous",
        seed=case.seed | 1,
    )


def as_attention(logsumexp: Logsumexp) -> Attention:
    """Dress a logsumexp of scores as attention to values without columns."""

    def attention(
        q: Any,
        k: Any,
        v: Any,
        *,
        out: Any = None,
        lse: Any = None,
        return_lse: bool = False,
        **options: Any,
    ) -> Any:
        given = {} if lse is None else {"out": lse}
        lse = logsumexp(q, k, **options, **given)
        if out is None:
            out = np.empty((*lse.shape, v.shape[-1]), v.dtype)
        return (out, lse) if return_lse or given else out

    return attention


def as_attention_vjp(vjp: Callable[..., Any]) -> Callable[..., Any]:
    """Dress the gradients of a logsumexp of scores as those of attention, with a dv of nothing."""

    def attention_vjp(
        dout: Any,
        q: Any,
        k: Any,
        v: Any,
        out: Any,
        lse: Any,
        *,
        dlse: Any = None,
        grads: AttentionGrads | None = None,
        **options: Any,
    ) -> Any:
        del dout, out
        given = {} if grads is None else {"grads": grads._replace(dv=None)}
        result = vjp(np.zeros_like(lse) if dlse is None else dlse, q, k, lse, **given, **options)
        return result._replace(dv=np.zeros_like(v) if grads is None else grads.dv)

    return attention_vjp


def equals_lse_of_attention(
    logsumexp: Logsumexp, attention: Attention, case: AttentionCase
) -> None:
    """Check that the logsumexp is that of attention, whatever the values are."""
    case = replace(case, q_batch=case.batch_shape, v_batch=case.k_batch)
    inputs = case.build()
    _, expected = attention(*inputs[:3], **inputs.options, return_lse=True)
    alone = logsumexp(inputs.q, inputs.k, **inputs.options)
    of_lse = error_bound(case).lse
    allowed = of_lse._replace(value=expected.astype(np.float64), bound=2 * of_lse.bound)
    assert_near(alone, allowed, "lse without values", case)
