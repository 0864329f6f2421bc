"""How a setting is declared, and where the value of one comes from."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cbcli.values import Kind

PREFIX = "CACHEBLEND_"

# Kinds of origin, the highest first; a line is one of `run`.
ORIGINS = ("line", "flag", "environment", "project", "user", "default")


@dataclass(frozen=True)
class Origin:
    """Where a value comes from. `kind`: flag, environment, project, user or default; `where`: the
    flag, variable or file; `above`: it is a profile's, above what its file says itself."""

    kind: str
    where: str = ""
    above: bool = False

    @property
    def strength(self) -> int:
        """Greater where the place is stronger; 0 for a default."""
        return 2 * (len(ORIGINS) - 1 - ORIGINS.index(self.kind)) + self.above

    @property
    def folder(self) -> Path:
        """The folder of the file, of a value that comes from one."""
        return Path(self.where).parent  # no profile has a slash in its name

    def __str__(self) -> str:
        return f"{self.kind} {self.where}".rstrip()


# Groups of settings that a command takes together, as flags; see `cbcli.flags.with_settings`.
FILES = "FILES"
CHUNKING = "CHUNKING"
RETRIEVAL = "RETRIEVAL"
BLEND = "BLEND"
TRACE = "TRACE"
PROMPT = "PROMPT"
SAMPLING = "SAMPLING"
STORE = "STORE"
MODEL = "MODEL"
ENGINE = "ENGINE"


@dataclass(frozen=True)
class Declared:
    """One setting as it is declared.

    default: what `kind` reads the value from; "{data}" in it is the folder of the user's data.
    help: what it is, without a full stop, in settings files and beside its flag. flag: "" for
    --name. short: one dash and a letter. off: the flag that says no, of a switch; "" for --no-name.
    repeat: whether the flag is given once for every item; count: whether how often it is given is
    its value. metavar: what stands for the value in
    help. group: one of those above; "" where commands name it by itself. example: shown as TOML
    where the default is to be unset. risk: what values do that a project's file may not do by
    itself, "runs code"; all do but those that are harmless (see `cbcli.trust`).
    """

    default: object
    kind: Kind
    help: str
    flag: str = ""
    short: str = ""
    off: str = ""
    repeat: bool = False
    count: bool = False
    metavar: str | None = None
    group: str = ""
    example: str = ""
    risk: str = ""
    harmless: tuple[object, ...] = ()
    name: str = ""
    type: str = ""
    """The annotation of the field: "int | None"."""

    @property
    def variable(self) -> str:
        return PREFIX + self.name.upper()


def setting(default: Any, kind: Kind, help: str, **more: Any) -> Any:
    """A field of `Settings`; see `Declared`."""
    return field(metadata={"declared": Declared(default, kind, help, **more)})
