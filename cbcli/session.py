"""What commands open first: the model, the store, the engine; and the settings as it takes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING

from cache_store.errors import CacheblendError, UsageError, no_store
from cache_store.rebuild import OnDamage
from cache_store.store import ChunkStore
from cbcli.output import Output
from cbcli.settings import Settings, data_root
from cbcli.values import AUTO

if TYPE_CHECKING:
    from cache_store.tiers.remote import RemoteTier
    from cache_store.tiers.tiered import TieredStore
    from engine.audit import Audit
    from engine.base import BaseEngine
    from engine.blueprint import Blueprint
    from engine.options import BlendOptions, SamplingOptions

FINGERPRINTS = "fingerprints.json"  # in the folder of the user's data: hashes of weights


def open_store(
    settings: Settings, *, many: bool = False, on_damage: OnDamage = "raise"
) -> ChunkStore:
    """The store the settings name, made where there is none; with its remote, and many: with KV
    kept in memory, as far as they are set. on_damage: see `ChunkStore.open`. Raises UsageError
    where a remote's extra is missing."""
    memory = settings.memory_limit if many else 0
    if settings.remote is None and not memory:
        return ChunkStore.open(settings.store, limit_bytes=settings.limit, on_damage=on_damage)
    from cache_store.tiers.tiered import open_tiered

    return open_tiered(
        settings.store,
        remote=remote_of(settings),
        memory_limit=memory,
        limit_bytes=settings.limit,
        on_damage=on_damage,
    )


def tiered(store: ChunkStore) -> TieredStore | None:
    """The store as one with tiers, if it is."""
    from cache_store.tiers.tiered import TieredStore

    return store if isinstance(store, TieredStore) else None


def upload(store: ChunkStore, out: Output) -> None:
    """Waits until the remote, if there is one, has been given everything; warns where it isn't."""
    store_with_tiers = tiered(store)
    if store_with_tiers is None or store_with_tiers.uploads is None:
        return
    uploads = store_with_tiers.uploads
    with out.progress("uploading", unit="entries") as progress:
        try:
            store_with_tiers.push(
                on_left=lambda left: progress.update(
                    uploads.done.total(), total=uploads.done.total() + left
                )
            )
        except CacheblendError as error:
            out.warn(error.message, "cacheblend store push tries again")


def say_notes(store: ChunkStore, out: Output) -> None:
    """Warns of what the store has noted, such as a remote that failed."""
    for note in store.take_notes():
        out.warn(note)


def remote_of(settings: Settings) -> Callable[[], RemoteTier] | None:
    """What makes the remote's tier, if one is set."""
    if settings.remote is None:
        return None
    from cache_store.tiers.addresses import connect, read_address
    from cache_store.tiers.remote import RemoteTier

    address = read_address(settings.remote)
    return lambda: RemoteTier(
        lambda seconds: connect(address, seconds), timeout=settings.remote_timeout
    )


def warn_of_faults(store: ChunkStore, out: Output) -> None:
    """Says what is damaged or locked, where the command goes on without it."""
    for fault in store.faults:
        out.warn(f"{fault.message}: {store.without(fault)}", fault.hint)


def open_existing_store(settings: Settings) -> ChunkStore:
    """The store, as much of it as can be used; NotFoundError, before anything is made, where
    there is none."""
    if not settings.store.exists():
        raise no_store(settings.store)
    return open_store(settings, on_damage="go_on")


def model_folder(settings: Settings, out: Output) -> Path:
    """The model's folder; the default model is got where it is missing."""
    from engine import library

    if settings.model != library.DEFAULT:
        return library.resolve(settings.model, settings.models_dir)
    from cbcli.commands.models import showing

    with showing(out, f"model {library.DEFAULT}") as progress:
        return library.ensure_default(
            settings.models_dir, offline=settings.offline, say=out.note, progress=progress
        )


def open_blueprint(settings: Settings, out: Output) -> Blueprint:
    """The model without its weights."""
    folder = model_folder(settings, out)
    from engine.blueprint import Blueprint

    return Blueprint.open(
        folder,
        device=settings.device,
        dtype=settings.dtype,
        kv_dtype=settings.kv_dtype,
        system=settings.system,
        separator=settings.separator,
        template_date=settings.template_date,
        memo=data_root() / FINGERPRINTS,
        context=settings.context,
    )


def load_engine(
    settings: Settings,
    blueprint: Blueprint,
    store: ChunkStore | None,
    *,
    longest: int | None = None,
    together: int = 1,
    out: Output | None = None,
) -> BaseEngine:
    """The model with its weights, over the store; to be closed.

    longest, together: for vLLM, see `engine.vllm.start.LocalSettings`. out: where what takes long
    is said, and how much vLLM itself says. Raises UsageError and CacheblendError where vLLM is
    missing or does not start.
    """
    if settings.engine == "vllm":
        from engine.vllm.local import VllmEngine
        from engine.vllm.start import LocalSettings, read_extra

        extra = read_extra(settings.vllm)
        verbose = out.verbose if out is not None else 0
        local = LocalSettings(longest, together, settings.threads, verbose, extra)
        if out is not None:
            out.note(f"starting vLLM with {blueprint.name}, which takes some seconds")
        return VllmEngine.load(blueprint, store=store, settings=local)
    from engine.api import Engine

    return Engine.load(blueprint, store=store, threads=settings.threads)


def check_engine(settings: Settings, *refused: str) -> None:
    """Raises UsageError, before anything takes long, for what the engine that is set cannot do, and
    where it is not installed. refused: flags that don't go with vLLM."""
    if settings.engine != "vllm":
        if settings.vllm and settings.origin("vllm").kind == "flag":
            raise UsageError("--vllm is for --engine vllm", "give both")
        return
    from engine.vllm.start import require_vllm

    require_vllm()
    lines_together(settings)
    for name in refused:
        if getattr(settings, name) and settings.origin(name).kind == "flag":
            raise UsageError(f"--{name} is not for --engine vllm", "leave one of them out")
    check_ratio(settings)


def lines_together(settings: Settings) -> int:
    """How many prompts the engine computes at the same time."""
    if settings.engine != "vllm":
        return 1
    from engine.vllm.start import read_extra, together

    return together(read_extra(settings.vllm))


def check_ratio(settings: Settings) -> None:
    """Raises UsageError for a ratio that the engine knows no speed for."""
    if settings.engine == "vllm" and settings.ratio == AUTO:
        raise UsageError(
            "--ratio auto knows the speed of engine torch, not of vllm", "give a ratio"
        )


def blend_options(settings: Settings, positions: Sequence[int] | None = None) -> BlendOptions:
    """What to recompute; `positions` of the prompt instead of what the policy would select.

    Raises UsageError for settings that don't go together.
    """
    from engine.options import BlendOptions

    return BlendOptions.of(
        mode=settings.mode,
        policy=settings.policy if positions is None else "explicit",
        ratio=settings.ratio,
        threshold=_threshold(settings) if positions is None else None,
        transfer=settings.transfer,
        check_layers=settings.check_layers,
        indices=positions,
        min_tokens=settings.min_tokens,
        seed=settings.seed,
        strict_context=settings.strict_context,
        loader=settings.loader,
    )


def _threshold(settings: Settings) -> Decimal | None:
    """The threshold, unless a ratio was set nearer to the command. Raises UsageError where both
    were set in the same place."""
    ratio, threshold = settings.origin("ratio"), settings.origin("threshold")
    if settings.threshold is None or ratio.strength > threshold.strength:
        return None
    if ratio.strength == threshold.strength:
        raise UsageError(
            f"{ratio.where or ratio.kind} and {threshold.where or threshold.kind} exclude each "
            "other",
            "give a ratio or a threshold",
        )
    return settings.threshold


def sampling_options(settings: Settings) -> SamplingOptions:
    """How to choose the tokens of an answer."""
    from engine.options import SamplingOptions

    return SamplingOptions(
        max_tokens=settings.max_tokens,
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.sample_top_k,
        seed=settings.seed,
        stop=settings.stop,
    )


def audit_of(settings: Settings, store: ChunkStore, number: int | None = None) -> Audit | None:
    """Whether and where to log how good answers are; `number`: see `engine.audit.Audit`."""
    if not settings.audit:
        return None
    from engine.audit import Audit, AuditLog
    from engine.task import check_task

    return Audit(AuditLog(store.journal), settings.audit, number, check_task(settings.task))


def shown_source(source: str) -> str:
    """A document's path as a person here would write it: relative where it lies beneath."""
    path, here = Path(source), Path.cwd()
    return path.relative_to(here).as_posix() if path.is_relative_to(here) else source
