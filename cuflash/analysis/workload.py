"""What pictures and the page are about: attention of one size, and how its methods look."""

from __future__ import annotations

from dataclasses import dataclass

from .traffic import Traffic, largest_tokens, traffic

__all__ = ["COLORS", "LABELS", "TOKENS", "Workload"]

#: The numbers of tokens that pictures span.
TOKENS = tuple(2**power for power in range(7, 21))
#: The methods of attention, as pictures call them.
LABELS = {
    "materialized": "materialized (three kernels)",
    "scores_fused": "scores fused (two kernels)",
    "flash": "flash (one kernel)",
}
COLORS = {"materialized": "#d62728", "scores_fused": "#ff7f0e", "flash": "#1f77b4"}


@dataclass(frozen=True, slots=True)
class Workload:
    """Attention with q, k, v of shape (batch, heads, T, d), T to be varied."""

    batch: int
    heads: int
    d: int
    dtype: str

    def at(self, tokens: int, method: str) -> Traffic:
        """Return what attention over so many tokens costs."""
        return traffic("attention", (self.batch, self.heads, tokens, self.d), self.dtype, method)

    def limit(self, method: str, capacity: int) -> int:
        """Return the most tokens that fit into memory."""
        return largest_tokens((self.batch, self.heads, self.d), self.dtype, method, capacity)

    def __str__(self) -> str:
        """Return the sizes, for a title."""
        return f"B = {self.batch}, H = {self.heads}, D = {self.d}, {self.dtype}"
