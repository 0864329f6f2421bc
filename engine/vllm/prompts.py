"""Prompts for vLLM whose parts are encoded alone: token ids, and segments that name the chunks.

builder = PromptBuilder.open(MODEL_DIR, store=STORE_DIR)
prompt = builder.ask("Who signs off?", [{"document": "rules.md"}, {"text": "…"}])
llm.generate(tokens_prompt(prompt), SamplingParams(extra_args=extra_args(prompt, ratio=0.05)))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from cache_store.errors import UsageError
from cache_store.store import ChunkStore
from engine.blueprint import Blueprint
from engine.prompt import Prompt, PromptChunk, lay_out
from engine.prompt_text import PromptText
from engine.template import PromptTemplate
from engine.vllm.kept import KeptChunks
from engine.vllm.naming import PARAMETER, check_wishes, listed
from engine.vllm.settings import SEPARATOR
from engine.vllm.stored import StoredChunks

Document = str | Mapping[str, Any]
"""What goes into a prompt: a text; {"text": …}, with its "source" if you like; {"id": …} of a
stored chunk, or its beginning; {"document": …}, all chunks of an ingested document;
{"collection": …}, all chunks of a collection, or with "top_k" those that fit the question best."""

MOST_DOCUMENTS = 10_000
_FORM_KEYS = ("id", "document", "collection", "text")
_KEYS = (*_FORM_KEYS, "source", "top_k")
MOST_CHUNKS = 10_000  # of a collection
_FORMS = 'give a text, {"text": …}, {"id": …} of a chunk, {"document": …} or {"collection": …}'
_KEPT_TEMPLATES = 64  # one a system prompt


class PromptBuilder:
    """Builds prompts for one model. Safe to share between threads.

    blueprint: the model without its weights; store: for chunks and documents that are named; None:
    prompts are of texts alone. separator: between two chunks, as the model sees it, and
    template_date: as the blueprint was given them, for other system prompts than its own.
    """

    def __init__(
        self,
        blueprint: Blueprint,
        store: ChunkStore | None = None,
        *,
        separator: str | None = None,
        template_date: str | None = None,
    ) -> None:
        self.blueprint, self.store = blueprint, store
        named = {"separator": separator, "template_date": template_date}
        self._fixed = {name: value for name, value in named.items() if value is not None}
        self._stored = None if store is None else StoredChunks(store, blueprint)
        self.tokenizer = blueprint.tokenizer
        self._template = lru_cache(_KEPT_TEMPLATES)(self._load_template)
        self._encoded = KeptChunks(self.tokenizer)

    @classmethod
    def open(
        cls, model: str | Path, store: str | Path | None = None, **settings: Any
    ) -> PromptBuilder:
        """For the model in a folder and, if given, the store in another, which is only read.

        settings: others of `Blueprint.open`'s, such as `system` and `template_date`. Raises as that
        and `ChunkStore.open` do.
        """
        blueprint = Blueprint.open(model, device="cpu", **settings)
        opened = None if store is None else ChunkStore.open(store, read_only=True)
        kept = {name: settings.get(name) for name in ("separator", "template_date")}
        return cls(blueprint, opened, **kept)

    def ask(
        self, question: str, documents: Sequence[Document] = (), *, system: str | None = None
    ) -> Prompt:
        """The prompt that `cacheblend ask` lays out: the model's chat template with the documents
        in front of the question. system: None for the builder's own.

        Raises UsageError for what can't be a prompt, NotFoundError for a chunk or document that
        isn't in the store, IntegrityError for one whose text was altered there.
        """
        if not isinstance(question, str) or not question.strip():
            raise UsageError("the question is empty", "give a question")
        template = self._template(system)
        chunks = self.chunks(documents, question)
        return lay_out(template.prefix, chunks, template.separator, template.suffix(question))

    def split(self, text: str, separator: str = SEPARATOR, *, system: str | None = None) -> Prompt:
        """The same from one text, "instructions SEPARATOR chunk SEPARATOR … SEPARATOR question".
        Instructions take the place of the system prompt. Raises UsageError."""
        parts = PromptText.split(text, separator)
        return self.ask(parts.question, parts.chunks, system=parts.instructions or system)

    def raw(self, text: str, separator: str = SEPARATOR) -> Prompt:
        """The same text without a chat template: BOS, where the model has one, the instructions,
        the chunks and the question, with the separator kept between them as the model's input.
        Raises UsageError."""
        parts = PromptText.split(text, separator)
        encode, bos = self.tokenizer.encode, self.tokenizer.bos_id
        # A tokenizer that puts a blank in front of every text needs no second one there.
        between = encode(
            separator.removeprefix(" ") if self.tokenizer.prepends_space else separator
        )
        prefix = [bos] if self.tokenizer.adds_bos and bos is not None else []
        prefix += encode(parts.instructions)
        suffix = encode(parts.question)
        if not suffix:
            raise UsageError("the model's tokenizer can't spell the question")
        if parts.chunks:
            prefix, suffix = [*prefix, *between], [*between, *suffix]
        return lay_out(prefix, self.chunks(parts.chunks), between, suffix)

    def chunks(self, documents: Sequence[Document], question: str = "") -> list[PromptChunk]:
        """The chunks that are named, in that order, a document's as it was cut; question: what
        chunks of a collection are to fit. Raises as `ask`."""
        if isinstance(documents, str | Mapping) or not isinstance(documents, Sequence):
            raise UsageError(f"documents is {_kind(documents)}, not a list", _FORMS)
        if len(documents) > MOST_DOCUMENTS:
            raise UsageError(f"{len(documents)} documents; at most {MOST_DOCUMENTS} are taken")
        return [
            chunk
            for number, item in enumerate(documents, 1)
            for chunk in self._named(number, item, question)
        ]

    def _named(self, number: int, item: object, question: str) -> list[PromptChunk]:
        what = f"document {number}"
        if isinstance(item, str):
            item = {"text": item}
        if not isinstance(item, Mapping):
            raise UsageError(f"{what} is {_kind(item)}", _FORMS)
        for key, value in item.items():
            if key not in _KEYS:
                raise UsageError(f"{what} has the unknown key {str(key)[:80]!r}", _FORMS)
            if key == "top_k":
                if type(value) is not int or not 1 <= value <= MOST_CHUNKS:
                    raise UsageError(f"top_k of {what} is no number from 1 to {MOST_CHUNKS}")
            elif not isinstance(value, str):
                raise UsageError(f"{key} of {what} is {_kind(value)}", "make it a text")
        forms = [key for key in _FORM_KEYS if key in item]
        fitting = {"source": "text", "top_k": "collection"}
        misplaced = any(key in item and forms != [form] for key, form in fitting.items())
        if len(forms) != 1 or misplaced:
            raise UsageError(f"{what} has {' and '.join(item) or 'nothing'}", _FORMS)
        if forms == ["text"]:
            if not item["text"].strip():
                raise UsageError(f"{what} is empty", "leave it out")
            return [self._encoded.chunk(item["text"], item.get("source"))]
        if self._stored is None:
            raise UsageError(f"{what} is named, and there is no store to find it in")
        if forms == ["id"]:
            return [self._stored.chunk(item["id"])]
        if forms == ["collection"]:
            return self._stored.collection(item["collection"], question, item.get("top_k"))
        return self._stored.document(item["document"])

    def _load_template(self, system: str | None) -> PromptTemplate:
        if system is None:
            return self.blueprint.template
        blueprint = self.blueprint
        return PromptTemplate.load(blueprint.path, self.tokenizer, system=system, **self._fixed)


def tokens_prompt(prompt: Prompt) -> dict[str, list[int]]:
    """What `LLM.generate` and the engine's client take as a prompt."""
    return {"prompt_token_ids": list(prompt.token_ids)}


def extra_args(prompt: Prompt, **wishes: Any) -> dict[str, Any]:
    """`SamplingParams.extra_args` that name a prompt's chunks.

    wishes: of this request alone: mode, policy, ratio and the like, see `naming.WISHES`. Raises
    UsageError for what the connector would not take.
    """
    return {"kv_transfer_params": transfer_params(prompt, **wishes)}


def transfer_params(prompt: Prompt, **wishes: Any) -> dict[str, Any]:
    """The same as `kv_transfer_params`, for a server's requests: plain JSON."""
    given = {name: value for name, value in wishes.items() if value is not None}
    check_wishes(given)
    return {PARAMETER: {**given, "segments": listed(prompt)}}


def _kind(value: object) -> str:
    """What a JSON value is, in words."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    names = {str: "a text", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return names.get(type(value), f"a {type(value).__name__}")
