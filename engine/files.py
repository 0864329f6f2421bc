"""Files that are replaced whole or not at all."""

import os
from contextlib import suppress
from pathlib import Path
from secrets import token_hex


def replace_file(file: Path, text: str, *, synced: bool = False) -> None:
    """Puts a text into a file's place, in UTF-8; whoever reads it meanwhile gets the old one or
    the new. Folders are made where they are missing.

    synced: on the disk before the old one goes, for what takes long to make anew. Raises OSError,
    and leaves what was there.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_name(f".{file.name}-{token_hex(6)}")
    try:
        with new.open("x", encoding="utf-8") as opened:
            opened.write(text)
            opened.flush()
            if synced:
                os.fsync(opened.fileno())
        new.replace(file)
    except BaseException:
        with suppress(OSError):
            new.unlink()
        raise
