"""Files of questions, known by what is in them.

Three forms, each as one JSON value, a list of them, or one a line (JSONL):

- passages: {"question", "ctxs": [{"title", "text"}, …], "answers": […]}, as the CacheBlend authors
  publish MuSiQue and 2WikiMQA, and few-shot summaries, whose ctxs are examples;
- prompt: {"0", "1", …: passages, "query", "chunk_num"}, theirs too, without answers;
- chunks, our own: {"question", "chunks": [text or {"text", "source"}, …], "answers": […], "id"},
  the last two optional.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from cache_store.errors import NotFoundError, UsageError
from engine.evaluation.questions import Passage, Question

FORMS = (
    'an item is {"question": …, "ctxs": […], "answers": […]}, {"question": …, "chunks": […]} or '
    '{"0": …, "query": …, "chunk_num": …}'
)
_OURS = ("id", "question", "chunks", "answers")
_CHUNK = ("text", "source")


def read_questions(paths: Sequence[Path]) -> tuple[Question, ...]:
    """The questions of all files, in order.

    Raises NotFoundError for a file that isn't there, UsageError for one that can't be read, naming
    file, item and field.
    """
    found = [question for path in paths for question in _of_file(path)]
    if not found:
        raise UsageError(f"{', '.join(map(str, paths))}: no question in it", FORMS)
    return tuple(found)


def _of_file(path: Path) -> Iterator[Question]:
    for where, name, value in _items(path, _text(path)):
        if not isinstance(value, dict):
            raise UsageError(f"{where} is {_kind(value)}", FORMS)
        form = _form(value)
        if form is None:
            near = _near(next(iter(value), ""), ("ctxs", "chunks", "query"))
            raise UsageError(f"{where} has no ctxs, chunks or query", near or FORMS)
        yield form(value, where, name)


def _text(path: Path) -> str:
    if not path.exists():
        raise NotFoundError(f"there is no file {path}", "give a file of questions")
    if path.is_dir():
        raise UsageError(f"{path} is a folder", "give a file of questions")
    try:
        return path.read_text("utf-8-sig")
    except UnicodeDecodeError:
        raise UsageError(f"{path}: not UTF-8 text", "save it as UTF-8") from None
    except OSError as error:
        reason = error.strerror or str(error)
        raise UsageError(f"cannot read {path}: {reason}", "give a file of questions") from None


def _items(path: Path, text: str) -> Iterator[tuple[str, str, Any]]:
    """Where each item stands, what to call it, and its value."""
    try:
        whole = _json(text)
    except ValueError as error:
        lines = [(n, line) for n, line in enumerate(text.split("\n"), 1) if line.strip()]
        if len(lines) < 2 or not lines[0][1].lstrip().startswith("{"):
            raise UsageError(f"{path}: not JSON: {error}", FORMS) from None
        for number, line in lines:
            where = f"{path}: line {number}"
            try:
                yield where, f"{path.name}:{number}", _json(line)
            except ValueError as bad:
                raise UsageError(f"{where}: not JSON: {bad}", FORMS) from None
        return
    if isinstance(whole, list):
        for number, value in enumerate(whole, 1):
            yield f"{path}: item {number}", f"{path.name}:{number}", value
    else:
        yield str(path), path.name, whole


def _json(text: str) -> Any:
    """Raises ValueError, saying what and where in one line."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg} at line {error.lineno}, character {error.colno}") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _form(value: Mapping[str, Any]) -> Callable[[Mapping[str, Any], str, str], Question] | None:
    if "ctxs" in value:
        return _with_passages
    if "query" in value or "chunk_num" in value:
        return _prompt
    return _with_chunks if "chunks" in value else None


def _with_passages(value: Mapping[str, Any], where: str, name: str) -> Question:
    passages = []
    for number, item in enumerate(_list(value, "ctxs", where), 1):
        what = f"{where}: ctxs {number}"
        if not isinstance(item, dict):
            raise UsageError(f"{what} is {_kind(item)}", 'make it {"title": …, "text": …}')
        title = item.get("title") or ""
        if not isinstance(title, str):
            raise UsageError(f"{what}: title is {_kind(title)}", "make it a text")
        text = _filled(item, "text", what)
        title = title.strip()
        passages.append(Passage(f"{title}\n{text}" if title else text, title or None))
    return Question(
        name, _filled(value, "question", where), tuple(passages), _answers(value, where)
    )


def _prompt(value: Mapping[str, Any], where: str, name: str) -> Question:
    count = value.get("chunk_num")
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise UsageError(
            f"{where}: chunk_num is {_kind(count)}" + (f", {count}" if count is not None else ""),
            "give the number of passages, 1 or more",
        )
    passages = tuple(Passage(_filled(value, str(n), where)) for n in range(count))
    if str(count) in value:
        raise UsageError(f"{where}: chunk_num is {count}, but there is a passage {count}", FORMS)
    return Question(name, _filled(value, "query", where), passages)


def _with_chunks(value: Mapping[str, Any], where: str, name: str) -> Question:
    _known(value, _OURS, where)
    chunks = []
    for number, item in enumerate(_list(value, "chunks", where), 1):
        what = f"{where}: chunks {number}"
        if isinstance(item, str):
            item = {"text": item}
        if not isinstance(item, dict):
            raise UsageError(f"{what} is {_kind(item)}", 'make it a text or {"text": …}')
        _known(item, _CHUNK, what)
        source = item.get("source")
        if source is not None and not isinstance(source, str):
            raise UsageError(f"{what}: source is {_kind(source)}", "make it a text")
        chunks.append(Passage(_filled(item, "text", what), source))
    given = value.get("id")
    if isinstance(given, bool) or not isinstance(given, str | int | None):
        raise UsageError(f"{where}: id is {_kind(given)}", "make it a text or a number")
    question = _filled(value, "question", where)
    return Question(
        name if given is None else str(given), question, tuple(chunks), _answers(value, where)
    )


def _answers(value: Mapping[str, Any], where: str) -> tuple[str, ...]:
    answers = value.get("answers")
    if answers is None:
        return ()
    if isinstance(answers, str):
        answers = [answers]
    if not isinstance(answers, list):
        raise UsageError(f"{where}: answers is {_kind(answers)}", "make it a list of texts")
    for number, answer in enumerate(answers, 1):
        if not isinstance(answer, str):
            raise UsageError(f"{where}: answers {number} is {_kind(answer)}", "make it a text")
    return tuple(answers)


def _list(value: Mapping[str, Any], field: str, where: str) -> list[Any]:
    item = value[field]
    if not isinstance(item, list):
        raise UsageError(f"{where}: {field} is {_kind(item)}", "make it a list of passages")
    if not item:
        raise UsageError(f"{where}: {field} is empty", "a question needs a passage at least")
    return item


def _filled(value: Mapping[str, Any], field: str, where: str) -> str:
    """A text that is there and has something in it."""
    item = value.get(field)
    if item is None:
        raise UsageError(f"{where}: {field} is missing", FORMS)
    if not isinstance(item, str):
        raise UsageError(f"{where}: {field} is {_kind(item)}", "make it a text")
    if not item.strip():
        raise UsageError(f"{where}: {field} is empty", "fill it, or leave the item out")
    return item


def _known(value: Mapping[str, Any], keys: Sequence[str], where: str) -> None:
    for key in value:
        if key not in keys:
            hint = _near(key, keys) or f"it takes {', '.join(keys)}"
            raise UsageError(f"{where} has the unknown key {key!r}", hint)


def _near(word: str, known: Sequence[str]) -> str:
    near = get_close_matches(word, known, n=1, cutoff=0.5)
    return f"did you mean {near[0]}?" if near else ""


def _kind(value: object) -> str:
    """What a JSON value is, in words."""
    if value is None:
        return "missing"
    if isinstance(value, bool):
        return "true" if value else "false"
    names = {str: "a text", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return names[type(value)]
