"""What `doctor` looks at, one function a question. None of them makes, gets or changes anything.

A check that itself breaks is a finding too: `examine` turns what it raised into one.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cache_store.database import is_writable
from cache_store.errors import CacheblendError, NotFoundError
from cache_store.place import default_limit
from cache_store.store import ChunkStore
from cbcli.errors import describe
from cbcli.settings import Settings, load_settings, problems, project_file, user_file
from cbcli.units import count_text, rate_text, size_text
from engine import library
from engine.machine import IN_MEMORY, NETWORK, mount_of, nearest_existing, this_machine

if TYPE_CHECKING:
    from engine.config import ModelConfig
    from engine.probe import Probe

OLDEST_TORCH = (2, 9)
LARGEST_HASHED = 2 * 10**9  # bytes of a model that are read and compared here
LITTLE_DISK = 10**9
OPTIONAL = ("transformers", "matplotlib", "vllm", "redis", "obstore")
BESIDE_TORCH = ("torchvision", "torchaudio", "torchcodec")
# What a broken installation, file or disk raises; anything else is a bug, and said to be one.
FORESEEN = (CacheblendError, OSError, ImportError, RuntimeError, ValueError, ArithmeticError)


@dataclass(frozen=True)
class Check:
    """One answer. state: ok, warn or fail; found: what is there; hint: what to do about it;
    facts: the same as plain values."""

    name: str
    state: str
    found: str
    hint: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)


def examine(name: str, question: Callable[[], Iterator[Check]]) -> Iterator[Check]:
    """The answers to a question, up to where it broke, and then what broke it."""
    try:
        yield from question()
    except FORESEEN as error:
        told = describe(error)
        said = told.message if told.kind != "internal" else f"{type(error).__name__}: {error}"
        hint = told.hint if told.kind != "internal" else ""
        yield Check(name, "fail", said, hint)


# The installation.


def check_python() -> Iterator[Check]:
    version = platform.python_version()
    where = f"{platform.system()} {platform.machine()}"
    mine = importlib.metadata.version("cacheblend")
    facts = {"version": version, "system": where, "cacheblend": mine}
    yield Check("python", "ok", f"{version} on {where}; cacheblend {mine}", facts=facts)


def check_torch() -> Iterator[Check]:
    import torch

    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    if torch.version.hip:
        build = f"ROCm {torch.version.hip}"
    facts = {"version": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip}
    numbers = [int(part) for part in torch.__version__.split(".")[:2] if part.isdigit()]
    found = f"{torch.__version__}, {build}"
    if tuple(numbers) < OLDEST_TORCH:
        hint = "pip install --upgrade torch"
        yield Check("torch", "warn", f"{found}, older than 2.9", hint, facts)
    else:
        yield Check("torch", "ok", found, facts=facts)


def check_pieces() -> Iterator[Check]:
    found = {name: installed_version(name) for name in OPTIONAL}
    here = [f"{name} {version}" for name, version in found.items() if version]
    missing = [name for name, version in found.items() if not version]
    said = [", ".join(here)] if here else []
    said += [f"not here: {', '.join(missing)}"] if missing else []
    yield Check("optional", "ok", "; ".join(said), facts=found)
    beside = {name: version for name in BESIDE_TORCH if (version := installed_version(name))}
    if beside:
        names = ", ".join(f"{name} {version}" for name, version in beside.items())
        yield Check(
            "beside torch",
            "warn",
            f"{names}: where they don't match torch, transformers cannot be imported",
            f"nothing here needs them: pip uninstall {' '.join(beside)}",
            beside,
        )


def installed_version(name: str) -> str | None:
    """The version of an installed package, without importing it. vLLM's distribution has other
    names where it is built for a CPU alone."""
    if importlib.util.find_spec(name) is None:
        return None
    for distribution in (name, f"{name}-cpu"):
        with suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(distribution)
    return "of unknown version"


# The settings.


def check_settings() -> Iterator[Check]:
    files = [file for file in (project_file(), user_file()) if file and file.is_file()]
    wrong = [problem for file in files for problem in problems(file)]
    for problem in wrong:
        yield Check("settings", "fail", problem.message, problem.hint)
    if not wrong:
        load_settings()  # the environment, and what doesn't go together
        names = [name for name in os.environ if name.startswith("CACHEBLEND_")]
        said = [str(file) for file in files] or ["no settings files"]
        said += [f"environment: {', '.join(sorted(names))}"] if names else []
        facts = {"files": [str(file) for file in files], "environment": sorted(names)}
        yield Check("settings", "ok", "; ".join(said), facts=facts)


# The machine.


def check_cpu() -> Iterator[Check]:
    machine = this_machine()
    cores = count_text(machine.cores, "cores")
    if machine.usable < machine.cores:
        cores += f", {machine.usable} of them usable"
    found = ", ".join(part for part in (machine.cpu, cores, " ".join(machine.flags)) if part)
    facts = {
        "name": machine.cpu,
        "flags": list(machine.flags),
        "cores": machine.cores,
        "allowed": machine.allowed,
        "quota": machine.quota,
    }
    yield Check("cpu", "ok", found, facts=facts)


def check_memory() -> Iterator[Check]:
    machine = this_machine()
    facts = {"total": machine.memory, "available": machine.available}
    if machine.memory is None:
        yield Check("memory", "warn", "the system doesn't say how much there is", facts=facts)
        return
    found = size_text(machine.memory)
    if machine.available is not None:
        found += f", {size_text(machine.available)} available"
    yield Check("memory", "ok", found, facts=facts)


def check_threads(settings: Settings) -> Iterator[Check]:
    import torch

    from engine.threads import thread_count

    machine = this_machine()
    threads = thread_count(settings.threads, torch.get_num_threads(), machine, os.environ)
    facts = {"threads": threads, "usable": machine.usable}
    found = f"{count_text(threads, 'threads')}, {count_text(machine.usable, 'usable cores')}"
    state, hint = "ok", ""
    if threads > machine.usable:
        state, hint = "warn", f"threads wait for each other: set threads = {machine.usable}"
    elif threads < machine.usable:
        told = os.environ.get("OMP_NUM_THREADS")
        found += f", OMP_NUM_THREADS is {told}" if told and not settings.threads else ""
        hint = f"--threads {machine.usable} would use them all"
    yield Check("threads", state, found, hint, facts)


def check_device(settings: Settings) -> Iterator[Check]:
    """The devices there are, the one that is used, and what is computed with there."""
    import torch

    from engine.kernels import kernels_for
    from engine.kernels.built import wanted
    from engine.model import DTYPES, choose_device, choose_dtype

    devices = [
        {
            "device": f"cuda:{index}",
            "name": (properties := torch.cuda.get_device_properties(index)).name,
            "memory": properties.total_memory,
        }
        for index in range(torch.cuda.device_count())
    ]
    if torch.backends.mps.is_available():
        devices.append({"device": "mps", "name": "Apple GPU", "memory": None})
    chosen = choose_device(settings.device)
    dtype = choose_dtype(settings.dtype, "bf16", chosen)
    used = kernels_for(chosen, DTYPES[dtype])
    kernels, notes = used.name, "; ".join(used.notes)
    facts = {"device": str(chosen), "dtype": dtype, "kernels": kernels, "devices": devices}
    others = ", ".join(f"{d['device']} {d['name']}" for d in devices) or "no GPU"
    found = f"{chosen} ({others}), {dtype}, {kernels} kernels"
    if dtype == "fp32" and settings.dtype == "auto":
        hint = "this CPU has no fast bf16, so KV takes twice the memory and disk"
        yield Check("device", "warn", found, hint, facts)
    elif chosen.type == "cpu" and dtype == "bf16" and kernels != "native":
        off = "the kernels in C are switched off: unset CACHEBLEND_NATIVE"
        missing = "the kernels in C are not built: install again with a C compiler at hand"
        hint = missing if wanted() else off
        yield Check("device", "warn", found, hint, facts)
    else:
        yield Check("device", "ok", found, notes, facts)


# The store.


def check_store(settings: Settings) -> Iterator[Check]:
    try:
        store = ChunkStore.open(settings.store, read_only=True)
    except NotFoundError:
        yield _no_store(settings)
        return
    with store:
        found = store.stats()
    writable = is_writable(settings.store)
    facts = {
        "path": found.path,
        "exists": True,
        "writable": writable,
        "used": found.used,
        "limit": found.limit,
        "documents": found.documents,
        "entries": found.entries,
    }
    said = (
        f"{found.path}: {count_text(found.documents, 'documents')}, "
        f"{count_text(found.document_chunks, 'chunks')}, "
        f"{size_text(found.used)} of {size_text(found.limit)}"
    )
    if not writable:
        yield Check("store", "warn", f"{said}, not writable", "ask its owner, or --store", facts)
    elif found.used > 0.95 * found.limit:
        hint = "what was used longest ago goes next: cacheblend store limit SIZE allows more"
        yield Check("store", "warn", f"{said}, nearly full", hint, facts)
    else:
        yield Check("store", "ok", said, facts=facts)


def _no_store(settings: Settings) -> Check:
    there = nearest_existing(settings.store)
    writable = there.is_dir() and is_writable(there)
    limit = settings.limit or default_limit(settings.store)
    facts = {"path": str(settings.store), "exists": False, "writable": writable, "limit": limit}
    said = f"{settings.store}: none yet, ingest would make it"
    if writable:
        return Check("store", "ok", f"{said} with a limit of {size_text(limit)}", facts=facts)
    hint = f"{there} cannot be written: choose another place with --store"
    return Check("store", "fail", f"{said}, but can't", hint, facts)


def check_disk(settings: Settings) -> Iterator[Check]:
    there = nearest_existing(settings.store)
    free, mount = shutil.disk_usage(there).free, mount_of(there)
    kind = mount.type if mount else ""
    facts = {"free": free, "filesystem": kind, "mounted_at": str(mount.at) if mount else None}
    said = f"{size_text(free)} free" + (f" on {kind}" if kind else "")
    if kind in NETWORK:
        hint = "its database needs locks that network file systems often lack: use a local disk"
        yield Check("disk", "warn", said, hint, facts)
    elif kind in IN_MEMORY:
        yield Check("disk", "warn", said, "what lies in memory is gone with the machine", facts)
    elif free < LITTLE_DISK:
        yield Check("disk", "warn", said, "a chunk takes megabytes: free some space", facts)
    else:
        yield Check("disk", "ok", said, facts=facts)


# Models.


def check_models(settings: Settings) -> Iterator[Check]:
    found = library.ls(settings.models_dir)
    names = [info.name for info in found]
    facts = {"models_dir": str(settings.models_dir), "models": names}
    said = f"{settings.models_dir}: {', '.join(names) or 'none'}"
    yield Check("models", "ok", said, facts=facts)
    for info in found:
        if info.problem and info.name != settings.model:  # that one is looked at by itself
            hint = f"cacheblend models rm {info.name}, then pull it again"
            yield Check("models", "warn", f"{info.name}: {info.problem}", hint)


def check_model(settings: Settings) -> Iterator[Check]:
    """The model that is used where none is named: there, whole, as it was pulled."""
    name = settings.model
    try:
        info = library.show(name, settings.models_dir)
    except NotFoundError as error:
        if name == library.DEFAULT and not settings.offline:
            said = f"{name}: not here yet; the first command that needs it gets it"
            yield Check("model", "ok", said)
        else:
            yield Check("model", "fail", error.message, error.hint)
        return
    if info.config is None or info.problem:
        hint = "pull it again, or name another with --model"
        yield Check("model", "fail", f"{name}: {info.problem}", hint)
        return
    facts = {"path": str(info.path), "bytes": info.nbytes, "parameters": info.parameters}
    said = f"{name}: {info.config.architecture}, {size_text(info.nbytes)}"
    available = this_machine().available
    if available is not None and info.nbytes > available:
        hint = "close other programs, or use a smaller model"
        yield Check("model", "warn", f"{said}, more than there is memory", hint, facts)
    elif info.manifest is None or info.nbytes > LARGEST_HASHED:
        hint = f"cacheblend models check {name} reads all of it" if info.manifest else ""
        yield Check("model", "ok", f"{said}, not compared with what was pulled", hint, facts)
    else:
        library.check(name, settings.models_dir)
        yield Check("model", "ok", f"{said}, as it was pulled", facts=facts)


# The speed.


def model_config(settings: Settings) -> ModelConfig | None:
    """What is to be probed with: the model of the settings, if it is here and good."""
    try:
        return library.show(settings.model, settings.models_dir).config
    except (CacheblendError, OSError):
        return None


def check_speed(
    settings: Settings, config: ModelConfig, keep: Callable[[Probe], None]
) -> Iterator[Check]:
    """The probe's figures; `keep` gets the probe."""
    from engine.estimate import decode_rate
    from engine.model import choose_device, choose_dtype
    from engine.probe import probe

    device = choose_device(settings.device)
    dtype = choose_dtype(settings.dtype, config.dtype, device)
    try:
        found = probe(config, device, dtype, settings.store, threads=settings.threads)
    except CacheblendError as error:  # too little memory: less is known, nothing is broken
        yield Check("speed", "warn", error.message, error.hint)
        return
    keep(found)
    answer = rate_text(decode_rate(config, found, found.tokens), "tokens")
    yield Check(
        "speed",
        "ok",
        f"products {_flops(found.linear[-1].flops)}, attention {_flops(found.causal.flops)} "
        f"({_flops(found.scattered[-1].flops)} scattered), answers {answer}",
    )
    rates = [
        ("placed", found.place_bytes_s),
        ("from the page cache", found.disk.warm),
        ("from the disk", found.disk.cold),
        ("to the disk", found.disk.write),
    ]
    said = ", ".join(
        f"{what} {rate_text(rate, 'bytes') if rate else 'unknown'}" for what, rate in rates
    )
    state = "warn" if found.notes else "ok"
    yield Check("speed of KV", state, said, "; ".join(found.notes))


def _flops(rate: float) -> str:
    return f"{rate / 1e9:,.0f} GFLOP/s"
