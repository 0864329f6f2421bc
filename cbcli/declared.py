"""The settings, each declared once.

A new setting is one field of `Settings`: it is then a key of the settings files, a variable
`CACHEBLEND_NAME`, a line of `config show` and of the schema, and a flag of every command that has
its group (see `cbcli.flags`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

from cbcli import values
from cbcli.declaration import (
    BLEND,
    CHUNKING,
    ENGINE,
    FILES,
    MODEL,
    PROMPT,
    RETRIEVAL,
    SAMPLING,
    STORE,
    TRACE,
    Declared,
    Origin,
    setting,
)
from engine.context import CONTEXT_KINDS
from engine.task import TASKS

# Those of engine.policies and engine.loaders, which a listing of settings should not have to
# import.
POLICIES = (
    *("value", "key", "key+value", "attention", "question", "first-k", "hybrid"),
    *("random", "explicit"),
)
LOADERS = ("pipelined", "sync", "async", "prefetch")


@dataclass(frozen=True)
class Settings:
    """What the user wants, from all the layers. Made by `load_settings` only."""

    model: str = setting(
        "smollm2-135m", values.model, "Model: a name of `models ls`, or a folder", group=MODEL
    )
    store: Path = setting("{data}/store", values.folder, "Folder of the chunk store", group=STORE)  # noqa: RUF009
    remote: str | None = setting(
        None,
        values.remote,
        "Remote store, shared with other machines: redis://…, s3://…, file:///…, or none",
        group=STORE,
        example='"redis://cache.example:6379/0"',
    )
    remote_timeout: float = setting(
        1,
        values.number(0, 3600, above=True),
        "Seconds to wait for an answer of the remote store",
        group=STORE,
    )
    memory_limit: int = setting(
        0, values.amount, "Size of the KV kept in memory between prompts, such as 2GB; 0: none"
    )
    models_dir: Path = setting("{data}/models", values.folder, "Folder of the models")  # noqa: RUF009
    engine: str = setting(
        "torch",
        values.choice("torch", "vllm"),
        "What computes: torch, or vllm in this process",
        group=ENGINE,
    )
    vllm: tuple[str, ...] = setting(
        (),
        values.texts,
        "More arguments of vLLM's engine, as KEY=VALUE",
        repeat=True,
        metavar="KEY=VALUE",
        group=ENGINE,
    )
    device: str = setting(
        "auto", values.device, "Device: auto, cpu, cuda, cuda:N or mps", group=MODEL
    )
    devices: tuple[str, ...] = setting(
        (),
        values.devices,
        "Devices that share the work of run and ingest: cuda:0,cuda:1; none: `device` alone",
    )
    dtype: str = setting(
        "auto",
        values.choice("auto", "bf16", "fp16", "fp32"),
        "What is computed in: auto, bf16, fp16 or fp32",
        group=MODEL,
    )
    kv_dtype: str = setting(
        "auto",
        values.choice("auto", "bf16", "fp16", "fp32", "fp8", "int8", "int4"),
        "What KV is stored in: auto (as computed), bf16, fp16, fp32, fp8, int8 or int4",
        group=MODEL,
    )
    threads: int | None = setting(
        None,
        values.whole(1, 4096),
        "Threads to compute with; unset: one a core",
        group=MODEL,
        example="4",
    )
    offline: bool = setting(
        False, values.flag, "Never use the network", off="--online", group=MODEL
    )
    context: str = setting(
        "prefix",
        values.choice(*CONTEXT_KINDS),
        "What new chunks are computed behind: prefix, bos (its first token alone) or none",
        group=PROMPT,
    )
    system: str | None = setting(
        None,
        values.text,
        "System prompt; unset: the built-in one",
        group=PROMPT,
        example='"Answer briefly."',
    )
    cite: bool = setting(
        False,
        values.flag,
        "Number the chunks in the prompt, ask for the numbers in the answer, and say what they "
        "stand for",
    )
    separator: str = setting("\n\n", values.text, "Text between two chunks in the prompt")
    text_separator: str = setting(
        " # # ",
        values.some_text,
        "Text between the chunks of a prompt that comes as one text; the model never sees it",
        flag="--separator",
    )
    template_date: str = setting(
        "2024-07-26", values.day, "The day a chat template is told, fixed so that prefixes last"
    )
    globs: tuple[str, ...] = setting(
        (),
        values.globs,
        "Read files in folders that match this; with ! in front, leave them out",
        flag="--glob",
        short="-g",
        repeat=True,
        metavar="GLOB",
        group=FILES,
    )
    types: tuple[str, ...] = setting(
        (),
        values.names,
        "Read files of this type: md, pdf, py, code; see --type-list",
        flag="--type",
        repeat=True,
        metavar="NAME",
        group=FILES,
    )
    not_types: tuple[str, ...] = setting(
        (),
        values.names,
        "Leave out files of this type",
        flag="--type-not",
        repeat=True,
        metavar="NAME",
        group=FILES,
    )
    unrestricted: int = setting(
        0,
        values.whole(0, 3),
        "Read what ignore files leave out; -uu: hidden files too, -uuu: binary ones too",
        short="-u",
        count=True,
        group=FILES,
    )
    follow: bool = setting(False, values.flag, "Follow symbolic links in folders", group=FILES)
    max_size: int | None = setting(
        None,
        values.size,
        "Leave out files in folders that are larger, such as 5MB",
        example='"5MB"',
        group=FILES,
    )
    jobs: int | None = setting(
        None,
        values.whole(1, 64),
        "Files to convert at the same time; unset: one a core, at most 8",
        example="4",
        group=FILES,
    )
    chunk_tokens: int = setting(
        512, values.whole(8, 1_000_000), "Most tokens of a chunk", group=CHUNKING
    )
    overlap: int = setting(
        0, values.whole(0, 1_000_000), "Tokens two chunks have in common", group=CHUNKING
    )
    collections: tuple[str, ...] = setting(
        (),
        values.collections,
        "Collections: what ingest puts documents into, and the chunks of a question come from; "
        "none: all documents",
        flag="--collection",
        repeat=True,
        metavar="NAME",
        group=RETRIEVAL,
    )
    headings: bool = setting(
        False,
        values.flag,
        "Begin each chunk's text with the headings it stands under",
        group=CHUNKING,
    )
    top_k: int = setting(
        6,
        values.whole(1, 10_000),
        "Chunks to retrieve for a question",
        short="-k",
        group=RETRIEVAL,
    )
    retriever: str = setting(
        "bm25",
        values.retriever,
        "What finds chunks: bm25 (words), embed (meaning), hybrid (both), or your own: "
        "module:function or file.py:function",
        group=RETRIEVAL,
    )
    embed_model: str = setting(
        "minishlab/potion-retrieval-32M",
        values.model,
        "Embedding model of embed and hybrid, for model2vec: a folder, or a repository of the "
        "Hugging Face Hub",
        group=RETRIEVAL,
    )
    min_score: float | None = setting(
        None,
        values.number(-(10**6), 10**6),
        "Least score of a chunk that is retrieved, as `search` shows it",
        group=RETRIEVAL,
        example="0.3",
    )
    with_neighbours: int = setting(
        0,
        values.whole(0, 1000),
        "Chunks to take before and after each retrieved one in its document",
        metavar="N",
        group=RETRIEVAL,
    )
    order: str = setting(
        "given",
        values.choice("given", "score", "source", "shuffle"),
        "Order of the chunks: given, score, source or shuffle",
        group=RETRIEVAL,
    )
    mode: str = setting(
        "blend",
        values.choice("blend", "reuse", "full", "prefix"),
        "How the prompt is computed: blend, reuse, full or prefix",
        group=BLEND,
    )
    ratio: tuple[Decimal, ...] = setting(
        "0.16",
        values.ratios,
        "Share of the cached tokens to recompute, 0 to 1, one a check layer: 0.3,0.16; or auto: "
        "as much as loading takes anyway",
        short="-r",
        group=BLEND,
    )
    target_kl: float | None = setting(
        None,
        values.number(0, 100, above=True),
        "Mean KL from full prefill, in nats, that the calibration finds the ratio for",
        group=BLEND,
        example="0.02",
    )
    task: str = setting(
        "qa",
        values.choice(*TASKS),
        f"What prompts ask for, as calibrated: {' or '.join(TASKS)}",
        group=BLEND,
    )
    force: bool = setting(
        False,
        values.flag,
        "Blend with a model that failed the gate of its calibration",
        group=BLEND,
    )
    policy: str = setting(
        "question",
        values.policy(*POLICIES),
        f"What selects tokens: {', '.join(POLICIES)}, with parameters behind a colon: "
        "question:layers=8-20",
        group=BLEND,
    )
    threshold: Decimal | None = setting(  # noqa: RUF009
        None,
        values.share,
        "Instead of a ratio: recompute the tokens that hold this share of the score, 0 to 1",
        group=BLEND,
        example="0.5",
    )
    transfer: bool | None = setting(
        None,
        values.flag,
        "Move the other tokens by what recomputed ones deviate; unset: as the policy does",
        group=BLEND,
        example="false",
    )
    check_layers: tuple[int, ...] = setting(
        "1",
        values.layers,
        "Layers at which tokens are selected, from 1 on",
        flag="--check-layer",
        repeat=True,
        group=BLEND,
    )
    loader: str = setting(
        "pipelined",
        values.choice(*LOADERS),
        f"When stored KV is read: {', '.join(LOADERS)}",
        group=BLEND,
    )
    min_tokens: int = setting(
        256,
        values.whole(0),
        "Below so many cached tokens the whole prompt is computed",
        group=BLEND,
    )
    strict_context: bool = setting(
        False,
        values.flag,
        "Use only chunks computed behind this very system prompt",
        off="--any-context",
        group=BLEND,
    )
    save: bool = setting(
        True, values.flag, "Store chunks that were missing, after the answer", group=BLEND
    )
    audit: int = setting(
        0,
        values.whole(0),
        "Check one in so many answers against full prefill; 0: none",
        metavar="N",
        group=BLEND,
    )
    check: bool = setting(
        True, values.flag, "ingest reads what is stored already, every byte of it, and mends it"
    )
    traces: int = setting(
        10, values.whole(0, 10_000), "How many of the last answers' traces are kept; 0: none"
    )
    trace_level: str = setting(
        "basic",
        values.choice("basic", "full"),
        "What a trace holds: basic, or full, which measures stored KV against a full prefill",
        group=TRACE,
    )
    trace_layers: tuple[int, ...] | None = setting(
        None,
        values.layers,
        "Layers that a full trace measures, such as 1,8,16; unset: a few spread over the model",
        group=TRACE,
        example='"1,8,16"',
    )
    live: bool = setting(
        False, values.flag, "Show on stderr how ask and ingest go on, by layer and by chunk"
    )
    progress: str = setting(
        "auto",
        values.choice("auto", "plain", "none"),
        "Progress on stderr: auto (a bar on a terminal), plain (lines, in a log too) or none",
    )
    pager: bool | str = setting(
        True, values.pager, "Show long lists through a pager; or its command"
    )
    max_tokens: int = setting(
        256, values.whole(1), "Most tokens of an answer", short="-n", group=SAMPLING
    )
    temperature: float = setting(
        0, values.number(0, 100), "0 decodes greedily, more samples", group=SAMPLING
    )
    top_p: float = setting(
        1,
        values.number(0, 1, above=True),
        "Sample from the likeliest tokens up to this share",
        group=SAMPLING,
    )
    sample_top_k: int = setting(
        0,
        values.whole(0),
        "Sample from so many likeliest tokens; 0: from all",
        group=SAMPLING,
    )
    seed: int = setting(
        0,
        values.whole(0, 2**63 - 1),
        "Seed of sampling, of shuffling and of policy random",
        group=SAMPLING,
    )
    stop: tuple[str, ...] = setting(
        (), values.texts, "Texts that end an answer", repeat=True, group=SAMPLING
    )
    host: str = setting(
        "127.0.0.1", values.some_text, "Address that serve listens on; 0.0.0.0: all of them"
    )
    port: int = setting(8000, values.whole(0, 65535), "Port that serve listens on; 0: any")
    limit: int | None = setting(
        None,
        values.size,
        "Size of a store when it is made, such as 20GB; unset: a tenth of the free disk, at most "
        "20GB",
        example='"20GB"',
    )
    profile: str | None = setting(
        None,
        values.profile_name,
        "Profile: its keys in the settings files count above the others there",
        metavar="NAME",
        example='"fast"',
    )
    origins: Mapping[str, Origin] = field(default_factory=dict, repr=False)

    def origin(self, name: str) -> Origin:
        """Where the value of the setting `name` comes from."""
        return self.origins[name]


def _named(found: Field[Any]) -> Declared:
    declared: Declared = found.metadata["declared"]
    return replace(
        declared,
        name=found.name,
        type=str(found.type),
        flag=declared.flag or "--" + found.name.replace("_", "-"),
    )


DECLARED: Mapping[str, Declared] = {f.name: _named(f) for f in fields(Settings) if f.metadata}
"""Every setting, by its name, in the order in which they are shown."""
