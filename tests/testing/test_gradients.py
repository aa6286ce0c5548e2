"""The properties of gradients pass right ones and catch each fault they exist to catch."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

import cuflash
from cuflash import AttentionGrads, reference
from cuflash.testing.bounds import assert_gradients_close, expect_gradients
from cuflash.testing.gradient_cases import GRADIENT_CASES
from cuflash.testing.gradients import GRADIENT_PROPERTIES
from cuflash.testing.strategies import attention_problems, varlen_problems
from cuflash.testing.varlen_gradients import VARLEN_GRADIENT_PROPERTIES
from tests.testing.faulty_gradients import attention_vjp
from tests.testing.test_kit import assert_caught, run

cases = attention_problems(
    dtypes=("float32",),
    borders=(16,),
    max_tokens=20,
    max_features=5,
    max_batch_axes=2,
    layouts=("contiguous", "fortran", "step"),
)


@pytest.mark.parametrize(
    ("case", "spoil"),
    [
        ("case_nan_row", np.isnan),
        ("case_nan_row", np.isfinite),
        ("case_uninitialised_cache", np.isfinite),
    ],
)
def test_cases_hold_gradients_in_any_order_too(case, spoil):
    """Only those that are deterministic are right: the others hide NaN, or have it elsewhere."""

    def pull_back(*arrays, deterministic=False, **options):
        grads = cuflash.flash_attention_vjp(*arrays, **options)
        if not deterministic:
            dq = np.where(spoil(grads.dq), 0 if spoil is np.isnan else np.nan, grads.dq)
            grads = grads._replace(dq=dq.astype(grads.dq.dtype))
        return grads

    library = SimpleNamespace(
        flash_attention=cuflash.flash_attention, flash_attention_vjp=pull_back
    )
    with pytest.raises(AssertionError, match="NaN at the same places"):
        GRADIENT_CASES[case](library)


@pytest.mark.parametrize("law", GRADIENT_PROPERTIES)
def test_right_gradients_pass(law):
    run(partial(GRADIENT_PROPERTIES[law], attention_vjp), cases, 25)


@pytest.mark.parametrize(
    ("law", "fault"),
    [
        ("matches_oracle", "sums in float16"),
        ("matches_oracle", "ignores dlse"),
        ("matches_oracle", "causal mask off by one"),
        ("matches_oracle", "forgets the softcap"),
        ("adjoint_identity", "ignores dlse"),
        ("adjoint_identity", "forgets the softcap"),
        ("finite_differences", "ignores dlse"),
        ("finite_differences", "forgets the softcap"),
        ("linearity_in_dout", "takes the absolute value"),
        ("gradient_of_lse", "ignores dlse"),
        ("broadcast_equals_repeated_then_summed", "mean over what broadcasts"),
        ("unseen_gradients_are_zero", "adds to hidden keys"),
        ("unseen_nonfinite_never_leaks", "multiplies by zero"),
        ("nonfinite_row_reaches_only_what_it_sees", "multiplies by zero"),
        ("row_independence", "multiplies by zero"),
        ("batch_independence", "multiplies by zero"),
        ("views_equal_copies", "ignores strides of dout"),
        ("poisoned_outputs_fully_written", "leaves zeros unwritten"),
        ("only_what_is_asked_for", "returns everything"),
        ("repeatable", "never the same"),
        ("inputs_unchanged", "scales q in place"),
    ],
)
def test_a_fault_is_caught(law, fault):
    assert_caught(partial(GRADIENT_PROPERTIES[law], partial(attention_vjp, fault=fault)), cases)


def varlen_vjp(
    dout,
    q,
    k,
    v,
    out,
    lse,
    cu_q,
    cu_k,
    *,
    dlse=None,
    grads=None,
    deterministic=False,
    fault=None,
    **options,
):
    """Gradients of sequences end to end, of the oracle but for the fault."""
    del out, lse, deterministic
    past = int(cu_q[-1])
    dout = np.where(np.arange(dout.shape[-2])[:, None] < past, dout, 0)
    if fault == "reads past the end":
        dlse = dlse + dout.astype(np.float64).sum()
    if fault == "shares the last key":
        cu_k = np.maximum(cu_k - 1, 0)
    results = reference.attention_varlen_vjp(dout, q, k, v, cu_q, cu_k, dlse=dlse, **options)
    operands = {"dq": q, "dk": k, "dv": v, "dsinks": options.get("sinks")}
    members = {}
    for name, operand in operands.items():
        if operand is None:
            continue
        x = getattr(results, name)
        if fault == "mixes sequences" and name != "dsinks":
            x = x + 0 * q.astype(np.float64).sum()
        members[name] = x.astype(operand.dtype.newbyteorder("="))
        if grads is not None and (buffer := getattr(grads, name)) is not None:
            end = past if fault == "leaves the end unwritten" and name == "dq" else None
            tokens = (..., slice(None, end), slice(None)) if name != "dsinks" else ...
            buffer[tokens] = members[name][tokens]
            members[name] = buffer
    return AttentionGrads(**members)


packed = varlen_problems(
    dtypes=("float32",), borders=(), max_tokens=9, max_features=5, non_finite=False
)


@pytest.mark.parametrize("law", VARLEN_GRADIENT_PROPERTIES)
def test_right_gradients_of_sequences_pass(law):
    run(partial(VARLEN_GRADIENT_PROPERTIES[law], varlen_vjp), packed, 25)


@pytest.mark.parametrize(
    ("law", "fault"),
    [
        ("each_sequence_matches_oracle", "shares the last key"),
        ("sequence_independence", "mixes sequences"),
        ("packed_outputs_fully_written", "leaves the end unwritten"),
    ],
)
def test_a_fault_of_sequences_is_caught(law, fault):
    vjp = partial(varlen_vjp, fault=fault)
    assert_caught(partial(VARLEN_GRADIENT_PROPERTIES[law], vjp), packed)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
def test_the_bound_is_tight_enough_for_a_few_roundings(dtype):
    """Relative errors of 2000 roundoffs are caught in every gradient, those of one are not."""
    rng = np.random.default_rng(0)
    q, k, v, dout = (rng.normal(size=(3, 20, 8)).astype(dtype) for _ in range(4))
    options = {"bias": rng.normal(size=(20, 20)).astype(dtype), "sinks": np.zeros(3, dtype)}
    expected = expect_gradients(dout, q, k, v, **options)
    eps = np.finfo(dtype).eps
    for size in (0.5, 2000):
        for name, x in expected._asdict().items():
            moved = x.value * (1 + size * eps)
            grads = AttentionGrads(**{name: moved})
            if size < 1:
                assert_gradients_close(grads, expected)
            else:
                with pytest.raises(AssertionError, match=rf"^{name}\["):
                    assert_gradients_close(grads, expected)
