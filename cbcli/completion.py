"""What a shell offers for a value: models, chunks, documents, collections, profiles, names.

Each is given to Typer as `autocompletion`. They are quick, import nothing heavy, make nothing, and
offer nothing where something fails: there is no store, a settings file is wrong. What is offered
goes through a shell's `eval`, so names with other characters than plain ones are left out, and of
a text only letters, digits and the plainest marks are shown.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import typer

from cbcli import values
from cbcli.declaration import Declared

Offers = list[tuple[str, str]]
"""Values, each with a few words on it."""
Find = Callable[[Mapping[str, object], str], Iterable[tuple[str, str]]]

MOST = 100
DIGITS = 12  # of a chunk's id
TEXT = 60  # characters of a chunk's text
_PLAIN = re.compile(r"[\w./@+,=-]+")


def completer(find: Find) -> Callable[[typer.Context, str], Offers]:
    """What Typer calls, of a function that gets the values given so far, by the names of the
    command's parameters, and the beginning of the one that is looked for."""

    @functools.wraps(find, assigned=("__name__", "__doc__"))
    def complete(ctx: typer.Context, incomplete: str) -> Offers:
        found: dict[str, str] = {}
        try:
            for value, about in find(ctx.params, incomplete):
                if value.startswith(incomplete) and _PLAIN.fullmatch(value):
                    found.setdefault(value, re.sub(r"[^\w,.-]+", " ", about).strip())
                if len(found) == MOST:
                    break
        except Exception:  # whatever it is: nobody asked for an error
            return []
        return list(found.items())

    del complete.__wrapped__  # Typer reads this one's signature
    return complete


def _words(*words: str) -> Callable[[typer.Context, str], Offers]:
    return completer(lambda given, incomplete: ((word, "") for word in words))


@completer
def models(given: Mapping[str, object], incomplete: str) -> Iterator[tuple[str, str]]:
    """Models that are here."""
    from engine.library.home import model_names

    for name in model_names(_settings(given).models_dir):
        yield name, ""


@completer
def chunks(given: Mapping[str, object], incomplete: str) -> Iterator[tuple[str, str]]:
    """The first digits of chunks' ids, with the beginning of the text."""
    wanted = incomplete.lower()
    if set(wanted) - set("0123456789abcdef"):
        return
    with closing(_catalog(given)) as catalog:
        for chunk_id, text in catalog.chunks_beginning(wanted, MOST, TEXT):
            yield chunk_id[: max(DIGITS, len(wanted))], text


@completer
def documents(given: Mapping[str, object], incomplete: str) -> Iterator[tuple[str, str]]:
    """Documents of the store, as they would be written from here."""
    from cbcli.session import shown_source

    with closing(_catalog(given)) as catalog:
        for start in dict.fromkeys((incomplete, str(Path.cwd() / incomplete))):
            if start == str(Path.cwd()):
                start += "/"
            for source in catalog.sources_beginning(start, MOST):
                yield from ((source, ""), (shown_source(source), ""))


@completer
def collections(given: Mapping[str, object], incomplete: str) -> Iterator[tuple[str, str]]:
    """Collections of the store."""
    with closing(_catalog(given)) as catalog:
        for info in catalog.collection_infos():
            yield info.name, f"{info.documents} documents"


@completer
def profiles(given: Mapping[str, object], incomplete: str) -> Iterator[tuple[str, str]]:
    """Profiles of the settings files."""
    from cbcli.settings import settings_files

    for file in settings_files():
        for name in file.profiles:
            yield name, file.kind


@completer
def types(given: Mapping[str, object], incomplete: str) -> Iterator[tuple[str, str]]:
    """Types of files."""
    from engine.documents.filetypes import file_types

    for name, patterns in file_types().items():
        yield name, ", ".join(patterns[:4]).replace("*.", ".")


@completer
def traces(given: Mapping[str, object], incomplete: str) -> Iterator[tuple[str, str]]:
    """Files of traces, and the folders on the way to them."""
    folder, _, _ = incomplete.rpartition("/")
    above = f"{folder}/" if "/" in incomplete else ""
    for path in sorted(Path(above or ".").iterdir()):
        if path.suffix == ".cbtrace":
            yield above + path.name, ""
        elif path.is_dir() and not path.name.startswith("."):
            yield f"{above}{path.name}/", ""


def of_setting(setting: Declared) -> Callable[[typer.Context, str], Offers] | None:
    """What is offered for a setting's flag; None: files, as shells do."""
    if setting.name in _OF_SETTINGS:
        return _OF_SETTINGS[setting.name]
    if isinstance(setting.kind, values.choice | values.policy):
        return _words(*setting.kind.names)
    return None


_OF_SETTINGS: Mapping[str, Callable[[typer.Context, str], Offers]] = {
    "model": models,
    "collections": collections,
    "profile": profiles,
    "types": types,
    "not_types": types,
    "retriever": _words(*values.RETRIEVERS),
    "ratio": _words("auto"),
    "device": _words("auto", "cpu", "cuda", "mps"),
    "devices": _words("cpu", "cuda"),
    "remote": _words("none"),
}


def _settings(given: Mapping[str, object]) -> Any:
    from cbcli.settings import load_settings

    names = ("store", "models_dir", "profile")
    return load_settings({name: given.get(name) for name in names})


def _catalog(given: Mapping[str, object]) -> Any:
    """The catalog of the store, to be read and closed. Raises FileNotFoundError where there is
    none."""
    from cache_store.catalog import CATALOG_NAME, Catalog

    path = _settings(given).store / CATALOG_NAME
    if not path.is_file():
        raise FileNotFoundError(path)
    return Catalog(path, read_only=True, patience=0.5)
