"""What surrounds the turns of a conversation: the model's chat template around several of them.

As in `engine.template`, it is rendered with markers and cut. Answers stand as the model wrote them,
token by token: they are never tokenized again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cache_store.errors import CacheblendError
from engine.rendering import Text, control, plain
from engine.template import (
    BEFORE_QUESTION,
    DOCUMENTS,
    QUESTION,
    SYSTEM,
    ChatForm,
    PromptTemplate,
    encode_head,
    split_once,
)

_ANSWER = "CACHEBLENDANSWER"
_BETWEEN_PLAIN = "\n\n"  # of two turns, for a model without a chat template


@dataclass(frozen=True)
class Frame:
    """Ids around the turns of a conversation whose last question is still to be answered.

    before: in front of each turn's documents; the first one's is the prompt's prefix. after: behind
    each turn's question, in front of its answer.
    """

    before: tuple[tuple[int, ...], ...]
    after: tuple[tuple[int, ...], ...]


class Dialogue:
    """The chat template of one model around any number of turns.

    Raises CacheblendError, naming the model, for a template that cannot hold two.
    """

    def __init__(self, template: PromptTemplate) -> None:
        self.template = template
        self._tail = tuple(template.tail.encode(template.tokenizer, first=False))
        self.frame(2)

    def frame(self, turns: int) -> Frame:
        """Around so many turns, at least 1."""
        template = self.template
        if turns == 1:
            return Frame((template.prefix,), (self._tail,))
        if template.form is None:
            between = tuple(template.tokenizer.encode(_BETWEEN_PLAIN))
            return Frame((template.prefix, *[between] * (turns - 1)), (self._tail,) * turns)
        before, after = _cut(template.form, turns)
        encoded = [
            tuple(i for text in texts for i in text.encode(template.tokenizer, first=False))
            for texts in before[1:]
        ]
        return Frame(
            (encode_head(before[0], template.tokenizer), *encoded),
            tuple(self._after(texts) for texts in after),
        )

    def _after(self, texts: Sequence[Text]) -> tuple[int, ...]:
        """What stands in front of an answer. Some templates write a space there that the model
        writes itself when it answers, as a part of its first token."""
        tail = self.template.tail.text
        if "".join(text.text for text in texts).rstrip() == tail.rstrip():
            return self._tail
        tokenizer = self.template.tokenizer
        return tuple(i for text in texts for i in text.encode(tokenizer, first=False))


def _cut(form: ChatForm, turns: int) -> tuple[list[list[Text]], list[list[Text]]]:
    """The template's text in front of each turn's documents, and behind its question."""
    marks = [[f"{what}{n:06d}" for what in (DOCUMENTS, QUESTION, _ANSWER)] for n in range(turns)]
    text = form.render(
        [(documents, BEFORE_QUESTION + question) for documents, question, _ in marks],
        [answer for _, _, answer in marks[:-1]],
    )
    cut = split_once(text, [mark for turn in marks for mark in turn][:-1])
    lost = cut is None or sum(piece.count(SYSTEM) for piece in cut) != bool(form.system)
    if cut is None or lost or any(b.strip() != BEFORE_QUESTION.strip() for b in cut[1::3]):
        raise CacheblendError(
            f"the chat template of {form.renderer.model_dir} holds no conversation: it loses, "
            "doubles or moves what was said in earlier turns",
            "ask questions one by one, with cacheblend ask, or put a template that holds one into "
            "chat_template.jinja",
        )
    return [_texts(p, form.system) for p in cut[0::3]], [_texts(p, form.system) for p in cut[2::3]]


def _texts(piece: str, system: str) -> list[Text]:
    """A piece of the rendered template, with the system prompt where it goes."""
    before, marker, rest = piece.partition(SYSTEM)
    return [control(before), plain(system), control(rest)] if marker else [control(piece)]
