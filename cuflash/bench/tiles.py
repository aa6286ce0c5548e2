"""Rows of the tables of attention's tiles: which one a problem takes, and calls by any tile."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from . import device
from .problems import AttentionShape, dtype_of
from .timing import Call

if TYPE_CHECKING:
    from ..device.attention_plans import TunedTile
    from ..device.attention_plans_mma import MmaChoice
    from ..device.attention_plans_wgmma import WgmmaChoice
    from ..device.compiler import KernelName
    from ..device.executor import DeviceLimits
    from ..problem import AttentionProblem

#: Options that change scores, each with kernels of its own.
OPTIONS = ("softcap", "bias", "alibi_slopes", "mask")
_SOFTCAP = 30.0
#: Share of the pairs that a mask shows.
_SHOWN = 0.7


class TiledProblem(NamedTuple):
    """Attention of a shape, with at most one of `OPTIONS`."""

    shape: AttentionShape
    option: str = ""

    def __str__(self) -> str:
        """Return what tells it from the other problems of a row."""
        causal = ", causal" if self.shape.causal else ""
        option = f", {self.option}" if self.option else ""
        return f"D = {self.shape.d}, T = {self.shape.tokens}{causal}{option}"

    def arrays(self, sets: int) -> list[dict[str, Any]]:
        """Return sets of operands on the current device, to be used in rotation."""
        shape, of_option = self.shape, {}
        pairs = (shape.tokens, shape.tokens)
        if self.option == "bias":
            of_option = {"bias": device.normal(pairs, "float32", sets)}
        elif self.option == "mask":
            shown = np.random.default_rng(sets).random(pairs, np.float32) < _SHOWN
            of_option = {"mask": device.given(shown)}
        elif self.option == "alibi_slopes":
            slopes = 2.0 ** -np.linspace(1, 8, shape.heads)
            of_option = {"alibi_slopes": device.given(slopes.astype(np.float32))}
        inputs = device.attention_inputs(shape, sets)
        return [dict(zip("qkv", qkv, strict=True)) | of_option for qkv in inputs]

    def described(self) -> AttentionProblem:
        """Return the problem as engines read it."""
        from ..problem import ArraySpec, AttentionArrays, AttentionProblem, c_strides

        def spec(size: tuple[int, ...], dtype: Any) -> ArraySpec:
            kind = np.dtype(dtype)
            return ArraySpec(size, c_strides(size, kind.itemsize), kind)

        shape = self.shape
        pairs = (shape.tokens, shape.tokens)
        of_option = {
            "bias": {"bias": spec(pairs, np.float32)},
            "mask": {"mask": spec(pairs, np.bool)},
            "alibi_slopes": {"alibi_slopes": spec((shape.heads,), np.float32)},
        }
        operand = spec((shape.batch, shape.heads, shape.tokens, shape.d), dtype_of(shape.dtype))
        return AttentionProblem.of(
            AttentionArrays(operand, operand, operand, **of_option.get(self.option, {})),
            causal=shape.causal,
            softcap=_SOFTCAP if self.option == "softcap" else None,
        )


def choice_of(
    table: str, problem: TiledProblem, limits: DeviceLimits
) -> WgmmaChoice | MmaChoice | None:
    """Return the row of a table, "wgmma" or "mma", that a problem takes, if it can run it."""
    from ..device.attention_plans import attention_methods, score_pipeline
    from ..device.attention_plans_mma import mma_choice
    from ..device.attention_plans_wgmma import wgmma_choice

    described = problem.described()
    if table not in attention_methods(described, limits):
        return None
    if table == "wgmma":
        return wgmma_choice(described)
    return mma_choice(described, score_pipeline(described), limits)


def calls_by(
    tiles: Sequence[TunedTile], problem: TiledProblem, sets: int
) -> dict[TunedTile, list[Call]]:
    """Return calls on the current device by each tile, into arrays of their own."""
    import cupy

    from ..device.attention import compute
    from ..device.executor import CurrentDevice
    from ..problem import AttentionArrays

    described, inputs = problem.described(), problem.arrays(sets)
    outputs = [cupy.empty_like(arrays["q"]) for arrays in inputs]
    return {
        tile: [
            partial(
                compute, described, AttentionArrays(**arrays), out, None, None, CurrentDevice(),
                given=tile,
            )
            for arrays, out in zip(inputs, outputs, strict=True)
        ]
        for tile in tiles
    }  # fmt: skip


def kernel_of(problem: TiledProblem, tile: TunedTile, limits: DeviceLimits) -> KernelName:
    """Return the kernel of a problem by a tile."""
    from ..device.attention_plans import plan_attention

    described = problem.described()
    plan = plan_attention(described, described.q, None, limits, tile)
    assert plan.forward is not None, "no problem here is empty"
    return plan.forward.kernel


def warm(kernels: Iterable[KernelName]) -> None:
    """Compile kernels for the current device, several at a time."""
    from ..device.compiler import warm

    warm(kernels)
