"""A tiny static embedding model with vectors made by hand."""

from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

# Words that mean the same point the same way.
MEANINGS = {
    "rope": (1, 0, 0, 0),
    "cord": (1, 0.1, 0, 0),
    "tide": (0, 1, 0, 0),
    "sea": (0.1, 1, 0, 0),
    "lamp": (0, 0, 1, 0),
    "light": (0, 0, 1, 0.1),
    "not": (-1, -1, -1, 0),
}


def write_static_model(folder: Path, turned: float = 1) -> Path:
    """Writes the model, `turned` being a factor of its second dimension, and returns its folder."""
    from model2vec import StaticModel

    words = ["[UNK]", *MEANINGS]
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, "[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    vectors = np.array([(0, 0, 0, 0), *MEANINGS.values()], np.float32)
    vectors[:, 1] *= turned
    StaticModel(vectors, tokenizer).save_pretrained(str(folder))
    return folder
