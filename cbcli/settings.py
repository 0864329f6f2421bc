"""The settings, each declared once, and where the value of each comes from.

flag > environment (`CACHEBLEND_*`) > project `cacheblend.toml` > user's file > default. The project
file is the nearest one from the working folder upwards, up to the top of its git repository or the
home folder. A key nobody knows is refused with the nearest one that exists.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from decimal import Decimal
from difflib import get_close_matches
from itertools import combinations
from pathlib import Path
from typing import Any, cast

import platformdirs
import tomli

from cache_store.errors import UsageError
from cache_store.tiers.addresses import masked
from cbcli import values
from cbcli.units import parse_size as parse_size
from cbcli.values import Kind
from engine.context import CONTEXT_KINDS
from engine.task import TASKS

PROJECT_FILE = "cacheblend.toml"
PREFIX = "CACHEBLEND_"
# Variables that are not settings: where data and the user's file are, tracebacks for bugs, and
# doing without the kernels in C.
RESERVED = ("CACHEBLEND_HOME", "CACHEBLEND_CONFIG", "CACHEBLEND_DEBUG", "CACHEBLEND_NATIVE")

# Those of engine.policies and engine.loaders, which a listing of settings should not have to
# import.
POLICIES = (
    *("value", "key", "key+value", "attention", "question", "first-k", "hybrid"),
    *("random", "explicit"),
)
LOADERS = ("pipelined", "sync", "async", "prefetch")


# Kinds of origin, the highest first; a line is one of `run`.
ORIGINS = ("line", "flag", "environment", "project", "user", "default")


@dataclass(frozen=True)
class Origin:
    """Where a value comes from. `kind`: flag, environment, project, user or default; `where`: the
    flag, variable or file."""

    kind: str
    where: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.where}".rstrip()


def _setting(default: Any, kind: Kind, help: str, *, flag: str = "", example: str = "") -> Any:
    """A field of `Settings`. `default` is what `kind` reads it from, `{data}` in it
    being the folder of the user's data; `example` is shown where the default is to be unset."""
    return field(
        metadata={"default": default, "kind": kind, "help": help, "flag": flag, "example": example}
    )


@dataclass(frozen=True)
class Settings:
    """What the user wants, from all the layers. Made by `load_settings` only."""

    model: str = _setting("smollm2-135m", values.model, "Model: a name of `models ls`, or a folder")
    store: Path = _setting("{data}/store", values.folder, "Folder of the chunk store")  # noqa: RUF009
    remote: str | None = _setting(
        None,
        values.remote,
        "Remote store, shared with other machines: redis://…, s3://…, file:///…; unset: none",
        example='"redis://cache.example:6379/0"',
    )
    remote_timeout: float = _setting(
        1, values.number(0, 3600, above=True), "Seconds to wait for an answer of the remote store"
    )
    memory_limit: int = _setting(
        0, values.amount, "Size of the KV kept in memory between prompts; 0: none"
    )
    models_dir: Path = _setting("{data}/models", values.folder, "Folder of the models")  # noqa: RUF009
    offline: bool = _setting(False, values.flag, "Never use the network")
    engine: str = _setting(
        "torch", values.choice("torch", "vllm"), "What computes: torch, or vllm in this process"
    )
    vllm: tuple[str, ...] = _setting(
        (), values.texts, "More arguments of vLLM's engine, as KEY=VALUE", flag="--vllm"
    )
    device: str = _setting("auto", values.device, "auto, cpu, cuda, cuda:N or mps")
    devices: tuple[str, ...] = _setting(
        (), values.devices, "Devices that share the work of run and ingest; none: `device` alone"
    )
    dtype: str = _setting(
        "auto", values.choice("auto", "bf16", "fp16", "fp32"), "auto, bf16, fp16 or fp32"
    )
    kv_dtype: str = _setting(
        "auto",
        values.choice("auto", "bf16", "fp16", "fp32", "fp8", "int8", "int4"),
        "What KV is stored in: auto (as computed), bf16, fp16, fp32, fp8, int8 or int4",
    )
    threads: int | None = _setting(
        None, values.whole(1, 4096), "Threads to compute with; unset: one a core", example="4"
    )
    system: str | None = _setting(
        None, values.text, "System prompt; unset: the built-in one", example='"Answer briefly."'
    )
    separator: str = _setting("\n\n", values.text, "Text between two chunks in the prompt")
    text_separator: str = _setting(
        " # # ",
        values.some_text,
        "Text between the chunks of a prompt that comes as one text; the model never sees it",
        flag="--separator",
    )
    template_date: str = _setting(
        "2024-07-26", values.day, "The day a chat template is told, fixed so that prefixes last"
    )
    context: str = _setting(
        "prefix",
        values.choice(*CONTEXT_KINDS),
        "What new chunks are computed behind: prefix, bos (its first token alone) or none",
    )
    chunk_tokens: int = _setting(512, values.whole(8, 1_000_000), "Most tokens of a chunk")
    overlap: int = _setting(0, values.whole(0, 1_000_000), "Tokens two chunks have in common")
    top_k: int = _setting(6, values.whole(1, 10_000), "Chunks to retrieve for a question")
    order: str = _setting(
        "given",
        values.choice("given", "score", "source", "shuffle"),
        "Order of the chunks: given, score, source or shuffle",
    )
    mode: str = _setting(
        "blend",
        values.choice("blend", "reuse", "full", "prefix"),
        "blend, reuse, full or prefix",
    )
    ratio: tuple[Decimal, ...] = _setting(
        "0.16",
        values.ratios,
        "Share of the cached tokens to recompute, 0 to 1, one a check layer; or auto: as much as "
        "loading takes anyway",
    )
    target_kl: float | None = _setting(
        None,
        values.number(0, 100, above=True),
        "Mean KL from full prefill, in nats, that the calibration finds the ratio for",
        example="0.02",
    )
    task: str = _setting(
        "qa", values.choice(*TASKS), f"What prompts ask for, as calibrated: {' or '.join(TASKS)}"
    )
    force: bool = _setting(
        False, values.flag, "Blend with a model that failed the gate of its calibration"
    )
    policy: str = _setting(
        "question", values.policy(*POLICIES), f"What selects tokens: {', '.join(POLICIES)}"
    )
    threshold: Decimal | None = _setting(  # noqa: RUF009
        None,
        values.share,
        "Instead of a ratio: recompute the tokens that hold this share of the score, 0 to 1",
        example="0.5",
    )
    transfer: bool | None = _setting(
        None,
        values.flag,
        "Move the other tokens by what recomputed ones deviate; unset: as the policy does",
        example="false",
    )
    check_layers: tuple[int, ...] = _setting(
        "1", values.layers, "Layers at which tokens are selected, from 1 on", flag="--check-layer"
    )
    loader: str = _setting(
        "pipelined", values.choice(*LOADERS), f"When stored KV is read: {', '.join(LOADERS)}"
    )
    min_tokens: int = _setting(
        256, values.whole(0), "Below so many cached tokens the whole prompt is computed"
    )
    save: bool = _setting(True, values.flag, "Store chunks that were missing, after the answer")
    check: bool = _setting(
        True, values.flag, "ingest reads what is stored already, every byte of it, and mends it"
    )
    strict_context: bool = _setting(
        False, values.flag, "Use only chunks computed behind this very system prompt"
    )
    audit: int = _setting(
        0, values.whole(0), "Check one in so many answers against full prefill; 0: none"
    )
    traces: int = _setting(
        10, values.whole(0, 10_000), "How many of the last answers' traces are kept; 0: none"
    )
    trace_level: str = _setting(
        "basic",
        values.choice("basic", "full"),
        "What a trace holds: basic, or full, which measures stored KV against a full prefill",
    )
    trace_layers: tuple[int, ...] | None = _setting(
        None,
        values.layers,
        "Layers that a full trace measures; unset: a few spread over the model",
        example='"1,8,16"',
    )
    live: bool = _setting(
        False,
        values.flag,
        "Show on stderr how ask and ingest go on, by layer and by chunk",
    )
    seed: int = _setting(0, values.whole(0, 2**63 - 1), "Seed of sampling and of shuffling")
    max_tokens: int = _setting(256, values.whole(1), "Most tokens of an answer")
    temperature: float = _setting(0, values.number(0, 100), "0 decodes greedily, more samples")
    top_p: float = _setting(
        1, values.number(0, 1, above=True), "Sample from the likeliest tokens up to this share"
    )
    sample_top_k: int = _setting(
        0, values.whole(0), "Sample from so many likeliest tokens; 0: from all"
    )
    stop: tuple[str, ...] = _setting((), values.texts, "Texts that end an answer")
    host: str = _setting("127.0.0.1", values.some_text, "Address that serve listens on")
    port: int = _setting(8000, values.whole(0, 65535), "Port that serve listens on; 0: any")
    limit: int | None = _setting(
        None,
        values.size,
        "Size of a store when it is made, such as 20GB; unset: a tenth of the free disk, at most "
        "20GB",
        example='"20GB"',
    )
    origins: Mapping[str, Origin] = field(default_factory=dict, repr=False)

    def origin(self, name: str) -> Origin:
        """Where the value of the setting `name` comes from."""
        return self.origins[name]


@dataclass(frozen=True)
class Declared:
    """One setting as it is declared."""

    name: str
    default: object
    kind: Kind
    help: str
    flag: str
    example: str

    @property
    def variable(self) -> str:
        return PREFIX + self.name.upper()


DECLARED: Mapping[str, Declared] = {
    f.name: Declared(
        f.name,
        f.metadata["default"],
        f.metadata["kind"],
        f.metadata["help"],
        f.metadata["flag"] or "--" + f.name.replace("_", "-"),
        f.metadata["example"],
    )
    for f in fields(Settings)
    if f.metadata
}


def default_of(setting: Declared, env: Mapping[str, str] = os.environ) -> object:
    """The value a setting has where nobody sets it."""
    default = setting.default
    if default is None:
        return None
    if isinstance(default, str) and default.startswith("{data}/"):
        return data_root(env) / default.removeprefix("{data}/")
    return setting.kind(default)


def data_root(env: Mapping[str, str] = os.environ) -> Path:
    """Where store and models are unless said otherwise: CACHEBLEND_HOME, or the user's data."""
    home = env.get("CACHEBLEND_HOME")
    return Path(home).expanduser().absolute() if home else platformdirs.user_data_path("cacheblend")


def user_file(env: Mapping[str, str] = os.environ) -> Path:
    """The user's own settings file, whether it exists or not."""
    given = env.get("CACHEBLEND_CONFIG")
    if given:
        return Path(given).expanduser().absolute()
    return platformdirs.user_config_path("cacheblend") / "config.toml"


def project_file(cwd: Path | None = None) -> Path | None:
    """The nearest `cacheblend.toml` from `cwd` upwards, or None."""
    start = (cwd or Path.cwd()).absolute()
    for folder in (start, *start.parents):
        if (folder / PROJECT_FILE).is_file():
            return folder / PROJECT_FILE
        if (folder / ".git").exists() or folder == Path.home():
            break
    return None


def load_settings(
    flags: Mapping[str, object] | None = None,
    *,
    env: Mapping[str, str] = os.environ,
    cwd: Path | None = None,
) -> Settings:
    """The settings, with `flags` above everything else; None or an empty list is no flag given.

    Raises UsageError for a key nobody knows, a value of the wrong type or out of range, a file that
    isn't TOML or can't be read, and for values that don't go together.
    """
    here = (cwd or Path.cwd()).absolute()
    found: dict[str, object] = {}
    origins: dict[str, Origin] = {}
    for origin, base, raw in _layers(dict(flags or {}), env, here):
        for name, item in raw.items():
            exact = _exact(origin, name, env)
            found[name] = read_value(name, item, exact, base)
            origins[name] = exact
    settings = Settings(**cast(dict[str, Any], found), origins=origins)
    if settings.overlap >= settings.chunk_tokens:
        raise UsageError(
            f"overlap is {settings.overlap} ({settings.origin('overlap')}), chunk_tokens "
            f"{settings.chunk_tokens} ({settings.origin('chunk_tokens')})",
            "an overlap must be smaller than the chunk",
        )
    for names in combinations(("ratio", "threshold", "target_kl"), 2):
        both = [settings.origin(name) for name in names]
        # With the ratio auto, a target is what that ratio is never under.
        goes = names == ("ratio", "target_kl") and settings.ratio == values.AUTO
        if not goes and both[0].kind == both[1].kind == "flag":
            raise UsageError(
                f"{both[0].where} and {both[1].where} exclude each other",
                "each says how much to recompute: give one of them",
            )
    return settings


def read_value(name: str, item: object, origin: Origin, base: Path) -> object:
    """The value of setting `name` from `item`, relative paths being relative to `base`.

    Raises UsageError naming the place, the key and the value.
    """
    setting = DECLARED.get(name)
    if setting is None:
        place = origin.where or origin.kind
        raise UsageError(f"{place}: unknown setting {name!r}", _nearest(name, DECLARED))
    kind = setting.kind
    shells = origin.kind in ("flag", "environment")
    if shells and name in ("separator", "text_separator") and isinstance(item, str):
        item = values.escaped_text(item)
    if item is None:
        return None
    try:
        value = kind(item)
    except ValueError as error:
        place = f"{origin.where}: {name}" if origin.kind in ("project", "user") else origin.where
        shown = str(item) if isinstance(item, int | float | Decimal) else repr(item)
        if name == "remote":  # passwords may be in it
            shown = repr(masked(str(item)))
        raise UsageError(f"{place} is {shown}", f"expected {error}") from None
    if isinstance(value, Path):
        return base / value
    if name == "model" and str(value).startswith("."):
        return str(base / str(value))
    return value


def read_file(path: Path) -> dict[str, object]:
    """The keys of a settings file as they are. Raises UsageError."""
    try:
        return tomli.loads(path.read_text(encoding="utf-8-sig"), parse_float=Decimal)
    except tomli.TOMLDecodeError as error:
        raise UsageError(f"{path}: not TOML: {error}", "see `cacheblend config init`") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path}: not UTF-8 text", "save it as UTF-8") from None
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}", "check that path") from None


def problems(path: Path) -> Iterator[UsageError]:
    """What is wrong with a settings file, all of it."""
    try:
        raw = read_file(path)
    except UsageError as error:
        yield error
        return
    for name, item in raw.items():
        try:
            read_value(name, item, Origin("project", str(path)), path.parent)
        except UsageError as error:
            yield error


def _layers(
    flags: dict[str, object], env: Mapping[str, str], here: Path
) -> Iterator[tuple[Origin, Path, Mapping[str, object]]]:
    """The layers from the lowest to the highest, each with the folder its paths are relative to."""
    defaults = {name: default_of(s, env) for name, s in DECLARED.items()}
    yield Origin("default"), here, defaults
    user = user_file(env)
    if user.is_file() or env.get("CACHEBLEND_CONFIG"):
        yield Origin("user", str(user)), user.parent, read_file(user)
    project = project_file(here)
    if project is not None and project != user:
        yield Origin("project", str(project)), project.parent, read_file(project)
    yield Origin("environment"), here, _environment(env)
    yield Origin("flag"), here, {name: v for name, v in flags.items() if v not in (None, [], ())}


def _environment(env: Mapping[str, str]) -> dict[str, object]:
    known = {s.variable: name for name, s in DECLARED.items()}
    found: dict[str, object] = {}
    for variable, item in env.items():
        if not variable.startswith(PREFIX) or variable in RESERVED:
            continue
        if variable not in known:
            raise UsageError(
                f"unknown setting {variable} in the environment",
                _nearest(variable, [*known, *RESERVED]),
            )
        # A variable that is empty is as good as unset, but for texts, which can be empty.
        if item or known[variable] in ("system", "separator"):
            found[known[variable]] = item
    return found


def _exact(origin: Origin, name: str, env: Mapping[str, str]) -> Origin:
    """`origin`, naming the variable or flag that sets `name`."""
    setting = DECLARED.get(name)
    if setting is None:
        return origin
    if origin.kind == "environment":
        return Origin(origin.kind, setting.variable)
    if origin.kind == "flag":
        return Origin(origin.kind, setting.flag)
    if origin.kind == "default" and str(setting.default).startswith("{data}"):
        return Origin(origin.kind, "in CACHEBLEND_HOME" if env.get("CACHEBLEND_HOME") else "")
    return origin


def _nearest(word: str, known: Any) -> str:
    near = get_close_matches(word, list(known), n=1, cutoff=0.4)
    return f"did you mean {near[0]}?" if near else "see `cacheblend config show` for all of them"
