"""Reading from ZIP archives that may be made to do harm."""

from __future__ import annotations

import io
import zipfile

from engine.documents.content import Unconvertible

MAX_UNPACKED = 512 * 2**20
MAX_MEMBERS = 20_000


class Archive:
    """A ZIP file in memory, read member by member; its paths lead nowhere but into it."""

    def __init__(self, raw: bytes) -> None:
        """Raises Unconvertible for what is damaged, or unpacks to more than is held in memory."""
        try:
            self._zip = zipfile.ZipFile(io.BytesIO(raw))
        except Exception as error:  # zipfile raises a dozen kinds for what is damaged
            raise Unconvertible("is damaged: its archive can't be opened") from error
        infos = self._zip.infolist()
        # A member gives no more than it says: zipfile stops there.
        if len(infos) > MAX_MEMBERS or sum(info.file_size for info in infos) > MAX_UNPACKED:
            raise Unconvertible(f"unpacks to more than {MAX_UNPACKED // 2**20} MiB")
        self.names = [info.filename for info in infos]

    def read(self, name: str, limit: int = MAX_UNPACKED) -> bytes:
        """Raises Unconvertible where there is no such member, or it is damaged, encrypted, or
        larger than `limit`."""
        try:
            info = self._zip.getinfo(name)
        except KeyError:
            raise Unconvertible(f"is damaged: it lacks {name}") from None
        if info.flag_bits & 1:
            raise Unconvertible("is encrypted; save it without its password")
        if info.file_size > limit:
            raise Unconvertible(f"is too large: {name} unpacks to {info.file_size // 2**20} MiB")
        try:
            return self._zip.read(info)
        except Exception as error:
            raise Unconvertible(f"is damaged: {name} can't be unpacked") from error
