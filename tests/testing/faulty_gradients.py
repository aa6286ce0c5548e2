"""Gradients with a fault to order: what each of their properties must be able to catch."""

import itertools

import numpy as np

from cuflash import AttentionGrads, reference

_calls = itertools.count()


@np.errstate(all="ignore")
def attention_vjp(
    dout,
    q,
    k,
    v,
    out,
    lse,
    *,
    fault=None,
    dlse=None,
    deterministic=False,
    grads=None,
    **options,
):
    """Gradients by the plain formula, with the signature of flash_attention_vjp."""
    del out, lse, deterministic
    if fault == "scales q in place":
        q *= q.dtype.type(0.5)
    if fault == "ignores strides of dout":
        dout = dout.ravel(order="K").reshape(dout.shape)
    if fault == "ignores dlse":
        dlse = None
    if fault == "forgets the softcap":
        options = {name: x for name, x in options.items() if name != "softcap"}
    if fault == "causal mask off by one" and options.get("causal"):
        offset = options.get("key_lengths", k.shape[-2])
        offset = offset - options.get("query_lengths", q.shape[-2])
        options["query_offset"] = options.get("query_offset", offset) + 1
    results = reference.attention_vjp(dout, q, k, v, dlse=dlse, **options)
    operands = {"q": q, "k": k, "v": v, "bias": None, "sinks": None} | options
    given = AttentionGrads() if grads is None else grads
    members = {}
    for name, x in results._asdict().items():
        operand, buffer = operands[name[1:]], getattr(given, name)
        asked = grads is None or buffer is not None or fault == "returns everything"
        if x is None or not asked:
            continue
        members[name] = _spoil(name, x, operand, dout, q, k, fault)
        if buffer is not None:
            written = np.ones(x.shape, bool) if fault != "leaves zeros unwritten" else x != 0
            buffer[written] = members[name][written]
            members[name] = buffer
    return AttentionGrads(**members)


def _spoil(name, x, operand, dout, q, k, fault):
    """Round a gradient to its operand's dtype, with the fault."""
    if fault == "multiplies by zero":
        hidden = dout.astype(np.float64).sum() + (q.astype(np.float64).sum() if name == "dq" else 0)
        x = x + 0 * (hidden + (k.astype(np.float64).sum() if name == "dq" else 0))
    if fault == "takes the absolute value":
        x = np.abs(x)
    if fault == "adds to hidden keys" and name == "dk":
        x = x + 1e-3
    if fault == "mean over what broadcasts" and operand.size:
        batch = np.prod(dout.shape[:-2], dtype=int) * dout.shape[-2] * k.shape[-2]
        x = x / max(1, batch // operand.size)
    if fault == "never the same":
        x = x * (1 + next(_calls))
    if fault == "sums in float16":
        x = x.astype(np.float16).astype(np.float64)
    return x.astype(operand.dtype if operand.dtype.isnative else operand.dtype.newbyteorder("="))
