"""A model as far as it is known without its weights: enough to cut, count, lay out and look up."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from cache_store.errors import UsageError
from cache_store.keys import DType, KVSpec
from engine.codec import choose_kv_dtype, precision
from engine.config import ModelConfig, load_config
from engine.context import ContextKind, context_kind
from engine.fingerprint import model_fingerprint
from engine.model import choose_device, choose_dtype
from engine.rope import Rope
from engine.template import PromptTemplate
from engine.tokenizer import Tokenizer


@dataclass(frozen=True)
class Blueprint:
    """dtype: what is computed in; kv_dtype: what KV is stored in. context: what chunks are computed
    behind."""

    path: Path
    name: str
    config: ModelConfig
    tokenizer: Tokenizer
    template: PromptTemplate
    device: torch.device
    dtype: DType
    kv_dtype: DType
    memo: Path | None
    context: ContextKind = "prefix"

    @classmethod
    def open(
        cls,
        model_dir: str | Path,
        *,
        name: str | None = None,
        device: str = "auto",
        dtype: str = "auto",
        kv_dtype: str = "auto",
        system: str | None = None,
        separator: str | None = None,
        template_date: str | None = None,
        memo: Path | None = None,
        context: str = "prefix",
        quantised: bool = False,
    ) -> "Blueprint":
        """Reads a Hugging Face directory's small files.

        None takes the built-in system prompt, separator and date. memo: a file that keeps weight
        hashes between runs. kv_dtype: auto is what is computed in. context: see
        `PromptTemplate.context`. quantised: whether its weights may be, as vLLM takes them and the
        torch engine doesn't. Raises NotFoundError, UsageError (not supported, or no such context),
        IntegrityError.
        """
        path, kind = Path(model_dir), context_kind(context)
        config = load_config(path, quantised=quantised)
        tokenizer = Tokenizer.load(path)
        given = {"system": system, "separator": separator, "template_date": template_date}
        chosen = {key: value for key, value in given.items() if value is not None}
        where = choose_device(device)
        computed = choose_dtype(dtype, config.dtype, where)
        return cls(
            path=path,
            name=name or path.name,
            config=config,
            tokenizer=tokenizer,
            template=PromptTemplate.load(path, tokenizer, **chosen),
            device=where,
            dtype=computed,
            kv_dtype=choose_kv_dtype(kv_dtype, computed),
            memo=memo,
            context=kind,
        )

    @cached_property
    def spec(self) -> KVSpec:
        """What this model's stored KV is found by. Reads the weights once, to hash them."""
        fingerprint = model_fingerprint(self.path, self.config, self.memo)
        return self._spec(fingerprint)

    @property
    def chunk_context(self) -> tuple[int, ...]:
        """Ids that chunks are computed behind."""
        return self.template.context(self.context)

    @property
    def precision(self) -> str:
        """Both types, as measurements are told apart by them: see `engine.codec.precision`."""
        return precision(self.dtype, self.kv_dtype)

    @property
    def shape(self) -> KVSpec:
        """As `spec`, but with the fingerprint left blank: for sizes, without reading weights."""
        return self._spec("0" * 64)

    def check_chunk_tokens(self, chunk_tokens: int) -> None:
        """Raises UsageError for chunks that, behind the prefix, the model cannot take."""
        room = self.config.context - len(self.template.prefix)
        if chunk_tokens >= room:
            raise UsageError(
                f"chunks of {chunk_tokens} tokens do not fit {self.name}'s context of "
                f"{self.config.context}",
                f"with its prefix it takes --chunk-tokens under {room}",
            )

    def regime(self, length: int) -> str:
        """Length regime of a sequence of so many tokens; see `Rope.regime`."""
        return Rope(self.config, torch.device("cpu")).regime(length)

    def _spec(self, fingerprint: str) -> KVSpec:
        c = self.config
        return KVSpec(
            fingerprint, self.tokenizer.fingerprint, c.layers, c.kv_heads, c.head_dim, self.kv_dtype
        )
