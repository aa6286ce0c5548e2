"""The plain formula in CuPy, with NumPy in CuPy's place: the same functions, and no GPU."""

from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings

from cuflash import engine, host
from cuflash.baselines import materialized_attention
from cuflash.device import baselines
from cuflash.problem import AttentionArrays, AttentionProblem
from cuflash.testing.properties import ATTENTION_PROPERTIES
from cuflash.testing.strategies import attention_problems

LAWS = ("matches_oracle", "unseen_nonfinite_never_leaks", "weights_are_convex")


def in_numpy(*operands, **options):
    def compute(*arguments):
        with np.errstate(all="ignore"):
            baselines.materialized_attention(*arguments)

    stand_in = SimpleNamespace(
        device_of=host.device_of,
        empty=host.empty,
        attention_methods=lambda _: (),
        materialized_attention=compute,
    )
    with (
        mock.patch.object(baselines, "cupy", np),
        mock.patch.object(baselines.memory, "readable", lambda x: x),
        mock.patch.object(baselines, "softmax", host.softmax),
        mock.patch.object(engine, "load", lambda name: stand_in),
    ):
        return materialized_attention(*operands, **options)


@pytest.mark.parametrize("law", LAWS)
def test_property_of_three_operations(law):
    @settings(max_examples=settings().max_examples // 4)
    @given(case=attention_problems(max_tokens=40, max_features=40, options=()))
    def holds(case):
        ATTENTION_PROPERTIES[law](in_numpy, case)

    holds()


def test_lse_is_computed_where_it_is_wanted(rng):
    q, k, v = rng.normal(size=(3, 2, 5, 4)).astype(np.float32)
    asked = []
    operands = AttentionArrays(q, k, v, *[None] * (len(AttentionArrays._fields) - 3))
    with (
        mock.patch.object(baselines, "cupy", np),
        mock.patch.object(
            baselines, "softmax", lambda problem, *_: asked.append(problem.operation)
        ),
    ):
        problem = AttentionProblem.of(operands)
        baselines.three_operations(problem, operands, np.empty_like(v), None)
    assert asked == ["softmax"]


@pytest.mark.parametrize("law", LAWS)
def test_property(law):
    @settings(max_examples=settings().max_examples // 2)
    @given(case=attention_problems(max_tokens=40, max_features=40))
    def holds(case):
        ATTENTION_PROPERTIES[law](in_numpy, case)

    holds()
