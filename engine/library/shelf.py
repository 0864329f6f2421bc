"""What is in the library: listed, described, found, checked, removed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from cache_store.errors import CacheblendError, IntegrityError, NotFoundError
from engine.config import ModelConfig, load_config
from engine.library.catalogue import CATALOGUE, DEFAULT
from engine.library.home import model_dir, model_names, take_away
from engine.library.intake import pull
from engine.library.layout import parameters_of, weight_files
from engine.library.manifest import Manifest, Progress, differences, read_manifest, silent


@dataclass(frozen=True)
class ModelInfo:
    """A model in the library.

    `nbytes`: bytes of its files; `parameters`: numbers in its weights. Where something about it
    can't be read, `problem` says what, `config` may be None and `parameters` 0.
    """

    name: str
    path: Path
    nbytes: int
    config: ModelConfig | None
    parameters: int
    manifest: Manifest | None
    problem: str


@dataclass(frozen=True)
class CheckReport:
    """A model whose files are what was recorded: how many of them and their bytes."""

    name: str
    files: int
    nbytes: int


def ls(models_dir: Path) -> list[ModelInfo]:
    """The models in the library, by name. A damaged one is listed with its problem."""
    return [_info(models_dir / name) for name in model_names(models_dir)]


def show(name: str, models_dir: Path) -> ModelInfo:
    """One model of the library, or one in a folder. Raises NotFoundError."""
    return _info(resolve(name, models_dir))


def check(name: str, models_dir: Path, progress: Progress = silent) -> CheckReport:
    """Compare a model's files with what they were when it was pulled, byte by byte.

    Raises IntegrityError naming every file that differs or is missing, NotFoundError where there
    is no such model or nothing was recorded about it.
    """
    path = resolve(name, models_dir)
    manifest = read_manifest(path)
    if manifest is None:
        raise NotFoundError(
            f"nothing was recorded about the files of {path}",
            f"`cacheblend models pull {path}` copies it into the library, with a record",
        )
    wrong = differences(path, manifest, progress)
    if wrong:
        raise IntegrityError(
            f"model {path.name} is damaged: {', '.join(wrong)}",
            f"run `cacheblend models rm {path.name}`, then pull {manifest.origin} again",
        )
    sizes = [record.bytes for record in manifest.files.values()]
    return CheckReport(path.name, len(sizes), sum(sizes))


def rm(name: str, models_dir: Path) -> int:
    """Remove a model from the library and return the bytes freed. Raises NotFoundError."""
    path = model_dir(models_dir, name)
    if not path.is_dir():
        raise _not_found(name, models_dir)
    freed = _bytes_of(path)
    take_away(models_dir, name)
    return freed


def resolve(name_or_path: str, models_dir: Path) -> Path:
    """The folder of a model: one of the library by name or by where it came from, or any folder
    with a config.json by path. Raises NotFoundError with what to do."""
    given = Path(name_or_path).expanduser()
    plain = "/" not in name_or_path and not name_or_path.startswith((".", "~"))
    if plain and name_or_path in model_names(models_dir):
        return models_dir / name_or_path
    if (given / "config.json").is_file():
        return given
    if given.is_dir():
        raise NotFoundError(
            f"{name_or_path}: no config.json there", "give the folder of a model, or a model's name"
        )
    for name in model_names(models_dir):
        try:
            manifest = read_manifest(models_dir / name)
        except IntegrityError:
            continue  # `models ls` shows it
        if manifest is not None and manifest.origin == name_or_path:
            return models_dir / name
    raise _not_found(name_or_path, models_dir)


def ensure_default(
    models_dir: Path,
    *,
    offline: bool,
    say: Callable[[str], None],
    progress: Progress = silent,
) -> Path:
    """The folder of the default model, which is got first where it is missing; `say` is told so.

    Raises NotFoundError where it is missing and `offline` forbids getting it, and what `pull`
    raises.
    """
    if DEFAULT in model_names(models_dir):
        return models_dir / DEFAULT
    if offline:
        raise NotFoundError(
            f"the default model {DEFAULT} is not here, and the setting offline is on",
            f"run `cacheblend models pull {DEFAULT}` with a network",
        )
    entry = CATALOGUE[DEFAULT]
    size = entry.download_bytes / 1e6
    say(f"getting the default model: {entry.about} ({entry.licence}, {size:.0f} MB to download)")
    return pull(DEFAULT, models_dir, progress=progress)


def _info(path: Path) -> ModelInfo:
    config, manifest, parameters, problems = None, None, 0, []
    try:
        config = load_config(path)
        parameters = sum(parameters_of(path / name) for name in weight_files(path))
    except (CacheblendError, OSError) as error:
        problems.append(str(error))
    try:
        manifest = read_manifest(path)
    except (CacheblendError, OSError) as error:
        problems.append(str(error))
    return ModelInfo(
        path.name, path, _bytes_of(path), config, parameters, manifest, "; ".join(problems)
    )


def _bytes_of(path: Path) -> int:
    return sum(file.stat().st_size for file in path.iterdir() if file.is_file())


def _not_found(name: str, models_dir: Path) -> NotFoundError:
    here = model_names(models_dir)
    if name in CATALOGUE:
        hint = f"run `cacheblend models pull {name}`"
    elif near := get_close_matches(name, [*here, *CATALOGUE], n=1, cutoff=0.5):
        get = "" if near[0] in here else f" `cacheblend models pull {near[0]}` gets it"
        hint = f"did you mean {near[0]}?{get}"
    elif "/" in name and not name.startswith((".", "/", "~")):
        hint = f"run `cacheblend models pull {name}`"
    else:
        hint = "`cacheblend models ls` shows those that are here"
    return NotFoundError(f"no model {name!r} in {models_dir}", hint)
