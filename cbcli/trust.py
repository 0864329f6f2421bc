"""What a project's file may not say by itself.

It comes with the project, and is read in whatever folder one changes into: what would run code of
the project, or send to another machine what is stored, counts only where the user trusts the
folder.
"""

from __future__ import annotations

import json

from cache_store.errors import UsageError
from cbcli.declared import DECLARED, Settings


def check_trusted(settings: Settings, user_file: str) -> None:
    """Raises UsageError for a value from a project's file that is risky, unless the setting
    `trust` names the file's folder or one above it; and for a project's file that sets `trust`.
    user_file: where it can be set."""
    said = settings.origin("trust")
    if said.kind == "project" and settings.trust:
        raise UsageError(
            f"{said.where} sets trust, which a project's file may not", f"set it in {user_file}"
        )
    trusted = {folder.resolve() for folder in settings.trust}
    for name, setting in DECLARED.items():
        origin = settings.origin(name)
        risky = setting.risk and getattr(settings, name) not in setting.harmless
        if origin.kind != "project" or not risky:
            continue
        folder = origin.folder.resolve()
        if trusted.isdisjoint((folder, *folder.parents)):
            raise UsageError(
                f"{origin.where} sets {name}, which {setting.risk}: a project's file may do so "
                "only in a folder you trust",
                f"look at it, then write trust = [{json.dumps(str(folder), ensure_ascii=False)}] "
                f"into {user_file}; or set {name} there, by {setting.variable} or by a flag",
            )
