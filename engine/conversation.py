"""A conversation whose KV is kept from turn to turn: each turn costs its own tokens.

A turn's prompt is everything before it, as it stands in the KV cache, then the chunks that are new
in it, then its question. What the cache holds is never computed again as long as it is what the
prompt begins with: that is looked at token by token, so that a chat template which writes earlier
turns in another way, or a turn that was dropped, costs no more than what comes after it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Unpack

from cache_store.errors import UsageError
from engine.api import Engine
from engine.asked import AskWishes
from engine.dialogue import Dialogue
from engine.kv_cache import KVCache
from engine.options import SamplingOptions
from engine.prefill import require_room
from engine.prompt import Prompt, PromptChunk, Segment, SegmentLine
from engine.results import AskResult

_STEP = 256  # tokens that a KV cache's size is rounded up to
_LEFT = 0.75  # of the model's context that turns may take once some had to be dropped


@dataclass(frozen=True)
class NumberedChunk:
    """A chunk under the number it has in its conversation, from 1."""

    number: int
    chunk: PromptChunk


@dataclass(frozen=True)
class Turn:
    """A question with the chunks that came with it, and its answer as the model wrote it. cite:
    whether the chunks' numbers stand in the prompt, and were asked for."""

    question: str
    chunks: tuple[NumberedChunk, ...]
    cite: bool = False
    answer: str = ""
    answer_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class PlannedTurn:
    """A turn laid out. prompt: of all turns kept; turns: those before; number: of this one in its
    conversation, from 1; notes: what the user should be told."""

    prompt: Prompt
    turns: tuple[Turn, ...]
    turn: Turn
    number: int
    notes: tuple[str, ...]

    @property
    def chunks(self) -> tuple[NumberedChunk, ...]:
        """All that the prompt holds, in their order in it."""
        return tuple(chunk for turn in (*self.turns, self.turn) for chunk in turn.chunks)

    @property
    def numbered(self) -> tuple[NumberedChunk, ...]:
        """Those whose numbers stand in the prompt."""
        turns = (turn for turn in (*self.turns, self.turn) if turn.cite)
        return tuple(chunk for turn in turns for chunk in turn.chunks)


@dataclass(frozen=True)
class TurnResult:
    """An answered turn. kept_tokens: of its prompt, in the KV cache already; computed_tokens:
    computed to the last layer, `recomputed` ones among them; chunks: all that the prompt holds;
    numbered: those whose numbers stand there."""

    result: AskResult
    turn: int
    kept_tokens: int
    computed_tokens: int
    chunks: tuple[NumberedChunk, ...]
    numbered: tuple[NumberedChunk, ...]

    @property
    def new_tokens(self) -> int:
        """Tokens of the prompt that were not kept."""
        return len(self.result.prompt.token_ids) - self.kept_tokens


class Conversation:
    """Turns over the chunks of an engine's store, of one model. cite: the chunks of turns to come
    are numbered in the prompt, and the model is asked to name its sources by number.

    Whatever ends a turn before its answer, an interrupt above all, the conversation stays as it was
    before that turn. Raises CacheblendError for a model whose chat template holds no conversation.
    """

    def __init__(self, engine: Engine, *, cite: bool = False) -> None:
        self.engine, self.cite = engine, cite
        self.turns: tuple[Turn, ...] = ()
        self._dialogue = Dialogue(engine.template)
        self._number = 0  # turns there were, dropped ones among them
        self._numbers: dict[tuple[int, ...], int] = {}  # of chunks, which keep theirs
        self._cache: KVCache | None = None
        self._ids: tuple[int, ...] = ()  # what the cache holds
        self._regime = ""
        self._said_rewritten = False

    @property
    def kept_tokens(self) -> int:
        """Tokens in the KV cache."""
        return len(self._ids)

    def resume(self, turns: Sequence[Turn]) -> None:
        """Begins anew with turns of an earlier conversation, whose KV is made with the next one."""
        self.turns, self._number = tuple(turns), len(turns)
        self._numbers = {c.chunk.token_ids: c.number for turn in turns for c in turn.chunks}
        self._forget(0)

    def plan(
        self, question: str, chunks: Sequence[PromptChunk], sampling: SamplingOptions
    ) -> PlannedTurn:
        """Lays out the next turn; chunks that the conversation holds already are not repeated, and
        the oldest turns are left out where the model's context is full. Raises UsageError."""
        if not question.strip():
            raise UsageError("the question is empty", "give a question")
        context = self.engine.model.config.context
        room = min(sampling.max_tokens, context // 4)
        limit, dropped = context - room, 0
        while True:
            turns = self.turns[dropped:]
            new = self._new_chunks(turns, chunks)
            numbered = new or any(turn.cite and turn.chunks for turn in turns)
            turn = Turn(question, new, self.cite and bool(numbered))
            segments = self._lay_out((*turns, turn))
            if not turns or segments[-1].end <= limit:
                break
            # Were only as much left out as is needed, the next turn would do it all again.
            limit = min(limit, int(context * _LEFT))
            dropped += 1
        require_room(segments[-1].end, context)  # before anything that is kept is given up
        prompt = self._kept(segments)
        notes = self._notes(prompt, dropped)
        return PlannedTurn(prompt, turns, turn, self._number + 1, notes)

    def answer(
        self,
        planned: PlannedTurn,
        interrupted: Callable[[], bool] = lambda: False,
        **wishes: Unpack[AskWishes],
    ) -> TurnResult:
        """Answers a turn that was just planned; ValueError for one whose beginning is no longer
        kept. See `Engine.generate`.

        interrupted: asked before each token whether the answer is to end; what there is of it then
        is the turn's.
        """
        prompt = planned.prompt
        if prompt.token_ids[: prompt.kept] != self._ids[: prompt.kept]:
            raise ValueError("the conversation has changed since this turn was planned")
        sampling = wishes.get("sampling") or SamplingOptions()
        self._forget(prompt.kept)  # what is behind it is overwritten
        cache = self._space(len(prompt.token_ids) + sampling.max_tokens + _STEP, prompt.kept)
        question = planned.turn.question
        result = self.engine.generate_in(cache, prompt, interrupted, question=question, **wishes)
        ids = self._shown(result)
        pairs = zip(ids, result.output_token_ids, strict=False)
        same = tuple(said for said, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        self._ids = (prompt.token_ids + same)[: cache.length]
        self._regime = self.engine.model.rope.regime(len(prompt.token_ids))
        turn = replace(planned.turn, answer=result.answer, answer_ids=ids)
        self._numbers.update({c.chunk.token_ids: c.number for c in turn.chunks})
        self._number = planned.number
        self.turns = (*planned.turns, turn)
        result = replace(result, notes=(*planned.notes, *result.notes))
        always = sum(
            s.end - s.start for s in result.prompt.segments if s.status in ("computed", "miss")
        )
        return TurnResult(
            result,
            planned.number,
            prompt.kept,
            always + result.recomputed.tokens,
            planned.chunks,
            planned.numbered,
        )

    def ask(
        self, question: str, chunks: Sequence[PromptChunk], **wishes: Unpack[AskWishes]
    ) -> TurnResult:
        """The next turn, planned and answered."""
        began = time.perf_counter()
        planned = self.plan(question, chunks, wishes.get("sampling") or SamplingOptions())
        seconds = time.perf_counter() - began
        done = self.answer(planned, **wishes)
        timing = done.result.timing
        timing = replace(timing, tokenize_s=seconds, total_s=timing.total_s + seconds)
        return replace(done, result=done.result.timed(timing))

    # Laying out

    def _new_chunks(
        self, turns: Sequence[Turn], chunks: Sequence[PromptChunk]
    ) -> tuple[NumberedChunk, ...]:
        """Those that no turn holds, each once, under the numbers they had or the next ones."""
        held = {c.chunk.token_ids for turn in turns for c in turn.chunks}
        new = [c for c in dict.fromkeys(chunks) if c.token_ids and c.token_ids not in held]
        numbers = dict(self._numbers)
        for chunk in new:
            numbers.setdefault(chunk.token_ids, max(numbers.values(), default=0) + 1)
        once = {chunk.token_ids: chunk for chunk in reversed(new)}
        return tuple(NumberedChunk(numbers[ids], once[ids]) for ids in reversed(once))

    def _lay_out(self, turns: Sequence[Turn]) -> list[Segment]:
        """All turns, the last of which is to be answered."""
        template, frame = self.engine.template, self._dialogue.frame(len(turns))
        line = SegmentLine()
        for number, turn in enumerate(turns):
            answer = turns[number - 1].answer_ids if number else ()
            # As two, for the cache mostly holds the answer but its last token, and no more.
            line.add("history", answer)
            line.add("history" if number else "prefix", frame.before[number])
            leads = template.leads([c.number for c in turn.chunks]) if turn.cite else None
            line.add_chunks([c.chunk for c in turn.chunks], template.separator, leads)
            documents = bool(turn.chunks) or not number
            asked = template.asked(turn.question, cite=turn.cite, documents=documents)
            last = number == len(turns) - 1
            line.add("suffix" if last else "history", (*asked, *frame.after[number]))
        return line.segments

    def _kept(self, segments: Sequence[Segment]) -> Prompt:
        """The prompt, with what the cache holds of it: up to the first token that differs, but no
        part of a chunk, and not the question."""
        ids = tuple(token for segment in segments for token in segment.token_ids)
        pairs = zip(ids[: segments[-1].start], self._ids, strict=False)
        kept = next((at for at, (a, b) in enumerate(pairs) if a != b), None)
        if kept is None:
            kept = min(segments[-1].start, len(self._ids))
        if self._regime != self.engine.model.rope.regime(len(ids)):
            kept = 0  # all keys are rotated otherwise
        cut: list[Segment] = []
        for segment in segments:
            at = kept - segment.start
            if not 0 < at < len(segment.token_ids):
                cut.append(segment)
            elif segment.kind == "chunk":
                kept = segment.start
                cut.append(segment)
            else:
                cut.append(replace(segment, token_ids=segment.token_ids[:at]))
                cut.append(replace(segment, token_ids=segment.token_ids[at:], start=kept))
        return Prompt(tuple(cut), kept)

    def _notes(self, prompt: Prompt, dropped: int) -> tuple[str, ...]:
        lost = len(self._ids) - prompt.kept
        if dropped:
            what = "oldest turn is" if dropped == 1 else f"{dropped} oldest turns are"
            context = self.engine.model.config.context
            return (
                f"the model's context of {context:,} tokens is full: the {what} left out, and the "
                "prompt is built anew",
            )
        if not lost or self._said_rewritten:
            return ()
        self._said_rewritten = True
        if self._regime != self.engine.model.rope.regime(len(prompt.token_ids)):
            return (
                "this model's positions depend on the prompt's length: the prompt is built anew "
                "where that changes",
            )
        return (
            "this model's chat template writes earlier turns in another way than the one to be "
            f"answered: the last {lost:,} tokens of them are computed again, each turn",
        )

    def _shown(self, result: AskResult) -> tuple[int, ...]:
        """The tokens of the answer, but those that only a stop string was in, and control tokens:
        a document that lures the model into writing them would speak for others."""
        decode, special = self.engine.tokenizer.decode, self.engine.tokenizer.special_ids
        ids = tuple(token for token in result.output_token_ids if token not in special)
        if decode(ids) != result.answer:
            while ids and decode(ids[:-1]).startswith(result.answer):
                ids = ids[:-1]
        return ids

    # The cache

    def _space(self, wanted: int, kept: int) -> KVCache:
        """The cache, with room for so many tokens; what is kept moves with it where it grows."""
        context, old = self.engine.model.config.context, self._cache
        wanted = min(wanted, context)
        if old is not None and old.capacity >= wanted:
            return old
        size = min(context, -(-2 * wanted // _STEP) * _STEP)  # so that it rarely grows
        new = self.engine.model.new_cache(size)
        if old is not None and kept:
            new.take(old, kept)
        self._cache = new
        return new

    def _forget(self, kept: int) -> None:
        """All that the cache holds but its first tokens."""
        self._ids = self._ids[:kept]
        if not kept:
            self._regime = ""
