"""What tests fetch from the device."""

from __future__ import annotations

from cuflash.fused import LayerNormGrads
from tests.device.arrays import on_device


def test_none_stays_none() -> None:
    """A gradient that was not asked for is None on this side too."""
    grads = LayerNormGrads(*[None] * len(LayerNormGrads._fields))
    fetched = on_device(lambda: grads)()
    assert isinstance(fetched, LayerNormGrads)
    assert all(gradient is None for gradient in fetched)
