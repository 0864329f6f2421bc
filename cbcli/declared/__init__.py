"""The settings, each declared once, in a file of this folder for each subject.

A new setting is one field there: it is then a key of the settings files, a variable
`CACHEBLEND_NAME`, a line of `config show` and of the schema, and a flag of every command that has
its group (see `cbcli.flags`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields, replace
from typing import Any

from cbcli.declaration import Declared, Origin
from cbcli.declared.answers import AnswerSettings
from cbcli.declared.blending import LOADERS as LOADERS
from cbcli.declared.blending import POLICIES as POLICIES
from cbcli.declared.blending import BlendSettings
from cbcli.declared.documents import DocumentSettings
from cbcli.declared.machine import MachineSettings
from cbcli.declared.prompt import PromptSettings


# The fields of the last one come first.
@dataclass(frozen=True)
class Settings(AnswerSettings, BlendSettings, DocumentSettings, PromptSettings, MachineSettings):
    """What the user wants, from all the layers. Made by `load_settings` only."""

    origins: Mapping[str, Origin] = field(default_factory=dict, repr=False)

    def origin(self, name: str) -> Origin:
        """Where the value of the setting `name` comes from."""
        return self.origins[name]


def _named(found: Field[Any]) -> Declared:
    declared: Declared = found.metadata["declared"]
    return replace(
        declared,
        name=found.name,
        type=str(found.type),
        flag=declared.flag or "--" + found.name.replace("_", "-"),
    )


DECLARED: Mapping[str, Declared] = {f.name: _named(f) for f in fields(Settings) if f.metadata}
"""Every setting, by its name, in the order in which they are shown."""
