"""What options cost: the benchmark's rows and targets, on NumPy arrays."""

from __future__ import annotations

import pytest

import benchmarks.attention_options as options
from cuflash.bench.problems import AttentionShape


def test_tiles_that_a_window_shows() -> None:
    assert options.seen_tiles(1, 1) == 1
    assert options.seen_tiles(4 * 128, 4 * 128) == 1 + 2 + 3 + 4
    # A row sees `left` keys before its own: the first row of a tile reaches back by a whole tile.
    assert options.seen_tiles(4 * 128, 128) == 1 + 2 + 2 + 2
    assert options.seen_tiles(4 * 128, 129) == 1 + 2 + 3 + 3


@pytest.mark.usefixtures("numpy_device")
def test_every_option_is_held_against_its_base(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "COPY_BYTES", 1000)
    shape = AttentionShape(2, 2, 24, 8)
    found = options.measure(shape, "tiled", rounds=2, window=1e-4)
    peers = {row["option"]: row["peer"] for row in found}
    plain = ["alibi", "softcap", "bias", "mask", "bias of heads", "mask of heads", "sequences"]
    bases = {"plain": "plain", "causal": "causal", "window": "causal"}
    assert peers == dict.fromkeys(plain, "plain") | bases
    for row in found:
        assert (row["target"] == "") == (row["option"] == row["peer"])
        assert row["rate"] / row["peer rate"] == pytest.approx(row["peer ms"] / row["ms"])
    target = {row["option"]: row["target"] for row in found}
    assert target["alibi"] == pytest.approx(1 / 1.1, abs=1e-3)
    assert target["sequences"] == pytest.approx(1 / 1.05, abs=1e-3)
    # Reading takes time, four times as many bytes more of it.
    assert 0 < target["bias of heads"] < target["mask of heads"] < 1 / 1.15


@pytest.mark.usefixtures("numpy_device")
def test_what_a_family_cannot_run_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert options.measure(AttentionShape(1, 1, 4, 8), "wgmma", rounds=1, window=1e-4) == []
    assert "wgmma, alibi, is left out" in capsys.readouterr().out
