"""Requests with documents or separators, as vLLM takes them: token ids, and the chunks in them.

Nothing of a request that is wrong reaches the engine: it is refused here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cache_store.errors import UsageError
from engine.prompt import Prompt
from engine.prompt_text import PromptText
from engine.vllm.naming import PARAMETER, RequestReader
from engine.vllm.prompts import PromptBuilder, transfer_params

Body = dict[str, Any]

_SYSTEM, _TURNS = ("system", "developer"), ("user", "assistant")
_NAMES = {"name": "document", "content": "text", "contents": "text"}
"""Other words for a document's keys, as other servers have them."""
_ALONE = (
    *("tools", "chat_template", "echo", "continue_final_message", "truncate_prompt_tokens"),
    "prompt_embeds",
)
"""What changes the prompt in ways that a layout of chunks has no place for."""
_RAW = ("suffix", "echo", "prompt_embeds", "truncate_prompt_tokens", "prompt_logprobs")


class RequestLayout:
    """Rewrites the JSON of requests. Safe to share between threads.

    separator: text between the chunks of a prompt that is one text; None where none is looked for.
    longest: tokens that a prompt and its answer may have together. Methods raise UsageError for
    what can't be, NotFoundError for a chunk or document that isn't in the store, and other
    CacheblendErrors where the store fails.
    """

    def __init__(
        self, builder: PromptBuilder, reader: RequestReader, separator: str | None, longest: int
    ) -> None:
        self._builder, self._reader = builder, reader
        self._separator, self._longest = separator, longest

    def chat(self, body: Body) -> Body:
        """A chat completion's: with `documents`, or separators in its last message, the prompt is
        laid out as `cacheblend ask` does; any other one is as it was."""
        body = dict(body)
        wishes, documents = self._wishes(body), body.pop("documents", None)
        if documents is not None and not isinstance(documents, list):
            raise UsageError("documents is no list", 'give a list, such as [{"id": "3f9a1c"}]')
        if documents:
            _refuse_with_documents(body)
            return self._laid_out(body, wishes, _Talk.read(body), documents)
        parts = self._parts(body)
        if parts is not None and not any(body.get(key) for key in _ALONE):
            talk = _Talk.read(body)
            talk = _Talk(_joined(talk.system, parts.instructions), talk.earlier, parts.question)
            return self._laid_out(body, wishes, talk, list(parts.chunks))
        return self._plain(body, wishes)

    def completion(self, body: Body) -> Body:
        """A completion's: a prompt with separators becomes token ids in which its chunks are those
        that the store knows; any other one is as it was."""
        body = dict(body)
        wishes = self._wishes(body)
        if body.get("documents"):
            raise UsageError("documents go with messages", "use /v1/chat/completions")
        prompt, separator = body.get("prompt"), self._separator
        texts = [prompt] if isinstance(prompt, str) else prompt
        if (
            separator is None
            or any(body.get(key) for key in _RAW)
            or body.get("add_special_tokens") is False
            or not isinstance(texts, list)
            or not all(isinstance(text, str) for text in texts)
            or not any(_chunks(text, separator) for text in texts)
        ):
            return self._plain(body, wishes)
        for text in texts:
            self._refuse_too_long([text])
        prompts = [self._builder.raw(text, separator) for text in texts]
        for made in prompts:
            self._check(made, wishes)
        if len(prompts) == 1:
            body["prompt"] = list(prompts[0].token_ids)
            return _told(body, transfer_params(prompts[0], **wishes))
        # Segments can be listed of one prompt only; of several, the separators' ids are found.
        body["prompt"] = [list(made.token_ids) for made in prompts]
        return self._plain(body, wishes)

    def _parts(self, body: Body) -> PromptText | None:
        """The last message, where it is a user's text with chunks between separators."""
        messages = body.get("messages")
        if self._separator is None or not isinstance(messages, list) or not messages:
            return None
        last = messages[-1]
        if not isinstance(last, Mapping) or last.get("role") != "user":
            return None
        text = last.get("content")
        if isinstance(text, list):
            pieces = [p.get("text") for p in text if isinstance(p, Mapping)]
            text = pieces[0] if len(pieces) == len(text) == 1 else None
        if not isinstance(text, str) or not _chunks(text, self._separator):
            return None
        return PromptText.split(text, self._separator)

    def _laid_out(self, body: Body, wishes: Body, talk: _Talk, documents: Sequence[Any]) -> Body:
        named = [_document(item) for item in documents]
        texts = [item.get("text") if isinstance(item, Mapping) else item for item in named]
        self._refuse_too_long([talk.system, talk.question, *texts])
        prompt = self._builder.ask(talk.question, named, system=talk.system)
        self._check(prompt, wishes)
        params = transfer_params(prompt, **wishes)
        # vLLM takes these ids in the place of the messages, which it still checks.
        params["prompt_token_ids"] = list(prompt.token_ids)
        return _told(body, params)

    def _plain(self, body: Body, wishes: Body) -> Body:
        if not wishes:
            return body
        self._reader.read("", (), {PARAMETER: wishes})
        return _told(body, {PARAMETER: wishes})

    def _wishes(self, body: Body) -> Body:
        """What the request says of blending; what `cacheblend` says is taken out of its body."""
        wishes, params = body.pop(PARAMETER, None), body.get("kv_transfer_params")
        if wishes is not None and not isinstance(wishes, dict):
            raise UsageError(f"{PARAMETER} is no object", 'give names and values: {"ratio": 0.1}')
        if params is not None and not isinstance(params, dict):
            raise UsageError("kv_transfer_params is no object", "leave it out")
        _refuse_half_characters(params)
        self._reader.check(params)
        return wishes or {}

    def _refuse_too_long(self, texts: Sequence[object]) -> None:
        """Before they are encoded, which takes long and holds others up, as vLLM does."""
        size = sum(len(text) for text in texts if isinstance(text, str))
        if size > self._longest * self._builder.tokenizer.longest_token:
            raise UsageError(
                f"the prompt has {size} characters, far more than a context of {self._longest} "
                "tokens can hold",
                "use fewer or shorter documents",
            )

    def _check(self, prompt: Prompt, wishes: Body) -> None:
        self._reader.read("", prompt.token_ids, transfer_params(prompt, **wishes))
        length = len(prompt.token_ids)
        if length >= self._longest:
            raise UsageError(
                f"the prompt has {length} tokens, and the context {self._longest}",
                "use fewer or shorter documents",
            )


@dataclass(frozen=True)
class _Talk:
    """A conversation: the system prompt (None: the server's own), the turns before the last, and
    the last, which is the question."""

    system: str | None
    earlier: tuple[tuple[str, str], ...]
    last: str

    @classmethod
    def read(cls, body: Body) -> _Talk:
        """Raises UsageError for what is none."""
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise UsageError("messages is no list of messages", "give at least a user's")
        system: str | None = None
        turns: list[tuple[str, str]] = []
        for number, message in enumerate(messages, 1):
            role = message.get("role") if isinstance(message, Mapping) else None
            if role not in _SYSTEM + _TURNS:
                raise UsageError(
                    f"message {number} is of role {str(role)[:40]!r}",
                    f"with documents there are {', '.join(_SYSTEM + _TURNS)}",
                )
            text = _text(message.get("content"), number)
            if role in _SYSTEM:
                system = _joined(system, text)
            else:
                turns.append((str(role), text))
        if not turns or turns[-1][0] != "user":
            raise UsageError("the last message is not a user's", "end with the question")
        return cls(system, tuple(turns[:-1]), turns[-1][1])

    @property
    def question(self) -> str:
        """With the earlier turns in front, in the words in which the question is put."""
        said = [
            f"{text}\n" if role == "user" else f"Answer: {text}\n\nQuestion: "
            for role, text in self.earlier
        ]
        return "".join([*said, self.last])


def _text(content: Any, number: int) -> str:
    """A message's content, in parts or not."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    texts = [p.get("text") if isinstance(p, Mapping) else None for p in parts]
    if not all(isinstance(text, str) for text in texts):
        raise UsageError(f"message {number} is not text", "with documents there is text alone")
    return "\n".join(map(str, texts))


def _document(item: Any) -> Any:
    """A document with the keys that the builder knows; what it doesn't know it refuses."""
    if not isinstance(item, Mapping):
        return item
    found = {_NAMES.get(str(key), str(key)): value for key, value in item.items()}
    if len(found) < len(item):
        raise UsageError(
            f"a document has {' and '.join(map(ascii, item))}", "leave one of them out"
        )
    _refuse_half_characters(found.get("source"))
    if "source" in found and not {"id", "document", "text"} & set(found):
        found["document"] = found.pop("source")
    title = found.pop("title", None)
    if title is not None:
        if not isinstance(title, str) or not isinstance(found.get("text"), str):
            raise UsageError("a title goes with a text", 'give {"title": …, "text": …}')
        found["text"] = f"{title}\n\n{found['text']}"
    return found


def _told(body: Body, params: Mapping[str, Any]) -> Body:
    """With more in its `kv_transfer_params`; what is there of ours already is kept where it isn't
    said anew."""
    given = body.get("kv_transfer_params")
    given = dict(given) if isinstance(given, Mapping) else {}
    before = given.get(PARAMETER)
    before = before if isinstance(before, Mapping) else {}
    if "segments" in params[PARAMETER] and any(before.get(k) for k in ("segments", "chunks")):
        raise UsageError("the request names its chunks twice", "leave kv_transfer_params out")
    own = {**before, **params[PARAMETER]}
    body["kv_transfer_params"] = {**given, **params, PARAMETER: own}
    return body


def _refuse_with_documents(body: Body) -> None:
    for key in _ALONE:
        if body.get(key):
            raise UsageError(f"{key} and documents exclude each other", "leave one of them out")
    if body.get("add_generation_prompt") is False:
        raise UsageError("with documents there is always an answer", "leave the messages as is")
    if body.get("chat_template_kwargs") not in (None, {}, {"enable_thinking": False}):
        raise UsageError("chat_template_kwargs and documents exclude each other")


def _refuse_half_characters(value: object) -> None:
    """What is said back, or sent to the engine, must be text that can be sent."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise UsageError("the request has half a character: a lone surrogate") from None


def _chunks(text: str, separator: str) -> bool:
    """Whether a text has a chunk between separators, and a question behind them."""
    if separator.strip() not in text:
        return False
    try:
        return bool(PromptText.split(text, separator).chunks)
    except UsageError:
        return False


def _joined(one: str | None, other: str) -> str | None:
    return other if one is None and other else f"{one}\n\n{other}" if one and other else one
