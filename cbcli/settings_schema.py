"""The JSON Schema of settings files, made from the settings as they are declared."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from cache_store.collection_name import MAX_NAME
from cbcli import values
from cbcli.declared import DECLARED
from cbcli.settings import default_of
from cbcli.settings_file import PROFILES, USE
from cbcli.settings_text import plain

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_SOME_TEXT: Schema = {"type": "string", "minLength": 1}
_SIZE = r"^ *([0-9]+(\.[0-9]+)?|\.[0-9]+) *([kmgtKMGT][iI]?)?[bB]? *$"
_SOME_SIZE = _SIZE.replace("^ *", "^ *(?=[0-9.]*[1-9])", 1)  # above 0
_DEVICE = r"(auto|cpu|cuda(:[0-9]{1,3})?|mps)"
_PLACE = r"(cpu|cuda(:[0-9]{1,3})?|mps)"
_COLLECTION = rf"[A-Za-z0-9._/-]{{1,{MAX_NAME}}}"
_SHARE: Schema = {"type": "number", "minimum": 0, "maximum": 1}
_SHARE_TEXT = r"\s*(0?\.[0-9]+|0\.?|1(\.0*)?)\s*"
_SEEN: Schema = {"type": "string", "pattern": r"\S"}
_NAMED: Schema = {"type": "string", "pattern": r"^\s*[^,\s][^,]*$"}
_MOST = 10**18  # bytes
_LAYER: Schema = {"type": "integer", "minimum": 1}
_NAME: Schema = {"type": "string", "pattern": "^([A-Za-z0-9_-]{1,80})?$"}


def _listed(item: Schema, text: str) -> Schema:
    """A list, or one of its items, or a text in which commas stand between them."""
    joined = {"type": "string", "pattern": f"^{text}(,{text})*$"}
    return {"anyOf": [item, joined, {"type": "array", "items": item}]}


_SCHEMAS: Mapping[values.Kind, Schema] = {
    values.text: _TEXT,
    values.some_text: _SOME_TEXT,
    values.folder: _SOME_TEXT,
    values.folders: {"anyOf": [_SOME_TEXT, {"type": "array", "items": _SOME_TEXT}]},
    values.model: _SEEN,
    values.remote: _SOME_TEXT,
    values.retriever: {
        "anyOf": [
            {"enum": list(values.RETRIEVERS)},
            {"type": "string", "pattern": r"^\S.*:[A-Za-z_]\w*$"},
        ]
    },
    values.flag: {"type": "boolean"},
    values.pager: {"type": ["boolean", "string"]},
    values.device: {"type": "string", "pattern": f"^{_DEVICE}$"},
    values.devices: _listed(
        {"type": "string", "pattern": rf"^\s*{_PLACE}\s*$"}, rf"\s*{_PLACE}\s*"
    ),
    values.size: {
        "anyOf": [
            {"type": "integer", "minimum": 1, "maximum": _MOST},
            {"type": "string", "pattern": _SOME_SIZE},
        ]
    },
    values.amount: {
        "anyOf": [
            {"type": "integer", "minimum": 0, "maximum": _MOST},
            {"type": "string", "pattern": _SIZE},
        ]
    },
    values.day: {"type": "string", "pattern": "^[0-9]{4}-[0-9]{2}-[0-9]{2}$"},
    values.ratios: {"anyOf": [{"const": "auto"}, *_listed(_SHARE, _SHARE_TEXT)["anyOf"]]},
    values.share: {"anyOf": [_SHARE, {"type": "string", "pattern": f"^{_SHARE_TEXT}$"}]},
    values.layers: _listed(_LAYER, r"\s*[1-9][0-9]*\s*"),
    values.collections: {
        "anyOf": [
            {"type": "string", "pattern": rf"^({_COLLECTION}(\s*,\s*{_COLLECTION})*)?$"},
            {"type": "array", "items": {"type": "string", "pattern": f"^{_COLLECTION}$"}},
        ]
    },
    values.names: _listed(_NAMED, r"\s*[^,\s][^,]*"),
    values.globs: {"anyOf": [_SOME_TEXT, {"type": "array", "items": _SOME_TEXT}]},
    values.texts: {"anyOf": [_TEXT, {"type": "array", "items": _SOME_TEXT}]},
    values.profile_name: _NAME,
}


def schema_of(kind: values.Kind) -> Schema:
    """What a settings file can hold for a kind of setting. Raises KeyError for a kind that has no
    schema yet."""
    if isinstance(kind, values.choice):
        return {"enum": list(kind.names)}
    if isinstance(kind, values.policy):
        names = "|".join(re.escape(name) for name in kind.names)
        return {"type": "string", "pattern": rf"^\s*({names})\s*(:.*)?$"}
    if isinstance(kind, values.whole):
        top = {} if kind.high is None else {"maximum": kind.high}
        return {"type": "integer", "minimum": kind.low, **top}
    if isinstance(kind, values.number):
        least = "exclusiveMinimum" if kind.above else "minimum"
        return {"type": "number", least: kind.low, "maximum": kind.high}
    return dict(_SCHEMAS[kind])


def settings_schema() -> Schema:
    """The whole schema, of draft 2020-12. What values must have to go together isn't in it."""
    own = {name: _property(name) for name in DECLARED if name != PROFILES}
    profiles: Schema = {
        "type": "object",
        "description": f'Profiles, each a table of settings; {USE} = "NAME" chooses one',
        "properties": {USE: _NAME},
        "additionalProperties": {"$ref": "#/$defs/profile"},
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Settings of cacheblend: cacheblend.toml and the user's config.toml",
        "type": "object",
        "properties": {**own, PROFILES: {"anyOf": [_property(PROFILES), profiles]}},
        "additionalProperties": False,
        "$defs": {
            "profile": {
                "type": "object",
                "properties": {name: {"$ref": f"#/properties/{name}"} for name in own},
                "additionalProperties": False,
            }
        },
    }


def _property(name: str) -> Schema:
    setting = DECLARED[name]
    found: Schema = {"description": setting.help, **schema_of(setting.kind)}
    if setting.default is not None and not str(setting.default).startswith("{data}"):
        found["default"] = plain(name, default_of(setting))
    return found
