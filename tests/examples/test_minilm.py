"""The sentence encoder: against an independent formula on a tiny model, and as it is if fetched."""

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from cuflash import _demo
from examples import minilm

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "cat", "sat", "on", "mat", ",", "."]
LAYERS, HEADS, SIZE, INNER, POSITIONS, MAX_TOKENS = 2, 3, 12, 20, 300, 9
TEXTS = ("the cat sat on the mat .", "cat", "", "the unknown , the cat " * 4)


@pytest.fixture
def folder(tmp_path: Path, rng: np.random.Generator) -> Path:
    """A model folder of the real one's format, with random weights of tiny shapes."""
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (len(WORDS), SIZE),
        "embeddings.position_embeddings.weight": (POSITIONS, SIZE),
        "embeddings.token_type_embeddings.weight": (2, SIZE),
    }
    norms = ["embeddings.LayerNorm"]
    for i in range(LAYERS):
        name = f"encoder.layer.{i}"
        norms += [f"{name}.attention.output.LayerNorm", f"{name}.output.LayerNorm"]
        dense = {f"attention.self.{part}": (SIZE, SIZE) for part in ("query", "key", "value")} | {
            "attention.output.dense": (SIZE, SIZE),
            "intermediate.dense": (INNER, SIZE),
            "output.dense": (SIZE, INNER),
        }
        for part, shape in dense.items():
            shapes[f"{name}.{part}.weight"] = shape
            shapes[f"{name}.{part}.bias"] = shape[:1]
    for name in norms:
        shapes |= {f"{name}.weight": (SIZE,), f"{name}.bias": (SIZE,)}
    weights = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    save_file(weights, tmp_path / "model.safetensors")

    config = {
        "model_type": "bert",
        "hidden_act": "gelu",
        "position_embedding_type": "absolute",
        "hidden_size": SIZE,
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "max_position_embeddings": POSITIONS,
        "layer_norm_eps": 1e-12,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": MAX_TOKENS}))

    vocabulary = {word: i for i, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    # As in the real folder, where these settings are not those of the sentence encoder.
    tokenizer.enable_padding(length=5)
    tokenizer.enable_truncation(4)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def words_of(text: str) -> list[int]:
    words = [WORDS.index(word) if word in WORDS else 1 for word in text.split()]
    return [2, *words[: MAX_TOKENS - 2], 3]


def embedding(weights: dict[str, Any], ids: list[int]) -> np.ndarray:
    """One text's unit vector in float64, one token and one head at a time."""
    w = {name: np.asarray(x, np.float64) for name, x in weights.items()}

    def norm(name: str, x: np.ndarray) -> np.ndarray:
        unit = (x - np.mean(x)) / math.sqrt(np.var(x) + 1e-12)
        return unit * w[f"{name}.weight"] + w[f"{name}.bias"]

    def dense(name: str, x: np.ndarray) -> np.ndarray:
        return w[f"{name}.weight"] @ x + w[f"{name}.bias"]

    tokens = [
        norm(
            "embeddings.LayerNorm",
            w["embeddings.word_embeddings.weight"][word]
            + w["embeddings.position_embeddings.weight"][position]
            + w["embeddings.token_type_embeddings.weight"][0],
        )
        for position, word in enumerate(ids)
    ]
    d = SIZE // HEADS
    for i in range(LAYERS):
        name = f"encoder.layer.{i}"
        q, k, v = (
            [dense(f"{name}.attention.self.{part}", x) for x in tokens]
            for part in ("query", "key", "value")
        )
        for t, x in enumerate(tokens):
            context = np.zeros(SIZE)
            for head in range(HEADS):
                part = slice(head * d, head * d + d)
                weight = [math.exp(q[t][part] @ key[part] / math.sqrt(d)) for key in k]
                for share, value in zip(weight, v, strict=True):
                    context[part] += share / sum(weight) * value[part]
            attended = norm(
                f"{name}.attention.output.LayerNorm",
                x + dense(f"{name}.attention.output.dense", context),
            )
            inner = dense(f"{name}.intermediate.dense", attended)
            inner = np.array([y * (1 + math.erf(y / math.sqrt(2))) / 2 for y in inner])
            tokens[t] = norm(
                f"{name}.output.LayerNorm", attended + dense(f"{name}.output.dense", inner)
            )
    mean = sum(tokens) / len(tokens)
    return mean / math.sqrt(mean @ mean)


def test_gelu() -> None:
    x = np.linspace(-8, 8, 1001, dtype=np.float32)
    expected = [float(y) * (1 + math.erf(float(y) / math.sqrt(2))) / 2 for y in x]
    np.testing.assert_allclose(minilm.gelu(x, np), expected, atol=1e-6)
    assert minilm.gelu(x, np).dtype == np.float32


def test_embeddings_of_a_batch(folder: Path) -> None:
    model = minilm.Model(folder)
    expected = [embedding(model.encoder.weights, words_of(text)) for text in TEXTS]
    got = model(TEXTS)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, expected, atol=minilm.TOLERANCE)


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
def test_attention_in_other_precisions(dtype: str, folder: Path) -> None:
    expected = minilm.Model(folder)(TEXTS)
    got = minilm.Model(folder, attention_dtype=np.dtype(dtype))(TEXTS)
    assert got.dtype == np.float32
    assert 0 < abs(got - expected).max() < minilm.TOLERANCES[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_embeddings_on_the_device(dtype: str, folder: Path) -> None:
    import cupy

    expected = minilm.Model(folder)(TEXTS)
    got = minilm.Model(folder, cupy, attention_dtype=np.dtype(dtype))(TEXTS)
    assert isinstance(got, cupy.ndarray)
    assert abs(got.get() - expected).max() < minilm.TOLERANCES[dtype]


def test_the_bounds_are_those_that_the_page_states() -> None:
    assert minilm.__doc__ is not None
    stated = " ".join(minilm.__doc__.split())
    assert (
        "1e-5 with attention in float32 or float64, 5e-3 in float16 and 4e-2 in bfloat16" in stated
    )
    assert minilm.TOLERANCES == {
        "float64": 1e-5,
        "float32": 1e-5,
        "float16": 5e-3,
        "bfloat16": 4e-2,
    }


def test_check_sees_a_difference(folder: Path, tmp_path: Path) -> None:
    model = minilm.Model(folder)
    embeddings = model(TEXTS)
    embeddings[1, 3] += 0.25
    np.savez(tmp_path / "expected.npz", texts=np.array(TEXTS), embeddings=embeddings)
    assert minilm.check(model, tmp_path / "expected.npz") == pytest.approx(0.25, abs=1e-4)


def test_written_layer_is_what_the_demo_reads(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "layer.npz"
    minilm.main(["--model", str(folder), "--write-layer", str(path), "--layer", "1"])
    layer = _demo.Layer.read(path)
    model = minilm.Model(folder)
    # The second layer's own input, by the first layer.
    text = " ".join(minilm.TEXT.read_text().split())
    ids, lengths = model.tokenize([text], POSITIONS)
    hidden = model.encoder.layer(0, model.encoder.embed(ids), lengths)
    for name, expected in zip("qkv", model.encoder.qkv(1, hidden), strict=True):
        np.testing.assert_array_equal(getattr(layer, name), expected, strict=True)
    assert layer.tokens[:2] == ("[CLS]", "[UNK]")
    assert "," in layer.tokens
    assert layer.provenance["layer"] == 1
    assert layer.provenance["text"] == text


def test_other_architectures_are_refused(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text()) | {"hidden_act": "relu"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="relu"):
        minilm.Model(folder)


def test_similarities(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    minilm.main(["--model", str(folder), "cat", "cat", "mat"])
    first, second, third = (line.split() for line in capsys.readouterr().out.splitlines())
    assert first[:2] == second[:2] == ["1.000", "1.000"]
    assert first[2] == third[0] != "1.000"


def test_missing_model_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        minilm.main(["--model", str(tmp_path)])
    assert exit.value.code == 2
    assert "make minilm" in capsys.readouterr().err


@pytest.mark.parametrize("layer", ["-1", "2", "99"])
def test_missing_layer_is_told(
    layer: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "layer.npz"
    with pytest.raises(SystemExit) as exit:
        minilm.main(["--model", str(folder), "--write-layer", str(path), "--layer", layer])
    assert exit.value.code == 2
    assert f"--layer {layer}: the model has layers 0 to 1" in capsys.readouterr().err
    assert not path.exists()


@pytest.mark.parametrize("installed", [True, False])
def test_missing_device_is_told(
    installed: bool,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def no_device() -> int:
        raise RuntimeError("no CUDA-capable device is detected")

    runtime = SimpleNamespace(getDeviceCount=no_device)
    cupy = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)) if installed else None
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    with pytest.raises(SystemExit) as exit:
        minilm.main(["--model", str(folder), "--array-library", "cupy", "cat"])
    assert exit.value.code == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert "--array-library cupy: " in message
    assert ("no CUDA-capable device" in message) == installed


fetched = pytest.mark.skipif(
    not (minilm.MODEL / minilm.WEIGHTS).is_file(), reason="the model is fetched by `make minilm`"
)


@fetched
def test_embeddings_are_those_of_sentence_transformers() -> None:
    assert minilm.check(minilm.Model(minilm.MODEL)) < minilm.TOLERANCE


@fetched
def test_packaged_layer_is_made_by_this_script() -> None:
    packaged = _demo.Layer.read()
    model = minilm.Model(minilm.MODEL)
    arrays = minilm.layer_arrays(model, minilm.MODEL, packaged.provenance["layer"])
    for name in "qkv":
        np.testing.assert_allclose(arrays[name], getattr(packaged, name), atol=1e-4)
    assert packaged.tokens == tuple(arrays["tokens"])
    made = json.loads(str(arrays["provenance"]))
    assert packaged.provenance | {"versions": None} == made | {"versions": None}
