"""Where models and stored KV are, and what computes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cbcli import values
from cbcli.declaration import ENGINE, MODEL, STORE, setting


@dataclass(frozen=True)
class MachineSettings:
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
        risk="sends what is stored to another place",
        harmless=(None,),
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
        risk="can run code",
        harmless=((),),
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
