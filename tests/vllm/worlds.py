"""Tiny models that vLLM takes, and vLLM started on one of them in this process."""

import gc
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from cache_store.store import ChunkStore
from engine.prompt import Prompt, PromptChunk, lay_out
from tests.engine.tiny_models import Tiny, build
from tests.engine.tiny_tokenizers import write_tokenizer
from tests.vllm.rank_probes import Runs

VOCAB = 640  # the tokenizer has a few fewer
SHAPE = dict(
    vocab_size=VOCAB,
    hidden_size=256,
    intermediate_size=512,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=2048,
    eos_token_id=2,
)
SPREAD = 0.07  # of weights: as narrower tiny models have it, seen from a row's sum
# Each is what vLLM's packed kernels take: head_dim 32 or 64, widths in multiples of 32.
TINY = {
    tiny.name: tiny
    for tiny in (
        Tiny("llama", "Llama", SHAPE),
        Tiny(
            "llama-6kv",  # for two and three tensor-parallel ranks, which share its vocabulary, too
            "Llama",
            SHAPE
            | dict(
                vocab_size=768,
                hidden_size=384,
                intermediate_size=576,
                num_attention_heads=12,
                num_key_value_heads=6,
            ),
        ),
        Tiny("qwen2", "Qwen2", SHAPE),
        Tiny("qwen3", "Qwen3", SHAPE | dict(head_dim=64, tie_word_embeddings=True)),
        Tiny("phi3", "Phi3", SHAPE | dict(original_max_position_embeddings=2048)),
        Tiny("mistral", "Mistral", SHAPE | dict(sliding_window=None)),
    )
}
FAMILIES = ("llama", "qwen2", "qwen3", "phi3", "mistral")


def write_model(tiny: Tiny, path: Path, seed: int = 0) -> Path:
    """A float32 model directory with a tokenizer; returns `path`."""
    build(tiny, path, seed, SPREAD)
    write_tokenizer(path, config={"tokenizer_class": "PreTrainedTokenizerFast"})
    return path


def ids(count: int, seed: int) -> tuple[int, ...]:
    """Random ordinary token ids."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(20, 580, (count,), generator=generator).tolist())


@dataclass(frozen=True)
class Text:
    """Parts of prompts: what is laid out in the orders that tests ask for."""

    prefix: tuple[int, ...]
    chunks: tuple[PromptChunk, ...]
    separator: tuple[int, ...]
    suffix: tuple[int, ...]

    def prompt(self, order: Sequence[int], suffix: Sequence[int] | None = None) -> Prompt:
        chunks = [self.chunks[index] for index in order]
        return lay_out(self.prefix, chunks, self.separator, tuple(suffix or self.suffix))


def make_text(
    sizes: Sequence[int] = (61, 40, 77, 52),
    *,
    prefix: int = 9,
    separator: int = 2,
    suffix: int = 7,
    seed: int = 0,
) -> Text:
    return Text(
        ids(prefix, seed + 1),
        tuple(PromptChunk(ids(size, seed + 10 + i)) for i, size in enumerate(sizes)),
        ids(separator, seed + 2),
        ids(suffix, seed + 3),
    )


@dataclass(frozen=True)
class Answer:
    """token_ids: greedy. logprobs: over the whole vocabulary, float32 [steps, vocab], None where
    not asked for. raw: vLLM's own."""

    token_ids: tuple[int, ...]
    logprobs: torch.Tensor | None
    raw: Any


@dataclass
class Served:
    """vLLM in this process, with the connector (`connector` None: without)."""

    llm: Any
    model_dir: Path
    store_dir: Path
    vocab: int
    runs: Runs = field(default_factory=Runs, repr=False)
    """What was blended, in order: `engine.vllm.worker.BlendRun`s."""
    _closed: bool = field(default=False, repr=False)

    def __post_init__(self) -> None:
        if self.connector is not None:
            self.connector.steps.listeners.append(self.runs)

    def ask(
        self,
        prompt: Prompt | Sequence[int],
        *,
        steps: int = 1,
        logprobs: bool = True,
        **wishes: Any,
    ) -> Answer:
        """Answers one prompt alone. A `Prompt`'s chunks are named to the connector, with `wishes`
        (ratio=..., policy=...); bare ids are a plain request."""
        return self.batch([prompt], steps=steps, logprobs=logprobs, **wishes)[0]

    def batch(
        self,
        prompts: Sequence[Prompt | Sequence[int]],
        *,
        steps: int = 1,
        logprobs: bool = True,
        **wishes: Any,
    ) -> list[Answer]:
        """Answers many in one call of vLLM, in their order."""
        given, params = [], []
        for prompt in prompts:
            named = isinstance(prompt, Prompt)
            token_ids = prompt.token_ids if isinstance(prompt, Prompt) else prompt
            given.append({"prompt_token_ids": list(token_ids)})
            extra = extra_args(prompt, **wishes) if isinstance(prompt, Prompt) else None
            assert named or not wishes, "plain requests have no wishes"
            params.append(sampling(steps, logprobs, extra))
        outputs = self.llm.generate(given, params, use_tqdm=False)
        self.settle()
        return [self._answer(output, logprobs) for output in outputs]

    def settle(self) -> None:
        """Lets the connector store what it missed, as a server's loop does once it is idle."""
        for _ in range(8):
            connector = self.scheduler.connector
            if connector is None or not connector.has_pending_push_work():
                return
            self.llm.llm_engine.engine_core.get_output()
        raise AssertionError("the connector's work doesn't end")

    def forget(self) -> None:
        """Empties vLLM's own prefix cache."""
        assert self.llm.reset_prefix_cache()

    @property
    def core(self) -> Any:
        """vLLM's engine core."""
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def scheduler(self) -> Any:
        """vLLM's scheduler; its `connector` is the scheduler's side of ours."""
        return self.core.scheduler

    @property
    def model(self) -> torch.nn.Module:
        return self.llm.apply_model(_itself)[0]

    @property
    def connector(self) -> Any:
        """The worker's side of the connector, None where vLLM runs without."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

        return get_kv_transfer_group() if has_kv_transfer_group() else None

    def open_store(self) -> ChunkStore:
        return ChunkStore.open(self.store_dir)

    def close(self) -> None:
        """Ends it so that another one can be started in this process. Twice is once."""
        if self._closed:
            return
        from vllm.distributed.kv_transfer.kv_transfer_state import ensure_kv_transfer_shutdown

        self._closed = True
        self.llm.llm_engine.engine_core.shutdown()
        ensure_kv_transfer_shutdown()
        self.llm = None
        gc.collect()

    def _answer(self, output: Any, logprobs: bool) -> Answer:
        said = output.outputs[0]
        table = None
        if logprobs:
            table = torch.full((len(said.token_ids), self.vocab), float("nan"))
            for row, step in zip(table, said.logprobs, strict=True):
                for token, found in step.items():
                    row[token] = found.logprob
            assert not table.isnan().any()
        return Answer(tuple(said.token_ids), table, output)


def sampling(steps: int = 1, logprobs: bool = True, extra: Mapping[str, Any] | None = None) -> Any:
    """Greedy, exactly `steps` tokens, no text."""
    from vllm import SamplingParams

    return SamplingParams(
        temperature=0,
        max_tokens=steps,
        ignore_eos=True,
        detokenize=False,
        logprobs=-1 if logprobs else None,
        extra_args=dict(extra) if extra else None,
    )


def extra_args(prompt: Prompt, **wishes: Any) -> dict[str, Any]:
    """What a request is given so that the connector knows its chunks."""
    listed = [
        {"kind": segment.kind, "tokens": segment.end - segment.start}
        | ({"chunk_id": segment.chunk_id} if segment.chunk_id else {})
        for segment in prompt.segments[:-1]
    ]
    return {"kv_transfer_params": {"cacheblend": {"segments": listed, **wishes}}}


def start_vllm(
    model: Path,
    store: Path,
    *,
    connector: bool = True,
    dtype: str = "float32",
    extra: Mapping[str, Any] | None = None,
    **options: Any,
) -> Served:
    """Starts vLLM on a model's directory, with the connector on a store, which is made if need be.

    extra: more of the connector's configuration, over min_tokens 0 and policy "value". options:
    vLLM's own.
    """
    from vllm import LLM

    if connector:
        ChunkStore.open(store, limit_bytes=10**9).close()
        options = with_connector(model, store, extra) | options
    config = json.loads((model / "config.json").read_text())
    llm = LLM(model=str(model), dtype=dtype, **(SMALL | options))
    return Served(llm, model, store, config["vocab_size"])


SMALL: dict[str, Any] = dict(
    enforce_eager=True,
    max_model_len=1024,
    max_num_batched_tokens=2048,
    max_num_seqs=16,
    max_logprobs=-1,
    block_size=32,
    seed=0,
)
"""What vLLM is started with here."""


def with_connector(
    model: Path, store: Path, extra: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """vLLM's options for the connector; extra: as in `start_vllm`."""
    configuration = {"store": str(store), "model": str(model), "min_tokens": 0}
    return {
        "worker_cls": "engine.vllm.host.CacheBlendWorker",
        "kv_transfer_config": {
            "kv_connector": "CacheBlendConnector",
            "kv_connector_module_path": "engine.vllm.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": configuration
            | {"policy": "value", "self_test": False}
            | dict(extra or {}),
        },
    }


def _itself(model: torch.nn.Module) -> torch.nn.Module:
    return model
