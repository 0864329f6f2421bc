"""A retriever of the user's own: a function or a class in a module or a file of theirs."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any, Generic

from cache_store.errors import CacheblendError, UsageError
from engine.retrieval.hit import ChunkT, Hit, check_top_k

FORMS = "write module:name or file.py:name; see docs/how-to/retrieval.md"


def load_own(name: str, folders: Sequence[Path] = ()) -> Callable[..., Any]:
    """The function or class that `name` is, of a module or of a file.

    folders: where modules are looked for, besides where Python does. Raises UsageError where it
    isn't there, or can't be imported.
    """
    place, _, attribute = name.rpartition(":")
    with _searching(folders), contextlib.redirect_stdout(sys.stderr):
        try:
            module = _from_file(place) if place.endswith(".py") else importlib.import_module(place)
        except ModuleNotFoundError as error:
            if error.name != place.split(".")[0]:
                raise _failed(f"importing {place}", error, UsageError) from error
            raise UsageError(f"retriever {name}: there is no module {place}", FORMS) from None
        except FileNotFoundError:
            raise UsageError(f"retriever {name}: there is no file {place}", FORMS) from None
        except (Exception, SystemExit) as error:  # whatever their code does
            raise _failed(f"importing {place}", error, UsageError) from error
    found = getattr(module, attribute, None)
    if not callable(found):
        near = get_close_matches(attribute, dir(module), n=1)
        raise UsageError(
            f"retriever {name}: {place} has no function or class {attribute}",
            f"did you mean {near[0]}?" if near else FORMS,
        )
    made: Callable[..., Any] = found
    return made


class OwnRetriever(Generic[ChunkT]):
    """What the user has made, as a retriever: its hits are checked, its errors told in a line.

    own: a function (question, chunks, top_k), or a class that is made with the chunks and has a
    method search(question, top_k). Either gives, best first, chunks or their ids, each alone or in
    a pair with its score; alone its score is 1 / rank. What it prints goes to standard error.
    """

    def __init__(self, name: str, own: Callable[..., Any], chunks: Sequence[ChunkT]) -> None:
        """Raises CacheblendError where the class can't be made."""
        self._name, self._chunks = name, list(chunks)
        self._by_id = {chunk.chunk_id: chunk for chunk in reversed(self._chunks)}
        self._own = own
        self._made = None
        if isinstance(own, type):
            with self._run():
                self._made = own(list(self._chunks))

    def search(self, question: str, top_k: int) -> list[Hit[ChunkT]]:
        """What it finds, in its order, `top_k` at most. Raises CacheblendError where it fails, or
        gives what isn't there; UsageError for a `top_k` below 1."""
        check_top_k(top_k)
        with self._run():
            if self._made is not None:
                found = list(self._made.search(question, top_k))
            else:
                found = list(self._own(question, list(self._chunks), top_k))
            hits: dict[str, Hit[ChunkT]] = {}
            for rank, item in enumerate(found, start=1):
                chunk, score = self._read(item, rank)
                if chunk.chunk_id not in hits:
                    hits[chunk.chunk_id] = Hit(chunk, score, len(hits) + 1)
        return list(hits.values())[:top_k]

    def _read(self, item: Any, rank: int) -> tuple[ChunkT, float]:
        score: Any = 1 / rank
        if isinstance(item, Hit):
            item, score = item.chunk, item.score
        elif isinstance(item, tuple | list) and len(item) == 2:
            item, score = item
        one = item if isinstance(item, str) else getattr(item, "chunk_id", None)
        if not isinstance(one, str) or one not in self._by_id:
            raise CacheblendError(
                f"retriever {self._name} gave {_short(item)}, which is no chunk of the store",
                "give chunks as it gets them, or their ids, or pairs of one and its score",
            )
        try:
            number = float(score)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            raise CacheblendError(
                f"retriever {self._name} gave {one[:12]} the score {_short(score)}",
                "give a finite number",
            )
        return self._by_id[one], number

    @contextlib.contextmanager
    def _run(self) -> Iterator[None]:
        try:
            with contextlib.redirect_stdout(sys.stderr):
                yield
        except CacheblendError:
            raise
        except (Exception, SystemExit) as error:  # whatever their code does
            raise _failed(f"retriever {self._name}", error, CacheblendError) from error


def _from_file(place: str) -> ModuleType:
    path = Path(place).expanduser()
    if not path.is_file():
        raise FileNotFoundError(place)
    # Under a name that no module has, and known by it, as dataclasses and others need it.
    name = f"_own_retriever_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(place)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def _searching(folders: Sequence[Path]) -> Iterator[None]:
    """Modules are looked for in these folders, too, after all others."""
    added = [str(folder) for folder in folders if str(folder) not in sys.path]
    sys.path.extend(added)
    try:
        yield
    finally:
        for folder in added:
            if folder in sys.path:
                sys.path.remove(folder)


def _failed(what: str, error: BaseException, kind: type[CacheblendError]) -> CacheblendError:
    said = " ".join(str(error).split())[:300]
    return kind(
        f"{what} failed: {type(error).__name__}{f': {said}' if said else ''}", "-vv shows where"
    )


def _short(value: object) -> str:
    return repr(value)[:80]
