"""The documented JSON Schemas, and the command tree that they are to be of."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import typer
from jsonschema import Draft202012Validator
from jsonschema_specifications import REGISTRY
from referencing import Registry, Resource

from cbcli.main import app

FOLDER = Path(__file__).parents[2] / "docs/reference/schemas"
RECORDS = "records"  # has definitions alone
SETTINGS = "config"  # of settings files; see test_settings_schema.py

# Commands whose document is another one with a flag: (command, flag) to the schema's name.
VARIANTS = {
    ("ingest", "--dry-run"): "ingest-dry-run",
    ("ingest", "--type-list"): "ingest-type-list",
    ("store-ls", "--documents"): "store-ls-documents",
    ("calibrate", "--device-table"): "calibrate-device-table",
    ("run", "--output"): "run-report",
    ("run", "-o"): "run-report",
}
# What is printed on stderr, by any command.
BESIDE = ("error", "warning", "progress")


@cache
def commands() -> Mapping[tuple[str, ...], Any]:
    """Every command that can be run, by its words, as the command line has it."""
    return dict(_walk(typer.main.get_command(app), ()))


def _walk(command: Any, words: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if not hasattr(command, "list_commands"):
        yield words, command
        return
    if command.invoke_without_command:
        yield words, command
    context = command.context_class(command, info_name=" ".join(words))
    for name in command.list_commands(context):
        yield from _walk(command.get_command(context, name), (*words, name))


def schema_name(args: Sequence[str]) -> str:
    """The schema of what a command line with --json prints."""
    words: tuple[str, ...] = ()
    for word in args:
        if not any(known[: len(words) + 1] == (*words, word) for known in commands()):
            break
        words = (*words, word)
    name = "-".join(words)
    return next((VARIANTS[key] for key in VARIANTS if key[0] == name and key[1] in args), name)


def names() -> list[str]:
    """Of all schemas of what is printed."""
    return sorted(path.stem for path in FOLDER.glob("*.json") if path.stem != SETTINGS)


@cache
def schema(name: str) -> Any:
    return json.loads((FOLDER / f"{name}.json").read_text("utf-8"))


@cache
def _registry() -> Registry[Any]:
    resources = ((f"{name}.json", Resource.from_contents(schema(name))) for name in names())
    return REGISTRY.with_resources(resources)


@cache
def validator(name: str, part: str = "") -> Draft202012Validator:
    """part: one of its definitions, such as a line of --jsonl."""
    wanted = {"$ref": f"{name}.json" + (f"#/$defs/{part}" if part else "")}
    return Draft202012Validator(wanted, registry=_registry())


def check(name: str, document: object, part: str = "") -> None:
    """Fails with what is wrong and where, for a document that is not as documented."""
    problems = [
        f"{name}: at {error.json_path}: {error.message[:300]}"
        for error in validator(name, part).iter_errors(document)
    ]
    assert not problems, "\n".join(problems)
