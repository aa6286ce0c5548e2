"""What operations cost in memory, traffic and time, on paper: no GPU is needed."""

from .roofline import GPUS, Roofline, roofline
from .traffic import METHODS, Kernel, Traffic, largest_tokens, scores_bytes, traffic

__all__ = [
    "GPUS",
    "METHODS",
    "Kernel",
    "Roofline",
    "Traffic",
    "largest_tokens",
    "roofline",
    "scores_bytes",
    "traffic",
]
