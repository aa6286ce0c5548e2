"""Values of the ends and lengths of sequences that lie end to end."""

from __future__ import annotations

import numbers
from typing import Any

import numpy as np

from .problem import AttentionArrays, AttentionProblem


def check_sequences(problem: AttentionProblem, arrays: AttentionArrays, *, wait: bool) -> None:
    """Raise ValueError unless the ends of sequences, and lengths in them, are what they should be.

    Values on a GPU are looked at, and waited for, only with `wait`.
    """

    def values(x: Any) -> np.ndarray | None:
        if wait and hasattr(x, "get"):
            x = x.get()
        return np.asarray(x, np.int64) if isinstance(x, numbers.Real | np.ndarray) else None

    lengths: dict[str, np.ndarray] = {}
    for name, total in (("cu_seqlens_q", problem.tq), ("cu_seqlens_k", problem.tk)):
        ends = values(getattr(arrays, name))
        if ends is None:
            continue
        lengths[name] = np.diff(ends)
        if ends[0] != 0:
            raise ValueError(f"{name} begins with {ends[0]}; the first sequence begins at 0")
        if (lengths[name] < 0).any():
            at = int(np.argmax(lengths[name] < 0))
            raise ValueError(f"{name} falls from {ends[at]} to {ends[at + 1]} at index {at + 1}")
        if ends[-1] > total:
            raise ValueError(f"{name} ends with {ends[-1]}; there are {total} tokens")
    used = values(arrays.key_lengths)
    if used is not None and "cu_seqlens_k" in lengths:
        used, have = np.broadcast_arrays(used, lengths["cu_seqlens_k"])
        if (used > have).any():
            at = int(np.argmax(used > have))
            raise ValueError(f"key_lengths has {used[at]} for sequence {at} of {have[at]} keys")
