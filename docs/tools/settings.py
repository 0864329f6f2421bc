"""The table of all settings, which cog puts into docs/reference/settings.md: `make reference`."""

from __future__ import annotations

from cbcli.declared import DECLARED
from cbcli.settings import default_of
from cbcli.settings_text import as_toml, plain


def settings_table() -> str:
    """Markdown: a row for each setting, in the order of `config show`."""
    rows = ["| key | default | what |", "|---|---|---|"]
    for setting in DECLARED.values():
        fixed = str(setting.default).startswith("{data}")
        default = (
            f"{str(setting.default).removeprefix('{data}/')} in the data folder"
            if fixed
            else f"`{as_toml(plain(setting.name, default_of(setting)))}`"
            if setting.default is not None
            else "unset"
        )
        rows.append(f"| `{setting.name}` | {_cell(default)} | {_cell(setting.help)} |")
    return "\n".join(rows) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
