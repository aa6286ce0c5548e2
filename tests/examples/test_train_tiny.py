"""The character model: each gradient against differences, and what training promises."""

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from examples import train_tiny
from examples.train_tiny import Config, Model, Source

TINY = Config(batch=3, context=7, features=8, heads=2, blocks=2)
SMALL = Config(batch=16, context=16, features=32, heads=2, blocks=2, rate=1e-2)
TEXT = train_tiny.TEXT.read_text(encoding="utf-8")
VOCABULARY = "".join(sorted(set(TEXT)))


def source() -> Source:
    return Source(1, dtype=np.float64)


LAYERS: dict[str, Callable[[], train_tiny.Layer]] = {
    "affine": lambda: train_tiny.Affine(source(), 12, 5),
    "layer_norm": lambda: train_tiny.LayerNorm(source(), 12),
    "gelu": lambda: train_tiny.Gelu(np),
    "heads": lambda: train_tiny.Heads(2, np),
    "chain": lambda: train_tiny.Chain(
        train_tiny.Affine(source(), 12, 9), train_tiny.Gelu(np), train_tiny.LayerNorm(source(), 9)
    ),
    "residual": lambda: train_tiny.Residual(
        train_tiny.LayerNorm(source(), 12), train_tiny.Affine(source(), 12, 12)
    ),
}


def slope(f: Callable[[], float], x: np.ndarray, direction: np.ndarray) -> float:
    """Central difference of f as x, which f reads, goes in a direction, to the fourth order."""
    before, step = x.copy(), 1e-4
    values = []
    for multiple in (-2, -1, 1, 2):
        x[...] = before + multiple * step * direction
        values.append(f())
    x[...] = before
    return float(np.dot(values, [1, -8, 8, -1]) / (12 * step))


def perturb(parameters: tuple[train_tiny.Parameter, ...], rng: np.random.Generator) -> None:
    """Move parameters away from first values like 0 and 1, which could hide a mistake."""
    for p in parameters:
        p.value += 0.3 * rng.standard_normal(p.value.shape)


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_of_a_layer(name: str, rng: np.random.Generator) -> None:
    layer = LAYERS[name]()
    perturb(layer.parameters, rng)
    x = rng.standard_normal((3, 5, 12))
    y, saved = layer(x)
    dy = rng.standard_normal(y.shape)
    dx = layer.vjp(dy, saved)
    assert dx.shape == x.shape
    for array, gradient in [(x, dx), *((p.value, p.gradient) for p in layer.parameters)]:
        direction = rng.standard_normal(array.shape)
        expected = slope(lambda: float((layer(x)[0] * dy).sum()), array, direction)
        assert (gradient * direction).sum() == pytest.approx(expected, rel=1e-7, abs=1e-7)


def test_gradients_of_the_embedding(rng: np.random.Generator) -> None:
    layer = train_tiny.Embedding(source(), 5, 9, 4)
    ids = rng.integers(5, size=(3, 7))  # characters that are there often, and places that are not
    y, saved = layer(ids)
    dy = rng.standard_normal(y.shape)
    layer.vjp(dy, saved)
    for p in layer.parameters:
        direction = rng.standard_normal(p.value.shape)
        expected = slope(lambda: float((layer(ids)[0] * dy).sum()), p.value, direction)
        assert (p.gradient * direction).sum() == pytest.approx(expected, rel=1e-9)


def test_gradients_of_the_whole_model(rng: np.random.Generator) -> None:
    """Of every parameter, in a direction in which each of its entries has a part."""
    model = Model("abcdef", TINY, dtype=np.float64)
    perturb(model.parameters, rng)
    ids, following = rng.integers(6, size=(2, 3, 7))
    model.backpropagate(ids, following)
    gradients = [p.gradient.copy() for p in model.parameters]
    # Two in the embedding, two in each of six norms and maps of a block, four after the blocks.
    assert len(gradients) == 2 + 2 * 12 + 4
    for p, gradient in zip(model.parameters, gradients, strict=True):
        direction = rng.standard_normal(p.value.shape)
        expected = slope(lambda: model.backpropagate(ids, following), p.value, direction)
        assert (gradient * direction).sum() == pytest.approx(expected, rel=1e-6, abs=1e-8)


def test_loss_is_that_of_the_formula(rng: np.random.Generator) -> None:
    model = Model("abcdef", TINY, dtype=np.float64)
    ids, following = rng.integers(6, size=(2, 3, 7))
    scores, _ = model(ids)
    p = np.exp(scores) / np.exp(scores).sum(axis=-1, keepdims=True)
    chosen = np.take_along_axis(p, following[..., None], axis=-1)
    assert model.backpropagate(ids, following) == pytest.approx(-np.log(chosen).mean(), rel=1e-12)


def test_no_character_sees_a_later_one(rng: np.random.Generator) -> None:
    model = Model("abcdef", TINY)
    ids = rng.integers(6, size=(2, 7))
    changed = ids.copy()
    changed[:, 4:] = (ids[:, 4:] + 1) % 6
    before, after = model(ids)[0], model(changed)[0]
    np.testing.assert_array_equal(before[:, :4], after[:, :4])
    assert (before[:, 4:] != after[:, 4:]).any(axis=-1).all()


def test_adam_follows_its_paper(rng: np.random.Generator) -> None:
    p = train_tiny.Parameter(rng.standard_normal(4))
    expected, m, v = p.value.copy(), np.zeros(4), np.zeros(4)
    adam = train_tiny.Adam([p])
    for t in range(1, 5):
        g = rng.standard_normal(4)
        p.gradient += g
        adam.step(0.1)
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g**2
        expected -= 0.1 * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.99**t)) + 1e-8)
        np.testing.assert_allclose(p.value, expected, rtol=1e-12)
        assert (p.gradient == 0).all()


def small_losses(steps: int, seed: int = 0, **options: Any) -> list[float]:
    model = Model(VOCABULARY, SMALL, seed=seed, **options)
    return list(train_tiny.train(model, TEXT, steps, seed))


def test_loss_falls_below_what_pairs_of_characters_tell() -> None:
    """Below the entropy of a character after the one before it: attention has been learnt."""
    ids = np.array([VOCABULARY.index(c) for c in TEXT])
    pairs = np.zeros((len(VOCABULARY), len(VOCABULARY)))
    np.add.at(pairs, (ids[:-1], ids[1:]), 1)
    joint = pairs / pairs.sum()
    given = pairs / np.maximum(pairs.sum(axis=1, keepdims=True), 1)
    entropy = -(joint * np.log(np.where(pairs, given, 1))).sum()

    model = Model(VOCABULARY, SMALL)
    losses = list(train_tiny.train(model, TEXT, 250))
    assert losses[0] == pytest.approx(np.log(len(VOCABULARY)), abs=0.5)
    assert np.mean(losses[-10:]) < 0.95 * entropy
    # What each window of the text is followed by, as told here and not by `train`.
    windows = np.stack([ids[i : i + SMALL.context + 1] for i in range(0, len(ids) - 20, 16)])
    of_text = model.backpropagate(windows[:, :-1], windows[:, 1:])
    assert of_text == pytest.approx(np.mean(losses[-10:]), abs=0.1)


def test_a_seed_is_a_training() -> None:
    first, again, other = small_losses(5), small_losses(5), small_losses(5, seed=1)
    assert first == again
    assert first != other


def test_samples_follow_the_seed_and_the_temperature() -> None:
    model = Model(VOCABULARY, SMALL)
    start = TEXT[:40]  # longer than the context

    def draw(**options: Any) -> str:
        return "".join(model.sample(start, 20, **options))

    assert draw() == draw()
    assert draw() != draw(seed=1)
    assert draw(temperature=1e-6) == draw(temperature=1e-6, seed=1)
    # Far below all differences, the likeliest one.
    scores = model(model.encode(start)[None, -SMALL.context :])[0][0, -1]
    assert draw(temperature=1e-6)[0] == VOCABULARY[scores.argmax()]


def test_text_is_eight_sonnets() -> None:
    sonnets = [sonnet.splitlines() for sonnet in TEXT.split("\n\n")]
    assert [len(lines) for lines in sonnets] == [14] * 8
    assert TEXT.isascii()
    assert len(VOCABULARY) == 55


# ----------------------------------------------------------------------------------------- program


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(train_tiny, "Config", lambda: SMALL)
    yield


@pytest.mark.usefixtures("quick")
def test_program_trains_draws_and_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "loss.png"
    train_tiny.main(["--steps", "12", "--sample", "30", "--plot", str(path)])
    printed = capsys.readouterr()
    losses = small_losses(12)
    assert f"loss {np.mean(losses[-10:]):.3f}, the mean of the last 10 steps" in printed.out
    assert "\nShall I compare " in printed.out
    assert len(printed.out.partition("\n\n")[2]) == len("Shall I compare ") + 30 + 1
    assert printed.err.count("\r") == 12
    assert printed.err.rstrip().endswith(f"loss {losses[-1]:.2f}")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_plot_shows_the_losses() -> None:
    (axes,) = train_tiny.plot([3, 2, 1], 55).axes
    np.testing.assert_array_equal(axes.lines[0].get_xydata(), [[1, 3], [2, 2], [3, 1]])
    assert [line.get_ydata()[0] for line in axes.lines[1:]] == [np.log(55), train_tiny.TARGET]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "--steps 0: 1 or more"),
        (["--sample", "-1"], "--sample -1: 0 or more"),
        (["--seed", "-1"], "--seed -1: 0 or more"),
        (["--plot", "{folder}/none/loss.png"], "no such folder"),
        (["--plot", "{folder}/loss.txt"], "name a .png, .svg or .pdf file"),
        (["--text", "{folder}/none.txt"], "none.txt: "),
        (["--text", "{folder}/short.txt"], "short.txt: 65 characters at least"),
        (["--text", "{folder}/latin.txt"], "latin.txt: 'utf-8' codec"),
        (["--array-library", "torch"], "invalid choice"),
    ],
)
def test_bad_arguments_are_told(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "short.txt").write_text("a" * 64)
    (tmp_path / "latin.txt").write_bytes(b"\xe9" * 100)
    with pytest.raises(SystemExit) as exit:
        train_tiny.main([argument.format(folder=tmp_path) for argument in arguments])
    assert exit.value.code == 2
    assert message in capsys.readouterr().err


def test_missing_matplotlib_is_told_before_training(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name)
    )
    with pytest.raises(SystemExit):
        train_tiny.main(["--plot", "loss.png"])
    assert "cuflash[plot]" in capsys.readouterr().err


@pytest.mark.parametrize("installed", [True, False])
def test_missing_device_is_told(
    installed: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_device() -> int:
        raise RuntimeError("no CUDA-capable device is detected")

    runtime = SimpleNamespace(getDeviceCount=no_device)
    cupy = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)) if installed else None
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    with pytest.raises(SystemExit) as exit:
        train_tiny.main(["--array-library", "cupy"])
    assert exit.value.code == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert "--array-library cupy: " in message
    assert ("no CUDA-capable device" in message) == installed


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-10), ("float32", 1e-5)])
def test_on_a_gpu_the_losses_are_the_same(dtype: str, tolerance: float) -> None:
    import cupy

    expected = small_losses(10, dtype=dtype)
    got = small_losses(10, dtype=dtype, xp=cupy)
    np.testing.assert_allclose(got, expected, rtol=tolerance)
    assert got == small_losses(10, dtype=dtype, xp=cupy)
