"""Records a run, and never at the cost of its answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cache_store.errors import CacheblendError
from engine.codec import Codec
from engine.model import Decoder
from engine.options import BlendOptions
from engine.prefill import PrefillRun
from engine.prompt import Prompt
from engine.sources import KVStore
from engine.tokenizer import Tokenizer
from engine.trace.measure import FullKV, deviations, measured_layers
from engine.trace.record import Level, Trace
from engine.trace.recording import Happened, make_trace


class Recorder:
    """Makes the trace of one run. full_kv: of level `full`, what a full prefill of the same ids is
    to leave there (see `forward.Capture`); the recorder makes one where nobody else does."""

    def __init__(
        self,
        model: Decoder,
        tokenizer: Tokenizer,
        store: KVStore | None,
        codec: Codec,
        level: Level,
        *,
        layers: Sequence[int] | None = None,
        question: str | None = None,
    ) -> None:
        """layers: to measure, None: a few spread over the model; question: as it is to be shown,
        None: the prompt's last segment. Raises UsageError for a layer the model does not have."""
        self.model, self.tokenizer, self.store = model, tokenizer, store
        self.codec, self.level, self.question = codec, level, question
        self.full_kv: FullKV | None = None
        if level == "full":
            self.full_kv = FullKV(measured_layers(model.config.layers, layers))

    def __call__(
        self, prompt: Prompt, options: BlendOptions, run: PrefillRun, happened: Happened
    ) -> tuple[Trace | None, tuple[str, ...]]:
        """The trace, but for its result, and what the caller should be told."""
        notes: tuple[str, ...] = ()
        try:
            happened = self._measured(prompt, run, happened)
        except (CacheblendError, RuntimeError, MemoryError, OSError) as error:
            # torch's word for no memory left is a RuntimeError.
            notes = (f"the trace has no KV deviations: {error}",)
        question = self.question
        if question is None:
            question = self.tokenizer.decode(prompt.segments[-1].token_ids).strip()
        try:
            made = make_trace(
                *(self.model.config, self.tokenizer, prompt, options, run, happened),
                level=self.level,
                question=question,
            )
        except Exception as error:  # the answer is there, whatever is wrong with the record
            return None, (*notes, f"the run was not recorded: {type(error).__name__}: {error}")
        return made, notes

    def _measured(self, prompt: Prompt, run: PrefillRun, happened: Happened) -> Happened:
        """With how far the stored KV that was used is from full prefill's."""
        full, store = self.full_kv, self.store
        if full is None or store is None or not any(source.cached for source in run.used):
            return happened
        if not full.kept:
            full.compute(self.model, prompt.token_ids)
        return replace(
            happened, deviations=deviations(self.model, store, self.codec, run.used, full)
        )
