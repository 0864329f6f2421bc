"""Flags that several commands have, each declared once: `top_k: flags.TopK = None`.

All are None where they aren't given, for `load_settings` to take what is below a flag.
"""

from __future__ import annotations

from typing import Annotated

import typer

ChunkTokens = Annotated[int | None, typer.Option("--chunk-tokens", help="Most tokens of a chunk.")]
Overlap = Annotated[int | None, typer.Option("--overlap", help="Tokens that two chunks share.")]
Context = Annotated[
    str | None,
    typer.Option("--context", help="What new chunks are computed behind: prefix, bos or none."),
]
TopK = Annotated[
    int | None, typer.Option("--top-k", "-k", help="Chunks to retrieve for the question.")
]
Order = Annotated[str | None, typer.Option("--order", help="given, score, source or shuffle.")]
Mode = Annotated[str | None, typer.Option("--mode", help="blend, reuse, full or prefix.")]
Ratio = Annotated[
    str | None,
    typer.Option(
        "--ratio",
        "-r",
        help="Share of cached tokens to recompute; 0.3,0.16 for two check layers; auto: see "
        "calibrate.",
    ),
]
TargetKL = Annotated[
    float | None,
    typer.Option("--target-kl", help="Mean KL to reach instead: the ratio comes from calibrate."),
]
Task = Annotated[
    str | None, typer.Option("--task", help="Which calibration counts: qa or summary.")
]
Force = Annotated[
    bool | None,
    typer.Option("--force", help="Blend though the model failed the gate of calibrate."),
]
Policy = Annotated[
    str | None,
    typer.Option(
        "--policy",
        help="What selects tokens: question, value, key, key+value, attention, first-k, hybrid or "
        "random, with parameters behind a colon: question:layers=8-20.",
    ),
]
Threshold = Annotated[
    str | None,
    typer.Option(
        "--threshold", help="Instead of a ratio: recompute what holds this share of the score."
    ),
]
Transfer = Annotated[
    bool | None,
    typer.Option(
        "--transfer/--no-transfer",
        help="Move the other tokens by what recomputed ones deviate.",
    ),
]
CheckLayer = Annotated[
    list[str] | None,
    typer.Option("--check-layer", help="Layer at which tokens are selected; repeatable."),
]
Loader = Annotated[
    str | None,
    typer.Option("--loader", help="When stored KV is read: pipelined, sync, async or prefetch."),
]
MinTokens = Annotated[
    int | None, typer.Option("--min-tokens", help="Fewest cached tokens worth blending.")
]
Compare = Annotated[bool, typer.Option("--compare", help="Also run a full prefill, and compare.")]
Audit = Annotated[
    int | None,
    typer.Option(
        "--audit", help="Check one in N answers against full prefill; log it.", metavar="N"
    ),
]
TraceLevel = Annotated[
    str | None, typer.Option("--trace-level", help="What a trace holds: basic or full.")
]
TraceLayers = Annotated[
    str | None,
    typer.Option("--trace-layers", help="Layers that a full trace measures, such as 1,8,16."),
]
Live = Annotated[
    bool | None,
    typer.Option("--live/--no-live", help="Show on stderr what is done while it is done."),
]
Save = Annotated[
    bool | None, typer.Option("--save/--no-save", help="Store chunks that were missing.")
]
Check = Annotated[
    bool | None,
    typer.Option(
        "--check/--no-check", help="Read what is stored already, every byte, and mend it."
    ),
]
StrictContext = Annotated[
    bool | None,
    typer.Option(
        "--strict-context/--any-context",
        help="Use only chunks computed behind this very system prompt.",
    ),
]
System = Annotated[str | None, typer.Option("--system", help="System prompt.")]
MaxTokens = Annotated[
    int | None, typer.Option("--max-tokens", "-n", help="Most tokens of the answer.")
]
Temperature = Annotated[
    float | None, typer.Option("--temperature", help="0 decodes greedily, more samples.")
]
TopP = Annotated[float | None, typer.Option("--top-p", help="Nucleus to sample from.")]
SampleTopK = Annotated[
    int | None, typer.Option("--sample-top-k", help="Likeliest tokens to sample from.")
]
Seed = Annotated[
    int | None, typer.Option("--seed", help="Of sampling, shuffling and policy random.")
]
Stop = Annotated[
    list[str] | None, typer.Option("--stop", help="A text that ends the answer; repeatable.")
]
Model = Annotated[str | None, typer.Option("--model", help="Model: a name or a folder.")]
Store = Annotated[str | None, typer.Option("--store", help="Folder of the store.")]
Remote = Annotated[
    str | None, typer.Option("--remote", help="Remote store: redis://…, s3://…; or none.")
]
RemoteTimeout = Annotated[
    float | None, typer.Option("--remote-timeout", help="Seconds to wait for the remote store.")
]
MemoryLimit = Annotated[
    str | None, typer.Option("--memory-limit", help="Size of the KV kept in memory: 2GB, or 0.")
]
Engine = Annotated[str | None, typer.Option("--engine", help="What computes: torch or vllm.")]
VLLM = Annotated[
    list[str] | None,
    typer.Option("--vllm", metavar="KEY=VALUE", help="An argument for vLLM's engine; repeatable."),
]
Device = Annotated[str | None, typer.Option("--device", help="auto, cpu, cuda, cuda:N or mps.")]
Devices = Annotated[str | None, typer.Option("--devices", help="Share the work: cuda:0,cuda:1.")]
DType = Annotated[str | None, typer.Option("--dtype", help="auto, bf16, fp16 or fp32.")]
KVDType = Annotated[
    str | None,
    typer.Option(
        "--kv-dtype", help="What KV is stored in: auto, bf16, fp16, fp32, fp8, int8 or int4."
    ),
]
Threads = Annotated[int | None, typer.Option("--threads", help="Threads to use.")]
Offline = Annotated[
    bool | None, typer.Option("--offline/--online", help="Forbid or allow the network.")
]
