"""Settings as text: their values in JSON and TOML, and a file to start from."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

from cache_store.tiers.addresses import masked
from cbcli.declaration import PREFIX, Declared
from cbcli.declared import DECLARED
from cbcli.settings import default_of
from cbcli.settings_file import PROFILES, USE
from cbcli.values import AUTO

_PROFILES = f"""\
# Profiles: keys that count above those before. --profile NAME and {PREFIX}PROFILE choose one too.
# [{PROFILES}]
# {USE} = "fast"
# [{PROFILES}.fast]
# ratio = 0.05
"""


def template() -> str:
    """A settings file with every setting commented out, at its default or with an example."""
    parts = [
        "# Settings of cacheblend. A command's flags and CACHEBLEND_* variables are stronger.\n"
        "# Relative paths are relative to this file.\n"
    ]
    settings = [s for s in DECLARED.values() if s.name != PROFILES]
    parts += [f"# {s.help}.\n# {s.name} = {_in_template(s)}\n" for s in settings]
    return "\n".join([*parts, _PROFILES])


def as_toml(value: Any) -> str:
    """`value` as TOML writes it, "" for None."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(as_toml(item) for item in value)}]"
    if isinstance(value, int | float | Decimal):
        return str(value)
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")


def _in_template(setting: Declared) -> str:
    return setting.example or as_toml(plain(setting.name, default_of(setting)))


def plain(name: str, value: Any) -> Any:
    """The value for JSON and TOML: paths as text, a list only where there are several ratios, and
    no password."""
    if name == "remote":
        return value and masked(value)
    if name == "ratio" and value == AUTO:
        return "auto"
    if isinstance(value, tuple):
        items = [float(i) if isinstance(i, Decimal) else plain("", i) for i in value]
        return items[0] if len(items) == 1 and name != "stop" else items
    return str(value) if isinstance(value, Path) else value
