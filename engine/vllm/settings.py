"""What a connector is told when vLLM starts: vLLM's `kv_connector_extra_config`.

What isn't given there comes from the environment, where the command reads it from, too: so the
store, the ratio and the like have to be said only once.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import platformdirs

from cache_store.errors import NotFoundError, UsageError
from cache_store.tiers.addresses import masked
from engine.context import CONTEXT_KINDS, ContextKind
from engine.kinds import Kind, choice, day, flag, text, unescaped
from engine.loaders import LOADER_NAMES
from engine.options import MODES, BlendOptions
from engine.task import TASKS, Task
from engine.trace.record import Level
from engine.vllm import kinds

if TYPE_CHECKING:
    from cache_store.rebuild import OnDamage
    from cache_store.store import ChunkStore
    from engine.blueprint import Blueprint

SEPARATOR = " # # "
PLACE = "kv_connector_extra_config"
DATA = "{data}"
"""In a default: the folder of the user's data, CACHEBLEND_HOME."""


@dataclass(frozen=True)
class Setting:
    """One key. default: as it is written; variable: where it is taken from where it isn't given,
    "" for none."""

    name: str
    default: str
    kind: Kind
    help: str
    variable: str = ""


_BLEND = (
    Setting("mode", "blend", choice(*MODES), "blend, reuse, prefix or full", "MODE"),
    Setting("policy", "question", kinds.some_text, "What selects tokens", "POLICY"),
    Setting(
        "ratio",
        "0.16",
        kinds.shares,
        "Share of the cached tokens to recompute, one a check layer",
        "RATIO",
    ),
    Setting(
        "threshold",
        "",
        kinds.share,
        "Instead of a ratio: recompute the tokens that hold this share of the score",
        "THRESHOLD",
    ),
    Setting(
        "check_layers", "1", kinds.layers, "Layers at which tokens are selected", "CHECK_LAYERS"
    ),
    Setting(
        "min_tokens",
        "256",
        kinds.whole(0),
        "Below so many cached tokens vLLM computes the whole prompt",
        "MIN_TOKENS",
    ),
    Setting(
        "strict_context",
        "false",
        flag,
        "Use only chunks computed behind this very prefix",
        "STRICT_CONTEXT",
    ),
    Setting(
        "transfer",
        "",
        flag,
        "Move other tokens by what recomputed ones deviate; unset: as the policy does",
        "TRANSFER",
    ),
    Setting("loader", "pipelined", choice(*LOADER_NAMES), "When stored KV is read", "LOADER"),
    Setting("seed", "0", kinds.whole(0), "Seed of policy `random`", "SEED"),
)
_OTHERS = (
    Setting("store", f"{DATA}/store", kinds.path, "Folder of the chunk store", "STORE"),
    Setting("limit", "", kinds.size, "Size of a store that is made new, such as 20GB", "LIMIT"),
    Setting("read_only", "false", flag, "Never write to the store"),
    Setting(
        "remote",
        "",
        kinds.remote,
        "Remote store behind the local one: redis://…, s3://…, file:///…",
        "REMOTE",
    ),
    Setting(
        "remote_timeout",
        "1",
        kinds.seconds,
        "Seconds to wait for one answer of the remote store",
        "REMOTE_TIMEOUT",
    ),
    Setting(
        "memory_limit",
        "0",
        kinds.size,
        "Size of the KV kept in memory between prompts, in each worker; 0: none",
        "MEMORY_LIMIT",
    ),
    Setting("model", "", kinds.path, "Folder of the model; unset: the one vLLM serves"),
    Setting("name", "", kinds.some_text, "What the model is called; unset: its folder's name"),
    Setting(
        "fingerprints",
        f"{DATA}/fingerprints.json",
        kinds.path,
        "File that keeps hashes of weights, so that a start needn't read them all",
    ),
    Setting(
        "separator",
        SEPARATOR,
        kinds.some_text,
        "Text between a prompt's chunks; null: requests name their chunks otherwise",
        "TEXT_SEPARATOR",
    ),
    Setting(
        "context",
        "prefix",
        choice(*CONTEXT_KINDS),
        "What new chunks are computed behind: prefix, bos or none",
        "CONTEXT",
    ),
    Setting(
        "kv_dtype",
        "auto",
        choice("auto", "bf16", "fp16", "fp32", "fp8", "int8", "int4"),
        "What KV is stored in; auto: as vLLM computes",
        "KV_DTYPE",
    ),
    Setting("system", "", text, "System prompt; unset: the built-in one", "SYSTEM"),
    Setting(
        "template_date",
        "",
        day,
        "The day a chat template is told; unset: the built-in one",
        "TEMPLATE_DATE",
    ),
    Setting("save", "true", flag, "Store chunks that were missing, after the answer", "SAVE"),
    Setting(
        "step_tokens",
        "16384",
        kinds.whole(1),
        "So many tokens of chunks are blended before one forward of vLLM, at least one request's",
    ),
    Setting("self_test", "true", flag, "Check at start that ratio 1 equals vLLM's own prefill"),
    Setting("any_version", "false", flag, "Try versions of vLLM that this isn't tested with"),
    Setting("trace", "", choice("basic", "full"), "Record each blended request's run"),
    Setting("trace_dir", "", kinds.path, "Folder of the traces; unset: the last ones in the usual"),
    Setting("trace_layers", "", kinds.layers, "Layers a full trace measures; unset: a few"),
    Setting(
        "audit",
        "0",
        kinds.whole(0),
        "Check one in so many blended requests against a full prefill; 0: none",
        "AUDIT",
    ),
    Setting("task", "qa", choice(*TASKS), "What prompts ask for, as audits tell it", "TASK"),
)
SETTINGS: Mapping[str, Setting] = {s.name: s for s in (*_OTHERS, *_BLEND)}
_NULLABLE = ("separator",)  # null says something else than leaving it out
_EXCLUDE = ("ratio", "threshold")


def settings_table() -> str:
    """`SETTINGS` as docs/vllm.md has them."""
    rows = ["| key | default | environment | what it is |", "|---|---|---|---|"]
    for s in SETTINGS.values():
        default = f"`{s.default}`" if s.default.strip() == s.default else f'`"{s.default}"`'
        variable = f"`{variable_of(s)}`" if s.variable else ""
        rows.append(f"| `{s.name}` | {default if s.default else ''} | {variable} | {s.help} |")
    return "".join(f"{row}\n" for row in rows)


def variable_of(setting: Setting) -> str:
    """The environment's name of a setting, "" for one that isn't read from there."""
    return f"CACHEBLEND_{setting.variable}" if setting.variable else ""


@dataclass(frozen=True)
class ConnectorSettings:
    """`SETTINGS` says what each is; blend: how a request is blended that doesn't say."""

    store: Path
    model: Path | None = None
    name: str | None = None
    blend: BlendOptions = field(default_factory=BlendOptions)
    separator: str | None = SEPARATOR
    context: ContextKind = "prefix"
    kv_dtype: str = "auto"
    save: bool = True
    step_tokens: int = 16_384
    self_test: bool = True
    any_version: bool = False
    trace: Level | None = None
    trace_dir: Path | None = None
    trace_layers: tuple[int, ...] | None = None
    limit: int | None = None
    read_only: bool = False
    remote: str | None = None
    remote_timeout: float = 1.0
    memory_limit: int = 0
    fingerprints: Path | None = None
    system: str | None = None
    template_date: str | None = None
    audit: int = 0
    task: Task = "qa"

    @classmethod
    def of(cls, given: Mapping[str, Any], env: Mapping[str, str] = os.environ) -> ConnectorSettings:
        """From vLLM's extra configuration, over the environment, over the defaults.

        Raises UsageError for a key that isn't known, naming the nearest one, for a value of the
        wrong type or out of range, and for values that don't go together.
        """
        for key in given:
            if key not in SETTINGS:
                near = get_close_matches(str(key), SETTINGS, n=1, cutoff=0.4)
                hint = f"did you mean {near[0]!r}?" if near else "see docs/vllm.md for all of them"
                raise UsageError(f"{PLACE}: unknown setting {str(key)[:80]!r}", hint)
        own = {k: v for k, v in given.items() if v is not None or k in _NULLABLE}
        if all(own.get(name) is not None for name in _EXCLUDE):
            raise UsageError(f"{PLACE}: ratio and threshold exclude each other", "give one of them")
        for name, other in (_EXCLUDE, _EXCLUDE[::-1]):
            if name in own:
                env = {k: v for k, v in env.items() if k != variable_of(SETTINGS[other])}
        found = {name: _value(setting, own, env) for name, setting in SETTINGS.items()}
        blend = {s.name: found.pop(s.name) for s in _BLEND}
        if blend["threshold"] is not None:
            blend.pop("ratio")
        return cls(blend=BlendOptions.of(**cast(Any, blend)), **cast(Any, found))


def data_root(env: Mapping[str, str] = os.environ) -> Path:
    """Where store and models are unless said otherwise: CACHEBLEND_HOME, or the user's data."""
    home = env.get("CACHEBLEND_HOME")
    return Path(home).expanduser().absolute() if home else platformdirs.user_data_path("cacheblend")


def open_store(settings: ConnectorSettings, *, on_damage: OnDamage = "go_on") -> ChunkStore:
    """The store the settings name, made where there is none unless it is only read; with its
    remote and the KV kept in memory, as far as they are set.

    Raises UsageError where a remote's extra is missing, else as `ChunkStore.open` does.
    """
    named: dict[str, Any] = {
        "limit_bytes": settings.limit,
        "read_only": settings.read_only,
        "on_damage": on_damage,
    }
    if settings.remote is None and not settings.memory_limit:
        from cache_store.store import ChunkStore

        return ChunkStore.open(settings.store, **named)
    from cache_store.tiers.addresses import connect, read_address
    from cache_store.tiers.remote import RemoteTier
    from cache_store.tiers.tiered import open_tiered

    make = None
    if settings.remote is not None:
        address = read_address(settings.remote)

        def make() -> RemoteTier:
            return RemoteTier(lambda s: connect(address, s), timeout=settings.remote_timeout)

    return open_tiered(settings.store, remote=make, memory_limit=settings.memory_limit, **named)


def open_blueprint(
    settings: ConnectorSettings, model: str | Path, dtype: str, *, revision: str | None = None
) -> Blueprint:
    """The model without its weights, as the store knows it.

    model, revision: as vLLM was told; dtype: what it computes in, as `Blueprint` calls it. Raises
    as `model_folder` and `Blueprint.open` do.
    """
    from engine.blueprint import Blueprint

    return Blueprint.open(
        settings.model or model_folder(model, revision),
        name=settings.name,
        device="cpu",
        dtype=dtype,
        kv_dtype=settings.kv_dtype,
        system=settings.system,
        template_date=settings.template_date,
        memo=settings.fingerprints,
        context=settings.context,
        quantised=True,
    )


def model_folder(model: str | Path, revision: str | None = None) -> Path:
    """The folder of the model that vLLM loaded: what it was given, or where the hub's library keeps
    that on this machine. Raises NotFoundError."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(model), revision=revision, local_files_only=True))
    except Exception as error:  # the library's own errors, or ValueError for no name of the hub
        raise NotFoundError(
            f"the folder of model {str(model)!r} isn't found",
            f'give "model": FOLDER in {PLACE}',
        ) from error


def _value(setting: Setting, given: Mapping[str, Any], env: Mapping[str, str]) -> object:
    place, item = PLACE, given.get(setting.name)
    if item is None and setting.name in given:
        return None
    if item is None:
        place = variable_of(setting)
        item = env.get(place) if place else None
        if item == "" and setting.name != "system":  # as good as unset, as it is to the command
            item = None
        if item is not None and setting.name == "separator":
            item = unescaped(item)
    if item is None:
        item, place = _default(setting, env), "default"
    if item is None:
        return None
    try:
        return setting.kind(item)
    except ValueError as error:
        shown = repr(masked(item) if setting.name == "remote" and isinstance(item, str) else item)
        where = f"{PLACE}: {setting.name}" if place == PLACE else place
        raise UsageError(f"{where} is {shown[:200]}", f"expected {error}") from None


def _default(setting: Setting, env: Mapping[str, str]) -> object:
    if setting.default.startswith(f"{DATA}/"):
        return data_root(env) / setting.default.removeprefix(f"{DATA}/")
    return setting.default or None
