"""Bytes to text: telling text from binary, and which encoding it is in."""

from __future__ import annotations

import codecs
import re
import unicodedata
from dataclasses import dataclass

HEAD_BYTES = 8192
_SAMPLE_BYTES = 256 * 1024
_CONTROL_SHARE = 0.1
_BROKEN_SHARE = 0.1
# Bytes below 0x20 that text does hold: backspace to carriage return, and escape.
_CONTROL_BYTES = bytes(set(range(0x20)) - set(range(0x08, 0x0E)) - {0x1B}) + b"\x7f"
_BOMS = [  # UTF-32 first: its mark begins with UTF-16's
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
]
_OLD_ENCODINGS = [
    *["cp1252", "cp1250", "cp1251", "cp1253", "cp1254", "cp1255", "cp1256", "cp1257", "cp1258"],
    *["iso8859_2", "iso8859_5", "iso8859_15", "koi8_r", "mac_roman", "tis_620"],
    *["cp932", "euc_jp", "iso2022_jp", "gb18030", "big5", "cp949"],
]
_NO_CHARSETS = ("unicode-escape", "raw-unicode-escape", "utf-7", "idna", "punycode", "undefined")
_STRAY = re.compile("[\udc80-\udcff]")  # a byte that is not UTF-8, as surrogateescape has it
_ASCII = bytes(range(0x80))
_WIDE_ENCODINGS = (("utf-32-le", 4), ("utf-32-be", 4), ("utf-16-le", 2), ("utf-16-be", 2))


@dataclass(frozen=True)
class Decoded:
    """A file's text, lines ended by LF, and what had to be done to read it."""

    text: str
    notes: tuple[str, ...] = ()


def is_binary(raw: bytes) -> bool:
    """Whether `raw`, a file or its first `HEAD_BYTES`, is anything but text."""
    if any(raw.startswith(bom) for bom, _ in _BOMS):
        return False  # told when decoding
    if b"\0" in raw:
        return wide_encoding(raw) is None
    sample = raw[:_SAMPLE_BYTES]
    controls = len(sample) - len(sample.translate(None, _CONTROL_BYTES))
    return controls > _CONTROL_SHARE * len(sample)


def wide_encoding(raw: bytes) -> str | None:
    """The UTF-16 or UTF-32 that `raw` is written in without saying so by a mark, if it is."""
    sample = raw[:HEAD_BYTES]
    sample = sample[: len(sample) // 4 * 4]
    if len(sample) < 4:
        return None
    zeros = sample.count(0)
    controls = len(sample) - len(sample.translate(None, _CONTROL_BYTES))
    if sample.isascii() and controls == zeros < len(sample) / 4:
        return None  # text with stray zeros: by twos its letters would look like Chinese
    for encoding, width in _WIDE_ENCODINGS:
        try:
            text = sample.decode(encoding)
        except UnicodeDecodeError as error:
            cut = width == 2 and error.end >= len(sample) and error.start >= len(sample) - 2
            if not cut:  # the sample may end between two surrogates
                continue
            text = sample[: error.start].decode(encoding)
        if text and _looks_written(text):
            return encoding
    return None


def decode(raw: bytes, declared: str | None = None) -> Decoded | None:
    """The text of `raw`; None where no encoding fits. declared: what the file says it is in,
    believed where it is neither marked nor UTF-8."""
    for bom, encoding in _BOMS:
        if raw.startswith(bom):
            return _decode_as(raw[len(bom) :], encoding)
    try:
        return _decoded(raw.decode()) if b"\0" not in raw else _decode_wide(raw)
    except UnicodeDecodeError as error:
        cut = error.reason == "unexpected end of data" and not raw[: error.start].isascii()
        if cut:  # UTF-8 to its end, and there the file stops inside a character
            return _decoded(raw.decode(errors="replace"))
    if b"\0" in raw and (wide := _decode_wide(raw)):
        return wide
    mixed = _decode_mixed(raw)
    if mixed is not None:
        return mixed
    if declared and _is_charset(declared):
        found = _decode_as(raw, declared)
        if found is not None:
            return found
    return _decode_as(raw, _guess(raw))


def _is_charset(name: str) -> bool:
    """Whether files are written in an encoding of this name; some are Python's own."""
    try:
        return codecs.lookup(name).name not in _NO_CHARSETS
    except (LookupError, ValueError):
        return False


def _decode_wide(raw: bytes) -> Decoded | None:
    encoding = wide_encoding(raw)
    return _decode_as(raw, encoding) if encoding else None


def _decode_mixed(raw: bytes) -> Decoded | None:
    """UTF-8 with some bytes in it that are not, as when files were joined: those are read as
    Windows-1252. None where so few characters are UTF-8 that the file is something else."""
    valid = len(raw.decode(errors="ignore"))
    wide = valid - (len(raw) - len(raw.translate(None, _ASCII)))
    text = raw.decode(errors="surrogateescape")
    strays = len(text) - valid
    if not 0 < strays < wide:
        return None

    def western(found: re.Match[str]) -> str:
        return bytes([ord(found[0]) & 0xFF]).decode("cp1252", "replace")

    what = "1 byte that is" if strays == 1 else f"{strays} bytes that are"
    return _decoded(_STRAY.sub(western, text), f"{what} not UTF-8, read as Windows-1252")


def _guess(raw: bytes) -> str:
    """The likeliest old encoding; empty when none fits."""
    from charset_normalizer import from_bytes

    sample = raw[:_SAMPLE_BYTES]
    if len(raw) > len(sample):  # a line's end is never inside a character
        sample = sample[: sample.rfind(b"\n") + 1] or sample
    matches = from_bytes(sample, cp_isolation=_OLD_ENCODINGS)
    best = matches.best()
    if best is None:
        return ""
    # A few accents fit several code pages equally well; then it is the commonest one.
    rank = (best.chaos, -best.coherence)
    equal = [match for match in matches if (match.chaos, -match.coherence) == rank]
    common = any("cp1252" in match.could_be_from_charset for match in equal)
    return "cp1252" if common else best.encoding


def _decode_as(raw: bytes, encoding: str) -> Decoded | None:
    notes: tuple[str, ...] = ()
    try:
        text = raw.decode(encoding)
    except UnicodeDecodeError:
        text = raw.decode(encoding, errors="replace")
        broken = text.count("\ufffd")
        if broken > _BROKEN_SHARE * len(text):
            return None
        notes = (f"{broken} damaged character{'s' * (broken != 1)}, shown as \ufffd",)
    except (LookupError, ValueError):  # no such encoding, or none of text
        return None
    return None if "\0" in text else _decoded(text, *notes)


def _decoded(text: str, *notes: str) -> Decoded | None:
    if "\0" in text:
        return None
    return Decoded(text.replace("\r\n", "\n").replace("\r", "\n"), notes)


def _looks_written(text: str) -> bool:
    """Whether nearly all characters are ones people write, and of few scripts."""
    blocks: dict[int, int] = {}
    for char in text:
        code = ord(char)
        if code < 0x20 and char not in "\t\n\r\f\x1b":
            return False
        if unicodedata.category(char) in ("Cn", "Co", "Cs"):
            return False
        # A kilobyte of code points; what belongs to Chinese, Japanese and Korean is one.
        block = 0x4E00 if 0x2E80 <= code < 0xD7FF or code >= 0xF900 else code >> 10
        blocks[block] = blocks.get(block, 0) + 1
    common = sum(sorted(blocks.values(), reverse=True)[:3])
    # Line ends, spaces, digits: any two bytes of text look like a Chinese character, but not these.
    plain = sum(map(text.count, " \n\t,.0123456789ae"))
    return plain >= 0.01 * len(text) and common >= 0.95 * len(text)
