"""Whether a blend finds facts in its chunks as a full prefill does."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from engine.calibration.ground import Ground
from engine.calibration.outcome import GateCheck
from engine.calibration.texts import PASSAGES, QUESTIONS, Question
from engine.forward import forward
from engine.kv_cache import KVCache
from engine.options import BlendOptions
from engine.prompt import Prompt
from engine.rope import Tables

OTHERS = 3  # passages beside those that a question needs
ASKED = 12  # questions, every other one
KEPT_LIMIT = 0.8  # the default model keeps 0.97 at ratio 0.16
LEAST_GAIN = 0.5  # nats an answer; below it the model reads nothing from its documents anyway


@dataclass(frozen=True)
class Facts:
    """The check. An answer's log-probability is measured over its tokens, after the prompt."""

    ground: Ground
    asked: int = ASKED

    def __call__(self) -> Iterator[GateCheck]:
        blended, full, without = 0.0, 0.0, 0.0
        asked = QUESTIONS[:: max(1, len(QUESTIONS) // self.asked)]
        for question in asked:
            prompt = self.ground.prompt(question.text, order_for(question))
            absent = self.ground.prompt(question.text, others_of(question))
            blended += self.likelihood(prompt, question.answer, BlendOptions.of(min_tokens=0))
            plain = BlendOptions.of(mode="full")
            full += self.likelihood(prompt, question.answer, plain)
            without += self.likelihood(absent, question.answer, plain)
        gain = (full - without) / len(asked)
        if gain < LEAST_GAIN:
            yield GateCheck(
                "facts across chunks",
                1.0,
                KEPT_LIMIT,
                f"documents gain a full prefill {gain:.2f} nats an answer: nothing to keep",
                at_least=True,
            )
            return
        yield GateCheck(
            "facts across chunks",
            (blended - without) / (full - without),
            KEPT_LIMIT,
            f"share a blend keeps of the {gain:.1f} nats that documents gain an answer",
            at_least=True,
        )

    def likelihood(self, prompt: Prompt, answer: str, options: BlendOptions) -> float:
        """log p of the answer's tokens after the prompt."""
        engine = self.ground.engine
        ids = tuple(engine.tokenizer.encode(answer))
        run = self.ground.prefill(prompt, options, room=len(ids))
        return self._score(run.cache, run.tables, run.logits, ids)

    @torch.inference_mode()
    def _score(
        self, cache: KVCache, tables: Tables, logits: torch.Tensor, ids: tuple[int, ...]
    ) -> float:
        if len(ids) > 1:
            more = forward(self.ground.engine.model, cache, ids[:-1], tables, last=None)
            logits = torch.cat([logits, more])
        wanted = torch.tensor(ids, device=logits.device)[:, None]
        return float(logits.log_softmax(-1).gather(1, wanted).sum())


def order_for(question: Question) -> list[int]:
    """Passages of a prompt: others first, then those that are needed with one between."""
    others = others_of(question)
    return [others[0], *question.needs[:1], others[1], *question.needs[1:], *others[2:]]


def others_of(question: Question) -> list[int]:
    """Passages that don't hold the answer, which ones depends on the question alone."""
    start = sum(question.text.encode()) % len(PASSAGES)
    around = [(start + 5 * step) % len(PASSAGES) for step in range(len(PASSAGES))]
    free = [n for n in around if n not in question.needs and question.answer not in _text(n)]
    return free[:OTHERS]


def _text(number: int) -> str:
    return PASSAGES[number].chunk
