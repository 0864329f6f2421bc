"""What surrounds the documents in a prompt: the model's chat template, rendered once and cut.

A template is rendered with markers where the system prompt, the documents and the question go.
The pieces between the markers are the template's own text, in which control tokens count; system
prompt, separator and question are plain text, in which they never do. So the prefix's ids depend
on the model, the system prompt and the pinned date alone.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cache_store.errors import CacheblendError, UsageError
from engine.context import ContextKind
from engine.prompt import Prompt, PromptChunk, lay_out
from engine.rendering import Renderer, Text, control, find_chat_template, plain
from engine.tokenizer import Tokenizer

# Changing this text changes every prefix: chunks stored behind the old one are no longer exact.
DEFAULT_SYSTEM = (
    "You answer questions from the documents you are given. Be brief and exact. "
    "If the documents do not hold the answer, say so."
)
DEFAULT_SEPARATOR = "\n\n"
DEFAULT_DATE = "2024-07-26"

SYSTEM, DOCUMENTS, QUESTION = "CACHEBLENDSYSTEM", "CACHEBLENDDOCUMENTS", "CACHEBLENDQUESTION"
# Small models run on where the question alone follows the documents; told so, they stop.
BEFORE_QUESTION = "\n\nUsing the documents above, answer briefly.\nQuestion: "
_CITING = (
    "\n\nUsing the documents above, answer briefly. Write the number of the document you used "
    "after the answer, such as [1].\nQuestion: "
)
PLAIN_ANSWER = "\nAnswer:"


@dataclass(frozen=True)
class ChatForm:
    """A model's chat template and how it takes what it is given. role: the system prompt is a
    message of its own, else it stands in front of the first documents; parts: content is in parts.
    """

    renderer: Renderer
    system: str
    role: bool
    parts: bool

    def render(self, turns: Sequence[tuple[str, str]], answers: Sequence[str]) -> str:
        """The template's text around turns (in front of the documents, and all from there on) and
        the answers to all but the last. Raises CacheblendError."""
        messages = [("system", SYSTEM)] if self.system and self.role else []
        for number, (documents, rest) in enumerate(turns):
            own = f"{SYSTEM}\n\n" if self.system and not self.role and not number else ""
            messages.append(("user", own + documents + rest))
            messages += [("assistant", answer) for answer in answers[number : number + 1]]
        return self.renderer.render(messages, parts=self.parts)


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
    form: that template; None without any. tail: the text behind the question.
    """

    prefix: tuple[int, ...]
    separator: tuple[int, ...]
    opening: tuple[int, ...]
    tail: Text = field(repr=False)
    form: ChatForm | None = field(repr=False, compare=False)
    tokenizer: Tokenizer = field(repr=False, compare=False)
    _separator: str = field(repr=False, default=DEFAULT_SEPARATOR)

    @property
    def has_chat(self) -> bool:
        return self.form is not None

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
        form = None
        if source is None:
            head = [plain(f"{system}\n\n" if system else "")]
            tail = control(PLAIN_ANSWER)
        else:
            form, head, tail = _cut(Renderer(Path(model_dir), source, tokenizer, date), system)
        prefix = encode_head(head, tokenizer)
        own = tokenizer.bos_id is not None and prefix[:1] == (tokenizer.bos_id,)
        opens = own or (head[0].control and bool(head[0].text))
        return cls(
            prefix=prefix,
            separator=tuple(tokenizer.encode(separator)),
            opening=prefix[:1] if opens else (),
            tail=tail,
            form=form,
            tokenizer=tokenizer,
            _separator=separator,
        )

    def context(self, kind: ContextKind) -> tuple[int, ...]:
        """What chunks are computed behind: `prefix`, all of it; `bos`, the opening alone (nothing
        for a model without one); `none`, nothing."""
        return {"prefix": self.prefix, "bos": self.opening, "none": ()}[kind]

    def suffix(self, question: str, *, cite: bool = False) -> tuple[int, ...]:
        """Every id after the last chunk: the question as plain text, then the template's tail."""
        return (*self.asked(question, cite=cite), *self.tail.encode(self.tokenizer, first=False))

    def asked(
        self, question: str, *, cite: bool = False, documents: bool = True
    ) -> tuple[int, ...]:
        """The question as plain text, with what is said in front of it. cite: asks for the numbers
        of documents; documents: some stand right in front."""
        before = _CITING if cite else BEFORE_QUESTION
        before = before if documents else before.lstrip("\n")
        return tuple(self.tokenizer.encode(before + question.strip()))

    def lay_out(
        self, chunks: Sequence[PromptChunk], question: str, *, cite: bool = False
    ) -> Prompt:
        """The prompt of one question. cite: chunks are numbered from 1, and their numbers asked
        for."""
        leads = self.leads(range(1, len(chunks) + 1)) if cite else None
        suffix = self.suffix(question, cite=cite)
        return lay_out(self.prefix, chunks, self.separator, suffix, leads)

    def leads(self, numbers: Sequence[int]) -> list[tuple[int, ...]]:
        """What stands in front of each of several chunks, in place of a separator, where they are
        numbered: so the chunk's own tokens don't change."""
        texts = [f"{self._separator if at else ''}[{n}]\n" for at, n in enumerate(numbers)]
        return [tuple(ids) for ids in self.tokenizer.encode_many(texts)] if texts else []


def encode_head(texts: Sequence[Text], tokenizer: Tokenizer) -> tuple[int, ...]:
    """Ids that a prompt begins with, with one BOS where the tokenizer wants it."""
    bos = tokenizer.bos_id
    prefix: list[int] = []
    for text in texts:
        prefix += text.encode(tokenizer, first=not prefix)
    if tokenizer.adds_bos and bos is not None and prefix[:1] != [bos]:
        prefix.insert(0, bos)
    while bos is not None and prefix[:2] == [bos, bos]:
        del prefix[0]
    return tuple(prefix)


def _cut(renderer: Renderer, system: str) -> tuple[ChatForm, list[Text], Text]:
    """Form, head and tail around documents and question, in the first form the template takes.

    Some templates have no system role, and some want content in parts: the system prompt then
    goes in front of the documents.
    """
    problems = []
    for parts in (False, True):
        for role in (True, False) if system else (False,):
            form = ChatForm(renderer, system, role, parts)
            try:
                text = form.render([(DOCUMENTS, BEFORE_QUESTION + QUESTION)], ())
            except CacheblendError as error:
                problems.append(error)
                continue
            markers = [SYSTEM, DOCUMENTS, QUESTION] if system else [DOCUMENTS, QUESTION]
            cut = split_once(text, markers)
            if cut is None:
                continue
            *head, between, tail = cut
            if between.strip() != BEFORE_QUESTION.strip():
                continue
            texts = [control(head[0])]
            if system:
                texts += [plain(system), control(head[1])]
            return form, texts, control(tail)
    if problems:
        raise problems[0]
    raise CacheblendError(
        f"the chat template of {renderer.model_dir} loses, doubles or moves the user's text",
        "put a template that keeps it into chat_template.jinja, or use another model",
    )


def split_once(text: str, markers: Sequence[str]) -> list[str] | None:
    """`text` cut at the markers; None unless each is there once and in this order."""
    pieces = []
    for marker in markers:
        before, found, text = text.partition(marker)
        if not found:
            return None
        pieces.append(before)
    pieces.append(text)
    return None if any(marker in piece for piece in pieces for marker in markers) else pieces
