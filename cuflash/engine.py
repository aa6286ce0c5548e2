"""The boundary between what users call and what computes it.

An engine is a module with the functions of `Engine`. It is told what to do by a frozen problem and
the native arrays, allocates what `empty` is asked for, and fills outputs in place. `cuflash.host`
(NumPy) and `cuflash.device.engine` (CuPy) are engines.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, Protocol, cast

import numpy as np

from .problem import AttentionArrays, AttentionProblem, SoftmaxProblem
from .problem_fused import (
    Dropout,
    LayerNormArrays,
    LayerNormGrads,
    LayerNormProblem,
    MatmulProblem,
)
from .problem_vjp import AttentionGrads, AttentionResults, AttentionVjpProblem

#: What each engine can run besides "auto".
ATTENTION_METHODS = {"host": ("tiled",), "device": ("simt", "mma", "wgmma")}
SOFTMAX_METHODS = {
    "host": ("naive", "fused", "online"),
    "device": ("naive", "fused", "online", "cluster"),
}


class Engine(Protocol):
    """What `cuflash.host` and `cuflash.device.engine` provide."""

    def device_of(self, x: Any) -> AbstractContextManager[Any]:
        """Make the device of an array the current one: where the other functions then work."""

    def empty(
        self, shape: tuple[int, ...], dtype: np.dtype, strides: tuple[int, ...] | None = None
    ) -> Any:
        """Allocate a native array, its axes in memory in the order of falling `strides`."""

    def attention_methods(self, problem: AttentionProblem) -> Sequence[str]:
        """Return the methods, besides "auto", that can run this problem here."""

    def attention_workspace(self, problem: AttentionProblem) -> int:
        """Return the bytes of workspace that `attention` needs for this problem."""

    def attention(
        self, problem: AttentionProblem, arrays: AttentionArrays, out: Any, lse: Any, workspace: Any
    ) -> None:
        """Fill `out` and, unless None, `lse`."""

    def attention_vjp_methods(self, problem: AttentionVjpProblem) -> Sequence[str]:
        """Return the methods, besides "auto", that can run this problem here."""

    def attention_vjp_workspace(self, problem: AttentionVjpProblem) -> int:
        """Return the bytes of workspace that `attention_vjp` needs for this problem.

        They do not depend on `problem.results` and, where sequences lie end to end, not on how
        many these are; fewer gradients never need more.
        """

    def attention_vjp(
        self,
        problem: AttentionVjpProblem,
        arrays: AttentionArrays,
        results: AttentionResults,
        grads: AttentionGrads,
        workspace: Any,
    ) -> None:
        """Fill every element of the gradients that are not None.

        A gradient has all axes of its operand's full shape, size 1 on those along which it is to
        be summed; its dtype is its operand's, its strides any.
        """

    def merge_attention_vjp(
        self,
        cotangents: tuple[Any, Any],
        parts: Sequence[tuple[Any, Any]],
        grads: Sequence[tuple[Any, Any]],
    ) -> None:
        """Fill the (dout_i, dlse_i) pairs `grads` of the two (out_i, lse_i) pairs `parts`.

        `cotangents` are those of the merged out and lse, the latter None if it is zero.
        """

    def materialized_attention(
        self, problem: AttentionProblem, arrays: AttentionArrays, out: Any, lse: Any | None
    ) -> None:
        """Fill `out`, and `lse` if it is wanted, by the plain formula, all scores in memory."""

    def scores_fused_attention(
        self, problem: AttentionProblem, arrays: AttentionArrays, out: Any, lse: Any | None
    ) -> None:
        """Fill `out`, and `lse` if it is wanted, all weights in memory, all scores not."""

    def matmul_bias_activation(
        self, problem: MatmulProblem, a: Any, b: Any, bias: Any, out: Any
    ) -> None:
        """Fill `out` with activation(a @ b + bias)."""

    def dropout_bias_layer_norm(
        self,
        problem: LayerNormProblem,
        dropout: Dropout,
        arrays: LayerNormArrays,
        y: Any,
        mean: Any,
        rstd: Any,
    ) -> None:
        """Fill `y` and, unless None, `mean` and `rstd`; all lie in C order."""

    def dropout_bias_layer_norm_vjp(
        self,
        problem: LayerNormProblem,
        dropout: Dropout,
        arrays: LayerNormArrays,
        grads: LayerNormGrads,
    ) -> None:
        """Fill the gradients, which lie in C order; `dresidual` is None without a residual."""

    def unfused_softmax(self, x: Any, y: Any) -> None:
        """Fill `y`, in C order, with the softmax over the last axis, a pass for each operation."""

    def unfused_matmul_bias_activation(
        self, problem: MatmulProblem, a: Any, b: Any, bias: Any, out: Any
    ) -> None:
        """Do what `matmul_bias_activation` does, a pass for each operation."""

    def unfused_dropout_bias_layer_norm(
        self, problem: LayerNormProblem, dropout: Dropout, arrays: LayerNormArrays, y: Any
    ) -> None:
        """Do what `dropout_bias_layer_norm` does, a pass for each operation."""

    def softmax(
        self, problem: SoftmaxProblem, inputs: Sequence[Any], where: Any, outputs: Sequence[Any]
    ) -> None:
        """Compute `problem.operation`.

        `outputs` is one array; for the state two, maximum and normalizer.
        """

    def merge_softmax(
        self, parts: Sequence[tuple[Any, Any]], maximum: Any, normalizer: Any
    ) -> None:
        """Fill (maximum, normalizer) with the merge of the (m, l) pairs."""

    def merge_attention(self, parts: Sequence[tuple[Any, Any]], out: Any, lse: Any) -> None:
        """Fill (out, lse) with attention over the union of the parts' key sets."""


_MODULES = {"host": ".host", "device": ".device.engine"}


@cache
def load(name: str) -> Engine:
    """Import the engine "host" or "device"."""
    return cast(Engine, importlib.import_module(_MODULES[name], __package__))
