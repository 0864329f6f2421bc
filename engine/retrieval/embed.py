"""Chunks by what they mean: static embeddings, compared by their angle."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Generic, Protocol

import numpy as np
from blake3 import blake3

from cache_store.errors import CacheblendError, NotFoundError, UsageError
from engine.retrieval.arrays import Array
from engine.retrieval.corpus import Corpus, corpus_of
from engine.retrieval.hit import ChunkT, Hit, check_top_k
from engine.retrieval.keeping import Held, kept_arrays
from engine.retrieval.ranking import hits_of

_FILES = ["*.json", "*.safetensors"]
_BATCH = 1024  # texts embedded at once


class Embedder(Protocol):
    """Makes vectors of texts."""

    @property
    def fingerprint(self) -> str:
        """Of what decides the vectors: those of one with another are not compared."""
        ...

    @property
    def dimensions(self) -> int: ...

    def encode(self, texts: Sequence[str]) -> Array:
        """float32 [texts, dimensions]; of any length, all zeros for a text that says nothing."""
        ...


class StaticEmbedder:
    """A static embedding model in the form of model2vec: a vector a token, and their mean."""

    def __init__(self, folder: Path) -> None:
        """Raises UsageError where model2vec isn't installed, CacheblendError for a folder that
        holds no such model."""
        require_model2vec()
        from model2vec import StaticModel

        try:
            self._model: Any = StaticModel.from_pretrained(folder)
            self.fingerprint = _fingerprint(folder)
        except Exception as error:  # of many kinds, by what is wrong with the files
            raise CacheblendError(
                f"{folder} is not an embedding model that model2vec can read: "
                f"{' '.join(str(error).split())[:200]}",
                "set embed_model to a folder with model.safetensors, tokenizer.json, config.json",
            ) from error
        self.dimensions: int = self._model.dim

    def encode(self, texts: Sequence[str]) -> Array:
        if not texts:
            return np.zeros((0, self.dimensions), np.float32)
        # Half characters, which a text of strange bytes may have, are refused by its tokenizer.
        whole = [text.encode("utf-8", "replace").decode() for text in texts]
        found = self._model.encode(whole, max_length=None, use_multiprocessing=False)
        return np.asarray(found, np.float32)


def require_model2vec() -> None:
    """Raises UsageError where the package isn't installed."""
    if importlib.util.find_spec("model2vec") is None:
        raise UsageError(
            "embeddings need the package model2vec, which is not installed",
            "pip install 'cacheblend[embed]'",
        )


class EmbedRetriever(Generic[ChunkT]):
    """The vectors of chunks, made once each. Scores are cosines, 1 at most; only chunks above 0
    are found.

    With a corpus that has a folder the vectors are kept there, and only what is new is read the
    next time.
    """

    def __init__(self, chunks: Sequence[ChunkT] | Corpus[ChunkT], embedder: Embedder) -> None:
        self._corpus, self._embedder = corpus_of(chunks), embedder

        fingerprint = embedder.fingerprint
        self._ids, held = kept_arrays(
            self._corpus, f"vectors-{fingerprint[:16]}.vec", fingerprint, self._embedded
        )
        self._vectors = held["vectors"]  # float32 [chunks, dimensions], of length 1 or 0

    def search(self, question: str, top_k: int) -> list[Hit[ChunkT]]:
        """The chunks nearest to the question, best first, `top_k` at most.

        Equal scores keep the order of the chunks. Raises UsageError for a `top_k` below 1.
        """
        check_top_k(top_k)
        asked = _unit(self._embedder.encode([question]))[0]
        return hits_of(self._corpus, self._ids, self._vectors @ asked, top_k)

    def _embedded(self, ids: list[str], known: list[str], held: Held) -> Held:
        row_of = {one: row for row, one in enumerate(known)}
        vectors = np.zeros((len(ids), self._embedder.dimensions), np.float32)
        new = []
        for row, one in enumerate(ids):
            if one in row_of:
                vectors[row] = held["vectors"][row_of[one]]
            else:
                new.append(row)
        texts = iter(self._corpus.texts([ids[row] for row in new]))
        for start in range(0, len(new), _BATCH):
            rows = new[start : start + _BATCH]
            vectors[rows] = _unit(self._embedder.encode(list(islice(texts, len(rows)))))
        return {"vectors": vectors}


def find_model(name: str, *, offline: bool) -> Path:
    """The folder of an embedding model: itself, or a repository of the Hugging Face Hub, which is
    downloaded where it isn't there yet.

    Raises NotFoundError or CacheblendError where it can't be had.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise NotFoundError(
            f"no embedding model at {name}",
            "set embed_model to a folder, or to a repository of the Hugging Face Hub",
        )
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    from engine.library.hub import plain_errors

    try:
        return Path(snapshot_download(name, allow_patterns=_FILES, local_files_only=True))
    except LocalEntryNotFoundError:
        pass
    hint = (
        "download it once where there is a network, or give a folder that holds it: "
        "--embed-model FOLDER"
    )
    if offline or constants.HF_HUB_OFFLINE:
        raise NotFoundError(f"the embedding model {name} is not here, and this is offline", hint)
    try:
        with plain_errors(name):
            return Path(snapshot_download(name, allow_patterns=_FILES))
    except NotFoundError:
        raise
    except CacheblendError as error:
        raise CacheblendError(f"the embedding model: {error.message}", hint) from error


def _unit(vectors: Array) -> Array:
    """Vectors of length 1 in the same directions; what has none, or isn't finite, is zeros."""
    with np.errstate(invalid="ignore", over="ignore"):
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    usable = (lengths > 0) & np.isfinite(lengths)
    units: Array = np.divide(vectors, lengths, out=np.zeros_like(vectors), where=usable)
    return units


def _fingerprint(folder: Path) -> str:
    digest = blake3()
    for path in sorted(folder.rglob("*")):
        if path.suffix in (".json", ".safetensors") and path.is_file():
            digest.update(path.relative_to(folder).as_posix().encode() + b"\0")
            digest.update(path.read_bytes())
    return digest.hexdigest()
