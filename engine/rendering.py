"""A model's chat template, rendered in a sandbox, and the pieces of text that come of it."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from cache_store.errors import CacheblendError
from engine.tokenizer import Tokenizer, read_json_object

if TYPE_CHECKING:
    import jinja2
    import jinja2.ext

_T = TypeVar("_T")


@dataclass(frozen=True)
class Text:
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


def plain(text: str) -> Text:
    """Text of users and documents."""
    return Text(text, control=False)


def control(text: str) -> Text:
    """The template's own text."""
    return Text(text, control=True)


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


class Renderer:
    """One chat template in a sandbox: no attributes of Python objects, no files, no changes to
    what it is given."""

    def __init__(
        self, model_dir: Path, source: str, tokenizer: Tokenizer, date: datetime.date
    ) -> None:
        self.model_dir = model_dir
        self._named: Mapping[str, str] = tokenizer.named
        self._date = date
        self._compiled = self._guard(lambda: self._environment().from_string(source))

    def render(self, messages: Sequence[tuple[str, str]], *, parts: bool) -> str:
        """The template's text around messages: (role, content), the answer being next. parts:
        whether it takes content in parts. Raises CacheblendError, naming the model."""
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
