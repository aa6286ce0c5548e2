"""These tests need CuPy, though most of them no GPU: without it they are not collected."""

import importlib.util

import pytest

collect_ignore_glob = [] if importlib.util.find_spec("cupy") else ["test_*.py"]


#: What finds the tile of a problem, by the tile's class.
FINDERS = {
    "MmaTile": "mma_tile",
    "DmmaTile": "dmma_tile",
    "Tf32Tile": "tf32_tile",
    "DecodeChoice": "decode_choice",
}


@pytest.fixture
def plans_of_one_tile(monkeypatch):
    """Return a function that lets every plan of a family take a tile, until the test ends."""
    attention_plans = pytest.importorskip("cuflash.device.attention_plans")
    caches = (attention_plans._forward, attention_plans.plan_attention)

    def take(tile):
        monkeypatch.setattr(attention_plans, FINDERS[type(tile).__name__], lambda *problem: tile)

    for cache in caches:
        cache.cache_clear()
    yield take
    for cache in caches:
        cache.cache_clear()
