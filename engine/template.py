"""What surrounds the documents in a prompt: the model's chat template, rendered once and cut.

A template is rendered with markers where the system prompt, the documents and the question go.
The pieces between the markers are the template's own text, in which control tokens count; system
prompt, separator and question are plain text, in which they never do. So the prefix's ids depend
on the model, the system prompt and the pinned date alone.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from cache_store.errors import CacheblendError, UsageError
from engine.context import ContextKind
from engine.tokenizer import Tokenizer, read_json_object

if TYPE_CHECKING:
    import jinja2
    import jinja2.ext

_T = TypeVar("_T")

SYSTEM_VERSION = 1
# Changing this text changes every prefix: chunks stored behind the old one are no longer exact.
DEFAULT_SYSTEM = (
    "You answer questions from the documents you are given. Be brief and exact. "
    "If the documents do not hold the answer, say so."
)
DEFAULT_SEPARATOR = "\n\n"
DEFAULT_DATE = "2024-07-26"

_SYSTEM, _DOCUMENTS, _QUESTION = "CACHEBLENDSYSTEM", "CACHEBLENDDOCUMENTS", "CACHEBLENDQUESTION"
# Small models run on where the question alone follows the documents; told so, they stop.
_BEFORE_QUESTION = "\n\nUsing the documents above, answer briefly.\nQuestion: "
_PLAIN_ANSWER = "\nAnswer:"


@dataclass(frozen=True)
class PromptTemplate:
    """Ids around the documents of one model, for one system prompt, separator and date.

    Attributes
    ----------
    prefix: every id before the first chunk; the same for every question and any chunks.
    separator: ids that go between two chunks.
    opening: the prefix's first id, where no system prompt changes it: BOS, or the template's own
        first token. Empty for a model that has neither.
    has_chat: whether the model brought a chat template (else the plain layout is used).
    """

    prefix: tuple[int, ...]
    separator: tuple[int, ...]
    opening: tuple[int, ...]
    has_chat: bool
    _tail: _Text = field(repr=False)
    _tokenizer: Tokenizer = field(repr=False, compare=False)

    @classmethod
    def load(
        cls,
        model_dir: Path,
        tokenizer: Tokenizer,
        *,
        system: str = DEFAULT_SYSTEM,
        separator: str = DEFAULT_SEPARATOR,
        template_date: str = DEFAULT_DATE,
    ) -> PromptTemplate:
        """Render the chat template in `model_dir` and cut it around documents and question.

        Parameters
        ----------
        system: the system prompt; blank leaves it to the template.
        template_date: the day, `YYYY-MM-DD`, that a template which asks for today is told.

        Raises
        ------
        UsageError: `template_date` is not a date.
        IntegrityError: a configuration file is not JSON.
        CacheblendError: the template cannot be used; names the model.
        """
        try:
            date = datetime.date.fromisoformat(template_date)
        except ValueError:
            raise UsageError(
                f"template date {template_date!r} is not a date", "write it as YYYY-MM-DD"
            ) from None
        source = find_chat_template(Path(model_dir))
        system = system.strip()
        if source is None:
            head = [_plain(f"{system}\n\n" if system else "")]
            tail = _template(_PLAIN_ANSWER)
        else:
            head, tail = _cut(_Renderer(Path(model_dir), source, tokenizer, date), system)
        bos = tokenizer.bos_id
        prefix: list[int] = []
        for text in head:
            prefix += text.encode(tokenizer, first=not prefix)
        if tokenizer.adds_bos and bos is not None and prefix[:1] != [bos]:
            prefix.insert(0, bos)
        while bos is not None and prefix[:2] == [bos, bos]:
            del prefix[0]
        own = bos is not None and prefix[:1] == [bos]
        opens = own or (head[0].control and bool(head[0].text))
        return cls(
            prefix=tuple(prefix),
            separator=tuple(tokenizer.encode(separator)),
            opening=tuple(prefix[:1]) if opens else (),
            has_chat=source is not None,
            _tail=tail,
            _tokenizer=tokenizer,
        )

    def context(self, kind: ContextKind) -> tuple[int, ...]:
        """What chunks are computed behind: `prefix`, all of it; `bos`, the opening alone (nothing
        for a model without one); `none`, nothing."""
        return {"prefix": self.prefix, "bos": self.opening, "none": ()}[kind]

    def suffix(self, question: str) -> tuple[int, ...]:
        """Every id after the last chunk: the question as plain text, then the template's tail."""
        ids = self._tokenizer.encode(_BEFORE_QUESTION + question.strip())
        return (*ids, *self._tail.encode(self._tokenizer, first=False))


@dataclass(frozen=True)
class _Text:
    """A piece of the prompt that is encoded on its own; `control` for the template's text."""

    text: str
    control: bool

    def encode(self, tokenizer: Tokenizer, first: bool) -> list[int]:
        if not self.text:
            return []
        text = self.text
        if not first and tokenizer.prepends_space:
            text = text.removeprefix(" ")  # the tokenizer puts its own in front of every piece
        return tokenizer.encode_template(text) if self.control else tokenizer.encode(text)


def _plain(text: str) -> _Text:
    return _Text(text, control=False)


def _template(text: str) -> _Text:
    return _Text(text, control=True)


def find_chat_template(model_dir: Path) -> str | None:
    """The model's chat template, from the first of `chat_template.jinja`,
    `tokenizer_config.json` and `chat_template.json` that has one; None without any.

    Raises CacheblendError for a template that is neither text nor named templates.
    """
    path = model_dir / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeError) as error:
            raise CacheblendError(f"cannot read {path}: {error}", "get the model again") from error
    for name in ("tokenizer_config.json", "chat_template.json"):
        found = read_json_object(model_dir / name, missing_ok=True).get("chat_template")
        if found is None:
            continue
        if isinstance(found, str):
            return found
        named = _named_templates(found)
        if "default" in named:
            return named["default"]
        if len(named) == 1:
            return next(iter(named.values()))
        raise CacheblendError(
            f"{model_dir / name} has no default chat template (it has: {', '.join(named) or '-'})",
            f"put the one to use into {path}",
        )
    return None


def _named_templates(found: object) -> dict[str, str]:
    """`[{"name": ..., "template": ...}]` or `{name: template}` as a mapping."""
    if isinstance(found, dict):
        return {str(name): text for name, text in found.items() if isinstance(text, str)}
    named = {}
    for item in found if isinstance(found, list) else []:
        if isinstance(item, dict) and isinstance(item.get("template"), str):
            named[str(item.get("name"))] = item["template"]
    return named


def _cut(renderer: _Renderer, system: str) -> tuple[list[_Text], _Text]:
    """Head and tail around documents and question, in the first form the template takes.

    Some templates have no system role, and some want content in parts: the system prompt then
    goes in front of the documents.
    """
    problems = []
    for parts in (False, True):
        for role in (True, False) if system else (False,):
            try:
                text = renderer.render(system=role, own_system=bool(system), parts=parts)
            except CacheblendError as error:
                problems.append(error)
                continue
            markers = [_SYSTEM, _DOCUMENTS, _QUESTION] if system else [_DOCUMENTS, _QUESTION]
            cut = _split_once(text, markers)
            if cut is None:
                continue
            *head, between, tail = cut
            if between.strip() != _BEFORE_QUESTION.strip():
                continue
            texts = [_template(head[0])]
            if system:
                texts += [_plain(system), _template(head[1])]
            return texts, _template(tail)
    if problems:
        raise problems[0]
    raise CacheblendError(
        f"the chat template of {renderer.model_dir} loses, doubles or moves the user's text",
        "put a template that keeps it into chat_template.jinja, or use another model",
    )


def _split_once(text: str, markers: list[str]) -> list[str] | None:
    """`text` cut at the markers; None unless each is there once and in this order."""
    pieces = []
    for marker in markers:
        before, found, text = text.partition(marker)
        if not found:
            return None
        pieces.append(before)
    pieces.append(text)
    return None if any(marker in piece for piece in pieces for marker in markers) else pieces


class _Renderer:
    """One chat template in a sandbox: no attributes of Python objects, no files, no changes to
    what it is given."""

    def __init__(
        self, model_dir: Path, source: str, tokenizer: Tokenizer, date: datetime.date
    ) -> None:
        self.model_dir = model_dir
        self._named: Mapping[str, str] = tokenizer.named
        self._date = date
        self._compiled = self._guard(lambda: self._environment().from_string(source))

    def render(self, *, system: bool, own_system: bool, parts: bool) -> str:
        """The template's text with markers; `own_system`: there is a system prompt to place."""
        user = _DOCUMENTS + _BEFORE_QUESTION + _QUESTION
        if own_system and not system:
            user = f"{_SYSTEM}\n\n{user}"
        messages = [("system", _SYSTEM)] if system else []
        messages.append(("user", user))
        values: dict[str, Any] = {
            "bos_token": "",
            "eos_token": "",
            **self._named,
            "messages": [
                {"role": role, "content": [{"type": "text", "text": text}] if parts else text}
                for role, text in messages
            ],
            "add_generation_prompt": True,
            "enable_thinking": False,
            "tools": None,
            "documents": None,
        }
        return self._guard(lambda: self._compiled.render(values))

    def _environment(self) -> jinja2.Environment:
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _generation_tag()]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = self._date.strftime
        return environment

    def _guard(self, action: Callable[[], _T]) -> _T:
        try:
            return action()
        except Exception as error:  # a template can raise anything; it becomes one clear line
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise CacheblendError(
                f"the chat template of {self.model_dir} cannot be used: {reason}",
                "put a working template into chat_template.jinja, or use another model",
            ) from error


def _raise_exception(message: object = "") -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(str(message))


def _to_json(value: object, indent: int | None = None, **options: Any) -> str:
    # Not jinja's own: that one escapes for HTML.
    known = {k: v for k, v in options.items() if k in ("ensure_ascii", "separators", "sort_keys")}
    return json.dumps(value, indent=indent, **{"ensure_ascii": False, **known})


def _generation_tag() -> type[jinja2.ext.Extension]:
    """`{% generation %}`, which marks the assistant's text for training; here it does nothing."""
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012  # jinja2 declares it so

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    return Generation
